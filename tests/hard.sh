#!/usr/bin/env bash
# The long forms of the hard tests, one section a subject: what takes minutes, where `cargo test` has a short form.
#
#   tests/hard.sh [--short] [SECTION...]
#
#   stress      `vram-pager stress` over many seeds, on the emulated card and on cuda: over the driver stand-in
#   long        10,000 switches of models and 1,000,000 faults, with flat memory, handles, threads and table
#   all         every section; the default
#
# --short runs each section in the form that CI has: seconds, not minutes. The first section that fails ends it.
# To add a section, write a function `section_NAME` and put NAME into `sections` and into the list above.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sections=(stress long)

short=0
export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}"

fail() { echo "hard: $*" >&2; exit 1; }

# The driver stand-in, built once and shared with the tests.
standin() {
    export VRAM_PAGER_STANDIN_DIR="${VRAM_PAGER_STANDIN_DIR:-$PWD/target/standin}"
    [ -e "$VRAM_PAGER_STANDIN_DIR/libcuda.so.1" ] || .ci/cuda build "$VRAM_PAGER_STANDIN_DIR"
}

section_stress() {
    standin
    fail "the section stress is not written yet"
}

section_long() {
    fail "the section long is not written yet"
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
