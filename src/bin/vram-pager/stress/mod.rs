//! `vram-pager stress`: everything at once on a small card, with every byte checked.
//!
//! | file | what it does |
//! |---|---|
//! | `files` | the models, and what their bytes should be |
//! | `card` | the card, and what is done to it behind the pager's back |
//! | `world` | a round: opened, ended, proven to leave nothing |
//! | `runner`, `manage` | what a thread does |
//! | `resident` | a model that is kept by modules, beside the paged ones |
//! | `check` | guards checked by the kernel, many at a time |
//! | `judge` | which errors are expected |
//! | `numbers` | the seeded numbers |
//! | `turns` | operations of several threads one at a time, in an order that the seed decides |
//!
//! A run is a sequence of rounds. Round `n` of a run is the first round of a run with the seed `n` further
//! on, so that one that fails is repeated alone.

mod card;
mod check;
mod files;
mod judge;
mod manage;
mod numbers;
mod resident;
mod runner;
mod turns;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use vram_pager::device;
use vram_pager::units::format_size;

use self::files::{Kind, Sizes};
use self::runner::Runner;
use self::turns::Turns;
use self::world::{Counts, Setup, World};
use crate::Outcome;
use crate::interrupt;
use crate::output::{self, Failure};

/// Operations of each thread in one round, unless they are given.
const ROUND: u64 = 6000;

/// Pages of a card whose size is not given.
const CARD_PAGES: u64 = 256;

/// The page of an emulated card whose size is not given.
const PAGE: u64 = 4096;

/// The most bytes that the models' files may have together.
const MOST_FILES: u64 = 8 << 30;

/// How long a run may stand still before it is ended as one that hangs.
const HANGS: Duration = Duration::from_secs(90);

/// Do everything at once to a small card, and check every byte
///
/// Several models, larger together than the card, are faulted by several threads: units, pieces and rows,
/// with patches that change, guards that are held across other faults, activations, loads and unloads
/// through the manager, models opened and dropped, another process that takes memory, device calls that
/// fail, work that completes late. What each guard gives is read by the checksum kernel on the card and
/// compared with the file. In the end everything is dropped, and nothing may be left.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    vram-pager stress --seconds 60 --threads 4 --models 4\n  \
    vram-pager stress --device emulated:2MiB,page=4KiB,vmm=none --oversubscription 8\n  \
    vram-pager stress --device cuda:0 --seconds 10 --json\n  \
    vram-pager stress --in-turns --operations 2000 --threads 4 --seed 7 --json\n\n\
    A device without a size (`emulated`, `cuda:0`) is made 256 pages large. The models are made to fit the\n\
    oversubscription, in the folder for temporary files, and removed at the end.\n\n\
    A run goes in rounds. When one fails, the command that repeats it is printed. With one thread on an\n\
    emulated card the operations and faults are the same again (nothing is copied ahead then, since that goes\n\
    by how fast files are read), but page-locking goes on beside them, so an injected failure may meet another\n\
    call; with several, each thread does the same again, but how they meet is the machine's affair. With\n\
    `--in-turns` they meet in the same order each time. It finds less, since they never fault at the same moment,\n\
    and what it finds comes again.\n\n\
    Device calls are made to fail on emulated cards and behind this project's driver stand-in. On a real\n\
    card nothing is injected.\n\n\
    Exit codes: 0 nothing was wrong, 1 a mismatch, a leak or an error that should not be.")]
pub(crate) struct Args {
    /// The card: `emulated` or `cuda:<n>`, or a device with its size
    #[arg(long, value_name = "DEVICE", default_value = "emulated")]
    device: String,

    /// How long to go on
    #[arg(long, value_name = "S", default_value_t = 10, conflicts_with = "operations")]
    seconds: u64,

    /// Let the threads' operations start one at a time, in an order that the seed decides
    ///
    /// The run then repeats also in how threads meet: the same seed and options do the same operations in the same
    /// order, and `sequence` in the JSON is the same number. It is one round of `--operations` of each thread (6000
    /// if not given), however long that takes. Guards are held while others have their turn, but nobody waits for
    /// them, and nothing is copied ahead; the pager's own threads run as they like.
    #[arg(long, conflicts_with = "seconds")]
    in_turns: bool,

    /// One round of so many operations a thread, instead of some seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    operations: Option<u64>,

    /// Threads that fault
    #[arg(long, value_name = "T", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    threads: u32,

    /// Models on the card
    #[arg(long, value_name = "M", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    models: u32,

    /// How many times larger the models are together than the card
    #[arg(long, value_name = "X", default_value = "4", value_parser = parse_times)]
    oversubscription: f64,

    /// What everything is drawn from
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Let no device call fail
    #[arg(long)]
    no_faults: bool,

    /// Where two uses of memory are not ordered, name both by file and line (emulated cards; several times slower)
    #[arg(long)]
    sites: bool,
}

