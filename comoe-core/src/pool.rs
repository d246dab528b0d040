//! Which slot holds a record? A pure state machine: no device, no threads, no clock.
//!
//! Slots are divided into partitions (one per layer, or a single one) and a staging area. A partition's policy
//! chooses victims among its records that are not pinned. Promoting a staged record moves its slot into the partition,
//! and the slot it displaces into staging, so that both keep their sizes.

mod keep;

pub(crate) use keep::{PINNED_PART, most_pinned};

use crate::backend::SlotId;
use crate::error::{Error, Result};
use crate::policy::EvictionPolicy;
use crate::store::RecordIndex;

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotState {
    /// Nothing.
    Free,
    /// A record whose fill has been enqueued.
    Loading(RecordIndex),
    /// A record whose fill has arrived.
    Resident(RecordIndex),
}

/// Where a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Located {
    /// Its slot.
    pub slot: SlotId,
    /// Still on its way.
    pub loading: bool,
    /// In a staging slot, not yet part of the cache.
    pub staged: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    Partition(usize),
    Staging,
    /// Given up.
    Away,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    state: SlotState,
    home: Home,
}

struct Partition {
    free: Vec<SlotId>,
    policy: Box<dyn EvictionPolicy>,
}

/// How many slots each partition has, and which layer uses which.
///
/// Slots are dealt out like cards: slot 0 to the first partition, 1 to the second, and so on, round after round, to those
/// that have room still. So the first `n` slots are a smaller pool that is divided as evenly, and a pool that gives up its
/// last slots takes from every layer alike. Staging slots come behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolShape {
    /// Slots of each partition.
    pub partitions: Vec<usize>,
    /// Partition of each layer ordinal.
    pub partition_of: Vec<usize>,
    /// Staging slots, on top.
    pub staging: usize,
}

impl PoolShape {
    /// One partition for all layers.
    pub fn global(slots: usize, layers: usize, staging: usize) -> Self {
        Self { partitions: vec![slots], partition_of: vec![0; layers], staging }
    }

    /// A partition per layer, as equal as possible, none larger than its layer's `experts`; what is left over goes
    /// to the first layers with room.
    pub fn by_layer(slots: usize, experts: &[usize], staging: usize) -> Self {
        let all = Self { partitions: experts.to_vec(), partition_of: (0..experts.len()).collect(), staging };
        all.first(slots)
    }

    /// The pool of the first `slots` slots, with the same staging slots.
    #[must_use]
    pub fn first(&self, slots: usize) -> Self {
        let mut partitions = vec![0; self.partitions.len()];
        self.dealt().take(slots).for_each(|p| partitions[p] += 1);
        Self { partitions, ..self.clone() }
    }

    /// The partition of each slot but the staging slots, slot 0 first.
    pub fn dealt(&self) -> impl Iterator<Item = usize> + '_ {
        let rounds = self.partitions.iter().max().copied().unwrap_or(0);
        let round = move |r| (0..self.partitions.len()).filter(move |&p| self.partitions[p] > r);
        (0..rounds).flat_map(round)
    }

    /// Slots without staging.
    pub fn slots(&self) -> usize {
        self.partitions.iter().sum()
    }
}

/// What is in the slots of each partition, and what its policy goes by: what one owner of the slots hands to the next.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Residency {
    /// Records and their slots, by partition, next victim first: under LRU the order of last use.
    pub partitions: Vec<Vec<(RecordIndex, SlotId)>>,
    /// Under LFRU, what it knows of the past.
    pub counts: Option<DecayedCounts>,
    /// Of those records, the ones that stay for good, ascending.
    pub kept: Vec<RecordIndex>,
}

/// The state of the [`Lfru`](crate::policy::Lfru) of every partition.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DecayedCounts {
    /// By partition: accesses after which one counts half.
    pub half_lives: Vec<f64>,
    /// By partition: accesses so far.
    pub ticks: Vec<u64>,
    /// By record: see [`Decayed::scores`](crate::policy::Decayed::scores).
    pub scores: Vec<u64>,
}

/// Maps records to slots.
pub struct Pool {
    shape: PoolShape,
    most: PoolShape,
    slots: Vec<Slot>,
    slot_of: Vec<Option<SlotId>>,
    partitions: Vec<Partition>,
    /// By record: a member of the step under way.
    pinned: Vec<bool>,
    /// By record: it stays for good.
    kept: Vec<bool>,
    /// How many of them each partition has.
    kept_in: Vec<usize>,
    staging_free: Vec<SlotId>,
    staged: Vec<RecordIndex>,
}

