// Numbers to integers and back, functions of codes, and rows of quantized tables.
#include "lines.cuh"
#include "quantize.cuh"

struct Integers {
    static __device__ int nearest(float quotient, float zero, int kind) { return nearest_code(rintf(quotient) + zero, kind); }
    static __device__ float number(uint code, int kind) { return (float)with_sign(code, kind); }
    static __device__ float number_at(const void* from, int kind, uint i) { return (float)code_at(from, kind, i); }
};

// Whole numbers are divided in double precision, which holds them, but where the division has a type of its own.
__device__ inline void quantize_ints(const int* x, const void* scales, const void* zeros, uint8* y, const Scales& p,
                                     int kind, int precision, bool exact, uint count) {
    uint first = 4 * thread_index();
    if (first >= count) return;
    uint used = min(4u, count - first);
    ScaleWalk<Integers> walk(p, scales, zeros, first);
    int codes[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        codes[n] = 0;
        if (opaque(n >= used)) continue;
        walk.next();
        float rounded = opaque(exact) ? (float)rint((double)x[first + n] / (double)walk.scale)
                              : rintf(narrow(narrow((float)x[first + n], precision) / walk.scale, precision));
        codes[n] = nearest_code(rounded + walk.zero, kind);
    }
    write_codes(y, kind, first, used, codes);
}

QUANTIZE(, f32, float, Integers)
QUANTIZE(, f16, __half, Integers)
QUANTIZE(, bf16, __nv_bfloat16, Integers)

extern "C" __global__ void __launch_bounds__(256)
    quantize_i32(const int* x, const void* scales, const void* zeros, uint8* y, Scales p, int kind, int precision,
                 uint exact, uint count) {
    quantize_ints(x, scales, zeros, y, p, kind, precision, exact, count);
}

// The least and the greatest of what a block reads, zero among them.
extern "C" __global__ void __launch_bounds__(256) dynamic_range(const float* x, float* ranges, uint count) {
    float least = 0.0f, most = 0.0f;
    for (uint first = 4 * thread_index(); first < count; first += 4 * gridDim.x * BLOCK) {
        float values[4];
        read_four(x + first, min(4u, count - first), values);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            least = lesser(least, values[n]);
            most = greater(most, values[n]);
        }
    }
    least = joined<256>(least, [](float a, float b) { return lesser(a, b); });
    most = joined<256>(most, [](float a, float b) { return greater(a, b); });
    if (threadIdx.x == 0) {
        ranges[2 * blockIdx.x] = least;
        ranges[2 * blockIdx.x + 1] = most;
    }
}

// Fours of elements that a thread makes codes of.
constexpr uint FOURS = 4;

// Codes over the range that up to 256 blocks found. Where something is not a number, the range is empty on its side.
extern "C" __global__ void __launch_bounds__(256)
    dynamic_codes(const float* x, const float* ranges, uint8* y, float* to_scale, uint8* to_zero, uint parts, uint count) {
    bool has_part = threadIdx.x < parts;
    float least = has_part ? ranges[2 * threadIdx.x] : 0.0f, most = has_part ? ranges[2 * threadIdx.x + 1] : 0.0f;
    least = joined<256>(least, [](float a, float b) { return lesser(a, b); });
    most = joined<256>(most, [](float a, float b) { return greater(a, b); });
    least = least != least ? 0.0f : least;
    most = most != most ? 0.0f : most;
    float scale = (most - least) / 255.0f;
    float divisor = scale == 0.0f ? 1.0f : scale;
    float zero = rintf(fminf(fmaxf(-least / divisor, 0.0f), 255.0f));
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (to_scale) *to_scale = scale;
        if (to_zero) *to_zero = (uint8)zero;
    }
    if (!y) return;
    for (uint n = 0; n < FOURS; n++) {
        uint first = 4 * ((blockIdx.x * FOURS + n) * BLOCK + threadIdx.x);
        if (first >= count) return;
        uint used = min(4u, count - first);
        float values[4];
        int codes[4];
        read_four(x + first, used, values);
#pragma unroll
        for (int k = 0; k < 4; k++) codes[k] = nearest_code(rintf(values[k] / divisor) + zero, 8);
        write_codes(y, 8, first, used, codes);
    }
}

// Where the elements of two tensors are that broadcast to a third.
struct Pairs {
    int rank;
    Axes sizes, a, b;
};

// The zero point of a tensor of bytes, a single one, where it is not left out.
__device__ inline float zero_of(const void* zero, int kind) { return zero ? (float)code_at(zero, kind, 0) : 0.0f; }

