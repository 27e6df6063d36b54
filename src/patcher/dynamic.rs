//! The paged patcher: a model of the pager as the manager sees it.
//!
//! Loading only prepares: the model becomes the most important one of its card, and no byte moves until
//! the first fault. What is loaded are resident pages; a partial unload gives back exactly the pages it
//! says. Clones share all of that and have patches of their own.
//!
//! Locking: one short lock around the patches, held over no call; the pager's control lock is taken inside
//! the pager's calls.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::lora::{Lora, LoraError, lora_patches};
use super::model::{
    CardLimits, IdleCache, LoadBudget, ModelPatcher, ModelUuid, PatcherCounters, PatcherError, Place,
};
use crate::device::DeviceError;
use crate::pager::{Guard, PagedModel, Pager, PagerError, PagerStream, PatchSet, RowsGuard};
use crate::weights::{TensorId, UnitId};

/// A paged model, for [`crate::manager::Manager::load_models_gpu`].
///
/// Clones share the model and its pages and differ in patches. Faults through a patcher give weights with
/// its patches: where another clone's are attached, they are exchanged first, and what the two differ in
/// is loaded anew.
pub struct PagedPatcher {
    model: Arc<PagedModel>,
    place: Place,
    size: u64,
    uuid: ModelUuid,
    parent: Option<Arc<PagedPatcher>>,
    patches: Mutex<Option<Arc<PatchSet>>>,
}

impl fmt::Debug for PagedPatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, place, uuid, .. } = self;
        let patches = self.patches().map(|patches| patches.version());
        let mut shown = f.debug_struct("PagedPatcher");
        shown.field("model", model).field("place", place).field("uuid", uuid).field("patches", &patches);
        shown.finish_non_exhaustive()
    }
}

impl PagedPatcher {
    /// The patcher of `model`, whose card the manager knows as `place`.
    pub fn new(model: &Arc<PagedModel>, place: Place) -> Arc<Self> {
        Arc::new(Self {
            model: Arc::clone(model),
            place,
            size: model.figures().weights_bytes,
            uuid: ModelUuid::fresh(),
            parent: None,
            patches: Mutex::default(),
        })
    }

    /// Another handle to the same weights, with the patches that this one has now. Its ledger entry goes
    /// to this patcher, which it keeps alive, when it dies.
    #[must_use]
    pub fn clone_model(self: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self {
            model: Arc::clone(&self.model),
            place: self.place,
            size: self.size,
            uuid: self.uuid,
            parent: Some(Arc::clone(self)),
            patches: Mutex::new(self.patches()),
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<PagedModel> {
        &self.model
    }

    /// Its patches.
    pub fn patches(&self) -> Option<Arc<PatchSet>> {
        self.patches.lock().clone()
    }

    /// Replaces its patches; takes effect at the next load or fault. Guards of the old ones stay valid, and
    /// a fault of a unit that such a guard holds fails until it is released.
    pub fn set_patches(&self, patches: Option<Arc<PatchSet>>) {
        *self.patches.lock() = patches;
    }

    /// Replaces its patches by those of LoRAs, applied in this order; none at all removes them. Answers what
    /// of the files matched nothing.
    ///
    /// # Errors
    /// As [`lora_patches`], and [`LoraError::Pager`] where the model's types cannot be patched. The patches
    /// stay what they were.
    pub fn set_loras(&self, loras: &[Lora<'_>]) -> Result<Vec<String>, LoraError> {
        let found = lora_patches(self.model.index(), loras)?;
        let set = if loras.is_empty() { None } else { Some(PatchSet::new(&self.model, found.patches)?) };
        self.set_patches(set);
        Ok(found.unmatched)
    }

    /// As [`PagedModel::fault`], with its patches.
    pub fn fault<'m>(&'m self, unit: UnitId, stream: &'m PagerStream) -> Result<Guard<'m>, PagerError> {
        self.model.fault_with(self.patches().as_ref(), unit, stream)
    }

    /// As [`PagedModel::fault_piece`], with its patches.
    pub fn fault_piece<'m>(
        &'m self,
        unit: UnitId,
        piece: u32,
        stream: &'m PagerStream,
    ) -> Result<Guard<'m>, PagerError> {
        self.model.fault_piece_with(self.patches().as_ref(), unit, piece, stream)
    }

    /// As [`PagedModel::fault_rows`], with its patches.
    pub fn fault_rows<'m>(
        &'m self,
        tensor: TensorId,
        rows: &[u64],
        stream: &'m PagerStream,
    ) -> Result<RowsGuard<'m>, PagerError> {
        self.model.fault_rows_with(self.patches().as_ref(), tensor, rows, stream)
    }

    /// Brings everything to the card that the plan keeps there; the explicit way to load at once what
    /// faults would load later.
    pub fn prefetch_all(&self) -> Result<(), PatcherError> {
        self.model.prefetch_all().map_err(|error| self.failed("bring its pages in", error))
    }

    fn failed(&self, what: &'static str, error: PagerError) -> PatcherError {
        match error {
            PagerError::Device(error) => PatcherError::Device(error),
            error => PatcherError::Failed { model: self.label(), what, source: Box::new(error) },
        }
    }
}

