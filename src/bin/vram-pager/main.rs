//! The command line: one file a subcommand, and what they share in [`output`] and [`interrupt`].
//!
//! Exit codes: 0 done, 1 failed, 2 bad usage or bad input (a device that is not here is one), 130
//! interrupted. With `--json` standard output
//! carries one object and nothing else; errors and progress always go to standard error.

#![deny(unsafe_code)]

mod devices;
mod inspect;
mod interrupt;
mod layouts;
mod output;
mod plan;
mod replay;
mod run;
mod stress;
mod synth;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use output::Failure;

/// A demand-faulting pager for model weights on a GPU.
#[derive(Parser)]
#[command(version, about, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 130 interrupted.\n\
    For programs that share a card among processes there is also `vram-pager worker`, see its --help.\n\
    Sizes are written 24MiB, 1.5GiB, 64KB or 4096.")]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Print one JSON object on standard output and nothing else
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    Demo(run::DemoArgs),
    Run(run::Args),
    Plan(plan::Args),
    Inspect(inspect::Args),
    Devices(devices::Args),
    Synth(synth::Args),
    Replay(replay::ReplayArgs),
    Stress(stress::Args),
    #[command(hide = true)]
    Worker(worker::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A stress run makes calls fail on purpose. What the manager then warns of is no news.
    output::start_log(if matches!(cli.command, Command::Stress(_)) { "error" } else { "warn" });
    let result = interrupt::install().and_then(|()| match &cli.command {
        Command::Demo(args) => run::demo(args, cli.json),
        Command::Run(args) => run::run(args, cli.json),
        Command::Plan(args) => plan::run(args, cli.json),
        Command::Devices(args) => devices::run(args, cli.json),
        Command::Inspect(args) => inspect::run(args, cli.json),
        Command::Synth(args) => synth::run(args, cli.json),
        Command::Worker(args) => worker::run(args),
        Command::Stress(args) => stress::run(args, cli.json),
        Command::Replay(args) => replay::run(args),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Keeps the argument definitions honest in every build of the tests.
#[cfg(test)]
#[test]
fn the_arguments_are_well_formed() {
    use clap::CommandFactory;
    Cli::command().debug_assert();
}

/// What every subcommand gives.
type Outcome = Result<(), Failure>;
