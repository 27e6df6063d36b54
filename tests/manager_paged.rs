//! The manager and the pager together, on emulated cards with real bytes.
//!
//! Elsewhere the manager is tested with models that are sizes, and the pager alone. Here a `PagedPatcher`
//! of a real file is loaded, faulted and evicted through the manager, whose figures come from the card's
//! driver: what is freed is seen to be free.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{
    Hooks, ModelFile, Numbers, Watchdog, assert_nothing_left, checked_pass, emulated_card, hooked_card,
    mixed_units, small_options, unit_id,
};
use vram_pager::device::emulated::{CallKind, Fault, FaultError};
use vram_pager::device::{FloatType, PoolAllocation, SharedDevice};
use vram_pager::manager::{CardFigures, DeviceFigures};
use vram_pager::manager::{
    FreeOptions, HostFigures, HostMemoryFigures, LoadOptions, LoadedModel, Manager, ManagerError,
};
use vram_pager::pager::{
    Factor, ModelOptions, PagedModel, Pager, PagerError, PagerOptions, PagerStream, PatchSet, TensorPatch,
    Verifier,
};
use vram_pager::patcher::{
    IdleCache, LoadBudget, ModelPatcher, ModelUuid, PagedPatcher, PatcherError, Place,
};
use vram_pager::units::{GIB, KIB, MIB};

const CARD: Place = Place::Card(0);
const PAGE: u64 = 64 * KIB;

type Shared = Arc<dyn ModelPatcher>;

/// One card, its manager and its pager.
struct House {
    card: Hooks,
    device: SharedDevice,
    manager: Manager,
    pager: Arc<Pager>,
    file: ModelFile,
}

impl House {
    fn new(bytes: u64) -> Self {
        let (card, device) = hooked_card(bytes);
        let manager = Manager::new(std::slice::from_ref(&device));
        Self::with(card, device, manager, small_options())
    }

    fn with(card: Hooks, device: SharedDevice, manager: Manager, options: PagerOptions) -> Self {
        manager.set_knobs(|knobs| {
            knobs.reserve = 0;
            knobs.inference_floor = 0;
            knobs.headroom = Some(0);
            knobs.page_locked_budget = Some(16 * MIB);
        });
        let pager = Pager::new(&device, options).unwrap();
        let cache: Arc<dyn IdleCache> = Arc::clone(&pager) as _;
        manager.register_idle_cache(CARD, &cache).unwrap();
        Self { card, device, manager, pager, file: ModelFile::new(&mixed_units(), 3) }
    }

    /// A model of 5.2 MiB, not loaded.
    fn model(&self) -> (Arc<PagedModel>, Arc<PagedPatcher>, Shared) {
        let model = self.pager.open_model(self.file.index(), &ModelOptions::default()).unwrap();
        let patcher = PagedPatcher::new(&model, CARD);
        let shared: Shared = Arc::clone(&patcher) as _;
        (model, patcher, shared)
    }

    /// The same, loaded and brought in.
    fn resident(&self) -> (Arc<PagedModel>, Arc<PagedPatcher>, Shared) {
        let (model, patcher, shared) = self.model();
        self.load(&shared);
        patcher.prefetch_all().unwrap();
        self.device.synchronize().unwrap();
        (model, patcher, shared)
    }

    fn load(&self, model: &Shared) {
        self.manager.load_model_gpu(model, LoadOptions::default()).unwrap();
    }

    fn free_memory(&self, bytes: u64, options: &FreeOptions) -> usize {
        self.manager.free_memory(bytes, Some(CARD), options).unwrap().len()
    }

    /// What the driver calls free.
    fn driver_free(&self) -> u64 {
        self.device.memory().unwrap().free
    }
}

fn for_dynamic() -> FreeOptions {
    FreeOptions { for_dynamic: true, ..FreeOptions::default() }
}

/// A model that is not paged, in the card's pool: real bytes, all or nothing.
struct Block {
    device: SharedDevice,
    stream: Arc<vram_pager::device::Stream>,
    bytes: u64,
    uuid: ModelUuid,
    memory: parking_lot::Mutex<Option<PoolAllocation>>,
}

