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
//! per page. An entry of the lists says where something ends, 16 bytes for a span and for a tensor: where it
//! begins follows from the one before it, and what the index knows is asked there.
//! May import the modules beside it.

#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::cut::{Part, Piece, cut_unit};
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
    index: Arc<TensorIndex>,
    compute: Option<Dtype>,
    page_bytes: u64,
    page_count: u32,
    total_bytes: u64,
    /// Each unit's first span, and behind the last one the number of spans.
    first_spans: Vec<u32>,
    spans: Vec<SpanEnd>,
    /// Of units that are cut only, by span: what a whole one consists of is known without.
    parts: Vec<CutPart>,
    /// In address order.
    placed: Vec<Placed>,
    /// Each tensor's place in `placed`; empty where that is the tensor's own number, as in most files.
    place_of: Vec<u32>,
    /// Where to look in `spans` and in `placed`.
    spans_near: Landmarks,
    placed_near: Landmarks,
}

/// A span, by where it ends: it begins there where the one before it ends, or as [`aligned`] if that is of
/// another unit.
#[derive(Clone, Copy, Debug)]
struct SpanEnd {
    end: u64,
    /// The page border at or behind `end`.
    pages_end: u32,
    unit: UnitId,
}

/// Some rows of a tensor of a unit that is cut.
#[derive(Clone, Debug)]
struct CutPart {
    span: u32,
    tensor: TensorId,
    rows: Range<u64>,
    at: u64,
    bytes: u64,
}

/// A tensor, by where it ends: it begins where the one before it ends, as [`aligned`].
#[derive(Clone, Copy, Debug)]
struct Placed {
    end: u64,
    /// Bytes of padding at all addresses below its first.
    padding: u32,
    tensor: TensorId,
}

/// A tensor in the address space, with all that an extent needs to know.
struct Placing<'a> {
    id: TensorId,
    bytes: Range<u64>,
    info: &'a TensorInfo,
    to: Dtype,
}

impl PageLayout {
    /// Lays the tensors of `index` out.
    ///
    /// # Errors
    /// [`WeightsError::Layout`] for a page size that is 0 or no multiple of [`TENSOR_ALIGNMENT`], a piece
    /// size of 0, a compute type that is not floating point, and a model of more than 2^32 pages, 2^64
    /// bytes, or 2^32 bytes of padding.
    pub fn new(index: &Arc<TensorIndex>, options: &LayoutOptions) -> Result<Self, WeightsError> {
        check_options(options)?;
        let mut layout = Self {
            index: Arc::clone(index),
            compute: options.compute,
            page_bytes: options.page_bytes,
            page_count: 0,
            total_bytes: 0,
            first_spans: Vec::with_capacity(index.units().len() + 1),
            spans: Vec::with_capacity(index.units().len()),
            parts: Vec::new(),
            placed: Vec::with_capacity(index.tensors().len()),
            place_of: vec![0; index.tensors().len()],
            spans_near: Landmarks::default(),
            placed_near: Landmarks::default(),
        };
        let mut end = 0;
        for (id, unit) in (0..).map(UnitId).zip(index.units()) {
            layout.first_spans.push(number(layout.spans.len())?);
            end = layout.add_unit(index, id, &unit.tensors, end, options)?;
        }
        layout.first_spans.push(number(layout.spans.len())?);
        let pages = end.div_ceil(options.page_bytes);
        layout.page_count = u32::try_from(pages).map_err(|_| {
            refuse(format!(
                "{pages} pages of {} bytes are more than 2^32; take larger pages",
                options.page_bytes
            ))
        })?;
        for span in &mut layout.spans {
            // It fits, since the number of pages does.
            span.pages_end = u32::try_from(span.end.div_ceil(options.page_bytes)).unwrap_or(u32::MAX);
        }
        if (0..).zip(&layout.place_of).all(|(number, place)| number == *place) {
            layout.place_of = Vec::new();
        }
        // The lists keep no spare room: they are most of what a table takes that is not of its pages.
        layout.spans.shrink_to_fit();
        layout.parts.shrink_to_fit();
        let ends = |ends: &mut dyn Iterator<Item = u64>| Landmarks::new(ends, options.page_bytes, end);
        layout.spans_near = ends(&mut layout.spans.iter().map(|span| span.end));
        layout.placed_near = ends(&mut layout.placed.iter().map(|placed| placed.end));
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
        let start = end.checked_next_multiple_of(TENSOR_ALIGNMENT).ok_or_else(too_large)?;
        let mut pieces = Vec::with_capacity(tensors.len());
        let mut unit_end = start;
        for &tensor in tensors {
            let info = index.tensor_info(tensor);
            let bytes = device_bytes(info, options.compute).ok_or_else(too_large)?;
            let at = unit_end.checked_next_multiple_of(TENSOR_ALIGNMENT).ok_or_else(too_large)?;
            unit_end = at.checked_add(bytes).ok_or_else(too_large)?;
            pieces.push(Piece { at: at - start, bytes, rows: info.shape.first().copied().unwrap_or(1) });
            self.place_of[tensor.index()] = number(self.placed.len())?;
            let padding = u32::try_from(at - self.total_bytes).map_err(|_| {
                refuse("more than 2^32 bytes lie between tensors; the model has too many".to_owned())
            })?;
            self.placed.push(Placed { end: unit_end, padding, tensor });
            self.total_bytes += bytes;
        }

        let (first_span, first_part) = (self.spans.len(), self.parts.len());
        let (spans, parts) = (&mut self.spans, &mut self.parts);
        let unit_bytes = unit_end - start;
        let limit = if unit_bytes <= options.whole_bytes { u64::MAX } else { options.piece_bytes };
        cut_unit(&pieces, unit_bytes, limit, |part| {
            let at = start + part.at;
            if part.begins_span {
                if let Some(before) = spans[first_span..].last_mut() {
                    before.end = at;
                }
                // Its pages are set when all are known to fit.
                spans.push(SpanEnd { end: unit_end, pages_end: 0, unit });
            }
            // Whether it fits is seen when the unit behind it is placed.
            let span = u32::try_from(spans.len().saturating_sub(1)).unwrap_or(u32::MAX);
            let Part { tensor, rows, bytes, .. } = part;
            parts.push(CutPart { span, tensor: tensors[tensor], rows, at, bytes });
        });
        if self.spans.len() - first_span == 1 {
            self.parts.truncate(first_part);
        }
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

    /// The index that was laid out.
    pub fn index(&self) -> &Arc<TensorIndex> {
        &self.index
    }

    /// The units' places, by [`UnitId`] and in address order.
    pub fn units(&self) -> impl ExactSizeIterator<Item = UnitLayout> + Clone + '_ {
        self.first_spans.windows(2).map(|spans| self.placed_unit(spans[0]..spans[1]))
    }

