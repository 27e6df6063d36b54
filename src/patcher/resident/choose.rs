//! Which modules stay on the card. Pure functions over sizes.

#![deny(unsafe_code)]

use std::cmp::Reverse;

/// A module, as far as the choice goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Candidate {
    /// What it costs a pass to have it outside: bytes that cross the link, and those patched each time.
    pub(super) cost: u64,
    /// Bytes that it takes of the card.
    pub(super) bytes: u64,
    /// Whether it is on the card.
    pub(super) loaded: bool,
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

/// The modules to load, dearest first: one is taken while what is loaded so far, its bytes and the
/// streaming buffer for the largest modules still outside stay within `limit`.
pub(super) fn to_load(candidates: &[Candidate], limit: u64) -> Vec<usize> {
    let order: Vec<usize> =
        ranked(candidates).into_iter().filter(|&place| !candidates[place].loaded).collect();
    // The largest of what follows each place.
    let mut following = vec![Largest::default(); order.len() + 1];
    for (place, &module) in order.iter().enumerate().rev() {
        following[place] = following[place + 1];
        following[place].add(candidates[module].bytes);
    }
    let loaded = candidates.iter().filter(|candidate| candidate.loaded);
    let mut loaded = loaded.fold(0_u64, |sum, candidate| sum.saturating_add(candidate.bytes));
    let mut skipped = Largest::default();
    let mut chosen = Vec::new();
    for (place, &module) in order.iter().enumerate() {
        let bytes = candidates[module].bytes;
        let buffer = skipped.and(following[place + 1]).buffer_bytes();
        if loaded.saturating_add(bytes).saturating_add(buffer) <= limit {
            loaded += bytes;
            chosen.push(module);
        } else {
            skipped.add(bytes);
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

    fn modules(sizes: &[u64]) -> Vec<Candidate> {
        sizes.iter().map(|&bytes| Candidate { cost: bytes, bytes, loaded: false }).collect()
    }

    #[test]
    fn the_dearest_stay_while_they_and_the_buffer_fit() {
        let all = modules(&[10, 40, 20, 30]);
        assert_eq!(to_load(&all, 100), [1, 3, 2, 0]);
        // 40 and a buffer of 30 + 20.
        assert_eq!(to_load(&all, 90), [1, 3]);
        // The largest does not fit; then the buffer is made for it: 30 + (40 + 20).
        assert_eq!(to_load(&all, 89), Vec::<usize>::new());
        assert_eq!(to_load(&all, 0), Vec::<usize>::new());
        assert_eq!(to_load(&[], 0), Vec::<usize>::new());
    }

    #[test]
    fn what_is_chosen_and_the_buffer_never_exceed_the_limit_and_more_budget_never_loads_less_bytes_in_all() {
        let mut seed = 0x2545_F491_4F6C_DD1D_u64;
        let mut next = |limit: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % limit
        };
        for _ in 0..500 {
            let all: Vec<Candidate> = (0..next(12))
                .map(|_| Candidate { cost: next(50), bytes: next(100) + 1, loaded: next(4) == 0 })
                .collect();
            let before: u64 = all.iter().filter(|one| one.loaded).map(|one| one.bytes).sum();
            let total: u64 = all.iter().map(|one| one.bytes).sum();
            let limit = next(total + 50);
            let chosen = to_load(&all, limit);
            let mut after = all.clone();
            for &module in &chosen {
                assert!(!after[module].loaded);
                after[module].loaded = true;
            }
            let loaded: u64 = after.iter().filter(|one| one.loaded).map(|one| one.bytes).sum();
            let mut outside = Largest::default();
            after.iter().filter(|one| !one.loaded).for_each(|one| outside.add(one.bytes));
            assert!(chosen.is_empty() || loaded + outside.buffer_bytes() <= limit, "{all:?} {limit}");
            assert!(loaded >= before);
            if limit >= total {
                assert_eq!(loaded, total);
            }
        }
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
        let all = modules(&[u64::MAX, u64::MAX, u64::MAX]);
        assert_eq!(to_load(&all, u64::MAX).len(), 3);
        assert_eq!(to_load(&all, u64::MAX - 1), Vec::<usize>::new());
    }
}
