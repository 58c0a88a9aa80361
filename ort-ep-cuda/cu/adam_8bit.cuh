// Adam with moments of 8 bits.
#pragma once

#include "adam.cuh"

// Moments as codes of 8 bits: 256 elements have a scale, and a block takes them at once. Codes stand, in order, for dynamic numbers: 0, 1, and
// in between, or on both sides of 0, for the middles of equal parts of 0.1 to 1 times a power of ten (Dettmers et al., arXiv 2110.02861).
__device__ inline float value_of_code(int code, bool is_signed) {
    // Powers of ten from 10^-6 to 10^0, of which each has twice the parts of the one before.
    const double powers[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    int zero = is_signed ? 127 : 0;
    if (code == 255) return 1.0f;
    if (code == zero) return 0.0f;
    int first = is_signed ? 1 : 2, rank = (code > zero ? code - zero : zero - code) - 1 + first;
    int bits = 31 - __clz(rank), parts = 1 << bits;
    double fraction = 0.1 + 0.9 * (rank - parts + 0.5) / parts, number = 0.0;
#pragma unroll
    for (int exponent = 0; exponent < 7; exponent++) {
        if (exponent == bits - first + 1) number = fraction * powers[exponent];
    }
    return float(code > zero ? number : -number);
}

// The code of the nearest number to one of magnitude up to 1, the lesser of two that are as near; `middles` lie between the numbers.
__device__ inline uint8 nearest_code(const float* middles, float x) {
    if (x != x) return 255;
    int below = 0;
#pragma unroll
    for (int step = 128; step > 0; step /= 2) {
        if (middles[below + step - 1] < x) below += step;
    }
    return below;
}

template <typename T>
__device__ inline void write_codes(T moment, bool there, uint i, uint block, uint8* codes, float* scales, const float* middles) {
    float x = there ? float(moment) : 0.0f;
    float most = joined<256>(fabsf(x), [](float a, float b) { return greater(a, b); });
    if (there && codes) codes[i] = nearest_code(middles, x / (most == 0.0f ? 1.0f : most));
    if (threadIdx.x == 0 && scales) scales[block] = most;
}

template <typename T, typename G>
__device__ void adam_8bit(const T* x, T* new_x, const uint8* codes1, const float* scales1, const uint8* codes2, const float* scales2,
                          uint8* new_codes1, float* new_scales1, uint8* new_codes2, float* new_scales2, const G* gradient,
                          const float* rate, const float* scale, const uint8* update, const int64* number, uint count,
                          const AdamRule& rule) {
    __shared__ Adam<T> step;
    __shared__ float values[2][256], middles[2][256];
    bool updates = is_set(update);
    if (updates) share(step, rule, rate, scale, number);
    int thread = threadIdx.x;
    for (int own = 0; own < 2; own++) values[own][thread] = value_of_code(thread, own == 0);
    __syncthreads();
    for (int own = 0; own < 2; own++) {
        middles[own][thread] = thread < 255 ? (values[own][thread] + values[own][thread + 1]) / 2.0f : infinity();
    }
    __syncthreads();
    for (uint block = blockIdx.x; block < (count + 255) / 256; block += gridDim.x) {
        uint i = block * 256 + thread;
        bool there = i < count;
        float scale1 = scales1[block], scale2 = scales2[block];
        uint8 code1 = there ? codes1[i] : 0, code2 = there ? codes2[i] : 0;
        T own[3] = {there ? x[i] : T(0), T(values[0][code1] * scale1), T(values[1][code2] * scale2)};
        if (updates) {
            if (there) step(own, T(wide(gradient[i])));
            if (there && new_x) new_x[i] = own[0];
            // All have read the scales.
            write_codes(own[1], there, i, block, new_codes1, new_scales1, middles[0]);
            write_codes(own[2], there, i, block, new_codes2, new_scales2, middles[1]);
            continue;
        }
        if (there && new_x) new_x[i] = own[0];
        if (there && new_codes1) new_codes1[i] = code1;
        if (there && new_codes2) new_codes2[i] = code2;
        if (thread == 0 && new_scales1) new_scales1[block] = scale1;
        if (thread == 0 && new_scales2) new_scales2[block] = scale2;
    }
}

#define ADAM_8BIT_ENTRIES(NAME, T, G)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                             \
        adam_8bit_##NAME(const T* x, T* new_x, const uint8* codes1, const float* scales1, const uint8* codes2,                    \
                         const float* scales2, uint8* new_codes1, float* new_scales1, uint8* new_codes2, float* new_scales2,      \
                         const G* gradient, const float* rate, const float* scale, const uint8* update, const int64* step,        \
                         uint count, AdamRule rule) {                                                                             \
        adam_8bit(x, new_x, codes1, scales1, codes2, scales2, new_codes1, new_scales1, new_codes2, new_scales2, gradient, rate,   \
                  scale, update, step, count, rule);                                                                              \
    }
#define OF_ADAM_8BIT(NAME, T) OF_GRADIENTS(ADAM_8BIT_ENTRIES, NAME, T)
