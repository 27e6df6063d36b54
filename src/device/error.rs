//! What a device can answer instead of a result.
//!
//! Owns only values. Three shortages are different things and stay apart: the device has no memory now
//! ([`DeviceError::OutOfMemory`], which the pager answers with reclaim and one retry); the rest of the
//! shortages (a budget, a thing that never fits) belong to the layers above.

#![deny(unsafe_code)]

use crate::units::{UnitError, format_size};

/// An error of a device or of the way to it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has not enough memory at this moment.
    #[error(
        "{device} is out of memory: {call} asked for {}, {} of {} are free",
        format_size(*.requested), format_size(*.free), format_size(*.total)
    )]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// The call that failed.
        call: &'static str,
        /// The bytes asked for.
        requested: u64,
        /// The bytes that were free, device wide.
        free: u64,
        /// The device's size in bytes.
        total: u64,
    },
    /// The device cannot do this at all.
    #[error("{device} cannot {what}; {advice}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// What was asked.
        what: String,
        /// What to do instead.
        advice: String,
    },
    /// An argument that no state of the device would make right.
    #[error("{call}: {why}")]
    InvalidArgument {
        /// The call.
        call: &'static str,
        /// What is wrong.
        why: String,
    },
    /// A use that would corrupt memory on a card: a range freed twice, a mapping over a mapping, a copy
    /// outside what is mapped, a page unmapped under work in flight, a stream that is gone.
    #[error("misuse of the device in {call}: {why}")]
    Misuse {
        /// The call.
        call: &'static str,
        /// What is wrong, naming both sides where two calls collide.
        why: String,
    },
    /// What would become a part of the graph that a stream is being captured into.
    #[error("{call}: the stream is being captured into a graph; call again when that is over")]
    Capturing {
        /// The call.
        call: &'static str,
    },
    /// The device failed earlier and answers nothing any more.
    #[error("{device} is lost; the first failure was: {first}")]
    Lost {
        /// The device's name.
        device: String,
        /// The first failure's text.
        first: String,
    },
    /// The driver refused a call with a code of its own.
    #[error("the driver refused {call} with {name} ({code})")]
    Driver {
        /// The driver's call.
        call: &'static str,
        /// Its code.
        code: i32,
        /// The code's name, or `unknown`.
        name: String,
    },
    /// There is no such device here.
    #[error("no device {device}: {why}; {advice}")]
    Unavailable {
        /// The device string.
        device: String,
        /// Why it cannot be opened.
        why: String,
        /// What to do.
        advice: String,
    },
    /// A device string that cannot be read.
    #[error("`{text}` is not a device: {why}; write for example `{example}`")]
    BadDeviceString {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
        /// A right spelling.
        example: &'static str,
    },
    /// A size or a rate inside a device string cannot be read.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// No kernel of this name is registered.
    #[error("{device} knows no kernel `{name}`")]
    UnknownKernel {
        /// The device's name.
        device: String,
        /// The kernel's name.
        name: String,
    },
    /// The backend's own code panicked; what it had done by then is not known.
    #[error("{device} panicked in {call}: {why}")]
    Panicked {
        /// The device's name.
        device: String,
        /// The call.
        call: &'static str,
        /// What the panic said.
        why: String,
    },
    /// The host refused memory, a mapping or a thread.
    #[error("the host refused {call} ({bytes} bytes): {why}")]
    Host {
        /// The call.
        call: &'static str,
        /// The bytes asked for.
        bytes: u64,
        /// The system's reason.
        why: String,
    },
}

impl DeviceError {
    /// Whether giving memory back and asking again may help.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }

    /// Whether the device will never answer again.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// Whether the caller broke a rule that would corrupt memory on a card.
    pub fn is_misuse(&self) -> bool {
        matches!(self, Self::Misuse { .. })
    }
}
