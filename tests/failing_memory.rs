//! The host refuses each large table and block of memory that the scripted run asks for, once and from then on:
//! a typed error that says what for and how many bytes or none, never a wrong byte, nothing left, and a clean
//! run of the same pager afterwards works. One test: the refusals are the process's.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
mod faulty_run;

use std::sync::Arc;

use common::{Watchdog, emulated_card};
use faulty_run::{CARD, Files, script};
use vram_pager::device::{DeviceError, LiveObjects};
use vram_pager::pager::PagerError;
use vram_pager::staging::StagingError;
use vram_pager::units::refuse_host_memory;
use vram_pager::weights::{TensorIndex, WeightsError};

/// One run; answers its errors.
fn run(files: &Files, nth: u64, for_good: bool) -> Vec<PagerError> {
    let what = format!("request {nth}, for good: {for_good}");
    let _watchdog = Watchdog::new(60, what.clone());
    let (card, device) = emulated_card(CARD, "bytes are read at their address");
    refuse_host_memory(nth, for_good);
    let mut errors = Vec::new();
    let mut opened = TensorIndex::open(&files.one.path);
    if let Err(error) = opened {
        errors.push(error.into());
        refuse_host_memory(0, false);
        opened = TensorIndex::open(&files.one.path);
    }
    let settle = || {
        refuse_host_memory(0, false);
    };
    errors.extend(script(&device, Arc::new(opened.unwrap()), files, &what, settle).errors);
    refuse_host_memory(0, false);
    assert_eq!(device.live(), LiveObjects::default(), "{what}");
    assert_eq!(card.take_caught(), [], "{what}");
    errors
}

/// Whether an error says that the host has no memory, and for what.
fn is_told(error: &PagerError) -> bool {
    matches!(
        error,
        PagerError::NoHostMemory(_)
            | PagerError::Weights(WeightsError::NoMemory { .. })
            | PagerError::Device(DeviceError::Host { .. })
            | PagerError::Staging(StagingError::NoMemory { .. })
    )
}

#[test]
fn each_request_for_host_memory_is_refused_and_nothing_is_lost_or_wrong() {
    let files = Files::new();
    let errors = run(&files, 0, false);
    assert!(errors.is_empty(), "{errors:?}");
    for for_good in [false, true] {
        let mut told = 0;
        for nth in 1..=24 {
            let errors = run(&files, nth, for_good);
            for error in &errors {
                assert!(is_told(error), "request {nth}: {error}");
            }
            told += usize::from(!errors.is_empty());
        }
        assert!(told >= 8, "only {told} of 24 refusals were told");
    }
}
