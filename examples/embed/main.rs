//! Sentence embeddings from a card that the model does not fit on.
//!
//! ```text
//! tests/fetch-models.sh
//! cargo run --release --example embed -- "That is a happy person"
//! cargo run --release --example embed -- --mode resident --device emulated:40MiB
//! ```
//!
//! Exit codes: 0 done, 1 failed, 2 bad usage or bad input. With `--json` standard output carries one object
//! and nothing else.

#![deny(unsafe_code)]

mod runner;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use serde::Serialize;
use vram_pager::device;
use vram_pager::manager::{LoadOptions, Manager};
use vram_pager::pager::{Pager, PagerOptions};
use vram_pager::patcher::{Lora, LoraFile, PatcherCounters, ResidentOptions};
use vram_pager::units::{format_size, parse_size};

use runner::{Bert, Compute, FETCH, ModelFolder, RunnerError, Tokens};

/// Where the weights are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Mode {
    /// Paged: what is asked for is faulted, page by page
    Paged,
    /// Resident: modules are loaded as far as there is room, the others streamed
    Resident,
}

/// Embeds a sentence with all-MiniLM-L6-v2, whose weights need not fit the card.
#[derive(Parser)]
#[command(name = "embed", after_help = format!(
    "The model is fetched by {FETCH}. Exit codes: 0 done, 1 failed, 2 bad usage or bad input.\n\
     Sizes are written 24MiB, 1.5GiB, 64KB or 4096."
))]
struct Args {
    /// The sentence
    #[arg(default_value = "That is a happy person")]
    sentence: String,

    /// The folder with model.safetensors, config.json and tokenizer.json
    #[arg(long, value_name = "DIR", default_value = "tests/models/all-MiniLM-L6-v2")]
    model: PathBuf,

    /// The card
    #[arg(long, default_value = "emulated:24MiB,page=2MiB")]
    device: String,

    /// Where the weights are
    #[arg(long, value_enum, default_value_t = Mode::Paged)]
    mode: Mode,

    /// A LoRA to apply; several are applied in order
    #[arg(long, value_name = "FILE")]
    lora: Vec<PathBuf>,

    /// How strongly the LoRAs are applied
    #[arg(long, value_name = "S", default_value_t = 1.0, allow_negative_numbers = true)]
    strength: f32,

    /// Write the LoRAs into resident weights, with backups
    #[arg(long)]
    bake: bool,

    /// How often to compute the embedding; later passes find part of the weights on the card
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    passes: u32,

    /// Host memory that may be page-locked [default: a share of the machine's]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    page_locked: Option<u64>,

    /// Print one JSON object on standard output and nothing else
    #[arg(long)]
    json: bool,
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| error.to_string())
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    model: String,
    device: String,
    sentence: String,
    ids: Vec<u32>,
    mode: String,
    weights_bytes: u64,
    resident_bytes: u64,
    ring_bytes: u64,
    passes: Vec<Pass>,
    embedding: Vec<f32>,
}

#[derive(Serialize)]
struct Pass {
    #[serde(rename = "pass")]
    number: u32,
    h2d_bytes: u64,
    hits: u64,
    misses: u64,
    wall_ms: f64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = run(&args).map_err(|error| (error.to_string(), if error.is_bad_input() { 2 } else { 1 }));
    match outcome.and_then(|report| print(&report, args.json).map_err(|error| (error.to_string(), 1))) {
        Ok(()) => ExitCode::SUCCESS,
        Err((text, code)) => {
            // If standard error is closed there is nobody left to tell.
            let _ = writeln!(io::stderr(), "error: {text}");
            ExitCode::from(code)
        }
    }
}

fn run(args: &Args) -> Result<Report, RunnerError> {
    let folder = ModelFolder::new(&args.model);
    let ids = Tokens::open(&folder)?.ids(&args.sentence)?;
    let card = device::open(&args.device)?;
    let options = PagerOptions { page_locked_bytes: args.page_locked, ..PagerOptions::default() };
    let pager = Pager::new(&card, options)?;
    let compute = Compute::new(&card)?;
    let mut bert = match args.mode {
        Mode::Paged => Bert::open(&pager, &folder)?,
        Mode::Resident => {
            let options =
                ResidentOptions { page_locked_bytes: args.page_locked, ..ResidentOptions::default() };
            Bert::open_resident(&pager, &folder, &options)?
        }
    };
    let files = args.lora.iter().map(LoraFile::open).collect::<Result<Vec<_>, _>>()?;
    let loras: Vec<Lora<'_>> = files.iter().map(|file| Lora { file, strength: args.strength }).collect();
    if !loras.is_empty() {
        bert = bert.with_loras(&loras)?;
    }
    let manager = Manager::new(std::slice::from_ref(&card));
    // The defaults are for cards of gigabytes; this one may have a few mebibytes.
    manager.set_knobs(|knobs| {
        knobs.inference_floor = knobs.inference_floor.min(card.info().total_bytes / 16);
        knobs.reserve = knobs.reserve.min(card.info().total_bytes / 32);
    });
    let patcher = bert.weights().patcher();
    let options = LoadOptions { force_patch_weights: args.bake, ..LoadOptions::default() };
    manager.load_model_gpu(&patcher, options)?;
    if let Some(model) = bert.weights().paged() {
        model.activate(Some(args.passes))?;
    }
    let stream = pager.stream()?;
    let mut passes = Vec::new();
    let mut embedding = Vec::new();
    for pass in 1..=args.passes {
        let (before, began) = (patcher.counters(), Instant::now());
        embedding = bert.embed(&compute, &stream, &ids)?;
        passes.push(Pass::between(pass, before, patcher.counters(), began));
    }
    Ok(Report {
        model: patcher.label(),
        device: card.info().name.clone(),
        sentence: args.sentence.clone(),
        ids,
        mode: format!("{:?}", args.mode).to_lowercase(),
        weights_bytes: patcher.model_size(),
        resident_bytes: patcher.loaded_size(),
        ring_bytes: pager.figures().ring_bytes,
        passes,
        embedding,
    })
}

impl Pass {
    fn between(pass: u32, before: PatcherCounters, after: PatcherCounters, began: Instant) -> Self {
        Self {
            number: pass,
            h2d_bytes: after.bytes_to_device - before.bytes_to_device,
            hits: after.hits - before.hits,
            misses: after.misses - before.misses,
            wall_ms: began.elapsed().as_secs_f64() * 1e3,
        }
    }
}

/// Prints the embedding on standard output, and what the passes took on standard error.
fn print(report: &Report, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let text = if json {
        serde_json::to_string(report)?
    } else {
        for pass in &report.passes {
            writeln!(
                io::stderr(),
                "pass {}: {} of {} copied to {}, {} faults found their weights there, {:.0} ms",
                pass.number,
                format_size(pass.h2d_bytes),
                format_size(report.weights_bytes),
                report.device,
                pass.hits,
                pass.wall_ms
            )?;
        }
        report.embedding.iter().map(|number| format!("{number:.6}")).collect::<Vec<_>>().join(" ")
    };
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        // Whoever read it has enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Keeps the argument definitions honest in every build of the tests.
#[cfg(test)]
#[test]
fn the_arguments_are_well_formed() {
    use clap::CommandFactory;
    Args::command().debug_assert();
}
