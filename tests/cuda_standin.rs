//! The CUDA backend over the stand-in driver: what it does when the driver refuses, and what it leaves.
//!
//! Each call of the driver is made to fail in turn; whatever fails, nothing may stay behind and the next
//! run must work. Leaks of this kind show on a card as memory that only ends with the process.

#![cfg(feature = "cuda")]
#![expect(unsafe_code, reason = "raw calls of devices and of the stand-in's hooks")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail as its body does")]

mod standin;

use std::ffi::{c_char, c_int, c_void};
use std::process::Command;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::Arc;

use standin::{Standin, alone, standin};
use vram_pager::device::cuda::{CudaDevice, CudaOptions, devices};
use vram_pager::device::{
    AddressRange, DeviceError, Event, FencePool, FrameSet, HostBlock, LiveObjects, PoolAllocation,
    SharedDevice, Stream, StreamPriority, checksum, checksum_launch, open,
};
use vram_pager::units::{MIB, ModelTime};

/// Waits for a stream before what it uses goes, whatever happened.
struct Settled<'a>(&'a Stream);

impl Drop for Settled<'_> {
    fn drop(&mut self) {
        for _ in 0..3 {
            if self.0.synchronize().is_ok() {
                return;
            }
        }
    }
}

/// Everything that the backend can do, once, on a device that is opened and closed here.
fn everything(text: &str) -> Result<(), DeviceError> {
    let device = open(text)?;
    let stream = Arc::new(Stream::new(&device, StreamPriority::High)?);
    let fences = FencePool::new(&device);
    let page = device.info().granularity;
    let mut block = HostBlock::map(&device, page)?;
    block.page_lock()?;
    let sum = PoolAllocation::new(&stream, 8)?;
    let target = PoolAllocation::new(&stream, page)?;
    let memory = if device.info().virtual_memory {
        let mut frames = FrameSet::new(&device, page);
        let frame = frames.create()?;
        let mut range = AddressRange::reserve(&device, 3, page)?;
        range.map(0, &frames, frame)?;
        range.map(2, &frames, frame)?;
        range.set_access(0, 1)?;
        range.set_access(2, 1)?;
        Some((frames, range))
    } else {
        None
    };
    let settled = Settled(&stream);
    // SAFETY: the block is ours, and nothing uses it yet.
    let bytes = unsafe { std::slice::from_raw_parts_mut(block.start(), usize::try_from(page).unwrap()) };
    for (byte, value) in bytes.iter_mut().zip((0..251).cycle()) {
        *byte = value;
    }
    let expected = checksum(bytes, 7);
    let (to, from) = match &memory {
        Some((_, range)) => (range.range().part(0, page), range.range().part(2 * page, page)),
        None => (Some(target.range()), Some(target.range())),
    };
    let (to, from) = (to.unwrap(), from.unwrap());
    // SAFETY: every range is accessible, and `settled` waits before anything of it goes.
    unsafe {
        device.copy_to_device(to, block.start(), ModelTime::ZERO, stream.id())?;
        if memory.is_some() {
            device.copy_on_device(target.range(), from, stream.id())?;
        }
        device.fill(sum.range(), 0, stream.id())?;
        stream.launch(&checksum_launch(device.kernel("checksum")?, target.range(), 7, sum.range()))?;
    }
    let began = fences.record_timed(&stream)?;
    let fence = fences.record(&stream)?;
    fence.wait_on(&stream)?;
    let ended = fences.record_timed(&stream)?;
    fence.is_done()?;
    ended.wait()?;
    assert_eq!(ended.elapsed_since(&began)?.is_some(), device.tells_elapsed());
    assert!(fence.is_done()?);
    assert!(!stream.is_capturing()?);
    let mut answer = 0_u64;
    // SAFETY: the target lives past the wait below.
    unsafe { device.copy_to_host((&raw mut answer).cast(), sum.range(), stream.id())? };
    stream.synchronize()?;
    assert_eq!(answer, expected);
    device.memory()?;
    device.pool_trim(0)?;
    device.pool_figures()?;
    device.synchronize()?;
    drop(settled);
    drop((memory, sum, target, block, began, fence, ended, fences, stream));
    assert_eq!(device.live(), LiveObjects::default());
    Ok(())
}

