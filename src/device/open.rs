//! Device strings: what `--device` takes, and the opening of what they name.
//!
//! `emulated:<size>[,page=<size>][,link=<rate>][,disk=<rate>][,bytes=none][,vmm=none]`
//! and `cuda:<n>[,cap=<size>][,page=<size>][,link=<rate>]`. A string with a typo is refused with what would be right.
//! Owns nothing, takes no lock. May import the backends.

#![deny(unsafe_code)]

use std::str::FromStr;

use super::emulated::{EmulatedDevice, EmulatedOptions};
use super::{DeviceError, SharedDevice};
use crate::units::{Rate, parse_rate, parse_size};

const EMULATED_EXAMPLE: &str = "emulated:8GiB,page=2MiB,link=25GB/s";
const CUDA_EXAMPLE: &str = "cuda:0,cap=8GiB";

/// A device string that was read.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DeviceString {
    /// A card in host memory.
    Emulated(EmulatedOptions),
    /// A card behind the CUDA driver.
    Cuda(CudaString),
}

/// What a `cuda:` string says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CudaString {
    /// The driver's number of the card.
    pub ordinal: u32,
    /// The most bytes to use; `None` is the whole card.
    pub cap: Option<u64>,
    /// The page size in bytes; `None` is the card's granularity.
    pub page_bytes: Option<u64>,
    /// The rate of its link, which no driver tells; `None` has it measured as the pager copies.
    pub link: Option<Rate>,
}

impl FromStr for DeviceString {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let trimmed = text.trim();
        let (kind, rest) = match trimmed.split_once(':') {
            Some((kind, rest)) => (kind, Some(rest)),
            None => (trimmed, None),
        };
        match (kind, rest) {
            ("emulated", Some(rest)) => parse_emulated(text, rest).map(Self::Emulated),
            ("cuda", Some(rest)) => parse_cuda(text, rest).map(Self::Cuda),
            ("emulated", None) => Err(bad(text, "a size is missing after `emulated:`", EMULATED_EXAMPLE)),
            ("cuda", None) => Err(bad(text, "a card's number is missing after `cuda:`", CUDA_EXAMPLE)),
            _ => {
                let near = nearest(kind, &["emulated", "cuda"]);
                let why = match near {
                    Some(near) => format!("there is no kind `{kind}`; did you mean `{near}:`?"),
                    None => format!("there is no kind `{kind}`; the kinds are `emulated:` and `cuda:`"),
                };
                Err(bad(text, why, if near == Some("cuda") { CUDA_EXAMPLE } else { EMULATED_EXAMPLE }))
            }
        }
    }
}

/// Opens the device that `text` names.
///
/// `emulated:<size>[,page=<size>][,link=<rate>][,disk=<rate>][,bytes=none][,vmm=none]` is a card in host memory,
/// see [`EmulatedOptions`](crate::device::emulated::EmulatedOptions) for what is not given. With `bytes=none` it
/// keeps accounts and a clock and no bytes, with `vmm=none` it has no virtual memory calls.
/// `cuda:<n>[,cap=<size>][,page=<size>][,link=<rate>]` is the driver's card of that number, which `cap` makes act as a
/// smaller one; `link` tells the rate of its link, which is measured otherwise.
/// Sizes and rates are those of [`parse_size`](crate::units::parse_size) and
/// [`parse_rate`](crate::units::parse_rate).
///
/// ```
/// let card = vram_pager::device::open("emulated:24MiB,page=64KiB,link=12GB/s")?;
/// assert_eq!(card.info().granularity, 64 << 10);
/// assert!(vram_pager::device::open("emulatd:24MiB").unwrap_err().to_string().contains("did you mean"));
/// # Ok::<(), vram_pager::device::DeviceError>(())
/// ```
///
/// # Errors
/// A string that cannot be read, with what would be right; a device that is not there.
pub fn open(text: &str) -> Result<SharedDevice, DeviceError> {
    match text.parse()? {
        DeviceString::Emulated(options) => Ok(EmulatedDevice::open(options)?),
        DeviceString::Cuda(cuda) => open_cuda(text, &cuda),
    }
}

