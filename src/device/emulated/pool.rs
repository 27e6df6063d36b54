//! The activation pool's accounts: chunks taken from the device, blocks in use, blocks that are free from
//! a point of a stream on.
//!
//! Pure bookkeeping over addresses; the memory that chunks lie in is `memory`'s. Which block an
//! allocation gets depends on sizes and modelled time alone, never on how far the worker threads are or
//! where the system put a chunk, so figures are repeatable. A plain value behind the memory lock. May
//! import `stream` for points.

#![deny(unsafe_code)]

use std::collections::BTreeMap;

use super::stream::Point;
use crate::device::{PoolFigures, StreamId};
use crate::units::{DeviceAddress, DeviceRange, ModelTime};

/// What every allocation is rounded up to and aligned to, in bytes.
const ALIGNMENT: u64 = 256;

/// Rounds a request up to what the pool hands out.
pub(super) fn rounded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(ALIGNMENT)
}

#[derive(Debug)]
struct FreeBlock {
    bytes: u64,
    /// What must have been passed before somebody else may use it.
    points: Vec<Point>,
}

impl FreeBlock {
    fn is_settled(&self, now: ModelTime) -> bool {
        self.points.iter().all(|point| point.time <= now)
    }

    fn suits(&self, stream: StreamId, now: ModelTime) -> bool {
        self.points.iter().all(|point| point.time <= now || point.stream.id() == stream)
    }

    /// Whether the block and its neighbour may become one without delaying the use of either.
    fn joins(&self, other: &Self, now: ModelTime) -> bool {
        let one_stream = || match (&self.points[..], &other.points[..]) {
            ([a], [b]) => a.stream.id() == b.stream.id(),
            _ => false,
        };
        (self.is_settled(now) && other.is_settled(now)) || one_stream()
    }

    fn join(&mut self, other: Self) {
        self.bytes += other.bytes;
        for point in other.points {
            match self.points.iter_mut().find(|mine| mine.stream.id() == point.stream.id()) {
                Some(mine) if mine.sequence >= point.sequence => {}
                Some(mine) => *mine = point,
                None => self.points.push(point),
            }
        }
    }
}

/// A block that was taken.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) range: DeviceRange,
    /// Points of other streams that the taking stream comes after; those that are not complete it has to wait for.
    pub(super) waits: Vec<Point>,
    /// The modelled time of the latest of them that the taker's clock has not reached.
    pub(super) until: ModelTime,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    start: DeviceAddress,
    bytes: u64,
}

/// The pool.
#[derive(Debug, Default)]
pub(super) struct Pool {
    chunks: BTreeMap<u64, Chunk>,
    next_chunk: u64,
    /// By chunk and offset, so that the order is that of creation and not of addresses.
    free: BTreeMap<(u64, u64), FreeBlock>,
    /// Live allocations by address: chunk and bytes.
    live: BTreeMap<DeviceAddress, (u64, u64)>,
    figures: PoolFigures,
}

impl Pool {
    pub(super) fn figures(&self) -> PoolFigures {
        self.figures
    }

    /// Adds a chunk that the device gave.
    pub(super) fn add_chunk(&mut self, range: DeviceRange) {
        let number = self.next_chunk;
        self.next_chunk += 1;
        self.chunks.insert(number, Chunk { start: range.start, bytes: range.bytes });
        self.free.insert((number, 0), FreeBlock { bytes: range.bytes, points: Vec::new() });
        self.figures.reserved += range.bytes;
    }

    /// Takes a block of `bytes` (rounded) for `stream`: the smallest that suits, the oldest of equals.
    /// With `any`, also one that the stream has to wait for.
    pub(super) fn take(&mut self, bytes: u64, stream: StreamId, now: ModelTime, any: bool) -> Option<Taken> {
        self.coalesce(now);
        let suits = |block: &FreeBlock| block.bytes >= bytes && (any || block.suits(stream, now));
        let key = self
            .free
            .iter()
            .filter(|(_, block)| suits(block))
            .min_by_key(|(key, block)| (block.bytes, **key))
            .map(|(key, _)| *key)?;
        let mut block = self.free.remove(&key)?;
        let chunk = self.chunks.get(&key.0)?;
        if block.bytes > bytes {
            let rest = FreeBlock { bytes: block.bytes - bytes, points: block.points.clone() };
            self.free.insert((key.0, key.1 + bytes), rest);
        }
        let start = chunk.start.offset(key.1);
        self.live.insert(start, (key.0, bytes));
        self.figures.used += bytes;
        block.points.retain(|point| point.stream.id() != stream);
        let until = block.points.iter().map(|point| point.time).max().unwrap_or(ModelTime::ZERO);
        Some(Taken { range: DeviceRange::new(start, bytes), waits: block.points, until })
    }

