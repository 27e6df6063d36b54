//! A card in host memory: real bytes, real addresses, a hard capacity, and a modelled clock.
//!
//! Whatever would corrupt memory on a card is a typed error here: [`EmulatedDevice`] checks every range,
//! stream and event that it is given, and refuses to take memory from under work in flight. Streams run
//! on worker threads, so a copy really is in flight while the host goes on; times are modelled, so that
//! they are the same on every machine.
//!
//! | file | owns |
//! |---|---|
//! | `card` | the device, its test hooks |
//! | `options` | how it is opened |
//! | `control` | streams, events, engines |
//! | `calls` | the calls that need no stream: ranges, frames, mappings, page locks |
//! | `work` | the calls that enqueue or wait: streams, copies, launches, the pool, the clock |
//! | `pageable` | copies to the card from memory that is not page-locked |
//! | `memory` | the books: ranges, pages, frames, mappings |
//! | `usage` | the books: page-locked blocks, operations in flight, the pool's chunks |
//! | `watch` | the books: what touches the same bytes is ordered |
//! | `backing` | the memfd and its mappings |
//! | `stream` | queues and worker threads |
//! | `pool` | the activation pool's blocks |
//! | `clock` | modelled times |
//! | `fault` | failures and delays on demand |
//! | `journal` | a record of operations and their times, on demand |
//!
//! Lock order, outermost first: control (streams, events, engines), memory, a stream's queue; the
//! buffers of `pageable` by themselves. A host wait holds none. May import `units` and what `device` itself offers.

mod backing;
mod calls;
mod card;
mod clock;
mod control;
mod fault;
mod journal;
mod memory;
mod options;
mod pageable;
mod pool;
mod stream;
mod usage;
mod watch;
mod work;

pub use card::EmulatedDevice;
pub use clock::CallCosts;
pub use fault::{CallKind, Fault, FaultError};
pub use journal::{Journal, Operation, OperationKind};
pub use options::{DEFAULT_LINK, DEFAULT_PAGE_BYTES, EmulatedOptions};
pub use stream::Hold;
