//! Long runs stay flat: memory, handles, threads and tables are after many switches of models and many faults
//! what they were after few, and a pass at the end moves the bytes that the second one moved.
//!
//! The short form is a few hundred switches and tens of thousands of faults. With `VRAM_PAGER_LONG` set it is
//! 10,000 and 1,000,000; `tests/hard.sh long` sets it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[allow(
    unsafe_code,
    missing_docs,
    unreachable_pub,
    dead_code,
    reason = "a counting allocator, shared with benches"
)]
#[path = "../benches/common/alloc.rs"]
mod alloc;
mod common;

use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use alloc::Counting;
use common::{
    ModelFile, Watchdog, assert_nothing_left, checked_pass, pager, small_card, small_options, unit_id,
};
use vram_pager::device::{LiveObjects, SharedDevice};
use vram_pager::manager::{LoadOptions, Manager};
use vram_pager::pager::{ModelOptions, PagedModel, Pager, PagerStream, Verifier};
use vram_pager::patcher::{IdleCache, ModelPatcher, PagedPatcher, Place};
use vram_pager::units::{KIB, MIB};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Growth of the heap that is no growth: a list that got its last doubling late, a queue at its fullest.
const HEAP_SLACK: u64 = 256 * KIB;

/// As that, for what the system counts, which comes in larger steps.
const RESIDENT_SLACK: u64 = 16 * MIB;

/// What a process and a card hold after all work is done.
#[derive(Debug)]
struct Held {
    heap: u64,
    /// Of the process, in bytes.
    resident: u64,
    live: LiveObjects,
    files: usize,
    threads: usize,
    mappings: usize,
}

impl Held {
    fn now(device: &SharedDevice) -> Self {
        device.synchronize().unwrap();
        let entries = |path: &str| fs::read_dir(path).unwrap().count();
        let resident = fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = resident.split(' ').nth(1).unwrap().parse().unwrap();
        Self {
            heap: alloc::live_bytes(),
            resident: pages * 4 * KIB,
            live: device.live(),
            files: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            mappings: fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
        }
    }

    /// Asserts that nothing has grown since `before`.
    fn assert_flat_since(&self, before: &Self, what: &str) {
        println!("{what}: {before:?} early, {self:?} late");
        assert!(self.heap <= before.heap + HEAP_SLACK, "{what}: the heap grew: {before:?}, {self:?}");
        assert!(self.resident <= before.resident + RESIDENT_SLACK, "{what}: {before:?}, {self:?}");
        assert!(self.files <= before.files && self.threads <= before.threads, "{what}: {before:?}, {self:?}");
        // A frame that was taken for a moment more or less.
        assert!(self.mappings <= before.mappings + 64, "{what}: {before:?}, {self:?}");
        let counts =
            |live: &LiveObjects| [live.frames, live.ranges, live.mappings, live.streams, live.events];
        for (late, early) in counts(&self.live).into_iter().zip(counts(&before.live)) {
            // The pool of fences keeps as many events as were once in use together.
            assert!(late <= early + early / 8 + 32, "{what}: {before:?}, {self:?}");
        }
        assert!(self.live.page_locked_bytes <= before.live.page_locked_bytes, "{what}: {before:?}, {self:?}");
    }
}

fn is_long() -> bool {
    std::env::var_os("VRAM_PAGER_LONG").is_some_and(|value| !value.is_empty())
}

/// One of the two at a time: they count what the whole process holds.
static ALONE: Mutex<()> = Mutex::new(());

/// One pass of faults in order, not checked.
fn pass(model: &PagedModel, stream: &PagerStream) -> u64 {
    let units = model.index().units().len() as u64;
    for unit in 0..units {
        model.fault(unit_id(unit), stream).unwrap().release();
    }
    units
}

struct Switched {
    patcher: Arc<PagedPatcher>,
    model: Arc<PagedModel>,
}

