//! The readers: a few threads that fill staging buffers from files.
//!
//! A read whose bytes the system has in memory is a copy by a processor, and more of them at once than there are
//! processors to spare only take turns. So half of the processors read at once, by default, and the other readers
//! join in while reads have to sleep for their disk: [`ReaderQueue::at_once`] is what whoever submits keeps to.
//!
//! A job owns its buffer while it runs and hands it on, with the result, in its own `complete`. The
//! queue is a crossbeam channel whose places exist from the start, so that submitting allocates nothing;
//! it never blocks the submitter: depth is bounded by whoever owns the buffers, see [`MAX_JOBS`]. A job
//! that panics completes with the panic's text, and the thread goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};

/// Something that a reader does: fill a buffer, and pass it on.
pub trait ReadJob: Send + 'static {
    /// Fills the buffer that the job owns, and keeps the result.
    fn read(&mut self);

    /// Whether [`Self::read`] had to sleep until its disk gave the bytes, see [`sleeps`].
    fn slept(&self) -> bool;

    /// Passes buffer and result on; `panic` is the text of a panic in [`Self::read`].
    fn complete(self: Box<Self>, panic: Option<String>);
}

/// The most jobs that may wait for a reader; one more is completed at once, with that as its reason.
pub const MAX_JOBS: usize = 1024;

enum Message {
    Job(Box<dyn ReadJob>),
    Stop,
}

/// Reads after one that slept for which all readers count.
const REMEMBERED: u32 = 16;

/// The reader threads; joined on drop, after the jobs given so far.
#[derive(Debug)]
pub struct ReaderPool {
    queue: ReaderQueue,
    threads: Vec<JoinHandle<()>>,
}

/// The submitting side of a pool.
#[derive(Clone, Debug)]
pub struct ReaderQueue {
    queue: Sender<Message>,
    /// Wakes a reader that joins in only where [`Turns::always`] have work already.
    more: Sender<()>,
    turns: Arc<Turns>,
}

/// How many read at once.
#[derive(Debug)]
struct Turns {
    threads: usize,
    /// Readers that always take jobs; the others wait to be woken.
    always: usize,
    /// Jobs that were submitted and not read.
    under_way: AtomicUsize,
    /// Reads for which the last one that slept still counts.
    slept: AtomicU32,
}

impl Turns {
    fn note(&self, slept: bool) {
        let left = self.slept.load(Ordering::Relaxed);
        self.slept.store(if slept { REMEMBERED } else { left.saturating_sub(1) }, Ordering::Relaxed);
    }
}

/// Readers of `threads` that read at once, with this many processors, from files that are in memory.
fn always(threads: usize, processors: usize) -> usize {
    threads.min(processors / 2).max(1)
}

/// Does something, and answers whether this thread had to sleep for it: whether it gave its processor away,
/// which is not the same as having it taken.
#[expect(unsafe_code, reason = "asks the system about this thread")]
pub fn sleeps<T>(work: impl FnOnce() -> T) -> (T, bool) {
    let switches = || {
        // SAFETY: all zeros is a value of this plain struct, and the call writes nothing but it.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let answer = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
        (answer == 0).then_some(usage.ru_nvcsw)
    };
    let before = switches();
    let done = work();
    (done, before != switches())
}

