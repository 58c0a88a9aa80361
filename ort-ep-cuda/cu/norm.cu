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

// A thread's share of a row: what it normalizes, and the parameters of it. The wide form, with more vectors for a thread, is for many rows that
// are no sums: all its registers are for values, and where other rows hide how long a read takes, parameters can be read last.
template <bool WIDE, int VECTORS, int STEP, typename T> struct Share {
    using Vectors = Vector<STEP, T>[VECTORS];
    const Norm<T>& norm;
    uint row, begin, channels, length;
    float values[VECTORS][STEP];
    Vectors scale, shift;

    // Beyond the last row it is read once more, and nothing written.
    __device__ Share(const Norm<T>& norm) : norm(norm) {
        row = min(row_of_team(), norm.count - 1);
        length = row_of_team() < norm.count ? norm.length : 0;
        begin = row * norm.length;
    }

    __device__ void read(uint from, bool parameters) {
        Vectors x, skip, bias;
        read_row<VECTORS, STEP>(norm.x + begin, from, norm.length, 0.0f, x);
        channels = norm.groups > 1 ? row % norm.groups * norm.each : 0;
        if (!WIDE && norm.skip) read_skip(from, skip);
        if (!WIDE && norm.bias) read_row<VECTORS, STEP>(norm.bias, from, norm.length, 0.0f, bias);
        if (parameters) read_parameters(from);
        take(x, false);
        if (!WIDE && norm.skip) take(skip, true);
        if (!WIDE && norm.bias) take(bias, true);
    }

    __device__ void read_skip(uint from, Vectors& to) {
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
            uint at = begin + min(place_in_row<STEP>(from, vector), norm.length - STEP);
            if (at >= norm.skips) at %= norm.skips;
            to[vector] = *(const Vector<STEP, T>*)(norm.skip + at);
        }
    }

    __device__ void read_parameters(uint from) {
        // Three vectors are of parameters side by side.
        bool side_by_side = VECTORS == 3 || norm.spatial == 1;
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) read_parameters(from, vector, side_by_side);
    }

    // Those of a vector: of elements side by side, or of one for all its elements.
    __device__ void read_parameters(uint from, int vector, bool side_by_side) {
        uint place = min(place_in_row<STEP>(from, vector), norm.length - STEP);
        auto read = [&](const T* of) {
            if (side_by_side) return *(const Vector<STEP, T>*)(of + channels + place);
            return same_vector<STEP, T>(as_float(of[channels + place / norm.spatial]));
        };
        scale[vector] = read(norm.scale);
        shift[vector] = same_vector<STEP, T>(-0.0f);
        if (norm.shift) shift[vector] = read(norm.shift);
    }

    __device__ void take(const Vectors& vectors, bool adds) {
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
        float sums[4] = {};
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
            if (place_in_row<STEP>(from, vector) >= norm.length) continue;
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                float apart = values[vector][i] - center;
                sums[(vector * STEP + i) % 4] += of_squares ? apart * apart : apart;
            }
        }
        return sum_of(sums);
    }

    __device__ void write(uint from, float center, float factor) {
        if (!WIDE || norm.spatial == 1) return write(from, center, factor, true);
        write(from, center, factor, false);
    }

    __device__ void write(uint from, float center, float factor, bool side_by_side) {
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
            if (WIDE) read_parameters(from, vector, side_by_side);
            float results[STEP];
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                results[i] = (values[vector][i] - center) * factor * scale[vector][i] + shift[vector][i];
            }
            uint place = place_in_row<STEP>(from, vector);
            write(norm.y, place, results);
            if (!WIDE) write(norm.sum, place, values[vector]);
        }
    }

    __device__ void write(T* to, uint place, const float (&results)[STEP]) const {
        if (to && place < length) *(Vector<STEP, T>*)(to + begin + place) = Vector<STEP, T>::of(results);
    }

    __device__ void write_statistics(float center, float factor) const {
        if (threadIdx.x > 0 || row_of_team() >= norm.count) return;
        if (norm.mean) norm.mean[row_of_team()] = center;
        if (norm.factor) norm.factor[row_of_team()] = factor;
    }

    // The elements that the threads of this one's warp hold of its row.
    __device__ float count_of_warp() const {
        uint count = 0;
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
            uint first = (vector * blockDim.x + threadIdx.x / 32 * 32) * STEP;
            if (first < norm.length) count += min(norm.length - first, min(blockDim.x, 32) * STEP);
        }
        return float(count);
    }
};