// Sums and products of codes. The sum with the zero point is rounded, not the number before it is added.
extern "C" __global__ void __launch_bounds__(256)
    qlinear_binary(const uint8* a, const float* a_scale, const void* a_zero, const uint8* b, const float* b_scale,
                   const void* b_zero, const float* c_scale, const void* c_zero, uint8* c, Pairs p, int kind,
                   uint multiplies, uint count) {
    uint first = 4 * thread_index();
    if (first >= count) return;
    uint used = min(4u, count - first);
    float a_z = zero_of(a_zero, kind), b_z = zero_of(b_zero, kind), c_z = zero_of(c_zero, kind);
    float a_s = *a_scale / *c_scale, b_s = *b_scale / *c_scale;
    float factor = __fmul_rn(*a_scale, *b_scale) / *c_scale;
    float fixed = __fsub_rn(c_z, __fmaf_rn(a_s, a_z, __fmul_rn(b_s, b_z)));
    int codes[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        codes[n] = 0;
        if (opaque(n >= used)) continue;
        float left = code_at(a, kind, walk(p.rank, p.sizes, p.a, first + n));
        float right = code_at(b, kind, walk(p.rank, p.sizes, p.b, first + n));
        float sum = __fmaf_rn(left, a_s, __fmaf_rn(right, b_s, fixed));
        float product = __fmul_rn(__fmul_rn(left - a_z, right - b_z), factor);
        codes[n] = nearest_code(rintf(multiplies ? __fadd_rn(product, c_z) : sum), kind);
    }
    write_codes(c, kind, first, used, codes);
}

enum Function { SAME, SIGMOID, LEAKY_RELU };

// Each code through a table of a function of what codes stand for. `part` codes after the other go to their place in a line of the result.
extern "C" __global__ void __launch_bounds__(256)
    qlinear_map(const uint8* x, const float* x_scale, const void* x_zero, const float* y_scale, const void* y_zero,
                uint8* y, int kind, int function, float alpha, uint part, uint line, uint start, uint count) {
    __shared__ uint8 table[256];
    float x_z = zero_of(x_zero, kind), y_z = zero_of(y_zero, kind);
    float v = ((float)with_sign(threadIdx.x, kind) - x_z) * *x_scale;
    if (function == SIGMOID) v = 1.0f / (1.0f + expf(-v));
    if (function == LEAKY_RELU) v = v < 0.0f ? alpha * v : v;
    bool keeps = function == SAME && *x_scale == *y_scale && x_z == y_z;
    table[threadIdx.x] = keeps ? threadIdx.x : nearest_code(rintf(v / *y_scale) + y_z, kind);
    __syncthreads();
    for (uint n = 0; n < FOURS; n++) {
        uint first = 4 * ((blockIdx.x * FOURS + n) * BLOCK + threadIdx.x);
        if (first >= count) return;
        uint used = min(4u, count - first);
        uint at = first, inside = 0;
        if (part != line) {
            inside = first % part;
            at = first / part * line + start + inside;
        }
        bool whole = used == 4 && (part == line || inside + 4 <= part) && is_multiple(x + first, 4) && is_multiple(y + at, 4);
        if (whole) {
            uint all = *(const uint*)(x + first);
            *(uint*)(y + at) = table[all & 255] | table[all >> 8 & 255] << 8 | table[all >> 16 & 255] << 16 | (uint)table[all >> 24] << 24;
            continue;
        }
        for (uint k = 0; k < used; k++) {
            uint i = first + k;
            y[part == line ? i : i / part * line + start + i % part] = table[x[i]];
        }
    }
}

// A table whose rows are gathered along one axis and quantized in blocks along another.
struct Table {
    int kind;
    uint wide, picks, inner, size;
    uint behind, axis, block, blocks;
    // How many zero points begin with a byte of their own; 0 where they follow each other.
    uint zero_row;
    float middle;
};

template <typename T>
__device__ inline void gather_blocks(const void* codes, const void* indices, const T* scales, const void* zeros, T* y,
                                     const Table& p, uint count) {
    uint i = thread_index();
    if (i >= count) return;
    uint rest = i / p.inner, pick = rest % p.picks;
    int64 index = p.wide ? static_cast<const int64*>(indices)[pick] : static_cast<const int*>(indices)[pick];
    if (index < 0) index += p.size;
    // An index that is outside gives zeros.
    if (index < 0 || index >= p.size) {
        y[i] = from_float<T>(0.0f);
        return;
    }
    uint e = (rest / p.picks * p.size + (uint)index) * p.inner + i % p.inner;
    uint s = (e / (p.behind * p.axis) * p.blocks + e / p.behind % p.axis / p.block) * p.behind + e % p.behind;
    float zero = p.middle;
    if (zeros) {
        uint at = s;
        if (p.zero_row > 0) {
            // The places of a row begin with a byte.
            uint per_byte = 8 / bits_of(p.kind);
            at = s / p.zero_row * ((p.zero_row + per_byte - 1) / per_byte * per_byte) + s % p.zero_row;
        }
        zero = code_at(zeros, p.kind, at);
    }
    y[i] = from_float<T>(((float)code_at(codes, p.kind, e) - zero) * as_float(scales[s]));
}

#define GATHER_BLOCKS(NAME, T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        gather_blocks_##NAME(const void* codes, const void* indices, const T* scales, const void* zeros, T* y, \
                             Table p, uint count) {                                                            \
        gather_blocks(codes, indices, scales, zeros, y, p, count);                                             \
    }

GATHER_BLOCKS(f32, float)
GATHER_BLOCKS(f16, __half)
GATHER_BLOCKS(bf16, __nv_bfloat16)
