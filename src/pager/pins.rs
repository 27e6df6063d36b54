//! Pinning what a fault asks for: a unit, one of its pieces, or several pieces as one.
//!
//! A hit touches the span's word alone; everything else is [`super::fault`]'s, under the control lock. What is pinned
//! when a later piece is refused is let go of again.

#![deny(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claim::Patience;
use super::error::PagerError;
use super::fault;
use super::guard::{Pinned, Streamed};
use super::model::{Addresses, PagedModel};
use super::patches::PatchSet;
use super::reclaim;
use super::replan;
use super::streams::PagerStream;
use crate::weights::{UnitId, UnitLayout};

/// How long a fault that may wait does so, while nobody releases anything, before it takes memory that
/// others still need.
const PATIENCE: Duration = Duration::from_millis(20);

impl PagedModel {
    pub(super) fn pin_piece(
        &self,
        unit: UnitId,
        piece: u32,
        stream: &PagerStream,
        set: Option<&Arc<PatchSet>>,
        patience: Patience,
    ) -> Result<Pinned, PagerError> {
        self.check_stream(stream)?;
        let spans = self.spans(unit)?;
        let Some(span) = spans.start.checked_add(piece).filter(|span| spans.contains(span)) else {
            return Err(self.not_found(format!("piece {piece} of unit {}", unit.0)));
        };
        let streamed = Streamed::one(self.pin_span(span, stream, set, patience)?);
        Ok(Pinned::new(unit, span..span + 1, streamed))
    }

    /// Tries `fault` until it finds what it needs free. One that takes several pieces lets go of those that it
    /// has when it is refused the next; two of them could undo each other for ever, so they take turns.
    pub(super) fn when_free<T>(
        &self,
        deadline: Instant,
        pieces: u32,
        mut fault: impl FnMut(Patience) -> Result<T, PagerError>,
    ) -> Result<T, PagerError> {
        let began = Instant::now();
        let (mut seen, mut seen_at) = (0, began);
        let mut turn = None;
        loop {
            // A guard that is held for long must not stop a fault that could go another way; nor must the pieces
            // of its own that one has which has the turn.
            let patient = turn.is_none() && seen_at.elapsed() < PATIENCE;
            let patience = if patient { Patience::MayWait } else { Patience::None };
            let held = match fault(patience) {
                Err(error) if error.is_held() => error,
                other => return other,
            };
            let now = Instant::now();
            if now >= deadline {
                return Err(PagerError::Deadline {
                    waited_ms: u64::try_from((now - began).as_millis()).unwrap_or(u64::MAX),
                    last: Box::new(held),
                });
            }
            if pieces > 1 && turn.is_none() {
                // If the deadline passes first, the next refusal says so.
                turn = self.core().whole_turn.try_lock_until(deadline);
                continue;
            }
            // The release of a resident unit signals nobody, since it takes no lock: look again soon.
            let mut control = self.core().control.lock();
            if control.releases != seen {
                (seen, seen_at) = (control.releases, now);
            }
            self.core().changed.wait_for(&mut control, (deadline - now).min(Duration::from_millis(1)));
        }
    }

    pub(super) fn pin_unit(
        &self,
        unit: UnitId,
        stream: &PagerStream,
        set: Option<&Arc<PatchSet>>,
        patience: Patience,
    ) -> Result<Pinned, PagerError> {
        self.check_stream(stream)?;
        let spans = self.spans(unit)?;
        if spans.end - spans.start == 1 {
            let streamed = Streamed::one(self.pin_span(spans.start, stream, set, patience)?);
            return Ok(Pinned::new(unit, spans, streamed));
        }
        // Where there is no range the pieces lie apart, and the unit has no address: that is refused below.
        let together = matches!(self.addresses, Addresses::Stable(_));
        if together && self.pin_all_if_resident(&spans, set) {
            self.count_hit();
            return Ok(Pinned::new(unit, spans, Streamed::None));
        }
        self.fault_whole(unit)?;
        let mut streamed = Vec::with_capacity(spans.len());
        for span in spans.clone() {
            match self.pin_span(span, stream, set, patience) {
                Ok(slow) => streamed.push(slow),
                Err(error) => {
                    let done = Pinned::new(unit, spans.start..span, Streamed::several(streamed));
                    done.release(self, stream);
                    return Err(error);
                }
            }
        }
        Ok(Pinned::new(unit, spans, Streamed::several(streamed)))
    }

