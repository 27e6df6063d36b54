// Low-rank patches of a flat range of elements of a row-major matrix:
// patch_WEIGHT_FACTOR(weight, first, elements, columns, up, down, rank, scale).
//
// `weight` is the address of element `first` of a matrix of `columns` columns; `elements` of them from
// there on become W + scale * sum over k of up[row, k] * down[k, column]. `up` (rows x rank) and `down`
// (rank x columns) are whole, row-major and of one type. The sum runs in f32 from k = 0 upwards, each
// product and each sum rounded to nearest, never fused, and the result is rounded to nearest even into the
// weight's type: so a part gives the bits that the whole gives, on a card and on the host. A NaN that comes
// out is the quiet one without sign or payload.

template <class Weight, class Factor>
__device__ static inline void patch_all(
    u8 *weight, u64 first, u64 elements, u64 columns, const u8 *up, const u8 *down, u32 rank, float scale) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += stride) {
        u64 row = (first + i) / columns;
        u64 column = (first + i) - row * columns;
        float sum = 0.0f;
        for (u32 k = 0; k < rank; k++) {
            float left = __uint_as_float(Factor::load(up + (row * rank + k) * Factor::BYTES));
            float right = __uint_as_float(Factor::load(down + (k * columns + column) * Factor::BYTES));
            sum = __fadd_rn(sum, __fmul_rn(left, right));
        }
        u8 *at = weight + i * Weight::BYTES;
        float patched = __fadd_rn(__uint_as_float(Weight::load(at)), __fmul_rn(scale, sum));
        u32 bits = __float_as_uint(patched);
        if ((bits & 0x7FFFFFFF) > 0x7F800000) bits = 0x7FC00000;
        Weight::store(at, bits);
    }
}

#define PATCH(name, Weight, Factor)                                                        \
    extern "C" __global__ void name(                                                       \
        u8 *weight, u64 first, u64 elements, u64 columns, const u8 *up, const u8 *down,    \
        u32 rank, float scale) {                                                           \
        patch_all<Weight, Factor>(weight, first, elements, columns, up, down, rank, scale); \
    }

PATCH(patch_f32_f32, F32, F32)
PATCH(patch_f32_f16, F32, F16)
PATCH(patch_f32_bf16, F32, Bf16)
PATCH(patch_f16_f32, F16, F32)
PATCH(patch_f16_f16, F16, F16)
PATCH(patch_f16_bf16, F16, Bf16)
PATCH(patch_bf16_f32, Bf16, F32)
PATCH(patch_bf16_f16, Bf16, F16)
PATCH(patch_bf16_bf16, Bf16, Bf16)
