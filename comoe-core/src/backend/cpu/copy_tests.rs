use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::store::Directory;

/// Records whose every byte is `record + 1`. Logs who read what; reads of some records wait to be let go.
pub(crate) struct Scripted {
    directory: Directory,
    log: Mutex<Vec<(u32, bool)>>,
    /// Tells the test that a read on the worker has begun, then waits for the test.
    gate: Option<Gate>,
    broken: Option<(u32, Broken)>,
}

struct Gate {
    record: u32,
    begun: Mutex<Sender<()>>,
    go: Mutex<Receiver<()>>,
}

#[derive(Clone, Copy)]
enum Broken {
    Fails,
    Panics,
}

impl Scripted {
    fn new(records: usize, bytes: usize) -> Self {
        let directory = Directory::new([(0, records, bytes)]).unwrap();
        Self { directory, log: Mutex::default(), gate: None, broken: None }
    }

    /// Reads of `record` on the worker tell `begun` and wait for `go`.
    fn gated(mut self, record: u32) -> (Self, Receiver<()>, Sender<()>) {
        let ((begun, has_begun), (go, may_go)) = (channel(), channel());
        self.gate = Some(Gate { record, begun: Mutex::new(begun), go: Mutex::new(may_go) });
        (self, has_begun, go)
    }

    /// Records in the order of reading.
    fn order(&self) -> Vec<u32> {
        self.log.lock().unwrap().iter().map(|(r, _)| *r).collect()
    }
}

impl RecordSource for Scripted {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        let on_worker = std::thread::current().name() == Some("comoe-copy");
        self.log.lock().unwrap().push((record.0, on_worker));
        if let Some(Gate { record: gated, begun, go }) = &self.gate
            && *gated == record.0
            && on_worker
        {
            begun.lock().unwrap().send(()).unwrap();
            // A test that has ended hangs up, which lets the worker go as well.
            let _ = go.lock().unwrap().recv();
        }
        match self.broken {
            Some((r, Broken::Fails)) if r == record.0 => {
                return Err(Error::bad_file("shard", "is cut short"));
            }
            Some((r, Broken::Panics)) if r == record.0 => panic!("on purpose"),
            _ => {}
        }
        out.fill(record.0 as u8 + 1);
        Ok(())
    }
}

fn queues(source: Scripted, slots: usize) -> (CopyQueues, Arc<Scripted>) {
    let source = Arc::new(source);
    let slab = Slab::new(slots, source.directory.largest_record().next_multiple_of(512)).unwrap();
    (CopyQueues::new(source.clone(), slab).unwrap(), source)
}

fn fills(pairs: &[(u32, u32)]) -> Vec<Fill> {
    pairs.iter().map(|&(r, s)| Fill { record: RecordIndex(r), slot: SlotId(s) }).collect()
}

fn check_slot(q: &CopyQueues, slot: u32, record: u32) {
    assert_eq!(q.holds(SlotId(slot)), Some(RecordIndex(record)));
    assert!(q.slab().read(SlotId(slot)).unwrap().iter().all(|&b| b == record as u8 + 1), "slot {slot}");
}

/// Waits without helping.
fn watch(q: &CopyQueues, ticket: Ticket) {
    while !q.is_done(ticket).unwrap() {
        std::thread::yield_now();
    }
}

#[test]
fn the_waiting_thread_copies_what_the_worker_has_not_started() {
    let (source, begun, go) = Scripted::new(6, 512).gated(0);
    let (q, source) = queues(source, 6);
    let ticket = q.fill(Queue::Demand, &[], &fills(&[(0, 3), (1, 0), (2, 5), (4, 1)])).unwrap();
    // The worker is inside record 0 and can do no more until it is let go, so this thread must do the rest.
    begun.recv().unwrap();
    let helper = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| q.wait(ticket).unwrap());
        while source.order().len() < 4 {
            std::thread::yield_now();
        }
        assert!(!q.is_done(ticket).unwrap());
        go.send(()).unwrap();
        waiter.join().unwrap()
    });
    assert!(helper > Duration::ZERO);
    for (record, on_worker) in source.log.lock().unwrap().iter() {
        assert_eq!(*on_worker, *record == 0, "record {record}");
    }
    for (slot, record) in [(3, 0), (0, 1), (5, 2), (1, 4)] {
        check_slot(&q, slot, record);
    }
    assert_eq!(q.holds(SlotId(2)), None);
    assert_eq!(q.wait(ticket).unwrap(), Duration::ZERO);
}

