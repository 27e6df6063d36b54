//! By the modelled clock a model comes to the card at the rate of the slower of file and link.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a failure here is a failed test, and its numbers are small"
)]

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use vram_pager::device::SharedDevice;
use vram_pager::device::emulated::{CallCosts, EmulatedDevice, EmulatedOptions};
use vram_pager::pager::{ModelOptions, Pager, PagerOptions};
use vram_pager::units::{GIB, MIB, Rate};
use vram_pager::weights::{TensorIndex, UnitId};

/// Units of 1 to 32 MB, as bytes of U8 tensors; the file is a hole behind its header.
fn write_model(path: &Path, bytes: u64) -> u64 {
    let (mut header, mut at, mut number) = (String::from("{"), 0, 0_u64);
    while at < bytes {
        let length = 1_000_000 + number * 7_919_117 % 31_000_000;
        let end = at + length;
        let comma = if number > 0 { "," } else { "" };
        write!(
            header,
            "{comma}\"blocks.{number}.weight\":{{\"dtype\":\"U8\",\"shape\":[{length}],\"data_offsets\":[{at},{end}]}}"
        )
        .unwrap();
        (at, number) = (end, number + 1);
    }
    header.push('}');
    while header.len() % 8 != 0 {
        header.push(' ');
    }
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + at).unwrap();
    at
}

#[test]
fn a_cold_model_comes_at_nine_tenths_of_the_slower_of_file_and_link() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let small = folder.path().join("small.safetensors");
    let models = [(&path, 512 * MIB), (&small, 160 * MIB)].map(|(path, bytes)| {
        let bytes = write_model(path, bytes);
        (bytes, Arc::new(TensorIndex::open(path).unwrap()))
    });
    // GB/s of file and link: a disk, two faster ones, one that meets the link, one that the link holds up.
    let rates = [(2, 25), (7, 25), (14, 25), (25, 25), (50, 25), (14, 12)];
    // With bytes the reads and copies are made as well, by the pager's threads.
    let cases = rates.map(|rates| (rates, false)).into_iter().chain([((7, 25), true), ((14, 25), true)]);
    for ((disk, link), keeps_bytes) in cases {
        let (bytes, index) = &models[usize::from(keeps_bytes)];
        let mut options = EmulatedOptions::new(GIB);
        (options.keeps_bytes, options.disk) = (keeps_bytes, Some(Rate(disk * 1_000_000_000)));
        options.link = Rate(link * 1_000_000_000);
        let device: SharedDevice = EmulatedDevice::open(options).unwrap();
        let pager =
            Pager::new(&device, PagerOptions { headroom_bytes: Some(0), ..PagerOptions::default() }).unwrap();
        // First the card's frames are made as well, then they are there.
        for fresh in [true, false] {
            let model = pager.open_model(Arc::clone(index), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            let (began, counts) = (device.now(), device.counts());
            for unit in 0..u32::try_from(index.units().len()).unwrap() {
                model.fault(UnitId(unit), &stream).unwrap().release();
            }
            stream.synchronize().unwrap();
            let took = (device.now().0 - began.0) as f64;
            let frames = device.counts().create_frame - counts.create_frame;
            assert_eq!(frames > 0, fresh);
            let making = frames as f64 * CallCosts::default().create_frame_2mib.as_nanos() as f64;
            let rate = (*bytes as f64 / disk.min(link) as f64).max(making) / took;
            let what = format!(
                "{disk} GB/s from the file, {link} over the link, {frames} new frames, {keeps_bytes}: {rate:.3}"
            );
            assert!((0.9..=1.0).contains(&rate), "{what}");
        }
    }
}
