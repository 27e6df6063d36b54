//! Between file and card: how far reads and copies go ahead, that both stop when the order changes, that
//! page-locking costs the runner nothing, and that copies from a mapping and on several streams are right.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{
    ModelFile, Watchdog, assert_nothing_left, checked_pass, emulated_card, fault_and_check, mixed_units,
    pager, small_card, small_options, unit_id,
};
use vram_pager::device::SharedDevice;
use vram_pager::device::emulated::{CallCosts, CallKind, EmulatedDevice, EmulatedOptions, Fault};
use vram_pager::pager::{ModelOptions, PagedModel, PagerOptions, Verifier, WeightSource};
use vram_pager::units::{KIB, MIB, ModelTime};
use vram_pager::weights::Dtype;

/// The bytes of the pages that the first `units` units touch.
fn bytes_of_first(model: &PagedModel, units: u64) -> u64 {
    let layout = model.layout();
    let end = (0..units).map(|unit| layout.unit(unit_id(unit)).bytes.end).max().unwrap_or(0);
    layout.content_bytes(0..end.next_multiple_of(layout.page_bytes()))
}

#[test]
fn reads_go_no_further_ahead_than_the_depth_and_a_changed_order_costs_one_depth_at_most() {
    let _watchdog = Watchdog::new(60, "reading ahead");
    let file = ModelFile::new(&mixed_units(), 31);
    let depth = 512 * KIB;
    let device = small_card(16 * MIB);
    {
        let options = PagerOptions { read_ahead_bytes: depth, chunk_bytes: 128 * KIB, ..small_options() };
        let pager = pager(&device, options);
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let mut asked = 0;
        for unit in 0..6 {
            model.fault(unit_id(unit), &stream).unwrap().release();
            asked = bytes_of_first(&model, unit + 1);
            let read = model.counts().file_bytes;
            assert!(asked <= read && read <= asked + depth, "unit {unit}: {read} of {asked} + {depth}");
        }
        // It does go ahead, if nobody asks for anything.
        while model.counts().file_bytes == asked {
            std::thread::yield_now();
        }
        for unit in (6..24).rev() {
            model.fault(unit_id(unit), &stream).unwrap().release();
        }
        let (read, weights) = (model.counts().file_bytes, model.figures().weights_bytes);
        assert!(weights <= read && read <= weights + depth, "{read} of {weights} + {depth}");
        assert_eq!(model.counts().copied_bytes, device.counts().bytes_to_device);
    }
    assert_nothing_left(&device);
}

#[test]
fn small_units_are_gathered_into_large_copies() {
    let file = ModelFile::new(&[(64, 128); 200], 39);
    let device = small_card(16 * MIB);
    {
        let options = PagerOptions { chunk_bytes: 512 * KIB, ..small_options() };
        let pager = pager(&device, options);
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let verifier = Verifier::new(&model).unwrap();
        let before = device.counts();
        for unit in 0..200 {
            model.fault(unit_id(unit), &stream).unwrap().release();
        }
        let after = device.counts();
        let copies = after.copy_to_device - before.copy_to_device;
        let bytes = after.bytes_to_device - before.bytes_to_device;
        assert!(bytes / copies >= 256 * KIB, "{bytes} bytes in {copies} copies, of units of 16 KiB");
        assert!(bytes <= model.layout().address_bytes(), "nothing is copied twice");
        checked_pass(&model, &stream, &verifier).unwrap();
    }
    assert_nothing_left(&device);
}

#[test]
fn nothing_is_read_ahead_with_a_depth_of_nothing() {
    let file = ModelFile::new(&mixed_units(), 32);
    let device = small_card(16 * MIB);
    {
        let options = PagerOptions { read_ahead_bytes: 0, ..small_options() };
        let pager = pager(&device, options);
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        for unit in 0..24 {
            model.fault(unit_id(unit), &stream).unwrap().release();
            assert_eq!(model.counts().file_bytes, bytes_of_first(&model, unit + 1), "unit {unit}");
        }
    }
    assert_nothing_left(&device);
}

