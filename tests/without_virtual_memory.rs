//! A card without virtual memory calls: units are whole, in an allocation of their own or in a ring slot,
//! an address holds for its guard only, and the promises of the pager hold all the same: right bytes on
//! cards of any size, held guards gone around or named, pressure obeyed, nothing left behind.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod common;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use common::{
    ModelFile, Numbers, Watchdog, assert_nothing_left, checked_pass, fault_and_check, mixed_units, pager,
    read_back, small_options, unit_id,
};
use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::device::{self, DeviceError, SharedDevice};
use vram_pager::pager::{
    Factor, Guard, ModelOptions, PagerError, PagerOptions, PatchSet, TensorPatch, Verifier,
};
use vram_pager::units::{KIB, MIB};
use vram_pager::weights::{Dtype, UnitId};

/// The largest unit of [`mixed_units`], rounded up.
const LARGEST: u64 = 512 * 512 * 2 + 1024 + 512;

fn plain_card(bytes: u64) -> SharedDevice {
    device::open(&format!("emulated:{}KiB,page=64KiB,vmm=none", bytes / KIB)).unwrap()
}

#[test]
fn the_device_has_no_ranges_and_no_frames_and_says_so() {
    let device = plain_card(MIB);
    assert!(!device.info().virtual_memory);
    assert_eq!(device.info().name, "emulated:1MiB,page=64KiB,vmm=none");
    assert!(matches!(device.reserve(64 * KIB), Err(DeviceError::Unsupported { .. })));
    assert!(matches!(device.create_frame(64 * KIB), Err(DeviceError::Unsupported { .. })));
}

#[test]
fn the_api_says_that_an_address_holds_for_its_guard_only() {
    let file = ModelFile::new(&mixed_units(), 3);
    let device = plain_card(6 * MIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        assert!(!pager.stable_addresses());
        assert_eq!(model.unit_address(UnitId(0)), None);
        assert_eq!(model.address_range(), None);
    }
    assert_nothing_left(&device);
    let device = common::small_card(MIB);
    assert!(pager(&device, small_options()).stable_addresses());
}

