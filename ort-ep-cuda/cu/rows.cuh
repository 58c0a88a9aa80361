// Rows: lines whose elements lie side by side. A team of `blockDim.x` threads takes a row, a power of two up to a warp or whole warps, and a
// block `blockDim.y` rows; of whole warps beyond one a block is one row. A thread reads vectors that lie a team apart, all before it uses the
// first, and keeps them in registers: a row of no more than the team holds is read once. Of such a row each warp computes its own statistics,
// and one barrier joins those of all.
#pragma once

#include "common.cuh"

// The threads of a block at most, which bounds registers to 64.
constexpr uint MOST_OF_BLOCK = 1024;

// Elements of a vector of 16 bytes.
template <typename T> constexpr int VECTOR = 16 / sizeof(T);

__device__ inline uint row_of_team() { return blockIdx.x * blockDim.y + threadIdx.y; }

// Elements that a thread holds where they are not read in vectors, in an entry for this number of vectors.
template <int VECTORS> constexpr int SCALARS = VECTORS < 4 ? 4 : 8;

// The bits of two elements side by side, which are rounded by one instruction where there is one.
template <typename T> __device__ inline uint pair_of(float low, float high);
template <> __device__ inline uint pair_of<__half>(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *(uint*)&pair;
}
template <> __device__ inline uint pair_of<__nv_bfloat16>(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint*)&pair;
}

// A vector of STEP elements as it is stored, in words, so that halves share registers while they wait; or one element.
template <int STEP, typename T> struct Vector {
    uint4 words;

    __device__ float operator[](int i) const {
        uint word = (&words.x)[i * sizeof(T) / 4];
        if constexpr (sizeof(T) == 4) return __uint_as_float(word);
        return as_float(((const T*)&word)[i % 2]);
    }

    __device__ static Vector of(const float (&values)[STEP]) {
        Vector vector;
#pragma unroll
        for (int word = 0; word < 4; word++) {
            if constexpr (sizeof(T) == 4) {
                (&vector.words.x)[word] = __float_as_uint(values[word]);
            } else {
                (&vector.words.x)[word] = pair_of<T>(values[2 * word], values[2 * word + 1]);
            }
        }
        return vector;
    }
};
template <typename T> struct Vector<1, T> {
    T element;

    __device__ float operator[](int) const { return as_float(element); }
    __device__ static Vector of(const float (&values)[1]) { return {from_float<T>(values[0])}; }
};

// A vector of the same element.
template <int STEP, typename T> __device__ inline Vector<STEP, T> same_vector(float value) {
    float values[STEP];
#pragma unroll
    for (int i = 0; i < STEP; i++) values[i] = value;
    return Vector<STEP, T>::of(values);
}

// Elements that a team holds at once.
template <int VECTORS, int STEP> __device__ inline uint reach_of_team() { return blockDim.x * (VECTORS * STEP); }

// Where in a row the thread's vector of this number begins, counted from the element `from`.
template <int STEP> __device__ inline uint place_in_row(uint from, int vector) {
    return from + (vector * blockDim.x + threadIdx.x) * STEP;
}

// The thread's vectors of a row, beyond its end of the element `outside`.
template <int VECTORS, int STEP, typename T>
__device__ inline void read_row(const T* row, uint from, uint length, float outside, Vector<STEP, T> (&to)[VECTORS]) {
#pragma unroll
    for (int vector = 0; vector < VECTORS; vector++) {
        uint place = place_in_row<STEP>(from, vector);
        to[vector] = same_vector<STEP, T>(outside);
        if (place < length) to[vector] = *(const Vector<STEP, T>*)(row + place);
    }
}

// What the values of `threads` lanes side by side, a power of two or more than a warp, are together: in all of them.
template <typename V, typename Join> __device__ inline V joined_lanes(V value, uint threads, Join join) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) {
        if (bits < threads) value = join(value, __shfl_xor_sync(0xffffffffu, value, bits));
    }
    return value;
}

// A value of each warp of a block.
template <typename V> using Cells = V[MOST_OF_BLOCK / 32];

// A warp's value for the lane to join with those of the others: lanes stand for the next power of two of warps, again and again, and have
// `identity` where there is no such warp. All threads of the block must come here, each time with other cells, so that none has to wait
// until the last ones are read.
template <typename V> __device__ inline V of_some_warp(V value, V identity, Cells<V>& cells) {
    uint warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) cells[threadIdx.x / 32] = value;
    __syncthreads();
    uint own = lane & (0xffffffffu >> __clz(warps - 1));
    return own < warps ? cells[own] : identity;
}

// What the values of a team's threads are together, in all of them; `identity` changes no value that it is joined with.
template <typename V, typename Join> __device__ inline V joined_row(V value, V identity, Cells<V>& cells, Join join) {
    value = joined_lanes(value, blockDim.x, join);
    if (blockDim.x <= 32) return value;
    return joined_lanes(of_some_warp(value, identity, cells), blockDim.x / 32, join);
}

__device__ inline float sum_of_lanes(float value, uint threads) {
    return joined_lanes(value, threads, [](float a, float b) { return a + b; });
}

// Four sums that do not wait for each other, as one.
__device__ inline float sum_of(const float (&sums)[4]) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }
