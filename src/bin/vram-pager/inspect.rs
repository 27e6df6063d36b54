//! `vram-pager inspect`: what a checkpoint holds, and the pages that it would take.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;
use vram_pager::units::{MIB, format_size, parse_size};
use vram_pager::weights::{LayoutOptions, PageLayout, TensorIndex, UnitInfo, UnitLayout};

use crate::Outcome;
use crate::interrupt;
use crate::output::{self, Align, Table, count};

/// Models of at most this many tensors are listed tensor by tensor.
const LISTED_TENSORS: usize = 128;

/// Show a checkpoint's tensors, units and pages
///
/// FILE is a .safetensors file, or the .safetensors.index.json of a sharded model. It is validated as
/// strictly as for loading. A unit is what is loaded at once: the tensors of one module.
///
/// Models of many tensors are summarised: units that differ only in their numbers share a line, with `*`
/// for the number. --all lists everything.
///
/// With --json, `offset` of a tensor is its first byte counted from the start of its file (not of the
/// data, which begins at `data_start`). For a sharded model `file` is the index, `bytes` the sum of the
/// shards' lengths, `data_start` that of the first shard, `shards` lists all of them, and each tensor has
/// a `shard`, its place in that list.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    vram-pager inspect model.safetensors\n  \
    vram-pager inspect model.safetensors --page 4MiB --all\n  \
    vram-pager inspect model.safetensors.index.json --json | jq '.units[].name'")]
pub(crate) struct Args {
    /// The checkpoint
    file: PathBuf,

    /// The size of a page to count with, a multiple of 256 bytes
    #[arg(long, value_name = "SIZE", default_value_t = Size(2 * MIB))]
    page: Size,

    /// List every tensor, however many there are
    #[arg(long)]
    all: bool,
}

/// A size on the command line.
#[derive(Clone, Copy)]
struct Size(u64);

impl std::str::FromStr for Size {
    type Err = vram_pager::units::UnitError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_size(text).map(Self)
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 > 0 && self.0.is_multiple_of(MIB) {
            write!(f, "{}MiB", self.0 / MIB)
        } else {
            write!(f, "{}", self.0)
        }
    }
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args, json: bool) -> Outcome {
    let index = Arc::new(TensorIndex::open(&args.file)?);
    interrupt::check()?;
    let layout = PageLayout::new(&index, &LayoutOptions::new(args.page.0))?;
    let file = args.file.display().to_string();
    if json {
        return output::print_json(&report(file, &index, &layout));
    }
    output::print(|out| {
        summary(out, &file, &index, &layout)?;
        writeln!(out)?;
        if args.all || index.tensors().len() <= LISTED_TENSORS {
            every_tensor(out, &index, &layout)
        } else {
            alike_units(out, &index, &layout)
        }
    })
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    file: String,
    bytes: u64,
    data_start: u64,
    total_bytes: u64,
    metadata: &'a BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shards: Vec<ShardReport>,
    tensors: Vec<TensorReport<'a>>,
    units: Vec<UnitReport<'a>>,
    pages: PagesReport,
}

#[derive(Serialize)]
struct ShardReport {
    file: String,
    bytes: u64,
    data_start: u64,
}

#[derive(Serialize)]
struct TensorReport<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: &'a [u64],
    offset: u64,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<u32>,
}

#[derive(Serialize)]
struct UnitReport<'a> {
    name: &'a str,
    bytes: u64,
    tensors: Vec<&'a str>,
}

#[derive(Serialize)]
struct PagesReport {
    page_bytes: u64,
    count: u32,
    address_bytes: u64,
}

fn report<'a>(file: String, index: &'a TensorIndex, layout: &PageLayout) -> Report<'a> {
    let sharded = index.is_sharded();
    let shards = index.files().iter().zip(index.data_starts()).filter(|_| sharded);
    Report {
        file,
        bytes: index.files().iter().map(vram_pager::weights::WeightFile::len).sum(),
        data_start: index.data_starts().first().copied().unwrap_or(0),
        total_bytes: index.total_bytes(),
        metadata: index.metadata(),
        shards: shards
            .map(|(file, &data_start)| ShardReport {
                file: file.path().display().to_string(),
                bytes: file.len(),
                data_start,
            })
            .collect(),
        tensors: index
            .tensors()
            .iter()
            .map(|tensor| TensorReport {
                name: &tensor.name,
                dtype: tensor.dtype.name(),
                shape: &tensor.shape,
                offset: tensor.offset,
                bytes: tensor.bytes,
                shard: sharded.then_some(tensor.file),
            })
            .collect(),
        units: index
            .units()
            .iter()
            .map(|unit| UnitReport {
                name: &unit.name,
                bytes: unit_bytes(index, unit),
                tensors: unit.tensors.iter().map(|&id| index.tensor_info(id).name.as_str()).collect(),
            })
            .collect(),
        pages: PagesReport {
            page_bytes: layout.page_bytes(),
            count: layout.page_count(),
            address_bytes: layout.address_bytes(),
        },
    }
}

fn unit_bytes(index: &TensorIndex, unit: &UnitInfo) -> u64 {
    unit.tensors.iter().map(|&id| index.tensor_info(id).bytes).sum()
}

