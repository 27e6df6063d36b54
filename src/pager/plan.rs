//! How many pages stay and how large the ring is: a decision over numbers.
//!
//! Pure. A plan says for a budget of frames how many pages of the keep order are resident; the rest is
//! streamed through the ring. The keep order and the ring's size are chosen beside, in `choose`; [`plan`]
//! fits a choice to a budget, so that small changes of budget move few pages. It does not know what is on
//! the card now: the executor in `reclaim` moves the card towards a plan.

#![deny(unsafe_code)]

use std::ops::Range;

use super::order::{Keeping, PassOrder};
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

/// A choice that plans are made by: which pages are worth keeping, and the ring's size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Choice {
    pub(crate) keeping: Keeping,
    pub(crate) ring: RingSize,
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn even(spans: u32, pages_each: u32) -> (PassOrder, Vec<Range<u32>>) {
        let pages = move |span: u32| span * pages_each..(span + 1) * pages_each;
        let order = PassOrder::new((0..spans).collect(), spans * pages_each, pages, &Keeping::default());
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
            for ring in [4, 5, 6, 8, 9, 12].map(RingSize::Quarters) {
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
}