impl Pool {
    /// An empty pool for a store of `records` records; `policy` makes the policy of a partition of so many slots.
    pub fn new(
        shape: PoolShape,
        records: usize,
        mut policy: impl FnMut(usize) -> Box<dyn EvictionPolicy>,
    ) -> Self {
        let homes = shape.dealt().map(Home::Partition);
        let homes = homes.chain(std::iter::repeat_n(Home::Staging, shape.staging));
        let partitions =
            shape.partitions.iter().map(|&n| Partition { free: Vec::new(), policy: policy(n) }).collect();
        let kept_in = vec![0; shape.partitions.len()];
        let mut this = Self {
            slots: homes.map(|home| Slot { state: SlotState::Free, home }).collect(),
            most: shape.clone(),
            shape,
            slot_of: vec![None; records],
            partitions,
            pinned: vec![false; records],
            kept: vec![false; records],
            kept_in,
            staging_free: Vec::new(),
            staged: Vec::new(),
        };
        this.list_free();
        this
    }

    /// The division into partitions.
    pub fn shape(&self) -> &PoolShape {
        &self.shape
    }

    /// The division that it was made with: [`Self::resize`] takes slots away and gives them back.
    pub fn most(&self) -> &PoolShape {
        &self.most
    }

    /// What each slot holds.
    pub fn states(&self) -> impl Iterator<Item = (SlotId, SlotState)> + '_ {
        self.slots.iter().enumerate().map(|(i, s)| (SlotId(i as u32), s.state))
    }

    /// Where `record` is, if anywhere.
    pub fn locate(&self, record: RecordIndex) -> Option<Located> {
        let slot = self.slot_of[record.0 as usize]?;
        let Slot { state, home } = self.slots[slot.0 as usize];
        Some(Located { slot, loading: matches!(state, SlotState::Loading(_)), staged: home == Home::Staging })
    }

    /// Forbids that `records` become victims, until [`Self::unpin`].
    pub fn pin(&mut self, records: impl IntoIterator<Item = RecordIndex>) {
        records.into_iter().for_each(|r| self.pinned[r.0 as usize] = true);
    }

    /// Allows it again.
    pub fn unpin(&mut self, records: impl IntoIterator<Item = RecordIndex>) {
        records.into_iter().for_each(|r| self.pinned[r.0 as usize] = false);
    }

    /// Tells the policy that `record`, cached and not staged, was accessed by layer ordinal `layer`.
    pub fn hit(&mut self, layer: usize, record: RecordIndex) {
        debug_assert!(self.locate(record).is_some_and(|l| !l.staged));
        self.partitions[self.shape.partition_of[layer]].policy.hit(record);
    }

    /// Gives `record`, which is nowhere, a slot of the layer's partition: a free one, or that of the policy's victim.
    /// Its state is `Loading`. `None` when every record of the partition is pinned.
    pub fn place(&mut self, layer: usize, record: RecordIndex) -> Option<SlotId> {
        debug_assert!(self.locate(record).is_none());
        let slot = self.vacate(layer)?;
        self.settle(layer, slot, SlotState::Loading(record));
        Some(slot)
    }

    /// Makes the staged `record` part of the layer's partition, without a copy. `false` when no record of the
    /// partition may leave; `record` then stays staged.
    pub fn promote(&mut self, layer: usize, record: RecordIndex) -> bool {
        let Some(located) = self.locate(record).filter(|l| l.staged) else {
            debug_assert!(false, "{record:?} is not staged");
            return false;
        };
        let Some(vacated) = self.vacate(layer) else { return false };
        self.slots[vacated.0 as usize].home = Home::Staging;
        self.staging_free.push(vacated);
        self.staged.retain(|&r| r != record);
        let state = self.slots[located.slot.0 as usize].state;
        self.slots[located.slot.0 as usize].home = Home::Partition(self.shape.partition_of[layer]);
        self.settle(layer, located.slot, state);
        true
    }

    /// Gives `record`, which is nowhere, a staging slot; its state is `Loading`. `None` when none is free.
    pub fn stage(&mut self, record: RecordIndex) -> Option<SlotId> {
        debug_assert!(self.locate(record).is_none());
        let slot = self.staging_free.pop()?;
        self.slots[slot.0 as usize].state = SlotState::Loading(record);
        self.slot_of[record.0 as usize] = Some(slot);
        self.staged.push(record);
        Some(slot)
    }

    /// Drops every staged record of `records` and returns them.
    pub fn unstage(&mut self, records: std::ops::Range<u32>) -> Vec<RecordIndex> {
        let (dropped, kept) = self.staged.iter().partition(|r| records.contains(&r.0));
        self.staged = kept;
        for record in &dropped {
            let RecordIndex(r) = *record;
            if let Some(slot) = self.slot_of[r as usize].take() {
                self.slots[slot.0 as usize].state = SlotState::Free;
                self.staging_free.push(slot);
            }
        }
        dropped
    }

    /// Staged records, oldest first.
    pub fn staged(&self) -> &[RecordIndex] {
        &self.staged
    }

    /// Free slots of the partition of layer ordinal `layer`.
    pub fn free(&self, layer: usize) -> usize {
        self.partitions[self.shape.partition_of[layer]].free.len()
    }

    /// Staging slots that are free.
    #[cfg(test)]
    pub(crate) fn staging_left(&self) -> usize {
        self.staging_free.len()
    }

    /// The fill of `slot` has arrived.
    pub fn arrived(&mut self, slot: SlotId) {
        let state = &mut self.slots[slot.0 as usize].state;
        if let SlotState::Loading(record) = *state {
            *state = SlotState::Resident(record);
        }
    }

    /// Forgets `record`, whose fill has failed: its slot is free again.
    pub fn forget(&mut self, record: RecordIndex) {
        let Some(slot) = self.slot_of[record.0 as usize] else { return };
        self.empty(slot);
        match self.slots[slot.0 as usize].home {
            Home::Partition(p) => self.partitions[p].free.push(slot),
            Home::Staging => {
                self.staged.retain(|&r| r != record);
                self.staging_free.push(slot);
            }
            // Holds nothing.
            Home::Away => {}
        }
    }

    /// Accesses the records of one step of layer ordinal `layer`, each once, in order, and returns who missed with the
    /// slot that it was given: what a device-driven step does (see [`DeviceDriver`](crate::backend::DeviceDriver)). A
    /// miss counts as arrived; with every record of the partition in the set, it gets no slot.
    pub fn access(&mut self, layer: usize, set: &[RecordIndex]) -> Vec<(RecordIndex, Option<SlotId>)> {
        self.pin(set.iter().copied());
        let mut missed = Vec::new();
        for &record in set {
            if self.locate(record).is_some() {
                self.hit(layer, record);
                continue;
            }
            let slot = self.place(layer, record);
            match slot {
                Some(slot) => self.arrived(slot),
                None => self.partitions[self.shape.partition_of[layer]].policy.pass(record),
            }
            missed.push((record, slot));
        }
        self.unpin(set.iter().copied());
        missed
    }

    /// Records of a partition, next victim first.
    pub fn eviction_order(&self, partition: usize) -> Vec<RecordIndex> {
        self.partitions[partition].policy.eviction_order()
    }

    /// What is cached, staged records left out.
    pub fn residency(&self) -> Residency {
        let slot_of = |r: RecordIndex| self.slot_of[r.0 as usize].map(|slot| (r, slot));
        let of = |p: &Partition| p.policy.eviction_order().into_iter().filter_map(slot_of).collect();
        let mut counts = DecayedCounts { scores: vec![0; self.slot_of.len()], ..DecayedCounts::default() };
        for decayed in self.partitions.iter().filter_map(|p| p.policy.decayed()) {
            counts.half_lives.push(decayed.half_life);
            counts.ticks.push(decayed.tick);
            // Scores grow: of a record that several partitions know of, its own knows best.
            counts.scores.iter_mut().zip(decayed.scores).for_each(|(all, &own)| *all = own.max(*all));
        }
        Residency {
            partitions: self.partitions.iter().map(of).collect(),
            counts: (counts.ticks.len() == self.partitions.len()).then_some(counts),
            kept: self.kept(),
        }
    }

    /// Forgets what is cached and knows instead that `residency` is, all of it arrived. Staging slots stay as they are.
    ///
    /// # Errors
    /// [`Error::BadArgument`] when it is not what the slots of this pool can hold; then nothing has changed.
    pub fn restore(&mut self, residency: &Residency) -> Result<()> {
        let bad = |reason: String| Err(Error::BadArgument { what: "residency", reason });
        if residency.partitions.len() != self.partitions.len() {
            let (have, want) = (residency.partitions.len(), self.partitions.len());
            return bad(format!("of {have} partitions, the pool has {want}"));
        }
        if let Some(counts) = &residency.counts
            && (counts.ticks.len(), counts.scores.len()) != (self.partitions.len(), self.slot_of.len())
        {
            let (ticks, scores) = (counts.ticks.len(), counts.scores.len());
            return bad(format!("counts of {ticks} partitions and {scores} records, the pool has others"));
        }
        let (mut used, mut seen) = (vec![false; self.slots.len()], vec![false; self.slot_of.len()]);
        for (p, records) in residency.partitions.iter().enumerate() {
            for &(record, slot) in records {
                let home = self.slots.get(slot.0 as usize).map(|s| s.home);
                let staged = self.staged.contains(&record);
                let Some(seen) = seen.get_mut(record.0 as usize).filter(|_| !staged) else {
                    return bad(format!("{record:?} is staged, or not of this store"));
                };
                if home != Some(Home::Partition(p)) || std::mem::replace(&mut used[slot.0 as usize], true) {
                    return bad(format!("{slot:?} is not of partition {p}, or named twice"));
                }
                if std::mem::replace(seen, true) {
                    return bad(format!("{record:?} is named twice"));
                }
            }
        }
        if let Some(lost) = residency.kept.iter().find(|r| !seen.get(r.0 as usize).is_some_and(|s| *s)) {
            return bad(format!("{lost:?} stays for good and is in no slot"));
        }
        self.kept.fill(false);
        residency.kept.iter().for_each(|r| self.kept[r.0 as usize] = true);
        for (kept_in, held) in self.kept_in.iter_mut().zip(&residency.partitions) {
            *kept_in = held.iter().filter(|(r, _)| self.kept[r.0 as usize]).count();
        }
        for partition in &mut self.partitions {
            for record in partition.policy.eviction_order() {
                partition.policy.remove(record);
                self.slot_of[record.0 as usize] = None;
            }
        }
        for slot in &mut self.slots {
            if matches!(slot.home, Home::Partition(_)) {
                slot.state = SlotState::Free;
            }
        }
        for (p, records) in residency.partitions.iter().enumerate() {
            if let Some(counts) = &residency.counts {
                self.partitions[p].policy.set_decayed(counts.ticks[p], &counts.scores);
            }
            for &(record, slot) in records {
                self.slots[slot.0 as usize].state = SlotState::Resident(record);
                self.slot_of[record.0 as usize] = Some(slot);
                self.partitions[p].policy.adopt(record);
            }
        }
        self.list_free();
        Ok(())
    }

    /// Changes the number of slots, which cannot be more than it was made with, and returns what lost its slot, with
    /// everything that was staged. Nothing may be pinned.
    ///
    /// The last slots leave, from every partition alike, and come back free. Records keep their slots, but where promotions
    /// have mixed the partitions' slots with the staging slots some more may lose theirs.
    pub fn resize(&mut self, slots: usize) -> Vec<RecordIndex> {
        let mut left = self.unstage(0..self.slot_of.len() as u32);
        let dealt = self.most.slots();
        self.shape = self.most.first(slots);
        let (kept, mut room) = (self.shape.slots(), self.shape.partitions.clone());
        let mut staging = self.shape.staging;
        // Those whose home has no room for them.
        let mut homeless = Vec::new();
        for i in 0..self.slots.len() {
            let here = i < kept || i >= dealt;
            let room = match self.slots[i].home {
                Home::Partition(p) if here => Some(&mut room[p]),
                Home::Staging if here => Some(&mut staging),
                _ => None,
            };
            if let Some(room) = room.filter(|room| **room > 0) {
                *room -= 1;
                continue;
            }
            left.extend(self.empty(SlotId(i as u32)));
            self.slots[i].home = Home::Away;
            if here {
                homeless.push(i);
            }
        }
        let homes: Vec<usize> = self.most.dealt().collect();
        for i in homeless {
            // The partition that it was dealt to at first, if that has room.
            let own = homes.get(i).copied().filter(|&p| room[p] > 0);
            self.slots[i].home = match own.or_else(|| room.iter().position(|&n| n > 0)) {
                Some(p) => {
                    room[p] -= 1;
                    Home::Partition(p)
                }
                None => Home::Staging,
            };
        }
        self.list_free();
        self.let_go();
        left
    }

    /// Takes a record out of its slot.
    fn empty(&mut self, slot: SlotId) -> Option<RecordIndex> {
        let Slot { state, home } = &mut self.slots[slot.0 as usize];
        let (SlotState::Loading(record) | SlotState::Resident(record)) = *state else { return None };
        *state = SlotState::Free;
        self.slot_of[record.0 as usize] = None;
        if let Home::Partition(p) = *home {
            self.partitions[p].policy.remove(record);
            if std::mem::take(&mut self.kept[record.0 as usize]) {
                self.kept_in[p] -= 1;
            }
        }
        Some(record)
    }

    /// Lists the free slots anew, so that they are taken in ascending order.
    fn list_free(&mut self) {
        self.partitions.iter_mut().for_each(|p| p.free.clear());
        self.staging_free.clear();
        for (i, slot) in self.slots.iter().enumerate().rev().filter(|(_, s)| s.state == SlotState::Free) {
            match slot.home {
                Home::Partition(p) => self.partitions[p].free.push(SlotId(i as u32)),
                Home::Staging => self.staging_free.push(SlotId(i as u32)),
                Home::Away => {}
            }
        }
    }

    /// Takes a slot out of the layer's partition.
    fn vacate(&mut self, layer: usize) -> Option<SlotId> {
        let partition = &mut self.partitions[self.shape.partition_of[layer]];
        if let Some(slot) = partition.free.pop() {
            return Some(slot);
        }
        let (pinned, kept) = (&self.pinned, &self.kept);
        let victim = partition.policy.victim(&|r| !pinned[r.0 as usize] && !kept[r.0 as usize])?;
        partition.policy.remove(victim);
        let slot = self.slot_of[victim.0 as usize].take()?;
        self.slots[slot.0 as usize].state = SlotState::Free;
        Some(slot)
    }

    fn settle(&mut self, layer: usize, slot: SlotId, state: SlotState) {
        let (SlotState::Loading(record) | SlotState::Resident(record)) = state else { return };
        self.slots[slot.0 as usize].state = state;
        self.slot_of[record.0 as usize] = Some(slot);
        self.partitions[self.shape.partition_of[layer]].policy.insert(record);
    }

    /// Whether no record is pinned.
    #[cfg(test)]
    pub(crate) fn pin_free(&self) -> bool {
        !self.pinned.contains(&true)
    }

    /// Describes the first broken invariant, if any. For tests.
    pub fn inconsistency(&self) -> Option<String> {
        let mut counts = vec![0; self.shape.partitions.len()];
        let (mut staging, mut away) = (0, 0);
        for (slot, state) in self.states() {
            match self.slots[slot.0 as usize].home {
                Home::Partition(p) => counts[p] += 1,
                Home::Staging => staging += 1,
                Home::Away if state == SlotState::Free => away += 1,
                Home::Away => return Some(format!("{slot:?} is given up and holds {state:?}")),
            }
            if let SlotState::Loading(r) | SlotState::Resident(r) = state
                && self.slot_of[r.0 as usize] != Some(slot)
            {
                return Some(format!("{slot:?} holds {r:?}, which is in {:?}", self.slot_of[r.0 as usize]));
            }
        }
        if counts != self.shape.partitions || staging != self.shape.staging {
            return Some(format!("sizes {counts:?} and {staging} staging, of {:?}", self.shape));
        }
        let held = self.slots.iter().filter(|s| s.state != SlotState::Free).count();
        let known = self.slot_of.iter().flatten().count();
        let ordered: usize = self.partitions.iter().map(|p| p.policy.eviction_order().len()).sum();
        if held != known || ordered + self.staged.len() != held {
            return Some(format!(
                "{held} slots hold {known} records; {ordered} cached, {} staged",
                self.staged.len()
            ));
        }
        let free: usize = self.partitions.iter().map(|p| p.free.len()).sum();
        (free + self.staging_free.len() + held + away != self.slots.len())
            .then(|| "a slot is lost".to_owned())
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
