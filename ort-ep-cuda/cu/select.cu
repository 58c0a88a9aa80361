// NonZero and Compress, and what Unique has in common with them: which elements are something. Each block counts its own, one block adds the counts
// up, and then each block writes from the place on where its own begin.
#include "common.cuh"

// A warp takes 32 elements at a time, one behind the other.
constexpr uint WARPS = 8, ROUNDS = 8, OF_WARP = 32 * ROUNDS, BLOCK = WARPS * OF_WARP;
// The most threads of the block that adds up.
constexpr uint MOST_THREADS = 1024;

// The elements of a warp that are something, a bit for each, and where its first element is. `mask` has the bits of an element that count: not the
// sign of a float.
template <typename T> struct Found {
    uint first, bits[ROUNDS], count = 0;

    __device__ Found(const T* x, uint64 mask, uint size) {
        first = blockIdx.x * BLOCK + threadIdx.x / 32 * OF_WARP;
        uint lane = threadIdx.x % 32;
#pragma unroll
        for (uint round = 0; round < ROUNDS; round++) {
            uint at = first + round * 32 + lane;
            bits[round] = __ballot_sync(0xffffffffu, at < size && (x[at] & static_cast<T>(mask)) != 0);
            count += __popc(bits[round]);
        }
    }

    // The counts of all warps of the block.
    __device__ void share(uint* counts) const {
        if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
        __syncthreads();
    }
};

template <typename T> __device__ inline void count_set(const T* x, uint* sums, uint64 mask, uint size) {
    __shared__ uint counts[WARPS];
    Found<T>(x, mask, size).share(counts);
    if (threadIdx.x > 0) return;
    uint sum = 0;
    for (uint warp = 0; warp < WARPS; warp++) sum += counts[warp];
    sums[blockIdx.x] = sum;
}

// Calls `write` with the number of each element that is something among all of those, and with its place.
template <typename T, typename Write>
__device__ inline void for_each_set(const T* x, const uint* before, uint64 mask, uint size, Write write) {
    __shared__ uint counts[WARPS];
    Found<T> found(x, mask, size);
    found.share(counts);
    uint number = before[blockIdx.x], lane = threadIdx.x % 32;
    for (uint warp = 0; warp < threadIdx.x / 32; warp++) number += counts[warp];
#pragma unroll
    for (uint round = 0; round < ROUNDS; round++) {
        uint bits = found.bits[round];
        if (bits >> lane & 1) write(number + __popc(bits & ((1u << lane) - 1)), found.first + round * 32 + lane);
        number += __popc(bits);
    }
}

// Puts in the place of each sum that of those before it, and all of them together into `total`. One block of whole warps.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) add_up(uint* sums, int64* total, uint count) {
    __shared__ uint of_warps[32];
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, before = 0;
    for (uint start = 0; start < count; start += blockDim.x) {
        uint at = start + threadIdx.x, own = at < count ? sums[at] : 0, up_to = own;
        for (uint reach = 1; reach < 32; reach *= 2) {
            uint other = __shfl_up_sync(0xffffffffu, up_to, reach);
            if (lane >= reach) up_to += other;
        }
        if (lane == 31) of_warps[warp] = up_to;
        __syncthreads();
        uint all = 0;
        for (uint other = 0; other < warps; other++) {
            if (other == warp) up_to += all;
            all += of_warps[other];
        }
        if (at < count) sums[at] = before + up_to - own;
        before += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) *total = before;
}

// The places of the bytes that are something.
extern "C" __global__ void places(const uint8* x, const uint* before, int64* y, uint size) {
    for_each_set(x, before, 0xff, size, [=](uint number, uint at) { y[number] = at; });
}

// The places of the elements that are something, as an index along each axis: `count` along the first, then those along the second.
template <typename T>
__device__ inline void indices(const T* x, const uint* before, int64* y, uint64 mask, uint size, uint count, uint axes,
                               const Axes& sizes) {
    for_each_set(x, before, mask, size, [&](uint number, uint at) {
#pragma unroll
        for (int axis = MOST_AXES - 1; axis >= 0; axis--) {
            if (axis >= axes) continue;
            uint rest = at / sizes.of[axis];
            y[static_cast<uint64>(axis) * count + number] = at - rest * sizes.of[axis];
            at = rest;
        }
    });
}

#define ENTRIES(suffix, T)                                                                                          \
    extern "C" __global__ void count_set_##suffix(const T* x, uint* sums, uint64 mask, uint size) {                 \
        count_set<T>(x, sums, mask, size);                                                                          \
    }                                                                                                               \
    extern "C" __global__ void indices_##suffix(const T* x, const uint* before, int64* y, uint64 mask, uint size,   \
                                                uint count, uint axes, Axes sizes) {                                \
        indices<T>(x, before, y, mask, size, count, axes, sizes);                                                   \
    }

ENTRIES(b1, uint8)
ENTRIES(b2, uint16)
ENTRIES(b4, uint)
ENTRIES(b8, uint64)
