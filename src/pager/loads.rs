//! The queue of loads: which were asked for, how far each of them is, and what of each was wanted together.
//!
//! A plain value behind the control lock; what its loads do to device and staging memory is in [`super::load`]. The
//! queue knows nothing of what a read gives, so that models check it with reads of their own.

#![deny(unsafe_code)]

use std::collections::VecDeque;
use std::ops::Range;

use super::ahead::Ahead;
use super::error::PagerError;
use super::frames::NONE;
use super::load::PageRead;
use crate::staging::StagingBuffer;
use crate::units::ModelTime;

/// What a read gave: a buffer with the bytes, and how many came from files.
pub(super) type ReadResult = Result<(StagingBuffer, u64), PagerError>;

/// The loads under way, oldest first. `R` is what a read gives.
#[derive(Debug)]
pub(super) struct Loads<R = ReadResult> {
    pub(super) queue: VecDeque<Load<R>>,
    /// The number of the next load; zero is no load.
    pub(super) next: u64,
    pub(super) reading: usize,
    pub(super) ahead: Ahead,
    /// Jobs that are done, kept for their memory.
    #[expect(clippy::vec_box, reason = "the boxes are what is kept: the readers' queue takes boxed jobs")]
    pub(super) spare: Vec<Box<PageRead>>,
}

#[derive(Debug)]
pub(super) struct Load<R = ReadResult> {
    pub(super) id: u64,
    pub(super) model: u32,
    pub(super) first: u32,
    pub(super) count: u32,
    /// Whether a page waits for it; not so while it was only asked for ahead.
    pub(super) wanted: bool,
    /// Whether it was asked for ahead.
    pub(super) ahead: bool,
    pub(super) state: LoadState<R>,
    /// Whether it has its turn at the modelled disk. It waits for a reader then, and nobody's time depends on which
    /// reader comes when.
    pub(super) booked: bool,
    /// The modelled time from which its bytes are in the buffer.
    pub(super) available: ModelTime,
    pub(super) wants: Wants,
}

/// Which pages of a load were wanted together, and when. Each such run is a copy of its own, as it would be had the
/// load been read by then: what is copied together must not depend on how fast readers are.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Wants {
    /// The first page of each run, ascending, and the modelled time from which it was wanted.
    pub(super) runs: [(u32, ModelTime); Wants::MOST],
    pub(super) len: usize,
}

impl Wants {
    /// Runs that are told apart; what is wanted after so many is copied with the run before it.
    pub(super) const MOST: usize = 16;

    /// Pages from `first` on are wanted from `now` on.
    pub(super) fn add(&mut self, first: u32, now: ModelTime) {
        if self.len < Self::MOST {
            let place = self.runs[..self.len].partition_point(|(other, _)| *other <= first);
            self.runs.copy_within(place..self.len, place + 1);
            self.runs[place] = (first, now);
            self.len += 1;
        }
    }

    /// Those of the pages from `first` on.
    pub(super) fn behind(&self, first: u32) -> Self {
        let mut rest = Self::default();
        let from = self.runs[..self.len].partition_point(|(run, _)| *run <= first).saturating_sub(1);
        for (run, at) in &self.runs[from..self.len] {
            rest.add((*run).max(first), *at);
        }
        rest
    }

    /// The runs of `pages`, with their times. Pages before the first count with it.
    pub(super) fn runs(&self, pages: Range<u32>) -> impl Iterator<Item = (Range<u32>, ModelTime)> {
        let runs = self.runs;
        let len = self.len;
        (0..len).map(move |place| {
            let start = if place == 0 { pages.start } else { runs[place].0.min(pages.end) };
            let end = if place + 1 < len { runs[place + 1].0.min(pages.end) } else { pages.end };
            (start..end, runs[place].1)
        })
    }
}

#[derive(Debug)]
pub(super) enum LoadState<R = ReadResult> {
    /// For a buffer.
    Waiting,
    Reading,
    Read(R),
    /// Its model is gone.
    Cancelled,
}

/// What a fault must wait for whose bytes are on the way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WaitFor {
    /// Nothing is under way.
    Nothing,
    /// The signal that a load went on.
    Signal,
    /// A staging buffer: nobody reads, so nobody will signal.
    Buffer,
}

impl<R> Loads<R> {
    pub(super) fn new() -> Self {
        Self {
            queue: VecDeque::with_capacity(64),
            next: 1,
            reading: 0,
            ahead: Ahead::new(),
            spare: Vec::with_capacity(64),
        }
    }

