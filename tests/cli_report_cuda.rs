//! What a run on a card with a clock of its own writes about itself: times are the host's, and it says so.

#![cfg(all(feature = "cli", feature = "cuda"))]
#![expect(unsafe_code, reason = "loads the stand-in")]

mod standin;

use std::process::Command;

use serde_json::Value;
use standin::standin;

#[test]
fn on_a_card_with_its_own_clock_the_page_and_the_trace_say_whose_times_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (file, page, trace) = (at("model.safetensors"), at("run.html"), at("run.json"));
    let program = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_vram-pager"))
            .args(args)
            .env_remove("RUST_LOG")
            .env("LD_LIBRARY_PATH", standin().folder())
            .env("VRAM_PAGER_STANDIN_PAGE", "64KiB")
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {errors}");
        (serde_json::from_slice::<Value>(&output.stdout), errors)
    };
    let _ = program(&["synth", "--like", "flux1-dev", "--scale", "0.02", "--out", &file]);
    let card = ["--device", "cuda:0,cap=4MiB,page=64KiB", "--compute-per-gib", "30ms", "--json"];
    let outputs = ["--passes", "3", "--report", &page, "--trace", &trace];
    let (run, errors) = program(&[&["run", &file], &card[..], &outputs].concat());
    let run = run.unwrap();
    assert!(errors.contains("--compute-per-gib is a hint"), "{errors}");
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains("host&#39;s clock") || page.contains("host's clock"), "whose times these are");
    assert!(page.contains("<svg") && page.contains("Where every page was"));
    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    assert_eq!(trace["otherData"]["clock"], "wall");
    // What the link did is not seen, but what was asked of it is.
    let asked: u64 = trace["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|event| event["args"]["asked_for_bytes"].as_u64())
        .sum();
    let passes = run["passes"].as_array().unwrap();
    let copied: u64 = passes.iter().map(|pass| pass["h2d_bytes"].as_u64().unwrap()).sum();
    assert!(asked > 0 && asked <= copied, "{asked} of {copied}");

    // The plan of the same card is that of the run.
    let (plan, errors) = program(&[&["plan", &file], &card[..]].concat());
    let plan = plan.unwrap();
    assert_eq!(errors, "");
    assert_eq!(plan["device"]["link_assumed"], true, "{plan}");
    for key in ["resident_bytes", "ring_bytes"] {
        assert_eq!(plan[key], run[key], "{key}: {plan}\n{run}");
    }
}
