//! Memory that is not there: the limits of control groups, of page-locked memory and of the address space.
//! Whatever is refused, the pager is slower and never dead; it says so once; and every byte is right.
//!
//! Limits of a process hold for all of it, so they are set in children: this test binary, started again for
//! one test with `VRAM_PAGER_LIMITED` set. A child's output is told when it fails.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
mod wrapped;

use std::fmt::Write as _;
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use common::{
    ModelFile, Watchdog, assert_nothing_left, checked_pass, mixed_units, pager, small_card, small_options,
};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};
use vram_pager::device::{DeviceError, SharedDevice};
use vram_pager::pager::{ModelOptions, PagerOptions, Verifier};
use vram_pager::staging::{ArenaFigures, HostFigures, LinuxHost, budget};
use vram_pager::units::{GIB, KIB, MIB};
use vram_pager::weights::{TensorIndex, WeightsError};
use wrapped::Wrapped;

/// Collects what is said at the level of warnings and above.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<Vec<String>>>);

impl Said {
    fn about(&self, words: &str) -> usize {
        let said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.iter().filter(|text| text.contains(words)).count()
    }
}

impl Subscriber for Said {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                write!(self.0, "{}={value:?} ", field.name()).unwrap();
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(text.0);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// What a pager's staging says when it goes on without page locks.
const REFUSED: &str = "page-locking was refused";

/// Three checked passes over a model of 5.2 MiB on a card of 1.4 MiB, with as much staging as is wanted.
/// Gives what was said of refused page locks and what the arena holds.
fn passes(device: &SharedDevice, staging: u64, readers: usize) -> (usize, ArenaFigures) {
    // Blocks are locked by a thread of their own: what it says is heard by a listener of the whole process,
    // one pager at a time.
    static SAID: std::sync::OnceLock<Said> = std::sync::OnceLock::new();
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let said = SAID.get_or_init(|| {
        let said = Said::default();
        tracing::subscriber::set_global_default(said.clone()).unwrap();
        said
    });
    said.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let options = PagerOptions { page_locked_bytes: Some(staging), readers, ..small_options() };
    let file = ModelFile::new(&mixed_units(), 77);
    let pager = pager(device, options);
    let stream = pager.stream().unwrap();
    let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
    let verifier = Verifier::new(&model).unwrap();
    for _ in 0..3 {
        checked_pass(&model, &stream, &verifier).unwrap();
    }
    // Until all is locked or refused; the caller's watchdog ends a wait in vain.
    loop {
        let figures = pager.figures().staging;
        let said = said.about(REFUSED);
        if said > 0 || figures.page_locked_bytes == figures.held_bytes {
            return (said, figures);
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn page_locking_that_is_refused_at_any_point_costs_time_alone_and_is_said_once() {
    // Blocks of staging memory are a quarter of the limit: four locks where none is refused.
    let limit = 4 * MIB;
    for refused_from in 1..=5_u64 {
        for once in [true, false] {
            let what = format!("page lock {refused_from} is refused, once: {once}");
            let _watchdog = Watchdog::new(60, what.clone());
            let inner = small_card(1408 * KIB);
            let calls = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&calls);
            let before = move |call: &'static str| {
                let refuses = call == "page_lock" && {
                    let number = count.fetch_add(1, Ordering::Relaxed) + 1;
                    if once { number == refused_from } else { number >= refused_from }
                };
                if refuses {
                    let why = "Cannot allocate memory".to_owned();
                    return Err(DeviceError::Host { call: "page_lock", bytes: 0, why });
                }
                Ok(())
            };
            {
                let device: SharedDevice = Wrapped::watched(&inner, Box::new(before));
                let (said, figures) = passes(&device, limit, 1);
                let met = calls.load(Ordering::Relaxed) >= refused_from;
                assert_eq!(said, usize::from(met), "{what}");
                let made = calls.load(Ordering::Relaxed);
                assert!(refused_from > 2 || met, "{what}: only {made} blocks were locked");
                assert!(
                    figures.page_locked_bytes <= figures.held_bytes && figures.held_bytes <= limit,
                    "{what}"
                );
                if met {
                    // It is not asked for again and again: at most one more was under way.
                    assert!(made <= refused_from + 1, "{what}: asked {made} times");
                    assert!(figures.page_locked_bytes < figures.held_bytes, "{what}: {figures:?}");
                }
            }
            assert_nothing_left(&inner);
        }
    }
}

/// Starts this binary again for one test, as a process that may be limited.
#[track_caller]
fn in_a_child(test: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env("VRAM_PAGER_LIMITED", test)
        // Arenas of the C library reserve address space a thread; the limit is meant for us.
        .env("MALLOC_ARENA_MAX", "1")
        .output()
        .unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test} in a child: {}\n{said}", output.status);
    assert!(said.contains("the child did its work"), "{test} in a child did nothing:\n{said}");
}

fn is_child(test: &str) -> bool {
    std::env::var("VRAM_PAGER_LIMITED").is_ok_and(|name| name == test)
}

#[expect(unsafe_code, reason = "limits this process")]
fn set_limit(resource: libc::__rlimit_resource_t, bytes: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls read or write the one value given.
    let answer = unsafe {
        libc::getrlimit(resource, &raw mut limit);
        limit.rlim_cur = bytes;
        libc::setrlimit(resource, &raw const limit)
    };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
}

/// Takes the right to lock memory beyond the limit from this process.
#[expect(unsafe_code, reason = "drops a capability of this process")]
fn drop_the_right_to_lock() {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    const CAP_IPC_LOCK: u32 = 14;
    let header = Header { version: VERSION_3, pid: 0 };
    // Effective, permitted, inheritable: twice, for the lower and the upper 32 capabilities.
    let mut data = [[0_u32; 3]; 2];
    // SAFETY: the kernel reads the header and writes the two entries that version 3 has.
    let got = unsafe { libc::syscall(libc::SYS_capget, &raw const header, data.as_mut_ptr()) };
    assert_eq!(got, 0, "{}", std::io::Error::last_os_error());
    for set in &mut data[0] {
        *set &= !(1 << CAP_IPC_LOCK);
    }
    // SAFETY: as above; the kernel reads both.
    let set = unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// What the system says is locked by this process, in bytes.
fn locked_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * KIB
}

/// A process may lock so much memory and no more, and its driver is told so. The device locks memory as a
/// driver does.
#[test]
fn the_limit_of_locked_memory_costs_time_alone_and_is_said_once() {
    const NAME: &str = "the_limit_of_locked_memory_costs_time_alone_and_is_said_once";
    if !is_child(NAME) {
        return in_a_child(NAME);
    }
    let _watchdog = Watchdog::new(100, "the limit of locked memory");
    drop_the_right_to_lock();
    // Nothing; a part; all of it.
    for allowed in [64 * KIB, MIB + 512 * KIB, 2 * MIB + 512 * KIB, 8 * MIB] {
        set_limit(libc::RLIMIT_MEMLOCK, allowed);
        let inner = small_card(1408 * KIB);
        {
            let device: SharedDevice = Wrapped::locking(&inner);
            let (said, figures) = passes(&device, 4 * MIB, 2);
            assert!(
                figures.page_locked_bytes <= allowed && figures.held_bytes > 64 * KIB,
                "{allowed}: {figures:?}"
            );
            let refused = figures.page_locked_bytes < figures.held_bytes;
            assert_eq!(said, usize::from(refused), "{allowed}: {figures:?}");
            assert!(allowed > 64 * KIB || refused, "nothing was refused: {figures:?}");
            assert!(allowed < 8 * MIB || !refused, "nothing had to be refused: {figures:?}");
        }
        assert_eq!(locked_bytes(), 0, "{allowed}: something stayed locked");
        assert_nothing_left(&inner);
    }
    println!("the child did its work");
}

fn address_space() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * KIB
}

