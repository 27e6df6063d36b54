//! The page-locked budget: how much host memory may be page-locked, and who gives some back.
//!
//! The decisions are pure; the executor asks listed models, idle ones first. Nothing here ever fails: a
//! load without page-locked memory is slower, not wrong.

#![deny(unsafe_code)]

use super::host::HostFigures;
use super::loaded_model::{LoadedModel, Standing};
use super::platform::Platform;
use super::state::Manager;
use crate::units::{GIB, MIB};

/// What [`Manager::ensure_pin_budget`] frees beyond the shortfall.
pub const PIN_BUDGET_SLACK: u64 = 256 * MIB;

/// What [`Manager::ensure_pin_registerable`] frees beyond the shortfall: each such free stops the device,
/// so it takes a good piece.
pub const PIN_REGISTERABLE_SLACK: u64 = 2 * GIB;

/// The host memory that may be page-locked.
///
/// On Linux `max(0.40 × ram, min(0.90 × ram, ram − 4 GiB, ram + swap − 16 GiB))`, where `ram` is the
/// control group's limit if there is one and swap counts only without one; elsewhere `0.40 × ram`.
pub fn page_locked_budget(platform: Platform, host: &HostFigures) -> u64 {
    let ram = host.cgroup_limit.unwrap_or(host.ram_total);
    let part = |percent: u128| u64::try_from(u128::from(ram) * percent / 100).unwrap_or(u64::MAX);
    let least = part(40);
    if platform != Platform::Linux {
        return least;
    }
    let swap = if host.cgroup_limit.is_some() { 0 } else { host.swap_total };
    let most =
        part(90).min(ram.saturating_sub(4 * GIB)).min(ram.saturating_add(swap).saturating_sub(16 * GIB));
    least.max(most)
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
            let calling = self.calling_out();
            let freed = model.partially_unload_ram(shortfall);
            drop(calling);
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
    fn the_budget_is_the_machines_share() {
        let machine = |ram: u64, swap: u64, limit: Option<u64>| HostFigures {
            ram_total: ram * GIB,
            ram_available: 0,
            cgroup_limit: limit.map(|limit| limit * GIB),
            swap_total: swap * GIB,
        };
        let tenths = |gib: u64, tenths: u64| gib * GIB + GIB * tenths / 10;
        let table = [
            // 90 % of a large machine.
            (Platform::Linux, machine(1000, 0, None), 900 * GIB),
            // All but 16 GiB of a middling one, swap counted.
            (Platform::Linux, machine(64, 0, None), 48 * GIB),
            (Platform::Linux, machine(64, 8, None), 56 * GIB),
            (Platform::Linux, machine(32, 64, None), 28 * GIB),
            // 40 % of a small one.
            (Platform::Linux, machine(16, 0, None), tenths(6, 4)),
            // The control group's limit, without swap.
            (Platform::Linux, machine(1000, 1000, Some(64)), 48 * GIB),
            (Platform::Windows, machine(64, 64, None), tenths(25, 6)),
        ];
        for (platform, host, budget) in table {
            let answer = page_locked_budget(platform, &host);
            assert!(answer.abs_diff(budget) <= 1, "{platform:?} {host:?}: {answer} is not {budget}");
        }
        assert_eq!(page_locked_budget(Platform::Linux, &HostFigures::default()), 0);
    }

    #[test]
    fn a_shortfall_is_freed_with_slack_and_no_shortfall_frees_nothing() {
        assert_eq!(pin_shortfall(10, 5, 15, 256), 0);
        assert_eq!(pin_shortfall(10, 6, 15, 256), 257);
        assert_eq!(pin_shortfall(u64::MAX, u64::MAX, 0, u64::MAX), u64::MAX);
    }
}
