//! A card without virtual memory calls that is full, in pieces or for a reason of its own: an activation is
//! found room for as long as there is something to reclaim, and a fault that nobody's guard stands in the way
//! of does not wait for one; a unit whose pieces lie apart is not given whole. `vram-pager stress` found
//! all of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::time::{Duration, Instant};

use common::{ModelFile, Numbers, assert_nothing_left, pager, small_options, unit_id};
use vram_pager::device::SharedDevice;
use vram_pager::device::emulated::{CallKind, EmulatedDevice, EmulatedOptions, Fault, FaultError};
use vram_pager::pager::{ModelOptions, PagerError, Verifier};
use vram_pager::units::{KIB, MIB};

/// A card of 1 MiB with pages of 4 KiB and no virtual memory calls.
fn card() -> (std::sync::Arc<EmulatedDevice>, SharedDevice) {
    let options = EmulatedOptions { page_bytes: 4 * KIB, virtual_memory: false, ..EmulatedOptions::new(MIB) };
    let card = EmulatedDevice::open(options).unwrap();
    (std::sync::Arc::clone(&card), card)
}

/// Units of 1 to 40 KiB, 2.5 MiB in all.
fn units(seed: u64) -> Vec<(u64, u64)> {
    let mut numbers = Numbers(seed);
    (0..120).map(|_| (8, 64 + numbers.below(2500))).collect()
}

#[test]
fn an_activation_finds_room_although_what_comes_free_lies_in_pieces() {
    for seed in 1..=20_u64 {
        let file = ModelFile::new(&units(seed), seed);
        let (_, device) = card();
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            let mut check = verifier.begin(&stream).unwrap();
            let mut numbers = Numbers(seed);
            for step in 0..60 {
                for _ in 0..20 {
                    let guard = model.fault(unit_id(numbers.below(120)), &stream).unwrap();
                    check.tensors(&guard.tensors()).unwrap();
                    guard.release();
                }
                let bytes = KIB + numbers.below(200 * KIB);
                let activation = pager.allocate(&stream, bytes);
                assert!(activation.is_ok(), "seed {seed}, step {step}, {bytes} bytes: {activation:?}");
            }
            assert_eq!(check.finish().unwrap(), []);
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn a_fault_that_no_guard_stands_in_the_way_of_does_not_wait_for_one() {
    let file = ModelFile::new(&units(1), 1);
    let (hooks, device) = card();
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let no_memory = Fault::from_then_on(CallKind::PoolAllocate, 1).with(FaultError::OutOfMemory);
        hooks.inject(no_memory);
        let far = Instant::now() + Duration::from_secs(3600);
        let error = model.fault_when_free(unit_id(0), &stream, far).unwrap_err();
        assert!(matches!(&error, PagerError::Device(device) if device.is_out_of_memory()), "{error}");
        hooks.clear_faults();
        model.fault_when_free(unit_id(0), &stream, far).unwrap().release();
    }
    assert_nothing_left(&device);
}

#[test]
fn a_cut_unit_is_not_given_whole_where_its_pieces_lie_apart() {
    let file = ModelFile::new(&[(64, 512), (8, 64)], 1);
    let (_, device) = card();
    {
        let pager = pager(&device, small_options());
        let options = ModelOptions { piece_bytes: Some(16 * KIB), ..ModelOptions::default() };
        let model = pager.open_model(file.index(), &options).unwrap();
        let stream = pager.stream().unwrap();
        let unit = unit_id(0);
        let pieces = model.pieces(unit).unwrap();
        assert!(pieces > 2, "{pieces}");
        for _ in 0..3 {
            for piece in 0..pieces {
                model.fault_piece(unit, piece, &stream).unwrap().release();
            }
            stream.synchronize().unwrap();
            // All of them are on the card by now, each in a block of its own.
            let error = model.fault(unit, &stream).unwrap_err();
            assert!(matches!(error, PagerError::NeverFits { .. }), "{error}");
        }
        assert!(model.is_resident(unit));
    }
    assert_nothing_left(&device);
}
