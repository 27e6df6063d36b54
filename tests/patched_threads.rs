//! Threads that fault one model with different patches at the same time: each gets the bytes of its own.
//!
//! A change of patches once did not wait for faults under way, whose copies were then made with the new ones
//! under the old ones' number: `vram-pager stress` found it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{ModelFile, Numbers, Watchdog, assert_nothing_left, hooked_card, pager, small_options, unit_id};
use vram_pager::device::FloatType;
use vram_pager::pager::{Factor, ModelOptions, PagedModel, PatchSet, TensorPatch, Verifier};
use vram_pager::units::KIB;
use vram_pager::weights::TensorId;

/// Twelve units, 1.5 MiB in all, on a card of a third of that.
const UNITS: [(u64, u64); 12] = [(128, 512); 12];
const CARD: u64 = 512 * KIB;

/// A patch of rank 1 of every matrix, all ones times `scale`.
fn set(model: &PagedModel, scale: f32) -> Arc<PatchSet> {
    let ones = |shape: [u64; 2]| {
        let count = usize::try_from(shape[0] * shape[1]).unwrap();
        Factor { dtype: FloatType::Bf16, shape, bytes: [0x80, 0x3f].repeat(count) }
    };
    let tensors = (0..).map(TensorId).zip(model.index().tensors());
    let patches = tensors.filter(|(_, info)| info.shape.len() == 2).map(|(tensor, info)| TensorPatch {
        tensor,
        up: ones([info.shape[0], 1]),
        down: ones([1, info.shape[1]]),
        scale,
    });
    PatchSet::new(model, patches.collect()).unwrap()
}

#[test]
fn faults_of_several_sets_at_once_give_each_its_own_bytes() {
    for seed in 1..=3_u64 {
        let _watchdog = Watchdog::new(120, format!("several sets at once, seed {seed}"));
        let file = ModelFile::new(&UNITS, seed);
        let (hooks, device) = hooked_card(CARD);
        hooks.seed_delays(seed);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let sets = [None, Some(set(&model, 1.0)), Some(set(&model, -2.0))];
            let streams: Vec<_> = sets.iter().map(|_| pager.stream().unwrap()).collect();
            let verifiers: Vec<_> =
                sets.iter().map(|set| Verifier::patched(&model, set.clone()).unwrap()).collect();
            std::thread::scope(|scope| {
                for (number, ((set, stream), verifier)) in
                    (1..).zip(sets.iter().zip(&streams).zip(&verifiers))
                {
                    let model = &model;
                    scope.spawn(move || {
                        let mut numbers = Numbers(seed * 100 + number);
                        let mut check = verifier.begin(stream).unwrap();
                        for _ in 0..60 {
                            let unit = unit_id(numbers.below(UNITS.len() as u64));
                            let deadline = Instant::now() + Duration::from_secs(60);
                            let guard = model
                                .retry_while_held(deadline, || model.fault_with(set.as_ref(), unit, stream))
                                .unwrap();
                            check.tensors(&guard.tensors()).unwrap();
                            guard.release();
                        }
                        assert_eq!(check.finish().unwrap(), [], "seed {seed}, set {number}");
                    });
                }
            });
        }
        assert_nothing_left(&device);
    }
}
