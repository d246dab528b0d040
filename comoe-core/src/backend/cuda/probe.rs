//! The measurements of a GPU report.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use cudarc::driver::{CudaStream, sys};

use super::backend::CudaBackend;
use super::context::{Doing, Gpu, cuda_device, driver_version};
use super::kernels::{DeviceItem, GatherArgs, Kernels};
use super::measure::{GpuReport, Link, SelfTest, Transfer, advice, generation};
use super::options::CudaOptions;
use super::pinned::{LockedMap, PinnedBuffer};
use super::slab::Slab;
use super::timeline::{OwnStream, Rank};
use super::upload::bytes_of;
use crate::backend::cpu::CpuBackend;
use crate::backend::{Backend, Fill, Queue, SlotId, Work, WorkItem};
use crate::error::Result;
use crate::expert::{Activation, ExpertLayout, ExpertSpec};
use crate::format::ExpertFormat;
use crate::format::record::{ExpertWeights, Weights, pack_expert};
use crate::machine::{self, gb_per_s};
use crate::store::{Directory, RecordIndex, RecordSource};

const SIZES: [usize; 7] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
/// Bytes copied per measurement, so that each takes about 10 ms on a fast link.
const PER_SIZE: usize = 512 << 20;
/// How much of a lock is tried.
const LOCK_PROBE: usize = 1 << 30;
/// Where the kernels' F32 sums may differ from the CPU's, relative to the result's norm.
const SELF_TEST_TOLERANCE: f64 = 2e-5;

/// Measures GPU `ordinal`; takes a few seconds and up to 256 MiB of its memory.
///
/// # Errors
/// Whatever [`cuda_device`] refuses, and errors of the driver.
pub fn gpu_report(ordinal: usize) -> Result<GpuReport> {
    let device = cuda_device(ordinal)?;
    let gpu = Gpu::of(device.as_cuda_device()?);
    let (free, total) = gpu.memory()?;
    let (major, minor) = gpu.ctx.compute_capability().doing("asking for the compute capability")?;
    let stream = OwnStream::new(&gpu, Rank::First)?;
    let most = (free / 4).min(256 << 20) & !((1 << 20) - 1);
    let rig = Rig::new(&gpu, stream.get().clone(), most)?;
    let (transfers, link) = rig.transfers()?;
    let kernel_read = rig.kernel_read()?;
    drop(rig);
    let (lock_tried, lock_granted) = probe_lock(&gpu)?;
    let mut report = GpuReport {
        ordinal,
        name: gpu.ctx.name().doing("asking for the GPU's name")?,
        compute_capability: format!("{major}.{minor}"),
        driver: fs::read_to_string("/sys/module/nvidia/version").ok().map(|v| v.trim().to_owned()),
        driver_cuda: driver_version(),
        build_cuda: sys::CUDA_VERSION,
        memory_free: free as u64,
        memory_total: total as u64,
        link,
        transfers,
        kernel_read,
        batched_copies: super::batch::has_batches(),
        lock_tried,
        lock_granted,
        self_tests: self_tests(&device)?,
        advice: Vec::new(),
    };
    report.advice = advice(&report);
    Ok(report)
}

/// Bandwidth from page-locked memory to the GPU that `device` is, in GB/s, measured with copies of `bytes` bytes (cut to
/// 1 to 64 MiB and to an eighth of the free memory); takes about 20 ms.
///
/// # Errors
/// Errors of the driver, for example when memory for the measurement is refused.
pub fn copy_bandwidth(device: &Device, bytes: usize) -> Result<f64> {
    let gpu = Gpu::of(device.as_cuda_device()?);
    let (free, _) = gpu.memory()?;
    let bytes = bytes.clamp(1 << 20, 64 << 20).min(free / 8).max(1 << 16);
    let stream = OwnStream::new(&gpu, Rank::First)?;
    let rig = Rig::new(&gpu, stream.get().clone(), bytes)?;
    gpu.bind()?;
    let copies = (PER_SIZE / bytes).clamp(2, 2000);
    let took = rig.time(copies, rig.locked.address(), bytes)?;
    Ok(gb_per_s((copies * bytes) as u64, took))
}

/// Memory on both sides, and a stream between them.
struct Rig {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    locked: PinnedBuffer,
    pageable: Vec<u8>,
    device: Slab,
}

