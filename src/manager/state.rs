//! [`Manager`]: the cards it knows, its settings, and everything that only reads.
//!
//! Locks, each held for a few instructions and never across a call out: the settings', the ledger's, and
//! one a card for its idle caches. Two are long: `loads` admits one load at a time and is taken first; a
//! card's `limits` is held while its pagers are told of new settings, which calls nothing of the manager.

#![deny(unsafe_code)]

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::figures::{CardFigures, DeviceFigures, IdleCaches};
use super::host::{HostMemoryFigures, LinuxHost};
use super::ledger::{Ledger, assert_not_held};
use super::loaded_model::LoadedModel;
use super::platform::{
    self, Backend, FreeFigures, Platform, RawFigures, default_min_weight_ratio, free_memory_rule,
    has_idle_cache, total_memory_rule,
};
use super::{Knobs, ManagerError, admission};
use crate::device::SharedDevice;
use crate::patcher::{CardLimits, IdleCache, ModelPatcher, Place};

/// The memory manager: admits models to cards and evicts them.
///
/// Several can exist; a process that wants one for all keeps it in a static. All functions take `&self`
/// and may be called from any thread; see the [module's documentation](super) for who waits for whom.
pub struct Manager {
    pub(super) cards: Vec<Card>,
    pub(super) host: Arc<dyn HostMemoryFigures>,
    pub(super) knobs: RwLock<Knobs>,
    pub(super) ledger: Ledger,
    /// Held by the one load that may run at a time.
    pub(super) loads: Mutex<()>,
    id: u64,
}

/// One card.
pub(super) struct Card {
    pub(super) figures: Arc<dyn CardFigures>,
    idle: Mutex<IdleCaches>,
    /// What the registered caches were last told.
    limits: Mutex<Option<CardLimits>>,
    /// The size to act as; `u64::MAX` for the card's own.
    cap: AtomicU64,
}

impl Manager {
    /// A manager of these devices; the first is the default device. The settings are the platform's.
    pub fn new(devices: &[SharedDevice]) -> Self {
        let cards = devices.iter().map(|device| Arc::new(DeviceFigures(Arc::clone(device))) as _);
        Self::over(cards.collect(), Arc::new(LinuxHost::default()))
    }

