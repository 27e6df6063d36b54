//! Seeded schedules of manager and pager together: runners that load, fault, hold, check, free, change
//! patches and take memory, one step of one thread at a time, in an order that a seed gives, down to the
//! calls of the card; and the card's streams move only when the schedule says so. Whatever the order, every
//! byte under a guard is right, the card is never misused, nobody hangs and nothing is left.
//!
//! `VRAM_PAGER_SEED=n` plays one seed many times, `VRAM_PAGER_SCHEDULES=n` so many seeds.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::similar_names,
    reason = "a test that cannot go on says where, and its numbers are small"
)]

#[allow(
    unsafe_code,
    unreachable_pub,
    clippy::undocumented_unsafe_blocks,
    reason = "passes a card's calls on"
)]
#[path = "schedules/card.rs"]
mod card;
mod common;
#[allow(unreachable_pub, reason = "a part of this test")]
#[path = "schedules/scheduler.rs"]
mod scheduler;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use card::{Broken, Card};
use common::{ModelFile, Numbers, assert_nothing_left, emulated_card, small_options, unit_id};
use parking_lot::Mutex;
use scheduler::{Scheduler, Trace};
use vram_pager::device::{Device, FloatType, PoolAllocation, SharedDevice};
use vram_pager::manager::{FreeOptions, LoadOptions, Manager};
use vram_pager::pager::{
    Check, Factor, Guard, ModelOptions, PagedModel, Pager, PagerError, PagerOptions, PagerStream, PatchSet,
    TensorPatch, Verifier,
};
use vram_pager::patcher::{IdleCache, ModelPatcher, PagedPatcher, Place};
use vram_pager::units::{KIB, MIB};
use vram_pager::weights::TensorIndex;

const PLACE: Place = Place::Card(0);

/// Runners, and steps of each.
const RUNNERS: u64 = 3;
const STEPS: u32 = 14;

/// One schedule at a time: the scheduler waits until every thread of the process sleeps.
static ALONE: Mutex<()> = Mutex::new(());

/// Two models of 500 KiB; the first has a clone with patches.
struct World {
    scheduler: Arc<Scheduler>,
    card: Arc<Card>,
    manager: Manager,
    pager: Arc<Pager>,
    patchers: Vec<Arc<PagedPatcher>>,
    /// What comes and goes.
    visitor: Arc<TensorIndex>,
}

fn patches(model: &PagedModel) -> Arc<PatchSet> {
    let all = [0, 2, 5].map(|unit| {
        let tensor = model.index().tensor(&format!("blocks.{unit:03}.weight")).unwrap();
        let shape = &model.index().tensor_info(tensor).shape;
        let factor = |rows: u64, columns: u64| Factor {
            dtype: FloatType::F32,
            shape: [rows, columns],
            bytes: (0..rows * columns).flat_map(|n| (1.0 + (n % 7) as f32).to_le_bytes()).collect(),
        };
        TensorPatch { tensor, up: factor(shape[0], 1), down: factor(1, shape[1]), scale: 0.5 }
    });
    PatchSet::new(model, all.into()).unwrap()
}

/// What a runner has in its hands.
struct Runner<'w> {
    world: &'w World,
    stream: &'w PagerStream,
    checks: Vec<Check<'w>>,
    held: Vec<(usize, Guard<'w>)>,
    activations: Vec<PoolAllocation>,
    numbers: Numbers,
}

