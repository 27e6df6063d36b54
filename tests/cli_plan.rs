//! `vram-pager plan` says what `run` then does.
//!
//! A plan is taken without a card; a run is what it is held to: the same arguments on emulated cards of many
//! sizes, and for the sizes of card it names, runs on a card of just that size and on one a page smaller.

#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vram-pager")).args(args).env_remove("RUST_LOG").output().unwrap()
}

#[track_caller]
fn object(args: &[&str]) -> Value {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A model of BF16 tensors of these rows of `columns`, in a folder of its own: a header and a hole.
fn model(rows: impl IntoIterator<Item = u64>, columns: u64) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (number, rows) in rows.into_iter().enumerate() {
        let begin = end;
        end += rows * columns * 2;
        let entry = json!({"dtype": "BF16", "shape": [rows, columns], "data_offsets": [begin, end]});
        header.insert(format!("blocks.{number:03}.weight"), entry);
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = File::create(&path).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&text).unwrap();
    file.set_len(8 + text.len() as u64 + end).unwrap();
    (folder, path)
}

/// Sixty units of 37 to 330 KiB.
fn uneven() -> (TempDir, PathBuf) {
    model((0..60_u64).map(|unit| 300 + unit * 7919 % 2345), 64)
}

/// Forty equal units and four that are ten times as large.
fn with_large_ones() -> (TempDir, PathBuf) {
    model((0..44_u64).map(|unit| if unit % 11 == 5 { 8000 } else { 800 }), 64)
}

/// Three units of 1.5 MiB: on small cards they go in pieces.
fn few_and_large() -> (TempDir, PathBuf) {
    model([12_000, 12_000, 12_000], 64)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"))
}

/// A plan, and the run that it is of, compared.
#[track_caller]
fn compare(file: &Path, device: &str, more: &[&str]) {
    let args = [&["--device", device, "--json", text(file)], more].concat();
    let plan = object(&[&["plan"], &args[..]].concat());
    let run = object(&[&["run", "--passes", "6"], &args[..]].concat());
    let said = format!("{device} {more:?}\nplan {plan}\nrun {run}");
    for key in
        ["resident_bytes", "ring_bytes", "headroom_bytes", "weights_bytes", "largest_streamed_part_bytes"]
    {
        assert_eq!(plan[key], run[key], "{key}: {said}");
    }
    assert_eq!(plan["device"]["total_bytes"], run["device"]["total_bytes"], "{said}");
    // Small gaps between tensors are copied along, or not, as runs of pages happen to be cut.
    let gaps = 256 * number(&plan, "units");
    let passes = run["passes"].as_array().unwrap();
    for pass in &passes[3..] {
        let (planned, copied) = (number(&plan, "streamed_bytes"), number(pass, "h2d_bytes"));
        assert!(planned.abs_diff(copied) <= gaps, "pass {}: {said}", pass["pass"]);
    }
    // Modelled, so no machine makes it late. Which copies are asked for in one call differs a little where
    // bytes are read from a file.
    let planned = plan["pass_ms"].as_f64().unwrap();
    let took: f64 = passes[4..].iter().map(|pass| pass["modelled_ms"].as_f64().unwrap()).sum::<f64>() / 2.0;
    assert!((planned - took).abs() <= took * 0.2 + 0.02, "{planned} ms planned, {took} ms modelled: {said}");
}

#[test]
fn a_plan_says_what_a_run_with_the_same_arguments_does() {
    for (_folder, file) in [uneven(), with_large_ones(), few_and_large()] {
        for card in [3 * MIB, 4 * MIB, 5 * MIB + 448 * KIB, 8 * MIB, 32 * MIB] {
            let device = format!("emulated:{card},page=64KiB,link=10GB/s");
            compare(&file, &device, &[]);
            compare(&file, &device, &["--compute-per-gib", "90ms"]);
        }
        compare(&file, "emulated:6MiB,page=64KiB", &["--headroom", "0"]);
        compare(&file, "emulated:6MiB,page=256KiB", &["--reserve-vram", "0.0001"]);
        compare(&file, "emulated:64MiB", &["--compute-per-gib", "1s"]);
    }
}

