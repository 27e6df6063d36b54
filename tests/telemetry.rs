//! A recording says what the card did: each piece of compute and each stall has its unit, and the parts add up
//! to what the card's own counts say.

#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{ModelFile, emulated_card, mixed_units, pager, small_options, unit_id};
use vram_pager::device::emulated::{EmulatedDevice, OperationKind};
use vram_pager::device::{DeviceError, Stream, StreamPriority};
use vram_pager::pager::{ModelOptions, PageState, PagedModel, PagerStream};
use vram_pager::telemetry::{
    Recorder, Recording, TimeSource, accounts, slowest_units, write_report, write_trace,
};
use vram_pager::units::{MIB, ModelTime};

/// The compute of a unit: each has another.
fn compute_of(unit: u64) -> Duration {
    Duration::from_micros(20 + 3 * unit)
}

/// Passes over all units, heard by a recorder.
fn record(
    card: &Arc<EmulatedDevice>,
    model: &Arc<PagedModel>,
    stream: &PagerStream,
    passes: u32,
) -> Recording {
    let recorder = Recorder::new(model, Some(Arc::clone(card)), [stream], passes);
    let device = model.pager().device();
    let mut counts = model.counts();
    for pass in 1..=passes {
        recorder.pass_begins(pass, &counts);
        for unit in 0..model.index().units().len() as u64 {
            let step = recorder.begin(0);
            let guard = model.fault(unit_id(unit), stream).unwrap();
            let step = step.faulted(&recorder);
            stream.charge_compute(compute_of(unit)).unwrap();
            guard.release();
            recorder.step(step, unit_id(unit), 0, true);
        }
        stream.synchronize().unwrap();
        counts = model.counts();
        recorder.pass_ends(device.now(), &counts);
    }
    recorder.finish()
}

#[test]
fn a_recording_tells_each_units_compute_and_stalls_and_adds_up_to_the_counts() {
    let file = ModelFile::new(&mixed_units(), 5);
    let (card, device) = emulated_card(2 * MIB, "its journal is read");
    let pager = pager(&device, small_options());
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let stream = pager.stream().unwrap();
    let before = device.counts();
    let recording = record(&card, &model, &stream, 5);
    let units = model.index().units().len();

    assert_eq!((recording.source, recording.dropped), (TimeSource::Modelled, 0));
    let copied = device.counts().bytes_to_device - before.bytes_to_device;
    assert_eq!(recording.copies.iter().map(|copy| copy.bytes).sum::<u64>(), copied);
    assert_eq!(recording.passes.iter().map(|pass| pass.copied_bytes).sum::<u64>(), copied);
    assert_eq!(recording.steps.iter().map(|step| step.copied_bytes).sum::<u64>(), copied);

    assert_eq!(recording.compute.len(), 5 * units);
    for (number, compute) in recording.compute.iter().enumerate() {
        assert_eq!(compute.unit as usize, number % units, "compute runs in the order of the steps");
        assert_eq!(compute.time.length(), compute_of(u64::from(compute.unit)));
    }
    for copy in &recording.copies {
        let units_of_copy = copy.units.clone().unwrap();
        assert!(units_of_copy.start < units_of_copy.end && units_of_copy.end as usize <= units, "{copy:?}");
    }
    // A stall ends where the compute of its unit may begin, and belongs to a step.
    assert!(!recording.stalls.is_empty());
    for stall in &recording.stalls {
        let unit = stall.unit.unwrap();
        let begins = recording.compute.iter().any(|compute| {
            compute.unit == unit
                && compute.time.start >= stall.time.end
                && compute.time.start.since(stall.time.end) < Duration::from_micros(40)
        });
        assert!(begins, "{stall:?}");
    }
    let stalled: Duration = recording.steps.iter().map(|step| step.stalled).sum();
    assert_eq!(stalled, recording.stalls.iter().map(|stall| stall.time.length()).sum());

    let total: Duration = (0..units as u64).map(compute_of).sum();
    for account in accounts(&recording) {
        assert_eq!(account.compute, total, "pass {}", account.pass);
        // One stream either computes or stands still; the rest is the host's calls.
        assert!(account.compute + account.stalled <= account.took, "{account:?}");
        assert!(account.link <= account.took, "{account:?}");
    }
    let slow = slowest_units(&recording, 3);
    assert!(slow.len() <= 3 && slow.is_sorted_by(|one, next| one.stalled >= next.stalled), "{slow:?}");

    let mut page = Vec::new();
    write_report(&recording, &mut page).unwrap();
    let mut trace = Vec::new();
    write_trace(&recording, &mut trace).unwrap();
    assert!(page.len() > 1000 && trace.len() > 1000);
}

#[test]
fn the_residency_that_is_drawn_is_what_the_pager_holds() {
    let file = ModelFile::new(&mixed_units(), 6);
    let (card, device) = emulated_card(2 * MIB, "its journal is read");
    let pager = pager(&device, small_options());
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let stream = pager.stream().unwrap();
    let mut states = Vec::new();
    model.residency(&mut states);
    assert_eq!(states.len(), model.layout().page_count() as usize);
    assert!(states.iter().all(|state| *state == PageState::Absent), "nothing was faulted yet");
    let recording = record(&card, &model, &stream, 3);
    model.residency(&mut states);
    let count = |wanted| states.iter().filter(|state| **state == wanted).count() as u64;
    let page = pager.figures().page_bytes;
    assert_eq!(count(PageState::Resident) * page, model.figures().resident_bytes);
    assert!(count(PageState::Ring) > 0 && count(PageState::Ring) * page <= pager.figures().ring_bytes);
    assert!(count(PageState::Absent) > 0, "it does not fit");
    let map = &recording.residency;
    let last = map.samples.last().unwrap();
    assert_eq!(last.iter().map(|cell| u64::from(cell.resident)).sum::<u64>(), count(PageState::Resident));
    assert_eq!(last.iter().map(|cell| u64::from(cell.ring)).sum::<u64>(), count(PageState::Ring));
    assert_eq!(map.sample_passes.last(), Some(&3));
}

#[test]
fn the_journal_of_a_card_is_off_bounded_and_in_the_clocks_times() -> Result<(), DeviceError> {
    let (card, device) = emulated_card(2 * MIB, "it has a journal");
    let stream = Stream::new(&device, StreamPriority::Normal)?;
    stream.charge_compute(Duration::from_micros(5))?;
    assert!(card.take_operations().operations.is_empty(), "off until somebody asks");
    card.record_operations(3);
    let begin = device.now();
    for _ in 0..5 {
        stream.charge_compute(Duration::from_micros(7))?;
    }
    let journal = card.take_operations();
    assert_eq!((journal.operations.len(), journal.dropped), (3, 2));
    for (number, operation) in (0_u64..).zip(&journal.operations) {
        assert_eq!((operation.kind, operation.stream), (OperationKind::Compute, Some(stream.id())));
        assert_eq!(operation.issued, begin);
        let start = ModelTime(5_000 + number * 7_000);
        assert_eq!((operation.start, operation.end), (start, ModelTime(start.0 + 7_000)));
    }
    card.record_operations(0);
    stream.charge_compute(Duration::from_micros(7))?;
    assert!(card.take_operations().operations.is_empty());
    stream.synchronize()
}
