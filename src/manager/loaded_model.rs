//! [`LoadedModel`], an entry of the ledger: one model, where it was loaded to, and whether it is in use.
//!
//! An entry holds its patcher weakly. It turns the manager's questions into calls on the patcher.
//!
//! Locking: one short lock around the weak references, never held while a patcher is called. The state
//! and the flag are atomics.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::patcher::{LoadBudget, ModelPatcher, ModelUuid, PatcherError, Place};

/// How an entry stands to the ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Standing {
    /// Made, but in no ledger.
    Unlisted = 0,
    /// Listed and free to be chosen.
    Listed = 1,
    /// Listed, and one thread that frees is changing it.
    Claimed = 2,
    /// Listed, and the load in progress is about to move it to the front or replace it.
    Loading = 3,
    /// No longer listed.
    Gone = 4,
}

impl Standing {
    fn of(value: u8) -> Self {
        match value {
            0 => Self::Unlisted,
            1 => Self::Listed,
            2 => Self::Claimed,
            3 => Self::Loading,
            _ => Self::Gone,
        }
    }
}

/// An entry of the ledger. Clones are the same entry.
#[derive(Clone)]
pub struct LoadedModel {
    inner: Arc<Inner>,
}

struct Inner {
    device: Place,
    weights: ModelUuid,
    currently_used: AtomicBool,
    standing: AtomicU8,
    /// Its key in the ledger; smaller is nearer the front.
    position: AtomicI64,
    handle: Mutex<Handle>,
}

/// The patcher and those it was cloned from, nearest first.
struct Handle {
    model: Weak<dyn ModelPatcher>,
    ancestors: Vec<Weak<dyn ModelPatcher>>,
}

impl LoadedModel {
    /// An entry for `model` on its load device, in no ledger yet.
    pub fn new(model: &Arc<dyn ModelPatcher>) -> Self {
        let mut ancestors: Vec<Weak<dyn ModelPatcher>> = Vec::new();
        let mut next = model.parent();
        while let Some(parent) = next {
            // A patcher that claims to descend from itself must not keep us here for ever.
            if ancestors.iter().any(|known| known.as_ptr().cast::<()>() as usize == address_of(&parent)) {
                break;
            }
            ancestors.push(Arc::downgrade(&parent));
            next = parent.parent();
        }
        Self {
            inner: Arc::new(Inner {
                device: model.load_device(),
                weights: model.weights_uuid(),
                currently_used: AtomicBool::new(true),
                standing: AtomicU8::new(Standing::Unlisted as u8),
                position: AtomicI64::new(0),
                handle: Mutex::new(Handle { model: Arc::downgrade(model), ancestors }),
            }),
        }
    }

    /// The patcher, or the nearest ancestor that lives; `None` if all are dead.
    pub fn model(&self) -> Option<Arc<dyn ModelPatcher>> {
        // What leaves the handle is dropped after the lock is: a patcher's drop may be its last, and is
        // anyone's code.
        loop {
            let ancestor = {
                let mut handle = self.inner.handle.lock();
                if let Some(model) = handle.model.upgrade() {
                    return Some(model);
                }
                if handle.ancestors.is_empty() {
                    return None;
                }
                let next = handle.ancestors.remove(0);
                std::mem::replace(&mut handle.model, next)
            };
            drop(ancestor);
        }
    }

    /// Whether the patcher and all that it was cloned from are gone. Such an entry leaves the ledger at
    /// the next call.
    pub fn is_dead(&self) -> bool {
        let handle = self.inner.handle.lock();
        handle.model.strong_count() == 0
            && handle.ancestors.iter().all(|ancestor| ancestor.strong_count() == 0)
    }

    /// Where the model was loaded to.
    pub fn device(&self) -> Place {
        self.inner.device
    }

    /// Whether the last load named it and nothing has asked it to give memory since.
    pub fn currently_used(&self) -> bool {
        self.inner.currently_used.load(Ordering::Relaxed)
    }

    pub(super) fn set_currently_used(&self, used: bool) {
        self.inner.currently_used.store(used, Ordering::Relaxed);
    }

    /// The bytes of the model; 0 if it is dead.
    pub fn model_memory(&self) -> u64 {
        self.model().map_or(0, |model| model.model_size())
    }

    /// The bytes of it on the card; 0 if it is dead.
    pub fn model_loaded_memory(&self) -> u64 {
        self.model().map_or(0, |model| model.loaded_size())
    }

    /// The bytes of it off the card; 0 if it is dead. A model never loaded is wholly off.
    pub fn model_offloaded_memory(&self) -> u64 {
        self.model().map_or(0, |model| model.model_size().saturating_sub(model.loaded_size()))
    }

