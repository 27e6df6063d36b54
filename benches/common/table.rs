//! Arguments, and rows as a table or as JSON.

use serde::Serialize;

/// What every bench without a harness takes: `--json` prints rows as JSON, `--check` fails if a row misses
/// its limit, other words are kept for the bench; a row runs if it holds every word without a dash.
pub struct Args {
    pub json: bool,
    pub check: bool,
    pub words: Vec<String>,
    pub options: Vec<String>,
}

impl Args {
    pub fn read() -> Self {
        let mut args = Self { json: false, check: false, words: Vec::new(), options: Vec::new() };
        for word in std::env::args().skip(1) {
            match word.as_str() {
                // Cargo's own.
                "--bench" => {}
                "--json" => args.json = true,
                "--check" => args.check = true,
                _ if word.starts_with("--") => args.options.push(word),
                _ => args.words.push(word),
            }
        }
        args
    }

    /// Whether `--name` was given.
    pub fn has(&self, name: &str) -> bool {
        self.options.iter().any(|option| option == name)
    }

    /// The value of `--name=value`.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.options.iter().find_map(|option| option.strip_prefix(name)?.strip_prefix('='))
    }

    pub fn wants(&self, row: &str) -> bool {
        self.words.iter().all(|word| row.contains(word.as_str()))
    }
}

/// Rows under a heading, printed as they come, or all at the end as JSON.
pub struct Report<R> {
    args: Args,
    rows: Vec<R>,
    misses: usize,
    /// Those of them whose limit nothing could keep.
    least: usize,
    total: usize,
}

/// A row of a report.
pub trait Row: Serialize {
    /// The columns' names and widths.
    const COLUMNS: &'static [(&'static str, usize)];

    fn cells(&self) -> Vec<String>;

    /// Whether the row keeps its limit.
    fn holds(&self) -> bool;

    /// Whether a row that does not is at what nothing could be better than: it tells of the limit, then, and not of the
    /// pager.
    fn is_least(&self) -> bool {
        false
    }
}

impl<R: Row> Report<R> {
    pub fn new(args: Args) -> Self {
        let report = Self { args, rows: Vec::new(), misses: 0, least: 0, total: 0 };
        if !report.args.json {
            let heads: Vec<String> = R::COLUMNS.iter().map(|(name, _)| (*name).to_owned()).collect();
            println!("{}", line::<R>(&heads));
        }
        report
    }

    pub fn args(&self) -> &Args {
        &self.args
    }

    pub fn add(&mut self, row: R) {
        self.total += 1;
        let mark = match (row.holds(), row.is_least()) {
            (true, _) => "",
            (false, true) => "  OVER, AT THE LEAST",
            (false, false) => "  OVER",
        };
        self.misses += usize::from(!row.holds());
        self.least += usize::from(!row.holds() && row.is_least());
        if self.args.json {
            self.rows.push(row);
        } else {
            println!("{}{mark}", line::<R>(&row.cells()));
        }
    }

    /// Ends the report; the exit status says, if asked to, whether a row missed.
    pub fn end(self) -> super::Outcome {
        if self.args.json {
            println!("{}", serde_json::to_string_pretty(&self.rows)?);
        } else {
            let least = match self.least {
                0 => String::new(),
                least => format!(", {least} of them over one that nothing could keep"),
            };
            println!("{} rows, {} over their limit{least}", self.total, self.misses);
        }
        if self.args.check && self.misses > 0 {
            return Err(format!("{} of {} rows are over their limit", self.misses, self.total).into());
        }
        Ok(())
    }
}

fn line<R: Row>(cells: &[String]) -> String {
    let padded: Vec<String> = cells
        .iter()
        .zip(R::COLUMNS)
        .enumerate()
        .map(
            |(place, (cell, (_, width)))| {
                if place == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            },
        )
        .collect();
    padded.join("  ")
}

/// Bytes as GiB with three places.
#[expect(clippy::cast_precision_loss, reason = "shown with three places")]
pub fn gib(bytes: u64) -> String {
    format!("{:.3}", bytes as f64 / (1_u64 << 30) as f64)
}
