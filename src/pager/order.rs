//! The order of a pass: which pages a pass touches when, and which of them stay first.
//!
//! Pure: values in, values out. Spans are named by their number in the layout, pages by theirs.

#![deny(unsafe_code)]

use std::ops::Range;

pub(crate) use super::ranks::Keeping;
use super::ranks::{FirstUse, keep_order};

/// The pages of a pass in order of first use, and the order in which pages are worth keeping.
///
/// 8 bytes a page and 16 a span.
#[derive(Debug)]
pub(crate) struct PassOrder {
    /// Spans in the order that a pass faults them.
    spans: Vec<u32>,
    /// A span's place in `spans`.
    span_position: Vec<u32>,
    /// What each of `spans` is the first to use.
    firsts: Vec<FirstUse>,
    /// Pages that have a place in the pass.
    page_total: u32,
    /// Pages in the order in which they are kept: the first ones stay resident longest.
    keep: Vec<u32>,
    /// A page's place in `keep`.
    rank: Vec<u32>,
}

/// A page's place in a pass, and the place of the span that is the first to use it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct PagePlace {
    /// Among the pages, in order of first use.
    pub(crate) page: u32,
    /// Among the spans: where to look for it.
    pub(crate) span: u32,
}

impl PassOrder {
    /// Lays out the order for `spans`, each named at most once; `pages_of` gives a span's pages. A span that
    /// is not named stands outside: its pages, unless another span shares them, have no place in the pass.
    ///
    /// Which pages are worth keeping is [`Keeping`]'s to say; whatever it says, prefixes of the order nest.
    pub(crate) fn new(
        spans: Vec<u32>,
        page_count: u32,
        pages_of: impl Fn(u32) -> Range<u32>,
        keeping: &Keeping,
    ) -> Self {
        let spans_end = spans.iter().max().map_or(0, |last| *last as usize + 1);
        let mut span_position = vec![u32::MAX; spans_end];
        let mut last_use = vec![u32::MAX; page_count as usize];
        let mut firsts = Vec::with_capacity(spans.len());
        let mut page_total = 0;
        for (position, &span) in (0..).zip(&spans) {
            if let Some(place) = span_position.get_mut(span as usize) {
                *place = position;
            }
            let mut first = FirstUse { page: u32::MAX, before: page_total };
            for page in pages_of(span) {
                if std::mem::replace(&mut last_use[page as usize], position) == u32::MAX {
                    first.page = first.page.min(page);
                    page_total += 1;
                }
            }
            firsts.push(first);
        }
        let keep = keep_order(keeping, &spans, &firsts, page_total, &last_use);
        let mut rank = vec![u32::MAX; page_count as usize];
        for (place, &page) in (0..).zip(&keep) {
            rank[page as usize] = place;
        }
        Self { spans, span_position, firsts, page_total, keep, rank }
    }

    /// Spans in pass order.
    pub(crate) fn spans(&self) -> &[u32] {
        &self.spans
    }

    /// A span's place in the pass; 0 for one that stands outside.
    pub(crate) fn position(&self, span: u32) -> u32 {
        self.span_position.get(span as usize).copied().filter(|place| *place != u32::MAX).unwrap_or(0)
    }

    /// Whether a span has a place in the pass.
    pub(crate) fn contains(&self, span: u32) -> bool {
        self.span_position.get(span as usize).is_some_and(|place| *place != u32::MAX)
    }

    /// Whether a page has a place in the pass.
    pub(crate) fn has_page(&self, page: u32) -> bool {
        self.rank[page as usize] != u32::MAX
    }

    /// Pages in order of first use.
    pub(crate) fn pages(&self) -> Pages<'_> {
        Pages { firsts: &self.firsts, total: self.page_total, place: PagePlace::default() }
    }

    /// The page at a place of the pass, with the place of its span set right; `None` behind the last.
    pub(crate) fn page_at(&self, place: &mut PagePlace) -> Option<u32> {
        page_at(&self.firsts, self.page_total, place)
    }

    /// The place of a page that `spans` touch; `None` if it has none in the pass.
    pub(crate) fn place_of(&self, page: u32, spans: Range<u32>) -> Option<PagePlace> {
        spans.filter(|span| self.contains(*span)).find_map(|span| {
            let span = self.position(span);
            let first = self.firsts.get(span as usize)?;
            let end = self.firsts.get(span as usize + 1).map_or(self.page_total, |next| next.before);
            let place = first.before + page.checked_sub(first.page)?;
            (place < end).then_some(PagePlace { page: place, span })
        })
    }

    /// Pages in the order in which they are kept.
    pub(crate) fn keep(&self) -> &[u32] {
        &self.keep
    }

    /// Pages that have a rank.
    pub(crate) fn rank_len(&self) -> usize {
        self.rank.len()
    }

    /// A page's place in [`Self::keep`]; `u32::MAX` for a page that no span touches.
    pub(crate) fn rank(&self, page: u32) -> u32 {
        self.rank[page as usize]
    }
}

/// See [`PassOrder::page_at`].
fn page_at(firsts: &[FirstUse], total: u32, place: &mut PagePlace) -> Option<u32> {
    if place.page >= total {
        return None;
    }
    // The last span that begins at or before the page. It is near where the last one was: steps double.
    let begins = |span: usize| firsts.get(span).is_some_and(|first| first.before <= place.page);
    let mut span = if begins(place.span as usize) { place.span as usize } else { 0 };
    let mut step = 1;
    while begins(span + step) {
        span += step;
        step *= 2;
    }
    while step > 1 {
        step /= 2;
        if begins(span + step) {
            span += step;
        }
    }
    place.span = u32::try_from(span).unwrap_or(u32::MAX);
    let first = firsts.get(span)?;
    Some(first.page + (place.page - first.before))
}

