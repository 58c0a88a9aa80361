// Products with weights of 2, 4 or 8 bits that are read from their packed blocks: a row of codes for each column, blocks of which have a scale
// and a zero point.
//
// A code is put into the low bits of the float 2^23, from which 2^23 and the zero point are taken exactly. It stays where it is within 16
// bits, and so is 2^(bits * its number) times as large; the left side is as much smaller.

#include "codes.cuh"

struct Weights {
    int rows, columns, depth;
    // The number of bits, the steps of a block as a power of two, blocks of a column.
    int bits, log_block, blocks;
    int scale_kind;
    // The bytes of a column's zero points; of a type of floats where it is 0.
    int zero_row, zero_kind;
};

struct Inputs { const void *scales, *zeros, *bias; };
#define INPUTS const void *scales, const void *zeros, const void *bias
#define ALL_INPUTS {scales, zeros, bias}

constexpr float TWO_23 = 8388608.0f;
constexpr uint BITS_OF_TWO_23 = 0x4b000000u;

__device__ inline float number_of(uint code) { return __uint_as_float(code | BITS_OF_TWO_23) - TWO_23; }

__device__ inline float zero_point(const Weights& p, const void* zeros, int column, int block) {
    if (opaque(zeros == nullptr)) return (float)(1 << (p.bits - 1));
    if (opaque(p.zero_row == 0)) return float_at(zeros, p.zero_kind, column * p.blocks + block);
    int bit = block * p.bits;
    uint byte = static_cast<const uint8*>(zeros)[column * p.zero_row + bit / 8];
    return (float)(byte >> bit % 8 & ((1u << p.bits) - 1));
}

// A result with its bias.
template <typename T>
__device__ inline void write_sum(T* y, const Weights& p, const void* bias, int row, int column, float sum) {
    if (bias) sum += as_float(static_cast<const T*>(bias)[column]);
    y[(int64)row * p.columns + column] = from_float<T>(sum);
}

constexpr int FEW_ROWS = 4, WARPS = 8;

