//! What is larger than the card goes in pieces or row by row; only what could never fit is refused, with
//! the bytes that it needs, the most that there could be, and who holds the rest. Odd tensors (no
//! dimensions, one dimension, no bytes) are tensors like others.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Numbers, Watchdog, assert_nothing_left, pager, small_card, small_options, unit_id};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use vram_pager::device::KernelArg;
use vram_pager::device::{KernelArgs, Launch, SharedDevice, checksum};
use vram_pager::pager::{ModelOptions, PagedModel, PagerError, PagerStream, Verifier};
use vram_pager::units::{DeviceRange, KIB, MIB};
use vram_pager::weights::TensorIndex;

/// Writes U8 tensors of the given shapes with seeded bytes.
fn write(path: &Path, tensors: &[(&str, Vec<usize>)], seed: u64) -> Arc<TensorIndex> {
    let mut numbers = Numbers(seed | 1);
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, shape)| {
            let count: usize = shape.iter().product();
            let words = (0..count.div_ceil(8)).flat_map(|_| numbers.next().to_le_bytes());
            words.take(count).collect()
        })
        .collect();
    let views = tensors.iter().zip(&data).map(|((name, shape), bytes)| {
        ((*name).to_owned(), TensorView::new(Dtype::U8, shape.clone(), bytes).unwrap())
    });
    serialize_to_file(views.collect::<Vec<_>>(), None, path).unwrap();
    Arc::new(TensorIndex::open(path).unwrap())
}

/// The checksum kernel's answer for `range`, on the stream.
#[expect(unsafe_code, reason = "launches the checksum kernel on guarded addresses")]
fn sum_on_card(device: &SharedDevice, model: &PagedModel, stream: &PagerStream, range: DeviceRange) -> u64 {
    let sum = model.pager().allocate(stream, 8).unwrap();
    let place = sum.range().part(0, 8).unwrap();
    let args = KernelArgs::new(&[
        KernelArg::Read(range),
        KernelArg::U64(range.bytes),
        KernelArg::U64(0),
        KernelArg::Write(place),
    ])
    .unwrap();
    let kernel = device.kernel("checksum").unwrap();
    let launch = Launch { kernel, grid: [1, 1, 1], block: [256, 1, 1], shared_bytes: 0, args };
    let mut found = [0_u8; 8];
    // SAFETY: the allocation is ours, the range is under the caller's guard, and the stream is waited for
    // before `found` is read.
    unsafe {
        device.fill(place, 0, stream.id()).unwrap();
        stream.launch(&launch).unwrap();
        device.copy_to_host(found.as_mut_ptr(), place, stream.id()).unwrap();
    }
    stream.synchronize().unwrap();
    u64::from_le_bytes(found)
}

#[test]
fn a_unit_larger_than_the_card_goes_in_pieces_and_its_whole_is_refused_with_all_figures() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let index = write(
        &path,
        &[("big.weight", vec![3000, 1000]), ("big.bias", vec![3000]), ("small.weight", vec![100, 100])],
        3,
    );
    let device = small_card(MIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(index, &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let verifier = Verifier::new(&model).unwrap();
        let big = model.unit("big").unwrap();
        let mut check = verifier.begin(&stream).unwrap();
        for _ in 0..3 {
            let error = model.fault(big, &stream).unwrap_err();
            let PagerError::NeverFits { need, limit, holders, .. } = &error else { panic!("{error}") };
            assert!(*need >= 3_000_000 && *limit < MIB && *limit >= MIB - 128 * KIB, "{error}");
            assert!(holders.iter().any(|(name, bytes)| name == "activations" && *bytes > 0), "{error}");
            assert!(error.to_string().contains("big") && error.to_string().contains("piece"), "{error}");
            let mut rows = 0;
            for piece in 0..model.pieces(big).unwrap() {
                let guard = model.fault_piece(big, piece, &stream).unwrap();
                check.tensors(&guard.tensors()).unwrap();
                if let Some(weight) = guard.tensor("weight") {
                    assert_eq!(weight.rows.start, rows);
                    assert_eq!(weight.shape, [weight.rows.end - weight.rows.start, 1000]);
                    assert_eq!(weight.bytes, (weight.rows.end - weight.rows.start) * 1000);
                    rows = weight.rows.end;
                }
            }
            assert_eq!(rows, 3000);
            assert_eq!(check.finish().unwrap(), []);
        }
        assert!(model.say_pieces_once() && !model.say_pieces_once());
        let error = model.fault_piece(big, model.pieces(big).unwrap(), &stream).unwrap_err();
        assert!(matches!(error, PagerError::NotFound { .. }), "{error}");
    }
    assert_nothing_left(&device);
}