/// Fails each call in turn with `code`; answers how many failures reached the caller.
fn fail_each_call(standin: &Standin, code: i32) -> u64 {
    standin.fail("");
    let misuses = standin.misuses();
    everything("cuda:0").unwrap();
    let calls = standin.calls();
    assert!(calls > 60, "{calls}");
    let mut failed = 0;
    for nth in 1..=calls {
        standin.fail(&format!("*@{nth}={code}"));
        let outcome = everything("cuda:0");
        failed += u64::from(outcome.is_err());
        if let Err(error) = &outcome {
            assert!(!error.is_misuse(), "call {nth}, code {code}: {error}");
        }
        standin.fail("");
        assert_eq!(standin.leftovers(), 0, "call {nth}, code {code}: {outcome:?}");
        assert_eq!(standin.misuses(), misuses, "call {nth}, code {code}: {outcome:?}");
    }
    everything("cuda:0").unwrap();
    assert!(failed > calls / 2, "most failures reach the caller: {failed} of {calls}");
    failed
}

#[test]
fn whatever_call_fails_nothing_stays_behind_and_the_next_run_works() {
    let (_alone, standin) = alone();
    for (virtual_memory, pools) in [(true, true), (false, false)] {
        standin.set_abilities(virtual_memory, pools);
        fail_each_call(standin, 999);
    }
    standin.set_abilities(true, true);
    // A code that is answered with reclaim and another try.
    fail_each_call(standin, 2);
}

#[test]
fn a_sticky_error_is_reported_at_every_later_call_and_everything_still_drops() {
    let (_alone, standin) = alone();
    let device: SharedDevice = CudaDevice::open(CudaOptions::default()).unwrap();
    let stream = Arc::new(Stream::new(&device, StreamPriority::Normal).unwrap());
    let allocation = PoolAllocation::new(&stream, MIB).unwrap();
    let mut block = HostBlock::map(&device, MIB).unwrap();
    block.page_lock().unwrap();
    let mut frames = FrameSet::new(&device, device.info().granularity);
    let frame = frames.create().unwrap();
    let mut range = AddressRange::reserve(&device, 2, device.info().granularity).unwrap();
    range.map(1, &frames, frame).unwrap();

    standin.fail("cuEventRecord@1=700");
    let error = FencePool::new(&device).record(&stream).unwrap_err();
    assert!(error.is_lost() && error.to_string().contains("cuEventRecord"), "{error}");
    standin.fail("*@1+=719");
    for error in [
        device.memory().unwrap_err(),
        frames.create().unwrap_err(),
        stream.synchronize().unwrap_err(),
        device.kernel("checksum").unwrap_err(),
        PoolAllocation::new(&stream, 8).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(error.is_lost() && text.contains("cuEventRecord") && text.contains("700"), "{text}");
    }
    drop((range, frames, block, allocation, stream));
    assert_eq!(device.live(), LiveObjects::default());
    standin.fail("");
    drop(device);
    everything("cuda:0").expect("the next context is a new one");
}

#[test]
fn a_code_that_nobody_knows_is_an_ordinary_error() {
    let (_alone, standin) = alone();
    let device = open("cuda:0").unwrap();
    standin.fail("cuMemGetInfo_v2@1=31415");
    let error = device.memory().unwrap_err();
    assert!(
        matches!(&error, DeviceError::Driver { code: 31415, name, .. } if name == "unknown"),
        "{error:?}"
    );
    device.memory().expect("the next call works");
}

#[test]
fn an_error_of_a_drop_surfaces_at_the_next_call() {
    let (_alone, standin) = alone();
    let device = open("cuda:0").unwrap();
    let stream = Stream::new(&device, StreamPriority::Normal).unwrap();
    let event = Event::new(&device).unwrap();
    // Refused for good, so that trying again does not help; the driver keeps the event.
    standin.fail("cuEventDestroy_v2@1+=400");
    drop(event);
    standin.fail("");
    let error = device.memory().unwrap_err();
    assert!(error.to_string().contains("cuEventDestroy"), "{error}");
    device.memory().expect("it surfaces once");
    standin.fail("cuStreamDestroy_v2@1=400");
    drop(stream);
    device.memory().expect("refused once, given back at the second try");
}

