//! What can be wrong with a weight file.
//!
//! Owns only values. They are `Clone`, because one failed read may have several waiters; that is why an
//! [`std::io::Error`] is kept as its kind and its text.

#![deny(unsafe_code)]

use std::fmt;
use std::io;
use std::path::PathBuf;

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
    #[error("cannot open {}: {why}", file.display())]
    Open {
        /// The file.
        file: PathBuf,
        /// The system's reason.
        #[source]
        why: IoFailure,
    },
    /// The path names something that is not a regular file.
    #[error("{} is {kind}, not a regular file{advice}", file.display())]
    NotAFile {
        /// The path.
        file: PathBuf,
        /// What it is: "a directory", "a named pipe", ...
        kind: &'static str,
        /// What to name instead, or nothing.
        advice: String,
    },
    /// The file is not a valid safetensors file.
    #[error("{}: {why}", file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        #[source]
        why: HeaderError,
    },
    /// A read failed.
    #[error("{}: reading {bytes} bytes of `{tensor}` at offset {offset} failed: {why}", file.display())]
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
        file.display()
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
        file.display()
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
        file.display()
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
        file.display()
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
    #[error("{} cannot be mapped into memory: {why}; read it instead", file.display())]
    Map {
        /// The file.
        file: PathBuf,
        /// The system's reason.
        #[source]
        why: IoFailure,
    },
    /// The index of a sharded model cannot be read.
    #[error("{} is not an index of safetensors files: {why}", file.display())]
    BadIndex {
        /// The index.
        file: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The index names a shard outside its own directory.
    #[error("{}: the shard `{shard}` of tensor `{tensor}` lies outside the index's directory", index.display())]
    ShardOutside {
        /// The index.
        index: PathBuf,
        /// The shard, as the index spells it.
        shard: String,
        /// The tensor mapped to it.
        tensor: String,
    },
    /// A shard that the index names cannot be opened.
    #[error("{}: the shard `{shard}`, which holds `{tensor}` and {others} more tensors, is missing: {why}", index.display())]
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
    #[error("{}: the index puts tensor `{tensor}` into {}, which does not hold it", index.display(), shard.display())]
    NotInShard {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },
    /// Two shards hold a tensor of the same name.
    #[error("tensor `{tensor}` is in two shards, {} and {}", first.display(), second.display())]
    InTwoShards {
        /// The tensor.
        tensor: String,
        /// One shard.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// The host has no memory to read into.
    #[error("{}: {source}", file.display())]
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
    #[error("the header cannot be read{}: {why}", named(tensor.as_deref()))]
    Json {
        /// The tensor whose entry is wrong, if it is one's.
        tensor: Option<String>,
        /// What is wrong, with line and column.
        why: String,
    },
    /// A tensor's entry has a field that the format does not know.
    #[error("tensor `{tensor}` has an unknown field `{field}`")]
    UnknownField {
        /// The tensor.
        tensor: String,
        /// The field.
        field: String,
    },
    /// A tensor's entry is a JSON array; the format asks for an object.
    #[error("tensor `{tensor}` is described by an array and not by an object")]
    EntryNotAnObject {
        /// The tensor.
        tensor: String,
    },
    /// A tensor's type is unknown.
    #[error("tensor `{tensor}` has the unknown type `{dtype}`")]
    UnknownType {
        /// The tensor.
        tensor: String,
        /// The type.
        dtype: String,
    },
    /// Two tensors have the same name.
    #[error("two tensors are named `{tensor}`")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// A tensor ends before it begins.
    #[error("tensor `{tensor}` ends at {end}, before it begins at {begin}")]
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
        "tensor `{tensor}` begins at {begin}; the data before it ends at {expected}, which leaves a hole"
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
    #[error("tensor `{tensor}` begins at {begin}, inside `{other}`, which ends at {expected}")]
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
    #[error("tensor `{tensor}` of type {dtype} and shape {shape:?} has a size beyond 64 bits")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its type's name.
        dtype: &'static str,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A tensor does not fill whole bytes.
    #[error("tensor `{tensor}` of type {dtype} and shape {shape:?} is not a whole number of bytes")]
    PartialByte {
        /// The tensor.
        tensor: String,
        /// Its type's name.
        dtype: &'static str,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A tensor's type and shape do not give the size of its range.
    #[error("tensor `{tensor}` of type {dtype} and shape {shape:?} has {wanted} bytes, its range {given}")]
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
    tensor.map(|name| format!(" at tensor `{name}`")).unwrap_or_default()
}
