//! `vram-pager worker`: holds a model for the process that started it.

use std::path::PathBuf;

use vram_pager::device;
use vram_pager::pager::PagerOptions;
use vram_pager::patcher::worker::{ServeError, ServeOptions, serve};
use vram_pager::units::parse_size;

use crate::Outcome;
use crate::interrupt::Scratch;
use crate::output::Failure;

/// Hold a model on a device for another process, which loads and unloads it over a Unix socket
///
/// Not for people: a program that shares a card among processes starts it and speaks its protocol
/// (length-prefixed JSON, one version, one parent). It ends when its parent goes or says so, and holds
/// nothing on the device then.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  \
    vram-pager worker --socket /run/user/1000/w.sock --device cuda:0 model.safetensors")]
pub(crate) struct Args {
    /// Where to listen; nothing may be there yet
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    /// The device, as for run
    #[arg(long, value_name = "DEVICE")]
    device: String,

    /// What the parent calls this run; it is said back to it
    #[arg(long, value_name = "NAME", default_value = "")]
    generation: String,

    /// Bytes to leave free on the device
    #[arg(long, value_name = "SIZE", value_parser = parse_size_argument)]
    headroom: Option<u64>,

    /// Host memory that may be page-locked
    #[arg(long, value_name = "SIZE", value_parser = parse_size_argument)]
    page_locked: Option<u64>,

    /// Hold the first N units from each load until everything is asked for, as a run in progress does
    #[arg(long, value_name = "N", default_value_t = 0)]
    hold_units: u32,

    /// A .safetensors file, or the index of a sharded model
    #[arg(value_name = "FILE|INDEX.json")]
    file: PathBuf,
}

fn parse_size_argument(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| error.to_string())
}

/// Runs the subcommand `worker`.
pub(crate) fn run(args: &Args) -> Outcome {
    let device = device::open(&args.device).map_err(|error| Failure::BadInput(error.to_string()))?;
    if args.socket.exists() {
        let path = args.socket.display();
        return Err(Failure::BadInput(format!("{path} exists; a worker listens at a path of its own")));
    }
    // Gone also when we are interrupted.
    let socket = Scratch::new(args.socket.clone());
    let options = ServeOptions {
        generation: args.generation.clone(),
        hold_units: args.hold_units,
        pager: PagerOptions {
            headroom_bytes: args.headroom,
            page_locked_bytes: args.page_locked,
            ..PagerOptions::default()
        },
        ..ServeOptions::new(socket.path())
    };
    serve(&device, &args.file, &options).map_err(|error| match error {
        ServeError::Weights(error) => error.into(),
        ServeError::Pager(error) => error.into(),
        error => Failure::Failed(error.to_string()),
    })
}
