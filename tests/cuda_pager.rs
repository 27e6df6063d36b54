//! The pager on cards behind the CUDA driver, over the stand-in: streams that a runner brings along,
//! streams that are being captured, cards without virtual memory calls, and several cards at once.

#![cfg(feature = "cuda")]
#![expect(unsafe_code, reason = "calls the stand-in and registers raw streams")]
#![allow(clippy::unwrap_used, reason = "a helper that panics is a test that fails")]

mod common;

use std::ptr::{null_mut, without_provenance_mut};
use std::sync::Arc;

use common::standin::{Runner, Standin, alone};
use common::{ModelFile, assert_nothing_left, checked_pass, mixed_units, pager, small_options, unit_id};
use vram_pager::device::{self, CallCounts, DeviceError, SharedDevice, Stream, StreamPriority};
use vram_pager::manager::{LoadOptions, Manager};
use vram_pager::pager::{ModelOptions, Pager, PagerError, PagerOptions, Verifier};
use vram_pager::patcher::{ModelPatcher, PagedPatcher, Place};
use vram_pager::units::{KIB, MIB};

/// Large pages need few of them: the stand-in's are 2 MiB.
fn options() -> PagerOptions {
    PagerOptions { chunk_bytes: 2 * MIB, ..small_options() }
}