    /// A unit's place.
    ///
    /// # Panics
    /// If `unit` is of another index that has more units.
    pub fn unit(&self, unit: UnitId) -> UnitLayout {
        self.placed_unit(self.first_spans[unit.index()]..self.first_spans[unit.index() + 1])
    }

    fn placed_unit(&self, spans: Range<u32>) -> UnitLayout {
        let start = self.start_of_span(spans.start as usize);
        let last = spans.clone().next_back();
        UnitLayout { bytes: start..last.map_or(start, |last| self.spans[last as usize].end), spans }
    }

    /// The spans of a unit; `None` if there is no such unit.
    #[inline]
    pub fn spans_of_unit(&self, unit: UnitId) -> Option<Range<u32>> {
        match self.first_spans.get(unit.index()..)? {
            [first, end, ..] => Some(*first..*end),
            _ => None,
        }
    }

    /// The last unit that begins at or before a model address; `None` if there are no units.
    pub fn unit_at(&self, address: u64) -> Option<UnitId> {
        let spans = self.spans_in(address..address.saturating_add(1));
        // Behind every span's end, or in the padding before the next one.
        let last = spans.end.checked_sub(1)?;
        Some(self.spans[last as usize].unit)
    }

    /// How many spans there are.
    #[inline]
    pub fn span_count(&self) -> u32 {
        // It fits: that was checked when they were made.
        u32::try_from(self.spans.len()).unwrap_or(u32::MAX)
    }

