//! Which records are in RAM, which are to be read next, who holds what: no threads, no files.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::TierStats;
use crate::backend::SlotId;
use crate::pool::Pool;
use crate::store::{Directory, RecordIndex};

/// A record that is to be read, and where to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reads {
    pub(super) record: RecordIndex,
    pub(super) place: SlotId,
}

pub(super) struct State {
    pub(super) pool: Pool,
    /// Not begun: what a step waits for, and what was announced ahead of use.
    waiting: [VecDeque<Reads>; 2],
    /// By record: how many hold it, the read under way included.
    holders: Vec<u32>,
    /// By record: read, and not asked for since.
    fresh: Vec<bool>,
    /// Of records whose last read failed: why.
    failures: HashMap<RecordIndex, String>,
    /// Kept from one announcement to the next.
    batch: Vec<RecordIndex>,
    counts: TierStats,
    active: usize,
    busy_since: Option<Instant>,
    pub(super) ending: bool,
}

/// Read because somebody waits; read ahead of use.
const NOW: usize = 0;
const AHEAD: usize = 1;

impl State {
    pub(super) fn new(pool: Pool, records: usize) -> Self {
        Self {
            pool,
            waiting: Default::default(),
            holders: vec![0; records],
            fresh: vec![false; records],
            failures: HashMap::new(),
            batch: Vec::new(),
            counts: TierStats::default(),
            active: 0,
            busy_since: None,
            ending: false,
        }
    }

    /// Holds `record`: it is no victim until it is let go as often.
    pub(super) fn hold(&mut self, record: RecordIndex) {
        self.holders[record.0 as usize] += 1;
        self.pool.pin([record]);
    }

    /// The opposite; `true` when its place may be taken now.
    pub(super) fn let_go(&mut self, record: RecordIndex) -> bool {
        let holders = &mut self.holders[record.0 as usize];
        *holders -= 1;
        let free = *holders == 0;
        if free {
            self.pool.unpin([record]);
        }
        free
    }

    /// Gives `record`, which has none, a place and has it read; `false` when every place is held.
    pub(super) fn begin(&mut self, directory: &Directory, record: RecordIndex, ahead: bool) -> bool {
        let Some(place) = self.pool.place(directory.ordinal_of(record), record) else { return false };
        self.hold(record);
        self.fresh[record.0 as usize] = true;
        self.failures.remove(&record);
        self.waiting[if ahead { AHEAD } else { NOW }].push_back(Reads { record, place });
        true
    }

    /// Somebody waits for `record`, whose read may not have begun.
    pub(super) fn hasten(&mut self, record: RecordIndex) {
        if let Some(at) = self.waiting[AHEAD].iter().position(|r| r.record == record)
            && let Some(reads) = self.waiting[AHEAD].remove(at)
        {
            self.waiting[NOW].push_back(reads);
        }
    }

    /// Has the records read that have no place, as far as there is room, and returns how many. None of them makes room
    /// for another.
    pub(super) fn announce(
        &mut self,
        directory: &Directory,
        records: &mut dyn Iterator<Item = RecordIndex>,
        ahead: bool,
    ) -> usize {
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        batch.extend(records.filter(|r| (r.0 as usize) < self.holders.len()));
        self.pool.pin(batch.iter().copied());
        let mut begun = 0;
        for &record in &batch {
            match self.pool.locate(record) {
                Some(_) if !ahead => self.hasten(record),
                Some(_) => {}
                None if self.begin(directory, record, ahead) => begun += 1,
                None => break,
            }
        }
        let holders = &self.holders;
        self.pool.unpin(batch.iter().copied().filter(|r| holders[r.0 as usize] == 0));
        self.batch = batch;
        begun
    }

    /// Reads that somebody waits for and that have not begun.
    #[cfg(test)]
    pub(super) fn wanted_now(&self) -> usize {
        self.waiting[NOW].len()
    }

    /// The next read, which counts as begun.
    pub(super) fn take(&mut self) -> Option<Reads> {
        let next = self.waiting[NOW].pop_front().or_else(|| self.waiting[AHEAD].pop_front())?;
        self.active += 1;
        self.busy_since.get_or_insert_with(Instant::now);
        Some(next)
    }

    /// A read has ended, with so many bytes or a reason.
    pub(super) fn complete(
        &mut self,
        record: RecordIndex,
        place: SlotId,
        outcome: std::result::Result<usize, String>,
    ) {
        self.active -= 1;
        if self.active == 0 {
            self.counts.reading += self.busy_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
        match outcome {
            Ok(bytes) => {
                self.pool.arrived(place);
                self.counts.reads += 1;
                self.counts.read_bytes += bytes as u64;
            }
            Err(reason) => {
                self.pool.forget(record);
                self.fresh[record.0 as usize] = false;
                self.failures.insert(record, reason);
            }
        }
        self.let_go(record);
    }

    /// Why the last read of `record` failed.
    pub(super) fn failure(&self, record: RecordIndex) -> String {
        self.failures
            .get(&record)
            .cloned()
            .unwrap_or_else(|| "it left RAM while it was held; this is a bug".to_owned())
    }

    /// Counts a record that was asked for and is here, after having been waited for so long, if at all.
    pub(super) fn claim(&mut self, layer: usize, record: RecordIndex, waited: Option<Duration>) {
        self.counts.waited += waited.unwrap_or_default();
        if std::mem::take(&mut self.fresh[record.0 as usize]) {
            // The policy has heard of it when it got its place.
            self.counts.cold += 1;
            self.counts.early += u64::from(waited.is_none());
        } else {
            self.counts.warm += 1;
            self.pool.hit(layer, record);
        }
    }

    pub(super) fn stats(&self) -> TierStats {
        let TierStats { reads, cold, reading, .. } = self.counts;
        let here = |r: &usize| self.pool.locate(RecordIndex(*r as u32)).is_some_and(|at| !at.loading);
        let unclaimed = (0..self.fresh.len()).filter(|&r| self.fresh[r]).filter(here).count() as u64;
        let busy = self.busy_since.map_or(Duration::ZERO, |since| since.elapsed());
        // Records that were read before the counters began may be claimed after.
        TierStats { unused: reads.saturating_sub(cold + unclaimed), reading: reading + busy, ..self.counts }
    }

    pub(super) fn reset_stats(&mut self) {
        self.counts = TierStats::default();
        self.busy_since = self.busy_since.map(|_| Instant::now());
    }
}
