//! Modules and launches. A kernel is known by name: the stand-in runs its host twin.
//!
//! A card's kernel gets addresses only, a twin whole ranges; so each known kernel has a line here that
//! says what its parameters are and how long each range is. A program's own kernels join in [`modules`]
//! and [`arguments`].

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use vram_pager::device::{DeviceError, KernelArg, KernelArgs, KernelModule, Kernels, Launch, TwinArg};
use vram_pager::units::{DeviceAddress, DeviceRange};

use crate::codes::{
    ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, NOT_FOUND, UNSUPPORTED_PTX_VERSION,
};
use crate::context::CAPABILITY;
use crate::state::{Answer, Fail, state, write};
use crate::streams::{order, stream_of};

/// The embedding example's twins.
#[path = "../embed/runner/kernels.rs"]
mod embed;

/// Twins of kernels that are not the crate's own.
pub fn modules() -> Vec<KernelModule> {
    vec![embed::module(), KernelModule { name: "tests", ptx: None, kernels: vec![("double", double)] }]
}

/// `double(bytes: 4 bytes, times: U32)`, the kernel of the device contract's test: multiplies each byte.
fn double(args: &mut [TwinArg<'_>]) -> Result<(), String> {
    let [TwinArg::Write(bytes), TwinArg::U32(times)] = args else { return Err("wrong arguments".into()) };
    bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_mul(u8::try_from(*times).unwrap_or(0)));
    Ok(())
}

/// Reads a launch's parameters in order.
struct Parameters {
    next: *mut *mut c_void,
}

impl Parameters {
    fn read<T: Copy>(&mut self) -> T {
        // SAFETY: the caller of the launch passes one pointer a parameter of the kernel, each to a value of
        // its type; the kernel's line in `arguments` reads exactly those.
        unsafe {
            let value = self.next.read().cast::<T>().read();
            self.next = self.next.add(1);
            value
        }
    }

    fn u32(&mut self) -> u32 {
        self.read()
    }

    fn u64(&mut self) -> u64 {
        self.read()
    }

    fn f32(&mut self) -> f32 {
        self.read()
    }
}

fn range(address: u64, bytes: u64) -> DeviceRange {
    DeviceRange::new(DeviceAddress(address), bytes)
}

fn width(format: &str) -> Option<u64> {
    match format {
        "f32" => Some(4),
        "f16" | "bf16" => Some(2),
        "f8_e4m3" | "f8_e5m2" => Some(1),
        _ => None,
    }
}

/// The arguments of a known kernel with their ranges; `None` if the kernel is unknown.
fn arguments(kernel: &str, mut parameters: Parameters) -> Option<Vec<KernelArg>> {
    use KernelArg::{F32, Read, U32, U64, Write};
    if kernel == "double" {
        return Some(vec![Write(range(parameters.u64(), 4)), U32(parameters.u32())]);
    }
    if kernel == "checksum" {
        let (bytes, length, first, sum) =
            (parameters.u64(), parameters.u64(), parameters.u64(), parameters.u64());
        return Some(vec![Read(range(bytes, length)), U64(length), U64(first), Write(range(sum, 8))]);
    }
    if let Some(pair) = kernel.strip_prefix("cast_") {
        let (from, to) = pair.rsplit_once('_')?;
        let (from_width, to_width) = (width(from)?, width(to)?);
        let (from, elements, to) = (parameters.u64(), parameters.u64(), parameters.u64());
        return Some(vec![
            Read(range(from, elements * from_width)),
            U64(elements),
            Write(range(to, elements * to_width)),
        ]);
    }
    if let Some(pair) = kernel.strip_prefix("patch_") {
        let (weight, factor) = pair.split_once('_')?;
        let (weight_width, factor_width) = (width(weight)?, width(factor)?);
        let (weight, first, elements, columns) =
            (parameters.u64(), parameters.u64(), parameters.u64(), parameters.u64());
        let (up, down, rank, scale) =
            (parameters.u64(), parameters.u64(), parameters.u32(), parameters.f32());
        let rows = (first + elements).div_ceil(columns.max(1));
        let factor = u64::from(rank) * factor_width;
        return Some(vec![
            Write(range(weight, elements * weight_width)),
            U64(first),
            U64(elements),
            U64(columns),
            Read(range(up, rows * factor)),
            Read(range(down, columns * factor)),
            U32(rank),
            F32(scale),
        ]);
    }
    kernel.strip_prefix("embed_").and_then(|name| embed_arguments(name, parameters))
}

/// The arguments of the embedding example's kernels, as the table of their twins has them.
fn embed_arguments(kernel: &str, mut parameters: Parameters) -> Option<Vec<KernelArg>> {
    // Which parameters are read (r) and written (w) ranges, in order; then how many u32 sizes there are.
    let (ranges, sizes) = match kernel {
        "sum" => ("rrrw", 1),
        "add" => ("rw", 1),
        "bias" => ("rw", 4),
        "matmul" | "scores" | "mix" => ("rrw", 5),
        "layer_norm" => ("rrw", 2),
        "softmax" => ("w", 2),
        "gelu" => ("w", 1),
        "pool" => ("rw", 2),
        _ => return None,
    };
    let addresses: Vec<u64> = ranges.chars().map(|_| parameters.u64()).collect();
    let sizes: Vec<u32> = (0..sizes).map(|_| parameters.u32()).collect();
    let n = |place: usize| u64::from(sizes[place]);
    let counts = match kernel {
        "bias" => vec![n(1), n(0) * n(3)],
        "matmul" => vec![n(0) * n(1), n(2) * n(1), n(0) * n(4)],
        "layer_norm" => vec![n(1), n(1), n(0) * n(1)],
        "scores" => vec![n(0) * n(1), n(0) * n(1), n(3) * n(0) * n(0)],
        "mix" => vec![n(3) * n(0) * n(0), n(0) * n(1), n(0) * n(1)],
        "softmax" => vec![n(0) * n(1)],
        "pool" => vec![n(0) * n(1), n(1)],
        _ => vec![n(0); addresses.len()],
    };
    let mut args: Vec<KernelArg> = ranges
        .chars()
        .zip(addresses.iter().zip(counts))
        .map(|(kind, (address, count))| match kind {
            'r' => KernelArg::Read(range(*address, 4 * count)),
            _ => KernelArg::Write(range(*address, 4 * count)),
        })
        .collect();
    args.extend(sizes.into_iter().map(KernelArg::U32));
    if matches!(kernel, "layer_norm" | "scores") {
        args.push(KernelArg::F32(parameters.f32()));
    }
    Some(args)
}

