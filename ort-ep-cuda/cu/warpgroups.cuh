// Products of tiles by warpgroups (`wgmma`), which devices of compute capability 9.0 have and no others: of float16 and bfloat16, both sides in
// shared memory. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
#pragma once

#include "cores.cuh"
#include "gemm.cuh"

// Steps of a tile: 128 bytes, the longest that tensor cores read swizzled; bytes of eight lines of them, which are swizzled together, and of 64.
constexpr int STEPS = 64, OF_EIGHT = 1024, OF_STEPS = 8192;
// Results that a thread joins of their parts; warpgroups.rs has the same number.
constexpr int OF_JOIN = 4;

// Says where a side of a product lies in shared memory, swizzled by 128 bytes. `leading` is how far groups of 64 lines are apart where lines lie side
// by side, `stride` how far eight lines, or steps, are from the next eight.
__device__ inline uint64 descriptor(uint address, int leading, int stride) {
    return (uint64)((address & 0x3ffff) >> 4) | (uint64)(leading >> 4) << 16 | (uint64)(stride >> 4) << 32 | (uint64)1 << 62;
}

#define NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define NAMES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define NAMES_128 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define NAMES_256 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_256 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
    "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
    "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
    "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
    "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
    "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
// d += a * b: 64 rows, of which each warp has 16, and N columns, by 16 steps. The steps of b lie side by side, or its columns.
#define MULTIPLY_GROUP(type, name, columns, a_name, b_name, far_name)                                                      \
    template <bool FAR> __device__ inline void multiply_group(type, float (&d)[columns / 2], uint64 a, uint64 b) {         \
        asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n"                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name                                 \
                     " {" NAMES_##columns "}, " a_name ", " b_name ", adds, 1, 1, 0, " far_name ";\n}"                      \
                     : SUMS_##columns : "l"(a), "l"(b), "n"(FAR ? 1 : 0));                                                 \
    }
#define MULTIPLY_GROUPS(type, name)                                                                                        \
    MULTIPLY_GROUP(type, name, 32, "%16", "%17", "%18")                                                                    \
    MULTIPLY_GROUP(type, name, 64, "%32", "%33", "%34")                                                                    \
    MULTIPLY_GROUP(type, name, 128, "%64", "%65", "%66")                                                                   \
    MULTIPLY_GROUP(type, name, 256, "%128", "%129", "%130")
MULTIPLY_GROUPS(__half, "f16")
MULTIPLY_GROUPS(__nv_bfloat16, "bf16")
#undef MULTIPLY_GROUPS
#undef MULTIPLY_GROUP

// What was written to shared memory is there for products from here on. Of shared memory alone: a fence of all memory waits for the whole device.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
// Sums are ready to be added to.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
// Waits for all groups of products but the last ones.
template <int LAST> __device__ inline void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(LAST) : "memory"); }

// Begins to copy 16 bytes to an address of shared memory, or writes zeros.
__device__ inline void copy_later(uint to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Writes a half to one.
template <typename T> __device__ inline void write_half(uint to, T half) {
    asm volatile("st.shared.b16 [%0], %1;" : : "r"(to), "h"(*(const uint16*)&half) : "memory");
}

__device__ inline void write_eight_halves(uint to, const uint4& eight) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" : : "r"(to), "r"(eight.x), "r"(eight.y), "r"(eight.z), "r"(eight.w) : "memory");
}

// Where 16 bytes of a row of 128 lie: swizzled with the number of the row.
__device__ inline uint swizzled(uint tile, int row, int chunk) { return tile + row * 128 + ((chunk ^ row % 8) << 4); }

// How a side of a product is read: 16 bytes at a time where they lie at multiples of 16, else out of two such vectors if its matrix has
// both of them whole, else one element at a time.
enum Reads { VECTORS, SHIFTED, ELEMENTS };

// Eight halves that begin anywhere in two vectors.
__device__ inline uint4 shifted(const uint4& low, const uint4& high, uint halves) {
    uint words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (halves & 4) {
#pragma unroll
        for (int i = 0; i < 6; i++) words[i] = words[i + 2];
    }
    if (halves & 2) {
#pragma unroll
        for (int i = 0; i < 5; i++) words[i] = words[i + 1];
    }
    uint bits = halves % 2 * 16;
    return {__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits), __funnelshift_r(words[2], words[3], bits),
            __funnelshift_r(words[3], words[4], bits)};
}