#[test]
fn depths_without_a_limit_are_depths() {
    let file = ModelFile::new(&mixed_units(), 35);
    let device = small_card(2 * MIB);
    {
        let options = PagerOptions {
            read_ahead_bytes: u64::MAX,
            copy_ahead_bytes: Some(u64::MAX),
            prefetch_loads: usize::MAX,
            ..small_options()
        };
        let pager = pager(&device, options);
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let verifier = Verifier::new(&model).unwrap();
        // Enough faults in order for the window, which doubles at each, to pass 64 bits.
        for _ in 0..4 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
    }
    assert_nothing_left(&device);
}

#[test]
fn copies_go_no_further_ahead_than_their_depth() {
    let file = ModelFile::new(&mixed_units(), 33);
    let mut furthest = Vec::new();
    for depth in [Some(0), Some(128 * KIB), None] {
        let device = small_card(2 * MIB);
        {
            let options = PagerOptions { copy_ahead_bytes: depth, ..small_options() };
            let pager = pager(&device, options);
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            for _ in 0..3 {
                checked_pass(&model, &stream, &verifier).unwrap();
            }
            let mut most = 0;
            for unit in 0..24 {
                for piece in 0..model.pieces(unit_id(unit)).unwrap() {
                    let guard = model.fault_piece(unit_id(unit), piece, &stream).unwrap();
                    let before = device.counts().bytes_to_device;
                    guard.release();
                    most = most.max(device.counts().bytes_to_device - before);
                }
            }
            assert!(depth.is_none_or(|depth| most <= depth), "{most} ahead of {depth:?}");
            furthest.push(most);
        }
        assert_nothing_left(&device);
    }
    assert_eq!(furthest[0], 0);
    assert!(furthest[2] > furthest[1], "{furthest:?}");
}

#[test]
#[expect(unsafe_code, reason = "promises that the test's file stays as it is")]
fn copies_from_a_mapping_are_right_and_need_no_staging_memory() {
    let file = ModelFile::new(&mixed_units(), 34);
    for (compute, needs_reader) in [(None, false), (Some(Dtype::F32), false), (Some(Dtype::F16), true)] {
        for card in [MIB, 2 * MIB, 16 * MIB] {
            let device = small_card(card);
            {
                // SAFETY: nobody writes to the file or shortens it.
                let source = unsafe { WeightSource::mapped() };
                let pager = pager(&device, PagerOptions { source, ..small_options() });
                let options = ModelOptions { compute, ..ModelOptions::default() };
                let model = pager.open_model(file.index(), &options).unwrap();
                let stream = pager.stream().unwrap();
                let verifier = Verifier::new(&model).unwrap();
                for _ in 0..3 {
                    checked_pass(&model, &stream, &verifier).unwrap();
                }
                let held = pager.figures().staging.held_bytes;
                assert_eq!(held > 0, needs_reader, "{compute:?} on {card}: {held} bytes of staging memory");
                assert!(model.counts().file_bytes >= model.figures().weights_bytes / 2);
            }
            assert_nothing_left(&device);
        }
    }
}

/// The modelled time of a first pass, and of opening before it, where page-locking a GB takes `page_lock`.
fn first_pass(file: &ModelFile, page_lock: Duration) -> [ModelTime; 2] {
    let costs = CallCosts { page_lock_gb: page_lock, ..CallCosts::default() };
    let options = EmulatedOptions { page_bytes: 64 * KIB, costs, ..EmulatedOptions::new(2 * MIB) };
    let device: SharedDevice = EmulatedDevice::open(options).unwrap();
    let times = {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let opened = device.now();
        let stream = pager.stream().unwrap();
        for unit in 0..24 {
            for piece in 0..model.pieces(unit_id(unit)).unwrap() {
                model.fault_piece(unit_id(unit), piece, &stream).unwrap().release();
            }
        }
        stream.synchronize().unwrap();
        let done = device.now();
        // All of it is page-locked in the end.
        loop {
            let staging = pager.figures().staging;
            assert!(staging.held_bytes > 0);
            if staging.page_locked_bytes == staging.held_bytes {
                break;
            }
            std::thread::yield_now();
        }
        [opened, done]
    };
    assert_nothing_left(&device);
    times
}

