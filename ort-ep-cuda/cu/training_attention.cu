// Dropout by counters, attention in training, and its gradients. No scores lie in memory: the backward pass computes them again (Dao et al.,
// "FlashAttention", arXiv 2205.14135, algorithm 4; Dao, arXiv 2307.08691), first what the softmax of each query is, then each gradient by blocks of its
// own, so that nothing is added up in an order that differs from run to run.
//
// A block has some rows, which are queries, or keys where the gradient is one by keys or values, and goes over tiles of the others, its columns.

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

template <typename T, int COUNT> struct alignas(sizeof(T) * COUNT > 16 ? 16 : sizeof(T) * COUNT) Pack { T of[COUNT]; };

__device__ inline double wide(double x) { return x; }
__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__half x) { return as_float(x); }
__device__ inline float wide(__nv_bfloat16 x) { return as_float(x); }
template <typename T, typename N> __device__ inline T narrow(N x) { return from_float<T>(x); }
template <> __device__ inline double narrow<double, double>(double x) { return x; }

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

// What a kernel makes: results, what the softmax of each query is, or gradients.
enum Mode { FORWARD, STATISTICS, BY_QUERIES, BY_KEYS, BY_VALUES };
// How masks are stored; attention.rs has the same numbers.
enum Kind { NO_MASK = -1, FLOAT, HALF, BFLOAT, BOOL };

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
        if (p.mask_kind == NO_MASK) return false;
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

// What scores are relative to: the greatest, where there is one.
__device__ inline float base_of(float top) { return top == -infinity() ? 0.0f : top; }

// The next rows of numbers move up, so that a loop over rows has its code once.
template <int MANY, int COUNT> __device__ inline void next_row(float (&rows)[MANY][COUNT]) {
#pragma unroll
    for (int row = 1; row < MANY; row++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) rows[row - 1][i] = rows[row][i];
    }
}

// The rows and columns of a block, and the tensors that they are of: the first have `size` elements, the second `value_size`.
template <typename T> struct Sides {
    const T *rows, *second_rows, *columns, *second_columns;
    int row_count, column_count;

    __device__ Sides(int mode, const T* q, const T* k, const T* v, const T* upstream, int head, const Attention& p) {
        const T* of_queries = q + (int64)head * p.queries * p.size;
        const T* of_keys = k + (int64)head * p.keys * p.size;
        const T* second_of_keys = v + (int64)head * p.keys * p.value_size;
        const T* second_of_queries = mode == FORWARD ? v : upstream + (int64)head * p.queries * p.value_size;
        bool are_keys = mode == BY_KEYS || mode == BY_VALUES;
        rows = are_keys ? of_keys : of_queries, columns = are_keys ? of_queries : of_keys;
        second_rows = are_keys ? second_of_keys : second_of_queries, second_columns = are_keys ? second_of_queries : second_of_keys;
        row_count = are_keys ? p.keys : p.queries, column_count = are_keys ? p.queries : p.keys;
    }
};

template <typename T, int COUNT> __device__ inline bool in_packs(const T* at, int size) {
    return size % COUNT == 0 && (uint64)at % alignof(Pack<T, COUNT>) == 0;
}

