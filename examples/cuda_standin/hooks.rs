//! What a test in the same process may ask and tell, beside the driver's names.

use std::ffi::{CStr, c_char, c_int};

use crate::settings::parse_failure;
use crate::state::{misuses, state};

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

/// How often misuse was told.
// SAFETY: a name of this library's own.
#[unsafe(no_mangle)]
pub extern "C" fn vram_pager_standin_misuses() -> u64 {
    misuses()
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
pub extern "C" fn vram_pager_standin_set_other_bytes(ordinal: c_int, bytes: u64) -> c_int {
    let state = state();
    let card = usize::try_from(ordinal).ok().and_then(|index| state.cards.get(index)?.as_ref());
    card.map_or(1, |card| {
        card.device.set_other_bytes(bytes);
        0
    })
}
