//! Which cards are here, what each can do, and why one cannot be used.
//!
//! Virtual memory is tried, not asked for: some virtual cards and subsystems say that they have it and
//! refuse the first call. Takes no lock.

#![expect(unsafe_code, reason = "calls into the driver library")]

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys;

use super::card::{code_name, frame_properties, location};
use super::code::{NO_DEVICE, OUT_OF_MEMORY, advice};
use super::context::Context;
use super::driver::{Driver, MISSING, Refusal, driver, insist};
use super::pool::Pool;
use crate::device::DeviceError;

/// The frame size of every card so far, used where the driver is not asked.
pub(super) const USUAL_GRANULARITY: u64 = 2 << 20;

/// The oldest driver whose PTX version the committed kernels are written in.
const OLDEST_DRIVER: c_int = 12_000;

/// The calls without which nothing works. All others are missed only by what needs them, or are made of
/// what is there (see `spare`).
const REQUIRED: [&str; 4] = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuMemGetInfo_v2"];

/// Calls of which one a line is needed, the first that is there being used.
const ONE_OF: [&[&str]; 4] = [
    &["cuCtxPushCurrent_v2", "cuCtxSetCurrent"],
    &["cuMemcpyHtoDAsync_v2", "cuMemcpyHtoD_v2"],
    &["cuMemcpyDtoHAsync_v2", "cuMemcpyDtoH_v2"],
    &["cuStreamSynchronize", "cuCtxSynchronize"],
];

/// What of the calls that are needed is `missing`: pure.
fn lacking(missing: &[&str]) -> Vec<String> {
    let required = REQUIRED.into_iter().filter(|name| missing.contains(name)).map(str::to_owned);
    let choices = ONE_OF.iter().filter(|names| names.iter().all(|name| missing.contains(name)));
    required.chain(choices.map(|names| names.join(" or "))).collect()
}

/// What a card can do.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CardAbilities {
    /// The card's own name.
    pub name: String,
    /// Its size in bytes, as the driver tells it.
    pub total_bytes: u64,
    /// Bytes that nobody holds now.
    pub free_bytes: u64,
    /// The CUDA version of the driver, times 1000: 12040 is 12.4.
    pub driver_version: u32,
    /// Compute capability, major and minor, if the driver tells it.
    pub compute_capability: Option<(u32, u32)>,
    /// The smallest frame in bytes, or why there are none. Tried with a real mapping.
    pub granularity: Result<u64, String>,
    /// Whether the driver has stream-ordered pools for this card.
    pub pools: bool,
    /// Symbols, of those that this crate would use, that the driver library does not export.
    pub missing_symbols: Vec<&'static str>,
}

/// One card, or the reason why there is none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CardProbe {
    /// The device string that opens it: `cuda:0`, or `cuda` if no card could be listed.
    pub device: String,
    /// What it can do, or why it cannot be used.
    pub state: Result<CardAbilities, DeviceError>,
}

/// Every card that is visible, or one entry that says why none is.
pub fn devices() -> Vec<CardProbe> {
    let found = started("cuda").and_then(|(driver, _)| card_count(driver, "cuda"));
    match found {
        Ok(count) => (0..count)
            .map(|ordinal| CardProbe { device: format!("cuda:{ordinal}"), state: abilities(ordinal) })
            .collect(),
        Err(error) => vec![CardProbe { device: "cuda".to_owned(), state: Err(error) }],
    }
}

/// A card that was found and not opened yet.
pub(super) struct Found {
    pub(super) driver: &'static Driver,
    pub(super) device: sys::CUdevice,
    pub(super) device_string: String,
    pub(super) card_name: String,
}

/// Finds a card by its number.
pub(super) fn find(ordinal: u32) -> Result<Found, DeviceError> {
    let device_string = format!("cuda:{ordinal}");
    let (driver, _) = started(&device_string)?;
    let count = card_count(driver, &device_string)?;
    if ordinal >= count {
        return Err(DeviceError::Unavailable {
            device: device_string,
            why: match count {
                1 => "there is one card, cuda:0".to_owned(),
                _ => format!("there are {count} cards, cuda:0 to cuda:{}", count - 1),
            },
            advice: "name one of those, or check CUDA_VISIBLE_DEVICES".to_owned(),
        });
    }
    let mut device = 0;
    let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    // SAFETY: the pointer is valid for the call.
    unsafe { driver.device_get(&raw mut device, number) }
        .map_err(|refusal| unavailable(driver, &device_string, refusal))?;
    let card_name = card_name(driver, device);
    Ok(Found { driver, device, device_string, card_name })
}

