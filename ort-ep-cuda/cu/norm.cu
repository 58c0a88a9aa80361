// Normalizations of lines in a row, by their own mean and variance, and of channels by given ones.
#include "lines.cuh"

// A line's elements are those of `x`, with `skip` and `bias` where they are given; `scale` and `shift` have an element for each
// `spatial` elements of a line, and lines of other groups others.
template <int TEAM, typename T>
__device__ void norm(const T* x, const T* skip, const T* bias, const T* scale, const T* shift, T* y, float* mean,
                     float* factor, T* sum, const uint4& sizes, uint groups, uint each, uint spatial, float epsilon) {
    uint count = sizes.x, length = sizes.y, skips = sizes.z, centers = sizes.w;
    uint line = line_of_team<TEAM>();
    if (line >= count) return;
    uint lane = lane_of_team<TEAM>(), begin = line * length;
    auto value = [&](uint r) {
        float v = as_float(x[begin + r]);
        if (skip) v += as_float(skip[(begin + r) % skips]);
        return bias ? v + as_float(bias[r]) : v;
    };
    auto together = [](float a, float b) { return a + b; };
    float center = 0.0f;
    if (centers) {
        for (uint r = lane; r < length; r += TEAM) center += value(r);
        center = joined<TEAM>(center, together) / float(length);
    }
    float squares = 0.0f;
    for (uint r = lane; r < length; r += TEAM) {
        float apart = value(r) - center;
        squares += apart * apart;
    }
    float scaled = 1.0f / sqrtf(joined<TEAM>(squares, together) / float(length) + epsilon);
    for (uint r = lane; r < length; r += TEAM) {
        float v = value(r);
        uint channel = line % groups * each + r / spatial;
        if (y) {
            float result = (v - center) * scaled * as_float(scale[channel]);
            y[begin + r] = from_float<T>(shift ? result + as_float(shift[channel]) : result);
        }
        if (sum) sum[begin + r] = from_float<T>(v);
    }
    if (lane == 0 && mean) mean[line] = center;
    if (lane == 0 && factor) factor[line] = scaled;
}

#define ENTRY(TEAM, NAME, T)                                                                                      \
    extern "C" __global__ void norm_##NAME##_##TEAM(const T* x, const T* skip, const T* bias, const T* scale,      \
                                                    const T* shift, T* y, float* mean, float* factor, T* sum,      \
                                                    uint4 sizes, uint groups, uint each, uint spatial,             \
                                                    float epsilon) {                                               \
        norm<TEAM, T>(x, skip, bias, scale, shift, y, mean, factor, sum, sizes, groups, each, spatial, epsilon);   \
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
#define ENTRIES(NAME, T) ENTRY(32, NAME, T) ENTRY(256, NAME, T) BATCH(NAME, T)

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
