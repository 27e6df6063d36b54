//! What the fuzzers run: one function a target, shared by libFuzzer (`fuzz/run`) and by the driver that
//! runs on stable Rust (`tests/fuzz_corpus.rs`).
//!
//! A target parses bytes that an attacker chose and then holds the answer to the format's rules. What it
//! parses it hands to `measured`, so that a driver can count what the parser alone allocates; the checks
//! afterwards are not counted. A broken promise is a panic.

#![allow(unreachable_pub, reason = "each program that includes this file is a crate of its own")]

use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use vram_pager::patcher::{Lora, LoraError, LoraFile, LoraPatches, lora_patches};
use vram_pager::weights::{
    FileIdentity, FileSource, Header, HeaderError, TensorIndex, WeightFile, WeightsError, parse_shards,
    validate,
};

/// What runs the parser of a target: `|parse| parse()`, or that with something counted around it.
pub type Measured<'a> = &'a mut dyn FnMut(&mut dyn FnMut());

/// No message is longer, whatever the names in a file.
const LONGEST_MESSAGE: usize = 4000;

/// The header of a file in memory.
pub fn header(data: &[u8], measured: Measured<'_>) {
    let mut answer = None;
    measured(&mut || answer = Some(validate(data)));
    let answer = answer.expect("the parser ran");
    let reference = SafeTensors::deserialize(data);
    match &answer {
        Ok(header) => {
            header_keeps_the_rules(header, data);
            let reference = reference.expect("what is accepted the reference accepts");
            agrees(header, &reference, data);
            survives_a_round_trip(header, &reference);
        }
        Err(error) => {
            assert!(error.to_string().len() < LONGEST_MESSAGE, "a message of megabytes");
            // The reference accepts what its own specification forbids; nothing else is refused by us alone.
            if reference.is_ok() {
                assert!(is_stricter_rule(error), "only we refuse: {error}");
            }
        }
    }
    // The way a model is opened gives the same verdict.
    let mut opened = None;
    measured(&mut || opened = Some(index_of(data)));
    match (answer, opened.expect("the parser ran")) {
        (Ok(header), Ok(index)) => {
            assert_eq!(index.tensors().len(), header.tensors.len());
            let in_units: usize = index.units().iter().map(|unit| unit.tensors.len()).sum();
            assert_eq!(in_units, header.tensors.len(), "every tensor is in one unit");
            for tensor in &header.tensors {
                let id = index.tensor(&tensor.name).expect("found by its name");
                assert_eq!(index.tensor_info(id).offset, tensor.offset);
            }
        }
        (Err(header), Err(WeightsError::Header { why, .. })) => assert_eq!(header, why),
        (header, opened) => panic!("two verdicts: {header:?} and {opened:?}"),
    }
}

/// The JSON of an index of shards.
pub fn index(data: &[u8], measured: Measured<'_>) {
    let name = Path::new("model.safetensors.index.json");
    let mut answer = None;
    measured(&mut || answer = Some(parse_shards(data, name)));
    let shards = match answer.expect("the parser ran") {
        Ok(shards) => shards,
        Err(error) => {
            assert!(
                matches!(error, WeightsError::BadIndex { .. } | WeightsError::ShardOutside { .. }),
                "{error}"
            );
            let text = error.to_string();
            assert!(text.contains("model.safetensors.index.json") && text.len() < LONGEST_MESSAGE, "{text}");
            return;
        }
    };
    let mut map = BTreeMap::new();
    for shard in &shards {
        assert!(!shard.tensors.is_empty(), "a shard without tensors");
        assert!(shard.path.components().all(|part| matches!(part, Component::Normal(_))), "{:?}", shard.path);
        for tensor in &shard.tensors {
            assert!(map.insert(tensor.clone(), &shard.path).is_none(), "`{tensor}` is in two shards");
        }
    }
    assert!(!map.is_empty());
    // A plain reader of JSON finds the same map, where it can read the text at all (it minds depth).
    let Ok(json) = serde_json::from_slice::<serde_json::Value>(data) else { return };
    let plain = json["weight_map"].as_object().expect("a map");
    assert_eq!(plain.len(), map.len());
    for (tensor, shard) in plain {
        let spelled = Path::new(shard.as_str().expect("text"));
        let path = map.get(tensor).expect("the same tensors");
        assert!(spelled.components().filter(|part| *part != Component::CurDir).eq(path.components()));
    }
}

/// A LoRA file in memory, matched to a small model.
pub fn lora(data: &[u8], measured: Measured<'_>) {
    let mut answer = None;
    measured(&mut || answer = Some(patches(data)));
    match answer.expect("the parser ran") {
        Ok((model, file, patches)) => patches_keep_the_rules(&model, &file, &patches),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("memory.safetensors") && text.len() < LONGEST_MESSAGE, "{text}");
        }
    }
}

/// The patches that the LoRA file `data` is for a small model, applied twice.
pub fn patches(data: &[u8]) -> Result<(TensorIndex, LoraFile, LoraPatches), LoraError> {
    let model = index_of(&model_bytes())?;
    let file = LoraFile::from_index(index_of(data)?)?;
    let loras = [Lora { file: &file, strength: 1.0 }, Lora { file: &file, strength: -0.5 }];
    let patches = lora_patches(&model, &loras)?;
    Ok((model, file, patches))
}

