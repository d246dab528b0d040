//! Reads the rotary embedding as the hub spells it (`rope_theta` beside `rope_scaling`) and as transformers 5 does
//! (`rope_parameters`). Formulas' defaults are those of its `modeling_rope_utils.py`.

use super::outline::Defaults;
use super::plan::{Pairing, RopePlan, RopeScaling};
use crate::error::Result;
use crate::load::ConfigFile;

/// The rotary embedding of a head of `width`, from the first of `objects` (or the top) that has each field.
pub(super) fn rope(
    c: &ConfigFile,
    objects: &[&str],
    width: usize,
    pairing: Pairing,
    defaults: &Defaults,
) -> Result<RopePlan> {
    let r = Fields { c, objects };
    let partial = match (r.number("partial_rotary_factor")?, c.get::<f64>("rotary_dim")?) {
        (Some(partial), _) => partial,
        (None, Some(dim)) => dim / width as f64,
        (None, None) => defaults.partial,
    };
    let mut theta = r.number("rope_theta")?.unwrap_or(defaults.theta);
    let kind: String = match r.get("rope_type")? {
        Some(kind) => kind,
        None => r.get("type")?.unwrap_or_else(|| "default".to_owned()),
    };
    let partial_dim = (width as f64 * partial) as usize;
    let mut dim = partial_dim;
    let mut magnitude = r.number("attention_factor")?;
    let original = || -> Result<f64> {
        Ok(match r.number("original_max_position_embeddings")? {
            Some(original) => original,
            None => c.size("max_position_embeddings")? as f64,
        })
    };
    let factor = || -> Result<f64> {
        Ok(match r.number("factor")? {
            Some(factor) => factor,
            None => c.size("max_position_embeddings")? as f64 / original()?,
        })
    };
    let scaling = match kind.as_str() {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear(r.need("factor")?),
        // Hunyuan's: static, a larger base.
        "dynamic" if r.number("alpha")?.is_some_and(|a| a > 0.0) => {
            theta *= r.need("alpha")?.powf(dim as f64 / (dim as f64 - 2.0));
            RopeScaling::None
        }
        "yarn" => {
            let factor = factor()?;
            let growth = |m: f64| yarn_growth(factor, m);
            let nonzero = |field| Ok::<_, crate::Error>(r.number(field)?.filter(|v| *v != 0.0));
            let inferred = match (nonzero("mscale")?, nonzero("mscale_all_dim")?) {
                (Some(mscale), Some(all)) => growth(mscale) / growth(all),
                _ => growth(1.0),
            };
            magnitude = magnitude.or(Some(inferred));
            RopeScaling::Yarn {
                factor,
                original: original()?,
                fast: nonzero("beta_fast")?.unwrap_or(32.0),
                slow: nonzero("beta_slow")?.unwrap_or(1.0),
                truncate: r.get("truncate")?.unwrap_or(true),
            }
        }
        "llama3" => RopeScaling::Llama3 {
            factor: r.need("factor")?,
            low: r.need("low_freq_factor")?,
            high: r.need("high_freq_factor")?,
            original: original()?,
        },
        "longrope" | "su" => {
            let (original, factor) = (original()?, factor()?);
            let grown = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
            let inferred = magnitude.unwrap_or(grown);
            magnitude = Some(r.number("short_mscale")?.unwrap_or(inferred));
            let factors = |field: &str| -> Result<Vec<f64>> {
                let list: Vec<f64> = r.get(field)?.unwrap_or_default();
                if list.len() != dim / 2 {
                    let reason = format!("expected {} numbers, found {}", dim / 2, list.len());
                    return Err(c.bad(field, reason));
                }
                Ok(list)
            };
            RopeScaling::Long {
                short: factors("short_factor")?,
                long: factors("long_factor")?,
                long_magnitude: r.number("long_mscale")?.unwrap_or(inferred),
                original: original as usize,
            }
        }
        "proportional" => {
            dim = width;
            RopeScaling::Proportional { pairs: partial_dim / 2, factor: r.number("factor")?.unwrap_or(1.0) }
        }
        other => {
            let known = "default, linear, yarn, llama3, longrope, proportional, and dynamic with alpha";
            return Err(c.bad("rope_type", format!("{other:?} is not supported; supported: {known}")));
        }
    };
    if dim == 0 || !dim.is_multiple_of(2) || dim > width {
        return Err(c.bad("partial_rotary_factor", format!("{partial} of {width} is no even part of a head")));
    }
    Ok(RopePlan { theta, dim, pairing, scaling, magnitude: magnitude.unwrap_or(1.0) })
}

/// YaRN's growth of the softmax's temperature: `0.1 m ln(factor) + 1` (arXiv 2309.00071, equation 22).
pub(super) fn yarn_growth(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// Fields of the rotary embedding, wherever they are.
pub(super) struct Fields<'a> {
    pub(super) c: &'a ConfigFile,
    pub(super) objects: &'a [&'a str],
}

impl Fields<'_> {
    fn get<T: serde::de::DeserializeOwned>(&self, field: &str) -> Result<Option<T>> {
        let mut spellings: Vec<String> = self.objects.iter().map(|o| format!("{o}.{field}")).collect();
        spellings.push(field.to_owned());
        self.c.first(&spellings.iter().map(String::as_str).collect::<Vec<_>>())
    }

    pub(super) fn number(&self, field: &str) -> Result<Option<f64>> {
        self.get(field)
    }

    fn need(&self, field: &str) -> Result<f64> {
        let missing = || self.c.bad(&format!("rope_scaling.{field}"), "is missing");
        self.number(field)?.ok_or_else(missing)
    }
}
