// Scaled dot-product attention: the scores of a tile of keys become weights relative to the greatest score so far, by which what was summed
// before is scaled down (Dao et al., "FlashAttention", arXiv 2205.14135). No scores lie in memory but those that are asked for.
//
// A row is a query of one of the heads that share their keys; a pair is a batch and a head of keys. Where there are few blocks of rows, the
// keys are cut in parts, whose results `attend_join` puts together.

#include "common.cuh"

// How elements of a type that is known at a launch are stored; attend.rs has the same numbers.
enum Kind { FLOAT, HALF, BFLOAT, BOOL, INT, LONG };
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

template <typename T, int COUNT> struct alignas(sizeof(T) * COUNT) Pack { T of[COUNT]; };

// Elements that lie next to each other, of which so many are there; zeros for the others.
template <int COUNT, typename T> __device__ inline void read_pack(const T* at, int count, bool vectors, Pack<T, COUNT>& to) {
    if (vectors && count >= COUNT) {
        to = *(const Pack<T, COUNT>*)at;
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) to.of[i] = i < count ? at[i] : from_float<T>(0.0f);
}
template <typename T> __device__ inline void read_four(const T* at, int count, bool vectors, float (&to)[4]) {
    Pack<T, 4> pack;
    read_pack(at, count, vectors, pack);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = as_float(pack.of[i]);
}

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

__device__ inline uint16 bits_of(__half x) { return static_cast<__half_raw>(x).x; }
__device__ inline uint16 bits_of(__nv_bfloat16 x) { return static_cast<__nv_bfloat16_raw>(x).x; }

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

// The next rows of numbers move up, so that a loop over rows has its code once.
template <int MANY, int COUNT> __device__ inline void next_row(float (&rows)[MANY][COUNT]) {
#pragma unroll
    for (int row = 1; row < MANY; row++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) rows[row - 1][i] = rows[row][i];
    }
}

// What scores are relative to: the greatest, where there is one.
__device__ inline float base_of(float top) { return top == -infinity() ? 0.0f : top; }

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

// Heads of any size: 64 rows and 64 keys at a time by 16 times 16 threads, each with four rows and four keys, then with four rows and WIDE / 16
// columns of the values. A block has WIDE columns.
constexpr int ROWS = 64, KEYS = 64, DEPTH = 16, PITCH = 68;

