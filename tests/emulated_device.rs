//! What the emulated card promises beyond the contract of every device: exact modelled times, a typed
//! error for every use that would corrupt memory, failures on demand, and cards larger than the machine.

#![expect(unsafe_code, reason = "the raw calls are what is tested")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::Duration;

use vram_pager::device::emulated::{CallKind, EmulatedDevice, EmulatedOptions, Fault, FaultError};
use vram_pager::device::{
    ActivationPool, AddressRange, Clock, Copies, Device, DeviceError, Event, FencePool, FrameSet, HostBlock,
    HostMemory, Kernels, LiveObjects, PoolAllocation, SharedDevice, Stream, StreamPriority, VirtualMemory,
    checksum_launch, open,
};
use vram_pager::units::{DeviceAddress, DeviceRange, GIB, MIB, ModelTime};

const PAGE: u64 = 64 << 10;

fn small_card() -> Arc<EmulatedDevice> {
    let options = EmulatedOptions { page_bytes: PAGE, ..EmulatedOptions::new(MIB) };
    EmulatedDevice::open(options).unwrap()
}

fn shared(device: &Arc<EmulatedDevice>) -> SharedDevice {
    Arc::<EmulatedDevice>::clone(device)
}

fn stream(device: &Arc<EmulatedDevice>) -> Arc<Stream> {
    Arc::new(Stream::new(&shared(device), StreamPriority::Normal).unwrap())
}

fn mapped(device: &Arc<EmulatedDevice>, pages: u32) -> (AddressRange, FrameSet) {
    let page = device.info().granularity;
    let mut frames = FrameSet::new(&shared(device), page);
    let mut range = AddressRange::reserve(&shared(device), pages as usize, page).unwrap();
    for page in 0..pages {
        let frame = frames.create().unwrap();
        range.map(page, &frames, frame).unwrap();
    }
    range.set_access(0, pages).unwrap();
    (range, frames)
}

