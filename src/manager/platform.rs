//! What differs from backend to backend and from system to system, as pure functions of their kinds.
//!
//! This crate runs on Linux x86-64 with CUDA cards and emulated ones. The rules of the others are here
//! because the manager's decisions are the same there, and a caller who brings such a device (through
//! [`CardFigures`](super::CardFigures)) gets the right ones. Owns values only.

#![deny(unsafe_code)]

use crate::units::{GIB, MIB};

/// The kind of a device, as far as its memory figures go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Backend {
    /// An NVIDIA card under Linux: the driver's free figure is device wide.
    #[default]
    Cuda,
    /// An NVIDIA card under Windows' display driver model: the driver's free figure is this process's own
    /// budget, in which other processes do not show.
    CudaWddm,
    /// This crate's emulated card.
    Emulated,
    /// The machine's processor.
    Cpu,
    /// Apple's Metal.
    Mps,
    /// Microsoft's `DirectML`, which has no figures.
    DirectMl,
    /// Intel's cards.
    Xpu,
    /// Huawei's Ascend.
    Npu,
    /// Cambricon's cards.
    Mlu,
}

/// The operating system, as far as the default reserve and the page-locked budget go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Platform {
    /// Linux.
    #[default]
    Linux,
    /// Windows.
    Windows,
    /// Any other.
    Other,
}

impl Platform {
    /// The one that this program was built for.
    pub fn current() -> Self {
        if cfg!(target_os = "linux") {
            Self::Linux
        } else if cfg!(windows) {
            Self::Windows
        } else {
            Self::Other
        }
    }
}

/// Everything that a free-memory rule may read of a device, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RawFigures {
    /// The driver's total.
    pub driver_total: u64,
    /// The driver's free figure. Negative only on books that are overdrawn.
    pub driver_free: i64,
    /// Bytes that the process's pool took from the device.
    pub pool_reserved: u64,
    /// Bytes of the pool that are in use.
    pub pool_used: u64,
    /// Bytes of device memory that this process holds beside the pool and that back nothing.
    pub idle_frames: u64,
    /// The machine's memory.
    pub ram_total: u64,
    /// The machine's memory that is available.
    pub ram_available: u64,
    /// Free bytes as seen device wide by a management library, where there is one.
    pub device_wide_free: Option<u64>,
    /// Bytes that other processes of ours hold on the device by their own account.
    pub worker_bytes: u64,
    /// How many such processes there are.
    pub workers: u32,
}

/// Free memory as the manager counts it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FreeFigures {
    /// Bytes that can be had: what is free, and idle cache. Signed: books can be overdrawn.
    pub total: i64,
    /// Idle cache: what this process holds and could hand back.
    pub cache: u64,
}

/// What a worker process takes of a card beside its weights, where nobody can see it: 250 MiB.
pub const WORKER_OVERHEAD: u64 = 250 * MIB;

/// The free memory of a device, by the rule of its backend.
///
/// | backend | free |
/// |---|---|
/// | CUDA, emulated, NPU, MLU | the driver's figure + the pool's idle bytes + idle frames |
/// | CUDA under WDDM | the same with the device-wide figure; without one, the driver's less what workers hold and 250 MiB a worker |
/// | CPU, MPS | the machine's available memory |
/// | `DirectML` | 1 GiB, whatever is true |
/// | XPU | the total less the pool's reserved bytes: this process only |
pub fn free_memory_rule(backend: Backend, raw: &RawFigures) -> FreeFigures {
    let cache = raw.pool_reserved.saturating_sub(raw.pool_used).saturating_add(raw.idle_frames);
    let with_cache = |driver: i128| clamp(driver + i128::from(cache));
    match backend {
        Backend::Cuda | Backend::Emulated | Backend::Npu | Backend::Mlu => {
            FreeFigures { total: with_cache(i128::from(raw.driver_free)), cache }
        }
        Backend::CudaWddm => {
            let free = match raw.device_wide_free {
                Some(free) => i128::from(free),
                None => {
                    i128::from(raw.driver_free)
                        - i128::from(raw.worker_bytes)
                        - i128::from(raw.workers) * i128::from(WORKER_OVERHEAD)
                }
            };
            FreeFigures { total: with_cache(free), cache }
        }
        Backend::Cpu | Backend::Mps => FreeFigures { total: clamp(i128::from(raw.ram_available)), cache: 0 },
        Backend::DirectMl => FreeFigures { total: clamp(i128::from(GIB)), cache: 0 },
        Backend::Xpu => {
            FreeFigures { total: clamp(i128::from(raw.driver_total) - i128::from(raw.pool_reserved)), cache }
        }
    }
}

/// The total memory of a device, by the rule of its backend: the machine's on CPU and MPS, 1 GiB on
/// `DirectML`, else the driver's, which is less than the card's nominal size.
pub fn total_memory_rule(backend: Backend, raw: &RawFigures) -> u64 {
    match backend {
        Backend::Cpu | Backend::Mps => raw.ram_total,
        Backend::DirectMl => GIB,
        _ => raw.driver_total,
    }
}

/// The smaller card that a cap makes of a large one: its total is at most `cap`, and as much is missing
/// from its free bytes.
#[must_use]
pub fn capped(raw: RawFigures, cap: Option<u64>) -> RawFigures {
    let Some(cap) = cap.filter(|cap| *cap < raw.driver_total) else { return raw };
    let hidden = raw.driver_total - cap;
    RawFigures {
        driver_total: cap,
        driver_free: clamp(i128::from(raw.driver_free) - i128::from(hidden)),
        device_wide_free: raw.device_wide_free.map(|free| free.saturating_sub(hidden)),
        ..raw
    }
}