impl Block {
    fn new(device: &SharedDevice, bytes: u64) -> (Arc<Self>, Shared) {
        let stream = vram_pager::device::Stream::new(device, vram_pager::device::StreamPriority::Normal);
        let block = Arc::new(Self {
            device: Arc::clone(device),
            stream: Arc::new(stream.unwrap()),
            bytes,
            uuid: ModelUuid::fresh(),
            memory: parking_lot::Mutex::default(),
        });
        let shared: Shared = Arc::clone(&block) as _;
        (block, shared)
    }
}

impl ModelPatcher for Block {
    fn model_size(&self) -> u64 {
        self.bytes
    }

    fn loaded_size(&self) -> u64 {
        if self.memory.lock().is_some() { self.bytes } else { 0 }
    }

    fn load_device(&self) -> Place {
        CARD
    }

    fn weights_uuid(&self) -> ModelUuid {
        self.uuid
    }

    fn partially_load(&self, budget: LoadBudget, _force_patch_weights: bool) -> Result<u64, PatcherError> {
        if budget == LoadBudget::Nothing {
            return Ok(0);
        }
        *self.memory.lock() = Some(PoolAllocation::new(&self.stream, self.bytes)?);
        Ok(self.bytes)
    }

    fn partially_unload(&self, _bytes: u64) -> Result<u64, PatcherError> {
        self.detach(true)?;
        Ok(self.bytes)
    }

    fn detach(&self, unpatch_weights: bool) -> Result<(), PatcherError> {
        if unpatch_weights {
            drop(self.memory.lock().take());
            self.stream.synchronize()?;
            self.device.pool_trim(0)?;
        }
        Ok(())
    }
}

#[test]
fn loading_a_paged_model_moves_no_byte_and_lists_it() {
    let house = House::new(8 * MIB);
    let (_model, patcher, shared) = house.model();
    let before = house.device.counts();
    house.load(&shared);
    let after = house.device.counts();
    assert_eq!((after.bytes_to_device, after.create_frame), (before.bytes_to_device, before.create_frame));
    assert_eq!((patcher.loaded_size(), house.driver_free()), (0, 8 * MIB));
    assert_eq!(house.manager.current_loaded_models().len(), 1);
}

#[test]
fn the_managers_figures_are_the_cards() {
    let house = House::new(8 * MIB);
    let (_model, patcher, _shared) = house.resident();
    let stream = house.pager.stream().unwrap();
    let activation = house.pager.allocate(&stream, MIB).unwrap();
    house.card.set_other_bytes(MIB);
    let figures = DeviceFigures(Arc::clone(&house.device)).read().unwrap();
    assert_eq!(figures.driver_total, 8 * MIB);
    assert_eq!(u64::try_from(figures.driver_free).unwrap(), house.driver_free());
    assert!(figures.pool_used >= MIB && figures.pool_reserved >= figures.pool_used);
    assert_eq!(house.manager.get_total_memory(None).unwrap(), 8 * MIB);
    let cache = figures.pool_reserved - figures.pool_used + house.pager.figures().idle_bytes;
    let answer = house.manager.get_free_memory_and_cache(None).unwrap();
    assert_eq!(answer.cache, cache);
    assert_eq!(house.manager.get_free_memory(None).unwrap(), house.driver_free() + cache);
    let stats = house.manager.stats();
    assert_eq!((stats.devices[0].total, stats.devices[0].reserved), (8 * MIB, figures.pool_reserved));
    assert_eq!((stats.models[0].loaded, stats.models[0].dynamic), (patcher.loaded_size(), true));
    drop(activation);
}

