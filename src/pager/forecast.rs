//! What a card would make of a model, before anything is loaded: pure.
//!
//! A forecast takes a file's layout and a card's figures through the same [`choose`] and [`plan`] that the
//! pager goes by, for a model that has the card to itself and whose runner faults every unit, or every piece
//! of one, in file order, one after the other. It touches no device and takes no lock. What it cannot know:
//! how long a pass takes (that is the clock's to say), memory that activations will take, other models.

#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::choose::choose;
use super::convert::link_bytes;
use super::core::ModelState;
use super::error::PagerError;
use super::modelled::Compute;
use super::options::{ModelOptions, PagerOptions};
use super::order::{Keeping, PassOrder};
use super::plain;
use super::plan::{Choice, Plan, RingSize, plan};
use super::ring;
use crate::units::{GIB, MIB, Rate};
use crate::weights::{LayoutOptions, PageLayout, Span, TensorId, TensorIndex, UnitId};

/// The link that plans are made for where the device tells none and none was measured yet: `PCIe` 4 x16 as measured
/// by others.
pub const ASSUMED_LINK: Rate = Rate(25_000_000_000);

/// The default headroom: the smaller of this and 1/32 of the card.
const DEFAULT_HEADROOM: u64 = 400 * MIB;

/// A card as a forecast needs to know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CardFacts {
    /// Its size in bytes.
    pub total_bytes: u64,
    /// Bytes that nobody holds, device wide.
    pub free_bytes: u64,
    /// The smallest frame in bytes.
    pub granularity: u64,
    /// Whether it has virtual memory calls.
    pub virtual_memory: bool,
    /// The rate of its link, if it tells one; otherwise [`ASSUMED_LINK`] is taken.
    pub link: Option<Rate>,
}

/// What a card makes of a model, in steady state.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Forecast {
    /// Bytes of the tensors as they are on the card.
    pub weights_bytes: u64,
    /// The page size in bytes.
    pub page_bytes: u64,
    /// Pages of the model.
    pub pages: u32,
    /// Bytes left free, device wide.
    pub headroom_bytes: u64,
    /// Bytes that frames and ring may take.
    pub budget_bytes: u64,
    /// Bytes of pages that stay.
    pub resident_bytes: u64,
    /// Bytes of the ring; zero if everything stays.
    pub ring_bytes: u64,
    /// The most bytes that one fault streams at once.
    pub largest_streamed_part_bytes: u64,
    /// Bytes that cross the link in each pass: of tensors as they cross it, and small gaps between them.
    pub streamed_bytes: u64,
    /// Units of which more is kept than of others, so that they do not force a large ring.
    pub kept_first: Vec<UnitId>,
    /// Units that are too large for this card to be whole: they are faulted in pieces.
    pub in_pieces: Vec<UnitId>,
    /// The largest thing that must be on the card at once, if the card cannot give so much.
    pub too_large: Option<TooLarge>,
}

/// What a card can never give room for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooLarge {
    /// The unit that it is, or is a piece of.
    pub unit: UnitId,
    /// Bytes of pages that it needs.
    pub need_bytes: u64,
}

impl Forecast {
    /// Whether every unit, or every piece of one, has room on the card.
    pub fn runs(&self) -> bool {
        self.too_large.is_none()
    }

    /// Whether nothing crosses the link once the model is in.
    pub fn fits(&self) -> bool {
        self.runs() && self.streamed_bytes == 0
    }
}

/// The bytes that a pager leaves free on a card, as its options say.
pub(super) fn headroom_of(total_bytes: u64, options: &PagerOptions) -> u64 {
    options.headroom_bytes.unwrap_or((total_bytes / 32).min(DEFAULT_HEADROOM))
}

/// How a model is laid out for a card of this size.
pub(super) fn layout_options(
    total_bytes: u64,
    headroom: u64,
    page_bytes: u64,
    options: &ModelOptions,
) -> LayoutOptions {
    let total = total_bytes.saturating_sub(headroom);
    let (whole_bytes, piece_bytes) = match options.piece_bytes {
        Some(piece) => (piece, piece),
        None => (total / 2, total / 16),
    };
    LayoutOptions {
        page_bytes,
        whole_bytes,
        piece_bytes: piece_bytes.max(page_bytes),
        compute: options.compute,
    }
}

/// Whether a tensor is cast to a wider type on the card, where its bytes land in memory of the copy streams.
pub(super) fn widens(layout: &PageLayout) -> bool {
    (0..).map(TensorId).zip(layout.index().tensors()).any(|(id, tensor)| {
        let to = layout.tensor_at(id).dtype;
        tensor.dtype != to && tensor.dtype.byte_size() < to.byte_size()
    })
}

