// Convolutions with the channels last on tensor cores: of float16 and bfloat16, and of float32 as TF32. A product of windows, whose steps are
// the channels of a tap, tap by tap, and of filters, which lie in the same order.
#pragma once

#include "conv_cores.cuh"

// What a step of the sums is: how far its element is from the first one of a window, and which taps the window must have inside of the image.
__device__ inline Step pixel_step_of(const Convolution& p, int k, int depth) {
    // No window has all bits.
    if (k >= depth) return {0, ~0u};
    int taps[3];
    unflat(k / p.channels, p.kernel, taps);
    Step step = {0, 0};
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        step.offset = step.offset * p.input[axis] + taps[axis] * p.dilations[axis];
        step.needs |= bit_of(p, axis, taps[axis]);
    }
    step.offset = step.offset * p.groups * p.channels + k % p.channels;
    return step;
}

// Where the first element of a window is, though it may be outside of the image, and which of its taps are inside.
struct Origin { int64 first; uint inside; };

__device__ inline Origin origin_of(const Convolution& p, int position, int positions) {
    Origin origin = {0, 0};
    if (position >= positions) return origin;
    int of_output = volume(p.output), places[3];
    unflat(position % of_output, p.output, places);
    origin.first = position / of_output;
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int at = places[axis] * p.strides[axis] - p.pads[axis];
        origin.first = origin.first * p.input[axis] + at;
        origin.inside |= taps_of<false>(p, axis, at);
    }
    origin.first *= p.groups * p.channels;
    return origin;
}

// A tile of FILTERS filters at POSITIONS positions by warps of WARP_POSITIONS times WARP_FILTERS each; STAGES tiles are on their way at a
// time, straight into shared memory. Where the channels of a group are whole vectors, 16 bytes are of one tap and are read at once. With several
// parts of the sums each block has one, and writes it as it is.
template <typename T, int POSITIONS, int FILTERS, int WARP_POSITIONS, int WARP_FILTERS, int STAGES>
__device__ inline void pixel_core_tiles(const T* x, const T* w, const T* bias, const T* addend, T* y, float* parts, const Convolution& p,
                                        const Finish& finish) {
    constexpr int WARPS_ACROSS = FILTERS / WARP_FILTERS, LANES = POSITIONS / WARP_POSITIONS * WARPS_ACROSS * 32;
    constexpr int DOWN = WARP_POSITIONS / 16, ACROSS = WARP_FILTERS / 8;
    typedef CoreTile<T, POSITIONS, true> OfWindows;
    typedef CoreTile<T, FILTERS, true> OfFilters;
    constexpr int VECTOR = OfWindows::VECTOR, STEPS = OfWindows::STEPS, CHUNKS = STEPS / VECTOR, OWN = POSITIONS * CHUNKS / LANES;
    static_assert(LANES >= STEPS && LANES % CHUNKS == 0, "there is a thread for each step, and each has the same chunk of all its windows");
    __shared__ __align__(16) OfWindows windows[STAGES];
    __shared__ __align__(16) OfFilters filters[STAGES];
    __shared__ __align__(16) Step steps[2][STEPS];
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    // Blocks of the same positions are next to each other.
    int filter0 = blockIdx.x % p.tiles_down * FILTERS;
    int position0 = blockIdx.x / p.tiles_down % p.tiles_across * POSITIONS;
    int group = blockIdx.x / p.tiles_down / p.tiles_across;
    int depth = p.channels * volume(p.kernel), positions = p.batch * volume(p.output);
    int turns = (depth + STEPS - 1) / STEPS, share = (turns + p.parts - 1) / p.parts;
    int begin = blockIdx.y * share, end = min(begin + share, turns);
    x += group * p.channels;
    w += (int64)group * p.filters * depth;
    bool x_vectors = p.channels % VECTOR == 0 && (uint64)x % 16 == 0;
    bool w_vectors = depth % VECTOR == 0 && (uint64)w % 16 == 0;
    // Of each of its windows the thread reads the same chunk of steps.
    int chunk = thread % CHUNKS * VECTOR;
    Origin origins[OWN];
#pragma unroll
    for (int own = 0; own < OWN; own++) {
        origins[own] = origin_of(p, position0 + thread / CHUNKS + own * (LANES / CHUNKS), positions);
    }
    auto describe = [&](int turn) {
        if (thread < STEPS) steps[turn % 2][thread] = pixel_step_of(p, turn * STEPS + thread, depth);
    };
    auto read_windows = [&](int turn, OfWindows& to) {
        const Step* at = steps[turn % 2] + chunk;
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            T* line = &to.of[thread / CHUNKS + own * (LANES / CHUNKS)][chunk];
            const T* window = x + origins[own].first;
            uint inside = origins[own].inside;
            if (x_vectors) {
                Step step = at[0];
                bool there = (inside & step.needs) == step.needs;
                copy_later(line, there ? window + step.offset : x, there);
                continue;
            }
            Vector<T> vector;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                Step step = at[i];
                vector.of[i] = (inside & step.needs) == step.needs ? window[step.offset] : T(0.0f);
            }
            *(Vector<T>*)line = vector;
        }
    };
    // The steps of a turn are described one turn before it is read.
    auto read = [&](int turn) {
        if (turn < end) {
            read_windows(turn, windows[turn % STAGES]);
            filters[turn % STAGES].template read<LANES>(w, filter0, p.filters, depth, turn * STEPS, depth, 1, w_vectors);
        }
        // An empty group, too, as groups are counted.
        commit_copies();
        describe(turn + 1);
    };
    float sums[DOWN * ACROSS][4];
