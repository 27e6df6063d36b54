//! How the order of a pass is learned from the faults.
//!
//! Pure: values in, values out. Spans are named by their number in the layout.

#![deny(unsafe_code)]

use super::order::PassOrder;

/// Watches faults and says when a pass ends, whether its order is another one, and what is never faulted.
///
/// A table that is only asked for by rows has spans that nobody faults: room kept for them, and copies
/// ahead of them, would be lost in every pass. So once a whole pass brought no span for the first time,
/// spans that were never faulted stand outside of the order; the first fault of one brings all of them
/// back, until the next such pass.
#[derive(Debug)]
pub(crate) struct OrderLearner {
    /// The pass number in which a span was last seen, by span; zero for never.
    seen: Vec<u32>,
    pass: u32,
    recorded: Vec<u32>,
    /// The pass before, if it went in another order than the known one.
    candidate: Vec<u32>,
    /// Spans that were faulted at least once.
    ever: usize,
    /// The same when this pass began.
    ever_before: usize,
}

/// What a fault told the learner.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Learned {
    /// The pass goes on.
    Nothing,
    /// A new pass begins, in the order known.
    PassEnded,
    /// A new pass begins, and the last one went in another order: this one.
    NewOrder(Vec<u32>),
    /// The pass goes on, with spans that stood outside: this is the order with them in it.
    Widened(Vec<u32>),
}

/// How far a span may stray from its place before the order counts as another one: several threads that
/// take units from one counter swap neighbours.
const STRAY: u32 = 16;

impl OrderLearner {
    pub(crate) fn new(spans: usize) -> Self {
        Self {
            seen: vec![0; spans],
            pass: 1,
            recorded: Vec::with_capacity(spans),
            candidate: Vec::new(),
            ever: 0,
            ever_before: 0,
        }
    }

    /// A pass begins here, whatever came before: the model was activated. Answers whether anything was noted
    /// since the last time.
    pub(crate) fn restart(&mut self) -> bool {
        let noted = !self.recorded.is_empty();
        if noted {
            self.pass = self.pass.wrapping_add(1).max(2);
            self.recorded.clear();
        }
        noted
    }

    /// Notes a fault that was not a hit. Hits of resident spans are not seen; what is seen must only be in
    /// order among itself.
    pub(crate) fn note(&mut self, span: u32, known: &PassOrder) -> Learned {
        let Some(seen) = self.seen.get_mut(span as usize) else { return Learned::Nothing };
        if *seen != self.pass {
            self.ever += usize::from(*seen == 0);
            *seen = self.pass;
            let before = self.recorded.last().copied();
            self.recorded.push(span);
            return if known.contains(span) { Learned::Nothing } else { self.widened(before, known) };
        }
        let first = self.pass == 1;
        self.pass = self.pass.wrapping_add(1).max(2);
        *seen = self.pass;
        let mut recorded = std::mem::take(&mut self.recorded);
        let another = reordered(known, &recorded).filter(|_| first || !is_rotation(known, &recorded));
        let learned = match another {
            // The first pass is believed at once. Later ones only if two in a row agree: threads that share
            // a model take its units in a slightly different order each time.
            Some(order) if first || agree(&self.candidate, &recorded) => Learned::NewOrder(order),
            Some(_) => {
                std::mem::swap(&mut self.candidate, &mut recorded);
                Learned::PassEnded
            }
            None => Learned::PassEnded,
        };
        recorded.clear();
        recorded.push(span);
        self.recorded = recorded;
        let nothing_new = self.ever == std::mem::replace(&mut self.ever_before, self.ever);
        if nothing_new && known.spans().len() > self.ever { self.narrowed(learned, known) } else { learned }
    }

    /// The order with every span in it: those that stood outside come where the pass is now.
    fn widened(&self, before: Option<u32>, known: &PassOrder) -> Learned {
        let at = before.filter(|span| known.contains(*span)).map_or(0, |span| known.position(span) + 1);
        let mut order = known.spans().to_vec();
        let outside = (0_u32..).zip(&self.seen).map(|(span, _)| span).filter(|span| !known.contains(*span));
        let rest = order.split_off((at as usize).min(order.len()));
        order.extend(outside);
        order.extend(rest);
        Learned::Widened(order)
    }

    /// What was learned, without the spans that nobody ever faulted.
    fn narrowed(&self, learned: Learned, known: &PassOrder) -> Learned {
        let mut order = match learned {
            Learned::NewOrder(order) => order,
            _ => known.spans().to_vec(),
        };
        order.retain(|span| self.seen.get(*span as usize).is_some_and(|seen| *seen != 0));
        Learned::NewOrder(order)
    }
}

