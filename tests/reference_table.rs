//! The real pager against a reference table: random sequences of operations on a small emulated card, and
//! after every one the pager must agree with a table in plain sequential code (`reference_table/table.rs`):
//! addresses, bytes under every guard that is held, what a fault answers, accounts, budget, and what a free
//! says. A sequence that fails is shrunk and printed with its seed.
//!
//! `VRAM_PAGER_SEED=n` runs one sequence, `VRAM_PAGER_CASES=n` that many.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "a failure here is a failed test, and its numbers are small"
)]

mod common;
#[allow(unreachable_pub, reason = "a part of this test")]
#[path = "reference_table/table.rs"]
mod table;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use common::{assert_nothing_left, read_back, small_options};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use safetensors::tensor::{TensorView, serialize_to_file};
use table::{Expected, GuardRow, ModelRow, Table, UnitRow};
use vram_pager::device::emulated::{CallKind, EmulatedDevice, EmulatedOptions, Fault};
use vram_pager::device::{FloatType, PoolAllocation, SharedDevice};
use vram_pager::pager::{
    Factor, ModelOptions, OwnedGuard, PagedModel, Pager, PagerError, PagerOptions, PagerStream, PatchSet,
    TensorPatch,
};
use vram_pager::units::{DeviceRange, KIB};
use vram_pager::weights::TensorIndex;

const PAGE: u64 = 4 * KIB;

/// Units of a model: rows and columns. From a few bytes to ten pages, so that some share pages.
const UNITS: [[(usize, usize); 7]; 2] = [
    [(16, 64), (40, 200), (3, 5), (64, 96), (8, 8), (100, 200), (20, 128)],
    [(70, 150), (5, 9), (32, 64), (90, 110), (12, 100), (7, 7), (48, 128)],
];

/// Units that each of the two sets patches.
const PATCHED: [[usize; 2]; 2] = [[0, 3], [3, 5]];