// Reads a side of a tile that is not read in vectors from step k0 on, by LANES threads: LINES lines whose steps lie side by side (NEAR), else 64 steps of
// LINES lines, 64 lines to a row. What is shifted is of lines that lie side by side, and zeros need not be where a whole vector has no line.
template <typename T, int LINES, bool NEAR, int LANES>
__device__ inline void read_side(uint tile, const T* side, int line0, int lines, int line_step, int k0, int depth, int depth_step, Reads reads) {
    constexpr int CHUNKS = NEAR ? STEPS / 8 : LINES / 8, TURNS = LINES * 8 / LANES;
    auto each = [&](int turn, auto read) {
        int outer = (threadIdx.x + turn * LANES) / CHUNKS, inner = (threadIdx.x + turn * LANES) % CHUNKS;
        int line = line0 + (NEAR ? outer : inner * 8), k = k0 + (NEAR ? inner * 8 : outer);
        uint to = NEAR ? swizzled(tile, outer, inner) : swizzled(tile + inner / 8 * OF_STEPS, outer, inner % 8);
        bool there = line < lines && k < depth;
        read(to, side + (there ? (int64)line * line_step + (int64)k * depth_step : 0), !there ? 0 : NEAR ? depth - k : lines - line);
    };
    const T* end = side + ((int64)(depth - 1) * depth_step + lines);
    int step = NEAR ? depth_step : line_step;
    auto by_element = [&](uint to, const T* from, int count) {
#pragma unroll 1
        for (int i = 0; i < 8; i++) write_half(to + 2 * i, i < count ? from[(int64)i * step] : T(0.0f));
    };
    if (!NEAR && reads == SHIFTED) {
        // As many as there are registers for.
        constexpr int AT_ONCE = LINES > 128 ? 4 : 2;
#pragma unroll 1
        for (int first = 0; first < TURNS; first += AT_ONCE) {
            uint4 low[AT_ONCE], high[AT_ONCE];
            bool is_whole[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                each(first + i, [&](uint, const T* from, int count) {
                    const uint4* at = (const uint4*)((uint64)from & ~15ull);
                    is_whole[i] = count >= 8 && (const T*)at >= side && (const T*)(at + 2) <= end;
                    if (is_whole[i]) {
                        low[i] = at[0];
                        high[i] = at[1];
                    }
                });
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                each(first + i, [&](uint to, const T* from, int count) {
                    if (is_whole[i]) {
                        write_eight_halves(to, shifted(low[i], high[i], (uint64)from / 2 % 8));
                    } else {
                        by_element(to, from, count);
                    }
                });
            }
        }
        return;
    }
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) each(turn, by_element);
}

// A side of a product, read turn by turn. Vectors of a thread are equally far apart in memory and in a tile, and so are those of a turn and the next one:
// what a turn computes of addresses, it waits for.
template <typename T, int LINES, bool NEAR, int LANES> struct SideReader {
    static constexpr int CHUNKS = NEAR ? STEPS / 8 : LINES / 8, APART = LANES / CHUNKS, COPIES = LINES * 8 / LANES;
    static_assert(APART % 8 == 0, "vectors of a thread are swizzled alike");
    static_assert(NEAR || LINES % 64 == 0, "lines that lie side by side fill rows of 64");
    const T* side;
    int line0, lines, line_step, k0, depth, depth_step;
    Reads reads;
    // The thread's next vector, how far it is from the one after it and from that of the next turn, and how many lines and steps there are from it on.
    const T* from;
    int64 far, advance;
    int lines_left, steps_left;
    uint place;

    __device__ SideReader(const T* side, int line0, int lines, int line_step, int k0, int depth, int depth_step, Reads reads)
        : side(side), line0(line0), lines(lines), line_step(line_step), k0(k0), depth(depth), depth_step(depth_step), reads(reads) {
        int outer = threadIdx.x / CHUNKS, inner = threadIdx.x % CHUNKS;
        int line = line0 + (NEAR ? outer : inner * 8), k = k0 + (NEAR ? inner * 8 : outer);
        place = NEAR ? swizzled(0, outer, inner) : swizzled(inner / 8 * OF_STEPS, outer, inner % 8);
        from = side + (int64)line * line_step + (int64)k * depth_step;
        far = (int64)APART * (NEAR ? line_step : depth_step);
        advance = (int64)STEPS * depth_step;
        lines_left = lines - line;
        steps_left = depth - k;
    }

    // Begins to read the next turn.
    __device__ void read(uint tile) {
        if (reads == VECTORS) {
            int left = NEAR ? (steps_left > 0 ? lines_left : 0) : (lines_left > 0 ? steps_left : 0);
            const T* at = from;
#pragma unroll
            for (int i = 0; i < COPIES; i++, at += far) copy_later(tile + place + i * APART * 128, at, i * APART < left);
            from += advance;
            steps_left -= STEPS;
        } else {
            read_side<T, LINES, NEAR, LANES>(tile, side, line0, lines, line_step, k0, depth, depth_step, reads);
            k0 += STEPS;
        }
    }
};

