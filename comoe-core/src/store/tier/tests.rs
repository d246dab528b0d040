use std::collections::HashSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;
use crate::store::MemorySource;

const RECORD: usize = 1024;

/// Records that all hold their own number, read as slowly and as badly as a test wants it.
struct Disk {
    directory: Directory,
    /// A bit for each record that cannot be read.
    broken: AtomicU64,
    reads: AtomicUsize,
    readers: Mutex<HashSet<std::thread::ThreadId>>,
    /// Reads go on once so many are under way.
    together: Option<Barrier>,
    /// Reads go on only while this is open.
    gate: (Mutex<bool>, Condvar),
    /// In the order in which reads began.
    order: Mutex<Vec<u32>>,
}

impl Disk {
    fn new(experts: usize) -> Self {
        Self {
            directory: Directory::new([(0, experts, RECORD), (3, experts, RECORD)]).unwrap(),
            broken: AtomicU64::new(0),
            reads: AtomicUsize::new(0),
            readers: Mutex::default(),
            together: None,
            gate: (Mutex::new(true), Condvar::new()),
            order: Mutex::default(),
        }
    }

    fn with_places(self, places: usize) -> (TieredSource, Arc<Self>) {
        let disk = Arc::new(self);
        let options = TierOptions { places, policy: PolicyKind::Lru, top_k: 2 };
        (TieredSource::new(disk.clone(), options).unwrap(), disk)
    }

    fn open(&self, open: bool) {
        *self.gate.0.lock().unwrap() = open;
        self.gate.1.notify_all();
    }

    fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }
}

impl RecordSource for Disk {
    fn directory(&self) -> &Directory {
        &self.directory
    }

    fn read(&self, record: RecordIndex, out: &mut [u8]) -> Result<()> {
        self.readers.lock().unwrap().insert(std::thread::current().id());
        self.reads.fetch_add(1, Ordering::SeqCst);
        if let Some(together) = &self.together {
            together.wait();
        }
        self.order.lock().unwrap().push(record.0);
        let gate = self.gate.0.lock().unwrap();
        drop(self.gate.1.wait_while(gate, |open| !*open).unwrap());
        if self.broken.load(Ordering::SeqCst) >> record.0 & 1 == 1 {
            assert_ne!(record.0, 63, "what a panic says");
            return Err(Error::io("/disk", std::io::Error::from_raw_os_error(5)));
        }
        out.fill(record.0 as u8 + 1);
        Ok(())
    }
}

fn r(n: u32) -> RecordIndex {
    RecordIndex(n)
}

#[track_caller]
fn read(tier: &TieredSource, record: u32) {
    let mut out = [0; RECORD];
    tier.read(r(record), &mut out).unwrap();
    assert!(out.iter().all(|&b| b == record as u8 + 1), "{record}: {}", out[0]);
}

#[track_caller]
fn counts(tier: &TieredSource, warm: u64, cold: u64, early: u64) {
    let s = tier.stats();
    assert_eq!((s.warm, s.cold, s.early), (warm, cold, early), "{s:?}");
}