/// One operation. Numbers are taken modulo what there is, so that any sequence means something.
#[derive(Clone, Debug)]
enum Op {
    Fault { model: u8, unit: u8, hold: bool },
    Piece { model: u8, unit: u8, piece: u8 },
    Rows { model: u8, unit: u8, rows: Vec<u8> },
    Release(u8),
    Patch { model: u8, set: u8 },
    Activate { model: u8, passes: Option<u8> },
    Pass { model: u8 },
    Prefetch { model: u8 },
    Unload { model: u8, pages: Option<u8> },
    ReleaseIdle,
    Headroom(u8),
    Pressure(u8),
    Allocate(u8),
    FreeActivations,
    Open(u8),
    Close(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let n = any::<u8>;
    prop_oneof![
        8 => (n(), n(), any::<bool>()).prop_map(|(model, unit, hold)| Op::Fault { model, unit, hold }),
        2 => (n(), n(), n()).prop_map(|(model, unit, piece)| Op::Piece { model, unit, piece }),
        1 => (n(), n(), prop::collection::vec(n(), 1..6))
            .prop_map(|(model, unit, rows)| Op::Rows { model, unit, rows }),
        5 => n().prop_map(Op::Release),
        2 => (n(), n()).prop_map(|(model, set)| Op::Patch { model, set }),
        1 => (n(), prop::option::of(1..4_u8)).prop_map(|(model, passes)| Op::Activate { model, passes }),
        2 => n().prop_map(|model| Op::Pass { model }),
        1 => n().prop_map(|model| Op::Prefetch { model }),
        2 => (n(), prop::option::of(0..12_u8)).prop_map(|(model, pages)| Op::Unload { model, pages }),
        1 => Just(Op::ReleaseIdle),
        1 => n().prop_map(Op::Headroom),
        1 => n().prop_map(Op::Pressure),
        1 => n().prop_map(Op::Allocate),
        1 => Just(Op::FreeActivations),
        1 => n().prop_map(Op::Open),
        1 => n().prop_map(Op::Close),
    ]
}

/// A card, and what is done on it.
#[derive(Clone, Debug)]
struct Case {
    /// Pages of the card.
    pages: u64,
    ops: Vec<Op>,
}

fn case() -> impl Strategy<Value = Case> {
    (prop::sample::select(vec![12_u64, 16, 24, 32, 48, 80]), prop::collection::vec(op(), 1..60))
        .prop_map(|(pages, ops)| Case { pages, ops })
}

/// A whole number of small size as BF16.
fn bf16(value: i64) -> [u8; 2] {
    half::bf16::from_f32(value as f32).to_le_bytes()
}

/// A weight of a model, a whole number.
fn weight(model: usize, unit: usize, row: usize, column: usize) -> i64 {
    ((model * 31 + unit * 17 + row * 7 + column * 13) % 101) as i64 - 50
}

/// What a set adds to it: `up x down`, whole numbers again.
fn delta(set: usize, row: usize, column: usize) -> i64 {
    let (row, column) = (row as i64, column as i64);
    if set == 0 { 0 } else { (row % 3 + set as i64) * (column % 5 - 2) }
}

/// A unit's weight and bias as they are with a set (0 for none).
fn contents(model: usize, unit: usize, set: usize) -> Vec<Vec<u8>> {
    let (rows, columns) = UNITS[model][unit];
    let set = if set > 0 && PATCHED[set - 1].contains(&unit) { set } else { 0 };
    let cells = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    let weights =
        cells.flat_map(|(row, column)| bf16(weight(model, unit, row, column) + delta(set, row, column)));
    let bias = (0..rows).flat_map(|row| bf16(weight(model, unit, row, 1000)));
    vec![weights.collect(), bias.collect()]
}

/// The models' files, made once.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (model, units) in UNITS.iter().enumerate() {
            let mut tensors = Vec::new();
            for (unit, &(rows, columns)) in units.iter().enumerate() {
                let [weights, bias] = contents(model, unit, 0).try_into().unwrap();
                tensors.push((format!("u{unit}.weight"), vec![rows, columns], weights));
                tensors.push((format!("u{unit}.bias"), vec![rows], bias));
            }
            let views: Vec<_> = tensors
                .iter()
                .map(|(name, shape, bytes)| {
                    let view = TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap();
                    (name.clone(), view)
                })
                .collect();
            serialize_to_file(views, None, &folder.path().join(format!("{model}.safetensors"))).unwrap();
        }
        Self { folder }
    }

    fn index(&self, model: usize) -> Arc<TensorIndex> {
        let path = self.folder.path().join(format!("{model}.safetensors"));
        Arc::new(TensorIndex::open(&path).unwrap())
    }
}

/// The sets of a model, in the order of [`PATCHED`].
fn sets(model: &PagedModel) -> Vec<Arc<PatchSet>> {
    let set = |number: usize| {
        let patches = PATCHED[number - 1].map(|unit| {
            let tensor = model.index().tensor(&format!("u{unit}.weight")).unwrap();
            let shape = &model.index().tensor_info(tensor).shape;
            let factor = |shape: [u64; 2], value: &dyn Fn(i64) -> i64| Factor {
                dtype: FloatType::F32,
                shape,
                bytes: (0..(shape[0] * shape[1]) as i64)
                    .flat_map(|place| (value(place) as f32).to_le_bytes())
                    .collect(),
            };
            TensorPatch {
                tensor,
                up: factor([shape[0], 1], &|row| row % 3 + number as i64),
                down: factor([1, shape[1]], &|column| column % 5 - 2),
                scale: 1.0,
            }
        });
        PatchSet::new(model, patches.into()).unwrap()
    };
    vec![set(1), set(2)]
}

/// A model that is open, and its sets.
struct Opened {
    model: Arc<PagedModel>,
    sets: Vec<Arc<PatchSet>>,
}

impl Opened {
    /// The number of the set that is attached, 0 for none.
    fn attached(&self) -> usize {
        let Some(attached) = self.model.attached() else { return 0 };
        1 + self.sets.iter().position(|set| Arc::ptr_eq(set, &attached)).unwrap()
    }
}

