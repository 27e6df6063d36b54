//! `vram-pager synth`: a checkpoint with a real model's tensor list and made-up bytes.

use std::collections::HashSet;
use std::ffi::{CString, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use vram_pager::units::format_size;
use vram_pager::weights::{Dtype, MAX_HEADER_BYTES};

use crate::Outcome;
use crate::interrupt::{self, Scratch};
use crate::layouts::{Model, Tensor};
use crate::output::{self, Failure};

/// Dimensions up to this one are not scaled: kernel sizes and latent channels.
const KEPT_DIMENSION: u64 = 16;

/// Bytes made and written at a time; Ctrl-C is looked at in between.
const CHUNK_BYTES: usize = 1 << 20;

/// Write a checkpoint with a real model's tensor list and seeded random bytes
///
/// Names, types and order are the model's; the bytes are random but always finite numbers, the same for
/// the same seed and scale. The file appears under its name only when it is complete.
///
/// --scale makes the model narrower: every dimension above 16 is multiplied by it and rounded to the
/// nearest whole number, at least 1 (smaller ones are kernel sizes and stay). The file shrinks by about
/// the square of it.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    vram-pager synth --like flux1-dev --scale 0.1 --out flux-small.safetensors\n  \
    vram-pager synth --like llama3-8b --out llama.safetensors        (16 GB)\n  \
    vram-pager synth --layout my-model.json --seed 7 --out my-model.safetensors\n\n\
    A layout file is a JSON list: [{\"name\":\"a.weight\",\"dtype\":\"BF16\",\"shape\":[1024,1024]}, ...]")]
#[command(group = clap::ArgGroup::new("tensors").required(true).args(["like", "layout"]))]
pub(crate) struct Args {
    /// The model to take the tensor list of
    #[arg(long, value_name = "MODEL")]
    like: Option<Model>,

    /// A JSON file with a tensor list: name, dtype and shape of each
    #[arg(long, value_name = "FILE")]
    layout: Option<PathBuf>,

    /// How wide the model is to be, above 0 and at most 1
    #[arg(long, value_name = "F", default_value = "1", value_parser = parse_scale)]
    scale: f64,

    /// What the bytes are made from
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
}

fn parse_scale(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(scale) if scale > 0.0 && scale <= 1.0 => Ok(scale),
        _ => Err("must be above 0 and at most 1, for example 0.1".to_owned()),
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    file: String,
    bytes: u64,
    data_start: u64,
    total_bytes: u64,
    tensors: usize,
    seed: u64,
    scale: f64,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args, json: bool) -> Outcome {
    let started = Instant::now();
    let report = write(args)?;
    if json {
        return output::print_json(&report);
    }
    output::print(|out| {
        writeln!(
            out,
            "wrote {}: {}, {} in {:.1} s",
            output::printable(&report.file),
            output::count(report.tensors, "tensor"),
            format_size(report.bytes),
            started.elapsed().as_secs_f64()
        )
    })
}

/// Makes the file.
fn write(args: &Args) -> Result<Report, Failure> {
    let (mut tensors, source) = match (&args.like, &args.layout) {
        (Some(model), _) => (model.tensors(), model.name().to_owned()),
        (None, Some(file)) => (read_layout(file)?, file.display().to_string()),
        // clap has seen to it that one of them is there.
        (None, None) => return Err(Failure::BadInput("give --like or --layout".to_owned())),
    };
    for tensor in &mut tensors {
        scale_shape(tensor, args.scale);
    }
    let (header, total_bytes) = header(&tensors, &source, args)?;
    refuse_existing(&args.out, args.force)?;

    let mut file = Unfinished::create(&args.out)?;
    let bytes = header.len() as u64 + total_bytes;
    refuse_full_disk(&args.out, bytes)?;
    let bar = progress(bytes);
    let written = write_all(&mut file, &header, &tensors, args.seed, &bar);
    bar.finish_and_clear();
    written?;
    interrupt::check()?;
    file.finish(args.force)?;

    Ok(Report {
        file: args.out.display().to_string(),
        bytes,
        data_start: header.len() as u64,
        total_bytes,
        tensors: tensors.len(),
        seed: args.seed,
        scale: args.scale,
    })
}

/// Writes a scaled model to `out`, replacing what is there; answers the bytes of its tensors.
pub(crate) fn write_model(model: Model, scale: f64, seed: u64, out: &Path) -> Result<u64, Failure> {
    let args = Args { like: Some(model), layout: None, scale, seed, out: out.to_owned(), force: true };
    Ok(write(&args)?.total_bytes)
}

/// Reads a tensor list of the user's own.
fn read_layout(path: &Path) -> Result<Vec<Tensor>, Failure> {
    let refuse = |why: &dyn std::fmt::Display| Failure::BadInput(format!("{}: {why}", path.display()));
    let metadata = fs::metadata(path).map_err(|error| refuse(&error))?;
    if !metadata.is_file() {
        return Err(refuse(&"not a regular file"));
    }
    if metadata.len() > MAX_HEADER_BYTES {
        return Err(refuse(&format_args!("a layout has at most {MAX_HEADER_BYTES} bytes")));
    }
    let text = fs::read(path).map_err(|error| refuse(&error))?;
    let tensors: Vec<Tensor> = serde_json::from_slice(&text)
        .map_err(|error| refuse(&format_args!("not a list of name, dtype and shape: {error}")))?;
    let mut names = HashSet::new();
    for tensor in &tensors {
        if tensor.name == "__metadata__" {
            return Err(refuse(&"no tensor may be named `__metadata__`"));
        }
        if !names.insert(tensor.name.as_str()) {
            return Err(refuse(&format_args!("two tensors are named `{}`", tensor.name)));
        }
    }
    Ok(tensors)
}

/// Makes a tensor narrower, see the help text. Types of 4 and 6 bits keep whole bytes by a longer last
/// dimension.
fn scale_shape(tensor: &mut Tensor, scale: f64) {
    if scale >= 1.0 {
        return;
    }
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a scaled dimension is a rounded one"
    )]
    let scaled = |dimension: u64| (dimension as f64 * scale).round().max(1.0) as u64;
    for dimension in tensor.shape.iter_mut().filter(|dimension| **dimension > KEPT_DIMENSION) {
        *dimension = scaled(*dimension);
    }
    if tensor.dtype.byte_size().is_none()
        && tensor_bytes(tensor).is_none()
        && let Some(last) = tensor.shape.last_mut()
    {
        *last = last.next_multiple_of(4);
    }
}