// Four words of which `left` are there, at once where that may be.
__device__ inline uint4 words_at(const uint8* at, int left, bool whole) {
    if (whole && left >= 4) return *(const uint4*)at;
    uint words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (n >= left) continue;
        const uint8* of = at + 4 * n;
        words[n] = is_multiple(of, 4) ? *(const uint*)of : of[0] | of[1] << 8 | of[2] << 16 | (uint)of[3] << 24;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Four rows at most: each warp has some columns, each thread of it 16 bytes of codes of each at a time.
template <typename T, int BITS, int COLUMNS>
__device__ inline void vectors(const T* a, const uint8* b, const Inputs& in, T* y, const Weights& p) {
    constexpr int HALF = 16 / BITS, WORD = 2 * HALF, CHUNK = 4 * WORD, SLAB = 32 * CHUNK;
    // From a thread's part of the left side to the next: those of eight threads are in different banks.
    constexpr int PITCH = CHUNK + 4;
    __shared__ __align__(16) float left[FEW_ROWS][32 * PITCH];
    int lane = threadIdx.x % 32, column0 = (blockIdx.x * WARPS + threadIdx.x / 32) * COLUMNS;
    int row0 = blockIdx.y * FEW_ROWS, rows = min(FEW_ROWS, p.rows - row0);
    int block = 1 << p.log_block, all_steps = p.blocks << p.log_block, row_bytes = all_steps / 8 * BITS;
    bool whole = is_multiple(b, 16) && row_bytes % 16 == 0, has_floats = in.zeros && p.zero_row == 0;
    float sums[COLUMNS][FEW_ROWS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < FEW_ROWS; r++) sums[c][r] = 0.0f;
    }
    for (int k0 = 0; k0 < all_steps; k0 += SLAB) {
        int k = k0 + lane * CHUNK;
        uint4 codes[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int left_words = column0 + c < p.columns ? (all_steps - k) / WORD : 0;
            codes[c] = words_at(b + (int64)(column0 + c) * row_bytes + k / 8 * BITS, left_words, whole);
        }
        __syncthreads();
        for (int at = threadIdx.x; at < SLAB; at += 32 * WARPS) {
            float factor = 1.0f / (float)(1 << at % HALF * BITS);
            for (int r = 0; r < rows; r++) {
                float value = k0 + at < p.depth ? as_float(a[(int64)(row0 + r) * p.depth + k0 + at]) : 0.0f;
                left[r][at / CHUNK * PITCH + at % CHUNK] = value * factor;
            }
        }
        __syncthreads();
        float scales[COLUMNS], zeros[COLUMNS];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int step = k + w * WORD;
            if (step >= all_steps) break;
            if (w == 0 || opaque(block < CHUNK)) {
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    int column = min(column0 + c, p.columns - 1);
                    scales[c] = float_at(in.scales, p.scale_kind, column * p.blocks + (step >> p.log_block));
                    zeros[c] = zero_point(p, in.zeros, column, step >> p.log_block);
                }
            }
            float partial[COLUMNS][FEW_ROWS], whole_zeros[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                // A zero point of a type of floats may be no whole number.
                whole_zeros[c] = has_floats ? 0.0f : zeros[c];
#pragma unroll
                for (int r = 0; r < FEW_ROWS; r++) partial[c][r] = 0.0f;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float values[COLUMNS][HALF];
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    uint word = w == 0 ? codes[c].x : w == 1 ? codes[c].y : w == 2 ? codes[c].z : codes[c].w;
                    word = half ? word >> 16 : word;
#pragma unroll
                    for (int n = 0; n < HALF; n++) {
                        constexpr uint MASK = (1u << BITS) - 1;
                        uint code = (word & MASK << n * BITS) | BITS_OF_TWO_23;
                        values[c][n] = __uint_as_float(code) - (TWO_23 + whole_zeros[c] * (float)(1 << n * BITS));
                    }
                }
                const float* of_chunk = left[0] + lane * PITCH + w * WORD + half * HALF;
#pragma unroll
                for (int r = 0; r < FEW_ROWS; r++) {
                    if (opaque(r >= rows)) break;
                    float of_row[HALF];
#pragma unroll
                    for (int n = 0; n < HALF; n++) of_row[n] = of_chunk[r * 32 * PITCH + n];
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
                        for (int n = 0; n < HALF; n++) partial[c][r] += of_row[n] * values[c][n];
                    }
                    if (opaque(has_floats)) {
                        float sum = 0.0f;
#pragma unroll
                        for (int n = 0; n < HALF; n++) sum += of_row[n] * (float)(1 << n * BITS);
#pragma unroll
                        for (int c = 0; c < COLUMNS; c++) partial[c][r] -= zeros[c] * sum;
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
                for (int r = 0; r < FEW_ROWS; r++) sums[c][r] += scales[c] * partial[c][r];
            }
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < FEW_ROWS; r++) {
            float sum = warp_sum(sums[c][r]);
            if (lane == 0 && r < rows && column0 + c < p.columns) write_sum(y, p, in.bias, row0 + r, column0 + c, sum);
        }
    }
}

// Eight codes of a column from step `k` on, which is a multiple of 8: as weights.
__device__ inline void eight_weights(const uint8* b, const Inputs& in, const Weights& p, int column, int k, float (&to)[8]) {
    int all_steps = p.blocks << p.log_block;
    if (column >= p.columns || k >= all_steps) {
#pragma unroll
        for (int n = 0; n < 8; n++) to[n] = 0.0f;
        return;
    }
    const uint8* at = b + ((int64)column * all_steps + k) / 8 * p.bits;
    uint64 codes = 0;
    if (opaque(p.bits == 4 && is_multiple(at, 4))) {
        codes = *(const uint*)at;
    } else if (opaque(p.bits == 8 && is_multiple(at, 8))) {
        codes = *(const uint64*)at;
    } else {
#pragma unroll 1
        for (int byte = 0; byte < p.bits; byte++) codes |= (uint64)at[byte] << 8 * byte;
    }
    int block = k >> p.log_block;
    float scale = float_at(in.scales, p.scale_kind, column * p.blocks + block), zero = zero_point(p, in.zeros, column, block);
    uint mask = (1u << p.bits) - 1;
#pragma unroll
    for (int n = 0; n < 8; n++) to[n] = (number_of((uint)(codes >> n * p.bits) & mask) - zero) * scale;
}

// Eight elements of a row of the left side from step `k` on; what is not there is 0.
template <typename T>
__device__ inline void eight_of_row(const T* a, const Weights& p, int row, int k, float (&to)[8]) {
    int left = row < p.rows ? min(8, p.depth - k) : 0;
    const T* at = a + (int64)row * p.depth + k;
#pragma unroll
    for (int part = 0; part < 8; part += 4) {
        float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (left > part) read_four(at + part, min(4, left - part), four);
#pragma unroll
        for (int n = 0; n < 4; n++) to[part + n] = four[n];
    }
}

