//! The watch over memory in use: whoever touches the same bytes must be ordered, not merely lucky.
//!
//! Every copy and kernel leaves a note at the pages of the frames that it touches, and at the host memory
//! that a copy reads or writes. Later work that overlaps a note, with one of the two writing, must come
//! after it: on the same stream, behind a fence that its stream waits for, or behind one that the host was
//! told is passed. Memory is taken away (unmapped, unlocked, rewritten by the host) only if the host was
//! told that all notes on it are done. So a missing wait is found whenever the code runs, not only when a
//! thread happens to be slow.
//!
//! The host writes for a while: from when it says so until it says that it is done, no copy may touch those
//! bytes, and nobody else may write them. Whichever of the two comes second is refused, so it does not matter
//! how fast a reader is.
//!
//! It under-reports in one place: what any thread of the host was told counts as known to all of them. With
//! [`History::keep_sites`] each note keeps the calls that led to it, so that both sides can be named.
//!
//! Pure books behind the device's memory lock. May import `units` and the errors.

#![deny(unsafe_code)]

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::sync::Arc;

use crate::device::DeviceError;
use crate::units::{DeviceAddress, DeviceRange};

/// Notes that one page, or the host's memory, keeps at most: it forgets the oldest rather than grow.
const MOST_NOTES: usize = 4096;

/// Calls that a site names, the nearest first.
const SHOWN_CALLS: usize = 4;

/// How far each stream is known to have come: its newest work, by stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen(Vec<(u64, u64)>);

impl Seen {
    fn covers(&self, stream: u64, sequence: u64) -> bool {
        let place = self.0.binary_search_by_key(&stream, |(stream, _)| *stream);
        place.is_ok_and(|place| self.0[place].1 >= sequence)
    }

    /// Work of `stream` up to `sequence` comes before.
    pub(super) fn note(&mut self, stream: u64, sequence: u64) {
        match self.0.binary_search_by_key(&stream, |(stream, _)| *stream) {
            Ok(place) => self.0[place].1 = self.0[place].1.max(sequence),
            Err(place) => self.0.insert(place, (stream, sequence)),
        }
    }

    /// What `other` has seen comes before, too.
    pub(super) fn join(&mut self, other: &Self) {
        for (stream, sequence) in &other.0 {
            self.note(*stream, *sequence);
        }
    }

    /// Forgets the streams that do not exist any more.
    pub(super) fn forget(&mut self, exists: impl Fn(u64) -> bool) {
        self.0.retain(|(stream, _)| exists(*stream));
    }
}

/// What work that is about to be enqueued, or the host, comes after.
pub(super) struct Before<'a> {
    /// The stream of the work and what that stream has waited for; none where the host itself acts.
    pub(super) stream: Option<(u64, &'a Seen)>,
    /// What the host was told is done.
    pub(super) host: &'a Seen,
    /// Whether a stream still exists: the work of one that is gone has ended.
    pub(super) exists: &'a dyn Fn(u64) -> bool,
}

impl Before<'_> {
    fn host_knows(&self, note: &Note) -> bool {
        self.host.covers(note.stream, note.sequence) || !(self.exists)(note.stream)
    }

    fn orders(&self, note: &Note) -> bool {
        let by_stream = self
            .stream
            .is_some_and(|(stream, seen)| stream == note.stream || seen.covers(note.stream, note.sequence));
        by_stream || self.host_knows(note)
    }
}

/// The calls that led to some work, where they are kept.
pub(super) type Site = Option<Arc<Backtrace>>;

/// The calls of this thread, as text for a message; empty where sites are not kept.
fn site_text(site: &Site) -> String {
    let Some(trace) = site else { return String::new() };
    let text = trace.to_string();
    // Not the device's own files, which every site has, nor those of the standard library.
    let foreign = ["/rustc/", "src/device/", "examples/cuda_standin/", "/.cargo/", "/library/"];
    let calls: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("at "))
        .filter(|place| !foreign.iter().any(|part| place.contains(part)))
        .map(|place| place.rsplit_once(':').map_or(place, |(line, _column)| line).trim_start_matches("./"))
        .take(SHOWN_CALLS)
        .collect();
    if calls.is_empty() { String::new() } else { format!(" (at {})", calls.join(", from ")) }
}

/// One use of memory by one operation.
#[derive(Clone, Debug)]
pub(super) struct Note {
    stream: u64,
    sequence: u64,
    call: &'static str,
    write: bool,
    /// The bytes within the page; of the host's memory, its addresses.
    from: u64,
    to: u64,
    /// The page's address that it was used through; zero for the host's memory.
    at: u64,
    site: Site,
}