    /// The bytes that loading it to `device` still needs: what is off the card if that is where it loads
    /// to, else all of it. 0 if it is dead.
    pub fn model_memory_required(&self, device: Place) -> u64 {
        self.model().map_or(0, |model| memory_required(&*model, device))
    }

    /// Loads the model within `budget`; answers the bytes added, 0 if it is dead.
    ///
    /// This is the entry's side of [`Manager::load_models_gpu`](super::Manager::load_models_gpu), which
    /// also makes room and lists the entry; called alone it does neither.
    pub fn model_load(&self, budget: LoadBudget, force_patch_weights: bool) -> Result<u64, PatcherError> {
        match self.model() {
            Some(model) => model.partially_load(budget, force_patch_weights),
            None => Ok(0),
        }
    }

    /// Unloads `memory_to_free` bytes, or the whole model for `None` or as much as is loaded. Answers
    /// whether the model left its card, so that its entry must leave the ledger.
    ///
    /// If less is asked than is loaded, a partial unload is tried. If that gives less than was asked, or
    /// fails, the model is detached after all. `unpatch_weights` is passed to
    /// [`ModelPatcher::detach`].
    pub fn model_unload(
        &self,
        memory_to_free: Option<u64>,
        unpatch_weights: bool,
    ) -> Result<bool, PatcherError> {
        let Some(model) = self.model() else { return Ok(true) };
        if let Some(bytes) = memory_to_free
            && bytes < model.loaded_size()
        {
            match model.partially_unload(bytes) {
                Ok(freed) if freed >= bytes => return Ok(false),
                Ok(freed) => {
                    tracing::debug!(
                        model = model.label(),
                        bytes,
                        freed,
                        "a short answer: unloading it whole"
                    );
                }
                Err(error) => {
                    tracing::warn!(model = model.label(), bytes, %error, "partial unload failed: unloading it whole");
                }
            }
        }
        model.detach(unpatch_weights)?;
        Ok(true)
    }

    /// Lets the model take up to `extra` more bytes of its card; answers the bytes added, 0 if it is dead.
    pub fn model_use_more_vram(&self, extra: u64) -> Result<u64, PatcherError> {
        let budget = LoadBudget::of_bytes(i64::try_from(extra).unwrap_or(i64::MAX));
        self.model_load(budget, false)
    }

    /// Whether the patcher died, so that the entry is an ancestor's or nobody's.
    pub(super) fn patcher_died(&self) -> bool {
        self.references() == 0
    }

    /// Strong references to the patcher, all of them others'.
    pub(super) fn references(&self) -> usize {
        self.inner.handle.lock().model.strong_count()
    }

    /// The identity of the weights.
    pub(super) fn weights(&self) -> ModelUuid {
        self.inner.weights
    }

    /// The address of the patcher, which is its identity while the entry lives.
    pub(super) fn patcher_address(&self) -> usize {
        self.inner.handle.lock().model.as_ptr().cast::<()>() as usize
    }

    pub(super) fn standing(&self) -> Standing {
        Standing::of(self.inner.standing.load(Ordering::Acquire))
    }

    pub(super) fn set_standing(&self, standing: Standing) {
        self.inner.standing.store(standing as u8, Ordering::Release);
    }

    /// Moves a listed entry into the hands of the calling thread.
    pub(super) fn try_take(&self, to: Standing) -> bool {
        let (from, to) = (Standing::Listed as u8, to as u8);
        self.inner.standing.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    pub(super) fn position(&self) -> i64 {
        self.inner.position.load(Ordering::Relaxed)
    }

    pub(super) fn set_position(&self, position: i64) {
        self.inner.position.store(position, Ordering::Relaxed);
    }
}

/// The bytes that loading `model` to `device` still needs.
pub(super) fn memory_required(model: &dyn ModelPatcher, device: Place) -> u64 {
    if model.load_device() == device {
        model.model_size().saturating_sub(model.loaded_size())
    } else {
        model.model_size()
    }
}

/// The address of a patcher, which is its identity.
pub(super) fn address_of(model: &Arc<dyn ModelPatcher>) -> usize {
    Arc::as_ptr(model).cast::<()>() as usize
}

/// Two handles are equal if they are the same entry.
impl PartialEq for LoadedModel {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for LoadedModel {}

impl fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedModel")
            .field("device", &self.device())
            .field("currently_used", &self.currently_used())
            .field("dead", &self.is_dead())
            .finish_non_exhaustive()
    }
}
