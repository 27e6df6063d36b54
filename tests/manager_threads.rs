//! Several threads at one manager: nobody waits for ever, nobody sees a half-made ledger, and patchers may
//! call back.
//!
//! A test that could hang runs on a thread of its own and is given a minute: the time only ends a test that
//! has already failed.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod manager_support;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use manager_support::*;
use vram_pager::manager::{FreeOptions, LoadOptions, LoadedModel, Manager, ManagerError, UNLIMITED};
use vram_pager::patcher::{LoadBudget, ModelPatcher, ModelUuid, PatcherError, Place, SizedModel};

/// Runs `work` and fails if it hangs.
fn within_a_minute<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    let worker = thread::spawn(move || done.send(work()).unwrap());
    match result.recv_timeout(Duration::from_secs(60)) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a deadlock: nothing came back within a minute"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(worker.join().unwrap_err());
        }
    }
}

fn shared_manager(mib: u64) -> (Arc<Manager>, Arc<vram_pager::patcher::SizedCard>) {
    let (manager, card) = one_card(mib);
    (Arc::new(manager), card)
}

#[test]
fn a_worker_may_ask_its_parent_for_room_while_the_parent_waits_for_the_worker() {
    within_a_minute(|| {
        let (manager, card) = shared_manager(8192);
        let stand_in = Probe::new(resident(&card, "stand-in", 4096));
        let (listed, other, incoming): (Shared, Shared, Shared) =
            (stand_in.clone(), resident(&card, "other", 1024), resident(&card, "incoming", 4096));
        load(&manager, &[&other]);
        load(&manager, &[&listed]);
        // The stand-in answers only after the worker's own request, made on another thread of the parent,
        // was answered. It must pass over the stand-in, which is in the load's hands, and free the other.
        let asked = Arc::new(AtomicBool::new(false));
        let (parent, seen) = (Arc::clone(&manager), Arc::clone(&asked));
        stand_in.script.lock().inside_unload = Some(Box::new(move || {
            let served = thread::spawn(move || {
                parent.free_memory(UNLIMITED, Some(GPU), &FreeOptions::default()).map(|gone| labels(&gone))
            });
            assert_eq!(served.join().unwrap().unwrap(), ["other"]);
            seen.store(true, Ordering::SeqCst);
        }));
        // Keeps `other` behind the stand-in in the order of victims.
        let _held = [Arc::clone(&other), Arc::clone(&other)];
        load(&manager, &[&incoming]);
        assert!(asked.load(Ordering::SeqCst), "the stand-in was asked");
        assert_eq!(ledger(&manager)[0], "incoming");
        assert!(!ledger(&manager).contains(&"other".to_owned()));
    });
}

#[test]
fn a_worker_may_ask_while_its_stand_in_is_being_loaded() {
    within_a_minute(|| {
        let (manager, card) = shared_manager(8192);
        let stand_in = Probe::new(resident(&card, "stand-in", 1024));
        let (model, other): (Shared, Shared) = (stand_in.clone(), resident(&card, "other", 1024));
        load(&manager, &[&other]);
        let parent = Arc::clone(&manager);
        stand_in.script.lock().inside_load = Some(Box::new(move || {
            let served = thread::spawn(move || parent.unload_all_models().map(|gone| labels(&gone)));
            assert_eq!(served.join().unwrap().unwrap(), ["other"], "what is being loaded is no victim");
        }));
        load(&manager, &[&model]);
        assert_eq!(ledger(&manager), ["stand-in"]);
    });
}

#[test]
fn a_patcher_may_free_from_inside_its_calls_and_must_not_load() {
    within_a_minute(|| {
        let (manager, card) = shared_manager(8192);
        let probe = Probe::new(resident(&card, "A", 1024));
        let (model, other): (Shared, Shared) = (probe.clone(), resident(&card, "other", 1024));
        load(&manager, &[&other]);
        let (inner, again) = (Arc::clone(&manager), other.clone());
        probe.script.lock().inside_load = Some(Box::new(move || {
            let gone = inner.free_memory(UNLIMITED, Some(GPU), &FreeOptions::default()).unwrap();
            assert_eq!(labels(&gone), ["other"]);
            let refused = inner.load_model_gpu(&again, LoadOptions::default());
            assert!(matches!(refused, Err(ManagerError::Reentrant { .. })), "{refused:?}");
            let refused = inner.use_more_memory(1, &[], GPU);
            assert!(matches!(refused, Err(ManagerError::Reentrant { .. })), "{refused:?}");
        }));
        load(&manager, &[&model]);
        assert_eq!(ledger(&manager), ["A"]);
        load(&manager, &[&other]);
    });
}