/// Whether `recorded` is the known order begun elsewhere. A pass ends for us where a span comes again, and
/// that place moves when other pages than before stay on the card; the runner's order is still the same.
fn is_rotation(known: &PassOrder, recorded: &[u32]) -> bool {
    let drop = |pair: &[u32]| known.position(pair[0]).saturating_sub(known.position(pair[1]));
    let Some((seam, _)) = recorded.windows(2).enumerate().max_by_key(|(_, pair)| drop(pair)) else {
        return true;
    };
    let (end, start) = recorded.split_at(seam + 1);
    reordered(known, &[start, end].concat()).is_none()
}

/// Whether two passes went in one order. What only one of them saw does not count, but each must have seen at least
/// half of what the other did: passes with nothing in common agree on nothing. Such come of threads that take each
/// other's pages, where what looks like the end of a pass is a span that left before its time.
fn agree(one: &[u32], other: &[u32]) -> bool {
    let places: std::collections::HashMap<u32, usize> =
        one.iter().enumerate().map(|(place, &span)| (span, place)).collect();
    let mut last = None;
    let mut common = 0;
    for &place in other.iter().filter_map(|span| places.get(span)) {
        if last.is_some_and(|last| place <= last) {
            return false;
        }
        last = Some(place);
        common += 1;
    }
    common > 0 && 2 * common >= one.len().max(other.len())
}