// Four elements that lie next to each other, of which so many are there; zeros for the others.
template <typename T> __device__ inline void read_four(const T* at, int count, bool vectors, float (&to)[4]) {
    if (vectors && count >= 4) {
        Pack<T, 4> pack = *(const Pack<T, 4>*)at;
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = as_float(pack.of[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = i < count ? as_float(at[i]) : 0.0f;
}

// Heads of any size: 64 rows and 64 columns at a time by 16 times 16 threads, each with four rows and four columns, then with four rows and WIDE / 16
// columns of the results. A block has WIDE columns of these.
constexpr int ROWS = 64, COLUMNS = 64, DEPTH = 16, PITCH = 68;

// Products of rows and columns: a thread reads four elements of the row and of the column `thread / 4`.
template <typename T>
__device__ inline void product(const T* row, bool row_there, const T* column, bool column_there, int depth, bool row_vectors, bool column_vectors,
                               float* memory, float (&sums)[4][4]) {
    int thread = threadIdx.x, line = thread / 4, step = thread % 4 * 4, own_row = thread / 16 * 4, own = thread % 16 * 4;
    float row_next[4], column_next[4];
    auto read = [&](int d) {
        int count = depth - d - step;
        read_four(row + d + step, row_there ? count : 0, row_vectors, row_next);
        read_four(column + d + step, column_there ? count : 0, column_vectors, column_next);
    };
    auto write = [&](int stage) {
        float* to = memory + stage * 2 * DEPTH * PITCH;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[(step + i) * PITCH + line] = row_next[i];
            to[(DEPTH + step + i) * PITCH + line] = column_next[i];
        }
    };
    read(0);
    __syncthreads();
    write(0);
    __syncthreads();
    for (int d = 0, now = 0; d < depth; d += DEPTH, now ^= 1) {
        bool more = d + DEPTH < depth;
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
}

// Results by the weights of a tile of columns, whose rows of `width` elements are at `from`.
template <int WIDE, typename T>
__device__ inline void combine(const float (*weights)[PITCH], const T* from, int many, int width, int column0, bool vectors, float* memory,
                               float (&results)[4][WIDE / 16]) {
    constexpr int QUADS = WIDE / 64, WIDE_PITCH = WIDE + 4, ABREAST = 4 / QUADS;
    int thread = threadIdx.x, own_row = thread / 16 * 4, own = thread % 16 * 4;
    float next[QUADS][4];
    auto read = [&](int first) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            int at = thread + i * 256, line = first + at / (WIDE / 4), column = column0 + at % (WIDE / 4) * 4;
            read_four(from + (int64)line * width + column, line < many ? width - column : 0, vectors, next[i]);
        }
    };
    auto write = [&](int stage) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            int at = thread + i * 256;
            float* to = memory + (stage * DEPTH + at / (WIDE / 4)) * WIDE_PITCH + at % (WIDE / 4) * 4;
#pragma unroll
            for (int j = 0; j < 4; j++) to[j] = next[i][j];
        }
    };
    read(0);
    // All threads have written their weights, and are done with what was in the memory.
    __syncthreads();
    write(0);
    __syncthreads();
    for (int first = 0, now = 0; first < many; first += DEPTH, now ^= 1) {
        bool more = first + DEPTH < many;
        if (more) read(first + DEPTH);
#pragma unroll
        for (int at = 0; at < DEPTH; at += ABREAST) {
            Pack<float, ABREAST> left[4];
#pragma unroll
            for (int i = 0; i < 4; i++) left[i] = *(const Pack<float, ABREAST>*)&weights[own_row + i][first + at];
#pragma unroll
            for (int line = 0; line < ABREAST; line++) {
                const float* right_row = memory + (now * DEPTH + at + line) * WIDE_PITCH + own;
#pragma unroll
                for (int quad = 0; quad < QUADS; quad++) {
                    Pack<float, 4> right = *(const Pack<float, 4>*)(right_row + 64 * quad);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
#pragma unroll
                        for (int j = 0; j < 4; j++) results[i][4 * quad + j] += left[i].of[line] * right.of[j];
                    }
                }
            }
        }
        if (more) {
            write(now ^ 1);
            __syncthreads();
        }
    }
}

// What a softmax has met of a row: the greatest score, the sum of weights, and that of dropped weights times their gradients.
struct Line { float top, total, along; };

