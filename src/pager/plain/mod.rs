//! A card without virtual memory calls: spans are whole, in a block of their own or in a ring slot.
//!
//! There are no pages here, and no frames: a block is one allocation of the card's pool, at an address of
//! its own, and holds one span. So an address holds for a guard only. The rest is the pager's: words, hits,
//! streams, staging memory, patches and the control lock, which protects everything here.
//!
//! | file | what it does |
//! |---|---|
//! | `plan` | which spans stay, and how large slots are: pure |
//! | `blocks` | taking blocks from the card, giving them up, budget |
//! | `load` | a block for a faulted span, and its bytes |
//!
//! A span's word moves as in the paged engine, with a span's block in the place of its pages: a block is
//! given up only after its span left `Ready` or `Arriving` at zero pins, and is freed only when everything
//! that used it is done; a slot is written again by copies that wait for what used it. Blocks are taken and
//! freed on a stream that does nothing else, so that a freed block is free at once.
//!
//! What the paged engine does and this one does not: spans do not share memory, nothing is copied ahead of
//! its fault, a unit that is cut into pieces is taken by piece only.

#![deny(unsafe_code)]

mod blocks;
mod load;
mod plan;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) use blocks::{
    bytes_of_model, close_model, forget_span, give_back, pass_ended, refresh_budget, release_idle, replan,
    unload,
};
pub(super) use load::{Brought, arrive, bring, release_streamed};
use plan::WholePlan;

use super::frames::{FrameInfo, NONE, Role};
use crate::device::{DeviceError, PoolAllocation, SharedDevice, Stream, StreamPriority};
use crate::units::DeviceAddress;
use crate::weights::{PageLayout, Span, TENSOR_ALIGNMENT};

/// Blocks are multiples of this, as a driver's pool rounds them.
const BLOCK_ALIGNMENT: u64 = 512;

/// The blocks of a card.
#[derive(Debug)]
pub(super) struct Plain {
    /// What blocks are taken and freed on.
    home: Arc<Stream>,
    blocks: Vec<Option<Block>>,
    /// Bytes of all blocks.
    held: u64,
    /// The most bytes that blocks may have, from the last look at the device.
    budget: u64,
    /// The most bytes of activations seen since a pass ended, and in the pass before: what comes and goes
    /// within a pass must not move residency to and fro.
    activations: [u64; 2],
}

/// One allocation. `info` is kept as for a frame; its content names a span in the place of a page.
#[derive(Debug)]
struct Block {
    memory: PoolAllocation,
    bytes: u64,
    model: u32,
    info: FrameInfo,
}

/// One model's part.
#[derive(Debug)]
pub(super) struct PlainModel {
    /// A span's block, or [`NONE`].
    places: Vec<u32>,
    /// Where a span's first byte lies. Written under the lock while nobody can have the span ready; read
    /// by whoever has it pinned.
    pub(super) addresses: Arc<[AtomicU64]>,
    /// Bytes of a span's block.
    sizes: Vec<u64>,
    /// The number of a span's first chunk among all chunks of the model.
    first_chunk: Vec<u32>,
    plan: WholePlan,
    /// The bytes that the plan was made for.
    planned_for: Option<u64>,
}

/// What a model holds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) resident: u64,
    pub(super) ring: u64,
}

impl Plain {
    pub(super) fn new(device: &SharedDevice) -> Result<Self, DeviceError> {
        Ok(Self {
            home: Arc::new(Stream::new(device, StreamPriority::Normal)?),
            blocks: Vec::new(),
            held: 0,
            budget: 0,
            activations: [0; 2],
        })
    }

    /// Bytes of all blocks.
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    /// The most bytes that blocks may have.
    pub(super) fn budget(&self) -> u64 {
        self.budget
    }

    fn block(&self, number: u32) -> Option<&Block> {
        self.blocks.get(number as usize).and_then(Option::as_ref)
    }

    fn block_mut(&mut self, number: u32) -> Option<&mut Block> {
        self.blocks.get_mut(number as usize).and_then(Option::as_mut)
    }

    /// What model `id` holds, or all models.
    pub(super) fn held_by(&self, id: Option<u32>) -> Held {
        let mut held = Held::default();
        for block in self.blocks.iter().flatten().filter(|block| id.is_none_or(|id| block.model == id)) {
            *(if block.info.role == Role::Ring { &mut held.ring } else { &mut held.resident }) += block.bytes;
        }
        held
    }
}

impl PlainModel {
    pub(super) fn new(layout: &PageLayout, chunk_bytes: u64) -> Self {
        let mut next = 0_u32;
        let mut first_chunk = Vec::with_capacity(layout.span_count() as usize);
        let sizes: Vec<u64> = layout.spans().map(|span| block_bytes(&span)).collect();
        for span in layout.spans() {
            let bytes = (span.bytes.end - origin_of(span.bytes.start)).max(1);
            first_chunk.push(next);
            next = next.saturating_add(u32::try_from(bytes.div_ceil(chunk_bytes)).unwrap_or(u32::MAX));
        }
        Self {
            places: vec![NONE; sizes.len()],
            addresses: sizes.iter().map(|_| AtomicU64::new(0)).collect(),
            plan: WholePlan { resident: vec![false; sizes.len()], ..WholePlan::default() },
            sizes,
            first_chunk,
            planned_for: None,
        }
    }

    /// Whether the plan gives a span a block of its own.
    pub(super) fn stays(&self, span: u32) -> bool {
        self.plan.resident.get(span as usize).copied().unwrap_or(false)
    }

    /// Bytes of spans that the plan keeps on the card.
    pub(super) fn planned_bytes(&self) -> u64 {
        self.plan.resident_bytes
    }

    /// The largest span that passes through the ring.
    pub(super) fn slot_bytes(&self) -> u64 {
        self.plan.slot_bytes
    }
}

/// Bytes of a span's block.
pub(super) fn block_bytes(span: &Span) -> u64 {
    let bytes = (span.bytes.end - origin_of(span.bytes.start)).max(1);
    bytes.checked_next_multiple_of(BLOCK_ALIGNMENT).unwrap_or(bytes)
}

/// The plan for a model that has `budget` bytes to itself. Pure.
pub(super) fn plan_alone(layout: &PageLayout, budget: u64) -> WholePlan {
    let sizes: Vec<u64> = layout.spans().map(|span| block_bytes(&span)).collect();
    plan::plan(&sizes, |_| true, budget)
}

/// The model address that lies at a span's block's first byte: tensors keep their alignment.
fn origin_of(start: u64) -> u64 {
    start - start % TENSOR_ALIGNMENT
}

/// Where model address `at` of a span that the caller has pinned lies; `start` is the span's first.
pub(super) fn address(addresses: &[AtomicU64], span: u32, start: u64, at: u64) -> DeviceAddress {
    let block = addresses.get(span as usize).map_or(0, |address| address.load(Ordering::Relaxed));
    DeviceAddress(block).offset(at - origin_of(start))
}
