//! Several models on one card, and a card that others use too. Whatever happens (turns, activation,
//! another process that takes memory, activations, a headroom that is set while it runs), every byte is
//! right, frames and ring stay within card less headroom, and when the pressure ends what was resident
//! comes back within one pass.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::sync::Arc;

use common::{
    ModelFile, Numbers, Watchdog, assert_nothing_left, checked_pass, fault_and_check, hooked_card,
    mixed_units, pager, small_card, small_options, unit_id,
};
use vram_pager::device::SharedDevice;
use vram_pager::pager::{ModelOptions, PagedModel, Pager, PagerOptions, Verifier};
use vram_pager::units::{KIB, MIB};

/// Frames and ring, as the pager says and as the card says.
#[expect(clippy::unwrap_used, reason = "a device that does not answer fails the test")]
fn assert_within(device: &SharedDevice, pager: &Pager, others: u64, what: &str) {
    let figures = pager.figures();
    let ours = figures.resident_bytes + figures.ring_bytes + figures.idle_bytes;
    let total = device.info().total_bytes;
    let pool = device.pool_figures().unwrap().reserved;
    assert_eq!(device.live().frames * figures.page_bytes, ours, "{what}: {figures:?}");
    assert!(
        ours + pool + others + figures.headroom_bytes <= total,
        "{what}: {ours} + pool {pool} + others {others} + headroom {} of {total}",
        figures.headroom_bytes
    );
}

#[test]
fn models_interleaved_or_in_turn_with_and_without_activation_are_right() {
    let files: Vec<ModelFile> = (0..3).map(|seed| ModelFile::new(&mixed_units(), 31 + seed)).collect();
    for count in [2, 3] {
        for card in [MIB, 3 * MIB, 7 * MIB, 12 * MIB] {
            for activates in [false, true] {
                let what = format!("{count} models, card of {card}, activates: {activates}");
                let _watchdog = Watchdog::new(60, what.clone());
                let device = small_card(card);
                {
                    let pager = pager(&device, small_options());
                    let stream = pager.stream().unwrap();
                    let models: Vec<_> = files[..count]
                        .iter()
                        .map(|file| pager.open_model(file.index(), &ModelOptions::default()).unwrap())
                        .collect();
                    let verifiers: Vec<_> =
                        models.iter().map(|model| Verifier::new(model).unwrap()).collect();
                    // In turn, two passes each.
                    for _ in 0..2 {
                        for (model, verifier) in models.iter().zip(&verifiers) {
                            if activates {
                                model.activate(Some(2)).unwrap();
                            }
                            for _ in 0..2 {
                                checked_pass(model, &stream, verifier)
                                    .unwrap_or_else(|e| panic!("{what}: {e}"));
                                assert_within(&device, &pager, 0, &what);
                            }
                        }
                    }
                    // Unit by unit.
                    let mut checks: Vec<_> = verifiers.iter().map(|v| v.begin(&stream).unwrap()).collect();
                    for _ in 0..2 {
                        for unit in 0..24 {
                            for (model, check) in models.iter().zip(&mut checks) {
                                fault_and_check(model, unit_id(unit), &stream, check).unwrap();
                            }
                        }
                    }
                    for check in &mut checks {
                        assert_eq!(check.finish().unwrap(), [], "{what}");
                    }
                    assert_within(&device, &pager, 0, &what);
                    // One goes, the other has the card.
                    drop(checks);
                    let mut verifiers = verifiers;
                    let mut models = models;
                    drop((verifiers.remove(0), models.remove(0)));
                    for _ in 0..3 {
                        for (model, verifier) in models.iter().zip(&verifiers) {
                            checked_pass(model, &stream, verifier).unwrap();
                        }
                    }
                    assert_within(&device, &pager, 0, &what);
                }
                assert_nothing_left(&device);
            }
        }
    }
}

