// Number formats as bits, in integer arithmetic, so that every card and the host give the same answer.
//
// Each format says how many bytes an element has, how to load one as the bits of an f32 (exact for all of
// them), and how to store the bits of an f32, rounded to nearest, ties to even. Addresses need no
// alignment. A NaN stays a NaN: sign and payload as far as they fit, made quiet; e4m3 has one NaN a sign
// and no infinity.
//
// The sources of this folder are compiled as one: this file first. None includes a header.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ static inline u16 load_u16(const u8 *at) {
    if (((u64)at & 1) == 0) return *(const u16 *)at;
    return (u16)(at[0] | (u32)at[1] << 8);
}

__device__ static inline void store_u16(u8 *at, u16 value) {
    if (((u64)at & 1) == 0) {
        *(u16 *)at = value;
        return;
    }
    at[0] = (u8)value;
    at[1] = (u8)(value >> 8);
}

__device__ static inline u32 load_u32(const u8 *at) {
    if (((u64)at & 3) == 0) return *(const u32 *)at;
    return at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
}

__device__ static inline void store_u32(u8 *at, u32 value) {
    if (((u64)at & 3) == 0) {
        *(u32 *)at = value;
        return;
    }
    at[0] = (u8)value;
    at[1] = (u8)(value >> 8);
    at[2] = (u8)(value >> 16);
    at[3] = (u8)(value >> 24);
}

// The bits of the f32 that an f16 stands for.
__device__ static inline u32 widen_f16(u32 half) {
    u32 sign = (half & 0x8000) << 16;
    u32 exponent = half >> 10 & 0x1F;
    u32 mantissa = half & 0x3FF;
    if (exponent == 0x1F) return sign | (mantissa ? 0x7FC00000 | mantissa << 13 : 0x7F800000);
    if (exponent != 0) return sign | (exponent + 112) << 23 | mantissa << 13;
    if (mantissa == 0) return sign;
    // A subnormal: move its leading one to the place of the hidden bit.
    u32 shift = (u32)__clz((int)mantissa) - 21;
    return sign | (113 - shift) << 23 | (mantissa << shift & 0x3FF) << 13;
}

// The f16 nearest to the f32 of these bits.
__device__ static inline u16 narrow_f16(u32 bits) {
    u32 sign = bits >> 16 & 0x8000;
    u32 magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return (u16)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
    // 65520 is half way between the largest f16 and the next that there would be, and ties go up there.
    if (magnitude >= 0x477FF000) return (u16)(sign | 0x7C00);
    if (magnitude >= 0x38800000) {
        u32 rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
        return (u16)(sign | (rounded - 0x38000000) >> 13);
    }
    // 2^-25 is half way between zero and the smallest subnormal, and ties go to zero there.
    if (magnitude <= 0x33000000) return (u16)sign;
    u32 shift = 126 - (magnitude >> 23);
    u32 mantissa = (magnitude & 0x7FFFFF) | 0x800000;
    u32 kept = mantissa >> shift;
    u32 rest = mantissa & ((1u << shift) - 1);
    u32 half = 1u << (shift - 1);
    if (rest > half || (rest == half && (kept & 1))) kept += 1;
    return (u16)(sign | kept);
}

// The bf16 nearest to the f32 of these bits.
__device__ static inline u16 narrow_bf16(u32 bits) {
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

struct F32 {
    static const u32 BYTES = 4;
    __device__ static inline u32 load(const u8 *at) { return load_u32(at); }
    __device__ static inline void store(u8 *at, u32 bits) { store_u32(at, bits); }
};

struct F16 {
    static const u32 BYTES = 2;
    __device__ static inline u32 load(const u8 *at) { return widen_f16(load_u16(at)); }
    __device__ static inline void store(u8 *at, u32 bits) { store_u16(at, narrow_f16(bits)); }
};

struct Bf16 {
    static const u32 BYTES = 2;
    __device__ static inline u32 load(const u8 *at) {
        u32 bits = (u32)load_u16(at) << 16;
        return (bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : bits;
    }
    __device__ static inline void store(u8 *at, u32 bits) { store_u16(at, narrow_bf16(bits)); }
};

struct F8E4m3 {
    static const u32 BYTES = 1;
    __device__ static inline u32 load(const u8 *at) {
        u32 code = *at;
        u32 sign = (code & 0x80) << 24;
        u32 exponent = code >> 3 & 0xF;
        u32 mantissa = code & 7;
        if ((code & 0x7F) == 0x7F) return sign | 0x7FC00000;
        if (exponent != 0) return sign | (exponent + 120) << 23 | mantissa << 20;
        if (mantissa == 0) return sign;
        u32 shift = (u32)__clz((int)mantissa) - 28;
        return sign | (121 - shift) << 23 | (mantissa << shift & 7) << 20;
    }
};

struct F8E5m2 {
    static const u32 BYTES = 1;
    // The upper byte of an f16.
    __device__ static inline u32 load(const u8 *at) { return widen_f16((u32)*at << 8); }
};
