//! The readers: a few threads that fill staging buffers from files.
//!
//! A job owns its buffer while it runs and hands it on, with the result, in its own `complete`. The
//! queue is a crossbeam channel whose places exist from the start, so that submitting allocates nothing;
//! it never blocks the submitter: depth is bounded by whoever owns the buffers, see [`MAX_JOBS`]. A job
//! that panics completes with the panic's text, and the thread goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};

/// Something that a reader does: fill a buffer, and pass it on.
pub trait ReadJob: Send + 'static {
    /// Fills the buffer that the job owns, and keeps the result.
    fn read(&mut self);

    /// Passes buffer and result on; `panic` is the text of a panic in [`Self::read`].
    fn complete(self: Box<Self>, panic: Option<String>);
}

/// The most jobs that may wait for a reader; one more is completed at once, with that as its reason.
pub const MAX_JOBS: usize = 1024;

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

/// The submitting side of a pool.
#[derive(Clone, Debug)]
pub struct ReaderQueue {
    queue: Sender<Message>,
}

impl ReaderPool {
    /// Starts `threads` (at least one) readers.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let (queue, jobs) = bounded(MAX_JOBS);
        let mut pool = Self { queue, threads: Vec::new() };
        for number in 0..threads.max(1) {
            let jobs: Receiver<Message> = jobs.clone();
            let thread =
                std::thread::Builder::new().name(format!("vram-read-{number}")).spawn(move || run(&jobs))?;
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
    /// Gives a job to the next free reader. If the pool is gone, or [`MAX_JOBS`] wait already, the job
    /// completes here, with that as its reason.
    pub fn submit(&self, job: Box<dyn ReadJob>) {
        let (refused, why) = match self.queue.try_send(Message::Job(job)) {
            Ok(()) => return,
            Err(TrySendError::Full(refused)) => (refused, "too many reads wait already"),
            Err(TrySendError::Disconnected(refused)) => (refused, "the reader threads are gone"),
        };
        if let Message::Job(job) = refused {
            job.complete(Some(why.to_owned()));
        }
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
    while let Ok(Message::Job(job)) = jobs.recv() {
        do_job(job);
    }
}

/// Does one job; it completes, whatever happens.
pub(crate) fn do_job(mut job: Box<dyn ReadJob>) {
    let panic = catch_unwind(AssertUnwindSafe(|| job.read())).err().map(|panic| {
        panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "a reader panicked".to_owned())
    });
    // `complete` must not take the thread with it: the other jobs still need it.
    let _ = catch_unwind(AssertUnwindSafe(|| job.complete(panic)));
}