template <typename T, int WIDE, bool KEEPS>
__device__ inline void tiles(const void* q, const T* k, const T* v, const Attend& p, const Given& g) {
    // As many weights of a row are read at once as registers have room for.
    constexpr int QUADS = WIDE / 64, V_PITCH = WIDE + 4, ABREAST = 4 / QUADS;
    __shared__ int4 places[ROWS];
    __shared__ float decays[ROWS], tops[ROWS], totals[ROWS];
    __shared__ __align__(16) float weights[ROWS][PITCH];
    // Tiles of queries and keys, and tiles of values.
    __shared__ __align__(16) float memory[4 * DEPTH * PITCH];
    Block block(p, g, ROWS);
    int thread = threadIdx.x, own_row = thread / 16 * 4, own = thread % 16 * 4, column0 = blockIdx.y * WIDE;
    if (thread < ROWS) {
        places[thread] = block.place(p, thread);
        float2 sink = block.sink(p, g, places[thread].x);
        tops[thread] = sink.x;
        totals[thread] = sink.y;
    }
    __syncthreads();
    k += place_of(p.k, block.batch, block.key_head, 0);
    v += place_of(p.v, block.batch, block.key_head, 0);
    bool q_vectors = p.q_vectors && is_aligned(q), k_vectors = p.k_vectors && is_aligned(k), v_vectors = p.v_vectors && is_aligned(v);
    // What the thread reads of tiles.
    int line = thread / 4, step = thread % 4 * 4;
    int4 of_line = places[line];
    int64 q_at = of_line.x < p.heads ? place_of(p.q, block.batch, of_line.x, of_line.y) : -1;
    float results[4][4 * QUADS];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4 * QUADS; j++) results[i][j] = 0.0f;
    }
    for (int start = block.begin; start < block.end; start += KEYS) {
        float sums[4][4] = {};
        float q_next[4], k_next[4], v_next[QUADS][4];
        auto read = [&](int d) {
            int count = p.size - d - step;
            read_queries(q, q_at + d + step, q_at < 0 ? 0 : count, q_vectors, p, q_next);
            if (g.bias && q_at >= 0) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (i < count) q_next[i] += read_as(g.bias, p.q_kind, (int64)of_line.x * p.size + d + step + i);
                }
            }
            int key = start + line;
            read_four(k + (int64)key * p.k.row + d + step, key < block.end ? count : 0, k_vectors, k_next);
        };
        auto write = [&](int stage) {
            float* to = memory + stage * 2 * DEPTH * PITCH;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                to[(step + i) * PITCH + line] = q_next[i];
                to[(DEPTH + step + i) * PITCH + line] = k_next[i];
            }
        };
        auto read_values = [&](int first) {
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                int at = thread + i * 256, key = start + first + at / (WIDE / 4), column = column0 + at % (WIDE / 4) * 4;
                int count = key < block.end ? p.value_size - column : 0;
                read_four(v + (int64)key * p.v.row + column, count, v_vectors, v_next[i]);
            }
        };
        auto write_values = [&](int stage) {
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                int at = thread + i * 256;
                float* to = memory + (stage * DEPTH + at / (WIDE / 4)) * V_PITCH + at % (WIDE / 4) * 4;
#pragma unroll
                for (int j = 0; j < 4; j++) to[j] = v_next[i][j];
            }
        };
        read(0);
        write(0);
        __syncthreads();
        for (int d = 0, now = 0; d < p.size; d += DEPTH, now ^= 1) {
            bool more = d + DEPTH < p.size;
            if (more) read(d + DEPTH);
            const float* tile = memory + now * 2 * DEPTH * PITCH;
#pragma unroll
            for (int at = 0; at < DEPTH; at++) {
                Pack<float, 4> left = *(const Pack<float, 4>*)&tile[at * PITCH + own_row];
                Pack<float, 4> right = *(const Pack<float, 4>*)&tile[(DEPTH + at) * PITCH + own];
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) sums[i][j] += left.of[i] * right.of[j];
                }
            }
            if (more) {
                write(now ^ 1);
                __syncthreads();
            }
        }
        // Rows take turns in the first place, so that the code of scores is there once.
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            int row = own_row + i;
            int4 place = places[row];
            float most = -infinity();
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int key = start + own + j;
                sums[0][j] = key < block.end ? score_of<KEEPS>(sums[0][j], place, block.batch, key, p, g) : -infinity();
                most = fmaxf(most, sums[0][j]);
            }
#pragma unroll
            for (int bits = 8; bits > 0; bits /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, bits));
            float before = tops[row], top = fmaxf(before, most), base = base_of(top), decay = expf(before - base), total = 0.0f;
            Pack<float, 4> pack;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                pack.of[j] = expf(sums[0][j] - base);
                total += pack.of[j];
            }
            *(Pack<float, 4>*)&weights[row][own] = pack;
#pragma unroll
            for (int bits = 8; bits > 0; bits /= 2) total += __shfl_xor_sync(0xffffffffu, total, bits);
            // The threads of a row are of one warp, which has read what is written here.
            __syncwarp();
            if (own == 0) {
                decays[row] = decay;
                tops[row] = top;
                totals[row] = totals[row] * decay + total;
            }
            next_row(sums);
        }
        read_values(0);
        __syncthreads();
        write_values(0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float decay = decays[own_row + i];
#pragma unroll
            for (int j = 0; j < 4 * QUADS; j++) results[i][j] *= decay;
        }
        __syncthreads();
        int many = min(KEYS, block.end - start);
        for (int first = 0, now = 0; first < many; first += DEPTH, now ^= 1) {
            bool more = first + DEPTH < many;
            if (more) read_values(first + DEPTH);
#pragma unroll
            for (int at = 0; at < DEPTH; at += ABREAST) {
                Pack<float, ABREAST> left[4];
#pragma unroll
                for (int i = 0; i < 4; i++) left[i] = *(const Pack<float, ABREAST>*)&weights[own_row + i][first + at];
#pragma unroll
                for (int key = 0; key < ABREAST; key++) {
                    const float* values = memory + (now * DEPTH + at + key) * V_PITCH + own;
#pragma unroll
                    for (int quad = 0; quad < QUADS; quad++) {
                        Pack<float, 4> right = *(const Pack<float, 4>*)(values + 64 * quad);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
#pragma unroll
                            for (int j = 0; j < 4; j++) results[i][4 * quad + j] += left[i].of[key] * right.of[j];
                        }
                    }
                }
            }
            if (more) {
                write_values(now ^ 1);
                __syncthreads();
            }
        }
        __syncthreads();
    }