#[test]
fn a_model_that_is_left_alone_gets_the_card_within_one_pass() {
    let files: Vec<ModelFile> = (0..2).map(|seed| ModelFile::new(&mixed_units(), 41 + seed)).collect();
    for card in [3 * MIB, 6 * MIB] {
        let (alone, device) = (small_card(card), small_card(card));
        let wanted = {
            let pager = pager(&alone, small_options());
            let stream = pager.stream().unwrap();
            let model = pager.open_model(files[0].index(), &ModelOptions::default()).unwrap();
            let verifier = Verifier::new(&model).unwrap();
            for _ in 0..3 {
                checked_pass(&model, &stream, &verifier).unwrap();
            }
            model.figures().resident_bytes
        };
        {
            let pager = pager(&device, small_options());
            let stream = pager.stream().unwrap();
            let first = pager.open_model(files[0].index(), &ModelOptions::default()).unwrap();
            let verifier = Verifier::new(&first).unwrap();
            checked_pass(&first, &stream, &verifier).unwrap();
            let second = pager.open_model(files[1].index(), &ModelOptions::default()).unwrap();
            second.activate(Some(10)).unwrap();
            let other = Verifier::new(&second).unwrap();
            for _ in 0..3 {
                checked_pass(&second, &stream, &other).unwrap();
            }
            drop((other, second));
            first.activate(Some(10)).unwrap();
            checked_pass(&first, &stream, &verifier).unwrap();
            checked_pass(&first, &stream, &verifier).unwrap();
            let has = first.figures().resident_bytes;
            assert!(has + 2 * 64 * KIB >= wanted, "card of {card}: {has} of {wanted}");
        }
        assert_nothing_left(&device);
    }
}

/// Bytes that each of `turns` switches copies; a switch is three passes of the next model.
fn switches(files: &[ModelFile], card: u64, turns: &[usize]) -> Vec<u64> {
    let device = small_card(card);
    let mut copied = Vec::new();
    {
        let pager = pager(&device, small_options());
        let stream = pager.stream().unwrap();
        let open = |file: &ModelFile| pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let models: Vec<_> = files.iter().map(open).collect();
        let verifiers: Vec<_> = models.iter().map(|model| Verifier::new(model).unwrap()).collect();
        for &turn in turns {
            let before = device.counts().bytes_to_device;
            models[turn].activate(None).unwrap();
            for _ in 0..3 {
                checked_pass(&models[turn], &stream, &verifiers[turn]).unwrap();
            }
            copied.push(device.counts().bytes_to_device - before);
        }
    }
    assert_nothing_left(&device);
    copied
}

#[test]
fn models_that_take_turns_in_a_ring_find_every_other_one_on_the_card() {
    let files: Vec<ModelFile> = (0..3).map(|seed| ModelFile::new(&mixed_units(), 61 + seed)).collect();
    let turns: Vec<usize> = (0..15).map(|turn| turn % 3).collect();
    // Two of the three fit.
    let copied = switches(&files, 10 * MIB, &turns);
    let each = copied[0];
    assert!(copied[1] == each && copied[3] >= each / 2, "{copied:?}");
    // Giving up the one that was not used for the longest time would bring each of them in each time.
    let later: u64 = copied[5..].iter().sum();
    assert!(later <= each * 11 / 2, "ten switches copied {later}, a model has {each}: {copied:?}");
    assert!(copied[5..].iter().filter(|&&bytes| bytes == 0).count() >= 4, "{copied:?}");
}

