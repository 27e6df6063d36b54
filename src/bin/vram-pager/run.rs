//! `vram-pager run` and `vram-pager demo`: passes over a model on a card that may be smaller than it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use vram_pager::device::{self, SharedDevice};
use vram_pager::manager::{LoadOptions, Manager, VramState};
use vram_pager::pager::{
    Check, Guard, Mismatch, ModelOptions, PagedModel, Pager, PagerError, PagerOptions, PagerStream,
    VerifiedBy, Verifier,
};
use vram_pager::patcher::{ModelPatcher, PagedPatcher, Place};
use vram_pager::units::{GIB, ModelTime, format_size, parse_size};
use vram_pager::weights::{TensorIndex, UnitId};

use crate::Outcome;
use crate::interrupt::{self, Scratch};
use crate::layouts::Model;
use crate::output::{self, Align, Failure, Table};
use crate::synth;

/// How long a thread waits for units that other threads hold.
const PATIENCE: Duration = Duration::from_secs(60);

/// The card size from which the manager's floor, reserve and headroom have their full values.
const FULL_SIZE_CARD: u64 = 4 * GIB;

/// Run every unit of a model in order on a device, several passes
///
/// The weights are faulted to the device unit by unit, as a model runner would. A unit that is too large
/// for the device is taken in pieces. With --verify a kernel reads each unit at its device address, and
/// what it read is compared with the file.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    vram-pager run model.safetensors --device emulated:24MiB,page=2MiB --passes 5 --verify\n  \
    vram-pager run model.safetensors.index.json --device emulated:8GiB,link=25GB/s --json\n\n\
    Counts are of faults: a unit that is taken in pieces counts once a piece.\n\
    On a card below 4 GiB the inference floor, the reserve and the headroom shrink with it unless given.")]
pub(crate) struct Args {
    /// A .safetensors file, or the index of a sharded model
    #[arg(value_name = "FILE|INDEX.json")]
    file: PathBuf,

    #[command(flatten)]
    options: RunOptions,
}

/// What `run` and `demo` have in common.
#[derive(clap::Args, Clone)]
struct RunOptions {
    /// The device: emulated:<size>[,page=<size>][,link=<rate>][,disk=<rate>][,bytes=none] or cuda:<n>[,cap=<size>]
    #[arg(long, value_name = "DEVICE", default_value = "emulated:4GiB")]
    device: String,

    /// Passes over the model
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    passes: u32,

    /// Threads that take units from one shared counter, one guard each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,

    /// Check every byte on the device against the file
    #[arg(long)]
    verify: bool,

    /// The manager's reserve in GiB: what other programs are left
    #[arg(long, value_name = "GiB")]
    reserve_vram: Option<f64>,

    /// Bytes the pager leaves free on the device
    #[arg(long, value_name = "SIZE", value_parser = parse_size_argument)]
    headroom: Option<u64>,

    /// Host memory that may be page-locked
    #[arg(long, value_name = "SIZE", value_parser = parse_size_argument)]
    page_locked: Option<u64>,

    /// How much stays on the device between runs
    #[arg(long, value_enum, default_value_t = State::Normal)]
    vram_state: State,

    /// Empty the device before every load
    #[arg(long)]
    disable_smart_memory: bool,
}

/// Show a model running through a card a quarter of its size
///
/// Synthesises a small model with FLUX.1-dev's tensor list, runs it on an emulated card a quarter of its
/// size with every byte checked, and says what happened.
#[derive(clap::Args)]
pub(crate) struct DemoArgs {
    /// How wide the model is to be (FLUX.1-dev is 1; bytes shrink with the square)
    #[arg(long, value_name = "F", default_value = "0.06")]
    scale: f64,

    /// Passes over the model
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    passes: u32,
}

/// The manager's VRAM states.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum State {
    Disabled,
    No,
    Low,
    Normal,
    High,
    Shared,
}

