#pragma once

#include "attention.cuh"

// Up to MANY rows by 256 threads: scores of 256 keys, for each of which some threads read its row, then the values by their weights. What
// the first turns of a tile read is on its way before anything is computed of it.
constexpr int MOST_SIZE = 256, FEW_KEYS = 256, WARPS = FEW_KEYS / 32;

__device__ inline uint word_of(float x) { return __float_as_uint(x); }
template <typename T> __device__ inline uint word_of(T x) { return bits_of(x); }

// Elements as they lie in memory: 16 bytes or less, which are read at once.
template <typename T, int COUNT> struct Raw {
    Pack<uint, COUNT * sizeof(T) / 4> words;

    // The first `count` elements; zeros for the others.
    __device__ void read(const T* at, int count, bool vectors) {
        words = {};
        if (vectors) {
            if (count > 0) words = *(const Pack<uint, COUNT * sizeof(T) / 4>*)at;
            return;
        }
        // One by one, the last first: what is not aligned is rare, and must not take registers from what is.
        constexpr int BITS = 8 * sizeof(T);
        uint64 low = 0, high = 0;
#pragma unroll 1
        for (int i = min(count, COUNT) - 1; i >= 0; i--) {
            high = high << BITS | low >> (64 - BITS);
            low = low << BITS | word_of(at[i]);
        }
        words.of[0] = (uint)low;
        words.of[1] = (uint)(low >> 32);
        if constexpr (COUNT * sizeof(T) == 16) {
            words.of[2] = (uint)high;
            words.of[3] = (uint)(high >> 32);
        }
    }
    __device__ float operator[](int i) const { return as_float(((const Pack<T, COUNT>*)&words)->of[i]); }
};

// Reads `count` elements of rows from `first` on, a number of rows and of elements apart, as far as these are before the end.
template <int MANY, typename T, int COUNT>
__device__ inline void read_rows(Raw<T, COUNT> (&to)[MANY], const T* from, int64 step, int first, int apart, int end, int count, bool vectors) {
#pragma unroll
    for (int i = 0; i < MANY; i++, first += apart, from += step) to[i].read(from, first < end ? count : 0, vectors);
}

// Reads the queries into memory, of which a thread has one element each.
template <int MANY, typename Q>
__device__ inline void fill_queries(const Q* q, const Q* bias, const int4* places, int batch, float (*queries)[MOST_SIZE], const Attend& p) {
    int c = threadIdx.x;
    float own[MANY];
#pragma unroll
    for (int row = 0; row < MANY; row++) {
        int4 place = places[row];
        own[row] = c < p.size && place.x < p.heads ? as_float(q[place_of(p.q, batch, place.x, place.y) + c]) : 0.0f;
        if (bias && c < p.size && place.x < p.heads) own[row] += as_float(bias[(int64)place.x * p.size + c]);
    }
#pragma unroll
    for (int row = 0; row < MANY; row++) queries[row][c] = own[row];
}

