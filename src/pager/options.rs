//! How a pager and a model on it are set up. Values only.

#![expect(unsafe_code, reason = "maps files for whoever promised to leave them alone")]

use std::time::Duration;

use super::error::PagerError;
use super::mutations::Mutated;
use super::plan::RingSize;
use crate::device::DeviceInfo;
use crate::weights::{Dtype, MappedFile, TensorIndex, WeightFile, WeightsError};

/// Threads that may read files: more than any disk needs.
const MOST_READERS: usize = 1024;

/// Streams that copies may run on: a card has a few copy engines.
const MOST_COPY_STREAMS: usize = 64;

/// How a card's pager is set up. Every field has a default that suits a runner with one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagerOptions {
    /// The page size in bytes, a multiple of the device's granularity; `None` takes the granularity. One
    /// size serves a card, since its ring belongs to all models on it.
    pub page_bytes: Option<u64>,
    /// Bytes left free, device wide; `None` takes the smaller of 400 MiB and 1/32 of the card.
    pub headroom_bytes: Option<u64>,
    /// Bytes of host memory that may be page-locked for staging and for copies of what is streamed;
    /// `None` takes the machine's share (see [`crate::staging::budget::page_locked_limit`]).
    pub page_locked_bytes: Option<u64>,
    /// The ring's size.
    pub ring: RingSize,
    /// Threads that read files. As many of them as half of the processors read at once what the system has in
    /// memory; all of them read what has to come from a disk. 0 is taken as 1; at most 1024.
    pub readers: usize,
    /// Streams that copies run on. 0 is taken as 1; at most 64.
    pub copy_streams: usize,
    /// Bytes of one read and one copy at most, in whole pages.
    pub chunk_bytes: u64,
    /// The same for pages that stay on the card, and not more than that. They are copied once, as soon as they
    /// were read: in smaller pieces a reader's bytes are still in the processors' caches when they are copied.
    pub load_bytes: u64,
    /// How far reads may be ahead of copies: bytes that were read into staging memory, or are being read,
    /// and that are not on their way to the card yet. What a fault asks for is read in any case, in turn; 0
    /// reads nothing ahead of a fault or of prefetch.
    pub read_ahead_bytes: u64,
    /// How far copies may be ahead of the runner: bytes in the ring that no guard has had yet; `None` fills
    /// the ring.
    pub copy_ahead_bytes: Option<u64>,
    /// Loads that prefetch may have under way at once; 0 turns prefetch off.
    pub prefetch_loads: usize,
    /// Where copies take their bytes from.
    pub source: WeightSource,
    #[cfg(test)]
    pub(crate) mutated: Mutated,
}

impl PagerOptions {
    /// The mistake that a unit test built in; none otherwise.
    #[inline]
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "asked in tests alone"))]
    pub(super) fn mutated(&self) -> Mutated {
        #[cfg(test)]
        return self.mutated;
        #[cfg(not(test))]
        Mutated::default()
    }

    /// Refuses what no pager of such a card can be made with; answers the page size.
    pub(super) fn check(&self, info: &DeviceInfo) -> Result<u64, PagerError> {
        let refuse = |what, why| Err(PagerError::InvalidArgument { what, why });
        let page_bytes = self.page_bytes.unwrap_or(info.granularity);
        let DeviceInfo { name, granularity, total_bytes, virtual_memory, .. } = info;
        if page_bytes == 0 || !page_bytes.is_multiple_of(*granularity) {
            return refuse(
                "page size",
                format!(
                    "{page_bytes} bytes are no multiple of the granularity of {name}, {granularity} bytes"
                ),
            );
        }
        // Without virtual memory calls nothing is taken in pages.
        if *virtual_memory && page_bytes > *total_bytes {
            return refuse(
                "page size",
                format!("{page_bytes} bytes are more than {name} has, {total_bytes} bytes"),
            );
        }
        for (what, count, most) in
            [("readers", self.readers, MOST_READERS), ("copy streams", self.copy_streams, MOST_COPY_STREAMS)]
        {
            if count > most {
                return refuse(what, format!("{count} are more than the {most} that there may be"));
            }
        }
        Ok(page_bytes)
    }

    /// Pages of one read and one copy at most.
    pub(super) fn chunk_pages(&self, page_bytes: u64) -> u32 {
        u32::try_from((self.chunk_bytes / page_bytes.max(1)).clamp(1, 4096)).unwrap_or(1)
    }

    /// The same of copies ahead of the runner.
    pub(super) fn ahead_pages(&self, page_bytes: u64) -> u32 {
        let ahead = self.copy_ahead_bytes.map_or(u64::MAX, |bytes| bytes / page_bytes.max(1));
        self.chunk_pages(page_bytes).min(u32::try_from(ahead).unwrap_or(u32::MAX)).max(1)
    }
}

