//! Resident models: real weights on a card, module by module.
//!
//! | file | what it does |
//! |---|---|
//! | `choose` | which modules stay on the card and which leave first: pure functions |
//! | `memory` | the card memory: one address range, frames under what is loaded |
//! | `weights` | the weights that clones share: loading, unloading, patching, streaming |
//! | `buffer` | the streaming buffer that modules outside pass through: pure bookkeeping |
//! | `rows` | some rows of a tensor, packed |
//! | `guard` | a module's addresses, valid on a stream until released |
//! | `handle` | [`ResidentPatcher`], one handle to the weights, as the manager and a runner see it |
//!
//! A module (a unit of the index) is on the card at an address that is its own for life, or it is outside.
//! One outside is copied through the streaming buffer each time it is asked for, from page-locked host
//! memory once it has passed through for the first time. Sizes are counted in pages, as the card counts
//! them, so the free figure moves by exactly what a call claims; the streaming buffer comes from the
//! activation pool and is part of no claim. (Modules in the pool would leave half of it unusable where
//! they are a little larger than its pieces.)
//!
//! Patches are applied once, when a module is loaded or streamed. Baked in (`force_patch_weights`), a module
//! on the card also has the bytes that it had before in host memory; they are put back, bit for bit, when
//! patches change. Modules outside are never baked: a change costs them nothing.
//!
//! Locking: one lock a set of weights, held while bytes are read and copies are enqueued; figures are
//! atomics beside it, so that readings never wait for a load. It is taken after the manager's and before
//! staging's and the device's. Nothing waits for a guard's release but `module_when_free`.

mod buffer;
mod choose;
mod error;
mod guard;
mod handle;
mod memory;
mod rows;
mod weights;

pub use error::ResidentError;
pub use guard::ModuleGuard;
pub use handle::ResidentPatcher;
pub use rows::ModuleRows;
pub use weights::{ResidentFigures, ResidentOptions};
