//! A sentence-embedding runner (BERT, as all-MiniLM-L6-v2 is one) whose weights need not fit its card.
//!
//! | file | what it does |
//! |---|---|
//! | `config` | the model folder: `config.json`, and what is said if it is not there |
//! | `tokens` | a sentence to token ids |
//! | `bert` | the forward pass: which unit is faulted when, and what it is for |
//! | `weights` | where the weights are: paged or resident, with LoRAs or without |
//! | `compute` | the seam to the card: memory, faults and kernel launches of one stream |
//! | `kernels` | the kernels' names, arguments and host twins |
//!
//! Weights stay on the card: kernels read them at the addresses that guards give, and only the embedding
//! is copied to the host. A test includes this folder as it is.

mod bert;
mod compute;
mod config;
mod error;
mod kernels;
mod tokens;
mod weights;

pub(crate) use bert::Bert;
pub(crate) use compute::Compute;
pub(crate) use config::{FETCH, ModelFolder};
pub(crate) use error::RunnerError;
pub(crate) use tokens::Tokens;
