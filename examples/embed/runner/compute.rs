//! The seam to the card: what the forward pass may ask of one, and how that becomes launches.
//!
//! A [`Session`] is one stream's work on one model. It alone takes activations, faults weights and
//! launches, all on its stream; so whatever a launch names stays in place until the launch is done:
//! guards and activations are released in the order of the stream, and the calls here borrow them. To run
//! on another kind of card only the kernels change (see `kernels`), not this file.
//!
//! Holds no lock. Any number of sessions may share a [`Compute`].

#![expect(unsafe_code, reason = "launches kernels on guarded addresses")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vram_pager::device::{
    DeviceError, KernelArg, KernelArgs, KernelId, Launch, PoolAllocation, SharedDevice,
};
use vram_pager::pager::{Pager, PagerStream, TensorView};
use vram_pager::units::DeviceRange;
use vram_pager::weights::{TensorId, UnitId};

use super::error::RunnerError;
use super::kernels;
use super::weights::{Held, Rows, Weights, may_pass};

/// How long a fault or an allocation waits for what other sessions hold.
const PATIENCE: Duration = Duration::from_secs(30);

/// Attention scores are made for as many heads at once as fit in this many bytes, at least one.
const SCORE_BYTES: u64 = 256 << 10;

/// Threads of a block of kernels that take one element, or one row, a thread.
const BLOCK: u32 = 256;

/// Rows and columns of a tile of the matrix kernels; a thread makes one element of it.
const TILE: u32 = 16;

/// The runner's kernels on a device.
#[derive(Debug)]
pub(crate) struct Compute {
    sum: KernelId,
    add: KernelId,
    bias: KernelId,
    matmul: KernelId,
    layer_norm: KernelId,
    scores: KernelId,
    softmax: KernelId,
    mix: KernelId,
    gelu: KernelId,
    pool: KernelId,
    /// Sessions that are under way: with one alone there is nobody to wait for.
    sessions: AtomicUsize,
}

impl Compute {
    /// Gives the device the runner's kernels. Once a device: names must be new.
    pub(crate) fn new(device: &SharedDevice) -> Result<Self, DeviceError> {
        device.add_kernels(&kernels::module())?;
        Ok(Self {
            sum: device.kernel("embed_sum")?,
            add: device.kernel("embed_add")?,
            bias: device.kernel("embed_bias")?,
            matmul: device.kernel("embed_matmul")?,
            layer_norm: device.kernel("embed_layer_norm")?,
            scores: device.kernel("embed_scores")?,
            softmax: device.kernel("embed_softmax")?,
            mix: device.kernel("embed_mix")?,
            gelu: device.kernel("embed_gelu")?,
            pool: device.kernel("embed_pool")?,
            sessions: AtomicUsize::new(0),
        })
    }
}

/// A matrix of f32 on the card, freed in the order of its session's stream.
#[derive(Debug)]
pub(super) struct Activation {
    memory: PoolAllocation,
    pub(super) rows: u32,
    pub(super) width: u32,
}

impl Activation {
    fn count(&self) -> u32 {
        self.rows * self.width
    }

    fn read(&self) -> KernelArg {
        KernelArg::Read(self.memory.range())
    }

    /// Takes `&mut self`, since a kernel will write there.
    fn write(&mut self) -> KernelArg {
        KernelArg::Write(self.memory.range())
    }
}

/// The heads of an attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) count: u32,
    pub(super) width: u32,
}

