//! Address ranges, frames and mappings of a card, and page-locked host memory.
//!
//! One handle is one frame is one mapping's whole: offsets are 0, and an unmap covers exactly what one map
//! covered. The tables mirror what the driver holds, so that a wrong call is named before the driver sees
//! it, accounts are exact, and a frame's own number never means a newer frame, even where the driver uses
//! a handle again.
//!
//! Locks: one for the table of mappings, one for that of page locks, each held only over the table.

#![expect(unsafe_code, reason = "calls into the driver library")]

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::card::{CudaDevice, count, frame_properties, location};
use super::code::OUT_OF_MEMORY;
use super::driver::{Answer, Refusal, insist, stand_in_refuses_host_write, tell_stand_in_of_host_write};
use crate::device::handle::host_page_bytes;
use crate::device::{DeviceError, FrameId, HostMemory, VirtualMemory};
use crate::units::{DeviceAddress, DeviceRange};

/// Ranges, frames and mappings.
#[derive(Default)]
pub(super) struct MemoryTable(Mutex<Tables>);

#[derive(Default)]
struct Tables {
    /// Reserved ranges, start to bytes.
    ranges: BTreeMap<u64, u64>,
    frames: HashMap<u64, Frame>,
    /// Mappings, start to frame number and bytes.
    mappings: BTreeMap<u64, (u64, u64)>,
    next_frame: u64,
    /// Bytes of frames whose memory still exists.
    frame_bytes: u64,
    /// Frames that were not released.
    live_frames: u64,
}

struct Frame {
    handle: sys::CUmemGenericAllocationHandle,
    bytes: u64,
    mappings: u64,
    released: bool,
}

/// What exists of a [`MemoryTable`].
pub(super) struct LiveMemory {
    pub(super) frames: u64,
    pub(super) ranges: u64,
    pub(super) mappings: u64,
}

impl MemoryTable {
    /// Bytes of frames whose memory still exists: created, and not both released and unmapped.
    pub(super) fn frame_bytes(&self) -> u64 {
        self.0.lock().frame_bytes
    }

    pub(super) fn live(&self) -> LiveMemory {
        let tables = self.0.lock();
        LiveMemory {
            frames: tables.live_frames,
            ranges: tables.ranges.len() as u64,
            mappings: tables.mappings.len() as u64,
        }
    }
}

fn misuse(call: &'static str, why: String) -> DeviceError {
    DeviceError::Misuse { call, why }
}

impl Tables {
    /// The reserved range that `at` lies in.
    fn range_around(&self, at: DeviceRange) -> Option<DeviceRange> {
        let (start, bytes) = self.ranges.range(..=at.start.0).next_back()?;
        let range = DeviceRange::new(DeviceAddress(*start), *bytes);
        range.contains(at).then_some(range)
    }

    /// A mapping that has an address in common with `at`.
    fn mapping_in(&self, at: DeviceRange) -> Option<DeviceRange> {
        let (start, (_, bytes)) = self.mappings.range(..at.end().0).next_back()?;
        let mapping = DeviceRange::new(DeviceAddress(*start), *bytes);
        mapping.overlaps(at).then_some(mapping)
    }

    /// Notes a mapping and answers the driver's handle of its frame.
    fn note_mapping(
        &mut self,
        at: DeviceRange,
        frame: FrameId,
    ) -> Result<sys::CUmemGenericAllocationHandle, DeviceError> {
        if self.range_around(at).is_none() {
            return Err(misuse("map", format!("{at:?} lies in no reserved range")));
        }
        if let Some(other) = self.mapping_in(at) {
            return Err(misuse("map", format!("{at:?} overlaps the mapping {other:?}")));
        }
        let Some(known) = self.frames.get_mut(&frame.0).filter(|known| !known.released) else {
            return Err(misuse("map", format!("frame {} does not exist", frame.0)));
        };
        if known.bytes != at.bytes {
            let why = format!("frame {} has {} bytes, the place {at:?} has not", frame.0, known.bytes);
            return Err(DeviceError::InvalidArgument { call: "map", why });
        }
        known.mappings += 1;
        self.mappings.insert(at.start.0, (frame.0, at.bytes));
        Ok(known.handle)
    }

