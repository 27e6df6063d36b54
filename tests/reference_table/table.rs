//! The pager's promises in plain sequential code: who is on the card, what is pinned, what bytes a unit has
//! under which patches, and how much memory there is for all of it.
//!
//! It knows nothing of rings, plans, words or copies. Where the pager is free to choose (what stays, what is
//! streamed) it says what every choice must keep to.

use std::collections::BTreeSet;
use std::ops::Range;

/// A page of a model, by numbers.
pub type PageOf = (usize, u32);

/// A unit as the table knows it.
pub struct UnitRow {
    pub name: String,
    /// Pages that it touches.
    pub pages: Range<u32>,
    /// Its pieces.
    pub pieces: u32,
    /// Its device address, for the model's whole life.
    pub address: u64,
    /// Its weight and bias, a pair for each version: without patches, and with each set.
    pub versions: Vec<Vec<Vec<u8>>>,
}

/// A model as the table knows it.
pub struct ModelRow {
    pub units: Vec<UnitRow>,
    /// Its device addresses.
    pub range: Range<u64>,
    /// Pages of the address range.
    pub pages: u32,
    /// The set that faults ask for, 0 for none.
    pub set: usize,
    /// The set that bytes on the card are made with, and how often that changed.
    pub attached: usize,
    pub changes: u64,
    /// The most pages of the card that each set's factors take.
    pub factor_pages: Vec<u64>,
}

/// A guard that is held.
pub struct GuardRow {
    pub model: usize,
    pub unit: usize,
    /// The set that it was faulted with.
    pub set: usize,
    /// The model's changes of sets when it was.
    pub changes: u64,
}

/// What must come of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expected {
    /// There is room: it succeeds.
    Guard,
    /// Guards are in the way, so that it may be refused; it may also find a way.
    GuardOrHeld,
    /// It is larger than the card can give, and not on it by a guard of another.
    NeverFits,
}

/// The card and all that is on it.
pub struct Table {
    pub page: u64,
    pub card: u64,
    pub headroom: u64,
    /// Bytes that another process holds.
    pub others: u64,
    pub models: Vec<ModelRow>,
    pub guards: Vec<GuardRow>,
}

impl Table {
    /// Pages that frames may take, with `pool` bytes of activations.
    pub fn budget(&self, pool: u64) -> u64 {
        self.card.saturating_sub(self.headroom + self.others + pool) / self.page
    }

    /// Pages that guards hold, each once.
    pub fn held(&self) -> BTreeSet<PageOf> {
        let pages_of = |guard: &GuardRow| {
            let model = guard.model;
            self.models[model].units[guard.unit].pages.clone().map(move |page| (model, page))
        };
        self.guards.iter().flat_map(pages_of).collect()
    }

    /// Names of units that guards hold.
    pub fn held_names(&self) -> BTreeSet<&str> {
        self.guards.iter().map(|guard| self.models[guard.model].units[guard.unit].name.as_str()).collect()
    }

    /// Another set may have been attached: at the first fault with it that is no hit.
    pub fn note_attached(&mut self, model: usize, attached: usize) {
        let row = &mut self.models[model];
        row.changes += u64::from(row.attached != attached);
        row.attached = attached;
    }

    /// Whether a guard holds a page of the unit since before another set was asked for. Such a page may be
    /// stale, and stays so until the guard is gone.
    pub fn old_version_is_held(&self, model: usize, unit: usize) -> bool {
        let row = &self.models[model];
        let pages = &row.units[unit].pages;
        self.guards.iter().filter(|guard| guard.model == model).any(|guard| {
            let held = &row.units[guard.unit].pages;
            let shares = held.start < pages.end && pages.start < held.end;
            shares && (guard.changes != row.changes || row.attached != row.set)
        })
    }

    /// What must come of a fault of a unit, when activations hold `pool` bytes.
    ///
    /// Of those, `used` bytes are in use; the rest may be had back.
    pub fn expect_fault(&self, model: usize, unit: usize, pool: u64, used: u64) -> Expected {
        let row = &self.models[model];
        let needed: BTreeSet<PageOf> = row.units[unit].pages.clone().map(|page| (model, page)).collect();
        let held = self.held();
        let budget = self.budget(pool);
        let factors = if row.attached == row.set { 0 } else { row.factor_pages[row.set] };
        if needed.len() as u64 > self.budget(used) && !needed.is_subset(&held) {
            return Expected::NeverFits;
        }
        // Factors come from the activation pool, which gets no ring frame below one that is held.
        let all = needed.union(&held).count() as u64 + factors;
        if all <= budget && (factors == 0 || self.guards.is_empty()) && !self.old_version_is_held(model, unit)
        {
            return Expected::Guard;
        }
        Expected::GuardOrHeld
    }

    /// What is wrong with the card's accounts, if anything: `frames` bytes of frames and `ring` of them in
    /// the ring, and `pool` bytes of activations.
    pub fn over_budget(&self, frames: u64, ring: u64, pool: u64) -> Option<String> {
        let most = self.budget(pool) * self.page;
        if frames <= most {
            return None;
        }
        // What guards hold cannot be taken, nor ring slots below one that is held.
        let held = self.held().len() as u64 * self.page;
        let excuse = if self.guards.is_empty() { 0 } else { held + ring };
        (frames > excuse)
            .then(|| format!("{frames} bytes of frames ({ring} ring), at most {most}, held {held}"))
    }
}
