//! The words of a model's spans, laid out so that threads on different spans do not meet.
//!
//! Each word has a cache line of its own. x86-64 prefetches lines in pairs, so that a neighbour's line is
//! drawn in too; whoever pads for that pays 128 bytes a span. Here the words of a pair are those of spans that
//! lie 16 apart instead: threads that work on spans near each other, as those of one pass do, share no pair.
//!
//! Immutable but for the words themselves, which have their own rules; no lock. May import `word`.

#![deny(unsafe_code)]

use std::ops::{Index, Range};
use std::sync::Arc;

use super::word::SpanWord;

/// Spans between two whose words lie side by side.
const APART: usize = 16;

/// A word on a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Line(pub(super) SpanWord);

impl AsRef<SpanWord> for Line {
    fn as_ref(&self) -> &SpanWord {
        &self.0
    }
}

/// The words of a model, by span.
#[derive(Clone, Debug)]
pub(super) struct Words {
    lines: Arc<[Line]>,
    spans: usize,
}

impl Words {
    /// Words for so many spans, all absent.
    pub(super) fn new(spans: usize) -> Self {
        let lines = spans.next_multiple_of(2 * APART);
        Self { lines: (0..lines).map(|_| Line(SpanWord::new())).collect(), spans }
    }

    /// The words of a run of spans.
    pub(super) fn of(&self, spans: Range<u32>) -> impl Iterator<Item = &Line> + Clone {
        spans.map(|span| &self[span as usize])
    }

    /// The words in order of their spans.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Line> {
        (0..self.spans).map(|span| &self[span])
    }
}

/// Where a span's word lies: its place among twice [`APART`], dealt from two halves.
#[inline]
fn place(span: usize) -> usize {
    let within = span % (2 * APART);
    span - within + within % APART * 2 + within / APART
}

impl Index<usize> for Words {
    type Output = Line;

    #[inline]
    fn index(&self, span: usize) -> &Line {
        &self.lines[place(span)]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_span_has_a_line_of_its_own_and_its_pair_is_far_away() {
        for spans in [0, 1, 31, 32, 33, 1000] {
            let words = Words::new(spans);
            assert_eq!(words.iter().count(), spans);
            let mut at: Vec<usize> = words.iter().map(|line| std::ptr::from_ref(line).addr()).collect();
            for (span, line) in at.iter().enumerate() {
                assert_eq!(line % 64, 0);
                let pair = at.iter().position(|other| other / 128 == line / 128 && other != line);
                assert!(
                    pair.is_none_or(|pair| pair.abs_diff(span) == APART || !at[0].is_multiple_of(128)),
                    "{span}"
                );
            }
            at.sort_unstable();
            at.dedup();
            assert_eq!(at.len(), spans);
        }
    }
}
