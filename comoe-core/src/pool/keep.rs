//! Records that stay for good.

use super::{Pool, SlotState};
use crate::backend::SlotId;
use crate::store::RecordIndex;

/// The part of a partition's slots that records may hold for good, at most. The policies in force know by themselves what is
/// hot: of what was tried on recorded traces an eighth gains where pinning gains at all, and loses least where it does not
/// (comoe-bench/RESULTS-pins.md).
pub(crate) const PINNED_PART: f64 = 1.0 / 8.0;

/// Records that may stay for good in `part` of `slots` slots, rounded up: a token's own experts find room beside them, or a
/// step would go in waves.
pub(crate) fn most_pinned(slots: usize, top_k: usize, part: f64) -> usize {
    ((slots as f64 * part).ceil() as usize).min(slots.saturating_sub(top_k.max(1)))
}

impl Pool {
    /// Gives `record`, which is nowhere, a free slot of the layer's partition for good: it is never a victim. Its state is
    /// `Loading`, and that is no access. `None` when no slot is free.
    pub fn keep(&mut self, layer: usize, record: RecordIndex) -> Option<SlotId> {
        debug_assert!(self.locate(record).is_none());
        let p = self.shape.partition_of[layer];
        let slot = self.partitions[p].free.pop()?;
        self.partitions[p].policy.adopt(record);
        self.kept_in[p] += 1;
        self.slots[slot.0 as usize].state = SlotState::Loading(record);
        self.slot_of[record.0 as usize] = Some(slot);
        self.kept[record.0 as usize] = true;
        Some(slot)
    }

    /// Whether `record` stays for good.
    pub fn is_kept(&self, record: RecordIndex) -> bool {
        self.kept[record.0 as usize]
    }

    /// Records that stay for good, ascending.
    pub fn kept(&self) -> Vec<RecordIndex> {
        (0..self.kept.len() as u32).map(RecordIndex).filter(|&r| self.is_kept(r)).collect()
    }

    /// Where records that stay for good have come to hold more than half of a partition's slots, since it has fewer now, they
    /// may leave again.
    pub(super) fn let_go(&mut self) {
        for (p, kept_in) in self.kept_in.iter_mut().enumerate() {
            if 2 * *kept_in > self.shape.partitions[p] {
                *kept_in = 0;
                for record in self.partitions[p].policy.eviction_order() {
                    self.kept[record.0 as usize] = false;
                }
            }
        }
    }

    /// Slots of a partition whose records may leave, or that are free.
    pub fn leaving(&self, partition: usize) -> usize {
        self.shape.partitions[partition] - self.kept_in[partition]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PoolShape, Residency};
    use super::*;
    use crate::policy::PolicyKind;

    fn r(n: u32) -> RecordIndex {
        RecordIndex(n)
    }

    #[test]
    fn what_is_kept_takes_free_slots_alone_and_never_leaves() {
        let shape = PoolShape::by_layer(6, &[4, 4], 0);
        let mut p = Pool::new(shape, 8, |slots| PolicyKind::Lru.build(slots, 8, 2));
        assert_eq!([r(2), r(0)].map(|x| p.keep(0, x)), [Some(SlotId(0)), Some(SlotId(2))]);
        p.place(0, r(1)).unwrap();
        assert_eq!(p.keep(0, r(3)), None, "no slot is free");
        assert_eq!((p.kept(), p.leaving(0), p.leaving(1)), (vec![r(0), r(2)], 1, 3));
        for step in 0..20 {
            p.access(0, &[r([1, 3][step % 2])]);
            assert!([r(0), r(2)].iter().all(|&x| p.locate(x).is_some()), "step {step}");
        }
        // A set larger than what may leave: the surplus finds no slot.
        assert_eq!(p.access(0, &[r(1), r(3)]).iter().filter(|m| m.1.is_none()).count(), 1);
        assert_eq!(p.inconsistency(), None);
        let lost = Residency { kept: vec![r(3)], ..p.residency() };
        let held = p.locate(r(3)).is_some();
        assert_eq!(p.restore(&lost).is_ok(), held);
        let lost = Residency { kept: vec![r(7)], ..p.residency() };
        assert!(p.restore(&lost).unwrap_err().to_string().contains("stays for good"));
    }
    #[test]
    fn a_smaller_pool_keeps_what_is_in_its_slots_and_no_more_than_half_of_them() {
        let shape = PoolShape::by_layer(12, &[8, 8], 0);
        let mut p = Pool::new(shape, 16, |slots| PolicyKind::Lru.build(slots, 16, 2));
        [r(5), r(6)].iter().for_each(|&x| assert!(p.keep(0, x).is_some()));
        assert!(p.keep(1, r(9)).is_some());
        p.resize(8);
        assert_eq!((p.kept(), p.leaving(0), p.leaving(1)), (vec![r(5), r(6), r(9)], 2, 3));
        p.resize(6);
        assert_eq!((p.kept(), p.leaving(0), p.leaving(1)), (vec![r(9)], 3, 2));
        assert!(p.locate(r(5)).is_some() && p.locate(r(6)).is_some(), "they may leave, and are there still");
        p.resize(12);
        assert_eq!((p.kept(), p.inconsistency()), (vec![r(9)], None));
    }
}
