//! The trait that the manager loads models through, and the values that pass through it.
//!
//! Owns values only, apart from one process-wide counter of identities. Takes no lock.

#![deny(unsafe_code)]

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::device::DeviceError;

/// Where a model can be: in host memory, or on one of a manager's cards.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Place {
    /// Host memory. Nothing is admitted or freed here.
    #[default]
    Cpu,
    /// A card, by its place in the manager's list; 0 is the default device.
    Card(u32),
}

impl Place {
    /// Whether this is host memory.
    pub fn is_cpu(self) -> bool {
        self == Self::Cpu
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Card(number) => write!(f, "card {number}"),
        }
    }
}

/// An identity that is unique in this process and, in practice, among processes.
///
/// A set of weights has one, and so has a family of clones. A stand-in for a worker's model makes a fresh
/// one for every generation of the worker.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelUuid(u128);

impl ModelUuid {
    /// An identity that was never given before.
    #[must_use]
    pub fn fresh() -> Self {
        static PROCESS: OnceLock<u64> = OnceLock::new();
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let process = *PROCESS.get_or_init(|| RandomState::new().hash_one(std::process::id()));
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self((u128::from(process) << 64) | u128::from(number))
    }

    /// The identity with this value, for one that was agreed on with another process.
    pub fn from_u128(value: u128) -> Self {
        Self(value)
    }

    /// The value.
    pub fn as_u128(self) -> u128 {
        self.0
    }
}

impl fmt::Debug for ModelUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for ModelUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// How much of a model one load may bring to its card.
///
/// The function reference passes one float with three meanings; here each has its own name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LoadBudget {
    /// The whole model, whatever is free. The reference's `0`, which it rewrites to `1e32`.
    Everything,
    /// This many bytes *beyond* what is loaded now. A negative number asks the patcher to give back that
    /// many. Never zero: that is [`LoadBudget::Nothing`].
    Bytes(i64),
    /// Nothing beyond what is loaded now; what is loaded stays. The reference's `0.1`.
    Nothing,
}

impl LoadBudget {
    /// The budget of `extra` bytes beyond what is loaded; zero becomes [`LoadBudget::Nothing`].
    pub fn of_bytes(extra: i64) -> Self {
        if extra == 0 { Self::Nothing } else { Self::Bytes(extra) }
    }
}

impl fmt::Display for LoadBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Everything => f.write_str("everything"),
            Self::Bytes(bytes) => write!(f, "{bytes} bytes"),
            Self::Nothing => f.write_str("nothing"),
        }
    }
}

/// What a patcher answers instead of a result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PatcherError {
    /// The card refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The patcher does not do this at all.
    #[error("{model} cannot {what}: {why}")]
    Refused {
        /// The model's label.
        model: String,
        /// What was asked.
        what: &'static str,
        /// Why not, and what to do instead.
        why: String,
    },
    /// Any other failure, with its cause.
    #[error("{model} failed to {what}: {source}")]
    Failed {
        /// The model's label.
        model: String,
        /// What was asked.
        what: &'static str,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl PatcherError {
    /// Whether giving memory back and asking again may help.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Device(error) if error.is_out_of_memory())
    }
}

/// What a patcher counted since it was made, for reports. Zero where nothing is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PatcherCounters {
    /// Requests for weights that found them on the card.
    pub hits: u64,
    /// Requests for weights that had to bring something.
    pub misses: u64,
    /// Bytes copied to the card.
    pub bytes_to_device: u64,
}

/// A model as the manager sees it.
///
/// Only what the manager calls is here. Applying a patch, cloning and running are a patcher's own
/// business: not every patcher can do them (a stand-in for a worker's model does neither).
///
/// # Implementing it
/// Seven methods are required: the two sizes, the device, the identity, and the three that change what is
/// loaded. Everything else has a default that is right for an ordinary model that is not paged, has no
/// clones and page-locks no host memory.
///
/// - **Sizes are the truth.** [`loaded_size`](Self::loaded_size) counts bytes that are on the card now;
///   [`partially_unload`](Self::partially_unload) answers what it gave back, never more. The manager acts
///   on a short answer (it unloads the model whole), so a short answer is safe and a long one is not.
/// - **Errors while freeing do no harm.** The manager treats a failed partial unload as one that freed
///   nothing, and detaches. A load fails loudly.
/// - **Calling back.** A patcher may call the manager's reading functions and `free_memory` from inside any
///   of its methods, on this or another thread. It must not load a model from there: loads are
///   admitted one at a time.
/// - **Dropping** a patcher needs nothing of the manager, which finds out by itself.
///
/// All methods may be called from any thread. The manager never makes two *changing* calls to one listed
/// model at a time; readings may come at any moment, and should not block.
pub trait ModelPatcher: Send + Sync {
    /// A name for messages and traces.
    fn label(&self) -> String {
        format!("model {}", self.weights_uuid())
    }

