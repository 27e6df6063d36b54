//! The choices that were made for a model, by its frames.
//!
//! Pure: what is asked for is made by whoever asks.

#![deny(unsafe_code)]

use super::plan::Choice;

/// Frames that may come or go without a new choice, however small the card; on larger ones it is a fiftieth.
const SMALL_CHANGE: u32 = 4;

/// Choices that are remembered.
const REMEMBERED: usize = 8;

/// The choices made lately, the one in use last.
///
/// A choice stands while the frames stay about as many, and comes back when they are about as many again:
/// after a spike the ring and the pages that stay are the same as before it.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    made: Vec<(u32, Choice)>,
    /// What the choice was for that was in use when all were forgotten.
    forgotten: Option<u32>,
}

impl Choices {
    /// The choice to go over to for so many frames, by `choose` if none was made for about as many; `None`
    /// if the one in use stands. `choose` is told for how many: as many as the last one was for that was
    /// forgotten, if it was about as many. So what is learned moves no page unless it matters.
    pub(crate) fn for_about(&mut self, frames: u32, choose: impl FnOnce(u32) -> Choice) -> Option<Choice> {
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
            None => {
                let frames = self.forgotten.filter(|chosen| is_near(*chosen)).unwrap_or(frames);
                (frames, choose(frames))
            }
        };
        if self.made.len() == REMEMBERED {
            self.made.remove(0);
        }
        self.made.push(next.clone());
        Some(next.1)
    }

    /// Another order, other groups or another compute: no choice holds any more.
    pub(crate) fn forget(&mut self) {
        let last = self.made.last().map(|(chosen, _)| *chosen);
        self.forgotten = last.or(self.forgotten);
        self.made.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::order::Keeping;
    use crate::pager::plan::RingSize;

    #[test]
    fn a_choice_stands_while_the_frames_are_about_as_many_and_comes_back_with_them() {
        let mut choices = Choices::default();
        let made = |ring| Choice { keeping: Keeping::default(), ring: RingSize::Pages(ring) };
        let never = |_| -> Choice { unreachable!("it was chosen before") };
        assert_eq!(choices.for_about(1000, |_| made(1)), Some(made(1)));
        assert_eq!(choices.for_about(980, never), None);
        assert_eq!(choices.for_about(1020, never), None);
        assert_eq!(choices.for_about(750, |_| made(2)), Some(made(2)));
        assert_eq!(choices.for_about(985, never), Some(made(1)));
        assert_eq!(choices.for_about(760, never), Some(made(2)));
        choices.forget();
        assert_eq!(choices.for_about(760, |_| made(3)), Some(made(3)));
        // What is chosen anew is so for the frames that the forgotten one was for, if they are about as many.
        assert_eq!(choices.for_about(1500, made), Some(made(1500)));
        choices.forget();
        assert_eq!(choices.for_about(1480, made), Some(made(1500)));
        choices.forget();
        assert_eq!(choices.for_about(1300, made), Some(made(1300)));
        for frames in 1..100 {
            choices.for_about(frames * 1000, |_| made(frames));
        }
        assert_eq!(choices.made.len(), REMEMBERED);
    }
}
