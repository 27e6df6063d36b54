//! What the machine says of its own memory.
//!
//! Reads two or three small files a call and keeps nothing. The parsing is pure. Takes no lock.

#![deny(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use crate::units::KIB;

/// The machine's memory in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostFigures {
    /// All of it, or the control group's limit where that is less.
    pub ram_total: u64,
    /// What can be had without swapping.
    pub ram_available: u64,
    /// The control group's limit, where there is one.
    pub cgroup_limit: Option<u64>,
    /// Swap space.
    pub swap_total: u64,
}

/// The machine did not say how much memory it has.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the machine's memory cannot be read: {why}")]
pub struct HostError {
    /// Why not, naming the file.
    pub why: String,
}

/// The machine as `/proc` and the control group file system show it.
#[derive(Clone, Debug)]
pub struct LinuxHost {
    proc: PathBuf,
    cgroup: PathBuf,
}

impl Default for LinuxHost {
    fn default() -> Self {
        Self { proc: PathBuf::from("/proc"), cgroup: PathBuf::from("/sys/fs/cgroup") }
    }
}

impl LinuxHost {
    /// The machine seen through other mount points, for containers that have them elsewhere and for tests.
    pub fn at(proc: impl Into<PathBuf>, cgroup: impl Into<PathBuf>) -> Self {
        Self { proc: proc.into(), cgroup: cgroup.into() }
    }

    /// The least limit on the way from the process's own group to the root, with what that group uses.
    fn cgroup(&self) -> Option<(u64, u64)> {
        let membership = fs::read_to_string(self.proc.join("self/cgroup")).unwrap_or_default();
        let mut least: Option<(u64, u64)> = None;
        for group in group_paths(&membership) {
            let base = self.cgroup.join(group.controller);
            let mut path = base.join(group.path.trim_start_matches('/'));
            loop {
                if let Some(limit) = read_number(&path.join(group.limit_file))
                    && least.is_none_or(|(known, _)| limit < known)
                {
                    least = Some((limit, read_number(&path.join(group.usage_file)).unwrap_or(0)));
                }
                if path == base || !path.pop() {
                    break;
                }
            }
        }
        least
    }
}

impl LinuxHost {
    /// The figures now.
    ///
    /// # Errors
    /// `/proc/meminfo` cannot be read, or says nothing.
    pub fn figures(&self) -> Result<HostFigures, HostError> {
        let path = self.proc.join("meminfo");
        let text = fs::read_to_string(&path)
            .map_err(|error| HostError { why: format!("{}: {error}", path.display()) })?;
        let (total, available, swap_total) = parse_meminfo(&text)
            .ok_or_else(|| HostError { why: format!("{} has no MemTotal", path.display()) })?;
        // A limit above the machine is none: that is how version 1 spells "unlimited".
        let cgroup = self.cgroup().filter(|(limit, _)| *limit < total);
        let figures =
            HostFigures { ram_total: total, ram_available: available, cgroup_limit: None, swap_total };
        Ok(match cgroup {
            None => figures,
            Some((limit, used)) => HostFigures {
                ram_total: limit,
                ram_available: available.min(limit.saturating_sub(used)),
                cgroup_limit: Some(limit),
                ..figures
            },
        })
    }
}

struct Group<'a> {
    controller: &'static str,
    path: &'a str,
    limit_file: &'static str,
    usage_file: &'static str,
}

/// The groups of `/proc/self/cgroup` that can limit memory, of either version.
fn group_paths(membership: &str) -> Vec<Group<'_>> {
    let groups = membership.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        if controllers.is_empty() {
            Some(Group { controller: "", path, limit_file: "memory.max", usage_file: "memory.current" })
        } else if controllers.split(',').any(|name| name == "memory") {
            Some(Group {
                controller: "memory",
                path,
                limit_file: "memory.limit_in_bytes",
                usage_file: "memory.usage_in_bytes",
            })
        } else {
            None
        }
    });
    groups.collect()
}

fn read_number(path: &Path) -> Option<u64> {
    // "max" is no number, and no limit.
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Total, available and swap bytes of `/proc/meminfo`.
fn parse_meminfo(text: &str) -> Option<(u64, u64, u64)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        Some(kib.saturating_mul(KIB))
    };
    let total = field("MemTotal")?;
    let available = field("MemAvailable").or_else(|| field("MemFree")).unwrap_or(0);
    Some((total, available, field("SwapTotal").unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GIB;

    const MEMINFO: &str = "MemTotal:       67108864 kB\nMemFree:  1024 kB\nMemAvailable:   33554432 kB\n\
                           SwapTotal:       8388608 kB\n";

    fn machine(membership: &str, files: &[(&str, &str)]) -> HostFigures {
        let root = tempfile::tempdir().unwrap();
        let (proc, cgroup) = (root.path().join("proc"), root.path().join("cgroup"));
        fs::create_dir_all(proc.join("self")).unwrap();
        fs::write(proc.join("meminfo"), MEMINFO).unwrap();
        fs::write(proc.join("self/cgroup"), membership).unwrap();
        for (file, text) in files {
            let path = cgroup.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        LinuxHost::at(proc, cgroup).figures().unwrap()
    }

    #[test]
    fn a_machine_without_limits_answers_for_itself() {
        let figures = machine("0::/\n", &[("memory.max", "max\n")]);
        assert_eq!(
            figures,
            HostFigures {
                ram_total: 64 * GIB,
                ram_available: 32 * GIB,
                cgroup_limit: None,
                swap_total: 8 * GIB
            }
        );
    }

    #[test]
    fn the_least_limit_of_all_enclosing_groups_counts() {
        let limit = (16 * GIB).to_string();
        let figures = machine(
            "0::/a/b\n",
            &[("a/memory.max", &limit), ("a/memory.current", "1073741824"), ("a/b/memory.max", "max")],
        );
        assert_eq!(figures.cgroup_limit, Some(16 * GIB));
        assert_eq!(figures.ram_total, 16 * GIB);
        assert_eq!(figures.ram_available, 15 * GIB);
    }

    #[test]
    fn the_first_version_of_control_groups_is_read_and_its_unlimited_is_no_limit() {
        let limit = (8 * GIB).to_string();
        let files = [("memory/x/memory.limit_in_bytes", limit.as_str())];
        assert_eq!(machine("9:cpu,memory:/x\n", &files).cgroup_limit, Some(8 * GIB));
        let files = [("memory/memory.limit_in_bytes", "9223372036854771712")];
        assert_eq!(machine("9:memory:/\n", &files).cgroup_limit, None);
    }

    #[test]
    fn a_machine_that_says_nothing_is_an_error_that_names_the_file() {
        let error = LinuxHost::at("/nowhere", "/nowhere").figures().unwrap_err();
        assert!(error.to_string().contains("/nowhere/meminfo"), "{error}");
        assert_eq!(parse_meminfo(""), None);
        assert_eq!(parse_meminfo("MemTotal: 4 kB"), Some((4096, 0, 0)));
    }

    #[test]
    fn this_machine_answers() {
        let figures = LinuxHost::default().figures().unwrap();
        assert!(figures.ram_total > 0 && figures.ram_available <= figures.ram_total);
    }
}