#pragma unroll 1
    for (int row = own_row; row < own_row + 4; row++, next_row(results)) {
        int4 place = places[row];
        float top = tops[row], total = totals[row];
        if (place.x >= p.heads) break;
        if (own == 0 && blockIdx.y == 0) put_line(block, row, top, total, p, g);
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            int column = column0 + own + 64 * quad;
            float four[4] = {results[0][4 * quad], results[0][4 * quad + 1], results[0][4 * quad + 2], results[0][4 * quad + 3]};
            if (column < p.value_size) put(block, place, row, column, four, total, p, g);
        }
        if (KEEPS && p.stage == WEIGHTS && blockIdx.y == 0) {
            // Each thread turns the scores into weights that it wrote.
            float* line = (float*)g.scores + (((int64)block.batch * p.heads + place.x) * p.queries + place.y) * p.keys;
            for (int key = own; key < p.keys; key += key % 4 < 3 ? 1 : KEYS - 3) {
                line[key] = quotient(expf(line[key] - base_of(top)), total);
            }
        }
    }
}

// Up to MANY rows by 128 threads: scores of 128 keys, each by eight threads, then the values by their weights.
constexpr int MOST_SIZE = 256, PIECE = 128, FEW_KEYS = 128;

template <typename T, int MANY>
__device__ inline void few_rows(const void* q, const T* k, const T* v, const Attend& p, const Given& g) {
    constexpr int VECTOR = 16 / sizeof(T), CHUNKS = PIECE / 8 / VECTOR, OWN = (MANY + 3) / 4;
    // Keys that a thread has on their way at once.
    constexpr int ABREAST = MANY == 8 ? 1 : 2;
    // Results of a row that a thread keeps, of which attend.rs knows, too.
    constexpr int KEPT = MANY == 8 ? 4 : VECTOR;
    __shared__ __align__(16) float queries[MANY][MOST_SIZE];
    __shared__ float weights[MANY][FEW_KEYS];
    __shared__ float decays[MANY], lines[2][MANY];
    __shared__ int4 places[MANY];
    __shared__ __align__(16) float pieces[FEW_KEYS * KEPT];
    Block block(p, g, MANY);
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, part = thread % 8;
    if (thread < MANY) places[thread] = block.place(p, thread);
    __syncthreads();
    for (int at = thread; at < MANY * MOST_SIZE; at += 128) {
        int c = at % MOST_SIZE;
        int4 place = places[at / MOST_SIZE];
        float value = 0.0f;
        if (c < p.size && place.x < p.heads) {
            value = read_as(q, p.q_kind, place_of(p.q, block.batch, place.x, place.y) + c);
            if (g.bias) value += read_as(g.bias, p.q_kind, (int64)place.x * p.size + c);
        }
        queries[at / MOST_SIZE][c] = value;
    }
    k += place_of(p.k, block.batch, block.key_head, 0);
    v += place_of(p.v, block.batch, block.key_head, 0);
    bool k_vectors = p.k_vectors && is_aligned(k), v_vectors = p.v_vectors && is_aligned(v);
    int column = thread % p.value_lanes * KEPT, group = thread / p.value_lanes, groups = 128 / p.value_lanes;
    // Each warp knows of every fourth row.
    float tops[OWN], totals[OWN], results[MANY][KEPT];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = warp + 4 * i;
        float2 sink = row < MANY ? block.sink(p, g, places[row].x) : make_float2(-infinity(), 0.0f);
        tops[i] = sink.x;
        totals[i] = lane == 0 ? sink.y : 0.0f;
    }
