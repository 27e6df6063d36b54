//! Streams as queues with a worker thread each: work runs in order, beside the host and other streams.
//!
//! Owns the queues and the worker's loop. An operation is a plain value; in steady state enqueueing one
//! allocates nothing. The operation in progress stays at the front of its queue until it is done, so that
//! a collision can name it. A worker holds the queue, the memory and the list of deferred errors, never
//! the device, so dropping the device can join it.
//!
//! Locking: one lock a queue, the innermost of the device. A worker takes it, the memory lock, and it
//! again, never two at once. Every completion is published under the queue's lock, which orders the
//! worker's writes before the reads of whoever waited. May import `kernels`, `units`.

#![expect(unsafe_code, reason = "workers move bytes between addresses that were checked at enqueueing")]

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::control::Shared;
use super::fault::delay;
use super::usage::HostSpan;
use super::watch::Seen;
use crate::device::kernels::{HostTwin, KernelArg, Launch, MAX_KERNEL_ARGS, TwinArg};
use crate::device::{DeviceError, StreamId};
use crate::units::{DeviceRange, ModelTime};

/// Operations that a queue holds before it has to grow.
const QUEUE_CAPACITY: usize = 256;

/// One operation: a plain value.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a launch in a box would be an allocation an operation")]
pub(super) enum Work {
    /// The bytes of `from` lie in a buffer meanwhile if they go `through` one.
    ToDevice {
        to: DeviceRange,
        from: HostSpan,
        through: Option<HostSpan>,
    },
    ToHost {
        to: HostSpan,
        from: DeviceRange,
    },
    OnDevice {
        to: DeviceRange,
        from: DeviceRange,
    },
    Fill {
        to: DeviceRange,
        value: u8,
    },
    Launch {
        launch: Launch,
        twin: HostTwin,
    },
    Wait(Point),
    Hold(Arc<HoldState>),
}

impl Work {
    /// The call that enqueued it.
    pub(super) fn call(&self) -> &'static str {
        match self {
            Self::ToDevice { .. } => "copy_to_device",
            Self::ToHost { .. } => "copy_to_host",
            Self::OnDevice { .. } => "copy_on_device",
            Self::Fill { .. } => "fill",
            Self::Launch { .. } => "launch",
            Self::Wait(_) => "stream_wait",
            Self::Hold(_) => "hold",
        }
    }

    /// The device ranges that it touches.
    pub(super) fn ranges(&self) -> ([DeviceRange; MAX_KERNEL_ARGS], usize) {
        let mut all = [DeviceRange::default(); MAX_KERNEL_ARGS];
        let mut len = 0;
        let mut add = |range: DeviceRange| {
            all[len] = range;
            len += 1;
        };
        match self {
            Self::ToDevice { to: range, .. }
            | Self::ToHost { from: range, .. }
            | Self::Fill { to: range, .. } => add(*range),
            Self::OnDevice { to, from } => {
                add(*to);
                add(*from);
            }
            Self::Launch { launch, .. } => {
                for arg in launch.args.as_slice() {
                    if let KernelArg::Read(range) | KernelArg::Write(range) = arg {
                        add(*range);
                    }
                }
            }
            Self::Wait(_) | Self::Hold(_) => {}
        }
        (all, len)
    }

    /// Whether it writes the device range of this place in [`Self::ranges`].
    pub(super) fn writes(&self, place: usize) -> bool {
        match self {
            Self::ToDevice { .. } | Self::Fill { .. } => true,
            Self::OnDevice { .. } => place == 0,
            Self::Launch { launch, .. } => {
                let ranges = launch.args.as_slice().iter();
                let mut ranges = ranges.filter(|arg| matches!(arg, KernelArg::Read(_) | KernelArg::Write(_)));
                matches!(ranges.nth(place), Some(KernelArg::Write(_)))
            }
            Self::ToHost { .. } | Self::Wait(_) | Self::Hold(_) => false,
        }
    }

    /// The host memory that it touches, to be marked as counted.
    pub(super) fn host_mut(&mut self) -> Option<&mut HostSpan> {
        match self {
            Self::ToDevice { from: span, .. } | Self::ToHost { to: span, .. } => Some(span),
            _ => None,
        }
    }

    /// The host memory that it touches.
    pub(super) fn host(&self) -> Option<HostSpan> {
        match self {
            Self::ToDevice { from: span, .. } | Self::ToHost { to: span, .. } => Some(*span),
            _ => None,
        }
    }
}

/// A point of a stream: all work up to a sequence number, and its modelled time.
#[derive(Clone)]
pub(super) struct Point {
    pub(super) stream: Arc<StreamQueue>,
    pub(super) sequence: u64,
    pub(super) time: ModelTime,
    /// What the stream had waited for by then; none where memory in use is not watched.
    pub(super) seen: Option<Arc<Seen>>,
}

impl Point {
    /// Whether the work has really been done.
    pub(super) fn is_complete(&self) -> bool {
        self.stream.queue.lock().completed >= self.sequence
    }

