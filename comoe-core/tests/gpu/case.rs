//! A GPU, random experts, and the F64 reference of what a record computes.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use candle_core::DType;
use comoe_core::backend::cuda::kernels::{DeviceItem, DownArgs, GateUpArgs, GemmTile, Items, Kernels};
use comoe_core::expert::ExpertLayout;
use comoe_core::format::record::{
    DecodedExpert, ExpertBiases, ExpertWeights, Weights, pack_expert, unpack_expert,
};
use comoe_core::{Activation, ExpertFormat, ExpertSpec};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result, sys};
use half::{bf16, f16};
use rayon::prelude::*;

/// The first GPU, with one stream that everything runs on.
pub(crate) struct Gpu {
    pub(crate) ctx: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) kernels: Kernels,
}

/// One test at a time: they share the stream, and the timings want the GPU for themselves.
pub(crate) fn gpu() -> MutexGuard<'static, Gpu> {
    static GPU: OnceLock<Mutex<Gpu>> = OnceLock::new();
    GPU.get_or_init(|| {
        let ctx = CudaContext::new(0).expect("a CUDA device");
        // SAFETY: one stream only, so nothing needs the events that tracking would record.
        unsafe { ctx.disable_event_tracking() };
        let stream = ctx.new_stream().expect("a stream");
        let kernels = Kernels::load(&ctx).expect("kernels");
        Mutex::new(Gpu { ctx, stream, kernels })
    })
    .lock()
    .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Device memory and its address.
pub(crate) struct Buffer {
    slice: CudaSlice<u8>,
    pub(crate) at: u64,
}

impl Gpu {
    pub(crate) fn upload(&self, bytes: &[u8]) -> Buffer {
        // An empty allocation has no address.
        let slice =
            self.stream.clone_htod(if bytes.is_empty() { &[0u8; 16][..] } else { bytes }).expect("upload");
        let at = slice.device_ptr(&self.stream).0;
        Buffer { slice, at }
    }

    pub(crate) fn upload_f32(&self, values: &[f32]) -> Buffer {
        self.upload(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub(crate) fn upload_u32(&self, values: &[u32]) -> Buffer {
        self.upload(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub(crate) fn upload_items(&self, items: &[DeviceItem]) -> Buffer {
        // SAFETY: plain numbers without padding, and as many bytes as they have.
        let bytes = unsafe { std::slice::from_raw_parts(items.as_ptr().cast::<u8>(), size_of_val(items)) };
        self.upload(bytes)
    }

    pub(crate) fn upload_tiles(&self, tiles: &[GemmTile]) -> Buffer {
        self.upload_u32(&tiles.iter().flat_map(|t| [t.item, t.first]).collect::<Vec<_>>())
    }

    /// Memory full of NaNs, whatever it is read as.
    pub(crate) fn poisoned(&self, bytes: usize) -> Buffer {
        self.upload(&vec![0xff; bytes])
    }

    pub(crate) fn download(&self, buffer: &Buffer) -> Vec<u8> {
        let bytes = self.stream.clone_dtoh(&buffer.slice).expect("download");
        self.stream.synchronize().expect("kernels ran");
        bytes
    }

    /// Downloads `len` values and checks that what follows them is untouched poison.
    pub(crate) fn download_f32(&self, buffer: &Buffer, len: usize) -> Vec<f32> {
        let bytes = self.download(buffer);
        assert!(bytes[4 * len..].iter().all(|b| *b == 0xff), "a kernel wrote behind its result");
        bytes[..4 * len].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

/// Page-locked memory that the GPU reads at the same address.
pub(crate) struct PageLocked {
    pub(crate) at: u64,
}

impl PageLocked {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the allocation is as long as what is copied into it, and new memory overlaps nothing.
        unsafe {
            let p = result::malloc_host(bytes.len(), flags).expect("page-locked memory");
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), p.cast::<u8>(), bytes.len());
            Self { at: p as u64 }
        }
    }
}

impl Drop for PageLocked {
    fn drop(&mut self) {
        // SAFETY: made by `malloc_host`; tests download results, and so wait for the kernels, before they drop it.
        let freed = unsafe { result::free_host(self.at as *mut _) };
        if let Err(error) = freed {
            eprintln!("freeing page-locked memory: {error}");
        }
    }
}

/// xorshift64*: the same numbers on every machine.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in -1..1.
    pub(crate) fn signed(&mut self) -> f32 {
        (self.next() & 0xff_ffff) as f32 / 8_388_608.0 - 1.0
    }

    pub(crate) fn many(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.signed() * scale).collect()
    }
}

pub(crate) const FORMATS: [ExpertFormat; 8] = [
    ExpertFormat::Bf16,
    ExpertFormat::Mxfp4,
    ExpertFormat::Int8 { group: 32 },
    ExpertFormat::Int8 { group: 64 },
    ExpertFormat::Int8 { group: 128 },
    ExpertFormat::Int4 { group: 32 },
    ExpertFormat::Int4 { group: 64 },
    ExpertFormat::Int4 { group: 128 },
];

/// A few experts of one shape and format, their records, and what these decode to.
pub(crate) struct Experts {
    pub(crate) spec: ExpertSpec,
    pub(crate) layout: ExpertLayout,
    pub(crate) records: Vec<Vec<u8>>,
    pub(crate) decoded: Vec<DecodedExpert>,
}

impl Experts {
    pub(crate) fn random(spec: ExpertSpec, format: ExpertFormat, experts: usize, rng: &mut Rng) -> Self {
        let layout = ExpertLayout::new(&spec, format);
        let (hidden, inner) = (spec.hidden, spec.intermediate);
        let records = (0..experts).map(|_| {
            let wide = 2.0 / (hidden as f32).sqrt();
            let [gate, up] = [(); 2].map(|()| rng.many(hidden * inner, wide));
            let down = rng.many(hidden * inner, 2.0 / (inner as f32).sqrt());
            let [gate_bias, up_bias, down_bias] = [inner, inner, hidden].map(|n| rng.many(n, 0.5));
            let bias = spec.bias.then_some(ExpertBiases {
                gate: Weights::F32(&gate_bias),
                up: Weights::F32(&up_bias),
                down: Weights::F32(&down_bias),
            });
            let weights = ExpertWeights {
                gate: Weights::F32(&gate),
                up: Weights::F32(&up),
                down: Weights::F32(&down),
                bias,
            };
            let mut record = vec![0; layout.record_bytes];
            pack_expert(&layout, &weights, &mut record).expect("pack");
            record
        });
        Self::from_records(spec, layout, records.collect())
    }

