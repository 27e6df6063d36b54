//! The one validator of the safetensors format.
//!
//! Bytes become tensors with checked, absolute offsets, or a [`HeaderError`] that says what is wrong.
//! The checks are those of the reference implementation, in its order, and four more where a person
//! would be misled: a tensor name that appears twice, white space before the header, a field that the
//! format does not know, and an entry that is not an object. Nothing is allocated from a length that was
//! not checked first; the JSON is read as a stream into the list of tensors, so that a header at the
//! limit takes a few times its own size.
//!
//! Pure functions over bytes; may import the types and errors beside it.

#![deny(unsafe_code)]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::dtype::Dtype;
use super::error::HeaderError;

/// The longest header that any reader accepts, in bytes (the reference implementation's limit).
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// How many of a file's first bytes are looked at before its header is read.
pub(crate) const FIRST_BYTES: usize = 64;

/// The bytes before the header: its length, little-endian.
pub(crate) const LENGTH_BYTES: u64 = 8;

/// A valid header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// The tensors in the order of their bytes in the file.
    pub tensors: Vec<HeaderTensor>,
    /// Where the data begins, in bytes from the file's start.
    pub data_start: u64,
    /// The file's own key-value text.
    pub metadata: BTreeMap<String, String>,
}

/// A tensor of one file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeaderTensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions, outermost first; empty for a single element.
    pub shape: Vec<u64>,
    /// Its first byte, from the file's start.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// The header's length from the first bytes of a file of `file_bytes` bytes; checked against the limit
/// and the file. `first` are the file's first bytes: 8 are needed if the file has them, and some more
/// make for better hints.
///
/// # Errors
/// [`HeaderError::TooShort`], [`HeaderError::TooLarge`], [`HeaderError::OutsideFile`],
/// [`HeaderError::Empty`]; and what is wrong with the header's own first byte, if it is among `first`.
pub fn header_length(first: &[u8], file_bytes: u64) -> Result<u64, HeaderError> {
    // What is told from the first bytes does not depend on how many the caller has.
    let first = &first[..first.len().min(FIRST_BYTES)];
    let Some(length) = first.first_chunk::<8>().filter(|_| file_bytes >= LENGTH_BYTES) else {
        return Err(HeaderError::TooShort { length: file_bytes.min(first.len() as u64) });
    };
    let header = u64::from_le_bytes(*length);
    if header > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLarge { header, hint: likely_kind(first) });
    }
    if header > file_bytes - LENGTH_BYTES {
        return Err(HeaderError::OutsideFile { header, length: file_bytes, hint: likely_kind(first) });
    }
    if header == 0 {
        return Err(HeaderError::Empty { hint: likely_kind(first) });
    }
    // Before a header of up to the limit is read for nothing.
    begins_an_object(first.get(8..).unwrap_or_default(), true)?;
    Ok(header)
}

/// Holds a header to its first byte; with `maybe_missing` the byte may not have been read yet.
fn begins_an_object(json: &[u8], maybe_missing: bool) -> Result<(), HeaderError> {
    match json.first() {
        None if maybe_missing => Ok(()),
        None => Err(HeaderError::Empty { hint: "" }),
        Some(b'{') => Ok(()),
        Some(b' ' | b'\t' | b'\n' | b'\r') => Err(HeaderError::LeadingSpace),
        Some(&byte) => Err(HeaderError::NotAnObject { byte, hint: likely_kind(json) }),
    }
}

/// Reads the header of a file of `file_bytes` bytes; `json` are the bytes after the length.
///
/// # Errors
/// Every other [`HeaderError`].
pub fn parse_header(json: &[u8], file_bytes: u64) -> Result<Header, HeaderError> {
    begins_an_object(json, false)?;
    let text =
        std::str::from_utf8(json).map_err(|error| HeaderError::NotUtf8 { at: error.valid_up_to() as u64 })?;
    let raw = parse_json(text)?;
    let data_start = LENGTH_BYTES + json.len() as u64;
    let tensors = check_tensors(raw.tensors, data_start, file_bytes)?;
    Ok(Header { tensors, data_start, metadata: raw.metadata })
}

/// Validates a whole file in memory.
///
/// # Errors
/// Any [`HeaderError`].
pub fn validate(file: &[u8]) -> Result<Header, HeaderError> {
    let file_bytes = file.len() as u64;
    let header = header_length(file, file_bytes)?;
    // Both conversions hold: the header lies inside a slice.
    let end = usize::try_from(LENGTH_BYTES + header).unwrap_or(usize::MAX);
    parse_header(file.get(8..end).unwrap_or_default(), file_bytes)
}

