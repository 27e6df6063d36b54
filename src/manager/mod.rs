//! The memory manager: which models are on which card, who is admitted and who is evicted.
//!
//! [`Manager`] keeps a ledger of [`LoadedModel`]s. A load asks each card for the room that it needs, the
//! manager asks listed models to give memory back until there is enough, and every model gets a budget. It
//! speaks to models only through [`ModelPatcher`](crate::patcher::ModelPatcher), so paged, resident and
//! remote models are alike to it, and to cards only through [`CardFigures`].
//!
//! # The function reference, function by function
//!
//! | reference | here | what differs, and why |
//! |---|---|---|
//! | `load_models_gpu` | [`Manager::load_models_gpu`] | options are a struct; answers errors; `force_full_load` does not override `NO_VRAM` (the page says that it does, the described system does not); two clones in one call are loaded once; models that a failed call did not come to keep their entries |
//! | `get_free_memory` | [`Manager::get_free_memory`] | `torch_free_too` is [`Manager::get_free_memory_and_cache`], since a function has one type; idle frames count too |
//! | `ModelPatcher.get_free_memory` | [`Manager::get_free_memory_for`] | adds [`reclaimable`](crate::patcher::ModelPatcher::reclaimable) |
//! | `free_memory` | [`Manager::free_memory`] | options are a struct; `u64::MAX` ([`UNLIMITED`]) for `1e30`; passes over what another thread is changing |
//! | `get_total_memory` | [`Manager::get_total_memory`] | `torch_total_too` is [`Manager::get_total_memory_and_pool`] |
//! | `extra_reserved_memory` | [`Manager::extra_reserved_memory`] | [`Manager::set_extra_reserved_memory`] instead of a global to write to |
//! | `minimum_inference_memory` | [`Manager::minimum_inference_memory`] | the 0.8 GiB is a setting ([`Knobs::inference_floor`]): a small card could otherwise admit nothing |
//! | `maximum_vram_for_weights` | [`Manager::maximum_vram_for_weights`] | |
//! | `soft_empty_cache` | [`Manager::soft_empty_cache`] | does not stop the device: the pool is ordered by streams; hands idle frames back too |
//! | `unload_all_models` | [`Manager::unload_all_models`] | answers the entries |
//! | `unload_model_and_clones` | [`Manager::unload_model_and_clones`] | does what its name says; the page's sentence says the opposite, and that is [`Manager::unload_all_except`] |
//! | `loaded_models` | [`Manager::loaded_models`] | |
//! | `current_loaded_models` | [`Manager::current_loaded_models`] | a snapshot, not the list itself |
//! | `offloaded_memory` | [`Manager::offloaded_memory`] | |
//! | `use_more_memory` | [`Manager::use_more_memory`] | answers the bytes used |
//! | `cleanup_models_gc` | [`Manager::cleanup_models_gc`] | there is no collector to run: a dropped model is dead at once |
//! | `load_model_gpu` | [`Manager::load_model_gpu`] | |
//! | `LoadedModel` | [`LoadedModel`] | `model_load` takes a [`LoadBudget`](crate::patcher::LoadBudget) where the reference has a float with the special values 0, 0.1 and 1e32; `model_unload` takes `Option` |
//! | `ensure_pin_budget`, `ensure_pin_registerable` | [`Manager::ensure_pin_budget`], [`Manager::ensure_pin_registerable`] | never fail |
//! | `ModelPatcher` | [`ModelPatcher`](crate::patcher::ModelPatcher) | only what the manager calls; `clone` is a patcher's own `clone_model`, since `Arc::clone` hides the name |
//! | (none) | [`Manager::list`] | lists a model that was loaded elsewhere: a stand-in for a worker's |
//! | `VRAMState` | [`VramState`] | a live setting in [`Knobs`] |
//! | the answers of other backends | [`free_memory_rule`], [`total_memory_rule`], [`default_reserve`], [`default_min_weight_ratio`] | pure functions of a [`Backend`] |
//!
//! # Callers
//!
//! A runner asks for room for a batch of two, accepts one, and sizes its batch by what is free after the
//! load:
//!
//! ```
//! # use std::sync::Arc;
//! # use vram_pager::manager::{LinuxHost, LoadOptions, Manager};
//! # use vram_pager::patcher::{ModelPatcher, SizedCard, SizedModel, SizedSpec};
//! # const GIB: u64 = 1 << 30;
//! # let card = SizedCard::new("8 GiB", 8 * GIB);
//! # let manager = Manager::over(vec![card.clone()], Arc::new(LinuxHost::default()));
//! # let sized = |gib| SizedModel::new(SizedSpec { size: gib * GIB, ..SizedSpec::default() }, &card);
//! # let (small, large): (Arc<dyn ModelPatcher>, Arc<dyn ModelPatcher>) = (sized(2), sized(12));
//! let each = 2 * GIB;
//! let options = LoadOptions {
//!     memory_required: 2 * each,
//!     minimum_memory_required: Some(each),
//!     ..LoadOptions::default()
//! };
//! let batch_of = |model: &Arc<dyn ModelPatcher>| {
//!     manager.load_model_gpu(model, options)?;
//!     Ok::<_, vram_pager::manager::ManagerError>((manager.get_free_memory(None)? / each).clamp(1, 2))
//! };
//! assert_eq!(batch_of(&small)?, 2);
//! // The weights take what the smaller batch leaves: so much of the model stays on the card.
//! assert_eq!(batch_of(&large)?, 1);
//! assert!(large.loaded_size() > 5 * GIB);
//! # Ok::<(), vram_pager::manager::ManagerError>(())
//! ```
//!
//! A loader chooses the type of a model's weights before it has any of them:
//!
//! ```
//! # use std::sync::Arc;
//! # use vram_pager::manager::{LinuxHost, Manager, ManagerError};
//! # use vram_pager::patcher::SizedCard;
//! fn bytes_each(manager: &Manager, parameters: u64) -> Result<u64, ManagerError> {
//!     let most = manager.maximum_vram_for_weights(None)?;
//!     Ok(if parameters * 2 <= most { 2 } else { 1 })
//! }
//! # let over = |gib: u64| Manager::over(vec![SizedCard::new("", gib << 30)], Arc::new(LinuxHost::default()));
//! assert_eq!(bytes_each(&over(24), 12_000_000_000)?, 1, "fp8");
//! assert_eq!(bytes_each(&over(48), 12_000_000_000)?, 2, "f16");
//! # Ok::<(), ManagerError>(())
//! ```
//!
//! A run finds the card full, gives everything up and tries once more:
//!
//! ```
//! # use std::sync::Arc;
//! # use vram_pager::device::DeviceError;
//! # use vram_pager::manager::{LinuxHost, LoadOptions, Manager};
//! # use vram_pager::patcher::{ModelPatcher, SizedCard, SizedModel, SizedSpec};
//! # const GIB: u64 = 1 << 30;
//! # let card = SizedCard::new("8 GiB", 8 * GIB);
//! # let manager = Manager::over(vec![card.clone()], Arc::new(LinuxHost::default()));
//! # let spec = SizedSpec { size: 6 * GIB, ..SizedSpec::default() };
//! # let model: Arc<dyn ModelPatcher> = SizedModel::new(spec, &card);
//! # manager.load_model_gpu(&model, LoadOptions::default())?;
//! # let (call, requested, total) = ("decode", 7 * GIB, 8 * GIB);
//! # let mut tries = 0;
//! # let mut decode = || {
//! #     tries += 1;
//! #     match card.driver_free().unsigned_abs() {
//! #         free if free >= requested => Ok(()),
//! #         free => Err(DeviceError::OutOfMemory { device: "8 GiB".into(), call, requested, free, total }),
//! #     }
//! # };
//! match decode() {
//!     Err(error) if error.is_out_of_memory() => {
//!         manager.unload_all_models()?;
//!         decode()?;
//!     }
//!     other => other?,
//! }
//! # assert_eq!(tries, 2);
//! assert!(manager.loaded_models(false).is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Threads
//!
//! Every function may be called from any thread. Locks, outermost first: *loads* (one load at a time, held
//! throughout), then whatever patchers, pagers and devices lock, then the *ledger* (a leaf, held for a few
//! instructions and never while anything outside this module is called).
//!
//! An entry whose patcher is about to change is *claimed*. Readers see it as it was; nobody else changes
//! it. Only a load ever waits for a claim. `free_memory` waits for nothing: a worker process may ask for
//! room on one thread while another thread sits in that worker's stand-in, waiting for the worker. What
//! that costs: memory that another thread is just giving back is not counted by a second caller of
//! `free_memory`, who may unload more than it had to, or find less.
//!
//! A patcher may call the reading functions and `free_memory` from inside its methods. A load from there is
//! refused ([`ManagerError::Reentrant`]).
//!
//! # Edges
//!
//! | case | answer |
//! |---|---|
//! | nothing listed | frees nothing, answers an empty list |
//! | a request of 0 | unloads nothing, unless books are overdrawn or smart memory is off |
//! | a request of more than any card has | unloads everything; no error |
//! | sums that exceed 64 bits | count as [`UNLIMITED`]: everything else is unloaded and the load gets what there is |
//! | a model that died | its entry is gone, or its parent's, at the next call; readers skip it |
//! | a card that the manager does not know | [`ManagerError::UnknownDevice`], nothing was done |
//! | a card that is lost | [`ManagerError::Device`]; `unload_all_models` needs no figures and still works |
//! | host memory as the device | loads whole, frees nothing |
//!
//! May import: units, device, staging (the page-locked budget's rule), patcher; never pager.

#![deny(unsafe_code)]

mod admission;
mod error;
mod figures;
mod free;
mod host;
mod knobs;
mod ledger;
mod load;
mod loaded_model;
mod pins;
mod platform;
mod state;
mod stats;
mod workers;

pub use admission::UNLIMITED;
pub use error::ManagerError;
pub use figures::{CardFigures, DeviceFigures};
pub use free::{FreeOptions, KeepOptions, UnloadOptions};
pub use host::{HostFigures, HostMemoryFigures, LinuxHost};
pub use knobs::{DEFAULT_INFERENCE_FLOOR, DEFAULT_RESERVE, Knobs, VramState};
pub use load::LoadOptions;
pub use loaded_model::LoadedModel;
pub use pins::{PIN_BUDGET_SLACK, PIN_REGISTERABLE_SLACK, page_locked_budget, pin_shortfall};
pub use platform::{
    Backend, FreeFigures, Platform, RawFigures, WORKER_OVERHEAD, capped, default_min_weight_ratio,
    default_reserve, free_memory_rule, has_idle_cache, total_memory_rule,
};
pub use state::Manager;
pub use stats::{DeviceStats, ModelStats, SystemStats};
