//! What the driver's codes mean: pure, over plain numbers, so that a code of a newer driver is just a
//! number without a name.
//!
//! Owns nothing, takes no lock.

#![deny(unsafe_code)]

use super::driver::MISSING;

pub(super) const OUT_OF_MEMORY: i32 = 2;
pub(super) const NO_DEVICE: i32 = 100;
pub(super) const INVALID_HANDLE: i32 = 400;
pub(super) const NOT_READY: i32 = 600;

/// What to do about a code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// The card has not enough memory now.
    OutOfMemory,
    /// The context is broken: every later call would answer the same.
    Sticky,
    /// The driver or the card does not offer the call.
    Unsupported,
    /// The call itself was wrong, or refused for a reason of its own.
    Refused,
}

/// Sorts a code that is not success.
///
/// Sticky are those of which the driver's documentation says that the process must be ended, or that the
/// context cannot be used any more.
pub(super) fn classify(code: i32) -> Class {
    match code {
        OUT_OF_MEMORY => Class::OutOfMemory,
        // Deinitialised; ECC, NVLink, contained.
        4 | 214 | 220 | 226
        // Illegal address, launch timeout, context destroyed, assert.
        | 700 | 702 | 709 | 710
        // Hardware stack, illegal instruction, misaligned, address space, program counter, launch failed,
        // tensor memory leak.
        | 714..=719 | 721
        // The client of a shared server was ended; an external device failed.
        | 810 | 911 => Class::Sticky,
        MISSING | 36 | 801 => Class::Unsupported,
        _ => Class::Refused,
    }
}

/// The name of a code, for drivers that do not export the call that gives it.
pub(super) fn name(code: i32) -> Option<&'static str> {
    Some(match code {
        MISSING => "symbol not exported",
        1 => "CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
        3 => "CUDA_ERROR_NOT_INITIALIZED",
        4 => "CUDA_ERROR_DEINITIALIZED",
        34 => "CUDA_ERROR_STUB_LIBRARY",
        36 => "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
        46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
        NO_DEVICE => "CUDA_ERROR_NO_DEVICE",
        101 => "CUDA_ERROR_INVALID_DEVICE",
        200 => "CUDA_ERROR_INVALID_IMAGE",
        201 => "CUDA_ERROR_INVALID_CONTEXT",
        205 => "CUDA_ERROR_MAP_FAILED",
        206 => "CUDA_ERROR_UNMAP_FAILED",
        209 => "CUDA_ERROR_NO_BINARY_FOR_GPU",
        214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
        218 => "CUDA_ERROR_INVALID_PTX",
        220 => "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        222 => "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        226 => "CUDA_ERROR_CONTAINED",
        304 => "CUDA_ERROR_OPERATING_SYSTEM",
        INVALID_HANDLE => "CUDA_ERROR_INVALID_HANDLE",
        401 => "CUDA_ERROR_ILLEGAL_STATE",
        500 => "CUDA_ERROR_NOT_FOUND",
        NOT_READY => "CUDA_ERROR_NOT_READY",
        700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
        701 => "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
        709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        710 => "CUDA_ERROR_ASSERT",
        712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        713 => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        714 => "CUDA_ERROR_HARDWARE_STACK_ERROR",
        715 => "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        716 => "CUDA_ERROR_MISALIGNED_ADDRESS",
        717 => "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        718 => "CUDA_ERROR_INVALID_PC",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        721 => "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        800 => "CUDA_ERROR_NOT_PERMITTED",
        801 => "CUDA_ERROR_NOT_SUPPORTED",
        802 => "CUDA_ERROR_SYSTEM_NOT_READY",
        803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        810 => "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        906 => "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        911 => "CUDA_ERROR_EXTERNAL_DEVICE",
        999 => "CUDA_ERROR_UNKNOWN",
        _ => return None,
    })
}

/// What a person can do about a driver that does not start.
pub(super) fn advice(code: i32) -> &'static str {
    match code {
        MISSING => "install a driver of CUDA 12.0 or newer",
        NO_DEVICE => "plug a card in, make it visible to this container, or check CUDA_VISIBLE_DEVICES",
        34 => {
            "the library found is a stub for building; put the driver's own libcuda.so.1 first in the loader's path"
        }
        35 | 36 => "update the driver to CUDA 12.0 or newer",
        46 | 802 | 807 => "another program holds the card, or it is not ready yet; try again later",
        803 => "the kernel module and libcuda.so.1 are of different versions; reboot after a driver update",
        999 => "load the kernel modules (nvidia-modprobe -u, or run nvidia-smi once as root)",
        _ => "see the driver's documentation for this code, and the kernel's log",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_from_the_future_is_a_refusal_without_a_name() {
        for code in [12_345, -7, i32::MAX] {
            assert_eq!(classify(code), Class::Refused);
            assert_eq!(name(code), None);
        }
    }

    #[test]
    fn what_breaks_a_context_is_sticky_and_has_a_name() {
        let sticky: Vec<i32> = (0..1000).filter(|code| classify(*code) == Class::Sticky).collect();
        assert!(sticky.contains(&700) && sticky.contains(&719) && !sticky.contains(&701));
        assert!(sticky.iter().all(|code| name(*code).is_some()), "{sticky:?}");
    }

    #[test]
    fn a_missing_symbol_is_no_code_of_a_driver() {
        assert_eq!(classify(MISSING), Class::Unsupported);
    }
}