    /// Takes a mapping out, and forgets its frame if that was the last thing that kept it.
    fn forget_mapping(&mut self, at: DeviceRange) {
        if let Some((frame, _)) = self.mappings.remove(&at.start.0) {
            if let Some(known) = self.frames.get_mut(&frame) {
                known.mappings -= 1;
            }
            self.forget_frame_if_gone(frame);
        }
    }

    fn forget_frame_if_gone(&mut self, frame: u64) {
        let gone = self.frames.get(&frame).filter(|known| known.released && known.mappings == 0);
        if let Some(bytes) = gone.map(|known| known.bytes) {
            self.frames.remove(&frame);
            self.frame_bytes -= bytes;
        }
    }

    /// Whether `run` consists of whole mappings without a gap.
    fn is_whole_mappings(&self, run: DeviceRange) -> bool {
        let mut next = run.start.0;
        for (start, (_, bytes)) in self.mappings.range(run.start.0..run.end().0) {
            if *start != next {
                return false;
            }
            next += bytes;
        }
        run.bytes > 0 && next == run.end().0
    }
}

impl CudaDevice {
    fn need_virtual_memory(&self) -> Result<(), DeviceError> {
        if self.info.virtual_memory {
            return Ok(());
        }
        Err(DeviceError::Unsupported {
            device: self.info.name.clone(),
            what: "reserve addresses and map frames".to_owned(),
            advice: "take whole units from the activation pool instead".to_owned(),
        })
    }

    /// Checks a length in bytes: a multiple of the granularity, and not zero.
    fn whole(&self, call: &'static str, bytes: u64) -> Result<usize, DeviceError> {
        let granularity = self.info.granularity;
        if bytes == 0 || !bytes.is_multiple_of(granularity) {
            return Err(DeviceError::InvalidArgument {
                call,
                why: format!("{bytes} bytes are no multiple of the granularity, {granularity}"),
            });
        }
        usize::try_from(bytes)
            .map_err(|_| DeviceError::InvalidArgument { call, why: format!("{bytes} bytes are too many") })
    }

    /// Makes a call that gives something back, as [`insist`] does.
    pub(super) fn give_back(&self, call: impl Fn() -> Answer) -> Result<(), DeviceError> {
        insist(call).map_err(|refusal| self.refused(refusal))
    }
}

impl VirtualMemory for CudaDevice {
    fn reserve(&self, bytes: u64) -> Result<DeviceRange, DeviceError> {
        self.need_virtual_memory()?;
        let length = self.whole("reserve", bytes)?;
        let _bound = self.enter()?;
        let alignment = usize::try_from(self.info.granularity).unwrap_or(0);
        let mut start = 0;
        // SAFETY: the pointer is valid; length and alignment are multiples of the granularity.
        unsafe { self.driver.mem_address_reserve(&raw mut start, length, alignment, 0, 0) }
            .map_err(|refusal| self.refused_bytes(refusal, bytes))?;
        self.memory.0.lock().ranges.insert(start, bytes);
        Ok(DeviceRange::new(DeviceAddress(start), bytes))
    }

    unsafe fn free(&self, range: DeviceRange) -> Result<(), DeviceError> {
        {
            let mut tables = self.memory.0.lock();
            if tables.ranges.get(&range.start.0) != Some(&range.bytes) {
                return Err(misuse("free", format!("{range:?} is not reserved")));
            }
            if let Some(mapping) = tables.mapping_in(range) {
                return Err(misuse("free", format!("{mapping:?} is still mapped in {range:?}")));
            }
            tables.ranges.remove(&range.start.0);
        }
        let Some(_bound) = self.enter_to_release()? else { return Ok(()) };
        let length = self.whole("free", range.bytes)?;
        // SAFETY: the range was reserved with this length, and nothing is mapped in it.
        let freed = self.give_back(|| unsafe { self.driver.mem_address_free(range.start.0, length) });
        if freed.as_ref().is_err_and(|error| !error.is_lost()) {
            self.memory.0.lock().ranges.insert(range.start.0, range.bytes);
        }
        freed
    }

