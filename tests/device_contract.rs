//! What every device keeps to, whatever stands behind it.
//!
//! Each promise is a function over a [`Rig`]; the macro at the end makes a test of it for each backend.
//! A new backend adds a function that opens its rig and a line there. What only the emulated card
//! promises (modelled times, faults, checks of every address) is in `emulated_device.rs`.

#![expect(unsafe_code, reason = "the contract of the raw calls is what is tested")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[cfg(feature = "cuda")]
mod standin;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use vram_pager::device::{
    AddressRange, DeviceError, Event, FencePool, FrameSet, HostBlock, KernelArg, KernelArgs, KernelModule,
    Launch, LiveObjects, PoolAllocation, SharedDevice, Stream, StreamPriority, TwinArg, checksum,
    checksum_launch,
};
use vram_pager::units::{DeviceAddress, DeviceRange, MIB, ModelTime};

/// Holds a stream back until the answer is dropped.
type HoldStream = Box<dyn Fn(&Stream) -> Box<dyn Any>>;

/// A device under test, and how to hold one of its streams back, if it can.
struct Rig {
    device: SharedDevice,
    hold: Option<HoldStream>,
    /// Whether the device sees that a launch's arguments are not the kernel's; a card does not.
    checks_arguments: bool,
}

impl Rig {
    fn page(&self) -> u64 {
        self.device.info().granularity
    }

    fn stream(&self) -> Arc<Stream> {
        Arc::new(Stream::new(&self.device, StreamPriority::Normal).unwrap())
    }

    /// A range of `pages`, each mapped to a frame of its own and accessible.
    fn mapped(&self, pages: u32) -> (AddressRange, FrameSet) {
        let mut frames = FrameSet::new(&self.device, self.page());
        let mut range = AddressRange::reserve(&self.device, pages as usize, self.page()).unwrap();
        for page in 0..pages {
            let frame = frames.create().unwrap();
            range.map(page, &frames, frame).unwrap();
        }
        range.set_access(0, pages).unwrap();
        (range, frames)
    }

    fn locked(&self, bytes: u64) -> HostBlock {
        let mut block = HostBlock::map(&self.device, bytes).unwrap();
        block.page_lock().unwrap();
        block
    }
}

/// Bytes that differ at every place.
fn pattern(bytes: u64, salt: u64) -> Vec<u8> {
    (0..bytes).map(|i| (i.wrapping_mul(0x9E37_79B9).wrapping_add(salt * 77) >> 7).to_le_bytes()[0]).collect()
}

fn host_bytes(block: &HostBlock) -> &[u8] {
    // SAFETY: the tests wait for the copies that use a block before they look at it.
    unsafe { std::slice::from_raw_parts(block.start(), usize::try_from(block.bytes()).unwrap()) }
}

fn write_host_bytes(block: &HostBlock, bytes: &[u8]) {
    assert!(bytes.len() as u64 <= block.bytes());
    // SAFETY: the block is at least as long, and no copy uses it yet.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), block.start(), bytes.len()) };
}

fn upload(stream: &Stream, to: DeviceRange, bytes: &[u8]) {
    // SAFETY: the bytes outlive the wait below, and callers pass mapped ranges.
    unsafe {
        let from = bytes.as_ptr();
        stream.device().copy_to_device(to, from, ModelTime::ZERO, stream.id()).unwrap();
    }
    stream.synchronize().unwrap();
}

fn download(stream: &Stream, from: DeviceRange) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(from.bytes).unwrap()];
    // SAFETY: the target outlives the wait below, and callers pass mapped ranges.
    unsafe { stream.device().copy_to_host(bytes.as_mut_ptr(), from, stream.id()).unwrap() };
    stream.synchronize().unwrap();
    bytes
}