#[test]
fn a_request_for_paged_models_skips_paged_victims_and_subtracts_their_bytes() {
    let house = House::new(16 * MIB);
    let (_first, paged, _paged_shared) = house.resident();
    let (block, block_shared) = Block::new(&house.device, 4 * MIB);
    house.load(&block_shared);
    // Most referenced, so asked last.
    let _user = Arc::clone(&block_shared);
    assert_eq!(block.loaded_size(), 4 * MIB);
    let loaded = paged.loaded_size();
    // What is missing is less than the paged model's bytes, which come on demand: nobody gives anything.
    let free = house.manager.get_free_memory(None).unwrap();
    assert_eq!(house.free_memory(free + loaded - PAGE, &for_dynamic()), 0);
    assert_eq!((paged.loaded_size(), block.loaded_size()), (loaded, 4 * MIB));
    // Beyond them it is the block's turn; the paged one is still left alone.
    assert_eq!(house.free_memory(u64::MAX, &for_dynamic()), 1);
    assert_eq!((paged.loaded_size(), block.loaded_size()), (loaded, 0));
}

#[test]
fn a_request_for_others_unloads_exactly_the_pages() {
    let house = House::new(8 * MIB);
    let (model, paged, _shared) = house.resident();
    house.manager.soft_empty_cache(false).unwrap();
    for pages in [1_u64, 3, 16] {
        let (free, resident) = (house.driver_free(), model.figures().resident_bytes);
        assert_eq!(house.free_memory(free + pages * PAGE - 1, &FreeOptions::default()), 0);
        assert_eq!(house.driver_free(), free + pages * PAGE);
        assert_eq!(model.figures().resident_bytes, resident - pages * PAGE);
    }
    // What is asked for whole leaves whole, and everything can come back.
    assert_eq!(house.free_memory(u64::MAX, &FreeOptions::default()), 1);
    assert_eq!((paged.loaded_size(), house.driver_free()), (0, 8 * MIB));
    let stream = house.pager.stream().unwrap();
    checked_pass(&model, &stream, &Verifier::new(&model).unwrap()).unwrap();
}

#[test]
fn a_paged_model_sees_what_others_would_give_up() {
    let house = House::new(12 * MIB);
    let (first, _p, _s) = house.resident();
    let (_second, patcher, shared) = house.model();
    house.load(&shared);
    let free = house.manager.get_free_memory(None).unwrap();
    let own_view = house.manager.get_free_memory_for(&*patcher).unwrap();
    let resident = first.figures().resident_bytes;
    assert!(own_view >= free + resident - house.pager.figures().idle_bytes, "{own_view} {free} {resident}");
    // Its view adds nothing of its own.
    patcher.prefetch_all().unwrap();
    house.device.synchronize().unwrap();
    let after = house.manager.get_free_memory_for(&*patcher).unwrap();
    assert!(after <= own_view, "{after} > {own_view}");
}

/// A house in which a model died and left its frames idle.
fn with_idle_frames(card: u64) -> (House, u64) {
    let house = House::new(card);
    drop(house.resident());
    let idle = house.pager.figures().idle_bytes;
    assert!(idle > 4 * MIB, "{idle}");
    (house, idle)
}

#[test]
fn idle_frames_count_as_free_memory() {
    let (house, idle) = with_idle_frames(8 * MIB);
    assert_eq!(house.driver_free(), 8 * MIB - idle);
    assert_eq!(house.manager.get_free_memory(None).unwrap(), 8 * MIB);
    let figures = house.manager.get_free_memory_and_cache(None).unwrap();
    assert_eq!(figures.cache, idle);
}

#[test]
fn soft_empty_cache_hands_idle_frames_back() {
    let (house, _) = with_idle_frames(8 * MIB);
    house.manager.soft_empty_cache(false).unwrap();
    assert_eq!((house.pager.figures().idle_bytes, house.driver_free()), (0, 8 * MIB));
}

#[test]
fn free_memory_for_others_hands_idle_frames_back_before_it_looks() {
    // Less than a quarter of what is free is idle: a request for paged models, which may want the frames
    // again, leaves them. Any other hands them back.
    let (house, idle) = with_idle_frames(32 * MIB);
    house.free_memory(1, &for_dynamic());
    assert_eq!(house.pager.figures().idle_bytes, idle);
    house.free_memory(0, &FreeOptions::default());
    assert_eq!((house.pager.figures().idle_bytes, house.driver_free()), (0, 32 * MIB));
    // More than a quarter: they go back either way.
    let (house, _) = with_idle_frames(8 * MIB);
    house.free_memory(1, &for_dynamic());
    assert_eq!(house.pager.figures().idle_bytes, 0);
}

