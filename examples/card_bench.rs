//! What a card's copies, page locks and memory calls cost, measured through the crate's own calls.
//!
//! ```text
//! card_bench [--device cuda:0] [--bytes 256MiB]
//! ```
//!
//! Prints one JSON object, one figure a line, so that a shell without tools can read it. `gpu-check.sh`
//! runs it. Bandwidths are the best of three rounds, costs the median of all calls.

#![expect(unsafe_code, reason = "copies between memory that it owns")]

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use vram_pager::device::{
    self, AddressRange, FencePool, FrameSet, HostBlock, PoolAllocation, SharedDevice, Stream, StreamPriority,
};
use vram_pager::units::{MIB, ModelTime, parse_size};

/// Pages of the memory calls' run.
const PAGES: u32 = 32;
const ROUNDS: usize = 3;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("usage: card_bench [--device DEVICE] [--bytes SIZE]")]
struct Usage;

fn run() -> Outcome<()> {
    let (mut text, mut bytes) = ("cuda:0".to_owned(), 256 * MIB);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let value = args.next().ok_or(Usage)?;
        match arg.as_str() {
            "--device" => text = value,
            "--bytes" => bytes = parse_size(&value)?,
            _ => return Err(Usage.into()),
        }
    }
    let device = device::open(&text)?;
    let mut figures: Vec<(&str, f64)> = Vec::new();
    copies(&device, bytes, &mut figures)?;
    if device.info().virtual_memory {
        memory_calls(&device, &mut figures)?;
    }
    stream_calls(&device, &mut figures)?;
    println!("{{");
    println!("  \"device\": {:?},", device.info().name);
    println!("  \"total_bytes\": {},", device.info().total_bytes);
    for (place, (name, value)) in figures.iter().enumerate() {
        println!("  \"{name}\": {value:.3}{}", if place + 1 < figures.len() { "," } else { "" });
    }
    println!("}}");
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "bytes of one copy")]
fn rate(bytes: u64, began: Instant) -> f64 {
    bytes as f64 / began.elapsed().as_secs_f64() / 1e9
}

/// GB/s of page-locking, and of copies from page-locked and ordinary memory and back.
fn copies(device: &SharedDevice, bytes: u64, figures: &mut Vec<(&'static str, f64)>) -> Outcome<()> {
    let stream = Arc::new(Stream::new(device, StreamPriority::Normal)?);
    let target = PoolAllocation::new(&stream, bytes)?;
    let mut block = HostBlock::map(device, bytes)?;
    // Touched first: what is timed is the lock alone.
    // SAFETY: our own block, which nothing else uses.
    unsafe { std::ptr::write_bytes(block.start(), 1, usize::try_from(bytes)?) };
    let best = |copy: &dyn Fn() -> Outcome<()>| -> Outcome<f64> {
        let mut best = 0.0_f64;
        for _ in 0..ROUNDS {
            let began = Instant::now();
            copy()?;
            best = best.max(rate(bytes, began));
        }
        Ok(best)
    };
    let to_card = |from: *const u8| -> Outcome<()> {
        // SAFETY: both sides have that many bytes and live past the wait.
        unsafe { device.copy_to_device(target.range(), from, ModelTime::ZERO, stream.id())? };
        Ok(stream.synchronize()?)
    };
    let start: *const u8 = block.start();
    figures.push(("pageable_to_card_gb_s", best(&|| to_card(start))?));
    let began = Instant::now();
    block.page_lock()?;
    figures.push(("page_lock_gb_s", rate(bytes, began)));
    let start = block.start();
    figures.push(("locked_to_card_gb_s", best(&|| to_card(start.cast_const()))?));
    figures.push((
        "card_to_locked_gb_s",
        best(&|| {
            // SAFETY: as above, with the roles exchanged.
            unsafe { device.copy_to_host(start, target.range(), stream.id())? };
            Ok(stream.synchronize()?)
        })?,
    ));
    // As the pager copies: pieces of 4 MiB, enqueued one after the other.
    figures.push((
        "locked_pieces_to_card_gb_s",
        best(&|| {
            for at in (0..bytes).step_by(4 << 20) {
                let length = (bytes - at).min(4 * MIB);
                let Some(part) = target.range().part(at, length) else { break };
                // SAFETY: the piece lies in both.
                unsafe {
                    let from = start.add(usize::try_from(at)?).cast_const();
                    device.copy_to_device(part, from, ModelTime::ZERO, stream.id())?;
                }
            }
            Ok(stream.synchronize()?)
        })?,
    ));
    Ok(())
}

/// The middle one, in microseconds.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

/// Times a call in microseconds.
fn timed<T>(times: &mut Vec<f64>, call: impl FnOnce() -> Result<T, device::DeviceError>) -> Outcome<T> {
    let began = Instant::now();
    let answer = call()?;
    times.push(began.elapsed().as_secs_f64() * 1e6);
    Ok(answer)
}

/// The cost of each virtual memory call, a page each.
fn memory_calls(device: &SharedDevice, figures: &mut Vec<(&'static str, f64)>) -> Outcome<()> {
    let page = device.info().granularity;
    let [mut create, mut map, mut access, mut unmap, mut release, mut reserve] = [const { Vec::new() }; 6];
    for _ in 0..ROUNDS {
        let mut frames = FrameSet::new(device, page);
        let mut numbers = Vec::new();
        for _ in 0..PAGES {
            numbers.push(timed(&mut create, || frames.create())?);
        }
        let mut range = timed(&mut reserve, || AddressRange::reserve(device, PAGES as usize, page))?;
        for (place, frame) in (0..PAGES).zip(&numbers) {
            timed(&mut map, || range.map(place, &frames, *frame))?;
            timed(&mut access, || range.set_access(place, 1))?;
        }
        for place in 0..PAGES {
            // SAFETY: nothing uses the page.
            timed(&mut unmap, || unsafe { range.unmap(place) })?;
        }
        for frame in numbers {
            timed(&mut release, || frames.release(frame))?;
        }
    }
    figures.push(("create_frame_us", median(create)));
    figures.push(("release_frame_us", median(release)));
    figures.push(("reserve_us", median(reserve)));
    figures.push(("map_us", median(map)));
    figures.push(("set_access_us", median(access)));
    figures.push(("unmap_us", median(unmap)));
    Ok(())
}

fn stream_calls(device: &SharedDevice, figures: &mut Vec<(&'static str, f64)>) -> Outcome<()> {
    let stream = Stream::new(device, StreamPriority::Normal)?;
    let fences = FencePool::new(device);
    let [mut record, mut query] = [const { Vec::new() }; 2];
    for _ in 0..200 {
        let fence = timed(&mut record, || fences.record(&stream))?;
        fence.wait()?;
        timed(&mut query, || fence.is_done())?;
    }
    figures.push(("record_us", median(record)));
    figures.push(("query_us", median(query)));
    Ok(())
}
