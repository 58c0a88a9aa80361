// On tensor cores: 64 rows by four warps, each with 16, and as many columns at a time as shared memory has room for.
#pragma once

#include "attention_warps.cuh"
#include "training_attention.cuh"

// Of the four elements that a lane has of eight columns, the ones that are kept: words of four keys are computed by one lane and handed to
// the others.
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
    constexpr bool ARE_KEYS = are_keys(MODE), IS_ONLINE = is_online(MODE), HAS_SECOND = has_second(MODE), IS_SECOND = is_second(MODE);
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
    copy_lines<ROWS, SIZE>(tiles, sides.rows, p.size, p.size, first, sides.row_count, vectors[0]);
    if constexpr (HAS_SECOND) {
        copy_lines<ROWS, SIZE>(second_rows, sides.second_rows, p.value_size, p.value_size, first, sides.row_count, vectors[1]);
    }
    wait_for_copies<0>();
    __syncthreads();
    uint left[SIZE / 16][4];
#pragma unroll
    for (int at = 0; at < SIZE / 16; at++) left_of<SIZE>(left[at], tiles, warp_row, 16 * at);
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
        copy_lines<MANY, SIZE>(tiles, sides.columns, p.size, p.size, start, sides.column_count, vectors[0]);
        copy_lines<MANY, SIZE>(tiles + MANY, sides.second_columns, p.value_size, p.value_size, start, sides.column_count, vectors[1]);
        if (ARE_KEYS && thread < MANY) {
            const float* at = g.lines + lines_at + start + thread;
            lines[thread] = start + thread < p.queries ? Line{at[0], at[all], HAS_SECOND ? at[2 * all] : 0.0f} : Line{0.0f, 0.0f, 0.0f};
        }
        wait_for_copies<1>();
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
        auto of_rows_left = [&](int at, uint (&to)[4]) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = left[at][i];
        };
        multiply_lines<MANY, SIZE>(scores, of_rows_left, tiles, p.size);
        wait_for_copies<0>();
        __syncthreads();
        if constexpr (HAS_SECOND) {
            auto second_left = [&](int at, uint (&to)[4]) { left_of<SIZE>(to, second_rows, warp_row, 16 * at); };
            multiply_lines<MANY, SIZE>(seconds, second_left, tiles + MANY, p.value_size);
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
        if (p.mask_kind != NOTHING || start + MANY > sides.column_count || first + ROWS > sides.row_count) {
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
                most = most_of_lanes<4>(most);
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
                    float value = HAS_SECOND ? gradient_of(share, seconds[HAS_SECOND ? j : 0][i], weight, line.along) : share;
                    scores[j][i] = zero >> (4 * j + i) & 1 ? 0.0f : value;
                }
            }
        }
        if constexpr (MODE != STATISTICS) {
            combine_lines<MANY, SIZE>(results, scores, tiles + (IS_SECOND ? MANY : 0), IS_SECOND ? p.value_size : p.size);
        }
    }
    int width = IS_SECOND ? p.value_size : p.size;
    bool in_pairs = in_packs<T, 2>(y, width);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + warp_row + lane / 4 + 8 * half;
        Line line = of_rows[half];
        if (IS_ONLINE) line.total = sum_of_lanes<4>(line.total), line.along = sum_of_lanes<4>(line.along);
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

#define OF_MODES(suffix, type, size, blocks)                                                                           \
    ENTRY(attend_cores_##size##_##suffix, type, 128, blocks, (cores<type, size, FORWARD>))                             \
    ENTRY(statistics_cores_##size##_##suffix, type, 128, blocks, (cores<type, size, STATISTICS>))                      \
    ENTRY(by_queries_cores_##size##_##suffix, type, 128, blocks, (cores<type, size, BY_QUERIES>))                      \
    ENTRY(by_keys_cores_##size##_##suffix, type, 128, blocks, (cores<type, size, BY_KEYS>))                            \
    ENTRY(by_values_cores_##size##_##suffix, type, 128, blocks, (cores<type, size, BY_VALUES>))
#define CORES(suffix, type) OF_MODES(suffix, type, 64, 3) OF_MODES(suffix, type, 128, 2)
