//! How the arena is filled: chunk by chunk, each read by many threads and then page-locked, while the next is read.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rayon::prelude::*;

use super::super::CudaOptions;
use super::super::context::{Doing, Gpu};
use super::super::pinned::LockedMap;
use super::{Ended, Place, Shared};
use crate::error::{Error, Result};
use crate::expert::RECORD_ALIGN;
use crate::machine;
use crate::stats::human_bytes;
use crate::store::{Directory, RecordIndex, RecordSource};
use crate::sys::HUGE_PAGE;

/// Most bytes registered at once. No record straddles two registrations: one copy must lie inside one.
const CHUNK: usize = 1 << 30;
/// The same where steps go on meanwhile: the driver makes them wait while it registers.
const CHUNK_BESIDE_STEPS: usize = 128 << 20;
/// Neighbouring records that one thread reads, at least: where two meet in a huge page, both may find it new and zero it.
const RUN: usize = 8 * HUGE_PAGE;
/// Progress is told once per so many bytes.
const PROGRESS: u64 = 64 << 20;
/// What stays free for everybody else: at least this, or a sixteenth of all memory.
const LEAVE_FREE: u64 = 2 << 30;

/// Fills an arena.
pub(super) struct Loader {
    gpu: Gpu,
    source: Arc<dyn RecordSource>,
    options: CudaOptions,
    pub(super) shared: Arc<Shared>,
    begun: Instant,
    budget: u64,
    why_partial: Option<String>,
    /// Bytes read so far, for those who watch.
    read: AtomicU64,
}

/// Records of one chunk, with their offsets in it.
struct Plan {
    records: Vec<(RecordIndex, usize, usize)>,
    bytes: usize,
}

/// A chunk whose records have been read.
type Filled = (LockedMap, Plan);

impl Loader {
    pub(super) fn new(
        gpu: &Gpu,
        source: &Arc<dyn RecordSource>,
        options: &CudaOptions,
        shared: &Arc<Shared>,
    ) -> Self {
        let padded =
            |l: &crate::store::LayerEntry| (l.experts * l.record_bytes.next_multiple_of(RECORD_ALIGN)) as u64;
        let (budget, why_partial) = budget(source.directory().layers().iter().map(padded).sum(), options);
        Self {
            gpu: gpu.clone(),
            source: source.clone(),
            options: options.clone(),
            shared: shared.clone(),
            begun: Instant::now(),
            budget,
            why_partial,
            read: AtomicU64::new(0),
        }
    }

    /// Whether any record may get a place.
    pub(super) fn has_room(&self) -> bool {
        self.budget > 0
    }

    pub(super) fn run(mut self) -> Result<()> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let chunk = |usual| self.options.page_lock_chunk.unwrap_or(usual);
        let (alone, beside_steps) = (chunk(CHUNK), chunk(CHUNK_BESIDE_STEPS));
        match self.options.page_lock_later {
            false => self.fill(alone)?,
            true => {
                // Threads of its own, and not all: steps have work for the others'.
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads((threads * 3 / 4).max(1))
                    .thread_name(|n| format!("comoe-arena-{n}"))
                    .build();
                let pool = pool.map_err(|e| Error::HostMemory {
                    what: "starting threads that read experts".to_owned(),
                    reason: e.to_string(),
                })?;
                pool.install(|| self.fill(beside_steps))?;
            }
        }
        if self.shared.closing.load(Ordering::Acquire) {
            return Ok(());
        }
        let whole = self.shared.places.iter().all(|place| place.get().is_some());
        if whole && machine::page_cache_is_in_the_way() {
            self.source.release();
        }
        self.progress(self.shared.locked.load(Ordering::Relaxed));
        let ended = Ended { whole, why_partial: self.why_partial.take(), took: self.begun.elapsed() };
        // Nobody else ends it.
        let _ = self.shared.ended.set(ended);
        Ok(())
    }

    fn progress(&self, done: u64) {
        if let Some(progress) = &self.options.progress {
            progress(done, self.shared.total);
        }
    }

    fn fill(&mut self, chunk: usize) -> Result<()> {
        let (mut left, mut next, mut filled) = (self.budget, 0, None::<Filled>);
        loop {
            let plan = match self.shared.closing.load(Ordering::Acquire) {
                true => Plan { records: Vec::new(), bytes: 0 },
                false => plan(self.source.directory(), &mut next, (chunk, left)),
            };
            left -= plan.bytes as u64;
            if plan.records.is_empty() && filled.is_none() {
                return Ok(());
            }
            let (gpu, shared) = (&self.gpu, &self.shared);
            let fails_at = self.options.page_lock_fails_at;
            let lock = filled.take().map(|filled| move || shared.lock(gpu, filled, fails_at));
            let (read, locked) = rayon::join(
                || (!plan.records.is_empty()).then(|| self.read(plan)).transpose(),
                || lock.map_or(Ok(ControlFlow::Continue(())), |lock| lock()),
            );
            if locked?.is_break() {
                let limit = machine::lock_limit().map_or("unlimited".to_owned(), human_bytes);
                self.why_partial = Some(format!(
                    "the driver refused to page-lock more (`ulimit -l` is {limit}; raise it, or give a container \
                     --ulimit memlock=-1)"
                ));
                return Ok(());
            }
            filled = read?;
        }
    }

    /// Before they are locked: many threads fault the pages in, where locking would do it with one.
    fn read(&self, plan: Plan) -> Result<Filled> {
        let mut map = LockedMap::new(&self.gpu, plan.bytes)?;
        let mut rest = map.bytes_mut();
        let mut begun = 0;
        let mut runs: Vec<Vec<(RecordIndex, &mut [u8])>> = Vec::new();
        let threads = rayon::current_num_threads().max(1);
        let run = (plan.bytes / (2 * threads)).clamp(HUGE_PAGE, RUN);
        let mut ends_at = 0;
        for &(record, at, len) in &plan.records {
            let (part, behind) = std::mem::take(&mut rest)[at - begun..].split_at_mut(len);
            if at >= ends_at || runs.is_empty() {
                runs.push(Vec::new());
                ends_at = (at + run).next_multiple_of(HUGE_PAGE);
            }
            if let Some(run) = runs.last_mut() {
                run.push((record, part));
            }
            rest = behind;
            begun = at + len;
        }
        runs.into_par_iter().with_max_len(1).try_for_each(|run| {
            for (record, part) in run {
                if self.shared.closing.load(Ordering::Relaxed) {
                    break;
                }
                self.source.fetch(record, part)?;
                let before = self.read.fetch_add(part.len() as u64, Ordering::Relaxed);
                let now = before + part.len() as u64;
                if before / PROGRESS != now / PROGRESS {
                    self.progress(now);
                }
            }
            Ok::<_, Error>(())
        })?;
        Ok((map, plan))
    }
}

