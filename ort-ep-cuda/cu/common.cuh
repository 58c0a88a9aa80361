// What all families share: element types as they are stored, and walks over axes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int uint;
typedef signed char int8;
typedef unsigned char uint8;
typedef unsigned short uint16;
typedef long long int64;
typedef unsigned long long uint64;

constexpr int MOST_AXES = 8;

// Numbers of the axes of a walk, as a kernel's parameter.
struct Axes {
    int of[MOST_AXES];
};

// Floats are computed in float32 (float64 for double) and rounded when they are written.
__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(__half x) { return __half2float(x); }
__device__ inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// The thread's number in the whole launch.
__device__ inline uint thread_index() { return blockIdx.x * blockDim.x + threadIdx.x; }

// The sum, or the greatest, of a value of each thread of a warp, in all of them.
__device__ inline float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ inline float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
