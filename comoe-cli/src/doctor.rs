//! `comoe doctor`: what this machine has, how fast it is, and what to do about what is slow.

use std::fmt::Write;

use comoe_core::backend::cuda::measure::{GpuReport, PeerLink, gpu_report, peer_link};
use comoe_core::machine::HostReport;
use comoe_core::stats::human_bytes;
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::device::count_gpus;
use crate::error::{Error, Result};
use crate::output::{Answers, say, watched};

/// Reading memory more slowly than this with all threads, in GB/s, makes the CPU wait: less than one DDR4 channel and
/// a half.
const SLOW_MEMORY: f64 = 30.0;

/// The object that `--json` prints. Fields may be added, never renamed.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    host: HostReport,
    cuda: Cuda,
    gpus: Vec<Gpu>,
    /// Between GPUs, pair by pair.
    links: Vec<Between>,
    /// Of the host; each GPU has its own.
    advice: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Cuda {
    /// Whether this program was built for GPUs.
    built: bool,
    /// Why no GPU can be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Gpu {
    Measured(Box<GpuReport>),
    Failed { ordinal: usize, error: String },
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Between {
    Measured(PeerLink),
    Failed { first: usize, second: usize, error: String },
}

impl Between {
    fn line(&self) -> (String, String) {
        let (first, second, text) = match self {
            Self::Failed { first, second, error } => (first, second, error.clone()),
            Self::Measured(link) => {
                let peer = match link.peer {
                    Some(rate) => format!("peer access, {rate:.1} GB/s"),
                    None => "no peer access".to_owned(),
                };
                let text = format!(
                    "{peer}; {:.1} GB/s through page-locked memory; both are fed from it at {:.1} GB/s together",
                    link.host, link.both_from_host
                );
                (&link.first, &link.second, text)
            }
        };
        (format!("cuda:{first},{second}"), text)
    }
}

/// Measures the machine and prints what was found.
///
/// # Errors
/// When standard output cannot be written, or a GPU computes other numbers than the CPU.
pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let telling = |what: &str| {
        if watched() {
            say!("measuring {what} ...");
        }
    };
    telling("memory");
    let host = HostReport::measure();
    let (count, missing) = match count_gpus() {
        Ok(count) => (count, None),
        Err(reason) => (0, Some(reason)),
    };
    let measured = (0..count).map(|ordinal| {
        telling(&format!("cuda:{ordinal}"));
        match gpu_report(ordinal) {
            Ok(report) => Gpu::Measured(Box::new(report)),
            Err(e) => Gpu::Failed { ordinal, error: Error::from(e).line() },
        }
    });
    let gpus: Vec<Gpu> = measured.collect();
    let pairs = (0..count).flat_map(|first| (first + 1..count).map(move |second| (first, second)));
    let links = pairs.map(|(first, second)| {
        telling(&format!("cuda:{first} to cuda:{second}"));
        match peer_link(first, second) {
            Ok(link) => Between::Measured(link),
            Err(e) => Between::Failed { first, second, error: Error::from(e).line() },
        }
    });
    let links = links.collect();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        advice: advice(&host),
        host,
        cuda: Cuda { built: cfg!(feature = "cuda"), missing },
        gpus,
        links,
    };
    let mut out = Answers::new();
    out.piece(&match args.json {
        // Numbers that are not finite become null: nothing in it can fail to be written.
        true => serde_json::to_string(&report).unwrap_or_default() + "\n",
        false => report.table(),
    });
    out.end()?;
    match report.failed_tests() {
        (0, _) => Ok(()),
        (failed, tests) => Err(Error::SelfTest { failed, tests }),
    }
}

fn advice(host: &HostReport) -> Vec<String> {
    let mut advice = Vec::new();
    if host.read_all_threads < SLOW_MEMORY {
        advice.push(format!(
            "all threads together read memory at {:.0} GB/s: experts that the CPU computes, and copies to a GPU, wait for \
             it; fill every memory channel, or give a virtual machine more cores",
            host.read_all_threads
        ));
    }
    advice
}

impl Report {
    fn failed_tests(&self) -> (usize, usize) {
        let tests = self.gpus.iter().filter_map(|gpu| match gpu {
            Gpu::Measured(report) => Some(&report.self_tests),
            Gpu::Failed { .. } => None,
        });
        tests.flatten().fold((0, 0), |(failed, all), test| (failed + usize::from(!test.passed), all + 1))
    }