#[test]
fn prefetch_yields_to_demand() {
    let (source, begun, go) = Scripted::new(8, 512).gated(0);
    let (q, source) = queues(source, 8);
    let guess = q.fill(Queue::Prefetch, &[], &fills(&[(0, 0), (1, 1), (2, 2)])).unwrap();
    begun.recv().unwrap();
    let first = q.fill(Queue::Demand, &[], &fills(&[(3, 3), (4, 4)])).unwrap();
    let second = q.fill(Queue::Demand, &[], &fills(&[(5, 5)])).unwrap();
    go.send(()).unwrap();
    watch(&q, guess);
    assert!(q.is_done(first).unwrap() && q.is_done(second).unwrap());
    assert_eq!(source.order(), [0, 3, 4, 5, 1, 2]);
}

#[test]
fn a_thread_that_waits_for_demand_starts_no_prefetch() {
    let (source, begun, go) = Scripted::new(8, 512).gated(0);
    let (q, source) = queues(source, 8);
    q.fill(Queue::Prefetch, &[], &fills(&[(0, 0), (1, 1)])).unwrap();
    begun.recv().unwrap();
    // The worker is held inside a guess; the demand is served here, and the second guess is not touched.
    let demand = q.fill(Queue::Demand, &[], &fills(&[(3, 3), (4, 4)])).unwrap();
    q.wait(demand).unwrap();
    assert_eq!(source.order(), [0, 3, 4]);
    go.send(()).unwrap();
    q.synchronize().unwrap();
    assert_eq!(source.order(), [0, 3, 4, 1]);
}

#[test]
fn tickets_order_the_queues() {
    for helped in [false, true] {
        let (source, begun, go) = Scripted::new(8, 512).gated(0);
        let (q, source) = queues(source, 8);
        // Slot 1 is prefetched, then refilled on demand, then prefetched again: three batches, one slot.
        let a = q.fill(Queue::Prefetch, &[], &fills(&[(0, 0), (1, 1)])).unwrap();
        let b = q.fill(Queue::Demand, &[a], &fills(&[(2, 1), (3, 3)])).unwrap();
        let c = q.fill(Queue::Prefetch, &[b], &fills(&[(4, 1)])).unwrap();
        let empty = q.fill(Queue::Demand, &[c], &[]).unwrap();
        begun.recv().unwrap();
        assert!(!q.is_done(empty).unwrap() && !q.is_done(a).unwrap());
        go.send(()).unwrap();
        if helped {
            q.wait(empty).unwrap();
        } else {
            watch(&q, empty);
        }
        assert!([a, b, c].into_iter().all(|t| q.is_done(t).unwrap()));
        let order = source.order();
        let at = |r: u32| order.iter().position(|&x| x == r).unwrap();
        assert!(at(0).max(at(1)) < at(2).min(at(3)) && at(2).max(at(3)) < at(4), "{order:?}");
        check_slot(&q, 1, 4);
    }
}

#[test]
fn failures_are_remembered_and_named() {
    for (how, text) in [(Broken::Fails, "is cut short"), (Broken::Panics, "panicked: on purpose")] {
        for ask in 0..4 {
            // The worker is held before the broken record until everything is enqueued.
            let (mut source, begun, go) = Scripted::new(4, 512).gated(1);
            source.broken = Some((2, how));
            let (q, _) = queues(source, 4);
            let ticket = q.fill(Queue::Demand, &[], &fills(&[(1, 0), (2, 1), (3, 2)])).unwrap();
            let behind = q.fill(Queue::Prefetch, &[ticket], &fills(&[(0, 3)])).unwrap();
            begun.recv().unwrap();
            go.send(()).unwrap();
            let error = match ask {
                0 => q.wait(ticket).unwrap_err(),
                1 => q.synchronize().unwrap_err(),
                2 => q.wait(behind).unwrap_err(),
                _ => loop {
                    match q.is_done(ticket) {
                        Ok(done) => assert!(!done),
                        Err(e) => break e,
                    }
                },
            };
            let message = error.to_string();
            assert!(message.contains("layer 0 expert 2") && message.contains(text), "{message}");
            assert!(q.holds(SlotId(1)).is_none());
            for again in [q.wait(behind).unwrap_err(), q.fill(Queue::Demand, &[], &[]).unwrap_err()] {
                assert!(matches!(again, Error::FillFailed { id: ExpertId { layer: 0, expert: 2 }, .. }));
            }
        }
    }
}

