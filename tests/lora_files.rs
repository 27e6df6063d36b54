//! LoRA files: both naming habits, matched to a model's tensors; what does not fit is refused by name.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::similar_names,
    clippy::float_cmp,
    reason = "a failure here is a failed test, and its numbers are small"
)]

mod common;

use std::path::{Path, PathBuf};

use common::ModelFile;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use vram_pager::device::FloatType;
use vram_pager::patcher::{Lora, LoraError, LoraFile, LoraPatches, lora_patches};
use vram_pager::weights::TensorIndex;

type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

/// A tensor of F32 numbers 1, 2, 3, ...
fn numbers(name: &'static str, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let bytes = (0..count).flat_map(|number| (number as f32 + 1.0).to_le_bytes()).collect();
    (name, Dtype::F32, shape.to_vec(), bytes)
}

/// A tensor of another type, all zeros.
fn zeros(name: &'static str, dtype: Dtype, shape: &[usize]) -> Tensor {
    (name, dtype, shape.to_vec(), vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8])
}

fn alpha(name: &'static str, value: f32) -> Tensor {
    (name, Dtype::F32, vec![], value.to_le_bytes().to_vec())
}

fn write(folder: &Path, name: &str, tensors: &[Tensor]) -> PathBuf {
    let path = folder.join(name);
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        ((*name).to_owned(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    serialize_to_file(views, None, &path).unwrap();
    path
}

struct Case {
    folder: tempfile::TempDir,
    model: TensorIndex,
}

impl Case {
    /// A model with a matrix of 6 x 5, a convolution of 4 x 3 x 2 x 2 and a bare table of 3 x 5.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let tensors = [
            zeros("model.diffusion_model.blocks.0.attn.weight", Dtype::BF16, &[6, 5]),
            zeros("conv_in.weight", Dtype::F16, &[4, 3, 2, 2]),
            zeros("blocks.1.attn.weight", Dtype::F32, &[6, 5]),
            zeros("table", Dtype::F32, &[3, 5]),
            zeros("a.b_c.weight", Dtype::F32, &[2, 2]),
            zeros("a_b.c.weight", Dtype::F32, &[2, 2]),
        ];
        let path = write(folder.path(), "model.safetensors", &tensors);
        Self { folder, model: TensorIndex::open(path).unwrap() }
    }

    fn open(&self, tensors: &[Tensor]) -> Result<LoraFile, LoraError> {
        LoraFile::open(write(self.folder.path(), "lora.safetensors", tensors))
    }

    fn patches(&self, tensors: &[Tensor], strength: f32) -> Result<LoraPatches, LoraError> {
        let file = self.open(tensors)?;
        lora_patches(&self.model, &[Lora { file: &file, strength }])
    }

    fn names(&self, patches: &LoraPatches) -> Vec<&str> {
        patches.patches.iter().map(|patch| self.model.tensor_info(patch.tensor).name.as_str()).collect()
    }
}

#[test]
fn both_habits_give_the_same_patch() {
    let case = Case::new();
    let first = case
        .patches(
            &[
                numbers("blocks.1.attn.lora_up.weight", &[6, 2]),
                numbers("blocks.1.attn.lora_down.weight", &[2, 5]),
                alpha("blocks.1.attn.alpha", 8.0),
            ],
            0.5,
        )
        .unwrap();
    let second = case
        .patches(
            &[
                numbers("blocks.1.attn.lora_A.weight", &[2, 5]),
                numbers("blocks.1.attn.lora_B.weight", &[6, 2]),
            ],
            2.0,
        )
        .unwrap();
    assert_eq!((first.patches.len(), first.unmatched.len()), (1, 0));
    let (a, b) = (&first.patches[0], &second.patches[0]);
    // strength × alpha / rank, and alpha is the rank where it is not given.
    assert_eq!((a.scale, b.scale), (2.0, 2.0));
    assert_eq!(a, b);
    assert_eq!((a.up.shape, a.down.shape, a.up.dtype), ([6, 2], [2, 5], FloatType::F32));
    assert_eq!(a.up.bytes[..8], [1.0_f32.to_le_bytes(), 2.0_f32.to_le_bytes()].concat());
}

