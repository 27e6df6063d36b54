//! Moving bytes: file to staging by several readers, staging to card on a few streams.
//!
//! [`ReaderPool`] owns the reader threads, [`CopyEngine`] the copy streams and the fences. Neither knows
//! what the bytes are for; the pager decides order and depth. Reader threads hold no `Arc` of the pool or
//! of what submitted to it. May import `units`, `sync`, `device`, `weights` and `staging`.

mod convert;
mod engine;
mod meter;
mod reader;

pub use convert::{cast_bytes, cut_extents, float_type, is_cast_on_card, read_extents};
pub use engine::{Batch, CopyEngine};
#[cfg(all(test, loom))]
pub(crate) use reader::do_job;
pub use reader::{MAX_JOBS, ReadJob, ReaderPool, ReaderQueue, sleeps};
