//! The memory manager: which models are on which card, who is admitted, who is evicted.

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
