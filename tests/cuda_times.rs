//! What the pager learns of times from a driver's events, over the stand-in: how long a runner computes with each unit,
//! and how fast the link is.

#![cfg(feature = "cuda")]
#![expect(unsafe_code, reason = "registers raw streams")]
#![allow(clippy::unwrap_used, reason = "a helper that panics is a test that fails")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::standin::{Runner, Standin, alone};
use common::{ModelFile, assert_nothing_left, pager, small_options, unit_id};
use vram_pager::device::{self, SharedDevice};
use vram_pager::pager::{
    ASSUMED_LINK, ModelOptions, PagedModel, PagerError, PagerOptions, PagerStream, Verifier,
};
use vram_pager::units::{MIB, Rate};

/// A card that tells the rate of its link, and one that does not.
const TOLD: &str = "cuda:0,cap=16MiB,link=25GB/s";
const UNTOLD: &str = "cuda:0,cap=16MiB";

/// Large pages need few of them: the stand-in's are 2 MiB.
fn options() -> PagerOptions {
    PagerOptions { chunk_bytes: 2 * MIB, ..small_options() }
}

/// A card that holds a part of a model, and a runner whose work with each unit takes a second by the card's clock.
struct Timed {
    standin: &'static Standin,
    device: SharedDevice,
    model: Arc<PagedModel>,
    verifier: Verifier,
    stream: PagerStream,
    _file: ModelFile,
}

impl Timed {
    /// The link's rate is told, so that all times asked for are of compute.
    fn new(standin: &'static Standin, runner: Option<&Runner>) -> Self {
        Self::on(TOLD, standin, runner)
    }

