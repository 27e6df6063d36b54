//! Models of the span's word: faults, hits, takers, guards that outlive their threads' interest.
//!
//! The methods are the word's own; the few lines around them are those of `fault`, `claim`, `reclaim` and
//! `attach`, with the control lock and the bytes of a page. Beside each model stands a wrong protocol, to
//! show that loom finds it.

use loom::sync::{Arc, Mutex};
use loom::thread;

use super::{MAX_VERSION, Ordering, PIN, Padded, SpanState, SpanWord, leave_all, put_back};
use crate::sync::model::{Bytes, Mark, check};

const RIGHT: u64 = 1;
const GONE: u64 = 0xDEAD;

/// A page of one span, its bytes, and the control lock over whether they are there.
struct Page {
    words: [Padded<SpanWord>; 1],
    present: Mutex<bool>,
    bytes: Bytes,
}

impl Page {
    fn absent() -> Self {
        Self { words: [Padded(SpanWord::new())], present: Mutex::new(false), bytes: Bytes::new(GONE) }
    }

    fn ready() -> Self {
        let page = Self::absent();
        page.bytes.write(RIGHT);
        *page.present.lock().unwrap() = true;
        page.word().set_state(SpanState::Ready);
        page
    }

    fn word(&self) -> &SpanWord {
        &self.words[0].0
    }

    /// `fault::fault_span`: a hit, or under the lock claimed and loaded. Answers whether it loaded.
    fn fault(&self) -> bool {
        if self.word().pin_if_resident(0) {
            return false;
        }
        let mut present = self.present.lock().unwrap();
        let was_ready = self.word().claim();
        assert!(!was_ready || *present, "ready without bytes");
        let loads = !*present;
        if loads {
            self.bytes.write(RIGHT);
            *present = true;
        }
        self.word().arrived(0, true);
        loads
    }

    fn use_and_release(&self, stream_bit: u64) {
        assert_eq!(self.bytes.read(), RIGHT, "a guard of bytes that are gone");
        self.word().release(stream_bit);
    }

    /// `reclaim::evict_page`, with `leave` in the place of [`leave_all`].
    fn evict_by(&self, leave: impl Fn(&[Padded<SpanWord>]) -> Option<u64>) -> bool {
        let mut present = self.present.lock().unwrap();
        if leave(&self.words).is_none() {
            return false;
        }
        self.bytes.write(GONE);
        *present = false;
        self.word().set_state(SpanState::Absent);
        true
    }

    fn evict(&self) -> bool {
        self.evict_by(|words| leave_all(words))
    }
}

/// Runs `one` and `other` on two threads over a page, then looks that no pin is left.
fn two_threads(page: fn() -> Page, one: fn(&Page), other: fn(&Page)) {
    check(move || {
        let page = Arc::new(page());
        let thread = {
            let page = Arc::clone(&page);
            thread::spawn(move || one(&page))
        };
        other(&page);
        thread.join().unwrap();
        assert_eq!(page.word().view().pins(), 0, "a pin that is left, or was taken back twice");
    });
}