#[test]
fn a_load_waits_for_a_thread_that_is_freeing_its_model() {
    within_a_minute(|| {
        let (manager, card) = shared_manager(8192);
        let probe = Probe::new(resident(&card, "A", 1024));
        let model: Shared = probe.clone();
        load(&manager, &[&model]);
        let (entered, is_inside) = mpsc::channel();
        let (let_go, may_go) = mpsc::channel();
        probe.script.lock().inside_unload = Some(Box::new(move || {
            entered.send(()).unwrap();
            may_go.recv().unwrap();
        }));
        let freeing = {
            let manager = Arc::clone(&manager);
            thread::spawn(move || labels(&manager.unload_all_models().unwrap()))
        };
        is_inside.recv().unwrap();
        assert_eq!(ledger(&manager), ["A"], "it is listed until it has left");
        assert!(manager.unload_all_models().unwrap().is_empty(), "a second one passes over it");
        let loading = {
            let (manager, model) = (Arc::clone(&manager), model.clone());
            thread::spawn(move || manager.load_model_gpu(&model, LoadOptions::default()).unwrap())
        };
        let_go.send(()).unwrap();
        assert_eq!(freeing.join().unwrap(), ["A"]);
        loading.join().unwrap();
        assert_eq!(ledger(&manager), ["A"]);
        assert_eq!(model.loaded_size(), 1024 * MIB);
    });
}

#[test]
fn a_patcher_that_panics_leaves_a_ledger_that_works() {
    within_a_minute(|| {
        let (manager, card) = shared_manager(8192);
        let probe = Probe::new(resident(&card, "A", 1024));
        let model: Shared = probe.clone();
        load(&manager, &[&model]);
        for by_load in [true, false] {
            let boom: Box<dyn FnOnce() + Send> = Box::new(|| panic!("the test's own panic"));
            if by_load {
                probe.script.lock().inside_load = Some(boom);
            } else {
                probe.script.lock().inside_unload = Some(boom);
            }
            let (inner, model) = (Arc::clone(&manager), model.clone());
            let panicked = thread::spawn(move || {
                if by_load {
                    drop(inner.load_model_gpu(&model, LoadOptions::default()));
                } else {
                    drop(inner.unload_all_models());
                }
            });
            assert!(panicked.join().is_err());
            assert_eq!(ledger(&manager), ["A"]);
            load(&manager, &[&model_of(&manager)]);
        }
        assert_eq!(labels(&manager.unload_all_models().unwrap()), ["A"]);
    });
}

fn model_of(manager: &Manager) -> Shared {
    manager.loaded_models(false).remove(0)
}

/// A model that asks the manager everything from inside every method, and from its drop.
struct Nosy {
    sizes: Arc<SizedModel>,
    manager: Weak<Manager>,
    asked: Arc<AtomicU64>,
}

