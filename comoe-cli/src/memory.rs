//! Memory by owner, for people and for programs: as a plan has it, and as a run has it, under the same names.

use comoe_core::plan::{DeviceBytes, MemoryPlan, PoolBytes};
use comoe_core::stats::human_bytes;
use comoe_models::{MeasuredMemory, NowAndPeak};
use serde::Serialize;

/// Bytes by owner.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Owners {
    #[serde(flatten)]
    device: DeviceBytes,
    /// All of the device's.
    total: u64,
    /// Experts' records in host memory.
    arena: u64,
}

impl Owners {
    fn new(device: DeviceBytes, arena: u64) -> Self {
        Self { device, total: device.total(), arena }
    }
}

/// A plan's.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Planned {
    #[serde(flatten)]
    owners: Owners,
    /// Device memory that may be taken.
    pub(crate) budget: u64,
    /// Of it, kept for what cannot be computed.
    pub(crate) margin: u64,
}

impl Planned {
    pub(crate) fn new(plan: &MemoryPlan) -> Self {
        Self { owners: Owners::new(plan.device, plan.arena), budget: plan.budget, margin: plan.margin }
    }

    pub(crate) fn device(&self) -> DeviceBytes {
        self.owners.device
    }
}

/// The object `memory` that `--json` prints: of a plan its first part, of a run all. Bytes everywhere.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Memory {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) plan: Option<Planned>,
    #[serde(skip_serializing_if = "Option::is_none")]
    now: Option<Owners>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peak: Option<Owners>,
    /// What the driver's pool holds on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<PoolBytes>,
    /// Of a GPU's memory, gone since the model began to be opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    taken: Option<NowAndPeak<u64>>,
}

impl Memory {
    /// Of a model that is not loaded.
    pub(crate) fn planned(plan: &MemoryPlan) -> Self {
        Self { plan: Some(Planned::new(plan)), now: None, peak: None, pool: None, taken: None }
    }

    /// Of a run, `None` where its device does not say.
    pub(crate) fn of_run(plan: Option<&MemoryPlan>, measured: Option<MeasuredMemory>) -> Self {
        let of = |device: DeviceBytes| measured.map(|m| Owners::new(device, m.arena));
        Self {
            plan: plan.map(Planned::new),
            now: measured.and_then(|m| of(m.device.now)),
            peak: measured.and_then(|m| of(m.device.peak)),
            pool: measured.and_then(|m| m.pool),
            taken: measured.and_then(|m| m.taken),
        }
    }

    /// The table of `--stats`, without a newline at its end.
    pub(crate) fn table(&self) -> String {
        let columns = [("planned", self.plan.map(|p| p.owners)), ("now", self.now), ("peak", self.peak)];
        let columns: Vec<_> =
            columns.into_iter().filter_map(|(name, owners)| Some((name, owners?))).collect();
        let Some((_, first)) = columns.first() else { return String::new() };
        let mut lines = vec![format!("memory   {:<18}", "by owner")];
        columns.iter().for_each(|(name, _)| lines[0] += &format!("{name:>12}"));
        let mut row = |name: &str, value: &dyn Fn(&Owners) -> u64| {
            let mut line = format!("         {name:<18}");
            columns.iter().for_each(|(_, owners)| line += &format!("{:>12}", human_bytes(value(owners))));
            lines.push(line);
        };
        for (i, (name, _)) in first.device.by_owner().into_iter().enumerate() {
            let value = |owners: &Owners| owners.device.by_owner()[i].1;
            if columns.iter().any(|(_, owners)| value(owners) > 0) {
                row(label(name), &value);
            }
        }
        row("all of these", &|owners| owners.total);
        row("experts in RAM", &|owners| owners.arena);
        if let Some(PoolBytes { used, used_peak, reserved, reserved_peak }) = self.pool {
            let [used, used_peak, reserved, reserved_peak] =
                [used, used_peak, reserved, reserved_peak].map(human_bytes);
            lines.push(format!(
                "         the driver's pool holds {reserved}, {used} of it in use (at most {reserved_peak} and {used_peak})"
            ));
        }
        if let Some(taken) = self.taken {
            let others = |taken: u64, owners: Option<Owners>| {
                human_bytes(taken.saturating_sub(owners.map_or(0, |o| o.total)))
            };
            lines.push(format!(
                "         taken of the GPU {} (at most {}): {} (at most {}) by none of these (libraries, kernels, graphs, the \
                 pool's rest)",
                human_bytes(taken.now),
                human_bytes(taken.peak),
                others(taken.now, self.now),
                others(taken.peak, self.peak)
            ));
        }
        lines.join("\n")
    }
}

/// An owner's name, for people.
pub(crate) fn label(owner: &str) -> &str {
    match owner {
        "dense" => "dense weights",
        "kv" => "KV cache",
        "workspace" => "activations",
        "slots" => "slots",
        "staging" => "staging slots",
        "ring" => "ring for prompts",
        other => other,
    }
}
