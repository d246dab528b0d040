//! `comoe plan`: what a model would take, and how fast it may be, before anything of it is loaded.

mod advice;
mod devices;
mod speed;

use std::path::Path;

use comoe_core::Capacity;
use comoe_core::machine::ram_available;
use comoe_core::plan::{DeviceBytes, DevicePlan, Room, SharedPlan};
use comoe_core::stats::human_bytes;
use comoe_models::{KvPart, LoadOptions, ModelPlan, Target};
use serde::Serialize;

use self::advice::Change;
use self::devices::{Devices, OnDevice};
use self::speed::Expected;
use crate::args::PlanArgs;
use crate::error::{Error, Result};
use crate::load;
use crate::memory::Memory;
use crate::model_path::Planned;
use crate::output::Answers;
use crate::pins::Pins;

/// Host memory that is left to others, at least, or a sixteenth of all: what page-locking leaves.
const LEAVE_FREE: u64 = 2 << 30;

/// The object that `--json` prints. Fields may be added, never renamed; those of `memory` are a run's own.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    /// `cuda` or `cpu`.
    device: &'static str,
    format: String,
    context: usize,
    batch: usize,
    /// Whether all of it fits.
    fits: bool,
    /// Why not; absent when it fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Absent when it does not fit the device; of several devices the first's, as all until `kv`.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    /// Device memory that may be taken, in bytes.
    budget: u64,
    /// Device memory of everything but slots, bytes by owner.
    needs: DeviceBytes,
    /// Of a GPU's memory, kept for what cannot be computed.
    margin: u64,
    kv: Vec<Kv>,
    /// Each of several devices; absent where there is one.
    #[serde(skip_serializing_if = "is_one")]
    devices: Vec<OnDevice>,
    /// Where devices are not what one might think, and whose share is less than was asked for, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    experts: Experts,
    ram: Ram,
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<Expected>,
    /// What would change it.
    changes: Vec<Change>,
}

fn is_one(devices: &[OnDevice]) -> bool {
    devices.len() < 2
}

#[derive(Debug, Serialize)]
struct Kv {
    what: String,
    layers: usize,
    bytes: u64,
}

impl From<&KvPart> for Kv {
    fn from(part: &KvPart) -> Self {
        Self { what: part.what.clone(), layers: part.layers, bytes: part.bytes }
    }
}

#[derive(Debug, Serialize)]
struct Experts {
    layers: usize,
    experts: usize,
    /// In the format in force.
    record_bytes: usize,
    slot_bytes: usize,
    /// Slots that experts stay in, 0 when none fits.
    slots: usize,
    staging_slots: usize,
    ring_slots: usize,
    /// Of all experts, those that have a slot, 0 to 1.
    share: f64,
}

/// Host memory, in bytes.
#[derive(Debug, Serialize)]
struct Ram {
    /// All experts' records.
    arena: u64,
    /// What the run holds besides: on the CPU, its slots, dense weights and KV cache.
    held: u64,
    /// What there is, or was asked for; absent where nobody knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    available: Option<u64>,
    /// Of the arena, what does not fit beside the rest and what is left to others: it is read from the disk when it is
    /// needed.
    on_disk: u64,
}

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    args.model.check()?;
    let model = Planned::find(args.model.model.as_deref(), args.quiet)?;
    let Devices { on_gpu, rooms, notes } = Devices::find(&args.model)?;
    Pins::check(args.model.pin.as_deref(), model.path())?;
    let name = match &model {
        Planned::Here(path) => load::name_of_model(path),
        Planned::Headers(_, name) => name.clone(),
    };
    let options = load::options(&args.model, on_gpu, rooms.len());
    let target = Target { on_gpu, batch: args.batch };
    let case = Case { path: model.path(), rooms: &rooms, target, options };
    let (plan, memory) = case.plan()?;
    let mut report = Report::new(name, args, &case, &plan, &memory)?;
    report.notes.splice(0..0, notes);
    let mut out = Answers::new();
    out.piece(&match args.json {
        // Strings, numbers and lists only: nothing in it can fail to be written.
        true => serde_json::to_string(&report).unwrap_or_default() + "\n",
        false => report.table(args),
    });
    out.end()?;
    match report.reason {
        None => Ok(()),
        Some(reason) => Err(Error::DoesNotFit { reason }),
    }
}

/// A model under some options.
struct Case<'a> {
    path: &'a Path,
    /// Of each device.
    rooms: &'a [Room],
    target: Target,
    options: LoadOptions,
}

impl Case<'_> {
    /// What it needs, and how the memory is shared out; that is an error where it does not fit.
    fn plan(&self) -> Result<(ModelPlan, std::result::Result<SharedPlan, comoe_models::Error>)> {
        let plan = ModelPlan::open(self.path, self.target, &self.options)?;
        let memory = match plan.shared_memory(self.rooms, &self.options) {
            Err(e) if !self.is_about_room(&e) => return Err(e.into()),
            shared => shared,
        };
        Ok((plan, memory))
    }

    fn is_about_room(&self, e: &comoe_models::Error) -> bool {
        use comoe_core::Error as E;
        match e {
            comoe_models::Error::Core(E::NoRoom { .. } | E::OverBudget { .. }) => true,
            // What several devices have room for together.
            comoe_models::Error::Core(E::TooFewSlots { .. }) => {
                self.rooms.len() > 1 && !is_fixed(&self.options)
            }
            _ => false,
        }
    }
}

