use proptest::prelude::*;

use super::*;
use crate::expert::ExpertSpec;

/// Packs one row and decodes it.
fn round_trip(format: ExpertFormat, values: &[f32]) -> Vec<f32> {
    let mut weights = vec![0; format.row_bytes(values.len())];
    let mut scales = vec![0; format.scale_row_bytes(values.len())];
    format.pack_rows(values, values.len(), &mut weights, &mut scales).unwrap();
    let mut out = vec![f32::NAN; values.len()];
    format.unpack_row(&weights, &scales, &mut out);
    out
}

/// Checks the bounds of the formats' module docs in f64. `levels` is the greatest `q`, `clip` the largest part of the
/// group's maximum that a clipped weight loses.
fn check_bounds(format: ExpertFormat, values: &[f32]) {
    let decoded = round_trip(format, values);
    let (group, levels, clip) = match format {
        ExpertFormat::Bf16 => {
            for (&x, &y) in values.iter().zip(&decoded) {
                let (x, y) = (f64::from(x), f64::from(y));
                assert!((x - y).abs() <= x.abs() / 256.0 + 2f64.powi(-134), "{x} {y}");
            }
            return;
        }
        ExpertFormat::Mxfp4 => {
            for (x, y) in values.chunks(32).zip(decoded.chunks(32)) {
                let m = x.iter().fold(0.0f64, |m, &x| m.max(f64::from(x).abs()));
                for (&x, &y) in x.iter().zip(y) {
                    let off = (f64::from(x) - f64::from(y)).abs();
                    assert!(off <= m / 4.0 + 2f64.powi(-129), "{x} {y} of max {m}");
                }
            }
            return;
        }
        ExpertFormat::Int8 { group } => (group, 127.0, 0.024),
        ExpertFormat::Int4 { group } => (group, 7.0, 0.27),
    };
    for (x, y) in values.chunks(group).zip(decoded.chunks(group)) {
        let errors: Vec<f64> = x.iter().zip(y).map(|(&x, &y)| f64::from(x) - f64::from(y)).collect();
        let m = x.iter().fold(0.0f64, |m, &x| m.max(f64::from(x).abs()));
        let step = (m / levels * (1.0 + 2f64.powi(-10))).max(m / levels + 2f64.powi(-24));
        let rms = (errors.iter().map(|e| e * e).sum::<f64>() / x.len() as f64).sqrt();
        assert!(rms <= step / 2.0 * (1.0 + 1e-5), "{format}: rms {rms} over {} of {x:?}", step / 2.0);
        let worst = errors.iter().fold(0.0f64, |w, e| w.max(e.abs()));
        // Rounding to f16 takes up to 2^-25 off a scale, and that many times the greatest `q` off a clipped weight.
        let rounding = (levels + 1.0) * 2f64.powi(-25);
        assert!(worst <= (clip * m + rounding) * (1.0 + 1e-5), "{format}: {worst} of max {m}: {x:?}");
    }
}

fn formats() -> Vec<ExpertFormat> {
    ExpertFormat::all_for_tests().collect()
}

const COLS: [usize; 11] = [2880, 1408, 704, 16, 20, 1, 31, 33, 130, 128, 8];

/// Rows as they occur: bell-shaped, of any magnitude, some with an outlier or with runs of zeros.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    (proptest::sample::select(COLS.to_vec()), -30i32..17, any::<u64>(), 0u8..4).prop_map(
        |(cols, power, seed, kind)| {
            let mut state = seed | 1;
            let mut uniform = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
            };
            let scale = 2f32.powi(power);
            let mut row: Vec<f32> =
                (0..cols).map(|_| (uniform() + uniform() + uniform()) * 2.0 / 3.0 * scale).collect();
            match kind {
                0 => {}
                1 => row[cols / 2] = 1e5 * uniform().signum(),
                2 => row.iter_mut().step_by(3).for_each(|v| *v = 0.0),
                _ => row.iter_mut().skip(cols / 2).for_each(|v| *v *= 1e-6),
            }
            row
        },
    )
}