    /// Gives the allocation at `start` back from `point` on; false if there is none.
    pub(super) fn give_back(&mut self, range: DeviceRange, point: Point, now: ModelTime) -> bool {
        let Some(&(chunk, bytes)) = self.live.get(&range.start) else { return false };
        if rounded(range.bytes) != Some(bytes) {
            return false;
        }
        let Some(start) = self.chunks.get(&chunk).map(|chunk| chunk.start) else { return false };
        self.live.remove(&range.start);
        self.figures.used -= bytes;
        let offset = range.start.0 - start.0;
        self.free.insert((chunk, offset), FreeBlock { bytes, points: vec![point] });
        self.coalesce(now);
        true
    }

    /// Whether `range` lies in one live allocation.
    pub(super) fn holds(&self, range: DeviceRange) -> bool {
        self.live
            .range(..=range.start)
            .next_back()
            .is_some_and(|(start, (_, bytes))| DeviceRange::new(*start, *bytes).contains(range))
    }

    /// The chunks to hand back, newest first, so that at most `keep` bytes stay reserved as far as what
    /// is in use permits; with the points to wait for before each may go.
    pub(super) fn idle_chunks(&mut self, keep: u64, now: ModelTime) -> Vec<(DeviceRange, Vec<Point>)> {
        self.coalesce(now);
        let mut reserved = self.figures.reserved;
        let mut idle = Vec::new();
        for (number, chunk) in self.chunks.iter().rev() {
            if reserved <= keep {
                break;
            }
            let whole = self.free.get(&(*number, 0)).filter(|block| block.bytes == chunk.bytes);
            if let Some(block) = whole.filter(|block| block.is_settled(now)) {
                let waits = block.points.iter().filter(|point| !point.is_complete()).cloned().collect();
                idle.push((DeviceRange::new(chunk.start, chunk.bytes), waits));
                reserved -= chunk.bytes;
            }
        }
        idle
    }

    /// Forgets an idle chunk; false if it is not idle (any more).
    pub(super) fn remove_chunk(&mut self, range: DeviceRange) -> bool {
        let number = self.chunks.iter().find(|(_, chunk)| chunk.start == range.start).map(|(n, _)| *n);
        let Some(number) = number else { return false };
        let idle = self
            .free
            .get(&(number, 0))
            .is_some_and(|block| block.bytes == range.bytes && block.points.iter().all(Point::is_complete));
        if idle {
            self.free.remove(&(number, 0));
            self.chunks.remove(&number);
            self.figures.reserved -= range.bytes;
        }
        idle
    }

    /// The number of chunks.
    pub(super) fn chunk_count(&self) -> u64 {
        self.chunks.len() as u64
    }

