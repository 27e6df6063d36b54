//! Casts and low-rank patches on the way to the card: what a kernel reads is what the file's bytes give
//! when they are cast and patched on the host, for every pair of types, with evictions in between, and a
//! change of patches makes what is resident stale at once.

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

use std::sync::Arc;

use common::{ModelFile, Numbers, assert_nothing_left, mixed_units, pager, small_card, small_options};
use safetensors::tensor::{TensorView, serialize_to_file};
use vram_pager::device::FloatType;
use vram_pager::pager::{
    CardFacts, Factor, ModelOptions, PagedModel, PagerError, PagerOptions, PagerStream, PatchSet,
    TensorPatch, Verifier, forecast,
};
use vram_pager::units::{KIB, MIB};
use vram_pager::weights::{Dtype, UnitId};

/// A model of eight matrices of one type, with finite numbers, whose sizes are odd.
fn typed_model(dtype: safetensors::Dtype, element: usize) -> ModelFile {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut numbers = Numbers(0x1234_5678);
    let mut tensors = Vec::new();
    for (number, (rows, columns)) in
        [(130, 77), (64, 512), (1, 3), (255, 33), (90, 128), (300, 70), (17, 19), (128, 256)]
            .iter()
            .enumerate()
    {
        let bytes: Vec<u8> = (0..rows * columns)
            .flat_map(|_| {
                // Small numbers of either sign in every type.
                let bits = numbers.next();
                match element {
                    4 => ((((bits % 4001) as f32) - 2000.0) / 511.0).to_le_bytes().to_vec(),
                    2 if dtype == safetensors::Dtype::F16 => {
                        half::f16::from_f32((((bits % 401) as f32) - 200.0) / 57.0).to_le_bytes().to_vec()
                    }
                    2 => half::bf16::from_f32((((bits % 401) as f32) - 200.0) / 57.0).to_le_bytes().to_vec(),
                    _ => vec![(bits % 0x78) as u8 | ((bits >> 8) as u8 & 0x80)],
                }
            })
            .collect();
        tensors.push((format!("layer.{number}.weight"), vec![*rows, *columns], bytes));
    }
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, shape, bytes)| (name.clone(), TensorView::new(dtype, shape.clone(), bytes).unwrap()))
        .collect();
    serialize_to_file(views, None, &path).unwrap();
    ModelFile { folder, path }
}

fn patches(model: &PagedModel, units: &[u32], rank: u64, seed: u64, dtype: FloatType) -> Arc<PatchSet> {
    let mut numbers = Numbers(seed);
    let mut factor = |rows: u64, columns: u64| Factor {
        dtype,
        shape: [rows, columns],
        bytes: (0..rows * columns)
            .flat_map(|_| {
                let value = ((numbers.next() % 1001) as f32 - 500.0) / 300.0;
                match dtype {
                    FloatType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
                    FloatType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
                    _ => value.to_le_bytes().to_vec(),
                }
            })
            .collect(),
    };
    let all = units
        .iter()
        .map(|&unit| {
            let tensor = model.index().units()[unit as usize].tensors[0];
            let shape = &model.index().tensor_info(tensor).shape;
            TensorPatch { tensor, up: factor(shape[0], rank), down: factor(rank, shape[1]), scale: 0.37 }
        })
        .collect();
    PatchSet::new(model, all).unwrap()
}

/// A pass with every byte checked against the host's cast and patch.
fn checked(model: &Arc<PagedModel>, set: Option<&Arc<PatchSet>>, stream: &PagerStream) {
    let verifier = Verifier::patched(model, set.cloned()).unwrap();
    let mut check = verifier.begin(stream).unwrap();
    for unit in 0..model.index().units().len() {
        let unit = UnitId(u32::try_from(unit).unwrap());
        for piece in 0..model.pieces(unit).unwrap() {
            let guard = match set {
                Some(set) => model.patched(set).fault_piece(unit, piece, stream).unwrap(),
                None => model.fault_piece(unit, piece, stream).unwrap(),
            };
            check.tensors(&guard.tensors()).unwrap();
        }
    }
    assert_eq!(check.finish().unwrap(), []);
}