/// What a matrix is packed to, the bytes of weights and scales, and what that lost.
fn packed(format: ExpertFormat, values: &[f32], cols: usize) -> (Vec<u8>, Vec<u8>, Loss) {
    let rows = values.len() / cols;
    let mut weights = vec![0; rows * format.row_bytes(cols)];
    let mut scales = vec![0; rows * format.scale_row_bytes(cols)];
    let loss = format.pack_rows(values, cols, &mut weights, &mut scales).unwrap();
    (weights, scales, loss)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// A packed file does not depend on the machine that packed it, nor a group on its neighbours in other lanes.
    #[test]
    fn every_vector_unit_packs_the_same_bytes(row in rows(), other in rows()) {
        use crate::simd::{Unit, tests::WIDEST};
        let cols = row.len();
        let mut values = row.clone();
        // More rows of that length, of another kind.
        values.extend(other.iter().cycle().take(4 * cols));
        for format in formats() {
            let expected = packed(format, &values, cols);
            for unit in [Unit::Portable, Unit::Avx2] {
                WIDEST.set(unit);
                let found = packed(format, &values, cols);
                WIDEST.set(Unit::Avx512);
                prop_assert!(found == expected, "{format} {unit:?}");
            }
            let alone = packed(format, &row, cols);
            prop_assert!(expected.0.starts_with(&alone.0) && expected.1.starts_with(&alone.1), "{format}");
        }
    }

    #[test]
    fn what_is_said_to_be_lost_is_lost(row in rows()) {
        for format in formats() {
            let decoded = round_trip(format, &row);
            let squares = |v: &dyn Fn(usize) -> f64| (0..row.len()).map(|i| v(i).powi(2)).sum::<f64>();
            let error = squares(&|i| f64::from(row[i]) - f64::from(decoded[i]));
            let norm = squares(&|i| f64::from(row[i]));
            let loss = packed(format, &row, row.len()).2;
            // What is below the square root of the least F32 does not show.
            prop_assert!((loss.error - error).abs() <= 1e-4 * error + 1e-9 * norm + 1e-37, "{format}: {loss:?} {error}");
            prop_assert!((loss.norm - norm).abs() <= 1e-4 * norm + 1e-37, "{format}: {loss:?} {norm}");
        }
    }

    #[test]
    fn errors_stay_within_the_documented_bounds(row in rows()) {
        for format in formats() {
            check_bounds(format, &row);
        }
    }

    /// Values that are `scale * q` come back as they were, whatever the integers: what Q4_0 and Q8_0 need.
    #[test]
    fn quantised_values_are_kept_exactly(
        bits in 0u16..0x7c00, negative: bool, cols in 1usize..70,
        small in proptest::collection::vec(-8i8..=7, 70), large in proptest::collection::vec(-127i8..=127, 70),
        narrow in 1i8..=127,
    ) {
        let scale = f16::from_bits(bits | u16::from(negative) << 15).to_f32();
        let values = |q: &[i8]| q[..cols].iter().map(|&q| scale * f32::from(q)).collect::<Vec<_>>();
        let narrowed: Vec<i8> = large.iter().map(|q| q % narrow).collect();
        let narrow4: Vec<i8> = small.iter().map(|q| q % narrow).collect();
        for group in [32, 64, 128] {
            for q in [&small, &narrow4] {
                let x = values(q);
                prop_assert_eq!(round_trip(ExpertFormat::Int4 { group }, &x), x);
            }
            for q in [&large, &narrowed] {
                let x = values(q);
                prop_assert_eq!(round_trip(ExpertFormat::Int8 { group }, &x), x);
            }
        }
    }
}

#[test]
fn zeros_subnormals_and_the_largest_weights() {
    for format in formats() {
        assert_eq!(round_trip(format, &[0.0; 33]), [0.0; 33]);
        assert_eq!(round_trip(format, &[-0.0; 3]), [0.0; 3]);
        for m in [1e-45, 1e-30, 2f32.powi(-25), 3e-7, 5e-5, 65504.0, 1e5, 458_528.0] {
            check_bounds(format, &[m, -m / 2.0, m / 3.0, -m, 0.0]);
            check_bounds(format, &[m; 40]);
        }
    }
}

/// Between the least f16 and its double the better scale for the group clips its largest weight by a third.
#[test]
fn a_scale_among_the_least_f16_values_clips_by_no_more_than_documented() {
    let mut row = vec![6.141e-7, -6.141e-7];
    row.extend((2..64).map(|i| ((i % 9) as f32 - 4.0) * 2f32.powi(-24)));
    for format in formats() {
        check_bounds(format, &row);
    }
    let decoded = round_trip(ExpertFormat::INT4, &row);
    let lost = 6.141e-7 - f64::from(decoded[0].abs().min(decoded[1].abs()));
    assert!(lost > 0.27 * 6.141e-7 + 2f64.powi(-25), "{lost}: this row no longer shows what it is for");
}

