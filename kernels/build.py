#!/usr/bin/env python3
"""Compiles the sources of this folder to PTX with NVRTC; needs no GPU and no toolkit.

    build.py LIBRARY [OUTPUT]

LIBRARY is libnvrtc.so.12 of the PyPI package nvidia-cuda-nvrtc-cu12 (see check.sh, which fetches it);
OUTPUT defaults to vram_pager.ptx beside this file. The package's version fixes the PTX version, and so the
oldest driver that loads the result: 12.0.140 writes PTX 8.0, which drivers from CUDA 12.0 on take.
"""

import ctypes
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
SOURCES = ["numeric.cu", "cast.cu", "patch.cu", "checksum.cu"]
# Arithmetic as written: no products fused into sums, no subnormals flushed.
OPTIONS = [
    "--gpu-architecture=compute_75",
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
]


def compile_to_ptx(library: str) -> bytes:
    nvrtc = ctypes.CDLL(library)

    def call(name, *arguments):
        code = getattr(nvrtc, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} answered {code}")

    source = "".join(f'#line 1 "{name}"\n{(FOLDER / name).read_text()}\n' for name in SOURCES)
    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"vram_pager.cu", 0, None, None)
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
    output = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else FOLDER / "vram_pager.ptx"
    output.write_bytes(compile_to_ptx(sys.argv[1]))
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
