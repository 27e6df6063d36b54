//! The bytes and addresses behind an emulated card: one memfd cut in slots, and mappings of it.
//!
//! Owns the memfd, which slots exist and which are free. A slot's memory is allocated once, by the file
//! and not through a mapping (measured: 0.6 ms for 2 MiB, where touching it through a mapping takes 2 ms,
//! and a file that has no memory says so where a touch would kill the process). No reserved range ever
//! has a hole that another mapping of the process could fall into: what is unmapped is mapped `PROT_NONE`
//! over. Not locked: a plain value behind the memory lock. May import `error`, `units`.

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
    /// Slots whose memory exists: `0 .. created`.
    created: u32,
    free: Vec<u32>,
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
        Ok(Self { file, slot_bytes, created: 0, free: Vec::new(), poison })
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
        let slot = self.created;
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
        self.created += 1;
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
    /// Slots that follow each other in the file become one mapping.
    pub(super) fn map(&self, start: DeviceAddress, slots: &[u32]) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < slots.len() {
            let mut run = 1;
            while done + run < slots.len() && slots[done + run] == slots[done + run - 1] + 1 {
                run += 1;
            }
            let at =
                DeviceRange::new(start.offset(done as u64 * self.slot_bytes), run as u64 * self.slot_bytes);
            if let Err(error) = self.map_run(at, slots[done]) {
                let _ = close(DeviceRange::new(start, done as u64 * self.slot_bytes));
                return Err(error);
            }
            done += run;
        }
        Ok(())
    }

    fn map_run(&self, at: DeviceRange, slot: u32) -> Result<(), DeviceError> {
        let offset = i64::try_from(u64::from(slot) * self.slot_bytes);
        let (Ok(offset), Ok(length)) = (offset, usize::try_from(at.bytes)) else {
            return Err(host("mmap", at.bytes));
        };
        // SAFETY: `at` lies in a range that this device reserved and holds nothing that anyone uses: the
        // caller (`Memory`) maps only pages that were inaccessible until now. The slots' memory exists.
        let mapped = unsafe {
            libc::mmap(
                pointer(at.start),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE,
                self.file.as_raw_fd(),
                offset,
            )
        };
        if mapped == libc::MAP_FAILED { Err(host("mmap", at.bytes)) } else { Ok(()) }
    }
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
