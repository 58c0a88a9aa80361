// On tensor cores: 64 rows and 64 keys at a time.
#pragma once

#include "attention.cuh"
#include "attention_warps.cuh"

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
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    uint left[SIZE / 16][4];
#pragma unroll
    for (int at = 0; at < SIZE / 16; at++) left_of<SIZE>(left[at], v_tile, warp_row, 16 * at);
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
    auto of_keys = [&](int start) { copy_lines<KEYS, SIZE>(k_tile, k, p.k.row, p.size, start, block.end, k_vectors); };
    of_keys(block.begin);
#pragma unroll 1
    for (int start = block.begin; start < block.end; start += KEYS) {
        wait_for_copies<0>();
        __syncthreads();
        // All warps are done with the values before.
        copy_lines<KEYS, SIZE>(v_tile, v, p.v.row, p.value_size, start, block.end, v_vectors);
        float scores[KEYS / 8][4];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) scores[j][i] = 0.0f;
        }
        auto of_queries = [&](int at, uint (&to)[4]) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = left[at][i];
        };
        multiply_lines<KEYS, SIZE>(scores, of_queries, k_tile, p.size);
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
            most = most_of_lanes<4>(most);
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
        wait_for_copies<0>();
        __syncthreads();
        // All warps are done with the keys.
        if (start + KEYS < block.end) of_keys(start + KEYS);
        combine_lines<KEYS, SIZE>(results, scores, v_tile, p.value_size);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = warp_row + lane / 4 + 8 * half;
        int4 place = places[row];
        float total = sum_of_lanes<4>(totals[half]);
        if (place.x >= p.heads) continue;
        if (own == 0) put_line(block, row, tops[half], total, p, g);
#pragma unroll
        for (int j = 0; j < SIZE / 8; j++) {
            float two[2] = {results[j][2 * half], results[j][2 * half + 1]};
            if (8 * j + own < p.value_size) put(block, place, row, 8 * j + own, two, total, p, g);
        }
    }
}

#define CORES(suffix, type)                                                                                            \
    ENTRY(attend_cores_64_##suffix, type, 128, 3, (cores<type, 64>))                                                   \
    ENTRY(attend_cores_128_##suffix, type, 128, 2, (cores<type, 128>))