#[test]
fn an_activation_that_the_card_refuses_takes_idle_frames_and_then_pages() {
    let (house, _) = with_idle_frames(8 * MIB);
    let stream = house.pager.stream().unwrap();
    let activation = house.pager.allocate(&stream, 7 * MIB).unwrap();
    assert!(house.pager.figures().idle_bytes < 2 * MIB);
    drop(activation);
    let house = House::new(8 * MIB);
    let (model, _p, _s) = house.resident();
    let stream = house.pager.stream().unwrap();
    let activation = house.pager.allocate(&stream, 6 * MIB).unwrap();
    assert!(model.figures().resident_bytes <= 2 * MIB);
    drop(activation);
}

#[test]
fn the_cache_functions_leave_mapped_pages_alone() {
    let house = House::new(8 * MIB);
    let (model, _p, shared) = house.resident();
    let resident = model.figures().resident_bytes;
    house.manager.soft_empty_cache(true).unwrap();
    house.free_memory(0, &FreeOptions::default());
    // Nothing that is listed may be touched, so nothing is.
    let keep_loaded = house.manager.current_loaded_models();
    house.free_memory(u64::MAX, &FreeOptions { keep_loaded, ..FreeOptions::default() });
    assert_eq!(model.figures().resident_bytes, resident);
    drop(shared);
}

#[test]
fn the_cache_functions_leave_a_model_that_is_not_listed_alone() {
    let house = House::new(8 * MIB);
    let (model, _patcher, _shared) = house.model();
    model.prefetch_all().unwrap();
    house.device.synchronize().unwrap();
    let resident = model.figures().resident_bytes;
    assert!(resident > 4 * MIB);
    assert_eq!(house.free_memory(u64::MAX, &FreeOptions::default()), 0);
    house.manager.soft_empty_cache(false).unwrap();
    assert_eq!(model.figures().resident_bytes, resident);
}

#[test]
fn free_memory_leaves_the_streaming_ring_alone() {
    let house = House::new(3 * MIB);
    let (model, _p, shared) = house.model();
    house.load(&shared);
    let stream = house.pager.stream().unwrap();
    let verifier = Verifier::new(&model).unwrap();
    for _ in 0..3 {
        checked_pass(&model, &stream, &verifier).unwrap();
    }
    let ring = house.pager.figures().ring_bytes;
    assert!(ring > 0);
    house.manager.soft_empty_cache(false).unwrap();
    assert_eq!(house.free_memory(u64::MAX, &FreeOptions::default()), 1);
    assert_eq!((model.figures().resident_bytes, house.pager.figures().ring_bytes), (0, ring));
}

#[test]
fn free_memory_leaves_pages_under_a_guard_and_what_others_allocated_alone() {
    let house = House::new(8 * MIB);
    let (model, paged, _shared) = house.resident();
    let stream = house.pager.stream().unwrap();
    let activation = house.pager.allocate(&stream, MIB).unwrap();
    house.card.set_other_bytes(MIB / 2);
    let guard = model.fault(unit_id(3), &stream).unwrap();
    let unloaded = house.free_memory(u64::MAX, &FreeOptions::default());
    assert_eq!(unloaded, 1);
    // The guard's pages, whose bytes are still there, and nobody's else.
    assert!(paged.loaded_size() >= guard.tensors().iter().map(|tensor| tensor.bytes).sum());
    let verifier = Verifier::new(&model).unwrap();
    let mut check = verifier.begin(&stream).unwrap();
    check.tensors(&guard.tensors()).unwrap();
    assert_eq!(check.finish().unwrap(), []);
    guard.release();
    let pool = house.device.pool_figures().unwrap();
    assert!(pool.used >= MIB);
    drop(activation);
    assert_eq!(house.device.memory().unwrap().total, 8 * MIB);
}

