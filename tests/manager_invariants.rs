//! Random sequences of calls: whatever is asked in whatever order, the books balance, the ledger is sound,
//! and a free never claims more than it gave. Every failure prints the seed that repeats it.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod manager_support;

use std::collections::HashSet;
use std::sync::Arc;

use manager_support::*;
use vram_pager::manager::{FreeOptions, LoadOptions, LoadedModel, Manager, UnloadOptions, VramState};
use vram_pager::patcher::{ModelPatcher, ModelUuid, Place, SizedCard, SizedModel, SizedSpec};

/// A machine of one to three cards with a handful of models, some of them clones or paged.
struct World {
    random: Random,
    manager: Manager,
    cards: Vec<Arc<SizedCard>>,
    models: Vec<Arc<SizedModel>>,
}

/// What is to be compared before and after a call.
struct Before {
    ledger: Vec<LoadedModel>,
    /// The patchers of the ledger's entries: held, so that none dies and the bytes can be compared.
    models: Vec<Shared>,
    loaded: Vec<u64>,
    free: Vec<i64>,
    used: Vec<bool>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let cards: Vec<_> = (0..=random.below(3))
            .map(|index| SizedCard::new(format!("gpu{index}"), (2048 + random.below(14) * 1024) * MIB))
            .collect();
        let manager = manager_over(cards.iter().map(|card| Arc::clone(card) as _).collect());
        let states = [VramState::Normal, VramState::Low, VramState::No, VramState::High, VramState::Shared];
        let state = states[random.index(states.len())];
        let smart = !random.one_in(5);
        let ratio = if random.one_in(2) { 0.0 } else { 0.4 };
        manager.set_knobs(|knobs| {
            knobs.vram_state = state;
            knobs.smart_memory = smart;
            knobs.min_weight_ratio = Some(ratio);
        });
        let mut world = Self { random, manager, cards, models: Vec::new() };
        for _ in 0..2 + world.random.below(6) {
            world.add_model();
        }
        world
    }

    fn add_model(&mut self) {
        let label = format!("m{}", self.random.next());
        if !self.models.is_empty() && self.random.one_in(4) {
            let of = self.pick();
            self.models.push(of.clone_model(label));
            return;
        }
        let card = self.random.index(self.cards.len());
        let spec = SizedSpec {
            label,
            size: self.random.below(8000) * MIB,
            granule: (1 + self.random.below(4)) * 32 * MIB,
            dynamic: self.random.one_in(2),
            place: Place::Card(u32::try_from(card).unwrap()),
            pinned: self.random.below(2) * 100 * MIB,
        };
        let model = SizedModel::new(spec, &self.cards[card]);
        if !self.models.is_empty() && self.random.one_in(4) {
            model.set_patches_models(vec![self.pick()]);
            model.set_additional_models(vec![self.pick()]);
        }
        self.models.push(model);
    }

    fn pick(&mut self) -> Arc<SizedModel> {
        let index = self.random.index(self.models.len());
        Arc::clone(&self.models[index])
    }

    fn place(&mut self) -> Place {
        Place::Card(u32::try_from(self.random.index(self.cards.len())).unwrap())
    }

    fn before(&self) -> Before {
        let ledger = self.manager.current_loaded_models();
        let models: Vec<_> = ledger.iter().filter_map(LoadedModel::model).collect();
        Before {
            loaded: models.iter().map(|model| model.loaded_size()).collect(),
            used: ledger.iter().map(LoadedModel::currently_used).collect(),
            free: self.manager.devices().map(|place| self.free(place)).collect(),
            models,
            ledger,
        }
    }

    fn free(&self, place: Place) -> i64 {
        self.manager.get_free_memory_and_cache(Some(place)).unwrap().total
    }

    fn step(&mut self) -> String {
        match self.random.below(10) {
            0..=3 => self.load(),
            4..=5 => self.free_memory(),
            6 => {
                let model = self.pick();
                if model.is_dynamic() {
                    model.touch(self.random.below(model.model_size() / MIB + 1) * MIB);
                }
                "touch".to_owned()
            }
            7 => {
                let index = self.random.index(self.cards.len());
                let (used, idle, other) =
                    (self.random.below(1000), self.random.below(3000), self.random.below(500));
                self.cards[index].set_pool(used * MIB, idle * MIB);
                self.cards[index].set_other(other * MIB);
                "pool".to_owned()
            }
            8 => {
                if self.models.len() > 1 {
                    let index = self.random.index(self.models.len());
                    self.models.swap_remove(index);
                }
                self.add_model();
                "death and birth".to_owned()
            }
            _ => self.unload(),
        }
    }

    fn load(&mut self) -> String {
        let mut named: Vec<Shared> = Vec::new();
        for _ in 0..=self.random.below(3) {
            named.push(self.pick());
        }
        let options = LoadOptions {
            memory_required: self.random.below(4000) * MIB,
            minimum_memory_required: self.random.one_in(2).then(|| self.random.below(1000) * MIB),
            force_full_load: self.random.one_in(6),
            ..LoadOptions::default()
        };
        let before = self.before();
        self.manager.load_models_gpu(&named, options).unwrap();

        // The first named are in front, with those that ride along, each set of weights once.
        let mut seen = HashSet::new();
        let mut expected = Vec::new();
        for model in &named {
            for model in std::iter::once(model.clone()).chain(model.model_patches_models()) {
                if seen.insert(model.weights_uuid()) {
                    expected.push(model);
                }
            }
        }
        let ledger = self.manager.current_loaded_models();
        assert!(ledger.len() >= expected.len());
        for (entry, model) in ledger.iter().zip(&expected) {
            assert_eq!(entry.model().unwrap().label(), model.label(), "in the order they were named");
            assert!(entry.currently_used());
        }
        // Behind them the order did not change, and nobody there became used or gained bytes.
        let mut older = before.ledger.iter();
        for entry in &ledger[expected.len()..] {
            assert!(older.any(|old| old == entry), "older entries keep their order");
            let index = before.ledger.iter().position(|old| old == entry).unwrap();
            assert!(entry.model_loaded_memory() <= before.loaded[index]);
            assert!(!entry.currently_used() || before.used[index]);
        }
        format!("load {options:?}")
    }

    fn free_memory(&mut self) -> String {
        let before = self.before();
        let device = if self.random.one_in(4) { None } else { Some(self.place()) };
        let ask = if self.random.one_in(6) { u64::MAX } else { self.random.below(12_000) * MIB };
        let keep: Vec<_> = before.ledger.iter().filter(|_| self.random.one_in(5)).cloned().collect();
        let options = FreeOptions {
            keep_loaded: keep.clone(),
            for_dynamic: self.random.one_in(2),
            pins_required: self.random.below(2) * MIB,
            ..FreeOptions::default()
        };
        let unloaded = self.manager.free_memory(ask, device, &options).unwrap();
        self.check_unloaded(&before, &unloaded, device);
        for (index, entry) in before.ledger.iter().enumerate() {
            let touched = device.is_none_or(|device| device == entry.device()) && !keep.contains(entry);
            if touched {
                assert!(!entry.currently_used(), "cleared on every candidate");
            } else {
                assert!(!unloaded.contains(entry));
                assert_eq!(entry.model_loaded_memory(), before.loaded[index]);
                assert_eq!(entry.currently_used(), before.used[index]);
            }
            if options.for_dynamic && self.manager.knobs().smart_memory && before.models[index].is_dynamic() {
                assert_eq!(entry.model_loaded_memory(), before.loaded[index], "paged for paged");
            }
        }
        if !options.for_dynamic {
            for place in self.manager.devices().filter(|place| device.is_none_or(|device| device == *place)) {
                let met = i128::from(self.free(place)) >= i128::from(ask);
                let left = self.manager.current_loaded_models();
                let holders = left.iter().filter(|entry| {
                    entry.device() == place && !keep.contains(entry) && entry.model_loaded_memory() > 0
                });
                assert!(met || holders.count() == 0, "room that could be had was not made");
            }
        }
        format!("free {ask} {device:?} {options:?}")
    }

    fn unload(&mut self) -> String {
        let before = self.before();
        if self.random.one_in(2) {
            let unloaded = self.manager.unload_all_models().unwrap();
            self.check_unloaded(&before, &unloaded, None);
            assert!(self.manager.current_loaded_models().is_empty());
            return "unload_all_models".to_owned();
        }
        let model: Shared = self.pick();
        let options = UnloadOptions { unload_additional_models: self.random.one_in(2), all_devices: true };
        let unloaded = self.manager.unload_model_and_clones(&model, options).unwrap();
        self.check_unloaded(&before, &unloaded, None);
        let family = model.clone_base_uuid();
        let left = self.manager.loaded_models(false);
        assert!(left.iter().all(|model| model.clone_base_uuid() != family));
        format!("unload_model_and_clones {options:?}")
    }

    /// What left is gone and holds nothing, comes highest index first, and what became free on each card is
    /// what models there gave up.
    fn check_unloaded(&self, before: &Before, unloaded: &[LoadedModel], device: Option<Place>) {
        let index_of = |entry: &LoadedModel| before.ledger.iter().position(|old| old == entry).unwrap();
        let now = self.manager.current_loaded_models();
        for entry in unloaded {
            assert!(!now.contains(entry));
            assert_eq!(entry.model_loaded_memory(), 0);
            assert!(device.is_none_or(|device| device == entry.device()));
        }
        for pair in unloaded.windows(2).filter(|pair| pair[0].device() == pair[1].device()) {
            assert!(index_of(&pair[0]) > index_of(&pair[1]), "highest index first");
        }
        for (place, free_before) in self.manager.devices().zip(&before.free) {
            let given_up: u64 = before
                .models
                .iter()
                .zip(&before.loaded)
                .filter(|(model, _)| model.load_device() == place)
                .map(|(model, loaded)| loaded - model.loaded_size())
                .sum();
            assert_eq!(self.free(place) - free_before, i64::try_from(given_up).unwrap());
        }
    }

    /// What holds between any two calls.
    fn check(&self) {
        let entries = self.manager.current_loaded_models();
        let weights: HashSet<ModelUuid> =
            entries.iter().map(|entry| entry.model().unwrap().weights_uuid()).collect();
        assert_eq!(weights.len(), entries.len(), "one entry a set of weights");
        for (place, card) in self.manager.devices().zip(&self.cards) {
            let listed: u64 = entries
                .iter()
                .filter(|entry| entry.device() == place)
                .map(LoadedModel::model_loaded_memory)
                .sum();
            assert_eq!(card.loaded(), listed, "every byte on {place} is a listed model's");
        }
        for entry in &entries {
            let model = entry.model().unwrap();
            assert_eq!(entry.device(), model.load_device());
            assert!(model.loaded_size() <= model.model_size());
        }
    }
}

#[test]
fn after_any_sequence_of_calls_the_books_balance_and_the_ledger_is_sound() {
    let base = std::env::var("VRAM_PAGER_SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = base.map_or(1000..1400, |seed: u64| seed..seed + 1);
    for seed in seeds {
        let mut trail = Vec::new();
        let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut world = World::new(seed);
            for _ in 0..60 {
                trail.push(world.step());
                world.check();
            }
        }));
        if let Err(panic) = played {
            println!("seed {seed} (VRAM_PAGER_SEED={seed} repeats it), after {} steps:", trail.len());
            for step in &trail {
                println!("  {step}");
            }
            std::panic::resume_unwind(panic);
        }
    }
}