#[test]
fn dropping_leaves_what_is_queued_and_joins() {
    let (source, begun, go) = Scripted::new(6, 512).gated(0);
    let (q, source) = queues(source, 6);
    q.fill(Queue::Prefetch, &[], &fills(&[(0, 0), (1, 1)])).unwrap();
    begun.recv().unwrap();
    q.fill(Queue::Demand, &[], &fills(&[(2, 2), (3, 3)])).unwrap();
    let shared = q.shared.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !shared.lock().ending {
                std::thread::yield_now();
            }
            go.send(()).unwrap();
        });
        drop(q);
    });
    assert_eq!(source.order(), [0]);
}

#[test]
fn bad_fills_and_unknown_tickets_are_refused() {
    let (q, source) = queues(Scripted::new(4, 700), 2);
    let refused = |r: Result<Ticket>, text: &str| {
        let e = r.unwrap_err().to_string();
        assert!(e.contains(text), "{e}");
    };
    refused(q.fill(Queue::Compute, &[], &[]), "compute queue");
    refused(q.fill(Queue::Demand, &[], &fills(&[(0, 2)])), "2 slots");
    refused(q.fill(Queue::Demand, &[], &fills(&[(4, 0)])), "4 records");
    refused(q.fill(Queue::Demand, &[], &fills(&[(0, 1), (1, 1)])), "slot 1 twice");
    let never = Ticket { queue: Queue::Prefetch, seq: 1 };
    refused(q.fill(Queue::Demand, &[never], &[]), "never handed out");
    assert!(q.wait(never).unwrap_err().to_string().contains("never handed out"));
    assert!(q.is_done(never).is_err());
    let small = CopyQueues::new(source.clone(), Slab::new(2, 512).unwrap()).unwrap();
    refused(small.fill(Queue::Demand, &[], &fills(&[(0, 0)])), "has 700 bytes, a slot 512");
    assert!(source.order().is_empty());
}

#[test]
fn a_slot_in_use_is_not_overwritten() {
    let (q, _) = queues(Scripted::new(4, 512), 2);
    let ticket = q.fill(Queue::Demand, &[], &fills(&[(0, 0)])).unwrap();
    q.wait(ticket).unwrap();
    let reader = q.slab().read(SlotId(0)).unwrap();
    let ticket = q.fill(Queue::Demand, &[], &fills(&[(1, 0)])).unwrap();
    let error = q.wait(ticket).unwrap_err().to_string();
    assert!(error.contains("layer 0 expert 1") && error.contains("in use"), "{error}");
    assert!(reader.iter().all(|&b| b == 1));
}

#[test]
fn a_large_record_arrives_whole() {
    let (q, _) = queues(Scripted::new(2, 24 << 20), 2);
    let ticket = q.fill(Queue::Demand, &[], &fills(&[(1, 0)])).unwrap();
    q.wait(ticket).unwrap();
    check_slot(&q, 0, 1);
    let time = q.time();
    assert!(time.demand > Duration::ZERO && time.prefetch == Duration::ZERO);
}

#[test]
fn thousands_of_batches_on_both_queues_neither_hang_nor_mix() {
    let (q, _) = queues(Scripted::new(200, 2048), 16);
    let mut state = 1u64;
    let mut random = |n: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % n) as u32
    };
    // Slots 0 to 11 are demand's, the others prefetch's; now and then they swap a slot through a ticket.
    let mut last = [Ticket::DONE; 2];
    for step in 0..3000 {
        let first = random(12);
        let demand: Vec<_> = (0..1 + random(5)).map(|i| (random(200), (first + i) % 12)).collect();
        let guess: Vec<_> = (0..random(4)).map(|i| (random(200), 12 + i)).collect();
        let after = if random(8) == 0 { last.to_vec() } else { Vec::new() };
        let p = q.fill(Queue::Prefetch, &after, &fills(&guess)).unwrap();
        let after = if random(8) == 0 { vec![p] } else { Vec::new() };
        let d = q.fill(Queue::Demand, &after, &fills(&demand)).unwrap();
        if random(3) == 0 {
            watch(&q, d);
        } else {
            q.wait(d).unwrap();
        }
        demand.iter().for_each(|&(record, slot)| check_slot(&q, slot, record));
        if step % 3 == 0 {
            q.wait(p).unwrap();
            guess.iter().for_each(|&(record, slot)| check_slot(&q, slot, record));
        }
        last = [d, p];
    }
    q.synchronize().unwrap();
}
