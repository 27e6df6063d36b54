//! The scripted run that is made to fail: open, passes, pressure, activations, rows, patches, a switch to
//! another model and back, unload. Every step is tried whatever became of the one before, and bytes under
//! every guard that is given are compared with the file's, or with what patches make of them.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "each test uses a part of it, and a failure here is a failed test"
)]

use std::collections::HashMap;
use std::sync::Arc;

use vram_pager::device::{DeviceError, FloatType, SharedDevice, open};
use vram_pager::pager::{
    Factor, Guard, ModelOptions, PagedModel, Pager, PagerError, PagerOptions, PagerStream, PatchSet,
    TensorPatch, TensorView,
};
use vram_pager::staging::StagingError;
use vram_pager::units::KIB;
use vram_pager::weights::{TensorIndex, UnitId};

use crate::common::{ModelFile, small_options, unit_id};

/// The card: room for about half of the 0.9 MiB of a model.
pub const CARD: u64 = 512 * KIB;

/// Its page.
pub const PAGE: u64 = 64 * KIB;

fn units() -> Vec<(u64, u64)> {
    (0..9_usize).map(|number| [(128, 512), (16, 96), (160, 512)][number % 3]).collect()
}

pub fn options() -> PagerOptions {
    PagerOptions { chunk_bytes: 128 * KIB, readers: 1, ..small_options() }
}

/// Two models, and the bytes that guards must give.
pub struct Files {
    pub one: ModelFile,
    pub two: ModelFile,
    /// Opened before anything fails.
    two_index: Arc<TensorIndex>,
    /// By tensor name.
    one_bytes: HashMap<String, Vec<u8>>,
    two_bytes: HashMap<String, Vec<u8>>,
    /// The first model's with patches, as a large card made them in an undisturbed run.
    patched_bytes: HashMap<String, Vec<u8>>,
}

/// Patches of a few matrices.
fn patches(model: &PagedModel) -> Result<Arc<PatchSet>, PagerError> {
    let factor = |shape: [u64; 2]| Factor {
        dtype: FloatType::Bf16,
        shape,
        bytes: (0..shape[0] * shape[1])
            .flat_map(|number| half::bf16::from_f32(f32::from((number % 13) as u16) / 8.0).to_le_bytes())
            .collect(),
    };
    let patch = |name: &str| {
        let tensor = model.index().tensor(name).unwrap();
        let shape = &model.index().tensor_info(tensor).shape;
        TensorPatch { tensor, up: factor([shape[0], 2]), down: factor([2, shape[1]]), scale: 0.5 }
    };
    let names = ["blocks.000.weight", "blocks.001.weight", "blocks.005.weight"];
    PatchSet::new(model, names.map(patch).to_vec())
}

/// What lies at a guard's address. The script's own calls must not be those that fail, so memory is read where
/// it lies: both backends of these tests keep it in this process, at its own address.
#[allow(unsafe_code)]
fn bytes_of(address: u64, bytes: u64) -> &'static [u8] {
    // SAFETY: the caller holds the memory, waited for its stream, and reads before it lets go.
    unsafe { std::slice::from_raw_parts(address as *const u8, usize::try_from(bytes).unwrap()) }
}

fn compare(expected: &HashMap<String, Vec<u8>>, model: &PagedModel, views: &[TensorView<'_>], what: &str) {
    for view in views {
        let info = model.index().tensor_info(model.index().tensor(view.name).unwrap());
        let row = info.bytes / info.shape[0].max(1);
        let start = usize::try_from(view.rows.start * row).unwrap();
        let expected = &expected[view.name][start..start + usize::try_from(view.bytes).unwrap()];
        assert!(bytes_of(view.address.0, view.bytes) == expected, "{what}: wrong bytes of {}", view.name);
    }
}

/// Faults every unit and compares what is given; answers every error.
fn pass<'m>(
    expected: &HashMap<String, Vec<u8>>,
    model: &'m PagedModel,
    stream: &'m PagerStream,
    what: &str,
    fault: impl Fn(UnitId, u32) -> Result<Guard<'m>, PagerError>,
) -> Vec<PagerError> {
    let mut errors = Vec::new();
    for unit in 0..model.index().units().len() as u64 {
        let unit = unit_id(unit);
        for piece in 0..model.pieces(unit).unwrap() {
            match fault(unit, piece) {
                // A stream that cannot be waited for proves nothing.
                Ok(guard) => match stream.synchronize() {
                    Ok(()) => compare(expected, model, &guard.tensors(), what),
                    Err(error) => errors.push(error.into()),
                },
                Err(error) => errors.push(error),
            }
        }
    }
    errors
}

