//! The pool against what must hold of it, and against naive ones.

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
    let uneven = PoolShape { partitions: vec![3, 1, 2], partition_of: vec![0, 1, 2], staging: 1 };
    assert_eq!(uneven.dealt().collect::<Vec<_>>(), [0, 1, 2, 0, 2, 0]);
    assert_eq!(uneven.first(4).partitions, [2, 1, 1]);
    assert_eq!(PoolShape::global(7, 3, 0).first(5), PoolShape::global(5, 3, 0));
}

#[test]
fn slots_leave_and_come_back_in_every_layer_alike() {
    let mut p = pool(PoolShape::by_layer(6, &[4, 4], 0), 8);
    for record in 0..6 {
        p.place(record as usize % 2, r(record % 2 * 4 + record / 2));
    }
    assert_eq!(p.resize(3), [r(5), r(2), r(6)], "slots 3, 4 and 5");
    assert_eq!((p.shape().partitions.clone(), p.free(0), p.inconsistency()), (vec![2, 1], 0, None));
    assert_eq!(p.place(1, r(6)).unwrap(), SlotId(1), "its layer has one slot");
    assert_eq!(p.resize(99), []);
    assert_eq!(p.shape(), p.most());
    assert_eq!((p.free(0), p.free(1)), (1, 2));
    assert_eq!(p.place(1, r(4)), Some(SlotId(3)));
    assert_eq!((p.place(0, r(2)), p.inconsistency()), (Some(SlotId(4)), None));
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
        vec![vec![(r(0), SlotId(1))], vec![]],
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

/// A pool of sets that are searched: what [`Pool`] must be like, LRU and without staging.
struct Naive {
    /// By slot: its partition, its record and when that was last used.
    slots: Vec<(usize, Option<(RecordIndex, usize)>)>,
    here: usize,
    clock: usize,
}

impl Naive {
    fn access(&mut self, partition: usize, set: &[RecordIndex]) {
        for &record in set {
            self.clock += 1;
            let mine = self.slots[..self.here].iter_mut().filter(|s| s.0 == partition);
            let of_set =
                |s: &(usize, Option<(RecordIndex, usize)>)| s.1.is_some_and(|(r, _)| set.contains(&r));
            let mut mine: Vec<_> = mine.collect();
            if let Some(held) = mine.iter_mut().find(|s| s.1.is_some_and(|(r, _)| r == record)) {
                held.1 = Some((record, self.clock));
            } else if let Some(slot) =
                mine.into_iter().filter(|s| !of_set(s)).min_by_key(|s| s.1.map_or(0, |h| h.1))
            {
                slot.1 = Some((record, self.clock));
            }
        }
    }

    fn resize(&mut self, slots: usize) {
        self.here = slots;
        self.slots[slots..].iter_mut().for_each(|s| s.1 = None);
    }
}

#[test]
fn a_record_whose_fill_failed_leaves_its_slot_free() {
    for policy in PolicyKind::ALL {
        let mut p = pool_by(policy, PoolShape::global(2, 1, 1), 8);
        let slot = p.place(0, r(0)).unwrap();
        p.place(0, r(1));
        p.stage(r(2));
        p.forget(r(0));
        p.forget(r(2));
        p.forget(r(7));
        assert_eq!((p.locate(r(0)), p.locate(r(2)), p.free(0), p.staging_left()), (None, None, 1, 1));
        assert_eq!(p.inconsistency(), None);
        assert_eq!(p.place(0, r(3)), Some(slot));
    }
}

proptest! {
    /// Sizes that change between steps leave what a naive pool has left.
    #[test]
    fn shrinks_and_grows_like_a_naive_pool(
        global in any::<bool>(),
        slots in 3usize..19,
        steps in prop::collection::vec((0usize..3, prop::collection::btree_set(0u32..6, 1..7), 0usize..40), 1..80),
    ) {
        let shape = match global {
            true => PoolShape::global(slots, 3, 0),
            false => PoolShape::by_layer(slots, &[6, 6, 6], 0),
        };
        let mut naive = Naive { slots: shape.dealt().map(|p| (p, None)).collect(), here: slots, clock: 0 };
        let mut pool = pool(shape, 18);
        for (layer, set, size) in steps {
            let set: Vec<_> = set.into_iter().map(|e| r(layer as u32 * 6 + e)).collect();
            if (3..=slots).contains(&size) {
                naive.resize(size);
                let gone = pool.resize(size);
                prop_assert!(gone.iter().all(|&x| pool.locate(x).is_none()));
                prop_assert_eq!(pool.shape().slots(), size);
            }
            pool.access(layer, &set);
            naive.access(if global { 0 } else { layer }, &set);
            prop_assert_eq!(pool.inconsistency(), None);
            for (i, (_, held)) in naive.slots.iter().enumerate() {
                let state = pool.states().nth(i).unwrap().1;
                prop_assert_eq!(state, held.map_or(SlotState::Free, |(x, _)| SlotState::Resident(x)), "slot {}", i);
            }
        }
    }

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
        sizes in prop::collection::vec(3usize..40, 1..80),
    ) {
        let shape = if global { PoolShape::global(slots, 3, staging) } else {
            PoolShape::by_layer(slots.max(3), &[6, 6, 6], staging)
        };
        let mut p = pool(shape, 18);
        for ((layer, set, guess), size) in steps.into_iter().zip(sizes.into_iter().cycle()) {
            if size <= p.most().slots() {
                p.resize(size);
                prop_assert_eq!((p.shape().slots(), p.inconsistency()), (size, None));
            }
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