/// The bytes left to others on every card where the user said nothing: 400 MiB; on Windows 600 MiB, and
/// 700 MiB on its cards of more than 15 GiB, since its desktop takes more there.
pub fn default_reserve(platform: Platform, card_total: u64) -> u64 {
    match platform {
        Platform::Windows if card_total > 15 * GIB => 700 * MIB,
        Platform::Windows => 600 * MIB,
        Platform::Linux | Platform::Other => 400 * MIB,
    }
}

/// The part of free memory that weights may always have: 0 on NVIDIA cards and the emulated device,
/// whose copies are fast enough to stream, 0.4 elsewhere.
pub fn default_min_weight_ratio(backend: Backend) -> f64 {
    match backend {
        Backend::Cuda | Backend::CudaWddm | Backend::Emulated => 0.0,
        _ => 0.4,
    }
}

/// Whether `soft_empty_cache` has anything to hand back on such a device.
pub fn has_idle_cache(backend: Backend) -> bool {
    !matches!(backend, Backend::Cpu | Backend::DirectMl)
}

fn clamp(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: RawFigures = RawFigures {
        driver_total: 24 * GIB,
        driver_free: 10 << 30,
        pool_reserved: 3 * GIB,
        pool_used: GIB,
        idle_frames: GIB / 2,
        ram_total: 64 * GIB,
        ram_available: 40 * GIB,
        device_wide_free: None,
        worker_bytes: 2 * GIB,
        workers: 2,
    };

    #[test]
    fn every_backend_answers_free_memory_by_its_own_rule() {
        let gib = |whole: u64| i64::try_from(whole * GIB).unwrap();
        let half = i64::try_from(GIB / 2).unwrap();
        let overhead = i64::try_from(2 * WORKER_OVERHEAD).unwrap();
        let table = [
            (Backend::Cuda, gib(12) + half, 5 * GIB / 2),
            (Backend::Emulated, gib(12) + half, 5 * GIB / 2),
            (Backend::Npu, gib(12) + half, 5 * GIB / 2),
            (Backend::Mlu, gib(12) + half, 5 * GIB / 2),
            (Backend::CudaWddm, gib(10) + half - overhead, 5 * GIB / 2),
            (Backend::Cpu, gib(40), 0),
            (Backend::Mps, gib(40), 0),
            (Backend::DirectMl, gib(1), 0),
            (Backend::Xpu, gib(21), 5 * GIB / 2),
        ];
        for (backend, total, cache) in table {
            assert_eq!(free_memory_rule(backend, &RAW), FreeFigures { total, cache }, "{backend:?}");
        }
    }

    #[test]
    fn under_wddm_a_device_wide_figure_is_believed_over_the_process_budget() {
        let raw =
            RawFigures { device_wide_free: Some(GIB), pool_reserved: 0, pool_used: 0, idle_frames: 0, ..RAW };
        assert_eq!(free_memory_rule(Backend::CudaWddm, &raw).total, i64::try_from(GIB).unwrap());
    }

    #[test]
    fn totals_are_the_drivers_or_the_machines() {
        let table = [
            (Backend::Cuda, 24 * GIB),
            (Backend::Emulated, 24 * GIB),
            (Backend::Xpu, 24 * GIB),
            (Backend::Cpu, 64 * GIB),
            (Backend::Mps, 64 * GIB),
            (Backend::DirectMl, GIB),
        ];
        for (backend, total) in table {
            assert_eq!(total_memory_rule(backend, &RAW), total, "{backend:?}");
        }
    }

    #[test]
    fn the_reserve_is_the_platforms() {
        let table = [
            (Platform::Linux, 8 * GIB, 400),
            (Platform::Linux, 80 * GIB, 400),
            (Platform::Other, 8 * GIB, 400),
            (Platform::Windows, 8 * GIB, 600),
            (Platform::Windows, 15 * GIB, 600),
            (Platform::Windows, 16 * GIB, 700),
        ];
        for (platform, total, mib) in table {
            assert_eq!(default_reserve(platform, total), mib * MIB, "{platform:?} {total}");
        }
    }

    #[test]
    fn the_weight_ratio_is_zero_only_where_streaming_is_fast() {
        for backend in [Backend::Cuda, Backend::CudaWddm, Backend::Emulated] {
            assert!(default_min_weight_ratio(backend).abs() < f64::EPSILON, "{backend:?}");
        }
        for backend in
            [Backend::Cpu, Backend::Mps, Backend::DirectMl, Backend::Xpu, Backend::Npu, Backend::Mlu]
        {
            assert!((default_min_weight_ratio(backend) - 0.4).abs() < f64::EPSILON, "{backend:?}");
        }
    }

    #[test]
    fn a_cap_makes_a_large_card_act_as_a_small_one() {
        let small = capped(RAW, Some(16 * GIB));
        assert_eq!(small.driver_total, 16 * GIB);
        assert_eq!(small.driver_free, i64::try_from(2 * GIB).unwrap());
        assert_eq!(capped(RAW, Some(40 * GIB)), RAW);
        assert_eq!(capped(RAW, None), RAW);
        assert!(capped(RAW, Some(0)).driver_free < 0);
    }

    #[test]
    fn absurd_figures_saturate() {
        let raw = RawFigures {
            driver_free: i64::MAX,
            pool_reserved: u64::MAX,
            pool_used: 0,
            idle_frames: u64::MAX,
            workers: u32::MAX,
            worker_bytes: u64::MAX,
            ..RawFigures::default()
        };
        assert_eq!(free_memory_rule(Backend::Cuda, &raw).total, i64::MAX);
        assert_eq!(free_memory_rule(Backend::Xpu, &raw).total, i64::MIN);
        free_memory_rule(Backend::CudaWddm, &raw);
    }
}