impl Default for PagerOptions {
    fn default() -> Self {
        Self {
            page_bytes: None,
            headroom_bytes: None,
            page_locked_bytes: None,
            ring: RingSize::default(),
            readers: 2,
            copy_streams: 1,
            chunk_bytes: 8 << 20,
            load_bytes: 4 << 20,
            read_ahead_bytes: 32 << 20,
            copy_ahead_bytes: None,
            prefetch_loads: 8,
            source: WeightSource::read(),
            #[cfg(test)]
            mutated: Mutated::default(),
        }
    }
}

/// Where the bytes that cross the link come from.
///
/// By default they are read, with `pread`, into page-locked memory and copied from there. A file that shrinks
/// is then an error that names it, and the reads wait for the disk where no runner does. Copied straight out
/// of a mapping of the file, bytes are touched once less; but a file that shrinks ends the process at the
/// next touch, the memory is not page-locked, and whoever makes the copy waits for the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightSource {
    mapped: bool,
}

impl WeightSource {
    /// Files are read into page-locked memory: the default.
    pub const fn read() -> Self {
        Self { mapped: false }
    }

    /// Files are mapped, and copied from there; what a reader has to cast is read all the same.
    ///
    /// # Safety
    /// While a model that was opened with it lives, nobody, in this process or another, writes to its files
    /// or shortens them: the first changes bytes while a copy reads them, the second is a signal that ends
    /// the process.
    pub const unsafe fn mapped() -> Self {
        Self { mapped: true }
    }

    /// Whether files are mapped.
    pub const fn is_mapped(self) -> bool {
        self.mapped
    }

    /// The mappings of a model's files, if they are to be mapped.
    pub(super) fn map(self, index: &TensorIndex) -> Result<Option<Box<[MappedFile]>>, WeightsError> {
        if !self.mapped {
            return Ok(None);
        }
        // SAFETY: that nobody writes or shortens the files is the promise of whoever called `mapped`, and
        // there is no other way to this line.
        let map = |file: &WeightFile| unsafe { file.map() };
        index.files().iter().map(map).collect::<Result<_, _>>().map(Some)
    }
}

/// How a model is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelOptions {
    /// The type that float tensors have on the device; `None` keeps each tensor's own.
    ///
    /// Casts to a wider type take [`PagerOptions::chunk_bytes`] of the card's pool for each copy stream, from the
    /// first model opened so until the pager is dropped; [`super::forecast`] counts them. On a card of a few such
    /// chunks, make them smaller.
    pub compute: Option<Dtype>,
    /// A unit of more bytes than this is cut into pieces of at most so many, runs of rows of its first
    /// dimension; `None` cuts a unit of more than half of what the card can give into pieces of a
    /// sixteenth of it.
    pub piece_bytes: Option<u64>,
    /// How long the compute of a pass takes per GiB of weights, if known: with it ring and resident pages
    /// are chosen for this runner, otherwise for one whose compute takes as long as its copies.
    pub compute_per_gib: Option<Duration>,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::Device as _;
    use crate::device::emulated::{EmulatedDevice, EmulatedOptions};

    #[test]
    fn what_no_pager_can_be_made_with_is_refused_with_the_limit() {
        let card = EmulatedDevice::open(EmulatedOptions::new(8 << 20)).unwrap();
        let base = PagerOptions::default();
        assert_eq!(base.check(card.info()).unwrap(), 2 << 20);
        let page = |bytes| PagerOptions { page_bytes: Some(bytes), ..base.clone() };
        assert_eq!(page(4 << 20).check(card.info()).unwrap(), 4 << 20);
        for (options, limit) in [
            (page(0), "granularity"),
            (page(3 << 20), "granularity of emulated:8MiB, 2097152 bytes"),
            (page(16 << 20), "more than emulated:8MiB has, 8388608 bytes"),
            (PagerOptions { readers: 1_000_000, ..base.clone() }, "1000000 are more than the 1024"),
            (PagerOptions { copy_streams: usize::MAX, ..base.clone() }, "more than the 64"),
        ] {
            let refusal = options.check(card.info()).unwrap_err();
            assert!(matches!(refusal, PagerError::InvalidArgument { .. }));
            assert!(refusal.to_string().contains(limit), "{refusal}");
        }
        let plain = EmulatedOptions { virtual_memory: false, ..EmulatedOptions::new(8 << 20) };
        assert_eq!(page(16 << 20).check(EmulatedDevice::open(plain).unwrap().info()).unwrap(), 16 << 20);
    }
}
