//! Low-rank patches of a model's tensors, as the pager applies them.
//!
//! A [`PatchSet`] is what one clone of a model differs in: for some tensors, pairs of factors. It is
//! applied when bytes arrive on the card, right after they were copied (and cast), so a span that is
//! resident or in the ring always holds patched bytes. A span's version is the number of the set that
//! touches it, or 0 where none does: two sets that leave a span alone share its bytes.
//!
//! Immutable once made; the factors' copies on the card are [`DevicePatches`], owned by the model that
//! the set is attached to.

#![expect(unsafe_code, reason = "enqueues copies of factors into allocations that it owns")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::core::Core;
use super::error::PagerError;
use super::model::PagedModel;
use super::word::MAX_VERSION;
use crate::device::{
    DeviceError, FencePool, FloatType, KernelId, PoolAllocation, SharedDevice, Stream, patch_kernel,
};
use crate::staging::{Arena, StagingBuffer};
use crate::transfer::float_type;
use crate::units::{DeviceRange, ModelTime};
use crate::weights::{PageLayout, TensorId, TensorIndex};

/// A factor: a row-major matrix in host memory.
#[derive(Clone, PartialEq, Debug)]
pub struct Factor {
    /// The type of its elements.
    pub dtype: FloatType,
    /// Its rows and columns.
    pub shape: [u64; 2],
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// One patch: `W + scale × up · down`.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorPatch {
    /// The tensor that is patched, as a matrix of its first dimension and the product of the others.
    pub tensor: TensorId,
    /// Rows of the tensor × rank.
    pub up: Factor,
    /// Rank × columns of the tensor.
    pub down: Factor,
    /// `strength × alpha / rank`.
    pub scale: f32,
}

/// The patches of one clone of a model.
#[derive(Debug)]
pub struct PatchSet {
    version: u32,
    by_tensor: BTreeMap<TensorId, Vec<TensorPatch>>,
    /// A span's version under this set: the set's own, or 0.
    spans: Vec<u32>,
}

impl PatchSet {
    /// Checks patches against a model. Several patches of one tensor are applied in the order given.
    ///
    /// # Errors
    /// A factor whose shape or length does not fit, a tensor of a type that cannot be patched, factors of
    /// two types.
    pub fn new(model: &PagedModel, patches: Vec<TensorPatch>) -> Result<Arc<Self>, PagerError> {
        Self::for_layout(model.index(), model.layout(), patches)
    }

    /// As [`Self::new`], for weights that are laid out otherwise than in a pager's pages.
    pub fn for_layout(
        index: &TensorIndex,
        layout: &PageLayout,
        patches: Vec<TensorPatch>,
    ) -> Result<Arc<Self>, PagerError> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let mut by_tensor: BTreeMap<TensorId, Vec<TensorPatch>> = BTreeMap::new();
        for patch in patches {
            check(index, layout, &patch)?;
            by_tensor.entry(patch.tensor).or_default().push(patch);
        }
        let version = NEXT.fetch_add(1, Ordering::Relaxed) % MAX_VERSION + 1;
        let spans = (0..layout.span_count())
            .map(|span| {
                let mut parts = layout.parts_of(span);
                let touched = parts.any(|part| by_tensor.contains_key(&part.tensor));
                if touched { version } else { 0 }
            })
            .collect();
        Ok(Arc::new(Self { version, by_tensor, spans }))
    }

    /// The number that tells this set from others.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The patches of a tensor, in order.
    pub fn of(&self, tensor: TensorId) -> &[TensorPatch] {
        self.by_tensor.get(&tensor).map_or(&[], Vec::as_slice)
    }

    /// Bytes of all factors: what attaching the set takes of the card.
    pub fn factor_bytes(&self) -> u64 {
        let all = self.by_tensor.values().flatten();
        all.map(|patch| (patch.up.bytes.len() + patch.down.bytes.len()) as u64).sum()
    }

    /// A span's version under a set, or without one.
    #[inline]
    pub(super) fn version_of(set: Option<&Arc<Self>>, span: u32) -> u32 {
        set.map_or(0, |set| set.spans.get(span as usize).copied().unwrap_or(0))
    }
}

