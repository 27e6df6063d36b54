//! LoRA files: pairs of low-rank factors, matched to the tensors of a model.
//!
//! A file goes through the one validator of the format ([`TensorIndex`]). Two naming habits are known:
//!
//! | up (rows × rank) | down (rank × columns) | alpha |
//! |---|---|---|
//! | `<key>.lora_up.weight` | `<key>.lora_down.weight` | `<key>.alpha` |
//! | `<key>.lora_B.weight` | `<key>.lora_A.weight` | `<key>.alpha` |
//!
//! `alpha` defaults to the rank; the patched weight is `W + strength × (alpha / rank) × up · down`.
//!
//! A key stands for the model's tensor `<key>.weight`, or `<key>` itself. If there is none, the prefixes
//! of [`PREFIXES`] are taken off the key, and put before what is left, one at a time; and a key that
//! begins with `lora_unet_`, `lora_te_` or the like is matched with the dots of the model's names written
//! as underscores, if exactly one name reads so. Keys that match nothing are listed for the caller; a file
//! of which nothing matches is an error.
//!
//! Factors of a convolution (4-D) are taken as matrices of their first dimension and the product of the
//! others. Factors are F32, F16 or BF16 and are kept so; of two types, or of fp8, both are widened to F32,
//! which loses nothing. F64 and integers are refused.
//!
//! Pure but for reading the file; owns the open file. Takes no lock.

#![deny(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::device::FloatType;
use crate::pager::{Factor, PagerError, TensorPatch};
use crate::transfer::{cast_bytes, float_type};
use crate::weights::{
    Dtype, TensorId, TensorIndex, WeightsError, dimensions, path, read_part, shown, zeroed,
};

/// What writers of LoRA files put before a module's path, and what models have before theirs.
pub const PREFIXES: [&str; 8] = [
    "diffusion_model.",
    "model.diffusion_model.",
    "transformer.",
    "unet.",
    "text_encoder.",
    "base_model.model.",
    "model.",
    "lora.",
];

/// Prefixes of keys whose dots are written as underscores.
const FLAT_PREFIXES: [&str; 6] =
    ["lora_unet_", "lora_transformer_", "lora_te_", "lora_te1_", "lora_te2_", "lycoris_"];

/// What host memory for a tensor of a LoRA is asked for as.
const FACTOR: &str = "a LoRA's factor";

/// Endings of tensors that change what the factors mean: a file with one is not applied by halves.
const NOT_KNOWN: [&str; 6] = [
    ".lora_mid.weight",
    ".dora_scale",
    ".lora_magnitude_vector",
    ".lora_magnitude_vector.weight",
    ".w_norm",
    ".b_norm",
];

