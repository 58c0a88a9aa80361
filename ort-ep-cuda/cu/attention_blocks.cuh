// What blocks of attention share, in inference and in training: 64 rows each, tiles of products and of results in registers, softmax by rows.
#pragma once

#include "packs.cuh"

// How elements of a type that is known at a launch are stored; attend.rs and training/attention.rs have the same numbers.
enum Kind { NOTHING = -1, FLOAT, HALF, BFLOAT, BOOL, INT, LONG };

__device__ inline uint16 bits_of(__half x) { return static_cast<__half_raw>(x).x; }
__device__ inline uint16 bits_of(__nv_bfloat16 x) { return static_cast<__nv_bfloat16_raw>(x).x; }

// The next rows of numbers move up, so that a loop over rows has its code once.
template <int MANY, int COUNT> __device__ inline void next_row(float (&rows)[MANY][COUNT]) {
#pragma unroll
    for (int row = 1; row < MANY; row++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) rows[row - 1][i] = rows[row][i];
    }
}

// What scores are relative to: the greatest, where there is one.
__device__ inline float base_of(float top) { return top == -infinity() ? 0.0f : top; }

// The sum, or the greatest, of a value of each of some lanes that lie next to each other, in all of them.
template <int LANES> __device__ inline float sum_of_lanes(float x) {
#pragma unroll
    for (int bits = LANES / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(0xffffffffu, x, bits);
    return x;
}
template <int LANES> __device__ inline float most_of_lanes(float x) {
#pragma unroll
    for (int bits = LANES / 2; bits > 0; bits /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, bits));
    return x;
}

// Rows of a block where they are many.
constexpr int ROWS = 64;

// Heads of any size: 64 rows and 64 columns at a time by 16 times 16 threads, each with four rows and four columns, then with four rows and
// WIDE / 16 columns of the results. A block has WIDE columns of these.
constexpr int DEPTH = 16, PITCH = 68;

// Products of rows and columns: a thread reads four elements of the row and of the column `thread / 4`, by functions that are told the first
// one and how many there are from there on.
template <typename Row, typename Column>
__device__ inline void product(const Row& read_row, const Column& read_column, int depth, float* memory, float (&sums)[4][4]) {
    int thread = threadIdx.x, line = thread / 4, step = thread % 4 * 4, own_row = thread / 16 * 4, own = thread % 16 * 4;
    float row_next[4], column_next[4];
    auto read = [&](int d) {
        read_row(d + step, depth - d - step, row_next);
        read_column(d + step, depth - d - step, column_next);
    };
    auto write = [&](int stage) {
        float* to = memory + stage * 2 * DEPTH * PITCH;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[(step + i) * PITCH + line] = row_next[i];
            to[(DEPTH + step + i) * PITCH + line] = column_next[i];
        }
    };
    read(0);
    __syncthreads();
    write(0);
    __syncthreads();
    for (int d = 0, now = 0; d < depth; d += DEPTH, now ^= 1) {
        bool more = d + DEPTH < depth;
        if (more) read(d + DEPTH);
        const float* tile = memory + now * 2 * DEPTH * PITCH;
#pragma unroll
        for (int at = 0; at < DEPTH; at++) {
            Pack<float, 4> left = *(const Pack<float, 4>*)&tile[at * PITCH + own_row];
            Pack<float, 4> right = *(const Pack<float, 4>*)&tile[(DEPTH + at) * PITCH + own];
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] += left.of[i] * right.of[j];
            }
        }
        if (more) {
            write(now ^ 1);
            __syncthreads();
        }
    }
}

// Results by the weights of a tile of columns, whose rows of `width` elements are at `from`, `step` apart.
template <int WIDE, typename T>
__device__ inline void combine(const float (*weights)[PITCH], const T* from, int step, int many, int width, int column0, bool vectors, float* memory,
                               float (&results)[4][WIDE / 16]) {
    constexpr int QUADS = WIDE / 64, WIDE_PITCH = WIDE + 4, ABREAST = 4 / QUADS;
    int thread = threadIdx.x, own_row = thread / 16 * 4, own = thread % 16 * 4;
    float next[QUADS][4];
    auto read = [&](int first) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            int at = thread + i * 256, line = first + at / (WIDE / 4), column = column0 + at % (WIDE / 4) * 4;
            read_four(from + (int64)line * step + column, line < many ? width - column : 0, vectors, next[i]);
        }
    };
    auto write = [&](int stage) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            int at = thread + i * 256;
            float* to = memory + (stage * DEPTH + at / (WIDE / 4)) * WIDE_PITCH + at % (WIDE / 4) * 4;
#pragma unroll
            for (int j = 0; j < 4; j++) to[j] = next[i][j];
        }
    };
    read(0);
    // All threads have written their weights, and are done with what was in the memory.
    __syncthreads();
    write(0);
    __syncthreads();
    for (int first = 0, now = 0; first < many; first += DEPTH, now ^= 1) {
        bool more = first + DEPTH < many;
        if (more) read(first + DEPTH);
#pragma unroll
        for (int at = 0; at < DEPTH; at += ABREAST) {
            Pack<float, ABREAST> left[4];
#pragma unroll
            for (int i = 0; i < 4; i++) left[i] = *(const Pack<float, ABREAST>*)&weights[own_row + i][first + at];
#pragma unroll
            for (int line = 0; line < ABREAST; line++) {
                const float* right_row = memory + (now * DEPTH + at + line) * WIDE_PITCH + own;
#pragma unroll
                for (int quad = 0; quad < QUADS; quad++) {
                    Pack<float, 4> right = *(const Pack<float, 4>*)(right_row + 64 * quad);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
#pragma unroll
                        for (int j = 0; j < 4; j++) results[i][4 * quad + j] += left[i].of[line] * right.of[j];
                    }
                }
            }
        }
        if (more) {
            write(now ^ 1);
            __syncthreads();
        }
    }
}
