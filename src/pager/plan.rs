//! Which pages stay and how large the ring is: a decision over numbers.
//!
//! Pure. A plan says for a budget of frames how many pages of the keep order are resident; the rest is
//! streamed through the ring. [`choose`] picks the keep order and the ring by the pass that each would
//! give on a modelled link; [`plan`] fits a choice to a budget, so that small changes of budget move few
//! pages. Neither knows what is on the card now: the executor in `reclaim` moves the card towards a plan.

#![deny(unsafe_code)]

use std::ops::Range;

use super::order::PassOrder;
use super::ring;

/// What a model gets of the card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Plan {
    /// Pages that stay: the first of the keep order.
    pub(crate) resident: u32,
    /// Frames that the ring must have for the rest; zero if all stay.
    pub(crate) ring: u32,
    /// The most streamed pages that one fault needs at once.
    pub(crate) largest_part: u32,
}

/// How large the ring is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RingSize {
    /// Whatever gives the shortest pass on a modelled link, at most three times the largest streamed part.
    #[default]
    Modelled,
    /// A multiple of the largest streamed part, in quarters: 8 is two parts.
    Quarters(u32),
    /// A number of pages.
    Pages(u32),
}

/// Ring sizes that are tried, in quarters of the largest streamed part.
const TRIED: [u32; 8] = [4, 5, 6, 7, 8, 9, 10, 12];

/// Ways to spread compute that a choice is averaged over.
const SEEDS: u32 = 4;

/// The most units that are tried to be kept whole.
const KEPT_WHOLE: usize = 4;

/// Beyond this many pages nothing but the default is tried, since modelling a pass would take longer than
/// it saves.
const MODELLED_PAGES: usize = 200_000;

/// Plans `frames` frames for the pages of `order`. `groups` are what is faulted at once: spans, or units
/// that the runner takes whole although they consist of several spans.
///
/// The ring is the smallest that has the wanted size for the parts that it leaves to stream, and no larger
/// than its laps use. A group that could not fit the whole card is left out: it is refused or taken in
/// pieces when it is faulted.
pub(crate) fn plan(order: &PassOrder, groups: &[Range<u32>], frames: u32, ring: RingSize) -> Plan {
    let pages = u32::try_from(order.pages().len()).unwrap_or(u32::MAX);
    if pages <= frames {
        return Plan { resident: pages, ring: 0, largest_part: 0 };
    }
    let wanted = |part: u32| {
        let size = match ring {
            RingSize::Modelled => part.saturating_mul(2),
            RingSize::Quarters(quarters) => {
                u32::try_from((u64::from(part) * u64::from(quarters)).div_ceil(4)).unwrap_or(u32::MAX)
            }
            RingSize::Pages(size) => size,
        };
        // One frame beside the part, so that two parts that meet in a page do not wait for each other.
        size.max(part.saturating_add(1)).min(frames).min(pages)
    };
    // Whether the slots of any part in a row differ: what the shortest lap is for.
    let collides = |size: u32, part: u32| {
        let streamed = pages - (frames - size);
        streamed > size && size < frames.min(pages) && streamed / streamed.div_ceil(size) < part
    };
    let mut size = 1.min(frames);
    let mut part;
    loop {
        part = largest_part(order, groups, frames - size, frames);
        let larger = wanted(part).max(size);
        if larger > size {
            size = larger;
        } else if collides(size, part) {
            size += 1;
        } else {
            break;
        }
    }
    // Laps of equal length may be shorter than the ring: what no lap reaches stays resident instead.
    loop {
        let streamed = pages - (frames - size);
        let used = ring::lap(streamed, size).max(part.saturating_add(1)).min(size);
        if used == size || collides(used, part) || matches!(ring, RingSize::Pages(_)) {
            break;
        }
        size = used;
    }
    Plan { resident: frames - size, ring: size, largest_part: part }
}

/// The most pages beyond the first `resident` of the keep order that one group has.
fn largest_part(order: &PassOrder, groups: &[Range<u32>], resident: u32, frames: u32) -> u32 {
    let part = |pages: &Range<u32>| {
        let streamed =
            pages.clone().filter(|&page| order.has_page(page) && order.rank(page) >= resident).count();
        u32::try_from(streamed).unwrap_or(u32::MAX)
    };
    groups.iter().filter(|pages| pages.end - pages.start <= frames).map(part).max().unwrap_or(0)
}

