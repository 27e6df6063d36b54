//! What does a fault cost, by kind, by size of the unit, and by number of threads?
//!
//! - `hit`: fault and release of a resident unit, each thread on a unit and a stream of its own. Beside it
//!   `bare` pins and unpins an atomic word: the physical limit.
//! - `miss`: the pager's own cost of bringing a model in, with frames that it has already.
//! - `streamed`: a pass through twice the card in steady state.
//!
//! Each is run by 1, 2 and 4 threads; of misses and streamed faults the threads take the units of one pass
//! between them, so that with several a fault may wait for what another thread holds.
//!
//! The card's calls do nothing, so nothing but the pager is timed. An
//! element is a fault, so criterion prints faults and bytes a second; times are of one fault a thread for
//! hits, and of a whole pass for the others. Whether two threads meet is what `hit_cost` asks, in short rounds.
//!
//! `cargo bench --bench page_fault`.

mod common;

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::Outcome;
use common::card::{Setup, pass};
use common::models::{ModelFile, uniform};
use common::null::NullDevice;
use criterion::{BenchmarkId, Criterion, Throughput};
use vram_pager::pager::{ModelOptions, PagedModel, PagerOptions, PagerStream};
use vram_pager::weights::UnitId;

const KB: u64 = 1 << 10;
const MB: u64 = 1 << 20;
const GB: u64 = 1 << 30;

/// Unit sizes, and how many units make a model whose misses are timed.
const SIZES: [(&str, u64, usize); 4] =
    [("16 KB", 16 * KB, 4096), ("1 MB", MB, 512), ("100 MB", 100 * MB, 16), ("1 GB", GB, 4)];
const THREADS: [usize; 3] = [1, 2, 4];

fn main() -> Outcome {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500))
        .configure_from_args();
    hits(&mut criterion)?;
    misses(&mut criterion)?;
    streamed(&mut criterion)?;
    criterion.final_summary();
    Ok(())
}

/// Runs `work(thread, iterations)` on each thread at once; answers the time from the first's begin to the
/// last's end.
fn threads(count: usize, iterations: u64, work: impl Fn(usize, u64) + Sync) -> Duration {
    if count == 1 {
        let began = Instant::now();
        work(0, iterations);
        return began.elapsed();
    }
    let barrier = Barrier::new(count + 1);
    let (barrier, work) = (&barrier, &work);
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..count)
            .map(|thread| {
                scope.spawn(move || {
                    barrier.wait();
                    let began = Instant::now();
                    work(thread, iterations);
                    (began, Instant::now())
                })
            })
            .collect();
        barrier.wait();
        let times: Vec<_> = handles.into_iter().filter_map(|handle| handle.join().ok()).collect();
        let begin = times.iter().map(|(begin, _)| *begin).min();
        let end = times.iter().map(|(_, end)| *end).max();
        begin.zip(end).map_or(Duration::ZERO, |(begin, end)| end - begin)
    })
}

/// A word on cache lines of its own.
#[repr(align(128))]
struct Word(AtomicU64);

fn hits(criterion: &mut Criterion) -> Outcome {
    let mut group = criterion.benchmark_group("hit");
    for count in THREADS {
        let words: Vec<Word> = (0..count).map(|_| Word(AtomicU64::new(0))).collect();
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(BenchmarkId::new("bare", count), |bencher| {
            bencher.iter_custom(|iterations| {
                threads(count, iterations, |thread, iterations| {
                    let word = &words[thread].0;
                    for _ in 0..iterations {
                        black_box(word.fetch_add(1, Ordering::Acquire));
                        black_box(word.fetch_sub(1, Ordering::Release));
                    }
                })
            });
        });
    }
    for (name, bytes, _) in SIZES {
        let file = ModelFile::new(&uniform(4, bytes))?;
        // So large that no unit is cut into pieces.
        let setup = Setup::on(&NullDevice::open(64 * GB, 2 * MB), &file, PagerOptions::default())?;
        let streams = (0..4).map(|_| setup.pager.stream()).collect::<Result<Vec<_>, _>>()?;
        for _ in 0..3 {
            pass(&setup.model, &setup.stream, &[])?;
        }
        for unit in 0..4 {
            if !setup.model.is_resident(UnitId(unit)) {
                return Err(format!("unit {unit} of {name} is not resident").into());
            }
        }
        for count in THREADS {
            group.throughput(Throughput::ElementsAndBytes {
                elements: count as u64,
                bytes: bytes * count as u64,
            });
            let (model, streams) = (&setup.model, &streams);
            group.bench_function(BenchmarkId::new(name, count), |bencher| {
                bencher.iter_custom(|iterations| {
                    threads(count, iterations, |thread, iterations| {
                        let unit = UnitId(u32::try_from(thread).unwrap_or(0));
                        let stream = &streams[thread];
                        for _ in 0..iterations {
                            match model.fault(black_box(unit), stream) {
                                Ok(guard) => black_box(guard).release(),
                                Err(error) => panic!("{error}"),
                            }
                        }
                    })
                });
            });
        }
    }
    group.finish();
    Ok(())
}

