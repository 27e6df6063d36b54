//! The settings that may change while the manager runs.
//!
//! Every call of the manager reads them when it begins, so a change takes effect at the next call. Owns
//! values only; the manager keeps them behind a short lock of their own.

#![deny(unsafe_code)]

use crate::units::MIB;

/// The floor that must stay free below any load, the reserve not counted: 0.8 GiB.
pub const DEFAULT_INFERENCE_FLOOR: u64 = 858_993_460;

/// The reserve for others on Linux: 400 MiB.
pub const DEFAULT_RESERVE: u64 = 400 * MIB;

/// How much of models the manager keeps on cards.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum VramState {
    /// No card at all; models load whole where they are (host memory).
    Disabled,
    /// Practically nothing stays on the card.
    No,
    /// Models load in part, as the budget allows. Decides as [`VramState::Normal`] does.
    Low,
    /// Models load whole if they fit and in part if not.
    #[default]
    Normal,
    /// Models load whole, and idle cache is kept.
    High,
    /// The card's memory is the machine's; models load whole.
    Shared,
}

/// The settings of a manager.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Knobs {
    /// Bytes to leave for others on every card: `extra_reserved_memory`.
    pub reserve: u64,
    /// Bytes that must stay free below any load beside the reserve. Small or emulated cards need less than
    /// the default of 0.8 GiB to admit anything.
    pub inference_floor: u64,
    /// Bytes that a pager leaves free; `None` is the smaller of the reserve and 1/32 of the card.
    pub headroom: Option<u64>,
    /// How much stays on cards.
    pub vram_state: VramState,
    /// Whether models stay on a card until room is needed. Without it every admission empties the card.
    pub smart_memory: bool,
    /// The part of free memory that weights may always have, 0 to 1; `None` is the backend's own (0 on
    /// NVIDIA cards and the emulated device, 0.4 elsewhere).
    pub min_weight_ratio: Option<f64>,
    /// Bytes of host memory that may be page-locked; `None` is the machine's own share.
    pub page_locked_budget: Option<u64>,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            reserve: DEFAULT_RESERVE,
            inference_floor: DEFAULT_INFERENCE_FLOOR,
            headroom: None,
            vram_state: VramState::Normal,
            smart_memory: true,
            min_weight_ratio: None,
            page_locked_budget: None,
        }
    }
}

impl Knobs {
    /// The floor and the reserve: what stays free below any load.
    pub fn minimum_inference_memory(&self) -> u64 {
        self.inference_floor.saturating_add(self.reserve)
    }

    /// What a pager leaves free on a card of `total` bytes.
    pub fn headroom_of(&self, total: u64) -> u64 {
        self.headroom.unwrap_or_else(|| self.reserve.min(total / 32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GIB;

    #[test]
    fn the_headroom_is_a_thirty_second_of_a_small_card_and_the_reserve_of_a_large_one() {
        let knobs = Knobs::default();
        assert_eq!(knobs.headroom_of(64 * MIB), 2 * MIB);
        assert_eq!(knobs.headroom_of(80 * GIB), 400 * MIB);
        assert_eq!(Knobs { headroom: Some(0), ..knobs }.headroom_of(80 * GIB), 0);
    }

    #[test]
    fn a_floor_that_overflows_saturates() {
        let knobs = Knobs { reserve: u64::MAX, ..Knobs::default() };
        assert_eq!(knobs.minimum_inference_memory(), u64::MAX);
    }
}