// 64 rows by 64 columns by a block; each thread has four of both.
template <typename T> __device__ inline void tiles(const T* a, const uint8* b, const Inputs& in, T* y, const Weights& p) {
    constexpr int LINES = 64, STEPS = 32;
    __shared__ __align__(16) float rows[STEPS][LINES + 4], columns[STEPS][LINES + 4];
    int row0 = blockIdx.y * LINES, column0 = blockIdx.x * LINES;
    int line = threadIdx.x % LINES, part = threadIdx.x / LINES * 8;
    float sums[4][4], of_row[8], of_column[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    }
    eight_of_row(a, p, row0 + line, part, of_row);
    eight_weights(b, in, p, column0 + line, part, of_column);
    for (int k0 = 0; k0 < p.depth; k0 += STEPS) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 8; n++) {
            rows[part + n][line] = of_row[n];
            columns[part + n][line] = of_column[n];
        }
        __syncthreads();
        if (k0 + STEPS < p.depth) {
            eight_of_row(a, p, row0 + line, k0 + STEPS + part, of_row);
            eight_weights(b, in, p, column0 + line, k0 + STEPS + part, of_column);
        }
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            Together<float> left = *(const Together<float>*)&rows[k][threadIdx.x / 16 * 4];
            Together<float> right = *(const Together<float>*)&columns[k][threadIdx.x % 16 * 4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] += left.of[i] * right.of[j];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = row0 + threadIdx.x / 16 * 4 + i, column = column0 + threadIdx.x % 16 * 4 + j;
            if (row < p.rows && column < p.columns) write_sum(y, p, in.bias, row, column, sums[i][j]);
        }
    }
}

#if __CUDA_ARCH__ >= 800
// d += a * b, of 16 rows by 16 steps and 16 steps by 8 columns.
template <typename T> __device__ inline void multiply(float (&d)[4], const uint (&a)[4], const uint (&b)[2]);
#define MULTIPLY(T, NAME)                                                                                      \
    template <> __device__ inline void multiply<T>(float (&d)[4], const uint (&a)[4], const uint (&b)[2]) {    \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, "          \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                           \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                      \
    }
MULTIPLY(__half, "f16")
MULTIPLY(__nv_bfloat16, "bf16")

template <typename T> struct alignas(16) Eight { T of[8]; };

// The same with tensor cores: weights are rounded to the type of the left side. 2 by 4 warps, each with half of the rows and a quarter of the
// columns.
template <typename T, int LINES>
__device__ inline void cores(const T* a, const uint8* b, const Inputs& in, T* y, const Weights& p) {
    // Words of two steps in a tile, and from a line to the next: those of eight lines are in different banks.
    constexpr int WORDS = 16, PITCH = WORDS + 4, STEPS = 2 * WORDS, UNITS = LINES / 64, DOWN = LINES / 32, ACROSS = LINES / 32;
    // Two tiles of either side, and then the sums of 64 rows.
    __shared__ __align__(16) uint memory[4][LINES * PITCH];
    static_assert(sizeof(memory) >= 64 * (LINES + 4) * sizeof(float), "sums of 64 rows fit");
    int row0 = blockIdx.y * LINES, column0 = blockIdx.x * LINES;
    float sums[DOWN][ACROSS][4];
#pragma unroll
    for (int m = 0; m < DOWN; m++) {
#pragma unroll
        for (int n = 0; n < ACROSS; n++) {
#pragma unroll
            for (int k = 0; k < 4; k++) sums[m][n][k] = 0.0f;
        }
    }
    // A line of the tile and eight steps of it, of both sides.
    Eight<T> of_rows[UNITS], of_columns[UNITS];
    auto read = [&](int k0) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int unit = threadIdx.x + 256 * u, line = unit / 4, k = k0 + unit % 4 * 8;
            const T* at = a + (int64)(row0 + line) * p.depth + k;
            float values[8];
            if (row0 + line < p.rows && k + 8 <= p.depth && is_multiple(at, 16)) {
                of_rows[u] = *(const Eight<T>*)at;
            } else {
                eight_of_row(a, p, row0 + line, k, values);
#pragma unroll
                for (int n = 0; n < 8; n++) of_rows[u].of[n] = from_float<T>(values[n]);
            }
            eight_weights(b, in, p, column0 + line, k, values);
#pragma unroll
            for (int n = 0; n < 8; n++) of_columns[u].of[n] = from_float<T>(values[n]);
        }
    };
    auto write = [&](int to) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int unit = threadIdx.x + 256 * u, place = unit / 4 * PITCH + unit % 4 * 4;
            *(Eight<T>*)&memory[to][place] = of_rows[u];
            *(Eight<T>*)&memory[2 + to][place] = of_columns[u];
        }
    };
    int lane = threadIdx.x % 32, own_row = threadIdx.x / 128 * (LINES / 2), own_column = threadIdx.x / 32 % 4 * (LINES / 4);
    read(0);
    write(0);
    __syncthreads();
    int now = 0;
    for (int k0 = 0; k0 < p.depth; k0 += STEPS, now ^= 1) {
        bool more = k0 + STEPS < p.depth;
        if (more) read(k0 + STEPS);
        const uint* left = memory[now] + (own_row + lane / 4) * PITCH + lane % 4;
        const uint* right = memory[2 + now] + (own_column + lane / 4) * PITCH + lane % 4;
#pragma unroll
        for (int step = 0; step < WORDS; step += 8) {
            uint of_right[ACROSS][2];
#pragma unroll
            for (int n = 0; n < ACROSS; n++) {
                of_right[n][0] = right[8 * n * PITCH + step];
                of_right[n][1] = right[8 * n * PITCH + step + 4];
            }
#pragma unroll
            for (int m = 0; m < DOWN; m++) {
                const uint* at = left + 16 * m * PITCH + step;
                uint of_left[4] = {at[0], at[8 * PITCH], at[4], at[8 * PITCH + 4]};
#pragma unroll
                for (int n = 0; n < ACROSS; n++) multiply<T>(sums[m][n], of_left, of_right[n]);
            }
        }
        if (more) write(now ^ 1);
        __syncthreads();
    }
    // Sums of 64 rows at a time, side by side.
    float* staged = reinterpret_cast<float*>(memory);