/// Why a LoRA cannot be applied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// The file cannot be read, or is no weight file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The model cannot be patched so.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// A factor without its counterpart.
    #[error(
        "{}: `{tensor}` has no counterpart `{missing}`",
        path(file), tensor = shown(tensor), missing = shown(missing)
    )]
    HalfAPair {
        /// The file.
        file: PathBuf,
        /// The factor that is there.
        tensor: String,
        /// The one that is not.
        missing: String,
    },
    /// Two pairs for one key, one in each naming habit.
    #[error(
        "{}: `{first}` and `{second}` are both the up factor of one key",
        path(file), first = shown(first), second = shown(second)
    )]
    TwoPairs {
        /// The file.
        file: PathBuf,
        /// The up factor in one habit.
        first: String,
        /// The up factor in the other.
        second: String,
    },
    /// The factors do not fit each other.
    #[error(
        "{}: `{up}` {up_shape} and `{down}` {down_shape} do not multiply: the columns of the first are the \
         rank, and so are the rows of the second",
        path(file), up = shown(up), down = shown(down), up_shape = dimensions(up_shape),
        down_shape = dimensions(down_shape)
    )]
    Rank {
        /// The file.
        file: PathBuf,
        /// The up factor.
        up: String,
        /// Its shape.
        up_shape: Box<[u64]>,
        /// The down factor.
        down: String,
        /// Its shape.
        down_shape: Box<[u64]>,
    },
    /// A factor does not fit the tensor that it patches.
    #[error(
        "{}: `{factor}` {factor_shape} does not fit the model's `{tensor}` {tensor_shape}",
        path(file), tensor = shown(tensor), factor = shown(factor),
        factor_shape = dimensions(factor_shape), tensor_shape = dimensions(tensor_shape)
    )]
    Shape {
        /// The LoRA's file.
        file: PathBuf,
        /// The factor.
        factor: String,
        /// Its shape.
        factor_shape: Box<[u64]>,
        /// The model's tensor.
        tensor: String,
        /// Its shape.
        tensor_shape: Box<[u64]>,
    },
    /// A tensor of a type that it cannot have here.
    #[error("{}: `{tensor}` is of type {dtype}; {wanted}", path(file), tensor = shown(tensor))]
    Type {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// What it could be.
        wanted: &'static str,
    },
    /// An `alpha`, or a strength, that is no finite number of one element.
    #[error("{}: {what} is {value}", path(file), what = shown(what), value = shown(value))]
    Number {
        /// The file.
        file: PathBuf,
        /// The tensor, or the strength.
        what: String,
        /// What was found.
        value: String,
    },
    /// A tensor that changes what the factors mean, in a way that is not known here.
    #[error(
        "{}: `{tensor}` is of a kind of LoRA that is not applied here",
        path(file), tensor = shown(tensor)
    )]
    NotKnown {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// There is no pair of factors in the file.
    #[error("{}: no pair of factors among its {tensors} tensors; is it a LoRA?", path(file))]
    Empty {
        /// The file.
        file: PathBuf,
        /// Tensors in the file.
        tensors: usize,
    },
    /// No key of the file is a tensor of the model.
    #[error(
        "{}: none of its {keys} keys names a tensor of {}; the first is `{first}`",
        path(file), path(model), first = shown(first)
    )]
    NothingMatches {
        /// The LoRA's file.
        file: PathBuf,
        /// The model's file.
        model: PathBuf,
        /// Keys in the LoRA.
        keys: usize,
        /// The first of them.
        first: String,
    },
}

/// A pair of factors.
#[derive(Clone, Debug)]
struct Pair {
    key: String,
    up: TensorId,
    down: TensorId,
    /// Shapes as matrices.
    rows: u64,
    rank: u64,
    columns: u64,
    /// `alpha / rank`.
    scale: f64,
}

/// A LoRA file, checked as far as it can be without a model.
///
/// Two naming habits are known:
///
/// | up (rows × rank) | down (rank × columns) | alpha |
/// |---|---|---|
/// | `<key>.lora_up.weight` | `<key>.lora_down.weight` | `<key>.alpha` |
/// | `<key>.lora_B.weight` | `<key>.lora_A.weight` | `<key>.alpha` |
///
/// `alpha` defaults to the rank; the patched weight is `W + strength × (alpha / rank) × up · down`.
///
/// A key stands for the model's tensor `<key>.weight`, or `<key>` itself. If there is none, the prefixes of
/// [`LORA_PREFIXES`](crate::patcher::LORA_PREFIXES) are taken off the key, and put before what is left, one at a
/// time; and a key that begins with `lora_unet_`, `lora_te_` or the like is matched with the dots of the model's
/// names written as underscores, if exactly one name reads so.
///
/// Factors of a convolution (4-D) are taken as matrices of their first dimension and the product of the others.
/// Factors are F32, F16 or BF16 and are kept so; of two types, or of fp8, both are widened to F32. F64 and integers
/// are refused, and so are files of which a half would be applied (`DoRA`, a middle factor).
#[derive(Debug)]
pub struct LoraFile {
    index: TensorIndex,
    pairs: Vec<Pair>,
    ignored: Vec<String>,
}

/// One LoRA of a list: a file, and how strongly it is applied.
#[derive(Clone, Copy, Debug)]
pub struct Lora<'a> {
    /// The file.
    pub file: &'a LoraFile,
    /// The factor on all of its patches; 1 is as trained, 0 changes nothing, negative turns it round.
    pub strength: f32,
}

/// What LoRAs give for a model.
#[derive(Debug, Default)]
pub struct LoraPatches {
    /// The patches, in the order of the LoRAs; those of one tensor are applied in it.
    pub patches: Vec<TensorPatch>,
    /// What was not applied: keys that name no tensor of the model, and tensors that are no factor.
    pub unmatched: Vec<String>,
}

/// A factor's role, told from its name's ending.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Up,
    Down,
}

const ENDINGS: [(&str, Role, &str); 4] = [
    (".lora_up.weight", Role::Up, ".lora_down.weight"),
    (".lora_down.weight", Role::Down, ".lora_up.weight"),
    (".lora_B.weight", Role::Up, ".lora_A.weight"),
    (".lora_A.weight", Role::Down, ".lora_B.weight"),
];

