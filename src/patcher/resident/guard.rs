//! A module's device addresses, valid on a stream until released.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use super::weights::Weights;
use crate::device::Stream;
use crate::pager::{TensorView, names_tensor};
use crate::units::DeviceAddress;
use crate::weights::UnitId;

/// A module on the card: its tensors' addresses, valid for work on its stream until the guard is released.
///
/// Dropping a guard releases it on its stream. Work must be given to the stream before that. Unlike a
/// paged unit, a module may lie elsewhere the next time.
#[must_use = "a guard that is dropped at once gives its module free before any work uses it"]
pub struct ModuleGuard<'p> {
    pub(super) weights: &'p Weights,
    pub(super) stream: Arc<Stream>,
    pub(super) unit: UnitId,
    /// Which place of the streaming buffer it lies in; `None` for one that stays on the card.
    pub(super) streamed: Option<usize>,
    /// The address of the module's first byte.
    pub(super) start: DeviceAddress,
}

impl<'p> ModuleGuard<'p> {
    /// The module.
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// Whether it passes through the streaming buffer.
    pub fn is_streamed(&self) -> bool {
        self.streamed.is_some()
    }

    /// A tensor of the module, by its whole name or by its name within the module (`weight`).
    pub fn tensor(&self, name: &str) -> Option<TensorView<'p>> {
        let unit = &self.weights.index.unit_info(self.unit).name;
        self.tensors().into_iter().find(|view| names_tensor(unit, view.name, name))
    }

    /// The module's tensors in address order.
    pub fn tensors(&self) -> Vec<TensorView<'p>> {
        let (index, layout) = (&self.weights.index, &self.weights.layout);
        let first = layout.unit(self.unit).bytes.start;
        let tensors = index.unit_info(self.unit).tensors.iter().map(|&tensor| {
            let (info, place) = (index.tensor_info(tensor), layout.tensor_at(tensor));
            TensorView {
                name: &info.name,
                address: self.start.offset(place.at - first),
                bytes: place.bytes,
                dtype: place.dtype,
                shape: info.shape.clone(),
                rows: 0..info.shape.first().copied().unwrap_or(1),
            }
        });
        tensors.collect()
    }

    /// Releases the guard on its stream; the same as dropping it.
    pub fn release(self) {}
}

impl fmt::Debug for ModuleGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModuleGuard")
            .field("unit", &self.unit)
            .field("start", &self.start)
            .field("streamed", &self.streamed)
            .finish_non_exhaustive()
    }
}

impl Drop for ModuleGuard<'_> {
    fn drop(&mut self) {
        self.weights.release(self.unit.index(), self.streamed, &self.stream);
    }
}
