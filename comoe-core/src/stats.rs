//! What the cache did: counters, and advice where they look bad.

use std::fmt;

use crate::backend::TransferTime;
use crate::machine::gb_per_s;
use crate::store::TierStats;

/// Counters of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerStats {
    /// The model's layer number.
    pub layer: usize,
    /// Members of step sets.
    pub accesses: u64,
    /// Accesses whose record was in a slot when the set became known.
    pub hits: u64,
    /// The others. `hits + misses == accesses`.
    pub misses: u64,
    /// Misses that were already on their way.
    pub late: u64,
    /// Hits on records that stay for good ([`CacheOptions::pinned`](crate::CacheOptions::pinned)).
    pub pinned_hits: u64,
    /// Records prefetched for this layer that were used.
    pub prefetch_used: u64,
    /// Records prefetched for this layer that were dropped unused.
    pub prefetch_wasted: u64,
    /// Records that may be prefetched for this layer right now, where that is judged while running; 0 is off.
    pub prefetch_width: usize,
    /// How often that left or reached 0 since the cache was built.
    pub prefetch_switches: u64,
}

/// Counters of one of several devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceStats {
    /// As its backend names it.
    pub device: String,
    /// Slots, without staging.
    pub slots: usize,
    /// Staging slots, on top.
    pub staging_slots: usize,
    /// Slots of the ring, on top.
    pub ring_slots: usize,
    /// Records that it owns.
    pub records: usize,
    /// Members of step sets that it owns.
    pub accesses: u64,
    /// Of them, those found in a slot.
    pub hits: u64,
    /// Bytes that it moved on demand, over its own link.
    pub bytes_moved: u64,
}

/// Counters since the cache was built or [`reset`](crate::ExpertCache::reset_stats).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Slots in all, without staging, now.
    pub slots: usize,
    /// The fewest there were.
    pub least_slots: usize,
    /// The most.
    pub most_slots: usize,
    /// How often that changed.
    pub resizes: u64,
    /// Staging slots, on top.
    pub staging_slots: usize,
    /// Slots of the ring that a prompt's records pass through, on top.
    pub ring_slots: usize,
    /// Slots whose record stays for good, among the slots.
    pub pinned_slots: usize,
    /// Bytes of one slot.
    pub slot_bytes: usize,
    /// Records in the store.
    pub records: usize,
    /// Counters by layer.
    pub layers: Vec<LayerStats>,
    /// Layer steps.
    pub steps: u64,
    /// Of them, those that the device drove.
    pub device_steps: u64,
    /// Layer steps with at least one record to move; with several devices, each device's own.
    pub steps_with_transfer: u64,
    /// Demand batches. Equal to `steps_with_transfer` unless a set did not fit the slots.
    pub transfers: u64,
    /// Records moved on demand.
    pub records_moved: u64,
    /// Bytes moved on demand.
    pub bytes_moved: u64,
    /// Of all that was moved, on demand and ahead, what kernels of device-driven steps read. How long that took cannot be
    /// told from the kernels' own time, so the times below and [`Self::bandwidth`] leave it out.
    pub read_through_bytes: u64,
    /// Records that were guessed for a layer ahead, the likeliest of those in no slot, where the device drives.
    pub guessed: u64,
    /// Of them, those that the layer missed.
    pub guessed_right: u64,
    /// Records prefetched; where the device drives, those of which anything was.
    pub prefetched: u64,
    /// Bytes prefetched.
    pub prefetched_bytes: u64,
    /// Prefetched records that were used.
    pub prefetch_used: u64,
    /// Prefetched records that were dropped unused.
    pub prefetch_wasted: u64,
    /// Their bytes.
    pub prefetch_wasted_bytes: u64,
    /// Whether prefetching is judged while it runs, layer by layer ([`Prefetch::Auto`](crate::Prefetch::Auto)).
    pub prefetch_judged: bool,
    /// Time of transfers, and of waiting for them; with several devices the sum.
    pub time: TransferTime,
    /// Where RAM holds fewer records than there are: what came from it, and what from disk.
    pub tier: Option<TierStats>,
    /// By device, where there are several.
    pub devices: Vec<DeviceStats>,
}

