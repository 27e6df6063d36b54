//! Lines, boxes and text on a picture, in its pixels, and the ticks of an axis.
//!
//! A thin layer over the SVG backend of `plotters`: pictures here need exact places more than charts.

#![deny(unsafe_code)]

use std::io;

use plotters::prelude::{Color, DrawingBackend, IntoFont, RGBColor, SVGBackend, ShapeStyle};
use plotters::style::IntoTextStyle;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// The blue of the link.
pub(super) const LINK: RGBColor = RGBColor(0x3B, 0x7D, 0xD8);
/// The green of compute.
pub(super) const COMPUTE: RGBColor = RGBColor(0x3A, 0x9D, 0x5D);
/// The red of stalls.
pub(super) const STALL: RGBColor = RGBColor(0xD6, 0x45, 0x45);
/// Words.
pub(super) const INK: RGBColor = RGBColor(0x2B, 0x32, 0x3C);
/// Words that matter less, and axes.
pub(super) const GREY: RGBColor = RGBColor(0x6B, 0x75, 0x82);
/// Lines behind.
pub(super) const FAINT: RGBColor = RGBColor(0xD5, 0xDA, 0xE1);
/// Where nothing is.
pub(super) const PAPER: RGBColor = RGBColor(0xF4, 0xF6, 0xF9);

/// The backend divides the sizes of fonts by this.
const FONT_SCALE: f64 = 1.24;

/// About how wide a character is, as a share of the font's size.
const CHARACTER: f64 = 0.6;

/// On which side of its place a text stands.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Left,
    Middle,
    Right,
}

/// A picture that is being drawn.
pub(super) struct Canvas<'s> {
    backend: SVGBackend<'s>,
}

/// Why a picture could not be drawn, as an error of writing.
fn failed(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("a picture cannot be drawn: {error}"))
}

impl<'s> Canvas<'s> {
    /// A picture of this size, appended to `svg` when [`Self::end`] is called.
    pub(super) fn new(svg: &'s mut String, width: u32, height: u32) -> Self {
        Self { backend: SVGBackend::with_string(svg, (width, height)) }
    }

    pub(super) fn end(mut self) -> io::Result<()> {
        self.backend.present().map_err(failed)
    }

    /// A filled box.
    pub(super) fn fill(&mut self, from: (i32, i32), to: (i32, i32), color: RGBColor) -> io::Result<()> {
        if to.0 <= from.0 || to.1 <= from.1 {
            return Ok(());
        }
        self.backend.draw_rect(from, to, &ShapeStyle::from(color).filled(), true).map_err(failed)
    }

    pub(super) fn line(&mut self, from: (i32, i32), to: (i32, i32), color: RGBColor) -> io::Result<()> {
        self.backend.draw_line(from, to, &ShapeStyle::from(color)).map_err(failed)
    }

    pub(super) fn polygon(&mut self, points: Vec<(i32, i32)>, color: RGBColor) -> io::Result<()> {
        self.backend.fill_polygon(points, &color.filled()).map_err(failed)
    }

    pub(super) fn disc(&mut self, at: (i32, i32), radius: u32, color: RGBColor) -> io::Result<()> {
        self.backend.draw_circle(at, radius, &color.filled(), true).map_err(failed)
    }

    /// A line of text whose middle is at the height of `at`.
    pub(super) fn text(
        &mut self,
        text: &str,
        at: (i32, i32),
        anchor: Side,
        size: f64,
        color: RGBColor,
    ) -> io::Result<()> {
        let anchor = match anchor {
            Side::Left => HPos::Left,
            Side::Middle => HPos::Center,
            Side::Right => HPos::Right,
        };
        let font = ("system-ui, sans-serif", size * FONT_SCALE).into_font();
        // No parent to take a size from: the font's is absolute.
        let style = font.into_text_style(&(0, 0)).color(&color).pos(Pos::new(anchor, VPos::Center));
        self.backend.draw_text(text, &style, at).map_err(failed)
    }
}

/// About how many pixels wide a text is.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "pixels of a line of text")]
pub(super) fn width_of(text: &str, size: f64) -> i32 {
    (text.chars().count() as f64 * size * CHARACTER).ceil() as i32
}

/// A pixel between `start` and `end`, `share` of the way.
#[expect(clippy::cast_possible_truncation, reason = "pixels of a picture")]
pub(super) fn between(start: i32, end: i32, share: f64) -> i32 {
    start + (f64::from(end - start) * share.clamp(0.0, 1.0)).round() as i32
}

/// Round numbers in `from..=to`, about `wanted` of them, with the places that they need behind the point.
pub(super) fn ticks(from: f64, to: f64, wanted: f64) -> Vec<String> {
    let length = to - from;
    if !length.is_finite() || length <= 0.0 {
        return Vec::new();
    }
    let rough = length / wanted;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * power);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few places")]
    let places = (-(step.log10().floor())).clamp(0.0, 9.0) as usize;
    let first = (from / step).ceil();
    (0..64)
        .map(|number| (first + f64::from(number)) * step)
        .take_while(|tick| *tick <= to + step * 1e-9)
        .map(|tick| format!("{:.places$}", tick + 0.0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_lie_in_their_range() {
        assert_eq!(ticks(0.0, 10.0, 5.0), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(ticks(120.3, 121.1, 4.0), ["120.4", "120.6", "120.8", "121.0"]);
        assert_eq!(ticks(0.0, 0.0004, 4.0), ["0.0000", "0.0001", "0.0002", "0.0003", "0.0004"]);
        assert_eq!(ticks(7.0, 7.0, 4.0), [""; 0]);
        assert_eq!(ticks(0.0, f64::INFINITY, 4.0), [""; 0]);
        assert!(ticks(0.0, 123_456_789.0, 8.0).len() <= 9);
    }

    #[test]
    fn a_picture_is_an_svg_whose_text_is_escaped() {
        let mut svg = String::new();
        let mut canvas = Canvas::new(&mut svg, 100, 50);
        canvas.fill((0, 0), (10, 10), LINK).unwrap();
        canvas.text("a < b & c", (50, 20), Side::Middle, 12.0, INK).unwrap();
        canvas.end().unwrap();
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(svg.contains("a &lt; b &amp; c"), "{svg}");
        assert!(svg.contains("#3B7DD8"), "{svg}");
        assert!(svg.contains("font-size=\"12\""), "{svg}");
    }
}
