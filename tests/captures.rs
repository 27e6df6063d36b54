//! Streams that are captured at any moment, over the driver stand-in: random faults, guards, drops and budgets beside
//! captures that begin and end. Nothing may be enqueued on a stream that is captured, or waited for, and in the end
//! nothing is left.

#![cfg(feature = "cuda")]
#![expect(unsafe_code, reason = "registers raw streams")]
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a helper that panics is a test that fails, and numbers are small"
)]

mod common;

use std::sync::Arc;

use common::standin::{Runner, Standin, standin};
use common::{
    ModelFile, Numbers, Watchdog, assert_nothing_left, checked_pass, pager, small_options, unit_id,
};
use vram_pager::device::{self, PoolAllocation, SharedDevice};
use vram_pager::pager::{ModelOptions, OwnedGuard, PagedModel, Pager, PagerError, PagerStream, Verifier};
use vram_pager::units::KIB;

const PAGE: u64 = 64 * KIB;

/// What may be refused beside a capture, or by a card that is full.
fn is_refusal(error: &PagerError) -> bool {
    use PagerError::{AllocateWhileCapturing, Capturing, Device, NeverFits};
    match error {
        Device(error) => error.is_out_of_memory(),
        Capturing { .. } | AllocateWhileCapturing { .. } | NeverFits { .. } => true,
        error => error.is_held(),
    }
}

fn expect_refusal<T>(answer: Result<T, PagerError>) -> Option<T> {
    match answer {
        Ok(value) => Some(value),
        Err(error) => {
            assert!(is_refusal(&error), "{error:?}");
            None
        }
    }
}

/// Two streams of runners, which may be captured, and one of the pager's own.
struct Streams<'r> {
    standin: &'static Standin,
    runners: &'r [Runner; 2],
    all: [Arc<PagerStream>; 3],
    capturing: [bool; 3],
}

impl<'r> Streams<'r> {
    fn new(standin: &'static Standin, runners: &'r [Runner; 2], pager: &Pager) -> Self {
        // SAFETY: the runners destroy their streams after the pager is gone.
        let raw = |runner: &Runner| Arc::new(unsafe { pager.register_raw(runner.stream) }.unwrap());
        let all = [raw(&runners[0]), raw(&runners[1]), Arc::new(pager.stream().unwrap())];
        Self { standin, runners, all, capturing: [false; 3] }
    }

    fn capture(&mut self, stream: usize, capturing: bool) {
        if let Some(runner) = self.runners.get(stream) {
            self.capturing[stream] = capturing;
            self.standin.set_capturing(runner.stream, capturing);
        }
    }
}

fn check(model: &Arc<PagedModel>, guard: &OwnedGuard) {
    let verifier = Verifier::new(model).unwrap();
    let wrong = verifier.begin(guard.stream()).and_then(|mut check| {
        check.tensors(&guard.tensors())?;
        check.finish()
    });
    assert!(expect_refusal(wrong).is_none_or(|wrong| wrong.is_empty()));
}

fn random(standin: &'static Standin, device: &SharedDevice, seed: u64) {
    let misuses = standin.misuses();
    let mut numbers = Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let total = device.info().total_bytes;
    let runners = [Runner::new(standin), Runner::new(standin)];
    let files = [seed, seed + 1].map(|seed| {
        let units: Vec<_> =
            (0..6 + numbers.below(20)).map(|_| (1 + numbers.below(300), 1 + numbers.below(400))).collect();
        ModelFile::new(&units, seed)
    });
    {
        let pager = pager(device, small_options());
        let mut streams = Streams::new(standin, &runners, &pager);
        let open = |file: &ModelFile| Some(pager.open_model(file.index(), &ModelOptions::default()).unwrap());
        let mut models = [open(&files[0]), open(&files[1])];
        let mut held: Vec<(usize, OwnedGuard)> = Vec::new();
        let mut activations: Vec<PoolAllocation> = Vec::new();
        for step in 0..250 {
            let (place, stream) = (usize::from(numbers.below(2) == 1), numbers.below(3) as usize);
            let choice = numbers.below(20);
            match (choice, models[place].clone()) {
                (0..=8, Some(model)) => {
                    let unit = unit_id(numbers.below(model.index().units().len() as u64));
                    if let Some(guard) = expect_refusal(model.fault_owned(unit, &streams.all[stream])) {
                        if !streams.capturing[stream] {
                            check(&model, &guard);
                        }
                        if numbers.below(3) == 0 && held.len() < 5 {
                            held.push((place, guard));
                        }
                    }
                }
                (9 | 10, _) => streams.capture(stream, !streams.capturing[stream]),
                (11 | 12, _) if !held.is_empty() => {
                    drop(held.swap_remove(numbers.below(held.len() as u64) as usize));
                }
                (13, _) => pager.set_headroom(numbers.below(2) * numbers.below(total)).unwrap(),
                (14, _) => {
                    let bytes = 1 + numbers.below(total / 2);
                    activations.extend(expect_refusal(pager.allocate(&streams.all[stream], bytes)));
                }
                (15, _) => activations.clear(),
                (16, Some(_)) => {
                    held.retain(|(of, _)| *of != place);
                    models[place] = None;
                }
                (16, None) => models[place] = open(&files[place]),
                (17, Some(model)) => {
                    let tensor = model.index().unit_info(unit_id(0)).tensors[0];
                    let own = Arc::clone(&streams.all[stream]);
                    let rows = expect_refusal(model.fault_rows(tensor, &[0, 0], &own));
                    streams.capture(stream, numbers.below(2) == 0);
                    drop(rows);
                }
                (18, Some(model)) => {
                    model.unload(numbers.below(total)).unwrap();
                    model.activate(Some(2)).unwrap();
                }
                _ => drop(pager.release_idle().unwrap()),
            }
            let figures = pager.figures();
            let frames = figures.resident_bytes + figures.ring_bytes + figures.idle_bytes;
            assert!(
                !pager.stable_addresses() || frames == device.live().frames * PAGE,
                "{step}: {figures:?}"
            );
            assert_eq!(standin.misuses(), misuses, "seed {seed}, step {step}: {:?}", standin.take_told());
        }
        drop((held, activations));
        for stream in 0..2 {
            streams.capture(stream, false);
        }
        pager.set_headroom(0).unwrap();
        for model in models.iter().flatten() {
            let verifier = Verifier::new(model).unwrap();
            for stream in streams.all.iter().chain(&streams.all) {
                checked_pass(model, stream, &verifier).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            }
        }
        device.memory().expect("no error was left behind");
    }
    assert_nothing_left(device);
    assert_eq!(standin.misuses(), misuses, "seed {seed}: {:?}", standin.take_told());
}

#[test]
fn captures_at_any_moment_see_nothing_enqueued_and_leave_nothing() {
    let standin = standin();
    standin.set_page(PAGE);
    for seed in 1..=12 {
        let _watchdog = Watchdog::new(60, format!("captures, seed {seed}"));
        for (virtual_memory, pools) in [(true, true), (false, true), (false, false)] {
            standin.set_abilities(virtual_memory, pools);
            let device = device::open(&format!("cuda:0,cap={}", (40 + 7 * seed % 80) * PAGE)).unwrap();
            random(standin, &device, seed);
            drop(device);
            assert_eq!(standin.leftovers(), 0, "seed {seed}");
        }
    }
}