impl Note {
    fn overlaps(&self, from: u64, to: u64) -> bool {
        self.from < to && from < self.to
    }
}

/// An operation, for its notes.
pub(super) struct Operation {
    pub(super) stream: u64,
    pub(super) sequence: u64,
    pub(super) call: &'static str,
    pub(super) site: Site,
}

impl Operation {
    /// A note of this operation on bytes `from .. to`, used through the page at `at`.
    pub(super) fn note(&self, from: u64, to: u64, at: u64, write: bool) -> Note {
        Note {
            stream: self.stream,
            sequence: self.sequence,
            call: self.call,
            write,
            from,
            to,
            at,
            site: self.site.clone(),
        }
    }

    /// The refusal of an operation that is not ordered after `earlier`, which touches the same bytes.
    pub(super) fn unordered(&self, range: DeviceRange, earlier: &Note) -> DeviceError {
        let why = format!(
            "{range:?} is {} by {} at stream {} #{}{} and now used at stream {} #{}{}, and nothing orders the second after the first",
            if earlier.write { "written" } else { "read" },
            earlier.call,
            earlier.stream,
            earlier.sequence,
            site_text(&earlier.site),
            self.stream,
            self.sequence,
            site_text(&self.site),
        );
        DeviceError::Misuse { call: self.call, why }
    }

    /// The refusal of a copy that touches what the host writes at that time.
    pub(super) fn under_the_host(&self, range: DeviceRange, writer: &Writing) -> DeviceError {
        let why = format!(
            "the host memory {range:?} is written by the host{} and now used at stream {} #{}{}, before that write has ended",
            site_text(&writer.site),
            self.stream,
            self.sequence,
            site_text(&self.site),
        );
        DeviceError::Misuse { call: self.call, why }
    }
}

/// Bytes of its own memory that the host writes, from when it said so until it says that it is done.
#[derive(Debug)]
pub(super) struct Writing {
    from: u64,
    to: u64,
    site: Site,
}

/// A frame's page: the frame's place and the page's number in it.
type PageKey = (u32, u32);

/// The notes.
#[derive(Debug, Default)]
pub(super) struct History {
    pages: HashMap<PageKey, Vec<Note>>,
    host: Vec<Note>,
    /// What the host writes now: as many as there are readers.
    writing: Vec<Writing>,
    sites: bool,
}

impl History {
    /// Keeps the calls that lead to each operation from here on: dear, for who looks for a mistake.
    pub(super) fn keep_sites(&mut self, keep: bool) {
        self.sites = keep;
    }

    /// The calls that led here.
    pub(super) fn site(&self) -> Site {
        self.sites.then(|| Arc::new(Backtrace::force_capture()))
    }

    /// The note that forbids `new` at a page.
    pub(super) fn conflict(&self, page: PageKey, new: &Note, before: &Before<'_>) -> Option<&Note> {
        conflict(self.pages.get(&page)?, new, before)
    }

    /// The note that forbids `new` in the host's memory.
    pub(super) fn host_conflict(&self, new: &Note, before: &Before<'_>) -> Option<&Note> {
        conflict(&self.host, new, before)
    }

    /// Notes a use of a page.
    pub(super) fn add(&mut self, page: PageKey, new: Note, before: &Before<'_>) {
        add(self.pages.entry(page).or_default(), new, before);
    }

    /// Notes a use of the host's memory.
    pub(super) fn add_host(&mut self, new: Note, before: &Before<'_>) {
        add(&mut self.host, new, before);
    }

    /// The newest use of a page through its address `at` that the host was not told the end of, if there is one.
    /// Otherwise the uses through it are forgotten.
    pub(super) fn leave(&mut self, page: PageKey, at: u64, before: &Before<'_>) -> Option<Note> {
        let notes = self.pages.get_mut(&page)?;
        notes.retain(|note| !before.host_knows(note));
        notes.iter().rev().find(|note| note.at == at).cloned()
    }

    /// The newest use of the host's memory `from .. to` that the host was not told the end of, if there is one.
    pub(super) fn leave_host(&mut self, from: u64, to: u64, before: &Before<'_>) -> Option<Note> {
        self.host.retain(|note| !before.host_knows(note));
        self.host.iter().rev().find(|note| note.overlaps(from, to)).cloned()
    }

