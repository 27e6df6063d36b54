//! The work that both sides do.

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MB: u64 = 1_000_000;

/// What is measured.
pub(crate) enum Kind {
    /// Nanoseconds of a fault and release of a resident unit of so many bytes.
    Hit { bytes: u64 },
    /// Microseconds a page of bringing in so many pages, without the driver's own time.
    Miss { pages: u64 },
    /// GiB that a pass copies in steady state: the worst of passes 3 to 6.
    Cyclic { units: std::ops::Range<u64>, total: u64, seed: u64 },
    /// GiB that the second pass over one unit copies.
    OneUnit { bytes: u64 },
    /// GiB a switch between two models of so many bytes, from the third on.
    Switch { bytes: u64 },
    /// GiB that a pass copies, the second after another process gave 1 GiB back that it had from the start. (The
    /// peer does not give way to one that comes later, so that there is nothing to recover from.)
    Recovery { bytes: u64 },
    /// Device-wide stops (`cuCtxSynchronize`) a switch between two models of 3 GiB.
    Stops,
}

/// A row.
pub(crate) struct Work {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) card: u64,
    /// The most that ours may be of the peer's.
    pub(crate) limit: f64,
}

impl Work {
    /// Whether the answer is a time.
    pub(crate) fn is_timed(&self) -> bool {
        matches!(self.kind, Kind::Hit { .. } | Kind::Miss { .. })
    }
}

/// Units of the models that are switched between, and of the one that recovers.
pub(crate) const SWITCH_UNITS: usize = 32;

/// Bytes that another process holds in each pass of the recovery.
pub(crate) const RECOVERY: [u64; 4] = [GIB, GIB, 0, 0];

pub(crate) const WORK: &[Work] = &[
    Work {
        name: "hit of a resident unit of 16 KB",
        kind: Kind::Hit { bytes: 16 * KIB },
        card: 8 * GIB,
        limit: 1.0 / 3.0,
    },
    Work {
        name: "hit of a resident unit of 100 MB",
        kind: Kind::Hit { bytes: 100 * MIB },
        card: 8 * GIB,
        limit: 1.0 / 4.0,
    },
    Work {
        name: "hit of a resident unit of 1 GB",
        kind: Kind::Hit { bytes: GIB },
        card: 8 * GIB,
        limit: 1.0 / 8.0,
    },
    Work {
        name: "miss, own cost a page, 118 pages",
        kind: Kind::Miss { pages: 118 },
        card: 8 * GIB,
        // A page is another thing on each side, see README.md: what counts is that the next row is like it.
        limit: f64::INFINITY,
    },
    Work {
        name: "miss, own cost a page, 5750 pages",
        kind: Kind::Miss { pages: 5750 },
        card: 200 * GIB,
        limit: 1.0,
    },
    Work {
        name: "cyclic pass, 2x the card, units of 50-150 MB",
        kind: Kind::Cyclic { units: 50 * MB..150 * MB, total: 9_100 * MB, seed: 2 },
        card: 4550 * MB / (2 * MIB) * (2 * MIB),
        limit: 1.0,
    },
    Work {
        name: "cyclic pass, 2x the card, units of 0.5-1 GB",
        kind: Kind::Cyclic { units: 500 * MB..1_000 * MB, total: 10_800 * MB, seed: 3 },
        card: 5400 * MB / (2 * MIB) * (2 * MIB),
        limit: 1.0,
    },
    Work {
        name: "second pass over a unit of 2.2 GiB, empty card of 4 GiB",
        kind: Kind::OneUnit { bytes: GIB * 11 / 5 },
        card: 4 * GIB,
        limit: 0.0,
    },
    Work {
        name: "two models of 3 GiB in turn, one pass each, card of 4 GiB",
        kind: Kind::Switch { bytes: 3 * GIB },
        card: 4 * GIB,
        limit: 1.0,
    },
    Work {
        name: "a pass after another process gave 1 GiB back",
        kind: Kind::Recovery { bytes: 6 * GIB },
        card: 4 * GIB,
        limit: 1.0,
    },
    Work { name: "device-wide stops a switch", kind: Kind::Stops, card: 4 * GIB, limit: 0.0 },
];
