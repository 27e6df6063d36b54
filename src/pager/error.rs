//! What a fault can answer instead of a guard.
//!
//! Three shortages are three errors: [`PagerError::Device`] with the device's out-of-memory (reclaim was
//! tried), [`PagerError::Held`] (it would fit, but guards hold what it needs now) and
//! [`PagerError::NeverFits`] (no state of this card would do).

#![deny(unsafe_code)]

use crate::device::DeviceError;
use crate::staging::StagingError;
use crate::units::{NoHostMemory, format_size};
use crate::weights::WeightsError;

/// An error of the pager.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PagerError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A file could not be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// No staging memory could be had.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// The host has no memory for the pager's own tables.
    #[error(transparent)]
    NoHostMemory(#[from] NoHostMemory),
    /// The unit, or the smallest piece of it, is larger than the card can give at best.
    #[error(
        "{model}: {what} needs {} on {device} at once ({need} bytes), and there could be at most {} ({limit} bytes){}",
        format_size(*.need), format_size(*.limit), holders_text(.holders)
    )]
    NeverFits {
        /// The model's file.
        model: String,
        /// The unit, piece or rows.
        what: String,
        /// The device's name.
        device: String,
        /// Bytes needed at once, in whole pages.
        need: u64,
        /// The most bytes that there could be.
        limit: u64,
        /// Who holds the rest, with bytes.
        holders: Vec<(String, u64)>,
    },
    /// Guards hold the memory that this fault needs. Release one and fault again.
    #[error(
        "{model}: {what} needs {} more on {device} ({need} bytes), which guards hold now: {}; release one and fault again, or take the unit in pieces",
        format_size(*.need), .held.join(", ")
    )]
    Held {
        /// The model's file.
        model: String,
        /// The unit or piece.
        what: String,
        /// The device's name.
        device: String,
        /// Bytes that are lacking.
        need: u64,
        /// The units that are held, by name.
        held: Vec<String>,
    },
    /// The unit's patches changed while a guard of the old version is held.
    #[error(
        "{model}: {what} has new patches, and a guard of the old version is still held; release it first"
    )]
    OldVersionHeld {
        /// The model's file.
        model: String,
        /// The unit.
        what: String,
    },
    /// No unit, tensor or row of this name or number.
    #[error("{model} has no {what}")]
    NotFound {
        /// The model's file.
        model: String,
        /// What was asked for.
        what: String,
    },
    /// An argument that is never right.
    #[error("{what}: {why}")]
    InvalidArgument {
        /// What was called.
        what: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The stream belongs to another card, or was registered with another pager.
    #[error("the stream belongs to {stream}, the model to {model}: take a stream of the model's own pager")]
    OtherDevice {
        /// The stream's device.
        stream: String,
        /// The model's device.
        model: String,
    },
    /// The stream is being captured into a graph, and only what is on the card and ready may be faulted then.
    #[error(
        "{model}: {what} is not ready on the card, and the stream is being captured into a graph; before the capture fault it twice with its copies waited for between, and hold the guard for every replay"
    )]
    Capturing {
        /// The model's file.
        model: String,
        /// The unit, piece or rows.
        what: String,
    },
    /// The stream is being captured into a graph: memory from the pool would belong to the graph then, and
    /// not to the card's accounts.
    #[error(
        "{device}: {bytes} bytes for activations were asked for on a stream that is being captured into a graph; allocate before the capture and keep them for every replay"
    )]
    AllocateWhileCapturing {
        /// The device's name.
        device: String,
        /// What was asked for.
        bytes: u64,
    },
    /// All 64 places for streams are taken.
    #[error("{device} has 64 registered streams already; drop one that is not used")]
    TooManyStreams {
        /// The device's name.
        device: String,
    },
    /// A deadline passed while other guards held the memory.
    #[error("gave up after {waited_ms} ms of waiting for guards of others: {last}")]
    Deadline {
        /// How long it waited, in milliseconds.
        waited_ms: u64,
        /// The last refusal.
        last: Box<PagerError>,
    },
    /// A reader thread panicked, or could not be started.
    #[error("a reader of {model} failed: {why}")]
    Reader {
        /// The model's file.
        model: String,
        /// The panic's text or the system's reason.
        why: String,
    },
}

impl PagerError {
    /// Whether the fault may succeed once other guards are released.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. } | Self::OldVersionHeld { .. })
    }

    /// Whether giving memory back and asking again may help.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Device(error) if error.is_out_of_memory())
    }
}

impl PagerError {
    /// Whether memory of the card is what is lacking.
    pub(super) fn is_shortage(&self) -> bool {
        match self {
            Self::Held { .. } | Self::NeverFits { .. } => true,
            Self::Device(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}

fn holders_text(holders: &[(String, u64)]) -> String {
    if holders.is_empty() {
        return String::new();
    }
    let all: Vec<String> =
        holders.iter().map(|(name, bytes)| format!("{name} {}", format_size(*bytes))).collect();
    format!("; the rest is held by: {}", all.join(", "))
}
