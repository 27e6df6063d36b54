//! Where to begin to look in a list that is sorted by address.
//!
//! Pure. A mark for every few pages of the address space names the first entry that ends behind the mark's
//! address. A lookup searches between two marks only: what it costs depends on how many entries lie in a few
//! pages, not on how long the list is.

#![deny(unsafe_code)]

use std::cmp::Ordering;

/// Pages between two marks: a eighth of a byte a page.
const PAGES: u64 = 32;

/// The most marks; in an address space of more than 32 million pages they stand further apart.
const MOST: u64 = 1 << 20;

/// Marks over a list of at most 2^32 entries.
#[derive(Clone, Debug, Default)]
pub(super) struct Landmarks {
    /// The address space between two marks.
    step: u64,
    /// For each multiple of `step`, the first entry that ends behind it.
    marks: Box<[u32]>,
}

impl Landmarks {
    /// Marks for entries that end at `ends`, ascending, none behind `space`.
    pub(super) fn new(ends: &mut dyn Iterator<Item = u64>, page_bytes: u64, space: u64) -> Self {
        let step = page_bytes.saturating_mul(PAGES).max(space / MOST);
        let mut marks = Vec::new();
        let mut address = Some(0_u64);
        for (place, end) in (0_u32..).zip(ends) {
            while let Some(behind) = address.filter(|address| *address < end) {
                marks.push(place);
                address = behind.checked_add(step);
            }
        }
        Self { step, marks: marks.into() }
    }

    /// The first entry that ends behind `address`; the list's length if none does. `end` gives an entry's end.
    #[inline]
    pub(super) fn first<T>(&self, list: &[T], address: u64, end: impl Fn(&T) -> u64) -> usize {
        let mark = usize::try_from(address / self.step.max(1)).unwrap_or(usize::MAX);
        // No mark: every entry ends before the address.
        let Some(&from) = self.marks.get(mark) else { return list.len() };
        let from = from as usize;
        // The entry that the next mark names may be the answer too; behind the last mark all may be.
        let to = self.marks.get(mark + 1).map_or(list.len(), |next| *next as usize + 1);
        let near = &list[from..to.min(list.len())];
        // A few entries are looked at one by one: that is quicker than a search in halves.
        if near.len() <= 8 {
            return from + near.iter().position(|entry| end(entry) > address).unwrap_or(near.len());
        }
        let behind = |entry: &T| if end(entry) <= address { Ordering::Less } else { Ordering::Greater };
        from + near.binary_search_by(behind).unwrap_or_else(|place| place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_by_marks_finds_what_a_search_of_all_finds() {
        let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
        println!("seed {seed:#x}");
        let mut random = |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        for case in 0..200 {
            let largest = [1, 40, 700, 20_000][case % 4];
            let mut ends = Vec::new();
            let mut end = 0;
            for _ in 0..random(80) {
                // Some entries are empty.
                end += random(largest);
                ends.push(end);
            }
            let marks = Landmarks::new(&mut ends.iter().copied(), 16, end);
            for _ in 0..300 {
                let address = random(end + 600);
                let all = ends.partition_point(|end| *end <= address);
                assert_eq!(marks.first(&ends, address, |end| *end), all, "{address} in {ends:?}");
            }
        }
    }
}