#[test]
fn below_the_headroom_the_next_fault_gives_back_all_that_others_took() {
    let file = ModelFile::new(&mixed_units(), 71);
    let (hooks, device) = hooked_card(4 * MIB);
    {
        let options = PagerOptions { headroom_bytes: Some(128 * KIB), ..small_options() };
        let pager = pager(&device, options);
        let stream = pager.stream().unwrap();
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        let bytes_of_a_pass = || {
            let before = device.counts().bytes_to_device;
            checked_pass(&model, &stream, &verifier).unwrap();
            device.counts().bytes_to_device - before
        };
        let before = [bytes_of_a_pass(), bytes_of_a_pass(), bytes_of_a_pass(), bytes_of_a_pass()][3];
        // Far more than was free: the free memory alone does not tell how much it was.
        hooks.set_other_bytes(MIB);
        pager.refresh().unwrap();
        assert_within(&device, &pager, MIB, "one look later");
        let during = [bytes_of_a_pass(), bytes_of_a_pass(), bytes_of_a_pass()];
        assert_within(&device, &pager, MIB, "while others hold it");
        assert_eq!(during[1], during[2], "settled within one pass: {during:?}");
        hooks.set_other_bytes(0);
        let after = [bytes_of_a_pass(), bytes_of_a_pass()];
        assert_eq!(after[1], before, "back within one pass: {after:?}");
    }
    assert_nothing_left(&device);
}

#[test]
fn another_process_may_take_memory_and_give_it_back() {
    let file = ModelFile::new(&mixed_units(), 51);
    let card = 4 * MIB;
    let _watchdog = Watchdog::new(60, "pressure of others");
    let (hooks, device) = hooked_card(card);
    {
        // Others can only take what is free: the headroom, which the pager makes free again each time.
        let headroom = 512 * KIB;
        let options = PagerOptions { headroom_bytes: Some(headroom), ..small_options() };
        let pager = pager(&device, options);
        let stream = pager.stream().unwrap();
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        for _ in 0..3 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        let before = model.figures().resident_bytes;
        for step in [1, 2, 3, 4, 5, 4, 2, 0] {
            let others = step * headroom;
            hooks.set_other_bytes(others);
            if step % 2 == 0 {
                pager.refresh().unwrap();
                assert_within(&device, &pager, others, &format!("others {others}"));
            }
            for _ in 0..2 {
                checked_pass(&model, &stream, &verifier).unwrap_or_else(|e| panic!("others {others}: {e}"));
                assert_within(&device, &pager, others, &format!("others {others}"));
            }
        }
        // The first pass notices, the second has it all back.
        assert_eq!(model.figures().resident_bytes, before);
        let counts = device.counts();
        checked_pass(&model, &stream, &verifier).unwrap();
        assert_eq!(device.counts().map, counts.map, "and is steady again");
    }
    assert_nothing_left(&device);
}

