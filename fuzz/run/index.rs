//! libFuzzer on the target `index`.
#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each program runs one of the targets")]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::index(data, &mut |parse| parse()));
