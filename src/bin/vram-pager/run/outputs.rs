//! The files that a run writes about itself: `--report` and `--trace`.
//!
//! A file is opened under another name beside its own before the run begins, so that one that cannot be
//! written is refused while nothing has happened, and takes its name only when it is whole. The other name is
//! known to [`Scratch`]: Ctrl-C leaves nothing.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use vram_pager::telemetry::{Recording, write_report, write_trace};
use vram_pager::weights::{TensorIndex, WeightFile};

use crate::interrupt::{self, Scratch};
use crate::output::Failure;

/// Where a run writes about itself.
#[derive(clap::Args, Clone, Default)]
pub(crate) struct OutputArgs {
    /// Write a page with pictures of the run: link, compute, stalls, and where every page was
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// Write a trace that <https://ui.perfetto.dev> opens
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
}

/// The files, opened.
pub(super) struct Outputs {
    report: Option<OutputFile>,
    trace: Option<OutputFile>,
}

impl Outputs {
    /// Opens what is asked for.
    ///
    /// # Errors
    /// A file that cannot be written, that is one of the model's, or twice the same.
    pub(super) fn open(args: &OutputArgs, index: &TensorIndex, file: &Path) -> Result<Self, Failure> {
        let model = index.files().iter().map(WeightFile::path).chain([file]);
        let mut taken: Vec<_> = model.map(|path| (path.to_owned(), "it is the model's")).collect();
        let mut open = |path: &Option<PathBuf>| -> Result<_, Failure> {
            let Some(path) = path else { return Ok(None) };
            let opened = OutputFile::open(path, &taken)?;
            taken.push((path.clone(), "it is to be written twice, as --report and as --trace"));
            Ok(Some(opened))
        };
        Ok(Self { report: open(&args.report)?, trace: open(&args.trace)? })
    }

    /// Whether a recording is wanted.
    pub(super) fn any(&self) -> bool {
        self.report.is_some() || self.trace.is_some()
    }

    /// Writes everything; no file takes its name before all are whole.
    pub(super) fn write(self, recording: &Recording) -> Result<(), Failure> {
        let Self { mut report, mut trace } = self;
        if let Some(report) = &mut report {
            report.write(|out| write_report(recording, out))?;
        }
        if let Some(trace) = &mut trace {
            trace.write(|out| write_trace(recording, out))?;
        }
        [report, trace].into_iter().flatten().try_for_each(OutputFile::finish)
    }
}

/// A file that is not finished.
struct OutputFile {
    out: PathBuf,
    scratch: Scratch,
    file: BufWriter<Checked>,
}

impl OutputFile {
    fn open(out: &Path, taken: &[(PathBuf, &str)]) -> Result<Self, Failure> {
        let refuse =
            |why: &dyn std::fmt::Display| Failure::BadInput(format!("cannot write {}: {why}", out.display()));
        if let Some((_, why)) = taken.iter().find(|(other, _)| is_same(other, out)) {
            return Err(refuse(why));
        }
        match fs::symlink_metadata(out) {
            Ok(there) if !there.is_file() => return Err(refuse(&"not a regular file")),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(refuse(&error)),
            _ => {}
        }
        let Some(name) = out.file_name() else { return Err(refuse(&"not a file's name")) };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.part", std::process::id()));
        let scratch = Scratch::new(out.with_file_name(hidden));
        let file = File::create_new(scratch.path()).map_err(|error| refuse(&error))?;
        Ok(Self { out: out.to_owned(), scratch, file: BufWriter::new(Checked(file)) })
    }

    fn write(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Failure> {
        let written = write(&mut self.file).and_then(|()| self.file.flush());
        interrupt::check()?;
        written.map_err(|error| self.failed(&error))
    }

    fn finish(self) -> Result<(), Failure> {
        interrupt::check()?;
        fs::rename(self.scratch.path(), &self.out).map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::Failed(format!("cannot write {}: {error}", self.out.display()))
    }
}

/// A file whose writing ends when the user presses Ctrl-C.
struct Checked(File);

impl Write for Checked {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if interrupt::check().is_err() {
            // Not of the kind `Interrupted`, which means to try again.
            return Err(io::Error::other("interrupted"));
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Whether two paths name one file, which may not be there yet.
fn is_same(one: &Path, other: &Path) -> bool {
    let whole = |path: &Path| {
        if let Ok(real) = path.canonicalize() {
            return Some(real);
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        Some(folder.unwrap_or(Path::new(".")).canonicalize().ok()?.join(path.file_name()?))
    };
    match (whole(one), whole(other)) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}
