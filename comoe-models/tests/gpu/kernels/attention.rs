//! The split into heads and attention over the cache.

use candle_core::DType;
use comoe_models::KvFormat;
use comoe_models::arch::{Mask, Pairing, TemperaturePlan};
use comoe_models::cuda::{AttendArgs, HeadNormArgs, HeadsArgs, KvRows, RopeArgs};
use half::f16;

use super::{GPU, Memory, close, random, round, tolerance};

/// A cache of one layer's keys or values with its scales, poisoned.
struct Cache {
    data: Memory,
    scales: Memory,
    heads: usize,
    capacity: usize,
    width: usize,
    format: KvFormat,
    /// Of what is not in INT8.
    dtype: DType,
}

impl Cache {
    fn new([heads, capacity, width]: [usize; 3], format: KvFormat, dtype: DType) -> Self {
        let element = if format == KvFormat::Int8 { 1 } else { dtype.size_in_bytes() };
        let data = Memory::result(heads * capacity * width * element);
        let scales = Memory::result(heads * capacity * 2);
        Self { data, scales, heads, capacity, width, format, dtype }
    }

    fn of(values: &[f32], [heads, capacity, width]: [usize; 3], format: KvFormat, dtype: DType) -> Self {
        let (data, scales) = match format {
            KvFormat::Plain => (Memory::floats(values, dtype), Memory::zeros(16)),
            KvFormat::Int8 => {
                let (q, scales) = quantised(values, width);
                (Memory::of(&q), Memory::of(&scales.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<_>>()))
            }
        };
        Self { data, scales, heads, capacity, width, format, dtype }
    }

    fn rows(&self) -> KvRows {
        KvRows::dense(self.data.address(), self.scales.address(), self.capacity, self.width)
    }

    /// `[heads, capacity, width]` as numbers, the poison as NaN.
    fn read(&self) -> Vec<f32> {
        match self.format {
            KvFormat::Plain => self.data.read_floats(self.dtype),
            KvFormat::Int8 => {
                let scales = self.scales.read_floats(DType::F16);
                assert_eq!(scales.len(), self.heads * self.capacity);
                let q = self.data.bytes();
                let value = |(i, q): (usize, &u8)| scales[i / self.width] * f32::from(q.cast_signed());
                q.iter().enumerate().map(value).collect()
            }
        }
    }
}

/// Rows as the INT8 cache has them: q and scales.
fn quantised(values: &[f32], width: usize) -> (Vec<u8>, Vec<f16>) {
    let (mut q, mut scales) = (Vec::new(), Vec::new());
    for row in values.chunks(width) {
        let largest = row.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
        let near = f16::from_f32(largest);
        let scale = if near.to_f32() < largest { f16::from_bits(near.to_bits() + 1) } else { near };
        q.extend(row.iter().map(|v| ((v / scale.to_f32()).round_ties_even() as i8).cast_unsigned()));
        scales.push(scale);
    }
    (q, scales)
}