template <typename T, int MANY>
__device__ inline void few_rows(const void* q, const T* k, const T* v, const Attend& p, const Given& g) {
    constexpr int VECTOR = 16 / sizeof(T);
    // Keys and values that a thread has on their way at once.
    constexpr int ABREAST = MANY == 1 ? 8 : 4, AHEAD = 8;
    // Each row has the scores of some warps, a thread as many neighbouring keys as there are rows.
    constexpr int OF_ROW = FEW_KEYS / MANY, SHARING = OF_ROW / 32;
    // Results of a row that a thread keeps, of which attend.rs knows, too.
    constexpr int KEPT = MANY == 1 ? VECTOR : 4;
    // Queries and weights, and behind these pieces of the results, of which `WARPS` times 32 threads have `KEPT` each.
    constexpr int PIECES = FEW_KEYS * KEPT;
    __shared__ __align__(16) float memory[MANY * (PIECES > MOST_SIZE + FEW_KEYS ? PIECES : MOST_SIZE + FEW_KEYS)];
    float(*queries)[MOST_SIZE] = (float(*)[MOST_SIZE])memory;
    float(*weights)[FEW_KEYS] = (float(*)[FEW_KEYS])(memory + MANY * MOST_SIZE);
    __shared__ float of_warps[MANY][SHARING], decays[MANY];
    __shared__ int4 places[MANY];
    Block block(p, g, MANY);
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (thread < MANY) places[thread] = block.place(p, thread);
    k += place_of(p.k, block.batch, block.key_head, 0);
    v += place_of(p.v, block.batch, block.key_head, 0);
    bool k_vectors = p.k_vectors && is_aligned(k), v_vectors = p.v_vectors && is_aligned(v);
    // Threads that share a row take turns through it; groups of them have rows of their own.
    int key_bits = 31 - __clz(p.key_lanes), key_part = (thread & (p.key_lanes - 1)) * VECTOR, key_group = thread >> key_bits;
    int key_groups = FEW_KEYS >> key_bits, key_step = p.key_lanes * VECTOR;
    int value_bits = 31 - __clz(p.value_lanes), column = (thread & (p.value_lanes - 1)) * KEPT, value_group = thread >> value_bits;
    int value_groups = FEW_KEYS >> value_bits;
    Raw<T, VECTOR> keys[ABREAST];
    Raw<T, KEPT> values[AHEAD];
    auto read_keys = [&](int start, int base, int c) {
        int first = start + base + key_group;
        read_rows(keys, k + (int64)first * p.k.row + c, (int64)p.k.row * key_groups, first, key_groups, block.end, p.size - c, k_vectors);
    };
    auto read_values = [&](int start, int base) {
        int first = start + base + value_group;
        const T* from = v + (int64)first * p.v.row + column;
        read_rows(values, from, (int64)p.v.row * value_groups, first, value_groups, block.end, p.value_size - column, v_vectors);
    };
    int own_row = thread / OF_ROW, own_key = thread % OF_ROW * MANY;
    float added[MANY], results[MANY][KEPT];
    uint shown;
    __syncthreads();
    int4 place = places[own_row];
    auto read_ahead = [&](int start) {
        read_keys(start, 0, key_part);
        read_values(start, 0);
        int key = start + own_key;
        shown = changes_of(make_int4(place.x, place.y, place.z, min(place.w, block.end)), block.batch, key, p, g, added);
    };
    read_ahead(block.begin);
    if (p.q_kind == FLOAT) fill_queries<MANY>((const float*)q, (const float*)g.bias, places, block.batch, queries, p);
    else if (p.q_kind == HALF) fill_queries<MANY>((const __half*)q, (const __half*)g.bias, places, block.batch, queries, p);
    else fill_queries<MANY>((const __nv_bfloat16*)q, (const __nv_bfloat16*)g.bias, places, block.batch, queries, p);
    float2 sink = block.sink(p, g, place.x);
    float top = sink.x, total = own_key == 0 ? sink.y : 0.0f;
#pragma unroll
    for (int row = 0; row < MANY; row++) {
#pragma unroll
        for (int i = 0; i < KEPT; i++) results[row][i] = 0.0f;
    }
#pragma unroll 1
    for (int start = block.begin; start < block.end; start += FEW_KEYS) {
        int many = min(FEW_KEYS, block.end - start);
        __syncthreads();
#pragma unroll 1
        for (int base = 0; base < many; base += ABREAST * key_groups) {
            float sums[ABREAST][MANY] = {};
#pragma unroll 1
            for (int c = key_part; c - key_part < p.size; c += key_step) {
                if (base > 0 || c != key_part) read_keys(start, base, c);
#pragma unroll
                for (int at = 0; at < VECTOR; at += 4) {
#pragma unroll
                    for (int row = 0; row < MANY; row++) {
                        Pack<float, 4> four = *(const Pack<float, 4>*)&queries[row][c + at];
#pragma unroll
                        for (int i = 0; i < ABREAST; i++) {
#pragma unroll
                            for (int j = 0; j < 4; j++) sums[i][row] += four.of[j] * keys[i][at + j];
                        }
                    }
                }
            }
#pragma unroll 1
            for (int bits = p.key_lanes / 2; bits > 0; bits /= 2) {
#pragma unroll
                for (int i = 0; i < ABREAST; i++) {
#pragma unroll
                    for (int row = 0; row < MANY; row++) sums[i][row] += __shfl_xor_sync(0xffffffffu, sums[i][row], bits);
                }
            }
            if (key_part == 0) {
#pragma unroll
                for (int i = 0; i < ABREAST; i++) {
                    int at = base + i * key_groups + key_group;
#pragma unroll
                    for (int row = 0; row < MANY; row++) {
                        if (at < FEW_KEYS) weights[row][at] = sums[i][row];
                    }
                }
            }
        }
        __syncthreads();
        float most = -infinity();
        float* line = &weights[own_row][own_key];
        // What is added takes turns in the first place, so that the code of scores is there once.
#pragma unroll 1
        for (int i = 0; i < MANY; i++) {
            float score = score_of<false>(line[i], place, block.batch, start + own_key + i, added[0], shown >> i & 1, p, g);
            line[i] = score;
            most = fmaxf(most, score);
#pragma unroll
            for (int next = 1; next < MANY; next++) added[next - 1] = added[next];
        }
        most = warp_max(most);
        if (lane == 0) of_warps[own_row][warp % SHARING] = most;
        __syncthreads();
        Pack<float, MANY> scores = *(const Pack<float, MANY>*)line;
        float before = top;
#pragma unroll
        for (int other = 0; other < SHARING; other++) top = fmaxf(top, of_warps[own_row][other]);
        float base = base_of(top), decay = expf(before - base);
        total *= decay;
#pragma unroll
        for (int i = 0; i < MANY; i++) {
            scores.of[i] = expf(scores.of[i] - base);
            total += scores.of[i];
        }
        *(Pack<float, MANY>*)line = scores;
        if (own_key == 0) decays[own_row] = decay;
        __syncthreads();
#pragma unroll
        for (int row = 0; row < MANY; row++) {
            float decay = decays[row];
#pragma unroll
            for (int i = 0; i < KEPT; i++) results[row][i] *= decay;
        }
#pragma unroll 1
        for (int base = 0; base < many; base += AHEAD * value_groups) {
            if (base > 0) read_values(start, base);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int at = base + i * value_groups + value_group;
                if (at >= many) break;
#pragma unroll
                for (int row = 0; row < MANY; row++) {
                    float weight = weights[row][at];
#pragma unroll
                    for (int j = 0; j < KEPT; j++) results[row][j] += weight * values[i][j];
                }
            }
        }
        if (start + FEW_KEYS < block.end) read_ahead(start + FEW_KEYS);
    }
    // Groups of a warp add up what they have, then all warps.
    int width = p.value_lanes * KEPT, across = max(p.value_lanes, 32), groups = FEW_KEYS / across;
