//! The parent's side of a worker: its process, its connection, and what it holds.
//!
//! [`WorkerProcess`] is one run. It owns the child process, so that a worker that does not answer in time,
//! breaks the protocol or closes its connection can be ended and waited for: only then is it true that it
//! freed everything, and only then do those who wait for it learn that it is gone.
//!
//! Locks, none held while another is taken or the other side is waited for: the writing end, the calls that
//! wait, the child. The reading thread owns no reference to the [`WorkerProcess`].

#![deny(unsafe_code)]

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::protocol::{FrameError, ToParent, ToWorker, read_frame, write_frame};
use super::start::{WorkerOptions, end_child, greet, start_child};
use crate::patcher::{ModelUuid, Place, Worker, WorkerGone};

/// What a worker asks of the process that started it. The manager is one.
pub trait WorkerParent: Send + Sync {
    /// `free_memory(bytes, device)`, all else default. Called on a thread of its own; may ask any worker,
    /// also the one that asks, to give memory back.
    ///
    /// # Errors
    /// Why less room was made than could be; the worker goes on with what there is.
    fn make_room(&self, bytes: u64, device: Place) -> Result<(), String>;

    /// The run `generation` holds so many bytes of `device` now; 0 once it is gone. For parents whose own
    /// figures do not show a worker's memory. Must not call the worker.
    fn worker_holds(&self, generation: ModelUuid, device: Place, bytes: u64) {
        let _ = (generation, device, bytes);
    }

    /// The bytes of `device` that others hold and that the own figures of the run `generation` do not show
    /// it. 0 where the driver's figure is device wide.
    fn hidden_from_worker(&self, generation: ModelUuid, device: Place) -> u64 {
        let _ = (generation, device);
        0
    }
}

/// What goes wrong with a worker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// It could not be started.
    #[error("the worker for {} could not be started with {}: {why}", .file.display(), .program.display())]
    Start {
        /// The model's file.
        file: PathBuf,
        /// The program.
        program: PathBuf,
        /// Why not.
        why: String,
    },
    /// It is gone.
    #[error(transparent)]
    Gone(#[from] WorkerGone),
    /// It lives, and could not load.
    #[error("the worker of {worker} could not load: {why}")]
    Load {
        /// The worker's label.
        worker: String,
        /// Its reason.
        why: String,
    },
}

/// One run of a worker process.
pub struct WorkerProcess {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
    options: WorkerOptions,
}

struct Shared {
    label: String,
    generation: ModelUuid,
    place: Place,
    pid: u32,
    size: u64,
    loaded: AtomicU64,
    held: AtomicU64,
    /// The writing end.
    writer: Mutex<UnixStream>,
    /// Another handle of the connection, to end it without waiting for a writer.
    ender: UnixStream,
    calls: Mutex<Calls>,
    child: Mutex<Child>,
    /// A request for room is being served.
    making_room: AtomicBool,
    parent: Arc<dyn WorkerParent>,
}

#[derive(Default)]
struct Calls {
    next: u64,
    waiting: HashMap<u64, Sender<Answer>>,
    /// Set last, when the process is gone and everything it held with it.
    gone: Option<WorkerGone>,
    /// Why it was put down, if it was.
    verdict: Option<String>,
}

enum Answer {
    Done(u64),
    Failed(String),
}

impl WorkerProcess {
    /// Starts a worker and waits until it answers. Nothing is loaded yet.
    ///
    /// # Errors
    /// [`WorkerError::Start`], with the reason; no process is left behind.
    pub fn start(options: WorkerOptions, parent: Arc<dyn WorkerParent>) -> Result<Arc<Self>, WorkerError> {
        let generation = ModelUuid::fresh();
        let number = generation.as_u128();
        let tag = u64::try_from((number >> 64) & 0xffff_ffff).unwrap_or(0);
        let last = u64::try_from(number & 0xffff_ffff).unwrap_or(0);
        let socket = options.folder.join(format!("w{tag:08x}-{last:x}.sock"));
        let begun = Instant::now();
        let started = start_child(&options, &socket, generation)
            .and_then(|child| greet(child, &options, &socket, generation, begun));
        // Both ends are connected, or there is nothing to connect to: the name is of no more use.
        let _ = std::fs::remove_file(&socket);
        let (child, stream, model, size) = started.map_err(|why| WorkerError::Start {
            file: options.file.clone(),
            program: options.program.clone(),
            why,
        })?;
        Self::run(options, parent, generation, child, stream, &model, size)
    }

    /// Starts another run with the same options. This one goes on until it is dropped or put down; its
    /// stand-ins stay its own.
    pub fn start_another(&self) -> Result<Arc<Self>, WorkerError> {
        Self::start(self.options.clone(), Arc::clone(&self.shared.parent))
    }

