//! The driver stand-in as a library of this process, and its hooks.
//!
//! The library is built once (or taken from the folder that `VRAM_PAGER_STANDIN_DIR` names) and opened
//! before the crate looks for a driver; the loader then finds it by its SONAME. If the process got a
//! driver by other means, the tests fail rather than run on that.

#![allow(dead_code, reason = "each test uses some of the hooks")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The stand-in, loaded.
pub(crate) struct Standin {
    handle: *mut c_void,
    folder: PathBuf,
}

// SAFETY: a loaded library whose hooks take its own lock.
unsafe impl Send for Standin {}
// SAFETY: as above.
unsafe impl Sync for Standin {}

/// Loads the stand-in, once a process.
pub(crate) fn standin() -> &'static Standin {
    static STANDIN: OnceLock<Standin> = OnceLock::new();
    STANDIN.get_or_init(|| {
        let folder = std::env::var_os("VRAM_PAGER_STANDIN_DIR").map_or_else(build, PathBuf::from);
        let path = folder.join("libcuda.so.1");
        let text = CString::new(path.to_str().expect("a UTF-8 path")).expect("no NUL");
        // SAFETY: our own library; what it runs at load is in `hide.rs`.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{} does not load", path.display());
        let standin = Standin { handle, folder };
        // SAFETY: a name and flags that only look.
        let found = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        assert_eq!(found, handle, "the process has another libcuda.so.1");
        standin
    })
}

