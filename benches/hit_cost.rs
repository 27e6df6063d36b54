//! How many bare pins is a hit, and do two threads meet?
//!
//! Fault and release of a resident unit, and pin and unpin of a bare atomic word, take turns in short rounds:
//! each on one thread, and each on two threads that work on different units at the same time. The best round
//! of each counts, and one bare word and the pager meet the same machine. So the ratios hold also on a machine
//! that is busy with other work, where the means of `page_fault` do not.
//!
//! `two/one` is how much two threads do over what one does; a round of two counts only if both ran at the same
//! time for most of it. The limit is 1.8, or what the bare word itself reaches here.
//!
//! `cargo bench --bench hit_cost -- [--json] [--check] [--rounds=4000]`.

mod common;

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::Outcome;
use common::card::{Setup, pass};
use common::models::{ModelFile, uniform};
use common::null::NullDevice;
use common::table::{Args, Report, Row};
use serde::Serialize;
use vram_pager::pager::{PagedModel, PagerOptions, PagerStream};
use vram_pager::weights::UnitId;

/// Faults of a round on each thread: tens of microseconds, much less than a turn of the scheduler.
const FAULTS: u32 = 2000;

/// How much of a round both threads must have run at the same time for it to count.
const TOGETHER: f64 = 0.9;

#[derive(Serialize)]
struct Cost {
    unit: &'static str,
    /// Nanoseconds of one, on one thread.
    hit: f64,
    bare: f64,
    ratio: f64,
    /// What two threads do over what one does.
    hit_two: f64,
    bare_two: f64,
    /// Rounds in which two threads ran at the same time.
    rounds_two: u32,
}

impl Row for Cost {
    const COLUMNS: &'static [(&'static str, usize)] = &[
        ("unit", 7),
        ("hit ns", 7),
        ("bare ns", 7),
        ("hit/bare", 8),
        ("hit two/one", 11),
        ("bare two/one", 12),
        ("hit/bare", 8),
        ("rounds", 6),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.unit.to_owned(),
            format!("{:.1}", self.hit),
            format!("{:.1}", self.bare),
            format!("{:.2}", self.ratio),
            format!("{:.2}", self.hit_two),
            format!("{:.2}", self.bare_two),
            format!("{:.2}", self.hit_two / self.bare_two),
            self.rounds_two.to_string(),
        ]
    }

    fn holds(&self) -> bool {
        // Without a round in which both ran there is nothing to hold.
        self.rounds_two == 0 || self.hit_two >= 1.8 || self.hit_two >= 0.95 * self.bare_two
    }
}

fn main() -> Outcome {
    let mut report = Report::new(Args::read());
    let rounds = report.args().value("--rounds").map_or(Ok(4000), str::parse::<u32>)?;
    for (unit, bytes) in [("16 KB", 16 << 10), ("1 MB", 1 << 20), ("100 MB", 100 << 20), ("1 GB", 1 << 30)] {
        if !report.args().wants(unit) {
            continue;
        }
        let file = ModelFile::new(&uniform(4, bytes))?;
        let setup = Setup::on(&NullDevice::open(64 << 30, 2 << 20), &file, PagerOptions::default())?;
        for _ in 0..3 {
            pass(&setup.model, &setup.stream, &[])?;
        }
        let streams = [setup.pager.stream()?, setup.pager.stream()?];
        let best = measure(&setup.model, &streams, rounds);
        let [bare, hit] = best.one.map(|rate| 1e9 / rate);
        report.add(Cost {
            unit,
            hit,
            bare,
            ratio: hit / bare,
            bare_two: best.two[0] / best.one[0],
            hit_two: best.two[1] / best.one[1],
            rounds_two: best.rounds_two,
        });
    }
    report.end()
}

/// Operations a second in the best round, of the bare word and of the pager.
#[derive(Default)]
struct Best {
    one: [f64; 2],
    two: [f64; 2],
    rounds_two: u32,
}