fn summary(out: &mut dyn Write, file: &str, index: &TensorIndex, layout: &PageLayout) -> io::Result<()> {
    writeln!(
        out,
        "{}: {} in {}, {}",
        output::printable(file),
        count(index.tensors().len(), "tensor"),
        count(index.units().len(), "unit"),
        format_size(index.total_bytes())
    )?;
    if index.is_sharded() {
        writeln!(out, "shards: {}", index.files().len())?;
    }
    let mut types: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in index.tensors() {
        let (tensors, bytes) = types.entry(tensor.dtype.name()).or_default();
        *tensors += 1;
        *bytes += tensor.bytes;
    }
    let types: Vec<String> = types
        .iter()
        .map(|(name, (tensors, bytes))| format!("{tensors} {name} ({})", format_size(*bytes)))
        .collect();
    writeln!(out, "types: {}", types.join(", "))?;
    writeln!(
        out,
        "pages: {} of {}, {} of addresses",
        layout.page_count(),
        format_size(layout.page_bytes()),
        format_size(layout.address_bytes())
    )?;
    for (key, value) in index.metadata() {
        const SHOWN: usize = 80;
        writeln!(out, "metadata: {} = {}", output::shorten(key, SHOWN), output::shorten(value, SHOWN))?;
    }
    Ok(())
}

/// The pages of a unit, as `3` or `3-7`.
fn pages(layout: &PageLayout, unit: &UnitLayout) -> String {
    let mut spans = unit.spans.clone().map(|span| layout.span(span).pages);
    let Some(first) = spans.next() else { return "none".to_owned() };
    let end = spans.next_back().map_or(first.end, |last| last.end);
    if first.start + 1 < end {
        format!("{}-{}", first.start, end - 1)
    } else if first.is_empty() {
        "none".to_owned()
    } else {
        first.start.to_string()
    }
}

/// One line a unit, and one a tensor below it.
fn every_tensor(out: &mut dyn Write, index: &TensorIndex, layout: &PageLayout) -> io::Result<()> {
    let mut table = Table::new(&[
        ("unit / tensor", Align::Left),
        ("type", Align::Left),
        ("shape", Align::Left),
        ("size", Align::Right),
        ("pages", Align::Right),
    ]);
    for (unit, place) in index.units().iter().zip(layout.units()) {
        let size = format_size(unit_bytes(index, unit));
        table.row([unit.name.as_str(), "", "", &size, &pages(layout, &place)]);
        for &id in &unit.tensors {
            let tensor = index.tensor_info(id);
            let own = tensor.name.strip_prefix(&unit.name).and_then(|rest| rest.strip_prefix('.'));
            let name = format!("  {}", own.unwrap_or(&tensor.name));
            table.row([&name, tensor.dtype.name(), &shape(&tensor.shape), &format_size(tensor.bytes)]);
        }
    }
    table.write(out)
}

/// One line for all units that are alike but for the numbers in their names.
fn alike_units(out: &mut dyn Write, index: &TensorIndex, layout: &PageLayout) -> io::Result<()> {
    struct Alike {
        pattern: String,
        units: usize,
        bytes: u64,
        tensors: String,
    }
    let mut groups: Vec<Alike> = Vec::new();
    let mut found: HashMap<(String, String), usize> = HashMap::new();
    for unit in index.units() {
        let pattern = pattern(&unit.name);
        let tensors: Vec<String> = unit
            .tensors
            .iter()
            .map(|&id| {
                let tensor = index.tensor_info(id);
                format!("{} {}", tensor.dtype, shape(&tensor.shape))
            })
            .collect();
        let key = (pattern, tensors.join(", "));
        let group = *found.entry(key).or_insert_with_key(|(pattern, tensors)| {
            let (pattern, tensors) = (pattern.clone(), tensors.clone());
            groups.push(Alike { pattern, units: 0, bytes: 0, tensors });
            groups.len() - 1
        });
        groups[group].units += 1;
        groups[group].bytes += unit_bytes(index, unit);
    }
    let mut table = Table::new(&[
        ("unit", Align::Left),
        ("count", Align::Right),
        ("each", Align::Right),
        ("together", Align::Right),
        ("tensors", Align::Left),
    ]);
    for Alike { pattern, units, bytes, tensors } in &groups {
        let each = bytes / *units as u64;
        table.row([pattern, &units.to_string(), &format_size(each), &format_size(*bytes), tensors]);
    }
    table.write(out)?;
    let shared = (0..layout.page_count()).filter(|&page| layout.spans_of_page(page).len() > 1).count();
    writeln!(out, "\n{} hold more than one unit. --all lists every tensor.", count(shared, "page"))
}

/// A unit's name with `*` for every component that is a number.
fn pattern(name: &str) -> String {
    let mut pattern = String::with_capacity(name.len());
    for (number, part) in name.split('.').enumerate() {
        if number > 0 {
            pattern.push('.');
        }
        let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        pattern.push_str(if is_number { "*" } else { part });
    }
    pattern
}

/// A shape as `[2, 3]`; a damaged file may have millions of dimensions, of which a few are shown.
fn shape(shape: &[u64]) -> String {
    const SHOWN: usize = 8;
    match shape.get(..SHOWN) {
        Some(first) if shape.len() > SHOWN => format!("{first:?} and {} more", shape.len() - SHOWN),
        _ => format!("{shape:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_stars_and_nothing_else_changes() {
        assert_eq!(pattern("blocks.12.mlp.0"), "blocks.*.mlp.*");
        assert_eq!(pattern("conv1..2b."), "conv1..2b.");
        assert_eq!(pattern(""), "");
    }

    #[test]
    fn a_shape_of_millions_is_cut() {
        assert_eq!(shape(&[]), "[]");
        assert_eq!(shape(&[2, 3]), "[2, 3]");
        assert_eq!(shape(&[1; 1000]), "[1, 1, 1, 1, 1, 1, 1, 1] and 992 more");
    }
}
