// Products of float16 and bfloat16 by warpgroups: the steps of a lie side by side.
#pragma once

#include "gemm_tiles.cuh"
#include "warpgroups.cuh"

// Where the tile of a block begins, and of which matrix. Tiles are taken in bands of eight rows of them, so that what blocks read at the same time is
// near to a square; divisions that are not needed are left out, as a small tile has hardly more to do.
struct TilePlace { int row, column, batch, batches; };
__device__ inline TilePlace tile_place(const Product& p, int rows, int columns) {
    constexpr int BAND = 8;
    int of_matrix = p.tiles_down * p.tiles_across, index = blockIdx.x, batch = 0, batches = 1, band = 0, high = p.tiles_down;
    if (gridDim.x != of_matrix) {
        batches = gridDim.x / of_matrix;
        batch = index / of_matrix;
        index %= of_matrix;
    }
    if (p.tiles_down > BAND) {
        band = index / (BAND * p.tiles_across);
        index %= BAND * p.tiles_across;
        high = min(BAND, p.tiles_down - band * BAND);
    }
    return {(band * BAND + index % high) * rows, index / high * columns, batch, batches};
}

// A tile of a product. With several parts of the sums each block has one, and writes it as it is.
template <typename T, int ROWS, int COLUMNS, int STAGES, bool NEAR>
__device__ inline void group_product(const T* a, const T* b, const T* c, const T* d, T* y, float* parts, const Product& p, const Finish& finish) {
    typedef GroupTile<T, ROWS, COLUMNS, STAGES, NEAR> Tile;
    unsigned char* memory = tile_memory();
    TilePlace place = tile_place(p, ROWS, COLUMNS);
    Places at = place.batches > 1 ? places_of(p, place.batch) : Places{0, 0, 0, 0, 0};
    a += at.a;
    b += at.b;
    Reads a_reads = p.a_vectors && (uint64)a % 16 == 0 ? VECTORS : ELEMENTS;
    Reads b_reads = p.b_vectors && (uint64)b % 16 == 0 ? VECTORS : p.b_column == 1 ? SHIFTED : ELEMENTS;
    Turns turns = turns_of_part(p.depth);
    SideReader<T, ROWS, true, Tile::LANES> of_a(a, place.row, p.rows, p.a_row, turns.first * STEPS, p.depth, p.a_depth, a_reads);
    SideReader<T, COLUMNS, NEAR, Tile::LANES> of_b(b, place.column, p.columns, p.b_column, turns.first * STEPS, p.depth, p.b_depth, b_reads);
    Tile tile;
    tile.multiply(shared_address(memory), turns.count, [&](uint left, uint right) {
        of_a.read(left);
        of_b.read(right);
    });
    Results<T> results = {place.row, place.column, p.rows, p.columns};
    if (gridDim.y > 1) {
        results.part = {parts + (int64)(blockIdx.y * place.batches + place.batch) * p.rows * p.columns, p.columns, 1};
    } else {
        if (c) results.c = {c + at.c, p.c_row, p.c_column};
        if (d) results.d = {d + at.d, p.d_row, p.d_column};
        results.y = {y + at.y, p.y_row, p.y_column};
    }
    tile.finish(memory, results, finish);
}

// Results of the parts of their sums, of which there are `count` each.
template <typename T>
__device__ inline void join_product(const float* parts, int of_sum, uint count, const T* c, const T* d, T* y, const Product& p, const Finish& finish) {
    uint of_matrix = (uint)p.rows * p.columns;
    join_parts<T>(parts, of_sum, count, finish, [&](uint index) {
        int batch = count == of_matrix ? 0 : index / of_matrix;
        uint within = index - batch * of_matrix;
        int row = within / (uint)p.columns, column = within % (uint)p.columns;
        Places at = batch == 0 ? Places{0, 0, 0, 0, 0} : places_of(p, batch);
        ElementPlace<T> place = {nullptr, nullptr, y + at.y + (int64)row * p.y_row + (int64)column * p.y_column};
        if (c) place.c = c + at.c + (int64)row * p.c_row + (int64)column * p.c_column;
        if (d) place.d = d + at.d + (int64)row * p.d_row + (int64)column * p.d_column;
        return place;
    });
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
    GROUP_PRODUCT(gemm_warpgroups_tall_nn_##suffix, type, 256, 2, 128, 64, 4, false)                                   \
    GROUP_PRODUCT(gemm_warpgroups_tall_nt_##suffix, type, 256, 2, 128, 64, 4, true)                                    \
    GROUP_PRODUCT(gemm_warpgroups_small_nn_##suffix, type, 128, 2, 64, 64, 6, false)                                   \
    GROUP_PRODUCT(gemm_warpgroups_small_nt_##suffix, type, 128, 2, 64, 64, 6, true)                                    \
    GROUP_PRODUCT(gemm_warpgroups_narrow_nt_##suffix, type, 128, 2, 64, 32, 8, true)                                   \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        gemm_join_##suffix(const float* parts, const type* c, const type* d, type* y, Product p, Finish finish,        \
                           uint of_sum, uint count) {                                                                  \
        join_product<type>(parts, of_sum, count, c, d, y, p, finish);                                                  \
    }