/// Fewer accesses than this say nothing about a hit rate.
const ENOUGH_ACCESSES: u64 = 500;

impl CacheStats {
    fn sum(&self, field: impl Fn(&LayerStats) -> u64) -> u64 {
        self.layers.iter().map(field).sum()
    }

    /// Adds what another device counted in the same steps.
    pub(crate) fn add(&mut self, other: &Self) {
        self.slots += other.slots;
        self.least_slots += other.least_slots;
        self.most_slots += other.most_slots;
        self.resizes += other.resizes;
        self.staging_slots += other.staging_slots;
        self.ring_slots += other.ring_slots;
        self.pinned_slots += other.pinned_slots;
        self.slot_bytes = self.slot_bytes.max(other.slot_bytes);
        self.records += other.records;
        if self.layers.is_empty() {
            self.layers =
                other.layers.iter().map(|l| LayerStats { layer: l.layer, ..Default::default() }).collect();
        }
        for (mine, other) in self.layers.iter_mut().zip(&other.layers) {
            mine.accesses += other.accesses;
            mine.hits += other.hits;
            mine.pinned_hits += other.pinned_hits;
            mine.misses += other.misses;
            mine.late += other.late;
            mine.prefetch_used += other.prefetch_used;
            mine.prefetch_wasted += other.prefetch_wasted;
            mine.prefetch_width += other.prefetch_width;
            mine.prefetch_switches += other.prefetch_switches;
        }
        // Every device goes along in every step.
        self.steps = self.steps.max(other.steps);
        self.device_steps = self.device_steps.max(other.device_steps);
        self.steps_with_transfer += other.steps_with_transfer;
        self.transfers += other.transfers;
        self.records_moved += other.records_moved;
        self.bytes_moved += other.bytes_moved;
        self.read_through_bytes += other.read_through_bytes;
        self.guessed += other.guessed;
        self.guessed_right += other.guessed_right;
        self.prefetched += other.prefetched;
        self.prefetched_bytes += other.prefetched_bytes;
        self.prefetch_used += other.prefetch_used;
        self.prefetch_wasted += other.prefetch_wasted;
        self.prefetch_wasted_bytes += other.prefetch_wasted_bytes;
        self.prefetch_judged |= other.prefetch_judged;
        self.time.demand += other.time.demand;
        self.time.prefetch += other.time.prefetch;
        self.time.stalled += other.time.stalled;
    }

    /// Members of step sets, all layers.
    pub fn accesses(&self) -> u64 {
        self.sum(|l| l.accesses)
    }

    /// Accesses found in a slot, all layers.
    pub fn hits(&self) -> u64 {
        self.sum(|l| l.hits)
    }

    /// Accesses not found in a slot, all layers.
    pub fn misses(&self) -> u64 {
        self.sum(|l| l.misses)
    }

    /// Misses that were already on their way, all layers.
    pub fn late(&self) -> u64 {
        self.sum(|l| l.late)
    }

    /// Hits on records that stay for good, all layers.
    pub fn pinned_hits(&self) -> u64 {
        self.sum(|l| l.pinned_hits)
    }

    /// Hits per access, 0 to 1; 1 before the first access.
    pub fn hit_rate(&self) -> f64 {
        rate(self.hits(), self.accesses())
    }

    /// Bytes of all slots, without staging.
    pub fn pool_bytes(&self) -> u64 {
        self.slots as u64 * self.slot_bytes as u64
    }

    /// GB/s (10^9 bytes) of all transfers while they ran, without what kernels read; `None` before the first, or where
    /// their time is not known.
    pub fn bandwidth(&self) -> Option<f64> {
        let time = self.time.demand + self.time.prefetch;
        let bytes = (self.bytes_moved + self.prefetched_bytes).saturating_sub(self.read_through_bytes);
        (bytes > 0 && !time.is_zero()).then(|| gb_per_s(bytes, time))
    }

