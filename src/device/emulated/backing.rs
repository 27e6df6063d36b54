//! The bytes and addresses behind an emulated card: one memfd cut in slots, and mappings of it.
//!
//! Owns the memfd, which slots exist and which are free. A slot's memory is allocated once, by the file
//! and not through a mapping (measured: 0.6 ms for 2 MiB, where touching it through a mapping takes 2 ms,
//! and a file that has no memory says so where a touch would kill the process). No reserved range ever
//! has a hole that another mapping of the process could fall into: what is unmapped is mapped `PROT_NONE`
//! over.
//!
//! A mapping of 2 MiB with all its page table entries takes 165 us and more, and as much to take it down. So
//! the entries are kept: every slot has a place in one mapping of the whole file, its home, which nobody
//! touches; what is unmapped leaves its entries there, and the next mapping of the slot takes them from there
//! (`mremap`, measured: 5 to 12 us). Only a slot's first mapping, and aliases, make entries. Where the system
//! cannot do that (before Linux 5.13), every mapping makes its own.
//!
//! Not locked: a plain value behind the memory lock. May import `error`, `units`.

#![expect(unsafe_code, reason = "mappings are made here")]

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::DeviceError;
use crate::units::{DeviceAddress, DeviceRange};

/// What released frames are filled with.
pub(super) const POISON: u8 = 0xDB;

/// Mappings that all emulated devices of this process hold, counted on the safe side.
static MAPPINGS: AtomicU64 = AtomicU64::new(0);

/// Mappings that the process is taken to have beside ours.
const OTHER_MAPPINGS: u64 = 1024;

/// A device's share of the process's mappings, and the limit of all.
#[derive(Debug)]
pub(super) struct MappingBudget {
    held: u64,
    limit: u64,
}

impl MappingBudget {
    /// A budget of `limit` mappings of the whole process, by default three quarters of what the system
    /// allows one: past the full number every `mmap` of the process fails.
    pub(super) fn new(limit: Option<u64>) -> Self {
        let system = || {
            let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok()?;
            text.trim().parse::<u64>().ok()
        };
        Self { held: 0, limit: limit.unwrap_or_else(|| system().unwrap_or(65_530) / 4 * 3) }
    }

    /// Refuses if the process has too many mappings already.
    pub(super) fn check_open(&self) -> Result<(), DeviceError> {
        let now = std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count() as u64);
        if now > self.limit {
            return Err(self.refuse("open", 0, now));
        }
        Ok(())
    }

    /// Counts `delta` more mappings (or fewer), or refuses.
    pub(super) fn change(&mut self, call: &'static str, bytes: u64, delta: i64) -> Result<(), DeviceError> {
        if delta <= 0 {
            let less = delta.unsigned_abs().min(self.held);
            self.held -= less;
            MAPPINGS.fetch_sub(less, Ordering::Relaxed);
            return Ok(());
        }
        let more = delta.unsigned_abs();
        let before = MAPPINGS.fetch_add(more, Ordering::Relaxed);
        if before + more + OTHER_MAPPINGS > self.limit {
            MAPPINGS.fetch_sub(more, Ordering::Relaxed);
            return Err(self.refuse(call, bytes, before));
        }
        self.held += more;
        Ok(())
    }

    fn refuse(&self, call: &'static str, bytes: u64, now: u64) -> DeviceError {
        let why = format!(
            "this process has {now} mappings and may have {} (three quarters of vm.max_map_count); use \
             larger pages, a smaller card, or raise vm.max_map_count",
            self.limit
        );
        DeviceError::Host { call, bytes, why }
    }
}

impl Drop for MappingBudget {
    fn drop(&mut self) {
        MAPPINGS.fetch_sub(self.held, Ordering::Relaxed);
    }
}

/// The slots of one frame, in order.
#[derive(Debug)]
pub(super) enum Slots {
    /// A device that keeps no bytes has none.
    None,
    One(u32),
    Many(Box<[u32]>),
}

impl Slots {
    pub(super) fn as_slice(&self) -> &[u32] {
        match self {
            Self::None => &[],
            Self::One(slot) => std::slice::from_ref(slot),
            Self::Many(slots) => slots,
        }
    }
}

