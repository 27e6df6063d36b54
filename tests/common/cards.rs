//! The card of a test: emulated, or `cuda:` over the driver stand-in.
//!
//! With `VRAM_PAGER_TEST_DEVICE=cuda` the same tests run on the CUDA backend. Each open card is a card of
//! its own behind the driver, larger than what the test asks for and capped to it, so that tests that run
//! at once do not see each other. Tests whose hooks only an emulated card has ask for [`emulated_card`]
//! and say why; they run on it under either setting. With `card` the cards are a real `cuda:0`, capped;
//! only tests without hooks whose pages are 2 MiB run there (see `gpu-check.sh`).

use std::sync::Arc;

use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
use vram_pager::device::{self, DeviceKind, SharedDevice};
use vram_pager::units::KIB;

/// The page of small cards.
const PAGE: u64 = 64 * KIB;

/// Whether the tests of this process run on the CUDA backend.
pub fn on_cuda() -> bool {
    match std::env::var("VRAM_PAGER_TEST_DEVICE").as_deref() {
        Err(_) | Ok("" | "emulated") => false,
        Ok("cuda" | "card") => true,
        Ok(other) => panic!("VRAM_PAGER_TEST_DEVICE={other}: write `emulated`, `cuda` or `card`"),
    }
}

/// A card of `bytes` with pages of `page`.
pub fn card(bytes: u64, page: u64) -> SharedDevice {
    open(bytes, page).1
}

/// The default device of tests: a card of `bytes` with pages of 64 KiB.
pub fn small_card(bytes: u64) -> SharedDevice {
    card(bytes, PAGE)
}

/// A small card, and what a test may do to it behind the pager's back.
pub fn hooked_card(bytes: u64) -> (Hooks, SharedDevice) {
    open(bytes, PAGE)
}

/// A card as its own type, for what only an emulated one can be told. `why` says what that is.
pub fn emulated_card(bytes: u64, why: &str) -> (Arc<EmulatedDevice>, SharedDevice) {
    assert!(!why.is_empty());
    if on_cuda() {
        eprintln!("on the emulated card alone: {why}");
    }
    let mut options = EmulatedOptions::new(bytes);
    options.page_bytes = PAGE;
    let card = EmulatedDevice::open(options).unwrap();
    (Arc::clone(&card), card)
}

/// What may be done to a card behind the pager's back.
pub enum Hooks {
    Emulated(Arc<EmulatedDevice>),
    #[cfg(feature = "cuda")]
    Cuda {
        ordinal: u32,
        cap: u64,
    },
}

impl Hooks {
    /// Work completes late from here on, as `seed` says.
    pub fn seed_delays(&self, seed: u64) {
        match self {
            Self::Emulated(card) => card.seed_delays(seed),
            #[cfg(feature = "cuda")]
            Self::Cuda { ordinal, .. } => super::standin::standin().seed_delays(*ordinal, seed),
        }
    }

    /// Another process holds `bytes` of the card from here on.
    pub fn set_other_bytes(&self, bytes: u64) {
        match self {
            Self::Emulated(card) => card.set_other_bytes(bytes),
            #[cfg(feature = "cuda")]
            Self::Cuda { ordinal, cap } => {
                let rest = behind_the_driver::CARD_BYTES - cap;
                super::standin::standin().set_other_bytes(*ordinal, rest + bytes);
            }
        }
    }
}

fn open(bytes: u64, page: u64) -> (Hooks, SharedDevice) {
    let (hooks, device) = if on_cuda() { open_cuda(bytes, page) } else { open_emulated(bytes, page) };
    let wanted = if on_cuda() { DeviceKind::Cuda } else { DeviceKind::Emulated };
    assert_eq!(device.info().kind, wanted, "{}", device.info().name);
    assert_eq!((device.info().total_bytes, device.info().granularity), (bytes, page));
    (hooks, device)
}

fn open_emulated(bytes: u64, page: u64) -> (Hooks, SharedDevice) {
    let device::DeviceString::Emulated(options) = format!("emulated:{bytes},page={page}").parse().unwrap()
    else {
        panic!("an emulated card was named")
    };
    let card = EmulatedDevice::open(options).unwrap();
    (Hooks::Emulated(Arc::clone(&card)), card)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_bytes: u64, _page: u64) -> (Hooks, SharedDevice) {
    panic!("this build has no CUDA backend: the tests cannot run on it")
}

#[cfg(feature = "cuda")]
use behind_the_driver::open as open_cuda;

#[cfg(feature = "cuda")]
mod behind_the_driver {
    use std::sync::{Mutex, PoisonError, Weak};

    use vram_pager::device::{self, Device, SharedDevice};
    use vram_pager::units::MIB;

    use super::super::standin::standin;
    use super::{Hooks, PAGE};

    /// The size of each card behind the driver.
    pub(super) const CARD_BYTES: u64 = 512 * MIB;

    /// How many there are: more than a test process has open at once.
    const CARDS: usize = 48;

    struct Cards {
        next: usize,
        open: Vec<Option<Weak<dyn Device>>>,
    }

    static OPEN: Mutex<Cards> = Mutex::new(Cards { next: 0, open: Vec::new() });

    pub(super) fn open(bytes: u64, page: u64) -> (Hooks, SharedDevice) {
        if std::env::var("VRAM_PAGER_TEST_DEVICE").as_deref() == Ok("card") {
            let device = device::open(&format!("cuda:0,cap={bytes},page={page}")).unwrap();
            return (Hooks::Cuda { ordinal: 0, cap: bytes }, device);
        }
        let mut cards = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if cards.open.is_empty() {
            standin().set_page(PAGE);
            standin().set_cards(i32::try_from(CARDS).unwrap(), CARD_BYTES);
            cards.open.resize_with(CARDS, || None);
        }
        let first = cards.next;
        let unused = (first..first + CARDS)
            .map(|number| number % CARDS)
            .find(|number| cards.open[*number].as_ref().is_none_or(|card| card.strong_count() == 0));
        let number = unused.expect("a card that no other test has open");
        let device = device::open(&format!("cuda:{number},cap={bytes},page={page}")).unwrap();
        cards.open[number] = Some(std::sync::Arc::downgrade(&device));
        cards.next = number + 1;
        let ordinal = u32::try_from(number).unwrap();
        (Hooks::Cuda { ordinal, cap: bytes }, device)
    }
}
