//! "Two words first": patchers and the ledger's entries.

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

#[test]
fn a_patcher_that_claims_to_be_its_own_ancestor_does_no_harm() {
    struct Ouroboros(Arc<SizedModel>, std::sync::OnceLock<std::sync::Weak<Ouroboros>>);
    impl ModelPatcher for Ouroboros {
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
        fn parent(&self) -> Option<Shared> {
            self.1.get()?.upgrade().map(|own| own as Shared)
        }
        fn partially_load(
            &self,
            budget: LoadBudget,
            force: bool,
        ) -> Result<u64, vram_pager::patcher::PatcherError> {
            self.0.partially_load(budget, force)
        }
        fn partially_unload(&self, bytes: u64) -> Result<u64, vram_pager::patcher::PatcherError> {
            self.0.partially_unload(bytes)
        }
        fn detach(&self, unpatch: bool) -> Result<(), vram_pager::patcher::PatcherError> {
            self.0.detach(unpatch)
        }
    }
    let (manager, card) = one_card(8192);
    let own = Arc::new(Ouroboros(resident(&card, "A", 64), std::sync::OnceLock::new()));
    own.1.set(Arc::downgrade(&own)).unwrap();
    let model: Shared = own;
    load(&manager, &[&model]);
    assert_eq!(manager.current_loaded_models().len(), 1);
    drop(model);
    assert!(manager.current_loaded_models().is_empty());
}
