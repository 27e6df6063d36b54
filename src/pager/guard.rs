//! Guards: a unit's device addresses, valid on a stream until released.

#![deny(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::error::PagerError;
use super::fault;
use super::model::PagedModel;
use super::mutations::Mutation;
use super::streams::PagerStream;
use crate::units::{DeviceAddress, DeviceRange};
use crate::weights::{Dtype, TensorId, UnitId};

/// A tensor, or some rows of one, on the device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorView<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// The address of the first element.
    pub address: DeviceAddress,
    /// The length in bytes.
    pub bytes: u64,
    /// The type of the elements on the device.
    pub dtype: Dtype,
    /// The shape; in a piece the first dimension is the number of rows in it.
    pub shape: Vec<u64>,
    /// Which rows of the whole tensor these are.
    pub rows: Range<u64>,
}

impl TensorView<'_> {
    /// The addresses.
    pub fn range(&self) -> DeviceRange {
        DeviceRange::new(self.address, self.bytes)
    }
}

/// Whether `name` is a tensor's whole name, or its name within its unit.
pub(crate) fn names_tensor(unit: &str, tensor: &str, name: &str) -> bool {
    let within = || tensor.strip_prefix(unit).and_then(|rest| rest.strip_prefix('.'));
    tensor == name || within().is_some_and(|rest| rest == name)
}

/// What a guard holds: a run of spans, each pinned.
///
/// Numbers only, but for a list that most have not: so the guard of a hit never leaves the registers.
#[derive(Debug)]
pub(super) struct Pinned {
    pub(super) unit: UnitId,
    first: u32,
    count: u32,
    release: Release,
    streamed: Streamed,
}

/// How a guard is released. As wide as its neighbours, so that no single bytes are copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
enum Release {
    /// It is one resident span: what is compiled into the caller.
    Resident,
    /// Everything else.
    Slow,
}

/// Which spans of a run are streamed, and so are released under the control lock.
#[derive(Debug)]
pub(super) enum Streamed {
    None,
    All,
    Some(Box<Which>),
}

/// By place in the run.
#[derive(Debug)]
pub(super) struct Which(Vec<bool>);

impl Streamed {
    /// Of a run of one span.
    pub(super) fn one(streamed: bool) -> Self {
        if streamed { Self::All } else { Self::None }
    }

    /// Of a run of several.
    pub(super) fn several(streamed: Vec<bool>) -> Self {
        if streamed.contains(&true) { Self::Some(Box::new(Which(streamed))) } else { Self::None }
    }

    fn has(&self, place: usize) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Some(which) => which.0.get(place).copied().unwrap_or(false),
        }
    }
}

impl Pinned {
    /// One resident span.
    #[inline]
    pub(super) fn resident(unit: UnitId, span: u32) -> Self {
        Self { unit, first: span, count: 1, release: Release::Resident, streamed: Streamed::None }
    }

    pub(super) fn new(unit: UnitId, spans: Range<u32>, streamed: Streamed) -> Self {
        let count = spans.end - spans.start;
        let resident = count == 1 && matches!(streamed, Streamed::None);
        let release = if resident { Release::Resident } else { Release::Slow };
        Self { unit, first: spans.start, count, release, streamed }
    }

    /// The spans.
    pub(super) fn spans(&self) -> Range<u32> {
        self.first..self.first + self.count
    }

    #[inline]
    pub(super) fn release(&self, model: &PagedModel, stream: &PagerStream) {
        match self.release {
            Release::Resident => release_span(model, self.first, stream),
            Release::Slow => self.release_slowly(model, stream),
        }
    }

    #[inline(never)]
    fn release_slowly(&self, model: &PagedModel, stream: &PagerStream) {
        for (place, span) in self.spans().enumerate() {
            if self.streamed.has(place) {
                fault::release_streamed(model.core(), model.id(), span, stream);
            } else {
                release_span(model, span, stream);
            }
        }
    }

    /// Nothing is held any more; the release was made elsewhere.
    fn forget(&mut self) {
        (self.count, self.release) = (0, Release::Slow);
    }
}

