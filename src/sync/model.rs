//! What the models of the concurrency share. They run under loom, which tries the orders of their threads'
//! steps and every value that a load may give, with a bounded number of preemptions.
//!
//! Host threads are loom's threads. Work that is given to a stream is a thread too: it begins when it is
//! enqueued, waits for [`Mark`]s as a stream waits for fences, and passes one as a stream passes a fence.
//! Memory that the device or the host touches is [`Bytes`]: loom refuses any two touches, one of them a
//! write, that nothing orders.
//!
//! `tests/models.sh` runs all of them. `LOOM_MAX_PREEMPTIONS` sets the bound.

#![expect(unsafe_code, reason = "touches memory that loom watches")]

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};

use super::Owners;

/// The preemptions that are tried if the environment names no other number.
const PREEMPTIONS: usize = 2;

/// Runs a model in every order.
pub(crate) fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(model);
}

/// Memory that somebody may touch at the wrong time.
#[derive(Debug)]
pub(crate) struct Bytes(UnsafeCell<u64>);

impl Bytes {
    pub(crate) fn new(value: u64) -> Self {
        Self(UnsafeCell::new(value))
    }

    pub(crate) fn read(&self) -> u64 {
        // SAFETY: loom panics before a read that is not ordered with every write.
        self.0.with(|bytes| unsafe { *bytes })
    }

    pub(crate) fn write(&self, value: u64) {
        // SAFETY: loom panics before a write that is not ordered with every other touch.
        self.0.with_mut(|bytes| unsafe { *bytes = value });
    }
}

// SAFETY: loom checks every touch.
unsafe impl Sync for Bytes {}

/// A point of a stream that can be waited for: what a fence is on a device.
#[derive(Clone, Debug)]
pub(crate) struct Mark(Arc<(Mutex<bool>, Condvar)>);

impl Mark {
    pub(crate) fn new() -> Self {
        Self(Arc::new((Mutex::new(false), Condvar::new())))
    }

    pub(crate) fn pass(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub(crate) fn is_passed(&self) -> bool {
        *self.0.0.lock().unwrap()
    }

    pub(crate) fn wait(&self) {
        let mut passed = self.0.0.lock().unwrap();
        while !*passed {
            passed = self.0.1.wait(passed).unwrap();
        }
    }
}

/// An event of a fence pool, two owners of its fence, and the pool's place for it.
struct Event {
    owners: Owners,
    recorded: Bytes,
    idle: Mutex<bool>,
}

/// Two clones of a fence are dropped while the pool wants to record anew; `leave` drops one.
fn an_event_is_used_again(leave: fn(&Owners) -> bool) {
    check(move || {
        let event =
            Arc::new(Event { owners: Owners::none(), recorded: Bytes::new(1), idle: Mutex::new(false) });
        event.owners.first();
        event.owners.add();
        let drops: Vec<_> = (0..2)
            .map(|_| {
                let event = Arc::clone(&event);
                loom::thread::spawn(move || {
                    assert_eq!(event.recorded.read(), 1, "a fence that answers for newer work");
                    if leave(&event.owners) {
                        *event.idle.lock().unwrap() = true;
                    }
                })
            })
            .collect();
        if std::mem::take(&mut *event.idle.lock().unwrap()) {
            event.owners.first();
            event.recorded.write(2);
            assert!(event.owners.leave());
        }
        drops.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn loom_an_event_is_recorded_anew_only_after_its_last_owner() {
    an_event_is_used_again(Owners::leave);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_an_owner_that_leaves_without_order() {
    an_event_is_used_again(|owners| owners.0.fetch_sub(1, super::Ordering::Relaxed) == 1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_an_event_that_any_owner_gives_back() {
    an_event_is_used_again(|owners| {
        owners.leave();
        true
    });
}
