//! [`ResidentPatcher`]: one handle to a resident model.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::error::ResidentError;
use super::guard::ModuleGuard;
use super::rows::ModuleRows;
use super::weights::{ResidentFigures, ResidentOptions, Weights};
use crate::device::{SharedDevice, Stream};
use crate::pager::{PatchSet, TensorPatch};
use crate::patcher::lora::{Lora, LoraError, lora_patches};
use crate::patcher::{LoadBudget, ModelPatcher, ModelUuid, PatcherCounters, PatcherError, Place};
use crate::weights::{PageLayout, TensorId, TensorIndex, UnitId};

/// A model whose modules are on the card as far as it was given room, for
/// [`crate::manager::Manager::load_models_gpu`].
///
/// Clones share the weights and the loaded size, and differ in patches. A runner asks for a module by
/// [`Self::module`]; one that is not on the card passes through a streaming buffer. A module is what the pager calls
/// a unit, and has the same [`UnitId`].
pub struct ResidentPatcher {
    weights: Arc<Weights>,
    place: Place,
    parent: Option<Arc<ResidentPatcher>>,
    patches: Mutex<Option<Arc<PatchSet>>>,
}

impl ResidentPatcher {
    /// Opens a model on a card, which the manager knows as `place`. Nothing is read or taken yet.
    ///
    /// # Errors
    /// A layout that cannot be made (a compute type that is not floating point), no stream.
    pub fn open(
        device: &SharedDevice,
        index: Arc<TensorIndex>,
        place: Place,
        options: &ResidentOptions,
    ) -> Result<Arc<Self>, ResidentError> {
        let weights = Arc::new(Weights::open(device, index, options)?);
        Ok(Arc::new(Self { weights, place, parent: None, patches: Mutex::default() }))
    }

