//! A model seen through a patch set: the same faults, patched bytes.

#![deny(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use super::claim::Patience;
use super::error::PagerError;
use super::fault;
use super::guard::{Guard, OwnedGuard};
use super::model::PagedModel;
use super::patches::PatchSet;
use super::rows::{self, RowsGuard};
use super::streams::PagerStream;
use crate::weights::{TensorId, UnitId};

/// A model with a patch set. A fault through it attaches the set if another one is attached, which makes
/// what the two sets differ in be loaded anew.
#[derive(Clone, Copy, Debug)]
pub struct PatchedModel<'m> {
    model: &'m PagedModel,
    set: &'m Arc<PatchSet>,
}

impl<'m> PatchedModel<'m> {
    pub(super) fn new(model: &'m PagedModel, set: &'m Arc<PatchSet>) -> Self {
        Self { model, set }
    }

    /// As [`PagedModel::fault`].
    ///
    /// # Errors
    /// Also [`PagerError::OldVersionHeld`] while a guard of another version of the unit is held.
    pub fn fault(&self, unit: UnitId, stream: &'m PagerStream) -> Result<Guard<'m>, PagerError> {
        let pinned = self.model.pin_unit(unit, stream, Some(self.set), Patience::None)?;
        Ok(Guard::new(self.model, stream, pinned))
    }

    /// As [`PagedModel::fault_when_free`].
    pub fn fault_when_free(
        &self,
        unit: UnitId,
        stream: &'m PagerStream,
        deadline: Instant,
    ) -> Result<Guard<'m>, PagerError> {
        self.model.when_free(deadline, self.model.pieces(unit)?, |patience| {
            let pinned = self.model.pin_unit(unit, stream, Some(self.set), patience)?;
            Ok(Guard::new(self.model, stream, pinned))
        })
    }

    /// As [`PagedModel::fault_piece`].
    pub fn fault_piece(
        &self,
        unit: UnitId,
        piece: u32,
        stream: &'m PagerStream,
    ) -> Result<Guard<'m>, PagerError> {
        let pinned = self.model.pin_piece(unit, piece, stream, Some(self.set), Patience::None)?;
        Ok(Guard::new(self.model, stream, pinned))
    }

    /// As [`PagedModel::fault_rows`].
    pub fn fault_rows(
        &self,
        tensor: TensorId,
        rows: &[u64],
        stream: &'m PagerStream,
    ) -> Result<RowsGuard<'m>, PagerError> {
        self.model.check_stream(stream)?;
        rows::fault_rows(self.model, tensor, rows, stream, Some(self.set))
    }
}

/// Faults with a set that the guard does not borrow, for those who keep it behind a lock.
impl PagedModel {
    /// Makes what is on the card be made with `set` from now on, as the first fault through it would: its
    /// factors are brought to the card, and what the two sets differ in is loaded anew when it is faulted.
    pub fn attach(&self, set: Option<&Arc<PatchSet>>) -> Result<(), PagerError> {
        fault::ensure_attached(self, &mut self.core().control.lock(), set)
    }

    /// As [`PagedModel::fault_piece`], with patches or none.
    pub fn fault_piece_with<'m>(
        &'m self,
        set: Option<&Arc<PatchSet>>,
        unit: UnitId,
        piece: u32,
        stream: &'m PagerStream,
    ) -> Result<Guard<'m>, PagerError> {
        Ok(Guard::new(self, stream, self.pin_piece(unit, piece, stream, set, Patience::None)?))
    }

    /// As [`PagedModel::fault`], with patches or none.
    pub fn fault_with<'m>(
        &'m self,
        set: Option<&Arc<PatchSet>>,
        unit: UnitId,
        stream: &'m PagerStream,
    ) -> Result<Guard<'m>, PagerError> {
        Ok(Guard::new(self, stream, self.pin_unit(unit, stream, set, Patience::None)?))
    }

    /// As [`PagedModel::fault_rows`], with patches or none.
    pub fn fault_rows_with<'m>(
        &'m self,
        set: Option<&Arc<PatchSet>>,
        tensor: TensorId,
        rows: &[u64],
        stream: &'m PagerStream,
    ) -> Result<RowsGuard<'m>, PagerError> {
        self.check_stream(stream)?;
        rows::fault_rows(self, tensor, rows, stream, set)
    }

    /// Tries `fault` again while guards of others hold what it needs, until `deadline`.
    pub fn retry_while_held<T>(
        &self,
        deadline: Instant,
        mut fault: impl FnMut() -> Result<T, PagerError>,
    ) -> Result<T, PagerError> {
        self.when_free(deadline, 1, |_| fault())
    }

    /// As [`PagedModel::fault_owned`], with patches.
    pub fn fault_patched_owned(
        self: &Arc<Self>,
        set: Option<&Arc<PatchSet>>,
        unit: UnitId,
        stream: &Arc<PagerStream>,
    ) -> Result<OwnedGuard, PagerError> {
        let pinned = self.pin_unit(unit, stream, set, Patience::None)?;
        Ok(OwnedGuard::new(Arc::clone(self), Arc::clone(stream), pinned))
    }
}
