//! A panic somewhere does not take the others with it: a runner that panics with guards held, a file whose
//! reads panic, a device call that panics under the pager's lock. Whoever waits is told, the pager goes on
//! with the right bytes, and nothing is left on the card.
//!
//! The locks do not poison (those of `parking_lot`), so these tests hold that what they guard is mended. Numbers
//! come from seeds that a failure names.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
mod wrapped;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{
    ModelFile, Numbers, Watchdog, assert_nothing_left, checked_pass, mixed_units, pager, small_card,
    small_options, unit_id,
};
use vram_pager::device::SharedDevice;
use vram_pager::pager::{ModelOptions, PagedModel, PagerError, PagerOptions, PagerStream, Verifier};
use vram_pager::units::{KIB, MIB};
use vram_pager::weights::{FileIdentity, FileSource, TensorIndex, WeightFile};
use wrapped::Wrapped;

/// What a planted panic says.
const PLANTED: &str = "planted";

/// Nearly no staging, so that every pass reads the file again.
fn rereading() -> PagerOptions {
    PagerOptions { page_locked_bytes: Some(0), ..small_options() }
}

/// Panics that are planted are not told on standard error; others are.
fn quiet() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let payload = info.payload();
            let text = payload.downcast_ref::<&str>().copied();
            if text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)) != Some(PLANTED) {
                tell(info);
            }
        }));
    });
}

/// Faults at random, holding up to three guards, and panics after `steps` with them held.
fn panicking_runner(model: &PagedModel, stream: &PagerStream, seed: u64, steps: u64) {
    let mut numbers = Numbers(seed);
    let mut held = Vec::new();
    for _ in 0..steps {
        let unit = unit_id(numbers.below(24));
        let piece = u32::try_from(numbers.below(u64::from(model.pieces(unit).unwrap()))).unwrap();
        match model.fault_piece(unit, piece, stream) {
            Ok(guard) => held.push(guard),
            Err(PagerError::Held { .. }) => held.clear(),
            Err(error) => panic!("seed {seed}: {error}"),
        }
        while held.len() > 3 {
            drop(held.remove(0));
        }
    }
    assert!(held.is_empty() && steps == 0, "{PLANTED}");
}

#[test]
fn a_runner_that_panics_with_guards_held_harms_nobody() {
    quiet();
    for seed in 1..=8 {
        let _watchdog = Watchdog::new(60, format!("panicking runners, seed {seed}"));
        let file = ModelFile::new(&mixed_units(), seed);
        let device = small_card([704, 1408, 2816, 5632][usize::try_from(seed).unwrap() % 4] * KIB);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let verifier = Verifier::new(&model).unwrap();
            let streams: Vec<_> = (0..4).map(|_| pager.stream().unwrap()).collect();
            let checks: Vec<_> = streams[2..].iter().map(|stream| verifier.begin(stream).unwrap()).collect();
            std::thread::scope(|scope| {
                for (number, stream) in (1..).zip(&streams[..2]) {
                    let model = &model;
                    scope.spawn(move || {
                        for round in 0..6 {
                            let steps = 1 + (seed * 7 + round * 3 + number) % 11;
                            let seed = seed * 64 + number * 8 + round;
                            let panic = catch_unwind(AssertUnwindSafe(|| {
                                panicking_runner(model, stream, seed, steps);
                            }));
                            let panic = panic.expect_err("it panics");
                            let text = panic.downcast_ref::<String>().map(String::as_str);
                            assert_eq!(text, Some(PLANTED), "seed {seed}");
                        }
                    });
                }
                for (stream, mut check) in streams[2..].iter().zip(checks) {
                    let model = &model;
                    scope.spawn(move || {
                        for unit in 0..48 {
                            let unit = unit_id(unit % 24);
                            for piece in 0..model.pieces(unit).unwrap() {
                                let soon = Instant::now() + Duration::from_secs(50);
                                let guard = model.fault_piece_when_free(unit, piece, stream, soon).unwrap();
                                check.tensors(&guard.tensors()).unwrap();
                            }
                            if check.is_nearly_full() {
                                assert_eq!(check.finish().unwrap(), [], "seed {seed}");
                            }
                        }
                        assert_eq!(check.finish().unwrap(), [], "seed {seed}");
                    });
                }
            });
            // No pin was left: every unit is to be had, and everything can be given back.
            checked_pass(&model, &streams[0], &verifier).unwrap();
            model.unload(u64::MAX).unwrap();
            assert_eq!(pager.figures().resident_bytes, 0, "seed {seed}: a page is still pinned");
        }
        assert_nothing_left(&device);
    }
}

