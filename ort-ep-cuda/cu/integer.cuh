// Tiles of products of 8-bit codes less their zero points, with sums of 32 bits that wrap, and what becomes of the sums.
//
// Codes without a sign are taken as those less 128, which their zero points are, too, so that all products are of signed bytes. With zero
// points a and b, the sum of (x - a)(w - b) is that of xw, less b times that of x and a times that of w, and depth * a * b.

#pragma once

#include "codes.cuh"
#include "core_sums.cuh"

// As in integer.rs.
constexpr int MOST_BATCHES = 6;

// Where a tensor's elements are: steps from row to row, from column to column, and along the axes of the batch.
struct Part { int row, column, batch[MOST_BATCHES]; };

// What a result is made of besides the two sides; integer.rs has the same order.
enum Place { A_ZERO, B_ZERO, A_SCALE, B_SCALE, Y_SCALE, Y_ZERO, ADDEND, PLACES };
enum Ending { SUMS, CODES, NUMBERS };

struct Product {
    int rows, columns, depth, down, across;
    int a_line, a_depth, b_line, b_depth;
    // How many bytes of a side may be read at once, as far as its steps go: 16, 4 or 1.
    int a_many, b_many;
    int a_kind, b_kind, y_kind, scale_kind;
    int ending;
    // Of all results, as scales are.
    float alpha;
    int axes;
    int sizes[MOST_BATCHES], a_batch[MOST_BATCHES], b_batch[MOST_BATCHES];
    Part parts[PLACES];
};

struct Tensors { const void* of[PLACES]; };
#define TENSORS                                                                                                \
    const void *a_zero, const void *b_zero, const void *a_scale, const void *b_scale, const void *y_scale,     \
        const void *y_zero, const void *addend
#define ALL_TENSORS {{a_zero, b_zero, a_scale, b_scale, y_scale, y_zero, addend}}

// What makes signed bytes of four codes.
__device__ inline uint flip_of(int kind) { return kind & HAS_SIGN ? 0u : 0x80808080u; }
__device__ inline int shifted(int zero, int kind) { return kind & HAS_SIGN ? zero : zero - 128; }

__device__ inline int batch_place(const Product& p, const int (&steps)[MOST_BATCHES], int matrix) {
    int place = 0;
#pragma unroll
    for (int axis = MOST_BATCHES - 1; axis >= 0; axis--) {
        if (opaque(axis >= p.axes)) continue;
        place += matrix % p.sizes[axis] * steps[axis];
        matrix /= p.sizes[axis];
    }
    return place;
}

// c and the products of four signed bytes.
__device__ inline int dot4(int a, int b, int c) {
    int d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// How many bytes may be read at once from a tensor that begins here.
__device__ inline int many_at(const uint8* from, int many) {
    return is_multiple(from, many) ? many : is_multiple(from, 4) && many > 4 ? 4 : 1;
}

// Four signed bytes that lie next to each other, of which `left` are there; the others are 0.
__device__ inline uint four_at(const uint8* at, int left, int many, uint flip) {
    if (left <= 0) return 0;
    if (left >= 4 && many >= 4) return *(const uint*)at ^ flip;
    uint word = 0;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (n < left) word |= ((uint)at[n] ^ (flip & 255)) << 8 * n;
    }
    return word;
}

// Words of four places in a row become those of four rows at a place.
__device__ inline void transpose_bytes(uint (&w)[4]) {
    uint low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
    uint high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(low01, low23, 0x5410);
    w[1] = __byte_perm(low01, low23, 0x7632);
    w[2] = __byte_perm(high01, high23, 0x5410);
    w[3] = __byte_perm(high01, high23, 0x7632);
}

// Steps of a tile, whose words are four of them.
constexpr int STEPS = 4 * WORDS;
constexpr uint ONES = 0x01010101u;

