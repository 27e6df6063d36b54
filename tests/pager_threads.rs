//! Many threads on one model: whatever they fault, in whatever order, holding up to three guards each,
//! every byte under every guard is the file's, and nobody hangs. A fault may fail while guards fill the
//! ring, and then it names what is held; a caller that holds nothing and is willing to wait never fails.
//!
//! Each thread has its own stream and numbers from the seed that a failure prints.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{
    ModelFile, Numbers, Watchdog, assert_nothing_left, hooked_card, mixed_units, pager, small_card,
    small_options, unit_id,
};
use vram_pager::pager::{Check, Guard, ModelOptions, PagedModel, PagerError, PagerStream, Verifier};
use vram_pager::units::{KIB, MIB};

/// The model is 5.2 MiB: from an eighth of it to all of it.
const CARDS: [u64; 4] = [704 * KIB, 1408 * KIB, 2816 * KIB, 5632 * KIB];

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(50)
}

/// Checks what a guard gives, in a check that is compared when it is full.
fn check_guard(check: &mut Check<'_>, guard: &Guard<'_>) {
    check.tensors(&guard.tensors()).unwrap();
    if check.is_nearly_full() {
        assert_eq!(check.finish().unwrap(), []);
    }
}

/// One thread that faults random units or pieces and holds up to three guards, released in random order.
fn random_faults(model: &PagedModel, stream: &PagerStream, mut check: Check<'_>, seed: u64, steps: u32) {
    let mut numbers = Numbers(seed);
    let mut held: Vec<Guard<'_>> = Vec::new();
    let units = model.index().units().len() as u64;
    for _ in 0..steps {
        while held.len() as u64 > numbers.below(3) {
            let place = usize::try_from(numbers.below(held.len() as u64)).unwrap();
            held.swap_remove(place).release();
        }
        let unit = unit_id(numbers.below(units));
        let piece = u32::try_from(numbers.below(u64::from(model.pieces(unit).unwrap()))).unwrap();
        let guard = if held.is_empty() {
            model.fault_piece_when_free(unit, piece, stream, soon())
        } else {
            model.fault_piece(unit, piece, stream)
        };
        match guard {
            Ok(guard) => {
                check_guard(&mut check, &guard);
                held.push(guard);
            }
            Err(PagerError::Held { held: names, .. }) if !held.is_empty() => {
                assert!(!names.is_empty(), "seed {seed}: a refusal that names nothing");
                // Whoever is refused lets go, or everybody might stay refused for good.
                held.pop();
            }
            Err(error) => panic!("seed {seed}, holding {}: {error}", held.len()),
        }
    }
    // What is held now was faulted through by others meanwhile: its bytes are still right.
    for guard in &held {
        check_guard(&mut check, guard);
    }
    drop(held);
    assert_eq!(check.finish().unwrap(), [], "seed {seed}");
}

fn run_random(threads: u64, card: u64, seed: u64, delays: bool) {
    let what = format!("{threads} threads, card of {card} bytes, seed {seed}, delays {delays}");
    let _watchdog = Watchdog::new(60, what.clone());
    let file = ModelFile::new(&mixed_units(), seed);
    let (hooks, device) = hooked_card(card);
    if delays {
        hooks.seed_delays(seed);
    }
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        let streams: Vec<_> = (0..threads).map(|_| pager.stream().unwrap()).collect();
        // Their memory is taken first, while no guard could hold it.
        let checks: Vec<_> = streams.iter().map(|stream| verifier.begin(stream).unwrap()).collect();
        let failed = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..)
                .zip(&streams)
                .zip(checks)
                .map(|((number, stream), check)| {
                    let model = &model;
                    scope.spawn(move || random_faults(model, stream, check, seed * 64 + number + 1, 60))
                })
                .collect();
            handles.into_iter().map(|handle| handle.join().is_err()).filter(|failed| *failed).count()
        });
        assert_eq!(failed, 0, "{what}");
        let figures = pager.figures();
        assert!(
            figures.resident_bytes + figures.ring_bytes + figures.idle_bytes <= card,
            "{what}: {figures:?}"
        );
        assert_eq!(device.counts().device_sync, 0);
    }
    assert_nothing_left(&device);
}

