//! `vram-pager devices`, and `run` on a card that is there, is not there, or can do less.
//!
//! Each run is a process of its own over the driver stand-in, with the settings that make it what it is.

#![cfg(all(feature = "cli", feature = "cuda"))]
#![expect(unsafe_code, reason = "loads the stand-in")]
#![expect(clippy::unwrap_used, reason = "helpers fail as a test does")]

mod standin;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use standin::standin;

/// Runs the program with a driver (or none) and settings of the stand-in.
fn program(driver: bool, settings: &[(&str, &str)], args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vram-pager"));
    command.args(args).env_remove("RUST_LOG");
    if driver {
        command.env("LD_LIBRARY_PATH", standin().folder());
    } else {
        command.env_remove("LD_LIBRARY_PATH");
    }
    for (name, value) in settings {
        command.env(format!("VRAM_PAGER_STANDIN_{name}"), value);
    }
    let output = command.output().unwrap();
    // A call that gives something back and is missing leaves it to the end of the process.
    let misuse = errors(&output).lines().any(|line| line.contains("MISUSE") && !line.contains("left behind"));
    assert!(!misuse, "{settings:?} {args:?}: {}", errors(&output));
    output
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", errors(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The entries of a kind in the answer of `devices --json`.
fn listed(settings: &[(&str, &str)], kind: &str) -> Vec<Value> {
    let answer = json(&program(true, settings, &["devices", "--json"]));
    let devices = answer["devices"].as_array().unwrap();
    devices.iter().filter(|device| device["kind"] == kind).cloned().collect()
}

#[test]
fn what_is_here_is_listed_with_what_it_can_do() {
    let cards = listed(&[("DEVICES", "2"), ("BYTES", "64MiB")], "cuda");
    assert_eq!(cards.len(), 2);
    for (number, card) in cards.iter().enumerate() {
        assert_eq!(card["device"], format!("cuda:{number}"));
        assert_eq!(card["usable"], true);
        assert_eq!(card["total_bytes"], 64 << 20);
        assert_eq!(card["granularity_bytes"], 2 << 20);
        assert_eq!(card["compute_capability"], "9.0");
        assert_eq!(card["driver"], "CUDA 12.6");
        assert_eq!(card["kernels"], true);
    }
    assert_eq!(listed(&[], "emulated")[0]["usable"], true);
    let text = String::from_utf8(program(true, &[], &["devices"]).stdout).unwrap();
    assert!(text.contains("cuda:0") && text.contains("CUDA stand-in 0"), "{text}");
}

#[test]
fn a_card_with_less_says_why() {
    let card = &listed(&[("VMM", "refuse"), ("POOLS", "0")], "cuda")[0];
    assert_eq!((&card["usable"], &card["virtual_memory"]), (&true.into(), &false.into()));
    assert!(card["virtual_memory_reason"].as_str().unwrap().contains("answered"), "{card}");
    assert_eq!(card["stream_ordered_pools"], false);
    let card = &listed(&[("MISSING", "cuLaunchKernel")], "cuda")[0];
    assert_eq!((&card["kernels"], &card["missing_symbols"][0]), (&false.into(), &"cuLaunchKernel".into()));
}

#[test]
fn what_cannot_be_used_says_what_to_do_and_run_ends_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let file = model(folder.path());
    for (settings, part) in [
        (&[("DEVICES", "0")][..], "CUDA_VISIBLE_DEVICES"),
        (&[("VERSION", "11040")], "CUDA 12.0 or newer"),
        (&[("MISSING", "cuMemGetInfo_v2")], "cuMemGetInfo_v2"),
        (&[("MISSING", "cuMemcpyHtoD_v2,cuMemcpyHtoDAsync_v2")], "cuMemcpyHtoDAsync_v2 or cuMemcpyHtoD_v2"),
    ] {
        let card = &listed(settings, "cuda")[0];
        assert_eq!(card["usable"], false);
        assert!(card["reason"].as_str().unwrap().contains(part), "{card}");
        let output = program(true, settings, &["run", &file, "--device", "cuda:0"]);
        assert_eq!(output.status.code(), Some(2), "{}", errors(&output));
        assert!(errors(&output).contains(part), "{}", errors(&output));
        assert!(output.stdout.is_empty());
    }
    let output = program(true, &[], &["run", &file, "--device", "cuda:7"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(errors(&output).contains("there is one card, cuda:0"), "{}", errors(&output));
}

/// Only where the machine has no driver of its own, as CI has none.
#[test]
fn without_a_driver_the_list_still_stands() {
    let answer = json(&program(false, &[], &["devices", "--json"]));
    let devices = answer["devices"].as_array().unwrap();
    assert!(devices.iter().any(|device| device["kind"] == "emulated"));
    let card = devices.iter().find(|device| device["kind"] == "cuda").unwrap();
    assert!(card["usable"] == true || card["reason"].as_str().unwrap().contains("driver"), "{card}");
}

/// A model of 3 MiB.
fn model(folder: &Path) -> String {
    let path = folder.join("model.safetensors");
    let output = Command::new(env!("CARGO_BIN_EXE_vram-pager"))
        .args(["synth", "--like", "flux1-dev", "--scale", "0.02", "--out"])
        .arg(&path)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", errors(&output));
    path.to_str().unwrap().to_owned()
}

/// Runs the model on a card a quarter of its size, every byte checked.
fn verified(settings: &[(&str, &str)], file: &str) -> (Value, String) {
    let bytes = std::fs::metadata(file).unwrap().len();
    let card = (bytes / 2).next_multiple_of(65536);
    let card = format!("cuda:0,cap={card},page=64KiB");
    let mut all = vec![("PAGE", "64KiB")];
    all.extend_from_slice(settings);
    let output = program(true, &all, &["run", file, "--device", &card, "--verify", "--json"]);
    let answer = json(&output);
    assert_eq!(answer["mismatches"], 0, "{settings:?}: {answer}");
    assert!(answer["verified_units"].as_u64().unwrap() > 0);
    assert_eq!(answer["device"]["kind"], "cuda");
    (answer, errors(&output))
}

#[test]
fn a_run_is_verified_by_kernels_or_says_that_the_host_compares() {
    let folder = tempfile::tempdir().unwrap();
    let file = model(folder.path());
    let (answer, said) = verified(&[], &file);
    assert_eq!(answer["verified_by"], "kernel");
    assert!(!said.contains("runs no kernels"), "{said}");
    for settings in [
        [("MISSING", "cuModuleLoadDataEx")],
        [("MISSING", "cuModuleGetFunction")],
        [("MISSING", "cuLaunchKernel")],
        [("MISSING", "cuModuleLoadDataEx,cuModuleUnload,cuModuleGetFunction,cuLaunchKernel")],
        [("FAIL", "cuModuleLoadDataEx@1+=801")],
        [("FAIL", "cuModuleLoadDataEx@1+=200")],
        [("FAIL", "cuLaunchKernel@1+=801")],
    ] {
        let (answer, said) = verified(&settings, &file);
        assert_eq!(answer["verified_by"], "host", "{settings:?}");
        assert_eq!(said.matches("runs no kernels").count(), 1, "{settings:?}: {said}");
    }
}

/// Everything that a run can do without.
const OPTIONAL: &[&str] = &[
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxGetStreamPriorityRange",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolSetAttribute",
    "cuMemPoolGetAttribute",
    "cuMemPoolTrimTo",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuStreamCreateWithPriority",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
];

#[test]
fn a_driver_that_exports_only_a_few_synchronous_calls_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let file = model(folder.path());
    // One at a time, and all at once.
    for name in OPTIONAL {
        verified(&[("MISSING", name)], &file);
    }
    let (answer, _) = verified(&[("MISSING", &OPTIONAL.join(","))], &file);
    assert_eq!(answer["verified_by"], "host");
}
