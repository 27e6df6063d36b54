//! Every device call of a scripted run (open, two passes, pressure, another model, drop) is made to fail
//! once, and each kind from some call on for good. Whatever fails: a typed error or none, never a wrong
//! byte under a guard that was given, nothing left on the card when all is dropped, and a clean run of the
//! same pager afterwards works.
//!
//! For failures that stay, the faults are taken away before the drop: a card that refuses every unmap
//! cannot be given anything back.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::sync::Arc;

use common::{ModelFile, Watchdog, assert_nothing_left, emulated_card, pager, small_options, unit_id};
use vram_pager::device::SharedDevice;
use vram_pager::device::emulated::{CallKind, EmulatedDevice, Fault, FaultError};
use vram_pager::pager::{ModelOptions, PagedModel, Pager, PagerError, PagerOptions, PagerStream};
use vram_pager::units::KIB;

/// Nine units in 0.9 MiB; the card has room for about half.
fn units() -> Vec<(u64, u64)> {
    (0..9_usize).map(|number| [(128, 512), (16, 96), (160, 512)][number % 3]).collect()
}

const CARD: u64 = 512 * KIB;

/// `cuda_standin.rs` fails each call of the driver under the other backend.
const WHY: &str = "faults are injected into each kind of device call, and memory is read at its address";

fn options() -> PagerOptions {
    PagerOptions { chunk_bytes: 128 * KIB, readers: 1, ..small_options() }
}