thread_local! {
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

impl Nosy {
    fn ask(&self) {
        // Its own answers are among what it asks for.
        if ASKING.replace(true) {
            return;
        }
        if let Some(manager) = self.manager.upgrade() {
            self.asked.fetch_add(1, Ordering::Relaxed);
            manager.stats();
            manager.current_loaded_models();
            manager.loaded_models(true);
            manager.get_free_memory(None).unwrap();
            manager.cleanup_models_gc();
        }
        ASKING.set(false);
    }
}

impl ModelPatcher for Nosy {
    fn model_size(&self) -> u64 {
        self.ask();
        self.sizes.model_size()
    }

    fn loaded_size(&self) -> u64 {
        self.ask();
        self.sizes.loaded_size()
    }

    fn load_device(&self) -> Place {
        self.ask();
        self.sizes.load_device()
    }

    fn is_dynamic(&self) -> bool {
        self.ask();
        false
    }

    fn weights_uuid(&self) -> ModelUuid {
        self.ask();
        self.sizes.weights_uuid()
    }

    fn parent(&self) -> Option<Shared> {
        self.ask();
        None
    }

    fn model_patches_models(&self) -> Vec<Shared> {
        self.ask();
        Vec::new()
    }

    fn partially_load(&self, budget: LoadBudget, force_patch_weights: bool) -> Result<u64, PatcherError> {
        self.ask();
        self.sizes.partially_load(budget, force_patch_weights)
    }

    fn partially_unload(&self, bytes: u64) -> Result<u64, PatcherError> {
        self.ask();
        self.sizes.partially_unload(bytes)
    }

    fn detach(&self, unpatch_weights: bool) -> Result<(), PatcherError> {
        self.ask();
        self.sizes.detach(unpatch_weights)
    }

    fn pinned_size(&self) -> u64 {
        self.ask();
        1
    }

    fn partially_unload_ram(&self, _bytes: u64) -> u64 {
        self.ask();
        0
    }
}

impl Drop for Nosy {
    fn drop(&mut self) {
        self.ask();
    }
}

#[test]
fn no_lock_that_a_reader_takes_is_held_while_a_patcher_is_called_or_dropped() {
    within_a_minute(|| {
        let (manager, card) = shared_manager(8192);
        let asked = Arc::new(AtomicU64::new(0));
        let nosy = |label, mib| -> Shared {
            Arc::new(Nosy {
                sizes: resident(&card, label, mib),
                manager: Arc::downgrade(&manager),
                asked: Arc::clone(&asked),
            })
        };
        manager.set_knobs(|knobs| knobs.page_locked_budget = Some(0));
        let (a, b) = (nosy("A", 4096), nosy("B", 4096));
        load(&manager, &[&a]);
        load(&manager, &[&b, &a]);
        manager.use_more_memory(5, &manager.current_loaded_models(), GPU).unwrap();
        manager.offloaded_memory(&manager.current_loaded_models(), GPU);
        manager.free_memory(5000 * MIB, Some(GPU), &FreeOptions::default()).unwrap();
        drop(a);
        manager.unload_all_models().unwrap();
        let before = asked.load(Ordering::Relaxed);
        load(&manager, &[&b]);
        drop(b);
        assert!(manager.current_loaded_models().is_empty());
        assert!(asked.load(Ordering::Relaxed) > before && before > 20);
    });
}

#[test]
fn readers_see_a_model_that_is_loaded_again_at_every_moment() {
    within_a_minute(|| {
        let (manager, card) = shared_manager(65_536);
        let model = resident(&card, "A", 64);
        let clone: Shared = model.clone_model("A2");
        let model: Shared = model;
        load(&manager, &[&model]);
        let stop = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let (manager, stop) = (Arc::clone(&manager), Arc::clone(&stop));
                thread::spawn(move || {
                    let mut looks = 0_u64;
                    while !stop.load(Ordering::Relaxed) {
                        let entries = manager.current_loaded_models();
                        assert_eq!(entries.len(), 1, "once, and never gone or twice");
                        assert_eq!(entries[0].model_loaded_memory(), 64 * MIB);
                        looks += 1;
                    }
                    looks
                })
            })
            .collect();
        for _ in 0..2000 {
            load(&manager, &[&clone]);
            load(&manager, &[&model]);
        }
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
}

#[test]
fn loads_frees_patch_models_and_deaths_from_many_threads_end_in_a_sound_ledger() {
    within_a_minute(|| {
        let seed = 0x5eed_0000_u64 + u64::from(std::process::id());
        println!("seed {seed}");
        let (manager, card) = shared_manager(8192);
        let lasting: Vec<Arc<SizedModel>> =
            (0..6).map(|index| resident(&card, &format!("m{index}"), 512 + 256 * index)).collect();
        lasting[0].set_patches_models(vec![lasting[1].clone()]);
        let pages = paged(&card, "pages", 2048);
        let threads: Vec<_> = (0..6_u64)
            .map(|number| {
                let (manager, card) = (Arc::clone(&manager), Arc::clone(&card));
                let (lasting, pages) = (lasting.clone(), pages.clone());
                thread::spawn(move || {
                    let mut random = Random(seed ^ (number << 40));
                    for _ in 0..400 {
                        let pick = lasting[random.index(lasting.len())].clone();
                        match random.below(8) {
                            0 | 1 => load(&manager, &[&(pick as Shared)]),
                            2 => load(&manager, &[&(pick as Shared), &(pages.clone() as Shared)]),
                            3 => {
                                let clone: Shared = pick.clone_model("clone");
                                load(&manager, &[&clone]);
                            }
                            4 => {
                                let brief: Shared = resident(&card, "brief", 256);
                                load(&manager, &[&brief]);
                            }
                            5 => pages.touch(random.below(2048) * MIB),
                            6 => {
                                let ask = random.below(9000) * MIB;
                                manager.free_memory(ask, None, &FreeOptions::default()).unwrap();
                            }
                            _ => {
                                let entries = manager.current_loaded_models();
                                let mut uuids: Vec<_> = entries
                                    .iter()
                                    .filter_map(LoadedModel::model)
                                    .map(|model| model.weights_uuid())
                                    .collect();
                                uuids.sort_unstable();
                                let listed = uuids.len();
                                uuids.dedup();
                                assert_eq!(listed, uuids.len(), "one entry a set of weights");
                            }
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        manager.cleanup_models_gc();
        let listed: u64 = manager.current_loaded_models().iter().map(LoadedModel::model_loaded_memory).sum();
        assert_eq!(card.loaded(), listed, "every byte on the card is a listed model's");
        manager.unload_all_models().unwrap();
        assert!(manager.current_loaded_models().is_empty());
        assert_eq!(card.loaded(), 0);
    });
}
