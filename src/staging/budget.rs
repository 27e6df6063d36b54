//! How much host memory may be page-locked.
//!
//! A pure rule over the machine's figures. Owns nothing, takes no lock.

#![deny(unsafe_code)]

use super::host::{HostFigures, LinuxHost};
use crate::units::GIB;

/// The most bytes that may be page-locked on Linux:
/// `max(0.40 × ram, min(0.90 × ram, ram − 4 GiB, ram + swap − 16 GiB))`, where `ram` is the control group's
/// limit if there is one and swap counts only without one.
pub fn page_locked_limit(host: &HostFigures) -> u64 {
    let ram = host.cgroup_limit.unwrap_or(host.ram_total);
    let swap = if host.cgroup_limit.is_some() { 0 } else { host.swap_total };
    let most = percent(ram, 90)
        .min(ram.saturating_sub(4 * GIB))
        .min(ram.saturating_add(swap).saturating_sub(16 * GIB));
    least_page_locked_limit(host).max(most)
}

/// The share that may be page-locked of any machine: `0.40 × ram`.
pub fn least_page_locked_limit(host: &HostFigures) -> u64 {
    percent(host.cgroup_limit.unwrap_or(host.ram_total), 40)
}

/// [`page_locked_limit`] of this machine; where it says nothing of its memory, one of 8 GiB is assumed.
pub fn this_machines_limit() -> u64 {
    let figures = LinuxHost::default().figures().unwrap_or_else(|error| {
        tracing::warn!(%error, "a machine of 8 GiB is assumed");
        HostFigures { ram_total: 8 * GIB, ..HostFigures::default() }
    });
    page_locked_limit(&figures)
}

fn percent(of: u64, percent: u128) -> u64 {
    u64::try_from(u128::from(of) * percent / 100).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(ram: u64, swap: u64, limit: Option<u64>) -> HostFigures {
        HostFigures {
            ram_total: ram * GIB,
            ram_available: 0,
            cgroup_limit: limit.map(|limit| limit * GIB),
            swap_total: swap * GIB,
        }
    }

    #[test]
    fn the_limit_is_the_machines_share() {
        let table = [
            // 90 % of a large machine.
            (machine(1000, 0, None), 900 * GIB),
            // All but 16 GiB of a middling one, swap counted.
            (machine(64, 0, None), 48 * GIB),
            (machine(64, 8, None), 56 * GIB),
            (machine(32, 64, None), 28 * GIB),
            // 40 % of a small one.
            (machine(16, 0, None), 6 * GIB + GIB * 4 / 10),
            // The control group's limit, without swap.
            (machine(1000, 1000, Some(64)), 48 * GIB),
            (machine(1000, 1000, Some(10)), 4 * GIB),
        ];
        for (host, limit) in table {
            let answer = page_locked_limit(&host);
            assert!(answer.abs_diff(limit) <= 1, "{host:?}: {answer} is not {limit}");
        }
        assert_eq!(page_locked_limit(&HostFigures::default()), 0);
        let most = HostFigures { ram_total: u64::MAX, swap_total: u64::MAX, ..HostFigures::default() };
        assert!(page_locked_limit(&most) > u64::MAX / 2);
    }

    #[test]
    fn this_machine_may_page_lock_something() {
        assert!(this_machines_limit() > 0);
    }
}
