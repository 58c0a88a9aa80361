// Batched products y = activation(alpha * a * b + beta * c + d) of any steps; c and d broadcast and may be null pointers.

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
        this->vectors = vectors && is_aligned(side);
    }

    __device__ void read(int k0, Sum (&to)[4]) const {
        const T* at = from + (int64)k0 * advance;
        int rest = depth - k0 - k;
        int count = near ? (valid > 0 ? rest : 0) : (rest > 0 ? valid : 0);
        if (vectors && count >= 4) {
            Four<T> four = *(const Four<T>*)at;
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
            Four<Sum> four;
#pragma unroll
            for (int i = 0; i < 4; i++) four.of[i] = of[i];
            *(Four<Sum>*)&tile[k][line] = four;
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
            Four<Sum> rows[QUADS], columns[QUADS];
#pragma unroll
            for (int quad = 0; quad < QUADS; quad++) {
                rows[quad] = *(const Four<Sum>*)&a_tiles[now][k][own_row + 64 * quad];
                columns[quad] = *(const Four<Sum>*)&b_tiles[now][k][own_column + 64 * quad];
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
    bool whole = p.y_column == 1 && p.columns % 4 == 0 && is_aligned(y + at.y);
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
            Four<T> four;
#pragma unroll
            for (int j = 0; j < 4; j++) four.of[j] = of_sum<T>(own[4 * quad + j]);
            if (whole && column < p.columns) {
                *(Four<T>*)to = four;
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (column + j < p.columns) to[(int64)j * p.y_column] = four.of[j];
            }
        }
    }
}

