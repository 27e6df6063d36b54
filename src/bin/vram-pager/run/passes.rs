//! The passes of a run: the model through the manager, then every unit in order, as a runner would.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use vram_pager::device::SharedDevice;
use vram_pager::device::emulated::EmulatedDevice;
use vram_pager::manager::{LoadOptions, Manager};
use vram_pager::pager::{
    Check, Guard, Mismatch, ModelOptions, PagedModel, Pager, PagerError, PagerOptions, PagerStream,
    VerifiedBy, Verifier,
};
use vram_pager::patcher::{ModelPatcher, PagedPatcher, Place};
use vram_pager::telemetry::{Recorder, Recording};
use vram_pager::units::{GIB, ModelTime, format_size};
use vram_pager::weights::{TensorIndex, UnitId};

use super::RunOptions;
use super::figures::{DeviceReport, Pass, Report};
use super::knobs::set_knobs;
use crate::interrupt;
use crate::output::{self, Failure};

/// How long a thread waits for units that other threads hold.
const PATIENCE: Duration = Duration::from_secs(60);

/// Loads the model through the manager, runs the passes, and reports.
pub(crate) fn passes(
    file: &Path,
    index: &Arc<TensorIndex>,
    device: &SharedDevice,
    options: &RunOptions,
) -> Result<Report, Failure> {
    Ok(do_passes(file, index, device, options, Record::No)?.0)
}

/// As [`passes`], with a recording of them; `emulated` is the device, if it is one.
pub(super) fn recorded_passes(
    file: &Path,
    index: &Arc<TensorIndex>,
    device: &SharedDevice,
    emulated: Option<Arc<EmulatedDevice>>,
    options: &RunOptions,
) -> Result<(Report, Recording), Failure> {
    let (report, recording) = do_passes(file, index, device, options, Record::On(emulated))?;
    let none = || Failure::Failed("the run was not recorded".to_owned());
    Ok((report, recording.ok_or_else(none)?))
}

/// Whether passes are recorded.
enum Record {
    No,
    /// Yes; with the device, if it is an emulated one.
    On(Option<Arc<EmulatedDevice>>),
}

/// The passes, and a recording of them if one is wanted.
fn do_passes(
    file: &Path,
    index: &Arc<TensorIndex>,
    device: &SharedDevice,
    options: &RunOptions,
    record: Record,
) -> Result<(Report, Option<Recording>), Failure> {
    let total = device.info().total_bytes;
    let manager = Manager::new(std::slice::from_ref(device));
    set_knobs(&manager, total, options)?;
    let headroom = manager.headroom(Place::Card(0)).map_err(|error| Failure::Failed(error.to_string()))?;
    let pager = Pager::new(
        device,
        PagerOptions {
            headroom_bytes: Some(headroom),
            page_locked_bytes: options.card.page_locked,
            ..PagerOptions::default()
        },
    )?;
    let idle: Arc<dyn vram_pager::patcher::IdleCache> = Arc::clone(&pager) as _;
    manager.register_idle_cache(Place::Card(0), &idle).map_err(|error| Failure::Failed(error.to_string()))?;
    let model = pager.open_model(Arc::clone(index), &ModelOptions::default())?;
    let patcher: Arc<dyn ModelPatcher> = PagedPatcher::new(&model, Place::Card(0));
    model.set_compute_per_gib(options.card.compute_per_gib)?;
    manager
        .load_models_gpu(std::slice::from_ref(&patcher), LoadOptions::default())
        .map_err(|error| Failure::Failed(error.to_string()))?;
    let mut run = Run::new(&model, options)?;
    if let Record::On(emulated) = record {
        run.recorder = Some(Recorder::new(&model, emulated, &run.streams, options.passes));
    }
    let report_passes = run.all(options)?;
    let recording = run.recorder.take().map(Recorder::finish);
    let figures = pager.figures();
    let counts = device.counts();
    let weights_bytes = model.figures().weights_bytes;
    let report = Report {
        model: file.display().to_string(),
        device: DeviceReport {
            kind: device.info().kind.as_str(),
            name: device.info().name.clone(),
            total_bytes: total,
            link_bytes_per_second: figures.link.map(|link| link.0),
            link_measured: device.info().link.is_none() && figures.link.is_some(),
        },
        weights_bytes,
        units: index.units().len(),
        passes: report_passes,
        resident_bytes: figures.resident_bytes,
        ring_bytes: figures.ring_bytes,
        headroom_bytes: figures.headroom_bytes,
        largest_streamed_part_bytes: model.figures().largest_streamed_part_bytes,
        peak_device_bytes: figures.peak_bytes,
        device_syncs: counts.device_sync,
        map_calls: counts.map,
        verified_units: run.verified.load(Ordering::Relaxed),
        verified_by: run.verifier.as_ref().map(|verifier| verifier.verified_by().as_str()),
        mismatches: run.mismatched.load(Ordering::Relaxed),
    };
    Ok((report, recording))
}