/// The real thing beside the table.
struct World<'f> {
    files: &'f Files,
    card: Arc<EmulatedDevice>,
    device: SharedDevice,
    pager: Arc<Pager>,
    stream: Arc<PagerStream>,
    /// By row of the table; a model that was closed is gone.
    opened: Vec<Option<Opened>>,
    guards: Vec<OwnedGuard>,
    activations: Vec<PoolAllocation>,
    table: Table,
    /// Bytes of frames after the operation before.
    frames_before: u64,
}

type Check = Result<(), String>;

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(why()) }
}

impl<'f> World<'f> {
    fn new(files: &'f Files, card_pages: u64) -> Self {
        let mut options = EmulatedOptions::new(card_pages * PAGE);
        options.page_bytes = PAGE;
        let card = EmulatedDevice::open(options).unwrap();
        let device: SharedDevice = Arc::clone(&card) as _;
        let options = PagerOptions { chunk_bytes: 4 * PAGE, readers: 1, ..small_options() };
        let pager = Pager::new(&device, options).unwrap();
        let stream = Arc::new(pager.stream().unwrap());
        let table = Table {
            page: PAGE,
            card: card_pages * PAGE,
            headroom: 0,
            others: 0,
            models: Vec::new(),
            guards: Vec::new(),
        };
        let (opened, guards, activations) = (Vec::new(), Vec::new(), Vec::new());
        let mut world =
            Self { files, card, device, pager, stream, opened, guards, activations, table, frames_before: 0 };
        world.open(0);
        world
    }

    fn open(&mut self, file: usize) {
        let model = self.pager.open_model(self.files.index(file), &ModelOptions::default()).unwrap();
        let range = model.address_range().unwrap();
        let units = (0..UNITS[file].len())
            .map(|unit| {
                let id = model.unit(&format!("u{unit}")).unwrap();
                let bytes = &model.layout().unit(id).bytes;
                let pages = (bytes.start / PAGE) as u32..bytes.end.div_ceil(PAGE) as u32;
                UnitRow {
                    name: format!("u{unit}"),
                    pages,
                    pieces: model.pieces(id).unwrap(),
                    address: model.unit_address(id).unwrap().0,
                    versions: (0..=PATCHED.len()).map(|set| contents(file, unit, set)).collect(),
                }
            })
            .collect();
        let sets = sets(&model);
        // Each factor begins at 256 bytes, and the pool grows in whole pages.
        let factor_pages = std::iter::once(0)
            .chain(sets.iter().map(|set| (set.factor_bytes() + 4 * 256).div_ceil(PAGE) + 1))
            .collect();
        self.table.models.push(ModelRow {
            units,
            range: range.start.0..range.start.0 + range.bytes,
            pages: model.layout().page_count(),
            set: 0,
            attached: 0,
            changes: 0,
            factor_pages,
        });
        self.opened.push(Some(Opened { model, sets }));
    }

    /// The open model that a number means.
    fn pick(&self, number: u8) -> Option<(usize, &Opened)> {
        let open: Vec<_> =
            self.opened.iter().enumerate().filter_map(|(row, model)| Some((row, model.as_ref()?))).collect();
        open.get(usize::from(number) % open.len().max(1)).copied()
    }

    fn unit_number(&self, row: usize, number: u8) -> usize {
        usize::from(number) % self.table.models[row].units.len()
    }

    fn pool(&self) -> u64 {
        self.device.pool_figures().unwrap().reserved
    }

    /// Bytes of the pool that allocations use.
    fn used(&self) -> u64 {
        self.device.pool_figures().unwrap().used
    }

    fn free_bytes(&self) -> u64 {
        self.device.memory().unwrap().free
    }

