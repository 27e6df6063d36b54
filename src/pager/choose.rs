//! Which pages are kept before all others, and how large the ring is: the shortest modelled pass decides.
//!
//! Pure. Streaming an equal share of every unit makes the ring as large as the largest units ask for. A few
//! large units among many small ones then cost every pass a ring of their size. So a choice may cap units:
//! of a longer one the pages beyond the cap are kept first, and the rest of the card is shared out among
//! what is below it. A cap of a few pages keeps giants all but whole. [`choose`] tries caps and rings on a
//! modelled link and takes the shortest pass. It never looks at what is on the card now.

#![deny(unsafe_code)]

use std::ops::Range;

use super::order::PassOrder;
use super::plan::{Choice, Plan, RingSize, plan};
use super::ring;

/// Ring sizes that are tried, in quarters of the largest streamed part.
const TRIED: [u32; 9] = [4, 5, 6, 7, 8, 9, 10, 11, 12];

/// Ways to spread compute that a choice is averaged over, beside the even one.
const SEEDS: u32 = 8;

/// The most caps that are tried.
const CAPS: usize = 16;

/// Steps from the longest unit down to nothing in which caps are looked for.
const CAP_STEPS: u32 = 32;

/// Passes that are modelled; the last one counts.
const PASSES: usize = 3;

/// Page copies that one choice may model: about a tenth of a second.
const MOST_COPIES: usize = 40_000_000;

/// Beyond this many pages nothing but the default is tried, since modelling a pass would take longer than
/// it saves.
const MODELLED_PAGES: usize = 200_000;

/// Frames that may come or go without a new choice, however small the card; on larger ones it is a fiftieth.
const SMALL_CHANGE: u32 = 4;

/// Choices that are remembered.
const REMEMBERED: usize = 8;

/// Picks the choice whose modelled pass is the shortest. `order_with` gives the order of pages with some
/// of them kept first; `span` a span's pages and its bytes. `groups` are what is faulted at once.
///
/// The link copies one page a unit of time. The spans' compute takes `compute` such units in all, evenly and
/// unevenly spread in several seeded ways; `None` takes as many as there are pages that no card of this size
/// could hold: the hardest case, and the one in which ring sizes differ most.
pub(crate) fn choose(
    order_with: impl Fn(&[Range<u32>]) -> PassOrder,
    groups: &[Range<u32>],
    span: impl Fn(u32) -> (Range<u32>, u64),
    frames: u32,
    compute: Option<f64>,
) -> Choice {
    let mut best = Choice { first: Vec::new(), ring: RingSize::Quarters(8) };
    let mut order = order_with(&[]);
    let pages = u32::try_from(order.pages().len()).unwrap_or(u32::MAX);
    if pages <= frames || order.pages().len() > MODELLED_PAGES {
        return best;
    }
    let loads = Loads::new(&order, &span, compute.unwrap_or(f64::from(pages - frames)));
    let a_cap = (pages - frames) as usize * PASSES * loads.0.len() * TRIED.len();
    let caps = caps(groups, pages, frames, (MOST_COPIES / a_cap.max(1)).clamp(1, CAPS));
    let mut shortest = f64::INFINITY;
    for cap in caps {
        let first = beyond(groups, cap, frames);
        let kept: u32 = first.iter().map(|pages| pages.end - pages.start).sum();
        if !first.is_empty() {
            order = order_with(&first);
        }
        let mut last = None;
        for quarters in TRIED {
            let plan = plan(&order, groups, frames, RingSize::Quarters(quarters));
            if plan.resident < kept || last.replace(plan) == Some(plan) {
                continue;
            }
            let time = ModelledPass::new(&order, &span, plan).mean_time(&loads);
            // A larger ring, or a lower cap, must gain something.
            if time < shortest * 0.998 {
                shortest = time;
                // In pages from here on, so that a small change of budget leaves the ring as it is.
                best = Choice { first: first.clone(), ring: RingSize::Pages(plan.ring) };
            }
        }
    }
    best
}

