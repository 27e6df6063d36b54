// The embedding example's kernels: plain, right, and in the order of the host twins (runner/kernels.rs,
// whose table lists arguments and meaning). Free of headers, all numbers f32, matrices row-major.
//
// A kernel that works on rows takes one thread a row and adds in the row's order, so that only the two
// library functions (expf, erf) and the matrix product's order of sums can differ from the twins. Nothing
// here needs a barrier, so that a host compiler can run the threads one after the other.

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u64 index_x() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ u64 index_y() { return (u64)blockIdx.y * blockDim.y + threadIdx.y; }
static __device__ u64 index_z() { return (u64)blockIdx.z * blockDim.z + threadIdx.z; }

extern "C" __global__ void embed_sum(
    const float *a, const float *b, const float *c, float *out, u32 count) {
    u64 i = index_x();
    if (i < count) {
        out[i] = a[i] + b[i] + c[i];
    }
}

extern "C" __global__ void embed_add(const float *other, float *into, u32 count) {
    u64 i = index_x();
    if (i < count) {
        into[i] += other[i];
    }
}

// Grid: outputs in x, rows in y.
extern "C" __global__ void embed_bias(
    const float *bias, float *out, u32 rows, u32 outputs, u32 first, u32 stride) {
    u64 o = index_x(), r = index_y();
    if (o < outputs && r < rows) {
        out[r * stride + first + o] += bias[o];
    }
}

// Grid: outputs in x, rows in y.
extern "C" __global__ void embed_matmul(
    const float *x, const float *weight, float *out, u32 rows, u32 inputs, u32 outputs, u32 first,
    u32 stride) {
    u64 o = index_x(), r = index_y();
    if (o >= outputs || r >= rows) {
        return;
    }
    float sum = 0.0f;
    for (u32 i = 0; i < inputs; i++) {
        sum += x[r * inputs + i] * weight[o * inputs + i];
    }
    out[r * stride + first + o] += sum;
}

// One thread a row.
extern "C" __global__ void embed_layer_norm(
    const float *weight, const float *bias, float *x, u32 rows, u32 width, float epsilon) {
    u64 r = index_x();
    if (r >= rows) {
        return;
    }
    float *row = x + r * width;
    double mean = 0.0;
    for (u32 c = 0; c < width; c++) {
        mean += (double)row[c];
    }
    mean /= (double)width;
    double variance = 0.0;
    for (u32 c = 0; c < width; c++) {
        double off = (double)row[c] - mean;
        variance += off * off;
    }
    variance /= (double)width;
    double scale = 1.0 / sqrt(variance + (double)epsilon);
    for (u32 c = 0; c < width; c++) {
        row[c] = (float)(((double)row[c] - mean) * scale) * weight[c] + bias[c];
    }
}

// Grid: columns j in x, rows i in y, heads in z.
extern "C" __global__ void embed_scores(
    const float *q, const float *k, float *out, u32 tokens, u32 width, u32 first, u32 heads,
    u32 head_width, float scale) {
    u64 j = index_x(), i = index_y(), h = index_z();
    if (j >= tokens || i >= tokens || h >= heads) {
        return;
    }
    u64 at = (first + h) * head_width;
    float sum = 0.0f;
    for (u32 c = 0; c < head_width; c++) {
        sum += q[i * width + at + c] * k[j * width + at + c];
    }
    out[(h * tokens + i) * tokens + j] = scale * sum;
}

// One thread a row.
extern "C" __global__ void embed_softmax(float *x, u32 rows, u32 width) {
    u64 r = index_x();
    if (r >= rows) {
        return;
    }
    float *row = x + r * width;
    float top = __uint_as_float(0xff800000u);
    for (u32 c = 0; c < width; c++) {
        top = row[c] > top ? row[c] : top;
    }
    float total = 0.0f;
    for (u32 c = 0; c < width; c++) {
        row[c] = expf(row[c] - top);
        total += row[c];
    }
    for (u32 c = 0; c < width; c++) {
        row[c] /= total;
    }
}

// Grid: columns of a head in x, tokens in y, heads in z.
extern "C" __global__ void embed_mix(
    const float *shares, const float *v, float *out, u32 tokens, u32 width, u32 first, u32 heads,
    u32 head_width) {
    u64 c = index_x(), i = index_y(), h = index_z();
    if (c >= head_width || i >= tokens || h >= heads) {
        return;
    }
    u64 at = (first + h) * head_width + c;
    float sum = 0.0f;
    for (u32 j = 0; j < tokens; j++) {
        sum += shares[(h * tokens + i) * tokens + j] * v[j * (u64)width + at];
    }
    out[i * width + at] = sum;
}

extern "C" __global__ void embed_gelu(float *x, u32 count) {
    u64 i = index_x();
    if (i < count) {
        double wide = (double)x[i];
        x[i] = (float)(wide / 2.0 * (1.0 + erf(wide * 0.70710678118654752440)));
    }
}

static __device__ double mean_of_column(const float *x, u32 rows, u32 width, u32 column) {
    double mean = 0.0;
    for (u32 r = 0; r < rows; r++) {
        mean += (double)x[(u64)r * width + column] / (double)rows;
    }
    return mean;
}

// One thread a column. Each finds the length for itself: a sentence has a few hundred rows.
extern "C" __global__ void embed_pool(const float *x, float *out, u32 rows, u32 width) {
    u64 c = index_x();
    if (c >= width) {
        return;
    }
    double length = 0.0;
    for (u32 other = 0; other < width; other++) {
        double mean = mean_of_column(x, rows, width, other);
        length += mean * mean;
    }
    length = sqrt(length);
    // The floor keeps a zero vector from becoming NaN.
    length = length > 1e-12 ? length : 1e-12;
    out[c] = (float)(mean_of_column(x, rows, width, (u32)c) / length);
}
