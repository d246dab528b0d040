//! What is told about a run: `--stats` for people, `--json` for programs.

use comoe_core::backend::cuda::measure::copy_bandwidth;
use comoe_core::stats::human_bytes;
use comoe_core::{CacheStats, PageLocking};
use comoe_models::{Finish, Generation, Reply};
use serde::Serialize;

use crate::load::Loaded;
use crate::memory::Memory;
use crate::output::say;
use crate::sys::MemoryWatch;

/// The object that `--json` prints. Fields may be added, never renamed.
#[derive(Debug, Serialize)]
pub(crate) struct Report<'a> {
    /// The answer.
    text: &'a str,
    /// What the model thought before; absent when it did not, or when that is hidden.
    #[serde(skip_serializing_if = "Option::is_none")]
    thought: Option<&'a str>,
    tokens: &'a [u32],
    prompt_tokens: usize,
    /// Prompt tokens whose keys and values were kept from the turn before.
    reused_tokens: usize,
    finish: Finish,
    seed: u64,
    model: String,
    format: String,
    timings: Timings,
    cache: Cache,
    /// Whether replayed steps guess ahead at the answer's end; absent where the clock does not decide that.
    #[serde(skip_serializing_if = "Option::is_none")]
    asks_ahead: Option<bool>,
    /// Bytes by owner, under the names of `comoe plan --json`.
    memory: Memory,
    /// Bytes; absent where the system does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_rss_anon_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Timings {
    load_s: f64,
    /// From the start of loading to the first token of the first answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_token_s: Option<f64>,
    /// From the start of reading experts to the last that was page-locked; absent while that goes on, and on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    page_locked_s: Option<f64>,
    prefill_s: f64,
    decode_s: f64,
    decode_tok_s: f64,
}

/// Counters since the program started.
#[derive(Debug, Serialize)]
struct Cache {
    slots: usize,
    /// Slots come and go: the fewest and the most there were, and how often that changed.
    least_slots: usize,
    most_slots: usize,
    resizes: u64,
    staging_slots: usize,
    ring_slots: usize,
    pinned_slots: usize,
    experts: usize,
    record_bytes: usize,
    policy: String,
    scope: String,
    prefetch: String,
    /// In force: `device` or `host`.
    driver: String,
    accesses: u64,
    hits: u64,
    /// Of them, those on pinned experts.
    pinned_hits: u64,
    misses: u64,
    late: u64,
    hit_rate: f64,
    transfers: u64,
    records_moved: u64,
    bytes_moved: u64,
    /// Of all that was moved, what kernels of device-driven steps read: in no time below.
    read_through_bytes: u64,
    guessed: u64,
    guessed_right: u64,
    prefetched: u64,
    prefetched_bytes: u64,
    prefetch_used: u64,
    prefetch_wasted: u64,
    prefetch_wasted_bytes: u64,
    stalled_s: f64,
    /// Absent where RAM has room for every expert.
    #[serde(skip_serializing_if = "Option::is_none")]
    tiers: Option<Tiers>,
    /// GB/s of transfers while they ran; absent before the first, or where their time is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    link_gb_s: Option<f64>,
    /// Absent where there is one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<OnDevice>,
}

/// What one of several devices has of the experts.
#[derive(Debug, Serialize)]
struct OnDevice {
    device: String,
    slots: usize,
    experts: usize,
    accesses: u64,
    hits: u64,
    bytes_moved: u64,
}

/// Where experts were when they were needed, in numbers of them.
#[derive(Debug, Serialize)]
struct Tiers {
    /// In a slot.
    hot: u64,
    /// In RAM.
    warm: u64,
    /// On disk.
    cold: u64,
    /// Of the cold ones, those that had been read when they were needed.
    cold_early: u64,
    /// Experts that RAM holds, on the CPU beside the slots.
    ram_experts: usize,
    disk_reads: u64,
    disk_bytes: u64,
    /// Read and not used.
    disk_unused: u64,
    /// Time with a read under way.
    disk_s: f64,
    /// Time that slots waited for reads, added up.
    disk_waited_s: f64,
}

impl Tiers {
    fn of(stats: &CacheStats) -> Option<Self> {
        stats.tier.map(|tier| Self {
            hot: stats.hits(),
            warm: tier.warm,
            cold: tier.cold,
            cold_early: tier.early,
            ram_experts: tier.places,
            disk_reads: tier.reads,
            disk_bytes: tier.read_bytes,
            disk_unused: tier.unused,
            disk_s: tier.reading.as_secs_f64(),
            disk_waited_s: tier.waited.as_secs_f64(),
        })
    }
}