fn parse_times(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(times) if (0.1..=64.0).contains(&times) => Ok(times),
        _ => Err("must be from 0.1 to 64, for example 4".to_owned()),
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    device: String,
    seed: u64,
    rounds: u64,
    /// Everything that threads did.
    operations: u64,
    /// Guards, rows and activations whose bytes were compared.
    checked: u64,
    /// Units, pieces and rows that were given.
    faults: u64,
    /// Pages that gave their memory to others.
    evictions: u64,
    /// Faults that came through the ring.
    streamed: u64,
    /// Requests that were refused for a lack of memory.
    refused: u64,
    /// Device calls that were made to fail.
    injected: u64,
    mismatches: u64,
    leaks: u64,
    /// With `--in-turns`: what the operations were, in their order. The same for the same seed and options.
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence: Option<String>,
    /// With `--in-turns`: how they ended. The same as long as an injected failure meets the same call.
    #[serde(skip_serializing_if = "Option::is_none")]
    outcomes: Option<String>,
    seconds: f64,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args, json: bool) -> Outcome {
    let began = Instant::now();
    let (device, sizes) = sizes(args)?;
    let reference =
        device::open("emulated:4KiB,page=4KiB").map_err(|error| Failure::Failed(error.to_string()))?;
    let kinds = (0..u64::from(args.models))
        .map(|number| Kind::make(args.models.into(), number, sizes, &reference))
        .collect::<Result<Vec<_>, _>>()?;
    let counts = Arc::new(Counts::default());
    let mut setup = Setup {
        device,
        seed: args.seed,
        inject: !args.no_faults,
        exact: args.threads == 1 || args.in_turns,
        sites: args.sites,
    };
    let deadline = began + Duration::from_secs(args.seconds);
    let operations = args.operations.unwrap_or(ROUND);
    let one_round = args.operations.is_some() || args.in_turns;
    let outcome = loop {
        let done = AtomicBool::new(false);
        let round = std::thread::scope(|scope| {
            let ended = Ended(&done);
            let (counts, done, setup) = (&counts, &done, &setup);
            scope.spawn(move || {
                let deadline = (!one_round).then_some(deadline);
                watch(counts, done, deadline, || repeat(args, setup, operations));
            });
            let turns = args.in_turns.then(|| Turns::new(setup.seed, args.threads));
            let answer = round(&kinds, setup, args.threads, operations, counts, turns.as_ref());
            *counts.digests.lock() = turns.map(|turns| turns.digests());
            drop(ended);
            answer
        });
        let round = round.and_then(|()| interrupt::check());
        let failures = std::mem::take(&mut *counts.failures.lock());
        if let Err(failure) = round {
            break Err(failure);
        }
        if !failures.is_empty() {
            break Err(Failure::Failed(format!(
                "{}\nrepeat it with: {}",
                failures.join("\n"),
                repeat(args, &setup, operations)
            )));
        }
        if one_round || Instant::now() >= deadline {
            break Ok(());
        }
        setup.seed = setup.seed.wrapping_add(1);
        counts.stop.store(false, Ordering::Relaxed);
    };
    if matches!(outcome, Err(Failure::Interrupted | Failure::BadInput(_))) {
        return outcome;
    }
    let report = report(args, &setup.device, &counts, began.elapsed());
    if json {
        output::print_json(&report)?;
    } else {
        print_report(&report)?;
    }
    outcome
}

/// Ends the watch of a round, also when it panics.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The card with its size, and how large the models are.
fn sizes(args: &Args) -> Result<(String, Sizes), Failure> {
    let text = args.device.trim();
    let device = match text {
        "emulated" => format!("emulated:{},page={PAGE}", CARD_PAGES * PAGE),
        _ if text.starts_with("cuda:") && !text.contains("cap=") => {
            let granularity = open(text)?.info().granularity;
            format!("{text},cap={}", CARD_PAGES * granularity)
        }
        _ => text.to_owned(),
    };
    let card = open(&device)?;
    let info = card.info();
    if !info.keeps_bytes {
        return Err(Failure::BadInput("a device with bytes=none has nothing to check".to_owned()));
    }
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "sizes of cards, times a small number"
    )]
    let all = (info.total_bytes as f64 * args.oversubscription) as u64;
    if all > MOST_FILES {
        return Err(Failure::BadInput(format!(
            "the models would have {} together; take a smaller card, for example {}",
            format_size(all),
            if text.starts_with("cuda") { "cuda:0,cap=512MiB" } else { "emulated:1MiB,page=4KiB" }
        )));
    }
    let model_bytes = (all / u64::from(args.models)).max(8 * info.granularity);
    // A third of a model, and so many fit the card that several threads can hold some.
    let unit_bytes = (model_bytes / 3).min(info.total_bytes / 12);
    Ok((device, Sizes { page_bytes: info.granularity, model_bytes, unit_bytes }))
}

