// Convolutions of images with the channels of a pixel side by side, and of filters [filters, taps, channels].
#pragma once

#include "conv.cuh"

// A window: the places of its taps before the first one, and the first pixel of its image, or -1 behind the last window.
struct WindowAt { int origin[3], image; };

__device__ inline WindowAt window_at(const Convolution& p, int position) {
    WindowAt window;
    int of_output = volume(p.output);
    unflat(position % of_output, p.output, window.origin);
#pragma unroll
    for (int axis = 0; axis < 3; axis++) window.origin[axis] = window.origin[axis] * p.strides[axis] - p.pads[axis];
    window.image = position < p.batch * of_output ? position / of_output * volume(p.input) : -1;
    return window;
}

// 64 filters at 64 positions by a block; each thread has four of both. Of each tile of 16 steps, a channel and a tap each, it reads one step of
// four positions and of four filters: its neighbours read neighbouring channels.
template <typename T>
__device__ inline void pixel_tiles(const T* x, const T* w, const T* bias, const T* addend, T* y, const Convolution& p, const Finish& finish) {
    __shared__ __align__(16) Tiles memory;
    __shared__ __align__(16) WindowAt windows[BLOCK];
    __shared__ Tap taps[2][DEPTH];
    int thread = threadIdx.x, own_step = thread % DEPTH, own_line = thread / DEPTH;
    int filter0 = blockIdx.x % p.tiles_down * BLOCK;
    int position0 = blockIdx.x / p.tiles_down % p.tiles_across * BLOCK;
    int group = blockIdx.x / p.tiles_down / p.tiles_across;
    int depth = p.channels * volume(p.kernel), positions = p.batch * volume(p.output), of_pixel = p.groups * p.channels;
    if (thread < BLOCK) windows[thread] = window_at(p, position0 + thread);
    x += group * p.channels;
    w += (int64)group * p.filters * depth;
    auto describe = [&](int k0) {
        int k = k0 + thread;
        if (thread >= DEPTH || k >= depth) return;
        Tap tap;
        tap.channel = k % p.channels;
        tap.weight = k;
        unflat(k / p.channels, p.kernel, tap.at);
#pragma unroll
        for (int axis = 0; axis < 3; axis++) tap.at[axis] *= p.dilations[axis];
        taps[k0 / DEPTH % 2][thread] = tap;
    };
    float x_next[4], w_next[4];
    auto read = [&](int k0) {
        bool there = k0 + own_step < depth;
        Tap tap = taps[k0 / DEPTH % 2][own_step];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            WindowAt window = windows[own_line + 16 * i];
            int place = there && window.image >= 0 ? place_of<false>(p, window.origin, tap) : -1;
            x_next[i] = place >= 0 ? as_float(x[(int64)(window.image + place) * of_pixel + tap.channel]) : 0.0f;
            int filter = filter0 + own_line + 16 * i;
            w_next[i] = there && filter < p.filters ? as_float(w[(int64)filter * depth + tap.weight]) : 0.0f;
        }
    };
    auto write = [&](Tiles& to, int stage) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to.rows[stage][own_step][own_line + 16 * i] = x_next[i];
            to.columns[stage][own_step][own_line + 16 * i] = w_next[i];
        }
    };
    float sums[4][4] = {};
    multiply_windows(memory, 0, depth, sums, describe, read, write);
    int own_position = thread / 16 * 4, own_filter = thread % 16 * 4;
#pragma unroll 1
    for (int i = 0; i < 4; i++, next_row(sums)) {
        int position = position0 + own_position + i;
        if (position >= positions) continue;
#pragma unroll 1
        for (int j = 0; j < 4; j++) {
            int filter = filter0 + own_filter + j;
            if (filter < p.filters) {
                int of_all = group * p.filters + filter;
                finish_at(y, (int64)position * p.groups * p.filters + of_all, of_all, sums[0][0], bias, addend, finish);
            }
            sums[0][0] = sums[0][1];
            sums[0][1] = sums[0][2];
            sums[0][2] = sums[0][3];
        }
    }
}

// Filters of few channels, such as depthwise ones: each result by a thread, whose neighbours have those of the same pixel.
template <typename T>
__device__ inline void pixel_planes(const T* x, const T* w, const T* bias, const T* addend, T* y, const Convolution& p, const Finish& finish,
                                    uint count) {
    uint index = thread_index();
    if (index >= count) return;
    int filters = p.groups * p.filters, filter = index % filters, of_pixel = p.groups * p.channels;
    WindowAt window = window_at(p, index / filters);
    int first[3], end[3];
#pragma unroll
    for (int axis = 0; axis < 3; axis++) taps_inside(p, axis, window.origin[axis], first[axis], end[axis]);
    const T* image = x + (int64)window.image * of_pixel + filter / p.filters * p.channels;
    const T* taps = w + (int64)filter * volume(p.kernel) * p.channels;
    float sum = 0.0f;
    for (int i = first[0]; i < end[0]; i++) {
        for (int j = first[1]; j < end[1]; j++) {
            int row = ((window.origin[0] + i * p.dilations[0]) * p.input[1] + window.origin[1] + j * p.dilations[1]) * p.input[2];
            int of_row = (i * p.kernel[1] + j) * p.kernel[2];
            for (int k = first[2]; k < end[2]; k++) {
                const T* pixel = image + (int64)(row + window.origin[2] + k * p.dilations[2]) * of_pixel;
                const T* of_tap = taps + (int64)(of_row + k) * p.channels;
                for (int channel = 0; channel < p.channels; channel++) sum += as_float(pixel[channel]) * as_float(of_tap[channel]);
            }
        }
    }
    finish_at(y, index, filter, sum, bias, addend, finish);
}

#define PIXEL_CONVOLUTIONS(suffix, type)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                       \
        conv_pixels_tiles_##suffix(const type* x, const type* w, const type* bias, const type* addend, type* y, \
                                  Convolution p, Finish finish, uint count) {                                  \
        pixel_tiles<type>(x, w, bias, addend, y, p, finish);                                                   \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        conv_pixels_planes_##suffix(const type* x, const type* w, const type* bias, const type* addend,         \
                                   type* y, Convolution p, Finish finish, uint count) {                        \
        pixel_planes(x, w, bias, addend, y, p, finish, count);                                                 \
    }