#[test]
fn a_plan_of_a_published_layout_says_what_its_run_does() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("model.safetensors");
    for (like, scale) in [("flux1-dev", "0.03"), ("llama3-8b", "0.04")] {
        let args = ["synth", "--like", like, "--scale", scale, "--force", "--out", text(&file)];
        assert!(run(&args).status.success());
        let bytes = std::fs::metadata(&file).unwrap().len();
        for share in [4, 2] {
            let card = (bytes / share).next_multiple_of(64 * KIB);
            compare(&file, &format!("emulated:{card},page=64KiB"), &["--compute-per-gib", "40ms"]);
        }
    }
}

#[test]
fn without_virtual_memory_calls_a_plan_holds_too() {
    let (_folder, file) = uneven();
    for card in ["emulated:4MiB,page=64KiB,vmm=none", "emulated:40MiB,vmm=none"] {
        let args = ["--device", card, "--json", text(&file)];
        let plan = object(&[&["plan"], &args[..]].concat());
        let run = object(&[&["run", "--passes", "5"], &args[..]].concat());
        for key in ["resident_bytes", "ring_bytes"] {
            assert_eq!(plan[key], run[key], "{key}: {plan}\n{run}");
        }
        assert_eq!(plan["streamed_bytes"], run["passes"][4]["h2d_bytes"], "{plan}\n{run}");
    }
}

/// The pool takes a few passes until the blocks that stay are where they stay.
#[test]
fn a_plan_without_virtual_memory_calls_is_of_passes_that_have_settled() {
    for (step, most, card) in [(850, 1022, 2560), (1763, 2810, 4928)] {
        let (_folder, file) = model((0..24_u64).map(|unit| 300 + unit * step % most), 64);
        let card = format!("emulated:{card}KiB,page=64KiB,bytes=none,vmm=none");
        let args = ["--device", &card, "--json", text(&file)];
        let plan = object(&[&["plan"], &args[..]].concat());
        let run = object(&[&["run", "--passes", "12"], &args[..]].concat());
        let copied = |pass: usize| &run["passes"][pass]["h2d_bytes"];
        assert!(copied(11) == copied(10) && copied(11) != copied(4), "it settles late: {run}");
        assert_eq!(&plan["streamed_bytes"], copied(11), "{plan}\n{run}");
        for key in ["resident_bytes", "ring_bytes"] {
            assert_eq!(plan[key], run[key], "{key}: {plan}\n{run}");
        }
    }
}