/// Pages of a pass in order of first use.
#[derive(Clone, Debug)]
pub(crate) struct Pages<'a> {
    firsts: &'a [FirstUse],
    total: u32,
    place: PagePlace,
}

impl Iterator for Pages<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let page = page_at(self.firsts, self.total, &mut self.place)?;
        self.place.page += 1;
        Some(page)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.total - self.place.page) as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Pages<'_> {}

/// A set of places of a pass, a bit each; finds the next one without looking at each.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlaceSet {
    bits: Vec<u64>,
    /// A bit for each of `bits` that is not zero.
    any: Vec<u64>,
    len: u32,
}

impl PlaceSet {
    /// An empty set for places below `end`.
    pub(crate) fn new(end: u32) -> Self {
        let words = end.div_ceil(64);
        Self { bits: vec![0; words as usize], any: vec![0; words.div_ceil(64) as usize], len: 0 }
    }

    /// Adds a place that is not in it.
    pub(crate) fn insert(&mut self, place: u32) {
        let word = place / 64;
        self.bits[word as usize] |= 1 << (place % 64);
        self.any[word as usize / 64] |= 1 << (word % 64);
        self.len += 1;
    }

    /// How many places it has.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The first place at or behind `from`.
    pub(crate) fn next(&self, from: u32) -> Option<u32> {
        let word = from / 64;
        let here = self.bits.get(word as usize)? & (!0 << (from % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros());
        }
        let from = word + 1;
        let mut first = !0 << (from % 64);
        let rest = self.any.get(from as usize / 64..)?;
        let (summary, any) = (from / 64..).zip(rest).find_map(|(place, any)| {
            let any = any & std::mem::replace(&mut first, !0);
            (any != 0).then_some((place, any))
        })?;
        let word = summary * 64 + any.trailing_zeros();
        Some(word * 64 + self.bits.get(word as usize)?.trailing_zeros())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_prefix_of_the_keep_order_is_spread_over_the_pass() {
        let order =
            PassOrder::new((0..100).collect(), 1000, |span| span * 10..span * 10 + 10, &Keeping::default());
        for budget in [10, 100, 250, 500, 900] {
            let mut kept: Vec<u32> = order.keep()[..budget].to_vec();
            kept.sort_unstable();
            #[expect(clippy::cast_precision_loss)]
            for (place, page) in kept.iter().enumerate() {
                let even = place as f64 * 1000.0 / budget as f64;
                let off = (f64::from(*page) - even).abs() * budget as f64 / 1000.0;
                assert!(off < 5.0, "page {page} of {budget} is {off} places from even");
            }
        }
    }

    #[test]
    fn pages_of_several_spans_are_kept_first() {
        let order = PassOrder::new(
            vec![0, 1, 2],
            5,
            |span| [0..2, 1..4, 4..5][span as usize].clone(),
            &Keeping::default(),
        );
        assert_eq!(order.keep()[0], 1);
        assert_eq!(order.rank(1), 0);
        assert_eq!(order.pages().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn pages_come_in_order_of_first_use_and_have_their_places() {
        // Spans of any length, empty ones too, that share the page where they meet, in a shuffled order.
        let mut seed = 7_u32;
        println!("seed {seed}");
        let mut random = |below: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) % below
        };
        for _ in 0..50 {
            let mut spans = Vec::new();
            let mut end = 0_u32;
            for _ in 0..40 {
                let start = if random(2) == 0 { end.saturating_sub(1) } else { end };
                end = if random(5) == 0 { end } else { end.max(start) + 1 + random(20) };
                spans.push(if end == start { start..start } else { start.min(end)..end });
            }
            let mut shuffled: Vec<u32> = (0..40).collect();
            for place in (1..40_u32).rev() {
                shuffled.swap(place as usize, random(place + 1) as usize);
            }
            let order = PassOrder::new(
                shuffled.clone(),
                end,
                |span| spans[span as usize].clone(),
                &Keeping::default(),
            );
            let mut expected: Vec<u32> = Vec::new();
            for &span in &shuffled {
                expected.extend(
                    spans[span as usize].clone().filter(|page| !expected.contains(page)).collect::<Vec<_>>(),
                );
            }
            assert_eq!(order.pages().len(), expected.len());
            assert_eq!(order.pages().collect::<Vec<_>>(), expected);
            for (place, &page) in (0..).zip(&expected) {
                let touching = |span: &u32| spans[*span as usize].contains(&page);
                let first = (0..40).find(touching).unwrap();
                let last = (0..40).rfind(touching).unwrap();
                let found = order.place_of(page, first..last + 1).unwrap();
                assert_eq!(found.page, place);
                let mut anywhere = PagePlace { page: place, span: random(40) };
                assert_eq!(order.page_at(&mut anywhere), Some(page));
            }
        }
    }

    #[test]
    fn a_set_of_places_finds_the_next_one_however_far() {
        for gap in [1, 63, 64, 65, 5000, 70_000] {
            let places: Vec<u32> = (0..8).map(|number| 3 + number * gap).collect();
            let mut set = PlaceSet::new(8 * gap + 3);
            for &place in &places {
                set.insert(place);
            }
            assert_eq!(set.len(), 8);
            for from in (0..8 * gap + 3).step_by((gap as usize / 7).max(1)) {
                assert_eq!(set.next(from), places.iter().copied().find(|place| *place >= from), "{from}");
            }
            assert_eq!(set.next(u32::MAX), None);
        }
        assert_eq!(PlaceSet::default().next(0), None);
    }
}