/// A tensor's length in bytes; `None` if it is not whole or beyond 64 bits.
fn tensor_bytes(tensor: &Tensor) -> Option<u64> {
    let elements =
        tensor.shape.iter().try_fold(1_u64, |product, &dimension| product.checked_mul(dimension))?;
    let bits = elements.checked_mul(tensor.dtype.bits())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// The file's first bytes up to its data, and the data's length.
fn header(tensors: &[Tensor], source: &str, args: &Args) -> Result<(Vec<u8>, u64), Failure> {
    #[derive(Serialize)]
    struct Entry<'a> {
        dtype: &'a str,
        shape: &'a [u64],
        data_offsets: [u64; 2],
    }
    let text = |value: &str| serde_json::Value::from(value).to_string();
    let origin = [
        ("made_by", "vram-pager synth".to_owned()),
        ("like", source.to_owned()),
        ("scale", args.scale.to_string()),
        ("seed", args.seed.to_string()),
    ];
    let origin: Vec<String> =
        origin.iter().map(|(key, value)| format!("\"{key}\":{}", text(value))).collect();
    let mut json = format!("{{\"__metadata__\":{{{}}}", origin.join(","));
    let mut end = 0_u64;
    for tensor in tensors {
        let refuse = |why: &str| {
            let Tensor { name, dtype, shape } = tensor;
            Failure::BadInput(format!("tensor `{name}` of type {dtype} and shape {shape:?} {why}"))
        };
        let bytes = tensor_bytes(tensor)
            .ok_or_else(|| refuse("is not a whole number of bytes, or is more than 64 bits can count"))?;
        let begin = end;
        end =
            begin.checked_add(bytes).ok_or_else(|| refuse("makes the file longer than 64 bits can count"))?;
        let entry = Entry { dtype: tensor.dtype.name(), shape: &tensor.shape, data_offsets: [begin, end] };
        let entry = serde_json::to_string(&entry).map_err(|error| Failure::Failed(error.to_string()))?;
        json.push(',');
        json.push_str(&text(&tensor.name));
        json.push(':');
        json.push_str(&entry);
    }
    json.push('}');
    json.extend(std::iter::repeat_n(' ', json.len().next_multiple_of(8) - json.len()));
    let length = json.len() as u64;
    if length > MAX_HEADER_BYTES {
        return Err(Failure::BadInput(format!(
            "the header would have {length} bytes, the format allows {MAX_HEADER_BYTES}: fewer tensors, please"
        )));
    }
    if end.checked_add(length + 8).is_none_or(|bytes| i64::try_from(bytes).is_err()) {
        return Err(Failure::BadInput(format!("no file can hold {end} bytes")));
    }
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(json.into_bytes());
    Ok((bytes, end))
}

