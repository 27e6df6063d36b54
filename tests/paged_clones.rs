//! Clones of a paged model share its pages and differ in patches, through the manager.

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

use common::{
    ModelFile, Numbers, assert_nothing_left, mixed_units, pager, small_card, small_options, unit_id,
};
use vram_pager::device::{FloatType, SharedDevice};
use vram_pager::manager::{LoadOptions, Manager};
use vram_pager::pager::{Factor, ModelOptions, PagerStream, PatchSet, TensorPatch, Verifier};
use vram_pager::patcher::{ModelPatcher, PagedPatcher, Place};
use vram_pager::units::{KIB, MIB};

fn patches(model: &PagedPatcher, first: usize, step: usize, seed: u64) -> Arc<PatchSet> {
    let mut numbers = Numbers(seed);
    let mut factor = |rows: u64, columns: u64| Factor {
        dtype: FloatType::F32,
        shape: [rows, columns],
        bytes: (0..rows * columns)
            .flat_map(|_| (((numbers.next() % 1001) as f32 - 500.0) / 300.0).to_le_bytes())
            .collect(),
    };
    let index = Arc::clone(model.model().index());
    let all = index.units().iter().skip(first).step_by(step).map(|unit| {
        let tensor = index.tensor(&format!("{}.weight", unit.name)).unwrap();
        let shape = &index.tensor_info(tensor).shape;
        TensorPatch { tensor, up: factor(shape[0], 4), down: factor(4, shape[1]), scale: 0.5 }
    });
    PatchSet::new(model.model(), all.collect()).unwrap()
}

/// A pass through a clone, every byte checked against the host's patches.
fn checked(model: &PagedPatcher, stream: &PagerStream) {
    let verifier = Verifier::patched(model.model(), model.patches()).unwrap();
    let mut check = verifier.begin(stream).unwrap();
    for unit in (0..model.model().index().units().len() as u64).map(unit_id) {
        for piece in 0..model.model().pieces(unit).unwrap() {
            let guard = model.fault_piece(unit, piece, stream).unwrap();
            check.tensors(&guard.tensors()).unwrap();
        }
    }
    assert_eq!(check.finish().unwrap(), []);
}

fn manager(device: &SharedDevice) -> Manager {
    let manager = Manager::new(std::slice::from_ref(device));
    manager.set_knobs(|knobs| (knobs.inference_floor, knobs.reserve) = (64 * KIB, 0));
    manager
}

fn load(manager: &Manager, model: &Arc<PagedPatcher>) {
    let handle: Arc<dyn ModelPatcher> = Arc::clone(model) as _;
    manager.load_model_gpu(&handle, LoadOptions::default()).unwrap();
    let listed = manager.loaded_models(false);
    assert_eq!(listed.len(), 1, "clones have one entry");
    assert!(std::ptr::addr_eq(Arc::as_ptr(&listed[0]), Arc::as_ptr(model)));
}

#[test]
fn a_b_none_a_gives_each_time_what_a_fresh_process_gives() {
    let file = ModelFile::new(&mixed_units(), 3);
    for card in [8 * MIB, 3 * MIB] {
        let device = small_card(card);
        {
            let manager = manager(&device);
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let plain = PagedPatcher::new(&model, Place::Card(0));
            let (a, b) = (plain.clone_model(), plain.clone_model());
            a.set_patches(Some(patches(&plain, 0, 2, 31)));
            b.set_patches(Some(patches(&plain, 1, 3, 32)));
            assert!(a.patches().is_some() && plain.patches().is_none());
            let stream = pager.stream().unwrap();
            for (turn, clone) in [&a, &b, &plain, &a, &a, &b, &plain].into_iter().enumerate() {
                load(&manager, clone);
                let attached = model.attached().map(|set| set.version());
                assert_eq!(attached, clone.patches().map(|set| set.version()), "loading attaches");
                checked(clone, &stream);
                assert_eq!(clone.loaded_size(), plain.loaded_size());
                // With evictions between the clones, and all of it once.
                let bytes = if turn == 3 { u64::MAX } else { 512 * KIB };
                assert!(clone.partially_unload(bytes).unwrap() > 0);
            }
            // Without a load in between, a fault brings its own patches.
            for clone in [&a, &plain, &b] {
                checked(clone, &stream);
            }
            manager.unload_all_models().unwrap();
            assert_eq!((plain.loaded_size(), model.attached().is_none()), (0, true));
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn a_clones_death_hands_its_entry_to_the_parent() {
    let file = ModelFile::new(&mixed_units(), 4);
    let device = small_card(8 * MIB);
    let manager = manager(&device);
    let pager = pager(&device, small_options());
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let parent = PagedPatcher::new(&model, Place::Card(0));
    let clone = parent.clone_model();
    let grandchild = clone.clone_model();
    assert!(grandchild.is_dynamic());
    load(&manager, &grandchild);
    drop(clone);
    drop(grandchild);
    let listed = manager.loaded_models(false);
    assert_eq!(listed.len(), 1);
    assert!(std::ptr::addr_eq(Arc::as_ptr(&listed[0]), Arc::as_ptr(&parent)));
    drop((listed, parent));
    assert!(manager.loaded_models(false).is_empty());
}

#[test]
fn page_locked_memory_comes_from_idle_models_first() {
    let files = [ModelFile::new(&mixed_units(), 5), ModelFile::new(&mixed_units(), 6)];
    // Neither fits, so both keep what they stream in page-locked memory.
    let device = small_card(2 * MIB);
    let manager = manager(&device);
    let pager = pager(&device, small_options());
    let stream = pager.stream().unwrap();
    let models: Vec<Arc<PagedPatcher>> = files
        .iter()
        .map(|file| {
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            PagedPatcher::new(&model, Place::Card(0))
        })
        .collect();
    for model in &models {
        let handle: Arc<dyn ModelPatcher> = Arc::clone(model) as _;
        manager.load_model_gpu(&handle, LoadOptions::default()).unwrap();
        checked(model, &stream);
        checked(model, &stream);
    }
    let [idle, active] = [models[0].pinned_size(), models[1].pinned_size()];
    assert!(idle > 0 && active > 0, "{idle} {active}");
    // The budget is what they hold: room for more comes from the one that is not in use.
    manager.set_knobs(|knobs| knobs.page_locked_budget = Some(idle + active));
    manager.ensure_pin_budget(1);
    assert_eq!(models[0].pinned_size(), 0);
    let in_use: Vec<bool> = manager
        .current_loaded_models()
        .iter()
        .map(vram_pager::manager::LoadedModel::currently_used)
        .collect();
    assert_eq!(in_use, [true, false]);
    checked(&models[0], &stream);
    checked(&models[1], &stream);
}
