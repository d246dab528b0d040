//! What this machine has: memory that is free, how much of it may be locked, threads, and how fast it is read.

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::Serialize;

/// The host's side of a report.
#[derive(Debug, Clone, Serialize)]
pub struct HostReport {
    /// Memory that could be taken now without swapping, in bytes; what a container allows when that is less.
    pub ram_available: Option<u64>,
    /// Memory in all, in bytes.
    pub ram_total: Option<u64>,
    /// Most memory that this process may lock (`ulimit -l`), in bytes; `None` when unlimited or unknown.
    pub lock_limit: Option<u64>,
    /// Threads that can run at once.
    pub threads: usize,
    /// Reading memory with one thread, GB/s.
    pub read_one_thread: f64,
    /// Reading memory with every thread, GB/s.
    pub read_all_threads: f64,
}

impl HostReport {
    /// Measures this machine; takes about a second and, for a moment, 256 MiB a thread (at most a quarter of what is
    /// free).
    pub fn measure() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let ram_available = ram_available();
        let room = ram_available.map_or(1 << 28, |free| free / 4 / threads as u64);
        let bytes = room.clamp(1 << 20, 1 << 28) as usize;
        Self {
            ram_available,
            ram_total: meminfo("MemTotal:"),
            lock_limit: lock_limit(),
            threads,
            read_one_thread: read_bandwidth(1, bytes),
            read_all_threads: read_bandwidth(threads, bytes),
        }
    }
}

fn meminfo(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Memory that could be taken now without swapping, in bytes: what the kernel counts as available, or what is left of
/// the control group's limit when that is less. `None` where neither can be read.
pub fn ram_available() -> Option<u64> {
    match (meminfo("MemAvailable:"), group_available()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Whether memory is so short that a file that was read whole and is held elsewhere should leave the page cache: less than an
/// eighth of it is in no use at all. Where there is more, the next start finds the file in memory, and the system takes
/// the pages when somebody needs them.
pub fn page_cache_is_in_the_way() -> bool {
    let system = meminfo("MemTotal:").zip(meminfo("MemFree:"));
    is_short(system, group().map(|group| (group.limit, group.limit.saturating_sub(group.used))))
}

/// Of memory in all and unused, of the system and of the control group, where they are known.
fn is_short(system: Option<(u64, u64)>, group: Option<(u64, u64)>) -> bool {
    let short = |of: Option<(u64, u64)>| of.is_some_and(|(all, unused)| unused < all / 8);
    system.is_none() || short(system) || short(group)
}

/// A container's memory, in bytes.
struct Group {
    limit: u64,
    /// The page cache of its files included.
    used: u64,
    /// Where it is told what is used for what.
    stat: &'static str,
}

/// The control group's, of either version.
fn group() -> Option<Group> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    Some(match number("/sys/fs/cgroup/memory.max") {
        Some(limit) => {
            let used = number("/sys/fs/cgroup/memory.current")?;
            Group { limit, used, stat: "/sys/fs/cgroup/memory.stat" }
        }
        None => Group {
            limit: number("/sys/fs/cgroup/memory/memory.limit_in_bytes")?,
            used: number("/sys/fs/cgroup/memory/memory.usage_in_bytes")?,
            stat: "/sys/fs/cgroup/memory/memory.stat",
        },
    })
}

/// What is left of a container's memory limit. Its page cache counts as left: it goes when memory is needed.
fn group_available() -> Option<u64> {
    let Group { limit, used, stat } = group()?;
    let stat = fs::read_to_string(stat).unwrap_or_default();
    let cache = |name: &str| {
        let value =
            stat.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok());
        value.unwrap_or(0)
    };
    let reclaimable = cache("inactive_file") + cache("active_file");
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

/// The soft limit of locked memory in bytes; `None` when it is unlimited or cannot be read.
pub fn lock_limit() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/limits").ok()?;
    let rest = text.lines().find_map(|l| l.strip_prefix("Max locked memory"))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// GB/s of `threads` threads that each read `bytes` of their own, best of three passes.
fn read_bandwidth(threads: usize, bytes: usize) -> f64 {
    let best = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads)
            .map(|seed| {
                scope.spawn(move || {
                    // Written by the thread that reads it, so that the memory is near.
                    let words: Vec<u64> = (0..bytes as u64 / 8).map(|i| i ^ seed as u64).collect();
                    let mut passes = [Duration::MAX; 3];
                    for pass in &mut passes {
                        let start = Instant::now();
                        black_box(sum(black_box(&words)));
                        *pass = start.elapsed();
                    }
                    passes.into_iter().min().unwrap_or(Duration::MAX)
                })
            })
            .collect();
        readers.into_iter().filter_map(|r| r.join().ok()).max()
    });
    best.map_or(0.0, |slowest| gb_per_s((threads * bytes) as u64, slowest))
}

/// Eight independent sums, so that memory and not the adder sets the pace.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 8];
    for eight in words.chunks_exact(8) {
        sums.iter_mut().zip(eight).for_each(|(s, w)| *s = s.wrapping_add(*w));
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Bytes and time as GB/s (10^9 bytes); 0 when no time has passed.
pub fn gb_per_s(bytes: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { bytes as f64 / time.as_secs_f64() / 1e9 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_cache_is_in_the_way_where_little_is_unused() {
        let (plenty, little) = (Some((64 << 30, 8 << 30)), Some((64 << 30, (8 << 30) - 1)));
        assert!(!is_short(plenty, None) && !is_short(plenty, plenty));
        assert!(is_short(little, None) && is_short(plenty, little) && is_short(little, plenty));
        // Where nothing is known, as before there was a choice.
        assert!(is_short(None, None) && is_short(None, plenty));
    }

    #[test]
    fn this_machine_has_memory_and_threads() {
        let report = HostReport::measure();
        assert!(report.threads >= 1);
        assert!(report.read_one_thread > 0.0 && report.read_all_threads > 0.0, "{report:?}");
        if let (Some(free), Some(total)) = (report.ram_available, report.ram_total) {
            assert!(0 < free && free <= total, "{report:?}");
        }
    }

    #[test]
    fn bandwidth_is_in_units_of_a_billion_bytes() {
        assert_eq!(gb_per_s(3_000_000_000, Duration::from_secs(2)), 1.5);
        assert_eq!(gb_per_s(1, Duration::ZERO), 0.0);
    }
}