impl Files {
    pub fn new() -> Self {
        let (one, two) = (ModelFile::new(&units(), 81), ModelFile::new(&units(), 82));
        let read = |file: &ModelFile| {
            let bytes = std::fs::read(&file.path).unwrap();
            let index = file.index();
            let tensor = |info: &vram_pager::weights::TensorInfo| {
                let start = usize::try_from(info.offset).unwrap();
                (info.name.clone(), bytes[start..start + usize::try_from(info.bytes).unwrap()].to_vec())
            };
            index.tensors().iter().map(tensor).collect::<HashMap<_, _>>()
        };
        let (one_bytes, two_bytes) = (read(&one), read(&two));
        let device = open("emulated:16MiB,page=64KiB").unwrap();
        let pager = Pager::new(&device, options()).unwrap();
        let model = pager.open_model(one.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let set = patches(&model).unwrap();
        let mut patched_bytes = HashMap::new();
        for unit in 0..model.index().units().len() as u64 {
            let patched = model.patched(&set);
            let guard = patched.fault(unit_id(unit), &stream).unwrap();
            stream.synchronize().unwrap();
            for view in guard.tensors() {
                patched_bytes.insert(view.name.to_owned(), bytes_of(view.address.0, view.bytes).to_vec());
            }
        }
        assert!(one_bytes.iter().filter(|(name, bytes)| patched_bytes[*name] != **bytes).count() == 3);
        let two_index = two.index();
        Self { one, two, two_index, one_bytes, two_bytes, patched_bytes }
    }
}

/// The device's error, also where it came up while staging memory was asked for.
pub fn of_device(error: &PagerError) -> Option<&DeviceError> {
    match error {
        PagerError::Device(error) | PagerError::Staging(StagingError::Device(error)) => Some(error),
        _ => None,
    }
}

/// What became of a run.
pub struct Outcome {
    pub errors: Vec<PagerError>,
    /// Whether pager, stream and model could be opened, so that the failures were gone when they were dropped.
    pub finished: bool,
}

/// The run; `settle` takes the failures away, and what follows must go well, on the same pager.
pub fn script(
    device: &SharedDevice,
    one: Arc<TensorIndex>,
    files: &Files,
    what: &str,
    settle: impl Fn(),
) -> Outcome {
    let mut errors = Vec::new();
    let mut attempt = || -> Result<(), PagerError> {
        let pager = Pager::new(device, options())?;
        let stream = pager.stream()?;
        let one = pager.open_model(Arc::clone(&one), &ModelOptions::default())?;
        let plain = |expected, model, errors: &mut Vec<PagerError>| {
            let model: &PagedModel = model;
            errors.extend(pass(expected, model, &stream, what, |unit, piece| {
                model.fault_piece(unit, piece, &stream)
            }));
        };
        plain(&files.one_bytes, &one, &mut errors);
        plain(&files.one_bytes, &one, &mut errors);
        errors.extend(pager.set_headroom(128 * KIB).err());
        plain(&files.one_bytes, &one, &mut errors);
        errors.extend(pager.set_headroom(0).err());
        let activation = pager.allocate(&stream, 100 * KIB).map_err(|error| errors.push(error));
        let tensor = one.index().tensor("blocks.003.weight").unwrap();
        match one.fault_rows(tensor, &[5, 1, 99, 5], &stream) {
            Ok(rows) => match stream.synchronize() {
                Ok(()) => {
                    let expected = &files.one_bytes["blocks.003.weight"];
                    let found = bytes_of(rows.range().start.0, rows.range().bytes);
                    for (place, row) in [5, 1, 99, 5].into_iter().enumerate() {
                        let found = &found[place * 1024..(place + 1) * 1024];
                        assert!(found == &expected[row * 1024..(row + 1) * 1024], "{what}: wrong rows");
                    }
                }
                Err(error) => errors.push(error.into()),
            },
            Err(error) => errors.push(error),
        }
        let set = patches(&one)?;
        let patched = |errors: &mut Vec<PagerError>| {
            errors.extend(pass(&files.patched_bytes, &one, &stream, what, |unit, piece| {
                one.fault_piece_with(Some(&set), unit, piece, &stream)
            }));
        };
        patched(&mut errors);
        patched(&mut errors);
        plain(&files.one_bytes, &one, &mut errors);
        // Lives until the failures are gone: what cannot be unmapped cannot be given back.
        let second = pager.open_model(Arc::clone(&files.two_index), &ModelOptions::default());
        match &second {
            Ok(two) => {
                errors.extend(two.activate(Some(2)).err());
                plain(&files.two_bytes, two, &mut errors);
                plain(&files.one_bytes, &one, &mut errors);
                errors.extend(two.unload(128 * KIB).err());
            }
            Err(error) => errors.push(error.clone()),
        }
        drop(activation);
        settle();
        for round in 0..2 {
            let mut after = Vec::new();
            plain(&files.one_bytes, &one, &mut after);
            patched(&mut after);
            assert!(after.is_empty(), "{what}: afterwards, round {round}: {after:?}");
        }
        Ok(())
    };
    let ended = attempt();
    let finished = ended.is_ok();
    errors.extend(ended.err());
    Outcome { errors, finished }
}
