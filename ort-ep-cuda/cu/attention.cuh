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
    // Threads that read a row of keys, and one of values, where rows are few: powers of 2.
    int key_lanes, value_lanes;
    float scale, softcap, padded;
    // What a query without weights gives: 0 or NaN.
    float without_weights;
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

// Quotient and remainder of numbers that are not negative; most often there is nothing to divide.
__device__ inline int2 divide(int x, int by) {
    if (by == 1) return make_int2(x, 0);
    int quotient = (int)((uint)x / (uint)by);
    return make_int2(quotient, x - quotient * by);
}

// The keys that a query sees by its place: from the first to before the last.
__device__ inline int begin_of(const Attend& p, int query, int offset) {
    return p.left >= 0 ? max(query + offset - p.left, 0) : 0;
}
__device__ inline int end_of(const Attend& p, int query, int offset, int length) {
    int end = min(min(p.keys, length), p.mask_keys), place = query + offset;
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
        int2 part = divide(blockIdx.x, p.splits), of_rows = divide(part.x, p.blocks), of_pairs = divide(of_rows.x, p.key_heads);
        split = part.y;
        // The last queries, which may see the most keys, come first.
        first = (p.blocks - 1 - of_rows.y) * rows;
        pair = of_rows.x;
        batch = of_pairs.x;
        key_head = of_pairs.y;
        length = p.keys;
        if (g.lengths) {
            int64 given = p.lengths_kind == LONG ? ((const int64*)g.lengths)[batch] : ((const int*)g.lengths)[batch];
            length = (int)max(min(given, (int64)1 << 30), -((int64)1 << 30)) + p.more;
        }
        offset = p.at_end ? length - p.queries : p.before;
        int last = min(first + rows, p.rows) - 1;
        int2 one = line(p, first), other = line(p, last);
        bool mixed = one.x != other.x;
        int least = mixed ? 0 : one.y, most = mixed ? p.queries - 1 : other.y;
        all_begin = begin_of(p, most, offset);
        all_end = end_of(p, least, offset, length);
        int from = begin_of(p, least, offset), to = end_of(p, most, offset, length);
        if (p.stage >= 0) from = 0, to = p.keys;
        // Tiles begin where neighbours in a mask may be read at once.
        if (to > from) from = from / 8 * 8;
        else to = from;
        int share = (divide(to - from + p.splits - 1, p.splits).x + 63) / 64 * 64;
        begin = min(from + split * share, to);
        end = min(begin + share, to);
    }

    // The head among those that share keys, and the query, of a row of a pair.
    __device__ static int2 line(const Attend& p, int row) {
        return p.sharing == 1 ? make_int2(0, row) : divide(row, p.queries);
    }

    // The head, the query, and the keys that it sees, of one of its rows. Beyond the last row there is no head.
    __device__ int4 place(const Attend& p, int row) const {
        if (first + row >= p.rows) return make_int4(p.heads, 0, 0, 0);
        int2 own = line(p, first + row);
        return make_int4(key_head * p.sharing + own.x, own.y, begin_of(p, own.y, offset), end_of(p, own.y, offset, length));
    }

    // Of which score a row's softmax begins, and with which sum.
    __device__ float2 sink(const Attend& p, const Given& g, int head) const {
        if (!p.sinks || split > 0 || head >= p.heads) return make_float2(-infinity(), 0.0f);
        return make_float2(p.sinks == 2 ? read_as(g.sinks, p.q_kind, head) : 0.0f, 1.0f);
    }
};

__device__ inline float as_number(uint8 x) { return (float)x; }
template <typename E> __device__ inline float as_number(E x) { return as_float(x); }

// Where the mask has a query's keys.
__device__ inline int64 place_of_mask(const int4& place, int batch, const Attend& p) {
    return (int64)batch * p.mask_batch + (int64)place.x * p.mask_head + (int64)place.y * p.mask_query;
}

// Whether a key is padding for a query.
__device__ inline bool is_padding(int query, int batch, int key, const Attend& p, const Given& g) {
    if (p.padding == ELEMENTS) {
        return g.padding[p.padding_first + (int64)batch * p.padding_batch + (int64)query * p.padding_query + key] <= 0;
    }
    return key >= g.padding[batch] || (p.padding == FROM_AND_BEFORE && key < g.padding[p.batches + batch]);
}

