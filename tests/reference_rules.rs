//! The function reference, section by section: one test a stated rule, named for the rule.
//!
//! Where the described system and its page disagree (twice), the tests say which one is followed.

mod manager_support;

use std::sync::Arc;

use manager_support::*;
use vram_pager::manager::{
    Backend, FreeOptions, KeepOptions, LoadOptions, LoadedModel, Manager, ManagerError, UNLIMITED,
    UnloadOptions, VramState,
};
use vram_pager::patcher::{IdleCache, LoadBudget, ModelPatcher, Place, SizedModel, SizedSpec};

fn budgets(probe: &Probe) -> Vec<LoadBudget> {
    let calls = probe.take_calls();
    calls
        .into_iter()
        .filter_map(|call| if let Call::Load(budget, _) = call { Some(budget) } else { None })
        .collect()
}

fn bytes(mib: i64) -> i64 {
    mib * 1024 * 1024
}

fn floor() -> i64 {
    i64::try_from(FLOOR).unwrap()
}

mod two_words_first {
    use super::*;

    #[test]
    fn an_entry_holds_its_patcher_weakly() {
        let (manager, card) = one_card(8192);
        let model: Shared = resident(&card, "A", 1024);
        load(&manager, &[&model]);
        assert_eq!(Arc::strong_count(&model), 1);
        drop(model);
        assert_eq!(card.loaded(), 0);
        assert!(ledger(&manager).is_empty());
    }

    #[test]
    fn an_entry_remembers_the_device_it_was_loaded_to() {
        let (manager, _, second) = two_cards(8192, 8192);
        let model: Shared = SizedModel::new(SizedSpec { place: Place::Card(1), ..spec("A", 1024) }, &second);
        load(&manager, &[&model]);
        assert_eq!(entry_of(&manager, "A").device(), Place::Card(1));
    }

    #[test]
    fn an_entry_turns_the_managers_questions_into_the_patchers_answers() {
        let (manager, card) = one_card(8192);
        let model: Shared = resident(&card, "A", 24_576);
        load(&manager, &[&model]);
        let entry = entry_of(&manager, "A");
        let loaded = model.loaded_size();
        assert!(loaded > 0 && loaded < model.model_size());
        assert_eq!(entry.model_memory(), 24_576 * MIB);
        assert_eq!(entry.model_loaded_memory(), loaded);
        assert_eq!(entry.model_offloaded_memory(), 24_576 * MIB - loaded);
        assert_eq!(entry.model_memory_required(GPU), 24_576 * MIB - loaded, "the remainder where it is");
        assert_eq!(entry.model_memory_required(Place::Card(1)), 24_576 * MIB, "all of it elsewhere");
    }

    #[test]
    fn a_dead_entry_says_so_and_answers_zero() {
        let (manager, card) = one_card(8192);
        let model: Shared = resident(&card, "A", 1024);
        load(&manager, &[&model]);
        let entry = entry_of(&manager, "A");
        assert!(!entry.is_dead());
        drop(model);
        assert!(entry.is_dead());
        assert_eq!(entry.model_memory(), 0);
        assert_eq!(entry.model_offloaded_memory(), 0);
        assert_eq!(entry.model_memory_required(GPU), 0);
        assert_eq!(entry.model_load(LoadBudget::Everything, false).unwrap(), 0);
        assert_eq!(entry.model_use_more_vram(5).unwrap(), 0);
        assert!(entry.model_unload(None, true).unwrap());
    }

    #[test]
    fn a_clones_death_hands_its_entry_to_the_parent() {
        let (manager, card) = one_card(8192);
        let parent = resident(&card, "A", 1024);
        let grandchild: Shared = parent.clone_model("A2").clone_model("A3");
        load(&manager, &[&grandchild]);
        assert_eq!(ledger(&manager), ["A3"]);
        drop(grandchild);
        assert_eq!(ledger(&manager), ["A"], "the nearest ancestor that lives, though A2 died with A3");
        assert_eq!(entry_of(&manager, "A").model_loaded_memory(), 1024 * MIB);
        drop(parent);
        assert!(ledger(&manager).is_empty());
        assert_eq!(card.loaded(), 0);
    }
}

mod load_models_gpu {
    use super::*;

