//! What a GPU is and how fast it is reached: the report behind `comoe doctor`. Present in every build.

use serde::Serialize;

#[cfg(any(feature = "cuda", test))]
use crate::stats::human_bytes;

#[cfg(feature = "cuda")]
pub use super::probe::{copy_bandwidth, gpu_report};
#[cfg(feature = "cuda")]
pub use super::probe_peers::peer_link;

/// Measures how two GPUs reach each other; this build cannot.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device), always.
#[cfg(not(feature = "cuda"))]
pub fn peer_link(first: usize, second: usize) -> crate::Result<PeerLink> {
    Err(super::not_built(format!("cuda:{first},{second}")))
}

/// Measures GPU `ordinal`; this build cannot.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device), always.
#[cfg(not(feature = "cuda"))]
pub fn gpu_report(ordinal: usize) -> crate::Result<GpuReport> {
    Err(super::not_built(format!("cuda:{ordinal}")))
}

/// Measures the bandwidth to a GPU; this build knows none.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device), always.
#[cfg(not(feature = "cuda"))]
pub fn copy_bandwidth(device: &candle_core::Device, _bytes: usize) -> crate::Result<f64> {
    Err(super::not_built(format!("{:?}", device.location())))
}

/// The PCIe link, as sysfs shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Link {
    /// Generation in force (during a copy: idle cards report less).
    pub generation: u32,
    /// Lanes in force.
    pub width: u32,
    /// Greatest generation of the card.
    pub max_generation: u32,
    /// Most lanes of the card.
    pub max_width: u32,
}

/// Host to device bandwidth at one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Transfer {
    /// Bytes of one copy.
    pub bytes: usize,
    /// From page-locked memory, GB/s.
    pub locked: f64,
    /// From pageable memory, GB/s.
    pub pageable: f64,
}

/// How two GPUs reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PeerLink {
    /// `N` of `cuda:N`.
    pub first: usize,
    /// The other one's.
    pub second: usize,
    /// Whether their kernels may use each other's memory.
    pub peer_access: bool,
    /// Copies from the first to the second, GB/s; `None` without peer access.
    pub peer: Option<f64>,
    /// The same through page-locked host memory, one half after the other, GB/s.
    pub host: f64,
    /// Copies from page-locked host memory to both at once, together, GB/s.
    pub both_from_host: f64,
}

/// A format's kernels against the CPU backend.
#[derive(Debug, Clone, Serialize)]
pub struct SelfTest {
    /// The format.
    pub format: String,
    /// Tokens of the step.
    pub tokens: usize,
    /// Norm of the difference over norm of the CPU's result.
    pub relative_error: f64,
    /// Whether that is within tolerance.
    pub passed: bool,
}

/// Everything known about one GPU.
#[derive(Debug, Clone, Serialize)]
pub struct GpuReport {
    /// `N` of `cuda:N`.
    pub ordinal: usize,
    /// As the driver names it.
    pub name: String,
    /// For example `9.0`.
    pub compute_capability: String,
    /// The driver's own version, where the system shows it.
    pub driver: Option<String>,
    /// The CUDA version that the driver supports at most, `13000` for 13.0.
    pub driver_cuda: i32,
    /// The CUDA version of this build.
    pub build_cuda: u32,
    /// Free GPU memory in bytes.
    pub memory_free: u64,
    /// GPU memory in all, in bytes.
    pub memory_total: u64,
    /// The PCIe link during a copy; `None` where the system does not show it.
    pub link: Option<Link>,
    /// Host to device bandwidth by size.
    pub transfers: Vec<Transfer>,
    /// A kernel reading page-locked host memory, GB/s.
    pub kernel_read: f64,
    /// Whether many copies go out in one driver call.
    pub batched_copies: bool,
    /// Bytes that were tried to page-lock.
    pub lock_tried: u64,
    /// Bytes of it that were granted.
    pub lock_granted: u64,
    /// Each format's kernels against the CPU.
    pub self_tests: Vec<SelfTest>,
    /// What is slow or small, and what to do.
    pub advice: Vec<String>,
}