#[test]
fn neither_opening_nor_the_first_pass_waits_for_page_locking() {
    let _watchdog = Watchdog::new(60, "page-locking in the background");
    let file = ModelFile::new(&mixed_units(), 35);
    // At an hour a GB one block of 4 MiB takes a quarter of a minute.
    for page_lock in [Duration::ZERO, Duration::from_secs(3600)] {
        let [opened, done] = first_pass(&file, page_lock);
        assert_eq!(opened, ModelTime::ZERO);
        assert!(done < ModelTime::ZERO.after(Duration::from_millis(100)), "{page_lock:?}: {done:?}");
    }
}

#[test]
fn page_locking_that_is_refused_at_any_point_costs_no_bytes_and_lowers_the_cap() {
    let file = ModelFile::new(&mixed_units(), 36);
    for nth in 1..=3 {
        let (card, device) = emulated_card(2 * MIB, "a fault is injected into page-locking");
        card.inject(Fault::from_then_on(CallKind::PageLock, nth));
        {
            // Blocks are a quarter of the limit, and pages are kept in all of them.
            let options =
                PagerOptions { page_locked_bytes: Some(6 * MIB), chunk_bytes: 128 * KIB, ..small_options() };
            let pager = pager(&device, options);
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            for _ in 0..3 {
                checked_pass(&model, &stream, &verifier).unwrap();
            }
            let staging = pager.figures().staging;
            if card.faults_fired() > 0 {
                assert_eq!(card.faults_fired(), 1, "it is tried once");
                assert!(staging.limit_bytes <= staging.held_bytes.max(512 * KIB), "{staging:?}");
                assert!(staging.page_locked_bytes < staging.held_bytes, "{staging:?}");
            }
            assert!(nth > 1 || card.faults_fired() > 0);
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn copies_on_several_streams_are_right_also_when_some_fail_and_others_come_late() {
    let file = ModelFile::new(&mixed_units(), 37);
    for seed in 1..=6_u64 {
        let _watchdog = Watchdog::new(120, format!("copies on several streams, seed {seed}"));
        let (card, device) = emulated_card(MIB, "completions are delayed and copies made to fail");
        card.seed_delays(seed);
        {
            let options = PagerOptions { copy_streams: 3, chunk_bytes: 128 * KIB, ..small_options() };
            let pager = pager(&device, options);
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            checked_pass(&model, &stream, &verifier).unwrap();
            for nth in 1..=8 {
                card.inject(Fault::once(CallKind::CopyToDevice, nth * seed));
                let mut check = verifier.begin(&stream).unwrap();
                for unit in 0..24 {
                    // A fault may fail, once; what it gives is right.
                    let _ = fault_and_check(&model, unit_id(unit), &stream, &mut check);
                }
                assert_eq!(check.finish().unwrap(), [], "seed {seed}, copy {nth}");
                card.clear_faults();
            }
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn a_model_that_goes_away_takes_what_was_read_ahead_of_it_along() {
    let _watchdog = Watchdog::new(60, "cancelling reads");
    let file = ModelFile::new(&mixed_units(), 38);
    let device = small_card(16 * MIB);
    {
        let options = PagerOptions { chunk_bytes: 64 * KIB, ..small_options() };
        let pager = pager(&device, options);
        for _ in 0..4 {
            let index = file.index();
            let model = pager.open_model(Arc::clone(&index), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            for unit in 0..3 {
                model.fault(unit_id(unit), &stream).unwrap().release();
            }
            drop(model);
            // Readers that were at work let go of the index when they come back.
            while Arc::strong_count(&index) > 1 {
                std::thread::yield_now();
            }
        }
        // A limit set anew looks at which buffers came back.
        loop {
            pager.set_page_locked_limit(16 * MIB).unwrap();
            if pager.figures().staging.used_bytes == 0 {
                break;
            }
            std::thread::yield_now();
        }
    }
    assert_nothing_left(&device);
}
