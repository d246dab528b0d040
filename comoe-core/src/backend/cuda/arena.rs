//! The arena: a copy of every record in page-locked memory, as far as memory and the driver allow.
//!
//! Records that find no place stay with the source and pass through a bounce buffer when they are needed. So there is
//! never a pageable second copy of a record.

use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::CudaOptions;
use super::context::Gpu;
use super::pinned::LockedMap;
use super::sender::Piece;
use crate::error::{Error, Result};
use crate::expert::RECORD_ALIGN;
use crate::machine;
use crate::stats::human_bytes;
use crate::store::{RecordIndex, RecordSource};

/// Most bytes registered at once. No record straddles two registrations: one copy must lie inside one.
const CHUNK: usize = 1 << 30;
/// Progress is told once per so many bytes.
const PROGRESS: u64 = 64 << 20;
/// What stays free for everybody else: at least this, or a sixteenth of all memory.
const LEAVE_FREE: u64 = 2 << 30;

/// Where a record lies in page-locked memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// On the host; valid as long as the arena.
    pub(super) host: usize,
    /// The same bytes as kernels see them.
    pub(super) device: u64,
}

impl Place {
    /// The first `bytes` of `record`, which lies here, on their way to `to`.
    pub(super) fn piece(self, record: RecordIndex, to: u64, bytes: usize) -> Piece {
        let device_offset = self.device.wrapping_sub(self.host as u64);
        Piece { record, to, from: self.host as u64, device_offset, bytes }
    }
}

/// Page-locked records.
pub(super) struct Arena {
    places: Vec<Option<Place>>,
    // Keeps what `places` points to.
    _chunks: Vec<LockedMap>,
    locked: u64,
    total: u64,
    why_partial: Option<String>,
}

/// Records of one chunk, with their offsets in it.
struct Plan {
    records: Vec<(RecordIndex, usize, usize)>,
    bytes: usize,
}

impl Arena {
    /// Reads the records of `source` into page-locked memory.
    ///
    /// # Errors
    /// What the source says when a record cannot be read. Memory that cannot be had or locked is no error: the arena
    /// is then partial.
    pub(super) fn load(gpu: &Gpu, source: &dyn RecordSource, options: &CudaOptions) -> Result<Self> {
        let directory = source.directory();
        let total = directory.total_bytes();
        let mut this = Self {
            places: vec![None; directory.len()],
            _chunks: Vec::new(),
            locked: 0,
            total,
            why_partial: None,
        };
        let padded = directory
            .layers()
            .iter()
            .map(|l| (l.experts * l.record_bytes.next_multiple_of(RECORD_ALIGN)) as u64);
        let (budget, why) = budget(padded.sum(), options);
        this.why_partial = why;
        let mut left = budget;
        let mut next = 0;
        while next < directory.len() {
            let plan = plan(source, &mut next, left);
            if plan.records.is_empty() {
                break;
            }
            left -= plan.bytes as u64;
            if !this.load_chunk(gpu, source, &plan, options)? {
                let limit = machine::lock_limit().map_or("unlimited".to_owned(), human_bytes);
                this.why_partial = Some(format!(
                    "the driver refused to page-lock more (`ulimit -l` is {limit}; raise it, or give a container \
                     --ulimit memlock=-1)"
                ));
                break;
            }
        }
        if this.is_whole() {
            source.release();
        }
        if let Some(progress) = &options.progress {
            progress(this.locked, total);
        }
        Ok(this)
    }