// A side that is a matrix, in tiles of so many lines: rows of the left side, columns of the right one. Lines whose number is the same modulo
// 4 are next to each other in a tile.
template <int LINES> struct Matrix {
    static constexpr int UNITS = LINES / 64, GROUPS = LINES / 4;
    const uint8* from;
    int line_step, depth_step, line0, lines, depth, many;
    uint flip;
    uint words[UNITS][4];
    int totals[UNITS][4];

    __device__ Matrix(const uint8* from, int line_step, int depth_step, int line0, int lines, int depth, int many, int kind)
        : from(from), line_step(line_step), depth_step(depth_step), line0(line0), lines(lines), depth(depth),
          many(many_at(from, many)), flip(flip_of(kind)) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
#pragma unroll
            for (int n = 0; n < 4; n++) totals[u][n] = 0;
        }
    }

    static __device__ int line_of(int position) { return position % GROUPS * 4 + position / GROUPS; }
    static __device__ int position_of(int line) { return line % 4 * GROUPS + line / 4; }

    __device__ bool is_near() const { return depth_step == 1; }
    // Of four lines at four steps that a warp reads together: 8 such groups of lines, 4 of steps.
    static __device__ int group_of(int unit) { return unit % 8 + unit / 32 % (GROUPS / 8) * 8; }
    static __device__ int word_of(int unit) { return unit / 8 % 4 + unit / 32 / (GROUPS / 8) * 4; }

    __device__ void read(int k0) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int unit = threadIdx.x + THREADS * u;
            if (is_near()) {
                int line = line0 + line_of(unit / 4), k = k0 + unit % 4 * 16;
                int left = line < lines ? depth - k : 0;
                const uint8* at = from + (int64)line * line_step + k;
                if (many == 16 && left >= 16) {
                    uint4 all = *(const uint4*)at;
                    words[u][0] = all.x ^ flip;
                    words[u][1] = all.y ^ flip;
                    words[u][2] = all.z ^ flip;
                    words[u][3] = all.w ^ flip;
                } else {
#pragma unroll
                    for (int n = 0; n < 4; n++) words[u][n] = four_at(at + 4 * n, left - 4 * n, many, flip);
                }
            } else {
                int line = line0 + 4 * group_of(unit), k = k0 + 4 * word_of(unit);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const uint8* at = from + (int64)(k + n) * depth_step + line;
                    words[u][n] = k + n < depth ? four_at(at, lines - line, many, flip) : 0;
                }
                transpose_bytes(words[u]);
            }
        }
    }

    __device__ void write(uint* tile) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int unit = threadIdx.x + THREADS * u;
            if (is_near()) {
                *(uint4*)(tile + unit / 4 * PITCH + unit % 4 * 4) = make_uint4(words[u][0], words[u][1], words[u][2], words[u][3]);
#pragma unroll
                for (int n = 0; n < 4; n++) totals[u][0] = dot4((int)words[u][n], (int)ONES, totals[u][0]);
            } else {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    tile[(n * GROUPS + group_of(unit)) * PITCH + word_of(unit)] = words[u][n];
                    totals[u][n] = dot4((int)words[u][n], (int)ONES, totals[u][n]);
                }
            }
        }
    }

    // Adds what the thread has of the sums of lines.
    __device__ void total(int* sums) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int unit = threadIdx.x + THREADS * u;
            if (is_near()) {
                atomicAdd(sums + unit / 4, totals[u][0]);
            } else {
#pragma unroll
                for (int n = 0; n < 4; n++) atomicAdd(sums + n * GROUPS + group_of(unit), totals[u][n]);
            }
        }
    }
};

// Says what the steps of a tile are, of sides that must know it before they read.
template <typename Side> __device__ inline void describe(Side&, int) {}

// The steps from row to row and from column to column of a product's part, at a matrix.
struct Parts {
    const Product& p;
    const Tensors& tensors;
    int matrix;

    __device__ bool has(int place) const { return tensors.of[place] != nullptr; }
    __device__ int at(int place, int row, int column) const {
        const Part& part = p.parts[place];
        return batch_place(p, part.batch, matrix) + row * part.row + column * part.column;
    }
    __device__ int zero(int place, int row, int column, int kind) const {
        return shifted(has(place) ? code_at(tensors.of[place], kind, at(place, row, column)) : 0, kind);
    }
    __device__ float scale(int place, int row, int column) const {
        return has(place) ? float_at(tensors.of[place], p.scale_kind, at(place, row, column)) : 1.0f;
    }
};

// What is the same for all results of a row, or of a column.
struct Term {
    int zero;
    float scale;
};
// Of rows, there is also what codes of the result have.
struct RowTerm {
    Term term;
    float y_scale;
    int y_zero;
};

__device__ inline RowTerm row_term(const Parts& parts, int row) {
    const Product& p = parts.p;
    RowTerm of = {{parts.zero(A_ZERO, row, 0, p.a_kind), 1.0f}, 1.0f, 0};
    if (p.ending == SUMS) return of;
    of.term.scale = __fmul_rn(p.alpha, parts.scale(A_SCALE, row, 0));
    of.y_scale = parts.scale(Y_SCALE, row, 0);
    if (p.ending == CODES && parts.has(Y_ZERO)) of.y_zero = code_at(parts.tensors.of[Y_ZERO], p.y_kind, parts.at(Y_ZERO, row, 0));
    return of;
}
__device__ inline Term column_term(const Parts& parts, int column) {
    return {parts.zero(B_ZERO, 0, column, parts.p.b_kind), parts.p.ending == SUMS ? 1.0f : parts.scale(B_SCALE, 0, column)};
}

