//! Low-rank patches of a flat range of elements of a row-major matrix: the twins of `kernels/patch.cu`.
//!
//! An element becomes `W + scale × Σ up[row, k] × down[k, column]`: the sum in f32 from `k = 0` upwards,
//! nothing fused, the result rounded to nearest even into the weight's type. So a part gives the bits that
//! the whole gives, on a card and on the host.

#![deny(unsafe_code)]

use super::numeric::{Bf16, F16, F32, FloatType, Load, NAN, Store, is_nan};
use super::{HostTwin, KernelArg, Launch, TwinArg, flat_launch};
use crate::device::KernelId;
use crate::units::DeviceRange;

/// Which elements of which matrix a patch changes, and how strongly.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PatchPart {
    /// The place of the part's first element in the row-major matrix.
    pub first: u64,
    /// Elements of the part.
    pub elements: u64,
    /// Columns of the matrix.
    pub columns: u64,
    /// Columns of `up` and rows of `down`.
    pub rank: u32,
    /// `strength × alpha / rank`.
    pub scale: f32,
}

fn patch_all<Weight: Store, Factor: Load>(
    weight: &mut [u8],
    part: PatchPart,
    up: &[u8],
    down: &[u8],
) -> Result<(), String> {
    let PatchPart { first, elements, columns, rank, scale } = part;
    if elements.checked_mul(Weight::BYTES as u64) != Some(weight.len() as u64) {
        return Err(format!("a patch of {elements} elements does not fit {} bytes", weight.len()));
    }
    if elements == 0 {
        return Ok(());
    }
    let end = first.checked_add(elements).filter(|_| columns > 0);
    let rows = end.map(|end| end.div_ceil(columns));
    let factor = |rows: Option<u64>, columns: u64| {
        rows.and_then(|rows| rows.checked_mul(columns)?.checked_mul(Factor::BYTES as u64))
    };
    let rank = u64::from(rank);
    let (up_bytes, down_bytes) = (factor(rows, rank), factor(Some(rank), columns));
    if up_bytes.is_none_or(|bytes| bytes > up.len() as u64) || down_bytes != Some(down.len() as u64) {
        return Err(format!(
            "factors of {} and {} bytes do not patch elements {first}+{elements} of a matrix of {columns} \
             columns with rank {rank}",
            up.len(),
            down.len()
        ));
    }
    // The lengths above bound every index below.
    let index = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let (columns, rank) = (index(columns), index(rank));
    let element = |bytes: &[u8], at: usize| {
        f32::from_bits(Factor::load(&bytes[at * Factor::BYTES..(at + 1) * Factor::BYTES]))
    };
    for (place, at) in (index(first)..).zip(weight.chunks_exact_mut(Weight::BYTES)) {
        let (row, column) = (place / columns, place % columns);
        let mut sum = 0.0_f32;
        for k in 0..rank {
            sum += element(up, row * rank + k) * element(down, k * columns + column);
        }
        let bits = (f32::from_bits(Weight::load(at)) + scale * sum).to_bits();
        Weight::store(at, if is_nan(bits) { NAN } else { bits });
    }
    Ok(())
}

type Body = fn(&mut [u8], PatchPart, &[u8], &[u8]) -> Result<(), String>;