    fn run(
        options: WorkerOptions,
        parent: Arc<dyn WorkerParent>,
        generation: ModelUuid,
        mut child: Child,
        stream: UnixStream,
        model: &str,
        size: u64,
    ) -> Result<Arc<Self>, WorkerError> {
        let failed = |child: &mut Child, why: std::io::Error| {
            end_child(child);
            WorkerError::Start {
                file: options.file.clone(),
                program: options.program.clone(),
                why: why.to_string(),
            }
        };
        let ends = stream.set_write_timeout(Some(options.answer_patience));
        let ends = ends.and_then(|()| Ok((stream.try_clone()?, stream.try_clone()?)));
        let (mut reading, ender) = match ends {
            Ok(ends) => ends,
            Err(why) => return Err(failed(&mut child, why)),
        };
        let pid = child.id();
        let shared = Arc::new(Shared {
            label: format!("{model} (worker {pid})"),
            generation,
            place: options.place,
            pid,
            size,
            loaded: AtomicU64::new(0),
            held: AtomicU64::new(0),
            writer: Mutex::new(stream),
            ender,
            calls: Mutex::default(),
            child: Mutex::new(child),
            making_room: AtomicBool::new(false),
            parent,
        });
        let theirs = Arc::clone(&shared);
        let reader = std::thread::Builder::new().name(format!("worker {pid}")).spawn(move || {
            let why = loop {
                match read_frame(&mut reading, None) {
                    Err(error) => break error,
                    Ok(message) => {
                        if let Err(error) = theirs.take(message) {
                            break error;
                        }
                    }
                }
            };
            theirs.end(&why.to_string());
        });
        match reader {
            Ok(reader) => Ok(Arc::new(Self { shared, reader: Some(reader), options })),
            Err(why) => Err(failed(&mut shared.child.lock(), why)),
        }
    }

    /// The process's number.
    pub fn pid(&self) -> u32 {
        self.shared.pid
    }

    /// The bytes that the worker holds on the card, by its last word: weights and whatever goes with them.
    pub fn held_bytes(&self) -> u64 {
        self.shared.held.load(Ordering::Acquire)
    }

    /// Why it is gone, if it is.
    pub fn gone(&self) -> Option<WorkerGone> {
        self.shared.calls.lock().gone.clone()
    }

    /// Has the worker load what there is room for, after it asked for room; answers the bytes added. Then
    /// list its stand-in.
    ///
    /// # Errors
    /// The worker is gone, or could not load.
    pub fn load(&self) -> Result<u64, WorkerError> {
        let hidden_bytes = self.shared.parent.hidden_from_worker(self.shared.generation, self.shared.place);
        let answer = self.shared.ask(self.options.load_patience, |id| ToWorker::Load { id, hidden_bytes })?;
        match answer {
            Answer::Done(added) => Ok(added),
            Answer::Failed(why) => Err(WorkerError::Load { worker: self.shared.label.clone(), why }),
        }
    }

    /// Has the worker end by itself; one that does not in time is put down. It is gone when this returns.
    pub fn quit(&self) {
        let sent = self.shared.send(&ToWorker::Quit);
        let deadline = Instant::now() + self.options.answer_patience;
        while sent.is_ok() && self.gone().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.shared.put_down("it was told to end");
        while self.gone().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Worker for WorkerProcess {
    fn label(&self) -> String {
        self.shared.label.clone()
    }

    fn generation(&self) -> ModelUuid {
        self.shared.generation
    }

    fn place(&self) -> Place {
        self.shared.place
    }

    fn model_size(&self) -> u64 {
        self.shared.size
    }

    fn loaded_size(&self) -> u64 {
        self.shared.loaded.load(Ordering::Acquire)
    }

    fn unload(&self, bytes: u64) -> Result<u64, WorkerGone> {
        let patience = self.options.answer_patience;
        let answer = self.shared.ask(patience, |id| ToWorker::Unload { id, bytes })?;
        let freed = match answer {
            Answer::Done(freed) => freed,
            Answer::Failed(why) => {
                tracing::warn!(worker = self.shared.label, bytes, why, "a worker could not give memory back");
                0
            }
        };
        if bytes == u64::MAX && self.loaded_size() > 0 {
            // Whatever it takes.
            self.shared.put_down("it kept memory that it was told to give back");
            return Err(self.shared.wait_gone());
        }
        Ok(freed)
    }
}

impl Shared {
    /// Sends a request and waits for its answer. A worker that does not answer in time is put down.
    fn ask(&self, patience: Duration, make: impl FnOnce(u64) -> ToWorker) -> Result<Answer, WorkerGone> {
        let (sender, receiver) = mpsc::channel();
        let id = {
            let mut calls = self.calls.lock();
            if let Some(gone) = &calls.gone {
                return Err(gone.clone());
            }
            calls.next += 1;
            let id = calls.next;
            calls.waiting.insert(id, sender);
            id
        };
        if let Err(error) = self.send(&make(id)) {
            self.put_down(&format!("it takes no requests: {error}"));
        }
        match receiver.recv_timeout(patience) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Disconnected) => Err(self.wait_gone()),
            Err(RecvTimeoutError::Timeout) => {
                self.put_down(&format!("it did not answer within {patience:?}"));
                Err(self.wait_gone())
            }
        }
    }

