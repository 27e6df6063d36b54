//! The order of modules: each may import only what the table below allows it.
//!
//! The sources are scanned as text, comments and strings left out, for paths that begin with `crate` or
//! climb out of their own module with `super`, also inside groups (`use crate::{a, b::{c, d}}`). Test code
//! counts like any other. The scanner is held to planted violations first: a check that cannot fail holds
//! nothing.

use std::fs;
use std::path::{Path, PathBuf};

/// A module of `src/`, and what it may import of the crate. `lib.rs` names all of them; a program under
/// `src/bin` is a user of the library like any other.
const ALLOWED: [(&str, &[&str]); 10] = [
    ("units", &[]),
    ("sync", &[]),
    ("device", &["units", "sync"]),
    ("weights", &["units"]),
    ("staging", &["units", "sync", "device"]),
    ("transfer", &["units", "sync", "device", "weights", "staging"]),
    ("pager", &["units", "sync", "device", "weights", "staging", "transfer"]),
    ("patcher", &["units", "sync", "device", "weights", "staging", "transfer", "pager"]),
    ("manager", &["units", "sync", "device", "staging", "patcher"]),
    (
        "telemetry",
        &["units", "sync", "device", "weights", "staging", "transfer", "pager", "patcher", "manager"],
    ),
];

/// One import of a top-level module.
#[derive(Debug, PartialEq, Eq)]
struct Import {
    line: usize,
    module: String,
}

#[derive(Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    /// `::`
    Colons,
    Mark(char),
}

/// The words and marks of Rust source, each with its line; comments, strings and characters are left out.
fn tokens(source: &str) -> Vec<(usize, Token)> {
    let text: Vec<char> = source.chars().collect();
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < text.len() {
        let rest = &text[at..];
        let length = match rest {
            ['/', '/', ..] => rest.iter().position(|&c| c == '\n').unwrap_or(rest.len()),
            ['/', '*', ..] => block_comment(rest),
            ['"', ..] => string(rest),
            ['\'', ..] => character_or_lifetime(rest),
            [':', ':', ..] => {
                found.push((line, Token::Colons));
                2
            }
            [c, ..] if c.is_alphanumeric() || *c == '_' => {
                let length =
                    rest.iter().position(|c| !c.is_alphanumeric() && *c != '_').unwrap_or(rest.len());
                let word: String = rest[..length].iter().collect();
                if let Some(more) = raw_string(&word, &rest[length..]) {
                    length + more
                } else {
                    found.push((line, Token::Word(word)));
                    length
                }
            }
            [c, ..] => {
                if !c.is_whitespace() {
                    found.push((line, Token::Mark(*c)));
                }
                1
            }
            [] => 1,
        };
        line += rest[..length.min(rest.len())].iter().filter(|&&c| c == '\n').count();
        at += length;
    }
    found
}

