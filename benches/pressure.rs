//! Does the pager give way when others need the card, and come back when they no longer do?
//!
//! Counted on a card without bytes. Each row runs passes until they repeat, lets a quarter of the card be
//! taken (by another process, or by a spike of activations from the card's pool), runs three passes, lets
//! it be given back, and runs three more. The bytes of a pass must be back after one pass; while a quarter is
//! taken they may be no more than what is then missing, plus the ring and a page a unit.
//!
//! `cargo bench --bench pressure -- [WORDS] [--check] [--json]`.

mod common;

use std::sync::Arc;

use common::Outcome;
use common::card::{LINK, Setup, Spread, addresses, compute, hollow, pass};
use common::models::{Layout, ModelFile};
use common::table::{Args, Report, Row, gib};
use serde::Serialize;
use vram_pager::device::SharedDevice;
use vram_pager::pager::PagerOptions;

#[derive(Serialize)]
struct Pressure {
    who: &'static str,
    layout: &'static str,
    weights_per_card: f64,
    /// Copied a pass in the steady state before.
    before_bytes: u64,
    /// Copied by each pass while a quarter is taken.
    during_bytes: Vec<u64>,
    during_limit_bytes: u64,
    /// Copied by each pass after.
    after_bytes: Vec<u64>,
    /// Bytes that others held and the pager still used, at most.
    over_budget_bytes: u64,
    device_syncs: u64,
    addresses_kept: bool,
}

impl Row for Pressure {
    const COLUMNS: &'static [(&'static str, usize)] = &[
        ("who", 14),
        ("layout", 12),
        ("weights", 7),
        ("before GiB", 10),
        ("during GiB", 24),
        ("limit GiB", 9),
        ("after GiB", 24),
        ("over GiB", 8),
        ("syncs", 5),
    ];

    fn cells(&self) -> Vec<String> {
        let list = |bytes: &[u64]| bytes.iter().map(|&bytes| gib(bytes)).collect::<Vec<_>>().join(" ");
        vec![
            self.who.to_owned(),
            self.layout.to_owned(),
            format!("{}x", self.weights_per_card),
            gib(self.before_bytes),
            list(&self.during_bytes),
            gib(self.during_limit_bytes),
            list(&self.after_bytes),
            gib(self.over_budget_bytes),
            self.device_syncs.to_string(),
        ]
    }

    fn holds(&self) -> bool {
        // One percent is for pages that two units touch.
        self.after_bytes[1..].iter().all(|&bytes| bytes <= self.before_bytes + self.before_bytes / 100)
            && self.during_bytes[1..].iter().all(|&bytes| bytes <= self.during_limit_bytes)
            && self.over_budget_bytes == 0
            && self.device_syncs == 0
            && self.addresses_kept
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Process,
    Activations,
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Self::Process => "other process",
            Self::Activations => "activations",
        }
    }
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    for who in [Who::Process, Who::Activations] {
        for layout in [Layout::Medium, Layout::Flux, Layout::Llama] {
            let file = layout.file()?;
            for weights in [0.9, 1.25, 2.0] {
                if report.args().wants(&format!("{} {} {weights}x", who.name(), layout.name())) {
                    let row = row(who, layout, &file, weights)?;
                    report.add(row);
                }
            }
        }
    }
    report.end()
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes of cards"
)]
fn row(who: Who, layout: Layout, file: &ModelFile, weights_per_card: f64) -> Outcome<Pressure> {
    let card = (file.bytes() as f64 / weights_per_card) as u64;
    let device = hollow(card)?;
    let shared: SharedDevice = Arc::clone(&device) as _;
    let setup = Setup::on(&shared, file, PagerOptions::default())?;
    let card = setup.shared().info().total_bytes;
    let quarter = card / 4;
    let kept = addresses(&setup.model);
    // As much compute as the whole model takes over the link: the clock moves also where nothing is copied.
    let compute = compute(&setup.model, LINK.duration(file.bytes()), Spread::Even);
    let mut device_syncs = 0;
    let mut over = 0;
    let mut run = |count: usize, taken: u64| -> Outcome<Vec<u64>> {
        let mut copied = Vec::new();
        for _ in 0..count {
            let pass = pass(&setup.model, &setup.stream, &compute)?;
            device_syncs += pass.device_syncs;
            copied.push(pass.copied_bytes);
            let figures = setup.pager.figures();
            let used = figures.resident_bytes + figures.ring_bytes + figures.idle_bytes;
            over = over.max((used + taken + figures.headroom_bytes).saturating_sub(card));
        }
        Ok(copied)
    };
    let before = run(6, 0)?[4..].iter().copied().max().unwrap_or(0);
    let mut spike = None;
    match who {
        Who::Process => device.set_other_bytes(quarter),
        Who::Activations => spike = Some(setup.pager.allocate(&setup.stream, quarter)?),
    }
    let during = run(3, quarter)?;
    let figures = setup.pager.figures();
    let page = figures.page_bytes;
    let room = card - quarter - figures.headroom_bytes - figures.ring_bytes;
    let limit = file.bytes().saturating_sub(room) + file.units() as u64 * page;
    match who {
        Who::Process => device.set_other_bytes(0),
        Who::Activations => drop(spike),
    }
    let after = run(3, 0)?;
    Ok(Pressure {
        who: who.name(),
        layout: layout.name(),
        weights_per_card,
        before_bytes: before,
        during_bytes: during,
        during_limit_bytes: limit,
        after_bytes: after,
        over_budget_bytes: over,
        device_syncs,
        addresses_kept: kept == addresses(&setup.model),
    })
}