    /// A manager of cards that anything answers for, on a machine that anything answers for.
    pub fn over(cards: Vec<Arc<dyn CardFigures>>, host: Arc<dyn HostMemoryFigures>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let first_total = cards.first().and_then(|card| card.read().ok()).map_or(0, |raw| raw.driver_total);
        let reserve = platform::default_reserve(Platform::current(), first_total);
        let cards = cards.into_iter().map(|figures| Card {
            figures,
            idle: Mutex::default(),
            limits: Mutex::default(),
            cap: AtomicU64::new(u64::MAX),
        });
        Self {
            cards: cards.collect(),
            host,
            knobs: RwLock::new(Knobs { reserve, ..Knobs::default() }),
            ledger: Ledger::default(),
            loads: Mutex::new(()),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// The device that is meant where none is named: the first card, or host memory if there is none.
    pub fn default_device(&self) -> Place {
        if self.cards.is_empty() { Place::Cpu } else { Place::Card(0) }
    }

    /// All cards, the default device first.
    pub fn devices(&self) -> impl Iterator<Item = Place> + use<> {
        (0..u32::try_from(self.cards.len()).unwrap_or(u32::MAX)).map(Place::Card)
    }

    /// The settings now.
    pub fn knobs(&self) -> Knobs {
        *self.knobs.read()
    }

    /// Changes settings; the next call of any function sees all of the change. Pagers that are registered
    /// ([`Self::register_idle_cache`]) obey at once, and give back what is too much.
    pub fn set_knobs(&self, change: impl FnOnce(&mut Knobs)) {
        // Works on a copy, so that the closure, which is the caller's code, runs with no lock held.
        let mut knobs = self.knobs();
        change(&mut knobs);
        *self.knobs.write() = knobs;
        self.apply_limits();
    }

    /// Makes a card act as one of `cap` bytes; `None` gives it its own size back. It does so for admission
    /// and for registered pagers, which leave the rest free.
    pub fn set_cap(&self, device: Place, cap: Option<u64>) -> Result<(), ManagerError> {
        if let Some(card) = self.card(device, "a cap was to be set")? {
            card.cap.store(cap.unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        self.apply_limits();
        Ok(())
    }

    /// Registers device memory of `device` that is held but backs nothing. It counts as free from now on
    /// and goes back to the driver when room is needed. Held weakly.
    ///
    /// Whoever is registered also follows the manager's settings from now on, whatever it was opened with:
    /// it leaves [`Self::headroom`] free, keeps within a cap, and page-locks no more than its part of
    /// [`Self::page_locked_budget`] (see [`CardLimits`]).
    pub fn register_idle_cache(&self, device: Place, cache: &Arc<dyn IdleCache>) -> Result<(), ManagerError> {
        if let Some(card) = self.card(device, "an idle cache was to be registered")? {
            card.idle.lock().register(cache);
            *card.limits.lock() = None;
        }
        self.apply_limits();
        Ok(())
    }

    /// The bytes to leave for others on every card. Read live at every load.
    pub fn extra_reserved_memory(&self) -> u64 {
        self.knobs().reserve
    }

    /// Sets [`Self::extra_reserved_memory`]. A worker publishes here what others hold.
    pub fn set_extra_reserved_memory(&self, bytes: u64) {
        self.knobs.write().reserve = bytes;
        self.apply_limits();
    }

    /// What must stay free below any load: the floor (0.8 GiB unless set) and the reserve.
    pub fn minimum_inference_memory(&self) -> u64 {
        self.knobs().minimum_inference_memory()
    }

    /// The most that weights may take of `device` (the default one for `None`), for choosing a type:
    /// 88 % of its total less [`Self::minimum_inference_memory`].
    ///
    /// ```
    /// use std::sync::Arc;
    /// use vram_pager::manager::{LinuxHost, Manager};
    /// use vram_pager::patcher::SizedCard;
    ///
    /// let card = SizedCard::new("a card of 24 GiB", 24 << 30);
    /// let manager = Manager::over(vec![card], Arc::new(LinuxHost::default()));
    /// // Weights of 12 billion parameters: in f16 if they fit, else in fp8.
    /// let parameters: u64 = 12_000_000_000;
    /// let fits = |bytes_each| parameters * bytes_each <= manager.maximum_vram_for_weights(None).unwrap();
    /// assert!(!fits(2) && fits(1));
    /// ```
    pub fn maximum_vram_for_weights(&self, device: Option<Place>) -> Result<u64, ManagerError> {
        let total = self.get_total_memory(device)?;
        Ok(admission::maximum_vram_for_weights(total, self.minimum_inference_memory()))
    }

    /// The bytes that a pager leaves free on `device`: the setting, or the smaller of the reserve and 1/32
    /// of the card.
    pub fn headroom(&self, device: Place) -> Result<u64, ManagerError> {
        let total = self.get_total_memory(Some(device))?;
        Ok(self.knobs().headroom_of(total))
    }

    /// The bytes that can be had on `device` (the default one for `None`): free ones and idle cache. At
    /// least 0, also where books are overdrawn.
    pub fn get_free_memory(&self, device: Option<Place>) -> Result<u64, ManagerError> {
        let free = self.free_figures(device.unwrap_or(self.default_device()))?;
        Ok(u64::try_from(free.total).unwrap_or(0))
    }

    /// [`Self::get_free_memory`] with the part of it that is idle cache (`torch_free_too`). The total is
    /// signed here: it is what admission works with.
    ///
    /// Idle cache counts as free though it may be fragmented, so that not all of it need be had in one
    /// piece.
    pub fn get_free_memory_and_cache(&self, device: Option<Place>) -> Result<FreeFigures, ManagerError> {
        self.free_figures(device.unwrap_or(self.default_device()))
    }

    /// Free memory as `model` sees it: [`Self::get_free_memory`] of its card and what other paged models
    /// there would give up on demand.
    pub fn get_free_memory_for(&self, model: &dyn ModelPatcher) -> Result<u64, ManagerError> {
        Ok(self.get_free_memory(Some(model.load_device()))?.saturating_add(model.reclaimable()))
    }

    /// The size of `device` (the default one for `None`) as its driver tells it, which is less than the
    /// nominal one; the machine's memory for the CPU.
    pub fn get_total_memory(&self, device: Option<Place>) -> Result<u64, ManagerError> {
        let device = device.unwrap_or(self.default_device());
        let (backend, raw) = self.raw_figures(device)?;
        Ok(total_memory_rule(backend, &raw))
    }

    /// [`Self::get_total_memory`] and the bytes that the pool has reserved (`torch_total_too`).
    pub fn get_total_memory_and_pool(&self, device: Option<Place>) -> Result<(u64, u64), ManagerError> {
        let device = device.unwrap_or(self.default_device());
        let (backend, raw) = self.raw_figures(device)?;
        Ok((total_memory_rule(backend, &raw), raw.pool_reserved))
    }

    /// The patchers of all entries, newest first, optionally only those that the last load named.
    pub fn loaded_models(&self, only_currently_used: bool) -> Vec<Arc<dyn ModelPatcher>> {
        let entries = self.ledger.snapshot();
        let wanted = entries.iter().filter(|entry| !only_currently_used || entry.currently_used());
        wanted.filter_map(LoadedModel::model).collect()
    }

    /// The ledger: all entries whose model lives, newest first.
    pub fn current_loaded_models(&self) -> Vec<LoadedModel> {
        let mut entries = self.ledger.snapshot();
        entries.retain(|entry| !entry.is_dead());
        entries
    }

    /// The sum of what `entries` on `device` have off the card.
    pub fn offloaded_memory(&self, entries: &[LoadedModel], device: Place) -> u64 {
        entries
            .iter()
            .filter(|entry| entry.device() == device)
            .fold(0, |sum: u64, entry| sum.saturating_add(entry.model_offloaded_memory()))
    }

    /// Tells registered caches what the settings allow them now, where that changed. A card that does not
    /// answer is passed over: its caches are told when it does.
    pub(super) fn apply_limits(&self) {
        assert_not_held();
        let caches: Vec<_> = self.cards.iter().map(Card::idle_caches).collect();
        let sharers = caches.iter().map(Vec::len).sum::<usize>() as u64;
        if sharers == 0 {
            return;
        }
        for (card, caches) in self.cards.iter().zip(&caches).filter(|(_, caches)| !caches.is_empty()) {
            // Held while the caches are told, so that the last settings are the last that they hear of.
            let mut told = card.limits.lock();
            let Ok(raw) = card.figures.read() else { continue };
            let total = raw.driver_total.min(card.cap.load(Ordering::Relaxed));
            let hidden = raw.driver_total - total;
            let limits = CardLimits {
                leave_free: self.knobs().headroom_of(total).saturating_add(hidden),
                page_locked: self.page_locked_budget() / sharers,
            };
            if told.replace(limits) != Some(limits) {
                tracing::debug!(card = card.figures.label(), ?limits, "told the pagers");
                for cache in caches {
                    cache.apply_limits(limits);
                }
            }
        }
    }

    /// The card that `device` is; `None` for host memory.
    pub(super) fn card(&self, device: Place, what: &str) -> Result<Option<&Card>, ManagerError> {
        self.card_for(device, || what.to_owned())
    }

    /// As [`Self::card`], with an explanation that is made only if it is needed.
    pub(super) fn card_for(
        &self,
        device: Place,
        what: impl FnOnce() -> String,
    ) -> Result<Option<&Card>, ManagerError> {
        match device {
            Place::Cpu => Ok(None),
            Place::Card(number) => match self.cards.get(number as usize) {
                Some(card) => Ok(Some(card)),
                None => {
                    Err(ManagerError::UnknownDevice { place: device, known: self.cards.len(), what: what() })
                }
            },
        }
    }

    /// Everything that a rule may read of `device`.
    pub(super) fn raw_figures(&self, device: Place) -> Result<(Backend, RawFigures), ManagerError> {
        assert_not_held();
        let (backend, mut raw) = match self.card(device, "its memory was asked for")? {
            None => (Backend::Cpu, RawFigures::default()),
            Some(card) => {
                let read = card.figures.read();
                let raw = read.map_err(|source| ManagerError::Device { place: device, source })?;
                let cap = card.cap.load(Ordering::Relaxed);
                let mut raw = platform::capped(raw, Some(cap));
                let idle = card.idle_caches();
                raw.idle_frames =
                    idle.iter().fold(raw.idle_frames, |sum, cache| sum.saturating_add(cache.idle_bytes()));
                (card.figures.backend(), raw)
            }
        };
        if matches!(backend, Backend::Cpu | Backend::Mps) {
            let host = self.host.read()?;
            raw.ram_total = host.ram_total;
            raw.ram_available = host.ram_available;
        }
        Ok((backend, raw))
    }

    /// The signed free figure of `device`.
    pub(super) fn free_figures(&self, device: Place) -> Result<FreeFigures, ManagerError> {
        let (backend, raw) = self.raw_figures(device)?;
        Ok(free_memory_rule(backend, &raw))
    }

    /// The part of free memory on `device` that weights may always have.
    pub(super) fn min_weight_ratio(&self, device: Place, knobs: &Knobs) -> f64 {
        knobs.min_weight_ratio.unwrap_or_else(|| match self.card(device, "") {
            Ok(Some(card)) => default_min_weight_ratio(card.figures.backend()),
            _ => default_min_weight_ratio(Backend::Cpu),
        })
    }

    /// Marks this thread as being inside a patcher's call until the guard is dropped.
    pub(super) fn calling_out(&self) -> CallingOut {
        assert_not_held();
        CALLS.with(|calls| calls.borrow_mut().push(self.id));
        CallingOut
    }

    /// Refuses a load from inside a patcher's call on this thread, where it would wait for itself.
    pub(super) fn refuse_nested(&self, what: &'static str) -> Result<(), ManagerError> {
        if CALLS.with(|calls| calls.borrow().contains(&self.id)) {
            return Err(ManagerError::Reentrant { what });
        }
        Ok(())
    }
}

impl Card {
    pub(super) fn idle_caches(&self) -> Vec<Arc<dyn IdleCache>> {
        self.idle.lock().live()
    }

    /// Hands frames that back no page to the driver.
    pub(super) fn release_idle_frames(&self) {
        assert_not_held();
        for cache in self.idle_caches() {
            cache.release();
        }
    }

    pub(super) fn has_idle_cache(&self) -> bool {
        has_idle_cache(self.figures.backend())
    }
}

thread_local! {
    /// The managers that have a patcher's changing call in progress on this thread.
    static CALLS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Ends with the patcher's call.
pub(super) struct CallingOut;

impl Drop for CallingOut {
    fn drop(&mut self) {
        CALLS.with(|calls| calls.borrow_mut().pop());
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cards: Vec<_> = self.cards.iter().map(|card| card.figures.label()).collect();
        f.debug_struct("Manager")
            .field("cards", &cards)
            .field("knobs", &self.knobs())
            .field("entries", &self.ledger.snapshot().len())
            .finish_non_exhaustive()
    }
}