    /// Joins neighbours that may be joined.
    fn coalesce(&mut self, now: ModelTime) {
        let mut at = self.free.keys().next().copied();
        while let Some(key) = at {
            let next = self.free.range((std::ops::Bound::Excluded(key), std::ops::Bound::Unbounded));
            let next = next.map(|(key, _)| *key).next();
            at = next;
            let (Some(block), Some(next)) = (self.free.get(&key), next) else { continue };
            let touches = next.0 == key.0 && next.1 == key.1 + block.bytes;
            if !touches || !self.free.get(&next).is_some_and(|other| block.joins(other, now)) {
                continue;
            }
            if let Some(other) = self.free.remove(&next)
                && let Some(block) = self.free.get_mut(&key)
            {
                block.join(other);
                at = Some(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::emulated::stream::StreamQueue;

    fn point(stream: u64, time: u64) -> Point {
        let stream = Arc::new(StreamQueue::new(StreamId(stream), false));
        Point { stream, sequence: 0, time: ModelTime(time), seen: None }
    }

    fn pool(chunk: u64) -> Pool {
        let mut pool = Pool::default();
        pool.add_chunk(DeviceRange::new(DeviceAddress(0x10_0000), chunk));
        pool
    }

    fn take(pool: &mut Pool, bytes: u64, stream: u64, now: u64) -> Option<DeviceRange> {
        pool.take(bytes, StreamId(stream), ModelTime(now), false).map(|taken| taken.range)
    }

    #[test]
    fn a_freed_block_serves_its_own_stream_at_once_and_others_from_its_point_on() {
        let mut pool = pool(1024);
        let first = take(&mut pool, 1024, 1, 0).unwrap();
        assert!(pool.give_back(first, point(1, 500), ModelTime(10)));
        assert_eq!(take(&mut pool, 256, 2, 499), None);
        let again = take(&mut pool, 256, 1, 10).unwrap();
        assert_eq!(again.start, first.start);
        let later = take(&mut pool, 256, 2, 500).unwrap();
        assert_eq!(later.start, first.start.offset(256));
        assert_eq!(pool.figures(), PoolFigures { reserved: 1024, used: 512 });
    }

    #[test]
    fn any_block_will_do_when_the_stream_waits_for_it() {
        let mut pool = pool(1024);
        let first = take(&mut pool, 1024, 1, 0).unwrap();
        pool.give_back(first, point(1, 500), ModelTime(0));
        let taken = pool.take(1024, StreamId(2), ModelTime(0), true).unwrap();
        assert_eq!(taken.until, ModelTime(500));
    }

    #[test]
    fn neighbours_join_so_that_a_chunk_becomes_whole_again() {
        let mut pool = pool(1024);
        let blocks: Vec<_> = (0..4).map(|_| take(&mut pool, 256, 1, 0).unwrap()).collect();
        assert_eq!(take(&mut pool, 256, 1, 0), None);
        for (index, time) in [(2, 30), (0, 10), (3, 40), (1, 20)] {
            assert!(pool.give_back(blocks[index], point(index as u64, time), ModelTime(0)));
        }
        assert!(pool.idle_chunks(0, ModelTime(39)).is_empty());
        assert_eq!(pool.idle_chunks(1024, ModelTime(40)).len(), 0);
        let idle = pool.idle_chunks(0, ModelTime(40));
        assert_eq!(idle.len(), 1);
        assert!(pool.remove_chunk(idle[0].0));
        assert!(!pool.remove_chunk(idle[0].0));
        assert_eq!(pool.figures(), PoolFigures::default());
    }

    #[test]
    fn what_is_not_an_allocation_is_not_given_back() {
        let mut pool = pool(1024);
        let block = take(&mut pool, 512, 1, 0).unwrap();
        assert!(pool.holds(block) && pool.holds(block.part(100, 412).unwrap()));
        assert!(!pool.holds(DeviceRange::new(block.start, 513)));
        let inner = block.part(256, 256).unwrap();
        assert!(!pool.give_back(inner, point(1, 0), ModelTime(0)));
        assert!(!pool.give_back(DeviceRange::new(block.start, 256), point(1, 0), ModelTime(0)));
        assert!(pool.give_back(block, point(1, 0), ModelTime(0)));
        assert!(!pool.give_back(block, point(1, 0), ModelTime(0)));
    }

    #[test]
    fn random_use_never_hands_out_overlapping_blocks_and_always_comes_back_whole() {
        let mut seed = 0x5EED_u64;
        println!("seed {seed:#x}");
        let mut random = |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        let mut pool = pool(64 * 256);
        let mut held: Vec<DeviceRange> = Vec::new();
        for step in 0..3_000 {
            if random(2) == 0 && !held.is_empty() {
                let index = usize::try_from(random(held.len() as u64)).unwrap();
                let block = held.swap_remove(index);
                let point = point(random(3), step + random(20));
                assert!(pool.give_back(block, point, ModelTime(step)));
            } else {
                let bytes = (1 + random(9)) * 256;
                if let Some(block) = take(&mut pool, bytes, random(3), step) {
                    assert!(held.iter().all(|other| !other.overlaps(block)));
                    held.push(block);
                }
            }
            assert_eq!(pool.figures().used, held.iter().map(|block| block.bytes).sum::<u64>());
        }
        for block in held {
            pool.give_back(block, point(0, 3_000), ModelTime(3_000));
        }
        assert_eq!(pool.idle_chunks(0, ModelTime(4_000)).len(), 1);
    }
}