/// One run over one model.
struct Run<'r> {
    model: &'r Arc<PagedModel>,
    device: &'r SharedDevice,
    compute_per_gib: Option<Duration>,
    quiet: bool,
    verifier: Option<Verifier>,
    recorder: Option<Recorder>,
    streams: Vec<PagerStream>,
    bar: ProgressBar,
    next: AtomicU64,
    failed: AtomicBool,
    failure: Mutex<Option<Failure>>,
    /// The latest time of a thread at the end of the pass, in nanoseconds of the device's clock.
    pass_end: AtomicU64,
    verified: AtomicU64,
    mismatched: AtomicU64,
}

impl<'r> Run<'r> {
    fn new(model: &'r Arc<PagedModel>, options: &RunOptions) -> Result<Self, Failure> {
        let pager = model.pager();
        let verifier = if !options.verify {
            None
        } else if pager.device().info().keeps_bytes {
            Some(Verifier::new(model)?)
        } else {
            return Err(Failure::BadInput("a device with bytes=none has nothing to verify".to_owned()));
        };
        if verifier.as_ref().is_some_and(|verifier| verifier.verified_by() == VerifiedBy::Host) {
            output::note(format_args!(
                "note: {} runs no kernels: --verify reads the bytes back and compares them on the host",
                pager.device().info().name
            ));
        }
        let streams = (0..options.threads).map(|_| pager.stream()).collect::<Result<Vec<_>, _>>()?;
        let units = model.index().units().len() as u64;
        let style = ProgressStyle::with_template("{bar:40} pass {prefix} {pos}/{len} units {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        // It draws on standard error, and not at all if that is no terminal.
        let bar = if options.quiet {
            ProgressBar::hidden()
        } else {
            ProgressBar::new(units * u64::from(options.passes)).with_style(style)
        };
        Ok(Self {
            model,
            device: pager.device(),
            compute_per_gib: options.card.compute_per_gib,
            quiet: options.quiet,
            verifier,
            recorder: None,
            streams,
            bar,
            next: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            pass_end: AtomicU64::new(0),
            verified: AtomicU64::new(0),
            mismatched: AtomicU64::new(0),
        })
    }

    /// All passes; with several threads there is a barrier between two.
    fn all(&self, options: &RunOptions) -> Result<Vec<Pass>, Failure> {
        let mut passes = Vec::new();
        let mut before = self.model.counts();
        for pass in 1..=options.passes {
            self.bar.set_prefix(pass.to_string());
            self.next.store(0, Ordering::Relaxed);
            let begin = self.device.now();
            self.pass_end.store(begin.0, Ordering::Relaxed);
            if let Some(recorder) = &self.recorder {
                recorder.pass_begins(pass, &before);
            }
            let wall = Instant::now();
            if let [stream] = self.streams.as_slice() {
                self.thread(stream, 0, None);
            } else {
                let barrier = Barrier::new(self.streams.len());
                std::thread::scope(|scope| {
                    for (runner, stream) in (0..).zip(&self.streams) {
                        let barrier = &barrier;
                        scope.spawn(move || self.thread(stream, runner, Some((begin, barrier))));
                    }
                });
            }
            let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(failure) = failure {
                self.bar.finish_and_clear();
                return Err(failure);
            }
            let counts = self.model.counts();
            let end = ModelTime(self.pass_end.load(Ordering::Relaxed));
            self.device.set_now(end);
            if let Some(recorder) = &self.recorder {
                recorder.pass_ends(end, &counts);
            }
            passes.push(Pass {
                number: pass,
                h2d_bytes: counts.copied_bytes - before.copied_bytes,
                file_bytes: counts.file_bytes - before.file_bytes,
                hits: counts.hits - before.hits,
                loaded: counts.loaded - before.loaded,
                streamed: counts.streamed - before.streamed,
                modelled_ms: end.since(begin).as_secs_f64() * 1e3,
                wall_ms: wall.elapsed().as_secs_f64() * 1e3,
            });
            // What readers still bring between two passes counts for the next one.
            before = counts;
        }
        self.bar.finish_and_clear();
        Ok(passes)
    }

    /// One thread's share of a pass.
    fn thread(&self, stream: &PagerStream, runner: u32, shared: Option<(ModelTime, &Barrier)>) {
        if let Some((begin, barrier)) = shared {
            self.device.set_now(begin);
            barrier.wait();
        }
        if let Err(failure) = self.units(stream, runner) {
            self.failed.store(true, Ordering::Relaxed);
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        }
        self.pass_end.fetch_max(self.device.now().0, Ordering::Relaxed);
    }

    fn units(&self, stream: &PagerStream, runner: u32) -> Result<(), Failure> {
        let mut check = match &self.verifier {
            Some(verifier) => Some(verifier.begin(stream)?),
            None => None,
        };
        let units = self.model.index().units().len() as u64;
        loop {
            interrupt::check()?;
            let next = self.next.fetch_add(1, Ordering::Relaxed);
            if next >= units || self.failed.load(Ordering::Relaxed) {
                break;
            }
            let unit = UnitId(u32::try_from(next).unwrap_or(u32::MAX));
            self.unit(unit, stream, runner, check.as_mut())?;
            self.bar.inc(1);
        }
        if let Some(check) = &mut check {
            self.compare(check)?;
        }
        stream.synchronize().map_err(PagerError::from)?;
        Ok(())
    }

    fn unit(
        &self,
        unit: UnitId,
        stream: &PagerStream,
        runner: u32,
        mut check: Option<&mut Check<'_>>,
    ) -> Result<(), Failure> {
        let pieces = self.model.pieces(unit)?;
        if pieces > 1 && !self.quiet && self.model.say_pieces_once() {
            self.say_pieces(unit, pieces);
        }
        for piece in 0..pieces {
            interrupt::check()?;
            let deadline = Instant::now() + PATIENCE;
            let begun = self.recorder.as_ref().map(|recorder| recorder.begin(runner));
            let guard: Guard<'_> = self.model.fault_piece_when_free(unit, piece, stream, deadline)?;
            let begun = begun.zip(self.recorder.as_ref());
            let begun = begun.map(|(begun, recorder)| (begun.faulted(recorder), recorder));
            if let Some(check) = check.as_deref_mut() {
                check.tensors(&guard.tensors())?;
            }
            if let Some(per_gib) = self.compute_per_gib {
                let duration = compute_of(self.piece_bytes(unit, piece), per_gib);
                stream.charge_compute(duration).map_err(PagerError::from)?;
            }
            guard.release();
            if let Some((begun, recorder)) = begun {
                recorder.step(begun, unit, piece, self.compute_per_gib.is_some());
            }
            if let Some(check) = check.as_deref_mut()
                && check.is_nearly_full()
            {
                self.compare(check)?;
            }
        }
        if check.is_some() {
            self.verified.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Bytes of a piece's tensors on the card.
    fn piece_bytes(&self, unit: UnitId, piece: u32) -> u64 {
        let layout = self.model.layout();
        let span = layout.unit(unit).spans.start + piece;
        layout.content_bytes(layout.span(span).bytes)
    }

    fn compare(&self, check: &mut Check<'_>) -> Result<(), Failure> {
        for Mismatch { tensor, first_row, found, expected } in check.finish()? {
            let said = self.mismatched.fetch_add(1, Ordering::Relaxed);
            if said < 10 {
                self.bar.suspend(|| {
                    output::note(format_args!(
                        "MISMATCH: tensor {} from row {first_row}: {found:#018x} on the card, {expected:#018x} in the file",
                        output::printable(&tensor)
                    ));
                });
            }
        }
        Ok(())
    }

    fn say_pieces(&self, unit: UnitId, pieces: u32) {
        let place = self.model.layout().unit(unit);
        let text = format!(
            "note: unit {} ({}) is large for {}: it is taken in {pieces} pieces (said once)",
            output::printable(&self.model.index().unit_info(unit).name),
            format_size(place.bytes.end - place.bytes.start),
            self.device.info().name
        );
        self.bar.suspend(|| output::note(&text));
    }
}

/// The compute of `bytes` of weights, if a GiB takes `per_gib`.
fn compute_of(bytes: u64, per_gib: Duration) -> Duration {
    let nanos = per_gib.as_nanos() * u128::from(bytes) / u128::from(GIB);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_goes_by_bytes() {
        let per_gib = Duration::from_millis(32);
        assert_eq!(compute_of(GIB / 32, per_gib), Duration::from_millis(1));
        assert_eq!(compute_of(0, per_gib), Duration::ZERO);
        assert_eq!(compute_of(1 << 50, Duration::from_secs(3600)), Duration::from_secs(3600 << 20));
    }
}
