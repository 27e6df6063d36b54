//! Checking what guards hold against the file, by the `checksum` kernel.
//!
//! The kernel reads the very addresses that a guard gives, on its stream; the sums come back and are
//! compared with those of the file's bytes. Where the device runs no kernels, the bytes themselves come
//! back and are summed here. Runs, stress tests and a doubting user share it. Holds no
//! lock but for its list of sums that were computed before.

#![expect(unsafe_code, reason = "launches the checksum kernel on guarded addresses")]

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::card::{Pager, allocate_on};
use super::error::PagerError;
use super::guard::TensorView;
use super::model::PagedModel;
use super::patches::PatchSet;
use super::streams::PagerStream;
use crate::device::{
    self, DeviceError, DeviceKind, KernelId, PatchPart, PoolAllocation, SharedDevice, Stream, StreamPriority,
    checksum, checksum_launch,
};
use crate::transfer::{cast_bytes, float_type};
use crate::units::DeviceRange;
use crate::weights::{PageLayout, TensorId, TensorIndex};

/// A tensor whose bytes on the card were not those of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// The tensor.
    pub tensor: String,
    /// The first row that was checked.
    pub first_row: u64,
    /// The checksum of the bytes on the card.
    pub found: u64,
    /// The checksum of the file's bytes.
    pub expected: u64,
}

/// What sums the bytes on the card.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VerifiedBy {
    /// The checksum kernel, on the card.
    Kernel,
    /// The host, which reads the bytes back.
    Host,
}

impl VerifiedBy {
    /// The word for reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Host => "host",
        }
    }
}

/// Knows the checksums of a model's file, each computed once.
#[derive(Debug)]
pub struct Verifier {
    device: SharedDevice,
    index: Arc<TensorIndex>,
    layout: Arc<PageLayout>,
    /// Where memory for the sums comes from; the device's pool as it is for weights without a pager.
    pager: Option<Arc<Pager>>,
    /// `None`: the device runs no kernels.
    kernel: Option<KernelId>,
    set: Option<Arc<PatchSet>>,
    /// By tensor, first row and rows.
    sums: Mutex<HashMap<(u32, u64, u64), u64>>,
}

/// The most tensors that one [`Check`] takes before it must be finished.
pub const CHECK_CAPACITY: usize = 4096;

/// Bytes of a file that are read at once; a multiple of eight.
const READ_BYTES: u64 = 1 << 20;

impl Verifier {
    /// A verifier of `model`.
    pub fn new(model: &Arc<PagedModel>) -> Result<Self, PagerError> {
        Self::patched(model, None)
    }

    /// A verifier of `model` with patches.
    pub fn patched(model: &Arc<PagedModel>, set: Option<Arc<PatchSet>>) -> Result<Self, PagerError> {
        let pager = Arc::clone(model.pager());
        let kernel = usable_kernel(pager.device())?;
        Ok(Self {
            device: Arc::clone(pager.device()),
            index: Arc::clone(model.index()),
            layout: Arc::clone(&model.layout),
            pager: Some(pager),
            kernel,
            set,
            sums: Mutex::default(),
        })
    }

    /// A verifier of weights that no pager holds, laid out and patched like this.
    pub fn for_layout(
        device: &SharedDevice,
        index: &Arc<TensorIndex>,
        layout: &Arc<PageLayout>,
        set: Option<Arc<PatchSet>>,
    ) -> Result<Self, PagerError> {
        Ok(Self {
            device: Arc::clone(device),
            index: Arc::clone(index),
            layout: Arc::clone(layout),
            pager: None,
            kernel: usable_kernel(device)?,
            set,
            sums: Mutex::default(),
        })
    }

    /// What sums the bytes on the card.
    pub fn verified_by(&self) -> VerifiedBy {
        if self.kernel.is_some() { VerifiedBy::Kernel } else { VerifiedBy::Host }
    }

    /// Begins checks on one stream.
    pub fn begin<'v>(&'v self, stream: &'v PagerStream) -> Result<Check<'v>, PagerError> {
        self.begin_on(stream.stream())
    }

    /// As [`Self::begin`], on a stream that need not be registered with a pager.
    pub fn begin_on<'v>(&'v self, stream: &'v Arc<Stream>) -> Result<Check<'v>, PagerError> {
        let sums = match self.kernel {
            None => Sums::Host(Vec::new()),
            Some(kernel) => {
                let bytes = 8 * CHECK_CAPACITY as u64;
                let sums = match &self.pager {
                    Some(pager) => allocate_on(pager.core(), stream, bytes)?,
                    None => PoolAllocation::new(stream, bytes)?,
                };
                // SAFETY: the allocation is ours, taken on this stream, and freed in its order.
                unsafe { self.device.fill(sums.range(), 0, stream.id())? };
                Sums::Kernel(kernel, sums)
            }
        };
        Ok(Check { verifier: self, stream, sums, asked: Vec::new() })
    }

    /// The checksum that some rows of a tensor should have on the card: read from the file, cast and patched on
    /// the host. Computed once.
    pub fn expected_sum(&self, tensor: TensorId, rows: &std::ops::Range<u64>) -> Result<u64, PagerError> {
        let key = (tensor.0, rows.start, rows.end - rows.start);
        if let Some(sum) = self.sums.lock().get(&key) {
            return Ok(*sum);
        }
        let info = self.index.tensor_info(tensor);
        let count = info.shape.first().copied().unwrap_or(1).max(1);
        let place = self.layout.tensor_at(tensor);
        // In steps of whole words, so that the parts' sums add up to the whole's.
        let row = place.bytes / count;
        let step = if row == 0 || !row.is_multiple_of(8) { count } else { (READ_BYTES / row).max(1) };
        let mut sum = 0_u64;
        let mut at = rows.start;
        while at < rows.end {
            let end = (at + step).min(rows.end);
            let bytes = rows_on_card(&self.index, &self.layout, tensor, &(at..end), self.set.as_ref())?;
            sum = sum.wrapping_add(checksum(&bytes, (at - rows.start) * row / 8));
            at = end;
        }
        self.sums.lock().insert(key, sum);
        Ok(sum)
    }
}

/// The sums of what a check was asked for.
#[derive(Debug)]
enum Sums {
    /// On the card, eight bytes each.
    Kernel(KernelId, PoolAllocation),
    /// Made here.
    Host(Vec<u64>),
}

/// Checks that were asked for on one stream and not compared yet.
#[derive(Debug)]
pub struct Check<'v> {
    verifier: &'v Verifier,
    stream: &'v Arc<Stream>,
    sums: Sums,
    asked: Vec<(TensorId, std::ops::Range<u64>)>,
}

impl Check<'_> {
    /// Whether [`Self::finish`] should come before more is asked.
    pub fn is_nearly_full(&self) -> bool {
        self.asked.len() >= CHECK_CAPACITY / 2
    }

    /// Launches the checksum kernel on tensors that a guard, held by the caller on the check's stream,
    /// gives; or, without kernels, waits for their bytes to come back.
    pub fn tensors(&mut self, views: &[TensorView<'_>]) -> Result<(), PagerError> {
        for view in views {
            let Some(tensor) = self.verifier.index.tensor(view.name) else { continue };
            if view.bytes == 0 {
                continue;
            }
            let (kernel, sums) = match &mut self.sums {
                Sums::Kernel(kernel, sums) => (*kernel, sums.range()),
                Sums::Host(sums) => {
                    let device = &self.verifier.device;
                    sums.push(sum_on_host(device, self.stream, view.range())?);
                    self.asked.push((tensor, view.rows.clone()));
                    continue;
                }
            };
            let place = 8 * self.asked.len() as u64;
            let Some(sum) = sums.part(place, 8) else {
                return Err(PagerError::InvalidArgument {
                    what: "check",
                    why: format!("more than {CHECK_CAPACITY} tensors before they were compared"),
                });
            };
            let launch = checksum_launch(kernel, view.range(), 0, sum);
            // SAFETY: the caller holds a guard of these addresses on this stream and releases it after this
            // launch; the sum lies in our allocation.
            unsafe { self.stream.launch(&launch)? };
            self.asked.push((tensor, view.rows.clone()));
        }
        Ok(())
    }

    /// Waits for the kernels, compares, and answers what differs. The check can be used again.
    pub fn finish(&mut self) -> Result<Vec<Mismatch>, PagerError> {
        let found = match &mut self.sums {
            Sums::Host(sums) => std::mem::take(sums),
            Sums::Kernel(_, sums) => {
                let device = &self.verifier.device;
                let mut found = vec![0_u8; 8 * self.asked.len()];
                if let Some(part) = sums.range().part(0, found.len() as u64).filter(|part| part.bytes > 0) {
                    // SAFETY: the target lives past the wait, or for ever if that fails; the source is our
                    // allocation.
                    let read = unsafe { device.copy_to_host(found.as_mut_ptr(), part, self.stream.id()) };
                    if let Err(error) = read.and_then(|()| self.stream.synchronize()) {
                        // The copy may still come.
                        std::mem::forget(found);
                        return Err(error.into());
                    }
                }
                // SAFETY: our allocation, in the order of its stream.
                unsafe { device.fill(sums.range(), 0, self.stream.id())? };
                found.as_chunks::<8>().0.iter().copied().map(u64::from_le_bytes).collect()
            }
        };
        let mut mismatches = Vec::new();
        for ((tensor, rows), found) in self.asked.drain(..).zip(found) {
            let expected = self.verifier.expected_sum(tensor, &rows)?;
            if found != expected {
                let tensor = self.verifier.index.tensor_info(tensor).name.clone();
                mismatches.push(Mismatch { tensor, first_row: rows.start, found, expected });
            }
        }
        Ok(mismatches)
    }
}