impl LoraFile {
    /// Opens a `.safetensors` file and finds its pairs. No factor is read yet.
    ///
    /// # Errors
    /// A file that is no valid weight file, a factor without its counterpart, factors that do not
    /// multiply, no pair at all, or a kind of LoRA that is not known here.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoraError> {
        Self::from_index(TensorIndex::open(path)?)
    }

    /// As [`Self::open`], of a file that is open.
    pub fn from_index(index: TensorIndex) -> Result<Self, LoraError> {
        let mut lora = Self { index, pairs: Vec::new(), ignored: Vec::new() };
        let mut ups: BTreeMap<String, TensorId> = BTreeMap::new();
        for (id, info) in (0..).map(TensorId).zip(lora.index.tensors()) {
            let name = &info.name;
            if NOT_KNOWN.iter().any(|ending| name.ends_with(ending)) {
                return Err(LoraError::NotKnown { file: lora.path(), tensor: name.clone() });
            }
            let found = ENDINGS.iter().find_map(|(ending, role, other)| {
                name.strip_suffix(ending).map(|key| (key, *role, format!("{key}{other}")))
            });
            let Some((key, role, other)) = found else {
                let is_alpha = name.strip_suffix(".alpha").is_some_and(|key| {
                    ENDINGS.iter().any(|(ending, ..)| lora.index.tensor(&format!("{key}{ending}")).is_some())
                });
                if !is_alpha {
                    lora.ignored.push(name.clone());
                }
                continue;
            };
            let Some(other) = lora.index.tensor(&other) else {
                return Err(LoraError::HalfAPair { file: lora.path(), tensor: name.clone(), missing: other });
            };
            if role == Role::Down {
                continue;
            }
            if let Some(first) = ups.insert(key.to_owned(), id) {
                let first = lora.index.tensor_info(first).name.clone();
                return Err(LoraError::TwoPairs { file: lora.path(), first, second: name.clone() });
            }
            lora.pairs.push(lora.pair(key, id, other)?);
        }
        if lora.pairs.is_empty() {
            return Err(LoraError::Empty { file: lora.path(), tensors: lora.index.tensors().len() });
        }
        Ok(lora)
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        path_of(&self.index)
    }

    /// The keys of its pairs, in file order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.pairs.iter().map(|pair| pair.key.as_str())
    }

    /// Checks one pair.
    fn pair(&self, key: &str, up: TensorId, down: TensorId) -> Result<Pair, LoraError> {
        let (up_info, down_info) = (self.index.tensor_info(up), self.index.tensor_info(down));
        for info in [up_info, down_info] {
            if float_type(info.dtype).is_none() {
                let wanted = "factors are F32, F16, BF16 or fp8";
                let tensor = info.name.clone();
                return Err(LoraError::Type { file: self.path(), tensor, dtype: info.dtype, wanted });
            }
        }
        let (up_matrix, down_matrix) = (as_matrix(&up_info.shape), as_matrix(&down_info.shape));
        let fits = match (up_matrix, down_matrix) {
            (Some(up), Some(down)) if up.1 == down.0 && up.1 > 0 && u32::try_from(up.1).is_ok() => {
                Some((up.0, up.1, down.1))
            }
            _ => None,
        };
        let Some((rows, rank, columns)) = fits else {
            return Err(LoraError::Rank {
                file: self.path(),
                up: up_info.name.clone(),
                up_shape: up_info.shape.as_slice().into(),
                down: down_info.name.clone(),
                down_shape: down_info.shape.as_slice().into(),
            });
        };
        #[expect(clippy::cast_precision_loss, reason = "a rank has 32 bits")]
        let rank_value = rank as f64;
        let scale = match self.index.tensor(&format!("{key}.alpha")) {
            Some(alpha) => self.number(alpha)? / rank_value,
            None => 1.0,
        };
        Ok(Pair { key: key.to_owned(), up, down, rows, rank, columns, scale })
    }

    /// The one number that a tensor holds.
    fn number(&self, id: TensorId) -> Result<f64, LoraError> {
        let info = self.index.tensor_info(id);
        let refuse =
            |value: String| LoraError::Number { file: self.path(), what: format!("`{}`", info.name), value };
        if info.shape.iter().product::<u64>() != 1 {
            return Err(refuse(format!("of shape {:?}, not one number", info.shape)));
        }
        let bytes = self.read(id)?;
        let value = match (info.dtype, &bytes[..]) {
            (Dtype::F64, bytes) => f64::from_le_bytes(bytes.try_into().unwrap_or_default()),
            #[expect(clippy::cast_precision_loss, reason = "an alpha is a small number")]
            (Dtype::I64, bytes) => i64::from_le_bytes(bytes.try_into().unwrap_or_default()) as f64,
            (Dtype::I32, &[a, b, c, d]) => f64::from(i32::from_le_bytes([a, b, c, d])),
            (dtype, bytes) if float_type(dtype).is_some() => {
                let mut wide = [0; 4];
                cast_bytes(dtype, bytes, Dtype::F32, &mut wide).map_err(refuse)?;
                f64::from(f32::from_le_bytes(wide))
            }
            (dtype, _) => {
                let (file, tensor) = (self.path(), info.name.clone());
                return Err(LoraError::Type { file, tensor, dtype, wanted: "an alpha is a number" });
            }
        };
        if value.is_finite() { Ok(value) } else { Err(refuse(value.to_string())) }
    }

    fn read(&self, id: TensorId) -> Result<Vec<u8>, LoraError> {
        let info = self.index.tensor_info(id);
        // The file has these bytes: its header was checked against its length.
        Ok(read_part(&self.index.files()[info.file as usize], info.offset, info.bytes, FACTOR, &info.name)?)
    }

    /// A factor as a matrix of type `to`.
    fn factor(&self, id: TensorId, to: Dtype, shape: [u64; 2]) -> Result<Factor, LoraError> {
        let info = self.index.tensor_info(id);
        let refuse = || LoraError::Type {
            file: self.path(),
            tensor: info.name.clone(),
            dtype: info.dtype,
            wanted: "factors are F32, F16, BF16 or fp8",
        };
        let (Some(from), Some(dtype)) = (float_type(info.dtype), float_type(to)) else {
            return Err(refuse());
        };
        let mut bytes = self.read(id)?;
        if from != dtype {
            let elements = bytes.len() as u64 / from.bytes();
            let file = &self.index.files()[info.file as usize];
            let mut cast = zeroed(file, FACTOR, elements.saturating_mul(dtype.bytes()))?;
            cast_bytes(info.dtype, &bytes, to, &mut cast).map_err(|_| refuse())?;
            bytes = cast;
        }
        Ok(Factor { dtype, shape, bytes })
    }

    /// The type that both factors of a pair are brought to.
    fn common_type(&self, pair: &Pair) -> Dtype {
        let (up, down) = (self.index.tensor_info(pair.up).dtype, self.index.tensor_info(pair.down).dtype);
        let kept = matches!(float_type(up), Some(FloatType::F32 | FloatType::F16 | FloatType::Bf16));
        if up == down && kept { up } else { Dtype::F32 }
    }

    /// Adds this file's patches of a model.
    fn add_to(
        &self,
        model: &TensorIndex,
        strength: f32,
        flat: &BTreeMap<String, Option<TensorId>>,
        out: &mut LoraPatches,
    ) -> Result<(), LoraError> {
        if !strength.is_finite() {
            let (what, value) = ("the strength".to_owned(), strength.to_string());
            return Err(LoraError::Number { file: self.path(), what, value });
        }
        let before = out.patches.len();
        for pair in &self.pairs {
            let Some(tensor) = find(model, flat, &pair.key) else {
                out.unmatched.push(pair.key.clone());
                continue;
            };
            self.check_shape(model, tensor, pair)?;
            let dtype = self.common_type(pair);
            #[expect(clippy::cast_possible_truncation, reason = "the kernels take an f32")]
            let scale = (f64::from(strength) * pair.scale) as f32;
            if !scale.is_finite() {
                let what = format!("strength {strength} times the scale of `{}`", pair.key);
                return Err(LoraError::Number { file: self.path(), what, value: scale.to_string() });
            }
            out.patches.push(TensorPatch {
                tensor,
                up: self.factor(pair.up, dtype, [pair.rows, pair.rank])?,
                down: self.factor(pair.down, dtype, [pair.rank, pair.columns])?,
                scale,
            });
        }
        if out.patches.len() == before {
            return Err(LoraError::NothingMatches {
                file: self.path(),
                model: path_of(model),
                keys: self.pairs.len(),
                first: self.pairs.first().map_or_else(String::new, |pair| pair.key.clone()),
            });
        }
        out.unmatched.extend(self.ignored.iter().cloned());
        Ok(())
    }

    fn check_shape(&self, model: &TensorIndex, tensor: TensorId, pair: &Pair) -> Result<(), LoraError> {
        let info = model.tensor_info(tensor);
        let (rows, columns) = as_matrix(&info.shape).unwrap_or((0, 0));
        let wrong = if pair.rows != rows {
            pair.up
        } else if pair.columns != columns {
            pair.down
        } else {
            return Ok(());
        };
        let factor = self.index.tensor_info(wrong);
        Err(LoraError::Shape {
            file: self.path(),
            factor: factor.name.clone(),
            factor_shape: factor.shape.as_slice().into(),
            tensor: info.name.clone(),
            tensor_shape: info.shape.as_slice().into(),
        })
    }
}

