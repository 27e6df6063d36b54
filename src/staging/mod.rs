//! Page-locked host memory: what a copy to the card reads from.
//!
//! [`Arena`] owns large registered blocks and cuts them into runs of slots; [`StagingBuffer`] owns one
//! run and gives it back, but not before the copies that read it are done. [`budget`] decides how much
//! of the machine's memory may be page-locked; [`LinuxHost`] reads what there is. One lock, innermost but for the
//! device's. May import `units`, `sync` and `device`.

mod arena;
mod blocks;
pub mod budget;
mod buffer;
mod host;

pub use arena::{Arena, ArenaFigures, ArenaOptions, StagingError};
pub use buffer::{Filling, StagingBuffer};
pub use host::{HostError, HostFigures, LinuxHost};
