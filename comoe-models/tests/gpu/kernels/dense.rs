//! Norm, products, gates, embedding, and the hand-over to the next step.

use candle_core::DType;
use comoe_core::Activation;
use comoe_models::cuda::{
    AddGatedArgs, AdvanceArgs, Centre, EmbedArgs, GateArgs, GemvArgs, GemvWeight, Int8Layout, NormArgs,
    pack_int8, unpack_int8,
};

use super::{GPU, Memory, close, random, round, tolerance};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[test]
#[ignore = "needs a CUDA device"]
fn norms_are_what_f64_says() {
    let mut case = 0;
    for (tokens, width) in [(1, 2048), (7, 20), (32, 1000), (3, 7168), (2, 16_384), (5, 1)] {
        for centre in [Centre::No, Centre::Yes] {
            let dtype = DTYPES[case % 3];
            case += 1;
            let (x, delta) = (random(tokens * width, 1, dtype), random(tokens * width, 2, dtype));
            let (weight, bias) = (random(width, 3, dtype), random(width, 4, dtype));
            let with_bias = centre == Centre::Yes;
            let (delta_scale, sum_scale) = if case % 2 == 0 { (0.25, 0.5) } else { (1.0, 1.0) };
            let run = |x: &[f32], delta: &[f32]| {
                let tokens = x.len() / width;
                let bytes = tokens * width * dtype.size_in_bytes();
                let on = |v: &[f32]| Memory::floats(v, dtype);
                let (x, delta, weight, bias) = (on(x), on(delta), on(&weight), on(&bias));
                let (sum, normed) = (Memory::result(bytes), Memory::result(bytes));
                let args = NormArgs {
                    x: x.address(),
                    delta: delta.address(),
                    delta_scale,
                    sum_scale,
                    sum: sum.address(),
                    weight: weight.address(),
                    bias: if with_bias { bias.address() } else { 0 },
                    centre,
                    normed: normed.address(),
                    ..NormArgs::rms(tokens, width, dtype, 1e-5)
                };
                // SAFETY: every buffer is as long as documented and lives until the downloads have waited.
                unsafe { GPU.kernels.add_norm(&GPU.stream, &args) }.expect("add_norm");
                (sum.read_floats(dtype), normed.read_floats(dtype))
            };
            let (sum, normed) = run(&x, &delta);
            let what = format!("{tokens} x {width}, {dtype:?}, {centre:?}");
            for t in 0..tokens {
                let row = t * width..(t + 1) * width;
                let want_sum: Vec<f64> = x[row.clone()]
                    .iter()
                    .zip(&delta[row.clone()])
                    .map(|(x, d)| {
                        let d = round(f64::from(*d) * f64::from(delta_scale), dtype);
                        round(round(f64::from(*x) + d, dtype) * f64::from(sum_scale), dtype)
                    })
                    .collect();
                close(&sum[row.clone()], &want_sum, 0.0, 0.0, &what);
                let n = width as f64;
                let mean = if with_bias { want_sum.iter().sum::<f64>() / n } else { 0.0 };
                let square = want_sum.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
                let scale = 1.0 / (square + 1e-5).sqrt();
                let normed_of = |(i, v): (usize, &f64)| {
                    let v = (v - mean) * scale * f64::from(weight[i]);
                    if with_bias { v + f64::from(bias[i]) } else { v }
                };
                let want: Vec<f64> = want_sum.iter().enumerate().map(normed_of).collect();
                close(&normed[row.clone()], &want, tolerance(dtype), 0.1, &what);
                let alone = run(&x[row.clone()], &delta[row.clone()]);
                assert_eq!((&alone.0[..], &alone.1[..]), (&sum[row.clone()], &normed[row]), "{what}: {t}");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_norm_works_in_place_on_rows_with_gaps() {
    let (tokens, width, stride) = (3, 96, 160);
    let x = random(tokens * stride, 1, DType::F32);
    let rows = Memory::floats(&x, DType::F32);
    let args = NormArgs {
        x: rows.address(),
        x_stride: stride,
        normed: rows.address(),
        normed_stride: stride,
        ..NormArgs::rms(tokens, width, DType::F32, 1e-6)
    };
    // SAFETY: the rows live until the download has waited.
    unsafe { GPU.kernels.add_norm(&GPU.stream, &args) }.expect("add_norm");
    let have = rows.read_floats(DType::F32);
    for t in 0..tokens {
        let row: Vec<f64> = x[t * stride..t * stride + width].iter().map(|v| f64::from(*v)).collect();
        let scale = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / width as f64 + 1e-6).sqrt();
        let want: Vec<f64> = row.iter().map(|v| v * scale).collect();
        close(&have[t * stride..t * stride + width], &want, 1e-5, 0.1, "normed");
        assert_eq!(have[t * stride + width..(t + 1) * stride], x[t * stride + width..(t + 1) * stride]);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn products_are_what_f64_says() {
    let formats = [Some(DType::F32), Some(DType::BF16), Some(DType::F16), None];
    let mut case = 0;
    for (outputs, inputs) in
        [(128, 2048), (40, 64), (7, 3), (33, 1000), (513, 4104), (1, 12_500), (3000, 256)]
    {
        for format in formats {
            case += 1;
            let x_dtype = DTYPES[case % 3];
            let y_dtype = DTYPES[(case / 3) % 3];
            let tokens = [1, 2, 3, 8, 11, 32][case % 6];
            let x = random(tokens * inputs, 1, x_dtype);
            let bias = random(outputs, 2, y_dtype);
            let weight = random(outputs * inputs, 3, format.unwrap_or(DType::F32));
            let (bytes, weight) = match format {
                Some(dtype) => (super::encode(&weight, dtype), weight),
                None => {
                    let packed = pack_int8(&weight, outputs, inputs).expect("finite");
                    let back = unpack_int8(&packed, outputs, inputs).expect("a packed matrix");
                    (packed, back)
                }
            };
            let with_bias = case % 2 == 0;
            let (on, bias_on) = (Memory::of(&bytes), Memory::floats(&bias, y_dtype));
            let run = |x: &[f32]| {
                let tokens = x.len() / inputs;
                let x = Memory::floats(x, x_dtype);
                let y = Memory::result(tokens * outputs * y_dtype.size_in_bytes());
                let weight = match format {
                    Some(dtype) => GemvWeight::Dense { data: on.address(), dtype },
                    None => {
                        let scales = on.address() + Int8Layout::new(outputs, inputs).scales as u64;
                        GemvWeight::Int8 { weights: on.address(), scales }
                    }
                };
                let bias = if with_bias { bias_on.address() } else { 0 };
                let args = GemvArgs {
                    x: x.address(),
                    x_dtype,
                    weight,
                    bias,
                    y: y.address(),
                    y_dtype,
                    tokens,
                    inputs,
                    outputs,
                };
                // SAFETY: every buffer is as long as documented and lives until the download has waited.
                unsafe { GPU.kernels.gemv(&GPU.stream, &args) }.expect("gemv");
                y.read_floats(y_dtype)
            };
            let y = run(&x);
            let what = format!("{outputs} x {inputs} {format:?}, {tokens} {x_dtype:?} to {y_dtype:?}");
            for t in 0..tokens {
                let x = &x[t * inputs..(t + 1) * inputs];
                let want: Vec<f64> = weight
                    .chunks(inputs)
                    .zip(&bias)
                    .map(|(w, b)| {
                        let sum: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                        if with_bias { round(sum, y_dtype) + f64::from(*b) } else { sum }
                    })
                    .collect();
                let scale = (inputs as f64).sqrt() / 3.0;
                close(&y[t * outputs..(t + 1) * outputs], &want, tolerance(y_dtype), scale.max(1.0), &what);
                assert_eq!(run(x), y[t * outputs..(t + 1) * outputs], "{what}: token {t} alone");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn gates_and_sums_are_what_f64_says() {
    for (i, (tokens, width)) in [(1, 768), (3, 20), (32, 1025)].into_iter().enumerate() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let dtype = DTYPES[i];
            let bytes = tokens * width * dtype.size_in_bytes();
            let (x, gates) = (random(2 * tokens * width, 1, dtype), random(tokens, 2, dtype));
            let x: Vec<f32> = x.iter().map(|v| v * 4.0).collect();
            let (on, gates_on) = (Memory::floats(&x, dtype), Memory::floats(&gates, dtype));
            let y = Memory::result(bytes);
            let args = GateArgs { x: on.address(), y: y.address(), activation, tokens, width, dtype };
            let out = Memory::result(bytes);
            let add = AddGatedArgs {
                x: on.address(),
                y: y.address(),
                gate: gates_on.address(),
                out: out.address(),
                tokens,
                width,
                dtype,
            };
            // SAFETY: every buffer is as long as documented and lives until the downloads have waited.
            unsafe {
                GPU.kernels.gate(&GPU.stream, &args).expect("gate");
                GPU.kernels.add_gated(&GPU.stream, &add).expect("add_gated");
            }
            let y = y.read_floats(dtype);
            let act = |g: f64| match activation {
                Activation::Silu => g / (1.0 + (-g).exp()),
                _ => {
                    0.5 * g
                        * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g)).tanh())
                }
            };
            let at = |i: usize| f64::from(x[i]);
            let want: Vec<f64> = (0..tokens * width)
                .map(|i| {
                    let (t, c) = (i / width, i % width);
                    act(at(t * 2 * width + c)) * at(t * 2 * width + width + c)
                })
                .collect();
            let what = format!("{tokens} x {width} {activation:?}");
            close(&y, &want, tolerance(dtype), 0.01, &what);
            let sums: Vec<f64> = (0..tokens * width)
                .map(|i| at(i) + f64::from(y[i]) / (1.0 + (-f64::from(gates[i / width])).exp()))
                .collect();
            // Summands up to 16, rounded, may cancel.
            close(&out.read_floats(dtype), &sums, tolerance(dtype), 16.0, &what);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn rows_are_embedded_and_unknown_ids_are_told() {
    let (vocab, width) = (11, 1030);
    for (dtype, scale) in [(DType::BF16, 2.0), (DType::F32, 1.0)] {
        let table = random(vocab * width, 1, dtype);
        let on = Memory::floats(&table, dtype);
        for (ids, error_wanted) in [([0, 10, 3, 3], 0), ([1, 2, 11, 0], 3)] {
            let ids_on = Memory::words(&ids);
            let out = Memory::result(ids.len() * width * dtype.size_in_bytes());
            let error = Memory::zeros(4);
            let args = EmbedArgs {
                ids: ids_on.address(),
                table: on.address(),
                scale,
                out: out.address(),
                tokens: ids.len(),
                vocab,
                width,
                dtype,
                error: error.address(),
            };
            // SAFETY: every buffer is as long as documented and lives until the downloads have waited.
            unsafe { GPU.kernels.embed(&GPU.stream, &args) }.expect("embed");
            let have = out.read_floats(dtype);
            for (t, id) in ids.iter().enumerate() {
                let row = |c: usize| table.get(*id as usize * width + c).map_or(0.0, |v| v * scale);
                let want: Vec<f32> = (0..width).map(row).collect();
                assert_eq!(have[t * width..(t + 1) * width], want);
            }
            assert_eq!(error.read_words()[0], error_wanted);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_step_hands_over_to_the_next_and_an_error_stops_that() {
    let (token, error) = (Memory::words(&[42]), Memory::words(&[0]));
    let (input, position, step) = (Memory::words(&[7]), Memory::words(&[5]), Memory::words(&[3]));
    let (history, ring) = (Memory::result(32), Memory::result(48));
    let missed = Memory::words(&[17]);
    let args = AdvanceArgs {
        token: token.address(),
        errors: error.address(),
        errors_len: 1,
        input: input.address(),
        position: position.address(),
        step: step.address(),
        history: history.address(),
        history_len: 8,
        missed: missed.address(),
        ring: ring.address(),
        ring_len: 4,
    };
    let run = |args: &AdvanceArgs| {
        // SAFETY: every buffer is as long as documented and lives until the downloads have waited.
        unsafe { GPU.kernels.advance(&GPU.stream, args) }.expect("advance");
        [&input, &position, &step].map(|m| m.read_words()[0])
    };
    assert_eq!(run(&args), [42, 6, 4]);
    assert_eq!(run(&args), [42, 7, 5]);
    // No room in the history: nothing is written there.
    assert_eq!(run(&AdvanceArgs { missed: 0, ..args }), [42, 8, 6]);
    let broken = Memory::words(&[9]);
    assert_eq!(run(&AdvanceArgs { errors: broken.address(), ..args }), [42, 8, 6]);
    let unset = u32::MAX;
    assert_eq!(history.read_words(), [unset, unset, unset, unset, unset, unset, 42, 42]);
    assert_eq!(ring.read_words(), [42, 0, 17, 42, 0, 0, 42, 1, 17, 42, 0, 17]);
}
