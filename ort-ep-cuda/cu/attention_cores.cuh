// On tensor cores: 64 rows and 64 keys at a time, of which each of four warps has 16 rows; or, where blocks are few, 16 rows, of whose keys each
// warp has a quarter. What a tile needs of memory is on its way before anything is computed of it.
#pragma once

#include "attention.cuh"
#include "attention_warps.cuh"

__device__ constexpr int kind_of(__half) { return HALF; }
__device__ constexpr int kind_of(__nv_bfloat16) { return BFLOAT; }

// Of its warp's keys a lane has pairs of neighbours: in all calls, `first` is the first key that it has.

// By soft caps; fast_power makes the tangent right to a few units of the last place of 1.
__device__ inline float capped(float score, float softcap) {
    float power = fast_power(2.0f * (score / softcap));
    return softcap * (1.0f - __fdividef(2.0f, power + 1.0f));
}

// Of a row the pairs that a lane has as the left side of products, zeros beyond its size. Where they are `whole` no load waits for another.
template <int SIZE, typename T> __device__ inline void read_line(const T* row, int size, bool whole, uint (&to)[SIZE / 8]) {
    int own = threadIdx.x % 4 * 2;
    if (whole) {
#pragma unroll
        for (int i = 0; i < SIZE / 8; i++) to[i] = *(const uint*)(row + (8 * i < size ? 8 * i + own : 0));
#pragma unroll
        for (int i = 0; i < SIZE / 8; i++) to[i] = 8 * i < size ? to[i] : 0;
        return;
    }
#pragma unroll
    for (int i = 0; i < SIZE / 8; i++) {
        Pack<T, 2> pair;
        read_pack(row + 8 * i + own, size - 8 * i - own, false, pair);
        to[i] = (uint)bits_of(pair.of[0]) | (uint)bits_of(pair.of[1]) << 16;
    }
}

// The sum of two pairs.
template <typename T> __device__ inline uint sum_of_pairs(uint left, uint right) {
    Pack<T, 2> a = *(const Pack<T, 2>*)&left, b = *(const Pack<T, 2>*)&right;
    return packed<T>(as_float(a.of[0]) + as_float(b.of[0]), as_float(a.of[1]) + as_float(b.of[1]));
}

// What a mask of elements of one or two bytes has for the pairs of a lane's two rows, as it is stored. The last key stands for those that
// are not there, so that no load waits for another.
template <typename E, int PAIRS>
__device__ inline void read_pairs(const void* mask, const int64 (&rows)[2], int first, int end, bool whole, uint (&to)[PAIRS][2]) {
    if (whole) {
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Pack<E, 2> pair = *(const Pack<E, 2>*)((const E*)mask + rows[half] + min(first + 8 * j, (end - 1) / 2 * 2));
                to[j][half] = (uint)pair.of[0] | (uint)pair.of[1] << 8 * sizeof(E);
            }
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const E* row = (const E*)mask + rows[half];
            uint low = row[min(first + 8 * j, end - 1)], high = row[min(first + 8 * j + 1, end - 1)];
            to[j][half] = low | high << 8 * sizeof(E);
        }
    }
}

// Calls a function for each score, with its number among those of a lane: its row, and its place among keys from the lane's first on.
template <int PAIRS, typename Change> __device__ inline void change_all(float (&scores)[PAIRS][4], const Change& change) {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[j][i] = change(scores[j][i], j, i / 2, i % 2);
    }
}

