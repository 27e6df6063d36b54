//! A device that does not tell its link's rate has it measured by the copies that are made anyway, and what stays on
//! the card and what streams is chosen as if it had been told.
//!
//! By the modelled clock, on a card without bytes whose rate is hidden. Over the driver stand-in the same is in
//! `cuda_times.rs`.

#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../benches/common/mod.rs"]
mod common;
mod wrapped;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::card::{Setup, Spread, compute, pass};
use common::models::{Layout, ModelFile};
use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::device::{DeviceError, SharedDevice};
use vram_pager::pager::PagerOptions;
use vram_pager::units::Rate;
use wrapped::{Before, Wrapped};

fn card(bytes: u64, link: Rate) -> SharedDevice {
    let options = EmulatedOptions { keeps_bytes: false, link, ..EmulatedOptions::new(bytes) };
    EmulatedDevice::open(options).unwrap()
}

fn nothing() -> Before {
    Box::new(|_| Ok(()))
}

fn options(copy_streams: usize) -> PagerOptions {
    PagerOptions { headroom_bytes: Some(0), copy_streams, ..PagerOptions::default() }
}

/// The time of a steady pass, and the rate that the pager has then.
fn steady(device: &SharedDevice, file: &ModelFile, link: Rate, streams: usize) -> (Duration, Option<Rate>) {
    let setup = Setup::on(device, file, options(streams)).unwrap();
    let missing = link.duration(file.bytes() - device.info().total_bytes);
    let compute = compute(&setup.model, missing, Spread::Uneven);
    let passes: Vec<_> = (0..6).map(|_| pass(&setup.model, &setup.stream, &compute).unwrap()).collect();
    assert_eq!(passes[5].map_calls, 0, "what is learned of the link moves no page in a steady pass");
    (passes[5].time, setup.pager.figures().link)
}

#[test]
fn a_link_that_is_not_told_is_measured_and_chosen_for_as_if_it_were() {
    let file = Layout::Large.file().unwrap();
    let size = file.bytes() / 125 * 100;
    for link in [12, 50, 100].map(|gigabytes| Rate(gigabytes * 1_000_000_000)) {
        for streams in [1, 3] {
            let (told, _) = steady(&card(size, link), &file, link, streams);
            let hidden: SharedDevice = Wrapped::telling(&card(size, link), None, nothing());
            assert_eq!(hidden.info().link, None);
            let (measured, rate) = steady(&hidden, &file, link, streams);
            let rate = rate.unwrap();
            println!("{link:?}, {streams} streams: {rate:?}; told {told:?}, measured {measured:?}");
            assert!(rate.0.abs_diff(link.0) <= link.0 / 100, "{rate:?} of {link:?}");
            // For 25 GB/s, where it is 50, the best choice takes a fifth more.
            assert!(measured <= told.mul_f64(1.01), "{link:?}: {measured:?} for {told:?}");
        }
    }
}

#[test]
fn measuring_ends() {
    let file = Layout::Medium.file().unwrap();
    let asked = Arc::new(AtomicU64::new(0));
    let timed = Arc::new(AtomicU64::new(0));
    let (asking, timing) = (Arc::clone(&asked), Arc::clone(&timed));
    let before: Before = Box::new(move |call| {
        match call {
            "elapsed" => asking.fetch_add(1, Ordering::Relaxed),
            "create_timed_event" => timing.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
        Ok(())
    });
    let link = Rate(50_000_000_000);
    let device: SharedDevice = Wrapped::telling(&card(file.bytes() / 2, link), None, before);
    let setup = Setup::on(&device, &file, options(1)).unwrap();
    let units = setup.model.index().units().len() as u64;
    for _ in 0..40 {
        pass(&setup.model, &setup.stream, &[]).unwrap();
    }
    assert_eq!(setup.pager.figures().link.map(|rate| rate.0 / 1_000_000_000), Some(50));
    // The compute of each unit is asked for once; a window asks for two times of each of its eight batches.
    let asked = asked.load(Ordering::Relaxed) - units;
    assert!(asked > 0 && asked <= 8 * 8 * 2, "{asked}");
    // Points are used again. Those of compute are all in use at once.
    let timed = timed.load(Ordering::Relaxed);
    assert!(timed <= 2 * units + 64, "{timed} of {units} units");
}

#[test]
fn a_device_that_refuses_to_tell_the_time_costs_the_rate_alone() {
    let file = Layout::Medium.file().unwrap();
    for call in ["elapsed", "create_timed_event"] {
        for first in [1, 2, 9, 16] {
            let calls = AtomicU64::new(0);
            let before: Before = Box::new(move |name| {
                if name == call && calls.fetch_add(1, Ordering::Relaxed) + 1 >= first {
                    return Err(DeviceError::InvalidArgument { call, why: "refused".to_owned() });
                }
                Ok(())
            });
            let link = Rate(50_000_000_000);
            let device: SharedDevice = Wrapped::telling(&card(file.bytes() / 2, link), None, before);
            let setup = Setup::on(&device, &file, options(1)).unwrap();
            let mut copied = 0;
            for _ in 0..4 {
                copied = pass(&setup.model, &setup.stream, &[]).unwrap().copied_bytes;
            }
            assert_eq!(setup.pager.figures().link, None, "{call} from {first} on");
            assert!(copied > 0);
        }
    }
}