/// A choice that plans are made by: which groups are kept whole, and the ring's size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Choice {
    /// Pages that are kept before all others.
    pub(crate) whole: Vec<Range<u32>>,
    pub(crate) ring: RingSize,
}

/// Picks the choice whose modelled pass is the shortest. `order_with` gives the order of pages with some
/// of them kept first; `span_pages` a span's pages.
///
/// The link copies one page a unit of time. The spans' compute takes `compute` such units in all, unevenly
/// spread in several seeded ways; `None` takes as many as there are pages that no card of this size could
/// hold: the hardest case, and the one in which ring sizes differ most.
pub(crate) fn choose(
    order_with: impl Fn(&[Range<u32>]) -> PassOrder,
    groups: &[Range<u32>],
    span_pages: impl Fn(u32) -> Range<u32>,
    frames: u32,
    compute: Option<f64>,
) -> Choice {
    let mut best = Choice { whole: Vec::new(), ring: RingSize::Quarters(8) };
    let unkept = order_with(&[]);
    let pages = u32::try_from(unkept.pages().len()).unwrap_or(u32::MAX);
    if pages <= frames || unkept.pages().len() > MODELLED_PAGES {
        return best;
    }
    let mut large: Vec<Range<u32>> =
        groups.iter().filter(|pages| pages.end - pages.start <= frames / 2).cloned().collect();
    large.sort_by_key(|pages| std::cmp::Reverse(pages.end - pages.start));
    large.truncate(KEPT_WHOLE);
    let compute = compute.unwrap_or(f64::from(pages - frames));
    let mut shortest = f64::INFINITY;
    for kept in 0..=large.len() {
        let whole = &large[..kept];
        let kept_pages: u32 = whole.iter().map(|pages| pages.end - pages.start).sum();
        if kept_pages > frames / 4 * 3 {
            break;
        }
        let order = if kept == 0 { None } else { Some(order_with(whole)) };
        let order = order.as_ref().unwrap_or(&unkept);
        let mut last = None;
        for quarters in TRIED {
            let ring = RingSize::Quarters(quarters);
            let plan = plan(order, groups, frames, ring);
            if plan.resident < kept_pages || last.replace(plan) == Some(plan) {
                continue;
            }
            let time: f64 =
                (0..SEEDS).map(|seed| modelled_pass(order, &span_pages, plan, compute, seed)).sum();
            // A larger ring, or a unit kept whole, must gain something.
            if time < shortest * 0.998 {
                shortest = time;
                // In pages from here on, so that a small change of budget leaves the ring as it is.
                best = Choice { whole: whole.to_vec(), ring: RingSize::Pages(plan.ring) };
            }
        }
    }
    best
}

/// How long a pass takes in steady state, in page copies.
fn modelled_pass(
    order: &PassOrder,
    span_pages: &impl Fn(u32) -> Range<u32>,
    plan: Plan,
    compute_total: f64,
    seed: u32,
) -> f64 {
    const PASSES: usize = 3;
    let streamed: Vec<u32> = order.pages().filter(|&page| order.rank(page) >= plan.resident).collect();
    let count = u32::try_from(streamed.len()).unwrap_or(u32::MAX);
    let page_count = order.rank_len();
    let mut place_of = vec![u32::MAX; page_count];
    for (place, &page) in (0..).zip(&streamed) {
        place_of[page as usize] = place;
    }
    // The place in the pass of the last span that touches a page.
    let mut last_use = vec![0_u32; page_count];
    let mut weights = Vec::with_capacity(order.spans().len());
    for (position, &span) in (0_u32..).zip(order.spans()) {
        let pages = span_pages(span);
        weights.push(f64::from(pages.end - pages.start) * unevenness(span, seed));
        for page in pages {
            last_use[page as usize] = position;
        }
    }
    let total: f64 = weights.iter().sum();
    let scale = compute_total / total.max(f64::MIN_POSITIVE);
    let mut slot_free = vec![0.0_f64; plan.ring as usize + 1];
    let mut arrived = vec![0.0_f64; streamed.len()];
    let (mut link, mut compute, mut pass_began) = (0.0_f64, 0.0_f64, 0.0_f64);
    for _ in 0..PASSES {
        pass_began = compute;
        let mut next = 0_u32;
        for (position, &span) in (0_u32..).zip(order.spans()) {
            let pages = span_pages(span);
            let mut ready = compute;
            for page in pages.clone() {
                let place = place_of[page as usize];
                if place == u32::MAX {
                    continue;
                }
                while next <= place {
                    let slot = (ring::slot(next, count, plan.ring) as usize).min(plan.ring as usize);
                    link = link.max(slot_free[slot]) + 1.0;
                    arrived[next as usize] = link;
                    next += 1;
                }
                ready = ready.max(arrived[place as usize]);
            }
            compute = ready + weights[position as usize] * scale;
            for page in pages {
                let place = place_of[page as usize];
                if place != u32::MAX && last_use[page as usize] == position {
                    let slot = (ring::slot(place, count, plan.ring) as usize).min(plan.ring as usize);
                    slot_free[slot] = compute;
                }
            }
        }
    }
    compute - pass_began
}

