//! Guards that are held while others are faulted. A fault goes around what is held, by other frames, or
//! fails at once with an error that names what is held; it never hangs. What a guard gave stays right
//! until it is released, on whichever thread that is, and dropping the model waits for copies in flight.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{
    ModelFile, Numbers, Watchdog, assert_nothing_left, hooked_card, mixed_units, pager, small_card,
    small_options, unit_id,
};
use vram_pager::pager::{Guard, ModelOptions, OwnedGuard, PagerError, PagerOptions, RingSize, Verifier};
use vram_pager::units::{KIB, MIB};

#[test]
fn a_fault_goes_around_held_guards_or_names_them_and_their_bytes_stay() {
    for card in [704 * KIB, MIB, 2 * MIB, 4 * MIB] {
        for seed in 1..=4 {
            let _watchdog = Watchdog::new(60, format!("card of {card}, seed {seed}"));
            let file = ModelFile::new(&mixed_units(), seed);
            let device = small_card(card);
            {
                let pager = pager(&device, small_options());
                let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
                let stream = pager.stream().unwrap();
                let verifier = Verifier::new(&model).unwrap();
                let mut check = verifier.begin(&stream).unwrap();
                let mut numbers = Numbers(seed);
                let units = model.index().units().len() as u64;
                let mut refusals = 0;
                for _ in 0..6 {
                    // Fill the card with guards until a fault is refused.
                    let mut held: Vec<Guard<'_>> = Vec::new();
                    let mut names: HashSet<String> = HashSet::new();
                    for _ in 0..64 {
                        let unit = unit_id(numbers.below(units));
                        let pieces = u64::from(model.pieces(unit).unwrap());
                        let piece = u32::try_from(numbers.below(pieces)).unwrap();
                        match model.fault_piece(unit, piece, &stream) {
                            Ok(guard) => {
                                names.insert(model.index().unit_info(unit).name.clone());
                                held.push(guard);
                            }
                            Err(PagerError::Held { held: told, need, what, .. }) => {
                                refusals += 1;
                                assert!(need > 0 && what.contains("blocks."), "{what}");
                                assert!(!told.is_empty());
                                for name in told.iter().filter(|name| !name.ends_with(" more")) {
                                    let unit = name.split(" (piece").next().unwrap();
                                    assert!(names.contains(unit), "{name} is not held: {names:?}");
                                }
                                break;
                            }
                            Err(error) => panic!("card of {card}, seed {seed}: {error}"),
                        }
                    }
                    // At the end of holding everything is still what it was.
                    for guard in &held {
                        check.tensors(&guard.tensors()).unwrap();
                    }
                    assert_eq!(check.finish().unwrap(), [], "card of {card}, seed {seed}");
                    while !held.is_empty() {
                        let place = numbers.below(held.len() as u64);
                        drop(held.swap_remove(usize::try_from(place).unwrap()));
                    }
                    // With nothing held nothing is refused.
                    for unit in 0..units {
                        for piece in 0..model.pieces(unit_id(unit)).unwrap() {
                            let guard = model.fault_piece(unit_id(unit), piece, &stream).unwrap();
                            check.tensors(&guard.tensors()).unwrap();
                        }
                    }
                    assert_eq!(check.finish().unwrap(), []);
                }
                assert!(refusals > 0 || card >= 4 * MIB, "card of {card}: nothing was ever refused");
            }
            assert_nothing_left(&device);
        }
    }
}

#[test]
fn one_guard_may_be_held_through_whole_passes_of_the_others() {
    let file = ModelFile::new(&mixed_units(), 9);
    for card in [MIB, 2 * MIB] {
        let _watchdog = Watchdog::new(60, format!("a long guard on a card of {card}"));
        let device = small_card(card);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let other = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            let units = model.index().units().len() as u64;
            for long in [0, 3, 10, 23] {
                let unit = unit_id(long);
                let mut check = verifier.begin(&stream).unwrap();
                let mut last = verifier.begin(&other).unwrap();
                let guard = model.fault_piece(unit, 0, &other).unwrap();
                for _ in 0..2 {
                    for next in 0..units {
                        let next = unit_id(next);
                        for piece in 0..model.pieces(next).unwrap() {
                            let guard = model.fault_piece(next, piece, &stream).unwrap();
                            check.tensors(&guard.tensors()).unwrap();
                        }
                    }
                }
                assert_eq!(check.finish().unwrap(), []);
                last.tensors(&guard.tensors()).unwrap();
                drop(guard);
                assert_eq!(last.finish().unwrap(), []);
            }
        }
        assert_nothing_left(&device);
    }
}

