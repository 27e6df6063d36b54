//! The checksum of a run of bytes: the twin of `kernels/checksum.cu`.

#![deny(unsafe_code)]

use super::{KernelArg, Launch, TwinArg, flat_launch};
use crate::device::KernelId;
use crate::units::DeviceRange;

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

/// The launch of the kernel `checksum` that adds the checksum of `bytes` to the eight bytes at `sum`, whose
/// address is a multiple of eight. `bytes` needs no alignment.
pub fn checksum_launch(kernel: KernelId, bytes: DeviceRange, first_word: u64, sum: DeviceRange) -> Launch {
    // Some 64 words a thread, since each ends in one atomic addition.
    flat_launch(
        kernel,
        bytes.bytes / 512,
        &[
            KernelArg::Read(bytes),
            KernelArg::U64(bytes.bytes),
            KernelArg::U64(first_word),
            KernelArg::Write(sum),
        ],
    )
}

/// `checksum(bytes: Read, n_bytes: U64, first_word: U64, sum: Write(8 bytes))`.
pub(super) fn twin(args: &mut [TwinArg<'_>]) -> Result<(), String> {
    let [TwinArg::Read(bytes), TwinArg::U64(n_bytes), TwinArg::U64(first_word), TwinArg::Write(sum)] = args
    else {
        return Err("checksum takes (bytes: Read, n_bytes: U64, first_word: U64, sum: Write)".to_owned());
    };
    if bytes.len() as u64 != *n_bytes {
        return Err(format!("checksum is told of {n_bytes} bytes, its range has {}", bytes.len()));
    }
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
    fn the_twin_adds_to_what_is_there_and_checks_its_lengths() {
        let bytes = [1_u8, 2, 3, 4, 5, 6, 7, 8, 9];
        let mut sum = 5_u64.to_le_bytes();
        let run = |n_bytes, sum: &mut [u8]| {
            twin(&mut [TwinArg::Read(&bytes), TwinArg::U64(n_bytes), TwinArg::U64(3), TwinArg::Write(sum)])
        };
        run(9, &mut sum).unwrap();
        assert_eq!(u64::from_le_bytes(sum), checksum(&bytes, 3).wrapping_add(5));
        assert!(run(8, &mut sum).is_err());
        assert!(run(9, &mut sum[..7]).is_err());
    }
}