/// What a file that is no safetensors file may be, as the end of a sentence.
fn likely_kind(first: &[u8]) -> &'static str {
    const KINDS: [(&[u8], &str); 12] = [
        (
            b"version https://git-lfs",
            "; it looks like a Git LFS pointer: fetch the file itself (git lfs pull)",
        ),
        (b"<!", "; it looks like an HTML page, perhaps of a failed download"),
        (b"<h", "; it looks like an HTML page, perhaps of a failed download"),
        (b"<H", "; it looks like an HTML page, perhaps of a failed download"),
        (b"<?xml", "; it looks like an XML page, perhaps of a failed download"),
        (b"PK\x03\x04", "; it looks like a zip archive, perhaps a PyTorch checkpoint"),
        (b"GGUF", "; it looks like a GGUF file"),
        (b"\x80\x02", "; it looks like a Python pickle, perhaps a PyTorch checkpoint"),
        (b"\x80\x04", "; it looks like a Python pickle, perhaps a PyTorch checkpoint"),
        (b"\x89HDF", "; it looks like an HDF5 file"),
        (b"\x1f\x8b", "; it looks like a gzip archive"),
        (b"\xef\xbb\xbf", "; it begins with a byte-order mark"),
    ];
    if !first.is_empty() && first.iter().all(|&byte| byte == 0) {
        return "; it begins with zeros, perhaps of an unfinished download";
    }
    if let Some((_, hint)) = KINDS.iter().find(|(magic, _)| first.starts_with(magic)) {
        return hint;
    }
    if first.trim_ascii_start().starts_with(b"{") { "; it looks like a JSON file" } else { "" }
}

/// The header's JSON, as far as JSON goes.
struct RawHeader {
    tensors: Vec<RawTensor>,
    metadata: BTreeMap<String, String>,
}

struct RawTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    begin: u64,
    end: u64,
}

fn parse_json(text: &str) -> Result<RawHeader, HeaderError> {
    // serde's errors are text only; what is known better is left here on the way out.
    let mut fault = Fault::default();
    let mut json = serde_json::Deserializer::from_str(text);
    let result = HeaderSeed { fault: &mut fault }
        .deserialize(&mut json)
        .and_then(|header| json.end().map(|()| header));
    result.map_err(|error| {
        let why = error.to_string();
        fault.error.unwrap_or(HeaderError::Json { tensor: fault.tensor, why })
    })
}

/// What went wrong inside the visitors, and at which tensor they were.
#[derive(Default)]
struct Fault {
    error: Option<HeaderError>,
    tensor: Option<String>,
}

impl Fault {
    /// Leaves `error` for [`parse_json`] and gives the error that makes serde stop.
    fn stop<E: de::Error>(&mut self, error: HeaderError) -> E {
        let text = E::custom(&error);
        self.error = Some(error);
        text
    }
}

struct HeaderSeed<'f> {
    fault: &'f mut Fault,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = RawHeader;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<RawHeader, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(de::Error::duplicate_field("__metadata__"));
                }
                // `null` stands for no metadata, in the reference as here.
                header.metadata = map.next_value::<Option<BTreeMap<String, String>>>()?.unwrap_or_default();
            } else {
                let tensor = match map.next_value_seed(TensorSeed { name: &name, fault: self.fault }) {
                    Ok(entry) => entry,
                    Err(error) => {
                        self.fault.tensor = Some(name);
                        return Err(error);
                    }
                };
                let (dtype, shape, (begin, end)) = tensor;
                header.tensors.push(RawTensor { name, dtype, shape, begin, end });
            }
        }
        Ok(header)
    }
}

type Entry = (Dtype, Vec<u64>, (u64, u64));

struct TensorSeed<'a> {
    name: &'a str,
    fault: &'a mut Fault,
}

impl<'de> DeserializeSeed<'de> for TensorSeed<'_> {
    type Value = Entry;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Entry, D::Error> {
        // `deserialize_any`, so that an array can be told from what is no entry at all.
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TensorSeed<'_> {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<Entry, A::Error> {
        Err(self.fault.stop(HeaderError::EntryNotAnObject { tensor: self.name.to_owned() }))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let mut dtype = None;
        let mut shape: Option<Vec<u64>> = None;
        let mut offsets = None;
        while let Some(Text(field)) = map.next_key()? {
            match &*field {
                "dtype" => {
                    let Text(name) = map.next_value()?;
                    let parsed = Dtype::parse(&name).ok_or_else(|| {
                        self.fault.stop(HeaderError::UnknownType {
                            tensor: self.name.to_owned(),
                            dtype: name.into_owned(),
                        })
                    })?;
                    set(&mut dtype, "dtype", parsed)?;
                }
                "shape" => {
                    let mut dimensions: Vec<u64> = map.next_value()?;
                    dimensions.shrink_to_fit();
                    set(&mut shape, "shape", dimensions)?;
                }
                "data_offsets" => set(&mut offsets, "data_offsets", map.next_value()?)?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    return Err(self.fault.stop(HeaderError::UnknownField {
                        tensor: self.name.to_owned(),
                        field: field.into_owned(),
                    }));
                }
            }
        }
        Ok((
            dtype.ok_or_else(|| de::Error::missing_field("dtype"))?,
            shape.ok_or_else(|| de::Error::missing_field("shape"))?,
            offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?,
        ))
    }
}