    #[test]
    fn patch_models_follow_their_model_and_duplicates_are_dropped() {
        let (manager, card) = one_card(8192);
        let (model, rider) = (resident(&card, "M", 512), resident(&card, "CN", 256));
        model.set_patches_models(vec![rider.clone()]);
        let (model, rider, other): (Shared, Shared, Shared) = (model, rider, resident(&card, "X", 64));
        load(&manager, &[&model, &other, &rider, &model]);
        assert_eq!(ledger(&manager), ["M", "CN", "X"]);
        assert_eq!(card.loaded(), (512 + 256 + 64) * MIB);
    }

    #[test]
    fn step_1_drops_entries_whose_model_died() {
        let (manager, card) = one_card(8192);
        let (a, b): (Shared, Shared) = (resident(&card, "A", 64), resident(&card, "B", 64));
        load(&manager, &[&a]);
        drop(a);
        load(&manager, &[&b]);
        assert_eq!(manager.stats().models.len(), 1);
    }

    #[test]
    fn step_2_even_a_load_that_needs_no_working_memory_leaves_the_floor_and_the_reserve() {
        let (manager, card) = one_card(4096);
        let model: Shared = resident(&card, "A", 8192);
        load(&manager, &[&model]);
        let free = manager.get_free_memory(None).unwrap();
        assert!(free >= FLOOR && free < FLOOR + 64 * MIB, "{free}");
    }

    #[test]
    fn step_2_a_larger_request_replaces_the_floor_and_keeps_the_reserve() {
        let (manager, card) = one_card(8192);
        let model: Shared = resident(&card, "A", 16_384);
        load_with(&manager, &[&model], LoadOptions { memory_required: 2048 * MIB, ..LoadOptions::default() });
        let free = manager.get_free_memory(None).unwrap();
        assert!(free >= 2448 * MIB && free < 2512 * MIB, "{free}");
    }

    #[test]
    fn step_3_a_listed_model_keeps_its_entry_and_is_marked_used() {
        let (manager, card) = one_card(8192);
        let (a, b): (Shared, Shared) = (resident(&card, "A", 64), resident(&card, "B", 64));
        load(&manager, &[&a]);
        let entry = entry_of(&manager, "A");
        load(&manager, &[&b]);
        assert!(!entry.currently_used());
        load(&manager, &[&a]);
        assert!(entry.currently_used());
        assert_eq!(entry_of(&manager, "A"), entry);
        assert_eq!(ledger(&manager), ["A", "B"]);
    }

    #[test]
    fn step_3_one_resident_model_makes_the_whole_call_not_dynamic() {
        let (manager, card) = one_card(8192);
        let victim = paged(&card, "D", 6144);
        let (d, d2, r): (Shared, Shared, Shared) =
            (victim.clone(), paged(&card, "D2", 3072), resident(&card, "R", 3072));
        load(&manager, &[&d]);
        victim.touch(6144 * MIB);
        load(&manager, &[&d2]);
        assert_eq!(d.loaded_size(), 6144 * MIB, "a paged load spares paged victims");
        load(&manager, &[&d2, &r]);
        assert!(d.loaded_size() < 6144 * MIB, "a mixed one does not");
    }

    #[test]
    fn step_4_a_clone_replaces_its_models_entry_and_the_bytes_stay() {
        let (manager, card) = one_card(8192);
        let model = resident(&card, "A", 1024);
        let probe = Probe::new(model.clone());
        let (a, clone): (Shared, Shared) = (probe.clone(), model.clone_model("A2"));
        load(&manager, &[&a]);
        probe.take_calls();
        load(&manager, &[&clone]);
        assert_eq!(probe.take_calls(), [Call::Detach(false)], "it lets go and nothing else");
        assert_eq!(ledger(&manager), ["A2"]);
        assert_eq!(card.loaded(), 1024 * MIB, "never twice on the card");
    }

    #[test]
    fn step_4_two_clones_in_one_call_are_loaded_once_and_the_first_is_listed() {
        let (manager, card) = one_card(8192);
        let model = resident(&card, "A", 1024);
        let (a, clone): (Shared, Shared) = (model.clone(), model.clone_model("A2"));
        load(&manager, &[&clone, &a]);
        assert_eq!(ledger(&manager), ["A2"]);
        assert_eq!(card.loaded(), 1024 * MIB);
    }

