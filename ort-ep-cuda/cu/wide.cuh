// The numbers that elements are computed as, and back: integers are without a sign there, so that they wrap.
#pragma once

#include "common.cuh"

__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__half x) { return as_float(x); }
__device__ inline float wide(__nv_bfloat16 x) { return as_float(x); }
__device__ inline double wide(double x) { return x; }
__device__ inline uint wide(int x) { return uint(x); }
__device__ inline uint64 wide(int64 x) { return uint64(x); }

template <typename T, typename V> __device__ inline T narrow(V v) { return T(v); }
template <> __device__ inline __half narrow<__half, float>(float v) { return from_float<__half>(v); }
template <> __device__ inline __nv_bfloat16 narrow<__nv_bfloat16, float>(float v) { return from_float<__nv_bfloat16>(v); }