/// Wherever in the ring the frame of a guard lies: the others follow the budget at once.
#[test]
fn a_ring_keeps_no_more_than_guards_hold_when_the_budget_is_gone() {
    let file = ModelFile::new(&[(100, 300); 60], 3);
    for unit in (0..60).map(unit_id) {
        let device = small_card(2 * MIB);
        {
            let ring = RingSize::Pages(8);
            let pager = pager(&device, PagerOptions { ring, ..small_options() });
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            for _ in 0..2 {
                common::checked_pass(&model, &stream, &verifier).unwrap();
            }
            let guard = model.fault(unit, &stream).unwrap();
            let mut check = verifier.begin(&stream).unwrap();
            check.tensors(&guard.tensors()).unwrap();
            assert_eq!(pager.figures().ring_bytes, 8 * 64 * KIB);
            pager.set_headroom(2 * MIB).unwrap();
            let (figures, own) = (pager.figures(), model.layout().span(unit.0).pages);
            let held = figures.resident_bytes + figures.ring_bytes + figures.idle_bytes;
            assert_eq!(held, 64 * KIB * u64::from(own.end - own.start), "{unit:?}: {figures:?}");
            drop(guard);
            assert_eq!(check.finish().unwrap(), []);
            // Bytes and ring come back.
            pager.set_headroom(0).unwrap();
            for _ in 0..2 {
                common::checked_pass(&model, &stream, &verifier).unwrap();
            }
            assert_eq!(pager.figures().ring_bytes, 8 * 64 * KIB);
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn an_owned_guard_is_right_and_released_on_another_thread() {
    let _watchdog = Watchdog::new(60, "owned guards");
    let file = ModelFile::new(&mixed_units(), 13);
    let (hooks, device) = hooked_card(2 * MIB);
    hooks.seed_delays(5);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = Arc::new(pager.stream().unwrap());
        let verifier = Arc::new(Verifier::new(&model).unwrap());
        let (send, receive) = std::sync::mpsc::sync_channel::<OwnedGuard>(0);
        let taker = {
            let (verifier, stream) = (Arc::clone(&verifier), Arc::clone(&stream));
            std::thread::spawn(move || {
                let mut check = verifier.begin(&stream).unwrap();
                for guard in receive {
                    check.tensors(&guard.tensors()).unwrap();
                }
                assert_eq!(check.finish().unwrap(), []);
            })
        };
        for _ in 0..3 {
            for unit in 0..model.index().units().len() as u64 {
                let unit = unit_id(unit);
                if model.pieces(unit).unwrap() > 1 {
                    continue;
                }
                let guard = loop {
                    match model.fault_owned(unit, &stream) {
                        Err(error) if error.is_held() => std::thread::yield_now(),
                        other => break other.unwrap(),
                    }
                };
                send.send(guard).unwrap();
            }
        }
        drop(send);
        taker.join().unwrap();
        // The last owner of a model may be a guard.
        let last = model.fault_owned(unit_id(1), &stream).unwrap();
        drop((verifier, model, pager, stream));
        std::thread::spawn(move || drop(last)).join().unwrap();
    }
    assert_nothing_left(&device);
}

#[test]
fn a_model_may_be_dropped_while_its_copies_are_in_flight() {
    for seed in 1..=8 {
        let _watchdog = Watchdog::new(60, format!("drop in flight, seed {seed}"));
        let file = ModelFile::new(&mixed_units(), seed);
        let (hooks, device) = hooked_card(2 * MIB);
        hooks.seed_delays(seed);
        {
            let pager = pager(&device, small_options());
            let stream = pager.stream().unwrap();
            let stays = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let verifier = Verifier::new(&stays).unwrap();
            let mut numbers = Numbers(seed);
            for _ in 0..4 {
                let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
                for _ in 0..numbers.below(24) {
                    let unit = unit_id(numbers.below(24));
                    let _ = model.fault_piece(unit, 0, &stream).unwrap();
                }
                drop(model);
                common::checked_pass(&stays, &stream, &verifier).unwrap();
            }
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn a_wait_for_guards_ends_at_its_deadline_and_says_who_holds() {
    let _watchdog = Watchdog::new(60, "deadline");
    let file = ModelFile::new(&mixed_units(), 17);
    let device = small_card(704 * KIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let (mine, others) = (pager.stream().unwrap(), pager.stream().unwrap());
        let mut held = Vec::new();
        let refused = loop {
            let unit = unit_id(held.len() as u64);
            match model.fault_piece(unit, 0, &others) {
                Ok(guard) => held.push(guard),
                Err(error) => break (unit, error),
            }
        };
        assert!(refused.1.is_held(), "{}", refused.1);
        let soon = Instant::now() + Duration::from_millis(30);
        let error = model.fault_piece_when_free(refused.0, 0, &mine, soon).unwrap_err();
        assert!(matches!(error, PagerError::Deadline { .. }), "{error}");
        assert!(error.to_string().contains("blocks.000"), "{error}");
        // It goes on as soon as another thread lets go.
        let later = Instant::now() + Duration::from_secs(50);
        std::thread::scope(|scope| {
            let waiter =
                scope.spawn(|| drop(model.fault_piece_when_free(refused.0, 0, &mine, later).unwrap()));
            drop(held);
            waiter.join().unwrap();
        });
    }
    assert_nothing_left(&device);
}

#[test]
fn a_guard_is_released_on_another_stream_of_its_card_and_on_no_other() {
    let file = ModelFile::new(&mixed_units(), 19);
    let (device, elsewhere) = (small_card(MIB), small_card(MIB));
    {
        let here = pager(&device, small_options());
        let there = pager(&elsewhere, small_options());
        let model = here.open_model(file.index(), &ModelOptions::default()).unwrap();
        let (stream, other) = (here.stream().unwrap(), here.stream().unwrap());
        let foreign = there.stream().unwrap();
        model.fault_piece(unit_id(1), 0, &stream).unwrap().release_on(&other).unwrap();
        let error = model.fault_piece(unit_id(1), 0, &stream).unwrap().release_on(&foreign).unwrap_err();
        assert!(matches!(error, PagerError::OtherDevice { .. }), "{error}");
        // Nothing stays held by it.
        let verifier = Verifier::new(&model).unwrap();
        for _ in 0..2 {
            common::checked_pass(&model, &stream, &verifier).unwrap();
        }
    }
    assert_nothing_left(&device);
    assert_nothing_left(&elsewhere);
}