#[test]
fn a_row_larger_than_the_card_is_refused_and_costs_the_others_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let index = write(&path, &[("small.weight", vec![512, 512]), ("wide.weight", vec![3, 2 << 20])], 4);
    let device = small_card(MIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(index, &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let verifier = Verifier::new(&model).unwrap();
        let mut check = verifier.begin(&stream).unwrap();
        let small = model.unit("small").unwrap();
        let wide = model.unit("wide").unwrap();
        check.tensors(&model.fault(small, &stream).unwrap().tensors()).unwrap();
        let resident = model.figures().resident_bytes;
        let tensor = model.index().tensor("wide.weight").unwrap();
        let refusals = [
            model.fault_piece(wide, 0, &stream).unwrap_err(),
            model.fault_rows(tensor, &[1], &stream).map(drop).unwrap_err(),
        ];
        for error in refusals {
            let PagerError::NeverFits { need, limit, holders, .. } = &error else { panic!("{error}") };
            assert!(*need >= 2 << 20 && *limit <= MIB && *limit > 0, "{error}");
            assert!(!holders.is_empty(), "{error}");
            assert!(error.to_string().contains("wide"), "{error}");
        }
        assert_eq!(model.figures().resident_bytes, resident, "a refusal emptied the card");
        check.tensors(&model.fault(small, &stream).unwrap().tensors()).unwrap();
        assert_eq!(check.finish().unwrap(), []);
    }
    assert_nothing_left(&device);
}

#[test]
fn random_rows_come_packed_in_the_order_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    // Rows of 300 bytes, and rows that are larger than a staging buffer of 256 KiB.
    let index = write(&path, &[("table.weight", vec![20_000, 300]), ("wide.weight", vec![6, 400_000])], 5);
    let file = std::fs::read(&path).unwrap();
    let device = small_card(2 * MIB);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(Arc::clone(&index), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        let mut numbers = Numbers(77);
        for (name, row_bytes, most) in [("table.weight", 300_u64, 3000), ("wide.weight", 400_000, 3)] {
            let tensor = index.tensor(name).unwrap();
            let info = index.tensor_info(tensor);
            for _ in 0..12 {
                let mut rows: Vec<u64> =
                    (0..=numbers.below(most)).map(|_| numbers.below(info.shape[0])).collect();
                rows.push(rows[0]);
                let guard =
                    model.fault_rows(tensor, &rows, &stream).unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(guard.shape()[0], rows.len() as u64);
                let expected: Vec<u8> = rows
                    .iter()
                    .flat_map(|row| {
                        let start = usize::try_from(info.offset + row * row_bytes).unwrap();
                        file[start..start + usize::try_from(row_bytes).unwrap()].to_vec()
                    })
                    .collect();
                assert_eq!(guard.range().bytes, expected.len() as u64);
                let found = sum_on_card(&device, &model, &stream, guard.range());
                assert_eq!(found, checksum(&expected, 0), "{name}: {} rows from {}", rows.len(), rows[0]);
            }
            for refused in [vec![info.shape[0]], vec![0, u64::MAX], vec![]] {
                let error = model.fault_rows(tensor, &refused, &stream).map(drop).unwrap_err();
                let named = matches!(
                    error,
                    PagerError::NotFound { .. } | PagerError::InvalidArgument { what: "fault_rows", .. }
                );
                assert!(named, "{error}");
            }
        }
    }
    assert_nothing_left(&device);
}