/// A factor between 0.25 and 4 for a span's compute, always the same for the same span and seed.
fn unevenness(span: u32, seed: u32) -> f64 {
    let mixed = (u64::from(span) + 1 + (u64::from(seed) << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    0.25 + 3.75 * (f64::from(u32::try_from(mixed >> 32).unwrap_or(0)) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn even(spans: u32, pages_each: u32) -> (PassOrder, Vec<Range<u32>>) {
        let pages = move |span: u32| span * pages_each..(span + 1) * pages_each;
        let order = PassOrder::new((0..spans).collect(), spans * pages_each, pages, &[]);
        (order, (0..spans).map(pages).collect())
    }

    #[test]
    fn a_model_that_fits_stays_whole_and_needs_no_ring() {
        let (order, groups) = even(10, 4);
        let plan = plan(&order, &groups, 40, RingSize::default());
        assert_eq!(plan, Plan { resident: 40, ring: 0, largest_part: 0 });
    }

    #[test]
    fn frames_and_ring_never_exceed_the_budget_and_the_ring_holds_a_part() {
        for pages_each in [1, 2, 7, 30] {
            let (order, groups) = even(20, pages_each);
            for ring in TRIED.map(RingSize::Quarters) {
                for frames in 0..20 * pages_each {
                    let plan = plan(&order, &groups, frames, ring);
                    assert_eq!(plan.resident + plan.ring, frames);
                    assert!(plan.ring >= plan.largest_part || pages_each > frames);
                    assert!(plan.ring <= (3 * plan.largest_part).max(2), "{plan:?} of {frames}");
                }
            }
        }
    }

    #[test]
    fn every_slot_of_the_ring_is_used() {
        let (order, groups) = even(30, 16);
        for frames in 40..480 {
            let plan = plan(&order, &groups, frames, RingSize::Quarters(8));
            let streamed = 480 - plan.resident;
            let used = (0..streamed).map(|place| ring::slot(place, streamed, plan.ring)).max();
            assert!(used >= Some((plan.ring - 1).min(plan.largest_part)), "{plan:?}: {used:?}");
        }
    }

    #[test]
    fn one_frame_more_keeps_what_stays() {
        let (order, groups) = even(30, 16);
        let mut before = 0;
        for frames in 40..480 {
            let plan = plan(&order, &groups, frames, RingSize::Pages(32));
            assert!(plan.resident >= before, "{frames}: {plan:?} after {before}");
            before = plan.resident;
        }
    }

    #[test]
    fn a_group_larger_than_the_card_does_not_decide_for_the_others() {
        let (order, mut groups) = even(10, 4);
        groups.push(0..40);
        let plan = plan(&order, &groups, 20, RingSize::default());
        assert!(plan.ring < 10, "{plan:?}");
    }

    #[test]
    fn two_giants_among_dwarfs_are_kept_whole() {
        // 2 units of 100 pages, 60 of 4: with the giants streamed the ring would be most of the card.
        let pages = |span: u32| match span {
            0 => 0..100,
            61 => 340..440,
            span => 100 + (span - 1) * 4..100 + span * 4,
        };
        let groups: Vec<Range<u32>> = (0..62).map(pages).collect();
        let choice =
            choose(|whole| PassOrder::new((0..62).collect(), 440, pages, whole), &groups, pages, 300, None);
        assert_eq!(choice.whole.len(), 2, "{choice:?}");
    }
}
