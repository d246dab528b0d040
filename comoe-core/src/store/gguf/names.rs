//! From llama.cpp's names to the hub's: every architecture that maps cleanly, one row each.
//!
//! Experts, which a file holds stacked, become one tensor each: an expert's slice is contiguous. So everything that
//! reads checkpoints by the hub's names reads GGUF files, too.

use std::collections::BTreeMap;

use safetensors::Dtype;

use super::GgmlType;
use super::file::{Gguf, GgufTensor, GgufValue};
use super::matrix::{Ggml, Order};
use crate::error::{Error, Result};
use crate::store::checkpoint::{Checkpoint, Encoding, Located, Region};
use crate::store::survey::MAX_EXPERTS;

/// How the tensors of an architecture are called on the hub, and what llama.cpp's conversion did to them.
struct Dialect {
    architecture: &'static str,
    /// Folder of the experts, below a layer.
    experts: &'static str,
    /// Gate, up, down.
    matrices: [&'static str; 3],
    router: &'static str,
    choice_bias: &'static str,
    shared: &'static str,
    /// What the file calls the norm before the feed-forward part.
    ffn_norm: &'static str,
    /// Whether rows of q and k are in the order of paired rotation where the hub's are in that of halves.
    paired: bool,
}

const LLAMA: Dialect = Dialect {
    architecture: "",
    experts: "mlp.experts",
    matrices: ["gate_proj", "up_proj", "down_proj"],
    router: "mlp.gate",
    choice_bias: "mlp.gate.e_score_correction_bias",
    shared: "mlp.shared_experts",
    ffn_norm: "ffn_norm",
    paired: false,
};

const DIALECTS: [Dialect; 9] = [
    Dialect { architecture: "qwen3moe", ..LLAMA },
    Dialect { architecture: "qwen2moe", shared: "mlp.shared_expert", ..LLAMA },
    Dialect {
        architecture: "llama",
        experts: "block_sparse_moe.experts",
        matrices: ["w1", "w3", "w2"],
        router: "block_sparse_moe.gate",
        paired: true,
        ..LLAMA
    },
    Dialect { architecture: "olmoe", ..LLAMA },
    Dialect { architecture: "gpt-oss", router: "mlp.router", ffn_norm: "post_attention_norm", ..LLAMA },
    Dialect { architecture: "deepseek2", ..LLAMA },
    Dialect { architecture: "glm4moe", ffn_norm: "post_attention_norm", ..LLAMA },
    Dialect { architecture: "dots1", ..LLAMA },
    Dialect {
        architecture: "minimax-m2",
        experts: "block_sparse_moe.experts",
        matrices: ["w1", "w3", "w2"],
        router: "block_sparse_moe.gate",
        choice_bias: "block_sparse_moe.e_score_correction_bias",
        ..LLAMA
    },
];

/// The architectures that GGUF files are read of.
pub const ARCHITECTURES: [&str; DIALECTS.len()] = {
    let mut names = [""; DIALECTS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = DIALECTS[i].architecture;
        i += 1;
    }
    names
};

/// Tensors outside the layers.
const OUTSIDE: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Dense tensors of a layer, without `.weight` and `.bias`.
const LAYER: [(&str, &str); 16] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Tensors that are not weights of a model: tables that are computed.
const IGNORED: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

impl Gguf {
    /// The file's tensors under the hub's names, experts one by one.
    ///
    /// # Errors
    /// [`Error::BadFile`] for an architecture that is not known, with the list of those that are; [`Error::BadTensor`]
    /// for a tensor that the architecture does not have, or that has another shape than it can.
    pub fn into_checkpoint(self) -> Result<Checkpoint> {
        let architecture = self.architecture()?;
        let Some(dialect) = DIALECTS.iter().find(|d| d.architecture == architecture) else {
            let reason = format!(
                "holds a model of architecture {architecture:?}, which is not supported as GGUF; supported are {}",
                ARCHITECTURES.join(", ")
            );
            return Err(Error::bad_file(&self.path, reason));
        };
        let mut translation = Translation { gguf: &self, dialect, tensors: BTreeMap::new() };
        for (name, tensor) in &self.tensors {
            translation.tensor(name, tensor)?;
        }
        let tensors = translation.tensors;
        Ok(Checkpoint::of(self.path.display().to_string(), self.shards, tensors))
    }
}

struct Translation<'a> {
    gguf: &'a Gguf,
    dialect: &'a Dialect,
    tensors: BTreeMap<String, Located>,
}

