//! Where a device call fails under a resident model, no wait is lost: what is written next still comes after
//! the work that used the memory before.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a failure here is a failed test, and its numbers are small"
)]

mod common;

use std::sync::Arc;

use common::{ModelFile, Numbers, unit_id};
use vram_pager::device::emulated::{CallKind, EmulatedDevice, EmulatedOptions, Fault};
use vram_pager::device::{FloatType, SharedDevice, Stream, StreamPriority};
use vram_pager::pager::{Factor, PatchSet, TensorPatch, Verifier};
use vram_pager::patcher::{LoadBudget, ModelPatcher, Place, ResidentError, ResidentOptions, ResidentPatcher};
use vram_pager::units::{KIB, MIB, Rate};

/// What a runner is told.
#[derive(Default)]
struct Told(Vec<String>);

impl Told {
    /// Does something, and once more if it failed, as a runner would.
    fn again<T, E: std::fmt::Display>(&mut self, work: impl Fn() -> Result<T, E>) -> Option<T> {
        let mut once = || work().map_err(|error| self.0.push(error.to_string())).ok();
        once().or_else(once)
    }

    fn note<T, E: std::fmt::Display>(&mut self, answer: Result<T, E>) -> Option<T> {
        answer.map_err(|error| self.0.push(error.to_string())).ok()
    }
}

fn card() -> Arc<EmulatedDevice> {
    let mut options = EmulatedOptions::new(3 * MIB);
    (options.page_bytes, options.link, options.watch) = (64 * KIB, Rate(1_000_000_000), true);
    EmulatedDevice::open(options).unwrap()
}

fn patches(model: &ResidentPatcher, seed: u64) -> Result<Arc<PatchSet>, ResidentError> {
    let mut numbers = Numbers(seed);
    let mut factor = |rows: u64, columns: u64| Factor {
        dtype: FloatType::F32,
        shape: [rows, columns],
        bytes: (0..rows * columns)
            .flat_map(|_| (((numbers.next() % 101) as f32 - 50.0) / 300.0).to_le_bytes())
            .collect(),
    };
    let all = model.index().units().iter().map(|unit| {
        let tensor = model.index().tensor(&format!("{}.weight", unit.name)).unwrap();
        let shape = &model.index().tensor_info(tensor).shape;
        TensorPatch { tensor, up: factor(shape[0], 2), down: factor(2, shape[1]), scale: 0.5 }
    });
    model.patch_set(all.collect())
}

/// Loads, streams, bakes, restores, patches and unloads under kernels that nobody waits for.
fn script(device: &SharedDevice, file: &ModelFile, told: &mut Told) -> Result<(), ResidentError> {
    let options = ResidentOptions {
        page_locked_bytes: Some(MIB),
        chunk_bytes: 128 * KIB,
        ..ResidentOptions::default()
    };
    let plain = ResidentPatcher::open(device, file.index(), Place::Card(0), &options)?;
    let streams = [StreamPriority::Normal, StreamPriority::High]
        .map(|priority| Stream::new(device, priority).map(Arc::new));
    let [one, two] = streams;
    let (one, two) = (one?, two?);
    let patched = plain.clone_model();
    patched.set_patches(Some(patches(&plain, 31)?));
    let half = LoadBudget::of_bytes(i64::try_from(plain.model_size() / 2).unwrap_or(0));
    let verifiers = [
        Verifier::for_layout(device, plain.index(), plain.layout(), None)?,
        Verifier::for_layout(device, plain.index(), plain.layout(), patched.patches())?,
    ];
    let mut checks = Vec::new();
    for verifier in &verifiers {
        checks.push([verifier.begin_on(&one)?, verifier.begin_on(&two)?]);
    }
    // Whoever waits for a module's kernels learns of all before them: so not every turn gives modules back.
    let turns =
        [(0, false, 0), (1, false, 0), (0, false, 200 * KIB), (0, false, 0), (1, true, 0), (0, false, 0)];
    for (which, bake, unloaded) in turns {
        let model = [&plain, &patched][which];
        told.again(|| model.partially_load(half, bake));
        for (stream, check) in [&one, &two].into_iter().zip(&mut checks[which]) {
            for unit in (0..model.index().units().len() as u64).map(unit_id) {
                if let Some(guard) = told.again(|| model.module(unit, stream)) {
                    told.note(check.tensors(&guard.tensors()));
                }
                let tensor = model.index().unit_info(unit).tensors[0];
                drop(told.again(|| model.rows(tensor, &[0, 2, 1], stream)));
            }
            // Taken from under the kernels.
            told.again(|| model.partially_unload(unloaded));
        }
        told.again(|| model.detach(false));
    }
    // The last one closes the model under its kernels.
    drop((plain, patched));
    for check in checks.iter_mut().flatten() {
        if let Some(mismatches) = told.note(check.finish()) {
            told.0.extend(mismatches.iter().map(|mismatch| format!("checksum: {mismatch:?}")));
        }
    }
    Ok(())
}

#[test]
fn no_wait_is_lost_where_a_call_fails() {
    let file = ModelFile::new(&[(64, 512), (64, 96), (7, 13), (128, 512), (64, 256), (96, 512)], 9);
    let all = std::env::var_os("VRAM_PAGER_LONG").is_some();
    let mut runs = 0;
    for &kind in CallKind::ALL {
        let mut nth = 0;
        loop {
            nth += if nth < 30 || all { 1 } else { 13 };
            let card = card();
            card.inject(Fault::once(kind, nth));
            let mut told = Told::default();
            let ended = script(&(Arc::clone(&card) as SharedDevice), &file, &mut told);
            told.note(ended);
            let caught = card.take_caught();
            assert!(caught.is_empty(), "{kind:?} number {nth}: {caught:?}, told {:?}", told.0);
            let wrong: Vec<_> = told.0.iter().filter(|told| told.starts_with("checksum")).collect();
            assert!(wrong.is_empty(), "{kind:?} number {nth}: {wrong:?}");
            runs += 1;
            if card.faults_fired() == 0 {
                assert!(told.0.is_empty(), "nothing failed, and yet: {:?}", told.0);
                break;
            }
        }
    }
    assert!(runs > 300, "{runs} runs");
}
