//! With one runner thread the times of the modelled clock are the same in every run, however fast readers and the
//! page-locking thread were: to the nanosecond once nothing is read any more, and in the first pass but for a few calls
//! of the driver, where a copy that a fault waits for ends at about the time at which it asks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::time::Duration;

use common::{ModelFile, fault_and_check, mixed_units, pager, unit_id};
use vram_pager::device::SharedDevice;
use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::pager::{ModelOptions, PagerOptions, Verifier};
use vram_pager::units::{KIB, MIB};

/// How long each of four passes takes, in a run of its own on a new card.
fn passes(file: &ModelFile, options: &PagerOptions) -> Vec<Duration> {
    let card = EmulatedOptions { page_bytes: 64 * KIB, ..EmulatedOptions::new(2 * MIB) };
    let device: SharedDevice = EmulatedDevice::open(card).unwrap();
    let pager = pager(&device, options.clone());
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let verifier = Verifier::new(&model).unwrap();
    let stream = pager.stream().unwrap();
    let pass = || {
        let began = device.now();
        let mut check = verifier.begin(&stream).unwrap();
        for unit in 0..24 {
            fault_and_check(&model, unit_id(unit), &stream, &mut check).unwrap();
            stream.charge_compute(Duration::from_micros(30)).unwrap();
        }
        assert_eq!(check.finish().unwrap(), []);
        device.now().since(began)
    };
    (0..4).map(|_| pass()).collect()
}

#[test]
fn the_times_of_one_runner_are_the_same_in_every_run() {
    let file = ModelFile::new(&mixed_units(), 61);
    let options = PagerOptions {
        headroom_bytes: Some(0),
        page_locked_bytes: Some(16 * MIB),
        chunk_bytes: 256 * KIB,
        ..PagerOptions::default()
    };
    let first = passes(&file, &options);
    for run in 1..40 {
        let again = passes(&file, &options);
        assert_eq!(again[1..], first[1..], "run {run}");
        // Waits for an event take a microsecond each.
        let off = again[0].abs_diff(first[0]);
        assert!(off <= Duration::from_micros(6), "run {run}: {off:?}");
    }
}
