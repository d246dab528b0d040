//! Where a model runs: the only place that opens devices.

use std::str::FromStr;

use candle_core::Device;
use comoe_core::{cuda_device, cuda_device_count};

use crate::error::Result;

/// The device asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The first GPU, or the CPU where there is none.
    Auto,
    Cpu,
    /// `cuda:N`
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bad = || format!("{text:?} is no device: use cpu, cuda, cuda:N or auto");
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let number = text.strip_prefix("cuda:").ok_or_else(bad)?;
                // Plain digits: `parse` would take a sign too.
                match number.bytes().all(|b| b.is_ascii_digit()) {
                    true => number.parse().map(Self::Cuda).map_err(|_| bad()),
                    false => Err(bad()),
                }
            }
        }
    }
}

/// A device that is open.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) device: Device,
    /// Why it is not what would have been best.
    pub(crate) note: Option<String>,
}

/// Opens a device.
///
/// # Errors
/// When a GPU was asked for by name and cannot be used.
pub(crate) fn open(choice: DeviceChoice) -> Result<Opened> {
    let device = match choice {
        DeviceChoice::Cpu => Device::Cpu,
        DeviceChoice::Cuda(ordinal) => cuda_device(ordinal)?,
        DeviceChoice::Auto => match cuda_device(0) {
            Ok(device) => device,
            Err(e) => {
                let note = match e {
                    comoe_core::Error::Device { reason, .. } => reason,
                    other => other.to_string(),
                };
                return Ok(Opened { device: Device::Cpu, note: Some(format!("no GPU is used: {note}")) });
            }
        },
    };
    Ok(Opened { device, note: None })
}

/// How many GPUs there are, or why none can be used.
pub(crate) fn count_gpus() -> std::result::Result<usize, String> {
    cuda_device_count().map_err(|e| match e {
        comoe_core::Error::Device { reason, .. } => reason,
        other => other.to_string(),
    })
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
        ] {
            assert_eq!(text.parse(), Ok(choice));
        }
        for text in ["gpu", "", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "CUDA", "cuda:99999999999999999999"]
        {
            let e = text.parse::<DeviceChoice>().unwrap_err();
            assert!(e.contains("cuda:N"), "{e}");
        }
    }

    #[test]
    fn the_cpu_needs_no_driver_and_auto_says_why_it_is_used() {
        let cpu = open(DeviceChoice::Cpu).unwrap();
        assert!(cpu.device.is_cpu() && cpu.note.is_none());
        let auto = open(DeviceChoice::Auto).unwrap();
        assert_eq!(auto.device.is_cpu(), auto.note.is_some());
    }
}