/// The memfd.
#[derive(Debug)]
pub(super) struct Backing {
    file: File,
    slot_bytes: u64,
    /// Slots whose memory exists: `0 .. created`, and whether the slot's page table entries are at home.
    at_home: Vec<bool>,
    free: Vec<u32>,
    /// A mapping of the whole file; slots lie in it in order.
    home: Option<DeviceRange>,
    poison: Option<Vec<u8>>,
}

impl Backing {
    /// A file of `slots` slots; none has memory yet.
    pub(super) fn new(slots: u64, slot_bytes: u64, poison: bool) -> Result<Self, DeviceError> {
        // SAFETY: the name is a C string; the call makes a new descriptor and touches nothing else.
        let fd = unsafe { libc::memfd_create(c"vram-pager emulated card".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(host("memfd_create", slots * slot_bytes));
        }
        // SAFETY: the descriptor is new and ours alone.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(slots * slot_bytes).map_err(|_| host("ftruncate", slots * slot_bytes))?;
        let poison = poison.then(|| vec![POISON; usize::try_from(slot_bytes.min(1 << 20)).unwrap_or(4096)]);
        let mut backing =
            Self { file, slot_bytes, at_home: Vec::new(), free: Vec::new(), home: None, poison };
        // Without a home the card is slower, not less of a card.
        if let Ok(start) = reserve(slots * slot_bytes, slot_bytes.next_power_of_two()) {
            let home = DeviceRange::new(start, slots * slot_bytes);
            match backing.map_file(home, 0, 0) {
                Ok(()) => backing.home = Some(home),
                Err(_) => release(home),
            }
        }
        Ok(backing)
    }

    /// Takes `count` slots; the caller has checked that so many are free.
    pub(super) fn take(&mut self, count: u32) -> Result<Slots, DeviceError> {
        if count == 1 {
            return Ok(Slots::One(self.take_one()?));
        }
        let mut slots = Vec::with_capacity(count as usize);
        for _ in 0..count {
            match self.take_one() {
                Ok(slot) => slots.push(slot),
                Err(error) => {
                    self.free.extend(slots);
                    return Err(error);
                }
            }
        }
        Ok(Slots::Many(slots.into()))
    }

    fn take_one(&mut self) -> Result<u32, DeviceError> {
        if let Some(slot) = self.free.pop() {
            return Ok(slot);
        }
        let slot = u32::try_from(self.at_home.len()).unwrap_or(u32::MAX);
        let (Ok(offset), Ok(length)) =
            (i64::try_from(u64::from(slot) * self.slot_bytes), i64::try_from(self.slot_bytes))
        else {
            return Err(host("fallocate", self.slot_bytes));
        };
        // SAFETY: the descriptor is open; the call only allocates memory of the file.
        while unsafe { libc::fallocate(self.file.as_raw_fd(), 0, offset, length) } != 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(host("fallocate", self.slot_bytes));
            }
        }
        self.at_home.push(false);
        self.fill_with_poison(slot);
        Ok(slot)
    }

    /// Takes the slots of a frame that is gone back. Nothing maps them any more.
    pub(super) fn give_back(&mut self, slots: &Slots) {
        for &slot in slots.as_slice() {
            self.fill_with_poison(slot);
            self.free.push(slot);
        }
    }

    /// Written through the file, so that it costs no fault.
    fn fill_with_poison(&self, slot: u32) {
        let Some(poison) = &self.poison else { return };
        for offset in (0..self.slot_bytes).step_by(poison.len()) {
            let at = u64::from(slot) * self.slot_bytes + offset;
            let length = poison.len().min(usize::try_from(self.slot_bytes - offset).unwrap_or(usize::MAX));
            // The memory exists, so this does not fail; if it did, a frame would go without poison.
            let _ = self.file.write_all_at(&poison[..length], at);
        }
    }

    /// Makes `slots` readable and writable from `start` on, with all their memory in the page table.
    /// Slots that follow each other in the file, and whose entries are in the same place, become one mapping.
    pub(super) fn map(&mut self, start: DeviceAddress, slots: &[u32]) -> Result<(), DeviceError> {
        let mut done = 0;
        let mut at = start;
        let alike = |a: &u32, b: &u32| *b == *a + 1 && self.is_at_home(*a) == self.is_at_home(*b);
        let runs: Vec<&[u32]> = slots.chunk_by(alike).collect();
        for run in runs {
            let to = DeviceRange::new(at, run.len() as u64 * self.slot_bytes);
            if let Err(error) = self.map_run(to, run) {
                let mapped = DeviceRange::new(start, done as u64 * self.slot_bytes);
                let _ = self.unmap(mapped, &slots[..done]);
                return Err(error);
            }
            (at, done) = (to.end(), done + run.len());
        }
        Ok(())
    }

    fn map_run(&mut self, to: DeviceRange, run: &[u32]) -> Result<(), DeviceError> {
        let Some(&first) = run.first() else { return Ok(()) };
        if self.is_at_home(first)
            && let Some(home) = self.home_of(first, run.len())
            && move_entries(home, to)
        {
            self.at_home[first as usize..first as usize + run.len()].fill(false);
            return Ok(());
        }
        self.map_file(to, u64::from(first) * self.slot_bytes, libc::MAP_POPULATE)
    }

    /// Makes what `slots` are mapped at inaccessible, and keeps the entries of those whose home has none.
    pub(super) fn unmap(&mut self, at: DeviceRange, slots: &[u32]) -> Result<(), DeviceError> {
        let mut from = at.start;
        for &slot in slots {
            let piece = DeviceRange::new(from, self.slot_bytes);
            if !self.is_at_home(slot)
                && let Some(home) = self.home_of(slot, 1)
                && move_entries(piece, home)
            {
                self.at_home[slot as usize] = true;
            }
            from = piece.end();
        }
        close(at)
    }

    fn is_at_home(&self, slot: u32) -> bool {
        self.at_home.get(slot as usize).copied().unwrap_or(false)
    }

    fn home_of(&self, slot: u32, count: usize) -> Option<DeviceRange> {
        let start = self.home?.start.offset(u64::from(slot) * self.slot_bytes);
        Some(DeviceRange::new(start, count as u64 * self.slot_bytes))
    }

    fn map_file(&self, at: DeviceRange, offset: u64, populate: libc::c_int) -> Result<(), DeviceError> {
        let (Ok(offset), Ok(length)) = (i64::try_from(offset), usize::try_from(at.bytes)) else {
            return Err(host("mmap", at.bytes));
        };
        // SAFETY: `at` lies in a range that this device reserved and holds nothing that anyone uses: it is the
        // home, new, or the caller (`Memory`) maps only pages that were inaccessible until now, whose slots'
        // memory exists.
        let mapped = unsafe {
            libc::mmap(
                pointer(at.start),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED | populate,
                self.file.as_raw_fd(),
                offset,
            )
        };
        if mapped == libc::MAP_FAILED { Err(host("mmap", at.bytes)) } else { Ok(()) }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if let Some(home) = self.home {
            release(home);
        }
    }
}

