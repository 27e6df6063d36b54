//! The child's side: a pager with one model, loaded and unloaded when its parent says.
//!
//! Serves one parent. A connection that does not begin as the protocol says is told why and closed, and the
//! next is waited for; a parent that breaks the protocol later ends the worker, which then holds nothing.
//!
//! Locks: the writing end (the figures of an answer are read under it, so that they arrive in order), the
//! guards of a run, the waiting load. None is held while the parent is waited for.

#![deny(unsafe_code)]

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::protocol::{
    FRAME_PATIENCE, FrameError, PROTOCOL_MAGIC, PROTOCOL_VERSION, ToParent, ToWorker, check_hello,
    read_frame, write_frame,
};
use crate::device::SharedDevice;
use crate::pager::{ModelOptions, OwnedGuard, PagedModel, Pager, PagerError, PagerOptions};
use crate::weights::{TensorIndex, UnitId, WeightsError};

/// How a worker serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServeOptions {
    /// Where to listen. Nothing may be there yet.
    pub socket: PathBuf,
    /// What to call this run; the parent that started it knows it.
    pub generation: String,
    /// Units, the first ones, that a run of the model holds from each load on, until everything is asked
    /// for.
    pub hold_units: u32,
    /// How long to wait for a parent.
    pub patience: Duration,
    /// The pager's options.
    pub pager: PagerOptions,
}

impl ServeOptions {
    /// A worker that listens at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            generation: String::new(),
            hold_units: 0,
            patience: Duration::from_secs(60),
            pager: PagerOptions::default(),
        }
    }
}

/// Why a worker ended before its parent told it to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The model's file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The pager or its card.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// The socket.
    #[error("cannot listen at {}: {why}", .socket.display())]
    Listen {
        /// The socket.
        socket: PathBuf,
        /// Why not.
        why: String,
    },
    /// Nobody came.
    #[error("no parent connected to {} within {patience:?}", .socket.display())]
    NoParent {
        /// The socket.
        socket: PathBuf,
        /// How long was waited.
        patience: Duration,
    },
    /// The parent broke the protocol, or its connection did.
    #[error("the parent is let go: {0}")]
    Parent(#[from] FrameError),
}

/// Holds the model in `file` on `device` for one parent, until that goes or says so.
///
/// # Errors
/// The file, the card or the socket cannot be had; nobody connects; the parent breaks the protocol. The card
/// is free of this process's bytes when this returns.
pub fn serve(device: &SharedDevice, file: &Path, options: &ServeOptions) -> Result<(), ServeError> {
    let index = Arc::new(TensorIndex::open(file)?);
    let pager = Pager::new(device, options.pager.clone())?;
    let model = pager.open_model(index, &ModelOptions::default())?;
    let socket = Socket::listen(&options.socket)?;
    let deadline = Instant::now() + options.patience;
    let mut stream = loop {
        let Some(mut stream) = socket.accept(deadline)? else {
            return Err(ServeError::NoParent { socket: options.socket.clone(), patience: options.patience });
        };
        match hear_greeting(&mut stream) {
            Ok(()) => break stream,
            Err(error) => {
                tracing::warn!(%error, "a connection was refused");
                // It may be gone already.
                drop(write_frame(&mut stream, &ToParent::Refused { why: error.to_string() }));
            }
        }
    };
    // One parent is all there is: once it is welcome, nobody else finds the way in.
    drop(socket);
    welcome(&mut stream, &model, options)?;
    let reading = stream.try_clone().map_err(FrameError::from)?;
    let session = Session {
        own_headroom: pager.figures().headroom_bytes,
        pager,
        model,
        hold_units: options.hold_units,
        writer: Mutex::new(stream),
        held: Mutex::default(),
        loading: AtomicBool::new(false),
        waiting: Mutex::default(),
        next: AtomicU64::new(0),
    };
    Ok(session.run(reading)?)
}

/// A socket file that is gone with its listener.
struct Socket {
    path: PathBuf,
    listener: UnixListener,
}