    /// The host writes `from .. to` until [`Self::end_write`].
    pub(super) fn begin_write(&mut self, from: u64, to: u64) {
        if from < to {
            self.writing.push(Writing { from, to, site: self.site() });
        }
    }

    /// Ends what [`Self::begin_write`] began with the same numbers.
    pub(super) fn end_write(&mut self, from: u64, to: u64) {
        if let Some(place) = self.writing.iter().position(|writing| (writing.from, writing.to) == (from, to))
        {
            self.writing.swap_remove(place);
        }
    }

    /// Who writes any byte of the host's memory `from .. to` now.
    pub(super) fn writer(&self, from: u64, to: u64) -> Option<&Writing> {
        self.writing.iter().find(|writing| writing.from < to && from < writing.to)
    }

    /// A frame is gone.
    pub(super) fn forget_frame(&mut self, place: u32, pages: u32) {
        for part in 0..pages {
            self.pages.remove(&(place, part));
        }
    }

    /// The refusal to take memory away from under `user`.
    pub(super) fn in_use(
        &self,
        call: &'static str,
        what: &str,
        range: DeviceRange,
        user: &Note,
    ) -> DeviceError {
        let why = format!(
            "{what} {range:?} was in use by {} enqueued at stream {} #{}{}, whose end nobody waited for before {call}{}",
            user.call,
            user.stream,
            user.sequence,
            site_text(&user.site),
            site_text(&self.site()),
        );
        DeviceError::Misuse { call, why }
    }

    /// The refusal to write, or give up, what the host writes already.
    pub(super) fn is_written(&self, call: &'static str, range: DeviceRange, writer: &Writing) -> DeviceError {
        let why = format!(
            "the host memory {range:?} is written by the host{}, and before that has ended there is {call}{}",
            site_text(&writer.site),
            site_text(&self.site()),
        );
        DeviceError::Misuse { call, why }
    }
}

fn conflict<'n>(notes: &'n [Note], new: &Note, before: &Before<'_>) -> Option<&'n Note> {
    notes
        .iter()
        .find(|note| (note.write || new.write) && note.overlaps(new.from, new.to) && !before.orders(note))
}

fn add(notes: &mut Vec<Note>, new: Note, before: &Before<'_>) {
    // What the host knows to be done bears on nothing to come; what `new` comes after and covers, in bytes and
    // in kind, is answered for by `new`.
    notes.retain(|note| {
        let covered = new.from <= note.from
            && note.to <= new.to
            && (new.write || !note.write)
            && note.at == new.at
            && before.orders(note);
        !covered && !before.host_knows(note)
    });
    if notes.len() >= MOST_NOTES {
        notes.drain(..MOST_NOTES / 4);
    }
    notes.push(new);
}

