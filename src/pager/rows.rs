//! Some rows of a tensor, packed, at an address of their own.
//!
//! For lookups that need a few rows of a table too large to bring in: a token's embedding needs one of
//! tens of thousands. The memory comes from the card's activation pool, whose bytes the pager's budget
//! leaves room for; it is freed in the order of the stream when the guard is released.

#![expect(unsafe_code, reason = "enqueues copies into an allocation that the guard owns")]

use std::fmt;
use std::sync::Arc;

use super::error::PagerError;
use super::model::PagedModel;
use super::patches::PatchSet;
use super::streams::PagerStream;
use super::verify;
use crate::device::PoolAllocation;
use crate::units::DeviceRange;
use crate::weights::{Dtype, TensorId};

/// Rows of a tensor on the device, valid for work on its stream until released.
#[must_use = "a guard that is dropped at once frees its rows before any work uses them"]
pub struct RowsGuard<'m> {
    allocation: PoolAllocation,
    bytes: u64,
    dtype: Dtype,
    shape: Vec<u64>,
    _model: &'m PagedModel,
}

impl RowsGuard<'_> {
    /// The rows' addresses.
    pub fn range(&self) -> DeviceRange {
        DeviceRange::new(self.allocation.range().start, self.bytes)
    }

    /// The elements' type on the device.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The shape: the number of rows, and the tensor's other dimensions.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Releases the rows; the same as dropping the guard.
    pub fn release(self) {}
}

impl fmt::Debug for RowsGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowsGuard").field("range", &self.range()).finish_non_exhaustive()
    }
}

pub(super) fn fault_rows<'m>(
    model: &'m PagedModel,
    tensor: TensorId,
    rows: &[u64],
    stream: &'m PagerStream,
    set: Option<&Arc<PatchSet>>,
) -> Result<RowsGuard<'m>, PagerError> {
    let index = model.index();
    if stream.is_capturing()? {
        // A replay would copy from a staging buffer that holds something else by then.
        let name = index.tensors().get(tensor.index()).map_or("", |info| info.name.as_str());
        let what = format!("rows of tensor `{name}`");
        return Err(PagerError::Capturing { model: model.name().to_owned(), what });
    }
    let Some(info) = index.tensors().get(tensor.index()) else {
        return Err(model.not_found(format!("tensor number {}", tensor.0)));
    };
    let count = info.shape.first().copied().unwrap_or(1);
    if rows.is_empty() {
        return Err(PagerError::InvalidArgument {
            what: "fault_rows",
            why: "no row was asked for".to_owned(),
        });
    }
    if let Some(row) = rows.iter().find(|row| **row >= count) {
        return Err(model.not_found(format!("row {row} of tensor `{}`, which has {count}", info.name)));
    }
    let place = model.layout().tensor_at(tensor);
    let (file_row, row_bytes) = (info.bytes / count, place.bytes / count);
    if file_row == 0 || info.bytes % count != 0 {
        return Err(PagerError::InvalidArgument {
            what: "fault_rows",
            why: format!("a row of tensor `{}` is not a whole number of bytes", info.name),
        });
    }
    let bytes = row_bytes.checked_mul(rows.len() as u64).ok_or_else(|| PagerError::InvalidArgument {
        what: "fault_rows",
        why: format!("{} rows of {row_bytes} bytes", rows.len()),
    })?;
    let core = model.core();
    let allocation = model.pager().allocate(stream, bytes).map_err(|error| match error {
        PagerError::Device(device) if device.is_out_of_memory() => {
            let control = core.control.lock();
            let limit = u64::from(control.budget) * core.page_bytes;
            if bytes <= limit {
                // It would fit if activations were given back.
                return PagerError::Device(device);
            }
            PagerError::NeverFits {
                model: model.name().to_owned(),
                what: format!("{} rows of tensor `{}`", rows.len(), info.name),
                device: core.device.info().name.clone(),
                need: bytes,
                limit,
                holders: control.holders(core, u32::MAX),
            }
        }
        other => other,
    })?;
    let guard = RowsGuard {
        allocation,
        bytes,
        dtype: place.dtype,
        shape: std::iter::once(rows.len() as u64).chain(info.shape.iter().skip(1).copied()).collect(),
        _model: model,
    };
    let start = guard.allocation.range().start;
    let capacity = u64::from(core.arena.run_slots()) * core.page_bytes;
    // Whole rows as far as a buffer takes them; a row that is longer goes in several buffers.
    let each = if row_bytes <= capacity { capacity / row_bytes * row_bytes } else { capacity };
    // The row at hand, as it is on the card, and its place among those asked for.
    let mut at_hand: Option<(u64, Vec<u8>)> = None;
    let mut done = 0_u64;
    while done < bytes {
        let row_rest = row_bytes - done % row_bytes;
        let part = each.min(if row_bytes <= capacity { bytes - done } else { row_rest });
        let slots = u32::try_from(part.div_ceil(core.page_bytes)).unwrap_or(u32::MAX);
        let mut buffer = super::load::take_buffer(core, slots)?;
        let mut file_bytes = 0;
        let available = if core.device.info().keeps_bytes {
            let mut target = buffer.bytes_mut()?;
            let mut filled = 0_u64;
            while filled < part {
                let (number, within) = ((done + filled) / row_bytes, (done + filled) % row_bytes);
                let length = (row_bytes - within).min(part - filled);
                let row = match at_hand.take() {
                    Some((hand, row)) if hand == number => row,
                    _ => {
                        let Some(&row) = usize::try_from(number).ok().and_then(|at| rows.get(at)) else {
                            break;
                        };
                        file_bytes += file_row;
                        verify::rows_on_card(model.index(), model.layout(), tensor, &(row..row + 1), set)?
                    }
                };
                // Neither lacks: the part lies in the buffer, and `length` ends within the row.
                if let Some(place) = slice_of(filled, length).and_then(|range| target.get_mut(range))
                    && let Some(from) = slice_of(within, length).and_then(|range| row.get(range))
                {
                    place.copy_from_slice(from);
                }
                at_hand = Some((number, row));
                filled += length;
            }
            core.device.schedule_read(file_bytes)
        } else {
            core.device.now()
        };
        let to = DeviceRange::new(start.offset(done), part);
        // On the runner's own stream, so that what is launched next finds the rows.
        // SAFETY: the source lies in the buffer, which is given this copy's fence below before it is let go;
        // the target lies in the allocation, which the guard frees in the order of the same stream.
        unsafe { core.device.copy_to_device(to, buffer.at(0), available, stream.stream().id())? };
        let mut control = core.control.lock();
        match control.engine.record(stream) {
            Ok(fence) => buffer.read_until(fence),
            Err(error) => {
                stream.settle()?;
                return Err(error.into());
            }
        }
        if let Some(state) = control.model_mut(model.id()) {
            state.counts.copied_bytes += part;
            state.counts.file_bytes += file_bytes;
        }
        done += part;
    }
    Ok(guard)
}

fn slice_of(start: u64, length: u64) -> Option<std::ops::Range<usize>> {
    Some(usize::try_from(start).ok()?..usize::try_from(start + length).ok()?)
}
