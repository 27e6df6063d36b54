//! Does a miss cost the same a page in a large table as in a small one?
//!
//! Models of 100 to 500,000 pages of 2 MiB, in units of 24 pages (FLUX.1-dev has 24 a unit, Llama-3-8B 26, T5-XXL
//! 21), on a card whose calls do nothing, so that what is timed is the pager's own cost. Two kinds of miss:
//!
//! - `cold`: the model comes in, every page is mapped, frames are reused.
//! - `streamed`: a pass in steady state of which half stays, per page that crosses the link. The ring has two
//!   streamed parts beside that half at every size, so that what differs is the table and not the plan: left to
//!   itself the pager keeps whole units of a model of five, and streams the rest in longer runs.
//!
//! Times are of the thread's own processor time, so that a machine which is busy with other work does not
//! count for much. Sizes take turns, each is timed in slices of about a hundred pages, and the median of its
//! slices is what is shown: the fastest pass of a small model meets a quiet moment that a long one never has.
//!
//! The limit is 1.5 times the cost at 100 pages, and 32 bytes of table a page. The table is all that opening
//! the model takes from the heap: pages, order, spans, words, tensors; `B/page` is that at the size of card that
//! takes more. `B/frame` is what the accounts of the card's frames take, which are there once for all models.
//!
//! `cargo bench --bench table_scale -- [PAGES] [--check] [--json] [--rounds=5] [--unit-pages=24]`.

#![expect(unsafe_code, reason = "asks the system for the thread's processor time")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Outcome;
use common::alloc::{Counting, live_bytes};
use common::card::{Setup, pass};
use common::models::{ModelFile, uniform};
use common::null::NullDevice;
use common::table::{Args, Report, Row};
use serde::Serialize;
use vram_pager::device::SharedDevice;
use vram_pager::pager::{ModelOptions, PagedModel, Pager, PagerOptions, PagerStream, RingSize};
use vram_pager::weights::UnitId;

#[global_allocator]
static HEAP: Counting = Counting;

const PAGE: u64 = 2 << 20;
/// Pages of a slice.
const SLICE: u64 = 100;
const SIZES: [u64; 5] = [100, 1_000, 10_000, 100_000, 500_000];

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
        // What a model takes whatever its size is most of a small table.
        self.cold_growth <= 1.5
            && self.streamed_growth <= 1.5
            && (self.pages < 10_000 || self.table_bytes <= 32.0)
    }
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    let rounds = report.args().value("--rounds").map_or(Ok(5), str::parse::<u32>)?;
    let unit_pages = report.args().value("--unit-pages").map_or(Ok(24), str::parse::<u64>)?;
    let wanted = |pages: &u64| *pages == SIZES[0] || report.args().wants(&pages.to_string());
    let mut cases = Vec::new();
    for pages in SIZES.into_iter().filter(wanted) {
        cases.push(Case::new(pages, unit_pages)?);
    }
    for _ in 0..rounds {
        for case in &mut cases {
            // Of the small ones many, so that they take about as long.
            for _ in 0..(200_000 / case.pages).clamp(1, 400) {
                case.cold()?;
                case.streamed()?;
            }
        }
    }
    for case in &mut cases {
        case.row.cold = median(&mut case.cold);
        case.row.streamed = median(&mut case.streamed);
    }
    let (cold, streamed) = (cases[0].row.cold, cases[0].row.streamed);
    for mut case in cases {
        case.row.cold_growth = case.row.cold / cold;
        case.row.streamed_growth = case.row.streamed / streamed;
        report.add(case.row);
    }
    report.end()
}

/// A model of one size, on a card that holds it and on one that holds half.
struct Case {
    pages: u64,
    file: ModelFile,
    whole: Arc<Pager>,
    half: Setup,
    /// Nanoseconds a page of each slice.
    cold: Vec<f64>,
    streamed: Vec<f64>,
    row: Scale,
}

impl Case {
    #[expect(clippy::cast_precision_loss, reason = "shown with one place")]
    fn new(pages: u64, unit_pages: u64) -> Outcome<Self> {
        let units = pages.div_ceil(unit_pages);
        let file = ModelFile::new(&uniform(usize::try_from(units)?, unit_pages * PAGE))?;
        let pages = units * unit_pages;
        let options = PagerOptions { headroom_bytes: Some(0), ..PagerOptions::default() };
        let whole = Setup::on(&card(pages + 16), &file, options.clone())?;
        let before = live_bytes();
        pass(&whole.model, &whole.stream, &[])?;
        let frames = live_bytes().saturating_sub(before);
        let whole = whole.pager;

        let ring = 2 * (u32::try_from(unit_pages)? / 2 + 1);
        let device = card(pages / 2 + u64::from(ring));
        let half = Pager::new(&device, PagerOptions { ring: RingSize::Pages(ring), ..options })?;
        let before = live_bytes();
        let model = open(&half, &file)?;
        let table = live_bytes().saturating_sub(before);
        let before = live_bytes();
        let other = open(&whole, &file)?;
        let table = table.max(live_bytes().saturating_sub(before));
        drop(other);
        let half = Setup { stream: half.stream()?, pager: half, model };
        for _ in 0..3 {
            pass(&half.model, &half.stream, &[])?;
        }
        let per_page = |bytes: u64| bytes as f64 / pages as f64;
        let row = Scale {
            pages,
            cold: f64::NAN,
            streamed: f64::NAN,
            cold_growth: 1.0,
            streamed_growth: 1.0,
            table_bytes: per_page(table),
            frame_bytes: per_page(frames),
        };
        Ok(Self { pages, file, whole, half, cold: Vec::new(), streamed: Vec::new(), row })
    }

    /// The whole model comes in, to frames that are there.
    fn cold(&mut self) -> Outcome {
        let model = open(&self.whole, &self.file)?;
        let stream = self.whole.stream()?;
        slices(&model, &stream, &mut self.cold)
    }

    /// A pass in steady state; its time is of the pages that cross the link.
    fn streamed(&mut self) -> Outcome {
        slices(&self.half.model, &self.half.stream, &mut self.streamed)
    }
}

fn card(pages: u64) -> SharedDevice {
    NullDevice::open(pages * PAGE, PAGE)
}

/// Units are not cut, so that all sizes of model have the same.
fn open(pager: &Arc<Pager>, file: &ModelFile) -> Outcome<Arc<PagedModel>> {
    let options = ModelOptions { piece_bytes: Some(u64::MAX), ..ModelOptions::default() };
    Ok(pager.open_model(Arc::clone(&file.index), &options)?)
}

/// A pass; each slice of about a hundred pages of the model gives its nanoseconds a page that was copied.
#[expect(clippy::cast_precision_loss, reason = "times of a bench")]
fn slices(model: &PagedModel, stream: &PagerStream, times: &mut Vec<f64>) -> Outcome {
    let device = model.pager().device();
    let units = model.layout().units();
    let (mut began, mut copied, mut pages) = (processor_time(), device.counts().bytes_to_device, 0);
    for (number, unit) in (0..).zip(units) {
        model.fault(UnitId(number), stream)?.release();
        pages += (unit.bytes.end - unit.bytes.start) / PAGE;
        if pages >= SLICE {
            let (now, bytes) = (processor_time(), device.counts().bytes_to_device);
            let came = (bytes - copied).div_ceil(PAGE).max(1);
            times.push(now.saturating_sub(began).as_nanos() as f64 / came as f64);
            (began, copied, pages) = (processor_time(), bytes, 0);
        }
    }
    Ok(())
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// What the calling thread has had of the processor so far.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to the value that it is given, which outlives it.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