impl ModelPatcher for PagedPatcher {
    fn label(&self) -> String {
        self.model.name().to_owned()
    }

    fn model_size(&self) -> u64 {
        self.size
    }

    fn loaded_size(&self) -> u64 {
        self.model.figures().resident_bytes.min(self.size)
    }

    fn load_device(&self) -> Place {
        self.place
    }

    fn is_dynamic(&self) -> bool {
        true
    }

    fn weights_uuid(&self) -> ModelUuid {
        self.uuid
    }

    fn parent(&self) -> Option<Arc<dyn ModelPatcher>> {
        self.parent.as_ref().map(|parent| Arc::clone(parent) as Arc<dyn ModelPatcher>)
    }

    fn partially_load(&self, _budget: LoadBudget, _force_patch_weights: bool) -> Result<u64, PatcherError> {
        self.model.activate(None).map_err(|error| self.failed("become active", error))?;
        let patches = self.patches();
        self.model.attach(patches.as_ref()).map_err(|error| self.failed("attach its patches", error))?;
        Ok(0)
    }

    fn partially_unload(&self, bytes: u64) -> Result<u64, PatcherError> {
        self.model.unload(bytes).map_err(|error| self.failed("unload pages", error))
    }

    fn detach(&self, unpatch_weights: bool) -> Result<(), PatcherError> {
        if unpatch_weights {
            self.model.unload(u64::MAX).map_err(|error| self.failed("unload its pages", error))?;
            // The factors lie on the card too.
            self.model.attach(None).map_err(|error| self.failed("let its patches go", error))?;
        }
        Ok(())
    }

    fn pinned_size(&self) -> u64 {
        self.model.figures().page_locked_bytes
    }

    fn partially_unload_ram(&self, bytes: u64) -> u64 {
        self.model.unload_page_locked(bytes).unwrap_or(0)
    }

    fn reclaimable(&self) -> u64 {
        self.model.pager().reclaimable_bytes(Some(&self.model))
    }

    fn counters(&self) -> PatcherCounters {
        let counts = self.model.counts();
        PatcherCounters {
            hits: counts.hits,
            misses: counts.loaded + counts.streamed,
            bytes_to_device: counts.copied_bytes,
        }
    }
}

impl IdleCache for Pager {
    fn idle_bytes(&self) -> u64 {
        self.figures().idle_bytes
    }

    fn release(&self) {
        if let Err(error) = self.release_idle() {
            defer(self, "release_frame", error);
        }
    }

    fn apply_limits(&self, limits: CardLimits) {
        if let Err(error) = self.set_headroom(limits.leave_free) {
            defer(self, "set_headroom", error);
        }
        if let Err(error) = self.set_page_locked_limit(limits.page_locked) {
            defer(self, "set_page_locked_limit", error);
        }
    }
}

/// Keeps an error that cannot be returned here for the card's next call that can.
fn defer(pager: &Pager, call: &'static str, error: PagerError) {
    pager.device().defer(match error {
        PagerError::Device(error) => error,
        error => DeviceError::InvalidArgument { call, why: error.to_string() },
    });
}
