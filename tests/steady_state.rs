//! A pass in steady state does no work but copies: from the third pass on a model that does not fit makes
//! no mapping call and no device-wide wait, moves the same bytes each time, and every unit lies where it
//! lay at the start. Nor does it allocate, on any thread of the process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{
    ModelFile, assert_nothing_left, checked_pass, mixed_units, pager, small_card, small_options, unit_id,
};
use vram_pager::device::SharedDevice;
use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::pager::{ModelOptions, PagerOptions, Verifier};
use vram_pager::units::{KIB, MIB};

/// Counts the allocations of all threads.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
#[expect(unsafe_code, reason = "a global allocator is unsafe to write")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the block came from the system's allocator.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(start, layout, bytes) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

/// Held by each test, so that none allocates while another counts.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_pass_allocates_nothing_on_any_thread() {
    let _alone = alone();
    let file = ModelFile::new(&mixed_units(), 7);
    let base = PagerOptions { chunk_bytes: 128 * 1024, ..small_options() };
    // All kept in page-locked memory; read from the file in every pass; the same without any prefetch.
    let kept = base.clone();
    let from_file = PagerOptions { page_locked_bytes: Some(0), ..base.clone() };
    let some_kept = PagerOptions { page_locked_bytes: Some(2 * MIB), ..base };
    let demand =
        |options: &PagerOptions| PagerOptions { prefetch_loads: 0, read_ahead_bytes: 0, ..options.clone() };
    let ahead = |options: &PagerOptions| PagerOptions { prefetch_loads: 2, ..options.clone() };
    let rows = [
        ("kept", kept.clone()),
        ("from the file", from_file.clone()),
        ("some kept", some_kept.clone()),
        ("kept, on demand", demand(&kept)),
        ("from the file, on demand", demand(&from_file)),
        ("some kept, ahead", ahead(&some_kept)),
    ];
    for (what, options) in rows {
        // An emulated card's queues allocate nothing, but for the watch over memory in use; the stand-in's do.
        let options_of_card =
            EmulatedOptions { page_bytes: 64 * KIB, watch: false, ..EmulatedOptions::new(2 * MIB) };
        let device: SharedDevice = EmulatedDevice::open(options_of_card).unwrap();
        let pager = pager(&device, options);
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let pass = || {
            for unit in 0..24 {
                for piece in 0..model.pieces(unit_id(unit)).unwrap() {
                    model.fault_piece(unit_id(unit), piece, &stream).unwrap().release();
                }
            }
            stream.synchronize().unwrap();
        };
        (0..8).for_each(|_| pass());
        // The test harness has a thread of its own that may print just now: one quiet window is proof.
        let allocated: Vec<u64> = (0..4)
            .map(|_| {
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                (0..4).for_each(|_| pass());
                ALLOCATIONS.load(Ordering::Relaxed) - before
            })
            .collect();
        assert!(allocated.contains(&0), "{what}: allocations of four passes, four times: {allocated:?}");
    }
}

#[test]
fn from_the_third_pass_on_a_pass_maps_nothing_and_copies_the_same_bytes() {
    let _alone = alone();
    let file = ModelFile::new(&mixed_units(), 5);
    for card in [704 * KIB, MIB, 1408 * KIB, 2 * MIB, 2816 * KIB, 4 * MIB, 5 * MIB, 8 * MIB] {
        let device = small_card(card);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            let units = model.index().units().len() as u64;
            let addresses = || (0..units).map(|unit| model.unit_address(unit_id(unit)).unwrap());
            let at_start: Vec<_> = addresses().collect();
            for pass in 0..2 {
                checked_pass(&model, &stream, &verifier).unwrap_or_else(|e| panic!("{card}, {pass}: {e}"));
            }
            let mut bytes = Vec::new();
            for pass in 2..6 {
                let before = device.counts();
                checked_pass(&model, &stream, &verifier).unwrap();
                let after = device.counts();
                let calls = [
                    after.map - before.map,
                    after.unmap - before.unmap,
                    after.set_access - before.set_access,
                    after.create_frame - before.create_frame,
                    after.release_frame - before.release_frame,
                    after.device_sync,
                ];
                assert_eq!(calls, [0; 6], "card of {card}, pass {pass}: {:?}", pager.figures());
                bytes.push(after.bytes_to_device - before.bytes_to_device);
            }
            assert!(bytes.iter().all(|&pass| pass == bytes[0]), "card of {card}: {bytes:?}");
            assert_eq!(addresses().collect::<Vec<_>>(), at_start);
            for unit in 0..units {
                let unit = unit_id(unit);
                if model.pieces(unit).unwrap() == 1 {
                    let guard = model.fault(unit, &stream).unwrap();
                    let first = guard.tensors()[0].address;
                    assert_eq!(Some(first), model.unit_address(unit));
                }
            }
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn a_pager_that_went_around_held_guards_comes_back_to_its_steady_state() {
    let _alone = alone();
    let file = ModelFile::new(&mixed_units(), 6);
    let device = small_card(2 * MIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let verifier = Verifier::new(&model).unwrap();
        for _ in 0..3 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        {
            let _first = model.fault(unit_id(3), &stream).unwrap();
            let _second = model.fault(unit_id(7), &stream).unwrap();
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        for _ in 0..4 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        let (model_has, pager_has) = (model.figures(), pager.figures());
        assert_eq!(model_has.resident_bytes, model_has.planned_bytes, "what it gave up came back");
        assert!(pager_has.ring_bytes <= 2 * model_has.largest_streamed_part_bytes + pager_has.page_bytes);
        let before = device.counts();
        checked_pass(&model, &stream, &verifier).unwrap();
        let after = device.counts();
        assert_eq!((after.map, after.unmap), (before.map, before.unmap));
    }
    assert_nothing_left(&device);
}
