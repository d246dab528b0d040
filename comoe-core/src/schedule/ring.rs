//! The ring: slots that records pass through in order, behind those of the pool. A plain queue: no device, no policy.

use std::collections::VecDeque;

use crate::backend::{Fill, SlotId, Ticket};
use crate::store::RecordIndex;

/// Records of one layer that were sent for together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    /// Layer ordinal.
    pub(super) layer: usize,
    /// Reached when all have arrived.
    pub(super) ticket: Ticket,
    /// Which, and where.
    pub(super) fills: Vec<Fill>,
    /// Sent for before anybody asked.
    pub(super) ahead: bool,
}

/// Slots that are taken in order and given back in the same order.
#[derive(Debug, Default)]
pub(super) struct Ring {
    first: u32,
    slots: usize,
    next: usize,
    taken: usize,
    groups: VecDeque<Group>,
}

impl Ring {
    /// `slots` slots from number `first` on; 0 slots are no ring.
    pub(super) fn new(first: usize, slots: usize) -> Self {
        Self { first: first as u32, slots, ..Self::default() }
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Whether `slot` is one of the ring's.
    pub(super) fn owns(&self, slot: SlotId) -> bool {
        slot.0 >= self.first
    }

    /// Slots that are free.
    pub(super) fn room(&self) -> usize {
        self.slots - self.taken
    }

    /// A slot for each of `records`, which are no more than there is room for, until the group that [`Self::push`] makes
    /// of them is popped.
    pub(super) fn take(&mut self, records: &[RecordIndex]) -> Vec<Fill> {
        debug_assert!(records.len() <= self.room());
        let place = |(i, &record): (usize, &RecordIndex)| {
            let slot = SlotId(self.first + ((self.next + i) % self.slots) as u32);
            Fill { record, slot }
        };
        let fills = records.iter().enumerate().map(place).collect();
        self.next = (self.next + records.len()) % self.slots.max(1);
        self.taken += records.len();
        fills
    }

    pub(super) fn push(&mut self, group: Group) {
        self.groups.push_back(group);
    }

    /// The group that was sent for first.
    pub(super) fn front(&self) -> Option<&Group> {
        self.groups.front()
    }

    /// The group that was sent for last.
    pub(super) fn back(&self) -> Option<&Group> {
        self.groups.back()
    }

    /// Gives the slots of the first group back: they may be filled again once their readers are done.
    pub(super) fn pop(&mut self) -> Option<Group> {
        let group = self.groups.pop_front()?;
        self.taken -= group.fills.len();
        Some(group)
    }

    /// Where `record` is, and when it has arrived.
    pub(super) fn find(&self, record: RecordIndex) -> Option<(SlotId, Ticket)> {
        self.groups.iter().find_map(|group| {
            let fill = group.fills.iter().find(|f| f.record == record)?;
            Some((fill.slot, group.ticket))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(ring: &mut Ring, layer: usize, records: std::ops::Range<u32>) -> Vec<u32> {
        let records: Vec<_> = records.map(RecordIndex).collect();
        let fills = ring.take(&records);
        let slots = fills.iter().map(|f| f.slot.0).collect();
        ring.push(Group { layer, ticket: Ticket::DONE, fills, ahead: true });
        slots
    }

    #[test]
    fn slots_go_round_in_order() {
        let mut ring = Ring::new(100, 5);
        assert_eq!(group(&mut ring, 0, 0..3), [100, 101, 102]);
        assert_eq!(group(&mut ring, 0, 3..5), [103, 104]);
        assert_eq!((ring.room(), ring.find(RecordIndex(4)).unwrap().0), (0, SlotId(104)));
        assert_eq!(ring.pop().unwrap().fills.len(), 3);
        assert_eq!(ring.find(RecordIndex(0)), None);
        assert_eq!(group(&mut ring, 1, 5..7), [100, 101]);
        assert_eq!((ring.room(), ring.front().unwrap().layer, ring.back().unwrap().layer), (1, 0, 1));
        assert!(ring.owns(SlotId(100)) && !ring.owns(SlotId(99)));
    }

    #[test]
    fn no_slots_are_no_ring() {
        let mut ring = Ring::new(7, 0);
        assert_eq!((ring.room(), ring.pop()), (0, None));
        assert!(ring.take(&[]).is_empty());
    }
}
