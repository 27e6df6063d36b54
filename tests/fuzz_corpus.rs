//! The fuzz targets on stable Rust: every file of the corpus, and seeded damage to it.
//!
//! A target panics where a promise about hostile files is broken (see `fuzz/targets.rs`): what is accepted
//! keeps the format's rules and the reference implementation accepts it too, what is refused is refused by
//! both or by a documented stricter rule. Here also: no parser allocates more than a bound in the length of
//! its input.
//!
//! `VRAM_PAGER_FUZZ_ITERATIONS` sets the damaged files a target (20,000 if unset) and
//! `VRAM_PAGER_FUZZ_SEED` the seed; a failure prints both and the file, in hexadecimal. With nightly Rust
//! the same targets run under libFuzzer: see `fuzz/README.md`.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod counting;
#[path = "../fuzz/targets.rs"]
mod targets;

use std::fmt::Write as _;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use counting::{Counting, measure};
use targets::Measured;

#[global_allocator]
static COUNTING: Counting = Counting;

type Target = fn(&[u8], Measured<'_>);

/// What a parser may allocate at once for an input of this length. The fixed part is for messages, the
/// model that LoRAs are matched to, and small maps; the factor is that of the densest JSON: an index of
/// entries of eight characters has two strings and a place in a map for each.
fn most_bytes(length: usize) -> i64 {
    i64::try_from(64 * length).unwrap() + 64 * 1024
}

/// Runs a target on one input; the error is the text of its panic.
fn run(target: Target, input: &[u8]) -> Result<(), String> {
    let mut most = 0;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        target(input, &mut |parse| most = most.max(measure(parse).1.peak));
        let bound = most_bytes(input.len());
        assert!(most <= bound, "allocated {most} bytes for {} bytes of input, at most {bound}", input.len());
    }));
    outcome.map_err(|panic| match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().map_or("a panic", |text| *text).to_owned(),
    })
}

fn corpus(name: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut files: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect();
    files.sort();
    files
}

fn number_of(variable: &str, otherwise: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => otherwise,
    }
}

/// Runs the corpus and the damage; gives how many inputs the target accepted, by `accepted`.
fn fuzz(name: &str, target: Target) {
    let files = corpus(name);
    assert!(files.len() >= 20, "{name}: only {} files", files.len());
    for (file, bytes) in &files {
        run(target, bytes).unwrap_or_else(|why| panic!("corpus/{name}/{file}: {why}"));
    }
    let seed = number_of("VRAM_PAGER_FUZZ_SEED", 1);
    let iterations = number_of("VRAM_PAGER_FUZZ_ITERATIONS", 20_000);
    // Panics are expected to be told once, by us.
    for iteration in 0..iterations {
        let mut random = Random(mix(seed).wrapping_add(iteration));
        let input = damaged(&files, &mut random);
        if let Err(why) = run(target, &input) {
            let mut hex = String::new();
            input.iter().take(4096).for_each(|byte| write!(hex, "{byte:02x}").unwrap());
            panic!("{name}, VRAM_PAGER_FUZZ_SEED={seed}, iteration {iteration}: {why}\n{hex}");
        }
    }
}

#[test]
fn no_header_breaks_a_promise() {
    fuzz("header", targets::header);
}

#[test]
fn no_index_of_shards_breaks_a_promise() {
    fuzz("index", targets::index);
}

#[test]
fn no_lora_file_breaks_a_promise() {
    fuzz("lora", targets::lora);
}

/// The corpus says of each file whether it is good; so neither side of the targets is idle.
#[test]
fn the_corpus_is_accepted_and_refused_as_its_names_say() {
    for (name, bytes) in corpus("header") {
        assert_eq!(vram_pager::weights::validate(&bytes).is_ok(), name.starts_with("good"), "header/{name}");
    }
    for (name, bytes) in corpus("index") {
        // A name with a NUL is refused when it is opened.
        let good = name.starts_with("good") || name == "bad_nul" || name == "bad_deep";
        let answer = vram_pager::weights::parse_shards(&bytes, Path::new("i"));
        assert_eq!(answer.is_ok(), good, "index/{name}: {answer:?}");
    }
    for (name, bytes) in corpus("lora") {
        let answer = targets::patches(&bytes).map(|_| ());
        assert_eq!(answer.is_ok(), name.starts_with("good"), "lora/{name}: {answer:?}");
    }
}

/// A driver that reports nothing would pass everything.
#[test]
fn the_driver_reports_a_planted_panic_and_a_planted_allocation() {
    fn panics(data: &[u8], _: Measured<'_>) {
        assert!(!data.starts_with(b"boom"), "planted");
    }
    fn allocates(data: &[u8], measured: Measured<'_>) {
        measured(&mut || drop(std::hint::black_box(vec![1_u8; 200 * data.len() + (1 << 20)])));
    }
    assert_eq!(run(panics, b"quiet"), Ok(()));
    assert_eq!(run(panics, b"boom!"), Err("planted".to_owned()));
    assert!(run(allocates, b"x").unwrap_err().contains("allocated"));
}

/// Damage must reach past the first checks: a share of the damaged files is still accepted, and the others
/// fail in more than one way.
#[test]
fn damage_reaches_the_rules_and_not_only_the_first_of_them() {
    let files = corpus("header");
    let (mut accepted, mut kinds) = (0, std::collections::BTreeSet::new());
    for iteration in 0..4000 {
        match vram_pager::weights::validate(&damaged(&files, &mut Random(mix(iteration)))) {
            Ok(_) => accepted += 1,
            Err(error) => {
                let debug = format!("{error:?}");
                kinds.insert(debug.split([' ', '{', '(']).next().unwrap().to_owned());
            }
        }
    }
    assert!(accepted > 100, "only {accepted} of 4000 damaged files are accepted");
    assert!(kinds.len() >= 14, "only these errors: {kinds:?}");
}

