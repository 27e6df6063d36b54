//! What a recorder heard: plain values, in the order of their times.

#![deny(unsafe_code)]

use std::ops::Range;
use std::time::Duration;

use super::residency::ResidencyMap;
use crate::units::ModelTime;

/// Which clock the times are of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeSource {
    /// The emulated card's: what was asked of the card, never how long this machine took.
    Modelled,
    /// The host's. Copies and compute of the card are not seen, only what the host waited for.
    Wall,
}

/// A run of time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TimeSpan {
    /// Its begin.
    pub start: ModelTime,
    /// Its end; not before its begin.
    pub end: ModelTime,
}

impl TimeSpan {
    /// How long it is.
    #[must_use]
    pub fn length(self) -> Duration {
        self.end.since(self.start)
    }

    /// How much of it lies in `other`.
    #[must_use]
    pub fn within(self, other: Self) -> Duration {
        self.end.min(other.end).since(self.start.max(other.start))
    }
}

/// A pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PassRecord {
    /// Its number, from 1.
    pub number: u32,
    /// From its first fault until its streams were through.
    pub time: TimeSpan,
    /// Bytes that were copied to the card.
    pub copied_bytes: u64,
    /// Bytes that were read from files.
    pub file_bytes: u64,
}

/// A unit, or a piece of one, of a pass: fault, use, release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// The number of its pass.
    pub pass: u32,
    /// The runner's thread, from 0.
    pub runner: u32,
    /// The unit, by its place in the index.
    pub unit: u32,
    /// The piece of it.
    pub piece: u32,
    /// The fault, on the runner's thread.
    pub fault: TimeSpan,
    /// When it was released.
    pub released: ModelTime,
    /// How long the runner stood still for it: its stream on a modelled clock, its thread otherwise.
    pub stalled: Duration,
    /// Bytes whose copy was asked for meanwhile, for this step or ahead.
    pub copied_bytes: u64,
    /// Pages whose bytes were given up meanwhile.
    pub evicted_pages: u64,
    /// The card after it.
    pub card: OnCard,
}

/// What the pager held of the card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OnCard {
    /// Bytes of pages with a frame of their own.
    pub resident_bytes: u64,
    /// Bytes of the ring.
    pub ring_bytes: u64,
    /// Frames that the pager may still take.
    pub free_frames: u64,
}

/// A copy over the link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinkCopy {
    /// When the link was busy with it.
    pub time: TimeSpan,
    /// Its bytes.
    pub bytes: u64,
    /// The units whose bytes they are; none where addresses do not tell.
    pub units: Option<Range<u32>>,
}

/// Compute of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Compute {
    /// When the card was busy with it.
    pub time: TimeSpan,
    /// The unit.
    pub unit: u32,
    /// The runner.
    pub runner: u32,
}

/// A runner's stream stood still for bytes that were on their way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stall {
    /// How long.
    pub time: TimeSpan,
    /// The unit that it was for, if it was for one.
    pub unit: Option<u32>,
    /// The runner.
    pub runner: u32,
}

/// A read of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Read {
    /// When the disk was busy with it; no time passes where the disk has no rate.
    pub time: TimeSpan,
    /// Its bytes.
    pub bytes: u64,
}

/// Everything that was heard.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Recording {
    /// The model's name: its file.
    pub model: String,
    /// The device's name.
    pub device: String,
    /// Whose times these are.
    pub source: TimeSource,
    /// The device's size in bytes.
    pub total_bytes: u64,
    /// Bytes that frames and ring might take at the end.
    pub budget_bytes: u64,
    /// Bytes left free.
    pub headroom_bytes: u64,
    /// The page size in bytes.
    pub page_bytes: u64,
    /// Bytes of the model's tensors on the card.
    pub weights_bytes: u64,
    /// What the pager held of the card at the end.
    pub at_end: OnCard,
    /// The units' names.
    pub units: Vec<String>,
    /// Runner threads.
    pub runners: u32,
    /// The passes, in order.
    pub passes: Vec<PassRecord>,
    /// The steps, in the order in which they ended.
    pub steps: Vec<Step>,
    /// Copies to the card, by time. Modelled clocks only.
    pub copies: Vec<LinkCopy>,
    /// Compute, by time. Modelled clocks only.
    pub compute: Vec<Compute>,
    /// Stalls, by time.
    pub stalls: Vec<Stall>,
    /// Reads, by time. Modelled clocks only.
    pub reads: Vec<Read>,
    /// Where the pages were.
    pub residency: ResidencyMap,
    /// Steps and operations that there was no room for.
    pub dropped: u64,
}

impl Recording {
    /// A unit's name, with what could write to a terminal or turn a line around taken out.
    #[must_use]
    pub fn unit_name(&self, unit: u32) -> String {
        self.units.get(unit as usize).map_or_else(|| format!("unit {unit}"), |name| harmless(name))
    }

    /// The number of the pass that a time lies in; the first or last for times outside.
    #[must_use]
    pub fn pass_at(&self, time: ModelTime) -> u32 {
        let after = self.passes.partition_point(|pass| pass.time.start <= time);
        self.passes.get(after.saturating_sub(1)).map_or(1, |pass| pass.number)
    }
}

/// `text` without control characters and without those that turn the direction of writing.
pub(super) fn harmless(text: &str) -> String {
    let harmful = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().map(|c| if harmful(c) { '\u{fffd}' } else { c }).collect()
}
