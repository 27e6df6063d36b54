//! Where a unit that is too large for one piece may be cut.
//!
//! Cuts fall between rows of a tensor's first dimension, or between tensors. Small tensors are not cut.
//! The pieces of a unit come out about equally long, so that a ring that takes them wastes little: the
//! fewest pieces that the limit allows are counted first, and then the limit is lowered to what that many
//! need. Where rows allow it, a cut inside a tensor falls on [`TENSOR_ALIGNMENT`], so that a piece begins
//! where a copy likes to.
//!
//! Pure; may import the constants of `layout`.

#![deny(unsafe_code)]

use std::ops::Range;

use super::layout::TENSOR_ALIGNMENT;

/// A tensor of at most this share of a piece is not cut.
const SMALL_SHARE: u64 = 16;

/// A tensor of the unit, as far as cutting goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Its first byte, from the unit's start; ascending.
    pub(crate) at: u64,
    /// Its length on the device.
    pub(crate) bytes: u64,
    /// Its first dimension; 1 for a tensor without dimensions.
    pub(crate) rows: u64,
}

/// Some rows of one tensor, in one span.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    /// Which of the pieces.
    pub(crate) tensor: usize,
    /// Its rows.
    pub(crate) rows: Range<u64>,
    /// Its first byte, from the unit's start.
    pub(crate) at: u64,
    /// Its length on the device.
    pub(crate) bytes: u64,
    /// Whether a new span begins with it.
    pub(crate) begins_span: bool,
}

/// Cuts a unit of `unit_bytes` bytes into spans of at most `limit` bytes, where a row permits.
pub(crate) fn cut_unit(tensors: &[Piece], unit_bytes: u64, limit: u64, mut sink: impl FnMut(Part)) {
    if unit_bytes <= limit {
        for (number, tensor) in tensors.iter().enumerate() {
            let Piece { at, bytes, rows } = *tensor;
            sink(Part { tensor: number, rows: 0..rows, at, bytes, begins_span: number == 0 });
        }
        return;
    }
    let atoms: Vec<Atom> = tensors.iter().map(|tensor| atom(tensor, limit)).collect();
    let mut spans = 0_u64;
    walk(tensors, &atoms, limit, &mut |part| spans += u64::from(part.begins_span));
    // What `spans` equal pieces need, and one atom more: a greedy piece stops short by less than one.
    let largest = tensors.iter().zip(&atoms).map(|(tensor, atom)| atom.bytes(tensor)).max().unwrap_or(0);
    let even = unit_bytes.div_ceil(spans.max(1)).saturating_add(largest).saturating_add(TENSOR_ALIGNMENT);
    walk(tensors, &atoms, limit.min(even), &mut sink);
}

/// What of a tensor is never cut.
#[derive(Clone, Copy, Debug)]
enum Atom {
    Whole,
    /// This many rows, of so many bytes each.
    Rows {
        count: u64,
        row_bytes: u64,
    },
}

impl Atom {
    fn bytes(self, tensor: &Piece) -> u64 {
        match self {
            Self::Whole => tensor.bytes,
            Self::Rows { count, row_bytes } => count * row_bytes,
        }
    }
}

fn atom(tensor: &Piece, limit: u64) -> Atom {
    let Piece { bytes, rows, .. } = *tensor;
    // A row that is not a whole number of bytes (types of 4 and 6 bits) cannot be cut off.
    if rows <= 1 || bytes <= limit / SMALL_SHARE || bytes % rows != 0 {
        return Atom::Whole;
    }
    let row_bytes = bytes / rows;
    let aligned = TENSOR_ALIGNMENT / gcd(row_bytes, TENSOR_ALIGNMENT);
    let fits = row_bytes.saturating_mul(aligned) <= limit / SMALL_SHARE;
    Atom::Rows { count: if fits { aligned } else { 1 }, row_bytes }
}