#[test]
fn the_headroom_is_a_live_setting_of_registered_pagers() {
    let house = House::new(8 * MIB);
    let (model, _p, _s) = house.resident();
    assert_eq!(house.pager.figures().headroom_bytes, 0);
    let resident = model.figures().resident_bytes;
    house.manager.set_knobs(|knobs| knobs.headroom = Some(5 * MIB));
    assert_eq!(house.pager.figures().headroom_bytes, 5 * MIB);
    assert!(house.driver_free() >= 5 * MIB);
    assert!(model.figures().resident_bytes < resident);
    // Without a setting of its own it follows the reserve, at most 1/32 of the card.
    house.manager.set_knobs(|knobs| knobs.headroom = None);
    house.manager.set_extra_reserved_memory(128 * KIB);
    assert_eq!(house.pager.figures().headroom_bytes, 128 * KIB);
    house.manager.set_extra_reserved_memory(GIB);
    assert_eq!(house.pager.figures().headroom_bytes, 8 * MIB / 32);
    // And what was given up comes back.
    let stream = house.pager.stream().unwrap();
    let verifier = Verifier::new(&model).unwrap();
    for _ in 0..2 {
        checked_pass(&model, &stream, &verifier).unwrap();
    }
    assert_eq!(model.figures().resident_bytes, resident);
}

#[test]
fn a_pager_that_is_registered_later_is_told_the_settings_too() {
    let house = House::new(8 * MIB);
    house.manager.set_knobs(|knobs| knobs.headroom = Some(3 * PAGE));
    let other = Pager::new(&house.device, small_options()).unwrap();
    let cache: Arc<dyn IdleCache> = Arc::clone(&other) as _;
    house.manager.register_idle_cache(CARD, &cache).unwrap();
    assert_eq!(other.figures().headroom_bytes, 3 * PAGE);
    // Two share the page-locked budget.
    assert_eq!(other.figures().staging.limit_bytes, 8 * MIB);
    assert_eq!(house.pager.figures().staging.limit_bytes, 8 * MIB);
}

#[test]
fn a_cap_makes_a_large_card_act_as_a_small_one_for_manager_and_pager() {
    let house = House::new(16 * MIB);
    let (model, paged, shared) = house.resident();
    assert_eq!(paged.loaded_size(), paged.model_size());
    house.manager.set_cap(CARD, Some(3 * MIB)).unwrap();
    assert_eq!(house.manager.get_total_memory(None).unwrap(), 3 * MIB);
    assert!(house.manager.get_free_memory(None).unwrap() <= 3 * MIB);
    let stream = house.pager.stream().unwrap();
    let verifier = Verifier::new(&model).unwrap();
    for _ in 0..3 {
        checked_pass(&model, &stream, &verifier).unwrap();
        let figures = house.pager.figures();
        assert!(figures.resident_bytes + figures.ring_bytes + figures.idle_bytes <= 3 * MIB, "{figures:?}");
    }
    house.load(&shared);
    // Others on the card take from the small one.
    house.card.set_other_bytes(MIB);
    house.pager.refresh().unwrap();
    let figures = house.pager.figures();
    assert!(figures.resident_bytes + figures.ring_bytes + figures.idle_bytes <= 2 * MIB, "{figures:?}");
    house.card.set_other_bytes(0);
    house.manager.set_cap(CARD, None).unwrap();
    for _ in 0..2 {
        checked_pass(&model, &stream, &verifier).unwrap();
    }
    assert_eq!(paged.loaded_size(), paged.model_size());
}

/// Others may hold what a pass needs just now, and that is said; whatever it gets is right.
/// Answers 1 for a whole pass.
fn sound(pass: Result<(), PagerError>, round: u64) -> u64 {
    match pass {
        Ok(()) => return 1,
        Err(PagerError::NeverFits { .. }) => {}
        Err(PagerError::Device(error)) if error.is_out_of_memory() => {}
        Err(error) if error.is_held() => {}
        Err(error) => panic!("round {round}: {error}"),
    }
    0
}

