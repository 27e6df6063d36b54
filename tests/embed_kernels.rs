//! The embedding example's kernels for a card do what their host twins do.
//!
//! The CUDA source is compiled by the host's C++ compiler and launched with the shapes that the example
//! uses. Where the twin adds in the same order the bits are the same, but for what the two `expf` and
//! `erf` may differ in; the twins' matrix products add in another order, and are held to a bound that
//! comes from the sizes.

#![expect(unsafe_code, reason = "loads a shared library and calls it")]

#[path = "../examples/embed/runner/kernels.rs"]
mod kernels;

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use vram_pager::device::{HostTwin, TwinArg};

type HostEmbed = unsafe extern "C" fn(*const c_char, *const u32, *const u32, *mut *mut c_void) -> c_int;

/// Compiles and loads the source, once.
fn library() -> HostEmbed {
    static LIBRARY: OnceLock<HostEmbed> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/embed_kernels/host.cpp");
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("libembed_kernels_{}.so", std::process::id()));
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let status = Command::new(&compiler)
            .args(["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Werror", "-o"])
            .arg(&target)
            .arg(&source)
            .status()
            .unwrap_or_else(|error| panic!("{compiler} (install a C++ compiler, or set CXX): {error}"));
        assert!(status.success(), "{compiler} refused {}", source.display());
        let path = CString::new(target.to_str().expect("a UTF-8 path")).expect("no NUL");
        // SAFETY: a library of functions only, without initialisers.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "{} does not load", target.display());
        let _ = std::fs::remove_file(target);
        // SAFETY: the library is loaded and never closed.
        let symbol = unsafe { libc::dlsym(library, c"host_embed".as_ptr()) };
        assert!(!symbol.is_null());
        // SAFETY: the launcher's signature.
        unsafe { std::mem::transmute::<*mut c_void, HostEmbed>(symbol) }
    })
}

/// An argument of a launch.
#[derive(Clone, Debug)]
enum Arg {
    Read(Vec<f32>),
    Write(Vec<f32>),
    U32(u32),
    F32(f32),
}

use Arg::{F32, Read, U32, Write};

/// What the written range of a launch of the source holds after it.
fn on_card(name: &str, grid: [u32; 3], block: [u32; 3], args: &[Arg]) -> Vec<f32> {
    let mut args = args.to_vec();
    let mut pointers: Vec<*mut f32> = Vec::new();
    for arg in &mut args {
        pointers.push(match arg {
            Read(numbers) | Write(numbers) => numbers.as_mut_ptr(),
            U32(_) | F32(_) => std::ptr::null_mut(),
        });
    }
    let mut parameters: Vec<*mut c_void> = args
        .iter_mut()
        .zip(&mut pointers)
        .map(|(arg, pointer)| match arg {
            Read(_) | Write(_) => std::ptr::from_mut(pointer).cast(),
            U32(number) => std::ptr::from_mut(number).cast(),
            F32(number) => std::ptr::from_mut(number).cast(),
        })
        .collect();
    let text = CString::new(name).expect("no NUL");
    // SAFETY: each parameter points to a value of the kernel's type; the ranges have the sizes that the
    // twin, which ran on the same arguments, has checked.
    let code = unsafe { library()(text.as_ptr(), grid.as_ptr(), block.as_ptr(), parameters.as_mut_ptr()) };
    assert_eq!(code, 0, "the source has no `{name}`");
    written(args)
}

/// The same by the twin.
fn by_twin(name: &str, args: &[Arg]) -> Vec<f32> {
    let module = kernels::module();
    let twin: HostTwin = module.kernels.iter().find(|(other, _)| *other == name).expect("a twin").1;
    let mut args = args.to_vec();
    let mut views: Vec<TwinArg<'_>> = args
        .iter_mut()
        .map(|arg| match arg {
            Read(numbers) => TwinArg::Read(bytemuck::cast_slice(numbers)),
            Write(numbers) => TwinArg::Write(bytemuck::cast_slice_mut(numbers)),
            U32(number) => TwinArg::U32(*number),
            F32(number) => TwinArg::F32(*number),
        })
        .collect();
    twin(&mut views).expect("sizes that agree");
    drop(views);
    written(args)
}

fn written(args: Vec<Arg>) -> Vec<f32> {
    let written =
        args.into_iter().find_map(|arg| if let Write(numbers) = arg { Some(numbers) } else { None });
    written.expect("every kernel writes one range")
}

/// Holds a launch of the source to the twin, number by number, within `bound`; 0 asks for the same bits.
/// `grid` is the example's; more threads than there is work for must change nothing.
fn compare(name: &str, grid: [u32; 3], block: [u32; 3], args: &[Arg], bound: f32) {
    let twin = by_twin(name, args);
    for more in [[0, 0, 0], [1, 1, 1]] {
        // A flat kernel has one dimension of work: threads of another row would do it twice.
        let more = if block[1] == 1 && grid[1] == 1 { [more[0], 0, 0] } else { more };
        let grid = [grid[0] + more[0], grid[1] + more[1], grid[2] + if grid[2] > 1 { more[2] } else { 0 }];
        let card = on_card(name, grid, block, args);
        for (place, (card, twin)) in card.iter().zip(&twin).enumerate() {
            let same = card.to_bits() == twin.to_bits() || (card - twin).abs() <= bound;
            assert!(same, "{name} number {place}: {card} on the card, {twin} by the twin, bound {bound}");
        }
    }
}

