//! The trace event format that Perfetto and Chrome's viewer open.
//!
//! Pure but for the writing. Process 1 is the device with its engines and counters, process 2 the runners.
//! Times are microseconds since the device was opened, of the clock that the recording is of.

#![deny(unsafe_code)]

use std::io::{self, Write};
use std::ops::Range;

use serde_json::{Value, json};

use super::recording::{OnCard, Recording, TimeSource, TimeSpan, harmless};
use crate::units::ModelTime;

const DEVICE: u32 = 1;
const RUNNERS: u32 = 2;

const LINK: u32 = 1;
const COMPUTE: u32 = 2;
const READERS: u32 = 3;

/// Tracks of a runner: faults, and stalls.
const TRACKS: u32 = 2;

/// Writes a recording as one JSON object, an event a line.
///
/// # Errors
/// Those of `out`.
pub fn write_trace(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let mut events = Events { out, any: false };
    let clock = match recording.source {
        TimeSource::Modelled => "modelled",
        TimeSource::Wall => "wall",
    };
    writeln!(events.out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[", {
        json!({
            "model": harmless(&recording.model), "device": harmless(&recording.device), "clock": clock,
            "dropped": recording.dropped,
        })
    })?;
    names(recording, &mut events)?;
    card(recording, &mut events)?;
    for runner in 0..recording.runners {
        runner_tracks(recording, runner, &mut events)?;
    }
    counters(recording, &mut events)?;
    writeln!(events.out, "\n]}}")
}

struct Events<'w> {
    out: &'w mut dyn Write,
    any: bool,
}

impl Events<'_> {
    fn add(&mut self, event: &Value) -> io::Result<()> {
        if std::mem::replace(&mut self.any, true) {
            self.out.write_all(b",\n")?;
        }
        serde_json::to_writer(&mut *self.out, event)?;
        Ok(())
    }

    /// A run of time on a track.
    fn slice(
        &mut self,
        (process, track): (u32, u32),
        name: &str,
        time: TimeSpan,
        args: &Value,
    ) -> io::Result<()> {
        let dur = micros(ModelTime(time.end.0.saturating_sub(time.start.0)));
        let ts = micros(time.start);
        self.add(&json!({
            "ph": "X", "pid": process, "tid": track, "name": name, "ts": ts, "dur": dur, "args": args,
        }))
    }

    fn name(&mut self, kind: &str, (process, track): (u32, u32), name: &str) -> io::Result<()> {
        self.add(&json!({
            "ph": "M", "pid": process, "tid": track, "name": kind, "args": {"name": name},
        }))
    }
}

#[expect(clippy::cast_precision_loss, reason = "exact to a nanosecond for a hundred days")]
fn micros(time: ModelTime) -> f64 {
    time.0 as f64 / 1000.0
}

/// The tracks of runner `runner`.
fn track(runner: u32, which: u32) -> (u32, u32) {
    (RUNNERS, runner * TRACKS + which + 1)
}

fn names(recording: &Recording, events: &mut Events<'_>) -> io::Result<()> {
    events.name("process_name", (DEVICE, 0), &harmless(&recording.device))?;
    events.name("process_name", (RUNNERS, 0), "runners")?;
    if recording.source == TimeSource::Modelled {
        events.name("thread_name", (DEVICE, LINK), "link to the device")?;
        events.name("thread_name", (DEVICE, COMPUTE), "compute")?;
        events.name("thread_name", (DEVICE, READERS), "file reads")?;
    }
    for runner in 0..recording.runners {
        events.name("thread_name", track(runner, 0), &format!("runner {runner}: faults"))?;
        events.name("thread_name", track(runner, 1), &format!("runner {runner}: stalls"))?;
    }
    Ok(())
}

/// What the device's engines did.
fn card(recording: &Recording, events: &mut Events<'_>) -> io::Result<()> {
    for copy in &recording.copies {
        let name = copy.units.clone().map_or_else(|| "copy".to_owned(), |units| of(recording, &units));
        let args = json!({"bytes": copy.bytes, "pass": recording.pass_at(copy.time.start)});
        events.slice((DEVICE, LINK), &name, copy.time, &args)?;
    }
    for compute in &recording.compute {
        let args = json!({"pass": recording.pass_at(compute.time.start), "runner": compute.runner});
        events.slice((DEVICE, COMPUTE), &recording.unit_name(compute.unit), compute.time, &args)?;
    }
    for read in &recording.reads {
        events.slice((DEVICE, READERS), "read", read.time, &json!({"bytes": read.bytes}))?;
    }
    Ok(())
}

/// The units of a copy, by name.
fn of(recording: &Recording, units: &Range<u32>) -> String {
    let first = recording.unit_name(units.start);
    match units.end.saturating_sub(units.start) {
        0 | 1 => first,
        many => format!("{first} and {} more", many - 1),
    }
}

/// A runner's passes and faults, what was evicted for them, and its stalls.
fn runner_tracks(recording: &Recording, runner: u32, events: &mut Events<'_>) -> io::Result<()> {
    let own = |of: u32| of == runner;
    for step in recording.steps.iter().filter(|step| own(step.runner)) {
        let name = recording.unit_name(step.unit);
        // A hit takes no time, and there are many.
        if step.fault.start < step.fault.end || step.copied_bytes > 0 {
            let args = json!({
                "pass": step.pass, "piece": step.piece, "asked_for_bytes": step.copied_bytes,
            });
            events.slice(track(runner, 0), &name, step.fault, &args)?;
        }
        if step.evicted_pages > 0 {
            let (process, track) = track(runner, 0);
            events.add(&json!({
                "ph": "i", "s": "t", "pid": process, "tid": track, "name": "pages given up",
                "ts": micros(step.fault.end), "args": {"pages": step.evicted_pages, "unit": name},
            }))?;
        }
    }
    for stall in recording.stalls.iter().filter(|stall| own(stall.runner)) {
        let name = stall.unit.map_or_else(|| "wait".to_owned(), |unit| recording.unit_name(unit));
        let args = json!({"pass": recording.pass_at(stall.time.start)});
        events.slice(track(runner, 1), &name, stall.time, &args)?;
    }
    Ok(())
}

/// What the pager held, where it changed.
fn counters(recording: &Recording, events: &mut Events<'_>) -> io::Result<()> {
    let mut points: Vec<(ModelTime, OnCard)> =
        recording.steps.iter().map(|step| (step.released, step.card)).collect();
    points.sort_by_key(|(time, _)| *time);
    let mut last = None;
    for (time, card) in points {
        if last.replace(card) == Some(card) {
            continue;
        }
        for (name, unit, value) in [
            ("free frames", "frames", card.free_frames),
            ("resident bytes", "bytes", card.resident_bytes),
            ("ring bytes", "bytes", card.ring_bytes),
        ] {
            events.add(&json!({
                "ph": "C", "pid": DEVICE, "name": name, "ts": micros(time), "args": {unit: value},
            }))?;
        }
    }
    Ok(())
}