template <typename Sum> __device__ inline Sum all_of_warp(Sum x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

constexpr int FEW_ROWS = 4;

// Up to four rows; the steps of b lie next to each other: each column by a warp.
template <typename T>
__device__ inline void few_rows_near(const T* a, const T* b, const T* c, const T* d, T* y, const Product& p, const Finish& finish) {
    typedef typename SumOf<T>::Type Sum;
    int lane = threadIdx.x % 32;
    int column = blockIdx.x % p.tiles_across * (THREADS / 32) + threadIdx.x / 32;
    Places at = places_of(p, blockIdx.x / p.tiles_across);
    if (column >= p.columns) return;
    const T* of_column = b + at.b + (int64)column * p.b_column;
    const T* of_rows = a + at.a;
    Sum sums[FEW_ROWS] = {};
    if (p.a_vectors && p.b_vectors && p.a_depth == 1 && p.b_depth == 1 && is_aligned(of_rows) && is_aligned(of_column)) {
        for (int k = lane * 4; k < p.depth; k += 128) {
            Four<T> right = *(const Four<T>*)(of_column + k);
#pragma unroll
            for (int row = 0; row < FEW_ROWS; row++) {
                if (row >= p.rows) break;
                Four<T> left = *(const Four<T>*)(of_rows + (int64)row * p.a_row + k);
#pragma unroll
                for (int i = 0; i < 4; i++) sums[row] += to_sum(left.of[i]) * to_sum(right.of[i]);
            }
        }
    } else {
        for (int k = lane; k < p.depth; k += 32) {
            Sum right = to_sum(of_column[(int64)k * p.b_depth]);
#pragma unroll
            for (int row = 0; row < FEW_ROWS; row++) {
                if (row >= p.rows) break;
                sums[row] += to_sum(of_rows[(int64)row * p.a_row + (int64)k * p.a_depth]) * right;
            }
        }
    }
    Sum own[1] = {};
#pragma unroll
    for (int row = 0; row < FEW_ROWS; row++) {
        Sum sum = all_of_warp(sums[row]);
        if (row == lane) own[0] = sum;
    }
    if (lane >= p.rows) return;
    own[0] = with_addends(own[0], c, d, p, finish, at, lane, column);
    activate_all(own, finish);
    y[at.y + (int64)lane * p.y_row + (int64)column * p.y_column] = of_sum<T>(own[0]);
}

// Up to four rows; the columns of b lie next to each other: 32 of them by a block, each warp with every eighth step.
template <typename T>
__device__ inline void few_rows_far(const T* a, const T* b, const T* c, const T* d, T* y, const Product& p, const Finish& finish) {
    typedef typename SumOf<T>::Type Sum;
    constexpr int SLICES = THREADS / 32;
    __shared__ Sum parts[SLICES][FEW_ROWS][32];
    int lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    int column0 = blockIdx.x % p.tiles_across * 32;
    int column = min(column0 + lane, p.columns - 1);
    Places at = places_of(p, blockIdx.x / p.tiles_across);
    const T* of_column = b + at.b + (int64)column * p.b_column;
    const T* of_rows = a + at.a;
    Sum sums[FEW_ROWS] = {};
#pragma unroll 4
    for (int k = slice; k < p.depth; k += SLICES) {
        Sum right = to_sum(of_column[(int64)k * p.b_depth]);
#pragma unroll
        for (int row = 0; row < FEW_ROWS; row++) {
            if (row < p.rows) sums[row] += to_sum(of_rows[(int64)row * p.a_row + (int64)k * p.a_depth]) * right;
        }
    }
#pragma unroll
    for (int row = 0; row < FEW_ROWS; row++) parts[slice][row][lane] = sums[row];
    __syncthreads();
    column = column0 + lane;
    if (slice >= p.rows || slice >= FEW_ROWS || column >= p.columns) return;
    Sum own[1] = {};
    for (int other = 0; other < SLICES; other++) own[0] += parts[other][slice][lane];
    own[0] = with_addends(own[0], c, d, p, finish, at, slice, column);
    activate_all(own, finish);
    y[at.y + (int64)slice * p.y_row + (int64)column * p.y_column] = of_sum<T>(own[0]);
}

// Blocks that share a processor with large tiles; the compiler for 9.0 would keep some of two blocks' registers in memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int LARGE_BLOCKS = 1;
#else
constexpr int LARGE_BLOCKS = 2;
#endif

#define ENTRY(name, type, body) ENTRY_OF(name, type, 2, body)
#define ENTRY_OF(name, type, blocks, body)                                                                     \
    extern "C" __global__ void __launch_bounds__(256, blocks)                                                  \
        name(const type* a, const type* b, const type* c, const type* d, type* y, Product p, Finish finish) {  \
        body(a, b, c, d, y, p, finish);                                                                        \
    }
#define PRODUCTS(suffix, type)                                                                                 \
    ENTRY(gemm_small_##suffix, type, (tiles<type, 64, 16>))                                                    \
    ENTRY(gemv_near_##suffix, type, few_rows_near<type>)                                                       \
    ENTRY(gemv_far_##suffix, type, few_rows_far<type>)

PRODUCTS(f32, float)
PRODUCTS(f16, __half)
PRODUCTS(bf16, __nv_bfloat16)
PRODUCTS(f64, double)
PRODUCTS(i32, int)
PRODUCTS(i64, int64)
ENTRY_OF(gemm_large_f32, float, LARGE_BLOCKS, (tiles<float, 128, 8>))
// Devices without tensor cores for them take these; with half as many registers some would be in memory.
ENTRY_OF(gemm_large_f16, __half, 1, (tiles<__half, 128, 8>))
ENTRY_OF(gemm_large_bf16, __nv_bfloat16, 1, (tiles<__nv_bfloat16, 128, 8>))
ENTRY_OF(gemm_large_i32, int, LARGE_BLOCKS, (tiles<int, 128, 8>))

// Tensor cores.

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
__device__ inline uint shared_address(const void* at) { return (uint)__cvta_generic_to_shared(at); }

// Four matrices of eight times eight halves: the row at `at` of each lane, and the elements that an operand of the lane takes.
template <bool TRANSPOSED> __device__ inline void load_matrices(uint (&to)[4], const void* at) {
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(at)) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(at)) : "memory");
    }
}