    #[test]
    fn step_5_only_the_offloaded_remainder_is_asked_for() {
        let (manager, card) = one_card(8192);
        let (a, b): (Shared, Shared) = (resident(&card, "A", 4096), resident(&card, "B", 2048));
        load(&manager, &[&b]);
        load(&manager, &[&a]);
        load(&manager, &[&a]);
        assert_eq!(b.loaded_size(), 2048 * MIB, "A is there already: asking for all of it would evict B");
    }

    #[test]
    fn step_5_resident_models_want_page_locked_copies_and_paged_ones_do_not() {
        let (manager, card) = one_card(8192);
        manager.set_knobs(|knobs| knobs.page_locked_budget = Some(1024 * MIB));
        let holder = Probe::new(SizedModel::new(SizedSpec { pinned: 1024 * MIB, ..spec("P", 64) }, &card));
        let (p, d, r): (Shared, Shared, Shared) =
            (holder.clone(), paged(&card, "D", 512), resident(&card, "R", 512));
        load(&manager, &[&p]);
        load(&manager, &[&d]);
        assert_eq!(holder.pinned_size(), 1024 * MIB);
        load(&manager, &[&r]);
        assert_eq!(holder.pinned_size(), 1024 * MIB - (512 + 256) * MIB, "the shortfall and 256 MiB");
    }

    #[test]
    fn step_6_asks_for_ten_percent_over_the_sum_and_the_working_memory() {
        let (manager, card) = one_card(10_000);
        let victim = Probe::new(resident(&card, "V", 8000));
        let (v, a): (Shared, Shared) = (victim.clone(), resident(&card, "A", 2000));
        load(&manager, &[&v]);
        victim.take_calls();
        load(&manager, &[&a]);
        let ask = 2000 * MIB + 200 * MIB + FLOOR;
        assert_eq!(victim.take_calls(), [Call::Unload(ask - 2000 * MIB)]);
    }

    #[test]
    fn step_6_every_card_is_asked_for_its_own_sum() {
        let (manager, first, second) = two_cards(4096, 4096);
        let on_second = |label, mib| -> Shared {
            SizedModel::new(SizedSpec { place: Place::Card(1), ..spec(label, mib) }, &second)
        };
        let (a, b): (Shared, Shared) = (resident(&first, "A", 2048), on_second("B", 2048));
        load(&manager, &[&a, &b]);
        let c = on_second("C", 2048);
        load(&manager, &[&c]);
        assert_eq!(a.loaded_size(), 2048 * MIB);
        assert!(b.loaded_size() < 2048 * MIB);
    }

    #[test]
    fn step_7_frees_once_more_for_the_smallest_run() {
        let (manager, card) = one_card(8192);
        let victim = Probe::new(resident(&card, "V", 1024));
        let (v, e): (Shared, Shared) = (victim.clone(), paged(&card, "E", 10));
        load(&manager, &[&v]);
        victim.take_calls();
        // The first request is met by what is free; the smallest run is not.
        let options = LoadOptions { minimum_memory_required: Some(7000 * MIB), ..LoadOptions::default() };
        load_with(&manager, &[&e], options);
        assert_eq!(victim.take_calls(), [Call::Unload((7400 - 7168) * MIB)]);
    }

    #[test]
    fn step_8_the_budget_is_what_is_free_above_the_smallest_run() {
        let (manager, card) = one_card(8192);
        let probe = Probe::new(resident(&card, "A", 16_384));
        let model: Shared = probe.clone();
        load_with(
            &manager,
            &[&model],
            LoadOptions {
                memory_required: 4096 * MIB,
                minimum_memory_required: Some(1024 * MIB),
                ..LoadOptions::default()
            },
        );
        assert_eq!(budgets(&probe), [LoadBudget::Bytes(bytes(8192 - 1024 - 400))]);
    }

    #[test]
    fn step_8_a_budget_may_be_negative_and_gives_bytes_back() {
        let (manager, card) = one_card(8192);
        let probe = Probe::new(resident(&card, "A", 4096));
        let model: Shared = probe.clone();
        load(&manager, &[&model]);
        card.set_other(4096 * MIB);
        probe.take_calls();
        load(&manager, &[&model]);
        assert_eq!(budgets(&probe), [LoadBudget::Bytes(-floor())]);
        assert!(manager.get_free_memory(None).unwrap() >= FLOOR);
    }

