// GEMV: products of up to four rows. They read each element of b once, so that they take as long as that does: what matters is that 16
// bytes are read at a time, and many of them at once on all processors.
#pragma once

#include "gemm_tiles.cuh"

// Threads of a block; gemm/few.rs has the same numbers.
constexpr int NEAR_THREADS = 256, FAR_THREADS = 512;

template <typename T> constexpr int WIDTH = 16 / sizeof(T);
template <typename T> using Vector16 = Pack<T, WIDTH<T>>;

template <typename T> __device__ inline bool is_aligned(const T* at) { return (uint64)at % 16 == 0; }

template <typename T> __device__ inline Vector16<T> zeros() {
    Vector16<T> vector;
#pragma unroll
    for (int i = 0; i < WIDTH<T>; i++) vector.of[i] = T(0.0f);
    return vector;
}

// Brings an addend near while b is read.
template <typename T> __device__ inline void prefetch(const T* at) { asm volatile("prefetch.global.L2 [%0];" : : "l"(at)); }
template <typename T>
__device__ inline void prefetch_addends(const T* c, const T* d, const Product& p, const Places& at, int row, int column) {
    if (c) prefetch(c + at.c + (int64)row * p.c_row + (int64)column * p.c_column);
    if (d) prefetch(d + at.d + (int64)row * p.d_row + (int64)column * p.d_column);
}

// Writes a result of its sum.
template <typename T>
__device__ inline void finish_sum(typename SumOf<T>::Type sum, const T* c, const T* d, T* y, const Product& p, const Finish& finish,
                                  const Places& at, int row, int column) {
    typename SumOf<T>::Type own[1] = {with_addends(sum, c, d, p, finish, at, row, column)};
    activate_all(own, finish);
    y[at.y + (int64)row * p.y_row + (int64)column * p.y_column] = of_sum<T>(own[0]);
}

// The sum of a value of `lanes` neighbouring lanes, a power of two up to 32, in all of them.
template <typename Sum> __device__ inline Sum sum_of_lanes(Sum x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Adds a column's products to a thread's sums, 16 bytes of the column and of the rows at a time.
template <typename T, int ROWS, int AT_ONCE>
__device__ inline void add_vectors(typename SumOf<T>::Type (&sums)[ROWS][WIDTH<T>], const T* rows, const T* column, const Product& p) {
    int step = blockDim.x * WIDTH<T>;
    for (int k0 = threadIdx.x * WIDTH<T>; k0 < p.depth; k0 += AT_ONCE * step) {
        Vector16<T> right[AT_ONCE], left[AT_ONCE][ROWS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int k = k0 + i * step;
            right[i] = k < p.depth ? *(const Vector16<T>*)(column + k) : zeros<T>();
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                bool there = k < p.depth && row < p.rows;
                left[i][row] = there ? *(const Vector16<T>*)(rows + (int64)row * p.a_row + k) : zeros<T>();
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
#pragma unroll
                for (int j = 0; j < WIDTH<T>; j++) sums[row][j] += to_sum(left[i][row].of[j]) * to_sum(right[i].of[j]);
            }
        }
    }
}

// The same element by element.
template <typename T, int ROWS>
__device__ inline void add_elements(typename SumOf<T>::Type (&sums)[ROWS][WIDTH<T>], const T* rows, const T* column, const Product& p) {
#pragma unroll 4
    for (int k = threadIdx.x; k < p.depth; k += blockDim.x) {
        typename SumOf<T>::Type right = to_sum(column[(int64)k * p.b_depth]);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            if (row < p.rows) sums[row][0] += to_sum(rows[(int64)row * p.a_row + (int64)k * p.a_depth]) * right;
        }
    }
}