impl Socket {
    fn listen(path: &Path) -> Result<Self, ServeError> {
        let failed =
            |error: std::io::Error| ServeError::Listen { socket: path.to_owned(), why: error.to_string() };
        let listener = UnixListener::bind(path).map_err(failed)?;
        let socket = Self { path: path.to_owned(), listener };
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        socket.listener.set_nonblocking(true).map_err(failed)?;
        Ok(socket)
    }

    /// The next connection; `None` if none comes before the deadline.
    fn accept(&self, deadline: Instant) -> Result<Option<UnixStream>, ServeError> {
        let failed =
            |error: std::io::Error| ServeError::Listen { socket: self.path.clone(), why: error.to_string() };
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(failed)?;
                    stream.set_write_timeout(Some(FRAME_PATIENCE)).map_err(failed)?;
                    return Ok(Some(stream));
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(failed(error)),
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(3));
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // The parent removes it too, once it is connected.
        let _ = fs::remove_file(&self.path);
    }
}

fn hear_greeting(stream: &mut UnixStream) -> Result<(), FrameError> {
    match read_frame(stream, Some(FRAME_PATIENCE))? {
        ToWorker::Hello { magic, version } => check_hello(&magic, version),
        other => Err(FrameError::OutOfTurn(format!("{} before a greeting", other.name()))),
    }
}

fn welcome(stream: &mut UnixStream, model: &PagedModel, options: &ServeOptions) -> Result<(), FrameError> {
    let welcome = ToParent::Welcome {
        magic: PROTOCOL_MAGIC.to_owned(),
        version: PROTOCOL_VERSION,
        pid: std::process::id(),
        generation: options.generation.clone(),
        // A path is of any length, a frame is not.
        model: model.name().chars().rev().take(512).collect::<Vec<_>>().into_iter().rev().collect(),
        size_bytes: model.figures().weights_bytes,
    };
    write_frame(stream, &welcome)
}

struct Session {
    pager: Arc<Pager>,
    model: Arc<PagedModel>,
    /// What this process's own options leave free.
    own_headroom: u64,
    hold_units: u32,
    writer: Mutex<UnixStream>,
    /// The guards of the run that goes on.
    held: Mutex<Vec<OwnedGuard>>,
    loading: AtomicBool,
    /// The load that waits for room, and the number of its request.
    waiting: Mutex<Option<(u64, Sender<u64>)>>,
    next: AtomicU64,
}

impl Session {
    fn run(&self, mut reading: UnixStream) -> Result<(), FrameError> {
        std::thread::scope(|scope| {
            let ended = loop {
                let message = match read_frame(&mut reading, None) {
                    // A parent that goes needs the memory no more.
                    Err(FrameError::Closed) => break Ok(()),
                    Err(error) => break Err(error),
                    Ok(message) => message,
                };
                let served = match message {
                    ToWorker::Quit => break Ok(()),
                    ToWorker::Hello { .. } => Err(FrameError::OutOfTurn("a second greeting".to_owned())),
                    ToWorker::Room { id, hidden_bytes, error } => self.room(id, hidden_bytes, error),
                    ToWorker::Unload { id, bytes } => self.unload(id, bytes),
                    ToWorker::Load { id, .. } if self.loading.swap(true, Ordering::AcqRel) => {
                        self.fail(id, "it is loading already".to_owned())
                    }
                    ToWorker::Load { id, hidden_bytes } => {
                        scope.spawn(move || self.load(id, hidden_bytes));
                        Ok(())
                    }
                };
                if let Err(error) = served {
                    break Err(error);
                }
            };
            let writer = self.writer.lock();
            if let Err(error) = &ended {
                drop(write_frame(&mut &*writer, &ToParent::Refused { why: error.to_string() }));
            }
            // The other side sees the end at once, before the memory is given back.
            drop(writer.shutdown(std::net::Shutdown::Both));
            drop(writer);
            // After the end of the connection, so that no load begins to wait behind our back.
            self.waiting.lock().take();
            self.held.lock().clear();
            ended
        })
    }

    /// Sends an answer made from the figures of this moment.
    fn answer(&self, make: impl FnOnce(u64, u64) -> ToParent) -> Result<(), FrameError> {
        let writer = self.writer.lock();
        let figures = self.pager.figures();
        let pool = self.pager.device().pool_figures().map_or(0, |pool| pool.reserved);
        let held = figures.resident_bytes + figures.ring_bytes + figures.idle_bytes + pool;
        write_frame(&mut &*writer, &make(self.loaded().min(held), held))
    }