/// The least squared error that any scale `m / t` leaves, `t` on a grid of its own, finer by far than the one in use.
fn least_error(x: &[f32], lo: f64, hi: f64) -> f64 {
    let m = x.iter().fold(0.0f64, |m, &v| if f64::from(v).abs() > m.abs() { f64::from(v) } else { m });
    let divisors = (0..2000).map(|i| -hi * (0.8 + f64::from(i) * 5e-4));
    let error = |scale: f64| {
        x.iter().map(move |&v| {
            let v = f64::from(v);
            (v - scale * (v / scale).round().clamp(lo, hi)).powi(2)
        })
    };
    divisors.map(|t| error(m / t).sum::<f64>()).fold(f64::INFINITY, f64::min)
}

#[test]
fn the_scales_are_all_but_the_best_ones() {
    let mut state = 7u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
    };
    let x: Vec<f32> = (0..6400).map(|_| (0..12).map(|_| uniform()).sum::<f64>() as f32 * 0.02).collect();
    for (group, four, eight) in [(32, 1.002, 1.02), (64, 1.001, 1.02), (128, 1.005, 1.02)] {
        for (format, lo, hi, most) in [
            (ExpertFormat::Int4 { group }, -8.0, 7.0, four),
            (ExpertFormat::Int8 { group }, -127.0, 127.0, eight),
        ] {
            let best: f64 = x.chunks(group).map(|x| least_error(x, lo, hi)).sum();
            let found = packed(format, &x, x.len()).2.error;
            assert!(
                found <= most * best,
                "{format}: {found} where {best} can be had, {} times",
                found / best
            );
        }
    }
}

#[test]
fn searching_beats_dividing_by_the_maximum() {
    // On a bell shape at four bits the grid must take a good part off the squared error of plain max / 7.
    let mut state = 7u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
    };
    let x: Vec<f32> = (0..6400).map(|_| (0..12).map(|_| uniform()).sum::<f64>() as f32 * 0.02).collect();
    let y = round_trip(ExpertFormat::INT4, &x);
    let error = |y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>();
    let plain: Vec<f32> = x
        .chunks(64)
        .flat_map(|g| {
            let s = g.iter().fold(0f32, |m, v| m.max(v.abs())) / 7.0;
            g.iter().map(move |v| (v / s).round() * s)
        })
        .collect();
    assert!(error(&y) < 0.85 * error(&plain), "{} of {}", error(&y), error(&plain));
}

fn values(n: usize, seed: f32) -> Vec<f32> {
    (0..n).map(|i| ((i as f32 + seed) * 0.7311).sin() * 0.1).collect()
}

