//! One thread of a stress run: what it does, drawn from its numbers.
//!
//! A thread works in sessions. In a session it holds the models that were open when it began, so that others
//! may drop them meanwhile, and guards that borrow them. Between sessions it compares what was checked, and
//! may exchange a model for a fresh one.
//!
//! A thread that holds a guard never waits for another thread's, so that nobody waits for ever: what is
//! refused is given up. One that holds nothing waits, and is never refused for guards. Where threads take turns
//! nobody waits: the guard's thread could not let it go meanwhile.
//!
//! Each operation draws from numbers of its own, so that what a thread does next does not depend on how the
//! operations before it ended.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vram_pager::device::PoolAllocation;
use vram_pager::pager::{Guard, PagedModel, PagerError, PagerStream, TensorView};
use vram_pager::units::DeviceRange;
use vram_pager::weights::{TensorId, UnitId};

use super::check::{CheckError, Checker, Expect, Part};
use super::manage;
use super::numbers::Numbers;
use super::turns::{Seat, Turns};
use super::world::{Opened, World};

/// How long a thread that holds nothing waits for guards of others.
const PATIENCE: Duration = Duration::from_secs(50);

/// Streams of each thread.
const STREAMS: usize = 2;

/// The most guards that a thread holds at once.
const HELD: usize = 3;

/// The parts of what a guard gives.
pub(super) fn parts_of(opened: &Opened, set: usize, views: &[TensorView<'_>]) -> Vec<Part> {
    let index = opened.model.index();
    let part = |view: &TensorView<'_>| {
        let tensor = index.tensor(view.name)?;
        let expect = Expect::Rows { model: opened.kind, set, tensor, rows: view.rows.clone() };
        Some(Part { range: view.range(), expect })
    };
    views.iter().filter(|view| view.bytes > 0).filter_map(part).collect()
}

/// A guard that is held while others are faulted.
struct Held<'s> {
    guard: Guard<'s>,
    parts: Vec<Part>,
    stream: usize,
}

/// An activation with known bytes.
struct Activation {
    memory: PoolAllocation,
    part: Part,
    stream: usize,
}

/// How a session chooses units.
#[derive(Clone, Copy)]
enum Choice {
    /// One after the other.
    Pass,
    /// Any.
    Random,
    /// Out of a few.
    Few(u64),
}

/// A thread.
pub(super) struct Runner<'w, 'k> {
    world: &'w World<'k>,
    seed: u64,
    thread: u64,
    /// Those of the operation at hand.
    numbers: Numbers,
    streams: Vec<Arc<PagerStream>>,
    checkers: Vec<Checker>,
    activation: Option<Activation>,
    /// Operations that are left to do.
    left: u64,
    /// Where passes over a model go on.
    cursor: u64,
    /// Operations while calls of a kind go on failing.
    lasting: u32,
    /// Operations while work completes late.
    late: u32,
    /// Whether it has begun its first operation: it came to that by its first turn.
    moved: bool,
    /// Where threads take turns, this one's place. The last field: all else is dropped in its turn.
    seat: Option<Seat<'w>>,
}

/// What the numbers are drawn for.
#[derive(Clone, Copy)]
enum Draw {
    Session,
    Operation,
    End,
}

/// The thread ends: something went wrong, or the time is over.
struct Ended;

impl<'w, 'k> Runner<'w, 'k> {
    /// Makes a thread's streams and checks. To be called before anything fails.
    pub(super) fn new(
        world: &'w World<'k>,
        seed: u64,
        thread: u64,
        operations: u64,
    ) -> Result<Self, PagerError> {
        let mut runner = Self {
            world,
            seed,
            thread,
            numbers: Numbers::new(seed, thread),
            streams: Vec::new(),
            checkers: Vec::new(),
            activation: None,
            left: operations,
            cursor: 0,
            lasting: 0,
            late: 0,
            moved: false,
            seat: None,
        };
        for _ in 0..STREAMS {
            let stream = Arc::new(world.pager.stream()?);
            runner.checkers.push(Checker::new(&world.pager, &stream)?);
            runner.streams.push(stream);
        }
        Ok(runner)
    }

