//! The backend that the suite's cards have is the one that was asked for, and CI's CUDA half cannot be
//! skipped in silence.

mod common;

use common::{assert_nothing_left, card, on_cuda};
use vram_pager::device::DeviceKind;
use vram_pager::units::MIB;

#[test]
fn the_cards_of_the_suite_are_of_the_backend_that_was_asked_for() {
    let device = card(8 * MIB, 2 * MIB);
    let wanted = match std::env::var("VRAM_PAGER_TEST_DEVICE").as_deref() {
        Ok("cuda") => DeviceKind::Cuda,
        _ => DeviceKind::Emulated,
    };
    assert_eq!(device.info().kind, wanted);
    assert_eq!(on_cuda(), wanted == DeviceKind::Cuda);
    if on_cuda() {
        assert!(device.info().name.contains("CUDA stand-in"), "{}", device.info().name);
        assert!(!device.info().host_addressable);
    }
    assert_nothing_left(&device);
}