    #[test]
    fn step_8_nothing_free_means_practically_nothing_not_everything() {
        let (manager, card) = one_card(512);
        let probe = Probe::new(resident(&card, "A", 64));
        let model: Shared = probe.clone();
        load(&manager, &[&model]);
        assert_eq!(budgets(&probe), [LoadBudget::Nothing]);
        assert_eq!(model.loaded_size(), 0);
        assert_eq!(ledger(&manager), ["A"], "it is listed all the same");
    }

    #[test]
    fn step_8_the_minimum_weight_ratio_gives_weights_a_share_above_the_floor() {
        let (manager, card) = one_card(10_000);
        manager.set_knobs(|knobs| knobs.min_weight_ratio = Some(0.4));
        let probe = Probe::new(resident(&card, "A", 20_000));
        let model: Shared = probe.clone();
        load_with(&manager, &[&model], LoadOptions { memory_required: 9000 * MIB, ..LoadOptions::default() });
        assert_eq!(budgets(&probe), [LoadBudget::Bytes(bytes(4000))]);
    }

    #[test]
    fn step_8_the_ratio_is_the_backends_own_where_none_is_set() {
        for (backend, share) in [(Backend::Cuda, 600), (Backend::Emulated, 600), (Backend::Npu, 4000)] {
            let card = FakeCard::new(10_000, backend);
            let manager = manager_over(vec![card.clone()]);
            let probe = Probe::new(resident(&card.books, "A", 20_000));
            let model: Shared = probe.clone();
            load_with(
                &manager,
                &[&model],
                LoadOptions { memory_required: 9000 * MIB, ..LoadOptions::default() },
            );
            assert_eq!(budgets(&probe), [LoadBudget::Bytes(bytes(share))], "{backend:?}");
        }
    }

    #[test]
    fn step_8_every_vram_state_gives_its_budget() {
        use LoadBudget::{Everything, Nothing};
        let floored = LoadBudget::Bytes(bytes(8192) - floor());
        for (state, plain, forced) in [
            (VramState::Disabled, Everything, Everything),
            (VramState::Shared, Everything, Everything),
            (VramState::High, Everything, Everything),
            (VramState::Normal, floored, Everything),
            (VramState::Low, floored, Everything),
            // Here the page and the described system disagree; the system is followed.
            (VramState::No, Nothing, Nothing),
        ] {
            for (force_full_load, expected) in [(false, plain), (true, forced)] {
                let (manager, card) = one_card(8192);
                manager.set_knobs(|knobs| knobs.vram_state = state);
                let probe = Probe::new(resident(&card, "A", 1024));
                let model: Shared = probe.clone();
                load_with(&manager, &[&model], LoadOptions { force_full_load, ..LoadOptions::default() });
                assert_eq!(budgets(&probe), [expected], "{state:?} {force_full_load}");
            }
        }
    }

    #[test]
    fn step_8_the_first_named_ends_at_the_front() {
        let (manager, card) = one_card(8192);
        let models: Vec<Shared> = ["A", "B", "C"].map(|label| resident(&card, label, 64) as Shared).into();
        manager.load_models_gpu(&models, LoadOptions::default()).unwrap();
        assert_eq!(ledger(&manager), ["A", "B", "C"]);
        let newest: Shared = resident(&card, "D", 64);
        load(&manager, &[&newest]);
        assert_eq!(ledger(&manager), ["D", "A", "B", "C"]);
    }

    #[test]
    fn a_full_load_may_overdraw_the_card() {
        let (manager, card) = one_card(1024);
        let model: Shared = resident(&card, "A", 4096);
        load_with(&manager, &[&model], LoadOptions { force_full_load: true, ..LoadOptions::default() });
        assert_eq!(model.loaded_size(), 4096 * MIB);
        assert_eq!(manager.get_free_memory(None).unwrap(), 0, "the public figure is at least 0");
        assert_eq!(manager.get_free_memory_and_cache(None).unwrap().total, bytes(-3072));
    }

