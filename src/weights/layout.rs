//! Where every tensor lies in a model's own address space, and what lies in each page of it.
//!
//! The address space begins at 0 and is divided into pages of one size. Units follow one another in file
//! order, each tensor on [`TENSOR_ALIGNMENT`], so that units share pages where they meet and nothing is
//! lost between them: beginning large units on a page border costs FLUX.1-dev 2 % of its bytes, which on a
//! card that nearly holds it is half of what must be streamed. What a fault pins is a [`Span`]: a unit, or
//! a run of rows of one that is too large to be taken at once.
//!
//! Pure: built once from an index, immutable, no lock. What lies at an address is found in sorted lists of
//! spans and tensors; a landmark for every 32 pages says where to look, so that a lookup costs the same in a
//! list of any length and touches few cache lines. That is a quarter of a byte a page, and all that is kept
//! per page.
//! May import the modules beside it.

#![deny(unsafe_code)]

use std::ops::Range;

use super::cut::{Piece, cut_unit};
use super::dtype::Dtype;
use super::error::WeightsError;
use super::index::{TensorId, TensorIndex, TensorInfo, UnitId};
use super::landmarks::Landmarks;

/// Every tensor begins at a multiple of this many bytes: what a vectorised kernel and a copy engine want.
pub const TENSOR_ALIGNMENT: u64 = 256;

/// How to lay a model out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayoutOptions {
    /// The size of a page in bytes: a multiple of [`TENSOR_ALIGNMENT`], and of the device's granularity.
    pub page_bytes: u64,
    /// A unit of at most this many bytes is one span, whatever `piece_bytes` says.
    pub whole_bytes: u64,
    /// A unit of more bytes is cut into spans of at most this many, where a row permits.
    pub piece_bytes: u64,
    /// The type that floating-point tensors have on the device; `None` keeps the file's.
    pub compute: Option<Dtype>,
}

impl LayoutOptions {
    /// Pages of this size, no unit cut, the file's types.
    pub fn new(page_bytes: u64) -> Self {
        Self { page_bytes, whole_bytes: 0, piece_bytes: u64::MAX, compute: None }
    }
}

/// A unit's place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitLayout {
    /// Its model addresses, from its first tensor's first byte to its last one's last; may be empty.
    pub bytes: Range<u64>,
    /// Its spans, one or more: places in [`PageLayout::spans`].
    pub spans: Range<u32>,
}

/// What a fault pins at once: a unit, or a run of rows of a large one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// The unit that it is of.
    pub unit: UnitId,
    /// Its model addresses. The spans of a unit follow one another without a gap; padding before the
    /// next span's first tensor belongs to the span before it. Empty if all its tensors are.
    pub bytes: Range<u64>,
    /// The pages that those addresses touch; empty if there are none.
    pub pages: Range<u32>,
    /// Its runs of rows among those of all units that are cut; empty for a whole unit. See
    /// [`PageLayout::parts_of`].
    parts: Range<u32>,
}

/// Some rows of a tensor in a span; all of them unless the span is a piece of a unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorPart {
    /// The tensor.
    pub tensor: TensorId,
    /// Rows of its first dimension; `0..1` for a tensor without dimensions.
    pub rows: Range<u64>,
    /// Its first byte's model address.
    pub at: u64,
    /// Its length on the device in bytes.
    pub bytes: u64,
}

/// A tensor's place on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorPlace {
    /// Its first byte's model address, a multiple of [`TENSOR_ALIGNMENT`].
    pub at: u64,
    /// Its length on the device in bytes.
    pub bytes: u64,
    /// Its type there.
    pub dtype: Dtype,
}

/// A run of one tensor's elements that follow one another in the file and on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The first byte's model address.
    pub at: u64,
    /// The length on the device in bytes.
    pub device_bytes: u64,
    /// Which of [`TensorIndex::files`].
    pub file: u32,
    /// The first byte in that file.
    pub file_offset: u64,
    /// The length in the file in bytes.
    pub file_bytes: u64,
    /// The tensor.
    pub tensor: TensorId,
    /// The elements' type in the file.
    pub from: Dtype,
    /// Their type on the device.
    pub to: Dtype,
}

