//! A real sentence-embedding transformer gives its published answer from weights that never fit the card
//! at once, whatever the card's size and however many threads ask.
//!
//! The forward pass is the example's own. The reference was made by `tests/data/reference_embedding.py`,
//! which shares no code with it.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

#[path = "../examples/embed/runner/mod.rs"]
mod runner;

mod common;

use std::sync::Arc;

use common::assert_nothing_left;
use runner::{Bert, Compute, FETCH, ModelFolder, RunnerError, Tokens};
use serde::Deserialize;
use vram_pager::device::SharedDevice;
use vram_pager::manager::{LoadOptions, Manager};
use vram_pager::pager::{ModelCounts, PagedModel, Pager, PagerOptions};
use vram_pager::patcher::{Lora, LoraFile, ResidentOptions};
use vram_pager::units::MIB;

/// MiB of a card that the model never fits on.
const SMALL_CARD: u64 = 24;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    sentence: String,
    ids: Vec<u32>,
    embedding: Vec<f64>,
}

fn reference() -> Vec<Case> {
    let text = include_str!("data/minilm_reference.json");
    serde_json::from_str::<Reference>(text).unwrap().cases
}

/// The model's folder. A model that was not fetched fails the test: a skipped one would look like a pass.
fn folder() -> ModelFolder {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/all-MiniLM-L6-v2");
    let folder = ModelFolder::new(path);
    if let Err(error @ RunnerError::Missing { .. }) = folder.weights().and(folder.config()) {
        panic!("{error}\nThese tests need the real model. Run {FETCH} first.");
    }
    folder
}

/// A card with the model on it.
struct Card {
    device: SharedDevice,
    pager: Arc<Pager>,
    compute: Compute,
    bert: Bert,
}

impl Card {
    fn open(mib: u64) -> Self {
        Self::on(common::card(mib * MIB, 2 * MIB))
    }

    fn on(device: SharedDevice) -> Self {
        let options = PagerOptions { page_locked_bytes: Some(16 * MIB), ..PagerOptions::default() };
        let pager = Pager::new(&device, options).unwrap();
        let compute = Compute::new(&device).unwrap();
        let bert = Bert::open(&pager, &folder()).unwrap();
        Self { device, pager, compute, bert }
    }

    fn embed(&self, ids: &[u32]) -> Vec<f32> {
        let stream = self.pager.stream().unwrap();
        self.bert.embed(&self.compute, &stream, ids).unwrap()
    }

    fn model(&self) -> &Arc<PagedModel> {
        self.bert.weights().paged().unwrap()
    }

    fn counts(&self) -> ModelCounts {
        self.model().counts()
    }

    /// Drops everything but the device, on which nothing may be left.
    fn close(self) {
        let Self { device, pager, compute, bert } = self;
        drop((bert, compute, pager));
        assert_nothing_left(&device);
    }
}

fn assert_close(found: &[f32], case: &Case) {
    assert_eq!(found.len(), case.embedding.len());
    for (place, (found, expected)) in found.iter().zip(&case.embedding).enumerate() {
        assert!(
            (f64::from(*found) - expected).abs() < 1e-5,
            "number {place} of `{}`: {found}, the reference says {expected}",
            case.sentence
        );
    }
}

/// A sentence of any length, as ids of whole words.
fn long_ids(count: u32, seed: u32) -> Vec<u32> {
    let words = (0..count - 2).map(|place| 2000 + (place * 7919 + seed * 104_729) % 20_000);
    std::iter::once(101).chain(words).chain(std::iter::once(102)).collect()
}

#[test]
fn the_reference_is_that_of_the_published_model() {
    let published = [-0.033_877, 0.091_942, 0.048_701, -0.034_884];
    for (found, published) in reference()[0].embedding.iter().zip(published) {
        assert!((found - published).abs() < 1e-6);
    }
}

#[test]
fn the_tokeniser_gives_the_ids_of_the_reference() {
    let tokens = Tokens::open(&folder()).unwrap();
    for case in reference() {
        assert_eq!(tokens.ids(&case.sentence).unwrap(), case.ids, "{}", case.sentence);
    }
}

