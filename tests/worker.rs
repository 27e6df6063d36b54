//! A worker process that holds a model on the card that this process uses too, and its stand-in.
//!
//! Each test starts real children of the built program. The emulated card lives in one process, so what a
//! worker says it holds is shown to the parent's card as another's bytes, and what the parent's card has
//! taken is told to the worker: see `patcher::worker`. A watchdog turns a hang into a message.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod common;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Hooks, ModelFile, Watchdog, assert_nothing_left, hooked_card, mixed_units, small_options};
use vram_pager::device::SharedDevice;
use vram_pager::manager::{FreeOptions, LoadOptions, Manager, ManagerError};
use vram_pager::pager::{ModelOptions, Pager};
use vram_pager::patcher::worker::{WorkerError, WorkerOptions, WorkerParent, WorkerProcess};
use vram_pager::patcher::{ModelPatcher, ModelUuid, PagedPatcher, PatcherError, Place, StandIn, Worker};
use vram_pager::units::{KIB, MIB};

const CARD: Place = Place::Card(0);

/// A parent: a manager of one emulated card, which is told what workers hold.
struct House {
    card: Hooks,
    device: SharedDevice,
    manager: Manager,
    held: Mutex<HashMap<ModelUuid, u64>>,
    asked: Mutex<Vec<u64>>,
}

impl House {
    fn new(bytes: u64) -> Arc<Self> {
        let (card, device) = hooked_card(bytes);
        let manager = Manager::new(std::slice::from_ref(&device));
        manager.set_knobs(|knobs| {
            knobs.reserve = 0;
            knobs.inference_floor = 0;
        });
        Arc::new(Self { card, device, manager, held: Mutex::default(), asked: Mutex::default() })
    }

    fn free(&self) -> u64 {
        self.device.memory().unwrap().free
    }

    fn start(self: &Arc<Self>, options: WorkerOptions) -> Arc<WorkerProcess> {
        WorkerProcess::start(options, Arc::clone(self) as _).unwrap()
    }
}

impl WorkerParent for House {
    fn make_room(&self, bytes: u64, device: Place) -> Result<(), String> {
        self.asked.lock().unwrap().push(bytes);
        self.manager.make_room(bytes, device)
    }

    fn worker_holds(&self, generation: ModelUuid, _device: Place, bytes: u64) {
        let mut held = self.held.lock().unwrap();
        held.insert(generation, bytes);
        self.card.set_other_bytes(held.values().sum());
    }

    fn hidden_from_worker(&self, generation: ModelUuid, _device: Place) -> u64 {
        let memory = self.device.memory().unwrap();
        let own = self.held.lock().unwrap().get(&generation).copied().unwrap_or(0);
        memory.total - memory.free - own
    }
}

fn options(house: &House, file: &ModelFile) -> WorkerOptions {
    let mut options = WorkerOptions::new(
        env!("CARGO_BIN_EXE_vram-pager"),
        format!("emulated:{}KiB,page=64KiB", house.device.info().total_bytes / KIB),
        &file.path,
        file.folder.path(),
    );
    options.arguments = ["--headroom", "0", "--page-locked", "16MiB"].map(Into::into).to_vec();
    options
}

fn signal(worker: &WorkerProcess, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), worker.pid().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// A worker with its whole model loaded, and its listed stand-in.
fn loaded(house: &Arc<House>, options: WorkerOptions) -> (Arc<WorkerProcess>, Arc<StandIn>) {
    let worker = house.start(options);
    let size = worker.model_size();
    assert_eq!(worker.load().unwrap(), size);
    assert_eq!(worker.loaded_size(), size);
    let stand_in = StandIn::new(Arc::clone(&worker) as _);
    let shared: Arc<dyn ModelPatcher> = Arc::clone(&stand_in) as _;
    let entry = house.manager.list(&shared, false).unwrap();
    assert!(!entry.currently_used());
    (worker, stand_in)
}

fn unloaded(house: &House, bytes: u64) -> Vec<String> {
    let entries = house.manager.free_memory(bytes, Some(CARD), &FreeOptions::default()).unwrap();
    entries.iter().map(|entry| entry.model().map_or("dead".to_owned(), |model| model.label())).collect()
}