#[test]
fn rows_from_several_threads_beside_units_are_right() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let index = write(&path, &[("table.weight", vec![20_000, 300]), ("layer.weight", vec![800, 1000])], 8);
    let file = std::fs::read(&path).unwrap();
    let device = small_card(2 * MIB);
    let _watchdog = common::Watchdog::new(60, "rows of several threads");
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(Arc::clone(&index), &ModelOptions::default()).unwrap();
        let streams: Vec<_> = (0..4).map(|_| pager.stream().unwrap()).collect();
        let tensor = index.tensor("table.weight").unwrap();
        let info = index.tensor_info(tensor);
        std::thread::scope(|scope| {
            for (number, stream) in (1..).zip(&streams) {
                let (model, device, file) = (&model, &device, &file);
                scope.spawn(move || {
                    let mut numbers = Numbers(number * 1000);
                    for _ in 0..20 {
                        let rows: Vec<u64> = (0..100).map(|_| numbers.below(20_000)).collect();
                        let guard = model.fault_rows(tensor, &rows, stream).unwrap();
                        drop(model.fault_piece(unit_id(numbers.below(2)), 0, stream));
                        let expected: Vec<u8> = rows
                            .iter()
                            .flat_map(|row| {
                                let start = usize::try_from(info.offset + row * 300).unwrap();
                                file[start..start + 300].to_vec()
                            })
                            .collect();
                        let found = sum_on_card(device, model, stream, guard.range());
                        assert_eq!(found, checksum(&expected, 0));
                    }
                });
            }
        });
    }
    assert_nothing_left(&device);
}

#[test]
fn odd_tensors_are_tensors_like_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let index = write(
        &path,
        &[
            ("empty.weight", vec![0]),
            ("flat.weight", vec![100_000]),
            ("hollow.weight", vec![5, 0, 7]),
            ("scalar.value", vec![]),
            ("tiny.weight", vec![1]),
        ],
        6,
    );
    for card in [128 * KIB, 192 * KIB, MIB] {
        let device = small_card(card);
        {
            let pager = pager(&device, small_options());
            let model = pager.open_model(Arc::clone(&index), &ModelOptions::default()).unwrap();
            let stream = pager.stream().unwrap();
            for _ in 0..3 {
                for unit in 0..index.units().len() as u64 {
                    let unit = unit_id(unit);
                    for piece in 0..model.pieces(unit).unwrap() {
                        let guard = model.fault_piece(unit, piece, &stream).unwrap();
                        for view in guard.tensors() {
                            let info = index.tensor_info(index.tensor(view.name).unwrap());
                            assert_eq!(view.shape.len(), info.shape.len());
                            if model.pieces(unit).unwrap() == 1 {
                                assert_eq!((view.bytes, &view.shape), (info.bytes, &info.shape));
                            }
                        }
                    }
                }
            }
            for (name, rows) in [("scalar.value", vec![0, 0]), ("flat.weight", vec![99_999, 0, 5])] {
                let tensor = index.tensor(name).unwrap();
                let guard =
                    model.fault_rows(tensor, &rows, &stream).unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(guard.range().bytes, rows.len() as u64);
            }
            for name in ["empty.weight", "hollow.weight"] {
                let tensor = index.tensor(name).unwrap();
                let answer = model.fault_rows(tensor, &[0], &stream).map(|guard| guard.range().bytes);
                assert!(answer.is_err(), "{name}");
            }
        }
        assert_nothing_left(&device);
    }
}