impl From<State> for VramState {
    fn from(state: State) -> Self {
        match state {
            State::Disabled => Self::Disabled,
            State::No => Self::No,
            State::Low => Self::Low,
            State::Normal => Self::Normal,
            State::High => Self::High,
            State::Shared => Self::Shared,
        }
    }
}

fn parse_size_argument(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| error.to_string())
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    model: String,
    device: DeviceReport,
    weights_bytes: u64,
    units: usize,
    passes: Vec<Pass>,
    resident_bytes: u64,
    ring_bytes: u64,
    headroom_bytes: u64,
    largest_streamed_part_bytes: u64,
    peak_device_bytes: u64,
    device_syncs: u64,
    map_calls: u64,
    verified_units: u64,
    /// `kernel` or `host`; null without --verify.
    verified_by: Option<&'static str>,
    mismatches: u64,
}

#[derive(Serialize)]
struct DeviceReport {
    kind: &'static str,
    name: String,
    total_bytes: u64,
}

#[derive(Serialize, Clone, Debug)]
struct Pass {
    #[serde(rename = "pass")]
    number: u32,
    h2d_bytes: u64,
    file_bytes: u64,
    hits: u64,
    loaded: u64,
    streamed: u64,
    modelled_ms: f64,
    wall_ms: f64,
}

/// Runs the subcommand `run`.
pub(crate) fn run(args: &Args, json: bool) -> Outcome {
    let index = Arc::new(TensorIndex::open(&args.file)?);
    let device = device::open(&args.options.device).map_err(|error| Failure::BadInput(error.to_string()))?;
    let report = passes(&args.file, &index, &device, &args.options)?;
    if json {
        output::print_json(&report)?;
    } else {
        print_report(&report, &args.options)?;
    }
    judge(&report)
}

/// Runs the subcommand `demo`.
pub(crate) fn demo(args: &DemoArgs, json: bool) -> Outcome {
    if !(args.scale > 0.0 && args.scale <= 1.0) {
        return Err(Failure::BadInput("--scale must be above 0 and at most 1".to_owned()));
    }
    let folder = std::env::temp_dir();
    let file = Scratch::new(folder.join(format!("vram-pager-demo-{}.safetensors", std::process::id())));
    if !json {
        output::print(|out| {
            writeln!(out, "1. Making a model with FLUX.1-dev's tensors, {} times as wide.", args.scale)
        })?;
    }
    let bytes = synth::write_model(Model::Flux1Dev, args.scale, 1, file.path())?;
    let page: u64 = 64 << 10;
    let card = (bytes / 4).next_multiple_of(page);
    let options = RunOptions {
        device: format!("emulated:{card},page={page}"),
        passes: args.passes,
        threads: 1,
        verify: true,
        reserve_vram: None,
        headroom: None,
        page_locked: None,
        vram_state: State::Normal,
        disable_smart_memory: false,
    };
    if !json {
        output::print(|out| {
            writeln!(
                out,
                "2. Running its {} through a card of {}, every byte checked by a kernel on the card.",
                format_size(bytes),
                format_size(card)
            )
        })?;
    }
    let index = Arc::new(TensorIndex::open(file.path())?);
    let device = device::open(&options.device).map_err(|error| Failure::Failed(error.to_string()))?;
    let report = passes(file.path(), &index, &device, &options)?;
    if json {
        output::print_json(&report)?;
        return judge(&report);
    }
    print_report(&report, &options)?;
    judge(&report)?;
    output::print(|out| {
        writeln!(
            out,
            "\nThe first pass brings the model in. From then on {} stay on the card and only the rest\n\
             crosses the link each pass, ahead of its use. Next: `vram-pager run --help`.",
            format_size(report.resident_bytes)
        )
    })
}

fn judge(report: &Report) -> Outcome {
    if report.mismatches == 0 {
        return Ok(());
    }
    Err(Failure::Failed(format!(
        "{} tensors had other bytes on the card than in the file",
        report.mismatches
    )))
}

