//! Files that somebody made in order to harm: whatever they hold and whatever they are, opening one ends in
//! an error that a person can act on, reads and allocates no more than the file justifies, and changes
//! nothing.
//!
//! The malformed files are those of `fuzz/corpus`; `weight_files.rs` holds each rule against the reference
//! implementation, and `changed_files.rs` what happens to files that were good when they were opened.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod counting;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use counting::{Counting, measure};
use tempfile::TempDir;
use vram_pager::patcher::LoraFile;
use vram_pager::weights::{MAX_HEADER_BYTES, TensorIndex, WeightFile, WeightsError, parse_header};

#[global_allocator]
static COUNTING: Counting = Counting;

/// What opening a bad file of a few hundred bytes may allocate at once.
const SMALL: i64 = 128 * 1024;

/// Each bad file of `fuzz/corpus/header`, and what its error has to say besides the file's name.
const HEADERS: [(&str, &[&str]); 53] = [
    ("bad_alias", &["`b`", "`a`", "begins at 0", "ends at 4"]),
    ("bad_array_entry", &["`w`", "array"]),
    ("bad_bits_64", &["`w`", "U64", "[1152921504606846976]", "64 bits"]),
    ("bad_bom", &["byte-order mark"]),
    ("bad_cut", &["`w`", "EOF"]),
    ("bad_deep", &["`w`"]),
    ("bad_deep_metadata", &["expected a string"]),
    ("bad_empty", &["0 bytes", "begins with 8"]),
    ("bad_end_before_begin", &["`w`", "begins at 4"]),
    ("bad_exponent", &["`w`", "invalid type"]),
    ("bad_f4_odd", &["`w`", "F4", "[3]", "whole number of bytes"]),
    ("bad_first_not_0", &["`w`", "begins at 4", "hole"]),
    ("bad_fraction", &["`w`", "invalid type"]),
    ("bad_gguf", &["GGUF"]),
    ("bad_hidden_overflow", &["`w`", "64 bits"]),
    ("bad_hole", &["`b`", "begins at 6", "ends at 4"]),
    ("bad_html", &["HTML page"]),
    ("bad_leading_space", &["white space"]),
    ("bad_length_limit", &["100000000 bytes", "file of 10 bytes"]),
    ("bad_length_max", &["18446744073709551615", "at most 100000000"]),
    ("bad_length_over", &["100000001 bytes", "at most 100000000"]),
    ("bad_lfs", &["Git LFS pointer", "git lfs pull"]),
    ("bad_long", &["70 bytes", "71"]),
    ("bad_metadata_number", &["invalid type", "string"]),
    ("bad_metadata_twice", &["duplicate field", "__metadata__"]),
    ("bad_name_long", &["F99", "(3000 bytes)"]),
    ("bad_negative", &["`w`", "-1"]),
    ("bad_no_shape", &["`w`", "shape"]),
    ("bad_nul", &["trailing characters"]),
    ("bad_offset_64", &["`w`"]),
    ("bad_offsets_near_max", &["`w`", "64 bits"]),
    ("bad_overlap", &["`b`", "`a`", "begins at 2", "ends at 4"]),
    ("bad_seven", &["7 bytes", "begins with 8"]),
    ("bad_shape_64", &["`w`", "64 bits"]),
    ("bad_shape_long", &["`w`", "more dimensions", "1 bytes", "range 8"]),
    ("bad_short", &["70 bytes", "69"]),
    ("bad_size", &["`w`", "F32", "[3]", "12 bytes", "range 8"]),
    ("bad_surrogate", &["hex escape"]),
    ("bad_terminal", &["F99", "\\u{1b}[2J"]),
    ("bad_three_offsets", &["`w`"]),
    ("bad_twice", &["`w`", "two tensors"]),
    ("bad_twice_escaped", &["`w`", "two tensors"]),
    ("bad_two_objects", &["trailing characters"]),
    ("bad_type", &["`w`", "F128"]),
    ("bad_unknown_field", &["`w`", "`scale`"]),
    ("bad_utf8", &["UTF-8", "byte 2"]),
    ("bad_zeros", &["zeros"]),
    ("bad_zip", &["zip archive"]),
    // What the list above has no file for, made below.
    ("made_gzip", &["gzip"]),
    ("made_hdf5", &["HDF5"]),
    ("made_lfs_of_a_shard", &["Git LFS pointer"]),
    ("made_pickle", &["pickle"]),
    ("made_xml", &["XML"]),
];