#[test]
fn every_byte_is_right_on_cards_of_any_size() {
    let file = ModelFile::new(&mixed_units(), 7);
    for card in [8 * MIB, 4 * MIB, 2 * MIB, MIB, 640 * KIB] {
        let device = plain_card(card);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            let weights = model.figures().weights_bytes;
            for pass in 0..4 {
                let before = model.counts();
                checked_pass(&model, &stream, &verifier).unwrap_or_else(|error| panic!("{card}: {error}"));
                let (figures, own) = (pager.figures(), model.figures());
                assert!(figures.resident_bytes + figures.ring_bytes <= figures.budget_bytes, "{figures:?}");
                assert!(figures.peak_bytes <= card, "{figures:?}");
                if pass >= 2 {
                    let copied = model.counts().copied_bytes - before.copied_bytes;
                    assert!(
                        copied <= weights.saturating_sub(own.planned_bytes) + LARGEST,
                        "card {card}, pass {pass}: {copied} of {weights}, {own:?}, {figures:?}"
                    );
                    if card == 8 * MIB {
                        assert_eq!(copied, 0, "all of it fits");
                    }
                }
            }
            assert_eq!(device.counts().device_sync, 0);
            assert_eq!(device.counts().map + device.counts().create_frame, 0);
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn in_steady_state_a_pass_takes_and_frees_no_memory() {
    let file = ModelFile::new(&mixed_units(), 8);
    let device = plain_card(2 * MIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let pass = || {
            for unit in 0..model.index().units().len() as u64 {
                for piece in 0..model.pieces(unit_id(unit)).unwrap() {
                    model.fault_piece(unit_id(unit), piece, &stream).unwrap().release();
                }
            }
            let figures = pager.figures();
            (figures.resident_bytes, figures.ring_bytes, model.figures().resident_bytes)
        };
        for _ in 0..4 {
            pass();
        }
        let before = (pass(), device.pool_figures().unwrap());
        assert_eq!((pass(), device.pool_figures().unwrap()), before);
    }
    assert_nothing_left(&device);
}

/// The pool's free memory lies in pieces, and it may grow no more. When every block was given up for a unit, the whole
/// card is there for it.
#[test]
fn a_unit_that_fits_the_card_is_had_although_blocks_lie_in_pieces() {
    let sides = [324, 1272, 935, 345, 40, 587, 1016, 101, 254];
    let file = ModelFile::new(&sides.map(|side| (side, side)), 9);
    let device = plain_card(5760 * KIB);
    {
        let pager = pager(&device, PagerOptions { headroom_bytes: Some(180 * KIB), ..small_options() });
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        for _ in 0..3 {
            for unit in (0..sides.len() as u64).map(unit_id) {
                for piece in 0..model.pieces(unit).unwrap() {
                    model.fault_piece(unit, piece, &stream).unwrap().release();
                }
            }
            let figures = pager.figures();
            assert!(figures.resident_bytes + figures.ring_bytes <= figures.budget_bytes, "{figures:?}");
            assert!(device.memory().unwrap().free >= 180 * KIB);
        }
        checked_pass(&model, &stream, &Verifier::new(&model).unwrap()).unwrap();
    }
    assert_nothing_left(&device);
}

/// What activations took lately is left to them where there is a choice, and refuses nothing once it is free.
#[test]
fn a_spike_of_activations_that_is_over_refuses_no_unit() {
    let file = ModelFile::new(&[(500, 500); 12], 10);
    let device = plain_card(4 * MIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let pass = || (0..12).for_each(|unit| model.fault(unit_id(unit), &stream).unwrap().release());
        pass();
        for _ in 0..2 {
            drop(pager.allocate(&stream, 4 * MIB - 64 * KIB).unwrap());
            pass();
        }
        // Nor does it refuse a second guard beside a first.
        drop(pager.allocate(&stream, 3 * MIB + 512 * KIB).unwrap());
        let first = model.fault(unit_id(0), &stream).unwrap();
        model.fault(unit_id(1), &stream).unwrap().release();
        first.release();
        checked_pass(&model, &stream, &Verifier::new(&model).unwrap()).unwrap();
    }
    assert_nothing_left(&device);
}

#[test]
fn a_headroom_beyond_any_card_leaves_nothing_and_is_taken_back() {
    let file = ModelFile::new(&[(100, 100); 4], 11);
    for device in [plain_card(MIB), common::small_card(MIB)] {
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            model.fault(unit_id(0), &stream).unwrap().release();
            for headroom in [u64::MAX, MIB] {
                let activation = pager.allocate(&stream, 64 * KIB).unwrap();
                pager.set_headroom(headroom).unwrap();
                assert_eq!(pager.figures().budget_bytes, 0);
                let error = model.fault(unit_id(1), &stream).unwrap_err();
                assert!(matches!(error, PagerError::NeverFits { limit: 0, .. }), "{error}");
                pager.set_headroom(0).unwrap();
                drop(activation);
                checked_pass(&model, &stream, &Verifier::new(&model).unwrap()).unwrap();
            }
            let error = pager.allocate(&stream, u64::MAX).unwrap_err();
            assert!(matches!(error, PagerError::Device(_)), "{error}");
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn pieces_are_whole_each_and_a_unit_of_several_is_taken_by_piece() {
    let file = ModelFile::new(&[(600, 512), (64, 96), (512, 512)], 4);
    let device = plain_card(MIB);
    {
        let pager = pager(&device, small_options());
        let options = ModelOptions { piece_bytes: Some(100 * KIB), ..ModelOptions::default() };
        let model = pager.open_model(file.index(), &options).unwrap();
        let stream = pager.stream().unwrap();
        let verifier = Verifier::new(&model).unwrap();
        assert!(model.pieces(UnitId(0)).unwrap() > 1);
        for _ in 0..3 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        let error = model.fault(UnitId(0), &stream).unwrap_err();
        assert!(matches!(error, PagerError::NeverFits { .. }), "{error}");
        assert!(error.to_string().contains("fault_piece"), "{error}");
        // A unit of one piece is whole.
        assert_eq!(model.fault(UnitId(1), &stream).unwrap().tensors().len(), 2);
        let words = model.index().tensor("blocks.000.weight").unwrap();
        let rows = model.fault_rows(words, &[5, 599, 5], &stream).unwrap();
        let bytes = read_back(&device, rows.range(), &stream);
        let row = bytes.len() / 3;
        assert_eq!(bytes[..row], bytes[2 * row..]);
        assert_ne!(bytes[..row], bytes[row..2 * row]);
    }
    assert_nothing_left(&device);
}

#[test]
fn a_fault_goes_around_held_guards_or_names_them_and_their_bytes_stay() {
    for card in [1280 * KIB, 2 * MIB, 4 * MIB] {
        for seed in 1..=4 {
            let _watchdog = Watchdog::new(120, format!("card of {card}, seed {seed}"));
            let file = ModelFile::new(&mixed_units(), seed);
            let device = plain_card(card);
            {
                let pager = pager(&device, small_options());
                let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
                let stream = pager.stream().unwrap();
                let verifier = Verifier::new(&model).unwrap();
                let mut check = verifier.begin(&stream).unwrap();
                let mut numbers = Numbers(seed);
                let units = model.index().units().len() as u64;
                let mut refusals = 0;
                for _ in 0..4 {
                    let mut held: Vec<Guard<'_>> = Vec::new();
                    let mut names: HashSet<String> = HashSet::new();
                    for _ in 0..64 {
                        let unit = unit_id(numbers.below(units));
                        match model.fault_piece(unit, 0, &stream) {
                            Ok(guard) => {
                                names.insert(model.index().unit_info(unit).name.clone());
                                held.push(guard);
                            }
                            Err(PagerError::Held { held: told, need, .. }) => {
                                refusals += 1;
                                assert!(need > 0 && !told.is_empty());
                                for name in told.iter().filter(|name| !name.ends_with(" more")) {
                                    let unit = name.split(" (piece").next().unwrap();
                                    assert!(names.contains(unit), "{name} is not held: {names:?}");
                                }
                                break;
                            }
                            Err(error) => panic!("card of {card}, seed {seed}: {error}"),
                        }
                    }
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
                        fault_and_check(&model, unit_id(unit), &stream, &mut check)
                            .unwrap_or_else(|error| panic!("card of {card}, seed {seed}: {error}"));
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
fn a_unit_larger_than_the_card_is_refused_with_figures_and_costs_nobody_anything() {
    let file = ModelFile::new(&[(64, 96), (600, 512), (64, 96)], 4);
    let device = plain_card(512 * KIB);
    {
        let pager = pager(&device, small_options());
        let options = ModelOptions { piece_bytes: Some(MIB), ..ModelOptions::default() };
        let model = pager.open_model(file.index(), &options).unwrap();
        let stream = pager.stream().unwrap();
        model.fault(UnitId(0), &stream).unwrap().release();
        let before = pager.figures();
        match model.fault(UnitId(1), &stream) {
            Err(PagerError::NeverFits { need, limit, .. }) => {
                assert!(need >= 600 * 512 * 2 && limit <= 512 * KIB, "{need} of {limit}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(pager.figures().resident_bytes, before.resident_bytes);
        let copied = model.counts().copied_bytes;
        model.fault(UnitId(0), &stream).unwrap().release();
        assert_eq!(model.counts().copied_bytes, copied);
    }
    assert_nothing_left(&device);
}

#[test]
fn memory_is_given_back_under_pressure_and_taken_again_after_it() {
    let file = ModelFile::new(&mixed_units(), 5);
    let mut options = EmulatedOptions::new(8 * MIB);
    (options.page_bytes, options.virtual_memory) = (64 * KIB, false);
    let card = EmulatedDevice::open(options).unwrap();
    let device: SharedDevice = card.clone();
    {
        let pager = pager(&device, PagerOptions { headroom_bytes: Some(MIB), ..small_options() });
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let verifier = Verifier::new(&model).unwrap();
        for _ in 0..2 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        let full = pager.figures().resident_bytes;
        // Somebody takes what is free, twice: each time the pager makes the headroom free again.
        for _ in 0..2 {
            let taken = 8 * MIB - device.pool_figures().unwrap().reserved;
            card.set_other_bytes(taken);
            assert_eq!(device.memory().unwrap().free, 0);
            pager.refresh().unwrap();
            let figures = pager.figures();
            assert!(figures.resident_bytes + figures.ring_bytes <= figures.budget_bytes, "{figures:?}");
            assert!(device.memory().unwrap().free >= MIB, "{figures:?}");
        }
        assert!(pager.figures().resident_bytes <= full - 2 * MIB + LARGEST);
        for _ in 0..2 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        card.set_other_bytes(0);
        for _ in 0..2 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        assert_eq!(pager.figures().resident_bytes, full);
        // Activations push weights out, too.
        let activation = pager.allocate(&stream, 3 * MIB).unwrap();
        checked_pass(&model, &stream, &verifier).unwrap();
        drop(activation);
        let freed = model.unload(MIB).unwrap();
        assert!(freed >= MIB, "{freed}");
    }
    assert_nothing_left(&device);
}

#[test]
fn two_models_share_a_card_and_the_active_one_takes_from_the_other() {
    let files = [ModelFile::new(&mixed_units(), 21), ModelFile::new(&mixed_units(), 22)];
    let device = plain_card(8 * MIB);
    {
        let pager = pager(&device, small_options());
        let models: Vec<_> = files
            .iter()
            .map(|file| pager.open_model(file.index(), &ModelOptions::default()).unwrap())
            .collect();
        let stream = pager.stream().unwrap();
        for turn in 0..4 {
            let model = &models[turn % 2];
            model.activate(Some(3)).unwrap();
            let verifier = Verifier::new(model).unwrap();
            for _ in 0..3 {
                checked_pass(model, &stream, &verifier).unwrap();
            }
            let copied = model.counts().copied_bytes;
            checked_pass(model, &stream, &verifier).unwrap();
            assert_eq!(model.counts().copied_bytes, copied, "turn {turn}: the active model fits whole");
        }
        assert!(pager.reclaimable_bytes(Some(&models[1])) > 0, "the other one keeps what there is room for");
    }
    assert_nothing_left(&device);
}

#[test]
fn threads_get_right_bytes_and_none_waits_for_ever() {
    let file = ModelFile::new(&mixed_units(), 6);
    for card in [2 * MIB, 4 * MIB] {
        let _watchdog = Watchdog::new(120, format!("threads on a card of {card}"));
        let device = plain_card(card);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let units = model.index().units().len() as u64;
            std::thread::scope(|scope| {
                for seed in 1..=4_u64 {
                    let (pager, model) = (&pager, &model);
                    scope.spawn(move || {
                        let stream = pager.stream().unwrap();
                        let verifier = Verifier::new(model).unwrap();
                        let mut check = verifier.begin(&stream).unwrap();
                        let mut numbers = Numbers(seed);
                        for _ in 0..60 {
                            let unit = unit_id(numbers.below(units));
                            for piece in 0..model.pieces(unit).unwrap() {
                                let deadline = Instant::now() + Duration::from_secs(60);
                                let guard =
                                    model.fault_piece_when_free(unit, piece, &stream, deadline).unwrap();
                                check.tensors(&guard.tensors()).unwrap();
                                guard.release();
                                assert_eq!(check.finish().unwrap(), []);
                            }
                        }
                    });
                }
            });
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn patched_and_cast_weights_are_those_of_a_card_with_virtual_memory() {
    let file = ModelFile::new(&[(64, 96), (40, 30), (64, 96)], 12);
    let run = |device: &SharedDevice| {
        let mut seen = Vec::new();
        {
            let pager = pager(device, small_options());
            let options = ModelOptions { compute: Some(Dtype::F32), ..ModelOptions::default() };
            let model = pager.open_model(file.index(), &options).unwrap();
            let stream = pager.stream().unwrap();
            let factor = |rows: u64, columns: u64| Factor {
                dtype: device::FloatType::F32,
                shape: [rows, columns],
                bytes: (0..rows * columns)
                    .flat_map(|number| (f32::from(u8::try_from(number % 13).unwrap()) - 6.0).to_le_bytes())
                    .collect(),
            };
            let patch = TensorPatch {
                tensor: model.index().tensor("blocks.001.weight").unwrap(),
                up: factor(40, 4),
                down: factor(4, 30),
                scale: 0.5,
            };
            let set = PatchSet::new(&model, vec![patch]).unwrap();
            for patched in [false, true, false, true] {
                let held = model.fault(UnitId(1), &stream).unwrap();
                if patched {
                    let error = model.patched(&set).fault(UnitId(1), &stream).unwrap_err();
                    assert!(error.is_held(), "{error}");
                }
                drop(held);
                for unit in 0..3 {
                    let guard = if patched {
                        model.patched(&set).fault(UnitId(unit), &stream).unwrap()
                    } else {
                        model.fault(UnitId(unit), &stream).unwrap()
                    };
                    for view in guard.tensors() {
                        seen.push(read_back(device, view.range(), &stream));
                    }
                }
            }
        }
        assert_nothing_left(device);
        seen
    };
    assert!(run(&plain_card(MIB)) == run(&common::small_card(MIB)));
}

#[test]
fn failing_each_call_in_turn_leaves_nothing_behind_and_the_next_run_works() {
    use vram_pager::device::emulated::{CallKind, Fault};
    let file = ModelFile::new(&[(64, 96), (256, 256), (128, 128), (256, 256)], 13);
    for kind in [CallKind::PoolAllocate, CallKind::Record, CallKind::CopyToDevice, CallKind::StreamWait] {
        for nth in 1..=12 {
            let mut options = EmulatedOptions::new(512 * KIB);
            (options.page_bytes, options.virtual_memory) = (64 * KIB, false);
            let card = EmulatedDevice::open(options).unwrap();
            let device: SharedDevice = card.clone();
            {
                let pager = pager(&device, small_options());
                let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
                let stream = pager.stream().unwrap();
                let verifier = Verifier::new(&model).unwrap();
                card.inject(Fault::once(kind, nth));
                let _ = checked_pass(&model, &stream, &verifier);
                let _ = checked_pass(&model, &stream, &verifier);
                card.clear_faults();
                checked_pass(&model, &stream, &verifier)
                    .unwrap_or_else(|error| panic!("{kind:?} number {nth}: {error}"));
            }
            assert_nothing_left(&device);
        }
    }
}
