//! The scenarios of the described system, played by the program: each must be answered exactly, and what
//! cannot be played must be refused with exit code 2 and a reason.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]
#![cfg(feature = "cli")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

fn replay(arguments: &[&str], scenario: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vram-pager"))
        .arg("replay")
        .args(arguments)
        .arg(scenario)
        .output()
        .expect("the program runs")
}

fn scenarios() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("the scenarios are there")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    files
}

fn written(scenario: &Value) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), scenario.to_string()).unwrap();
    file
}

#[test]
fn every_given_scenario_is_answered_as_the_described_system_answers_it() {
    let files = scenarios();
    assert!(files.len() >= 26, "only {} scenarios", files.len());
    for file in files {
        let scenario: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let output = replay(&[], &file);
        assert_eq!(output.status.code(), Some(0), "{}: {output:?}", file.display());
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["name"], scenario["name"]);
        let (steps, expected) =
            (answer["steps"].as_array().unwrap(), scenario["expected"].as_array().unwrap());
        assert_eq!(steps.len(), expected.len(), "{}", file.display());
        for (index, (step, expected)) in steps.iter().zip(expected).enumerate() {
            assert_eq!(step, expected, "{} at op {index}: {}", file.display(), scenario["ops"][index]);
        }
    }
}

fn small() -> Value {
    json!({
        "name": "small",
        "cards": [{"id": "gpu0", "total_mib": 8192}],
        "models": [
            {"id": "A", "card": "gpu0", "size_mib": 1024},
            {"id": "D", "card": "gpu0", "size_mib": 1024, "dynamic": true},
        ],
        "ops": [{"op": "load", "models": ["A"]}],
    })
}

#[test]
fn a_checked_replay_fails_where_the_answer_differs() {
    let mut scenario = small();
    scenario["expected"] =
        json!([{"op": "load", "ledger": [], "free_mib": {}, "unloaded": [], "cache_emptied": false}]);
    let output = replay(&["--check"], written(&scenario).path());
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("op 0 differs"), "{error}");
}

#[test]
fn a_scenario_that_cannot_be_played_is_refused_with_the_reason() {
    let with = |pointer: &str, value: Value| {
        let mut scenario = small();
        *scenario.pointer_mut(pointer).unwrap() = value;
        scenario
    };
    let table = [
        (json!([]), "struct Scenario"),
        (with("/cards", json!([])), "no cards"),
        (with("/cards/0/total_mib", json!(-1)), "-1"),
        (with("/cards/0/total_mib", json!(u64::MAX)), "2^64"),
        (with("/cards", json!([{"id": "g", "total_mib": 1}, {"id": "g", "total_mib": 1}])), "two cards"),
        (with("/models/0/card", json!("gpu9")), "`gpu9`"),
        (with("/models/0/id", json!("D")), "two models"),
        (with("/models/0", json!({"id": "A", "card": "gpu0", "size_mib": 1, "granule_mib": 0})), "granule"),
        (with("/models/0", json!({"id": "A", "card": "gpu0", "size_mib": 1, "clone_of": "Z"})), "`Z`"),
        (with("/models/0", json!({"id": "A", "card": "gpu0", "size_mib": 1, "clone_of": "A"})), "`A`"),
        (with("/models/0", json!({"id": "A", "card": "gpu0", "size_mib": 1, "clone_of": "D"})), "differs"),
        (with("/ops/0", json!({"op": "levitate"})), "levitate"),
        (with("/ops/0", json!({"op": "load", "models": ["A"], "memory": 1})), "memory"),
        (with("/ops/0", json!({"op": "load", "models": ["Q"]})), "`Q`"),
        (with("/ops/0", json!({"op": "load"})), "models"),
        (with("/ops/0", json!({"op": "free", "card": "gpu7", "mib": 1})), "`gpu7`"),
        (with("/ops/0", json!({"op": "touch", "model": "A", "loaded_mib": 1})), "not paged"),
        (with("/ops/0", json!({"op": "touch", "model": "D", "loaded_mib": 4096})), "4096"),
        (with("/ops/0", json!({"op": "drop", "model": "Q"})), "`Q`"),
    ];
    for (scenario, reason) in table {
        let output = replay(&[], written(&scenario).path());
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{scenario}: {error}");
        assert!(error.contains(reason), "{scenario}: {error}");
        assert!(output.stdout.is_empty());
    }
    let mut scenario = small();
    scenario["expectd"] = json!([]);
    assert_eq!(replay(&[], written(&scenario).path()).status.code(), Some(2), "a misspelt name");
    let mut scenario = small();
    scenario["config"] = json!({"vram_state": "enormous"});
    assert_eq!(replay(&[], written(&scenario).path()).status.code(), Some(2));
    scenario["config"] = json!({"min_weight_memory_ratio": 1.5});
    assert_eq!(replay(&[], written(&scenario).path()).status.code(), Some(2));
    assert_eq!(replay(&[], Path::new("/nowhere/at/all.json")).status.code(), Some(2));
    assert_eq!(
        replay(&["--check"], written(&small()).path()).status.code(),
        Some(2),
        "nothing to check against"
    );
}

