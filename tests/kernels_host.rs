//! The kernels' arithmetic, tested without a card.
//!
//! The CUDA sources are compiled by the host's C++ compiler behind a small header (`kernels_host/`), loaded,
//! and held against references that share nothing with them: values of formats computed in f64 from their
//! definition, rounding by searching the nearest representable value. The crate's host twins must give the
//! same bits as the sources, for every pair of types, odd sizes and unaligned starts. A bug here would show
//! on a card as weights that are wrong in the last bit.

#![expect(unsafe_code, reason = "loads a shared library and calls it")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail as its body does")]
#![expect(clippy::float_cmp, reason = "ties of exact values are what is tested")]

use std::ffi::{CString, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use vram_pager::device::{FloatType, PatchPart, cast, cast_kernel, checksum, patch, patch_kernel};

const WIDE: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::Bf16];
const ALL: [FloatType; 5] =
    [FloatType::F32, FloatType::F16, FloatType::Bf16, FloatType::F8E4m3, FloatType::F8E5m2];

type HostCast = unsafe extern "C" fn(*mut c_void, u32, u32, *const u8, u64, *mut u8);
type HostPatch =
    unsafe extern "C" fn(*mut c_void, u32, u32, *mut u8, u64, u64, u64, *const u8, *const u8, u32, f32);
type HostChecksum = unsafe extern "C" fn(u32, u32, *const u8, u64, u64, *mut u64);

/// The kernels as a host library.
struct Library(*mut c_void);

// SAFETY: a loaded library is used from any thread; its launchers keep their state per thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Compiles and loads the sources, once.
    fn get() -> &'static Self {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        LIBRARY.get_or_init(|| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels_host/host.cpp");
            let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
                .join(format!("libkernels_host_{}.so", std::process::id()));
            let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
            let status = Command::new(&compiler)
                .args(["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off"])
                .args(["-fno-strict-aliasing", "-Wall", "-Werror", "-o"])
                .arg(&target)
                .arg(&source)
                .status()
                .unwrap_or_else(|error| panic!("{compiler} (install a C++ compiler, or set CXX): {error}"));
            assert!(status.success(), "{compiler} refused {}", source.display());
            let path = CString::new(target.to_str().expect("a UTF-8 path")).expect("no NUL");
            // SAFETY: a library of functions only, without initialisers.
            let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
            assert!(!library.is_null(), "{} does not load", target.display());
            std::fs::remove_file(&target).expect("the loaded file can be unlinked");
            Self(library)
        })
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let text = CString::new(name).expect("no NUL");
        // SAFETY: the library is loaded and never closed.
        let symbol = unsafe { libc::dlsym(self.0, text.as_ptr()) };
        assert!(!symbol.is_null(), "the sources have no `{name}`");
        symbol
    }

    /// Runs a cast kernel from and to bytes that begin `shift` bytes after an aligned address.
    fn cast(&self, from: FloatType, to: FloatType, bytes: &[u8], shift: usize) -> Vec<u8> {
        let elements = bytes.len() / usize::try_from(from.bytes()).unwrap();
        let length = elements * usize::try_from(to.bytes()).unwrap();
        let (mut source, mut target) = (Shifted::new(bytes.len(), shift), Shifted::new(length, shift));
        source.bytes().copy_from_slice(bytes);
        let kernel = self.symbol(cast_kernel(from, to).expect("a pair that is cast"));
        // SAFETY: the launcher's signature; both buffers are of the lengths that the kernel touches.
        unsafe {
            let run: HostCast = std::mem::transmute(self.symbol("host_cast"));
            run(kernel, 3, 7, source.bytes().as_ptr(), elements as u64, target.bytes().as_mut_ptr());
        }
        target.assert_margins();
        target.bytes().to_vec()
    }

    fn patch(
        &self,
        weight_type: FloatType,
        weight: &[u8],
        part: PatchPart,
        factor_type: FloatType,
        up: &[u8],
        down: &[u8],
    ) -> Vec<u8> {
        let mut target = Shifted::new(weight.len(), 1);
        target.bytes().copy_from_slice(weight);
        let kernel = self.symbol(patch_kernel(weight_type, factor_type).expect("a pair that is patched"));
        // SAFETY: the launcher's signature; the factors are whole, as the twin has checked.
        unsafe {
            let run: HostPatch = std::mem::transmute(self.symbol("host_patch"));
            let PatchPart { first, elements, columns, rank, scale } = part;
            let at = target.bytes().as_mut_ptr();
            run(kernel, 2, 5, at, first, elements, columns, up.as_ptr(), down.as_ptr(), rank, scale);
        }
        target.assert_margins();
        target.bytes().to_vec()
    }

    fn checksum(&self, bytes: &[u8], first_word: u64, sum: &mut u64) {
        // SAFETY: the launcher's signature; the kernel reads the bytes and adds to the sum.
        unsafe {
            let run: HostChecksum = std::mem::transmute(self.symbol("host_checksum"));
            run(3, 5, bytes.as_ptr(), bytes.len() as u64, first_word, sum);
        }
    }
}