/// The system refuses our own large allocations: staging blocks, the header of a file, the factor of a
/// LoRA. Each is a typed error or done without; afterwards the same pager works.
#[test]
fn large_allocations_that_are_refused_are_typed_errors_or_done_without() {
    const NAME: &str = "large_allocations_that_are_refused_are_typed_errors_or_done_without";
    if !is_child(NAME) {
        return in_a_child(NAME);
    }
    let _watchdog = Watchdog::new(100, "the limit of the address space");
    let unlimited = libc::RLIM_INFINITY;
    let file = ModelFile::new(&mixed_units(), 78);
    let device = small_card(1408 * KIB);
    {
        // Blocks of 64 MiB: the first is refused, and a smaller one does.
        let options = PagerOptions { page_locked_bytes: Some(512 * MIB), ..small_options() };
        let pager = pager(&device, options);
        let stream = pager.stream().unwrap();
        let model = pager.open_model(file.index(), &ModelOptions::default()).unwrap();
        let verifier = Verifier::new(&model).unwrap();
        set_limit(libc::RLIMIT_AS, address_space() + 24 * MIB);
        checked_pass(&model, &stream, &verifier).unwrap();
        set_limit(libc::RLIMIT_AS, unlimited);
        let held = pager.figures().staging.held_bytes;
        assert!(held > 0 && held <= 24 * MIB, "{held}");
        // With a block in hand a refusal of more is no error either.
        let big = ModelFile::new(&vec![(1024, 1024); 24], 79);
        let big_model = pager.open_model(big.index(), &ModelOptions::default()).unwrap();
        let big_verifier = Verifier::new(&big_model).unwrap();
        set_limit(libc::RLIMIT_AS, address_space() + 24 * MIB);
        checked_pass(&big_model, &stream, &big_verifier).unwrap();
        set_limit(libc::RLIMIT_AS, unlimited);
        assert_eq!(pager.figures().staging.held_bytes, held, "nothing could be added");
    }
    assert_nothing_left(&device);

    // A header within the format's limit, for which there is no memory.
    let path = file.folder.path().join("large.safetensors");
    let large = fs::File::create(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&large, &99_000_000_u64.to_le_bytes(), 0).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&large, b"{", 8).unwrap();
    large.set_len(200_000_000).unwrap();
    set_limit(libc::RLIMIT_AS, address_space() + 24 * MIB);
    let error = TensorIndex::open(&path).unwrap_err();
    set_limit(libc::RLIMIT_AS, unlimited);
    assert!(
        matches!(&error, WeightsError::NoMemory { source, .. } if source.bytes == 99_000_000),
        "{error:?}"
    );
    let text = error.to_string();
    assert!(text.contains("large.safetensors") && text.contains("the header"), "{text}");
    println!("the child did its work");
}

