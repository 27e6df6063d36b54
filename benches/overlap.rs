//! Does a pass take the longer of its compute and its missing bytes over the link, and nothing else?
//!
//! Modelled: a card without bytes and the device's clock, so the numbers are the same on every machine.
//! A row is a layout on a card that is smaller than it; its ratio is the slowest of passes 3 to 6 over
//! `max(compute, (weights - (card - headroom)) / link)`. Beside it stands the least that any pager could take with
//! this compute, see [`least`]. A row that is over its limit, but no more than 0.1 % over such a least that is over it
//! too, is marked; it counts as over all the same.
//!
//! `cargo bench --bench overlap -- [WORDS] [--check] [--json] [--headroom=default] [--ring=PARTS]
//! [--log] [--seed=7] [--told=RATE]`; a word selects rows (`FLUX`, `2x`, `even`), the seed is that of uneven compute.
//! With `--told` the card tells the pager another rate of its link than it has, 25 GB/s, or none with `--told=none`.

mod common;
#[path = "../tests/wrapped/mod.rs"]
mod wrapped;

use std::time::Duration;

use common::Outcome;
use common::card::{LINK, SEED, Setup, Spread, addresses, compute_by, hollow, pass};
use common::models::{Layout, ModelFile};
use common::table::{Args, Report, Row};
use serde::Serialize;
use vram_pager::device::SharedDevice;
use vram_pager::pager::{PagedModel, PagerOptions, RingSize};
use vram_pager::units::parse_rate;
use wrapped::Wrapped;

#[derive(Serialize)]
struct Overlap {
    layout: &'static str,
    /// Weights over the card's size.
    weights_per_card: f64,
    /// Compute over the time of the missing bytes.
    compute_per_link: f64,
    spread: &'static str,
    limit: f64,
    ratio: f64,
    /// No residency without mapping calls can take less, over the same bound.
    least: f64,
    passes: Vec<f64>,
    pass_ms: f64,
    bound_ms: f64,
    copied_bytes: u64,
    missing_bytes: u64,
    ring_bytes: u64,
    /// Bytes of pages that no tensor uses.
    padding_bytes: u64,
    largest_part_bytes: u64,
    map_calls: u64,
    addresses_kept: bool,
}

impl Row for Overlap {
    const COLUMNS: &'static [(&'static str, usize)] = &[
        ("layout", 12),
        ("weights", 7),
        ("compute", 7),
        ("spread", 6),
        ("limit", 5),
        ("ratio", 6),
        ("least", 6),
        ("pass ms", 8),
        ("bound ms", 8),
        ("copied/missing", 14),
        ("ring/part", 9),
        ("padding/missing", 15),
        ("maps", 5),
        ("passes 1-6", 42),
    ];

    #[expect(clippy::cast_precision_loss, reason = "shown with three places")]
    fn cells(&self) -> Vec<String> {
        vec![
            self.layout.to_owned(),
            format!("{}x", self.weights_per_card),
            format!("{}", self.compute_per_link),
            self.spread.to_owned(),
            format!("{:.2}", self.limit),
            format!("{:.3}", self.ratio),
            format!("{:.3}", self.least),
            format!("{:.1}", self.pass_ms),
            format!("{:.1}", self.bound_ms),
            format!("{:.3}", self.copied_bytes as f64 / self.missing_bytes as f64),
            format!("{:.2}", self.ring_bytes as f64 / self.largest_part_bytes.max(1) as f64),
            format!("{:.3}", self.padding_bytes as f64 / self.missing_bytes as f64),
            self.map_calls.to_string(),
            self.passes.iter().map(|ratio| format!("{ratio:6.3}")).collect::<Vec<_>>().join(" "),
        ]
    }

    fn holds(&self) -> bool {
        self.ratio <= self.limit && self.addresses_kept
    }

    fn is_least(&self) -> bool {
        self.least > self.limit && self.ratio <= 1.001 * self.least && self.addresses_kept
    }
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    let layouts = [
        (Layout::Flux, 1.06),
        (Layout::Sdxl, 1.06),
        (Layout::Mixtral, 1.06),
        (Layout::T5, 1.08),
        (Layout::Medium, 1.08),
        (Layout::Llama, 1.15),
        (Layout::Large, 1.20),
    ];
    // The logarithmic spread is shown on request: no limit was set for it.
    let spreads: &[Spread] =
        if report.args().has("--log") { &[Spread::Logarithmic] } else { &[Spread::Even, Spread::Uneven] };
    for (layout, limit) in layouts {
        let mut file = None;
        for weights in [1.05, 1.25, 2.0, 4.0] {
            for ratio in [0.25, 1.0, 4.0] {
                for &spread in spreads {
                    let name = format!("{} {weights}x c{ratio} {}", layout.name(), spread.name());
                    if !report.args().wants(&name) {
                        continue;
                    }
                    let file = match &file {
                        Some(file) => file,
                        None => file.insert(layout.file()?),
                    };
                    // Where compute and link differ by a factor there is room to hide in.
                    let limit = match ((ratio - 1.0_f64).abs() < 0.01, layout) {
                        (true, _) => limit,
                        (false, Layout::Large) => 1.15,
                        (false, _) => 1.05,
                    };
                    let row = row(report.args(), layout, file, weights, ratio, spread, limit)?;
                    report.add(row);
                }
            }
        }
    }
    report.end()
}

