#!/usr/bin/env bash
# AddressSanitizer or ThreadSanitizer over the crate and its tests, on stable Rust.
#
#   tests/sanitizers.sh address|thread [--short|--long|--self-check]
#
# --short (the default) runs the tests of the pager that work with many threads, held guards, panics and
# injected faults: the package in tests/sanitizers builds them with nothing that they do not use. --long
# runs the whole suite and the stress subcommand. --self-check only shows that the sanitizer works.
#
# The driver stand-in is a library that the tests open. Under ThreadSanitizer it is built anew, instrumented like
# the programs: otherwise the order that its locks make would not be seen. A program has the sanitizer's functions
# in it and gives them to the library. Under AddressSanitizer the library is taken as it is.
#
# Before anything else a planted use after free, or a planted race, has to be reported. Without that the
# script fails: a sanitizer that reports nothing proves nothing.
#
# Miri is not used: it cannot run the memory mappings that the emulated card is made of. The modules
# that are pure (weights::header, weights::index, pager::word, pager::plan, pager::order and their like begin with
# `#![deny(unsafe_code)]`) have nothing for it to find.
#
# Settings: VRAM_PAGER_STRESS_SECONDS (60) for the stress of --long.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | sed -e '$d' -e 's/^# \{0,1\}//'; exit 2; }
fail() { echo "sanitizers: $*" >&2; exit 1; }

sanitizer="${1:-}"
form="${2:---short}"
std=()
case "$sanitizer" in
    address)
        flags="-Zsanitizer=address"
        fault=use-after-free report="AddressSanitizer: heap-use-after-free"
        # Leaks are the tests' own business: they count what is left on the card and in the process.
        export ASAN_OPTIONS="detect_leaks=0:abort_on_error=0:exitcode=99:detect_stack_use_after_return=1:${ASAN_OPTIONS:-}"
        ;;
    thread)
        # The standard library as it is shipped is not instrumented, so the order that its locks, channels and
        # counts make is not seen, and every use of them looks like a race. It is built anew here.
        # Programs export its functions, for the driver stand-in that they open.
        flags="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer -Clink-arg=-Wl,--export-dynamic-symbol=__tsan_*"
        std=(-Zbuild-std)
        fault=race report="ThreadSanitizer: data race"
        export TSAN_OPTIONS="exitcode=99:history_size=4:${TSAN_OPTIONS:-}"
        ;;
    *) usage ;;
esac
case "$form" in --short | --long | --self-check) ;; *) usage ;; esac

target=x86_64-unknown-linux-gnu
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="$flags --cfg sanitized ${SANITIZER_RUSTFLAGS:-}"
export RUSTDOCFLAGS="$RUSTFLAGS"
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-2}"
# Tests that end what hangs wait longer: a sanitizer makes everything several times slower.
export VRAM_PAGER_TEST_PATIENCE="${VRAM_PAGER_TEST_PATIENCE:-10}"
build=("${std[@]}" --target "$target" --target-dir "$PWD/target/sanitizer-$sanitizer")
small=(--manifest-path tests/sanitizers/Cargo.toml "${build[@]}")

# The sanitizer reports what is planted, and nothing else.
planted="target/sanitizer-$sanitizer/planted"
mkdir -p "${planted%/*}"
# shellcheck disable=SC2086 # the flags are several words
rustc --edition 2024 -g $RUSTFLAGS --target "$target" tests/sanitizers/planted.rs -o "$planted"
"$planted" nothing >/dev/null 2>&1 || fail "a program without a fault fails under -Zsanitizer=$sanitizer"
output="$("$planted" "$fault" 2>&1)" && fail "a planted $fault was not reported: this run would prove nothing"
grep -qF "$report" <<<"$output" || fail "a planted $fault ended without '$report': $output"
echo "sanitizers: a planted $fault is reported"
if [[ $form == --self-check ]]; then exit 0; fi

if [ ${#std[@]} -gt 0 ] && [ ! -d "$(rustc --print sysroot)/lib/rustlib/src/rust/library" ]; then
    command -v rustup >/dev/null || fail "needs the sources of the standard library, and there is no rustup to get them"
    rustup component add rust-src || fail "rustup could not add rust-src, the sources of the standard library"
fi

if [[ $form == --short ]]; then
    cargo test --quiet --locked "${small[@]}" --no-fail-fast
    echo "sanitizers: the short form found nothing under $sanitizer"
    exit 0
fi

if [[ $sanitizer == address ]]; then
    # The driver stand-in is loaded as it is: a library, built without the flags that are for the program.
    export VRAM_PAGER_STANDIN_DIR="${VRAM_PAGER_STANDIN_DIR:-$PWD/target/standin}"
    [ -e "$VRAM_PAGER_STANDIN_DIR/libcuda.so.1" ] || env -u RUSTFLAGS -u RUSTC_BOOTSTRAP .ci/cuda build "$VRAM_PAGER_STANDIN_DIR"
else
    export VRAM_PAGER_STANDIN_DIR="$PWD/target/sanitizer-$sanitizer/standin"
    cargo rustc --quiet --locked "${build[@]}" --example cuda_standin -- -C link-arg=-Wl,-soname,libcuda.so.1
    mkdir -p "$VRAM_PAGER_STANDIN_DIR"
    library="target/sanitizer-$sanitizer/$target/debug/examples/libcuda_standin.so"
    grep -q __tsan_func_entry "$library" || fail "the driver stand-in is not instrumented"
    cp "$library" "$VRAM_PAGER_STANDIN_DIR/libcuda.so.1"
    ln -sf libcuda.so.1 "$VRAM_PAGER_STANDIN_DIR/libcuda.so"
fi
# What measures memory by the process, or starts children under limits, means nothing under a sanitizer:
# its shadow is terabytes of address space, and it keeps freed memory for a while. It turns a child's death
# by SIGSEGV into an exit.
skip=(--skip large_allocations_that_are_refused --skip the_limit_of_locked_memory
    --skip leave_everything_flat --skip the_host_faults_where_nothing_is_accessible)
cargo test --quiet --locked "${build[@]}" --no-fail-fast -- "${skip[@]}"
cargo build --quiet --locked "${build[@]}" --bin vram-pager
pager="target/sanitizer-$sanitizer/$target/debug/vram-pager"
for seed in 1 2; do
    "$pager" stress --seconds "${VRAM_PAGER_STRESS_SECONDS:-60}" --threads 4 --models 4 --seed "$seed" --json
done
echo "sanitizers: the long form found nothing under $sanitizer"