#[test]
fn an_answer_that_cannot_be_written_is_an_error() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let scenario = written(&small());
    let mut command = Command::new(env!("CARGO_BIN_EXE_vram-pager"));
    let output = command.arg("replay").arg(scenario.path()).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("cannot write to standard output"));
}

/// Plays `ops` on one 8 GiB card with models A and B (1 GiB each), A2 (a clone of A) and D (paged), and
/// answers the steps.
fn play(ops: &Value) -> Vec<Value> {
    let scenario = json!({
        "name": "test",
        "cards": [{"id": "gpu0", "total_mib": 8192}, {"id": "gpu1", "total_mib": 4096}],
        "models": [
            {"id": "A2", "card": "gpu0", "size_mib": 1024, "clone_of": "A"},
            {"id": "A", "card": "gpu0", "size_mib": 1024, "additional": ["B"]},
            {"id": "B", "card": "gpu0", "size_mib": 1024},
            {"id": "D", "card": "gpu0", "size_mib": 1024, "dynamic": true},
            {"id": "A3", "card": "gpu1", "size_mib": 1024, "clone_of": "A"},
        ],
        "ops": ops,
    });
    let output = replay(&[], written(&scenario).path());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    answer["steps"].as_array().unwrap().clone()
}

fn ids(step: &Value) -> Vec<&str> {
    step["ledger"].as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap()).collect()
}

#[test]
fn every_op_of_the_format_is_played() {
    let steps = play(&json!([
        {"op": "load", "models": ["A", "B", "D"]},
        {"op": "load", "models": ["A2"]},
        {"op": "other", "card": "gpu0", "mib": 512},
        {"op": "activations", "card": "gpu0", "active_mib": 100, "cached_mib": 200},
        {"op": "soft_empty_cache"},
        {"op": "touch", "model": "D", "loaded_mib": 128},
        {"op": "drop", "model": "A2"},
        {"op": "unload_model_and_clones", "model": "A"},
        {"op": "set_reserve", "mib": 0},
        {"op": "free", "card": "gpu0", "mib": 0, "keep_loaded": ["B"]},
        {"op": "unload_all"},
    ]));
    assert_eq!(ids(&steps[0]), ["A", "B", "D"]);
    assert_eq!(ids(&steps[1]), ["A2", "B", "D"], "a clone takes its model's place in front");
    assert_eq!(steps[1]["free_mib"]["gpu0"], 8192 - 2048, "clones share one set of weights");
    assert_eq!(steps[2]["free_mib"]["gpu0"], 8192 - 2048 - 512);
    assert_eq!(steps[3]["free_mib"]["gpu0"], 8192 - 2048 - 512 - 100, "idle cache counts as free");
    assert_eq!(steps[4]["cache_emptied"], true);
    assert_eq!(steps[5]["free_mib"]["gpu0"], 8192 - 2048 - 512 - 100 - 128);
    assert_eq!(ids(&steps[6]), ["A", "B", "D"], "a clone's death hands its entry to the model");
    assert_eq!(ids(&steps[7]), ["D"]);
    assert_eq!(steps[7]["unloaded"], json!(["B", "A"]));
    assert_eq!(ids(&steps[9]), ["D"]);
    assert_eq!(steps[10]["unloaded"], json!(["D"]));
}

#[test]
fn a_copy_on_another_card_is_of_the_family_but_no_clone() {
    let steps = play(&json!([
        {"op": "load", "models": ["A", "A3"]},
        {"op": "unload_model_and_clones", "model": "A"},
        {"op": "load", "models": ["A"]},
        {"op": "unload_model_and_clones", "model": "A", "all_devices": true},
    ]));
    assert_eq!(ids(&steps[0]), ["A", "A3"]);
    assert_eq!(ids(&steps[1]), ["A3"]);
    assert_eq!(ids(&steps[3]), [] as [&str; 0]);
    assert_eq!(steps[3]["unloaded"], json!(["A", "A3"]));
}