    #[test]
    fn force_patch_weights_reaches_the_patcher() {
        let (manager, card) = one_card(8192);
        let probe = Probe::new(resident(&card, "A", 64));
        let model: Shared = probe.clone();
        load_with(&manager, &[&model], LoadOptions { force_patch_weights: true, ..LoadOptions::default() });
        assert!(matches!(probe.take_calls()[..], [Call::Load(_, true)]));
    }

    #[test]
    fn a_paged_model_moves_no_byte_whatever_its_budget() {
        let (manager, card) = one_card(8192);
        let model: Shared = paged(&card, "D", 1024);
        load_with(&manager, &[&model], LoadOptions { force_full_load: true, ..LoadOptions::default() });
        assert_eq!(card.loaded(), 0);
    }

    #[test]
    fn host_memory_is_loaded_whole_with_no_admission() {
        let (manager, card) = one_card(64);
        manager.set_knobs(|knobs| knobs.vram_state = VramState::No);
        let victim: Shared = resident(&card, "V", 32);
        load(&manager, &[&victim]);
        let probe = Probe::new(SizedModel::new(SizedSpec { place: Place::Cpu, ..spec("C", 4096) }, &card));
        let model: Shared = probe.clone();
        load(&manager, &[&model]);
        assert_eq!(budgets(&probe), [LoadBudget::Everything]);
        assert_eq!(ledger(&manager), ["C", "V"]);
        assert!(
            manager.free_memory(UNLIMITED, Some(Place::Cpu), &FreeOptions::default()).unwrap().is_empty()
        );
        assert_eq!(ledger(&manager), ["C", "V"], "nothing is freed there");
    }

    #[test]
    fn a_model_that_fails_to_load_leaves_the_rest_of_the_call_sound() {
        let (manager, card) = one_card(4096);
        let victim: Shared = resident(&card, "V", 2048);
        let still_to_come: Shared = resident(&card, "A", 64);
        load(&manager, &[&still_to_come]);
        load(&manager, &[&victim]);
        let bad = Probe::new(resident(&card, "BAD", 2000));
        bad.script.lock().fail_load = true;
        let (bad_model, before): (Shared, Shared) = (bad.clone(), resident(&card, "B", 64));
        let models = [still_to_come.clone(), bad_model, before.clone()];
        let error = manager.load_models_gpu(&models, LoadOptions::default()).unwrap_err();
        let ManagerError::Load { model, place, .. } = &error else { panic!("{error}") };
        assert_eq!((&**model, *place), ("BAD", GPU));
        assert!(error.to_string().contains("BAD (1.95 GiB)"), "{error}");
        assert_eq!(bad.loaded_size(), 0, "its own bytes come back");
        assert_eq!(bad.take_calls().last(), Some(&Call::Detach(true)));
        assert_eq!(ledger(&manager), ["B", "V", "A"], "those before it stay, those to come keep their place");
        assert_eq!(before.loaded_size(), 64 * MIB);
        assert!(victim.loaded_size() < 2048 * MIB, "what was evicted stays evicted");
        bad.script.lock().fail_load = false;
        manager.load_models_gpu(&models, LoadOptions::default()).unwrap();
        assert_eq!(ledger(&manager), ["A", "BAD", "B", "V"]);
    }

    #[test]
    fn a_listed_model_that_fails_to_load_again_leaves_the_ledger() {
        let (manager, card) = one_card(4096);
        let bad = Probe::new(resident(&card, "BAD", 512));
        let model: Shared = bad.clone();
        load(&manager, &[&model]);
        bad.script.lock().fail_load = true;
        assert!(manager.load_model_gpu(&model, LoadOptions::default()).is_err());
        assert!(ledger(&manager).is_empty());
        assert_eq!(card.loaded(), 0);
    }

    #[test]
    fn a_card_that_is_not_there_is_refused_before_anything_is_done() {
        let (manager, card) = one_card(4096);
        let listed: Shared = resident(&card, "A", 64);
        load(&manager, &[&listed]);
        let lost: Shared = SizedModel::new(SizedSpec { place: Place::Card(7), ..spec("X", 64) }, &card);
        let good: Shared = resident(&card, "G", 64);
        let error = manager.load_models_gpu(&[lost, good], LoadOptions::default()).unwrap_err();
        assert!(matches!(error, ManagerError::UnknownDevice { place: Place::Card(7), known: 1, .. }));
        assert!(error.to_string().contains('X'), "{error}");
        assert_eq!(ledger(&manager), ["A"]);
    }