/// Compares what a guard gives with the file, through host memory: the script's own calls must not be
/// those that fail, so the guard's addresses are read directly once its stream has come so far.
#[expect(unsafe_code, reason = "reads guarded addresses of an emulated card")]
fn compare(file: &[u8], model: &PagedModel, views: &[vram_pager::pager::TensorView<'_>], what: &str) {
    for view in views {
        let info = model.index().tensor_info(model.index().tensor(view.name).unwrap());
        let row = info.bytes / info.shape[0].max(1);
        let start = usize::try_from(info.offset + view.rows.start * row).unwrap();
        let length = usize::try_from(view.bytes).unwrap();
        // SAFETY: the caller holds a guard, waited for its stream, and an emulated card's memory lies in
        // this process at its own addresses.
        let found = unsafe { std::slice::from_raw_parts(view.address.0 as *const u8, length) };
        assert!(found == &file[start..start + length], "{what}: wrong bytes of {}", view.name);
    }
}

/// Faults every unit; errors are answered, guards that are given are compared.
fn pass(file: &[u8], model: &PagedModel, stream: &PagerStream, what: &str) -> Result<(), PagerError> {
    let mut first = Ok(());
    for unit in 0..model.index().units().len() as u64 {
        let unit = unit_id(unit);
        for piece in 0..model.pieces(unit)? {
            match model.fault_piece(unit, piece, stream) {
                Ok(guard) => {
                    // A stream that cannot be waited for proves nothing.
                    match stream.synchronize() {
                        Ok(()) => compare(file, model, &guard.tensors(), what),
                        Err(error) => first = first.and(Err(error.into())),
                    }
                }
                Err(error) => first = first.and(Err(error)),
            }
        }
    }
    first
}

struct Files {
    one: ModelFile,
    two: ModelFile,
    bytes_one: Vec<u8>,
    bytes_two: Vec<u8>,
}

impl Files {
    fn new() -> Self {
        let (one, two) = (ModelFile::new(&units(), 81), ModelFile::new(&units(), 82));
        let (bytes_one, bytes_two) = (std::fs::read(&one.path).unwrap(), std::fs::read(&two.path).unwrap());
        Self { one, two, bytes_one, bytes_two }
    }
}

/// The script; every step is tried whatever became of the one before.
fn script(card: &EmulatedDevice, device: &SharedDevice, files: &Files, what: &str) -> Vec<PagerError> {
    let mut errors = Vec::new();
    let Ok(pager) = Pager::new(device, options()).map_err(|error| errors.push(error)) else { return errors };
    let mut note = |answer: Result<(), PagerError>| errors.extend(answer.err());
    let stream = match pager.stream() {
        Ok(stream) => stream,
        Err(error) => {
            note(Err(error));
            return errors;
        }
    };
    let one = match pager.open_model(files.one.index(), &ModelOptions::default()) {
        Ok(model) => model,
        Err(error) => {
            note(Err(error));
            return errors;
        }
    };
    note(pass(&files.bytes_one, &one, &stream, what));
    note(pass(&files.bytes_one, &one, &stream, what));
    note(pager.set_headroom(128 * KIB));
    note(pass(&files.bytes_one, &one, &stream, what));
    note(pager.set_headroom(0));
    let activation = pager.allocate(&stream, 100 * KIB);
    note(activation.as_ref().map(|_| ()).map_err(Clone::clone));
    // Lives until the faults are gone: what cannot be unmapped cannot be given back.
    let second = pager.open_model(files.two.index(), &ModelOptions::default());
    match &second {
        Ok(two) => {
            note(two.activate(Some(2)));
            note(pass(&files.bytes_two, two, &stream, what));
            note(pass(&files.bytes_one, &one, &stream, what));
            note(two.unload(128 * KIB).map(drop));
        }
        Err(error) => note(Err(error.clone())),
    }
    drop(activation);
    // The same pager, after the failure: a clean run.
    card.clear_faults();
    card.take_deferred();
    for _ in 0..2 {
        pass(&files.bytes_one, &one, &stream, what)
            .unwrap_or_else(|error| panic!("{what}: afterwards: {error}"));
    }
    errors
}

fn run(files: &Files, fault: Option<Fault>, what: &str) -> (u64, Vec<PagerError>) {
    let _watchdog = Watchdog::new(60, what);
    let (card, device) = emulated_card(CARD, WHY);
    if let Some(fault) = fault {
        card.inject(fault);
    }
    let errors = script(&card, &device, files, what);
    let fired = card.faults_fired();
    card.clear_faults();
    assert_nothing_left_of(&card, &device, what);
    (fired, errors)
}

fn assert_nothing_left_of(card: &Arc<EmulatedDevice>, device: &SharedDevice, what: &str) {
    let live = device.live();
    let deferred = card.take_deferred();
    assert!(
        live == vram_pager::device::LiveObjects::default(),
        "{what}: left {live:?}, deferred {deferred:?}"
    );
}

/// Kinds that the script never calls, or that belong to the script itself.
fn kinds() -> impl Iterator<Item = CallKind> {
    CallKind::ALL
        .iter()
        .copied()
        .filter(|kind| !matches!(kind, CallKind::AddKernels | CallKind::Synchronize | CallKind::CopyOnDevice))
}

#[test]
fn each_call_fails_once_and_nothing_is_lost_or_wrong() {
    let files = Files::new();
    for kind in kinds() {
        let mut nth = 1;
        loop {
            let what = format!("{} fails once, call {nth}", kind.name());
            let (fired, _) = run(&files, Some(Fault::once(kind, nth)), &what);
            if fired == 0 {
                break;
            }
            // Every call of the first few, then ever wider steps.
            nth += 1 + nth / 6;
        }
    }
}

#[test]
fn a_kind_of_call_fails_from_some_call_on_and_the_pager_recovers() {
    let files = Files::new();
    for kind in kinds() {
        for nth in [1, 2, 3, 5, 9, 17, 33, 65] {
            let what = format!("{} fails from call {nth} on", kind.name());
            let (fired, errors) = run(&files, Some(Fault::from_then_on(kind, nth)), &what);
            if fired == 0 {
                break;
            }
            // An error says something.
            assert!(errors.iter().all(|error| !error.to_string().is_empty()), "{what}");
        }
    }
}

#[test]
fn a_card_that_has_no_memory_at_some_moment_is_worked_around() {
    let files = Files::new();
    for nth in 1..=24 {
        let fault = Fault::once(CallKind::CreateFrame, nth).with(FaultError::OutOfMemory);
        let what = format!("no memory at frame {nth}");
        let (_, errors) = run(&files, Some(fault), &what);
        assert!(errors.is_empty(), "{what}: {errors:?}");
    }
}

#[test]
fn a_drop_whose_calls_fail_once_leaves_nothing() {
    let files = Files::new();
    for kind in kinds() {
        for nth in 1..=12 {
            let what = format!("{} fails in the drop, call {nth}", kind.name());
            let _watchdog = Watchdog::new(60, what.clone());
            let (card, device) = emulated_card(CARD, WHY);
            card.seed_delays(nth);
            {
                let pager = pager(&device, options());
                let stream = pager.stream().unwrap();
                let model = pager.open_model(files.one.index(), &ModelOptions::default()).unwrap();
                for unit in 0..9 {
                    drop(model.fault_piece(unit_id(unit), 0, &stream).unwrap());
                }
                card.inject(Fault::once(kind, nth));
            }
            card.clear_faults();
            assert_nothing_left_of(&card, &device, &what);
        }
    }
}

#[test]
fn late_completions_in_any_order_change_no_byte() {
    let files = Files::new();
    for seed in 1..=6 {
        let what = format!("delays of seed {seed}");
        let _watchdog = Watchdog::new(60, what.clone());
        let (card, device) = emulated_card(CARD, WHY);
        card.seed_delays(seed);
        assert!(script(&card, &device, &files, &what).is_empty());
        assert_nothing_left(&device);
    }
}
