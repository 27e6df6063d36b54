//! The pager: page table, residency, fault path, streaming ring and reclaim of one card.
//!
//! | file | what it does |
//! |---|---|
//! | `card`, `model`, `guard`, `rows`, `streams`, `options`, `error` | what a runner uses |
//! | `pins`, `views` | pinning units and pieces; the tensors of what is pinned |
//! | `word`, `words` | the lock-free word of a span, the hit path; where the words lie |
//! | `fault` | the slow path of a fault, and the release of a streamed span |
//! | `claim` | a frame for each page of a faulted span |
//! | `load`, `ahead` | reads in order, and ahead of need |
//! | `copies` | the copies of claimed pages, with their fences |
//! | `keep` | what stays in staging memory for later |
//! | `convert` | the copies of a run of pages: plain, cast, patched |
//! | `patches`, `patched`, `attach` | low-rank patches: their sets, faults through one, changing it |
//! | `prefetch` | filling the ring ahead |
//! | `replan` | plans carried out: which pages stay, which slot each other one uses |
//! | `reclaim` | budget, taking frames back |
//! | `core`, `frames`, `counters` | the shared state and its accounts |
//! | `mutations` | mistakes that unit tests build in, to show that each is caught |
//! | `verify` | checking guards against the file |
//! | `plain` | whole spans in blocks, for a card without virtual memory calls |
//! | `pool_use` | what the activation pool needed lately |
//! | `plan`, `choose`, `choices`, `modelled`, `order`, `ranks`, `learner`, `ring`, `runs`, `forecast` | decisions: pure functions |
//! | `measure`, `costs` | how long the runner computes with each span; what passes teach of that and of the link |
//! | `residency` | where every page is now, for reports |
//!
//! Locking: one control lock a card, see `core`; hits take none. Invariants: between a guard's acquire
//! and release on its stream its pages are resident and hold the right bytes; no page is unmapped and no
//! frame rewritten while it is pinned or a stream that used it has not passed that use; a unit keeps its
//! address for the model's life (without virtual memory calls: for its guard's). May import `units`, `sync`, `device`, `weights`, `staging`, `transfer`.

mod activations;
mod ahead;
mod attach;
mod card;
mod choices;
mod choose;
mod claim;
mod convert;
mod copies;
mod core;
mod costs;
mod counters;
mod error;
mod fault;
mod forecast;
mod frames;
mod guard;
mod keep;
mod learner;
mod load;
mod loads;
mod measure;
mod model;
mod modelled;
mod mutations;
mod options;
mod order;
mod patched;
mod patches;
mod pins;
mod plain;
mod plan;
mod pool_use;
mod prefetch;
mod ranks;
mod reclaim;
mod replan;
mod residency;
mod ring;
mod rows;
mod runs;
#[cfg(all(test, not(loom)))]
mod small_model;
mod streams;
mod verify;
mod views;
#[cfg(test)]
#[path = "../../tests/common/watchdog.rs"]
mod watchdog;
mod word;
mod words;

pub use card::{Pager, PagerFigures};
pub(crate) use convert::{CopySource, CopyTarget, copy_run, patch_run};
pub use counters::ModelCounts;
pub use error::PagerError;
pub use forecast::{ASSUMED_LINK, CardFacts, CardSizes, Forecast, TooLarge, card_sizes, forecast};
pub(crate) use guard::names_tensor;
pub use guard::{Guard, OwnedGuard, TensorView};
pub use model::{ModelFigures, PagedModel};
pub use options::{ModelOptions, PagerOptions, WeightSource};
pub use patched::PatchedModel;
pub(crate) use patches::{DevicePatches, copy_in};
pub use patches::{Factor, PatchSet, TensorPatch};
pub use plan::RingSize;
pub use residency::PageState;
pub use rows::RowsGuard;
pub use streams::{MAX_STREAMS, PagerStream};
pub(crate) use verify::rows_on_card;
pub use verify::{CHECK_CAPACITY, Check, Mismatch, VerifiedBy, Verifier};
