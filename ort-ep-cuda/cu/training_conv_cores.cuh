// Gradients of convolutions by their filters on tensor cores: of float16 and bfloat16, and of float32 as TF32. Those by images are transposed
// convolutions.
#pragma once

#include "conv_cores.cuh"

// What a step of the sums is: a window, by where its first element is among the pixels of a group's first channel, which of its taps meet the image,
// and where its result is among those of the group's first filter.
struct Window { int64 pixel, result; uint inside; };

template <typename T>
__device__ inline Window window_of(const Convolution& p, int k, int windows) {
    Window window = {0, 0, 0};
    if (k >= windows) return window;
    int of_output = volume(p.output), image = k / of_output, place[3];
    unflat(k % of_output, p.output, place);
    int first = 0;
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int at = place[axis] * p.strides[axis] - p.pads[axis];
        first = first * p.input[axis] + at;
        window.inside |= taps_of<false>(p, axis, at);
    }
    window.pixel = (int64)image * p.groups * p.channels * volume(p.input) + first;
    window.result = (int64)image * p.groups * p.filters * of_output + k % of_output;
    return window;
}

// A tile of FILTERS filters at COLUMNS channels and taps by warps of WARP_FILTERS times WARP_COLUMNS each. Results of neighbouring windows go
// straight into shared memory where they are whole vectors, pixels, which lie at any places, through registers. Each thread has one column. With several
// parts of the sums each block has one, and writes it as it is.
template <typename T, int FILTERS, int COLUMNS, int WARP_FILTERS, int WARP_COLUMNS>
__device__ inline void weight_tiles(const T* x, const T* upstream, T* gradient, float* parts, const Convolution& p) {
    constexpr int WARPS_ACROSS = COLUMNS / WARP_COLUMNS, LANES = FILTERS / WARP_FILTERS * WARPS_ACROSS * 32;
    constexpr int DOWN = WARP_FILTERS / 16, ACROSS = WARP_COLUMNS / 8;
    typedef CoreTile<T, FILTERS, true> OfResults;
    typedef CoreTile<T, COLUMNS, true> OfPixels;
    constexpr int VECTOR = OfPixels::VECTOR, STEPS = OfPixels::STEPS, CHUNKS = STEPS / VECTOR;
    constexpr int OWN = CHUNKS * COLUMNS / LANES;
    static_assert(LANES % COLUMNS == 0 && LANES >= STEPS, "each thread has one column, and there is one for each step");
    __shared__ __align__(16) OfResults results[2];
    __shared__ __align__(16) OfPixels pixels[2];
    __shared__ __align__(16) Window windows[2][STEPS];
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    // Blocks of the same columns are next to each other.
    int filter0 = blockIdx.x % p.tiles_down * FILTERS;
    int column0 = blockIdx.x / p.tiles_down % p.tiles_across * COLUMNS;
    int group = blockIdx.x / p.tiles_down / p.tiles_across;
    int of_output = volume(p.output), columns = p.channels * volume(p.kernel), depth = p.batch * of_output;
    int turns = (depth + STEPS - 1) / STEPS, share = (turns + p.parts - 1) / p.parts;
    int begin = blockIdx.y * share, end = min(begin + share, turns);
    x += (int64)group * p.channels * volume(p.input);
    upstream += (int64)group * p.filters * of_output;
    bool vectors = of_output % VECTOR == 0 && (uint64)upstream % 16 == 0;
    // How far the thread's elements are from the first ones of windows.
    Step column = step_of<false>(p, column0 + thread % COLUMNS, columns);
    auto describe = [&](int turn) {
        if (thread < STEPS) windows[turn % 2][thread] = window_of<T>(p, turn * STEPS + thread, depth);
    };
    T next[OWN][VECTOR];
    auto read = [&](int turn) {
        const Window* of_turn = windows[turn % 2];
#pragma unroll
        for (int i = 0; i < FILTERS * CHUNKS / LANES; i++) {
            int chunk = thread + i * LANES, line = chunk / CHUNKS, inner = chunk % CHUNKS * VECTOR;
            int left = filter0 + line < p.filters ? depth - turn * STEPS - inner : 0;
            const T* of_line = upstream + (left > 0 ? (int64)(filter0 + line) * of_output : 0);
            if (vectors) {
                copy_later(&results[turn % 2].of[line][inner], of_line + of_turn[inner].result, left > 0);
                continue;
            }
            Vector<T> vector;
#pragma unroll
            for (int j = 0; j < VECTOR; j++) vector.of[j] = j < left ? of_line[of_turn[inner + j].result] : T(0.0f);
            *(Vector<T>*)&results[turn % 2].of[line][inner] = vector;
        }
        commit_copies();
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            const Window* at = of_turn + (thread / COLUMNS + own * (LANES / COLUMNS)) * VECTOR;
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                bool there = (at[j].inside & column.needs) == column.needs;
                next[own][j] = there ? x[at[j].pixel + column.offset] : T(0.0f);
            }
        }
    };
    auto write = [&](int turn) {
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            Vector<T> vector;
#pragma unroll
            for (int j = 0; j < VECTOR; j++) vector.of[j] = next[own][j];
            int chunk = thread / COLUMNS + own * (LANES / COLUMNS);
            *(Vector<T>*)&pixels[turn % 2].of[thread % COLUMNS][chunk * VECTOR] = vector;
        }
    };
    float sums[DOWN * ACROSS][4];
#pragma unroll
    for (int i = 0; i < DOWN * ACROSS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }
    int warp_filter = warp / WARPS_ACROSS * WARP_FILTERS, warp_column = warp % WARPS_ACROSS * WARP_COLUMNS;
    auto multiply = [&](int turn) {
        multiply_tiles<T, DOWN, ACROSS>(sums, results[turn % 2], pixels[turn % 2], warp_filter, warp_column);
    };
    in_turns(begin, end, describe, read, write, multiply);
    // Of each product of 16 times 8, a lane has two neighbours of one filter and the two of the filter eight below.
    int64 part = (int64)blockIdx.y * p.groups * p.filters * columns;
#pragma unroll 1
    for (int tile = 0; tile < DOWN * ACROSS; tile++, next_row(sums)) {
        int filter = filter0 + warp_filter + tile / ACROSS * 16 + lane / 4;
        int to = column0 + warp_column + tile % ACROSS * 8 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int of_filter = filter + i / 2 * 8, of_column = to + i % 2;
            if (of_filter >= p.filters || of_column >= columns) continue;
            int64 at = ((int64)group * p.filters + of_filter) * columns + of_column;
            if (p.parts > 1) parts[part + at] = sums[0][i];
            else gradient[at] = from_float<T>(sums[0][i]);
        }
    }
}

#define GRADIENT(name, type, lanes, ...)                                                                       \
    extern "C" __global__ void __launch_bounds__(lanes, 1)                                                     \
        name(const type* x, const type* upstream, type* gradient, float* parts, Convolution p) {               \
        weight_tiles<type, __VA_ARGS__>(x, upstream, gradient, parts, p);                                      \
    }
#define GRADIENTS(suffix, type)                                                                                \
    GRADIENT(training_conv_cores_large_##suffix, type, 256, 128, 128, 64, 32)                                  \
    GRADIENT(training_conv_cores_small_##suffix, type, 128, 64, 64, 32, 32)                                    \
    GRADIENT(training_conv_cores_few_##suffix, type, 128, 32, 128, 32, 32)
