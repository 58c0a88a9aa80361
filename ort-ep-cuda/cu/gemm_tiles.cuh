// Batched products y = activation(alpha * a * b + beta * c + d) of any steps; c and d broadcast and may be null pointers.
#pragma once

#include "gemm.cuh"

constexpr int MOST_BATCHES = 6;
constexpr int THREADS = 256;

// Sizes and steps in elements. y lies row by row or, where both sides were exchanged, column by column.
struct Product {
    int rows, columns, depth;
    int tiles_down, tiles_across;
    int a_row, a_depth, b_depth, b_column, c_row, c_column, d_row, d_column, y_row, y_column;
    // Whether whole vectors may be read of a and b as far as sizes and steps go.
    int a_vectors, b_vectors;
    int axes;
    int sizes[MOST_BATCHES];
    int a_steps[MOST_BATCHES], b_steps[MOST_BATCHES], c_steps[MOST_BATCHES], d_steps[MOST_BATCHES];
};

// Where the matrices of a place of the batch begin.
struct Places { int64 a, b, c, d, y; };

__device__ inline Places places_of(const Product& p, int batch) {
    Places at = {0, 0, 0, 0, (int64)batch * p.rows * p.columns};
#pragma unroll
    for (int axis = MOST_BATCHES - 1; axis >= 0; axis--) {
        if (axis >= p.axes) continue;
        int of_axis = batch % p.sizes[axis];
        batch /= p.sizes[axis];
        at.a += (int64)of_axis * p.a_steps[axis];
        at.b += (int64)of_axis * p.b_steps[axis];
        at.c += (int64)of_axis * p.c_steps[axis];
        at.d += (int64)of_axis * p.d_steps[axis];
    }
    return at;
}

// A sum with its factor and addends.
template <typename T>
__device__ inline typename SumOf<T>::Type with_addends(typename SumOf<T>::Type sum, const T* c, const T* d, const Product& p,
                                                       const Finish& finish, const Places& at, int row, int column) {
    typedef typename SumOf<T>::Type Sum;
    if (finish.alpha != 1.0f) sum *= (Sum)finish.alpha;
    if (c) {
        Sum value = to_sum(c[at.c + (int64)row * p.c_row + (int64)column * p.c_column]);
        sum += finish.beta != 1.0f ? (Sum)finish.beta * value : value;
    }
    if (d) sum += to_sum(d[at.d + (int64)row * p.d_row + (int64)column * p.d_column]);
    return sum;
}

