//! What can be wrong with a weight file.
//!
//! Owns only values. They are `Clone`, because one failed read may have several waiters; that is why an
//! [`std::io::Error`] is kept as its kind and its text.

#![deny(unsafe_code)]

use std::fmt::{self, Write as _};
use std::io;
use std::path::{Path, PathBuf};

use super::header::MAX_HEADER_BYTES;
use crate::units::NoHostMemory;

/// An [`io::Error`] that can be cloned and compared.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IoFailure {
    /// Its kind.
    pub kind: io::ErrorKind,
    /// Its text.
    pub text: String,
}

impl From<io::Error> for IoFailure {
    fn from(error: io::Error) -> Self {
        Self { kind: error.kind(), text: error.to_string() }
    }
}

impl fmt::Display for IoFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for IoFailure {}

/// An error of a weight file, of an index of such files, or of laying one out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The file cannot be opened.
    #[error("cannot open {}: {why}", path(file))]
    Open {
        /// The file.
        file: PathBuf,
        /// The system's reason.
        #[source]
        why: IoFailure,
    },
    /// The path names something that is not a regular file.
    #[error("{} is {kind}, not a regular file{advice}", path(file))]
    NotAFile {
        /// The path.
        file: PathBuf,
        /// What it is: "a directory", "a named pipe", ...
        kind: &'static str,
        /// What to name instead, or nothing.
        advice: String,
    },
    /// The file is not a valid safetensors file.
    #[error("{}: {why}", path(file))]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        #[source]
        why: HeaderError,
    },
    /// A read failed.
    #[error(
        "{}: reading {bytes} bytes of `{tensor}` at offset {offset} failed: {why}",
        path(file), tensor = shown(tensor)
    )]
    Read {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where the read began, in bytes from the file's start.
        offset: u64,
        /// How many bytes were wanted.
        bytes: u64,
        /// The system's reason.
        #[source]
        why: IoFailure,
    },
    /// The file became shorter after it was opened.
    #[error(
        "{}: truncated after it was opened, from {opened} to {now} bytes; `{tensor}` at offset {offset} \
         ({bytes} bytes) cannot be read",
        path(file), tensor = shown(tensor)
    )]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The tensor that was being read.
        tensor: String,
        /// Where the read began, in bytes from the file's start.
        offset: u64,
        /// How many bytes were wanted.
        bytes: u64,
        /// The file's length when it was opened.
        opened: u64,
        /// Its length now.
        now: u64,
    },
    /// The file was written to after it was opened.
    #[error(
        "{}: overwritten in place after it was opened ({changed} changed); `{tensor}` at offset {offset} \
         is no longer what the header was checked against: open the file again",
        path(file), tensor = shown(tensor)
    )]
    Overwritten {
        /// The file.
        file: PathBuf,
        /// The tensor that was being read.
        tensor: String,
        /// Where the read began, in bytes from the file's start.
        offset: u64,
        /// What gave it away: its length, its modification time, its change time.
        changed: &'static str,
    },
    /// The path no longer names the file that was opened.
    #[error(
        "{}: {how} after it was opened; `{tensor}` at offset {offset} was not taken from the old file: \
         open the path again",
        path(file), tensor = shown(tensor)
    )]
    Replaced {
        /// The path.
        file: PathBuf,
        /// The tensor that was being read.
        tensor: String,
        /// Where the read began, in bytes from the file's start.
        offset: u64,
        /// "replaced by another file" or "removed".
        how: &'static str,
    },
    /// A read was asked for outside the file, as it was when opened.
    #[error(
        "{}: `{tensor}` at offset {offset} ({bytes} bytes) lies outside the file of {length} bytes",
        path(file), tensor = shown(tensor)
    )]
    OutsideFile {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where the read was to begin.
        offset: u64,
        /// How many bytes were wanted.
        bytes: u64,
        /// The file's length.
        length: u64,
    },
    /// The file cannot be mapped, as on some network file systems.
    #[error("{} cannot be mapped into memory: {why}; read it instead", path(file))]
    Map {
        /// The file.
        file: PathBuf,
        /// The system's reason.
        #[source]
        why: IoFailure,
    },
    /// The index of a sharded model cannot be read.
    #[error("{} is not an index of safetensors files: {why}", path(file), why = shown(why))]
    BadIndex {
        /// The index.
        file: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The index names a shard outside its own directory.
    #[error(
        "{}: the shard `{shard}` of tensor `{tensor}` lies outside the index's directory",
        path(index), tensor = shown(tensor), shard = shown(shard)
    )]
    ShardOutside {
        /// The index.
        index: PathBuf,
        /// The shard, as the index spells it.
        shard: String,
        /// The tensor mapped to it.
        tensor: String,
    },
    /// A shard that the index names cannot be opened.
    #[error(
        "{}: the shard `{shard}`, which holds `{tensor}` and {others} more, is missing: {why}",
        path(index), tensor = shown(tensor), shard = shown(shard)
    )]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The shard, as the index spells it.
        shard: String,
        /// The first tensor mapped to it.
        tensor: String,
        /// How many other tensors are mapped to it.
        others: u64,
        /// The system's reason.
        #[source]
        why: IoFailure,
    },
    /// The index puts a tensor into a shard that does not hold it.
    #[error(
        "{}: the index puts tensor `{tensor}` into {}, which does not hold it",
        path(index), path(shard), tensor = shown(tensor)
    )]
    NotInShard {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },
    /// Two shards hold a tensor of the same name.
    #[error(
        "tensor `{tensor}` is in two shards, {} and {}",
        path(first), path(second), tensor = shown(tensor)
    )]
    InTwoShards {
        /// The tensor.
        tensor: String,
        /// One shard.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// The host has no memory to read into.
    #[error("{}: {source}", path(file))]
    NoMemory {
        /// The file.
        file: PathBuf,
        /// What was asked for.
        source: NoHostMemory,
    },
    /// A layout was asked for that cannot be made.
    #[error("cannot lay the model out in pages: {why}")]
    Layout {
        /// Why not.
        why: String,
    },
}