    /// Adds the point, and what its stream had waited for, to what is seen.
    pub(super) fn add_to(&self, seen: &mut Seen) {
        if let Some(own) = &self.seen {
            seen.join(own);
        }
        seen.note(self.stream.id.0, self.sequence);
    }

    /// Blocks until the work has really been done.
    pub(super) fn wait(&self) {
        let mut queue = self.stream.queue.lock();
        while queue.completed < self.sequence {
            self.stream.done.wait(&mut queue);
        }
    }
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {} #{} at {} ns", self.stream.id.0, self.sequence, self.time.0)
    }
}

#[derive(Debug)]
struct Queue {
    /// Unfinished work; the front is in progress.
    work: VecDeque<Work>,
    enqueued: u64,
    completed: u64,
    closed: bool,
}

/// A stream's queue.
#[derive(Debug)]
pub(super) struct StreamQueue {
    id: StreamId,
    /// Whether nobody works on the queue: work is done as it comes.
    inline: bool,
    queue: Mutex<Queue>,
    /// Something was enqueued, or the queue was closed.
    added: Condvar,
    /// Something was completed.
    done: Condvar,
}

impl StreamQueue {
    /// An empty queue; with `inline`, work counts as done when it is enqueued and never runs.
    pub(super) fn new(id: StreamId, inline: bool) -> Self {
        let work = VecDeque::with_capacity(if inline { 0 } else { QUEUE_CAPACITY });
        Self {
            id,
            inline,
            queue: Mutex::new(Queue { work, enqueued: 0, completed: 0, closed: false }),
            added: Condvar::new(),
            done: Condvar::new(),
        }
    }

    pub(super) fn id(&self) -> StreamId {
        self.id
    }

    /// Enqueues work.
    pub(super) fn push(&self, work: Work) {
        let mut queue = self.queue.lock();
        queue.enqueued += 1;
        if self.inline {
            queue.completed += 1;
        } else {
            queue.work.push_back(work);
            self.added.notify_one();
        }
    }

    /// The number of the newest work.
    pub(super) fn enqueued(&self) -> u64 {
        self.queue.lock().enqueued
    }

    /// Lets the worker end when everything is done.
    pub(super) fn close(&self) {
        self.queue.lock().closed = true;
        self.added.notify_one();
    }

    /// The first unfinished operation that `concerns`: its call and number.
    pub(super) fn find(&self, concerns: impl Fn(&Work) -> bool) -> Option<(&'static str, u64)> {
        let queue = self.queue.lock();
        let index = queue.work.iter().position(concerns)?;
        Some((queue.work[index].call(), queue.completed + 1 + index as u64))
    }
}

/// What holds a stream back until it is let go.
#[derive(Debug, Default)]
pub(super) struct HoldState {
    released: Mutex<bool>,
    changed: Condvar,
}

impl HoldState {
    pub(super) fn release(&self) {
        *self.released.lock() = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let mut released = self.released.lock();
        while !*released {
            self.changed.wait(&mut released);
        }
    }
}

/// Holds a stream back at one point until this is dropped: a test hook, see
/// [`super::EmulatedDevice::hold`].
#[derive(Debug)]
#[must_use = "the stream runs on as soon as this is dropped"]
pub struct Hold {
    pub(super) state: Arc<HoldState>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.state.release();
    }
}

/// How long a worker looks for more work before it sleeps. To be woken takes longer, and where there are two
/// processors the system runs who is woken on the one of its waker, while the other does nothing.
const LOOKS: Duration = Duration::from_micros(300);

/// Gives the processor to others until there is work, for as long as that is worth it.
fn look_for_work(stream: &StreamQueue) {
    let began = Instant::now();
    loop {
        let queue = stream.queue.lock();
        if !queue.work.is_empty() || queue.closed {
            return;
        }
        drop(queue);
        if began.elapsed() > LOOKS {
            return;
        }
        std::thread::yield_now();
    }
}

/// The loop of a stream's worker thread.
pub(super) fn run_worker(stream: &StreamQueue, shared: &Shared) {
    loop {
        look_for_work(stream);
        let (work, sequence) = {
            let mut queue = stream.queue.lock();
            loop {
                if let Some(front) = queue.work.front() {
                    break (front.clone(), queue.completed + 1);
                }
                if queue.closed {
                    return;
                }
                stream.added.wait(&mut queue);
            }
        };
        let delay = delay(shared.delay_seed.load(Ordering::Relaxed), stream.id.0, sequence);
        pause(delay.before);
        if let Err(why) = execute(&work) {
            let call = work.call();
            let why = format!("{call} enqueued at stream {} #{sequence}: {why}", stream.id.0);
            shared.defer(DeviceError::Misuse { call, why });
        }
        pause(delay.after);
        shared.memory.lock().end(&work);
        drop(work);
        let finished = {
            let mut queue = stream.queue.lock();
            queue.completed = sequence;
            stream.done.notify_all();
            queue.work.pop_front()
        };
        drop(finished);
    }
}

fn pause(duration: Duration) {
    if !duration.is_zero() {
        std::thread::sleep(duration);
    }
}