// The steps of b lie next to each other: each column by blockDim.x threads, a power of two from 8 on.
template <typename T, int ROWS, int AT_ONCE>
__device__ inline void few_rows_near(const T* a, const T* b, const T* c, const T* d, T* y, const Product& p, const Finish& finish) {
    typedef typename SumOf<T>::Type Sum;
    __shared__ Sum parts[ROWS][NEAR_THREADS / 32];
    int column = blockIdx.x % p.tiles_across * blockDim.y + threadIdx.y, own_row = threadIdx.x;
    bool is_result = own_row < p.rows && column < p.columns;
    Places at = places_of(p, blockIdx.x / p.tiles_across);
    if (is_result) prefetch_addends(c, d, p, at, own_row, column);
    // Threads of no column read the last one, so that warps are whole.
    const T* of_column = b + at.b + (int64)min(column, p.columns - 1) * p.b_column;
    const T* rows = a + at.a;
    Sum sums[ROWS][WIDTH<T>] = {};
    bool vectors = p.a_vectors && p.b_vectors && p.a_depth == 1 && p.b_depth == 1;
    if (vectors && is_aligned(rows) && is_aligned(of_column)) {
        add_vectors<T, ROWS, AT_ONCE>(sums, rows, of_column, p);
    } else {
        add_elements(sums, rows, of_column, p);
    }
    int warps = blockDim.x / 32, warp = (threadIdx.y * blockDim.x + threadIdx.x) / 32;
    Sum own = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        Sum sum = 0;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; j++) sum += sums[row][j];
        sum = sum_of_lanes(sum, min(blockDim.x, 32));
        if (warps > 1 && threadIdx.x % 32 == 0) parts[row][warp] = sum;
        if (row == own_row) own = sum;
    }
    if (warps > 1) {
        __syncthreads();
        if (!is_result) return;
        own = 0;
        for (int i = 0; i < warps; i++) own += parts[own_row][threadIdx.y * warps + i];
    }
    if (is_result) finish_sum(own, c, d, y, p, finish, at, own_row, column);
}

// Some columns of b, 16 bytes of each of its rows, and what they are multiplied by.
template <typename T, int ROWS> struct Columns {
    const T *from, *rows;
    int first;
    // Whether they can be read as they lie: in whole vectors, which may have elements of other rows.
    bool whole;

    __device__ Columns(const T* rows, const T* b, int first, int slice, const Product& p) : rows(rows), first(first) {
        from = b + (int64)first * p.b_column;
        int turns = (p.depth - 1 - slice) / (int)blockDim.y;
        const T* begin = from + (int64)slice * p.b_depth;
        const T* last = begin + (int64)turns * blockDim.y * p.b_depth;
        const T* end = b + (int64)(p.depth - 1) * p.b_depth + p.columns;
        whole = p.b_column == 1 && is_aligned(begin) && begin >= b && last + WIDTH<T> <= end;
    }

    __device__ Vector16<T> read(int k, const Product& p) const {
        const T* at = from + (int64)k * p.b_depth;
        if (whole) return *(const Vector16<T>*)at;
        Vector16<T> vector;
#pragma unroll
        for (int i = 0; i < WIDTH<T>; i++) {
            bool there = first + i >= 0 && first + i < p.columns;
            vector.of[i] = there ? at[(int64)i * p.b_column] : T(0.0f);
        }
        return vector;
    }

    // Adds the products of AT_ONCE steps from k0 on, a block's slices apart.
    template <int AT_ONCE> __device__ void add(typename SumOf<T>::Type (&sums)[ROWS][WIDTH<T>], int k0, const Product& p) const {
        Vector16<T> right[AT_ONCE];
        T left[AT_ONCE][ROWS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int k = k0 + i * blockDim.y;
            right[i] = k < p.depth ? read(k, p) : zeros<T>();
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                bool there = k < p.depth && row < p.rows;
                left[i][row] = there ? rows[(int64)row * p.a_row + (int64)k * p.a_depth] : T(0.0f);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int j = 0; j < WIDTH<T>; j++) {
                typename SumOf<T>::Type of_b = to_sum(right[i].of[j]);
#pragma unroll
                for (int row = 0; row < ROWS; row++) sums[row][j] += to_sum(left[i][row]) * of_b;
            }
        }
    }
};

