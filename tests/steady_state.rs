//! A pass in steady state does no work but copies: from the third pass on a model that does not fit makes
//! no mapping call and no device-wide wait, moves the same bytes each time, and every unit lies where it
//! lay at the start.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use common::{
    ModelFile, assert_nothing_left, checked_pass, mixed_units, pager, small_card, small_options, unit_id,
};
use vram_pager::pager::{ModelOptions, Verifier};
use vram_pager::units::{KIB, MIB};

#[test]
fn from_the_third_pass_on_a_pass_maps_nothing_and_copies_the_same_bytes() {
    let file = ModelFile::new(&mixed_units(), 5);
    for card in [704 * KIB, MIB, 1408 * KIB, 2 * MIB, 2816 * KIB, 4 * MIB, 5 * MIB, 8 * MIB] {
        let device = small_card(card);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let verifier = Verifier::new(&model).unwrap();
            let units = model.index().units().len() as u64;
            let addresses = || (0..units).map(|unit| model.unit_address(unit_id(unit)).unwrap());
            let at_start: Vec<_> = addresses().collect();
            for pass in 0..2 {
                checked_pass(&model, &stream, &verifier).unwrap_or_else(|e| panic!("{card}, {pass}: {e}"));
            }
            let mut bytes = Vec::new();
            for pass in 2..6 {
                let before = device.counts();
                checked_pass(&model, &stream, &verifier).unwrap();
                let after = device.counts();
                let calls = [
                    after.map - before.map,
                    after.unmap - before.unmap,
                    after.set_access - before.set_access,
                    after.create_frame - before.create_frame,
                    after.release_frame - before.release_frame,
                    after.device_sync,
                ];
                assert_eq!(calls, [0; 6], "card of {card}, pass {pass}: {:?}", pager.figures());
                bytes.push(after.bytes_to_device - before.bytes_to_device);
            }
            assert!(bytes.iter().all(|&pass| pass == bytes[0]), "card of {card}: {bytes:?}");
            assert_eq!(addresses().collect::<Vec<_>>(), at_start);
            for unit in 0..units {
                let unit = unit_id(unit);
                if model.pieces(unit).unwrap() == 1 {
                    let guard = model.fault(unit, &stream).unwrap();
                    let first = guard.tensors()[0].address;
                    assert_eq!(Some(first), model.unit_address(unit));
                }
            }
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn a_pager_that_went_around_held_guards_comes_back_to_its_steady_state() {
    let file = ModelFile::new(&mixed_units(), 6);
    let device = small_card(2 * MIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let verifier = Verifier::new(&model).unwrap();
        for _ in 0..3 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        {
            let _first = model.fault(unit_id(3), &stream).unwrap();
            let _second = model.fault(unit_id(7), &stream).unwrap();
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        for _ in 0..4 {
            checked_pass(&model, &stream, &verifier).unwrap();
        }
        let (model_has, pager_has) = (model.figures(), pager.figures());
        assert_eq!(model_has.resident_bytes, model_has.planned_bytes, "what it gave up came back");
        assert!(pager_has.ring_bytes <= 2 * model_has.largest_streamed_part_bytes + pager_has.page_bytes);
        let before = device.counts();
        checked_pass(&model, &stream, &verifier).unwrap();
        let after = device.counts();
        assert_eq!((after.map, after.unmap), (before.map, before.unmap));
    }
    assert_nothing_left(&device);
}
