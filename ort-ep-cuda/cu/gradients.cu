// One number of all gradients: their norm, or whether all are finite.
#include "optimizer.cuh"

// A row of blocks has the parts of up to eight gradients; norm.rs has the same kinds.
enum Kind { FLOAT, DOUBLE, HALF, BFLOAT };
struct Eight { uint counts[8]; uint kinds[8]; };

template <bool FINITE, typename G> __device__ inline double part_of(const G* gradient, uint count) {
    double sum = 0.0;
#pragma unroll 4
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        double x = double(wide(gradient[i]));
        if (FINITE) sum += isfinite(x) ? 0.0 : 1.0;
        else sum += x * x;
    }
    return sum;
}

template <bool FINITE> __device__ inline void parts_of_eight(const void* const (&gradients)[8], double* parts, const Eight& eight) {
    const void* own = nullptr;
    uint count = 0, kind = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if (blockIdx.y == n) own = gradients[n], count = eight.counts[n], kind = eight.kinds[n];
    }
    double sum = 0.0;
    if (kind == FLOAT) sum = part_of<FINITE>((const float*)own, count);
    else if (kind == DOUBLE) sum = part_of<FINITE>((const double*)own, count);
    else if (kind == HALF) sum = part_of<FINITE>((const __half*)own, count);
    else sum = part_of<FINITE>((const __nv_bfloat16*)own, count);
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

extern "C" __global__ void all_squares(const void* a, const void* b, const void* c, const void* d, const void* e, const void* f, const void* g,
                                       const void* h, double* parts, Eight eight) {
    parts_of_eight<false>({a, b, c, d, e, f, g, h}, parts, eight);
}
extern "C" __global__ void all_infinite(const void* a, const void* b, const void* c, const void* d, const void* e, const void* f, const void* g,
                                        const void* h, double* parts, Eight eight) {
    parts_of_eight<true>({a, b, c, d, e, f, g, h}, parts, eight);
}
extern "C" __global__ void norm_of_parts(const double* parts, float* norm, uint count) {
    double sum = total(parts, count);
    if (threadIdx.x == 0) *norm = float(sqrt(sum));
}
extern "C" __global__ void finite_of_parts(const double* parts, uint8* finite, uint count) {
    double sum = total(parts, count);
    if (threadIdx.x == 0) *finite = sum == 0.0;
}
