//! Symbols that the library is told not to export.
//!
//! When the library is loaded, each name in `VRAM_PAGER_STANDIN_MISSING` is overwritten in the library's
//! own table of names, so that no look-up finds it.

use std::ffi::{c_int, c_void};

use crate::settings::Settings;

const DT_STRTAB: u64 = 5;
const DT_STRSZ: u64 = 10;

#[used]
// SAFETY: an entry of the loader's list of functions to call after it loaded the library.
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    let mut missing = Settings::missing();
    if missing.is_empty() {
        return;
    }
    let data = (&raw mut missing).cast::<c_void>();
    // SAFETY: the callback gets our list back, which lives over the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), data) };
    if !missing.is_empty() {
        eprintln!("cuda stand-in: VRAM_PAGER_STANDIN_MISSING names what is not exported: {missing:?}");
        std::process::abort();
    }
}

/// Looks at one loaded object; stops at this library.
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid description.
    let info = unsafe { &*info };
    // SAFETY: `at_load` passed its list.
    let missing = unsafe { &mut *data.cast::<Vec<String>>() };
    // SAFETY: the loader's own array of that length.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let base = info.dlpi_addr;
    let own = at_load as *const () as u64;
    let ours = headers.iter().any(|header| {
        let start = base + header.p_vaddr;
        header.p_type == libc::PT_LOAD && (start..start + header.p_memsz).contains(&own)
    });
    if !ours {
        return 0;
    }
    for header in headers.iter().filter(|header| header.p_type == libc::PT_DYNAMIC) {
        let mut entry = (base + header.p_vaddr) as *const [u64; 2];
        let (mut table, mut bytes) = (0, 0);
        loop {
            // SAFETY: the dynamic section is a list of pairs that a zero tag ends.
            let [tag, value] = unsafe { entry.read() };
            match tag {
                0 => break,
                DT_STRTAB => table = if value < base { base + value } else { value },
                DT_STRSZ => bytes = value,
                _ => {}
            }
            // SAFETY: before the end of the list.
            entry = unsafe { entry.add(1) };
        }
        if table != 0 {
            // SAFETY: the library's own table of names, of the length that it tells.
            unsafe { overwrite(table as *mut u8, usize::try_from(bytes).unwrap_or(0), missing) };
        }
    }
    1
}

/// Overwrites the names in `missing` that the table holds, and takes them out of the list.
///
/// # Safety
/// `table` are `bytes` mapped bytes that only the loader reads.
unsafe fn overwrite(table: *mut u8, bytes: usize, missing: &mut Vec<String>) {
    let page = 4096;
    let start = table as usize / page * page;
    let length = table as usize + bytes - start;
    // SAFETY: pages of the library's own, made writable and back.
    if unsafe { libc::mprotect(start as *mut c_void, length, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
        return;
    }
    // SAFETY: mapped and writable; the loader looks nothing up in this library before it is loaded.
    let names = unsafe { std::slice::from_raw_parts_mut(table, bytes) };
    missing.retain(|name| {
        let wanted = [&[0], name.as_bytes(), &[0]].concat();
        let found = names.windows(wanted.len()).position(|window| window == wanted);
        if let Some(place) = found {
            names[place + 1] = b'-';
        }
        found.is_none()
    });
    // SAFETY: as above.
    unsafe { libc::mprotect(start as *mut c_void, length, libc::PROT_READ) };
}
