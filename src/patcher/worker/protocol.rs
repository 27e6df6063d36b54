//! Frames and messages between a parent and its worker.
//!
//! A frame is four bytes of length (little endian, 1 to [`MAX_FRAME_BYTES`]) and so many bytes of JSON, one
//! object with a field `op`. The first frame of each side names the protocol and its version. Anything
//! else is refused: a frame of no or too many bytes, text that is no JSON, an unknown message or field.
//!
//! Owns values only, takes no lock.

#![deny(unsafe_code)]

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What both sides say first.
pub const PROTOCOL_MAGIC: &str = "vram-pager worker";

/// The one version that is spoken here. Both sides come from one build, so there is no older one to serve.
pub const PROTOCOL_VERSION: u32 = 1;

/// The longest frame's JSON in bytes. Every message is far shorter.
pub const MAX_FRAME_BYTES: u32 = 64 << 10;

/// How long a frame may take from its first byte to its last.
pub(super) const FRAME_PATIENCE: Duration = Duration::from_secs(2);

/// Why a frame was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The other side closed the connection between two frames.
    #[error("the connection was closed")]
    Closed,
    /// The connection failed, or ended inside a frame.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// A frame, or the first frame of a connection, did not come in time.
    #[error("no whole frame came within {0:?}")]
    Slow(Duration),
    /// A length that no frame has.
    #[error("a frame of {bytes} bytes; from 1 to {MAX_FRAME_BYTES} are taken")]
    Length {
        /// The length that it named.
        bytes: u32,
    },
    /// Not the JSON of a message.
    #[error("a frame that is no message: {0}")]
    Json(#[from] serde_json::Error),
    /// Another protocol.
    #[error("`{found}` is another protocol, this is `{PROTOCOL_MAGIC}`")]
    Magic {
        /// What the other side named.
        found: String,
    },
    /// Another version of it.
    #[error("version {found} of the protocol is not spoken, {PROTOCOL_VERSION} is")]
    Version {
        /// What the other side named.
        found: u32,
    },
    /// A message that has no place there.
    #[error("a message out of turn: {0}")]
    OutOfTurn(String),
}

/// What a parent says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ToWorker {
    /// The first message.
    Hello { magic: String, version: u32 },
    /// Load what there is room for. `hidden_bytes` of the card are taken by others whom the worker's own
    /// figures do not show.
    Load { id: u64, hidden_bytes: u64 },
    /// Give back at least `bytes`; `u64::MAX` means everything, ending what runs.
    Unload { id: u64, bytes: u64 },
    /// The answer to [`ToParent::NeedRoom`]; `error` says why less room was made than could be.
    Room { id: u64, hidden_bytes: u64, error: Option<String> },
    /// Give everything back and end.
    Quit,
}

/// What a worker says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ToParent {
    /// The answer to [`ToWorker::Hello`].
    Welcome {
        magic: String,
        version: u32,
        pid: u32,
        /// What the parent gave this run, so that an older one at the same path is not taken for it.
        generation: String,
        model: String,
        size_bytes: u64,
    },
    /// The connection is closed after this.
    Refused { why: String },
    /// A load is done.
    Loaded { id: u64, added_bytes: u64, loaded_bytes: u64, held_bytes: u64 },
    /// Memory was given back.
    Unloaded { id: u64, freed_bytes: u64, loaded_bytes: u64, held_bytes: u64 },
    /// A load failed; the figures still hold.
    Failed { id: u64, why: String, loaded_bytes: u64, held_bytes: u64 },
    /// `free_memory(bytes, device)`, the device being the one that the parent started the worker for.
    NeedRoom { id: u64, bytes: u64 },
}

impl ToWorker {
    /// A short name of the message, for errors.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "hello",
            Self::Load { .. } => "load",
            Self::Unload { .. } => "unload",
            Self::Room { .. } => "room",
            Self::Quit => "quit",
        }
    }
}

/// Checks what the other side named first.
pub(super) fn check_hello(magic: &str, version: u32) -> Result<(), FrameError> {
    if magic != PROTOCOL_MAGIC {
        let found = magic.chars().take(64).collect();
        return Err(FrameError::Magic { found });
    }
    if version != PROTOCOL_VERSION {
        return Err(FrameError::Version { found: version });
    }
    Ok(())
}

/// Writes one message as one frame.
pub(super) fn write_frame(to: &mut impl Write, message: &impl Serialize) -> Result<(), FrameError> {
    let json = serde_json::to_vec(message)?;
    let length = u32::try_from(json.len()).unwrap_or(u32::MAX);
    if length > MAX_FRAME_BYTES {
        return Err(FrameError::Length { bytes: length });
    }
    let mut frame = Vec::with_capacity(json.len() + 4);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&json);
    to.write_all(&frame)?;
    Ok(())
}