#pragma unroll
    for (int i = 0; i < DOWN * ACROSS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }
    int warp_position = warp / WARPS_ACROSS * WARP_POSITIONS, warp_filter = warp % WARPS_ACROSS * WARP_FILTERS;
    describe(begin);
    for (int turn = begin; turn < begin + STAGES - 1; turn++) {
        __syncthreads();
        read(turn);
    }
    for (int turn = begin; turn < end; turn++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        // Into the tiles of the turn before, which all warps are done with.
        read(turn + STAGES - 1);
        multiply_tiles<T, DOWN, ACROSS>(sums, windows[turn % STAGES], filters[turn % STAGES], warp_position, warp_filter);
    }
    // Of each product of 16 times 8, a lane has two neighbouring filters of one position and those of the position eight below.
    bool pairs = p.filters % 2 == 0 && (uint64)y % sizeof(Two<T>) == 0;
    int of_all = p.groups * p.filters;
    int64 part = (int64)blockIdx.y * positions * of_all;
#pragma unroll 1
    for (int tile = 0; tile < DOWN * ACROSS; tile++, next_row(sums)) {
        float (&own)[4] = sums[0];
        int position = position0 + warp_position + tile / ACROSS * 16 + lane / 4;
        int filter = filter0 + warp_filter + tile % ACROSS * 8 + lane % 4 * 2;
        int64 first = (int64)position * of_all + group * p.filters + filter;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int64 at = first + i / 2 * 8 * (int64)of_all + i % 2;
            if (position + i / 2 * 8 >= positions || filter + i % 2 >= p.filters) continue;
            if (p.parts > 1) {
                parts[part + at] = own[i];
            } else {
                if (bias) own[i] += as_float(bias[group * p.filters + filter + i % 2]);
                if (addend) own[i] += as_float(addend[at]);
            }
        }
        if (p.parts > 1) continue;
        activate_all(own, finish);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (position + half * 8 >= positions || filter >= p.filters) continue;
            Two<T> two = {{from_float<T>(own[2 * half]), from_float<T>(own[2 * half + 1])}};
            T* to = y + first + half * 8 * (int64)of_all;
            if (pairs) {
                *(Two<T>*)to = two;
            } else {
                to[0] = two.of[0];
                if (filter + 1 < p.filters) to[1] = two.of[1];
            }
        }
    }
}

// Results of the parts of their sums.
template <typename T>
__device__ inline void pixel_join(const float* parts, const T* bias, const T* addend, T* y, const Convolution& p, const Finish& finish,
                                  uint count) {
    uint index = thread_index();
    if (index >= count) return;
    float sum = 0.0f;
    for (int part = 0; part < p.parts; part++) sum += parts[(int64)part * count + index];
    finish_at(y, index, index % (p.groups * p.filters), sum, bias, addend, finish);
}

#define PIXEL_CONVOLUTION(name, type, lanes, ...)                                                              \
    extern "C" __global__ void __launch_bounds__(lanes, 1)                                                     \
        name(const type* x, const type* w, const type* bias, const type* addend, type* y, float* parts,        \
             Convolution p, Finish finish) {                                                                   \
        pixel_core_tiles<type, __VA_ARGS__>(x, w, bias, addend, y, parts, p, finish);                          \
    }
#define PIXEL_CORES(suffix, type)                                                                              \
    PIXEL_CONVOLUTION(conv_pixels_cores_large_##suffix, type, 256, 128, 128, 64, 32, 2)                         \
    PIXEL_CONVOLUTION(conv_pixels_cores_small_##suffix, type, 128, 64, 64, 32, 32, 4)                           \
    PIXEL_CONVOLUTION(conv_pixels_cores_few_##suffix, type, 128, 128, 32, 32, 32, 3)                            \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        conv_pixels_join_##suffix(const float* parts, const type* bias, const type* addend, type* y,            \
                                 Convolution p, Finish finish, uint count) {                                   \
        pixel_join(parts, bias, addend, y, p, finish, count);                                                  \
    }