    /// What a refused fault says must be so.
    fn check_refusal(&self, row: usize, unit: usize, error: &PagerError, expected: Expected) -> Check {
        let set = self.table.models[row].set;
        let what = || format!("fault of {row}/u{unit} with set {set}, expected {expected:?}: {error}");
        match error {
            PagerError::Held { held, .. } => {
                ensure(expected == Expected::GuardOrHeld, what)?;
                // A unit of several pieces holds its first ones while it asks for the next.
                let mut names = self.table.held_names();
                let own = &self.table.models[row].units[unit];
                names.extend((own.pieces > 1).then_some(own.name.as_str()));
                let known = |name: &String| {
                    let unit = name.split(" (piece").next().unwrap_or(name);
                    names.contains(unit) || name.ends_with(" more")
                };
                ensure(!held.is_empty() && held.iter().all(known), || {
                    format!("{}: names {held:?}, while {names:?} are held", what())
                })
            }
            PagerError::OldVersionHeld { .. } => {
                ensure(self.table.old_version_is_held(row, unit), || format!("{}: nobody holds it", what()))
            }
            PagerError::NeverFits { need, limit, .. } => {
                ensure(need > limit, || format!("{}: it would fit", what()))?;
                ensure(expected != Expected::Guard, what)
            }
            // The factors of its patches found no room.
            PagerError::Device(error) if error.is_out_of_memory() => {
                ensure(expected != Expected::Guard, || format!("out of memory: {error}"))
            }
            error => Err(format!("fault: {error}")),
        }
    }

    fn fault(&mut self, row: usize, unit: usize, hold: bool) -> Check {
        let Some(opened) = &self.opened[row] else { return Ok(()) };
        let set = self.table.models[row].set;
        let pieces = u64::from(self.table.models[row].units[unit].pieces);
        let id = opened.model.unit(&format!("u{unit}")).unwrap();
        let before = opened.model.counts();
        let expected = self.table.expect_fault(row, unit, self.pool(), self.used());
        let faulted = opened.model.fault_patched_owned(
            set.checked_sub(1).map(|set| &opened.sets[set]),
            id,
            &self.stream,
        );
        let counts = opened.model.counts();
        let counted =
            counts.hits + counts.loaded + counts.streamed - before.hits - before.loaded - before.streamed;
        let attached = opened.attached();
        self.table.note_attached(row, attached);
        match faulted {
            Ok(guard) => {
                ensure(expected != Expected::NeverFits, || format!("{row}/u{unit} fits, and should not"))?;
                ensure((1..=pieces).contains(&counted), || format!("a fault was counted {counted} times"))?;
                let changes = self.table.models[row].changes;
                self.table.guards.push(GuardRow { model: row, unit, set, changes });
                self.guards.push(guard);
                self.check_guard(self.guards.len() - 1)?;
                if !hold {
                    self.release(self.guards.len() - 1)?;
                }
                Ok(())
            }
            Err(error) => {
                ensure(pieces > 1 || counted == 0, || "a refused fault was counted".to_owned())?;
                self.check_refusal(row, unit, &error, expected)
            }
        }
    }

    fn release(&mut self, place: usize) -> Check {
        self.check_guard(place)?;
        self.table.guards.swap_remove(place);
        self.guards.swap_remove(place).release();
        Ok(())
    }

    /// A guard that is held has its unit's address and the bytes of its version.
    fn check_guard(&self, place: usize) -> Check {
        let (guard, row) = (&self.guards[place], &self.table.guards[place]);
        let unit = &self.table.models[row.model].units[row.unit];
        let views = guard.tensors();
        let first = views.iter().map(|view| view.address.0).min();
        ensure(first == Some(unit.address), || format!("{} moved to {first:?}", unit.name))?;
        ensure(views.len() == 2, || format!("{} has {} tensors", unit.name, views.len()))?;
        for view in &views {
            let expected = &unit.versions[row.set][usize::from(view.name.ends_with("bias"))];
            let found = read_back(&self.device, view.range(), &self.stream);
            let wrong = found.iter().zip(expected).position(|(a, b)| a != b);
            ensure(found.len() == expected.len() && wrong.is_none(), || {
                format!(
                    "{} of model {} with set {}: wrong from byte {wrong:?} on",
                    view.name, row.model, row.set
                )
            })?;
        }
        Ok(())
    }

