//! The copies of one run of pages: plain, cast on the card, and patched.
//!
//! Bytes of the device's type go straight to their place, small gaps included. Bytes of a smaller file
//! type land in the stream's scratch memory and are cast into place. Patches follow on the same stream,
//! each on the flat range of elements that has just arrived: the kernels give a part the bits that the
//! whole would get.

#![expect(unsafe_code, reason = "launches cast and patch kernels on pages that are claimed")]

use std::ops::Range;

use super::patches::{DevicePatch, DevicePatches};
use crate::device::{DeviceError, PatchPart, cast_kernel, cast_launch, patch_launch};
use crate::staging::StagingBuffer;
use crate::transfer::{Batch, cut_extents, float_type, is_cast_on_card};
use crate::units::{DeviceAddress, DeviceRange, ModelTime};
use crate::weights::{Extent, PageLayout};

/// A gap of at most this many bytes between two tensors is copied along with them.
const COPIED_GAP: u64 = 4096;

/// Where copies of a model's bytes go, and what is done with them there.
#[derive(Clone, Copy)]
pub(crate) struct CopyTarget<'a> {
    /// The model's addresses.
    pub(crate) layout: &'a PageLayout,
    /// The device address that stands for model address 0; it may wrap.
    pub(crate) base: DeviceAddress,
    /// Memory of the batch's stream where what is cast lands: as much as a run is long.
    pub(crate) scratch: Option<DeviceRange>,
    /// Where what is cast on the card was cut when it was read: at multiples of this many bytes.
    pub(crate) cut: u64,
    /// The patches to apply.
    pub(crate) patches: Option<&'a DevicePatches>,
}

/// Enqueues what brings the model addresses `run` to the card; answers the bytes that cross the link.
/// `source` holds the bytes from the given model address on; a device without bytes has none.
///
/// The caller has claimed the target: nobody uses it before the batch's fence.
pub(crate) fn copy_run(
    batch: &Batch<'_>,
    target: &CopyTarget<'_>,
    run: Range<u64>,
    source: Option<(&StagingBuffer, u64)>,
    available: ModelTime,
) -> Result<u64, DeviceError> {
    let base = target.base;
    let copy = |to: DeviceRange, at: u64| match source {
        Some((buffer, first)) => batch.copy(to, buffer, at - first, available),
        None => batch.copy_without_bytes(to, available),
    };
    let mut bytes = 0;
    let mut plain: Option<Range<u64>> = None;
    let flush = |plain: &mut Option<Range<u64>>, bytes: &mut u64| -> Result<(), DeviceError> {
        if let Some(part) = plain.take() {
            let to = DeviceRange::new(base.offset(part.start), part.end - part.start);
            copy(to, part.start)?;
            *bytes += to.bytes;
        }
        Ok(())
    };
    for extent in cut_extents(target.layout, run.clone(), target.cut) {
        let end = extent.at + extent.device_bytes;
        if is_cast_on_card(&extent) {
            flush(&mut plain, &mut bytes)?;
            cast_into_place(batch, target, &extent, run.start, &copy)?;
            bytes += extent.file_bytes;
            continue;
        }
        match &mut plain {
            Some(part) if extent.at - part.end <= COPIED_GAP => part.end = end,
            _ => {
                flush(&mut plain, &mut bytes)?;
                plain = Some(extent.at..end);
            }
        }
    }
    flush(&mut plain, &mut bytes)?;
    patch_run(batch, target, run)?;
    Ok(bytes)
}

/// The bytes that [`copy_run`] brings over the link for the model addresses `run`. Pure.
pub(super) fn link_bytes(layout: &PageLayout, run: Range<u64>, cut: u64) -> u64 {
    let mut bytes = 0;
    let mut plain_end: Option<u64> = None;
    for extent in cut_extents(layout, run, cut) {
        if is_cast_on_card(&extent) {
            plain_end = None;
            bytes += extent.file_bytes;
            continue;
        }
        let gap = plain_end.map_or(0, |end| extent.at - end);
        bytes += extent.device_bytes + if gap <= COPIED_GAP { gap } else { 0 };
        plain_end = Some(extent.at + extent.device_bytes);
    }
    bytes
}

/// Enqueues the patches of the model addresses `run`, whose bytes are there and not patched yet.
pub(crate) fn patch_run(
    batch: &Batch<'_>,
    target: &CopyTarget<'_>,
    run: Range<u64>,
) -> Result<(), DeviceError> {
    let Some(patches) = target.patches else { return Ok(()) };
    for extent in target.layout.extents(run) {
        for patch in patches.by_tensor.get(&extent.tensor).into_iter().flatten() {
            patch_part(batch, target, &extent, patch)?;
        }
    }
    Ok(())
}

/// Copies a narrow extent to the scratch memory of the batch's stream and casts it from there.
fn cast_into_place(
    batch: &Batch<'_>,
    target: &CopyTarget<'_>,
    extent: &Extent,
    run_start: u64,
    copy: &impl Fn(DeviceRange, u64) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let refuse = |why: String| DeviceError::InvalidArgument { call: "cast", why };
    let landing = target
        .scratch
        .and_then(|scratch| scratch.part(extent.at - run_start, extent.file_bytes))
        .ok_or_else(|| refuse(format!("no scratch memory for {} bytes", extent.file_bytes)))?;
    let (Some(from), Some(to)) = (float_type(extent.from), float_type(extent.to)) else {
        return Err(refuse(format!("nothing casts {} to {}", extent.from, extent.to)));
    };
    let name = cast_kernel(from, to).ok_or_else(|| refuse(format!("nothing casts {from} to {to}")))?;
    copy(landing, extent.at)?;
    let kernel = batch.kernel(name)?;
    let into = DeviceRange::new(target.base.offset(extent.at), extent.device_bytes);
    let launch = cast_launch(kernel, landing, extent.file_bytes / from.bytes(), into);
    // SAFETY: the target is a claimed, mapped page that nobody uses before the batch's fence; the scratch
    // memory belongs to this stream, whose next use comes after this kernel.
    unsafe { batch.launch(&launch) }
}

/// Patches the elements of one extent.
fn patch_part(
    batch: &Batch<'_>,
    target: &CopyTarget<'_>,
    extent: &Extent,
    patch: &DevicePatch,
) -> Result<(), DeviceError> {
    let tensor = target.layout.tensor_at(extent.tensor);
    let part = PatchPart {
        first: (extent.at - tensor.at) / patch.element_bytes,
        elements: extent.device_bytes / patch.element_bytes,
        columns: patch.columns,
        rank: patch.rank,
        scale: patch.scale,
    };
    let weight = DeviceRange::new(target.base.offset(extent.at), extent.device_bytes);
    let launch = patch_launch(patch.kernel, weight, part, patch.up, patch.down);
    // SAFETY: the weight is a claimed, mapped page that nobody uses before the batch's fence; the factors
    // live until the set is detached, which drains the copy streams first.
    unsafe { batch.launch(&launch) }
}
