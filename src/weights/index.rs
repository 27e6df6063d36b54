//! The tensors of a model by name and in file order, over one file or many.
//!
//! Opening an index opens every file of the model and validates every header; after that the only thing
//! that can go wrong with the weights is that a file changes. Owns the open files. Immutable, so no lock.
//! May import the modules beside it.

#![deny(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::dtype::Dtype;
use super::error::{HeaderError, WeightsError};
use super::file::WeightFile;
use super::header::{FIRST_BYTES, LENGTH_BYTES, MAX_HEADER_BYTES, header_length, parse_header};
use super::unit::{shortest_ancestors, unit_name};
use crate::units::try_filled;

/// A tensor's place in [`TensorIndex::tensors`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TensorId(pub u32);

impl TensorId {
    /// The place as an index.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A unit's place in [`TensorIndex::units`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct UnitId(pub u32);

impl UnitId {
    /// The place as an index.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A tensor of the model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorInfo {
    /// Its name, unique in the model.
    pub name: String,
    /// The type of its elements in the file.
    pub dtype: Dtype,
    /// Its dimensions, outermost first; empty for a single element.
    pub shape: Vec<u64>,
    /// Which of [`TensorIndex::files`] holds it.
    pub file: u32,
    /// Its first byte, from that file's start.
    pub offset: u64,
    /// Its length in the file in bytes; may be 0.
    pub bytes: u64,
}

/// The tensors of one module, faulted together.
///
/// A tensor's name is its module's and, after the last dot, the parameter's: `blocks.0.proj.weight` and
/// `blocks.0.proj.bias` make the unit `blocks.0.proj`. What stands below a parameter stays with it
/// (`proj.weight.absmax` is of `proj`). A name without a dot is a unit of its own.
///
/// A unit's [`UnitId`] is its place in [`TensorIndex::units`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitInfo {
    /// The module's name.
    pub name: String,
    /// Its tensors, in file order; never empty.
    pub tensors: Vec<TensorId>,
}

/// A shard, as an index describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shard {
    /// Its file, relative to the index's directory and inside it by its spelling.
    pub path: PathBuf,
    /// The tensors that the index puts there, in name order; never empty.
    pub tensors: Vec<String>,
}

/// Every tensor of a model, and the open files that hold them.
#[derive(Debug)]
pub struct TensorIndex {
    files: Vec<WeightFile>,
    data_starts: Vec<u64>,
    tensors: Vec<TensorInfo>,
    units: Vec<UnitInfo>,
    tensors_by_name: Vec<TensorId>,
    units_by_name: Vec<UnitId>,
    total_bytes: u64,
    metadata: BTreeMap<String, String>,
    is_sharded: bool,
}

