//! What the manager answers instead of a result.
//!
//! Owns values only.

#![deny(unsafe_code)]

use crate::device::DeviceError;
use crate::patcher::{PatcherError, Place};
use crate::units::format_size;

/// An error of the memory manager.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManagerError {
    /// The manager has no such card.
    #[error("there is no {place} here, the manager knows {known} cards; {what}")]
    UnknownDevice {
        /// What was named.
        place: Place,
        /// How many cards there are.
        known: usize,
        /// Who named it.
        what: String,
    },
    /// A card did not answer for its memory.
    #[error("{place} cannot say how much memory it has: {source}")]
    Device {
        /// The card.
        place: Place,
        /// Its answer.
        source: DeviceError,
    },
    /// The machine did not say how much memory it has.
    #[error("the machine's memory cannot be read: {why}")]
    Host {
        /// Why not.
        why: String,
    },
    /// A model failed to load. Those named after it in the call were loaded and stay, it is not listed and
    /// holds nothing, and what was evicted for it stays evicted.
    #[error("{model} ({}) could not be loaded to {place}: {source}", format_size(*.bytes))]
    Load {
        /// The model's label.
        model: String,
        /// Its size in bytes.
        bytes: u64,
        /// Where it was to go.
        place: Place,
        /// The patcher's answer.
        source: PatcherError,
    },
    /// A model was to be loaded from inside a patcher's call that a load is waiting for.
    #[error(
        "{what} was called from inside a call of the manager to a patcher on the same thread; loads cannot nest"
    )]
    Reentrant {
        /// The function.
        what: &'static str,
    },
}

impl ManagerError {
    /// Whether giving memory back (`unload_all_models`) and asking again may help.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Load { source, .. } => source.is_out_of_memory(),
            Self::Device { source, .. } => source.is_out_of_memory(),
            _ => false,
        }
    }
}
