// Products over windows in tiles of registers.
#pragma once

#include "windows.cuh"

// Of a tile, which 256 threads compute: each has four rows and four columns, and of each step four elements of both sides on their way.
constexpr int BLOCK = 64, DEPTH = 16;
struct Tiles { float rows[2][DEPTH][BLOCK + 4], columns[2][DEPTH][BLOCK + 4]; };

// The sums of a tile over the steps from `first` to before `end`. What `describe` says of a step is read two calls later, by all threads.
template <typename Describe, typename Read, typename Write>
__device__ inline void multiply_windows(Tiles& tiles, int first, int end, float (&sums)[4][4], const Describe& describe, const Read& read,
                                        const Write& write) {
    int own_row = threadIdx.x / 16 * 4, own_column = threadIdx.x % 16 * 4;
    describe(first);
    describe(first + DEPTH);
    __syncthreads();
    read(first);
    write(tiles, 0);
    __syncthreads();
    for (int k0 = first, now = 0; k0 < end; k0 += DEPTH, now ^= 1) {
        bool more = k0 + DEPTH < end;
        if (more) read(k0 + DEPTH);
        // What there is of this tile was read before the last barrier, that of the next one just now.
        describe(k0 + 2 * DEPTH);
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            Pack<float, 4> left = *(const Pack<float, 4>*)&tiles.rows[now][k][own_row];
            Pack<float, 4> right = *(const Pack<float, 4>*)&tiles.columns[now][k][own_column];
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] += left.of[i] * right.of[j];
            }
        }
        if (more) write(tiles, now ^ 1);
        __syncthreads();
    }
}