    fn piece(&mut self, row: usize, unit: usize, piece: u8) -> Check {
        let Some(opened) = &self.opened[row] else { return Ok(()) };
        let set = self.table.models[row].set;
        let unit_row = &self.table.models[row].units[unit];
        let piece = u32::from(piece) % unit_row.pieces;
        let id = opened.model.unit(&unit_row.name).unwrap();
        let expected = self.table.expect_fault(row, unit, self.pool(), self.used());
        let set_of = set.checked_sub(1).map(|set| &opened.sets[set]);
        let faulted = opened.model.fault_piece_with(set_of, id, piece, &self.stream);
        let checked = match faulted {
            Ok(guard) => {
                for view in guard.tensors() {
                    let tensor = usize::from(view.name.ends_with("bias"));
                    let whole = &unit_row.versions[set][tensor];
                    let row_bytes = whole.len() / rows_of(&opened.model, view.name);
                    let rows = view.rows.start as usize * row_bytes..view.rows.end as usize * row_bytes;
                    let found = read_back(&self.device, view.range(), &self.stream);
                    ensure(found == whole[rows], || format!("piece {piece} of {}: wrong bytes", view.name))?;
                }
                Ok(())
            }
            // A piece needs no more than the whole.
            Err(error) if unit_row.pieces == 1 => self.check_refusal(row, unit, &error, expected),
            Err(error) => ensure(expected != Expected::Guard, || format!("piece {piece}: {error}")),
        };
        let attached = opened.attached();
        self.table.note_attached(row, attached);
        checked
    }

    fn rows(&mut self, row: usize, unit: usize, rows: &[u8]) -> Check {
        let Some(opened) = &self.opened[row] else { return Ok(()) };
        let set = self.table.models[row].set;
        let whole = &self.table.models[row].units[unit].versions[set][0];
        let name = format!("u{unit}.weight");
        let tensor = opened.model.index().tensor(&name).unwrap();
        let count = rows_of(&opened.model, &name);
        let rows: Vec<u64> = rows.iter().map(|&row| u64::from(row) % count as u64).collect();
        let set_of = set.checked_sub(1).map(|set| &opened.sets[set]);
        match opened.model.fault_rows_with(set_of, tensor, &rows, &self.stream) {
            Ok(guard) => {
                // Rows are patched beside the model: what is attached stays.
                let bytes = whole.len() / count;
                let expected: Vec<u8> = rows
                    .iter()
                    .flat_map(|&row| whole[row as usize * bytes..(row as usize + 1) * bytes].to_vec())
                    .collect();
                let found = read_back(&self.device, guard.range(), &self.stream);
                ensure(found == expected, || format!("rows {rows:?} of {name}: wrong bytes"))?;
            }
            Err(PagerError::NeverFits { .. } | PagerError::Held { .. }) => {}
            Err(PagerError::Device(error)) if error.is_out_of_memory() => {}
            Err(error) => return Err(format!("rows: {error}")),
        }
        self.pager.refresh().map_err(|error| format!("refresh: {error}"))
    }

