//! Every device call of a scripted run (open, passes, pressure, rows, patches, another model, drop) is made to
//! fail once, and each kind from some call on for good. Whatever fails: the error that the call gave or none,
//! never a wrong byte under a guard that was given, no work without an order to earlier work on the same
//! bytes, nothing left on the card when all is dropped, and a clean run of the same pager afterwards works.
//!
//! For failures that stay, the faults are taken away before the drop: a card that refuses every unmap
//! cannot be given anything back.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
mod faulty_run;

use std::sync::Arc;

use common::{Watchdog, assert_nothing_left, emulated_card, pager, unit_id};
use faulty_run::{CARD, Files, of_device, options, script};
use vram_pager::device::emulated::{CallKind, EmulatedDevice, Fault, FaultError};
use vram_pager::device::{DeviceError, SharedDevice};
use vram_pager::pager::{ModelOptions, PagerError};

/// `cuda_pager_faults.rs` fails each call of the driver under the other backend.
const WHY: &str = "faults are injected into each kind of device call, and memory is read at its address";

fn run(files: &Files, fault: Option<Fault>, what: &str) -> (u64, Vec<PagerError>) {
    let _watchdog = Watchdog::new(60, what);
    let (card, device) = emulated_card(CARD, WHY);
    if let Some(fault) = fault {
        card.inject(fault);
    }
    let settle = || {
        card.clear_faults();
        card.take_deferred();
    };
    let errors = script(&device, &files.one.index(), files, what, settle).errors;
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
    let caught = card.take_caught();
    assert!(caught.is_empty(), "{what}: {caught:?}");
}

/// Kinds that the script never calls, or that belong to the script itself.
fn kinds() -> impl Iterator<Item = CallKind> {
    CallKind::ALL
        .iter()
        .copied()
        .filter(|kind| !matches!(kind, CallKind::AddKernels | CallKind::Synchronize | CallKind::CopyOnDevice))
}

/// What a refused call may come to: its own refusal. Where page-locking is refused, ordinary memory serves, and where
/// no times are told, nothing is measured.
fn assert_typed(kind: CallKind, errors: &[PagerError], what: &str) {
    for error in errors {
        let own = matches!(
            of_device(error),
            Some(DeviceError::Driver { call, code: 999, .. }) if *call == kind.name()
        );
        assert!(own && !matches!(kind, CallKind::PageLock | CallKind::Elapsed), "{what}: {error}");
    }
}

#[test]
fn each_call_fails_once_and_nothing_is_lost_or_wrong() {
    let files = Files::new();
    for kind in kinds() {
        let mut nth = 1;
        loop {
            let what = format!("{} fails once, call {nth}", kind.name());
            let (fired, errors) = run(&files, Some(Fault::once(kind, nth)), &what);
            if fired == 0 {
                break;
            }
            assert_typed(kind, &errors, &what);
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
            assert_typed(kind, &errors, &what);
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
    for seed in 1..=40 {
        let what = format!("delays of seed {seed}");
        let _watchdog = Watchdog::new(60, what.clone());
        let (card, device) = emulated_card(CARD, WHY);
        card.seed_delays(seed);
        let errors = script(&device, &files.one.index(), &files, &what, || ()).errors;
        assert!(errors.is_empty(), "{what}: {errors:?}");
        assert_nothing_left(&device);
        assert_nothing_left_of(&card, &device, &what);
    }
}