template <typename T, int WIDE, int MODE>
__device__ inline void tiles(const T* q, const T* k, const T* v, const T* upstream, T* y, const Attention& p, const Given& g) {
    constexpr bool ARE_KEYS = MODE == BY_KEYS || MODE == BY_VALUES, IS_ONLINE = MODE == FORWARD || MODE == STATISTICS;
    constexpr bool HAS_SECOND = MODE == STATISTICS || MODE == BY_QUERIES || MODE == BY_KEYS;
    constexpr bool IS_SECOND = MODE == FORWARD || MODE == BY_VALUES;
    __shared__ __align__(16) float weights[ROWS][PITCH];
    __shared__ __align__(16) float memory[4 * DEPTH * PITCH];
    __shared__ float decays[ROWS];
    __shared__ Line lines[ROWS];
    int thread = threadIdx.x, own_row = thread / 16 * 4, own = thread % 16 * 4, line = thread / 4, column0 = blockIdx.y * WIDE;
    int blocks = ((ARE_KEYS ? p.keys : p.queries) + ROWS - 1) / ROWS, first = blockIdx.x % blocks * ROWS;
    Head head(p, blockIdx.x / blocks);
    Sides<T> sides(MODE, q, k, v, upstream, head.head, p);
    int64 all = (int64)p.heads * p.queries, lines_at = (int64)head.head * p.queries;
    // What is known of queries is of the rows, or of the columns of each tile.
    auto read_lines = [&](int from, int count) {
        if (thread >= ROWS) return;
        bool there = from + thread < count;
        const float* at = g.lines + lines_at + from + thread;
        lines[thread] = there ? Line{at[0], at[all], HAS_SECOND ? at[2 * all] : 0.0f} : Line{0.0f, 0.0f, 0.0f};
    };
    if (IS_ONLINE && thread < ROWS) lines[thread] = {-infinity(), 0.0f, 0.0f};
    if (MODE == BY_QUERIES) read_lines(first, sides.row_count);
    bool vectors[4] = {in_packs<T, 4>(sides.rows, p.size), in_packs<T, 4>(sides.columns, p.size),
                       in_packs<T, 4>(sides.second_rows, p.value_size), in_packs<T, 4>(sides.second_columns, p.value_size)};
    float results[4][WIDE / 16];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < WIDE / 16; j++) results[i][j] = 0.0f;
    }
    for (int start = 0; start < sides.column_count; start += COLUMNS) {
        bool row_there = first + line < sides.row_count, column_there = start + line < sides.column_count;
        float sums[4][4] = {}, seconds[4][4] = {};
        const T *row = sides.rows + (int64)(first + line) * p.size, *column = sides.columns + (int64)(start + line) * p.size;
        product(row, row_there, column, column_there, p.size, vectors[0], vectors[1], memory, sums);
        if (HAS_SECOND) {
            row = sides.second_rows + (int64)(first + line) * p.value_size;
            column = sides.second_columns + (int64)(start + line) * p.value_size;
            product(row, row_there, column, column_there, p.value_size, vectors[2], vectors[3], memory, seconds);
        }
        if (ARE_KEYS) {
            // All threads are done with the tile before.
            __syncthreads();
            read_lines(start, p.queries);
            __syncthreads();
        }
        // Of the thread's keys of each of its queries, which are kept.
        uint kept = 0xffff;
        if (p.drops) {
            kept = 0;
            Dropout dropout = dropout_of(p, g);
            int query = ARE_KEYS ? start + own : first + own_row, key = ARE_KEYS ? first + own_row : start + own;
#pragma unroll 1
            for (int i = 0; i < 4; i++) kept |= dropout.kept_from(head.place(query + i, key, p)) << 4 * i;
        }
        float factor = factor_of(p, g);
        // Rows take turns in the first place, so that their code is there once.
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            bool zero[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int other = start + own + j, query = ARE_KEYS ? other : first + own_row + i, key = ARE_KEYS ? first + own_row + i : other;
                bool there = query < p.queries && key < p.keys;
                bool filled = there && head.mask(sums[0][j], query, key, p, g);
                if (!there) sums[0][j] = -infinity();
                zero[j] = !there || (HAS_SECOND && filled);
            }
            Pack<float, 4> pack;
            auto is_kept = [&](int j) { return (kept >> (ARE_KEYS ? 4 * j + i : 4 * i + j) & 1) != 0; };
            if constexpr (IS_ONLINE) {
                Line of_row = lines[own_row + i];
                float most = -infinity();
#pragma unroll
                for (int j = 0; j < 4; j++) most = fmaxf(most, sums[0][j]);
#pragma unroll
                for (int bits = 8; bits > 0; bits /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, bits));
                float top = fmaxf(of_row.top, most), base = base_of(top), decay = expf(of_row.top - base), total = 0.0f, along = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float weight = expf(sums[0][j] - base), share = is_kept(j) ? weight * factor : 0.0f;
                    total += weight;
                    // What is not there has no gradient, and weighs nothing.
                    if (MODE == STATISTICS) along += share * seconds[0][j];
                    pack.of[j] = share;
                }
