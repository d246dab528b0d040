//! Whole paths through the store: checkpoint to records, and what happens when the checkpoint is bad.

use super::testing::{LAYERS, Shards, Style, TinyMoe, all_records, bf16};
use super::*;
use crate::expert::{Activation, ExpertId, ExpertLayout, ExpertSpec, WeightOn};
use crate::format::ExpertFormat;
use crate::format::record::unpack_expert;

fn open(shards: &Shards, naming: &Naming) -> Result<ExpertStore> {
    let made = shards.write_indexed();
    ExpertStore::open(&[made.path()], naming)
}

fn records(model: &TinyMoe, naming: &Naming) -> Vec<Vec<u8>> {
    all_records(&*open(&model.shards(), naming).unwrap().source())
}

fn error(shards: &Shards) -> String {
    open(shards, &Naming::auto()).unwrap_err().to_string()
}

const STACKED: [StackedLayout; 4] = [
    StackedLayout::Normal,
    StackedLayout::Transposed,
    StackedLayout::Interleaved,
    StackedLayout::TransposedInterleaved,
];

/// Checks every record against the model's values, padding included.
fn check(model: &TinyMoe, store: &ExpertStore) {
    assert_eq!(store.directory().layers().iter().map(|l| l.layer).collect::<Vec<_>>(), LAYERS);
    assert_eq!(store.directory().len(), 2 * model.experts);
    for (index, record) in (0..).map(RecordIndex).zip(all_records(&*store.source())) {
        let ExpertId { layer, expert } = store.directory().id(index);
        let layout = store.layout(store.directory().ordinal_of(index));
        let found = unpack_expert(layout, &record).unwrap();
        let mut used = 0;
        for (matrix, (m, values)) in
            [(layout.gate, found.gate), (layout.up, found.up), (layout.down, found.down)]
                .into_iter()
                .enumerate()
        {
            for r in 0..m.rows {
                for c in 0..m.cols {
                    let expected = model.weight(layer, expert, matrix, r, c);
                    assert_eq!(values[r * m.cols + c], expected, "{layer} {expert} {matrix} {r} {c}");
                }
                let padding = &record[m.weights + r * m.row_bytes..][2 * m.cols..m.row_bytes];
                assert!(padding.iter().all(|b| *b == 0));
            }
            used = m.weights + m.rows * m.row_bytes;
        }
        if let Some(found) = found.bias {
            for (matrix, values) in found.iter().enumerate() {
                for (r, value) in values.iter().enumerate() {
                    assert_eq!(*value, model.bias_of(layer, expert, matrix, r));
                }
            }
        } else {
            assert!(record[used..].iter().all(|b| *b == 0));
        }
    }
}

#[test]
fn every_style_gives_the_records_of_its_values() {
    for (hidden, intermediate) in [(5, 3), (8, 16), (40, 72), (1, 1)] {
        for bias in [false, true] {
            let model = |style| TinyMoe { hidden, intermediate, bias, ..TinyMoe::new(style) };
            for style in [Style::Qwen, Style::Mixtral] {
                check(&model(style), &open(&model(style).shards(), &Naming::auto()).unwrap());
            }
            for layout in STACKED {
                let model = model(Style::Stacked(layout));
                let naming = Naming::auto().with_stacked_layout(layout);
                check(&model, &open(&model.shards(), &naming).unwrap());
            }
        }
    }
    let granite = TinyMoe::new(Style::Granite);
    check(&granite, &open(&granite.shards(), &Naming::auto()).unwrap());
    let gpt_oss =
        TinyMoe { bias: true, ..TinyMoe::new(Style::Stacked(StackedLayout::TransposedInterleaved)) };
    check(&gpt_oss, &open(&gpt_oss.shards(), &Naming::gpt_oss()).unwrap());
}

