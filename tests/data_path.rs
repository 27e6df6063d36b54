//! The data path, end to end: what a kernel reads at a guard's addresses is what the file holds, on
//! cards from far too small to ample, and nothing is left behind.

mod common;

use common::{ModelFile, assert_nothing_left, checked_pass, mixed_units, pager, small_card, small_options};
use vram_pager::pager::{ModelOptions, Verifier};
use vram_pager::units::{KIB, MIB};

#[test]
fn every_byte_is_right_on_cards_of_any_size() {
    let file = ModelFile::new(&mixed_units(), 7);
    for card in [6 * MIB, 4 * MIB, 2 * MIB, MIB, 512 * KIB] {
        let device = small_card(card);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            for pass in 0..4 {
                let before = model.counts();
                checked_pass(&model, &stream, &verifier).unwrap_or_else(|error| panic!("{card}: {error}"));
                let counts = model.counts();
                let figures = pager.figures();
                assert!(
                    figures.resident_bytes + figures.ring_bytes + figures.idle_bytes <= card,
                    "{figures:?}"
                );
                if pass >= 2 {
                    let copied = counts.copied_bytes - before.copied_bytes;
                    let weights = model.figures().weights_bytes;
                    let largest = 512 * 512 * 2 + 1024;
                    assert!(
                        copied <= weights.saturating_sub(model.figures().resident_bytes) + largest,
                        "card {card}, pass {pass}: {copied} bytes copied of {weights}, {figures:?}"
                    );
                }
            }
            assert_eq!(device.counts().device_sync, 0);
        }
        assert_nothing_left(&device);
    }
}
