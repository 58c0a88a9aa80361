// Sums of products over subscripts that are no batch of matrix products, and transposition of the results of those that are.
#include "wide.cuh"

constexpr int MOST_OPERANDS = 4;

// A walk over some axes with the steps of each operand.
struct Walk {
    int rank;
    Axes sizes, steps[MOST_OPERANDS];
};

// The axes of the result, and those that are summed.
struct Sum {
    Walk kept, summed;
    uint terms;
};

template <typename T> struct Operands {
    const T* of[MOST_OPERANDS];
};

// Where a walk is in each operand.
struct Places {
    uint of[MOST_OPERANDS];
};

__device__ inline Places places_at(const Walk& walk, uint index, Places places) {
    for (int axis = walk.rank - 1; axis >= 0; axis--) {
        uint size = walk.sizes.of[axis], rest = index / size, at = axis > 0 ? index - rest * size : index;
        index = rest;
#pragma unroll
        for (int k = 0; k < MOST_OPERANDS; k++) places.of[k] += at * walk.steps[k].of[axis];
    }
    return places;
}

// Operands that there are not are null pointers.
template <typename T> __device__ inline decltype(wide(T())) term(const Operands<T>& x, const Sum& p, uint k, const Places& begin) {
    Places places = places_at(p.summed, k, begin);
    auto product = wide(x.of[0][places.of[0]]);
#pragma unroll
    for (int o = 1; o < MOST_OPERANDS; o++) {
        if (x.of[o]) product *= wide(x.of[o][places.of[o]]);
    }
    return product;
}

// A thread for each element of the result.
template <typename T> __device__ inline void sum_each(const Operands<T>& x, T* y, const Sum& p, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    Places begin = places_at(p.kept, index, Places{});
    decltype(wide(T())) sum = 0;
    for (uint k = 0; k < p.terms; k++) sum += term(x, p, k, begin);
    y[index] = narrow<T>(sum);
}

// A block for each element of the result.
template <typename T> __device__ inline void sum_blocks(const Operands<T>& x, T* y, const Sum& p) {
    using V = decltype(wide(T()));
    __shared__ V parts[8];
    Places begin = places_at(p.kept, blockIdx.x, Places{});
    V sum = 0;
    for (uint k = threadIdx.x; k < p.terms; k += blockDim.x) sum += term(x, p, k, begin);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < 8; warp++) sum += parts[warp];
    y[blockIdx.x] = narrow<T>(sum);
}

#define SUMS(suffix, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        einsum_each_##suffix(const T* a, const T* b, const T* c, const T* d, T* y, Sum p, uint count) {             \
        sum_each<T>(Operands<T>{{a, b, c, d}}, y, p, count);                                                        \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        einsum_blocks_##suffix(const T* a, const T* b, const T* c, const T* d, T* y, Sum p) {                       \
        sum_blocks<T>(Operands<T>{{a, b, c, d}}, y, p);                                                             \
    }

SUMS(f32, float)
SUMS(f16, __half)
SUMS(bf16, __nv_bfloat16)
SUMS(f64, double)
SUMS(i32, int)
SUMS(i64, int64)
