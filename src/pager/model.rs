//! A model on a card: faults, pieces, rows and figures.
//!
//! Holds its words, layout and index by shared pointers, so that a hit touches nothing but the span's
//! word; everything else goes through the control lock.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::card::Pager;
use super::claim::Patience;
use super::core::Core;
use super::costs;
use super::counters::{HitCounts, ModelCounts};
use super::error::PagerError;
use super::fault;
use super::guard::{Guard, OwnedGuard, Pinned, Streamed};
use super::patched::PatchedModel;
use super::patches::PatchSet;
use super::plain;
use super::reclaim;
use super::replan;
use super::rows::{self, RowsGuard};
use super::streams::PagerStream;
use super::word::SpanWord;
use super::words::Words;
use crate::units::{DeviceAddress, DeviceRange};
use crate::weights::{PageLayout, TensorId, TensorIndex, UnitId};

/// A model whose weights are faulted to a card.
///
/// All calls take `&self` and may be made from any number of threads. Dropping it waits for the work that
/// uses its pages. A stream that is being captured cannot be waited for: what it used goes back when the capture
/// is over.
pub struct PagedModel {
    pub(super) pager: Arc<Pager>,
    pub(super) id: u32,
    pub(super) name: String,
    pub(super) index: Arc<TensorIndex>,
    pub(super) layout: Arc<PageLayout>,
    pub(super) words: Words,
    pub(super) hits: Arc<HitCounts>,
    pub(super) addresses: Addresses,
}

/// Where a model's bytes lie on the card.
#[derive(Debug)]
pub(super) enum Addresses {
    /// In its own range, for its whole life.
    Stable(DeviceRange),
    /// Wherever a span's block is while it is pinned: a device without virtual memory calls.
    OfGuards(Arc<[AtomicU64]>),
}

/// What a model has on the card and in staging memory now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ModelFigures {
    /// Bytes of its tensors as they are on the card.
    pub weights_bytes: u64,
    /// Bytes of pages that have a frame of their own.
    pub resident_bytes: u64,
    /// Bytes of pages that the plan keeps on the card.
    pub planned_bytes: u64,
    /// The most bytes that one fault streams at once.
    pub largest_streamed_part_bytes: u64,
    /// Bytes of pages kept in page-locked staging memory.
    pub page_locked_bytes: u64,
    /// Pages of the model.
    pub pages: u32,
    /// How long the runner computes in a pass: the sum over the units of what the model's first pass took with
    /// each, by the device's own clock (modelled on an emulated card, that of timed events on a real one). `None`
    /// until it was learned, which the first fault of a later pass does, and for good where it could not be.
    pub measured_compute: Option<Duration>,
}

impl PagedModel {
    #[inline]
    pub(super) fn core(&self) -> &Arc<Core> {
        self.pager.core()
    }

    pub(super) fn id(&self) -> u32 {
        self.id
    }

    #[inline]
    pub(super) fn word(&self, span: u32) -> &SpanWord {
        &self.words[span as usize].0
    }

    /// The card's pager.
    pub fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// The name that messages give it: its file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The files' index.
    pub fn index(&self) -> &Arc<TensorIndex> {
        &self.index
    }

    /// The layout in pages.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// The unit of this name.
    pub fn unit(&self, name: &str) -> Result<UnitId, PagerError> {
        self.index.unit(name).ok_or_else(|| self.not_found(format!("unit `{name}`")))
    }

    /// Faults a unit: its tensors are on the device, or arriving there ahead of what the stream is given
    /// next.
    ///
    /// # Errors
    /// [`PagerError::Held`] if guards hold memory that it needs; [`PagerError::NeverFits`] if the unit is
    /// larger than the card can give, in which case [`Self::fault_piece`] may still do.
    #[inline]
    pub fn fault<'m>(&'m self, unit: UnitId, stream: &'m PagerStream) -> Result<Guard<'m>, PagerError> {
        // The hit is compiled into the caller; everything else is not.
        // Both ways come together as a few numbers: a call that wrote the guard itself would keep the hit's in
        // memory too, and reading it back there costs as much as the hit.
        let pinned = match self.hit(unit, stream) {
            Some(pinned) => pinned,
            None => match self.pin_slowly(unit, stream) {
                Ok(pinned) => pinned,
                Err(error) => return Err(*error),
            },
        };
        Ok(Guard::new(self, stream, pinned))
    }

