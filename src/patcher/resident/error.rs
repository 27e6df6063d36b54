//! What a resident model can answer instead of a module.

#![deny(unsafe_code)]

use crate::device::DeviceError;
use crate::pager::PagerError;
use crate::staging::StagingError;
use crate::units::format_size;
use crate::weights::WeightsError;

/// An error of a resident model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResidentError {
    /// The device failed, or has no memory now.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A file could not be read, or cannot be laid out.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// No staging memory could be had.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// Patches do not fit the model.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// Guards hold what this needs.
    #[error("{model}: {what} ({}, {bytes} bytes) needs what guards hold now: {}; release one and ask again",
        format_size(*.bytes), .held.join(", "))]
    Held {
        /// The model's file.
        model: String,
        /// What was asked for.
        what: String,
        /// Its size in bytes.
        bytes: u64,
        /// The modules that are held, by name.
        held: Vec<String>,
    },
    /// No module, tensor or row of this name or number.
    #[error("{model} has no {what}")]
    NotFound {
        /// The model's file.
        model: String,
        /// What was asked for.
        what: String,
    },
    /// A stream of another card.
    #[error("the stream belongs to {stream}, the model to {model}")]
    OtherDevice {
        /// The stream's device.
        stream: String,
        /// The model's device.
        model: String,
    },
    /// A deadline passed while guards of others were held.
    #[error("gave up after {waited_ms} ms of waiting for guards of others: {last}")]
    Deadline {
        /// How long it waited, in milliseconds.
        waited_ms: u64,
        /// The last refusal.
        last: Box<ResidentError>,
    },
}

impl ResidentError {
    /// Whether asking again may succeed once guards are released.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// Whether giving memory back and asking again may help.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Device(error) => error.is_out_of_memory(),
            Self::Pager(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}
