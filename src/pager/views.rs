//! The tensors of what a guard pins: where each of them lies, and which of its rows.
//!
//! Reads the layout and the index alone; no lock.

#![deny(unsafe_code)]

use super::guard::{Pinned, TensorView, names_tensor};
use super::model::{Addresses, PagedModel};
use super::plain;
use crate::units::DeviceAddress;
use crate::weights::TensorId;

impl PagedModel {
    pub(super) fn views(&self, pinned: &Pinned) -> Vec<TensorView<'_>> {
        let unit = self.index.unit_info(pinned.unit);
        unit.tensors.iter().filter_map(|&tensor| self.view_of(pinned, tensor)).collect()
    }

    pub(super) fn view(&self, pinned: &Pinned, name: &str) -> Option<TensorView<'_>> {
        let unit = self.index.unit_info(pinned.unit);
        let named = |tensor: TensorId| names_tensor(&unit.name, &self.index.tensor_info(tensor).name, name);
        let tensor = unit.tensors.iter().copied().find(|&tensor| named(tensor))?;
        self.view_of(pinned, tensor)
    }

    /// The rows of a tensor that lie in the pinned spans; `None` if none do.
    fn view_of(&self, pinned: &Pinned, tensor: TensorId) -> Option<TensorView<'_>> {
        let info = self.index.tensor_info(tensor);
        let place = self.layout.tensor_at(tensor);
        let whole = self.layout.spans_of_unit(pinned.unit) == Some(pinned.spans());
        let (at, bytes, rows) = if whole {
            (place.at, place.bytes, 0..info.shape.first().copied().unwrap_or(1))
        } else {
            let mut found: Option<(u64, u64, std::ops::Range<u64>)> = None;
            for span in pinned.spans() {
                let parts = self.layout.parts_of(span);
                for part in parts.filter(|part| part.tensor == tensor) {
                    found = Some(match found {
                        None => (part.at, part.bytes, part.rows),
                        Some((at, bytes, rows)) => (at, bytes + part.bytes, rows.start..part.rows.end),
                    });
                }
            }
            found?
        };
        let mut shape = info.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first = rows.end - rows.start;
        }
        Some(TensorView {
            name: &info.name,
            address: self.address(pinned, at),
            bytes,
            dtype: place.dtype,
            shape,
            rows,
        })
    }

    /// Where model address `at` of what is pinned lies now.
    fn address(&self, pinned: &Pinned, at: u64) -> DeviceAddress {
        match &self.addresses {
            Addresses::Stable(range) => range.start.offset(at),
            // Without virtual memory calls one span is pinned at a time: pieces are taken one by one.
            Addresses::OfGuards(addresses) => {
                let span = pinned.spans().start;
                let first = self.layout.span(span).bytes.start;
                plain::address(addresses, span, first, at)
            }
        }
    }
}
