//! Streams and events, and the order between the default streams and blocking ones.
//!
//! Work on the legacy stream waits for all work that blocking streams were given before, and work that
//! they are given afterwards waits for it. Waits of the host hold no lock.

use std::ffi::{c_int, c_uint, c_void};

use vram_pager::device::{EventId, StreamId, StreamPriority, Streams};

use crate::codes::{CAPTURE_UNSUPPORTED, INVALID_HANDLE, INVALID_VALUE, NOT_READY};
use crate::pool::trim_to_thresholds;
use crate::state::{Answer, Card, EventEntry, Fail, State, StreamEntry, state, write};

/// Events keep no time.
const DISABLE_TIMING: c_uint = 2;

/// A stream as a call names it.
#[derive(Clone, Copy)]
pub struct Named {
    pub id: StreamId,
    /// Whether it synchronises with the legacy stream.
    pub blocking: bool,
}

/// The stream of a handle: 0 and 1 are the legacy stream, 2 this thread's own.
pub fn stream_of(card: &mut Card, handle: *mut c_void) -> Result<Named, Fail> {
    match handle as usize {
        0 | 1 => Ok(Named { id: card.legacy, blocking: false }),
        2 => {
            let thread = std::thread::current().id();
            if let Some(id) = card.per_thread.get(&thread) {
                return Ok(Named { id: *id, blocking: true });
            }
            let id = card.device.create_stream(StreamPriority::Normal)?;
            card.per_thread.insert(thread, id);
            Ok(Named { id, blocking: true })
        }
        handle => match card.streams.get(&handle) {
            Some(stream) => Ok(Named { id: stream.id, blocking: stream.blocking }),
            None => Err(Fail::misuse(INVALID_HANDLE, format!("{handle:#x} is no stream"))),
        },
    }
}

/// Makes the next work of `to` wait for what `from` has been given.
fn follow(card: &Card, to: StreamId, from: StreamId) -> Answer {
    let event = card.device.create_event()?;
    // SAFETY: event and streams are live; a wait that was enqueued outlives its event.
    unsafe {
        card.device.record(event, from)?;
        card.device.stream_wait(to, event)?;
        card.device.destroy_event(event)?;
    }
    Ok(())
}

/// Orders the next work of a stream with the legacy stream, as the driver does. Call it before each.
pub fn order(card: &Card, stream: Named) -> Answer {
    if stream.id == card.legacy {
        let blocking = card.streams.values().filter(|stream| stream.blocking).map(|stream| stream.id);
        for other in blocking.chain(card.per_thread.values().copied()) {
            follow(card, card.legacy, other)?;
        }
    } else if stream.blocking {
        follow(card, stream.id, card.legacy)?;
    }
    Ok(())
}

fn event_of(card: &Card, handle: *mut c_void) -> Result<EventId, Fail> {
    let handle = handle as usize;
    card.events
        .get(&handle)
        .map(|event| event.id)
        .ok_or_else(|| Fail::misuse(INVALID_HANDLE, format!("{handle:#x} is no event")))
}

/// An event whose time can be asked for: it was recorded, and keeps time.
fn timed_event_of(card: &Card, handle: *mut c_void) -> Result<EventId, Fail> {
    let id = event_of(card, handle)?;
    match card.events.get(&(handle as usize)) {
        Some(EventEntry { timed: true, recorded: true, .. }) => Ok(id),
        Some(EventEntry { timed: true, .. }) => {
            Err(Fail::misuse(INVALID_HANDLE, format!("{handle:p} was never recorded")))
        }
        _ => Err(Fail::misuse(INVALID_HANDLE, format!("{handle:p} keeps no time"))),
    }
}

/// There are no graphs here: a stream only passes for one that is being captured, so that a test can show
/// that nothing is enqueued on it.
pub fn refuse_capturing(state: &State, stream: *mut c_void) -> Answer {
    if state.capturing.contains(&(stream as usize)) {
        return Err(Fail::misuse(CAPTURE_UNSUPPORTED, format!("{stream:p} is being captured")));
    }
    Ok(())
}

/// After a wait of the host: work that went wrong shows, and pools give back what exceeds them.
fn waited() -> Answer {
    let mut state = state();
    trim_to_thresholds(state.current()?)
}

fn create(stream: *mut *mut c_void, flags: c_uint, priority: c_int) -> Answer {
    let mut state = state();
    if stream.is_null() || flags > 1 {
        return Err(Fail::misuse(INVALID_VALUE, format!("flags {flags}, or a null pointer")));
    }
    let handle = state.handle();
    let card = state.current()?;
    let urgency = if priority < 0 { StreamPriority::High } else { StreamPriority::Normal };
    let id = card.device.create_stream(urgency)?;
    let priority = priority.clamp(-5, 0);
    card.streams_created += 1;
    let number = card.streams_created;
    card.streams.insert(handle, StreamEntry { id, number, blocking: flags == 0, priority, flags });
    write(stream, handle as *mut c_void)
}

