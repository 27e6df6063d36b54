//! In a steady pass over a model that does not fit, copies are large enough to fill a link.
//!
//! Counted on cards without bytes. Residency is spread over the pass page by page, so that copies of one page each,
//! 2 MiB, are what comes of it unless the pages that a unit streams lie side by side, and those of small units beside
//! their neighbours'; and unless prefetch waits for the frames of two.

#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

#[path = "../benches/common/mod.rs"]
mod common;

use common::card::{Setup, pass};
use common::models::Layout;
use vram_pager::pager::PagerOptions;

const MIB: u64 = 1 << 20;

const LAYOUTS: [Layout; 7] =
    [Layout::Flux, Layout::Sdxl, Layout::Llama, Layout::T5, Layout::Small, Layout::Medium, Layout::Large];

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

/// Every layout's copies on a card of so many hundredths of its weights are of so many tenths of a MiB and more.
fn copies_are_of(hundredths: u64, tenths: u64) {
    for layout in LAYOUTS {
        let (bytes, copies) = steady(layout, hundredths);
        let name = format!("{} on {hundredths} %", layout.name());
        println!("{name}: {} KiB a copy, {copies} copies", bytes / copies / 1024);
        assert!(bytes * 10 >= copies * tenths * MIB, "{name}: {bytes} in {copies}");
    }
}

#[test]
fn copies_of_a_steady_pass_are_four_mebibytes_and_more() {
    // Four times the card, and twice.
    copies_are_of(25, 50);
    copies_are_of(50, 50);
}

#[test]
fn so_they_are_where_a_fifth_of_the_model_streams() {
    copies_are_of(80, 45);
}

#[test]
fn so_they_are_where_hardly_any_of_it_does() {
    copies_are_of(95, 40);
}
