// Convolutions over up to three axes: products of filters with windows that are never unfolded. Of a transposed convolution, the windows lie
// on the result.

#pragma once

#include "gemm.cuh"
#include "window_tiles.cuh"

// A sum with bias and addend, activated and written.
template <typename T>
__device__ inline void finish_at(T* y, int64 at, int filter, float sum, const T* bias, const T* addend, const Finish& finish) {
    float own[1] = {sum};
    if (bias) own[0] += as_float(bias[filter]);
    if (addend) own[0] += as_float(addend[at]);
    activate_all(own, finish);
    y[at] = from_float<T>(own[0]);
}

// What a step of the sums is: a channel and a tap of the window.
struct Tap { int channel, weight, at[3]; };

// Where the place of a tap is in a channel of the image, or -1 outside of it.
template <bool TRANSPOSED>
__device__ inline int place_of(const Convolution& p, const int (&origin)[3], const Tap& tap) {
    int place = 0;
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int at = TRANSPOSED ? origin[axis] - tap.at[axis] : origin[axis] + tap.at[axis];
        if (TRANSPOSED) {
            if (p.strides[axis] != 1) {
                if (at < 0 || at % p.strides[axis] != 0) return -1;
                at /= p.strides[axis];
            }
        }
        if ((uint)at >= (uint)p.input[axis]) return -1;
        place = place * p.input[axis] + at;
    }
    return place;
}

