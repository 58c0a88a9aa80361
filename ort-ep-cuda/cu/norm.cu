// Normalizations of rows by their own mean and variance, and of channels by given ones.
#include "rows.cuh"

// Rows of `length` elements, those of `x` with `skip` and `bias` where they are given. `skip` begins again after `skips` elements. `scale` and
// `shift` have an element for each `spatial` elements of a row, `each` for a row; rows of other groups have others.
template <typename T> struct Norm {
    const T *x, *skip, *bias, *scale, *shift;
    T* y;
    float *mean, *factor;
    T* sum;
    uint count, length, skips;
    bool centers;
    uint groups, each, spatial;
    float epsilon;

    // Whether everything can be read in whole vectors.
    template <int STEP> __device__ bool in_vectors() const {
        uint64 addresses = (uint64)x | (uint64)y | (uint64)sum | (uint64)skip | (uint64)bias;
        uint sizes = length | skips;
        if (spatial == 1) {
            addresses |= (uint64)scale | (uint64)shift;
        } else {
            sizes |= spatial;
        }
        return sizes % STEP == 0 && addresses % 16 == 0;
    }
};

// The thread's vectors of `skip`, for a row that begins at `begin`.
template <int VECTORS, int STEP, typename T>
__device__ inline void read_skip(const Norm<T>& norm, uint begin, uint from, Vector<STEP, T> (&to)[VECTORS]) {
#pragma unroll
    for (int vector = 0; vector < VECTORS; vector++) {
        uint at = begin + place_to_read<STEP>(from, vector, norm.length);
        if (at >= norm.skips) at %= norm.skips;
        to[vector] = *(const Vector<STEP, T>*)(norm.skip + at);
    }
}

// The thread's vectors of `scale` or `shift`: of elements side by side, or of one for all elements of a vector.
template <int VECTORS, int STEP, typename T>
__device__ inline void read_channels(const T* channels, uint spatial, uint from, uint length, Vector<STEP, T> (&to)[VECTORS]) {
    if (spatial == 1) return read_row<VECTORS, STEP>(channels, from, length, to);
#pragma unroll
    for (int vector = 0; vector < VECTORS; vector++) {
        T channel = channels[place_to_read<STEP>(from, vector, length) / spatial];
        Pack<T, STEP> same;
#pragma unroll
        for (int i = 0; i < STEP; i++) same.of[i] = channel;
        to[vector] = *(const Vector<STEP, T>*)&same;
    }
}

// A thread's share of a row: what it normalizes, and the parameters of it. The wide form, with more vectors for a thread, is for many rows that
// are no sums: all its registers are for values, and where other rows hide how long a read takes, parameters can be read last.
template <bool WIDE, int VECTORS, int STEP, typename T> struct Share {
    const Norm<T>& norm;
    uint begin, channels, length;
    float values[VECTORS][STEP];
    Vector<STEP, T> scale[VECTORS], shift[VECTORS];

    // Beyond the last row it is read once more, and nothing written.
    __device__ Share(const Norm<T>& norm, uint row) : norm(norm) {
        length = row < norm.count ? norm.length : 0;
        row = min(row, norm.count - 1);
        begin = row * norm.length;
        channels = norm.groups > 1 ? row % norm.groups * norm.each : 0;
    }

    __device__ void read(uint from, bool parameters) {
        Vector<STEP, T> x[VECTORS], skip[VECTORS], bias[VECTORS];
        read_row<VECTORS, STEP>(norm.x + begin, from, norm.length, x);
        if (!WIDE && norm.skip) read_skip<VECTORS, STEP>(norm, begin, from, skip);
        if (!WIDE && norm.bias) read_row<VECTORS, STEP>(norm.bias, from, norm.length, bias);
        if (parameters) read_parameters(from);
        take(x, false);
        if (!WIDE && norm.skip) take(skip, true);
        if (!WIDE && norm.bias) take(bias, true);
    }

    __device__ void read_parameters(uint from) {
        read_channels<VECTORS, STEP>(norm.scale + channels, norm.spatial, from, norm.length, scale);
        if (norm.shift) read_channels<VECTORS, STEP>(norm.shift + channels, norm.spatial, from, norm.length, shift);
    }

    __device__ void take(const Vector<STEP, T> (&vectors)[VECTORS], bool adds) {
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                float value = vectors[vector][i];
                values[vector][i] = adds ? values[vector][i] + value : value;
            }
        }
    }

    // The sum of the values, or of the squares of what they are apart from `center`.
    __device__ float sum(uint from, bool of_squares, float center) const {
        float sum = 0.0f;
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
            if (place_in_row<STEP>(from, vector) >= length) continue;
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                float apart = values[vector][i] - center;
                sum += of_squares ? apart * apart : apart;
            }
        }
        return sum;
    }

    __device__ void write(uint from, float center, float factor) const {
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
            uint place = place_in_row<STEP>(from, vector);
            if (place >= length) continue;
            Pack<T, STEP> y, sum;
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                float value = values[vector][i], result = (value - center) * factor * scale[vector][i];
                y.of[i] = from_float<T>(norm.shift ? result + shift[vector][i] : result);
                sum.of[i] = from_float<T>(value);
            }
            if (norm.y) *(Pack<T, STEP>*)(norm.y + begin + place) = y;
            if (!WIDE && norm.sum) *(Pack<T, STEP>*)(norm.sum + begin + place) = sum;
        }
    }
};

