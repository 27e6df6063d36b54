//! The models of a stress run: small files with seeded tensors, and what their bytes should be on a card.
//!
//! Each file is written to the folder for temporary files and is gone when the run ends, on Ctrl-C too. Units
//! are of very different sizes, measured in pages of the card: from a fraction of a page to a few dozen, so
//! that they share pages, cover several, and are cut into pieces. Some models are cast on the way to the card.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use vram_pager::device::{FloatType, SharedDevice};
use vram_pager::pager::{Factor, PatchSet, TensorPatch, Verifier};
use vram_pager::weights::{Dtype, LayoutOptions, PageLayout, TensorId, TensorIndex};

use super::numbers::Numbers;
use crate::interrupt::Scratch;
use crate::output::Failure;

/// Sets of patches of each model, beside none.
pub(super) const PATCH_SETS: usize = 2;

/// How large the models are.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_field_names, reason = "each is a number of bytes, and says so")]
pub(super) struct Sizes {
    /// The card's page in bytes.
    pub(super) page_bytes: u64,
    /// Bytes of each model on the card, about.
    pub(super) model_bytes: u64,
    /// The most bytes of one unit.
    pub(super) unit_bytes: u64,
}

/// Checksums by tensor, first row and number of rows.
type Sums = HashMap<(u32, u64, u64), u64>;

/// A model's file, and what it is on a card.
pub(super) struct Kind {
    /// Gone when this is dropped.
    _file: Scratch,
    pub(super) index: Arc<TensorIndex>,
    pub(super) compute: Option<Dtype>,
    /// Units of more bytes are cut into pieces of so many.
    pub(super) piece_bytes: Option<u64>,
    /// The patches of each set.
    pub(super) patches: Vec<Vec<TensorPatch>>,
    /// By set, none first: computes what the bytes should be, with no pager involved.
    references: Vec<Verifier>,
    sums: Vec<Mutex<Sums>>,
}

impl Kind {
    /// Writes model `number` of `seed`. `reference` is any device: nothing is put on it.
    pub(super) fn make(
        seed: u64,
        number: u64,
        sizes: Sizes,
        reference: &SharedDevice,
    ) -> Result<Self, Failure> {
        let mut numbers = Numbers::new(seed, number ^ 0x00F1_1E00);
        let name = format!("vram-pager-stress-{}-{number}.safetensors", std::process::id());
        let file = Scratch::new(std::env::temp_dir().join(name));
        let compute = [None, Some(Dtype::BF16), None, Some(Dtype::F32)]
            [usize::try_from(number % 4).unwrap_or_default()];
        write_model(&file, &mut numbers, sizes, compute)
            .map_err(|error| Failure::Failed(format!("cannot write {}: {error}", file.path().display())))?;
        let index = Arc::new(TensorIndex::open(file.path())?);
        let layout = Arc::new(PageLayout::new(
            &index,
            &LayoutOptions { compute, ..LayoutOptions::new(sizes.page_bytes) },
        )?);
        let patches: Vec<_> = (0..PATCH_SETS).map(|_| make_patches(&index, &layout, &mut numbers)).collect();
        let mut references = vec![Verifier::for_layout(reference, &index, &layout, None)?];
        for patches in &patches {
            let set = PatchSet::for_layout(&index, &layout, patches.clone())?;
            references.push(Verifier::for_layout(reference, &index, &layout, Some(set))?);
        }
        let piece_bytes = number.is_multiple_of(2).then_some(4 * sizes.page_bytes);
        let sums = references.iter().map(|_| Mutex::default()).collect();
        Ok(Self { _file: file, index, compute, piece_bytes, patches, references, sums })
    }

    /// The checksum that rows of a tensor have on a card under a set (0 is none).
    pub(super) fn expected(&self, set: usize, tensor: TensorId, rows: &Range<u64>) -> Result<u64, Failure> {
        let key = (tensor.0, rows.start, rows.end);
        if let Some(sum) = self.sums[set].lock().get(&key) {
            return Ok(*sum);
        }
        let sum = self.references[set].expected_sum(tensor, rows)?;
        self.sums[set].lock().insert(key, sum);
        Ok(sum)
    }
}

/// The bytes of an element on the card.
fn element_bytes(dtype: Dtype, compute: Option<Dtype>) -> u64 {
    compute.unwrap_or(dtype).byte_size().unwrap_or(4)
}

struct Tensor {
    name: String,
    dtype: Dtype,
    shape: [u64; 2],
}

