//! How long a pass takes under a plan, on a modelled link and card.
//!
//! Pure. The link copies one page a unit of time. Copies are cut as prefetch cuts them: it goes on at each
//! release, as far as frames are free, and a fault that comes before it asks for its own pages.

#![deny(unsafe_code)]

use std::ops::Range;

use super::order::PassOrder;
use super::plan::Plan;
use super::ring;
use super::runs::{ahead_of, most_ahead, part_of};

/// Uneven ways to spread compute that a choice is averaged over, beside the even one, at most.
const SEEDS: usize = 8;

/// Spans that all of these ways have together: where there are many a single way is uneven enough for all.
const UNEVEN_SPANS: usize = 8192;

/// Passes that are modelled; the last one counts.
pub(crate) const PASSES: usize = 3;

/// Seconds of compute that spans must have on average to be told from what it takes to measure them.
const SHORTEST: f64 = 10e-6;

/// What is known of the runner's compute.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Compute<'a> {
    /// The compute of a pass in page copies, if the runner told it.
    pub(crate) total: Option<f64>,
    /// The seconds of each span, by its number, if they were measured.
    pub(crate) spans: Option<&'a [f32]>,
    /// The seconds of a page copy.
    pub(crate) copy: f64,
}

/// The compute of each span in pass order, in page copies, for each way to spread it.
pub(crate) struct Loads(pub(crate) Vec<Vec<f64>>);

impl Loads {
    /// As it was measured, if it was and there is enough of it to matter beside `hardest` page copies.
    pub(crate) fn measured(order: &PassOrder, compute: &Compute<'_>, hardest: f64) -> Option<Self> {
        let seconds = compute.spans.filter(|_| compute.copy > 0.0)?;
        let load = |span: &u32| seconds.get(*span as usize).map_or(0.0, |load| f64::from(*load));
        let loads: Vec<f64> = order.spans().iter().map(|span| load(span) / compute.copy).collect();
        let sum: f64 = loads.iter().sum();
        #[expect(clippy::cast_precision_loss, reason = "a count of spans")]
        let enough = (hardest / 16.0).max(SHORTEST / compute.copy * loads.len() as f64);
        let scale = compute.total.map_or(1.0, |total| total / sum);
        (sum > enough).then(|| Self(vec![loads.iter().map(|load| load * scale).collect()]))
    }

    pub(crate) fn new(order: &PassOrder, span: &impl Fn(u32) -> (Range<u32>, u64), total: f64) -> Self {
        let spread = |factor: &dyn Fn(u32) -> f64| {
            #[expect(clippy::cast_precision_loss, reason = "bytes of a span")]
            let mut loads: Vec<f64> =
                order.spans().iter().map(|&number| span(number).1 as f64 * factor(number)).collect();
            let scale = total / loads.iter().sum::<f64>().max(f64::MIN_POSITIVE);
            for load in &mut loads {
                *load *= scale;
            }
            loads
        };
        let even = std::iter::once(spread(&|_| 1.0));
        let seeds = (0..).take((UNEVEN_SPANS / order.spans().len().max(1)).clamp(1, SEEDS));
        Self(even.chain(seeds.map(|seed| spread(&|span| unevenness(span, seed)))).collect())
    }
}

