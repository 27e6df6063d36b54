//! A resident model gives the file's bytes, cast and patched, at every budget; its figures are the card's.

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
use std::time::{Duration, Instant};

use common::{ModelFile, Numbers, Watchdog, assert_nothing_left, mixed_units, small_card, unit_id};
use vram_pager::device::{self, FloatType, SharedDevice, Stream, StreamPriority};
use vram_pager::manager::{FreeOptions, LoadOptions, Manager, VramState};
use vram_pager::pager::{Factor, PatchSet, TensorPatch, Verifier};
use vram_pager::patcher::{LoadBudget, ModelPatcher, Place, ResidentError, ResidentOptions, ResidentPatcher};
use vram_pager::units::{KIB, MIB};
use vram_pager::weights::{Dtype, UnitId};

fn options() -> ResidentOptions {
    ResidentOptions {
        page_locked_bytes: Some(16 * MIB),
        chunk_bytes: 128 * KIB,
        ..ResidentOptions::default()
    }
}

fn open(device: &SharedDevice, file: &ModelFile) -> Arc<ResidentPatcher> {
    ResidentPatcher::open(device, file.index(), Place::Card(0), &options()).unwrap()
}

fn stream(device: &SharedDevice) -> Arc<Stream> {
    Arc::new(Stream::new(device, StreamPriority::Normal).unwrap())
}

fn units(model: &ResidentPatcher) -> impl Iterator<Item = UnitId> + use<> {
    (0..model.index().units().len() as u64).map(unit_id)
}

/// A pass over all modules; every byte is checked by the checksum kernel.
fn checked(model: &ResidentPatcher, stream: &Arc<Stream>) {
    let verifier =
        Verifier::for_layout(model.device(), model.index(), model.layout(), model.patches()).unwrap();
    let mut check = verifier.begin_on(stream).unwrap();
    for unit in units(model) {
        let guard = model.module(unit, stream).unwrap();
        assert_eq!(guard.is_streamed(), !model.is_loaded(unit));
        check.tensors(&guard.tensors()).unwrap();
        guard.release();
    }
    assert_eq!(check.finish().unwrap(), []);
}

/// Patches of every `step`th weight from `first` on.
fn patches(model: &ResidentPatcher, first: usize, step: usize, seed: u64) -> Arc<PatchSet> {
    let mut numbers = Numbers(seed);
    let mut factor = |rows: u64, columns: u64| Factor {
        dtype: FloatType::F32,
        shape: [rows, columns],
        bytes: (0..rows * columns)
            .flat_map(|_| (((numbers.next() % 1001) as f32 - 500.0) / 300.0).to_le_bytes())
            .collect(),
    };
    let index = Arc::clone(model.index());
    let all = index.units().iter().skip(first).step_by(step).map(|unit| {
        let tensor = index.tensor(&format!("{}.weight", unit.name)).unwrap();
        let shape = &index.tensor_info(tensor).shape;
        TensorPatch { tensor, up: factor(shape[0], 4), down: factor(4, shape[1]), scale: 0.5 }
    });
    model.patch_set(all.collect()).unwrap()
}

