//! Each mistake is caught, on the emulated card and by the stand-in driver, and nothing else is.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use safetensors::tensor::{TensorView, serialize_to_file};

use super::{Mutated, Mutation};
use crate::device::emulated::{CallKind, EmulatedDevice, EmulatedOptions, Fault};
use crate::device::{FloatType, SharedDevice};
use crate::pager::watchdog::Watchdog;
use crate::pager::{
    Factor, ModelOptions, PagedModel, Pager, PagerError, PagerOptions, PatchSet, TensorPatch, Verifier,
};
use crate::units::{KIB, Rate};
use crate::weights::{TensorId, TensorIndex, UnitId};

#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "calls the hooks of the stand-in's library")]
#[path = "../../tests/standin/mod.rs"]
mod standin;

const PAGE: u64 = 64 * KIB;

/// Room for the small model and half of the large one.
const CARD: u64 = 22 * PAGE;

/// A model of `units` matrices of 256 KiB, with finite numbers.
fn write_model(path: &std::path::Path, units: usize) {
    let bytes: Vec<u8> = (0..256 * 512_u32)
        .flat_map(|number| {
            half::bf16::from_f32(f32::from((number * 7919 % 1009) as u16) / 64.0).to_le_bytes()
        })
        .collect();
    let tensors: Vec<_> = (0..units)
        .map(|unit| {
            let mut own = bytes.clone();
            own.rotate_left(2 * (unit + 1) * 97);
            (format!("blocks.{unit}.weight"), own)
        })
        .collect();
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, bytes)| {
            let view = TensorView::new(safetensors::Dtype::BF16, vec![256, 512], bytes).unwrap();
            (name.clone(), view)
        })
        .collect();
    serialize_to_file(views, None, path).unwrap();
}

/// The files of a small and of a large model, written once.
fn files() -> &'static (tempfile::TempDir, PathBuf, PathBuf) {
    static FILES: OnceLock<(tempfile::TempDir, PathBuf, PathBuf)> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let [small, large] = ["small", "large"].map(|name| folder.path().join(format!("{name}.safetensors")));
        write_model(&small, 3);
        write_model(&large, 7);
        (folder, small, large)
    })
}

fn patches(model: &PagedModel) -> Arc<PatchSet> {
    let factor = |shape: [u64; 2]| Factor {
        dtype: FloatType::Bf16,
        shape,
        bytes: (0..shape[0] * shape[1])
            .flat_map(|number| half::bf16::from_f32(f32::from((number % 13) as u16) / 8.0).to_le_bytes())
            .collect(),
    };
    let patch = |tensor| TensorPatch {
        tensor: TensorId(tensor),
        up: factor([256, 2]),
        down: factor([2, 512]),
        scale: 0.5,
    };
    PatchSet::new(model, (0..3).map(patch).collect()).unwrap()
}

/// Collects what a runner is told.
#[derive(Default)]
struct Told(Vec<String>);

impl Told {
    fn note<T>(&mut self, answer: Result<T, PagerError>) -> Option<T> {
        answer.map_err(|error| self.0.push(error.to_string())).ok()
    }
}

/// Faults, and once more if that failed, as a runner would.
fn fault_again<'g>(
    told: &mut Told,
    fault: impl Fn() -> Result<crate::pager::Guard<'g>, PagerError>,
) -> Option<crate::pager::Guard<'g>> {
    told.note(fault()).or_else(|| told.note(fault()))
}

/// Seconds that a run may take; it takes a tenth of one, or a few under a sanitizer.
const PATIENCE: u64 = 60;

/// A run that goes through every wait of the pager without waiting for any kernel itself. Answers what a runner
/// is told: errors and wrong checksums. Once the driver refuses a launch the card is lost, and the run ends.
/// `what` is what hangs if it does not end.
fn script(device: &SharedDevice, mutation: Option<Mutation>, what: impl Into<String>) -> Vec<String> {
    let _watchdog = Watchdog::new(PATIENCE, what);
    let mut told = Told::default();
    let ended = attempt(device, mutation, &mut told);
    told.note(ended);
    told.0
}

fn options(mutation: Option<Mutation>) -> PagerOptions {
    PagerOptions {
        headroom_bytes: Some(0),
        // As few staging buffers as there can be.
        page_locked_bytes: Some(0),
        chunk_bytes: 4 * PAGE,
        readers: 1,
        mutated: Mutated(mutation),
        ..PagerOptions::default()
    }
}

