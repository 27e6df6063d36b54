//! What the manager's tests share: a machine made of books, models of sizes, and a model that can be told
//! how to misbehave and remembers what it was asked.

#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::sync::Arc;

use parking_lot::Mutex;
use vram_pager::device::DeviceError;
use vram_pager::manager::{
    Backend, CardFigures, FreeOptions, HostFigures, HostMemoryFigures, LoadOptions, LoadedModel, Manager,
    ManagerError, RawFigures,
};
use vram_pager::patcher::{
    LoadBudget, ModelPatcher, ModelUuid, PatcherError, Place, SizedCard, SizedModel, SizedSpec,
};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const GPU: Place = Place::Card(0);
/// 0.8 GiB and the default reserve.
pub(crate) const FLOOR: u64 = 858_993_460 + 400 * MIB;

pub(crate) type Shared = Arc<dyn ModelPatcher>;

/// A machine that says what it is told to.
pub(crate) struct FixedHost(pub(crate) HostFigures);

impl HostMemoryFigures for FixedHost {
    fn read(&self) -> Result<HostFigures, ManagerError> {
        Ok(self.0)
    }
}

pub(crate) fn host() -> Arc<FixedHost> {
    Arc::new(FixedHost(HostFigures {
        ram_total: 64 * GIB,
        ram_available: 40 * GIB,
        cgroup_limit: None,
        swap_total: 0,
    }))
}

/// A manager with one card of `mib`.
pub(crate) fn one_card(mib: u64) -> (Manager, Arc<SizedCard>) {
    let card = SizedCard::new("gpu0", mib * MIB);
    (manager_over(vec![card.clone()]), card)
}

pub(crate) fn two_cards(first_mib: u64, second_mib: u64) -> (Manager, Arc<SizedCard>, Arc<SizedCard>) {
    let (first, second) = (SizedCard::new("gpu0", first_mib * MIB), SizedCard::new("gpu1", second_mib * MIB));
    (manager_over(vec![first.clone(), second.clone()]), first, second)
}

pub(crate) fn manager_over(cards: Vec<Arc<dyn CardFigures>>) -> Manager {
    let manager = Manager::over(cards, host());
    manager.set_knobs(|knobs| knobs.reserve = 400 * MIB);
    manager
}

pub(crate) fn spec(label: &str, mib: u64) -> SizedSpec {
    SizedSpec { label: label.to_owned(), size: mib * MIB, ..SizedSpec::default() }
}

pub(crate) fn resident(card: &Arc<SizedCard>, label: &str, mib: u64) -> Arc<SizedModel> {
    SizedModel::new(spec(label, mib), card)
}

pub(crate) fn paged(card: &Arc<SizedCard>, label: &str, mib: u64) -> Arc<SizedModel> {
    SizedModel::new(SizedSpec { dynamic: true, ..spec(label, mib) }, card)
}

pub(crate) fn load(manager: &Manager, models: &[&Shared]) {
    load_with(manager, models, LoadOptions::default());
}

pub(crate) fn load_with(manager: &Manager, models: &[&Shared], options: LoadOptions) {
    let models: Vec<Shared> = models.iter().map(|model| Arc::clone(model)).collect();
    manager.load_models_gpu(&models, options).unwrap();
}

pub(crate) fn free(manager: &Manager, mib: u64) -> Vec<String> {
    labels(&manager.free_memory(mib * MIB, Some(GPU), &FreeOptions::default()).unwrap())
}

pub(crate) fn labels(entries: &[LoadedModel]) -> Vec<String> {
    entries.iter().map(|entry| entry.model().map_or("dead".to_owned(), |model| model.label())).collect()
}

/// The labels in the ledger, newest first.
pub(crate) fn ledger(manager: &Manager) -> Vec<String> {
    labels(&manager.current_loaded_models())
}

pub(crate) fn entry_of(manager: &Manager, label: &str) -> LoadedModel {
    manager
        .current_loaded_models()
        .into_iter()
        .find(|entry| entry.model().is_some_and(|model| model.label() == label))
        .unwrap_or_else(|| panic!("{label} is not listed"))
}

/// A call that a probe got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    Load(LoadBudget, bool),
    Unload(u64),
    Detach(bool),
    UnloadRam(u64),
}

/// How a probe misbehaves.
#[allow(clippy::struct_excessive_bools, reason = "each is one way to fail")]
#[derive(Default)]
pub(crate) struct Script {
    pub(crate) fail_load: bool,
    /// A partial unload gives back nothing and says so.
    pub(crate) stubborn: bool,
    pub(crate) fail_unload: bool,
    pub(crate) fail_detach: bool,
    pub(crate) patches_models: Vec<Shared>,
    /// Runs inside the next partial unload or detach.
    pub(crate) inside_unload: Option<Box<dyn FnOnce() + Send>>,
    /// Runs inside the next load.
    pub(crate) inside_load: Option<Box<dyn FnOnce() + Send>>,
}

