//! What the dependencies may be, held without any tool but Cargo: each licence is one that `deny.toml`
//! allows, each source is the registry, nothing banned is there. The lists are read from `deny.toml`, which
//! `cargo deny check licenses bans sources` reads too, so that there is one place to change.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The texts between quotes in the list that follows `key = [`, comments left out.
fn list(toml: &str, key: &str) -> Vec<String> {
    let start = toml.find(&format!("\n{key} = [")).unwrap_or_else(|| panic!("deny.toml has no `{key}`"));
    let rest = &toml[start + key.len() + 5..];
    let lines = rest[..rest.find("]\n").unwrap()].lines();
    let lines: Vec<&str> = lines.map(|line| line.split('#').next().unwrap()).collect();
    lines.join(" ").split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The names after `crate = ` in the list of bans.
fn banned(toml: &str) -> Vec<String> {
    let start = toml.find("\ndeny = [").unwrap();
    let rest = &toml[start..start + toml[start..].find("\n]").unwrap()];
    let names = rest.split("crate = \"").skip(1).map(|part| part.split('"').next().unwrap().to_owned());
    names.collect()
}

/// Whether a licence expression can be met with the allowed licences: `AND`, `OR`, parentheses, and the
/// old spelling of `OR` as a slash.
fn is_met(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let met = any_of(&words, &mut at, allowed);
    assert_eq!(at, words.len(), "cannot read the licence {expression}");
    met
}

fn any_of(words: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let mut met = all_of(words, at, allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        met |= all_of(words, at, allowed);
    }
    met
}

fn all_of(words: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let mut met = one(words, at, allowed);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        met &= one(words, at, allowed);
    }
    met
}

fn one(words: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let word = words.get(*at).copied().unwrap_or_default();
    *at += 1;
    if word == "(" {
        let met = any_of(words, at, allowed);
        assert_eq!(words.get(*at), Some(&")"), "an open parenthesis");
        *at += 1;
        return met;
    }
    // An exception makes it another licence; none of those is on the list.
    let excepted = words.get(*at) == Some(&"WITH");
    if excepted {
        *at += 2;
    }
    !excepted && allowed.iter().any(|licence| licence == word)
}

fn packages() -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--all-features"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    // What is in the graph of this platform; `packages` has those of others too.
    let nodes = metadata["resolve"]["nodes"].as_array().unwrap();
    let used: BTreeSet<&str> = nodes.iter().map(|node| node["id"].as_str().unwrap()).collect();
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages.filter(|package| used.contains(package["id"].as_str().unwrap())).cloned().collect()
}

fn deny_toml() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deny.toml")).unwrap()
}

#[test]
fn every_dependency_has_an_allowed_licence_and_source_and_none_is_banned() {
    let toml = deny_toml();
    let (allowed, registries, banned) = (list(&toml, "allow"), list(&toml, "allow-registry"), banned(&toml));
    assert!(allowed.len() >= 3 && registries.len() == 1 && banned.len() >= 3, "deny.toml was read");
    let packages = packages();
    assert!(packages.len() > 50, "only {} packages", packages.len());
    for package in &packages {
        let (name, version) = (package["name"].as_str().unwrap(), &package["version"]);
        let licence =
            package["license"].as_str().unwrap_or_else(|| panic!("{name} {version} names no licence"));
        assert!(is_met(licence, &allowed), "{name} {version} is under {licence}; allowed are {allowed:?}");
        assert!(!banned.iter().any(|banned| banned == name), "{name} is banned in deny.toml");
        let own = name == "vram-pager" && package["source"].is_null();
        let source = package["source"].as_str().unwrap_or_default();
        let known = registries.iter().any(|registry| source == format!("registry+{registry}"));
        assert!(own || known, "{name} {version} comes from `{source}`");
        for dependency in package["dependencies"].as_array().unwrap() {
            assert!(!own || dependency["req"] != "*", "{} is wanted in any version", dependency["name"]);
        }
    }
}

#[test]
fn a_licence_that_is_not_allowed_would_be_noticed() {
    let allowed = ["MIT".to_owned(), "Apache-2.0".to_owned(), "Unicode-3.0".to_owned()];
    for (expression, met) in [
        ("MIT", true),
        ("MIT/Apache-2.0", true),
        ("GPL-3.0-only OR MIT", true),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
        ("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", true),
        ("Apache-2.0 WITH LLVM-exception", false),
        ("GPL-3.0-only", false),
        ("MIT AND GPL-3.0-only", false),
        ("GPL-2.0 OR (MIT AND LGPL-2.1)", false),
        ("", false),
    ] {
        let answer = !expression.is_empty() && is_met(expression, &allowed);
        assert_eq!(answer, met, "{expression}");
    }
    assert_eq!(list("\nallow = [\"A\", # \"no\"\n \"B\"]\n", "allow"), ["A", "B"]);
    assert_eq!(banned("\ndeny = [\n { crate = \"x\", reason = \"y\" },\n]\n"), ["x"]);
}