impl Report {
    fn new(
        model: String,
        args: &PlanArgs,
        case: &Case<'_>,
        plan: &ModelPlan,
        memory: &std::result::Result<SharedPlan, comoe_models::Error>,
    ) -> Result<Self> {
        let shared = memory.as_ref().ok();
        let ram = Ram::new(plan, shared, args.model.ram);
        let devices = OnDevice::all(case, plan, shared);
        let sum = |of: fn(&OnDevice) -> usize| devices.iter().map(of).sum();
        let expected = shared.map(|m| Expected::new(args, case, plan, m)).transpose()?;
        Ok(Self {
            model,
            device: if case.target.on_gpu { "cuda" } else { "cpu" },
            format: plan.format().to_string(),
            context: plan.context(),
            batch: case.target.batch,
            fits: memory.is_ok(),
            reason: memory.as_ref().err().map(ToString::to_string),
            memory: shared.and_then(|s| s.devices.first()).map(|first| Memory::planned(&first.memory)),
            budget: devices.first().map_or(0, |first| first.budget),
            needs: plan.needs(case.rooms.len())[0],
            margin: plan.margin(),
            kv: plan.kv().iter().map(Kv::from).collect(),
            experts: Experts {
                layers: plan.directory().layers().len(),
                experts: plan.directory().len(),
                record_bytes: plan.directory().largest_record(),
                slot_bytes: plan.slot_bytes(),
                slots: sum(|d| d.slots.slots),
                staging_slots: sum(|d| d.slots.staging),
                ring_slots: sum(|d| d.slots.ring),
                share: shared.map_or(0.0, SharedPlan::share),
            },
            notes: shared.map(|s| s.notes.clone()).unwrap_or_default(),
            devices,
            changes: advice::changes(case, plan, shared)?,
            ram,
            expected,
        })
    }

    fn table(&self, args: &PlanArgs) -> String {
        let mut t = Vec::new();
        let mut line = |name: &str, value: String| t.push(format!("{name:<18} {value}"));
        let gpu = self.device == "cuda";
        line(
            "model",
            format!(
                "{}: {} experts of {} ({}) in {} layers, context {}{}",
                self.model,
                self.experts.experts,
                human_bytes(self.experts.record_bytes as u64),
                self.format,
                self.experts.layers,
                self.context,
                if self.batch > 1 { format!(", {} sequences", self.batch) } else { String::new() }
            ),
        );
        let most = match (args.model.vram.is_empty(), args.model.ram) {
            (false, _) => "--vram",
            (true, Some(_)) if !gpu => "--ram for experts, and the rest",
            (true, _) => "free",
        };
        let kv =
            self.kv.iter().map(|kv| format!("{} ({} layers: {})", human_bytes(kv.bytes), kv.layers, kv.what));
        let kv: Vec<_> = kv.collect();
        let several = !is_one(&self.devices);
        for (d, device) in self.devices.iter().enumerate() {
            let name = match (several, gpu) {
                (true, _) => device.device.as_str(),
                (false, true) => "GPU memory",
                (false, false) => "memory",
            };
            line(name, format!("{} ({most})", human_bytes(device.budget)));
            device.lines(gpu, if d == 0 { &kv } else { &[] }, &mut line);
        }
        if several {
            let Experts { slots, experts, share, .. } = self.experts;
            line("all slots", format!("{slots} of {experts} experts, {:.1} %", 100.0 * share));
        }
        self.notes.iter().for_each(|note| line("note", note.clone()));
        line("RAM", self.ram.line(gpu));
        if let Some(expected) = &self.expected {
            expected.lines(self.batch, &mut line);
        }
        for (i, change) in self.changes.iter().enumerate() {
            line(if i == 0 { "what would change" } else { "" }, format!("- {}", change.line()));
        }
        t.join("\n") + "\n"
    }
}

impl Ram {
    fn new(plan: &ModelPlan, memory: Option<&SharedPlan>, asked: Option<u64>) -> Self {
        let (arena, on_gpu) = (plan.directory().total_bytes(), plan.target().on_gpu);
        let held = match (on_gpu, memory) {
            (true, _) => 0,
            (false, Some(memory)) => memory.devices.iter().map(|d| d.memory.device.total()).sum(),
            (false, None) => plan.others().total(),
        };
        let available = asked.or_else(ram_available);
        let on_disk = match (asked, memory) {
            // What was asked for is for experts alone.
            (Some(_), Some(memory)) => {
                let beside = |d: &DevicePlan| d.memory.arena + if on_gpu { 0 } else { d.memory.device.slots };
                arena.saturating_sub(memory.devices.iter().map(beside).sum())
            }
            (Some(asked), None) => arena.saturating_sub(asked),
            (None, _) => {
                let left = |all: u64| all.saturating_sub(held).saturating_sub(LEAVE_FREE.max(all / 16));
                available.map_or(0, |all| arena.saturating_sub(left(all)))
            }
        };
        Self { arena, held, available, on_disk }
    }

    fn line(&self, gpu: bool) -> String {
        let held = match gpu {
            true => String::new(),
            false => format!(" (page cache) and {} for the rest", human_bytes(self.held)),
        };
        let mut text = format!("{} for all experts{held}", human_bytes(self.arena));
        if let Some(available) = self.available {
            text += &format!(", {} available", human_bytes(available));
        }
        if self.on_disk > 0 {
            text += &format!(
                "; {} of them stay on the disk, which is far slower: more RAM, or a smaller --format",
                human_bytes(self.on_disk)
            );
        }
        text
    }
}

/// Whether slots are given by name: then they change with nothing else.
fn is_fixed(options: &LoadOptions) -> bool {
    matches!(options.cache.capacity, Capacity::Slots(_) | Capacity::Fraction(_))
}