/// What passes cannot be shorter than on average, where units are released one after the other, a unit computes when
/// all of its pages are on the card, and `link` is the time of the missing bytes. It holds whatever is kept when.
///
/// Of `P` pages on `F` frames let a page be kept that stays from one use to its next one, a pass later. Each keeping
/// covers every moment of a pass once, so there are as many at any moment, on average over passes: `K`. A pass copies
/// what is not kept, `P - K`, which is `link` and the `R = F - K` frames that keep nothing.
///
/// From where one unit begins to compute to where a later one ends, what is copied is still in one of those `R`
/// frames in the end, or was used by a unit between the two, which is at most all that they have: neither unit gives
/// its frames back in that time. For the rest of it the link stands still. More of such frames shorten that by as
/// much as they add to the copies. If their number differs from pass to pass the mean of what it leaves is no less.
fn least(model: &PagedModel, compute: &[Duration], link: Duration) -> Duration {
    let copies: Vec<Duration> =
        model.layout().units().map(|unit| LINK.duration(unit.bytes.end - unit.bytes.start)).collect();
    let units = copies.len();
    let mut still = Duration::ZERO;
    for first in 0..units {
        let (mut computes, mut between) = (compute[first], Duration::ZERO);
        for later in (first + 1..first + units).map(|unit| unit % units) {
            computes += compute[later];
            still = still.max(computes.saturating_sub(between));
            between += copies[later];
        }
    }
    link + still
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes of cards"
)]
fn row(
    args: &Args,
    layout: Layout,
    file: &ModelFile,
    weights_per_card: f64,
    compute_per_link: f64,
    spread: Spread,
    limit: f64,
) -> Outcome<Overlap> {
    let weights = file.bytes();
    let card = (weights as f64 / weights_per_card) as u64;
    let headroom_bytes = (args.value("--headroom") != Some("default")).then_some(0);
    let mut options = PagerOptions { headroom_bytes, ..PagerOptions::default() };
    if let Some(parts) = args.value("--ring") {
        options.ring = RingSize::Quarters((parts.parse::<f64>()? * 4.0) as u32);
    }
    let mut device: SharedDevice = hollow(card)?;
    if let Some(told) = args.value("--told") {
        let told = if told == "none" { None } else { Some(parse_rate(told)?) };
        device = Wrapped::telling(&device, told, Box::new(|_| Ok(())));
    }
    let setup = Setup::on(&device, file, options)?;
    let figures = setup.pager.figures();
    let missing = weights - (setup.shared().info().total_bytes - figures.headroom_bytes);
    let link = LINK.duration(missing);
    let total = link.mul_f64(compute_per_link);
    let seed = args.value("--seed").map_or(Ok(SEED), str::parse::<u64>)?;
    let compute = compute_by(seed, &setup.model, total, spread);
    if args.value("--hint") != Some("none") {
        // What the runner knows: the compute of a pass, not how it is spread.
        let per_gib = total.mul_f64((1_u64 << 30) as f64 / weights as f64);
        setup.model.set_compute_per_gib(Some(per_gib))?;
    }
    let bound = total.max(link);
    let before = addresses(&setup.model);
    let mut passes = Vec::new();
    for _ in 0..6 {
        passes.push(pass(&setup.model, &setup.stream, &compute)?);
    }
    let steady = &passes[2..];
    let slowest = steady.iter().map(|pass| pass.time).max().unwrap_or(Duration::ZERO);
    let over = |time: Duration| time.as_secs_f64() / bound.as_secs_f64();
    Ok(Overlap {
        layout: layout.name(),
        weights_per_card,
        compute_per_link,
        spread: spread.name(),
        limit,
        ratio: over(slowest),
        least: over(least(&setup.model, &compute, link)).max(1.0),
        passes: passes.iter().map(|pass| over(pass.time)).collect(),
        pass_ms: slowest.as_secs_f64() * 1e3,
        bound_ms: bound.as_secs_f64() * 1e3,
        copied_bytes: steady.iter().map(|pass| pass.copied_bytes).max().unwrap_or(0),
        missing_bytes: missing,
        ring_bytes: setup.pager.figures().ring_bytes,
        padding_bytes: u64::from(setup.model.figures().pages) * figures.page_bytes - weights,
        largest_part_bytes: setup.model.figures().largest_streamed_part_bytes,
        map_calls: steady.iter().map(|pass| pass.map_calls).sum(),
        addresses_kept: before == addresses(&setup.model),
    })
}