#[test]
fn every_pair_of_types_is_cast_on_the_way() {
    use safetensors::Dtype as File;
    for (file, element) in
        [(File::F32, 4), (File::F16, 2), (File::BF16, 2), (File::F8_E4M3, 1), (File::F8_E5M2, 1)]
    {
        let model_file = typed_model(file, element);
        for compute in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            for card in [2 * MIB, 512 * KIB] {
                println!("{file:?} as {compute:?} on a card of {card}");
                let device = small_card(card);
                {
                    let pager = pager(&device, small_options());
                    let options = ModelOptions { compute: Some(compute), ..ModelOptions::default() };
                    let model = pager.open_model(model_file.index(), &options).unwrap();
                    let stream = pager.stream().unwrap();
                    let guard = model.fault(UnitId(2), &stream).unwrap();
                    assert_eq!(guard.tensor("weight").unwrap().dtype, compute);
                    guard.release();
                    for pass in 0..4 {
                        println!(
                            "pass {pass}: {:?} {:?} {:?}",
                            pager.figures(),
                            model.counts(),
                            device.counts()
                        );
                        // What a pool does of its own: idle memory goes back, and is asked for again.
                        if std::env::var_os("TRIM").is_some() {
                            device.pool_trim(0).unwrap();
                        }
                        checked(&model, None, &stream);
                    }
                    let tensor = model.index().tensor("layer.1.weight").unwrap();
                    let rows = model.fault_rows(tensor, &[3, 63, 3], &stream).unwrap();
                    assert_eq!((rows.dtype(), rows.shape()), (compute, &[3, 512][..]));
                    drop(rows);
                }
                assert_nothing_left(&device);
            }
        }
    }
}

#[test]
fn narrow_files_cross_the_link_narrow() {
    let file = typed_model(safetensors::Dtype::F8_E4M3, 1);
    let device = small_card(4 * MIB);
    let pager = pager(&device, small_options());
    let options = ModelOptions { compute: Some(Dtype::BF16), ..ModelOptions::default() };
    let model = pager.open_model(file.index(), &options).unwrap();
    let stream = pager.stream().unwrap();
    checked(&model, None, &stream);
    let bytes = model.index().total_bytes();
    assert_eq!(model.counts().copied_bytes, bytes);
    assert_eq!(model.figures().weights_bytes, 2 * bytes);
}

#[test]
fn a_forecast_counts_what_casts_take_of_the_card() {
    let file = ModelFile::new(&mixed_units(), 62);
    let model_options = ModelOptions { compute: Some(Dtype::F32), ..ModelOptions::default() };
    let options = PagerOptions { chunk_bytes: 2 * MIB, ..small_options() };
    for card in [2, 4, 8, 11, 16].map(|mib| mib * MIB) {
        let device = small_card(card);
        let info = device.info();
        let facts = CardFacts {
            total_bytes: info.total_bytes,
            free_bytes: device.memory().unwrap().free,
            granularity: info.granularity,
            virtual_memory: true,
            link: info.link,
        };
        let told = forecast(&file.index(), &facts, &options, &model_options).unwrap();
        let pager = pager(&device, options.clone());
        let Ok(model) = pager.open_model(file.index(), &model_options) else {
            assert!(told.too_large.is_some(), "{card}: {told:?}");
            continue;
        };
        let stream = pager.stream().unwrap();
        let pass = || {
            (0..24).all(|unit| {
                (0..model.pieces(UnitId(unit)).unwrap())
                    .all(|piece| model.fault_piece(UnitId(unit), piece, &stream).is_ok())
            })
        };
        let fits = pass();
        assert_eq!(told.too_large.is_none(), fits, "{card}: {told:?}");
        if fits {
            assert!(pass());
            let resident = model.figures().resident_bytes;
            assert!(resident.abs_diff(told.resident_bytes) <= 64 * KIB, "{card}: {resident}, {told:?}");
        }
    }
}

