// Dropout by counters: which elements are dropped follows from seed, step and place alone.
#pragma once

#include "common.cuh"

// Random words that follow from a counter and a key: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
__device__ inline uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64 left = (uint64)counter.x * 0xd2511f53u, right = (uint64)counter.z * 0xcd9e8d57u;
        counter = make_uint4((uint)(right >> 32) ^ counter.y ^ key.x, (uint)right, (uint)(left >> 32) ^ counter.w ^ key.y, (uint)left);
        key.x += 0x9e3779b9u, key.y += 0xbb67ae85u;
    }
    return counter;
}

// Which elements are dropped: those whose word is below `least`.
struct Dropout {
    uint2 key, step;
    uint least;

    __device__ Dropout(float ratio, int64 seed, int64 stream, int64 number) {
        // How splitmix64 ends: each of its steps can be undone, so that streams have different keys.
        uint64 mixed = (uint64)seed + (uint64)stream * 0x9e3779b97f4a7c15ull;
        mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
        mixed ^= mixed >> 31;
        key = make_uint2((uint)mixed, (uint)(mixed >> 32));
        step = make_uint2((uint)(uint64)number, (uint)((uint64)number >> 32));
        // A multiplication by a power of two rounds nothing.
        float words = ceilf(ratio * 4294967296.0f);
        least = words < 4294967296.0f ? (uint)words : 0xffffffffu;
    }

    // The words of four elements, the first of which is this one times four.
    __device__ uint4 words(uint64 four) const { return philox(make_uint4((uint)four, (uint)(four >> 32), step.x, step.y), key); }
    // Of those elements the ones that are kept, a bit for each.
    __device__ uint kept(uint64 four) const {
        uint4 word = words(four);
        return (word.x >= least) | (word.y >= least) << 1 | (word.z >= least) << 2 | (word.w >= least) << 3;
    }
    // The same from any element on.
    __device__ uint kept_from(uint64 first) const {
        int skipped = (int)(first % 4);
        uint bits = kept(first / 4) >> skipped;
        if (skipped) bits |= kept(first / 4 + 1) << (4 - skipped);
        return bits & 15;
    }
};