    fn send(&self, message: &ToWorker) -> Result<(), FrameError> {
        write_frame(&mut *self.writer.lock(), message)
    }

    /// Ends the process. The reading thread sees that and does the rest.
    fn put_down(&self, why: &str) {
        {
            let mut calls = self.calls.lock();
            if calls.gone.is_some() {
                return;
            }
            calls.verdict.get_or_insert_with(|| why.to_owned());
        }
        // A failure means that it ended by itself.
        let _ = self.child.lock().kill();
        let _ = self.ender.shutdown(Shutdown::Both);
    }

    /// The reading thread ends soon after the connection: waits for it to say that the worker is gone.
    fn wait_gone(&self) -> WorkerGone {
        loop {
            if let Some(gone) = self.calls.lock().gone.clone() {
                return gone;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The connection ended: the process is ended too, and waited for; it holds nothing then.
    fn end(&self, why: &str) {
        let _ = self.ender.shutdown(Shutdown::Both);
        end_child(&mut self.child.lock());
        self.loaded.store(0, Ordering::Release);
        self.held.store(0, Ordering::Release);
        self.parent.worker_holds(self.generation, self.place, 0);
        let waiting = {
            let mut calls = self.calls.lock();
            let why = calls.verdict.take().unwrap_or_else(|| why.to_owned());
            tracing::info!(worker = self.label, why, "a worker is gone");
            calls.gone = Some(WorkerGone { worker: self.label.clone(), why });
            std::mem::take(&mut calls.waiting)
        };
        // Whoever waits sees its sender go.
        drop(waiting);
    }

    /// Deals with one message; an error ends the worker.
    fn take(self: &Arc<Self>, message: ToParent) -> Result<(), FrameError> {
        match message {
            ToParent::Loaded { id, added_bytes, loaded_bytes, held_bytes } => {
                self.note(loaded_bytes, held_bytes)?;
                self.deliver(id, Answer::Done(added_bytes))
            }
            ToParent::Unloaded { id, freed_bytes, loaded_bytes, held_bytes } => {
                self.note(loaded_bytes, held_bytes)?;
                self.deliver(id, Answer::Done(freed_bytes))
            }
            ToParent::Failed { id, why, loaded_bytes, held_bytes } => {
                self.note(loaded_bytes, held_bytes)?;
                self.deliver(id, Answer::Failed(why))
            }
            ToParent::NeedRoom { id, bytes } => self.make_room(id, bytes),
            ToParent::Welcome { .. } => Err(FrameError::OutOfTurn("welcome".to_owned())),
            ToParent::Refused { why } => Err(FrameError::OutOfTurn(format!("it refused to go on: {why}"))),
        }
    }

    fn note(&self, loaded: u64, held: u64) -> Result<(), FrameError> {
        if loaded > self.size || loaded > held {
            let what = format!("{loaded} bytes loaded of a model of {}, {held} held", self.size);
            return Err(FrameError::OutOfTurn(what));
        }
        self.loaded.store(loaded, Ordering::Release);
        self.held.store(held, Ordering::Release);
        self.parent.worker_holds(self.generation, self.place, held);
        Ok(())
    }

    fn deliver(&self, id: u64, answer: Answer) -> Result<(), FrameError> {
        let waiting = self.calls.lock().waiting.remove(&id);
        match waiting {
            // Nobody listens any more if the caller lost patience; the worker is being put down then.
            Some(sender) => drop(sender.send(answer)),
            None => {
                return Err(FrameError::OutOfTurn(format!("an answer to request {id}, which is not open")));
            }
        }
        Ok(())
    }

    /// Serves a request for room on a thread of its own.
    fn make_room(self: &Arc<Self>, id: u64, bytes: u64) -> Result<(), FrameError> {
        if self.making_room.swap(true, Ordering::AcqRel) {
            return Err(FrameError::OutOfTurn(
                "a second request for room before the first was met".to_owned(),
            ));
        }
        let shared = Arc::clone(self);
        let serve = move || {
            let made = shared.parent.make_room(bytes, shared.place);
            let hidden_bytes = shared.parent.hidden_from_worker(shared.generation, shared.place);
            tracing::debug!(worker = shared.label, bytes, ?made, "a worker asked for room");
            shared.making_room.store(false, Ordering::Release);
            if let Err(error) = shared.send(&ToWorker::Room { id, hidden_bytes, error: made.err() }) {
                shared.put_down(&format!("it takes no answers: {error}"));
            }
        };
        std::thread::Builder::new().name(format!("room for {}", self.pid)).spawn(serve)?;
        Ok(())
    }
}

impl std::fmt::Debug for WorkerProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerProcess")
            .field("label", &self.shared.label)
            .field("loaded", &self.loaded_size())
            .field("gone", &self.gone())
            .finish_non_exhaustive()
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        self.shared.put_down("its parent has no more use for it");
        if let Some(reader) = self.reader.take()
            && reader.thread().id() != std::thread::current().id()
        {
            // Its only panic would be one of the parent's own, which was reported where it happened.
            drop(reader.join());
        }
    }
}
