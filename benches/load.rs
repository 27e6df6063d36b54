//! How fast does a model come from its file to the card?
//!
//! Timed by the machine's clock on an emulated card that keeps bytes, so only ratios within a run mean
//! anything. The ways take turns within each round. A rate is the median of its rounds, and a ratio the median
//! of the rounds' ratios:
//!
//! - `bare`: threads read pieces into page-locked buffers and enqueue their copies, with no pager: as much as
//!   file and card give. As many threads as the pager lets read at once what is in memory, and pieces as large.
//!   The limit is 90 % of its rate.
//! - `mapping`: the same, and each piece's pages are mapped before it is read, as a pager must: what they gave
//!   their memory up for is over. On an emulated card a mapping costs host time that a card's does not.
//! - `pager`: every unit is faulted once, in order, and the stream waited for.
//! - `map`: the same, copied from a mapping of the file.
//! - `plain`: the crate `safetensors` over a mapped file, and a copy of each tensor.
//!
//! A mapping is not page-locked, so the last two go through the driver's buffers, on this card as on any.
//!
//! `again` starts with frames, mappings and staging memory from a load before. `fresh` has none of them; there
//! the host's zeroing of new memory is timed, and the row is only shown. With `cold` the file is dropped
//! from the page cache before each load, and the bench ends if it is not gone; with `cached` it is in there.
//!
//! `cargo bench --bench load -- [WORDS] [--check] [--json] [--mib=512] [--repeats=7]`, and the pager's
//! options `--readers=`, `--streams=`, `--load-mib=`, `--ahead-mib=`.

#![expect(
    unsafe_code,
    reason = "the peers copy without the pager's handles, and files are mapped and dropped"
)]

mod common;

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::models::{header, synthetic};
use common::table::{Args, Report, Row};
use common::{Numbers, Outcome};
use parking_lot::Mutex;
use safetensors::SafeTensors;
use serde::Serialize;
use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::device::{
    AddressRange, Fence, FencePool, FrameSet, HostBlock, SharedDevice, Stream, StreamPriority,
};
use vram_pager::pager::{ModelOptions, PagedModel, Pager, PagerOptions, WeightSource};
use vram_pager::transfer::ReaderPool;
use vram_pager::units::{DeviceAddress, DeviceRange, ModelTime};
use vram_pager::weights::{TensorIndex, UnitId};

const PAGE: u64 = 2 << 20;
/// Buffers of a reader: one is read into while the other's copy runs.
const BUFFERS: u64 = 2;
const WAYS: [&str; 5] = ["bare", "pager", "map", "plain", "mapping"];
const BARE: usize = 0;
const PAGER: usize = 1;
const PLAIN: usize = 3;
const MAPPING: usize = 4;

#[derive(Serialize)]
struct Load {
    file: &'static str,
    memory: &'static str,
    bytes: u64,
    /// In bytes a second.
    bare: f64,
    pager: f64,
    map: f64,
    plain: f64,
    mapping: f64,
    pager_per_bare: f64,
    pager_per_mapping: f64,
    pager_per_plain: f64,
    /// Of the pager's copies.
    mean_copy_bytes: u64,
}

impl Row for Load {
    const COLUMNS: &'static [(&'static str, usize)] = &[
        ("file", 7),
        ("memory", 6),
        ("MiB", 6),
        ("bare GB/s", 9),
        ("mapping GB/s", 12),
        ("pager GB/s", 10),
        ("map GB/s", 9),
        ("plain GB/s", 10),
        ("pager/bare", 10),
        ("pager/mapping", 13),
        ("pager/plain", 11),
        ("copy MiB", 8),
    ];

    #[expect(clippy::cast_precision_loss, reason = "sizes of a bench")]
    fn cells(&self) -> Vec<String> {
        vec![
            self.file.to_owned(),
            self.memory.to_owned(),
            (self.bytes >> 20).to_string(),
            format!("{:.3}", self.bare / 1e9),
            format!("{:.3}", self.mapping / 1e9),
            format!("{:.3}", self.pager / 1e9),
            format!("{:.3}", self.map / 1e9),
            format!("{:.3}", self.plain / 1e9),
            format!("{:.3}", self.pager_per_bare),
            format!("{:.3}", self.pager_per_mapping),
            format!("{:.3}", self.pager_per_plain),
            format!("{:.1}", self.mean_copy_bytes as f64 / f64::from(1 << 20)),
        ]
    }

    fn holds(&self) -> bool {
        self.memory == "fresh" || self.pager_per_bare >= 0.9 && self.pager_per_plain > 1.0
    }
}

