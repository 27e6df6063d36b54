#!/usr/bin/env bash
# Measures the pager beside the peer, comfy-aimdo 0.6.0, both over the driver stand-in. On demand only.
#
#   benches/peer/run.sh [--json] [--check] [WORDS]
#
# Downloads one wheel from PyPI (GPL; nothing of it is kept in this project). See README.md beside this file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --dest "$work" comfy-aimdo==0.6.0
python3 -m zipfile -e "$work"/comfy_aimdo-0.6.0-*.whl "$work/peer"

# The stand-in as CI builds it, but optimised: the peer waits for it too.
cargo rustc --quiet --release --example cuda_standin -- -C link-arg=-Wl,-soname,libcuda.so.1
mkdir -p "$work/standin"
cp "${CARGO_TARGET_DIR:-target}/release/examples/libcuda_standin.so" "$work/standin/libcuda.so.1"
ln -s libcuda.so.1 "$work/standin/libcuda.so"
cargo bench --quiet --features peer --bench peer --no-run

LD_LIBRARY_PATH="$work/standin" VRAM_PAGER_PEER="$work/peer/comfy_aimdo/aimdo.so" \
    cargo bench --quiet --features peer --bench peer -- "$@"
