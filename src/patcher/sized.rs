//! A model that is nothing but sizes, and a card that is nothing but books.
//!
//! For replays and for tests of the manager: the decisions are real, the bytes are not. Loading moves
//! whole granules, as a resident model moves whole modules.
//!
//! Locking: a card's books and a model's state have a lock each; the model's is taken first. Neither is
//! held while other code is called.

#![deny(unsafe_code)]

use std::sync::Arc;

use parking_lot::Mutex;

use super::{LoadBudget, ModelPatcher, ModelUuid, PatcherError, Place};

/// The books of one card: what it has, what others hold, what its pool holds, what models hold.
#[derive(Debug)]
pub struct SizedCard {
    label: String,
    total: u64,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    other: u64,
    pool_used: u64,
    pool_idle: u64,
    loaded: u64,
    emptied: u64,
}

impl SizedCard {
    /// A card of `total` bytes that nobody uses.
    pub fn new(label: impl Into<String>, total: u64) -> Arc<Self> {
        Arc::new(Self { label: label.into(), total, books: Mutex::default() })
    }

    /// Its name.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Its size in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// What the driver would call free: the size less everything held. Negative when a forced load took
    /// more than there is.
    pub fn driver_free(&self) -> i64 {
        let books = self.books.lock();
        let held = [books.other, books.pool_used, books.pool_idle, books.loaded];
        let held: i128 = held.into_iter().map(i128::from).sum();
        clamp_to_i64(i128::from(self.total) - held)
    }

    /// The bytes that the pool took from the card.
    pub fn pool_reserved(&self) -> u64 {
        let books = self.books.lock();
        books.pool_used.saturating_add(books.pool_idle)
    }

    /// The bytes of it that are in use.
    pub fn pool_used(&self) -> u64 {
        self.books.lock().pool_used
    }

    /// The bytes that models hold.
    pub fn loaded(&self) -> u64 {
        self.books.lock().loaded
    }

    /// Sets what others hold.
    pub fn set_other(&self, bytes: u64) {
        self.books.lock().other = bytes;
    }

    /// Sets what the pool has in use and what it keeps idle.
    pub fn set_pool(&self, used: u64, idle: u64) {
        let mut books = self.books.lock();
        books.pool_used = used;
        books.pool_idle = idle;
    }

    /// Hands the idle bytes of the pool back.
    pub fn empty_cache(&self) {
        let mut books = self.books.lock();
        books.pool_idle = 0;
        books.emptied += 1;
    }

    /// How often the cache was emptied.
    pub fn times_emptied(&self) -> u64 {
        self.books.lock().emptied
    }

    fn move_loaded(&self, before: u64, after: u64) {
        let mut books = self.books.lock();
        books.loaded = books.loaded.saturating_sub(before).saturating_add(after);
    }
}

fn clamp_to_i64(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}

/// What a model of sizes is made from.
#[derive(Clone, Debug)]
pub struct SizedSpec {
    /// Its name.
    pub label: String,
    /// The bytes of its weights.
    pub size: u64,
    /// The bytes that move together; at least 1.
    pub granule: u64,
    /// Whether it is paged.
    pub dynamic: bool,
    /// The card it runs on.
    pub place: Place,
    /// Page-locked host bytes that it holds from the start.
    pub pinned: u64,
}

impl Default for SizedSpec {
    /// An empty, resident model on the default card with granules of 64 MiB.
    fn default() -> Self {
        Self {
            label: "model".to_owned(),
            size: 0,
            granule: 64 * crate::units::MIB,
            dynamic: false,
            place: Place::Card(0),
            pinned: 0,
        }
    }
}

/// A set of weights; clones share one.
#[derive(Debug)]
struct SizedWeights {
    uuid: ModelUuid,
    spec: SizedSpec,
    card: Arc<SizedCard>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    loaded: u64,
    /// Whether a load attached it. What was touched before counts on the card only from then on.
    attached: bool,
    pinned: u64,
}

impl State {
    fn on_card(&self) -> u64 {
        if self.attached { self.loaded } else { 0 }
    }
}

impl SizedWeights {
    /// Changes the state and carries the difference into the card's books.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let before = state.on_card();
        let answer = change(&mut state);
        self.card.move_loaded(before, state.on_card());
        answer
    }
}

impl Drop for SizedWeights {
    fn drop(&mut self) {
        self.card.move_loaded(self.state.get_mut().on_card(), 0);
    }
}

/// A model given as sizes.
#[derive(Debug)]
pub struct SizedModel {
    label: String,
    weights: Arc<SizedWeights>,
    clone_base: ModelUuid,
    parent: Option<Arc<SizedModel>>,
    riders: Mutex<Vec<Arc<dyn ModelPatcher>>>,
    additional: Mutex<Vec<Arc<dyn ModelPatcher>>>,
}

impl SizedModel {
    /// A model on `card`, with nothing loaded.
    pub fn new(spec: SizedSpec, card: &Arc<SizedCard>) -> Arc<Self> {
        Self::with_base(spec, card, ModelUuid::fresh())
    }