/// A model laid out in pages.
#[derive(Clone, Debug)]
pub struct PageLayout {
    page_bytes: u64,
    page_count: u32,
    total_bytes: u64,
    units: Vec<UnitLayout>,
    spans: Vec<Span>,
    /// Of units that are cut only: what a whole one consists of is known without.
    parts: Vec<TensorPart>,
    /// In address order.
    placed: Vec<Placed>,
    /// Each tensor's place in `placed`; empty where that is the tensor's own number, as in most files.
    place_of: Vec<u32>,
    /// Where to look in `spans` and in `placed`.
    spans_near: Landmarks,
    placed_near: Landmarks,
}

/// A tensor in the address space, with all that an extent needs to know.
#[derive(Clone, Copy, Debug)]
struct Placed {
    at: u64,
    bytes: u64,
    /// The tensors' bytes, without padding, at all lower addresses.
    content_before: u64,
    file_offset: u64,
    file: u32,
    tensor: TensorId,
    from: Dtype,
    to: Dtype,
}

impl PageLayout {
    /// Lays the tensors of `index` out.
    ///
    /// # Errors
    /// [`WeightsError::Layout`] for a page size that is 0 or no multiple of [`TENSOR_ALIGNMENT`], a piece
    /// size of 0, a compute type that is not floating point, and a model of more than 2^32 pages or 2^64
    /// bytes.
    pub fn new(index: &TensorIndex, options: &LayoutOptions) -> Result<Self, WeightsError> {
        check_options(options)?;
        let mut layout = Self {
            page_bytes: options.page_bytes,
            page_count: 0,
            total_bytes: 0,
            units: Vec::with_capacity(index.units().len()),
            spans: Vec::with_capacity(index.units().len()),
            parts: Vec::new(),
            placed: Vec::with_capacity(index.tensors().len()),
            place_of: vec![0; index.tensors().len()],
            spans_near: Landmarks::default(),
            placed_near: Landmarks::default(),
        };
        let mut end = 0;
        for (id, unit) in (0..).map(UnitId).zip(index.units()) {
            end = layout.add_unit(index, id, &unit.tensors, end, options)?;
        }
        let pages = end.div_ceil(options.page_bytes);
        layout.page_count = u32::try_from(pages).map_err(|_| {
            refuse(format!(
                "{pages} pages of {} bytes are more than 2^32; take larger pages",
                options.page_bytes
            ))
        })?;
        for span in &mut layout.spans {
            span.pages = pages_of(&span.bytes, options.page_bytes);
        }
        if (0..).zip(&layout.place_of).all(|(number, place)| number == *place) {
            layout.place_of = Vec::new();
        }
        // The lists keep no spare room: they are most of what a table takes that is not of its pages.
        layout.spans.shrink_to_fit();
        layout.parts.shrink_to_fit();
        let ends = |ends: &mut dyn Iterator<Item = u64>| Landmarks::new(ends, options.page_bytes, end);
        layout.spans_near = ends(&mut layout.spans.iter().map(|span| span.bytes.end));
        layout.placed_near = ends(&mut layout.placed.iter().map(|placed| placed.at + placed.bytes));
        Ok(layout)
    }

    /// Places one unit after `end` and returns the new end.
    fn add_unit(
        &mut self,
        index: &TensorIndex,
        unit: UnitId,
        tensors: &[TensorId],
        end: u64,
        options: &LayoutOptions,
    ) -> Result<u64, WeightsError> {
        let too_large = || refuse("the model exceeds 2^64 bytes".to_owned());
        let mut pieces = Vec::with_capacity(tensors.len());
        let mut unit_bytes = 0_u64;
        for &id in tensors {
            let info = index.tensor_info(id);
            let bytes = device_bytes(info, options.compute).ok_or_else(too_large)?;
            let at = unit_bytes.checked_next_multiple_of(TENSOR_ALIGNMENT).ok_or_else(too_large)?;
            unit_bytes = at.checked_add(bytes).ok_or_else(too_large)?;
            pieces.push(Piece { at, bytes, rows: info.shape.first().copied().unwrap_or(1) });
        }
        let start = end.checked_next_multiple_of(TENSOR_ALIGNMENT).ok_or_else(too_large)?;
        let unit_end = start.checked_add(unit_bytes).ok_or_else(too_large)?;

        for (&tensor, piece) in tensors.iter().zip(&pieces) {
            let info = index.tensor_info(tensor);
            self.place_of[tensor.index()] = number(self.placed.len())?;
            self.placed.push(Placed {
                at: start + piece.at,
                bytes: piece.bytes,
                content_before: self.total_bytes,
                file_offset: info.offset,
                file: info.file,
                tensor,
                from: info.dtype,
                to: device_dtype(info.dtype, options.compute),
            });
            self.total_bytes += piece.bytes;
        }

        let (first_span, first_part) = (self.spans.len(), self.parts.len());
        let (spans, parts) = (&mut self.spans, &mut self.parts);
        let limit = if unit_bytes <= options.whole_bytes { u64::MAX } else { options.piece_bytes };
        cut_unit(&pieces, unit_bytes, limit, |part| {
            if part.begins_span {
                // Its end and its part numbers are set below, when all are known to fit.
                let at = start + part.at;
                spans.push(Span { unit, bytes: at..at, pages: 0..0, parts: 0..0 });
            }
            if let Some(span) = spans.last_mut() {
                span.parts.end += 1;
            }
            parts.push(TensorPart {
                tensor: tensors[part.tensor],
                rows: part.rows,
                at: start + part.at,
                bytes: part.bytes,
            });
        });
        number(self.parts.len())?;
        let spans = number(first_span)?..number(self.spans.len())?;
        let mut next_part = number(self.parts.len())?;
        let mut next_start = unit_end;
        for span in self.spans[first_span..].iter_mut().rev() {
            let count = span.parts.end;
            span.parts = next_part - count..next_part;
            span.bytes.end = next_start;
            next_part -= count;
            next_start = span.bytes.start;
        }
        if let [whole] = &mut self.spans[first_span..] {
            whole.parts = 0..0;
            self.parts.truncate(first_part);
        }
        self.units.push(UnitLayout { bytes: start..unit_end, spans });
        Ok(unit_end)
    }

