// Sums of tiles on tensor cores, of lines of 16 words of steps in shared memory, and how tiles of sums are written.
#pragma once

#include "cores.cuh"

constexpr int THREADS = 256;
// Words of a line of a tile, and from a line to the next: so that those of eight lines are in different banks.
constexpr int WORDS = 16, PITCH = WORDS + 4;

#if __CUDA_ARCH__ >= 800
// A thread's part of a tile of results, in the registers of a warp's products of T: 2 by 4 warps. Of the two steps of a tile so many are
// read at once.
template <typename T, typename Sum, int LINES, int ABREAST> struct CoreSums {
    static constexpr int DOWN = LINES / 32, ACROSS = LINES / 32;
    Sum sums[DOWN][ACROSS][4];

    static __device__ int row0() { return threadIdx.x / 128 * (LINES / 2) + threadIdx.x % 32 / 4; }
    static __device__ int column0() { return threadIdx.x / 32 % 4 * (LINES / 4); }

    __device__ void add(const uint* a, const uint* b) {
        int inner = threadIdx.x % 4;
        a += row0() * PITCH + inner;
        b += (column0() + threadIdx.x % 32 / 4) * PITCH + inner;
#pragma unroll ABREAST
        for (int step = 0; step < WORDS; step += 8) {
            uint right[ACROSS][2];
#pragma unroll
            for (int n = 0; n < ACROSS; n++) {
                right[n][0] = b[8 * n * PITCH + step];
                right[n][1] = b[8 * n * PITCH + step + 4];
            }
#pragma unroll
            for (int m = 0; m < DOWN; m++) {
                const uint* at = a + 16 * m * PITCH + step;
                uint left[4] = {at[0], at[8 * PITCH], at[4], at[8 * PITCH + 4]};
#pragma unroll
                for (int n = 0; n < ACROSS; n++) multiply(T(), sums[m][n], left, right[n][0], right[n][1]);
            }
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < DOWN; m++) {
#pragma unroll
            for (int n = 0; n < ACROSS; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) sums[m][n][k] = Sum(0);
            }
        }
    }

    // Calls `to(row, column, sum)` for each place of the tile that the thread has.
    template <typename To> __device__ void each(To to) const {
#pragma unroll
        for (int m = 0; m < DOWN; m++) {
#pragma unroll
            for (int n = 0; n < ACROSS; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    to(row0() + 16 * m + 8 * (k >> 1), column0() + 8 * n + threadIdx.x % 4 * 2 + (k & 1), sums[m][n][k]);
                }
            }
        }
    }
};
#endif

// Writes a tile of LINES by LINES sums, 64 rows at a time side by side in shared memory: `row_of` and `column_of` are the lines of those that
// threads have, `write(row, column, sum)` is called in the order of a row.
template <int LINES, typename Sum, typename Sums, typename Row, typename Column, typename Write>
__device__ inline void write_tile(Sum* staged, const Sums& sums, const Row& row_of, const Column& column_of, const Write& write) {
#pragma unroll 1
    for (int first = 0; first < LINES; first += 64) {
        sums.each([&](int i, int j, Sum sum) {
            int row = row_of(i) - first;
            if ((uint)row < 64) staged[row * (LINES + 4) + column_of(j)] = sum;
        });
        __syncthreads();
#pragma unroll 1
        for (int at = threadIdx.x; at < 64 * LINES; at += THREADS) {
            write(first + at / LINES, at % LINES, staged[at / LINES * (LINES + 4) + at % LINES]);
        }
        __syncthreads();
    }
}
