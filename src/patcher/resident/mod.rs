//! Resident models: real weights on a card, module by module.
//!
//! | file | what it does |
//! |---|---|
//! | `choose` | which modules stay on the card and which leave first: pure functions |
//! | `weights` | the weights that clones share: loading, unloading, patching, streaming |
//! | `buffer` | the streaming buffer that modules outside pass through: pure bookkeeping |
//! | `rows` | some rows of a tensor, packed |
//! | `guard` | a module's addresses, valid on a stream until released |
//! | `handle` | [`ResidentPatcher`], one handle to the weights, as the manager and a runner see it |
//!
//! A module (a unit of the index) is on the card in an allocation of its own from the activation pool, or
//! it is outside. One outside is copied through the streaming buffer each time it is asked for, from
//! page-locked host memory once it has passed through for the first time. The pool and not frames, since
//! a frame a module would cost whole granules: small modules would take many times their bytes. What is
//! freed goes back to the device as far as the pool's pieces permit, and what they do not is idle cache,
//! which counts as free: so the free figure moves by exactly what a call claims.
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
mod rows;
mod weights;

pub use error::ResidentError;
pub use guard::ModuleGuard;
pub use handle::ResidentPatcher;
pub use rows::ModuleRows;
pub use weights::{ResidentFigures, ResidentOptions};