#[test]
fn a_full_card_is_out_of_memory_with_figures() {
    let (_alone, _) = alone();
    let device = open("cuda:0").unwrap();
    let mut frames = FrameSet::new(&device, device.info().granularity);
    let error = loop {
        if let Err(error) = frames.create() {
            break error;
        }
    };
    let DeviceError::OutOfMemory { requested, free, total, .. } = error else { panic!("{error}") };
    assert_eq!((requested, total), (device.info().granularity, device.info().total_bytes));
    assert!(free < requested);
    frames.release(0).unwrap();
    frames.create().expect("a frame that was given back is there again");
}

#[test]
fn a_cap_makes_a_large_card_a_small_one() {
    let (_alone, _) = alone();
    let device = open("cuda:0,cap=16MiB").unwrap();
    assert_eq!(device.info().total_bytes, 16 * MIB);
    assert_eq!(device.memory().unwrap().free, 16 * MIB);
    let stream = Arc::new(Stream::new(&device, StreamPriority::Normal).unwrap());
    let mut frames = FrameSet::new(&device, 2 * MIB);
    for _ in 0..4 {
        frames.create().unwrap();
    }
    assert_eq!(device.memory().unwrap().free, 8 * MIB);
    assert!(PoolAllocation::new(&stream, 9 * MIB).unwrap_err().is_out_of_memory());
    let allocation = PoolAllocation::new(&stream, 8 * MIB).unwrap();
    assert_eq!(device.memory().unwrap().free, 0);
    assert!(frames.create().unwrap_err().is_out_of_memory());
    drop(allocation);
    stream.synchronize().unwrap();
    // What the pool keeps counts until it is trimmed.
    assert!(frames.create().unwrap_err().is_out_of_memory());
    device.pool_trim(0).unwrap();
    frames.create().unwrap();
    assert_eq!(device.memory().unwrap().free, 6 * MIB);
}

type StreamCreate = unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int;
type StreamDestroy = unsafe extern "C" fn(*mut c_void) -> c_int;
type ContextCall = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;

#[test]
fn foreign_streams_are_adopted_or_refused_and_never_destroyed() {
    let (_alone, standin) = alone();
    let device = open("cuda:0").unwrap();
    // A runner of its own: its calls, its binding of the same primary context.
    let mut context = null_mut();
    let mut foreign = null_mut();
    // SAFETY: the driver's signatures; the retained context is released below.
    let (push, destroy, release) = unsafe {
        let retain: Retain = std::mem::transmute(standin.symbol("cuDevicePrimaryCtxRetain"));
        let push: StreamDestroy = std::mem::transmute(standin.symbol("cuCtxPushCurrent_v2"));
        let create: StreamCreate = std::mem::transmute(standin.symbol("cuStreamCreate"));
        let destroy: StreamDestroy = std::mem::transmute(standin.symbol("cuStreamDestroy_v2"));
        let release: unsafe extern "C" fn(c_int) -> c_int =
            std::mem::transmute(standin.symbol("cuDevicePrimaryCtxRelease_v2"));
        assert_eq!(retain(&raw mut context, 0), 0);
        assert_eq!(push(context), 0);
        assert_eq!(create(&raw mut foreign, 0), 0);
        (push, destroy, release)
    };
    let _ = push;

    // SAFETY: live until after the handles below are gone.
    let adopted = unsafe { Stream::adopt(&device, foreign) }.unwrap();
    let fences = FencePool::new(&device);
    let fence = fences.record(&adopted).unwrap();
    fence.wait().unwrap();
    assert_eq!(device.live().streams, 0, "it is not ours");
    adopted.unregister(&fences).unwrap().wait().unwrap();

    for default in [null_mut(), without_provenance_mut(1)] {
        // SAFETY: default streams.
        let legacy = unsafe { Stream::adopt(&device, default) }.unwrap();
        fences.record(&legacy).unwrap().wait().unwrap();
    }
    // SAFETY: a default stream.
    let error = unsafe { Stream::adopt(&device, without_provenance_mut(2)) }.unwrap_err();
    assert!(error.to_string().contains("per-thread"), "{error}");

    // SAFETY: the driver's signatures; the stream is still the runner's.
    unsafe {
        assert_eq!(destroy(foreign), 0, "adoption left it alone");
        let pop: ContextCall = std::mem::transmute(standin.symbol("cuCtxPopCurrent_v2"));
        assert_eq!(pop(&raw mut foreign), 0);
        assert_eq!(foreign, context, "what was bound is bound");
        assert_eq!(release(0), 0);
    }
    drop((fence, fences, device));
    assert_eq!(standin.leftovers(), 0);
}

