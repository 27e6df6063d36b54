//! `vram-pager plan`: what a card would make of a model, without loading anything.
//!
//! What stays and what streams is the pager's own decision, taken as a pure function (`pager::forecast`).
//! The time of a pass comes from a rehearsal: the same passes as `run` makes, on an emulated card of the same
//! size that keeps no bytes. Only the file's header is read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::device::{self, DeviceKind, DeviceString, SharedDevice};
use vram_pager::pager::{
    ASSUMED_LINK, CardFacts, CardSizes, Forecast, ModelOptions, PagerOptions, card_sizes, forecast,
};
use vram_pager::staging::budget::this_machines_limit;
use vram_pager::units::{Rate, format_rate, format_size};
use vram_pager::weights::{TensorIndex, UnitId};

use crate::Outcome;
use crate::interrupt;
use crate::output::{self, Failure};
use crate::run::{self, CardOptions, RunOptions};

/// Passes of the rehearsal: the last two are steady, and their mean is told, since without compute one pass
/// may begin where the other left a copy under way.
const REHEARSED: u32 = 5;

/// The same without virtual memory calls, where some passes go by until the blocks that stay have settled in the pool.
const REHEARSED_WITH_BLOCKS: u32 = 9;

/// Names that are listed before the rest is counted.
const LISTED: usize = 4;

/// Say what a device would make of a model, without loading it
///
/// Only the file's header is read, and nothing is allocated on the device. Says what stays on the device,
/// what crosses the link in each pass, how long a pass takes on a modelled clock, and which sizes of card
/// would do. `run` with the same arguments and one thread does just that, if it has the device to itself;
/// --verify takes a little memory of its own.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    vram-pager plan model.safetensors --device emulated:8GiB,link=25GB/s\n  \
    vram-pager plan model.safetensors --device cuda:0 --compute-per-gib 30ms\n  \
    vram-pager plan model.safetensors.index.json --device emulated:24GiB --json | jq .streamed_bytes\n\n\
    The sizes of card are those of cards like this one with nobody else on them.\n\
    A real card's link is taken to have 25 GB/s unless the device string tells its rate: cuda:0,link=50GB/s.\n\
    `run` measures it.")]
pub(crate) struct Args {
    /// A .safetensors file, or the index of a sharded model
    #[arg(value_name = "FILE|INDEX.json")]
    file: PathBuf,

    #[command(flatten)]
    card: CardOptions,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    model: String,
    device: DeviceReport,
    weights_bytes: u64,
    units: usize,
    pages: u32,
    page_bytes: u64,
    headroom_bytes: u64,
    budget_bytes: u64,
    /// Whether every unit, or every piece of one, has room on the device.
    runs: bool,
    resident_bytes: u64,
    streamed_bytes: u64,
    ring_bytes: u64,
    largest_streamed_part_bytes: u64,
    kept_first: Vec<&'a str>,
    in_pieces: Vec<&'a str>,
    link_ms: f64,
    compute_ms: f64,
    /// A pass in steady state on the modelled clock; null if it does not run.
    pass_ms: Option<f64>,
    smallest_card_bytes: Option<u64>,
    resident_from_bytes: Option<u64>,
}

#[derive(Serialize)]
struct DeviceReport {
    kind: &'static str,
    name: String,
    total_bytes: u64,
    free_bytes: u64,
    link_bytes_per_second: u64,
    /// Whether the device did not tell it.
    link_assumed: bool,
}