    fn table(&self) -> String {
        let mut t = Table(String::new());
        let known = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), human_bytes);
        let host = &self.host;
        t.line("comoe", self.version);
        t.line("RAM", &format!("{} of {} available", known(host.ram_available), known(host.ram_total)));
        let limit = host.lock_limit.map_or("unlimited, or unknown".to_owned(), human_bytes);
        t.line("page-lock", &format!("limit of this process (ulimit -l): {limit}"));
        t.line(
            "CPU",
            &format!(
                "{} threads; DRAM is read at {:.1} GB/s by one, {:.1} GB/s by all",
                host.threads, host.read_one_thread, host.read_all_threads
            ),
        );
        if let Some(missing) = &self.cuda.missing {
            t.line("GPU", &format!("none: {missing}"));
        }
        let mut advice: Vec<&str> = self.advice.iter().map(String::as_str).collect();
        for gpu in &self.gpus {
            match gpu {
                Gpu::Measured(report) => {
                    gpu_lines(&mut t, report);
                    advice.extend(report.advice.iter().map(String::as_str));
                }
                Gpu::Failed { ordinal, error } => t.line(&format!("cuda:{ordinal}"), error),
            }
        }
        for link in &self.links {
            let (name, text) = link.line();
            t.line(&name, &text);
        }
        if advice.is_empty() {
            t.line("advice", "nothing looks slow");
        }
        for (i, line) in advice.iter().enumerate() {
            t.line(if i == 0 { "advice" } else { "" }, &format!("- {line}"));
        }
        t.0
    }
}

struct Table(String);

impl Table {
    fn line(&mut self, name: &str, value: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{name:<10} {value}");
    }
}

fn gpu_lines(t: &mut Table, gpu: &GpuReport) {
    let version = |v: i64| format!("{}.{}", v / 1000, v % 1000 / 10);
    t.line(
        &format!("cuda:{}", gpu.ordinal),
        &format!("{}, compute capability {}", gpu.name, gpu.compute_capability),
    );
    t.line(
        "  driver",
        &format!(
            "{}, for CUDA up to {}; this program was built for {}",
            gpu.driver.as_deref().unwrap_or("version unknown"),
            version(gpu.driver_cuda.into()),
            version(gpu.build_cuda.into())
        ),
    );
    t.line(
        "  memory",
        &format!("{} of {} free", human_bytes(gpu.memory_free), human_bytes(gpu.memory_total)),
    );
    t.line(
        "  PCIe",
        &match gpu.link {
            Some(l) => format!(
                "generation {} x{} during a copy, at most generation {} x{}",
                l.generation, l.width, l.max_generation, l.max_width
            ),
            None => "not shown by this system".to_owned(),
        },
    );
    t.line("  copies", "host to GPU, GB/s:   size  page-locked  pageable");
    for copy in &gpu.transfers {
        let size = human_bytes(copy.bytes as u64);
        t.line("", &format!("{size:>25}  {:>11.1}  {:>8.1}", copy.locked, copy.pageable));
    }
    t.line(
        "",
        &format!(
            "{}; a kernel reads page-locked memory at {:.1} GB/s",
            if gpu.batched_copies {
                "many copies go in one driver call"
            } else {
                "copies go one by one (old driver)"
            },
            gpu.kernel_read
        ),
    );
    t.line(
        "  page-lock",
        &format!("{} of {} tried were granted", human_bytes(gpu.lock_granted), human_bytes(gpu.lock_tried)),
    );
    let tests = gpu.self_tests.iter().map(|test| {
        format!(
            "{} x {}: {} ({:.0e})",
            test.format,
            test.tokens,
            if test.passed { "ok" } else { "WRONG" },
            test.relative_error
        )
    });
    t.line(
        "  kernels",
        &format!("against the CPU, format x tokens: {}", tests.collect::<Vec<_>>().join(", ")),
    );
}

#[cfg(test)]
mod tests {
    use comoe_core::backend::cuda::measure::{Link, SelfTest, Transfer};

    use super::*;

    fn host() -> HostReport {
        HostReport {
            ram_available: Some(48 << 30),
            ram_total: Some(64 << 30),
            lock_limit: Some(8 << 20),
            threads: 16,
            read_one_thread: 10.0,
            read_all_threads: 102.4,
        }
    }