/// A patch of one unit.
fn one_patch(model: &PagedModel, unit: u64) -> Arc<PatchSet> {
    let tensor = model.index().units()[unit_id(unit).index()].tensors[1];
    let shape = &model.index().tensor_info(tensor).shape;
    let columns = shape[1..].iter().product();
    let factor = |rows: u64, columns: u64| Factor {
        dtype: FloatType::F32,
        shape: [rows, columns],
        bytes: (0..rows * columns).flat_map(|_| 0.25_f32.to_le_bytes()).collect(),
    };
    let patch = TensorPatch { tensor, up: factor(shape[0], 1), down: factor(1, columns), scale: 0.5 };
    PatchSet::new(model, vec![patch]).unwrap()
}

/// A pass through a patch set, every byte checked.
fn patched_pass(
    model: &Arc<PagedModel>,
    set: &Arc<PatchSet>,
    stream: &PagerStream,
) -> Result<(), PagerError> {
    let verifier = Verifier::patched(model, Some(Arc::clone(set)))?;
    let mut check = verifier.begin(stream)?;
    for unit in 0..model.index().units().len() as u64 {
        for piece in 0..model.pieces(unit_id(unit))? {
            let guard = model.patched(set).fault_piece(unit_id(unit), piece, stream)?;
            check.tensors(&guard.tensors())?;
            guard.release();
            if check.is_nearly_full() {
                assert_eq!(check.finish()?, []);
            }
        }
    }
    assert_eq!(check.finish()?, []);
    Ok(())
}

#[test]
fn concurrent_callers_never_deadlock_and_never_see_a_half_made_ledger() {
    let _dog = Watchdog::new(120, "load, free, fault, drop and knobs from several threads");
    let house = House::new(8 * MIB);
    let files: Vec<_> = (0..3).map(|seed| ModelFile::new(&mixed_units(), 40 + seed)).collect();
    let done = AtomicBool::new(false);
    let seed = 0x5eed_u64;
    println!("seed {seed:#x}");
    std::thread::scope(|scope| {
        let (house, files, done) = (&house, &files, &done);
        let runners: Vec<_> = files
            .iter()
            .map(|file| {
                scope.spawn(move || {
                    let mut whole = 0;
                    for round in 0..4 {
                        let model = house.pager.open_model(file.index(), &ModelOptions::default()).unwrap();
                        let shared: Shared = PagedPatcher::new(&model, CARD);
                        let stream = house.pager.stream().unwrap();
                        let verifier = Verifier::new(&model).unwrap();
                        for _ in 0..2 {
                            house.load(&shared);
                            whole += sound(checked_pass(&model, &stream, &verifier), round);
                            // A change of patches goes on beside the others' work.
                            let set = one_patch(&model, round);
                            whole += sound(patched_pass(&model, &set, &stream), round);
                        }
                    }
                    whole
                })
            })
            .collect();
        for thread in 1..3_u64 {
            scope.spawn(move || {
                let mut numbers = Numbers(seed * thread);
                while !done.load(Ordering::Relaxed) {
                    let options =
                        FreeOptions { for_dynamic: numbers.below(2) == 0, ..FreeOptions::default() };
                    match numbers.below(6) {
                        0 => drop(house.manager.unload_all_models().unwrap()),
                        1 => house.manager.soft_empty_cache(false).unwrap(),
                        2 => {
                            let headroom = numbers.below(8) * PAGE;
                            house.manager.set_knobs(|knobs| knobs.headroom = Some(headroom));
                        }
                        _ => drop(
                            house.manager.free_memory(numbers.below(8 * MIB), Some(CARD), &options).unwrap(),
                        ),
                    }
                }
            });
        }
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                let entries = house.manager.current_loaded_models();
                // Models that live are listed once.
                let mut models: Vec<_> =
                    entries.iter().filter_map(LoadedModel::model).map(|model| model.weights_uuid()).collect();
                let listed = models.len();
                models.sort_unstable();
                models.dedup();
                assert_eq!(models.len(), listed, "a model is listed twice");
                let stats = house.manager.stats();
                assert!(stats.models.iter().all(|model| model.loaded <= model.size));
            }
        });
        let ends: Vec<_> = runners.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Relaxed);
        let whole: u64 = ends.into_iter().map(Result::unwrap).sum();
        assert!(whole > 0, "not one pass of 48 came to its end");
        println!("{whole} of 48 passes came to their end");
    });
    assert_eq!(house.manager.unload_all_models().unwrap().len(), 0);
    house.manager.soft_empty_cache(false).unwrap();
    assert_eq!(house.pager.figures().resident_bytes, 0);
}