#[test]
fn only_events_that_are_to_tell_a_time_keep_one() {
    let (_alone, standin) = alone();
    let misuses = standin.misuses();
    let device = open("cuda:0").unwrap();
    let stream = Stream::new(&device, StreamPriority::Normal).unwrap();
    let fences = FencePool::new(&device);
    let untimed: Vec<_> = (0..3).map(|_| fences.record(&stream).unwrap()).collect();
    untimed[2].wait().unwrap();
    assert_eq!((device.live().events, standin.timed_events(0)), (3, 0));
    assert_eq!(untimed[2].elapsed_since(&untimed[0]).unwrap(), None);
    let timed = [fences.record_timed(&stream).unwrap(), fences.record_timed(&stream).unwrap()];
    timed[1].wait().unwrap();
    assert_eq!((device.live().events, standin.timed_events(0)), (5, 2));
    assert_eq!(timed[1].elapsed_since(&untimed[0]).unwrap(), None);
    assert_eq!(untimed[2].elapsed_since(&timed[0]).unwrap(), None);
    assert_eq!(standin.calls_of("cuEventElapsedTime"), 0, "what keeps no time is not asked for it");
    assert!(timed[1].elapsed_since(&timed[0]).unwrap().is_some());
    drop((untimed, timed));
    // From here on no event is created, and each serves what it served.
    let created = standin.calls_of("cuEventCreate");
    for _ in 0..8 {
        let _ordinary: Vec<_> = (0..3).map(|_| fences.record(&stream).unwrap()).collect();
        let timed = [fences.record_timed(&stream).unwrap(), fences.record_timed(&stream).unwrap()];
        timed[1].wait().unwrap();
        assert!(timed[1].elapsed_since(&timed[0]).unwrap().is_some());
    }
    assert_eq!((standin.calls_of("cuEventCreate"), standin.timed_events(0)), (created, 2));
    assert_eq!(standin.misuses(), misuses);
}

#[test]
fn a_time_that_the_driver_does_not_tell_is_none_and_a_refusal_is_an_error() {
    let (_alone, standin) = alone();
    let device = open("cuda:0").unwrap();
    let stream = Stream::new(&device, StreamPriority::Normal).unwrap();
    let fences = FencePool::new(&device);
    let points = [fences.record_timed(&stream).unwrap(), fences.record_timed(&stream).unwrap()];
    points[1].wait().unwrap();
    let told = || points[1].elapsed_since(&points[0]);
    for code in [400, 600] {
        standin.fail(&format!("cuEventElapsedTime@1={code}"));
        assert_eq!(told().unwrap(), None, "{code}");
    }
    standin.fail("cuEventElapsedTime@1=999");
    assert!(matches!(told().unwrap_err(), DeviceError::Driver { code: 999, .. }));
    assert!(told().unwrap().is_some(), "the next call works");
    standin.fail("cuEventElapsedTime@1=700");
    assert!(told().unwrap_err().is_lost());
    assert!(told().unwrap_err().is_lost());
    standin.fail("");
}