/// Tensors until the model is as large on the card as it should be.
fn tensors(numbers: &mut Numbers, sizes: Sizes, compute: Option<Dtype>) -> Vec<Tensor> {
    let page = sizes.page_bytes;
    let (mut all, mut total) = (Vec::new(), 0);
    let mut unit = 0_u64;
    while total < sizes.model_bytes {
        // One of the first is large enough to be cut.
        let bytes = match (unit, numbers.below(100)) {
            (3, _) => page * 20,
            (_, 0..60) => page / 16 + numbers.below(page / 2),
            (_, 60..92) => page / 2 + numbers.below(2 * page),
            _ => 2 * page + numbers.below(5 * page),
        };
        let bytes = bytes.min(sizes.unit_bytes);
        let dtype = numbers.pick(&[Dtype::BF16, Dtype::BF16, Dtype::F16, Dtype::F32]);
        let each = element_bytes(dtype, compute);
        let rows = if bytes > 2 * page { numbers.pick(&[33, 64, 100]) } else { numbers.pick(&[1, 3, 8, 16]) };
        let columns = (bytes / each / rows).max(1);
        let mut add = |name: &str, shape: [u64; 2]| {
            total += shape[0] * shape[1] * each;
            all.push(Tensor { name: format!("blocks.{unit:04}.{name}"), dtype, shape });
        };
        add("weight", [rows, columns]);
        if unit.is_multiple_of(5) {
            add("bias", [rows, 1]);
        }
        unit += 1;
    }
    all
}

fn write_model(
    file: &Scratch,
    numbers: &mut Numbers,
    sizes: Sizes,
    compute: Option<Dtype>,
) -> std::io::Result<()> {
    let tensors = tensors(numbers, sizes, compute);
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for Tensor { name, dtype, shape } in &tensors {
        let end = at + shape[0] * shape[1] * dtype.byte_size().unwrap_or(4);
        let entry =
            serde_json::json!({ "dtype": dtype.to_string(), "shape": shape, "data_offsets": [at, end] });
        header.insert(name.clone(), entry);
        at = end;
    }
    let mut header = serde_json::Value::Object(header).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut out = BufWriter::new(File::create(file.path())?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for Tensor { dtype, shape, .. } in &tensors {
        write_numbers(&mut out, *dtype, shape[0] * shape[1], numbers)?;
    }
    out.flush()
}

/// Random finite numbers of about one, so that casts and patches have something to round.
fn write_numbers(
    out: &mut impl Write,
    dtype: Dtype,
    count: u64,
    numbers: &mut Numbers,
) -> std::io::Result<()> {
    for _ in 0..count {
        let random = numbers.next();
        // The sign, an exponent near that of one, and any mantissa.
        let [low, high, a, b, ..] = random.to_le_bytes();
        let sign = high & 0x80;
        match dtype {
            Dtype::F32 => out.write_all(&[a, b, low, sign | 0x3f])?,
            // An F16 between 0.5 and 4 in size.
            Dtype::F16 => out.write_all(&[low, sign | 0x38 | (high & 0x07)])?,
            _ => out.write_all(&[low, sign | 0x3f])?,
        }
    }
    Ok(())
}

/// Low-rank patches of some tensors whose factors are much smaller than they are.
fn make_patches(index: &TensorIndex, layout: &PageLayout, numbers: &mut Numbers) -> Vec<TensorPatch> {
    let mut patches = Vec::new();
    for (id, info) in (0..).map(TensorId).zip(index.tensors()) {
        if info.shape[0] < 8 || info.shape[1] < 8 || !numbers.per_mille(300) {
            continue;
        }
        let (dtype, bytes) = match layout.tensor_at(id).dtype {
            Dtype::F32 => (FloatType::F32, 4),
            Dtype::F16 => (FloatType::F16, 2),
            _ => (FloatType::Bf16, 2),
        };
        let (rows, columns, rank) = (info.shape[0], info.shape[1], 1 + numbers.below(2));
        let mut factor = |shape: [u64; 2]| {
            let mut data = Vec::new();
            let dtype_in_file = if bytes == 4 {
                Dtype::F32
            } else if dtype == FloatType::F16 {
                Dtype::F16
            } else {
                Dtype::BF16
            };
            // Writing to a vector cannot fail.
            let _ = write_numbers(&mut data, dtype_in_file, shape[0] * shape[1], numbers);
            Factor { dtype, shape, bytes: data }
        };
        let (up, down) = (factor([rows, rank]), factor([rank, columns]));
        patches.push(TensorPatch { tensor: id, up, down, scale: 0.5 });
    }
    patches
}
