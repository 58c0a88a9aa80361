// Products of float16 and bfloat16 by warpgroups: the steps of a lie side by side.
#pragma once

#include "gemm_tiles.cuh"
#include "warpgroups.cuh"

// A tile of a product. With several parts of the sums each block has one, and writes it as it is. Tiles are taken in bands of eight rows of them, so
// that what blocks read at the same time is near to a square.
template <typename T, int ROWS, int COLUMNS, int STAGES, bool NEAR>
__device__ inline void group_product(const T* a, const T* b, const T* c, const T* d, T* y, float* parts, const Product& p, const Finish& finish) {
    typedef GroupTile<T, ROWS, COLUMNS, STAGES, NEAR> Tile;
    constexpr int BAND = 8;
    unsigned char* memory = tile_memory();
    int of_matrix = blockIdx.x % (p.tiles_down * p.tiles_across), band = of_matrix / (BAND * p.tiles_across);
    int in_band = of_matrix % (BAND * p.tiles_across), high = min(BAND, p.tiles_down - band * BAND);
    int row0 = (band * BAND + in_band % high) * ROWS, column0 = in_band / high * COLUMNS;
    int batch = blockIdx.x / (p.tiles_down * p.tiles_across), batches = gridDim.x / (p.tiles_down * p.tiles_across);
    Places at = places_of(p, batch);
    a += at.a;
    b += at.b;
    Reads a_reads = p.a_vectors && (uint64)a % 16 == 0 ? VECTORS : ELEMENTS;
    Reads b_reads = p.b_vectors && (uint64)b % 16 == 0 ? VECTORS : p.b_column == 1 ? SHIFTED : ELEMENTS;
    int turns = (p.depth + STEPS - 1) / STEPS, share = (turns + gridDim.y - 1) / gridDim.y;
    int begin = min((int)blockIdx.y * share, turns), end = min(begin + share, turns);
    Tile tile;
    tile.multiply(shared_address(memory), begin, end, [&](int turn, uint left, uint right) {
        read_side<T, ROWS, true, Tile::LANES>(left, a, row0, p.rows, p.a_row, turn * STEPS, p.depth, p.a_depth, a_reads);
        read_side<T, COLUMNS, NEAR, Tile::LANES>(right, b, column0, p.columns, p.b_column, turn * STEPS, p.depth, p.b_depth, b_reads);
    });
    bool is_last = gridDim.y == 1;
    auto read = [&](int row, int column) {
        AddendsOfEight<T> addends;
        row += row0;
        column += column0;
        int count = is_last && row < p.rows ? p.columns - column : 0;
        if (c && count > 0) addends.c = eight_of(c + at.c + (int64)row * p.c_row + (int64)column * p.c_column, p.c_column, count, true);
        if (d && count > 0) addends.d = eight_of(d + at.d + (int64)row * p.d_row + (int64)column * p.d_column, p.d_column, count, true);
        return addends;
    };
    tile.template finish<AddendsOfEight<T>>(memory, read, [&](int row, int column, float (&eight)[8], const AddendsOfEight<T>& addends) {
        row += row0;
        column += column0;
        int count = min(p.columns - column, 8);
        if (row >= p.rows || count <= 0) return;
        if (!is_last) {
            write_part(parts + (((int64)blockIdx.y * batches + batch) * p.rows + row) * p.columns + column, count, eight);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (finish.alpha != 1.0f) eight[i] *= finish.alpha;
            if (c) eight[i] += finish.beta != 1.0f ? finish.beta * as_float(addends.c.of[i]) : as_float(addends.c.of[i]);
            if (d) eight[i] += as_float(addends.d.of[i]);
        }
        activate_all(eight, finish);
        write_eight(y + at.y + (int64)row * p.y_row + (int64)column * p.y_column, p.y_column, count, eight);
    });
}

// Results of the parts of their sums, of which there are `count` each.
template <typename T>
__device__ inline void join_product(const float* parts, int of_sum, uint count, const T* c, const T* d, T* y, const Product& p, const Finish& finish) {
    uint index = thread_index();
    if (index >= count) return;
    int column = index % p.columns, row = index / p.columns % p.rows;
    Places at = places_of(p, index / p.columns / p.rows);
    float own[1] = {0.0f};
    for (int part = 0; part < of_sum; part++) own[0] += parts[(int64)part * count + index];
    own[0] = with_addends(own[0], c, d, p, finish, at, row, column);
    activate_all(own, finish);
    y[at.y + (int64)row * p.y_row + (int64)column * p.y_column] = from_float<T>(own[0]);
}

#define GROUP_PRODUCT(name, type, lanes, blocks, ...)                                                                  \
    extern "C" __global__ void __launch_bounds__(lanes, blocks)                                                        \
        name(const type* a, const type* b, const type* c, const type* d, type* y, float* parts, Product p,             \
             Finish finish) {                                                                                          \
        group_product<type, __VA_ARGS__>(a, b, c, d, y, parts, p, finish);                                             \
    }
#define GROUP_PRODUCTS(suffix, type)                                                                                   \
    GROUP_PRODUCT(gemm_warpgroups_large_nn_##suffix, type, 256, 1, 128, 256, 4, false)                                 \
    GROUP_PRODUCT(gemm_warpgroups_large_nt_##suffix, type, 256, 1, 128, 256, 4, true)                                  \
    GROUP_PRODUCT(gemm_warpgroups_square_nn_##suffix, type, 256, 2, 128, 128, 3, false)                                \
    GROUP_PRODUCT(gemm_warpgroups_square_nt_##suffix, type, 256, 2, 128, 128, 3, true)                                 \
    GROUP_PRODUCT(gemm_warpgroups_wide_nn_##suffix, type, 128, 2, 64, 128, 4, false)                                   \
    GROUP_PRODUCT(gemm_warpgroups_wide_nt_##suffix, type, 128, 2, 64, 128, 4, true)                                    \
    GROUP_PRODUCT(gemm_warpgroups_small_nn_##suffix, type, 128, 2, 64, 64, 6, false)                                   \
    GROUP_PRODUCT(gemm_warpgroups_small_nt_##suffix, type, 128, 2, 64, 64, 6, true)                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        gemm_join_##suffix(const float* parts, const type* c, const type* d, type* y, Product p, Finish finish,        \
                           uint of_sum, uint count) {                                                                  \
        join_product<type>(parts, of_sum, count, c, d, y, p, finish);                                                  \
    }
