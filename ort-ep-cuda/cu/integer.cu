// Products of matrices of 8-bit codes.
#include "integer.cuh"

template <int LINES, typename Sums>
__device__ inline void product(const uint8* a, const uint8* b, const Tensors& tensors, void* y, const Product& p) {
    int column0 = blockIdx.x % p.across * LINES, row0 = blockIdx.x / p.across % p.down * LINES;
    int matrix = blockIdx.x / p.across / p.down;
    a += batch_place(p, p.a_batch, matrix);
    b += batch_place(p, p.b_batch, matrix);
    Matrix<LINES> left(a, p.a_line, p.a_depth, row0, p.rows, p.depth, p.a_many, p.a_kind);
    Matrix<LINES> right(b, p.b_line, p.b_depth, column0, p.columns, p.depth, p.b_many, p.b_kind);
    Parts parts = {p, tensors, matrix};
    int64 first = (int64)matrix * p.rows * p.columns;
    tiles<LINES, Sums>(left, right, parts, y, row0, column0,
                       [&](int row, int column) { return first + (int64)row * p.columns + column; });
}

#define PRODUCT(name, lines, sums, blocks)                                                                     \
    extern "C" __global__ void __launch_bounds__(256, blocks)                                                  \
        name(const uint8* a, const uint8* b, TENSORS, void* y, Product p) {                                    \
        product<lines, sums<lines>>(a, b, ALL_TENSORS, y, p);                                                  \
    }

// The host takes tensor cores where the device has them.
#if __CUDA_ARCH__ >= 800
PRODUCT(product_cores_small, 64, Cores, 2)
PRODUCT(product_cores_large, 128, Cores, 1)
#else
PRODUCT(product_dots_small, 64, Dots, 2)
PRODUCT(product_dots_large, 128, Dots, 1)
#endif

// Up to four rows by 32 columns of a right side that lies row by row: each thread has four columns at every 32nd four of steps.
extern "C" __global__ void __launch_bounds__(256)
    product_rows(const uint8* a, const uint8* b, TENSORS, void* y, Product p) {
    Tensors tensors = ALL_TENSORS;
    constexpr int ROWS = 4, COLUMNS = 32, VALUES = 4 * ROWS + 4 + ROWS;
    __shared__ int of_warps[8][8][VALUES];
    int matrix = blockIdx.x / p.across, column0 = blockIdx.x % p.across * COLUMNS;
    a += batch_place(p, p.a_batch, matrix);
    b += batch_place(p, p.b_batch, matrix);
    int a_many = many_at(a, p.a_many), b_many = many_at(b, p.b_many);
    uint a_flip = flip_of(p.a_kind), b_flip = flip_of(p.b_kind);
    int own = threadIdx.x % 8, column = column0 + 4 * own;
    // Sums of results, of columns, and of rows.
    int sums[VALUES];
#pragma unroll
    for (int n = 0; n < VALUES; n++) sums[n] = 0;
#pragma unroll 2
    for (int k = threadIdx.x / 8 * 4; k < p.depth; k += 128) {
        uint words[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint8* at = b + (int64)(k + n) * p.b_depth + column;
            words[n] = k + n < p.depth ? four_at(at, p.columns - column, b_many, b_flip) : 0;
        }
        transpose_bytes(words);
#pragma unroll
        for (int n = 0; n < 4; n++) sums[4 * ROWS + n] = dot4((int)words[n], (int)ONES, sums[4 * ROWS + n]);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            if (opaque(row >= p.rows)) continue;
            uint left = four_at(a + (int64)row * p.a_line + k, p.depth - k, a_many, a_flip);
            sums[4 * ROWS + 4 + row] = dot4((int)left, (int)ONES, sums[4 * ROWS + 4 + row]);
#pragma unroll
            for (int n = 0; n < 4; n++) sums[4 * row + n] = dot4((int)left, (int)words[n], sums[4 * row + n]);
        }
    }
#pragma unroll
    for (int n = 0; n < VALUES; n++) {
        sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], 8);
        sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], 16);
        if (threadIdx.x % 32 < 8) of_warps[threadIdx.x / 32][own][n] = sums[n];
    }
    __syncthreads();
    int row = threadIdx.x / COLUMNS, at = threadIdx.x % COLUMNS;
    column = column0 + at;
    if (row >= p.rows || row >= ROWS || column >= p.columns) return;
    auto over_warps = [&](int value) {
        int sum = 0;
        for (int warp = 0; warp < 8; warp++) sum += of_warps[warp][at / 4][value];
        return sum;
    };
    Parts parts = {p, tensors, matrix};
    int64 to = ((int64)matrix * p.rows + row) * p.columns + column;
    finish(parts, y, to, row, column, row_term(parts, row), column_term(parts, column), over_warps(4 * row + at % 4),
           over_warps(4 * ROWS + 4 + row), over_warps(4 * ROWS + at % 4));
}
