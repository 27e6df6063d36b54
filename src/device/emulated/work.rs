//! The calls that enqueue work or wait for it: streams, events, copies, launches, the pool, the clock.
//!
//! Enqueueing takes the control lock, so that the order of a stream's queue is the order of its modelled
//! times; under it the memory lock (checks), then the queue's. Waiting holds no lock. May import `card`,
//! `clock`, `fault`, `memory`, `pool`, `stream`.

#![expect(unsafe_code, reason = "the traits' calls are unsafe to make; here they check and enqueue")]

use std::time::Duration;

use super::card::EmulatedDevice;
use super::clock::Engine;
use super::control::Control;
use super::fault::CallKind;
use super::journal::{Operation, OperationKind, before};
use super::pool::rounded;
use super::stream::{Point, Work};
use super::usage::HostSpan;
use super::watch::Before;
use crate::device::kernels::{HostTwin, KernelArg, KernelModule, Launch};
use crate::device::{
    ActivationPool, Clock, Copies, DeviceError, EventId, KernelId, Kernels, PoolFigures, StreamId,
    StreamPriority, Streams,
};
use crate::units::{DeviceRange, ModelTime};

/// The most threads of a block, on every card so far.
const MOST_BLOCK_THREADS: u64 = 1024;

/// What the modelled clock makes of an operation.
pub(super) struct Cost {
    /// What the call costs its thread.
    call: Duration,
    engine: Engine,
    /// How long the engine works.
    duration: Duration,
    /// When it may begin at the earliest.
    available: ModelTime,
}

impl Cost {
    pub(super) fn of(call: Duration, engine: Engine, duration: Duration) -> Self {
        Self { call, engine, duration, available: ModelTime::ZERO }
    }
}

impl EmulatedDevice {
    /// Checks `work`, gives it to `stream` and places it on the clock.
    pub(super) fn enqueue(&self, stream: StreamId, mut work: Work, cost: &Cost) -> Result<(), DeviceError> {
        let call = work.call();
        let mut control = self.control.lock();
        control.stream(call, stream)?;
        self.shared.memory.lock().begin(&mut work)?;
        self.check_order(&control, stream, &work)?;
        let noted = control.journal.is_some().then(|| work.clone());
        let issued = self.clock.advance(cost.call);
        let earliest = issued.max(cost.available);
        let entry = control.schedule(call, stream, cost.engine, earliest, cost.duration)?;
        let end = entry.end;
        entry.queue.push(work);
        if let (Some(journal), Some(work)) = (&mut control.journal, noted) {
            journal.note_copy(&work, stream, issued, end, cost.duration);
        }
        Ok(())
    }

    /// Asks the watch whether `work` is ordered after all that touches the same bytes.
    fn check_order(&self, control: &Control, stream: StreamId, work: &Work) -> Result<(), DeviceError> {
        let (Some(told), Some(entry)) = (&control.told, control.streams.get(&stream.0)) else {
            return Ok(());
        };
        let Some(seen) = &entry.seen else { return Ok(()) };
        let exists = |stream| control.exists(stream);
        let before = Before { stream: Some((stream.0, seen)), host: told, exists: &exists };
        let mut memory = self.shared.memory.lock();
        let answer = memory.watch(work, (stream.0, entry.queue.enqueued() + 1), &before);
        answer.inspect_err(|error| {
            memory.end(work);
            self.shared.catch(error);
        })
    }

    /// The newest record of an event.
    fn event_point(
        control: &Control,
        call: &'static str,
        event: EventId,
    ) -> Result<Option<Point>, DeviceError> {
        control.events.get(&event.0).cloned().ok_or_else(|| DeviceError::Misuse {
            call,
            why: format!("event {} does not exist (any more)", event.0),
        })
    }