impl Rig {
    fn new(gpu: &Gpu, stream: Arc<CudaStream>, bytes: usize) -> Result<Self> {
        let locked = PinnedBuffer::new(gpu, bytes)
            .map_err(|e| gpu.explain_allocation("a page-locked buffer", bytes as u64, e))?;
        // Written, so that it is memory and not a promise of zeroes.
        Ok(Self {
            gpu: gpu.clone(),
            stream,
            locked,
            pageable: vec![1; bytes],
            device: Slab::new(gpu, "a buffer", bytes)?,
        })
    }

    fn copy(&self, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: both sides have `bytes` bytes (sizes are cut to theirs) and live until the stream was waited for.
        unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.device.address(), from.cast(), bytes, self.stream.cu_stream())
        }
        .result()
        .doing("measuring a copy")
    }

    fn time(&self, copies: usize, from: *const u8, bytes: usize) -> Result<Duration> {
        self.copy(from, bytes)?;
        self.stream.synchronize().doing("measuring a copy")?;
        let start = Instant::now();
        for _ in 0..copies {
            self.copy(from, bytes)?;
        }
        self.stream.synchronize().doing("measuring a copy")?;
        Ok(start.elapsed())
    }

    fn transfers(&self) -> Result<(Vec<Transfer>, Option<Link>)> {
        self.gpu.bind()?;
        let mut transfers = Vec::new();
        for bytes in SIZES.into_iter().filter(|&s| s <= self.device.bytes()) {
            let copies = (PER_SIZE / bytes).clamp(2, 2000);
            let moved = (copies * bytes) as u64;
            let locked = self.time(copies, self.locked.address(), bytes)?;
            let fewer = copies.div_ceil(4);
            let pageable = self.time(fewer, self.pageable.as_ptr(), bytes)?;
            transfers.push(Transfer {
                bytes,
                locked: gb_per_s(moved, locked),
                pageable: gb_per_s((fewer * bytes) as u64, pageable),
            });
        }
        // Busy for some tens of milliseconds, while the link is looked at.
        for _ in 0..8 {
            self.copy(self.locked.address(), self.device.bytes())?;
        }
        let link = link(&self.gpu);
        self.stream.synchronize().doing("measuring a copy")?;
        Ok((transfers, link))
    }

    /// Gathers "records" that lie in page-locked host memory.
    fn kernel_read(&self) -> Result<f64> {
        const RECORD: usize = 1 << 20;
        let kernels = Kernels::load(&self.gpu.ctx)?;
        let records = self.locked.bytes() / RECORD;
        if records == 0 {
            return Ok(0.0);
        }
        let base = self.locked.device_address()?;
        let items: Vec<DeviceItem> = (0..records)
            .map(|i| DeviceItem {
                src: base + (i * RECORD) as u64,
                first: i as u32,
                count: 1,
                ..DeviceItem::default()
            })
            .collect();
        let assignments: Vec<u32> = (0..records as u32).collect();
        let (head, tail) = (bytes_of(&items), bytes_of(&assignments));
        let lists = Slab::new(&self.gpu, "work items", head.len() + tail.len())?;
        lists.write(0, head)?;
        lists.write(head.len(), tail)?;
        let args = GatherArgs {
            items: lists.address(),
            len: records,
            assignments: lists.address() + head.len() as u64,
            bytes: RECORD,
            out: self.device.address(),
        };
        let mut best = Duration::MAX;
        for _ in 0..3 {
            let start = Instant::now();
            // SAFETY: items lie inside the locked buffer, the result inside the device's, which is as long; all live
            // until the stream was waited for.
            unsafe { kernels.gather(&self.stream, &args) }?;
            self.stream.synchronize().doing("measuring a kernel")?;
            best = best.min(start.elapsed());
        }
        Ok(gb_per_s((records * RECORD) as u64, best))
    }
}

fn probe_lock(gpu: &Gpu) -> Result<(u64, u64)> {
    let room = machine::ram_available().map_or(LOCK_PROBE, |free| (free / 4) as usize);
    let tried = LOCK_PROBE.min(room) & !((1 << 20) - 1);
    if tried == 0 {
        return Ok((0, 0));
    }
    let mut map = LockedMap::new(gpu, tried)?;
    let granted = map.lock(usize::MAX)?;
    Ok((tried as u64, granted as u64))
}