#[test]
fn all_styles_give_the_same_bytes() {
    let expected = records(&TinyMoe::new(Style::Qwen), &Naming::qwen());
    assert_eq!(records(&TinyMoe::new(Style::Mixtral), &Naming::mixtral()), expected);
    assert_eq!(records(&TinyMoe::new(Style::Granite), &Naming::auto()), expected);
    for layout in STACKED {
        let declared = Naming::qwen().with_stacked_layout(layout);
        assert_eq!(records(&TinyMoe::new(Style::Stacked(layout)), &declared), expected, "{layout:?}");
    }
    // Transposition shows in the shapes, so it need not be declared.
    for layout in [StackedLayout::Normal, StackedLayout::Transposed] {
        assert_eq!(records(&TinyMoe::new(Style::Stacked(layout)), &Naming::auto()), expected, "{layout:?}");
    }
    // The test's values are exact in every type.
    for dtype in [Dtype::F16, Dtype::F32] {
        for style in [Style::Qwen, Style::Stacked(StackedLayout::Transposed)] {
            let model = TinyMoe { dtype, ..TinyMoe::new(style) };
            assert_eq!(records(&model, &Naming::auto()), expected, "{dtype} {style:?}");
            let store = open(&model.shards(), &Naming::auto()).unwrap();
            assert!(
                store.notes()[0].contains(&format!("are {dtype} in the checkpoint")),
                "{:?}",
                store.notes()
            );
        }
    }
    assert!(open(&TinyMoe::new(Style::Qwen).shards(), &Naming::qwen()).unwrap().notes().is_empty());
}

#[test]
fn sizes_come_from_the_shapes_and_the_rest_is_declared() {
    let made = TinyMoe::new(Style::Qwen).shards().write();
    let store = ExpertStore::open(
        &[made.path().join("a.safetensors"), made.path().join("b.safetensors")],
        &Naming::qwen(),
    )
    .unwrap();
    assert_eq!(store.specs(), [ExpertSpec::swiglu(5, 3); 2]);
    assert_eq!((store.format(), store.source_format()), (ExpertFormat::Bf16, ExpertFormat::Bf16));
    assert!(store.describe().contains("8 experts in 2 layers, bf16"), "{}", store.describe());
    let store = store.with_activation(Activation::GeluTanh).with_weight_on(WeightOn::Input);
    let spec = ExpertSpec {
        activation: Activation::GeluTanh,
        weight_on: WeightOn::Input,
        ..ExpertSpec::swiglu(5, 3)
    };
    assert_eq!(store.spec(1), &spec);
    let source = store.source();
    let mut out = vec![0; store.layout(0).record_bytes];
    assert!(source.read(RecordIndex(8), &mut out).is_err());
    assert!(source.read(RecordIndex(0), &mut out[1..]).is_err());
}

#[test]
fn layers_beyond_the_model_are_left_out() {
    let naming = Naming::auto().with_layers(3);
    let store = open(&TinyMoe::new(Style::Qwen).shards(), &naming).unwrap();
    assert_eq!(store.directory().layers().iter().map(|l| l.layer).collect::<Vec<_>>(), [1]);
}

#[test]
fn incomplete_experts_are_named() {
    let qwen = || TinyMoe::new(Style::Qwen).shards();
    let missing = "model.layers.3.mlp.experts.2.up_proj.weight";
    let text = error(&qwen().without(missing));
    assert!(text.contains(missing) && text.contains("is missing"), "{text}");

    let expert = ["gate", "up", "down"].map(|m| format!("model.layers.1.mlp.experts.1.{m}_proj.weight"));
    let gone = expert.iter().fold(qwen(), |s, name| s.without(name));
    let text = error(&gone);
    assert!(text.contains(&expert[0]) && text.contains("is missing"), "{text}");

    let last = ["gate", "up", "down"].map(|m| format!("model.layers.3.mlp.experts.3.{m}_proj.weight"));
    let gone = last.iter().fold(qwen(), |s, name| s.without(name));
    let text = error(&gone);
    assert!(text.contains("layer 3 has 3 experts and layer 1 has 4"), "{text}");

    let stacked = TinyMoe::new(Style::Stacked(StackedLayout::Normal)).shards();
    let text = error(&stacked.without("model.layers.1.mlp.experts.down_proj"));
    assert!(
        text.contains("\"model.layers.1.mlp.experts.down_proj\"") && text.contains("is missing"),
        "{text}"
    );

    let biased = TinyMoe { bias: true, ..TinyMoe::new(Style::Qwen) }.shards();
    let text = error(&biased.without("model.layers.1.mlp.experts.2.up_proj.bias"));
    assert!(text.contains("experts.2.up_proj.bias") && text.contains("is missing"), "{text}");
}

