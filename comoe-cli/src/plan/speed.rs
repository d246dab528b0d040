//! How fast a planned model may be, and by what it is said.

use std::collections::HashSet;

use comoe_core::plan::{Bandwidths, HitRates, SharedPlan, TokensPerSecond};
use comoe_core::replay::{ReplayPolicy, replay};
use comoe_core::stats::human_bytes;
use comoe_core::store::read_small;
use comoe_core::trace::Trace;
use comoe_models::ModelPlan;
use serde::{Deserialize, Serialize};

use super::Case;
use crate::args::PlanArgs;
use crate::error::{Error, Result};

/// PCIe 4 x16, as large page-locked copies reach it.
const LINK: f64 = 25.0;
/// Memory of a card of 24 GB.
const GPU_MEMORY: f64 = 900.0;
/// Two channels of DDR4.
const CPU_MEMORY: f64 = 40.0;
/// Bytes of a report of `comoe doctor`: some KB a GPU.
const MOST_DOCTOR: u64 = 4 << 20;

/// What may be expected of a decode step.
#[derive(Debug, Serialize)]
pub(super) struct Expected {
    hit_rate: HitRates,
    /// Where that is from: `trace`; `assumed` of the share of experts with a slot; `resident` where that is all of them;
    /// `too few` where a token needs more slots than there are, so that whatever is brought has left before its next use.
    hits_from: &'static str,
    /// Experts that a token uses in all layers.
    per_token: usize,
    bandwidths: Bandwidths,
    /// Where each is from: `given`, `doctor` or `assumed`.
    link_from: &'static str,
    memory_from: &'static str,
    /// Over which misses come, each with that bandwidth; absent where there is one.
    #[serde(skip_serializing_if = "is_one")]
    links: usize,
    /// Bytes that a token brings to the device, at best and at worst.
    bytes_per_token: [u64; 2],
    tokens_per_second: TokensPerSecond,
}

fn is_one(links: &usize) -> bool {
    *links == 1
}

/// The part of `comoe doctor --json` that matters here.
#[derive(Deserialize)]
struct Doctor {
    host: Host,
    #[serde(default)]
    gpus: Vec<Gpu>,
}

#[derive(Deserialize)]
struct Host {
    read_all_threads: f64,
}

#[derive(Deserialize)]
struct Gpu {
    #[serde(default)]
    transfers: Vec<Transfer>,
}

#[derive(Deserialize)]
struct Transfer {
    locked: f64,
}

impl Expected {
    pub(super) fn new(
        args: &PlanArgs,
        case: &Case<'_>,
        plan: &ModelPlan,
        memory: &SharedPlan,
    ) -> Result<Self> {
        let doctor = args.doctor.as_deref().map(read_doctor).transpose()?;
        let on_gpu = case.target.on_gpu;
        let best = |gpu: &Gpu| gpu.transfers.iter().map(|t| t.locked).fold(0.0, f64::max);
        let link = doctor.as_ref().and_then(|d| d.gpus.first()).map(best).filter(|b| *b > 0.0);
        let host = doctor.as_ref().map(|d| d.host.read_all_threads).filter(|b| *b > 0.0);
        let choose = |given: Option<f64>, measured: Option<f64>, assumed: f64| match (given, measured) {
            (Some(given), _) => (given, "given"),
            (None, Some(measured)) => (measured, "doctor"),
            (None, None) => (assumed, "assumed"),
        };
        let ((link, link_from), (own, memory_from)) = match on_gpu {
            true => (choose(args.link, link, LINK), choose(args.bandwidth, None, GPU_MEMORY)),
            // A miss is a copy within the same memory.
            false => {
                let own = choose(args.bandwidth, host, CPU_MEMORY);
                (own, own)
            }
        };
        let bandwidths = Bandwidths { link, memory: own };
        let slots = memory.slots();
        let resident = slots >= memory.experts();
        let per_token = plan.directory().layers().len() * plan.top_k();
        let trace = args.trace.as_deref().map(Trace::open).transpose().map_err(Error::core)?;
        if let Some(trace) = &trace {
            trace.info().check_model(plan.directory()).map_err(Error::core)?;
        }
        let (hit_rate, hits_from) = match &trace {
            _ if resident => (HitRates::known(1.0), "resident"),
            Some(trace) => {
                let cache = &case.options.cache;
                let policy = cache.policy.in_force(resident, on_gpu);
                let slots = slots / trace.layers().max(1);
                let score = replay(trace, ReplayPolicy::Online(policy), cache.scope, slots);
                (HitRates::known(score.hit_rate()), "trace")
            }
            None if slots < per_token => (HitRates::known(0.0), "too few"),
            None => (HitRates::assumed(memory.share()), "assumed"),
        };
        let token = plan.token_bytes();
        // Pools of one GPU share its link.
        let gpus: HashSet<&str> =
            memory.devices.iter().map(|d| case.rooms[d.number].device.as_str()).collect();
        let links = if on_gpu { gpus.len() } else { 1 };
        let missed = |rate| (token.missed(rate) / token.batch as f64).round() as u64;
        Ok(Self {
            hit_rate,
            hits_from,
            per_token,
            bandwidths,
            link_from,
            memory_from,
            bytes_per_token: [missed(hit_rate.high), missed(hit_rate.low)],
            tokens_per_second: match links {
                1 => token.tokens_per_second(hit_rate, bandwidths),
                // At worst misses come over one link after the other, at best over all at once.
                _ => {
                    let together = Bandwidths { link: link * links as f64, ..bandwidths };
                    let high = token.tokens_per_second(hit_rate, together).high;
                    TokensPerSecond { high, ..token.tokens_per_second(hit_rate, bandwidths) }
                }
            },
            links,
        })
    }