    fn create_frame(&self, bytes: u64) -> Result<FrameId, DeviceError> {
        self.need_virtual_memory()?;
        let length = self.whole("create_frame", bytes)?;
        let _bound = self.enter()?;
        // Noted first, so that two threads cannot pass the cap together.
        self.memory.0.lock().frame_bytes += bytes;
        let prop = frame_properties(self.device);
        let mut handle = 0;
        let created = if self.cap.is_some_and(|cap| self.held() > cap) {
            self.memory.0.lock().frame_bytes -= bytes;
            return Err(self.out_of_memory("create_frame", bytes));
        } else {
            // SAFETY: both pointers are valid for the call.
            unsafe { self.driver.mem_create(&raw mut handle, length, &raw const prop, 0) }
        };
        let mut tables = self.memory.0.lock();
        if let Err(refusal) = created {
            tables.frame_bytes -= bytes;
            drop(tables);
            return Err(self.refused_bytes(refusal, bytes));
        }
        count(&self.counters.create_frame, 1);
        let number = tables.next_frame;
        tables.next_frame += 1;
        tables.live_frames += 1;
        tables.frames.insert(number, Frame { handle, bytes, mappings: 0, released: false });
        Ok(FrameId(number))
    }

    unsafe fn release_frame(&self, frame: FrameId) -> Result<(), DeviceError> {
        let handle = {
            let mut tables = self.memory.0.lock();
            let Some(known) = tables.frames.get_mut(&frame.0).filter(|known| !known.released) else {
                return Err(misuse("release_frame", format!("frame {} does not exist", frame.0)));
            };
            known.released = true;
            let handle = known.handle;
            tables.live_frames -= 1;
            tables.forget_frame_if_gone(frame.0);
            handle
        };
        count(&self.counters.release_frame, 1);
        let Some(_bound) = self.enter_to_release()? else { return Ok(()) };
        // SAFETY: the handle is live and is not named again.
        self.give_back(|| unsafe { self.driver.mem_release(handle) })
    }

    unsafe fn map(&self, at: DeviceRange, frame: FrameId) -> Result<(), DeviceError> {
        self.need_virtual_memory()?;
        let length = self.whole("map", at.bytes)?;
        let _bound = self.enter()?;
        let handle = self.memory.0.lock().note_mapping(at, frame)?;
        // SAFETY: the place lies in a reserved range and holds no mapping, and the frame is live: the table
        // says so, and the caller.
        match unsafe { self.driver.mem_map(at.start.0, length, 0, handle, 0) } {
            Ok(()) => {
                count(&self.counters.map, 1);
                Ok(())
            }
            Err(refusal) => {
                self.memory.0.lock().forget_mapping(at);
                Err(self.refused_bytes(refusal, at.bytes))
            }
        }
    }