fn check(index: &TensorIndex, layout: &PageLayout, patch: &TensorPatch) -> Result<(), PagerError> {
    let Some(info) = index.tensors().get(patch.tensor.index()) else {
        let model = index.files().first().map_or_else(String::new, |file| file.path().display().to_string());
        return Err(PagerError::NotFound { model, what: format!("tensor number {}", patch.tensor.0) });
    };
    let refuse = |why: String| PagerError::InvalidArgument {
        what: "patch",
        why: format!("tensor `{}`: {why}", info.name),
    };
    let place = layout.tensor_at(patch.tensor);
    let kernel = float_type(place.dtype).and_then(|weight| patch_kernel(weight, patch.up.dtype));
    if kernel.is_none() {
        return Err(refuse(format!(
            "weights of type {} with factors of {} cannot be patched",
            place.dtype, patch.up.dtype
        )));
    }
    if patch.up.dtype != patch.down.dtype {
        return Err(refuse(format!("factors of {} and {}", patch.up.dtype, patch.down.dtype)));
    }
    let rows = info.shape.first().copied().unwrap_or(1);
    let columns: u64 = info.shape.iter().skip(1).product();
    let ([up_rows, rank], [down_rank, down_columns]) = (patch.up.shape, patch.down.shape);
    if up_rows != rows || down_columns != columns || rank != down_rank || rank == 0 {
        return Err(refuse(format!(
            "factors of {up_rows} x {rank} and {down_rank} x {down_columns} do not patch {rows} x {columns}"
        )));
    }
    for factor in [&patch.up, &patch.down] {
        let wanted =
            factor.shape[0].checked_mul(factor.shape[1]).and_then(|n| n.checked_mul(factor.dtype.bytes()));
        if wanted != Some(factor.bytes.len() as u64) {
            return Err(refuse(format!(
                "a factor of {} x {} elements of {} has {} bytes",
                factor.shape[0],
                factor.shape[1],
                factor.dtype,
                factor.bytes.len()
            )));
        }
    }
    Ok(())
}

/// One patch with its factors on the card.
#[derive(Debug)]
pub(super) struct DevicePatch {
    pub(super) kernel: KernelId,
    pub(super) columns: u64,
    pub(super) element_bytes: u64,
    pub(super) rank: u32,
    pub(super) scale: f32,
    pub(super) up: DeviceRange,
    pub(super) down: DeviceRange,
}

/// A set's factors on the card.
#[derive(Debug)]
pub(crate) struct DevicePatches {
    pub(crate) set: Arc<PatchSet>,
    pub(super) by_tensor: BTreeMap<TensorId, Vec<DevicePatch>>,
    /// The factors' memory, freed in the order of the stream that patches run on.
    _factors: Option<PoolAllocation>,
}

impl DevicePatches {
    /// Copies a set's factors to the card, for patches that run on `stream`. Waits for the copies.
    pub(super) fn upload(
        core: &Arc<Core>,
        model: &PagedModel,
        set: &Arc<PatchSet>,
        stream: &Arc<Stream>,
    ) -> Result<Self, PagerError> {
        let factors = match Self::bytes_on_card(set) {
            0 => None,
            bytes => Some(super::card::allocate_on(core, stream, bytes)?),
        };
        Self::fill(&core.device, &core.arena, model.layout(), set, factors, stream, |slots| {
            super::load::take_buffer(core, slots)
        })
    }

    /// What the factors of a set take of the card, in bytes.
    pub(crate) fn bytes_on_card(set: &PatchSet) -> u64 {
        let all = set.by_tensor.values().flatten().flat_map(|patch| [&patch.up, &patch.down]);
        all.map(|factor| (factor.bytes.len() as u64).next_multiple_of(ALIGNMENT)).sum()
    }

