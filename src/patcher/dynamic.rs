//! The paged patcher: a model of the pager as the manager sees it.
//!
//! Loading only prepares: the model becomes the most important one of its card, and no byte moves until
//! the first fault. What is loaded are resident pages; a partial unload gives back exactly the pages it
//! says. Holds no lock of its own; the pager's control lock is taken inside its calls.

#![deny(unsafe_code)]

use std::sync::Arc;

use super::model::{
    CardLimits, IdleCache, LoadBudget, ModelPatcher, ModelUuid, PatcherCounters, PatcherError, Place,
};
use crate::device::DeviceError;
use crate::pager::{PagedModel, Pager, PagerError};

/// A paged model, for [`crate::manager::Manager::load_models_gpu`].
pub struct PagedPatcher {
    model: Arc<PagedModel>,
    place: Place,
    size: u64,
    uuid: ModelUuid,
}

impl PagedPatcher {
    /// The patcher of `model`, whose card the manager knows as `place`.
    pub fn new(model: &Arc<PagedModel>, place: Place) -> Arc<Self> {
        Arc::new(Self {
            model: Arc::clone(model),
            place,
            size: model.figures().weights_bytes,
            uuid: ModelUuid::fresh(),
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<PagedModel> {
        &self.model
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

    fn partially_load(&self, _budget: LoadBudget, _force_patch_weights: bool) -> Result<u64, PatcherError> {
        self.model.activate(None).map_err(|error| self.failed("become active", error))?;
        Ok(0)
    }

    fn partially_unload(&self, bytes: u64) -> Result<u64, PatcherError> {
        self.model.unload(bytes).map_err(|error| self.failed("unload pages", error))
    }

    fn detach(&self, unpatch_weights: bool) -> Result<(), PatcherError> {
        if unpatch_weights {
            self.model.unload(u64::MAX).map_err(|error| self.failed("unload its pages", error))?;
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