// A row that the team holds: each warp finds the mean of its own elements and the squares of what they are apart from it, which is as exact
// as two passes over the row. Those of all warps are joined as Chan, Golub and LeVeque have it ("Algorithms for computing the sample
// variance", 1983).
template <bool WIDE, int VECTORS, int STEP, typename T> __device__ void held_norm(const Norm<T>& norm) {
    __shared__ Cells<float4> cells;
    Share<WIDE, VECTORS, STEP, T> share(norm);
    share.read(0, !WIDE);
    // Divisions need no element, and are done while those are read.
    float count = share.count_of_warp(), of_warp = 1.0f / count, of_row = 1.0f / float(norm.length);
    float sum = sum_of_lanes(share.sum(0, false, 0.0f), blockDim.x);
    float center = norm.centers ? sum * of_warp : 0.0f;
    float squares = sum_of_lanes(share.sum(0, true, center), blockDim.x);
    if (blockDim.x > 32) {
        uint warps = blockDim.x / 32;
        float4 some = of_some_warp(make_float4(sum, center, squares, count), make_float4(0, 0, 0, 0), cells);
        center = norm.centers ? sum_of_lanes(some.x, warps) * of_row : 0.0f;
        float apart = some.y - center;
        squares = sum_of_lanes(some.z + some.w * (apart * apart), warps);
    }
    float factor = rsqrtf(squares * of_row + norm.epsilon);
    share.write(0, center, factor);
    share.write_statistics(center, factor);
}

// Three passes: the mean, the squares of what is apart from it, the results. A row of more than the team holds is read again for each.
template <bool WIDE, int VECTORS, int STEP, typename T> __device__ void norm_in_passes(const Norm<T>& norm) {
    enum Pass { MEAN, SQUARES, RESULTS };
    __shared__ Cells<float> cells[2];
    uint reach = reach_of_team<VECTORS, STEP>();
    Share<WIDE, VECTORS, STEP, T> share(norm);
    float center = 0.0f, factor = 0.0f;
    bool is_whole = norm.length <= reach, is_read = false, early = !WIDE && is_whole;
#pragma unroll 1
    for (int pass = norm.centers ? MEAN : SQUARES; pass <= RESULTS; pass++) {
        float sum = 0.0f;
#pragma unroll 1
        for (uint from = 0; from < norm.length; from += reach) {
            if (!is_read) share.read(from, early);
            if (pass == RESULTS && !WIDE && !early) share.read_parameters(from);
            is_read = is_whole;
            if (pass == RESULTS) {
                share.write(from, center, factor);
            } else {
                sum += share.sum(from, pass == SQUARES, center);
            }
        }
        if (pass == RESULTS) break;
        auto add = [](float a, float b) { return a + b; };
        sum = joined_row(sum, 0.0f, cells[pass], add) / float(norm.length);
        if (pass == MEAN) center = sum;
        if (pass == SQUARES) factor = rsqrtf(sum + norm.epsilon);
    }
    share.write_statistics(center, factor);
}

// A row in vectors, of which a thread holds VECTORS, or of SCALARS a thread.
template <int VECTORS, typename T> __device__ void norm_of_row(const Norm<T>& norm) {
    constexpr int STEP = VECTOR<T>;
    constexpr bool WIDE = VECTORS == 4;
    if (!norm.template in_vectors<STEP>()) return norm_in_passes<WIDE, SCALARS<VECTORS>, 1>(norm);
    bool is_held = norm.length > 0 && norm.length <= reach_of_team<VECTORS, STEP>();
    // Three vectors are of a warp that holds the row.
    if (VECTORS == 3 || is_held) return held_norm<WIDE, VECTORS, STEP>(norm);
    norm_in_passes<WIDE, WIDE ? 2 : 1, STEP>(norm);
}

#define ENTRY(VECTORS, NAME, T, THREADS, BLOCKS)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                 \
        norm_##VECTORS##_##NAME(const T* x, const T* skip, const T* bias, const T* scale, const T* shift, T* y,   \
                                float* mean, float* factor, T* sum, uint4 sizes, uint groups, uint each,          \
                                uint spatial, float epsilon) {                                                    \
        Norm<T> norm = {x,       skip,    bias,    scale,        shift,  y,    mean,    factor, sum,              \
                        sizes.x, sizes.y, sizes.z, sizes.w != 0, groups, each, spatial, epsilon};                 \
        norm_of_row<VECTORS>(norm);                                                                               \
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
#define ENTRIES(NAME, T)                     \
    ENTRY(1, NAME, T, MOST_OF_BLOCK, 1)    \
    ENTRY(3, NAME, T, 128, 4)                \
    ENTRY(4, NAME, T, MOST_OF_BLOCK, 1)      \
    BATCH(NAME, T)

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
