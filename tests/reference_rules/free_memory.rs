//! `free_memory`, step by step.

use super::*;

#[test]
fn step_1_drops_entries_whose_model_died() {
    let (manager, card) = one_card(8192);
    let model: Shared = resident(&card, "A", 64);
    load(&manager, &[&model]);
    drop(model);
    assert!(free(&manager, 9999).is_empty(), "the dead are not unloaded");
    assert!(manager.stats().models.is_empty());
}

#[test]
fn step_2_clears_currently_used_on_every_candidate_and_on_no_other() {
    let (manager, first, second) = two_cards(8192, 8192);
    let (a, b): (Shared, Shared) = (resident(&first, "A", 64), resident(&first, "B", 64));
    let other: Shared = SizedModel::new(SizedSpec { place: Place::Card(1), ..spec("X", 64) }, &second);
    load(&manager, &[&a, &b, &other]);
    let keep_loaded = vec![entry_of(&manager, "A")];
    manager.free_memory(0, Some(GPU), &FreeOptions { keep_loaded, ..FreeOptions::default() }).unwrap();
    let used: Vec<_> = manager.loaded_models(true).iter().map(|model| model.label()).collect();
    assert_eq!(used, ["A", "X"]);
}

#[test]
fn step_2_the_order_is_most_offloaded_then_fewest_references_then_smallest_then_newest() {
    let (manager, card) = one_card(32_768);
    let make = |label: &str, mib| -> Shared { resident(&card, label, mib) };
    let partly = resident(&card, "partly", 4096);
    let models: Vec<Shared> =
        vec![make("old", 512), make("new", 512), make("small", 256), make("held", 64), partly.clone()];
    for model in &models {
        load(&manager, &[model]);
    }
    partly.partially_unload(64 * MIB).unwrap();
    let _held = [Arc::clone(&models[3]), Arc::clone(&models[3])];
    for expected in ["partly", "small", "new", "old", "held"] {
        let loaded = entry_of(&manager, expected).model_loaded_memory();
        let free_now = manager.get_free_memory(None).unwrap();
        let gone = manager.free_memory(free_now + loaded, Some(GPU), &FreeOptions::default()).unwrap();
        assert_eq!(labels(&gone), [expected]);
    }
}

#[test]
fn step_3_a_shortfall_below_the_loaded_size_unloads_in_part_and_the_entry_stays() {
    let (manager, card) = one_card(8192);
    let probe = Probe::new(resident(&card, "A", 4096));
    let model: Shared = probe.clone();
    load(&manager, &[&model]);
    probe.take_calls();
    assert!(free(&manager, 5000).is_empty());
    assert_eq!(probe.take_calls(), [Call::Unload((5000 - 4096) * MIB)]);
    assert_eq!(ledger(&manager), ["A"]);
}

#[test]
fn step_3_a_shortfall_of_the_loaded_size_unloads_whole() {
    let (manager, card) = one_card(8192);
    let probe = Probe::new(resident(&card, "A", 4096));
    let model: Shared = probe.clone();
    load(&manager, &[&model]);
    probe.take_calls();
    assert_eq!(free(&manager, 8192), ["A"]);
    assert_eq!(probe.take_calls(), [Call::Detach(true)]);
}

#[test]
fn step_3_the_shortfall_is_computed_afresh_and_later_victims_are_spared() {
    let (manager, card) = one_card(8192);
    let (a, b): (Shared, Shared) = (resident(&card, "A", 1024), resident(&card, "B", 2048));
    load(&manager, &[&a, &b]);
    assert_eq!(free(&manager, 6144), ["A"]);
    assert_eq!(b.loaded_size(), 2048 * MIB);
}

