//! The timeline: a lane each for what the link, the compute units and the runners did.
//!
//! A lane is as many columns as it has pixels; a column's height is the share of its time that was filled. So
//! no number of operations is too large, and a short one is a low column instead of none.

#![deny(unsafe_code)]

use std::io;

use plotters::prelude::RGBColor;

use super::super::account::shares;
use super::super::recording::{Recording, TimeSpan};
use super::canvas::{Canvas, FAINT, GREY, INK, PAPER, Side, between, ticks, width_of};
use crate::units::ModelTime;

/// The size of the picture and of what is in it, in pixels.
const WIDTH: u32 = 960;
const LEFT: i32 = 52;
const RIGHT: i32 = 944;
const TOP: i32 = 26;
const LANE: i32 = 64;
const TITLE: i32 = 22;
const BOTTOM: i32 = 44;
const SIZE: f64 = 12.0;

/// A lane.
pub(super) struct Lane<'a> {
    pub(super) title: &'static str,
    pub(super) color: RGBColor,
    pub(super) spans: Box<dyn Iterator<Item = TimeSpan> + 'a>,
    /// What is said in the lane if there is nothing to show.
    pub(super) empty: &'static str,
}

/// A number that points at a place of the last lane.
#[derive(Clone, Copy)]
pub(super) struct Marker {
    pub(super) number: usize,
    pub(super) at: ModelTime,
}

/// Draws the lanes over a run of time; `markers` that would hide an earlier one are left out.
pub(super) fn draw(
    recording: &Recording,
    range: TimeSpan,
    lanes: Vec<Lane<'_>>,
    markers: &[Marker],
) -> io::Result<String> {
    let count = i32::try_from(lanes.len()).unwrap_or(3);
    let foot = TOP + count * (LANE + TITLE);
    let mut svg = String::new();
    let mut canvas = Canvas::new(&mut svg, WIDTH, u32::try_from(foot + BOTTOM).unwrap_or(0));
    let columns = usize::try_from(RIGHT - LEFT).unwrap_or(0);
    for (place, lane) in (0..).zip(lanes) {
        let top = TOP + place * (LANE + TITLE) + TITLE;
        let bottom = top + LANE;
        canvas.text(lane.title, (LEFT, top - 9), Side::Left, SIZE, INK)?;
        canvas.fill((LEFT, top), (RIGHT, bottom), PAPER)?;
        for (share, label) in [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")] {
            let y = between(bottom, top, share);
            canvas.line((LEFT, y), (RIGHT, y), FAINT)?;
            canvas.text(label, (LEFT - 6, y), Side::Right, 10.0, GREY)?;
        }
        let filled = shares(lane.spans, range, columns);
        if filled.iter().all(|share| *share <= 0.0) {
            canvas.text(
                lane.empty,
                (i32::midpoint(LEFT, RIGHT), top + LANE / 2),
                Side::Middle,
                SIZE,
                GREY,
            )?;
        }
        columns_of(&mut canvas, &filled, (top, bottom), lane.color)?;
    }
    passes(&mut canvas, recording, range, foot)?;
    for marker in placed(markers, range) {
        let x = between(LEFT, RIGHT, share_of(range, marker.at));
        let y = foot - LANE + 9;
        canvas.disc((x, y), 8, INK)?;
        canvas.text(&marker.number.to_string(), (x, y), Side::Middle, 10.0, PAPER)?;
    }
    axis(&mut canvas, range, foot)?;
    canvas.end()?;
    Ok(svg)
}

