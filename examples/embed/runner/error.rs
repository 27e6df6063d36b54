//! What can go wrong in the runner.

use std::path::PathBuf;

use vram_pager::device::DeviceError;
use vram_pager::manager::ManagerError;
use vram_pager::pager::PagerError;
use vram_pager::patcher::{LoraError, ResidentError};
use vram_pager::weights::WeightsError;

use super::config::FETCH;

/// An error of the runner.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunnerError {
    /// A file of the model is not there.
    #[error("no model at {}: run {FETCH}, or name another folder", .file.display())]
    Missing { file: PathBuf },
    /// A file of the model is there and cannot be used.
    #[error("{}: {why}", .file.display())]
    BadFile { file: PathBuf, why: String },
    /// The model is not the one that its `config.json` describes.
    #[error("{model}: {what}")]
    WrongModel { model: String, what: String },
    /// The sentence is too long for the model's position table.
    #[error("the sentence has {tokens} tokens, the model takes at most {limit}")]
    TooLong { tokens: usize, limit: u32 },
    /// There is nothing to embed.
    #[error("there are no tokens to embed")]
    NoTokens,
    /// The pager or the card.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// A resident model.
    #[error(transparent)]
    Resident(#[from] ResidentError),
    /// A LoRA.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// The memory manager.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// The card.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The weight file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

impl RunnerError {
    /// Whether the user gave something that cannot be run, rather than that running failed.
    pub(crate) fn is_bad_input(&self) -> bool {
        match self {
            Self::Missing { .. }
            | Self::BadFile { .. }
            | Self::WrongModel { .. }
            | Self::TooLong { .. }
            | Self::NoTokens
            | Self::Lora(_)
            | Self::Pager(PagerError::NeverFits { .. }) => true,
            Self::Device(error) | Self::Pager(PagerError::Device(error)) => matches!(
                error,
                DeviceError::BadDeviceString { .. } | DeviceError::Unit(_) | DeviceError::Unavailable { .. }
            ),
            Self::Weights(_) | Self::Pager(_) | Self::Resident(_) | Self::Manager(_) => false,
        }
    }
}