#[test]
fn a_runner_faults_on_its_own_streams_and_on_the_legacy_one_but_not_on_the_per_thread_one() {
    let (_alone, standin) = alone();
    let misuses = standin.misuses();
    let file = ModelFile::new(&mixed_units(), 31);
    let device = device::open("cuda:0,cap=6MiB").unwrap();
    let runner = Runner::new(standin);
    {
        let pager = pager(&device, options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        for raw in [null_mut(), without_provenance_mut(1), runner.stream] {
            for _ in 0..2 {
                // SAFETY: default streams, and one that the runner destroys later.
                let stream = unsafe { pager.register_raw(raw) }.unwrap();
                checked_pass(&model, &stream, &verifier).unwrap();
            }
        }
        // SAFETY: a default stream.
        let error = unsafe { pager.register_raw(without_provenance_mut(2)) }.unwrap_err();
        assert!(error.to_string().contains("per-thread"), "{error}");
        // What was given up is waited for: its last fence guards what the streams used.
        let stream = pager.stream().unwrap();
        checked_pass(&model, &stream, &verifier).unwrap();
    }
    assert_nothing_left(&device);
    drop(runner);
    drop(device);
    assert_eq!((standin.misuses(), standin.leftovers()), (misuses, 0));
}

#[test]
fn an_emulated_card_has_no_foreign_streams_and_says_so() {
    let device = common::small_card(MIB);
    let pager = pager(&device, small_options());
    // SAFETY: null is always right.
    let error = unsafe { pager.register_raw(null_mut()) }.unwrap_err();
    assert!(error.to_string().contains("foreign stream"), "{error}");
}

/// Work on a capturing stream: only what is ready may be faulted, and nothing is recorded on it.
fn capture(standin: &'static Standin, device: &SharedDevice) {
    // Units just below the stand-in's pages, so that a handful of them fit and the rest is streamed.
    let file = ModelFile::new(&[(1000, 1024); 12], 32);
    let runner = Runner::new(standin);
    let misuses = standin.misuses();
    {
        let pager = pager(device, options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        let other = pager.stream().unwrap();
        // SAFETY: destroyed after the registration is gone.
        let stream = unsafe { pager.register_raw(runner.stream) }.unwrap();
        for _ in 0..3 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        let units = 0..model.index().units().len() as u64;
        let whole = |unit: u64| model.pieces(unit_id(unit)).unwrap() == 1;
        let ready = units.clone().find(|&unit| whole(unit) && model.is_resident(unit_id(unit))).unwrap();
        let not_ready = units.clone().find(|&unit| !model.is_resident(unit_id(unit))).unwrap();
        let held = model.fault(unit_id(ready), &stream).unwrap();
        let streamed = model.fault_piece(unit_id(not_ready), 0, &stream).unwrap();

        standin.set_capturing(runner.stream, true);
        assert!(stream.is_capturing().unwrap());
        let again = model.fault(unit_id(ready), &stream).unwrap();
        assert_eq!(again.tensors(), held.tensors());
        drop(again);
        let refused = |error: PagerError| {
            assert!(matches!(error, PagerError::Capturing { .. }), "{error}");
            assert!(error.to_string().contains("captured"), "{error}");
        };
        refused(model.fault_piece(unit_id(not_ready), 0, &stream).unwrap_err());
        let tensor = model.index().unit_info(unit_id(not_ready)).tensors[0];
        refused(model.fault_rows(tensor, &[0], &stream).unwrap_err());
        let error = pager.allocate(&stream, MIB).unwrap_err();
        assert!(matches!(error, PagerError::AllocateWhileCapturing { bytes: MIB, .. }), "{error}");
        // Released within the capture: its memory stays until the capture is over.
        drop(streamed);
        // Others go on, and whatever they reclaim, nothing is recorded on the stream that is captured.
        for _ in 0..2 {
            for unit in units.clone() {
                for piece in 0..model.pieces(unit_id(unit)).unwrap() {
                    match model.fault_piece(unit_id(unit), piece, &other) {
                        Ok(guard) => guard.release(),
                        Err(error) => assert!(error.is_held(), "{error}"),
                    }
                }
            }
        }
        pager.set_headroom(8 * MIB).unwrap();
        pager.set_headroom(0).unwrap();
        assert_eq!(standin.misuses(), misuses, "something was enqueued on the captured stream");
        standin.set_capturing(runner.stream, false);

        assert_eq!(model.fault(unit_id(ready), &other).unwrap().tensors(), held.tensors());
        drop(held);
        for _ in 0..2 {
            checked_pass(&model, &stream, &verifier).unwrap();
            checked_pass(&model, &other, &verifier).unwrap();
        }
        // A stream that is given up while it is captured gets its last fence when the capture is over.
        standin.set_capturing(runner.stream, true);
        drop(stream);
        let more: Vec<_> = (0..3).map(|_| pager.stream().unwrap()).collect();
        assert_eq!(standin.misuses(), misuses);
        standin.set_capturing(runner.stream, false);
        drop(more);
        checked_pass(&model, &pager.stream().unwrap(), &verifier).unwrap();
        assert_eq!(standin.misuses(), misuses);
    }
    assert_nothing_left(device);
}

#[test]
fn on_a_captured_stream_only_what_is_ready_is_faulted_and_nothing_is_recorded() {
    let (_alone, standin) = alone();
    capture(standin, &device::open("cuda:0,cap=16MiB").unwrap());
    standin.set_abilities(false, true);
    let device = device::open("cuda:0,cap=16MiB").unwrap();
    assert!(!device.info().virtual_memory);
    capture(standin, &device);
    drop(device);
    standin.set_abilities(true, true);
    assert_eq!(standin.leftovers(), 0);
}

/// A model is dropped while a stream that used it is being captured; a streamed guard of it was released before the
/// capture began, or within it.
fn drop_in_capture(standin: &'static Standin, device: &SharedDevice, within: bool) {
    let file = ModelFile::new(&[(1000, 1024); 12], 35);
    let runner = Runner::new(standin);
    let misuses = standin.misuses();
    {
        let pager = pager(device, options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        // SAFETY: destroyed after the registration is gone.
        let stream = unsafe { pager.register_raw(runner.stream) }.unwrap();
        let verifier = Verifier::new(&model).unwrap();
        for _ in 0..2 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        drop(verifier);
        let streamed = (0..12).map(unit_id).find(|&unit| !model.is_resident(unit)).unwrap();
        let guard = model.fault(streamed, &stream).unwrap();
        if within {
            standin.set_capturing(runner.stream, true);
            drop(guard);
        } else {
            drop(guard);
            standin.set_capturing(runner.stream, true);
        }
        drop(model);
        let held = |pager: &Pager| pager.figures().resident_bytes + pager.figures().ring_bytes;
        pager.set_headroom(64 * MIB).unwrap();
        assert!(held(&pager) > 0, "what the stream used stays");
        pager.set_headroom(0).unwrap();
        assert_eq!(standin.misuses(), misuses, "{:?}", standin.take_told());
        standin.set_capturing(runner.stream, false);

        pager.refresh().unwrap();
        pager.set_headroom(64 * MIB).unwrap();
        assert_eq!(held(&pager), 0, "nothing stays after the capture");
        pager.set_headroom(0).unwrap();
        // Nothing counts as under way any more: the next model is measured, which needs one fault after the other.
        let next = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&next).unwrap();
        for _ in 0..3 {
            checked_pass(&next, &stream, &verifier).unwrap();
        }
        let measures = device.info().virtual_memory;
        assert_eq!(next.figures().measured_compute.is_some(), measures, "{:?}", next.figures());
    }
    assert_nothing_left(device);
    assert_eq!(standin.misuses(), misuses, "{:?}", standin.take_told());
}

#[test]
fn a_model_that_is_dropped_while_a_stream_is_captured_is_closed_when_that_is_over() {
    let (_alone, standin) = alone();
    for vmm in [true, false] {
        standin.set_abilities(vmm, true);
        for within in [false, true] {
            let device = device::open("cuda:0,cap=16MiB").unwrap();
            assert_eq!(device.info().virtual_memory, vmm);
            drop_in_capture(standin, &device, within);
        }
    }
    standin.set_abilities(true, true);
    assert_eq!(standin.leftovers(), 0);
}

/// A graph frees only what a graph allocated: rows and activations that are let go of within a capture are freed after
/// it, whoever comes by first.
#[test]
fn memory_that_is_let_go_of_within_a_capture_is_freed_when_that_is_over() {
    let (_alone, standin) = alone();
    let misuses = standin.misuses();
    let file = ModelFile::new(&[(1000, 1024); 3], 36);
    for (pools, look) in [(true, true), (true, false), (false, true), (false, false)] {
        standin.set_abilities(true, pools);
        let device = device::open("cuda:0,cap=32MiB").unwrap();
        let runner = Runner::new(standin);
        {
            let pager = pager(&device, options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            // SAFETY: destroyed after the registration is gone.
            let stream = unsafe { pager.register_raw(runner.stream) }.unwrap();
            let tensor = model.index().unit_info(unit_id(0)).tensors[0];
            let rows = model.fault_rows(tensor, &[1, 0, 1], &stream).unwrap();
            let activation = pager.allocate(&stream, MIB).unwrap();
            standin.set_capturing(runner.stream, true);
            drop((rows, activation));
            pager.refresh().unwrap();
            assert!(device.live().pool_used_bytes >= MIB, "nothing is freed on a stream that is captured");
            standin.set_capturing(runner.stream, false);
            if look {
                pager.refresh().unwrap();
            } else {
                drop(pager.allocate(&stream, 1).unwrap());
            }
            assert_eq!(device.live().pool_used_bytes, 0);
            // Or with the stream itself.
            let activation = pager.allocate(&stream, MIB).unwrap();
            standin.set_capturing(runner.stream, true);
            drop((activation, stream));
            standin.set_capturing(runner.stream, false);
            device.memory().expect("no error was left behind");
        }
        assert_nothing_left(&device);
        drop((device, runner));
        assert_eq!((standin.misuses(), standin.leftovers()), (misuses, 0), "{:?}", standin.take_told());
    }
    standin.set_abilities(true, true);
}

/// The release of a streamed guard asks the driver whether its stream is captured. It has nobody to tell of an error
/// that a drop left behind, and so must not be told of it.
#[test]
fn an_error_of_a_drop_is_not_lost_in_the_release_of_a_guard() {
    let (_alone, standin) = alone();
    let file = ModelFile::new(&[(1000, 1024); 12], 37);
    let device = device::open("cuda:0,cap=16MiB").unwrap();
    {
        let pager = pager(&device, options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        for _ in 0..2 {
            for unit in (0..12).map(unit_id) {
                model.fault(unit, &stream).unwrap().release();
            }
            stream.synchronize().unwrap();
        }
        let streamed = (0..12).map(unit_id).find(|&unit| !model.is_resident(unit)).unwrap();
        let guard = model.fault(streamed, &stream).unwrap();
        device.defer(DeviceError::Misuse { call: "a drop", why: "kept for the next call".to_owned() });
        guard.release();
        let told = device.memory().unwrap_err();
        assert!(told.to_string().contains("kept for the next call"), "{told}");
        device.memory().unwrap();
    }
    assert_nothing_left(&device);
    drop(device);
    assert_eq!(standin.leftovers(), 0);
}

#[test]
fn a_cuda_card_without_virtual_memory_calls_gives_right_bytes_with_and_without_pools() {
    let (_alone, standin) = alone();
    let misuses = standin.misuses();
    let file = ModelFile::new(&mixed_units(), 33);
    for pools in [true, false] {
        standin.set_abilities(false, pools);
        for cap in [64, 4] {
            let device = device::open(&format!("cuda:0,cap={cap}MiB")).unwrap();
            assert!(!device.info().virtual_memory);
            {
                let pager = pager(&device, options());
                assert!(!pager.stable_addresses());
                let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
                let verifier = Verifier::new(&model).unwrap();
                let stream = pager.stream().unwrap();
                for pass in 0..3 {
                    checked_pass(&model, &stream, &verifier)
                        .unwrap_or_else(|error| panic!("pools {pools}, cap {cap}, pass {pass}: {error}"));
                }
                let counts = model.counts();
                assert_eq!(counts.streamed > 0, cap == 4, "pools {pools}, cap {cap}: {counts:?}");
                assert_eq!(device.counts().device_sync, 0);
            }
            assert_nothing_left(&device);
        }
    }
    standin.set_abilities(true, true);
    assert_eq!((standin.misuses(), standin.leftovers()), (misuses, 0));
}

/// What may differ between two looks at a card that nobody used meanwhile: nothing.
fn look(device: &SharedDevice) -> (u64, CallCounts) {
    (device.memory().unwrap().free, device.counts())
}

/// One manager, two cards, a pager and a model each.
fn two_cards(first: &str, second: &str) {
    let files = [ModelFile::new(&mixed_units(), 41), ModelFile::new(&mixed_units(), 42)];
    let devices = [first, second].map(|text| device::open(text).unwrap());
    let manager = Manager::new(&devices);
    manager.set_knobs(|knobs| knobs.reserve = 64 * KIB);
    {
        let pagers = [0, 1].map(|card: usize| pager(&devices[card], options()));
        let models = [0, 1].map(|card: usize| {
            pagers[card].open_model(files[card].index(), &ModelOptions::default()).unwrap()
        });
        let patchers = [0, 1]
            .map(|card: usize| PagedPatcher::new(&models[card], Place::Card(u32::try_from(card).unwrap())));
        let loads: [Arc<dyn ModelPatcher>; 2] = patchers.clone().map(|patcher| patcher as _);
        let pass = |card: usize| {
            let stream = pagers[card].stream().unwrap();
            checked_pass(&models[card], &stream, &Verifier::new(&models[card]).unwrap()).unwrap();
        };
        // The first card alone.
        manager.load_models_gpu(&loads[..1], LoadOptions::default()).unwrap();
        for _ in 0..3 {
            pass(0);
        }
        let (alone, counts) = (look(&devices[0]), models[0].counts());
        let figures = pagers[0].figures();
        // The second comes, works and goes: the first sees nothing of it.
        manager.load_models_gpu(&loads[1..], LoadOptions::default()).unwrap();
        for _ in 0..3 {
            pass(1);
        }
        assert_eq!(look(&devices[0]).1.map, alone.1.map);
        assert_eq!(look(&devices[0]).1.bytes_to_device, alone.1.bytes_to_device);
        assert_eq!(look(&devices[0]).0, alone.0);
        assert_eq!((models[0].counts(), pagers[0].figures()), (counts, figures));
        // The ledger has one entry a card, and asks each card's own books.
        let entries = manager.current_loaded_models();
        let mut places: Vec<_> = entries.iter().map(vram_pager::manager::LoadedModel::device).collect();
        places.sort_unstable();
        assert_eq!(places, [Place::Card(0), Place::Card(1)]);
        for (card, model) in models.iter().enumerate() {
            let place = Place::Card(u32::try_from(card).unwrap());
            let on_it = entries.iter().find(|entry| entry.device() == place).unwrap();
            assert_eq!(on_it.model_loaded_memory(), patchers[card].loaded_size());
            assert!(model.figures().resident_bytes > 0, "{first} {second} {card}: {:?}", model.figures());
        }
        // A stream of one card is no stream of the other, whoever made it.
        let of_second = pagers[1].stream().unwrap();
        let error = models[0].fault_piece(unit_id(0), 0, &of_second).unwrap_err();
        assert!(matches!(error, PagerError::OtherDevice { .. }), "{error}");
        let made = Arc::new(Stream::new(&devices[1], StreamPriority::Normal).unwrap());
        let error = pagers[0].register(made).unwrap_err();
        assert!(matches!(error, PagerError::OtherDevice { .. }), "{error}");
        // Making room on one card takes nothing from the other.
        let resident = models[0].figures().resident_bytes;
        models[1].unload(u64::MAX).unwrap();
        assert_eq!(models[1].figures().resident_bytes, 0);
        assert_eq!(models[0].figures().resident_bytes, resident);
        pass(0);
        pass(1);
    }
    drop(manager);
    for device in &devices {
        assert_nothing_left(device);
    }
}

#[test]
fn a_second_card_changes_nothing_for_the_first() {
    two_cards("emulated:4MiB,page=64KiB", "emulated:3MiB,page=64KiB");
    two_cards("emulated:4MiB,page=64KiB", "emulated:3MiB,page=64KiB,vmm=none");
    let (_alone, standin) = alone();
    let misuses = standin.misuses();
    standin.set_cards(2, 64 * MIB);
    two_cards("cuda:0,cap=12MiB", "cuda:1,cap=8MiB");
    assert_eq!((standin.misuses(), standin.leftovers()), (misuses, 0));
    standin.set_cards(1, 256 * MIB);
}
