//! The functions that the page gives a paragraph or less.

use super::*;

#[test]
fn get_total_memory_is_the_drivers_and_with_the_flag_the_pools_too() {
    let (manager, card) = one_card(8192);
    card.set_pool(100 * MIB, 28 * MIB);
    assert_eq!(manager.get_total_memory(None).unwrap(), 8192 * MIB);
    assert_eq!(manager.get_total_memory_and_pool(None).unwrap(), (8192 * MIB, 128 * MIB));
}

#[test]
fn the_reserve_and_the_floor_are_read_live() {
    let (manager, card) = one_card(8192);
    assert_eq!(manager.extra_reserved_memory(), 400 * MIB);
    assert_eq!(manager.minimum_inference_memory(), FLOOR);
    let model: Shared = resident(&card, "A", 16_384);
    manager.set_extra_reserved_memory(2048 * MIB);
    assert_eq!(manager.minimum_inference_memory(), FLOOR + 1648 * MIB);
    load(&manager, &[&model]);
    assert!(manager.get_free_memory(None).unwrap() >= FLOOR + 1648 * MIB);
    manager.set_knobs(|knobs| {
        knobs.reserve = 0;
        knobs.inference_floor = 0;
    });
    load(&manager, &[&model]);
    assert_eq!(manager.get_free_memory(None).unwrap(), 0, "a floor of nothing fills the card");
}

#[test]
fn maximum_vram_for_weights_is_88_percent_less_the_floor() {
    let (manager, _card) = one_card(10_000);
    assert_eq!(manager.maximum_vram_for_weights(None).unwrap(), 8800 * MIB - FLOOR);
    let (small, _card) = one_card(100);
    assert_eq!(small.maximum_vram_for_weights(None).unwrap(), 0);
}

#[test]
fn the_headroom_is_settable_also_to_nothing() {
    let (manager, _card) = one_card(3200);
    assert_eq!(manager.headroom(GPU).unwrap(), 100 * MIB);
    manager.set_knobs(|knobs| knobs.headroom = Some(0));
    assert_eq!(manager.headroom(GPU).unwrap(), 0);
}

#[test]
fn soft_empty_cache_serves_every_card_ignores_force_and_leaves_used_memory() {
    for force in [false, true] {
        let (manager, first, second) = two_cards(8192, 8192);
        first.set_pool(1, 10);
        second.set_pool(2, 20);
        manager.soft_empty_cache(force).unwrap();
        assert_eq!((first.pool_reserved(), second.pool_reserved()), (1, 2));
    }
}

#[test]
fn soft_empty_cache_unloads_no_model_and_does_nothing_on_the_cpu() {
    let (manager, card) = one_card(8192);
    let pages = paged(&card, "D", 64);
    let model: Shared = pages.clone();
    load(&manager, &[&model]);
    pages.touch(64 * MIB);
    manager.soft_empty_cache(true).unwrap();
    assert_eq!(pages.loaded_size(), 64 * MIB, "mapped pages stay");
    let cpu = FakeCard::new(64, Backend::Cpu);
    manager_over(vec![cpu.clone()]).soft_empty_cache(true).unwrap();
    assert_eq!(cpu.books.times_emptied(), 0);
}

#[test]
fn unload_all_models_empties_every_card() {
    let (manager, first, second) = two_cards(8192, 8192);
    let on_second = SizedSpec { place: Place::Card(1), ..spec("B", 64) };
    let (a, b): (Shared, Shared) = (paged(&first, "A", 64), SizedModel::new(on_second, &second));
    load(&manager, &[&a, &b]);
    assert_eq!(labels(&manager.unload_all_models().unwrap()), ["A", "B"]);
    assert_eq!((first.loaded(), second.loaded()), (0, 0));
}

/// M with a nested chain of additional models, a clone's family on another card, and a stranger.
struct Family {
    manager: Manager,
    model: Shared,
    _all: Vec<Shared>,
}

fn family() -> Family {
    let (manager, first, second) = two_cards(8192, 8192);
    let model = resident(&first, "M", 64);
    let (child, grandchild) = (resident(&first, "child", 64), resident(&first, "grandchild", 64));
    child.set_additional_models(vec![grandchild.clone(), model.clone()]);
    model.set_additional_models(vec![child.clone()]);
    let clone = model.clone_model("M2");
    let copy = model.copy_for(SizedSpec { place: Place::Card(1), ..spec("copy", 64) }, &second);
    let stranger = resident(&first, "stranger", 64);
    let elsewhere = SizedModel::new(SizedSpec { place: Place::Card(1), ..spec("elsewhere", 64) }, &second);
    let all: Vec<Shared> = vec![clone, child, grandchild, copy, stranger, elsewhere];
    manager.load_models_gpu(&all, LoadOptions::default()).unwrap();
    Family { manager, model, _all: all }
}

