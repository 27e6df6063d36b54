//! Which modules stay on the card. Pure functions over sizes.

#![deny(unsafe_code)]

use std::cmp::Reverse;
use std::ops::Range;

/// A module, as far as the choice goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Candidate {
    /// What it costs a pass to have it outside: bytes that cross the link, and those patched each time.
    pub(super) cost: u64,
    /// Its bytes: what it takes of the streaming buffer.
    pub(super) bytes: u64,
    /// The pages that it touches; neighbours share those at their ends.
    pub(super) pages: Range<u32>,
    /// Whether it is on the card.
    pub(super) loaded: bool,
    /// Whether it would pass through the streaming buffer; not so a table that is asked for by rows.
    pub(super) streams: bool,
}

/// The modules by what they cost outside, dearest first; of equals the larger, then the earlier.
pub(super) fn ranked(candidates: &[Candidate]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by_key(|&place| (Reverse(candidates[place].cost), Reverse(candidates[place].bytes), place));
    order
}

/// The two largest of some sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Largest([u64; 2]);

impl Largest {
    pub(super) fn add(&mut self, bytes: u64) {
        let [first, second] = self.0;
        if bytes > first {
            self.0 = [bytes, first];
        } else if bytes > second {
            self.0 = [first, bytes];
        }
    }

    fn and(mut self, other: Self) -> Self {
        other.0.into_iter().for_each(|bytes| self.add(bytes));
        self
    }

    /// The streaming buffer that modules of these sizes need: any two of them lie in it side by side, so
    /// that one is copied while the other is used.
    pub(super) fn buffer_bytes(self) -> u64 {
        self.0[0].saturating_add(self.0[1])
    }
}

/// The memory that a choice is made for. Sizes are bytes.
#[derive(Clone, Debug)]
pub(super) struct Room {
    /// Which pages have a frame.
    pub(super) mapped: Vec<bool>,
    /// The size of a page; the streaming buffer is rounded up to it too.
    pub(super) page_bytes: u64,
    /// What modules and streaming buffer may take together.
    pub(super) limit: u64,
}

/// The modules to load, dearest first: one is taken while what is loaded so far, its pages and the
/// streaming buffer for the largest modules still outside stay within the limit. A module that alone
/// exceeds the limit could not pass through any buffer, and none is made for it.
pub(super) fn to_load(candidates: &[Candidate], room: &Room) -> Vec<usize> {
    let order: Vec<usize> =
        ranked(candidates).into_iter().filter(|&place| !candidates[place].loaded).collect();
    let buffered =
        |module: &Candidate| if module.streams && module.bytes <= room.limit { module.bytes } else { 0 };
    // The largest of what follows each place.
    let mut following = vec![Largest::default(); order.len() + 1];
    for (place, &module) in order.iter().enumerate().rev() {
        following[place] = following[place + 1];
        following[place].add(buffered(&candidates[module]));
    }
    let mut mapped = room.mapped.clone();
    let mut loaded = room.page_bytes * mapped.iter().filter(|mapped| **mapped).count() as u64;
    // Where everything fits there is nothing to stream, and no buffer to round up.
    if room.page_bytes.saturating_mul(mapped.len() as u64) <= room.limit {
        return order;
    }
    let mut skipped = Largest::default();
    let mut chosen = Vec::new();
    for (place, &module) in order.iter().enumerate() {
        let pages = &candidates[module].pages;
        let new = pages.clone().filter(|&page| !mapped[page as usize]).count() as u64 * room.page_bytes;
        let buffer = skipped.and(following[place + 1]).buffer_bytes();
        let buffer = buffer.checked_next_multiple_of(room.page_bytes).unwrap_or(u64::MAX);
        if loaded.saturating_add(new).saturating_add(buffer) <= room.limit {
            loaded += new;
            mapped[pages.start as usize..pages.end as usize].fill(true);
            chosen.push(module);
        } else {
            skipped.add(buffered(&candidates[module]));
        }
    }
    chosen
}

