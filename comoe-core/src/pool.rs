//! Which slot holds a record? A pure state machine: no device, no threads, no clock.
//!
//! Slots are divided into partitions (one per layer, or a single one) and a staging area. A partition's policy
//! chooses victims among its records that are not pinned. Partitions and staging keep their sizes: promoting a staged
//! record moves its slot into the partition, and the slot it displaces into staging.

mod keep;

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
        let mut partitions = vec![0; experts.len()];
        let mut left = slots.min(experts.iter().sum());
        while left > 0 {
            for (have, &most) in partitions.iter_mut().zip(experts) {
                if left > 0 && *have < most {
                    *have += 1;
                    left -= 1;
                }
            }
        }
        Self { partitions, partition_of: (0..experts.len()).collect(), staging }
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
        let mut slots = Vec::with_capacity(shape.slots() + shape.staging);
        let mut range = |count: usize, home| {
            let first = slots.len() as u32;
            slots.extend((0..count).map(|_| Slot { state: SlotState::Free, home }));
            // Reversed, so that slots are taken in ascending order.
            (first..first + count as u32).rev().map(SlotId).collect::<Vec<_>>()
        };
        let kept_in = vec![0; shape.partitions.len()];
        let partitions = shape
            .partitions
            .iter()
            .enumerate()
            .map(|(i, &n)| Partition { free: range(n, Home::Partition(i)), policy: policy(n) })
            .collect();
        let staging_free = range(shape.staging, Home::Staging);
        Self {
            shape,
            slots,
            slot_of: vec![None; records],
            partitions,
            pinned: vec![false; records],
            kept: vec![false; records],
            kept_in,
            staging_free,
            staged: Vec::new(),
        }
    }

    /// The division into partitions.
    pub fn shape(&self) -> &PoolShape {
        &self.shape
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
    pub fn staging_left(&self) -> usize {
        self.staging_free.len()
    }

    /// The fill of `slot` has arrived.
    pub fn arrived(&mut self, slot: SlotId) {
        let state = &mut self.slots[slot.0 as usize].state;
        if let SlotState::Loading(record) = *state {
            *state = SlotState::Resident(record);
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
            partition.free.clear();
        }
        // Backwards, so that free slots are taken in ascending order.
        for (i, slot) in self.slots.iter_mut().enumerate().rev() {
            if let Home::Partition(p) = slot.home {
                slot.state = SlotState::Free;
                if !used[i] {
                    self.partitions[p].free.push(SlotId(i as u32));
                }
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
        Ok(())
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

    /// Describes the first broken invariant, if any. For tests and `--check`.
    pub fn inconsistency(&self) -> Option<String> {
        let mut counts = vec![0; self.shape.partitions.len()];
        let mut staging = 0;
        for (slot, state) in self.states() {
            match self.slots[slot.0 as usize].home {
                Home::Partition(p) => counts[p] += 1,
                Home::Staging => staging += 1,
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
        (free + self.staging_free.len() + held != self.slots.len()).then(|| "a slot is lost".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::PolicyKind;

    fn r(n: u32) -> RecordIndex {
        RecordIndex(n)
    }

    fn pool(shape: PoolShape, records: usize) -> Pool {
        pool_by(PolicyKind::Lru, shape, records)
    }

    fn pool_by(policy: PolicyKind, shape: PoolShape, records: usize) -> Pool {
        Pool::new(shape, records, |slots| policy.build(slots, records, 2))
    }

    #[test]
    fn slots_are_shared_out_evenly_and_never_beyond_a_layers_experts() {
        assert_eq!(PoolShape::by_layer(10, &[4, 4, 4], 0).partitions, [4, 3, 3]);
        assert_eq!(PoolShape::by_layer(10, &[8, 1, 8], 0).partitions, [5, 1, 4]);
        assert_eq!(PoolShape::by_layer(99, &[4, 2], 0).partitions, [4, 2]);
    }

    #[test]
    fn promotion_swaps_slots_and_copies_nothing() {
        let mut p = pool(PoolShape::global(2, 1, 1), 8);
        let (a, b) = (p.place(0, r(0)).unwrap(), p.place(0, r(1)).unwrap());
        let s = p.stage(r(2)).unwrap();
        assert_eq!(p.stage(r(3)), None);
        assert!(p.promote(0, r(2)));
        assert_eq!(p.locate(r(2)), Some(Located { slot: s, loading: true, staged: false }));
        assert_eq!(p.locate(r(0)), None, "the least recent left");
        assert_eq!(p.stage(r(3)), Some(a), "its slot is the new staging slot");
        assert_eq!(p.locate(r(1)).unwrap().slot, b);
        assert_eq!(p.inconsistency(), None);
    }

    #[test]
    fn vllm_37190_a_member_of_the_set_is_never_a_victim() {
        let mut p = pool(PoolShape::global(2, 1, 1), 8);
        p.place(0, r(0));
        p.place(0, r(1));
        p.pin([r(0), r(1), r(2), r(3)]);
        assert_eq!(p.place(0, r(2)), None);
        p.stage(r(3));
        assert!(!p.promote(0, r(3)), "it stays staged");
        p.unpin([r(1)]);
        p.place(0, r(2)).unwrap();
        assert_eq!((p.locate(r(1)), p.locate(r(0)).is_some()), (None, true));
        assert_eq!(p.inconsistency(), None);
    }

    #[test]
    fn a_residency_that_does_not_fit_is_refused_and_changes_nothing() {
        let mut p = pool(PoolShape::by_layer(4, &[4, 4], 1), 8);
        p.place(0, r(0));
        p.place(1, r(5));
        p.stage(r(2));
        let before = p.residency();
        for bad in [
            vec![vec![]],
            vec![vec![(r(0), SlotId(2))], vec![]],
            vec![vec![(r(0), SlotId(4))], vec![]],
            vec![vec![(r(0), SlotId(9))], vec![]],
            vec![vec![(r(9), SlotId(0))], vec![]],
            vec![vec![(r(2), SlotId(0))], vec![]],
            vec![vec![(r(0), SlotId(0)), (r(1), SlotId(0))], vec![]],
            vec![vec![(r(0), SlotId(0)), (r(0), SlotId(1))], vec![]],
        ] {
            let residency = Residency { partitions: bad.clone(), ..Residency::default() };
            let error = p.restore(&residency).unwrap_err().to_string();
            assert!(error.starts_with("residency"), "{bad:?}: {error}");
            assert_eq!((p.residency(), p.inconsistency()), (before.clone(), None), "{bad:?}");
        }
    }

    proptest! {
        /// A pool that takes over what another held goes on exactly as that one would have.
        #[test]
        fn residency_and_order_survive_a_hand_over(
            policy in prop::sample::select(vec![PolicyKind::Lru, PolicyKind::Aged, PolicyKind::Lfru]),
            global in any::<bool>(),
            slots in 3usize..13,
            steps in prop::collection::vec((0usize..3, prop::collection::vec(0u32..6, 1..7)), 1..60),
            at in 0usize..60,
            keep in any::<bool>(),
        ) {
            let shape = match global {
                true => PoolShape::global(slots, 3, 0),
                false => PoolShape::by_layer(slots, &[6, 6, 6], 0),
            };
            let mut kept = pool_by(policy, shape.clone(), 18);
            let mut handed = pool_by(policy, shape.clone(), 18);
            for p in [&mut kept, &mut handed].into_iter().filter(|_| keep && slots >= 6) {
                let slot = p.keep(1, r(8)).unwrap();
                p.arrived(slot);
            }
            for (step, (layer, set)) in steps.into_iter().enumerate() {
                let mut members: Vec<RecordIndex> = Vec::new();
                for e in set {
                    let record = r(layer as u32 * 6 + e);
                    if !members.contains(&record) {
                        members.push(record);
                    }
                }
                if step == at {
                    let mut fresh = pool_by(policy, shape.clone(), 18);
                    // What it knew before must not matter.
                    fresh.access(0, &[r(1)]);
                    fresh.access(2, &[r(17), r(16)]);
                    fresh.restore(&handed.residency()).unwrap();
                    handed = fresh;
                }
                for p in [&mut kept, &mut handed] {
                    p.access(layer, &members);
                    prop_assert_eq!(p.inconsistency(), None);
                }
                prop_assert_eq!(kept.residency(), handed.residency());
            }
        }

        #[test]
        fn stays_consistent_under_any_steps(
            global in any::<bool>(),
            slots in 1usize..13,
            staging in 0usize..4,
            steps in prop::collection::vec((0usize..3, prop::collection::btree_set(0u32..6, 1..7), 0u32..6), 1..80),
        ) {
            let shape = if global { PoolShape::global(slots, 3, staging) } else {
                PoolShape::by_layer(slots.max(3), &[6, 6, 6], staging)
            };
            let mut p = pool(shape, 18);
            for (layer, set, guess) in steps {
                let set: Vec<_> = set.into_iter().map(|e| r(layer as u32 * 6 + e)).collect();
                p.pin(set.iter().copied());
                let before: Vec<_> = set.iter().filter_map(|&x| p.locate(x).map(|l| (x, l.slot))).collect();
                for &x in &set {
                    match p.locate(x) {
                        Some(l) if l.staged => { p.promote(layer, x); }
                        Some(_) => p.hit(layer, x),
                        None => if let Some(slot) = p.place(layer, x) { p.arrived(slot) },
                    }
                    prop_assert_eq!(p.inconsistency(), None);
                }
                for (x, slot) in before {
                    prop_assert_eq!(p.locate(x).map(|l| l.slot), Some(slot), "a pinned record moved");
                }
                p.unpin(set.iter().copied());
                p.unstage(layer as u32 * 6..layer as u32 * 6 + 6);
                let next = r(((layer as u32 + 1) % 3) * 6 + guess);
                if p.locate(next).is_none() {
                    p.stage(next);
                }
                prop_assert_eq!(p.inconsistency(), None);
            }
        }
    }
}