    /// Lines of the table: a name and a value each.
    pub(super) fn lines(&self, batch: usize, line: &mut dyn FnMut(&str, String)) {
        let percent = |rate: f64| format!("{:.0} %", 100.0 * rate);
        let HitRates { low, high } = self.hit_rate;
        line(
            "hits",
            match self.hits_from {
                "resident" => "all: every expert has a slot".to_owned(),
                "too few" => format!("none: a token uses {} experts, more than have a slot", self.per_token),
                "trace" => format!("{} when the trace is played", percent(high)),
                _ => format!(
                    "{} to {}: assumed, as recorded routing of comoe-tiny and of Qwen3-30B-A3B has it at this share",
                    percent(low),
                    percent(high)
                ),
            },
        );
        let [least, most] = self.bytes_per_token.map(human_bytes);
        let moved = if least == most { least } else { format!("{least} to {most}") };
        let each = if self.links > 1 { format!(" each of {} links", self.links) } else { String::new() };
        line(
            "moved a token",
            format!("{moved}, over {}{each}", self.source(self.bandwidths.link, self.link_from)),
        );
        let TokensPerSecond { low, high } = self.tokens_per_second;
        let all = if batch > 1 { " of all sequences together" } else { "" };
        line(
            "speed",
            format!(
                "{low:.1} to {high:.1} tokens/s{all}; weights are read at {}",
                self.source(self.bandwidths.memory, self.memory_from)
            ),
        );
    }

    fn source(&self, bandwidth: f64, from: &str) -> String {
        format!("{bandwidth:.0} GB/s ({from})")
    }
}

fn read_doctor(path: &std::path::Path) -> Result<Doctor> {
    let bad = |reason: String| Error::BadDoctor { path: path.to_owned(), reason };
    let text = read_small(path, MOST_DOCTOR).map_err(|e| {
        bad(match e {
            comoe_core::Error::Io { source, .. } => source.to_string(),
            comoe_core::Error::BadFile { reason, .. } => reason,
            e => e.to_string(),
        })
    })?;
    serde_json::from_slice(&text).map_err(|e| bad(format!("is not what `comoe doctor --json` prints ({e})")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_doctor_prints_is_read_with_and_without_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("doctor.json");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_doctor(&path)
        };
        let two = read(
            r#"{"host": {"read_all_threads": 61.5, "threads": 8}, "gpus": [{"transfers": [{"bytes": 1, "locked": 12.0},
               {"bytes": 2, "locked": 24.5}]}, {"ordinal": 1, "error": "x"}]}"#,
        )
        .unwrap();
        assert_eq!((two.host.read_all_threads, two.gpus.len()), (61.5, 2));
        assert!(two.gpus[1].transfers.is_empty());
        assert!(read(r#"{"host": {"read_all_threads": 1.0}}"#).unwrap().gpus.is_empty());
        // Sparse, so that whoever reads it whole takes its time.
        std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        let e = read_doctor(&path).err().unwrap().to_string();
        assert!(e.contains("1099511627776 bytes"), "{e}");
        std::fs::remove_file(&path).unwrap();
        let none = read_doctor(&path).err().unwrap().to_string();
        for e in [e, none] {
            assert_eq!(e.matches("doctor.json").count(), 1, "{e}");
        }
        let e = read("{}").err().unwrap().to_string();
        assert!(e.contains("doctor.json") && e.contains("comoe doctor --json"), "{e}");
    }
}
