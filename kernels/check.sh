#!/usr/bin/env bash
# Proves that the committed PTX is what the sources give, and that it assembles for every card in use.
#
#   kernels/check.sh            compare and assemble
#   kernels/check.sh --rebuild  write the PTX anew first
#
# Fetches two PyPI packages into a cache (65 MB, no GPU and no toolkit needed): NVRTC 12.0.140, whose PTX
# version drivers from CUDA 12.0 on take, and ptxas of 12.9, which knows all the architectures below.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
cache=${VRAM_PAGER_KERNEL_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/vram-pager/kernel-tools}
architectures="75 80 86 89 90 100 120"

fetch() { # package==version, a file that it holds
    if [ ! -e "$cache/$2" ]; then
        local wheels
        wheels=$(mktemp -d)
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
            --platform manylinux1_x86_64 --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 \
            --python-version 3 --implementation py --abi none --dest "$wheels" "$1"
        mkdir -p "$cache"
        python3 -m zipfile -e "$wheels"/*.whl "$cache"
        rm -r "$wheels"
    fi
    echo "$cache/$2"
}

nvrtc=$(fetch nvidia-cuda-nvrtc-cu12==12.0.140 nvidia/cuda_nvrtc/lib/libnvrtc.so.12)
ptxas=$(fetch nvidia-cuda-nvcc-cu12==12.9.86 nvidia/cuda_nvcc/bin/ptxas)
chmod +x "$ptxas"
export LD_LIBRARY_PATH="$(dirname "$nvrtc")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

if [ "${1:-}" = "--rebuild" ]; then
    python3 "$here/build.py" "$nvrtc"
fi

work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
python3 "$here/build.py" "$nvrtc" "$work" >/dev/null
for ptx in kernels/vram_pager.ptx examples/embed/embed.ptx; do
    if ! cmp "$root/$ptx" "$work/$(basename "$ptx")"; then
        echo "$ptx is not what the sources give: run kernels/check.sh --rebuild" >&2
        exit 1
    fi
    echo "$ptx is up to date ($(grep -m1 '^\.version' "$root/$ptx"))"
done
# The example's exponential and error function are the compiler's own, which fuse; the crate's kernels must not.
if grep -nE '\b(fma|mad)\.[a-z.]*f(32|64)|\.ftz\b' "$here/vram_pager.ptx"; then
    echo "the kernels fuse or flush: their bits would differ from the host's" >&2
    exit 1
fi

for architecture in $architectures; do
    for ptx in kernels/vram_pager.ptx examples/embed/embed.ptx; do
        "$ptxas" --gpu-name "sm_$architecture" --output-file "$work/out.cubin" "$root/$ptx"
    done
    echo "assembled for sm_$architecture"
done