/// The one place where the CUDA backend is opened.
#[cfg(feature = "cuda")]
fn open_cuda(_text: &str, cuda: &CudaString) -> Result<SharedDevice, DeviceError> {
    use super::cuda::{CudaDevice, CudaOptions};
    let CudaString { ordinal, cap, page_bytes: page, link } = *cuda;
    let options = CudaOptions { ordinal, cap, page, link };
    Ok(CudaDevice::open(options)?)
}

/// The one place where the CUDA backend is opened.
#[cfg(not(feature = "cuda"))]
fn open_cuda(text: &str, _cuda: &CudaString) -> Result<SharedDevice, DeviceError> {
    Err(DeviceError::Unavailable {
        device: text.to_owned(),
        why: "this build has no CUDA backend".to_owned(),
        advice: format!(
            "build with the feature `cuda`, or use an emulated card such as `{EMULATED_EXAMPLE}`"
        ),
    })
}

fn parse_emulated(text: &str, rest: &str) -> Result<EmulatedOptions, DeviceError> {
    let refuse = |why: String| bad(text, why, EMULATED_EXAMPLE);
    let mut parts = rest.split(',');
    let size = parts.next().unwrap_or_default();
    if size.trim().is_empty() || size.contains('=') {
        return Err(refuse("the size must come first, right after `emulated:`".to_owned()));
    }
    let mut options = EmulatedOptions::new(parse_size(size)?);
    for_each_option(parts, &["page", "link", "disk", "bytes", "vmm"], refuse, |key, value| {
        match key {
            "page" => options.page_bytes = parse_size(value)?,
            "link" => options.link = parse_rate(value)?,
            "disk" => options.disk = Some(parse_rate(value)?),
            "bytes" if value == "none" => options.keeps_bytes = false,
            "vmm" if value == "none" => options.virtual_memory = false,
            _ => return Err(refuse(format!("`{key}={value}` is unknown; the one value is `{key}=none`"))),
        }
        Ok(())
    })?;
    options.whole_pages().map_err(refuse)?;
    Ok(options)
}

fn parse_cuda(text: &str, rest: &str) -> Result<CudaString, DeviceError> {
    let refuse = |why: String| bad(text, why, CUDA_EXAMPLE);
    let mut parts = rest.split(',');
    let number = parts.next().unwrap_or_default().trim();
    let ordinal = number.parse().map_err(|_| refuse(format!("`{number}` is not a card's number")))?;
    let mut cuda = CudaString { ordinal, cap: None, page_bytes: None, link: None };
    for_each_option(parts, &["cap", "page", "link"], refuse, |key, value| {
        if key == "link" {
            cuda.link = Some(parse_rate(value)?);
            return Ok(());
        }
        let bytes = parse_size(value)?;
        if bytes == 0 {
            return Err(refuse(format!("`{key}` is zero")));
        }
        *(if key == "cap" { &mut cuda.cap } else { &mut cuda.page_bytes }) = Some(bytes);
        Ok(())
    })?;
    Ok(cuda)
}

/// Gives each `key=value` to `set`; refuses keys that are unknown, with the nearest, or come twice.
fn for_each_option<'a>(
    parts: impl Iterator<Item = &'a str>,
    keys: &[&'static str],
    refuse: impl Fn(String) -> DeviceError,
    mut set: impl FnMut(&'static str, &'a str) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let mut seen = Vec::new();
    for part in parts {
        let Some((key, value)) = part.split_once('=') else {
            return Err(refuse(format!("`{}` is no `key=value`", part.trim())));
        };
        let (key, value) = (key.trim(), value.trim());
        let Some(known) = keys.iter().copied().find(|known| *known == key) else {
            let why = match nearest(key, keys) {
                Some(near) => format!("there is no option `{key}=`; did you mean `{near}=`?"),
                None => format!("there is no option `{key}=`; the options are `{}=`", keys.join("=`, `")),
            };
            return Err(refuse(why));
        };
        if seen.contains(&known) {
            return Err(refuse(format!("`{known}=` comes twice")));
        }
        seen.push(known);
        set(known, value)?;
    }
    Ok(())
}

