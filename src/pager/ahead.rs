//! Reading ahead: from the file into staging memory, before the pages have frames.
//!
//! The first of two stages. Faults in pass order make a window grow, up to
//! [`super::PagerOptions::read_ahead_bytes`]; the pages that follow, and that are neither on the card nor in
//! staging memory, are read. A fault, or prefetch, which claims their frames finds them there, or on the
//! way. Those that stay and that a frame is free for are claimed at once, so that they are copied as soon as they
//! were read. A fault out of order forgets at once what was read for its model and not claimed, and begins again with
//! a window of nothing. So a wrong guess costs at most one window of reads, and copies only of what is to stay.
//!
//! The window, the cursor and what was read lie in [`Ahead`], under the control lock. Only faults decide,
//! by the place in the pass that they have reached, and never by how far the readers are: so what is asked
//! for, and what is copied at once, is the same in every run.

#![deny(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use super::claim;
use super::copies::{PageSource, copy_pages};
use super::core::{Control, Core};
use super::frames::{NONE, Role};
use super::keep;
use super::load::{self, Source, fail_pages, pump, source_of};
use super::mutations::Mutation;
use super::reclaim::{self, TakeFrom};
use crate::staging::StagingBuffer;
use crate::units::ModelTime;

/// Pages that one call looks at, at most.
const LOOKS: u32 = 512;

/// Spans between two faults that may all be on the card, so that the second still counts as the next.
const MOST_BETWEEN: u32 = 256;

/// What was read ahead, and how far.
#[derive(Debug)]
pub(super) struct Ahead {
    /// Runs that were read and that no frame was claimed for.
    runs: VecDeque<ReadRun>,
    /// By the model's place.
    windows: Vec<Window>,
    /// Whether something that was asked for ahead was wanted since the last fault.
    pub(super) served: bool,
}

/// A run of pages in staging memory.
#[derive(Debug)]
pub(super) struct ReadRun {
    pub(super) model: u32,
    pub(super) first: u32,
    pub(super) pages: u32,
    pub(super) buffer: StagingBuffer,
    /// The modelled time from which its bytes are there.
    pub(super) available: ModelTime,
}

/// How far ahead of its faults a model is read.
#[derive(Clone, Debug, Default)]
struct Window {
    /// The place in the pass of the last fault that was no hit.
    last: Option<u32>,
    /// The place in the pass, and the page, that reading goes on at.
    next: u32,
    next_page: u32,
    /// Bytes that may be ahead.
    bytes: u64,
    /// Places that the faults have gone through so far.
    gone: u64,
    /// What was asked for and not reached yet: the count of places at which it will be, and its pages.
    asked: VecDeque<(u64, u32)>,
}

/// Places from one to another, forwards, also past the end of a pass of `places`.
fn distance(from: u32, to: u32, places: u32) -> u32 {
    if to >= from { to - from } else { to + places - from }
}

impl Window {
    /// Notes a fault at `place` of a pass of `places`. `follows` says whether it was the one expected.
    fn note(&mut self, place: u32, places: u32, follows: bool, chunk_bytes: u64, depth: u64) {
        // The order may have become shorter since the last fault.
        let known = self.last.filter(|last| *last < places && self.next < places);
        let moved = known.map_or(0, |last| distance(last, place, places));
        let overtaken = known.is_none_or(|last| moved >= distance(last, self.next, places));
        self.gone += u64::from(moved);
        if !follows || known.is_none() {
            self.asked.clear();
        }
        while self.asked.front().is_some_and(|(at, _)| *at <= self.gone) {
            self.asked.pop_front();
        }
        self.bytes = match (follows, self.bytes) {
            (false, _) => 0,
            (true, 0) => (2 * chunk_bytes).min(depth),
            (true, bytes) => bytes.saturating_mul(2).min(depth),
        };
        if overtaken || !follows {
            self.next = if place + 1 >= places { 0 } else { place + 1 };
            self.next_page = 0;
        }
        self.last = Some(place);
    }
}

impl Ahead {
    pub(super) fn new() -> Self {
        Self { runs: VecDeque::with_capacity(64), windows: Vec::new(), served: false }
    }

    /// The run that holds a page, and how many of its pages come from there on.
    pub(super) fn find(&self, model: u32, page: u32) -> Option<(usize, u32)> {
        let holds = |run: &ReadRun| run.model == model && (run.first..run.first + run.pages).contains(&page);
        let place = self.runs.iter().position(holds)?;
        Some((place, self.runs[place].first + self.runs[place].pages - page))
    }

    pub(super) fn push(&mut self, run: ReadRun) {
        self.runs.push_back(run);
    }