fn attempt(device: &SharedDevice, mutation: Option<Mutation>, told: &mut Told) -> Result<(), PagerError> {
    let (_, small_file, large_file) = files();
    let pager = Pager::new(device, options(mutation))?;
    let (one, two) = (pager.stream()?, pager.stream()?);
    let open = |path: &PathBuf| {
        pager.open_model(Arc::new(TensorIndex::open(path).unwrap()), &ModelOptions::default())
    };
    let small = open(small_file)?;
    let verifier = Verifier::new(&small)?;
    let (mut by_one, mut by_two) = (verifier.begin(&one)?, verifier.begin(&two)?);
    // The second stream faults what is still on its way for the first.
    for unit in (0..3).map(UnitId) {
        for (stream, check) in [(&one, &mut by_one), (&two, &mut by_two)] {
            if let Some(guard) = fault_again(told, || small.fault(unit, stream)) {
                told.note(check.tensors(&guard.tensors()));
            }
        }
    }
    // Taken from under kernels that may still run.
    told.note(small.unload(u64::MAX));
    for unit in (0..3).map(UnitId) {
        if let Some(guard) = fault_again(told, || small.fault(unit, &one)) {
            told.note(by_one.tensors(&guard.tensors()));
        }
    }
    // Written anew under them.
    let set = patches(&small);
    let patched = Verifier::patched(&small, Some(Arc::clone(&set)))?;
    let mut by_patched = patched.begin(&one)?;
    let model = small.patched(&set);
    for unit in (0..3).map(UnitId) {
        if let Some(guard) = fault_again(told, || model.fault(unit, &one)) {
            told.note(by_patched.tensors(&guard.tensors()));
        }
    }
    // A guard is held while a larger model needs every frame.
    let held = told.note(model.fault(UnitId(1), &two));
    let large = open(large_file)?;
    told.note(large.activate(Some(3)));
    let of_large = Verifier::new(&large)?;
    let mut by_large = of_large.begin(&one)?;
    for _ in 0..3 {
        for unit in (0..7).map(UnitId) {
            if let Some(guard) = fault_again(told, || large.fault(unit, &one)) {
                told.note(by_large.tensors(&guard.tensors()));
            }
        }
    }
    let mut by_held = patched.begin(&two)?;
    if let Some(guard) = held {
        told.note(by_held.tensors(&guard.tensors()));
    }
    // Closed while kernels may still read it.
    drop(large);
    for check in [&mut by_one, &mut by_two, &mut by_patched, &mut by_large, &mut by_held] {
        if let Some(mismatches) = told.note(check.finish()) {
            told.0.extend(mismatches.iter().map(|mismatch| format!("checksum: {mismatch:?}")));
        }
    }
    Ok(())
}

/// What the watch caught, and what the runner was told.
struct Report {
    caught: Vec<String>,
    told: Vec<String>,
}

fn card() -> Arc<EmulatedDevice> {
    let mut options = EmulatedOptions::new(CARD);
    (options.page_bytes, options.link, options.watch) = (PAGE, Rate(1_000_000_000), true);
    EmulatedDevice::open(options).unwrap()
}

fn on_emulated(mutation: Option<Mutation>) -> Report {
    let card = card();
    card.keep_sites(true);
    let device: SharedDevice = Arc::clone(&card) as _;
    let told = script(&device, mutation, format!("{mutation:?} on the emulated card"));
    Report { caught: card.take_caught().iter().map(ToString::to_string).collect(), told }
}

/// The driver stand-in, for one test at a time, and its card.
#[cfg(feature = "cuda")]
fn open_standin() -> (parking_lot::MutexGuard<'static, ()>, &'static standin::Standin, SharedDevice) {
    static ALONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    let alone = ALONE.lock();
    let standin = standin::standin();
    standin.set_page(PAGE);
    let device = crate::device::open(&format!("cuda:0,cap={CARD}")).unwrap();
    standin.keep_sites(0);
    standin.take_told();
    (alone, standin, device)
}

#[cfg(feature = "cuda")]
fn on_standin(mutation: Option<Mutation>) -> Report {
    let (_alone, standin, device) = open_standin();
    let told = script(&device, mutation, format!("{mutation:?} over the driver stand-in"));
    Report { caught: standin.take_told(), told }
}