#[test]
fn a_card_that_is_lost_is_said_to_be_and_nothing_hangs_or_panics() {
    let _dog = Watchdog::new(60, "a lost card");
    let (card, device) = emulated_card(8 * MIB, "any call loses the card");
    let manager = Manager::new(std::slice::from_ref(&device));
    let house = House::with(Hooks::Emulated(Arc::clone(&card)), device, manager, small_options());
    let (model, paged, shared) = house.resident();
    card.inject(Fault::once(CallKind::Any, 1).with(FaultError::Lost));
    assert!(house.device.memory().is_err());
    let lost = |error: &ManagerError| error.to_string().contains("lost");
    let error = house.manager.get_free_memory(None).unwrap_err();
    assert!(matches!(error, ManagerError::Device { .. }) && lost(&error), "{error}");
    assert!(lost(&house.manager.free_memory(MIB, Some(CARD), &FreeOptions::default()).unwrap_err()));
    assert!(lost(&house.manager.load_model_gpu(&shared, LoadOptions::default()).unwrap_err()));
    assert!(!house.manager.get_free_memory(None).unwrap_err().is_out_of_memory());
    assert!(house.manager.soft_empty_cache(false).is_err());
    let stats = house.manager.stats();
    assert!(stats.devices[0].error.as_ref().is_some_and(|why| why.contains("lost")), "{stats:?}");
    // Settings can still be made, and everything can be dropped.
    house.manager.set_knobs(|knobs| knobs.headroom = Some(MIB));
    house.manager.set_cap(CARD, Some(MIB)).unwrap();
    drop(house.manager.unload_all_models());
    drop((paged, shared, model));
    house.manager.cleanup_models_gc();
    assert_eq!(house.manager.current_loaded_models().len(), 0);
}

/// A machine that says what it is told to.
struct FixedHost(HostFigures);

impl HostMemoryFigures for FixedHost {
    fn read(&self) -> Result<HostFigures, ManagerError> {
        Ok(self.0)
    }
}

/// A house whose card is too small, so that pages are kept in page-locked memory.
fn with_kept_pages() -> (House, Arc<PagedModel>, Arc<PagedPatcher>, PagerStream) {
    let house = House::new(3 * MIB);
    let (model, paged, shared) = house.model();
    house.load(&shared);
    let stream = house.pager.stream().unwrap();
    let verifier = Verifier::new(&model).unwrap();
    for _ in 0..3 {
        checked_pass(&model, &stream, &verifier).unwrap();
    }
    stream.synchronize().unwrap();
    (house, model, paged, stream)
}

#[test]
fn a_paged_models_page_locked_bytes_are_real() {
    let (house, model, paged, stream) = with_kept_pages();
    let pinned = paged.pinned_size();
    assert!(pinned > MIB, "{pinned}");
    assert!(pinned <= house.device.live().page_locked_bytes);
    assert_eq!(house.manager.stats().models[0].page_locked, pinned);
    // What is given back, the host has back.
    let before = house.device.live().page_locked_bytes;
    let given = paged.partially_unload_ram(u64::MAX);
    assert_eq!(house.device.live().page_locked_bytes, before - given);
    assert_eq!(paged.pinned_size(), 0);
    checked_pass(&model, &stream, &Verifier::new(&model).unwrap()).unwrap();
}

#[test]
fn memory_that_could_not_be_page_locked_is_not_counted_and_nothing_fails() {
    let (card, device) = emulated_card(3 * MIB, "page-locking fails from some call on");
    card.inject(Fault::from_then_on(CallKind::PageLock, 1));
    let manager = Manager::new(std::slice::from_ref(&device));
    let house = House::with(Hooks::Emulated(card), device, manager, small_options());
    let (model, paged, shared) = house.model();
    house.load(&shared);
    let stream = house.pager.stream().unwrap();
    let verifier = Verifier::new(&model).unwrap();
    for _ in 0..2 {
        checked_pass(&model, &stream, &verifier).unwrap();
    }
    assert_eq!((paged.pinned_size(), house.device.live().page_locked_bytes), (0, 0));
    assert!(house.manager.ensure_pin_budget(MIB));
}

