// Convolutions on tensor cores: of float16 and bfloat16, and of float32 as TF32.
#pragma once

#include "conv.cuh"
#include "cores.cuh"

// What a step of the sums is: how far its element is from the first one of a window, and what the window must have inside of the image. Of a
// transposed convolution, the window of a position is what was multiplied into it: what lies at the strides.
struct Step { int offset; uint needs; };

// Of each axis a tap has a bit: those of the last axis first, behind them those of the axes before. The host sees to it that 31 are enough.
__device__ inline uint bit_of(const Convolution& p, int axis, int tap) {
    int first = axis == 2 ? 0 : axis == 1 ? p.kernel[2] : p.kernel[2] + p.kernel[1];
    return 1u << (first + tap);
}

// The taps along an axis that meet the image, of which a window has its first element, or a transposed one its last, at `at`.
template <bool TRANSPOSED> __device__ inline uint taps_of(const Convolution& p, int axis, int at) {
    uint inside = 0;
    for (int tap = 0; tap < p.kernel[axis]; tap++) {
        int place = at + tap * (TRANSPOSED ? -p.dilations[axis] : p.dilations[axis]);
        if (TRANSPOSED) {
            int whole = place / p.strides[axis];
            place = place >= 0 && whole * p.strides[axis] == place ? whole : -1;
        }
        if ((uint)place < (uint)p.input[axis]) inside |= bit_of(p, axis, tap);
    }
    return inside;
}

template <bool TRANSPOSED> __device__ inline Step step_of(const Convolution& p, int k, int depth) {
    // No window has all bits.
    if (k >= depth) return {0, ~0u};
    int of_kernel = volume(p.kernel), channel = k / of_kernel, taps[3];
    unflat(k % of_kernel, p.kernel, taps);
    Step step = {channel, 0};
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int moved = taps[axis] * p.dilations[axis];
        step.offset = step.offset * p.input[axis] + (TRANSPOSED ? -(moved / p.strides[axis]) : moved);
        step.needs |= bit_of(p, axis, taps[axis]);
    }
    return step;
}

// Sums in turns: the next tiles are on their way while those of a turn are multiplied. What the turn after that is read by is described in place of
// what that of this turn was, which was read before the last barrier.
template <typename Describe, typename Read, typename Write, typename Multiply>
__device__ inline void in_turns(int begin, int end, Describe describe, Read read, Write write, Multiply multiply) {
    describe(begin);
    describe(begin + 1);
    __syncthreads();
    if (begin < end) {
        read(begin);
        write(begin);
    }
    for (int turn = begin; turn < end; turn++) {
        wait_for_copies<0>();
        __syncthreads();
        bool more = turn + 1 < end;
        // Into the tiles of the turn before, which all warps are done with.
        if (more) read(turn + 1);
        multiply(turn);
        if (more) write(turn + 1);
        describe(turn + 2);
    }
}

// A tile of FILTERS filters at POSITIONS positions by warps of WARP_FILTERS times WARP_POSITIONS each. The next tile is on its way while one
// is multiplied: filters straight into shared memory, windows, which lie at any places, through registers. Each thread has one position.
// With several parts of the sums each block has one, and writes it as it is.
template <typename T, bool TRANSPOSED, int FILTERS, int POSITIONS, int WARP_FILTERS, int WARP_POSITIONS>
__device__ inline void core_tiles(const T* x, const T* w, const T* bias, const T* addend, T* y, float* parts, const Convolution& p,
                                  const Finish& finish) {
    constexpr int WARPS_ACROSS = POSITIONS / WARP_POSITIONS, LANES = FILTERS / WARP_FILTERS * WARPS_ACROSS * 32;
    constexpr int DOWN = WARP_FILTERS / 16, ACROSS = WARP_POSITIONS / 8;
    typedef CoreTile<T, FILTERS, true> OfFilters;
    typedef CoreTile<T, POSITIONS, true> OfWindows;
    constexpr int VECTOR = OfWindows::VECTOR, STEPS = OfWindows::STEPS, OWN = STEPS / VECTOR * POSITIONS / LANES;
    static_assert(LANES % POSITIONS == 0 && LANES >= STEPS, "each thread has one position, and there is one for each step");
    __shared__ __align__(16) OfFilters filters[2];
    __shared__ __align__(16) OfWindows windows[2];
    __shared__ __align__(16) Step steps[2][STEPS];
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    // Blocks of the same positions are next to each other.
    int filter0 = blockIdx.x % p.tiles_down * FILTERS;
    int position0 = blockIdx.x / p.tiles_down % p.tiles_across * POSITIONS;
    int group = blockIdx.x / p.tiles_down / p.tiles_across;
    int of_input = volume(p.input), of_output = volume(p.output), depth = p.channels * volume(p.kernel);
    int positions = p.batch * of_output;
    int turns = (depth + STEPS - 1) / STEPS, share = (turns + p.parts - 1) / p.parts;
    int begin = blockIdx.y * share, end = min(begin + share, turns);
    // The window whose elements the thread reads, and which taps of it meet the image.
    int position = position0 + thread % POSITIONS, origin[3];
    bool there = position < positions;
    unflat(there ? position % of_output : 0, p.output, origin);
    int64 first = 0;
    uint inside = 0;
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int at = TRANSPOSED ? origin[axis] + p.pads[axis] : origin[axis] * p.strides[axis] - p.pads[axis];
        first = first * p.input[axis] + (TRANSPOSED ? at / p.strides[axis] : at);
        if (there) inside |= taps_of<TRANSPOSED>(p, axis, at);
    }
    const T* window = x + ((int64)(there ? position / of_output : 0) * p.groups + group) * p.channels * of_input + first;
    w += (int64)group * p.filters * depth;
    bool vectors = depth % VECTOR == 0 && (uint64)w % 16 == 0;
    auto describe = [&](int turn) {
        if (thread < STEPS) steps[turn % 2][thread] = step_of<TRANSPOSED>(p, turn * STEPS + thread, depth);
    };
    T next[OWN][VECTOR];
    auto read = [&](int turn) {
        filters[turn % 2].template read<LANES>(w, filter0, p.filters, depth, turn * STEPS, depth, 1, vectors);
        commit_copies();
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            const Step* at = steps[turn % 2] + (thread / POSITIONS + own * (LANES / POSITIONS)) * VECTOR;
#pragma unroll
            for (int i = 0; i < VECTOR; i += 2) {
                int4 two = *(const int4*)(at + i);
                next[own][i] = (inside & two.y) == two.y ? window[two.x] : T(0.0f);
                next[own][i + 1] = (inside & two.w) == two.w ? window[two.z] : T(0.0f);
            }
        }
    };
    auto write = [&](int turn) {
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            Vector<T> vector;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) vector.of[i] = next[own][i];
            int chunk = thread / POSITIONS + own * (LANES / POSITIONS);
            *(Vector<T>*)&windows[turn % 2].of[thread % POSITIONS][chunk * VECTOR] = vector;
        }
    };
    float sums[DOWN * ACROSS][4];