/// A guard that owns what it needs, dropped by the panic of another thread.
#[test]
fn a_thread_that_panics_with_guards_of_its_own_gives_them_back() {
    quiet();
    let _watchdog = Watchdog::new(60, "owned guards");
    let file = ModelFile::new(&mixed_units(), 5);
    let device = small_card(1408 * KIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = Arc::new(pager.stream().unwrap());
        let verifier = Verifier::new(&model).unwrap();
        for unit in [0, 3, 7, 8, 11] {
            let guard = model.fault_owned(unit_id(unit), &stream);
            let guard = match guard {
                Ok(guard) => guard,
                Err(PagerError::Held { .. } | PagerError::NeverFits { .. }) => continue,
                Err(error) => panic!("{error}"),
            };
            let thread = std::thread::spawn(move || {
                let _guard = guard;
                std::panic::panic_any(PLANTED);
            });
            assert!(thread.join().is_err());
        }
        checked_pass(&model, &stream, &verifier).unwrap();
        model.unload(u64::MAX).unwrap();
        assert_eq!(pager.figures().resident_bytes, 0);
    }
    assert_nothing_left(&device);
}

/// A file whose `panics_at`-th call panics, and the ones after it.
struct Panicking {
    file: File,
    calls: Arc<AtomicU64>,
    panics_at: Arc<AtomicU64>,
    slow: Duration,
}

impl Panicking {
    fn call(&self) {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if call >= self.panics_at.load(Ordering::Relaxed) {
            std::panic::panic_any(PLANTED);
        }
    }
}

impl FileSource for Panicking {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.call();
        std::thread::sleep(self.slow);
        self.file.read_at(buf, offset)
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        self.call();
        Ok(FileIdentity::from(&self.file.metadata()?))
    }

    fn path_identity(&self) -> io::Result<FileIdentity> {
        Ok(FileIdentity::from(&self.file.metadata()?))
    }
}

/// The index of a model whose file panics, and the two numbers that say when.
fn panicking_index(file: &ModelFile, slow: Duration) -> (Arc<TensorIndex>, Arc<AtomicU64>, Arc<AtomicU64>) {
    let (calls, panics_at) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(u64::MAX)));
    let source = Panicking {
        file: File::open(&file.path).unwrap(),
        calls: Arc::clone(&calls),
        panics_at: Arc::clone(&panics_at),
        slow,
    };
    let file = WeightFile::from_source(&file.path, Box::new(source)).unwrap();
    (Arc::new(TensorIndex::from_files(vec![file]).unwrap()), calls, panics_at)
}

#[test]
fn a_reader_that_panics_tells_every_waiter_and_reads_on() {
    quiet();
    for seed in 1..=6 {
        let _watchdog = Watchdog::new(60, format!("panicking readers, seed {seed}"));
        let file = ModelFile::new(&mixed_units(), seed);
        let (index, calls, panics_at) = panicking_index(&file, Duration::ZERO);
        let device = small_card(MIB);
        {
            let pager = pager(
                &device,
                PagerOptions { readers: 1 + usize::try_from(seed).unwrap() % 3, ..rereading() },
            );
            let model = pager.open_model(index, &ModelOptions::default()).unwrap();
            let streams: Vec<_> = (0..4).map(|_| pager.stream().unwrap()).collect();
            let verifier = Verifier::new(&model).unwrap();
            checked_pass(&model, &streams[0], &verifier).unwrap();
            for _ in 0..3 {
                panics_at.store(calls.load(Ordering::Relaxed) + 1 + seed * 3, Ordering::Relaxed);
                std::thread::scope(|scope| {
                    for (number, stream) in (1..).zip(&streams) {
                        let (model, file) = (&model, &file);
                        scope.spawn(move || {
                            let mut numbers = Numbers(seed * 16 + number);
                            loop {
                                match model.fault_piece(unit_id(numbers.below(24)), 0, stream) {
                                    Ok(_) | Err(PagerError::Held { .. }) => {}
                                    Err(error @ PagerError::Reader { .. }) => {
                                        let text = error.to_string();
                                        let name = file.path.display().to_string();
                                        assert!(text.contains(&name) && text.contains(PLANTED), "{text}");
                                        break;
                                    }
                                    Err(error) => panic!("seed {seed}: {error}"),
                                }
                            }
                        });
                    }
                });
                panics_at.store(u64::MAX, Ordering::Relaxed);
                for stream in &streams {
                    checked_pass(&model, stream, &verifier).unwrap();
                }
            }
        }
        assert_nothing_left(&device);
    }
}

/// Loads that were asked for ahead are dropped with their model, whether or not they have begun, and
/// whether or not their reads panic.
#[test]
fn loads_asked_for_ahead_may_be_dropped_at_any_moment() {
    quiet();
    for seed in 1..=10_u64 {
        let _watchdog = Watchdog::new(60, format!("dropped prefetch, seed {seed}"));
        let file = ModelFile::new(&mixed_units(), seed);
        let other_file = ModelFile::new(&mixed_units(), seed + 100);
        let (index, calls, panics_at) = panicking_index(&file, Duration::from_micros(200 * (seed % 3)));
        let device = small_card(3 * MIB);
        {
            let pager = pager(&device, rereading());
            let stream = pager.stream().unwrap();
            let other = pager.open_model(other_file.index(), &ModelOptions::default()).unwrap();
            let verifier = Verifier::new(&other).unwrap();
            checked_pass(&other, &stream, &verifier).unwrap();
            let model = pager.open_model(index, &ModelOptions::default()).unwrap();
            if seed % 2 == 0 {
                panics_at.store(calls.load(Ordering::Relaxed) + seed, Ordering::Relaxed);
            }
            std::thread::scope(|scope| {
                // Brings pages in until it is through or a read panics; streamed releases copy ahead.
                let prefetching = scope.spawn(|| {
                    let _ = model.prefetch_all();
                    for unit in 0..seed {
                        let _ = model.fault_piece(unit_id(unit), 0, &stream);
                    }
                });
                let other_stream = pager.stream().unwrap();
                checked_pass(&other, &other_stream, &verifier).unwrap();
                prefetching.join().unwrap();
            });
            drop(model);
            checked_pass(&other, &stream, &verifier).unwrap();
        }
        assert_nothing_left(&device);
    }
}

