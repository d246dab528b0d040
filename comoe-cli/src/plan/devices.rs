//! The devices that a plan is for, and what each has of it.

use comoe_core::machine::ram_available;
use comoe_core::plan::{DeviceBytes, Room, SharedPlan, SlotPlan};
use comoe_core::stats::human_bytes;
use comoe_core::{cuda_device, cuda_memory};
use comoe_models::ModelPlan;
use serde::Serialize;

use super::Case;
use crate::args::ModelArgs;
use crate::device::{self, DeviceChoice};
use crate::error::{Error, Result};
use crate::memory::{Memory, label};

/// The devices to plan for.
pub(super) struct Devices {
    pub(super) on_gpu: bool,
    /// The memory of each.
    pub(super) rooms: Vec<Room>,
    /// Where they are not what one might think.
    pub(super) notes: Vec<String>,
}

impl Devices {
    /// Those asked for: of auto GPUs that have a limit, which need not be here, or else what a run would take.
    ///
    /// # Errors
    /// For a GPU without a limit that cannot be used.
    pub(super) fn find(args: &ModelArgs) -> Result<Self> {
        let (on_gpu, mut notes) = match &args.device {
            DeviceChoice::Cpu | DeviceChoice::Pools(_) => (false, Vec::new()),
            DeviceChoice::Auto if args.vram.is_empty() => {
                let found = device::open(&DeviceChoice::Auto)?;
                let not_here = |note| format!("{note}; --vram SIZE plans for a GPU that is not here");
                (found.device.is_cuda(), found.notes.into_iter().map(not_here).collect())
            }
            DeviceChoice::Auto | DeviceChoice::Cuda(_) | DeviceChoice::Several(_) => (true, Vec::new()),
        };
        let rooms = rooms(args, on_gpu)?;
        notes.extend(shared_by_pools(&rooms).filter(|_| on_gpu));
        Ok(Self { on_gpu, rooms, notes })
    }
}

/// Notes on GPUs that are named more than once with limits: each pool has its own.
fn shared_by_pools(rooms: &[Room]) -> impl Iterator<Item = String> {
    rooms.iter().enumerate().filter_map(|(n, room)| {
        let same = |r: &&Room| r.device == room.device;
        let (pools, first) = (rooms.iter().filter(same).count(), rooms[..n].iter().all(|r| !same(&r)));
        let limits = rooms.iter().filter(same).map(|r| r.budget);
        let all = limits.sum::<Option<u64>>().filter(|_| pools > 1 && first)?;
        Some(format!("{} has {pools} pools, whose limits are {} together", room.device, human_bytes(all)))
    })
}

/// The memory to plan for, device by device: what was asked for, or what the device has now.
fn rooms(args: &ModelArgs, on_gpu: bool) -> Result<Vec<Room>> {
    let named = match &args.device {
        DeviceChoice::Auto if !on_gpu => vec!["this machine".to_owned()],
        DeviceChoice::Cpu => vec!["this machine".to_owned()],
        DeviceChoice::Pools(count) => (0..*count).map(|n| format!("pool {n}")).collect(),
        DeviceChoice::Cuda(ordinal) => vec![format!("cuda:{ordinal}")],
        DeviceChoice::Several(ordinals) => ordinals.iter().map(|o| format!("cuda:{o}")).collect(),
        // As many GPUs as have a limit; they need not be here.
        DeviceChoice::Auto => (0..args.vram.len().max(1)).map(|o| format!("cuda:{o}")).collect(),
    };
    let last = args.vram.last().copied();
    let room = |(n, device): (usize, &String)| {
        let budget = args.vram.get(n).copied().or(last);
        let pools = named.iter().filter(|name| *name == device).count() as u64;
        let free = match (budget, on_gpu) {
            (Some(_), _) => u64::MAX,
            // What is asked for is for experts, and cuts their room itself.
            (None, false) if args.ram.is_some() => u64::MAX,
            (None, false) => ram_available().unwrap_or(u64::MAX) / named.len() as u64,
            (None, true) => free_on(&args.device, n)? / pools,
        };
        Ok(Room { device: device.clone(), free, budget, reserve: 0, on_device: on_gpu })
    };
    named.iter().enumerate().map(room).collect()
}

/// What is free on GPU number `n` of those asked for.
fn free_on(devices: &DeviceChoice, n: usize) -> Result<u64> {
    let ordinal = match devices {
        DeviceChoice::Cuda(ordinal) => *ordinal,
        DeviceChoice::Several(ordinals) => ordinals[n],
        _ => 0,
    };
    let measured = cuda_device(ordinal).and_then(|device| cuda_memory(&device));
    let (free, _) = measured.map_err(|e| Error::NoGpuToPlanFor { reason: Error::from(e).line() })?;
    Ok(free)
}

/// What one device is to hold.
#[derive(Debug, Serialize)]
pub(super) struct OnDevice {
    pub(super) device: String,
    /// Its memory that may be taken, in bytes.
    pub(super) budget: u64,
    /// Everything but slots, bytes by owner.
    needs: DeviceBytes,
    /// Of a GPU's memory, kept for what cannot be computed.
    margin: u64,
    /// Absent when it does not fit, or has no share of the experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    /// Experts that it owns.
    experts: usize,
    #[serde(flatten)]
    pub(super) slots: SlotPlan,
}

impl OnDevice {
    /// All devices that were asked for.
    pub(super) fn all(case: &Case<'_>, plan: &ModelPlan, shared: Option<&SharedPlan>) -> Vec<Self> {
        let needs = plan.needs(case.rooms.len());
        let of = |(number, room): (usize, &Room)| {
            let share = shared.and_then(|s| s.devices.iter().find(|d| d.number == number));
            let memory = share.map(|share| &share.memory);
            Self {
                device: room.device.clone(),
                budget: memory.map_or(room.free.min(room.budget.unwrap_or(u64::MAX)), |m| m.budget),
                needs: needs[number.min(1)],
                margin: plan.margin(),
                memory: memory.map(Memory::planned),
                experts: memory.map_or(0, |m| m.experts),
                slots: memory.map(|m| m.slots).unwrap_or_default(),
            }
        };
        case.rooms.iter().enumerate().map(of).collect()
    }

    /// Lines of the table: a name and a value each. `kv` has the KV cache by kind of layer, where it is this device's.
    pub(super) fn lines(&self, gpu: bool, kv: &[String], line: &mut dyn FnMut(&str, String)) {
        if !kv.is_empty() {
            line("  dense weights", human_bytes(self.needs.dense));
        }
        for (i, kv) in kv.iter().enumerate() {
            line(if i == 0 { "  KV cache" } else { "" }, kv.clone());
        }
        if gpu {
            let workspace = human_bytes(self.needs.workspace);
            line("  activations", format!("{workspace} (largest chunk of a prompt)"));
            line("  buffers", format!("{} (decode steps, tables)", human_bytes(self.needs.buffers)));
            line("  margin", format!("{} (libraries, kernels, graphs, rounding)", human_bytes(self.margin)));
        }
        let Some(planned) = self.memory.as_ref().and_then(|m| m.plan) else { return };
        let device = planned.device();
        for (owner, bytes) in [("staging", device.staging), ("ring", device.ring)] {
            if bytes > 0 {
                line(&format!("  {}", label(owner)), human_bytes(bytes));
            }
        }
        let (slots, experts) = (self.slots.slots, self.experts);
        let share = 100.0 * slots as f64 / experts.max(1) as f64;
        line("  slots", format!("{}: {slots} of {experts} experts, {share:.1} %", human_bytes(device.slots)));
    }
}
