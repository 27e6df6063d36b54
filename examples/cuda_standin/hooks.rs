//! What a test in the same process may ask and tell, beside the driver's names.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::Duration;

use vram_pager::device::HostMemory;
use vram_pager::device::emulated::Hold;

use crate::settings::{VirtualMemory, parse_failure};
use crate::state::{misuses, nanoseconds, shout, state, take_told};

/// How long a hold lasts on the modelled clock: longer than any test's calls.
const HELD: Duration = Duration::from_secs(1);

/// Sets the failures anew, as `VRAM_PAGER_STANDIN_FAIL` has them, and counts calls from here on; null or
/// an empty text takes them away. Answers 0, or 1 if the text cannot be read.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_pager_standin_fail(text: *const c_char) -> c_int {
    // SAFETY: a string that ends in a NUL, says the caller.
    let text = if text.is_null() { "" } else { unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("?") };
    let failures =
        text.split(',').filter(|part| !part.is_empty()).map(parse_failure).collect::<Option<Vec<_>>>();
    match failures {
        Some(failures) => {
            state().set_failures(failures);
            0
        }
        None => 1,
    }
}

/// Calls of any driver function since the failures were set.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_calls() -> u64 {
    state().calls()
}

/// Calls that failed because they were told to, since the library was loaded.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_failed() -> u64 {
    state().failed()
}

/// Calls of one driver function since the failures were set.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_pager_standin_calls_of(name: *const c_char) -> u64 {
    if name.is_null() {
        return 0;
    }
    // SAFETY: a string that ends in a NUL, says the caller.
    unsafe { CStr::from_ptr(name) }.to_str().map_or(0, |name| state().calls_of(name))
}

/// Nanoseconds that were spent inside driver calls, all threads together.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_nanoseconds() -> u64 {
    nanoseconds()
}

/// How often misuse was told.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_misuses() -> u64 {
    misuses()
}

/// Calls since the failures were set, as `NAME=COUNT` lines by name; answers the length, and writes as much of
/// it as there is room for.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_pager_standin_calls_by_name(to: *mut c_char, room: usize) -> usize {
    let text = state().calls_by_name();
    // SAFETY: room for so many bytes, says the caller.
    unsafe { give(&text, to, room) }
}

/// What was told of misuse since this was called last, a line each; answers the length, and writes as much of it
/// as there is room for.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_pager_standin_take_told(to: *mut c_char, room: usize) -> usize {
    // SAFETY: room for so many bytes, says the caller.
    unsafe { give(&take_told().join("\n"), to, room) }
}

/// Copies a text out.
///
/// # Safety
/// `to` has room for `room` bytes.
unsafe fn give(text: &str, to: *mut c_char, room: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len().min(room)) };
    text.len()
}

/// The host writes its memory from here on: what a driver cannot see. Answers 1, tells of misuse and begins
/// nothing if a copy of any card may still use it.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_begin_host_write(start: *const c_void, bytes: usize) -> c_int {
    let devices: Vec<_> = state().cards.iter().flatten().map(|card| card.device.clone()).collect();
    for (place, device) in devices.iter().enumerate() {
        if let Err(error) = device.begin_host_write(start.cast(), bytes as u64) {
            for begun in &devices[..place] {
                begun.end_host_write(start.cast(), bytes as u64);
            }
            shout("host_write", &error.to_string());
            return 1;
        }
    }
    0
}

/// The host has written what it said that it would. Answers 0.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_end_host_write(start: *const c_void, bytes: usize) -> c_int {
    let devices: Vec<_> = state().cards.iter().flatten().map(|card| card.device.clone()).collect();
    for device in devices {
        device.end_host_write(start.cast(), bytes as u64);
    }
    0
}

/// From here on each operation of an open card keeps the calls that led to it, so that misuse is told with
/// both sides by file and line. Answers 0, or 1 if the card is not open.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_keep_sites(ordinal: u32, keep: c_int) -> c_int {
    let state = state();
    let card = usize::try_from(ordinal).ok().and_then(|index| state.cards.get(index)?.as_ref());
    card.map_or(1, |card| {
        card.device.keep_sites(keep != 0);
        0
    })
}