#[test]
fn wrong_shapes_and_types_are_named_with_what_was_expected() {
    let name = "model.layers.1.mlp.experts.2.down_proj.weight";
    for (dtype, shape, expected) in [
        (Dtype::BF16, &[3, 5][..], ["[5, 3]", "[3, 5]"]),
        (Dtype::BF16, &[15], ["[5, 3]", "[15]"]),
        (Dtype::F32, &[5, 3], ["BF16", "F32"]),
        (Dtype::F8_E4M3, &[5, 3], ["FP8", "weight_scale_inv"]),
        (Dtype::I16, &[5, 3], ["BF16", "I16"]),
    ] {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        let text =
            error(&TinyMoe::new(Style::Qwen).shards().with("a.safetensors", name, dtype, shape, &bytes));
        assert!(text.contains(name) && expected.iter().all(|e| text.contains(e)), "{text}");
    }
    let first = "model.layers.1.mlp.experts.0.gate_proj.weight";
    for shape in [&[0, 5][..], &[3, 0]] {
        let text =
            error(&TinyMoe::new(Style::Qwen).shards().with("a.safetensors", first, Dtype::BF16, shape, &[]));
        assert!(text.contains(first) && text.contains("expected dimensions from 1"), "{text}");
    }
    let text =
        error(&TinyMoe::new(Style::Qwen).shards().with("a.safetensors", first, Dtype::BF16, &[2], &[0; 4]));
    assert!(text.contains(first) && text.contains("expected 2 dimensions"), "{text}");
    // Every expert without its scales, and in a type that is not read.
    for (dtype, expected) in [
        (Dtype::F8_E4M3, "is FP8 and has neither weight_scale_inv nor weight_scale"),
        (Dtype::F8_E5M2, "has dtype F8_E5M2; weights are read from BF16, F16, F32"),
    ] {
        let mut shards = Shards::new();
        for m in ["gate", "up", "down"] {
            let name = format!("model.layers.0.mlp.experts.0.{m}_proj.weight");
            shards = shards.with("a.safetensors", &name, dtype, &[2, 2], &[0; 4]);
        }
        let text = error(&shards);
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn stacked_tensors_that_do_not_fit_together_are_refused() {
    let stacked = || TinyMoe::new(Style::Stacked(StackedLayout::Normal)).shards();
    let (wide, down) = ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj");
    for (name, shape, expected) in [
        (down, &[4, 5, 2][..], "[4, 5, 3]"),
        (down, &[3, 5, 3], "[4, 5, 3]"),
        (down, &[60], "expected 3 dimensions"),
        (wide, &[4, 7, 5], "even size, not 7"),
        (wide, &[1 << 17, 1, 1], "limit is 65536 experts"),
    ] {
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        let text = error(&stacked().with("a.safetensors", name, Dtype::BF16, shape, &bytes));
        assert!(text.contains(name) && text.contains(expected), "{text}");
    }
    // A layout that was declared wrongly.
    let transposed = TinyMoe { hidden: 6, ..TinyMoe::new(Style::Stacked(StackedLayout::Transposed)) };
    let declared = Naming::auto().with_stacked_layout(StackedLayout::Normal);
    let text = open(&transposed.shards(), &declared).unwrap_err().to_string();
    assert!(text.contains(down) && text.contains("[4, 6, 3]") && text.contains("[4, 3, 6]"), "{text}");
    // Biases alone do not say how gate and up are arranged.
    let biased = TinyMoe { bias: true, ..TinyMoe::new(Style::Stacked(StackedLayout::Transposed)) };
    let text = error(&biased.shards());
    assert!(text.contains(wide) && text.contains("with_stacked_layout"), "{text}");
    let both = stacked().with(
        "a.safetensors",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        Dtype::BF16,
        &[1],
        &[0; 2],
    );
    assert!(error(&both).contains("those of the whole layer"));
}

#[test]
fn a_model_without_experts_and_unknown_experts_are_refused() {
    let dense = Shards::new().with(
        "model.safetensors",
        "model.layers.0.mlp.up_proj.weight",
        Dtype::BF16,
        &[1],
        &[0; 2],
    );
    assert!(matches!(open(&dense, &Naming::auto()), Err(Error::NoExperts { .. })));
    let odd = "model.layers.1.mlp.experts.3.foo_proj.weight";
    let text =
        error(&TinyMoe::new(Style::Qwen).shards().with("a.safetensors", odd, Dtype::BF16, &[1], &[0; 2]));
    assert!(
        text.contains(odd) && text.contains("mlp.experts.E.{gate_proj,up_proj,down_proj}.weight"),
        "{text}"
    );
    let twice = TinyMoe::new(Style::Qwen).shards().with(
        "a.safetensors",
        "other.layers.1.mlp.experts.3.up_proj.weight",
        Dtype::BF16,
        &[3, 5],
        &bf16(&[0.0; 15]),
    );
    assert!(error(&twice).contains("holds the same as"));
}

#[test]
fn a_weight_that_is_no_number_is_named() {
    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    let mut values = [0.5; 15];
    values[7] = f32::NAN;
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let model = TinyMoe { dtype: Dtype::F32, ..TinyMoe::new(Style::Qwen) };
    let store =
        open(&model.shards().with("a.safetensors", name, Dtype::F32, &[3, 5], &bytes), &Naming::auto())
            .unwrap();
    let text = store.into_format(ExpertFormat::INT8).unwrap_err().to_string();
    assert!(text.contains(name) && text.contains("layer 1 expert 2") && text.contains("[1, 2]"), "{text}");
}

/// MXFP4 experts whose codes and exponents count up: two experts, hidden 32, intermediate 32.
fn mxfp4() -> Shards {
    let bytes = |n: usize, from: u8, span: usize| -> Vec<u8> {
        (0..n).map(|i| from + (i * 7 % span) as u8).collect()
    };
    let name = |part: &str| format!("model.layers.3.mlp.experts.{part}");
    let with = |s: Shards, part: &str, dtype, shape: &[usize], data: &[u8]| {
        s.with("a.safetensors", &name(part), dtype, shape, data)
    };
    let s = with(Shards::new(), "gate_up_proj_blocks", Dtype::U8, &[2, 64, 1, 16], &bytes(2048, 0, 256));
    let s = with(s, "gate_up_proj_scales", Dtype::U8, &[2, 64, 1], &bytes(128, 120, 9));
    let s = with(s, "down_proj_blocks", Dtype::U8, &[2, 32, 1, 16], &bytes(1024, 0, 255));
    let s = with(s, "down_proj_scales", Dtype::U8, &[2, 32, 1], &bytes(64, 118, 13));
    let s = with(s, "gate_up_proj_bias", Dtype::BF16, &[2, 64], &bf16(&[0.5; 128]));
    with(s, "down_proj_bias", Dtype::BF16, &[2, 32], &bf16(&[0.25; 64]))
}

#[test]
fn mxfp4_is_kept_and_expanded_exactly() {
    let code = |byte: usize, high: bool| {
        let code = if high { byte >> 4 } else { byte & 15 };
        let value = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7];
        if code > 7 { -value } else { value }
    };
    for (naming, up_row, step) in
        [(Naming::gpt_oss(), 1, 2), (Naming::qwen().with_stacked_layout(StackedLayout::Normal), 32, 1)]
    {
        let store = open(&mxfp4(), &naming).unwrap();
        assert!(store.notes()[0].contains("MXFP4"), "{:?}", store.notes());
        let spec = ExpertSpec { bias: true, ..ExpertSpec::swiglu(32, 32) };
        assert_eq!(*store.spec(0), spec);
        assert_eq!((store.format(), store.source_format()), (ExpertFormat::Mxfp4, ExpertFormat::Mxfp4));
        let expanded = store.clone().into_format(ExpertFormat::Bf16).unwrap();
        let expanded = all_records(&*expanded.source());
        for (e, (record, bf16)) in all_records(&*store.source()).iter().zip(&expanded).enumerate() {
            let found = unpack_expert(store.layout(0), record).unwrap();
            let layout = ExpertLayout::new(&spec, ExpertFormat::Bf16);
            assert_eq!(unpack_expert(&layout, bf16).unwrap(), found);
            for r in 0..32 {
                for c in 0..32 {
                    let value = |row: usize, span: usize, scale: usize| {
                        let byte = (row * 16 + c / 2) * 7 % span;
                        code(byte, c % 2 == 1) * 2f32.powi(scale as i32 - 127)
                    };
                    let wide = |row: usize| value(row, 256, 120 + row * 7 % 9);
                    let down = value(e * 32 + r, 255, 118 + (e * 32 + r) * 7 % 13);
                    assert_eq!(found.gate[r * 32 + c], wide(e * 64 + r * step), "{e} {r} {c}");
                    assert_eq!(found.up[r * 32 + c], wide(e * 64 + up_row + r * step), "{e} {r} {c}");
                    assert_eq!(found.down[r * 32 + c], down, "{e} {r} {c}");
                }
            }
            assert_eq!(found.bias.unwrap().map(|b| b[31]), [0.5, 0.5, 0.25]);
        }
    }
}

#[test]
fn bad_mxfp4_is_refused_by_name() {
    let name = |part: &str| format!("model.layers.3.mlp.experts.{part}");
    let refused = |shards: &Shards| open(shards, &Naming::gpt_oss()).unwrap_err().to_string();
    let replaced = |part: &str, dtype, shape: &[usize]| {
        let bytes = vec![0; shape.iter().product()];
        refused(&mxfp4().with("a.safetensors", &name(part), dtype, shape, &bytes))
    };
    for (text, parts) in [
        (error(&mxfp4()), &["gate_up_proj_blocks", "with_stacked_layout"]),
        (refused(&mxfp4().without(&name("down_proj_scales"))), &["down_proj_scales", "missing"]),
        (replaced("down_proj_scales", Dtype::U8, &[2, 32, 2]), &["down_proj_scales", "[2, 32, 1]"]),
        (replaced("down_proj_blocks", Dtype::U8, &[2, 32, 16]), &["down_proj_blocks", "[2, 32, 1, 16]"]),
        (replaced("gate_up_proj_blocks", Dtype::I8, &[2, 64, 1, 16]), &["gate_up_proj_blocks", "U8"]),
        (replaced("gate_up_proj_blocks", Dtype::U8, &[2, 60, 1, 16]), &["gate_up_proj_blocks", "[2, 60, 1]"]),
        (replaced("gate_up_proj", Dtype::U8, &[1]), &["gate_up_proj", "only one"]),
    ] {
        assert!(parts.iter().all(|p| text.contains(p)), "{parts:?}: {text}");
    }
    // An exponent that is no number is found when the record is read.
    let store = open(
        &mxfp4().with("a.safetensors", &name("down_proj_scales"), Dtype::U8, &[2, 32, 1], &[255; 64]),
        &Naming::gpt_oss(),
    )
    .unwrap();
    let mut out = vec![0; store.directory().record_bytes(RecordIndex(0))];
    let text = store.source().read(RecordIndex(0), &mut out).unwrap_err().to_string();
    assert!(text.contains("down_proj_blocks"), "{text}");
    let text = store.into_format(ExpertFormat::Bf16).unwrap_err().to_string();
    assert!(text.contains("down_proj_blocks"), "{text}");
}
