//! `vram-pager stress` on each kind of card, in its short form: every byte right, nothing left, exact where it
//! says so, honest where something is wrong, and quickly gone on Ctrl-C. `tests/hard.sh stress` is the long form.

#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]
#![expect(unsafe_code, reason = "sends a signal, and loads the driver stand-in")]

#[cfg(feature = "cuda")]
mod standin;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// The command, with a folder of its own for temporary files.
fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vram-pager"));
    command.arg("stress").args(args).env("TMPDIR", folder).env("RUST_LOG", "error");
    command
}

fn files(folder: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path()).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs it and expects that nothing was wrong; the report.
#[track_caller]
fn sound(mut command: Command, folder: &TempDir) -> Value {
    let output = command.arg("--json").output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", errors(&output));
    assert!(!errors(&output).contains("MISUSE"), "{}", errors(&output));
    assert!(files(folder).is_empty(), "{:?}", files(folder));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["mismatches"], &report["leaks"]), (&0.into(), &0.into()), "{report}");
    report
}

fn number(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("no {field} in {report}"))
}

/// Several seeds on a card; everything that a run is for must have happened.
fn seeds(device: &str, prepare: impl Fn(&mut Command)) {
    let mut injected = 0;
    for seed in 1..=4_u64 {
        let folder = TempDir::new().unwrap();
        let seed = seed.to_string();
        let args = ["--device", device, "--seed", &seed, "--threads", "3", "--models", "3", "--operations"];
        let mut command = command(folder.path(), &args);
        command.arg("700");
        prepare(&mut command);
        let report = sound(command, &folder);
        assert_eq!(number(&report, "operations"), 2100, "{report}");
        for field in ["checked", "faults"] {
            assert!(number(&report, field) > 1000, "{field}: {report}");
        }
        for field in ["evictions", "streamed"] {
            assert!(number(&report, field) > 100, "{field}: {report}");
        }
        injected += number(&report, "injected");
    }
    assert!(injected > 0);
}

#[test]
fn a_stressed_card_gives_right_bytes_and_nothing_is_left() {
    seeds("emulated", |_| {});
}

#[test]
fn so_does_one_without_virtual_memory_calls() {
    seeds("emulated:1MiB,page=4KiB,vmm=none", |_| {});
}

#[cfg(feature = "cuda")]
#[test]
fn so_does_one_behind_the_driver() {
    seeds("cuda:0", |command| {
        command.env("LD_LIBRARY_PATH", standin::standin().folder());
        command.env("VRAM_PAGER_STANDIN_PAGE", "4KiB").env("VRAM_PAGER_STANDIN_BYTES", "8MiB");
    });
}

#[test]
fn a_seed_repeats_its_operations_with_one_thread() {
    for seed in ["11", "12"] {
        let reports: Vec<Value> = (0..2)
            .map(|_| {
                let folder = TempDir::new().unwrap();
                let args = ["--threads", "1", "--operations", "1500", "--seed", seed];
                let mut report = sound(command(folder.path(), &args), &folder);
                // Page-locking goes on in the background, so which calls an injected failure meets may differ.
                for key in ["seconds", "injected", "evictions", "refused", "streamed"] {
                    report.as_object_mut().unwrap().remove(key).unwrap();
                }
                report
            })
            .collect();
        assert_eq!(reports[0], reports[1]);
    }
}

/// What a run in turns gives, without the time that it took.
fn in_turns(args: &[&str]) -> Value {
    let folder = TempDir::new().unwrap();
    let mut command = command(folder.path(), &["--in-turns", "--threads", "4", "--operations", "400"]);
    command.args(args);
    let mut report = sound(command, &folder);
    report.as_object_mut().unwrap().remove("seconds").unwrap();
    assert_eq!(number(&report, "operations"), 1600, "{report}");
    report
}

/// Without injected failures everything is the same again: each operation, how it ended, and what it moved.
#[test]
fn in_turns_a_seed_repeats_how_threads_meet() {
    let [first, again, other] =
        ["21", "21", "22"].map(|seed| in_turns(&["--no-faults", "--device", "emulated", "--seed", seed]));
    assert_eq!(first, again);
    assert_ne!(first["sequence"], other["sequence"]);
    assert_ne!(first["outcomes"], other["outcomes"]);
}

/// Page-locking goes on beside the turns, so an injected failure may meet another call; the operations stay.
#[test]
fn in_turns_a_seed_repeats_its_operations_also_where_calls_fail() {
    let mut injected = 0;
    for seed in ["23", "24", "25"] {
        let [first, again] = [(); 2].map(|()| in_turns(&["--seed", seed]));
        assert_eq!(first["sequence"], again["sequence"], "{first} {again}");
        injected += number(&first, "injected");
    }
    assert!(injected > 0);
}

/// Begins a run that takes long, and waits until it is at work.
fn begun(folder: &TempDir, args: &[&str]) -> (Child, BufReader<std::process::ChildStderr>) {
    let mut child = command(folder.path(), &["--threads", "2"])
        .args(args)
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert!(line.starts_with("round 1:"), "{line}");
    (child, reader)
}

#[test]
fn ctrl_c_ends_it_and_no_file_is_left() {
    let folder = TempDir::new().unwrap();
    let (mut child, _errors) = begun(&folder, &["--seconds", "600"]);
    assert_eq!(files(&folder).len(), 4);
    // SAFETY: a child that was not waited for yet.
    unsafe { libc::kill(i32::try_from(child.id()).unwrap(), libc::SIGINT) };
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(files(&folder).is_empty(), "{:?}", files(&folder));
}

/// The run must be able to fail: here a model's file shrinks under it.
fn fails_under(args: &[&str], repeats: &[&str]) {
    let folder = TempDir::new().unwrap();
    let (child, mut reader) = begun(&folder, args);
    for name in files(&folder) {
        std::fs::OpenOptions::new().write(true).open(folder.path().join(name)).unwrap().set_len(100).unwrap();
    }
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut reader, &mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{rest}");
    assert!(rest.contains("safetensors"), "{rest}");
    let command = rest.lines().find(|line| line.contains("vram-pager stress --device emulated")).unwrap();
    assert!(repeats.iter().all(|part| command.contains(part)), "{rest}");
    assert!(files(&folder).is_empty(), "{:?}", files(&folder));
}

#[test]
fn what_goes_wrong_is_told_with_the_command_that_repeats_it() {
    fails_under(&["--seconds", "600"], &["--threads 2", "--operations 6000"]);
}

#[test]
fn in_turns_the_command_that_repeats_it_says_so() {
    let args = ["--in-turns", "--operations", "10000000", "--seed", "5"];
    fails_under(&args, &["--threads 2", "--seed 5", "--operations 10000000", "--in-turns"]);
}

#[test]
fn bad_usage_is_refused_with_what_would_be_right() {
    let folder = TempDir::new().unwrap();
    for (args, says) in [
        (&["--device", "emulated:1MiB,page=4KiB,bytes=none"][..], "nothing to check"),
        (&["--device", "emulatd"], "did you mean"),
        (&["--device", "emulated:64GiB,page=2MiB,bytes=none"], "nothing to check"),
        (&["--oversubscription", "0"], "0.1 to 64"),
        (&["--operations", "0"], "0"),
        (&["--seconds", "1", "--operations", "1"], "cannot be used with"),
        (&["--seconds", "1", "--in-turns"], "cannot be used with"),
    ] {
        let output = command(folder.path(), args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", errors(&output));
        assert!(errors(&output).contains(says), "{args:?}: {}", errors(&output));
    }
    assert!(files(&folder).is_empty());
}