/// The choices made lately, the one in use last.
///
/// A choice stands while the frames stay about as many, and comes back when they are about as many again:
/// after a spike the ring and the pages that stay are the same as before it.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    made: Vec<(u32, Choice)>,
}

impl Choices {
    /// The choice to go over to for so many frames, by `choose` if none was made for about as many; `None`
    /// if the one in use stands.
    pub(crate) fn for_about(&mut self, frames: u32, choose: impl FnOnce() -> Choice) -> Option<Choice> {
        let off = |chosen: u32| chosen.abs_diff(frames);
        let is_near = |chosen: u32| off(chosen) <= (chosen / 50).max(SMALL_CHANGE);
        if self.made.last().is_some_and(|(chosen, _)| is_near(*chosen)) {
            return None;
        }
        let known = (0..self.made.len())
            .filter(|&place| is_near(self.made[place].0))
            .min_by_key(|&place| off(self.made[place].0));
        let next = match known {
            Some(place) => self.made.remove(place),
            None => (frames, choose()),
        };
        if self.made.len() == REMEMBERED {
            self.made.remove(0);
        }
        self.made.push(next.clone());
        Some(next.1)
    }

    /// Another order, other groups or another compute: no choice holds any more.
    pub(crate) fn forget(&mut self) {
        self.made.clear();
    }
}

/// The caps worth trying, longest first and at most `most`: no cap at all, and caps that each make the largest
/// streamed part smaller by an eighth or more.
fn caps(groups: &[Range<u32>], pages: u32, frames: u32, most: usize) -> Vec<u32> {
    let lengths = || groups.iter().map(|pages| pages.end - pages.start).filter(|&length| length <= frames);
    let longest = lengths().max().unwrap_or(0);
    let mut caps = vec![longest];
    let mut part = f64::INFINITY;
    for step in (1..=CAP_STEPS).rev() {
        let cap = (longest * step).div_ceil(CAP_STEPS);
        let (mut below, mut kept) = (0_u64, 0_u64);
        for length in lengths() {
            below += u64::from(length.min(cap));
            kept += u64::from(length.saturating_sub(cap));
        }
        if cap == 0 || kept > u64::from(frames) * 3 / 4 {
            break;
        }
        #[expect(clippy::cast_precision_loss, reason = "counts of pages")]
        let capped = f64::from(cap) * f64::from(pages - frames) / below.max(1) as f64;
        if step == CAP_STEPS {
            part = capped;
        } else if capped <= part * 0.875 && caps.len() < most {
            part = capped;
            caps.push(cap);
        }
    }
    caps
}

/// The pages of every group beyond its first `cap`. Groups that the card could not hold are left alone.
fn beyond(groups: &[Range<u32>], cap: u32, frames: u32) -> Vec<Range<u32>> {
    groups
        .iter()
        .filter(|pages| pages.end - pages.start > cap && pages.end - pages.start <= frames)
        .map(|pages| pages.start + cap..pages.end)
        .collect()
}

/// The compute of each span in pass order, in page copies, for each way to spread it.
struct Loads(Vec<Vec<f64>>);

impl Loads {
    fn new(order: &PassOrder, span: &impl Fn(u32) -> (Range<u32>, u64), total: f64) -> Self {
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
        Self(even.chain((0..SEEDS).map(|seed| spread(&|span| unevenness(span, seed)))).collect())
    }
}

