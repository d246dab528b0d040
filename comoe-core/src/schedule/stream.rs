//! A prompt's records: streamed through the ring, layer after layer, so that the link never waits for a router.
//!
//! A set that covers nearly all of its layer says that the next layer's will, too; that needs no prediction. So once a
//! layer's work is enqueued, the next layer's records that are in no slot are sent for, in order: to free slots while the
//! cache is cold, else as far as the ring has room. The copies go on beside attention and router. When the layer's set is known, what has arrived runs, groups
//! follow as they arrive, and what is still missing comes through the ring as well. A ring smaller than a layer works the
//! same way: slots are refilled as soon as their group has run.
//!
//! Records that the set used last, as many as the layer has slots, are copied from the ring to slots as they pass. So
//! after a prompt the cache holds what the prompt used most recently, and a slot's number never depends on the ring.

use std::collections::HashMap;

use super::ring::Group;
use super::{Engine, Need, SlotClock, Split};
use crate::backend::{Fill, Queue, SlotId, Ticket, WorkItem};
use crate::error::Result;
use crate::store::RecordIndex;

/// Bytes that are sent for together: enough for the link's full speed, few enough that work starts early.
const GROUP_BYTES: usize = 16 << 20;

/// Whether a set of `used` of a layer's `experts` says that the next layer needs nearly all of its own: at least seven
/// of eight, since what is streamed in vain delays what is not.
pub(crate) fn covers(used: usize, experts: usize) -> bool {
    8 * used >= 7 * experts
}

impl Engine {
    /// Slots of one layer: its partition's, or its share of them.
    fn share(&self, layer: usize) -> usize {
        let shape = self.pool.shape();
        let partition = shape.partition_of[layer];
        let sharing = shape.partition_of.iter().filter(|p| **p == partition).count();
        (shape.partitions[partition] / sharing.max(1)).max(1)
    }

    fn group_records(&self) -> usize {
        let most = match self.ring.slots() {
            0 => usize::MAX,
            // One half fills while the other computes.
            slots => slots.div_ceil(2),
        };
        (GROUP_BYTES / self.slot_bytes.max(1)).clamp(1, most)
    }

    /// Whether a step goes through the ring: some of it is there, or it has more members than slots.
    pub(super) fn passes_the_ring(&self, split: &Split) -> bool {
        self.ring.slots() > 0 && (!split.streamed.is_empty() || split.in_waves)
    }

    /// Sends for as many of the missing as the ring has room for. Nothing, while it holds a later layer's records: those
    /// behind them would come too late.
    pub(super) fn send_to_ring(&mut self, layer: usize, split: &mut Split) -> Result<()> {
        while !split.missing.is_empty() && self.ring.back().is_none_or(|g| g.layer == layer) {
            let count = self.group_records().min(self.ring.room()).min(split.missing.len());
            if count == 0 {
                break;
            }
            let needs: Vec<Need> = split.missing.drain(..count).map(|m| m.need).collect();
            let records: Vec<_> = needs.iter().map(|n| n.record).collect();
            split.streamed.extend(needs.into_iter().map(|n| (n.record, n)));
            let bytes = self.send_group(layer, &records, false)?;
            self.stats.transfers += 1;
            self.stats.records_moved += records.len() as u64;
            self.stats.bytes_moved += bytes;
        }
        Ok(())
    }

    fn send_group(&mut self, layer: usize, records: &[RecordIndex], ahead: bool) -> Result<u64> {
        let fills = self.ring.take(records);
        let ticket = self.fill(Queue::Demand, &fills)?;
        let bytes = self.bytes(&fills);
        self.ring.push(Group { layer, ticket, fills, ahead });
        Ok(bytes)
    }

    /// Gives back what an abandoned prompt left at the front of the ring.
    pub(super) fn drop_stale(&mut self, layer: usize) {
        while self.ring.front().is_some_and(|g| g.layer != layer) {
            if let Some(group) = self.ring.pop() {
                self.count_wasted(&group, |_| true);
            }
        }
    }