fn open(pager: &Arc<Pager>, file: &ModelFile) -> Switched {
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    Switched { patcher: PagedPatcher::new(&model, Place::Card(0)), model }
}

#[test]
fn many_switches_of_models_leave_everything_flat() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let switches: u64 = if is_long() { 10_000 } else { 300 };
    let _watchdog = Watchdog::new(3000, "switches of models");
    let began = Instant::now();
    let files: Vec<_> = (1..=3).map(|seed| ModelFile::new(&[(128, 256); 10], seed)).collect();
    // Each model is 0.6 MiB.
    let device = small_card(MIB);
    {
        let pager = pager(&device, small_options());
        let manager = Manager::new(std::slice::from_ref(&device));
        manager.set_knobs(|knobs| {
            (knobs.reserve, knobs.inference_floor, knobs.headroom) = (0, 64 * KIB, Some(0));
            knobs.page_locked_budget = Some(16 * MIB);
        });
        let idle: Arc<dyn IdleCache> = Arc::clone(&pager) as _;
        manager.register_idle_cache(Place::Card(0), &idle).unwrap();
        let mut models: Vec<_> = files.iter().map(|file| open(&pager, file)).collect();
        let stream = pager.stream().unwrap();
        let (mut faults, mut early) = (0, None);
        for switch in 0..switches {
            if switch == switches / 10 {
                early = Some(Held::now(&device));
            }
            let place = usize::try_from(switch % 3).unwrap();
            if switch % 7 == 6 {
                // A model that is opened anew, with the other's entries in the ledger and the tables.
                models[place] = open(&pager, &files[place]);
            }
            let Switched { patcher, model } = &models[place];
            let loaded: Arc<dyn ModelPatcher> = match switch % 5 {
                0 => patcher.clone_model(),
                _ => Arc::clone(patcher) as _,
            };
            manager.load_model_gpu(&loaded, LoadOptions::default()).unwrap();
            if switch % 50 == 0 {
                let verifier = Verifier::new(model).unwrap();
                checked_pass(model, &stream, &verifier).unwrap();
                manager.unload_all_models().unwrap();
            } else {
                faults += pass(model, &stream);
            }
            assert!(manager.current_loaded_models().len() <= 3);
        }
        Held::now(&device).assert_flat_since(&early.unwrap(), "switches");
        println!("{switches} switches, {faults} faults in {:.1} s", began.elapsed().as_secs_f64());
    }
    assert_nothing_left(&device);
}

#[test]
fn many_faults_leave_everything_flat_and_the_last_pass_moves_what_the_second_did() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let wanted: u64 = if is_long() { 1_000_000 } else { 30_000 };
    let _watchdog = Watchdog::new(3000, "faults");
    let began = Instant::now();
    // 3.2 MiB, four times the card.
    let file = ModelFile::new(&[(64, 256), (32, 200), (128, 256), (16, 64)].repeat(25), 9);
    let device = small_card(832 * KIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let verifier = Verifier::new(&model).unwrap();
        let (mut faults, mut passes, mut early, mut second) = (0, 0_u64, None, 0);
        let mut last = 0;
        while faults < wanted {
            if early.is_none() && faults >= wanted / 10 {
                early = Some(Held::now(&device));
            }
            let before = model.counts();
            if passes % 100 < 2 {
                checked_pass(&model, &stream, &verifier).unwrap();
                faults += model.index().units().len() as u64;
            } else {
                faults += pass(&model, &stream);
            }
            last = model.counts().copied_bytes - before.copied_bytes;
            passes += 1;
            if passes == 2 {
                second = last;
            }
        }
        assert!(second > 0);
        assert_eq!(last, second, "the last of {passes} passes, and the second");
        Held::now(&device).assert_flat_since(&early.unwrap(), "faults");
        checked_pass(&model, &stream, &verifier).unwrap();
        println!("{faults} faults in {passes} passes and {:.1} s", began.elapsed().as_secs_f64());
    }
    assert_nothing_left(&device);
}
