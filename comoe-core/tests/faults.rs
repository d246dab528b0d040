//! A store whose reads fail: the error names the expert and what the system said, and the cache serves nothing wrong.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Device, Tensor};
use comoe_core::store::{Directory, MemorySource, RecordIndex, RecordSource};
use comoe_core::{Capacity, Error, ExpertCache, ExpertFormat, ExpertLayout, ExpertSpec, ExpertStore, Result};

const EXPERTS: u32 = 6;
const SPEC: (usize, usize) = (32, 32);

/// How one record's reads fail.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The disk says no.
    Io,
    /// There is less of the file than there was.
    Short,
}

/// Records that can be read until `broken`.
struct Failing {
    records: MemorySource,
    broken: AtomicBool,
    fault: Fault,
}

impl RecordSource for Failing {
    fn directory(&self) -> &Directory {
        self.records.directory()
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        if record.0 != 3 || !self.broken.load(Ordering::SeqCst) {
            return self.records.read(record, out);
        }
        // Half of it is there already.
        out[..256].fill(0x7f);
        match self.fault {
            Fault::Io => Err(Error::Io { path: "/disk/m".into(), source: io::Error::from_raw_os_error(5) }),
            Fault::Short => Err(Error::TruncatedFile { path: "/disk/m".into(), promised: 512, found: 256 }),
        }
    }
}

fn cache(fault: Fault, capacity: Capacity) -> Result<(ExpertCache, Arc<Failing>)> {
    let spec = ExpertSpec::swiglu(SPEC.0, SPEC.1);
    let bytes = ExpertLayout::new(&spec, ExpertFormat::Bf16).record_bytes;
    let directory = Directory::new([(0, EXPERTS as usize, bytes)]).unwrap();
    // BF16 numbers around 1e-2.
    let record = |e: u32| [0x10 + e as u8, 0x3c].into_iter().cycle().take(bytes).collect();
    let records = MemorySource::new(directory, (0..EXPERTS).map(record).collect()).unwrap();
    let source = Arc::new(Failing { records, broken: AtomicBool::new(false), fault });
    let store = ExpertStore::from_source(source.clone(), vec![spec], ExpertFormat::Bf16)?;
    Ok((ExpertCache::builder(store, &Device::Cpu).capacity(capacity).build()?, source))
}

fn forward(cache: &ExpertCache, experts: [u32; 2]) -> Result<Vec<f32>> {
    let x = Tensor::ones((1, SPEC.0), candle_core::DType::F32, &Device::Cpu)?;
    let weights = Tensor::new(&[[0.5f32, 0.5]], &Device::Cpu)?;
    let y = cache.layer(0).forward(&x, &Tensor::new(&[experts], &Device::Cpu)?, &weights)?;
    Ok(y.flatten_all()?.to_vec1()?)
}

#[test]
fn a_read_that_fails_is_named_and_nothing_is_computed_from_it() {
    for (fault, said) in [(Fault::Io, "os error 5"), (Fault::Short, "truncated")] {
        let (cache, source) = cache(fault, Capacity::Slots(2)).unwrap();
        let good = forward(&cache, [3, 1]).unwrap();
        forward(&cache, [0, 2]).unwrap();
        source.broken.store(true, Ordering::SeqCst);
        let e = forward(&cache, [3, 1]).unwrap_err().to_string();
        for part in ["layer 0 expert 3", "/disk/m", said] {
            assert!(e.contains(part), "{part}: {e}");
        }
        // The slot may hold half of a record: nothing is served until the cache is made again.
        source.broken.store(false, Ordering::SeqCst);
        let later = forward(&cache, [3, 1]).unwrap_err().to_string();
        assert!(later.contains("layer 0 expert 3"), "{later}");
        let (again, _) = self::cache(fault, Capacity::Slots(2)).unwrap();
        assert_eq!(forward(&again, [3, 1]).unwrap(), good);
    }
}
