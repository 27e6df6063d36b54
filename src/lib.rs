#![doc = include_str!("../README.md")]
//!
//! # Where to go next
//!
//! | you want to | look at |
//! |---|---|
//! | open a card, real or emulated | [`device::open`], [`device::emulated::EmulatedDevice`] |
//! | read a weight file | [`weights::TensorIndex`] |
//! | fault weights | [`pager::Pager`], [`pager::PagedModel`], [`pager::Guard`] |
//! | apply patches | [`pager::PatchSet`], [`pager::PagedModel::patched`] |
//! | check what is on the card | [`pager::Verifier`] |
//! | know what a card would make of a model | [`pager::forecast`], [`pager::card_sizes`] |
//! | see why a step was slow | [`telemetry::Recorder`] |
//! | decide who is on the card | [`manager::Manager`], [`patcher::ModelPatcher`] |
//!
//! ```text
//! safetensors file → TensorIndex → PageLayout → staging → copies → page table → guard → your kernel
//! Manager → LoadedModel → ModelPatcher → Pager
//! ```

pub mod device;
pub mod manager;
pub mod pager;
pub mod patcher;
pub mod staging;
mod sync;
pub mod telemetry;
pub mod transfer;
pub mod units;
pub mod weights;
