// Large products of float16 and bfloat16 by warpgroups, whose tiles are copied by tensor maps: a thread asks for copies, two warpgroups multiply,
// and a block computes tile after tile. PTX ISA, "Tensor copy" and "mbarrier".
#pragma once

#include "gemm_tiles.cuh"
#include "warpgroups.cuh"

// What the driver encodes of a tensor: its address, sizes and steps, and the box of it that a copy reads.
struct alignas(64) TensorMap { uint64 words[16]; };

// Rows of a tile, the stages that a block has memory for, tiles of rows that are computed after each other, and what a warp passes results through.
constexpr int MAP_ROWS = 128, MAP_STAGES = 4, MAP_BAND = 16, STAGED = 4096;
// The warpgroup that copies, and the warps that multiply.
constexpr int COPIERS = 128, MULTIPLIERS = 8;
// Columns of a tile that a warp writes at a time; elements of a line of its memory, too.
constexpr int OF_BOX = 64;

#define NAMES_192 \
    NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_192 \
    SUMS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
    "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
// d = a * b, to which d is added if `adds`: as `multiply_group`, without a pass over the sums that makes them zero.
#define START_OR_ADD(type, name, columns, a_name, b_name, adds_name, far_name)                                             \
    template <bool FAR> __device__ inline void start_or_add(type, float (&d)[columns / 2], uint64 a, uint64 b, bool adds) { \
        asm volatile("{\n.reg .pred adds;\nsetp.ne.u32 adds, " adds_name ", 0;\n"                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name                                 \
                     " {" NAMES_##columns "}, " a_name ", " b_name ", adds, 1, 1, 0, " far_name ";\n}"                      \
                     : SUMS_##columns : "l"(a), "l"(b), "r"((uint)adds), "n"(FAR ? 1 : 0));                                \
    }
#define START_OR_ADD_ALL(type, name)                                                                                       \
    START_OR_ADD(type, name, 192, "%96", "%97", "%98", "%99")                                                              \
    START_OR_ADD(type, name, 256, "%128", "%129", "%130", "%131")
START_OR_ADD_ALL(__half, "f16")
START_OR_ADD_ALL(__nv_bfloat16, "bf16")
#undef START_OR_ADD_ALL
#undef START_OR_ADD

// A barrier in shared memory opens its phase when `count` have arrived and all bytes that they expect.
__device__ inline void init_barrier(uint barrier, uint count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(count) : "memory");
}
__device__ inline void arrive(uint barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory"); }
__device__ inline void arrive_and_expect(uint barrier, uint bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of that parity is over.
__device__ inline void wait_for_phase(uint barrier, uint parity) {
    uint is_over = 0;
    while (!is_over) {
        asm volatile("{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
                     : "=r"(is_over) : "r"(barrier), "r"(parity) : "memory");
    }
}
// Begins to copy a box of a map, whose bytes arrive at a barrier; zeros where the tensor ends.
__device__ inline void copy_box(uint to, const TensorMap& map, uint barrier, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 : : "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

// The tiles of all matrices in the order of their computation: a block has every so-many-th of them.
struct PlaceOfTile { int batch, row0, column0; };
template <int COLUMNS> __device__ inline PlaceOfTile place_of_tile(const Product& p, uint index) {
    uint of_matrix = p.tiles_down * p.tiles_across, within = index % of_matrix;
    uint band = within / (MAP_BAND * p.tiles_across), in_band = within % (MAP_BAND * p.tiles_across);
    uint high = min(MAP_BAND, p.tiles_down - (int)band * MAP_BAND);
    return {(int)(index / of_matrix), (int)(band * MAP_BAND + in_band % high) * MAP_ROWS, (int)(in_band / high) * COLUMNS};
}

// Stages of tiles in shared memory, and for each the barriers that say that it is full and that it is empty.
template <int COLUMNS> struct Stages {
    static constexpr int BYTES = (MAP_ROWS + COLUMNS) * 128;
    uint tiles, full, empty, stage = 0, phase = 0;

    __device__ Stages(uint tiles) : tiles(tiles) {
        full = tiles + MAP_STAGES * BYTES + MULTIPLIERS * STAGED;
        empty = full + MAP_STAGES * 8;
    }
    __device__ uint staged(int warp) const { return tiles + MAP_STAGES * BYTES + warp * STAGED; }
    __device__ uint left() const { return tiles + stage * BYTES; }
    __device__ uint right() const { return left() + MAP_ROWS * 128; }
    __device__ uint is_full() const { return full + stage * 8; }
    __device__ uint is_empty() const { return empty + stage * 8; }
    __device__ void init() const {
        for (int i = 0; i < MAP_STAGES; i++) {
            init_barrier(full + i * 8, 1);
            init_barrier(empty + i * 8, MULTIPLIERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
        show_to_products();
    }
    __device__ void next() {
        if (++stage == MAP_STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Asks for the tiles of both sides, stage by stage. The columns of a right side whose columns lie side by side come 64 at a time.
template <int COLUMNS, bool NEAR>
__device__ inline void copy_tiles(const TensorMap& a_map, const TensorMap& b_map, Stages<COLUMNS> at, const Product& p, uint count) {
    for (uint index = blockIdx.x; index < count; index += gridDim.x) {
        PlaceOfTile tile = place_of_tile<COLUMNS>(p, index);
        for (int k = 0; k < p.depth; k += STEPS, at.next()) {
            wait_for_phase(at.is_empty(), at.phase ^ 1);
            arrive_and_expect(at.is_full(), Stages<COLUMNS>::BYTES);
            copy_box(at.left(), a_map, at.is_full(), k, tile.row0, tile.batch);
            if (NEAR) {
                copy_box(at.right(), b_map, at.is_full(), k, tile.column0, tile.batch);
            } else {
#pragma unroll
                for (int i = 0; i < COLUMNS / 64; i++) copy_box(at.right() + i * OF_STEPS, b_map, at.is_full(), tile.column0 + i * 64, k, tile.batch);
            }
        }
    }
}

// Two halves as they lie in a register.
__device__ inline uint two_halves(__half x, __half y) { return *(const uint16*)&x | (uint)*(const uint16*)&y << 16; }
__device__ inline uint two_halves(__nv_bfloat16 x, __nv_bfloat16 y) { return *(const uint16*)&x | (uint)*(const uint16*)&y << 16; }
template <typename T> __device__ inline float low_half(uint two) {
    uint16 bits = two;
    return as_float(*(const T*)&bits);
}
template <typename T> __device__ inline float high_half(uint two) { return low_half<T>(two >> 16); }

// What an addend adds to the sums of a thread.
template <typename T> struct AddendOfTile {
    const T* from;
    int row_step, column_step;
    bool in_pairs;

    __device__ AddendOfTile(const T* addend, int64 begin, int row_step, int column_step) : row_step(row_step), column_step(column_step) {
        from = addend ? addend + begin : nullptr;
        in_pairs = column_step == 1 && row_step % 2 == 0 && (uint64)from % 4 == 0;
    }
    // The pairs of a thread in some columns of 16 rows, zeros beyond the matrix.
    template <int PAIRS> __device__ void read(uint (&pairs)[PAIRS], int row, int column, const Product& p) const {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int own_row = row + i % 2 * 8, own_column = column + i / 2 * 8;
            const T* at = from + ((int64)own_row * row_step + (int64)own_column * column_step);
            pairs[i] = 0;
            if (own_row >= p.rows || own_column >= p.columns) continue;
            pairs[i] = in_pairs ? *(const uint*)at : two_halves(at[0], at[column_step]);
        }
    }
};

// Addends of a thread's sums in as many columns as there are registers for twice.
template <typename T> struct AddendsOfColumns {
    static constexpr int COLUMNS = 32, PAIRS = COLUMNS / 4;
    uint c[PAIRS], d[PAIRS];
    __device__ void read(const AddendOfTile<T>& of_c, const AddendOfTile<T>& of_d, int row, int column, const Product& p) {
        if (of_c.from) of_c.read(c, row, column, p);
        if (of_d.from) of_d.read(d, row, column, p);
    }
    __device__ void add(float* sums, bool has_c, bool has_d, const Finish& finish) const {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            float x = sums[2 * i] * finish.alpha, y = sums[2 * i + 1] * finish.alpha;
            if (has_c) {
                x = fmaf(finish.beta, low_half<T>(c[i]), x);
                y = fmaf(finish.beta, high_half<T>(c[i]), y);
            }
            sums[2 * i] = has_d ? x + low_half<T>(d[i]) : x;
            sums[2 * i + 1] = has_d ? y + high_half<T>(d[i]) : y;
        }
    }
};

template <int COUNT> __device__ inline void activate_these(float (&these)[COUNT], const Finish& finish) {
#define OF_ALL(activation) \
    case activation: { \
        _Pragma("unroll") for (int i = 0; i < COUNT; i++) these[i] = activate(these[i], activation, finish.first, finish.second); \
        break; \
    }
    switch (finish.activation) {
        OF_ALL(CLIP) OF_ALL(LEAKY_RELU) OF_ALL(THRESHOLDED_RELU) OF_ALL(HARD_SIGMOID) OF_ALL(HARD_SWISH) OF_ALL(SOFTSIGN) OF_ALL(CELU) OF_ALL(ELU)
        OF_ALL(FAST_GELU) OF_ALL(GELU) OF_ALL(MISH) OF_ALL(SELU) OF_ALL(SIGMOID) OF_ALL(SOFTPLUS) OF_ALL(SWISH) OF_ALL(TANH)
    }
#undef OF_ALL
}

// Applies an activation to all sums, which is chosen once for some of them, so that these do not wait for each other. As its code must be there once,
// they take turns in the same registers.
template <int COUNT> __device__ inline void activate_tile(float (&sums)[COUNT], const Finish& finish) {
    constexpr int AT_ONCE = 16;
    if (finish.activation == NONE) return;
    if (finish.activation == RELU) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) sums[i] = activate_cheap(sums[i], RELU, 0.0f, 0.0f);
        return;
    }
#pragma unroll 1
    for (int turn = 0; turn < COUNT; turn += AT_ONCE) {
        float these[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) these[i] = sums[i];
        activate_these(these, finish);
#pragma unroll
        for (int i = AT_ONCE; i < COUNT; i++) sums[i - AT_ONCE] = sums[i];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) sums[COUNT - AT_ONCE + i] = these[i];
    }
}

// Writes the 16 rows of a warp. They pass through its own memory, 64 columns at a time, so that threads have eight neighbours.
template <typename T, int COUNT> __device__ inline void write_rows(const float (&sums)[COUNT], T* y, uint staged, int row0, int column0, const Product& p) {
    int lane = threadIdx.x % 32, row = lane / 4;
    // What the last tile left there was read.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT / 32; i++) {
        // Two places in turn: of the one the other threads have read before they passed the last `__syncwarp`.
        uint box = staged + i % 2 * (STAGED / 2);
#pragma unroll
        for (int j = 0; j < 16; j++) {
            uint two = two_halves(from_float<T>(sums[32 * i + 2 * j]), from_float<T>(sums[32 * i + 2 * j + 1]));
            asm volatile("st.shared.b32 [%0], %1;" : : "r"(swizzled(box + j % 2 * OF_EIGHT, row, j / 2) + lane % 4 * 4), "r"(two) : "memory");
        }
        __syncwarp();
        int column = column0 + i * OF_BOX + lane % 8 * 8;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int own = j * 4 + lane / 8;
            uint4 eight;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                         : "r"(swizzled(box, own, lane % 8)) : "memory");
            if (row0 + own < p.rows && column < p.columns) *(uint4*)(y + (int64)(row0 + own) * p.y_row + column) = eight;
        }
    }
}

