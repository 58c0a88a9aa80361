// Scaled dot-product attention: the scores of a tile of keys become weights relative to the greatest score so far, by which what was summed
// before is scaled down (Dao et al., "FlashAttention", arXiv 2205.14135). No scores lie in memory but those that are asked for.
//
// A row is a query of one of the heads that share their keys; a pair is a batch and a head of keys. Where there are few blocks of rows, the
// keys are cut in parts, whose results `attend_join` puts together.

#pragma once

#include "attention_blocks.cuh"

// Scores that are written out, and which keys are padding.
enum Stage { NO_SCORES = -1, SCALED, CAPPED, MASKED, WEIGHTS };
enum Padding { NO_PADDING, FROM, FROM_AND_BEFORE, ELEMENTS };

// Where rows of heads are, in elements: the first one, and from one batch, head and row to the next.
struct Rows { int first, batch, head, row; };

struct Attend {
    int heads, key_heads, queries, keys, size, value_size;
    // Heads that share keys, rows of a pair, blocks of rows, and parts of all keys.
    int sharing, rows, blocks, splits;
    Rows q, k, v, y;
    int q_kind, y_kind;
    // How many keys precede the first query; how many more there are than lengths say; whether queries stand at the end.
    int before, more, at_end, lengths_kind;
    // 1: a query sees no later keys; 2: but the last one does.
    int causal, left, right;
    int mask_kind, mask_batch, mask_head, mask_query, mask_keys;
    int padding, padding_first, padding_batch, padding_query, batches;
    // 1: a score of zero takes part; 2: one for each head.
    int sinks, stage;
    // Whether rows are whole vectors of 16 bytes as far as sizes and steps go.
    int q_vectors, k_vectors, v_vectors, y_vectors;
    // Threads that read a row of values where rows are few: a power of 2.
    int value_lanes;
    float scale, softcap, padded;
};

// The tensors besides queries, keys and values.
struct Given {
    const void *bias, *lengths, *mask, *sinks;
    const int* padding;
    void *scores, *y;
    float* parts;
};

__device__ inline float read_as(const void* from, int kind, int64 at) {
    switch (kind) {
    case FLOAT: return ((const float*)from)[at];
    case HALF: return as_float(((const __half*)from)[at]);
    case BFLOAT: return as_float(((const __nv_bfloat16*)from)[at]);
    case INT: return (float)((const int*)from)[at];
    default: return (float)((const int64*)from)[at];
    }
}

__device__ inline void write_as(void* to, int kind, int64 at, float value) {
    if (kind == FLOAT) ((float*)to)[at] = value;
    else if (kind == HALF) ((__half*)to)[at] = from_float<__half>(value);
    else ((__nv_bfloat16*)to)[at] = from_float<__nv_bfloat16>(value);
}

__device__ inline bool is_aligned(const void* at) { return (uint64)at % 16 == 0; }

__device__ inline int64 place_of(const Rows& rows, int batch, int head, int row) {
    return rows.first + (int64)batch * rows.batch + (int64)head * rows.head + (int64)row * rows.row;
}

// The keys that a query sees by its place: from the first to before the last.
__device__ inline int begin_of(const Attend& p, int query, int offset) {
    return p.left >= 0 ? max(query + offset - p.left, 0) : 0;
}
__device__ inline int end_of(const Attend& p, int query, int offset, int length) {
    int end = min(p.keys, length), place = query + offset;
    if (p.causal == 1 || (p.causal == 2 && query + 1 != p.queries)) end = min(end, place + 1);
    if (p.right >= 0) end = min(end, place + p.right + 1);
    return max(end, 0);
}

// What a block of rows computes.
struct Block {
    int pair, batch, key_head, split, first, length, offset;
    // The keys of its part that any of its rows sees, and those that all see.
    int begin, end, all_begin, all_end;

    __device__ Block(const Attend& p, const Given& g, int rows) {
        split = blockIdx.x % p.splits;
        int rest = blockIdx.x / p.splits;
        // The last queries, which may see the most keys, come first.
        first = (p.blocks - 1 - rest % p.blocks) * rows;
        pair = rest / p.blocks;
        batch = pair / p.key_heads;
        key_head = pair % p.key_heads;
        length = p.keys;
        if (g.lengths) {
            int64 given = p.lengths_kind == LONG ? ((const int64*)g.lengths)[batch] : ((const int*)g.lengths)[batch];
            length = (int)max(min(given, (int64)1 << 30), -((int64)1 << 30)) + p.more;
        }
        offset = p.at_end ? length - p.queries : p.before;
        int last = min(first + rows, p.rows) - 1;
        bool mixed = first / p.queries != last / p.queries;
        int least = mixed ? 0 : first % p.queries, most = mixed ? p.queries - 1 : last % p.queries;
        all_begin = begin_of(p, most, offset);
        all_end = end_of(p, least, offset, length);
        int from = begin_of(p, least, offset), to = end_of(p, most, offset, length);
        if (p.stage >= 0) from = 0, to = p.keys;
        to = max(to, from);
        int share = ((to - from + p.splits - 1) / p.splits + 63) / 64 * 64;
        begin = min(from + split * share, to);
        end = min(begin + share, to);
    }

    // The head, the query, and the keys that it sees, of one of its rows. Beyond the last row there is no head.
    __device__ int4 place(const Attend& p, int row) const {
        int of_pair = first + row, query = of_pair % p.queries;
        if (of_pair >= p.rows) return make_int4(p.heads, 0, 0, 0);
        int head = key_head * p.sharing + of_pair / p.queries;
        return make_int4(head, query, begin_of(p, query, offset), end_of(p, query, offset, length));
    }