#[test]
fn loom_a_hit_and_a_taker_never_have_the_page_at_once() {
    fn hit(page: &Page) {
        if page.word().pin_if_resident(0) {
            page.use_and_release(1);
        }
    }
    two_threads(Page::ready, hit, |page| {
        page.evict();
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_taker_that_looks_first_and_leaves_then() {
    two_threads(
        Page::ready,
        |page| {
            if page.word().pin_if_resident(0) {
                page.use_and_release(1);
            }
        },
        |page| {
            page.evict_by(|words| {
                let word = &words[0].0;
                (word.view().pins() == 0).then(|| word.set_state(SpanState::Leaving))?;
                Some(word.used())
            });
        },
    );
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_release_without_order() {
    two_threads(
        Page::ready,
        |page| {
            if page.word().pin_if_resident(0) {
                assert_eq!(page.bytes.read(), RIGHT);
                page.word().word.fetch_sub(PIN, Ordering::Relaxed);
            }
        },
        |page| {
            page.evict();
        },
    );
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_hit_without_order() {
    two_threads(
        Page::absent,
        |page| {
            page.fault();
            page.use_and_release(1);
        },
        |page| {
            let word = &page.word().word;
            let before = super::WordView(word.fetch_add(PIN, Ordering::Relaxed));
            if before.is_hit(0) {
                assert_eq!(page.bytes.read(), RIGHT);
            }
            word.fetch_sub(PIN, Ordering::Release);
        },
    );
}

#[test]
fn loom_two_faults_of_an_absent_span_load_it_once() {
    check(|| {
        let page = Arc::new(Page::absent());
        let thread = {
            let page = Arc::clone(&page);
            thread::spawn(move || {
                let loaded = page.fault();
                page.use_and_release(1);
                loaded
            })
        };
        let loaded = page.fault();
        page.use_and_release(2);
        assert!(loaded != thread.join().unwrap(), "both loaded it, or nobody");
        assert_eq!((page.word().view().pins(), page.word().view().state()), (0, SpanState::Ready));
        assert_eq!(page.word().used(), 3);
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_span_that_is_ready_before_its_bytes() {
    two_threads(
        Page::absent,
        |page| {
            page.word().claim();
            page.word().arrived(0, true);
            page.bytes.write(RIGHT);
            page.word().release(1);
        },
        |page| {
            if page.word().pin_if_resident(0) {
                page.use_and_release(2);
            }
        },
    );
}

#[test]
fn loom_faults_hits_and_a_taker_keep_the_bytes_right() {
    check(|| {
        let page = Arc::new(Page::ready());
        let threads: Vec<_> = (0..2)
            .map(|slot| {
                let page = Arc::clone(&page);
                thread::spawn(move || {
                    page.fault();
                    page.use_and_release(1 << slot);
                })
            })
            .collect();
        page.evict();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(page.word().view().pins(), 0);
        assert_eq!(page.word().used(), 3);
    });
}

#[test]
fn loom_a_fault_that_fails_leaves_no_pin_and_takes_nothing_from_another() {
    two_threads(
        Page::absent,
        |page| {
            {
                let _control = page.present.lock().unwrap();
                page.word().claim();
            }
            // Its load failed meanwhile: the lock was let go for the wait.
            let _control = page.present.lock().unwrap();
            page.word().abandon();
        },
        |page| {
            page.fault();
            page.use_and_release(1);
            page.evict();
        },
    );
}

#[test]
#[should_panic(expected = "guard of bytes that are gone")]
fn loom_finds_a_failed_fault_that_takes_the_span_from_another() {
    two_threads(
        Page::absent,
        |page| {
            let mut present = page.present.lock().unwrap();
            page.word().claim();
            page.word().unpin();
            // Absent, whoever else has it pinned.
            page.word().set_state(SpanState::Absent);
            *present = false;
            page.bytes.write(GONE);
        },
        |page| {
            {
                let mut present = page.present.lock().unwrap();
                page.word().claim();
                page.bytes.write(RIGHT);
                *present = true;
            }
            let _control = page.present.lock().unwrap();
            assert_eq!(page.bytes.read(), RIGHT, "a guard of bytes that are gone");
            page.word().release(1);
        },
    );
}

/// A hit gives work to a stream and releases; a taker waits for the streams that it sees, and overwrites.
/// `release` is the word's, or a wrong one.
fn stream_bit(release: fn(&SpanWord, u64)) {
    check(move || {
        let page = Arc::new(Page::ready());
        let kernel = Mark::new();
        let runner = {
            let (page, kernel) = (Arc::clone(&page), kernel.clone());
            thread::spawn(move || {
                if !page.word().pin_if_resident(0) {
                    kernel.pass();
                    return;
                }
                // The kernel is enqueued here; it runs some time after the release.
                release(page.word(), 1);
                assert_eq!(page.bytes.read(), RIGHT, "a kernel that reads what was taken");
                kernel.pass();
            })
        };
        page.evict_by(|words| {
            let used = leave_all(words)?;
            if used & 1 == 1 {
                kernel.wait();
            }
            Some(used)
        });
        runner.join().unwrap();
    });
}

#[test]
fn loom_whoever_takes_a_span_sees_every_stream_that_used_it() {
    stream_bit(SpanWord::release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_release_that_drops_the_pin_before_it_sets_the_bit() {
    stream_bit(|word, bit| {
        word.word.fetch_sub(PIN, Ordering::Release);
        word.used.fetch_or(bit, Ordering::Relaxed);
    });
}

/// Two threads share a stream, so one of them finds its bit set; the taker still sees it.
#[test]
fn loom_a_bit_that_was_set_already_is_seen_as_well() {
    check(|| {
        let page = Arc::new(Page::ready());
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let page = Arc::clone(&page);
                thread::spawn(move || {
                    let hit = page.word().pin_if_resident(0);
                    if hit {
                        page.word().release(1);
                    }
                    hit
                })
            })
            .collect();
        let mut released = 0;
        if page.words[0].0.view().pins() == 0 {
            released = page.word().used();
        }
        let taken = page.evict_by(|words| {
            let used = leave_all(words)?;
            assert_eq!(used & released, released, "a bit that was lost");
            Some(used)
        });
        let hits = threads.into_iter().map(|thread| thread.join().unwrap());
        let hit = hits.fold(false, |any, hit| any | hit);
        assert!(taken || hit, "not taken, though nobody had it pinned");
        assert_eq!(page.word().used() & 1 == 1, hit);
    });
}

#[test]
fn loom_a_page_of_two_spans_is_left_whole_or_not_at_all() {
    check(|| {
        let words = Arc::new([Padded(SpanWord::new()), Padded(SpanWord::new())]);
        let bytes = Arc::new(Bytes::new(RIGHT));
        words.iter().for_each(|word| word.0.set_state(SpanState::Ready));
        let threads: Vec<_> = (0..2_usize)
            .map(|span| {
                let (words, bytes) = (Arc::clone(&words), Arc::clone(&bytes));
                thread::spawn(move || {
                    if words[span].0.pin_if_resident(0) {
                        assert_eq!(bytes.read(), RIGHT);
                        words[span].0.release(1 << span);
                    }
                })
            })
            .collect();
        match leave_all(&words[..]) {
            Some(_) => bytes.write(GONE),
            None => words.iter().for_each(|word| assert_ne!(word.0.view().state(), SpanState::Leaving)),
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        put_back(&words[..]);
        assert!(words.iter().all(|word| word.0.view().pins() == 0));
    });
}

#[test]
fn loom_a_hit_for_a_version_gets_bytes_of_that_version() {
    two_threads(
        Page::ready,
        |page| {
            // `attach`, and the fault that follows it, of version 1.
            let _control = page.present.lock().unwrap();
            if leave_all(&page.words).is_some() {
                page.word().set_state(SpanState::Absent);
                page.word().claim();
                page.bytes.write(RIGHT + 1);
                page.word().arrived(1, true);
                page.word().release(1);
            } else {
                page.word().set_stale(true);
            }
        },
        |page| {
            for version in [0, 1, MAX_VERSION] {
                if page.word().pin_if_resident(version) {
                    assert_eq!(page.bytes.read(), RIGHT + u64::from(version), "bytes of another version");
                    page.word().release(2);
                }
            }
        },
    );
}

/// A model that owned guards keep alive, its memory, and the marks of the streams that they gave work to.
struct Model {
    word: SpanWord,
    bytes: Arc<Bytes>,
    streams: [Mark; 2],
    /// What its close takes for the streams that used it.
    used: fn(&SpanWord) -> u64,
}

impl Drop for Model {
    /// `reclaim::close_model`: waits for the streams that used its spans, then unmaps.
    fn drop(&mut self) {
        assert_eq!(self.word.view().pins(), 0, "closed under a pin");
        let used = (self.used)(&self.word);
        for (slot, stream) in self.streams.iter().enumerate() {
            if used >> slot & 1 == 1 {
                stream.wait();
            }
        }
        self.bytes.write(GONE);
    }
}

/// Two threads have an owned guard each, give a kernel to their stream and drop the guard; the last of them
/// closes the model, as the last owner of a `PagedModel` does, while kernels may still run.
fn owned_guards(used: fn(&SpanWord) -> u64) {
    fn run(model: Arc<Model>, slot: usize) {
        assert!(model.word.pin_if_resident(0), "nobody takes it");
        let (bytes, stream) = (Arc::clone(&model.bytes), model.streams[slot].clone());
        let kernel = thread::spawn(move || {
            assert_eq!(bytes.read(), RIGHT);
            stream.pass();
        });
        // `OwnedGuard`'s drop: the pin first, then the model.
        model.word.release(1 << slot);
        drop(model);
        kernel.join().unwrap();
    }
    check(move || {
        let word = SpanWord::new();
        word.set_state(SpanState::Ready);
        let bytes = Arc::new(Bytes::new(RIGHT));
        let model = Arc::new(Model { word, bytes, streams: [Mark::new(), Mark::new()], used });
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || run(model, 1))
        };
        run(model, 0);
        other.join().unwrap();
    });
}

#[test]
fn loom_a_model_closes_after_its_last_guard_and_waits_for_their_streams() {
    owned_guards(|word| {
        let used = word.used();
        assert_eq!(used, 3, "a guard that left no trace");
        used
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_finds_a_model_that_closes_without_waiting_for_a_stream() {
    owned_guards(|word| word.used() & 1);
}
