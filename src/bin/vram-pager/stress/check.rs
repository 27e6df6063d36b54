//! Checking guards on a stream: many checks are enqueued before one wait reads their sums back.
//!
//! As the pager's own `Verifier`, with what a stress run needs beside: one small buffer of sums for all models
//! and patches of a thread, and every call may fail without a wrong verdict.

#![expect(unsafe_code, reason = "launches the checksum kernel on guarded addresses")]

use std::ops::Range;
use std::sync::Arc;

use vram_pager::device::{KernelId, PoolAllocation, SharedDevice, checksum, checksum_launch};
use vram_pager::pager::{Pager, PagerError, PagerStream};
use vram_pager::units::DeviceRange;
use vram_pager::weights::TensorId;

use super::files::Kind;
use crate::output::Failure;

/// Sums that are enqueued before they are compared.
const SUMS: usize = 448;

/// How often a wait that fails is tried again before its memory is given up for lost.
const WAITS: u32 = 100;

/// Why a check gave no verdict.
pub(super) enum CheckError {
    /// The device refused a call.
    Device(PagerError),
    /// What the bytes should be is not known.
    Expected(Failure),
}

impl From<PagerError> for CheckError {
    fn from(error: PagerError) -> Self {
        Self::Device(error)
    }
}

/// One run of bytes whose sum was asked for.
struct Asked {
    expect: Expect,
    /// Whether it is the last of what was checked together.
    last: bool,
}

/// What a run of bytes should hold.
#[derive(Clone)]
pub(super) enum Expect {
    /// Rows of a tensor of a model, under a set of patches (0 is none).
    Rows { model: usize, set: usize, tensor: TensorId, rows: Range<u64> },
    /// Bytes that are all the same.
    Fill { byte: u8, bytes: u64 },
}

impl Expect {
    fn sum(&self, kinds: &[Kind]) -> Result<u64, Failure> {
        match self {
            Self::Rows { model, set, tensor, rows } => kinds[*model].expected(*set, *tensor, rows),
            Self::Fill { byte, bytes } => {
                Ok(checksum(&vec![*byte; usize::try_from(*bytes).unwrap_or_default()], 0))
            }
        }
    }

    fn describe(&self, kinds: &[Kind]) -> String {
        match self {
            Self::Rows { model, set, tensor, rows } => format!(
                "model {model}, patches {set}, {} rows {}..{}",
                kinds[*model].index.tensor_info(*tensor).name,
                rows.start,
                rows.end
            ),
            Self::Fill { byte, bytes } => format!("an activation of {bytes} bytes of {byte:#04x}"),
        }
    }
}

/// What a comparison found.
#[derive(Default)]
pub(super) struct Verdict {
    /// Guards whose bytes were compared.
    pub(super) checked: u64,
    /// A line for each tensor with wrong bytes.
    pub(super) wrong: Vec<String>,
}

/// A run of bytes on the card, and what it should hold.
pub(super) struct Part {
    pub(super) range: DeviceRange,
    pub(super) expect: Expect,
}

/// Checks on one stream.
pub(super) struct Checker {
    device: SharedDevice,
    stream: Arc<PagerStream>,
    kernel: KernelId,
    sums: PoolAllocation,
    asked: Vec<Asked>,
    found: Vec<u8>,
    /// Whether the sums may be other than zero, so that they must be cleared first.
    dirty: bool,
}

impl Checker {
    pub(super) fn new(pager: &Pager, stream: &Arc<PagerStream>) -> Result<Self, PagerError> {
        let device = Arc::clone(pager.device());
        let kernel = device.kernel("checksum")?;
        let sums = pager.allocate(stream, 8 * SUMS as u64)?;
        Ok(Self {
            device,
            stream: Arc::clone(stream),
            kernel,
            sums,
            asked: Vec::with_capacity(SUMS),
            found: vec![0; 8 * SUMS],
            dirty: true,
        })
    }

    /// Enqueues a fill of memory that the caller took on this stream.
    pub(super) fn fill(&self, range: DeviceRange, byte: u8) -> Result<(), PagerError> {
        // SAFETY: the caller's allocation, in the order of its stream.
        unsafe { self.device.fill(range, byte, self.stream.id())? };
        Ok(())
    }

    /// Its stream.
    pub(super) fn stream(&self) -> &Arc<PagerStream> {
        &self.stream
    }

    /// Whether there is room for so many more.
    pub(super) fn has_room(&self, parts: usize) -> bool {
        self.asked.len() + parts <= SUMS
    }

    /// Enqueues the check of what a guard of this stream holds; the guard is released after that. If a call
    /// fails, none of it is checked.
    pub(super) fn ask(&mut self, parts: &[Part]) -> Result<(), PagerError> {
        self.clear()?;
        let before = self.asked.len();
        for Part { range, expect } in parts {
            let Some(sum) = self.sums.range().part(8 * self.asked.len() as u64, 8) else { break };
            let launch = checksum_launch(self.kernel, *range, 0, sum);
            // SAFETY: the caller holds a guard of these addresses on this stream and releases it after this
            // launch; the sum lies in our allocation.
            if let Err(error) = unsafe { self.stream.launch(&launch) } {
                // Sums of the parts before it are there; their places must not be used again uncleared.
                if self.asked.len() > before {
                    self.asked.truncate(before);
                    self.dirty = true;
                }
                return Err(error.into());
            }
            self.asked.push(Asked { expect: expect.clone(), last: false });
        }
        if let Some(asked) = self.asked.last_mut() {
            asked.last = true;
        }
        Ok(())
    }

    /// Clears the sums, if they must be: what was asked so far is then forgotten.
    fn clear(&mut self) -> Result<(), PagerError> {
        if self.dirty {
            self.asked.clear();
            // SAFETY: our allocation, in the order of its stream.
            unsafe { self.device.fill(self.sums.range(), 0, self.stream.id())? };
            self.dirty = false;
        }
        Ok(())
    }

    /// Waits for what was asked and compares.
    pub(super) fn compare(&mut self, kinds: &[Kind]) -> Result<Verdict, CheckError> {
        let mut verdict = Verdict::default();
        if self.asked.is_empty() {
            return Ok(verdict);
        }
        let bytes = 8 * self.asked.len();
        // Whatever becomes of it, the places are not used again as they are.
        self.dirty = true;
        let Some(part) = self.sums.range().part(0, bytes as u64) else { return Ok(verdict) };
        // SAFETY: the target lives past the wait below, or for ever; the source is our allocation.
        let read = unsafe { self.device.copy_to_host(self.found.as_mut_ptr(), part, self.stream.id()) };
        read.map_err(PagerError::from)?;
        self.wait()?;
        let (words, _) = self.found[..bytes].as_chunks::<8>();
        for (Asked { expect, last }, found) in self.asked.drain(..).zip(words) {
            let wanted = expect.sum(kinds).map_err(CheckError::Expected)?;
            let found = u64::from_le_bytes(*found);
            if found != wanted {
                let what = expect.describe(kinds);
                verdict.wrong.push(format!("{what}: {found:#018x} on the card, {wanted:#018x} expected"));
            }
            verdict.checked += u64::from(last);
        }
        Ok(verdict)
    }

    /// Waits for the stream; a wait that fails for good leaves the memory that is being written to nobody.
    fn wait(&mut self) -> Result<(), PagerError> {
        let mut tries = 0;
        while let Err(error) = self.stream.synchronize() {
            tries += 1;
            if tries == WAITS || error.is_lost() {
                std::mem::forget(std::mem::replace(&mut self.found, vec![0; 8 * SUMS]));
                return Err(error.into());
            }
        }
        Ok(())
    }
}
