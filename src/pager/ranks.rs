//! Which pages of a pass are kept before which: every page has a rank.
//!
//! Pure. Pages are ranked by cells, runs of neighbouring spans: it is decided how many pages of each cell
//! stream at any budget, and they are the last of it, one run that a copy can bring.

#![deny(unsafe_code)]

use std::ops::Range;

/// The pages that a span of a pass is the first to use: a run, since only a span's outer pages are shared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstUse {
    /// The first of them.
    pub(crate) page: u32,
    /// Pages that spans before it were the first to use: this one's place in the pass.
    pub(crate) before: u32,
}

/// What decides which pages stay when not all can.
///
/// Pages of `first` are kept before all others, then pages that several cells touch, since streaming one
/// drags all of their spans along. Of the rest it is decided how many each cell keeps, spread over the pass;
/// which ones makes little difference to the pass, as a cell's pages are needed about at once. So a cell keeps
/// its first pages, and what it streams is one run at its end that one copy can bring.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Keeping {
    /// Runs of pages that are kept before all others, in ascending order.
    pub(crate) first: Vec<Range<u32>>,
    /// By span, in any measure, how much of what streams is to be its. Empty: an equal part of each cell's
    /// pages, by the van der Corput numbers of their grains in the pass.
    pub(crate) shares: Vec<u32>,
    /// Pages that are ranked as one: a cell's pages go over to streaming so many at a time, so that copies are
    /// no smaller.
    pub(crate) grain: u32,
    /// Pages of a cell. Spans that follow one another in pass and addresses are joined until they have so many;
    /// 0 makes each a cell of its own.
    pub(crate) cell: u32,
}

impl Default for Keeping {
    fn default() -> Self {
        Self { first: Vec::new(), shares: Vec::new(), grain: 1, cell: 0 }
    }
}

impl Keeping {
    /// How many pages are kept before all others.
    pub(crate) fn first_pages(&self) -> u32 {
        self.first.iter().map(|pages| pages.end - pages.start).sum()
    }
}

/// Spans of a pass that are ranked together.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Cell {
    /// Their places in the pass.
    spans: Range<u32>,
    /// The first page that they are the first to use, and how many they are.
    page: u32,
    pages: u32,
    /// The place of that page in the pass.
    place: u32,
}

/// The cells of a pass of `total` pages, of `size` pages and more where spans are neighbours.
fn cells(firsts: &[FirstUse], total: u32, size: u32) -> Vec<Cell> {
    let mut cells: Vec<Cell> = Vec::with_capacity(firsts.len());
    let ends = firsts.iter().skip(1).map(|next| next.before).chain(std::iter::once(total));
    for ((position, first), end) in (0_u32..).zip(firsts).zip(ends) {
        let pages = end - first.before;
        match cells.last_mut() {
            // A span that lies in a page of the one before it.
            Some(cell) if pages == 0 && size > 0 => cell.spans.end = position + 1,
            Some(cell) if cell.pages < size && cell.page + cell.pages == first.page => {
                cell.spans.end = position + 1;
                cell.pages += pages;
            }
            _ => cells.push(Cell {
                spans: position..position + 1,
                page: first.page,
                pages,
                place: first.before,
            }),
        }
    }
    cells
}