/// The known order with the recorded spans put in the order seen, in the places that they held among
/// themselves; `None` if they were in order already, give or take a few places.
fn reordered(known: &PassOrder, recorded: &[u32]) -> Option<Vec<u32>> {
    let mut highest = 0;
    let strayed = recorded.iter().any(|&span| {
        let position = known.position(span);
        highest = highest.max(position);
        highest - position > STRAY
    });
    // With few spans any swap matters and is cheap to follow.
    let small = recorded.len() <= STRAY as usize
        && recorded.windows(2).any(|pair| known.position(pair[0]) > known.position(pair[1]));
    if !strayed && !small {
        return None;
    }
    let mut places: Vec<u32> = recorded.iter().map(|&span| known.position(span)).collect();
    places.sort_unstable();
    let mut order = known.spans().to_vec();
    for (&place, &span) in places.iter().zip(recorded) {
        order[place as usize] = span;
    }
    Some(order)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::order::Keeping;

    fn order(spans: Vec<u32>) -> PassOrder {
        let count = u32::try_from(spans.len()).unwrap();
        PassOrder::new(spans, count * 2, |span| span * 2..span * 2 + 2, &Keeping::default())
    }

    #[test]
    fn a_pass_ends_when_a_span_comes_again() {
        let known = order((0..4).collect());
        let mut learner = OrderLearner::new(4);
        for span in 0..4 {
            assert_eq!(learner.note(span, &known), Learned::Nothing);
        }
        assert_eq!(learner.note(0, &known), Learned::PassEnded);
        assert_eq!(learner.note(2, &known), Learned::Nothing);
        assert_eq!(learner.note(2, &known), Learned::PassEnded);
    }

    #[test]
    fn another_order_is_learned_in_one_pass() {
        let known = order((0..4).collect());
        let mut learner = OrderLearner::new(4);
        for span in [3, 1, 0, 2] {
            learner.note(span, &known);
        }
        assert_eq!(learner.note(3, &known), Learned::NewOrder(vec![3, 1, 0, 2]));
    }

    #[test]
    fn a_later_order_is_believed_when_it_comes_twice() {
        let mut known = order((0..4).collect());
        let mut learner = OrderLearner::new(4);
        let pass = |learner: &mut OrderLearner, known: &PassOrder, spans: [u32; 4]| {
            spans
                .map(|span| learner.note(span, known))
                .into_iter()
                .find(|learned| *learned != Learned::Nothing)
        };
        assert_eq!(pass(&mut learner, &known, [0, 1, 2, 3]), None);
        assert_eq!(pass(&mut learner, &known, [3, 1, 0, 2]), Some(Learned::PassEnded));
        assert_eq!(pass(&mut learner, &known, [3, 2, 0, 1]), Some(Learned::PassEnded));
        assert_eq!(pass(&mut learner, &known, [3, 2, 0, 1]), Some(Learned::PassEnded));
        let second = pass(&mut learner, &known, [3, 2, 0, 1]);
        assert_eq!(second, Some(Learned::NewOrder(vec![3, 2, 0, 1])));
        known = order(vec![3, 2, 0, 1]);
        assert_eq!(pass(&mut learner, &known, [3, 2, 0, 1]), Some(Learned::PassEnded));
    }

    #[test]
    fn passes_that_have_nothing_in_common_agree_on_nothing() {
        let known = order((0..100).collect());
        let mut learner = OrderLearner::new(100);
        for span in 0..100 {
            learner.note(span, &known);
        }
        // Threads that take each other's pages fault a few spans again, swapped, here and there in a pass.
        for start in (0..90).step_by(4) {
            for span in [start, start + 2, start + 1, start] {
                assert!(!matches!(learner.note(span, &known), Learned::NewOrder(_)), "{span}");
            }
        }
        assert!(agree(&[1, 2, 3, 4], &[0, 1, 3, 4]) && !agree(&[1, 2, 3, 4], &[1, 3, 2, 4]));
        assert!(!agree(&[1, 2, 3, 4], &[4, 5, 6, 7]) && !agree(&[], &[1, 2]) && !agree(&[1, 2], &[3, 4]));
    }

    #[test]
    fn spans_that_were_not_seen_keep_their_places() {
        let known = order((0..5).collect());
        let mut learner = OrderLearner::new(5);
        for span in [4, 0] {
            learner.note(span, &known);
        }
        assert_eq!(learner.note(4, &known), Learned::NewOrder(vec![4, 1, 2, 3, 0]));
    }

    #[test]
    fn a_pass_that_is_seen_to_begin_elsewhere_is_no_new_order() {
        let known = order((0..40).collect());
        let mut learner = OrderLearner::new(40);
        for _ in 0..2 {
            (0..40).for_each(|span| drop(learner.note(span, &known)));
        }
        // From here on other spans are missed: the record goes on from 7 and wraps at 5.
        for _ in 0..4 {
            for span in [5, 7, 9, 11, 30] {
                assert!(!matches!(learner.note(span, &known), Learned::NewOrder(_)));
            }
            for span in [7, 9, 11, 30, 5] {
                assert!(!matches!(learner.note(span, &known), Learned::NewOrder(_)));
            }
        }
    }

    #[test]
    fn threads_that_swap_neighbours_are_no_new_order() {
        let known = order((0..100).collect());
        let mut learner = OrderLearner::new(100);
        for pair in 0..50 {
            learner.note(pair * 2 + 1, &known);
            learner.note(pair * 2, &known);
        }
        assert_eq!(learner.note(1, &known), Learned::PassEnded);
    }

    #[test]
    fn what_is_never_faulted_leaves_the_order_and_comes_back_with_its_first_fault() {
        let known = order((0..6).collect());
        let mut learner = OrderLearner::new(6);
        // The first pass brings every span that it has for the first time.
        for span in [0, 1, 4] {
            assert_eq!(learner.note(span, &known), Learned::Nothing);
        }
        assert_eq!(learner.note(0, &known), Learned::PassEnded);
        for span in [1, 4] {
            assert_eq!(learner.note(span, &known), Learned::Nothing);
        }
        // The second shows that this is all that there is.
        assert_eq!(learner.note(0, &known), Learned::NewOrder(vec![0, 1, 4]));
        let known = PassOrder::new(vec![0, 1, 4], 12, |span| span * 2..span * 2 + 2, &Keeping::default());
        assert!(known.contains(4) && !known.contains(2) && !known.contains(5));
        assert!(known.has_page(9) && !known.has_page(4));
        assert_eq!(learner.note(1, &known), Learned::Nothing);
        assert_eq!(learner.note(3, &known), Learned::Widened(vec![0, 1, 2, 3, 5, 4]));
        let known = order(vec![0, 1, 2, 3, 5, 4]);
        assert_eq!(learner.note(4, &known), Learned::Nothing);
        assert_eq!(learner.note(0, &known), Learned::PassEnded);
        for span in [1, 3, 4] {
            assert_eq!(learner.note(span, &known), Learned::Nothing);
        }
        assert_eq!(learner.note(0, &known), Learned::NewOrder(vec![0, 1, 3, 4]));
    }

    #[test]
    fn a_runner_that_faults_each_span_twice_keeps_all_of_them() {
        let known = order((0..5).collect());
        let mut learner = OrderLearner::new(5);
        for span in 0..5 {
            for _ in 0..2 {
                assert!(!matches!(learner.note(span, &known), Learned::NewOrder(_)), "{span}");
            }
        }
    }
}
