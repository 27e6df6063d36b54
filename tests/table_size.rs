//! A page of a model costs at most 32 bytes of table, counted by the allocator.
//!
//! What is counted is all that opening a model takes from the heap, and what passes over it add: pages, order,
//! spans, words, the layout's tensors. The frames' accounts are the card's, once for all models, and are there
//! before; the card here keeps none of its own. It guards against lists that grow by a field, or that keep twice
//! the room that they need.

#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

#[path = "../benches/common/mod.rs"]
mod common;

use std::sync::{Arc, Mutex};

use common::alloc::{Counting, live_bytes};
use common::card::pass;
use common::models::{Layout, ModelFile, uniform};
use common::null::NullDevice;
use vram_pager::pager::{ModelOptions, Pager, PagerOptions};

#[global_allocator]
static HEAP: Counting = Counting;

const PAGE: u64 = 2 << 20;

/// What is counted is the process's heap: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Bytes that a model takes while it is open, and its pages, on a card of so many in a hundred of its pages.
fn table(file: &ModelFile, card: u64) -> (u64, u64) {
    let count = file.bytes().div_ceil(PAGE) + 1;
    let options = PagerOptions { headroom_bytes: Some(0), ..PagerOptions::default() };
    let pager = Pager::new(&NullDevice::open(count * card / 100 * PAGE, PAGE), options).unwrap();
    let stream = pager.stream().unwrap();
    let mut used = 0;
    // The first brings the frames, which stay with the pager.
    for _ in 0..2 {
        let before = live_bytes();
        let model = pager.open_model(Arc::clone(&file.index), &ModelOptions::default()).unwrap();
        for _ in 0..3 {
            pass(&model, &stream, &[]).unwrap();
        }
        used = live_bytes() - before;
    }
    (used, count)
}

/// The same as bytes a page, which it prints.
fn bytes_a_page(name: &str, file: &ModelFile, card: u64) -> f64 {
    let (bytes, pages) = table(file, card);
    #[expect(clippy::cast_precision_loss, reason = "shown with two places")]
    let each = bytes as f64 / pages as f64;
    println!("{name} on {card} % of its pages: {each:.2} bytes a page, {bytes} bytes, {pages} pages");
    each
}

#[test]
fn a_page_costs_at_most_32_bytes_of_table() {
    let _alone = ALONE.lock().unwrap();
    // FLUX.1-dev has 24 pages a unit, Llama-3-8B 26, T5-XXL 21.
    let published = [Layout::Flux, Layout::Llama, Layout::T5];
    let mut models: Vec<(&str, ModelFile)> =
        published.into_iter().map(|layout| (layout.name(), layout.file().unwrap())).collect();
    models.push(("500,000 pages, 24 a unit", ModelFile::new(&uniform(20_834, 24 * PAGE)).unwrap()));
    models.push(("50,000 pages, 10 a unit", ModelFile::new(&uniform(5000, 10 * PAGE)).unwrap()));
    for (name, file) in &models {
        for card in [130, 50] {
            let each = bytes_a_page(name, file, card);
            assert!(each <= 32.0, "{name}: {each} bytes a page");
        }
    }
    // The part that is of the pages themselves, from two models of as many units.
    let small = table(&ModelFile::new(&uniform(500, 20 * PAGE)).unwrap(), 50);
    let large = table(&ModelFile::new(&uniform(500, 200 * PAGE)).unwrap(), 50);
    assert!(large.0 - small.0 <= 17 * (large.1 - small.1), "{small:?} {large:?}");
}

#[test]
fn a_unit_of_one_tensor_costs_at_most_128_bytes_whatever_its_pages() {
    let _alone = ALONE.lock().unwrap();
    // As many pages in more units. The word on a cache line of its own is 64 of the bytes.
    let few = table(&ModelFile::new(&uniform(500, 40 * PAGE)).unwrap(), 50);
    let many = table(&ModelFile::new(&uniform(2500, 8 * PAGE)).unwrap(), 50);
    let each = (many.0 - few.0) / 2000;
    println!("{each} bytes a unit");
    assert!(each <= 128, "{few:?} {many:?}");
}

#[test]
fn what_many_small_units_and_tensors_cost_does_not_grow() {
    let _alone = ALONE.lock().unwrap();
    // 2.3 pages a unit, 1.6 tensors: here the words alone take 27 bytes a page.
    for card in [130, 50] {
        let each = bytes_a_page("SDXL", &Layout::Sdxl.file().unwrap(), card);
        assert!(each <= 78.0, "{each} bytes a page");
    }
}
