//! The driver's calls as a table of function pointers.
//!
//! Each pointer is looked up by its exact name, with the `_v2` where there is one, and returns a plain
//! `i32`: cudarc's own functions return a Rust enum, so a code that it does not know would be undefined
//! behaviour before anyone could look at it. A name that the library does not export is not fatal: calling
//! it answers [`MISSING`], and what needs it says so. The table never changes after it was made and takes
//! no lock.

#![expect(unsafe_code, reason = "calls into the driver library")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

/// What a call answers whose symbol the library does not export; no code of a driver is negative.
pub(super) const MISSING: i32 = i32::MIN;

/// A call that was refused: its symbol, and the driver's code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Refusal {
    /// The driver's symbol.
    pub(super) call: &'static str,
    /// Its code, or [`MISSING`].
    pub(super) code: i32,
}

/// The answer of a driver call.
pub(super) type Answer = Result<(), Refusal>;

/// Makes a call that gives something back, and makes it once more if it is refused: the refusal may report
/// the failure of earlier work, and what is not given back now is lost.
pub(super) fn insist(call: impl Fn() -> Answer) -> Answer {
    call().or_else(|first| call().map_err(|_| first))
}

macro_rules! driver_table {
    ($( $name:ident = $symbol:literal ( $($arg:ident : $kind:ty),* $(,)? ); )*) => {
        /// Function pointers into the driver library, each absent where the library lacks it.
        pub(super) struct Driver {
            $( $name: Option<unsafe extern "C" fn($($kind),*) -> i32>, )*
        }

        impl Driver {
            /// Looks every name up.
            ///
            /// # Safety
            /// The driver library is present.
            unsafe fn load() -> Self {
                Self {
                    // SAFETY: the symbol, where it exists, is the driver's function of that documented
                    // name and signature; the library is present, says the caller.
                    $( $name: unsafe { lookup($symbol) }, )*
                }
            }

            /// Whether streams can be marked with events.
            pub(super) fn has_events(&self) -> bool {
                self.event_create.is_some()
                    && self.event_destroy.is_some()
                    && self.event_record.is_some()
                    && self.event_query.is_some()
                    && self.event_synchronize.is_some()
            }

            /// Whether events can keep time, and tell it.
            pub(super) fn has_timed_events(&self) -> bool {
                self.has_events() && self.event_elapsed_time.is_some()
            }

            /// Whether there are stream-ordered pools: all of their calls or none.
            pub(super) fn has_pools(&self) -> bool {
                self.mem_pool_create.is_some()
                    && self.mem_pool_destroy.is_some()
                    && self.mem_pool_set_attribute.is_some()
                    && self.mem_pool_get_attribute.is_some()
                    && self.mem_pool_trim_to.is_some()
                    && self.mem_alloc_from_pool_async.is_some()
                    && self.mem_free_async.is_some()
            }

            /// The names, of those in the table, that the library does not export.
            pub(super) fn missing(&self) -> Vec<&'static str> {
                let mut names = Vec::new();
                $( if self.$name.is_none() { names.push($symbol); } )*
                names
            }

            $(
                #[doc = concat!("Calls `", $symbol, "`.")]
                ///
                /// # Safety
                /// The driver's documented rules for the call hold.
                #[allow(clippy::too_many_arguments, reason = "the driver's own signatures")]
                pub(super) unsafe fn $name(&self, $($arg: $kind),*) -> Answer {
                    let code = match self.$name {
                        // SAFETY: the caller keeps the call's rules.
                        Some(function) => unsafe { function($($arg),*) },
                        None => MISSING,
                    };
                    if code == 0 { Ok(()) } else { Err(Refusal { call: $symbol, code }) }
                }
            )*
        }
    };
}