    #[test]
    fn no_models_at_all_do_nothing() {
        let (manager, _card) = one_card(4096);
        manager.load_models_gpu(&[], LoadOptions::default()).unwrap();
        assert!(ledger(&manager).is_empty());
    }

    #[test]
    fn sizes_that_overflow_count_as_more_than_any_card_has() {
        let (manager, card) = one_card(4096);
        let victim: Shared = resident(&card, "V", 512);
        load(&manager, &[&victim]);
        let huge: Vec<Shared> = ["H1", "H2"]
            .map(|label| SizedModel::new(SizedSpec { size: u64::MAX, ..spec(label, 0) }, &card) as Shared)
            .into();
        let options = LoadOptions {
            memory_required: u64::MAX,
            minimum_memory_required: Some(u64::MAX),
            ..LoadOptions::default()
        };
        manager.load_models_gpu(&huge, options).unwrap();
        assert_eq!(ledger(&manager), ["H1", "H2"], "everything else went");
        assert_eq!(card.loaded(), 0, "and nothing is left for weights beside such a request");
    }

    #[test]
    fn load_model_gpu_is_a_call_with_one_model() {
        let (manager, card) = one_card(4096);
        let model: Shared = resident(&card, "A", 64);
        manager.load_model_gpu(&model, LoadOptions::default()).unwrap();
        assert_eq!(ledger(&manager), ["A"]);
    }
}

mod get_free_memory {
    use super::*;

    struct Frames(parking_lot::Mutex<u64>);

    impl IdleCache for Frames {
        fn idle_bytes(&self) -> u64 {
            *self.0.lock()
        }

        fn release(&self) {
            *self.0.lock() = 0;
        }
    }

    #[test]
    fn idle_cache_counts_as_free_and_is_told_apart() {
        let (manager, card) = one_card(8192);
        card.set_pool(1024 * MIB, 512 * MIB);
        let figures = manager.get_free_memory_and_cache(None).unwrap();
        assert_eq!(figures.total, bytes(7168));
        assert_eq!(figures.cache, 512 * MIB);
        assert_eq!(manager.get_free_memory(None).unwrap(), 7168 * MIB);
    }

    #[test]
    fn no_device_means_the_first_card() {
        let (manager, _first, _second) = two_cards(1000, 2000);
        assert_eq!(manager.default_device(), GPU);
        assert_eq!(manager.get_free_memory(None).unwrap(), 1000 * MIB);
        assert_eq!(manager.get_free_memory(Some(Place::Card(1))).unwrap(), 2000 * MIB);
        assert_eq!(manager.get_total_memory(None).unwrap(), 1000 * MIB);
    }

    #[test]
    fn the_cpu_answers_with_the_machines_memory() {
        let (manager, _card) = one_card(1000);
        assert_eq!(manager.get_free_memory(Some(Place::Cpu)).unwrap(), 40 * GIB);
        assert_eq!(manager.get_total_memory(Some(Place::Cpu)).unwrap(), 64 * GIB);
        let without_cards = manager_over(Vec::new());
        assert_eq!(without_cards.default_device(), Place::Cpu);
        assert_eq!(without_cards.get_free_memory(None).unwrap(), 40 * GIB);
    }

    #[test]
    fn other_backends_answer_by_their_own_rules() {
        for (backend, free) in [
            (Backend::Mps, 40 * GIB),
            (Backend::DirectMl, GIB),
            (Backend::Xpu, (8192 - 1536) * MIB),
            (Backend::Npu, (8192 - 1024) * MIB),
            (Backend::Mlu, (8192 - 1024) * MIB),
        ] {
            let card = FakeCard::new(8192, backend);
            card.books.set_pool(1024 * MIB, 512 * MIB);
            assert_eq!(manager_over(vec![card]).get_free_memory(None).unwrap(), free, "{backend:?}");
        }
    }

