//! A weight file that changes while it is used ends in an error that names file, tensor and offset: no
//! signal, no hang, no wrong byte under a guard, nothing left on the card; and the same pager then runs a
//! good model. The same for what a disk does: short reads, interrupted ones, I/O errors.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{
    ModelFile, Numbers, Watchdog, assert_nothing_left, checked_pass, mixed_units, pager, small_card,
    small_options, unit_id, write_model,
};
use vram_pager::pager::{ModelOptions, PagedModel, PagerError, PagerOptions, PagerStream, Verifier};
use vram_pager::units::MIB;
use vram_pager::weights::{FileIdentity, FileSource, TensorIndex, WeightFile};

/// Nearly no staging, so that every pass reads the file again.
fn rereading() -> PagerOptions {
    PagerOptions { page_locked_bytes: Some(0), ..small_options() }
}

/// Faults units from `from` on until one fails. A guard that is given must hold the right bytes, which
/// `sums` knows from before the change.
fn faults_until_error(
    model: &PagedModel,
    stream: &PagerStream,
    verifier: &Verifier,
    from: u64,
) -> Option<PagerError> {
    let mut check = verifier.begin(stream).unwrap();
    let units = model.index().units().len() as u64;
    let mut error = None;
    'pass: for unit in from..2 * units {
        let unit = unit_id(unit % units);
        for piece in 0..model.pieces(unit).unwrap() {
            match model.fault_piece(unit, piece, stream) {
                Ok(guard) => check.tensors(&guard.tensors()).unwrap(),
                Err(refused) => {
                    error = Some(refused);
                    break 'pass;
                }
            }
        }
    }
    assert_eq!(check.finish().unwrap(), [], "a guard gave bytes of a changed file");
    error
}

/// What happens to the file.
type Change = fn(&Path);

const CHANGES: [(&str, Change); 6] = [
    ("truncated to half", |path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    }),
    ("truncated to nothing", |path| {
        OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
    }),
    ("replaced", |path| {
        let other = path.with_extension("other");
        write_model(&other, &mixed_units(), 999);
        fs::rename(&other, path).unwrap();
    }),
    ("overwritten", |path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        let length = file.metadata().unwrap().len();
        file.write_all_at(&[0x5A; 4096], length / 2).unwrap();
    }),
    ("unlinked", |path| fs::remove_file(path).unwrap()),
    ("grown", |path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        let length = file.metadata().unwrap().len();
        file.write_all_at(&[1], length).unwrap();
    }),
];

#[test]
fn a_changed_file_is_a_typed_error_and_the_pager_goes_on_with_a_good_one() {
    for (what, change) in CHANGES {
        // After a whole pass, and in the middle of one.
        for middle in [0, 7] {
            let _watchdog = Watchdog::new(60, what);
            let file = ModelFile::new(&mixed_units(), 21);
            let good = ModelFile::new(&mixed_units(), 22);
            let device = small_card(MIB);
            {
                let pager = pager(&device, rereading());
                let stream = pager.stream().unwrap();
                let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
                let verifier = Verifier::new(&model).unwrap();
                // Also teaches the verifier the sums of the file as it was.
                checked_pass(&model, &stream, &verifier).unwrap();
                for unit in 0..middle {
                    let _ = model.fault_piece(unit_id(unit), 0, &stream).unwrap();
                }
                change(&file.path);
                let error = faults_until_error(&model, &stream, &verifier, middle)
                    .unwrap_or_else(|| panic!("{what}: nobody noticed"));
                let PagerError::Weights(error) = error else { panic!("{what}: {error}") };
                let text = error.to_string();
                assert!(text.contains("model.safetensors"), "{what}: {text}");
                assert!(text.contains("blocks."), "{what}: no tensor in: {text}");
                assert!(text.contains("offset") || text.contains("byte"), "{what}: no offset in: {text}");
                // It fails again in the same way, and harms nobody.
                let again = faults_until_error(&model, &stream, &verifier, 0);
                assert!(matches!(again, Some(PagerError::Weights(_))), "{what}: {again:?}");
                let other = pager.open_model(good.index(), &ModelOptions::default()).unwrap();
                let other_verifier = Verifier::new(&other).unwrap();
                for _ in 0..2 {
                    checked_pass(&other, &stream, &other_verifier).unwrap();
                }
                drop((verifier, model));
                for _ in 0..2 {
                    checked_pass(&other, &stream, &other_verifier).unwrap();
                }
            }
            assert_nothing_left(&device);
        }
    }
}