#pragma unroll
    for (int row = 0; row < MANY; row++) {
#pragma unroll
        for (int i = 0; i < KEPT; i++) results[row][i] = 0.0f;
    }
    for (int start = block.begin; start < block.end; start += FEW_KEYS) {
        int many = min(FEW_KEYS, block.end - start);
        __syncthreads();
#pragma unroll ABREAST
        for (int at = thread / 8; at < FEW_KEYS; at += 16) {
            const T* from = k + (int64)(start + at) * p.k.row;
            bool there = at < many;
            float sums[MANY] = {};
            for (int piece = 0; piece < p.size; piece += PIECE) {
                Pack<T, VECTOR> chunks[CHUNKS];
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; chunk++) {
                    int c = piece + (chunk * 8 + part) * VECTOR;
                    read_pack(from + c, there ? p.size - c : 0, k_vectors, chunks[chunk]);
                }
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; chunk++) {
                    if (piece + chunk * 8 * VECTOR >= p.size) break;
                    const float* query = &queries[0][piece + (chunk * 8 + part) * VECTOR];
#pragma unroll
                    for (int row = 0; row < MANY; row++) {
#pragma unroll
                        for (int i = 0; i < VECTOR; i += 4) {
                            Pack<float, 4> four = *(const Pack<float, 4>*)&query[row * MOST_SIZE + i];
#pragma unroll
                            for (int j = 0; j < 4; j++) sums[row] += four.of[j] * as_float(chunks[chunk].of[i + j]);
                        }
                    }
                }
            }
#pragma unroll
            for (int row = 0; row < MANY; row++) {
#pragma unroll
                for (int bits = 4; bits > 0; bits /= 2) sums[row] += __shfl_xor_sync(0xffffffffu, sums[row], bits);
                if (row == part) weights[row][at] = sums[row];
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int row = warp + 4 * i;
            if (row >= MANY) break;
            int4 place = places[row];
            float most = -infinity();
#pragma unroll 1
            for (int at = lane; at < FEW_KEYS; at += 32) {
                float score = -infinity();
                if (at < many) score = score_of<false>(weights[row][at], place, block.batch, start + at, p, g);
                weights[row][at] = score;
                most = fmaxf(most, score);
            }
            float top = fmaxf(tops[i], warp_max(most)), base = base_of(top), decay = expf(tops[i] - base);
            totals[i] *= decay;
            tops[i] = top;
#pragma unroll
            for (int at = lane; at < FEW_KEYS; at += 32) {
                float weight = expf(weights[row][at] - base);
                totals[i] += weight;
                weights[row][at] = weight;
            }
            if (lane == 0) decays[row] = decay;
        }
        __syncthreads();
#pragma unroll
        for (int row = 0; row < MANY; row++) {
            float decay = decays[row];
#pragma unroll
            for (int i = 0; i < KEPT; i++) results[row][i] *= decay;
        }
        int count = p.value_size - column;
