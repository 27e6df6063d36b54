//! A real worker: a second process that holds a model's weights on the same card.
//!
//! The parent starts it ([`WorkerProcess`]), tells it to load and to give memory back, and answers when it
//! asks for room ([`WorkerParent`], which is the manager's `free_memory` with the bytes, the device and all
//! else default). The child serves one parent ([`serve`]) over a Unix socket.
//!
//! | file | what it does |
//! |---|---|
//! | `protocol` | frames and messages: length-prefixed JSON, versioned, refusing anything else |
//! | `client` | the parent's side: the process, its connection, and what it holds |
//! | `start` | the child process, the connection and the greeting |
//! | `server` | the child's side: a pager with one model, loaded and unloaded when told |
//!
//! # Whose figures show the worker
//! A card's driver answers device wide, so each side sees the other's bytes there, and nothing more is
//! needed. Where the driver's figure is per process, and on the emulated card, which lives in one process,
//! the other side is invisible. Then each tells the other: the worker says after every change what it holds
//! ([`WorkerParent::worker_holds`]), and the parent says with every request what the worker cannot see
//! ([`WorkerParent::hidden_from_worker`]), which the worker leaves free as if it were headroom.
//!
//! # Threads and locks
//! In the parent one thread a worker reads its messages and delivers answers to those who wait; it waits
//! for nobody. A request for room is served on a thread of its own, since it may ask this same worker to
//! give memory back. In the child one thread reads and unloads, another loads: so a worker that waits for
//! room still gives memory back. No lock is held while either side waits for the other, so there is no
//! circle through the socket.

#![deny(unsafe_code)]

mod client;
mod protocol;
mod server;
mod start;

pub use client::{WorkerError, WorkerParent, WorkerProcess};
pub use protocol::{FrameError, MAX_FRAME_BYTES, PROTOCOL_MAGIC, PROTOCOL_VERSION};
pub use server::{ServeError, ServeOptions, serve};
pub use start::WorkerOptions;
