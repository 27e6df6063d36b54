//! `vram-pager run` and `vram-pager demo`: passes over a model on a card that may be smaller than it.
//!
//! | file | what it does |
//! |---|---|
//! | `knobs` | the manager's settings, shrunk for small cards; durations |
//! | `passes` | the model through the manager, and the passes |
//! | `figures` | what is printed |
//! | `outputs` | `--report` and `--trace` |

mod figures;
mod knobs;
mod outputs;
mod passes;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use vram_pager::device::emulated::EmulatedDevice;
use vram_pager::device::{self, DeviceError, DeviceKind, DeviceString, SharedDevice};
use vram_pager::manager::VramState;
use vram_pager::pager::PagerError;
use vram_pager::units::format_size;
use vram_pager::weights::TensorIndex;

use crate::Outcome;
use crate::interrupt::Scratch;
use crate::layouts::Model;
use crate::output::{self, Failure};
use crate::synth;
pub(crate) use figures::Report;
use figures::print_report;
pub(crate) use knobs::headroom_for;
use knobs::{parse_duration, parse_size_argument};
use outputs::{OutputArgs, Outputs};
pub(crate) use passes::passes;
use passes::recorded_passes;

/// Run every unit of a model in order on a device, several passes
///
/// The weights are faulted to the device unit by unit, as a model runner would. A unit that is too large
/// for the device is taken in pieces. With --verify a kernel reads each unit at its device address, and
/// what it read is compared with the file.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    vram-pager run model.safetensors --device emulated:24MiB,page=2MiB --passes 5 --verify\n  \
    vram-pager run model.safetensors.index.json --device emulated:8GiB,link=25GB/s --json\n  \
    vram-pager run model.safetensors --device emulated:8GiB --compute-per-gib 30ms\n  \
    vram-pager run model.safetensors --device emulated:8GiB --report run.html --trace run.json\n\n\
    Counts are of faults: a unit that is taken in pieces counts once a piece.\n\
    On a card below 4 GiB the inference floor, the reserve and the headroom shrink with it unless given.")]
pub(crate) struct Args {
    /// A .safetensors file, or the index of a sharded model
    #[arg(value_name = "FILE|INDEX.json")]
    file: PathBuf,

    #[command(flatten)]
    options: RunOptions,

    #[command(flatten)]
    outputs: OutputArgs,
}

/// The card, and what decides what stays on it: the same for `plan` and `run`.
#[derive(clap::Args, Clone)]
pub(crate) struct CardOptions {
    /// The device: emulated:<size>[,page=<size>][,link=<rate>][,disk=<rate>][,bytes=none][,vmm=none]
    /// or cuda:<n>[,cap=<size>][,page=<size>][,link=<rate>]
    #[arg(long, value_name = "DEVICE", default_value = "emulated:4GiB")]
    pub(crate) device: String,

    /// How long the compute of a GiB of weights takes, such as 30ms: it is charged to an emulated device's
    /// clock, and ring and resident pages are chosen for it
    #[arg(long, value_name = "T", value_parser = parse_duration)]
    pub(crate) compute_per_gib: Option<Duration>,

    /// The manager's reserve in GiB: what other programs are left
    #[arg(long, value_name = "GiB")]
    pub(crate) reserve_vram: Option<f64>,

    /// Bytes the pager leaves free on the device
    #[arg(long, value_name = "SIZE", value_parser = parse_size_argument)]
    pub(crate) headroom: Option<u64>,

    /// Host memory that may be page-locked
    #[arg(long, value_name = "SIZE", value_parser = parse_size_argument)]
    pub(crate) page_locked: Option<u64>,
}

/// What `run` and `demo` have in common.
#[derive(clap::Args, Clone)]
pub(crate) struct RunOptions {
    #[command(flatten)]
    card: CardOptions,

    /// Passes over the model
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    passes: u32,

    /// Threads that take units from one shared counter, one guard each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,

    /// Check every byte on the device against the file
    #[arg(long)]
    verify: bool,

    /// How much stays on the device between runs
    #[arg(long, value_enum, default_value_t = State::Normal)]
    vram_state: State,

    /// Empty the device before every load
    #[arg(long)]
    disable_smart_memory: bool,

    /// Whether nothing is shown of the run while it goes on.
    #[arg(skip)]
    quiet: bool,
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

impl CardOptions {
    /// A card with everything else at its default.
    pub(crate) fn new(device: String) -> Self {
        Self { device, compute_per_gib: None, reserve_vram: None, headroom: None, page_locked: None }
    }
}

impl RunOptions {
    /// Passes of one thread on a card, nothing checked and nothing shown.
    pub(crate) fn rehearsal(card: CardOptions, passes: u32) -> Self {
        Self {
            card,
            passes,
            threads: 1,
            verify: false,
            vram_state: State::Normal,
            disable_smart_memory: false,
            quiet: true,
        }
    }
}

/// Runs the subcommand `run`.
pub(crate) fn run(args: &Args, json: bool) -> Outcome {
    let index = Arc::new(TensorIndex::open(&args.file)?);
    let card = &args.options.card;
    let outputs = Outputs::open(&args.outputs, &index, &args.file)?;
    let (device, emulated) = open_device(&card.device)?;
    if card.compute_per_gib.is_some() && device.info().kind != DeviceKind::Emulated {
        output::note(format_args!(
            "note: {} has a clock of its own: --compute-per-gib is a hint to its plan, and the times below hold \
             no compute",
            device.info().name
        ));
    }
    let report = if outputs.any() {
        let (report, recording) = recorded_passes(&args.file, &index, &device, emulated, &args.options)?;
        outputs.write(&recording)?;
        report
    } else {
        passes(&args.file, &index, &device, &args.options)?
    };
    if json {
        output::print_json(&report)?;
    } else {
        print_report(&report, &args.options)?;
    }
    judge(&report)
}

/// Opens a device; an emulated one also as what it is, so that its journal can be read.
fn open_device(text: &str) -> Result<(SharedDevice, Option<Arc<EmulatedDevice>>), Failure> {
    let refuse = |error: DeviceError| Failure::BadInput(error.to_string());
    match text.parse().map_err(refuse)? {
        DeviceString::Emulated(options) => {
            let card = EmulatedDevice::open(options).map_err(refuse)?;
            Ok((Arc::clone(&card) as SharedDevice, Some(card)))
        }
        _ => Ok((device::open(text).map_err(refuse)?, None)),
    }
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
    let card_options = CardOptions::new(format!("emulated:{card},page={page}"));
    let options =
        RunOptions { verify: true, quiet: false, ..RunOptions::rehearsal(card_options, args.passes) };
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
    let device = device::open(&options.card.device).map_err(|error| Failure::Failed(error.to_string()))?;
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
