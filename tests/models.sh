#!/usr/bin/env bash
# The models of the concurrency, under loom: every order of their threads' steps, with at most so many
# preemptions.
#
#   tests/models.sh          the short form, for CI: at most 2 preemptions
#   tests/models.sh long     at most 3
#
# Each model stands beside wrong protocols that loom must find (`loom_finds_...`). They build into a folder
# of their own, target/loom, since every crate is built with `--cfg loom`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-short}" in
    short) preemptions=2 ;;
    long) preemptions=3 ;;
    *) echo "usage: tests/models.sh [short|long]" >&2; exit 2 ;;
esac
export LOOM_MAX_PREEMPTIONS="${LOOM_MAX_PREEMPTIONS:-$preemptions}"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
export RUSTFLAGS="${RUSTFLAGS:-} --cfg loom"
# The dependencies are built for this alone and hardly run, but for loom itself and its stacks: unoptimised,
# they take less than half the time to build.
exec cargo test --quiet --lib --no-default-features \
    --config 'profile.dev.debug=0' \
    --config 'profile.dev.package."*".opt-level=0' \
    --config 'profile.dev.package.loom.opt-level=1' \
    --config 'profile.dev.package.generator.opt-level=1' \
    loom_