/// The patches that LoRAs, in this order, are for a model. They go into a
/// [`PatchSet`](crate::pager::PatchSet), which checks that the model's types can be patched.
///
/// # Errors
/// A factor that does not fit its tensor, a file of which nothing matches, a file that changed.
pub fn lora_patches(model: &TensorIndex, loras: &[Lora<'_>]) -> Result<LoraPatches, LoraError> {
    let needs_flat = loras.iter().any(|lora| lora.file.keys().any(|key| flat_part(key).is_some()));
    let flat = if needs_flat { flat_names(model) } else { BTreeMap::new() };
    let mut out = LoraPatches::default();
    for lora in loras {
        lora.file.add_to(model, lora.strength, &flat, &mut out)?;
    }
    if !out.unmatched.is_empty() {
        tracing::warn!(
            unmatched = out.unmatched.len(),
            first = out.unmatched[0],
            "parts of a LoRA match nothing"
        );
    }
    Ok(out)
}

fn path_of(index: &TensorIndex) -> PathBuf {
    index.files().first().map_or_else(PathBuf::new, |file| file.path().to_owned())
}

/// Rows and columns of a tensor taken as a matrix; `None` where the product exceeds 64 bits.
fn as_matrix(shape: &[u64]) -> Option<(u64, u64)> {
    let (rows, others) = shape.split_first()?;
    let columns = others.iter().try_fold(1_u64, |product, side| product.checked_mul(*side))?;
    Some((*rows, columns))
}

/// What follows the prefix of a key whose dots are written as underscores.
fn flat_part(key: &str) -> Option<&str> {
    FLAT_PREFIXES.iter().find_map(|prefix| key.strip_prefix(prefix))
}

/// The model's weights by their names with underscores for dots; `None` where two names read alike.
fn flat_names(model: &TensorIndex) -> BTreeMap<String, Option<TensorId>> {
    let mut names = BTreeMap::new();
    for (id, info) in (0..).map(TensorId).zip(model.tensors()) {
        let Some(key) = info.name.strip_suffix(".weight") else { continue };
        let stripped = PREFIXES.iter().filter_map(|prefix| key.strip_prefix(prefix));
        let mut flat: Vec<String> =
            std::iter::once(key).chain(stripped).map(|key| key.replace('.', "_")).collect();
        flat.dedup();
        for key in flat {
            let other = |known: &mut Option<TensorId>| {
                if *known != Some(id) {
                    *known = None;
                }
            };
            names.entry(key).and_modify(other).or_insert(Some(id));
        }
    }
    names
}

/// The tensor of the model that a key stands for.
fn find(model: &TensorIndex, flat: &BTreeMap<String, Option<TensorId>>, key: &str) -> Option<TensorId> {
    let named = |key: &str| model.tensor(&format!("{key}.weight")).or_else(|| model.tensor(key));
    if let Some(found) = named(key) {
        return Some(found);
    }
    if let Some(found) = flat_part(key).and_then(|part| flat.get(part).copied().flatten()) {
        return Some(found);
    }
    let stripped = PREFIXES.iter().filter_map(|prefix| key.strip_prefix(prefix));
    let bare: Vec<&str> = std::iter::once(key).chain(stripped).collect();
    bare.iter().skip(1).find_map(|key| named(key)).or_else(|| {
        bare.iter().find_map(|key| PREFIXES.iter().find_map(|prefix| named(&format!("{prefix}{key}"))))
    })
}