/// Reads one message. Waits for its first byte for at most `first` (for ever if `None`), and for the rest
/// [`FRAME_PATIENCE`].
pub(super) fn read_frame<T: DeserializeOwned>(
    from: &mut UnixStream,
    first: Option<Duration>,
) -> Result<T, FrameError> {
    let mut length = [0; 4];
    from.set_read_timeout(first)?;
    loop {
        match from.read(&mut length[..1]) {
            Ok(0) => return Err(FrameError::Closed),
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // It closed without having read all that it was sent.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(FrameError::Closed),
            Err(error) if is_timeout(&error) => return Err(FrameError::Slow(first.unwrap_or_default())),
            Err(error) => return Err(error.into()),
        }
    }
    let deadline = Instant::now() + FRAME_PATIENCE;
    read_until(from, &mut length[1..], deadline)?;
    let bytes = u32::from_le_bytes(length);
    if bytes == 0 || bytes > MAX_FRAME_BYTES {
        return Err(FrameError::Length { bytes });
    }
    let mut json = vec![0; bytes as usize];
    read_until(from, &mut json, deadline)?;
    Ok(serde_json::from_slice(&json)?)
}

fn read_until(from: &mut UnixStream, mut into: &mut [u8], deadline: Instant) -> Result<(), FrameError> {
    while !into.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(FrameError::Slow(FRAME_PATIENCE));
        }
        from.set_read_timeout(Some(left))?;
        match from.read(into) {
            Ok(0) => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
            Ok(count) => into = &mut into[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if is_timeout(&error) => return Err(FrameError::Slow(FRAME_PATIENCE)),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(bytes: &[u8]) -> Result<ToWorker, FrameError> {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(bytes).unwrap();
        drop(theirs);
        read_frame(&mut ours, Some(Duration::from_secs(5)))
    }

    fn framed(json: &[u8]) -> Vec<u8> {
        let mut frame = u32::try_from(json.len()).unwrap().to_le_bytes().to_vec();
        frame.extend_from_slice(json);
        frame
    }

    #[test]
    fn messages_come_back_as_they_were_sent() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let messages = [
            ToWorker::Hello { magic: PROTOCOL_MAGIC.to_owned(), version: 1 },
            ToWorker::Unload { id: 3, bytes: u64::MAX },
            ToWorker::Room { id: 1, hidden_bytes: 7, error: Some("none".to_owned()) },
            ToWorker::Quit,
        ];
        for message in messages {
            write_frame(&mut theirs, &message).unwrap();
            assert_eq!(read_frame::<ToWorker>(&mut ours, None).unwrap(), message);
        }
    }

    #[test]
    fn anything_else_is_refused() {
        assert!(matches!(sent(b""), Err(FrameError::Closed)));
        assert!(matches!(sent(&[5, 0]), Err(FrameError::Io(_))));
        assert!(matches!(sent(&[0, 0, 0, 0]), Err(FrameError::Length { bytes: 0 })));
        assert!(matches!(sent(&(MAX_FRAME_BYTES + 1).to_le_bytes()), Err(FrameError::Length { .. })));
        assert!(matches!(sent(b"GET / HTTP/1.1\r\n\r\n"), Err(FrameError::Length { .. })));
        for json in [
            b"nonsense".as_slice(),
            b"{}",
            b"[]",
            b"{\"op\":\"format_disk\"}",
            b"{\"op\":\"unload\",\"id\":1}",
            b"{\"op\":\"unload\",\"id\":1,\"bytes\":-1}",
            b"{\"op\":\"unload\",\"id\":1,\"bytes\":1,\"more\":2}",
            b"{\"op\":\"quit\"}{}",
            b"\xff\xfe",
        ] {
            let answer = sent(&framed(json));
            let shown = String::from_utf8_lossy(json);
            assert!(matches!(answer, Err(FrameError::Json(_))), "{shown}: {answer:?}");
        }
    }

    #[test]
    fn another_protocol_and_another_version_are_refused() {
        check_hello(PROTOCOL_MAGIC, PROTOCOL_VERSION).unwrap();
        assert!(matches!(check_hello("HTTP", PROTOCOL_VERSION), Err(FrameError::Magic { .. })));
        assert!(matches!(check_hello(PROTOCOL_MAGIC, 2), Err(FrameError::Version { found: 2 })));
    }

    #[test]
    fn a_side_that_says_nothing_is_not_waited_for_without_end() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let first = Some(Duration::from_millis(1));
        assert!(matches!(read_frame::<ToWorker>(&mut ours, first), Err(FrameError::Slow(_))));
        theirs.write_all(&[9]).unwrap();
        assert!(matches!(read_frame::<ToWorker>(&mut ours, first), Err(FrameError::Slow(FRAME_PATIENCE))));
    }
}