/// The error of a card that could not be opened.
pub(super) fn unavailable(driver: &Driver, device: &str, refusal: Refusal) -> DeviceError {
    let Refusal { call, code } = refusal;
    DeviceError::Unavailable {
        device: device.to_owned(),
        why: format!("{call} answered {} ({code})", code_name(driver, code)),
        advice: match code {
            OUT_OF_MEMORY => "the card is full; end another program that uses it".to_owned(),
            _ => advice(code).to_owned(),
        },
    }
}

/// The driver, found, complete, new enough and initialised; and its version.
fn started(device: &str) -> Result<(&'static Driver, u32), DeviceError> {
    let refuse = |why: String, advice: &str| DeviceError::Unavailable {
        device: device.to_owned(),
        why,
        advice: format!("{advice}, or use an emulated device"),
    };
    let Some(driver) = driver() else {
        return Err(refuse(
            "no CUDA driver library (libcuda.so.1) was found".to_owned(),
            "install NVIDIA's driver, or make its libcuda.so.1 visible to the loader",
        ));
    };
    let lacking = lacking(&driver.missing());
    if !lacking.is_empty() {
        return Err(refuse(
            format!("the driver library does not export {}", lacking.join(", ")),
            "install a driver of CUDA 12.0 or newer",
        ));
    }
    let mut version = 0;
    // SAFETY: the one call that is allowed before `cuInit`; the pointer is valid.
    match unsafe { driver.driver_get_version(&raw mut version) } {
        // A library that does not tell is taken at its word for everything else.
        Err(Refusal { code: MISSING, .. }) => version = OLDEST_DRIVER,
        answer => answer.map_err(|refusal| unavailable(driver, device, refusal))?,
    }
    if version < OLDEST_DRIVER {
        return Err(refuse(
            format!("the driver speaks CUDA {}.{}", version / 1000, version % 1000 / 10),
            "update it to one of CUDA 12.0 or newer",
        ));
    }
    // SAFETY: may be called any number of times; flags must be 0.
    unsafe { driver.init(0) }.map_err(|refusal| unavailable(driver, device, refusal))?;
    Ok((driver, u32::try_from(version).unwrap_or(0)))
}

fn card_count(driver: &Driver, device: &str) -> Result<u32, DeviceError> {
    let mut count = 0;
    // SAFETY: the driver is initialised, the pointer valid for the call.
    match unsafe { driver.device_get_count(&raw mut count) } {
        // There is the first card, or opening it says that there is none.
        Err(Refusal { code: MISSING, .. }) => count = 1,
        answer => answer.map_err(|refusal| unavailable(driver, device, refusal))?,
    }
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(unavailable(driver, device, Refusal { call: "cuDeviceGetCount", code: NO_DEVICE })),
    }
}

fn card_name(driver: &Driver, device: sys::CUdevice) -> String {
    let mut text = [0_u8; 256];
    // SAFETY: the buffer has the length that is passed; the driver ends the name with a NUL inside it.
    let answer = unsafe { driver.device_get_name(text.as_mut_ptr().cast::<c_char>(), 256, device) };
    match (answer, CStr::from_bytes_until_nul(&text)) {
        (Ok(()), Ok(name)) => name.to_string_lossy().into_owned(),
        _ => "unnamed card".to_owned(),
    }
}

/// An attribute of a card, if the driver tells it.
pub(super) fn attribute(
    driver: &Driver,
    device: sys::CUdevice,
    attribute: sys::CUdevice_attribute,
) -> Option<i32> {
    let mut value = 0;
    // SAFETY: the pointer is valid for the call.
    unsafe { driver.device_get_attribute(&raw mut value, attribute, device) }.ok().map(|()| value)
}