fn launch(device: &SharedDevice, kernel: &str, args: &[KernelArg]) -> Launch {
    Launch {
        kernel: device.kernel(kernel).unwrap(),
        grid: [1, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: KernelArgs::new(args).unwrap(),
    }
}

fn assert_misuse<T: std::fmt::Debug>(answer: Result<T, DeviceError>, part: &str) {
    let error = answer.unwrap_err();
    assert!(error.is_misuse(), "{error:?}");
    assert!(error.to_string().contains(part), "`{part}` is not in: {error}");
}

fn bytes_survive_the_way_to_the_device_and_back(rig: &Rig) {
    let stream = rig.stream();
    let (range, frames) = rig.mapped(3);
    let source = rig.locked(range.range().bytes);
    write_host_bytes(&source, &pattern(range.range().bytes, 1));
    let sum = PoolAllocation::new(&stream, 8).unwrap();
    // SAFETY: the block and the range live past the waits of this test.
    unsafe {
        let (device, id) = (&rig.device, stream.id());
        device.copy_to_device(range.range(), source.start(), ModelTime::ZERO, id).unwrap();
        device.fill(sum.range(), 0, id).unwrap();
        let kernel = device.kernel("checksum").unwrap();
        stream.launch(&checksum_launch(kernel, range.range(), 0, sum.range())).unwrap();
    }
    let expected = checksum(host_bytes(&source), 0);
    assert_eq!(download(&stream, sum.range()), expected.to_le_bytes());
    assert_eq!(download(&stream, range.range()), host_bytes(&source));
    // Parts that begin and end anywhere.
    let part = range.range().part(rig.page() - 3, 11).unwrap();
    assert_eq!(
        download(&stream, part),
        host_bytes(&source)[usize::try_from(rig.page()).unwrap() - 3..][..11]
    );
    drop((range, frames));
}

fn a_write_through_one_address_is_read_through_the_other(rig: &Rig) {
    let stream = rig.stream();
    let mut frames = FrameSet::new(&rig.device, rig.page());
    let frame = frames.create().unwrap();
    let mut range = AddressRange::reserve(&rig.device, 4, rig.page()).unwrap();
    for page in [0, 3] {
        range.map(page, &frames, frame).unwrap();
        range.set_access(page, 1).unwrap();
    }
    let first = DeviceRange::new(range.address(0), 4096);
    let second = DeviceRange::new(range.address(3), 4096);
    for salt in 0..2 {
        let (to, from) = if salt == 0 { (first, second) } else { (second, first) };
        upload(&stream, to, &pattern(4096, salt));
        assert_eq!(download(&stream, from), pattern(4096, salt));
    }
    // SAFETY: all work was waited for.
    unsafe { range.unmap(0).unwrap() };
    assert_eq!(download(&stream, second), pattern(4096, 1));
}

fn a_frame_keeps_its_bytes_when_it_is_mapped_elsewhere(rig: &Rig) {
    let stream = rig.stream();
    let (mut range, frames) = rig.mapped(1);
    let mut other = AddressRange::reserve(&rig.device, 1, rig.page()).unwrap();
    upload(&stream, range.range(), &pattern(rig.page(), 5));
    // SAFETY: all work was waited for.
    unsafe { range.unmap(0).unwrap() };
    other.map(0, &frames, 0).unwrap();
    other.set_access(0, 1).unwrap();
    assert_eq!(download(&stream, other.range()), pattern(rig.page(), 5));
}

fn a_released_frame_lives_until_its_last_mapping_is_gone(rig: &Rig) {
    let stream = rig.stream();
    let free = rig.device.memory().unwrap().free;
    let (mut range, mut frames) = rig.mapped(1);
    upload(&stream, range.range(), &pattern(rig.page(), 9));
    frames.release(0).unwrap();
    assert_eq!(rig.device.memory().unwrap().free, free - rig.page());
    assert_eq!(download(&stream, range.range()), pattern(rig.page(), 9));
    // SAFETY: all work was waited for.
    unsafe { range.unmap(0).unwrap() };
    assert_eq!(rig.device.memory().unwrap().free, free);
    assert_misuse(frames.release(0), "before");
}

fn frames_of_several_pages_are_mapped_and_unmapped_as_one(rig: &Rig) {
    let stream = rig.stream();
    let large = 3 * rig.page();
    let mut frames = FrameSet::new(&rig.device, large);
    let frame = frames.create().unwrap();
    let mut range = AddressRange::reserve(&rig.device, 2, large).unwrap();
    range.map(1, &frames, frame).unwrap();
    range.set_access(1, 1).unwrap();
    let at = DeviceRange::new(range.address(1), large);
    upload(&stream, at, &pattern(large, 3));
    assert_eq!(download(&stream, at), pattern(large, 3));
    // SAFETY: the calls are refused or take back what nobody uses.
    unsafe {
        let part = at.part(0, rig.page()).unwrap();
        assert!(rig.device.unmap(part).is_err());
        assert!(rig.device.set_access(part).is_err());
        range.unmap(1).unwrap();
    }
}

fn ranges_and_frames_are_whole_pages(rig: &Rig) {
    for bytes in [0, 1, rig.page() - 1, rig.page() + 1] {
        for error in [rig.device.reserve(bytes).unwrap_err(), rig.device.create_frame(bytes).unwrap_err()] {
            assert!(matches!(error, DeviceError::InvalidArgument { .. }), "{error:?}");
        }
    }
    let range = rig.device.reserve(5 * rig.page()).unwrap();
    assert_eq!(range.start.0 % rig.page(), 0);
    let frame = rig.device.create_frame(rig.page()).unwrap();
    // SAFETY: the calls are refused or give back what was just made.
    unsafe {
        let two = DeviceRange::new(range.start, 2 * rig.page());
        let error = rig.device.map(two, frame).unwrap_err();
        assert!(matches!(error, DeviceError::InvalidArgument { .. }), "{error:?}");
        rig.device.release_frame(frame).unwrap();
        rig.device.free(range).unwrap();
    }
    let error = rig.device.reserve(u64::MAX - rig.page() + 1).unwrap_err();
    assert!(matches!(error, DeviceError::Host { .. } | DeviceError::Driver { .. }), "{error:?}");
}

fn giving_back_twice_and_mapping_over_a_mapping_are_misuse(rig: &Rig) {
    let device = &rig.device;
    let range = device.reserve(2 * rig.page()).unwrap();
    let page = range.part(0, rig.page()).unwrap();
    let (frame, second) =
        (device.create_frame(rig.page()).unwrap(), device.create_frame(rig.page()).unwrap());
    // SAFETY: each misuse is refused before it does anything.
    unsafe {
        device.map(page, frame).unwrap();
        assert_misuse(device.map(page, second), "mapping");
        assert_misuse(device.map(page, frame), "mapping");
        assert_misuse(device.free(range), "mapped");
        device.unmap(page).unwrap();
        assert_misuse(device.unmap(page), "not mapped");
        assert_misuse(device.set_access(page), "not mapped");
        device.release_frame(frame).unwrap();
        assert_misuse(device.release_frame(frame), "frame");
        assert_misuse(device.map(page, frame), "frame");
        let third = device.create_frame(rig.page()).unwrap();
        assert_ne!(third, frame, "an id was used again");
        device.free(range).unwrap();
        assert_misuse(device.free(range), "not reserved");
        assert_misuse(device.map(page, second), "reserved range");
        device.release_frame(second).unwrap();
        device.release_frame(third).unwrap();
    }
}

fn streams_and_events_that_are_gone_are_misuse(rig: &Rig) {
    let device = &rig.device;
    let stream = device.create_stream(StreamPriority::High).unwrap();
    let event = device.create_event().unwrap();
    // SAFETY: each misuse is refused before it does anything.
    unsafe {
        device.record(event, stream).unwrap();
        device.destroy_stream(stream).unwrap();
        assert_misuse(device.destroy_stream(stream), "stream");
        assert_misuse(device.wait_stream(stream), "stream");
        assert_misuse(device.record(event, stream), "stream");
        assert_misuse(device.stream_wait(stream, event), "stream");
        assert_misuse(device.pool_allocate(256, stream), "stream");
        assert_misuse(device.charge_compute(stream, std::time::Duration::ZERO), "stream");
        let nowhere = DeviceRange::new(DeviceAddress(0), 0);
        assert_misuse(device.fill(nowhere, 0, stream), "stream");
        // The point that was recorded outlives its stream.
        device.wait_event(event).unwrap();
        device.destroy_event(event).unwrap();
        assert_misuse(device.destroy_event(event), "event");
        assert_misuse(device.query(event), "event");
        assert_misuse(device.wait_event(event), "event");
        let next = device.create_stream(StreamPriority::Normal).unwrap();
        assert_ne!(next, stream, "an id was used again");
        assert_misuse(device.stream_wait(next, event), "event");
        device.destroy_stream(next).unwrap();
    }
}

fn an_event_that_was_never_recorded_is_no_wait(rig: &Rig) {
    let stream = rig.stream();
    let event = rig.device.create_event().unwrap();
    // SAFETY: stream and event are live.
    unsafe {
        assert!(rig.device.query(event).unwrap());
        rig.device.wait_event(event).unwrap();
        rig.device.stream_wait(stream.id(), event).unwrap();
        stream.synchronize().unwrap();
        rig.device.destroy_event(event).unwrap();
    }
}

/// Starts from a stalled stream, so that it is the stall and no race that keeps the copy in flight.
fn a_copy_is_in_flight_while_the_host_goes_on(rig: &Rig) {
    let Some(hold) = &rig.hold else { return };
    let (stalled, copier, reader) = (rig.stream(), rig.stream(), rig.stream());
    let (range, _frames) = rig.mapped(2);
    let page = |number| range.range().part(number * rig.page(), rig.page()).unwrap();
    upload(&reader, page(0), &pattern(rig.page(), 1));
    upload(&reader, page(1), &pattern(rig.page(), 3));
    let source = rig.locked(rig.page());
    write_host_bytes(&source, &pattern(rig.page(), 2));
    let fences = FencePool::new(&rig.device);

    let stall = hold(&stalled);
    let gate = fences.record(&stalled).unwrap();
    gate.wait_on(&copier).unwrap();
    // SAFETY: the block and the range live past the wait of this test.
    unsafe {
        rig.device.copy_to_device(page(0), source.start(), ModelTime::ZERO, copier.id()).unwrap();
    }
    let done = fences.record(&copier).unwrap();
    // The host and another stream go on. It reads beside the copy: what the copy writes it must wait for.
    assert_eq!(download(&reader, page(1)), pattern(rig.page(), 3));
    assert!(!done.is_done().unwrap());
    drop(stall);
    done.wait().unwrap();
    assert!(done.is_done().unwrap());
    assert_eq!(download(&reader, page(0)), pattern(rig.page(), 2));
}

fn an_event_answers_for_its_newest_record(rig: &Rig) {
    let Some(hold) = &rig.hold else { return };
    let device = &rig.device;
    let (prompt, stalled, waiter) = (rig.stream(), rig.stream(), rig.stream());
    let (range, _frames) = rig.mapped(1);
    let word = range.range().part(0, 4).unwrap();
    let other = range.range().part(8, 4).unwrap();
    let event = device.create_event().unwrap();
    // SAFETY: stream, event and range are live.
    unsafe {
        device.record(event, stalled.id()).unwrap();
        let stall = hold(&stalled);
        device.fill(word, 7, stalled.id()).unwrap();
        device.record(event, stalled.id()).unwrap();
        assert!(!device.query(event).unwrap(), "the record before last answered");
        // A wait captures the record that is newest when it is made, and holds when the event is gone.
        device.stream_wait(waiter.id(), event).unwrap();
        device.copy_on_device(other, word, waiter.id()).unwrap();
        device.record(event, prompt.id()).unwrap();
        device.wait_event(event).unwrap();
        device.destroy_event(event).unwrap();
        drop(stall);
    }
    waiter.synchronize().unwrap();
    assert_eq!(download(&waiter, other), [7; 4]);
}

fn a_stream_that_is_destroyed_runs_its_work(rig: &Rig) {
    let Some(hold) = &rig.hold else { return };
    let (stream, reader) = (rig.stream(), rig.stream());
    let (range, _frames) = rig.mapped(1);
    let fences = FencePool::new(&rig.device);
    let stall = hold(&stream);
    // SAFETY: the range lives past the wait below.
    unsafe { rig.device.fill(range.range(), 0x5A, stream.id()).unwrap() };
    let fence = fences.record(&stream).unwrap();
    drop(stream);
    drop(stall);
    fence.wait().unwrap();
    assert!(download(&reader, range.range()).iter().all(|byte| *byte == 0x5A));
}

fn streams_run_in_order(rig: &Rig) {
    let stream = rig.stream();
    let (range, _frames) = rig.mapped(2);
    let (first, second) =
        (range.range().part(0, rig.page()).unwrap(), range.range().part(rig.page(), rig.page()).unwrap());
    for value in 0..20 {
        // SAFETY: the range lives past the wait below.
        unsafe {
            rig.device.fill(first, value, stream.id()).unwrap();
            rig.device.copy_on_device(second, first, stream.id()).unwrap();
            rig.device.fill(first, 0xFF, stream.id()).unwrap();
        }
    }
    assert!(download(&stream, second).iter().all(|byte| *byte == 19));
    assert!(download(&stream, first).iter().all(|byte| *byte == 0xFF));
}

fn the_pool_accounts_for_what_it_reserves_and_uses(rig: &Rig) {
    let (stream, device) = (rig.stream(), &rig.device);
    let before = device.memory().unwrap().free;
    let first = PoolAllocation::new(&stream, 1000).unwrap();
    let second = PoolAllocation::new(&stream, rig.page() + 1).unwrap();
    assert_eq!(first.range().start.0 % 256, 0);
    assert_eq!(first.range().bytes, 1000);
    assert!(!first.range().overlaps(second.range()));
    let figures = device.pool_figures().unwrap();
    assert!(figures.used >= rig.page() + 1001 && figures.reserved >= figures.used, "{figures:?}");
    assert_eq!(device.memory().unwrap().free, before - figures.reserved);
    upload(&stream, second.range(), &pattern(rig.page() + 1, 4));
    assert_eq!(download(&stream, second.range()), pattern(rig.page() + 1, 4));

    // What is freed stays reserved, serves the same stream again at once, and goes back on request.
    drop(second);
    assert_eq!(device.pool_figures().unwrap().reserved, figures.reserved);
    let again = PoolAllocation::new(&stream, rig.page()).unwrap();
    assert_eq!(device.pool_figures().unwrap().reserved, figures.reserved);
    drop((first, again));
    stream.synchronize().unwrap();
    assert_eq!(device.pool_figures().unwrap().used, 0);
    device.pool_trim(u64::MAX).unwrap();
    assert_eq!(device.pool_figures().unwrap().reserved, figures.reserved);
    device.pool_trim(0).unwrap();
    assert_eq!(device.pool_figures().unwrap().reserved, 0);
    assert_eq!(device.memory().unwrap().free, before);
}

fn a_full_device_says_so_and_recovers(rig: &Rig) {
    let device = &rig.device;
    let total = device.memory().unwrap();
    assert_eq!(total.total, device.info().total_bytes);
    let mut frames = FrameSet::new(device, rig.page());
    let error = loop {
        match frames.create() {
            Ok(_) => assert!(frames.len() as u64 * rig.page() <= total.total),
            Err(error) => break error,
        }
    };
    assert!(error.is_out_of_memory(), "{error:?}");
    assert!(device.memory().unwrap().free < rig.page());
    let stream = rig.stream();
    let error = PoolAllocation::new(&stream, rig.page()).unwrap_err();
    assert!(error.is_out_of_memory(), "{error:?}");
    frames.release(0).unwrap();
    let allocation = PoolAllocation::new(&stream, rig.page()).unwrap();
    assert!(frames.create().unwrap_err().is_out_of_memory());
    drop(allocation);
    stream.synchronize().unwrap();
    device.pool_trim(0).unwrap();
    assert_eq!(frames.create().unwrap(), 0);
    drop(frames);
    assert_eq!(device.memory().unwrap(), total);
}

fn kernels_are_looked_up_by_name_and_names_are_new(rig: &Rig) {
    fn double(args: &mut [TwinArg<'_>]) -> Result<(), String> {
        let [TwinArg::Write(bytes), TwinArg::U32(times)] = args else { return Err("wrong arguments".into()) };
        bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_mul(u8::try_from(*times).unwrap_or(0)));
        Ok(())
    }
    // The twin counts on a device in host memory; the driver stand-in knows a kernel of this name.
    let ptx = ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry double(\n\
               .param .u64 bytes,\n.param .u32 times\n)\n{\nret;\n}\n";
    let module = KernelModule { name: "test", ptx: Some(ptx), kernels: vec![("double", double)] };
    let error = rig.device.kernel("double").unwrap_err();
    assert!(matches!(error, DeviceError::UnknownKernel { .. }) && error.to_string().contains("double"));
    rig.device.add_kernels(&module).unwrap();
    assert!(rig.device.add_kernels(&module).is_err());

    let stream = rig.stream();
    let (range, _frames) = rig.mapped(1);
    let word = range.range().part(0, 4).unwrap();
    upload(&stream, word, &[1, 2, 3, 4]);
    let right = launch(&rig.device, "double", &[KernelArg::Write(word), KernelArg::U32(2)]);
    let wrong = launch(&rig.device, "double", &[KernelArg::Write(word)]);
    let too_many_threads = Launch { block: [1025, 1, 1], ..right };
    // SAFETY: the range lives past the waits below.
    unsafe {
        stream.launch(&right).unwrap();
        assert_eq!(download(&stream, word), [2, 4, 6, 8]);
        assert!(stream.launch(&too_many_threads).is_err());
        if rig.checks_arguments {
            // What the twin says is wrong reaches the caller, at this call or a later one.
            let answer = stream.launch(&wrong).and_then(|()| stream.synchronize());
            assert_misuse(answer.and_then(|()| stream.synchronize()), "wrong arguments");
        }
    }
    stream.synchronize().unwrap();
}

fn fences_return_their_events_to_the_pool(rig: &Rig) {
    let stream = rig.stream();
    let fences = FencePool::new(&rig.device);
    for _ in 0..10 {
        let fence = fences.record(&stream).unwrap();
        let other = fence.clone();
        drop(fence);
        other.wait().unwrap();
    }
    assert_eq!(rig.device.live().events, 1);
    drop(fences);
    assert_eq!(rig.device.live().events, 0);
}

fn the_time_between_two_timed_points_is_that_of_the_work_between(rig: &Rig) {
    let stream = rig.stream();
    let fences = FencePool::new(&rig.device);
    assert!(rig.device.tells_elapsed());
    let began = fences.record_timed(&stream).unwrap();
    // A second by the clock of the card, however long it is.
    let held = rig.hold.as_ref().map(|hold| hold(&stream));
    let ended = fences.record_timed(&stream).unwrap();
    let at_least = Duration::from_millis(if held.is_some() { 999 } else { 0 });
    if held.is_some() {
        assert_eq!(ended.elapsed_since(&began).unwrap(), None, "not passed yet");
    }
    drop(held);
    ended.wait().unwrap();
    let time = ended.elapsed_since(&began).unwrap().unwrap();
    assert!((at_least..at_least + Duration::from_millis(500)).contains(&time), "{time:?}");
    assert_eq!(began.elapsed_since(&began).unwrap(), Some(Duration::ZERO));
    assert_eq!(began.elapsed_since(&ended).unwrap(), Some(Duration::ZERO), "the other way round");
}

fn a_time_that_nobody_kept_is_none_and_no_error(rig: &Rig) {
    let (device, stream) = (&rig.device, rig.stream());
    let [timed, recorded] = [0, 1].map(|_| device.create_timed_event().unwrap());
    // SAFETY: all live until they are destroyed; what is misuse is refused before it does anything.
    unsafe {
        device.record(recorded, stream.id()).unwrap();
        device.wait_event(recorded).unwrap();
        assert_eq!(device.elapsed(timed, recorded).unwrap(), None, "one was never recorded");
        assert_eq!(device.elapsed(recorded, timed).unwrap(), None, "one was never recorded");
        let ordinary = device.create_event().unwrap();
        device.record(ordinary, stream.id()).unwrap();
        device.wait_event(ordinary).unwrap();
        // Some devices tell it of ordinary events, too; none refuses.
        device.elapsed(recorded, ordinary).unwrap();
        device.elapsed(ordinary, recorded).unwrap();
        for event in [timed, ordinary] {
            device.destroy_event(event).unwrap();
            assert_misuse(device.elapsed(recorded, event), "event");
            assert_misuse(device.elapsed(event, recorded), "event");
        }
        // It is not the call that tells what a drop left behind.
        device.defer(DeviceError::Misuse { call: "drop", why: "kept for later".to_owned() });
        assert!(device.elapsed(recorded, recorded).unwrap().is_some());
        assert_misuse(device.query(recorded), "kept for later");
        device.destroy_event(recorded).unwrap();
    }
}

fn timed_fences_return_their_events_to_a_list_of_their_own(rig: &Rig) {
    let stream = rig.stream();
    let fences = FencePool::new(&rig.device);
    for _ in 0..10 {
        let (ordinary, timed) = (fences.record(&stream).unwrap(), fences.record_timed(&stream).unwrap());
        let other = timed.clone();
        drop((timed, ordinary));
        other.wait().unwrap();
    }
    assert_eq!(rig.device.live().events, 2);
    let both = [fences.record_timed(&stream).unwrap(), fences.record_timed(&stream).unwrap()];
    assert_eq!(rig.device.live().events, 3, "an ordinary event serves no timed fence");
    both[1].wait().unwrap();
    assert!(both[1].elapsed_since(&both[0]).unwrap().is_some());
    drop((both, fences));
    assert_eq!(rig.device.live().events, 0);
}

fn nothing_is_live_after_everything_was_dropped(rig: &Rig) {
    let free = rig.device.memory().unwrap().free;
    {
        let stream = rig.stream();
        let (range, frames) = rig.mapped(3);
        let block = rig.locked(10_000);
        let event = Event::new(&rig.device).unwrap();
        let allocation = PoolAllocation::new(&stream, 300).unwrap();
        let live = rig.device.live();
        assert_eq!((live.frames, live.ranges, live.mappings), (3, 1, 3));
        assert_eq!((live.streams, live.events), (1, 1));
        assert_eq!(live.page_locked_bytes, block.bytes());
        assert!(live.pool_used_bytes >= 300);
        stream.synchronize().unwrap();
        drop((range, frames, event, allocation));
        rig.device.synchronize().unwrap();
    }
    assert_eq!(rig.device.live(), LiveObjects::default());
    rig.device.pool_trim(0).unwrap();
    assert_eq!(rig.device.memory().unwrap().free, free);
}

fn an_error_of_a_drop_surfaces_at_the_next_call(rig: &Rig) {
    let error = DeviceError::Misuse { call: "drop", why: "kept for later".to_owned() };
    rig.device.defer(error.clone());
    assert_eq!(rig.device.create_event().unwrap_err(), error);
    let event = Event::new(&rig.device).unwrap();
    drop(event);
}

fn calls_are_counted(rig: &Rig) {
    let before = rig.device.counts();
    let stream = rig.stream();
    let (mut range, frames) = rig.mapped(2);
    upload(&stream, range.range(), &pattern(range.range().bytes, 0));
    download(&stream, range.range().part(0, 100).unwrap());
    // SAFETY: all work was waited for.
    unsafe { range.unmap(0).unwrap() };
    drop((range, frames));
    let after = rig.device.counts();
    assert_eq!(after.create_frame - before.create_frame, 2);
    assert_eq!(after.release_frame - before.release_frame, 2);
    assert_eq!(after.map - before.map, 2);
    assert_eq!(after.unmap - before.unmap, 2);
    assert_eq!(after.set_access - before.set_access, 1);
    assert_eq!(after.copy_to_device - before.copy_to_device, 1);
    assert_eq!(after.bytes_to_device - before.bytes_to_device, 2 * rig.page());
    assert_eq!(after.bytes_to_host - before.bytes_to_host, 100);
    assert_eq!(after.host_wait - before.host_wait, 2);
    assert_eq!(after.device_sync, before.device_sync);
}

/// Threads that share nothing but the device do not disturb each other.
fn threads_map_copy_and_unmap_beside_each_other(rig: &Rig) {
    std::thread::scope(|scope| {
        for salt in 0..4 {
            let device = &rig.device;
            scope.spawn(move || {
                let rig = Rig { device: Arc::clone(device), hold: None, checks_arguments: false };
                let stream = rig.stream();
                for round in 0..4 {
                    let (range, frames) = rig.mapped(2);
                    let bytes = pattern(range.range().bytes, salt * 10 + round);
                    upload(&stream, range.range(), &bytes);
                    assert_eq!(download(&stream, range.range()), bytes);
                    drop((range, frames));
                }
            });
        }
    });
}

macro_rules! contract {
    ($rig:path, $backend:ident: $($promise:ident,)*) => {
        mod $backend {
            $(#[test] fn $promise() { super::$promise(&$rig()); })*
        }
    };
}

macro_rules! contracts {
    ($($rig:path => $backend:ident,)*) => {
        $(contract! { $rig, $backend:
            bytes_survive_the_way_to_the_device_and_back,
            a_write_through_one_address_is_read_through_the_other,
            a_frame_keeps_its_bytes_when_it_is_mapped_elsewhere,
            a_released_frame_lives_until_its_last_mapping_is_gone,
            frames_of_several_pages_are_mapped_and_unmapped_as_one,
            ranges_and_frames_are_whole_pages,
            giving_back_twice_and_mapping_over_a_mapping_are_misuse,
            streams_and_events_that_are_gone_are_misuse,
            an_event_that_was_never_recorded_is_no_wait,
            a_copy_is_in_flight_while_the_host_goes_on,
            an_event_answers_for_its_newest_record,
            a_stream_that_is_destroyed_runs_its_work,
            streams_run_in_order,
            the_pool_accounts_for_what_it_reserves_and_uses,
            a_full_device_says_so_and_recovers,
            kernels_are_looked_up_by_name_and_names_are_new,
            fences_return_their_events_to_the_pool,
            the_time_between_two_timed_points_is_that_of_the_work_between,
            a_time_that_nobody_kept_is_none_and_no_error,
            timed_fences_return_their_events_to_a_list_of_their_own,
            nothing_is_live_after_everything_was_dropped,
            an_error_of_a_drop_surfaces_at_the_next_call,
            calls_are_counted,
            threads_map_copy_and_unmap_beside_each_other,
        })*
    };
}

contracts! {
    crate::emulated => emulated_card,
    crate::emulated_with_small_pages => emulated_card_with_small_pages,
    crate::emulated_with_late_completions => emulated_card_with_late_completions,
}

#[cfg(feature = "cuda")]
contracts! {
    crate::cuda => cuda_card_over_the_standin,
    crate::cuda_with_late_completions => cuda_card_with_late_completions,
}

fn emulated_rig(bytes: u64, page_bytes: u64, seed: u64) -> Rig {
    use vram_pager::device::emulated::{EmulatedDevice, EmulatedOptions};
    let options = EmulatedOptions { page_bytes, poison: true, ..EmulatedOptions::new(bytes) };
    let device = EmulatedDevice::open(options).unwrap();
    device.seed_delays(seed);
    let holder = Arc::clone(&device);
    Rig {
        device,
        hold: Some(Box::new(move |stream| {
            Box::new(holder.hold(stream.id(), std::time::Duration::from_secs(1)).unwrap())
        })),
        checks_arguments: true,
    }
}

#[cfg(feature = "cuda")]
fn cuda() -> Rig {
    cuda_rig(0)
}

#[cfg(feature = "cuda")]
fn cuda_with_late_completions() -> Rig {
    let seed = 20_240_613;
    println!("seed {seed}");
    cuda_rig(seed)
}

/// A card of the driver stand-in, another one for each test.
#[cfg(feature = "cuda")]
fn cuda_rig(seed: u64) -> Rig {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    if std::env::var("VRAM_PAGER_TEST_DEVICE").as_deref() == Ok("card") {
        // A real one, as `gpu-check.sh` asks for; nothing holds its streams back. One test at a time.
        let device = vram_pager::device::open("cuda:0,cap=32MiB").unwrap();
        return Rig { device, hold: None, checks_arguments: false };
    }
    let standin = standin::standin();
    standin.set_cards(64, 32 * MIB);
    let ordinal = NEXT.fetch_add(1, Ordering::Relaxed);
    let device = vram_pager::device::open(&format!("cuda:{ordinal}")).unwrap();
    standin.seed_delays(ordinal, seed);
    Rig {
        device,
        // Streams have the numbers 1, 2, ... in the order of their creation, for us and for the stand-in.
        hold: Some(Box::new(move |stream| Box::new(standin.hold(ordinal, stream.id().0)))),
        checks_arguments: false,
    }
}

fn emulated() -> Rig {
    emulated_rig(32 * MIB, 2 * MIB, 0)
}

fn emulated_with_small_pages() -> Rig {
    emulated_rig(MIB, 16 << 10, 0)
}

fn emulated_with_late_completions() -> Rig {
    let seed = 20_240_611;
    println!("seed {seed}");
    emulated_rig(MIB, 64 << 10, seed)
}
