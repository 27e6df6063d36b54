#!/usr/bin/env bash
# The long forms of the hard tests, one section a subject: what takes minutes, where `cargo test` has a short form.
#
#   tests/hard.sh [--short] [SECTION...]
#
#   stress      `vram-pager stress` over many seeds, on the emulated card and on cuda: over the driver stand-in
#   long        10,000 switches of models and 1,000,000 faults, with flat memory, handles, threads and table
#   models      loom with more preemptions, thousands of sequences against a plain table, hundreds of schedules
#   fuzz        millions of damaged files for headers, indexes and LoRA files, seeded and guided by coverage
#   sanitizers  the suite and stress under AddressSanitizer, and under ThreadSanitizer
#   all         every section; the default
#
# --short runs each section in the form that CI has: seconds, not minutes. The first section that fails ends it.
# To add a section, write a function `section_NAME` and put NAME into `sections` and into the list above.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sections=(stress long models fuzz sanitizers)

short=0
export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}"

fail() { echo "hard: $*" >&2; exit 1; }

# The driver stand-in, built once and shared with the tests.
standin() {
    export VRAM_PAGER_STANDIN_DIR="${VRAM_PAGER_STANDIN_DIR:-$PWD/target/standin}"
    [ -e "$VRAM_PAGER_STANDIN_DIR/libcuda.so.1" ] || .ci/cuda build "$VRAM_PAGER_STANDIN_DIR"
}

# One run of `vram-pager stress`; the figures go to standard output.
stress_report() { # standin or emulated, seed, arguments...
    local where="$1" seed="$2" said
    shift 2
    local -a settings=()
    if [ "$where" = standin ]; then
        # A card of 4 KiB pages, of which the run takes a part.
        settings=("LD_LIBRARY_PATH=$VRAM_PAGER_STANDIN_DIR" VRAM_PAGER_STANDIN_PAGE=4KiB VRAM_PAGER_STANDIN_BYTES=128MiB
            VRAM_PAGER_STANDIN_MISUSE=log)
    fi
    # What it says on the way is shown if it fails.
    said="$(mktemp "$folder/XXXXXX")"
    env RUST_LOG=error "${settings[@]}" target/debug/vram-pager stress --json --seed "$seed" "$@" 2>"$said" || {
        grep -v '^round ' "$said" >&2 || true
        fail "stress $* with the seed $seed failed ($where)"
    }
}

