//! The offline optimum: Belady's rule with bypass, in pages.
//!
//! It knows every use to come. A page that is used is kept only if its next use comes before that of some
//! kept page; otherwise it passes through (the ring's part of the work) and takes nobody's place.

use std::collections::{BTreeSet, HashMap};

/// The misses at each use of `uses` with room for `capacity` pages, beginning empty.
pub fn misses(uses: &[u64], capacity: usize) -> Vec<bool> {
    let mut next = vec![usize::MAX; uses.len()];
    let mut seen: HashMap<u64, usize> = HashMap::new();
    for (place, &page) in uses.iter().enumerate().rev() {
        if let Some(later) = seen.insert(page, place) {
            next[place] = later;
        }
    }
    // Kept pages by their next use, which names the page too.
    let mut kept: BTreeSet<usize> = BTreeSet::new();
    let mut missed = Vec::with_capacity(uses.len());
    for (place, &next) in next.iter().enumerate() {
        let hit = kept.remove(&place);
        missed.push(!hit);
        if next == usize::MAX || capacity == 0 {
            continue;
        }
        if kept.len() < capacity {
            kept.insert(next);
        } else if kept.last().is_some_and(|&last| last > next) {
            kept.pop_last();
            kept.insert(next);
        }
    }
    missed
}

/// The misses of the last of `repeats` passes over pages `0..pages`, in pages.
pub fn cyclic(pages: u64, capacity: u64, repeats: usize) -> u64 {
    let uses: Vec<u64> = (0..repeats).flat_map(|_| 0..pages).collect();
    let missed = misses(&uses, usize::try_from(capacity).unwrap_or(usize::MAX));
    // The very last pass has no future; the one before stands for the steady state.
    let pages = usize::try_from(pages).unwrap_or(usize::MAX);
    let from = pages * (repeats - 2);
    missed[from..from + pages].iter().filter(|missed| **missed).count() as u64
}
