use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device};

use super::kernels::tests::{Noise, random_record, reference};
use super::*;
use crate::expert::{Activation, ExpertLayout, ExpertSpec, WeightOn};
use crate::format::ExpertFormat;
use crate::store::{Directory, RecordIndex};

/// Records in memory, which can be made unreadable.
struct Memory {
    directory: Directory,
    records: Vec<Vec<u8>>,
    unreadable: AtomicBool,
}

impl RecordSource for Memory {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        if self.unreadable.load(Ordering::Relaxed) {
            return Err(Error::bad_file("memory", "is unreadable"));
        }
        out.copy_from_slice(&self.records[record.0 as usize]);
        Ok(())
    }
}

struct Bench {
    spec: ExpertSpec,
    layout: ExpertLayout,
    source: Arc<Memory>,
    backend: CpuBackend,
}

fn bench(spec: ExpertSpec, format: ExpertFormat, experts: usize, slots: usize) -> Bench {
    let (layouts, records): (Vec<_>, Vec<_>) =
        (0..experts).map(|e| random_record(&spec, format, e as u64 + 100)).unzip();
    let layout = layouts[0];
    let directory = Directory::new([(3, experts, layout.record_bytes)]).unwrap();
    let source = Arc::new(Memory { directory, records, unreadable: AtomicBool::new(false) });
    let mut backend = CpuBackend::new(source.clone());
    backend.allocate(slots, layout.record_bytes).unwrap();
    Bench { spec, layout, source, backend }
}

impl Bench {
    fn load(&mut self, pairs: &[(u32, u32)]) {
        let fills: Vec<_> =
            pairs.iter().map(|&(r, s)| Fill { record: RecordIndex(r), slot: SlotId(s) }).collect();
        let ticket = self.backend.fill(Queue::Demand, &[Ticket::DONE], &fills).unwrap();
        self.backend.wait(ticket).unwrap();
    }

    fn ffn(&mut self, x: &Tensor, weights: &[f32], top_k: usize, runs: &[Vec<WorkItem>]) -> Result<Tensor> {
        let work = Work::Ffn { spec: &self.spec, layout: &self.layout, x, weights, top_k };
        self.backend.begin(work)?;
        for items in runs {
            self.backend.run(items)?;
        }
        self.backend.finish()
    }
}

fn item(record: u32, slot: u32, assignments: &[u32]) -> WorkItem {
    WorkItem { record: RecordIndex(record), slot: SlotId(slot), assignments: assignments.to_vec() }
}

