//! Which pages are kept before all others, and how large the ring is: the shortest modelled pass decides.
//!
//! Pure. Streaming an equal share of every unit makes the ring as large as the largest units ask for. A few
//! large units among many small ones then cost every pass a ring of their size. So a choice may cap units:
//! of a longer one the pages beyond the cap are kept first, and the rest of the card is shared out among
//! what is below it. A cap of a few pages keeps giants all but whole. [`choose`] tries caps and rings on a
//! modelled link and takes the shortest pass. It never looks at what is on the card now.

#![deny(unsafe_code)]

use std::ops::Range;

use super::modelled::{Compute, Loads, ModelledPass, PASSES};
use super::order::{Keeping, PassOrder};
use super::plan::{Choice, Plan, RingSize, plan};

/// Ring sizes that are tried, in quarters of the largest streamed part.
const TRIED: [u32; 9] = [4, 5, 6, 7, 8, 9, 10, 11, 12];

/// The most caps that are tried.
const CAPS: usize = 16;

/// Steps from the longest unit down to nothing in which caps are looked for.
const CAP_STEPS: u32 = 32;

/// Rings that are tried where each span's compute is known, beside the one that two spans in a row ask for.
const BESIDE: i32 = 6;

/// What another choice must gain over one that stands for it to be worth moving pages.
const GAIN: f64 = 0.02;

/// What a copy costs beside its pages, in page copies of 2 MiB: one of 1 MiB reaches 94 % of the link.
const COPY: f64 = 1.0 / 32.0;

/// Pages of a cell, where spans are ranked by cells: on a card that lacks a tenth of them two stream, one copy.
const CELL: u32 = 20;

/// Shares of a page copy.
const SHARE: f64 = 64.0;

/// Page copies, and spans of a pass, that one choice may model for caps, and again for cells: all in all that takes up
/// to 0.4 seconds.
const MOST_COPIES: usize = 40_000_000;

/// What a plan takes to lay out, a page, in modelled copies.
const PLAN_COPIES: usize = 8;

/// Beyond this many pages nothing but the default is tried, since modelling a pass would take longer than
/// it saves.
const MODELLED_PAGES: usize = 200_000;

/// Picks the choice whose modelled pass is the shortest. `order_with` gives the order of pages by what is worth
/// keeping; `span` a span's pages and its bytes. `groups` are what is faulted at once; `most` are the pages of the
/// largest copy.
///
/// The link copies one page a unit of time. Caps and rings are modelled with the sum of compute alone, evenly and
/// unevenly spread in several seeded ways; if that is not known, it is as many copies as there are pages that no
/// card of this size could hold: the hardest case, and the one in which ring sizes differ most. Then pages may be
/// ranked by twos and by cells, so that copies are larger, if that saves more of what a copy costs beside its bytes
/// than the pass loses by it. Where each span's compute was measured, what streams may be shared out by it in the
/// place of caps, if a pass with this very compute gains [`GAIN`] by that: where computing takes far longer than
/// copying every ring is as fast, and the one that the sum asks for copies less than most.
pub(crate) fn choose(
    order_with: impl Fn(&Keeping) -> PassOrder,
    groups: &[Range<u32>],
    span: impl Fn(u32) -> (Range<u32>, u64),
    frames: u32,
    most: u32,
    compute: &Compute<'_>,
) -> Choice {
    let order = order_with(&Keeping::default());
    let pages = u32::try_from(order.pages().len()).unwrap_or(u32::MAX);
    if pages <= frames || order.pages().len() > MODELLED_PAGES {
        return Choice { keeping: Keeping::default(), ring: RingSize::Quarters(8) };
    }
    let question = Question { order_with, groups, span, pages, frames, most };
    let hardest = f64::from(pages - frames);
    let loads = Loads::new(&order, &question.span, compute.total.unwrap_or(hardest));
    let capped = question.capped(&order, &loads);
    let joined = question.joined(&capped, &loads);
    let Some(measured) = Loads::measured(&order, compute, hardest) else { return joined };
    question.shared_out(&order, &measured, capped, joined)
}

