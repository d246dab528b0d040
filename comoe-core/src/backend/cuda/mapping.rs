//! GPU memory behind addresses that stay: one reserved range, to which chunks of memory are mapped and from which they are
//! given back to the driver.

use std::ops::Range;

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};

use super::context::Gpu;
use crate::backend::Chunks;

/// So many chunks at least make up a slab that is large enough; more take longer to map.
const CHUNKS: usize = 256;
/// A larger chunk would only be given back later.
const MOST: usize = 32 << 20;

type Answer<T> = Result<T, DriverError>;

/// A reserved range with a chunk of memory, or none, in each of its places.
pub(super) struct Mapping {
    gpu: Gpu,
    address: sys::CUdeviceptr,
    chunks: Chunks,
    handles: Vec<Option<sys::CUmemGenericAllocationHandle>>,
}

/// This GPU, where the driver wants to know where memory is.
fn location(gpu: &Gpu) -> sys::CUmemLocation {
    // SAFETY: numbers and an enum that has a 0.
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    // SAFETY: in every version of CUDA the struct is the type and the device's number, 4 bytes each; newer ones have the
    // latter in a union.
    unsafe { (&raw mut location).cast::<i32>().add(1).write(gpu.ctx.cu_device()) };
    location
}

fn properties(gpu: &Gpu) -> sys::CUmemAllocationProp {
    // SAFETY: numbers, enums that have a 0, and a pointer that may be null.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(gpu);
    properties
}

impl Mapping {
    /// Reserves addresses for `slots` slots and backs all of them. `None` where the driver cannot do that.
    ///
    /// # Errors
    /// The driver's, above all that there is not enough memory.
    pub(super) fn new(gpu: &Gpu, slots: usize, slot_bytes: usize) -> Answer<Option<Self>> {
        let attribute = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
        if slots == 0 || gpu.ctx.attribute(attribute)? == 0 {
            return Ok(None);
        }
        gpu.ctx.bind_to_thread()?;
        let mut granularity = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both point to what the call expects.
        unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &properties(gpu), minimum) }
            .result()?;
        let granularity = granularity.max(1);
        let chunk = (slots * slot_bytes / CHUNKS).clamp(1, MOST).next_multiple_of(granularity);
        let chunks = Chunks::new(slots, slot_bytes, chunk, granularity);
        let mut address = 0;
        // SAFETY: `address` takes the answer; no address is asked for.
        unsafe { sys::cuMemAddressReserve(&mut address, chunks.slab_bytes(), 0, 0, 0) }.result()?;
        let mut this = Self { gpu: gpu.clone(), address, chunks, handles: vec![None; chunks.count()] };
        this.back(0..chunks.count())?;
        Ok(Some(this))
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn chunks(&self) -> Chunks {
        self.chunks
    }

    /// Bytes that are backed.
    pub(super) fn backed(&self) -> usize {
        let backed = self.handles.iter().enumerate().filter(|(_, handle)| handle.is_some());
        backed.map(|(i, _)| self.chunks.bytes(&(i..i + 1)).len()).sum()
    }

    /// Backs all chunks but `without`. The GPU must be idle.
    ///
    /// # Errors
    /// The driver's; where memory is missing, what is backed is as it was.
    pub(super) fn back_all_but(&mut self, without: Range<usize>) -> Answer<()> {
        self.gpu.ctx.bind_to_thread()?;
        // Given back first, so that it can be had again.
        self.unback(without.clone())?;
        let missing: Vec<usize> =
            (0..self.handles.len()).filter(|i| !without.contains(i) && self.handles[*i].is_none()).collect();
        for (n, &i) in missing.iter().enumerate() {
            if let Err(error) = self.back(i..i + 1) {
                missing[..=n].iter().try_for_each(|&i| self.unback(i..i + 1))?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Backs chunks that are not, and makes them this GPU's to read and write.
    fn back(&mut self, range: Range<usize>) -> Answer<()> {
        let properties = properties(&self.gpu);
        for i in range.clone() {
            let bytes = self.chunks.bytes(&(i..i + 1));
            let mut handle = 0;
            // SAFETY: the properties are valid, the size is a multiple of the granularity.
            unsafe { sys::cuMemCreate(&mut handle, bytes.len(), &properties, 0) }.result()?;
            // SAFETY: inside the reserved range, where nothing is mapped; the whole of the memory just made.
            let mapped =
                unsafe { sys::cuMemMap(self.address + bytes.start as u64, bytes.len(), 0, handle, 0) }
                    .result();
            if let Err(error) = mapped {
                // SAFETY: made above, mapped nowhere.
                unsafe { sys::cuMemRelease(handle) }.result()?;
                return Err(error);
            }
            self.handles[i] = Some(handle);
        }
        // SAFETY: numbers and enums that have a 0.
        let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
        access.location = location(&self.gpu);
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let bytes = self.chunks.bytes(&range);
        // SAFETY: a range that is mapped from end to end, and one description.
        unsafe { sys::cuMemSetAccess(self.address + bytes.start as u64, bytes.len(), &access, 1) }.result()
    }

    /// Gives the memory of those chunks in `range` that have any back to the driver.
    fn unback(&mut self, range: Range<usize>) -> Answer<()> {
        for i in range {
            let Some(handle) = self.handles[i].take() else { continue };
            let bytes = self.chunks.bytes(&(i..i + 1));
            // SAFETY: mapped as one piece, and nothing that runs uses it; released once.
            unsafe {
                sys::cuMemUnmap(self.address + bytes.start as u64, bytes.len()).result()?;
                sys::cuMemRelease(handle).result()?;
            }
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.gpu.ctx.record_err(self.gpu.ctx.bind_to_thread());
        self.gpu.ctx.record_err(self.gpu.ctx.synchronize());
        let unbacked = self.unback(0..self.handles.len());
        self.gpu.ctx.record_err(unbacked);
        // SAFETY: reserved in `new`, with nothing mapped any more.
        let freed = unsafe { sys::cuMemAddressFree(self.address, self.chunks.slab_bytes()) };
        self.gpu.ctx.record_err(freed.result());
    }
}
