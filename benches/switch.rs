//! How many bytes does it cost to run models in turn on a card that cannot hold them all?
//!
//! Counted on a card without bytes. Models are activated one after the other, round and round, and each runs
//! some passes. A row's ratio is the bytes a switch from the third on over the best possible: Belady's rule
//! with bypass over `card - headroom - ring`, which knows all activations to come. `hint` says whether
//! the runner tells how many passes follow; without, the pager has only what it saw before.
//!
//! `cargo bench --bench switch -- [WORDS] [--check] [--json] [--headroom=default]`.

mod common;

use std::sync::Arc;

use common::Outcome;
use common::card::{hollow, pass};
use common::models::{ModelFile, uniform};
use common::optimum;
use common::table::{Args, Report, Row, gib};
use serde::Serialize;
use vram_pager::device::SharedDevice;
use vram_pager::pager::{ModelOptions, Pager, PagerOptions};

const GIB: u64 = 1 << 30;
const CARD: u64 = 4 * GIB;
/// Each model has this many units of one size.
const UNITS: usize = 32;

#[derive(Serialize)]
struct Switch {
    models: usize,
    /// A model over the card.
    size: f64,
    passes: u32,
    hint: bool,
    limit: Option<f64>,
    ratio: f64,
    /// A switch, from the third on.
    copied_bytes: u64,
    best_bytes: u64,
    ring_bytes: u64,
    /// Each switch from the first on.
    switches: Vec<u64>,
    device_syncs: u64,
    addresses_kept: bool,
}

impl Row for Switch {
    const COLUMNS: &'static [(&'static str, usize)] = &[
        ("models", 10),
        ("passes", 6),
        ("hint", 5),
        ("limit", 5),
        ("ratio", 6),
        ("copied GiB", 10),
        ("best GiB", 8),
        ("ring GiB", 8),
        ("syncs", 5),
        ("switches GiB", 60),
    ];

    fn cells(&self) -> Vec<String> {
        let shown = self.switches.iter().take(8).map(|&bytes| gib(bytes)).collect::<Vec<_>>();
        vec![
            format!("{} of {}", self.models, self.size),
            self.passes.to_string(),
            self.hint.to_string(),
            self.limit.map_or_else(|| "-".to_owned(), |limit| format!("{limit:.1}")),
            format!("{:.3}", self.ratio),
            gib(self.copied_bytes),
            gib(self.best_bytes),
            gib(self.ring_bytes),
            self.device_syncs.to_string(),
            shown.join(" "),
        ]
    }

    fn holds(&self) -> bool {
        self.limit.is_none_or(|limit| self.ratio <= limit) && self.device_syncs == 0 && self.addresses_kept
    }
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    for (models, size, limits) in
        [(2, 0.75, [Some(1.1), None, Some(1.1)]), (3, 0.5, [Some(1.1), None, Some(2.0)])]
    {
        for (passes, limit) in [1, 2, 20].into_iter().zip(limits) {
            for hint in [false, true] {
                if report.args().wants(&format!("{models} of {size} {passes} passes hint={hint}")) {
                    let row = row(report.args(), models, size, passes, hint, limit)?;
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
    reason = "sizes of models"
)]
fn row(args: &Args, count: usize, size: f64, passes: u32, hint: bool, limit: Option<f64>) -> Outcome<Switch> {
    let headroom_bytes = (args.value("--headroom") != Some("default")).then_some(0);
    let device: SharedDevice = hollow(CARD)?;
    let pager = Pager::new(&device, PagerOptions { headroom_bytes, ..PagerOptions::default() })?;
    let unit = (CARD as f64 * size) as u64 / UNITS as u64;
    let file = ModelFile::new(&uniform(UNITS, unit))?;
    let models = (0..count)
        .map(|_| pager.open_model(Arc::clone(&file.index), &ModelOptions::default()))
        .collect::<Result<Vec<_>, _>>()?;
    let stream = pager.stream()?;
    let addresses = || models.iter().map(|model| common::card::addresses(model)).collect::<Vec<_>>();
    let before = addresses();
    let rounds = if passes > 2 { 4 } else { 8 };
    let mut switches = Vec::new();
    let mut device_syncs = 0;
    let mut ring = 0;
    for _ in 0..rounds {
        for model in &models {
            model.activate(hint.then_some(passes))?;
            let mut copied = 0;
            for _ in 0..passes {
                let pass = pass(model, &stream, &[])?;
                copied += pass.copied_bytes;
                device_syncs += pass.device_syncs;
            }
            switches.push(copied);
            ring = ring.max(pager.figures().ring_bytes);
        }
    }
    let figures = pager.figures();
    let page = figures.page_bytes;
    let each = file.bytes().div_ceil(page);
    let room = (CARD - figures.headroom_bytes - ring) / page;
    // One round more than was run, so that the last switches have a future too.
    let uses: Vec<u64> = (0..(rounds + 1) * count as u64)
        .flat_map(|switch| {
            let first = switch % count as u64 * each;
            (0..passes).flat_map(move |_| first..first + each)
        })
        .collect();
    let missed = optimum::misses(&uses, usize::try_from(room)?);
    let a_switch = usize::try_from(each * u64::from(passes))?;
    let steady = 2..switches.len();
    let best: u64 =
        missed[steady.start * a_switch..steady.end * a_switch].iter().map(|&m| u64::from(m)).sum();
    let copied: u64 = switches[steady.clone()].iter().sum();
    let number = steady.len() as u64;
    Ok(Switch {
        models: count,
        size,
        passes,
        hint,
        limit,
        ratio: copied as f64 / (best * page) as f64,
        copied_bytes: copied / number,
        best_bytes: best * page / number,
        ring_bytes: ring,
        switches,
        device_syncs,
        addresses_kept: before == addresses(),
    })
}