// What the mask does to scores.
template <int PAIRS>
__device__ inline void add_mask(float (&scores)[PAIRS][4], const uint (&pairs)[PAIRS][2], const int64 (&rows)[2], int first, int end,
                                const Attend& p, const Given& g) {
    if (p.mask_kind == BOOL) {
        change_all(scores, [&](float score, int j, int half, int i) { return pairs[j][half] >> 8 * i & 255 ? score : -infinity(); });
    } else if (p.mask_kind == HALF) {
        change_all(scores, [&](float score, int j, int half, int i) {
            return score + __half2float(__ushort_as_half((uint16)(pairs[j][half] >> 16 * i)));
        });
    } else if (p.mask_kind == BFLOAT) {
        change_all(scores, [&](float score, int j, int half, int i) { return score + __uint_as_float(pairs[j][half] >> 16 * i << 16); });
    } else {
        // Of wider elements, which are rare, scores take turns in the first place: all at once would take too many registers.
#pragma unroll 1
        for (int j = 0; j < PAIRS; j++) {
            float four[4];
#pragma unroll
            for (int i = 0; i < 4; i++) four[i] = scores[0][i] + read_as(g.mask, p.mask_kind, rows[i / 2] + min(first + 8 * j + i % 2, end - 1));
            next_row(scores);
#pragma unroll
            for (int i = 0; i < 4; i++) scores[PAIRS - 1][i] = four[i];
        }
    }
}

// Bits of the lane's scores whose keys are padding, in the order of `change_all`.
template <int PAIRS> __device__ inline uint padding_of(const int4 (&places)[2], int batch, int first, int end, const Attend& p, const Given& g) {
    uint bits = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) bits |= (uint)is_padding(places[i / 2].y, batch, min(first + 8 * j + i % 2, end - 1), p, g) << 4 * j + i;
    }
    return bits;
}

// Writes rows of a warp, which pass through its part of a tile, as vectors.
template <typename T, int SIZE>
__device__ inline void put_vectors(const float (&results)[SIZE / 8][4], const float (&totals)[2], T (*tile)[SIZE + 8], const int4* places,
                                   int batch, const Attend& p, const Given& g) {
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
    uint without_weights = packed<T>(p.without_weights, p.without_weights);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float share = 1.0f / totals[half];
        bool sees = totals[half] != 0.0f;
#pragma unroll
        for (int j = 0; j < SIZE / 8; j++) {
            uint pair = packed<T>(results[j][2 * half] * share, results[j][2 * half + 1] * share);
            *(uint*)&tile[warp_row + lane / 4 + 8 * half][8 * j + lane % 4 * 2] = sees ? pair : without_weights;
        }
    }
    __syncwarp();
    constexpr int CHUNKS = SIZE / 8;
    int c = lane % CHUNKS * 8;
#pragma unroll
    for (int turn = 0; turn < 16 * CHUNKS / 32; turn++) {
        int row = warp_row + lane / CHUNKS + turn * (32 / CHUNKS);
        int4 place = places[row];
        if (place.x < p.heads && c < p.value_size) {
            *(uint4*)((T*)g.y + place_of(p.y, batch, place.x, place.y) + c) = *(const uint4*)&tile[row][c];
        }
    }
}

// Puts together what the warps of a block have of the same rows, each of other keys, for the first one; whether this is that one.
template <int SIZE, int WARPS>
__device__ inline bool is_joined(float (&results)[SIZE / 8][4], float (&tops)[2], float (&totals)[2], float (*sums)[SIZE / 8 * 4][32],
                                 float2 (*lines)[2][32]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) lines[warp][half][lane] = make_float2(tops[half], totals[half]);
    // All warps are done with the tiles, too.
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = -infinity(), total = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; other++) top = fmaxf(top, lines[other][half][lane].x);
        float base = base_of(top), decay = fast_power(tops[half] - base);
#pragma unroll
        for (int other = 0; other < WARPS; other++) total += lines[other][half][lane].y * fast_power(lines[other][half][lane].x - base);
#pragma unroll
        for (int j = 0; j < SIZE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) results[j][2 * half + i] *= decay;
        }
        tops[half] = top;
        totals[half] = total;
    }
    if (warp > 0) {
#pragma unroll
        for (int i = 0; i < SIZE / 8 * 4; i++) sums[warp - 1][i][lane] = results[i / 4][i % 4];
    }
    __syncthreads();
    if (warp > 0) return false;
