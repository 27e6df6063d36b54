//! Where every page of a model is now: a look for reports and pictures, never for decisions.

#![deny(unsafe_code)]

use super::frames::{NONE, Role};
use super::model::PagedModel;
use super::word::SpanState;

/// Where a page is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum PageState {
    /// Its bytes are not on the card.
    #[default]
    Absent,
    /// Its bytes lie in the ring, or are on their way there: it is streamed.
    Ring,
    /// It has a frame of its own.
    Resident,
}

impl PagedModel {
    /// Says for every page of the model where it is, one entry a page in address order; `states` is emptied
    /// first. Takes the control lock for as long as a look at each page takes.
    ///
    /// On a card without virtual memory calls a page is where the last span that touches it is.
    pub fn residency(&self, states: &mut Vec<PageState>) {
        states.clear();
        states.resize(self.layout().page_count() as usize, PageState::Absent);
        let control = self.core().control.lock();
        let Some(model) = control.model(self.id()) else { return };
        if control.plain.is_some() {
            for (span, place) in (0_u32..).zip(self.layout().spans()) {
                let view = self.word(span).view();
                let state = match view.state() {
                    SpanState::Absent | SpanState::Leaving => PageState::Absent,
                    SpanState::Arriving | SpanState::Ready if view.is_streamed() => PageState::Ring,
                    SpanState::Arriving | SpanState::Ready => PageState::Resident,
                };
                for page in place.pages.clone() {
                    if let Some(entry) = states.get_mut(page as usize) {
                        *entry = state;
                    }
                }
            }
            return;
        }
        for (page, (entry, state)) in (0_u32..).zip(model.pages.iter().zip(states)) {
            if entry.frame == NONE || !control.is_present(self.id(), page) {
                continue;
            }
            *state = match control.frames.info(entry.frame).role {
                Role::Resident => PageState::Resident,
                Role::Ring => PageState::Ring,
                Role::Idle => PageState::Absent,
            };
        }
    }
}