#define MULTIPLY(type, name)                                                                                   \
    __device__ inline void multiply(type, float (&sums)[4], const uint (&a)[4], uint b0, uint b1) {            \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, "          \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                           \
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                          \
    }
MULTIPLY(__half, "f16")
MULTIPLY(__nv_bfloat16, "bf16")

// Copies 16 bytes, or writes zeros where there is nothing.
__device__ inline void copy_later(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 : : "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}

template <int LEFT> __device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory"); }

// One side of a product in shared memory: BLOCK lines of STEPS steps where these lie next to each other, else the other way round.
// The pitch has eight rows of a matrix in different banks.
template <typename T, int BLOCK, bool NEAR> struct HalfTile {
    static constexpr int STEPS = 32;
    static constexpr int INNER = NEAR ? STEPS : BLOCK, OUTER = NEAR ? BLOCK : STEPS;
    static constexpr int PITCH = INNER + 8;
    T of[OUTER][PITCH];

    // Begins to read the steps from k0 on; eight elements at a time.
    template <int LANES>
    __device__ void read(const T* side, int line0, int lines, int line_step, int k0, int depth, int depth_step, bool vectors) {
        constexpr int CHUNKS = INNER / 8;
#pragma unroll
        for (int turn = 0; turn < OUTER * CHUNKS / LANES; turn++) {
            int chunk = threadIdx.x + turn * LANES;
            int outer = chunk / CHUNKS, inner = chunk % CHUNKS * 8;
            int line = line0 + (NEAR ? outer : inner), k = k0 + (NEAR ? inner : outer);
            bool there = line < lines && k < depth;
            const T* from = side + (there ? (int64)line * line_step + (int64)k * depth_step : 0);
            if (vectors) {
                copy_later(&of[outer][inner], from, there);
                continue;
            }
            int count = there ? (NEAR ? depth - k : lines - line) : 0;
            int step = NEAR ? depth_step : line_step;
            Eight eight;
#pragma unroll
            for (int i = 0; i < 8; i++) eight.of[i] = i < count ? from[(int64)i * step] : T(0.0f);
            *(Eight*)&of[outer][inner] = eight;
        }
    }

    struct alignas(16) Eight { T of[8]; };
};

template <typename T> struct alignas(4) Two { T of[2]; };

// A tile of BLOCK rows and columns by warps of WARP_ROWS times WARP_COLUMNS each; STAGES tiles are on their way at a time.
template <typename T, int BLOCK, int WARP_ROWS, int WARP_COLUMNS, int STAGES, bool A_NEAR, bool B_NEAR>
__device__ inline void half_tiles(const T* a, const T* b, const T* c, const T* d, T* y, const Product& p, const Finish& finish) {
    constexpr int LANES = BLOCK / WARP_ROWS * (BLOCK / WARP_COLUMNS) * 32;
    constexpr int DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 8, STEPS = 32;
    typedef HalfTile<T, BLOCK, A_NEAR> OfA;
    typedef HalfTile<T, BLOCK, B_NEAR> OfB;
    __shared__ __align__(16) unsigned char memory[STAGES * (sizeof(OfA) + sizeof(OfB))];
    OfA* a_tiles = (OfA*)memory;
    OfB* b_tiles = (OfB*)(memory + STAGES * sizeof(OfA));
    int column0 = blockIdx.x % p.tiles_across * BLOCK;
    int row0 = blockIdx.x / p.tiles_across % p.tiles_down * BLOCK;
    Places at = places_of(p, blockIdx.x / p.tiles_across / p.tiles_down);
    a += at.a;
    b += at.b;
    bool a_vectors = p.a_vectors && (uint64)a % 16 == 0, b_vectors = p.b_vectors && (uint64)b % 16 == 0;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warp_row = warp / (BLOCK / WARP_COLUMNS) * WARP_ROWS, warp_column = warp % (BLOCK / WARP_COLUMNS) * WARP_COLUMNS;
    float sums[DOWN * ACROSS][4];
#pragma unroll
    for (int i = 0; i < DOWN * ACROSS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }
    int turns = (p.depth + STEPS - 1) / STEPS;
    auto read = [&](int turn) {
        if (turn < turns) {
            int to = turn % STAGES;
            a_tiles[to].template read<LANES>(a, row0, p.rows, p.a_row, turn * STEPS, p.depth, p.a_depth, a_vectors);
            b_tiles[to].template read<LANES>(b, column0, p.columns, p.b_column, turn * STEPS, p.depth, p.b_depth, b_vectors);
        }
        // An empty group, too, as groups are counted.
        asm volatile("cp.async.commit_group;" : : : "memory");
    };
    for (int turn = 0; turn < STAGES - 1; turn++) read(turn);
    for (int turn = 0; turn < turns; turn++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        // Into the tile of the turn before, which all warps are done with.
        read(turn + STAGES - 1);
        const OfA& a_tile = a_tiles[turn % STAGES];
        const OfB& b_tile = b_tiles[turn % STAGES];
#pragma unroll
        for (int k = 0; k < STEPS; k += 16) {
            uint left[DOWN][4];
#pragma unroll
            for (int i = 0; i < DOWN; i++) {
                int line = warp_row + 16 * i;
                const T* from = A_NEAR ? &a_tile.of[line + lane % 16][k + lane / 16 * 8]
                                       : &a_tile.of[k + lane / 16 * 8 + lane % 8][line + lane / 8 % 2 * 8];
                load_matrices<!A_NEAR>(left[i], from);
            }
#pragma unroll
            for (int j = 0; j < ACROSS; j += 2) {
                uint right[4];
                int line = warp_column + 8 * j;
                const T* from = B_NEAR ? &b_tile.of[line + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]
                                       : &b_tile.of[k + lane % 16][line + lane / 16 * 8];
                load_matrices<!B_NEAR>(right, from);
#pragma unroll
                for (int i = 0; i < DOWN; i++) {
                    multiply(T(), sums[i * ACROSS + j], left[i], right[0], right[1]);
                    multiply(T(), sums[i * ACROSS + j + 1], left[i], right[2], right[3]);
                }
            }
        }
    }
    // Of each product of 16 times 8, a lane has two neighbours of one row and the two of the row eight below.
    bool whole = p.y_column == 1 && p.columns % 2 == 0 && (uint64)(y + at.y) % 4 == 0;
#pragma unroll 1
    for (int tile = 0; tile < DOWN * ACROSS; tile++, next_row(sums)) {
        float (&own)[4] = sums[0];
        int row0_of_tile = row0 + warp_row + tile / ACROSS * 16 + lane / 4;
        int column = column0 + warp_column + tile % ACROSS * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = row0_of_tile + j / 2 * 8;
            if (row < p.rows && column + j % 2 < p.columns) {
                own[j] = with_addends<T>(own[j], c, d, p, finish, at, row, column + j % 2);
            }
        }
        activate_all(own, finish);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = row0_of_tile + half * 8;
            if (row >= p.rows || column >= p.columns) continue;
            Two<T> two = {{from_float<T>(own[2 * half]), from_float<T>(own[2 * half + 1])}};
            T* to = y + at.y + (int64)row * p.y_row + (int64)column * p.y_column;
            if (whole) {
                *(Two<T>*)to = two;
            } else {
                to[0] = two.of[0];
                if (column + 1 < p.columns) to[p.y_column] = two.of[1];
            }
        }
    }
}
#define ON_TENSOR_CORES(...) __VA_ARGS__
#else
#define ON_TENSOR_CORES(...)
#endif