/// What each copy stream takes of the card's pool for that: one chunk.
pub(super) fn scratch_bytes(options: &PagerOptions, page_bytes: u64) -> u64 {
    u64::from(options.chunk_pages(page_bytes)) * page_bytes
}

/// The compute of a pass in page copies: one GiB of weights takes `per_gib`.
pub(super) fn compute_in_copies(page_count: u32, per_gib: std::time::Duration, link: Rate) -> f64 {
    let copy = link.duration(GIB);
    f64::from(page_count) * per_gib.as_secs_f64() / copy.as_secs_f64().max(f64::MIN_POSITIVE)
}

/// What a card of these figures makes of a model that it has to itself.
///
/// # Errors
/// A layout that cannot be: a cast that does not exist, more pages than there can be.
pub fn forecast(
    index: &Arc<TensorIndex>,
    card: &CardFacts,
    options: &PagerOptions,
    model: &ModelOptions,
) -> Result<Forecast, PagerError> {
    let seen = Seen::new(index, card, options, model)?;
    Ok(if card.virtual_memory { seen.paged(card, options, model) } else { seen.whole() })
}

/// The card sizes at which something changes for a model, see [`card_sizes`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CardSizes {
    /// The smallest card that runs it, however much crosses the link.
    pub smallest_bytes: Option<u64>,
    /// The smallest card on which nothing crosses the link once the model is in.
    pub resident_from_bytes: Option<u64>,
}

/// The smallest card that runs a model, and the smallest that holds it, among cards that are like `card` but
/// for their size and have nobody else on them. `headroom_of` says what is left free on a card of a size.
///
/// # Errors
/// As [`forecast`].
pub fn card_sizes(
    index: &Arc<TensorIndex>,
    card: &CardFacts,
    options: &PagerOptions,
    model: &ModelOptions,
    headroom_of: impl Fn(u64) -> u64,
) -> Result<CardSizes, PagerError> {
    let page_bytes = options.page_bytes.unwrap_or(card.granularity);
    let seen = |total_bytes: u64| {
        let card = CardFacts { total_bytes, free_bytes: total_bytes, ..*card };
        let options = PagerOptions { headroom_bytes: Some(headroom_of(total_bytes)), ..options.clone() };
        Seen::new(index, &card, &options, model)
    };
    // Weights, twice for what pages waste, and then some for the largest headrooms.
    let weights = seen(card.total_bytes)?.layout.address_bytes();
    let most = weights.saturating_mul(2).saturating_add(headroom_of(weights)).saturating_add(8 * GIB);
    let vmm = card.virtual_memory;
    Ok(CardSizes {
        smallest_bytes: smallest(page_bytes, most, |total| {
            seen(total).map(|seen| seen.too_large(vmm).is_none())
        })?,
        resident_from_bytes: smallest(page_bytes, most, |total| seen(total).map(|seen| seen.holds_all(vmm)))?,
    })
}

/// The smallest size, in whole pages up to `most_bytes`, for which `holds` is true; `None` if it is not even
/// for that.
///
/// By bisection, and then downwards while one of the next 16 smaller sizes does as well: cutting units into
/// pieces by the card's size makes small cards not quite monotone.
fn smallest<E>(
    page_bytes: u64,
    most_bytes: u64,
    mut holds: impl FnMut(u64) -> Result<bool, E>,
) -> Result<Option<u64>, E> {
    const BELOW: u64 = 16;
    let page = page_bytes.max(1);
    let (mut low, mut high) = (0, most_bytes / page);
    if high == 0 || !holds(high * page)? {
        return Ok(None);
    }
    // Invariant: `high` pages do, `low` pages do not.
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle * page)? {
            high = middle;
        } else {
            low = middle;
        }
    }
    'lower: loop {
        for below in 1..=BELOW.min(high.saturating_sub(1)) {
            if holds((high - below) * page)? {
                high -= below;
                continue 'lower;
            }
        }
        return Ok(Some(high * page));
    }
}

/// A model laid out for a card.
struct Seen {
    layout: PageLayout,
    headroom: u64,
    /// Bytes that nobody holds beyond the headroom.
    free_bytes: u64,
}