#pragma unroll 4
        for (int at = group; at < many; at += groups) {
            Pack<T, KEPT> values;
            read_pack(v + (int64)(start + at) * p.v.row + column, count, v_vectors, values);
#pragma unroll
            for (int row = 0; row < MANY; row++) {
                float weight = weights[row][at];
#pragma unroll
                for (int i = 0; i < KEPT; i++) results[row][i] += weight * as_float(values.of[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = warp + 4 * i;
        float total = warp_sum(totals[i]);
        if (lane == 0 && row < MANY) {
            lines[0][row] = tops[i];
            lines[1][row] = total;
        }
    }
    int width = p.value_lanes * KEPT;
#pragma unroll 1
    for (int row = 0; row < MANY; row++, next_row(results)) {
        int4 place = places[row];
        if (place.x >= p.heads) break;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KEPT; i++) pieces[group * width + column + i] = results[0][i];
        __syncthreads();
        if (thread == 0) put_line(block, row, lines[0][row], lines[1][row], p, g);
        for (int c = thread; c < p.value_size; c += 128) {
            float sum[1] = {0.0f};
            for (int other = 0; other < groups; other++) sum[0] += pieces[other * width + c];
            put(block, place, row, c, sum, lines[1][row], p, g);
        }
    }
}

// One result of the parts of each row.
extern "C" __global__ void attend_join(const float* parts, void* y, Attend p, int count) {
    int i = thread_index();
    if (i >= count) return;
    int c = i % p.value_size, row = i / p.value_size % p.rows, pair = i / p.value_size / p.rows;
    float top = -infinity(), result = 0.0f, sum = 0.0f;
    for (int split = 0; split < p.splits; split++) top = fmaxf(top, parts[place_of_part(p, pair, split, row) + p.value_size]);
    for (int split = 0; split < p.splits; split++) {
        const float* part = parts + place_of_part(p, pair, split, row);
        float share = expf(part[p.value_size] - base_of(top));
        result += share * part[c];
        sum += share * part[p.value_size + 1];
    }
    int head = pair % p.key_heads * p.sharing + row / p.queries;
    write_as(y, p.y_kind, place_of(p.y, pair / p.key_heads, head, row % p.queries) + c, quotient(result, sum));
}

#define ENTRY(name, type, threads, blocks, body)                                                                       \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                      \
        name(const void* q, const type* k, const type* v, const void* bias, const void* lengths, const void* mask,     \
             const int* padding, const void* sinks, void* scores, void* y, float* parts, Attend p) {                   \
        Given g = {bias, lengths, mask, sinks, padding, scores, y, parts};                                             \
        body(q, k, v, p, g);                                                                                           \
    }
#define ENTRIES(suffix, type)                                                                                          \
    ENTRY(attend_tiles_64_##suffix, type, 256, 2, (tiles<type, 64, false>))                                            \
    ENTRY(attend_tiles_128_##suffix, type, 256, 2, (tiles<type, 128, false>))                                          \
    ENTRY(attend_scores_##suffix, type, 256, 2, (tiles<type, 64, true>))                                               \
    ENTRY(attend_rows_1_##suffix, type, 128, 4, (few_rows<type, 1>))                                                   \
    ENTRY(attend_rows_4_##suffix, type, 128, 3, (few_rows<type, 4>))                                                   \
    ENTRY(attend_rows_8_##suffix, type, 128, 3, (few_rows<type, 8>))

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)

// Tensor cores: 64 rows and 64 keys at a time by four warps, each with 16 rows.

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
__device__ inline uint shared_address(const void* at) { return (uint)__cvta_generic_to_shared(at); }

// Four matrices of eight times eight halves: the row at `at` of each lane, and the elements that an operand of the lane takes.
template <bool TRANSPOSED> __device__ inline void load_matrices(uint (&to)[4], const void* at) {
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(at)) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(at)) : "memory");
    }
}

#define MULTIPLY(type, name)                                                                                           \
    __device__ inline void multiply(type, float (&sums)[4], const uint (&a)[4], uint b0, uint b1) {                    \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, "                  \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                                   \
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                  \
    }
MULTIPLY(__half, "f16")
MULTIPLY(__nv_bfloat16, "bf16")

template <typename T> __device__ inline uint packed(float low, float high) {
    return (uint)bits_of(from_float<T>(low)) | (uint)bits_of(from_float<T>(high)) << 16;
}

// e to a power that is not above 0.
__device__ inline float fast_power(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
}

// Begins to copy eight halves, or writes zeros where there is nothing.
template <typename T> __device__ inline void copy_eight(T* to, const T* from, int count, bool vectors) {
    if (vectors) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     : : "r"(shared_address(to)), "l"(from), "r"(count > 0 ? 16 : 0) : "memory");
        return;
    }
    Pack<T, 8> pack;
    read_pack(from, count, false, pack);
    *(Pack<T, 8>*)to = pack;
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
__device__ inline void wait_for_all() { asm volatile("cp.async.wait_group 0;" : : : "memory"); }

template <typename T, int SIZE>
__device__ inline void cores(const void* queries, const T* k, const T* v, const Attend& p, const Given& g) {
    constexpr int HALF_PITCH = SIZE + 8, CHUNKS = SIZE / 8, LANES = 128;
    __shared__ int4 places[ROWS];
    __shared__ __align__(16) T k_tile[KEYS][HALF_PITCH];
    __shared__ __align__(16) T v_tile[KEYS][HALF_PITCH];
    const T* q = (const T*)queries;
    Block block(p, g, ROWS);
    int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * 16;
    if (thread < ROWS) places[thread] = block.place(p, thread);
    __syncthreads();
    k += place_of(p.k, block.batch, block.key_head, 0);
    v += place_of(p.v, block.batch, block.key_head, 0);
    bool q_vectors = p.q_vectors && is_aligned(q), k_vectors = p.k_vectors && is_aligned(k), v_vectors = p.v_vectors && is_aligned(v);
    auto read = [&](T (*tile)[HALF_PITCH], const T* side, int step, int size, int start, bool vectors) {
        // Of the lines of its turns a thread reads the same columns.
        int line = thread / CHUNKS, c = thread % CHUNKS * 8;
        const T* from = side + (int64)(start + line) * step + c;
#pragma unroll
        for (int turn = 0; turn < KEYS * CHUNKS / LANES; turn++, line += LANES / CHUNKS, from += LANES / CHUNKS * (int64)step) {
            int count = start + line < block.end ? size - c : 0;
            copy_eight(&tile[line][c], count > 0 ? from : side, count, vectors);
        }
        commit();
    };
    // Queries pass through the tile of values on their way into registers.
#pragma unroll 1
    for (int chunk = thread; chunk < ROWS * CHUNKS; chunk += LANES) {
        int line = chunk / CHUNKS, c = chunk % CHUNKS * 8;
        int4 place = places[line];
        int count = place.x < p.heads ? p.size - c : 0;
        const T* from = count > 0 ? q + place_of(p.q, block.batch, place.x, place.y) + c : q;
        copy_eight(&v_tile[line][c], from, count, q_vectors && !g.bias);
        if (g.bias) {
            for (int i = 0; i < 8 && i < count; i++) {
                float sum = as_float(v_tile[line][c + i]) + as_float(((const T*)g.bias)[(int64)place.x * p.size + c + i]);
                v_tile[line][c + i] = from_float<T>(sum);
            }
        }
    }
    commit();
    wait_for_all();
    __syncthreads();
    uint left[SIZE / 16][4];
#pragma unroll
    for (int at = 0; at < SIZE / 16; at++) load_matrices<false>(left[at], &v_tile[warp_row + lane % 16][16 * at + lane / 16 * 8]);
    // A lane has two rows, which are eight apart, and of each eight keys or columns two.
    int own = lane % 4 * 2;
    float tops[2], totals[2], results[SIZE / 8][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 sink = block.sink(p, g, places[warp_row + lane / 4 + 8 * half].x);
        tops[half] = sink.x;
        totals[half] = own == 0 ? sink.y : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < SIZE / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) results[j][i] = 0.0f;
    }
    bool is_plain = !g.mask && p.padding == NO_PADDING && p.softcap <= 0.0f;
    read(k_tile, k, p.k.row, p.size, block.begin, k_vectors);
#pragma unroll 1
    for (int start = block.begin; start < block.end; start += KEYS) {
        wait_for_all();
        __syncthreads();
        // All warps are done with the values before.
        read(v_tile, v, p.v.row, p.value_size, start, v_vectors);
        float scores[KEYS / 8][4];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) scores[j][i] = 0.0f;
        }
#pragma unroll
        for (int at = 0; at < SIZE / 16; at++) {
            if (16 * at >= p.size) break;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j += 2) {
                uint right[4];
                load_matrices<false>(right, &k_tile[8 * j + lane / 16 * 8 + lane % 8][16 * at + lane / 8 % 2 * 8]);
                multiply(T(), scores[j], left[at], right[0], right[1]);
                multiply(T(), scores[j + 1], left[at], right[2], right[3]);
            }
        }
        if (is_plain && start >= block.all_begin && start + KEYS <= min(block.all_end, block.end)) {
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) scores[j][i] *= p.scale;
            }
        } else {
            // Scores take turns in the first place, so that their code is there once.
#pragma unroll 1
            for (int j = 0; j < KEYS / 8; j++) {
                float four[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int key = start + 8 * j + own + i % 2;
                    int4 place = places[warp_row + lane / 4 + i / 2 * 8];
                    four[i] = key < block.end ? score_of<false>(scores[0][i], place, block.batch, key, p, g) : -infinity();
                }
                next_row(scores);
#pragma unroll
                for (int i = 0; i < 4; i++) scores[KEYS / 8 - 1][i] = four[i];
            }
        }
        float decays[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = -infinity();
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) most = fmaxf(most, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
#pragma unroll
            for (int bits = 2; bits > 0; bits /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, bits));
            float top = fmaxf(tops[half], most), base = base_of(top);
            decays[half] = fast_power(tops[half] - base);
            tops[half] = top;
            float total = totals[half] * decays[half];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float weight = fast_power(scores[j][2 * half + i] - base);
                    scores[j][2 * half + i] = weight;
                    total += weight;
                }
            }
            totals[half] = total;
        }