// The columns of b lie next to each other: a block has blockDim.x vectors of them, and blockDim.y threads for each, which have the steps
// in turns. Where rows begin anywhere, each thread reads from the last whole address on: that is as far before the first column in all
// rows that it has, as the number of turns makes their steps multiples of 16 bytes. So the sums of a column lie shifted, and the last
// vector is there for what others have lost.
template <typename T, int ROWS, int AT_ONCE>
__device__ inline void few_rows_far(const T* a, const T* b, const T* c, const T* d, T* y, const Product& p, const Finish& finish) {
    typedef typename SumOf<T>::Type Sum;
    // The pitch has neighbouring columns in different banks.
    __shared__ Sum parts[WIDTH<T>][FAR_THREADS + 4];
    int across = blockDim.x, slices = blockDim.y, slice = threadIdx.y, thread = slice * across + threadIdx.x;
    int tile = (across - (p.b_vectors ? 0 : 1)) * WIDTH<T>;
    int column0 = blockIdx.x % p.tiles_across * tile;
    Places at = places_of(p, blockIdx.x / p.tiles_across);
    // Who joins the sums of which column.
    int joiners = min(32, FAR_THREADS / WIDTH<T> / across), joiner = thread % joiners;
    int of_tile = thread / joiners, column = column0 + of_tile;
    bool is_joined = of_tile < tile && column < p.columns;
    if (is_joined && joiner < p.rows) prefetch_addends(c, d, p, at, joiner, column);

    bool shifted = !p.b_vectors && p.b_column == 1;
    uint place = (uint)((uint64)(b + at.b + column0) / sizeof(T));
    auto shift = [&](int slice) { return shifted ? (int)((place + (uint)slice * (uint)p.b_depth) % WIDTH<T>) : 0; };
    int first = column0 + (int)threadIdx.x * WIDTH<T> - shift(slice);
    Sum sums[ROWS][WIDTH<T>] = {};
    if (first < p.columns && slice < p.depth) {
        Columns<T, ROWS> columns(a + at.a, b + at.b, first, slice, p);
        if (columns.whole) {
            for (int k = slice; k < p.depth; k += AT_ONCE * slices) columns.template add<AT_ONCE>(sums, k, p);
        } else {
            for (int k = slice; k < p.depth; k += slices) columns.template add<1>(sums, k, p);
        }
    }
#pragma unroll 1
    for (int row = 0; row < ROWS && row < p.rows; row++, next_row(sums)) {
        if (row > 0) __syncthreads();
#pragma unroll
        for (int j = 0; j < WIDTH<T>; j++) parts[j][thread] = sums[0][j];
        __syncthreads();
        Sum sum = 0;
        for (int other = is_joined ? joiner : slices; other < slices; other += joiners) {
            int own = of_tile + shift(other);
            sum += parts[own % WIDTH<T>][other * across + own / WIDTH<T>];
        }
        sum = sum_of_lanes(sum, joiners);
        if (is_joined && joiner == 0) finish_sum(sum, c, d, y, p, finish, at, row, column);
    }
}

#define FEW_PRODUCT(name, type, threads, blocks, body)                                                         \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                              \
        name(const type* a, const type* b, const type* c, const type* d, type* y, Product p, Finish finish) {  \
        body(a, b, c, d, y, p, finish);                                                                        \
    }
#define PRODUCTS_OF_FEW(suffix, type)                                                                          \
    FEW_PRODUCT(gemv_near_1_##suffix, type, NEAR_THREADS, 3, (few_rows_near<type, 1, 4>))                      \
    FEW_PRODUCT(gemv_near_4_##suffix, type, NEAR_THREADS, 2, (few_rows_near<type, 4, 2>))                      \
    FEW_PRODUCT(gemv_far_1_##suffix, type, FAR_THREADS, 2, (few_rows_far<type, 1, 6>))                         \
    FEW_PRODUCT(gemv_far_4_##suffix, type, FAR_THREADS, 1, (few_rows_far<type, 4, 4>))
