// Lines: what a tensor holds along some of its axes. A team of 1, 8, 32 or 256 threads takes a line: a warp or a block where the line's own
// elements lie side by side in memory, one thread or 8 where those of neighbouring lines do, so that a warp reads side by side either way.
#pragma once

#include "common.cuh"

struct Lines {
    uint count, length;
    int begin_rank, along_rank;
    Axes begin_sizes, begin_steps, along_sizes, along_steps;
};

__device__ inline uint walk(int rank, const Axes& sizes, const Axes& steps, uint index) {
    uint place = 0;
    for (int axis = rank - 1; axis > 0; axis--) {
        uint size = sizes.of[axis];
        place += index % size * steps.of[axis];
        index /= size;
    }
    return rank > 0 ? place + index * steps.of[0] : place;
}

__device__ inline uint begin_of(const Lines& lines, uint line) {
    return walk(lines.begin_rank, lines.begin_sizes, lines.begin_steps, line);
}
__device__ inline uint along(const Lines& lines, uint r) {
    return walk(lines.along_rank, lines.along_sizes, lines.along_steps, r);
}

// Threads of a block, which are those of 256 / TEAM lines. Numbers of threads in a launch may be beyond 32 bits, those of lines are not.
constexpr uint BLOCK = 256;

// The line of the calling thread's team, and the thread's place in the team. The 8 threads of a line are in 8 warps.
template <int TEAM> __device__ inline uint line_of_team() {
    uint own = TEAM == 8 ? threadIdx.x % 32 : threadIdx.x / TEAM;
    return blockIdx.x * (BLOCK / TEAM) + own;
}
template <int TEAM> __device__ inline uint lane_of_team() {
    return TEAM == 8 ? threadIdx.x / 32 : threadIdx.x % TEAM;
}

// The value of the thread of the warp whose number differs by these bits. Structures have their own.
template <typename V> __device__ inline V swapped(V value, int bits) {
    return __shfl_xor_sync(0xffffffffu, value, bits);
}

// What the values of a team's threads are together, in all of them; `Join` joins two. All threads of the block must come here.
template <int TEAM, typename V, typename Join> __device__ inline V joined(V value, Join join) {
    if constexpr (TEAM >= 32) {
        for (int bits = 16; bits > 0; bits /= 2) value = join(value, swapped(value, bits));
    }
    if constexpr (TEAM == 256) {
        __shared__ V cells[8];
        __syncthreads();
        if (threadIdx.x % 32 == 0) cells[threadIdx.x / 32] = value;
        __syncthreads();
        value = cells[0];
        for (int warp = 1; warp < 8; warp++) value = join(value, cells[warp]);
    }
    if constexpr (TEAM == 8) {
        __shared__ V cells[BLOCK];
        __syncthreads();
        cells[threadIdx.x] = value;
        __syncthreads();
        value = cells[threadIdx.x % 32];
        for (int warp = 1; warp < 8; warp++) value = join(value, cells[threadIdx.x % 32 + 32 * warp]);
    }
    return value;
}

// The greater and the lesser, where what is not a number stays.
template <typename V> __device__ inline V greater(V a, V b) { return a > b || a != a ? a : b; }
template <typename V> __device__ inline V lesser(V a, V b) { return a < b || a != a ? a : b; }
