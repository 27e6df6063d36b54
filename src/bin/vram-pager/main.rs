//! The command line.

use std::process::ExitCode;

use clap::Parser;

mod replay;

#[derive(Parser)]
#[command(version, about)]
enum Command {
    /// Plays a scenario of memory calls against the manager.
    Replay(replay::ReplayArgs),
}

fn main() -> ExitCode {
    let Command::Replay(args) = Command::parse();
    match replay::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