    /// The size of a page in bytes.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// How many pages the model's address space has.
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// The tensors' bytes on the device, without padding.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The size of the model's address space in bytes: all pages, with padding.
    pub fn address_bytes(&self) -> u64 {
        u64::from(self.page_count) * self.page_bytes
    }

    /// The units' places, by [`UnitId`] and in address order.
    #[inline]
    pub fn units(&self) -> &[UnitLayout] {
        &self.units
    }

    /// All spans, in address order.
    #[inline]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The tensors of a span, or their rows in it, in address order. `index` is the one that was laid out.
    ///
    /// # Panics
    /// If `span` is no place in [`Self::spans`], or `index` another one.
    pub fn parts_of<'a>(
        &'a self,
        index: &'a TensorIndex,
        span: u32,
    ) -> impl Iterator<Item = TensorPart> + 'a {
        let span = &self.spans[span as usize];
        let parts = &self.parts[span.parts.start as usize..span.parts.end as usize];
        let whole = if parts.is_empty() { &index.unit_info(span.unit).tensors[..] } else { &[] };
        let all_of = |&tensor: &TensorId| {
            let place = self.tensor_at(tensor);
            let rows = 0..index.tensor_info(tensor).shape.first().copied().unwrap_or(1);
            TensorPart { tensor, rows, at: place.at, bytes: place.bytes }
        };
        parts.iter().cloned().chain(whole.iter().map(all_of))
    }

    /// A tensor's place.
    ///
    /// # Panics
    /// If `tensor` is of another index that has more tensors.
    pub fn tensor_at(&self, tensor: TensorId) -> TensorPlace {
        let place = self.place_of.get(tensor.index()).map_or(tensor.index(), |place| *place as usize);
        let placed = &self.placed[place];
        TensorPlace { at: placed.at, bytes: placed.bytes, dtype: placed.to }
    }

    /// The model addresses of a page; the last page is whole too.
    pub fn page_range(&self, page: u32) -> Range<u64> {
        let start = u64::from(page).saturating_mul(self.page_bytes);
        start..start.saturating_add(self.page_bytes)
    }

    /// The spans that touch a page: places in [`PageLayout::spans`].
    ///
    /// A span without bytes may lie among them; its own [`Span::pages`] is empty.
    pub fn spans_of_page(&self, page: u32) -> Range<u32> {
        let bytes = self.page_range(page);
        let first = self.spans_near.first(&self.spans, bytes.start, |span| span.bytes.end);
        let touching = self.spans[first..].iter().take_while(|span| span.bytes.start < bytes.end).count();
        // Both fit: the number of spans was checked when they were made.
        let place = |place: usize| u32::try_from(place).unwrap_or(u32::MAX);
        place(first)..place(first + touching)
    }

    /// The tensors' bytes in a page, without padding.
    pub fn content_bytes_of_page(&self, page: u32) -> u64 {
        self.content_bytes(self.page_range(page))
    }

    /// The tensors' bytes in a run of model addresses, without padding.
    pub fn content_bytes(&self, range: Range<u64>) -> u64 {
        self.content_before(range.end).saturating_sub(self.content_before(range.start))
    }

    fn content_before(&self, at: u64) -> u64 {
        let next = self.placed_near.first(&self.placed, at, |placed| placed.at + placed.bytes);
        match self.placed.get(next) {
            Some(placed) => placed.content_before + at.saturating_sub(placed.at),
            None => self.total_bytes,
        }
    }

    /// The pieces of tensors that lie in a run of model addresses, in address order.
    ///
    /// They are cut at the run's borders. Page and span borders never fall inside an element; of a run
    /// whose borders do, an element belongs to the run that its first byte lies in, so that the extents
    /// of adjacent runs still cover every element once. Types of 4 and 6 bits are taken as bytes.
    pub fn extents(&self, range: Range<u64>) -> Extents<'_> {
        let first = self.placed_near.first(&self.placed, range.start, |placed| placed.at + placed.bytes);
        Extents { rest: self.placed.get(first..).unwrap_or_default(), range }
    }
}

