//! Initialisation, devices and contexts.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_char, c_int, c_uint, c_void};

use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::device::{Device, StreamPriority, Streams};

use crate::codes::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED};
use crate::kernels;
use crate::settings::VirtualMemory;
use crate::state::{
    Answer, Card, Fail, PoolEntry, State, current_context, shout, state, with_contexts, write,
};

/// The compute capability that the stand-in tells.
pub const CAPABILITY: (c_int, c_int) = (9, 0);

/// Checks that `cuInit` was called and that there is such a device.
fn check_device(state: &State, device: c_int) -> Result<usize, Fail> {
    if !state.initialised {
        return Err(Fail::misuse(NOT_INITIALIZED, "cuInit was not called"));
    }
    usize::try_from(device).ok().filter(|index| *index < state.cards.len()).ok_or(Fail::plain(INVALID_DEVICE))
}

/// Refuses a device that is not there.
pub fn check_known_device(device: c_int) -> Answer {
    check_device(&state(), device).map(|_| ())
}

/// Creates a card's primary context.
fn open_card(state: &mut State) -> Result<Card, Fail> {
    let mut options = EmulatedOptions::new(state.settings.bytes);
    options.page_bytes = state.settings.page;
    options.keeps_bytes = state.settings.keeps_bytes;
    let device = EmulatedDevice::open(options)?;
    device.seed_delays(state.settings.delays);
    for module in kernels::modules() {
        vram_pager::device::Kernels::add_kernels(&*device, &module)?;
    }
    let legacy = device.create_stream(StreamPriority::Normal)?;
    let (context, default_pool) = (state.handle(), state.handle());
    Ok(Card {
        device,
        context,
        retained: 0,
        lost: None,
        legacy,
        per_thread: HashMap::new(),
        streams: HashMap::new(),
        streams_created: 0,
        events: HashMap::new(),
        frames: HashMap::new(),
        ranges: BTreeMap::new(),
        whole_ranges: HashMap::new(),
        mappings: BTreeMap::new(),
        plain: BTreeMap::new(),
        pools: HashMap::from([(default_pool, PoolEntry::default())]),
        default_pool,
        pool_blocks: HashMap::new(),
        host: BTreeMap::new(),
        host_blocks: BTreeMap::new(),
        modules: HashMap::new(),
        functions: HashMap::new(),
    })
}

fn check_context(state: &mut State, context: *mut c_void) -> Result<usize, Fail> {
    let context = context as usize;
    match state.card_of(context) {
        Some(_) => Ok(context),
        None => Err(Fail::misuse(INVALID_CONTEXT, format!("{context:#x} is no context"))),
    }
}

/// Waits for all work of the current context.
pub fn synchronize() -> Answer {
    let device = state().current()?.device.clone();
    device.synchronize()?;
    // Work that went wrong shows now.
    state().current().map(|_| ())
}

driver_calls! {
    fn cuInit(flags: c_uint) {
        let mut state = state();
        if flags != 0 {
            return Err(Fail::misuse(INVALID_VALUE, "flags must be 0"));
        }
        if state.settings.devices == 0 {
            return Err(Fail::plain(NO_DEVICE));
        }
        state.initialised = true;
        Ok(())
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        write(version, state().settings.version)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        let state = state();
        check_device(&state, 0)?;
        write(count, state.settings.devices)
    }

    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        check_device(&state(), ordinal)?;
        write(device, ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: c_int) {
        check_device(&state(), device)?;
        let text = format!("CUDA stand-in {device}");
        let room = usize::try_from(bytes).unwrap_or(0);
        if name.is_null() || room == 0 {
            return Err(Fail::misuse(INVALID_VALUE, "no room for a name"));
        }
        let length = text.len().min(room - 1);
        // SAFETY: the caller passes a buffer of that many bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), length);
            name.add(length).write(0);
        }
        Ok(())
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        let state = state();
        check_device(&state, device)?;
        let whole = state.settings.bytes / state.settings.page * state.settings.page;
        write(bytes, usize::try_from(whole).unwrap_or(usize::MAX))
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        let state = state();
        check_device(&state, device)?;
        let answer = match attribute {
            1 => 1024,                                // threads of a block
            10 => 32,                                 // threads of a warp
            16 => 16,                                 // multiprocessors
            40 => 2,                                  // copy engines
            31 | 41 => 1,                             // concurrent kernels, unified addresses
            75 => CAPABILITY.0,
            76 => CAPABILITY.1,
            102 => c_int::from(state.settings.virtual_memory != VirtualMemory::No),
            115 => c_int::from(state.settings.pools),
            ..=0 => return Err(Fail::misuse(INVALID_VALUE, format!("{attribute} is no attribute"))),
            _ => 0,
        };
        write(value, answer)
    }

    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) {
        let mut state = state();
        let index = check_device(&state, device)?;
        if context.is_null() {
            return Err(Fail::misuse(INVALID_VALUE, "a result's pointer is null"));
        }
        if state.cards[index].is_none() {
            let card = open_card(&mut state)?;
            state.cards[index] = Some(card);
        }
        let Some(card) = &mut state.cards[index] else { return Err(Fail::plain(INVALID_DEVICE)) };
        card.retained += 1;
        write(context, card.context as *mut c_void)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let closed = {
            let mut state = state();
            let index = check_device(&state, device)?;
            let card = state.cards[index].as_mut().ok_or_else(|| {
                Fail::misuse(INVALID_CONTEXT, "the primary context is not retained")
            })?;
            card.retained -= 1;
            if card.retained == 0 { state.cards[index].take() } else { None }
        };
        // Dropped without the lock: it waits for work in flight.
        if let Some(card) = closed {
            let left = card.leftovers();
            if !left.is_empty() && card.lost.is_none() {
                shout("cuDevicePrimaryCtxRelease", &format!("left behind: {}", left.join(", ")));
            }
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        let state = state();
        let index = check_device(&state, device)?;
        write(flags, 0)?;
        write(active, c_int::from(state.cards[index].is_some()))
    }

    fn cuCtxGetCurrent(context: *mut *mut c_void) {
        write(context, current_context().unwrap_or(0) as *mut c_void)
    }

    fn cuCtxSetCurrent(context: *mut c_void) {
        let context = if context.is_null() { None } else { Some(check_context(&mut state(), context)?) };
        with_contexts(|contexts| {
            contexts.pop();
            contexts.extend(context);
        });
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: *mut c_void) {
        let context = check_context(&mut state(), context)?;
        with_contexts(|contexts| contexts.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: *mut *mut c_void) {
        let popped = with_contexts(Vec::pop);
        let popped = popped.ok_or_else(|| Fail::misuse(INVALID_CONTEXT, "no context was pushed"))?;
        if context.is_null() { Ok(()) } else { write(context, popped as *mut c_void) }
    }

    fn cuCtxGetDevice(device: *mut c_int) {
        let mut state = state();
        let context = state.current()?.context;
        let index = state.cards.iter().position(|card| {
            card.as_ref().is_some_and(|card| card.context == context)
        });
        write(device, index.and_then(|index| c_int::try_from(index).ok()).unwrap_or(0))
    }

    fn cuCtxSynchronize() {
        synchronize()
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        state().current()?;
        if !least.is_null() {
            write(least, 0)?;
        }
        if greatest.is_null() { Ok(()) } else { write(greatest, -5) }
    }
}