#[test]
fn a_change_of_patches_gives_what_a_fresh_process_gives() {
    let file = typed_model(safetensors::Dtype::BF16, 2);
    for card in [2 * MIB, 512 * KIB] {
        let device = small_card(card);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let a = patches(&model, &[0, 1, 3, 5], 4, 1, FloatType::F32);
            let b = patches(&model, &[1, 2, 7], 16, 2, FloatType::F16);
            for set in [Some(&a), Some(&b), None, Some(&a), Some(&a), None, Some(&b)] {
                checked(&model, set, &stream);
                // With evictions in between.
                model.unload(256 * KIB).unwrap();
                checked(&model, set, &stream);
            }
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn patched_rows_are_those_of_the_patched_tensor() {
    let file = typed_model(safetensors::Dtype::F16, 2);
    let device = small_card(4 * MIB);
    let pager = pager(&device, small_options());
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let stream = pager.stream().unwrap();
    let set = patches(&model, &[1], 8, 3, FloatType::Bf16);
    let tensor = model.index().tensor("layer.1.weight").unwrap();
    let host = |range| {
        // The emulated card lets the host read its memory.
        let range: vram_pager::units::DeviceRange = range;
        stream.synchronize().unwrap();
        common::read_back(&device, range, &stream)
    };
    let guard = model.patched(&set).fault(UnitId(1), &stream).unwrap();
    let whole = host(guard.tensor("weight").unwrap().range());
    guard.release();
    let rows = model.patched(&set).fault_rows(tensor, &[63, 0, 17], &stream).unwrap();
    let packed = host(rows.range());
    for (place, row) in [63, 0, 17].into_iter().enumerate() {
        assert_eq!(packed[place * 1024..(place + 1) * 1024], whole[row * 1024..(row + 1) * 1024]);
    }
}

#[test]
fn a_held_guard_keeps_its_version_and_the_new_one_waits() {
    let file = typed_model(safetensors::Dtype::F32, 4);
    let device = small_card(4 * MIB);
    let pager = pager(&device, small_options());
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let (stream, other) = (pager.stream().unwrap(), pager.stream().unwrap());
    let set = patches(&model, &[4], 4, 9, FloatType::F32);
    checked(&model, None, &stream);
    let old = model.fault(UnitId(4), &stream).unwrap();
    let refused = model.patched(&set).fault(UnitId(4), &other).unwrap_err();
    assert!(matches!(refused, PagerError::OldVersionHeld { .. }), "{refused}");
    assert!(refused.to_string().contains("layer.4"), "{refused}");
    // The old guard still reads the old bytes.
    let verifier = Verifier::new(&model).unwrap();
    let mut check = verifier.begin(&stream).unwrap();
    check.tensors(&old.tensors()).unwrap();
    assert_eq!(check.finish().unwrap(), []);
    drop(check);
    drop(old);
    checked(&model, Some(&set), &other);
    checked(&model, None, &other);
}

#[test]
fn factors_that_do_not_fit_are_refused_by_name() {
    let file = typed_model(safetensors::Dtype::BF16, 2);
    let device = small_card(2 * MIB);
    let pager = pager(&device, small_options());
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let tensor = model.index().tensor("layer.0.weight").unwrap();
    let factor = |rows: u64, columns: u64| Factor {
        dtype: FloatType::F32,
        shape: [rows, columns],
        bytes: vec![0; usize::try_from(rows * columns * 4).unwrap()],
    };
    for (up, down) in [
        (factor(130, 4), factor(4, 76)),
        (factor(131, 4), factor(4, 77)),
        (factor(130, 4), factor(5, 77)),
        (factor(130, 0), factor(0, 77)),
        (Factor { bytes: vec![0; 3], ..factor(130, 4) }, factor(4, 77)),
    ] {
        let error = PatchSet::new(&model, vec![TensorPatch { tensor, up, down, scale: 1.0 }]).unwrap_err();
        assert!(error.to_string().contains("layer.0.weight"), "{error}");
    }
}