#pragma unroll
    for (int i = 0; i < SIZE / 8 * 4; i++) {
#pragma unroll
        for (int other = 0; other < WARPS - 1; other++) results[i / 4][i % 4] += sums[other][i][lane];
    }
    __syncwarp();
    return true;
}

// APART: warps that have the same rows.
template <typename T, int SIZE, int APART>
__device__ inline void cores(const void* queries, const T* k, const T* v, const Attend& p, const Given& g) {
    constexpr int TILE = APART > 1 && SIZE == 64 ? 2 * KEYS : KEYS, OWN = TILE / APART, PAIRS = OWN / 8;
    __shared__ int4 places[ROWS / APART];
    __shared__ __align__(16) T tiles[2][TILE][SIZE + 8];
    T (*k_tile)[SIZE + 8] = tiles[0], (*v_tile)[SIZE + 8] = tiles[1];
    const T* q = (const T*)queries;
    Block block(p, g, ROWS / APART);
    int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 / APART * 16, own = lane % 4 * 2;
    // Where its keys begin in a tile.
    int part = thread / 32 % APART * OWN;
    k += place_of(p.k, block.batch, block.key_head, 0);
    v += place_of(p.v, block.batch, block.key_head, 0);
    bool q_vectors = p.q_vectors && is_aligned(q), k_vectors = p.k_vectors && is_aligned(k), v_vectors = p.v_vectors && is_aligned(v);
    auto of_keys = [&](int start) { copy_lines<TILE, SIZE>(k_tile, k, p.k.row, p.size, start, block.end, k_vectors); };
    auto of_values = [&](int start) { copy_lines<TILE, SIZE>(v_tile, v, p.v.row, p.value_size, start, block.end, v_vectors); };
    if (block.begin < block.end) {
        of_keys(block.begin);
        of_values(block.begin);
    }
    if (thread < ROWS / APART) places[thread] = block.place(p, thread);
    __syncthreads();
    int4 own_places[2] = {places[warp_row + lane / 4], places[warp_row + lane / 4 + 8]};
    // Queries come straight to where products have them.
    uint left[SIZE / 16][4];
    int64 mask_rows[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int4 place = own_places[half];
        bool there = place.x < p.heads;
        if (g.mask && there) mask_rows[half] = place_of_mask(place, block.batch, p);
        uint pairs[SIZE / 8], added[SIZE / 8];
        read_line<SIZE>(q + (there ? place_of(p.q, block.batch, place.x, place.y) : 0), p.size, q_vectors, pairs);
        if (g.bias) {
            const T* bias = (const T*)g.bias + (there ? (int64)place.x * p.size : 0);
            read_line<SIZE>(bias, p.size, q_vectors && (uint64)g.bias % 4 == 0, added);
#pragma unroll
            for (int i = 0; i < SIZE / 8; i++) pairs[i] = sum_of_pairs<T>(pairs[i], added[i]);
        }
#pragma unroll
        for (int i = 0; i < SIZE / 8; i++) left[i / 2][i % 2 * 2 + half] = pairs[i];
    }
    float tops[2], totals[2], results[SIZE / 8][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 sink = block.sink(p, g, own_places[half].x);
        tops[half] = part == 0 ? sink.x : -infinity();
        totals[half] = part == 0 && own == 0 ? sink.y : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < SIZE / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) results[j][i] = 0.0f;
    }
    // Whether neighbours of the mask lie in one place of twice their size.
    bool is_bool = p.mask_kind == BOOL, is_half = p.mask_kind == HALF || p.mask_kind == BFLOAT;
    bool mask_pairs = (p.mask_batch | p.mask_head | p.mask_query | p.mask_keys) % 2 == 0 && (uint64)g.mask % (is_bool ? 2 : 4) == 0;