/// What is wrong with the bytes of a safetensors file.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file cannot even hold the header's length.
    #[error("not a safetensors file: it has {length} bytes, and the format begins with 8")]
    TooShort {
        /// The file's length.
        length: u64,
    },
    /// The header's length is beyond what any reader accepts.
    #[error(
        "not a safetensors file: its header would have {header} bytes, at most {MAX_HEADER_BYTES} are \
         allowed{hint}"
    )]
    TooLarge {
        /// The header's length.
        header: u64,
        /// What the file may be instead, or nothing.
        hint: &'static str,
    },
    /// The header would end after the file does.
    #[error(
        "the header of {header} bytes does not fit into the file of {length} bytes; the file is cut short \
         or no safetensors file{hint}"
    )]
    OutsideFile {
        /// The header's length.
        header: u64,
        /// The file's length.
        length: u64,
        /// What the file may be instead, or nothing.
        hint: &'static str,
    },
    /// The header's first byte is not `{`.
    #[error("not a safetensors file: its header begins with byte {byte:#04x} and not with `{{`{hint}")]
    NotAnObject {
        /// The byte.
        byte: u8,
        /// What the file may be instead, or nothing.
        hint: &'static str,
    },
    /// There is white space before the header's `{`, which the specification forbids.
    #[error("the header begins with white space; the format wants `{{` as its first byte")]
    LeadingSpace,
    /// The header has no byte at all.
    #[error("not a safetensors file: its header is empty{hint}")]
    Empty {
        /// What the file may be instead, or nothing.
        hint: &'static str,
    },
    /// The header is not UTF-8.
    #[error("the header is not UTF-8 from its byte {at} on")]
    NotUtf8 {
        /// The first bad byte, counted from the header's start.
        at: u64,
    },
    /// The header is not the JSON that the format asks for.
    #[error("the header cannot be read{}: {why}", named(tensor.as_deref()), why = shown(why))]
    Json {
        /// The tensor whose entry is wrong, if it is one's.
        tensor: Option<String>,
        /// What is wrong, with line and column.
        why: String,
    },
    /// A tensor's entry has a field that the format does not know.
    #[error("tensor `{tensor}` has an unknown field `{field}`", tensor = shown(tensor), field = shown(field))]
    UnknownField {
        /// The tensor.
        tensor: String,
        /// The field.
        field: String,
    },
    /// A tensor's entry is a JSON array; the format asks for an object.
    #[error("tensor `{tensor}` is described by an array and not by an object", tensor = shown(tensor))]
    EntryNotAnObject {
        /// The tensor.
        tensor: String,
    },
    /// A tensor's type is unknown.
    #[error("tensor `{tensor}` has the unknown type `{dtype}`", tensor = shown(tensor), dtype = shown(dtype))]
    UnknownType {
        /// The tensor.
        tensor: String,
        /// The type.
        dtype: String,
    },
    /// Two tensors have the same name.
    #[error("two tensors are named `{tensor}`", tensor = shown(tensor))]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// A tensor ends before it begins.
    #[error("tensor `{tensor}` ends at {end}, before it begins at {begin}", tensor = shown(tensor))]
    EndBeforeBegin {
        /// The tensor.
        tensor: String,
        /// Its first byte, relative to the data.
        begin: u64,
        /// Its end.
        end: u64,
    },
    /// Bytes of the data belong to no tensor.
    #[error(
        "tensor `{tensor}` begins at {begin}; the data before it ends at {expected}, which leaves a hole",
        tensor = shown(tensor)
    )]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// Where it begins, relative to the data.
        begin: u64,
        /// Where it should.
        expected: u64,
    },
    /// Two tensors share bytes.
    #[error(
        "tensor `{tensor}` begins at {begin}, inside `{other}`, which ends at {expected}",
        tensor = shown(tensor), other = shown(other)
    )]
    Overlap {
        /// The tensor that begins too early.
        tensor: String,
        /// Where it begins, relative to the data.
        begin: u64,
        /// The one that it overlaps.
        other: String,
        /// Where that one ends.
        expected: u64,
    },
    /// A tensor's size in bits exceeds 64 bits.
    #[error(
        "tensor `{tensor}` of type {dtype} and shape {shape} has a size beyond 64 bits",
        tensor = shown(tensor), shape = dimensions(shape)
    )]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its type's name.
        dtype: &'static str,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A tensor does not fill whole bytes.
    #[error(
        "tensor `{tensor}` of type {dtype} and shape {shape} is not a whole number of bytes",
        tensor = shown(tensor), shape = dimensions(shape)
    )]
    PartialByte {
        /// The tensor.
        tensor: String,
        /// Its type's name.
        dtype: &'static str,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A tensor's type and shape do not give the size of its range.
    #[error(
        "tensor `{tensor}` of type {dtype} and shape {shape} has {wanted} bytes, its range {given}",
        tensor = shown(tensor), shape = dimensions(shape)
    )]
    SizeMismatch {
        /// The tensor.
        tensor: String,
        /// Its type's name.
        dtype: &'static str,
        /// Its shape.
        shape: Vec<u64>,
        /// What type and shape come to.
        wanted: u64,
        /// The length of its range.
        given: u64,
    },
    /// The data ends elsewhere than the file.
    #[error("the header describes a file of {described} bytes, the file has {length}")]
    FileSize {
        /// Header and data together.
        described: u64,
        /// The file's length.
        length: u64,
    },
}