#pragma unroll
                for (int bits = 8; bits > 0; bits /= 2) {
                    total += __shfl_xor_sync(0xffffffffu, total, bits);
                    if (MODE == STATISTICS) along += __shfl_xor_sync(0xffffffffu, along, bits);
                }
                // The threads of a row are of one warp, which has read what is written here.
                __syncwarp();
                if (own == 0) {
                    lines[own_row + i] = {top, of_row.total * decay + total, of_row.along * decay + along};
                    decays[own_row + i] = decay;
                }
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    Line of_query = lines[ARE_KEYS ? own + j : own_row + i];
                    float weight = expf(sums[0][j] - of_query.top) * of_query.total, share = is_kept(j) ? weight * factor : 0.0f;
                    float value = HAS_SECOND ? share * seconds[0][j] - weight * of_query.along : share;
                    pack.of[j] = zero[j] ? 0.0f : value;
                }
            }
            if (MODE != STATISTICS) *(Pack<float, 4>*)&weights[own_row + i][own] = pack;
            next_row(sums);
            if (HAS_SECOND) next_row(seconds);
        }
        if constexpr (MODE != STATISTICS) {
            if (MODE == FORWARD) {
                __syncwarp();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float decay = decays[own_row + i];
#pragma unroll
                    for (int j = 0; j < WIDE / 16; j++) results[i][j] *= decay;
                }
            }
            int width = IS_SECOND ? p.value_size : p.size;
            const T* from = (IS_SECOND ? sides.second_columns : sides.columns) + (int64)start * width;
            combine<WIDE>(weights, from, min(COLUMNS, sides.column_count - start), width, column0, vectors[IS_SECOND ? 3 : 1], memory, results);
        }
    }
    if constexpr (MODE == STATISTICS) {
        __syncthreads();
        if (thread < ROWS && first + thread < p.queries) {
            Line of_row = lines[thread];
            float* at = g.lines + lines_at + first + thread;
            at[0] = base_of(of_row.top), at[all] = 1.0f / of_row.total, at[2 * all] = of_row.along / of_row.total;
        }
        return;
    }
    int width = IS_SECOND ? p.value_size : p.size;
    bool y_vectors = in_packs<T, 4>(y, width);
    __syncthreads();
#pragma unroll 1
    for (int row = own_row; row < own_row + 4 && first + row < sides.row_count; row++, next_row(results)) {
        float factor = MODE == FORWARD ? 1.0f / (p.keys == 0 ? 1.0f : lines[row].total) : 1.0f;
        T* to = y + ((int64)head.head * sides.row_count + first + row) * width;
#pragma unroll
        for (int quad = 0; quad < WIDE / 64; quad++) {
            int column = column0 + own + 64 * quad;
            Pack<T, 4> pack;
#pragma unroll
            for (int j = 0; j < 4; j++) pack.of[j] = from_float<T>(results[0][4 * quad + j] * factor);
            if (y_vectors && column + 4 <= width) {
                *(Pack<T, 4>*)(to + column) = pack;
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (column + j < width) to[column + j] = pack.of[j];
            }
        }
    }
}

#define ENTRY(name, type, threads, blocks, body)                                                                       \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                      \
        name(const type* q, const type* k, const type* v, const type* upstream, const void* mask, const float* ratio,  \
             const int64* seed, const int64* step, float* lines, type* y, Attention p) {                               \
        Given g = {mask, ratio, seed, step, lines};                                                                    \
        body(q, k, v, upstream, y, p, g);                                                                              \
    }