/// What a run is made with.
struct Setting {
    path: PathBuf,
    index: Arc<TensorIndex>,
    bytes: u64,
    options: PagerOptions,
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    let bytes = report.args().value("--mib").map_or(Ok(512), str::parse::<u64>)? << 20;
    let repeats = report.args().value("--repeats").map_or(Ok(7), str::parse::<usize>)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    write_model(&path, bytes)?;
    let number = |name, default: u64| report.args().value(name).map_or(Ok(default), str::parse::<u64>);
    let defaults = PagerOptions::default();
    let options = PagerOptions {
        headroom_bytes: Some(0),
        readers: usize::try_from(number("--readers", defaults.readers as u64)?)?,
        copy_streams: usize::try_from(number("--streams", defaults.copy_streams as u64)?)?,
        load_bytes: number("--load-mib", defaults.load_bytes >> 20)? << 20,
        read_ahead_bytes: number("--ahead-mib", defaults.read_ahead_bytes >> 20)? << 20,
        ..defaults
    };
    let index = Arc::new(TensorIndex::open(&path)?);
    let setting = Setting { bytes: fs::metadata(&path)?.len(), path, index, options };
    for cold in [false, true] {
        for again in [true, false] {
            let (file, memory) =
                (if cold { "cold" } else { "cached" }, if again { "again" } else { "fresh" });
            if report.args().wants(&format!("{file} {memory}")) {
                let row = row(&setting, cold, again, repeats)?;
                report.add(Load { file, memory, ..row });
            }
        }
    }
    report.end()
}

/// A model of units of 1 to 32 MB with bytes that differ.
fn write_model(path: &Path, bytes: u64) -> Outcome {
    let tensors = synthetic(1_000_000..32_000_000, bytes, 11);
    let (header, data) = header(&tensors);
    let mut numbers = Numbers(13);
    let block: Vec<u8> = (0..(1 << 17)).flat_map(|_| numbers.next().to_le_bytes()).collect();
    let file = File::create(path)?;
    file.write_all_at(&header, 0)?;
    let mut at = 0;
    while at < data {
        let part = usize::try_from((data - at).min(block.len() as u64))?;
        file.write_all_at(&block[..part], header.len() as u64 + at)?;
        at += part as u64;
    }
    file.sync_all()?;
    Ok(())
}

/// Drops the file from the page cache, or makes sure that it is in there.
fn prepare(path: &Path, cold: bool) -> Outcome {
    let file = File::open(path)?;
    if cold {
        // SAFETY: the descriptor is open, and the call only advises.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        let cached = cached_bytes(&file)?;
        if cached > file.metadata()?.len() / 50 {
            return Err(
                format!("{cached} bytes of the file stay in the page cache: nothing is cold here").into()
            );
        }
    } else {
        let mut buffer = vec![0; 1 << 20];
        let mut at = 0;
        loop {
            let read = file.read_at(&mut buffer, at)?;
            if read == 0 {
                break;
            }
            at += read as u64;
        }
    }
    Ok(())
}

/// How much of a file is in the page cache.
fn cached_bytes(file: &File) -> Outcome<u64> {
    // SAFETY: the bench's own file, which nobody changes, and no byte of the mapping is read.
    let mapped = unsafe { memmap2::Mmap::map(file)? };
    // SAFETY: the call only answers.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) })?;
    let mut pages = vec![0_u8; mapped.len().div_ceil(page)];
    // SAFETY: the mapping begins at a page, and there is a byte for each of its pages.
    let answer =
        unsafe { libc::mincore(mapped.as_ptr().cast_mut().cast(), mapped.len(), pages.as_mut_ptr()) };
    if answer != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(pages.iter().filter(|cached| **cached & 1 != 0).count() as u64 * page as u64)
}

fn card(bytes: u64) -> Outcome<SharedDevice> {
    Ok(EmulatedDevice::open(EmulatedOptions::new(bytes.next_multiple_of(PAGE) + 64 * PAGE))?)
}