#[test]
fn a_card_that_the_model_never_fits_on_gives_the_reference() {
    let card = Card::open(SMALL_CARD);
    let mut first = Vec::new();
    // Passes differ in what they find on the card, never in what they give.
    for pass in 0..4 {
        for (number, case) in reference().iter().enumerate() {
            let found = card.embed(&case.ids);
            assert_close(&found, case);
            if pass == 0 {
                first.push(found);
            } else {
                assert_eq!(found, first[number], "pass {pass}");
            }
        }
    }
    let figures = card.pager.figures();
    assert!(figures.peak_bytes <= 24 * MIB - figures.headroom_bytes, "{figures:?}");
    assert!(card.counts().streamed > 0, "{:?}", card.counts());
    assert_eq!(card.device.counts().device_sync, 0);
    card.close();
}

#[test]
fn only_the_embedding_comes_back_to_the_host() {
    let card = Card::open(SMALL_CARD);
    let case = &reference()[0];
    let passes = 3;
    for _ in 0..passes {
        card.embed(&case.ids);
    }
    let counts = card.device.counts();
    assert_eq!(counts.copy_to_host, passes);
    assert_eq!(counts.bytes_to_host, passes * 384 * 4);
    card.close();
}

#[test]
fn the_words_table_is_never_brought_in_for_a_sentence() {
    let card = Card::open(120);
    let case = &reference()[0];
    card.embed(&case.ids);
    let model = card.model();
    let words = model.unit("embeddings.word_embeddings").unwrap();
    assert!(!model.is_resident(words));
    // Each of the three tables gives a row of 384 numbers a token.
    let rows = 3 * case.ids.len() as u64 * 384 * 4;
    let table: u64 = 30_522 * 384 * 4;
    let most = model.figures().weights_bytes - table + rows + 2 * 2 * MIB;
    assert!(card.counts().copied_bytes <= most, "{:?}, at most {most}", card.counts());
    card.close();
}

#[test]
fn room_for_all_but_the_words_table_is_enough() {
    // 43 MiB are faulted, the words table of 45 MiB only by rows. In the first passes the pager cannot know.
    let card = Card::open(64);
    let case = &reference()[0];
    for _ in 0..6 {
        card.embed(&case.ids);
    }
    let before = card.counts();
    card.embed(&case.ids);
    let counts = card.counts();
    assert_eq!(counts.copied_bytes - before.copied_bytes, 3 * case.ids.len() as u64 * 384 * 4);
    assert_eq!(counts.streamed, before.streamed);
    card.close();
}

#[test]
fn memory_that_activations_gave_back_goes_to_weights() {
    // 500 tokens take more than half of this card; the weights find room only in what the pool no longer uses.
    let card = Card::open(14);
    let found = card.embed(&long_ids(500, 2));
    let length: f32 = found.iter().map(|number| number * number).sum();
    assert!((length - 1.0).abs() < 1e-5);
    card.close();
}

#[test]
fn a_card_far_too_small_still_gives_the_reference() {
    // No layer fits: its matrices come in pieces of rows.
    let card = Card::on(common::small_card(512 << 10));
    for _ in 0..2 {
        assert_close(&card.embed(&reference()[0].ids), &reference()[0]);
    }
    card.close();
}

#[test]
fn cards_of_24_to_120_mib_give_the_same_bits() {
    // On the smallest some units come in pieces, on the others whole. (Far smaller cards cut so narrowly
    // that the matrix library adds in another order; those are held to the reference above.)
    // 300 tokens: heads are then taken a few at a time.
    let sentences = [reference()[1].ids.clone(), long_ids(300, 1)];
    let mut first: Option<Vec<Vec<f32>>> = None;
    for size in [24, 40, 64, 120] {
        let card = Card::open(size);
        for pass in 0..2 {
            let found: Vec<Vec<f32>> = sentences.iter().map(|ids| card.embed(ids)).collect();
            match &first {
                None => first = Some(found),
                Some(first) => assert!(*first == found, "{size} MiB, pass {pass}"),
            }
        }
        card.close();
    }
    assert_close(&first.unwrap()[0], &reference()[1]);
}