// Reads four elements of one side of a product for each tile of BLOCK lines and DEPTH steps: along the steps where these lie nearer to
// each other than the lines, else along the lines.
template <typename T, int BLOCK, int DEPTH> struct Reader {
    static_assert(BLOCK * DEPTH == 4 * THREADS, "each thread reads four elements of a tile");
    typedef typename SumOf<T>::Type Sum;
    const T* from;
    int step, advance, valid, k, line, depth;
    bool near, vectors;

    __device__ Reader(const T* side, int line0, int lines, int line_step, int depth_step, int depth, bool vectors)
        : depth(depth), near(depth_step <= line_step) {
        int thread = threadIdx.x;
        line = near ? thread / (DEPTH / 4) : thread % (BLOCK / 4) * 4;
        k = near ? thread % (DEPTH / 4) * 4 : thread / (BLOCK / 4);
        // How many lines there are from the thread's first one on.
        valid = lines - line0 - line;
        from = side + (int64)(line0 + line) * line_step + (int64)k * depth_step;
        step = near ? depth_step : line_step;
        advance = depth_step;
        this->vectors = vectors && in_packs<T, 4>(side, 4);
    }

    __device__ void read(int k0, Sum (&to)[4]) const {
        const T* at = from + (int64)k0 * advance;
        int rest = depth - k0 - k;
        int count = near ? (valid > 0 ? rest : 0) : (rest > 0 ? valid : 0);
        if (vectors && count >= 4) {
            Pack<T, 4> four = *(const Pack<T, 4>*)at;
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = to_sum(four.of[i]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = i < count ? to_sum(at[(int64)i * step]) : Sum(0);
    }

    __device__ void write(Sum (&tile)[DEPTH][BLOCK + 4], const Sum (&of)[4]) const {
        if (near) {
#pragma unroll
            for (int i = 0; i < 4; i++) tile[k + i][line] = of[i];
        } else {
            Pack<Sum, 4> four;
#pragma unroll
            for (int i = 0; i < 4; i++) four.of[i] = of[i];
            *(Pack<Sum, 4>*)&tile[k][line] = four;
        }
    }
};

// A tile of BLOCK rows and columns by a block of 16 times 16 threads: each has four rows and columns, or two times four which are half
// a tile apart so that threads next to each other read shared memory next to each other.
template <typename T, int BLOCK, int DEPTH>
__device__ inline void tiles(const T* a, const T* b, const T* c, const T* d, T* y, const Product& p, const Finish& finish) {
    typedef typename SumOf<T>::Type Sum;
    constexpr int QUADS = BLOCK / 64;
    __shared__ __align__(16) Sum a_tiles[2][DEPTH][BLOCK + 4];
    __shared__ __align__(16) Sum b_tiles[2][DEPTH][BLOCK + 4];
    int column0 = blockIdx.x % p.tiles_across * BLOCK;
    int row0 = blockIdx.x / p.tiles_across % p.tiles_down * BLOCK;
    Places at = places_of(p, blockIdx.x / p.tiles_across / p.tiles_down);
    Reader<T, BLOCK, DEPTH> of_a(a + at.a, row0, p.rows, p.a_row, p.a_depth, p.depth, p.a_vectors);
    Reader<T, BLOCK, DEPTH> of_b(b + at.b, column0, p.columns, p.b_column, p.b_depth, p.depth, p.b_vectors);
    int own_column = threadIdx.x % 16 * 4, own_row = threadIdx.x / 16 * 4;
    Sum sums[4 * QUADS][4 * QUADS];
#pragma unroll
    for (int i = 0; i < 4 * QUADS; i++) {
#pragma unroll
        for (int j = 0; j < 4 * QUADS; j++) sums[i][j] = 0;
    }
    Sum a_next[4], b_next[4];
    of_a.read(0, a_next);
    of_b.read(0, b_next);
    of_a.write(a_tiles[0], a_next);
    of_b.write(b_tiles[0], b_next);
    __syncthreads();
    int now = 0;
    for (int k0 = 0; k0 < p.depth; k0 += DEPTH) {
        bool more = k0 + DEPTH < p.depth;
        if (more) {
            of_a.read(k0 + DEPTH, a_next);
            of_b.read(k0 + DEPTH, b_next);
        }
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            Pack<Sum, 4> rows[QUADS], columns[QUADS];
#pragma unroll
            for (int quad = 0; quad < QUADS; quad++) {
                rows[quad] = *(const Pack<Sum, 4>*)&a_tiles[now][k][own_row + 64 * quad];
                columns[quad] = *(const Pack<Sum, 4>*)&b_tiles[now][k][own_column + 64 * quad];
            }
#pragma unroll
            for (int i = 0; i < 4 * QUADS; i++) {
#pragma unroll
                for (int j = 0; j < 4 * QUADS; j++) sums[i][j] += rows[i / 4].of[i % 4] * columns[j / 4].of[j % 4];
            }
        }
        if (more) {
            of_a.write(a_tiles[now ^ 1], a_next);
            of_b.write(b_tiles[now ^ 1], b_next);
            __syncthreads();
            now ^= 1;
        }
    }
    bool whole = p.y_column == 1 && in_packs<T, 4>(y + at.y, p.columns);
#pragma unroll 1
    for (int i = 0; i < 4 * QUADS; i++, next_row(sums)) {
        int row = row0 + own_row + i / 4 * 64 + i % 4;
        if (row >= p.rows) continue;
        Sum (&own)[4 * QUADS] = sums[0];
#pragma unroll
        for (int j = 0; j < 4 * QUADS; j++) {
            int column = column0 + own_column + j / 4 * 64 + j % 4;
            if (column < p.columns) own[j] = with_addends(own[j], c, d, p, finish, at, row, column);
        }
        activate_all(own, finish);
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            int column = column0 + own_column + quad * 64;
            T* to = y + at.y + (int64)row * p.y_row + (int64)column * p.y_column;
            Pack<T, 4> four;
#pragma unroll
            for (int j = 0; j < 4; j++) four.of[j] = of_sum<T>(own[4 * quad + j]);
            if (whole && column < p.columns) {
                *(Pack<T, 4>*)to = four;
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (column + j < p.columns) to[(int64)j * p.y_column] = four.of[j];
            }
        }
    }
}

// Blocks that share a processor with large tiles; the compiler for 9.0 would keep some of two blocks' registers in memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int LARGE_BLOCKS = 1;
#else
constexpr int LARGE_BLOCKS = 2;
#endif

#define PRODUCT(name, type, blocks, body)                                                                      \
    extern "C" __global__ void __launch_bounds__(256, blocks)                                                  \
        name(const type* a, const type* b, const type* c, const type* d, type* y, Product p, Finish finish) {  \
        body(a, b, c, d, y, p, finish);                                                                        \
    }
#define SMALL_PRODUCTS(suffix, type) PRODUCT(gemm_small_##suffix, type, 2, (tiles<type, 64, 16>))
#define LARGE_PRODUCTS(suffix, type, blocks) PRODUCT(gemm_large_##suffix, type, blocks, (tiles<type, 128, 8>))