    /// Copies a set's factors into memory of [`Self::bytes_on_card`], taken on `stream`, through buffers of
    /// `arena` that `take` gives. Waits for the copies.
    pub(crate) fn fill<E: From<DeviceError>>(
        device: &SharedDevice,
        arena: &Arena,
        layout: &PageLayout,
        set: &Arc<PatchSet>,
        factors: Option<PoolAllocation>,
        stream: &Arc<Stream>,
        mut take: impl FnMut(u32) -> Result<StagingBuffer, E>,
    ) -> Result<Self, E> {
        let mut offset = 0;
        let mut by_tensor: BTreeMap<TensorId, Vec<DevicePatch>> = BTreeMap::new();
        for patch in set.by_tensor.values().flatten() {
            let mut place = |factor: &Factor| -> Result<DeviceRange, E> {
                let bytes = factor.bytes.len() as u64;
                let at = factors.as_ref().and_then(|factors| factors.range().part(offset, bytes));
                let at = at.ok_or_else(|| DeviceError::InvalidArgument {
                    call: "copy_to_device",
                    why: format!("a factor of {bytes} bytes has no memory on the card"),
                })?;
                offset += bytes.next_multiple_of(ALIGNMENT);
                copy_in(device, arena, at, &factor.bytes, stream, &mut take)?;
                Ok(at)
            };
            let (up, down) = (place(&patch.up)?, place(&patch.down)?);
            let weight = layout.tensor_at(patch.tensor).dtype;
            let name = float_type(weight).and_then(|weight| patch_kernel(weight, patch.up.dtype));
            let kernel = device.kernel(name.unwrap_or("patch"))?;
            by_tensor.entry(patch.tensor).or_default().push(DevicePatch {
                kernel,
                columns: patch.down.shape[1],
                element_bytes: weight.byte_size().unwrap_or(1),
                rank: u32::try_from(patch.up.shape[1]).unwrap_or(u32::MAX),
                scale: patch.scale,
                up,
                down,
            });
        }
        Ok(Self { set: Arc::clone(set), by_tensor, _factors: factors })
    }
}

/// Every factor begins at a multiple of this many bytes on the card.
const ALIGNMENT: u64 = 256;

/// Copies host bytes to the card through staging memory, and waits.
pub(crate) fn copy_in<E: From<DeviceError>>(
    device: &SharedDevice,
    arena: &Arena,
    to: DeviceRange,
    bytes: &[u8],
    stream: &Stream,
    mut take: impl FnMut(u32) -> Result<StagingBuffer, E>,
) -> Result<(), E> {
    if !device.info().keeps_bytes {
        return Ok(());
    }
    let slot = arena.slot_bytes();
    let chunk = usize::try_from(u64::from(arena.run_slots()) * slot).unwrap_or(usize::MAX);
    let mut done = 0_u64;
    for part in bytes.chunks(chunk.max(1)) {
        let slots = u32::try_from((part.len() as u64).div_ceil(slot)).unwrap_or(u32::MAX);
        let mut buffer = take(slots)?;
        buffer.bytes_mut()?[..part.len()].copy_from_slice(part);
        let to = DeviceRange::new(to.start.offset(done), part.len() as u64);
        // SAFETY: the source lies in the buffer, which outlives the wait below; the target lies in an
        // allocation that the caller owns and nobody uses meanwhile.
        let copied = unsafe { device.copy_to_device(to, buffer.at(0), ModelTime::ZERO, stream.id()) };
        let waited = stream.settle();
        if waited.as_ref().is_err_and(|error| !error.is_lost()) {
            // Nobody knows whether the copy is done: the buffer waits for a fence, or is never used again.
            match FencePool::new(device).record(stream) {
                Ok(fence) => buffer.read_until(fence),
                Err(_) => std::mem::forget(buffer),
            }
        }
        copied?;
        waited?;
        done += part.len() as u64;
    }
    Ok(())
}