/// A manager of the card that leaves little free.
fn manager(card: &Card) -> Manager {
    let manager = Manager::new(std::slice::from_ref(&card.device));
    manager.set_knobs(|knobs| (knobs.inference_floor, knobs.reserve) = (4 * MIB, 2 * MIB));
    manager
}

impl Card {
    /// As [`Self::open`], with resident weights.
    fn resident(mib: u64) -> Self {
        let device = common::card(mib * MIB, 2 * MIB);
        let options = PagerOptions { page_locked_bytes: Some(16 * MIB), ..PagerOptions::default() };
        let pager = Pager::new(&device, options).unwrap();
        let compute = Compute::new(&device).unwrap();
        let options = ResidentOptions { page_locked_bytes: Some(48 * MIB), ..ResidentOptions::default() };
        let bert = Bert::open_resident(&pager, &folder(), &options).unwrap();
        Self { device, pager, compute, bert }
    }
}

#[test]
fn resident_partly_resident_and_paged_weights_give_the_same_bits() {
    let case = &reference()[0];
    let paged = Card::open(40);
    let expected = paged.embed(&case.ids);
    assert_close(&expected, case);
    paged.close();
    let mut last = 0;
    for size in [40, 64, 100, 120] {
        let card = Card::resident(size);
        let manager = manager(&card);
        let patcher = card.bert.weights().patcher();
        manager.load_model_gpu(&patcher, LoadOptions::default()).unwrap();
        let (loaded, whole) = (patcher.loaded_size(), patcher.model_size());
        assert!(loaded >= last, "{size} MiB");
        assert_eq!(loaded == whole, size >= 100, "{size} MiB: {loaded} of {whole}");
        last = loaded;
        for pass in 0..2 {
            assert!(card.embed(&case.ids) == expected, "{size} MiB, pass {pass}");
        }
        // After a part of it has gone, too.
        assert!(patcher.partially_unload(10 * MIB).unwrap() >= loaded.min(10 * MIB));
        assert!(card.embed(&case.ids) == expected, "{size} MiB");
        drop(patcher);
        card.close();
    }
}

/// Writes a LoRA of rank 4 on the queries and the wide layers, in both naming habits.
fn write_lora(path: &std::path::Path) {
    use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
    let mut numbers = common::Numbers(4242);
    let mut factor = |rows: usize, columns: usize| -> (Vec<usize>, Vec<u8>) {
        let bytes = (0..rows * columns)
            .flat_map(|_| (((numbers.next() % 2001) as f32 - 1000.0) / 8000.0).to_le_bytes())
            .collect();
        (vec![rows, columns], bytes)
    };
    let mut tensors: Vec<(String, (Vec<usize>, Vec<u8>))> = Vec::new();
    for layer in 0..6 {
        let key = format!("encoder.layer.{layer}.attention.self.query");
        tensors.push((format!("transformer.{key}.lora_A.weight"), factor(4, 384)));
        tensors.push((format!("transformer.{key}.lora_B.weight"), factor(384, 4)));
        let key = format!("encoder.layer.{layer}.intermediate.dense");
        tensors.push((format!("{key}.lora_down.weight"), factor(4, 384)));
        tensors.push((format!("{key}.lora_up.weight"), factor(1536, 4)));
        tensors.push((format!("{key}.alpha"), (vec![], 8.0_f32.to_le_bytes().to_vec())));
    }
    // The words table is looked up by rows.
    tensors.push(("embeddings.word_embeddings.lora_A.weight".to_owned(), factor(4, 384)));
    tensors.push(("embeddings.word_embeddings.lora_B.weight".to_owned(), factor(30_522, 4)));
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    serialize_to_file(views, None, path).unwrap();
}

