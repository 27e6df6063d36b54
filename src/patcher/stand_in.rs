//! The stand-in: what the manager sees of a model that a worker process holds on the same card.
//!
//! [`Worker`] is what one run of a worker must answer, and [`StandIn`] turns it into a patcher by these
//! rules:
//!
//! - it tells the truth about bytes, so that a short answer lets the manager escalate;
//! - inside `free_memory` it never fails: a worker that is gone has freed everything that it held;
//! - what loads fails loudly: a worker loads its own weights, and is listed when it has;
//! - it cannot be cloned or patched, and says why;
//! - it is one run's stand-in and stays it: a worker that was started again is another run, with another
//!   identity, so no call meant for the old one reaches the new one.
//!
//! It is listed with [`Manager::list`](crate::manager::Manager::list), as not currently used.
//!
//! Owns nothing but its share of the worker. Takes no lock. May import `units`, `device`.

#![deny(unsafe_code)]

use std::sync::Arc;

use super::model::{LoadBudget, ModelPatcher, ModelUuid, PatcherError, Place};

/// The worker is gone: its process ended, and with it everything that it held on the card.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the worker of {worker} is gone: {why}")]
pub struct WorkerGone {
    /// The worker's label.
    pub worker: String,
    /// What is known of its end.
    pub why: String,
}

/// One run of a worker: what a stand-in needs to know of it. A worker that is started again is another
/// value with another [`generation`](Self::generation).
///
/// All calls may come from any thread, also several at once.
pub trait Worker: Send + Sync {
    /// A name for messages and traces.
    fn label(&self) -> String;

    /// The identity of this run.
    fn generation(&self) -> ModelUuid;

    /// The card that the worker shares with this process.
    fn place(&self) -> Place;

    /// The bytes of all weights.
    fn model_size(&self) -> u64;

    /// The bytes of them on the card, by the worker's last word; 0 once it is gone. Must not block.
    fn loaded_size(&self) -> u64;

    /// Has the worker give back at least `bytes` (`u64::MAX`: all of it, whatever it takes) and answers
    /// what it truly gave back.
    ///
    /// # Errors
    /// The one error is that the worker is gone. Whoever implements this makes that true: a worker that
    /// does not answer in time, or not as it should, is ended before this returns.
    fn unload(&self, bytes: u64) -> Result<u64, WorkerGone>;
}

/// The patcher of a model that one run of a worker holds.
pub struct StandIn {
    worker: Arc<dyn Worker>,
    generation: ModelUuid,
}

impl StandIn {
    /// The stand-in of this run of a worker.
    pub fn new(worker: Arc<dyn Worker>) -> Arc<Self> {
        let generation = worker.generation();
        Arc::new(Self { worker, generation })
    }

    /// The worker's run.
    pub fn worker(&self) -> &Arc<dyn Worker> {
        &self.worker
    }

    /// Always refused: the weights are in another process, and a clone here would share nothing.
    ///
    /// # Errors
    /// [`PatcherError::Refused`], always.
    pub fn clone_model(&self) -> Result<Arc<dyn ModelPatcher>, PatcherError> {
        Err(self.refused(
            "be cloned",
            "its weights are in a worker process, which a clone in this process could not share; \
             ask the worker for a clone",
        ))
    }

    /// Always refused: a patch would have to reach the worker's copy of the weights.
    ///
    /// # Errors
    /// [`PatcherError::Refused`], always.
    pub fn patch(&self) -> Result<(), PatcherError> {
        Err(self.refused(
            "be patched",
            "its weights are in a worker process, out of reach of this process's patches; \
             give the patches to the worker",
        ))
    }

    fn refused(&self, what: &'static str, why: &str) -> PatcherError {
        PatcherError::Refused { model: self.label(), what, why: why.to_owned() }
    }

    /// Has the worker give `bytes` back; a worker that is gone gave back all that it held.
    fn free(&self, bytes: u64) -> u64 {
        let before = self.loaded_size();
        match self.worker.unload(bytes) {
            // Never more than is gone by the worker's own account.
            Ok(freed) => freed.min(before.saturating_sub(self.loaded_size())),
            Err(error) => {
                tracing::warn!(model = self.label(), bytes, freed = before, %error, "it has freed everything");
                before
            }
        }
    }
}

impl ModelPatcher for StandIn {
    fn label(&self) -> String {
        self.worker.label()
    }

    fn model_size(&self) -> u64 {
        self.worker.model_size()
    }

    fn loaded_size(&self) -> u64 {
        self.worker.loaded_size().min(self.worker.model_size())
    }

    fn load_device(&self) -> Place {
        self.worker.place()
    }

    fn offload_device(&self) -> Place {
        Place::Cpu
    }

    fn is_dynamic(&self) -> bool {
        false
    }

