//! The function reference, section by section: one test a stated rule, named for the rule.
//!
//! Where the described system and its page disagree (twice), the tests say which one is followed.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

#[path = "../manager_support/mod.rs"]
mod manager_support;

mod entries;
mod free_memory;
mod get_free_memory;
mod load_models_gpu;
mod model_unload;
mod smaller_functions;

use std::sync::Arc;

use manager_support::*;
use vram_pager::manager::{
    Backend, FreeOptions, KeepOptions, LoadOptions, LoadedModel, Manager, ManagerError, UNLIMITED,
    UnloadOptions, VramState,
};
use vram_pager::patcher::{IdleCache, LoadBudget, ModelPatcher, Place, SizedModel, SizedSpec};

fn budgets(probe: &Probe) -> Vec<LoadBudget> {
    let calls = probe.take_calls();
    calls
        .into_iter()
        .filter_map(|call| if let Call::Load(budget, _) = call { Some(budget) } else { None })
        .collect()
}

fn bytes(mib: i64) -> i64 {
    mib * 1024 * 1024
}

fn floor() -> i64 {
    i64::try_from(FLOOR).unwrap()
}