fn bad(text: &str, why: impl Into<String>, example: &'static str) -> DeviceError {
    DeviceError::BadDeviceString { text: text.to_owned(), why: why.into(), example }
}

/// The word of `words` that `text` is most likely a misspelling of.
fn nearest<'a>(text: &str, words: &[&'a str]) -> Option<&'a str> {
    let text = text.to_ascii_lowercase();
    words
        .iter()
        .map(|word| (distance(&text, word), *word))
        .filter(|(distance, word)| *distance <= word.len().div_ceil(2))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}

/// How many letters must change, come, go or trade places with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, MIB, Rate};

    fn emulated(text: &str) -> EmulatedOptions {
        match text.parse() {
            Ok(DeviceString::Emulated(options)) => options,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn options_come_in_any_order() {
        assert_eq!(emulated("emulated:8GiB"), EmulatedOptions::new(8 * GIB));
        let all = emulated(" emulated:24MiB, bytes=none,disk=3GB/s,link=1GB/s,vmm=none,page=64KiB");
        let expected = EmulatedOptions {
            page_bytes: 65_536,
            link: Rate(1_000_000_000),
            disk: Some(Rate(3_000_000_000)),
            keeps_bytes: false,
            virtual_memory: false,
            ..EmulatedOptions::new(24 * MIB)
        };
        assert_eq!(all, expected);
        let cuda = CudaString {
            ordinal: 1,
            cap: Some(GIB),
            page_bytes: Some(2 * MIB),
            link: Some(Rate(50_000_000_000)),
        };
        assert_eq!("cuda:1,page=2MiB,link=50GB/s,cap=1GiB".parse(), Ok(DeviceString::Cuda(cuda)));
    }

    #[test]
    fn a_typo_is_refused_with_what_would_be_right() {
        for (text, right) in [
            ("emulated:8GiB,lnik=1GB/s", "`link=`"),
            ("emulated:8GiB,pages=2MiB", "`page=`"),
            ("emulated:8GiB,zzzzzz=2MiB", "`disk=`"),
            ("emulatd:8GiB", "`emulated:`"),
            ("Emulated:8GiB", "`emulated:`"),
            ("emu:8GiB", "`emulated:`"),
            ("cdua:0", "`cuda:`"),
            ("emulated:8GiB,bytes=nnoe", "`bytes=none`"),
            ("emulated:8GiB,page=3MiB", "power of two"),
            ("emulated:8GiB,page=1KiB", "host's page"),
            ("emulated:0", "less than one page"),
            ("emulated:1MiB", "less than one page"),
            ("emulated:8XiB", "24MiB"),
            ("emulated:8GiB,link=0", "zero"),
            ("emulated:8GiB,page=2MiB,page=2MiB", "twice"),
            ("emulated:8GiB,", "key=value"),
            ("emulated:page=2MiB", "size must come first"),
            ("emulated", "size is missing"),
            ("emulated:", "size must come first"),
            ("", "`emulated:`"),
            ("cuda", "number is missing"),
            ("cuda:x", "not a card's number"),
            ("cuda:0,cap=0", "zero"),
            ("cuda:0,caps=8GiB", "`cap="),
            ("cuda:0,disk=1GB/s", "`link=`"),
            ("cuda:0,link=0", "zero"),
        ] {
            let error = text.parse::<DeviceString>().unwrap_err().to_string();
            assert!(error.contains(right), "{text}: {error}");
        }
    }

    #[test]
    fn a_size_is_rounded_down_to_whole_pages() {
        let device = open("emulated:5MiB").unwrap();
        assert_eq!(device.info().total_bytes, 4 * MIB);
        assert_eq!(device.info().name, "emulated:4MiB");
    }
}