    /// What looks bad, and what to change.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.accesses() >= ENOUGH_ACCESSES && self.hit_rate() < 0.5 {
            warnings.push(format!(
                "only {:.0} % of {} accesses found their expert in a slot ({} slots for {} experts): give the pool \
                 more slots, or choose a smaller expert format (int8, int4) so that more experts fit",
                100.0 * self.hit_rate(),
                self.accesses(),
                self.slots,
                self.records
            ));
        }
        if self.prefetched >= ENOUGH_ACCESSES && self.prefetch_used * 4 < self.prefetched {
            warnings.push(format!(
                "only {} of {} prefetched experts were used: turn prefetching off",
                self.prefetch_used, self.prefetched
            ));
        }
        warnings
    }
}

/// A line about where records were.
struct Tiers<'a> {
    stats: &'a CacheStats,
    tier: &'a TierStats,
}

impl fmt::Display for Tiers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stats, tier } = self;
        write!(
            f,
            "tiers    hot {} (in a slot), warm {} (in RAM, which holds {} experts, {}), cold {} (from disk, {} of them read \
             before they were asked for)",
            stats.hits(),
            tier.warm,
            tier.places,
            human_bytes((tier.places * tier.place_bytes) as u64),
            tier.cold,
            tier.early
        )?;
        if tier.reads > 0 {
            write!(
                f,
                "; {} read at {:.2} GB/s, {} experts of it unused, {:.1} ms waited for",
                human_bytes(tier.read_bytes),
                gb_per_s(tier.read_bytes, tier.reading),
                tier.unused,
                tier.waited.as_secs_f64() * 1e3
            )?;
        }
        Ok(())
    }
}

fn rate(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { part as f64 / whole as f64 }
}

/// Bytes as people read them: `1.5 MiB`.
pub fn human_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