/// A model of sizes that remembers its calls and follows a script.
pub(crate) struct Probe {
    pub(crate) sizes: Arc<SizedModel>,
    pub(crate) calls: Mutex<Vec<Call>>,
    pub(crate) script: Mutex<Script>,
}

impl Probe {
    pub(crate) fn new(sizes: Arc<SizedModel>) -> Arc<Self> {
        Arc::new(Self { sizes, calls: Mutex::default(), script: Mutex::default() })
    }

    pub(crate) fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut *self.calls.lock())
    }

    fn failed(&self, what: &'static str) -> PatcherError {
        PatcherError::Refused { model: self.label(), what, why: "the test says so".to_owned() }
    }
}

impl ModelPatcher for Probe {
    fn label(&self) -> String {
        self.sizes.label()
    }

    fn model_size(&self) -> u64 {
        self.sizes.model_size()
    }

    fn loaded_size(&self) -> u64 {
        self.sizes.loaded_size()
    }

    fn load_device(&self) -> Place {
        self.sizes.load_device()
    }

    fn is_dynamic(&self) -> bool {
        self.sizes.is_dynamic()
    }

    fn weights_uuid(&self) -> ModelUuid {
        self.sizes.weights_uuid()
    }

    fn clone_base_uuid(&self) -> ModelUuid {
        self.sizes.clone_base_uuid()
    }

    fn model_patches_models(&self) -> Vec<Shared> {
        self.script.lock().patches_models.clone()
    }

    fn partially_load(&self, budget: LoadBudget, force_patch_weights: bool) -> Result<u64, PatcherError> {
        self.calls.lock().push(Call::Load(budget, force_patch_weights));
        let inside = self.script.lock().inside_load.take();
        if let Some(inside) = inside {
            inside();
        }
        // A load that fails half way leaves bytes behind, as a real one would.
        let added = self.sizes.partially_load(budget, force_patch_weights)?;
        if self.script.lock().fail_load { Err(self.failed("load")) } else { Ok(added) }
    }

    fn partially_unload(&self, bytes: u64) -> Result<u64, PatcherError> {
        self.calls.lock().push(Call::Unload(bytes));
        let inside = self.script.lock().inside_unload.take();
        if let Some(inside) = inside {
            inside();
        }
        if self.script.lock().fail_unload {
            return Err(self.failed("unload"));
        }
        if self.script.lock().stubborn {
            return Ok(0);
        }
        self.sizes.partially_unload(bytes)
    }

    fn detach(&self, unpatch_weights: bool) -> Result<(), PatcherError> {
        self.calls.lock().push(Call::Detach(unpatch_weights));
        if unpatch_weights {
            let inside = self.script.lock().inside_unload.take();
            if let Some(inside) = inside {
                inside();
            }
        }
        if self.script.lock().fail_detach {
            return Err(self.failed("detach"));
        }
        self.sizes.detach(unpatch_weights)
    }

    fn pinned_size(&self) -> u64 {
        self.sizes.pinned_size()
    }

    fn partially_unload_ram(&self, bytes: u64) -> u64 {
        self.calls.lock().push(Call::UnloadRam(bytes));
        self.sizes.partially_unload_ram(bytes)
    }
}

/// A card whose driver can be lost, and whose backend can be chosen.
pub(crate) struct FakeCard {
    pub(crate) books: Arc<SizedCard>,
    pub(crate) backend: Backend,
    pub(crate) lost: Mutex<bool>,
}

impl FakeCard {
    pub(crate) fn new(mib: u64, backend: Backend) -> Arc<Self> {
        let books = SizedCard::new("fake", mib * MIB);
        Arc::new(Self { books, backend, lost: Mutex::new(false) })
    }

    fn answer(&self) -> Result<(), DeviceError> {
        if *self.lost.lock() {
            return Err(DeviceError::Lost { device: "fake".to_owned(), first: "pulled out".to_owned() });
        }
        Ok(())
    }
}

impl CardFigures for FakeCard {
    fn label(&self) -> String {
        "fake".to_owned()
    }

    fn backend(&self) -> Backend {
        self.backend
    }

    fn read(&self) -> Result<RawFigures, DeviceError> {
        self.answer()?;
        CardFigures::read(&*self.books)
    }

    fn empty_cache(&self) -> Result<(), DeviceError> {
        self.answer()?;
        CardFigures::empty_cache(&*self.books)
    }
}

/// Random numbers from a seed (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// An index into `len` things, of which there is at least one.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(len).unwrap()).unwrap()
    }

    pub(crate) fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }
}
