//! What would change a plan: tried out, each alone.

use comoe_core::ExpertFormat;
use comoe_core::plan::SharedPlan;
use comoe_models::{DenseFormat, LoadOptions, ModelPlan};
use serde::Serialize;

use super::{Case, is_fixed};
use crate::error::Result;

/// Shorter contexts than this are not advised, unless nothing fits without.
const LEAST_CONTEXT: usize = 1024;
/// And then not shorter ones than this.
const SHORTEST_CONTEXT: usize = 128;
/// A change that does not make the share of experts grow by so much is not worth a line.
const WORTH: f64 = 0.02;

/// A change, and what comes of it.
#[derive(Debug, Serialize)]
pub(super) struct Change {
    /// As it is written on the command line.
    option: String,
    fits: bool,
    /// Of all experts, those that would have a slot, 0 to 1.
    share: f64,
    slots: usize,
}

impl Change {
    pub(super) fn line(&self) -> String {
        match self.fits {
            true => {
                format!("{}: {} slots, {:.1} % of the experts", self.option, self.slots, 100.0 * self.share)
            }
            false => format!("{}: does not fit either", self.option),
        }
    }
}

/// What is worth changing, best first: nothing when every expert has a slot.
pub(super) fn changes(case: &Case<'_>, plan: &ModelPlan, memory: Option<&SharedPlan>) -> Result<Vec<Change>> {
    let now = memory.map_or(0.0, SharedPlan::share);
    if now >= 1.0 || memory.is_some() && is_fixed(&case.options) {
        return Ok(Vec::new());
    }
    let mut tried = Vec::new();
    let mut attempt = |option: String, change: &dyn Fn(&mut LoadOptions)| -> Result<bool> {
        let mut options = case.options.clone();
        change(&mut options);
        let (_, shared) = Case { options, ..*case }.plan()?;
        let shared = shared.ok();
        let share = shared.as_ref().map_or(0.0, SharedPlan::share);
        let slots = shared.as_ref().map_or(0, SharedPlan::slots);
        let fits = shared.is_some();
        tried.push(Change { option, fits, share, slots });
        Ok(fits)
    };
    let wider = plan.format().to_string() != ExpertFormat::INT4.to_string() && is_wider(plan);
    let plain = case.options.dense == DenseFormat::Plain;
    let least = if memory.is_none() { SHORTEST_CONTEXT.min(plan.context()) } else { LEAST_CONTEXT };
    if wider {
        attempt("--format int4".to_owned(), &|o| o.format = Some(ExpertFormat::INT4))?;
    }
    if plain {
        attempt("--dense-format int8".to_owned(), &|o| o.dense = DenseFormat::Int8)?;
    }
    let mut context = plan.context();
    while context / 2 >= least {
        context /= 2;
        // The longest that fits; where it fits anyway, half of it shows what the rest costs.
        if attempt(format!("--ctx {context}"), &|o| o.context = Some(context))? {
            break;
        }
    }
    if memory.is_none() {
        // All of it, with the longest context that fits.
        let formats: Vec<&str> = [(wider, "--format int4"), (plain, "--dense-format int8")]
            .into_iter()
            .filter_map(|(changes, option)| changes.then_some(option))
            .collect();
        let contexts = std::iter::successors(Some(plan.context()), |context| Some(context / 2));
        // One format alone was tried above.
        let contexts = contexts.take_while(|&c| c >= least).skip(usize::from(formats.len() < 2));
        for context in contexts.filter(|_| !formats.is_empty()) {
            let all = |o: &mut LoadOptions| {
                if plain {
                    o.dense = DenseFormat::Int8;
                }
                if wider {
                    o.format = Some(ExpertFormat::INT4);
                }
                o.context = Some(context);
            };
            let shorter = if context < plan.context() { format!(" --ctx {context}") } else { String::new() };
            if attempt(format!("{}{shorter}", formats.join(" ")), &all)? {
                break;
            }
        }
        // What fits, or else that nothing does.
        if tried.iter().any(|c| c.fits) {
            tried.retain(|c| c.fits);
        } else {
            tried = tried.pop().into_iter().collect();
        }
    } else {
        tried.retain(|c| c.fits && c.share >= now + WORTH);
    }
    tried.sort_by(|a, b| b.share.total_cmp(&a.share));
    Ok(tried)
}

/// Whether experts take more than INT4 would.
fn is_wider(plan: &ModelPlan) -> bool {
    !matches!(plan.format(), ExpertFormat::Int4 { .. } | ExpertFormat::Mxfp4)
}