    #[test]
    fn a_frame_without_a_page_counts_as_idle_cache_and_goes_back_for_others() {
        let (manager, card) = one_card(8192);
        card.set_other(8192 * MIB);
        let frames = Arc::new(Frames(parking_lot::Mutex::new(100 * MIB)));
        let registered: Arc<dyn IdleCache> = frames.clone();
        manager.register_idle_cache(GPU, &registered).unwrap();
        assert_eq!(manager.get_free_memory_and_cache(None).unwrap().cache, 100 * MIB);
        assert_eq!(manager.get_free_memory(None).unwrap(), 100 * MIB);

        let for_dynamic = FreeOptions { for_dynamic: true, ..FreeOptions::default() };
        manager.set_knobs(|knobs| knobs.vram_state = VramState::High);
        manager.free_memory(1, Some(GPU), &for_dynamic).unwrap();
        assert_eq!(frames.idle_bytes(), 100 * MIB, "a paged request leaves frames to be mapped again");
        manager.free_memory(1, Some(GPU), &FreeOptions::default()).unwrap();
        assert_eq!(frames.idle_bytes(), 0);

        *frames.0.lock() = 7;
        manager.soft_empty_cache(false).unwrap();
        assert_eq!(frames.idle_bytes(), 0);

        *frames.0.lock() = 7;
        drop((registered, frames));
        assert_eq!(manager.get_free_memory(None).unwrap(), 0, "a pager that is gone holds nothing idle");
    }

    #[test]
    fn a_paged_patchers_own_figure_adds_what_could_be_reclaimed() {
        struct Reclaiming(Arc<SizedModel>);
        impl ModelPatcher for Reclaiming {
            fn model_size(&self) -> u64 {
                self.0.model_size()
            }
            fn loaded_size(&self) -> u64 {
                self.0.loaded_size()
            }
            fn load_device(&self) -> Place {
                self.0.load_device()
            }
            fn weights_uuid(&self) -> vram_pager::patcher::ModelUuid {
                self.0.weights_uuid()
            }
            fn partially_load(
                &self,
                _: LoadBudget,
                _: bool,
            ) -> Result<u64, vram_pager::patcher::PatcherError> {
                Ok(0)
            }
            fn partially_unload(&self, _: u64) -> Result<u64, vram_pager::patcher::PatcherError> {
                Ok(0)
            }
            fn detach(&self, _: bool) -> Result<(), vram_pager::patcher::PatcherError> {
                Ok(())
            }
            fn reclaimable(&self) -> u64 {
                300
            }
        }
        let (manager, card) = one_card(1);
        let model = Reclaiming(paged(&card, "D", 1));
        assert_eq!(manager.get_free_memory_for(&model).unwrap(), MIB + 300);
        assert_eq!(manager.get_free_memory(None).unwrap(), MIB);
    }

    #[test]
    fn a_cap_makes_a_large_card_act_as_a_small_one_at_once() {
        let (manager, card) = one_card(8192);
        let model: Shared = resident(&card, "A", 6000);
        load(&manager, &[&model]);
        assert_eq!(model.loaded_size(), 6000 * MIB);
        manager.set_cap(GPU, Some(4096 * MIB)).unwrap();
        assert_eq!(manager.get_total_memory(None).unwrap(), 4096 * MIB);
        assert_eq!(manager.get_free_memory(None).unwrap(), 0);
        load(&manager, &[&model]);
        assert!(model.loaded_size() < 3000 * MIB);
        manager.set_cap(GPU, None).unwrap();
        load(&manager, &[&model]);
        assert_eq!(model.loaded_size(), 6000 * MIB);
        assert!(manager.set_cap(Place::Card(3), None).is_err());
    }
}

mod free_memory {
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
        // 3072 are free. D's pages make it 7168 only if D is met before R; R holds no more than D, so R is
        // asked second, once nothing is missing any more.
        let gone = manager.free_memory(7168 * MIB, Some(GPU), &options).unwrap();
        assert_eq!(pages.loaded_size(), 4096 * MIB);
        // Both are wholly loaded and equally referenced (D's second handle counts), so the smaller goes
        // first: R is asked before D is met.
        assert_eq!(labels(&gone), ["R"]);
        let gone = manager.free_memory(9000 * MIB, Some(GPU), &options).unwrap();
        assert!(gone.is_empty());
        assert_eq!(pages.loaded_size(), 4096 * MIB);
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
        let models: Vec<Shared> = [("A", 64), ("B", 512), ("C", 128)]
            .map(|(label, mib)| resident(&card, label, mib) as Shared)
            .into();
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
        let pinned = |label, mib| {
            Probe::new(SizedModel::new(SizedSpec { pinned: mib * MIB, ..spec(label, 64) }, &card))
        };
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
        let (a, b): (Shared, Shared) =
            (resident(&lost.books, "A", 64), SizedModel::new(on_sound, &sound.books));
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
}