/// The driver's own words for it, which the backend never makes it say.
#[test]
fn the_stand_in_refuses_times_as_a_driver_does() {
    type Elapsed = unsafe extern "C" fn(*mut f32, *mut c_void, *mut c_void) -> c_int;
    type Record = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
    let (_alone, standin) = alone();
    let device = open("cuda:0").unwrap();
    let mut context = null_mut();
    // SAFETY: the driver's signatures; what is retained and created is given back below.
    unsafe {
        let retain: Retain = std::mem::transmute(standin.symbol("cuDevicePrimaryCtxRetain"));
        let push: StreamDestroy = std::mem::transmute(standin.symbol("cuCtxPushCurrent_v2"));
        let pop: ContextCall = std::mem::transmute(standin.symbol("cuCtxPopCurrent_v2"));
        let release: unsafe extern "C" fn(c_int) -> c_int =
            std::mem::transmute(standin.symbol("cuDevicePrimaryCtxRelease_v2"));
        let create_stream: StreamCreate = std::mem::transmute(standin.symbol("cuStreamCreate"));
        let destroy_stream: StreamDestroy = std::mem::transmute(standin.symbol("cuStreamDestroy_v2"));
        let create: StreamCreate = std::mem::transmute(standin.symbol("cuEventCreate"));
        let destroy: StreamDestroy = std::mem::transmute(standin.symbol("cuEventDestroy_v2"));
        let record: Record = std::mem::transmute(standin.symbol("cuEventRecord"));
        let wait: StreamDestroy = std::mem::transmute(standin.symbol("cuEventSynchronize"));
        let elapsed: Elapsed = std::mem::transmute(standin.symbol("cuEventElapsedTime"));
        assert_eq!((retain(&raw mut context, 0), push(context)), (0, 0));
        let (mut stream, mut untimed, mut first, mut second) =
            (null_mut(), null_mut(), null_mut(), null_mut());
        assert_eq!(create_stream(&raw mut stream, 1), 0);
        for (event, flags) in [(&raw mut untimed, 2), (&raw mut first, 0), (&raw mut second, 0)] {
            assert_eq!(create(event, flags), 0);
        }
        let mut time = -1.0;
        assert_eq!((record(untimed, stream), record(first, stream)), (0, 0));
        assert_eq!(elapsed(&raw mut time, first, second), 400, "never recorded");
        assert_eq!(elapsed(&raw mut time, untimed, first), 400, "created without a time");
        assert_eq!(elapsed(&raw mut time, first, stream), 400, "no event");
        let held = standin.hold(0, 1);
        assert_eq!(record(second, stream), 0);
        assert_eq!(elapsed(&raw mut time, first, second), 600, "not passed yet");
        assert!((time - -1.0).abs() < f32::EPSILON, "nothing is told with a refusal");
        drop(held);
        assert_eq!((wait(second), elapsed(&raw mut time, first, second)), (0, 0));
        assert!((999.0..1500.0).contains(&time), "{time} ms of a held second");
        for event in [untimed, first, second] {
            assert_eq!(destroy(event), 0);
        }
        assert_eq!((destroy_stream(stream), pop(&raw mut context), release(0)), (0, 0, 0));
    }
    drop(device);
    assert_eq!(standin.leftovers(), 0);
}

#[test]
fn no_call_leaves_a_context_bound() {
    let (_alone, standin) = alone();
    everything("cuda:0").unwrap();
    let mut current = without_provenance_mut(1);
    // SAFETY: the driver's signature.
    unsafe {
        let get: ContextCall = std::mem::transmute(standin.symbol("cuCtxGetCurrent"));
        assert_eq!(get(&raw mut current), 0);
    }
    assert!(current.is_null(), "{current:p}");
}

/// What a process sees of its driver, in one line a card.
fn report() -> String {
    let mut lines = Vec::new();
    for card in devices() {
        lines.push(match card.state {
            Ok(abilities) => format!(
                "{}: {} {} vmm={} pools={} missing={:?} run={:?}",
                card.device,
                abilities.name,
                abilities.driver_version,
                abilities.granularity.is_ok(),
                abilities.pools,
                abilities.missing_symbols,
                everything(&card.device).map_err(|error| error.to_string()),
            ),
            Err(error) => format!("{}: {error}", card.device),
        });
    }
    lines.join("\n")
}

/// In a process that [`reported`] started, prints the report for it; else checks it here.
#[test]
fn a_card_reports_what_it_can_do() {
    if std::env::var_os("VRAM_PAGER_TEST_REPORTS").is_some() {
        println!("<report>{}</report>", report());
        return;
    }
    let (_alone, _) = alone();
    let report = report();
    assert_eq!(report, "cuda:0: CUDA stand-in 0 12060 vmm=true pools=true missing=[] run=Ok(())");
}

/// The report of a process with other settings of the stand-in, or with none.
fn reported(folder: Option<&std::path::Path>, settings: &[(&str, &str)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "--nocapture", "a_card_reports_what_it_can_do"]);
    child.env("VRAM_PAGER_TEST_REPORTS", "1");
    match folder {
        Some(folder) => child.env("LD_LIBRARY_PATH", folder),
        None => child.env_remove("LD_LIBRARY_PATH"),
    };
    for (name, value) in settings {
        child.env(format!("VRAM_PAGER_STANDIN_{name}"), value);
    }
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{settings:?}: {text}{errors}");
    assert!(!errors.contains("MISUSE"), "{settings:?}: {errors}");
    let (_, rest) = text.split_once("<report>").unwrap_or_else(|| panic!("{text}"));
    rest.split_once("</report>").unwrap().0.to_owned()
}