// The sum of products of codes, with those of its row and of its column, as a result.
__device__ inline void finish(const Parts& parts, void* y, int64 to, int row, int column, const RowTerm& of_row,
                              const Term& of_column, uint sum, uint row_sum, uint column_sum) {
    const Product& p = parts.p;
    uint a = of_row.term.zero, b = of_column.zero;
    sum += (uint)p.depth * a * b - b * row_sum - a * column_sum;
    bool has_addend = parts.has(ADDEND);
    int place = has_addend ? parts.at(ADDEND, row, column) : 0;
    if (has_addend && p.ending != NUMBERS) sum += static_cast<const int*>(parts.tensors.of[ADDEND])[place];
    if (p.ending == SUMS) {
        static_cast<int*>(y)[to] = (int)sum;
        return;
    }
    float factor = __fmul_rn(of_row.term.scale, of_column.scale);
    if (parts.has(Y_SCALE)) factor = factor / of_row.y_scale;
    float value = __fmul_rn((float)(int)sum, factor);
    if (p.ending == CODES) {
        static_cast<uint8*>(y)[to] = (uint8)nearest_code(__fadd_rn(rintf(value), (float)of_row.y_zero), p.y_kind);
        return;
    }
    if (has_addend) value = __fadd_rn(value, float_at(parts.tensors.of[ADDEND], p.scale_kind, place));
    if (p.scale_kind == IS_HALF) {
        static_cast<__half*>(y)[to] = from_float<__half>(value);
    } else {
        static_cast<float*>(y)[to] = value;
    }
}

#if __CUDA_ARCH__ >= 800
template <int LINES> using Cores = CoreSums<int8, int, LINES, 2>;
#endif

// Sums by products of four bytes at a time: each 16th row and column of a tile of results.
template <int LINES> struct Dots {
    static constexpr int EACH = LINES / 16, ABREAST = LINES == 128 ? 1 : 2;
    int sums[EACH][EACH];

    __device__ void add(const uint* a, const uint* b) {
        a += threadIdx.x / 16 * PITCH;
        b += threadIdx.x % 16 * PITCH;
        // Few words at a time: with more of them in registers, some of these would be in memory.
#pragma unroll ABREAST
        for (int word = 0; word < WORDS; word += 4) {
            uint4 rows[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) rows[i] = *(const uint4*)(a + 16 * i * PITCH + word);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                uint4 column = *(const uint4*)(b + 16 * j * PITCH + word);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    sums[i][j] = dot4((int)rows[i].x, (int)column.x, sums[i][j]);
                    sums[i][j] = dot4((int)rows[i].y, (int)column.y, sums[i][j]);
                    sums[i][j] = dot4((int)rows[i].z, (int)column.z, sums[i][j]);
                    sums[i][j] = dot4((int)rows[i].w, (int)column.w, sums[i][j]);
                }
            }
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < EACH; j++) sums[i][j] = 0;
        }
    }

    template <typename To> __device__ void each(To to) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < EACH; j++) to(threadIdx.x / 16 + 16 * i, threadIdx.x % 16 + 16 * j, sums[i][j]);
        }
    }
};

// A tile of results by 256 threads. `place(row, column)` is where one of them is written.
template <int LINES, typename Sums, typename Right, typename Place>
__device__ inline void tiles(Matrix<LINES>& left, Right& right, const Parts& parts, void* y, int row0, int column0, Place place) {
    // Two tiles of either side, and then the sums of 64 rows.
    __shared__ __align__(16) uint memory[4][LINES * PITCH];
    static_assert(sizeof(memory) >= 64 * (LINES + 4) * sizeof(int), "sums of 64 rows fit");
    __shared__ int row_sums[LINES], column_sums[LINES];
    __shared__ RowTerm row_terms[LINES];
    __shared__ Term column_terms[LINES];
    const Product& p = parts.p;
    if (threadIdx.x < LINES) {
        int row = row0 + Matrix<LINES>::line_of(threadIdx.x), column = column0 + Right::line_of(threadIdx.x);
        row_sums[threadIdx.x] = column_sums[threadIdx.x] = 0;
        if (row < p.rows) row_terms[threadIdx.x] = row_term(parts, row);
        if (column < p.columns) column_terms[threadIdx.x] = column_term(parts, column);
    }
    Sums sums;
    sums.clear();
    describe(right, 0);
    describe(right, STEPS);
    __syncthreads();
    left.read(0);
    right.read(0);
    left.write(memory[0]);
    right.write(memory[2]);
    __syncthreads();
    int now = 0;
    for (int k0 = 0; k0 < p.depth; k0 += STEPS, now ^= 1) {
        bool more = k0 + STEPS < p.depth;
        if (more) {
            left.read(k0 + STEPS);
            right.read(k0 + STEPS);
        }
        // The steps of this tile were read before the last barrier, those of the next one just now.
        describe(right, k0 + 2 * STEPS);
        sums.add(memory[now], memory[2 + now]);
        if (more) {
            left.write(memory[now ^ 1]);
            right.write(memory[2 + (now ^ 1)]);
        }
        __syncthreads();
    }
    left.total(row_sums);
    right.total(column_sums);
    __syncthreads();
    auto write = [&](int i, int j, int sum) {
        int row = row0 + i, column = column0 + j;
        if (row >= p.rows || column >= p.columns) return;
        int of_row = Matrix<LINES>::position_of(i), of_column = Right::position_of(j);
        finish(parts, y, place(row, column), row, column, row_terms[of_row], column_terms[of_column], sum, row_sums[of_row],
               column_sums[of_column]);
    };
    write_tile<LINES>(reinterpret_cast<int*>(memory), sums, Matrix<LINES>::line_of, Right::line_of, write);
}
