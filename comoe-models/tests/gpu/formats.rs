//! Dense weights in INT8 on a GPU: expanded exactly, with and without the graph the same bits, near the CPU's, and the
//! error against the plain model stated.

use candle_core::{DType, Device, Tensor};
use comoe_core::{CacheOptions, Capacity};
use comoe_models::blocks::int8::{pack_int8, unpack_int8};
use comoe_models::blocks::int8_matrix::{Expand, Int8Matrix};
use comoe_models::evaluate::divergence;
use comoe_models::{Decoder, DenseFormat, LoadOptions};

use crate::distance::{largest_difference, logits};
use crate::files::{Family, families, prompts, tiny};
use crate::graph::{decode, drawn, same};
use crate::tiny::GPU;

fn open(device: &Device, options: &LoadOptions) -> Decoder {
    Decoder::open(&tiny(), device, options, &|_| {}).expect("comoe-tiny loads")
}

fn int8(dtype: DType) -> LoadOptions {
    LoadOptions { dense: DenseFormat::Int8, dtype, ..LoadOptions::default() }
}

#[test]
#[ignore = "needs a CUDA device"]
fn matrices_are_expanded_exactly() {
    let expand = Expand::load(&GPU).expect("the kernel");
    // The last one in parts.
    for (outputs, inputs) in [(7, 17), (40, 300), (3, 128), (513, 2048), (3, 16 << 20)] {
        let values: Vec<f32> = (0..outputs * inputs)
            .map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0)
            .collect();
        let packed = pack_int8(&values, outputs, inputs).expect("finite");
        let want = unpack_int8(&packed, outputs, inputs).expect("a packed matrix");
        // A row of zeros with a one takes a column out.
        let columns = [0, inputs / 2, inputs - 1];
        for dtype in [DType::F32, DType::BF16] {
            let mut picks = vec![0f32; columns.len() * inputs];
            columns.iter().enumerate().for_each(|(t, c)| picks[t * inputs + c] = 1.0);
            let picks =
                Tensor::from_vec(picks, (columns.len(), inputs), &GPU).and_then(|t| t.to_dtype(dtype));
            let matrix = Int8Matrix::new(&values, outputs, inputs, dtype, &GPU, &expand).expect("memory");
            let y = matrix.forward(&picks.expect("memory")).and_then(|y| y.to_dtype(DType::F32));
            let y = y.and_then(|y| y.to_vec2::<f32>()).expect("a product");
            for (y, column) in y.iter().zip(columns) {
                let want: Vec<f32> = want.iter().skip(column).step_by(inputs).copied().collect();
                let want =
                    Tensor::new(want, &Device::Cpu).and_then(|w| w.to_dtype(dtype)?.to_dtype(DType::F32));
                let want = want.and_then(|w| w.to_vec1::<f32>()).expect("values");
                assert_eq!(*y, want, "{outputs} x {inputs} {dtype:?}, column {column}");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_error_of_int8_is_small_and_stated() {
    let ids: Vec<u32> = prompts().into_iter().flatten().take(120).collect();
    let on_cpu = open(&Device::Cpu, &int8(DType::F32));
    let want = logits(&on_cpu, &ids, ids.len());
    for dtype in [DType::F32, DType::BF16] {
        let packed = open(&GPU, &int8(dtype));
        let plain = open(&GPU, &LoadOptions { dtype, ..LoadOptions::default() });
        // Expanded at once, and as they are one by one.
        for step in [ids.len(), 1] {
            let (have, without) = (logits(&packed, &ids, step), logits(&plain, &ids, step));
            let divergences: Vec<f64> = without.iter().zip(&have).map(|(p, q)| divergence(p, q)).collect();
            let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
            let most = divergences.iter().fold(0f64, |m, d| m.max(*d));
            let (off, cpu) = (largest_difference(&without, &have), largest_difference(&want, &have));
            println!(
                "dense INT8, {dtype:?}, {step} at a time: logits differ by at most {off:.3}, KL {mean:.2e} in the mean and \
                 {most:.2e} at most; from the CPU's INT8 by {cpu:.1e}"
            );
            assert!(off > 0.0, "INT8 is not the same");
            if dtype == DType::F32 {
                assert!(cpu < 1e-3, "{step} at a time: {cpu} from the CPU");
            }
            // Some tokens go to other experts: tests/formats.rs has both kinds apart.
            assert!(mean < 0.1, "{dtype:?}: KL {mean}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_gives_the_bits_of_single_steps_for_every_slot_count() {
    let prompt = &prompts()[0];
    for dtype in [DType::F32, DType::BF16] {
        let want = decode(&open(&GPU, &int8(dtype)), prompt, 200, &drawn(7), false);
        for slots in [96, 48, 13] {
            let cache = CacheOptions { capacity: Capacity::Slots(slots), ..CacheOptions::default() };
            let few = open(&GPU, &LoadOptions { cache, ..int8(dtype) });
            let have = decode(&few, prompt, 200, &drawn(7), true);
            same(&have, &want, &format!("{dtype:?}, {slots} slots"));
            assert!(have.replayed > 180, "{} of 200 replayed, {:?}", have.replayed, have.note);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_family_is_replayed_with_the_bits_of_single_steps() {
    for Family { folder, ids, .. } in families() {
        let open = |device| Decoder::open(&folder, device, &int8(DType::F32), &|_| {}).expect("a fixture");
        let decoder = open(&GPU);
        let what = folder.display().to_string();
        let cpu =
            largest_difference(&logits(&open(&Device::Cpu), &ids, ids.len()), &logits(&decoder, &ids, 1));
        assert!(cpu < 1e-3, "{what}: {cpu} from the CPU");
        let prompt = &ids[..ids.len().min(5)];
        let n = 40.min(decoder.context() - prompt.len());
        let want = decode(&decoder, prompt, n, &drawn(5), false);
        same(&decode(&decoder, prompt, n, &drawn(5), true), &want, &what);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_plan_counts_the_bytes_of_int8() {
    let weights = |options: &LoadOptions| open(&GPU, options).memory_plan().expect("a plan").device.dense;
    let plain = weights(&LoadOptions { dtype: DType::BF16, ..LoadOptions::default() });
    let packed = weights(&int8(DType::BF16));
    // comoe-tiny: q and o of 256 x 256, k and v of 128 x 256 in 6 layers, two scales padded to 16 bytes a row.
    let (values, rows) = (6 * (2 * 256 + 2 * 128) * 256, 6 * (2 * 256 + 2 * 128));
    assert_eq!(plain - packed, 2 * values - (values + 16 * rows), "{plain} {packed}");
}