/// A deterministic stream of numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(limit.max(1)).unwrap()).unwrap()
    }

    fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A file of the corpus with one to four pieces of damage.
fn damaged(files: &[(String, Vec<u8>)], random: &mut Random) -> Vec<u8> {
    let mut bytes = random.of(files).1.clone();
    for _ in 0..=random.below(4) {
        match random.below(8) {
            0 => flip(&mut bytes, random),
            1 => {
                let keep = random.below(bytes.len() + 1);
                bytes.truncate(keep);
            }
            2 => bytes.resize(bytes.len() + 1 + random.below(9), 0),
            3 => splice(&mut bytes, &random.of(files).1.clone(), random),
            4 => edit_length(&mut bytes, random),
            _ => edit_json(&mut bytes, random),
        }
    }
    // Mostly the frame is mended, so that the damage is looked at by the rules behind it.
    if random.below(4) > 0 {
        mend(&mut bytes);
    }
    bytes
}

fn flip(bytes: &mut [u8], random: &mut Random) {
    if !bytes.is_empty() {
        let at = random.below(bytes.len());
        bytes[at] ^= 1 << random.below(8);
    }
}

fn splice(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let (from, to) = (random.below(other.len() + 1), random.below(bytes.len() + 1));
    let taken = &other[from..other.len().min(from + 1 + random.below(64))];
    let end = bytes.len().min(to + random.below(16));
    bytes.splice(to..end, taken.iter().copied());
}

fn edit_length(bytes: &mut [u8], random: &mut Random) {
    let Some(length) = bytes.first_chunk_mut::<8>() else { return };
    let now = u64::from_le_bytes(*length);
    let edges = [0, 1, now.wrapping_add(1), now.wrapping_sub(1), 100_000_000, 100_000_001, 1 << 40, u64::MAX];
    *length = random.of(&edges).to_le_bytes();
}

/// Replaces a number, puts a token in, doubles an entry, or swaps two pieces of text.
fn edit_json(bytes: &mut Vec<u8>, random: &mut Random) {
    const TOKENS: [&str; 18] = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        " ",
        "null",
        "-",
        "1e9",
        "\\u0000",
        "\\ud800",
        "\"a\":",
        "\"__metadata__\":{},",
        "\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
        "../",
        "\u{0}",
    ];
    const NUMBERS: [&str; 12] = [
        "0",
        "1",
        "2",
        "8",
        "-1",
        "0.5",
        "255",
        "4294967296",
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "1e400",
    ];
    const WORDS: [&str; 16] = [
        "dtype",
        "shape",
        "data_offsets",
        "weight_map",
        "metadata",
        "F32",
        "F16",
        "F4",
        "F8_E4M3",
        "BF16",
        "I64",
        "table.lora_up.weight",
        "table.lora_down.weight",
        "table.alpha",
        "blocks.0.attn.lora_A.weight",
        "w",
    ];
    match random.below(4) {
        0 => {
            let runs = runs(bytes, |byte| byte.is_ascii_digit());
            if !runs.is_empty() {
                let run = random.of(&runs).clone();
                bytes.splice(run, random.of(&NUMBERS).bytes());
            }
        }
        1 => {
            let at = random.below(bytes.len() + 1);
            bytes.splice(at..at, random.of(&TOKENS).bytes());
        }
        2 => {
            let runs = runs(bytes, |byte| byte.is_ascii_alphanumeric() || b"_.".contains(&byte));
            if !runs.is_empty() {
                let run = random.of(&runs).clone();
                bytes.splice(run, random.of(&WORDS).bytes());
            }
        }
        _ => {
            let commas = runs(bytes, |byte| byte == b',');
            if commas.len() > 1 {
                let (one, two) = (random.of(&commas).start, random.of(&commas).start);
                let entry = bytes[one.min(two)..one.max(two)].to_vec();
                let at = random.of(&commas).start;
                bytes.splice(at..at, entry);
            }
        }
    }
}

/// The maximal runs of bytes of a kind.
fn runs(bytes: &[u8], kind: impl Fn(u8) -> bool) -> Vec<std::ops::Range<usize>> {
    let mut runs = Vec::new();
    let mut start = None;
    for (at, &byte) in bytes.iter().enumerate() {
        match (kind(byte), start) {
            (true, None) => start = Some(at),
            (false, Some(begun)) => {
                runs.push(begun..at);
                start = None;
            }
            _ => {}
        }
    }
    runs.extend(start.map(|begun| begun..bytes.len()));
    runs
}

/// Makes the header's length, and the file's, what the JSON says, if there is any JSON.
fn mend(bytes: &mut Vec<u8>) {
    if bytes.get(8) != Some(&b'{') {
        return;
    }
    // The header ends at its last brace; what follows is data.
    let Some(end) = bytes.iter().rposition(|&byte| byte == b'}').filter(|&end| end > 8) else { return };
    let json = end + 1;
    bytes[..8].copy_from_slice(&((json - 8) as u64).to_le_bytes());
    let text = String::from_utf8_lossy(&bytes[8..json]).into_owned();
    let ends = text.match_indices("data_offsets\":[").filter_map(|(at, key)| {
        let list = &text[at + key.len()..];
        list.split(']').next()?.split(',').nth(1)?.trim().parse::<usize>().ok()
    });
    let data = ends.max().unwrap_or(0);
    if data < 1 << 16 {
        bytes.resize(json + data, 0);
    }
}
