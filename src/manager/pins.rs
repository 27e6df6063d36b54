//! The page-locked budget: how much host memory may be page-locked, and who gives some back.
//!
//! The decisions are pure; the executor asks listed models, idle ones first. Nothing here ever fails: a
//! load without page-locked memory is slower, not wrong.

#![deny(unsafe_code)]

use super::host::HostFigures;
use super::loaded_model::{LoadedModel, Standing};
use super::platform::Platform;
use super::state::Manager;
use crate::staging::budget::{least_page_locked_limit, page_locked_limit};
use crate::units::{GIB, MIB};

/// What [`Manager::ensure_pin_budget`] frees beyond the shortfall.
pub const PIN_BUDGET_SLACK: u64 = 256 * MIB;

/// What [`Manager::ensure_pin_registerable`] frees beyond the shortfall: each such free stops the device,
/// so it takes a good piece.
pub const PIN_REGISTERABLE_SLACK: u64 = 2 * GIB;

/// The host memory that may be page-locked: on Linux as [`page_locked_limit`] says, elsewhere 0.40 of the
/// machine's.
pub fn page_locked_budget(platform: Platform, host: &HostFigures) -> u64 {
    match platform {
        Platform::Linux => page_locked_limit(host),
        Platform::Windows | Platform::Other => least_page_locked_limit(host),
    }
}

/// What others must give back so that `wanted` more bytes fit under `limit`, with `slack` beyond it; 0 if
/// they fit now.
pub fn pin_shortfall(held: u64, wanted: u64, limit: u64, slack: u64) -> u64 {
    match held.saturating_add(wanted).saturating_sub(limit) {
        0 => 0,
        shortfall => shortfall.saturating_add(slack),
    }
}

impl Manager {
    /// The host memory that may be page-locked now: the setting, or the machine's share. 0 if the machine
    /// does not say how much memory it has.
    pub fn page_locked_budget(&self) -> u64 {
        self.knobs().page_locked_budget.unwrap_or_else(|| match self.host.read() {
            Ok(host) => page_locked_budget(Platform::current(), &host),
            Err(error) => {
                tracing::warn!(%error, "nothing is page-locked");
                0
            }
        })
    }

    /// Makes room in the page-locked budget for `bytes` more of model weights: where they do not fit,
    /// other models give back the shortfall and 256 MiB. Answers whether they fit now.
    pub fn ensure_pin_budget(&self, bytes: u64) -> bool {
        self.ensure_pins(bytes, PIN_BUDGET_SLACK, Self::pinned_by_models)
    }

    /// Makes room for `bytes` more to be registered with the driver, whoever registered the rest (models,
    /// staging): where they do not fit, models give back the shortfall and 2 GiB. Answers whether they fit
    /// now.
    pub fn ensure_pin_registerable(&self, bytes: u64) -> bool {
        self.ensure_pins(bytes, PIN_REGISTERABLE_SLACK, |manager| {
            let registered = manager
                .cards
                .iter()
                .fold(0, |sum: u64, card| sum.saturating_add(card.figures.page_locked_bytes()));
            registered.max(manager.pinned_by_models())
        })
    }

    pub(super) fn make_room_for_pins(&self, bytes: u64) {
        let fits = self.ensure_pin_budget(bytes) && self.ensure_pin_registerable(bytes);
        tracing::debug!(bytes, fits, "room for page-locked memory");
    }

    fn ensure_pins(&self, bytes: u64, slack: u64, held: impl Fn(&Self) -> u64) -> bool {
        let limit = self.page_locked_budget();
        let mut shortfall = pin_shortfall(held(self), bytes, limit, slack);
        if shortfall == 0 {
            return true;
        }
        for entry in self.pin_victims() {
            if shortfall == 0 {
                break;
            }
            let Some(_claim) = self.ledger.try_claim(&entry) else { continue };
            let Some(model) = entry.model() else { continue };
            let pinned = model.pinned_size();
            let calling = self.calling_out();
            let freed = model.partially_unload_ram(shortfall);
            drop(calling);
            // What no longer counts as this model's, and what the host has back, may differ by the rest of
            // a registered block.
            let freed = freed.max(pinned.saturating_sub(model.pinned_size()));
            tracing::debug!(model = model.label(), asked = shortfall, freed, "gave page-locked memory back");
            shortfall = shortfall.saturating_sub(freed);
        }
        pin_shortfall(held(self), bytes, limit, 0) == 0
    }

    /// Who is asked for page-locked memory: models not in use, the oldest first, then those in use.
    fn pin_victims(&self) -> Vec<LoadedModel> {
        let mut entries = self.ledger.snapshot();
        entries.reverse();
        // What is being loaded is what the room is for.
        entries.retain(|entry| entry.standing() == Standing::Listed);
        entries.sort_by_key(LoadedModel::currently_used);
        entries
    }

    fn pinned_by_models(&self) -> u64 {
        let entries = self.ledger.snapshot();
        entries
            .iter()
            .filter_map(LoadedModel::model)
            .fold(0, |sum, model| u64::saturating_add(sum, model.pinned_size()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_linux_lets_more_than_the_common_share_be_page_locked() {
        let machine = HostFigures { ram_total: 64 * GIB, swap_total: 64 * GIB, ..HostFigures::default() };
        assert_eq!(page_locked_budget(Platform::Linux, &machine), 64 * GIB * 9 / 10);
        assert_eq!(page_locked_budget(Platform::Windows, &machine), 64 * GIB * 4 / 10);
        assert_eq!(page_locked_budget(Platform::Other, &machine), 64 * GIB * 4 / 10);
    }

    #[test]
    fn a_shortfall_is_freed_with_slack_and_no_shortfall_frees_nothing() {
        assert_eq!(pin_shortfall(10, 5, 15, 256), 0);
        assert_eq!(pin_shortfall(10, 6, 15, 256), 257);
        assert_eq!(pin_shortfall(u64::MAX, u64::MAX, 0, u64::MAX), u64::MAX);
    }
}
