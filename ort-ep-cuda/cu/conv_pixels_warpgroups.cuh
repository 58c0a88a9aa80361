// Convolutions with the channels last by warpgroups: of float16 and bfloat16. What is multiplied is as on other tensor cores, conv_pixels_cores.cuh.
#pragma once

#include "conv_pixels_cores.cuh"
#include "warpgroups.cuh"

// A tile of COLUMNS filters at ROWS positions. With several parts of the sums each block has one, and writes it as it is.
template <typename T, int ROWS, int COLUMNS, int STAGES>
__device__ inline void pixel_group_tiles(const T* x, const T* w, const T* bias, const T* addend, T* y, float* parts, const Convolution& p,
                                         const Finish& finish) {
    typedef GroupTile<T, ROWS, COLUMNS, STAGES, true> Tile;
    // Chunks of a row, all of whose threads are next to each other; of each of its windows a thread reads the same chunk.
    constexpr int CHUNKS = STEPS / 8, DOWN = Tile::LANES / CHUNKS, OWN = ROWS / DOWN;
    unsigned char* memory = tile_memory();
    int filter0 = blockIdx.x % p.tiles_down * COLUMNS;
    int position0 = blockIdx.x / p.tiles_down % p.tiles_across * ROWS;
    int group = blockIdx.x / p.tiles_down / p.tiles_across;
    int depth = p.channels * volume(p.kernel), positions = p.batch * volume(p.output), of_all = p.groups * p.filters;
    int turns = (depth + STEPS - 1) / STEPS, share = (turns + p.parts - 1) / p.parts;
    int begin = min((int)blockIdx.y * share, turns), end = min(begin + share, turns);
    x += group * p.channels;
    w += (int64)group * p.filters * depth;
    bool x_vectors = p.channels % 8 == 0 && (uint64)x % 16 == 0, w_vectors = depth % 8 == 0 && (uint64)w % 16 == 0;
    int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    Origin origins[OWN];
#pragma unroll
    for (int own = 0; own < OWN; own++) origins[own] = origin_of(p, position0 + line + own * DOWN, positions);
    Tile tile;
    tile.multiply(shared_address(memory), begin, end, [&](int turn, uint left, uint right) {
        int k0 = turn * STEPS + chunk * 8;
        auto is_there = [](const Origin& origin, const Step& step) { return (origin.inside & step.needs) == step.needs; };
        if (x_vectors) {
            Step step = pixel_step_of(p, k0, depth);
#pragma unroll
            for (int own = 0; own < OWN; own++) {
                bool there = is_there(origins[own], step);
                copy_later(swizzled(left, line + own * DOWN, chunk), there ? x + origins[own].first + step.offset : x, there);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < 8; i++) {
                Step step = pixel_step_of(p, k0 + i, depth);
#pragma unroll
                for (int own = 0; own < OWN; own++) {
                    T one = is_there(origins[own], step) ? x[origins[own].first + step.offset] : T(0.0f);
                    write_half(swizzled(left, line + own * DOWN, chunk) + 2 * i, one);
                }
            }
        }
        read_side<T, COLUMNS, true, Tile::LANES>(right, w, filter0, p.filters, depth, turn * STEPS, depth, 1, w_vectors ? VECTORS : ELEMENTS);
    });
    auto read = [&](int row, int column) {
        int position = position0 + row, filter = filter0 + column, count = position < positions && p.parts == 1 ? p.filters - filter : 0;
        AddendsOfEight<T> addends;
        if (bias && count > 0) addends.c = eight_of(bias + group * p.filters + filter, 1, count, true);
        if (addend && count > 0) addends.d = eight_of(addend + (int64)position * of_all + group * p.filters + filter, 1, count, true);
        return addends;
    };
    tile.template finish<AddendsOfEight<T>>(memory, read, [&](int row, int column, float (&eight)[8], const AddendsOfEight<T>& addends) {
        int position = position0 + row, filter = filter0 + column, count = min(p.filters - filter, 8);
        if (position >= positions || count <= 0) return;
        int64 at = (int64)position * of_all + group * p.filters + filter;
        if (p.parts > 1) {
            write_part(parts + (int64)blockIdx.y * positions * of_all + at, count, eight);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (bias) eight[i] += as_float(addends.c.of[i]);
            if (addend) eight[i] += as_float(addends.d.of[i]);
        }
        activate_all(eight, finish);
        write_eight(y + at, 1, count, eight);
    });
}

#define GROUP_CONVOLUTION(name, type, lanes, blocks, ...)                                                              \
    extern "C" __global__ void __launch_bounds__(lanes, blocks)                                                        \
        name(const type* x, const type* w, const type* bias, const type* addend, type* y, float* parts,                \
             Convolution p, Finish finish) {                                                                           \
        pixel_group_tiles<type, __VA_ARGS__>(x, w, bias, addend, y, parts, p, finish);                                 \
    }
#define PIXEL_GROUPS(suffix, type)                                                                                     \
    GROUP_CONVOLUTION(conv_pixels_warpgroups_large_##suffix, type, 256, 1, 128, 256, 4)                                \
    GROUP_CONVOLUTION(conv_pixels_warpgroups_square_##suffix, type, 256, 2, 128, 128, 3)                               \
    GROUP_CONVOLUTION(conv_pixels_warpgroups_tall_##suffix, type, 256, 2, 128, 64, 4)                                  \
    GROUP_CONVOLUTION(conv_pixels_warpgroups_small_##suffix, type, 128, 2, 64, 64, 6)                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        conv_pixels_join_##suffix(const float* parts, const type* bias, const type* addend, type* y,                   \
                                 Convolution p, Finish finish, uint count) {                                           \
        pixel_join(parts, bias, addend, y, p, finish, count);                                                          \
    }
