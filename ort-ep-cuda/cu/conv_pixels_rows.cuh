// Convolutions of halves with the channels last and few channels, as those that read an image first, on tensor cores. The taps of a row of a window
// lie side by side in the image: that is a run of steps, which need not be told apart.
#pragma once

#include "cores.cuh"
#include "gemm.cuh"
#include "windows.cuh"

#if __CUDA_ARCH__ >= 800
// The products of sixteen rows and eight columns over sixteen or eight steps. A lane has two neighbouring columns of one row and of the row eight below.
#define MULTIPLY_PAIRS(type, name)                                                                             \
    __device__ inline void multiply_pairs(type, float* upper, float* lower, const uint (&a)[4], uint b0, uint b1) { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32"                             \
                     " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                        \
                     : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                          \
    }                                                                                                          \
    __device__ inline void multiply_pairs(type, float* upper, float* lower, const uint (&a)[2], uint b) {      \
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." name "." name ".f32"                              \
                     " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                                    \
                     : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])                          \
                     : "r"(a[0]), "r"(a[1]), "r"(b));                                                          \
    }
MULTIPLY_PAIRS(__half, "f16")
MULTIPLY_PAIRS(__nv_bfloat16, "bf16")
#undef MULTIPLY_PAIRS

// What a block computes at a time: `columns` neighbouring results of each of some rows. What it reads for that lies in shared memory behind the
// filters: rows of `pitch` elements. Where results lie an odd number of elements apart there are two copies, the second begins an element later,
// so that each window begins at a pair in one of them.
struct RowTile { int columns, run, padded, pitch, rows, copies; };

__device__ inline RowTile row_tile_of(const Convolution& p, int columns, int positions) {
    RowTile tile;
    tile.columns = columns;
    tile.run = p.kernel[2] * p.channels;
    tile.padded = (tile.run + 7) / 8 * 8;
    int step = p.strides[2] * p.channels;
    tile.pitch = ((columns - 1) * step + tile.padded + 3) / 2 * 2;
    tile.rows = (positions / columns - 1) * p.strides[1] + p.kernel[1];
    tile.copies = 1 + step % 2;
    return tile;
}

// The elements between filters in shared memory: an odd number of vectors, so that eight filters are in different banks.
__device__ inline int filter_pitch(const Convolution& p, const RowTile& tile) { return (p.kernel[1] * tile.padded / 8 | 1) * 8; }

// The place in shared memory of a filter. Of 32 filters a lane later has columns 2t and 2t + 1 of each of four products: these are put there so that
// its eight filters are neighbours.
__device__ inline int line_of(int filter) { return filter / 32 * 32 + filter % 8 / 2 * 8 + filter % 32 / 8 * 2 + filter % 2; }

// Where an element of filters that lie one behind the other goes in shared memory, and the elements behind it.
struct FilterPlace {
    int filter, row, of_run;

    __device__ FilterPlace(int at, const Convolution& p, const RowTile& tile) {
        filter = at / (p.kernel[1] * tile.run);
        row = at / tile.run % p.kernel[1];
        of_run = at % tile.run;
    }
    __device__ int at(const RowTile& tile, int pitch) const { return line_of(filter) * pitch + row * tile.padded + of_run; }
    __device__ void advance(const Convolution& p, const RowTile& tile) {
        if (++of_run < tile.run) return;
        of_run = 0;
        if (++row < p.kernel[1]) return;
        row = 0;
        filter++;
    }
};

