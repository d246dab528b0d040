//! Where a model runs: the only place that opens devices.

use std::str::FromStr;

use candle_core::Device;
use comoe_core::{cuda_device, cuda_device_count};

use crate::error::Result;

/// The device asked for, or several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The first GPU, or the CPU where there is none.
    Auto,
    Cpu,
    /// `cuda:N`
    Cuda(usize),
    /// `cuda:N,M,..`: the first computes, all hold experts.
    Several(Vec<usize>),
    /// So many pools on the CPU, as if they were on devices of their own: `cpu,cpu`.
    Pools(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bad =
            || format!("{text:?} is no device: use cpu, cuda, cuda:N, cuda:N,M for several GPUs, or auto");
        // Plain digits: `parse` would take a sign too.
        let number = |digits: &str| match !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
            true => digits.parse::<usize>().map_err(|_| bad()),
            false => Err(bad()),
        };
        match text {
            "auto" => return Ok(Self::Auto),
            "cpu" => return Ok(Self::Cpu),
            "cuda" => return Ok(Self::Cuda(0)),
            _ if text.split(',').all(|part| part == "cpu") => {
                return Ok(Self::Pools(text.split(',').count()));
            }
            _ => {}
        }
        let list = text.strip_prefix("cuda:").ok_or_else(bad)?;
        let numbers = list.split(',').map(|part| number(part.strip_prefix("cuda:").unwrap_or(part)));
        match numbers.collect::<std::result::Result<Vec<_>, _>>()?.as_slice() {
            &[one] => Ok(Self::Cuda(one)),
            several => Ok(Self::Several(several.to_vec())),
        }
    }
}

/// A device that is open, and those that hold experts besides.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) device: Device,
    pub(crate) more: Vec<Device>,
    /// Where it is not what would have been best, and why.
    pub(crate) notes: Vec<String>,
}

/// Opens a device, or several; of these, what cannot be used is left out.
///
/// # Errors
/// When a GPU was asked for by name and cannot be used, of several the first.
pub(crate) fn open(choice: &DeviceChoice) -> Result<Opened> {
    let (mut more, mut notes) = (Vec::new(), Vec::new());
    let device = match choice {
        DeviceChoice::Cpu => Device::Cpu,
        DeviceChoice::Cuda(ordinal) => cuda_device(*ordinal)?,
        DeviceChoice::Auto => cuda_device(0).unwrap_or_else(|e| {
            notes.push(format!("no GPU is used: {}", reason_of(e)));
            Device::Cpu
        }),
        DeviceChoice::Pools(count) => {
            more = vec![Device::Cpu; count - 1];
            Device::Cpu
        }
        DeviceChoice::Several(ordinals) => {
            // A GPU that is named again is the same device, with another pool.
            let mut open: Vec<(usize, Device)> = Vec::new();
            for &ordinal in ordinals {
                let known = open.iter().find(|(o, _)| *o == ordinal).map(|(_, device)| Ok(device.clone()));
                match known.unwrap_or_else(|| cuda_device(ordinal)) {
                    Ok(device) => open.push((ordinal, device)),
                    Err(e) if open.is_empty() => return Err(e.into()),
                    Err(e) => notes.push(format!("cuda:{ordinal} is left out: {}", reason_of(e))),
                }
            }
            let mut devices = open.into_iter().map(|(_, device)| device);
            let first = devices.next().unwrap_or(Device::Cpu);
            more = devices.collect();
            first
        }
    };
    Ok(Opened { device, more, notes })
}

fn reason_of(e: comoe_core::Error) -> String {
    match e {
        comoe_core::Error::Device { reason, .. } => reason,
        other => other.to_string(),
    }
}

/// How many GPUs there are, or why none can be used.
pub(crate) fn count_gpus() -> std::result::Result<usize, String> {
    cuda_device_count().map_err(reason_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_candle_does() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(0)),
            ("cuda:0", DeviceChoice::Cuda(0)),
            ("cuda:12", DeviceChoice::Cuda(12)),
            ("cuda:0,1", DeviceChoice::Several(vec![0, 1])),
            ("cuda:2,cuda:0,0", DeviceChoice::Several(vec![2, 0, 0])),
            ("cpu,cpu", DeviceChoice::Pools(2)),
        ] {
            assert_eq!(text.parse(), Ok(choice));
        }
        for text in [
            "gpu",
            "",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:x",
            "CUDA",
            "cuda:99999999999999999999",
            "cuda:0,",
            "cuda:,1",
            "cuda:0,cpu",
            "cpu,",
            "cpu,cuda:0",
            "cuda,1",
            "auto,cpu",
        ] {
            let e = text.parse::<DeviceChoice>().unwrap_err();
            assert!(e.contains("cuda:N"), "{e}");
        }
    }

    #[test]
    fn the_cpu_needs_no_driver_and_auto_says_why_it_is_used() {
        let cpu = open(&DeviceChoice::Cpu).unwrap();
        assert!(cpu.device.is_cpu() && cpu.notes.is_empty() && cpu.more.is_empty());
        let auto = open(&DeviceChoice::Auto).unwrap();
        assert_eq!(auto.device.is_cpu(), !auto.notes.is_empty());
        assert_eq!(open(&DeviceChoice::Pools(3)).unwrap().more.len(), 2);
    }
}
