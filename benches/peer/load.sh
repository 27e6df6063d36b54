#!/usr/bin/env bash
# Loads the peer, comfy-aimdo 0.6.0, over the driver stand-in, and says what it exports. On demand only.
#
#   benches/peer/load.sh
#
# Downloads one wheel from PyPI (GPL; nothing of it is kept in this project). See README.md beside this file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --dest "$work" comfy-aimdo==0.6.0
python3 -m zipfile -e "$work"/comfy_aimdo-0.6.0-*.whl "$work/peer"
.ci/cuda build target/standin

LD_LIBRARY_PATH=target/standin python3 - "$work/peer/comfy_aimdo/aimdo.so" <<'PY'
import ctypes
import sys

driver = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
assert driver.cuInit(0) == 0, "the stand-in does not start"
name = ctypes.create_string_buffer(64)
assert driver.cuDeviceGetName(name, 64, 0) == 0
assert name.value.startswith(b"CUDA stand-in"), f"another driver was loaded: {name.value}"
peer = ctypes.CDLL(sys.argv[1])
wanted = ["vbar_allocate", "vbar_fault", "vbar_unpin", "vbar_free", "vbar_prioritize"]
missing = [symbol for symbol in wanted if not hasattr(peer, symbol)]
assert not missing, f"the peer exports no {missing}"
print(f"comfy-aimdo 0.6.0 is loaded beside {name.value.decode()}; it exports {', '.join(wanted)}")
PY
