//! The whole pager over the stand-in driver: each driver call of the scripted run (open, passes, pressure, rows,
//! patches, another model, drop) fails once, and from some call on for good. Whatever fails: the driver's own
//! code or none, never a wrong byte under a guard that was given, no frame, range, mapping, event or
//! page-locked byte left behind, and the next run works.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
mod faulty_run;

use std::sync::MutexGuard;

use common::Watchdog;
use common::standin::{self, Standin};
use faulty_run::{CARD, Files, PAGE, of_device, script};
use vram_pager::device::{self, DeviceError, LiveObjects};
use vram_pager::pager::PagerError;

/// The stand-in for one test at a time, with small pages.
fn alone() -> (MutexGuard<'static, ()>, &'static Standin) {
    let (guard, standin) = standin::alone();
    standin.set_page(PAGE);
    (guard, standin)
}

/// Calls that give something back. The crate makes each once more when it is refused.
const GIVES_BACK: [&str; 9] = [
    "cuEventDestroy_v2",
    "cuMemAddressFree",
    "cuMemFreeAsync",
    "cuMemHostUnregister",
    "cuMemPoolDestroy",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
];

/// One run from opening the card to closing it; answers what it was told.
fn run(standin: &'static Standin, files: &Files, failure: &str) -> Vec<PagerError> {
    let _watchdog = Watchdog::new(60, failure);
    standin.take_told();
    standin.fail(failure);
    let mut errors = Vec::new();
    // What a driver refuses to take back for good stays: where the refused call is the one that gives back, or
    // where the run did not come to the point at which the failures end.
    let mut can_give_back = true;
    match device::open(&format!("cuda:0,cap={CARD}")) {
        Ok(device) => {
            let settle = || {
                standin.fail("");
                // What was kept from a drop surfaces here, and not in the run that must go well.
                while device.memory().is_err() {}
            };
            let outcome = script(&device, &files.one.index(), files, failure, settle);
            errors = outcome.errors;
            let gives_back = GIVES_BACK.iter().any(|call| failure.starts_with(call));
            can_give_back = !failure.contains('+') || outcome.finished && !gives_back;
            standin.fail("");
            assert!(!can_give_back || device.live() == LiveObjects::default(), "{failure}: {errors:?}");
        }
        Err(error) => errors.push(error.into()),
    }
    standin.fail("");
    assert_eq!(standin.leftovers(), 0, "{failure}: {errors:?}");
    let mut told = standin.take_told();
    told.retain(|text| can_give_back || !text.contains("left behind"));
    assert!(told.is_empty(), "{failure}: {told:?}, {errors:?}");
    errors
}

/// The calls that an undisturbed run makes, by name.
fn calls(standin: &'static Standin, files: &Files) -> Vec<(String, u64)> {
    standin.fail("");
    let device = device::open(&format!("cuda:0,cap={CARD}")).unwrap();
    let errors = script(&device, &files.one.index(), files, "undisturbed", || ()).errors;
    assert!(errors.is_empty(), "{errors:?}");
    drop(device);
    let calls = standin.calls_by_name();
    assert!(calls.iter().any(|(call, count)| call == "cuEventElapsedTime" && *count >= 4), "{calls:?}");
    assert!(calls.len() > 30 && calls.iter().map(|(_, count)| count).sum::<u64>() > 1000, "{calls:?}");
    calls
}

/// An error that only the refused call can have caused.
fn assert_typed(call: &str, errors: &[PagerError], what: &str) {
    for error in errors {
        let text = error.to_string();
        let own = match of_device(error) {
            Some(DeviceError::Driver { code: 999, .. }) => true,
            // The card could not be opened, or lacks what the refused call offers.
            Some(DeviceError::Unavailable { .. } | DeviceError::Unsupported { .. }) => {
                text.contains(call) || text.contains("999")
            }
            _ => false,
        };
        assert!(own, "{what}: {text}");
    }
}

#[test]
fn each_driver_call_fails_once_and_nothing_is_lost_or_wrong() {
    let (_alone, standin) = alone();
    let files = Files::new();
    let mut runs = 0;
    for (call, count) in calls(standin, &files) {
        let mut nth = 1;
        while nth <= count {
            let failure = format!("{call}@{nth}=999");
            assert_typed(&call, &run(standin, &files, &failure), &failure);
            runs += 1;
            // Every one of the first few, then ever wider steps.
            nth += 1 + nth / 3;
        }
    }
    assert!(runs > 200, "{runs}");
    // A time that cannot be told costs the measuring alone.
    for failure in ["cuEventElapsedTime@1=999", "cuEventElapsedTime@1+=2", "cuEventElapsedTime@4=999"] {
        assert_eq!(run(standin, &files, failure).len(), 0, "{failure}");
    }
    assert!(run(standin, &files, "").is_empty());
}

#[test]
fn a_driver_call_fails_from_some_call_on_and_the_pager_recovers() {
    let (_alone, standin) = alone();
    let files = Files::new();
    for (call, count) in calls(standin, &files) {
        for nth in [1, 2, 5, 17, 65].into_iter().filter(|nth| *nth <= count) {
            let failure = format!("{call}@{nth}+=999");
            assert_typed(&call, &run(standin, &files, &failure), &failure);
        }
    }
    assert!(run(standin, &files, "").is_empty());
}

#[test]
fn a_driver_without_memory_at_some_moment_is_worked_around() {
    let (_alone, standin) = alone();
    let files = Files::new();
    for nth in 1..=12 {
        let failure = format!("cuMemCreate@{nth}=2");
        let errors = run(standin, &files, &failure);
        assert!(errors.is_empty(), "{failure}: {errors:?}");
    }
}

#[test]
fn late_completions_in_any_order_change_no_byte() {
    let (_alone, standin) = alone();
    let files = Files::new();
    for seed in 1..=24 {
        let what = format!("delays of seed {seed}");
        let _watchdog = Watchdog::new(60, what.clone());
        let device = device::open(&format!("cuda:0,cap={CARD}")).unwrap();
        standin.seed_delays(0, seed);
        standin.take_told();
        let errors = script(&device, &files.one.index(), &files, &what, || ()).errors;
        assert!(errors.is_empty(), "{what}: {errors:?}");
        assert_eq!(device.live(), LiveObjects::default(), "{what}");
        assert_eq!(standin.take_told(), Vec::<String>::new(), "{what}");
    }
}