#[test]
fn unload_model_and_clones_unloads_the_family_and_keeps_everyone_else() {
    // The page's sentence says the opposite; the name, the parameter and the system say this.
    let family = family();
    family.manager.unload_model_and_clones(&family.model, UnloadOptions::default()).unwrap();
    assert_eq!(ledger(&family.manager), ["copy", "stranger", "elsewhere"]);
    let options = UnloadOptions { all_devices: true, ..UnloadOptions::default() };
    family.manager.unload_model_and_clones(&family.model, options).unwrap();
    assert_eq!(ledger(&family.manager), ["stranger", "elsewhere"]);
}

#[test]
fn unload_model_and_clones_can_leave_the_additional_models() {
    let family = family();
    let options = UnloadOptions { unload_additional_models: false, all_devices: true };
    family.manager.unload_model_and_clones(&family.model, options).unwrap();
    assert_eq!(ledger(&family.manager), ["child", "grandchild", "stranger", "elsewhere"]);
}

#[test]
fn unload_all_except_keeps_the_family_and_unloads_everyone_else() {
    let first = family();
    first.manager.unload_all_except(&first.model, KeepOptions::default()).unwrap();
    assert_eq!(ledger(&first.manager), ["M2", "child", "grandchild", "copy", "elsewhere"]);
    let all = family();
    let options = KeepOptions { keep_additional_models: false, all_devices: true };
    all.manager.unload_all_except(&all.model, options).unwrap();
    assert_eq!(ledger(&all.manager), ["M2", "copy"]);
}

#[test]
fn loaded_models_lists_all_or_those_of_the_last_load() {
    let (manager, card) = one_card(8192);
    let (a, b): (Shared, Shared) = (resident(&card, "A", 64), resident(&card, "B", 64));
    load(&manager, &[&a]);
    load(&manager, &[&b]);
    let names = |only| manager.loaded_models(only).iter().map(|model| model.label()).collect::<Vec<_>>();
    assert_eq!(names(false), ["B", "A"]);
    assert_eq!(names(true), ["B"]);
}

#[test]
fn offloaded_memory_sums_what_the_entries_have_off_the_card() {
    let (manager, first, second) = two_cards(4096, 4096);
    let on_second = SizedSpec { place: Place::Card(1), ..spec("C", 8192) };
    let (a, b, c): (Shared, Shared, Shared) =
        (resident(&first, "A", 8192), paged(&first, "B", 512), SizedModel::new(on_second, &second));
    load(&manager, &[&a, &b, &c]);
    let entries = manager.current_loaded_models();
    let expected = 8192 * MIB - a.loaded_size() + 512 * MIB;
    assert_eq!(manager.offloaded_memory(&entries, GPU), expected);
    assert_eq!(manager.offloaded_memory(&entries, Place::Cpu), 0);
}

#[test]
fn use_more_memory_lets_each_take_more_until_the_extra_is_used_up() {
    let (manager, card) = one_card(16_384);
    let models: Vec<Shared> = ["A", "B", "C"].map(|label| resident(&card, label, 1024) as Shared).into();
    manager.set_knobs(|knobs| knobs.vram_state = VramState::No);
    manager.load_models_gpu(&models, LoadOptions::default()).unwrap();
    let entries = manager.current_loaded_models();
    assert_eq!(manager.use_more_memory(1536 * MIB, &entries, GPU).unwrap(), 1536 * MIB);
    let loaded: Vec<_> = models.iter().map(|model| model.loaded_size() / MIB).collect();
    assert_eq!(loaded, [1024, 512, 0]);
    assert_eq!(manager.use_more_memory(u64::MAX, &entries, GPU).unwrap(), 1536 * MIB);
    assert_eq!(manager.use_more_memory(5, &entries, Place::Cpu).unwrap(), 0);
}

#[test]
fn settings_take_effect_at_the_next_call() {
    let (manager, card) = one_card(8192);
    let model: Shared = resident(&card, "A", 1024);
    for (state, loaded) in [(VramState::No, 0), (VramState::High, 1024), (VramState::No, 1024)] {
        manager.set_knobs(|knobs| knobs.vram_state = state);
        load(&manager, &[&model]);
        assert_eq!(model.loaded_size(), loaded * MIB, "{state:?}: nothing more, and nothing less");
    }
}

#[test]
fn the_snapshot_tells_what_is_where() {
    let (manager, card) = one_card(8192);
    card.set_pool(100 * MIB, 28 * MIB);
    let model: Shared = SizedModel::new(SizedSpec { pinned: 5, ..spec("A", 16_384) }, &card);
    load(&manager, &[&model]);
    let stats = manager.stats();
    let (device, row) = (&stats.devices[0], &stats.models[0]);
    assert_eq!(
        (device.total, device.reserved, device.active, device.cache),
        (8192 * MIB, 128 * MIB, 100 * MIB, 28 * MIB)
    );
    assert_eq!(row.loaded + row.offloaded, 16_384 * MIB);
    assert_eq!(row.page_locked, 5);
    assert!(row.currently_used && !row.dynamic);
    assert_eq!(stats.ram_available, 40 * GIB);
    let json = serde_json::to_value(&stats).unwrap();
    assert_eq!(json["models"][0]["label"], "A");
}
