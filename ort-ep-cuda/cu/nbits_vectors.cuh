// Products of few rows with weights of few bits.
#pragma once

#include "nbits.cuh"

constexpr int FEW_ROWS = 4, WARPS = 8;

// Four words of which `left` are there, at once where that may be.
__device__ inline uint4 words_at(const uint8* at, int left, bool whole) {
    if (whole && left >= 4) return *(const uint4*)at;
    uint words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (n >= left) continue;
        const uint8* of = at + 4 * n;
        words[n] = is_multiple(of, 4) ? *(const uint*)of : of[0] | of[1] << 8 | of[2] << 16 | (uint)of[3] << 24;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Four rows at most: each warp has some columns, each thread of it 16 bytes of codes of each at a time.
template <typename T, int BITS, int COLUMNS>
__device__ inline void vectors(const T* a, const uint8* b, const Inputs& in, T* y, const Weights& p) {
    constexpr int HALF = 16 / BITS, WORD = 2 * HALF, CHUNK = 4 * WORD, SLAB = 32 * CHUNK;
    // From a thread's part of the left side to the next: those of eight threads are in different banks.
    constexpr int PITCH = CHUNK + 4;
    __shared__ __align__(16) float left[FEW_ROWS][32 * PITCH];
    int lane = threadIdx.x % 32, column0 = (blockIdx.x * WARPS + threadIdx.x / 32) * COLUMNS;
    int row0 = blockIdx.y * FEW_ROWS, rows = min(FEW_ROWS, p.rows - row0);
    int block = 1 << p.log_block, all_steps = p.blocks << p.log_block, row_bytes = all_steps / 8 * BITS;
    bool whole = is_multiple(b, 16) && row_bytes % 16 == 0, has_floats = in.zeros && p.zero_row == 0;
    float sums[COLUMNS][FEW_ROWS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < FEW_ROWS; r++) sums[c][r] = 0.0f;
    }
    for (int k0 = 0; k0 < all_steps; k0 += SLAB) {
        int k = k0 + lane * CHUNK;
        uint4 codes[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int left_words = column0 + c < p.columns ? (all_steps - k) / WORD : 0;
            codes[c] = words_at(b + (int64)(column0 + c) * row_bytes + k / 8 * BITS, left_words, whole);
        }
        __syncthreads();
        for (int at = threadIdx.x; at < SLAB; at += 32 * WARPS) {
            float factor = 1.0f / (float)(1 << at % HALF * BITS);
            for (int r = 0; r < rows; r++) {
                float value = k0 + at < p.depth ? as_float(a[(int64)(row0 + r) * p.depth + k0 + at]) : 0.0f;
                left[r][at / CHUNK * PITCH + at % CHUNK] = value * factor;
            }
        }
        __syncthreads();
        float scales[COLUMNS], zeros[COLUMNS];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int step = k + w * WORD;
            if (step >= all_steps) break;
            if (w == 0 || opaque(block < CHUNK)) {
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    int column = min(column0 + c, p.columns - 1);
                    scales[c] = float_at(in.scales, p.scale_kind, column * p.blocks + (step >> p.log_block));
                    zeros[c] = zero_point(p, in.zeros, column, step >> p.log_block);
                }
            }
            float partial[COLUMNS][FEW_ROWS], whole_zeros[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                // A zero point of a type of floats may be no whole number.
                whole_zeros[c] = has_floats ? 0.0f : zeros[c];
#pragma unroll
                for (int r = 0; r < FEW_ROWS; r++) partial[c][r] = 0.0f;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float values[COLUMNS][HALF];
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    uint word = w == 0 ? codes[c].x : w == 1 ? codes[c].y : w == 2 ? codes[c].z : codes[c].w;
                    word = half ? word >> 16 : word;
#pragma unroll
                    for (int n = 0; n < HALF; n++) {
                        constexpr uint MASK = (1u << BITS) - 1;
                        uint code = (word & MASK << n * BITS) | BITS_OF_TWO_23;
                        values[c][n] = __uint_as_float(code) - (TWO_23 + whole_zeros[c] * (float)(1 << n * BITS));
                    }
                }
                const float* of_chunk = left[0] + lane * PITCH + w * WORD + half * HALF;
#pragma unroll
                for (int r = 0; r < FEW_ROWS; r++) {
                    if (opaque(r >= rows)) break;
                    float of_row[HALF];
#pragma unroll
                    for (int n = 0; n < HALF; n++) of_row[n] = of_chunk[r * 32 * PITCH + n];
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
                        for (int n = 0; n < HALF; n++) partial[c][r] += of_row[n] * values[c][n];
                    }
                    if (opaque(has_floats)) {
                        float sum = 0.0f;
#pragma unroll
                        for (int n = 0; n < HALF; n++) sum += of_row[n] * (float)(1 << n * BITS);
#pragma unroll
                        for (int c = 0; c < COLUMNS; c++) partial[c][r] -= zeros[c] * sum;
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
                for (int r = 0; r < FEW_ROWS; r++) sums[c][r] += scales[c] * partial[c][r];
            }
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < FEW_ROWS; r++) {
            float sum = warp_sum(sums[c][r]);
            if (lane == 0 && r < rows && column0 + c < p.columns) write_sum(y, p, in.bias, row0 + r, column0 + c, sum);
        }
    }
}

#define VECTORS(bits, suffix, type)                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_vectors_##bits##_1_##suffix(const type* a, const uint8* b, INPUTS, type* y, Weights p) {         \
        vectors<type, bits, 1>(a, b, ALL_INPUTS, y, p);                                                        \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_vectors_##bits##_4_##suffix(const type* a, const uint8* b, INPUTS, type* y, Weights p) {         \
        vectors<type, bits, 4>(a, b, ALL_INPUTS, y, p);                                                        \
    }
