//! A model's first pass teaches the pager how long the runner computes with each unit, and a device that refuses to
//! tell costs that alone. Over the driver stand-in the same is in `cuda_times.rs`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{ModelFile, mixed_units, pager, small_options, unit_id};
use vram_pager::device::SharedDevice;
use vram_pager::device::emulated::{CallKind, EmulatedDevice, EmulatedOptions, Fault};
use vram_pager::pager::{ModelOptions, PagedModel, PagerStream};
use vram_pager::units::{KIB, MIB};

/// What the runner computes with a piece of a unit.
fn compute(unit: u64) -> Duration {
    Duration::from_micros(50 + 13 * (unit * 7 % 11))
}

/// Passes over a model, some of which stays and some of which streams; answers the compute of one.
fn passes(model: &PagedModel, stream: &PagerStream, passes: usize) -> Duration {
    let mut sum = Duration::ZERO;
    for _ in 0..passes {
        sum = Duration::ZERO;
        for unit in 0..24 {
            for piece in 0..model.pieces(unit_id(unit)).unwrap() {
                let guard = model.fault_piece(unit_id(unit), piece, stream).unwrap();
                stream.charge_compute(compute(unit)).unwrap();
                sum += compute(unit);
                guard.release();
            }
        }
        stream.synchronize().unwrap();
    }
    sum
}

fn card() -> Arc<EmulatedDevice> {
    EmulatedDevice::open(EmulatedOptions { page_bytes: 64 * KIB, ..EmulatedOptions::new(4 * MIB) }).unwrap()
}

#[test]
fn the_compute_of_a_pass_is_what_the_runner_was_charged() {
    let device: SharedDevice = card();
    let pager = pager(&device, small_options());
    let file = ModelFile::new(&mixed_units(), 9);
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let stream = pager.stream().unwrap();
    passes(&model, &stream, 1);
    assert_eq!(model.figures().measured_compute, None, "the pass has not ended yet");
    let charged = passes(&model, &stream, 1);
    let measured = model.figures().measured_compute.unwrap();
    assert!(measured.abs_diff(charged) < Duration::from_micros(1), "{measured:?}, charged {charged:?}");
    let (counts, figures) = (model.counts(), model.figures());
    assert!(counts.streamed > 0 && figures.resident_bytes > 0, "{counts:?} {figures:?}");
}

#[test]
fn a_device_that_refuses_to_tell_the_time_costs_the_measuring_alone() {
    let file = ModelFile::new(&mixed_units(), 9);
    for fault in [Fault::once(CallKind::Elapsed, 3), Fault::from_then_on(CallKind::Elapsed, 1)] {
        let card = card();
        let device: SharedDevice = Arc::<EmulatedDevice>::clone(&card);
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        card.inject(fault);
        passes(&model, &stream, 3);
        assert!(card.faults_fired() > 0);
        assert_eq!(model.figures().measured_compute, None);
        assert!(card.take_deferred().is_empty());
    }
}

#[test]
fn models_that_take_turns_keep_no_more_points_than_a_pass_has() {
    let device: SharedDevice = card();
    let pager = pager(&device, small_options());
    let files = [9, 10].map(|seed| ModelFile::new(&mixed_units(), seed));
    let open = |file: &ModelFile| pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let models = files.each_ref().map(open);
    let stream = pager.stream().unwrap();
    let mut events = Vec::new();
    for _ in 0..30 {
        for model in &models {
            model.activate(None).unwrap();
            passes(model, &stream, 1);
        }
        events.push(device.live().events);
    }
    // The pools of events keep as many as were once in use together.
    assert!(events[29] <= events[9] + 16, "{events:?}");
}