fn corpus(kind: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(kind);
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

/// Every file of a folder with its bytes: what must not change.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.is_file()).map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

/// Opens `path`, expects a refusal, and holds it to what every refusal has to be.
#[track_caller]
fn refused(what: &str, path: &Path, words: &[&str]) -> WeightsError {
    let folder = path.parent().unwrap();
    let before = contents(folder);
    let (answer, counts) = measure(|| TensorIndex::open(path));
    let error = answer.expect_err(what);
    let text = error.to_string();
    let name = path.file_name().unwrap().to_str().unwrap();
    for word in words.iter().chain([&name]) {
        assert!(text.contains(word), "{what}: `{word}` is not in: {text}");
    }
    assert!(text.len() < 1500, "{what}: a message of {} bytes", text.len());
    assert!(!text.contains('\x1b'), "{what}: speaks to the terminal");
    assert!(counts.peak < SMALL, "{what}: {counts:?}");
    assert_eq!(contents(folder), before, "{what}: changed something");
    let held = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let held = held.filter(|fd| fs::read_link(fd.path()).is_ok_and(|target| target == path)).count();
    assert_eq!(held, 0, "{what}: the file is still open");
    error
}

#[test]
fn every_malformed_header_is_refused_by_name_and_nothing_changes() {
    let mut files = corpus("header");
    files.retain(|name, _| name.starts_with("bad"));
    for (name, bytes) in [
        ("made_lfs_of_a_shard", &b"version https://git-lfs.github.com/spec/v1\n"[..]),
        ("made_pickle", b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}"),
        ("made_gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"),
        ("made_hdf5", b"\x89HDF\r\n\x1a\n"),
        ("made_xml", b"<?xml version=\"1.0\"?><Error/>"),
    ] {
        files.insert(name.to_owned(), bytes.to_vec());
    }
    assert!(
        files.keys().map(String::as_str).eq(HEADERS.iter().map(|(name, _)| *name)),
        "a row for each file"
    );
    for (name, words) in HEADERS {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, &files[name]).unwrap();
        let error = refused(name, &path, words);
        assert!(matches!(error, WeightsError::Header { .. }), "{name}: {error:?}");
        // As a shard of a sharded model it is no better, and it is the shard that is named.
        let index = folder.path().join("model.safetensors.index.json");
        fs::write(&index, r#"{"weight_map":{"w":"model.safetensors"}}"#).unwrap();
        let text = TensorIndex::open(&index).unwrap_err().to_string();
        assert!(
            text.contains("model.safetensors: ") || text.contains("model.safetensors is"),
            "{name}: {text}"
        );
        // As a LoRA neither.
        let text = LoraFile::open(&path).unwrap_err().to_string();
        assert!(text.contains("model.safetensors"), "{name}: {text}");
    }
}

#[test]
fn every_malformed_index_is_refused_by_name_and_opens_nothing() {
    let rows: [(&str, &[&str]); 20] = [
        ("bad_absolute", &["`/dev/zero`", "`a`", "outside"]),
        ("bad_array", &["an object of tensor names"]),
        ("bad_cut", &["EOF"]),
        ("bad_dot", &["`.`", "`a`", "outside"]),
        ("bad_empty_map", &["names no tensor"]),
        ("bad_long", &["`a`", "outside", "(3003 bytes)"]),
        ("bad_middle", &["`x/../../m`", "`a`", "outside"]),
        ("bad_no_map", &["no `weight_map`"]),
        ("bad_none", &["``", "`a`", "outside"]),
        ("bad_nul", &["NUL byte", "m\\u{0}"]),
        ("bad_null", &["invalid type: null"]),
        ("bad_number", &["invalid type: integer"]),
        ("bad_outside", &["`../m`", "`a`", "outside"]),
        ("bad_text", &["invalid type: string"]),
        ("bad_trailing", &["trailing characters"]),
        ("bad_twice", &["`a` is mapped twice"]),
        ("bad_two_maps", &["duplicate field `weight_map`"]),
        ("bad_utf8", &["unicode"]),
        ("bad_deep", &["missing", "`1`", "`a`"]),
        ("bad_empty", &["EOF"]),
    ];
    let files = corpus("index");
    let bad = files.keys().filter(|name| name.starts_with("bad")).count();
    assert_eq!(bad, rows.len(), "a row for each file");
    for (name, words) in rows {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("m.safetensors.index.json");
        fs::write(&path, &files[name]).unwrap();
        // An error of a shard names the shard.
        let answer = TensorIndex::open(&path).unwrap_err();
        if matches!(answer, WeightsError::Open { .. }) {
            assert!(words.iter().all(|word| answer.to_string().contains(word)), "{name}: {answer}");
            continue;
        }
        let error = refused(name, &path, words);
        assert!(
            matches!(
                error,
                WeightsError::BadIndex { .. }
                    | WeightsError::ShardOutside { .. }
                    | WeightsError::MissingShard { .. }
            ),
            "{name}: {error:?}"
        );
    }
}

#[test]
fn what_is_no_regular_file_is_refused_without_waiting_also_as_a_shard() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert!(std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    fs::create_dir(at("directory")).unwrap();
    symlink(at("knot"), at("knot")).unwrap();
    symlink("/dev/zero", at("zero")).unwrap();
    symlink("/dev/tty", at("terminal")).unwrap();
    symlink(at("pipe"), at("link-to-pipe")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    for (name, words) in [
        ("pipe", "a named pipe"),
        ("link-to-pipe", "a named pipe"),
        ("directory", "a directory"),
        ("socket", "a socket"),
        ("zero", "a device"),
        ("terminal", "a device"),
        ("knot", "symbolic link"),
    ] {
        let error = TensorIndex::open(at(name)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(name) && text.contains(words), "{name}: {text}");
        assert!(
            matches!(error, WeightsError::NotAFile { .. } | WeightsError::Open { .. }),
            "{name}: {error:?}"
        );
        fs::write(at("m.safetensors.index.json"), format!(r#"{{"weight_map":{{"w":"{name}"}}}}"#)).unwrap();
        let text = TensorIndex::open(at("m.safetensors.index.json")).unwrap_err().to_string();
        assert!(text.contains(name) && text.contains(words), "{name} as a shard: {text}");
    }
}

#[test]
fn files_that_lie_about_their_length_are_refused() {
    // Those of `/proc` say 0, those of `/sys` say a page, whatever they hold.
    for path in ["/proc/self/status", "/sys/kernel/mm/transparent_hugepage/enabled"] {
        if !Path::new(path).exists() {
            continue;
        }
        let error = TensorIndex::open(path).unwrap_err();
        assert!(error.to_string().contains(path), "{error}");
        assert!(matches!(error, WeightsError::Header { .. } | WeightsError::Truncated { .. }), "{error:?}");
    }
}

/// The length in the file's first eight bytes is anything at all; nothing of that size is allocated before
/// the length is known to be within the limit and the file, and the header to begin as one.
#[test]
fn a_header_length_is_never_allocated_before_it_is_checked() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    for length in
        [u64::MAX, u64::MAX - 7, 1 << 63, 1 << 40, MAX_HEADER_BYTES + 1, MAX_HEADER_BYTES, 1 << 20, 3]
    {
        for after in [&b""[..], b"{}", b"{\"w\":", b"\0\0", b" {}"] {
            // The file is large enough for the length or it is not; what follows is a hole.
            for file_bytes in [10, 1 << 28] {
                let mut file = fs::File::create(&path).unwrap();
                file.write_all(&length.to_le_bytes()).unwrap();
                file.write_all(after).unwrap();
                file.set_len(file_bytes).unwrap();
                drop(file);
                let what = format!("length {length}, {after:?}, {file_bytes} bytes");
                let (answer, counts) = measure(|| TensorIndex::open(&path));
                assert!(answer.is_err(), "{what}");
                let justified =
                    length <= MAX_HEADER_BYTES && length + 8 <= file_bytes && after.starts_with(b"{");
                let most = if justified { i64::try_from(length).unwrap() + SMALL } else { 16 * 1024 };
                assert!(counts.largest <= most && counts.peak <= most, "{what}: {counts:?}");
            }
        }
    }
}

/// A header of entries as short as they come.
fn dense_header(bytes: usize) -> String {
    let mut json = String::with_capacity(bytes + 100);
    json.push('{');
    let mut number = 0;
    while json.len() < bytes - 64 {
        if number > 0 {
            json.push(',');
        }
        write!(json, "\"t{number:x}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}").unwrap();
        number += 1;
    }
    json.push('}');
    json
}

/// Near the limit of 100 MB: parsed, in a few times its own size.
#[test]
fn a_header_of_nearly_100_mb_takes_a_few_times_its_size() {
    let json = dense_header(99_900_000);
    assert!(json.len() > 99_000_000 && (json.len() as u64) < MAX_HEADER_BYTES);
    let file_bytes = json.len() as u64 + 8;
    let size = i64::try_from(json.len()).unwrap();
    let (header, counts) = measure(|| parse_header(json.as_bytes(), file_bytes));
    let tensors = header.unwrap().tensors.len();
    assert!(tensors > 1_500_000, "{tensors}");
    assert!(counts.peak < 6 * size, "{} bytes for {size}", counts.peak);

    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut file = fs::File::create(&path).unwrap();
    file.write_all(&(json.len() as u64).to_le_bytes()).unwrap();
    file.write_all(json.as_bytes()).unwrap();
    drop((file, json));
    let (index, counts) = measure(|| TensorIndex::open(&path));
    assert_eq!(index.unwrap().tensors().len(), tensors);
    assert!(counts.peak < 10 * size, "{} bytes for {size}", counts.peak);
}

/// A header twice as long takes twice the steps, whatever it is made of: no list is searched for each entry.
/// Time is not looked at; allocations count, and the sizes are such that a quadratic step would not end.
#[test]
fn the_work_grows_as_the_header_does() {
    type Make = fn(usize) -> String;
    let shapes: [(&str, Make); 7] = [
        ("many tensors", dense_header),
        ("one name", |bytes| {
            format!(r#"{{"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}"#, "a.".repeat(bytes / 2))
        }),
        ("names that begin alike", |bytes| {
            let common = "a.".repeat(bytes / 400);
            let entries = (0..199)
                .map(|n| format!(r#""{}{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#, common));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(","))
        }),
        ("one shape", |bytes| {
            format!(r#"{{"w":{{"dtype":"U8","shape":[0{}],"data_offsets":[0,0]}}}}"#, ",1".repeat(bytes / 2))
        }),
        ("metadata", |bytes| {
            let entries: Vec<String> = (0..bytes / 16).map(|n| format!(r#""{n:09}":"x""#)).collect();
            format!(r#"{{"__metadata__":{{{}}}}}"#, entries.join(","))
        }),
        ("an unknown field", |bytes| {
            format!(r#"{{"w":{{"x":{}1{}}}}}"#, "[".repeat(bytes / 2), "]".repeat(bytes / 2))
        }),
        ("no JSON", |bytes| "{".repeat(bytes)),
    ];
    for (what, make) in shapes {
        let parse = |bytes: usize| {
            let json = make(bytes);
            let length = i64::try_from(json.len()).unwrap();
            let (_, counts) = measure(|| parse_header(json.as_bytes(), json.len() as u64 + 8).is_ok());
            assert!(counts.peak < 10 * length + SMALL, "{what}: {} bytes, {counts:?}", json.len());
            counts.calls
        };
        let (once, twice) = (parse(4 << 20), parse(8 << 20));
        assert!(twice <= 2 * once + once / 10 + 64, "{what}: {once} allocations, then {twice}");
    }
}

/// Runs `work` on a thread that may open only what anybody may, as a process of another user.
#[expect(unsafe_code, reason = "drops the rights of one thread")]
fn as_nobody<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the raw call changes the ids of the calling thread alone (libc's wrapper would change
            // all), and that thread ends with this function. Without the right to do it, it is refused and
            // the thread is nobody special anyway.
            unsafe { libc::syscall(libc::SYS_setresuid, -1_i64, 65_534_i64, -1_i64) };
            work()
        });
        thread.join().unwrap()
    })
}

fn good_file(path: &Path) {
    let header = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header, &[7; 8]].concat()).unwrap();
}

#[test]
fn lost_permission_is_an_error_that_says_so() {
    let folder = TempDir::new().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = folder.path().join("model.safetensors");
    good_file(&path);
    let mode = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();

    // Before it is opened.
    mode(&path, 0o200);
    let error = as_nobody(|| TensorIndex::open(&path)).unwrap_err();
    assert!(
        matches!(&error, WeightsError::Open { why, .. } if why.kind == io::ErrorKind::PermissionDenied),
        "{error}"
    );
    assert!(error.to_string().contains("model.safetensors"), "{error}");

    // After: the file itself ...
    mode(&path, 0o644);
    std::thread::sleep(std::time::Duration::from_millis(20));
    let index = as_nobody(|| TensorIndex::open(&path)).unwrap();
    let tensor = index.tensors()[0].clone();
    let read = |index: &TensorIndex| {
        as_nobody(|| index.files()[0].read_exact_at(tensor.offset, &mut [0; 8], &tensor.name))
    };
    read(&index).unwrap();
    mode(&path, 0o600);
    let error = read(&index).unwrap_err();
    assert!(matches!(error, WeightsError::Overwritten { changed: "its change time", .. }), "{error}");

    // ... and the way to it.
    mode(&path, 0o644);
    let index = as_nobody(|| TensorIndex::open(&path)).unwrap();
    mode(folder.path(), 0o700);
    let error = read(&index).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(&error, WeightsError::Read { why, .. } if why.kind == io::ErrorKind::PermissionDenied),
        "{text}"
    );
    for part in ["model.safetensors", "`w`", "8 bytes", "offset"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    mode(folder.path(), 0o755);
    read(&index).unwrap();
}

/// `/sys` has regular files that cannot be mapped, as some network file systems do. What reads them does not
/// map.
#[test]
fn a_file_system_without_mapping_is_an_error_of_the_mapping_alone() {
    let path = Path::new("/sys/kernel/mm/transparent_hugepage/enabled");
    if path.exists() {
        let file = WeightFile::open(path).unwrap();
        // SAFETY: the kernel refuses; if it did not, nobody writes to the file or shortens it.
        #[expect(unsafe_code, reason = "asks for a mapping that is refused")]
        let error = unsafe { file.map() }.unwrap_err();
        assert!(matches!(error, WeightsError::Map { .. }), "{error}");
        assert!(
            error.to_string().contains("read it instead") && error.to_string().contains("enabled"),
            "{error}"
        );
        file.read_exact_at(0, &mut [0; 4], "w").unwrap();
    }
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    good_file(&path);
    assert_eq!(TensorIndex::open(&path).unwrap().tensors().len(), 1, "the same where mapping is possible");
}

/// The file is opened without any right to write, and so that it is neither a controlling terminal nor
/// inherited.
#[test]
fn a_weight_file_is_open_for_reading_alone_and_not_inherited() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    good_file(&path);
    fs::OpenOptions::new().write(true).mode(0o644).open(&path).unwrap();
    let _index = TensorIndex::open(&path).unwrap();
    let fds = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let mut found = 0;
    for fd in fds.filter(|fd| fs::read_link(fd.path()).is_ok_and(|target| target == path)) {
        let info =
            fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.file_name().to_str().unwrap())).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        let flags = i32::from_str_radix(flags, 8).unwrap();
        assert_eq!(flags & libc::O_ACCMODE, libc::O_RDONLY);
        assert_ne!(flags & libc::O_CLOEXEC, 0);
        found += 1;
    }
    assert_eq!(found, 1);
}
