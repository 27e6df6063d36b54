//! Claims while others take the card's memory.

use std::sync::Arc;

use super::{place, take, unmap};
use crate::device::SharedDevice;
use crate::device::emulated::{EmulatedDevice, EmulatedOptions};
use crate::pager::frames::{NONE, Role};
use crate::pager::small_model;
use crate::pager::watchdog::Watchdog;
use crate::pager::{ModelOptions, Pager, PagerError, PagerOptions, RingSize};
use crate::units::KIB;
use crate::weights::UnitId;

const PAGE: u64 = 4 * KIB;

/// The ring has an empty slot, which a page is about to fill; the page is still mapped to the frame of another slot.
/// Somebody took the card's memory, and looking for a frame gives that very frame up: the page must not go
/// back to it.
#[test]
fn a_frame_that_was_given_up_while_another_was_looked_for_is_not_used() {
    const UNITS: usize = 24;
    let _watchdog = Watchdog::new(60, "a_frame_that_was_given_up_while_another_was_looked_for_is_not_used");
    let (_folder, index) = small_model::open(UNITS);
    let mut options = EmulatedOptions::new(12 * PAGE);
    options.page_bytes = PAGE;
    let card = EmulatedDevice::open(options).unwrap();
    let device: SharedDevice = Arc::clone(&card) as _;
    let options = PagerOptions {
        headroom_bytes: Some(3 * PAGE),
        ring: RingSize::Pages(4),
        read_ahead_bytes: 0,
        prefetch_loads: 0,
        ..PagerOptions::default()
    };
    let pager = Pager::new(&device, options).unwrap();
    let model = pager.open_model(index, &ModelOptions::default()).unwrap();
    let stream = pager.stream().unwrap();
    for unit in (0..UNITS).cycle().take(2 * UNITS) {
        model.fault(UnitId(u32::try_from(unit).unwrap()), &stream).unwrap().release();
    }
    device.synchronize().unwrap();
    let (core, id) = (model.core(), model.id());
    let mut control = core.control.lock();
    let control = &mut control;
    let last = control.frames.ring.len() - 1;
    assert!(last > 0, "the ring has {} slots", last + 1);
    let (emptied, given_up) = (control.frames.ring[0], control.frames.ring[last]);
    // A page that is mapped to the last slot's frame, and is now said to belong to the first slot.
    let frames = control.model(id).unwrap().pages.iter().map(|page| page.frame);
    let page = (0..).zip(frames).find(|(_, frame)| *frame == given_up).unwrap().0;
    control.model_mut(id).unwrap().pages[page as usize].slot = 0;
    // The first slot's frame goes back to the device.
    assert!(take(control, emptied));
    let mapped = control.model(id).unwrap().pages.iter().map(|page| page.frame);
    let mapped: Vec<u32> =
        (0..).zip(mapped).filter(|(_, frame)| *frame == emptied).map(|(page, _)| page).collect();
    for page in mapped {
        unmap(control, id, page).unwrap();
    }
    control.frames.ring[0] = NONE;
    control.frames.make_idle(emptied);
    assert_eq!(control.frames.release_idle(1).unwrap(), 1);
    // What the pages of the model hold is held by guards: only the ring is left to give.
    for (number, word) in
        (0..).zip(model.layout().spans()).map(|(span, place)| (place.pages.start, model.word(span)))
    {
        let frame = control.model(id).unwrap().pages[number as usize].frame;
        if frame != NONE && control.frames.info(frame).role == Role::Resident {
            assert!(word.pin_if_resident(0) || word.view().pins() == 0);
        }
    }
    // Nothing is free: the headroom is missing, and the ring has to give all that it has.
    card.set_other_bytes(device.memory().unwrap().free);
    let mut mapped = Vec::new();
    let placed = place(core, control, id, page, false, &mut mapped);
    if let Ok(role) = placed {
        let frame = control.model(id).unwrap().pages[page as usize].frame;
        let info = control.frames.info(frame);
        assert_eq!((role, info.role), (Role::Ring, Role::Ring), "a frame that the ring has given up");
        assert!(control.frames.ring.contains(&frame));
    } else {
        assert!(placed.as_ref().is_err_and(PagerError::is_shortage), "{placed:?}");
    }
    assert!(!control.frames.ring.contains(&given_up), "the case did not arise: the frame was not given up");
    for span in 0..model.layout().span_count() {
        while model.word(span).view().pins() > 0 {
            model.word(span).unpin();
        }
    }
    card.set_other_bytes(0);
}