impl TensorIndex {
    /// Opens a `.safetensors` file, or the shards that a `*.safetensors.index.json` names.
    ///
    /// Which of the two it is is told from the content. Shards are opened in the order of their names.
    /// A shard may hold tensors that the index does not mention; they are part of the model.
    ///
    /// # Errors
    /// [`WeightsError`] for anything wrong with any of the files, before anything is allocated for the
    /// tensors.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        let file = WeightFile::open(path)?;
        if looks_like_an_index(&file)? { open_shards(&file) } else { Self::from_files(vec![file]) }
    }

    /// The index of files that are already open, in this order.
    ///
    /// # Errors
    /// As [`TensorIndex::open`].
    pub fn from_files(files: Vec<WeightFile>) -> Result<Self, WeightsError> {
        let mut tensors: Vec<TensorInfo> = Vec::new();
        let mut data_starts = Vec::with_capacity(files.len());
        let mut metadata = BTreeMap::new();
        for (number, file) in files.iter().enumerate() {
            let header = read_header(file)?;
            let number = u32::try_from(number).map_err(|_| too_many(file, "files"))?;
            data_starts.push(header.data_start);
            for (key, value) in header.metadata {
                metadata.entry(key).or_insert(value);
            }
            tensors.extend(header.tensors.into_iter().map(|tensor| TensorInfo {
                name: tensor.name,
                dtype: tensor.dtype,
                shape: tensor.shape,
                file: number,
                offset: tensor.offset,
                bytes: tensor.bytes,
            }));
            if u32::try_from(tensors.len()).is_err() {
                return Err(too_many(file, "tensors"));
            }
        }
        let tensors_by_name = sorted_by_name(&tensors, &files)?;
        let units = group(&tensors, &tensors_by_name);
        let mut units_by_name: Vec<UnitId> = (0..).take(units.len()).map(UnitId).collect();
        units_by_name.sort_unstable_by(|a, b| units[a.index()].name.cmp(&units[b.index()].name));
        // Every tensor lies in a file, and the files' lengths are lengths of real files; a source made up
        // by a test may still lie.
        let total_bytes = tensors.iter().fold(0_u64, |sum, tensor| sum.saturating_add(tensor.bytes));
        Ok(Self {
            files,
            data_starts,
            tensors,
            units,
            tensors_by_name,
            units_by_name,
            total_bytes,
            metadata,
            is_sharded: false,
        })
    }

    /// The open files.
    pub fn files(&self) -> &[WeightFile] {
        &self.files
    }

    /// Where the data of each of [`TensorIndex::files`] begins, in bytes from its start.
    pub fn data_starts(&self) -> &[u64] {
        &self.data_starts
    }

    /// Whether the model was opened through an index of shards.
    pub fn is_sharded(&self) -> bool {
        self.is_sharded
    }

    /// Every tensor: file by file, in the order of their bytes.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<TensorId> {
        let by_name = &self.tensors_by_name;
        let found = by_name.binary_search_by(|id| self.tensors[id.index()].name.as_str().cmp(name)).ok()?;
        Some(by_name[found])
    }

    /// What is known of a tensor.
    ///
    /// # Panics
    /// If `id` is of another index that has more tensors.
    pub fn tensor_info(&self, id: TensorId) -> &TensorInfo {
        &self.tensors[id.index()]
    }

    /// Every unit, in the file order of its first tensor.
    pub fn units(&self) -> &[UnitInfo] {
        &self.units
    }

    /// The units' numbers, in the same order: for a pass over the model.
    pub fn unit_ids(&self) -> impl DoubleEndedIterator<Item = UnitId> + ExactSizeIterator + Clone + use<> {
        // There are fewer than 2^32, which opening sees to.
        (0..u32::try_from(self.units.len()).unwrap_or(u32::MAX)).map(UnitId)
    }

    /// The unit of this name.
    pub fn unit(&self, name: &str) -> Option<UnitId> {
        let found =
            self.units_by_name.binary_search_by(|id| self.units[id.index()].name.as_str().cmp(name)).ok()?;
        Some(self.units_by_name[found])
    }

    /// What is known of a unit.
    ///
    /// # Panics
    /// If `id` is of another index that has more units.
    pub fn unit_info(&self, id: UnitId) -> &UnitInfo {
        &self.units[id.index()]
    }

    /// The bytes of all tensors together, as they are in the files.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The files' own key-value text; where two shards disagree, the first one's.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// Reads and validates a file's header.
fn read_header(file: &WeightFile) -> Result<super::header::Header, WeightsError> {
    const SUBJECT: &str = "the header";
    let refuse = |why: HeaderError| WeightsError::Header { file: file.path().to_owned(), why };
    let first = first_bytes(file)?;
    let length = header_length(&first, file.len()).map_err(refuse)?;
    // At most MAX_HEADER_BYTES, and inside the file: may be allocated.
    let json = read_part(file, LENGTH_BYTES, length, SUBJECT, SUBJECT)?;
    parse_header(&json, file.len()).map_err(refuse)
}

/// A part of a file that its caller has found to lie in it, in memory that is asked for as `what`.
///
/// # Errors
/// [`WeightsError::NoMemory`] where there is none for it, and those of [`WeightFile::read_exact_at`].
pub(crate) fn read_part(
    file: &WeightFile,
    offset: u64,
    length: u64,
    what: &'static str,
    tensor: &str,
) -> Result<Vec<u8>, WeightsError> {
    let mut bytes = zeroed(file, what, length)?;
    file.read_exact_at(offset, &mut bytes, tensor)?;
    Ok(bytes)
}

/// Room for so many bytes of a file.
pub(crate) fn zeroed(file: &WeightFile, what: &'static str, bytes: u64) -> Result<Vec<u8>, WeightsError> {
    try_filled(what, usize::try_from(bytes).unwrap_or(usize::MAX), 0)
        .map_err(|source| WeightsError::NoMemory { file: file.path().to_owned(), source })
}