    /// Places something that takes no time on `stream` at the caller's time, after `call`.
    fn mark(
        &self,
        control: &mut Control,
        call: Duration,
        stream: StreamId,
        name: &'static str,
        at: ModelTime,
    ) -> Result<Point, DeviceError> {
        control.stream(name, stream)?;
        let earliest = self.clock.advance(call).max(at);
        Ok(control.schedule(name, stream, Engine::None, earliest, Duration::ZERO)?.point())
    }

    fn take_from_pool(&self, bytes: u64, stream: StreamId, any: bool) -> Result<DeviceRange, DeviceError> {
        let mut control = self.control.lock();
        let entry = control.stream("pool_allocate", stream)?;
        let now = self.clock.now();
        let mut memory = self.shared.memory.lock();
        let mut taken = memory.pool.take(bytes, stream, now, false);
        if taken.is_none() {
            match memory.grow_pool(bytes) {
                Ok(()) => taken = memory.pool.take(bytes, stream, now, false),
                Err(error) if any && error.is_out_of_memory() => {
                    taken = Some(memory.pool.take(bytes, stream, now, true).ok_or(error)?);
                }
                Err(error) => return Err(error),
            }
        }
        let taken = taken.ok_or_else(|| memory.out_of_memory("pool_allocate", bytes))?;
        drop(memory);
        entry.end = entry.end.max(taken.until);
        for point in taken.waits {
            entry.follow(&point);
            if !point.is_complete() {
                entry.queue.push(Work::Wait(point));
            }
        }
        Ok(taken.range)
    }

    fn trim(&self, keep: u64) -> Result<(), DeviceError> {
        let idle = self.shared.memory.lock().pool.idle_chunks(keep, self.clock.now());
        for (chunk, points) in idle {
            // Idle by the modelled clock; the workers may be behind it.
            points.iter().for_each(Point::wait);
            self.shared.memory.lock().shrink_pool(chunk)?;
        }
        Ok(())
    }
}

impl Streams for EmulatedDevice {
    fn create_stream(&self, _priority: StreamPriority) -> Result<StreamId, DeviceError> {
        self.enter(CallKind::CreateStream, 0)?;
        self.control.lock().start_stream(&self.shared, !self.options.keeps_bytes)
    }