impl<'a> Report<'a> {
    pub(crate) fn new(loaded: &Loaded, reply: &'a Reply, seed: u64, memory: Option<&MemoryWatch>) -> Self {
        let generation = &reply.generation;
        let timings = &generation.timings;
        Self {
            text: &reply.answer,
            thought: reply.thought.as_deref(),
            tokens: &generation.tokens,
            prompt_tokens: generation.prompt_tokens,
            reused_tokens: generation.reused_tokens,
            finish: generation.finish,
            seed,
            model: loaded.name(),
            format: loaded.format(),
            timings: Timings {
                load_s: loaded.took.as_secs_f64(),
                first_token_s: loaded.first_token().map(|t| t.as_secs_f64()),
                page_locked_s: page_locking(loaded).and_then(|l| l.took).map(|t| t.as_secs_f64()),
                prefill_s: timings.prefill.as_secs_f64(),
                decode_s: timings.decode.as_secs_f64(),
                decode_tok_s: timings.decode_tokens_per_second(),
            },
            cache: Cache::new(loaded, &loaded.model.experts().stats()),
            asks_ahead: generation.asks_ahead,
            memory: memory_of(loaded),
            peak_rss_anon_bytes: memory.and_then(MemoryWatch::peak),
        }
    }

    /// One line of JSON, with its newline.
    pub(crate) fn line(&self) -> String {
        // Strings, numbers and lists only: nothing in it can fail to be written.
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }
}

fn page_locking(loaded: &Loaded) -> Option<PageLocking> {
    loaded.model.experts().page_locking()
}

/// When the first answer began, and when all experts were page-locked.
fn say_start(loaded: &Loaded) {
    let first = loaded.first_token().map(|t| format!(", first token after {:.2} s", t.as_secs_f64()));
    let locked = page_locking(loaded).map(|l| {
        let (locked, total) = (human_bytes(l.locked), human_bytes(l.total));
        match l.took {
            Some(took) => {
                format!(", {locked} of {total} of experts page-locked in {:.2} s", took.as_secs_f64())
            }
            None => format!(", {locked} of {total} of experts page-locked so far"),
        }
    });
    let (loaded, first) = (loaded.took.as_secs_f64(), first.unwrap_or_default());
    say!("start    loaded after {loaded:.2} s{first}{}", locked.unwrap_or_default());
}

/// Memory by owner, planned and measured.
fn memory_of(loaded: &Loaded) -> Memory {
    let decoder = loaded.model.decoder();
    Memory::of_run(decoder.memory_plan(), decoder.measure_memory().ok())
}

impl Cache {
    fn new(loaded: &Loaded, stats: &CacheStats) -> Self {
        let options = &loaded.options.cache;
        Self {
            slots: stats.slots,
            least_slots: stats.least_slots,
            most_slots: stats.most_slots,
            resizes: stats.resizes,
            staging_slots: stats.staging_slots,
            ring_slots: stats.ring_slots,
            pinned_slots: stats.pinned_slots,
            experts: stats.records,
            record_bytes: stats.slot_bytes,
            policy: loaded.model.experts().policy().to_string(),
            scope: options.scope.to_string(),
            prefetch: options.prefetch.to_string(),
            driver: loaded.model.experts().driver().to_string(),
            accesses: stats.accesses(),
            hits: stats.hits(),
            pinned_hits: stats.pinned_hits(),
            misses: stats.misses(),
            late: stats.late(),
            hit_rate: stats.hit_rate(),
            transfers: stats.transfers,
            records_moved: stats.records_moved,
            bytes_moved: stats.bytes_moved,
            read_through_bytes: stats.read_through_bytes,
            guessed: stats.guessed,
            guessed_right: stats.guessed_right,
            prefetched: stats.prefetched,
            prefetched_bytes: stats.prefetched_bytes,
            prefetch_used: stats.prefetch_used,
            prefetch_wasted: stats.prefetch_wasted,
            prefetch_wasted_bytes: stats.prefetch_wasted_bytes,
            stalled_s: stats.time.stalled.as_secs_f64(),
            tiers: Tiers::of(stats),
            link_gb_s: stats.bandwidth(),
            devices: stats
                .devices
                .iter()
                .map(|d| OnDevice {
                    device: d.device.clone(),
                    slots: d.slots,
                    experts: d.records,
                    accesses: d.accesses,
                    hits: d.hits,
                    bytes_moved: d.bytes_moved,
                })
                .collect(),
        }
    }
}

/// Speed of one answer.
pub(crate) fn say_speed(generation: &Generation) {
    let timings = &generation.timings;
    let prefill = timings.prefill.as_secs_f64();
    let kept = match generation.reused_tokens {
        0 => String::new(),
        n => format!(", {n} more kept from before"),
    };
    say!(
        "prompt   {} tokens in {prefill:.3} s ({:.0} tokens/s){kept}",
        timings.prefill_tokens,
        timings.prefill_tokens as f64 / prefill.max(f64::MIN_POSITIVE)
    );
    say!(
        "answer   {} tokens in {:.3} s ({:.1} tokens/s), ended by {}",
        generation.tokens.len(),
        timings.decode.as_secs_f64(),
        timings.decode_tokens_per_second(),
        match generation.finish {
            Finish::Stop => "the model",
            Finish::Length => "the limit of tokens",
            Finish::Cancelled => "Ctrl-C",
        }
    );
    match generation.asks_ahead {
        Some(true) => say!("guessing on: by the clock, steps take no longer with it"),
        Some(false) => say!("guessing off: by the clock, steps take longer with it"),
        None => {}
    }
}

