//! `get_free_memory`: what counts as free, and where it is read.

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
        fn partially_load(&self, _: LoadBudget, _: bool) -> Result<u64, vram_pager::patcher::PatcherError> {
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