impl From<PagerError> for Failure {
    fn from(error: PagerError) -> Self {
        match error {
            PagerError::Weights(error) => error.into(),
            PagerError::InvalidArgument { .. } | PagerError::NotFound { .. } => {
                Self::BadInput(error.to_string())
            }
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// Loads the model through the manager, runs the passes, and reports.
fn passes(
    file: &Path,
    index: &Arc<TensorIndex>,
    device: &SharedDevice,
    options: &RunOptions,
) -> Result<Report, Failure> {
    let total = device.info().total_bytes;
    let manager = Manager::new(std::slice::from_ref(device));
    set_knobs(&manager, total, options)?;
    let headroom = manager.headroom(Place::Card(0)).map_err(|error| Failure::Failed(error.to_string()))?;
    let pager = Pager::new(
        device,
        PagerOptions {
            headroom_bytes: Some(headroom),
            page_locked_bytes: options.page_locked,
            ..PagerOptions::default()
        },
    )?;
    let idle: Arc<dyn vram_pager::patcher::IdleCache> = Arc::clone(&pager) as _;
    manager.register_idle_cache(Place::Card(0), &idle).map_err(|error| Failure::Failed(error.to_string()))?;
    let model = pager.open_model(Arc::clone(index), &ModelOptions::default())?;
    let patcher: Arc<dyn ModelPatcher> = PagedPatcher::new(&model, Place::Card(0));
    manager
        .load_models_gpu(std::slice::from_ref(&patcher), LoadOptions::default())
        .map_err(|error| Failure::Failed(error.to_string()))?;
    let run = Run::new(&model, options)?;
    let report_passes = run.all(options)?;
    let figures = pager.figures();
    let counts = device.counts();
    let weights_bytes = model.figures().weights_bytes;
    Ok(Report {
        model: file.display().to_string(),
        device: DeviceReport {
            kind: device.info().kind.as_str(),
            name: device.info().name.clone(),
            total_bytes: total,
        },
        weights_bytes,
        units: index.units().len(),
        passes: report_passes,
        resident_bytes: figures.resident_bytes,
        ring_bytes: figures.ring_bytes,
        headroom_bytes: figures.headroom_bytes,
        largest_streamed_part_bytes: model.figures().largest_streamed_part_bytes,
        peak_device_bytes: figures.peak_bytes,
        device_syncs: counts.device_sync,
        map_calls: counts.map,
        verified_units: run.verified.load(Ordering::Relaxed),
        verified_by: run.verifier.as_ref().map(|verifier| verifier.verified_by().as_str()),
        mismatches: run.mismatched.load(Ordering::Relaxed),
    })
}

/// The manager's settings; on a small card the fixed sums shrink with it.
fn set_knobs(manager: &Manager, total: u64, options: &RunOptions) -> Result<(), Failure> {
    let shrunk = |bytes: u64| {
        let scaled = u128::from(bytes) * u128::from(total.min(FULL_SIZE_CARD)) / u128::from(FULL_SIZE_CARD);
        u64::try_from(scaled).unwrap_or(bytes)
    };
    let reserve = match options.reserve_vram {
        None => None,
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked to be a size that a card can have"
        )]
        Some(gib) if gib.is_finite() && (0.0..1e6).contains(&gib) => Some((gib * GIB as f64) as u64),
        Some(gib) => return Err(Failure::BadInput(format!("--reserve-vram {gib} is no size in GiB"))),
    };
    manager.set_knobs(|knobs| {
        knobs.reserve = reserve.unwrap_or_else(|| shrunk(knobs.reserve));
        knobs.inference_floor = shrunk(knobs.inference_floor);
        knobs.headroom = options.headroom;
        knobs.page_locked_budget = options.page_locked;
        knobs.vram_state = options.vram_state.into();
        knobs.smart_memory = !options.disable_smart_memory;
    });
    Ok(())
}

/// One run over one model.
struct Run<'r> {
    model: &'r Arc<PagedModel>,
    device: &'r SharedDevice,
    verifier: Option<Verifier>,
    streams: Vec<PagerStream>,
    bar: ProgressBar,
    next: AtomicU64,
    failed: AtomicBool,
    failure: Mutex<Option<Failure>>,
    /// The latest time of a thread at the end of the pass, in nanoseconds of the device's clock.
    pass_end: AtomicU64,
    verified: AtomicU64,
    mismatched: AtomicU64,
}