#[test]
fn each_way_to_be_unusable_is_told_with_what_to_do() {
    let folder = standin().folder();
    let with = |settings: &[(&str, &str)]| reported(Some(folder), settings);
    for (report, parts) in [
        (with(&[("DEVICES", "0")]), &["CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"][..]),
        (with(&[("VERSION", "11080")]), &["CUDA 11.8", "update"]),
        (with(&[("MISSING", "cuDeviceGet,cuMemGetInfo_v2")]), &["cuDeviceGet, cuMemGetInfo_v2"]),
        (
            with(&[("MISSING", "cuCtxPushCurrent_v2,cuCtxSetCurrent")]),
            &["cuCtxPushCurrent_v2 or cuCtxSetCurrent"],
        ),
        (with(&[("FAIL", "cuInit@1+=999")]), &["CUDA_ERROR_UNKNOWN (999)", "nvidia-modprobe"]),
        (with(&[("FAIL", "cuInit@1+=803")]), &["803", "reboot"]),
        (with(&[("FAIL", "cuDevicePrimaryCtxRetain@1+=2")]), &["cuda:0", "the card is full"]),
    ] {
        for part in parts {
            assert!(report.contains(part), "`{part}` is not in: {report}");
        }
        assert!(!report.contains("run="), "{report}");
    }
}

#[test]
fn a_card_with_less_still_works() {
    let folder = standin().folder();
    for (settings, part) in [
        (&[("VMM", "0")][..], "vmm=false pools=true"),
        (&[("VMM", "refuse")], "vmm=false pools=true"),
        (&[("POOLS", "0")], "vmm=true pools=false"),
        (&[("POOLS", "0"), ("VMM", "0")], "vmm=false pools=false"),
        (&[("MISSING", "cuMemMap")], "vmm=false pools=true"),
        (&[("MISSING", "cuMemPoolCreate,cuMemAllocFromPoolAsync")], "vmm=true pools=false"),
        (
            &[("MISSING", "cuStreamCreateWithPriority,cuCtxGetStreamPriorityRange,cuStreamIsCapturing")],
            "vmm=true pools=true",
        ),
        (&[("MISSING", "cuCtxGetCurrent,cuDeviceGetAttribute,cuGetErrorName")], "vmm=true pools=true"),
        (&[("MISSING", "cuEventElapsedTime")], "missing=[\"cuEventElapsedTime\"]"),
        (&[("MISSING", "cuEventCreate")], "missing=[\"cuEventCreate\"]"),
        (&[("VERSION", "12000")], "12000 vmm=true"),
        (&[("PAGE", "64KiB"), ("DELAYS", "9")], "vmm=true"),
    ] {
        let report = reported(Some(folder), settings);
        assert!(report.contains(part) && report.ends_with("run=Ok(())"), "{settings:?}: {report}");
    }
    let report = reported(Some(folder), &[("MISSING", "cuModuleLoadDataEx")]);
    assert!(report.contains("cuda:0 (CUDA stand-in 0) cannot do cuModuleLoadDataEx"), "{report}");
}

#[test]
fn every_card_is_listed_and_works() {
    let report = reported(Some(standin().folder()), &[("DEVICES", "3")]);
    assert_eq!(report.matches("run=Ok(())").count(), 3, "{report}");
    assert!(report.contains("cuda:2: "), "{report}");
}

