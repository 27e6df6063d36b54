//! How a pager and a model on it are set up. Values only.

#![deny(unsafe_code)]

use std::time::Duration;

use super::mutations::Mutated;
use super::plan::RingSize;
use crate::weights::Dtype;

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
    /// Threads that read files.
    pub readers: usize,
    /// Streams that copies run on.
    pub copy_streams: usize,
    /// Bytes of one read and one copy, in whole pages.
    pub chunk_bytes: u64,
    /// Loads that prefetch may have under way at once; 0 turns prefetch off.
    pub prefetch_loads: usize,
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
            chunk_bytes: 4 << 20,
            prefetch_loads: 8,
            #[cfg(test)]
            mutated: Mutated::default(),
        }
    }
}

/// How a model is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelOptions {
    /// The type that float tensors have on the device; `None` keeps each tensor's own.
    pub compute: Option<Dtype>,
    /// A unit of more bytes than this is cut into pieces of at most so many, runs of rows of its first
    /// dimension; `None` cuts a unit of more than half of what the card can give into pieces of a
    /// sixteenth of it.
    pub piece_bytes: Option<u64>,
    /// How long the compute of a pass takes per GiB of weights, if known: with it ring and resident pages
    /// are chosen for this runner, otherwise for one whose compute takes as long as its copies.
    pub compute_per_gib: Option<Duration>,
}