/// What a choice is made for.
struct Question<'a, O, S> {
    order_with: O,
    groups: &'a [Range<u32>],
    span: S,
    /// Pages of the pass.
    pages: u32,
    frames: u32,
    /// Pages of the largest copy.
    most: u32,
}

impl<O: Fn(&Keeping) -> PassOrder, S: Fn(u32) -> (Range<u32>, u64)> Question<'_, O, S> {
    /// The plan with an order and a ring, how long a pass takes with it, and what its copies cost beside their pages.
    fn timed(&self, order: &PassOrder, ring: RingSize, loads: &Loads) -> (Plan, f64, f64) {
        let plan = plan(order, self.groups, self.frames, ring);
        let pass = ModelledPass::new(order, &self.span, plan, self.most);
        (plan, pass.mean_time(loads), pass.copies() * COPY)
    }

    /// How many plans may be modelled with these loads of `spans` spans.
    fn plans(&self, loads: &Loads, spans: usize) -> usize {
        let steps = (self.pages - self.frames) as usize + spans;
        let copies = steps * PASSES * loads.0.len() + self.pages as usize * PLAN_COPIES;
        (MOST_COPIES / copies.max(1)).max(1)
    }

    /// The best cap and ring for pages that are ranked one by one. `order` is the one without a cap.
    fn capped(&self, order: &PassOrder, loads: &Loads) -> Choice {
        let mut best = Choice { keeping: Keeping::default(), ring: RingSize::Quarters(8) };
        let mut shortest = f64::INFINITY;
        let most = (self.plans(loads, order.spans().len()) / TRIED.len()).clamp(1, CAPS);
        for cap in caps(self.groups, self.pages, self.frames, most) {
            let keeping = Keeping { first: beyond(self.groups, cap, self.frames), ..Keeping::default() };
            let capped = (!keeping.first.is_empty()).then(|| (self.order_with)(&keeping));
            let order = capped.as_ref().unwrap_or(order);
            let mut last = None;
            for quarters in TRIED {
                let plan = plan(order, self.groups, self.frames, RingSize::Quarters(quarters));
                if plan.resident < keeping.first_pages() || last.replace(plan) == Some(plan) {
                    continue;
                }
                let time = ModelledPass::new(order, &self.span, plan, self.most).mean_time(loads);
                // A larger ring, or a lower cap, must gain something.
                if time < shortest * 0.998 {
                    shortest = time;
                    // In pages from here on, so that a small change of budget leaves the ring as it is.
                    best = Choice { keeping: keeping.clone(), ring: RingSize::Pages(plan.ring) };
                }
            }
        }
        best
    }

    /// The best of a choice that ranks pages one by one, and of those that rank them by twos, and neighbouring
    /// spans as one: larger copies must be worth what the pass loses by them.
    fn joined(&self, apart: &Choice, loads: &Loads) -> Choice {
        let mut best = apart.clone();
        let order = (self.order_with)(&apart.keeping);
        let (_, time, copies) = self.timed(&order, apart.ring, loads);
        let mut least = time + copies;
        let mut left = self.plans(loads, order.spans().len());
        let capped = [0, CELL].map(|cell| (cell, apart.keeping.first.clone()));
        // What a cap keeps first lies in the midst of cells: they are tried without it as well.
        let uncapped = (!apart.keeping.first.is_empty()).then_some((CELL, Vec::new()));
        for (cell, first) in capped.into_iter().chain(uncapped) {
            let keeping = Keeping { grain: 2, cell, first, ..Keeping::default() };
            let order = (self.order_with)(&keeping);
            for ring in std::iter::once(apart.ring).chain(TRIED.map(RingSize::Quarters)).take(left) {
                left -= 1;
                let (plan, time, copies) = self.timed(&order, ring, loads);
                if time + copies < least
                    && plan.resident >= keeping.first_pages()
                    && plan.ring <= 3 * plan.largest_part
                {
                    least = time + copies;
                    best = Choice { keeping: keeping.clone(), ring: RingSize::Pages(plan.ring) };
                }
            }
        }
        best
    }

    /// The better of two choices with the compute that was measured, or one that shares out by it what streams.
    fn shared_out(&self, order: &PassOrder, measured: &Loads, apart: Choice, joined: Choice) -> Choice {
        let timed = |choice: &Choice| self.timed(&(self.order_with)(&choice.keeping), choice.ring, measured);
        let (_, singly, many) = timed(&apart);
        let (_, together, few) = timed(&joined);
        let mut best = if singly + many < together + few { apart } else { joined };
        // What moves when shares are taken is copied and mapped once more.
        let mut shortest = singly.min(together) * (1.0 - GAIN);
        // An order takes about as long as the model of so many copies.
        let most = MOST_COPIES / (self.pages as usize * 20);
        for choice in shares(&measured.0[0], order, self.pages - self.frames).take(most) {
            let (plan, time, _) = timed(&choice);
            if time < shortest && plan.ring <= 3 * plan.largest_part.max(1) {
                shortest = time;
                best = Choice { ring: RingSize::Pages(plan.ring), ..choice };
            }
        }
        best
    }
}

