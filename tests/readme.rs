//! README, DESIGN and the page on threats say which test holds which promise, and README which commands to run. Here each of
//! these tests is looked up, and CI is held to the same commands.

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

#[test]
fn a_missing_test_would_be_noticed() {
    let text = "see `tests/a.rs::one`, `src/b.rs::two` and `Pager::new`";
    assert_eq!(named_tests(text), [("tests/a.rs", "one"), ("src/b.rs", "two")]);
    assert!(has_test("fn one() {}", "one"));
    assert!(!has_test("fn one_more() {}", "one"));
}
