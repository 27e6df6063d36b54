//! Our side: the pager on `cuda:0`, over the same stand-in.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vram_pager::device::{self, SharedDevice};
use vram_pager::pager::{ModelOptions, PagedModel, Pager, PagerOptions, PagerStream};
use vram_pager::weights::UnitId;

use crate::api::Standin;
use crate::common::Outcome;
use crate::common::card::{Setup, pass};
use crate::common::models::{ModelFile, synthetic, uniform};
use crate::common::null::NullDevice;
use crate::work::{Kind, RECOVERY, SWITCH_UNITS, Work};

const GIB: f64 = 1_073_741_824.0;

/// The pager asks for free memory at most so often.
const POLL: Duration = Duration::from_millis(300);

/// Little host memory is page-locked: what streams is read from the file.
fn options() -> PagerOptions {
    PagerOptions { page_locked_bytes: Some(256 << 20), ..PagerOptions::default() }
}

fn setup(device: &SharedDevice, file: &ModelFile) -> Outcome<Setup> {
    let pager = Pager::new(device, options())?;
    let model = open(&pager, file)?;
    let stream = pager.stream()?;
    Ok(Setup { pager, model, stream })
}

/// A unit is taken whole however large it is, as the peer takes it. The passes here compute nothing, and the
/// pager is told so: it need not copy ahead then, and spends no memory on it.
fn open(pager: &Arc<Pager>, file: &ModelFile) -> Outcome<Arc<PagedModel>> {
    let whole = ModelOptions {
        piece_bytes: Some(u64::MAX),
        compute_per_gib: Some(Duration::ZERO),
        ..ModelOptions::default()
    };
    Ok(pager.open_model(Arc::clone(&file.index), &whole)?)
}

#[expect(clippy::cast_precision_loss, reason = "shown with three places")]
pub(crate) fn run(work: &Work) -> Outcome<f64> {
    let standin = Standin::open()?;
    let device = device::open("cuda:0")?;
    let in_turn = |bytes: u64| ModelFile::new(&uniform(SWITCH_UNITS, bytes / SWITCH_UNITS as u64));
    let answer = match &work.kind {
        Kind::Hit { bytes } => hit(&device, *bytes)?,
        Kind::Miss { pages } => miss(*pages)?,
        Kind::Cyclic { units, total, seed } => {
            let file = ModelFile::new(&synthetic(units.clone(), *total, *seed))?;
            let setup = setup(&device, &file)?;
            let mut passes = Vec::new();
            for _ in 0..6 {
                passes.push(pass(&setup.model, &setup.stream, &[])?.copied_bytes);
            }
            passes[2..].iter().copied().max().unwrap_or(0) as f64 / GIB
        }
        Kind::OneUnit { bytes } => {
            let file = ModelFile::new(&uniform(1, bytes.next_multiple_of(2048)))?;
            let setup = setup(&device, &file)?;
            pass(&setup.model, &setup.stream, &[])?;
            pass(&setup.model, &setup.stream, &[])?.copied_bytes as f64 / GIB
        }
        Kind::Switch { bytes } => {
            let switches = switches(&device, &in_turn(*bytes)?)?;
            switches[2..].iter().sum::<u64>() as f64 / (switches.len() - 2) as f64 / GIB
        }
        Kind::Stops => {
            let before = standin.calls_of(c"cuCtxSynchronize");
            let switches = switches(&device, &in_turn(3 << 30)?)?;
            (standin.calls_of(c"cuCtxSynchronize") - before) as f64 / switches.len() as f64
        }
        Kind::Recovery { bytes } => {
            let file = in_turn(*bytes)?;
            let setup = setup(&device, &file)?;
            let step = |taken: u64| -> Outcome<u64> {
                standin.set_other_bytes(taken)?;
                std::thread::sleep(POLL);
                Ok(pass(&setup.model, &setup.stream, &[])?.copied_bytes)
            };
            let passes = RECOVERY.iter().map(|&taken| step(taken)).collect::<Outcome<Vec<u64>>>()?;
            passes.last().copied().unwrap_or(0) as f64 / GIB
        }
    };
    if standin.misuses() > 0 {
        return Err("the pager misused the driver: see above".into());
    }
    Ok(answer)
}

fn switches(device: &SharedDevice, file: &ModelFile) -> Outcome<Vec<u64>> {
    let pager = Pager::new(device, options())?;
    let models = [open(&pager, file)?, open(&pager, file)?];
    let stream: PagerStream = pager.stream()?;
    let mut switches = Vec::new();
    for _ in 0..6 {
        for model in &models {
            model.activate(None)?;
            switches.push(pass(model, &stream, &[])?.copied_bytes);
        }
    }
    Ok(switches)
}

fn hit(device: &SharedDevice, bytes: u64) -> Outcome<f64> {
    const FAULTS: u32 = 500;
    let file = ModelFile::new(&uniform(4, bytes))?;
    let setup = setup(device, &file)?;
    pass(&setup.model, &setup.stream, &[])?;
    if pass(&setup.model, &setup.stream, &[])?.copied_bytes != 0 {
        return Err("our unit is not resident".into());
    }
    let mut fastest = Duration::MAX;
    for _ in 0..2000 {
        let began = Instant::now();
        for _ in 0..FAULTS {
            let guard = setup.model.fault(black_box(UnitId(0)), &setup.stream)?;
            black_box(&guard);
            guard.release();
        }
        fastest = fastest.min(began.elapsed());
    }
    Ok(fastest.as_secs_f64() * 1e9 / f64::from(FAULTS))
}

/// The fastest of several models, on a card whose calls do nothing: a fault here asks for the bytes too, which
/// the peer leaves to its runner, so that a driver's time cannot be taken out of it.
#[expect(clippy::cast_precision_loss, reason = "times of a bench")]
fn miss(pages: u64) -> Outcome<f64> {
    const PAGE: u64 = 2 << 20;
    let file = ModelFile::new(&uniform(usize::try_from(pages)?, PAGE))?;
    let setup = setup(&NullDevice::open((pages + 16) * PAGE * 2, PAGE), &file)?;
    pass(&setup.model, &setup.stream, &[])?;
    let mut fastest = f64::INFINITY;
    let Setup { pager, model, stream } = setup;
    drop(model);
    for _ in 0..5 {
        let model = open(&pager, &file)?;
        let began = Instant::now();
        let copied = pass(&model, &stream, &[])?.copied_bytes;
        let own = began.elapsed().as_nanos() as f64;
        if copied != pages * PAGE {
            return Err("our model was there already".into());
        }
        fastest = fastest.min(own / pages as f64 / 1000.0);
    }
    Ok(fastest)
}
