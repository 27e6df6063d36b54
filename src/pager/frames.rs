//! The frames of a card: what each holds, who fills it, and who may still use it.
//!
//! Owned by the pager's control state and only touched under its lock. A frame is idle (no page), the own
//! frame of a resident page, or a slot of the ring, which many pages are mapped to and one page's bytes
//! lie in.

#![deny(unsafe_code)]

use crate::device::{DeviceError, Fence, FrameSet, SharedDevice};

/// No frame, no page, no slot.
pub(crate) const NONE: u32 = u32::MAX;

/// A page of a model, by the model's place and the page's number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PageKey {
    pub(crate) model: u32,
    pub(crate) page: u32,
}

impl PageKey {
    pub(crate) const NONE: Self = Self { model: NONE, page: NONE };

    pub(crate) fn is_none(self) -> bool {
        self.model == NONE
    }
}

/// What a frame is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Backs no page: idle cache.
    Idle,
    /// The own frame of one resident page.
    Resident,
    /// A slot of the ring.
    Ring,
}

/// A frame's account: 40 bytes, since a fault of a large model looks at those of all of its pages. The fences are
/// the device's, but for the models of this hand-over.
#[derive(Debug)]
pub(crate) struct FrameInfo<F = Fence> {
    pub(crate) role: Role,
    /// Whose bytes it holds, or will hold once `loading` is done.
    pub(crate) content: PageKey,
    /// The load that will fill it and whose copy is not enqueued yet; zero for none.
    pub(crate) loading: u64,
    /// The copy that fills it, until it was seen done.
    pub(crate) arrive: Option<F>,
    /// What is known of its use by streams.
    pub(crate) uses: Uses<F>,
    /// Whether its content was used by the last span that touches it in a pass, or is of no use.
    pub(crate) consumed: bool,
    /// Whether its content came by a copy since a fault last counted it.
    pub(crate) fresh: bool,
    /// Pages that are mapped to it.
    pub(crate) mapped: u32,
}

/// Points that must be passed before a frame is written again, one a stream slot, and when its content was asked
/// for. A frame that only ever was a page's own has neither, so they lie apart.
#[derive(Debug)]
pub(crate) struct Uses<F>(Option<Box<UseList<F>>>);

#[derive(Debug)]
struct UseList<F> {
    points: Vec<(u8, F)>,
    loaded_at: u64,
}

impl<F> Uses<F> {
    fn list(&mut self) -> &mut UseList<F> {
        self.0.get_or_insert_with(|| Box::new(UseList { points: Vec::new(), loaded_at: 0 }))
    }

    /// The points, each with its stream's slot.
    pub(crate) fn iter(&self) -> std::slice::Iter<'_, (u8, F)> {
        self.0.as_deref().map_or(&[][..], |list| &list.points).iter()
    }

    /// Forgets the points; the memory is kept for the next.
    pub(crate) fn clear(&mut self) {
        if let Some(list) = &mut self.0 {
            list.points.clear();
        }
    }

    /// When the content was asked for, by the card's count of page loads; zero if nobody noted it.
    pub(crate) fn loaded_at(&self) -> u64 {
        self.0.as_deref().map_or(0, |list| list.loaded_at)
    }

    pub(crate) fn set_loaded_at(&mut self, loads: u64) {
        self.list().loaded_at = loads;
    }
}

impl<F: Clone> FrameInfo<F> {
    pub(crate) fn new() -> Self {
        Self {
            role: Role::Idle,
            content: PageKey::NONE,
            loading: 0,
            arrive: None,
            uses: Uses(None),
            consumed: true,
            fresh: false,
            mapped: 0,
        }
    }

    /// Forgets the content; fences stay, they guard the memory.
    pub(crate) fn clear_content(&mut self) {
        self.content = PageKey::NONE;
        self.loading = 0;
        self.consumed = true;
        self.fresh = false;
    }

    /// Notes that work up to `fence` on stream slot `slot` uses the frame.
    pub(crate) fn used_until(&mut self, slot: u8, fence: &F) {
        let points = &mut self.uses.list().points;
        match points.iter_mut().find(|(other, _)| *other == slot) {
            Some((_, old)) => *old = fence.clone(),
            None => points.push((slot, fence.clone())),
        }
    }

    /// Marks the frame as holding, soon, the bytes of a page; `at` is the card's count of page loads.
    pub(crate) fn occupy(&mut self, content: PageKey, at: u64) {
        self.content = content;
        self.loading = 0;
        self.fresh = false;
        self.consumed = false;
        if self.role == Role::Ring {
            self.uses.set_loaded_at(at);
        }
    }

    /// The points that a copy into the frame must wait for.
    pub(crate) fn before_copy(&self) -> impl Iterator<Item = &F> {
        self.uses.iter().map(|(_, fence)| fence).chain(&self.arrive)
    }

