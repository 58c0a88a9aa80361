// Steps of optimizers, in the parameter's own type. What a step is told in one number (learning rate, scale, whether anything changes, the
// number of the step) is read here, so that the host waits for nothing; the first thread of a block computes the factors, in doubles.
//
// New values go where old ones lie, or elsewhere; the address of nothing says that nobody wants them. Sums of squares are of doubles: each
// block writes its own, and who needs the whole adds them up in their order.
#pragma once

#include "lines.cuh"
#include "packs.cuh"
#include "wide.cuh"

__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }

// The elements of a launch, and those of them that have a gradient, of which the first is that of `first`.
struct Range { uint begin, count, first, rows; };

// A parameter, then its states.
template <typename T, int COUNT> struct Tensors {
    const T* from[COUNT];
    T* to[COUNT];
};

__device__ inline bool is_set(const uint8* flag) { return !flag || *flag != 0; }
__device__ inline double number_of(const float* told, double otherwise) { return told ? double(*told) : otherwise; }

// Calls `step` with each element of the tensors and of the gradient; without an update all stays as it is.
template <typename T, typename G, int COUNT, typename Step>
__device__ void update_all(const Tensors<T, COUNT>& tensors, const G* gradient, const Range& range, bool updates, const Step& step) {
    const G* gradients = gradient + ((int64)range.begin - range.first);
    bool fours = in_packs<G, 4>(gradients, 4), stays = !updates;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        fours = fours && in_packs<T, 4>(tensors.from[n] + range.begin, 4) && in_packs<T, 4>(tensors.to[n] + range.begin, 4);
        stays = stays && (!tensors.to[n] || tensors.to[n] == tensors.from[n]);
    }
    if (stays) return;
    for (uint at = 4 * thread_index(); at < range.count; at += 4 * gridDim.x * blockDim.x) {
        uint i = range.begin + at, end = range.first + range.rows;
        int count = min(4u, range.count - at);
        bool whole = fours && count == 4;
        Pack<T, 4> values[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; n++) read_pack(tensors.from[n] + i, count, whole, values[n]);
        if (updates) {
            Pack<G, 4> four;
            if (i >= range.first && i + count <= end) {
                read_pack(gradients + at, count, whole, four);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) four.of[j] = j < count && i + j >= range.first && i + j < end ? gradients[at + j] : G(0.0f);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j >= count || i + j < range.first || i + j >= end) continue;
                T own[COUNT];
#pragma unroll
                for (int n = 0; n < COUNT; n++) own[n] = values[n].of[j];
                step(own, T(wide(four.of[j])));
#pragma unroll
                for (int n = 0; n < COUNT; n++) values[n].of[j] = own[n];
            }
        }
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            if (!tensors.to[n]) continue;
            if (whole) {
                *(Pack<T, 4>*)(tensors.to[n] + i) = values[n];
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j < count) tensors.to[n][i + j] = values[n].of[j];
            }
        }
    }
}

// The sum of a value of each thread of a block, in all of them.
__device__ inline double block_sum(double x) {
    return joined<256>(x, [](double a, double b) { return a + b; });
}

// The sum of what all blocks wrote, which every block adds in the same order. Two sums lie behind each other.
__device__ inline double total(const double* parts, uint count) {
    double sum = 0.0;
    for (uint part = threadIdx.x; part < count; part += 256) sum += parts[part];
    return block_sum(sum);
}

__device__ inline void write_parts(double* parts, double first, double second) {
    first = block_sum(first), second = block_sum(second);
    if (threadIdx.x == 0) parts[blockIdx.x] = first, parts[gridDim.x + blockIdx.x] = second;
}

// The entries of a parameter's type for each type of gradients.
#define OF_GRADIENTS(ENTRIES, NAME, T)                                                                                            \
    ENTRIES(NAME##_f32, T, float) ENTRIES(NAME##_f64, T, double) ENTRIES(NAME##_f16, T, __half) ENTRIES(NAME##_bf16, T, __nv_bfloat16)