impl Seen {
    fn new(
        index: &Arc<TensorIndex>,
        card: &CardFacts,
        options: &PagerOptions,
        model: &ModelOptions,
    ) -> Result<Self, PagerError> {
        let page_bytes = options.page_bytes.unwrap_or(card.granularity);
        let headroom = headroom_of(card.total_bytes, options);
        let layout = PageLayout::new(index, &layout_options(card.total_bytes, headroom, page_bytes, model))?;
        let streams = options.copy_streams.max(1) as u64;
        let scratch =
            if widens(&layout) { streams.saturating_mul(scratch_bytes(options, page_bytes)) } else { 0 };
        let free_bytes = card.free_bytes.saturating_sub(headroom).saturating_sub(scratch);
        Ok(Self { layout, headroom, free_bytes })
    }

    fn pages_of(&self, span: u32) -> Range<u32> {
        self.layout.span(span).pages
    }

    fn spans(&self) -> u32 {
        self.layout.span_count()
    }

    /// Bytes that a span needs at once: whole pages, where there are pages.
    fn need(&self, span: &Span, virtual_memory: bool) -> u64 {
        if virtual_memory {
            u64::from(span.pages.end - span.pages.start) * self.layout.page_bytes()
        } else {
            plain::block_bytes(span)
        }
    }

    /// The largest span, if the card cannot give so much.
    fn too_large(&self, virtual_memory: bool) -> Option<TooLarge> {
        let budget = self.budget_bytes(virtual_memory);
        self.layout
            .spans()
            .map(|span| (self.need(&span, virtual_memory), span.unit))
            .max()
            .filter(|(need_bytes, _)| *need_bytes > budget)
            .map(|(need_bytes, unit)| TooLarge { unit, need_bytes })
    }

    /// Whether everything has room at once.
    fn holds_all(&self, virtual_memory: bool) -> bool {
        let spans = self.layout.spans();
        let all: u64 = if virtual_memory {
            // Spans are in address order; neighbours may share a page.
            let mut end = 0;
            let mut pages = 0;
            for span in spans {
                pages += u64::from(span.pages.end.saturating_sub(span.pages.start.max(end)));
                end = end.max(span.pages.end);
            }
            pages * self.layout.page_bytes()
        } else {
            spans.map(|span| plain::block_bytes(&span)).sum()
        };
        all <= self.budget_bytes(virtual_memory)
    }

    /// Bytes that the model may have: whole pages, where there are pages.
    fn budget_bytes(&self, virtual_memory: bool) -> u64 {
        let page = if virtual_memory { self.layout.page_bytes() } else { 1 };
        self.free_bytes / page * page
    }

    /// Everything that does not depend on what stays.
    fn blank(&self, virtual_memory: bool) -> Forecast {
        let in_pieces = (0_u32..)
            .zip(self.layout.units())
            .filter(|(_, unit)| unit.spans.end - unit.spans.start > 1)
            .map(|(unit, _)| UnitId(unit))
            .collect();
        Forecast {
            weights_bytes: self.layout.total_bytes(),
            page_bytes: self.layout.page_bytes(),
            pages: self.layout.page_count(),
            headroom_bytes: self.headroom,
            budget_bytes: self.budget_bytes(virtual_memory),
            resident_bytes: 0,
            ring_bytes: 0,
            largest_streamed_part_bytes: 0,
            streamed_bytes: 0,
            kept_first: Vec::new(),
            in_pieces,
            too_large: self.too_large(virtual_memory),
        }
    }

