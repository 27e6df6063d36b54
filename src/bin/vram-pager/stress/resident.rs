//! A model that is kept by modules instead of pages, beside the paged ones of a round: it takes memory of the
//! same card, is loaded and unloaded through the manager and directly, and gives guards that are checked alike.

use std::sync::Arc;

use vram_pager::pager::{PagerError, PatchSet};
use vram_pager::patcher::{
    LoadBudget, ModelPatcher, PatcherError, Place, ResidentError, ResidentOptions, ResidentPatcher,
};
use vram_pager::units::DeviceRange;
use vram_pager::weights::{TensorId, UnitId};

use super::card::Card;
use super::check::{Checker, Expect, Part};
use super::files::Kind;
use super::judge;
use super::numbers::Numbers;
use super::world::Counts;

/// The model, and the sets of patches that its clones take.
pub(super) struct Resident {
    kind: usize,
    pub(super) patcher: Arc<ResidentPatcher>,
    sets: Vec<Option<Arc<PatchSet>>>,
}

impl Resident {
    pub(super) fn open(card: &Card, kinds: &[Kind], kind: usize) -> Result<Self, ResidentError> {
        let of = &kinds[kind];
        let page = card.device.info().granularity;
        let options = ResidentOptions {
            compute: of.compute,
            page_locked_bytes: Some(64 * page),
            chunk_bytes: 4 * page,
        };
        let patcher = ResidentPatcher::open(&card.device, Arc::clone(&of.index), Place::Card(0), &options)?;
        let mut sets = vec![None];
        for patches in &of.patches {
            sets.push(Some(patcher.patch_set(patches.clone())?));
        }
        Ok(Self { kind, patcher, sets })
    }

    /// Gives the card back what a load may have taken, or takes some.
    pub(super) fn change(&self, counts: &Counts, total: u64, numbers: &mut Numbers) {
        let some = i64::try_from(numbers.below(total / 8)).unwrap_or(0);
        let (what, answer): (_, Result<(), PatcherError>) = match numbers.below(6) {
            0 => {
                let bake = numbers.per_mille(300);
                ("load modules", self.patcher.partially_load(LoadBudget::of_bytes(some), bake).map(drop))
            }
            1 => ("unload modules", self.patcher.partially_unload(some.unsigned_abs()).map(drop)),
            2 => {
                self.patcher.partially_unload_ram(some.unsigned_abs());
                ("unload host memory", Ok(()))
            }
            _ => ("leave the card", self.patcher.detach(true)),
        };
        if let Err(error) = answer {
            counts.judged(what, judge::patcher(&error), &error);
        }
    }

    /// Asks for a few modules, or rows, of a clone with patches of its own, and checks each.
    pub(super) fn use_some(
        &self,
        counts: &Counts,
        kinds: &[Kind],
        checker: &mut Checker,
        numbers: &mut Numbers,
    ) -> Result<(), PagerError> {
        let clone = self.patcher.clone_model();
        let set = if numbers.per_mille(900) { 0 } else { numbers.place(self.sets.len()) };
        clone.set_patches(self.sets[set].clone());
        let index = clone.index();
        let stream = Arc::clone(checker.stream().stream());
        for _ in 0..=numbers.below(6) {
            if !checker.has_room(8) {
                return Ok(());
            }
            if numbers.per_mille(150) {
                let tensor =
                    TensorId(u32::try_from(numbers.below(index.tensors().len() as u64)).unwrap_or(0));
                let count = index.tensor_info(tensor).shape.first().copied().unwrap_or(1);
                let row = numbers.below(count);
                match clone.rows(tensor, &[row], &stream) {
                    Ok(rows) => {
                        let expect = Expect::Rows { model: self.kind, set, tensor, rows: row..row + 1 };
                        checker.ask(&[Part { range: rows.range(), expect }])?;
                    }
                    Err(error) => drop(counts.judged("rows of a module", judge::resident(&error), &error)),
                }
                continue;
            }
            let unit = UnitId(u32::try_from(numbers.below(index.units().len() as u64)).unwrap_or(0));
            let guard = match clone.module(unit, &stream) {
                Ok(guard) => guard,
                Err(error) => {
                    counts.judged("module", judge::resident(&error), &error);
                    continue;
                }
            };
            let part = |view: vram_pager::pager::TensorView<'_>| {
                let tensor = kinds[self.kind].index.tensor(view.name)?;
                let expect = Expect::Rows { model: self.kind, set, tensor, rows: view.rows.clone() };
                Some(Part { range: DeviceRange::new(view.address, view.bytes), expect })
            };
            let parts: Vec<Part> = guard.tensors().into_iter().filter_map(part).collect();
            checker.ask(&parts)?;
            guard.release();
        }
        Ok(())
    }
}