driver_table! {
    init = "cuInit"(flags: c_uint);
    driver_get_version = "cuDriverGetVersion"(version: *mut c_int);
    get_error_name = "cuGetErrorName"(code: c_int, name: *mut *const c_char);

    device_get_count = "cuDeviceGetCount"(count: *mut c_int);
    device_get = "cuDeviceGet"(device: *mut sys::CUdevice, ordinal: c_int);
    device_get_name = "cuDeviceGetName"(name: *mut c_char, bytes: c_int, device: sys::CUdevice);
    device_get_attribute = "cuDeviceGetAttribute"(
        value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice,
    );
    primary_ctx_retain = "cuDevicePrimaryCtxRetain"(context: *mut sys::CUcontext, device: sys::CUdevice);
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(device: sys::CUdevice);
    ctx_get_current = "cuCtxGetCurrent"(context: *mut sys::CUcontext);
    ctx_push_current = "cuCtxPushCurrent_v2"(context: sys::CUcontext);
    ctx_pop_current = "cuCtxPopCurrent_v2"(context: *mut sys::CUcontext);
    ctx_set_current = "cuCtxSetCurrent"(context: sys::CUcontext);
    ctx_synchronize = "cuCtxSynchronize"();
    ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange"(least: *mut c_int, greatest: *mut c_int);

    mem_get_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    mem_alloc = "cuMemAlloc_v2"(address: *mut sys::CUdeviceptr, bytes: usize);
    mem_free = "cuMemFree_v2"(address: sys::CUdeviceptr);
    mem_host_register = "cuMemHostRegister_v2"(start: *mut c_void, bytes: usize, flags: c_uint);
    mem_host_unregister = "cuMemHostUnregister"(start: *mut c_void);

    mem_get_allocation_granularity = "cuMemGetAllocationGranularity"(
        bytes: *mut usize, prop: *const sys::CUmemAllocationProp, option: sys::CUmemAllocationGranularity_flags,
    );
    mem_address_reserve = "cuMemAddressReserve"(
        address: *mut sys::CUdeviceptr, bytes: usize, alignment: usize, wish: sys::CUdeviceptr, flags: c_ulonglong,
    );
    mem_address_free = "cuMemAddressFree"(address: sys::CUdeviceptr, bytes: usize);
    mem_create = "cuMemCreate"(
        handle: *mut sys::CUmemGenericAllocationHandle, bytes: usize, prop: *const sys::CUmemAllocationProp,
        flags: c_ulonglong,
    );
    mem_release = "cuMemRelease"(handle: sys::CUmemGenericAllocationHandle);
    mem_map = "cuMemMap"(
        address: sys::CUdeviceptr, bytes: usize, offset: usize, handle: sys::CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    );
    mem_unmap = "cuMemUnmap"(address: sys::CUdeviceptr, bytes: usize);
    mem_set_access = "cuMemSetAccess"(
        address: sys::CUdeviceptr, bytes: usize, access: *const sys::CUmemAccessDesc, count: usize,
    );

    mem_pool_create = "cuMemPoolCreate"(pool: *mut sys::CUmemoryPool, props: *const sys::CUmemPoolProps);
    mem_pool_destroy = "cuMemPoolDestroy"(pool: sys::CUmemoryPool);
    mem_pool_set_attribute = "cuMemPoolSetAttribute"(
        pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute, value: *mut c_void,
    );
    mem_pool_get_attribute = "cuMemPoolGetAttribute"(
        pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute, value: *mut c_void,
    );
    mem_pool_trim_to = "cuMemPoolTrimTo"(pool: sys::CUmemoryPool, keep: usize);
    mem_alloc_from_pool_async = "cuMemAllocFromPoolAsync"(
        address: *mut sys::CUdeviceptr, bytes: usize, pool: sys::CUmemoryPool, stream: sys::CUstream,
    );
    mem_free_async = "cuMemFreeAsync"(address: sys::CUdeviceptr, stream: sys::CUstream);

    stream_create_with_priority = "cuStreamCreateWithPriority"(
        stream: *mut sys::CUstream, flags: c_uint, priority: c_int,
    );
    stream_create = "cuStreamCreate"(stream: *mut sys::CUstream, flags: c_uint);
    stream_destroy = "cuStreamDestroy_v2"(stream: sys::CUstream);
    stream_get_ctx = "cuStreamGetCtx"(stream: sys::CUstream, context: *mut sys::CUcontext);
    stream_is_capturing = "cuStreamIsCapturing"(stream: sys::CUstream, status: *mut c_int);
    stream_wait_event = "cuStreamWaitEvent"(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    stream_synchronize = "cuStreamSynchronize"(stream: sys::CUstream);

    event_create = "cuEventCreate"(event: *mut sys::CUevent, flags: c_uint);
    event_destroy = "cuEventDestroy_v2"(event: sys::CUevent);
    event_record = "cuEventRecord"(event: sys::CUevent, stream: sys::CUstream);
    event_query = "cuEventQuery"(event: sys::CUevent);
    event_synchronize = "cuEventSynchronize"(event: sys::CUevent);
    event_elapsed_time = "cuEventElapsedTime"(milliseconds: *mut f32, from: sys::CUevent, to: sys::CUevent);

    memcpy_htod = "cuMemcpyHtoD_v2"(to: sys::CUdeviceptr, from: *const c_void, bytes: usize);
    memcpy_dtoh = "cuMemcpyDtoH_v2"(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize);
    memcpy_htod_async = "cuMemcpyHtoDAsync_v2"(
        to: sys::CUdeviceptr, from: *const c_void, bytes: usize, stream: sys::CUstream,
    );
    memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2"(
        to: *mut c_void, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream,
    );
    memcpy_dtod_async = "cuMemcpyDtoDAsync_v2"(
        to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream,
    );
    memset_d8_async = "cuMemsetD8Async"(
        to: sys::CUdeviceptr, value: u8, bytes: usize, stream: sys::CUstream,
    );

    module_load_data_ex = "cuModuleLoadDataEx"(
        module: *mut sys::CUmodule, image: *const c_void, count: c_uint, options: *mut sys::CUjit_option,
        values: *mut *mut c_void,
    );
    module_unload = "cuModuleUnload"(module: sys::CUmodule);
    module_get_function = "cuModuleGetFunction"(
        function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char,
    );
    launch_kernel = "cuLaunchKernel"(
        function: sys::CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: sys::CUstream,
        params: *mut *mut c_void, extra: *mut *mut c_void,
    );
}

