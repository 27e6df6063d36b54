//! Device strings: what `--device` takes, and the opening of what they name.
//!
//! `emulated:<size>[,page=<size>][,link=<rate>][,bytes=none]`. A string with a typo is refused with what
//! would be right. Owns nothing, takes no lock.

#![deny(unsafe_code)]

use super::{DeviceError, SharedDevice};

/// Opens the device that `text` names.
pub fn open(text: &str) -> Result<SharedDevice, DeviceError> {
    Err(DeviceError::BadDeviceString {
        text: text.to_owned(),
        why: "no backend".to_owned(),
        example: "emulated:8GiB",
    })
}