/// Bytes at a chosen distance from an aligned address, with margins that nobody may touch.
struct Shifted {
    words: Vec<u64>,
    shift: usize,
    length: usize,
}

impl Shifted {
    const MARGIN: u8 = 0xA5;

    fn new(length: usize, shift: usize) -> Self {
        Self { words: vec![u64::from_ne_bytes([Self::MARGIN; 8]); length / 8 + 4], shift: 8 + shift, length }
    }

    fn all(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words)
    }

    fn bytes(&mut self) -> &mut [u8] {
        let (shift, length) = (self.shift, self.length);
        &mut self.all()[shift..shift + length]
    }

    fn assert_margins(&mut self) {
        let (shift, length) = (self.shift, self.length);
        let all = self.all();
        assert!(
            all[..shift].iter().chain(&all[shift + length..]).all(|byte| *byte == Self::MARGIN),
            "a kernel wrote outside its range"
        );
    }
}

/// `SplitMix64`: small, seeded, and good enough to pick bits.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next().to_le_bytes()[0]).collect()
    }
}

/// What a code of a format stands for, by its definition: NaN, an infinity, or an exact number.
fn value(format: FloatType, code: u32) -> f64 {
    let (exponent_bits, mantissa_bits) = match format {
        FloatType::F32 => (8, 23),
        FloatType::F16 => (5, 10),
        FloatType::Bf16 => (8, 7),
        FloatType::F8E4m3 => (4, 3),
        FloatType::F8E5m2 => (5, 2),
    };
    let sign = if code >> (exponent_bits + mantissa_bits) & 1 == 1 { -1.0 } else { 1.0 };
    let exponent = i32::try_from(code >> mantissa_bits & ((1 << exponent_bits) - 1)).unwrap();
    let mantissa = code & ((1 << mantissa_bits) - 1);
    let bias = (1 << (exponent_bits - 1)) - 1;
    let last = (1 << exponent_bits) - 1;
    if format == FloatType::F8E4m3 {
        if exponent == last && mantissa == 7 {
            return f64::NAN;
        }
    } else if exponent == last {
        return if mantissa == 0 { sign * f64::INFINITY } else { f64::NAN };
    }
    let fraction = f64::from(mantissa) / f64::from(1_u32 << mantissa_bits);
    if exponent == 0 {
        sign * fraction * 2.0_f64.powi(1 - bias)
    } else {
        sign * (1.0 + fraction) * 2.0_f64.powi(exponent - bias)
    }
}

/// The positive finite values of a 16-bit format in order, by code.
fn positive_values(format: FloatType) -> Vec<f64> {
    (0..0x8000).map(|code| value(format, code)).take_while(|value| value.is_finite()).collect()
}

/// The code nearest to `exact` in a 16-bit format, ties to the even code, by searching the values.
fn nearest(values: &[f64], exact: f64) -> u16 {
    let sign = if exact.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = exact.abs();
    let above = values.partition_point(|value| *value < magnitude);
    // The value after the largest, as if the format went on: infinity takes its place.
    let step = values[values.len() - 1] - values[values.len() - 2];
    let at = |code: usize| values.get(code).copied().unwrap_or_else(|| values[values.len() - 1] + step);
    let code = if above == 0 {
        0
    } else if above > values.len() || magnitude > at(values.len()) {
        values.len()
    } else {
        let (low, high) = (magnitude - at(above - 1), at(above) - magnitude);
        if low < high || (low == high && (above - 1).is_multiple_of(2)) { above - 1 } else { above }
    };
    sign | u16::try_from(code).unwrap()
}

/// Whether `code` of a format is a NaN that is quiet.
fn is_quiet_nan(format: FloatType, code: u32) -> bool {
    let quiet = match format {
        FloatType::F32 => 0x40_0000,
        FloatType::F16 => 0x200,
        FloatType::Bf16 => 0x40,
        FloatType::F8E4m3 | FloatType::F8E5m2 => 0,
    };
    value(format, code).is_nan() && code & quiet == quiet
}

fn code_at(format: FloatType, bytes: &[u8], index: usize) -> u32 {
    let width = usize::try_from(format.bytes()).unwrap();
    let mut code = [0; 4];
    code[..width].copy_from_slice(&bytes[index * width..(index + 1) * width]);
    u32::from_le_bytes(code)
}