    fn apply(&mut self, op: &Op) -> Check {
        let failed = |what: &'static str| move |error: PagerError| format!("{what}: {error}");
        match op {
            Op::Fault { model, unit, hold } => {
                let Some((row, _)) = self.pick(*model) else { return Ok(()) };
                self.fault(row, self.unit_number(row, *unit), *hold && self.guards.len() < 5)
            }
            Op::Piece { model, unit, piece } => {
                let Some((row, _)) = self.pick(*model) else { return Ok(()) };
                self.piece(row, self.unit_number(row, *unit), *piece)
            }
            Op::Rows { model, unit, rows } => {
                let Some((row, _)) = self.pick(*model) else { return Ok(()) };
                self.rows(row, self.unit_number(row, *unit), rows)
            }
            Op::Release(number) if !self.guards.is_empty() => {
                self.release(usize::from(*number) % self.guards.len())
            }
            Op::Release(_) => Ok(()),
            Op::Patch { model, set } => {
                let Some((row, _)) = self.pick(*model) else { return Ok(()) };
                self.table.models[row].set = usize::from(*set) % (PATCHED.len() + 1);
                Ok(())
            }
            Op::Activate { model, passes } => {
                let Some((_, opened)) = self.pick(*model) else { return Ok(()) };
                opened.model.activate(passes.map(u32::from)).map_err(failed("activate"))
            }
            Op::Pass { model } => {
                let Some((row, _)) = self.pick(*model) else { return Ok(()) };
                (0..self.table.models[row].units.len()).try_for_each(|unit| self.fault(row, unit, false))
            }
            Op::Prefetch { model } => {
                let Some((_, opened)) = self.pick(*model) else { return Ok(()) };
                match opened.model.prefetch_all() {
                    Ok(()) => Ok(()),
                    Err(error) if !self.guards.is_empty() && error.is_held() => Ok(()),
                    Err(error) => Err(format!("prefetch_all: {error}")),
                }
            }
            Op::Unload { model, pages } => {
                let Some((_, opened)) = self.pick(*model) else { return Ok(()) };
                let asked = pages.map_or(u64::MAX, |pages| u64::from(pages) * PAGE);
                let before = (opened.model.figures().resident_bytes, self.free_bytes());
                let said = opened.model.unload(asked).map_err(failed("unload"))?;
                let after = (opened.model.figures().resident_bytes, self.free_bytes());
                ensure(said == after.1 - before.1, || {
                    format!("unload says {said}, and {} became free", after.1 - before.1)
                })?;
                ensure(said <= asked && said <= before.0, || {
                    format!("{said} given back of {asked} asked for")
                })?;
                // What no guard holds can be had.
                let met = said == asked || after.0 == 0 || !self.guards.is_empty();
                ensure(met, || format!("{} resident, and {said} of {asked} given back", after.0))
            }
            Op::ReleaseIdle => {
                let (idle, before) = (self.pager.figures().idle_bytes, self.free_bytes());
                let said = self.pager.release_idle().map_err(failed("release_idle"))?;
                let freed = self.free_bytes() - before;
                ensure(said == freed && said == idle, || {
                    format!("release_idle says {said}, {idle} were idle and {freed} became free")
                })
            }
            Op::Headroom(part) => {
                self.table.headroom = self.table.card / 2 * u64::from(*part) / 255;
                self.pager.set_headroom(self.table.headroom).map_err(failed("set_headroom"))
            }
            Op::Pressure(part) => {
                // A process gets only what is free; the pager makes room for its headroom, and it asks again.
                let wanted = self.table.card / 2 * u64::from(*part) / 255 / PAGE * PAGE;
                self.table.others = self.table.others.min(wanted);
                loop {
                    let got = self.table.others;
                    self.table.others = wanted.min(got + self.free_bytes() / PAGE * PAGE);
                    self.card.set_other_bytes(self.table.others);
                    self.pager.refresh().map_err(failed("refresh"))?;
                    if self.table.others == got || self.table.others == wanted {
                        return Ok(());
                    }
                }
            }
            Op::Allocate(pages) => {
                let bytes = u64::from(pages % 6) * PAGE + 1;
                match self.pager.allocate(&self.stream, bytes) {
                    Ok(memory) => self.activations.push(memory),
                    Err(PagerError::Device(error)) if error.is_out_of_memory() => {
                        let room = self.table.budget(self.pool());
                        let needed = bytes.div_ceil(PAGE) + 1;
                        let held = self.table.held().len() as u64;
                        ensure(needed + held > room || !self.guards.is_empty(), || {
                            format!("no room for {needed} pages beside {held} held ones of {room}")
                        })?;
                    }
                    Err(error) => return Err(format!("allocate: {error}")),
                }
                self.pager.refresh().map_err(failed("refresh"))
            }
            Op::FreeActivations => {
                self.activations.clear();
                Ok(())
            }
            Op::Open(file) => {
                if self.opened.iter().flatten().count() < 3 {
                    self.open(usize::from(*file) % UNITS.len());
                }
                Ok(())
            }
            Op::Close(model) => {
                // Its guards keep it alive until the last of them goes.
                if let Some((row, _)) = self.pick(*model) {
                    self.opened[row] = None;
                }
                Ok(())
            }
        }
    }