    #[cold]
    #[inline(never)]
    fn pin_slowly(&self, unit: UnitId, stream: &PagerStream) -> Result<Pinned, Box<PagerError>> {
        self.pin_unit(unit, stream, None, Patience::None).map_err(Box::new)
    }

    /// The hit of a unit of one span without patches; `None`, and nothing pinned, for all else.
    #[inline]
    fn hit(&self, unit: UnitId, stream: &PagerStream) -> Option<Pinned> {
        let spans = self.layout.spans_of_unit(unit)?;
        let span = spans.start;
        if spans.end - span != 1 || !Arc::ptr_eq(&stream.core, self.core()) {
            return None;
        }
        if !self.word(span).pin_if_resident(0) {
            return None;
        }
        self.count_hit();
        Some(Pinned::resident(unit, span))
    }

    /// As [`Self::fault`], by the unit's name.
    pub fn fault_named<'m>(&'m self, unit: &str, stream: &'m PagerStream) -> Result<Guard<'m>, PagerError> {
        self.fault(self.unit(unit)?, stream)
    }

    /// As [`Self::fault`], with a guard that owns its model and stream.
    pub fn fault_owned(
        self: &Arc<Self>,
        unit: UnitId,
        stream: &Arc<PagerStream>,
    ) -> Result<OwnedGuard, PagerError> {
        let pinned = self.pin_unit(unit, stream, None, Patience::None)?;
        Ok(OwnedGuard::new(Arc::clone(self), Arc::clone(stream), pinned))
    }