/// Retained primary contexts plus objects in them: 0 when a program left nothing behind.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_leftovers() -> u64 {
    let state = state();
    state.cards.iter().flatten().map(|card| 1 + card.leftovers().len() as u64).sum()
}

/// Another process holds `bytes` of a card from now on. Answers 0, or 1 if the card is not open.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_set_other_bytes(ordinal: u32, bytes: u64) -> c_int {
    let state = state();
    let card = usize::try_from(ordinal).ok().and_then(|index| state.cards.get(index)?.as_ref());
    card.map_or(1, |card| {
        card.device.set_other_bytes(bytes);
        0
    })
}

/// Sets how many cards there are and how large each is. Answers 0, or 1 if that would change an open one.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_set_cards(count: c_int, bytes: u64) -> c_int {
    let mut state = state();
    if (state.settings.devices, state.settings.bytes) == (count, bytes) {
        return 0;
    }
    let Ok(length) = usize::try_from(count) else { return 1 };
    if state.cards.iter().any(Option::is_some) {
        return 1;
    }
    state.cards.resize_with(length, || None);
    state.settings.devices = count;
    state.settings.bytes = bytes;
    0
}

/// Sets the granularity. Answers 0, or 1 if that would change an open card.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_set_page(bytes: u64) -> c_int {
    let mut state = state();
    if state.settings.page != bytes && state.cards.iter().any(Option::is_some) {
        return 1;
    }
    state.settings.page = bytes;
    0
}

/// Holds back the stream that was created as the `number`th of a card. Answers a token for
/// [`vram_pager_standin_release`], or null.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_hold(ordinal: u32, number: u64) -> *mut c_void {
    let state = state();
    let card = usize::try_from(ordinal).ok().and_then(|index| state.cards.get(index)?.as_ref());
    let hold = card.and_then(|card| {
        let stream = card.streams.values().find(|stream| stream.number == number)?;
        card.device.hold(stream.id, HELD).ok()
    });
    hold.map_or(std::ptr::null_mut(), |hold| Box::into_raw(Box::new(hold)).cast())
}

/// Lets a held stream go.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_pager_standin_release(token: *mut c_void) {
    if !token.is_null() {
        // SAFETY: a token that was not given back before, says the caller.
        drop(unsafe { Box::from_raw(token.cast::<Hold>()) });
    }
}

/// Sets whether there are virtual memory and pools from here on.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_set_abilities(virtual_memory: c_int, pools: c_int) {
    let mut state = state();
    state.settings.virtual_memory = if virtual_memory != 0 { VirtualMemory::Yes } else { VirtualMemory::No };
    state.settings.pools = pools != 0;
}

/// Events of a card that keep time, of those that exist; 0 if the card is not open.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_timed_events(ordinal: u32) -> u64 {
    let state = state();
    let card = usize::try_from(ordinal).ok().and_then(|index| state.cards.get(index)?.as_ref());
    card.map_or(0, |card| card.events.values().filter(|event| event.timed).count() as u64)
}

/// Makes a stream pass for one that is being captured into a graph, or no longer. Whatever is enqueued or
/// recorded on it meanwhile, or waited for, is misuse.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_set_capturing(stream: *mut c_void, capturing: c_int) {
    let mut state = state();
    if capturing == 0 {
        state.capturing.remove(&(stream as usize));
    } else {
        state.capturing.insert(stream as usize);
    }
}

/// Work of a card completes late from here on, as `seed` says. Answers 0, or 1 if the card is not open.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_seed_delays(ordinal: u32, seed: u64) -> c_int {
    let state = state();
    let card = usize::try_from(ordinal).ok().and_then(|index| state.cards.get(index)?.as_ref());
    card.map_or(1, |card| {
        card.device.seed_delays(seed);
        0
    })
}
