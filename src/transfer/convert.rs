//! Which type crosses the link, and casts on the way to it.
//!
//! What crosses is the file's type where that is smaller: it lands beside and is cast into place by a
//! kernel. Otherwise the reader casts to the type that the card wants. Both give the same bits.

#![deny(unsafe_code)]

use std::ops::Range;

use crate::device::{FloatType, cast};
use crate::units::try_filled;
use crate::weights::{Dtype, Extent, PageLayout, TensorIndex, WeightsError};

/// The kernels' name for a type, if they know it.
pub fn float_type(dtype: Dtype) -> Option<FloatType> {
    match dtype {
        Dtype::F32 => Some(FloatType::F32),
        Dtype::F16 => Some(FloatType::F16),
        Dtype::BF16 => Some(FloatType::Bf16),
        Dtype::F8_E4M3 => Some(FloatType::F8E4m3),
        Dtype::F8_E5M2 => Some(FloatType::F8E5m2),
        _ => None,
    }
}

/// Whether an extent crosses the link in the file's type and is cast on the card.
pub fn is_cast_on_card(extent: &Extent) -> bool {
    extent.from != extent.to && extent.file_bytes < extent.device_bytes
}

/// The extents of a run of model addresses, with those that are cast on the card cut at multiples of `cut`.
///
/// A narrow extent lies packed from where it begins, so whoever reads a run and whoever copies a part of it
/// must cut it alike: at pages, where parts of a run are pages.
pub fn cut_extents(layout: &PageLayout, run: Range<u64>, cut: u64) -> impl Iterator<Item = Extent> + '_ {
    layout.extents(run).flat_map(move |extent| {
        let cut = if is_cast_on_card(&extent) { cut.max(1) } else { u64::MAX };
        let (start, end) = (extent.at, extent.at + extent.device_bytes);
        (start / cut..end.div_ceil(cut)).flat_map(move |part| {
            let from = start.max(part.saturating_mul(cut));
            layout.extents(from..end.min((part + 1).saturating_mul(cut)))
        })
    })
}

/// Reads `extents` from their files into `buffer`, at whose first byte model address `base` lies, each in
/// the type that crosses the link. Extents that follow one another in the file and in the buffer are read
/// at once. Answers the bytes read.
///
/// # Errors
/// As [`crate::weights::WeightFile::read_exact_at`], naming file, tensor and offset.
pub fn read_extents(
    index: &TensorIndex,
    extents: impl Iterator<Item = Extent>,
    base: u64,
    buffer: &mut [u8],
) -> Result<u64, WeightsError> {
    let mut read = 0;
    let mut narrow: Vec<u8> = Vec::new();
    let mut joined = Joined::default();
    for extent in extents {
        if extent.from == extent.to || is_cast_on_card(&extent) {
            if !joined.takes(&extent) {
                joined.read(index, base, buffer)?;
            }
            joined.add(extent);
        } else {
            let Some(file) = index.files().get(extent.file as usize) else { continue };
            let name = &index.tensor_info(extent.tensor).name;
            let in_file = usize::try_from(extent.file_bytes).unwrap_or(usize::MAX);
            if narrow.len() < in_file {
                let refuse = |source| WeightsError::NoMemory { file: file.path().to_owned(), source };
                narrow = try_filled("a cast", in_file, 0).map_err(refuse)?;
            }
            let narrow = &mut narrow[..in_file];
            file.read_exact_at(extent.file_offset, narrow, name)?;
            let Some(place) = part(buffer, extent.at - base, extent.device_bytes) else { continue };
            cast_bytes(extent.from, narrow, extent.to, place)
                .map_err(|why| WeightsError::Layout { why: format!("tensor `{name}`: {why}") })?;
        }
        read += extent.file_bytes;
    }
    joined.read(index, base, buffer)?;
    Ok(read)
}

/// Extents that are read at once: each begins in file and buffer where the one before it ends.
#[derive(Default)]
struct Joined {
    extents: [Option<Extent>; Joined::MOST],
    len: usize,
}

impl Joined {
    const MOST: usize = 32;

    fn takes(&self, extent: &Extent) -> bool {
        let Some(last) = self.len.checked_sub(1).and_then(|last| self.extents[last]) else { return true };
        self.len < Self::MOST
            && last.file == extent.file
            && last.file_offset + last.file_bytes == extent.file_offset
            && last.at + last.file_bytes == extent.at
    }

    fn add(&mut self, extent: Extent) {
        self.extents[self.len] = Some(extent);
        self.len += 1;
    }

    /// Reads what was added, and begins anew.
    fn read(&mut self, index: &TensorIndex, base: u64, buffer: &mut [u8]) -> Result<(), WeightsError> {
        let extents = &self.extents[..std::mem::take(&mut self.len)];
        let (Some(Some(first)), Some(Some(last))) = (extents.first(), extents.last()) else { return Ok(()) };
        let Some(file) = index.files().get(first.file as usize) else { return Ok(()) };
        let bytes = last.at + last.file_bytes - first.at;
        let Some(place) = part(buffer, first.at - base, bytes) else { return Ok(()) };
        let whole = file.read_exact_at(first.file_offset, place, &index.tensor_info(first.tensor).name);
        if whole.is_ok() || extents.len() == 1 {
            return whole;
        }
        // One after the other, so that the error names the tensor that it is about.
        for extent in extents.iter().flatten() {
            let Some(place) = part(buffer, extent.at - base, extent.file_bytes) else { continue };
            file.read_exact_at(extent.file_offset, place, &index.tensor_info(extent.tensor).name)?;
        }
        Ok(())
    }
}

fn part(buffer: &mut [u8], start: u64, bytes: u64) -> Option<&mut [u8]> {
    let start = usize::try_from(start).ok()?;
    buffer.get_mut(start..start.checked_add(usize::try_from(bytes).ok()?)?)
}

/// Casts host bytes from one type to another.
///
/// # Errors
/// Types that no kernel casts, as text.
pub fn cast_bytes(from: Dtype, bytes: &[u8], to: Dtype, into: &mut [u8]) -> Result<(), String> {
    match (float_type(from), float_type(to)) {
        (Some(from), Some(to)) => cast(from, bytes, to, into),
        _ => Err(format!("nothing casts {from} to {to}")),
    }
}