fn named(tensor: Option<&str>) -> String {
    tensor.map(|name| format!(" at tensor `{}`", shown(name))).unwrap_or_default()
}

/// The most characters of a name, or of another's message, that stand in one of ours.
const SHOWN_CHARS: usize = 200;

/// The most characters of a path.
const SHOWN_PATH_CHARS: usize = 2000;

/// The most dimensions of a shape that stand in a message.
const SHOWN_DIMENSIONS: usize = 8;

/// Text out of a file as it may stand in a message: a hostile name is neither obeyed by a terminal nor
/// megabytes long.
pub(crate) fn shown(text: &str) -> String {
    cut(text, SHOWN_CHARS)
}

/// A path, as [`shown`]: an index names shards.
pub(crate) fn path(path: &Path) -> String {
    cut(&path.to_string_lossy(), SHOWN_PATH_CHARS)
}

/// Both ends of `text` where it is longer than `most` characters: what a parser says ends with the place.
fn cut(text: &str, most: usize) -> String {
    let mut out = String::new();
    let mut push = |part: &str| {
        for c in part.chars() {
            // Control characters, and those that turn the direction of what follows.
            let turns =
                matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            if c.is_control() || turns { out.extend(c.escape_default()) } else { out.push(c) }
        }
    };
    let tail = most / 4;
    if text.len() <= most || text.char_indices().nth(most).is_none() {
        push(text);
        return out;
    }
    let head_end = text.char_indices().nth(most - tail).map_or(text.len(), |(at, _)| at);
    let tail_start = text.char_indices().rev().nth(tail - 1).map_or(text.len(), |(at, _)| at);
    push(&text[..head_end]);
    push(" ... ");
    push(&text[tail_start..]);
    let _ = write!(out, " ({} bytes)", text.len());
    out
}

/// A shape, of which the first dimensions are shown.
pub(crate) fn dimensions(shape: &[u64]) -> String {
    let more = shape.len().saturating_sub(SHOWN_DIMENSIONS);
    let first = &shape[..shape.len() - more];
    if more == 0 { format!("{first:?}") } else { format!("{first:?} and {more} more dimensions") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_short_and_harmless_whatever_the_name() {
        assert_eq!(shown("blocks.0.größe"), "blocks.0.größe");
        assert_eq!(shown("a\x1b[2Jb\u{202e}"), "a\\u{1b}[2Jb\\u{202e}");
        let long = format!("head{}tail", "ä".repeat(1 << 20));
        let text = shown(&long);
        assert!(
            text.starts_with("head") && text.contains("tail (2097160 bytes)") && text.len() < 500,
            "{text}"
        );
        let error = HeaderError::SizeMismatch {
            tensor: long,
            dtype: "F32",
            shape: vec![1; 1 << 20],
            wanted: 4,
            given: 5,
        };
        assert!(error.to_string().len() < 800, "{error}");
        assert!(
            error.to_string().contains("[1, 1, 1, 1, 1, 1, 1, 1] and 1048568 more dimensions"),
            "{error}"
        );
    }
}