fn block_comment(text: &[char]) -> usize {
    let (mut at, mut depth) = (0, 0_u32);
    while at < text.len() {
        match &text[at..] {
            ['/', '*', ..] => (at, depth) = (at + 2, depth + 1),
            ['*', '/', ..] => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn string(text: &[char]) -> usize {
    let mut at = 1;
    while at < text.len() && text[at] != '"' {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

fn character_or_lifetime(text: &[char]) -> usize {
    match text {
        [_, '\\', ..] => text.iter().skip(3).position(|&c| c == '\'').map_or(text.len(), |end| end + 4),
        [_, _, '\'', ..] => 3,
        _ => 1,
    }
}

/// The length of the rest of a raw string whose prefix is `word`.
fn raw_string(word: &str, text: &[char]) -> Option<usize> {
    if !matches!(word, "r" | "br" | "cr") {
        return None;
    }
    let hashes = text.iter().take_while(|&&c| c == '#').count();
    if text.get(hashes) != Some(&'"') {
        return None;
    }
    let end: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let body = &text[hashes + 1..];
    let length = body.windows(end.len()).position(|window| window == end).unwrap_or(body.len());
    Some((hashes + 1 + length + end.len()).min(text.len()))
}

/// What the source of the module `path` (`["device", "cuda"]`) imports of the crate's top-level modules.
fn imports(source: &str, path: &[&str]) -> Vec<Import> {
    let tokens = tokens(source);
    let mut found = Vec::new();
    let mut here: Vec<String> = path.iter().map(|&part| part.to_owned()).collect();
    // Braces that are open, and whether each opened a module.
    let mut braces = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let follows_colons = at > 0 && tokens[at - 1].1 == Token::Colons;
        match &tokens[at].1 {
            Token::Word(word) if word == "mod" => {
                if let (Some((_, Token::Word(name))), Some((_, Token::Mark('{')))) =
                    (tokens.get(at + 1), tokens.get(at + 2))
                {
                    here.push(name.clone());
                    braces.push(true);
                    at += 3;
                    continue;
                }
                at += 1;
            }
            Token::Word(word)
                if matches!(word.as_str(), "crate" | "super" | "self")
                    && !follows_colons
                    && tokens.get(at + 1).is_some_and(|(_, token)| *token == Token::Colons) =>
            {
                at = follow(&tokens, at, &here, &mut found);
            }
            Token::Mark('{') => {
                braces.push(false);
                at += 1;
            }
            Token::Mark('}') => {
                if braces.pop() == Some(true) {
                    here.pop();
                }
                at += 1;
            }
            _ => at += 1,
        }
    }
    found
}

/// Follows one path, or tree of paths, that begins at `at` in the module `base`; answers where it ends.
fn follow(tokens: &[(usize, Token)], mut at: usize, base: &[String], found: &mut Vec<Import>) -> usize {
    let mut base = base.to_vec();
    let note = |line: usize, module: &str, found: &mut Vec<Import>| {
        found.push(Import { line, module: module.to_owned() });
    };
    loop {
        match tokens.get(at) {
            Some((line, Token::Word(word))) => {
                match word.as_str() {
                    "crate" => base.clear(),
                    "super" => {
                        base.pop();
                    }
                    "self" => {}
                    word => {
                        if base.is_empty() {
                            note(*line, word, found);
                        }
                        base.push(word.to_owned());
                    }
                }
                at += 1;
                match tokens.get(at) {
                    Some((_, Token::Colons)) => at += 1,
                    _ => return at,
                }
            }
            Some((line, Token::Mark('*'))) => {
                if base.is_empty() {
                    note(*line, "*", found);
                }
                return at + 1;
            }
            Some((_, Token::Mark('{'))) => {
                at += 1;
                while let Some((_, token)) = tokens.get(at) {
                    match token {
                        Token::Mark('}') => return at + 1,
                        Token::Mark(',') => at += 1,
                        Token::Word(word) if word == "as" => at += 2,
                        _ => at = follow(tokens, at, &base, found).max(at + 1),
                    }
                }
                return at;
            }
            _ => return at,
        }
    }
}

/// What breaks the order in one file, as lines for a person.
fn violations(file: &str, source: &str) -> Vec<String> {
    let parts: Vec<&str> = file.trim_end_matches(".rs").split('/').collect();
    let path = match parts.as_slice() {
        [folders @ .., "mod"] => folders.to_vec(),
        _ => parts,
    };
    let Some(&module) = path.first() else { return Vec::new() };
    let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == module) else {
        return vec![format!("src/{file}: module `{module}` has no place in the order")];
    };
    imports(source, &path)
        .into_iter()
        .filter(|import| import.module != module && !allowed.contains(&import.module.as_str()))
        .map(|import| {
            format!(
                "src/{file}:{}: `{module}` imports `{}`, it may only import {allowed:?}",
                import.line, import.module
            )
        })
        .collect()
}

#[expect(clippy::unwrap_used, reason = "a source tree that cannot be read fails the test")]
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn modules_import_only_what_stands_before_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    files.sort();
    let mut broken = Vec::new();
    let mut scanned = 0;
    for path in files {
        let file = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        if file == "lib.rs" || file.starts_with("bin/") {
            continue;
        }
        scanned += 1;
        broken.extend(violations(&file, &fs::read_to_string(&path).unwrap()));
    }
    assert!(scanned > 50, "only {scanned} files were found under {}", root.display());
    assert!(broken.is_empty(), "the module order is broken:\n{}", broken.join("\n"));
}

#[test]
fn the_order_has_no_circles() {
    // A module may only import what stands before it in the table: no circle can hide in it.
    for (place, (module, allowed)) in ALLOWED.iter().enumerate() {
        for import in *allowed {
            let earlier = ALLOWED[..place].iter().any(|(name, _)| name == import);
            assert!(earlier, "`{module}` may import `{import}`, which does not stand before it");
        }
    }
}

#[test]
fn a_planted_violation_is_found_wherever_it_hides() {
    for (file, source) in [
        ("device/mod.rs", "use crate::pager::Pager;"),
        ("device/mod.rs", "use crate::weights::{Dtype};"),
        ("weights/index.rs", "use crate::device::Device;"),
        ("weights/index.rs", "use crate::sync::AtomicU64;"),
        ("staging/arena.rs", "use crate::weights::Dtype;"),
        ("manager/load.rs", "use crate::pager::PagedModel;"),
        ("manager/load.rs", "use crate::{\n    device::DeviceError,\n    pager::{PagedModel, Pager},\n};"),
        ("manager/load.rs", "use crate::{self as this, pager};"),
        ("manager/load.rs", "fn f() -> crate::pager::PagerError { todo!() }"),
        ("manager/load.rs", "use super::super::pager::Pager;"),
        ("manager/mod.rs", "use super::pager::Pager;"),
        ("manager/mod.rs", "use super::{patcher, pager};"),
        ("device/cuda/card.rs", "pub use super::super::super::pager;"),
        ("units.rs", "use crate::*;"),
        ("units.rs", "mod tests { use super::super::device::Device; }"),
        ("units.rs", "const A: &str = \"a // string\"; const B: char = '\"'; use crate::device;"),
        ("units.rs", "fn f<'a>(x: &'a str) {} /* a /* nested */ comment */ use crate::device;"),
        ("units.rs", "const A: &str = r#\"raw \" string\"#; use crate::device;"),
        ("units.rs", "macro_rules! m { () => { $crate::device::open() } }"),
        ("novelty.rs", ""),
    ] {
        assert_eq!(violations(file, source).len(), 1, "{file}: {source}");
    }
}

#[test]
fn what_only_looks_like_a_violation_is_let_be() {
    for (file, source) in [
        (
            "device/mod.rs",
            "//! See [`crate::pager`].\n/// And `crate::weights`.\nuse crate::units::ByteRange;",
        ),
        ("device/mod.rs", "const TEXT: &str = \"use crate::pager::Pager;\";"),
        ("device/mod.rs", "const TEXT: &str = r#\"use crate::pager::Pager;\"#;"),
        ("device/cuda/card.rs", "use super::super::{DeviceError, handle};\nuse super::code;"),
        ("device/cuda/card.rs", "mod tests { use super::*; use super::super::code; }"),
        ("device/cuda/card.rs", "pub(crate) fn f() {} pub(in crate::device) fn g() {}"),
        ("manager/load.rs", "use crate::patcher::{ModelPatcher, pager};"),
        ("pager/rows.rs", "use std::{fmt, sync}; use crate::{units, weights::{Dtype, TensorId}};"),
    ] {
        assert_eq!(violations(file, source), Vec::<String>::new(), "{file}: {source}");
    }
}

#[test]
fn a_violation_is_told_with_its_line() {
    let found = violations("device/mod.rs", "// one\nconst A: &str = \"\n\n\";\nuse crate::pager::Pager;\n");
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("src/device/mod.rs:5: `device` imports `pager`"), "{found:?}");
}
