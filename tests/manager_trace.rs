//! What the manager tells a `tracing` subscriber of its decisions.
//!
//! One test in a program of its own: a subscriber of one thread sees a callsite only if no other thread met
//! it first with nobody listening.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod manager_support;

use std::sync::Arc;

use manager_support::*;
use vram_pager::manager::FreeOptions;

#[test]
fn the_trace_tells_who_was_asked_for_how_much_and_what_it_gave() {
    #[derive(Clone, Default)]
    struct Lines(Arc<parking_lot::Mutex<Vec<u8>>>);
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let (manager, card) = one_card(8192);
        let (a, b): (Shared, Shared) = (resident(&card, "victim", 4096), resident(&card, "newcomer", 4096));
        load(&manager, &[&a]);
        load(&manager, &[&b]);
        let options = FreeOptions { ram_required: 77, ..FreeOptions::default() };
        manager.free_memory(0, Some(GPU), &options).unwrap();
    });
    let text = String::from_utf8(lines.0.lock().clone()).unwrap();
    let asked = text.lines().find(|line| line.contains("asked a victim")).unwrap();
    let ask = 4096 * MIB + (4096 * MIB).div_ceil(10) + FLOOR - 4096 * MIB;
    for part in ["victim", &format!("asked={ask}"), "loaded_before=4294967296", "loaded_after=", "left=false"]
    {
        assert!(asked.contains(part), "{part}: {asked}");
    }
    assert!(text.contains("ram_required=77"));
    assert!(text.lines().any(|line| line.contains("newcomer") && line.contains("budget=")));
}