#[test]
fn every_byte_is_right_at_every_budget() {
    let file = ModelFile::new(&mixed_units(), 7);
    let size = i64::try_from(open(&small_card(MIB), &file).model_size()).unwrap();
    for step in -1..=14_i64 {
        let device = small_card(8 * MIB);
        {
            let model = open(&device, &file);
            let on = stream(&device);
            let budget = LoadBudget::of_bytes(step.max(0) * size / 12);
            let budget = if step < 0 { LoadBudget::Everything } else { budget };
            let added = model.partially_load(budget, false).unwrap();
            assert_eq!(added, model.loaded_size());
            assert_eq!(device.live().frames * 64 * KIB, model.loaded_size(), "{budget}");
            checked(&model, &on);
            let figures = model.figures();
            if let LoadBudget::Bytes(bytes) = budget {
                assert!(
                    added == 0 || added + figures.buffer_bytes <= bytes.unsigned_abs(),
                    "{budget}: {figures:?}"
                );
                assert!(step < 5 || added > 0, "{budget}");
            }
            if !(0..12).contains(&step) {
                assert_eq!((added, figures.buffer_bytes), (model.model_size(), 0));
            }
            // The second pass copies what is outside from page-locked memory.
            checked(&model, &on);
            assert_eq!(model.figures().file_bytes, figures.file_bytes, "{budget}");
            let outside = model.model_size() - model.loaded_size();
            let streamed = units(&model).filter(|&unit| !model.is_loaded(unit)).map(|unit| {
                let bytes = model.layout().unit(unit).bytes;
                bytes.end - bytes.start
            });
            assert!(model.figures().copied_bytes - figures.copied_bytes <= streamed.sum());
            assert!(outside == 0 || model.pinned_size() > 0);
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn a_narrow_file_is_cast_on_the_card_wherever_its_module_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut numbers = Numbers(99);
    let tensors: Vec<(String, Vec<u8>)> = (0..8)
        .map(|number| {
            let bytes = (0..130 * 77 * (number + 1)).map(|_| (numbers.next() % 0x78) as u8).collect();
            (format!("layer.{number}.weight"), bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, bytes)| {
        let shape = vec![bytes.len() / 77, 77];
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F8_E4M3, shape, bytes).unwrap();
        (name.clone(), view)
    });
    safetensors::tensor::serialize_to_file(views, None, &path).unwrap();
    let file = ModelFile { folder, path };
    for compute in [Dtype::BF16, Dtype::F32] {
        for part in [0, 2, 3, 4] {
            let device = small_card(8 * MIB);
            {
                let options = ResidentOptions { compute: Some(compute), ..options() };
                let model = ResidentPatcher::open(&device, file.index(), Place::Card(0), &options).unwrap();
                let on = stream(&device);
                model.set_patches(Some(patches(&model, 1, 3, 5)));
                let budget = i64::try_from(model.model_size()).unwrap() * part / 3;
                model.partially_load(LoadBudget::of_bytes(budget), part == 2).unwrap();
                checked(&model, &on);
                checked(&model, &on);
                assert_eq!(model.module(unit_id(1), &on).unwrap().tensor("weight").unwrap().dtype, compute);
            }
            assert_nothing_left(&device);
        }
    }
}

#[test]
fn what_is_unloaded_is_what_the_card_has_more() {
    let file = ModelFile::new(&mixed_units(), 11);
    let device = small_card(8 * MIB);
    let manager = Manager::new(std::slice::from_ref(&device));
    let free = || manager.get_free_memory(None).unwrap();
    {
        let model = open(&device, &file);
        let on = stream(&device);
        let empty = free();
        model.partially_load(LoadBudget::Everything, false).unwrap();
        assert_eq!(empty - free(), model.model_size());
        let mut unloaded = Vec::new();
        for bytes in [1, 64 * KIB, 700 * KIB, 0, 2 * MIB] {
            let (before, loaded) = (free(), model.loaded_size());
            let freed = model.partially_unload(bytes).unwrap();
            assert!(freed >= bytes, "{freed} of {bytes}");
            assert_eq!((free() - before, loaded - model.loaded_size()), (freed, freed));
            unloaded.push(freed);
            checked(&model, &on);
            // The streaming buffer is no part of the claim; take it out of the next comparison.
            assert!(model.figures().buffer_bytes > 0 || freed == 0);
        }
        // The cheapest left first: the smallest.
        assert!(unloaded[0] <= 128 * KIB, "{unloaded:?}");
        let loaded = model.loaded_size();
        assert_eq!(model.partially_unload(u64::MAX).unwrap(), loaded);
        model.detach(true).unwrap();
        assert_eq!(free(), empty);
        manager.soft_empty_cache(false).unwrap();
        assert_eq!(device.memory().unwrap().free, device.memory().unwrap().total, "and the driver has it");
    }
    assert_nothing_left(&device);
}

#[test]
fn a_negative_budget_gives_back_and_nothing_keeps_what_is_there() {
    let file = ModelFile::new(&mixed_units(), 12);
    let device = small_card(8 * MIB);
    let model = open(&device, &file);
    model.partially_load(LoadBudget::Everything, false).unwrap();
    let whole = model.loaded_size();
    assert_eq!(model.partially_load(LoadBudget::Nothing, false).unwrap(), 0);
    assert_eq!(model.loaded_size(), whole);
    assert_eq!(model.partially_load(LoadBudget::Bytes(-1_000_000), false).unwrap(), 0);
    assert!(model.loaded_size() <= whole - 1_000_000 && model.loaded_size() > 0);
    let more = model.partially_load(LoadBudget::Everything, false).unwrap();
    assert_eq!(model.loaded_size(), whole);
    assert!(more >= 1_000_000);
    checked(&model, &stream(&device));
}

#[test]
fn patches_follow_the_clone_bit_for_bit_on_the_fly_and_baked() {
    let file = ModelFile::new(&mixed_units(), 21);
    for bake in [false, true] {
        for part in [0, 1, 2, 4] {
            let device = small_card(10 * MIB);
            {
                let plain = open(&device, &file);
                let on = stream(&device);
                let (a, b) = (plain.clone_model(), plain.clone_model());
                a.set_patches(Some(patches(&plain, 0, 2, 31)));
                b.set_patches(Some(patches(&plain, 1, 3, 32)));
                let budget = LoadBudget::of_bytes(i64::try_from(plain.model_size()).unwrap() * part / 3);
                for (turn, model) in [&a, &b, &plain, &a, &a, &plain, &b, &plain].into_iter().enumerate() {
                    let size = model.loaded_size();
                    model.detach(false).unwrap();
                    assert_eq!(model.loaded_size(), size, "letting go keeps the bytes");
                    model.partially_load(budget, bake).unwrap();
                    assert_eq!(plain.loaded_size(), model.loaded_size());
                    let backups = model.figures().backup_bytes;
                    let patched = model.patches().is_some_and(|set| {
                        units(model).any(|unit| {
                            let tensors = &model.index().unit_info(unit).tensors;
                            model.is_loaded(unit) && tensors.iter().any(|&tensor| !set.of(tensor).is_empty())
                        })
                    });
                    assert_eq!(backups > 0, bake && patched, "turn {turn}, {part} thirds");
                    checked(model, &on);
                    // With some of it leaving in between, and once all of it.
                    if turn == 4 {
                        model.detach(true).unwrap();
                        assert_eq!(model.figures().backup_bytes, 0);
                    } else {
                        model.partially_unload(300 * KIB).unwrap();
                    }
                    checked(model, &on);
                }
            }
            assert_nothing_left(&device);
        }
    }
}

#[test]
fn a_restored_model_reads_no_file() {
    let file = ModelFile::new(&mixed_units(), 22);
    let device = small_card(10 * MIB);
    let plain = open(&device, &file);
    let on = stream(&device);
    let patched = plain.clone_model();
    patched.set_patches(Some(patches(&plain, 0, 1, 41)));
    patched.partially_load(LoadBudget::Everything, true).unwrap();
    let read = plain.figures().file_bytes;
    plain.partially_load(LoadBudget::Everything, false).unwrap();
    assert_eq!((plain.figures().file_bytes, plain.figures().backup_bytes), (read, 0));
    checked(&plain, &on);
}

#[test]
fn what_guards_hold_stays_and_is_named() {
    let file = ModelFile::new(&mixed_units(), 23);
    let device = small_card(8 * MIB);
    {
        let model = open(&device, &file);
        let on = stream(&device);
        model.partially_load(LoadBudget::Everything, false).unwrap();
        let held = model.module(unit_id(3), &on).unwrap();
        let size = held.tensors().iter().map(|view| view.bytes).sum::<u64>();
        let freed = model.partially_unload(u64::MAX).unwrap();
        assert!(model.is_loaded(unit_id(3)) && model.loaded_size() >= size);
        assert_eq!(freed + model.loaded_size(), model.model_size());
        // Another version of it cannot be had.
        let patched = model.clone_model();
        patched.set_patches(Some(patches(&model, 3, 1, 51)));
        let error = patched.module(unit_id(3), &on).unwrap_err();
        assert!(error.is_held() && error.to_string().contains("blocks.003"), "{error}");
        let error = model.detach(true).unwrap_err().to_string();
        assert!(error.contains("blocks.003"), "{error}");
        held.release();

        // Both places of the buffer are held: the third module fails, or waits for others' guards.
        let first = model.module(unit_id(0), &on).unwrap();
        let second = model.module(unit_id(7), &on).unwrap();
        assert!(first.is_streamed() && second.is_streamed());
        let same = model.module(unit_id(0), &on).unwrap();
        assert_eq!(same.tensors(), first.tensors());
        same.release();
        let error = model.module(unit_id(4), &on).unwrap_err();
        assert!(error.is_held() && error.to_string().contains("blocks.007"), "{error}");
        let soon = Instant::now() + Duration::from_millis(5);
        let error = model.module_when_free(unit_id(4), &on, soon).unwrap_err();
        assert!(matches!(error, ResidentError::Deadline { .. }), "{error}");
        first.release();
        model.module(unit_id(4), &on).unwrap().release();
        second.release();
        model.detach(true).unwrap();
        assert_eq!(model.loaded_size(), 0);
    }
    assert_nothing_left(&device);
}

#[test]
fn rows_are_those_of_the_patched_tensor_wherever_its_module_is() {
    let file = ModelFile::new(&mixed_units(), 24);
    let device = small_card(8 * MIB);
    {
        let model = open(&device, &file);
        let on = stream(&device);
        model.set_patches(Some(patches(&model, 0, 1, 61)));
        let tensor = model.index().tensor("blocks.003.weight").unwrap();
        let rows = [511, 0, 17, 17];
        let read = |range| read_back(&device, range, &on);
        let outside = model.rows(tensor, &rows, &on).unwrap();
        assert_eq!((outside.shape(), outside.dtype()), (&[4, 512][..], Dtype::BF16));
        let outside = read(outside.range());
        model.partially_load(LoadBudget::Everything, false).unwrap();
        let file_bytes = model.figures().file_bytes;
        let packed = read(model.rows(tensor, &rows, &on).unwrap().range());
        assert_eq!(model.figures().file_bytes, file_bytes);
        let whole = read(model.module(unit_id(3), &on).unwrap().tensor("weight").unwrap().range());
        for (place, row) in rows.iter().enumerate() {
            let row = usize::try_from(*row).unwrap() * 1024;
            assert!(packed[place * 1024..][..1024] == whole[row..][..1024], "row {row}");
        }
        assert!(packed == outside);
        let error = model.rows(tensor, &[512], &on).unwrap_err().to_string();
        assert!(error.contains("512") && error.contains("blocks.003.weight"), "{error}");
        assert!(model.rows(tensor, &[], &on).is_err());
    }
    assert_nothing_left(&device);
}

/// The bytes of a range.
#[allow(unsafe_code)]
fn read_back(device: &SharedDevice, range: vram_pager::units::DeviceRange, on: &Stream) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(range.bytes).unwrap()];
    // SAFETY: the caller holds the range; the target lives past the wait.
    unsafe { device.copy_to_host(bytes.as_mut_ptr(), range, on.id()).unwrap() };
    on.synchronize().unwrap();
    bytes
}

