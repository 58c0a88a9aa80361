// Attention in training, and its gradients. No scores lie in memory: the backward pass computes them again (Dao et al., "FlashAttention", arXiv
// 2205.14135, algorithm 4; Dao, arXiv 2307.08691), first what the softmax of each query is, then each gradient by blocks of its own, so that
// nothing is added up in an order that differs from run to run.
//
// A block has some rows, which are queries, or keys where the gradient is one by keys or values, and goes over tiles of the others, its columns.
#pragma once

#include "attention_blocks.cuh"
#include "dropout.cuh"

// What a kernel makes: results, what the softmax of each query is, or gradients.
enum Mode { FORWARD, STATISTICS, BY_QUERIES, BY_KEYS, BY_VALUES };
__device__ constexpr bool are_keys(int mode) { return mode == BY_KEYS || mode == BY_VALUES; }
// Whether it meets the scores of a row one after the other, and has no softmax yet.
__device__ constexpr bool is_online(int mode) { return mode == FORWARD || mode == STATISTICS; }
// Whether it computes products of the second tensors, too, and whether these are what it adds up by weights.
__device__ constexpr bool has_second(int mode) { return mode == STATISTICS || mode == BY_QUERIES || mode == BY_KEYS; }
__device__ constexpr bool is_second(int mode) { return mode == FORWARD || mode == BY_VALUES; }

struct Attention {
    int heads, queries, keys, size, value_size;
    int mask_kind, mask_rank, mask_query, mask_key, drops;
    float fill;
    int stream_low, stream_high;
    Axes mask_sizes, mask_steps;
};

// The tensors besides heads.
struct Given {
    const void* mask;
    const float* ratio;
    const int64 *seed, *step;
    // Of each query: what scores are relative to, one over the sum of weights, and the sum of dropped weights times their gradients.
    float* lines;
};

// What is known of the scores of a head.
struct Head {
    int head;
    int64 mask_first;

    __device__ Head(const Attention& p, int head) : head(head), mask_first(0) {
        int rest = head;
#pragma unroll
        for (int axis = MOST_AXES - 1; axis >= 0; axis--) {
            if (axis >= p.mask_rank) continue;
            mask_first += (int64)(rest % p.mask_sizes.of[axis]) * p.mask_steps.of[axis];
            rest /= p.mask_sizes.of[axis];
        }
    }

    // The score with its mask, and whether that fills it.
    __device__ bool mask(float& score, int query, int key, const Attention& p, const Given& g) const {
        if (p.mask_kind == NOTHING) return false;
        int64 at = mask_first + (int64)query * p.mask_query + (int64)key * p.mask_key;
        if (p.mask_kind == BOOL) {
            if (((const uint8*)g.mask)[at]) return false;
            score = p.fill;
            return true;
        }
        if (p.mask_kind == FLOAT) score += ((const float*)g.mask)[at];
        else if (p.mask_kind == HALF) score += as_float(((const __half*)g.mask)[at]);
        else score += as_float(((const __nv_bfloat16*)g.mask)[at]);
        return false;
    }

    __device__ uint64 place(int query, int key, const Attention& p) const { return ((uint64)head * p.queries + query) * p.keys + key; }
};

// What is dropped, made anew where it is asked for: it would take registers from tile to tile.
__device__ inline Dropout dropout_of(const Attention& p, const Given& g) {
    return Dropout(*g.ratio, *g.seed, (int64)(uint)p.stream_low | (int64)p.stream_high << 32, *g.step);
}
// What is kept is multiplied by it.
__device__ inline float factor_of(const Attention& p, const Given& g) { return p.drops ? 1.0f / (1.0f - *g.ratio) : 1.0f; }

// The rows and columns of a block, and the tensors that they are of: the first have `size` elements, the second `value_size`.
template <typename T> struct Sides {
    const T *rows, *second_rows, *columns, *second_columns;
    int row_count, column_count;

    __device__ Sides(int mode, const T* q, const T* k, const T* v, const T* upstream, int head, const Attention& p) {
        const T* of_queries = q + (int64)head * p.queries * p.size;
        const T* of_keys = k + (int64)head * p.keys * p.size;
        const T* second_of_keys = v + (int64)head * p.keys * p.value_size;
        const T* second_of_queries = mode == FORWARD ? v : upstream + (int64)head * p.queries * p.value_size;
        bool are_keys = ::are_keys(mode);
        rows = are_keys ? of_keys : of_queries, columns = are_keys ? of_queries : of_keys;
        second_rows = are_keys ? second_of_keys : second_of_queries, second_columns = are_keys ? second_of_queries : second_of_keys;
        row_count = are_keys ? p.keys : p.queries, column_count = are_keys ? p.queries : p.keys;
    }
};

// The gradient of a score, by its weight, the share of that which is not dropped, the weight's gradient and the sum of those by their shares.
// Both products are rounded: a compiler may fuse one of them with the difference, and what a query has of a single key would not be 0.
__device__ inline float gradient_of(float share, float second, float weight, float along) {
    return __fmul_rn(share, second) - __fmul_rn(weight, along);
}

// What a softmax has met of a row: the greatest score, the sum of weights, and that of dropped weights times their gradients.
struct Line { float top, total, along; };

#define ENTRY(name, type, threads, blocks, body)                                                                       \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                      \
        name(const type* q, const type* k, const type* v, const type* upstream, const void* mask, const float* ratio,  \
             const int64* seed, const int64* step, float* lines, type* y, Attention p) {                               \
        Given g = {mask, ratio, seed, step, lines};                                                                    \
        body(q, k, v, upstream, y, p, g);                                                                              \
    }