/// A call that only a stand-in for the driver has, and that no driver needs: the host begins or ends to write
/// so many bytes of its memory.
type HostWrite = unsafe extern "C" fn(*const c_void, usize) -> c_int;

/// Tells a stand-in of the driver what a driver cannot see: the host writes from here on. True if it says that
/// a copy still uses the memory.
pub(super) fn stand_in_refuses_host_write(start: *const c_void, bytes: usize) -> bool {
    static HOOK: OnceLock<Option<HostWrite>> = OnceLock::new();
    // SAFETY: only a device asks, and it has a driver library; the name is the stand-in's own, of this type.
    let hook = HOOK.get_or_init(|| unsafe { lookup("vram_pager_standin_begin_host_write") });
    // SAFETY: it takes any numbers, and reads nothing through them.
    hook.is_some_and(|hook| unsafe { hook(start, bytes) } != 0)
}

/// Tells a stand-in of the driver that the host has written what it said that it would.
pub(super) fn tell_stand_in_of_host_write(start: *const c_void, bytes: usize) {
    static HOOK: OnceLock<Option<HostWrite>> = OnceLock::new();
    // SAFETY: as above.
    let hook = HOOK.get_or_init(|| unsafe { lookup("vram_pager_standin_end_host_write") });
    if let Some(hook) = hook {
        // SAFETY: it takes any numbers, and reads nothing through them.
        unsafe { hook(start, bytes) };
    }
}

/// Looks one name up. The library is never unloaded, so the pointer stays valid.
///
/// # Safety
/// The driver library is present, and `F` is the symbol's function pointer type, if it is exported.
unsafe fn lookup<F: Copy>(symbol: &str) -> Option<F> {
    // SAFETY: present, says the caller, so this does not panic; the caller names the right type.
    unsafe { sys::culib().get::<F>(symbol.as_bytes()) }.ok().map(|found| *found)
}

/// The driver library of this process, if there is one. Looked for until it was found once.
pub(super) fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Some(driver);
    }
    // SAFETY: opening a driver library runs its initialisers, as for every program that uses a card.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    // SAFETY: it was found just now.
    Some(DRIVER.get_or_init(|| unsafe { Driver::load() }))
}
