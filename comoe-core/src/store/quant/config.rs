//! What `quantization_config` of a model's `config.json` says that tensors do not.

use serde_json::Value;

use crate::error::{Error, Result};

/// How a checkpoint's quantised tensors are to be read. Which encoding a matrix has is told by its tensors' names; the
/// default is what published checkpoints have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantisation {
    /// Rows and columns of an FP8 block.
    pub(super) fp8_block: [usize; 2],
    /// What GPTQ's zero points are stored short of.
    pub(super) gptq_zero_offset: u32,
}

impl Default for Quantisation {
    fn default() -> Self {
        Self { fp8_block: [128, 128], gptq_zero_offset: 1 }
    }
}

impl Quantisation {
    /// What works, for messages.
    pub const KNOWN: &str = "fp8 (one scale for a tensor, a row or a block), mxfp4, gptq and awq (gemm) in 4 bits, \
                             compressed-tensors as pack-quantized in 4 bits and as float-quantized in 8, and GGUF files";

    /// Reads `quantization_config` (or `compression_config`).
    ///
    /// # Errors
    /// [`Error::UnsupportedQuantisation`], which names the method and lists those that work.
    pub fn from_config(config: &Value) -> Result<Self> {
        let text = |key: &str| config.get(key).and_then(Value::as_str);
        let number = |key: &str| config.get(key).and_then(Value::as_u64);
        let refuse = |asked: String| Err(Error::UnsupportedQuantisation { asked });
        let default = Self::default();
        let Some(method) = text("quant_method") else {
            let algorithm = text("quant_algo").or(text("producer")).unwrap_or("without a quant_method");
            return refuse(algorithm.to_owned());
        };
        match method {
            "mxfp4" => Ok(default),
            "fp8" => match config.get("weight_block_size") {
                None | Some(Value::Null) => Ok(default),
                Some(block) => match block_of(block) {
                    Some(fp8_block) => Ok(Self { fp8_block, ..default }),
                    None => refuse(format!("fp8 with a weight_block_size of {block}")),
                },
            },
            "gptq" => match (number("bits"), text("checkpoint_format").unwrap_or("gptq")) {
                (Some(4), "gptq") => Ok(default),
                (Some(4), "gptq_v2") => Ok(Self { gptq_zero_offset: 0, ..default }),
                (bits, format) => refuse(format!("gptq in {} bits as {format}", shown(bits))),
            },
            "awq" => {
                let bits = number("bits").or(number("w_bit"));
                let version = text("version").unwrap_or("gemm").to_ascii_lowercase();
                match (bits, version.as_str()) {
                    (Some(4), "gemm") => Ok(default),
                    (bits, version) => refuse(format!("awq in {} bits as {version}", shown(bits))),
                }
            }
            "compressed-tensors" => Self::from_compressed(config),
            other => refuse(other.to_owned()),
        }
    }

    /// compressed-tensors: a list of groups, of which all must be readable.
    fn from_compressed(config: &Value) -> Result<Self> {
        let format = |of: &Value| of.get("format").and_then(Value::as_str).map(str::to_owned);
        let whole = format(config).unwrap_or_else(|| "no format".to_owned());
        let refuse = |what: &str| {
            Err(Error::UnsupportedQuantisation { asked: format!("compressed-tensors with {what}") })
        };
        let mut this = Self::default();
        let groups = config.get("config_groups").and_then(Value::as_object);
        for group in groups.into_iter().flat_map(|groups| groups.values()) {
            let format = format(group).unwrap_or_else(|| whole.clone());
            let Some(weights) = group.get("weights").filter(|w| !w.is_null()) else { continue };
            let bits = weights.get("num_bits").and_then(Value::as_u64);
            match (format.as_str(), bits) {
                ("pack-quantized", Some(4)) => {}
                ("float-quantized" | "naive-quantized", Some(8)) => {
                    if weights.get("type").and_then(Value::as_str) != Some("float") {
                        return refuse(&format!("{format} integers"));
                    }
                    if let Some(block) = weights.get("block_structure").filter(|b| !b.is_null()) {
                        match block_of(block) {
                            Some(block) => this.fp8_block = block,
                            None => return refuse(&format!("a block_structure of {block}")),
                        }
                    }
                }
                (format, bits) => return refuse(&format!("{format} in {} bits", shown(bits))),
            }
        }
        Ok(this)
    }
}

fn shown(bits: Option<u64>) -> String {
    bits.map_or_else(|| "unknown".to_owned(), |bits| bits.to_string())
}

/// `[rows, columns]`, both at least 1; `"128x128"` in some files.
fn block_of(value: &Value) -> Option<[usize; 2]> {
    let numbers: Vec<usize> = match value {
        Value::String(text) => text.split('x').map(|n| n.parse().ok()).collect::<Option<_>>()?,
        Value::Array(all) => {
            all.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect::<Option<_>>()?
        }
        _ => return None,
    };
    match *numbers {
        [rows, cols] if rows > 0 && cols > 0 => Some([rows, cols]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn published_configurations_are_read() {
        let read = |config: Value| Quantisation::from_config(&config).unwrap();
        let default = Quantisation::default();
        assert_eq!(read(json!({"quant_method": "fp8", "weight_block_size": [128, 128]})), default);
        assert_eq!(read(json!({"quant_method": "fp8", "weight_block_size": [16, 32]})).fp8_block, [16, 32]);
        assert_eq!(read(json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})), default);
        assert_eq!(read(json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true})), default);
        let v2 = json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"});
        assert_eq!(read(v2).gptq_zero_offset, 0);
        assert_eq!(read(json!({"quant_method": "awq", "bits": 4, "version": "GEMM"})), default);
        let packed = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}});
        assert_eq!(read(packed), default);
        let blocks = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"weights":
                {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 32]}}}});
        assert_eq!(read(blocks).fp8_block, [64, 32]);
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        for (config, name) in [
            (json!({"quant_method": "bitsandbytes"}), "bitsandbytes"),
            (json!({"quant_method": "gptq", "bits": 8}), "gptq in 8 bits"),
            (json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}), "marlin"),
            (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "gemv"),
            (json!({"quant_algo": "NVFP4"}), "NVFP4"),
            (json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), "weight_block_size"),
            (json!({}), "without a quant_method"),
            (
                json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                    "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}}}),
                "nvfp4-pack-quantized in 4 bits",
            ),
            (
                json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}}),
                "pack-quantized in 8 bits",
            ),
        ] {
            let error = Quantisation::from_config(&config).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("gptq and awq"), "{config}: {error}");
        }
    }
}