    /// Pages in staging memory ahead of their need.
    pub(super) fn pages(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.pages)).sum()
    }

    /// Whether anything is in staging memory ahead of its need.
    pub(super) fn holds_any(&self) -> bool {
        !self.runs.is_empty()
    }

    /// Gives back what was read ahead, of one model or of all.
    pub(super) fn drop_runs(&mut self, model: Option<u32>) {
        self.runs.retain(|run| model.is_some_and(|model| run.model != model));
        for (id, window) in (0..).zip(&mut self.windows) {
            if model.is_none_or(|model| id == model) {
                window.asked.clear();
            }
        }
    }

    /// Forgets a model that goes away.
    pub(super) fn forget(&mut self, model: u32) {
        self.drop_runs(Some(model));
        if let Some(window) = self.windows.get_mut(model as usize) {
            *window = Window::default();
        }
    }

    fn window(&mut self, model: u32) -> &mut Window {
        if self.windows.len() <= model as usize {
            self.windows.resize(model as usize + 1, Window::default());
        }
        &mut self.windows[model as usize]
    }
}

/// Claims frames for the pages that follow page `last` in the run that was read ahead with it, as far as
/// frames are free for them: then they are one copy with it. So small units do not make small copies.
/// Answers how many pages it claimed.
pub(super) fn gather(core: &Core, control: &mut Control, id: u32, last: u32) -> u32 {
    let following = match source_of(control, id, last) {
        (Source::Ahead(_) | Source::Load(_), pages) => pages - 1,
        (Source::Kept(_) | Source::File, _) => 0,
    };
    claim_run(core, control, id, last + 1, following)
}

/// Claims frames for up to `count` pages from `first` on, as far as they stay, lack their bytes, and frames are
/// free for them: nothing is taken from anybody. Answers how many it claimed.
fn claim_run(core: &Core, control: &mut Control, id: u32, first: u32, count: u32) -> u32 {
    let mut mapped = Vec::new();
    let mut claimed = 0;
    for page in first..first + count {
        let Some(model) = control.model(id) else { break };
        // What has no place in the pass is left to its fault: without a rank nobody could take it again.
        let stays = model.pages[page as usize].slot == NONE
            && model.order.has_page(page)
            && !control.is_present(id, page);
        let pinned =
            model.layout.spans_of_page(page).any(|span| model.words[span as usize].0.view().pins() > 0);
        if !stays || pinned || model.pages[page as usize].frame != NONE {
            break;
        }
        let frame = reclaim::obtain(core, control, id, Role::Resident, TakeFrom::Nobody);
        let Ok(Some(frame)) = frame else { break };
        if claim::remap(control, id, page, frame, &mut mapped).is_err() {
            break;
        }
        claimed += 1;
    }
    // A device that fails here says so to the fault that needs the pages.
    if claim::set_access(control, id, &mapped).is_err() {
        claim::drop_mappings(control, id, &mapped);
        return 0;
    }
    for page in first..first + claimed {
        claim::occupy(control, id, page);
    }
    claimed
}

/// Copies `count` pages from `first` on out of a run that was read ahead; the rest of it stays.
pub(super) fn copy_run(core: &Arc<Core>, control: &mut Control, place: usize, first: u32, count: u32) {
    let Some(run) = control.loads.ahead.runs.remove(place) else { return };
    control.loads.ahead.served = true;
    let ReadRun { model: id, first: start, pages, mut buffer, available } = run;
    let end = first + count;
    if end < start + pages
        && let Some(rest) = buffer.split_off(end - start)
    {
        let pages = start + pages - end;
        control.loads.ahead.push(ReadRun { model: id, first: end, pages, buffer: rest, available });
    }
    if start < first
        && let Some(wanted) = buffer.split_off(first - start)
    {
        let front = std::mem::replace(&mut buffer, wanted);
        let pages = first - start;
        control.loads.ahead.push(ReadRun { model: id, first: start, pages, buffer: front, available });
    }
    // As if the load that read it were still under way: what a fault costs must not depend on which thread
    // was faster.
    let own_time = core.device.now();
    core.device.set_now(own_time.max(available));
    let source = PageSource::Buffer(&buffer, first);
    match copy_pages(control, id, first..end, 0, source, available, core.page_bytes) {
        Ok(Some(fence)) if !control.mutated.by(Mutation::StagingWithoutWait) => buffer.read_until(fence),
        Ok(_) => {}
        Err(error) => fail_pages(control, id, first..end, 0, &error.into()),
    }
    keep::settle(core, control, id, first..end, buffer, None);
    core.device.set_now(own_time);
}

/// A fault of `span` was no hit: moves the model's window there and asks for what it covers.
pub(super) fn advance(core: &Arc<Core>, control: &mut Control, id: u32, span: u32) {
    let depth = core.options.read_ahead_bytes;
    if depth == 0 || !core.device.info().keeps_bytes {
        return;
    }
    let served = std::mem::take(&mut control.loads.ahead.served);
    let last = control.loads.ahead.window(id).last;
    let Some(model) = control.model(id) else { return };
    if model.mapped.is_some() || !model.order.contains(span) {
        return;
    }
    let place = model.order.position(span);
    let places = u32::try_from(model.order.spans().len()).unwrap_or(u32::MAX);
    let follows = match last.filter(|last| *last < places) {
        // The same span again says nothing of what comes next.
        Some(last) if last == place && places > 1 => return,
        Some(last) => served || is_next(control, id, last, place, places),
        None => place == 0,
    };
    if !follows {
        control.loads.cancel_ahead(Some(id));
    }
    let chunk_bytes = u64::from(core.chunk_pages) * core.page_bytes;
    control.loads.ahead.window(id).note(place, places, follows, chunk_bytes, depth);
    refill(core, control, id);
}