    fn on(device: &str, standin: &'static Standin, runner: Option<&Runner>) -> Self {
        let file = ModelFile::new(&[(1000, 1024); 12], 34);
        let device = device::open(device).unwrap();
        let pager = pager(&device, options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        let stream = match runner {
            // SAFETY: the runner destroys it after all of this is gone.
            Some(runner) => unsafe { pager.register_raw(runner.stream) }.unwrap(),
            None => pager.stream().unwrap(),
        };
        Self { standin, device, model, verifier, stream, _file: file }
    }

    /// Faults a unit and checks its bytes; `held` says whether the work with it takes its second.
    fn unit(&self, unit: u64, held: bool) {
        let mut check = self.verifier.begin(&self.stream).unwrap();
        for piece in 0..self.model.pieces(unit_id(unit)).unwrap() {
            let guard = self.model.fault_piece(unit_id(unit), piece, &self.stream).unwrap();
            if held {
                // Streams have the numbers 1, 2, ... in the order of their creation, for us and for the stand-in.
                drop(self.standin.hold(0, self.stream.id().0));
            }
            check.tensors(&guard.tensors()).unwrap();
            guard.release();
        }
        assert_eq!(check.finish().unwrap(), []);
    }

    fn units(&self) -> u64 {
        self.model.index().units().len() as u64
    }

    fn pass(&self, held: bool) {
        (0..self.units()).for_each(|unit| self.unit(unit, held));
    }

    fn measured(&self) -> Option<Duration> {
        self.model.figures().measured_compute
    }

    fn link(&self) -> Option<Rate> {
        self.model.pager().figures().link
    }

    /// Spans of the model, each of which takes its second.
    fn spans(&self) -> u64 {
        (0..self.units()).map(|unit| u64::from(self.model.pieces(unit_id(unit)).unwrap())).sum()
    }
}

#[test]
fn each_units_compute_is_learned_in_the_first_pass_from_events_that_keep_time() {
    let (_alone, standin) = alone();
    let misuses = standin.misuses();
    {
        let card = Timed::new(standin, None);
        assert!(card.device.tells_elapsed());
        card.pass(true);
        assert_eq!(
            (card.measured(), standin.calls_of("cuEventElapsedTime")),
            (None, 0),
            "not before its end"
        );
        let counts = card.model.counts();
        assert!(counts.streamed > 0 && counts.loaded > 0, "some stay and some stream: {counts:?}");
        card.unit(0, false);
        let spans = card.spans();
        let learned = card.measured().unwrap();
        let right = Duration::from_millis(999 * spans)..Duration::from_millis(1001 * spans + 400);
        assert!(right.contains(&learned), "{learned:?} of {spans} spans");
        assert_eq!(standin.calls_of("cuEventElapsedTime"), spans, "each was asked for once");
        // Two points for each span; what is recorded from here on keeps no time.
        let timed = standin.timed_events(0);
        assert!((spans..=2 * spans).contains(&timed), "{timed} of {spans} spans");
        (1..card.units()).for_each(|unit| card.unit(unit, false));
        (0..3).for_each(|_| card.pass(true));
        let created = standin.calls_of("cuEventCreate");
        let recorded = standin.calls_of("cuEventRecord");
        (0..3).for_each(|_| card.pass(true));
        assert_eq!(standin.calls_of("cuEventCreate"), created, "events are used again");
        assert!(standin.calls_of("cuEventRecord") > recorded);
        assert_eq!((standin.timed_events(0), standin.calls_of("cuEventElapsedTime")), (timed, spans));
        assert_eq!(card.measured(), Some(learned));
    }
    assert_eq!((standin.misuses(), standin.leftovers()), (misuses, 0));
}

/// Passes on a card while a call for a time is refused, and looks at what was learned. Nothing else goes wrong.
fn without_times(device: &str, failure: &str, look: impl FnOnce(&Timed)) {
    let (_alone, standin) = alone();
    let misuses = standin.misuses();
    standin.fail(failure);
    let card = Timed::on(device, standin, None);
    let device = Arc::clone(&card.device);
    (0..4).for_each(|_| card.pass(true));
    assert!(standin.calls_of("cuEventElapsedTime") > 0, "{failure}");
    look(&card);
    device.memory().expect("no error was left behind");
    drop(card);
    assert_nothing_left(&device);
    drop(device);
    standin.fail("");
    assert_eq!((standin.misuses(), standin.leftovers()), (misuses, 0), "{failure}");
}

#[test]
fn a_time_that_cannot_be_had_leaves_the_compute_unlearned_and_everything_else_right() {
    for failure in [
        "cuEventElapsedTime@1=999",
        "cuEventElapsedTime@7+=999",
        "cuEventElapsedTime@3=600",
        "cuEventElapsedTime@1+=801",
        "cuEventElapsedTime@5=400",
        "cuEventElapsedTime@2=2",
    ] {
        without_times(TOLD, failure, |card| assert_eq!(card.measured(), None, "{failure}"));
    }
}

#[test]
fn the_rate_of_a_link_that_is_not_told_is_measured_by_the_copies() {
    let (_alone, standin) = alone();
    let misuses = standin.misuses();
    {
        let card = Timed::on(UNTOLD, standin, None);
        assert_eq!(card.device.info().link, None);
        assert_eq!(card.link(), None, "nothing was copied yet");
        (0..3).for_each(|_| card.pass(false));
        // What the stand-in's cards have by their clock, which is what its events tell.
        let link = card.link().unwrap();
        assert!(link.0.abs_diff(ASSUMED_LINK.0) <= ASSUMED_LINK.0 / 50, "{link:?}");
        // It ends: eight windows of eight batches with two points each, and two points for each unit's compute.
        (0..20).for_each(|_| card.pass(false));
        let (asked, timed) = (standin.calls_of("cuEventElapsedTime"), standin.timed_events(0));
        assert!(asked <= card.spans() + 8 * 8 * 2 && timed <= 2 * card.spans() + 16, "{asked} {timed}");
    }
    assert_eq!((standin.misuses(), standin.leftovers()), (misuses, 0));
    // One that is told is not measured.
    let card = Timed::on("cuda:0,cap=16MiB,link=50GB/s", standin, None);
    (0..3).for_each(|_| card.pass(false));
    assert_eq!(card.link(), Some(Rate(50_000_000_000)));
}

#[test]
fn a_time_that_cannot_be_had_leaves_the_link_unmeasured_and_everything_else_right() {
    // A handle that is refused is a point that tells nothing yet: it is asked again.
    for (failure, again) in [
        ("cuEventElapsedTime@1=999", false),
        ("cuEventElapsedTime@16+=801", false),
        ("cuEventElapsedTime@5=400", true),
    ] {
        without_times(UNTOLD, failure, |card| assert_eq!(card.link().is_some(), again, "{failure}"));
    }
}

/// Between two points that lie on both sides of a capture is more than compute.
#[test]
fn a_stream_that_was_captured_in_the_first_pass_is_not_measured() {
    let (_alone, standin) = alone();
    let misuses = standin.misuses();
    // A guard that is released in the capture, a fault that is refused in it, and neither.
    for (released, refused) in [(true, false), (false, true), (false, false)] {
        let holder = device::open("cuda:0").unwrap();
        let runner = Runner::new(standin);
        {
            let card = Timed::new(standin, Some(&runner));
            let units = card.units();
            (0..units - 1).for_each(|unit| card.unit(unit, false));
            let guard = card.model.fault_piece(unit_id(units - 1), 0, &card.stream).unwrap();
            if released || refused {
                standin.set_capturing(runner.stream, true);
            }
            if refused {
                let error = card.model.fault_piece(unit_id(0), 0, &card.stream).unwrap_err();
                assert!(matches!(error, PagerError::Capturing { .. }), "{error}");
                standin.set_capturing(runner.stream, false);
            }
            drop(guard);
            standin.set_capturing(runner.stream, false);
            card.stream.synchronize().unwrap();
            (0..3).for_each(|_| card.pass(false));
            assert_eq!(card.measured().is_none(), released || refused, "{released} {refused}");
        }
        drop((runner, holder));
        assert_eq!((standin.misuses(), standin.leftovers()), (misuses, 0));
    }
}