/// The link of `gpu` at this moment.
fn link(gpu: &Gpu) -> Option<Link> {
    let mut id = [0 as std::ffi::c_char; 32];
    // SAFETY: the buffer is as long as said.
    unsafe { sys::cuDeviceGetPCIBusId(id.as_mut_ptr(), id.len() as i32, gpu.ctx.cu_device()) }
        .result()
        .ok()?;
    let id: String =
        id.iter().take_while(|&&c| c != 0).map(|&c| (c as u8 as char).to_ascii_lowercase()).collect();
    let folder = format!("/sys/bus/pci/devices/{id}");
    let read = |name: &str| fs::read_to_string(format!("{folder}/{name}")).ok();
    let width = |name| read(name)?.trim().parse().ok();
    Some(Link {
        generation: generation(&read("current_link_speed")?)?,
        width: width("current_link_width")?,
        max_generation: generation(&read("max_link_speed")?)?,
        max_width: width("max_link_width")?,
    })
}

/// One random expert in memory.
struct One {
    directory: Directory,
    record: Vec<u8>,
}

impl RecordSource for One {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, _: RecordIndex, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.record);
        Ok(())
    }
}

/// Numbers in -1..1 from a linear congruential generator (Knuth, MMIX).
fn noise(seed: &mut u64, n: usize, scale: f32) -> Vec<f32> {
    let mut next = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        scale * ((*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..n).map(|_| next()).collect()
}

/// One expert per format and a few tokens, on the CPU and on the GPU.
fn self_tests(device: &Device) -> Result<Vec<SelfTest>> {
    let spec = ExpertSpec { activation: Activation::Silu, ..ExpertSpec::swiglu(256, 192) };
    let mut seed = 1;
    let mut tests = Vec::new();
    for format in [ExpertFormat::Bf16, ExpertFormat::INT8, ExpertFormat::INT4, ExpertFormat::Mxfp4] {
        let layout = ExpertLayout::new(&spec, format);
        let weights = [(); 3].map(|()| noise(&mut seed, spec.hidden * spec.intermediate, 0.1));
        let expert = ExpertWeights {
            gate: Weights::F32(&weights[0]),
            up: Weights::F32(&weights[1]),
            down: Weights::F32(&weights[2]),
            bias: None,
        };
        let mut record = vec![0; layout.record_bytes];
        pack_expert(&layout, &expert, &mut record)?;
        let source: Arc<dyn RecordSource> =
            Arc::new(One { directory: Directory::new([(0, 1, layout.record_bytes)])?, record });
        for tokens in [1, 5] {
            let x = Tensor::from_vec(
                noise(&mut seed, tokens * spec.hidden, 1.0),
                (tokens, spec.hidden),
                &Device::Cpu,
            )?;
            let mut cpu = CpuBackend::new(source.clone());
            let want = step(&mut cpu, &spec, &layout, &x)?;
            let mut gpu = CudaBackend::new(device.as_cuda_device()?, source.clone(), CudaOptions::default())?;
            let got = step(&mut gpu, &spec, &layout, &x.to_device(device)?)?;
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
            let off = norm(&mut got.iter().zip(&want).map(|(g, w)| f64::from(*g) - f64::from(*w)));
            let relative_error = off / norm(&mut want.iter().map(|w| f64::from(*w)));
            tests.push(SelfTest {
                format: format.to_string(),
                tokens,
                relative_error,
                // A NaN fails too.
                passed: relative_error <= SELF_TEST_TOLERANCE,
            });
        }
    }
    Ok(tests)
}

/// Every token through expert 0.
fn step(backend: &mut dyn Backend, spec: &ExpertSpec, layout: &ExpertLayout, x: &Tensor) -> Result<Vec<f32>> {
    let tokens = x.dims()[0];
    backend.allocate(1, layout.record_bytes)?;
    let ticket = backend.fill(Queue::Demand, &[], &[Fill { record: RecordIndex(0), slot: SlotId(0) }])?;
    let weights = vec![1.0; tokens];
    backend.begin(Work::Ffn { spec, layout, x, weights: &weights, top_k: 1 })?;
    backend.wait(ticket)?;
    let item =
        WorkItem { record: RecordIndex(0), slot: SlotId(0), assignments: (0..tokens as u32).collect() };
    backend.run(&[item])?;
    Ok(backend.finish()?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}
