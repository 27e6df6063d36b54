//! The streaming buffer: two places in one piece of memory, filled from its two ends.
//!
//! A buffer as large as the two largest modules outside holds any two of them side by side, so one is
//! copied while the other is used. Pure bookkeeping; the memory and the fences are its owner's.

#![deny(unsafe_code)]

use crate::device::Fence;

/// What lies in one of the two places.
#[derive(Debug, Default)]
pub(super) struct Place {
    /// The module and the version of its bytes; `None` while nothing lies there.
    pub(super) content: Option<(usize, u32)>,
    /// Its length in bytes.
    pub(super) bytes: u64,
    /// Guards of it.
    pub(super) pins: u32,
    /// When its bytes are there.
    pub(super) ready: Option<Fence>,
    /// When the work that used it is done, a fence a stream.
    pub(super) uses: Vec<(u64, Fence)>,
}

impl Place {
    /// Notes that what was to come here did not, and what its copy would have waited for: the next one must.
    pub(super) fn give_up(&mut self, waits: Vec<Fence>) {
        self.content = None;
        self.uses.extend(waits.into_iter().map(|fence| (NO_STREAM, fence)));
    }
}

/// The number of no stream.
const NO_STREAM: u64 = u64::MAX;

/// The two places.
#[derive(Debug, Default)]
pub(super) struct Places {
    pub(super) ends: [Place; 2],
    last: usize,
}

/// Where a module goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Slot {
    /// Which of the two.
    pub(super) end: usize,
    /// Its first byte in the buffer.
    pub(super) offset: u64,
    /// Whether the other place's content is overwritten too.
    pub(super) takes_other: bool,
}

impl Places {
    /// The place where this version of a module lies.
    pub(super) fn find(&self, module: usize, version: u32) -> Option<usize> {
        self.ends.iter().position(|place| place.content == Some((module, version)))
    }

    /// Whether any guard holds a place.
    pub(super) fn is_pinned(&self) -> bool {
        self.ends.iter().any(|place| place.pins > 0)
    }

    /// The modules that guards hold.
    pub(super) fn pinned(&self) -> impl Iterator<Item = usize> {
        self.ends.iter().filter(|place| place.pins > 0).filter_map(|place| Some(place.content?.0))
    }

    /// A place for `bytes` in a buffer of `capacity`, at the end that was filled longer ago if guards
    /// permit; `None` if they do not.
    pub(super) fn choose(&self, bytes: u64, capacity: u64) -> Option<Slot> {
        if bytes > capacity {
            return None;
        }
        [1 - self.last, self.last].into_iter().find_map(|end| {
            let other = &self.ends[1 - end];
            let used = other.content.map_or(0, |_| other.bytes);
            let takes_other = used > capacity - bytes;
            if self.ends[end].pins > 0 || (takes_other && other.pins > 0) {
                return None;
            }
            // The upper place begins on the pool's alignment, since sizes are multiples of it.
            Some(Slot { end, offset: if end == 0 { 0 } else { capacity - bytes }, takes_other })
        })
    }

    /// Empties a place for new content, which `choose` gave; answers the fences that the copy must wait for.
    pub(super) fn take(&mut self, slot: Slot, module: usize, version: u32, bytes: u64) -> Vec<Fence> {
        let mut waits = Vec::new();
        for end in [slot.end, 1 - slot.end] {
            if end == slot.end || slot.takes_other {
                let place = std::mem::take(&mut self.ends[end]);
                waits.extend(place.ready.into_iter().chain(place.uses.into_iter().map(|(_, fence)| fence)));
            }
        }
        self.ends[slot.end] = Place { content: Some((module, version)), bytes, ..Place::default() };
        self.last = slot.end;
        waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_modules_lie_side_by_side_and_take_turns() {
        let mut places = Places::default();
        let mut put = |module, bytes| {
            let slot = places.choose(bytes, 100).unwrap();
            places.take(slot, module, 0, bytes);
            slot
        };
        assert_eq!(put(0, 60), Slot { end: 1, offset: 40, takes_other: false });
        assert_eq!(put(1, 40), Slot { end: 0, offset: 0, takes_other: false });
        assert_eq!(put(2, 30), Slot { end: 1, offset: 70, takes_other: false });
        // Too large beside the other: both go.
        assert_eq!(put(3, 71), Slot { end: 0, offset: 0, takes_other: true });
        assert_eq!((places.find(3, 0), places.find(2, 0), places.find(3, 1)), (Some(0), None, None));
    }

    #[test]
    fn what_guards_hold_is_not_taken() {
        let mut places = Places::default();
        let slot = places.choose(60, 100).unwrap();
        places.take(slot, 0, 0, 60);
        places.ends[slot.end].pins = 1;
        assert_eq!(places.choose(41, 100), None);
        let beside = places.choose(40, 100).unwrap();
        assert_eq!(beside, Slot { end: 1 - slot.end, offset: 0, takes_other: false });
        places.take(beside, 1, 0, 40);
        places.ends[beside.end].pins = 1;
        assert_eq!(places.choose(1, 100), None);
        assert_eq!(places.pinned().collect::<Vec<_>>(), [1, 0]);
        assert_eq!(places.choose(101, 100), None);
    }
}
