//! The peer's side: what its page on PyPI tells a runner to do.
//!
//! Fault a unit; if that succeeds and the signature is another one than before, copy the unit's bytes; if it
//! fails, copy them into a buffer of one's own, each time. Copies are counted, not made: the peer leaves
//! them to the runner.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::api::{Peer, PeerModel, Standin};
use crate::common::Outcome;
use crate::common::models::synthetic;
use crate::work::{Kind, RECOVERY, SWITCH_UNITS, Work};

const GIB: f64 = 1_073_741_824.0;
/// The peer's page.
const PAGE: u64 = 32 << 20;
/// The peer asks for free memory at most so often.
const POLL: Duration = Duration::from_millis(300);

/// A model as a runner of the peer keeps it.
struct Model<'p> {
    range: PeerModel<'p>,
    units: Vec<Unit>,
}

struct Unit {
    offset: u64,
    bytes: u64,
    /// The signature of the bytes that were copied, once they were.
    signature: Option<Vec<u32>>,
    now: Vec<u32>,
}

impl<'p> Model<'p> {
    fn new(peer: &'p Peer, units: &[u64]) -> Outcome<Self> {
        let mut offset = 0;
        let units: Vec<Unit> = units
            .iter()
            .map(|&bytes| {
                let places = usize::try_from(bytes / PAGE).unwrap_or(0) + 3;
                let unit = Unit { offset, bytes, signature: None, now: vec![0; places] };
                offset += bytes.next_multiple_of(512);
                unit
            })
            .collect();
        Ok(Self { range: peer.model(offset.next_multiple_of(PAGE))?, units })
    }

    /// Bytes that a runner copies in a pass.
    fn pass(&mut self) -> u64 {
        let mut copied = 0;
        for unit in &mut self.units {
            let there = self.range.fault(unit.offset, unit.bytes, &mut unit.now) == 0;
            if !there {
                unit.signature = None;
                copied += unit.bytes;
            } else if unit.signature.as_ref() != Some(&unit.now) {
                unit.signature = Some(unit.now.clone());
                copied += unit.bytes;
            }
            self.range.unpin(unit.offset, unit.bytes);
        }
        copied
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown with three places")]
pub(crate) fn run(work: &Work) -> Outcome<f64> {
    let standin = Standin::open()?;
    let path = std::env::var("VRAM_PAGER_PEER").map_err(|_| "VRAM_PAGER_PEER names the peer's library")?;
    let peer = Peer::open(&path)?;
    let in_turn = |bytes: u64| vec![bytes / SWITCH_UNITS as u64; SWITCH_UNITS];
    let answer = match &work.kind {
        Kind::Hit { bytes } => hit(&peer, *bytes)?,
        Kind::Miss { pages } => miss(&peer, &standin, *pages)?,
        Kind::Cyclic { units, total, seed } => {
            let tensors = synthetic(units.clone(), *total, *seed);
            let sizes: Vec<u64> =
                tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>() * 2).collect();
            let mut model = Model::new(&peer, &sizes)?;
            let passes: Vec<u64> = (0..6).map(|_| model.pass()).collect();
            passes[2..].iter().copied().max().unwrap_or(0) as f64 / GIB
        }
        Kind::OneUnit { bytes } => {
            let mut model = Model::new(&peer, &[*bytes])?;
            model.pass();
            model.pass() as f64 / GIB
        }
        Kind::Switch { bytes } => {
            let switches = switches(&peer, &in_turn(*bytes))?;
            switches[2..].iter().sum::<u64>() as f64 / (switches.len() - 2) as f64 / GIB
        }
        Kind::Stops => {
            let before = standin.calls_of(c"cuCtxSynchronize");
            let switches = switches(&peer, &in_turn(3 << 30))?;
            (standin.calls_of(c"cuCtxSynchronize") - before) as f64 / switches.len() as f64
        }
        Kind::Recovery { bytes } => {
            let mut model = Model::new(&peer, &in_turn(*bytes))?;
            let mut pass = |taken: u64| -> Outcome<u64> {
                standin.set_other_bytes(taken)?;
                std::thread::sleep(POLL);
                Ok(model.pass())
            };
            let passes = RECOVERY.iter().map(|&taken| pass(taken)).collect::<Outcome<Vec<u64>>>()?;
            passes.last().copied().unwrap_or(0) as f64 / GIB
        }
    };
    if standin.misuses() > 0 {
        return Err("the peer misused the driver: see above".into());
    }
    Ok(answer)
}

/// Bytes of each of twelve switches between two models.
fn switches(peer: &Peer, units: &[u64]) -> Outcome<Vec<u64>> {
    let mut models = [Model::new(peer, units)?, Model::new(peer, units)?];
    let mut switches = Vec::new();
    for _ in 0..6 {
        for model in &mut models {
            model.range.prioritize();
            switches.push(model.pass());
        }
    }
    Ok(switches)
}

fn hit(peer: &Peer, bytes: u64) -> Outcome<f64> {
    const FAULTS: u32 = 500;
    let mut model = Model::new(peer, &[bytes; 4])?;
    model.pass();
    if model.pass() != 0 {
        return Err("the peer's unit is not resident".into());
    }
    let Model { range, units } = &mut model;
    let unit = &mut units[0];
    let mut fastest = Duration::MAX;
    for _ in 0..2000 {
        let began = Instant::now();
        for _ in 0..FAULTS {
            black_box(range.fault(black_box(unit.offset), unit.bytes, &mut unit.now));
            range.unpin(unit.offset, unit.bytes);
        }
        fastest = fastest.min(began.elapsed());
    }
    Ok(fastest.as_secs_f64() * 1e9 / f64::from(FAULTS))
}

/// The fastest of three models.
#[expect(clippy::cast_precision_loss, reason = "times of a bench")]
fn miss(peer: &Peer, standin: &Standin, pages: u64) -> Outcome<f64> {
    let mut fastest = f64::INFINITY;
    for _ in 0..3 {
        let mut model = Model::new(peer, &vec![PAGE; usize::try_from(pages)?])?;
        let (driver, began) = (standin.nanoseconds(), Instant::now());
        let copied = model.pass();
        let own = began.elapsed().as_nanos() as f64 - (standin.nanoseconds() - driver) as f64;
        if copied != pages * PAGE || model.pass() != 0 {
            return Err("the peer's model is not resident after a pass".into());
        }
        fastest = fastest.min(own / pages as f64 / 1000.0);
    }
    Ok(fastest)
}