#pragma unroll 1
    for (int start = block.begin; start < block.end; start += TILE) {
        int first = start + part + own;
        uint pairs[PAIRS][2], padded = 0;
        if (g.mask && is_bool) read_pairs<uint8>(g.mask, mask_rows, first, block.end, mask_pairs, pairs);
        else if (g.mask && is_half) read_pairs<uint16>(g.mask, mask_rows, first, block.end, mask_pairs, pairs);
        if (p.padding != NO_PADDING) padded = padding_of<PAIRS>(own_places, block.batch, first, block.end, p, g);
        if (start == block.begin) wait_for_copies<1>();
        else wait_for_copies<0>();
        __syncthreads();
        // All warps are done with the values before.
        if (start != block.begin) of_values(start);
        float scores[PAIRS][4];
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) scores[j][i] = 0.0f;
        }
        auto of_queries = [&](int at, uint (&to)[4]) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = left[at][i];
        };
        multiply_lines<OWN, SIZE>(scores, of_queries, k_tile + part, p.size);
        change_all(scores, [&](float score, int, int, int) { return score * p.scale; });
        if (p.softcap > 0.0f) change_all(scores, [&](float score, int, int, int) { return capped(score, p.softcap); });
        if (g.mask) add_mask(scores, pairs, mask_rows, first, block.end, p, g);
        if (padded) {
            change_all(scores, [&](float score, int j, int half, int i) { return padded >> 4 * j + 2 * half + i & 1 ? score + p.padded : score; });
        }
        if (start < block.all_begin || start + TILE > min(block.all_end, block.end)) {
            change_all(scores, [&](float score, int j, int half, int i) {
                int key = first + 8 * j + i;
                return key >= own_places[half].z && key < min(own_places[half].w, block.end) ? score : -infinity();
            });
        }
        float decays[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = -infinity();
#pragma unroll
            for (int j = 0; j < PAIRS; j++) most = fmaxf(most, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
            most = most_of_lanes<4>(most);
            float top = fmaxf(tops[half], most), base = base_of(top);
            decays[half] = fast_power(tops[half] - base);
            tops[half] = top;
            float total = totals[half] * decays[half];
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
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
        wait_for_copies<0>();
        __syncthreads();
        // All warps are done with the keys.
        if (start + TILE < block.end) of_keys(start + TILE);
        combine_lines<OWN, SIZE>(results, scores, v_tile + part, p.value_size);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) totals[half] = sum_of_lanes<4>(totals[half]);
    if (APART > 1) {
        __shared__ float2 lines[APART][2][32];
        if (!is_joined<SIZE, APART>(results, tops, totals, (float (*)[SIZE / 8 * 4][32])tiles, lines)) return;
    }
    if (p.splits == 1 && p.y_vectors && is_aligned(g.y) && p.y_kind == kind_of(T())) {
        put_vectors<T, SIZE>(results, totals, k_tile, places, block.batch, p, g);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = warp_row + lane / 4 + 8 * half;
        int4 place = own_places[half];
        if (place.x >= p.heads) continue;
        if (own == 0) put_line(block, row, tops[half], totals[half], p, g);
#pragma unroll
        for (int j = 0; j < SIZE / 8; j++) {
            float two[2] = {results[j][2 * half], results[j][2 * half + 1]};
            if (8 * j + own < p.value_size) put(block, place, row, 8 * j + own, two, totals[half], p, g);
        }
    }
}

#define CORES(suffix, type)                                                                                            \
    ENTRY(attend_cores_64_##suffix, type, 128, 3, (cores<type, 64, 1>))                                                \
    ENTRY(attend_cores_128_##suffix, type, 128, 2, (cores<type, 128, 1>))                                              \
    ENTRY(attend_cores_apart_64_##suffix, type, 128, 3, (cores<type, 64, 4>))                                          \
    ENTRY(attend_cores_apart_128_##suffix, type, 128, 2, (cores<type, 128, 4>))