#[test]
fn random_faults_of_many_threads_give_the_right_bytes_and_end() {
    for threads in [2, 4, 8] {
        for card in CARDS {
            run_random(threads, card, 0x5eed + threads + card, false);
        }
    }
}

#[test]
fn so_they_do_when_completions_come_late() {
    for seed in 1..=3 {
        run_random(4, CARDS[1], seed, true);
        run_random(3, CARDS[2], seed, true);
    }
}

#[test]
fn threads_that_share_one_counter_never_fail() {
    for threads in [1, 2, 4, 8] {
        for card in CARDS {
            let what = format!("{threads} threads, card of {card} bytes");
            let _watchdog = Watchdog::new(60, what.clone());
            let file = ModelFile::new(&mixed_units(), 11);
            let device = small_card(card);
            {
                let pager = pager(&device, small_options());
                let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
                let verifier = Arc::new(Verifier::new(&model).unwrap());
                let streams: Vec<_> = (0..threads).map(|_| pager.stream().unwrap()).collect();
                for pass in 0..4 {
                    let before = model.counts();
                    let next = AtomicU64::new(0);
                    let units = model.index().units().len() as u64;
                    let checks: Vec<_> =
                        streams.iter().map(|stream| verifier.begin(stream).unwrap()).collect();
                    std::thread::scope(|scope| {
                        for (stream, mut check) in streams.iter().zip(checks) {
                            let (model, next, what) = (&model, &next, &what);
                            scope.spawn(move || {
                                loop {
                                    let unit = next.fetch_add(1, Ordering::Relaxed);
                                    if unit >= units {
                                        break;
                                    }
                                    let unit = unit_id(unit);
                                    for piece in 0..model.pieces(unit).unwrap() {
                                        let guard = model
                                            .fault_piece_when_free(unit, piece, stream, soon())
                                            .unwrap_or_else(|error| panic!("{what}, pass {pass}: {error}"));
                                        check_guard(&mut check, &guard);
                                    }
                                }
                                assert_eq!(check.finish().unwrap(), []);
                            });
                        }
                    });
                    let copied = model.counts().copied_bytes - before.copied_bytes;
                    // With several threads it depends on which is late what is copied twice.
                    if pass > 0 && threads == 1 {
                        let figures = model.figures();
                        let largest = 512 * 512 * 2 + 1024;
                        let bound = figures.weights_bytes.saturating_sub(figures.resident_bytes) + largest;
                        assert!(copied <= bound, "{what}, pass {pass}: {copied} bytes of at most {bound}");
                    }
                }
            }
            assert_nothing_left(&device);
        }
    }
}

#[test]
fn pieces_of_one_unit_may_be_taken_by_several_threads() {
    let _watchdog = Watchdog::new(60, "pieces of one unit by several threads");
    let file = ModelFile::new(&[(2048, 512), (64, 64)], 3);
    let device = small_card(MIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        let unit = unit_id(0);
        let pieces = model.pieces(unit).unwrap();
        assert!(pieces > 4, "{pieces}");
        let streams: Vec<_> = (0..6).map(|_| pager.stream().unwrap()).collect();
        let next = AtomicU64::new(0);
        let checks: Vec<_> = streams.iter().map(|stream| verifier.begin(stream).unwrap()).collect();
        std::thread::scope(|scope| {
            for (stream, mut check) in streams.iter().zip(checks) {
                let (model, next) = (&model, &next);
                scope.spawn(move || {
                    loop {
                        let turn = next.fetch_add(1, Ordering::Relaxed);
                        if turn >= u64::from(pieces) * 4 {
                            break;
                        }
                        let piece = u32::try_from(turn % u64::from(pieces)).unwrap();
                        let guard = model.fault_piece_when_free(unit, piece, stream, soon()).unwrap();
                        check_guard(&mut check, &guard);
                    }
                    assert_eq!(check.finish().unwrap(), []);
                });
            }
        });
    }
    assert_nothing_left(&device);
}
