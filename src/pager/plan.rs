//! Which pages stay and how large the ring is: a decision over numbers.
//!
//! Pure. A plan says for a budget of frames how many pages of the keep order are resident; the rest is
//! streamed through the ring. It knows nothing of what is on the card now: the executor in `reclaim`
//! moves the card towards it.

#![deny(unsafe_code)]

use std::ops::Range;

use super::order::PassOrder;

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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RingSize {
    /// A multiple of the largest streamed part: one part is used, others arrive.
    Parts(u32),
    /// A number of pages.
    Pages(u32),
}

impl Default for RingSize {
    fn default() -> Self {
        Self::Parts(2)
    }
}

/// Plans `frames` frames for the pages of `order`. `groups` are what is faulted at once: spans, or units
/// that the runner takes whole although they consist of several spans.
///
/// The ring is the smallest that is `ring` large for the parts that it leaves to stream. A group that
/// could not fit the whole card is left out: it is refused or taken in pieces when it is faulted.
pub(crate) fn plan(order: &PassOrder, groups: &[Range<u32>], frames: u32, ring: RingSize) -> Plan {
    let pages = u32::try_from(order.pages().len()).unwrap_or(u32::MAX);
    if pages <= frames {
        return Plan { resident: pages, ring: 0, largest_part: 0 };
    }
    let wanted = |part: u32| {
        let size = match ring {
            RingSize::Parts(parts) => part.saturating_mul(parts.max(1)),
            RingSize::Pages(size) => size.max(part),
        };
        // One frame beside the part, so that two parts that meet in a page do not wait for each other.
        size.max(part.saturating_add(1)).min(frames).min(pages)
    };
    let mut size = 1.min(frames);
    loop {
        let resident = frames - size;
        let part = largest_part(order, groups, resident, frames);
        let larger = wanted(part);
        if larger <= size {
            return Plan { resident, ring: size, largest_part: part };
        }
        size = larger;
    }
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
        let order = PassOrder::new((0..spans).collect(), spans * pages_each, pages);
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
            for frames in 0..20 * pages_each {
                let plan = plan(&order, &groups, frames, RingSize::default());
                assert!(plan.resident + plan.ring <= frames);
                assert!(plan.ring >= plan.largest_part || pages_each > frames);
                assert!(plan.ring <= 3 * plan.largest_part.max(1), "{plan:?} of {frames}");
            }
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
