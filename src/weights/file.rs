//! A weight file that must stay what it was when it was opened.
//!
//! Reads go through `pread` and not through a mapping: if a mapped file shrinks, the next touch is a
//! signal that ends the process, and on a network file system mapping may be refused. A `pread` that
//! comes back short is an error with a name. [`WeightFile::map`] is there for host-side views all the
//! same.
//!
//! After every read the file's identity is compared with the one taken at opening, so that bytes of a
//! file that was truncated, overwritten or replaced meanwhile are never handed on. The change time
//! counts: it is the one stamp that a writer cannot set back. A `chmod` or a new hard link therefore
//! also ends the file's use; opening it again is the answer.
//!
//! Owns the open file. No lock; every call takes `&self`. Imports nothing of this crate but its errors.

#![expect(unsafe_code, reason = "a file mapping is only as sound as the file is left alone")]

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::error::{IoFailure, WeightsError};

/// What tells one state of a file from another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileIdentity {
    /// The device that it lies on.
    pub device: u64,
    /// Its inode there.
    pub inode: u64,
    /// Its length in bytes.
    pub length: u64,
    /// When its bytes were last changed: seconds and nanoseconds.
    pub modified: (i64, i64),
    /// When its inode was last changed: seconds and nanoseconds.
    pub changed: (i64, i64),
}

impl From<&fs::Metadata> for FileIdentity {
    fn from(metadata: &fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            length: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// The few calls that a [`WeightFile`] makes to the system, so that a test can make them fail.
pub trait FileSource: Send + Sync {
    /// Reads at `offset` as `pread` does: may be short, may be interrupted, 0 is the end of the file.
    ///
    /// # Errors
    /// Whatever the system says.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;

    /// The identity of the open file.
    ///
    /// # Errors
    /// Whatever the system says.
    fn identity(&self) -> io::Result<FileIdentity>;

    /// The identity of what the path names now.
    ///
    /// # Errors
    /// Whatever the system says; [`io::ErrorKind::NotFound`] if nothing is there any more.
    fn path_identity(&self) -> io::Result<FileIdentity>;

    /// The open file, for a mapping. A source without one cannot be mapped.
    fn as_file(&self) -> Option<&File> {
        None
    }
}

/// The real thing.
struct OpenFile {
    file: File,
    /// Absolute, so that a later change of the working directory changes nothing.
    path: PathBuf,
}

impl FileSource for OpenFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        Ok(FileIdentity::from(&self.file.metadata()?))
    }

    fn path_identity(&self) -> io::Result<FileIdentity> {
        Ok(FileIdentity::from(&fs::metadata(&self.path)?))
    }

    fn as_file(&self) -> Option<&File> {
        Some(&self.file)
    }
}

/// An open weight file, read only.
pub struct WeightFile {
    path: PathBuf,
    opened: FileIdentity,
    source: Box<dyn FileSource>,
}

impl WeightFile {
    /// Opens a regular file for reading. Symbolic links are followed.
    ///
    /// # Errors
    /// [`WeightsError::NotAFile`] for a directory, a named pipe, a device or a socket (never a hang), and
    /// [`WeightsError::Open`] for what the system refuses: a missing file, a loop of links, no permission.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        let refuse = |error: io::Error| WeightsError::Open { file: path.to_owned(), why: error.into() };
        // Looked at before opening, because opening a device can already do something.
        regular(path, &fs::metadata(path).map_err(refuse)?)?;
        // std adds O_CLOEXEC. O_NONBLOCK keeps the open from waiting if a pipe took the path just now.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(refuse)?;
        regular(path, &file.metadata().map_err(refuse)?)?;
        let absolute = std::path::absolute(path).map_err(refuse)?;
        Self::from_source(path, Box::new(OpenFile { file, path: absolute }))
    }

    /// A file behind a source of the caller's, for tests that inject failures.
    ///
    /// # Errors
    /// [`WeightsError::Open`] if the source has no identity.
    pub fn from_source(path: impl Into<PathBuf>, source: Box<dyn FileSource>) -> Result<Self, WeightsError> {
        let path = path.into();
        match source.identity() {
            Ok(opened) => Ok(Self { path, opened, source }),
            Err(error) => Err(WeightsError::Open { file: path, why: error.into() }),
        }
    }

    /// The path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The length in bytes when it was opened.
    pub fn len(&self) -> u64 {
        self.opened.length
    }

    /// Whether it had no bytes when it was opened.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The state of the file that its header was checked against.
    pub fn identity(&self) -> FileIdentity {
        self.opened
    }

    /// Fills `buf` with the bytes from `offset` on; `tensor` is named in errors.
    ///
    /// Blocks for the disk. What it gives is from the file as it was opened: that is checked after the
    /// bytes have come.
    ///
    /// # Errors
    /// [`WeightsError::Read`] for what the system refuses, [`WeightsError::Truncated`],
    /// [`WeightsError::Overwritten`], [`WeightsError::Replaced`] for a file that changed,
    /// [`WeightsError::OutsideFile`] for a range that was never in it. `buf` then holds nothing of use.
    pub fn read_exact_at(&self, offset: u64, buf: &mut [u8], tensor: &str) -> Result<(), WeightsError> {
        let read = Read { file: self, tensor, offset, bytes: buf.len() as u64 };
        if offset.checked_add(read.bytes).is_none_or(|end| end > self.len()) {
            return Err(WeightsError::OutsideFile {
                file: self.path.clone(),
                tensor: tensor.to_owned(),
                offset,
                bytes: read.bytes,
                length: self.len(),
            });
        }
        let mut done = 0;
        while done < buf.len() {
            match self.source.read_at(offset + done as u64, &mut buf[done..]) {
                Ok(0) => {
                    // The file ended inside what was its length: say how long it is now.
                    read.check()?;
                    return Err(read.truncated(offset + done as u64));
                }
                // A source that claims more than it was given room for must not move us past the end.
                Ok(count) => done = (done + count).min(buf.len()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(read.failed(error)),
            }
        }
        read.check()
    }

    /// Checks that the file is still what it was when opened, without reading any of it.
    ///
    /// # Errors
    /// As [`WeightFile::read_exact_at`] for a file that changed.
    pub fn check_unchanged(&self, tensor: &str) -> Result<(), WeightsError> {
        Read { file: self, tensor, offset: 0, bytes: 0 }.check()
    }

    /// Maps the whole file, for views on the host.
    ///
    /// # Safety
    /// While the mapping lives nobody, in this process or another, may write to the file or shorten it:
    /// the first changes bytes behind a shared reference, the second turns a read into a signal.
    ///
    /// # Errors
    /// [`WeightsError::Map`] where the system refuses, as some network file systems do.
    pub unsafe fn map(&self) -> Result<MappedFile, WeightsError> {
        let refuse = |why: IoFailure| WeightsError::Map { file: self.path.clone(), why };
        let Some(file) = self.source.as_file() else {
            return Err(refuse(io::Error::from(io::ErrorKind::Unsupported).into()));
        };
        // SAFETY: that the file is neither written nor shortened while mapped is this function's own
        // contract, which its caller upholds.
        let map = unsafe { memmap2::Mmap::map(file) }.map_err(|error| refuse(error.into()))?;
        Ok(MappedFile { map })
    }
}