    /// When all pressure is over, a model that is alone and fits comes back to the card and stays there.
    fn recovers(&mut self) -> Check {
        self.activations.clear();
        self.table.headroom = 0;
        self.table.others = 0;
        self.card.set_other_bytes(0);
        self.pager.set_headroom(0).map_err(|error| format!("set_headroom: {error}"))?;
        let open: Vec<usize> = (0..self.opened.len()).filter(|&row| self.opened[row].is_some()).collect();
        let &[row] = open.as_slice() else { return Ok(()) };
        self.table.models[row].set = 0;
        let mut copied = Vec::new();
        for _ in 0..4 {
            for unit in 0..self.table.models[row].units.len() {
                self.fault(row, unit, false)?;
            }
            copied.push(self.opened[row].as_ref().map_or(0, |opened| opened.model.counts().copied_bytes));
        }
        let fits = u64::from(self.table.models[row].pages) <= self.table.budget(self.pool());
        ensure(!fits || copied[2] == copied[3], || format!("it fits, and is copied again: {copied:?}"))
    }

    /// What holds after every operation.
    fn check(&mut self) -> Check {
        let figures = self.pager.figures();
        let frames = figures.resident_bytes + figures.ring_bytes + figures.idle_bytes;
        ensure(self.device.live().frames * PAGE == frames, || {
            format!("the card has {} frames, the pager says {figures:?}", self.device.live().frames)
        })?;
        let pool = self.pool();
        ensure(frames + pool + self.table.others + self.free_bytes() == self.table.card, || {
            format!("frames {frames}, pool {pool}, free {} do not make a card", self.free_bytes())
        })?;
        if let Some(why) = self.table.over_budget(frames, figures.ring_bytes, pool) {
            // What a guard held in the way of a smaller budget goes at the next look at the card.
            ensure(frames <= self.frames_before, || format!("{why}, and it was {}", self.frames_before))?;
            self.pager.refresh().map_err(|error| format!("refresh: {error}"))?;
            let figures = self.pager.figures();
            let frames = figures.resident_bytes + figures.ring_bytes + figures.idle_bytes;
            let still = self.table.over_budget(frames, figures.ring_bytes, self.pool());
            self.frames_before = frames;
            return still.map_or(Ok(()), Err);
        }
        self.frames_before = frames;
        let mut resident = 0;
        for (opened, row) in self.opened.iter().zip(&self.table.models) {
            let Some(opened) = opened else { continue };
            let own = opened.model.figures();
            resident += own.resident_bytes;
            ensure(own.resident_bytes <= u64::from(row.pages) * PAGE, || format!("{own:?}"))?;
            for unit in &row.units {
                let id = opened.model.unit(&unit.name).unwrap();
                let address = opened.model.unit_address(id).map(|address| address.0);
                ensure(address == Some(unit.address) && row.range.contains(&unit.address), || {
                    format!("{} moved from {} to {address:?}", unit.name, unit.address)
                })?;
            }
        }
        let closed = self.table.guards.iter().any(|guard| self.opened[guard.model].is_none());
        ensure(resident == figures.resident_bytes || closed && resident < figures.resident_bytes, || {
            format!("models have {resident} resident bytes, the pager {}", figures.resident_bytes)
        })?;
        ensure(self.pager.reclaimable_bytes(None) == figures.resident_bytes + figures.idle_bytes, || {
            format!("{} reclaimable of {figures:?}", self.pager.reclaimable_bytes(None))
        })?;
        (0..self.guards.len()).try_for_each(|place| self.check_guard(place))
    }
}

/// The rows of a tensor.
fn rows_of(model: &PagedModel, tensor: &str) -> usize {
    let tensor = model.index().tensor(tensor).unwrap();
    model.index().tensor_info(tensor).shape[0] as usize
}

fn play(files: &Files, case: &Case) -> Check {
    let mut world = World::new(files, case.pages);
    let device = Arc::clone(&world.device);
    let played = catch_unwind(AssertUnwindSafe(|| {
        for (number, op) in case.ops.iter().enumerate() {
            let at = |why: String| format!("operation {number}, {op:?}: {why}");
            world.apply(op).map_err(at)?;
            world.check().map_err(at)?;
        }
        while !world.guards.is_empty() {
            world.release(0)?;
        }
        world.recovers()?;
        let misuse = world.card.take_deferred();
        ensure(misuse.is_empty(), || format!("the card was misused: {misuse:?}"))
    }));
    drop(world);
    match played {
        Ok(played) => {
            played?;
            assert_nothing_left(&device);
            Ok(())
        }
        Err(_) => Err("a panic, see above".to_owned()),
    }
}

