// Products on tensor cores: of float16 and bfloat16, and of float32 as TF32.
#pragma once

#include "cores.cuh"
#include "gemm_tiles.cuh"

#if __CUDA_ARCH__ >= 800
// A tile of BLOCK rows and columns by warps of WARP_ROWS times WARP_COLUMNS each; STAGES tiles are on their way at a time.
template <typename T, int BLOCK, int WARP_ROWS, int WARP_COLUMNS, int STAGES, bool A_NEAR, bool B_NEAR>
__device__ inline void core_tiles(const T* a, const T* b, const T* c, const T* d, T* y, const Product& p, const Finish& finish) {
    constexpr int LANES = BLOCK / WARP_ROWS * (BLOCK / WARP_COLUMNS) * 32;
    constexpr int DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 8;
    typedef CoreTile<T, BLOCK, A_NEAR> OfA;
    typedef CoreTile<T, BLOCK, B_NEAR> OfB;
    constexpr int STEPS = OfA::STEPS;
    __shared__ __align__(16) unsigned char memory[STAGES * (sizeof(OfA) + sizeof(OfB))];
    OfA* a_tiles = (OfA*)memory;
    OfB* b_tiles = (OfB*)(memory + STAGES * sizeof(OfA));
    int column0 = blockIdx.x % p.tiles_across * BLOCK;
    int row0 = blockIdx.x / p.tiles_across % p.tiles_down * BLOCK;
    Places at = places_of(p, blockIdx.x / p.tiles_across / p.tiles_down);
    a += at.a;
    b += at.b;
    bool a_vectors = p.a_vectors && (uint64)a % 16 == 0, b_vectors = p.b_vectors && (uint64)b % 16 == 0;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warp_row = warp / (BLOCK / WARP_COLUMNS) * WARP_ROWS, warp_column = warp % (BLOCK / WARP_COLUMNS) * WARP_COLUMNS;
    float sums[DOWN * ACROSS][4];
#pragma unroll
    for (int i = 0; i < DOWN * ACROSS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }
    int turns = (p.depth + STEPS - 1) / STEPS;
    auto read = [&](int turn) {
        if (turn < turns) {
            int to = turn % STAGES;
            a_tiles[to].template read<LANES>(a, row0, p.rows, p.a_row, turn * STEPS, p.depth, p.a_depth, a_vectors);
            b_tiles[to].template read<LANES>(b, column0, p.columns, p.b_column, turn * STEPS, p.depth, p.b_depth, b_vectors);
        }
        // An empty group, too, as groups are counted.
        commit_copies();
    };
    for (int turn = 0; turn < STAGES - 1; turn++) read(turn);
    for (int turn = 0; turn < turns; turn++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        // Into the tile of the turn before, which all warps are done with.
        read(turn + STAGES - 1);
        multiply_tiles<T, DOWN, ACROSS>(sums, a_tiles[turn % STAGES], b_tiles[turn % STAGES], warp_row, warp_column);
    }
    // Of each product of 16 times 8, a lane has two neighbours of one row and the two of the row eight below.
    bool whole = p.y_column == 1 && p.columns % 2 == 0 && (uint64)(y + at.y) % sizeof(Two<T>) == 0;
#pragma unroll 1
    for (int tile = 0; tile < DOWN * ACROSS; tile++, next_row(sums)) {
        float (&own)[4] = sums[0];
        int row0_of_tile = row0 + warp_row + tile / ACROSS * 16 + lane / 4;
        int column = column0 + warp_column + tile % ACROSS * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = row0_of_tile + j / 2 * 8;
            if (row < p.rows && column + j % 2 < p.columns) {
                own[j] = with_addends<T>(own[j], c, d, p, finish, at, row, column + j % 2);
            }
        }
        activate_all(own, finish);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = row0_of_tile + half * 8;
            if (row >= p.rows || column >= p.columns) continue;
            Two<T> two = {{from_float<T>(own[2 * half]), from_float<T>(own[2 * half + 1])}};
            T* to = y + at.y + (int64)row * p.y_row + (int64)column * p.y_column;
            if (whole) {
                *(Two<T>*)to = two;
            } else {
                to[0] = two.of[0];
                if (column + 1 < p.columns) to[p.y_column] = two.of[1];
            }
        }
    }
}
#endif

// The host takes these where the device has them.
#define CORE_PRODUCT(name, type, lanes, ...)                                                                   \
    extern "C" __global__ void __launch_bounds__(lanes, 1)                                                     \
        name(const type* a, const type* b, const type* c, const type* d, type* y, Product p, Finish finish) {  \
        core_tiles<type, __VA_ARGS__>(a, b, c, d, y, p, finish);                                               \
    }
#define CORE_PRODUCTS(suffix, type)                                                                            \
    CORE_PRODUCT(gemm_cores_large_nn_##suffix, type, 256, 128, 64, 32, 2, true, false)                         \
    CORE_PRODUCT(gemm_cores_large_nt_##suffix, type, 256, 128, 64, 32, 2, true, true)                          \
    CORE_PRODUCT(gemm_cores_large_tn_##suffix, type, 256, 128, 64, 32, 2, false, false)                        \
    CORE_PRODUCT(gemm_cores_large_tt_##suffix, type, 256, 128, 64, 32, 2, false, true)                         \
    CORE_PRODUCT(gemm_cores_small_nn_##suffix, type, 128, 64, 32, 32, 4, true, false)                          \
    CORE_PRODUCT(gemm_cores_small_nt_##suffix, type, 128, 64, 32, 32, 4, true, true)                           \
    CORE_PRODUCT(gemm_cores_small_tn_##suffix, type, 128, 64, 32, 32, 4, false, false)                         \
    CORE_PRODUCT(gemm_cores_small_tt_##suffix, type, 128, 64, 32, 32, 4, false, true)