    // Of which score a row's softmax begins, and with which sum.
    __device__ float2 sink(const Attend& p, const Given& g, int head) const {
        if (!p.sinks || split > 0 || head >= p.heads) return make_float2(-infinity(), 0.0f);
        return make_float2(p.sinks == 2 ? read_as(g.sinks, p.q_kind, head) : 0.0f, 1.0f);
    }
};

// The score of a product; infinitely low where the key is hidden.
template <bool KEEPS>
__device__ inline float score_of(float product, const int4& place, int batch, int key, const Attend& p, const Given& g) {
    int head = place.x, query = place.y;
    if (head >= p.heads) return -infinity();
    bool shown = key >= place.z && key < place.w;
    if (!KEEPS && !shown) return -infinity();
    float score = product * p.scale;
    // Of the blocks that have columns of the values, one writes scores.
    bool writes = KEEPS && blockIdx.y == 0;
    int64 kept = KEEPS ? (((int64)batch * p.heads + head) * p.queries + query) * p.keys + key : 0;
    if (writes && p.stage == SCALED) write_as(g.scores, p.q_kind, kept, score);
    if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
    if (writes && p.stage == CAPPED) write_as(g.scores, p.q_kind, kept, score);
    if (g.mask) {
        shown = shown && key < p.mask_keys;
        if (shown) {
            int64 at = (int64)batch * p.mask_batch + (int64)head * p.mask_head + (int64)query * p.mask_query + key;
            if (p.mask_kind == BOOL) shown = ((const uint8*)g.mask)[at] != 0;
            else score += read_as(g.mask, p.mask_kind, at);
        }
    }
    if (p.padding != NO_PADDING && shown) {
        bool hides;
        if (p.padding == ELEMENTS) {
            hides = g.padding[p.padding_first + (int64)batch * p.padding_batch + (int64)query * p.padding_query + key] <= 0;
        } else {
            hides = key >= g.padding[batch] || (p.padding == FROM_AND_BEFORE && key < g.padding[p.batches + batch]);
        }
        if (hides) score += p.padded;
    }
    if (!shown) score = -infinity();
    if (writes && p.stage >= MASKED) write_as(g.scores, p.q_kind, kept, score);
    return score;
}

// A query that sees no key has no result.
__device__ inline float quotient(float result, float sum) { return sum == 0.0f ? 0.0f : result / sum; }

__device__ inline int64 place_of_part(const Attend& p, int pair, int split, int row) {
    return (((int64)pair * p.splits + split) * p.rows + row) * (p.value_size + 2);
}

// Writes neighbouring results of a row, or, where keys are cut in parts, what they are before they are divided.
template <int COUNT>
__device__ inline void put(const Block& block, const int4& place, int row, int column, const float (&results)[COUNT], float sum,
                           const Attend& p, const Given& g) {
    if (p.splits > 1) {
        float* to = g.parts + place_of_part(p, block.pair, block.split, block.first + row) + column;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (column + i < p.value_size) to[i] = results[i];
        }
        return;
    }
    int64 at = place_of(p.y, block.batch, place.x, place.y) + column;
    bool whole = p.y_vectors && column + COUNT <= p.value_size && is_aligned(g.y);
    if (whole && p.y_kind == FLOAT) {
        Pack<float, COUNT> pack;
#pragma unroll
        for (int i = 0; i < COUNT; i++) pack.of[i] = quotient(results[i], sum);
        *(Pack<float, COUNT>*)((float*)g.y + at) = pack;
        return;
    }
    if (whole) {
        Pack<uint16, COUNT> pack;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float value = quotient(results[i], sum);
            pack.of[i] = p.y_kind == HALF ? bits_of(from_float<__half>(value)) : bits_of(from_float<__nv_bfloat16>(value));
        }
        *(Pack<uint16, COUNT>*)((uint16*)g.y + at) = pack;
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (column + i < p.value_size) write_as(g.y, p.y_kind, at + i, quotient(results[i], sum));
    }
}

// The greatest score and the sum of weights of a row of a part.
__device__ inline void put_line(const Block& block, int row, float top, float sum, const Attend& p, const Given& g) {
    if (p.splits == 1) return;
    float* to = g.parts + place_of_part(p, block.pair, block.split, block.first + row) + p.value_size;
    to[0] = top;
    to[1] = sum;
}

__device__ inline void read_queries(const void* q, int64 at, int count, bool vectors, const Attend& p, float (&to)[4]) {
    if (p.q_kind == FLOAT) read_four(((const float*)q) + at, count, vectors, to);
    else if (p.q_kind == HALF) read_four(((const __half*)q) + at, count, vectors, to);
    else read_four(((const __nv_bfloat16*)q) + at, count, vectors, to);
}

// Keys at once where rows are many.
constexpr int KEYS = 64;

#define ENTRY(name, type, threads, blocks, body)                                                                       \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                      \
        name(const void* q, const type* k, const type* v, const void* bias, const void* lengths, const void* mask,     \
             const int* padding, const void* sinks, void* scores, void* y, float* parts, Attend p) {                   \
        Given g = {bias, lengths, mask, sinks, padding, scores, y, parts};                                             \
        body(q, k, v, p, g);                                                                                           \
    }