// The turns of a part of the sums, of which there are as many as rows of blocks.
struct Turns { int first, count; };
__device__ inline Turns turns_of_part(int depth) {
    int turns = (depth + STEPS - 1) / STEPS;
    if (gridDim.y == 1) return {0, turns};
    int share = (turns + gridDim.y - 1) / gridDim.y, first = min((int)blockIdx.y * share, turns);
    return {first, min(share, turns - first)};
}

// A matrix and its steps, or a null pointer.
template <typename T> struct Matrix {
    T* first;
    int row, column;
    __device__ T* at(int r, int c) const { return first + ((int64)r * row + (int64)c * column); }
    __device__ bool is_in_vectors() const { return !first || (column == 1 && row % 8 == 0 && (uint64)first % 16 == 0); }
};

// What becomes of the sums of a tile whose first one is at row0 and column0: they are written as they are if they are a part, else with their addends.
template <typename T> struct Results {
    int row0, column0, rows, columns;
    Matrix<const T> c, d;
    Matrix<T> y;
    Matrix<float> part;

    __device__ bool is_in_vectors() const {
        if (columns % 8 != 0) return false;
        return part.first ? part.is_in_vectors() : c.is_in_vectors() && d.is_in_vectors() && y.is_in_vectors();
    }
};

// Sums with their factor and addends.
template <typename T, int COUNT>
__device__ inline void add_all(float (&sums)[COUNT], const T (&c)[COUNT], const T (&d)[COUNT], bool has_c, bool has_d, const Finish& finish) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (finish.alpha != 1.0f) sums[i] *= finish.alpha;
        if (has_c) sums[i] += finish.beta != 1.0f ? finish.beta * as_float(c[i]) : as_float(c[i]);
        if (has_d) sums[i] += as_float(d[i]);
    }
}