/// A machine seen through files: `/proc/self/cgroup` and what lies below the control group's mount.
fn machine(membership: &str, files: &[(&str, &str)]) -> HostFigures {
    let root = tempfile::tempdir().unwrap();
    let (proc, cgroup) = (root.path().join("proc"), root.path().join("cgroup"));
    fs::create_dir_all(proc.join("self")).unwrap();
    let meminfo = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nSwapTotal: 8388608 kB\n";
    fs::write(proc.join("meminfo"), meminfo).unwrap();
    fs::write(proc.join("self/cgroup"), membership).unwrap();
    for (file, text) in files {
        let path = cgroup.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    LinuxHost::at(proc, cgroup).figures().unwrap()
}

#[test]
fn the_limits_of_control_groups_of_either_version_bound_what_may_be_page_locked() {
    type Files<'a> = &'a [(&'a str, &'a str)];
    let rows: [(&str, &str, Files<'_>, Option<u64>); 13] = [
        ("version 2", "0::/a\n", &[("a/memory.max", "8589934592\n")], Some(8 * GIB)),
        ("version 2, none", "0::/a\n", &[("a/memory.max", "max\n")], None),
        (
            "version 2, a parent's",
            "0::/a/b/c\n",
            &[("a/memory.max", "8589934592"), ("a/b/c/memory.max", "max")],
            Some(8 * GIB),
        ),
        ("version 2, the root of a container", "0::/\n", &[("memory.max", "4294967296\n")], Some(4 * GIB)),
        ("version 2, a path above the mount", "0::/../x\n", &[("memory.max", "4294967296\n")], Some(4 * GIB)),
        ("version 1", "5:memory:/a\n", &[("memory/a/memory.limit_in_bytes", "2147483648\n")], Some(2 * GIB)),
        (
            "version 1, none",
            "5:memory:/\n",
            &[("memory/memory.limit_in_bytes", "9223372036854771712\n")],
            None,
        ),
        (
            "both, the lower counts",
            "5:cpu,memory:/a\n0::/b\n",
            &[("memory/a/memory.limit_in_bytes", "8589934592"), ("b/memory.max", "2147483648")],
            Some(2 * GIB),
        ),
        ("a limit above the machine", "0::/a\n", &[("a/memory.max", "1099511627776")], None),
        ("no limit file", "0::/a\n", &[], None),
        ("no membership", "", &[("memory.max", "1024")], None),
        ("nonsense", "0::/a\nx\n:::::\n", &[("a/memory.max", "-5 GiB\u{0}")], None),
        ("a number beyond 64 bits", "0::/a\n", &[("a/memory.max", "99999999999999999999")], None),
    ];
    for (what, membership, files, limit) in rows {
        let figures = machine(membership, files);
        assert_eq!(figures.cgroup_limit, limit, "{what}");
        let may = budget::page_locked_limit(&figures);
        assert!(may <= limit.unwrap_or(64 * GIB) && may > 0, "{what}: {may}");
        assert_eq!(figures.ram_total, limit.unwrap_or(64 * GIB), "{what}");
    }
    // A group that is full leaves nothing, and that is no error.
    let full = machine("0::/a\n", &[("a/memory.max", "4096\n"), ("a/memory.current", "9999999\n")]);
    assert_eq!((full.cgroup_limit, full.ram_available), (Some(4096), 0));
    assert_eq!(budget::page_locked_limit(&full), 4096 * 2 / 5);
}

/// The least that a control group can leave: the pager takes two reads' worth of staging memory and works.
#[test]
fn a_control_group_that_leaves_nothing_makes_passes_slower_and_not_wrong() {
    let _watchdog = Watchdog::new(60, "a full control group");
    let full = machine("0::/a\n", &[("a/memory.max", "4096\n")]);
    let device = small_card(1408 * KIB);
    let (said, figures) = passes(&device, budget::page_locked_limit(&full), 2);
    assert_eq!(said, 0);
    assert!(figures.held_bytes <= 2 * 2 * 256 * KIB, "two runs of staging memory at most: {figures:?}");
    assert_nothing_left(&device);
}
