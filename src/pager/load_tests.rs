//! Loads whose pages lie in ring frames that other pages of the same load are mapped to as well, and loads that
//! are read faster than copies go.

use std::sync::Arc;
use std::time::Duration;

use super::{loading_depth, pump};
use crate::device::emulated::{EmulatedDevice, EmulatedOptions};
use crate::device::{self, SharedDevice};
use crate::pager::frames::NONE;
use crate::pager::loads::Wants;
use crate::pager::small_model;
use crate::pager::watchdog::Watchdog;
use crate::pager::{ModelOptions, Pager, PagerOptions, RingSize};
use crate::units::{KIB, MIB, ModelTime};
use crate::weights::UnitId;

const PAGE: u64 = 4 * KIB;

#[test]
fn what_was_wanted_together_is_copied_together_whatever_the_order_in_which_it_was_wanted() {
    let mut wants = Wants::default();
    wants.add(14, ModelTime(3));
    wants.add(10, ModelTime(7));
    wants.add(12, ModelTime(5));
    let runs = |wants: &Wants, pages| wants.runs(pages).collect::<Vec<_>>();
    let all = [(10..12, ModelTime(7)), (12..14, ModelTime(5)), (14..16, ModelTime(3))];
    assert_eq!(runs(&wants, 10..16), all);
    // A load that is cut goes on with those of its own half.
    let rest = wants.behind(13);
    assert_eq!(runs(&rest, 13..16), [(13..14, ModelTime(5)), (14..16, ModelTime(3))]);
    let first: Vec<_> = wants.runs(10..13).filter(|(run, _)| !run.is_empty()).collect();
    assert_eq!(first, [(10..12, ModelTime(7)), (12..13, ModelTime(5))]);
    // Beyond what is told apart, it goes with the run before it.
    for page in 20..60 {
        wants.add(page, ModelTime(u64::from(page)));
    }
    assert_eq!(runs(&wants, 10..60).last().unwrap().0.end, 60);
    assert_eq!(wants.len, Wants::MOST);
}

/// Half of a load that found no buffer becomes a load of its own. Its pages are still mapped to ring frames that
/// hold pages of the first half by now: those must go on waiting for the first.
#[test]
fn a_page_waits_for_its_own_half_of_a_load_that_was_split() {
    const UNITS: usize = 24;
    let _watchdog = Watchdog::new(60, "a_page_waits_for_its_own_half_of_a_load_that_was_split");
    let (_folder, index) = small_model::open(UNITS);
    let device = device::open("emulated:48KiB,page=4KiB").unwrap();
    let options = PagerOptions {
        headroom_bytes: Some(0),
        page_locked_bytes: Some(0),
        ring: RingSize::Pages(4),
        chunk_bytes: 16 * PAGE,
        read_ahead_bytes: 0,
        prefetch_loads: 0,
        ..PagerOptions::default()
    };
    let pager = Pager::new(&device, options).unwrap();
    let model = pager.open_model(index, &ModelOptions::default()).unwrap();
    let stream = pager.stream().unwrap();
    // Two passes, and a part of a third: the ring holds pages of its middle.
    for unit in (0..UNITS).cycle().take(2 * UNITS + UNITS / 2) {
        model.fault(UnitId(u32::try_from(unit).unwrap()), &stream).unwrap().release();
    }
    let (core, id) = (model.core(), model.id());
    let mut buffers = Vec::new();
    while let Some(buffer) = core.arena.take(1).unwrap() {
        buffers.push(buffer);
    }
    let mut tried = 0;
    let frames: Vec<u32> = core.control.lock().frames.ring.clone();
    for frame in frames.into_iter().filter(|&frame| frame != NONE) {
        let mut control = core.control.lock();
        let held = control.frames.info(frame).content.page;
        let state = control.model(id).unwrap();
        // The nearest page behind the one that the frame holds which is mapped to it, too.
        let later = (held + 1..).zip(&state.pages[held as usize + 1..]);
        let Some(last) = later.filter(|(_, page)| page.frame == frame).map(|(page, _)| page).next() else {
            continue;
        };
        let count = last + 1 - held;
        if count > core.chunk_pages {
            continue;
        }
        tried += 1;
        let load = control.loads.ask(id, held, count);
        control.content_mut(id, held).unwrap().loading = load;
        // Room for the first half alone.
        buffers.truncate(buffers.len() - count as usize / 2);
        pump(core, &mut control);
        assert_eq!(control.content_mut(id, held).unwrap().loading, load, "page {held} of {held}..={last}");
        while control.loads.outstanding() > 0 {
            // Readers wake faults, and this is none.
            core.changed.wait_for(&mut control, Duration::from_millis(1));
            pump(core, &mut control);
        }
        assert_eq!(control.content_mut(id, held).unwrap().loading, 0);
        drop(control);
        core.device.synchronize().unwrap();
        while let Some(buffer) = core.arena.take(1).unwrap() {
            buffers.push(buffer);
        }
    }
    assert!(tried > 0, "no frame of the ring is shared by neighbours");
}

/// A model that comes to an empty card may be read much faster than it is copied. What is read and not yet copied
/// does not grow with the model then: the readers wait for the oldest copies.
#[test]
fn staging_memory_does_not_grow_with_a_model_that_is_read_faster_than_it_is_copied() {
    const UNITS: usize = 256;
    let (_folder, index) = small_model::open(UNITS);
    let card =
        EmulatedDevice::open(EmulatedOptions { page_bytes: PAGE, ..EmulatedOptions::new(4 * MIB) }).unwrap();
    let device: SharedDevice = Arc::<EmulatedDevice>::clone(&card);
    let options = PagerOptions {
        headroom_bytes: Some(0),
        page_locked_bytes: Some(8 * MIB),
        chunk_bytes: 4 * PAGE,
        read_ahead_bytes: 0,
        ..PagerOptions::default()
    };
    let pager = Pager::new(&device, options).unwrap();
    let model = pager.open_model(index, &ModelOptions::default()).unwrap();
    let core = model.core();
    // A read that had to sleep, if only for the test beside it, makes all readers count.
    let depth = loading_depth(core, core.options.readers);
    assert!(depth < UNITS as u64 * PAGE / 4);
    let copies = Arc::clone(core.control.lock().engine.stream(0));
    let hold = card.hold(copies.id(), Duration::from_secs(3600)).unwrap();
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| {
            let stream = pager.stream().unwrap();
            for unit in 0..UNITS {
                model.fault(UnitId(u32::try_from(unit).unwrap()), &stream).unwrap().release();
            }
        });
        // Until nothing moves: a runner that is not held back would be through long before.
        let (mut used, mut still) = (0, 0);
        while still < 20 && !runner.is_finished() {
            std::thread::sleep(Duration::from_millis(10));
            let now = core.arena.figures().used_bytes;
            assert!(now <= depth, "{now} bytes of staging memory are in use, {depth} were to suffice");
            still = if now == used && now > 0 { still + 1 } else { 0 };
            used = now;
        }
        let least = loading_depth(core, 1) / 2;
        assert!(used > least, "only {used} bytes were read ahead of the copies");
        drop(hold);
        runner.join().unwrap();
    });
    core.device.synchronize().unwrap();
    assert_eq!(model.figures().resident_bytes, UNITS as u64 * PAGE);
}