/// Whether nothing had to be brought in between the places `last` and `place` of a pass.
fn is_next(control: &Control, id: u32, last: u32, place: u32, places: u32) -> bool {
    let Some(model) = control.model(id) else { return false };
    let mut between = last;
    for _ in 0..MOST_BETWEEN {
        between = if between + 1 >= places { 0 } else { between + 1 };
        if between == place {
            return true;
        }
        let span = model.order.spans()[between as usize];
        let mut pages = model.layout.span(span).pages;
        if !pages.all(|page| control.is_present(id, page)) {
            return false;
        }
    }
    false
}

/// Asks for what the model's window covers and nobody has asked for.
fn refill(core: &Arc<Core>, control: &mut Control, id: u32) {
    let chunk_bytes = u64::from(core.chunk_pages) * core.page_bytes;
    // Kept pages and the buffers that demand needs come first.
    let room = core.arena.limit_bytes().saturating_sub(control.cached_bytes + 2 * chunk_bytes);
    let limit = control.loads.ahead.window(id).bytes.min(room) / core.page_bytes;
    let mut asked = false;
    loop {
        let ahead: u64 =
            control.loads.ahead.window(id).asked.iter().map(|(_, pages)| u64::from(*pages)).sum();
        // Whole chunks, so that a window which is nearly full does not fall into single pages.
        if ahead + u64::from(core.chunk_pages) > limit {
            break;
        }
        let Some((at, first, count)) = next_run(core, control, id) else { break };
        let claimed = claim_run(core, control, id, first, count);
        if claimed > 0 {
            load::submit(core, control, id, first, claimed);
        }
        if claimed < count {
            control.loads.ask_ahead(id, first + claimed, count - claimed);
        }
        control.loads.ahead.window(id).asked.push_back((at, count));
        asked = true;
    }
    if asked {
        pump(core, control);
    }
}

/// The next run of neighbouring pages, in pass order, that are neither on the card nor in staging memory nor
/// on the way to either: the count of places at which all of it is reached, its first page and its length.
fn next_run(core: &Core, control: &mut Control, id: u32) -> Option<(u64, u32, u32)> {
    let window = control.loads.ahead.window(id);
    let (last, gone, mut next, mut next_page) = (window.last?, window.gone, window.next, window.next_page);
    let model = control.model(id)?;
    let spans = model.order.spans();
    let places = u32::try_from(spans.len()).unwrap_or(u32::MAX);
    let mut run: Option<(u64, u32, u32)> = None;
    let mut looks = 0;
    // A whole pass ahead there is nothing more to read.
    'pass: while next != last && looks < LOOKS {
        let Some(&span) = spans.get(next as usize) else { break };
        let pages = model.layout.span(span).pages;
        for page in pages.start.max(next_page)..pages.end {
            looks += 1;
            if run.is_some_and(|(_, first, count)| (first..first + count).contains(&page)) {
                continue;
            }
            let lacks = !control.is_present(id, page) && source_of(control, id, page).0 == Source::File;
            let at = gone + u64::from(distance(last, next, places));
            run = match run {
                None if lacks => Some((at, page, 1)),
                None => None,
                Some((_, first, count)) if lacks && first + count == page && count < core.chunk_pages => {
                    Some((at, first, count + 1))
                }
                Some(_) => {
                    next_page = page;
                    break 'pass;
                }
            };
        }
        next_page = 0;
        next = if next + 1 >= places { 0 } else { next + 1 };
    }
    let window = control.loads.ahead.window(id);
    (window.next, window.next_page) = (next, next_page);
    run
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_grows_with_faults_in_order_and_is_nothing_after_one_out_of_order() {
        let mut window = Window::default();
        let mut sizes = Vec::new();
        for place in 0..5 {
            window.note(place, 10, true, 4, 30);
            sizes.push(window.bytes);
        }
        assert_eq!(sizes, [8, 16, 30, 30, 30]);
        window.note(2, 10, false, 4, 30);
        assert_eq!((window.bytes, window.next), (0, 3));
        // The order became shorter than the last fault's place.
        window.note(1, 2, true, 4, 30);
        assert_eq!((window.bytes, window.next), (8, 0));
    }

    #[test]
    fn reading_goes_on_where_it_was_unless_the_faults_have_overtaken_it() {
        let mut window = Window::default();
        window.note(0, 10, true, 4, 30);
        assert_eq!(window.next, 1);
        window.next = 6;
        window.note(3, 10, true, 4, 30);
        assert_eq!(window.next, 6);
        window.note(7, 10, true, 4, 30);
        assert_eq!(window.next, 8);
        // The end of the pass is followed by its beginning.
        window.note(9, 10, true, 4, 30);
        assert_eq!(window.next, 0);
    }
}