#[test]
fn keys_find_their_tensor_through_prefixes_and_underscores() {
    let case = Case::new();
    for (up, down, tensor) in [
        ("blocks.1.attn.lora_up.weight", "blocks.1.attn.lora_down.weight", "blocks.1.attn.weight"),
        (
            "diffusion_model.blocks.1.attn.lora_up.weight",
            "diffusion_model.blocks.1.attn.lora_down.weight",
            "blocks.1.attn.weight",
        ),
        (
            "transformer.blocks.0.attn.lora_B.weight",
            "transformer.blocks.0.attn.lora_A.weight",
            "model.diffusion_model.blocks.0.attn.weight",
        ),
        (
            "blocks.0.attn.lora_B.weight",
            "blocks.0.attn.lora_A.weight",
            "model.diffusion_model.blocks.0.attn.weight",
        ),
        (
            "lora_unet_blocks_0_attn.lora_up.weight",
            "lora_unet_blocks_0_attn.lora_down.weight",
            "model.diffusion_model.blocks.0.attn.weight",
        ),
    ] {
        let patches = case.patches(&[numbers(up, &[6, 3]), numbers(down, &[3, 5])], 1.0).unwrap();
        assert_eq!(case.names(&patches), [tensor], "{up}");
    }
    let table = [numbers("table.lora_B.weight", &[3, 1]), numbers("table.lora_A.weight", &[1, 5])];
    assert_eq!(case.names(&case.patches(&table, 1.0).unwrap()), ["table"]);
    // Two names of the model read `a_b_c`: neither is meant.
    let both = [
        numbers("lora_unet_a_b_c.lora_up.weight", &[2, 1]),
        numbers("lora_unet_a_b_c.lora_down.weight", &[1, 2]),
    ];
    assert!(matches!(case.patches(&both, 1.0), Err(LoraError::NothingMatches { .. })));
}

#[test]
fn a_convolution_is_taken_as_a_matrix() {
    let case = Case::new();
    let patches = case
        .patches(
            &[
                numbers("conv_in.lora_down.weight", &[2, 3, 2, 2]),
                numbers("conv_in.lora_up.weight", &[4, 2, 1, 1]),
            ],
            1.0,
        )
        .unwrap();
    assert_eq!((patches.patches[0].up.shape, patches.patches[0].down.shape), ([4, 2], [2, 12]));
}

#[test]
fn factors_come_to_one_type() {
    let case = Case::new();
    let up = |dtype| zeros("blocks.1.attn.lora_up.weight", dtype, &[6, 2]);
    let down = |dtype| zeros("blocks.1.attn.lora_down.weight", dtype, &[2, 5]);
    for (a, b, common) in [
        (Dtype::F16, Dtype::F16, FloatType::F16),
        (Dtype::BF16, Dtype::BF16, FloatType::Bf16),
        (Dtype::F16, Dtype::BF16, FloatType::F32),
        (Dtype::F32, Dtype::BF16, FloatType::F32),
        (Dtype::F8_E4M3, Dtype::F8_E4M3, FloatType::F32),
    ] {
        let found = case.patches(&[up(a), down(b)], 1.0).unwrap();
        let patch = &found.patches[0];
        assert_eq!((patch.up.dtype, patch.down.dtype), (common, common), "{a:?} {b:?}");
        assert_eq!(patch.up.bytes.len() as u64, 12 * common.bytes());
    }
    for dtype in [Dtype::F64, Dtype::I32] {
        let error = case.patches(&[up(dtype), down(Dtype::F32)], 1.0).unwrap_err();
        assert!(matches!(error, LoraError::Type { .. }), "{error}");
        assert!(error.to_string().contains("blocks.1.attn.lora_up.weight"), "{error}");
    }
}

#[test]
fn several_loras_are_applied_in_order() {
    let case = Case::new();
    let one = case
        .open(&[numbers("table.lora_B.weight", &[3, 1]), numbers("table.lora_A.weight", &[1, 5])])
        .unwrap();
    let two = LoraFile::open(write(
        case.folder.path(),
        "two.safetensors",
        &[numbers("table.lora_B.weight", &[3, 2]), numbers("table.lora_A.weight", &[2, 5])],
    ))
    .unwrap();
    let loras = [Lora { file: &two, strength: 1.0 }, Lora { file: &one, strength: -0.25 }];
    let found = lora_patches(&case.model, &loras).unwrap();
    let scales: Vec<(u64, f32)> =
        found.patches.iter().map(|patch| (patch.up.shape[1], patch.scale)).collect();
    assert_eq!(scales, [(2, 1.0), (1, -0.25)]);
    assert!(lora_patches(&case.model, &[]).unwrap().patches.is_empty());
}

