//! Models of the hand-over of ring frames: a copy into a frame waits for whoever used what it held, also
//! where the use is given to a stream and runs long after the host's release.
//!
//! A frame's account, the words and their methods are the pager's own; the lines around them are those of
//! `fault`, `claim` and `load`, for a ring of one frame and two pages.

use loom::sync::{Arc, Mutex};
use loom::thread;

use super::{FrameInfo, PageKey};
use crate::pager::word::{SpanState, SpanWord, leave_all};
use crate::sync::Padded;
use crate::sync::model::{Bytes, Mark, check};

const EMPTY: u64 = 0xE;

/// The control lock's part: the one frame's account, and a count of loads.
struct Control {
    frame: FrameInfo<Mark>,
    loads: u64,
}

struct Ring {
    control: Mutex<Control>,
    words: [[Padded<SpanWord>; 1]; 2],
    bytes: Bytes,
}

/// What a model does otherwise than the pager.
#[derive(Clone, Copy, PartialEq)]
enum Wrong {
    Nothing,
    /// The release leaves no fence with the frame.
    NoFence,
    /// The frame is taken from under a guard.
    TakenUnderGuard,
    /// The copy waits for nothing.
    NoWait,
}

/// One pass of a runner over one page: fault, kernel, release. `false` if the frame was held.
fn run(ring: &Arc<Ring>, page: u32, slot: u8, wrong: Wrong) -> bool {
    let word = &ring.words[page as usize][0].0;
    let mut control = ring.control.lock().unwrap();
    word.claim();
    let key = PageKey { model: 0, page };
    let mut copy = None;
    if control.frame.content != key {
        // `claim::take`.
        let old = control.frame.content;
        if !old.is_none() {
            let others = &ring.words[old.page as usize];
            if leave_all(others).is_none() && wrong != Wrong::TakenUnderGuard {
                word.abandon();
                return false;
            }
            others[0].0.set_state(SpanState::Absent);
            control.frame.clear_content();
        }
        control.loads += 1;
        let loads = control.loads;
        control.frame.occupy(key, loads);
        // `load::copy_wanted`.
        let before: Vec<Mark> = control.frame.before_copy().cloned().collect();
        let arrived = Mark::new();
        control.frame.copied(arrived.clone());
        copy = Some((if wrong == Wrong::NoWait { Vec::new() } else { before }, arrived));
    }
    word.set_streamed(true);
    let arrive = control.frame.arrive.clone();
    word.arrived(0, false);
    drop(control);
    // What the device was given: the copy, and the kernel of the runner.
    let used = Mark::new();
    let device = {
        let (ring, used) = (Arc::clone(ring), used.clone());
        thread::spawn(move || {
            if let Some((before, arrived)) = copy {
                before.iter().for_each(Mark::wait);
                ring.bytes.write(u64::from(page));
                arrived.pass();
            }
            if let Some(arrive) = arrive {
                arrive.wait();
            }
            assert_eq!(ring.bytes.read(), u64::from(page), "a kernel that reads another page's bytes");
            used.pass();
        })
    };
    // `fault::finish_release`.
    let mut control = ring.control.lock().unwrap();
    if wrong != Wrong::NoFence {
        control.frame.used_until(slot, &used);
    }
    control.frame.consumed = true;
    word.release(1 << slot);
    drop(control);
    device.join().unwrap();
    true
}

fn two_runners(wrong: Wrong, pages: [u32; 2]) {
    check(move || {
        let ring = Arc::new(Ring {
            control: Mutex::new(Control { frame: FrameInfo::new(), loads: 0 }),
            words: [[Padded(SpanWord::new())], [Padded(SpanWord::new())]],
            bytes: Bytes::new(EMPTY),
        });
        let other = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || run(&ring, pages[1], 1, wrong))
        };
        let one = run(&ring, pages[0], 0, wrong);
        let other = other.join().unwrap();
        assert!(one || other, "both were refused");
        assert!(pages[0] != pages[1] || (one && other), "refused its own page");
        assert!(ring.words.iter().all(|word| word[0].0.view().pins() == 0));
        let control = ring.control.lock().unwrap();
        assert!(control.loads <= 2 && control.frame.before_copy().all(Mark::is_passed));
    });
}

#[test]
fn loom_a_copy_into_a_ring_frame_waits_for_who_used_it() {
    two_runners(Wrong::Nothing, [0, 1]);
}

#[test]
fn loom_two_runners_of_one_streamed_page_share_its_copy() {
    two_runners(Wrong::Nothing, [0, 0]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_release_that_leaves_no_fence() {
    two_runners(Wrong::NoFence, [0, 1]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_frame_that_is_taken_from_under_a_guard() {
    two_runners(Wrong::TakenUnderGuard, [0, 1]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_copy_that_does_not_wait() {
    two_runners(Wrong::NoWait, [0, 1]);
}
