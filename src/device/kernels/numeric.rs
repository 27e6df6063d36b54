//! Number formats as bits: the twin of `kernels/numeric.cu`, in the same integer arithmetic.
//!
//! Loading gives the bits of an f32, exact for every format; storing rounds to nearest, ties to even. A
//! NaN stays a NaN: sign and payload as far as they fit, made quiet.

#![deny(unsafe_code)]

use std::fmt;

/// A floating-point format that the crate's kernels know.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FloatType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// Four bits of exponent and three of mantissa; no infinity, one NaN a sign.
    F8E4m3,
    /// Five bits of exponent and two of mantissa: the upper half of a binary16.
    F8E5m2,
}

impl FloatType {
    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4m3 | Self::F8E5m2 => 1,
        }
    }

    /// The word in kernels' names.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E4m3 => "f8_e4m3",
            Self::F8E5m2 => "f8_e5m2",
        }
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A format that can be read. Slices have exactly [`Self::BYTES`] bytes.
pub(super) trait Load {
    /// Bytes of an element.
    const BYTES: usize;
    /// The bits of the f32 that an element stands for.
    fn load(at: &[u8]) -> u32;
}

/// A format that can be written.
pub(super) trait Store: Load {
    /// Writes the element nearest to the f32 of these bits.
    fn store(at: &mut [u8], bits: u32);
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct F8E4m3;
pub(super) struct F8E5m2;

const MAGNITUDE: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = 0x7F80_0000;
/// The quiet NaN without sign or payload.
pub(super) const NAN: u32 = 0x7FC0_0000;

/// Whether these bits are a NaN's.
pub(super) fn is_nan(bits: u32) -> bool {
    bits & MAGNITUDE > INFINITY
}

/// The bits of the f32 that an f16 stands for.
fn widen_f16(half: u16) -> u32 {
    let half = u32::from(half);
    let sign = (half & 0x8000) << 16;
    let exponent = half >> 10 & 0x1F;
    let mantissa = half & 0x3FF;
    match (exponent, mantissa) {
        (0x1F, 0) => sign | INFINITY,
        (0x1F, _) => sign | NAN | mantissa << 13,
        (0, 0) => sign,
        (0, _) => {
            // A subnormal: move its leading one to the place of the hidden bit.
            let shift = mantissa.leading_zeros() - 21;
            sign | (113 - shift) << 23 | (mantissa << shift & 0x3FF) << 13
        }
        _ => sign | (exponent + 112) << 23 | mantissa << 13,
    }
}

/// The f16 nearest to the f32 of these bits.
#[expect(clippy::cast_possible_truncation, reason = "each value fits 16 bits by the shifts before")]
fn narrow_f16(bits: u32) -> u16 {
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & MAGNITUDE;
    if magnitude > INFINITY {
        return (sign | 0x7E00 | (magnitude >> 13 & 0x3FF)) as u16;
    }
    // 65520 is half way between the largest f16 and the next that there would be, and ties go up there.
    if magnitude >= 0x477F_F000 {
        return (sign | 0x7C00) as u16;
    }
    if magnitude >= 0x3880_0000 {
        let rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
        return (sign | (rounded - 0x3800_0000) >> 13) as u16;
    }
    // 2^-25 is half way between zero and the smallest subnormal, and ties go to zero there.
    if magnitude <= 0x3300_0000 {
        return sign as u16;
    }
    let shift = 126 - (magnitude >> 23);
    let mantissa = (magnitude & 0x7F_FFFF) | 0x80_0000;
    let kept = mantissa >> shift;
    let rest = mantissa & ((1 << shift) - 1);
    let half = 1 << (shift - 1);
    let up = u32::from(rest > half || (rest == half && kept & 1 == 1));
    (sign | (kept + up)) as u16
}

/// The bf16 nearest to the f32 of these bits.
#[expect(clippy::cast_possible_truncation, reason = "shifted down by 16")]
fn narrow_bf16(bits: u32) -> u16 {
    if is_nan(bits) {
        return (bits >> 16 | 0x40) as u16;
    }
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

fn two(at: &[u8]) -> u16 {
    u16::from_le_bytes([at[0], at[1]])
}

impl Load for F32 {
    const BYTES: usize = 4;
    fn load(at: &[u8]) -> u32 {
        u32::from_le_bytes([at[0], at[1], at[2], at[3]])
    }
}

impl Store for F32 {
    fn store(at: &mut [u8], bits: u32) {
        at.copy_from_slice(&bits.to_le_bytes());
    }
}

impl Load for F16 {
    const BYTES: usize = 2;
    fn load(at: &[u8]) -> u32 {
        widen_f16(two(at))
    }
}

impl Store for F16 {
    fn store(at: &mut [u8], bits: u32) {
        at.copy_from_slice(&narrow_f16(bits).to_le_bytes());
    }
}

impl Load for Bf16 {
    const BYTES: usize = 2;
    fn load(at: &[u8]) -> u32 {
        let bits = u32::from(two(at)) << 16;
        if is_nan(bits) { bits | 0x40_0000 } else { bits }
    }
}

impl Store for Bf16 {
    fn store(at: &mut [u8], bits: u32) {
        at.copy_from_slice(&narrow_bf16(bits).to_le_bytes());
    }
}

impl Load for F8E4m3 {
    const BYTES: usize = 1;
    fn load(at: &[u8]) -> u32 {
        let code = u32::from(at[0]);
        let sign = (code & 0x80) << 24;
        let exponent = code >> 3 & 0xF;
        let mantissa = code & 7;
        match (exponent, mantissa) {
            (0xF, 7) => sign | NAN,
            (0, 0) => sign,
            (0, _) => {
                let shift = mantissa.leading_zeros() - 28;
                sign | (121 - shift) << 23 | (mantissa << shift & 7) << 20
            }
            _ => sign | (exponent + 120) << 23 | mantissa << 20,
        }
    }
}

impl Load for F8E5m2 {
    const BYTES: usize = 1;
    fn load(at: &[u8]) -> u32 {
        widen_f16(u16::from(at[0]) << 8)
    }
}
