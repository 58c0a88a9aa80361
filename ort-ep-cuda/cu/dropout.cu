// Dropout by counters.
#include "dropout.cuh"
#include "packs.cuh"
#include "wide.cuh"

// A thread has the four elements of a counter.
template <typename T, typename N>
__device__ void counter_dropout(const T* x, T* y, const float* ratio, const int64* seed, const int64* step, uint count, int64 stream) {
    Dropout dropout(*ratio, *seed, stream, *step);
    N kept = N(1) - N(*ratio);
    bool vectors = (uint64)x % alignof(Pack<T, 4>) == 0 && (uint64)y % alignof(Pack<T, 4>) == 0;
    for (uint four = thread_index(); four < (count + 3) / 4; four += gridDim.x * blockDim.x) {
        uint bits = dropout.kept(four), first = 4 * four;
        bool whole = vectors && first + 4 <= count;
        Pack<T, 4> pack;
        if (whole) pack = *(const Pack<T, 4>*)(x + first);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (!whole && first + j < count) pack.of[j] = x[first + j];
            if (whole || first + j < count) pack.of[j] = bits >> j & 1 ? narrow<T>(N(wide(pack.of[j]) / kept)) : narrow<T>(N(0));
        }
        if (whole) {
            *(Pack<T, 4>*)(y + first) = pack;
            continue;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (first + j < count) y[first + j] = pack.of[j];
        }
    }
}

#define DROPOUT(NAME, T, N)                                                                                            \
    extern "C" __global__ void counter_dropout_##NAME(const T* x, T* y, const float* ratio, const int64* seed,         \
                                                      const int64* step, uint count, int64 stream) {                   \
        counter_dropout<T, N>(x, y, ratio, seed, step, count, stream);                                                 \
    }
DROPOUT(f32, float, float)
DROPOUT(f64, double, double)
DROPOUT(f16, __half, float)
DROPOUT(bf16, __nv_bfloat16, float)