// Of the mask the elements of those neighbouring keys whose bits are set.
template <int COUNT, typename E> __device__ inline void read_mask(const E* from, uint shown, float (&to)[COUNT]) {
    E own[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) own[i] = shown >> i & 1 ? from[i] : E(0.0f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = as_number(own[i]);
}

// What is added to a query's scores of neighbouring keys, and a bit for each of these that is not hidden. It is read ahead of the scores,
// all of it at once.
template <int COUNT>
__device__ inline uint changes_of(const int4& place, int batch, int key, const Attend& p, const Given& g, float (&added)[COUNT]) {
    uint shown = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        added[i] = 0.0f;
        shown |= (uint)(key + i >= place.z && key + i < place.w) << i;
    }
    if (shown == 0) return 0;
    if (g.mask) {
        int64 at = place_of_mask(place, batch, p) + key;
        if (p.mask_kind == BOOL) {
            float bits[COUNT];
            read_mask((const uint8*)g.mask + at, shown, bits);
#pragma unroll
            for (int i = 0; i < COUNT; i++) shown &= ~((uint)(bits[i] == 0.0f) << i);
        } else if (p.mask_kind == FLOAT) {
            read_mask((const float*)g.mask + at, shown, added);
        } else if (p.mask_kind == HALF) {
            read_mask((const __half*)g.mask + at, shown, added);
        } else if (p.mask_kind == BFLOAT) {
            read_mask((const __nv_bfloat16*)g.mask + at, shown, added);
        } else {
            // Integers, which are rare, come in by the last place one after another, so that they take no registers from the others.
#pragma unroll 1
            for (int i = 0; i < COUNT; i++) {
                float next = shown >> i & 1 ? read_as(g.mask, p.mask_kind, at + i) : 0.0f;
#pragma unroll
                for (int to = 1; to < COUNT; to++) added[to - 1] = added[to];
                added[COUNT - 1] = next;
            }
        }
    }
    if (p.padding != NO_PADDING) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            // The last key stands for those that are not there, so that no load waits for another.
            if (is_padding(place.y, batch, min(key + i, place.w - 1), p, g)) added[i] += p.padded;
        }
    }
    return shown;
}

// The score of a product, to which something is added; infinitely low where the key is hidden.
template <bool KEEPS>
__device__ inline float score_of(float product, const int4& place, int batch, int key, float added, bool shown, const Attend& p, const Given& g) {
    int head = place.x, query = place.y;
    if (head >= p.heads || (!KEEPS && !shown)) return -infinity();
    float score = product * p.scale;
    // Of the blocks that have columns of the values, one writes scores.
    bool writes = KEEPS && blockIdx.y == 0;
    int64 kept = KEEPS ? (((int64)batch * p.heads + head) * p.queries + query) * p.keys + key : 0;
    if (writes && p.stage == SCALED) write_as(g.scores, p.q_kind, kept, score);
    if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
    if (writes && p.stage == CAPPED) write_as(g.scores, p.q_kind, kept, score);
    score = shown ? score + added : -infinity();
    if (writes && p.stage >= MASKED) write_as(g.scores, p.q_kind, kept, score);
    return score;
}

// A query all of whose scores are -inf has no weights.
__device__ inline float quotient(float result, float sum, const Attend& p) { return sum == 0.0f ? p.without_weights : result / sum; }

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
        for (int i = 0; i < COUNT; i++) pack.of[i] = quotient(results[i], sum, p);
        *(Pack<float, COUNT>*)((float*)g.y + at) = pack;
        return;
    }
    if (whole) {
        Pack<uint16, COUNT> pack;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float value = quotient(results[i], sum, p);
            pack.of[i] = p.y_kind == HALF ? bits_of(from_float<__half>(value)) : bits_of(from_float<__nv_bfloat16>(value));
        }
        *(Pack<uint16, COUNT>*)((uint16*)g.y + at) = pack;
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (column + i < p.value_size) write_as(g.y, p.y_kind, at + i, quotient(results[i], sum, p));
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