    /// Notes a copy into the frame that waits for [`Self::before_copy`] and is done at `fence`.
    pub(crate) fn copied(&mut self, fence: F) {
        self.uses.clear();
        self.loading = 0;
        self.fresh = true;
        self.arrive = Some(fence);
    }
}

impl FrameInfo {
    /// Blocks until nothing in flight writes or reads the frame.
    pub(crate) fn wait_quiet(&mut self) -> Result<(), DeviceError> {
        if let Some(fence) = &self.arrive {
            fence.wait()?;
            self.arrive = None;
        }
        for (_, fence) in self.uses.iter() {
            fence.wait()?;
        }
        self.uses.clear();
        Ok(())
    }

    /// As [`Self::wait_quiet`], for who goes on whatever the answer.
    pub(crate) fn settle(&mut self) -> Result<(), DeviceError> {
        let mut result = self.arrive.take().map_or(Ok(()), |fence| fence.settle());
        for (_, fence) in self.uses.iter() {
            result = result.and(fence.settle());
        }
        self.uses.clear();
        result
    }
}

/// All frames that the pager took from a card.
#[derive(Debug)]
pub(crate) struct Frames {
    pub(crate) set: FrameSet,
    info: Vec<FrameInfo>,
    idle: Vec<u32>,
    /// The ring's slots; a slot is a frame. A slot that was given up holds [`NONE`] until it is filled again.
    pub(crate) ring: Vec<u32>,
    /// Frames whose role is the ring: those that `ring` names.
    in_ring: u32,
    /// Bytes that the card's activation pool held at the last look.
    pool_bytes: u64,
    /// The most bytes of frames and pool at once.
    peak_bytes: u64,
}

impl Frames {
    pub(crate) fn new(device: &SharedDevice, page_bytes: u64) -> Self {
        Self {
            set: FrameSet::new(device, page_bytes),
            info: Vec::new(),
            idle: Vec::new(),
            ring: Vec::new(),
            in_ring: 0,
            pool_bytes: 0,
            peak_bytes: 0,
        }
    }

    /// Live frames.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.set.len()).unwrap_or(u32::MAX)
    }

    /// The most bytes of frames and activation pool that were held at once.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    /// Notes what the activation pool holds.
    pub(crate) fn note_pool(&mut self, bytes: u64) {
        self.pool_bytes = bytes;
        self.note_peak();
    }

    fn note_peak(&mut self) {
        let held = u64::from(self.count()) * self.set.frame_bytes() + self.pool_bytes;
        self.peak_bytes = self.peak_bytes.max(held);
    }

    /// Frames without a page.
    pub(crate) fn idle(&self) -> u32 {
        u32::try_from(self.idle.len()).unwrap_or(u32::MAX)
    }

    /// Frames of the ring.
    pub(crate) fn ring_frames(&self) -> u32 {
        // Asked at every claim of a new frame, so it is not counted then.
        debug_assert_eq!(self.in_ring as usize, self.ring.iter().filter(|&&frame| frame != NONE).count());
        self.in_ring
    }

    pub(crate) fn info(&self, frame: u32) -> &FrameInfo {
        &self.info[frame as usize]
    }

    pub(crate) fn info_mut(&mut self, frame: u32) -> &mut FrameInfo {
        &mut self.info[frame as usize]
    }

    /// An idle frame, for `role`.
    pub(crate) fn take_idle(&mut self, role: Role) -> Option<u32> {
        let frame = self.idle.pop()?;
        self.info[frame as usize].role = role;
        self.in_ring += u32::from(role == Role::Ring);
        Some(frame)
    }

    /// A new frame of the device, for `role`.
    pub(crate) fn create(&mut self, role: Role) -> Result<u32, DeviceError> {
        let frame = self.set.create()?;
        if frame as usize >= self.info.len() {
            self.info.resize_with(frame as usize + 1, FrameInfo::new);
        }
        self.info[frame as usize] = FrameInfo { role, ..FrameInfo::new() };
        self.in_ring += u32::from(role == Role::Ring);
        self.note_peak();
        Ok(frame)
    }

    /// Makes a frame idle; nothing is mapped to it and nothing in flight uses it.
    pub(crate) fn make_idle(&mut self, frame: u32) {
        let info = &mut self.info[frame as usize];
        info.clear_content();
        self.in_ring -= u32::from(info.role == Role::Ring);
        info.role = Role::Idle;
        self.idle.push(frame);
    }

    /// Hands up to `count` idle frames back to the device; answers how many.
    pub(crate) fn release_idle(&mut self, count: u32) -> Result<u32, DeviceError> {
        let mut released = 0;
        while released < count {
            let Some(frame) = self.idle.pop() else { break };
            self.set.release(frame)?;
            released += 1;
        }
        Ok(released)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_frames_account_takes_40_bytes() {
        assert_eq!(size_of::<FrameInfo>(), 40);
    }
}

#[cfg(all(test, loom))]
#[path = "ring_models.rs"]
mod models;