/// Moves the page table entries of a mapping of the file to other addresses, of the same length. What lay
/// there is replaced; where they came from stays a mapping of the same bytes, without entries, so that there
/// never is a hole. The system may refuse; then nothing has changed.
fn move_entries(from: DeviceRange, to: DeviceRange) -> bool {
    let Ok(length) = usize::try_from(from.bytes) else { return false };
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: both lie in ranges that this device reserved, one of them at home, where nobody reads or
    // writes; the other is of pages that nothing uses, as the caller (`Memory`) has checked, and both are
    // of the same slots.
    let moved = unsafe { libc::mremap(pointer(from.start), length, length, flags, pointer(to.start)) };
    moved != libc::MAP_FAILED
}

const INACCESSIBLE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Reserves addresses aligned to `align`, a power of two.
pub(super) fn reserve(bytes: u64, align: u64) -> Result<DeviceAddress, DeviceError> {
    let padded = bytes.checked_add(align).and_then(|padded| usize::try_from(padded).ok());
    let Some(padded) = padded else { return Err(host("mmap", bytes)) };
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), padded, libc::PROT_NONE, INACCESSIBLE, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(host("mmap", bytes));
    }
    let base = base.expose_provenance() as u64;
    let start = base.next_multiple_of(align);
    // Both ends that alignment leaves over go back at once; they were never handed out.
    release(DeviceRange::new(DeviceAddress(base), start - base));
    let end = start + bytes;
    release(DeviceRange::new(DeviceAddress(end), base + padded as u64 - end));
    Ok(DeviceAddress(start))
}