/// What a model begins with, which fits or was not planned for yet: no cap, and ranked by twos and cells as most are
/// where it does not fit, so that what leaves first is about what leaves then.
pub(super) fn first_choice(ring: RingSize) -> Choice {
    let keeping = if ring == RingSize::Modelled {
        Keeping { grain: 2, cell: CELL, ..Keeping::default() }
    } else {
        Keeping::default()
    };
    Choice { keeping, ring }
}

/// Ways to share out what streams by the spans' compute, with a ring for each.
///
/// Two things hold a pass up. The link stands still while a span computes, and the one behind it after it, when
/// the ring cannot take what could be copied in that time: a ring of `R` page copies is enough where no two
/// spans in a row compute for longer. And a span waits if what it streams takes longer to copy than the one
/// before it computes. So each span streams as much as can be copied while the one before it computes; what is
/// left is given to those beside which the ring has room. `missing` pages stream in any case, and a ring's
/// more.
fn shares<'a>(loads: &'a [f64], order: &'a PassOrder, missing: u32) -> impl Iterator<Item = Choice> + 'a {
    let total: f64 = loads.iter().sum();
    let before = |at: usize| loads[(at + loads.len() - 1) % loads.len()];
    // Where computing takes longer than copying there is room between copies, not between computes.
    let scale = move |streamed: f64| (streamed / total.max(f64::MIN_POSITIVE)).min(1.0);
    let widest = (0..loads.len()).map(|at| before(at) + loads[at]).fold(1.0, f64::max);
    let widest = widest * scale(f64::from(missing));
    #[expect(clippy::cast_possible_truncation, reason = "a count of laps")]
    let laps = (f64::from(missing) / widest) as i32 + 1;
    let step = (laps / 12).max(1);
    // The likeliest first.
    let beside = std::iter::once(0).chain((1..=BESIDE).flat_map(|beside| [beside, -beside]));
    let tried = beside.filter_map(move |beside| u32::try_from(laps + beside * step - 1).ok());
    tried.filter(|laps| *laps > 0).map(move |laps| {
        let ring = missing.div_ceil(laps);
        let streamed = f64::from(missing + ring);
        let scale = scale(streamed);
        let room: Vec<f64> = (0..loads.len())
            .map(|at| (f64::from(ring) - (before(at) + loads[at]) * scale).max(0.0))
            .collect();
        let more = (streamed - total * scale).max(0.0) / room.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let mut shares = vec![0; order.spans().iter().max().map_or(0, |last| *last as usize + 1)];
        for (at, &span) in order.spans().iter().enumerate() {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive count")]
            let share = ((before(at) * scale + room[at] * more) * SHARE) as u32;
            shares[span as usize] = share;
        }
        Choice { keeping: Keeping { shares, ..Keeping::default() }, ring: RingSize::Pages(ring) }
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u32 = 4;

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

    fn order(groups: &[Range<u32>], keeping: &Keeping) -> PassOrder {
        let spans = u32::try_from(groups.len()).unwrap();
        let pages = groups.last().map_or(0, |last| last.end);
        PassOrder::new((0..spans).collect(), pages, |span| groups[span as usize].clone(), keeping)
    }

    fn chosen(groups: &[Range<u32>], frames: u32, total: Option<f64>) -> (Choice, Plan) {
        let compute = Compute { total, ..Compute::default() };
        let span = |span: u32| {
            let pages = groups[span as usize].clone();
            (pages.clone(), u64::from(pages.end - pages.start))
        };
        let choice = choose(|keeping| order(groups, keeping), groups, span, frames, MOST, &compute);
        let plan = plan(&order(groups, &choice.keeping), groups, frames, choice.ring);
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
        assert_eq!(choice.keeping.first.len(), 2, "{choice:?}");
        assert!(plan.largest_part < 20 && plan.ring <= 3 * plan.largest_part, "{plan:?}");
    }

    #[test]
    fn what_is_kept_first_is_resident() {
        for frames in [80, 150, 250, 300, 400] {
            let groups = giants_among_dwarfs();
            let (choice, plan) = chosen(&groups, frames, None);
            let order = order(&groups, &choice.keeping);
            for page in choice.keeping.first.iter().flat_map(Clone::clone) {
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
            assert_eq!(choice.keeping.first, [], "{frames}");
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
    fn small_units_are_ranked_by_cells_and_large_ones_by_twos() {
        let ranked = |groups: &[Range<u32>], frames| {
            let keeping = chosen(groups, frames, None).0.keeping;
            (keeping.cell, keeping.grain)
        };
        // Of two to five pages, the last of which is the next one's first.
        let mut small = units(&(0..480).map(|number| 1 + number * 7 % 4).collect::<Vec<_>>());
        for pages in small.iter_mut().rev().skip(1) {
            pages.end += 1;
        }
        for frames in [600, 960] {
            assert_eq!(ranked(&small, frames), (CELL, 2), "{frames}");
        }
        assert_eq!(ranked(&units(&[24; 100]), 600), (0, 2));
    }

    #[test]
    fn where_a_copy_is_a_page_nothing_is_gained_by_larger_ones() {
        let groups = units(&[24; 50]);
        let span = |span: u32| (groups[span as usize].clone(), 24);
        let choice = choose(|keeping| order(&groups, keeping), &groups, span, 600, 1, &Compute::default());
        assert_eq!((choice.keeping.cell, choice.keeping.grain), (0, 1));
    }

    #[test]
    fn the_work_of_a_choice_is_bounded_in_pages_and_spans() {
        let whole = |keeping: &Keeping| order(&units(&[4; 8]), keeping);
        let span = |_| (0..0, 0);
        for (spans, ways) in [(20, 9), (466, 9), (10_000, 2), (300_000, 2)] {
            let groups = units(&vec![1; spans]);
            let many = order(&groups, &Keeping::default());
            let loads = Loads::new(&many, &|span| (groups[span as usize].clone(), 1), 100.0);
            assert_eq!(loads.0.len(), ways, "{spans} spans");
            for (pages, frames) in [(1000, 900), (10_000, 100), (200_000, 190_000), (200_000, 10)] {
                let question = Question { order_with: whole, groups: &groups, span, pages, frames, most: 4 };
                let steps = ((pages - frames) as usize + spans) * PASSES * ways;
                let plans = question.plans(&loads, spans);
                assert!(plans == 1 || plans * steps <= MOST_COPIES, "{spans} spans, {pages} pages: {plans}");
                assert!(plans * steps < 2 * MOST_COPIES, "{spans} spans, {pages} pages: {plans}");
            }
        }
    }

    #[test]
    fn a_faster_runner_gets_a_smaller_ring() {
        let groups = units(&[10; 40]);
        let ring = |compute| chosen(&groups, 200, Some(compute)).1.ring;
        assert!(ring(20.0) < ring(200.0), "{} {}", ring(20.0), ring(200.0));
    }

    #[test]
    fn where_the_compute_of_each_span_is_known_spans_behind_slow_ones_stream_more() {
        // 380 page copies in all, 61 of them with two spans in a row.
        let seconds: [f32; 23] = [
            9.0, 2.0, 22.0, 18.0, 15.0, 9.0, 18.0, 10.0, 6.0, 14.0, 4.0, 38.0, 21.0, 35.0, 26.0, 18.0, 20.0,
            11.0, 17.0, 30.0, 22.0, 5.0, 10.0,
        ];
        let lengths = [
            240, 346, 287, 341, 350, 339, 414, 307, 346, 360, 261, 464, 272, 469, 350, 370, 268, 346, 309,
            464, 370, 352, 326,
        ];
        let groups = units(&lengths);
        let span = |span: u32| (groups[span as usize].clone(), 100);
        let frames = lengths.iter().sum::<u32>() - 380;
        let plan_of = |choice: &Choice| plan(&order(&groups, &choice.keeping), &groups, frames, choice.ring);
        let time = |compute: &Compute<'_>, choice: &Choice| {
            let (order, plan) = (order(&groups, &choice.keeping), plan_of(choice));
            assert!(plan.ring <= 3 * plan.largest_part, "{plan:?}");
            ModelledPass::new(&order, &span, plan, MOST)
                .mean_time(&Loads::measured(&order, compute, 380.0).unwrap())
        };
        let choose = |compute: &Compute<'_>| {
            choose(|keeping| order(&groups, keeping), &groups, span, frames, MOST, compute)
        };
        let sum = Compute { total: Some(380.0), ..Compute::default() };
        let each = Compute { spans: Some(&seconds), copy: 1.0, ..sum };
        let tiny = seconds.map(|seconds| seconds * 1e-7);
        let (by_sum, by_each) = (choose(&sum), choose(&each));
        assert!(by_sum.keeping.shares.is_empty(), "{by_sum:?}");
        assert!(by_each.keeping.shares[12] > 2 * by_each.keeping.shares[11], "{by_each:?}");
        let (before, after) = (time(&each, &by_sum), time(&each, &by_each));
        // No ring does better than the pages that must stream and the compute of the two spans.
        assert!(after < before * 0.96 && (441.0..450.0).contains(&after), "{before} {after}");
        // Where computing takes four times as long as copying nothing is gained.
        let long = Compute { total: Some(4.0 * 380.0), ..each };
        let (by_long, by_its_sum) = (choose(&long), choose(&Compute { spans: None, ..long }));
        assert!(by_long.keeping.shares.is_empty(), "{by_long:?}");
        assert_eq!(by_long.ring, by_its_sum.ring);
        // Compute that is nothing beside the copies tells nothing.
        let idle = Compute { total: None, spans: Some(&[0.1; 23]), copy: 1.0 };
        assert_eq!(choose(&idle), choose(&Compute::default()));
        // Nor does compute that is about as long as it takes to measure it.
        assert_eq!(choose(&Compute { spans: Some(&tiny), copy: 1e-7, ..sum }), by_sum);
    }

    #[test]
    fn the_same_question_has_the_same_answer() {
        let groups = giants_among_dwarfs();
        assert_eq!(chosen(&groups, 300, None), chosen(&groups, 300, None));
    }
}