// A tile of ROWS by COLUMNS sums, of which a warpgroup has 64 rows. The steps of the left side lie side by side, those of the right one if NEAR.
template <typename T, int ROWS, int COLUMNS, int STAGES, bool NEAR> struct GroupTile {
    static constexpr int LANES = 2 * ROWS, STAGE = (ROWS + COLUMNS) * 128, PITCH = COLUMNS + 8;
    // Threads across eight neighbours each, rows of a warp at a time, rows of a thread, and those whose addends are read at once.
    static constexpr int ACROSS = COLUMNS / 8, DOWN = 32 / ACROSS, OWN = 16 / DOWN, AT_ONCE = OWN < 4 ? OWN : 4;
    static_assert(STAGES >= 3, "a tile is multiplied, one is done with, and one is on its way");
    static_assert(ROWS * PITCH * 4 <= STAGES * STAGE, "sums pass through the memory of tiles");
    float sums[COLUMNS / 2];

    // Adds the products of some turns: `read(left, right)` begins to read the tiles of the next one.
    template <typename Read> __device__ void multiply(uint tiles, int turns, const Read& read) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0.0f;
        uint into = tiles, from = tiles, end = tiles + STAGES * STAGE;
        int unread = turns;
        auto read_turn = [&] {
            if (unread > 0) read(into, into + ROWS * 128);
            unread--;
            into += STAGE;
            if (into == end) into = tiles;
            // An empty group, too, as groups are counted.
            commit_copies();
        };
#pragma unroll 1
        for (int i = 0; i < STAGES - 2; i++) read_turn();
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            wait_for_copies<STAGES - 3>();
            show_to_products();
            __syncthreads();
            // Into the tiles of two turns before, which all groups are done with.
            read_turn();
            uint left = from + threadIdx.x / 128 * OF_STEPS, right = from + ROWS * 128;
            begin_products();
#pragma unroll
            for (int k = 0; k < STEPS / 16; k++) {
                uint64 of_right = NEAR ? descriptor(right + 32 * k, 16, OF_EIGHT) : descriptor(right + 2 * OF_EIGHT * k, OF_STEPS, OF_EIGHT);
                multiply_group<!NEAR>(T(), sums, descriptor(left + 32 * k, 16, OF_EIGHT), of_right);
            }
            commit_products();
            from += STAGE;
            if (from == end) from = tiles;
            wait_for_products<1>();
        }
        wait_for_products<0>();
    }

    // Writes the tile. Sums pass through shared memory, where each warp has a place for its rows, so that threads have eight neighbours.
    __device__ void finish(unsigned char* memory, const Results<T>& results, const Finish& finish) {
        int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
        float* staged = (float*)memory + row0 * PITCH;
        bool in_vectors = results.is_in_vectors();
        uint4 c[AT_ONCE], d[AT_ONCE];
        if (in_vectors) read_addends(c, d, results, 0);
        // All are done with the tiles.
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i++) {
            float2 two = {sums[2 * i], sums[2 * i + 1]};
            *(float2*)&staged[(lane / 4 + i % 2 * 8) * PITCH + i / 2 * 8 + lane % 4 * 2] = two;
        }
        __syncwarp();
        if (!in_vectors) return finish_elements(staged, results, finish);
#pragma unroll 1
        for (int first = 0; first < OWN; first += AT_ONCE) {
            if (first > 0) read_addends(c, d, results, first);
            finish_rows(staged, c, d, results, finish, first);
        }
    }

private:
    // The row of the tile and the column of a thread's eight neighbours.
    static __device__ int own_row(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / ACROSS + i * DOWN; }
    static __device__ int own_column() { return threadIdx.x % ACROSS * 8; }

    // Addends of some rows of a thread, eight to a vector, which is taken apart only when they are added, as it needs twice the registers then. Beyond
    // the matrix they are those of its end, so that none waits for a branch.
    static __device__ void read_addends(uint4 (&c)[AT_ONCE], uint4 (&d)[AT_ONCE], const Results<T>& results, int first) {
        int column = min(results.column0 + own_column(), results.columns - 8);
        auto read = [&](const Matrix<const T>& of, uint4 (&to)[AT_ONCE]) {
            if (!of.first) return;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) to[i] = *(const uint4*)of.at(min(results.row0 + own_row(first + i), results.rows - 1), column);
        };
        read(results.c, c);
        read(results.d, d);
    }

    // Some rows of a thread, eight neighbours of each.
    static __device__ void finish_rows(const float* staged, const uint4 (&c)[AT_ONCE], const uint4 (&d)[AT_ONCE], const Results<T>& results,
                                       const Finish& finish, int first) {
        float rows[AT_ONCE][8];
        int column = results.column0 + own_column();
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float4* at = (const float4*)&staged[(own_row(first + i) % 16) * PITCH + own_column()];
            *(float4*)&rows[i][0] = at[0];
            *(float4*)&rows[i][4] = at[1];
        }
        if (results.part.first) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                int row = results.row0 + own_row(first + i);
                if (row >= results.rows || column >= results.columns) continue;
                float4* to = (float4*)results.part.at(row, column);
                to[0] = *(const float4*)&rows[i][0];
                to[1] = *(const float4*)&rows[i][4];
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            add_all(rows[i], ((const Pack<T, 8>*)&c[i])->of, ((const Pack<T, 8>*)&d[i])->of, results.c.first, results.d.first, finish);
        }
        // A loop, so that activations have their code once.
