//! The kernels of the runner: names, arguments, and their host twins.
//!
//! All numbers are f32, matrices are row-major. A card's kernel gets the address of each range and the
//! sizes as they stand here; the twins check the sizes against the ranges, which a card cannot.
//!
//! | kernel | arguments | does |
//! |---|---|---|
//! | `embed_sum` | a R, b R, c R, out W, count | out = a + b + c |
//! | `embed_add` | other R, into W, count | into += other |
//! | `embed_bias` | bias R, out W, rows, outputs, first, stride | out\[r]\[first + o] += bias\[o] |
//! | `embed_matmul` | x R, weight R, out W, rows, inputs, outputs, first, stride | out\[r]\[first + o] += Σ x\[r]\[i] · weight\[o]\[i] |
//! | `embed_layer_norm` | weight R, bias R, x W, rows, width, epsilon F | each row of x to mean 0, variance 1, · weight + bias |
//! | `embed_scores` | q R, k R, out W, tokens, width, first, heads, `head_width`, scale F | out\[h]\[i]\[j] = scale · q\[i]·k\[j] of head first + h |
//! | `embed_softmax` | x W, rows, width | each row of x to shares |
//! | `embed_mix` | shares R, v R, out W, tokens, width, first, heads, `head_width` | out\[i] of head first + h = Σ shares\[h]\[i]\[j] · v\[j] |
//! | `embed_gelu` | x W, count | x = x/2 · (1 + erf(x/√2)) |
//! | `embed_pool` | x R, out W, rows, width | the mean of the rows, to length 1 |
//!
//! R and W are addresses, F is an f32, everything else a u32. `first` and `stride` let a piece of a weight
//! (a run of its rows) fill its columns of the result, and some heads their part.

#![expect(unsafe_code, reason = "the matrix library takes pointers")]

use vram_pager::device::{HostTwin, KernelModule, TwinArg};

/// The module that a device is given. The code for a card is still to come.
pub(super) fn module() -> KernelModule {
    let kernels: Vec<(&'static str, HostTwin)> = vec![
        ("embed_sum", sum),
        ("embed_add", add),
        ("embed_bias", bias),
        ("embed_matmul", matmul),
        ("embed_layer_norm", layer_norm),
        ("embed_scores", scores),
        ("embed_softmax", softmax),
        ("embed_mix", mix),
        ("embed_gelu", gelu),
        ("embed_pool", pool),
    ];
    KernelModule { name: "embed", ptx: None, kernels }
}

type Answer = Result<(), String>;

/// The numbers in a range that a kernel reads.
fn floats<'a>(bytes: &'a [u8], count: usize, what: &str) -> Result<&'a [f32], String> {
    let all: &[f32] = bytemuck::try_cast_slice(bytes).map_err(|error| format!("{what}: {error}"))?;
    if all.len() == count {
        return Ok(all);
    }
    Err(format!("{what} has {} numbers, the sizes say {count}", all.len()))
}

/// The numbers in a range that a kernel writes.
fn floats_mut<'a>(bytes: &'a mut [u8], count: usize, what: &str) -> Result<&'a mut [f32], String> {
    let all: &mut [f32] = bytemuck::try_cast_slice_mut(bytes).map_err(|error| format!("{what}: {error}"))?;
    if all.len() == count {
        return Ok(all);
    }
    Err(format!("{what} has {} numbers, the sizes say {count}", all.len()))
}

fn wrong(kernel: &str) -> Answer {
    Err(format!("{kernel} was given other arguments than it takes"))
}