fn abilities(ordinal: u32) -> Result<CardAbilities, DeviceError> {
    use sys::CUdevice_attribute as Attribute;
    let Found { driver, device, device_string, card_name } = find(ordinal)?;
    let (_, driver_version) = started(&device_string)?;
    let unavailable = |refusal: Refusal| unavailable(driver, &device_string, refusal);
    let context = Context::retain(driver, device).map_err(unavailable)?;
    let _bound = context.bind().map_err(unavailable)?;
    let (mut free, mut total) = (0_usize, 0_usize);
    // SAFETY: both pointers are valid, our context is current.
    unsafe { driver.mem_get_info(&raw mut free, &raw mut total) }.map_err(unavailable)?;
    let number = |name| attribute(driver, device, name).and_then(|value| u32::try_from(value).ok());
    let major = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    let minor = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    let pool = Pool::new(driver, device);
    let pools = pool.is_native();
    pool.close(driver);
    Ok(CardAbilities {
        name: card_name,
        total_bytes: total as u64,
        free_bytes: free as u64,
        driver_version,
        compute_capability: major.zip(minor),
        granularity: virtual_memory(driver, device).map_err(|Refusal { call, code }| {
            format!("{call} answered {} ({code})", code_name(driver, code))
        }),
        pools,
        missing_symbols: driver.missing(),
    })
}

/// The card's granularity, if it really maps: one frame is created, mapped at two addresses, made
/// accessible, and all of it undone. The context is bound.
///
/// A card that is full answers by its attribute instead, since then there is no frame to try with.
pub(super) fn virtual_memory(driver: &Driver, device: sys::CUdevice) -> Result<u64, Refusal> {
    let prop = frame_properties(device);
    let mut granule = 0_usize;
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: both pointers are valid for the call.
    unsafe { driver.mem_get_allocation_granularity(&raw mut granule, &raw const prop, option)? };
    if !granule.is_power_of_two() {
        return Err(Refusal { call: "cuMemGetAllocationGranularity", code: MISSING });
    }
    let mut base = 0;
    // SAFETY: the pointer is valid; the size is a multiple of the granularity.
    unsafe { driver.mem_address_reserve(&raw mut base, 2 * granule, granule, 0, 0)? };
    let outcome = try_frame(driver, device, base, granule);
    let freed = match outcome {
        // What stays mapped keeps its addresses: freeing them would be misuse.
        Err(Refusal { call: "cuMemUnmap", .. }) => Ok(()),
        // SAFETY: the range was reserved above and `try_frame` left nothing mapped in it.
        _ => insist(|| unsafe { driver.mem_address_free(base, 2 * granule) }),
    };
    match outcome {
        Err(Refusal { code: OUT_OF_MEMORY, .. }) => {
            let name = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
            match attribute(driver, device, name) {
                Some(0) => outcome?,
                _ => freed?,
            }
        }
        outcome => outcome.and(freed)?,
    }
    Ok(granule as u64)
}

/// Creates a frame, maps it at `base` and at `base + granule`, makes both accessible, and undoes it all.
fn try_frame(
    driver: &Driver,
    device: sys::CUdevice,
    base: sys::CUdeviceptr,
    granule: usize,
) -> Result<(), Refusal> {
    let prop = frame_properties(device);
    let mut frame = 0;
    // SAFETY: both pointers are valid for the call.
    unsafe { driver.mem_create(&raw mut frame, granule, &raw const prop, 0)? };
    let mut outcome = Ok(());
    let mut mapped = Vec::with_capacity(2);
    for at in [base, base + granule as u64] {
        // SAFETY: the address lies in the reserved range and holds no mapping; the frame is live.
        match unsafe { driver.mem_map(at, granule, 0, frame, 0) } {
            Ok(()) => mapped.push(at),
            Err(refusal) => {
                outcome = Err(refusal);
                break;
            }
        }
    }
    if outcome.is_ok() {
        let access = sys::CUmemAccessDesc {
            location: location(device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the run consists of the two mappings made above; the pointer is valid for the call.
        outcome = unsafe { driver.mem_set_access(base, 2 * granule, &raw const access, 1) };
    }
    for at in mapped {
        // SAFETY: mapped above, used by nobody.
        outcome = outcome.and(insist(|| unsafe { driver.mem_unmap(at, granule) }));
    }
    // SAFETY: created above, not named again.
    outcome.and(insist(|| unsafe { driver.mem_release(frame) }))
}