// Three passes: the mean, the squares of what is apart from it, the results. A row of more than the team holds is read again for each.
template <bool WIDE, int VECTORS, int STEP, typename T> __device__ void norm_row(const Norm<T>& norm) {
    enum Pass { MEAN, SQUARES, RESULTS };
    __shared__ Cells<float> cells[2];
    uint row = row_of_team(), reach = reach_of_team<VECTORS, STEP>();
    bool is_whole = norm.length <= reach, is_read = false, early = !WIDE && is_whole;
    Share<WIDE, VECTORS, STEP, T> share(norm, row);
    float center = 0.0f, factor = 0.0f;
#pragma unroll 1
    for (int pass = norm.centers ? MEAN : SQUARES; pass <= RESULTS; pass++) {
        float sum = 0.0f;
#pragma unroll 1
        for (uint from = 0; from < norm.length; from += reach) {
            if (!is_read) share.read(from, early);
            if (pass == RESULTS && !early) share.read_parameters(from);
            is_read = is_whole;
            if (pass == RESULTS) {
                share.write(from, center, factor);
            } else {
                sum += share.sum(from, pass == SQUARES, center);
            }
        }
        if (pass == RESULTS) break;
        sum = joined_row(sum, 0.0f, cells[pass], [](float a, float b) { return a + b; }) / float(norm.length);
        if (pass == MEAN) center = sum;
        if (pass == SQUARES) factor = 1.0f / sqrtf(sum + norm.epsilon);
    }
    if (threadIdx.x > 0 || row >= norm.count) return;
    if (norm.mean) norm.mean[row] = center;
    if (norm.factor) norm.factor[row] = factor;
}

// Element by element a thread holds few, as each takes a register of its own for each tensor.
#define ENTRY(WIDE, NAME, T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(MOST_OF_BLOCK)                                               \
        NAME(const T* x, const T* skip, const T* bias, const T* scale, const T* shift, T* y, float* mean,     \
             float* factor, T* sum, uint4 sizes, uint groups, uint each, uint spatial, float epsilon) {       \
        Norm<T> norm = {x,       skip,    bias,    scale,        shift,  y,    mean,    factor, sum,          \
                        sizes.x, sizes.y, sizes.z, sizes.w != 0, groups, each, spatial, epsilon};             \
        if (norm.in_vectors<VECTOR<T>>()) return norm_row<WIDE, WIDE ? 2 : 1, VECTOR<T>>(norm);               \
        norm_row<WIDE, WIDE ? 8 : 4, 1>(norm);                                                                \
    }
#define BATCH(NAME, T)                                                                                            \
    extern "C" __global__ void batch_norm_##NAME(const T* x, const T* scale, const T* shift, const T* mean,        \
                                                 const T* variance, T* y, uint count, uint channels, uint spatial, \
                                                 float epsilon) {                                                  \
        uint i = thread_index();                                                                                   \
        if (i >= count) return;                                                                                    \
        uint c = i / spatial % channels;                                                                           \
        float factor = as_float(scale[c]) / sqrtf(as_float(variance[c]) + epsilon);                                \
        y[i] = from_float<T>((as_float(x[i]) - as_float(mean[c])) * factor + as_float(shift[c]));                  \
    }
#define ENTRIES(NAME, T) ENTRY(false, norm_##NAME, T) ENTRY(true, wide_norm_##NAME, T) BATCH(NAME, T)

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