// The host takes these where the device has them: from compute capability 8.0 on.
#define HALF_ENTRY(name, type, lanes, ...)                                                                     \
    extern "C" __global__ void __launch_bounds__(lanes, 1)                                                     \
        name(const type* a, const type* b, const type* c, const type* d, type* y, Product p, Finish finish) {  \
        ON_TENSOR_CORES((half_tiles<type, __VA_ARGS__>(a, b, c, d, y, p, finish));)                            \
    }
#define HALF_ENTRIES(suffix, type)                                                                             \
    HALF_ENTRY(gemm_cores_large_nn_##suffix, type, 256, 128, 64, 32, 2, true, false)                           \
    HALF_ENTRY(gemm_cores_large_nt_##suffix, type, 256, 128, 64, 32, 2, true, true)                            \
    HALF_ENTRY(gemm_cores_large_tn_##suffix, type, 256, 128, 64, 32, 2, false, false)                          \
    HALF_ENTRY(gemm_cores_large_tt_##suffix, type, 256, 128, 64, 32, 2, false, true)                           \
    HALF_ENTRY(gemm_cores_small_nn_##suffix, type, 128, 64, 32, 32, 4, true, false)                            \
    HALF_ENTRY(gemm_cores_small_nt_##suffix, type, 128, 64, 32, 32, 4, true, true)                             \
    HALF_ENTRY(gemm_cores_small_tn_##suffix, type, 128, 64, 32, 32, 4, false, false)                           \
    HALF_ENTRY(gemm_cores_small_tt_##suffix, type, 128, 64, 32, 32, 4, false, true)

HALF_ENTRIES(f16, __half)
HALF_ENTRIES(bf16, __nv_bfloat16)