#[test]
fn pressure_that_comes_and_goes_in_the_middle_of_passes_harms_no_byte() {
    for seed in 1..=6 {
        let _watchdog = Watchdog::new(60, format!("random pressure, seed {seed}"));
        let files: Vec<ModelFile> =
            (0..2).map(|other| ModelFile::new(&mixed_units(), seed + other)).collect();
        let (hooks, device) = hooked_card(4 * MIB);
        {
            let pager = pager(&device, small_options());
            let stream = pager.stream().unwrap();
            let models: Vec<_> = files
                .iter()
                .map(|file| pager.open_model(file.index(), &ModelOptions::default()).unwrap())
                .collect();
            let verifiers: Vec<_> = models.iter().map(|model| Verifier::new(model).unwrap()).collect();
            let mut checks: Vec<_> = verifiers.iter().map(|v| v.begin(&stream).unwrap()).collect();
            let mut numbers = Numbers(seed);
            let mut activations = Vec::new();
            for step in 0..240_u64 {
                match numbers.below(12) {
                    0 => hooks.set_other_bytes(numbers.below(24) * 64 * KIB),
                    1 => pager.set_headroom(numbers.below(8) * 64 * KIB).unwrap(),
                    2 => activations.push(pager.allocate(&stream, 1 + numbers.below(300 * KIB)).unwrap()),
                    3 | 4 if !activations.is_empty() => {
                        let place = numbers.below(activations.len() as u64);
                        activations.swap_remove(usize::try_from(place).unwrap());
                    }
                    5 => drop(models[usize::try_from(numbers.below(2)).unwrap()].activate(None)),
                    6 => drop(models[usize::try_from(numbers.below(2)).unwrap()].unload(300 * KIB)),
                    _ => {}
                }
                while activations.len() > 2 {
                    activations.remove(0);
                }
                let turn = usize::try_from(numbers.below(2)).unwrap();
                fault_and_check(&models[turn], unit_id(step % 24), &stream, &mut checks[turn])
                    .unwrap_or_else(|error| panic!("seed {seed}, step {step}: {error}"));
            }
            for check in &mut checks {
                assert_eq!(check.finish().unwrap(), [], "seed {seed}");
            }
            pager.refresh().unwrap();
            // The pool keeps nothing idle that is counted as ours.
            drop(activations);
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn an_activation_that_finds_the_card_full_takes_pages() {
    let file = ModelFile::new(&mixed_units(), 61);
    let device = small_card(4 * MIB);
    {
        let pager = pager(&device, small_options());
        let stream = pager.stream().unwrap();
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        for _ in 0..3 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        let before = model.figures().resident_bytes;
        let activation = pager.allocate(&stream, 2 * MIB).unwrap();
        assert!(model.figures().resident_bytes < before);
        for _ in 0..2 {
            checked_pass(&model, &stream, &verifier).unwrap();
            assert_within(&device, &pager, 0, "beside an activation");
        }
        let error = pager.allocate(&stream, 8 * MIB).unwrap_err();
        let has = model.figures().resident_bytes;
        assert!(has > 0, "what could never fit emptied the card: {error}");
        drop(activation);
        device.pool_trim(0).unwrap();
        for _ in 0..2 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        let after = model.figures().resident_bytes;
        assert!(after + 2 * 64 * KIB >= before, "{after} of {before}");
    }
    assert_nothing_left(&device);
}

#[test]
fn a_headroom_set_while_it_runs_is_kept_at_once() {
    let file = ModelFile::new(&mixed_units(), 71);
    let device = small_card(4 * MIB);
    {
        let pager = pager(&device, small_options());
        let stream = pager.stream().unwrap();
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        for headroom in [0, 2 * MIB, 3 * MIB, MIB, 0] {
            pager.set_headroom(headroom).unwrap();
            assert_within(&device, &pager, 0, &format!("headroom {headroom}"));
            for _ in 0..2 {
                checked_pass(&model, &stream, &verifier).unwrap();
                assert_within(&device, &pager, 0, &format!("headroom {headroom}"));
            }
        }
    }
    assert_nothing_left(&device);
}

#[test]
fn a_ring_for_several_guards_of_a_model_that_rests_goes_back_to_the_one_that_runs() {
    let files = [73, 74].map(|seed| ModelFile::new(&mixed_units(), seed));
    let device = small_card(3 * MIB);
    {
        let pager = pager(&device, small_options());
        let stream = pager.stream().unwrap();
        let [first, other] = files.each_ref().map(|file| {
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let verifier = Verifier::new(&model).unwrap();
            (model, verifier)
        });
        let settled = |(model, verifier): &(Arc<PagedModel>, Verifier)| {
            model.activate(Some(4)).unwrap();
            for _ in 0..4 {
                checked_pass(model, &stream, verifier).unwrap();
            }
            pager.figures()
        };
        // Beside another one that was run too, one guard at a time.
        checked_pass(&other.0, &stream, &other.1).unwrap();
        let alone = settled(&first);
        // The other holds four guards at once, and then rests.
        for unit in (0..24).step_by(4) {
            let guards: Vec<_> =
                (unit..unit + 4).filter_map(|unit| other.0.fault(unit_id(unit), &stream).ok()).collect();
            assert!(guards.len() > 1, "{}", guards.len());
        }
        assert!(pager.figures().ring_bytes > alone.ring_bytes, "{:?} {alone:?}", pager.figures());
        let again = settled(&first);
        assert!(again.ring_bytes <= alone.ring_bytes, "{again:?} {alone:?}");
        assert!(first.0.figures().resident_bytes + 128 * KIB >= alone.resident_bytes, "{again:?} {alone:?}");
        // And it comes back.
        settled(&other);
    }
    assert_nothing_left(&device);
}