/// Fills spans one after the other, each as full as atoms allow.
fn walk(tensors: &[Piece], atoms: &[Atom], limit: u64, sink: &mut impl FnMut(Part)) {
    // The open span's first byte; none before the first part.
    let mut open: Option<u64> = None;
    for (number, (tensor, atom)) in tensors.iter().zip(atoms).enumerate() {
        let (row_bytes, step) = match *atom {
            Atom::Whole => (0, tensor.rows),
            Atom::Rows { count, row_bytes } => (row_bytes, count),
        };
        let end = tensor.at + tensor.bytes;
        let mut row = 0;
        loop {
            let at = tensor.at + row * row_bytes;
            let rest = tensor.rows - row;
            let fits = |room| rows_that_fit(at, end, rest, room, *atom);
            let room = open.map(|start| start.saturating_add(limit).saturating_sub(at));
            let (begins_span, take) = match room.and_then(fits) {
                Some(take) => (false, take),
                // A new span: the whole limit is free, and if that is too little one atom goes anyway.
                None => (true, fits(limit).unwrap_or(step.min(rest))),
            };
            if begins_span {
                open = Some(at);
            }
            let bytes = if take == rest { end - at } else { take * row_bytes };
            sink(Part { tensor: number, rows: row..row + take, at, bytes, begins_span });
            row += take;
            if row >= tensor.rows {
                break;
            }
        }
    }
}

/// How many of the `rest` rows at `at..end` go into `room` bytes: all of them if they fit with the padding
/// after them, else whole atoms; `None` if not even one atom does.
fn rows_that_fit(at: u64, end: u64, rest: u64, room: u64, atom: Atom) -> Option<u64> {
    if at == end || end.checked_next_multiple_of(TENSOR_ALIGNMENT).is_some_and(|padded| padded - at <= room) {
        return Some(rest);
    }
    match atom {
        Atom::Whole => None,
        Atom::Rows { count, row_bytes } => {
            // The last rows carry their padding, so not all of them may go by this way.
            let atoms = (room / (row_bytes * count)).min((rest - 1) / count);
            (atoms > 0).then_some(atoms * count)
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(tensors: &[Piece], limit: u64) -> Vec<Vec<Part>> {
        let end = tensors.last().map_or(0, |tensor| tensor.at + tensor.bytes);
        let mut spans: Vec<Vec<Part>> = Vec::new();
        cut_unit(tensors, end, limit, |part| {
            if part.begins_span {
                spans.push(Vec::new());
            }
            spans.last_mut().unwrap().push(part);
        });
        spans
    }

    #[test]
    fn a_unit_that_fits_is_one_span() {
        let tensors = [Piece { at: 0, bytes: 1000, rows: 10 }, Piece { at: 1024, bytes: 10, rows: 10 }];
        let spans = spans(&tensors, 1034);
        assert_eq!(spans.len(), 1);
        assert_eq!(spans[0].len(), 2);
        assert_eq!((spans[0][1].at, spans[0][1].rows.clone()), (1024, 0..10));
    }

    #[test]
    fn pieces_are_about_equal_and_small_tensors_ride_along() {
        let weight = Piece { at: 0, bytes: 100 << 20, rows: 10_240 };
        let bias = Piece { at: 100 << 20, bytes: 20_480, rows: 10_240 };
        let spans = spans(&[weight, bias], 30 << 20);
        assert_eq!(spans.len(), 4);
        for span in &spans {
            let bytes: u64 = span.iter().map(|part| part.bytes).sum();
            assert!((24 << 20..=26 << 20).contains(&bytes), "{bytes}");
            assert_eq!(span[0].at % TENSOR_ALIGNMENT, 0);
        }
        let last = spans.last().unwrap();
        assert_eq!(last.last().unwrap().rows, 0..10_240, "the bias is whole");
        assert_eq!(last.len(), 2, "and not alone");
    }

    #[test]
    fn a_row_larger_than_the_limit_is_a_span_of_its_own() {
        let spans = spans(&[Piece { at: 0, bytes: 5000, rows: 5 }], 100);
        assert_eq!(spans.len(), 5);
        assert!(spans.iter().all(|span| span.len() == 1 && span[0].bytes == 1000));
    }

    #[test]
    fn rows_of_part_bytes_are_never_cut() {
        let spans = spans(&[Piece { at: 0, bytes: 1001, rows: 2 }], 100);
        assert_eq!(spans.len(), 1);
        assert_eq!(spans[0][0].rows, 0..2);
    }

    #[test]
    fn tensors_without_bytes_ride_whole() {
        let tensors = [
            Piece { at: 0, bytes: 0, rows: 0 },
            Piece { at: 0, bytes: 4096, rows: 4 },
            Piece { at: 4096, bytes: 0, rows: 7 },
        ];
        let spans = spans(&tensors, 1024);
        let rows: Vec<_> = spans.iter().flatten().map(|part| (part.tensor, part.rows.clone())).collect();
        assert_eq!(rows.first(), Some(&(0, 0..0)));
        assert_eq!(rows.last(), Some(&(2, 0..7)));
        assert!(spans.len() >= 4);
    }
}
