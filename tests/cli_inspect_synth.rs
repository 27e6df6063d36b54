//! The command line's `inspect` and `synth` keep their promises to scripts: exit codes, one JSON object,
//! no half-written file whatever stops them, and no crash when a reader leaves.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::TempDir;

const BIN: &str = env!("CARGO_BIN_EXE_vram-pager");

fn run(args: &[&str]) -> Output {
    Command::new(BIN).args(args).output().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[track_caller]
fn object(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(stdout.lines().count(), 1, "one object and nothing else");
    serde_json::from_str(&stdout).unwrap()
}

/// Runs, expects this exit code and nothing on standard output, and gives standard error.
#[track_caller]
fn refused(args: &[&str], code: i32) -> String {
    let output = run(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(output.stdout, b"", "standard output is for results");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

fn names(dir: &TempDir) -> Vec<String> {
    fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// A synthetic model in a directory of its own.
fn model(like: &str, scale: &str) -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.safetensors");
    let output = run(&["synth", "--like", like, "--scale", scale, "--out", text(&path)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (dir, path)
}

#[test]
fn a_synthetic_checkpoint_is_valid_for_the_reference_and_is_inspected_whole() {
    for (like, tensors) in [("flux1-dev", 780), ("sdxl-unet", 1680), ("llama3-8b", 291), ("t5-xxl", 219)] {
        let (_dir, path) = model(like, "0.01");
        let bytes = fs::read(&path).unwrap();
        let reference = SafeTensors::deserialize(&bytes).unwrap();
        let report = object(&run(&["inspect", "--json", text(&path)]));
        assert_eq!(report["file"], text(&path));
        assert_eq!(report["bytes"], bytes.len());
        assert_eq!(report["tensors"].as_array().unwrap().len(), tensors);
        assert_eq!(reference.len(), tensors);
        let mut end = report["data_start"].as_u64().unwrap();
        for tensor in report["tensors"].as_array().unwrap() {
            let view = reference.tensor(tensor["name"].as_str().unwrap()).unwrap();
            assert_eq!(tensor["dtype"], view.dtype().to_string());
            assert_eq!(tensor["shape"], json!(view.shape()));
            assert_eq!(tensor["offset"], end, "absolute, in file order");
            let start = usize::try_from(end).unwrap();
            assert_eq!(&bytes[start..start + view.data().len()], view.data());
            end += tensor["bytes"].as_u64().unwrap();
        }
        assert_eq!(end, bytes.len() as u64);
        let units = report["units"].as_array().unwrap();
        let in_units: usize = units.iter().map(|unit| unit["tensors"].as_array().unwrap().len()).sum();
        assert_eq!(in_units, tensors, "each tensor in one unit");
        let unit_bytes: u64 = units.iter().map(|unit| unit["bytes"].as_u64().unwrap()).sum();
        assert_eq!(report["total_bytes"], unit_bytes);
        assert!(report.get("shards").is_none());
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_seed_others() {
    let (_dir, first) = model("t5-xxl", "0.01");
    let (dir, second) = model("t5-xxl", "0.01");
    assert!(fs::read(first).unwrap() == fs::read(&second).unwrap());
    let third = dir.path().join("third.safetensors");
    let args =
        ["synth", "--like", "t5-xxl", "--scale", "0.01", "--seed", "1", "--out", text(&third), "--json"];
    let report = object(&run(&args));
    assert_eq!(report["bytes"], fs::metadata(&third).unwrap().len());
    assert_eq!((&report["tensors"], &report["seed"]), (&json!(219), &json!(1)));
    assert!(fs::read(second).unwrap() != fs::read(third).unwrap());
}

#[test]
fn a_layout_of_ones_own_is_written_as_it_says() {
    let dir = TempDir::new().unwrap();
    let (layout, out) = (dir.path().join("layout.json"), dir.path().join("out.safetensors"));
    fs::write(
        &layout,
        r#"[{"name":"b.weight","dtype":"F8_E4M3","shape":[3,5]},{"name":"a","dtype":"F32","shape":[]},
            {"name":"q\"\n.weight","dtype":"F4","shape":[2,1]},{"name":"none","dtype":"I64","shape":[0,4]}]"#,
    )
    .unwrap();
    let report = object(&run(&["synth", "--layout", text(&layout), "--out", text(&out), "--json"]));
    assert_eq!(report["total_bytes"], 15 + 4 + 1);
    let report = object(&run(&["inspect", "--json", text(&out)]));
    let names: Vec<_> = report["tensors"].as_array().unwrap().iter().map(|tensor| &tensor["name"]).collect();
    assert_eq!(names, ["b.weight", "a", "q\"\n.weight", "none"]);
    let shown = run(&["inspect", text(&out)]).stdout;
    assert!(String::from_utf8(shown).unwrap().contains("q\"\\n"), "a name cannot break the table");
}

#[test]
fn a_bad_layout_is_refused_with_its_reason_and_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let layout = dir.path().join("layout.json");
    for (json, reason) in [
        ("", "EOF"),
        ("{}", "a sequence"),
        (r#"[{"name":"a","dtype":"F31","shape":[1]}]"#, "F31"),
        (r#"[{"name":"a","dtype":"F32","shape":[-1]}]"#, "-1"),
        (r#"[{"name":"a","dtype":"F32","shape":[1],"offset":3}]"#, "offset"),
        (r#"[{"name":"a","dtype":"F32"}]"#, "shape"),
        (r#"[{"name":"a","dtype":"F32","shape":[1]},{"name":"a","dtype":"U8","shape":[1]}]"#, "`a`"),
        (r#"[{"name":"__metadata__","dtype":"F32","shape":[1]}]"#, "__metadata__"),
        (r#"[{"name":"a","dtype":"F4","shape":[3]}]"#, "whole number of bytes"),
        (r#"[{"name":"a","dtype":"F32","shape":[4294967296,4294967296]}]"#, "64 bits"),
        (
            r#"[{"name":"a","dtype":"U8","shape":[2305843009213693951]},{"name":"b","dtype":"U8","shape":[2305843009213693951]},{"name":"c","dtype":"U8","shape":[2305843009213693951]},{"name":"d","dtype":"U8","shape":[2305843009213693951]},{"name":"e","dtype":"U8","shape":[2305843009213693951]}]"#,
            "no file can hold",
        ),
    ] {
        fs::write(&layout, json).unwrap();
        let out = dir.path().join("out.safetensors");
        let stderr = refused(&["synth", "--layout", text(&layout), "--out", text(&out), "--json"], 2);
        assert!(stderr.contains(reason), "{reason}: {stderr}");
        assert_eq!(names(&dir), ["layout.json"]);
    }
}

#[test]
fn an_existing_file_is_only_replaced_by_force() {
    let (dir, path) = model("t5-xxl", "0.001");
    fs::write(&path, "precious").unwrap();
    let args = ["synth", "--like", "t5-xxl", "--scale", "0.001", "--out", text(&path)];
    assert!(refused(&args, 2).contains("--force"));
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    assert!(run(&[&args[..], &["--force"]].concat()).status.success());
    assert!(SafeTensors::deserialize(&fs::read(&path).unwrap()).is_ok());
    let args = ["synth", "--like", "t5-xxl", "--out", text(dir.path()), "--force"];
    assert!(refused(&args, 2).contains("not a regular file"));
    assert!(
        refused(&["synth", "--like", "t5-xxl", "--out", "/dev/null", "--force"], 2).contains("/dev/null")
    );
    assert_eq!(names(&dir), ["model.safetensors"]);
}

#[test]
fn bad_usage_is_exit_code_two() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("no/such/dir/out.safetensors");
    refused(&[], 2);
    refused(&["inspect"], 2);
    refused(&["frobnicate"], 2);
    let neither = refused(&["synth", "--out", "x"], 2);
    assert!(neither.contains("--like") && neither.contains("--layout"), "{neither}");
    refused(&["synth", "--like", "gpt-9", "--out", "x"], 2);
    refused(&["synth", "--like", "t5-xxl", "--layout", "x", "--out", "y"], 2);
    refused(&["synth", "--layout", text(dir.path()), "--out", "y"], 2);
    for scale in ["0", "-1", "1.1", "NaN", "inf", "x"] {
        refused(&["synth", "--like", "t5-xxl", &format!("--scale={scale}"), "--out", "x"], 2);
    }
    assert!(
        refused(&["synth", "--like", "t5-xxl", "--scale", "0.01", "--out", text(&out)], 2)
            .contains("no/such")
    );
    let (_model, path) = model("t5-xxl", "0.001");
    for page in ["0", "100", "2MX", "-1", ""] {
        refused(&["inspect", text(&path), &format!("--page={page}")], 2);
    }
}

#[test]
fn what_cannot_be_inspected_is_exit_code_two_and_says_why() {
    let dir = TempDir::new().unwrap();
    let missing = dir.path().join("missing.safetensors");
    assert!(refused(&["inspect", text(&missing), "--json"], 2).contains("missing.safetensors"));
    assert!(refused(&["inspect", text(dir.path()), "--json"], 2).contains("directory"));
    let bad = dir.path().join("bad.safetensors");
    fs::write(&bad, "version https://git-lfs.github.com/spec/v1\n").unwrap();
    assert!(refused(&["inspect", text(&bad)], 2).contains("git lfs pull"));
    // An error with a terminal's control codes out of the file does not reach the terminal.
    let json = r#"{"\u001b[2J":{"dtype":"F99","shape":[],"data_offsets":[0,0]}}"#;
    fs::write(&bad, [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()).unwrap();
    let stderr = refused(&["inspect", text(&bad)], 2);
    assert!(stderr.contains("F99") && !stderr.contains('\x1b'), "{stderr}");
}

#[test]
fn a_sharded_model_is_inspected_through_its_index() {
    let dir = TempDir::new().unwrap();
    let shard = |name: &str, tensor: &str| {
        let json = format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}}}"#);
        let bytes = [&(json.len() as u64).to_le_bytes(), json.as_bytes(), b"abc"].concat();
        fs::write(dir.path().join(name), &bytes).unwrap();
        bytes.len()
    };
    let (one, two) = (shard("m-1.safetensors", "a.weight"), shard("m-2.safetensors", "a.longer_bias"));
    let index = dir.path().join("m.safetensors.index.json");
    let map = json!({"weight_map": {"a.weight": "m-1.safetensors", "a.longer_bias": "m-2.safetensors"}});
    fs::write(&index, map.to_string()).unwrap();
    let report = object(&run(&["inspect", text(&index), "--json"]));
    assert_eq!(report["file"], text(&index));
    assert_eq!(report["bytes"], one + two);
    assert_eq!(report["data_start"], one - 3);
    assert_eq!(report["shards"][1]["bytes"], two);
    assert_eq!(report["tensors"][1]["shard"], 1);
    assert_eq!(report["tensors"][1]["offset"], two - 3);
    assert_eq!(report["units"], json!([{"name": "a", "bytes": 6, "tensors": ["a.weight", "a.longer_bias"]}]));
}

#[test]
fn the_table_lists_small_models_and_summarises_large_ones() {
    let (_dir, path) = model("flux1-dev", "0.01");
    let shown = |args: &[&str]| {
        let output = run(&[&["inspect", text(&path)], args].concat());
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let short = shown(&[]);
    assert!(short.contains("single_blocks.*.linear1") && short.contains(" 38 "), "{short}");
    assert!(short.lines().count() < 60);
    let long = shown(&["--all", "--page", "64KiB"]);
    assert!(long.contains("single_blocks.37.linear1") && long.contains("64.0 KiB"));
    assert!(long.lines().count() > 780);
}

#[test]
fn a_reader_that_leaves_is_a_quiet_end() {
    let (_dir, path) = model("flux1-dev", "0.01");
    for args in [&["inspect", "--json"][..], &["inspect", "--all"]] {
        let mut child = Command::new(BIN)
            .args(args)
            .arg(&path)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        assert_eq!(output.status.code(), Some(0));
    }
}

#[test]
fn a_disk_that_takes_no_more_is_an_error_that_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out.safetensors");
    // The limit on a file's size fails a write in its middle, as a full disk does.
    let output = Command::new("bash")
        .args(["-c", "trap '' XFSZ; ulimit -f 500; exec \"$@\"", "bash", BIN])
        .args(["synth", "--like", "flux1-dev", "--scale", "0.1", "--out", text(&out)])
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("out.safetensors"), "{stderr}");
    assert_eq!(names(&dir), [""; 0]);
}

#[test]
fn what_no_disk_holds_is_refused_before_it_is_written() {
    let dir = TempDir::new().unwrap();
    let layout = dir.path().join("layout.json");
    fs::write(&layout, r#"[{"name":"w","dtype":"U8","shape":[1048576,1099511627776]}]"#).unwrap();
    let out = dir.path().join("out.safetensors");
    let said = refused(&["synth", "--layout", text(&layout), "--out", text(&out)], 1);
    assert!(said.contains("out.safetensors") && said.contains("(11529215046068"), "{said}");
    assert_eq!(names(&dir), ["layout.json"]);
}

/// What is said beside the answer is for whoever listens: a run goes on where nobody does.
#[test]
fn a_standard_error_that_takes_nothing_changes_no_answer() {
    let dir = TempDir::new().unwrap();
    let layout = dir.path().join("layout.json");
    fs::write(&layout, r#"[{"name":"w.weight","dtype":"F32","shape":[64,8192]}]"#).unwrap();
    let path = dir.path().join("model.safetensors");
    assert!(run(&["synth", "--layout", text(&layout), "--out", text(&path)]).status.success());
    let args = ["run", text(&path), "--device", "emulated:640KiB,page=64KiB", "--passes", "1", "--json"];
    let told = run(&args);
    assert!(String::from_utf8_lossy(&told.stderr).contains("it is taken in"), "{told:?}");
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let untold = Command::new(BIN).args(args).stderr(full).output().unwrap();
    assert_eq!(untold.status.code(), Some(0));
    assert_eq!(object(&untold)["passes"][0]["h2d_bytes"], object(&told)["passes"][0]["h2d_bytes"]);
}

fn interrupt(child: &Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

#[test]
fn ctrl_c_ends_a_long_write_and_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out.safetensors");
    let mut child = Command::new(BIN)
        .args(["synth", "--like", "flux1-dev", "--scale", "0.4", "--out", text(&out)])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while names(&dir).is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(1));
    }
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("interrupted"));
    assert_eq!(names(&dir), [""; 0]);
}

#[test]
fn ctrl_c_ends_what_is_stuck_in_one_step() {
    let (_dir, path) = model("flux1-dev", "0.01");
    // Nobody reads on: the pipe fills up and the write waits for ever.
    let mut child =
        Command::new(BIN).args(["inspect", "--json", text(&path)]).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 1]).unwrap();
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn help_shows_examples() {
    for subcommand in ["inspect", "synth"] {
        let output = run(&[subcommand, "--help"]);
        assert!(output.status.success());
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(help.contains("Examples:") && help.contains(&format!("vram-pager {subcommand} ")), "{help}");
    }
}