#[test]
fn a_load_that_does_not_fit_fails_and_its_bytes_come_back() {
    let file = ModelFile::new(&mixed_units(), 25);
    let device = small_card(3 * MIB);
    {
        let manager = Manager::new(std::slice::from_ref(&device));
        manager.set_knobs(|knobs| (knobs.inference_floor, knobs.reserve) = (256 * KIB, 0));
        let free = manager.get_free_memory(None).unwrap();
        let model = open(&device, &file);
        let handle: Arc<dyn ModelPatcher> = model.clone();
        let forced = LoadOptions { force_full_load: true, ..LoadOptions::default() };
        let error = manager.load_model_gpu(&handle, forced).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert_eq!((model.loaded_size(), manager.get_free_memory(None).unwrap()), (0, free));
        assert!(manager.loaded_models(false).is_empty());
        // With what there is it loads a part.
        manager.load_model_gpu(&handle, LoadOptions::default()).unwrap();
        assert!(model.loaded_size() > MIB);
        checked(&model, &stream(&device));
    }
    assert_nothing_left(&device);
}

#[test]
fn the_manager_loads_what_the_card_has_room_for() {
    // 60 MiB in modules of 2 MiB and small ones.
    let sizes: Vec<(u64, u64)> = (0..30).flat_map(|_| [(1024, 1024), (13, 7)]).collect();
    let file = ModelFile::new(&sizes, 26);
    let mut last = 0;
    for card in [40, 64, 80, 120] {
        let device = device::open(&format!("emulated:{card}MiB,page=2MiB")).unwrap();
        {
            let manager = Manager::new(std::slice::from_ref(&device));
            manager.set_knobs(|knobs| (knobs.inference_floor, knobs.reserve) = (4 * MIB, 4 * MIB));
            let options = ResidentOptions { page_locked_bytes: Some(96 * MIB), ..options() };
            let model = ResidentPatcher::open(&device, file.index(), Place::Card(0), &options).unwrap();
            let handle: Arc<dyn ModelPatcher> = model.clone();
            manager.load_model_gpu(&handle, LoadOptions::default()).unwrap();
            let loaded = model.loaded_size();
            assert!(loaded >= last && loaded > 24 * MIB, "{card} MiB: {loaded}");
            assert_eq!(card >= 80, loaded == model.model_size(), "{card} MiB: {loaded}");
            last = loaded;
            checked(&model, &stream(&device));
            // What was to stay free is free, with the streaming buffer in use.
            assert!(manager.get_free_memory(None).unwrap() >= 8 * MIB);
            let free = manager.get_free_memory(None).unwrap();
            let unloaded = manager.free_memory(free + 10 * MIB, None, &FreeOptions::default()).unwrap();
            assert!(unloaded.is_empty(), "a part was enough");
            assert!(manager.get_free_memory(None).unwrap() >= free + 10 * MIB);
            checked(&model, &stream(&device));
            manager.set_knobs(|knobs| knobs.vram_state = VramState::High);
            if card >= 80 {
                manager.load_model_gpu(&handle, LoadOptions::default()).unwrap();
                assert_eq!(model.loaded_size(), model.model_size());
            }
            manager.unload_all_models().unwrap();
            assert_eq!(model.loaded_size(), 0);
            manager.soft_empty_cache(false).unwrap();
            assert_eq!(device.memory().unwrap().free, card * MIB);
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn a_clones_death_hands_its_entry_to_the_parent() {
    let file = ModelFile::new(&mixed_units(), 27);
    let device = small_card(8 * MIB);
    let manager = Manager::new(std::slice::from_ref(&device));
    manager.set_knobs(|knobs| (knobs.inference_floor, knobs.reserve) = (0, 0));
    let parent = open(&device, &file);
    let clone = parent.clone_model();
    clone.set_patches(Some(patches(&parent, 0, 2, 71)));
    let handle: Arc<dyn ModelPatcher> = clone.clone();
    let forced = LoadOptions { force_patch_weights: true, ..LoadOptions::default() };
    manager.load_model_gpu(&handle, forced).unwrap();
    let loaded = parent.loaded_size();
    drop((handle, clone));
    let listed = manager.loaded_models(false);
    assert_eq!(listed.len(), 1);
    assert!(std::ptr::addr_eq(Arc::as_ptr(&listed[0]), Arc::as_ptr(&parent)));
    assert_eq!(listed[0].loaded_size(), loaded);
    let handle: Arc<dyn ModelPatcher> = parent.clone();
    manager.load_model_gpu(&handle, LoadOptions::default()).unwrap();
    assert_eq!((parent.loaded_size(), parent.figures().backup_bytes), (loaded, 0));
    checked(&parent, &stream(&device));
}

#[test]
fn page_locked_memory_is_given_back_and_had_again() {
    let file = ModelFile::new(&mixed_units(), 28);
    let device = small_card(4 * MIB);
    {
        let model = open(&device, &file);
        let on = stream(&device);
        checked(&model, &on);
        let pinned = model.pinned_size();
        assert!(pinned >= 4 * MIB, "{pinned}");
        let freed = model.partially_unload_ram(MIB);
        assert_eq!(freed, pinned - model.pinned_size());
        assert!(freed >= MIB, "{freed}");
        assert_eq!(model.partially_unload_ram(u64::MAX), pinned - freed);
        assert_eq!((model.pinned_size(), device.live().page_locked_bytes), (0, 0));
        checked(&model, &on);
    }
    assert_nothing_left(&device);
}

#[test]
fn little_page_locked_memory_costs_reads_never_bytes() {
    let file = ModelFile::new(&mixed_units(), 29);
    let device = small_card(4 * MIB);
    {
        let options = ResidentOptions { page_locked_bytes: Some(0), ..options() };
        let model = ResidentPatcher::open(&device, file.index(), Place::Card(0), &options).unwrap();
        model.set_patches(Some(patches(&model, 0, 2, 81)));
        let on = stream(&device);
        checked(&model, &on);
        let read = model.figures().file_bytes;
        checked(&model, &on);
        assert_eq!(model.figures().file_bytes, 2 * read);
    }
    assert_nothing_left(&device);
}

#[test]
fn a_file_that_shrank_is_an_error_that_names_it() {
    let file = ModelFile::new(&mixed_units(), 30);
    let device = small_card(8 * MIB);
    {
        let model = open(&device, &file);
        let on = stream(&device);
        std::fs::OpenOptions::new().write(true).open(&file.path).unwrap().set_len(1 << 20).unwrap();
        let error = model.module(unit_id(23), &on).unwrap_err().to_string();
        assert!(error.contains("model.safetensors") && error.contains("blocks.023"), "{error}");
        let error = model.partially_load(LoadBudget::Everything, false).unwrap_err().to_string();
        assert!(error.contains("model.safetensors"), "{error}");
        model.detach(true).unwrap();
        assert_eq!((model.loaded_size(), device.live().frames), (0, 0));
    }
    assert_nothing_left(&device);
}

#[test]
fn a_stream_of_another_card_is_refused() {
    let file = ModelFile::new(&[(8, 8)], 31);
    let (device, other) = (small_card(4 * MIB), small_card(2 * MIB));
    let error = open(&device, &file).module(unit_id(0), &stream(&other)).unwrap_err();
    assert!(matches!(error, ResidentError::OtherDevice { .. }), "{error}");
    assert!(open(&device, &file).module(unit_id(1), &stream(&device)).is_err());
}

#[test]
fn threads_use_modules_while_others_load_and_unload_them() {
    let _watchdog = Watchdog::new(120, "resident threads");
    let file = ModelFile::new(&mixed_units(), 33);
    let device = small_card(10 * MIB);
    {
        let plain = open(&device, &file);
        let whole = i64::try_from(plain.model_size()).unwrap();
        std::thread::scope(|scope| {
            let users: Vec<_> = (0..3_u64)
                .map(|seed| {
                    let (model, device) = (&plain, &device);
                    scope.spawn(move || {
                        let on = stream(device);
                        let mut numbers = Numbers(seed + 5);
                        let verifier =
                            Verifier::for_layout(device, model.index(), model.layout(), None).unwrap();
                        let mut check = verifier.begin_on(&on).unwrap();
                        for _ in 0..150 {
                            let unit = unit_id(numbers.below(24));
                            let patience = Instant::now() + Duration::from_secs(60);
                            let guard = model.module_when_free(unit, &on, patience).unwrap();
                            check.tensors(&guard.tensors()).unwrap();
                        }
                        assert_eq!(check.finish().unwrap(), []);
                    })
                })
                .collect();
            let mut numbers = Numbers(77);
            while users.iter().any(|user| !user.is_finished()) {
                let bytes = i64::try_from(numbers.below(whole.unsigned_abs())).unwrap();
                let extra = bytes - i64::try_from(plain.loaded_size()).unwrap();
                plain.partially_load(LoadBudget::of_bytes(extra), false).unwrap();
                plain.partially_unload(numbers.below(MIB)).unwrap();
            }
        });
    }
    assert_nothing_left(&device);
}