// Brings FILTERS filters to shared memory, with zeros behind each run and for filters that are none. Vectors are all asked for before the first is
// placed; the code that places one is there once.
template <typename T, int FILTERS, int THREADS>
__device__ inline void place_filters(T* to, const T* w, const Convolution& p, const RowTile& tile, int filter0) {
    constexpr int TOGETHER = 10, VECTOR = 8;
    int depth = p.kernel[1] * tile.run, pitch = filter_pitch(p, tile), thread = threadIdx.x;
    const T* from = w + (int64)filter0 * depth;
    int count = min(FILTERS, p.filters - filter0) * depth;
    int whole = (uint64)from % 16 == 0 ? count / VECTOR : 0;
    Vector<T> vectors[TOGETHER];
    auto read = [&](int first) {
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            int at = first + i * THREADS;
            if (at < whole) vectors[i] = ((const Vector<T>*)from)[at];
        }
    };
    read(thread);
#pragma unroll 1
    for (int at = thread; at < FILTERS * pitch / VECTOR; at += THREADS) ((Vector<T>*)to)[at] = Vector<T>{};
    __syncthreads();
#pragma unroll 1
    for (int at = thread, turn = 1; at < whole; at += THREADS, turn++) {
        FilterPlace place(at * VECTOR, p, tile);
#pragma unroll
        for (int i = 0; i < VECTOR; i++, place.advance(p, tile)) to[place.at(tile, pitch)] = vectors[0].of[i];
#pragma unroll
        for (int i = 1; i < TOGETHER; i++) vectors[i - 1] = vectors[i];
        if (turn % TOGETHER == 0) read(at + THREADS);
    }
#pragma unroll 1
    for (int at = whole * VECTOR + thread; at < count; at += THREADS) to[FilterPlace(at, p, tile).at(tile, pitch)] = from[at];
}

// Brings what the windows of a tile read to shared memory, with zeros outside of the image, of which the nearest element is read. A warp has whole
// rows, several at a time.
template <typename T, int WARPS>
__device__ inline void place_rows(T* to, const T* image, const Convolution& p, const RowTile& tile, int row0, int element0) {
    constexpr int TOGETHER = 6;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, of_row = p.input[2] * p.channels;
    int half = tile.pitch / 2, words = half * tile.copies;
#pragma unroll 1
    for (int first = warp; first < tile.rows; first += TOGETHER * WARPS) {
#pragma unroll 1
        for (int word = lane; word < words; word += 32) {
            // The second copy is behind the first one of the same row, and begins an element later.
            int at = element0 + 2 * (word < half ? word : word - half) + (word >= half);
            int low = min(max(at, 0), of_row - 1), high = min(max(at + 1, 0), of_row - 1);
            Two<T> pairs[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                const T* from = image + (int64)min(max(row0 + first + i * WARPS, 0), p.input[1] - 1) * of_row;
                pairs[i] = {{from[low], from[high]}};
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                int row = first + i * WARPS;
                bool there = (uint)(row0 + row) < (uint)p.input[1];
                if (!there || low != at) pairs[i].of[0] = T(0.0f);
                if (!there || high != at + 1) pairs[i].of[1] = T(0.0f);
                if (row < tile.rows) *(Two<T>*)(to + row * tile.pitch * tile.copies + 2 * word) = pairs[i];
            }
        }
    }
}

// What is left of a pair of steps of which only those before `run` count: what is behind it may be no number.
__device__ inline uint pair_before(int step, int run) { return step + 1 < run ? ~0u : step < run ? 0xffffu : 0u; }

