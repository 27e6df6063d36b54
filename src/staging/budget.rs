//! How much host memory may be page-locked, and what this machine has.
//!
//! Pure rules over figures, and one reader of the system's figures. Source of the rule: the memory
//! manager's page-locked budget (see `crate::manager`). Owns nothing, takes no lock.

#![deny(unsafe_code)]

use crate::units::GIB;

/// The host memory that this process may count on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemoryFigures {
    /// RAM in bytes: the control group's limit where that is lower.
    pub ram: u64,
    /// Swap in bytes; zero under a control group's limit.
    pub swap: u64,
}

/// The most bytes that may be page-locked on Linux:
/// `max(0.40 ram, min(0.90 ram, ram - 4 GiB, ram + swap - 16 GiB))`.
pub fn page_locked_limit(figures: HostMemoryFigures) -> u64 {
    let HostMemoryFigures { ram, swap } = figures;
    let generous = (ram / 10 * 9)
        .min(ram.saturating_sub(4 * GIB))
        .min((ram.saturating_add(swap)).saturating_sub(16 * GIB));
    (ram / 5 * 2).max(generous)
}

/// Reads this machine's figures; where none can be read, a machine of 8 GiB is assumed.
pub fn host_memory() -> HostMemoryFigures {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let ram = meminfo(&info, "MemTotal:").unwrap_or(8 * GIB);
    let swap = meminfo(&info, "SwapTotal:").unwrap_or(0);
    match control_group_limit() {
        Some(limit) if limit < ram => HostMemoryFigures { ram: limit, swap: 0 },
        _ => HostMemoryFigures { ram, swap },
    }
}

fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The lowest memory limit of this process's control group and those above it (version 2, else 1).
fn control_group_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut lowest: Option<u64> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            "memory" => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        let mut path = path.trim_end_matches('/').to_owned();
        loop {
            let limit = std::fs::read_to_string(format!("{root}{path}/{file}"));
            if let Some(limit) = limit.ok().and_then(|text| text.trim().parse::<u64>().ok()) {
                lowest = Some(lowest.map_or(limit, |low| low.min(limit)));
            }
            match path.rfind('/') {
                Some(cut) => path.truncate(cut),
                None => break,
            }
        }
    }
    lowest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_follows_its_rule() {
        let limit =
            |ram, swap| page_locked_limit(HostMemoryFigures { ram: ram * GIB, swap: swap * GIB }) / GIB;
        assert_eq!(limit(128, 0), 112);
        assert_eq!(limit(64, 0), 48);
        assert_eq!(limit(24, 0), 9);
        assert_eq!(limit(24, 16), 20);
        assert_eq!(limit(8, 0), 3);
    }

    #[test]
    fn figures_of_a_machine_are_read() {
        assert_eq!(meminfo("MemTotal:       1024 kB\nSwapTotal: 0 kB\n", "MemTotal:"), Some(1 << 20));
        assert!(host_memory().ram > 0);
    }
}