#pragma unroll
    for (int i = 0; i < DOWN * ACROSS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }
    int warp_filter = warp / WARPS_ACROSS * WARP_FILTERS, warp_position = warp % WARPS_ACROSS * WARP_POSITIONS;
    auto multiply = [&](int turn) {
        multiply_tiles<T, DOWN, ACROSS>(sums, filters[turn % 2], windows[turn % 2], warp_filter, warp_position);
    };
    in_turns(begin, end, describe, read, write, multiply);
    // Of each product of 16 times 8, a lane has two neighbours of one filter and the two of the filter eight below.
    bool pairs = of_output % 2 == 0 && (uint64)y % sizeof(Two<T>) == 0;
    int64 part = (int64)blockIdx.y * positions * p.groups * p.filters;
#pragma unroll 1
    for (int tile = 0; tile < DOWN * ACROSS; tile++, next_row(sums)) {
        float (&own)[4] = sums[0];
        int filter = filter0 + warp_filter + tile / ACROSS * 16 + lane / 4;
        int position = position0 + warp_position + tile % ACROSS * 8 + lane % 4 * 2;
        int64 places[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int image = (position + j) / of_output, group0 = group * p.filters + filter;
            places[j] = ((int64)image * p.groups * p.filters + group0) * of_output + (position + j) % of_output;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int of_filter = filter + i / 2 * 8;
            int64 at = places[i % 2] + i / 2 * 8 * (int64)of_output;
            if (of_filter >= p.filters || position + i % 2 >= positions) continue;
            if (p.parts > 1) {
                parts[part + at] = own[i];
            } else {
                if (bias) own[i] += as_float(bias[group * p.filters + of_filter]);
                if (addend) own[i] += as_float(addend[at]);
            }
        }
        if (p.parts > 1) continue;
        activate_all(own, finish);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (filter + half * 8 >= p.filters || position >= positions) continue;
            Two<T> two = {{from_float<T>(own[2 * half]), from_float<T>(own[2 * half + 1])}};
            T* to = y + half * 8 * (int64)of_output;
            if (pairs) {
                *(Two<T>*)(to + places[0]) = two;
            } else {
                to[places[0]] = two.of[0];
                if (position + 1 < positions) to[places[1]] = two.of[1];
            }
        }
    }
}

// Results of the parts of their sums.
template <typename T>
__device__ inline void join(const float* parts, const T* bias, const T* addend, T* y, const Convolution& p, const Finish& finish, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    float sum = 0.0f;
    for (int part = 0; part < p.parts; part++) sum += parts[(int64)part * count + index];
    finish_at(y, index, index / volume(p.output) % (p.groups * p.filters), sum, bias, addend, finish);
}

#define CONVOLUTION(name, type, lanes, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__(lanes, 1)                                                     \
        name(const type* x, const type* w, const type* bias, const type* addend, type* y, float* parts,        \
             Convolution p, Finish finish) {                                                                   \
        core_tiles<type, __VA_ARGS__>(x, w, bias, addend, y, parts, p, finish);                                \
    }
#define TILES(name, suffix, type, transposed)                                                                  \
    CONVOLUTION(name##_large_##suffix, type, 256, transposed, 128, 128, 64, 32)                                \
    CONVOLUTION(name##_small_##suffix, type, 128, transposed, 64, 64, 32, 32)                                  \
    CONVOLUTION(name##_few_##suffix, type, 128, transposed, 32, 128, 32, 32)
#define CORES(suffix, type)                                                                                    \
    TILES(conv_cores, suffix, type, false)                                                                     \
    TILES(conv_cores_transposed, suffix, type, true)                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        conv_join_##suffix(const float* parts, const type* bias, const type* addend, type* y, Convolution p,   \
                           Finish finish, uint count) {                                                        \
        join(parts, bias, addend, y, p, finish, count);                                                        \
    }