impl GpuReport {
    /// Best bandwidth from page-locked memory, GB/s: what `--stats` is compared with.
    pub fn best_locked(&self) -> f64 {
        self.transfers.iter().map(|t| t.locked).fold(0.0, f64::max)
    }
}

/// What is slow or small, and what to do.
#[cfg(any(feature = "cuda", test))]
pub(super) fn advice(report: &GpuReport) -> Vec<String> {
    let mut advice = Vec::new();
    if let Some(link) = report.link {
        if link.width < link.max_width {
            advice.push(format!(
                "the PCIe link has {} of {} lanes: another slot may give experts {} times the bandwidth",
                link.width,
                link.max_width,
                link.max_width / link.width.max(1)
            ));
        }
        if link.generation < link.max_generation {
            advice.push(format!(
                "the PCIe link runs at generation {} of {} even during a copy: check the slot, a riser cable and the \
                 firmware's setting",
                link.generation, link.max_generation
            ));
        }
    }
    if report.lock_granted < report.lock_tried {
        advice.push(format!(
            "only {} of {} could be page-locked: raise `ulimit -l`, or give a container --ulimit memlock=-1; experts \
             that are not locked are copied more slowly",
            human_bytes(report.lock_granted),
            human_bytes(report.lock_tried)
        ));
    }
    let best = report.best_locked();
    let pageable = report.transfers.iter().map(|t| t.pageable).fold(0.0, f64::max);
    if best > 0.0 && pageable > 0.9 * best {
        advice.push(
            "page-locked memory is no faster than pageable here: is this a virtual machine?".to_owned(),
        );
    }
    if !report.batched_copies {
        advice.push("the driver is older than CUDA 12.8 and copies experts one by one: update it".to_owned());
    }
    for test in report.self_tests.iter().filter(|t| !t.passed) {
        advice.push(format!(
            "the kernels for {} differ from the CPU by {:.1e}: do not use this GPU, and report it",
            test.format, test.relative_error
        ));
    }
    advice
}

/// `16.0 GT/s PCIe` is generation 4.
#[cfg(any(feature = "cuda", test))]
pub(super) fn generation(speed: &str) -> Option<u32> {
    let rate: f64 = speed.split_whitespace().next()?.parse().ok()?;
    let rates = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0];
    rates.iter().position(|r| (r - rate).abs() < 0.1).map(|i| i as u32 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> GpuReport {
        GpuReport {
            ordinal: 0,
            name: "GPU".to_owned(),
            compute_capability: "9.0".to_owned(),
            driver: Some("580.65.06".to_owned()),
            driver_cuda: 13000,
            build_cuda: 13000,
            memory_free: 1,
            memory_total: 1,
            link: Some(Link { generation: 5, width: 16, max_generation: 5, max_width: 16 }),
            transfers: vec![Transfer { bytes: 1 << 20, locked: 50.0, pageable: 8.0 }],
            kernel_read: 51.0,
            batched_copies: true,
            lock_tried: 100,
            lock_granted: 100,
            self_tests: vec![SelfTest {
                format: "int4".to_owned(),
                tokens: 1,
                relative_error: 1e-7,
                passed: true,
            }],
            advice: Vec::new(),
        }
    }

    #[test]
    fn advice_names_what_is_slow_and_only_that() {
        assert_eq!(advice(&report()), Vec::<String>::new());
        let narrow = Some(Link { generation: 3, width: 8, max_generation: 5, max_width: 16 });
        let said = advice(&GpuReport { link: narrow, lock_granted: 50, ..report() });
        assert!(said[0].contains("8 of 16 lanes") && said[1].contains("generation 3 of 5"), "{said:?}");
        assert!(said[2].contains("50 B of 100 B"), "{said:?}");
        let test = SelfTest { format: "int8".to_owned(), tokens: 1, relative_error: 0.5, passed: false };
        assert!(advice(&GpuReport { self_tests: vec![test], ..report() })[0].contains("int8"));
    }

    #[test]
    fn generations_are_read_as_sysfs_writes_them() {
        assert_eq!(generation("16.0 GT/s PCIe\n"), Some(4));
        assert_eq!(generation("2.5 GT/s PCIe"), Some(1));
        assert_eq!(generation("32 GT/s"), Some(5));
        assert_eq!(generation("Unknown"), None);
    }
}
