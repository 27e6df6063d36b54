//! In which order models become active, and which of them will be needed again last.
//!
//! Pure. Models that take turns in a ring are the worst case of giving up the one that was not used for the
//! longest time: it is always the next one. So once a step from one model to another has been seen before,
//! the turns are taken to go on as they did then.

#![deny(unsafe_code)]

use std::collections::VecDeque;

/// Activations that are remembered.
const REMEMBERED: usize = 64;

/// The last activations, oldest first, never two of the same model in a row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Activations {
    seen: VecDeque<u32>,
    /// The turns expected from now on, if they are seen to repeat.
    expected: Vec<u32>,
}

impl Activations {
    /// Notes that a model became active.
    pub(crate) fn note(&mut self, id: u32) {
        if self.seen.back() == Some(&id) {
            return;
        }
        if self.seen.len() == REMEMBERED {
            self.seen.pop_front();
        }
        self.seen.push_back(id);
        self.expect();
    }

    /// Forgets a model that is gone; its number may be another's soon.
    pub(crate) fn forget(&mut self, id: u32) {
        self.seen.retain(|seen| *seen != id);
        let mut last = None;
        self.seen.retain(|seen| last.replace(*seen) != Some(*seen));
        self.expect();
    }

    /// How many turns from now a model is expected to be active; `None` if it is not, or if nothing is known.
    pub(crate) fn turns_until(&self, id: u32) -> Option<usize> {
        self.expected.iter().position(|next| *next == id)
    }

    /// Looks for the place in the past that most resembles the present, by the turns that led to it; the
    /// latest of several. What followed there is expected to follow now.
    fn expect(&mut self) {
        self.expected.clear();
        let turns = self.seen.make_contiguous();
        let alike = |end: usize| {
            turns[..end].iter().rev().zip(turns.iter().rev()).take_while(|(then, now)| then == now).count()
        };
        let best = (1..turns.len()).map(|end| (alike(end), end)).max();
        // A step was seen before, not just a model.
        if let Some((alike, end)) = best
            && alike >= 2
        {
            self.expected.extend_from_slice(&turns[end..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(turns: &[u32]) -> Activations {
        let mut activations = Activations::default();
        for &id in turns {
            activations.note(id);
        }
        activations
    }

    #[test]
    fn nothing_is_expected_before_a_step_was_seen_twice() {
        for turns in [&[][..], &[1], &[1, 2, 3], &[1, 2, 3, 1], &[1, 2, 1, 3, 2]] {
            let activations = after(turns);
            assert!((0..4).all(|id| activations.turns_until(id).is_none()), "{turns:?}");
        }
    }

    #[test]
    fn turns_in_a_ring_go_on_as_they_did() {
        let activations = after(&[1, 2, 3, 1, 2]);
        assert_eq!([3, 1, 2, 4].map(|id| activations.turns_until(id)), [Some(0), Some(1), Some(2), None]);
        let activations = after(&[1, 2, 3, 1, 2, 3]);
        assert_eq!([1, 2, 3].map(|id| activations.turns_until(id)), [Some(0), Some(1), Some(2)]);
    }

    #[test]
    fn what_led_here_decides_between_two_continuations() {
        // 1 is followed by 2 and by 3 in turn.
        let activations = after(&[1, 2, 1, 3, 1, 2, 1]);
        assert_eq!([3, 1, 2].map(|id| activations.turns_until(id)), [Some(0), Some(1), Some(2)]);
    }

    #[test]
    fn the_same_model_again_is_no_turn() {
        assert_eq!(after(&[1, 1, 2, 2, 2, 3, 1, 1, 2]).turns_until(3), Some(0));
    }

    #[test]
    fn a_model_that_is_gone_is_forgotten() {
        let mut activations = after(&[1, 2, 3, 1, 2, 3]);
        activations.forget(2);
        assert_eq!(activations.turns_until(2), None);
        assert_eq!(activations.turns_until(1), Some(0));
        activations.forget(3);
        assert_eq!(activations.seen, [1]);
    }

    #[test]
    fn the_memory_is_bounded() {
        let activations = after(&(0..1000).map(|turn| turn % 5).collect::<Vec<u32>>());
        assert_eq!(activations.seen.len(), REMEMBERED);
        assert_eq!(activations.turns_until(0), Some(0));
    }
}