// DOWN times 16 results of a warp and FILTERS filters. A row of `sums` has eight neighbouring filters of one result: of each DOWN, those of the upper
// eight and of the lower eight results.
template <typename T, int DOWN, int FILTERS>
__device__ inline void multiply_rows(float (&sums)[DOWN * FILTERS / 16][8], const T* filters, const T* image, const int (&at)[DOWN], int lower,
                                     const Convolution& p, const RowTile& tile) {
    int lane = threadIdx.x % 32, pitch = filter_pitch(p, tile), row_pitch = tile.pitch * tile.copies, pair = lane % 4 * 2;
    for (int row = 0; row < p.kernel[1]; row++) {
        const T* of_filters = filters + row * tile.padded;
        const T* of_image = image + row * row_pitch;
        int step = 0;
        for (; step + 16 <= tile.padded; step += 16) {
            uint left[DOWN][4], keep[2] = {pair_before(step + pair, tile.run), pair_before(step + pair + 8, tile.run)};
#pragma unroll
            for (int i = 0; i < DOWN; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) left[i][j] = *(const uint*)(of_image + at[i] + j % 2 * lower + step + j / 2 * 8) & keep[j / 2];
            }
#pragma unroll
            for (int column = 0; column < FILTERS; column += 16) {
                uint right[4];
                load_matrices<false>(right, of_filters + (column + lane / 16 * 8 + lane % 8) * pitch + step + lane / 8 % 2 * 8);
#pragma unroll
                for (int i = 0; i < DOWN; i++) {
                    float* upper = sums[i * FILTERS / 16 + column / 32];
                    float* below = sums[i * FILTERS / 16 + FILTERS / 32 + column / 32];
                    multiply_pairs(T(), upper + column / 16 % 2 * 4, below + column / 16 % 2 * 4, left[i], right[0], right[1]);
                    multiply_pairs(T(), upper + column / 16 % 2 * 4 + 2, below + column / 16 % 2 * 4 + 2, left[i], right[2], right[3]);
                }
            }
        }
        if (step == tile.padded) continue;
        uint left[DOWN][2], keep = pair_before(step + pair, tile.run);
#pragma unroll
        for (int i = 0; i < DOWN; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) left[i][j] = *(const uint*)(of_image + at[i] + j * lower + step) & keep;
        }
#pragma unroll
        for (int column = 0; column < FILTERS; column += 32) {
            uint right[4];
            load_matrices<false>(right, of_filters + (column + lane) * pitch + step);
#pragma unroll
            for (int i = 0; i < DOWN; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float* upper = sums[i * FILTERS / 16 + column / 32];
                    float* below = sums[i * FILTERS / 16 + FILTERS / 32 + column / 32];
                    multiply_pairs(T(), upper + 2 * j, below + 2 * j, left[i], right[j]);
                }
            }
        }
    }
}

// Writes eight neighbouring filters of a result.
template <typename T>
__device__ inline void write_filters(float (&own)[8], const T* bias, const T* addend, T* y, int64 at, int filter, int count, bool vectors,
                                     const Finish& finish) {
    if (count <= 0) return;
    Pack<T, 8> pack;
    if (bias) {
        read_pack(bias + filter, count, (uint64)bias % 16 == 0, pack);
#pragma unroll
        for (int i = 0; i < 8; i++) own[i] += as_float(pack.of[i]);
    }
    if (addend) {
        read_pack(addend + at, count, vectors, pack);
#pragma unroll
        for (int i = 0; i < 8; i++) own[i] += as_float(pack.of[i]);
    }
    if (finish.activation == RELU) {
        activate_by<RELU>(own, finish);
    } else if (finish.activation != NONE) {
        // Two at a time: the code of all activations for eight of them would be most of the kernel's.
#pragma unroll 1
        for (int turn = 0; turn < 4; turn++) {
            float two[2] = {own[0], own[1]};
            activate_all(two, finish);
#pragma unroll
            for (int i = 0; i < 6; i++) own[i] = own[i + 2];
            own[6] = two[0];
            own[7] = two[1];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) pack.of[i] = from_float<T>(own[i]);
    if (vectors && count >= 8) {
        *(Pack<T, 8>*)(y + at) = pack;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < count) y[at + i] = pack.of[i];
    }
}