/// What [`PageLayout::extents`] gives.
#[derive(Clone, Debug)]
pub struct Extents<'a> {
    rest: &'a [Placed],
    range: Range<u64>,
}

impl Iterator for Extents<'_> {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        while let Some((placed, rest)) = self.rest.split_first() {
            if placed.at >= self.range.end {
                self.rest = &[];
                return None;
            }
            self.rest = rest;
            if let Some(extent) = placed.cut(&self.range) {
                return Some(extent);
            }
        }
        None
    }
}

impl Placed {
    /// The part of the tensor whose elements begin in `range`, if there is any.
    fn cut(&self, range: &Range<u64>) -> Option<Extent> {
        let to = self.to.byte_size().unwrap_or(1);
        let from = self.from.byte_size().unwrap_or(1);
        let element = |at: u64| at.saturating_sub(self.at).min(self.bytes).div_ceil(to);
        let elements = element(range.start)..element(range.end);
        if elements.is_empty() {
            return None;
        }
        let count = elements.end - elements.start;
        Some(Extent {
            at: self.at + elements.start * to,
            device_bytes: count * to,
            file: self.file,
            file_offset: self.file_offset + elements.start * from,
            file_bytes: count * from,
            tensor: self.tensor,
            from: self.from,
            to: self.to,
        })
    }
}

/// The type that a tensor of type `from` has on the device.
fn device_dtype(from: Dtype, compute: Option<Dtype>) -> Dtype {
    compute.filter(|_| from.is_castable()).unwrap_or(from)
}

/// A tensor's length on the device; `None` beyond 64 bits.
fn device_bytes(info: &TensorInfo, compute: Option<Dtype>) -> Option<u64> {
    let to = device_dtype(info.dtype, compute);
    match (info.dtype.byte_size(), to.byte_size()) {
        (Some(from), Some(to)) => (info.bytes / from).checked_mul(to),
        _ => Some(info.bytes),
    }
}

fn pages_of(bytes: &Range<u64>, page_bytes: u64) -> Range<u32> {
    // Both fit once the number of pages does, which was checked before.
    let page = |page: u64| u32::try_from(page).unwrap_or(u32::MAX);
    let first = page(bytes.start / page_bytes);
    if bytes.is_empty() { first..first } else { first..page(bytes.end.div_ceil(page_bytes)) }
}

fn check_options(options: &LayoutOptions) -> Result<(), WeightsError> {
    let LayoutOptions { page_bytes, piece_bytes, compute, whole_bytes: _ } = *options;
    if page_bytes == 0 || page_bytes % TENSOR_ALIGNMENT != 0 {
        return Err(refuse(format!(
            "a page of {page_bytes} bytes is no multiple of {TENSOR_ALIGNMENT} bytes"
        )));
    }
    if piece_bytes == 0 {
        return Err(refuse("pieces of 0 bytes hold nothing".to_owned()));
    }
    match compute {
        Some(dtype) if !matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) => {
            Err(refuse(format!("the compute type {dtype} is not one of F32, F16 and BF16")))
        }
        _ => Ok(()),
    }
}

fn number(count: usize) -> Result<u32, WeightsError> {
    u32::try_from(count)
        .map_err(|_| refuse("the model has more than 2^32 pieces; cut it less finely".to_owned()))
}

fn refuse(why: String) -> WeightsError {
    WeightsError::Layout { why }
}
