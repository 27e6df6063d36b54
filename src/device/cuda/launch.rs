//! Kernels of a card: modules loaded from PTX, functions by name, launches.
//!
//! The crate's own module is loaded at the first look-up of one of its kernels, so that a driver without
//! modules still opens and copies. A caller's module is loaded when it is added. One reader-writer lock
//! guards the table; it is held over the loading of a module, which happens once.

#![expect(unsafe_code, reason = "calls into the driver library")]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use cudarc::driver::sys;
use parking_lot::RwLock;

use super::card::{CudaDevice, code_name, count};
use super::code::{Class, classify};
use super::driver::{Driver, Refusal, insist};
use crate::device::kernels::builtin;
use crate::device::{
    DeviceError, KernelArg, KernelId, KernelModule, Kernels, Launch, MAX_KERNEL_ARGS, StreamId,
};

/// Bytes for the compiler's message about a module that it refuses.
const LOG_BYTES: usize = 4096;

/// Modules and the kernels in them.
pub(super) struct KernelTable(RwLock<State>);

struct State {
    by_name: HashMap<&'static str, usize>,
    kernels: Vec<Kernel>,
    modules: Vec<Module>,
}

struct Kernel {
    name: &'static str,
    module: usize,
    /// The driver's function; 0 until it was looked up.
    function: usize,
}

struct Module {
    name: &'static str,
    ptx: Option<&'static str>,
    /// The driver's module; 0 until it was loaded.
    handle: usize,
}

impl State {
    /// Adds a module's names, none of which may be taken.
    fn add(&mut self, module: &KernelModule) -> Result<usize, DeviceError> {
        for (index, (name, _)) in module.kernels.iter().enumerate() {
            let twice = module.kernels[..index].iter().any(|(other, _)| other == name);
            if twice || self.by_name.contains_key(name) {
                return Err(DeviceError::InvalidArgument {
                    call: "add_kernels",
                    why: format!("a kernel `{name}` (of module {}) exists already", module.name),
                });
            }
        }
        let number = self.modules.len();
        self.modules.push(Module { name: module.name, ptx: module.ptx, handle: 0 });
        for (name, _) in &module.kernels {
            self.by_name.insert(name, self.kernels.len());
            self.kernels.push(Kernel { name, module: number, function: 0 });
        }
        Ok(number)
    }

    /// Undoes [`Self::add`] of the newest module.
    fn remove_newest(&mut self) {
        let number = self.modules.len().saturating_sub(1);
        self.modules.pop();
        while self.kernels.last().is_some_and(|kernel| kernel.module == number) {
            if let Some(kernel) = self.kernels.pop() {
                self.by_name.remove(kernel.name);
            }
        }
    }
}

impl KernelTable {
    /// A table that knows the crate's own kernels.
    pub(super) fn new() -> Self {
        let mut state = State { by_name: HashMap::new(), kernels: Vec::new(), modules: Vec::new() };
        // The names of our own module differ, as a test of it sees.
        let _ = state.add(&builtin());
        Self(RwLock::new(state))
    }

    /// Unloads every module. The context is bound.
    pub(super) fn unload(&self, driver: &Driver) {
        let mut state = self.0.write();
        for kernel in &mut state.kernels {
            kernel.function = 0;
        }
        for module in &mut state.modules {
            if module.handle != 0 {
                // SAFETY: loaded by us, and no function of it is named again. The device goes away, and
                // nobody is left to tell of a refusal.
                let _ = insist(|| unsafe { driver.module_unload(without_provenance_mut(module.handle)) });
                module.handle = 0;
            }
        }
    }
}

