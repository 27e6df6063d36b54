//! In a steady pass over a model that does not fit, copies are large enough to fill a link.
//!
//! Counted on cards without bytes. Residency is spread over the pass page by page, so that copies of one page each,
//! 2 MiB, are what comes of it unless the pages that a unit streams lie side by side, and those of small units beside
//! their neighbours'; and unless prefetch waits for the frames of two.

#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

#[path = "../benches/common/mod.rs"]
mod common;

use common::card::{LINK, Setup, Spread, compute, pass};
use common::models::{Layout, ModelFile, Tensor};
use vram_pager::pager::{PagerOptions, RingSize};
use vram_pager::weights::Dtype;

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

#[test]
fn larger_copies_are_not_waited_for_until_a_small_ring_is_empty() {
    // Units of half a page to two: so few pages stream at once that the ring has two to six.
    for (count, bytes) in [(400_u32, MIB), (200, 2 * MIB), (150, 3 * MIB), (100, 4 * MIB)] {
        let unit = |number| Tensor {
            name: format!("blocks.{number:03}.weight"),
            dtype: Dtype::BF16,
            shape: vec![bytes / 2048, 1024],
        };
        let file = ModelFile::new(&(0..count).map(unit).collect::<Vec<_>>()).unwrap();
        for ring in [RingSize::Modelled, RingSize::Quarters(8), RingSize::Pages(3), RingSize::Pages(4)] {
            let options = PagerOptions { ring, headroom_bytes: Some(0), ..PagerOptions::default() };
            let setup = Setup::hollow(&file, file.bytes() / 4, options).unwrap();
            let link = LINK.duration(file.bytes() / 4 * 3);
            let compute = compute(&setup.model, link, Spread::Even);
            let passes: Vec<_> =
                (0..4).map(|_| pass(&setup.model, &setup.stream, &compute).unwrap()).collect();
            let ratio = passes[3].time.as_secs_f64() / link.as_secs_f64();
            println!("{count} units, {ring:?}: {ratio:.3}");
            assert!(ratio < 1.2, "{count} units, {ring:?}: {ratio:.3}");
        }
    }
}