#[test]
fn a_lora_gives_the_same_bits_paged_streamed_and_baked_in() {
    let case = &reference()[0];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lora.safetensors");
    write_lora(&path);
    let lora = LoraFile::open(&path).unwrap();
    let loras = [Lora { file: &lora, strength: 0.75 }];

    // The reference: wholly resident, baked in.
    let card = Card::resident(160);
    let on_card = manager(&card);
    let patched = card.bert.with_loras(&loras).unwrap();
    let patcher = patched.weights().patcher();
    let baked = LoadOptions { force_patch_weights: true, ..LoadOptions::default() };
    on_card.load_model_gpu(&patcher, baked).unwrap();
    assert_eq!(patcher.loaded_size(), patcher.model_size());
    let embed = |card: &Card, bert: &Bert| {
        let stream = card.pager.stream().unwrap();
        bert.embed(&card.compute, &stream, &case.ids).unwrap()
    };
    let expected = embed(&card, &patched);
    let difference = |found: &[f32]| -> f64 {
        found.iter().zip(&case.embedding).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
    };
    assert!(difference(&expected) > 0.01, "the LoRA changes something");
    // The clone without patches gets the weights back as they were.
    let plain = card.bert.weights().patcher();
    on_card.load_model_gpu(&plain, LoadOptions::default()).unwrap();
    assert_close(&embed(&card, &card.bert), case);
    drop((plain, patcher, patched));
    card.close();

    for size in [40, 80] {
        for resident in [true, false] {
            let card = if resident { Card::resident(size) } else { Card::open(size) };
            let on_card = manager(&card);
            let patched = card.bert.with_loras(&loras).unwrap();
            for bert in [&patched, &card.bert, &patched] {
                let patcher = bert.weights().patcher();
                on_card.load_model_gpu(&patcher, LoadOptions::default()).unwrap();
                let found = embed(&card, bert);
                if std::ptr::eq(bert, &raw const patched) {
                    assert!(found == expected, "{size} MiB, resident {resident}: {}", difference(&found));
                } else {
                    assert_close(&found, case);
                }
                patcher.partially_unload(6 * MIB).unwrap();
            }
            drop(patched);
            card.close();
        }
    }
}

#[test]
fn threads_that_embed_at_once_get_what_each_would_alone() {
    let sentences: Vec<Vec<u32>> =
        (0..4).map(|number| long_ids(20 + 13 * number, number)).chain([reference()[0].ids.clone()]).collect();
    let alone: Vec<Vec<f32>> = {
        let card = Card::open(120);
        let found = sentences.iter().map(|ids| card.embed(ids)).collect();
        card.close();
        found
    };
    let card = Card::open(SMALL_CARD);
    std::thread::scope(|scope| {
        for (ids, alone) in sentences.iter().zip(&alone) {
            let card = &card;
            scope.spawn(move || {
                for _ in 0..3 {
                    assert!(card.embed(ids) == *alone, "a sentence of {} tokens", ids.len());
                }
            });
        }
    });
    card.close();
}

#[test]
fn a_sentence_that_the_model_cannot_take_is_refused() {
    let card = Card::open(SMALL_CARD);
    let stream = card.pager.stream().unwrap();
    let embed = |ids: &[u32]| card.bert.embed(&card.compute, &stream, ids);
    assert!(matches!(embed(&[]), Err(RunnerError::NoTokens)));
    let text = embed(&long_ids(513, 3)).unwrap_err().to_string();
    assert!(text.contains("513") && text.contains("512"), "{text}");
    // A token that the words table has no row for.
    let text = embed(&[101, 40_000, 102]).unwrap_err().to_string();
    assert!(text.contains("40000") && text.contains("word_embeddings"), "{text}");
    drop(stream);
    card.close();
}

#[test]
fn a_missing_model_says_how_to_get_it() {
    let folder = tempfile::tempdir().unwrap();
    let error = ModelFolder::new(folder.path()).weights().unwrap_err();
    assert!(error.is_bad_input());
    assert!(error.to_string().contains("tests/fetch-models.sh"), "{error}");
}