/// Makes addresses inaccessible, whatever lay there, without ever leaving a hole.
pub(super) fn close(run: DeviceRange) -> Result<(), DeviceError> {
    if run.bytes == 0 {
        return Ok(());
    }
    let Ok(length) = usize::try_from(run.bytes) else { return Err(host("mmap", run.bytes)) };
    // SAFETY: the run lies in a range that this device reserved; the caller (`Memory`) has checked that no
    // work uses it.
    let closed = unsafe {
        libc::mmap(pointer(run.start), length, libc::PROT_NONE, INACCESSIBLE | libc::MAP_FIXED, -1, 0)
    };
    if closed == libc::MAP_FAILED { Err(host("mmap", run.bytes)) } else { Ok(()) }
}

/// Gives reserved addresses back to the system.
pub(super) fn release(range: DeviceRange) {
    if let Ok(length) = usize::try_from(range.bytes)
        && length > 0
    {
        // SAFETY: the range was reserved by this device and is not used again. It cannot fail: it is a
        // whole number of host pages of our own mappings.
        unsafe { libc::munmap(pointer(range.start), length) };
    }
}

fn pointer(address: DeviceAddress) -> *mut libc::c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address.0).unwrap_or(usize::MAX))
}

fn host(call: &'static str, bytes: u64) -> DeviceError {
    DeviceError::Host { call, bytes, why: std::io::Error::last_os_error().to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: u64 = 64 << 10;
    const SLOTS: u32 = 24;

    fn read(at: DeviceAddress) -> u64 {
        // SAFETY: the tests read where a slot is mapped.
        unsafe { pointer(at).cast::<u64>().read() }
    }

    fn write(at: DeviceAddress, value: u64) {
        // SAFETY: as above.
        unsafe { pointer(at).cast::<u64>().write(value) };
    }

    /// The mappings of this process that overlap `range`, with their rights.
    fn mappings(range: DeviceRange) -> Vec<(DeviceRange, String)> {
        let parse = |line: &str| {
            let (span, rest) = line.split_once(' ')?;
            let (start, end) = span.split_once('-')?;
            let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
            let mapped = DeviceRange::new(DeviceAddress(start), end - start);
            mapped.overlaps(range).then(|| (mapped, rest[..4].to_owned()))
        };
        std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter_map(parse).collect()
    }

    /// Pages of the process with memory behind them in `range`.
    fn entries(range: DeviceRange) -> usize {
        let page = 4096;
        let mut text = vec![0; usize::try_from(range.bytes / page * 8).unwrap()];
        let file = File::open("/proc/self/pagemap").unwrap();
        file.read_exact_at(&mut text, range.start.0 / page * 8).unwrap();
        text.chunks_exact(8).filter(|entry| entry[7] & 0x80 != 0).count()
    }

    #[test]
    fn any_order_of_mappings_and_aliases_shows_each_slots_bytes() {
        let mut backing = Backing::new(u64::from(SLOTS), SLOT, false).unwrap();
        let slots: Vec<u32> = (0..SLOTS).map(|_| backing.take_one().unwrap()).collect();
        let places = 2 * u64::from(SLOTS);
        let range = DeviceRange::new(reserve(places * SLOT, 2 << 20).unwrap(), places * SLOT);
        let mut mapped: Vec<Option<u32>> = vec![None; usize::try_from(places).unwrap()];
        let mut expected = vec![0; SLOTS as usize];
        let mut seed = 0x5EED_u64;
        println!("seed {seed:#x}");
        let mut random = |below: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            usize::try_from(seed % below as u64).unwrap()
        };
        for turn in 0..4_000 {
            let first = random(mapped.len());
            let at = range.start.offset(first as u64 * SLOT);
            if let Some(slot) = mapped[first] {
                if random(2) == 0 {
                    backing.unmap(DeviceRange::new(at, SLOT), &[slot]).unwrap();
                    mapped[first] = None;
                } else {
                    expected[slot as usize] = turn;
                    write(at, turn);
                }
            } else {
                let free = mapped[first..].iter().take_while(|slot| slot.is_none()).count();
                let count = 1 + random(free.min(4));
                let lowest = random(slots.len());
                let run: Vec<u32> = (0..count).map(|index| slots[(lowest + index) % slots.len()]).collect();
                backing.map(at, &run).unwrap();
                mapped[first..first + count]
                    .iter_mut()
                    .zip(&run)
                    .for_each(|(place, slot)| *place = Some(*slot));
            }
            for (place, slot) in mapped.iter().enumerate() {
                if let Some(slot) = slot {
                    assert_eq!(read(range.start.offset(place as u64 * SLOT)), expected[*slot as usize]);
                }
            }
        }
        // Every address is still ours: what is not mapped is inaccessible, and nothing fell into a hole.
        let mut next = range.start.0;
        for (mapping, rights) in mappings(range) {
            assert!(mapping.start.0 <= next, "a hole at {next:#x}");
            let place = mapping.start.0.max(range.start.0) - range.start.0;
            let here = mapped[usize::try_from(place / SLOT).unwrap()];
            assert_eq!(rights, if here.is_some() { "rw-s" } else { "---p" });
            next = mapping.end().0;
        }
        assert!(next >= range.end().0);
        release(range);
    }

    /// Whether the system moves shared mappings and leaves the source: Linux 5.13 and later.
    fn moves_entries() -> bool {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
        (numbers.next(), numbers.next()) >= (Some(5), Some(13))
    }

    #[test]
    fn a_slot_keeps_its_page_table_entries_while_it_is_not_mapped() {
        if !moves_entries() {
            println!("left out: every mapping makes its own entries on a system as old as this");
            return;
        }
        let mut backing = Backing::new(4, SLOT, false).unwrap();
        let Slots::Many(slots) = backing.take(4).unwrap() else { unreachable!() };
        let bytes = 4 * SLOT;
        let everything = usize::try_from(bytes / 4096).unwrap();
        let home = backing.home.unwrap();
        let places = DeviceRange::new(reserve(2 * bytes, 2 << 20).unwrap(), 2 * bytes);
        for turn in 0..4 {
            let at = DeviceRange::new(places.start.offset(turn % 2 * bytes), bytes);
            assert_eq!(entries(home), if turn == 0 { 0 } else { everything });
            backing.map(at.start, &slots).unwrap();
            assert_eq!((entries(home), entries(at)), (0, everything));
            backing.unmap(at, &slots).unwrap();
            assert_eq!((entries(home), entries(at)), (everything, 0));
            // However slots come and go, the home stays one mapping.
            assert_eq!(mappings(home).len(), 1);
        }
        release(places);
        drop(backing);
        assert!(mappings(home).iter().all(|(mapping, rights)| rights != "rw-s" || !home.contains(*mapping)));
    }

    #[test]
    fn a_card_without_a_home_maps_all_the_same() {
        let mut backing = Backing::new(2, SLOT, false).unwrap();
        release(backing.home.take().unwrap());
        let slots = [backing.take_one().unwrap(), backing.take_one().unwrap()];
        let at = DeviceRange::new(reserve(2 * SLOT, SLOT).unwrap(), 2 * SLOT);
        for turn in 1..4 {
            backing.map(at.start, &slots).unwrap();
            write(at.start.offset(SLOT), turn);
            backing.unmap(at, &slots).unwrap();
            backing.map(at.start, &[slots[1], slots[0]]).unwrap();
            assert_eq!(read(at.start), turn);
            backing.unmap(at, &[slots[1], slots[0]]).unwrap();
        }
        release(at);
    }
}