#[test]
fn step_3_paged_victims_of_a_paged_request_are_left_alone_and_count_as_free() {
    let (manager, card) = one_card(8192);
    let pages = paged(&card, "D", 4096);
    let (d, r): (Shared, Shared) = (pages.clone(), resident(&card, "R", 1024));
    load(&manager, &[&r]);
    load(&manager, &[&d]);
    pages.touch(4096 * MIB);
    let options = FreeOptions { for_dynamic: true, ..FreeOptions::default() };
    // R is the smaller, so it is asked before D is met and nothing is subtracted yet.
    let gone = manager.free_memory(3500 * MIB, Some(GPU), &options).unwrap();
    assert!(gone.is_empty());
    assert_eq!(r.loaded_size(), 576 * MIB);
    // Now R has most off the card and goes first; D's 4096 then count as free, which is enough.
    let gone = manager.free_memory(9000 * MIB, Some(GPU), &options).unwrap();
    assert_eq!(labels(&gone), ["R"]);
    assert_eq!(pages.loaded_size(), 4096 * MIB);

    // Behind D, a model of its size is spared by what D would give up.
    let (manager, card) = one_card(8192);
    let pages = paged(&card, "D", 1024);
    let (d, r): (Shared, Shared) = (pages.clone(), resident(&card, "R", 2048));
    load(&manager, &[&r]);
    load(&manager, &[&d]);
    pages.touch(1024 * MIB);
    let _held = Arc::clone(&r);
    let gone = manager.free_memory(6144 * MIB, Some(GPU), &options).unwrap();
    assert!(gone.is_empty());
    assert_eq!((d.loaded_size(), r.loaded_size()), (1024 * MIB, 2048 * MIB));
}

#[test]
fn step_3_an_ordinary_request_takes_pages_back() {
    let (manager, card) = one_card(8192);
    let pages = paged(&card, "D", 4096);
    let model: Shared = pages.clone();
    load(&manager, &[&model]);
    pages.touch(4096 * MIB);
    assert!(free(&manager, 6000).is_empty());
    assert!(pages.loaded_size() <= (8192 - 6000) * MIB && pages.loaded_size() > 2000 * MIB);
}

#[test]
fn step_3_without_smart_memory_everyone_goes_paged_ones_too() {
    for for_dynamic in [false, true] {
        let (manager, card) = one_card(8192);
        manager.set_knobs(|knobs| knobs.smart_memory = false);
        let pages = paged(&card, "D", 1024);
        let (d, r): (Shared, Shared) = (pages.clone(), resident(&card, "R", 1024));
        load(&manager, &[&d, &r]);
        pages.touch(512 * MIB);
        let options = FreeOptions { for_dynamic, ..FreeOptions::default() };
        let gone = manager.free_memory(0, Some(GPU), &options).unwrap();
        assert_eq!(labels(&gone), ["R", "D"]);
    }
}

#[test]
fn step_4_unloaded_entries_leave_and_are_answered_highest_index_first() {
    let (manager, card) = one_card(8192);
    let models: Vec<Shared> =
        [("A", 64), ("B", 512), ("C", 128)].map(|(label, mib)| resident(&card, label, mib) as Shared).into();
    manager.load_models_gpu(&models, LoadOptions::default()).unwrap();
    assert_eq!(free(&manager, 8192), ["C", "B", "A"]);
    assert!(ledger(&manager).is_empty());
}

#[test]
fn step_4_a_model_never_loaded_goes_first_and_frees_nothing() {
    let (manager, card) = one_card(8192);
    let (empty, full): (Shared, Shared) = (paged(&card, "D", 4096), resident(&card, "R", 1024));
    load(&manager, &[&empty, &full]);
    assert_eq!(free(&manager, 7232), ["D"]);
    assert!(full.loaded_size() < 1024 * MIB, "so the next is asked too");
}

#[test]
fn step_5_page_locked_memory_makes_room_idle_models_first() {
    let (manager, card) = one_card(8192);
    manager.set_knobs(|knobs| knobs.page_locked_budget = Some(2048 * MIB));
    let pinned =
        |label, mib| Probe::new(SizedModel::new(SizedSpec { pinned: mib * MIB, ..spec(label, 64) }, &card));
    let (idle, used) = (pinned("idle", 1024), pinned("used", 1024));
    let (idle_model, used_model): (Shared, Shared) = (idle.clone(), used.clone());
    load(&manager, &[&idle_model]);
    load(&manager, &[&used_model]);
    assert!(manager.ensure_pin_budget(0), "it fits to the byte");
    assert!(manager.ensure_pin_budget(100 * MIB));
    assert_eq!(idle.pinned_size(), (1024 - 100 - 256) * MIB, "the shortfall and 256 MiB");
    assert_eq!(used.pinned_size(), 1024 * MIB);
    assert!(manager.ensure_pin_budget(1500 * MIB));
    assert_eq!(idle.pinned_size(), 0);
    assert!(used.pinned_size() < 1024 * MIB, "then those in use");
    assert!(!manager.ensure_pin_budget(4096 * MIB), "what cannot fit is no failure, only a no");
}