/// The pages of a pass of `spans` in the order in which they are kept. `last_use` is the place in `spans` of the
/// last one that touches a page.
pub(crate) fn keep_order(
    keeping: &Keeping,
    spans: &[u32],
    firsts: &[FirstUse],
    total: u32,
    last_use: &[u32],
) -> Vec<u32> {
    const SPREAD: u8 = 2;
    let class = |cell: &Cell, page: u32| {
        let at = keeping.first.partition_point(|pages| pages.end <= page);
        if keeping.first.get(at).is_some_and(|pages| pages.contains(&page)) {
            0
        } else if last_use[page as usize] >= cell.spans.end {
            1
        } else {
            SPREAD
        }
    };
    let share = |cell: &Cell| {
        let spans = &spans[cell.spans.start as usize..cell.spans.end as usize];
        let share = |span: &u32| u64::from(keeping.shares.get(*span as usize).copied().unwrap_or(0));
        (!keeping.shares.is_empty()).then(|| spans.iter().map(share).sum::<u64>())
    };
    let bits = u32::BITS - total.leading_zeros();
    let grain = keeping.grain.max(1);
    let cells = cells(firsts, total, keeping.cell);
    // Class, number within it, the cell, the page.
    let mut keyed: Vec<(u8, u64, u32, u32)> = Vec::with_capacity(total as usize);
    for (number, cell) in (0_u32..).zip(&cells) {
        let pages = cell.page..cell.page + cell.pages;
        let spread = pages.clone().filter(|&page| class(cell, page) == SPREAD).count();
        // What is left over goes with the last grain.
        let grains = (u32::try_from(spread).unwrap_or(u32::MAX) / grain).max(1);
        let share = share(cell);
        let (mut spread, mut grain_place) = (0_u32, 0);
        for (place, page) in (cell.place..).zip(pages) {
            let class = class(cell, page);
            let first_of_grain = spread.is_multiple_of(grain) && spread / grain < grains;
            let rank = match (class, share) {
                (SPREAD, Some(share)) => {
                    // The first to stream has the largest number; where shares are as many pages, all of
                    // them go before any cell's next one.
                    let ahead = (spread / grain).min(grains - 1) * grain;
                    let streams = (u64::from(2 * ahead + grain) << 30).checked_div(share);
                    u64::MAX - streams.unwrap_or(u64::MAX / 2 + u64::from(spread))
                }
                (SPREAD, None) => {
                    if first_of_grain {
                        grain_place = place / grain;
                    }
                    van_der_corput(u64::from(grain_place), bits)
                }
                _ => van_der_corput(u64::from(place), bits),
            };
            spread += u32::from(class == SPREAD);
            keyed.push((class, rank, number, page));
        }
    }
    keyed.sort_unstable();
    // Only how many of a cell's pages come before any place was decided: the first ones do.
    let mut next: Vec<u32> = cells.iter().map(|cell| cell.page).collect();
    for (kind, _, number, page) in &mut keyed {
        if *kind == SPREAD
            && let (Some(next), Some(cell)) = (next.get_mut(*number as usize), cells.get(*number as usize))
        {
            while class(cell, *next) != SPREAD {
                *next += 1;
            }
            *page = *next;
            *next += 1;
        }
    }
    keyed.into_iter().map(|(_, _, _, page)| page).collect()
}