#pragma unroll
        for (int j = 0; j < SIZE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) results[j][i] *= decays[i / 2];
        }
        wait_for_all();
        __syncthreads();
        // All warps are done with the keys.
        if (start + KEYS < block.end) read(k_tile, k, p.k.row, p.size, start + KEYS, k_vectors);
#pragma unroll
        for (int at = 0; at < KEYS / 16; at++) {
            uint weights[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weights[i] = packed<T>(scores[2 * at + i / 2][i % 2 * 2], scores[2 * at + i / 2][i % 2 * 2 + 1]);
            }
#pragma unroll
            for (int j = 0; j < SIZE / 8; j += 2) {
                if (8 * j >= p.value_size) break;
                uint right[4];
                load_matrices<true>(right, &v_tile[16 * at + lane % 16][8 * j + lane / 16 * 8]);
                multiply(T(), results[j], weights, right[0], right[1]);
                multiply(T(), results[j + 1], weights, right[2], right[3]);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = warp_row + lane / 4 + 8 * half;
        int4 place = places[row];
        float total = totals[half];
#pragma unroll
        for (int bits = 2; bits > 0; bits /= 2) total += __shfl_xor_sync(0xffffffffu, total, bits);
        if (place.x >= p.heads) continue;
        if (own == 0) put_line(block, row, tops[half], total, p, g);
#pragma unroll
        for (int j = 0; j < SIZE / 8; j++) {
            float two[2] = {results[j][2 * half], results[j][2 * half + 1]};
            if (8 * j + own < p.value_size) put(block, place, row, 8 * j + own, two, total, p, g);
        }
    }
}
#define ON_TENSOR_CORES(...) __VA_ARGS__
#else
#define ON_TENSOR_CORES(...)
#endif

// The host takes these where the device has them: from compute capability 8.0 on.
#define CORES(name, type, blocks, size)                                                                                \
    extern "C" __global__ void __launch_bounds__(128, blocks)                                                          \
        name(const void* q, const type* k, const type* v, const void* bias, const void* lengths, const void* mask,     \
             const int* padding, const void* sinks, void* scores, void* y, float* parts, Attend p) {                   \
        ON_TENSOR_CORES(Given g = {bias, lengths, mask, sinks, padding, scores, y, parts};                             \
                        (cores<type, size>(q, k, v, p, g));)                                                           \
    }

CORES(attend_cores_64_f16, __half, 3, 64)
CORES(attend_cores_128_f16, __half, 2, 128)
CORES(attend_cores_64_bf16, __nv_bfloat16, 3, 64)
CORES(attend_cores_128_bf16, __nv_bfloat16, 2, 128)