/// The first bytes of a file: enough for the header's length and for telling what else it may be.
fn first_bytes(file: &WeightFile) -> Result<Vec<u8>, WeightsError> {
    let mut first = vec![0; usize::try_from(file.len()).unwrap_or(usize::MAX).min(FIRST_BYTES)];
    file.read_exact_at(0, &mut first, "the header")?;
    Ok(first)
}

/// Whether a file is an index: JSON by its first byte, and not a safetensors file by its first eight.
///
/// Eight characters of text are a header length far beyond the limit, so the two cannot be mistaken for
/// each other; a file of fewer bytes is an index if it is named like one.
fn looks_like_an_index(file: &WeightFile) -> Result<bool, WeightsError> {
    let named = file.path().extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
    let first = first_bytes(file)?;
    Ok(match first.first_chunk::<8>() {
        Some(length) => {
            u64::from_le_bytes(*length) > MAX_HEADER_BYTES
                && (named || first.trim_ascii_start().starts_with(b"{"))
        }
        None => named,
    })
}

fn too_many(file: &WeightFile, what: &str) -> WeightsError {
    WeightsError::BadIndex { file: file.path().to_owned(), why: format!("it has more than 2^32 {what}") }
}

/// The ids in name order; refuses a name that two files hold.
fn sorted_by_name(tensors: &[TensorInfo], files: &[WeightFile]) -> Result<Vec<TensorId>, WeightsError> {
    let mut ids: Vec<TensorId> = (0..).take(tensors.len()).map(TensorId).collect();
    ids.sort_unstable_by(|a, b| tensors[a.index()].name.cmp(&tensors[b.index()].name).then(a.cmp(b)));
    for pair in ids.windows(2) {
        let (first, second) = (&tensors[pair[0].index()], &tensors[pair[1].index()]);
        if first.name == second.name {
            let path = |tensor: &TensorInfo| files[tensor.file as usize].path().to_owned();
            return Err(WeightsError::InTwoShards {
                tensor: first.name.clone(),
                first: path(first),
                second: path(second),
            });
        }
    }
    Ok(ids)
}

/// The units, in the order of their first tensor.
fn group(tensors: &[TensorInfo], by_name: &[TensorId]) -> Vec<UnitInfo> {
    let sorted = by_name.iter().map(|id| tensors[id.index()].name.as_str());
    let mut ancestors = vec![None; tensors.len()];
    for (id, ancestor) in by_name.iter().zip(shortest_ancestors(sorted)) {
        ancestors[id.index()] = ancestor;
    }
    let mut units: Vec<UnitInfo> = Vec::new();
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    for ((id, tensor), ancestor) in (0..).map(TensorId).zip(tensors).zip(ancestors) {
        let name = unit_name(&tensor.name, ancestor);
        let number = *numbers.entry(name).or_insert_with(|| {
            units.push(UnitInfo { name: name.to_owned(), tensors: Vec::new() });
            units.len() - 1
        });
        units[number].tensors.push(id);
    }
    units
}

/// Opens the shards of an index and holds the index to them.
fn open_shards(index: &WeightFile) -> Result<TensorIndex, WeightsError> {
    let bad = |why: String| WeightsError::BadIndex { file: index.path().to_owned(), why };
    if index.len() > MAX_HEADER_BYTES {
        return Err(bad(format!("it has {} bytes, at most {MAX_HEADER_BYTES} are allowed", index.len())));
    }
    let json = read_part(index, 0, index.len(), "the index", "the index")?;
    let shards = parse_shards(&json, index.path())?;
    drop(json);
    let directory = index.path().parent().unwrap_or(Path::new(""));
    let mut files = Vec::with_capacity(shards.len());
    for shard in &shards {
        files.push(WeightFile::open(directory.join(&shard.path)).map_err(|error| match error {
            WeightsError::Open { why, .. } if why.kind == std::io::ErrorKind::NotFound => {
                WeightsError::MissingShard {
                    index: index.path().to_owned(),
                    shard: shard.path.display().to_string(),
                    tensor: shard.tensors.first().cloned().unwrap_or_default(),
                    others: (shard.tensors.len() as u64).saturating_sub(1),
                    why,
                }
            }
            other => other,
        })?);
    }
    let mut opened = TensorIndex::from_files(files)?;
    opened.is_sharded = true;
    for (number, shard) in shards.iter().enumerate() {
        for tensor in &shard.tensors {
            let holder = opened.tensor(tensor).map(|id| opened.tensor_info(id).file as usize);
            if holder != Some(number) {
                return Err(WeightsError::NotInShard {
                    index: index.path().to_owned(),
                    tensor: tensor.clone(),
                    shard: directory.join(&shard.path),
                });
            }
        }
    }
    Ok(opened)
}