// 64 filters at 64 positions by a block; each thread has four of both. Of each tile of 16 steps it reads four of one position.
template <typename T, bool TRANSPOSED>
__device__ inline void tiles(const T* x, const T* w, const T* bias, const T* addend, T* y, const Convolution& p, const Finish& finish) {
    __shared__ __align__(16) Tiles memory;
    __shared__ Tap taps[2][DEPTH];
    int thread = threadIdx.x;
    int position0 = blockIdx.x % p.tiles_across * BLOCK;
    int filter0 = blockIdx.x / p.tiles_across % p.tiles_down * BLOCK;
    int group = blockIdx.x / p.tiles_across / p.tiles_down;
    int of_input = volume(p.input), of_output = volume(p.output), of_kernel = volume(p.kernel);
    int depth = p.channels * of_kernel, positions = p.batch * of_output;
    // The position whose windows the thread reads.
    int position = position0 + thread % BLOCK;
    bool there = position < positions;
    int origin[3];
    unflat(there ? position % of_output : 0, p.output, origin);
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        origin[axis] = TRANSPOSED ? origin[axis] + p.pads[axis] : origin[axis] * p.strides[axis] - p.pads[axis];
    }
    const T* image = x + ((int64)(there ? position / of_output : 0) * p.groups + group) * p.channels * of_input;
    const T* weights = w + (int64)group * p.filters * p.channels * of_kernel;
    int of_filter = TRANSPOSED ? of_kernel : depth;
    auto describe = [&](int k0) {
        int k = k0 + thread;
        if (thread >= DEPTH || k >= depth) return;
        Tap tap;
        tap.channel = k / of_kernel;
        tap.weight = TRANSPOSED ? tap.channel * p.filters * of_kernel + k % of_kernel : k;
        unflat(k % of_kernel, p.kernel, tap.at);
#pragma unroll
        for (int axis = 0; axis < 3; axis++) tap.at[axis] *= p.dilations[axis];
        taps[k0 / DEPTH % 2][thread] = tap;
    };
    float x_next[4], w_next[4];
    auto read = [&](int k0) {
        const Tap* of_tile = taps[k0 / DEPTH % 2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int k = thread / BLOCK + 4 * i;
            x_next[i] = 0.0f;
            if (there && k0 + k < depth) {
                Tap tap = of_tile[k];
                int place = place_of<TRANSPOSED>(p, origin, tap);
                if (place >= 0) x_next[i] = as_float(image[(int64)tap.channel * of_input + place]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int k = thread % DEPTH, filter = filter0 + thread / DEPTH + 16 * i;
            w_next[i] = 0.0f;
            if (filter < p.filters && k0 + k < depth) {
                w_next[i] = as_float(weights[(int64)filter * of_filter + of_tile[k].weight]);
            }
        }
    };
    auto write = [&](Tiles& to, int stage) {
#pragma unroll
        for (int i = 0; i < 4; i++) to.columns[stage][thread / BLOCK + 4 * i][thread % BLOCK] = x_next[i];
#pragma unroll
        for (int i = 0; i < 4; i++) to.rows[stage][thread % DEPTH][thread / DEPTH + 16 * i] = w_next[i];
    };
    float sums[4][4] = {};
    multiply_windows(memory, 0, depth, sums, describe, read, write);
    int own_position = thread % 16 * 4, own_filter = thread / 16 * 4;
#pragma unroll 1
    for (int i = 0; i < 4; i++, next_row(sums)) {
        int filter = filter0 + own_filter + i;
        if (filter >= p.filters) continue;
        int of_all = group * p.filters + filter;
#pragma unroll 1
        for (int j = 0; j < 4; j++) {
            int to = position0 + own_position + j;
            if (to < positions) {
                int64 at = ((int64)(to / of_output) * p.groups * p.filters + of_all) * of_output + to % of_output;
                finish_at(y, at, of_all, sums[0][0], bias, addend, finish);
            }
            sums[0][0] = sums[0][1];
            sums[0][1] = sums[0][2];
            sums[0][2] = sums[0][3];
        }
    }
}

// Filters of few channels, such as depthwise ones: each result by a thread.
template <typename T>
__device__ inline void planes(const T* x, const T* w, const T* bias, const T* addend, T* y, const Convolution& p, const Finish& finish, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    int of_output = volume(p.output), of_input = volume(p.input), of_kernel = volume(p.kernel);
    int unit = index / of_output, filter = unit % (p.groups * p.filters);
    int origin[3];
    unflat(index % of_output, p.output, origin);
    int first[3], end[3];
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        origin[axis] = origin[axis] * p.strides[axis] - p.pads[axis];
        taps_inside(p, axis, origin[axis], first[axis], end[axis]);
    }
    const T* image = x + (int64)(unit / p.filters) * p.channels * of_input;
    const T* taps = w + (int64)filter * p.channels * of_kernel;
    float sum = 0.0f;
    for (int channel = 0; channel < p.channels; channel++, image += of_input, taps += of_kernel) {
        for (int i = first[0]; i < end[0]; i++) {
            for (int j = first[1]; j < end[1]; j++) {
                const T* row = image + ((origin[0] + i * p.dilations[0]) * p.input[1] + origin[1] + j * p.dilations[1]) * p.input[2];
                const T* of_row = taps + (i * p.kernel[1] + j) * p.kernel[2];
                for (int k = first[2]; k < end[2]; k++) {
                    sum += as_float(row[origin[2] + k * p.dilations[2]]) * as_float(of_row[k]);
                }
            }
        }
    }
    finish_at(y, index, filter, sum, bias, addend, finish);
}

#define CONVOLUTIONS(suffix, type)                                                                             \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                       \
        conv_tiles_##suffix(const type* x, const type* w, const type* bias, const type* addend, type* y,       \
                            Convolution p, Finish finish, uint count) {                                        \
        tiles<type, false>(x, w, bias, addend, y, p, finish);                                                  \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                       \
        conv_transposed_##suffix(const type* x, const type* w, const type* bias, const type* addend, type* y,  \
                                 Convolution p, Finish finish, uint count) {                                   \
        tiles<type, true>(x, w, bias, addend, y, p, finish);                                                   \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        conv_planes_##suffix(const type* x, const type* w, const type* bias, const type* addend, type* y,      \
                             Convolution p, Finish finish, uint count) {                                       \
        planes(x, w, bias, addend, y, p, finish, count);                                                       \
    }