    /// Whether the whole chunk could be locked.
    fn load_chunk(
        &mut self,
        gpu: &Gpu,
        source: &dyn RecordSource,
        plan: &Plan,
        options: &CudaOptions,
    ) -> Result<bool> {
        let mut map = LockedMap::new(gpu, plan.bytes)?;
        // Filled before it is locked: many threads fault the pages in, where locking would do it with one.
        let mut rest = map.bytes_mut();
        let mut begun = 0;
        let mut parts = Vec::with_capacity(plan.records.len());
        for &(record, at, len) in &plan.records {
            let (part, behind) = std::mem::take(&mut rest)[at - begun..].split_at_mut(len);
            parts.push((record, part));
            rest = behind;
            begun = at + len;
        }
        let done = AtomicU64::new(self.locked);
        parts.into_par_iter().try_for_each(|(record, part)| {
            source.fetch(record, part)?;
            let before = done.fetch_add(part.len() as u64, Ordering::Relaxed);
            let now = before + part.len() as u64;
            if let Some(progress) = &options.progress
                && before / PROGRESS != now / PROGRESS
            {
                progress(now, self.total);
            }
            Ok::<_, Error>(())
        })?;

        let most = options.page_lock_fails_at.map_or(usize::MAX, |n| n.saturating_sub(self.locked) as usize);
        let locked = map.lock(most)?;
        if locked > 0 {
            let (host, device) = (map.host_address() as usize, map.device_address()?);
            for &(record, at, len) in plan.records.iter().take_while(|(_, at, len)| at + len <= locked) {
                self.places[record.0 as usize] = Some(Place { host: host + at, device: device + at as u64 });
                self.locked += len as u64;
            }
            self._chunks.push(map);
        }
        Ok(locked == plan.bytes)
    }

    pub(super) fn place(&self, record: RecordIndex) -> Option<Place> {
        self.places[record.0 as usize]
    }

    /// Bytes of records in page-locked memory.
    pub(super) fn locked(&self) -> u64 {
        self.locked
    }

    pub(super) fn is_whole(&self) -> bool {
        self.places.iter().all(Option::is_some)
    }

    /// What is in force, for people to read.
    pub(super) fn note(&self) -> String {
        let all = human_bytes(self.total);
        if self.is_whole() {
            return format!("all experts ({all}) are in page-locked memory");
        }
        let why = self.why_partial.as_deref().unwrap_or("memory ran out");
        format!(
            "{} of {all} of the experts are in page-locked memory: {why}; the others pass through a page-locked \
             buffer, which is slower",
            human_bytes(self.locked)
        )
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

/// The next chunk from record `next` on, of at most `left` bytes; empty when not even one record fits.
fn plan(source: &dyn RecordSource, next: &mut usize, left: u64) -> Plan {
    let directory = source.directory();
    let mut plan = Plan { records: Vec::new(), bytes: 0 };
    while *next < directory.len() {
        let record = RecordIndex(*next as u32);
        let len = directory.record_bytes(record);
        let end = plan.bytes + len.next_multiple_of(RECORD_ALIGN);
        if end as u64 > left || (end > CHUNK && !plan.records.is_empty()) {
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
    use crate::store::Directory;

    struct Zeroes(Directory);

    impl RecordSource for Zeroes {
        fn directory(&self) -> &Directory {
            &self.0
        }

        fn read(&self, _: RecordIndex, out: &mut [u8]) -> Result<()> {
            out.fill(0);
            Ok(())
        }
    }

    #[test]
    fn chunks_hold_whole_records_within_their_size_and_the_budget() {
        let record = 300 << 20;
        let source = Zeroes(Directory::new([(0, 5, record), (1, 3, 100)]).unwrap());
        let mut next = 0;
        let mut sizes = Vec::new();
        let mut left = u64::MAX;
        while next < 8 {
            let plan = plan(&source, &mut next, left);
            left -= plan.bytes as u64;
            sizes.push((plan.records.len(), plan.bytes));
        }
        assert_eq!(sizes, [(3, 3 * record), (5, 2 * record + 3 * 512)]);

        // A record larger than a chunk has one of its own.
        let source = Zeroes(Directory::new([(0, 2, 2 * CHUNK)]).unwrap());
        let mut next = 0;
        assert_eq!(plan(&source, &mut next, u64::MAX).records.len(), 1);
        // The budget ends the arena between two records.
        assert_eq!(plan(&source, &mut next, CHUNK as u64).records.len(), 0);
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