    /// Works until its operations are done or the run is stopped; with `turns`, only in its turn.
    pub(super) fn run(mut self, turns: Option<&'w Turns>) {
        self.seat = turns.map(|turns| turns.sit(self.thread));
        let ended = loop {
            if let Err(ended) = self.session() {
                break Err(ended);
            }
            if self.left == 0 {
                break Ok(());
            }
        };
        drop(self.activation.take());
        if self.lasting > 0 {
            self.world.card.clear();
            self.world.lasting.store(false, Ordering::Relaxed);
        }
        if ended.is_ok() || !self.world.counts.stopped() {
            let _ = self.compare_all();
        }
    }

    /// The numbers for what comes now: they depend on the seed, the thread and how many operations are left.
    fn draw(&mut self, what: Draw) {
        self.numbers = Numbers::new(self.seed, self.thread + ((4 * self.left + what as u64) << 8));
    }

    /// Notes, where threads take turns, what the operation at hand is.
    fn note(&self, what: &[u64]) {
        if let Some(seat) = &self.seat {
            seat.note(what);
        }
    }

    fn session(&mut self) -> Result<(), Ended> {
        self.draw(Draw::Session);
        let slots = &self.world.slots;
        let models: Vec<Arc<Opened>> = slots.iter().map(|slot| Arc::clone(&slot.lock())).collect();
        let streams = self.streams.clone();
        self.steps(&models, &streams)?;
        drop(models);
        self.compare_all()?;
        self.draw(Draw::End);
        if self.numbers.per_mille(60) {
            self.exchange();
        }
        Ok(())
    }

    fn steps(&mut self, models: &[Arc<Opened>], streams: &[Arc<PagerStream>]) -> Result<(), Ended> {
        let world = self.world;
        let mut held: Vec<Held<'_>> = Vec::with_capacity(HELD);
        let focus = self.numbers.place(models.len());
        let choice = match self.numbers.below(10) {
            0..3 => Choice::Pass,
            3..6 => Choice::Random,
            _ => Choice::Few(4 + self.numbers.below(12)),
        };
        let steps = (50 + self.numbers.below(400)).min(self.left);
        for _ in 0..steps {
            if let Some(seat) = self.seat.as_ref().filter(|_| self.moved) {
                seat.next();
            }
            self.moved = true;
            if world.counts.stopped() {
                return Err(Ended);
            }
            self.draw(Draw::Operation);
            self.left -= 1;
            self.lasting = self.lasting.saturating_sub(1);
            if self.lasting == 1 {
                world.card.clear();
                world.lasting.store(false, Ordering::Relaxed);
            }
            self.late = self.late.saturating_sub(1);
            if self.late == 1 {
                world.card.seed_delays(0);
            }
            let place = if self.numbers.per_mille(850) { focus } else { self.numbers.place(models.len()) };
            let opened = &models[place];
            let kind = self.numbers.below(1000);
            self.note(&[kind, place as u64, self.numbers.clone().next()]);
            let (faults, refused) = (&world.counts.faults, &world.counts.refused);
            let before = [faults, refused].map(|count| count.load(Ordering::Relaxed));
            match kind {
                0..885 => self.fault(opened, streams, choice, &mut held)?,
                885..900 => self.resident()?,
                900..925 => self.rows(opened, streams)?,
                925..945 => self.activation()?,
                945..960 => self.check_again(&mut held)?,
                960..970 => self.parcel(opened, streams)?,
                970..973 => {
                    let set = self.numbers.place(opened.sets.len());
                    opened.current.store(set, Ordering::Relaxed);
                }
                973..983 => manage::pager(world, opened, &mut self.numbers),
                983..991 => manage::manager(world, models, &mut self.numbers),
                991..994 => {
                    let total = world.card.device.info().total_bytes;
                    let others = self.numbers.pick(&[0, total / 16, total / 8, total / 4]);
                    world.card.set_others(others);
                }
                994..999 => self.inject(),
                _ => self.delay(),
            }
            world.counts.operations.fetch_add(1, Ordering::Relaxed);
            if let Some(seat) = &self.seat {
                // Nobody else counts in this turn.
                seat.note_outcome(&[
                    faults.load(Ordering::Relaxed) - before[0],
                    refused.load(Ordering::Relaxed) - before[1],
                ]);
            }
        }
        while !held.is_empty() {
            self.release(&mut held)?;
        }
        Ok(())
    }

