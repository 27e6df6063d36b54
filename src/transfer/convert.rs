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
/// the type that crosses the link. Answers the bytes read.
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
    for extent in extents {
        let name = &index.tensor_info(extent.tensor).name;
        let Some(file) = index.files().get(extent.file as usize) else { continue };
        let start = usize::try_from(extent.at - base).unwrap_or(usize::MAX);
        let in_file = usize::try_from(extent.file_bytes).unwrap_or(usize::MAX);
        if extent.from == extent.to || is_cast_on_card(&extent) {
            let Some(place) = buffer.get_mut(start..start.saturating_add(in_file)) else { continue };
            file.read_exact_at(extent.file_offset, place, name)?;
        } else {
            if narrow.len() < in_file {
                let refuse = |source| WeightsError::NoMemory { file: file.path().to_owned(), source };
                narrow = try_filled("a cast", in_file, 0).map_err(refuse)?;
            }
            let narrow = &mut narrow[..in_file];
            file.read_exact_at(extent.file_offset, narrow, name)?;
            let on_card = usize::try_from(extent.device_bytes).unwrap_or(usize::MAX);
            let Some(place) = buffer.get_mut(start..start.saturating_add(on_card)) else { continue };
            cast_bytes(extent.from, narrow, extent.to, place)
                .map_err(|why| WeightsError::Layout { why: format!("tensor `{name}`: {why}") })?;
        }
        read += extent.file_bytes;
    }
    Ok(read)
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
