//! Models of the readers' queue: every fault that waits for a load is told, also where the read fails or
//! panics, or where the load in front belongs to a model that goes away.
//!
//! The queue, its decision what to wait for, and the way a job completes are the pager's own. A thread a
//! read stands for the pool's threads; one staging buffer makes the second load wait for the first.

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::{Loads, WaitFor};
use crate::sync::model::check;
use crate::transfer::{ReadJob, do_job};
use crate::units::ModelTime;

/// How a read ends.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Good,
    Fails,
    Panics,
    /// Wrong: its result is kept, and nobody is told.
    Silent,
}

/// A staging buffer; it goes back where it came from when it is dropped.
struct Buffer(Arc<Mutex<u32>>);

impl Buffer {
    fn take(free: &Arc<Mutex<u32>>) -> Option<Self> {
        let mut count = free.lock().unwrap();
        *count = count.checked_sub(1)?;
        Some(Self(Arc::clone(free)))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        *self.0.lock().unwrap() += 1;
    }
}

struct Control {
    loads: Loads<Result<Buffer, ()>>,
    buffers: Arc<Mutex<u32>>,
    /// For each model its page's load, zero when the bytes are there; and whether it failed.
    pages: [(u64, bool); 2],
    fates: [Fate; 2],
}

struct Pager {
    control: Mutex<Control>,
    changed: Condvar,
}

struct Job {
    pager: Arc<Pager>,
    load: u64,
    fate: Fate,
    buffer: Option<Buffer>,
}

impl ReadJob for Job {
    fn read(&mut self) {
        match self.fate {
            Fate::Good | Fate::Silent => {}
            Fate::Fails => self.buffer = None,
            Fate::Panics => std::panic::resume_unwind(Box::new("a read that panics")),
        }
    }

    fn slept(&self) -> bool {
        false
    }

    fn complete(mut self: Box<Self>, panic: Option<String>) {
        let mut control = self.pager.control.lock().unwrap();
        let result = self.buffer.take().filter(|_| panic.is_none()).ok_or(());
        control.loads.finish(self.load, ModelTime::ZERO, result);
        pump(&self.pager, &mut control);
        drop(control);
        if self.fate != Fate::Silent {
            self.pager.changed.notify_all();
        }
    }
}

/// `load::pump` and `load::drain`.
fn pump(pager: &Arc<Pager>, control: &mut Control) {
    loop {
        let mut from = 0;
        while let Some(place) = control.loads.next_waiting(from) {
            from = place + 1;
            let Some(buffer) = Buffer::take(&control.buffers) else { break };
            control.loads.begin(place, ModelTime::ZERO);
            let load = &control.loads.queue[place];
            let (load, fate) = (load.id, control.fates[load.model as usize]);
            let job = Job { pager: Arc::clone(pager), load, fate, buffer: Some(buffer) };
            thread::spawn(move || do_job(Box::new(job), |_| {}));
        }
        let mut went_on = false;
        while let Some((load, result)) = control.loads.pop_read() {
            went_on = true;
            let page = &mut control.pages[load.model as usize];
            if page.0 == load.id {
                *page = (0, result.is_err());
            }
        }
        if !went_on {
            return;
        }
    }
}

/// `fault::bring`: asks, and waits until its bytes are there or its load failed. Answers whether it failed.
fn fault(pager: &Arc<Pager>, model: u32) -> bool {
    let mut control = pager.control.lock().unwrap();
    let load = control.loads.ask(model, 0, 1);
    control.pages[model as usize] = (load, false);
    pump(pager, &mut control);
    while control.pages[model as usize].0 != 0 {
        pump(pager, &mut control);
        match control.loads.wait_for() {
            WaitFor::Signal => control = pager.changed.wait(control).unwrap(),
            WaitFor::Buffer => panic!("nobody reads, and a load waits for a buffer that is free"),
            WaitFor::Nothing => panic!("a fault waits for a load that nobody knows"),
        }
    }
    control.pages[model as usize].1
}

fn pager(fates: [Fate; 2], buffers: u32) -> Arc<Pager> {
    Arc::new(Pager {
        control: Mutex::new(Control {
            loads: Loads::new(),
            buffers: Arc::new(Mutex::new(buffers)),
            pages: [(0, false); 2],
            fates,
        }),
        changed: Condvar::new(),
    })
}

fn two_faults(fates: [Fate; 2], buffers: u32) {
    check(move || {
        let pager = pager(fates, buffers);
        let other = {
            let pager = Arc::clone(&pager);
            thread::spawn(move || fault(&pager, 1))
        };
        let failed = [fault(&pager, 0), other.join().unwrap()];
        assert_eq!(failed, fates.map(|fate| matches!(fate, Fate::Fails | Fate::Panics)));
        let control = pager.control.lock().unwrap();
        let free = *control.buffers.lock().unwrap();
        assert_eq!((free, control.loads.outstanding(), control.loads.reading), (buffers, 0, 0));
    });
}

#[test]
fn loom_every_fault_that_waits_for_a_load_is_told() {
    two_faults([Fate::Good, Fate::Good], 1);
}

#[test]
fn loom_it_is_told_of_a_read_that_fails() {
    two_faults([Fate::Fails, Fate::Good], 1);
}

#[test]
fn loom_it_is_told_of_a_read_that_panics() {
    two_faults([Fate::Good, Fate::Panics], 1);
}

#[test]
fn loom_loads_that_are_read_at_once_are_copied_in_order_and_told() {
    two_faults([Fate::Good, Fate::Fails], 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_a_read_that_ends_and_tells_nobody() {
    two_faults([Fate::Silent, Fate::Good], 1);
}

/// A model goes away while its load is in front of another's.
#[test]
fn loom_a_model_that_goes_away_holds_nobody_up() {
    check(|| {
        let pager = pager([Fate::Good, Fate::Good], 1);
        {
            let mut control = pager.control.lock().unwrap();
            let load = control.loads.ask(0, 0, 1);
            control.pages[0] = (load, false);
            pump(&pager, &mut control);
        }
        let closer = {
            let pager = Arc::clone(&pager);
            thread::spawn(move || pager.control.lock().unwrap().loads.cancel(0))
        };
        assert!(!fault(&pager, 1));
        closer.join().unwrap();
        assert_eq!(pager.control.lock().unwrap().loads.outstanding(), 0);
    });
}
