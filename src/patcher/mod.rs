//! What the memory manager can load: the [`ModelPatcher`] trait and its implementations.
//!
//! A patcher is a handle to one model's weights together with the patches that apply to them. The manager
//! asks it how large it is and how much of it is on its card, and tells it to load more, give some back
//! or leave. Several handles (clones) may share one set of weights.
//!
//! Owns the trait, the values that pass through it, and the patchers that come with the crate:
//! [`PagedPatcher`] is a model of the pager, [`ResidentPatcher`] one whose modules are loaded whole as far as
//! there is room, [`StandIn`] one that a [`worker`] process holds, [`SizedModel`] one that is nothing but
//! sizes, for replays and tests. [`LoraFile`] reads the patches that the first two take.
//!
//! Locking: a patcher takes `&self` and locks for itself. The manager holds none of its short locks while
//! it calls one; see [`ModelPatcher`] for what a patcher may do from inside such a call.
//!
//! May import: units, device, weights, staging, transfer, pager.

#![deny(unsafe_code)]

mod dynamic;
mod lora;
mod model;
mod resident;
mod sized;
mod stand_in;
pub mod worker;

pub use dynamic::PagedPatcher;
pub use lora::{Lora, LoraError, LoraFile, LoraPatches, PREFIXES as LORA_PREFIXES, lora_patches};
pub use model::{
    CardLimits, IdleCache, LoadBudget, ModelPatcher, ModelUuid, PatcherCounters, PatcherError, Place,
};
pub use resident::{
    ModuleGuard, ModuleRows, ResidentError, ResidentFigures, ResidentOptions, ResidentPatcher,
};
pub use sized::{SizedCard, SizedModel, SizedSpec};
pub use stand_in::{StandIn, Worker, WorkerGone};