/// Runs the subcommand `plan`.
pub(crate) fn run(args: &Args, json: bool) -> Outcome {
    let index = Arc::new(TensorIndex::open(&args.file)?);
    interrupt::check()?;
    let (device, facts) = look_at(&args.card.device)?;
    let options = PagerOptions {
        headroom_bytes: Some(run::headroom_for(facts.total_bytes, &args.card)?),
        page_locked_bytes: args.card.page_locked,
        ..PagerOptions::default()
    };
    let model = ModelOptions { compute_per_gib: args.card.compute_per_gib, ..ModelOptions::default() };
    let mut found = forecast(&index, &facts, &options, &model)?;
    interrupt::check()?;
    let headroom = |total| run::headroom_for(total, &args.card).unwrap_or(0);
    let sizes = card_sizes(&index, &facts, &options, &model, headroom)?;
    interrupt::check()?;
    let mut pass_ms = None;
    if found.runs() {
        let rehearsal = rehearse(&args.file, &index, &device, &facts, args, &found)?;
        // Without virtual memory calls how the card's pool can be cut decides, and only the pool knows. With compute
        // the pager learns in the first pass how much of it is each unit's, and may share pages out by it.
        if !facts.virtual_memory || args.card.compute_per_gib.is_some() {
            found.largest_streamed_part_bytes = rehearsal.largest_streamed_part_bytes;
            found.resident_bytes = rehearsal.resident_bytes;
            found.ring_bytes = rehearsal.ring_bytes;
            found.streamed_bytes = rehearsal.passes.last().map_or(0, |pass| pass.h2d_bytes);
        }
        pass_ms = rehearsal.passes.last_chunk().map(|[a, b]| f64::midpoint(a.modelled_ms, b.modelled_ms));
    }
    let report = report(args, &index, &device, &facts, &found, sizes, pass_ms);
    if json { output::print_json(&report) } else { print(&report, &index, &found) }
}

/// The device's figures. An emulated one is opened without its bytes, so that nothing is allocated.
fn look_at(text: &str) -> Result<(SharedDevice, CardFacts), Failure> {
    let refuse = |error: device::DeviceError| Failure::BadInput(error.to_string());
    let device = match text.parse().map_err(refuse)? {
        DeviceString::Emulated(options) => {
            EmulatedDevice::open(EmulatedOptions { keeps_bytes: false, ..options }).map_err(refuse)?
                as SharedDevice
        }
        _ => device::open(text).map_err(refuse)?,
    };
    let info = device.info();
    let facts = CardFacts {
        total_bytes: info.total_bytes,
        free_bytes: device.memory().map_err(refuse)?.free.min(info.total_bytes),
        granularity: info.granularity,
        virtual_memory: info.virtual_memory,
        link: info.link,
    };
    Ok((device, facts))
}

/// The passes of `run`, on a card of the same figures that keeps no bytes.
fn rehearse(
    file: &Path,
    index: &Arc<TensorIndex>,
    device: &SharedDevice,
    facts: &CardFacts,
    args: &Args,
    found: &Forecast,
) -> Result<run::Report, Failure> {
    let mut options = match args.card.device.parse() {
        Ok(DeviceString::Emulated(options)) => options,
        _ => EmulatedOptions::new(device.info().total_bytes),
    };
    options.page_bytes = facts.granularity;
    options.link = facts.link.unwrap_or(ASSUMED_LINK);
    options.virtual_memory = facts.virtual_memory;
    options.keeps_bytes = false;
    // What is streamed stays in page-locked memory, if that may be so large; a card without bytes would
    // charge the disk for it in every pass.
    let kept = args.card.page_locked.unwrap_or_else(this_machines_limit);
    if found.streamed_bytes.saturating_add(64 << 20) <= kept {
        options.disk = None;
    }
    let card = EmulatedDevice::open(options).map_err(|error| Failure::Failed(error.to_string()))?;
    card.set_other_bytes(facts.total_bytes - facts.free_bytes);
    let passes = if facts.virtual_memory { REHEARSED } else { REHEARSED_WITH_BLOCKS };
    let options = RunOptions::rehearsal(args.card.clone(), passes);
    run::passes(file, index, &(card as SharedDevice), &options)
}

fn report<'a>(
    args: &Args,
    index: &'a TensorIndex,
    device: &SharedDevice,
    facts: &CardFacts,
    found: &Forecast,
    sizes: CardSizes,
    pass_ms: Option<f64>,
) -> Report<'a> {
    let link = facts.link.unwrap_or(ASSUMED_LINK);
    let compute = args.card.compute_per_gib.map_or(0.0, |per_gib| per_gib.as_secs_f64() * 1e3);
    #[expect(clippy::cast_precision_loss, reason = "a share of a GiB, for a time in milliseconds")]
    let gib = found.weights_bytes as f64 / (1_u64 << 30) as f64;
    Report {
        model: args.file.display().to_string(),
        device: DeviceReport {
            kind: device.info().kind.as_str(),
            name: name_of(device),
            total_bytes: facts.total_bytes,
            free_bytes: facts.free_bytes,
            link_bytes_per_second: link.0,
            link_assumed: facts.link.is_none(),
        },
        weights_bytes: found.weights_bytes,
        units: index.units().len(),
        pages: found.pages,
        page_bytes: found.page_bytes,
        headroom_bytes: found.headroom_bytes,
        budget_bytes: found.budget_bytes,
        runs: found.runs(),
        resident_bytes: found.resident_bytes,
        streamed_bytes: found.streamed_bytes,
        ring_bytes: found.ring_bytes,
        largest_streamed_part_bytes: found.largest_streamed_part_bytes,
        kept_first: names(index, &found.kept_first),
        in_pieces: names(index, &found.in_pieces),
        link_ms: link.duration(found.streamed_bytes).as_secs_f64() * 1e3,
        compute_ms: compute * gib,
        pass_ms,
        smallest_card_bytes: sizes.smallest_bytes,
        resident_from_bytes: sizes.resident_from_bytes,
    }
}