#[test]
fn the_page_locked_budget_is_a_live_setting_of_registered_pagers() {
    let (house, model, paged, stream) = with_kept_pages();
    assert_eq!(house.pager.figures().staging.limit_bytes, 16 * MIB);
    house.manager.set_knobs(|knobs| knobs.page_locked_budget = Some(2 * MIB));
    assert_eq!(house.pager.figures().staging.limit_bytes, 2 * MIB);
    assert!(paged.pinned_size() <= 2 * MIB);
    let verifier = Verifier::new(&model).unwrap();
    for _ in 0..2 {
        checked_pass(&model, &stream, &verifier).unwrap();
        assert!(paged.pinned_size() <= 2 * MIB);
    }
    // None at all is slower, not wrong.
    house.manager.set_knobs(|knobs| knobs.page_locked_budget = Some(0));
    assert_eq!(paged.pinned_size(), 0);
    checked_pass(&model, &stream, &verifier).unwrap();
    assert_eq!(paged.pinned_size(), 0);
}

#[test]
fn room_in_the_page_locked_budget_is_made_with_slack_and_only_when_it_is_short() {
    let (house, _model, paged, _stream) = with_kept_pages();
    let pinned = paged.pinned_size();
    // It fits: nobody is asked.
    assert!(house.manager.ensure_pin_budget(16 * MIB - pinned));
    assert_eq!(paged.pinned_size(), pinned);
    // A byte too much frees that and the slack, which is more than this model has.
    assert!(house.manager.ensure_pin_budget(16 * MIB - pinned + 1));
    assert_eq!(paged.pinned_size(), 0);
    // More than there is: said, and no failure.
    assert!(!house.manager.ensure_pin_budget(16 * MIB + 1));
    assert!(!house.manager.ensure_pin_registerable(u64::MAX));
}

#[test]
fn what_is_registered_by_anyone_counts_where_more_is_to_be_registered() {
    let (house, _model, paged, _stream) = with_kept_pages();
    let registered = house.device.live().page_locked_bytes;
    let pinned = paged.pinned_size();
    assert!(registered > pinned, "staging holds more than what is kept");
    // By the models' books it fits, by the driver's it does not.
    assert!(house.manager.ensure_pin_budget(16 * MIB - registered + 1));
    assert_eq!(paged.pinned_size(), pinned);
    house.manager.ensure_pin_registerable(16 * MIB - registered + 1);
    assert_eq!(paged.pinned_size(), 0);
    assert!(house.device.live().page_locked_bytes < registered);
}

#[test]
fn a_control_groups_limit_bounds_what_a_pager_page_locks() {
    let (card, device) = hooked_card(8 * MIB);
    let figures = HostFigures {
        ram_total: 64 * GIB,
        ram_available: 32 * GIB,
        cgroup_limit: Some(40 * MIB),
        swap_total: GIB,
    };
    let cards = vec![Arc::new(DeviceFigures(Arc::clone(&device))) as _];
    let manager = Manager::over(cards, Arc::new(FixedHost(figures)));
    let house = House::with(card, device, manager, small_options());
    house.manager.set_knobs(|knobs| knobs.page_locked_budget = None);
    assert_eq!(house.manager.page_locked_budget(), 16 * MIB);
    assert_eq!(house.pager.figures().staging.limit_bytes, 16 * MIB);
}

#[test]
fn everything_is_given_back_in_the_end() {
    let house = House::new(3 * MIB);
    let (model, paged, shared) = house.model();
    house.load(&shared);
    let stream = house.pager.stream().unwrap();
    checked_pass(&model, &stream, &Verifier::new(&model).unwrap()).unwrap();
    let House { card, device, manager, pager, file } = house;
    drop((stream, model, paged, shared, manager, pager, card, file));
    assert_nothing_left(&device);
}