    /// As [`Self::fault`], but waits until `deadline` for guards of others that hold what it needs. A
    /// caller that holds a guard itself may wait for itself, and should use [`Self::fault`].
    pub fn fault_when_free<'m>(
        &'m self,
        unit: UnitId,
        stream: &'m PagerStream,
        deadline: Instant,
    ) -> Result<Guard<'m>, PagerError> {
        self.when_free(deadline, self.pieces(unit)?, |patience| {
            Ok(Guard::new(self, stream, self.pin_unit(unit, stream, None, patience)?))
        })
    }

    /// The pieces of a unit: 1 for all but those that are too large for the card.
    pub fn pieces(&self, unit: UnitId) -> Result<u32, PagerError> {
        let spans = self.spans(unit)?;
        Ok(spans.end - spans.start)
    }

    /// Faults one piece of a unit: a run of rows of the first dimension of its tensors.
    pub fn fault_piece<'m>(
        &'m self,
        unit: UnitId,
        piece: u32,
        stream: &'m PagerStream,
    ) -> Result<Guard<'m>, PagerError> {
        Ok(Guard::new(self, stream, self.pin_piece(unit, piece, stream, None, Patience::None)?))
    }

    /// As [`Self::fault_piece`], waiting for others as [`Self::fault_when_free`].
    pub fn fault_piece_when_free<'m>(
        &'m self,
        unit: UnitId,
        piece: u32,
        stream: &'m PagerStream,
        deadline: Instant,
    ) -> Result<Guard<'m>, PagerError> {
        self.when_free(deadline, 1, |patience| {
            Ok(Guard::new(self, stream, self.pin_piece(unit, piece, stream, None, patience)?))
        })
    }

    /// Brings some rows of a tensor's first dimension to the card, packed one after the other in the order
    /// given, at an address of their own. A row may be named more than once.
    pub fn fault_rows<'m>(
        &'m self,
        tensor: TensorId,
        rows: &[u64],
        stream: &'m PagerStream,
    ) -> Result<RowsGuard<'m>, PagerError> {
        self.check_stream(stream)?;
        rows::fault_rows(self, tensor, rows, stream, None)
    }

    /// The model with patches: faults through it give patched weights.
    pub fn patched<'m>(&'m self, set: &'m Arc<PatchSet>) -> PatchedModel<'m> {
        PatchedModel::new(self, set)
    }

    /// The patches that what is on the card now was made with.
    pub fn attached(&self) -> Option<Arc<PatchSet>> {
        self.core().control.lock().model(self.id).and_then(|model| model.patches().cloned())
    }

    /// Whether every page of a unit is on the card in a frame of its own.
    pub fn is_resident(&self, unit: UnitId) -> bool {
        let Ok(spans) = self.spans(unit) else { return false };
        spans.into_iter().all(|span| {
            let view = self.word(span).view();
            view.state() == super::word::SpanState::Ready && !view.is_streamed()
        })
    }

    /// The device address that a unit has for the model's whole life; `None` on a device without virtual
    /// memory calls, where an address holds for its guard only (see [`Pager::stable_addresses`]).
    pub fn unit_address(&self, unit: UnitId) -> Option<DeviceAddress> {
        let span = self.layout.spans_of_unit(unit)?.start;
        match &self.addresses {
            Addresses::Stable(range) => Some(range.start.offset(self.layout.span(span).bytes.start)),
            Addresses::OfGuards(_) => None,
        }
    }

    /// Makes this the most important model of its card: the last one that gives memory up.
    ///
    /// `passes` is how many passes will follow; `None` goes by the last activation. With more than one it
    /// takes memory from less important models at once, otherwise only after it has streamed through once.
    pub fn activate(&self, passes: Option<u32>) -> Result<(), PagerError> {
        let core = self.core();
        let mut control = core.control.lock();
        control.next_priority += 1;
        let priority = control.next_priority;
        control.activations.note(self.id);
        let highest = control.models.iter().flatten().map(|model| model.priority).max();
        let Some(model) = control.model_mut(self.id) else { return Ok(()) };
        let already = highest == Some(model.priority);
        let mut ended = false;
        if !already {
            // What the last activation showed, unless the caller knows better. One of hits only showed nothing.
            if model.learner.restart() {
                model.several = model.passes > 0;
                model.measure.left();
                ended = true;
            }
            model.promoted = passes.map_or(model.several, |passes| passes > 1);
            model.passes = 0;
        } else if passes.is_some_and(|passes| passes > 1) {
            model.promoted = true;
        }
        model.priority = priority;
        if ended {
            costs::learn(&mut control, self.id);
        }
        reclaim::refresh_budget(core, &mut control, true)?;
        replan::replan(core, &mut control, self.id, false)
    }

    /// Tells how long the compute of a pass takes per GiB of weights, see
    /// [`super::ModelOptions::compute_per_gib`].
    pub fn set_compute_per_gib(&self, compute: Option<Duration>) -> Result<(), PagerError> {
        let core = self.core();
        let mut control = core.control.lock();
        let Some(model) = control.model_mut(self.id) else { return Ok(()) };
        if model.compute_per_gib == compute {
            return Ok(());
        }
        model.compute_per_gib = compute;
        model.choices.forget();
        replan::replan(core, &mut control, self.id, true)
    }

    /// Brings in every page that the plan keeps on the card, in pass order, without waiting for the copies.
    pub fn prefetch_all(&self) -> Result<(), PagerError> {
        {
            // The plan as the card is now: what no longer stays may not even fit.
            let mut control = self.core().control.lock();
            reclaim::refresh_budget(self.core(), &mut control, true)?;
            replan::replan(self.core(), &mut control, self.id, false)?;
        }
        let stream = self.pager.stream()?;
        let set = self.attached();
        for span in 0..self.layout.span_count() {
            let stays = {
                let control = self.core().control.lock();
                control.model(self.id).is_some_and(|model| {
                    if let Some(own) = &model.plain {
                        return own.stays(span);
                    }
                    let pages = self.layout.span(span).pages;
                    pages.into_iter().all(|page| model.order.rank(page) < model.plan.resident)
                })
            };
            if stays {
                let streamed = Streamed::one(self.pin_span(span, &stream, set.as_ref(), Patience::None)?);
                let unit = self.layout.span(span).unit;
                Pinned::new(unit, span..span + 1, streamed).release(self, &stream);
            }
        }
        Ok(())
    }

    /// Gives back up to `bytes` of resident pages, in whole pages, to the device; answers the bytes. Pages
    /// that guards hold stay.
    pub fn unload(&self, bytes: u64) -> Result<u64, PagerError> {
        let core = self.core();
        let mut control = core.control.lock();
        fault::settle_captured(core, &mut control);
        if control.plain.is_some() {
            return plain::unload(core, &mut control, self.id, bytes);
        }
        reclaim::unload_pages(&mut control, self.id, bytes, core.page_bytes)
    }

    /// Gives pages kept in staging memory up until `bytes` of page-locked memory went back to the host, or
    /// none is kept; answers what went back. Memory goes back in whole registered blocks, so that it may be
    /// more, and less where other models keep pages in the same blocks.
    pub fn unload_page_locked(&self, bytes: u64) -> Result<u64, PagerError> {
        let core = self.core();
        let mut given = 0;
        while given < bytes {
            let dropped = super::load::drop_cached(&mut core.control.lock(), self.id, bytes - given);
            let held = core.arena.figures().held_bytes;
            given += core.arena.trim(held.saturating_sub(bytes - given))?;
            if dropped == 0 {
                break;
            }
        }
        Ok(given)
    }

    /// What the model has counted so far.
    pub fn counts(&self) -> ModelCounts {
        let control = self.core().control.lock();
        let mut counts = control.model(self.id).map_or_else(ModelCounts::default, |model| model.counts);
        counts.hits += self.hits.sum();
        counts
    }

    /// What the model holds now.
    pub fn figures(&self) -> ModelFigures {
        let core = self.core();
        let control = core.control.lock();
        let Some(model) = control.model(self.id) else { return ModelFigures::default() };
        let held = control.plain.as_ref().map_or(0, |plain| plain.held_by(Some(self.id)).resident);
        let (planned, part) =
            model.plain.as_ref().map_or((0, 0), |own| (own.planned_bytes(), own.slot_bytes()));
        ModelFigures {
            weights_bytes: self.layout.content_bytes(0..self.layout.address_bytes()),
            resident_bytes: u64::from(model.resident) * core.page_bytes + held,
            planned_bytes: u64::from(model.plan.resident) * core.page_bytes + planned,
            largest_streamed_part_bytes: u64::from(model.plan.largest_part) * core.page_bytes + part,
            page_locked_bytes: model
                .cache
                .values()
                .filter(|run| run.buffer.is_page_locked())
                .map(|run| run.buffer.len())
                .sum(),
            pages: self.layout.page_count(),
            measured_compute: model.measure.sum(),
        }
    }

    /// Says, once in the model's life, that units are taken in pieces. For runners that report it.
    pub fn say_pieces_once(&self) -> bool {
        let mut control = self.core().control.lock();
        control.model_mut(self.id).is_some_and(|model| !std::mem::replace(&mut model.said_pieces, true))
    }

    /// The range that the model reserved; `None` on a device without virtual memory calls.
    pub fn address_range(&self) -> Option<DeviceRange> {
        match &self.addresses {
            Addresses::Stable(range) => Some(*range),
            Addresses::OfGuards(_) => None,
        }
    }
}

impl fmt::Debug for PagedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedModel").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for PagedModel {
    fn drop(&mut self) {
        let core = self.core();
        let mut control = core.control.lock();
        if let Err(error) = reclaim::close_model(&mut control, self.id) {
            core.device.defer(error);
        }
    }
}
