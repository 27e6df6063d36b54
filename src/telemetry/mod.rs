//! Telemetry: what happened when in the passes of a run, for people and for trace viewers.
//!
//! A [`Recorder`] listens to a runner's loop while it is asked to; a runner without one pays nothing. What
//! it heard is a [`Recording`], a plain value. Everything that is made of one is pure: the [`Account`] of
//! each pass, a trace ([`write_trace`]), a page with pictures (`write_report`, with the feature `cli`).
//!
//! | file | what it does |
//! |---|---|
//! | `recorder` | hears passes and steps, and reads the emulated card's journal at the end |
//! | `recording` | what was heard |
//! | `residency` | where pages were over time, as many rows and columns as a screen shows |
//! | `account` | busy and stalled time of each pass, and the slowest units |
//! | `trace` | the trace event format |
//! | `report` | the page with pictures |
//!
//! Locking: one lock a recorder, taken once a step, below nothing. May import everything but the programs.

mod account;
mod recorder;
mod recording;
#[cfg(feature = "cli")]
mod report;
mod residency;
mod trace;

pub use account::{Account, SlowUnit, accounts, slowest_units};
pub use recorder::{Recorder, StepStart};
pub use recording::{
    Compute, LinkCopy, OnCard, PassRecord, Read, Recording, Stall, Step, TimeSource, TimeSpan,
};
#[cfg(feature = "cli")]
pub use report::write_report;
pub use residency::{Cell, ResidencyMap};
pub use trace::write_trace;
