//! Layouts, as lists of tensors, and files that hold their headers only.

use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::sync::Arc;

use vram_pager::weights::{Dtype, TensorIndex};

use super::{Numbers, Outcome};

#[path = "../../src/bin/vram-pager/layouts.rs"]
mod layouts;

pub(crate) use layouts::Tensor;

const MB: u64 = 1_000_000;

/// The layouts that the benches use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    Flux,
    Sdxl,
    Llama,
    T5,
    Mixtral,
    /// Units of 1 to 9 MB, 8 GB in all.
    Small,
    /// Units of 50 to 150 MB, 12 GB in all.
    Medium,
    /// Units of 0.5 to 1 GB, 16 GB in all.
    Large,
}

impl Layout {
    pub fn name(self) -> &'static str {
        match self {
            Self::Flux => "FLUX.1-dev",
            Self::Sdxl => "SDXL",
            Self::Llama => "Llama-3-8B",
            Self::T5 => "T5-XXL",
            Self::Mixtral => "Mixtral-8x7B",
            Self::Small => "1-9 MB",
            Self::Medium => "50-150 MB",
            Self::Large => "0.5-1 GB",
        }
    }

    /// Its tensors in file order.
    pub(crate) fn tensors(self) -> Vec<Tensor> {
        match self {
            Self::Flux => layouts::Model::Flux1Dev.tensors(),
            Self::Sdxl => layouts::Model::SdxlUnet.tensors(),
            Self::Llama => layouts::Model::Llama3.tensors(),
            Self::T5 => layouts::Model::T5Xxl.tensors(),
            Self::Mixtral => mixtral(),
            Self::Small => synthetic(MB..9 * MB, 8_000 * MB, 1),
            Self::Medium => synthetic(50 * MB..150 * MB, 12_000 * MB, 2),
            Self::Large => synthetic(500 * MB..1_000 * MB, 16_000 * MB, 3),
        }
    }

    /// A file of this layout, without bytes.
    pub fn file(self) -> Outcome<ModelFile> {
        ModelFile::new(&self.tensors())
    }
}

/// Mixtral-8x7B from its configuration: 995 BF16 tensors, 93.4 GB.
fn mixtral() -> Vec<Tensor> {
    const WIDTH: u64 = 4096;
    const KEYS: u64 = 1024;
    const INNER: u64 = 14_336;
    const WORDS: u64 = 32_000;
    const EXPERTS: u64 = 8;
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[u64]| {
        tensors.push(Tensor { name, dtype: Dtype::BF16, shape: shape.to_vec() });
    };
    add("model.embed_tokens.weight".to_owned(), &[WORDS, WIDTH]);
    for layer in 0..32 {
        let layer = format!("model.layers.{layer}");
        for (name, rows) in [("q", WIDTH), ("k", KEYS), ("v", KEYS), ("o", WIDTH)] {
            add(format!("{layer}.self_attn.{name}_proj.weight"), &[rows, WIDTH]);
        }
        add(format!("{layer}.block_sparse_moe.gate.weight"), &[EXPERTS, WIDTH]);
        for expert in 0..EXPERTS {
            let expert = format!("{layer}.block_sparse_moe.experts.{expert}");
            add(format!("{expert}.w1.weight"), &[INNER, WIDTH]);
            add(format!("{expert}.w2.weight"), &[WIDTH, INNER]);
            add(format!("{expert}.w3.weight"), &[INNER, WIDTH]);
        }
        add(format!("{layer}.input_layernorm.weight"), &[WIDTH]);
        add(format!("{layer}.post_attention_layernorm.weight"), &[WIDTH]);
    }
    add("model.norm.weight".to_owned(), &[WIDTH]);
    add("lm_head.weight".to_owned(), &[WORDS, WIDTH]);
    assert_eq!((tensors.len(), total(&tensors)), (995, 93_405_585_408), "the published count and bytes");
    tensors
}

/// Units of one tensor each, sizes even in `bytes`, until `total` bytes are reached.
pub(crate) fn synthetic(bytes: Range<u64>, total: u64, seed: u64) -> Vec<Tensor> {
    let mut numbers = Numbers(seed);
    let mut tensors = Vec::new();
    let mut sum = 0;
    while sum < total {
        let rows = numbers.between(bytes.start, bytes.end).div_ceil(2048);
        sum += rows * 2048;
        tensors.push(unit(tensors.len(), rows * 2048));
    }
    tensors
}

/// `count` units of `bytes` each (a multiple of 2 KiB).
pub(crate) fn uniform(count: usize, bytes: u64) -> Vec<Tensor> {
    (0..count).map(|number| unit(number, bytes)).collect()
}

fn unit(number: usize, bytes: u64) -> Tensor {
    Tensor {
        name: format!("blocks.{number:06}.weight"),
        dtype: Dtype::BF16,
        shape: vec![(bytes / 2048).max(1), if bytes < 2048 { bytes / 2 } else { 1024 }],
    }
}

fn bytes_of(tensor: &Tensor) -> u64 {
    tensor.shape.iter().product::<u64>() * tensor.dtype.bits() / 8
}

pub(crate) fn total(tensors: &[Tensor]) -> u64 {
    tensors.iter().map(bytes_of).sum()
}

/// A safetensors file in a folder of its own: a header and a hole.
pub struct ModelFile {
    folder: tempfile::TempDir,
    pub index: Arc<TensorIndex>,
}

impl ModelFile {
    pub(crate) fn new(tensors: &[Tensor]) -> Outcome<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.safetensors");
        let (header, data) = header(tensors);
        let mut file = File::create(&path)?;
        file.write_all(&header)?;
        file.set_len(header.len() as u64 + data)?;
        drop(file);
        let index = Arc::new(TensorIndex::open(&path)?);
        Ok(Self { folder, index })
    }

    /// The file.
    pub fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("model.safetensors")
    }

    pub fn bytes(&self) -> u64 {
        self.index.total_bytes()
    }

    pub fn units(&self) -> usize {
        self.index.units().len()
    }
}

/// The file's first bytes up to its data, and the data's length.
pub(crate) fn header(tensors: &[Tensor]) -> (Vec<u8>, u64) {
    let mut entries = serde_json::Map::new();
    let mut end = 0;
    for tensor in tensors {
        let begin = end;
        end += bytes_of(tensor);
        let entry = serde_json::json!({
            "dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [begin, end],
        });
        entries.insert(tensor.name.clone(), entry);
    }
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    (bytes, end)
}
