//! Kernel launches as plain values, and the crate's own kernels with their host twins.
//!
//! A launch names its kernel, grid and arguments and fits in a queue entry without allocation. Each
//! address among the arguments is a whole range, so that a device can check what the kernel will touch; a
//! card's kernel gets only the address, so one that needs a length takes it as an argument of its own.
//!
//! The code for a card is CUDA C in the folder `kernels/`, with the PTX that was made of it. Each kernel
//! has a twin here, in the same arithmetic, and the two give the same bits. Takes no lock.

mod cast;
mod checksum;
mod numeric;
mod patch;

use std::fmt;

pub use cast::{cast, cast_kernel, cast_launch};
pub use checksum::{checksum, checksum_launch};
pub use numeric::FloatType;
pub use patch::{PatchPart, patch, patch_kernel, patch_launch};

use super::KernelId;
use crate::units::DeviceRange;

/// One argument of a kernel.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum KernelArg {
    /// A range that the kernel reads; the kernel gets its address.
    Read(DeviceRange),
    /// A range that the kernel reads and writes; the kernel gets its address.
    Write(DeviceRange),
    /// A 32-bit number.
    U32(u32),
    /// A 64-bit number.
    U64(u64),
    /// A float.
    F32(f32),
}

/// The most arguments a kernel may take.
pub const MAX_KERNEL_ARGS: usize = 12;

/// The arguments of a launch, in the kernel's order.
#[derive(Clone, Copy, PartialEq)]
pub struct KernelArgs {
    args: [KernelArg; MAX_KERNEL_ARGS],
    len: usize,
}

impl KernelArgs {
    /// Takes up to [`MAX_KERNEL_ARGS`] arguments; `None` if there are more.
    pub fn new(args: &[KernelArg]) -> Option<Self> {
        let mut all = [KernelArg::U32(0); MAX_KERNEL_ARGS];
        all.get_mut(..args.len())?.copy_from_slice(args);
        Some(Self { args: all, len: args.len() })
    }

    /// The arguments.
    pub fn as_slice(&self) -> &[KernelArg] {
        &self.args[..self.len]
    }
}

impl fmt::Debug for KernelArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// One launch: a plain value.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Launch {
    /// Which kernel.
    pub kernel: KernelId,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// The arguments.
    pub args: KernelArgs,
}

/// One argument as a host twin sees it: ranges are the bytes themselves.
#[derive(Debug)]
pub enum TwinArg<'a> {
    /// Bytes that the kernel reads.
    Read(&'a [u8]),
    /// Bytes that the kernel reads and writes. No other argument overlaps them.
    Write(&'a mut [u8]),
    /// A 32-bit number.
    U32(u32),
    /// A 64-bit number.
    U64(u64),
    /// A float.
    F32(f32),
}

/// A kernel's arithmetic on the host. It gets the arguments in the kernel's order and says what is wrong
/// with them, if anything; that text reaches the caller as a [`super::DeviceError::Misuse`].
pub type HostTwin = fn(args: &mut [TwinArg<'_>]) -> Result<(), String>;

/// Kernels that belong together: code for a card, and a host twin for each.
///
/// Added to a device with [`Kernels::add_kernels`](crate::device::Kernels::add_kernels), after which
/// [`Kernels::kernel`](crate::device::Kernels::kernel) answers the id for a [`Launch`]. Each address among the
/// arguments is a whole range, so that a device can check what the kernel will touch; a card's kernel gets only the
/// address, so one that needs a length takes it as an argument of its own. An emulated card runs the twin.
#[derive(Clone, Debug)]
pub struct KernelModule {
    /// The module's name, for messages.
    pub name: &'static str,
    /// The code as PTX text, for devices that run it.
    pub ptx: Option<&'static str>,
    /// Each kernel's name and twin.
    pub kernels: Vec<(&'static str, HostTwin)>,
}

/// The crate's own kernels.
pub(super) fn builtin() -> KernelModule {
    let mut kernels: Vec<(&'static str, HostTwin)> = vec![("checksum", checksum::twin)];
    kernels.extend(cast::twins());
    kernels.extend(patch::twins());
    KernelModule { name: "vram-pager", ptx: Some(include_str!("../../../kernels/vram_pager.ptx")), kernels }
}

/// Threads of a block in the crate's own launches.
const BLOCK: u32 = 256;

/// The most blocks in them: enough to fill every card; each thread takes as many elements as it must.
const MOST_BLOCKS: u64 = 8192;

/// A launch over `items` independent items.
fn flat_launch(kernel: KernelId, items: u64, args: &[KernelArg]) -> Launch {
    let blocks = items.div_ceil(u64::from(BLOCK)).clamp(1, MOST_BLOCKS);
    Launch {
        kernel,
        grid: [u32::try_from(blocks).unwrap_or(1), 1, 1],
        block: [BLOCK, 1, 1],
        shared_bytes: 0,
        args: KernelArgs::new(args)
            .unwrap_or(KernelArgs { args: [KernelArg::U32(0); MAX_KERNEL_ARGS], len: 0 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_takes_at_most_its_arguments() {
        assert!(KernelArgs::new(&[KernelArg::U32(1); MAX_KERNEL_ARGS]).is_some());
        assert!(KernelArgs::new(&[KernelArg::U32(1); MAX_KERNEL_ARGS + 1]).is_none());
    }

    #[test]
    fn the_code_for_a_card_holds_exactly_the_kernels_that_have_twins() {
        let module = builtin();
        let ptx = module.ptx.unwrap();
        let mut entries: Vec<&str> = ptx
            .lines()
            .filter_map(|line| line.split_once(".entry ").map(|(_, name)| name.trim_end_matches('(').trim()))
            .collect();
        let mut twins: Vec<&str> = module.kernels.iter().map(|(name, _)| *name).collect();
        entries.sort_unstable();
        twins.sort_unstable();
        assert_eq!(entries, twins);
        assert!(ptx.contains(".version 8.0") && ptx.contains(".target sm_75"));
    }

    #[test]
    fn a_launch_covers_every_item_and_is_never_empty() {
        assert_eq!(flat_launch(KernelId(0), 0, &[]).grid, [1, 1, 1]);
        assert_eq!(flat_launch(KernelId(0), 257, &[]).grid, [2, 1, 1]);
        assert_eq!(flat_launch(KernelId(0), u64::MAX, &[]).grid, [8192, 1, 1]);
    }
}
