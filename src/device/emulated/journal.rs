//! A record of what the card did when, on its modelled clock: off unless somebody asks for it.
//!
//! Owned by the device's control state and written under its lock, where an operation gets its times. It is
//! bounded: what comes after it is full is counted, not kept. While it is off, an operation costs one look at
//! an `Option`. May import `units` and what `device` itself offers.

#![deny(unsafe_code)]

use std::time::Duration;

use super::stream::Work;
use crate::device::StreamId;
use crate::units::{DeviceRange, ModelTime};

/// What an operation was.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OperationKind {
    /// A copy from the host to the card; it occupies the link.
    ToDevice,
    /// A copy from the card to the host.
    ToHost,
    /// Compute that was charged to a stream.
    Compute,
    /// A stream stood still for an event of another one.
    Wait,
    /// A read of a file.
    Read,
}

/// One operation, with its modelled times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operation {
    /// What it was.
    pub kind: OperationKind,
    /// The stream that it was given to; none for a read.
    pub stream: Option<StreamId>,
    /// The time of the thread that asked for it.
    pub issued: ModelTime,
    /// When it began.
    pub start: ModelTime,
    /// When it ended; not before `start`.
    pub end: ModelTime,
    /// The device memory that a copy wrote or read; empty for everything else.
    pub range: DeviceRange,
    /// Bytes that were moved.
    pub bytes: u64,
}

/// What was recorded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Journal {
    /// The operations in the order in which they were asked for.
    pub operations: Vec<Operation>,
    /// Operations that came after it was full.
    pub dropped: u64,
    most: usize,
}

impl Journal {
    /// An empty one for at most `most` operations.
    pub(super) fn new(most: usize) -> Self {
        Self { operations: Vec::new(), dropped: 0, most }
    }

    /// Starts again; answers what was recorded.
    pub(super) fn take(&mut self) -> Self {
        let empty = Self::new(self.most);
        std::mem::replace(self, empty)
    }

    /// Notes an operation.
    pub(super) fn note(&mut self, operation: Operation) {
        if self.operations.len() < self.most {
            self.operations.push(operation);
        } else {
            self.dropped += 1;
        }
    }

    /// Notes a copy that ends at `end` after `duration`; other work is none of the journal's.
    pub(super) fn note_copy(
        &mut self,
        work: &Work,
        stream: StreamId,
        issued: ModelTime,
        end: ModelTime,
        duration: Duration,
    ) {
        let (kind, range) = match work {
            Work::ToDevice { to, .. } => (OperationKind::ToDevice, *to),
            Work::ToHost { from, .. } => (OperationKind::ToHost, *from),
            _ => return,
        };
        let start = before(end, duration);
        self.note(Operation { kind, stream: Some(stream), issued, start, end, range, bytes: range.bytes });
    }
}

/// The time `duration` before `end`.
pub(super) fn before(end: ModelTime, duration: Duration) -> ModelTime {
    ModelTime(end.0.saturating_sub(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_journal_counts_what_it_does_not_keep() {
        let operation = Operation {
            kind: OperationKind::Read,
            stream: None,
            issued: ModelTime(1),
            start: ModelTime(2),
            end: ModelTime(3),
            range: DeviceRange::default(),
            bytes: 4,
        };
        let mut journal = Journal::new(2);
        (0..5).for_each(|_| journal.note(operation));
        let taken = journal.take();
        assert_eq!((taken.operations.len(), taken.dropped), (2, 3));
        assert_eq!((journal.operations.len(), journal.dropped), (0, 0));
        journal.note(operation);
        assert_eq!(journal.operations.len(), 1);
    }
}