#pragma unroll 1
        for (int i = 0; i < AT_ONCE; i++, next_row(rows)) {
            activate_all(rows[0], finish);
            int row = results.row0 + own_row(first + i);
            if (row >= results.rows || column >= results.columns) continue;
            Pack<T, 8> pack;
#pragma unroll
            for (int j = 0; j < 8; j++) pack.of[j] = from_float<T>(rows[0][j]);
            *(Pack<T, 8>*)results.y.at(row, column) = pack;
        }
    }

    // A warp's rows element by element, which may begin anywhere and be any steps apart.
    static __device__ void finish_elements(const float* staged, const Results<T>& results, const Finish& finish) {
        constexpr int MANY = 4;
#pragma unroll 1
        for (int first = threadIdx.x % 32; first < 16 * COLUMNS; first += 32 * MANY) {
            float own[MANY];
            T c[MANY], d[MANY];
            int row[MANY], column[MANY];
            bool is_there[MANY];
#pragma unroll
            for (int i = 0; i < MANY; i++) {
                int of_warp = (first + 32 * i) / COLUMNS, of_row = (first + 32 * i) % COLUMNS;
                own[i] = staged[of_warp * PITCH + of_row];
                row[i] = results.row0 + threadIdx.x / 32 * 16 + of_warp;
                column[i] = results.column0 + of_row;
                is_there[i] = row[i] < results.rows && column[i] < results.columns;
                if (is_there[i] && results.c.first) c[i] = *results.c.at(row[i], column[i]);
                if (is_there[i] && results.d.first) d[i] = *results.d.at(row[i], column[i]);
            }
            if (!results.part.first) {
                add_all(own, c, d, results.c.first, results.d.first, finish);
                activate_all(own, finish);
            }
#pragma unroll
            for (int i = 0; i < MANY; i++) {
                if (!is_there[i]) continue;
                if (results.part.first) {
                    *results.part.at(row[i], column[i]) = own[i];
                } else {
                    *results.y.at(row[i], column[i]) = from_float<T>(own[i]);
                }
            }
        }
    }
};

// Where an element of a result and its addends are.
template <typename T> struct ElementPlace {
    const T* c;
    const T* d;
    T* y;
};

// Results of the parts of their sums, of which there are `count` each: of a thread several, as far apart as a block is wide, so that it waits once for all.
template <typename T, typename PlaceOf> __device__ inline void join_parts(const float* parts, int of_sum, uint count, const Finish& finish, const PlaceOf& place_of) {
    uint first = blockIdx.x * blockDim.x * OF_JOIN + threadIdx.x;
    ElementPlace<T> at[OF_JOIN];
    float own[OF_JOIN];
    T c[OF_JOIN], d[OF_JOIN];
    const float* from[OF_JOIN];
#pragma unroll
    for (int i = 0; i < OF_JOIN; i++) {
        uint index = min(first + i * blockDim.x, count - 1);
        at[i] = place_of(index);
        if (at[i].c) c[i] = *at[i].c;
        if (at[i].d) d[i] = *at[i].d;
        own[i] = 0.0f;
        from[i] = parts + index;
    }
#pragma unroll 2
    for (int part = 0; part < of_sum; part++) {
#pragma unroll
        for (int i = 0; i < OF_JOIN; i++) {
            own[i] += *from[i];
            from[i] += count;
        }
    }
    add_all(own, c, d, at[0].c, at[0].d, finish);
    activate_all(own, finish);
#pragma unroll
    for (int i = 0; i < OF_JOIN; i++) {
        if (first + i * blockDim.x < count) *at[i].y = from_float<T>(own[i]);
    }
}

// The memory of tiles, which begins at a multiple of 1024 as swizzling wants it: the host asks for that much more.
__device__ inline unsigned char* tile_memory() {
    extern __shared__ unsigned char memory[];
    return memory + (OF_EIGHT - shared_address(memory) % OF_EIGHT) % OF_EIGHT;
}
