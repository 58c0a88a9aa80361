// In tiles of registers: heads of any size.
#pragma once

#include "training_attention.cuh"

constexpr int COLUMNS = 64;

template <typename T, int WIDE, int MODE>
__device__ inline void tiles(const T* q, const T* k, const T* v, const T* upstream, T* y, const Attention& p, const Given& g) {
    constexpr bool ARE_KEYS = are_keys(MODE), IS_ONLINE = is_online(MODE), HAS_SECOND = has_second(MODE), IS_SECOND = is_second(MODE);
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
        // Lines of the two tensors, of so many elements each.
        auto reader = [](const T* of, int line, bool there, int size, bool vectors) {
            return [=](int at, int count, float (&to)[4]) { read_four(of + (int64)line * size + at, there ? count : 0, vectors, to); };
        };
        product(reader(sides.rows, first + line, row_there, p.size, vectors[0]),
                reader(sides.columns, start + line, column_there, p.size, vectors[1]), p.size, memory, sums);
        if (HAS_SECOND) {
            product(reader(sides.second_rows, first + line, row_there, p.value_size, vectors[2]),
                    reader(sides.second_columns, start + line, column_there, p.value_size, vectors[3]), p.value_size, memory, seconds);
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
                most = most_of_lanes<16>(most);
                float top = fmaxf(of_row.top, most), base = base_of(top), decay = expf(of_row.top - base), total = 0.0f, along = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float weight = expf(sums[0][j] - base), share = is_kept(j) ? weight * factor : 0.0f;
                    total += weight;
                    // What is not there has no gradient, and weighs nothing.
                    if (MODE == STATISTICS) along += share * seconds[0][j];
                    pack.of[j] = share;
                }
                total = sum_of_lanes<16>(total);
                if (MODE == STATISTICS) along = sum_of_lanes<16>(along);
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
                    float value = HAS_SECOND ? gradient_of(share, seconds[0][j], weight, of_query.along) : share;
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
            int many = min(COLUMNS, sides.column_count - start);
            combine<WIDE>(weights, from, width, many, width, column0, vectors[IS_SECOND ? 3 : 1], memory, results);
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

#define OF_MODES(suffix, type, wide)                                                                                   \
    ENTRY(attend_tiles_##wide##_##suffix, type, 256, 2, (tiles<type, wide, FORWARD>))                                  \
    ENTRY(by_queries_tiles_##wide##_##suffix, type, 256, 2, (tiles<type, wide, BY_QUERIES>))                           \
    ENTRY(by_keys_tiles_##wide##_##suffix, type, 256, 2, (tiles<type, wide, BY_KEYS>))                                 \
    ENTRY(by_values_tiles_##wide##_##suffix, type, 256, 2, (tiles<type, wide, BY_VALUES>))
#define TILES(suffix, type)                                                                                            \
    ENTRY(statistics_tiles_##suffix, type, 256, 2, (tiles<type, 64, STATISTICS>))                                      \
    OF_MODES(suffix, type, 64) OF_MODES(suffix, type, 128)