    /// Loads that pages wait for and whose copies are not enqueued yet.
    pub(super) fn outstanding(&self) -> usize {
        self.queue.iter().filter(|load| load.wanted).count()
    }

    /// What a fault must wait for whose bytes are not there yet. The caller has just tried to go on.
    pub(super) fn wait_for(&self) -> WaitFor {
        let waits = |load: &Load<R>| load.wanted && matches!(load.state, LoadState::Waiting);
        if self.reading == 0 && self.queue.iter().any(waits) {
            WaitFor::Buffer
        } else if self.outstanding() == 0 {
            WaitFor::Nothing
        } else {
            WaitFor::Signal
        }
    }

    /// Pages of loads that have a buffer, or their turn to be read into one, and are not copied yet.
    pub(super) fn pages_under_way(&self) -> u64 {
        let counts = |load: &&Load<R>| match load.state {
            LoadState::Reading | LoadState::Read(_) => true,
            LoadState::Waiting => load.booked,
            LoadState::Cancelled => false,
        };
        self.queue.iter().filter(counts).map(|load| u64::from(load.count)).sum()
    }

    /// Asks for a run of pages that are wanted; answers the load's number.
    pub(super) fn ask(&mut self, model: u32, first: u32, count: u32) -> u64 {
        self.push(model, first, count, false)
    }

    /// Asks for a run of pages ahead of their being wanted.
    pub(super) fn ask_ahead(&mut self, model: u32, first: u32, count: u32) {
        self.push(model, first, count, true);
    }

    pub(super) fn push(&mut self, model: u32, first: u32, count: u32, ahead: bool) -> u64 {
        let id = self.next;
        self.next += 1;
        let mut wants = Wants::default();
        if !ahead {
            wants.add(first, ModelTime::ZERO);
        }
        self.queue.push_back(Load {
            id,
            model,
            first,
            count,
            wanted: !ahead,
            ahead,
            state: LoadState::Waiting,
            booked: false,
            available: ModelTime::ZERO,
            wants,
        });
        id
    }

    /// The place of the first load from `place` on that waits for a buffer.
    pub(super) fn next_waiting(&self, place: usize) -> Option<usize> {
        let mut loads = self.queue.iter().enumerate().skip(place);
        loads.find(|(_, load)| matches!(load.state, LoadState::Waiting)).map(|(place, _)| place)
    }

    /// The load at `place` is being read; its bytes are there from `available` on.
    pub(super) fn begin(&mut self, place: usize, available: ModelTime) {
        let load = &mut self.queue[place];
        load.state = LoadState::Reading;
        load.available = available;
        self.reading += 1;
    }

    /// The read of load `id` ended, well or not; its bytes are there from `available` on.
    pub(super) fn finish(&mut self, id: u64, available: ModelTime, result: R) {
        self.reading -= 1;
        if let Some(load) = self.queue.iter_mut().find(|load| load.id == id) {
            load.available = available;
            load.state = LoadState::Read(result);
        }
    }

    /// Takes the oldest load out if its read has ended; skips those whose models are gone.
    pub(super) fn pop_read(&mut self) -> Option<(Load<R>, R)> {
        loop {
            let front = self.queue.front()?;
            if matches!(front.state, LoadState::Waiting | LoadState::Reading) {
                return None;
            }
            let mut load = self.queue.pop_front()?;
            let LoadState::Read(result) = std::mem::replace(&mut load.state, LoadState::Cancelled) else {
                continue;
            };
            if load.model != NONE {
                return Some((load, result));
            }
        }
    }

    /// Forgets the loads of a model that goes away.
    pub(super) fn cancel(&mut self, model: u32) {
        for load in self.queue.iter_mut().filter(|load| load.model == model) {
            load.cancel();
        }
        self.ahead.forget(model);
    }

    /// Forgets what was asked for ahead and is not wanted, of one model or of all.
    pub(super) fn cancel_ahead(&mut self, model: Option<u32>) {
        for load in &mut self.queue {
            if !load.wanted && model.is_none_or(|model| load.model == model) {
                load.cancel();
            }
        }
        self.ahead.drop_runs(model);
    }
}

impl<R> Load<R> {
    pub(super) fn cancel(&mut self) {
        if matches!(self.state, LoadState::Reading) {
            // The reader still owns the buffer; its result is dropped.
            self.model = NONE;
        } else {
            self.state = LoadState::Cancelled;
        }
        self.wanted = false;
    }
}

#[cfg(all(test, loom))]
#[path = "load_models.rs"]
mod models;