    /// All spans, in address order.
    pub fn spans(&self) -> impl ExactSizeIterator<Item = Span> + DoubleEndedIterator + Clone + '_ {
        (0..self.spans.len()).map(|span| self.placed_span(span))
    }

    /// A span, by its place in [`Self::spans`].
    ///
    /// # Panics
    /// If there is no such span.
    #[inline]
    pub fn span(&self, span: u32) -> Span {
        self.placed_span(span as usize)
    }

    fn placed_span(&self, place: usize) -> Span {
        let SpanEnd { end, pages_end, unit } = self.spans[place];
        let start = self.start_of_span(place);
        // It begins in the page that the one before it ends in, or on the border behind that page.
        let border = place.checked_sub(1).map_or(0, |before| self.spans[before].pages_end);
        let first = border - u32::from(u64::from(border) * self.page_bytes > start);
        let pages = first..if start < end { pages_end } else { first };
        Span { unit, bytes: start..end, pages }
    }

    #[inline]
    fn start_of_span(&self, place: usize) -> u64 {
        let Some(before) = place.checked_sub(1).map(|before| &self.spans[before]) else { return 0 };
        if before.unit == self.spans[place].unit { before.end } else { aligned(before.end) }
    }

    /// The tensors of a span, or their rows in it, in address order.
    ///
    /// # Panics
    /// If `span` is no place in [`Self::spans`].
    pub fn parts_of(&self, span: u32) -> impl Iterator<Item = TensorPart> + '_ {
        let first = self.parts.partition_point(|part| part.span < span);
        let parts = self.parts[first..].iter().take_while(move |part| part.span == span);
        let is_whole = parts.clone().next().is_none();
        let unit = self.spans[span as usize].unit;
        let whole = if is_whole { &self.index.unit_info(unit).tensors[..] } else { &[] };
        let all_of = |&tensor: &TensorId| {
            let place = self.tensor_at(tensor);
            let rows = 0..self.index.tensor_info(tensor).shape.first().copied().unwrap_or(1);
            TensorPart { tensor, rows, at: place.at, bytes: place.bytes }
        };
        let cut = |part: &CutPart| {
            let CutPart { tensor, at, bytes, .. } = *part;
            TensorPart { tensor, rows: part.rows.clone(), at, bytes }
        };
        parts.map(cut).chain(whole.iter().map(all_of))
    }

    /// A tensor's place.
    ///
    /// # Panics
    /// If `tensor` is of another index that has more tensors.
    pub fn tensor_at(&self, tensor: TensorId) -> TensorPlace {
        let place = self.place_of.get(tensor.index()).map_or(tensor.index(), |place| *place as usize);
        let Placing { bytes, to, .. } = self.placing(place);
        TensorPlace { at: bytes.start, bytes: bytes.end - bytes.start, dtype: to }
    }

    fn placing(&self, place: usize) -> Placing<'_> {
        let Placed { end, tensor, .. } = self.placed[place];
        let info = self.index.tensor_info(tensor);
        let to = device_dtype(info.dtype, self.compute);
        Placing { id: tensor, bytes: self.start_of_placed(place)..end, info, to }
    }

    #[inline]
    fn start_of_placed(&self, place: usize) -> u64 {
        place.checked_sub(1).map_or(0, |before| aligned(self.placed[before].end))
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
        self.spans_in(self.page_range(page))
    }

    /// The spans that touch a run of model addresses, as [`Self::spans_of_page`]: none, but a place among them,
    /// where only padding does.
    pub fn spans_in(&self, range: Range<u64>) -> Range<u32> {
        let first = self.spans_near.first(&self.spans, range.start, |span| span.end);
        let mut end = first;
        while end < self.spans.len() && self.start_of_span(end) < range.end {
            end += 1;
        }
        // Both fit: the number of spans was checked when they were made.
        let place = |place: usize| u32::try_from(place).unwrap_or(u32::MAX);
        place(first)..place(end)
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
        let next = self.placed_near.first(&self.placed, at, |placed| placed.end);
        match self.placed.get(next) {
            Some(placed) => at.max(self.start_of_placed(next)) - u64::from(placed.padding),
            None => self.total_bytes,
        }
    }

    /// The pieces of tensors that lie in a run of model addresses, in address order.
    ///
    /// They are cut at the run's borders. Page and span borders never fall inside an element; of a run
    /// whose borders do, an element belongs to the run that its first byte lies in, so that the extents
    /// of adjacent runs still cover every element once. Types of 4 and 6 bits are taken as bytes.
    pub fn extents(&self, range: Range<u64>) -> Extents<'_> {
        let next = self.placed_near.first(&self.placed, range.start, |placed| placed.end);
        Extents { layout: self, next, range }
    }
}

/// What [`PageLayout::extents`] gives.
#[derive(Clone, Debug)]
pub struct Extents<'a> {
    layout: &'a PageLayout,
    /// A place in the layout's `placed`.
    next: usize,
    range: Range<u64>,
}

impl Iterator for Extents<'_> {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        let layout = self.layout;
        while self.next < layout.placed.len() && layout.start_of_placed(self.next) < self.range.end {
            let placing = layout.placing(self.next);
            self.next += 1;
            if let Some(extent) = placing.cut(&self.range) {
                return Some(extent);
            }
        }
        None
    }
}

impl Placing<'_> {
    /// The part of the tensor whose elements begin in `range`, if there is any.
    fn cut(&self, range: &Range<u64>) -> Option<Extent> {
        let (from_type, start) = (self.info.dtype, self.bytes.start);
        let to = self.to.byte_size().unwrap_or(1);
        let from = from_type.byte_size().unwrap_or(1);
        let element = |at: u64| (at.min(self.bytes.end).saturating_sub(start)).div_ceil(to);
        let elements = element(range.start)..element(range.end);
        if elements.is_empty() {
            return None;
        }
        let count = elements.end - elements.start;
        Some(Extent {
            at: start + elements.start * to,
            device_bytes: count * to,
            file: self.info.file,
            file_offset: self.info.offset + elements.start * from,
            file_bytes: count * from,
            tensor: self.id,
            from: from_type,
            to: self.to,
        })
    }
}

/// Where a tensor lies that comes behind `end`. It does not overflow: that was checked when it was placed.
fn aligned(end: u64) -> u64 {
    end.next_multiple_of(TENSOR_ALIGNMENT)
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
