//! Emulated cards and passes over a model on one.

use std::sync::Arc;
use std::time::Duration;

use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::device::{CallCounts, SharedDevice};
use vram_pager::pager::{ModelOptions, PagedModel, Pager, PagerOptions, PagerStream};
use vram_pager::units::Rate;
use vram_pager::weights::UnitId;

use super::models::ModelFile;
use super::{Numbers, Outcome};

/// The link of modelled cards, about what a card of 2020 reaches.
pub const LINK: Rate = Rate(25_000_000_000);

/// A card without bytes: addresses, accounts and the clock.
pub fn hollow(bytes: u64) -> Outcome<Arc<EmulatedDevice>> {
    let options = EmulatedOptions { keeps_bytes: false, link: LINK, ..EmulatedOptions::new(bytes) };
    Ok(EmulatedDevice::open(options)?)
}

/// How much of the card a row leaves free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Headroom {
    None,
    /// The pager's default.
    Default,
}

/// A model on a card of its own.
pub struct Setup {
    pub pager: Arc<Pager>,
    pub model: Arc<PagedModel>,
    pub stream: PagerStream,
}

impl Setup {
    /// Opens `file` on a hollow card of `card` bytes.
    pub fn hollow(file: &ModelFile, card: u64, options: PagerOptions) -> Outcome<Self> {
        Self::on(&(hollow(card)? as SharedDevice), file, options)
    }

    pub fn on(device: &SharedDevice, file: &ModelFile, options: PagerOptions) -> Outcome<Self> {
        let pager = Pager::new(device, options)?;
        let model = pager.open_model(Arc::clone(&file.index), &ModelOptions::default())?;
        let stream = pager.stream()?;
        Ok(Self { pager, model, stream })
    }

    pub fn shared(&self) -> &SharedDevice {
        self.pager.device()
    }
}

/// What a pass took and did.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// On the modelled clock.
    pub time: Duration,
    pub copied_bytes: u64,
    pub map_calls: u64,
    pub unmap_calls: u64,
    pub device_syncs: u64,
}

/// Runs every unit in order: fault, the unit's compute, release; waits for the stream at the end.
pub fn pass(model: &PagedModel, stream: &PagerStream, compute: &[Duration]) -> Outcome<Pass> {
    let device = model.pager().device();
    let before: CallCounts = device.counts();
    let began = device.now();
    for unit in 0..model.index().units().len() {
        let guard = model.fault(UnitId(u32::try_from(unit)?), stream)?;
        if let Some(&duration) = compute.get(unit)
            && !duration.is_zero()
        {
            stream.charge_compute(duration)?;
        }
        guard.release();
    }
    stream.synchronize()?;
    let after = device.counts();
    Ok(Pass {
        time: device.now().since(began),
        copied_bytes: after.bytes_to_device - before.bytes_to_device,
        map_calls: after.map - before.map,
        unmap_calls: after.unmap - before.unmap,
        device_syncs: after.device_sync - before.device_sync,
    })
}

/// How compute is spread over the units.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spread {
    /// As their bytes.
    Even,
    /// As their bytes times a seeded factor of 0.25 to 4 each, even in the factor.
    Uneven,
    /// The same, even in the factor's logarithm: more units are far from the mean.
    Logarithmic,
}

impl Spread {
    pub fn name(self) -> &'static str {
        match self {
            Self::Even => "even",
            Self::Uneven => "uneven",
            Self::Logarithmic => "log",
        }
    }
}

/// The seed of the factors.
pub const SEED: u64 = 7;

/// The compute of each unit, `total` in all.
pub fn compute(model: &PagedModel, total: Duration, spread: Spread) -> Vec<Duration> {
    compute_by(SEED, model, total, spread)
}

/// The same with factors of another seed.
#[expect(clippy::cast_precision_loss, reason = "sizes and times stay far below 2^52")]
pub fn compute_by(seed: u64, model: &PagedModel, total: Duration, spread: Spread) -> Vec<Duration> {
    let mut numbers = Numbers(seed);
    let weights: Vec<f64> = model
        .layout()
        .units()
        .map(|unit| {
            let bytes = (unit.bytes.end - unit.bytes.start) as f64;
            match spread {
                Spread::Even => bytes,
                Spread::Uneven => bytes * (0.25 + 3.75 * numbers.fraction()),
                Spread::Logarithmic => bytes * 0.25 * 16_f64.powf(numbers.fraction()),
            }
        })
        .collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| total.mul_f64(weight / sum)).collect()
}

/// The addresses of all units.
pub fn addresses(model: &PagedModel) -> Vec<u64> {
    (0..model.index().units().len())
        .filter_map(|unit| model.unit_address(UnitId(u32::try_from(unit).ok()?)))
        .map(|address| address.0)
        .collect()
}