/// Calls of the device that the pager makes under its lock.
const UNDER_THE_LOCK: [&str; 13] = [
    "memory",
    "pool_figures",
    "is_capturing",
    "create_frame",
    "map",
    "set_access",
    "unmap",
    "release_frame",
    "copy_to_device",
    "record",
    "stream_wait",
    "query",
    "page_lock",
];

/// The device, and what counts down to a panic in calls of one name.
fn panicking_device(inner: &SharedDevice, name: &'static str) -> (SharedDevice, Arc<AtomicI64>) {
    let left = Arc::new(AtomicI64::new(i64::MAX));
    let count = Arc::clone(&left);
    let before = move |call: &'static str| {
        // Once: whoever unwinds makes calls of its own.
        if call == name && count.fetch_sub(1, Ordering::Relaxed) == 1 {
            std::panic::panic_any(PLANTED);
        }
        Ok(())
    };
    (Wrapped::watched(inner, Box::new(before)), left)
}

/// Two passes in which call `nth` of `name` panics, then everything else that a pager does. Answers whether
/// the panic was met.
fn run_with_a_panic(name: &'static str, nth: i64, what: &str) -> bool {
    let _watchdog = Watchdog::new(60, what);
    let file = ModelFile::new(&mixed_units(), 31);
    let other_file = ModelFile::new(&mixed_units(), 32);
    let inner = small_card(1408 * KIB);
    let met;
    {
        let (device, left) = panicking_device(&inner, name);
        let pager = pager(&device, PagerOptions { readers: 1, ..small_options() });
        let stream = pager.stream().unwrap();
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        if nth % 2 == 0 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        left.store(nth, Ordering::Relaxed);
        for unit in 0..48 {
            for piece in 0..model.pieces(unit_id(unit % 24)).unwrap() {
                match model.fault_piece(unit_id(unit % 24), piece, &stream) {
                    Ok(guard) => drop(guard),
                    // Of this call, or of a release or a copy before it.
                    Err(error) => {
                        let text = error.to_string();
                        assert!(text.contains(PLANTED) && text.contains(name), "{what}: {text}");
                    }
                }
            }
        }
        met = left.load(Ordering::Relaxed) <= 0;
        left.store(i64::MAX, Ordering::Relaxed);
        // The same pager, this model and another one, on the same stream and another thread's.
        let other = pager.open_model(other_file.index(), &ModelOptions::default()).unwrap();
        let other_verifier = Verifier::new(&other).unwrap();
        for _ in 0..2 {
            checked_pass(&model, &stream, &verifier).unwrap();
            checked_pass(&other, &stream, &other_verifier).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let stream = pager.stream().unwrap();
                checked_pass(&model, &stream, &verifier).unwrap();
            });
        });
        model.unload(u64::MAX).unwrap();
        other.unload(u64::MAX).unwrap();
        assert_eq!(pager.figures().resident_bytes, 0, "{what}: a page is still pinned");
    }
    assert_nothing_left(&inner);
    met
}

#[test]
fn a_panic_under_the_pagers_lock_leaves_a_pager_that_works() {
    quiet();
    let (mut met, mut failures) = (0, Vec::new());
    for name in UNDER_THE_LOCK {
        for nth in [1, 2, 3, 5, 8, 13, 21] {
            let what = format!("call {nth} of {name} panics");
            match catch_unwind(AssertUnwindSafe(|| run_with_a_panic(name, nth, &what))) {
                Ok(once) => met += u32::from(once),
                Err(_) => failures.push(what),
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(met > 50, "only {met} of the runs met their panic");
}

/// What the tests rely on: a hang ends the whole process, and says what hung although its output is captured.
#[test]
fn a_watchdog_ends_a_test_that_hangs_and_says_which() {
    const HANGS: &str = "VRAM_PAGER_TEST_HANGS";
    const NAME: &str = "a_watchdog_ends_a_test_that_hangs_and_says_which";
    if std::env::var_os(HANGS).is_some() {
        let _watchdog = Watchdog::new(1, format!("{NAME}, number 7"));
        loop {
            std::thread::park();
        }
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME])
        .env(HANGS, "1")
        .env_remove("VRAM_PAGER_TEST_PATIENCE")
        .output()
        .unwrap();
    assert!(!child.status.success());
    let told = String::from_utf8_lossy(&child.stderr).into_owned();
    assert!(told.contains(&format!("hung for 1 s: {NAME}, number 7")), "{told}");
}