fn norm(row: &mut [f64], weight: Option<&[f32]>, eps: f32, dtype: DType) {
    let mean = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    for (i, v) in row.iter_mut().enumerate() {
        *v = round(*v * scale * weight.map_or(1.0, |w| f64::from(w[i])), dtype);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn heads_are_split_normed_rotated_and_appended() {
    let mut case = 0;
    for (heads, kv_heads, d) in [(32, 4, 128), (3, 1, 20), (8, 8, 64), (4, 2, 512)] {
        for (norm_kind, rope_dim, pairing) in [
            (None, d, Pairing::Halves),
            (Some((true, false)), d, Pairing::Halves),
            (Some((true, true)), d / 2, Pairing::Neighbours),
            (Some((false, true)), 0, Pairing::Halves),
        ] {
            for int8 in [false, true] {
                case += 1;
                let dtype = [DType::F32, DType::BF16, DType::F16][case % 3];
                let tokens = [1, 5, 32][case % 3];
                let values_are_keys = case % 4 == 3;
                let v_norm = (case % 2 == 0).then_some(1e-6f32);
                let clip = (case % 5 == 0).then_some(0.5f32);
                let temperature = (case % 3 == 1).then_some(TemperaturePlan { period: 8.0, slope: 0.25 });
                let (position, capacity) = (17usize, 60usize);
                let columns = (heads + if values_are_keys { 1 } else { 2 } * kv_heads) * d;
                let qkv = random(tokens * columns, case as u64, dtype);
                let weights = [random(d, 7, dtype), random(d, 8, dtype)];
                let half = rope_dim / 2;
                let (cos, sin) = (random(capacity * half, 9, dtype), random(capacity * half, 10, dtype));
                let format = if int8 { KvFormat::Int8 } else { KvFormat::Plain };
                let on = |v: &[f32]| Memory::floats(v, dtype);
                let tables = (on(&weights[0]), on(&weights[1]), on(&cos), on(&sin));

                let run = |qkv: &[f32], position: usize| {
                    let tokens = qkv.len() / columns;
                    let (x, at) = (on(qkv), Memory::words(&[position as u32]));
                    let q = Memory::result(heads * tokens * d * dtype.size_in_bytes());
                    let k = Cache::new([kv_heads, capacity, d], format, dtype);
                    let v = Cache::new([kv_heads, capacity, d], format, dtype);
                    let error = Memory::zeros(4);
                    let args = HeadsArgs {
                        qkv: x.address(),
                        dtype,
                        tokens,
                        heads,
                        kv_heads,
                        head_dim: d,
                        norm: norm_kind.map(|(weighted, after_rope)| HeadNormArgs {
                            q_weight: if weighted { tables.0.address() } else { 0 },
                            k_weight: if weighted { tables.1.address() } else { 0 },
                            eps: 1e-6,
                            after_rope,
                        }),
                        v_norm,
                        clip,
                        rope: (rope_dim > 0).then(|| RopeArgs {
                            cos: tables.2.address(),
                            sin: tables.3.address(),
                            rows: capacity,
                            dim: rope_dim,
                            pairing,
                        }),
                        temperature,
                        values_are_keys,
                        q: q.address(),
                        k: k.rows(),
                        v: v.rows(),
                        cache: format,
                        capacity,
                        position: at.address(),
                        error: error.address(),
                    };
                    // SAFETY: every buffer is as long as documented and lives until the downloads have waited.
                    unsafe { GPU.kernels.split_norm_rope_append(&GPU.stream, &args) }.expect("split");
                    (q.read_floats(dtype), k.read(), v.read(), error.read_words()[0])
                };
                let (q, k, v, error) = run(&qkv, position);
                let what =
                    format!("case {case}: {heads}/{kv_heads} of {d}, {norm_kind:?}, {dtype:?}, int8 {int8}");
                assert_eq!(error, 0, "{what}");

                let want = |t: usize, column: usize, which: usize| -> Vec<f64> {
                    let from = t * columns + column * d;
                    let clipped = |v: &f32| clip.map_or(*v, |bound| v.clamp(-bound, bound));
                    let mut row: Vec<f64> =
                        qkv[from..from + d].iter().map(|v| f64::from(clipped(v))).collect();
                    if which == 2 {
                        if let Some(eps) = v_norm {
                            norm(&mut row, None, eps, dtype);
                        }
                        return row;
                    }
                    let weight = norm_kind.and_then(|(weighted, _)| weighted.then(|| &weights[which][..]));
                    if norm_kind.is_some_and(|(_, after)| !after) {
                        norm(&mut row, weight, 1e-6, dtype);
                    }
                    for i in 0..half {
                        let (a, b) = match pairing {
                            Pairing::Halves => (i, i + half),
                            Pairing::Neighbours => (2 * i, 2 * i + 1),
                        };
                        let at = (position + t) * half + i;
                        let (c, s) = (f64::from(cos[at]), f64::from(sin[at]));
                        let times = |x: f64, y: f64| round(x * y, dtype);
                        let (x, y) = (row[a], row[b]);
                        row[a] = round(times(x, c) - times(y, s), dtype);
                        row[b] = round(times(x, s) + times(y, c), dtype);
                    }
                    if norm_kind.is_some_and(|(_, after)| after) {
                        norm(&mut row, weight, 1e-6, dtype);
                    }
                    if let (0, Some(plan)) = (which, temperature) {
                        let periods = ((position + t) as f64 + 1.0) / plan.period;
                        let factor = round(periods.floor().ln_1p() * plan.slope + 1.0, dtype);
                        row.iter_mut().for_each(|v| *v *= factor);
                    }
                    row
                };
                for t in 0..tokens {
                    for h in 0..heads {
                        let have = &q[(h * tokens + t) * d..][..d];
                        close(have, &want(t, h, 0), 2.0 * tolerance(dtype), 1.0, &what);
                    }
                    for h in 0..kv_heads {
                        let at = (h * capacity + position + t) * d;
                        let value_column = heads + if values_are_keys { 0 } else { kv_heads } + h;
                        for (have, want) in [
                            (&k[at..at + d], want(t, heads + h, 1)),
                            (&v[at..at + d], want(t, value_column, 2)),
                        ] {
                            let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
                            let steps = if int8 { largest / 127.0 * 0.6 } else { 0.0 };
                            let off = 2.0 * tolerance(dtype) + steps;
                            close(have, &want, off, 1.0, &what);
                        }
                    }
                }
                // Rows that are not the tokens' stay as they were.
                for h in 0..kv_heads {
                    for row in (0..position).chain(position + tokens..capacity) {
                        let at = (h * capacity + row) * d;
                        let untouched = |c: &[f32]| c[at..at + d].iter().all(|v| v.is_nan());
                        assert!(untouched(&k) && untouched(&v), "{what}: row {row}");
                    }
                }
                for t in [0, tokens - 1] {
                    let alone = run(&qkv[t * columns..(t + 1) * columns], position + t);
                    for h in 0..heads {
                        assert_eq!(alone.0[h * d..(h + 1) * d], q[(h * tokens + t) * d..][..d], "{what}");
                    }
                    for h in 0..kv_heads {
                        let at = (h * capacity + position + t) * d;
                        assert_eq!(
                            (&alone.1[at..at + d], &alone.2[at..at + d]),
                            (&k[at..at + d], &v[at..at + d]),
                            "{what}"
                        );
                    }
                }
                // No room for the last token: told, the others are written.
                let (_, k, _, error) = run(&qkv, capacity - tokens + 1);
                assert_eq!(error, tokens as u32, "{what}");
                assert_eq!(k[(capacity - 1) * d].is_nan(), tokens == 1, "{what}");
            }
        }
    }
}

struct Case {
    heads: usize,
    kv_heads: usize,
    key_width: usize,
    value_width: usize,
    /// Values are the first part of the keys' rows.
    shared: bool,
    dtype: DType,
    int8: bool,
    mask: Mask,
    sinks: bool,
}

impl Case {
    fn check(&self, position: usize, tokens: usize) {
        let &Self { heads, kv_heads, key_width, value_width, shared, dtype, int8, mask, sinks } = self;
        let what = format!(
            "{heads}/{kv_heads}, {key_width} and {value_width}, {dtype:?}, int8 {int8}, {mask:?}, {tokens} at {position}"
        );
        let capacity = position + tokens + 70;
        let scale = 1.0 / (key_width as f32).sqrt();
        let format = if int8 { KvFormat::Int8 } else { KvFormat::Plain };
        // What lies behind the sequence is NaN.
        let rows = |width: usize, seed: u64| {
            let mut values = random(kv_heads * capacity * width, seed, dtype);
            for h in 0..kv_heads {
                let from = (h * capacity + position + tokens) * width;
                values[from..(h + 1) * capacity * width].fill(if int8 { 0.0 } else { f32::NAN });
            }
            values
        };
        let q: Vec<f32> = random(heads * tokens * key_width, 1, dtype).iter().map(|v| v * 4.0).collect();
        let (k, v) = (rows(key_width, 2), rows(value_width, 3));
        let sink_values = random(heads, 4, DType::F32);
        let k_on = Cache::of(&k, [kv_heads, capacity, key_width], format, dtype);
        let v_on = Cache::of(&v, [kv_heads, capacity, value_width], format, dtype);
        let sinks_on = Memory::floats(&sink_values, DType::F32);

        let run = |q: &[f32], position: usize, reach: usize| {
            let tokens = q.len() / heads / key_width;
            let (q, at) = (Memory::floats(q, dtype), Memory::words(&[position as u32]));
            let out = Memory::result(tokens * heads * value_width * dtype.size_in_bytes());
            let error = Memory::zeros(4);
            let mut args = AttendArgs {
                q: q.address(),
                dtype,
                k: k_on.rows(),
                v: if shared { k_on.rows() } else { v_on.rows() },
                cache: format,
                capacity,
                reach,
                tokens,
                heads,
                kv_heads,
                key_width,
                value_width,
                mask,
                sinks: if sinks { sinks_on.address() } else { 0 },
                scale,
                position: at.address(),
                out: out.address(),
                workspace: 0,
                error: error.address(),
            };
            let workspace = Memory::result(args.workspace_bytes());
            args.workspace = workspace.address();
            // SAFETY: every buffer is as long as documented and lives until the downloads have waited.
            unsafe { GPU.kernels.attend(&GPU.stream, &args) }.expect("attend");
            let result = (out.read_floats(dtype), error.read_words()[0]);
            workspace.bytes();
            result
        };
        let (have, error) = run(&q, position, capacity);
        assert_eq!(error, 0, "{what}");

        let number = |values: &[f32], width: usize| -> Vec<f64> {
            if !int8 {
                return values.iter().map(|v| f64::from(*v)).collect();
            }
            let (q, scales) = quantised(values, width);
            let value = |(i, q): (usize, &u8)| scales[i / width].to_f64() * f64::from(q.cast_signed());
            q.iter().enumerate().map(value).collect()
        };
        let (k, v) = (number(&k, key_width), number(&v, value_width));
        let group = heads / kv_heads;
        for t in 0..tokens {
            let mut want = Vec::new();
            for h in 0..heads {
                let q = &q[(h * tokens + t) * key_width..][..key_width];
                let kv = h / group;
                let seen = mask.first(position + t)..position + t + 1;
                let score = |r: usize| -> f64 {
                    let k = &k[(kv * capacity + r) * key_width..][..key_width];
                    f64::from(scale) * q.iter().zip(k).map(|(q, k)| f64::from(*q) * k).sum::<f64>()
                };
                let scores: Vec<f64> = seen.clone().map(score).collect();
                let sink = if sinks { f64::from(sink_values[h]) } else { f64::NEG_INFINITY };
                let top = scores.iter().copied().fold(sink, f64::max);
                let p: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum = p.iter().sum::<f64>() + (sink - top).exp();
                let mut out = vec![0f64; value_width];
                for (r, p) in seen.zip(&p) {
                    let row = match shared {
                        true => &k[(kv * capacity + r) * key_width..][..value_width],
                        false => &v[(kv * capacity + r) * value_width..][..value_width],
                    };
                    out.iter_mut().zip(row).for_each(|(o, v)| *o += p / sum * v);
                }
                want.extend(out);
            }
            let row = &have[t * heads * value_width..][..heads * value_width];
            close(row, &want, tolerance(dtype), 0.05, &what);
            // Alone and with another reach: the same bits.
            let mine: Vec<f32> =
                (0..heads).flat_map(|h| q[(h * tokens + t) * key_width..][..key_width].to_vec()).collect();
            let alone = run(&mine, position + t, position + tokens);
            assert_eq!(alone.0, row, "{what}: token {t} alone");
        }
        if position > 0 {
            let (_, error) = run(&q, position, position + tokens - 1);
            assert_eq!(error, tokens as u32, "{what}: beyond its reach");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn attention_is_what_f64_says() {
    let widths = [
        (32, 4, 128, 128, false),
        (8, 1, 64, 64, false),
        (4, 4, 128, 128, false),
        (6, 2, 12, 12, false),
        (10, 2, 256, 256, false),
        (8, 1, 512, 512, false),
        (16, 1, 576, 512, true),
        (5, 1, 80, 48, false),
    ];
    let masks = [Mask::Causal, Mask::Sliding(100), Mask::Causal, Mask::Chunked(96)];
    let mut case = 0;
    for (heads, kv_heads, key_width, value_width, shared) in widths {
        for int8 in [false, true] {
            case += 1;
            let dtype = [DType::BF16, DType::F32, DType::F16][case % 3];
            let mask = masks[case % 4];
            let sinks = case % 5 < 2;
            let this = Case { heads, kv_heads, key_width, value_width, shared, dtype, int8, mask, sinks };
            for (position, tokens) in [(0, 1), (63, 3), (700, 2)] {
                this.check(position, tokens);
            }
        }
    }
    // All of a batch, and a grid of fewer blocks than pieces.
    let qwen = |dtype, int8| Case {
        heads: 32,
        kv_heads: 4,
        key_width: 128,
        value_width: 128,
        shared: false,
        dtype,
        int8,
        mask: Mask::Causal,
        sinks: false,
    };
    qwen(DType::BF16, false).check(40, 32);
    qwen(DType::BF16, true).check(12_000, 1);
    qwen(DType::F32, false).check(9_000, 2);
}
