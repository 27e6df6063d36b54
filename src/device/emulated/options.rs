//! How an emulated card is opened, and the name that says so.
//!
//! Pure values; no lock.

#![deny(unsafe_code)]

use super::clock::CallCosts;
use crate::device::handle::host_page_bytes;
use crate::units::{GIB, KIB, MIB, Rate, format_size};

/// The default page of an emulated card in bytes, as on current CUDA cards.
pub const DEFAULT_PAGE_BYTES: u64 = 2 * MIB;

/// The default link, about what sixteen lanes of the fourth PCI Express generation reach.
pub const DEFAULT_LINK: Rate = Rate(25_000_000_000);

/// How an emulated card is opened.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each switch is one of the card's abilities or habits")]
pub struct EmulatedOptions {
    /// The card's size in bytes; rounded down to whole pages.
    pub bytes: u64,
    /// The granularity in bytes: a power of two and a multiple of the host's page.
    pub page_bytes: u64,
    /// The rate of copies in each direction.
    pub link: Rate,
    /// The rate of file reads; `None` is no cost at all.
    pub disk: Option<Rate>,
    /// Whether bytes are kept. Without, there are addresses, accounts and the clock, for cards and tables
    /// larger than this machine; work is done as it is enqueued and moves nothing.
    pub keeps_bytes: bool,
    /// Whether there are virtual memory calls. Without, memory comes from the activation pool alone, as on
    /// some virtual and embedded cards.
    pub virtual_memory: bool,
    /// What calls cost on the modelled clock.
    pub costs: CallCosts,
    /// Whether new and released frames are filled with `0xDB`; on by default in debug builds.
    pub poison: bool,
    /// Whether memory in use is watched: whoever touches the same bytes must be ordered by streams and fences,
    /// and memory is taken away only when the host was told that all work on it is done. What is not so is
    /// refused as misuse, however lucky the threads were. On by default in debug builds.
    pub watch: bool,
    /// The most memory mappings that the process may have, all its emulated cards together; `None` is
    /// three quarters of the system's limit.
    pub max_mappings: Option<u64>,
}

impl EmulatedOptions {
    /// A card of `bytes` with everything else at its default.
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            page_bytes: DEFAULT_PAGE_BYTES,
            link: DEFAULT_LINK,
            disk: None,
            keeps_bytes: true,
            virtual_memory: true,
            costs: CallCosts::default(),
            poison: cfg!(debug_assertions),
            watch: cfg!(debug_assertions),
            max_mappings: None,
        }
    }

    /// The size in whole pages, or why the card cannot be.
    pub(in crate::device) fn whole_pages(&self) -> Result<u64, String> {
        let page = self.page_bytes;
        if !page.is_power_of_two() || !page.is_multiple_of(host_page_bytes()) {
            return Err(format!(
                "its page of {page} bytes is not a power of two that is a multiple of the host's page, {}",
                format_size(host_page_bytes())
            ));
        }
        let pages = self.bytes / page;
        if pages == 0 {
            return Err(format!("its size of {} bytes is less than one page of {page}", self.bytes));
        }
        Ok(pages)
    }

    /// The device string that names such a card, as far as a string can.
    pub(super) fn name(&self, bytes: u64) -> String {
        let size = exact_size(bytes);
        let bytes = if self.keeps_bytes { "" } else { ",bytes=none" };
        let vmm = if self.virtual_memory { "" } else { ",vmm=none" };
        match self.page_bytes {
            DEFAULT_PAGE_BYTES => format!("emulated:{size}{bytes}{vmm}"),
            page => format!("emulated:{size},page={}{bytes}{vmm}", exact_size(page)),
        }
    }
}

/// A size in the largest unit that divides it.
fn exact_size(bytes: u64) -> String {
    for (unit, name) in [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")] {
        if bytes.is_multiple_of(unit) {
            return format!("{}{name}", bytes / unit);
        }
    }
    bytes.to_string()
}