/// One stream's work on one model.
#[derive(Debug)]
pub(super) struct Session<'s> {
    compute: &'s Compute,
    weights: &'s Weights,
    /// Where activations come from.
    pager: &'s Pager,
    stream: &'s PagerStream,
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.compute.sessions.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<'s> Session<'s> {
    /// Begins work on a stream.
    pub(super) fn new(
        compute: &'s Compute,
        weights: &'s Weights,
        pager: &'s Pager,
        stream: &'s PagerStream,
    ) -> Self {
        compute.sessions.fetch_add(1, Ordering::Relaxed);
        Self { compute, weights, pager, stream }
    }

    /// The sum of one row of each table a token. The tables themselves stay in the file.
    pub(super) fn embed(
        &self,
        tables: [(TensorId, &[u64]); 3],
        width: u32,
    ) -> Result<Activation, RunnerError> {
        let rows = u32::try_from(tables[0].1.len()).unwrap_or(u32::MAX);
        let mut out = self.activation(rows, width)?;
        let [a, b, c] = tables.map(|(table, rows)| self.rows(table, rows));
        let (a, b, c) = (a?, b?, c?);
        let count = out.count();
        let read = |rows: &Rows<'_>| KernelArg::Read(rows.range());
        self.flat(
            self.compute.sum,
            count,
            &[read(&a), read(&b), read(&c), out.write(), KernelArg::U32(count)],
        )?;
        Ok(out)
    }

    /// `x` times the unit's weight, turned over, plus its bias; a unit in pieces is taken piece by piece.
    pub(super) fn linear(
        &self,
        unit: UnitId,
        x: &Activation,
        outputs: u32,
    ) -> Result<Activation, RunnerError> {
        let mut out = self.activation(x.rows, outputs)?;
        // SAFETY: the allocation was taken on this stream and is freed in its order.
        unsafe { self.pager.device().fill(out.memory.range(), 0, self.stream.id())? };
        let (rows, inputs) = (KernelArg::U32(x.rows), KernelArg::U32(x.width));
        let stride = KernelArg::U32(outputs);
        for piece in 0..self.weights.pieces(unit)? {
            let guard = self.fault(unit, piece)?;
            if let Some(bias) = guard.tensor("bias") {
                let (first, count) = columns(&bias);
                let args =
                    [read(&bias), out.write(), rows, KernelArg::U32(count), KernelArg::U32(first), stride];
                self.launch(self.compute.bias, [count.div_ceil(BLOCK), x.rows, 1], [BLOCK, 1, 1], &args)?;
            }
            if let Some(weight) = guard.tensor("weight") {
                let (first, count) = columns(&weight);
                let args = [
                    x.read(),
                    read(&weight),
                    out.write(),
                    rows,
                    inputs,
                    KernelArg::U32(count),
                    KernelArg::U32(first),
                    stride,
                ];
                self.tiles(self.compute.matmul, x.rows, count, 1, &args)?;
            }
            drop(guard);
        }
        Ok(out)
    }

    /// Normalises each row of `x`, in place.
    pub(super) fn layer_norm(
        &self,
        unit: UnitId,
        x: &mut Activation,
        epsilon: f32,
    ) -> Result<(), RunnerError> {
        let guard = self.fault(unit, 0)?;
        let (Some(weight), Some(bias)) = (guard.tensor("weight"), guard.tensor("bias")) else {
            return Err(self.wrong(unit, "a layer norm's weight and bias do not come in one piece"));
        };
        let (rows, width) = (KernelArg::U32(x.rows), KernelArg::U32(x.width));
        let args = [read(&weight), read(&bias), x.write(), rows, width, KernelArg::F32(epsilon)];
        self.flat(self.compute.layer_norm, x.rows, &args)
    }

    /// Attention of every token to every other, head by head.
    pub(super) fn attention(
        &self,
        query: &Activation,
        key: &Activation,
        value: &Activation,
        heads: Heads,
    ) -> Result<Activation, RunnerError> {
        let (tokens, width) = (query.rows, query.width);
        let mut out = self.activation(tokens, width)?;
        let head_bytes = 4 * u64::from(tokens) * u64::from(tokens);
        let group = u32::try_from(SCORE_BYTES / head_bytes).unwrap_or(u32::MAX).clamp(1, heads.count);
        #[expect(clippy::cast_precision_loss, reason = "a head is a few dozen wide")]
        let scale = 1.0 / (heads.width as f32).sqrt();
        for first in (0..heads.count).step_by(group as usize) {
            let count = group.min(heads.count - first);
            let mut shares = self.activation(count * tokens, tokens)?;
            let sizes = [tokens, width, first, count, heads.width].map(KernelArg::U32);
            let mut args = vec![query.read(), key.read(), shares.write()];
            args.extend(sizes);
            args.push(KernelArg::F32(scale));
            self.tiles(self.compute.scores, tokens, tokens, count, &args)?;
            let args = [shares.write(), KernelArg::U32(count * tokens), KernelArg::U32(tokens)];
            self.flat(self.compute.softmax, count * tokens, &args)?;
            let mut args = vec![shares.read(), value.read(), out.write()];
            args.extend(sizes);
            self.tiles(self.compute.mix, tokens, heads.width, count, &args)?;
        }
        Ok(out)
    }

    /// `into += other`.
    pub(super) fn add(&self, into: &mut Activation, other: &Activation) -> Result<(), RunnerError> {
        let count = into.count();
        self.flat(self.compute.add, count, &[other.read(), into.write(), KernelArg::U32(count)])
    }

    /// The activation function, in place.
    pub(super) fn gelu(&self, x: &mut Activation) -> Result<(), RunnerError> {
        let count = x.count();
        self.flat(self.compute.gelu, count, &[x.write(), KernelArg::U32(count)])
    }

    /// The mean of the rows, to length 1.
    pub(super) fn pool(&self, x: &Activation) -> Result<Activation, RunnerError> {
        let mut out = self.activation(1, x.width)?;
        let args = [x.read(), out.write(), KernelArg::U32(x.rows), KernelArg::U32(x.width)];
        self.flat(self.compute.pool, x.width, &args)?;
        Ok(out)
    }

    /// Brings an activation to the host, after everything before it on the stream.
    pub(super) fn download(&self, x: &Activation) -> Result<Vec<f32>, RunnerError> {
        let mut numbers = vec![0.0_f32; x.count() as usize];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut numbers);
        // SAFETY: the target has as many bytes as the allocation and lives past the wait; the source was
        // taken on this stream.
        let copied = unsafe {
            self.pager.device().copy_to_host(bytes.as_mut_ptr(), x.memory.range(), self.stream.id())
        };
        // Also after a refusal: nothing may write to the target once this returns.
        let waited = self.stream.synchronize();
        copied.and(waited)?;
        Ok(numbers)
    }

    fn activation(&self, rows: u32, width: u32) -> Result<Activation, RunnerError> {
        let bytes = 4 * u64::from(rows) * u64::from(width);
        let memory = self.patiently(|| Ok(self.pager.allocate(self.stream, bytes)?))?;
        Ok(Activation { memory, rows, width })
    }

    /// Tries again while other sessions may hold the memory that it takes.
    fn patiently<T>(&self, mut take: impl FnMut() -> Result<T, RunnerError>) -> Result<T, RunnerError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let alone = self.compute.sessions.load(Ordering::Relaxed) < 2;
            match take() {
                Err(error) if may_pass(&error) && !alone && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => return other,
            }
        }
    }

    fn rows(&self, table: TensorId, rows: &[u64]) -> Result<Rows<'s>, RunnerError> {
        self.patiently(|| self.weights.rows(table, rows, self.stream))
    }

    /// The session holds no other guard meanwhile, so that waiting for others cannot be waiting for itself.
    fn fault(&self, unit: UnitId, piece: u32) -> Result<Held<'s>, RunnerError> {
        self.patiently(|| self.weights.fault(unit, piece, self.stream))
    }

    /// A launch of one thread an element, or a row.
    fn flat(&self, kernel: KernelId, count: u32, args: &[KernelArg]) -> Result<(), RunnerError> {
        self.launch(kernel, [count.div_ceil(BLOCK), 1, 1], [BLOCK, 1, 1], args)
    }

    /// A launch of one thread an element of `layers` matrices of `rows` x `columns`, in tiles: columns in
    /// x, rows in y.
    fn tiles(
        &self,
        kernel: KernelId,
        rows: u32,
        columns: u32,
        layers: u32,
        args: &[KernelArg],
    ) -> Result<(), RunnerError> {
        self.launch(kernel, [columns.div_ceil(TILE), rows.div_ceil(TILE), layers], [TILE, TILE, 1], args)
    }

    fn launch(
        &self,
        kernel: KernelId,
        grid: [u32; 3],
        block: [u32; 3],
        args: &[KernelArg],
    ) -> Result<(), RunnerError> {
        let Some(args) = KernelArgs::new(args) else {
            return Err(DeviceError::InvalidArgument {
                call: "launch",
                why: format!("{} arguments are too many for a kernel", args.len()),
            }
            .into());
        };
        let launch = Launch { kernel, grid, block, shared_bytes: 0, args };
        // SAFETY: the callers here pass what `kernels` lists; every range is that of an activation of this
        // session or of a guard on its stream, both borrowed over this call and released in the order of
        // the stream.
        unsafe { self.stream.launch(&launch)? };
        Ok(())
    }

    fn wrong(&self, unit: UnitId, what: &str) -> RunnerError {
        let unit = &self.weights.index().unit_info(unit).name;
        RunnerError::WrongModel {
            model: self.weights.patcher().label(),
            what: format!("unit `{unit}`: {what}"),
        }
    }
}

fn read(view: &TensorView<'_>) -> KernelArg {
    KernelArg::Read(DeviceRange::new(view.address, view.bytes))
}

/// The columns of a result that these rows of a weight or bias make: the first, and how many.
fn columns(view: &TensorView<'_>) -> (u32, u32) {
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    (narrow(view.rows.start), narrow(view.rows.end - view.rows.start))
}
