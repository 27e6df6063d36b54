//! Does a miss cost the same a page in a large table as in a small one?
//!
//! Models of 100 to 500,000 pages of 2 MiB, in units of 10 pages, on a card whose calls do nothing, so that
//! what is timed is the pager's own cost. Two kinds of miss, the fastest of several passes:
//!
//! - `cold`: the model comes in, every page is mapped, frames are reused.
//! - `streamed`: a pass in steady state over twice the card, per page that crosses the link.
//!
//! The limit is 1.5 times the cost at 100 pages, and 32 bytes of table a page. The table is what opening the
//! model takes from the heap.
//!
//! `cargo bench --bench table_scale -- [WORDS] [--check] [--json]`.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::Outcome;
use common::alloc::{Counting, live_bytes};
use common::card::{Setup, pass};
use common::models::{ModelFile, uniform};
use common::null::NullDevice;
use common::table::{Args, Report, Row};
use serde::Serialize;
use vram_pager::pager::{ModelOptions, PagerOptions};

#[global_allocator]
static HEAP: Counting = Counting;

const PAGE: u64 = 2 << 20;
const UNIT_PAGES: u32 = 10;

#[derive(Serialize)]
struct Scale {
    pages: u64,
    /// All in nanoseconds a page.
    cold: f64,
    streamed: f64,
    /// Over the first row's.
    cold_growth: f64,
    streamed_growth: f64,
    table_bytes: f64,
    /// What a frame takes.
    frame_bytes: f64,
}

impl Row for Scale {
    const COLUMNS: &'static [(&'static str, usize)] = &[
        ("pages", 8),
        ("cold ns", 8),
        ("growth", 7),
        ("streamed ns", 11),
        ("growth", 7),
        ("table B/page", 12),
        ("B/frame", 8),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.pages.to_string(),
            format!("{:.0}", self.cold),
            format!("{:.2}", self.cold_growth),
            format!("{:.0}", self.streamed),
            format!("{:.2}", self.streamed_growth),
            format!("{:.1}", self.table_bytes),
            format!("{:.1}", self.frame_bytes),
        ]
    }

    fn holds(&self) -> bool {
        // What the units cost is not of the pages; in a small table it is most of it.
        self.cold_growth <= 1.5
            && self.streamed_growth <= 1.5
            && (self.pages < 10_000 || self.table_bytes <= 32.0)
    }
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    let mut first: Option<(f64, f64)> = None;
    for pages in [100, 1_000, 10_000, 100_000, 500_000_u64] {
        if first.is_some() && !report.args().wants(&pages.to_string()) {
            continue;
        }
        let mut row = measure(pages)?;
        let (cold, streamed) = *first.get_or_insert((row.cold, row.streamed));
        row.cold_growth = row.cold / cold;
        row.streamed_growth = row.streamed / streamed;
        report.add(row);
    }
    report.end()
}

#[expect(clippy::cast_precision_loss, reason = "times of a bench")]
fn measure(pages: u64) -> Outcome<Scale> {
    let units = usize::try_from(pages / u64::from(UNIT_PAGES))?;
    let file = ModelFile::new(&uniform(units, u64::from(UNIT_PAGES) * PAGE))?;
    let repeats = (200_000 / pages).clamp(3, 200);
    let (cold, table, frames) = cold(&file, pages, repeats)?;
    let streamed = streamed(&file, repeats)?;
    let per_page = |time: Duration| time.as_nanos() as f64 / pages as f64;
    Ok(Scale {
        pages,
        cold: per_page(cold),
        streamed,
        cold_growth: 1.0,
        streamed_growth: 1.0,
        table_bytes: table as f64 / pages as f64,
        frame_bytes: frames as f64 / pages as f64,
    })
}

/// The fastest pass that brings the whole model in, the bytes of its table, and those of its frames.
fn cold(file: &ModelFile, pages: u64, repeats: u64) -> Outcome<(Duration, u64, u64)> {
    let options = PagerOptions { headroom_bytes: Some(0), ..PagerOptions::default() };
    let card = (pages + 16) * PAGE;
    let setup = Setup::on(&NullDevice::open(card, PAGE), file, options)?;
    let before = live_bytes();
    pass(&setup.model, &setup.stream, &[])?;
    let frames = live_bytes().saturating_sub(before);
    let Setup { pager, model, stream, .. } = setup;
    drop(model);
    let mut fastest = Duration::MAX;
    let mut table = 0;
    for _ in 0..repeats {
        let before = live_bytes();
        let options = ModelOptions { piece_bytes: Some(u64::MAX), ..ModelOptions::default() };
        let model = pager.open_model(Arc::clone(&file.index), &options)?;
        table = live_bytes().saturating_sub(before);
        let began = Instant::now();
        pass(&model, &stream, &[])?;
        fastest = fastest.min(began.elapsed());
    }
    Ok((fastest, table, frames))
}

/// Nanoseconds a page that crosses the link, in the fastest of the passes in steady state.
#[expect(clippy::cast_precision_loss, reason = "times of a bench")]
fn streamed(file: &ModelFile, repeats: u64) -> Outcome<f64> {
    let options = PagerOptions { headroom_bytes: Some(0), ..PagerOptions::default() };
    let setup = Setup::on(&NullDevice::open(file.bytes() / 2, PAGE), file, options)?;
    for _ in 0..3 {
        pass(&setup.model, &setup.stream, &[])?;
    }
    let mut fastest = f64::INFINITY;
    for _ in 0..repeats {
        let began = Instant::now();
        let pass = pass(&setup.model, &setup.stream, &[])?;
        let pages = pass.copied_bytes.div_ceil(PAGE).max(1);
        fastest = fastest.min(began.elapsed().as_nanos() as f64 / pages as f64);
    }
    Ok(fastest)
}
