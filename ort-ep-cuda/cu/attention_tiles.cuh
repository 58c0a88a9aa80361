// In tiles of registers: heads of any size, 64 rows and 64 keys at a time.
#pragma once

#include "attention.cuh"

template <typename T, int WIDE, bool KEEPS>
__device__ inline void tiles(const void* q, const T* k, const T* v, const Attend& p, const Given& g) {
    constexpr int QUADS = WIDE / 64;
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
    int line = thread / 4;
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
        auto read_query = [&](int at, int count, float (&to)[4]) {
            read_queries(q, q_at + at, q_at < 0 ? 0 : count, q_vectors, p, to);
            if (!g.bias || q_at < 0) return;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (i < count) to[i] += read_as(g.bias, p.q_kind, (int64)of_line.x * p.size + at + i);
            }
        };
        auto read_key = [&](int at, int count, float (&to)[4]) {
            read_four(k + (int64)(start + line) * p.k.row + at, start + line < block.end ? count : 0, k_vectors, to);
        };
        product(read_query, read_key, p.size, memory, sums);
        // Rows take turns in the first place, so that the code of scores is there once.
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            int row = own_row + i;
            int4 place = places[row];
            float most = -infinity(), added[4];
            uint shown = changes_of(place, block.batch, start + own, p, g, added);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int key = start + own + j;
                bool sees = shown >> j & 1;
                sums[0][j] = key < block.end ? score_of<KEEPS>(sums[0][j], place, block.batch, key, added[j], sees, p, g) : -infinity();
                most = fmaxf(most, sums[0][j]);
            }
            most = most_of_lanes<16>(most);
            float before = tops[row], top = fmaxf(before, most), base = base_of(top), decay = expf(before - base), total = 0.0f;
            Pack<float, 4> pack;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                pack.of[j] = expf(sums[0][j] - base);
                total += pack.of[j];
            }
            *(Pack<float, 4>*)&weights[row][own] = pack;
            total = sum_of_lanes<16>(total);
            // The threads of a row are of one warp, which has read what is written here.
            __syncwarp();
            if (own == 0) {
                decays[row] = decay;
                tops[row] = top;
                totals[row] = totals[row] * decay + total;
            }
            next_row(sums);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float decay = decays[own_row + i];
#pragma unroll
            for (int j = 0; j < 4 * QUADS; j++) results[i][j] *= decay;
        }
        int many = min(KEYS, block.end - start);
        combine<WIDE>(weights, v + (int64)start * p.v.row, p.v.row, many, p.value_size, column0, v_vectors, memory, results);
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
                line[key] = quotient(expf(line[key] - base_of(top)), total, p);
            }
        }
    }
}

#define TILES(suffix, type)                                                                                            \
    ENTRY(attend_tiles_64_##suffix, type, 256, 2, (tiles<type, 64, false>))                                            \
    ENTRY(attend_tiles_128_##suffix, type, 256, 2, (tiles<type, 128, false>))                                          \
    ENTRY(attend_scores_##suffix, type, 256, 2, (tiles<type, 64, true>))
