//! A page with pictures: why a step was slow, for a person with a browser and nothing else.
//!
//! One file, no scripts, nothing from the net: the pictures are drawn by `plotters` as SVG inside it. Pure but
//! for the writing.
//!
//! | file | what it does |
//! |---|---|
//! | `canvas` | lines, boxes and text on a picture, and ticks of an axis |
//! | `lanes` | the timeline: link, compute and stalls |
//! | `map` | the residency of every page over time |
//! | `page` | tables, words and the HTML around |

mod canvas;
mod lanes;
mod map;
mod page;

use std::io::{self, Write};

use super::recording::Recording;

/// Writes a recording as one HTML file.
///
/// # Errors
/// Those of `out`, and of drawing.
pub fn write_report(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    page::write(recording, out)
}
