//! Where the pages of a model were over time, in as many rows and columns as a screen shows.
//!
//! Pure. A row is a run of neighbouring pages; a cell keeps how many of them stayed and how many lay in the
//! ring, so that a single streamed page among many that stay is never lost.

#![deny(unsafe_code)]

use crate::pager::PageState;

/// The most rows.
const MOST_ROWS: u32 = 180;

/// The most samples that are taken beside those at the ends of passes.
const MOST_SAMPLES: u64 = 240;

/// A run of pages at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cell {
    /// Pages with a frame of their own.
    pub resident: u32,
    /// Pages whose bytes lie in the ring.
    pub ring: u32,
}

/// Where pages were.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ResidencyMap {
    /// Pages of the model.
    pub pages: u32,
    /// Pages of a row; the last row may have fewer.
    pub pages_per_row: u32,
    /// The pass of each sample.
    pub sample_passes: Vec<u32>,
    /// The samples, each with a cell a row.
    pub samples: Vec<Vec<Cell>>,
    /// Steps between two samples.
    stride: u64,
}

impl ResidencyMap {
    /// A map of `pages` pages for a run of about `steps` steps.
    pub(super) fn new(pages: u32, steps: u64) -> Self {
        let pages_per_row = pages.div_ceil(MOST_ROWS).max(1);
        let stride = steps.div_ceil(MOST_SAMPLES).max(1);
        Self { pages, pages_per_row, stride, ..Self::default() }
    }

    /// Rows of a sample.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.pages.div_ceil(self.pages_per_row.max(1))
    }

    /// Pages of a row.
    #[must_use]
    pub fn pages_of_row(&self, row: u32) -> u32 {
        let first = row.saturating_mul(self.pages_per_row);
        self.pages.saturating_sub(first).min(self.pages_per_row)
    }

    /// Whether the step of this number, from 0, is one to take a sample after.
    pub(super) fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.stride)
    }

    /// Adds a sample.
    pub(super) fn add(&mut self, pass: u32, states: &[PageState]) {
        let mut cells = vec![Cell::default(); self.rows() as usize];
        for (pages, cell) in states.chunks(self.pages_per_row as usize).zip(&mut cells) {
            for state in pages {
                match state {
                    PageState::Absent => {}
                    PageState::Ring => cell.ring += 1,
                    PageState::Resident => cell.resident += 1,
                }
            }
        }
        self.sample_passes.push(pass);
        self.samples.push(cells);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lone_streamed_page_among_half_a_million_still_shows() {
        let mut map = ResidencyMap::new(500_000, 10);
        assert!(map.rows() <= MOST_ROWS);
        let mut states = vec![PageState::Resident; 500_000];
        states[123_456] = PageState::Ring;
        states[499_999] = PageState::Absent;
        map.add(1, &states);
        let short: Vec<u32> = (0..map.rows())
            .filter(|&row| map.samples[0][row as usize].resident < map.pages_of_row(row))
            .collect();
        assert_eq!(short, [123_456 / map.pages_per_row, map.rows() - 1]);
        assert_eq!(map.samples[0][short[0] as usize].ring, 1);
        let shown: u32 = map.samples[0].iter().map(|cell| cell.resident + cell.ring).sum();
        assert_eq!(shown, 499_999);
    }

    #[test]
    fn a_small_model_has_a_row_a_page_and_an_empty_one_none() {
        let map = ResidencyMap::new(7, 3);
        assert_eq!((map.rows(), map.pages_of_row(6)), (7, 1));
        assert!((0..3).all(|step| map.is_due(step)));
        assert_eq!(ResidencyMap::new(0, 0).rows(), 0);
        let long = ResidencyMap::new(7, 1_000_000);
        assert!((0..1_000_000).filter(|&step| long.is_due(step)).count() <= 241);
    }
}