    fn count_wasted(&mut self, group: &Group, wasted: impl Fn(RecordIndex) -> bool) {
        let fills: Vec<_> = group.fills.iter().filter(|f| group.ahead && wasted(f.record)).copied().collect();
        self.stats.prefetch_wasted += fills.len() as u64;
        self.stats.layers[group.layer].prefetch_wasted += fills.len() as u64;
        self.stats.prefetch_wasted_bytes += self.bytes(&fills);
    }

    /// Runs the members in slots and those that come through the ring, as they arrive. What the ring cannot take stays
    /// missing.
    pub(super) fn run_ring(
        &mut self,
        layer: usize,
        keep: &[RecordIndex],
        split: &mut Split,
        done: &mut Vec<(RecordIndex, SlotId)>,
    ) -> Result<()> {
        let mut items = std::mem::take(&mut split.hits);
        items.append(&mut split.late);
        loop {
            // What has arrived joins the launch; when there is nothing else to do, the next group is waited for.
            while let Some(ticket) = self.ring.front().filter(|g| g.layer == layer).map(|g| g.ticket) {
                if !items.is_empty() && !self.backend.is_done(ticket)? {
                    break;
                }
                let Some(group) = self.ring.pop() else { break };
                self.count_wasted(&group, |r| !split.streamed.contains_key(&r));
                for fill in group.fills {
                    items.extend(split.streamed.remove(&fill.record).map(|need| need.at(fill.slot)));
                }
            }
            if items.is_empty() {
                // What is left goes in waves, for which everything that has run may leave.
                if !split.missing.is_empty() {
                    self.pool.unpin(done.iter().map(|(record, _)| *record));
                }
                return Ok(());
            }
            self.run_and_keep(layer, std::mem::take(&mut items), keep, done)?;
            self.send_to_ring(layer, split)?;
        }
    }

    /// Enqueues the work of `items`, then copies those to keep from the ring to slots. Behind that all of them may be
    /// overwritten, except what is kept.
    fn run_and_keep(
        &mut self,
        layer: usize,
        items: Vec<WorkItem>,
        keep: &[RecordIndex],
        done: &mut Vec<(RecordIndex, SlotId)>,
    ) -> Result<()> {
        self.wait_and_run(&items)?;
        self.pool.unpin(items.iter().map(|i| i.record).filter(|r| keep.binary_search(r).is_err()));
        let mut copies = Vec::new();
        for item in &items {
            if !self.ring.owns(item.slot) || keep.binary_search(&item.record).is_err() {
                continue;
            }
            let Some(slot) = self.pool.place(layer, item.record) else { continue };
            self.compute_waits(self.clocks[slot.0 as usize].filled)?;
            self.pool.arrived(slot);
            copies.push((item.slot, slot));
        }
        if !copies.is_empty() {
            self.backend.copy(&copies)?;
        }
        let read = self.backend.mark()?;
        for item in &items {
            self.clocks[item.slot.0 as usize].read = read;
        }
        for (_, slot) in copies {
            self.clocks[slot.0 as usize] = SlotClock { filled: Ticket::DONE, read };
        }
        done.extend(items.iter().map(|item| (item.record, item.slot)));
        Ok(())
    }

    /// Those of `needs` that were used last, as many as the layer has slots, by number; without a ring nobody asks.
    pub(super) fn most_recent(&self, layer: usize, needs: &[Need]) -> Vec<RecordIndex> {
        if self.ring.slots() == 0 {
            return Vec::new();
        }
        let mut last: Vec<_> = needs.iter().map(|n| (n.assignments.last().copied(), n.record)).collect();
        last.sort_unstable_by(|a, b| b.cmp(a));
        let mut keep: Vec<_> = last.into_iter().take(self.share(layer)).map(|(_, record)| record).collect();
        keep.sort_unstable();
        keep
    }