impl Shared {
    /// Page-locks a chunk, as far as the driver does that; `Break` where that is not all of it.
    fn lock(&self, gpu: &Gpu, (mut map, plan): Filled, fails_at: Option<u64>) -> Result<ControlFlow<()>> {
        if self.closing.load(Ordering::Acquire) {
            return Ok(ControlFlow::Break(()));
        }
        gpu.ctx.bind_to_thread().doing("using the GPU")?;
        let before = self.locked.load(Ordering::Relaxed);
        let most = fails_at.map_or(usize::MAX, |n| n.saturating_sub(before) as usize);
        let locked = map.lock(most)?;
        if locked == 0 {
            return Ok(ControlFlow::Break(()));
        }
        let (host, device) = (map.host_address() as usize, map.device_address()?);
        // Kept before anybody can find a place in it.
        self.chunks.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(map);
        let mut bytes = 0;
        for &(record, at, len) in plan.records.iter().take_while(|(_, at, len)| at + len <= locked) {
            // Nobody else gives places.
            let _ = self.places[record.0 as usize].set(Place { host: host + at, device: device + at as u64 });
            bytes += len as u64;
        }
        self.locked.fetch_add(bytes, Ordering::Release);
        Ok(if locked == plan.bytes { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    }
}

/// How many of `total` bytes may be locked, and why not all.
fn budget(total: u64, options: &CudaOptions) -> (u64, Option<String>) {
    if options.tier.is_some() {
        return (0, Some("RAM is given to those that are used most".to_owned()));
    }
    let mut budget = total;
    let mut why = None;
    if let Some(available) = machine::ram_available() {
        let leave = LEAVE_FREE.max(available / 16);
        let usable = available.saturating_sub(leave);
        if usable < total {
            budget = usable;
            why = Some(format!(
                "{} of RAM are available and {} are left free (--ram SIZE would keep those that are used most in it)",
                human_bytes(available),
                human_bytes(leave)
            ));
        }
    }
    if let Some(limit) = options.page_lock_limit
        && limit < budget
    {
        budget = limit;
        why = Some(format!("a limit of {} was asked for", human_bytes(limit)));
    }
    (budget, why)
}

/// The next chunk from record `next` on, of at most `most` bytes (more for a single record) out of `left`; empty when not
/// even one record fits.
fn plan(directory: &Directory, next: &mut usize, (most, left): (usize, u64)) -> Plan {
    let mut plan = Plan { records: Vec::new(), bytes: 0 };
    while *next < directory.len() {
        let record = RecordIndex(*next as u32);
        let len = directory.record_bytes(record);
        let end = plan.bytes + len.next_multiple_of(RECORD_ALIGN);
        if end as u64 > left || (end > most && !plan.records.is_empty()) {
            break;
        }
        plan.records.push((record, plan.bytes, len));
        plan.bytes = end;
        *next += 1;
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_hold_whole_records_within_their_size_and_the_budget() {
        let record = 300 << 20;
        let directory = Directory::new([(0, 5, record), (1, 3, 100)]).unwrap();
        let mut next = 0;
        let mut sizes = Vec::new();
        let mut left = u64::MAX;
        while next < 8 {
            let plan = plan(&directory, &mut next, (CHUNK, left));
            left -= plan.bytes as u64;
            sizes.push((plan.records.len(), plan.bytes));
        }
        assert_eq!(sizes, [(3, 3 * record), (5, 2 * record + 3 * 512)]);

        // A record larger than a chunk has one of its own.
        let directory = Directory::new([(0, 2, 2 * CHUNK)]).unwrap();
        let mut next = 0;
        assert_eq!(plan(&directory, &mut next, (CHUNK, u64::MAX)).records.len(), 1);
        // The budget ends the arena between two records.
        assert_eq!(plan(&directory, &mut next, (CHUNK, CHUNK as u64)).records.len(), 0);
        assert_eq!(next, 1);
    }

    #[test]
    fn the_budget_obeys_the_limit_asked_for_and_says_so() {
        let options = CudaOptions { page_lock_limit: Some(1000), ..CudaOptions::default() };
        let (budget, why) = budget(5000, &options);
        assert_eq!(budget, 1000);
        assert!(why.unwrap().contains("1000 B"));
    }
}