#pragma unroll 1
    for (int bits = p.value_lanes; bits < 32; bits *= 2) {
#pragma unroll
        for (int row = 0; row < MANY; row++) {
#pragma unroll
            for (int i = 0; i < KEPT; i++) results[row][i] += __shfl_xor_sync(0xffffffffu, results[row][i], bits);
        }
    }
    // Decays and weights have had their turn, and now are the greatest scores and pieces of results.
    __syncthreads();
    total = warp_sum(total);
    if (lane == 0) of_warps[own_row][warp % SHARING] = total;
    if (own_key == 0) decays[own_row] = top;
    if ((thread & (across - 1)) < p.value_lanes) {
#pragma unroll
        for (int row = 0; row < MANY; row++) {
#pragma unroll
            for (int i = 0; i < KEPT; i++) memory[row * PIECES + thread / across * width + column + i] = results[row][i];
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < MANY && places[row].x < p.heads; row++) {
        float sum[1] = {0.0f}, total = 0.0f;
#pragma unroll
        for (int other = 0; other < SHARING; other++) total += of_warps[row][other];
        if (thread == 0) put_line(block, row, decays[row], total, p, g);
        if (thread >= p.value_size) continue;
        for (int other = 0; other < groups; other++) sum[0] += memory[row * PIECES + other * width + thread];
        put(block, places[row], row, thread, sum, total, p, g);
    }
}

// More than one row take the registers of a whole processor: what is on its way keeps the memory as busy as two blocks would.
#define FEW_ROWS(suffix, type)                                                                                         \
    ENTRY(attend_rows_1_##suffix, type, 256, 2, (few_rows<type, 1>))                                                   \
    ENTRY(attend_rows_4_##suffix, type, 256, 1, (few_rows<type, 4>))                                                   \
    ENTRY(attend_rows_8_##suffix, type, 256, 1, (few_rows<type, 8>))
