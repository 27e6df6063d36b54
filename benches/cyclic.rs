//! How many bytes cross the link in a pass over a model that does not fit?
//!
//! Counted on a card without bytes. A row is a layout on a card that is smaller than it. Its limit is
//! `weights - (card - headroom - ring)` plus one page a unit, with a ring of at most three times the largest
//! streamed part. Beside it stands the best that any policy could do with the same ring, which is computed
//! (Belady's rule with bypass, over the pages), and the bytes without any ring.
//!
//! `cargo bench --bench cyclic -- [WORDS] [--check] [--json] [--headroom=default]`.

mod common;

use common::Outcome;
use common::card::{Setup, addresses, pass};
use common::models::{Layout, ModelFile};
use common::optimum;
use common::table::{Args, Report, Row, gib};
use serde::Serialize;
use vram_pager::pager::PagerOptions;

#[derive(Serialize)]
struct Cyclic {
    layout: &'static str,
    /// Weights over the card's size.
    weights_per_card: f64,
    card_bytes: u64,
    headroom_bytes: u64,
    weights_bytes: u64,
    units: usize,
    pages: u64,
    /// Copied in the worst of passes 3 to 6.
    copied_bytes: u64,
    /// The optimum over `card - headroom - ring`, in whole pages.
    best_bytes: u64,
    limit_bytes: u64,
    ring_bytes: u64,
    largest_part_bytes: u64,
    /// Of the budget, in no frame although the model does not fit.
    unused_bytes: u64,
    /// Copied in each pass from the first on.
    passes: Vec<u64>,
    map_calls: u64,
    device_syncs: u64,
    addresses_kept: bool,
}

impl Row for Cyclic {
    const COLUMNS: &'static [(&'static str, usize)] = &[
        ("layout", 12),
        ("weights", 7),
        ("card GiB", 8),
        ("copied GiB", 10),
        ("best GiB", 8),
        ("limit GiB", 9),
        ("no ring GiB", 11),
        ("copied/best", 11),
        ("ring GiB", 8),
        ("ring/part", 9),
        ("unused GiB", 10),
        ("maps", 5),
        ("syncs", 5),
    ];

    #[expect(clippy::cast_precision_loss, reason = "shown with three places")]
    fn cells(&self) -> Vec<String> {
        vec![
            self.layout.to_owned(),
            format!("{}x", self.weights_per_card),
            gib(self.card_bytes),
            gib(self.copied_bytes),
            gib(self.best_bytes),
            gib(self.limit_bytes),
            gib(self.weights_bytes.saturating_sub(self.card_bytes - self.headroom_bytes)),
            format!("{:.3}", self.copied_bytes as f64 / self.best_bytes.max(1) as f64),
            gib(self.ring_bytes),
            format!("{:.2}", self.ring_bytes as f64 / self.largest_part_bytes.max(1) as f64),
            gib(self.unused_bytes),
            self.map_calls.to_string(),
            self.device_syncs.to_string(),
        ]
    }

    fn holds(&self) -> bool {
        self.copied_bytes <= self.limit_bytes
            && self.ring_bytes <= 3 * self.largest_part_bytes
            && self.map_calls == 0
            && self.device_syncs == 0
            && self.addresses_kept
    }
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    for layout in [Layout::Small, Layout::Medium, Layout::Large, Layout::Flux, Layout::Llama] {
        let file = layout.file()?;
        for weights in [1.05, 1.25, 2.0, 4.0] {
            if report.args().wants(&format!("{} {weights}x", layout.name())) {
                let row = row(report.args(), layout, &file, weights)?;
                report.add(row);
            }
        }
    }
    if report.args().wants("one unit") {
        let row = one_unit()?;
        report.add(row);
    }
    report.end()
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes of cards"
)]
fn row(args: &Args, layout: Layout, file: &ModelFile, weights_per_card: f64) -> Outcome<Cyclic> {
    let headroom_bytes = (args.value("--headroom") != Some("default")).then_some(0);
    let options = PagerOptions { headroom_bytes, ..PagerOptions::default() };
    let card = (file.bytes() as f64 / weights_per_card) as u64;
    measure(layout.name(), weights_per_card, file, card, options)
}

/// A unit of 2.2 GiB on an empty card of 4 GiB must become resident: its second pass copies nothing.
fn one_unit() -> Outcome<Cyclic> {
    const GIB: u64 = 1 << 30;
    let bytes = (GIB * 11 / 5).next_multiple_of(2048);
    let file = ModelFile::new(&common::models::uniform(1, bytes))?;
    measure("one unit", 0.55, &file, 4 * GIB, PagerOptions::default())
}

fn measure(
    layout: &'static str,
    weights_per_card: f64,
    file: &ModelFile,
    card: u64,
    options: PagerOptions,
) -> Outcome<Cyclic> {
    let setup = Setup::hollow(file, card, options)?;
    let before = addresses(&setup.model);
    let mut passes = Vec::new();
    for _ in 0..6 {
        passes.push(pass(&setup.model, &setup.stream, &[])?);
    }
    let steady = &passes[2..];
    let figures = setup.pager.figures();
    let card = setup.shared().info().total_bytes;
    let page = figures.page_bytes;
    let room = card - figures.headroom_bytes - figures.ring_bytes;
    let pages = u64::from(setup.model.figures().pages);
    Ok(Cyclic {
        layout,
        weights_per_card,
        card_bytes: card,
        headroom_bytes: figures.headroom_bytes,
        weights_bytes: file.bytes(),
        units: file.units(),
        pages,
        copied_bytes: steady.iter().map(|pass| pass.copied_bytes).max().unwrap_or(0),
        best_bytes: optimum::cyclic(file.bytes().div_ceil(page), room / page, 4) * page,
        limit_bytes: file.bytes().saturating_sub(room) + file.units() as u64 * page,
        ring_bytes: figures.ring_bytes,
        unused_bytes: if file.bytes() > room {
            figures.budget_bytes - figures.resident_bytes - figures.ring_bytes
        } else {
            0
        },
        passes: passes.iter().map(|pass| pass.copied_bytes).collect(),
        largest_part_bytes: setup.model.figures().largest_streamed_part_bytes,
        map_calls: steady.iter().map(|pass| pass.map_calls).sum(),
        device_syncs: steady.iter().map(|pass| pass.device_syncs).sum(),
        addresses_kept: before == addresses(&setup.model),
    })
}
