//! Starting a worker: the child process, the connection to it, and the greeting by which each knows the other.
//!
//! Owns nothing, takes no lock. Whatever fails, the child is ended and waited for.

#![deny(unsafe_code)]

use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::protocol::{
    FrameError, PROTOCOL_MAGIC, PROTOCOL_VERSION, ToParent, ToWorker, check_hello, read_frame, write_frame,
};
use crate::patcher::{ModelUuid, Place};

/// How a worker is started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerOptions {
    /// The program, which has a subcommand `worker`: `vram-pager`.
    pub program: PathBuf,
    /// The device string for the worker; the same card as `place`.
    pub device: String,
    /// The manager's name of that card.
    pub place: Place,
    /// The model's file.
    pub file: PathBuf,
    /// The folder of the socket. Only this user may be able to enter it, and its path must be short: a
    /// socket's whole path has at most 107 bytes.
    pub folder: PathBuf,
    /// Further arguments of the subcommand.
    pub arguments: Vec<OsString>,
    /// How long it may take until it answers for the first time.
    pub start_patience: Duration,
    /// How long it may take to give memory back. A worker that takes longer is ended.
    pub answer_patience: Duration,
    /// How long it may take to load. A worker that takes longer is ended.
    pub load_patience: Duration,
}

impl WorkerOptions {
    /// A worker of `program` that holds `file` on `device`, its socket in `folder`.
    pub fn new(
        program: impl Into<PathBuf>,
        device: impl Into<String>,
        file: impl Into<PathBuf>,
        folder: impl Into<PathBuf>,
    ) -> Self {
        Self {
            program: program.into(),
            device: device.into(),
            place: Place::Card(0),
            file: file.into(),
            folder: folder.into(),
            arguments: Vec::new(),
            start_patience: Duration::from_secs(60),
            answer_patience: Duration::from_secs(30),
            load_patience: Duration::from_secs(600),
        }
    }
}

pub(super) fn start_child(
    options: &WorkerOptions,
    socket: &Path,
    generation: ModelUuid,
) -> Result<Child, String> {
    Command::new(&options.program)
        .arg("worker")
        .arg("--socket")
        .arg(socket)
        .args(["--device", &options.device, "--generation", &generation.to_string()])
        .args(&options.arguments)
        .arg("--")
        .arg(&options.file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())
}

/// Connects and greets; the child is ended if that fails.
pub(super) fn greet(
    mut child: Child,
    options: &WorkerOptions,
    socket: &Path,
    generation: ModelUuid,
    begun: Instant,
) -> Result<(Child, UnixStream, String, u64), String> {
    let greeted = connect(&mut child, options, socket, begun)
        .and_then(|mut stream| Ok((handshake(&mut stream, options, generation, child.id())?, stream)));
    match greeted {
        Ok(((model, size), stream)) => Ok((child, stream, model, size)),
        Err(why) => {
            end_child(&mut child);
            Err(why)
        }
    }
}

fn connect(
    child: &mut Child,
    options: &WorkerOptions,
    socket: &Path,
    begun: Instant,
) -> Result<UnixStream, String> {
    loop {
        let refusal = match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if let Ok(Some(status)) = child.try_wait() {
            return Err(format!("it ended at once ({status}); it said why on standard error"));
        }
        if begun.elapsed() > options.start_patience {
            return Err(format!(
                "{} could not be reached within {:?}: {refusal}",
                socket.display(),
                options.start_patience
            ));
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}

fn handshake(
    stream: &mut UnixStream,
    options: &WorkerOptions,
    expected: ModelUuid,
    child: u32,
) -> Result<(String, u64), String> {
    let talk = |stream: &mut UnixStream| -> Result<ToParent, FrameError> {
        stream.set_write_timeout(Some(options.start_patience))?;
        let hello = ToWorker::Hello { magic: PROTOCOL_MAGIC.to_owned(), version: PROTOCOL_VERSION };
        write_frame(stream, &hello)?;
        read_frame(stream, Some(options.start_patience))
    };
    match talk(stream).map_err(|error| error.to_string())? {
        ToParent::Welcome { magic, version, pid, generation, model, size_bytes } => {
            check_hello(&magic, version).map_err(|error| error.to_string())?;
            if generation != expected.to_string() || pid != child {
                return Err(format!("another worker answered (process {pid}, run {generation})"));
            }
            Ok((model, size_bytes))
        }
        ToParent::Refused { why } => Err(format!("it refused: {why}")),
        other => Err(format!("it answered the greeting with {other:?}")),
    }
}

/// Ends a process and waits for it. What it held on a card is free when this returns.
pub(super) fn end_child(child: &mut Child) {
    // Both fail only for a process that was waited for already.
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the parent makes of a greeting answered with `answer`.
    fn greeted(answer: &[u8]) -> Result<(String, u64), String> {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let mut options = WorkerOptions::new("p", "emulated:1MiB", "f", "/tmp");
        options.start_patience = Duration::from_secs(2);
        std::io::Write::write_all(&mut theirs, answer).unwrap();
        let answer = handshake(&mut ours, &options, ModelUuid::from_u128(7), 42);
        drop(theirs);
        answer
    }

    fn welcome(magic: &str, version: u32, pid: u32, generation: u128) -> Vec<u8> {
        let mut frame = Vec::new();
        let message = ToParent::Welcome {
            magic: magic.to_owned(),
            version,
            pid,
            generation: ModelUuid::from_u128(generation).to_string(),
            model: "m".to_owned(),
            size_bytes: 9,
        };
        write_frame(&mut frame, &message).unwrap();
        frame
    }

    #[test]
    fn only_the_worker_that_was_started_is_taken() {
        assert_eq!(greeted(&welcome(PROTOCOL_MAGIC, PROTOCOL_VERSION, 42, 7)).unwrap(), ("m".to_owned(), 9));
        for (answer, why) in [
            (welcome("another", PROTOCOL_VERSION, 42, 7), "another protocol"),
            (welcome(PROTOCOL_MAGIC, PROTOCOL_VERSION + 1, 42, 7), "version 2"),
            (welcome(PROTOCOL_MAGIC, PROTOCOL_VERSION, 43, 7), "another worker answered"),
            (welcome(PROTOCOL_MAGIC, PROTOCOL_VERSION, 42, 8), "another worker answered"),
            (b"\xff\xff\xff\xffmore".to_vec(), "4294967295 bytes"),
            (b"\x02\0\0\0{}".to_vec(), "no message"),
        ] {
            let refusal = greeted(&answer).unwrap_err();
            assert!(refusal.contains(why), "{refusal}");
        }
    }
}
