//! Changing the patches that a model's bytes are made with.
//!
//! A change makes every span that either set touches stale at once: its pages lose their content and are
//! made anew at the next fault. A page that a guard of the old version holds keeps its bytes for that
//! guard; a fault for the new version fails until it is released.

#![deny(unsafe_code)]

use std::sync::Arc;

use super::core::{Control, Core, ModelState};
use super::error::PagerError;
use super::frames::{NONE, PageKey};
use super::mutations::Mutation;
use super::patches::{DevicePatches, PatchSet};
use super::plain;
use crate::weights::UnitId;

/// Whether bytes on the card are made with this set.
pub(super) fn is_attached(control: &Control, id: u32, set: Option<&Arc<PatchSet>>) -> bool {
    let attached = control.model(id).and_then(|model| model.patches());
    attached.map(|set| set.version()) == set.map(|set| set.version())
}

/// Attaches another set, or none. Always succeeds but for a failing device.
pub(super) fn attach(
    core: &Core,
    control: &mut Control,
    id: u32,
    new: Option<DevicePatches>,
) -> Result<(), PagerError> {
    let Some(model) = control.model(id) else { return Ok(()) };
    let (old_set, new_set) = (model.patches().cloned(), new.as_ref().map(|new| Arc::clone(&new.set)));
    let layout = Arc::clone(&model.layout);
    let mut last = None;
    for (span, place) in (0_u32..).zip(layout.spans()) {
        let versions = [&old_set, &new_set].map(|set| PatchSet::version_of(set.as_ref(), span));
        if versions[0] == versions[1] || control.mutated.by(Mutation::StalePatches) {
            continue;
        }
        if control.plain.is_some() {
            plain::forget_span(control, id, span)?;
            continue;
        }
        for page in place.pages.clone() {
            if last.is_none_or(|last| page > last) {
                last = Some(page);
                forget_page(control, id, page)?;
            }
        }
    }
    let Some(model) = control.model_mut(id) else { return Ok(()) };
    let old = std::mem::replace(&mut model.attached, new.map(Arc::new));
    if old.is_some() {
        // Patches with the old factors may still run on the copy streams.
        control.engine.drain()?;
    }
    tracing::debug!(
        device = core.device.info().name,
        from = old_set.map_or(0, |set| set.version()),
        to = new_set.map_or(0, |set| set.version()),
        "attached patches"
    );
    Ok(())
}

/// Makes a page's bytes be loaded anew; marks it stale if a guard holds it.
fn forget_page(control: &mut Control, id: u32, page: u32) -> Result<bool, PagerError> {
    let key = PageKey { model: id, page };
    if !control.is_present(id, page) {
        if let Some(model) = control.model_mut(id) {
            no_longer_stale(model, page);
        }
        return Ok(true);
    }
    let Some(used) = control.leave_page(key) else {
        let Some(model) = control.model_mut(id) else { return Ok(false) };
        model.stale.insert(page);
        for span in model.layout.spans_of_page(page) {
            model.words[span as usize].0.set_stale(true);
        }
        return Ok(false);
    };
    // The next copy into the frame must wait for the work that read the old bytes; a ring frame knows it
    // by its fences, a page's own frame only by the streams that used it.
    let fences = match control.streams.slot_fences_or_wait(used, &control.engine) {
        Ok(fences) => fences,
        Err(error) => {
            control.put_page_back(key);
            return Err(error.into());
        }
    };
    control.set_page_absent(key);
    let Some(model) = control.model_mut(id) else { return Ok(true) };
    no_longer_stale(model, page);
    let frame = model.pages[page as usize].frame;
    if frame != NONE {
        let info = control.frames.info_mut(frame);
        info.clear_content();
        for (slot, fence) in fences.into_iter().filter(|_| !control.mutated.by(Mutation::RewriteWithoutFence))
        {
            info.used_until(slot, &fence);
        }
    }
    Ok(true)
}

/// A page has no stale bytes any more: spans that have no other stale page may be hit again.
fn no_longer_stale(model: &mut ModelState, page: u32) {
    if !model.stale.remove(&page) {
        return;
    }
    for span in model.layout.spans_of_page(page) {
        let pages = model.layout.span(span).pages;
        if !pages.into_iter().any(|page| model.stale.contains(&page)) {
            model.words[span as usize].0.set_stale(false);
        }
    }
}

/// Gives up the stale pages of a span before it is faulted for the current version.
pub(super) fn refresh_span(control: &mut Control, id: u32, span: u32) -> Result<(), PagerError> {
    let Some(model) = control.model(id) else { return Ok(()) };
    if model.stale.is_empty() {
        return Ok(());
    }
    let place = model.layout.span(span);
    let unit = place.unit;
    if model.plain.is_some() {
        if model.stale.contains(&span) && !plain::forget_span(control, id, span)? {
            return Err(old_version_held(control, id, unit));
        }
        return Ok(());
    }
    for page in place.pages.clone() {
        let Some(model) = control.model(id) else { return Ok(()) };
        if model.stale.contains(&page) && !forget_page(control, id, page)? {
            return Err(old_version_held(control, id, unit));
        }
    }
    Ok(())
}

pub(super) fn old_version_held(control: &Control, id: u32, unit: UnitId) -> PagerError {
    let (model, what) = control.model(id).map_or_else(Default::default, |model| {
        (model.name.clone(), format!("unit {}", model.index.unit_info(unit).name))
    });
    PagerError::OldVersionHeld { model, what }
}
