//! Sentence embeddings from a card that the model does not fit on.
//!
//! ```text
//! tests/fetch-models.sh
//! cargo run --release --example embed -- "That is a happy person"
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

use clap::Parser;
use serde::Serialize;
use vram_pager::device;
use vram_pager::pager::{Pager, PagerOptions};
use vram_pager::units::{format_size, parse_size};

use runner::{Bert, Compute, FETCH, ModelFolder, RunnerError, Tokens};

/// Embeds a sentence with all-MiniLM-L6-v2, whose weights are paged to a card.
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
    file_bytes: u64,
    hits: u64,
    loaded: u64,
    streamed: u64,
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
    let bert = Bert::open(&pager, &folder)?;
    bert.model().activate(Some(args.passes))?;
    let stream = pager.stream()?;
    let mut passes = Vec::new();
    let mut embedding = Vec::new();
    for pass in 1..=args.passes {
        let (before, began) = (bert.model().counts(), Instant::now());
        embedding = bert.embed(&compute, &stream, &ids)?;
        let (after, wall_ms) = (bert.model().counts(), began.elapsed().as_secs_f64() * 1e3);
        passes.push(Pass {
            number: pass,
            h2d_bytes: after.copied_bytes - before.copied_bytes,
            file_bytes: after.file_bytes - before.file_bytes,
            hits: after.hits - before.hits,
            loaded: after.loaded - before.loaded,
            streamed: after.streamed - before.streamed,
            wall_ms,
        });
    }
    Ok(Report {
        model: bert.model().name().to_owned(),
        device: card.info().name.clone(),
        sentence: args.sentence.clone(),
        ids,
        weights_bytes: bert.model().figures().weights_bytes,
        resident_bytes: pager.figures().resident_bytes,
        ring_bytes: pager.figures().ring_bytes,
        passes,
        embedding,
    })
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