    /// Judges an error; ends the thread if the run does not expect it.
    fn expects(&self, what: &str, error: &PagerError) -> Result<(), Ended> {
        if self.world.counts.expects(what, error) { Ok(()) } else { Err(Ended) }
    }

    fn choose(&mut self, opened: &Opened, choice: Choice) -> UnitId {
        let units = opened.model.index().units().len() as u64;
        let unit = match choice {
            Choice::Pass => {
                self.cursor += 1;
                self.cursor % units
            }
            Choice::Random => self.numbers.below(units),
            Choice::Few(few) => self.numbers.below(few.min(units)),
        };
        self.note(&[unit]);
        UnitId(u32::try_from(unit).unwrap_or(u32::MAX))
    }

    /// The set that a fault is made with: mostly the one that others use too.
    fn set_of(&mut self, opened: &Opened) -> usize {
        let set = if self.numbers.per_mille(4) {
            self.numbers.place(opened.sets.len())
        } else {
            opened.current.load(Ordering::Relaxed)
        };
        if let Some(seat) = &self.seat {
            // A model that could not be opened anew keeps its set.
            seat.note_outcome(&[set as u64]);
        }
        set
    }

    fn stream(&mut self) -> usize {
        usize::from(self.numbers.per_mille(200))
    }

    /// Faults a unit or a piece, checks it, and holds the guard or releases it.
    fn fault<'s>(
        &mut self,
        opened: &'s Opened,
        streams: &'s [Arc<PagerStream>],
        choice: Choice,
        held: &mut Vec<Held<'s>>,
    ) -> Result<(), Ended> {
        let unit = self.choose(opened, choice);
        let set = self.set_of(opened);
        let number = self.stream();
        let stream = &streams[number];
        let model: &PagedModel = &opened.model;
        let pieces = model.pieces(unit).unwrap_or(1);
        // A unit that is cut is faulted whole now and then, and through its pieces otherwise.
        let whole = pieces > 1 && self.numbers.per_mille(100);
        let piece = u32::try_from(self.numbers.below(u64::from(pieces))).unwrap_or(0);
        let patches = opened.sets[set].as_ref();
        let fault = || {
            if whole {
                model.fault_with(patches, unit, stream)
            } else {
                model.fault_piece_with(patches, unit, piece, stream)
            }
        };
        // While calls go on failing a wait would not end: whoever ends that must not wait.
        let waits = held.is_empty() && !self.world.lasting.load(Ordering::Relaxed);
        let answer = if waits && self.numbers.per_mille(900) {
            // Whoever waits lets go of what another might wait for.
            self.world.parcels.lock().clear();
            let deadline = Instant::now() + PATIENCE;
            match patches {
                // Nobody can let go of anything while this thread has the turn.
                _ if self.seat.is_some() => fault(),
                None if !whole => model.fault_piece_when_free(unit, piece, stream, deadline),
                _ => model.retry_while_held(deadline, fault),
            }
        } else {
            fault()
        };
        let guard = match answer {
            Ok(guard) => guard,
            Err(error) => {
                self.expects("fault", &error)?;
                // Whoever is refused lets go, or everybody might stay refused for good.
                held.pop();
                return Ok(());
            }
        };
        self.world.counts.faults.fetch_add(1, Ordering::Relaxed);
        let parts = parts_of(opened, set, &guard.tensors());
        self.check(number, &parts)?;
        if self.numbers.per_mille(200) {
            if held.len() == HELD {
                self.release(held)?;
            }
            held.push(Held { guard, parts, stream: number });
        } else if self.numbers.per_mille(950) {
            guard.release();
        } else {
            self.release_elsewhere(guard, number, streams)?;
        }
        if held.len() > 1 && self.numbers.per_mille(400) {
            self.release(held)?;
        }
        if !held.is_empty() && self.numbers.per_mille(500) {
            let place = self.numbers.place(held.len());
            self.check(held[place].stream, &held[place].parts)?;
        }
        Ok(())
    }

    /// Releases a guard on the thread's other stream, ordered behind the first.
    fn release_elsewhere(
        &mut self,
        guard: Guard<'_>,
        number: usize,
        streams: &[Arc<PagerStream>],
    ) -> Result<(), Ended> {
        let other = &streams[1 - number];
        let fences = vram_pager::device::FencePool::new(&self.world.card.device);
        let ordered = fences.record(streams[number].stream()).and_then(|fence| fence.wait_on(other.stream()));
        let answer = match ordered {
            Ok(()) => guard.release_on(other),
            // On its own stream then.
            Err(error) => Err(error.into()),
        };
        match answer {
            Ok(()) => Ok(()),
            Err(error) => self.expects("release on another stream", &error),
        }
    }

    /// Enqueues a check on one of the thread's streams.
    fn check(&mut self, stream: usize, parts: &[Part]) -> Result<(), Ended> {
        if !self.checkers[stream].has_room(parts.len()) {
            self.compare(stream)?;
        }
        match self.checkers[stream].ask(parts) {
            Ok(()) => Ok(()),
            Err(error) => self.expects("check", &error),
        }
    }

    fn compare(&mut self, stream: usize) -> Result<(), Ended> {
        match self.checkers[stream].compare(self.world.kinds) {
            Ok(verdict) => {
                self.world.counts.take(&verdict);
                if verdict.wrong.is_empty() { Ok(()) } else { Err(Ended) }
            }
            Err(CheckError::Device(error)) => self.expects("compare", &error),
            Err(CheckError::Expected(failure)) => {
                self.world.counts.fail(format!("what should be on the card: {failure:?}"));
                Err(Ended)
            }
        }
    }

    fn compare_all(&mut self) -> Result<(), Ended> {
        (0..self.checkers.len()).try_for_each(|stream| self.compare(stream))
    }

    /// Checks one of the held guards again, through which others were faulted, and releases it.
    fn release(&mut self, held: &mut Vec<Held<'_>>) -> Result<(), Ended> {
        if held.is_empty() {
            return Ok(());
        }
        let Held { guard, parts, stream } = held.swap_remove(self.numbers.place(held.len()));
        self.check(stream, &parts)?;
        guard.release();
        Ok(())
    }

    fn check_again(&mut self, held: &mut [Held<'_>]) -> Result<(), Ended> {
        held.iter().try_for_each(|held| self.check(held.stream, &held.parts))
    }

    /// Brings some rows of a tensor and checks each.
    fn rows(&mut self, opened: &Opened, streams: &[Arc<PagerStream>]) -> Result<(), Ended> {
        let index = opened.model.index();
        let tensor = TensorId(u32::try_from(self.numbers.below(index.tensors().len() as u64)).unwrap_or(0));
        let count = index.tensor_info(tensor).shape.first().copied().unwrap_or(1);
        let rows: Vec<u64> = (0..=self.numbers.below(4)).map(|_| self.numbers.below(count)).collect();
        let (set, number) = (self.set_of(opened), self.stream());
        let patches = opened.sets[set].as_ref();
        let guard = match opened.model.fault_rows_with(patches, tensor, &rows, &streams[number]) {
            Ok(guard) => guard,
            Err(error) => return self.expects("rows", &error),
        };
        self.world.counts.faults.fetch_add(1, Ordering::Relaxed);
        let each = guard.range().bytes / rows.len() as u64;
        let part = |(place, row): (u64, &u64)| {
            let range = DeviceRange::new(guard.range().start.offset(place * each), each);
            let expect = Expect::Rows { model: opened.kind, set, tensor, rows: *row..*row + 1 };
            Part { range, expect }
        };
        let parts: Vec<Part> = (0..).zip(&rows).map(part).collect();
        self.check(number, &parts)?;
        guard.release();
        Ok(())
    }

    /// Takes memory for an activation and fills it; or checks that nobody wrote to it, and gives it back.
    fn activation(&mut self) -> Result<(), Ended> {
        if let Some(Activation { memory, part, stream }) = self.activation.take() {
            self.check(stream, &[part])?;
            drop(memory);
            return Ok(());
        }
        let stream = self.stream();
        let bytes = 1 + self.numbers.below(4 * self.world.page_bytes);
        let memory = match self.world.pager.allocate(&self.streams[stream], bytes) {
            Ok(memory) => memory,
            Err(error) => return self.expects("activation", &error),
        };
        let byte = self.numbers.next().to_le_bytes()[0];
        let range = DeviceRange::new(memory.range().start, bytes);
        if let Err(error) = self.checkers[stream].fill(range, byte) {
            return self.expects("fill", &error);
        }
        let part = Part { range, expect: Expect::Fill { byte, bytes } };
        self.activation = Some(Activation { memory, part, stream });
        Ok(())
    }

    /// Takes a guard and leaves it for another thread to release, or releases what another left.
    fn parcel(&mut self, opened: &Opened, streams: &[Arc<PagerStream>]) -> Result<(), Ended> {
        let (unit, set) = (self.choose(opened, Choice::Random), self.set_of(opened));
        let found = {
            let mut parcels = self.world.parcels.lock();
            if parcels.len() > 1 { parcels.pop() } else { None }
        };
        if let Some(guard) = found {
            guard.release();
            return Ok(());
        }
        if opened.model.pieces(unit).unwrap_or(1) > 1 {
            return Ok(());
        }
        let number = self.stream();
        let guard = match opened.model.fault_patched_owned(opened.sets[set].as_ref(), unit, &streams[number])
        {
            Ok(guard) => guard,
            Err(error) => return self.expects("fault", &error),
        };
        self.world.counts.faults.fetch_add(1, Ordering::Relaxed);
        self.check(number, &parts_of(opened, set, &guard.tensors()))?;
        self.world.parcels.lock().push(guard);
        Ok(())
    }

    /// Uses the model that is kept by modules, or has it take or give memory.
    fn resident(&mut self) -> Result<(), Ended> {
        let world = self.world;
        let Some(resident) = &world.resident else { return Ok(()) };
        if self.numbers.per_mille(200) {
            resident.change(&world.counts, world.card.device.info().total_bytes, &mut self.numbers);
            return Ok(());
        }
        let stream = self.stream();
        let used =
            resident.use_some(&world.counts, world.kinds, &mut self.checkers[stream], &mut self.numbers);
        used.or_else(|error| self.expects("use modules", &error))
    }

    /// Makes a call fail, or a kind of calls for a while.
    fn inject(&mut self) {
        if self.world.inject && !self.world.lasting.load(Ordering::Relaxed) {
            let lasting = self.numbers.per_mille(100);
            self.world.card.inject(&mut self.numbers, lasting);
            if lasting {
                self.world.lasting.store(true, Ordering::Relaxed);
                self.lasting = 2 + u32::try_from(self.numbers.below(30)).unwrap_or(0);
            }
        }
    }

    /// Work completes late for a while.
    fn delay(&mut self) {
        if self.late == 0 && self.numbers.per_mille(400) {
            self.late = 20 + u32::try_from(self.numbers.below(60)).unwrap_or(0);
            self.world.card.seed_delays(self.numbers.next() | 1);
        }
    }

    /// Opens a model anew; the one that was open goes when the last thread is through with it.
    fn exchange(&mut self) {
        let kind = self.numbers.place(self.world.slots.len());
        match self.world.reopen(kind) {
            Ok(fresh) => {
                let fresh = Arc::new(fresh);
                let old = std::mem::replace(&mut *self.world.slots[kind].lock(), fresh);
                drop(old);
            }
            Err(error) => {
                self.world.counts.expects("open a model", &error);
            }
        }
    }
}