#[cfg(not(feature = "cuda"))]
fn on_standin(mutation: Option<Mutation>) -> Report {
    on_emulated(mutation)
}

/// Runs of a script at most: work may happen to be done when the mistake would show.
const RUNS: u32 = 8;

/// What a run on each backend gives in which the mistake shows, as `shows` says; the last one otherwise.
fn shown(mutation: Mutation, shows: impl Fn(&Report) -> bool) -> [Report; 2] {
    let run = |backend: fn(Option<Mutation>) -> Report| {
        let mut report = backend(Some(mutation));
        for _ in 1..RUNS {
            if shows(&report) {
                break;
            }
            report = backend(Some(mutation));
        }
        report
    };
    [run(on_emulated), run(on_standin)]
}

/// The watch catches `mutation` on both backends, and names both sides by their files and lines.
fn is_caught(mutation: Mutation, sides: [&str; 2]) {
    let names_both =
        |report: &Report| report.caught.iter().any(|caught| sides.iter().all(|side| caught.contains(side)));
    for report in shown(mutation, names_both) {
        assert!(names_both(&report), "{sides:?}: caught {:?}; told {:?}", report.caught, report.told);
    }
}

/// Faults more units than there are staging buffers while `hold` keeps back the stream that copies run on: as
/// long as it does, nobody can be told that one of them is done. With a pager that waits for them this would
/// not end.
fn faults_while_copies_are_held<H>(
    device: &SharedDevice,
    mutation: Mutation,
    hold: impl FnOnce(&Pager) -> H,
) -> Vec<String> {
    let _watchdog = Watchdog::new(PATIENCE, format!("{mutation:?} while copies are held back"));
    let mut told = Told::default();
    let pager = Pager::new(device, options(Some(mutation))).unwrap();
    // A driver has read what is not page-locked by the time that it has enqueued the copy.
    drop(pager.core().arena.take(1).unwrap());
    pager.core().arena.settle();
    let until = hold(&pager);
    let stream = pager.stream().unwrap();
    let index = Arc::new(TensorIndex::open(&files().1).unwrap());
    let model = pager.open_model(index, &ModelOptions::default()).unwrap();
    for unit in (0..3).map(UnitId) {
        drop(told.note(model.fault(unit, &stream)));
    }
    drop(until);
    told.0
}

fn held_on_emulated(mutation: Mutation) -> Report {
    let card = card();
    card.keep_sites(true);
    let told = faults_while_copies_are_held(&(Arc::clone(&card) as SharedDevice), mutation, |pager| {
        let copies = pager.core().control.lock().engine.stream(0).id();
        card.hold(copies, Duration::from_secs(1000)).unwrap()
    });
    Report { caught: card.take_caught().iter().map(ToString::to_string).collect(), told }
}

#[cfg(feature = "cuda")]
fn held_on_standin(mutation: Mutation) -> Report {
    let (_alone, standin, device) = open_standin();
    // The first stream of a card is the pager's for copies.
    let told = faults_while_copies_are_held(&device, mutation, |_| standin.hold(0, 1));
    Report { caught: standin.take_told(), told }
}

#[cfg(not(feature = "cuda"))]
fn held_on_standin(mutation: Mutation) -> Report {
    held_on_emulated(mutation)
}

/// The watch catches a mistake in the one run of each report, whatever the threads' luck.
fn are_caught(reports: [Report; 2], sides: [&str; 2]) {
    for Report { caught, told } in reports {
        let names_both = |caught: &String| sides.iter().all(|side| caught.contains(side));
        assert!(caught.iter().any(names_both), "{sides:?}: caught {caught:?}; told {told:?}");
    }
}

#[test]
fn without_a_mistake_nothing_is_caught() {
    for report in [on_emulated(None), on_standin(None)] {
        assert_eq!((report.caught, report.told), (Vec::new(), Vec::new()));
    }
}

