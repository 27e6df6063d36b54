//! README, DESIGN and the page on threats say which test holds which promise, and README which commands to run. Here each of
//! these tests is looked up, CI is held to the same commands, and what README shows of their output to what they print.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::fs;
use std::path::Path;

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The tests that a text names, as (file, function): `` `tests/a.rs::b` `` and `` `src/a.rs::b` ``.
fn named_tests(text: &str) -> Vec<(&str, &str)> {
    // Every second part between backquotes is quoted.
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter(|quoted| quoted.starts_with("tests/") || quoted.starts_with("src/"))
        .filter_map(|quoted| quoted.split_once("::"))
        .collect()
}

/// Whether a source has a test of this name; tests of a shared suite carry no attribute of their own.
fn has_test(source: &str, name: &str) -> bool {
    source.contains(&format!("fn {name}("))
}

#[test]
fn every_promise_names_a_test_that_exists() {
    for document in ["README.md", "DESIGN.md", "THREATS.md"] {
        let text = read(document);
        let tests = named_tests(&text);
        assert!(tests.len() >= 10, "{document} names only {} tests", tests.len());
        for (file, name) in tests {
            assert!(has_test(&read(file), name), "{document} names {file}::{name}, which does not exist");
        }
        for line in text.lines().filter(|line| line.starts_with("| ") && line.contains("`tests/")) {
            assert!(!named_tests(line).is_empty(), "{document}: no test is named in: {line}");
        }
    }
}

#[test]
fn ci_runs_the_commands_that_readme_gives() {
    let (readme, ci) = (read("README.md"), read(".ci/run"));
    for name in ["demo_command", "test_command"] {
        let line = ci.lines().find_map(|line| line.strip_prefix(&format!("{name}='"))).unwrap();
        let command = line.trim_end_matches('\'');
        assert!(readme.lines().any(|line| line == command), "README does not give `{command}`");
    }
}

/// What README shows of a program's output, where a block begins like this.
#[cfg(feature = "cli")]
fn shown<'t>(readme: &'t str, begins: &str) -> Vec<&'t str> {
    let block = readme.split("```text\n").find(|block| block.starts_with(begins)).unwrap();
    block.split("\n```").next().unwrap().lines().collect()
}

/// The program's output, run in `folder`.
#[cfg(feature = "cli")]
fn printed(folder: &Path, command: &str) -> Vec<String> {
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_vram-pager"));
    let output = program.current_dir(folder).env("TMPDIR", folder).args(command.split_whitespace()).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[cfg(feature = "cli")]
#[test]
fn the_demo_and_the_plan_print_what_readme_shows() {
    // Of a pass its bytes and counts; of the model's file its name, which has the process's number in it.
    let repeats = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let kept = if words.first().is_some_and(|word| word.parse::<u32>().is_ok()) {
            words.len() - 2
        } else {
            words.len()
        };
        words[..kept]
            .iter()
            .filter(|word| !word.contains("vram-pager-demo"))
            .copied()
            .collect::<Vec<_>>()
            .join(" ")
    };
    let folder = tempfile::tempdir().unwrap();
    let readme = read("README.md");
    let compare = |printed: &[String], shown: &[&str]| {
        let printed: Vec<String> = printed.iter().map(|line| repeats(line)).collect();
        assert_eq!(printed, shown.iter().map(|line| repeats(line)).collect::<Vec<_>>());
    };
    compare(&printed(folder.path(), "demo"), &shown(&readme, "1. Making a model"));
    for command in readme.lines().filter_map(|line| line.strip_prefix("vram-pager ")) {
        if command.starts_with("synth") && command.contains("--scale") {
            printed(folder.path(), command);
        } else if command.starts_with("plan flux") {
            compare(&printed(folder.path(), command), &shown(&readme, "flux.safetensors:"));
        }
    }
}

#[test]
fn a_missing_test_would_be_noticed() {
    let text = "see `tests/a.rs::one`, `src/b.rs::two` and `Pager::new`";
    assert_eq!(named_tests(text), [("tests/a.rs", "one"), ("src/b.rs", "two")]);
    assert!(has_test("fn one() {}", "one"));
    assert!(!has_test("fn one_more() {}", "one"));
}