/// Faults and releases every unit once, by `count` threads that take them from one counter, each on a stream of
/// its own. With several, a fault waits where others hold what it needs.
fn crowd(count: usize, model: &PagedModel, streams: &[PagerStream]) -> Duration {
    let units = model.index().units().len();
    let next = AtomicUsize::new(0);
    threads(count, 1, |thread, _| {
        loop {
            let unit = next.fetch_add(1, Ordering::Relaxed);
            if unit >= units {
                return;
            }
            let unit = UnitId(u32::try_from(unit).unwrap_or(u32::MAX));
            let stream = &streams[thread];
            let guard = if count == 1 {
                model.fault(unit, stream)
            } else {
                model.fault_when_free(unit, stream, Instant::now() + Duration::from_secs(60))
            };
            match guard {
                Ok(guard) => black_box(guard).release(),
                Err(error) => panic!("{error}"),
            }
        }
    })
}

fn misses(criterion: &mut Criterion) -> Outcome {
    let mut group = criterion.benchmark_group("miss");
    for (name, bytes, units) in SIZES {
        let file = ModelFile::new(&uniform(units, bytes))?;
        let setup = Setup::on(&NullDevice::open(64 * GB, 2 * MB), &file, PagerOptions::default())?;
        pass(&setup.model, &setup.stream, &[])?;
        let Setup { pager, model, .. } = setup;
        // Its frames stay with the pager, idle.
        drop(model);
        let streams = (0..4).map(|_| pager.stream()).collect::<Result<Vec<_>, _>>()?;
        group
            .throughput(Throughput::ElementsAndBytes { elements: units as u64, bytes: bytes * units as u64 });
        for count in THREADS {
            group.bench_function(BenchmarkId::new(name, count), |bencher| {
                bencher.iter_custom(|iterations| {
                    let mut sum = Duration::ZERO;
                    for _ in 0..iterations {
                        match pager.open_model(Arc::clone(&file.index), &ModelOptions::default()) {
                            Ok(model) => sum += crowd(count, &model, &streams),
                            Err(error) => panic!("{error}"),
                        }
                    }
                    sum
                });
            });
        }
    }
    group.finish();
    Ok(())
}

fn streamed(criterion: &mut Criterion) -> Outcome {
    let mut group = criterion.benchmark_group("streamed");
    for (name, bytes, units) in SIZES {
        let file = ModelFile::new(&uniform(units, bytes))?;
        for count in THREADS {
            let setup =
                Setup::on(&NullDevice::open(file.bytes() / 2, 2 * MB), &file, PagerOptions::default())?;
            let streams = (0..4).map(|_| setup.pager.stream()).collect::<Result<Vec<_>, _>>()?;
            for _ in 0..4 {
                crowd(count, &setup.model, &streams);
            }
            group.throughput(Throughput::ElementsAndBytes {
                elements: units as u64,
                bytes: bytes * units as u64,
            });
            group.bench_function(BenchmarkId::new(name, count), |bencher| {
                bencher.iter_custom(|iterations| {
                    (0..iterations).map(|_| crowd(count, &setup.model, &streams)).sum()
                });
            });
        }
    }
    group.finish();
    Ok(())
}