/// A factor between 0.25 and 4 for a span's compute, always the same for the same span and seed.
fn unevenness(span: u32, seed: u32) -> f64 {
    let mixed = (u64::from(span) + 1 + (u64::from(seed) << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    0.25 + 3.75 * (f64::from(u32::try_from(mixed >> 32).unwrap_or(0)) / f64::from(u32::MAX))
}

/// What a plan makes of a pass: which copies a span waits for, and which slots it frees.
struct ModelledPass {
    /// Per span in pass order: copies that must have arrived, and the end of what it frees in `freed`.
    steps: Vec<(u32, u32)>,
    /// Slots in the order in which they come free.
    freed: Vec<u32>,
    /// The slot of each copy.
    slots: Vec<u32>,
    ring: usize,
}

impl ModelledPass {
    fn new(order: &PassOrder, span: &impl Fn(u32) -> (Range<u32>, u64), plan: Plan) -> Self {
        let streams = |page: u32| order.rank(page) >= plan.resident;
        let streamed = order.pages().filter(|&page| streams(page)).count();
        let streamed = u32::try_from(streamed).unwrap_or(u32::MAX);
        let slots: Vec<u32> =
            (0..streamed).map(|place| ring::slot(place, streamed, plan.ring).min(plan.ring)).collect();
        let mut place_of = vec![u32::MAX; order.rank_len()];
        let mut last_use = vec![0_u32; order.rank_len()];
        let mut places = 0;
        for (position, &number) in (0_u32..).zip(order.spans()) {
            for page in span(number).0.filter(|&page| streams(page)) {
                last_use[page as usize] = position;
                if place_of[page as usize] == u32::MAX {
                    place_of[page as usize] = places;
                    places += 1;
                }
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
        Self { steps, freed, slots, ring: plan.ring as usize + 1 }
    }

    /// How long a pass takes in steady state, in page copies, over all ways to spread the compute.
    fn mean_time(&self, loads: &Loads) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a handful")]
        let count = loads.0.len() as f64;
        loads.0.iter().map(|load| self.time(load)).sum::<f64>() / count
    }

    fn time(&self, load: &[f64]) -> f64 {
        let mut free_at = vec![0.0_f64; self.ring];
        let (mut link, mut compute, mut began) = (0.0_f64, 0.0_f64, 0.0_f64);
        for _ in 0..PASSES {
            began = compute;
            let (mut copied, mut freed) = (0, 0);
            for (&(needed, frees), load) in self.steps.iter().zip(load) {
                for &slot in &self.slots[copied..needed as usize] {
                    link = link.max(free_at[slot as usize]) + 1.0;
                }
                if needed as usize > copied {
                    copied = needed as usize;
                    compute = compute.max(link);
                }
                compute += load;
                for &slot in &self.freed[freed..frees as usize] {
                    free_at[slot as usize] = compute;
                }
                freed = frees as usize;
            }
        }
        compute - began
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units one after the other, of these pages each.
    fn units(lengths: &[u32]) -> Vec<Range<u32>> {
        let mut end = 0;
        lengths
            .iter()
            .map(|length| {
                let start = end;
                end += length;
                start..end
            })
            .collect()
    }

    fn order(groups: &[Range<u32>], first: &[Range<u32>]) -> PassOrder {
        let spans = u32::try_from(groups.len()).unwrap();
        let pages = groups.last().map_or(0, |last| last.end);
        PassOrder::new((0..spans).collect(), pages, |span| groups[span as usize].clone(), first)
    }

    fn chosen(groups: &[Range<u32>], frames: u32, compute: Option<f64>) -> (Choice, Plan) {
        let span = |span: u32| {
            let pages = groups[span as usize].clone();
            (pages.clone(), u64::from(pages.end - pages.start))
        };
        let choice = choose(|first| order(groups, first), groups, span, frames, compute);
        let plan = plan(&order(groups, &choice.first), groups, frames, choice.ring);
        (choice, plan)
    }

    fn giants_among_dwarfs() -> Vec<Range<u32>> {
        let mut lengths = vec![4; 62];
        (lengths[0], lengths[61]) = (100, 100);
        units(&lengths)
    }

    #[test]
    fn giants_among_dwarfs_do_not_make_the_ring_their_size() {
        let groups = giants_among_dwarfs();
        let (choice, plan) = chosen(&groups, 300, None);
        assert_eq!(choice.first.len(), 2, "{choice:?}");
        assert!(plan.largest_part < 20 && plan.ring <= 3 * plan.largest_part, "{plan:?}");
    }

    #[test]
    fn what_is_kept_first_is_resident() {
        for frames in [80, 150, 250, 300, 400] {
            let groups = giants_among_dwarfs();
            let (choice, plan) = chosen(&groups, frames, None);
            let order = order(&groups, &choice.first);
            for page in choice.first.iter().flat_map(Clone::clone) {
                assert!(order.rank(page) < plan.resident, "{frames}: {choice:?}, {plan:?}");
            }
        }
    }

    #[test]
    fn the_ring_is_at_most_three_of_the_largest_parts() {
        let mut lengths: Vec<u32> = (0..40).map(|number| 3 + number * 7 % 31).collect();
        lengths[20] = 130;
        let groups = units(&lengths);
        let pages = groups.last().map_or(0, |last| last.end);
        for frames in (pages / 8..pages).step_by(53) {
            for compute in [Some(0.0), None, Some(f64::from(4 * pages))] {
                let (_, plan) = chosen(&groups, frames, compute);
                assert!(plan.ring <= 3 * plan.largest_part.max(1) && plan.ring > plan.largest_part);
            }
        }
    }

    #[test]
    fn units_of_one_length_are_not_capped() {
        for frames in [100, 200, 300] {
            let (choice, _) = chosen(&units(&[10; 40]), frames, None);
            assert_eq!(choice.first, [], "{frames}");
        }
        assert_eq!(caps(&units(&[10; 40]), 400, 200, CAPS), [10]);
    }

    #[test]
    fn every_cap_makes_the_largest_part_smaller_and_what_it_keeps_fits() {
        let groups = giants_among_dwarfs();
        for frames in [50, 120, 300, 430] {
            let caps = caps(&groups, 440, frames, CAPS);
            assert!(caps.len() <= CAPS && caps.is_sorted_by(|a, b| a > b), "{caps:?}");
            let kept =
                |cap| beyond(&groups, cap, frames).iter().map(|pages| pages.end - pages.start).sum::<u32>();
            assert!(caps.iter().all(|&cap| kept(cap) <= frames * 3 / 4), "{frames}: {caps:?}");
        }
        assert!(caps(&groups, 440, 300, CAPS).len() > 4);
        assert_eq!(caps(&groups, 440, 300, 1).len(), 1);
    }

    #[test]
    fn a_pass_with_room_to_hide_in_takes_the_longer_of_compute_and_copies() {
        let groups = units(&[10; 40]);
        let span = |span: u32| (groups[span as usize].clone(), 10);
        let order = order(&groups, &[]);
        let plan = plan(&order, &groups, 200, RingSize::Quarters(12));
        let streamed = f64::from(400 - plan.resident);
        for (compute, expected) in [(1.0, streamed), (4.0 * streamed, 4.0 * streamed)] {
            let loads = Loads::new(&order, &span, compute);
            let time = ModelledPass::new(&order, &span, plan).mean_time(&loads);
            assert!(time >= expected * 0.999 && time < expected * 1.02, "{time} of {expected}");
        }
    }

    #[test]
    fn a_faster_runner_gets_a_smaller_ring() {
        let groups = units(&[10; 40]);
        let ring = |compute| chosen(&groups, 200, Some(compute)).1.ring;
        assert!(ring(20.0) < ring(200.0), "{} {}", ring(20.0), ring(200.0));
    }

    #[test]
    fn a_choice_stands_while_the_frames_are_about_as_many_and_comes_back_with_them() {
        let mut choices = Choices::default();
        let made = |ring| Choice { first: Vec::new(), ring: RingSize::Pages(ring) };
        let never = || -> Choice { unreachable!("it was chosen before") };
        assert_eq!(choices.for_about(1000, || made(1)), Some(made(1)));
        assert_eq!(choices.for_about(980, never), None);
        assert_eq!(choices.for_about(1020, never), None);
        assert_eq!(choices.for_about(750, || made(2)), Some(made(2)));
        assert_eq!(choices.for_about(985, never), Some(made(1)));
        assert_eq!(choices.for_about(760, never), Some(made(2)));
        choices.forget();
        assert_eq!(choices.for_about(760, || made(3)), Some(made(3)));
        for frames in 1..100 {
            choices.for_about(frames * 1000, || made(frames));
        }
        assert_eq!(choices.made.len(), REMEMBERED);
    }

    #[test]
    fn the_same_question_has_the_same_answer() {
        let groups = giants_among_dwarfs();
        assert_eq!(chosen(&groups, 300, None), chosen(&groups, 300, None));
    }
}