/// The middle one: what is not moved by one round that was lucky or was disturbed.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[expect(clippy::cast_precision_loss, reason = "rates of a bench")]
fn row(setting: &Setting, cold: bool, again: bool, repeats: usize) -> Outcome<Load> {
    let mut times: [Vec<Duration>; WAYS.len()] = Default::default();
    let mut ways: Vec<Option<Way>> = WAYS.iter().map(|_| None).collect();
    let mut mean_copy_bytes = 0;
    for round in 0..=repeats {
        for (number, name) in WAYS.iter().enumerate() {
            prepare(&setting.path, cold)?;
            let device = if again && round > 0 { None } else { Some(card(setting.bytes)?) };
            let counted = match &ways[number] {
                Some(Way::Pager { pager, .. }) if again => Some(pager.device().counts()),
                _ => None,
            };
            let began = Instant::now();
            if let Some(device) = device {
                ways[number] = Some(Way::new(name, &device, setting)?);
            }
            let Some(way) = &mut ways[number] else { continue };
            way.once()?;
            // The first round warms up what stays, and the machine.
            if round > 0 {
                times[number].push(began.elapsed());
            }
            if let (Some(before), Way::Pager { pager, .. }, 1) = (counted, &*way, number) {
                let after = pager.device().counts();
                let copies = (after.copy_to_device - before.copy_to_device).max(1);
                mean_copy_bytes = (after.bytes_to_device - before.bytes_to_device) / copies;
            }
            // A file that is mapped would stay in the page cache.
            way.empty()?;
            if !again {
                ways[number] = None;
            }
        }
    }
    let [bare, pager, map, plain, mapping] = times.each_ref().map(|times| {
        let rates = times.iter().map(|time| setting.bytes as f64 / time.as_secs_f64());
        median(rates.collect())
    });
    let ratio = |to: usize| {
        let pairs = times[PAGER].iter().zip(&times[to]);
        median(pairs.map(|(pager, to)| to.as_secs_f64() / pager.as_secs_f64()).collect())
    };
    Ok(Load {
        file: "",
        memory: "",
        bytes: setting.bytes,
        bare,
        pager,
        map,
        plain,
        mapping,
        pager_per_bare: ratio(BARE),
        pager_per_mapping: ratio(MAPPING),
        pager_per_plain: ratio(PLAIN),
        mean_copy_bytes,
    })
}

/// A way to bring the file to the card.
enum Way {
    Bare(Box<Bare>),
    Pager { pager: Arc<Pager>, index: Arc<TensorIndex>, model: Option<Arc<PagedModel>> },
    Plain { target: Box<Target>, stream: Stream, file: File },
}

impl Way {
    fn new(way: &str, device: &SharedDevice, setting: &Setting) -> Outcome<Self> {
        let index = Arc::clone(&setting.index);
        let options = setting.options.clone();
        Ok(match way {
            "bare" => Self::Bare(Box::new(Bare::new(device, setting, false)?)),
            "mapping" => Self::Bare(Box::new(Bare::new(device, setting, true)?)),
            "pager" => Self::Pager { pager: Pager::new(device, options)?, index, model: None },
            "map" => {
                // SAFETY: the bench's own file, which nobody changes.
                let source = unsafe { WeightSource::mapped() };
                let options = PagerOptions { source, ..options };
                Self::Pager { pager: Pager::new(device, options)?, index, model: None }
            }
            _ => Self::Plain {
                target: Box::new(Target::new(device, setting.bytes, true)?),
                stream: Stream::new(device, StreamPriority::Normal)?,
                file: File::open(&setting.path)?,
            },
        })
    }

    /// Forgets the model; frames and buffers stay.
    fn empty(&mut self) -> Outcome {
        match self {
            Self::Pager { model, .. } => *model = None,
            Self::Bare(bare) if bare.maps => bare.target.unmap()?,
            Self::Bare(_) | Self::Plain { .. } => {}
        }
        Ok(())
    }

    fn once(&mut self) -> Outcome {
        match self {
            Self::Bare(bare) => bare.once(),
            Self::Pager { pager, index, model } => {
                let model = model.insert(pager.open_model(Arc::clone(index), &ModelOptions::default())?);
                let stream = pager.stream()?;
                for unit in 0..index.units().len() {
                    model.fault(UnitId(u32::try_from(unit)?), &stream)?.release();
                }
                stream.synchronize()?;
                Ok(())
            }
            Self::Plain { target, stream, file } => {
                // SAFETY: the bench's own file, which nobody changes.
                let mapped = unsafe { memmap2::Mmap::map(&*file)? };
                let tensors = SafeTensors::deserialize(&mapped)?;
                let mut at = target.start();
                for (_, tensor) in tensors.iter() {
                    let data = tensor.data();
                    let to = DeviceRange::new(at, data.len() as u64);
                    // SAFETY: the mapping outlives the wait below, and the target is mapped and accessible.
                    unsafe {
                        target.device.copy_to_device(to, data.as_ptr(), target.device.now(), stream.id())?;
                    }
                    at = to.end();
                }
                stream.synchronize()?;
                Ok(())
            }
        }
    }
}

