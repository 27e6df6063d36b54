//! Kernel launches as plain values, and their host twins.
//!
//! A launch names its kernel, grid and arguments and fits in a queue entry without allocation. Each
//! address among the arguments is a whole range, so that a device can check what the kernel will touch.
//! Owns the crate's own twins; takes no lock.

use std::fmt;

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
    KernelModule { name: "vram-pager", ptx: None, kernels: vec![("checksum", checksum_twin)] }
}

/// The checksum that the `checksum` kernel computes, over host bytes.
///
/// The bytes are taken as little-endian 64-bit words from `first_word` on, the last one padded with
/// zeros; each is mixed with its place, and the results are added. So parts of a buffer that begin at a
/// multiple of eight bytes can be summed apart and added, in any order.
pub fn checksum(bytes: &[u8], first_word: u64) -> u64 {
    let mix = |place: u64, word: u64| {
        let mut x = word ^ place.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    };
    let mut sum = 0_u64;
    let mut place = first_word;
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        sum = sum.wrapping_add(mix(place, u64::from_le_bytes(*word)));
        place = place.wrapping_add(1);
    }
    if !rest.is_empty() {
        let mut last = [0_u8; 8];
        last[..rest.len()].copy_from_slice(rest);
        sum = sum.wrapping_add(mix(place, u64::from_le_bytes(last)));
    }
    sum
}

/// `checksum(bytes: Read, first_word: U64, sum: Write(8 bytes))`: adds the checksum to `sum`.
fn checksum_twin(args: &mut [TwinArg<'_>]) -> Result<(), String> {
    let [TwinArg::Read(bytes), TwinArg::U64(first_word), TwinArg::Write(sum)] = args else {
        return Err("checksum takes (bytes: Read, first_word: U64, sum: Write)".to_owned());
    };
    let Ok(old) = <[u8; 8]>::try_from(&**sum) else {
        return Err(format!("checksum writes 8 bytes, its target has {}", sum.len()));
    };
    let new = u64::from_le_bytes(old).wrapping_add(checksum(bytes, *first_word));
    sum.copy_from_slice(&new.to_le_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_parts_add_up() {
        let bytes: Vec<u8> = (0..1003_u32).map(|i| (i * 7 % 251) as u8).collect();
        let whole = checksum(&bytes, 0);
        let parts = checksum(&bytes[..496], 0).wrapping_add(checksum(&bytes[496..], 62));
        assert_eq!(whole, parts);
    }

    #[test]
    fn a_checksum_sees_a_swap_and_a_flip() {
        let mut bytes = vec![0_u8; 64];
        let zeros = checksum(&bytes, 0);
        bytes[3] = 1;
        let first = checksum(&bytes, 0);
        bytes.swap(3, 11);
        assert!(zeros != first && first != checksum(&bytes, 0) && zeros != checksum(&bytes, 0));
    }

    #[test]
    fn a_launch_takes_at_most_its_arguments() {
        assert!(KernelArgs::new(&[KernelArg::U32(1); MAX_KERNEL_ARGS]).is_some());
        assert!(KernelArgs::new(&[KernelArg::U32(1); MAX_KERNEL_ARGS + 1]).is_none());
    }
}
