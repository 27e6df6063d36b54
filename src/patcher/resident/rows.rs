//! Some rows of a tensor of a resident model, packed, at an address of their own.
//!
//! From the card if the module is there, otherwise from the file: a table that is looked up by rows need
//! not be on the card at all.

#![expect(unsafe_code, reason = "copies rows between allocations that are held")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::error::ResidentError;
use super::weights::Weights;
use crate::device::{DeviceError, PoolAllocation, Stream};
use crate::pager::{PatchSet, copy_in, rows_on_card};
use crate::units::DeviceRange;
use crate::weights::{Dtype, TensorId, UnitId};

/// Rows of a tensor on the device, valid for work on their stream until released.
#[must_use = "rows that are dropped at once are freed before any work uses them"]
pub struct ModuleRows {
    allocation: PoolAllocation,
    bytes: u64,
    dtype: Dtype,
    shape: Vec<u64>,
}

impl ModuleRows {
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
}

impl fmt::Debug for ModuleRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModuleRows").field("range", &self.range()).finish_non_exhaustive()
    }
}

impl Weights {
    pub(super) fn rows(
        &self,
        tensor: TensorId,
        rows: &[u64],
        stream: &Arc<Stream>,
        set: Option<&Arc<PatchSet>>,
    ) -> Result<ModuleRows, ResidentError> {
        self.check_stream(stream)?;
        let missing = |what: String| ResidentError::NotFound { model: self.name().to_owned(), what };
        let Some(info) = self.index.tensors().get(tensor.index()) else {
            return Err(missing(format!("tensor number {}", tensor.0)));
        };
        let count = info.shape.first().copied().unwrap_or(1);
        if let Some(row) = rows.iter().find(|row| **row >= count) {
            return Err(missing(format!("row {row} of tensor `{}`, which has {count}", info.name)));
        }
        let place = self.layout.tensor_at(tensor);
        let row_bytes = place.bytes.checked_div(count).unwrap_or(0);
        let bytes = row_bytes.checked_mul(rows.len() as u64).filter(|bytes| *bytes > 0);
        let Some(bytes) = bytes.filter(|_| place.bytes.is_multiple_of(count)) else {
            let why = format!("{} rows of tensor `{}`, {row_bytes} bytes each", rows.len(), info.name);
            return Err(DeviceError::InvalidArgument { call: "rows", why }.into());
        };
        let packed = ModuleRows {
            allocation: PoolAllocation::new(stream, bytes)?,
            bytes,
            dtype: place.dtype,
            shape: std::iter::once(rows.len() as u64).chain(info.shape.iter().skip(1).copied()).collect(),
        };
        let to = |number: u64| DeviceRange::new(packed.range().start.offset(number * row_bytes), row_bytes);
        let unit = self.unit_of(tensor);
        let mut state = self.lock();
        if state.has(unit, self.version_of(unit, set), stream)? {
            let first = self.address_of(&state, unit).offset(place.at - self.run_of(unit).start);
            let copies = (0..).zip(rows).try_for_each(|(number, row)| {
                let from = DeviceRange::new(first.offset(row * row_bytes), row_bytes);
                // SAFETY: the source lies in the module's pages, which are kept until the fence that is
                // noted below; the target lies in ours, freed in the order of the same stream.
                unsafe { self.device.copy_on_device(to(number), from, stream.id()) }
            });
            state.note(unit, stream)?;
            copies?;
            return Ok(packed);
        }
        drop(state);
        let mut host = Vec::with_capacity(usize::try_from(bytes).unwrap_or(0));
        if self.device.info().keeps_bytes {
            for row in rows {
                host.extend(rows_on_card(&self.index, &self.layout, tensor, &(*row..row + 1), set)?);
            }
        }
        let file_bytes = info.bytes / count * rows.len() as u64;
        let mut state = self.lock();
        copy_in(&self.device, &self.arena, packed.range(), &host, stream, |slots| {
            self.take_buffer(&mut state.modules, slots)
        })?;
        self.counts.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counts.file_bytes.fetch_add(file_bytes, Ordering::Relaxed);
        Ok(packed)
    }

    fn unit_of(&self, tensor: TensorId) -> usize {
        let at = self.layout.tensor_at(tensor).at;
        self.layout.unit_at(at).map_or(0, UnitId::index)
    }
}