fn refuse_existing(out: &Path, force: bool) -> Result<(), Failure> {
    let Ok(metadata) = fs::symlink_metadata(out) else { return Ok(()) };
    let shown = out.display();
    if !metadata.is_file() {
        return Err(Failure::BadInput(format!("{shown} exists and is not a regular file")));
    }
    if force {
        return Ok(());
    }
    Err(Failure::BadInput(format!("{shown} exists; give --force to replace it")))
}

/// Refuses what the file system has no room for before it is full of the first part, which would be gone again
/// only when the rest does not fit, and others would meet a full disk meanwhile.
fn refuse_full_disk(out: &Path, bytes: u64) -> Result<(), Failure> {
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match free_bytes(folder) {
        Some(free) if free < bytes => Err(Failure::Failed(format!(
            "cannot write {}: it needs {} ({bytes} bytes), and {} is free there",
            out.display(),
            format_size(bytes),
            format_size(free)
        ))),
        _ => Ok(()),
    }
}

/// The bytes that the file system of `folder` has left for us; `None` if it does not say.
#[expect(unsafe_code, reason = "a call of the system that fills plain numbers in")]
fn free_bytes(folder: &Path) -> Option<u64> {
    let folder = CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut figures = MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path ends with a zero and the figures have room for what the call writes; both outlive it.
    let answer = unsafe { libc::statvfs(folder.as_ptr(), figures.as_mut_ptr()) };
    // SAFETY: they are numbers, and were zeroed.
    let figures = unsafe { figures.assume_init() };
    (answer == 0).then(|| figures.f_bavail.saturating_mul(figures.f_frsize))
}