// Multiplies the tiles of both sides as they come, 64 rows by each warpgroup, and finishes the sums.
template <typename T, int COLUMNS, bool NEAR>
__device__ inline void multiply_tiles(const T* c, const T* d, T* y, Stages<COLUMNS> at, const Product& p, const Finish& finish, uint count) {
    float sums[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0.0f;
    int warp = threadIdx.x / 32 - COPIERS / 32, lane = threadIdx.x % 32;
    for (uint index = blockIdx.x; index < count; index += gridDim.x) {
        PlaceOfTile tile = place_of_tile<COLUMNS>(p, index);
        uint last = 0;
        for (int k0 = 0; k0 < p.depth; k0 += STEPS) {
            uint left = at.left() + warp / 4 * OF_STEPS, right = at.right();
            wait_for_phase(at.is_full(), at.phase);
            begin_products();
#pragma unroll
            for (int k = 0; k < STEPS / 16; k++) {
                uint64 of_right = NEAR ? descriptor(right + 32 * k, 16, OF_EIGHT) : descriptor(right + 2 * OF_EIGHT * k, OF_STEPS, OF_EIGHT);
                start_or_add<!NEAR>(T(), sums, descriptor(left + 32 * k, 16, OF_EIGHT), of_right, k > 0 || k0 > 0);
            }
            commit_products();
            // Of the stage before all is multiplied.
            wait_for_products<1>();
            if (k0 > 0 && lane == 0) arrive(last);
            last = at.is_empty();
            at.next();
        }
        Places places = places_of(p, tile.batch);
        AddendOfTile<T> of_c(c, places.c, p.c_row, p.c_column), of_d(d, places.d, p.d_row, p.d_column);
        int row0 = tile.row0 + warp * 16, row = row0 + lane / 4, column = tile.column0 + lane % 4 * 2;
        typedef AddendsOfColumns<T> Addends;
        Addends addends;
        addends.read(of_c, of_d, row, column, p);
        wait_for_products<0>();
        if (lane == 0) arrive(last);
        if (c || d || finish.alpha != 1.0f) {
#pragma unroll
            for (int i = 0; i < COLUMNS; i += Addends::COLUMNS) {
                // The next ones are read meanwhile.
                Addends next;
                if (i + Addends::COLUMNS < COLUMNS) next.read(of_c, of_d, row, column + i + Addends::COLUMNS, p);
                addends.add(&sums[i / 2], c, d, finish);
                addends = next;
            }
        }
        activate_tile(sums, finish);
        write_rows(sums, y + places.y, at.staged(warp), row0, tile.column0, p);
    }
}

template <typename T, int COLUMNS, bool NEAR>
__device__ inline void map_product(const TensorMap& a_map, const TensorMap& b_map, const T* c, const T* d, T* y, const Product& p, const Finish& finish,
                                   uint count) {
    Stages<COLUMNS> at(shared_address(tile_memory()));
    if (threadIdx.x == 0) at.init();
    __syncthreads();
    // Registers of the threads that copy go to those that multiply.
    if (threadIdx.x < COPIERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) copy_tiles<COLUMNS, NEAR>(a_map, b_map, at, p, count);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        multiply_tiles<T, COLUMNS, NEAR>(c, d, y, at, p, finish, count);
    }
}

#define MAP_PRODUCT(name, type, ...)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(COPIERS + 32 * MULTIPLIERS, 1)                                                             \
        name(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const type* c, const type* d, type* y,       \
             const __grid_constant__ Product p, const __grid_constant__ Finish finish, uint count) {                                        \
        map_product<type, __VA_ARGS__>(a_map, b_map, c, d, y, p, finish, count);                                                            \
    }
#define MAP_PRODUCTS(suffix, type)                              \
    MAP_PRODUCT(gemm_maps_256_nn_##suffix, type, 256, false)    \
    MAP_PRODUCT(gemm_maps_256_nt_##suffix, type, 256, true)     \
    MAP_PRODUCT(gemm_maps_192_nn_##suffix, type, 192, false)    \
    MAP_PRODUCT(gemm_maps_192_nt_##suffix, type, 192, true)