    unsafe fn destroy_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        let fault = self.strike(CallKind::DestroyStream, 0);
        self.control.lock().end_stream(stream)?;
        fault.map_or(Ok(()), Err)
    }

    fn create_event(&self) -> Result<EventId, DeviceError> {
        self.enter(CallKind::CreateEvent, 0)?;
        let mut control = self.control.lock();
        let event = EventId(control.next_event);
        control.next_event += 1;
        control.events.insert(event.0, None);
        Ok(event)
    }

    unsafe fn destroy_event(&self, event: EventId) -> Result<(), DeviceError> {
        let fault = self.strike(CallKind::DestroyEvent, 0);
        let mut control = self.control.lock();
        Self::event_point(&control, "destroy_event", event)?;
        control.events.remove(&event.0);
        fault.map_or(Ok(()), Err)
    }

    unsafe fn record(&self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        self.enter(CallKind::Record, 0)?;
        let mut control = self.control.lock();
        Self::event_point(&control, "record", event)?;
        let point = self.mark(&mut control, self.options.costs.record, stream, "record", ModelTime::ZERO)?;
        control.events.insert(event.0, Some(point));
        self.count(|counts| counts.record += 1);
        Ok(())
    }

    unsafe fn stream_wait(&self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        self.enter(CallKind::StreamWait, 0)?;
        let mut control = self.control.lock();
        let point = Self::event_point(&control, "stream_wait", event)?;
        let cost = self.options.costs.stream_wait;
        let time = point.as_ref().map_or(ModelTime::ZERO, |point| point.time);
        let stood_at = control.streams.get(&stream.0).filter(|_| control.journal.is_some());
        let stood_at = stood_at.map_or(ModelTime::ZERO, |entry| entry.end);
        let end = self.mark(&mut control, cost, stream, "stream_wait", time)?.time;
        if let Some(journal) = &mut control.journal {
            let (kind, range, issued) = (OperationKind::Wait, DeviceRange::default(), self.clock.now());
            let start = issued.max(stood_at);
            if start < end {
                let stream = Some(stream);
                journal.note(Operation { kind, stream, issued, start, end, range, bytes: 0 });
            }
        }
        if let Some(point) = point
            && point.stream.id() != stream
        {
            let entry = control.stream("stream_wait", stream)?;
            entry.follow(&point);
            entry.queue.push(Work::Wait(point));
        }
        self.count(|counts| counts.stream_wait += 1);
        Ok(())
    }

    unsafe fn query(&self, event: EventId) -> Result<bool, DeviceError> {
        self.enter(CallKind::Query, 0)?;
        let point = Self::event_point(&self.control.lock(), "query", event)?;
        let now = self.clock.advance(self.options.costs.query);
        match point {
            None => Ok(true),
            Some(point) if point.time <= now => {
                point.wait();
                self.tell(&point);
                Ok(true)
            }
            Some(_) => Ok(false),
        }
    }

    unsafe fn elapsed(&self, from: EventId, to: EventId) -> Result<Option<Duration>, DeviceError> {
        if let Some(fault) = self.strike(CallKind::Elapsed, 0) {
            return Err(fault);
        }
        let now = self.clock.now();
        let control = self.control.lock();
        let passed = |event| {
            let point = Self::event_point(&control, "elapsed", event);
            point.map(|point| point.map(|point| point.time).filter(|time| *time <= now))
        };
        let times = passed(from)?.zip(passed(to)?);
        Ok(times.map(|(from, to)| Duration::from_nanos(to.0.saturating_sub(from.0))))
    }

    unsafe fn wait_event(&self, event: EventId) -> Result<(), DeviceError> {
        let answer = self.enter(CallKind::WaitEvent, 0);
        let point = Self::event_point(&self.control.lock(), "wait_event", event)?;
        // Also a lost device's work ends before its memory may go.
        if let Some(point) = &point {
            point.wait();
            self.tell(point);
        }
        answer?;
        if let Some(point) = &point {
            self.clock.reach(point.time);
        }
        self.count(|counts| counts.host_wait += 1);
        Ok(())
    }

    unsafe fn wait_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        let answer = self.enter(CallKind::WaitStream, 0);
        let point = self.control.lock().stream("wait_stream", stream)?.point();
        point.wait();
        self.tell(&point);
        answer?;
        self.clock.reach(point.time);
        self.count(|counts| counts.host_wait += 1);
        Ok(())
    }
}

impl Copies for EmulatedDevice {
    unsafe fn copy_to_device(
        &self,
        to: DeviceRange,
        from: *const u8,
        available: ModelTime,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.enter(CallKind::CopyToDevice, to.bytes)?;
        let from = HostSpan::new(from, to.bytes);
        if self.is_pageable(from)? {
            // SAFETY: the caller's promise, handed on.
            unsafe { self.copy_pageable(to, from, available, stream)? };
        } else {
            let duration = self.options.link.duration(to.bytes);
            let cost = Cost { available, ..Cost::of(self.options.costs.copy, Engine::ToDevice, duration) };
            self.enqueue(stream, Work::ToDevice { to, from, through: None }, &cost)?;
        }
        self.count(|counts| {
            counts.copy_to_device += 1;
            counts.bytes_to_device += to.bytes;
        });
        Ok(())
    }

    unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: DeviceRange,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.enter(CallKind::CopyToHost, from.bytes)?;
        let work = Work::ToHost { to: HostSpan::new(to, from.bytes), from };
        let duration = self.options.link.duration(from.bytes);
        self.enqueue(stream, work, &Cost::of(self.options.costs.copy, Engine::ToHost, duration))?;
        self.count(|counts| {
            counts.copy_to_host += 1;
            counts.bytes_to_host += from.bytes;
        });
        Ok(())
    }

    unsafe fn copy_on_device(
        &self,
        to: DeviceRange,
        from: DeviceRange,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.enter(CallKind::CopyOnDevice, to.bytes)?;
        let call = "copy_on_device";
        if to.bytes != from.bytes {
            let why = format!("{to:?} and {from:?} are not of one length");
            return Err(DeviceError::InvalidArgument { call, why });
        }
        if to.overlaps(from) {
            return Err(DeviceError::Misuse { call, why: format!("{to:?} and {from:?} overlap") });
        }
        // Within the card bytes move so much faster than over the link that it costs nothing here.
        let cost = Cost::of(self.options.costs.copy, Engine::None, Duration::ZERO);
        self.enqueue(stream, Work::OnDevice { to, from }, &cost)
    }

    unsafe fn fill(&self, to: DeviceRange, value: u8, stream: StreamId) -> Result<(), DeviceError> {
        self.enter(CallKind::Fill, to.bytes)?;
        let cost = Cost::of(self.options.costs.copy, Engine::None, Duration::ZERO);
        self.enqueue(stream, Work::Fill { to, value }, &cost)
    }
}

impl ActivationPool for EmulatedDevice {
    unsafe fn pool_allocate(&self, bytes: u64, stream: StreamId) -> Result<DeviceRange, DeviceError> {
        self.enter(CallKind::PoolAllocate, bytes)?;
        let call = "pool_allocate";
        if bytes == 0 {
            return Err(DeviceError::InvalidArgument { call, why: "no bytes were asked for".to_owned() });
        }
        let Some(whole) = rounded(bytes) else {
            return Err(self.shared.memory.lock().out_of_memory(call, bytes));
        };
        let range = match self.take_from_pool(whole, stream, false) {
            Err(error) if error.is_out_of_memory() => {
                self.trim(0)?;
                self.take_from_pool(whole, stream, true)?
            }
            answer => answer?,
        };
        Ok(DeviceRange::new(range.start, bytes))
    }

    unsafe fn pool_free(&self, range: DeviceRange, stream: StreamId) -> Result<(), DeviceError> {
        let fault = self.strike(CallKind::PoolFree, range.bytes);
        let mut control = self.control.lock();
        let point = self.mark(&mut control, Duration::ZERO, stream, "pool_free", ModelTime::ZERO)?;
        if !self.shared.memory.lock().pool.give_back(range, point, self.clock.now()) {
            let why = format!("{range:?} is no live allocation of the pool");
            return Err(DeviceError::Misuse { call: "pool_free", why });
        }
        fault.map_or(Ok(()), Err)
    }

    fn pool_figures(&self) -> Result<PoolFigures, DeviceError> {
        self.enter(CallKind::PoolFigures, 0)?;
        Ok(self.shared.memory.lock().pool.figures())
    }

    fn pool_trim(&self, keep: u64) -> Result<(), DeviceError> {
        self.enter(CallKind::PoolTrim, 0)?;
        self.trim(keep)
    }
}

impl Kernels for EmulatedDevice {
    fn add_kernels(&self, module: &KernelModule) -> Result<(), DeviceError> {
        self.enter(CallKind::AddKernels, 0)?;
        let mut kernels = self.kernels.write();
        for (index, (name, _)) in module.kernels.iter().enumerate() {
            let earlier = module.kernels[..index].iter().any(|(other, _)| other == name);
            if earlier || kernels.iter().any(|(other, _)| other == name) {
                let why = format!("module `{}`: there is a kernel `{name}` already", module.name);
                return Err(DeviceError::InvalidArgument { call: "add_kernels", why });
            }
        }
        kernels.extend_from_slice(&module.kernels);
        Ok(())
    }

