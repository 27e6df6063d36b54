//! What a thread of a stress run asks of the manager, and of the pager beside faults.

use std::sync::Arc;

use vram_pager::manager::{
    FreeOptions, KeepOptions, LoadOptions, ManagerError, UNLIMITED, UnloadOptions, VramState,
};
use vram_pager::pager::PagerError;
use vram_pager::patcher::{ModelPatcher, Place};

use super::judge;
use super::numbers::Numbers;
use super::world::{Opened, World};

/// One call of the pager that is no fault.
pub(super) fn pager(world: &World<'_>, opened: &Opened, numbers: &mut Numbers) {
    let World { pager, page_bytes, .. } = world;
    let total = world.card.device.info().total_bytes;
    let model = &opened.model;
    let some = page_bytes * (1 + numbers.below(32));
    let (what, answer): (_, Result<(), PagerError>) = match numbers.below(10) {
        0 => ("set the headroom", pager.set_headroom(numbers.pick(&[0, total / 32, total / 16]))),
        1 => {
            let bytes = numbers.pick(&[0, 8 * page_bytes, total, 4 * total]);
            ("set the page-locked limit", pager.set_page_locked_limit(bytes))
        }
        2 => ("release idle frames", pager.release_idle().map(drop)),
        3 => ("refresh", pager.refresh()),
        4 => ("activate", model.activate(numbers.pick(&[None, Some(1), Some(3)]))),
        5 => ("unload", model.unload(numbers.pick(&[some, u64::MAX])).map(drop)),
        6 => ("unload page-locked memory", model.unload_page_locked(some).map(drop)),
        7 => ("prefetch everything", model.prefetch_all()),
        8 => {
            let compute = numbers.pick(&[None, Some(std::time::Duration::from_millis(40))]);
            ("tell the compute time", model.set_compute_per_gib(compute))
        }
        _ => {
            let figures = pager.figures();
            if figures.resident_bytes + figures.ring_bytes + figures.idle_bytes > total {
                world.counts.fail(format!("more than the card has: {figures:?}"));
            }
            model.figures();
            pager.reclaimable_bytes(Some(model));
            ("read figures", Ok(()))
        }
    };
    if let Err(error) = answer {
        world.counts.expects(what, &error);
    }
}

/// One call of the manager.
pub(super) fn manager(world: &World<'_>, models: &[Arc<Opened>], numbers: &mut Numbers) {
    let manager = &world.manager;
    let total = world.card.device.info().total_bytes;
    let card = Some(Place::Card(0));
    let opened = &models[numbers.place(models.len())];
    let as_patcher = |opened: &Opened| Arc::clone(&opened.patcher) as Arc<dyn ModelPatcher>;
    let patcher = as_patcher(opened);
    let (what, answer): (_, Result<(), ManagerError>) = match numbers.below(13) {
        0 if world.resident.is_some() => {
            let patcher = world.resident.as_ref().map(|resident| Arc::clone(&resident.patcher) as Arc<_>);
            let loads = patcher.iter().map(|patcher: &Arc<dyn ModelPatcher>| {
                manager.load_model_gpu(patcher, LoadOptions::default())
            });
            ("load modules", loads.collect())
        }
        0..3 => {
            let options = LoadOptions { memory_required: numbers.below(total / 4), ..LoadOptions::default() };
            ("load a model", manager.load_model_gpu(&patcher, options))
        }
        3 => {
            let all: Vec<_> =
                models.iter().filter(|_| numbers.per_mille(500)).map(|opened| as_patcher(opened)).collect();
            ("load models", manager.load_models_gpu(&all, LoadOptions::default()))
        }
        4 => {
            // A clone with patches of its own, which dies at once: its entry goes to the parent.
            let clone = opened.patcher.clone_model();
            clone.set_patches(opened.sets[numbers.place(opened.sets.len())].clone());
            let clone: Arc<dyn ModelPatcher> = clone;
            ("load a clone", manager.load_model_gpu(&clone, LoadOptions::default()))
        }
        5 => {
            let options = FreeOptions { for_dynamic: numbers.per_mille(500), ..FreeOptions::default() };
            let bytes = numbers.pick(&[0, total / 8, total / 2, UNLIMITED]);
            ("free memory", manager.free_memory(bytes, card, &options).map(drop))
        }
        6 => ("unload all models", manager.unload_all_models().map(drop)),
        7 => {
            ("unload a model", manager.unload_model_and_clones(&patcher, UnloadOptions::default()).map(drop))
        }
        8 => ("unload all but one", manager.unload_all_except(&patcher, KeepOptions::default()).map(drop)),
        9 => ("empty the cache", manager.soft_empty_cache(false)),
        10 => {
            let entries = manager.current_loaded_models();
            let used = manager.use_more_memory(numbers.below(total / 4), &entries, Place::Card(0));
            ("use more memory", used.map(drop))
        }
        11 => {
            let state = numbers.pick(&[VramState::Normal, VramState::Low, VramState::No, VramState::High]);
            let smart = numbers.per_mille(800);
            manager.set_knobs(|knobs| {
                knobs.vram_state = state;
                knobs.smart_memory = smart;
            });
            ("change settings", Ok(()))
        }
        _ => {
            let loaded = manager.loaded_models(false);
            if let Some(model) = loaded.iter().find(|model| model.loaded_size() > model.model_size()) {
                let (loaded, size) = (model.loaded_size(), model.model_size());
                world.counts.fail(format!("{} has {loaded} of {size} bytes loaded", model.label()));
            }
            manager.ensure_pin_budget(numbers.below(total));
            manager.stats();
            let free = manager.get_free_memory_for(&*patcher);
            ("read the manager", free.and(manager.get_total_memory(card)).map(drop))
        }
    };
    if let Err(error) = answer {
        world.counts.judged(what, judge::manager(&error), &error);
    }
}
