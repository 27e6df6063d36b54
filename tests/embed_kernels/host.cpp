// The embedding example's kernels as a host library, launched as the driver launches: by pointers to the
// parameters.

#include <math.h>
#include <utility>

#include "../kernels_host/cuda_words.h"

#include "../../examples/embed/embed.cu"

template <class... Parameters, std::size_t... Places>
static void run(
    void (*kernel)(Parameters...), Dim grid, Dim block, void **parameters, std::index_sequence<Places...>) {
    for_each_thread(grid, block, [&] { kernel(*static_cast<Parameters *>(parameters[Places])...); });
}

template <class... Parameters>
static void run(void (*kernel)(Parameters...), Dim grid, Dim block, void **parameters) {
    run(kernel, grid, block, parameters, std::index_sequence_for<Parameters...>{});
}

// Answers 0, or 1 if there is no such kernel.
extern "C" int host_embed(const char *name, const u32 *grid, const u32 *block, void **parameters) {
    Dim g = {grid[0], grid[1], grid[2]}, b = {block[0], block[1], block[2]};
#define KERNEL(kernel)                                                                                       \
    if (std::strcmp(name, #kernel) == 0) {                                                                   \
        run(kernel, g, b, parameters);                                                                       \
        return 0;                                                                                            \
    }
    KERNEL(embed_sum)
    KERNEL(embed_add)
    KERNEL(embed_bias)
    KERNEL(embed_matmul)
    KERNEL(embed_layer_norm)
    KERNEL(embed_scores)
    KERNEL(embed_softmax)
    KERNEL(embed_mix)
    KERNEL(embed_gelu)
    KERNEL(embed_pool)
    return 1;
}
