//! In a steady pass over a model that does not fit, copies are large enough to fill a link.
//!
//! Counted on cards without bytes. Residency is spread over the pass page by page, so that copies of one page each,
//! 2 MiB, are what comes of it unless the pages that a unit streams lie side by side.

#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

#[path = "../benches/common/mod.rs"]
mod common;

use common::card::{Setup, pass};
use common::models::Layout;
use vram_pager::pager::PagerOptions;

const MIB: u64 = 1 << 20;

/// Bytes and copies of the fourth pass on a card of so many hundredths of the weights.
fn steady(layout: Layout, hundredths: u64) -> (u64, u64) {
    let file = layout.file().unwrap();
    let setup = Setup::hollow(&file, file.bytes() / 100 * hundredths, PagerOptions::default()).unwrap();
    for _ in 0..3 {
        pass(&setup.model, &setup.stream, &[]).unwrap();
    }
    let before = setup.shared().counts();
    pass(&setup.model, &setup.stream, &[]).unwrap();
    let after = setup.shared().counts();
    assert_eq!(after.map, before.map, "{} is not steady", layout.name());
    (after.bytes_to_device - before.bytes_to_device, after.copy_to_device - before.copy_to_device)
}

#[test]
fn copies_of_a_steady_pass_are_four_mebibytes_and_more() {
    for layout in [Layout::Flux, Layout::Llama, Layout::T5, Layout::Medium, Layout::Large] {
        // 1.25 times the card, and twice.
        for card in [80, 50] {
            let (bytes, copies) = steady(layout, card);
            println!("{} on {card} %: {} KiB a copy, {copies} copies", layout.name(), bytes / copies / 1024);
            assert!(bytes >= copies * 4 * MIB, "{} on {card} %: {bytes} in {copies}", layout.name());
        }
    }
}

#[test]
fn copies_of_units_that_are_hardly_larger_than_a_page_are_more_than_a_page() {
    for card in [80, 50] {
        let (bytes, copies) = steady(Layout::Sdxl, card);
        println!("SDXL on {card} %: {} KiB a copy, {copies} copies", bytes / copies / 1024);
        assert!(bytes * 10 >= copies * 25 * MIB, "SDXL on {card} %: {bytes} in {copies}");
    }
}