/// Releases a resident span.
#[inline]
fn release_span(model: &PagedModel, span: u32, stream: &PagerStream) {
    let forgets = model.core().options.mutated().by(Mutation::ReleaseWithoutStream);
    model.word(span).release(if forgets { 0 } else { stream.bit() });
}

/// A unit, or a piece of one, on the device: its tensors' addresses, valid for work on its stream until
/// the guard is released.
///
/// Dropping a guard releases it on the stream that it was faulted on. Work must be given to the stream
/// before that.
///
/// Kernels read the addresses where they are. To see the bytes on the host, copy them with
/// [`Copies::copy_to_host`](crate::device::Copies::copy_to_host) of [`Pager::device`](super::Pager::device) on the
/// guard's stream, and synchronise that before the guard is released; or let a [`Verifier`](super::Verifier) compare
/// them with the file.
#[must_use = "a guard that is dropped at once gives its unit free before any work uses it"]
pub struct Guard<'m> {
    model: &'m PagedModel,
    stream: &'m PagerStream,
    pinned: Pinned,
}

impl<'m> Guard<'m> {
    #[inline]
    pub(super) fn new(model: &'m PagedModel, stream: &'m PagerStream, pinned: Pinned) -> Self {
        Self { model, stream, pinned }
    }

    /// The unit.
    pub fn unit(&self) -> UnitId {
        self.pinned.unit
    }

    /// A tensor of the unit, by its whole name or by its name within the unit (`weight`). In a piece:
    /// those of its rows that the piece holds.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.model.view(&self.pinned, name)
    }

    /// The unit's tensors in address order.
    pub fn tensors(&self) -> Vec<TensorView<'_>> {
        self.model.views(&self.pinned)
    }

    /// A tensor of the unit by its id.
    pub fn tensor_by_id(&self, id: TensorId) -> Option<TensorView<'_>> {
        self.tensors().into_iter().find(|view| self.model.index().tensor(view.name) == Some(id))
    }

    /// Releases the guard on its stream; the same as dropping it.
    #[inline]
    pub fn release(self) {}

    /// Releases the guard on another stream, which all work that uses it has been ordered before.
    ///
    /// # Errors
    /// [`PagerError::OtherDevice`] for a stream of another card, which knows nothing of this one's work: the
    /// guard is then released on its own stream.
    pub fn release_on(mut self, stream: &PagerStream) -> Result<(), PagerError> {
        self.model.check_stream(stream)?;
        self.pinned.release(self.model, stream);
        self.pinned.forget();
        Ok(())
    }
}

impl fmt::Debug for Guard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("pinned", &self.pinned).finish_non_exhaustive()
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.pinned.release(self.model, self.stream);
    }
}

/// A guard that keeps its model and its stream alive, for code that cannot borrow them.
#[must_use = "a guard that is dropped at once gives its unit free before any work uses it"]
pub struct OwnedGuard {
    model: Arc<PagedModel>,
    stream: Arc<PagerStream>,
    pinned: Pinned,
}

impl OwnedGuard {
    pub(super) fn new(model: Arc<PagedModel>, stream: Arc<PagerStream>, pinned: Pinned) -> Self {
        Self { model, stream, pinned }
    }

    /// The unit.
    pub fn unit(&self) -> UnitId {
        self.pinned.unit
    }

    /// As [`Guard::tensor`].
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.model.view(&self.pinned, name)
    }

    /// As [`Guard::tensors`].
    pub fn tensors(&self) -> Vec<TensorView<'_>> {
        self.model.views(&self.pinned)
    }

    /// The stream that it is valid on.
    pub fn stream(&self) -> &Arc<PagerStream> {
        &self.stream
    }

    /// Releases the guard on its stream; the same as dropping it.
    pub fn release(self) {}
}

impl fmt::Debug for OwnedGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedGuard").field("pinned", &self.pinned).finish_non_exhaustive()
    }
}

impl Drop for OwnedGuard {
    fn drop(&mut self) {
        self.pinned.release(&self.model, &self.stream);
    }
}