#[test]
fn a_worker_asks_its_parent_for_room_and_the_parents_models_make_it() {
    let _dog = Watchdog::new(60, "a worker's load");
    let file = ModelFile::new(&mixed_units(), 1);
    let house = House::new(8 * MIB);
    let pager = Pager::new(&house.device, small_options()).unwrap();
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let ours = PagedPatcher::new(&model, CARD);
    let shared: Arc<dyn ModelPatcher> = Arc::clone(&ours) as _;
    house.manager.load_model_gpu(&shared, LoadOptions::default()).unwrap();
    ours.prefetch_all().unwrap();
    house.device.synchronize().unwrap();
    assert_eq!(ours.loaded_size(), ours.model_size());

    let (worker, stand_in) = loaded(&house, options(&house, &file));
    assert_eq!(*house.asked.lock().unwrap(), [worker.model_size()]);
    assert!(ours.loaded_size() < ours.model_size(), "nobody made room");
    assert!(worker.held_bytes() + ours.loaded_size() <= 8 * MIB);
    assert_eq!(stand_in.loaded_size(), worker.model_size());
    assert!(!stand_in.is_dynamic());
}

#[test]
fn the_manager_takes_from_a_worker_what_it_needs_and_the_card_has_it() {
    let _dog = Watchdog::new(60, "taking from a worker");
    let file = ModelFile::new(&mixed_units(), 1);
    let house = House::new(8 * MIB);
    let (worker, stand_in) = loaded(&house, options(&house, &file));
    let (free, loaded) = (house.free(), stand_in.loaded_size());
    assert_eq!(unloaded(&house, free + MIB), Vec::<String>::new());
    assert!(house.free() >= free + MIB);
    let given = loaded - stand_in.loaded_size();
    // Whole pages.
    assert!((MIB..MIB + 64 * KIB).contains(&given), "{given}");
    // It loads again what it gave, and asks for no more than that.
    house.asked.lock().unwrap().clear();
    assert_eq!(worker.load().unwrap(), given);
    assert_eq!(*house.asked.lock().unwrap(), [given]);
    assert_eq!(unloaded(&house, u64::MAX).len(), 1);
    assert_eq!((stand_in.loaded_size(), house.free()), (0, 8 * MIB));
    assert_eq!(house.manager.current_loaded_models().len(), 0);
}

#[test]
fn a_short_answer_of_a_worker_escalates_until_it_left_the_card() {
    let _dog = Watchdog::new(60, "a short answer");
    let file = ModelFile::new(&mixed_units(), 1);
    let house = House::new(8 * MIB);
    let mut held = options(&house, &file);
    // A run of the worker's own holds these units.
    held.arguments.extend(["--hold-units", "12"].map(Into::into));
    let (worker, stand_in) = loaded(&house, held);
    let size = worker.model_size();
    let kept = size - stand_in.partially_unload(size - 1).unwrap();
    assert!(kept > MIB, "the held units should have stayed, {kept} bytes did");
    assert_eq!(stand_in.loaded_size(), kept);

    // The manager asks for less than it has and gets nothing: the whole model has to go.
    assert_eq!(unloaded(&house, house.free() + 64 * KIB), [worker.label()]);
    assert_eq!(stand_in.loaded_size(), 0);
    assert_eq!(house.free(), 8 * MIB);
    assert!(worker.gone().is_none(), "it was asked, not killed");
}

#[test]
fn a_worker_killed_inside_free_memory_has_freed_everything() {
    let _dog = Watchdog::new(60, "a worker killed inside free_memory");
    let file = ModelFile::new(&mixed_units(), 1);
    for (round, ask) in [MIB, u64::MAX].into_iter().enumerate() {
        let house = House::new(8 * MIB);
        let (worker, stand_in) = loaded(&house, options(&house, &file));
        let before = house.free();
        // Stopped, it takes the request and does not answer.
        signal(&worker, "STOP");
        let (answer, stand_in_after) = std::thread::scope(|scope| {
            let freeing = scope.spawn(|| unloaded(&house, before.saturating_add(ask)));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!freeing.is_finished());
            signal(&worker, "KILL");
            (freeing.join().unwrap(), stand_in.loaded_size())
        });
        // Asked for a part it gave more than that, so its entry stays; asked for all, it left.
        assert_eq!(answer.len(), round);
        assert_eq!((stand_in_after, house.free()), (0, 8 * MIB));
        assert!(worker.gone().is_some());
        // Nothing fails from here on either.
        assert_eq!(stand_in.partially_unload(1).unwrap(), 0);
        stand_in.detach(true).unwrap();
        unloaded(&house, u64::MAX);
        assert_eq!(house.manager.current_loaded_models().len(), 0);
        assert!(matches!(worker.load(), Err(WorkerError::Gone(_))));
    }
}

#[test]
fn a_worker_that_does_not_answer_is_ended_and_has_freed_everything() {
    let _dog = Watchdog::new(60, "a worker that hangs");
    let file = ModelFile::new(&mixed_units(), 1);
    let house = House::new(8 * MIB);
    let mut impatient = options(&house, &file);
    impatient.answer_patience = Duration::from_secs(1);
    let (worker, stand_in) = loaded(&house, impatient);
    let pid = worker.pid();
    signal(&worker, "STOP");
    unloaded(&house, house.free() + MIB);
    assert_eq!((stand_in.loaded_size(), house.free()), (0, 8 * MIB));
    let gone = worker.gone().unwrap();
    assert!(gone.to_string().contains("did not answer within 1s"), "{gone}");
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the process was left behind");
}