/// The van der Corput number of `place` in base 2, as an integer of `bits` bits: its bits reversed.
fn van_der_corput(place: u64, bits: u32) -> u64 {
    if bits == 0 { 0 } else { place.reverse_bits() >> (64 - bits) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::order::PassOrder;

    /// Spans of these pages one after the other, each sharing the next one's first page if `shared`.
    fn spans(lengths: &[u32], shared: bool) -> Vec<Range<u32>> {
        let (mut end, pages) = (0, lengths.iter().sum());
        let span = |length: &u32| {
            let start = end;
            end += length;
            start..(end + u32::from(shared)).min(pages)
        };
        lengths.iter().map(span).collect()
    }

    /// What each span streams beyond the first `kept` of the keep order, as pages.
    fn streamed(order: &PassOrder, spans: &[Range<u32>], kept: u32) -> Vec<Vec<u32>> {
        let streams = |page: &u32| order.rank(*page) >= kept;
        spans.iter().map(|pages| pages.clone().filter(streams).collect()).collect()
    }

    #[test]
    fn what_a_span_streams_is_one_run_at_its_end_at_any_budget() {
        let lengths: Vec<u32> = (0..40).map(|number| 3 + number * 7 % 31).collect();
        let pages: u32 = lengths.iter().sum();
        for (shared, grain, shares) in
            [(false, 1, vec![]), (true, 1, vec![]), (true, 2, vec![]), (true, 1, lengths.clone())]
        {
            let spans = spans(&lengths, shared);
            let keeping = Keeping { shares, grain, ..Keeping::default() };
            let order =
                PassOrder::new((0..40).collect(), pages, |span| spans[span as usize].clone(), &keeping);
            let mut ranked = order.keep().to_vec();
            ranked.sort_unstable();
            assert_eq!(ranked, order.pages().collect::<Vec<_>>(), "every page has one rank");
            for kept in 40..pages {
                for (span, streamed) in spans.iter().zip(streamed(&order, &spans, kept)) {
                    // Where spans meet their page stays longer.
                    let end = span.end - u32::from(shared && span.end < pages);
                    let run: Vec<u32> = (end - u32::try_from(streamed.len()).unwrap()..end).collect();
                    assert_eq!(streamed, run, "{span:?} with {kept} kept, grain {grain}");
                }
            }
        }
    }

    #[test]
    fn a_grain_goes_over_to_streaming_as_one() {
        let lengths: Vec<u32> = (0..40).map(|number| 4 + number * 6 % 30).collect();
        let (spans, pages) = (spans(&lengths, false), lengths.iter().sum());
        for grain in [2, 4] {
            let keeping = Keeping { grain, ..Keeping::default() };
            let order =
                PassOrder::new((0..40).collect(), pages, |span| spans[span as usize].clone(), &keeping);
            for kept in 1..pages {
                let streamed = streamed(&order, &spans, kept);
                // The last grain of a span may be shorter.
                let whole = |run: usize, length: u32| {
                    let run = u32::try_from(run).unwrap();
                    run.is_multiple_of(grain) || run % grain == length % grain
                };
                let odd = streamed.iter().zip(&lengths).filter(|(run, length)| !whole(run.len(), **length));
                assert!(odd.count() <= 1, "{kept}: {streamed:?}");
            }
        }
    }

    #[test]
    fn shares_say_how_much_of_what_streams_is_a_spans() {
        let spans = spans(&[100; 4], false);
        let keeping = Keeping { shares: vec![10, 0, 20, 30], ..Keeping::default() };
        let order = PassOrder::new((0..4).collect(), 400, |span| spans[span as usize].clone(), &keeping);
        for (streams, expected) in [(60, [10, 0, 20, 30]), (120, [20, 0, 40, 60]), (180, [30, 0, 60, 90])] {
            let counts: Vec<usize> = streamed(&order, &spans, 400 - streams).iter().map(Vec::len).collect();
            assert_eq!(counts, expected);
        }
        // What has no share streams when all else does.
        assert_eq!(
            streamed(&order, &spans, 50).iter().map(Vec::len).collect::<Vec<_>>(),
            [100, 50, 100, 100]
        );
    }

    #[test]
    fn what_a_cell_streams_is_one_run_at_its_end_over_all_of_its_spans() {
        let lengths: Vec<u32> = (0..200).map(|number| number * 7 % 5).collect();
        let pages: u32 = lengths.iter().sum();
        for shared in [false, true] {
            let spans = spans(&lengths, shared);
            let keeping = Keeping { grain: 2, cell: 20, ..Keeping::default() };
            let order =
                PassOrder::new((0..200).collect(), pages, |span| spans[span as usize].clone(), &keeping);
            let mut ranked = order.keep().to_vec();
            ranked.sort_unstable();
            assert_eq!(ranked, order.pages().collect::<Vec<_>>(), "every page has one rank");
            for kept in pages / 4..pages {
                let streamed: Vec<u32> = (0..pages).filter(|page| order.rank(*page) >= kept).collect();
                let runs: Vec<usize> = streamed.chunk_by(|a, b| a + 1 == *b).map(<[u32]>::len).collect();
                // One run a cell of 20 to 24 pages, but for one grain that is half gone over.
                assert!(runs.len() <= pages.div_ceil(20) as usize, "{kept}: {runs:?}");
                assert!(runs.iter().filter(|run| **run == 1).count() <= 1, "{kept}: {runs:?}");
            }
        }
    }

    #[test]
    fn cells_join_neighbours_only_and_take_in_what_lies_in_their_pages() {
        let first = |page, before| FirstUse { page, before };
        // Of 3, 2, no, 4, 6 and 1 pages; the fourth begins elsewhere.
        let firsts =
            [first(10, 0), first(13, 3), first(u32::MAX, 5), first(40, 5), first(44, 9), first(50, 15)];
        let joined = |size| -> Vec<(Range<u32>, u32, u32)> {
            cells(&firsts, 16, size).into_iter().map(|cell| (cell.spans, cell.page, cell.pages)).collect()
        };
        assert_eq!(joined(20), [(0..3, 10, 5), (3..6, 40, 11)]);
        assert_eq!(joined(5), [(0..3, 10, 5), (3..5, 40, 10), (5..6, 50, 1)]);
        assert_eq!(joined(0).len(), 6);
    }
}