# Adds what a run checked to `checked`, and shows its figures.
stress_add() { # the figures
    [[ "$1" =~ \"checked\":([0-9]+) ]] || fail "stress gave no figures: $1"
    checked=$((checked + BASH_REMATCH[1]))
    echo "$1"
}

stress_run() { # as stress_report
    local report
    report="$(stress_report "$@")"
    stress_add "$report"
}

# Runs of a few seconds, the next seed each, on both cards at once, until so much was checked.
stress_until() { # checked operations, seconds of each run, first seed
    local wanted="$1" seconds="$2" seed="$3" at=$SECONDS other
    while [ "$checked" -le "$wanted" ]; do
        stress_report standin "$seed" --seconds "$seconds" --threads 4 --models 4 --device cuda:0 >"$folder/standin" &
        other=$!
        stress_run emulated "$seed" --seconds "$seconds" --threads 4 --models 4
        wait "$other"
        stress_add "$(<"$folder/standin")"
        seed=$((seed + 1000))
    done
    echo "stress: $checked checked operations in $((SECONDS - at)) s, nothing wrong, nothing left"
}

# Threads whose operations start one at a time, on both cards at once: less meets, and what is found comes again.
stress_in_turns() { # first seed, operations of each thread, how many seeds
    local seed other at=$SECONDS
    for ((seed = $1; seed < $1 + $3; seed++)); do
        stress_report standin "$seed" --in-turns --operations "$2" --threads 4 --models 4 --device cuda:0 >"$folder/standin" &
        other=$!
        stress_run emulated "$seed" --in-turns --operations "$2" --threads 4 --models 4
        wait "$other"
        stress_add "$(<"$folder/standin")"
    done
    echo "stress in turns: done in $((SECONDS - at)) s"
}

section_stress() {
    cargo build --quiet --bin vram-pager
    standin
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
    checked=0
    if [ "$short" = 1 ]; then
        stress_until 1000000 10 1
        stress_in_turns 1 800 3
        return
    fi
    stress_until 5000000 60 1
    stress_in_turns 1 3000 20
    local seed none=emulated:1MiB,page=4KiB,vmm=none
    for seed in $(seq 1 20); do
        # Each shape of a run that has found something, and those at the edges.
        stress_run emulated "$seed" --operations 5000 --threads 1
        stress_run emulated "$seed" --operations 2000 --threads 8 --oversubscription 8
        stress_run emulated "$seed" --operations 2000 --threads 2 --models 1 --oversubscription 1
        stress_run emulated "$seed" --operations 2000 --threads 4 --device "$none"
        stress_run emulated "$seed" --operations 1000 --threads 4 --device emulated:4MiB,page=64KiB
        stress_run standin "$seed" --operations 2000 --threads 8 --oversubscription 8 --device cuda:0
        # Without virtual memory calls the unit of accounts is 2 MiB there.
        VRAM_PAGER_STANDIN_VMM=0 stress_run standin "$seed" --operations 300 --threads 4 --device cuda:0,cap=64MiB
        VRAM_PAGER_STANDIN_POOLS=0 stress_run standin "$seed" --operations 2000 --threads 4 --device cuda:0
    done
    echo "stress: $checked checked operations in all"
}

section_long() {
    # The short form is a part of `cargo test`.
    [ "$short" = 1 ] || export VRAM_PAGER_LONG=1
    cargo test --quiet --test long_runs -- --nocapture
}

section_models() {
    if [ "$short" = 1 ]; then
        # The other two are a part of `cargo test`.
        tests/models.sh short
        return
    fi
    tests/models.sh long
    VRAM_PAGER_CASES=4000 cargo test --quiet --test reference_table
    VRAM_PAGER_SCHEDULES=500 cargo test --quiet --test schedules manager_and
}

section_fuzz() {
    # The short form is a part of `cargo test`.
    if [ "$short" = 1 ]; then
        cargo test --quiet --test fuzz_corpus
        return
    fi
    VRAM_PAGER_FUZZ_ITERATIONS=2000000 cargo test --quiet --test fuzz_corpus
    # Guided by coverage and under AddressSanitizer, on this stable toolchain; needs a C++ compiler.
    local target=x86_64-unknown-linux-gnu parser found=target/fuzz-found
    local guide="-Cllvm-args=-sanitizer-coverage"
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="--cfg fuzzing -Zsanitizer=address -Ccodegen-units=1 -Cpasses=sancov-module \
        $guide-level=4 $guide-inline-8bit-counters $guide-pc-table $guide-trace-compares" \
        cargo build --quiet --release --locked --manifest-path fuzz/Cargo.toml --target "$target" --target-dir target/fuzz
    for parser in header index lora; do
        mkdir -p "$found/$parser"
        "target/fuzz/$target/release/$parser" "$found/$parser" "fuzz/corpus/$parser" -artifact_prefix="$found/" \
            -max_total_time="${VRAM_PAGER_FUZZ_SECONDS:-60}" -max_len=4096 -rss_limit_mb=4096 2>&1 | tail -n 3
    done
}

section_sanitizers() {
    if [ "$short" = 1 ]; then
        tests/sanitizers.sh address --short
        return
    fi
    tests/sanitizers.sh address --long
    tests/sanitizers.sh thread --long
}

wanted=()
for argument in "$@"; do
    case "$argument" in
    --short) short=1 ;;
    all) wanted=("${sections[@]}") ;;
    *)
        declare -F "section_$argument" >/dev/null || fail "usage: tests/hard.sh [--short] [${sections[*]} all]..."
        wanted+=("$argument")
        ;;
    esac
done
[ "${#wanted[@]}" -gt 0 ] || wanted=("${sections[@]}")

began=$SECONDS
for section in "${wanted[@]}"; do
    at=$SECONDS
    echo "=== $section"
    "section_$section"
    echo "=== $section: done in $((SECONDS - at)) s"
done
echo "=== all done in $((SECONDS - began)) s"
