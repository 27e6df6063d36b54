//! What the control lock holds: streams and their workers, events, engines; and what the workers share with the device.
//!
//! Workers are joined when they have ended, never waited for here. May import the modules beside it but `card`.

#![deny(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use super::clock::{Engine, Engines};
use super::journal::Journal;
use super::memory::Memory;
use super::stream::{HoldState, Point, StreamQueue};
use super::watch::Seen;
use crate::device::{DeviceError, StreamId};
use crate::units::ModelTime;

/// Errors that are kept for later; more are dropped, the first tell the story.
const MOST_DEFERRED: usize = 64;

/// What the workers and the device both need.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) memory: Mutex<Memory>,
    pub(super) delay_seed: AtomicU64,
    pub(super) deferred: Mutex<Vec<DeviceError>>,
    /// What the watch over memory in use refused.
    pub(super) caught: Mutex<Vec<DeviceError>>,
    /// The text of the failure that lost the device.
    pub(super) lost: OnceLock<String>,
}

impl Shared {
    pub(super) fn defer(&self, error: DeviceError) {
        if let DeviceError::Lost { first, .. } = &error {
            let _ = self.lost.set(first.clone());
        }
        let mut deferred = self.deferred.lock();
        if deferred.len() < MOST_DEFERRED {
            deferred.push(error);
        }
    }

    /// Remembers what the watch over memory in use refused.
    pub(super) fn catch(&self, error: &DeviceError) {
        let mut caught = self.caught.lock();
        if caught.len() < MOST_DEFERRED {
            caught.push(error.clone());
        }
    }
}

#[derive(Debug)]
pub(super) struct StreamEntry {
    pub(super) queue: Arc<StreamQueue>,
    /// The modelled end of the stream's work.
    pub(super) end: ModelTime,
    /// What its next work comes after, where that is watched.
    pub(super) seen: Option<Seen>,
    pub(super) thread: Option<JoinHandle<()>>,
}

impl StreamEntry {
    /// The point that the stream has been given work up to.
    pub(super) fn point(&self) -> Point {
        Point {
            stream: Arc::clone(&self.queue),
            sequence: self.queue.enqueued(),
            time: self.end,
            seen: self.seen.as_ref().map(|seen| Arc::new(seen.clone())),
        }
    }

    /// The stream waits for a point of another one.
    pub(super) fn follow(&mut self, point: &Point) {
        if let Some(seen) = &mut self.seen {
            point.add_to(seen);
        }
    }
}

fn no_stream(call: &'static str, stream: StreamId) -> DeviceError {
    DeviceError::Misuse { call, why: format!("stream {} does not exist (any more)", stream.0) }
}

/// Streams, events and engines.
#[derive(Debug, Default)]
pub(super) struct Control {
    pub(super) streams: HashMap<u64, StreamEntry>,
    /// Each event's newest record.
    pub(super) events: HashMap<u64, Option<Point>>,
    pub(super) engines: Engines,
    /// Destroyed streams whose work may still run.
    pub(super) closing: Vec<(Arc<StreamQueue>, JoinHandle<()>)>,
    pub(super) next_stream: u64,
    pub(super) next_event: u64,
    /// What was done when, while somebody wants to know.
    pub(super) journal: Option<Journal>,
    pub(super) holds: Vec<Weak<HoldState>>,
    /// What the host was told is done, where memory in use is watched.
    pub(super) told: Option<Seen>,
}

impl Control {
    pub(super) fn stream(
        &mut self,
        call: &'static str,
        stream: StreamId,
    ) -> Result<&mut StreamEntry, DeviceError> {
        self.streams.get_mut(&stream.0).ok_or_else(|| no_stream(call, stream))
    }

    /// Places something on `stream` and an engine; answers the stream's entry.
    pub(super) fn schedule(
        &mut self,
        call: &'static str,
        stream: StreamId,
        engine: Engine,
        earliest: ModelTime,
        duration: Duration,
    ) -> Result<&mut StreamEntry, DeviceError> {
        let Self { streams, engines, .. } = self;
        let entry = streams.get_mut(&stream.0).ok_or_else(|| no_stream(call, stream))?;
        engines.schedule(engine, &mut entry.end, earliest, duration);
        Ok(entry)
    }

    /// Starts a stream with its worker.
    pub(super) fn start_stream(
        &mut self,
        shared: &Arc<Shared>,
        inline: bool,
    ) -> Result<StreamId, DeviceError> {
        self.reap();
        let id = StreamId(self.next_stream);
        let queue = Arc::new(StreamQueue::new(id, inline));
        let thread = if inline {
            None
        } else {
            let (queue, shared) = (Arc::clone(&queue), Arc::clone(shared));
            let builder = std::thread::Builder::new().name(format!("emulated-{}", id.0));
            let spawned = builder.spawn(move || super::stream::run_worker(&queue, &shared));
            Some(spawned.map_err(|error| DeviceError::Host {
                call: "create_stream",
                bytes: 0,
                why: error.to_string(),
            })?)
        };
        self.next_stream += 1;
        let seen = self.told.as_ref().map(|_| Seen::default());
        self.streams.insert(id.0, StreamEntry { queue, end: ModelTime::ZERO, seen, thread });
        Ok(id)
    }

    /// Takes a stream's name away; its work still runs.
    pub(super) fn end_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.stream("destroy_stream", stream)?;
        if let Some(StreamEntry { queue, thread: Some(thread), .. }) = self.streams.remove(&stream.0) {
            queue.close();
            self.closing.push((queue, thread));
        }
        self.reap();
        Ok(())
    }

    /// Joins workers that have ended.
    fn reap(&mut self) {
        let (ended, running): (Vec<_>, Vec<_>) =
            self.closing.drain(..).partition(|(_, thread)| thread.is_finished());
        self.closing = running;
        for (_, thread) in ended {
            let _ = thread.join();
        }
        self.holds.retain(|hold| hold.strong_count() > 0);
        if self.told.is_some() {
            let Self { streams, closing, told, .. } = self;
            let mut live: Vec<u64> = streams.keys().copied().collect();
            live.extend(closing.iter().map(|(queue, _)| queue.id().0));
            let all = streams.values_mut().filter_map(|entry| entry.seen.as_mut()).chain(told);
            all.for_each(|seen| seen.forget(|stream| live.contains(&stream)));
        }
    }

    /// Whether a stream's work may still run.
    pub(super) fn exists(&self, stream: u64) -> bool {
        self.streams.contains_key(&stream) || self.closing.iter().any(|(queue, _)| queue.id().0 == stream)
    }

    /// The host was told that the work up to `point` is done.
    pub(super) fn tell(&mut self, point: &Point) {
        if let Some(told) = &mut self.told {
            point.add_to(told);
        }
    }

    /// All queues, of destroyed streams too.
    pub(super) fn queues(&self) -> impl Iterator<Item = &Arc<StreamQueue>> {
        let streams = self.streams.values().map(|entry| &entry.queue);
        streams.chain(self.closing.iter().map(|(queue, _)| queue))
    }

    /// The end of everything that was enqueued so far.
    pub(super) fn all_points(&self) -> Vec<Point> {
        let time = self.engines.last_end();
        let point = |stream: &Arc<StreamQueue>| Point {
            stream: Arc::clone(stream),
            sequence: stream.enqueued(),
            time,
            seen: None,
        };
        self.queues().map(point).collect()
    }
}
