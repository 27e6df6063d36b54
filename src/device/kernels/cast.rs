//! Casts of a flat range of elements: the twins of `kernels/cast.cu`.

#![deny(unsafe_code)]

use super::numeric::{Bf16, F8E4m3, F8E5m2, F16, F32, FloatType, Load, Store};
use super::{HostTwin, KernelArg, Launch, TwinArg, flat_launch};
use crate::device::KernelId;
use crate::units::DeviceRange;

/// `elements` whole elements of `from`, written to `to`: what is wrong with the lengths, if anything.
fn check<From: Load, To: Load>(from: &[u8], elements: u64, to: &[u8]) -> Result<(), String> {
    let wanted = |bytes: usize| elements.checked_mul(bytes as u64);
    if wanted(From::BYTES) != Some(from.len() as u64) || wanted(To::BYTES) != Some(to.len() as u64) {
        return Err(format!(
            "a cast of {elements} elements does not go from {} bytes to {}",
            from.len(),
            to.len()
        ));
    }
    Ok(())
}

fn cast_all<From: Load, To: Store>(from: &[u8], elements: u64, to: &mut [u8]) -> Result<(), String> {
    check::<From, To>(from, elements, to)?;
    for (source, target) in from.chunks_exact(From::BYTES).zip(to.chunks_exact_mut(To::BYTES)) {
        To::store(target, From::load(source));
    }
    Ok(())
}

fn copy_all<Type: Load>(from: &[u8], elements: u64, to: &mut [u8]) -> Result<(), String> {
    check::<Type, Type>(from, elements, to)?;
    to.copy_from_slice(from);
    Ok(())
}

type Body = fn(&[u8], u64, &mut [u8]) -> Result<(), String>;

fn as_twin(body: Body, args: &mut [TwinArg<'_>]) -> Result<(), String> {
    let [TwinArg::Read(from), TwinArg::U64(elements), TwinArg::Write(to)] = args else {
        return Err("a cast takes (from: Read, elements: U64, to: Write)".to_owned());
    };
    body(from, *elements, to)
}

macro_rules! casts {
    ($( $name:literal: $from:ident -> $to:ident = $body:expr; )*) => {
        /// The name, body and twin of the kernel for a pair of types.
        fn entry(from: FloatType, to: FloatType) -> Option<(&'static str, Body, HostTwin)> {
            match (from, to) {
                $( (FloatType::$from, FloatType::$to) => {
                    Some(($name, $body, |args: &mut [TwinArg<'_>]| as_twin($body, args)))
                } )*
                _ => None,
            }
        }

        /// Every cast kernel with its twin.
        pub(super) fn twins() -> impl Iterator<Item = (&'static str, HostTwin)> {
            [$( (FloatType::$from, FloatType::$to) ),*]
                .into_iter()
                .filter_map(|(from, to)| entry(from, to).map(|(name, _, twin)| (name, twin)))
        }
    };
}

casts! {
    "cast_f32_f32": F32 -> F32 = copy_all::<F32>;
    "cast_f32_f16": F32 -> F16 = cast_all::<F32, F16>;
    "cast_f32_bf16": F32 -> Bf16 = cast_all::<F32, Bf16>;
    "cast_f16_f32": F16 -> F32 = cast_all::<F16, F32>;
    "cast_f16_f16": F16 -> F16 = copy_all::<F16>;
    "cast_f16_bf16": F16 -> Bf16 = cast_all::<F16, Bf16>;
    "cast_bf16_f32": Bf16 -> F32 = cast_all::<Bf16, F32>;
    "cast_bf16_f16": Bf16 -> F16 = cast_all::<Bf16, F16>;
    "cast_bf16_bf16": Bf16 -> Bf16 = copy_all::<Bf16>;
    "cast_f8_e4m3_f32": F8E4m3 -> F32 = cast_all::<F8E4m3, F32>;
    "cast_f8_e4m3_f16": F8E4m3 -> F16 = cast_all::<F8E4m3, F16>;
    "cast_f8_e4m3_bf16": F8E4m3 -> Bf16 = cast_all::<F8E4m3, Bf16>;
    "cast_f8_e5m2_f32": F8E5m2 -> F32 = cast_all::<F8E5m2, F32>;
    "cast_f8_e5m2_f16": F8E5m2 -> F16 = cast_all::<F8E5m2, F16>;
    "cast_f8_e5m2_bf16": F8E5m2 -> Bf16 = cast_all::<F8E5m2, Bf16>;
}

/// The name of the kernel that casts `from` to `to`; `None` if there is none (nothing casts to fp8).
pub fn cast_kernel(from: FloatType, to: FloatType) -> Option<&'static str> {
    entry(from, to).map(|(name, _, _)| name)
}

/// The launch of a cast kernel over `elements` elements. The ranges do not overlap, have exactly that many
/// elements, and need no alignment.
pub fn cast_launch(kernel: KernelId, from: DeviceRange, elements: u64, to: DeviceRange) -> Launch {
    flat_launch(kernel, elements, &[KernelArg::Read(from), KernelArg::U64(elements), KernelArg::Write(to)])
}

/// Casts host bytes as the kernel does, bit for bit: rounded to nearest, ties to even; a NaN stays one.
///
/// # Errors
/// A pair of types that no kernel casts, or lengths that are not of one number of elements.
pub fn cast(from_type: FloatType, from: &[u8], to_type: FloatType, to: &mut [u8]) -> Result<(), String> {
    let Some((_, body, _)) = entry(from_type, to_type) else {
        return Err(format!("nothing casts {from_type} to {to_type}"));
    };
    body(from, from.len() as u64 / from_type.bytes(), to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let mut to = [0_u8; 4];
        assert!(cast(FloatType::F32, &[0; 8], FloatType::F16, &mut to).is_ok());
        assert!(cast(FloatType::F32, &[0; 7], FloatType::F16, &mut to).is_err());
        assert!(cast(FloatType::F32, &[0; 12], FloatType::F16, &mut to).is_err());
        assert!(cast(FloatType::F32, &[0; 16], FloatType::F8E4m3, &mut to).is_err());
    }

    #[test]
    fn a_twin_checks_its_arguments() {
        let mut to = [0_u8; 2];
        let mut run = |elements| {
            let (_, _, twin) = entry(FloatType::F32, FloatType::Bf16).unwrap();
            let mut args =
                [TwinArg::Read(&[0, 0, 0x80, 0x3F]), TwinArg::U64(elements), TwinArg::Write(&mut to)];
            twin(&mut args)
        };
        assert!(run(2).is_err());
        assert!(run(u64::MAX / 2).is_err());
        run(1).unwrap();
        assert_eq!(to, [0x80, 0x3F]);
    }
}