impl Runner<'_> {
    fn run(&mut self) {
        for _ in 0..STEPS {
            self.world.scheduler.seam("step");
            self.step();
        }
        // What was held through all of it is right to the end.
        while !self.held.is_empty() {
            self.release(0);
        }
        self.finish();
    }

    /// Compares what was checked so far.
    fn finish(&mut self) {
        for (place, check) in self.checks.iter_mut().enumerate() {
            assert_eq!(check.finish().unwrap(), [], "wrong bytes of patcher {place}");
        }
    }

    fn check(&mut self, place: usize, guard: &Guard<'_>) {
        self.checks[place].tensors(&guard.tensors()).unwrap();
    }

    fn release(&mut self, place: usize) {
        let (patcher, guard) = self.held.swap_remove(place);
        self.check(patcher, &guard);
        guard.release();
    }

    fn fault(&mut self) {
        let place = usize::try_from(self.numbers.below(self.world.patchers.len() as u64)).unwrap();
        let (world, stream) = (self.world, self.stream);
        let patcher = &world.patchers[place];
        let model = patcher.model();
        let unit = unit_id(self.numbers.below(model.index().units().len() as u64));
        let piece = u32::try_from(self.numbers.below(u64::from(model.pieces(unit).unwrap()))).unwrap();
        match patcher.fault_piece(unit, piece, stream) {
            Ok(guard) => {
                self.check(place, &guard);
                if self.held.len() < 2 && self.numbers.below(2) == 0 {
                    self.held.push((place, guard));
                } else {
                    guard.release();
                }
            }
            // Guards are in the way, of this runner or of another: it lets go of its own.
            Err(PagerError::Held { held, .. }) => {
                assert!(!held.is_empty(), "a refusal that names nothing");
                while !self.held.is_empty() {
                    self.release(0);
                }
            }
            Err(PagerError::OldVersionHeld { .. }) => {
                while !self.held.is_empty() {
                    self.release(0);
                }
            }
            // Another's activations, and the other process, may have it all for a while.
            Err(PagerError::NeverFits { .. }) => {}
            Err(PagerError::Device(error)) if error.is_out_of_memory() => {}
            Err(error) => panic!("fault: {error}"),
        }
    }

    fn step(&mut self) {
        let world = self.world;
        let pick = usize::try_from(self.numbers.below(world.patchers.len() as u64)).unwrap();
        let patcher = &world.patchers[pick];
        let card = world.card.info().total_bytes;
        match self.numbers.below(17) {
            0..=7 => self.fault(),
            8 if !self.held.is_empty() => self.release(0),
            8 | 9 => {
                let shared: Arc<dyn ModelPatcher> = Arc::clone(patcher) as _;
                match world.manager.load_model_gpu(&shared, LoadOptions::default()) {
                    Ok(()) => {}
                    // The factors of its patches found no room.
                    Err(error) => assert!(format!("{error:?}").contains("OutOfMemory"), "load: {error:?}"),
                }
            }
            10 => {
                let bytes = self.numbers.below(card);
                world.manager.free_memory(bytes, Some(PLACE), &FreeOptions::default()).unwrap();
            }
            11 => {
                let bytes = self.numbers.below(card / 2);
                let freed = patcher.partially_unload(bytes).unwrap();
                assert!(freed < bytes + 64 * KIB, "{freed} given back of {bytes} asked for");
            }
            12 => match world.pager.allocate(self.stream, 1 + self.numbers.below(3 * 64 * KIB)) {
                Ok(memory) => self.activations.push(memory),
                Err(PagerError::Device(error)) if error.is_out_of_memory() => self.activations.clear(),
                Err(error) => panic!("allocate: {error}"),
            },
            13 => self.activations.clear(),
            14 => {
                world.card.inner.set_other_bytes(self.numbers.below(card / 4));
                world.pager.refresh().unwrap();
            }
            15 => self.visit(),
            _ => self.finish(),
        }
    }

    /// A model that is opened, loaded, faulted and dropped while others go on.
    fn visit(&mut self) {
        let world = self.world;
        let model = world.pager.open_model(Arc::clone(&world.visitor), &ModelOptions::default()).unwrap();
        let shared: Arc<dyn ModelPatcher> = PagedPatcher::new(&model, PLACE);
        world.manager.load_model_gpu(&shared, LoadOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        // The sums need memory too, and others may have it.
        let Ok(mut check) = verifier.begin(self.stream) else { return };
        let unit = unit_id(self.numbers.below(model.index().units().len() as u64));
        if let Ok(guard) = model.fault_piece(unit, 0, self.stream) {
            check.tensors(&guard.tensors()).unwrap();
        }
        assert_eq!(check.finish().unwrap(), []);
    }
}

