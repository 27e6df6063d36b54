#!/usr/bin/env python3
"""Compiles the CUDA sources of the crate and of its example to PTX with NVRTC; needs no GPU and no toolkit.

    build.py LIBRARY [FOLDER]

LIBRARY is libnvrtc.so.12 of the PyPI package nvidia-cuda-nvrtc-cu12 (see check.sh, which fetches it). Each
PTX is written beside its sources, or into FOLDER. The package's version fixes the PTX version, and so the
oldest driver that loads the result: 12.0.140 writes PTX 8.0, which drivers from CUDA 12.0 on take.
"""

import ctypes
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The PTX files, and the sources of each in order.
MODULES = {
    "kernels/vram_pager.ptx": ["numeric.cu", "cast.cu", "patch.cu", "checksum.cu"],
    "examples/embed/embed.ptx": ["embed.cu"],
}
# Arithmetic as written: no products fused into sums, no subnormals flushed.
OPTIONS = [
    "--gpu-architecture=compute_75",
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
]


def compile_to_ptx(library: str, ptx: pathlib.Path, sources: list) -> bytes:
    nvrtc = ctypes.CDLL(library)

    def call(name, *arguments):
        code = getattr(nvrtc, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} answered {code}")

    source = "".join(f'#line 1 "{name}"\n{(ptx.parent / name).read_text()}\n' for name in sources)
    program = ctypes.c_void_p()
    name = ptx.with_suffix(".cu").name.encode()
    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name, 0, None, None)
    options = (ctypes.c_char_p * len(OPTIONS))(*[option.encode() for option in OPTIONS])
    code = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    size = ctypes.c_size_t()
    call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    call("nvrtcGetProgramLog", program, log)
    if log.value.strip():
        print(log.value.decode(), file=sys.stderr)
    if code != 0:
        raise SystemExit(f"the sources do not compile ({code})")
    call("nvrtcGetPTXSize", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    call("nvrtcGetPTX", program, text)
    return text.value


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    for name, sources in MODULES.items():
        ptx = ROOT / name
        output = pathlib.Path(sys.argv[2]) / ptx.name if len(sys.argv) == 3 else ptx
        output.write_bytes(compile_to_ptx(sys.argv[1], ptx, sources))
        print(f"wrote {output}")


if __name__ == "__main__":
    main()
