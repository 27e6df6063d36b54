//! Every call to a weight file in the scripted run fails in turn: reads, looks at the open file, looks at its
//! path. Whatever fails: an error that names the file or none, never a wrong byte under a guard that was given,
//! nothing left on the card, no open file left, and a clean run of the same pager afterwards works. Short and
//! interrupted reads are made good without a word.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
mod faulty_run;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use common::{Watchdog, emulated_card};
use faulty_run::{CARD, Files, script};
use parking_lot::Mutex;
use vram_pager::device::LiveObjects;
use vram_pager::pager::PagerError;
use vram_pager::weights::{FileIdentity, FileSource, TensorIndex, WeightFile, WeightsError};

/// A call to the system for a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Read,
    Identity,
    PathIdentity,
}

/// What a failing call answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    Errno(i32),
    /// At most so many bytes come.
    Short(usize),
    /// The file ends.
    Ends,
}

/// Which calls fail.
#[derive(Clone, Copy, Debug)]
struct Failing {
    call: Call,
    nth: u64,
    persistent: bool,
    answer: Answer,
}

#[derive(Default)]
struct Plan {
    failing: Option<Failing>,
    calls: [u64; 3],
    struck: u64,
}

impl Plan {
    fn strike(&mut self, call: Call) -> Option<Answer> {
        let count = &mut self.calls[call as usize];
        *count += 1;
        let failing = self.failing.filter(|failing| {
            failing.call == call && (*count == failing.nth || failing.persistent && *count > failing.nth)
        })?;
        self.struck += 1;
        Some(failing.answer)
    }
}

struct Source {
    file: File,
    path: PathBuf,
    plan: Arc<Mutex<Plan>>,
}

impl FileSource for Source {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let answer = self.plan.lock().strike(Call::Read);
        match answer {
            Some(Answer::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Answer::Short(most)) => {
                let most = most.min(buf.len());
                self.file.read_at(&mut buf[..most], offset)
            }
            Some(Answer::Ends) => Ok(0),
            None => self.file.read_at(buf, offset),
        }
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        match self.plan.lock().strike(Call::Identity) {
            Some(Answer::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(FileIdentity::from(&self.file.metadata()?)),
        }
    }

    fn path_identity(&self) -> io::Result<FileIdentity> {
        match self.plan.lock().strike(Call::PathIdentity) {
            Some(Answer::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(FileIdentity::from(&std::fs::metadata(&self.path)?)),
        }
    }
}

fn index(files: &Files, plan: &Arc<Mutex<Plan>>) -> Result<Arc<TensorIndex>, WeightsError> {
    let path = files.one.path.clone();
    let source = Source { file: File::open(&path).unwrap(), path: path.clone(), plan: Arc::clone(plan) };
    let file = WeightFile::from_source(path, Box::new(source))?;
    TensorIndex::from_files(vec![file]).map(Arc::new)
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// One run; answers how many calls failed, and the errors.
fn run(files: &Files, failing: Option<Failing>) -> (Plan, Vec<PagerError>) {
    let what = format!("{failing:?}");
    let _watchdog = Watchdog::new(60, what.clone());
    let open_before = open_files();
    let plan = Arc::new(Mutex::new(Plan { failing, ..Plan::default() }));
    let mut errors = Vec::new();
    let mut opened = index(files, &plan);
    if let Err(error) = opened {
        errors.push(error.into());
        plan.lock().failing = None;
        opened = index(files, &plan);
    }
    let opened = opened.unwrap_or_else(|error| panic!("{what}: opened again: {error}"));
    {
        let (card, device) = emulated_card(CARD, "bytes are read at their address");
        let settle = || plan.lock().failing = None;
        errors.extend(script(&device, &opened, files, &what, settle).errors);
        assert_eq!(device.live(), LiveObjects::default(), "{what}");
        assert_eq!(card.take_caught(), [], "{what}");
    }
    drop(opened);
    assert_eq!(open_files(), open_before, "{what}: files stay open");
    let plan = std::mem::take(&mut *plan.lock());
    (plan, errors)
}

#[test]
fn each_call_to_a_file_fails_and_nothing_is_lost_or_wrong() {
    const EIO: i32 = 5;
    const ENOENT: i32 = 2;
    const EINTR: i32 = 4;
    let files = Files::new();
    let (undisturbed, errors) = run(&files, None);
    assert!(errors.is_empty(), "{errors:?}");
    let mut told = 0;
    let name = files.one.path.display().to_string();
    for (call, answer, persistent) in [
        (Call::Read, Answer::Errno(EIO), false),
        (Call::Read, Answer::Errno(EIO), true),
        (Call::Read, Answer::Ends, false),
        (Call::Read, Answer::Ends, true),
        (Call::Read, Answer::Errno(EINTR), false),
        (Call::Read, Answer::Short(1), false),
        (Call::Read, Answer::Short(8191), true),
        (Call::Identity, Answer::Errno(EIO), false),
        (Call::Identity, Answer::Errno(EIO), true),
        (Call::PathIdentity, Answer::Errno(EIO), false),
        (Call::PathIdentity, Answer::Errno(ENOENT), false),
        (Call::PathIdentity, Answer::Errno(ENOENT), true),
    ] {
        let harmless = matches!(answer, Answer::Short(_) | Answer::Errno(EINTR));
        let mut nth = 1;
        while nth <= undisturbed.calls[call as usize] {
            let failing = Failing { call, nth, persistent, answer };
            let (plan, errors) = run(&files, Some(failing));
            assert!(plan.struck > 0 || nth > 3, "{failing:?} never came");
            assert!(!harmless || errors.is_empty(), "{failing:?}: {errors:?}");
            // A read ahead that fails once is asked for again by the fault that needs it.
            let must_tell = persistent && !harmless && plan.struck > 0;
            assert!(!must_tell || !errors.is_empty(), "{failing:?} went by without a word");
            told += usize::from(!errors.is_empty());
            for error in &errors {
                let text = error.to_string();
                assert!(
                    matches!(error, PagerError::Weights(_)) && text.contains(&name),
                    "{failing:?}: {text}"
                );
            }
            // Every one of the first few, then ever wider steps.
            nth += 1 + nth / if persistent { 2 } else { 4 };
        }
    }
    assert!(told > 40, "only {told} failures were told");
}
