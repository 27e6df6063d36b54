//! The calls that need no stream: ranges, frames, mappings, page locks.
//!
//! Thin: checks and books are `memory`'s. Takes the memory lock; to name an operation in the way it lets
//! go of it and takes the control lock, and to ask the watch it takes the control lock first. May import `card`, `memory`, `fault`.

#![expect(unsafe_code, reason = "the traits' calls are unsafe to make; here they only check numbers")]

use super::card::EmulatedDevice;
use super::fault::CallKind;
use super::usage::HostSpan;
use crate::device::handle::host_page_bytes;
use crate::device::{DeviceError, FrameId, HostMemory, VirtualMemory};
use crate::units::DeviceRange;

impl VirtualMemory for EmulatedDevice {
    fn reserve(&self, bytes: u64) -> Result<DeviceRange, DeviceError> {
        self.need_virtual_memory()?;
        self.enter(CallKind::Reserve, bytes)?;
        self.shared.memory.lock().reserve("reserve", bytes, false)
    }

    unsafe fn free(&self, range: DeviceRange) -> Result<(), DeviceError> {
        let fault = self.strike(CallKind::Free, range.bytes);
        self.shared.memory.lock().free(range)?;
        fault.map_or(Ok(()), Err)
    }

    fn create_frame(&self, bytes: u64) -> Result<FrameId, DeviceError> {
        self.need_virtual_memory()?;
        self.enter(CallKind::CreateFrame, bytes)?;
        let frame = self.shared.memory.lock().create_frame("create_frame", bytes)?;
        self.clock.advance(self.options.costs.create_frame(bytes));
        self.count(|counts| counts.create_frame += 1);
        Ok(frame)
    }

    unsafe fn release_frame(&self, frame: FrameId) -> Result<(), DeviceError> {
        let fault = self.strike(CallKind::ReleaseFrame, 0);
        self.shared.memory.lock().release_frame(frame)?;
        self.count(|counts| counts.release_frame += 1);
        fault.map_or(Ok(()), Err)
    }

    unsafe fn map(&self, at: DeviceRange, frame: FrameId) -> Result<(), DeviceError> {
        self.enter(CallKind::Map, at.bytes)?;
        self.shared.memory.lock().map(at, frame)?;
        self.clock.advance(self.options.costs.map);
        self.count(|counts| counts.map += 1);
        Ok(())
    }

    unsafe fn set_access(&self, run: DeviceRange) -> Result<(), DeviceError> {
        self.enter(CallKind::SetAccess, run.bytes)?;
        let answer = self.shared.memory.lock().set_access(run);
        answer.map_err(|refusal| self.named("set_access", refusal))?;
        self.clock.advance(self.options.costs.set_access);
        self.count(|counts| counts.set_access += 1);
        Ok(())
    }

    unsafe fn unmap(&self, at: DeviceRange) -> Result<(), DeviceError> {
        // No deferred error surfaces here: who takes memory back must be able to.
        if let Some(fault) = self.strike(CallKind::Unmap, at.bytes) {
            return Err(fault);
        }
        self.watched(|memory, before| memory.watch_unmap(at, before))?;
        let answer = self.shared.memory.lock().unmap(at);
        answer.map_err(|refusal| self.named("unmap", refusal))?;
        self.clock.advance(self.options.costs.unmap);
        self.count(|counts| counts.unmap += 1);
        Ok(())
    }
}

impl HostMemory for EmulatedDevice {
    unsafe fn page_lock(&self, start: *mut u8, bytes: u64) -> Result<(), DeviceError> {
        self.enter(CallKind::PageLock, bytes)?;
        let span = HostSpan::new(start, bytes);
        self.shared.memory.lock().page_lock(span, host_page_bytes())?;
        self.clock.advance(self.options.costs.page_lock(bytes));
        self.count(|counts| counts.page_lock += 1);
        Ok(())
    }

    unsafe fn page_unlock(&self, start: *mut u8) -> Result<(), DeviceError> {
        let fault = self.strike(CallKind::PageUnlock, 0);
        let address = start.expose_provenance() as u64;
        self.watched(|memory, before| match memory.block_at(address) {
            Some(block) => memory.watch_host("page_unlock", block, before),
            None => Ok(()),
        })?;
        let answer = self.shared.memory.lock().page_unlock(address);
        answer.map_err(|refusal| self.named("page_unlock", refusal))?;
        fault.map_or(Ok(()), Err)
    }

    fn begin_host_write(&self, start: *const u8, bytes: u64) -> Result<(), DeviceError> {
        let span = HostSpan::new(start, bytes);
        self.watched(|memory, before| {
            memory.watch_host("host_write", span, before)?;
            memory.begin_host_write(span);
            Ok(())
        })
    }

    fn end_host_write(&self, start: *const u8, bytes: u64) {
        if self.watches() {
            self.shared.memory.lock().end_host_write(HostSpan::new(start, bytes));
        }
    }
}