    /// The bytes of all weights.
    fn model_size(&self) -> u64;

    /// The bytes of it that are on the load device now. Clones answer alike: they share the weights.
    fn loaded_size(&self) -> u64;

    /// Where the model runs.
    fn load_device(&self) -> Place;

    /// Where what is taken off the card is kept.
    fn offload_device(&self) -> Place {
        Place::Cpu
    }

    /// Whether the model is paged: loading only prepares, and residency is decided at fault time.
    fn is_dynamic(&self) -> bool {
        false
    }

    /// The identity of the weights. Two patchers with the same one are clones and share loaded bytes.
    fn weights_uuid(&self) -> ModelUuid;

    /// The identity of the family: clones have it in common, and so have copies of the weights that were
    /// made for other cards.
    fn clone_base_uuid(&self) -> ModelUuid {
        self.weights_uuid()
    }

    /// The patcher that this one was cloned from. When a listed clone dies, its entry goes to the nearest
    /// ancestor that lives.
    fn parent(&self) -> Option<Arc<dyn ModelPatcher>> {
        None
    }

    /// Models that must be loaded whenever this one is (a controlnet, the models of hooks).
    fn model_patches_models(&self) -> Vec<Arc<dyn ModelPatcher>> {
        Vec::new()
    }

    /// Models that belong to this one and leave with it; the manager follows theirs too.
    fn additional_models(&self) -> Vec<Arc<dyn ModelPatcher>> {
        Vec::new()
    }

    /// Brings weights to the card within `budget` (or gives some back, see [`LoadBudget`]) and attaches
    /// patches; answers the bytes added, 0 where bytes were given back. `force_patch_weights` writes the
    /// patches into the weights themselves, with backups.
    ///
    /// A paged model ignores both: it reserves addresses, becomes the model of highest priority and
    /// attaches its patches.
    ///
    /// After an error the manager calls [`detach`](Self::detach), which must bring the bytes back.
    fn partially_load(&self, budget: LoadBudget, force_patch_weights: bool) -> Result<u64, PatcherError>;

    /// Gives back at least `bytes` of what is loaded if it can, and answers how many it truly gave back.
    fn partially_unload(&self, bytes: u64) -> Result<u64, PatcherError>;

    /// Takes the model off its card. With `unpatch_weights` false only this handle lets go, because
    /// another handle to the same weights (or this one again) is about to be loaded: the bytes stay.
    fn detach(&self, unpatch_weights: bool) -> Result<(), PatcherError>;

    /// Page-locked host memory that this model's weights hold, in bytes.
    fn pinned_size(&self) -> u64 {
        0
    }

    /// Gives back page-locked host memory, at least `bytes` if it can; answers what it truly gave back.
    fn partially_unload_ram(&self, bytes: u64) -> u64 {
        let _ = bytes;
        0
    }

    /// Bytes on the load device that *other* paged models would give up if this one asked for them.
    /// The patcher's view of free memory is the manager's figure and these.
    fn reclaimable(&self) -> u64 {
        0
    }

    /// What the patcher counted, for reports.
    fn counters(&self) -> PatcherCounters {
        PatcherCounters::default()
    }
}

impl dyn ModelPatcher {
    /// Whether both are handles to one set of weights. True of a model and itself.
    pub fn is_clone(&self, other: &dyn ModelPatcher) -> bool {
        self.weights_uuid() == other.weights_uuid()
    }
}

impl fmt::Debug for dyn ModelPatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelPatcher").field("label", &self.label()).finish_non_exhaustive()
    }
}

/// What a manager's settings allow whoever pages on one of its cards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CardLimits {
    /// Bytes of the card to leave free, device wide: the headroom, and what a cap takes away.
    pub leave_free: u64,
    /// Bytes of host memory that may be page-locked: the page-locked budget, in equal parts for all.
    pub page_locked: u64,
}

/// Device memory that is held but backs nothing, and can go back to the driver at once: frames of a pager
/// that no page uses.
///
/// Registered with a manager for one card. Its bytes count as free there.
pub trait IdleCache: Send + Sync {
    /// The bytes held idle now.
    fn idle_bytes(&self) -> u64;

    /// Hands all of them back to the driver.
    fn release(&self);

    /// Takes the manager's settings over. Called when it is registered and whenever they change; a pager
    /// obeys them at once, and forgets what it was opened with. Must not call the manager.
    fn apply_limits(&self, limits: CardLimits) {
        let _ = limits;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_never_given_twice() {
        let (a, b) = (ModelUuid::fresh(), ModelUuid::fresh());
        assert_ne!(a, b);
        assert_eq!(a, ModelUuid::from_u128(a.as_u128()));
    }

    #[test]
    fn a_budget_of_no_bytes_is_nothing_not_everything() {
        assert_eq!(LoadBudget::of_bytes(0), LoadBudget::Nothing);
        assert_eq!(LoadBudget::of_bytes(-1), LoadBudget::Bytes(-1));
    }
}