/// The device's name as the user knows it: the emulated one is not meant to keep no bytes.
fn name_of(device: &SharedDevice) -> String {
    let name = &device.info().name;
    if device.info().kind == DeviceKind::Emulated { name.replace(",bytes=none", "") } else { name.clone() }
}

fn names<'a>(index: &'a TensorIndex, units: &[UnitId]) -> Vec<&'a str> {
    units.iter().map(|&unit| index.unit_info(unit).name.as_str()).collect()
}

/// A few names, and how many more there are.
fn listed(names: &[&str]) -> String {
    let shown: Vec<_> = names.iter().take(LISTED).map(|name| output::shorten(name, 60)).collect();
    match names.len().saturating_sub(LISTED) {
        0 => shown.join(", "),
        more => format!("{}, and {more} more", shown.join(", ")),
    }
}

fn print(report: &Report<'_>, index: &TensorIndex, found: &Forecast) -> Outcome {
    let per_cent = |bytes: u64| {
        #[expect(clippy::cast_precision_loss, reason = "shown without places")]
        let share = bytes.min(found.weights_bytes) as f64 / found.weights_bytes.max(1) as f64;
        format!("{:.0} %", share * 100.0)
    };
    let size_or = |bytes: Option<u64>| bytes.map_or_else(|| "no size that was tried".to_owned(), format_size);
    output::print(|out| {
        writeln!(
            out,
            "{}: {} in {}, {} of {}",
            output::printable(&report.model),
            format_size(report.weights_bytes),
            output::count(report.units, "unit"),
            output::count(report.pages as usize, "page"),
            format_size(report.page_bytes)
        )?;
        writeln!(
            out,
            "on {}: {} for the model, {} left free{}",
            report.device.name,
            format_size(report.budget_bytes),
            format_size(report.headroom_bytes),
            match report.device.total_bytes - report.device.free_bytes {
                0 => String::new(),
                others => format!(", {} held by others", format_size(others)),
            }
        )?;
        if let Some(large) = found.too_large {
            writeln!(
                out,
                "does not run:   unit {} needs {} at once",
                output::shorten(&index.unit_info(large.unit).name, 60),
                format_size(large.need_bytes)
            )?;
        } else {
            writeln!(
                out,
                "stays:          {} ({})",
                format_size(report.resident_bytes),
                per_cent(report.resident_bytes)
            )?;
            writeln!(
                out,
                "streams:        {} a pass ({}){}",
                format_size(report.streamed_bytes),
                per_cent(report.streamed_bytes),
                match report.ring_bytes {
                    0 => String::new(),
                    ring => format!(", through a ring of {}", format_size(ring)),
                }
            )?;
        }
        if !report.kept_first.is_empty() {
            writeln!(out, "kept first:     {}", listed(&report.kept_first))?;
        }
        if !report.in_pieces.is_empty() {
            writeln!(out, "in pieces:      {}", listed(&report.in_pieces))?;
        }
        if let Some(pass_ms) = report.pass_ms {
            writeln!(
                out,
                "a pass takes:   {pass_ms:.1} ms modelled; its link {:.1} ms at {}{}, its compute {}",
                report.link_ms,
                format_rate(Rate(report.device.link_bytes_per_second)),
                if report.device.link_assumed { " (assumed)" } else { "" },
                if report.compute_ms > 0.0 {
                    format!("{:.1} ms", report.compute_ms)
                } else {
                    "not counted (--compute-per-gib)".to_owned()
                }
            )?;
        }
        writeln!(out, "runs from:      a card of {}", size_or(report.smallest_card_bytes))?;
        writeln!(out, "no streaming:   from a card of {} on", size_or(report.resident_from_bytes))
    })
}
