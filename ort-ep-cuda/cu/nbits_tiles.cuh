// Products of many rows with weights of few bits.
#pragma once

#include "core_sums.cuh"
#include "nbits.cuh"

// Eight codes of a column from step `k` on, which is a multiple of 8: as weights.
__device__ inline void eight_weights(const uint8* b, const Inputs& in, const Weights& p, int column, int k, float (&to)[8]) {
    int all_steps = p.blocks << p.log_block;
    if (column >= p.columns || k >= all_steps) {
#pragma unroll
        for (int n = 0; n < 8; n++) to[n] = 0.0f;
        return;
    }
    const uint8* at = b + ((int64)column * all_steps + k) / 8 * p.bits;
    uint64 codes = 0;
    if (opaque(p.bits == 4 && is_multiple(at, 4))) {
        codes = *(const uint*)at;
    } else if (opaque(p.bits == 8 && is_multiple(at, 8))) {
        codes = *(const uint64*)at;
    } else {
#pragma unroll 1
        for (int byte = 0; byte < p.bits; byte++) codes |= (uint64)at[byte] << 8 * byte;
    }
    int block = k >> p.log_block;
    float scale = float_at(in.scales, p.scale_kind, column * p.blocks + block), zero = zero_point(p, in.zeros, column, block);
    uint mask = (1u << p.bits) - 1;
#pragma unroll
    for (int n = 0; n < 8; n++) to[n] = (number_of((uint)(codes >> n * p.bits) & mask) - zero) * scale;
}

// Eight elements of a row of the left side from step `k` on; what is not there is 0.
template <typename T>
__device__ inline void eight_of_row(const T* a, const Weights& p, int row, int k, float (&to)[8]) {
    int left = row < p.rows ? min(8, p.depth - k) : 0;
    const T* at = a + (int64)row * p.depth + k;
#pragma unroll
    for (int part = 0; part < 8; part += 4) {
        float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (left > part) read_four(at + part, min(4, left - part), four);
#pragma unroll
        for (int n = 0; n < 4; n++) to[part + n] = four[n];
    }
}

// 64 rows by 64 columns by a block; each thread has four of both.
template <typename T> __device__ inline void tiles(const T* a, const uint8* b, const Inputs& in, T* y, const Weights& p) {
    constexpr int LINES = 64, STEPS = 32;
    __shared__ __align__(16) float rows[STEPS][LINES + 4], columns[STEPS][LINES + 4];
    int row0 = blockIdx.y * LINES, column0 = blockIdx.x * LINES;
    int line = threadIdx.x % LINES, part = threadIdx.x / LINES * 8;
    float sums[4][4], of_row[8], of_column[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }
    eight_of_row(a, p, row0 + line, part, of_row);
    eight_weights(b, in, p, column0 + line, part, of_column);
    for (int k0 = 0; k0 < p.depth; k0 += STEPS) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 8; n++) {
            rows[part + n][line] = of_row[n];
            columns[part + n][line] = of_column[n];
        }
        __syncthreads();
        if (k0 + STEPS < p.depth) {
            eight_of_row(a, p, row0 + line, k0 + STEPS + part, of_row);
            eight_weights(b, in, p, column0 + line, k0 + STEPS + part, of_column);
        }
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            Together<float> left = *(const Together<float>*)&rows[k][threadIdx.x / 16 * 4];
            Together<float> right = *(const Together<float>*)&columns[k][threadIdx.x % 16 * 4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] += left.of[i] * right.of[j];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = row0 + threadIdx.x / 16 * 4 + i, column = column0 + threadIdx.x % 16 * 4 + j;
            if (row < p.rows && column < p.columns) write_sum(y, p, in.bias, row, column, sums[i][j]);
        }
    }
}

#define TILES(suffix, type)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_tiles_##suffix(const type* a, const uint8* b, INPUTS, type* y, Weights p) {                      \
        tiles<type>(a, b, ALL_INPUTS, y, p);                                                                   \
    }

#if __CUDA_ARCH__ >= 800
// The same with tensor cores: weights are rounded to the type of the left side. 2 by 4 warps, each with half of the rows and a quarter of the
// columns.
template <typename T, int LINES>
__device__ inline void cores(const T* a, const uint8* b, const Inputs& in, T* y, const Weights& p) {
    constexpr int STEPS = 2 * WORDS, UNITS = LINES / 64;
    // Two tiles of either side, and then the sums of 64 rows.
    __shared__ __align__(16) uint memory[4][LINES * PITCH];
    static_assert(sizeof(memory) >= 64 * (LINES + 4) * sizeof(float), "sums of 64 rows fit");
    int row0 = blockIdx.y * LINES, column0 = blockIdx.x * LINES;
    // With both steps of a large tile in registers, a thread would have others of its numbers in memory.
    CoreSums<T, float, LINES, LINES == 128 ? 1 : 2> sums;
    sums.clear();
    // A line of the tile and eight steps of it, of both sides.
    Vector<T> of_rows[UNITS], of_columns[UNITS];
    auto read = [&](int k0) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int unit = threadIdx.x + 256 * u, line = unit / 4, k = k0 + unit % 4 * 8;
            const T* at = a + (int64)(row0 + line) * p.depth + k;
            float values[8];
            if (row0 + line < p.rows && k + 8 <= p.depth && is_multiple(at, 16)) {
                of_rows[u] = *(const Vector<T>*)at;
            } else {
                eight_of_row(a, p, row0 + line, k, values);
#pragma unroll
                for (int n = 0; n < 8; n++) of_rows[u].of[n] = from_float<T>(values[n]);
            }
            eight_weights(b, in, p, column0 + line, k, values);
#pragma unroll
            for (int n = 0; n < 8; n++) of_columns[u].of[n] = from_float<T>(values[n]);
        }
    };
    auto write = [&](int to) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int unit = threadIdx.x + 256 * u, place = unit / 4 * PITCH + unit % 4 * 4;
            *(Vector<T>*)&memory[to][place] = of_rows[u];
            *(Vector<T>*)&memory[2 + to][place] = of_columns[u];
        }
    };
    read(0);
    write(0);
    __syncthreads();
    int now = 0;
    for (int k0 = 0; k0 < p.depth; k0 += STEPS, now ^= 1) {
        bool more = k0 + STEPS < p.depth;
        if (more) read(k0 + STEPS);
        sums.add(memory[now], memory[2 + now]);
        if (more) write(now ^ 1);
        __syncthreads();
    }
    auto finish = [&](int i, int j, float sum) {
        if (row0 + i < p.rows && column0 + j < p.columns) write_sum(y, p, in.bias, row0 + i, column0 + j, sum);
    };
    auto same = [](int line) { return line; };
    write_tile<LINES>(reinterpret_cast<float*>(memory), sums, same, same, finish);
}
#endif

#define CORES(suffix, type)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_cores_small_##suffix(const type* a, const uint8* b, INPUTS, type* y, Weights p) {                \
        cores<type, 64>(a, b, ALL_INPUTS, y, p);                                                               \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_cores_large_##suffix(const type* a, const uint8* b, INPUTS, type* y, Weights p) {                \
        cores<type, 128>(a, b, ALL_INPUTS, y, p);                                                              \
    }