impl<'r> Run<'r> {
    fn new(model: &'r Arc<PagedModel>, options: &RunOptions) -> Result<Self, Failure> {
        let pager = model.pager();
        let verifier = if !options.verify {
            None
        } else if pager.device().info().keeps_bytes {
            Some(Verifier::new(model)?)
        } else {
            return Err(Failure::BadInput("a device with bytes=none has nothing to verify".to_owned()));
        };
        if verifier.as_ref().is_some_and(|verifier| verifier.verified_by() == VerifiedBy::Host) {
            eprintln!(
                "note: {} runs no kernels: --verify reads the bytes back and compares them on the host",
                pager.device().info().name
            );
        }
        let streams = (0..options.threads).map(|_| pager.stream()).collect::<Result<Vec<_>, _>>()?;
        let units = model.index().units().len() as u64;
        let style = ProgressStyle::with_template("{bar:40} pass {prefix} {pos}/{len} units {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        // It draws on standard error, and not at all if that is no terminal.
        let bar = ProgressBar::new(units * u64::from(options.passes)).with_style(style);
        Ok(Self {
            model,
            device: pager.device(),
            verifier,
            streams,
            bar,
            next: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            pass_end: AtomicU64::new(0),
            verified: AtomicU64::new(0),
            mismatched: AtomicU64::new(0),
        })
    }

    /// All passes; with several threads there is a barrier between two.
    fn all(&self, options: &RunOptions) -> Result<Vec<Pass>, Failure> {
        let mut passes = Vec::new();
        for pass in 1..=options.passes {
            self.bar.set_prefix(pass.to_string());
            self.next.store(0, Ordering::Relaxed);
            let before = self.model.counts();
            let begin = self.device.now();
            self.pass_end.store(begin.0, Ordering::Relaxed);
            let wall = Instant::now();
            if let [stream] = self.streams.as_slice() {
                self.thread(stream, None);
            } else {
                let barrier = Barrier::new(self.streams.len());
                std::thread::scope(|scope| {
                    for stream in &self.streams {
                        let barrier = &barrier;
                        scope.spawn(move || self.thread(stream, Some((begin, barrier))));
                    }
                });
            }
            let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(failure) = failure {
                self.bar.finish_and_clear();
                return Err(failure);
            }
            let counts = self.model.counts();
            let end = ModelTime(self.pass_end.load(Ordering::Relaxed));
            self.device.set_now(end);
            passes.push(Pass {
                number: pass,
                h2d_bytes: counts.copied_bytes - before.copied_bytes,
                file_bytes: counts.file_bytes - before.file_bytes,
                hits: counts.hits - before.hits,
                loaded: counts.loaded - before.loaded,
                streamed: counts.streamed - before.streamed,
                modelled_ms: end.since(begin).as_secs_f64() * 1e3,
                wall_ms: wall.elapsed().as_secs_f64() * 1e3,
            });
        }
        self.bar.finish_and_clear();
        Ok(passes)
    }

    /// One thread's share of a pass.
    fn thread(&self, stream: &PagerStream, shared: Option<(ModelTime, &Barrier)>) {
        if let Some((begin, barrier)) = shared {
            self.device.set_now(begin);
            barrier.wait();
        }
        if let Err(failure) = self.units(stream) {
            self.failed.store(true, Ordering::Relaxed);
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        }
        self.pass_end.fetch_max(self.device.now().0, Ordering::Relaxed);
    }

    fn units(&self, stream: &PagerStream) -> Result<(), Failure> {
        let mut check = match &self.verifier {
            Some(verifier) => Some(verifier.begin(stream)?),
            None => None,
        };
        let units = self.model.index().units().len() as u64;
        loop {
            interrupt::check()?;
            let next = self.next.fetch_add(1, Ordering::Relaxed);
            if next >= units || self.failed.load(Ordering::Relaxed) {
                break;
            }
            let unit = UnitId(u32::try_from(next).unwrap_or(u32::MAX));
            self.unit(unit, stream, check.as_mut())?;
            self.bar.inc(1);
        }
        if let Some(check) = &mut check {
            self.compare(check)?;
        }
        stream.synchronize().map_err(PagerError::from)?;
        Ok(())
    }

    fn unit(
        &self,
        unit: UnitId,
        stream: &PagerStream,
        mut check: Option<&mut Check<'_>>,
    ) -> Result<(), Failure> {
        let pieces = self.model.pieces(unit)?;
        if pieces > 1 && self.model.say_pieces_once() {
            self.say_pieces(unit, pieces);
        }
        for piece in 0..pieces {
            interrupt::check()?;
            let deadline = Instant::now() + PATIENCE;
            let guard: Guard<'_> = self.model.fault_piece_when_free(unit, piece, stream, deadline)?;
            if let Some(check) = check.as_deref_mut() {
                check.tensors(&guard.tensors())?;
            }
            guard.release();
            if let Some(check) = check.as_deref_mut()
                && check.is_nearly_full()
            {
                self.compare(check)?;
            }
        }
        if check.is_some() {
            self.verified.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn compare(&self, check: &mut Check<'_>) -> Result<(), Failure> {
        for Mismatch { tensor, first_row, found, expected } in check.finish()? {
            let said = self.mismatched.fetch_add(1, Ordering::Relaxed);
            if said < 10 {
                self.bar.suspend(|| {
                    eprintln!(
                        "MISMATCH: tensor {} from row {first_row}: {found:#018x} on the card, {expected:#018x} in the file",
                        output::printable(&tensor)
                    );
                });
            }
        }
        Ok(())
    }

    fn say_pieces(&self, unit: UnitId, pieces: u32) {
        let place = &self.model.layout().units()[unit.index()];
        let text = format!(
            "note: unit {} ({}) is large for {}: it is taken in {pieces} pieces (said once)",
            output::printable(&self.model.index().unit_info(unit).name),
            format_size(place.bytes.end - place.bytes.start),
            self.device.info().name
        );
        self.bar.suspend(|| eprintln!("{text}"));
    }
}

fn print_report(report: &Report, options: &RunOptions) -> Outcome {
    let mut table = Table::new(&[
        ("pass", Align::Right),
        ("copied", Align::Right),
        ("from file", Align::Right),
        ("hits", Align::Right),
        ("loaded", Align::Right),
        ("streamed", Align::Right),
        ("modelled ms", Align::Right),
        ("wall ms", Align::Right),
    ]);
    for pass in &report.passes {
        table.row([
            pass.number.to_string(),
            format_size(pass.h2d_bytes),
            format_size(pass.file_bytes),
            pass.hits.to_string(),
            pass.loaded.to_string(),
            pass.streamed.to_string(),
            format!("{:.1}", pass.modelled_ms),
            format!("{:.1}", pass.wall_ms),
        ]);
    }
    output::print(|out| {
        writeln!(
            out,
            "{}: {} in {} on {}",
            output::printable(&report.model),
            format_size(report.weights_bytes),
            output::count(report.units, "unit"),
            report.device.name
        )?;
        table.write(out)?;
        writeln!(
            out,
            "on the card: {} resident, {} ring, {} left free; at most {} of {} were used",
            format_size(report.resident_bytes),
            format_size(report.ring_bytes),
            format_size(report.headroom_bytes),
            format_size(report.peak_device_bytes),
            format_size(report.device.total_bytes)
        )?;
        if options.verify {
            writeln!(
                out,
                "checked{}: {} times a unit's bytes on the card against the file, {} wrong",
                if report.verified_by == Some("host") { " on the host" } else { "" },
                report.verified_units,
                report.mismatches
            )?;
        }
        Ok(())
    })
}