    /// A copy of the weights for another card: no clone, but of the same family.
    pub fn copy_for(&self, spec: SizedSpec, card: &Arc<SizedCard>) -> Arc<Self> {
        Self::with_base(spec, card, self.clone_base)
    }

    fn with_base(spec: SizedSpec, card: &Arc<SizedCard>, clone_base: ModelUuid) -> Arc<Self> {
        let state = State { pinned: spec.pinned, ..State::default() };
        Arc::new(Self {
            label: spec.label.clone(),
            weights: Arc::new(SizedWeights {
                uuid: ModelUuid::fresh(),
                spec,
                card: Arc::clone(card),
                state: Mutex::new(state),
            }),
            clone_base,
            parent: None,
            riders: Mutex::default(),
            additional: Mutex::default(),
        })
    }

    /// A second handle to the same weights.
    pub fn clone_model(self: &Arc<Self>, label: impl Into<String>) -> Arc<Self> {
        Arc::new(Self {
            label: label.into(),
            weights: Arc::clone(&self.weights),
            clone_base: self.clone_base,
            parent: Some(Arc::clone(self)),
            riders: Mutex::default(),
            additional: Mutex::default(),
        })
    }

    /// Sets the models that ride along with this one.
    pub fn set_patches_models(&self, riders: Vec<Arc<dyn ModelPatcher>>) {
        *self.riders.lock() = riders;
    }

    /// Sets the models that belong to this one.
    pub fn set_additional_models(&self, models: Vec<Arc<dyn ModelPatcher>>) {
        *self.additional.lock() = models;
    }

    /// Makes the resident size `bytes` (at most the model's), as faults would.
    pub fn touch(&self, bytes: u64) {
        let bytes = bytes.min(self.weights.spec.size);
        self.weights.change(|state| state.loaded = bytes);
    }

    fn give_back(&self, bytes: u64) -> u64 {
        let granule = self.weights.spec.granule.max(1);
        let rounded = bytes.div_ceil(granule).saturating_mul(granule);
        self.weights.change(|state| {
            let freed = rounded.min(state.loaded);
            state.loaded -= freed;
            freed
        })
    }

    fn take(&self, extra: u64) -> u64 {
        let SizedSpec { size, granule, .. } = self.weights.spec;
        let granule = granule.max(1);
        self.weights.change(|state| {
            let rest = size.saturating_sub(state.loaded);
            let taken = if extra >= rest { rest } else { extra / granule * granule };
            state.loaded += taken;
            taken
        })
    }
}

impl ModelPatcher for SizedModel {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn model_size(&self) -> u64 {
        self.weights.spec.size
    }

    /// What was touched before a load is not there yet: it counts from the load on.
    fn loaded_size(&self) -> u64 {
        self.weights.state.lock().on_card()
    }

    fn load_device(&self) -> Place {
        self.weights.spec.place
    }

    fn is_dynamic(&self) -> bool {
        self.weights.spec.dynamic
    }

    fn weights_uuid(&self) -> ModelUuid {
        self.weights.uuid
    }

    fn clone_base_uuid(&self) -> ModelUuid {
        self.clone_base
    }

    fn parent(&self) -> Option<Arc<dyn ModelPatcher>> {
        self.parent.clone().map(|parent| parent as Arc<dyn ModelPatcher>)
    }

    fn model_patches_models(&self) -> Vec<Arc<dyn ModelPatcher>> {
        self.riders.lock().clone()
    }

    fn additional_models(&self) -> Vec<Arc<dyn ModelPatcher>> {
        self.additional.lock().clone()
    }

    fn partially_load(&self, budget: LoadBudget, _force_patch_weights: bool) -> Result<u64, PatcherError> {
        self.weights.change(|state| state.attached = true);
        if self.is_dynamic() {
            return Ok(0);
        }
        Ok(match budget {
            LoadBudget::Everything => self.take(u64::MAX),
            LoadBudget::Nothing => 0,
            LoadBudget::Bytes(extra) if extra < 0 => {
                self.give_back(extra.unsigned_abs());
                0
            }
            LoadBudget::Bytes(extra) => self.take(extra.unsigned_abs()),
        })
    }

    fn partially_unload(&self, bytes: u64) -> Result<u64, PatcherError> {
        Ok(self.give_back(bytes))
    }

    fn detach(&self, unpatch_weights: bool) -> Result<(), PatcherError> {
        if unpatch_weights {
            self.weights.change(|state| {
                state.loaded = 0;
                state.attached = false;
            });
        }
        Ok(())
    }

    fn pinned_size(&self) -> u64 {
        self.weights.state.lock().pinned
    }

    fn partially_unload_ram(&self, bytes: u64) -> u64 {
        let mut state = self.weights.state.lock();
        let freed = bytes.min(state.pinned);
        state.pinned -= freed;
        freed
    }
}