impl ReaderPool {
    /// Starts `threads` (at least one) readers.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with_turns(threads.max(1), always(threads, processors))
    }

    fn with_turns(threads: usize, always: usize) -> std::io::Result<Self> {
        let (queue, jobs) = bounded(MAX_JOBS);
        let (more, woken) = bounded(MAX_JOBS);
        let turns = Turns { threads, always, under_way: AtomicUsize::new(0), slept: AtomicU32::new(0) };
        let queue = ReaderQueue { queue, more, turns: Arc::new(turns) };
        let mut pool = Self { queue, threads: Vec::new() };
        for number in 0..threads {
            let (jobs, woken) = (jobs.clone(), woken.clone());
            let turns = Arc::clone(&pool.queue.turns);
            let name = format!("vram-read-{number}");
            let thread = std::thread::Builder::new().name(name).spawn(move || {
                if number < turns.always { run(&jobs, &turns) } else { join_in(&woken, &jobs, &turns) }
            })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// A handle to submit by.
    pub fn queue(&self) -> ReaderQueue {
        self.queue.clone()
    }
}

impl ReaderQueue {
    /// Gives a job to the next free reader. If the pool is gone, or [`MAX_JOBS`] wait already, the job
    /// completes here, with that as its reason.
    pub fn submit(&self, job: Box<dyn ReadJob>) {
        let before = self.turns.under_way.fetch_add(1, Ordering::Relaxed);
        let (refused, why) = match self.queue.try_send(Message::Job(job)) {
            Ok(()) => {
                if before >= self.turns.always && self.turns.threads > self.turns.always {
                    // If so many wait to be woken already, there is nothing more to wake.
                    let _ = self.more.try_send(());
                }
                return;
            }
            Err(TrySendError::Full(refused)) => (refused, "too many reads wait already"),
            Err(TrySendError::Disconnected(refused)) => (refused, "the reader threads are gone"),
        };
        self.turns.under_way.fetch_sub(1, Ordering::Relaxed);
        if let Message::Job(job) = refused {
            job.complete(Some(why.to_owned()));
        }
    }

    /// Reads that are worth having under way at once; more would wait for each other.
    pub fn at_once(&self) -> usize {
        let Turns { threads, always, slept, .. } = &*self.turns;
        if slept.load(Ordering::Relaxed) > 0 { *threads } else { *always }
    }
}

impl Drop for ReaderPool {
    fn drop(&mut self) {
        for _ in &self.threads {
            // A send fails only if every reader is gone, and then there is nobody to stop.
            let _ = self.queue.queue.send(Message::Stop);
        }
        for _ in &self.threads {
            // Woken now, it finds its stop. Where there is no room, as many are to be woken already.
            let _ = self.queue.more.try_send(());
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn run(jobs: &Receiver<Message>, turns: &Turns) {
    while let Ok(Message::Job(job)) = jobs.recv() {
        do_job(job, |slept| note_read(turns, slept));
    }
}

/// Does jobs when it is woken, as long as there are any.
fn join_in(woken: &Receiver<()>, jobs: &Receiver<Message>, turns: &Turns) {
    while let Ok(()) = woken.recv() {
        loop {
            match jobs.try_recv() {
                Ok(Message::Job(job)) => do_job(job, |slept| note_read(turns, slept)),
                // There is one for each reader, so each may take one.
                Ok(Message::Stop) => return,
                Err(_) => break,
            }
        }
    }
}

/// A job was read: the next that it submits finds this reader free.
fn note_read(turns: &Turns, slept: bool) {
    turns.under_way.fetch_sub(1, Ordering::Relaxed);
    turns.note(slept);
}

/// Does one job; it completes, whatever happens. `read` is told, before, whether its read slept.
pub(crate) fn do_job(mut job: Box<dyn ReadJob>, read: impl FnOnce(bool)) {
    let panic = catch_unwind(AssertUnwindSafe(|| job.read())).err().map(|panic| {
        panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "a reader panicked".to_owned())
    });
    read(job.slept());
    // `complete` must not take the thread with it: the other jobs still need it.
    let _ = catch_unwind(AssertUnwindSafe(|| job.complete(panic)));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Tells that it began, and ends when it is let go.
    struct Held {
        began: mpsc::Sender<()>,
        go: Receiver<()>,
        slept: bool,
        done: mpsc::Sender<()>,
    }

    impl ReadJob for Held {
        fn read(&mut self) {
            let _ = self.began.send(());
            let _ = self.go.recv();
        }

        fn slept(&self) -> bool {
            self.slept
        }

        fn complete(self: Box<Self>, _: Option<String>) {
            let _ = self.done.send(());
        }
    }

    #[test]
    fn half_of_the_processors_read_and_at_least_one() {
        let cases = [(2, 2, 1), (2, 4, 2), (4, 16, 4), (1, 16, 1), (8, 1, 1), (4, 6, 3)];
        for (threads, processors, expected) in cases {
            assert_eq!(always(threads, processors), expected, "{threads} of {processors}");
        }
    }

    #[test]
    fn all_readers_count_while_reads_sleep() {
        let turns = Turns { threads: 4, always: 1, under_way: AtomicUsize::new(0), slept: AtomicU32::new(0) };
        let queue = ReaderQueue { queue: bounded(1).0, more: bounded(1).0, turns: Arc::new(turns) };
        assert_eq!(queue.at_once(), 1);
        queue.turns.note(true);
        for _ in 0..REMEMBERED {
            assert_eq!(queue.at_once(), 4);
            queue.turns.note(false);
        }
        assert_eq!(queue.at_once(), 1);
    }

    #[test]
    fn readers_join_in_for_what_is_submitted_beyond_those_that_always_read_and_all_of_them_end() {
        for slept in [false, true] {
            let pool = ReaderPool::with_turns(3, 1).unwrap();
            let queue = pool.queue();
            let ((began, begins), (done, dones)) = (mpsc::channel(), mpsc::channel());
            let (release, go) = bounded(8);
            for _ in 0..3 {
                let (began, go, done) = (began.clone(), go.clone(), done.clone());
                queue.submit(Box::new(Held { began, go, slept, done }));
            }
            for _ in 0..3 {
                begins.recv_timeout(Duration::from_secs(60)).unwrap();
            }
            for _ in 0..3 {
                release.send(()).unwrap();
            }
            for _ in 0..3 {
                dones.recv_timeout(Duration::from_secs(60)).unwrap();
            }
            assert_eq!(queue.at_once(), if slept { 3 } else { 1 });
            // Some of these are done by readers that join in, which must leave the others' ends to them.
            for _ in 0..64 {
                let (began, go, done) = (began.clone(), go.clone(), done.clone());
                queue.submit(Box::new(Held { began, go, slept, done }));
            }
            drop(release);
            drop(pool);
            assert_eq!(dones.try_iter().count(), 64);
        }
    }

    #[test]
    fn a_thread_that_sleeps_is_told_from_one_that_works() {
        assert!(sleeps(|| std::thread::sleep(Duration::from_millis(1))).1);
        // A processor that is taken away does not count, but a debugger's or a page's stop may: once must do.
        assert!((0..100).any(|_| !sleeps(|| std::hint::black_box(17)).1));
    }
}