/// Runs one operation.
fn execute(work: &Work) -> Result<(), String> {
    match *work {
        // SAFETY: the device range was checked at enqueueing to be accessible, and stays so because every
        // page of it is counted as in use until `Memory::end`; that the host's side is valid until then is
        // the promise of whoever made the unsafe call, and `pageable`'s for its buffers.
        Work::ToDevice { to, from, through } => unsafe {
            copy_past_caches(through.unwrap_or(from).pointer(), device_pointer(to), to.bytes);
        },
        // SAFETY: as above, with the roles exchanged.
        Work::ToHost { to, from } => unsafe { copy(device_pointer(from), to.pointer(), from.bytes) },
        // SAFETY: both ranges were checked at enqueueing and are counted as in use.
        Work::OnDevice { to, from } => unsafe { copy(device_pointer(from), device_pointer(to), to.bytes) },
        Work::Fill { to, value } => {
            if to.bytes > 0 {
                // SAFETY: the range was checked at enqueueing and is counted as in use.
                unsafe { std::ptr::write_bytes(device_pointer(to), value, length(to.bytes)) };
            }
        }
        Work::Launch { ref launch, twin } => return run_twin(launch, twin),
        Work::Wait(ref point) => point.wait(),
        Work::Hold(ref state) => state.wait(),
    }
    Ok(())
}

/// A device address as the pointer that it is here, where the device lives in host memory.
fn device_pointer(range: DeviceRange) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(length(range.start.0))
}

/// A number of bytes that lies in this process's address space.
fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Copies bytes that may overlap (two addresses may stand for one frame).
///
/// # Safety
/// Both pointers are valid for `bytes` bytes, unless `bytes` is zero.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: u64) {
    if bytes > 0 {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(from, to, length(bytes)) };
    }
}

/// Bytes from which on a copy goes past the caches.
#[cfg(all(target_arch = "x86_64", not(sanitized)))]
const PAST_CACHES: u64 = 256 << 10;

/// As [`copy`], and leaves the target out of the processor's caches if it is large: no card's memory is in there, and
/// what a reader has just put there would have to make room for it.
///
/// # Safety
/// As [`copy`].
#[cfg_attr(
    all(target_arch = "x86_64", not(sanitized)),
    expect(clippy::cast_ptr_alignment, reason = "loads need none, and stores go to lines of 64 bytes")
)]
unsafe fn copy_past_caches(from: *const u8, to: *mut u8, bytes: u64) {
    // Sanitizers do not see such stores.
    #[cfg(all(target_arch = "x86_64", not(sanitized)))]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        const LINE: usize = 64;
        let length = length(bytes);
        let apart = from.addr().abs_diff(to.addr()) >= length;
        if bytes >= PAST_CACHES && apart && to.addr().is_multiple_of(LINE) {
            let whole = length / LINE * LINE;
            // SAFETY: the caller's promise; the ranges are apart, and every access lies in the first `whole` bytes.
            unsafe {
                for at in (0..whole).step_by(LINE) {
                    let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
                    let line = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
                    for (part, bytes) in line.into_iter().enumerate() {
                        _mm_stream_si128(to.add(part), bytes);
                    }
                }
                // Such stores are ordered by nothing else.
                _mm_sfence();
                std::ptr::copy_nonoverlapping(from.add(whole), to.add(whole), length - whole);
            }
            return;
        }
    }
    // SAFETY: the caller's promise.
    unsafe { copy(from, to, bytes) };
}

fn run_twin(launch: &Launch, twin: HostTwin) -> Result<(), String> {
    let mut args: [TwinArg<'_>; MAX_KERNEL_ARGS] = [const { TwinArg::U32(0) }; MAX_KERNEL_ARGS];
    let given = launch.args.as_slice();
    for (slot, arg) in args.iter_mut().zip(given) {
        *slot = match *arg {
            KernelArg::Read(range) if range.bytes == 0 => TwinArg::Read(&[]),
            KernelArg::Write(range) if range.bytes == 0 => TwinArg::Write(&mut []),
            // SAFETY: the range was checked at enqueueing and is counted as in use; no written range of
            // the launch overlaps it; other work that writes it is ordered by the launch's caller.
            KernelArg::Read(range) => TwinArg::Read(unsafe {
                std::slice::from_raw_parts(device_pointer(range), length(range.bytes))
            }),
            // SAFETY: as above, and no other argument overlaps it (checked at enqueueing).
            KernelArg::Write(range) => TwinArg::Write(unsafe {
                std::slice::from_raw_parts_mut(device_pointer(range), length(range.bytes))
            }),
            KernelArg::U32(value) => TwinArg::U32(value),
            KernelArg::U64(value) => TwinArg::U64(value),
            KernelArg::F32(value) => TwinArg::F32(value),
        };
    }
    let args = &mut args[..given.len()];
    catch_unwind(AssertUnwindSafe(|| twin(args))).unwrap_or_else(|_| Err("the kernel's twin panicked".into()))
}