#[test]
fn the_smallest_card_runs_the_model_and_one_a_page_smaller_does_not() {
    const PAGE: u64 = 64 * KIB;
    for (_folder, file) in [uneven(), with_large_ones(), few_and_large()] {
        let on = |command: &str, card: u64| {
            let device = format!("emulated:{card},page=64KiB");
            run(&[command, text(&file), "--device", &device, "--passes=3", "--json"]
                [..if command == "run" { 6 } else { 4 }])
        };
        let plan = object(&["plan", text(&file), "--device", "emulated:5MiB,page=64KiB", "--json"]);
        let smallest = number(&plan, "smallest_card_bytes");
        assert!(smallest >= PAGE && smallest.is_multiple_of(PAGE), "{plan}");
        let output = on("run", smallest);
        assert!(output.status.success(), "{smallest}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(on("run", smallest - PAGE).status.code() == Some(1), "{smallest} is not the smallest");
        let device = format!("emulated:{},page=64KiB", smallest - PAGE);
        let refused = object(&["plan", text(&file), "--device", &device, "--json"]);
        assert_eq!((&refused["runs"], &refused["pass_ms"]), (&json!(false), &json!(null)), "{refused}");

        let holds = number(&plan, "resident_from_bytes");
        let copied = |card: u64| {
            let run: Value = serde_json::from_slice(&on("run", card).stdout).unwrap();
            number(&run["passes"][2], "h2d_bytes")
        };
        assert_eq!(copied(holds), 0, "{holds}");
        assert!(copied(holds - PAGE) > 0, "{holds} is not the smallest that holds it");
    }
}

#[test]
fn a_model_and_a_card_larger_than_this_machine_are_planned_from_the_header_alone() {
    // 96 units of 1 GiB: a file that is nothing but a header and a hole.
    let (_folder, file) = model((0..96).map(|_| 131_072), 4096);
    let plan = object(&["plan", text(&file), "--device", "emulated:24GiB,link=50GB/s", "--json"]);
    assert_eq!(number(&plan, "weights_bytes"), 96 * GIB);
    let (stays, streams) = (number(&plan, "resident_bytes"), number(&plan, "streamed_bytes"));
    assert!(stays + streams >= 96 * GIB && stays < 24 * GIB, "{plan}");
    let link = f64::from(u32::try_from(streams / MIB).unwrap()) * 1.048_576 / 50.0;
    assert!((plan["link_ms"].as_f64().unwrap() - link).abs() < 1.0, "{link}: {plan}");
    assert!(plan["pass_ms"].as_f64().unwrap() >= link * 0.999, "{plan}");
    let all = object(&["plan", text(&file), "--device", "emulated:1024GiB", "--json"]);
    assert_eq!((number(&all, "streamed_bytes"), number(&all, "ring_bytes")), (0, 0));
    assert!(number(&all, "resident_bytes") >= 96 * GIB);
    // The same card is named whatever card is asked about.
    for key in ["smallest_card_bytes", "resident_from_bytes"] {
        assert_eq!(plan[key], all[key], "{key}");
    }
}

#[test]
fn a_plan_names_units_that_are_kept_first_or_cut() {
    let (_folder, file) = few_and_large();
    let plan = object(&["plan", text(&file), "--device", "emulated:2MiB,page=64KiB", "--json"]);
    assert_eq!(plan["in_pieces"], json!(["blocks.000", "blocks.001", "blocks.002"]));
    let output = run(&["plan", text(&file), "--device", "emulated:2MiB,page=64KiB"]);
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && shown.contains("in pieces:      blocks.000"), "{shown}");
    for words in ["stays:", "streams:", "a pass takes:", "runs from:", "no streaming:"] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    assert_eq!(output.stderr, b"", "a rehearsal says nothing");
}

#[test]
fn a_plan_refuses_what_a_run_refuses() {
    let (folder, file) = few_and_large();
    let missing = folder.path().join("none.safetensors");
    for args in [
        vec!["plan", text(&missing)],
        vec!["plan", text(folder.path())],
        vec!["plan", text(&file), "--device", "emulatd:4GiB"],
        vec!["plan", text(&file), "--device", "emulated:4GiB", "--compute-per-gib", "30"],
        vec!["plan", text(&file), "--device", "emulated:4GiB", "--reserve-vram", "nan"],
    ] {
        let output = run(&args);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(output.stdout.is_empty() && !stderr.contains("panicked"), "{args:?}: {stderr}");
    }
}

#[test]
fn compute_makes_a_pass_longer_by_what_the_link_does_not_hide() {
    let (_folder, file) = uneven();
    let took = |device: &str, more: &[&str]| {
        let args = [&["run", text(&file), "--device", device, "--passes", "5", "--json"], more].concat();
        object(&args)["passes"][4]["modelled_ms"].as_f64().unwrap()
    };
    // Everything stays: a pass is its compute. 12.4 MiB at 1 s a GiB.
    let weights = std::fs::metadata(&file).unwrap().len();
    #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
    let compute = weights as f64 / GIB as f64 * 1e3;
    let resident = took("emulated:40MiB,page=64KiB", &["--compute-per-gib", "1s"]);
    assert!((resident - compute).abs() < compute * 0.02, "{resident} ms for {compute} ms of compute");
    // A quarter stays: the link hides behind compute that is far longer.
    let streamed = took("emulated:4MiB,page=64KiB", &["--compute-per-gib", "1s"]);
    assert!(streamed >= resident * 0.999 && streamed < resident * 1.05, "{streamed} ms, {resident} ms");
}

#[test]
fn help_shows_examples() {
    for command in ["plan", "run"] {
        let output = run(&[command, "--help"]);
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(help.contains("Examples:") && help.contains("--compute-per-gib 30ms"), "{help}");
    }
}