    unsafe fn set_access(&self, run: DeviceRange) -> Result<(), DeviceError> {
        self.need_virtual_memory()?;
        let length = self.whole("set_access", run.bytes)?;
        let _bound = self.enter()?;
        if !self.memory.0.lock().is_whole_mappings(run) {
            let why = format!("{run:?} does not consist of whole mappings: some of it is not mapped");
            return Err(misuse("set_access", why));
        }
        let access = sys::CUmemAccessDesc {
            location: location(self.device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the run consists of whole mappings; the pointer is valid for the call.
        unsafe { self.driver.mem_set_access(run.start.0, length, &raw const access, 1) }
            .map_err(|refusal| self.refused_bytes(refusal, run.bytes))?;
        count(&self.counters.set_access, 1);
        Ok(())
    }

    unsafe fn unmap(&self, at: DeviceRange) -> Result<(), DeviceError> {
        let covered = self.memory.0.lock().mappings.get(&at.start.0).map(|(_, bytes)| *bytes);
        if covered != Some(at.bytes) {
            let why = match covered {
                Some(bytes) => format!("{at:?} is not the whole of the mapping of {bytes} bytes there"),
                None => format!("{at:?} is not mapped"),
            };
            return Err(misuse("unmap", why));
        }
        count(&self.counters.unmap, 1);
        let Some(_bound) = self.enter_to_release()? else {
            self.memory.0.lock().forget_mapping(at);
            return Ok(());
        };
        let length = self.whole("unmap", at.bytes)?;
        // SAFETY: exactly one mapping, and no work in flight uses it, says the caller.
        let unmapped = self.give_back(|| unsafe { self.driver.mem_unmap(at.start.0, length) });
        // On a card that was lost just now there is nothing to keep an account of either.
        if unmapped.as_ref().err().is_none_or(DeviceError::is_lost) {
            self.memory.0.lock().forget_mapping(at);
        }
        unmapped
    }
}

/// Page-locked blocks of host memory, start to bytes.
#[derive(Default)]
pub(super) struct HostTable(Mutex<BTreeMap<u64, u64>>);

impl HostTable {
    pub(super) fn locked_bytes(&self) -> u64 {
        self.0.lock().values().sum()
    }

    /// The end or beginning of a page-locked block that lies strictly inside `bytes` bytes from `start`.
    pub(super) fn crossed(&self, start: *const u8, bytes: u64) -> Option<u64> {
        crossed(&self.0.lock(), start as u64, bytes)
    }
}

/// The first border of a block strictly inside `start .. start + bytes`: pure.
fn crossed(blocks: &BTreeMap<u64, u64>, start: u64, bytes: u64) -> Option<u64> {
    let end = start.saturating_add(bytes);
    if let Some((block, length)) = blocks.range(..=start).next_back() {
        let border = block + length;
        if border > start && border < end {
            return Some(border);
        }
    }
    let after = blocks.range(start.saturating_add(1)..end.max(start.saturating_add(1))).next();
    after.map(|(block, _)| *block)
}

/// Page-locked for every context, so that a second card can copy from it too.
const PORTABLE: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE;

impl HostMemory for CudaDevice {
    unsafe fn page_lock(&self, start: *mut u8, bytes: u64) -> Result<(), DeviceError> {
        let page = host_page_bytes();
        let length = usize::try_from(bytes).unwrap_or(0);
        if length == 0 || !bytes.is_multiple_of(page) || !(start as u64).is_multiple_of(page) {
            return Err(DeviceError::InvalidArgument {
                call: "page_lock",
                why: format!("{bytes} bytes at {start:p} are not whole host pages of {page} bytes"),
            });
        }
        let _bound = self.enter()?;
        {
            let mut blocks = self.host.0.lock();
            let before = blocks.range(..start as u64 + bytes).next_back();
            if let Some((other, length)) = before.filter(|(other, length)| *other + *length > start as u64) {
                let why = format!("{bytes} bytes at {start:p} overlap {length} at {other:#x}, locked before");
                return Err(misuse("page_lock", why));
            }
            blocks.insert(start as u64, bytes);
        }
        // SAFETY: the memory is mapped and stays so until it is unlocked, says the caller.
        let locked = unsafe { self.driver.mem_host_register(start.cast::<c_void>(), length, PORTABLE) };
        locked.map_err(|refusal| {
            self.host.0.lock().remove(&(start as u64));
            match refusal {
                // It is the host's memory that is short here.
                Refusal { call, code: OUT_OF_MEMORY } => DeviceError::Host {
                    call,
                    bytes,
                    why: "no more host memory can be page-locked".to_owned(),
                },
                refusal => self.refused(refusal),
            }
        })?;
        count(&self.counters.page_lock, 1);
        Ok(())
    }

    unsafe fn page_unlock(&self, start: *mut u8) -> Result<(), DeviceError> {
        if self.host.0.lock().remove(&(start as u64)).is_none() {
            return Err(misuse("page_unlock", format!("no page-locked block begins at {start:p}")));
        }
        let Some(_bound) = self.enter_to_release()? else { return Ok(()) };
        // SAFETY: registered by us, and no copy in flight uses it, says the caller.
        self.give_back(|| unsafe { self.driver.mem_host_unregister(start.cast::<c_void>()) })
    }

    fn begin_host_write(&self, start: *const u8, bytes: u64) -> Result<(), DeviceError> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        if cfg!(debug_assertions) && stand_in_refuses_host_write(start.cast(), bytes) {
            let why = format!("a copy may still use {bytes} bytes at {start:p}, says the driver's stand-in");
            return Err(misuse("host_write", why));
        }
        Ok(())
    }

    fn end_host_write(&self, start: *const u8, bytes: u64) {
        if cfg!(debug_assertions) {
            tell_stand_in_of_host_write(start.cast(), usize::try_from(bytes).unwrap_or(usize::MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, bytes: u64) -> DeviceRange {
        DeviceRange::new(DeviceAddress(start), bytes)
    }

    fn tables() -> Tables {
        let mut tables = Tables::default();
        tables.ranges.insert(1000, 1000);
        for number in 0..3 {
            let frame = Frame { handle: 7, bytes: 100, mappings: 0, released: false };
            tables.frames.insert(number, frame);
            tables.frame_bytes += 100;
        }
        tables
    }

    #[test]
    fn a_mapping_never_lands_on_another_or_outside() {
        let mut tables = tables();
        tables.note_mapping(range(1200, 100), FrameId(0)).unwrap();
        for (at, frame) in
            [(range(1200, 100), 1), (range(1150, 100), 1), (range(1250, 100), 1), (range(950, 100), 1)]
        {
            assert!(tables.note_mapping(at, FrameId(frame)).unwrap_err().is_misuse(), "{at:?}");
        }
        assert!(tables.note_mapping(range(1300, 50), FrameId(1)).is_err(), "size");
        assert!(tables.note_mapping(range(1300, 100), FrameId(9)).unwrap_err().is_misuse(), "frame");
        tables.note_mapping(range(1300, 100), FrameId(0)).unwrap();
        assert!(tables.is_whole_mappings(range(1200, 200)));
        assert!(!tables.is_whole_mappings(range(1200, 150)));
        assert!(!tables.is_whole_mappings(range(1100, 200)));
    }

    #[test]
    fn a_released_frame_counts_until_its_last_mapping_is_gone() {
        let mut tables = tables();
        tables.note_mapping(range(1000, 100), FrameId(0)).unwrap();
        tables.note_mapping(range(1100, 100), FrameId(0)).unwrap();
        tables.frames.get_mut(&0).unwrap().released = true;
        tables.forget_mapping(range(1000, 100));
        assert_eq!(tables.frame_bytes, 300);
        tables.forget_mapping(range(1100, 100));
        assert_eq!(tables.frame_bytes, 200);
    }

    #[test]
    fn a_copy_across_the_border_of_a_block_is_seen() {
        let blocks = BTreeMap::from([(100, 50), (150, 50)]);
        assert_eq!(crossed(&blocks, 100, 50), None);
        assert_eq!(crossed(&blocks, 100, 51), Some(150));
        assert_eq!(crossed(&blocks, 160, 41), Some(200));
        assert_eq!(crossed(&blocks, 90, 11), Some(100));
        assert_eq!(crossed(&blocks, 90, 10), None);
        assert_eq!(crossed(&blocks, 200, 100), None);
        assert_eq!(crossed(&blocks, 100, 0), None);
    }
}
