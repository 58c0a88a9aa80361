// Rows: lines whose elements lie side by side. A team of `blockDim.x` threads takes a row, a power of two up to a warp or whole warps, and a
// block `blockDim.y` rows; of whole warps beyond one a block is one row. A thread reads vectors that lie a team apart, all before it uses the
// first, and keeps them in registers: a row of no more than the team holds is read once.
#pragma once

#include "packs.cuh"

// The threads of a block at most, which bounds registers to 64.
constexpr uint MOST_OF_BLOCK = 1024;

// Elements of a vector of 16 bytes.
template <typename T> constexpr int VECTOR = 16 / sizeof(T);

__device__ inline uint row_of_team() { return blockIdx.x * blockDim.y + threadIdx.y; }

// A vector of STEP elements as it is stored, in words, so that halves share registers while they wait; or one element.
template <int STEP, typename T> struct Vector {
    uint4 words;

    __device__ float operator[](int i) const {
        uint word = (&words.x)[i * sizeof(T) / 4];
        if constexpr (sizeof(T) == 4) return __uint_as_float(word);
        return as_float(((const T*)&word)[i % 2]);
    }
};
template <typename T> struct Vector<1, T> {
    T element;

    __device__ float operator[](int) const { return as_float(element); }
};

// Elements that a team holds at once.
template <int VECTORS, int STEP> __device__ inline uint reach_of_team() { return blockDim.x * (VECTORS * STEP); }

// Where in a row the thread's vector of this number begins, counted from the element `from`.
template <int STEP> __device__ inline uint place_in_row(uint from, int vector) {
    return from + (vector * blockDim.x + threadIdx.x) * STEP;
}

// The same, of the row's last vector where it would be beyond the end: what is read without a condition is asked for at once.
template <int STEP> __device__ inline uint place_to_read(uint from, int vector, uint length) {
    return min(place_in_row<STEP>(from, vector), length - STEP);
}

// The thread's vectors of a row.
template <int VECTORS, int STEP, typename T>
__device__ inline void read_row(const T* row, uint from, uint length, Vector<STEP, T> (&to)[VECTORS]) {
#pragma unroll
    for (int vector = 0; vector < VECTORS; vector++) {
        to[vector] = *(const Vector<STEP, T>*)(row + place_to_read<STEP>(from, vector, length));
    }
}

// A value of each warp of a block.
template <typename V> using Cells = V[MOST_OF_BLOCK / 32];

// What the values of a team's threads are together, in all of them; `identity` changes no value that it is joined with. All threads of the
// block must come here, each time with other cells, so that none has to wait until the last ones are read.
template <typename V, typename Join> __device__ inline V joined_row(V value, V identity, Cells<V>& cells, Join join) {
    auto butterfly = [&](uint threads) {
#pragma unroll
        for (int bits = 16; bits > 0; bits /= 2) {
            if (bits < threads) value = join(value, __shfl_xor_sync(0xffffffffu, value, bits));
        }
    };
    butterfly(blockDim.x);
    if (blockDim.x <= 32) return value;
    uint warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) cells[threadIdx.x / 32] = value;
    __syncthreads();
    // The lanes stand for the next power of two of warps, again and again.
    uint own = lane & (0xffffffffu >> __clz(warps - 1));
    value = own < warps ? cells[own] : identity;
    butterfly(warps);
    return value;
}