#[test]
fn the_pager_agrees_with_a_table_in_plain_code_after_every_operation() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds = match number("VRAM_PAGER_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("VRAM_PAGER_CASES").unwrap_or(200),
    };
    let files = Files::new();
    let mut operations = 0;
    for seed in seeds {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let config = Config { failure_persistence: None, max_shrink_iters: 400, ..Config::default() };
        let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
        let tree = case().new_tree(&mut runner).unwrap();
        operations += tree.current().ops.len();
        let outcome = runner.run_one(tree, |case| play(&files, &case).map_err(TestCaseError::fail));
        match outcome {
            Ok(_) => {}
            Err(TestError::Fail(why, case)) => {
                panic!("seed {seed} (VRAM_PAGER_SEED={seed} repeats it): {why}\nshrunk to {case:#?}")
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    println!("{operations} operations");
}

/// The comparison itself: a byte that changes under a guard, memory that nobody accounts for, and a fault
/// that is refused for no reason are noticed.
#[test]
#[allow(unsafe_code, reason = "does to the card what the pager must never do")]
fn what_is_wrong_is_noticed() {
    let files = Files::new();
    let mut world = World::new(&files, 32);
    world.apply(&Op::Fault { model: 0, unit: 1, hold: true }).unwrap();
    world.check().unwrap();
    let range = world.guards[0].tensors()[0].range();
    let byte = DeviceRange::new(range.start, 1);
    // SAFETY: the guard holds the range.
    unsafe { world.device.fill(byte, 0xFF, world.stream.id()).unwrap() };
    assert!(world.check().unwrap_err().contains("wrong from byte Some(0) on"));

    let mut world = World::new(&files, 32);
    let frame = world.device.create_frame(PAGE).unwrap();
    assert!(world.check().unwrap_err().contains("the card has 1 frames"));
    // SAFETY: the frame is ours and is not used.
    unsafe { world.device.release_frame(frame).unwrap() };
    world.check().unwrap();

    let mut world = World::new(&files, 32);
    world.card.inject(Fault::once(CallKind::CreateFrame, 1));
    assert!(world.apply(&Op::Fault { model: 0, unit: 1, hold: true }).is_err());
    world.check().unwrap();
}

/// The table itself: what it expects where the answer is plain.
#[test]
fn the_table_expects_what_plain_cases_give() {
    let unit = |pages| UnitRow {
        name: "u".to_owned(),
        pages,
        pieces: 1,
        address: 0,
        versions: vec![vec![vec![1]], vec![vec![2]]],
    };
    let mut table =
        Table { page: PAGE, card: 8 * PAGE, headroom: 0, others: 0, models: Vec::new(), guards: Vec::new() };
    table.models.push(ModelRow {
        units: vec![unit(0..3), unit(3..7), unit(7..16)],
        range: 0..16 * PAGE,
        pages: 16,
        set: 0,
        attached: 0,
        changes: 0,
        factor_pages: vec![0, 2],
    });
    assert_eq!(table.expect_fault(0, 0, 0, 0), Expected::Guard);
    assert_eq!(table.expect_fault(0, 2, 0, 0), Expected::NeverFits);
    table.guards.push(GuardRow { model: 0, unit: 0, set: 0, changes: 0 });
    assert_eq!(table.held(), BTreeSet::from([(0, 0), (0, 1), (0, 2)]));
    assert_eq!(table.expect_fault(0, 1, 0, 0), Expected::Guard);
    assert_eq!(table.expect_fault(0, 1, 2 * PAGE, 2 * PAGE), Expected::GuardOrHeld);
    table.models[0].set = 1;
    assert_eq!(table.expect_fault(0, 0, 0, 0), Expected::GuardOrHeld, "the old version is held");
    assert!(table.over_budget(9 * PAGE, 0, 0).is_some());
    table.others = 6 * PAGE;
    assert!(table.over_budget(3 * PAGE, 0, 0).is_none(), "a guard holds them");
    table.guards.clear();
    assert!(table.over_budget(3 * PAGE, 0, 0).is_some());
}