fn open(text: &str) -> Result<device::SharedDevice, Failure> {
    device::open(text).map_err(|error| Failure::BadInput(error.to_string()))
}

/// The command that repeats a round.
fn repeat(args: &Args, setup: &Setup, operations: u64) -> String {
    format!(
        "vram-pager stress --device {} --threads {} --models {} --oversubscription {} --seed {} --operations {operations}{}{}",
        args.device,
        args.threads,
        args.models,
        args.oversubscription,
        setup.seed,
        if args.in_turns { " --in-turns" } else { "" },
        if args.no_faults { " --no-faults" } else { "" }
    )
}

/// One round.
fn round(
    kinds: &[Kind],
    setup: &Setup,
    threads: u32,
    operations: u64,
    counts: &Arc<Counts>,
    turns: Option<&Turns>,
) -> Result<(), Failure> {
    let world = World::open(kinds, setup, counts)?;
    // Streams and their checks first: what a thread cannot do without must not be what fails.
    let runners = (1..=u64::from(threads))
        .map(|thread| Runner::new(&world, setup.seed, thread, operations))
        .collect::<Result<Vec<_>, _>>()?;
    if let [_] = runners.as_slice() {
        // On this thread, whose modelled time the card goes by.
        for runner in runners {
            guarded(counts, || runner.run(turns));
        }
    } else {
        std::thread::scope(|scope| {
            for runner in runners {
                scope.spawn(move || guarded(counts, || runner.run(turns)));
            }
        });
    }
    guarded(counts, || world.close());
    Ok(())
}

/// A panic is a failure of the run, and not its end.
fn guarded(counts: &Counts, work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        counts.fail("a thread panicked, see above".to_owned());
    }
}

/// Says each second how far it is; stops everything when time is over or the user interrupts, and ends a run
/// that hangs.
fn watch(counts: &Counts, done: &AtomicBool, deadline: Option<Instant>, repeat: impl Fn() -> String) {
    let began = Instant::now();
    let (mut said, mut last) = (began, 0);
    let mut moved = began;
    while !done.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(5));
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) || interrupt::check().is_err() {
            counts.stop.store(true, Ordering::Relaxed);
        }
        let read = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        let operations = read(&counts.operations);
        // The pass at a round's end is no operation.
        let done = operations + read(&counts.faults);
        if done != last {
            (last, moved) = (done, now);
        }
        if now - moved > HANGS {
            output::note(format_args!(
                "error: nothing has moved for {} s\nrepeat it with: {}",
                HANGS.as_secs(),
                repeat()
            ));
            interrupt::leave(1);
        }
        if now - said >= Duration::from_secs(1) {
            said = now;
            output::note(format_args!(
                "round {}: {operations} operations, {} checked, {} mismatches, {} leaks",
                read(&counts.rounds) + 1,
                read(&counts.checked),
                read(&counts.mismatches),
                read(&counts.leaks)
            ));
        }
    }
}

fn report(args: &Args, device: &str, counts: &Counts, took: Duration) -> Report {
    let read = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
    let digests = *counts.digests.lock();
    let text = |digest: u64| format!("{digest:016x}");
    Report {
        device: device.to_owned(),
        seed: args.seed,
        rounds: read(&counts.rounds),
        operations: read(&counts.operations),
        checked: read(&counts.checked),
        faults: read(&counts.faults),
        evictions: read(&counts.evictions),
        streamed: read(&counts.streamed),
        refused: read(&counts.refused),
        injected: read(&counts.injected),
        mismatches: read(&counts.mismatches),
        leaks: read(&counts.leaks),
        sequence: digests.map(|digests| text(digests.sequence)),
        outcomes: digests.map(|digests| text(digests.outcomes)),
        seconds: took.as_secs_f64(),
    }
}

fn print_report(report: &Report) -> Outcome {
    output::print(|out| {
        writeln!(
            out,
            "{}: {} operations in {} and {:.1} s, seed {}\n\
             checked: {} times a guard's bytes on the card, {} wrong\n\
             faults: {} given ({} streamed, {} pages evicted), {} requests refused for a lack of memory\n\
             injected: {} failures of device calls; left behind: {}",
            report.device,
            report.operations,
            output::count(usize::try_from(report.rounds).unwrap_or(usize::MAX), "round"),
            report.seconds,
            report.seed,
            report.checked,
            report.mismatches,
            report.faults,
            report.streamed,
            report.evictions,
            report.refused,
            report.injected,
            if report.leaks == 0 { "nothing".to_owned() } else { format!("{} accounts", report.leaks) }
        )?;
        if let (Some(sequence), Some(outcomes)) = (&report.sequence, &report.outcomes) {
            writeln!(out, "in turns: sequence {sequence}, outcomes {outcomes}")?;
        }
        Ok(())
    })
}