impl fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightFile")
            .field("path", &self.path)
            .field("opened", &self.opened)
            .finish_non_exhaustive()
    }
}

/// A whole file as bytes in host memory; see [`WeightFile::map`] for what its holder promises.
#[derive(Debug)]
pub struct MappedFile {
    map: memmap2::Mmap,
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

/// One read, for its errors.
struct Read<'a> {
    file: &'a WeightFile,
    tensor: &'a str,
    offset: u64,
    bytes: u64,
}

impl Read<'_> {
    /// Compares the file with what was opened: first the open file itself, then what its path names.
    fn check(&self) -> Result<(), WeightsError> {
        let opened = &self.file.opened;
        let now = self.file.source.identity().map_err(|error| self.failed(error))?;
        if now.length < opened.length {
            return Err(self.truncated(now.length));
        }
        let changed = if now.length != opened.length {
            Some("its length")
        } else if now.modified != opened.modified {
            Some("its modification time")
        } else {
            None
        };
        if let Some(changed) = changed {
            return Err(self.overwritten(changed));
        }
        match self.file.source.path_identity() {
            Ok(path) if (path.device, path.inode) == (opened.device, opened.inode) => {}
            Ok(_) => return Err(self.replaced("replaced by another file")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(self.replaced("removed")),
            Err(error) => return Err(self.failed(error)),
        }
        // Last, because removing or replacing a file moves its change time as well, and says more.
        if now.changed != opened.changed {
            return Err(self.overwritten("its change time"));
        }
        Ok(())
    }

    fn failed(&self, error: io::Error) -> WeightsError {
        WeightsError::Read {
            file: self.file.path.clone(),
            tensor: self.tensor.to_owned(),
            offset: self.offset,
            bytes: self.bytes,
            why: error.into(),
        }
    }

    fn truncated(&self, now: u64) -> WeightsError {
        WeightsError::Truncated {
            file: self.file.path.clone(),
            tensor: self.tensor.to_owned(),
            offset: self.offset,
            bytes: self.bytes,
            opened: self.file.opened.length,
            now,
        }
    }

    fn overwritten(&self, changed: &'static str) -> WeightsError {
        WeightsError::Overwritten {
            file: self.file.path.clone(),
            tensor: self.tensor.to_owned(),
            offset: self.offset,
            changed,
        }
    }

    fn replaced(&self, how: &'static str) -> WeightsError {
        WeightsError::Replaced {
            file: self.file.path.clone(),
            tensor: self.tensor.to_owned(),
            offset: self.offset,
            how,
        }
    }
}

/// Refuses whatever is not a regular file.
fn regular(path: &Path, metadata: &fs::Metadata) -> Result<(), WeightsError> {
    let kind = metadata.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let (kind, advice) = if kind.is_dir() {
        ("a directory", directory_advice(path))
    } else if kind.is_fifo() {
        ("a named pipe", String::new())
    } else if kind.is_socket() {
        ("a socket", String::new())
    } else if kind.is_char_device() || kind.is_block_device() {
        ("a device", String::new())
    } else {
        ("something else", String::new())
    };
    Err(WeightsError::NotAFile { file: path.to_owned(), kind, advice })
}

/// Which file of a directory to name instead: an index before single files, by name.
fn directory_advice(path: &Path) -> String {
    const SHOWN: usize = 4;
    const INDEX: &str = ".safetensors.index.json";
    let mut names: Vec<String> = fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.ends_with(".safetensors") || name.ends_with(INDEX))
        .collect();
    names.sort_by_key(|name| (!name.ends_with(INDEX), name.clone()));
    match names.len() {
        0 => "; name a .safetensors file or a .safetensors.index.json (it holds neither)".to_owned(),
        1 => format!("; name the file in it: {}", names[0]),
        count => {
            let more = if count > SHOWN { ", ..." } else { "" };
            names.truncate(SHOWN);
            format!("; name a file in it: {}{more}", names.join(", "))
        }
    }
}
