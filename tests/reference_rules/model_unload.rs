//! `LoadedModel.model_unload` and `model_use_more_vram`.

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
    for (ask, unpatch) in [(None, false), (None, true), (Some(1024 * MIB), true), (Some(UNLIMITED), true)] {
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
