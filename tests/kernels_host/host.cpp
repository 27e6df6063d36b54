// The kernels as a host library, and one launcher a signature.

#include "cuda_words.h"

#include "../../kernels/numeric.cu"
#include "../../kernels/cast.cu"
#include "../../kernels/patch.cu"
#include "../../kernels/checksum.cu"

typedef void (*CastKernel)(const u8 *, u64, u8 *);
typedef void (*PatchKernel)(u8 *, u64, u64, u64, const u8 *, const u8 *, u32, float);

extern "C" void host_cast(
    CastKernel kernel, u32 grid, u32 block, const u8 *from, u64 elements, u8 *to) {
    for_each_thread(grid, block, [&] { kernel(from, elements, to); });
}

extern "C" void host_patch(
    PatchKernel kernel, u32 grid, u32 block, u8 *weight, u64 first, u64 elements, u64 columns,
    const u8 *up, const u8 *down, u32 rank, float scale) {
    for_each_thread(grid, block, [&] {
        kernel(weight, first, elements, columns, up, down, rank, scale);
    });
}

extern "C" void host_checksum(u32 grid, u32 block, const u8 *bytes, u64 n_bytes, u64 first_word, u64 *sum) {
    for_each_thread(grid, block, [&] { checksum(bytes, n_bytes, first_word, sum); });
}
