#pragma once

#include "attention.cuh"

// Heads of any size: 64 rows and 64 keys at a time by 16 times 16 threads, each with four rows and four keys, then with four rows and WIDE / 16
// columns of the values. A block has WIDE columns.
constexpr int DEPTH = 16, PITCH = 68;

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

#define TILES(suffix, type)                                                                                            \
    ENTRY(attend_tiles_64_##suffix, type, 256, 2, (tiles<type, 64, false>))                                            \
    ENTRY(attend_tiles_128_##suffix, type, 256, 2, (tiles<type, 128, false>))                                          \
    ENTRY(attend_scores_##suffix, type, 256, 2, (tiles<type, 64, true>))
