//! The residency of every page over time.
//!
//! Rows are runs of pages, columns samples in the order of the steps. What is alike in neighbouring samples
//! is one box, so that the picture's size goes by changes.

#![deny(unsafe_code)]

use std::io;

use plotters::prelude::RGBColor;

use super::super::residency::{Cell, ResidencyMap};
use super::canvas::{Canvas, GREY, INK, Side, between, ticks, width_of};

const WIDTH: u32 = 960;
const LEFT: i32 = 72;
const RIGHT: i32 = 944;
const TOP: i32 = 12;
const BOTTOM: i32 = 44;
/// The height that rows share, and the most that one takes.
const HEIGHT: i32 = 360;
const MOST_ROW: i32 = 14;
const SIZE: f64 = 12.0;

/// What a cell shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shade {
    /// Every page has a frame of its own.
    All,
    /// Half of the pages or more have.
    Most,
    /// Some have.
    Few,
    /// None is on the card.
    None,
    /// Some lie in the ring, none has a frame of its own.
    Ring,
    /// Some lie in the ring, and some have a frame of their own.
    RingBeside,
}

/// The shades that can be seen, with their words for the legend.
pub(super) const LEGEND: [(Shade, &str); 6] = [
    (Shade::All, "every page of the row stays on the card"),
    (Shade::Most, "half or more of them"),
    (Shade::Few, "fewer than half"),
    (Shade::None, "none is on the card"),
    (Shade::Ring, "some are passing through the ring"),
    (Shade::RingBeside, "some are passing, beside pages that stay"),
];

impl Shade {
    /// The shade of a row of `pages` pages.
    pub(super) fn of(cell: Cell, pages: u32) -> Self {
        match cell {
            Cell { resident, .. } if resident >= pages => Self::All,
            Cell { resident: 0, ring: 0 } => Self::None,
            Cell { resident: 0, .. } => Self::Ring,
            Cell { ring: 0, resident } if resident.saturating_mul(2) >= pages => Self::Most,
            Cell { ring: 0, .. } => Self::Few,
            Cell { .. } => Self::RingBeside,
        }
    }

    pub(super) fn color(self) -> RGBColor {
        match self {
            Self::All => RGBColor(0x1F, 0x4B, 0x8E),
            Self::Most => RGBColor(0x7D, 0xA4, 0xDA),
            Self::Few => RGBColor(0xBF, 0xD3, 0xEF),
            Self::None => RGBColor(0xEB, 0xEE, 0xF2),
            Self::Ring => RGBColor(0xE6, 0x7E, 0x22),
            Self::RingBeside => RGBColor(0xF4, 0xBD, 0x85),
        }
    }
}

/// Draws the map.
pub(super) fn draw(map: &ResidencyMap) -> io::Result<String> {
    let rows = i32::try_from(map.rows()).unwrap_or(1).max(1);
    let height = HEIGHT.min(rows * MOST_ROW);
    let foot = TOP + height;
    let samples = map.samples.len();
    let mut svg = String::new();
    let mut canvas = Canvas::new(&mut svg, WIDTH, u32::try_from(foot + BOTTOM).unwrap_or(0));
    canvas.fill((LEFT, TOP), (RIGHT, foot), Shade::None.color())?;
    #[expect(clippy::cast_precision_loss, reason = "a share for a pixel")]
    let x = |sample: usize| between(LEFT, RIGHT, sample as f64 / samples.max(1) as f64);
    for row in 0..map.rows() {
        let share = |row: u32| f64::from(row) / f64::from(map.rows().max(1));
        let (top, bottom) = (between(TOP, foot, share(row)), between(TOP, foot, share(row + 1)));
        let pages = map.pages_of_row(row);
        let shades: Vec<Shade> = map
            .samples
            .iter()
            .map(|cells| Shade::of(cells.get(row as usize).copied().unwrap_or_default(), pages))
            .collect();
        let mut first = 0;
        for run in shades.chunk_by(|a, b| a == b) {
            if let Some(shade) = run.first().filter(|shade| **shade != Shade::None) {
                canvas.fill((x(first), top), (x(first + run.len()), bottom), shade.color())?;
            }
            first += run.len();
        }
    }
    pages_axis(&mut canvas, map, foot)?;
    passes_axis(&mut canvas, map, foot, &x)?;
    canvas.end()?;
    Ok(svg)
}

fn pages_axis(canvas: &mut Canvas<'_>, map: &ResidencyMap, foot: i32) -> io::Result<()> {
    let wanted = (f64::from(foot - TOP) / 40.0).clamp(1.0, 8.0);
    for tick in ticks(0.0, f64::from(map.pages), wanted) {
        // No half pages.
        let Ok(page) = tick.parse::<u32>() else { continue };
        let y = between(TOP, foot, f64::from(page) / f64::from(map.pages.max(1)));
        canvas.line((LEFT - 4, y), (LEFT, y), GREY)?;
        canvas.text(&tick, (LEFT - 7, y), Side::Right, 10.0, GREY)?;
    }
    canvas.text("page", (6, i32::midpoint(TOP, foot)), Side::Left, SIZE, INK)
}

fn passes_axis(
    canvas: &mut Canvas<'_>,
    map: &ResidencyMap,
    foot: i32,
    x: &dyn Fn(usize) -> i32,
) -> io::Result<()> {
    let mut first = 0;
    let mut free_from = LEFT;
    for run in map.sample_passes.chunk_by(|a, b| a == b) {
        let (start, end) = (x(first), x(first + run.len()));
        canvas.line((start, TOP), (start, foot + 5), GREY)?;
        if let Some(pass) = run.first() {
            let label = pass.to_string();
            let half = width_of(&label, 10.0) / 2 + 2;
            let middle = i32::midpoint(start, end);
            if middle - half >= free_from && end - start >= 2 * half {
                canvas.text(&label, (middle, foot + 13), Side::Middle, 10.0, GREY)?;
                free_from = middle + half;
            }
        }
        first += run.len();
    }
    canvas.line((RIGHT, TOP), (RIGHT, foot + 5), GREY)?;
    canvas.text("pass (steps in order)", (i32::midpoint(LEFT, RIGHT), foot + 32), Side::Middle, SIZE, INK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_page_that_does_not_stay_changes_a_rows_shade() {
        let cell = |resident, ring| Cell { resident, ring };
        assert_eq!(Shade::of(cell(64, 0), 64), Shade::All);
        assert_eq!(Shade::of(cell(63, 0), 64), Shade::Most);
        assert_eq!(Shade::of(cell(63, 1), 64), Shade::RingBeside);
        assert_eq!(Shade::of(cell(31, 0), 64), Shade::Few);
        assert_eq!(Shade::of(cell(0, 1), 64), Shade::Ring);
        assert_eq!(Shade::of(cell(0, 0), 64), Shade::None);
        let colors: Vec<RGBColor> = LEGEND.iter().map(|(shade, _)| shade.color()).collect();
        assert!(colors.iter().enumerate().all(|(place, color)| !colors[..place].contains(color)));
    }
}
