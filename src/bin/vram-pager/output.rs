//! What subcommands print, and how they end.
//!
//! Standard output is written through [`print()`] and [`print_json`], which take a closed pipe for a quiet
//! end and not for a crash. Names out of files pass through [`printable`], so that a file cannot write to
//! the terminal.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

use serde::Serialize;
use vram_pager::weights::WeightsError;

/// Longer cells of a table are cut.
const MAX_CELL_CHARS: usize = 160;

/// Longer messages are cut: a name out of a damaged file may have megabytes.
const MAX_MESSAGE_CHARS: usize = 2000;

/// Why a subcommand did not do what was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It tried and failed: exit code 1.
    Failed(String),
    /// It was asked for something that cannot be: exit code 2.
    BadInput(String),
    /// Ctrl-C: exit code 130.
    Interrupted,
    /// Whoever read our output has enough: exit code 0.
    ClosedPipe,
}

impl Failure {
    /// Tells the user, and gives the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        let (text, code) = match self {
            Self::Failed(text) => (text.as_str(), 1),
            Self::BadInput(text) => (text.as_str(), 2),
            Self::Interrupted => ("interrupted", 130),
            Self::ClosedPipe => return ExitCode::SUCCESS,
        };
        let shown = shorten(text, MAX_MESSAGE_CHARS);
        // If standard error is closed as well there is nobody left to tell.
        let _ = writeln!(io::stderr(), "error: {shown}");
        ExitCode::from(code)
    }
}

impl From<WeightsError> for Failure {
    fn from(error: WeightsError) -> Self {
        let text = error.to_string();
        match error {
            // The file was good once, or the system failed us.
            WeightsError::Read { .. }
            | WeightsError::Truncated { .. }
            | WeightsError::Overwritten { .. }
            | WeightsError::Replaced { .. }
            | WeightsError::NoMemory { .. }
            | WeightsError::Map { .. } => Self::Failed(text),
            _ => Self::BadInput(text),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == ErrorKind::BrokenPipe {
            Self::ClosedPipe
        } else {
            Self::Failed(format!("cannot write to standard output: {error}"))
        }
    }
}

/// The log on standard error: what `RUST_LOG` asks for, or else `level` and above. Colours are for terminals.
pub(crate) fn start_log(level: &str) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let coloured =
        io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(coloured);
    // What cannot be written there cannot be told there. A second subscriber cannot come about: this is called
    // once.
    let _ = log.log_internal_errors(false).try_init();
}

/// Says something on standard error beside the answer. If that is closed there is nobody left to tell, which is
/// no reason to stop.
pub(crate) fn note(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints on standard output.
pub(crate) fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Failure> {
    let mut out = BufWriter::new(io::stdout().lock());
    write(&mut out)?;
    out.flush()?;
    Ok(())
}

/// Prints one JSON object and a line end on standard output.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print(|out| {
        serde_json::to_writer(&mut *out, value)?;
        writeln!(out)
    })
}

/// `text` with control characters, and what turns the direction of writing, spelled out.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(harmful) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if harmful(c) {
            let _ = write!(shown, "{}", c.escape_default());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// `text` made [`printable`], and cut to `chars` characters.
pub(crate) fn shorten(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((cut, _)) => format!("{} ...", printable(&text[..cut])),
        None => printable(text).into_owned(),
    }
}

/// `1 tensor`, `2 tensors`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// Which side of its column a cell stands on.
#[derive(Clone, Copy)]
pub(crate) enum Align {
    /// For text.
    Left,
    /// For numbers.
    Right,
}

/// Columns as wide as they need to be.
pub(crate) struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns and their heads.
    pub(crate) fn new(columns: &[(&str, Align)]) -> Self {
        Self {
            columns: columns.iter().map(|(_, align)| *align).collect(),
            rows: vec![columns.iter().map(|(head, _)| (*head).to_owned()).collect()],
        }
    }

    /// Adds a row; cells are made [`printable`] and not too long, missing ones are empty.
    pub(crate) fn row<S: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(|cell| shorten(cell.as_ref(), MAX_CELL_CHARS)).collect());
    }

    /// Writes it.
    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, align), &width) in row.iter().zip(&self.columns).zip(&widths) {
                match align {
                    Align::Left => drop(write!(line, "{cell:<width$}  ")),
                    Align::Right => drop(write!(line, "{cell:>width$}  ")),
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_cannot_write_to_the_terminal() {
        assert_eq!(printable("a.weight"), "a.weight");
        assert_eq!(printable("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
        assert_eq!(printable("\u{202e}gpj"), "\\u{202e}gpj");
        assert_eq!(printable("größe"), "größe");
    }

    #[test]
    fn a_cell_of_any_length_is_cut_and_the_table_stands() {
        let mut table = Table::new(&[("name", Align::Left)]);
        table.row(["x".repeat(1 << 20)]);
        let mut text = Vec::new();
        table.write(&mut text).unwrap();
        assert!(text.len() < 1000);
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&[("name", Align::Left), ("bytes", Align::Right)]);
        table.row(["a", "1"]);
        table.row(["longer", "1234567"]);
        let mut text = Vec::new();
        table.write(&mut text).unwrap();
        let expected = "name      bytes\na             1\nlonger  1234567\n";
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }
}