/// Builds the stand-in and installs it under both of the driver's names.
fn build() -> PathBuf {
    let status = Command::new(env!("CARGO"))
        .args(["rustc", "--quiet", "--example", "cuda_standin", "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .args(["--", "-C", "link-arg=-Wl,-soname,libcuda.so.1"])
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the stand-in does not build");
    // The test runs from target/PROFILE/deps.
    let own = std::env::current_exe().expect("a path");
    let profile = own.parent().and_then(Path::parent).expect("target/PROFILE/deps");
    // Unit tests are told no folder for temporary files.
    let folder = option_env!("CARGO_TARGET_TMPDIR").map_or_else(|| profile.join("../tmp"), PathBuf::from);
    let folder = folder.join("standin");
    std::fs::create_dir_all(&folder).expect("a folder");
    // Put in place by renaming, since another test may be loading it.
    let fresh = folder.join(format!("fresh-{}", std::process::id()));
    std::fs::copy(profile.join("examples/libcuda_standin.so"), &fresh).expect("the built library");
    std::fs::rename(&fresh, folder.join("libcuda.so.1")).expect("one file system");
    let link = folder.join("libcuda.so");
    if !link.exists() {
        let _ = std::os::unix::fs::symlink("libcuda.so.1", link);
    }
    folder
}

impl Standin {
    /// The folder that holds `libcuda.so` and `libcuda.so.1`.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A symbol of the library.
    pub(crate) fn symbol(&self, name: &str) -> *mut c_void {
        let text = CString::new(name).expect("no NUL");
        // SAFETY: the library is loaded and never closed.
        let symbol = unsafe { libc::dlsym(self.handle, text.as_ptr()) };
        assert!(!symbol.is_null(), "the stand-in has no `{name}`");
        symbol
    }

    /// Makes calls fail from here on: `NAME@N[+]=CODE`, comma-separated; an empty text takes all away.
    pub(crate) fn fail(&self, text: &str) {
        let text = CString::new(text).expect("no NUL");
        // SAFETY: the hook's signature.
        let code = unsafe {
            let hook: unsafe extern "C" fn(*const c_char) -> c_int =
                std::mem::transmute(self.symbol("vram_pager_standin_fail"));
            hook(text.as_ptr())
        };
        assert_eq!(code, 0, "{text:?} is no failure");
    }

    /// Calls since [`Self::fail`].
    pub(crate) fn calls(&self) -> u64 {
        self.number("vram_pager_standin_calls")
    }

    /// The same by the driver's names.
    pub(crate) fn calls_by_name(&self) -> Vec<(String, u64)> {
        let text = self.text("vram_pager_standin_calls_by_name");
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.map(|(name, calls)| (name.to_owned(), calls.parse().expect("a number"))).collect()
    }

    /// What was told of misuse since this was asked last.
    pub(crate) fn take_told(&self) -> Vec<String> {
        self.text("vram_pager_standin_take_told").lines().map(str::to_owned).collect()
    }

    /// Operations of an open card keep the calls that led to them, for what is told of misuse.
    pub(crate) fn keep_sites(&self, ordinal: u32) {
        // SAFETY: the hook's signature.
        let code = unsafe {
            let hook: extern "C" fn(u32, c_int) -> c_int =
                std::mem::transmute(self.symbol("vram_pager_standin_keep_sites"));
            hook(ordinal, 1)
        };
        assert_eq!(code, 0, "card {ordinal} is not open");
    }

    fn text(&self, hook: &str) -> String {
        let mut bytes = vec![0_u8; 1 << 16];
        // SAFETY: the hook's signature, and room for as many bytes as it is told.
        let length = unsafe {
            let hook: unsafe extern "C" fn(*mut c_char, usize) -> usize =
                std::mem::transmute(self.symbol(hook));
            hook(bytes.as_mut_ptr().cast(), bytes.len())
        };
        bytes.truncate(length);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// How often misuse was told.
    pub(crate) fn misuses(&self) -> u64 {
        self.number("vram_pager_standin_misuses")
    }

    /// Contexts, and kinds of objects in them, that exist.
    pub(crate) fn leftovers(&self) -> u64 {
        self.number("vram_pager_standin_leftovers")
    }

    /// Sets how many cards there are and how large each is; a card that is open must not change.
    pub(crate) fn set_cards(&self, count: c_int, bytes: u64) {
        // SAFETY: the hook's signature.
        let code = unsafe {
            let hook: extern "C" fn(c_int, u64) -> c_int =
                std::mem::transmute(self.symbol("vram_pager_standin_set_cards"));
            hook(count, bytes)
        };
        assert_eq!(code, 0, "cards cannot change while they are open");
    }

    /// Sets the granularity of cards that are opened from here on.
    pub(crate) fn set_page(&self, bytes: u64) {
        // SAFETY: the hook's signature.
        let code = unsafe {
            let hook: extern "C" fn(u64) -> c_int =
                std::mem::transmute(self.symbol("vram_pager_standin_set_page"));
            hook(bytes)
        };
        assert_eq!(code, 0, "the granularity cannot change while cards are open");
    }

    /// Another process holds `bytes` of an open card from here on.
    pub(crate) fn set_other_bytes(&self, ordinal: u32, bytes: u64) {
        // SAFETY: the hook's signature.
        let code = unsafe {
            let hook: extern "C" fn(u32, u64) -> c_int =
                std::mem::transmute(self.symbol("vram_pager_standin_set_other_bytes"));
            hook(ordinal, bytes)
        };
        assert_eq!(code, 0, "card {ordinal} is not open");
    }

    /// Sets whether there are virtual memory and pools from here on.
    pub(crate) fn set_abilities(&self, virtual_memory: bool, pools: bool) {
        // SAFETY: the hook's signature.
        unsafe {
            let hook: extern "C" fn(c_int, c_int) =
                std::mem::transmute(self.symbol("vram_pager_standin_set_abilities"));
            hook(c_int::from(virtual_memory), c_int::from(pools));
        }
    }

    /// Events of an open card that keep time.
    pub(crate) fn timed_events(&self, ordinal: u32) -> u64 {
        // SAFETY: the hook's signature.
        unsafe {
            let hook: extern "C" fn(u32) -> u64 =
                std::mem::transmute(self.symbol("vram_pager_standin_timed_events"));
            hook(ordinal)
        }
    }

    /// Calls of one of the driver's names since [`Self::fail`].
    pub(crate) fn calls_of(&self, name: &str) -> u64 {
        self.calls_by_name().iter().find(|(called, _)| called == name).map_or(0, |(_, calls)| *calls)
    }

    /// Makes a stream, by its driver's handle, pass for one that is being captured, or no longer.
    pub(crate) fn set_capturing(&self, stream: *mut c_void, capturing: bool) {
        // SAFETY: the hook's signature.
        unsafe {
            let hook: extern "C" fn(*mut c_void, c_int) =
                std::mem::transmute(self.symbol("vram_pager_standin_set_capturing"));
            hook(stream, c_int::from(capturing));
        }
    }

    /// Makes work of an open card complete late, as `seed` says.
    pub(crate) fn seed_delays(&self, ordinal: u32, seed: u64) {
        // SAFETY: the hook's signature.
        let code = unsafe {
            let hook: extern "C" fn(u32, u64) -> c_int =
                std::mem::transmute(self.symbol("vram_pager_standin_seed_delays"));
            hook(ordinal, seed)
        };
        assert_eq!(code, 0, "card {ordinal} is not open");
    }

    /// Holds the stream that was created as the `number`th of a card until the answer is dropped.
    pub(crate) fn hold(&'static self, ordinal: u32, number: u64) -> Hold {
        // SAFETY: the hook's signature.
        let token = unsafe {
            let hook: extern "C" fn(u32, u64) -> *mut c_void =
                std::mem::transmute(self.symbol("vram_pager_standin_hold"));
            hook(ordinal, number)
        };
        assert!(!token.is_null(), "card {ordinal} has no stream {number}");
        Hold { standin: self, token }
    }

    fn number(&self, hook: &str) -> u64 {
        // SAFETY: the hook's signature.
        unsafe {
            let hook: extern "C" fn() -> u64 = std::mem::transmute(self.symbol(hook));
            hook()
        }
    }
}

/// A stream is held back; dropping this lets it go.
pub(crate) struct Hold {
    standin: &'static Standin,
    token: *mut c_void,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // SAFETY: the hook's signature; the token is given back once.
        unsafe {
            let hook: extern "C" fn(*mut c_void) =
                std::mem::transmute(self.standin.symbol("vram_pager_standin_release"));
            hook(self.token);
        }
    }
}

/// A program beside us on card 0: the primary context, bound to this thread, and a stream.
pub(crate) struct Runner {
    standin: &'static Standin,
    pub(crate) stream: *mut c_void,
}

impl Runner {
    pub(crate) fn new(standin: &'static Standin) -> Self {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
        type Push = unsafe extern "C" fn(*mut c_void) -> c_int;
        type Create = unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int;
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the driver's signatures; what is retained and created is given back in the drop.
        unsafe {
            let retain: Retain = std::mem::transmute(standin.symbol("cuDevicePrimaryCtxRetain"));
            let push: Push = std::mem::transmute(standin.symbol("cuCtxPushCurrent_v2"));
            let create: Create = std::mem::transmute(standin.symbol("cuStreamCreate"));
            assert_eq!((retain(&raw mut context, 0), push(context), create(&raw mut stream, 0)), (0, 0, 0));
        }
        Self { standin, stream }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
        type Pop = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
        type Release = unsafe extern "C" fn(c_int) -> c_int;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver's signatures; the stream is still ours.
        unsafe {
            let destroy: Destroy = std::mem::transmute(self.standin.symbol("cuStreamDestroy_v2"));
            let pop: Pop = std::mem::transmute(self.standin.symbol("cuCtxPopCurrent_v2"));
            let release: Release = std::mem::transmute(self.standin.symbol("cuDevicePrimaryCtxRelease_v2"));
            assert_eq!((destroy(self.stream), pop(&raw mut context), release(0)), (0, 0, 0));
        }
    }
}

/// The stand-in for one test at a time: its failures and figures are the process's.
pub(crate) fn alone() -> (MutexGuard<'static, ()>, &'static Standin) {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let standin = standin();
    standin.fail("");
    (guard, standin)
}