/// Every call of the device fails in turn, once and from then on: the run goes on, and whatever it does then
/// still comes after the work that used the memory before. `VRAM_PAGER_LONG` leaves none of a thousand queries
/// out.
#[test]
fn no_wait_is_lost_where_a_call_fails() {
    let all = std::env::var_os("VRAM_PAGER_LONG").is_some();
    let mut runs = 0;
    for &kind in CallKind::ALL {
        for lasting in [false, true] {
            // A card that goes on refusing to say whether work is done is a lost one.
            if lasting && !TAKING.contains(&kind) {
                continue;
            }
            let mut nth = 0;
            loop {
                // The first calls one by one, then some.
                nth += if nth < 40 || all { 1 } else { 11 };
                let fault = if lasting { Fault::from_then_on(kind, nth) } else { Fault::once(kind, nth) };
                let card = card();
                card.inject(fault);
                let what =
                    format!("no_wait_is_lost_where_a_call_fails: {kind:?} number {nth}, lasting {lasting}");
                let told = script(&(Arc::clone(&card) as SharedDevice), None, what);
                let fired = card.faults_fired();
                let caught = card.take_caught();
                assert!(
                    caught.is_empty(),
                    "{kind:?} number {nth}, lasting {lasting}: {caught:?}, told {told:?}"
                );
                let wrong: Vec<_> = told.iter().filter(|told| told.starts_with("checksum")).collect();
                assert!(wrong.is_empty(), "{kind:?} number {nth}, lasting {lasting}: {wrong:?}");
                runs += 1;
                if fired == 0 || lasting && nth > 20 {
                    break;
                }
            }
        }
    }
    assert!(runs > 300, "{runs} runs");
}

/// Calls that take something, and so may go on failing without anything being lost.
const TAKING: &[CallKind] = &[
    CallKind::CreateFrame,
    CallKind::Map,
    CallKind::SetAccess,
    CallKind::CreateEvent,
    CallKind::Record,
    CallKind::CopyToDevice,
    CallKind::PoolAllocate,
    CallKind::Launch,
];

const KERNEL: &str = "src/pager/verify.rs:";
const COPY: &str = "src/transfer/engine.rs:";
const READER: &str = "src/pager/load.rs:";

#[test]
fn a_page_unmapped_without_waiting_is_caught() {
    is_caught(Mutation::UnmapWithoutWait, [KERNEL, "src/pager/claim.rs:"]);
}

#[test]
fn a_pin_given_up_without_its_stream_is_caught() {
    is_caught(Mutation::ReleaseWithoutStream, [KERNEL, "src/pager/claim.rs:"]);
}

#[test]
fn a_streamed_span_released_early_is_caught() {
    is_caught(Mutation::ReleaseWithoutFence, [KERNEL, COPY]);
}

#[test]
fn a_ring_slot_used_again_early_is_caught() {
    is_caught(Mutation::SlotWithoutWait, [KERNEL, COPY]);
}

#[test]
fn a_staging_buffer_used_again_early_is_caught() {
    let mutation = Mutation::StagingWithoutWait;
    are_caught([held_on_emulated(mutation), held_on_standin(mutation)], [COPY, READER]);
}

#[test]
fn a_staging_buffer_copied_while_its_reader_writes_is_caught() {
    let mutation = Some(Mutation::CopyWhileRead);
    are_caught([on_emulated(mutation), on_standin(mutation)], [READER, COPY]);
}

#[test]
fn bytes_written_anew_under_a_kernel_are_caught() {
    is_caught(Mutation::RewriteWithoutFence, [KERNEL, COPY]);
}

#[test]
fn a_kernel_that_does_not_wait_for_its_copy_is_caught() {
    is_caught(Mutation::KernelWithoutArrival, [COPY, KERNEL]);
}

#[test]
fn a_span_called_ready_before_its_copy_is_done_is_caught() {
    is_caught(Mutation::ReadyTooEarly, [COPY, KERNEL]);
}

#[test]
fn a_model_closed_under_a_kernel_is_caught() {
    is_caught(Mutation::CloseWithoutWait, [KERNEL, "src/pager/reclaim.rs:"]);
}

#[test]
fn a_page_taken_from_a_held_guard_is_refused_or_shows_in_its_checksum() {
    for report in [on_emulated(Some(Mutation::TakePinned)), on_standin(Some(Mutation::TakePinned))] {
        assert!(!report.told.is_empty() || !report.caught.is_empty());
    }
}

#[test]
fn stale_bytes_after_a_change_of_patches_show_in_their_checksum() {
    for report in [on_emulated(Some(Mutation::StalePatches)), on_standin(Some(Mutation::StalePatches))] {
        assert!(report.told.iter().any(|text| text.starts_with("checksum")), "{:?}", report.told);
    }
}