/// Memory on the card for the whole file.
struct Target {
    device: SharedDevice,
    range: Mutex<AddressRange>,
    frames: FrameSet,
    /// By page.
    numbers: Vec<u32>,
}

impl Target {
    fn new(device: &SharedDevice, bytes: u64, mapped: bool) -> Outcome<Self> {
        let pages = u32::try_from(bytes.div_ceil(PAGE))?;
        let mut frames = FrameSet::new(device, PAGE);
        let range = Mutex::new(AddressRange::reserve(device, pages as usize, PAGE)?);
        let numbers = (0..pages).map(|_| frames.create()).collect::<Result<_, _>>()?;
        let target = Self { device: Arc::clone(device), range, frames, numbers };
        if mapped {
            target.map(0..pages)?;
        }
        Ok(target)
    }

    fn start(&self) -> DeviceAddress {
        self.range.lock().range().start
    }

    fn map(&self, pages: std::ops::Range<u32>) -> Outcome {
        let mut range = self.range.lock();
        for page in pages.clone() {
            range.map(page, &self.frames, self.numbers[page as usize])?;
        }
        Ok(range.set_access(pages.start, pages.end - pages.start)?)
    }

    fn unmap(&self) -> Outcome {
        let mut range = self.range.lock();
        for page in (0..).take(self.numbers.len()) {
            // SAFETY: every reader has waited for its copies.
            unsafe { range.unmap(page)? };
        }
        Ok(())
    }
}

/// Reads and copies, overlapped, and nothing else.
struct Bare {
    target: Target,
    file: File,
    bytes: u64,
    chunk: u64,
    readers: Vec<(HostBlock, Stream)>,
    fences: FencePool,
    /// Whether each piece's pages are mapped first.
    maps: bool,
}

impl Bare {
    fn new(device: &SharedDevice, setting: &Setting, maps: bool) -> Outcome<Self> {
        let chunk = setting.options.load_bytes;
        let at_once = ReaderPool::new(setting.options.readers)?.queue().at_once();
        let mut readers = Vec::new();
        for _ in 0..at_once {
            let mut block = HostBlock::map(device, BUFFERS * chunk)?;
            block.page_lock()?;
            readers.push((block, Stream::new(device, StreamPriority::Normal)?));
        }
        Ok(Self {
            target: Target::new(device, setting.bytes, !maps)?,
            file: File::open(&setting.path)?,
            bytes: setting.bytes,
            chunk,
            readers,
            fences: FencePool::new(device),
            maps,
        })
    }

    fn once(&self) -> Outcome {
        let next = AtomicU64::new(0);
        let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
            let handles: Vec<_> = self
                .readers
                .iter()
                .map(|(block, stream)| {
                    let next = &next;
                    scope.spawn(move || self.reader(block, stream, next).map_err(|error| error.to_string()))
                })
                .collect();
            handles.into_iter().filter_map(|handle| handle.join().ok()).collect()
        });
        results.into_iter().collect::<Result<(), _>>().map_err(Into::into)
    }

    fn reader(&self, block: &HostBlock, stream: &Stream, next: &AtomicU64) -> Outcome {
        let mut fences: Vec<Option<Fence>> = (0..BUFFERS).map(|_| None).collect();
        for turn in 0.. {
            let at = next.fetch_add(1, Ordering::Relaxed) * self.chunk;
            if at >= self.bytes {
                break;
            }
            let slot = turn % fences.len();
            if let Some(fence) = fences[slot].take() {
                fence.wait()?;
            }
            let length = usize::try_from(self.chunk.min(self.bytes - at))?;
            if self.maps {
                let pages = at / PAGE..(at + length as u64).div_ceil(PAGE);
                self.target.map(u32::try_from(pages.start)?..u32::try_from(pages.end)?)?;
            }
            // SAFETY: the slot lies in this reader's block, and the copy that read it last is done.
            let buffer = unsafe {
                std::slice::from_raw_parts_mut(block.start().add(slot * usize::try_from(self.chunk)?), length)
            };
            self.file.read_exact_at(buffer, at)?;
            let to = DeviceRange::new(self.target.start().offset(at), length as u64);
            // SAFETY: the buffer is left alone until the fence below; the target is mapped and accessible.
            unsafe {
                self.target.device.copy_to_device(to, buffer.as_ptr(), ModelTime::ZERO, stream.id())?;
            }
            fences[slot] = Some(self.fences.record(stream)?);
        }
        stream.synchronize()?;
        Ok(())
    }
}