/// The number after `word` in a module's text, without dots: `8.0` is 80.
fn number_after(text: &str, word: &str) -> Option<c_int> {
    let (_, rest) = text.split_once(word)?;
    let digits: String = rest.trim_start().chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    digits.replace('.', "").parse().ok()
}

/// Checks a module's text as the driver's compiler would at first sight, and lists its entries.
fn read_module(text: &str, driver_version: c_int) -> Result<Vec<String>, Fail> {
    let version = number_after(text, ".version").ok_or(Fail::plain(INVALID_IMAGE))?;
    let target = number_after(text, ".target sm_").ok_or(Fail::plain(INVALID_IMAGE))?;
    // PTX 8.0 came with CUDA 12.0, and each minor version since with the next.
    let newest = 80 + (driver_version - 12_000) / 10;
    if version > newest {
        return Err(Fail::plain(UNSUPPORTED_PTX_VERSION));
    }
    if target > CAPABILITY.0 * 10 + CAPABILITY.1 {
        return Err(Fail::plain(209));
    }
    let entries = text.split(".entry ").skip(1);
    let name = |entry: &str| entry.split(|c: char| c == '(' || c.is_whitespace()).next().map(str::to_owned);
    Ok(entries.filter_map(name).collect())
}

fn load(module: *mut *mut c_void, image: *const c_void) -> Answer {
    if module.is_null() || image.is_null() {
        return Err(Fail::misuse(INVALID_VALUE, "a pointer is null"));
    }
    // SAFETY: text that ends in a NUL, which is all that this driver loads.
    let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) }.to_str();
    let mut state = state();
    let entries = read_module(text.map_err(|_| Fail::plain(INVALID_IMAGE))?, state.settings.version)?;
    let handle = state.handle();
    state.current()?.modules.insert(handle, entries);
    write(module, handle as *mut c_void)
}

driver_calls! {
    fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) {
        load(module, image)
    }

    fn cuModuleLoadDataEx(
        module: *mut *mut c_void, image: *const c_void, _count: c_uint, _options: *mut c_void,
        _values: *mut *mut c_void,
    ) {
        load(module, image)
    }

    fn cuModuleUnload(module: *mut c_void) {
        let mut state = state();
        let card = state.current()?;
        if card.modules.remove(&(module as usize)).is_none() {
            return Err(Fail::misuse(INVALID_HANDLE, format!("{module:p} is no module")));
        }
        card.functions.retain(|_, (owner, _)| *owner != module as usize);
        Ok(())
    }

    fn cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char) {
        if name.is_null() {
            return Err(Fail::misuse(INVALID_VALUE, "the name is null"));
        }
        // SAFETY: a string that ends in a NUL, says the caller.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let mut state = state();
        let handle = state.handle();
        let card = state.current()?;
        let Some(entries) = card.modules.get(&(module as usize)) else {
            return Err(Fail::misuse(INVALID_HANDLE, format!("{module:p} is no module")));
        };
        if !entries.contains(&name) {
            return Err(Fail::plain(NOT_FOUND));
        }
        card.device.kernel(&name).map_err(|_| {
            Fail::misuse(NOT_FOUND, format!("the stand-in knows no twin of the kernel `{name}`"))
        })?;
        card.functions.insert(handle, (module as usize, name));
        write(function, handle as *mut c_void)
    }

    fn cuLaunchKernel(
        function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: *mut c_void,
        parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        if parameters.is_null() || !extra.is_null() {
            return Err(Fail::misuse(INVALID_VALUE, "parameters are passed by pointers, not as a block"));
        }
        let mut state = state();
        let card = state.current()?;
        let Some((_, name)) = card.functions.get(&(function as usize)).cloned() else {
            return Err(Fail::misuse(INVALID_HANDLE, format!("{function:p} is no function")));
        };
        let stream = stream_of(card, stream)?;
        let args = arguments(&name, Parameters { next: parameters }).and_then(|args| KernelArgs::new(&args));
        let args = args.ok_or_else(|| {
            Fail::misuse(INVALID_VALUE, format!("the stand-in does not know the parameters of `{name}`"))
        })?;
        order(card, stream)?;
        let launch = Launch {
            kernel: card.device.kernel(&name)?,
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            args,
        };
        // SAFETY: the device checks that every range is accessible.
        unsafe { card.device.launch(&launch, stream.id) }.map_err(|error| match error {
            // A card finds out when the kernel runs, and never recovers.
            DeviceError::Misuse { .. } => Fail::misuse(ILLEGAL_ADDRESS, error.to_string()),
            error => error.into(),
        })
    }
}