#[test]
fn a_worker_started_again_is_not_the_old_one() {
    let _dog = Watchdog::new(60, "a restarted worker");
    let file = ModelFile::new(&mixed_units(), 1);
    let house = House::new(16 * MIB);
    let (old, old_stand_in) = loaded(&house, options(&house, &file));
    signal(&old, "KILL");
    // Its stand-in finds out by itself, at the latest when it is asked.
    assert!(old_stand_in.partially_unload(1).is_ok());
    let new = old.start_another().unwrap();
    assert_eq!(new.load().unwrap(), new.model_size());
    let new_stand_in = StandIn::new(Arc::clone(&new) as _);
    let shared: Arc<dyn ModelPatcher> = Arc::clone(&new_stand_in) as _;
    house.manager.list(&shared, false).unwrap();

    assert_ne!(old_stand_in.weights_uuid(), new_stand_in.weights_uuid());
    let (old_shared, new_shared): (Arc<dyn ModelPatcher>, _) = (Arc::clone(&old_stand_in) as _, shared);
    assert!(!old_shared.is_clone(&*new_shared));
    assert_eq!(house.manager.current_loaded_models().len(), 2);
    // Whatever is asked of the old one, the new one keeps its bytes.
    assert_eq!(old_stand_in.partially_unload(u64::MAX).unwrap(), 0);
    old_stand_in.detach(true).unwrap();
    assert_eq!(old_stand_in.loaded_size(), 0);
    assert_eq!(new_stand_in.loaded_size(), new.model_size());
    assert_eq!(house.free(), 16 * MIB - new.held_bytes());
}

#[test]
fn loading_cloning_and_patching_a_stand_in_are_refused_with_the_reason() {
    let _dog = Watchdog::new(60, "refusals");
    let file = ModelFile::new(&mixed_units(), 1);
    let house = House::new(8 * MIB);
    let (worker, stand_in) = loaded(&house, options(&house, &file));
    for refusal in [stand_in.clone_model().map(drop).unwrap_err(), stand_in.patch().unwrap_err()] {
        assert!(matches!(refusal, PatcherError::Refused { .. }));
        assert!(refusal.to_string().contains("its weights are in a worker process"), "{refusal}");
    }
    assert_eq!(stand_in.loaded_size(), worker.model_size());
    // A load through the manager fails loudly, and leaves a sound ledger.
    let shared: Arc<dyn ModelPatcher> = stand_in;
    let error = house
        .manager
        .load_model_gpu(&shared, LoadOptions { force_full_load: true, ..LoadOptions::default() });
    let error = error.unwrap_err();
    assert!(matches!(error, ManagerError::Load { .. }), "{error}");
    assert!(error.to_string().contains("have the worker load them"), "{error}");
    assert_eq!(house.manager.current_loaded_models().len(), 0);
    assert_eq!(shared.loaded_size(), 0);
}

#[test]
fn a_worker_that_waits_for_room_still_gives_memory_back() {
    let _dog = Watchdog::new(60, "a worker that is its own victim");
    let file = ModelFile::new(&mixed_units(), 1);
    let house = House::new(8 * MIB);
    let (worker, stand_in) = loaded(&house, options(&house, &file));
    // Somebody outside takes the card; the worker gives a part back and asks for it again. It is the only
    // one that could make room, and the manager asks it while it waits.
    stand_in.partially_unload(2 * MIB).unwrap();
    let outside = Arc::clone(&house);
    outside.worker_holds(ModelUuid::fresh(), CARD, 3 * MIB);
    worker.load().unwrap();
    assert!(worker.held_bytes() <= 5 * MIB, "{}", worker.held_bytes());
    assert!(house.device.memory().unwrap().free <= 8 * MIB);
    assert!(worker.gone().is_none());
}

#[test]
fn a_worker_whose_parent_goes_ends_and_leaves_nothing() {
    let _dog = Watchdog::new(60, "a worker without a parent");
    let file = ModelFile::new(&mixed_units(), 1);
    let house = House::new(8 * MIB);
    let (worker, stand_in) = loaded(&house, options(&house, &file));
    let pid = worker.pid();
    drop((worker, stand_in));
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    assert_eq!(house.free(), 8 * MIB);
    assert_eq!(house.manager.current_loaded_models().len(), 0);
    assert_nothing_left(&house.device);

    let worker = house.start(options(&house, &file));
    worker.quit();
    assert!(worker.gone().is_some());
    let left: Vec<_> = std::fs::read_dir(file.folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "sock"))
        .collect();
    assert_eq!(left, Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_worker_that_cannot_start_says_why() {
    let _dog = Watchdog::new(60, "workers that cannot start");
    let file = ModelFile::new(&mixed_units(), 1);
    let house = House::new(8 * MIB);
    let mut nowhere = options(&house, &file);
    nowhere.program = "/nonexistent/program".into();
    let mut no_file = options(&house, &file);
    no_file.file = file.folder.path().join("missing.safetensors");
    let mut deaf = options(&house, &file);
    deaf.program = "/bin/true".into();
    for (options, why) in [(nowhere, "No such file"), (no_file, "ended at once"), (deaf, "ended at once")] {
        let error = WorkerProcess::start(options, Arc::clone(&house) as _).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("safetensors"), "{error}");
    }
}