fn progress(bytes: u64) -> ProgressBar {
    let template = "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    // It draws on standard error, and not at all if that is no terminal.
    let bar = ProgressBar::new(bytes).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn write_all(
    file: &mut Unfinished,
    header: &[u8],
    tensors: &[Tensor],
    seed: u64,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    file.write(header)?;
    bar.inc(header.len() as u64);
    let mut chunk = vec![0; CHUNK_BYTES];
    for (number, tensor) in (0..).zip(tensors) {
        let mut random = Random::new(seed, number, tensor.dtype);
        let mut rest = tensor_bytes(tensor).unwrap_or(0);
        while rest > 0 {
            interrupt::check()?;
            let take = usize::try_from(rest).unwrap_or(usize::MAX).min(CHUNK_BYTES);
            random.fill(&mut chunk[..take]);
            file.write(&chunk[..take])?;
            bar.inc(take as u64);
            rest -= take as u64;
        }
    }
    Ok(())
}

/// Seeded bytes of one tensor, every element a finite number.
struct Random {
    state: u64,
    /// Bits kept, and bits set, in eight bytes of elements.
    keep: u64,
    set: u64,
}

impl Random {
    /// Each tensor has bytes of its own, whatever stands before it.
    fn new(seed: u64, tensor: u64, dtype: Dtype) -> Self {
        let (keep, set) = masks(dtype);
        Self { state: mix(seed).wrapping_add(mix(!tensor)), keep, set }
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        let mut words = bytes.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        let rest = words.into_remainder();
        let last = self.next().to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// The next eight bytes, by `SplitMix64`: a counter and a mixing step.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.state) & self.keep) | self.set
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What turns random bits into finite numbers of a weight's size: the sign and the fraction stay random,
/// the exponent is held to a few values.
fn masks(dtype: Dtype) -> (u64, u64) {
    let repeat = |keep: u64, set: u64, bits: u32| {
        let copies = (0..64).step_by(bits as usize).fold(0_u64, |copies, at| copies | 1 << at);
        (keep * copies, set * copies)
    };
    match dtype {
        Dtype::BF16 => repeat(0x80ff, 0x3c00, 16),
        Dtype::F16 => repeat(0x87ff, 0x2800, 16),
        Dtype::F32 | Dtype::C64 => repeat(0x81ff_ffff, 0x3c00_0000, 32),
        Dtype::F64 => (0x801f_ffff_ffff_ffff, 0x3f80_0000_0000_0000),
        // Below the largest exponent there is neither infinity nor NaN.
        Dtype::F8_E4M3 | Dtype::F8_E5M2 => repeat(0xbf, 0, 8),
        // Here the sign bit alone is NaN.
        Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ => repeat(0xbf, 1, 8),
        Dtype::F8_E8M0 => repeat(0x07, 0x78, 8),
        Dtype::BOOL => repeat(1, 0, 8),
        _ => (u64::MAX, 0),
    }
}

/// A file that has its name only when it is complete.
struct Unfinished {
    file: File,
    scratch: Scratch,
    out: PathBuf,
}

impl Unfinished {
    /// A file of another name beside `out`, so that the last step is a rename.
    fn create(out: &Path) -> Result<Self, Failure> {
        let Some(name) = out.file_name() else {
            return Err(Failure::BadInput(format!("{} names no file", out.display())));
        };
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.part", std::process::id()));
        let scratch = Scratch::new(out.with_file_name(hidden));
        match OpenOptions::new().write(true).create_new(true).open(scratch.path()) {
            Ok(file) => Ok(Self { file, scratch, out: out.to_owned() }),
            Err(error) => {
                let text = format!("cannot write {}: {error}", out.display());
                Err(match error.kind() {
                    ErrorKind::NotFound
                    | ErrorKind::NotADirectory
                    | ErrorKind::InvalidFilename
                    | ErrorKind::PermissionDenied
                    | ErrorKind::ReadOnlyFilesystem => Failure::BadInput(text),
                    _ => Failure::Failed(text),
                })
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.file.write_all(bytes).map_err(|error| self.failed(&error))
    }

    /// Gives the file its name.
    fn finish(self, force: bool) -> Result<(), Failure> {
        // Once more: somebody may have made one meanwhile.
        refuse_existing(&self.out, force)?;
        fs::rename(self.scratch.path(), &self.out).map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::Failed(format!("cannot write {}: {error}", self.out.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(dtype: Dtype, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        Random::new(1, 2, dtype).fill(&mut bytes);
        bytes
    }

    #[test]
    fn every_number_is_finite_and_they_differ() {
        for pair in bytes(Dtype::F16, 1 << 16).chunks_exact(2) {
            let value = half::f16::from_le_bytes([pair[0], pair[1]]).to_f32();
            assert!(value.is_finite() && value != 0.0 && value.abs() < 0.5, "{value}");
        }
        for pair in bytes(Dtype::BF16, 1 << 16).chunks_exact(2) {
            let value = half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
            assert!(value.is_finite() && value != 0.0 && value.abs() < 0.5, "{value}");
        }
        for quad in bytes(Dtype::F32, 1 << 16).chunks_exact(4) {
            let value = f32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]);
            assert!(value.is_finite() && value != 0.0 && value.abs() < 0.5, "{value}");
        }
        for eight in bytes(Dtype::F64, 1 << 16).chunks_exact(8) {
            let value = f64::from_le_bytes(eight.try_into().unwrap());
            assert!(value.is_finite() && value != 0.0 && value.abs() < 0.5, "{value}");
        }
        assert!(bytes(Dtype::F8_E4M3, 4096).iter().all(|byte| byte & 0x7f != 0x7f));
        assert!(bytes(Dtype::F8_E5M2, 4096).iter().all(|byte| byte & 0x7c != 0x7c));
        assert!(bytes(Dtype::F8_E5M2FNUZ, 4096).iter().all(|&byte| byte != 0x80));
        assert!(bytes(Dtype::BOOL, 4096).iter().all(|&byte| byte <= 1));
        let distinct: HashSet<u8> = bytes(Dtype::U8, 4096).into_iter().collect();
        assert_eq!(distinct.len(), 256);
    }

    #[test]
    fn a_tensors_bytes_depend_on_seed_and_place_alone() {
        let mut first = vec![0; 24];
        Random::new(1, 2, Dtype::U8).fill(&mut first);
        assert_eq!(first, bytes(Dtype::U8, 24));
        for (seed, tensor) in [(1, 3), (2, 2), (0, 0)] {
            let mut other = vec![0; 24];
            Random::new(seed, tensor, Dtype::U8).fill(&mut other);
            assert_ne!(first, other);
        }
    }

    #[test]
    fn scaling_keeps_kernels_ranks_and_whole_bytes() {
        let scaled = |dtype, shape: &[u64], scale| {
            let mut tensor = Tensor { name: "t".to_owned(), dtype, shape: shape.to_vec() };
            scale_shape(&mut tensor, scale);
            tensor.shape
        };
        assert_eq!(scaled(Dtype::F16, &[320, 4, 3, 3], 0.25), [80, 4, 3, 3]);
        assert_eq!(scaled(Dtype::F16, &[3072, 64], 0.1), [307, 6]);
        assert_eq!(scaled(Dtype::F16, &[17], 0.001), [1]);
        assert_eq!(scaled(Dtype::F16, &[], 0.5), [0_u64; 0]);
        assert_eq!(scaled(Dtype::F16, &[0, 100], 0.5), [0, 50]);
        assert_eq!(scaled(Dtype::F4, &[30, 30], 0.5), [15, 16]);
        assert_eq!(scaled(Dtype::F16, &[u64::MAX], 1.0), [u64::MAX]);
    }
}