    fn gpu() -> GpuReport {
        GpuReport {
            ordinal: 1,
            name: "NVIDIA H200".to_owned(),
            compute_capability: "9.0".to_owned(),
            driver: Some("580.65.06".to_owned()),
            driver_cuda: 13000,
            build_cuda: 12080,
            memory_free: 139 << 30,
            memory_total: 140 << 30,
            link: Some(Link { generation: 4, width: 8, max_generation: 5, max_width: 16 }),
            transfers: vec![Transfer { bytes: 1 << 20, locked: 45.4, pageable: 8.5 }],
            kernel_read: 51.4,
            batched_copies: true,
            lock_tried: 1 << 30,
            lock_granted: 1 << 30,
            self_tests: vec![SelfTest {
                format: "int4-g64".to_owned(),
                tokens: 5,
                relative_error: 2e-7,
                passed: true,
            }],
            advice: vec!["the link is narrow".to_owned()],
        }
    }

    fn report(gpus: Vec<Gpu>, missing: Option<&str>) -> Report {
        Report {
            version: "1.2.3",
            advice: advice(&host()),
            host: host(),
            cuda: Cuda { built: true, missing: missing.map(str::to_owned) },
            gpus,
            links: Vec::new(),
        }
    }

    #[test]
    fn a_gpu_is_told_with_all_that_was_measured() {
        let table = report(vec![Gpu::Measured(Box::new(gpu()))], None).table();
        for part in [
            "48.0 GiB of 64.0 GiB available",
            "(ulimit -l): 8.0 MiB",
            "16 threads; DRAM is read at 10.0 GB/s by one, 102.4 GB/s by all",
            "cuda:1     NVIDIA H200, compute capability 9.0",
            "580.65.06, for CUDA up to 13.0; this program was built for 12.8",
            "139.0 GiB of 140.0 GiB free",
            "generation 4 x8 during a copy, at most generation 5 x16",
            "1.0 MiB         45.4       8.5",
            "at 51.4 GB/s",
            "1.0 GiB of 1.0 GiB tried were granted",
            "int4-g64 x 5: ok (2e-7)",
            "advice     - the link is narrow",
        ] {
            assert!(table.contains(part), "{part:?} is not in\n{table}");
        }
    }

    #[test]
    fn links_between_gpus_are_told_pair_by_pair() {
        let link = PeerLink {
            first: 0,
            second: 1,
            peer_access: true,
            peer: Some(372.0),
            host: 27.5,
            both_from_host: 110.0,
        };
        let links = vec![
            Between::Measured(link),
            Between::Measured(PeerLink { second: 2, peer_access: false, peer: None, ..link }),
            Between::Failed { first: 1, second: 2, error: "out of memory".to_owned() },
        ];
        let table = Report { links, ..report(Vec::new(), None) }.table();
        for part in [
            "cuda:0,1   peer access, 372.0 GB/s; 27.5 GB/s through page-locked memory",
            "cuda:0,2   no peer access; 27.5",
            "fed from it at 110.0 GB/s together",
            "cuda:1,2   out of memory",
        ] {
            assert!(table.contains(part), "{part:?} is not in\n{table}");
        }
    }

    #[test]
    fn what_is_missing_or_broken_is_said() {
        let table = report(Vec::new(), Some("no driver")).table();
        assert!(
            table.contains("GPU        none: no driver") && table.contains("nothing looks slow"),
            "{table}"
        );
        let failed = Gpu::Failed { ordinal: 0, error: "out of memory".to_owned() };
        assert!(report(vec![failed], None).table().contains("cuda:0     out of memory"));
        let slow = HostReport { read_all_threads: 5.0, ..host() };
        assert!(advice(&slow)[0].contains("5 GB/s"));
    }

    #[test]
    fn a_kernel_that_is_wrong_is_a_failure() {
        assert_eq!(report(vec![Gpu::Measured(Box::new(gpu()))], None).failed_tests(), (0, 1));
        let mut wrong = gpu();
        wrong.self_tests[0].passed = false;
        assert_eq!(report(vec![Gpu::Measured(Box::new(wrong))], None).failed_tests(), (1, 1));
    }
}