/// The cache's counters and the memory.
pub(crate) fn say_cache(loaded: &Loaded, memory: &MemoryWatch) {
    let stats = loaded.model.experts().stats();
    say_start(loaded);
    say!("{stats}");
    let (driver, asked) = (loaded.model.experts().driver(), loaded.options.cache.driver);
    say!("driver   {driver} ({asked} was asked for)");
    if let Some(line) = loaded.predictor_table() {
        say!("{line}");
    }
    say_link(loaded, &stats);
    say!("{}", memory_of(loaded).table());
    if let Some(peak) = memory.peak() {
        say!(
            "         peak RssAnon {} (sampled every {} ms)",
            human_bytes(peak),
            MemoryWatch::EVERY.as_millis()
        );
    }
}

/// Size of the copies that show what a link can do; `comoe doctor` finds its best figure there.
const LARGE_COPY: usize = 64 << 20;
/// Transfers that reach less of the measured bandwidth deserve a warning.
const GOOD_PART: f64 = 0.7;
/// Fewer bytes than this say nothing about a link: they are over in milliseconds.
const ENOUGH_BYTES: u64 = 256 << 20;
/// Copies of less do not fill a link.
const SMALL_COPY: u64 = 1 << 20;

/// Bandwidth achieved, and on a GPU what the link can do, measured now.
fn say_link(loaded: &Loaded, stats: &CacheStats) {
    let Some(achieved) = stats.bandwidth() else { return };
    let device = loaded.model.decoder().device();
    if !device.is_cuda() {
        say!("link     {achieved:.1} GB/s of transfers while they ran");
        return;
    }
    let measured = match copy_bandwidth(device, LARGE_COPY) {
        Ok(measured) => measured,
        Err(e) => {
            say!(
                "link     {achieved:.1} GB/s of transfers while they ran; the link could not be measured: {e}"
            );
            return;
        }
    };
    say!(
        "link     {achieved:.1} GB/s of transfers while they ran, {:.0} % of the {measured:.1} GB/s that large page-locked \
         copies reach (as in comoe doctor)",
        100.0 * achieved / measured
    );
    let experts = loaded.model.experts();
    let locked = experts.page_locking().map(|locking| locking.locked);
    let locked = locked.or(experts.backend_info().page_locked);
    let unlocked = locked.map_or(0, |l| experts.directory().total_bytes().saturating_sub(l));
    if let Some(warning) = slow_link(stats, achieved, measured, unlocked) {
        say!("warning: {warning}");
    }
}

/// What to say of transfers that reach `achieved` of `measured` GB/s, with `unlocked` bytes of experts not page-locked.
fn slow_link(stats: &CacheStats, achieved: f64, measured: f64, unlocked: u64) -> Option<String> {
    let moved = (stats.bytes_moved + stats.prefetched_bytes).saturating_sub(stats.read_through_bytes);
    // A NaN is not below.
    if moved < ENOUGH_BYTES || achieved >= GOOD_PART * measured || measured.is_nan() {
        return None;
    }
    let mut causes = Vec::new();
    if unlocked > 0 {
        causes.push(format!(
            "{} of the experts are not page-locked (see the load lines, and comoe doctor for the limit)",
            human_bytes(unlocked)
        ));
    }
    let batch = moved / (stats.transfers + stats.prefetched).max(1);
    if batch < SMALL_COPY {
        causes.push(format!("a transfer brings only {}, too little to fill the link", human_bytes(batch)));
    }
    if causes.is_empty() {
        causes.push(
            "other work on the link or on memory (run comoe doctor while the machine is idle)".to_owned(),
        );
    }
    Some(format!(
        "transfers reach {:.0} % of what the link can do: {}",
        100.0 * achieved / measured,
        causes.join("; ")
    ))
}

/// What the cache advises after the run.
pub(crate) fn say_warnings(loaded: &Loaded) {
    for warning in loaded.model.experts().stats().warnings() {
        say!("warning: {warning}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(bytes: u64, transfers: u64) -> CacheStats {
        CacheStats { bytes_moved: bytes, transfers, ..CacheStats::default() }
    }

    #[test]
    fn slow_transfers_name_their_causes_and_fast_ones_say_nothing() {
        let large = moved(1 << 30, 100);
        assert_eq!(slow_link(&large, 36.0, 50.0, 1 << 30), None);
        let said = slow_link(&large, 34.0, 50.0, 1 << 30).unwrap();
        assert!(
            said.contains("68 %") && said.contains("1.0 GiB of the experts are not page-locked"),
            "{said}"
        );
        assert!(!said.contains("too little"), "{said}");
        let said = slow_link(&moved(1 << 30, 16 << 10), 5.0, 50.0, 0).unwrap();
        assert!(said.contains("only 64.0 KiB") && !said.contains("not page-locked"), "{said}");
        let said = slow_link(&large, 5.0, 50.0, 0).unwrap();
        assert!(said.contains("other work"), "{said}");
        assert_eq!(slow_link(&moved(100 << 20, 10), 5.0, 50.0, 0), None, "too little to say anything");
    }
}
