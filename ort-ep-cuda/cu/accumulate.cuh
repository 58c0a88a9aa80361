// Sums of gradients over batches, and copies of what stays as it is.
#pragma once

#include "optimizer.cuh"

template <typename T> struct Added {
    bool overwrites;
    __device__ void operator()(T (&own)[1], T g) const { own[0] = overwrites ? g : own[0] + g; }
};

#define ACCUMULATE_ENTRIES(NAME, T, G)                                                                                            \
    extern "C" __global__ void accumulate_##NAME(const T* sum, T* now, const G* value, const uint8* overwrite, Range range) {     \
        Added<T> added = {*overwrite != 0};                                                                                       \
        update_all(Tensors<T, 1>{{sum}, {now}}, value, range, true, added);                                                       \
    }
#define ACCUMULATE(NAME, T)                                                                                                       \
    extern "C" __global__ void keep_##NAME(const T* from, T* to, uint count) {                                                    \
        for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) to[i] = from[i];                                    \
    }                                                                                                                             \
    OF_GRADIENTS(ACCUMULATE_ENTRIES, NAME, T)
