//! The element types of the safetensors format.
//!
//! Pure values; imports nothing of this crate.

#![deny(unsafe_code)]

use std::fmt;

/// The type of a tensor's elements, as safetensors names them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[expect(non_camel_case_types, reason = "the format's own names, which people search for")]
#[expect(missing_docs, reason = "the names say all there is")]
#[non_exhaustive]
pub enum Dtype {
    BOOL,
    F4,
    F6_E2M3,
    F6_E3M2,
    U8,
    I8,
    F8_E5M2,
    F8_E4M3,
    F8_E8M0,
    F8_E4M3FNUZ,
    F8_E5M2FNUZ,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
}

impl Dtype {
    /// Every type, narrow ones first.
    pub const ALL: [Self; 22] = [
        Self::BOOL,
        Self::F4,
        Self::F6_E2M3,
        Self::F6_E3M2,
        Self::U8,
        Self::I8,
        Self::F8_E5M2,
        Self::F8_E4M3,
        Self::F8_E8M0,
        Self::F8_E4M3FNUZ,
        Self::F8_E5M2FNUZ,
        Self::I16,
        Self::U16,
        Self::F16,
        Self::BF16,
        Self::I32,
        Self::U32,
        Self::F32,
        Self::C64,
        Self::F64,
        Self::I64,
        Self::U64,
    ];

    /// The type of this name; names are spelled in capitals, as in the format.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// The format's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BOOL => "BOOL",
            Self::F4 => "F4",
            Self::F6_E2M3 => "F6_E2M3",
            Self::F6_E3M2 => "F6_E3M2",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8_E5M2 => "F8_E5M2",
            Self::F8_E4M3 => "F8_E4M3",
            Self::F8_E8M0 => "F8_E8M0",
            Self::F8_E4M3FNUZ => "F8_E4M3FNUZ",
            Self::F8_E5M2FNUZ => "F8_E5M2FNUZ",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::C64 => "C64",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U64 => "U64",
        }
    }

    /// The size of one element in bits.
    pub const fn bits(self) -> u64 {
        match self {
            Self::F4 => 4,
            Self::F6_E2M3 | Self::F6_E3M2 => 6,
            Self::BOOL
            | Self::U8
            | Self::I8
            | Self::F8_E5M2
            | Self::F8_E4M3
            | Self::F8_E8M0
            | Self::F8_E4M3FNUZ
            | Self::F8_E5M2FNUZ => 8,
            Self::I16 | Self::U16 | Self::F16 | Self::BF16 => 16,
            Self::I32 | Self::U32 | Self::F32 => 32,
            Self::C64 | Self::F64 | Self::I64 | Self::U64 => 64,
        }
    }

    /// The size of one element in bytes, or `None` for the types of 4 and 6 bits.
    pub const fn byte_size(self) -> Option<u64> {
        let bits = self.bits();
        if bits.is_multiple_of(8) { Some(bits / 8) } else { None }
    }

    /// Whether a compute type may replace it: the formats that the crate's kernels cast.
    pub const fn is_castable(self) -> bool {
        matches!(self, Self::F8_E5M2 | Self::F8_E4M3 | Self::F16 | Self::BF16 | Self::F32)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_are_not_loose() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::parse(dtype.name()), Some(dtype));
            assert_eq!(Dtype::parse(&dtype.name().to_lowercase()), None);
        }
        assert_eq!(Dtype::parse("F128"), None);
        assert_eq!(Dtype::parse(""), None);
    }

    #[test]
    fn sizes_are_the_reference_implementations() {
        for dtype in Dtype::ALL {
            let json = format!("\"{dtype}\"");
            let reference: safetensors::Dtype = serde_json::from_str(&json).expect("the reference knows it");
            assert_eq!(reference.bitsize() as u64, dtype.bits(), "{dtype}");
        }
        assert_eq!(Dtype::F6_E2M3.byte_size(), None);
        assert_eq!(Dtype::BF16.byte_size(), Some(2));
    }
}