    /// With virtual memory calls: page by page, through the ring.
    fn paged(&self, card: &CardFacts, options: &PagerOptions, model: &ModelOptions) -> Forecast {
        let layout = &self.layout;
        let page_bytes = layout.page_bytes();
        let budget = u32::try_from(self.free_bytes / page_bytes).unwrap_or(u32::MAX - 1);
        let mut found = self.blank(false);
        found.budget_bytes = u64::from(budget) * page_bytes;
        let largest = layout.spans().max_by_key(|span| span.pages.end - span.pages.start);
        found.too_large = largest.and_then(|span| {
            let pages = span.pages.end - span.pages.start;
            (pages > budget).then(|| TooLarge { unit: span.unit, need_bytes: u64::from(pages) * page_bytes })
        });
        let pages_of = |span: u32| self.pages_of(span);
        let order_with = |keeping: &Keeping| {
            PassOrder::new((0..self.spans()).collect(), layout.page_count(), pages_of, keeping)
        };
        let groups = ModelState::make_groups(layout, &std::collections::HashSet::new());
        let mut order = order_with(&Keeping::default());
        let pages = u32::try_from(order.pages().len()).unwrap_or(u32::MAX);
        let frames = if pages <= budget { budget } else { budget.min(pages.saturating_sub(1)) };
        let mut choice = Choice { keeping: Keeping::default(), ring: options.ring };
        if options.ring == RingSize::Modelled && pages > budget {
            let span = |number: u32| {
                let bytes = layout.span(number).bytes;
                (pages_of(number), bytes.end - bytes.start)
            };
            let link = card.link.unwrap_or(ASSUMED_LINK);
            let total =
                model.compute_per_gib.map(|per_gib| compute_in_copies(layout.page_count(), per_gib, link));
            let compute = Compute { total, ..Compute::default() };
            choice = choose(order_with, &groups, span, frames, options.ahead_pages(page_bytes), &compute);
            order = order_with(&choice.keeping);
        }
        let plan = plan(&order, &groups, frames, choice.ring);
        let ring = if pages <= budget { 0 } else { plan.ring };
        found.resident_bytes = u64::from(plan.resident) * page_bytes;
        found.largest_streamed_part_bytes = u64::from(plan.largest_part) * page_bytes;
        let (slots, streamed) = streamed(layout, &order, plan, ring);
        found.ring_bytes = u64::from(slots) * page_bytes;
        found.streamed_bytes = streamed;
        let is_kept_first = |pages: &Range<u32>| {
            choice.keeping.first.iter().any(|first| first.end == pages.end && first.start >= pages.start)
        };
        found.kept_first = (0_u32..)
            .zip(layout.units())
            .filter(|(_, unit)| unit.spans.clone().any(|span| is_kept_first(&layout.span(span).pages)))
            .map(|(unit, _)| UnitId(unit))
            .collect();
        found
    }

    /// Without: every span is whole, in a block of its own or in a slot.
    fn whole(&self) -> Forecast {
        let mut found = self.blank(false);
        let plan = plain::plan_alone(&self.layout, self.free_bytes);
        found.resident_bytes = plan.resident_bytes;
        found.largest_streamed_part_bytes = plan.slot_bytes;
        let passing: Vec<u32> = (0..self.spans()).filter(|&span| !plan.resident[span as usize]).collect();
        let slots = plan.slots.min(u32::try_from(passing.len()).unwrap_or(u32::MAX));
        found.ring_bytes = u64::from(slots) * plan.slot_bytes;
        if passing.len() > slots as usize {
            let bytes = passing.iter().map(|&span| self.layout.content_bytes(self.layout.span(span).bytes));
            found.streamed_bytes = bytes.sum();
        }
        found
    }
}

/// The ring's slots that are used, and the bytes that cross the link in a pass: those of streamed pages,
/// but for a page that has a slot to itself and so finds its bytes there again.
fn streamed(layout: &PageLayout, order: &PassOrder, plan: Plan, ring: u32) -> (u32, u64) {
    let passing: Vec<u32> = order.pages().filter(|&page| order.rank(page) >= plan.resident).collect();
    let count = u32::try_from(passing.len()).unwrap_or(u32::MAX);
    let slot = |place: u32| ring::slot(place, count, ring);
    let mut users = vec![0_u32; ring as usize + 1];
    for place in 0..count {
        if let Some(users) = users.get_mut(slot(place) as usize) {
            *users += 1;
        }
    }
    let used = users.iter().filter(|users| **users > 0).count();
    let alone = |place: u32| users.get(slot(place) as usize).is_none_or(|users| *users < 2);
    let mut crossing: Vec<u32> =
        (0..).zip(&passing).filter(|(place, _)| !alone(*place)).map(|(_, &page)| page).collect();
    crossing.sort_unstable();
    let page_bytes = layout.page_bytes();
    let bytes = crossing
        .chunk_by(|a, b| a + 1 == *b)
        .filter_map(|run| Some((u64::from(*run.first()?), u64::from(*run.last()?) + 1)))
        .map(|(first, end)| link_bytes(layout, first * page_bytes..end * page_bytes, page_bytes))
        .sum();
    (u32::try_from(used).unwrap_or(u32::MAX), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_card_is_found_also_where_sizes_are_not_quite_monotone() {
        for first in [1, 2, 7, 100, 5000] {
            for gap in 0..4 {
                // `gap` sizes above the smallest do not do.
                let holds = |bytes: u64| {
                    assert!(bytes.is_multiple_of(10));
                    Ok::<_, ()>(bytes / 10 == first || bytes / 10 > first + gap)
                };
                assert_eq!(smallest(10, 100_000, holds), Ok(Some(first * 10)), "gap {gap}");
            }
        }
        assert_eq!(smallest(10, 100, |_| Ok::<_, ()>(false)), Ok(None));
        assert_eq!(smallest(10, 9, |_| Ok::<_, ()>(true)), Ok(None));
    }
}
