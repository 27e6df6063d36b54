// Casts of a flat range of elements: cast_FROM_TO(from, elements, to).
//
// `from` and `to` do not overlap and need no alignment. Any grid of any number of threads does. A cast to
// the same type copies the bits.

template <class From, class To>
__device__ static inline void cast_all(const u8 *from, u64 elements, u8 *to) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += stride) {
        To::store(to + i * To::BYTES, From::load(from + i * From::BYTES));
    }
}

__device__ static inline void copy_all(const u8 *from, u64 bytes, u8 *to) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += stride) to[i] = from[i];
}

#define CAST(name, From, To)                                                           \
    extern "C" __global__ void name(const u8 *from, u64 elements, u8 *to) {            \
        cast_all<From, To>(from, elements, to);                                        \
    }

#define COPY(name, Type)                                                               \
    extern "C" __global__ void name(const u8 *from, u64 elements, u8 *to) {            \
        copy_all(from, elements * Type::BYTES, to);                                    \
    }

COPY(cast_f32_f32, F32)
CAST(cast_f32_f16, F32, F16)
CAST(cast_f32_bf16, F32, Bf16)
CAST(cast_f16_f32, F16, F32)
COPY(cast_f16_f16, F16)
CAST(cast_f16_bf16, F16, Bf16)
CAST(cast_bf16_f32, Bf16, F32)
CAST(cast_bf16_f16, Bf16, F16)
COPY(cast_bf16_bf16, Bf16)
CAST(cast_f8_e4m3_f32, F8E4m3, F32)
CAST(cast_f8_e4m3_f16, F8E4m3, F16)
CAST(cast_f8_e4m3_bf16, F8E4m3, Bf16)
CAST(cast_f8_e5m2_f32, F8E5m2, F32)
CAST(cast_f8_e5m2_f16, F8E5m2, F16)
CAST(cast_f8_e5m2_bf16, F8E5m2, Bf16)
