//! The devices of one cache.

use candle_core::Device;

/// One device, or several that share a cache: made from `&device`, a slice or a vector of devices. The first is the
/// caller's own: activations come from it and results go to it. The same device may be named twice, and then has two pools.
#[derive(Debug, Clone)]
pub struct Devices(Vec<Device>);

impl Devices {
    /// The first device.
    ///
    /// # Errors
    /// [`Error::BadArgument`](crate::Error::BadArgument) when there is none.
    pub(super) fn first(&self) -> crate::Result<&Device> {
        let reason = "a cache needs at least one".to_owned();
        self.0.first().ok_or(crate::Error::BadArgument { what: "devices", reason })
    }

    /// All of them, the caller's own first.
    pub fn as_slice(&self) -> &[Device] {
        &self.0
    }
}

impl From<&Device> for Devices {
    fn from(device: &Device) -> Self {
        Self(vec![device.clone()])
    }
}

impl From<&[Device]> for Devices {
    fn from(devices: &[Device]) -> Self {
        Self(devices.to_vec())
    }
}

impl<const N: usize> From<&[Device; N]> for Devices {
    fn from(devices: &[Device; N]) -> Self {
        Self(devices.to_vec())
    }
}

impl From<&Vec<Device>> for Devices {
    fn from(devices: &Vec<Device>) -> Self {
        Self(devices.clone())
    }
}

impl From<Vec<Device>> for Devices {
    fn from(devices: Vec<Device>) -> Self {
        Self(devices)
    }
}