/// Whether it comes true within a minute.
fn soon(done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !done() {
        if start.elapsed() > Duration::from_secs(60) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

#[test]
fn what_fits_is_read_once_and_the_least_recent_leaves() {
    let (tier, disk) = Disk::new(4).with_places(3);
    [0, 1, 2, 1, 0].into_iter().for_each(|n| read(&tier, n));
    counts(&tier, 2, 3, 0);
    read(&tier, 7); // 2 leaves
    read(&tier, 0);
    assert_eq!(disk.reads(), 4);
    read(&tier, 2); // 1 leaves
    [7, 0, 2].into_iter().for_each(|n| read(&tier, n));
    assert_eq!(disk.reads(), 5);
    let s = tier.stats();
    assert_eq!((s.reads, s.read_bytes, s.unused), (5, 5 * RECORD as u64, 0), "{s:?}");
    assert_eq!((s.places, s.place_bytes), (3, RECORD));
    tier.reset_stats();
    read(&tier, 2);
    counts(&tier, 1, 0, 0);
    let mut short = [0; RECORD - 1];
    assert!(tier.read(r(0), &mut short).unwrap_err().to_string().contains("1024 bytes"));
    assert!(tier.read(r(8), &mut [0; RECORD]).unwrap_err().to_string().contains("number 8"));
}

#[test]
fn only_its_own_threads_read_and_one_place_serves_any_number_of_callers() {
    for places in [1, 2, 5] {
        let (tier, disk) = Disk::new(8).with_places(places);
        let callers: Vec<_> = std::thread::scope(|scope| {
            let call = |seed: u32| {
                let tier = &tier;
                scope.spawn(move || {
                    (0..400).for_each(|i| read(tier, (i * 7 + seed * 5) % 16));
                    std::thread::current().id()
                })
            };
            let callers: Vec<_> = (0..6).map(call).collect();
            callers.into_iter().map(|c| c.join().unwrap()).collect()
        });
        let readers = disk.readers.lock().unwrap();
        assert!(callers.iter().all(|id| !readers.contains(id)) && readers.len() <= places.min(READERS));
        let s = tier.stats();
        assert_eq!(s.warm + s.cold, 6 * 400);
        assert!(s.reads == disk.reads() as u64 && s.cold == s.reads && s.unused == 0, "{s:?}");
        assert_eq!(tier.shared.lock().pool.inconsistency(), None);
        assert!(tier.shared.lock().pool.pin_free(), "nothing is held any more");
    }
}

#[test]
fn an_announced_batch_is_read_at_once_and_keeps_its_own_members() {
    // Reads end only once four are under way.
    let disk = Disk { together: Some(Barrier::new(4)), ..Disk::new(8) };
    let (tier, disk) = disk.with_places(6);
    tier.announce(&mut [3, 4, 5, 6].into_iter().map(r), false);
    [3, 4, 5, 6].into_iter().for_each(|n| read(&tier, n));
    assert_eq!(disk.reads(), 4);
    // 3 and 4 are the least recent, and of the batch: 5 and 6 leave.
    tier.announce(&mut [8, 9, 3, 10, 4, 11].into_iter().map(r), false);
    [8, 9, 3, 10, 4, 11].into_iter().for_each(|n| read(&tier, n));
    assert_eq!(disk.reads(), 8);
    let s = tier.stats();
    assert_eq!((s.warm, s.cold, s.unused), (2, 8, 0), "{s:?}");
}

#[test]
fn what_was_read_ahead_is_there_and_what_was_not_asked_for_is_counted() {
    let (tier, disk) = Disk::new(8).with_places(2);
    tier.announce(&mut [1, 2].into_iter().map(r), true);
    assert!(soon(|| tier.stats().reads == 2));
    read(&tier, 1);
    counts(&tier, 0, 1, 1);
    read(&tier, 1);
    counts(&tier, 1, 1, 1);
    assert_eq!(tier.stats().unused, 0, "2 may still be asked for");
    tier.announce(&mut [99].into_iter().map(r), true); // there is no such record
    read(&tier, 5);
    read(&tier, 6);
    let s = tier.stats();
    assert_eq!((s.cold, s.reads, s.unused), (3, 4, 1), "{s:?}");
    assert_eq!(disk.reads(), 4);
}

#[test]
fn a_demand_overtakes_what_is_read_ahead() {
    let (tier, disk) = Disk::new(32).with_places(64);
    disk.open(false);
    tier.announce(&mut (0..60).map(r), true);
    assert!(soon(|| disk.reads() == READERS), "all of them read");
    std::thread::scope(|scope| {
        scope.spawn(|| read(&tier, 59));
        scope.spawn(|| read(&tier, 62));
        let both = soon(|| tier.shared.lock().wanted_now() == 2);
        disk.open(true);
        assert!(both, "both wait");
    });
    assert!(soon(|| tier.stats().reads == 61));
    let order = disk.order.lock().unwrap();
    let mut next = order[READERS..READERS + 2].to_vec();
    next.sort_unstable();
    assert_eq!(next, [59, 62], "{order:?}");
}

#[test]
fn a_failed_read_names_the_expert_and_leaves_its_place_free() {
    let (tier, disk) = Disk::new(32).with_places(2);
    disk.broken.store(1 << 40 | 1 << 63, Ordering::SeqCst);
    let failed = |n| tier.read(r(n), &mut [0; RECORD]).unwrap_err();
    for _ in 0..5 {
        let text = failed(40).to_string();
        assert!(text.contains("layer 3 expert 8") && text.contains("/disk"), "{text}");
        assert!(failed(63).to_string().contains("panicked"));
        read(&tier, 1);
    }
    assert!(matches!(failed(40), Error::FillFailed { .. }));
    // Everybody who waits hears of it; who comes later tries again.
    tier.announce(&mut [40, 1].into_iter().map(r), true);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(failed(40).to_string().contains("layer 3 expert 8")));
        }
    });
    disk.broken.store(0, Ordering::SeqCst);
    read(&tier, 40);
    read(&tier, 63);
    let state = tier.shared.lock();
    assert_eq!(state.pool.inconsistency(), None);
    assert!(state.pool.pin_free());
}

#[test]
fn dropping_it_leaves_what_nobody_waits_for() {
    let (tier, disk) = Disk::new(32).with_places(64);
    disk.open(false);
    tier.announce(&mut (0..64).map(r), true);
    assert!(soon(|| disk.reads() == READERS));
    std::thread::scope(|scope| {
        let shared = tier.shared.clone();
        scope.spawn(move || drop(tier));
        let ends = soon(|| shared.lock().ending);
        disk.open(true);
        assert!(ends);
    });
    assert_eq!(disk.reads(), READERS);
    let none = TierOptions { places: 0, policy: PolicyKind::Auto, top_k: 2 };
    let records = vec![vec![0u8; 8].into_boxed_slice(); 2];
    let memory = MemorySource::new(Directory::new([(0, 2, 8)]).unwrap(), records).unwrap();
    assert!(TieredSource::new(Arc::new(memory), none).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_read_has_its_records_bytes(
        places in 1usize..9,
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        steps in prop::collection::vec((0u32..16, 0usize..4, any::<bool>()), 1..80),
    ) {
        let disk = Arc::new(Disk::new(8));
        let tier = TieredSource::new(disk.clone(), TierOptions { places, policy, top_k: 2 }).unwrap();
        for (first, announced, ahead) in steps {
            tier.announce(&mut (0..announced as u32).map(|i| r((first + 3 * i) % 16)), ahead);
            read(&tier, first);
            prop_assert_eq!(tier.shared.lock().pool.inconsistency(), None);
        }
        let s = tier.stats();
        prop_assert!(s.reads <= disk.reads() as u64 && s.cold <= s.reads, "{:?}", s);
    }
}