/// A word on cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
struct Word(AtomicU64);

/// What the two threads share; each part on lines of its own, since they must not meet here.
#[derive(Default)]
struct Meeting {
    arrived: Padded<AtomicUsize>,
    go: Padded<AtomicUsize>,
    stop: Padded<AtomicBool>,
    /// When the second thread began and ended, in nanoseconds from the start of the bench.
    second: [Padded<AtomicU64>; 2],
}

#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

/// Waits for a condition, and lets others run if it takes long.
fn spin_until(done: impl Fn() -> bool) {
    let mut spins = 0_u32;
    while !done() {
        spins += 1;
        if spins > 20_000 {
            spins = 0;
            std::thread::yield_now();
        }
        spin_loop();
    }
}

fn measure(model: &PagedModel, streams: &[PagerStream; 2], rounds: u32) -> Best {
    let words = [Word::default(), Word::default()];
    let meeting = Meeting::default();
    let start = Instant::now();
    let run = |kind: usize, thread: usize| -> (Duration, Duration) {
        let began = start.elapsed();
        if kind == 0 {
            bare(&words[thread].0);
        } else {
            hit(model, UnitId(u32::try_from(thread * 2).unwrap_or(0)), &streams[thread]);
        }
        (began, start.elapsed())
    };
    let mut best = Best::default();
    std::thread::scope(|scope| {
        let (meeting, run) = (&meeting, &run);
        scope.spawn(move || {
            for round in 1.. {
                meeting.arrived.0.store(round, Ordering::Release);
                spin_until(|| {
                    meeting.go.0.load(Ordering::Acquire) >= round || meeting.stop.0.load(Ordering::Acquire)
                });
                if meeting.stop.0.load(Ordering::Acquire) {
                    return;
                }
                let (began, ended) = run(round % 2, 1);
                for (place, time) in meeting.second.iter().zip([began, ended]) {
                    place.0.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
                }
            }
        });
        let span = |(began, ended): (Duration, Duration)| ended.saturating_sub(began);
        for round in 1..=rounds as usize {
            let kind = round % 2;
            // Alone, while the other waits without writing anything; then both.
            spin_until(|| meeting.arrived.0.load(Ordering::Acquire) >= round);
            let (began, ended) = run(kind, 0);
            best.one[kind] = best.one[kind].max(rate(ended.saturating_sub(began)));
            meeting.go.0.store(round, Ordering::Release);
            let first = run(kind, 0);
            spin_until(|| meeting.arrived.0.load(Ordering::Acquire) > round);
            let [began, ended] =
                [0, 1].map(|place| Duration::from_nanos(meeting.second[place].0.load(Ordering::Relaxed)));
            let second = (began, ended);
            let overlap = first.1.min(second.1).saturating_sub(first.0.max(second.0));
            let longest = span(first).max(span(second));
            if overlap.as_secs_f64() >= TOGETHER * longest.as_secs_f64() {
                best.rounds_two += 1;
                best.two[kind] = best.two[kind].max(rate(span(first)) + rate(span(second)));
            }
        }
        meeting.stop.0.store(true, Ordering::Release);
    });
    best
}

fn rate(time: Duration) -> f64 {
    f64::from(FAULTS) / time.as_secs_f64().max(1e-9)
}

#[inline(never)]
fn bare(word: &AtomicU64) {
    for _ in 0..FAULTS {
        black_box(word.fetch_add(1, Ordering::Acquire));
        black_box(word.fetch_sub(1, Ordering::Release));
    }
}

#[inline(never)]
fn hit(model: &PagedModel, unit: UnitId, stream: &PagerStream) {
    for _ in 0..FAULTS {
        match model.fault(black_box(unit), stream) {
            Ok(guard) => {
                black_box(&guard);
                guard.release();
            }
            Err(error) => panic!("{error}"),
        }
    }
}