fn flat(name: &str, threads: u32, args: &[Arg], bound: f32) {
    compare(name, [threads.div_ceil(256), 1, 1], [256, 1, 1], args, bound);
}

fn tiles(name: &str, rows: u32, columns: u32, layers: u32, args: &[Arg], bound: f32) {
    compare(name, [columns.div_ceil(16), rows.div_ceil(16), layers], [16, 16, 1], args, bound);
}

/// Numbers in -1..1, the same for the same seed.
fn numbers(count: u32, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut x = state;
            x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            let top = u16::try_from((x ^ (x >> 31)) >> 48).expect("16 bits");
            f32::from(top) / 32768.0 - 1.0
        })
        .collect()
}

/// Twice the worst rounding of a sum of `terms` products of numbers below 1, in any order.
fn sum_bound(terms: u32) -> f32 {
    let terms = f32::from(u16::try_from(terms).expect("a short sum"));
    2.0 * terms * terms * f32::EPSILON
}

#[test]
fn sums_and_biases_have_the_bits_of_their_twins() {
    for count in [1_u32, 255, 256, 257, 1000] {
        let (a, b, c) = (numbers(count, 1), numbers(count, 2), numbers(count, 3));
        let out = numbers(count, 4);
        let args = [Read(a.clone()), Read(b), Read(c), Write(out.clone()), U32(count)];
        flat("embed_sum", count, &args, 0.0);
        flat("embed_add", count, &[Read(a), Write(out), U32(count)], 0.0);
    }
    for (rows, outputs, first, stride) in [(1, 1, 0, 1), (5, 300, 7, 384), (3, 384, 0, 384), (2, 1, 383, 384)]
    {
        let out = numbers(rows * stride, 5);
        let args = [Read(numbers(outputs, 6)), Write(out), U32(rows), U32(outputs), U32(first), U32(stride)];
        compare("embed_bias", [outputs.div_ceil(256), rows, 1], [256, 1, 1], &args, 0.0);
    }
}

#[test]
fn matrix_products_stay_within_the_rounding_of_their_sums() {
    for (rows, inputs, outputs, first, stride) in
        [(1, 1, 1, 0, 1), (7, 384, 33, 5, 64), (17, 64, 16, 0, 16), (2, 1536, 3, 1, 5)]
    {
        let args = [
            Read(numbers(rows * inputs, 1)),
            Read(numbers(outputs * inputs, 2)),
            Write(numbers(rows * stride, 3)),
            U32(rows),
            U32(inputs),
            U32(outputs),
            U32(first),
            U32(stride),
        ];
        tiles("embed_matmul", rows, outputs, 1, &args, sum_bound(inputs));
    }
}

#[test]
fn attention_stays_within_the_rounding_of_its_sums() {
    for (tokens, head_width, first, heads) in [(1, 32, 0, 12), (7, 32, 3, 2), (33, 16, 11, 1)] {
        let width = 12 * head_width;
        let (q, k) = (numbers(tokens * width, 1), numbers(tokens * width, 2));
        let sizes = [U32(tokens), U32(width), U32(first), U32(heads), U32(head_width)];
        let shares = numbers(heads * tokens * tokens, 3);
        let mut args = vec![Read(q.clone()), Read(k), Write(shares.clone())];
        args.extend(sizes.clone());
        args.push(F32(0.176_776_7));
        tiles("embed_scores", tokens, tokens, heads, &args, sum_bound(head_width));
        let mut args = vec![Read(shares), Read(q), Write(numbers(tokens * width, 4))];
        args.extend(sizes);
        tiles("embed_mix", tokens, head_width, heads, &args, sum_bound(tokens));
    }
}

#[test]
fn rows_are_normalised_as_by_the_twins() {
    for (rows, width) in [(1, 1), (3, 384), (257, 5)] {
        let x = numbers(rows * width, 1);
        let args = [
            Read(numbers(width, 2)),
            Read(numbers(width, 3)),
            Write(x.clone()),
            U32(rows),
            U32(width),
            F32(1e-12),
        ];
        flat("embed_layer_norm", rows, &args, 0.0);
        // Shares are below 1; two exponentials may differ in the last places.
        flat("embed_softmax", rows, &[Write(x.clone()), U32(rows), U32(width)], 4.0 * f32::EPSILON);
        let args = [Read(x), Write(numbers(width, 4)), U32(rows), U32(width)];
        flat("embed_pool", width, &args, 0.0);
    }
}

#[test]
fn the_activation_function_equals_its_twin() {
    let wide: Vec<f32> = numbers(2000, 9).iter().map(|number| number * 8.0).collect();
    for x in [wide, vec![0.0, -0.0, 1e-30, -1e-30, 30.0, -30.0]] {
        let count = u32::try_from(x.len()).expect("a short list");
        flat("embed_gelu", count, &[Write(x), U32(count)], 2.0 * f32::EPSILON);
    }
}

#[test]
fn the_card_has_code_for_every_twin() {
    let module = kernels::module();
    let ptx = module.ptx.expect("code for a card");
    for (name, _) in module.kernels {
        assert!(ptx.contains(&format!(".entry {name}(")), "{name}");
    }
}