#[test]
fn all_threads_that_wait_for_a_file_that_fails_are_told() {
    for seed in 1..=4 {
        let _watchdog = Watchdog::new(60, format!("threads on a file that fails, seed {seed}"));
        let file = ModelFile::new(&mixed_units(), seed);
        let device = small_card(MIB);
        {
            let pager = pager(&device, rereading());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let streams: Vec<_> = (0..4).map(|_| pager.stream().unwrap()).collect();
            std::thread::scope(|scope| {
                for (number, stream) in (1..).zip(&streams) {
                    let model = &model;
                    scope.spawn(move || {
                        let mut numbers = Numbers(seed * 16 + number);
                        loop {
                            let unit = unit_id(numbers.below(24));
                            match model.fault_piece(unit, 0, stream) {
                                Err(PagerError::Weights(_)) => break,
                                Ok(_) | Err(PagerError::Held { .. }) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                    });
                }
                std::thread::sleep(std::time::Duration::from_millis(5 * seed));
                OpenOptions::new().write(true).open(&file.path).unwrap().set_len(1000).unwrap();
            });
        }
        assert_nothing_left(&device);
    }
}

/// A file whose reads come short, are interrupted, or fail: the `fails_at`-th of them.
struct Unwell {
    file: File,
    numbers: std::sync::Mutex<Numbers>,
    reads: Arc<AtomicU64>,
    fails_at: Arc<AtomicU64>,
}

impl FileSource for Unwell {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.reads.fetch_add(1, Ordering::Relaxed) + 1;
        if read >= self.fails_at.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        let choice = self.numbers.lock().unwrap().below(4);
        match choice {
            0 => Err(io::ErrorKind::Interrupted.into()),
            1 if buf.len() > 2 => {
                let short = buf.len() / 2;
                self.file.read_at(&mut buf[..short], offset)
            }
            _ => self.file.read_at(buf, offset),
        }
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        Ok(FileIdentity::from(&self.file.metadata()?))
    }

    fn path_identity(&self) -> io::Result<FileIdentity> {
        self.identity()
    }
}

#[test]
fn short_and_interrupted_reads_are_made_good_and_a_failing_disk_is_named() {
    for seed in 1..=6 {
        let _watchdog = Watchdog::new(60, format!("unwell disk, seed {seed}"));
        let model_file = ModelFile::new(&mixed_units(), seed);
        let (reads, fails_at) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(u64::MAX)));
        let source = Unwell {
            file: File::open(&model_file.path).unwrap(),
            numbers: std::sync::Mutex::new(Numbers(seed)),
            reads: Arc::clone(&reads),
            fails_at: Arc::clone(&fails_at),
        };
        let file = WeightFile::from_source(&model_file.path, Box::new(source)).unwrap();
        let index = Arc::new(TensorIndex::from_files(vec![file]).unwrap());
        let device = small_card(MIB);
        {
            let pager = pager(&device, rereading());
            let model = pager.open_model(index, &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            for _ in 0..2 {
                checked_pass(&model, &stream, &verifier).unwrap();
            }
            fails_at.store(reads.load(Ordering::Relaxed) + 5 * seed, Ordering::Relaxed);
            let error = faults_until_error(&model, &stream, &verifier, 0).expect("the disk fails");
            let text = error.to_string();
            assert!(matches!(error, PagerError::Weights(_)), "{text}");
            assert!(text.contains("blocks.") && text.contains("os error 5"), "{text}");
            // A disk that recovers is read again: nothing of the failure stays.
            fails_at.store(u64::MAX, Ordering::Relaxed);
            for _ in 0..2 {
                checked_pass(&model, &stream, &verifier).unwrap();
            }
        }
        assert_nothing_left(&device);
    }
}