    /// Another handle to the same weights, with the patches that this one has now. Its ledger entry goes
    /// to this patcher, which it keeps alive, when it dies.
    #[must_use]
    pub fn clone_model(self: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self {
            weights: Arc::clone(&self.weights),
            place: self.place,
            parent: Some(Arc::clone(self)),
            patches: Mutex::new(self.patches()),
        })
    }

    /// The files' index.
    pub fn index(&self) -> &Arc<TensorIndex> {
        &self.weights.index
    }

    /// Where each tensor lies in its module, and its type on the card.
    pub fn layout(&self) -> &Arc<PageLayout> {
        &self.weights.layout
    }

    /// The card.
    pub fn device(&self) -> &SharedDevice {
        &self.weights.device
    }

    /// What the model holds.
    pub fn figures(&self) -> ResidentFigures {
        self.weights.figures()
    }

    /// Whether a module is on the card, rather than streamed.
    pub fn is_loaded(&self, unit: UnitId) -> bool {
        self.weights.is_loaded(unit)
    }

    /// Its patches.
    pub fn patches(&self) -> Option<Arc<PatchSet>> {
        self.patches.lock().clone()
    }

    /// Replaces its patches; takes effect at the next load or module. While a guard of a module's old
    /// version is held, asking for the new one fails.
    pub fn set_patches(&self, patches: Option<Arc<PatchSet>>) {
        *self.patches.lock() = patches;
    }

    /// A set of patches for this model, see [`Self::set_patches`].
    ///
    /// # Errors
    /// As [`PatchSet::new`].
    pub fn patch_set(&self, patches: Vec<TensorPatch>) -> Result<Arc<PatchSet>, ResidentError> {
        Ok(PatchSet::for_layout(self.index(), self.layout(), patches)?)
    }

    /// Replaces its patches by those of LoRAs, applied in this order; none at all removes them. Answers what
    /// of the files matched nothing.
    ///
    /// # Errors
    /// As [`lora_patches`], and [`LoraError::Pager`] where the model's types cannot be patched. The patches
    /// stay what they were.
    pub fn set_loras(&self, loras: &[Lora<'_>]) -> Result<Vec<String>, LoraError> {
        let found = lora_patches(self.index(), loras)?;
        let set = if loras.is_empty() {
            None
        } else {
            Some(PatchSet::for_layout(self.index(), self.layout(), found.patches)?)
        };
        self.set_patches(set);
        Ok(found.unmatched)
    }

    /// A module with its patches: on the card, or arriving there ahead of what the stream is given next.
    ///
    /// # Errors
    /// [`ResidentError::Held`] if guards hold both places of the streaming buffer, or an old version of the
    /// module; the device's out-of-memory if there is no room for the buffer; a file that changed.
    pub fn module(&self, unit: UnitId, stream: &Arc<Stream>) -> Result<ModuleGuard<'_>, ResidentError> {
        self.weights.module(unit, stream, self.patches().as_ref())
    }

    /// As [`Self::module`], but waits until `deadline` for guards of others. A caller that holds a guard
    /// itself may wait for itself, and should use [`Self::module`].
    pub fn module_when_free(
        &self,
        unit: UnitId,
        stream: &Arc<Stream>,
        deadline: Instant,
    ) -> Result<ModuleGuard<'_>, ResidentError> {
        let began = Instant::now();
        loop {
            let held = match self.module(unit, stream) {
                Err(error) if error.is_held() => error,
                other => return other,
            };
            let now = Instant::now();
            if now >= deadline {
                return Err(ResidentError::Deadline {
                    waited_ms: u64::try_from((now - began).as_millis()).unwrap_or(u64::MAX),
                    last: Box::new(held),
                });
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Some rows of a tensor's first dimension, with its patches, packed in the order given. A row may be
    /// named more than once. The module need not be on the card.
    pub fn rows(
        &self,
        tensor: TensorId,
        rows: &[u64],
        stream: &Arc<Stream>,
    ) -> Result<ModuleRows, ResidentError> {
        self.weights.rows(tensor, rows, stream, self.patches().as_ref())
    }

    fn failed(&self, what: &'static str, error: ResidentError) -> PatcherError {
        match error {
            ResidentError::Device(error) => PatcherError::Device(error),
            error => PatcherError::Failed { model: self.label(), what, source: Box::new(error) },
        }
    }
}

impl ModelPatcher for ResidentPatcher {
    fn label(&self) -> String {
        self.weights.name().to_owned()
    }

    fn model_size(&self) -> u64 {
        self.weights.size()
    }

    fn loaded_size(&self) -> u64 {
        self.weights.loaded()
    }

    fn load_device(&self) -> Place {
        self.place
    }

    fn weights_uuid(&self) -> ModelUuid {
        self.weights.uuid
    }

    fn parent(&self) -> Option<Arc<dyn ModelPatcher>> {
        self.parent.as_ref().map(|parent| Arc::clone(parent) as Arc<dyn ModelPatcher>)
    }

    fn partially_load(&self, budget: LoadBudget, force_patch_weights: bool) -> Result<u64, PatcherError> {
        let patches = self.patches();
        let loaded = self.weights.load(budget, force_patch_weights, patches.as_ref());
        loaded.map_err(|error| self.failed("load its modules", error))
    }

    fn partially_unload(&self, bytes: u64) -> Result<u64, PatcherError> {
        self.weights.unload(bytes).map_err(|error| self.failed("unload modules", error))
    }

    fn detach(&self, unpatch_weights: bool) -> Result<(), PatcherError> {
        if unpatch_weights {
            self.weights.detach().map_err(|error| self.failed("leave the card", error))?;
        }
        Ok(())
    }

    fn pinned_size(&self) -> u64 {
        self.weights.page_locked()
    }

    fn partially_unload_ram(&self, bytes: u64) -> u64 {
        self.weights.unload_ram(bytes).unwrap_or(0)
    }

    fn counters(&self) -> PatcherCounters {
        let counts = &self.weights.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        PatcherCounters {
            hits: read(&counts.hits),
            misses: read(&counts.misses),
            bytes_to_device: read(&counts.copied_bytes),
        }
    }
}

impl fmt::Debug for ResidentPatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResidentPatcher").field("weights", &self.weights).finish_non_exhaustive()
    }
}
