// Convolutions with the channels last by warpgroups: of float16 and bfloat16. What is multiplied is as on other tensor cores, conv_pixels_cores.cuh.
#pragma once

#include "conv_pixels_cores.cuh"
#include "warpgroups.cuh"

// A chunk of eight steps of windows, all of one tap, moved on turn by turn: divisions would take longer than a turn.
struct PixelWalk {
    int channel, taps[3];
    Step step;

    __device__ PixelWalk(const Convolution& p, int k) {
        channel = k % p.channels;
        unflat(k / p.channels, p.kernel, taps);
        describe(p);
    }
    __device__ void describe(const Convolution& p) {
        step = {0, 0};
#pragma unroll
        for (int axis = 0; axis < 3; axis++) {
            step.offset = step.offset * p.input[axis] + taps[axis] * p.dilations[axis];
            step.needs |= bit_of(p, axis, taps[axis]);
        }
        step.offset = step.offset * p.groups * p.channels + channel;
        // No window has all bits.
        if (taps[0] >= p.kernel[0]) step.needs = ~0u;
    }
    __device__ void advance(const Convolution& p) {
        channel += STEPS;
        step.offset += STEPS;
        if (channel < p.channels) return;
        do {
            channel -= p.channels;
            if (++taps[2] == p.kernel[2]) {
                taps[2] = 0;
                if (++taps[1] == p.kernel[1]) {
                    taps[1] = 0;
                    taps[0]++;
                }
            }
        } while (channel >= p.channels);
        describe(p);
    }
};

// A tile of COLUMNS filters at ROWS positions; the host sees to it that the channels of a group are whole chunks. With several parts of the sums each
// block has one, and writes it as it is.
template <typename T, int ROWS, int COLUMNS, int STAGES>
__device__ inline void pixel_group_tiles(const T* x, const T* w, const T* bias, const T* addend, T* y, float* parts, const Convolution& p,
                                         const Finish& finish) {
    typedef GroupTile<T, ROWS, COLUMNS, STAGES, true> Tile;
    // Chunks of a row, all of whose threads are next to each other; of each of its windows a thread reads the same chunk.
    constexpr int CHUNKS = STEPS / 8, DOWN = Tile::LANES / CHUNKS, OWN = ROWS / DOWN;
    __shared__ Origin origins[ROWS];
    unsigned char* memory = tile_memory();
    int filter0 = blockIdx.x % p.tiles_down * COLUMNS, across = blockIdx.x / p.tiles_down, group = 0;
    if (p.groups > 1) {
        group = across / p.tiles_across;
        across %= p.tiles_across;
    }
    int position0 = across * ROWS, first_filter = group * p.filters;
    int depth = p.channels * volume(p.kernel), positions = p.batch * volume(p.output), of_all = p.groups * p.filters;
    Turns turns = turns_of_part(depth);
    x += group * p.channels;
    w += (int64)first_filter * depth;
    // Each window is divided into its coordinates once.
    if (threadIdx.x < ROWS) origins[threadIdx.x] = origin_of(p, position0 + threadIdx.x, positions);
    int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    PixelWalk walk(p, turns.first * STEPS + chunk * 8);
    Reads w_reads = (uint64)w % 16 == 0 ? VECTORS : ELEMENTS;
    SideReader<T, COLUMNS, true, Tile::LANES> of_w(w, filter0, p.filters, depth, turns.first * STEPS, depth, 1, w_reads);
    __syncthreads();
    const T* windows[OWN];
    uint inside[OWN];
#pragma unroll
    for (int own = 0; own < OWN; own++) {
        windows[own] = x + origins[line + own * DOWN].first;
        inside[own] = origins[line + own * DOWN].inside;
    }
    bool in_vectors = (uint64)x % 16 == 0;
    Tile tile;
    tile.multiply(shared_address(memory), turns.count, [&](uint left, uint right) {
        uint to = swizzled(left, line, chunk);
#pragma unroll
        for (int own = 0; own < OWN; own++, to += DOWN * 128) {
            bool there = (inside[own] & walk.step.needs) == walk.step.needs;
            const T* from = windows[own] + walk.step.offset;
            if (in_vectors) {
                copy_later(to, from, there);
            } else {
#pragma unroll 1
                for (int i = 0; i < 8; i++) write_half(to + 2 * i, there ? from[i] : T(0.0f));
            }
        }
        of_w.read(right);
        walk.advance(p);
    });
    Results<T> results = {position0, filter0, positions, p.filters};
    if (gridDim.y > 1) {
        results.part = {parts + (int64)blockIdx.y * positions * of_all + first_filter, of_all, 1};
    } else {
        if (bias) results.c = {bias + first_filter, 0, 1};
        if (addend) results.d = {addend + first_filter, of_all, 1};
        results.y = {y + first_filter, of_all, 1};
    }
    tile.finish(memory, results, finish);
}

// Results of the parts of their sums.
template <typename T>
__device__ inline void join_pixels(const float* parts, const T* bias, const T* addend, T* y, const Convolution& p, const Finish& finish, uint count) {
    join_parts<T>(parts, p.parts, count, finish, [&](uint index) {
        uint filter = index % (uint)(p.groups * p.filters);
        return ElementPlace<T>{bias ? bias + filter : nullptr, addend ? addend + index : nullptr, y + index};
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
    GROUP_CONVOLUTION(conv_pixels_warpgroups_narrow_##suffix, type, 128, 2, 64, 32, 8)                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        conv_pixels_join_##suffix(const float* parts, const type* bias, const type* addend, type* y,                   \
                                 Convolution p, Finish finish, uint count) {                                           \
        join_pixels(parts, bias, addend, y, p, finish, count);                                                         \
    }