#[test]
fn step_5_registering_takes_a_good_piece_since_it_stops_the_device() {
    let (manager, card) = one_card(8192);
    manager.set_knobs(|knobs| knobs.page_locked_budget = Some(8 * GIB));
    let holder = Probe::new(SizedModel::new(SizedSpec { pinned: 8 * GIB, ..spec("P", 64) }, &card));
    let model: Shared = holder.clone();
    load(&manager, &[&model]);
    assert!(manager.ensure_pin_registerable(MIB));
    assert_eq!(holder.pinned_size(), 6 * GIB - MIB);
    assert!(manager.ensure_pin_registerable(MIB));
    assert_eq!(holder.pinned_size(), 6 * GIB - MIB, "and then not for a while");
}

#[test]
fn step_5_is_skipped_for_paged_requests_and_where_no_pins_are_wanted() {
    let (manager, card) = one_card(8192);
    manager.set_knobs(|knobs| knobs.page_locked_budget = Some(0));
    let holder = Probe::new(SizedModel::new(SizedSpec { pinned: 512 * MIB, ..spec("P", 64) }, &card));
    let model: Shared = holder.clone();
    load(&manager, &[&model]);
    holder.sizes.partially_load(LoadBudget::Everything, false).unwrap();
    let pins =
        |for_dynamic, pins_required| FreeOptions { for_dynamic, pins_required, ..FreeOptions::default() };
    manager.free_memory(0, Some(GPU), &pins(true, GIB)).unwrap();
    manager.free_memory(0, Some(GPU), &pins(false, 0)).unwrap();
    assert_eq!(holder.pinned_size(), 512 * MIB);
    manager.free_memory(0, Some(GPU), &pins(false, 1)).unwrap();
    assert_eq!(holder.pinned_size(), 0);
}

#[test]
fn step_6_the_cache_is_emptied_after_any_unload() {
    let (manager, card) = one_card(8192);
    manager.set_knobs(|knobs| knobs.vram_state = VramState::High);
    let model: Shared = resident(&card, "A", 64);
    load(&manager, &[&model]);
    card.set_pool(0, 1);
    free(&manager, 8192);
    assert_eq!(card.pool_reserved(), 0);
}

#[test]
fn step_6_otherwise_only_idle_cache_above_a_quarter_of_free_and_not_on_high() {
    for (state, idle, emptied) in [
        (VramState::Normal, 2000, false),
        (VramState::Normal, 2048, false),
        (VramState::Normal, 2049, true),
        (VramState::High, 2049, false),
    ] {
        let (manager, card) = one_card(8192);
        manager.set_knobs(|knobs| knobs.vram_state = state);
        card.set_pool(0, idle * MIB);
        free(&manager, 0);
        assert_eq!(card.times_emptied() > 0, emptied, "{state:?} {idle}");
    }
}

#[test]
fn no_device_means_every_card_in_turn() {
    let (manager, first, second) = two_cards(8192, 8192);
    let (a, b): (Shared, Shared) = (
        resident(&first, "A", 64),
        SizedModel::new(SizedSpec { place: Place::Card(1), ..spec("B", 64) }, &second),
    );
    load(&manager, &[&b, &a]);
    let gone = manager.free_memory(UNLIMITED, None, &FreeOptions::default()).unwrap();
    assert_eq!(labels(&gone), ["A", "B"]);
}