fn set<T, E: de::Error>(slot: &mut Option<T>, field: &'static str, value: T) -> Result<(), E> {
    if slot.replace(value).is_some() { Err(E::duplicate_field(field)) } else { Ok(()) }
}

/// Text borrowed from the header where it has no escape. (A plain `Cow` would always be copied.)
#[derive(Deserialize)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Sorts the tensors by their bytes and holds them to the data: no hole, no overlap, sizes that agree.
fn check_tensors(
    mut raw: Vec<RawTensor>,
    data_start: u64,
    file_bytes: u64,
) -> Result<Vec<HeaderTensor>, HeaderError> {
    check_names(&raw)?;
    raw.sort_by_key(|tensor| (tensor.begin, tensor.end));
    let mut tensors: Vec<HeaderTensor> = Vec::with_capacity(raw.len());
    let mut expected = 0;
    for RawTensor { name, dtype, shape, begin, end } in raw {
        if begin > expected {
            return Err(HeaderError::Hole { tensor: name, begin, expected });
        }
        if begin < expected {
            let other = tensors.last().map(|tensor| tensor.name.clone()).unwrap_or_default();
            return Err(HeaderError::Overlap { tensor: name, begin, other, expected });
        }
        if end < begin {
            return Err(HeaderError::EndBeforeBegin { tensor: name, begin, end });
        }
        let bits = shape
            .iter()
            .try_fold(1_u64, |product, &dimension| product.checked_mul(dimension))
            .and_then(|elements| elements.checked_mul(dtype.bits()));
        let Some(bits) = bits else {
            return Err(HeaderError::Overflow { tensor: name, dtype: dtype.name(), shape });
        };
        if bits % 8 != 0 {
            return Err(HeaderError::PartialByte { tensor: name, dtype: dtype.name(), shape });
        }
        let (wanted, given) = (bits / 8, end - begin);
        if wanted != given {
            let dtype = dtype.name();
            return Err(HeaderError::SizeMismatch { tensor: name, dtype, shape, wanted, given });
        }
        // Cannot wrap once the end is held to the file; until then a saturated offset is never used.
        let offset = data_start.saturating_add(begin);
        tensors.push(HeaderTensor { name, dtype, shape, offset, bytes: given });
        expected = end;
    }
    let described = data_start.saturating_add(expected);
    if described != file_bytes {
        return Err(HeaderError::FileSize { described, length: file_bytes });
    }
    Ok(tensors)
}

/// Refuses a name that two tensors have, in whatever spelling: escapes are decoded by now.
fn check_names(raw: &[RawTensor]) -> Result<(), HeaderError> {
    let mut names: Vec<&str> = raw.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(HeaderError::DuplicateTensor { tensor: pair[0].to_owned() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    #[test]
    fn tensors_come_in_file_order_with_absolute_offsets() {
        let json = r#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]},
            "__metadata__":{"format":"pt"},
            "a":{"shape":[3],"data_offsets":[0,3],"dtype":"U8"}}  "#;
        let header = validate(&file(json, 11)).unwrap();
        let start = 8 + json.len() as u64;
        assert_eq!(header.data_start, start);
        assert_eq!(header.metadata["format"], "pt");
        let found: Vec<_> = header.tensors.iter().map(|t| (t.name.as_str(), t.offset, t.bytes)).collect();
        assert_eq!(found, [("a", start, 3), ("b", start + 3, 8)]);
    }

    #[test]
    fn an_error_in_an_entry_names_the_tensor() {
        let json = r#"{"here":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#;
        let error = validate(&file(json, 4)).unwrap_err();
        assert!(matches!(&error, HeaderError::Json { tensor: Some(name), .. } if name == "here"), "{error}");
        assert!(error.to_string().contains("`here`"));
    }

    #[test]
    fn a_header_without_tensors_is_valid_and_describes_no_data() {
        assert_eq!(validate(&file("{}", 0)).unwrap().tensors, []);
        assert!(matches!(validate(&file("{}", 1)), Err(HeaderError::FileSize { described: 10, length: 11 })));
    }

    #[test]
    fn metadata_may_be_null_but_not_twice() {
        assert!(validate(&file(r#"{"__metadata__":null}"#, 0)).unwrap().metadata.is_empty());
        assert!(validate(&file(r#"{"__metadata__":{},"__metadata__":{}}"#, 0)).is_err());
    }

    #[test]
    fn nothing_is_read_past_a_length_that_lies() {
        let mut bytes = file("{}", 0);
        bytes[..8].copy_from_slice(&3_u64.to_le_bytes());
        assert!(matches!(validate(&bytes), Err(HeaderError::OutsideFile { header: 3, length: 10, .. })));
        bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(validate(&bytes), Err(HeaderError::TooLarge { header: u64::MAX, .. })));
    }
}