/// Every code of a format of up to 16 bits; of f32 the ones around every place where rounding turns, and
/// `random` more.
fn codes(format: FloatType, random: u32) -> Vec<u32> {
    if format != FloatType::F32 {
        return (0..1_u32 << (8 * format.bytes())).collect();
    }
    let mut codes = Vec::new();
    for sign in [0, 0x8000_0000] {
        // Around each value of both 16-bit formats, and each middle of two of bf16's.
        for upper in 0..0x8000_u32 {
            for lower in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                codes.push(sign | upper << 16 | lower);
            }
        }
        for half in (0..0x7C01_u32).step_by(7) {
            #[expect(clippy::cast_possible_truncation, reason = "exact in f32")]
            let bits = (value(FloatType::F16, half.min(0x7BFF)) as f32).to_bits();
            for lower in [0xFFF, 0x1000, 0x1001] {
                codes.push(sign | bits.wrapping_add(lower));
            }
        }
        // Around the middles of subnormal f16s: odd multiples of 2^-25.
        for odd in (1..2048_u16).step_by(2) {
            let bits = (f32::from(odd) * 2.0_f32.powi(-25)).to_bits();
            codes.extend([sign | (bits - 1), sign | bits, sign | (bits + 1)]);
        }
    }
    let mut source = Random(17);
    codes.extend((0..random).map(|_| u32::try_from(source.next() >> 32).unwrap()));
    codes
}

fn to_bytes(format: FloatType, codes: &[u32]) -> Vec<u8> {
    let width = usize::try_from(format.bytes()).unwrap();
    codes.iter().flat_map(|code| code.to_le_bytes()[..width].to_vec()).collect()
}

