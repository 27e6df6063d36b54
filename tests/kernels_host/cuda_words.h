// The CUDA words that the kernels use, for a host compiler: so that their arithmetic is tested without a
// card. A launch runs every thread of the grid, one after the other.
#pragma once

#include <cstdint>
#include <cstring>

#define __device__
#define __global__

struct Dim {
    unsigned int x, y, z;
};

static thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

static inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz((unsigned int)value); }

static inline float __uint_as_float(unsigned int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }

static inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
    unsigned long long old = *at;
    *at = old + value;
    return old;
}

template <class Body>
static void for_each_thread(unsigned int grid, unsigned int block, Body body) {
    gridDim = Dim{grid, 1, 1};
    blockDim = Dim{block, 1, 1};
    for (unsigned int b = 0; b < grid; b++) {
        for (unsigned int t = 0; t < block; t++) {
            blockIdx = Dim{b, 0, 0};
            threadIdx = Dim{t, 0, 0};
            body();
        }
    }
}

// As above over a grid and blocks of three dimensions.
template <class Body>
static void for_each_thread(Dim grid, Dim block, Body body) {
    gridDim = grid;
    blockDim = block;
    for (unsigned int bz = 0; bz < grid.z; bz++)
    for (unsigned int by = 0; by < grid.y; by++)
    for (unsigned int bx = 0; bx < grid.x; bx++)
    for (unsigned int tz = 0; tz < block.z; tz++)
    for (unsigned int ty = 0; ty < block.y; ty++)
    for (unsigned int tx = 0; tx < block.x; tx++) {
        blockIdx = Dim{bx, by, bz};
        threadIdx = Dim{tx, ty, tz};
        body();
    }
}
