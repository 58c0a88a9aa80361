// Lines: what a tensor holds along some of its axes. A team of 1, 32 or 256 threads takes a line: one thread where lines lie side by side
// in memory, a warp or a block where their own elements do.
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

// The line of the calling thread's team, and the thread's place in the team.
template <int TEAM> __device__ inline uint line_of_team() { return thread_index() / TEAM; }
template <int TEAM> __device__ inline uint lane_of_team() { return threadIdx.x % TEAM; }

// What the values of a team's threads are together, in all of them; `Join` joins two. All threads of the team must come here.
template <int TEAM, typename V, typename Join> __device__ inline V joined(V value, Join join) {
    if constexpr (TEAM > 1) {
        for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    if constexpr (TEAM == 256) {
        __shared__ V cells[8];
        __syncthreads();
        if (threadIdx.x % 32 == 0) cells[threadIdx.x / 32] = value;
        __syncthreads();
        value = cells[0];
        for (int warp = 1; warp < 8; warp++) value = join(value, cells[warp]);
    }
    return value;
}

// The greater and the lesser, where what is not a number stays.
template <typename V> __device__ inline V greater(V a, V b) { return a > b || a != a ? a : b; }
template <typename V> __device__ inline V lesser(V a, V b) { return a < b || a != a ? a : b; }