fn as_twin(body: Body, args: &mut [TwinArg<'_>]) -> Result<(), String> {
    let [
        TwinArg::Write(weight),
        TwinArg::U64(first),
        TwinArg::U64(elements),
        TwinArg::U64(columns),
        TwinArg::Read(up),
        TwinArg::Read(down),
        TwinArg::U32(rank),
        TwinArg::F32(scale),
    ] = args
    else {
        return Err("a patch takes (weight: Write, first: U64, elements: U64, columns: U64, up: Read, \
                    down: Read, rank: U32, scale: F32)"
            .to_owned());
    };
    let part =
        PatchPart { first: *first, elements: *elements, columns: *columns, rank: *rank, scale: *scale };
    body(weight, part, up, down)
}

macro_rules! patches {
    ($( $name:literal: $weight:ident, $factor:ident; )*) => {
        /// The name, body and twin of the kernel for a weight's and the factors' types.
        fn entry(weight: FloatType, factor: FloatType) -> Option<(&'static str, Body, HostTwin)> {
            match (weight, factor) {
                $( (FloatType::$weight, FloatType::$factor) => Some((
                    $name,
                    patch_all::<$weight, $factor>,
                    |args: &mut [TwinArg<'_>]| as_twin(patch_all::<$weight, $factor>, args),
                )), )*
                _ => None,
            }
        }

        /// Every patch kernel with its twin.
        pub(super) fn twins() -> impl Iterator<Item = (&'static str, HostTwin)> {
            [$( (FloatType::$weight, FloatType::$factor) ),*]
                .into_iter()
                .filter_map(|(weight, factor)| entry(weight, factor).map(|(name, _, twin)| (name, twin)))
        }
    };
}

patches! {
    "patch_f32_f32": F32, F32;
    "patch_f32_f16": F32, F16;
    "patch_f32_bf16": F32, Bf16;
    "patch_f16_f32": F16, F32;
    "patch_f16_f16": F16, F16;
    "patch_f16_bf16": F16, Bf16;
    "patch_bf16_f32": Bf16, F32;
    "patch_bf16_f16": Bf16, F16;
    "patch_bf16_bf16": Bf16, Bf16;
}

/// The name of the kernel that patches a `weight` with factors of one type; `None` if there is none (fp8
/// weights are cast first, factors of two types brought to one).
pub fn patch_kernel(weight: FloatType, factors: FloatType) -> Option<&'static str> {
    entry(weight, factors).map(|(name, _, _)| name)
}

/// The launch of a patch kernel. `weight` is the part's own range; `up` (rows × rank) and `down` (rank ×
/// columns) are the whole factors, row-major. None overlaps another; none needs alignment.
pub fn patch_launch(
    kernel: KernelId,
    weight: DeviceRange,
    part: PatchPart,
    up: DeviceRange,
    down: DeviceRange,
) -> Launch {
    flat_launch(
        kernel,
        part.elements,
        &[
            KernelArg::Write(weight),
            KernelArg::U64(part.first),
            KernelArg::U64(part.elements),
            KernelArg::U64(part.columns),
            KernelArg::Read(up),
            KernelArg::Read(down),
            KernelArg::U32(part.rank),
            KernelArg::F32(part.scale),
        ],
    )
}

/// Patches host bytes as the kernel does, bit for bit.
///
/// # Errors
/// Types that no kernel patches, or lengths that do not fit each other.
pub fn patch(
    weight_type: FloatType,
    weight: &mut [u8],
    part: PatchPart,
    factor_type: FloatType,
    up: &[u8],
    down: &[u8],
) -> Result<(), String> {
    let Some((_, body, _)) = entry(weight_type, factor_type) else {
        return Err(format!("nothing patches {weight_type} with factors of {factor_type}"));
    };
    body(weight, part, up, down)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn a_part_gives_the_bits_of_the_whole() {
        // 3 x 5, rank 2; thirds, so that sums do round.
        let third = |count: u8| bytes(&(0..count).map(|i| (f32::from(i) - 4.0) / 3.0).collect::<Vec<_>>());
        let (up, down, weight) = (third(6), third(10), third(15));
        let part = |first, elements| PatchPart { first, elements, columns: 5, rank: 2, scale: 0.7 };
        let mut whole = weight.clone();
        patch(FloatType::F32, &mut whole, part(0, 15), FloatType::F32, &up, &down).unwrap();
        assert_ne!(whole, weight);
        for split in 0..=15 {
            let mut parts = weight.clone();
            let (left, right) = parts.split_at_mut(split * 4);
            let at = split as u64;
            patch(FloatType::F32, left, part(0, at), FloatType::F32, &up, &down).unwrap();
            patch(FloatType::F32, right, part(at, 15 - at), FloatType::F32, &up, &down).unwrap();
            assert_eq!(parts, whole, "split at {split}");
        }
    }

    #[test]
    fn factors_that_do_not_fit_are_refused() {
        let part = PatchPart { first: 0, elements: 4, columns: 2, rank: 3, scale: 1.0 };
        let run = |part, up: usize, down: usize| {
            let (up, down) = (vec![0; up * 4], vec![0; down * 4]);
            patch(FloatType::F32, &mut [0; 16], part, FloatType::F32, &up, &down)
        };
        run(part, 6, 6).unwrap();
        assert!(run(part, 5, 6).is_err());
        assert!(run(part, 6, 7).is_err());
        assert!(run(PatchPart { columns: 0, ..part }, 6, 0).is_err());
        assert!(run(PatchPart { first: u64::MAX, ..part }, 6, 6).is_err());
        assert!(run(PatchPart { elements: 5, ..part }, 6, 6).is_err());
    }
}
