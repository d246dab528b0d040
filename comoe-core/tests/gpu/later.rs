//! Records that are page-locked while tokens are served.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use comoe_core::backend::DriverKind;
use comoe_core::store::{Directory, RecordIndex, RecordSource};
use comoe_core::{CudaOptions, ExpertCache, ExpertFormat, ExpertSpec, Result, Rules};

use crate::backend::{backend, cache, device, options, same};
use crate::conformance::{self, Experts, Make, Noise};
use crate::device::driven;

/// Lets only so many records into the arena; whoever else reads is not held up.
struct Gate {
    source: Arc<dyn RecordSource>,
    open: Arc<AtomicU32>,
}

impl RecordSource for Gate {
    fn directory(&self) -> &Directory {
        self.source.directory()
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        let fills = std::thread::current().name().is_some_and(|name| name.starts_with("comoe-arena"));
        while fills && record.0 >= self.open.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.source.read(record, out)
    }
}

/// Issue 7: answering before everything is page-locked.
#[test]
#[ignore = "needs a CUDA device"]
fn tokens_are_served_while_pages_are_locked() {
    let device = device();
    for (driver, delay_seed) in
        [(DriverKind::Auto, None), (DriverKind::Device, None), (DriverKind::Device, Some(5))]
    {
        let open = Arc::new(AtomicU32::new(0));
        let whole = &|source| backend(&device, source, &CudaOptions::default());
        let late = options(|o| {
            (o.page_lock_later, o.page_lock_chunk) = (true, Some(30_000));
            o.faults.delay_seed = delay_seed;
        });
        let later = &|source| backend(&device, Arc::new(Gate { source, open: open.clone() }), &late);
        let more = |round: usize| {
            open.store(2 * round as u32, Ordering::Release);
            // What was let in is locked soon, not at once.
            std::thread::sleep(Duration::from_millis(20));
        };
        conformance::tokens_are_served_while_pages_are_locked(
            &device,
            Make::one(DriverKind::Device, whole),
            Make::one(driver, later),
            &more,
        );
    }
}

/// A driver that stops half-way leaves the rest to the buffers; a cache that is dropped meanwhile waits for nobody.
#[test]
#[ignore = "needs a CUDA device"]
fn page_locking_ends_early_where_the_driver_refuses_and_where_nobody_wants_it() {
    let device = device();
    let experts = Experts::random(ExpertSpec::swiglu(64, 48), ExpertFormat::INT8, 3, 8, 9);
    let new =
        |later: CudaOptions, driver| cache(&experts, &device, driven(9, 2, driver), &later, Rules::default());
    let whole = new(CudaOptions::default(), DriverKind::Host);
    let mut noise = Noise(3);
    let mut token = |cache: &ExpertCache| {
        let call = |n: usize| Tensor::new(&[[n as u32, (n as u32 + 3) % 8]], &device).expect("ids");
        let ids: Vec<Tensor> = (0..3).map(|_| call(noise.below(8))).collect();
        let x = Tensor::from_vec(noise.floats(64, 1.0), (1, 64), &device).expect("x");
        let weights = Tensor::new(&[[0.75f32, 0.25]], &device).expect("weights");
        let run = |cache: &ExpertCache| {
            cache.run_token(1, 2, || -> Result<Vec<f32>> {
                let mut x = x.clone();
                for (layer, ids) in ids.iter().enumerate() {
                    x = cache.layer(layer).forward(&x, ids, &weights)?;
                }
                Ok(x.flatten_all()?.to_vec1()?)
            })
        };
        assert!(same(&run(cache).expect("a token"), &run(&whole).expect("a token")));
    };
    for driver in [DriverKind::Auto, DriverKind::Device] {
        let refused = options(|o| {
            (o.page_lock_later, o.page_lock_chunk) = (true, Some(30_000));
            o.page_lock_fails_at = Some(70_000);
        });
        let early = new(refused, driver);
        let started = Instant::now();
        while early.page_locking().expect("a GPU").took.is_none() {
            token(&early);
            assert!(started.elapsed() < Duration::from_secs(20));
        }
        (0..20).for_each(|_| token(&early));
        let ended = early.page_locking().expect("a GPU");
        assert!(0 < ended.locked && ended.locked < ended.total, "{ended:?}");
        assert_eq!(early.driver(), if driver == DriverKind::Device { driver } else { DriverKind::Host });
        assert_eq!(early.drives_tokens(1, 2), driver == DriverKind::Device);
        early.check().expect("slots equal the store");

        let later = options(|o| (o.page_lock_later, o.page_lock_chunk) = (true, Some(30_000)));
        let dropped = new(later, driver);
        token(&dropped);
        drop(dropped);
    }
}
