//! What a run writes about itself: `run --report` and `run --trace`.
//!
//! A trace is held to the run's own figures, a report to what a browser without a net can show, and both to
//! leave the run as it is and no half file behind.

#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

const BIN: &str = env!("CARGO_BIN_EXE_vram-pager");

fn run(args: &[&str]) -> Output {
    Command::new(BIN).args(args).env_remove("RUST_LOG").output().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A small model with a published layout.
fn model() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let output = run(&["synth", "--like", "flux1-dev", "--scale", "0.02", "--out", text(&path)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (folder, path)
}

/// A third of the model fits.
const CARD: &str = "emulated:3MiB,page=64KiB,link=5GB/s,disk=2GB/s";

/// Runs with these arguments beside the model and the card; gives the object that it prints.
#[track_caller]
fn object(file: &Path, more: &[&str]) -> Value {
    let output = run(&[&["run", text(file), "--device", CARD, "--json"], more].concat());
    assert!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn names(folder: &TempDir) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A track's slices: begin, length, name, bytes.
type Slices = Vec<(f64, f64, String, u64)>;

/// The slices of a trace by process and track, with every event checked.
fn slices(whole: &Value) -> BTreeMap<(u64, u64), Slices> {
    let mut tracks: BTreeMap<(u64, u64), Slices> = BTreeMap::new();
    let mut counters: BTreeMap<String, f64> = BTreeMap::new();
    let mut last: BTreeMap<(u64, u64), f64> = BTreeMap::new();
    for event in whole["traceEvents"].as_array().unwrap() {
        let kind = event["ph"].as_str().unwrap();
        let process = event["pid"].as_u64().unwrap();
        let name = event["name"].as_str().unwrap().to_owned();
        if kind == "M" {
            assert!(event["args"]["name"].is_string(), "{event}");
            continue;
        }
        let at = event["ts"].as_f64().unwrap();
        assert!(at >= 0.0, "{event}");
        if kind == "C" {
            let values = event["args"].as_object().unwrap();
            assert!(values.values().all(Value::is_u64), "{event}");
            let before = counters.insert(name.clone(), at).unwrap_or(0.0);
            assert!(at >= before, "counter {name} goes back at {at}");
            continue;
        }
        let track = (process, event["tid"].as_u64().unwrap());
        let before = last.insert(track, at).unwrap_or(0.0);
        assert!(at >= before, "track {track:?} goes back from {before} to {at}");
        match kind {
            "X" => {
                let length = event["dur"].as_f64().unwrap();
                assert!(length >= 0.0, "{event}");
                let bytes = event["args"]["bytes"].as_u64().unwrap_or(0);
                tracks.entry(track).or_default().push((at, length, name, bytes));
            }
            "i" => assert!(event["args"]["pages"].as_u64().unwrap() > 0, "{event}"),
            other => panic!("an event of kind {other}"),
        }
    }
    for name in ["free frames", "resident bytes", "ring bytes"] {
        assert!(counters.contains_key(name), "no counter {name}");
    }
    for (track, slices) in &tracks {
        for pair in slices.windows(2) {
            // To the nanosecond.
            assert!(pair[0].0 + pair[0].1 <= pair[1].0 + 0.0015, "{track:?} overlaps: {pair:?}");
        }
    }
    tracks
}

const LINK: (u64, u64) = (1, 1);
const COMPUTE: (u64, u64) = (1, 2);

#[test]
fn a_traces_tracks_go_forward_and_its_copies_are_the_bytes_that_the_run_reports() {
    let (folder, file) = model();
    let out = folder.path().join("trace.json");
    for more in [
        &["--passes", "4", "--compute-per-gib", "500ms"][..],
        &["--passes", "3"],
        &["--passes", "3", "--threads", "3"],
        // Little is kept in page-locked memory: the file is read in every pass, also while it ends.
        &["--passes", "3", "--page-locked", "1MiB", "--verify"],
        &["--passes", "1"],
    ] {
        let report = object(&file, &[more, &["--trace", text(&out)]].concat());
        let trace: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
        assert_eq!(trace["otherData"]["clock"], "modelled");
        assert_eq!(trace["otherData"]["dropped"], 0);
        let tracks = slices(&trace);
        let passes = report["passes"].as_array().unwrap();
        let streamed: u64 = passes.iter().map(|pass| pass["h2d_bytes"].as_u64().unwrap()).sum();
        let copies = &tracks[&LINK];
        assert_eq!(copies.iter().map(|slice| slice.3).sum::<u64>(), streamed, "{more:?}");
        assert!(copies.iter().all(|slice| slice.2.contains("blocks") || slice.2.contains('_')), "{copies:?}");
        let compute = tracks.get(&COMPUTE).map_or(0, Vec::len);
        let units = usize::try_from(report["units"].as_u64().unwrap()).unwrap();
        if more.contains(&"--compute-per-gib") {
            assert!(compute >= units * passes.len(), "{compute} pieces of {units} units");
        } else {
            assert_eq!(compute, 0);
        }
    }
}

#[test]
fn a_run_is_the_same_whether_it_is_recorded_or_not() {
    let (folder, file) = model();
    let more = ["--passes", "4", "--compute-per-gib", "300ms"];
    let without_wall = |mut report: Value| {
        for pass in report["passes"].as_array_mut().unwrap() {
            pass.as_object_mut().unwrap().remove("wall_ms").unwrap();
        }
        report
    };
    let plain = without_wall(object(&file, &more));
    let (report, trace) = (folder.path().join("a.html"), folder.path().join("b.json"));
    let outputs = ["--report", text(&report), "--trace", text(&trace)];
    assert_eq!(plain, without_wall(object(&file, &[&more[..], &outputs].concat())));
    assert_eq!(names(&folder), ["a.html", "b.json", "model.safetensors"]);
}

/// A text of a picture: its box, and what it says.
#[derive(Debug)]
struct Label {
    from: (f64, f64),
    to: (f64, f64),
    text: String,
}

fn attribute<'t>(tag: &'t str, name: &str) -> &'t str {
    let (_, rest) = tag.split_once(&format!(" {name}=\"")).unwrap_or_else(|| panic!("no {name} in {tag}"));
    rest.split('"').next().unwrap()
}

fn labels(svg: &str) -> Vec<Label> {
    let number = |tag: &str, name: &str| attribute(tag, name).parse::<f64>().unwrap();
    svg.split("<text")
        .skip(1)
        .map(|rest| {
            let (tag, rest) = rest.split_once('>').unwrap();
            let text = rest.split("</text>").next().unwrap().trim().to_owned();
            let size = number(tag, "font-size");
            #[expect(clippy::cast_precision_loss, reason = "characters of a label")]
            let width = text.chars().count() as f64 * size * 0.58;
            let (x, y) = (number(tag, "x"), number(tag, "y"));
            let left = match attribute(tag, "text-anchor") {
                "start" => x,
                "middle" => x - width / 2.0,
                _ => x - width,
            };
            Label { from: (left, y - size / 2.0), to: (left + width, y + size / 2.0), text }
        })
        .collect()
}

#[test]
fn a_report_is_one_file_whose_labels_do_not_overlap() {
    let (folder, file) = model();
    let out = folder.path().join("report.html");
    for more in [
        &["--passes", "1"][..],
        &["--passes", "2", "--threads", "2"],
        &["--passes", "5", "--compute-per-gib", "500ms"],
        &["--passes", "60", "--compute-per-gib", "100ms"],
    ] {
        object(&file, &[more, &["--report", text(&out)]].concat());
        let page = fs::read_to_string(&out).unwrap();
        assert!(page.starts_with("<!DOCTYPE html>") && page.trim_end().ends_with("</html>"));
        assert!(page.len() < 4 << 20, "{} bytes", page.len());
        let foreign = page.replace("http://www.w3.org/2000/svg", "");
        for word in ["http:", "https:", "<script", "<link", "<img", "@import", "url("] {
            assert!(!foreign.contains(word), "{word} in a page that asks nothing of the net");
        }
        let svgs: Vec<&str> =
            page.split("<svg").skip(1).map(|part| part.split("</svg>").next().unwrap()).collect();
        let passes = more[1].parse::<u32>().unwrap();
        assert_eq!(svgs.len(), if passes == 1 { 2 } else { 3 }, "{more:?}");
        for svg in svgs {
            let (width, height) = (attribute(svg, "width"), attribute(svg, "height"));
            let (width, height): (f64, f64) = (width.parse().unwrap(), height.parse().unwrap());
            let labels = labels(svg);
            assert!(labels.len() > 5, "{labels:?}");
            for (place, one) in labels.iter().enumerate() {
                let inside =
                    one.from.0 >= 0.0 && one.from.1 >= 0.0 && one.to.0 <= width && one.to.1 <= height;
                assert!(inside, "{one:?} leaves a picture of {width} x {height}");
                for other in &labels[place + 1..] {
                    let apart = one.to.0 <= other.from.0
                        || other.to.0 <= one.from.0
                        || one.to.1 <= other.from.1
                        || other.to.1 <= one.from.1;
                    assert!(apart, "{more:?}: {one:?} and {other:?} overlap");
                }
            }
            assert!(labels.iter().any(|label| label.text.contains("pass")), "{labels:?}");
        }
        // Each picture has its legend and says how to read it.
        assert_eq!(page.matches("How to read it:").count(), page.matches("<figure>").count());
        assert!(page.matches("class=\"key\"").count() >= 3 * page.matches("<figure>").count());
        assert!(page.contains("modelled clock"), "whose times these are");
    }
    assert_eq!(names(&folder), ["model.safetensors", "report.html"]);
}

#[test]
fn an_output_that_cannot_be_written_is_refused_before_the_run_and_leaves_nothing() {
    let (folder, file) = model();
    let nowhere = folder.path().join("no/such/folder/out");
    let twice = folder.path().join("out");
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let before = fs::read(&file).unwrap();
    for (outputs, why) in [
        (vec!["--report", text(&nowhere)], "No such file"),
        (vec!["--trace", text(&nowhere)], "No such file"),
        (vec!["--report", text(folder.path())], "not a regular file"),
        (vec!["--report", "/dev/null"], "not a regular file"),
        (vec!["--report", text(&link)], "it is the model"),
        (vec!["--trace", text(&file)], "it is the model"),
        (vec!["--report", text(&twice), "--trace", text(&twice)], "twice"),
        (vec!["--report", ""], ""),
    ] {
        let output = run(&[&["run", text(&file), "--device", CARD, "--json"], &outputs[..]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{outputs:?}: {stderr}");
        assert!(stderr.contains(why) && !stderr.contains("panicked"), "{outputs:?}: {stderr}");
        assert_eq!(output.stdout, b"");
        assert_eq!(names(&folder), ["link", "model.safetensors"], "{outputs:?}");
    }
    assert!(before == fs::read(&file).unwrap(), "the model is as it was");
    // A run that fails later leaves nothing either, and a file that was there stays what it was.
    fs::write(&twice, "precious").unwrap();
    let args = ["run", text(&file), "--device", "emulated:64KiB,page=64KiB", "--report", text(&twice)];
    assert_eq!(run(&args).status.code(), Some(1));
    assert_eq!(fs::read(&twice).unwrap(), b"precious");
    assert_eq!(names(&folder), ["link", "model.safetensors", "out"]);
}

fn interrupt(child: &Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

#[test]
fn ctrl_c_leaves_no_half_file() {
    let (folder, file) = model();
    let (report, trace) = (folder.path().join("report.html"), folder.path().join("trace.json"));
    let args = ["run", text(&file), "--device", CARD, "--passes", "100000"];
    let child = Command::new(BIN)
        .args([&args[..], &["--report", text(&report), "--trace", text(&trace)]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.unwrap();
    while names(&folder).len() < 3 {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(50));
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(names(&folder), ["model.safetensors"]);
}