/// Plays one seed; answers what was chosen, or what went wrong.
fn play(seed: u64, broken: Broken) -> Result<Trace, String> {
    let _alone = ALONE.lock();
    let units = [(64, 256), (16, 48), (7, 13), (96, 256), (40, 100), (64, 512)];
    let files = [ModelFile::new(&units, seed | 1), ModelFile::new(&units, seed | 2)];
    let mut numbers = Numbers(scheduler::mix(seed) | 1);
    let pages = [8, 10, 13, 20][usize::try_from(numbers.below(4)).unwrap()];
    let (inner, _) = emulated_card(pages * 64 * KIB, "its calls are seams and its streams are held back");
    let scheduler = Scheduler::new(seed);
    let card = Arc::new(Card { inner, scheduler: Arc::clone(&scheduler), broken });
    let device: SharedDevice = Arc::clone(&card) as _;
    let mut failures = Vec::new();
    let trace = {
        let manager = Manager::new(std::slice::from_ref(&device));
        manager.set_knobs(|knobs| {
            knobs.reserve = 0;
            knobs.inference_floor = 0;
            knobs.headroom = Some(0);
            knobs.page_locked_budget = Some(16 * MIB);
        });
        let options = PagerOptions { readers: 1, chunk_bytes: 128 * KIB, ..small_options() };
        let pager = Pager::new(&device, options).unwrap();
        let cache: Arc<dyn IdleCache> = Arc::clone(&pager) as _;
        manager.register_idle_cache(PLACE, &cache).unwrap();
        let mut patchers: Vec<Arc<PagedPatcher>> = files
            .iter()
            .map(|file| pager.open_model(file.index(), &ModelOptions::default()).unwrap())
            .map(|model| PagedPatcher::new(&model, PLACE))
            .collect();
        let clone = patchers[0].clone_model();
        clone.set_patches(Some(patches(clone.model())));
        patchers.push(clone);
        let verifiers: Vec<Verifier> = patchers
            .iter()
            .map(|patcher| Verifier::patched(patcher.model(), patcher.patches()).unwrap())
            .collect();
        let streams: Vec<PagerStream> = (0..RUNNERS).map(|_| pager.stream().unwrap()).collect();
        let world = World {
            scheduler: Arc::clone(&scheduler),
            card: Arc::clone(&card),
            manager,
            pager,
            patchers,
            visitor: files[1].index(),
        };
        let runners: Vec<Runner<'_>> = (0..)
            .zip(&streams)
            .map(|(number, stream)| Runner {
                world: &world,
                stream,
                checks: verifiers.iter().map(|verifier| verifier.begin(stream).unwrap()).collect(),
                held: Vec::new(),
                activations: Vec::new(),
                numbers: Numbers(scheduler::mix(seed ^ (number << 32)) | 1),
            })
            .collect();
        scheduler.start(runners.len());
        let trace = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(runners)
                .map(|(number, mut runner): (u32, _)| {
                    let scheduler = &scheduler;
                    let body = move || {
                        let played = catch_unwind(AssertUnwindSafe(|| runner.run()));
                        // What it still has goes while others go on, whether it failed or not.
                        runner.held.clear();
                        runner.activations.clear();
                        scheduler.ended();
                        played.map_err(|panic| {
                            let text = panic.downcast_ref::<String>().cloned();
                            text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()))
                                .unwrap_or_else(|| "a panic".to_owned())
                        })
                    };
                    std::thread::Builder::new()
                        .name(format!("runner-{number}"))
                        .spawn_scoped(scope, body)
                        .unwrap()
                })
                .collect();
            let trace = scheduler.drive();
            for thread in threads {
                failures.extend(thread.join().unwrap().err());
            }
            trace
        });
        card.inner.set_other_bytes(0);
        if failures.is_empty() && trace.is_ok() {
            let figures = world.pager.figures();
            let held = figures.resident_bytes + figures.ring_bytes + figures.idle_bytes;
            if card.live().frames * figures.page_bytes != held || held > card.info().total_bytes {
                failures.push(format!("the accounts are wrong: {figures:?}, {:?}", card.live()));
            }
            if let Err(error) = world.manager.unload_all_models() {
                failures.push(format!("unload_all_models: {error}"));
            }
            if card.counts().device_sync != 0 {
                failures.push("the device was stopped".to_owned());
            }
        }
        trace
    };
    let mut misuse = card.inner.take_deferred();
    misuse.extend(card.inner.take_caught());
    if !misuse.is_empty() {
        failures.push(format!("the card was misused: {misuse:?}"));
    }
    let trace = trace?;
    if failures.is_empty() {
        assert_nothing_left(&device);
        return Ok(trace);
    }
    Err(format!("{}; the last choices: {:#?}", failures.join("; "), trace.last))
}

/// How often one seed is played, if it is asked for: what the system picks differs from time to time.
const REPEATS: usize = 20;

/// The seeds to play: one, many times, or so many once, or those of the short form.
fn seeds() -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("VRAM_PAGER_SEED") {
        return vec![seed; REPEATS];
    }
    (1..=number("VRAM_PAGER_SCHEDULES").unwrap_or(100)).collect()
}

#[test]
fn manager_and_pager_are_right_in_every_schedule() {
    let (mut choices, mut real) = (0, 0);
    let mut different = std::collections::HashSet::new();
    for seed in seeds() {
        match play(seed, Broken::Nothing) {
            Ok(trace) => {
                choices += trace.choices;
                real += trace.real_choices;
                different.insert(trace.hash);
            }
            Err(why) => panic!("seed {seed} (VRAM_PAGER_SEED={seed} repeats it): {why}"),
        }
    }
    println!("{} schedules, {choices} choices, {real} of them between several ways", different.len());
    let seeds: std::collections::HashSet<u64> = seeds().into_iter().collect();
    assert!(different.len() >= seeds.len(), "schedules that repeat each other");
    assert!(real > choices / 4, "{real} real choices of {choices}");
}

/// A card that breaks a promise stands for a pager that forgot to ask for it.
fn is_found(broken: Broken) {
    let found = (1..=60).find_map(|seed| play(seed, broken).err().map(|why| (seed, why)));
    let Some((seed, why)) = found else { panic!("{broken:?} was not found in 60 schedules") };
    println!("{broken:?} is found by seed {seed}: {}", why.lines().next().unwrap_or(""));
}

#[test]
fn a_wait_of_a_stream_that_is_left_out_is_found() {
    is_found(Broken::StreamWait);
}

#[test]
fn a_wait_of_the_host_that_is_left_out_is_found() {
    is_found(Broken::HostWait);
}

#[test]
fn a_fence_that_is_taken_for_passed_is_found() {
    is_found(Broken::Query);
}