/// The loaded modules in the order in which they leave: cheapest first.
pub(super) fn to_unload(candidates: &[Candidate]) -> Vec<usize> {
    ranked(candidates).into_iter().rev().filter(|&place| candidates[place].loaded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Modules with pages of their own, of one byte each.
    fn modules(sizes: &[u64]) -> Vec<Candidate> {
        let mut next = 0;
        let module = |&bytes: &u64| {
            let first = next;
            next += u32::try_from(bytes).unwrap();
            Candidate { cost: bytes, bytes, pages: first..next, loaded: false, streams: true }
        };
        sizes.iter().map(module).collect()
    }

    fn chosen(candidates: &[Candidate], limit: u64) -> Vec<usize> {
        let pages = candidates.iter().map(|one| one.pages.end as usize).max().unwrap_or(0);
        to_load(candidates, &Room { mapped: vec![false; pages], page_bytes: 1, limit })
    }

    #[test]
    fn the_dearest_stay_while_they_and_the_buffer_fit() {
        let all = modules(&[10, 40, 20, 30]);
        assert_eq!(chosen(&all, 100), [1, 3, 2, 0]);
        // 40 and a buffer of 30 + 20.
        assert_eq!(chosen(&all, 90), [1]);
        // The largest does not fit, and then the buffer is made for it: 10 + (40 + 30) is what does.
        assert_eq!(chosen(&all, 89), [0]);
        assert_eq!(chosen(&all, 0), Vec::<usize>::new());
        assert_eq!(chosen(&[], 0), Vec::<usize>::new());
    }

    #[test]
    fn what_is_chosen_and_the_buffer_never_exceed_the_limit() {
        let mut seed = 0x2545_F491_4F6C_DD1D_u64;
        let mut next = |limit: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % limit
        };
        for round in 0..2000 {
            // Packed on pages of 16 bytes, so that neighbours share them.
            let (page, mut at) = (16, 0);
            let mut all: Vec<Candidate> = (0..next(12))
                .map(|_| {
                    let (start, bytes) = (at, next(100) + 1);
                    at += bytes;
                    let number = |page: u64| u32::try_from(page).unwrap();
                    let pages = number(start / page)..number(at.div_ceil(page));
                    Candidate { cost: next(50), bytes, pages, loaded: next(4) == 0, streams: next(5) > 0 }
                })
                .collect();
            let mapped = |all: &[Candidate]| -> Vec<bool> {
                let touched = |page| all.iter().any(|one| one.loaded && one.pages.contains(&page));
                (0..u32::try_from(at.div_ceil(page)).unwrap()).map(touched).collect()
            };
            let total = at.next_multiple_of(page);
            let room = Room { mapped: mapped(&all), page_bytes: page, limit: next(total + 50) };
            let chosen = to_load(&all, &room);
            for &module in &chosen {
                assert!(!all[module].loaded);
                all[module].loaded = true;
            }
            let loaded = page * mapped(&all).iter().filter(|page| **page).count() as u64;
            let mut outside = Largest::default();
            let outside_ones = all.iter().filter(|one| !one.loaded && one.streams && one.bytes <= room.limit);
            outside_ones.for_each(|one| outside.add(one.bytes));
            let taken = loaded + outside.buffer_bytes();
            assert!(chosen.is_empty() || taken <= room.limit, "round {round}: {all:?} {room:?}");
            assert!(room.limit < total || all.iter().all(|one| one.loaded), "round {round}");
        }
    }

    #[test]
    fn no_buffer_is_made_for_what_does_not_pass_through_it() {
        let mut all = modules(&[40, 20, 10]);
        // Larger than all there is.
        assert_eq!(chosen(&all, 39), [1, 2]);
        assert_eq!(chosen(&all, 50), Vec::<usize>::new());
        // Asked for by rows, and cheap to have outside.
        (all[0].streams, all[0].cost) = (false, 0);
        assert_eq!(chosen(&all, 50), [1, 2]);
        assert_eq!(chosen(&all, 70), [1, 2, 0]);
    }

    #[test]
    fn the_cheapest_leave_first() {
        let mut all = modules(&[10, 40, 20, 30]);
        all[1].loaded = true;
        all[2].loaded = true;
        all[3].loaded = true;
        assert_eq!(to_unload(&all), [2, 3, 1]);
    }

    #[test]
    fn sizes_beyond_any_card_saturate() {
        let mut all = modules(&[1, 1, 1]);
        for one in &mut all {
            (one.cost, one.bytes) = (u64::MAX, u64::MAX);
        }
        assert_eq!(chosen(&all, u64::MAX).len(), 3);
        assert_eq!(chosen(&all, 2).len(), 2, "none of them can be streamed at all");
    }
}
