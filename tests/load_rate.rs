//! By the modelled clock a model comes to the card at the rate of the slower of file and link, and faster than by the
//! crate `safetensors` and a plain copy.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a failure here is a failed test, and its numbers are small"
)]
#![expect(unsafe_code, reason = "the plain way copies without the pager's handles, from a mapped file")]

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use vram_pager::device::emulated::{CallCosts, EmulatedDevice, EmulatedOptions};
use vram_pager::device::{AddressRange, FrameSet, SharedDevice, Stream, StreamPriority};
use vram_pager::pager::{ModelOptions, Pager, PagerOptions};
use vram_pager::units::{DeviceRange, GIB, MIB, Rate};
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

/// GB/s of file and link: a disk, two faster ones, one that meets the link, one that the link holds up.
const RATES: [(u64, u64); 6] = [(2, 25), (7, 25), (14, 25), (25, 25), (50, 25), (14, 12)];

fn card(disk: u64, link: u64, keeps_bytes: bool) -> SharedDevice {
    let mut options = EmulatedOptions::new(GIB);
    (options.keeps_bytes, options.disk) = (keeps_bytes, Some(Rate(disk * 1_000_000_000)));
    options.link = Rate(link * 1_000_000_000);
    EmulatedDevice::open(options).unwrap()
}

fn pager(device: &SharedDevice) -> Arc<Pager> {
    Pager::new(device, PagerOptions { headroom_bytes: Some(0), ..PagerOptions::default() }).unwrap()
}

/// Nanoseconds in which a model's units are faulted and come to the card.
fn paged(pager: &Arc<Pager>, index: &Arc<TensorIndex>) -> u64 {
    let device = pager.device();
    let model = pager.open_model(Arc::clone(index), &ModelOptions::default()).unwrap();
    let stream = pager.stream().unwrap();
    let began = device.now();
    for unit in 0..u32::try_from(index.units().len()).unwrap() {
        model.fault(UnitId(unit), &stream).unwrap().release();
    }
    stream.synchronize().unwrap();
    device.now().0 - began.0
}

/// Nanoseconds in which the crate `safetensors` over a mapped file, and a copy of each tensor, bring them to memory
/// that is mapped already. Touching a tensor's bytes reads them from the disk; then they are copied. What a system
/// reads ahead of a mapping by itself is not modelled.
fn plain(device: &SharedDevice, path: &Path) -> u64 {
    let file = File::open(path).unwrap();
    let page = device.info().granularity;
    let pages = u32::try_from(file.metadata().unwrap().len().div_ceil(page)).unwrap();
    let mut frames = FrameSet::new(device, page);
    let mut range = AddressRange::reserve(device, pages as usize, page).unwrap();
    for page in 0..pages {
        let frame = frames.create().unwrap();
        range.map(page, &frames, frame).unwrap();
    }
    range.set_access(0, pages).unwrap();
    let stream = Stream::new(device, StreamPriority::Normal).unwrap();
    // SAFETY: the test's own file, which nobody changes.
    let mapped = unsafe { memmap2::Mmap::map(&file).unwrap() };
    let began = device.now();
    let tensors = safetensors::SafeTensors::deserialize(&mapped).unwrap();
    let mut at = range.range().start;
    for (_, tensor) in tensors.iter() {
        let data = tensor.data();
        device.set_now(device.schedule_read(data.len() as u64));
        let to = DeviceRange::new(at, data.len() as u64);
        // SAFETY: the mapping outlives the wait below, and the target is mapped and accessible.
        unsafe { device.copy_to_device(to, data.as_ptr(), device.now(), stream.id()).unwrap() };
        at = to.end();
    }
    stream.synchronize().unwrap();
    device.now().0 - began.0
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
    // With bytes the reads and copies are made as well, by the pager's threads.
    let cases = RATES.map(|rates| (rates, false)).into_iter().chain([((7, 25), true), ((14, 25), true)]);
    for ((disk, link), keeps_bytes) in cases {
        let (bytes, index) = &models[usize::from(keeps_bytes)];
        let device = card(disk, link, keeps_bytes);
        let pager = pager(&device);
        // First the card's frames are made as well, then they are there.
        for fresh in [true, false] {
            let counts = device.counts();
            let took = paged(&pager, index) as f64;
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

/// The frames of both are there, and the plain way's memory is mapped as well.
#[test]
fn a_cold_model_comes_faster_than_by_the_crate_safetensors_and_a_plain_copy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write_model(&path, 160 * MIB);
    let index = Arc::new(TensorIndex::open(&path).unwrap());
    for (disk, link) in RATES {
        let device = card(disk, link, true);
        let pager = pager(&device);
        paged(&pager, &index);
        let ours = paged(&pager, &index);
        drop(pager);
        let ratio = plain(&device, &path) as f64 / ours as f64;
        println!("{disk} GB/s from the file, {link} over the link: {ratio:.2} times as fast");
        assert!(ratio > 1.0, "{disk} GB/s from the file, {link} over the link: {ratio:.2}");
    }
}