/// Reads the JSON of the index at `index` (for errors): which tensors are to be in which shard, in the
/// order of the shards' paths. Opens nothing.
///
/// # Errors
/// [`WeightsError::BadIndex`] for what is no index, [`WeightsError::ShardOutside`] for a shard that is not
/// inside the index's directory.
pub fn parse_shards(json: &[u8], index: &Path) -> Result<Vec<Shard>, WeightsError> {
    let bad = |why: String| WeightsError::BadIndex { file: index.to_owned(), why };
    let mut shards: BTreeMap<PathBuf, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in parse_index(json).map_err(bad)? {
        let Some(path) = inside(&shard) else {
            return Err(WeightsError::ShardOutside { index: index.to_owned(), shard, tensor });
        };
        shards.entry(path).or_default().push(tensor);
    }
    Ok(shards.into_iter().map(|(path, tensors)| Shard { path, tensors }).collect())
}

/// The shard's path if it stays inside the index's directory. Links are followed when it is opened, as
/// model caches are made of them; only the spelling is checked.
fn inside(shard: &str) -> Option<PathBuf> {
    let mut path = PathBuf::new();
    for component in Path::new(shard).components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::Prefix(_) | Component::RootDir | Component::ParentDir => return None,
        }
    }
    (!path.as_os_str().is_empty()).then_some(path)
}

/// Tensor names and their shards, in name order.
fn parse_index(json: &[u8]) -> Result<BTreeMap<String, String>, String> {
    let mut reader = serde_json::Deserializer::from_slice(json);
    let map = reader.deserialize_map(IndexVisitor).map_err(|error| error.to_string())?;
    reader.end().map_err(|error| error.to_string())?;
    match map {
        Some(map) if map.is_empty() => Err("its `weight_map` names no tensor".to_owned()),
        Some(map) => Ok(map),
        None => Err("it has no `weight_map`".to_owned()),
    }
}

/// Reads `weight_map` and passes over the rest: `metadata` has fields of every kind in the wild.
struct IndexVisitor;

impl<'de> Visitor<'de> for IndexVisitor {
    type Value = Option<BTreeMap<String, String>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `weight_map`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            if key == "weight_map" {
                let UniqueMap(names) = map.next_value()?;
                if found.replace(names).is_some() {
                    return Err(de::Error::duplicate_field("weight_map"));
                }
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// A map of text to text that refuses a key given twice.
struct UniqueMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Unique;
        impl<'de> Visitor<'de> for Unique {
            type Value = UniqueMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensor names and file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if entries.contains_key(&key) {
                        return Err(de::Error::custom(format_args!("tensor `{key}` is mapped twice")));
                    }
                    entries.insert(key, value);
                }
                Ok(UniqueMap(entries))
            }
        }
        json.deserialize_map(Unique)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_stays_inside_the_directory_by_its_spelling() {
        assert_eq!(inside("a.safetensors"), Some(PathBuf::from("a.safetensors")));
        assert_eq!(inside("./sub//a.safetensors"), Some(PathBuf::from("sub/a.safetensors")));
        for bad in ["../a.safetensors", "sub/../../a", "/etc/passwd", "", ".", "a/.."] {
            assert_eq!(inside(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_index_is_read_without_minding_its_other_fields() {
        let map =
            parse_index(br#"{"metadata":{"total_size":1.5e9,"x":[{}]},"weight_map":{"b":"2","a":"1"}}"#);
        let pairs: Vec<_> = map.unwrap().into_iter().collect();
        assert_eq!(pairs, [("a".into(), "1".into()), ("b".into(), "2".into())]);
    }

    #[test]
    fn a_bad_index_says_what_is_wrong() {
        let why = |json: &str| parse_index(json.as_bytes()).unwrap_err();
        assert!(why("{}").contains("weight_map"));
        assert!(why("[]").contains("an object"));
        assert!(why(r#"{"weight_map":{"a":1}}"#).contains("string"));
        assert!(why(r#"{"weight_map":{"a":"1","\u0061":"2"}}"#).contains("`a` is mapped twice"));
        assert!(why(r#"{"weight_map":{}} x"#).contains("trailing"));
    }
}