#[test]
fn experts_round_trip_through_every_format_and_conversion_equals_packing() {
    for (hidden, intermediate) in [(20, 36), (704, 400), (1, 1), (64, 16)] {
        for bias in [false, true] {
            let spec = ExpertSpec { bias, ..ExpertSpec::swiglu(hidden, intermediate) };
            let n = hidden * intermediate;
            let exact = |v: Vec<f32>| v.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
            let (gate, up, down) = (exact(values(n, 0.0)), exact(values(n, 0.3)), exact(values(n, 0.6)));
            let biases = [values(intermediate, 1.0), values(intermediate, 2.0), values(hidden, 3.0)];
            let weights = ExpertWeights {
                gate: Weights::Bf16(&gate),
                up: Weights::Bf16(&up),
                down: Weights::Bf16(&down),
                bias: bias.then(|| ExpertBiases {
                    gate: Weights::F32(&biases[0]),
                    up: Weights::F32(&biases[1]),
                    down: Weights::F32(&biases[2]),
                }),
            };
            let source = ExpertLayout::new(&spec, ExpertFormat::Bf16);
            let mut bf16_record = vec![0xff; source.record_bytes];
            pack_expert(&source, &weights, &mut bf16_record).unwrap();
            let decoded = unpack_expert(&source, &bf16_record).unwrap();
            let f32s = |v: &[bf16]| v.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
            assert_eq!((&decoded.gate, &decoded.up, &decoded.down), (&f32s(&gate), &f32s(&up), &f32s(&down)));
            assert_eq!(decoded.bias, bias.then(|| biases.clone()));

            // The same weights as unaligned bytes give the same record.
            let bytes = |v: &[f32]| {
                std::iter::once(0).chain(v.iter().flat_map(|v| v.to_le_bytes())).collect::<Vec<u8>>()
            };
            let (g, u, d) = (bytes(&decoded.gate), bytes(&decoded.up), bytes(&decoded.down));
            let from_bytes = ExpertWeights {
                gate: Weights::F32Bytes(&g[1..]),
                up: Weights::F32Bytes(&u[1..]),
                down: Weights::F32Bytes(&d[1..]),
                ..weights
            };
            for format in formats() {
                let layout = ExpertLayout::new(&spec, format);
                let (mut a, mut b, mut c) = (
                    vec![0xff; layout.record_bytes],
                    vec![0xee; layout.record_bytes],
                    vec![0xdd; layout.record_bytes],
                );
                pack_expert(&layout, &weights, &mut a).unwrap();
                pack_expert(&layout, &from_bytes, &mut b).unwrap();
                convert_record(&source, &bf16_record, &layout, &mut c).unwrap();
                assert!(a == b && a == c, "{format} {hidden}x{intermediate}");
                let back = unpack_expert(&layout, &a).unwrap();
                assert_eq!(back.bias, decoded.bias);
                for (x, y) in decoded.gate.iter().chain(&decoded.down).zip(back.gate.iter().chain(&back.down))
                {
                    assert!((x - y).abs() < 0.02, "{format}: {x} {y}");
                }
            }
        }
    }
}

#[test]
fn bad_weights_are_named() {
    let spec = ExpertSpec::swiglu(20, 36);
    let n = 20 * 36;
    for (part, format) in
        ["gate", "up", "down"].into_iter().flat_map(|p| formats().into_iter().map(move |f| (p, f)))
    {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3.4e38] {
            let layout = ExpertLayout::new(&spec, format);
            let mut parts = [values(n, 0.0), values(n, 0.0), values(n, 0.0)];
            let (index, cols) = match part {
                "gate" => (0, 20),
                "up" => (1, 20),
                _ => (2, 36),
            };
            parts[index][3 * cols + 7] = value;
            let weights = ExpertWeights {
                gate: Weights::F32(&parts[0]),
                up: Weights::F32(&parts[1]),
                down: Weights::F32(&parts[2]),
                bias: None,
            };
            let error = pack_expert(&layout, &weights, &mut vec![0; layout.record_bytes]).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(&format!("{part} weight [3, 7]")), "{text}");
        }
    }
}

#[test]
fn parts_of_the_wrong_size_are_refused() {
    let spec = ExpertSpec::swiglu(20, 36);
    let layout = ExpertLayout::new(&spec, ExpertFormat::INT4);
    let good = values(20 * 36, 0.0);
    let all = |gate| ExpertWeights { gate, up: Weights::F32(&good), down: Weights::F32(&good), bias: None };
    let mut out = vec![0; layout.record_bytes];
    let refused = |r: Result<()>, text: &str| {
        let e = r.unwrap_err().to_string();
        assert!(e.contains(text), "{e}");
    };
    refused(pack_expert(&layout, &all(Weights::F32(&good[1..])), &mut out), "found 719 elements");
    refused(pack_expert(&layout, &all(Weights::Bf16Bytes(&[0; 1441])), &mut out), "a torn element");
    refused(pack_expert(&layout, &all(Weights::F32(&good)), &mut out[1..]), "bytes where");
    let bias = ExpertBiases { gate: Weights::F32(&[]), up: Weights::F32(&[]), down: Weights::F32(&[]) };
    let with = ExpertWeights { bias: Some(bias), ..all(Weights::F32(&good)) };
    refused(pack_expert(&layout, &with, &mut out), "have no biases");
    pack_expert(&layout, &all(Weights::F32(&good)), &mut out).unwrap();
    let other = ExpertLayout::new(&ExpertSpec::swiglu(36, 20), ExpertFormat::INT4);
    refused(convert_record(&layout, &out, &other, &mut vec![0; other.record_bytes]), "cannot turn");
}
