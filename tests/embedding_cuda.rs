//! The embedding example computes on a card behind the CUDA driver as it does on an emulated one.
//!
//! Over the stand-in driver, whose kernels are the same host twins: the embeddings have the same bits. That
//! the card's own code does what the twins do is held by `embed_kernels`.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "helpers that are shared fail as a test does")]

#[path = "../examples/embed/runner/mod.rs"]
#[allow(dead_code, unused_imports, reason = "this test uses a part of it")]
mod runner;

mod common;

use common::assert_nothing_left;
use common::standin::standin;
use runner::{Bert, Compute, FETCH, ModelFolder};
use serde::Deserialize;
use vram_pager::device;
use vram_pager::pager::{ModelCounts, Pager, PagerOptions};
use vram_pager::units::MIB;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    ids: Vec<u32>,
    embedding: Vec<f64>,
}

fn cases() -> Vec<Case> {
    serde_json::from_str::<Reference>(include_str!("data/minilm_reference.json")).expect("valid JSON").cases
}

/// Embeds every sentence of the reference `passes` times on a device, and leaves nothing on it.
fn embed(text: &str, passes: u32) -> (Vec<Vec<f32>>, ModelCounts) {
    let device = device::open(text).expect("a device");
    let options = PagerOptions { page_locked_bytes: Some(16 * MIB), ..PagerOptions::default() };
    let pager = Pager::new(&device, options).expect("a pager");
    let compute = Compute::new(&device).expect("the runner's kernels");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/all-MiniLM-L6-v2");
    let bert = Bert::open(&pager, &ModelFolder::new(path))
        .unwrap_or_else(|error| panic!("{error}\nThis test needs the real model. Run {FETCH} first."));
    let stream = pager.stream().expect("a stream");
    let mut found: Vec<Vec<f32>> = Vec::new();
    for pass in 0..passes {
        for (number, case) in cases().iter().enumerate() {
            let embedding = bert.embed(&compute, &stream, &case.ids).expect("an embedding");
            for (found, expected) in embedding.iter().zip(&case.embedding) {
                assert!((f64::from(*found) - expected).abs() < 1e-5, "{text}, pass {pass}");
            }
            if pass == 0 {
                found.push(embedding);
            } else {
                assert_eq!(embedding, found[number], "{text}, pass {pass}");
            }
        }
    }
    let counts = bert.weights().paged().unwrap().counts();
    assert_eq!(device.counts().device_sync, 0);
    drop((stream, bert, compute, pager));
    assert_nothing_left(&device);
    (found, counts)
}

#[test]
fn a_cuda_card_that_the_model_never_fits_on_gives_the_reference() {
    let standin = standin();
    let (emulated, _) = embed("emulated:24MiB,page=2MiB", 1);
    let (cuda, counts) = embed("cuda:0,cap=24MiB,page=2MiB", 3);
    assert_eq!(cuda, emulated);
    assert!(counts.streamed > 0, "{counts:?}");
    // Nor without virtual memory calls: units are whole then, or come in pieces.
    let (whole, counts) = embed("emulated:24MiB,page=2MiB,vmm=none", 2);
    assert_eq!(whole, emulated);
    assert!(counts.streamed > 0, "{counts:?}");
    standin.set_abilities(false, true);
    let (whole, counts) = embed("cuda:0,cap=40MiB", 2);
    standin.set_abilities(true, true);
    assert_eq!(whole, emulated);
    assert!(counts.streamed > 0, "{counts:?}");
    assert_eq!(standin.misuses(), 0);
    assert_eq!(standin.leftovers(), 0);
}