impl fmt::Display for CacheStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |d: std::time::Duration| d.as_secs_f64() * 1e3;
        writeln!(
            f,
            "cache    {} slots of {} ({}) for {} experts, {} staging slots and a ring of {} on top",
            self.slots,
            human_bytes(self.slot_bytes as u64),
            human_bytes(self.pool_bytes()),
            self.records,
            self.staging_slots,
            self.ring_slots
        )?;
        if self.resizes > 0 {
            writeln!(
                f,
                "resized  {} times: {} slots now, {} at least, {} at most",
                self.resizes, self.slots, self.least_slots, self.most_slots
            )?;
        }
        for d in &self.devices {
            writeln!(
                f,
                "on       {}: {} slots for {} of the experts, {} staging, a ring of {}; {:.1} % of {} accesses hit, {} moved",
                d.device,
                d.slots,
                d.records,
                d.staging_slots,
                d.ring_slots,
                100.0 * rate(d.hits, d.accesses),
                d.accesses,
                human_bytes(d.bytes_moved)
            )?;
        }
        writeln!(
            f,
            "hits     {:.1} % of {} accesses; {} misses, {} of them already on their way",
            100.0 * self.hit_rate(),
            self.accesses(),
            self.misses(),
            self.late()
        )?;
        if self.pinned_slots > 0 {
            writeln!(
                f,
                "pinned   {} experts, {} of the {} hits",
                self.pinned_slots,
                self.pinned_hits(),
                self.hits()
            )?;
        }
        let by_layer: Vec<_> = self
            .layers
            .iter()
            .map(|l| format!("{}: {:.0}", l.layer, 100.0 * rate(l.hits, l.accesses)))
            .collect();
        writeln!(f, "layers   {} (% hits)", by_layer.join("  "))?;
        writeln!(
            f,
            "moved    {} experts, {} in {} transfers over {} layer steps ({} with a transfer, {} driven by the device)",
            self.records_moved,
            human_bytes(self.bytes_moved),
            self.transfers,
            self.steps,
            self.steps_with_transfer,
            self.device_steps
        )?;
        if self.read_through_bytes > 0 {
            writeln!(
                f,
                "through  {} read by kernels of the device's own steps, in no time of its own below",
                human_bytes(self.read_through_bytes)
            )?;
        }
        writeln!(
            f,
            "prefetch {} experts, {} used, {} wasted ({})",
            self.prefetched,
            self.prefetch_used,
            self.prefetch_wasted,
            human_bytes(self.prefetch_wasted_bytes)
        )?;
        if self.guessed > 0 {
            writeln!(
                f,
                "guessed  {} experts one layer ahead, {} of them right: of {} that were missed",
                self.guessed,
                self.guessed_right,
                self.misses()
            )?;
        }
        if self.prefetch_judged {
            let on = self.layers.iter().filter(|l| l.prefetch_width > 0);
            let by_layer: Vec<_> = on
                .map(|l| {
                    let (width, used, wasted) = (l.prefetch_width, l.prefetch_used, l.prefetch_wasted);
                    format!("{}: {width} wide, {used} used, {wasted} wasted", l.layer)
                })
                .collect();
            writeln!(
                f,
                "judged   prefetch pays in {} of {} layers now ({} changes): {}",
                by_layer.len(),
                self.layers.len(),
                self.sum(|l| l.prefetch_switches),
                if by_layer.is_empty() { "none".to_owned() } else { by_layer.join("; ") }
            )?;
        }
        if let Some(tier) = &self.tier {
            writeln!(f, "{}", Tiers { stats: self, tier })?;
        }
        let moving = self.time.demand + self.time.prefetch;
        write!(
            f,
            "time     {:.1} ms of transfers, {:.1} ms of them waited for, {:.1} ms overlapped",
            ms(moving),
            ms(self.time.stalled),
            ms(moving.saturating_sub(self.time.stalled))
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(hits: u64, misses: u64) -> CacheStats {
        let layer = LayerStats { layer: 0, accesses: hits + misses, hits, misses, ..Default::default() };
        CacheStats { slots: 4, slot_bytes: 1536, records: 64, layers: vec![layer], ..Default::default() }
    }

    #[test]
    fn a_low_hit_rate_says_what_to_change_and_a_short_run_says_nothing() {
        assert!(stats(100, 900).warnings()[0].contains("4 slots for 64 experts"));
        assert!(stats(600, 400).warnings().is_empty());
        assert!(stats(1, 9).warnings().is_empty());
    }

    #[test]
    fn bandwidth_counts_all_transfers_and_their_time() {
        use std::time::Duration;

        let time = TransferTime {
            demand: Duration::from_millis(750),
            prefetch: Duration::from_millis(250),
            stalled: Duration::from_secs(9),
        };
        let moved = CacheStats { bytes_moved: 3_000_000_000, prefetched_bytes: 1_000_000_000, ..stats(1, 1) };
        assert_eq!(moved.bandwidth(), None, "no time is known");
        assert_eq!(CacheStats { time, ..moved.clone() }.bandwidth(), Some(4.0));
        assert_eq!(CacheStats { time, ..stats(1, 1) }.bandwidth(), None, "nothing moved");
        let half = CacheStats { time, read_through_bytes: 2_000_000_000, ..moved };
        assert_eq!(half.bandwidth(), Some(2.0), "what kernels read has no time");
    }

    #[test]
    fn tiers_are_told_where_there_are_some() {
        use std::time::Duration;

        assert!(!stats(3, 1).to_string().contains("tiers"));
        let tier = TierStats {
            places: 8,
            place_bytes: 1 << 20,
            warm: 2,
            cold: 5,
            early: 1,
            reads: 6,
            read_bytes: 6_000_000,
            unused: 1,
            reading: Duration::from_millis(3),
            waited: Duration::from_millis(2),
        };
        let text = CacheStats { tier: Some(tier), ..stats(3, 7) }.to_string();
        let line = text.lines().find(|l| l.starts_with("tiers")).unwrap();
        for part in
            ["hot 3 ", "warm 2 ", "8 experts, 8.0 MiB", "cold 5 (from disk, 1 of", "2.00 GB/s, 1 experts"]
        {
            assert!(line.contains(part), "{part}: {line}");
        }
    }

    #[test]
    fn reads_well() {
        let text = stats(3, 1).to_string();
        assert!(
            text.contains("75.0 % of 4 accesses") && text.contains("4 slots of 1.5 KiB (6.0 KiB)"),
            "{text}"
        );
        assert!(!text.contains("resized"), "{text}");
        let text = CacheStats { resizes: 2, least_slots: 3, most_slots: 9, ..stats(3, 1) }.to_string();
        assert!(text.contains("resized  2 times: 4 slots now, 3 at least, 9 at most"), "{text}");
        assert_eq!(human_bytes(12), "12 B");
        assert_eq!(human_bytes(3 << 30), "3.0 GiB");
    }
}