#[test]
fn every_cast_is_exact_or_rounds_to_nearest_even() {
    let library = Library::get();
    for to in WIDE {
        let values = if to == FloatType::F32 { Vec::new() } else { positive_values(to) };
        for from in ALL {
            let codes = codes(from, 200_000);
            let cast = library.cast(from, to, &to_bytes(from, &codes), 0);
            for (index, code) in codes.iter().enumerate() {
                let (exact, got) = (value(from, *code), code_at(to, &cast, index));
                if exact.is_nan() {
                    let copied = from == to && got == *code;
                    assert!(copied || is_quiet_nan(to, got), "{from} {code:#x} to {to}: {got:#x}");
                } else if to == FloatType::F32 {
                    assert_eq!(value(to, got).to_bits(), exact.to_bits(), "{from} {code:#x} to {to}");
                } else {
                    assert_eq!(
                        got,
                        u32::from(nearest(&values, exact)),
                        "{from} {code:#x} ({exact:e}) to {to}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_host_twins_cast_to_the_same_bits() {
    let library = Library::get();
    for from in ALL {
        let bytes = to_bytes(from, &codes(from, 50_000));
        for to in WIDE {
            let mut twin = vec![
                0;
                bytes.len() / usize::try_from(from.bytes()).unwrap()
                    * usize::try_from(to.bytes()).unwrap()
            ];
            cast(from, &bytes, to, &mut twin).unwrap();
            assert!(twin == library.cast(from, to, &bytes, 0), "{from} to {to}");
        }
    }
}

#[test]
fn odd_sizes_and_unaligned_starts_change_nothing() {
    let library = Library::get();
    let mut random = Random(5);
    for from in ALL {
        for to in WIDE {
            for elements in [0_usize, 1, 2, 3, 20, 21, 22, 63, 1001] {
                let bytes = random.bytes(elements * usize::try_from(from.bytes()).unwrap());
                let aligned = library.cast(from, to, &bytes, 0);
                for shift in 1..8 {
                    let shifted = library.cast(from, to, &bytes, shift);
                    assert_eq!(shifted, aligned, "{from} to {to}, {elements} elements, {shift} bytes off");
                }
            }
        }
    }
}

#[test]
fn casting_there_and_back_keeps_every_code() {
    let library = Library::get();
    for narrow in [FloatType::F16, FloatType::Bf16] {
        let bytes = to_bytes(narrow, &codes(narrow, 0));
        let wide = library.cast(narrow, FloatType::F32, &bytes, 0);
        let back = library.cast(FloatType::F32, narrow, &wide, 0);
        for code in 0..0x1_0000 {
            let got = code_at(narrow, &back, code as usize);
            let signalling = value(narrow, code).is_nan() && !is_quiet_nan(narrow, code);
            assert!(got == code || (signalling && is_quiet_nan(narrow, got)), "{narrow} {code:#x}: {got:#x}");
        }
    }
}

/// A patch by its definition: the sum in f32 in order, then one rounding into the weight's type.
fn plain_patch(
    weight_type: FloatType,
    weight: &[u8],
    part: PatchPart,
    factor_type: FloatType,
    up: &[u8],
    down: &[u8],
) -> Vec<u32> {
    #[expect(clippy::cast_possible_truncation, reason = "every format's values are exact in f32")]
    let read = |format, bytes: &[u8], index: u64| {
        value(format, code_at(format, bytes, usize::try_from(index).unwrap())) as f32
    };
    let values = if weight_type == FloatType::F32 { Vec::new() } else { positive_values(weight_type) };
    (0..part.elements)
        .map(|index| {
            let (row, column) = ((part.first + index) / part.columns, (part.first + index) % part.columns);
            let rank = u64::from(part.rank);
            let sum = (0..rank).fold(0.0_f32, |sum, k| {
                sum + read(factor_type, up, row * rank + k)
                    * read(factor_type, down, k * part.columns + column)
            });
            let patched = read(weight_type, weight, index) + part.scale * sum;
            match weight_type {
                FloatType::F32 => patched.to_bits(),
                _ => u32::from(nearest(&values, f64::from(patched))),
            }
        })
        .collect()
}

/// Finite codes of a format, of moderate size.
fn finite(random: &mut Random, format: FloatType, count: usize) -> Vec<u8> {
    let codes: Vec<u32> = std::iter::repeat_with(|| u32::try_from(random.next() >> 32).unwrap())
        .map(|code| if format == FloatType::F32 { code } else { code & 0xFFFF })
        .filter(|code| value(format, *code).abs() < 1e4)
        .take(count)
        .collect();
    to_bytes(format, &codes)
}

#[test]
fn every_patch_equals_its_definition_and_its_twin() {
    let library = Library::get();
    let seed = 23;
    let mut random = Random(seed);
    for weight_type in WIDE {
        for factor_type in WIDE {
            for (rows, columns, rank) in [(1_u64, 1_u64, 1_u32), (3, 7, 4), (5, 33, 16), (9, 2, 3), (4, 4, 0)]
            {
                let size = |a: u64, b: u64| usize::try_from(a * b).unwrap();
                let weight = finite(&mut random, weight_type, size(rows, columns));
                let up = finite(&mut random, factor_type, size(rows, rank.into()));
                let down = finite(&mut random, factor_type, size(rank.into(), columns));
                let whole = rows * columns;
                let first = random.next() % whole;
                let elements = 1 + random.next() % (whole - first);
                for (first, elements) in [(0, whole), (first, elements)] {
                    let part = PatchPart { first, elements, columns, rank, scale: -0.37 };
                    let width = weight_type.bytes();
                    let bytes = usize::try_from(first * width).unwrap()
                        ..usize::try_from((first + elements) * width).unwrap();
                    let from = &weight[bytes];
                    let label = format!("{weight_type} {factor_type} {part:?}, seed {seed}");
                    let card = library.patch(weight_type, from, part, factor_type, &up, &down);
                    let mut twin = from.to_vec();
                    patch(weight_type, &mut twin, part, factor_type, &up, &down).unwrap();
                    assert_eq!(card, twin, "{label}");
                    let plain = plain_patch(weight_type, from, part, factor_type, &up, &down);
                    assert_eq!(card, to_bytes(weight_type, &plain), "{label}");
                }
            }
        }
    }
}

#[test]
fn a_patch_that_is_no_number_gives_one_nan_everywhere() {
    let library = Library::get();
    let part = PatchPart { first: 0, elements: 3, columns: 3, rank: 1, scale: 1.0 };
    let infinity_and_nan = to_bytes(FloatType::F16, &[0x7C00, 0xFC01, 0x3C00]);
    let up = to_bytes(FloatType::F32, &[f32::NEG_INFINITY.to_bits()]);
    let down = to_bytes(FloatType::F32, &[1.0_f32.to_bits(), 1.0_f32.to_bits(), 0]);
    let card = library.patch(FloatType::F16, &infinity_and_nan, part, FloatType::F32, &up, &down);
    let mut twin = infinity_and_nan;
    patch(FloatType::F16, &mut twin, part, FloatType::F32, &up, &down).unwrap();
    assert_eq!(card, twin);
    assert_eq!(card, to_bytes(FloatType::F16, &[0x7E00, 0x7E00, 0x7E00]));
}

#[test]
fn the_checksum_kernel_equals_the_function() {
    let library = Library::get();
    let bytes = Random(3).bytes(1003 + 8);
    for length in [0, 1, 7, 8, 9, 63, 64, 1003] {
        for shift in 0..8 {
            let part = &bytes[shift..shift + length];
            let mut sum = 11;
            library.checksum(part, 5, &mut sum);
            assert_eq!(sum, checksum(part, 5).wrapping_add(11), "{length} bytes, {shift} off");
        }
    }
}