    /// Sends for the records of the layers behind `layer` that are nowhere yet, in order, as far as there is room; if the
    /// step's set says that this pays.
    pub(super) fn stream_ahead(&mut self, layer: usize, covers: bool) -> Result<()> {
        if !self.streams || !covers {
            return Ok(());
        }
        self.fill_free(layer + 1)?;
        // Behind what is there already.
        let back = self.ring.back().filter(|g| g.layer > layer);
        let (from, mut after) = match back {
            Some(group) => (group.layer, group.fills.last().map(|f| f.record)),
            None => (layer + 1, None),
        };
        let most = self.group_records();
        for next in from..self.directory.layers().len() {
            let first = after.take().map_or(0, |record| record.0 + 1);
            for records in self.absent(next, first).chunks(most) {
                let records = &records[..records.len().min(self.ring.room())];
                if records.is_empty() {
                    return Ok(());
                }
                let bytes = self.send_group(next, records, true)?;
                self.stats.prefetched += records.len() as u64;
                self.stats.prefetched_bytes += bytes;
            }
        }
        Ok(())
    }

    /// Records of `layer`, from number `first` on, that are nowhere.
    fn absent(&self, layer: usize, first: u32) -> Vec<RecordIndex> {
        let entry = &self.directory.layers()[layer];
        let all = first.max(entry.first)..entry.first + entry.experts as u32;
        let nowhere = |r: &RecordIndex| self.pool.locate(*r).is_none() && self.ring.find(*r).is_none();
        all.map(RecordIndex).filter(nowhere).collect()
    }

    /// Of a cache that is not full yet: records of `layer` go straight to its free slots.
    fn fill_free(&mut self, layer: usize) -> Result<()> {
        if layer >= self.directory.layers().len() || self.pool.free(layer) == 0 {
            return Ok(());
        }
        let mut absent = self.absent(layer, 0);
        absent.truncate(self.pool.free(layer));
        for records in absent.chunks(self.group_records()) {
            let place = |&record: &RecordIndex| Some(Fill { record, slot: self.pool.place(layer, record)? });
            let fills: Vec<Fill> = records.iter().filter_map(place).collect();
            self.fill(Queue::Demand, &fills)?;
            self.stats.prefetched += fills.len() as u64;
            self.stats.prefetched_bytes += self.bytes(&fills);
            self.early.extend(fills.iter().map(|f| f.record));
        }
        Ok(())
    }

    /// A record in a slot was asked for: was it sent for ahead?
    pub(super) fn count_early(&mut self, layer: usize, record: RecordIndex) {
        if let Some(at) = self.early.iter().position(|r| *r == record) {
            self.early.swap_remove(at);
            self.stats.prefetch_used += 1;
            self.stats.layers[layer].prefetch_used += 1;
        }
    }

    /// The layer whose records are `range` has had its turn: those of them that were sent for and not asked for are
    /// waste.
    pub(super) fn count_unasked(&mut self, layer: usize, range: std::ops::Range<u32>) {
        let bytes = self.directory.layers()[layer].record_bytes as u64;
        let before = self.early.len();
        self.early.retain(|r| !range.contains(&r.0));
        let unasked = (before - self.early.len()) as u64;
        self.stats.prefetch_wasted += unasked;
        self.stats.layers[layer].prefetch_wasted += unasked;
        self.stats.prefetch_wasted_bytes += unasked * bytes;
    }

    /// Whether a record that is in the ring has arrived, by its ticket; asked once a ticket.
    pub(super) fn in_ring(
        &mut self,
        record: RecordIndex,
        known: &mut HashMap<Ticket, bool>,
    ) -> Result<Option<bool>> {
        let Some((_, ticket)) = self.ring.find(record) else { return Ok(None) };
        if let Some(&arrived) = known.get(&ticket) {
            return Ok(Some(arrived));
        }
        let arrived = self.backend.is_done(ticket)?;
        known.insert(ticket, arrived);
        Ok(Some(arrived))
    }
}
