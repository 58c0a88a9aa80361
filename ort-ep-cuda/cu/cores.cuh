// Tensor cores, from compute capability 8.0 on, and what brings tiles to them.
#pragma once

#include "common.cuh"

#if __CUDA_ARCH__ >= 800
__device__ inline uint shared_address(const void* at) { return (uint)__cvta_generic_to_shared(at); }

// Four matrices of eight rows of 16 bytes: the row at `at` of each lane, and the elements that an operand of the lane takes. Only halves
// can be transposed.
template <bool TRANSPOSED> __device__ inline void load_matrices(uint (&to)[4], const void* at) {
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(at)) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(at)) : "memory");
    }
}

// sums += a * b, of 16 rows and 8 columns and 32 bytes of steps. The first parameter says of what; floats are taken as TF32.
#define MULTIPLY(type, sum, letter, shape, name, sum_name)                                                     \
    __device__ inline void multiply(type, sum (&sums)[4], const uint (&a)[4], uint b0, uint b1) {              \
        asm volatile("mma.sync.aligned." shape ".row.col." sum_name "." name "." name "." sum_name             \
                     " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                        \
                     : letter(sums[0]), letter(sums[1]), letter(sums[2]), letter(sums[3])                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                          \
    }
MULTIPLY(__half, float, "+f", "m16n8k16", "f16", "f32")
MULTIPLY(__nv_bfloat16, float, "+f", "m16n8k16", "bf16", "f32")
MULTIPLY(float, float, "+f", "m16n8k8", "tf32", "f32")
MULTIPLY(int8, int, "+r", "m16n8k32", "s8", "s32")
#undef MULTIPLY

// Rounds floats to TF32; what is a half is as it must be.
template <typename T> __device__ inline void round_for_cores(uint (&x)[4]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(x[i]) : "f"(__uint_as_float(x[i])));
    }
}

// Begins to copy 16 bytes, or writes zeros where there is nothing.
__device__ inline void copy_later(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 : : "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Ends a group of copies, which may be empty.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
// Waits for all groups but the last ones.
template <int LAST> __device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(LAST) : "memory"); }

// Neighbours that are written at once, and elements of 16 bytes.
template <typename T> struct alignas(2 * sizeof(T)) Two { T of[2]; };
template <typename T> struct alignas(16) Vector { T of[16 / sizeof(T)]; };

// A side of a product in shared memory: BLOCK lines of 64 bytes of steps where these lie next to each other, else the other way round. The
// pitch has rows that are read at once in different banks.
template <typename T, int BLOCK, bool NEAR> struct CoreTile {
    // Elements of a vector, steps that are multiplied at once, and those of a tile.
    static constexpr int VECTOR = 16 / sizeof(T), AT_ONCE = 2 * VECTOR, STEPS = 4 * VECTOR;
    static constexpr int INNER = NEAR ? STEPS : BLOCK, OUTER = NEAR ? BLOCK : STEPS;
    static constexpr int PITCH = INNER + (NEAR ? VECTOR : 8);
    T of[OUTER][PITCH];

    // Begins to read the steps from k0 on, a vector at a time.
    template <int LANES>
    __device__ void read(const T* side, int line0, int lines, int line_step, int k0, int depth, int depth_step, bool vectors) {
        constexpr int CHUNKS = INNER / VECTOR;
#pragma unroll
        for (int turn = 0; turn < OUTER * CHUNKS / LANES; turn++) {
            int chunk = threadIdx.x + turn * LANES;
            int outer = chunk / CHUNKS, inner = chunk % CHUNKS * VECTOR;
            int line = line0 + (NEAR ? outer : inner), k = k0 + (NEAR ? inner : outer);
            bool there = line < lines && k < depth;
            const T* from = side + (there ? (int64)line * line_step + (int64)k * depth_step : 0);
            if (vectors) {
                copy_later(&of[outer][inner], from, there);
                continue;
            }
            int count = there ? (NEAR ? depth - k : lines - line) : 0;
            int step = NEAR ? depth_step : line_step;
            Vector<T> vector;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) vector.of[i] = i < count ? from[(int64)i * step] : T(0.0f);
            *(Vector<T>*)&of[outer][inner] = vector;
        }
    }

    // What a lane has of sixteen lines, as the left side of a product.
    __device__ void left(uint (&to)[4], int line, int k) const {
        int lane = threadIdx.x % 32;
        if constexpr (NEAR) {
            load_matrices<false>(to, &of[line + lane % 16][k + lane / 16 * VECTOR]);
        } else if constexpr (sizeof(T) == 2) {
            load_matrices<true>(to, &of[k + lane / 16 * 8 + lane % 8][line + lane / 8 % 2 * 8]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = __float_as_uint(of[k + lane % 4 + i / 2 * 4][line + lane / 4 + i % 2 * 8]);
        }
        round_for_cores<T>(to);
    }

    // What a lane has of sixteen lines, as the right sides of two products of eight columns.
    __device__ void right(uint (&to)[4], int line, int k) const {
        int lane = threadIdx.x % 32;
        if constexpr (NEAR) {
            load_matrices<false>(to, &of[line + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * VECTOR]);
        } else if constexpr (sizeof(T) == 2) {
            load_matrices<true>(to, &of[k + lane % 16][line + lane / 16 * 8]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = __float_as_uint(of[k + lane % 4 + i % 2 * 4][line + lane / 4 + i / 2 * 8]);
        }
        round_for_cores<T>(to);
    }
};

// Adds the products of two tiles to a warp's sums: DOWN times 16 rows from `row` on, ACROSS times 8 columns from `column` on.
template <typename T, int DOWN, int ACROSS, typename Left, typename Right>
__device__ inline void multiply_tiles(float (&sums)[DOWN * ACROSS][4], const Left& a, const Right& b, int row, int column) {
#pragma unroll
    for (int k = 0; k < Left::STEPS; k += Left::AT_ONCE) {
        uint left[DOWN][4];
#pragma unroll
        for (int i = 0; i < DOWN; i++) a.left(left[i], row + 16 * i, k);
#pragma unroll
        for (int j = 0; j < ACROSS; j += 2) {
            uint right[4];
            b.right(right, column + 8 * j, k);
#pragma unroll
            for (int i = 0; i < DOWN; i++) {
                multiply(T(), sums[i * ACROSS + j], left[i], right[0], right[1]);
                multiply(T(), sums[i * ACROSS + j + 1], left[i], right[2], right[3]);
            }
        }
    }
}
#endif
