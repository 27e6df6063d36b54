//! Where the weights are: paged, or resident module by module. The forward pass asks here and knows no
//! difference.

use std::sync::Arc;

use vram_pager::pager::{Guard, PagedModel, PagerError, PagerStream, RowsGuard, TensorView};
use vram_pager::patcher::{
    Lora, ModelPatcher, ModuleGuard, ModuleRows, PagedPatcher, ResidentError, ResidentPatcher,
};
use vram_pager::units::DeviceRange;
use vram_pager::weights::{TensorId, TensorIndex, UnitId};

use super::error::RunnerError;

/// A model's weights on a card.
#[derive(Clone)]
pub(crate) enum Weights {
    /// Faulted page by page.
    Paged(Arc<PagedPatcher>),
    /// Loaded module by module, as far as there was room.
    Resident(Arc<ResidentPatcher>),
}

/// A unit, or a piece of one, on the card.
pub(super) enum Held<'w> {
    Paged(Guard<'w>),
    Resident(ModuleGuard<'w>),
}

impl Held<'_> {
    pub(super) fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        match self {
            Self::Paged(guard) => guard.tensor(name),
            Self::Resident(guard) => guard.tensor(name),
        }
    }
}

/// Rows of a table on the card.
pub(super) enum Rows<'w> {
    Paged(RowsGuard<'w>),
    Resident(ModuleRows),
}

impl Rows<'_> {
    pub(super) fn range(&self) -> DeviceRange {
        match self {
            Self::Paged(rows) => rows.range(),
            Self::Resident(rows) => rows.range(),
        }
    }
}

impl Weights {
    /// The handle that a manager takes.
    pub(crate) fn patcher(&self) -> Arc<dyn ModelPatcher> {
        match self {
            Self::Paged(model) => Arc::clone(model) as _,
            Self::Resident(model) => Arc::clone(model) as _,
        }
    }

    /// The paged model, if it is one.
    pub(crate) fn paged(&self) -> Option<&Arc<PagedModel>> {
        match self {
            Self::Paged(model) => Some(model.model()),
            Self::Resident(_) => None,
        }
    }

    /// Another handle to the same weights, with LoRAs.
    pub(crate) fn with_loras(&self, loras: &[Lora<'_>]) -> Result<Self, RunnerError> {
        match self {
            Self::Paged(model) => {
                let model = model.clone_model();
                model.set_loras(loras)?;
                Ok(Self::Paged(model))
            }
            Self::Resident(model) => {
                let model = model.clone_model();
                model.set_loras(loras)?;
                Ok(Self::Resident(model))
            }
        }
    }

    pub(super) fn index(&self) -> &Arc<TensorIndex> {
        match self {
            Self::Paged(model) => model.model().index(),
            Self::Resident(model) => model.index(),
        }
    }

    /// The pieces that a unit comes in.
    pub(super) fn pieces(&self, unit: UnitId) -> Result<u32, RunnerError> {
        match self {
            Self::Paged(model) => Ok(model.model().pieces(unit)?),
            Self::Resident(_) => Ok(1),
        }
    }

    /// A piece of a unit.
    pub(super) fn fault<'w>(
        &'w self,
        unit: UnitId,
        piece: u32,
        stream: &'w PagerStream,
    ) -> Result<Held<'w>, RunnerError> {
        match self {
            Self::Paged(model) => Ok(Held::Paged(model.fault_piece(unit, piece, stream)?)),
            Self::Resident(model) => Ok(Held::Resident(model.module(unit, stream.stream())?)),
        }
    }

    /// Rows of a table, packed.
    pub(super) fn rows<'w>(
        &'w self,
        table: TensorId,
        rows: &[u64],
        stream: &'w PagerStream,
    ) -> Result<Rows<'w>, RunnerError> {
        match self {
            Self::Paged(model) => Ok(Rows::Paged(model.fault_rows(table, rows, stream)?)),
            Self::Resident(model) => Ok(Rows::Resident(model.rows(table, rows, stream.stream())?)),
        }
    }
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Paged(_) => "Paged",
            Self::Resident(_) => "Resident",
        })
    }
}

/// Whether what was refused may be there once others have given theirs back.
pub(super) fn may_pass(error: &RunnerError) -> bool {
    match error {
        RunnerError::Pager(error) => {
            error.is_held() || matches!(error, PagerError::Device(error) if error.is_out_of_memory())
        }
        RunnerError::Resident(error) => error.is_held() || ResidentError::is_out_of_memory(error),
        _ => false,
    }
}