/// A factor between 0.25 and 4 for a span's compute, always the same for the same span and seed.
fn unevenness(span: u32, seed: u32) -> f64 {
    let mixed = (u64::from(span) + 1 + (u64::from(seed) << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    0.25 + 3.75 * (f64::from(u32::try_from(mixed >> 32).unwrap_or(0)) / f64::from(u32::MAX))
}

/// What a plan makes of a pass: what is copied when, and what comes free when.
pub(crate) struct ModelledPass {
    /// Per span in pass order: copies that must have arrived, and the end of what it frees in `freed`.
    steps: Vec<(u32, u32)>,
    /// Slots in the order in which they come free.
    freed: Vec<u32>,
    /// The slot of each copied page.
    slots: Vec<u32>,
    /// Pages of each copy of the passes that are modelled, in their order.
    copies: Vec<u32>,
    ring: usize,
}

impl ModelledPass {
    /// `most` are the pages of the largest copy.
    pub(crate) fn new(
        order: &PassOrder,
        span: &impl Fn(u32) -> (Range<u32>, u64),
        plan: Plan,
        most: u32,
    ) -> Self {
        let streams = |page: u32| order.rank(page) >= plan.resident;
        let streamed = order.pages().filter(|&page| streams(page)).count();
        let streamed = u32::try_from(streamed).unwrap_or(u32::MAX);
        let slots: Vec<u32> =
            (0..streamed).map(|place| ring::slot(place, streamed, plan.ring).min(plan.ring)).collect();
        let mut place_of = vec![u32::MAX; order.rank_len()];
        let mut last_use = vec![0_u32; order.rank_len()];
        // For each streamed page how many of those behind it are its neighbours in address.
        let mut follow: Vec<u32> = Vec::with_capacity(slots.len());
        let mut last_page = None;
        for (position, &number) in (0_u32..).zip(order.spans()) {
            for page in span(number).0.filter(|&page| streams(page)) {
                last_use[page as usize] = position;
                if place_of[page as usize] == u32::MAX {
                    place_of[page as usize] = u32::try_from(follow.len()).unwrap_or(u32::MAX);
                    if last_page.is_some_and(|last: u32| last + 1 == page)
                        && let Some(before) = follow.last_mut()
                    {
                        *before = 1;
                    }
                    follow.push(0);
                    last_page = Some(page);
                }
            }
        }
        for place in (1..follow.len()).rev() {
            if follow[place - 1] > 0 {
                follow[place - 1] = follow[place] + 1;
            }
        }
        let mut freed = Vec::with_capacity(slots.len());
        let mut needed = 0;
        let mut steps = Vec::with_capacity(order.spans().len());
        for (position, &number) in (0_u32..).zip(order.spans()) {
            for page in span(number).0.filter(|&page| streams(page)) {
                let place = place_of[page as usize];
                needed = needed.max(place + 1);
                if last_use[page as usize] == position {
                    freed.push(slots[place as usize]);
                }
            }
            steps.push((needed, u32::try_from(freed.len()).unwrap_or(u32::MAX)));
        }
        let mut this = Self { steps, freed, slots, copies: Vec::new(), ring: plan.ring as usize + 1 };
        this.cut(&follow, most.min(plan.ring).max(1));
        this
    }

    /// Cuts what streams into copies as prefetch does.
    ///
    /// `follow` says for each streamed page how many of those behind it are its neighbours in address.
    fn cut(&mut self, follow: &[u32], most: u32) {
        let streamed = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        if streamed == 0 {
            return;
        }
        let ahead = most_ahead(most, u32::try_from(self.ring).unwrap_or(u32::MAX) - 1);
        let mut busy = vec![false; self.ring];
        // The place of the next copy, and pages copied since the first pass began.
        let (mut next, mut copied) = (0_u32, 0_u64);
        let mut cuts = Vec::new();
        let mut take = |count: u32, next: &mut u32, busy: &mut Vec<bool>| {
            for place in *next..*next + count {
                busy[self.slots[place as usize] as usize] = true;
            }
            *next = (*next + count) % streamed;
            cuts.push(count);
            u64::from(count)
        };
        for pass in 0..PASSES as u64 {
            let mut freed = 0;
            for &(needed, frees) in &self.steps {
                let needed = pass * u64::from(streamed) + u64::from(needed);
                while copied < needed {
                    let left = u32::try_from(needed - copied).unwrap_or(u32::MAX);
                    let run = left.min(follow[next as usize] + 1);
                    copied += take(part_of(run, most), &mut next, &mut busy);
                }
                if frees as usize == freed {
                    continue;
                }
                for &slot in &self.freed[freed..frees as usize] {
                    busy[slot as usize] = false;
                }
                freed = frees as usize;
                loop {
                    let run = (follow[next as usize] + 1).min(2 * ahead);
                    let free = self.slots[next as usize..(next + run) as usize]
                        .iter()
                        .take_while(|slot| !busy[**slot as usize]);
                    let count = ahead_of(run, u32::try_from(free.count()).unwrap_or(u32::MAX), ahead);
                    if count == 0 {
                        break;
                    }
                    copied += take(count, &mut next, &mut busy);
                }
            }
        }
        self.copies = cuts;
    }

    /// Copies of a pass.
    #[expect(clippy::cast_precision_loss, reason = "a count of copies")]
    pub(crate) fn copies(&self) -> f64 {
        self.copies.len() as f64 / PASSES as f64
    }

    /// How long a pass takes in steady state, in page copies, over all ways to spread the compute.
    pub(crate) fn mean_time(&self, loads: &Loads) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a handful")]
        let count = loads.0.len() as f64;
        loads.0.iter().map(|load| self.time(load)).sum::<f64>() / count
    }

    fn time(&self, load: &[f64]) -> f64 {
        let mut free_at = vec![0.0_f64; self.ring];
        let (mut link, mut compute, mut began) = (0.0_f64, 0.0_f64, 0.0_f64);
        let mut cuts = self.copies.iter();
        let mut copied = 0_usize;
        for _ in 0..PASSES {
            began = compute;
            let mut freed = 0;
            for (&(needed, frees), load) in self.steps.iter().zip(load) {
                while copied < needed as usize
                    && let Some(&count) = cuts.next()
                {
                    let slots = &self.slots[copied..copied + count as usize];
                    let free = slots.iter().fold(0.0_f64, |free, slot| free.max(free_at[*slot as usize]));
                    link = link.max(free) + f64::from(count);
                    copied += count as usize;
                    if copied >= needed as usize {
                        compute = compute.max(link);
                    }
                }
                compute += load;
                for &slot in &self.freed[freed..frees as usize] {
                    free_at[slot as usize] = compute;
                }
                freed = frees as usize;
            }
            copied -= self.slots.len();
        }
        compute - began
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::order::Keeping;
    use crate::pager::plan::{RingSize, plan};

    /// The order and plan of `spans` units of `each` pages on a card of `frames`.
    fn planned(spans: u32, each: u32, frames: u32, keeping: &Keeping) -> (PassOrder, Plan) {
        let pages = move |span: u32| span * each..(span + 1) * each;
        let order = PassOrder::new((0..spans).collect(), spans * each, pages, keeping);
        let groups: Vec<Range<u32>> = (0..spans).map(pages).collect();
        let plan = plan(&order, &groups, frames, RingSize::Quarters(12));
        (order, plan)
    }

    fn span(each: u32) -> impl Fn(u32) -> (Range<u32>, u64) {
        move |span| (span * each..(span + 1) * each, 10)
    }

    #[test]
    fn a_pass_with_room_to_hide_in_takes_the_longer_of_compute_and_copies() {
        let (order, plan) = planned(40, 10, 200, &Keeping::default());
        let streamed = f64::from(400 - plan.resident);
        for (compute, expected) in [(1.0, streamed), (4.0 * streamed, 4.0 * streamed)] {
            let loads = Loads::new(&order, &span(10), compute);
            let time = ModelledPass::new(&order, &span(10), plan, 4).mean_time(&loads);
            assert!(time >= expected * 0.999 && time < expected * 1.02, "{time} of {expected}");
        }
    }

    #[test]
    fn a_pass_copies_every_streamed_page_once_in_copies_of_neighbours() {
        for (spans, each) in [(400, 1), (200, 2), (100, 4), (20, 20)] {
            for (grain, cell) in [(1, 0), (2, 0), (2, 20)] {
                for frames in [100, 200, 300, 360] {
                    let keeping = Keeping { grain, cell, ..Keeping::default() };
                    let (order, plan) = planned(spans, each, frames, &keeping);
                    let streams = |page: &u32| order.rank(*page) >= plan.resident;
                    let streamed: Vec<u32> = order.pages().filter(streams).collect();
                    let pass = ModelledPass::new(&order, &span(each), plan, 4);
                    let mut place = 0;
                    for &count in &pass.copies {
                        let run = &streamed[place..place + count as usize];
                        assert!(
                            count <= 4 && run.windows(2).all(|pages| pages[0] + 1 == pages[1]),
                            "{run:?}"
                        );
                        place = (place + count as usize) % streamed.len();
                    }
                    let copied: u32 = pass.copies.iter().sum();
                    assert!(copied as usize >= PASSES * streamed.len());
                    assert!(copied as usize <= PASSES * streamed.len() + plan.ring as usize);
                }
            }
        }
    }

    #[test]
    fn neighbouring_small_units_are_copied_as_one_where_they_are_ranked_as_one() {
        // Of two or three pages, the last of which is the next one's first.
        let mut end = 0;
        let units: Vec<Range<u32>> = (0..480_u32)
            .map(|number| {
                let start = end;
                end += 1 + number % 2;
                start..(end + 1).min(720)
            })
            .collect();
        let pages = |span: u32| units[span as usize].clone();
        let mean = |cell| {
            let keeping = Keeping { grain: 2, cell, ..Keeping::default() };
            let order = PassOrder::new((0..480).collect(), 720, pages, &keeping);
            let plan = plan(&order, &units, 576, RingSize::Quarters(12));
            let pass = ModelledPass::new(&order, &|span| (pages(span), 1), plan, 4);
            f64::from(720 - plan.resident) / pass.copies()
        };
        assert!(mean(20) > 1.9 && mean(20) > 1.2 * mean(0), "{} {}", mean(0), mean(20));
    }
}
