//! Checking what guards hold against the file, by the `checksum` kernel.
//!
//! The kernel reads the very addresses that a guard gives, on its stream; the sums come back and are
//! compared with those of the file's bytes. Runs, stress tests and a doubting user share it. Holds no
//! lock but for its list of sums that were computed before.

#![expect(unsafe_code, reason = "launches the checksum kernel on guarded addresses")]

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::error::PagerError;
use super::guard::TensorView;
use super::model::PagedModel;
use super::streams::PagerStream;
use crate::device::{KernelId, PoolAllocation, checksum, checksum_launch};
use crate::weights::TensorId;

/// A tensor whose bytes on the card were not those of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// The tensor.
    pub tensor: String,
    /// The first row that was checked.
    pub first_row: u64,
    /// The checksum of the bytes on the card.
    pub found: u64,
    /// The checksum of the file's bytes.
    pub expected: u64,
}

/// Knows the checksums of a model's file, each computed once.
#[derive(Debug)]
pub struct Verifier {
    model: Arc<PagedModel>,
    kernel: KernelId,
    /// By tensor, first row and rows.
    sums: Mutex<HashMap<(u32, u64, u64), u64>>,
}

/// The most tensors that one [`Check`] takes before it must be finished.
pub const CHECK_CAPACITY: usize = 4096;

/// Bytes of a file that are read at once; a multiple of eight.
const READ_BYTES: u64 = 1 << 20;

impl Verifier {
    /// A verifier of `model`.
    pub fn new(model: &Arc<PagedModel>) -> Result<Self, PagerError> {
        let kernel = model.pager().device().kernel("checksum")?;
        Ok(Self { model: Arc::clone(model), kernel, sums: Mutex::new(HashMap::new()) })
    }

    /// Begins checks on one stream.
    pub fn begin<'v>(&'v self, stream: &'v PagerStream) -> Result<Check<'v>, PagerError> {
        let bytes = 8 * CHECK_CAPACITY as u64;
        let sums = self.model.pager().allocate(stream, bytes)?;
        // SAFETY: the allocation is ours, taken on this stream, and freed in its order.
        unsafe { self.model.pager().device().fill(sums.range(), 0, stream.id())? };
        Ok(Check { verifier: self, stream, sums, asked: Vec::new() })
    }

    /// The checksum of some rows of a tensor in the file.
    fn expected(&self, tensor: TensorId, rows: &std::ops::Range<u64>) -> Result<u64, PagerError> {
        let key = (tensor.0, rows.start, rows.end - rows.start);
        if let Some(sum) = self.sums.lock().get(&key) {
            return Ok(*sum);
        }
        let index = self.model.index();
        let info = index.tensor_info(tensor);
        let count = info.shape.first().copied().unwrap_or(1).max(1);
        let row = info.bytes / count;
        let (mut at, end) = if key.2 == info.shape.first().copied().unwrap_or(1) {
            (0, info.bytes)
        } else {
            (rows.start * row, rows.end * row)
        };
        let begin = at;
        let mut sum = 0_u64;
        let mut buffer = vec![0; usize::try_from(READ_BYTES.min((end - at).max(1))).unwrap_or(0)];
        while at < end {
            let length = READ_BYTES.min(end - at);
            let part = &mut buffer[..usize::try_from(length).unwrap_or(0)];
            index.files()[info.file as usize].read_exact_at(info.offset + at, part, &info.name)?;
            sum = sum.wrapping_add(checksum(part, (at - begin) / 8));
            at += length;
        }
        self.sums.lock().insert(key, sum);
        Ok(sum)
    }
}

/// Checks that were asked for on one stream and not compared yet.
#[derive(Debug)]
pub struct Check<'v> {
    verifier: &'v Verifier,
    stream: &'v PagerStream,
    sums: PoolAllocation,
    asked: Vec<(TensorId, std::ops::Range<u64>)>,
}

impl Check<'_> {
    /// Whether [`Self::finish`] should come before more is asked.
    pub fn is_nearly_full(&self) -> bool {
        self.asked.len() >= CHECK_CAPACITY / 2
    }

    /// Launches the checksum kernel on tensors that a guard, held by the caller on the check's stream,
    /// gives.
    pub fn tensors(&mut self, views: &[TensorView<'_>]) -> Result<(), PagerError> {
        for view in views {
            let Some(tensor) = self.verifier.model.index().tensor(view.name) else { continue };
            if view.bytes == 0 {
                continue;
            }
            let place = 8 * self.asked.len() as u64;
            let Some(sum) = self.sums.range().part(place, 8) else {
                return Err(PagerError::InvalidArgument {
                    what: "check",
                    why: format!("more than {CHECK_CAPACITY} tensors before they were compared"),
                });
            };
            let launch = checksum_launch(self.verifier.kernel, view.range(), 0, sum);
            // SAFETY: the caller holds a guard of these addresses on this stream and releases it after this
            // launch; the sum lies in our allocation.
            unsafe { self.stream.launch(&launch)? };
            self.asked.push((tensor, view.rows.clone()));
        }
        Ok(())
    }

    /// Waits for the kernels, compares, and answers what differs. The check can be used again.
    pub fn finish(&mut self) -> Result<Vec<Mismatch>, PagerError> {
        let device = self.verifier.model.pager().device();
        let mut found = vec![0_u8; 8 * self.asked.len()];
        if let Some(part) = self.sums.range().part(0, found.len() as u64).filter(|part| part.bytes > 0) {
            // SAFETY: the target lives past the wait below; the source is our allocation.
            unsafe { device.copy_to_host(found.as_mut_ptr(), part, self.stream.id())? };
            self.stream.synchronize()?;
        }
        // SAFETY: our allocation, in the order of its stream.
        unsafe { device.fill(self.sums.range(), 0, self.stream.id())? };
        let mut mismatches = Vec::new();
        for ((tensor, rows), bytes) in self.asked.drain(..).zip(found.as_chunks::<8>().0) {
            let expected = self.verifier.expected(tensor, &rows)?;
            let found = u64::from_le_bytes(*bytes);
            if found != expected {
                let tensor = self.verifier.model.index().tensor_info(tensor).name.clone();
                mismatches.push(Mismatch { tensor, first_row: rows.start, found, expected });
            }
        }
        Ok(mismatches)
    }
}