    pub(crate) fn from_records(spec: ExpertSpec, layout: ExpertLayout, records: Vec<Vec<u8>>) -> Self {
        let decoded = records.iter().map(|r| unpack_expert(&layout, r).expect("unpack")).collect();
        Self { spec, layout, records, decoded }
    }
}

/// `[tokens, hidden]` in some dtype, with the values that the kernel reads.
pub(crate) struct X {
    pub(crate) values: Vec<f32>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) dtype: DType,
}

impl X {
    pub(crate) fn new(values: &[f32], dtype: DType) -> Self {
        let (values, bytes) = match dtype {
            DType::BF16 => {
                let v: Vec<_> = values.iter().map(|v| bf16::from_f32(*v)).collect();
                (v.iter().map(|v| v.to_f32()).collect(), v.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
            DType::F16 => {
                let v: Vec<_> = values.iter().map(|v| f16::from_f32(*v)).collect();
                (v.iter().map(|v| v.to_f32()).collect(), v.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
            _ => (values.to_vec(), values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        };
        Self { values, bytes, dtype }
    }
}

/// Which experts each token chose: `ids[t * k + j]`, and the items that serve them.
pub(crate) struct Routing {
    pub(crate) top_k: usize,
    pub(crate) ids: Vec<usize>,
}

impl Routing {
    /// `top_k` different experts a token.
    pub(crate) fn random(tokens: usize, experts: usize, top_k: usize, rng: &mut Rng) -> Self {
        let mut ids = Vec::with_capacity(tokens * top_k);
        for _ in 0..tokens {
            let mut left: Vec<usize> = (0..experts).collect();
            ids.extend((0..top_k).map(|_| left.swap_remove(rng.below(left.len()))));
        }
        Self { top_k, ids }
    }

    /// (expert, its assignments) of every expert in use.
    pub(crate) fn groups(&self) -> Vec<(usize, Vec<u32>)> {
        let experts = self.ids.iter().max().map_or(0, |m| m + 1);
        let mut groups: Vec<_> = (0..experts).map(|e| (e, Vec::new())).collect();
        for (a, e) in self.ids.iter().enumerate() {
            groups[*e].1.push(a as u32);
        }
        groups.retain(|g| !g.1.is_empty());
        groups
    }
}

/// Where a launch finds and leaves the records of experts 0, 1, ..: source and destination addresses.
pub(crate) type Places = [(u64, u64)];

pub(crate) struct Outcome {
    /// `[assignments, intermediate]`
    pub(crate) h: Vec<f32>,
    /// `[assignments, hidden]`
    pub(crate) partial: Vec<f32>,
}

/// Runs gate_up and down into poisoned memory.
pub(crate) fn run(
    gpu: &Gpu,
    experts: &Experts,
    places: &Places,
    x: &X,
    routing: &Routing,
    groups: &[(usize, Vec<u32>)],
) -> Outcome {
    let (mut items, mut list) = (Vec::new(), Vec::new());
    for (e, assignments) in groups {
        let (first, count) = (list.len() as u32, assignments.len() as u32);
        items.push(DeviceItem {
            src: places[*e].0,
            dst: places[*e].1,
            first,
            count,
            ..DeviceItem::default()
        });
        list.extend(assignments);
    }
    // An unused item, as a device-side schedule leaves them.
    items.push(DeviceItem::default());
    let most = groups.iter().map(|g| g.1.len()).max().unwrap_or(0);
    let assignments = routing.ids.len();
    let (spec, guard) = (&experts.spec, 64);
    let x_on = gpu.upload(&x.bytes);
    let h = gpu.poisoned(4 * (assignments * spec.intermediate + guard));
    let partial = gpu.poisoned(4 * (assignments * spec.hidden + guard));
    let (items_on, list_on) = (gpu.upload_items(&items), gpu.upload_u32(&list));
    let items = Items {
        layout: &experts.layout,
        items: items_on.at,
        len: items.len(),
        assignments: list_on.at,
        most,
        tokens: routing.ids.len() / routing.top_k,
    };
    let gate_up = GateUpArgs {
        items,
        activation: spec.activation,
        x: x_on.at,
        x_dtype: x.dtype,
        top_k: routing.top_k,
        input_weights: 0,
        h: h.at,
    };
    let down = DownArgs { items, h: h.at, partial: partial.at };
    // SAFETY: every buffer above is as long as documented and lives until the downloads below have waited.
    unsafe {
        gpu.kernels.gate_up(&gpu.stream, &gate_up).expect("gate_up");
        gpu.kernels.down(&gpu.stream, &down).expect("down");
    }
    Outcome {
        h: gpu.download_f32(&h, assignments * spec.intermediate),
        partial: gpu.download_f32(&partial, assignments * spec.hidden),
    }
}

/// The activation in F64.
pub(crate) fn activate(activation: Activation, g: f64, u: f64) -> f64 {
    match activation {
        Activation::Silu => g / (1.0 + (-g).exp()) * u,
        Activation::GeluTanh => {
            0.5 * g * (1.0 + (0.797_884_560_802_865_4 * (g + 0.044715 * g * g * g)).tanh()) * u
        }
        Activation::SwigluClamped { limit, alpha } => {
            let (limit, alpha) = (f64::from(limit), f64::from(alpha));
            let (g, u) = (g.min(limit), u.clamp(-limit, limit));
            (u + 1.0) * g / (1.0 + (-alpha * g).exp())
        }
        _ => unimplemented!("an activation this test does not know"),
    }
}

/// Row `row` of `w` times `x`: the dot product and the sum of its terms' magnitudes.
fn dot(w: &[f32], row: usize, x: &[f32]) -> (f64, f64) {
    let w = &w[row * x.len()..(row + 1) * x.len()];
    w.iter()
        .zip(x)
        .map(|(w, x)| f64::from(*w) * f64::from(*x))
        .fold((0.0, 0.0), |s, p| (s.0 + p, s.1 + p.abs()))
}

/// Relative to the sum of magnitudes: F32 sums of up to a few thousand terms, some of them truncating.
const EPS: f64 = 4e-6;

/// Compares an outcome with the F64 reference. `down` is checked against the kernel's own h, so each is judged alone.
/// `h_error` is how far rounding may have moved h, relative to itself. Panics with the worst place.
pub(crate) fn check(what: &str, experts: &Experts, x: &X, routing: &Routing, got: &Outcome, h_error: f64) {
    let (hidden, inner) = (experts.spec.hidden, experts.spec.intermediate);
    routing.ids.par_iter().enumerate().for_each(|(a, e)| {
        let (d, t) = (&experts.decoded[*e], a / routing.top_k);
        let x = &x.values[t * hidden..(t + 1) * hidden];
        for i in 0..inner {
            let (mut g, g_abs) = dot(&d.gate, i, x);
            let (mut u, u_abs) = dot(&d.up, i, x);
            if let Some([gate, up, _]) = &d.bias {
                g += f64::from(gate[i]);
                u += f64::from(up[i]);
            }
            let want = activate(experts.spec.activation, g, u);
            // How far the result may move when gate and up move by their own error bounds; slopes are below 2.
            let (dg, du) = (EPS * (g_abs + g.abs()), EPS * (u_abs + u.abs()));
            let slack =
                2.0 * (dg * (u.abs() + 1.0) + du * (g.abs() + 1.0)) + (EPS + h_error) * want.abs() + 1e-30;
            let have = f64::from(got.h[a * inner + i]);
            assert!(
                (have - want).abs() <= slack,
                "{what}: h[{a}, {i}] is {have}, want {want} within {slack}"
            );
        }
        let h = &got.h[a * inner..(a + 1) * inner];
        for i in 0..hidden {
            let (mut want, abs) = dot(&d.down, i, h);
            if let Some([_, _, down]) = &d.bias {
                want += f64::from(down[i]);
            }
            let slack = EPS * (abs + want.abs()) + 1e-30;
            let have = f64::from(got.partial[a * hidden + i]);
            assert!(
                (have - want).abs() <= slack,
                "{what}: partial[{a}, {i}] is {have}, want {want} within {slack}"
            );
        }
    });
}