/// The bytes of `range` in the page of `page_bytes` at `at`, as offsets.
pub(super) fn within(range: DeviceRange, at: DeviceAddress, page_bytes: u64) -> (u64, u64) {
    let from = range.start.0.max(at.0) - at.0;
    let to = (range.start.0 + range.bytes).min(at.0 + page_bytes) - at.0;
    (from, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: &dyn Fn(u64) -> bool = &|_| true;

    fn operation(stream: u64, sequence: u64) -> Operation {
        Operation { stream, sequence, call: "copy_to_device", site: None }
    }

    fn seen(pairs: &[(u64, u64)]) -> Seen {
        let mut seen = Seen::default();
        for (stream, sequence) in pairs {
            seen.note(*stream, *sequence);
        }
        seen
    }

    #[test]
    fn work_of_two_streams_on_the_same_bytes_needs_an_order_if_one_writes() {
        let (none, host) = (Seen::default(), Seen::default());
        let mut history = History::default();
        let of = |stream, seen| Before { stream: Some((stream, seen)), host: &host, exists: EVERY };
        history.add((3, 0), operation(1, 5).note(0, 100, 4096, true), &of(1, &none));
        let read = operation(2, 1).note(50, 60, 4096, false);
        assert!(history.conflict((3, 0), &read, &of(2, &none)).is_some());
        assert!(history.conflict((3, 1), &read, &of(2, &none)).is_none(), "another page");
        assert!(
            history.conflict((3, 0), &operation(2, 1).note(100, 160, 4096, true), &of(2, &none)).is_none()
        );
        assert!(history.conflict((3, 0), &read, &of(1, &none)).is_none(), "its own stream");
        let (older, told) = (seen(&[(1, 4)]), seen(&[(1, 5)]));
        assert!(history.conflict((3, 0), &read, &of(2, &older)).is_some(), "an older fence");
        assert!(history.conflict((3, 0), &read, &of(2, &told)).is_none());
        let by_host = Before { stream: Some((2, &none)), host: &told, exists: EVERY };
        assert!(history.conflict((3, 0), &read, &by_host).is_none(), "the host was told");
        let gone = Before { stream: Some((2, &none)), host: &host, exists: &|stream| stream != 1 };
        assert!(history.conflict((3, 0), &read, &gone).is_none(), "its stream has ended");
    }

    #[test]
    fn a_later_note_answers_for_the_one_that_it_covers_and_no_other() {
        let host = Seen::default();
        let after = seen(&[(1, 1)]);
        let mut history = History::default();
        let first = Before { stream: Some((1, &host)), host: &host, exists: EVERY };
        history.add((0, 0), operation(1, 1).note(0, 100, 4096, true), &first);
        let second = Before { stream: Some((2, &after)), host: &host, exists: EVERY };
        history.add((0, 0), operation(2, 1).note(0, 100, 4096, false), &second);
        assert_eq!(history.pages[&(0, 0)].len(), 2, "a read does not answer for a write");
        history.add((0, 0), operation(2, 2).note(0, 100, 4096, true), &second);
        assert_eq!(history.pages[&(0, 0)].len(), 1);
    }

    #[test]
    fn a_page_is_left_through_an_address_only_when_the_host_knows_its_uses_there() {
        let none = Seen::default();
        let mut history = History::default();
        let before = Before { stream: Some((1, &none)), host: &none, exists: EVERY };
        history.add((0, 0), operation(1, 1).note(0, 9, 4096, false), &before);
        history.add((0, 0), operation(1, 2).note(0, 9, 8192, false), &before);
        let told = seen(&[(1, 1)]);
        let now = Before { stream: None, host: &told, exists: EVERY };
        assert!(history.leave((0, 0), 4096, &now).is_none());
        assert_eq!(history.leave((0, 0), 8192, &now).map(|note| note.sequence), Some(2));
    }

    #[test]
    fn the_host_rewrites_its_memory_only_when_it_knows_the_copies_to_be_done() {
        let none = Seen::default();
        let mut history = History::default();
        let before = Before { stream: Some((1, &none)), host: &none, exists: EVERY };
        history.add_host(operation(1, 3).note(1000, 2000, 0, false), &before);
        let now = Before { stream: None, host: &none, exists: EVERY };
        assert!(history.leave_host(2000, 3000, &now).is_none());
        let user = history.leave_host(1999, 3000, &now).unwrap();
        let range = DeviceRange::new(DeviceAddress(1999), 1001);
        let text = history.in_use("host_write", "host memory", range, &user).to_string();
        assert!(text.contains("stream 1 #3") && text.contains("host_write"), "{text}");
        let told = seen(&[(1, 3)]);
        let now = Before { stream: None, host: &told, exists: EVERY };
        assert!(history.leave_host(1999, 3000, &now).is_none());
    }

    #[test]
    fn nobody_touches_what_the_host_writes_until_it_says_that_it_is_done() {
        let mut history = History::default();
        history.begin_write(1000, 2000);
        history.begin_write(3000, 4000);
        assert!(history.writer(1999, 2001).is_some() && history.writer(0, 1001).is_some());
        assert!(history.writer(2000, 3000).is_none(), "between the two");
        let range = DeviceRange::new(DeviceAddress(1500), 10);
        let writer = history.writer(1500, 1510).unwrap();
        let of_copy = operation(7, 3).under_the_host(range, writer).to_string();
        assert!(of_copy.contains("stream 7 #3") && of_copy.contains("copy_to_device"), "{of_copy}");
        let of_write = history.is_written("host_write", range, writer).to_string();
        assert!(of_write.contains("host_write"), "{of_write}");
        history.end_write(1000, 1999);
        assert!(history.writer(1500, 1510).is_some(), "another write's end");
        history.end_write(1000, 2000);
        assert!(history.writer(0, 3000).is_none() && history.writer(3500, 3501).is_some());
    }

    #[test]
    fn what_is_seen_only_grows_and_streams_that_are_gone_are_forgotten() {
        let mut all = seen(&[(5, 2), (1, 7)]);
        all.join(&seen(&[(5, 1), (3, 3), (1, 9)]));
        assert_eq!(all, seen(&[(1, 9), (3, 3), (5, 2)]));
        all.forget(|stream| stream != 3);
        assert!(all.covers(1, 9) && !all.covers(1, 10) && !all.covers(3, 1));
    }
}