driver_calls! {
    fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: *mut *mut c_void, flags: c_uint, priority: c_int) {
        create(stream, flags, priority)
    }

    fn cuStreamDestroy_v2(stream: *mut c_void) {
        let mut state = state();
        let card = state.current()?;
        let Some(entry) = card.streams.get(&(stream as usize)).copied() else {
            return Err(Fail::misuse(INVALID_HANDLE, format!("{stream:p} is no stream")));
        };
        // SAFETY: live until now and not named again; its work still runs.
        unsafe { card.device.destroy_stream(entry.id)? };
        card.streams.remove(&(stream as usize));
        Ok(())
    }

    fn cuStreamGetCtx(stream: *mut c_void, context: *mut *mut c_void) {
        let mut state = state();
        // Any card's stream may be asked about.
        let owner = state.cards.iter().flatten().find(|card| card.streams.contains_key(&(stream as usize)));
        let owner = owner.map(|card| card.context);
        let card = state.current()?;
        if let Some(owner) = owner {
            return write(context, owner as *mut c_void);
        }
        stream_of(card, stream)?;
        write(context, card.context as *mut c_void)
    }

    fn cuStreamGetFlags(stream: *mut c_void, flags: *mut c_uint) {
        let mut state = state();
        let card = state.current()?;
        stream_of(card, stream)?;
        write(flags, card.streams.get(&(stream as usize)).map_or(0, |stream| stream.flags))
    }

    fn cuStreamGetPriority(stream: *mut c_void, priority: *mut c_int) {
        let mut state = state();
        let card = state.current()?;
        stream_of(card, stream)?;
        write(priority, card.streams.get(&(stream as usize)).map_or(0, |stream| stream.priority))
    }

    fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) {
        let mut state = state();
        let capturing = state.capturing.contains(&(stream as usize));
        stream_of(state.current()?, stream)?;
        write(status, c_int::from(capturing))
    }

    fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) {
        let mut state = state();
        if flags > 1 {
            return Err(Fail::misuse(INVALID_VALUE, format!("flags {flags:#x} are not offered")));
        }
        refuse_capturing(&state, stream)?;
        let card = state.current()?;
        let (stream, event) = (stream_of(card, stream)?, event_of(card, event)?);
        order(card, stream)?;
        // SAFETY: both are live.
        unsafe { card.device.stream_wait(stream.id, event)? };
        Ok(())
    }

    fn cuStreamSynchronize(stream: *mut c_void) {
        let (device, id) = {
            let mut state = state();
            refuse_capturing(&state, stream)?;
            let card = state.current()?;
            let stream = stream_of(card, stream)?;
            order(card, stream)?;
            (card.device.clone(), stream.id)
        };
        // SAFETY: live unless another thread destroys it meanwhile, which the device reports.
        unsafe { device.wait_stream(id)? };
        waited()
    }

    fn cuStreamQuery(stream: *mut c_void) {
        let (device, event) = {
            let mut state = state();
            let card = state.current()?;
            let stream = stream_of(card, stream)?;
            let event = card.device.create_event()?;
            // SAFETY: both are live.
            unsafe { card.device.record(event, stream.id)? };
            (card.device.clone(), event)
        };
        // SAFETY: the event is ours alone.
        let done = unsafe { device.query(event) };
        // SAFETY: as above, and not named again.
        unsafe { device.destroy_event(event)? };
        if done? { Ok(()) } else { Err(Fail::plain(NOT_READY)) }
    }

    fn cuEventCreate(event: *mut *mut c_void, flags: c_uint) {
        let mut state = state();
        if event.is_null() || flags & !7 != 0 {
            return Err(Fail::misuse(INVALID_VALUE, format!("flags {flags:#x}, or a null pointer")));
        }
        let handle = state.handle();
        let card = state.current()?;
        let id = card.device.create_event()?;
        card.events.insert(handle, EventEntry { id, timed: flags & DISABLE_TIMING == 0, recorded: false });
        write(event, handle as *mut c_void)
    }

    fn cuEventDestroy_v2(event: *mut c_void) {
        let mut state = state();
        let card = state.current()?;
        let id = event_of(card, event)?;
        // SAFETY: live until now and not named again.
        unsafe { card.device.destroy_event(id)? };
        card.events.remove(&(event as usize));
        Ok(())
    }

    fn cuEventRecord(event: *mut c_void, stream: *mut c_void) {
        let mut state = state();
        refuse_capturing(&state, stream)?;
        let card = state.current()?;
        let (stream, id) = (stream_of(card, stream)?, event_of(card, event)?);
        order(card, stream)?;
        // SAFETY: both are live.
        unsafe { card.device.record(id, stream.id)? };
        if let Some(event) = card.events.get_mut(&(event as usize)) {
            event.recorded = true;
        }
        Ok(())
    }

    fn cuEventQuery(event: *mut c_void) {
        let (device, event) = {
            let mut state = state();
            let card = state.current()?;
            (card.device.clone(), event_of(card, event)?)
        };
        // SAFETY: live unless another thread destroys it meanwhile, which the device reports.
        if unsafe { device.query(event)? } { Ok(()) } else { Err(Fail::plain(NOT_READY)) }
    }

    fn cuEventSynchronize(event: *mut c_void) {
        let (device, event) = {
            let mut state = state();
            let card = state.current()?;
            (card.device.clone(), event_of(card, event)?)
        };
        // SAFETY: as above.
        unsafe { device.wait_event(event)? };
        waited()
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) {
        let (device, start, end) = {
            let mut state = state();
            let card = state.current()?;
            (card.device.clone(), timed_event_of(card, start)?, timed_event_of(card, end)?)
        };
        // SAFETY: live unless another thread destroys one meanwhile, which the device reports.
        let elapsed = unsafe {
            if device.query(start)? && device.query(end)? { device.elapsed(start, end)? } else { None }
        };
        let elapsed = elapsed.ok_or(Fail::plain(NOT_READY))?;
        write(milliseconds, elapsed.as_secs_f32() * 1e3)
    }
}
