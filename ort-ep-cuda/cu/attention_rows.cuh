#pragma once

#include "attention.cuh"

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

#define FEW_ROWS(suffix, type)                                                                                         \
    ENTRY(attend_rows_1_##suffix, type, 128, 4, (few_rows<type, 1>))                                                   \
    ENTRY(attend_rows_4_##suffix, type, 128, 3, (few_rows<type, 4>))                                                   \
    ENTRY(attend_rows_8_##suffix, type, 128, 3, (few_rows<type, 8>))
