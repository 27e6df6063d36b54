//! The copies of one run of pages: plain, cast on the card, and patched.
//!
//! Bytes of the device's type go straight to their place, small gaps included. Bytes of a smaller file
//! type land in the stream's scratch memory and are cast into place. Patches follow on the same stream,
//! each on the flat range of elements that has just arrived: the kernels give a part the bits that the
//! whole would get. The bytes come from a staging buffer, or from a mapping of the file.

#![expect(unsafe_code, reason = "launches kernels on pages that are claimed, and copies from mapped files")]

use std::ops::Range;

use super::patches::{DevicePatch, DevicePatches};
use crate::device::{DeviceError, PatchPart, cast_kernel, cast_launch, patch_launch};
use crate::staging::StagingBuffer;
use crate::transfer::{Batch, cut_extents, float_type, is_cast_on_card};
use crate::units::{DeviceAddress, DeviceRange, ModelTime};
use crate::weights::{Extent, MappedFile, PageLayout};

/// A gap of at most this many bytes between two tensors is copied along with them.
const COPIED_GAP: u64 = 4096;

/// Where copies of a model's bytes come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CopySource<'a> {
    /// A buffer that holds the bytes from the given model address on.
    Staged(&'a StagingBuffer, u64),
    /// The mapped files themselves. Only for extents that no reader has to cast.
    Mapped(&'a [MappedFile]),
    /// Nowhere: the device keeps no bytes.
    None,
}

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
///
/// The caller has claimed the target: nobody uses it before the batch's fence.
pub(crate) fn copy_run(
    batch: &Batch<'_>,
    target: &CopyTarget<'_>,
    run: Range<u64>,
    source: CopySource<'_>,
    available: ModelTime,
) -> Result<u64, DeviceError> {
    let base = target.base;
    let copy = |to: DeviceRange, at: u64| match source {
        CopySource::Staged(buffer, first) => batch.copy(to, buffer, at - first, available),
        CopySource::None => batch.copy_without_bytes(to, available),
        CopySource::Mapped(_) => Err(DeviceError::InvalidArgument {
            call: "copy_to_device",
            why: "a run of a mapped file is copied by extents".to_owned(),
        }),
    };
    if let CopySource::Mapped(files) = source {
        let bytes = copy_mapped(batch, target, run.clone(), files, available)?;
        patch_run(batch, target, run)?;
        return Ok(bytes);
    }
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
            cast_into_place(batch, target, &extent, run.start, |landing| copy(landing, extent.at))?;
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

/// Whether every extent of a run can be copied from a mapping of its file: none has to be cast by a reader.
pub(crate) fn is_mappable(layout: &PageLayout, run: Range<u64>) -> bool {
    layout.extents(run).all(|extent| extent.from == extent.to || is_cast_on_card(&extent))
}

/// The copies of [`copy_run`] out of mapped files: one for each run of extents that follow one another in
/// file and model alike.
fn copy_mapped(
    batch: &Batch<'_>,
    target: &CopyTarget<'_>,
    run: Range<u64>,
    files: &[MappedFile],
    available: ModelTime,
) -> Result<u64, DeviceError> {
    let copy = |to: DeviceRange, file: u32, offset: u64| {
        let part = usize::try_from(offset).ok().and_then(|start| {
            let mapped = files.get(file as usize)?;
            let end = start.checked_add(usize::try_from(to.bytes).ok()?)?;
            (end <= mapped.len()).then(|| mapped.as_ptr().wrapping_add(start))
        });
        let Some(from) = part else {
            let why = format!("{} bytes at {offset} lie outside of mapped file {file}", to.bytes);
            return Err(DeviceError::InvalidArgument { call: "copy_to_device", why });
        };
        // SAFETY: the bytes lie in the mapping, which the model keeps until its copies are done, and which
        // nobody writes or shortens: the promise of whoever made the source `map`. It is not page-locked.
        unsafe { batch.copy_from(to, from, available) }
    };
    let mut bytes = 0;
    let mut open: Option<(Extent, u64)> = None;
    let flush = |open: &mut Option<(Extent, u64)>| match open.take() {
        Some((first, length)) => {
            let to = DeviceRange::new(target.base.offset(first.at), length);
            copy(to, first.file, first.file_offset)
        }
        None => Ok(()),
    };
    for extent in cut_extents(target.layout, run.clone(), target.cut) {
        bytes += extent.file_bytes;
        if is_cast_on_card(&extent) {
            flush(&mut open)?;
            cast_into_place(batch, target, &extent, run.start, |landing| {
                copy(landing, extent.file, extent.file_offset)
            })?;
            continue;
        }
        match &mut open {
            Some((first, length))
                if first.file == extent.file
                    && first.file_offset + *length == extent.file_offset
                    && first.at + *length == extent.at =>
            {
                *length += extent.device_bytes;
            }
            _ => {
                flush(&mut open)?;
                open = Some((extent, extent.device_bytes));
            }
        }
    }
    flush(&mut open)?;
    Ok(bytes)
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
    copy: impl FnOnce(DeviceRange) -> Result<(), DeviceError>,
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
    copy(landing)?;
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