/// Neighbouring columns of some height as one shape.
fn columns_of(
    canvas: &mut Canvas<'_>,
    filled: &[f64],
    (top, bottom): (i32, i32),
    color: RGBColor,
) -> io::Result<()> {
    let height = |share: f64| {
        let y = between(bottom, top, share);
        // What is there at all shows.
        if share > 0.0 { y.min(bottom - 1) } else { bottom }
    };
    let columns: Vec<(i32, i32)> = (LEFT..).zip(filled.iter().map(|share| height(*share))).collect();
    for run in columns.chunk_by(|(_, a), (_, b)| (*a < bottom) == (*b < bottom)) {
        let (Some(&(first, y)), Some(&(last, _))) = (run.first(), run.last()) else { continue };
        if y >= bottom {
            continue;
        }
        let mut points = vec![(first, bottom)];
        for same in run.chunk_by(|(_, a), (_, b)| a == b) {
            if let (Some(&(from, y)), Some(&(to, _))) = (same.first(), same.last()) {
                points.extend([(from, y), (to + 1, y)]);
            }
        }
        points.push((last + 1, bottom));
        canvas.polygon(points, color)?;
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a share for a pixel")]
fn share_of(range: TimeSpan, at: ModelTime) -> f64 {
    let length = range.end.0.saturating_sub(range.start.0).max(1);
    at.0.saturating_sub(range.start.0) as f64 / length as f64
}

/// Borders of passes, and their numbers where there is room.
fn passes(canvas: &mut Canvas<'_>, recording: &Recording, range: TimeSpan, foot: i32) -> io::Result<()> {
    let mut free_from = LEFT;
    let mut line_from = LEFT;
    for pass in &recording.passes {
        if pass.time.end <= range.start || pass.time.start >= range.end {
            continue;
        }
        let x = between(LEFT, RIGHT, share_of(range, pass.time.start));
        let end = between(LEFT, RIGHT, share_of(range, pass.time.end.min(range.end)));
        // Of very many passes not every border.
        if x >= line_from {
            canvas.line((x, TOP - 6), (x, foot), GREY)?;
            line_from = x + 4;
        }
        let label = format!("pass {}", pass.number);
        let middle = i32::midpoint(x, end);
        let half = width_of(&label, SIZE) / 2;
        if middle - half >= free_from && end - x >= 2 * half {
            canvas.text(&label, (middle, TOP - 14), Side::Middle, SIZE, GREY)?;
            free_from = middle + half + 8;
        }
    }
    Ok(())
}

/// Those of the markers, the most important first, that have room beside the earlier ones.
fn placed(markers: &[Marker], range: TimeSpan) -> Vec<Marker> {
    let mut places: Vec<i32> = Vec::new();
    let mut shown = Vec::new();
    for marker in markers {
        let x = between(LEFT, RIGHT, share_of(range, marker.at));
        if marker.at >= range.start && marker.at < range.end && places.iter().all(|p| (p - x).abs() >= 18) {
            places.push(x);
            shown.push(*marker);
        }
    }
    shown
}

fn axis(canvas: &mut Canvas<'_>, range: TimeSpan, foot: i32) -> io::Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "milliseconds for an axis")]
    let ms = |time: ModelTime| time.0 as f64 / 1e6;
    let (from, to) = (ms(range.start), ms(range.end));
    for tick in ticks(from, to, 9.0) {
        let share = tick.parse::<f64>().map_or(0.0, |at| (at - from) / (to - from));
        let x = between(LEFT, RIGHT, share);
        canvas.line((x, foot), (x, foot + 4), GREY)?;
        canvas.text(&tick, (x, foot + 13), Side::Middle, 10.0, GREY)?;
    }
    let title = "time since the device was opened, in milliseconds";
    canvas.text(title, (i32::midpoint(LEFT, RIGHT), foot + 32), Side::Middle, SIZE, INK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_that_would_hide_each_other_are_left_out_and_the_first_stays() {
        let range = TimeSpan { start: ModelTime(1000), end: ModelTime(2000) };
        let at = |number, at| Marker { number, at: ModelTime(at) };
        let markers = [at(1, 1500), at(2, 1505), at(3, 1600), at(4, 2000), at(5, 3)];
        let shown: Vec<usize> = placed(&markers, range).iter().map(|marker| marker.number).collect();
        assert_eq!(shown, [1, 3]);
    }
}