/// The hook that holds streams back goes by the order of their creation on the card.
#[test]
fn work_on_the_legacy_stream_orders_with_blocking_streams_alone() {
    let (_alone, standin) = alone();
    let device = open("cuda:0").unwrap();
    let own = Arc::new(Stream::new(&device, StreamPriority::Normal).unwrap());
    let fences = FencePool::new(&device);
    let mut context = null_mut();
    let mut foreign = null_mut();
    // SAFETY: the driver's signatures; what is retained and created is given back below.
    let (destroy, pop, release) = unsafe {
        let retain: Retain = std::mem::transmute(standin.symbol("cuDevicePrimaryCtxRetain"));
        let push: StreamDestroy = std::mem::transmute(standin.symbol("cuCtxPushCurrent_v2"));
        let create: StreamCreate = std::mem::transmute(standin.symbol("cuStreamCreate"));
        assert_eq!((retain(&raw mut context, 0), push(context), create(&raw mut foreign, 0)), (0, 0, 0));
        let destroy: StreamDestroy = std::mem::transmute(standin.symbol("cuStreamDestroy_v2"));
        let pop: ContextCall = std::mem::transmute(standin.symbol("cuCtxPopCurrent_v2"));
        let release: unsafe extern "C" fn(c_int) -> c_int =
            std::mem::transmute(standin.symbol("cuDevicePrimaryCtxRelease_v2"));
        (destroy, pop, release)
    };
    {
        // SAFETY: both live until after these handles.
        let (blocking, legacy) = unsafe {
            (Stream::adopt(&device, foreign).unwrap(), Stream::adopt(&device, null_mut()).unwrap())
        };
        let held = standin.hold(0, 2);
        let of_blocking = fences.record(&blocking).unwrap();
        let of_legacy = fences.record(&legacy).unwrap();
        let of_own = fences.record(&own).unwrap();
        of_own.wait().unwrap();
        assert!(!of_blocking.is_done().unwrap() && !of_legacy.is_done().unwrap());
        // Later work of the blocking stream comes after the legacy stream's.
        let later = fences.record(&blocking).unwrap();
        drop(held);
        later.wait().unwrap();
        assert!(of_legacy.is_done().unwrap());
    }
    // SAFETY: the driver's signatures.
    unsafe { assert_eq!((destroy(foreign), pop(&raw mut context), release(0)), (0, 0, 0)) };
}

#[test]
fn a_kernel_that_touches_what_it_may_not_loses_the_card() {
    let (_alone, standin) = alone();
    let device = open("cuda:0").unwrap();
    let stream = Arc::new(Stream::new(&device, StreamPriority::Normal).unwrap());
    let sum = PoolAllocation::new(&stream, 8).unwrap();
    let page = device.info().granularity;
    let mut frames = FrameSet::new(&device, page);
    let frame = frames.create().unwrap();
    let mut range = AddressRange::reserve(&device, 1, page).unwrap();
    range.map(0, &frames, frame).unwrap();
    // Mapped, but access was not set.
    let misuses = standin.misuses();
    let launch = checksum_launch(device.kernel("checksum").unwrap(), range.range(), 0, sum.range());
    // SAFETY: the fault is what is tested; the stand-in reports it instead of crashing.
    let answer = unsafe { stream.launch(&launch) }.and_then(|()| stream.synchronize());
    assert!(answer.unwrap_err().is_lost());
    assert_eq!(standin.misuses(), misuses + 1, "it is told");
    assert!(device.memory().unwrap_err().is_lost());
    drop((range, frames, sum, stream));
    assert_eq!(device.live(), LiveObjects::default());
}

/// What no driver sees reaches the stand-in by its hooks: see the same on the emulated card.
#[test]
fn what_the_host_writes_is_not_copied_before_it_has_ended_and_both_call_sites_are_told() {
    let (_alone, standin) = alone();
    let device = open("cuda:0").unwrap();
    let stream = Arc::new(Stream::new(&device, StreamPriority::Normal).unwrap());
    let target = PoolAllocation::new(&stream, 64).unwrap();
    // Page-locked: a copy from other memory has read it when the call returns.
    let mut block = HostBlock::map(&device, MIB).unwrap();
    block.page_lock().unwrap();
    let host = block.start().cast_const();
    standin.keep_sites(0);
    standin.take_told();
    // SAFETY: the block outlives the copies, which are waited for.
    let copy = || unsafe { device.copy_to_device(target.range(), host, ModelTime::ZERO, stream.id()) };
    let begun = format!("tests/cuda_standin.rs:{}", line!() + 1);
    device.begin_host_write(host.wrapping_add(60), 4).unwrap();
    assert!(copy().is_err());
    let told = standin.take_told();
    assert!(
        matches!(told.as_slice(), [told] if told.contains(&begun)
        && told.contains("cuMemcpyHtoDAsync")
        && told.matches("tests/cuda_standin.rs:").count() > 1),
        "{told:?}"
    );
    device.end_host_write(host.wrapping_add(60), 4);
    copy().unwrap();
    assert!(device.begin_host_write(host, 64).unwrap_err().is_misuse());
    assert_eq!(standin.take_told().len(), 1);
    stream.synchronize().unwrap();
    device.host_write(host, 64).unwrap();
    copy().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(standin.take_told(), Vec::<String>::new());
}