    fn weights_uuid(&self) -> ModelUuid {
        self.generation
    }

    /// Gives back where the budget is negative, as every patcher does, and keeps what is loaded where it is
    /// nothing; anything more is refused.
    fn partially_load(&self, budget: LoadBudget, _force_patch_weights: bool) -> Result<u64, PatcherError> {
        match budget {
            LoadBudget::Nothing => Ok(0),
            LoadBudget::Bytes(bytes) if bytes < 0 => {
                self.free(bytes.unsigned_abs());
                Ok(0)
            }
            LoadBudget::Everything | LoadBudget::Bytes(_) => Err(self.refused(
                "be loaded from here",
                "a worker process holds its weights; have the worker load them, then list it",
            )),
        }
    }

    fn partially_unload(&self, bytes: u64) -> Result<u64, PatcherError> {
        Ok(self.free(bytes))
    }

    fn detach(&self, unpatch_weights: bool) -> Result<(), PatcherError> {
        if unpatch_weights {
            self.free(u64::MAX);
        }
        Ok(())
    }
}

impl std::fmt::Debug for StandIn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StandIn")
            .field("worker", &self.worker.label())
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;

    /// A worker that gives back as much as it is told to, and can be gone.
    struct Fake {
        generation: ModelUuid,
        loaded: AtomicU64,
        claims: u64,
        gives: u64,
        gone: AtomicBool,
    }

    impl Fake {
        fn new(loaded: u64, claims: u64, gives: u64) -> Arc<Self> {
            Arc::new(Self {
                generation: ModelUuid::fresh(),
                loaded: AtomicU64::new(loaded),
                claims,
                gives,
                gone: AtomicBool::new(false),
            })
        }
    }

    impl Worker for Fake {
        fn label(&self) -> String {
            "fake".to_owned()
        }

        fn generation(&self) -> ModelUuid {
            self.generation
        }

        fn place(&self) -> Place {
            Place::Card(0)
        }

        fn model_size(&self) -> u64 {
            100
        }

        fn loaded_size(&self) -> u64 {
            self.loaded.load(Ordering::Relaxed)
        }

        fn unload(&self, bytes: u64) -> Result<u64, WorkerGone> {
            if self.gone.load(Ordering::Relaxed) {
                self.loaded.store(0, Ordering::Relaxed);
                return Err(WorkerGone { worker: self.label(), why: "killed".to_owned() });
            }
            let loaded = self.loaded.load(Ordering::Relaxed);
            self.loaded.store(loaded - self.gives.min(bytes).min(loaded), Ordering::Relaxed);
            Ok(self.claims)
        }
    }

    #[test]
    fn an_answer_is_never_longer_than_what_is_gone() {
        let stand_in = StandIn::new(Fake::new(80, 50, 10));
        assert_eq!(stand_in.partially_unload(40).unwrap(), 10);
        assert_eq!(stand_in.loaded_size(), 70);
        assert_eq!(StandIn::new(Fake::new(80, 5, 10)).partially_unload(40).unwrap(), 5);
    }

    #[test]
    fn a_worker_that_is_gone_has_freed_everything_and_nothing_fails() {
        let worker = Fake::new(80, 0, 0);
        worker.gone.store(true, Ordering::Relaxed);
        let stand_in = StandIn::new(worker);
        assert_eq!(stand_in.partially_unload(1).unwrap(), 80);
        assert_eq!(stand_in.partially_unload(1).unwrap(), 0);
        stand_in.detach(true).unwrap();
        assert_eq!(stand_in.loaded_size(), 0);
    }

    #[test]
    fn loading_cloning_and_patching_are_refused_with_the_reason() {
        let stand_in = StandIn::new(Fake::new(80, 0, 0));
        let refusals = [
            stand_in.partially_load(LoadBudget::Everything, false).unwrap_err(),
            stand_in.partially_load(LoadBudget::Bytes(1), false).unwrap_err(),
            stand_in.clone_model().unwrap_err(),
            stand_in.patch().unwrap_err(),
        ];
        for refusal in refusals {
            let text = refusal.to_string();
            assert!(matches!(refusal, PatcherError::Refused { .. }), "{text}");
            assert!(text.contains("fake") && text.contains("worker process"), "{text}");
        }
        assert_eq!(stand_in.partially_load(LoadBudget::Nothing, false).unwrap(), 0);
        assert_eq!(stand_in.loaded_size(), 80);
    }

    #[test]
    fn two_runs_of_one_worker_are_two_models() {
        let (first, second) = (StandIn::new(Fake::new(80, 0, 0)), StandIn::new(Fake::new(80, 0, 0)));
        assert_ne!(first.weights_uuid(), second.weights_uuid());
        assert!(!first.is_dynamic() && !second.is_dynamic());
    }
}
