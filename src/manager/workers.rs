//! The manager as the parent of worker processes: what one asks for is `free_memory`.
//!
//! Takes no lock of its own; called on a thread of the worker's connection.

#![deny(unsafe_code)]

use super::{FreeOptions, Manager};
use crate::patcher::Place;
use crate::patcher::worker::WorkerParent;

/// For cards whose driver answers device wide. Where it does not, wrap the manager and answer the other two
/// as well, see [`crate::patcher::worker`].
impl WorkerParent for Manager {
    fn make_room(&self, bytes: u64, device: Place) -> Result<(), String> {
        match self.free_memory(bytes, Some(device), &FreeOptions::default()) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}
