//! Every way a weight file can be wrong, before and after it is opened, ends in an error that names it.
//!
//! The rows of the format's table are checked against the reference implementation in the same breath:
//! what the two agree on, and the few things that we refuse and it does not.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use safetensors::SafeTensors;
use tempfile::TempDir;
use vram_pager::weights::{
    FileIdentity, FileSource, HeaderError, MAX_HEADER_BYTES, TensorIndex, WeightFile, WeightsError, validate,
};

/// A file of this header and so many bytes of data.
fn file(header: impl AsRef<[u8]>, data: usize) -> Vec<u8> {
    let header = header.as_ref();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header);
    bytes.extend((0..data).map(|at| u8::try_from(at % 251).unwrap()));
    bytes
}

fn entry(name: &str, dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

/// A file of one F32 tensor `w` of two elements.
fn good() -> Vec<u8> {
    file(format!("{{{}}}", entry("w", "F32", "[2]", "[0,8]")), 8)
}

fn write(dir: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

#[track_caller]
fn both_accept(what: &str, bytes: &[u8]) {
    if let Err(error) = SafeTensors::deserialize(bytes) {
        panic!("{what}: the reference refuses: {error}");
    }
    if let Err(error) = validate(bytes) {
        panic!("{what}: refused: {error}");
    }
}

#[track_caller]
fn both_refuse(what: &str, bytes: &[u8]) -> HeaderError {
    assert!(SafeTensors::deserialize(bytes).is_err(), "{what}: the reference accepts");
    validate(bytes).expect_err(what)
}

#[track_caller]
fn only_we_refuse(what: &str, bytes: &[u8]) -> HeaderError {
    if let Err(error) = SafeTensors::deserialize(bytes) {
        panic!("{what}: the reference refuses too: {error}");
    }
    validate(bytes).expect_err(what)
}

#[test]
fn a_name_given_twice_is_refused_in_any_spelling_and_named() {
    for (second, dtype) in [("w", "F32"), ("w", "I32"), ("\\u0077", "F32")] {
        let first = entry("w", "F32", "[2]", "[0,8]");
        let header = format!("{{{first},{}}}", entry(second, dtype, "[2]", "[0,8]"));
        let error = only_we_refuse("a name twice", &file(header, 8));
        assert_eq!(error, HeaderError::DuplicateTensor { tensor: "w".to_owned() });
    }
}

#[test]
fn white_space_before_the_header_is_refused() {
    for space in [" ", "\n", "\t", "\r"] {
        let header = format!("{space}{{{}}}", entry("w", "F32", "[2]", "[0,8]"));
        assert_eq!(only_we_refuse("leading space", &file(header, 8)), HeaderError::LeadingSpace);
    }
}

#[test]
fn fields_that_the_format_does_not_know_are_refused() {
    let header = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"scale":[[1]]}}"#;
    let error = only_we_refuse("an unknown field", &file(header, 8));
    assert_eq!(error, HeaderError::UnknownField { tensor: "w".to_owned(), field: "scale".to_owned() });
    let error = only_we_refuse("an array entry", &file(r#"{"w":["F32",[2],[0,8]]}"#, 8));
    assert_eq!(error, HeaderError::EntryNotAnObject { tensor: "w".to_owned() });
}

#[test]
fn what_the_format_allows_is_accepted() {
    let w = entry("w", "F32", "[2]", "[0,8]");
    let z = |offsets: &str| entry("z", "F32", "[0,3]", offsets);
    let rows: [(&str, String, usize); 10] = [
        ("no tensors", "{}".to_owned(), 0),
        ("zero bytes first", format!("{{{w},{}}}", z("[0,0]")), 8),
        ("zero bytes last", format!("{{{w},{}}}", z("[8,8]")), 8),
        ("rank 0", format!("{{{}}}", entry("s", "F32", "[]", "[0,4]")), 4),
        ("an odd header length", format!("{{{}}} ", entry("odd", "U8", "[1]", "[0,1]")), 1),
        (
            "F32 at an odd offset",
            format!("{{{},{}}}", entry("b", "U8", "[1]", "[0,1]"), entry("w", "F32", "[2]", "[1,9]")),
            9,
        ),
        (
            "any order in the JSON",
            format!("{{{},{}}}", entry("late", "U8", "[2]", "[8,10]"), entry("w", "F32", "[2]", "[0,8]")),
            10,
        ),
        ("trailing spaces", format!("{{{w}}}      "), 8),
        ("an even count of F4", format!("{{{}}}", entry("q", "F4", "[3,2]", "[0,3]")), 3),
        ("four of F6", format!("{{{}}}", entry("q", "F6_E2M3", "[4]", "[0,3]")), 3),
    ];
    for (what, header, data) in rows {
        both_accept(what, &file(header, data));
    }
}

#[test]
fn bytes_that_belong_to_no_tensor_or_to_two_are_refused_naming_it() {
    let two = |a: &str, b: &str| format!("{{{},{}}}", entry("a", "U8", "[4]", a), entry("b", "U8", "[4]", b));
    for (what, header) in [
        ("a hole", two("[0,4]", "[6,10]")),
        ("an overlap", two("[0,4]", "[2,6]")),
        ("an alias", two("[0,4]", "[0,4]")),
        (
            "an end before its begin",
            format!("{{{}}}", entry("b", "U8", "[4]", "[0,4]")).replace("[0,4]", "[4,0]"),
        ),
        ("first not at 0", format!("{{{}}}", entry("b", "U8", "[4]", "[4,8]"))),
        (
            "zero bytes inside another",
            format!("{{{},{}}}", entry("a", "U8", "[4]", "[0,4]"), entry("b", "U8", "[0]", "[2,2]")),
        ),
    ] {
        let error = both_refuse(what, &file(header, 10)).to_string();
        assert!(error.contains("`b`") || error.contains("`a`"), "{what}: {error}");
    }
    let reversed = format!("{{{},{}}}", entry("a", "U8", "[4]", "[0,4]"), entry("b", "U8", "[0]", "[4,3]"));
    let error = both_refuse("an end before its begin", &file(reversed, 4));
    assert_eq!(error, HeaderError::EndBeforeBegin { tensor: "b".to_owned(), begin: 4, end: 3 });
}

#[test]
fn a_file_one_byte_short_or_long_is_refused_with_both_sizes() {
    let whole = good();
    let short = both_refuse("short", &whole[..whole.len() - 1]);
    let length = whole.len() as u64;
    assert_eq!(short, HeaderError::FileSize { described: length, length: length - 1 });
    let mut long = whole.clone();
    long.push(0);
    assert_eq!(both_refuse("long", &long), HeaderError::FileSize { described: length, length: length + 1 });
    for cut in 0..whole.len() {
        both_refuse("cut", &whole[..cut]);
    }
}

#[test]
fn what_is_no_safetensors_file_is_refused_with_its_likely_kind() {
    let dir = TempDir::new().unwrap();
    for (hint, bytes) in [
        ("Git LFS pointer", &b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"[..]),
        ("HTML page", b"<!DOCTYPE html><html><body>not found</body></html>"),
        ("HTML page", b"<html><body>not found</body></html>"),
        ("zip archive", b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00\x00\x00"),
        ("GGUF file", b"GGUF\x03\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00"),
        ("zeros", &[0; 4096]),
        ("pickle", b"\x80\x02}q\x00(X\x01\x00\x00\x00wq\x01ctorch\n"),
        ("pickle", b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}"),
    ] {
        both_refuse(hint, bytes);
        let path = write(&dir, "file.safetensors", bytes);
        let error = TensorIndex::open(&path).unwrap_err().to_string();
        assert!(error.contains(hint) && error.contains("file.safetensors"), "{hint}: {error}");
    }
    for bytes in [&b""[..], b"{", b"1234567"] {
        assert!(matches!(both_refuse("too short", bytes), HeaderError::TooShort { .. }));
    }
}

#[test]
fn malformed_headers_are_refused_without_a_crash() {
    let one = |dtype: &str, shape: &str, offsets: &str| format!("{{{}}}", entry("w", dtype, shape, offsets));
    let deep =
        |open: &str, close: &str| format!("{{\"w\":{}{}}}", open.repeat(200_000), close.repeat(200_000));
    let with = |text: &str| one("U8", "[8]", "[0,8]").replace("\"w\"", text);
    let rows: Vec<(&str, Vec<u8>)> = vec![
        ("an unknown type", one("F128", "[2]", "[0,8]").into()),
        ("a type in small letters", one("f32", "[2]", "[0,8]").into()),
        ("an odd count of F4", one("F4", "[3]", "[0,2]").into()),
        ("F6 with part of a byte", one("F6_E3M2", "[3]", "[0,3]").into()),
        ("a negative offset", one("U8", "[8]", "[-1,8]").into()),
        ("a negative zero", one("U8", "[8]", "[-0,8]").into()),
        ("a fractional offset", one("U8", "[8]", "[0.0,8]").into()),
        ("an offset with an exponent", one("U8", "[8]", "[0,8e0]").into()),
        ("three offsets", one("U8", "[8]", "[0,8,8]").into()),
        ("one offset", one("U8", "[8]", "[8]").into()),
        ("an offset beyond 64 bits", one("U8", "[8]", "[0,99999999999999999999]").into()),
        ("a shape beyond 64 bits", one("U8", "[4294967296,4294967296]", "[0,8]").into()),
        ("bits beyond 64 bits", one("U64", "[1152921504606846976]", "[0,8]").into()),
        ("an overflow hidden by a zero", one("U8", "[4294967296,4294967296,0]", "[0,0]").into()),
        ("a shape that does not fit", one("F32", "[3]", "[0,8]").into()),
        ("a shape of text", one("F32", r#"["2"]"#, "[0,8]").into()),
        ("no shape", br#"{"w":{"dtype":"U8","data_offsets":[0,8]}}"#.to_vec()),
        ("two shapes", br#"{"w":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}}"#.to_vec()),
        ("an entry of null", br#"{"w":null}"#.to_vec()),
        ("an entry of text", br#"{"w":"F32"}"#.to_vec()),
        ("metadata that is not strings", br#"{"__metadata__":{"a":1}}"#.to_vec()),
        ("metadata that is an array", br#"{"__metadata__":[]}"#.to_vec()),
        ("NUL padding", [with("\"w\"").as_bytes(), &[0; 5]].concat()),
        ("a byte-order mark", [b"\xef\xbb\xbf".as_slice(), with("\"w\"").as_bytes()].concat()),
        ("bad UTF-8", [b"{\"".as_slice(), b"\xff", &with("\"w\"").as_bytes()[2..]].concat()),
        ("half a surrogate pair", with(r#""\ud800""#).into()),
        ("a control character in a name", with("\"\x01\"").into()),
        ("an array", b"[]".to_vec()),
        ("two objects", b"{}{}".to_vec()),
        ("cut JSON", br#"{"w":{"dtype":"U8""#.to_vec()),
        ("deep arrays", deep("[", "]").into()),
        ("deep objects", deep("{\"a\":", "}").into()),
        ("deep arrays without an end", deep("[", "").into()),
        ("a deep field", format!(r#"{{"w":{{"x":{}{}}}}}"#, "[".repeat(200_000), "]".repeat(200_000)).into()),
        ("deep metadata", format!(r#"{{"__metadata__":{}"#, "{\"a\":".repeat(200_000)).into()),
        ("no bytes", Vec::new()),
    ];
    for (what, header) in rows {
        let error = both_refuse(what, &file(header, 8));
        assert!(error.to_string().len() < 400, "{what}: {error}");
    }
    let error = both_refuse("type", &file(one("F128", "[2]", "[0,8]"), 8));
    assert_eq!(error, HeaderError::UnknownType { tensor: "w".into(), dtype: "F128".into() });
}

#[test]
fn a_header_length_is_held_to_limit_and_file_before_it_is_used() {
    for (length, too_large) in
        [(MAX_HEADER_BYTES, false), (MAX_HEADER_BYTES + 1, true), (u64::MAX, true), (u64::MAX - 7, true)]
    {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}");
        let error = both_refuse("a lying length", &bytes);
        assert_eq!(matches!(error, HeaderError::TooLarge { .. }), too_large, "{length}: {error}");
        assert_eq!(matches!(error, HeaderError::OutsideFile { .. }), !too_large, "{length}: {error}");
    }
}

#[test]
fn what_is_not_a_regular_file_is_refused_and_never_waited_for() {
    let dir = TempDir::new().unwrap();
    let kind_of = |path: &Path| match WeightFile::open(path).unwrap_err() {
        WeightsError::NotAFile { file, kind, .. } => {
            assert_eq!(file, path);
            kind
        }
        other => panic!("{other}"),
    };
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert_eq!(kind_of(&pipe), "a named pipe");
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert_eq!(kind_of(&socket), "a socket");
    assert_eq!(kind_of(Path::new("/dev/zero")), "a device");
    assert_eq!(kind_of(dir.path()), "a directory");

    let knot = dir.path().join("knot");
    symlink(&knot, &knot).unwrap();
    assert!(matches!(WeightFile::open(&knot), Err(WeightsError::Open { .. })));
    let missing = dir.path().join("missing.safetensors");
    let error = TensorIndex::open(&missing).unwrap_err();
    assert!(matches!(&error, WeightsError::Open { why, .. } if why.kind == ErrorKind::NotFound));
    assert!(error.to_string().contains("missing.safetensors"));

    let link = dir.path().join("link.safetensors");
    symlink(write(&dir, "model.safetensors", &good()), &link).unwrap();
    assert_eq!(TensorIndex::open(&link).unwrap().tensors().len(), 1);
}

#[test]
fn a_directory_is_refused_with_the_file_to_name_instead() {
    let dir = TempDir::new().unwrap();
    let error = TensorIndex::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains(".safetensors.index.json"), "{error}");
    write(&dir, "model-1.safetensors", &good());
    write(&dir, "model.safetensors.index.json", b"{}");
    let error = TensorIndex::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors.index.json, model-1.safetensors"), "{error}");
}

/// Opens the good file, lets `change` at it, and gives what a read of `w` then says.
fn read_after(change: impl FnOnce(&Path)) -> WeightsError {
    let dir = TempDir::new().unwrap();
    let path = write(&dir, "model.safetensors", &good());
    let index = TensorIndex::open(&path).unwrap();
    let tensor = index.tensors()[0].clone();
    let mut bytes = [0; 8];
    index.files()[0].read_exact_at(tensor.offset, &mut bytes, &tensor.name).unwrap();
    assert_eq!(bytes, [0, 1, 2, 3, 4, 5, 6, 7]);
    // Stamps are as fine as the kernel's tick; wait for a later one.
    std::thread::sleep(std::time::Duration::from_millis(20));
    change(&path);
    let error = index.files()[0].read_exact_at(tensor.offset, &mut bytes, &tensor.name).unwrap_err();
    let text = error.to_string();
    for part in ["model.safetensors", "`w`", &tensor.offset.to_string()] {
        assert!(text.contains(part), "{part}: {text}");
    }
    error
}

#[test]
fn a_file_truncated_after_opening_is_an_error_with_both_lengths() {
    let length = good().len() as u64;
    for cut in [0, 8, length - 1] {
        let error =
            read_after(|path| OpenOptions::new().write(true).open(path).unwrap().set_len(cut).unwrap());
        assert!(
            matches!(error, WeightsError::Truncated { opened, now, .. } if (opened, now) == (length, cut)),
            "{error}"
        );
    }
}

#[test]
fn a_file_overwritten_after_opening_is_an_error() {
    let error = read_after(|path| fs::write(path, good()).unwrap());
    assert!(matches!(error, WeightsError::Overwritten { .. }), "{error}");
    let error = read_after(|path| {
        OpenOptions::new().append(true).open(path).unwrap().write_all(b"more").unwrap();
    });
    assert!(matches!(error, WeightsError::Overwritten { changed: "its length", .. }), "{error}");
}

#[test]
fn a_file_overwritten_by_someone_who_sets_the_time_back_is_an_error() {
    let error = read_after(|path| {
        let modified = fs::metadata(path).unwrap().modified().unwrap();
        fs::write(path, good()).unwrap();
        File::open(path).unwrap().set_modified(modified).unwrap();
    });
    assert!(matches!(error, WeightsError::Overwritten { changed: "its change time", .. }), "{error}");
}

#[test]
fn a_file_replaced_or_removed_after_opening_is_an_error() {
    let error = read_after(|path| {
        let other = path.with_extension("new");
        fs::write(&other, good()).unwrap();
        fs::rename(&other, path).unwrap();
    });
    assert!(matches!(error, WeightsError::Replaced { how: "replaced by another file", .. }), "{error}");
    let error = read_after(|path| fs::remove_file(path).unwrap());
    assert!(matches!(error, WeightsError::Replaced { how: "removed", .. }), "{error}");
}

/// A source that answers reads from a script, and from `bytes` when the script is over.
struct Scripted {
    bytes: Vec<u8>,
    script: Mutex<VecDeque<Answer>>,
    now: Arc<Mutex<Result<FileIdentity, i32>>>,
}

enum Answer {
    Short(usize),
    Fails(ErrorKind),
    Errno(i32),
    Ends,
    Claims(usize),
}

impl FileSource for Scripted {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let mut most = buf.len();
        match self.script.lock().unwrap().pop_front() {
            Some(Answer::Short(count)) => most = most.min(count),
            Some(Answer::Fails(kind)) => return Err(kind.into()),
            Some(Answer::Errno(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Answer::Ends) => return Ok(0),
            Some(Answer::Claims(count)) => return Ok(count),
            None => {}
        }
        let start = usize::try_from(offset).unwrap();
        let count = most.min(self.bytes.len().saturating_sub(start));
        buf[..count].copy_from_slice(&self.bytes[start..start + count]);
        Ok(count)
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        self.now.lock().unwrap().map_err(io::Error::from_raw_os_error)
    }

    fn path_identity(&self) -> io::Result<FileIdentity> {
        self.identity()
    }
}

const IDENTITY: FileIdentity =
    FileIdentity { device: 1, inode: 2, length: 100, modified: (3, 4), changed: (5, 6) };

fn scripted(script: impl IntoIterator<Item = Answer>) -> (WeightFile, Arc<Mutex<Result<FileIdentity, i32>>>) {
    let now = Arc::new(Mutex::new(Ok(IDENTITY)));
    let source = Scripted {
        bytes: (0..100).collect(),
        script: Mutex::new(script.into_iter().collect()),
        now: now.clone(),
    };
    (WeightFile::from_source("scripted", Box::new(source)).unwrap(), now)
}

#[test]
fn short_and_interrupted_reads_are_carried_on() {
    use Answer::{Fails, Short};
    let script = [Fails(ErrorKind::Interrupted), Short(1), Short(3), Fails(ErrorKind::Interrupted), Short(2)];
    let (file, _) = scripted(script);
    let mut bytes = [0; 50];
    file.read_exact_at(10, &mut bytes, "w").unwrap();
    let expected: Vec<u8> = (10..60).collect();
    assert_eq!(bytes, expected[..]);
}

#[test]
fn a_read_that_fails_names_file_tensor_and_offset() {
    let (file, _) = scripted([Answer::Short(7), Answer::Errno(5)]);
    let error = file.read_exact_at(10, &mut [0; 50], "blocks.3.weight").unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, WeightsError::Read { offset: 10, bytes: 50, .. }), "{text}");
    for part in ["scripted", "blocks.3.weight", "10", "Input/output error"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn an_end_of_file_where_bytes_should_be_is_a_truncation_even_if_the_length_says_otherwise() {
    let (file, _) = scripted([Answer::Short(7), Answer::Ends]);
    let error = file.read_exact_at(10, &mut [0; 50], "w").unwrap_err();
    assert!(matches!(error, WeightsError::Truncated { opened: 100, now: 17, .. }), "{error}");
}

#[test]
fn a_source_that_claims_too_much_moves_nothing_past_the_end() {
    let (file, _) = scripted([Answer::Claims(usize::MAX / 2)]);
    file.read_exact_at(10, &mut [0; 50], "w").unwrap();
}

#[test]
fn a_read_outside_the_file_is_refused_before_it_is_made() {
    let (file, _) = scripted([Answer::Errno(5)]);
    for (offset, bytes) in [(51, 50), (u64::MAX, 1), (101, 0)] {
        let error = file.read_exact_at(offset, &mut vec![0; bytes], "w").unwrap_err();
        assert!(matches!(error, WeightsError::OutsideFile { length: 100, .. }), "{error}");
    }
    file.read_exact_at(100, &mut [], "w").unwrap();
}

#[test]
fn every_change_of_identity_is_noticed() {
    type Change = (&'static str, fn(&mut FileIdentity));
    let changes: [Change; 6] = [
        ("truncated", |now| now.length = 99),
        ("its length", |now| now.length = 101),
        ("its modification time", |now| now.modified.1 += 1),
        ("its change time", |now| now.changed.0 += 1),
        ("replaced", |now| now.inode += 1),
        ("replaced", |now| now.device += 1),
    ];
    for (word, change) in changes {
        let (file, now) = scripted([]);
        let mut other = IDENTITY;
        change(&mut other);
        *now.lock().unwrap() = Ok(other);
        let error = file.read_exact_at(0, &mut [0; 10], "w").unwrap_err().to_string();
        assert!(error.contains(word), "{word}: {error}");
        let unread = file.check_unchanged("w").unwrap_err().to_string();
        assert!(unread.contains(word), "the same without a read: {unread}");
    }
    let (file, now) = scripted([]);
    *now.lock().unwrap() = Err(116);
    let error = file.read_exact_at(0, &mut [0; 10], "w").unwrap_err().to_string();
    assert!(error.contains("tale"), "a stale network handle: {error}");
}

#[test]
fn an_error_can_be_given_to_several_waiters() {
    let (file, _) = scripted([Answer::Errno(5)]);
    let error = file.read_exact_at(0, &mut [0; 10], "w").unwrap_err();
    assert_eq!(error.clone(), error);
    assert!(std::error::Error::source(&error).is_some(), "the cause is kept");
}

/// A directory with two shards, `a` and `b` in the first and `c` in the second, and this index.
fn sharded(index: &str) -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let ab = format!("{{{},{}}}", entry("a", "U8", "[4]", "[4,8]"), entry("b", "U8", "[4]", "[0,4]"));
    write(&dir, "m-1.safetensors", &file(ab, 8));
    write(&dir, "m-2.safetensors", &file(format!("{{{}}}", entry("c", "U8", "[2]", "[0,2]")), 2));
    let path = write(&dir, "m.safetensors.index.json", index.as_bytes());
    (dir, path)
}

#[test]
fn shards_make_one_model_in_shard_and_file_order() {
    let json = r#"{"metadata":{"total_size":10},
        "weight_map":{"c":"m-2.safetensors","a":"m-1.safetensors","b":"m-1.safetensors"}}"#;
    let (_dir, path) = sharded(json);
    let index = TensorIndex::open(&path).unwrap();
    let names: Vec<_> = index.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor.file)).collect();
    assert_eq!(names, [("b", 0), ("a", 0), ("c", 1)]);
    assert_eq!(index.total_bytes(), 10);
    assert!(index.is_sharded());
    let c = index.tensor("c").unwrap();
    let mut bytes = [0; 2];
    index.files()[1].read_exact_at(index.tensor_info(c).offset, &mut bytes, "c").unwrap();
    assert_eq!(bytes, [0, 1]);
    assert_eq!(index.tensor("d"), None);
}

#[test]
fn a_missing_shard_is_an_error_that_names_it() {
    let (_dir, path) =
        sharded(r#"{"weight_map":{"a":"m-1.safetensors","c":"gone.safetensors","d":"gone.safetensors"}}"#);
    let error = TensorIndex::open(&path).unwrap_err();
    assert!(matches!(&error, WeightsError::MissingShard { others: 1, .. }), "{error}");
    assert!(error.to_string().contains("gone.safetensors") && error.to_string().contains("`c`"), "{error}");
}

#[test]
fn a_tensor_in_a_shard_that_lacks_it_is_an_error() {
    for wrong in ["c", "nowhere"] {
        let (_dir, path) =
            sharded(&format!(r#"{{"weight_map":{{"{wrong}":"m-1.safetensors","x":"m-2.safetensors"}}}}"#));
        let error = TensorIndex::open(&path).unwrap_err();
        assert!(matches!(&error, WeightsError::NotInShard { tensor, .. } if tensor == wrong), "{error}");
    }
}

#[test]
fn a_tensor_in_two_shards_is_an_error() {
    let (dir, path) = sharded(r#"{"weight_map":{"c":"m-2.safetensors","x":"m-3.safetensors"}}"#);
    write(&dir, "m-3.safetensors", &file(format!("{{{}}}", entry("c", "U8", "[2]", "[0,2]")), 2));
    let error = TensorIndex::open(&path).unwrap_err();
    assert!(matches!(&error, WeightsError::InTwoShards { tensor, .. } if tensor == "c"), "{error}");
    assert!(error.to_string().contains("m-2") && error.to_string().contains("m-3"), "{error}");
}

#[test]
fn a_shard_outside_the_directory_is_an_error_and_is_not_opened() {
    for shard in ["../m-1.safetensors", "/dev/zero", "x/../../m", ""] {
        let (_dir, path) = sharded(&format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#));
        let error = TensorIndex::open(&path).unwrap_err();
        assert!(matches!(error, WeightsError::ShardOutside { .. }), "{shard}: {error}");
    }
}

#[test]
fn a_bad_shard_is_an_error_that_names_the_shard() {
    let (dir, path) = sharded(r#"{"weight_map":{"a":"m-1.safetensors"}}"#);
    write(&dir, "m-1.safetensors", b"<html>");
    assert!(TensorIndex::open(&path).unwrap_err().to_string().contains("m-1.safetensors"));
}

#[test]
fn an_index_that_cannot_be_read_is_an_error() {
    for json in [
        "{}",
        r#"{"weight_map":{}}"#,
        r#"{"weight_map":[]}"#,
        r#"{"weight_map":{"a":null}}"#,
        "",
        " [1, 2, 3]",
    ] {
        let (_dir, path) = sharded(json);
        let error = TensorIndex::open(&path).unwrap_err();
        assert!(matches!(error, WeightsError::BadIndex { .. }), "{json}: {error}");
    }
}

#[test]
fn units_are_modules_and_keep_the_side_tensors_of_quantised_weights() {
    let names = [
        "m.0.attn.qkv.weight",
        "m.0.attn.qkv.bias",
        "m.0.norm.scale",
        "scale",
        "m.0.attn.qkv.weight_scale",
        "m.0.mlp.weight.absmax",
        "m.0.mlp.weight",
        "m.0.mlp.bias",
    ];
    let entries: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(at, name)| entry(name, "U8", "[1]", &format!("[{at},{}]", at + 1)))
        .collect();
    let dir = TempDir::new().unwrap();
    let path = write(&dir, "m.safetensors", &file(format!("{{{}}}", entries.join(",")), names.len()));
    let index = TensorIndex::open(path).unwrap();
    let units: Vec<_> = index
        .units()
        .iter()
        .map(|unit| (unit.name.as_str(), unit.tensors.iter().map(|id| id.0).collect::<Vec<_>>()))
        .collect();
    assert_eq!(
        units,
        [
            ("m.0.attn.qkv", vec![0, 1, 4]),
            ("m.0.norm", vec![2]),
            ("scale", vec![3]),
            ("m.0.mlp", vec![5, 6, 7]),
        ]
    );
    let id = index.unit("m.0.norm").unwrap();
    assert_eq!(index.unit_info(id).name, "m.0.norm");
    assert_eq!(index.unit("m.0"), None);
}