fn floats(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn fills_and_runs_equal_direct_computation() {
    for weight_on in [WeightOn::Output, WeightOn::Input] {
        for (hidden, format) in [(40, ExpertFormat::Bf16), (64, ExpertFormat::INT8), (36, ExpertFormat::INT4)]
        {
            let spec = ExpertSpec { weight_on, bias: true, ..ExpertSpec::swiglu(hidden, 24) };
            let mut b = bench(spec, format, 5, 4);
            b.load(&[(0, 2), (3, 0), (4, 3)]);
            // Three tokens, top-2: experts (0, 3), (4, 0), (3, 4).
            let chosen = [0u32, 3, 4, 0, 3, 4];
            let weights = [0.75f32, 0.25, 0.5, 0.125, -1.5, 2.0];
            let input = Noise(5).vec(3 * hidden, 1.0);
            let whole = Tensor::from_vec(input.clone(), (3, hidden), &Device::Cpu).unwrap();
            let runs = [vec![item(3, 0, &[1, 4]), item(0, 2, &[0, 3])], vec![item(4, 3, &[2, 5])]];
            let y = b.ffn(&whole, &weights, 2, &runs).unwrap();
            assert_eq!(y.dims(), [3, hidden]);
            let y = floats(&y);
            for t in 0..3 {
                let mut expected = vec![(0.0f64, 0.0f64); hidden];
                for j in 0..2 {
                    let (record, w) = (&b.source.records[chosen[t * 2 + j] as usize], weights[t * 2 + j]);
                    let (scale, w) = match weight_on {
                        WeightOn::Output => (1.0, f64::from(w)),
                        WeightOn::Input => (w, 1.0),
                    };
                    let x: Vec<f32> = input[t * hidden..][..hidden].iter().map(|x| x * scale).collect();
                    for (e, (v, m)) in expected.iter_mut().zip(reference(&spec, &b.layout, record, &x)) {
                        *e = (e.0 + w * v, e.1 + w.abs() * m);
                    }
                }
                for (y, (e, m)) in y[t * hidden..].iter().zip(expected) {
                    assert!((f64::from(*y) - e).abs() <= 2e-6 * m, "{format} token {t}: {y} {e}");
                }
            }

            // Other slots, another order, other batches, one token at a time: the same bits.
            b.load(&[(4, 0), (0, 1), (3, 3)]);
            let runs =
                [vec![item(0, 1, &[0])], vec![item(4, 0, &[2, 5]), item(3, 3, &[1, 4]), item(0, 1, &[3])]];
            assert_eq!(floats(&b.ffn(&whole, &weights, 2, &runs).unwrap()), y);
            let middle = whole.narrow(0, 1, 1).unwrap();
            let one = b.ffn(&middle, &weights[2..4], 2, &[vec![item(0, 1, &[1]), item(4, 0, &[0])]]).unwrap();
            assert_eq!(floats(&one), y[hidden..2 * hidden]);

            // A view that is not contiguous, and the other dtypes.
            let turned = whole.t().unwrap().contiguous().unwrap().t().unwrap();
            assert_eq!(floats(&b.ffn(&turned, &weights, 2, &runs).unwrap()), y);
            for dtype in [DType::BF16, DType::F16] {
                let rounded = whole.to_dtype(dtype).unwrap();
                let low = b.ffn(&rounded, &weights, 2, &runs).unwrap();
                assert_eq!(low.dtype(), dtype);
                let high = b.ffn(&rounded.to_dtype(DType::F32).unwrap(), &weights, 2, &runs).unwrap();
                assert_eq!(floats(&low), floats(&high.to_dtype(dtype).unwrap()));
            }
        }
    }
}

#[test]
fn slots_hold_copies() {
    let mut b = bench(ExpertSpec::swiglu(32, 16), ExpertFormat::Bf16, 2, 2);
    b.load(&[(0, 0), (1, 1)]);
    b.source.unreadable.store(true, Ordering::Relaxed);
    let x = Tensor::ones((1, 32), DType::F32, &Device::Cpu).unwrap();
    let runs = [vec![item(0, 0, &[0]), item(1, 1, &[1])]];
    let y = floats(&b.ffn(&x, &[1.0, 1.0], 2, &runs).unwrap());
    assert_eq!(floats(&b.ffn(&x, &[1.0, 1.0], 2, &runs).unwrap()), y);
    // One flipped bit in a resident slot must show.
    let mut bytes = vec![0; b.layout.record_bytes];
    b.backend.read_slot(SlotId(1), &mut bytes).unwrap();
    assert_eq!(bytes, b.source.records[1]);
    bytes[b.layout.down.weights + 1] ^= 0x80;
    b.backend.write_slot(SlotId(1), &bytes).unwrap();
    assert_ne!(floats(&b.ffn(&x, &[1.0, 1.0], 2, &runs).unwrap()), y);
    // And a fill now fails by name.
    let ticket =
        b.backend.fill(Queue::Prefetch, &[], &[Fill { record: RecordIndex(1), slot: SlotId(0) }]).unwrap();
    let error = b.backend.wait(ticket).unwrap_err().to_string();
    assert!(error.contains("layer 3 expert 1") && error.contains("unreadable"), "{error}");
}

#[test]
fn gathers_parts_of_records() {
    let records: Vec<Vec<u8>> =
        (0..4u8).map(|r| (0..512u32).map(|i| (i as u8).wrapping_mul(r + 1)).collect()).collect();
    let directory = Directory::new([(0, 4, 512)]).unwrap();
    let source = Arc::new(Memory { directory, records, unreadable: AtomicBool::new(false) });
    let mut backend = CpuBackend::new(source.clone());
    backend.allocate(2, 512).unwrap();
    let fills = [(1, 0), (3, 1)].map(|(r, s)| Fill { record: RecordIndex(r), slot: SlotId(s) });
    let ticket = backend.fill(Queue::Demand, &[], &fills).unwrap();
    backend.wait(ticket).unwrap();
    for (dtype, shape) in [(DType::U8, vec![5, 100]), (DType::U8, vec![512]), (DType::U32, vec![7])] {
        backend.begin(Work::Gather { assignments: 3, dtype, shape: &shape }).unwrap();
        backend.run(&[item(3, 1, &[1]), item(1, 0, &[0, 2])]).unwrap();
        let out = backend.finish().unwrap();
        assert_eq!((out.dtype(), &out.dims()[1..]), (dtype, &shape[..]));
        let bytes = shape.iter().product::<usize>() * dtype.size_in_bytes();
        for (a, record) in [(0, 1), (1, 3), (2, 1)] {
            let part = &source.records[record][..bytes];
            let expected = Tensor::from_raw_buffer(part, dtype, &shape, &Device::Cpu).unwrap();
            assert_eq!(floats(&out.get(a).unwrap()), floats(&expected));
        }
    }
    backend.begin(Work::Gather { assignments: 1, dtype: DType::F32, shape: &[129] }).unwrap();
    let error = backend.run(&[item(3, 1, &[0])]).unwrap_err().to_string();
    assert!(error.contains("516 bytes asked of records of 512"), "{error}");
    assert!(backend.begin(Work::Gather { assignments: 1, dtype: DType::F32, shape: &[0] }).is_err());
}

#[test]
fn misuse_is_refused_and_never_computes() {
    let refused = |r: Result<()>, text: &str| {
        let e = r.unwrap_err().to_string();
        assert!(e.contains(text), "{text}: {e}");
    };
    let spec = ExpertSpec { activation: Activation::GeluTanh, ..ExpertSpec::swiglu(16, 8) };
    let mut b = bench(spec, ExpertFormat::INT8, 3, 2);
    b.load(&[(0, 0)]);
    let x = Tensor::ones((1, 16), DType::F32, &Device::Cpu).unwrap();
    let run = |b: &mut Bench, items: Vec<WorkItem>| b.ffn(&x, &[1.0, 1.0], 2, &[items]).map(|_| ());
    refused(
        run(&mut b, vec![item(1, 1, &[0, 1])]),
        "layer 3 expert 1 was asked for, but slot 1 has not been filled",
    );
    refused(run(&mut b, vec![item(2, 0, &[0, 1])]), "slot 0 holds layer 3 expert 0");
    refused(run(&mut b, vec![item(0, 7, &[0, 1])]), "slot 7");
    refused(run(&mut b, vec![item(9, 7, &[0, 1])]), "of 3 records");
    refused(run(&mut b, vec![item(0, 0, &[0])]), "assignment 1 of 2 was not served");
    refused(run(&mut b, vec![item(0, 0, &[0, 1, 1])]), "assignment 1 is served twice");
    refused(run(&mut b, vec![item(0, 0, &[0, 2])]), "there is no assignment 2");
    refused(run(&mut b, vec![]), "assignment 0 of 2 was not served");
    refused(b.ffn(&x, &[1.0], 2, &[]).map(|_| ()), "expected 1 tokens of 2 weights, found 1");
    let wide = Tensor::ones((1, 17), DType::F32, &Device::Cpu).unwrap();
    refused(b.ffn(&wide, &[1.0, 1.0], 2, &[]).map(|_| ()), "expected [n, 16]");
    let whole = Tensor::ones((1, 16), DType::U32, &Device::Cpu).unwrap();
    refused(b.ffn(&whole, &[1.0, 1.0], 2, &[]).map(|_| ()), "use F32, F16 or BF16");
    refused(b.backend.finish().map(|_| ()), "no work was begun");
    refused(b.backend.run(&[]), "no work was begun");
    refused(b.backend.allocate(1, 512), "allocated already");
    refused(b.backend.read_slot(SlotId(2), &mut [0; 1]), "there are 2 slots");
    let late = Ticket { queue: Queue::Compute, seq: 1000 };
    refused(b.backend.wait(late), "never handed out");
    refused(b.backend.fill(Queue::Demand, &[late], &[]).map(|_| ()), "never handed out");
    let mut bare = CpuBackend::new(b.source.clone());
    refused(bare.wait(Ticket { queue: Queue::Demand, seq: 0 }), "no slots were allocated");
    refused(bare.allocate(1, 100), "no multiple of 512");
    // After all that a sound step still works, and none of the refused ones left anything behind.
    run(&mut b, vec![item(0, 0, &[0, 1])]).unwrap();
    let none = Tensor::zeros((0, 16), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(b.ffn(&none, &[], 2, &[]).unwrap().dims(), [0, 16]);
}

#[test]
fn a_long_prompt_gives_its_tokens_what_decoding_gives_them() {
    let mut b = bench(ExpertSpec::swiglu(48, 32), ExpertFormat::Int4 { group: 32 }, 4, 4);
    b.load(&[(0, 0), (1, 1), (2, 2), (3, 3)]);
    let (n, k) = (700usize, 3usize);
    let x = Tensor::from_vec(Noise(8).vec(n * 48, 1.0), (n, 48), &Device::Cpu).unwrap();
    let weights = Noise(9).vec(n * k, 1.0);
    // Token t skips expert t % 4 and takes the others in ascending order.
    let expert = |t: usize, j: usize| (0..4).filter(|e| *e != t % 4).nth(j).unwrap() as u32;
    let items: Vec<_> = (0..4u32)
        .map(|e| {
            let mine = (0..n * k).filter(|a| expert(a / k, a % k) == e).map(|a| a as u32);
            item(e, e, &mine.collect::<Vec<_>>())
        })
        .collect();
    let y = floats(&b.ffn(&x, &weights, k, &[items]).unwrap());
    for t in [0, 1, 127, 128, 350, 698, 699] {
        let one: Vec<_> = (0..k).map(|j| item(expert(t, j), expert(t, j), &[j as u32])).collect();
        let alone = b.ffn(&x.narrow(0, t, 1).unwrap(), &weights[t * k..][..k], k, &[one]).unwrap();
        assert_eq!(floats(&alone), y[t * 48..][..48], "token {t}");
    }
}