#[test]
fn keep_loaded_entries_are_never_touched() {
    let (manager, card) = one_card(8192);
    let (a, b): (Shared, Shared) = (resident(&card, "A", 64), resident(&card, "B", 64));
    load(&manager, &[&a, &b]);
    let keep_loaded = vec![entry_of(&manager, "A"), entry_of(&manager, "A")];
    let options = FreeOptions { keep_loaded, ..FreeOptions::default() };
    let gone = manager.free_memory(UNLIMITED, Some(GPU), &options).unwrap();
    assert_eq!(labels(&gone), ["B"]);
    assert_eq!(ledger(&manager), ["A"]);
}

#[test]
fn only_listed_models_and_idle_cache_are_freed() {
    let (manager, card) = one_card(8192);
    card.set_other(1024 * MIB);
    card.set_pool(512 * MIB, 256 * MIB);
    let unlisted = resident(&card, "U", 128);
    unlisted.partially_load(LoadBudget::Everything, false).unwrap();
    let gone = manager.free_memory(UNLIMITED, None, &FreeOptions::default()).unwrap();
    assert!(gone.is_empty());
    assert_eq!(unlisted.loaded_size(), 128 * MIB, "a model that nobody listed stays");
    assert_eq!(card.pool_used(), 512 * MIB, "activations stay");
    assert_eq!(manager.get_free_memory(None).unwrap(), (8192 - 1024 - 512 - 128) * MIB);
}

#[test]
fn ram_required_is_accepted_and_changes_nothing() {
    let (manager, card) = one_card(8192);
    let model: Shared = resident(&card, "A", 64);
    load(&manager, &[&model]);
    let options = FreeOptions { ram_required: u64::MAX, ..FreeOptions::default() };
    assert!(manager.free_memory(0, Some(GPU), &options).unwrap().is_empty());
    assert_eq!(model.loaded_size(), 64 * MIB);
}

#[test]
fn an_empty_ledger_a_request_of_zero_and_an_endless_one_are_all_defined() {
    let (manager, card) = one_card(8192);
    for ask in [0, 1, 8192 * MIB, u64::MAX - 1, UNLIMITED] {
        assert!(manager.free_memory(ask, None, &FreeOptions::default()).unwrap().is_empty());
    }
    let model: Shared = resident(&card, "A", 64);
    load(&manager, &[&model]);
    assert!(free(&manager, 0).is_empty());
    let gone = manager.free_memory(u64::MAX - 1, Some(GPU), &FreeOptions::default()).unwrap();
    assert_eq!(labels(&gone), ["A"]);
    let error = manager.free_memory(0, Some(Place::Card(9)), &FreeOptions::default()).unwrap_err();
    assert!(matches!(error, ManagerError::UnknownDevice { .. }));
}

#[test]
fn a_card_that_is_lost_is_an_error_and_everything_can_still_be_unloaded() {
    let (lost, sound) = (FakeCard::new(8192, Backend::Cuda), FakeCard::new(8192, Backend::Cuda));
    let manager = manager_over(vec![lost.clone(), sound.clone()]);
    let on_sound = SizedSpec { place: Place::Card(1), ..spec("B", 64) };
    let (a, b): (Shared, Shared) = (resident(&lost.books, "A", 64), SizedModel::new(on_sound, &sound.books));
    load(&manager, &[&a, &b]);
    *lost.lost.lock() = true;
    let error = manager.free_memory(9999 * MIB, Some(GPU), &FreeOptions::default()).unwrap_err();
    assert!(matches!(error, ManagerError::Device { place: GPU, .. }));
    assert!(error.to_string().contains("pulled out"), "{error}");
    assert!(manager.load_model_gpu(&a, LoadOptions::default()).is_err());
    assert_eq!(ledger(&manager), ["A", "B"], "a load that could not be admitted changes nothing");
    assert!(manager.soft_empty_cache(false).is_err());
    assert_eq!(sound.books.times_emptied(), 1, "the other card was served");
    assert!(manager.stats().devices[0].error.as_ref().unwrap().contains("pulled out"));
    let gone = manager.unload_all_models().unwrap();
    assert_eq!(labels(&gone), ["A", "B"]);
}
