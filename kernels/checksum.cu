// The checksum of a run of bytes, added to *sum: checksum(bytes, n_bytes, first_word, sum).
//
// The bytes are little-endian 64-bit words, the last one padded with zeros; each is mixed with its place,
// counted from `first_word`, and the results are added. `bytes` needs no alignment, `sum` needs eight.

__device__ static inline u64 mix(u64 place, u64 word) {
    u64 x = word ^ (place + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

extern "C" __global__ void checksum(const u8 *bytes, u64 n_bytes, u64 first_word, u64 *sum) {
    u64 words = n_bytes / 8 + (n_bytes % 8 != 0);
    u64 stride = (u64)gridDim.x * blockDim.x;
    u64 mine = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += stride) {
        const u8 *at = bytes + i * 8;
        u64 length = n_bytes - i * 8;
        u64 word = 0;
        if (length >= 8 && ((u64)at & 7) == 0) {
            word = *(const u64 *)at;
        } else {
            if (length > 8) length = 8;
            for (u64 b = 0; b < length; b++) word |= (u64)at[b] << 8 * b;
        }
        mine += mix(first_word + i, word);
    }
    if (mine != 0) atomicAdd(sum, mine);
}