mod model_unload {
    use super::*;

    fn listed(probe: &Arc<Probe>, manager: &Manager) -> LoadedModel {
        let model: Shared = probe.clone();
        load(manager, &[&model]);
        probe.take_calls();
        entry_of(manager, &probe.label())
    }

    #[test]
    fn less_than_is_loaded_is_freed_in_part_and_answers_false() {
        let (manager, card) = one_card(8192);
        let probe = Probe::new(resident(&card, "A", 1024));
        let entry = listed(&probe, &manager);
        assert!(!entry.model_unload(Some(100 * MIB), true).unwrap());
        assert_eq!(probe.take_calls(), [Call::Unload(100 * MIB)]);
        assert_eq!(probe.loaded_size(), 896 * MIB);
    }

    #[test]
    fn a_short_answer_escalates_to_the_whole_model() {
        let (manager, card) = one_card(8192);
        let probe = Probe::new(resident(&card, "A", 1024));
        let entry = listed(&probe, &manager);
        probe.script.lock().stubborn = true;
        assert!(entry.model_unload(Some(100 * MIB), true).unwrap());
        assert_eq!(probe.take_calls(), [Call::Unload(100 * MIB), Call::Detach(true)]);
        assert_eq!(probe.loaded_size(), 0);
    }

    #[test]
    fn a_failing_partial_unload_escalates_too() {
        let (manager, card) = one_card(8192);
        let probe = Probe::new(resident(&card, "A", 1024));
        let entry = listed(&probe, &manager);
        probe.script.lock().fail_unload = true;
        assert!(entry.model_unload(Some(100 * MIB), true).unwrap());
        assert_eq!(probe.loaded_size(), 0);
    }

    #[test]
    fn nothing_named_or_as_much_as_is_loaded_detaches_and_passes_unpatch_weights_on() {
        for (ask, unpatch) in [(None, false), (None, true), (Some(1024 * MIB), true), (Some(UNLIMITED), true)]
        {
            let (manager, card) = one_card(8192);
            let probe = Probe::new(resident(&card, "A", 1024));
            let entry = listed(&probe, &manager);
            assert!(entry.model_unload(ask, unpatch).unwrap());
            assert_eq!(probe.take_calls(), [Call::Detach(unpatch)]);
        }
    }

    #[test]
    fn a_victim_that_cannot_be_detached_stays_listed_as_long_as_it_holds_bytes() {
        let (manager, card) = one_card(8192);
        let probe = Probe::new(resident(&card, "A", 1024));
        listed(&probe, &manager);
        let other: Shared = resident(&card, "B", 2048);
        load(&manager, &[&other]);
        probe.script.lock().fail_detach = true;
        assert_eq!(labels(&manager.unload_all_models().unwrap()), ["B"], "the others are asked all the same");
        assert_eq!(ledger(&manager), ["A"], "the ledger tells the truth");
        probe.sizes.detach(true).unwrap();
        assert_eq!(labels(&manager.unload_all_models().unwrap()), ["A"], "and one that holds nothing goes");
    }

    #[test]
    fn model_use_more_vram_answers_the_bytes_added() {
        let (manager, card) = one_card(2048);
        let model: Shared = resident(&card, "A", 4096);
        load(&manager, &[&model]);
        let entry = entry_of(&manager, "A");
        let before = model.loaded_size();
        assert_eq!(entry.model_use_more_vram(130 * MIB).unwrap(), 128 * MIB);
        assert_eq!(entry.model_use_more_vram(0).unwrap(), 0);
        assert_eq!(model.loaded_size(), before + 128 * MIB);
    }
}

mod smaller_functions {
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
        let elsewhere =
            SizedModel::new(SizedSpec { place: Place::Card(1), ..spec("elsewhere", 64) }, &second);
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
}
