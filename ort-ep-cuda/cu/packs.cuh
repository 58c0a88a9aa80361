// Elements that lie next to each other, read and written by as few instructions as there are.
#pragma once

#include "common.cuh"

template <typename T, int COUNT> struct alignas(sizeof(T) * COUNT > 16 ? 16 : sizeof(T) * COUNT) Pack { T of[COUNT]; };

// Whether rows of so many elements are whole packs.
template <typename T, int COUNT> __device__ inline bool in_packs(const T* at, int size) {
    return size % COUNT == 0 && (uint64)at % alignof(Pack<T, COUNT>) == 0;
}

// Elements of which so many are there; zeros for the others.
template <int COUNT, typename T> __device__ inline void read_pack(const T* at, int count, bool vectors, Pack<T, COUNT>& to) {
    if (vectors && count >= COUNT) {
        to = *(const Pack<T, COUNT>*)at;
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) to.of[i] = i < count ? at[i] : T(0.0f);
}
template <typename T> __device__ inline void read_four(const T* at, int count, bool vectors, float (&to)[4]) {
    Pack<T, 4> pack;
    read_pack(at, count, vectors, pack);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = as_float(pack.of[i]);
}