impl CudaDevice {
    /// Loads a module, once. The context is bound.
    fn load_module(&self, module: &mut Module) -> Result<(), DeviceError> {
        if module.handle != 0 {
            return Ok(());
        }
        let cannot = |advice: &str| DeviceError::Unsupported {
            device: self.info.name.clone(),
            what: format!("run the kernels of module {}", module.name),
            advice: advice.to_owned(),
        };
        let Some(text) = module.ptx.and_then(|ptx| CString::new(ptx).ok()) else {
            return Err(cannot("the module has no PTX; add it with code for a card"));
        };
        let mut log = vec![0_u8; LOG_BYTES];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), without_provenance_mut(LOG_BYTES - 1)];
        let mut handle = null_mut();
        // SAFETY: the text ends in a NUL; options and values are two each, of the kinds the driver
        // documents; the log lives over the call and keeps its last byte 0.
        let loaded = unsafe {
            self.driver.module_load_data_ex(
                &raw mut handle,
                text.as_ptr().cast::<c_void>(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        match loaded {
            Ok(()) => {
                module.handle = handle.addr();
                Ok(())
            }
            // No code for this card, PTX too new, no compiler in the driver.
            Err(Refusal { code: code @ (209 | 221..=223), .. }) => Err(cannot(&format!(
                "the driver answered {} ({code}); it takes a card of compute capability 7.5 or newer and a \
                 whole driver of CUDA 12.0 or newer",
                code_name(self.driver, code)
            ))),
            Err(Refusal { call, code }) if classify(code) == Class::Refused => {
                let end = log.iter().position(|byte| *byte == 0).unwrap_or(0);
                let log = String::from_utf8_lossy(&log[..end]);
                let name = code_name(self.driver, code);
                let name = if end == 0 { name } else { format!("{name}, {}", log.trim()) };
                Err(DeviceError::Driver { call, code, name })
            }
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    /// Looks a kernel's function up, once, and answers it. The context is bound.
    fn load_function(&self, state: &mut State, index: usize) -> Result<(), DeviceError> {
        let kernel = &mut state.kernels[index];
        if kernel.function != 0 {
            return Ok(());
        }
        let module = &mut state.modules[kernel.module];
        self.load_module(module)?;
        let unknown =
            || DeviceError::UnknownKernel { device: self.info.name.clone(), name: kernel.name.to_owned() };
        let name = CString::new(kernel.name).map_err(|_| unknown())?;
        let mut function = null_mut();
        // SAFETY: the module is loaded, the pointers are valid for the call.
        let found = unsafe {
            self.driver.module_get_function(
                &raw mut function,
                without_provenance_mut(module.handle),
                name.as_ptr(),
            )
        };
        match found {
            Ok(()) => {
                kernel.function = function.addr();
                Ok(())
            }
            Err(Refusal { code: 500, .. }) => Err(unknown()),
            Err(refusal) => Err(self.refused(refusal)),
        }
    }
}

/// The bits of an argument as the kernel gets them, in the low bytes.
fn bits(argument: KernelArg) -> u64 {
    match argument {
        KernelArg::Read(range) | KernelArg::Write(range) => range.start.0,
        KernelArg::U32(number) => u64::from(number),
        KernelArg::U64(number) => number,
        KernelArg::F32(number) => u64::from(number.to_bits()),
    }
}

impl Kernels for CudaDevice {
    fn add_kernels(&self, module: &KernelModule) -> Result<(), DeviceError> {
        let _bound = self.enter()?;
        let mut state = self.kernels.0.write();
        let number = state.add(module)?;
        if let Err(error) = self.load_module(&mut state.modules[number]) {
            state.remove_newest();
            return Err(error);
        }
        Ok(())
    }

    fn kernel(&self, name: &str) -> Result<KernelId, DeviceError> {
        let _bound = self.enter()?;
        let mut state = self.kernels.0.write();
        let Some(index) = state.by_name.get(name).copied() else {
            return Err(DeviceError::UnknownKernel { device: self.info.name.clone(), name: name.to_owned() });
        };
        self.load_function(&mut state, index)?;
        Ok(KernelId(index as u64))
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamId) -> Result<(), DeviceError> {
        let stream = self.raw_stream("launch", stream)?;
        let _bound = self.enter()?;
        let function = {
            let state = self.kernels.0.read();
            let index = usize::try_from(launch.kernel.0).ok();
            index.and_then(|index| state.kernels.get(index)).map_or(0, |kernel| kernel.function)
        };
        if function == 0 {
            return Err(DeviceError::UnknownKernel {
                device: self.info.name.clone(),
                name: format!("number {}", launch.kernel.0),
            });
        }
        let arguments = launch.args.as_slice();
        let mut values = [0_u64; MAX_KERNEL_ARGS];
        let mut pointers = [null_mut::<c_void>(); MAX_KERNEL_ARGS];
        for (index, argument) in arguments.iter().enumerate() {
            values[index] = bits(*argument);
        }
        for (pointer, value) in pointers.iter_mut().zip(&mut values) {
            // The driver reads as many bytes as the parameter has; little-endian puts them first.
            *pointer = std::ptr::from_mut(value).cast::<c_void>();
        }
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (launch.grid, launch.block);
        // SAFETY: a function of a loaded module; the pointers are to one value an argument, live over the
        // call; that they are the kernel's arguments, and what they name is accessible, says the caller.
        unsafe {
            self.driver.launch_kernel(
                without_provenance_mut(function),
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                launch.shared_bytes,
                stream,
                pointers.as_mut_ptr(),
                null_mut(),
            )
        }
        .map_err(|refusal| self.refused(refusal))?;
        count(&self.counters.launch, 1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{DeviceAddress, DeviceRange};

    #[test]
    fn arguments_lie_in_the_low_bytes() {
        assert_eq!(bits(KernelArg::F32(1.0)), 0x3F80_0000);
        assert_eq!(bits(KernelArg::U32(u32::MAX)), 0xFFFF_FFFF);
        let range = DeviceRange::new(DeviceAddress(0x7000_0000_1000), 8);
        assert_eq!(bits(KernelArg::Read(range)), 0x7000_0000_1000);
    }

    #[test]
    fn names_are_taken_once_and_given_back_when_a_module_does_not_load() {
        let table = KernelTable::new();
        let mut state = table.0.write();
        assert!(state.by_name.contains_key("checksum"), "our own kernels are there");
        let before = state.kernels.len();
        let module = KernelModule {
            name: "mine",
            ptx: None,
            kernels: vec![("mine_a", |_| Ok(())), ("mine_b", |_| Ok(()))],
        };
        state.add(&module).unwrap();
        assert!(state.add(&module).is_err());
        state.remove_newest();
        assert_eq!(state.kernels.len(), before);
        assert!(!state.by_name.contains_key("mine_a"));
        let twice = KernelModule {
            name: "twice",
            ptx: None,
            kernels: vec![("same", |_| Ok(())), ("same", |_| Ok(()))],
        };
        assert!(state.add(&twice).is_err());
    }
}