    fn kernel(&self, name: &str) -> Result<KernelId, DeviceError> {
        self.enter(CallKind::Kernel, 0)?;
        let kernels = self.kernels.read();
        match kernels.iter().position(|(known, _)| *known == name) {
            Some(place) => Ok(KernelId(place as u64)),
            None => Err(DeviceError::UnknownKernel { device: self.info.name.clone(), name: name.to_owned() }),
        }
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamId) -> Result<(), DeviceError> {
        self.enter(CallKind::Launch, 0)?;
        let twin = usize::try_from(launch.kernel.0)
            .ok()
            .and_then(|place| self.kernels.read().get(place).map(|(_, twin)| *twin));
        let Some(twin) = twin else {
            let why = format!("kernel {} was never looked up on this device", launch.kernel.0);
            return Err(DeviceError::Misuse { call: "launch", why });
        };
        check_launch(launch)?;
        self.enqueue_launch(launch, twin, stream)
    }
}

impl EmulatedDevice {
    fn enqueue_launch(&self, launch: &Launch, twin: HostTwin, stream: StreamId) -> Result<(), DeviceError> {
        // Kernels here verify; the time of a runner's kernels comes from `charge_compute`.
        let cost = Cost::of(self.options.costs.launch, Engine::None, Duration::ZERO);
        self.enqueue(stream, Work::Launch { launch: *launch, twin }, &cost)?;
        self.count(|counts| counts.launch += 1);
        Ok(())
    }
}

/// Refuses a grid that no card takes, and a written range that another argument overlaps.
fn check_launch(launch: &Launch) -> Result<(), DeviceError> {
    let call = "launch";
    let threads = launch.block.iter().map(|side| u64::from(*side)).product::<u64>();
    if launch.grid.contains(&0) || threads == 0 || threads > MOST_BLOCK_THREADS {
        let why = format!("no card runs a grid of {:?} blocks of {:?} threads", launch.grid, launch.block);
        return Err(DeviceError::InvalidArgument { call, why });
    }
    let args = launch.args.as_slice();
    for (index, arg) in args.iter().enumerate() {
        let KernelArg::Write(written) = arg else { continue };
        for (other_index, other) in args.iter().enumerate() {
            if let KernelArg::Read(range) | KernelArg::Write(range) = other
                && index != other_index
                && range.overlaps(*written)
            {
                let why =
                    format!("argument {other_index} ({range:?}) overlaps {written:?}, which is written");
                return Err(DeviceError::Misuse { call, why });
            }
        }
    }
    Ok(())
}

impl Clock for EmulatedDevice {
    fn now(&self) -> ModelTime {
        self.clock.now()
    }

    fn tells_elapsed(&self) -> bool {
        true
    }

    fn set_now(&self, time: ModelTime) {
        self.clock.set(time);
    }

    unsafe fn charge_compute(&self, stream: StreamId, duration: Duration) -> Result<(), DeviceError> {
        self.enter(CallKind::ChargeCompute, 0)?;
        let mut control = self.control.lock();
        let issued = self.clock.now();
        let end = control.schedule("charge_compute", stream, Engine::Compute, issued, duration)?.end;
        if let Some(journal) = &mut control.journal {
            let (kind, range) = (OperationKind::Compute, DeviceRange::default());
            let (stream, start) = (Some(stream), before(end, duration));
            journal.note(Operation { kind, stream, issued, start, end, range, bytes: 0 });
        }
        Ok(())
    }

    fn charge_host(&self, duration: Duration) {
        self.clock.advance(duration);
    }

    fn schedule_read(&self, bytes: u64) -> ModelTime {
        let issued = self.clock.now();
        let duration = self.options.disk.map_or(Duration::ZERO, |disk| disk.duration(bytes));
        let mut control = self.control.lock();
        let end = match self.options.disk {
            Some(_) => control.engines.schedule_read(issued, duration),
            None => issued,
        };
        if let Some(journal) = &mut control.journal {
            let (kind, range) = (OperationKind::Read, DeviceRange::default());
            let start = before(end, duration);
            journal.note(Operation { kind, stream: None, issued, start, end, range, bytes });
        }
        end
    }
}