#pragma unroll 1
    for (int first = 0; first < LINES; first += 64) {
#pragma unroll
        for (int m = 0; m < DOWN; m++) {
#pragma unroll
            for (int n = 0; n < ACROSS; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    int row = own_row + 16 * m + 8 * (k >> 1) + lane / 4 - first;
                    int column = own_column + 8 * n + lane % 4 * 2 + (k & 1);
                    if ((uint)row < 64) staged[row * (LINES + 4) + column] = sums[m][n][k];
                }
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int at = threadIdx.x; at < 64 * LINES; at += 256) {
            int row = row0 + first + at / LINES, column = column0 + at % LINES;
            if (row >= p.rows || column >= p.columns) continue;
            write_sum(y, p, in.bias, row, column, staged[at / LINES * (LINES + 4) + at % LINES]);
        }
        __syncthreads();
    }
}
#endif

#define VECTORS(NAME, T, BITS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_vectors_##BITS##_1_##NAME(const T* a, const uint8* b, INPUTS, T* y, Weights p) {                 \
        vectors<T, BITS, 1>(a, b, ALL_INPUTS, y, p);                                                               \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_vectors_##BITS##_4_##NAME(const T* a, const uint8* b, INPUTS, T* y, Weights p) {                 \
        vectors<T, BITS, 4>(a, b, ALL_INPUTS, y, p);                                                               \
    }
#define PRODUCTS(NAME, T)                                                                                      \
    VECTORS(NAME, T, 2) VECTORS(NAME, T, 4) VECTORS(NAME, T, 8)                                                \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_tiles_##NAME(const T* a, const uint8* b, INPUTS, T* y, Weights p) {                              \
        tiles<T>(a, b, ALL_INPUTS, y, p);                                                                          \
    }
#define ON_CORES(NAME, T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_cores_small_##NAME(const T* a, const uint8* b, INPUTS, T* y, Weights p) {                        \
        cores<T, 64>(a, b, ALL_INPUTS, y, p);                                                                      \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        nbits_cores_large_##NAME(const T* a, const uint8* b, INPUTS, T* y, Weights p) {                        \
        cores<T, 128>(a, b, ALL_INPUTS, y, p);                                                                     \
    }

PRODUCTS(f32, float)
PRODUCTS(f16, __half)
PRODUCTS(bf16, __nv_bfloat16)
#if __CUDA_ARCH__ >= 800
ON_CORES(f16, __half)
ON_CORES(bf16, __nv_bfloat16)
#endif