fn assert_misuse<T: std::fmt::Debug>(answer: Result<T, DeviceError>, parts: &[&str]) {
    let error = answer.unwrap_err();
    assert!(error.is_misuse(), "{error:?}");
    for part in parts {
        assert!(error.to_string().contains(part), "`{part}` is not in: {error}");
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn taking_memory_from_under_a_copy_is_refused_and_both_calls_are_named() {
    let device = small_card();
    let stream = stream(&device);
    let (mut range, _frames) = mapped(&device, 2);
    let mut block = HostBlock::map(&shared(&device), PAGE).unwrap();
    block.page_lock().unwrap();
    let held = device.hold(stream.id(), SECOND).unwrap();
    let first = range.range().part(0, PAGE).unwrap();
    // SAFETY: what would be unsafe is refused; the rest is waited for.
    unsafe {
        device.copy_to_device(first, block.start(), ModelTime::ZERO, stream.id()).unwrap();
        let by = format!("copy_to_device enqueued at stream {} #2", stream.id().0);
        assert_misuse(range.unmap(0), &["unmap", &by]);
        assert_misuse(device.set_access(first), &["set_access", &by]);
        assert_misuse(device.page_unlock(block.start()), &["page_unlock", &by]);
        // The neighbour is not in use.
        range.unmap(1).unwrap();
        drop(held);
        stream.synchronize().unwrap();
        range.unmap(0).unwrap();
        block.page_unlock().unwrap();
    }
    drop(block);
    assert_eq!(device.live().page_locked_bytes, 0);
}

#[test]
fn page_locked_memory_that_a_copy_reads_outlives_its_owner() {
    let device = small_card();
    let (range, _frames) = mapped(&device, 1);
    let copier = stream(&device);
    let mut block = HostBlock::map(&shared(&device), PAGE).unwrap();
    block.page_lock().unwrap();
    let hold = device.hold(copier.id(), SECOND).unwrap();
    // SAFETY: what is tested is that the block may go away nonetheless.
    unsafe {
        block.start().write_bytes(0x5A, usize::try_from(PAGE).unwrap());
        let to = DeviceRange::new(range.address(0), PAGE);
        device.copy_to_device(to, block.start(), ModelTime::ZERO, copier.id()).unwrap();
    }
    // An owner that waits for nothing.
    drop(block);
    let told = device.take_deferred();
    assert!(told.iter().any(DeviceError::is_misuse), "{told:?}");
    drop(hold);
    copier.synchronize().unwrap();
    let mut back = vec![0_u8; usize::try_from(PAGE).unwrap()];
    // SAFETY: nobody reads `back` before the wait.
    unsafe {
        device
            .copy_to_host(back.as_mut_ptr(), DeviceRange::new(range.address(0), PAGE), copier.id())
            .unwrap();
    };
    copier.synchronize().unwrap();
    assert!(back.iter().all(|byte| *byte == 0x5A));
}

/// A card that watches over memory in use, in every build, and keeps the calls that led to each operation.
fn watching_card() -> Arc<EmulatedDevice> {
    let options = EmulatedOptions { page_bytes: PAGE, watch: true, ..EmulatedOptions::new(MIB) };
    let device = EmulatedDevice::open(options).unwrap();
    device.keep_sites(true);
    device
}

/// Whatever the threads' luck: here everything is long done before the next call.
#[test]
fn work_on_the_same_bytes_without_an_order_is_refused_and_both_call_sites_are_named() {
    let device = watching_card();
    let (copies, kernels) = (stream(&device), stream(&device));
    let (mut range, frames) = mapped(&device, 2);
    // A second address of the first page's frame.
    // SAFETY: nothing uses the page.
    unsafe { range.unmap(1).unwrap() };
    range.map(1, &frames, 0).unwrap();
    range.set_access(1, 1).unwrap();
    let sum = PoolAllocation::new(&kernels, 8).unwrap();
    let host = vec![7_u8; usize::try_from(PAGE).unwrap()];
    let (first, alias) = (range.range().part(0, PAGE).unwrap(), range.range().part(PAGE, PAGE).unwrap());
    let really_done = || std::thread::sleep(Duration::from_millis(20));
    let kernel = device.kernel("checksum").unwrap();
    let fences = FencePool::new(&shared(&device));
    // SAFETY: the source outlives the copies, and what would be unsafe is refused.
    unsafe {
        device.copy_to_device(first, host.as_ptr(), ModelTime::ZERO, copies.id()).unwrap();
        really_done();
        // Through either address.
        for read in [first, alias] {
            let answer = kernels.launch(&checksum_launch(kernel, read, 0, sum.range()));
            assert_misuse(
                answer,
                &["written by copy_to_device", "tests/emulated_device.rs:", "orders the second"],
            );
        }
        let fence = fences.record(&copies).unwrap();
        fence.wait_on(&kernels).unwrap();
        kernels.launch(&checksum_launch(kernel, alias, 0, sum.range())).unwrap();
        really_done();
        // Now the copy is known to be done by whoever waits for the kernel, and the kernel by nobody.
        let answer = device.copy_to_device(first, host.as_ptr(), ModelTime::ZERO, copies.id());
        assert_misuse(answer, &["read by launch"]);
        assert_misuse(range.unmap(1), &["in use by launch", "nobody waited for"]);
        assert_eq!(device.take_caught().len(), 4);
        kernels.synchronize().unwrap();
        range.unmap(1).unwrap();
        range.unmap(0).unwrap();
    }
    assert_eq!(device.take_caught(), []);
}

#[test]
fn the_host_may_not_write_what_a_copy_may_still_read() {
    let device = watching_card();
    let stream = stream(&device);
    let (range, _frames) = mapped(&device, 1);
    let host = vec![7_u8; usize::try_from(PAGE).unwrap()];
    // SAFETY: the source outlives the copy.
    unsafe { device.copy_to_device(range.range(), host.as_ptr(), ModelTime::ZERO, stream.id()).unwrap() };
    std::thread::sleep(Duration::from_millis(20));
    assert_misuse(
        device.host_write(host[100..].as_ptr(), 1),
        &["host_write", "copy_to_device", "tests/emulated"],
    );
    stream.synchronize().unwrap();
    device.host_write(host.as_ptr(), PAGE).unwrap();
}

/// Whichever comes first: a copy while the host still writes is refused, from the first byte to the last, and
/// so is a second writer.
#[test]
fn what_the_host_writes_is_not_copied_before_it_has_ended_and_both_call_sites_are_named() {
    let device = watching_card();
    let stream = stream(&device);
    let (range, _frames) = mapped(&device, 1);
    let host = vec![7_u8; usize::try_from(PAGE).unwrap()];
    let (first, last) = (host.as_ptr(), host[host.len() - 1..].as_ptr());
    let to = DeviceRange::new(range.range().start, 1);
    // SAFETY: the source outlives the copies, and what would be unsafe is refused.
    let copy = |from| unsafe { device.copy_to_device(to, from, ModelTime::ZERO, stream.id()) };
    let begun = format!("tests/emulated_device.rs:{}", line!() + 1);
    device.begin_host_write(host.as_ptr(), PAGE).unwrap();
    for from in [first, last] {
        let parts = ["copy_to_device", "is written by the host", &begun, "now used at stream"];
        assert_misuse(copy(from), &parts);
    }
    assert_misuse(device.begin_host_write(last, 1), &["host_write", "is written by the host", &begun]);
    // What only touches it is not in it.
    device.host_write(last.wrapping_add(1), 1).unwrap();
    assert_eq!(device.take_caught().len(), 3);
    device.end_host_write(host.as_ptr(), PAGE);
    copy(first).unwrap();
    assert_misuse(device.begin_host_write(host.as_ptr(), PAGE), &["in use by copy_to_device"]);
    stream.synchronize().unwrap();
    // The refusal has begun nothing.
    copy(last).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn work_outside_of_what_is_accessible_is_refused() {
    let device = small_card();
    let stream = stream(&device);
    let (mut range, mut frames) = mapped(&device, 2);
    let other = AddressRange::reserve(&shared(&device), 1, PAGE).unwrap();
    let whole = range.range();
    let allocation = PoolAllocation::new(&stream, 1000).unwrap();
    let host = vec![0_u8; usize::try_from(4 * PAGE).unwrap()];
    let copy = |to: DeviceRange| {
        // SAFETY: the source is long enough; what would be unsafe is refused.
        unsafe { device.copy_to_device(to, host.as_ptr(), ModelTime::ZERO, stream.id()) }
    };
    copy(whole).unwrap();
    assert_misuse(copy(DeviceRange::new(whole.start, whole.bytes + 1)), &["one reserved range"]);
    assert_misuse(copy(DeviceRange::new(DeviceAddress(4096), 1)), &["one reserved range"]);
    assert_misuse(copy(DeviceRange::new(DeviceAddress(u64::MAX), 2)), &["one reserved range"]);
    assert_misuse(copy(other.range()), &["not mapped"]);
    let past = DeviceRange::new(allocation.range().start, 1025);
    assert_misuse(copy(past), &["live allocation"]);
    let pool_page = DeviceRange::new(allocation.range().start, PAGE);
    // SAFETY: the calls are refused.
    unsafe {
        assert_misuse(device.unmap(pool_page), &["activation pool"]);
        assert_misuse(device.free(pool_page), &["activation pool"]);
    }
    stream.synchronize().unwrap();
    // SAFETY: all work was waited for.
    unsafe { range.unmap(1).unwrap() };
    assert_misuse(copy(whole), &["not mapped"]);
    frames.release(1).unwrap();
    let frame = frames.create().unwrap();
    range.map(1, &frames, frame).unwrap();
    assert_misuse(copy(whole), &["mapped but not accessible"]);
    let freed = allocation.range();
    drop(allocation);
    assert_misuse(copy(freed), &["live allocation"]);
    // SAFETY: the call is refused.
    let null = unsafe { device.copy_to_device(whole, std::ptr::null(), ModelTime::ZERO, stream.id()) };
    assert!(null.is_err());
    stream.synchronize().unwrap();
}

#[test]
fn a_copy_may_not_cross_the_end_of_a_page_locked_block() {
    let device = small_card();
    let stream = stream(&device);
    let (range, _frames) = mapped(&device, 2);
    let block = HostBlock::map(&shared(&device), 4 * 4096).unwrap();
    // SAFETY: the block is mapped, and the work is waited for.
    unsafe {
        let second = block.start().add(4096);
        device.page_lock(second, 8192).unwrap();
        assert_misuse(device.page_lock(block.start(), 8192), &["overlaps"]);
        assert!(device.page_lock(block.start().add(1), 4096).is_err());
        assert!(device.page_lock(block.start(), 0).is_err());
        let copy = |from: *const u8, bytes| {
            let to = range.range().part(0, bytes).unwrap();
            device.copy_to_device(to, from, ModelTime::ZERO, stream.id())
        };
        copy(block.start(), 4096).unwrap();
        copy(second, 8192).unwrap();
        assert_misuse(copy(block.start(), 4097), &["crosses"]);
        assert_misuse(copy(second, 8193), &["crosses"]);
        assert_misuse(copy(block.start(), 16384), &["crosses"]);
        stream.synchronize().unwrap();
        device.page_unlock(second).unwrap();
        assert_misuse(device.page_unlock(second), &["no page-locked block"]);
    }
}

#[test]
fn a_launch_may_not_write_what_another_argument_names() {
    let device = small_card();
    let stream = stream(&device);
    let (range, _frames) = mapped(&device, 1);
    let sum = range.range().part(0, 8).unwrap();
    let launch = checksum_launch(device.kernel("checksum").unwrap(), range.range(), 0, sum);
    // SAFETY: the launch is refused.
    assert_misuse(unsafe { stream.launch(&launch) }, &["overlaps"]);
}

/// Runs itself again; the child reads a device address that it must not.
#[test]
fn the_host_faults_where_nothing_is_accessible() {
    /// The same number on every Linux.
    const SIGSEGV: i32 = 11;
    const CASE: &str = "VRAM_PAGER_FAULT_CASE";
    let name = "the_host_faults_where_nothing_is_accessible";
    if let Ok(case) = std::env::var(CASE) {
        let device = small_card();
        let (mut range, frames) = mapped(&device, 2);
        let read = |at: DeviceAddress| {
            let pointer: *const u8 = std::ptr::with_exposed_provenance(usize::try_from(at.0).unwrap());
            // SAFETY: this is the fault that is tested; the process is made for it.
            unsafe { pointer.read_volatile() }
        };
        read(range.address(0));
        let mut second = AddressRange::reserve(&shared(&device), 1, PAGE).unwrap();
        match case.as_str() {
            "accessible" => {}
            "reserved" => drop(read(second.address(0))),
            "mapped" => {
                second.map(0, &frames, 0).unwrap();
                read(second.address(0));
            }
            _ => {
                // SAFETY: no work is in flight.
                unsafe { range.unmap(1).unwrap() };
                read(range.address(1));
            }
        }
        println!("survived");
        return;
    }
    let run = |case: &str| {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(CASE, case)
            .output()
            .unwrap()
    };
    assert!(String::from_utf8_lossy(&run("accessible").stdout).contains("survived"));
    for case in ["reserved", "mapped", "unmapped"] {
        assert_eq!(run(case).status.signal(), Some(SIGSEGV), "{case}");
    }
}

#[test]
fn modelled_times_are_exact() {
    let device = EmulatedDevice::open(EmulatedOptions::new(64 * MIB)).unwrap();
    let card = shared(&device);
    let (copier, compute) = (stream(&device), stream(&device));
    let at = |nanos: u64| assert_eq!(device.now(), ModelTime(nanos));
    at(0);
    let (range, _frames) = mapped(&device, 2);
    let mapped_at = 2 * (193_000 + 1_500) + 36_000;
    at(mapped_at);
    let [mut source, target] = [0, 1].map(|_| HostBlock::map(&card, 2 * MIB).unwrap());
    source.page_lock().unwrap();
    // 2 MiB at 1.5 GB/s.
    let mapped_at = mapped_at + 1_398_101;
    at(mapped_at);
    let page = |number| DeviceRange::new(range.address(number), 2 * MIB);
    let fences = FencePool::new(&card);
    // 2 MiB at 25 GB/s.
    let copy_ns = 83_886;
    // SAFETY: the block and the range live past the waits.
    unsafe {
        let copy = |from| {
            device.copy_to_device(page(0), source.start(), ModelTime(from), copier.id()).unwrap();
        };
        copy(0);
        at(mapped_at + 2_000);
        copy(0);
        at(mapped_at + 4_000);
        let arrived = fences.record(&copier).unwrap();
        at(mapped_at + 5_000);
        assert!(!arrived.is_done().unwrap());
        at(mapped_at + 5_500);
        arrived.wait_on(&compute).unwrap();
        at(mapped_at + 6_500);
        compute.charge_compute(Duration::from_millis(1)).unwrap();
        at(mapped_at + 6_500);
        let computed = fences.record(&compute).unwrap();
        at(mapped_at + 7_500);
        arrived.wait().unwrap();
        let copied_at = mapped_at + 2_000 + 2 * copy_ns;
        at(copied_at);
        assert!(arrived.is_done().unwrap());
        at(copied_at + 500);
        assert!(!computed.is_done().unwrap());
        computed.wait().unwrap();
        let computed_at = copied_at + 1_000_000;
        at(computed_at);
        // A copy waits for its source's bytes; the other direction has an engine of its own.
        copy(5_000_000);
        let other = stream(&device);
        device.copy_to_host(target.start(), page(1), other.id()).unwrap();
        other.synchronize().unwrap();
        at(computed_at + 4_000 + copy_ns);
        copier.synchronize().unwrap();
        at(5_000_000 + copy_ns);
    }
    device.charge_host(Duration::from_millis(1));
    at(6_000_000 + copy_ns);
    compute.charge_compute(SECOND).unwrap();
    device.synchronize().unwrap();
    at(1_006_000_000 + copy_ns);
    assert_eq!(device.schedule_read(GIB), device.now());
    // A thread that is new to the card starts at the latest time.
    std::thread::scope(|scope| scope.spawn(|| at(1_006_000_000 + copy_ns)).join().unwrap());
}

#[test]
fn page_locking_and_reading_take_modelled_time() {
    let device = open("emulated:24MiB,disk=1GB/s").unwrap();
    let mut block = HostBlock::map(&device, 3_000 << 12).unwrap();
    block.page_lock().unwrap();
    let locked = device.now();
    assert_eq!(locked, ModelTime((3_000 << 12) * 666_666_667 / 1_000_000_000));
    assert_eq!(device.schedule_read(1_000_000).since(locked), Duration::from_millis(1));
    assert_eq!(device.schedule_read(1_000_000).since(locked), Duration::from_millis(2));
    device.charge_host(Duration::from_millis(5));
    assert_eq!(device.schedule_read(1_000_000).since(locked), Duration::from_millis(6));
    assert_eq!(device.now().since(locked), Duration::from_millis(5));
}

#[test]
fn the_pool_gives_the_same_figures_however_late_the_workers_are() {
    let figures = |seed| {
        let device = small_card();
        device.seed_delays(seed);
        let streams = [stream(&device), stream(&device)];
        let mut held = Vec::new();
        let mut seen = Vec::new();
        for step in 0..60_u64 {
            let stream = &streams[usize::try_from(step * 7 % 3 % 2).unwrap()];
            if step % 3 == 2 {
                held.remove(usize::try_from(step * 5).unwrap() % held.len());
            } else if let Ok(allocation) = PoolAllocation::new(stream, (1 + step * 37 % 11) * 4000) {
                // SAFETY: the allocation is freed in the order of the stream.
                unsafe { device.fill(allocation.range(), 1, stream.id()).unwrap() };
                stream.charge_compute(Duration::from_micros(step % 9)).unwrap();
                held.push(allocation);
            }
            seen.push(shared(&device).pool_figures().unwrap());
        }
        held.clear();
        device.synchronize().unwrap();
        shared(&device).pool_trim(0).unwrap();
        seen.push(shared(&device).pool_figures().unwrap());
        seen
    };
    let prompt = figures(0);
    assert_eq!(prompt.last().unwrap().reserved, 0);
    assert!(prompt.iter().any(|figures| figures.used > 0));
    for seed in 1..6 {
        assert_eq!(figures(seed), prompt, "seed {seed}");
    }
}

#[test]
fn what_another_process_holds_is_not_free() {
    let device = small_card();
    let mut frames = FrameSet::new(&shared(&device), PAGE);
    frames.create().unwrap();
    device.set_other_bytes(MIB / 2);
    assert_eq!(device.memory().unwrap().free, MIB / 2 - PAGE);
    device.set_other_bytes(MIB);
    assert_eq!(device.memory().unwrap().free, 0);
    assert!(frames.create().unwrap_err().is_out_of_memory());
    device.set_other_bytes(0);
    frames.create().unwrap();
}

/// Touches every kind of call, through the handles.
fn script(device: &Arc<EmulatedDevice>) -> Result<(), DeviceError> {
    let card = shared(device);
    let page = device.info().granularity;
    device.memory()?;
    let stream = Arc::new(Stream::new(&card, StreamPriority::Normal)?);
    let other = Stream::new(&card, StreamPriority::High)?;
    let mut frames = FrameSet::new(&card, page);
    let mut range = AddressRange::reserve(&card, 3, page)?;
    let mut block = HostBlock::map(&card, page)?;
    block.page_lock()?;
    for number in 0..2 {
        let frame = frames.create()?;
        range.map(number, &frames, frame)?;
    }
    range.set_access(0, 2)?;
    let fences = FencePool::new(&card);
    let event = Event::new(&card)?;
    let allocation = PoolAllocation::new(&stream, 100)?;
    card.pool_figures()?;
    let (first, second) =
        (DeviceRange::new(range.address(0), page), DeviceRange::new(range.address(1), page));
    // Whatever fails, nothing is left in flight when the memory goes.
    let work = || -> Result<(), DeviceError> {
        // SAFETY: everything lives past the wait below.
        unsafe {
            card.copy_to_device(first, block.start(), ModelTime::ZERO, stream.id())?;
            card.copy_on_device(second, first, stream.id())?;
            card.fill(first, 3, stream.id())?;
            card.copy_to_host(block.start(), second, stream.id())?;
            let kernel = card.kernel("checksum")?;
            stream.launch(&checksum_launch(kernel, second, 0, first.part(0, 8).unwrap()))?;
            let began = fences.record_timed(&stream)?;
            stream.charge_compute(Duration::from_micros(9))?;
            let fence = fences.record_timed(&stream)?;
            fence.wait_on(&other)?;
            fence.is_done()?;
            fence.wait()?;
            fence.elapsed_since(&began).map(|_| ())
        }
    };
    let answer = work();
    let waited = stream.synchronize().or_else(|_| card.synchronize()).or_else(|_| card.synchronize());
    answer.and(waited)?;
    drop((event, allocation));
    device.add_kernels(&vram_pager::device::KernelModule { name: "none", ptx: None, kernels: vec![] })?;
    card.synchronize()?;
    card.pool_trim(0)?;
    // SAFETY: nothing is in flight.
    unsafe { range.unmap(1) }
}

#[test]
fn the_time_between_two_points_is_exact() {
    let device = small_card();
    let (first, second) = (stream(&device), stream(&device));
    let fences = FencePool::new(&shared(&device));
    assert!(device.tells_elapsed());
    let began = fences.record_timed(&first).unwrap();
    first.charge_compute(Duration::from_millis(5)).unwrap();
    let ended = fences.record_timed(&first).unwrap();
    assert_eq!(ended.elapsed_since(&began).unwrap(), None, "not passed yet");
    // Behind both by the clock of the card, on another stream.
    ended.wait_on(&second).unwrap();
    second.charge_compute(Duration::from_millis(2)).unwrap();
    let last = fences.record_timed(&second).unwrap();
    last.wait().unwrap();
    assert_eq!(ended.elapsed_since(&began).unwrap(), Some(Duration::from_millis(5)));
    assert_eq!(last.elapsed_since(&began).unwrap(), Some(Duration::from_millis(7)));
    assert_eq!(began.elapsed_since(&last).unwrap(), Some(Duration::ZERO), "the other way round");
    // A failure is told, and is not for good.
    device.inject(Fault::once(CallKind::Elapsed, 1));
    assert!(matches!(ended.elapsed_since(&began), Err(DeviceError::Driver { call: "elapsed", .. })));
    assert!(ended.elapsed_since(&began).unwrap().is_some());
    let other = FencePool::new(&shared(&small_card()));
    let error = other.record(&stream(&small_card())).and_then(|other| ended.elapsed_since(&other));
    assert!(error.is_err());
}

/// What counts the card's memory at an end waits for the card first: see the stress test's.
#[test]
fn what_is_freed_behind_work_is_trimmed_once_the_card_was_waited_for() {
    let device = small_card();
    let stream = stream(&device);
    let allocation = PoolAllocation::new(&stream, 4000).unwrap();
    // SAFETY: the allocation is freed in the order of the stream.
    unsafe { device.fill(allocation.range(), 1, stream.id()).unwrap() };
    stream.charge_compute(Duration::from_millis(5)).unwrap();
    drop(allocation);
    device.pool_trim(0).unwrap();
    assert_eq!(device.live().pool_used_bytes, 0);
    assert!(device.memory().unwrap().free < MIB, "the work before the free is not done by then");
    device.synchronize().unwrap();
    device.pool_trim(0).unwrap();
    assert_eq!(device.memory().unwrap().free, MIB);
}

#[test]
fn a_failure_of_any_call_leaves_nothing_behind() {
    let device = small_card();
    script(&device).unwrap();
    let check = |fault: Fault| {
        let before = device.faults_fired();
        device.inject(fault.clone());
        let answer = script(&device);
        device.clear_faults();
        let deferred = device.take_deferred();
        let fired = device.faults_fired() > before;
        assert!(fired || (answer.is_ok() && deferred.is_empty()), "{fault:?}: {answer:?} {deferred:?}");
        device.synchronize().unwrap();
        device.pool_trim(0).unwrap();
        assert_eq!(device.live(), LiveObjects::default(), "{fault:?}");
        assert_eq!(device.memory().unwrap().free, MIB, "{fault:?}");
        fired
    };
    for kind in CallKind::ALL {
        assert!(check(Fault::once(*kind, 1)), "the script makes no call of {kind:?}");
        check(Fault::once(*kind, 2));
        check(Fault::once(*kind, 1).with(FaultError::OutOfMemory));
        // An unmap that fails for good keeps the memory, as it must.
        if *kind != CallKind::Unmap {
            check(Fault::from_then_on(*kind, 1));
        }
    }
    let mut nth = 1;
    while check(Fault::once(CallKind::Any, nth)) {
        nth += 1;
    }
    assert!(nth > 40, "the sweep ended after {nth} calls");
}

#[test]
fn a_lost_device_says_so_at_every_later_call_and_still_takes_things_back() {
    let device = small_card();
    let stream = stream(&device);
    let (range, frames) = mapped(&device, 2);
    device.inject(Fault::once(CallKind::Memory, 1).with(FaultError::Lost));
    assert!(device.memory().unwrap_err().is_lost());
    for error in [
        device.memory().unwrap_err(),
        stream.synchronize().unwrap_err(),
        device.create_frame(PAGE).unwrap_err(),
    ] {
        assert!(error.is_lost() && error.to_string().contains("memory"), "{error}");
    }
    drop((stream, range, frames));
    assert_eq!(device.live(), LiveObjects::default());
}

#[test]
fn released_frames_are_poisoned() {
    let options = EmulatedOptions { page_bytes: PAGE, poison: true, ..EmulatedOptions::new(MIB) };
    let device = EmulatedDevice::open(options).unwrap();
    let stream = stream(&device);
    for _ in 0..2 {
        let (range, frames) = mapped(&device, 2);
        let mut bytes = vec![0_u8; usize::try_from(2 * PAGE).unwrap()];
        // SAFETY: the target and the range live past the wait.
        unsafe {
            device.copy_to_host(bytes.as_mut_ptr(), range.range(), stream.id()).unwrap();
            device.fill(range.range(), 0, stream.id()).unwrap();
        }
        stream.synchronize().unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0xDB));
        drop((range, frames));
    }
}

#[test]
fn too_many_mappings_are_a_typed_error_and_no_leak() {
    // All cards of the process share the limit, so the number reached here depends on the other tests.
    let options = EmulatedOptions {
        page_bytes: 4096,
        poison: false,
        max_mappings: Some(4_000),
        ..EmulatedOptions::new(64 * MIB)
    };
    let device = EmulatedDevice::open(options).unwrap();
    let mut frames = FrameSet::new(&shared(&device), 4096);
    let frame = frames.create().unwrap();
    let mut range = AddressRange::reserve(&shared(&device), 10_000, 4096).unwrap();
    // One frame at every other page, so that no two mappings can be one.
    let error = (0..5_000).find_map(|page| range.map(2 * page, &frames, frame).err()).unwrap();
    assert!(
        matches!(error, DeviceError::Host { .. }) && error.to_string().contains("max_map_count"),
        "{error}"
    );
    assert!(device.live().mappings < 4_000);
    drop((range, frames));
    assert_eq!(device.live(), LiveObjects::default());
}

#[test]
fn a_card_without_bytes_may_be_larger_than_the_machine() {
    let device = open("emulated:1TiB,bytes=none").unwrap();
    assert!(!device.info().keeps_bytes);
    let stream = Stream::new(&device, StreamPriority::Normal).unwrap();
    let page = device.info().granularity;
    let pages = 500_000;
    let mut frames = FrameSet::new(&device, page);
    let mut range = AddressRange::reserve(&device, pages as usize, page).unwrap();
    for number in 0..pages {
        let frame = frames.create().unwrap();
        range.map(number, &frames, frame).unwrap();
    }
    range.set_access(0, pages).unwrap();
    assert_eq!(device.memory().unwrap().free, (524_288 - 500_000) * page);
    // SAFETY: no bytes are read or written.
    unsafe {
        let before = device.now();
        device.copy_to_device(range.range(), std::ptr::null(), ModelTime::ZERO, stream.id()).unwrap();
        stream.synchronize().unwrap();
        // 500,000 pages of 2 MiB at 25 GB/s, and the call.
        assert_eq!(device.now().since(before), Duration::from_micros(41_943_040 + 2));
        let outside = DeviceRange::new(range.range().start, range.range().bytes + 1);
        assert_misuse(device.fill(outside, 0, stream.id()), &["one reserved range"]);
        range.unmap(77).unwrap();
    }
    drop((range, frames, stream));
    assert_eq!(device.live(), LiveObjects::default());
}

#[test]
fn a_device_dropped_with_everything_alive_does_no_harm() {
    let device = small_card();
    let (a, b) = (device_stream(&device), device_stream(&device));
    let range = device.reserve(4 * PAGE).unwrap();
    let frame = device.create_frame(PAGE).unwrap();
    let page = range.part(0, PAGE).unwrap();
    let held = device.hold(a, SECOND).unwrap();
    // SAFETY: the ids are live, and leaked on purpose.
    unsafe {
        use vram_pager::device::Streams;
        device.map(page, frame).unwrap();
        device.set_access(page).unwrap();
        let event = device.create_event().unwrap();
        device.fill(page, 1, a).unwrap();
        device.record(event, a).unwrap();
        device.stream_wait(b, event).unwrap();
        device.fill(page, 2, b).unwrap();
        device.destroy_stream(b).unwrap();
    }
    drop(device);
    drop(held);
}

fn device_stream(device: &EmulatedDevice) -> vram_pager::device::StreamId {
    use vram_pager::device::Streams;
    device.create_stream(StreamPriority::Normal).unwrap()
}

/// Random work on several streams, ordered by events only, against a plain model of the bytes.
#[test]
fn random_work_with_late_completions_gives_the_right_bytes() {
    for seed in [1_u64, 77, 4096] {
        println!("seed {seed}");
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut random = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let device = small_card();
        device.seed_delays(seed);
        let card = shared(&device);
        let streams: Vec<_> = (0..3).map(|_| stream(&device)).collect();
        let fences = FencePool::new(&card);
        let (range, _frames) = mapped(&device, 8);
        let mut model = [0_u8; 8];
        let page = |number: usize| DeviceRange::new(range.address(u32::try_from(number).unwrap()), PAGE);
        // SAFETY: the range lives past the wait; each page's uses are ordered by the fences.
        unsafe {
            device.fill(range.range(), 0, streams[0].id()).unwrap();
            let mut last = fences.record(&streams[0]).unwrap();
            for _ in 0..150 {
                let stream = &streams[usize::try_from(random(3)).unwrap()];
                last.wait_on(stream).unwrap();
                let (to, from) = (usize::try_from(random(8)).unwrap(), usize::try_from(random(8)).unwrap());
                if to == from {
                    let value = u8::try_from(random(256)).unwrap();
                    device.fill(page(to), value, stream.id()).unwrap();
                    model[to] = value;
                } else {
                    device.copy_on_device(page(to), page(from), stream.id()).unwrap();
                    model[to] = model[from];
                }
                last = fences.record(stream).unwrap();
            }
            last.wait().unwrap();
        }
        for (number, expected) in model.iter().enumerate() {
            let mut bytes = vec![0_u8; usize::try_from(PAGE).unwrap()];
            // SAFETY: the target and the range live past the wait.
            unsafe { device.copy_to_host(bytes.as_mut_ptr(), page(number), streams[0].id()).unwrap() };
            streams[0].synchronize().unwrap();
            assert!(bytes.iter().all(|byte| byte == expected), "page {number} under seed {seed}");
        }
    }
}

#[test]
fn a_cuda_string_is_understood_and_its_backend_answers_for_itself() {
    // Whether a card is there or not, the string is not what is wrong.
    if let Err(error) = open("cuda:63,cap=1GiB") {
        assert!(!matches!(error, DeviceError::BadDeviceString { .. }), "{error}");
    }
}
