//! What does a pass in steady state ask of the driver and of the heap?
//!
//! Counted: map calls, device-wide stops and allocations must be zero; the other calls are shown. Hollow
//! rows run real layouts at their size; rows with bytes move them, streamed from page-locked memory that
//! holds the whole model, or from the file when it may hold little.
//!
//! `cargo bench --bench steady_state -- [WORDS] [--check] [--json]`.

mod common;

use std::fs::File;

use common::Outcome;
use common::alloc::{Counting, allocations};
use common::card::{Setup, pass};
use common::models::{Layout, ModelFile, uniform};
use common::table::{Args, Report, Row};
use serde::Serialize;
use vram_pager::device::SharedDevice;
use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::pager::PagerOptions;

#[global_allocator]
static HEAP: Counting = Counting;

const PASSES: u64 = 4;

#[derive(Serialize)]
struct Steady {
    row: String,
    units: usize,
    streamed_pages: u64,
    /// All a pass, in the worst case rounded up.
    map: u64,
    unmap: u64,
    set_access: u64,
    device_sync: u64,
    allocations: u64,
    record: u64,
    stream_wait: u64,
    copies: u64,
    /// Mean bytes of a copy, in MiB.
    copy_mib: f64,
    host_wait: u64,
}

impl Row for Steady {
    const COLUMNS: &'static [(&'static str, usize)] = &[
        ("row", 26),
        ("units", 6),
        ("pages", 6),
        ("map", 5),
        ("unmap", 5),
        ("access", 6),
        ("sync", 5),
        ("allocs", 8),
        ("records", 7),
        ("waits", 7),
        ("copies", 7),
        ("MiB/copy", 8),
        ("host waits", 10),
    ];

    fn cells(&self) -> Vec<String> {
        let numbers = [
            self.units as u64,
            self.streamed_pages,
            self.map,
            self.unmap,
            self.set_access,
            self.device_sync,
            self.allocations,
            self.record,
            self.stream_wait,
            self.copies,
        ];
        let numbers = numbers.map(|number| number.to_string());
        let last = [format!("{:.2}", self.copy_mib), self.host_wait.to_string()];
        std::iter::once(self.row.clone()).chain(numbers).chain(last).collect()
    }

    fn holds(&self) -> bool {
        self.map + self.unmap + self.set_access + self.device_sync + self.allocations == 0
    }
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    let layouts =
        [Layout::Flux, Layout::Sdxl, Layout::Llama, Layout::T5, Layout::Small, Layout::Medium, Layout::Large];
    for layout in layouts {
        let file = layout.file()?;
        for weights in [1.05, 1.25, 2.0] {
            let name = format!("{} {weights}x hollow", layout.name());
            if report.args().wants(&name) {
                #[expect(
                    clippy::cast_precision_loss,
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "sizes of cards"
                )]
                let card = (file.bytes() as f64 / weights) as u64;
                let setup = Setup::hollow(&file, card, PagerOptions::default())?;
                report.add(measure(name, &file, &setup)?);
            }
        }
    }
    // 128 MiB in 64 units; half of it fits.
    let file = ModelFile::new(&uniform(64, 2 << 20))?;
    File::open(file.path())?.sync_all()?;
    for (name, page_locked) in [("page-locked", 256 << 20), ("from the file", 24 << 20)] {
        let name = format!("bytes, {name}");
        if report.args().wants(&name) {
            let options = EmulatedOptions { page_bytes: 256 << 10, ..EmulatedOptions::new(64 << 20) };
            let options_of_pager = PagerOptions {
                page_locked_bytes: Some(page_locked),
                headroom_bytes: Some(0),
                ..PagerOptions::default()
            };
            let setup =
                Setup::on(&(EmulatedDevice::open(options)? as SharedDevice), &file, options_of_pager)?;
            report.add(measure(name, &file, &setup)?);
        }
    }
    report.end()
}

fn measure(row: String, file: &ModelFile, setup: &Setup) -> Outcome<Steady> {
    for _ in 0..5 {
        pass(&setup.model, &setup.stream, &[])?;
    }
    let device = setup.shared();
    let before = device.counts();
    let allocated = allocations();
    for _ in 0..PASSES {
        pass(&setup.model, &setup.stream, &[])?;
    }
    let allocated = allocations() - allocated;
    let after = device.counts();
    #[expect(clippy::cast_precision_loss, reason = "shown with two places")]
    let mean = |bytes: u64, copies: u64| bytes as f64 / copies.max(1) as f64 / f64::from(1 << 20);
    let a_pass = |from: u64, to: u64| (to - from).div_ceil(PASSES);
    Ok(Steady {
        row,
        units: file.units(),
        streamed_pages: a_pass(before.bytes_to_device, after.bytes_to_device)
            .div_ceil(setup.pager.figures().page_bytes),
        map: a_pass(before.map, after.map),
        unmap: a_pass(before.unmap, after.unmap),
        set_access: a_pass(before.set_access, after.set_access),
        device_sync: a_pass(before.device_sync, after.device_sync),
        allocations: allocated.div_ceil(PASSES),
        record: a_pass(before.record, after.record),
        stream_wait: a_pass(before.stream_wait, after.stream_wait),
        copies: a_pass(before.copy_to_device, after.copy_to_device),
        copy_mib: mean(
            after.bytes_to_device - before.bytes_to_device,
            after.copy_to_device - before.copy_to_device,
        ),
        host_wait: a_pass(before.host_wait, after.host_wait),
    })
}
