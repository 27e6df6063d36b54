//! How many bare pins is a hit?
//!
//! Fault and release of a resident unit, and pin and unpin of a bare atomic word, take turns in short runs on
//! one thread; the fastest run of each counts. So the ratio holds also on a machine that is busy with other
//! work, where the means of `page_fault` do not.
//!
//! `cargo bench --bench hit_cost -- [--json] [--runs=2000]`.

mod common;

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::Outcome;
use common::card::{Setup, pass};
use common::models::{ModelFile, uniform};
use common::null::NullDevice;
use common::table::{Args, Report, Row};
use serde::Serialize;
use vram_pager::pager::PagerOptions;
use vram_pager::weights::UnitId;

const FAULTS: u32 = 500;

#[derive(Serialize)]
struct Cost {
    unit: &'static str,
    /// Nanoseconds of one.
    hit: f64,
    bare: f64,
    ratio: f64,
}

impl Row for Cost {
    const COLUMNS: &'static [(&'static str, usize)] =
        &[("unit", 7), ("hit ns", 7), ("bare ns", 7), ("hit/bare", 8)];

    fn cells(&self) -> Vec<String> {
        vec![
            self.unit.to_owned(),
            format!("{:.1}", self.hit),
            format!("{:.1}", self.bare),
            format!("{:.2}", self.ratio),
        ]
    }

    fn holds(&self) -> bool {
        true
    }
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    let runs = report.args().value("--runs").map_or(Ok(2000), str::parse::<u32>)?;
    for (unit, bytes) in [("16 KB", 16 << 10), ("1 MB", 1 << 20), ("100 MB", 100 << 20), ("1 GB", 1 << 30)] {
        let file = ModelFile::new(&uniform(4, bytes))?;
        let setup = Setup::on(&NullDevice::open(64 << 30, 2 << 20), &file, PagerOptions::default())?;
        for _ in 0..3 {
            pass(&setup.model, &setup.stream, &[])?;
        }
        let (model, stream) = (&setup.model, &setup.stream);
        let word = AtomicU64::new(0);
        let (mut hit, mut bare) = (Duration::MAX, Duration::MAX);
        for _ in 0..runs {
            let began = Instant::now();
            for _ in 0..FAULTS {
                black_box(word.fetch_add(1, Ordering::Acquire));
                black_box(word.fetch_sub(1, Ordering::Release));
            }
            bare = bare.min(began.elapsed());
            let began = Instant::now();
            for _ in 0..FAULTS {
                let guard = model.fault(black_box(UnitId(0)), stream)?;
                black_box(&guard);
                guard.release();
            }
            hit = hit.min(began.elapsed());
        }
        let each = |time: Duration| time.as_secs_f64() * 1e9 / f64::from(FAULTS);
        let (hit, bare) = (each(hit), each(bare));
        report.add(Cost { unit, hit, bare, ratio: hit / bare });
    }
    report.end()
}