/// A worker without a parent, to be spoken to byte by byte.
struct Raw {
    child: Child,
    socket: std::path::PathBuf,
}

impl Raw {
    fn start(file: &ModelFile) -> Self {
        let socket = file.folder.path().join("raw.sock");
        let child = Command::new(env!("CARGO_BIN_EXE_vram-pager"))
            .arg("worker")
            .arg("--socket")
            .arg(&socket)
            .args(["--device", "emulated:8MiB,page=64KiB", "--generation", "g1", "--page-locked", "16MiB"])
            .arg(&file.path)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, socket }
    }

    fn connect(&self) -> UnixStream {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            match UnixStream::connect(&self.socket) {
                Ok(stream) => return stream,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn framed(json: &str) -> Vec<u8> {
    let mut frame = u32::try_from(json.len()).unwrap().to_le_bytes().to_vec();
    frame.extend_from_slice(json.as_bytes());
    frame
}

/// Sends bytes and reads until the other side closes.
fn answer(stream: &mut UnixStream, bytes: &[u8]) -> String {
    // It may have been closed on us already.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

const HELLO: &str = r#"{"op":"hello","magic":"vram-pager worker","version":1}"#;

#[test]
fn a_connection_that_is_not_the_protocol_is_refused_and_closed() {
    let _dog = Watchdog::new(60, "malformed greetings");
    let file = ModelFile::new(&mixed_units(), 1);
    let mut raw = Raw::start(&file);
    for (bytes, why) in [
        (b"\0\0\0\0".to_vec(), "a frame of 0 bytes"),
        (b"\xff\xff\xff\x7f".to_vec(), "a frame of 2147483647 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "a frame of"),
        (framed("not json"), "no message"),
        (framed("{}"), "no message"),
        (framed(r#"{"op":"hello","magic":"vram-pager worker","version":1,"x":1}"#), "no message"),
        (framed(r#"{"op":"hello","magic":"vram-pager worker","version":2}"#), "version 2"),
        (framed(r#"{"op":"hello","magic":"something","version":1}"#), "another protocol"),
        (framed(r#"{"op":"unload","id":1,"bytes":1}"#), "unload before a greeting"),
        (b"\x20\0\0\0half".to_vec(), "no whole frame"),
        (Vec::new(), "no whole frame"),
    ] {
        let answer = answer(&mut raw.connect(), &bytes);
        assert!(answer.contains("refused") && answer.contains(why), "{bytes:?}: {answer}");
    }
    // The worker is none the worse for it.
    let mut stream = raw.connect();
    stream.write_all(&framed(HELLO)).unwrap();
    let mut first = [0; 64];
    stream.read_exact(&mut first).unwrap();
    assert!(String::from_utf8_lossy(&first).contains("welcome"));
    // It has a parent now and lets nobody else in.
    assert!(UnixStream::connect(&raw.socket).is_err());
    drop(stream);
    assert!(raw.child.wait().unwrap().success());
    assert!(!raw.socket.exists());
}

#[test]
fn a_parent_that_breaks_the_protocol_is_refused_and_the_worker_ends() {
    let _dog = Watchdog::new(60, "malformed frames after the greeting");
    let file = ModelFile::new(&mixed_units(), 1);
    for (bytes, why) in [
        (framed("nonsense"), "no message"),
        (framed(HELLO), "a second greeting"),
        (framed(r#"{"op":"room","id":5,"hidden_bytes":0,"error":null}"#), "not open"),
        (b"\0\0\x10\0".to_vec(), "a frame of 1048576 bytes"),
        (b"\x20\0\0\0half".to_vec(), "no whole frame"),
    ] {
        let mut raw = Raw::start(&file);
        let mut stream = raw.connect();
        stream.write_all(&framed(HELLO)).unwrap();
        let answer = answer(&mut stream, &bytes);
        assert!(answer.contains("welcome") && answer.contains("refused") && answer.contains(why), "{answer}");
        assert_eq!(raw.child.wait().unwrap().code(), Some(1));
    }
}