#define OF_MODES(suffix, type, wide)                                                                                   \
    ENTRY(attend_tiles_##wide##_##suffix, type, 256, 2, (tiles<type, wide, FORWARD>))                                  \
    ENTRY(by_queries_tiles_##wide##_##suffix, type, 256, 2, (tiles<type, wide, BY_QUERIES>))                           \
    ENTRY(by_keys_tiles_##wide##_##suffix, type, 256, 2, (tiles<type, wide, BY_KEYS>))                                 \
    ENTRY(by_values_tiles_##wide##_##suffix, type, 256, 2, (tiles<type, wide, BY_VALUES>))
#define TILES(suffix, type)                                                                                            \
    ENTRY(statistics_tiles_##suffix, type, 256, 2, (tiles<type, 64, STATISTICS>))                                      \
    OF_MODES(suffix, type, 64) OF_MODES(suffix, type, 128)

TILES(f32, float)
TILES(f16, __half)
TILES(bf16, __nv_bfloat16)

// Tensor cores: 64 rows by four warps, each with 16, and as many columns at a time as shared memory has room for.

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

__device__ inline uint bits_of(__half x) { return static_cast<__half_raw>(x).x; }
__device__ inline uint bits_of(__nv_bfloat16 x) { return static_cast<__nv_bfloat16_raw>(x).x; }
template <typename T> __device__ inline uint packed(float low, float high) {
    return bits_of(from_float<T>(low)) | bits_of(from_float<T>(high)) << 16;
}

// e to a power.
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
#pragma unroll
    for (int i = 0; i < 8; i++) pack.of[i] = i < count ? from[i] : from_float<T>(0.0f);
    *(Pack<T, 8>*)to = pack;
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int PENDING> __device__ inline void wait() { asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory"); }

// Begins to copy rows of `width` elements into a tile; zeros for those that are not there.
template <int MANY, int SIZE, typename T>
__device__ inline void copy_rows(T (*tile)[SIZE + 8], const T* from, int width, int first, int count, bool vectors) {
    constexpr int CHUNKS = SIZE / 8, LANES = 128;
    int line = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS * 8;
#pragma unroll
    for (int turn = 0; turn < MANY * CHUNKS / LANES; turn++, line += LANES / CHUNKS) {
        int there = first + line < count ? width - c : 0;
        copy_eight(&tile[line][c], there > 0 ? from + (int64)(first + line) * width + c : from, there, vectors);
    }
    commit();
}

// Of the four elements that a lane has of eight columns, the ones that are kept: words of four keys are computed by one lane and handed to the others.
template <bool ARE_KEYS>
__device__ inline uint kept_of(const Dropout& dropout, const Head& head, int row, int column, int lane, bool in_fours, const Attention& p) {
    uint bits = 0;
    if (!in_fours) {
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            int of_row = row + lane / 4 + i / 2 * 8, of_column = column + lane % 4 * 2 + i % 2;
            uint64 at = ARE_KEYS ? head.place(of_column, of_row, p) : head.place(of_row, of_column, p);
            bits |= (dropout.kept(at / 4) >> at % 4 & 1) << i;
        }
        return bits;
    }
    if (ARE_KEYS) {
        int own = lane / 4 % 4;
        uint four = dropout.kept(head.place(column + lane % 4 * 2 + own % 2, row + own / 2 * 8 + lane / 16 * 4, p) / 4);
#pragma unroll
        for (int i = 0; i < 4; i++) bits |= (__shfl_sync(0xffffffffu, four, lane / 16 * 16 + 4 * i + lane % 4) >> own & 1) << i;
        return bits;
    }
    uint four = dropout.kept(head.place(row + lane / 4 + lane % 2 * 8, column + lane % 4 / 2 * 4, p) / 4);
    uint other = __shfl_xor_sync(0xffffffffu, four, 1);
    uint low = lane % 2 ? other : four, high = lane % 2 ? four : other;
    return (low >> lane % 2 * 2 & 3) | (high >> lane % 2 * 2 & 3) << 2;
}

template <typename T, int SIZE, int MODE>
__device__ inline void cores(const T* q, const T* k, const T* v, const T* upstream, T* y, const Attention& p, const Given& g) {
    constexpr bool ARE_KEYS = MODE == BY_KEYS || MODE == BY_VALUES, IS_ONLINE = MODE == FORWARD || MODE == STATISTICS;
    constexpr bool HAS_SECOND = MODE == STATISTICS || MODE == BY_QUERIES || MODE == BY_KEYS;
    constexpr bool IS_SECOND = MODE == FORWARD || MODE == BY_VALUES;
    constexpr int HALF_PITCH = SIZE + 8, MANY = SIZE == 64 ? 64 : 32, RESULTS = MODE == STATISTICS ? 1 : SIZE / 8;
    __shared__ __align__(16) T tiles[2 * MANY][HALF_PITCH];
    __shared__ __align__(16) T second_rows[HAS_SECOND ? ROWS : 1][HALF_PITCH];
    __shared__ Line lines[MANY];
    int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * 16, own = lane % 4 * 2;
    int blocks = ((ARE_KEYS ? p.keys : p.queries) + ROWS - 1) / ROWS, first = blockIdx.x % blocks * ROWS;
    Head head(p, blockIdx.x / blocks);
    Sides<T> sides(MODE, q, k, v, upstream, head.head, p);
    int64 all = (int64)p.heads * p.queries, lines_at = (int64)head.head * p.queries;
    bool vectors[2] = {in_packs<T, 8>(sides.rows, p.size) && in_packs<T, 8>(sides.columns, p.size),
                       in_packs<T, 8>(sides.second_rows, p.value_size) && in_packs<T, 8>(sides.second_columns, p.value_size)};
    // Rows pass through the tiles of columns on their way into registers.
    copy_rows<ROWS, SIZE>(tiles, sides.rows, p.size, first, sides.row_count, vectors[0]);
    if constexpr (HAS_SECOND) copy_rows<ROWS, SIZE>(second_rows, sides.second_rows, p.value_size, first, sides.row_count, vectors[1]);
    wait<0>();
    __syncthreads();
    uint left[SIZE / 16][4];
#pragma unroll
    for (int at = 0; at < SIZE / 16; at++) load_matrices<false>(left[at], &tiles[warp_row + lane % 16][16 * at + lane / 16 * 8]);
    // A lane has two rows, which are eight apart, and of each eight columns two.
    Line of_rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        of_rows[half] = {IS_ONLINE ? -infinity() : 0.0f, 0.0f, 0.0f};
        int query = first + warp_row + lane / 4 + 8 * half;
        if (MODE == BY_QUERIES && query < p.queries) {
            const float* at = g.lines + lines_at + query;
            of_rows[half] = {at[0], at[all], at[2 * all]};
        }
    }
    float results[RESULTS][4];
#pragma unroll
    for (int j = 0; j < RESULTS; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) results[j][i] = 0.0f;
    }
    bool in_fours = p.keys % 4 == 0;
#pragma unroll 1
    for (int start = 0; start < sides.column_count; start += MANY) {
        // All warps are done with the tiles before.
        __syncthreads();
        copy_rows<MANY, SIZE>(tiles, sides.columns, p.size, start, sides.column_count, vectors[0]);
        copy_rows<MANY, SIZE>(tiles + MANY, sides.second_columns, p.value_size, start, sides.column_count, vectors[1]);
        if (ARE_KEYS && thread < MANY) {
            const float* at = g.lines + lines_at + start + thread;
            lines[thread] = start + thread < p.queries ? Line{at[0], at[all], HAS_SECOND ? at[2 * all] : 0.0f} : Line{0.0f, 0.0f, 0.0f};
        }
        wait<1>();
        __syncthreads();
        float scores[MANY / 8][4], seconds[HAS_SECOND ? MANY / 8 : 1][4];
#pragma unroll
        for (int j = 0; j < MANY / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[j][i] = 0.0f;
                if (HAS_SECOND) seconds[j][i] = 0.0f;
            }
        }
#pragma unroll
        for (int at = 0; at < SIZE / 16; at++) {
            if (16 * at >= p.size) break;
#pragma unroll
            for (int j = 0; j < MANY / 8; j += 2) {
                uint right[4];
                load_matrices<false>(right, &tiles[8 * j + lane / 16 * 8 + lane % 8][16 * at + lane / 8 % 2 * 8]);
                multiply(T(), scores[j], left[at], right[0], right[1]);
                multiply(T(), scores[j + 1], left[at], right[2], right[3]);
            }
        }
        wait<0>();
        __syncthreads();
        if constexpr (HAS_SECOND) {
#pragma unroll
            for (int at = 0; at < SIZE / 16; at++) {
                if (16 * at >= p.value_size) break;
                uint own_left[4];
                load_matrices<false>(own_left, &second_rows[warp_row + lane % 16][16 * at + lane / 16 * 8]);
#pragma unroll
                for (int j = 0; j < MANY / 8; j += 2) {
                    uint right[4];
                    load_matrices<false>(right, &tiles[MANY + 8 * j + lane / 16 * 8 + lane % 8][16 * at + lane / 8 % 2 * 8]);
                    multiply(T(), seconds[j], own_left, right[0], right[1]);
                    multiply(T(), seconds[j + 1], own_left, right[2], right[3]);
                }
            }
        }
        // Of all elements of the lane a bit: whether it is kept, and whether it weighs nothing.
        uint kept = ~0u, zero = 0;
        if (p.drops) {
            kept = 0;
            Dropout dropout = dropout_of(p, g);
#pragma unroll 1
            for (int j = 0; j < MANY / 8; j++) {
                kept |= kept_of<ARE_KEYS>(dropout, head, first + warp_row, start + 8 * j, lane, in_fours, p) << 4 * j;
            }
        }
        if (p.mask_kind != NO_MASK || start + MANY > sides.column_count || first + ROWS > sides.row_count) {
            // Scores take turns in the first place, so that their code is there once.
#pragma unroll 1
            for (int j = 0; j < MANY / 8; j++) {
                float four[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int row = first + warp_row + lane / 4 + i / 2 * 8, column = start + 8 * j + own + i % 2;
                    int query = ARE_KEYS ? column : row, key = ARE_KEYS ? row : column;
                    bool there = query < p.queries && key < p.keys;
                    four[i] = scores[0][i];
                    bool filled = there && head.mask(four[i], query, key, p, g);
                    if (!there) four[i] = -infinity();
                    zero |= (uint)(!there || (HAS_SECOND && filled)) << (4 * j + i);
                }
                next_row(scores);
#pragma unroll
                for (int i = 0; i < 4; i++) scores[MANY / 8 - 1][i] = four[i];
            }
        }
        float factor = factor_of(p, g);
        if constexpr (IS_ONLINE) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = -infinity();
#pragma unroll
                for (int j = 0; j < MANY / 8; j++) most = fmaxf(most, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
#pragma unroll
                for (int bits = 2; bits > 0; bits /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, bits));
                Line& line = of_rows[half];
                float top = fmaxf(line.top, most), base = base_of(top), decay = fast_power(line.top - base);
                line = {top, line.total * decay, line.along * decay};
#pragma unroll
                for (int j = 0; j < MANY / 8; j++) {
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; i++) {
                        float weight = fast_power(scores[j][i] - base), share = kept >> (4 * j + i) & 1 ? weight * factor : 0.0f;
                        line.total += weight;
                        if (MODE == STATISTICS) line.along += share * seconds[HAS_SECOND ? j : 0][i];
                        scores[j][i] = share;
                    }
                }
#pragma unroll
                for (int j = 0; j < RESULTS; j++) results[j][2 * half] *= decay, results[j][2 * half + 1] *= decay;
            }
        } else {
#pragma unroll
            for (int j = 0; j < MANY / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    Line line = ARE_KEYS ? lines[8 * j + own + i % 2] : of_rows[i / 2];
                    float weight = fast_power(scores[j][i] - line.top) * line.total, share = kept >> (4 * j + i) & 1 ? weight * factor : 0.0f;
                    float value = HAS_SECOND ? share * seconds[HAS_SECOND ? j : 0][i] - weight * line.along : share;
                    scores[j][i] = zero >> (4 * j + i) & 1 ? 0.0f : value;
                }
            }
        }
        if constexpr (MODE != STATISTICS) {
            int width = IS_SECOND ? p.value_size : p.size;
#pragma unroll
            for (int at = 0; at < MANY / 16; at++) {
                uint weights[4];
#pragma unroll
                for (int i = 0; i < 4; i++) weights[i] = packed<T>(scores[2 * at + i / 2][i % 2 * 2], scores[2 * at + i / 2][i % 2 * 2 + 1]);
#pragma unroll
                for (int j = 0; j < SIZE / 8; j += 2) {
                    if (8 * j >= width) break;
                    uint right[4];
                    load_matrices<true>(right, &tiles[(IS_SECOND ? MANY : 0) + 16 * at + lane % 16][8 * j + lane / 16 * 8]);
                    multiply(T(), results[j], weights, right[0], right[1]);
                    multiply(T(), results[j + 1], weights, right[2], right[3]);
                }
            }
        }
    }
    int width = IS_SECOND ? p.value_size : p.size;
    bool in_pairs = in_packs<T, 2>(y, width);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + warp_row + lane / 4 + 8 * half;
        Line line = of_rows[half];
        if (IS_ONLINE) {
#pragma unroll
            for (int bits = 2; bits > 0; bits /= 2) {
                line.total += __shfl_xor_sync(0xffffffffu, line.total, bits);
                line.along += __shfl_xor_sync(0xffffffffu, line.along, bits);
            }
        }
        if (row >= sides.row_count) continue;
        if constexpr (MODE == STATISTICS) {
            float* at = g.lines + lines_at + row;
            if (own == 0) at[0] = base_of(line.top), at[all] = 1.0f / line.total, at[2 * all] = line.along / line.total;
        } else {
            float factor = MODE == FORWARD ? 1.0f / (p.keys == 0 ? 1.0f : line.total) : 1.0f;
            T* to = y + ((int64)head.head * sides.row_count + row) * width;
#pragma unroll
            for (int j = 0; j < SIZE / 8; j++) {
                int column = 8 * j + own;
                T low = from_float<T>(results[j][2 * half] * factor), high = from_float<T>(results[j][2 * half + 1] * factor);
                if (in_pairs && column + 2 <= width) {
                    *(Pack<T, 2>*)(to + column) = {low, high};
                    continue;
                }
                if (column < width) to[column] = low;
                if (column + 1 < width) to[column + 1] = high;
            }
        }
    }
}
#define ON_TENSOR_CORES(...) __VA_ARGS__
#else
#define ON_TENSOR_CORES(...)
#endif