    fn fail(&self, id: u64, why: String) -> Result<(), FrameError> {
        self.answer(|loaded_bytes, held_bytes| ToParent::Failed { id, why, loaded_bytes, held_bytes })
    }

    fn loaded(&self) -> u64 {
        let figures = self.model.figures();
        figures.resident_bytes.min(figures.weights_bytes)
    }

    fn unload(&self, id: u64, bytes: u64) -> Result<(), FrameError> {
        if bytes == u64::MAX {
            self.held.lock().clear();
        }
        let before = self.model.figures();
        // The pages hold a little more than the weights; what is asked for are bytes of weights.
        let beyond = before.resident_bytes.saturating_sub(before.weights_bytes);
        let loaded = self.loaded();
        if let Err(error) = self.model.unload(bytes.saturating_add(beyond)) {
            return self.fail(id, error.to_string());
        }
        if let Err(error) = self.pager.release_idle() {
            tracing::warn!(%error, "idle frames were not handed back");
        }
        self.answer(|loaded_bytes, held_bytes| ToParent::Unloaded {
            id,
            freed_bytes: loaded.saturating_sub(loaded_bytes),
            loaded_bytes,
            held_bytes,
        })
    }

    fn load(&self, id: u64, hidden_bytes: u64) {
        let before = self.loaded();
        let loaded = self.bring_in(hidden_bytes);
        self.loading.store(false, Ordering::Release);
        let sent = match loaded {
            Ok(()) => self.answer(|loaded_bytes, held_bytes| ToParent::Loaded {
                id,
                added_bytes: loaded_bytes.saturating_sub(before),
                loaded_bytes,
                held_bytes,
            }),
            Err(why) => self.fail(id, why),
        };
        if let Err(error) = sent {
            tracing::warn!(%error, "the parent did not take the answer to a load");
        }
    }

    /// Asks for room and brings in what there is room for.
    fn bring_in(&self, hidden_bytes: u64) -> Result<(), String> {
        let text = |error: PagerError| error.to_string();
        self.leave_free(hidden_bytes).map_err(text)?;
        let missing = self.model.figures().weights_bytes.saturating_sub(self.loaded());
        if missing > 0 {
            let hidden_bytes = self.ask_for_room(missing)?;
            self.leave_free(hidden_bytes).map_err(text)?;
        }
        self.model.activate(Some(2)).map_err(text)?;
        self.model.prefetch_all().map_err(text)?;
        let device = self.pager.device();
        device.synchronize().map_err(|error| error.to_string())?;
        let stream = Arc::new(self.pager.stream().map_err(text)?);
        let mut held = self.held.lock();
        held.clear();
        for unit in 0..self.hold_units {
            held.push(self.model.fault_owned(UnitId(unit), &stream).map_err(text)?);
        }
        Ok(())
    }

    /// What others hold unseen is left free like headroom.
    fn leave_free(&self, hidden_bytes: u64) -> Result<(), PagerError> {
        self.pager.set_headroom(self.own_headroom.saturating_add(hidden_bytes))
    }

    fn ask_for_room(&self, bytes: u64) -> Result<u64, String> {
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, receiver) = mpsc::channel();
        *self.waiting.lock() = Some((id, sender));
        let sent = write_frame(&mut &*self.writer.lock(), &ToParent::NeedRoom { id, bytes });
        sent.map_err(|error| format!("the parent takes no requests: {error}"))?;
        receiver.recv().map_err(|_| "the parent went while room was waited for".to_owned())
    }

    fn room(&self, id: u64, hidden_bytes: u64, error: Option<String>) -> Result<(), FrameError> {
        if let Some(error) = error {
            tracing::warn!(error, "the parent made less room than it could have");
        }
        let waiting = self.waiting.lock().take();
        match waiting {
            Some((expected, sender)) if expected == id => {
                // The load may have failed meanwhile.
                let _ = sender.send(hidden_bytes);
                Ok(())
            }
            _ => Err(FrameError::OutOfTurn(format!("an answer to request {id}, which is not open"))),
        }
    }
}