impl Translation<'_> {
    fn tensor(&mut self, name: &str, tensor: &GgufTensor) -> Result<()> {
        if IGNORED.contains(&name) || IGNORED.iter().any(|i| name.ends_with(&format!(".{i}"))) {
            return Ok(());
        }
        if let Some((_, hub)) = OUTSIDE.iter().find(|(gguf, _)| *gguf == name) {
            return self.put((*hub).to_owned(), plain(tensor), tensor.shape.clone(), tensor.region);
        }
        let unknown = || {
            let reason = format!("is not known of the architecture {:?}", self.dialect.architecture);
            Error::bad_tensor(name, reason)
        };
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let Some((layer, rest)) = layer.filter(|(n, _)| n.bytes().all(|b| b.is_ascii_digit())) else {
            return Err(unknown());
        };
        let prefix = format!("model.layers.{layer}.");
        if rest.starts_with("nextn.") {
            // Multi-token prediction: kept under a name that says so, and ignored.
            return self.put(
                format!("mtp.{layer}.{rest}"),
                plain(tensor),
                tensor.shape.clone(),
                tensor.region,
            );
        }
        let (part, kind) = rest.rsplit_once('.').ok_or_else(unknown)?;
        if !matches!(kind, "weight" | "bias") {
            return Err(unknown());
        }
        for (stem, matrix) in ["ffn_gate", "ffn_up", "ffn_down"].into_iter().zip(self.dialect.matrices) {
            let Some(of) = part.strip_prefix(stem) else { continue };
            if of == "_exps" {
                return self.experts(name, tensor, &prefix, matrix, kind);
            }
            if of == "_shexp" {
                let names = ["gate_proj", "up_proj", "down_proj"];
                let at = self.dialect.matrices.iter().position(|m| *m == matrix).unwrap_or(0);
                let hub = format!("{prefix}{}.{}.{kind}", self.dialect.shared, names[at]);
                return self.put(hub, plain(tensor), tensor.shape.clone(), tensor.region);
            }
            // Before experts were stacked (2023).
            if let Some(expert) = of.strip_prefix('.') {
                let hub = format!("{prefix}{}.{expert}.{matrix}.{kind}", self.dialect.experts);
                return self.put(hub, plain(tensor), tensor.shape.clone(), tensor.region);
            }
        }
        let mut shape = tensor.shape.clone();
        let hub = match part {
            "ffn_gate_inp" => format!("{}.{kind}", self.dialect.router),
            "ffn_gate_inp_shexp" => {
                // One row, which files hold as a vector.
                if let [width] = *shape {
                    shape = vec![1, width];
                }
                format!("mlp.shared_expert_gate.{kind}")
            }
            "exp_probs_b" => self.dialect.choice_bias.to_owned(),
            "attn_sinks" => "self_attn.sinks".to_owned(),
            "attn_k_b" => return self.latent(name, tensor, layer, &prefix),
            // Read with attn_k_b.
            "attn_v_b" => return Ok(()),
            norm if norm == self.dialect.ffn_norm => format!("post_attention_layernorm.{kind}"),
            other => match LAYER.iter().find(|(gguf, _)| *gguf == other) {
                Some((_, hub)) => format!("{hub}.{kind}"),
                None => return Err(unknown()),
            },
        };
        let encoding = match (part, self.dialect.paired) {
            ("attn_q" | "attn_k", true) => self.paired(name, part, tensor)?,
            _ => plain(tensor),
        };
        self.put(prefix + &hub, encoding, shape, tensor.region)
    }

    fn put(&mut self, name: String, encoding: Encoding, shape: Vec<usize>, region: Region) -> Result<()> {
        match self.tensors.insert(name.clone(), Located { encoding, shape, region }) {
            None => Ok(()),
            Some(_) => Err(Error::bad_tensor(name, format!("is twice in {}", self.gguf.path.display()))),
        }
    }

    /// A stacked tensor as one of each expert.
    fn experts(
        &mut self,
        name: &str,
        tensor: &GgufTensor,
        prefix: &str,
        matrix: &str,
        kind: &str,
    ) -> Result<()> {
        let (experts, shape) = match (tensor.shape.split_first(), kind) {
            (Some((experts, shape @ [_, _])), "weight") => (*experts, shape),
            (Some((experts, shape @ [_])), "bias") => (*experts, shape),
            _ => {
                let reason = format!("expected [experts, out, in], found shape {:?}", tensor.shape);
                return Err(Error::bad_tensor(name, reason));
            }
        };
        if experts > MAX_EXPERTS {
            return Err(Error::bad_tensor(
                name,
                format!("has {experts} experts, the limit is {MAX_EXPERTS}"),
            ));
        }
        let len = tensor.region.len / experts;
        for e in 0..experts {
            let region = Region { start: tensor.region.start + e * len, len, ..tensor.region };
            let one = GgufTensor { kind: tensor.kind, shape: shape.to_vec(), region };
            let hub = format!("{prefix}{}.{e}.{matrix}.{kind}", self.dialect.experts);
            self.put(hub, plain(&one), one.shape, region)?;
        }
        Ok(())
    }

    fn key(&self, key: &str) -> Result<usize> {
        let key = format!("{}.{key}", self.dialect.architecture);
        let number = self.gguf.number(&key).and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
        number.ok_or_else(|| {
            let found = match self.gguf.get(&key) {
                Some(GgufValue::Texts(_)) | None => "it is missing".to_owned(),
                Some(other) => format!("it is {other:?}"),
            };
            Error::bad_file(&self.gguf.path, format!("needs a positive number at {key:?}; {found}"))
        })
    }

    /// q or k in the order of paired rotation.
    fn paired(&self, name: &str, part: &str, tensor: &GgufTensor) -> Result<Encoding> {
        let heads = self.key("attention.head_count")?;
        let heads = match self.gguf.number(&format!("{}.attention.head_count_kv", self.dialect.architecture))
        {
            Some(kv) if part == "attn_k" => kv as usize,
            _ => heads,
        };
        match *tensor.shape {
            [rows, _] if heads.checked_mul(2).is_some_and(|both| both > 0 && rows % both == 0) => {
                Ok(Encoding::Ggml(Ggml::new(tensor.kind, tensor.region, Order::Pairs(rows / heads))))
            }
            _ => {
                let reason =
                    format!("expected rows of {heads} heads of even width, found shape {:?}", tensor.shape);
                Err(Error::bad_tensor(name, reason))
            }
        }
    }

    /// The keys of latent attention, `[heads, latent, nope]`, with the values of the same layer, `[heads, value, latent]`.
    fn latent(&mut self, name: &str, keys: &GgufTensor, layer: &str, prefix: &str) -> Result<()> {
        let other = format!("blk.{layer}.attn_v_b.weight");
        let values = self.gguf.tensors.get(&other).ok_or_else(|| {
            Error::bad_tensor(name, format!("is there, but {other:?} is not; download the file again"))
        })?;
        let (&[heads, latent, nope], &[h, value, l]) = (&keys.shape[..], &values.shape[..]) else {
            let reason = format!("expected 3 dimensions, found {:?} and {:?}", keys.shape, values.shape);
            return Err(Error::bad_tensor(name, reason));
        };
        if (h, l) != (heads, latent) {
            let reason =
                format!("has shape {:?}, which does not go with {:?} of {other:?}", keys.shape, values.shape);
            return Err(Error::bad_tensor(name, reason));
        }
        let order = Order::Latent { nope, value, values: values.region, values_kind: values.kind };
        let encoding = Encoding::Ggml(Ggml::new(keys.kind, keys.region, order));
        let shape = vec![heads * (nope + value), latent];
        self.put(format!("{prefix}self_attn.kv_b_proj.weight"), encoding, shape, keys.region)
    }
}

fn plain(tensor: &GgufTensor) -> Encoding {
    match tensor.kind {
        GgmlType::F32 => Encoding::Plain(Dtype::F32),
        GgmlType::F16 => Encoding::Plain(Dtype::F16),
        GgmlType::BF16 => Encoding::Plain(Dtype::BF16),
        kind => Encoding::Ggml(Ggml::new(kind, tensor.region, Order::Plain)),
    }
}
