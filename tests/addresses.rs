//! A runner may keep a unit's address: it is the same in every pass, resident or streamed, whole or in
//! pieces, and whatever the plan does meanwhile.

mod common;

use common::{ModelFile, assert_nothing_left, mixed_units, pager, small_card, small_options};
use vram_pager::pager::ModelOptions;
use vram_pager::units::{DeviceAddress, KIB, MIB};
use vram_pager::weights::UnitId;

#[test]
fn a_unit_keeps_its_address_while_its_model_lives() {
    let file = ModelFile::new(&mixed_units(), 11);
    let device = small_card(2 * MIB);
    {
        let pager = pager(&device, small_options());
        let options = ModelOptions { piece_bytes: Some(128 * KIB), ..ModelOptions::default() };
        let model = pager.open_model(file.index(), &options).unwrap();
        let stream = pager.stream().unwrap();
        let units = u32::try_from(model.index().units().len()).unwrap();
        let mut first_pass: Vec<(String, DeviceAddress)> = Vec::new();
        for (pass, headroom) in [0, 0, MIB, 0].into_iter().enumerate() {
            pager.set_headroom(headroom).unwrap();
            let mut seen = Vec::new();
            for unit in (0..units).map(UnitId) {
                let range = model.address_range().unwrap();
                let unit_address = model.unit_address(unit).unwrap();
                assert!((range.start.0..range.start.0 + range.bytes).contains(&unit_address.0));
                for piece in 0..model.pieces(unit).unwrap() {
                    let guard = model.fault_piece(unit, piece, &stream).unwrap();
                    for view in guard.tensors() {
                        assert!(view.address.0 >= unit_address.0, "{} of unit {unit:?}", view.name);
                        seen.push((format!("{}[{:?}]", view.name, view.rows), view.address));
                    }
                }
            }
            if pass == 0 {
                first_pass = seen;
            } else {
                assert_eq!(seen, first_pass, "pass {pass}");
            }
        }
        assert!(model.counts().streamed > 0, "all of it fitted, so the test shows nothing");
    }
    assert_nothing_left(&device);
}