fn header_keeps_the_rules(header: &Header, data: &[u8]) {
    let length = u64::from_le_bytes(*data.first_chunk().expect("eight bytes"));
    assert_eq!(header.data_start, 8 + length);
    let mut end = header.data_start;
    let mut names = std::collections::BTreeSet::new();
    for tensor in &header.tensors {
        assert_eq!(tensor.offset, end, "`{}`: a hole or an overlap", tensor.name);
        let bits = tensor.shape.iter().fold(u128::from(tensor.dtype.bits()), |bits, &dimension| {
            bits.checked_mul(u128::from(dimension)).expect("no size beyond 128 bits is accepted")
        });
        assert_eq!(bits, u128::from(tensor.bytes) * 8, "`{}`: another size", tensor.name);
        end += tensor.bytes;
        assert!(names.insert(&tensor.name), "`{}`: twice", tensor.name);
        assert_ne!(tensor.name, "__metadata__");
    }
    assert_eq!(end, data.len() as u64, "bytes that belong to no tensor");
}

fn agrees(header: &Header, reference: &SafeTensors<'_>, data: &[u8]) {
    assert_eq!(header.tensors.len(), reference.len());
    for tensor in &header.tensors {
        let view = reference.tensor(&tensor.name).expect("the reference has it");
        let start = usize::try_from(tensor.offset).expect("inside a slice");
        let end = start + usize::try_from(tensor.bytes).expect("inside a slice");
        assert_eq!(view.data(), &data[start..end]);
        assert_eq!(view.dtype().to_string(), tensor.dtype.name());
        assert!(view.shape().iter().map(|&dimension| dimension as u64).eq(tensor.shape.iter().copied()));
    }
}

fn survives_a_round_trip(header: &Header, reference: &SafeTensors<'_>) {
    let views: Vec<(String, TensorView<'_>)> = header
        .tensors
        .iter()
        .map(|tensor| (tensor.name.clone(), reference.tensor(&tensor.name).expect("the reference has it")))
        .collect();
    let written = safetensors::serialize(views, None).expect("the reference writes it");
    let again = validate(&written).expect("what the reference writes is accepted");
    let key = |header: &Header| -> BTreeMap<String, (String, Vec<u64>, u64)> {
        let tensors = header.tensors.iter();
        tensors.map(|t| (t.name.clone(), (t.dtype.name().to_owned(), t.shape.clone(), t.bytes))).collect()
    };
    assert_eq!(key(&again), key(header));
}

/// The stricter rules that the module `weights::header` documents.
fn is_stricter_rule(error: &HeaderError) -> bool {
    matches!(
        error,
        HeaderError::DuplicateTensor { .. }
            | HeaderError::LeadingSpace
            | HeaderError::UnknownField { .. }
            | HeaderError::EntryNotAnObject { .. }
    )
}

fn patches_keep_the_rules(model: &TensorIndex, file: &LoraFile, patches: &LoraPatches) {
    assert!(file.keys().next().is_some(), "a LoRA without a pair");
    assert!(!patches.patches.is_empty(), "nothing matches, and no error");
    for patch in &patches.patches {
        let info = model.tensor_info(patch.tensor);
        let columns: u64 = info.shape[1..].iter().product();
        let ([rows, rank], [down_rank, down_columns]) = (patch.up.shape, patch.down.shape);
        assert_eq!((rows, down_columns), (info.shape[0], columns), "`{}`: factors do not fit", info.name);
        assert_eq!(rank, down_rank);
        assert!(rank > 0 && patch.scale.is_finite(), "rank {rank}, scale {}", patch.scale);
        for factor in [&patch.up, &patch.down] {
            let size = factor.dtype.bytes();
            assert_eq!(factor.bytes.len() as u64, factor.shape[0] * factor.shape[1] * size);
        }
    }
}

/// A model that LoRAs in the corpus are made for.
fn model_bytes() -> Vec<u8> {
    let json = r#"{"blocks.0.attn.weight":{"dtype":"BF16","shape":[4,3],"data_offsets":[0,24]},
"conv.weight":{"dtype":"F16","shape":[2,2,1,1],"data_offsets":[24,32]},
"table":{"dtype":"F32","shape":[2,2],"data_offsets":[32,48]}}"#;
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(bytes.len() + 48, 0);
    bytes
}

/// A file in memory.
struct Memory(Box<[u8]>);

impl FileSource for Memory {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
        let count = buf.len().min(self.0.len() - start);
        buf[..count].copy_from_slice(&self.0[start..start + count]);
        Ok(count)
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        let length = self.0.len() as u64;
        Ok(FileIdentity { device: 0, inode: 0, length, modified: (0, 0), changed: (0, 0) })
    }

    fn path_identity(&self) -> io::Result<FileIdentity> {
        self.identity()
    }
}

fn index_of(bytes: &[u8]) -> Result<TensorIndex, WeightsError> {
    let file = WeightFile::from_source("memory.safetensors", Box::new(Memory(bytes.into())))?;
    TensorIndex::from_files(vec![file])
}