    #[inline]
    pub(super) fn count_hit(&self) {
        if self.hits.add() {
            self.look_at_the_card();
        }
    }

    /// Follows the card's free memory, if nobody else is about to: hits never wait for the lock.
    #[cold]
    fn look_at_the_card(&self) {
        let core = self.core();
        if core.look_is_due()
            && let Some(mut control) = core.control.try_lock()
            && let Err(PagerError::Device(error)) = replan::follow_budget(core, &mut control, self.id)
        {
            core.device.defer(error);
        }
    }

    /// The hit of a unit of several spans: all or none.
    fn pin_all_if_resident(&self, spans: &std::ops::Range<u32>, set: Option<&Arc<PatchSet>>) -> bool {
        for span in spans.clone() {
            if !self.word(span).pin_if_resident(PatchSet::version_of(set, span)) {
                for pinned in spans.start..span {
                    self.word(pinned).unpin();
                }
                return false;
            }
        }
        true
    }

    /// Pins a span; answers whether its release goes the slow way.
    #[inline]
    pub(super) fn pin_span(
        &self,
        span: u32,
        stream: &PagerStream,
        set: Option<&Arc<PatchSet>>,
        patience: Patience,
    ) -> Result<bool, PagerError> {
        if self.word(span).pin_if_resident(PatchSet::version_of(set, span)) {
            self.count_hit();
            return Ok(false);
        }
        fault::fault_span(self, span, stream, set, patience)
    }

    /// A unit of several spans is faulted whole: from now on the ring is made for it.
    fn fault_whole(&self, unit: UnitId) -> Result<(), PagerError> {
        let core = self.core();
        let mut control = core.control.lock();
        let UnitLayout { bytes, spans } = self.layout.unit(unit);
        if u64::from(control.budget) * core.page_bytes < bytes.end - bytes.start {
            // A refusal should give the figures of now.
            reclaim::refresh_budget(core, &mut control, true)?;
        }
        let budget = control.budget;
        let Some(model) = control.model_mut(self.id) else { return Ok(()) };
        let whole_pieces = model.plain.is_none();
        let known = model.whole_units.contains(&unit.0);
        let pages = bytes.end.div_ceil(core.page_bytes) - bytes.start / core.page_bytes;
        if pages > u64::from(budget) || !whole_pieces {
            // A block holds one piece, and kernels need a tensor in one run.
            let largest = spans.clone().map(|span| {
                let span = self.layout.span(span).bytes;
                span.end - span.start
            });
            let limit =
                if whole_pieces { u64::from(budget) * core.page_bytes } else { largest.max().unwrap_or(0) };
            return Err(PagerError::NeverFits {
                model: self.name.clone(),
                what: format!(
                    "unit {} as a whole ({} pieces of it would fit, see fault_piece)",
                    self.index.unit_info(unit).name,
                    spans.len()
                ),
                device: core.device.info().name.clone(),
                need: pages * core.page_bytes,
                limit,
                holders: control.holders(core, self.id),
            });
        }
        if known {
            return Ok(());
        }
        model.whole_units.insert(unit.0);
        model.choices.forget();
        replan::replan(core, &mut control, self.id, true)
    }

    pub(super) fn check_stream(&self, stream: &PagerStream) -> Result<(), PagerError> {
        if Arc::ptr_eq(&stream.core, self.core()) {
            return Ok(());
        }
        Err(PagerError::OtherDevice {
            stream: stream.core.device.info().name.clone(),
            model: self.core().device.info().name.clone(),
        })
    }

    #[inline]
    pub(super) fn spans(&self, unit: UnitId) -> Result<std::ops::Range<u32>, PagerError> {
        let spans = self.layout.spans_of_unit(unit);
        spans.ok_or_else(|| self.not_found(format!("unit number {}", unit.0)))
    }

    pub(super) fn not_found(&self, what: String) -> PagerError {
        PagerError::NotFound { model: self.name.clone(), what }
    }
}