// Tiles of WARPS times DOWN times 16 results, one after the other, at FILTERS filters: blocks of the same filters take turns at tiles. Images have one
// group, and their first axis is of size 1.
template <typename T, int DOWN, int FILTERS>
__device__ inline void pixel_rows(const T* x, const T* w, const T* bias, const T* addend, T* y, const Convolution& p, const Finish& finish,
                                  int columns) {
    constexpr int WARPS = 4, THREADS = WARPS * 32, POSITIONS = WARPS * DOWN * 16;
    extern __shared__ __align__(16) char memory[];
    RowTile tile = row_tile_of(p, columns, POSITIONS);
    T* filters = (T*)memory;
    T* rows = filters + FILTERS * filter_pitch(p, tile);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, filter0 = blockIdx.y * FILTERS;
    place_filters<T, FILTERS, THREADS>(filters, w, p, tile, filter0);
    int step = p.strides[2] * p.channels, at[DOWN];
    // Where the windows of the lane's results begin, at the steps of its pairs.
#pragma unroll
    for (int i = 0; i < DOWN; i++) {
        int position = (warp * DOWN + i) * 16, first = (position % columns + lane / 4) * step;
        at[i] = position / columns * p.strides[1] * tile.pitch * tile.copies + first + first % 2 * (tile.pitch - 1) + lane % 4 * 2;
    }
    int vectors_of = p.filters % 8 == 0;
    bool vectors = vectors_of && (uint64)y % 16 == 0 && (!addend || (uint64)addend % 16 == 0);
    int of_image = p.tiles_down * p.tiles_across, tiles = p.batch * of_image;
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        int image = number / of_image, place = number % of_image;
        int row0 = place / p.tiles_across * (POSITIONS / columns), column0 = place % p.tiles_across * columns;
        // All warps are done with the tile before.
        __syncthreads();
        place_rows<T, WARPS>(rows, x + (int64)image * p.input[1] * p.input[2] * p.channels, p, tile, row0 * p.strides[1] - p.pads[1],
                             (column0 * p.strides[2] - p.pads[2]) * p.channels);
        __syncthreads();
        float sums[DOWN * FILTERS / 16][8];
#pragma unroll
        for (int i = 0; i < DOWN * FILTERS / 16; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) sums[i][j] = 0.0f;
        }
        // Eight results on, the windows are an even number of elements further.
        multiply_rows<T, DOWN, FILTERS>(sums, filters, rows, at, 8 * step, p, tile);
#pragma unroll 1
        for (int i = 0; i < DOWN * FILTERS / 16; i++, next_row(sums)) {
            int position = (warp * DOWN + i / (FILTERS / 16)) * 16 + i / (FILTERS / 32) % 2 * 8;
            int row = row0 + position / columns, column = column0 + position % columns + lane / 4;
            if (row >= p.output[1] || column >= p.output[2]) continue;
            int filter = filter0 + i % (FILTERS / 32) * 32 + lane % 4 * 8;
            int64 result = ((int64)image * p.output[1] + row) * p.output[2] + column;
            write_filters(sums[0], bias, addend, y, result * p.filters + filter, filter, p.filters - filter, vectors, finish);
        }
    }
}
#else
template <typename T, int DOWN, int FILTERS>
__device__ inline void pixel_rows(const T*, const T*, const T*, const T*, T*, const Convolution&, const Finish&, int) {}
#endif

#define PIXEL_ROWS_ENTRY(name, type, down, filters)                                                            \
    extern "C" __global__ void __launch_bounds__(128, 4)                                                       \
        name(const type* x, const type* w, const type* bias, const type* addend, type* y, Convolution p,       \
             Finish finish, int columns) {                                                                     \
        pixel_rows<type, down, filters>(x, w, bias, addend, y, p, finish, columns);                            \
    }
#define PIXEL_ROWS(suffix, type)                                                                               \
    PIXEL_ROWS_ENTRY(conv_pixels_rows_128_64_##suffix, type, 2, 64)                                             \
    PIXEL_ROWS_ENTRY(conv_pixels_rows_64_64_##suffix, type, 1, 64)                                              \
    PIXEL_ROWS_ENTRY(conv_pixels_rows_128_32_##suffix, type, 2, 32)                                             \
    PIXEL_ROWS_ENTRY(conv_pixels_rows_64_32_##suffix, type, 1, 32)