fn sum(args: &mut [TwinArg<'_>]) -> Answer {
    let [TwinArg::Read(a), TwinArg::Read(b), TwinArg::Read(c), TwinArg::Write(out), TwinArg::U32(count)] =
        args
    else {
        return wrong("embed_sum");
    };
    let count = *count as usize;
    let (a, b, c) = (floats(a, count, "a")?, floats(b, count, "b")?, floats(c, count, "c")?);
    for (((out, a), b), c) in floats_mut(out, count, "out")?.iter_mut().zip(a).zip(b).zip(c) {
        *out = a + b + c;
    }
    Ok(())
}

fn add(args: &mut [TwinArg<'_>]) -> Answer {
    let [TwinArg::Read(other), TwinArg::Write(into), TwinArg::U32(count)] = args else {
        return wrong("embed_add");
    };
    let other = floats(other, *count as usize, "other")?;
    for (into, other) in floats_mut(into, *count as usize, "into")?.iter_mut().zip(other) {
        *into += other;
    }
    Ok(())
}

fn bias(args: &mut [TwinArg<'_>]) -> Answer {
    let [
        TwinArg::Read(bias),
        TwinArg::Write(out),
        TwinArg::U32(rows),
        TwinArg::U32(outputs),
        TwinArg::U32(first),
        TwinArg::U32(stride),
    ] = args
    else {
        return wrong("embed_bias");
    };
    let columns = columns(*first, *outputs, *stride)?;
    let bias = floats(bias, columns.len(), "bias")?;
    let stride = *stride as usize;
    for row in floats_mut(out, *rows as usize * stride, "out")?.chunks_exact_mut(stride) {
        for (out, bias) in row[columns.clone()].iter_mut().zip(bias) {
            *out += bias;
        }
    }
    Ok(())
}

/// The columns that a run of outputs fills.
fn columns(first: u32, count: u32, stride: u32) -> Result<std::ops::Range<usize>, String> {
    match first.checked_add(count).filter(|end| *end <= stride && stride > 0) {
        Some(end) => Ok(first as usize..end as usize),
        None => Err(format!("columns {first}+{count} do not lie in rows of {stride}")),
    }
}

fn matmul(args: &mut [TwinArg<'_>]) -> Answer {
    let [
        TwinArg::Read(x),
        TwinArg::Read(weight),
        TwinArg::Write(out),
        TwinArg::U32(rows),
        TwinArg::U32(inputs),
        TwinArg::U32(outputs),
        TwinArg::U32(first),
        TwinArg::U32(stride),
    ] = args
    else {
        return wrong("embed_matmul");
    };
    let columns = columns(*first, *outputs, *stride)?;
    let (rows, inputs, outputs, stride) =
        (*rows as usize, *inputs as usize, *outputs as usize, *stride as usize);
    let x = Matrix {
        rows,
        columns: inputs,
        row_step: inputs,
        column_step: 1,
        numbers: floats(x, rows * inputs, "x")?,
    };
    let weight = Matrix {
        rows: inputs,
        columns: outputs,
        // Read in place, turned over by its steps.
        row_step: 1,
        column_step: inputs,
        numbers: floats(weight, inputs * outputs, "weight")?,
    };
    let out = floats_mut(out, rows * stride, "out")?;
    multiply(out.get_mut(columns.start..).unwrap_or_default(), stride, &x, &weight, 1.0, true)
}

/// A matrix inside a slice: element (r, c) is `numbers[r * row_step + c * column_step]`.
struct Matrix<'a> {
    numbers: &'a [f32],
    rows: usize,
    columns: usize,
    row_step: usize,
    column_step: usize,
}

impl Matrix<'_> {
    /// Whether every element lies in the slice.
    fn fits(&self) -> bool {
        self.rows == 0
            || self.columns == 0
            || (self.rows - 1) * self.row_step + (self.columns - 1) * self.column_step < self.numbers.len()
    }
}

/// `out (+)= factor · a · b`, where rows of `out` begin `row_step` numbers apart. One thread, so that the
/// order of additions, and with it every bit, depends on nothing but the sizes.
fn multiply(
    out: &mut [f32],
    row_step: usize,
    a: &Matrix<'_>,
    b: &Matrix<'_>,
    factor: f32,
    adds: bool,
) -> Answer {
    if a.rows == 0 || b.columns == 0 {
        return Ok(());
    }
    let fits = a.columns == b.rows
        && a.fits()
        && b.fits()
        && b.columns <= row_step
        && (a.rows - 1) * row_step + b.columns <= out.len();
    let step = |step: usize| isize::try_from(step).map_err(|error| error.to_string());
    if !fits {
        return Err(format!("{}x{} times {}x{} does not fit", a.rows, a.columns, b.rows, b.columns));
    }
    // SAFETY: checked above: each of the three matrices lies in its slice, and the slices cannot overlap,
    // since one is borrowed mutably.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            out.as_mut_ptr(),
            1,
            step(row_step)?,
            adds,
            a.numbers.as_ptr(),
            step(a.column_step)?,
            step(a.row_step)?,
            b.numbers.as_ptr(),
            step(b.column_step)?,
            step(b.row_step)?,
            1.0,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "widths are small")]
fn layer_norm(args: &mut [TwinArg<'_>]) -> Answer {
    let [
        TwinArg::Read(weight),
        TwinArg::Read(bias),
        TwinArg::Write(x),
        TwinArg::U32(rows),
        TwinArg::U32(width),
        TwinArg::F32(epsilon),
    ] = args
    else {
        return wrong("embed_layer_norm");
    };
    let width = *width as usize;
    let (weight, bias) = (floats(weight, width, "weight")?, floats(bias, width, "bias")?);
    for row in floats_mut(x, *rows as usize * width, "x")?.chunks_exact_mut(width.max(1)) {
        let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / width as f64;
        let variance = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / width as f64;
        let scale = 1.0 / (variance + f64::from(*epsilon)).sqrt();
        for ((v, weight), bias) in row.iter_mut().zip(weight).zip(bias) {
            *v = ((f64::from(*v) - mean) * scale) as f32 * weight + bias;
        }
    }
    Ok(())
}

fn scores(args: &mut [TwinArg<'_>]) -> Answer {
    let [
        TwinArg::Read(q),
        TwinArg::Read(k),
        TwinArg::Write(out),
        TwinArg::U32(tokens),
        TwinArg::U32(width),
        TwinArg::U32(first),
        TwinArg::U32(heads),
        TwinArg::U32(head_width),
        TwinArg::F32(scale),
    ] = args
    else {
        return wrong("embed_scores");
    };
    let (tokens, width) = (*tokens as usize, *width as usize);
    let (heads, head) = (*heads as usize, *head_width as usize);
    let (q, k) = (floats(q, tokens * width, "q")?, floats(k, tokens * width, "k")?);
    let out = floats_mut(out, heads * tokens * tokens, "out")?;
    for (number, out) in out.chunks_exact_mut((tokens * tokens).max(1)).enumerate() {
        let at = (*first as usize + number) * head;
        let (q, k) = (q.get(at..).unwrap_or_default(), k.get(at..).unwrap_or_default());
        let q = Matrix { numbers: q, rows: tokens, columns: head, row_step: width, column_step: 1 };
        let k = Matrix { numbers: k, rows: head, columns: tokens, row_step: 1, column_step: width };
        multiply(out, tokens, &q, &k, *scale, false)?;
    }
    Ok(())
}

fn softmax(args: &mut [TwinArg<'_>]) -> Answer {
    let [TwinArg::Write(x), TwinArg::U32(rows), TwinArg::U32(width)] = args else {
        return wrong("embed_softmax");
    };
    let width = *width as usize;
    for row in floats_mut(x, *rows as usize * width, "x")?.chunks_exact_mut(width.max(1)) {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0_f32;
        for v in row.iter_mut() {
            *v = (*v - top).exp();
            total += *v;
        }
        for v in row.iter_mut() {
            *v /= total;
        }
    }
    Ok(())
}

fn mix(args: &mut [TwinArg<'_>]) -> Answer {
    let [
        TwinArg::Read(shares),
        TwinArg::Read(v),
        TwinArg::Write(out),
        TwinArg::U32(tokens),
        TwinArg::U32(width),
        TwinArg::U32(first),
        TwinArg::U32(heads),
        TwinArg::U32(head_width),
    ] = args
    else {
        return wrong("embed_mix");
    };
    let (tokens, width) = (*tokens as usize, *width as usize);
    let (heads, head) = (*heads as usize, *head_width as usize);
    let shares = floats(shares, heads * tokens * tokens, "shares")?;
    let v = floats(v, tokens * width, "v")?;
    let out = floats_mut(out, tokens * width, "out")?;
    for (number, shares) in shares.chunks_exact((tokens * tokens).max(1)).enumerate() {
        let at = (*first as usize + number) * head;
        let v = v.get(at..).unwrap_or_default();
        let shares =
            Matrix { numbers: shares, rows: tokens, columns: tokens, row_step: tokens, column_step: 1 };
        let v = Matrix { numbers: v, rows: tokens, columns: head, row_step: width, column_step: 1 };
        multiply(out.get_mut(at..).unwrap_or_default(), width, &shares, &v, 1.0, false)?;
    }
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "computed in double, kept in single")]
fn gelu(args: &mut [TwinArg<'_>]) -> Answer {
    let [TwinArg::Write(x), TwinArg::U32(count)] = args else {
        return wrong("embed_gelu");
    };
    for v in floats_mut(x, *count as usize, "x")? {
        let wide = f64::from(*v);
        *v = (wide / 2.0 * (1.0 + libm::erf(wide * std::f64::consts::FRAC_1_SQRT_2))) as f32;
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "sizes are small")]
fn pool(args: &mut [TwinArg<'_>]) -> Answer {
    let [TwinArg::Read(x), TwinArg::Write(out), TwinArg::U32(rows), TwinArg::U32(width)] = args else {
        return wrong("embed_pool");
    };
    let (rows, width) = (*rows as usize, *width as usize);
    let x = floats(x, rows * width, "x")?;
    let out = floats_mut(out, width, "out")?;
    let mut mean = vec![0.0_f64; width];
    for row in x.chunks_exact(width.max(1)) {
        mean.iter_mut().zip(row).for_each(|(mean, v)| *mean += f64::from(*v) / rows as f64);
    }
    // The floor keeps a zero vector from becoming NaN.
    let length = mean.iter().map(|v| v * v).sum::<f64>().sqrt().max(1e-12);
    for (out, mean) in out.iter_mut().zip(&mean) {
        *out = (mean / length) as f32;
    }
    Ok(())
}