#[test]
fn the_driver_finds_its_own_functions_as_runtimes_look_them_up() {
    type GetProc = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;
    let (_alone, standin) = alone();
    let (mut found, mut status) = (null_mut(), -1);
    // SAFETY: the driver's signature.
    unsafe {
        let get: GetProc = std::mem::transmute(standin.symbol("cuGetProcAddress_v2"));
        assert_eq!(get(c"cuMemFree".as_ptr(), &raw mut found, 12000, 0, &raw mut status), 0);
        assert_eq!((found, status), (standin.symbol("cuMemFree_v2"), 0));
        assert_ne!(get(c"cuNoSuchCall".as_ptr(), &raw mut found, 12000, 0, &raw mut status), 0);
        assert!(found.is_null() && status == 1);
    }
}

#[test]
fn a_second_card_changes_nothing_for_the_first() {
    let (_alone, standin) = alone();
    standin.set_cards(2, 64 * MIB);
    {
        let (first, second) = (open("cuda:0").unwrap(), open("cuda:1").unwrap());
        let page = first.info().granularity;
        let before = first.memory().unwrap();
        let mut frames = FrameSet::new(&second, page);
        while frames.create().is_ok() {}
        assert_eq!(first.memory().unwrap(), before, "the other card is full, this one is not");
        assert_eq!(first.live(), LiveObjects::default());

        // Host memory that one card page-locked serves copies of the other.
        let stream = Stream::new(&first, StreamPriority::Normal).unwrap();
        let mut block = HostBlock::map(&second, page).unwrap();
        block.page_lock().unwrap();
        let target =
            PoolAllocation::new(&Arc::new(Stream::new(&first, StreamPriority::Normal).unwrap()), page);
        let target = target.unwrap();
        // SAFETY: block and target live past the wait.
        unsafe { first.copy_to_device(target.range(), block.start(), ModelTime::ZERO, stream.id()).unwrap() };
        stream.synchronize().unwrap();
        target.stream().synchronize().unwrap();

        // A stream of one card is no stream of the other.
        let mut context = null_mut();
        let mut foreign = null_mut();
        // SAFETY: the driver's signatures; what is retained and created is given back below.
        unsafe {
            let retain: Retain = std::mem::transmute(standin.symbol("cuDevicePrimaryCtxRetain"));
            let push: StreamDestroy = std::mem::transmute(standin.symbol("cuCtxPushCurrent_v2"));
            let create: StreamCreate = std::mem::transmute(standin.symbol("cuStreamCreate"));
            let destroy: StreamDestroy = std::mem::transmute(standin.symbol("cuStreamDestroy_v2"));
            let pop: ContextCall = std::mem::transmute(standin.symbol("cuCtxPopCurrent_v2"));
            let release: unsafe extern "C" fn(c_int) -> c_int =
                std::mem::transmute(standin.symbol("cuDevicePrimaryCtxRelease_v2"));
            assert_eq!((retain(&raw mut context, 1), push(context), create(&raw mut foreign, 1)), (0, 0, 0));
            let error = Stream::adopt(&first, foreign).unwrap_err();
            assert!(error.to_string().contains("another context"), "{error}");
            drop(Stream::adopt(&second, foreign).unwrap());
            assert_eq!((destroy(foreign), pop(&raw mut context), release(1)), (0, 0, 0));
        }
        // A card that is lost leaves the other alone.
        standin.fail("cuMemGetInfo_v2@1=700");
        assert!(second.memory().unwrap_err().is_lost());
        standin.fail("");
        assert_eq!(first.memory().unwrap().total, before.total);
        assert!(second.memory().unwrap_err().is_lost());
    }
    assert_eq!(standin.leftovers(), 0);
    standin.set_cards(1, 256 * MIB);
}