/// The checksum kernel of a device; `None` if its driver runs no kernels.
///
/// Another driver library may lack the calls, refuse them, or take a launch and do nothing; so on a card
/// the kernel is tried once. A device that is lost or full is an error, not a device without kernels.
fn usable_kernel(device: &SharedDevice) -> Result<Option<KernelId>, DeviceError> {
    let kernel = match device.kernel("checksum") {
        Ok(kernel) => kernel,
        Err(error) if means_no_kernels(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    if device.info().kind == DeviceKind::Emulated {
        return Ok(Some(kernel));
    }
    match try_kernel(device, kernel) {
        Ok(right) => Ok(right.then_some(kernel)),
        Err(DeviceError::Unsupported { .. } | DeviceError::Driver { call: "cuLaunchKernel", .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether an error says that the device runs no kernels: pure.
fn means_no_kernels(error: &DeviceError) -> bool {
    matches!(
        error,
        DeviceError::Unsupported { .. } | DeviceError::UnknownKernel { .. } | DeviceError::Driver { .. }
    )
}

/// Sums a few known bytes on the device; answers whether the sum is right.
fn try_kernel(device: &SharedDevice, kernel: KernelId) -> Result<bool, DeviceError> {
    const KNOWN: [u8; 64] = [0x5A; 64];
    let stream = Arc::new(Stream::new(device, StreamPriority::Normal)?);
    let memory = PoolAllocation::new(&stream, KNOWN.len() as u64 + 8)?;
    let (Some(bytes), Some(sum)) =
        (memory.range().part(0, KNOWN.len() as u64), memory.range().part(KNOWN.len() as u64, 8))
    else {
        return Ok(false);
    };
    let mut found = [0_u8; 8];
    // SAFETY: the ranges lie in our allocation, which goes in the order of its stream; the target lives past
    // the wait.
    unsafe {
        device.fill(bytes, KNOWN[0], stream.id())?;
        device.fill(sum, 0, stream.id())?;
        stream.launch(&checksum_launch(kernel, bytes, 3, sum))?;
        let read = device.copy_to_host(found.as_mut_ptr(), sum, stream.id());
        stream.synchronize()?;
        read?;
    }
    Ok(u64::from_le_bytes(found) == checksum(&KNOWN, 3))
}

/// The checksum of bytes on the device, read back.
fn sum_on_host(device: &SharedDevice, stream: &Stream, range: DeviceRange) -> Result<u64, PagerError> {
    let size = range.bytes.min(READ_BYTES);
    let mut bytes = vec![0_u8; usize::try_from(size).unwrap_or(0)];
    let mut sum = 0_u64;
    let mut at = 0;
    while at < range.bytes {
        let length = (range.bytes - at).min(size);
        let Some(part) = range.part(at, length) else { break };
        let target = &mut bytes[..usize::try_from(length).unwrap_or(0)];
        // SAFETY: the caller's guard holds the source; the target lives past the wait, or for ever if that fails.
        let read = unsafe { device.copy_to_host(target.as_mut_ptr(), part, stream.id()) };
        if let Err(error) = stream.synchronize() {
            // The copy may still come.
            std::mem::forget(bytes);
            return Err(error.into());
        }
        read?;
        sum = sum.wrapping_add(checksum(target, at / 8));
        at += length;
    }
    Ok(sum)
}

/// Some rows of a tensor as they should be on the card: read from the file, cast, and patched on the host
/// by the kernels' twins. A tensor without dimensions has one row.
pub(crate) fn rows_on_card(
    index: &TensorIndex,
    layout: &PageLayout,
    tensor: TensorId,
    rows: &std::ops::Range<u64>,
    set: Option<&Arc<PatchSet>>,
) -> Result<Vec<u8>, PagerError> {
    let info = index.tensor_info(tensor);
    let place = layout.tensor_at(tensor);
    let count = info.shape.first().copied().unwrap_or(1).max(1);
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let whole = rows.end - rows.start == count;
    let part =
        |bytes: u64| if whole { 0..bytes } else { rows.start * (bytes / count)..rows.end * (bytes / count) };
    let (in_file, on_card) = (part(info.bytes), part(place.bytes));
    let mut bytes = vec![0; size(in_file.end - in_file.start)];
    index.files()[info.file as usize].read_exact_at(info.offset + in_file.start, &mut bytes, &info.name)?;
    let refuse = |why: String| PagerError::InvalidArgument { what: "rows", why };
    if place.dtype != info.dtype {
        let mut cast = vec![0; size(on_card.end - on_card.start)];
        cast_bytes(info.dtype, &bytes, place.dtype, &mut cast).map_err(refuse)?;
        bytes = cast;
    }
    for patch in set.map_or(&[][..], |set| set.of(tensor)) {
        let Some(weight) = float_type(place.dtype) else { continue };
        let part = PatchPart {
            first: on_card.start / weight.bytes(),
            elements: bytes.len() as u64 / weight.bytes(),
            columns: patch.down.shape[1],
            rank: u32::try_from(patch.up.shape[1]).unwrap_or(u32::MAX),
            scale: patch.scale,
        };
        device::patch(weight, &mut bytes, part, patch.up.dtype, &patch.up.bytes, &patch.down.bytes)
            .map_err(refuse)?;
    }
    Ok(bytes)
}
