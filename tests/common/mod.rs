//! What the tests share: small models written to disk, and passes over them with every byte checked.

#![allow(
    dead_code,
    unused_imports,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::cast_possible_truncation,
    reason = "each test uses a part of it, and a failure here is a failed test"
)]

mod cards;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "calls the hooks of the stand-in's library")]
#[path = "../standin/mod.rs"]
pub mod standin;
mod watchdog;

pub use cards::{Hooks, card, emulated_card, hooked_card, on_cuda, small_card};
pub(crate) use watchdog::Watchdog;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use vram_pager::device::{LiveObjects, SharedDevice};
use vram_pager::pager::{Check, PagedModel, Pager, PagerError, PagerOptions, PagerStream, Verifier};
use vram_pager::units::{KIB, MIB};
use vram_pager::weights::{TensorIndex, UnitId};

/// A deterministic stream of numbers (xorshift), so that a failing test repeats.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}

/// Writes a model of BF16 tensors with seeded bytes: each unit is a `weight` of rows x columns and a bias.
pub fn write_model(path: &Path, units: &[(u64, u64)], seed: u64) {
    let mut numbers = Numbers(seed | 1);
    let mut tensors = Vec::new();
    for (number, &(rows, columns)) in units.iter().enumerate() {
        for (name, shape) in [("weight", vec![rows, columns]), ("bias", vec![rows])] {
            let count: u64 = shape.iter().product();
            let bytes: Vec<u8> = (0..count.div_ceil(4)).flat_map(|_| numbers.next().to_le_bytes()).collect();
            let length = usize::try_from(count * 2).unwrap();
            let shape: Vec<usize> = shape.iter().map(|&dim| usize::try_from(dim).unwrap()).collect();
            tensors.push((format!("blocks.{number:03}.{name}"), shape, bytes[..length].to_vec()));
        }
    }
    let views: Vec<(String, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, shape, bytes)| {
            (name.clone(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap())
        })
        .collect();
    serialize_to_file(views, None, path).unwrap();
}

/// A folder with one model in it.
pub struct ModelFile {
    pub folder: tempfile::TempDir,
    pub path: PathBuf,
}

impl ModelFile {
    /// Writes a model of the given units.
    pub fn new(units: &[(u64, u64)], seed: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        write_model(&path, units, seed);
        Self { folder, path }
    }

    pub fn index(&self) -> Arc<TensorIndex> {
        Arc::new(TensorIndex::open(&self.path).unwrap())
    }
}

/// Twenty-four units of very different sizes, 5.2 MiB in all.
pub fn mixed_units() -> Vec<(u64, u64)> {
    (0..24_u64).map(|number| [(256, 512), (64, 96), (7, 13), (512, 512)][number as usize % 4]).collect()
}

/// Options for small cards: no headroom, little staging.
pub fn small_options() -> PagerOptions {
    PagerOptions {
        headroom_bytes: Some(0),
        page_locked_bytes: Some(16 * MIB),
        chunk_bytes: 256 * KIB,
        ..PagerOptions::default()
    }
}

/// Faults a unit, whole or in pieces as it must, and asks for a check of its bytes.
pub fn fault_and_check(
    model: &PagedModel,
    unit: UnitId,
    stream: &PagerStream,
    check: &mut Check<'_>,
) -> Result<(), PagerError> {
    for piece in 0..model.pieces(unit)? {
        let guard = model.fault_piece(unit, piece, stream)?;
        check.tensors(&guard.tensors())?;
        guard.release();
        if check.is_nearly_full() {
            assert_eq!(check.finish()?, []);
        }
    }
    Ok(())
}

/// Runs a pass over all units in order; every byte is checked.
pub fn checked_pass(model: &PagedModel, stream: &PagerStream, verifier: &Verifier) -> Result<(), PagerError> {
    let mut check = verifier.begin(stream)?;
    for unit in 0..model.index().units().len() {
        fault_and_check(model, UnitId(u32::try_from(unit).unwrap()), stream, &mut check)?;
    }
    assert_eq!(check.finish()?, []);
    Ok(())
}

/// Asserts that nothing is left on a device.
pub fn assert_nothing_left(device: &SharedDevice) {
    assert_eq!(device.live(), LiveObjects::default());
}

/// Opens a pager on a device.
pub fn pager(device: &SharedDevice, options: PagerOptions) -> Arc<Pager> {
    Pager::new(device, options).unwrap()
}

/// The bytes of a range of the device.
#[allow(unsafe_code)]
pub fn read_back(
    device: &SharedDevice,
    range: vram_pager::units::DeviceRange,
    stream: &PagerStream,
) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(range.bytes).unwrap()];
    // SAFETY: the caller holds a guard of the range; the target lives past the wait.
    unsafe { device.copy_to_host(bytes.as_mut_ptr(), range, stream.id()).unwrap() };
    stream.synchronize().unwrap();
    bytes
}

/// The number of a unit as its id.
pub fn unit_id(number: u64) -> UnitId {
    UnitId(u32::try_from(number).unwrap())
}
