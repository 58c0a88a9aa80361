// What attention on tensor cores shares, in inference and in training: each of four warps has 16 of 64 rows. A lane has two of them, which are
// eight apart, and of each eight columns two.
#pragma once

#include "attention_blocks.cuh"
#include "cores.cuh"

template <typename T> __device__ inline uint packed(float low, float high) {
    return (uint)bits_of(from_float<T>(low)) | (uint)bits_of(from_float<T>(high)) << 16;
}

// e to a power.
__device__ inline float fast_power(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
}

// Begins to copy eight halves, or writes zeros where there is nothing.
template <typename T> __device__ inline void copy_eight(T* to, const T* from, int count, bool vectors) {
    if (vectors) {
        copy_later(to, from, count > 0);
        return;
    }
    Pack<T, 8> pack;
    read_pack(from, count, false, pack);
    *(Pack<T, 8>*)to = pack;
}

// Begins to copy the lines from `first` to before `end` of `width` elements, `step` apart, into a tile of MANY; zeros for those that are not there.
template <int MANY, int SIZE, typename T>
__device__ inline void copy_lines(T (*tile)[SIZE + 8], const T* side, int step, int width, int first, int end, bool vectors) {
    // Of the lines of its turns a thread reads the same columns.
    constexpr int CHUNKS = SIZE / 8, LANES = 128;
    int line = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS * 8;
    const T* from = side + (int64)(first + line) * step + c;
#pragma unroll
    for (int turn = 0; turn < MANY * CHUNKS / LANES; turn++, line += LANES / CHUNKS, from += LANES / CHUNKS * (int64)step) {
        int count = first + line < end ? width - c : 0;
        copy_eight(&tile[line][c], count > 0 ? from : side, count, vectors);
    }
    commit_copies();
}

// Of a warp's rows, in a tile, what a lane has as the left side of the product of the 16 elements from `c` on.
template <int SIZE, typename T> __device__ inline void left_of(uint (&to)[4], const T (*tile)[SIZE + 8], int warp_row, int c) {
    int lane = threadIdx.x % 32;
    load_matrices<false>(to, &tile[warp_row + lane % 16][c + lane / 16 * 8]);
}

// Adds a warp's rows, of which `left` gets the elements from one on, times the lines of a tile.
template <int MANY, int SIZE, typename T, typename Left>
__device__ inline void multiply_lines(float (&sums)[MANY / 8][4], const Left& left, const T (*tile)[SIZE + 8], int size) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int at = 0; at < SIZE / 16; at++) {
        if (16 * at >= size) break;
        uint own[4];
        left(at, own);
#pragma unroll
        for (int j = 0; j < MANY / 8; j += 2) {
            uint right[4];
            load_matrices<false>(right, &tile[8 * j + lane / 16 * 8 + lane % 8][16 * at + lane / 8 % 2 * 8]);
            multiply(T(), sums[j], own, right[0], right[1]);
            multiply(T(), sums[j + 1], own, right[2], right[3]);
        }
    }
}

// Adds the lines of a tile by their weights.
template <int MANY, int SIZE, typename T>
__device__ inline void combine_lines(float (&results)[SIZE / 8][4], const float (&weights)[MANY / 8][4], const T (*tile)[SIZE + 8], int width) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int at = 0; at < MANY / 16; at++) {
        uint left[4];
#pragma unroll
        for (int i = 0; i < 4; i++) left[i] = packed<T>(weights[2 * at + i / 2][i % 2 * 2], weights[2 * at + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int j = 0; j < SIZE / 8; j += 2) {
            if (8 * j >= width) break;
            uint right[4];
            load_matrices<true>(right, &tile[16 * at + lane % 16][8 * j + lane / 16 * 8]);
            multiply(T(), results[j], left, right[0], right[1]);
            multiply(T(), results[j + 1], left, right[2], right[3]);
        }
    }
}
