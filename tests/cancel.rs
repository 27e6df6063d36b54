//! Ctrl-C in every state of every subcommand: it ends soon, with 130 (or as it would have, if it was done
//! already), leaves no file, no socket and no process, and prints no half of a result.
//!
//! Moments are chosen by what the program has done so far and by seeded delays after that; a failure names
//! both. A watchdog turns a hang into a message.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![expect(unsafe_code, reason = "sets how a child takes a signal")]

mod common;

use std::fs;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use common::{Numbers, Watchdog};
use tempfile::TempDir;

const BIN: &str = env!("CARGO_BIN_EXE_vram-pager");

/// What has happened in a child when it is interrupted.
#[derive(Clone, Copy)]
enum Moment {
    /// Nothing is known.
    Started,
    /// A file of this ending has appeared in its folder.
    Wrote(&'static str),
    /// Standard output begins with these words.
    Said(&'static str),
}

/// A child in a process group and a folder of its own.
struct Run {
    child: Child,
    folder: TempDir,
}

impl Run {
    fn start(arguments: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let mut command = Command::new(BIN);
        // A shell has what it runs in the background ignore Ctrl-C, and children take that over. A signal that
        // comes before the program's own handler stands would be lost then.
        // SAFETY: the call may be made between fork and exec, and the default is no code of ours.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            });
        }
        let child = command
            .args(arguments)
            .current_dir(folder.path())
            .env("TMPDIR", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    /// Waits until the moment is there; false if the child ended before.
    fn wait_for(&mut self, moment: Moment) -> bool {
        match moment {
            Moment::Started => true,
            Moment::Wrote(ending) => loop {
                if self.files().iter().any(|name| name.ends_with(ending)) {
                    return true;
                }
                if self.child.try_wait().unwrap().is_some() {
                    return false;
                }
                std::thread::sleep(Duration::from_millis(1));
            },
            Moment::Said(words) => {
                let mut said = vec![0; words.len()];
                let stdout = self.child.stdout.as_mut().unwrap();
                stdout.read_exact(&mut said).is_ok_and(|()| said == words.as_bytes())
            }
        }
    }

    fn signal(&self, name: &str) {
        // It may have ended meanwhile.
        let pid = self.child.id().to_string();
        let _ =
            Command::new("kill").args([&format!("-{name}"), &pid]).stderr(Stdio::null()).status().unwrap();
    }

    /// Waits for its end and gives status, standard output and standard error.
    fn end(&mut self) -> (ExitStatus, String, String) {
        // Both pipes at once: a full one would keep it from ending.
        let mut stderr = self.child.stderr.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        let mut stdout = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        (self.child.wait().unwrap(), stdout, reader.join().unwrap())
    }

    /// Whether any process of the group is left.
    fn leaves_a_process(&self) -> bool {
        let group = format!("-{}", self.child.id());
        Command::new("kill").args(["-0", "--", &group]).stderr(Stdio::null()).status().unwrap().success()
    }
}

/// Interrupts a subcommand at many moments. `kept` are the files that may be there when it was done before.
fn interrupt(arguments: &[&str], moments: &[Moment], kept: &[&str], signals: &[&str]) {
    let json = arguments.contains(&"--json");
    let mut interrupted = 0;
    for (number, &moment) in (0..).zip(moments) {
        for round in 0..4_u64 {
            let seed = 0x00c0_ffee + number * 16 + round;
            let mut numbers = Numbers(seed);
            numbers.next();
            let delay = if round == 0 { 0 } else { numbers.below(60 << (2 * round)) };
            let what = format!("{arguments:?}, moment {number}, {delay} ms later (seed {seed:#x})");
            let _watchdog = Watchdog::new(60, what.clone());
            let mut run = Run::start(arguments);
            let came = run.wait_for(moment);
            std::thread::sleep(Duration::from_millis(delay));
            for signal in signals {
                run.signal(signal);
            }
            let (status, stdout, stderr) = run.end();
            // Before its handler stands, a process ends by the signal itself, having done nothing.
            let by_signal = matches!(moment, Moment::Started) && status.signal().is_some();
            let done = status.code() == Some(0);
            assert!(status.code() == Some(130) || by_signal || done, "{what}: {status}\n{stderr}");
            assert!(!stderr.contains("panicked"), "{what}: {stderr}");
            assert!(came || done, "{what}: it ended before its moment: {status}\n{stderr}");
            interrupted += u32::from(!done);
            let mut files = run.files();
            files.retain(|name| !(done && kept.contains(&name.as_str())));
            assert!(files.is_empty(), "{what}: left {files:?}");
            assert!(!run.leaves_a_process(), "{what}: left a process");
            if json {
                // Whole or nothing.
                let whole = stdout.is_empty() || serde_json::from_str::<serde_json::Value>(&stdout).is_ok();
                assert!(whole, "{what}: half a result: {stdout}");
                assert!(!done || !stdout.is_empty(), "{what}: done, and no result");
            }
        }
    }
    assert!(interrupted > 0, "{arguments:?}: it was always done before");
}

/// A model in a folder that outlives the runs.
fn model(scale: &str) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let out = path.to_str().unwrap();
    let output =
        Command::new(BIN).args(["synth", "--like", "flux1-dev", "--scale", scale, "--out", out]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (folder, path)
}

#[test]
fn synth_interrupted_at_any_moment_leaves_no_file() {
    interrupt(
        &["synth", "--like", "flux1-dev", "--scale", "0.2", "--out", "out.safetensors", "--json"],
        &[Moment::Started, Moment::Wrote(".part")],
        &["out.safetensors"],
        &["INT"],
    );
}

#[test]
fn run_interrupted_at_any_moment_ends_and_prints_no_half_result() {
    let (_folder, path) = model("0.03");
    let file = path.to_str().unwrap();
    for threads in ["1", "3"] {
        interrupt(
            &[
                "run",
                file,
                "--device",
                "emulated:8MiB,page=64KiB",
                "--passes",
                "500",
                "--threads",
                threads,
                "--verify",
                "--json",
            ],
            &[Moment::Started],
            &[],
            &["INT"],
        );
    }
}

#[test]
fn demo_interrupted_at_any_moment_leaves_no_file() {
    interrupt(
        &["demo", "--passes", "50"],
        &[Moment::Started, Moment::Said("1. Making"), Moment::Wrote(".part"), Moment::Wrote(".safetensors")],
        &[],
        &["INT"],
    );
}

#[test]
fn replay_interrupted_at_any_moment_ends() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("long.json");
    fs::write(&path, long_scenario()).unwrap();
    interrupt(&["replay", path.to_str().unwrap()], &[Moment::Started], &[], &["INT"]);
}

/// One of the given scenarios with its calls many times over.
fn long_scenario() -> String {
    let given = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let first = fs::read_dir(given).unwrap().map(|entry| entry.unwrap().path()).min().unwrap();
    let mut scenario: serde_json::Value = serde_json::from_str(&fs::read_to_string(first).unwrap()).unwrap();
    let calls = scenario["ops"].as_array().unwrap().clone();
    scenario["ops"] = (0..5000).flat_map(|_| calls.clone()).collect::<Vec<_>>().into();
    scenario["expected"] = serde_json::Value::Null;
    scenario.to_string()
}

#[test]
fn worker_interrupted_at_any_moment_leaves_no_socket() {
    let (_folder, path) = model("0.02");
    let file = path.to_str().unwrap();
    let arguments = ["worker", "--socket", "w.sock", "--device", "emulated:8MiB,page=64KiB", file];
    interrupt(&arguments, &[Moment::Started, Moment::Wrote("w.sock")], &[], &["INT"]);
}

#[test]
fn the_other_ways_to_be_ended_and_impatience_leave_nothing_either() {
    let arguments = ["synth", "--like", "flux1-dev", "--scale", "0.2", "--out", "out.safetensors"];
    for signals in [&["TERM"][..], &["HUP"], &["INT", "INT", "INT"], &["INT", "TERM"]] {
        interrupt(&arguments, &[Moment::Wrote(".part")], &["out.safetensors"], signals);
    }
}
