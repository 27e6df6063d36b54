//! A pass over units of uneven compute takes little longer than its compute or its copies, once the pager has seen
//! how long each unit takes.
//!
//! Counted by the modelled clock on a card without bytes. With the sum of compute alone the best choice of pages
//! and ring takes 1.23 here, over the limit of 1.20: it is each unit's own compute that must have been learned.

#![cfg(feature = "cli")]

#[path = "../benches/common/mod.rs"]
mod common;

use common::card::{LINK, Setup, Spread, addresses, compute, pass};
use common::models::Layout;
use vram_pager::pager::PagerOptions;

#[test]
fn units_of_half_a_gigabyte_and_more_are_streamed_as_each_ones_compute_allows() {
    let file = Layout::Large.file().unwrap();
    let weights = file.bytes();
    // 1.05x, 1.25x and twice the card; a told sum of compute and none.
    for (card, told) in [(100, true), (100, false), (84, true), (52, true)] {
        let card = weights / 105 * card;
        let options = PagerOptions { headroom_bytes: Some(0), ..PagerOptions::default() };
        let setup = Setup::hollow(&file, card, options).unwrap();
        let link = LINK.duration(weights - setup.shared().info().total_bytes);
        if told {
            #[expect(clippy::cast_precision_loss, reason = "bytes of a model")]
            let per_gib = link.mul_f64((1_u64 << 30) as f64 / weights as f64);
            setup.model.set_compute_per_gib(Some(per_gib)).unwrap();
        }
        let compute = compute(&setup.model, link, Spread::Uneven);
        let before = addresses(&setup.model);
        let passes: Vec<_> = (0..5).map(|_| pass(&setup.model, &setup.stream, &compute).unwrap()).collect();
        for (number, pass) in passes.iter().enumerate().skip(2) {
            let ratio = pass.time.as_secs_f64() / link.as_secs_f64();
            println!("{card} bytes, pass {number}: {ratio:.3}, {} maps", pass.map_calls);
            assert!(ratio <= 1.2, "{card} bytes, pass {number}: {ratio}");
            assert_eq!(pass.map_calls, 0, "{card} bytes, pass {number}");
        }
        assert_eq!(before, addresses(&setup.model));
    }
}