#[test]
fn what_matches_nothing_is_told() {
    let case = Case::new();
    let found = case
        .patches(
            &[
                numbers("table.lora_B.weight", &[3, 1]),
                numbers("table.lora_A.weight", &[1, 5]),
                numbers("elsewhere.lora_B.weight", &[3, 1]),
                numbers("elsewhere.lora_A.weight", &[1, 5]),
                numbers("table.diff_b", &[3]),
            ],
            1.0,
        )
        .unwrap();
    assert_eq!(
        (found.patches.len(), found.unmatched),
        (1, vec!["elsewhere".to_owned(), "table.diff_b".to_owned()])
    );
    let error = case
        .patches(&[numbers("x.lora_B.weight", &[3, 1]), numbers("x.lora_A.weight", &[1, 5])], 1.0)
        .unwrap_err();
    assert!(matches!(error, LoraError::NothingMatches { keys: 1, .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("lora.safetensors") && text.contains("model.safetensors") && text.contains("`x`"),
        "{text}"
    );
}

#[test]
fn what_does_not_fit_is_refused_and_both_tensors_are_named() {
    let case = Case::new();
    let refused = |tensors: &[Tensor], words: &[&str]| {
        let text = case.patches(tensors, 1.0).unwrap_err().to_string();
        for word in words {
            assert!(text.contains(word), "{text}: no {word}");
        }
    };
    let up = |shape: &[usize]| numbers("blocks.1.attn.lora_up.weight", shape);
    let down = |shape: &[usize]| numbers("blocks.1.attn.lora_down.weight", shape);
    let names = ["blocks.1.attn.lora_up.weight", "blocks.1.attn.lora_down.weight"];
    // Ranks that differ, a rank of nothing, a factor without rows.
    refused(&[up(&[6, 2]), down(&[3, 5])], &names);
    refused(&[up(&[6, 0]), down(&[0, 5])], &names);
    refused(&[up(&[]), down(&[2, 5])], &names);
    refused(&[up(&[6, 2, 2, 1]), down(&[2, 5])], &names);
    // Shapes that are not the weight's.
    refused(&[up(&[7, 2]), down(&[2, 5])], &[names[0], "`blocks.1.attn.weight`", "[7, 2]", "[6, 5]"]);
    refused(&[up(&[6, 2]), down(&[2, 4])], &[names[1], "`blocks.1.attn.weight`", "[2, 4]", "[6, 5]"]);
    // Halves.
    refused(&[up(&[6, 2])], &names);
    refused(&[down(&[2, 5])], &names);
    refused(
        &[
            up(&[6, 2]),
            down(&[2, 5]),
            numbers("blocks.1.attn.lora_A.weight", &[2, 5]),
            numbers("blocks.1.attn.lora_B.weight", &[6, 2]),
        ],
        &["blocks.1.attn.lora_up.weight", "blocks.1.attn.lora_B.weight"],
    );
    // Numbers that are none.
    for wrong in [
        alpha("blocks.1.attn.alpha", f32::NAN),
        alpha("blocks.1.attn.alpha", f32::INFINITY),
        numbers("blocks.1.attn.alpha", &[2]),
        zeros("blocks.1.attn.alpha", Dtype::BOOL, &[]),
    ] {
        refused(&[up(&[6, 2]), down(&[2, 5]), wrong], &["blocks.1.attn.alpha"]);
    }
    // Kinds that are not known.
    for name in ["blocks.1.attn.dora_scale", "blocks.1.attn.lora_mid.weight"] {
        refused(&[up(&[6, 2]), down(&[2, 5]), numbers(name, &[6])], &[name]);
    }
    // No LoRA at all.
    refused(&[numbers("weight", &[2, 2])], &["lora.safetensors", "is it a LoRA"]);
    let text = case.patches(&[up(&[6, 2]), down(&[2, 5])], f32::NAN).unwrap_err().to_string();
    assert!(text.contains("strength"), "{text}");
}

#[test]
fn a_damaged_file_is_an_error_never_a_panic() {
    let case = Case::new();
    let path = write(
        case.folder.path(),
        "lora.safetensors",
        &[numbers("table.lora_B.weight", &[3, 1]), numbers("table.lora_A.weight", &[1, 5])],
    );
    let whole = std::fs::read(&path).unwrap();
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(LoraFile::open(&path).is_err(), "{length} bytes");
    }
    // Truncated after it was opened.
    std::fs::write(&path, &whole).unwrap();
    let file = LoraFile::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(whole.len() as u64 - 9).unwrap();
    let error = lora_patches(&case.model, &[Lora { file: &file, strength: 1.0 }]).unwrap_err().to_string();
    assert!(error.contains("lora.safetensors") && error.contains("table.lora_"), "{error}");
    assert!(LoraFile::open(case.folder.path().join("none")).is_err());
}

#[test]
fn a_model_in_fp8_is_patched_only_with_a_compute_type() {
    let file = ModelFile::new(&[(4, 4)], 1);
    let folder = tempfile::tempdir().unwrap();
    let model = write(folder.path(), "m.safetensors", &[zeros("a.weight", Dtype::F8_E4M3, &[4, 4])]);
    let lora = write(
        folder.path(),
        "l.safetensors",
        &[numbers("a.lora_B.weight", &[4, 1]), numbers("a.lora_A.weight", &[1, 4])],
    );
    let lora = LoraFile::open(lora).unwrap();
    let loras = [Lora { file: &lora, strength: 1.0 }];
    let device = common::small_card(1 << 20);
    let pager = common::pager(&device, common::small_options());
    drop(file);
    for compute in [None, Some(vram_pager::weights::Dtype::BF16)] {
        let options = vram_pager::pager::ModelOptions { compute, ..Default::default() };
        let index = std::sync::Arc::new(TensorIndex::open(&model).unwrap());
        let paged = pager.open_model(index, &options).unwrap();
        let patcher = vram_pager::patcher::PagedPatcher::new(&paged, vram_pager::patcher::Place::Card(0));
        let set = patcher.set_loras(&loras);
        assert_eq!(set.is_ok(), compute.is_some(), "{set:?}");
        assert_eq!(patcher.patches().is_some(), compute.is_some());
    }
}