#[test]
fn a_model_of_nothing_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let index = write(&path, &[("empty.weight", vec![0, 4])], 6);
    let device = small_card(MIB);
    {
        let pager = pager(&device, small_options());
        let stream = pager.stream().unwrap();
        let model = pager.open_model(index, &ModelOptions::default()).unwrap();
        for _ in 0..3 {
            let guard = model.fault(unit_id(0), &stream).unwrap();
            assert_eq!(guard.tensors()[0].bytes, 0);
        }
    }
    assert_nothing_left(&device);
}

#[test]
fn a_unit_of_exactly_the_card_is_taken_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let card = 512 * KIB;
    let bytes = usize::try_from(card).unwrap();
    let index = write(&path, &[("a.weight", vec![16, bytes / 16]), ("b.weight", vec![16, bytes / 16])], 7);
    let file = std::fs::read(&path).unwrap();
    let device = small_card(card);
    {
        let pager = pager(&device, small_options());
        let model = pager.open_model(Arc::clone(&index), &ModelOptions::default()).unwrap();
        let stream = pager.stream().unwrap();
        for _ in 0..2 {
            for unit in 0..2 {
                let guard = model.fault(unit_id(unit), &stream).unwrap();
                let view = &guard.tensors()[0];
                assert_eq!(view.bytes, card);
                let info = index.tensor_info(index.tensor(view.name).unwrap());
                let start = usize::try_from(info.offset).unwrap();
                // The card is full, so a kernel has no place for its sum: read the addresses back instead.
                let mut found = vec![0_u8; bytes];
                read_back(&device, &stream, view.range(), &mut found);
                assert_eq!(found, file[start..start + bytes]);
                let other = model.fault(unit_id(1 - unit), &stream).unwrap_err();
                assert!(matches!(other, PagerError::Held { .. }), "{other}");
            }
        }
    }
    assert_nothing_left(&device);
}

/// Each of the two has room alone, and both do not: whoever has some of its pieces must not make the other let go
/// of its own, and be made to in turn, for ever. Counted in bytes, each time little more than a unit.
#[test]
fn threads_that_take_cut_units_whole_do_not_undo_each_other() {
    const FAULTS: u64 = 300;
    const UNIT: u64 = 640 * KIB;
    let _watchdog = Watchdog::new(100, "units of several pieces, taken whole");
    let folder = tempfile::tempdir().unwrap();
    let shape = vec![640, 1024];
    let tensors = [("a.weight", shape.clone()), ("b.weight", shape.clone()), ("c.weight", shape)];
    let index = write(&folder.path().join("m.safetensors"), &tensors, 5);
    let device = small_card(MIB);
    {
        let pager = pager(&device, small_options());
        let options = ModelOptions { piece_bytes: Some(64 * KIB), ..ModelOptions::default() };
        let model = pager.open_model(index, &options).unwrap();
        assert_eq!(model.pieces(unit_id(0)).unwrap(), 10);
        std::thread::scope(|scope| {
            for thread in 0..3_u64 {
                let (pager, model) = (&pager, &model);
                scope.spawn(move || {
                    let stream = pager.stream().unwrap();
                    for number in 0..FAULTS {
                        let unit = unit_id((thread + number) % 3);
                        let deadline = Instant::now() + Duration::from_secs(60);
                        model.fault_when_free(unit, &stream, deadline).unwrap().release();
                    }
                });
            }
        });
        let copied = model.counts().copied_bytes;
        assert!(copied <= 3 * FAULTS * 2 * UNIT, "{copied} bytes for {} of units", 3 * FAULTS * UNIT);
    }
    assert_nothing_left(&device);
}

#[expect(unsafe_code, reason = "copies guarded addresses back")]
fn read_back(device: &SharedDevice, stream: &PagerStream, from: DeviceRange, to: &mut [u8]) {
    assert_eq!(from.bytes, to.len() as u64);
    // SAFETY: the caller holds a guard of the range, and the stream is waited for before `to` is read.
    unsafe { device.copy_to_host(to.as_mut_ptr(), from, stream.id()).unwrap() };
    stream.synchronize().unwrap();
}