// The host takes these where the device has them: from compute capability 8.0 on.
#define CORE(name, suffix, type, size, blocks, mode)                                                                   \
    extern "C" __global__ void __launch_bounds__(128, blocks)                                                          \
        name##_cores_##size##_##suffix(const type* q, const type* k, const type* v, const type* upstream, const void* mask,       \
                            const float* ratio, const int64* seed, const int64* step, float* lines, type* y,           \
                            Attention p) {                                                                             \
        ON_TENSOR_CORES(Given g = {mask, ratio, seed, step, lines};                                                    \
                        (cores<type, size, mode>(q, k, v, upstream, y, p, g));)                                        \
    }
#define CORES(suffix, type, size, blocks)                                                                              \
    CORE(attend, suffix, type, size, blocks, FORWARD)                                                                  \
    CORE(statistics, suffix, type, size, blocks, STATISTICS)                                                           \
    CORE(by_queries, suffix, type, size, blocks, BY_QUERIES)                                                           \
    CORE(by_keys, suffix, type, size, blocks, BY_KEYS)                                                                 \
    CORE(by_values, suffix, type, size, blocks, BY_VALUES)

CORES(f16, __half, 64, 3)
CORES(f16, __half, 128, 2)
CORES(bf16, __nv_bfloat16, 64, 3)
CORES(bf16, __nv_bfloat16, 128, 2)
