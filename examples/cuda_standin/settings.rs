//! What the environment says, read once; a value that cannot be read ends the process.

use vram_pager::units::{MIB, parse_size};

/// What the virtual memory calls do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VirtualMemory {
    Yes,
    No,
    /// The attribute says yes, and the first call fails.
    Refuse,
}

/// A call that fails.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The call's name; `*` for any.
    pub call: String,
    /// Which call, counted from 1.
    pub nth: u64,
    /// Whether all later ones fail too.
    pub forever: bool,
    /// The code that it answers.
    pub code: i32,
}

/// All settings.
#[derive(Clone, Debug)]
pub struct Settings {
    pub bytes: u64,
    pub devices: i32,
    pub page: u64,
    pub virtual_memory: VirtualMemory,
    pub pools: bool,
    pub version: i32,
    pub failures: Vec<Failure>,
    pub abort_on_misuse: bool,
    pub delays: u64,
    /// Whether memory has bytes; without, a card of any size costs none and every copy is a count.
    pub keeps_bytes: bool,
}

fn variable(name: &str) -> Option<String> {
    std::env::var(format!("VRAM_PAGER_STANDIN_{name}")).ok().filter(|value| !value.is_empty())
}

fn wrong(name: &str, value: &str) -> ! {
    eprintln!("cuda stand-in: VRAM_PAGER_STANDIN_{name}={value} cannot be read");
    std::process::abort()
}

fn read<T>(name: &str, default: T, parse: impl Fn(&str) -> Option<T>) -> T {
    variable(name).map_or(default, |value| parse(&value).unwrap_or_else(|| wrong(name, &value)))
}

impl Settings {
    /// Reads the environment.
    pub fn from_environment() -> Self {
        let size = |text: &str| parse_size(text).ok();
        Self {
            bytes: read("BYTES", 256 * MIB, size),
            devices: read("DEVICES", 1, |text| text.parse().ok().filter(|count| (0..=64).contains(count))),
            page: read("PAGE", 2 * MIB, size),
            virtual_memory: read("VMM", VirtualMemory::Yes, |text| match text {
                "1" => Some(VirtualMemory::Yes),
                "0" => Some(VirtualMemory::No),
                "refuse" => Some(VirtualMemory::Refuse),
                _ => None,
            }),
            pools: read("POOLS", true, |text| match text {
                "1" => Some(true),
                "0" => Some(false),
                _ => None,
            }),
            version: read("VERSION", 12060, |text| text.parse().ok()),
            failures: read("FAIL", Vec::new(), |text| text.split(',').map(parse_failure).collect()),
            abort_on_misuse: read("MISUSE", false, |text| match text {
                "log" => Some(false),
                "abort" => Some(true),
                _ => None,
            }),
            delays: read("DELAYS", 0, |text| text.parse().ok()),
            keeps_bytes: read("BACKING", true, |text| match text {
                "host" => Some(true),
                "none" => Some(false),
                _ => None,
            }),
        }
    }

    /// The names that the library does not export.
    pub fn missing() -> Vec<String> {
        variable("MISSING").map_or_else(Vec::new, |names| names.split(',').map(str::to_owned).collect())
    }
}

/// Reads `NAME@N[+]=CODE`.
pub fn parse_failure(text: &str) -> Option<Failure> {
    let (call, rest) = text.trim().split_once('@')?;
    let (nth, code) = rest.split_once('=')?;
    let forever = nth.ends_with('+');
    let nth = nth.trim_end_matches('+').parse().ok().filter(|nth| *nth > 0)?;
    Some(Failure { call: call.to_owned(), nth, forever, code: code.parse().ok()? })
}
