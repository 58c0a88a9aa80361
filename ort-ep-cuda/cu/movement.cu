// Elements that are moved as they are, by their size: entries end in b and the bytes of what a thread moves, which are several elements
// where they stay neighbours.
#include "units.cuh"

constexpr uint TILE = 32;
constexpr uint TILE_ROWS = 8;

// Where two tensors are at the step i of a walk.
struct Places {
    int x;
    int y;
};

__device__ inline Places places_at(uint i, uint axes, const Axes& sizes, const Axes& x_steps, const Axes& y_steps) {
    Places at = {0, 0};
#pragma unroll
    for (int axis = MOST_AXES - 1; axis > 0; axis--) {
        if (axis < axes) {
            uint size = sizes.of[axis];
            uint rest = i / size;
            int k = i - rest * size;
            at.x += k * x_steps.of[axis];
            at.y += k * y_steps.of[axis];
            i = rest;
        }
    }
    // Steps of a walk without axes are zero.
    at.x += static_cast<int>(i) * x_steps.of[0];
    at.y += static_cast<int>(i) * y_steps.of[0];
    return at;
}

// Bytes in order: units of 16, then the rest one by one.
extern "C" __global__ void copy_bytes(const uint8* x, uint8* y, uint units, uint rest, uint64 x_start, uint64 y_start) {
    uint i = thread_index();
    if (i < units) {
        move_unit<uint4>(x + x_start + 16ull * i, y + y_start + 16ull * i);
    } else if (i - units < rest) {
        uint64 at = 15ull * units + i;
        y[y_start + at] = x[x_start + at];
    }
}

template <typename T>
__device__ inline void copy_strided(const T* x, T* y, uint count, uint axes, const Axes& sizes, const Axes& x_steps,
                                    uint x_start, const Axes& y_steps, uint y_start) {
    uint i = thread_index();
    if (i >= count) return;
    Places at = places_at(i, axes, sizes, x_steps, y_steps);
    move_unit<T>(x + (x_start + at.x), y + (y_start + at.y));
}

#define COPY(suffix, T)                                                                                             \
    extern "C" __global__ void copy_strided_##suffix(const T* x, T* y, uint count, uint axes, Axes sizes,           \
                                                     Axes x_steps, uint x_start, Axes y_steps, uint y_start) {     \
        copy_strided<T>(x, y, count, axes, sizes, x_steps, x_start, y_steps, y_start);                              \
    }

constexpr int MOST_PARTS = 8;

// Where parts begin in a line of the whole, and where the last one ends. Parts that are not there begin there, too.
struct Starts { uint of[MOST_PARTS + 1]; };

// The lines of a tensor are those of its parts, one after the other: joined from them, or split into them. A part may be left out.
template <typename T, bool JOINS>
__device__ inline void move_parts(T* whole, T* const (&parts)[MOST_PARTS], uint count, uint line, const Starts& starts) {
    uint i = thread_index();
    if (i >= count) return;
    uint across = starts.of[MOST_PARTS] - starts.of[0];
    uint row = i / across, column = starts.of[0] + i % across;
    T* part = parts[0];
    uint begin = starts.of[0], end = starts.of[1];
#pragma unroll
    for (int k = 1; k < MOST_PARTS; k++) {
        if (column >= starts.of[k]) {
            part = parts[k];
            begin = starts.of[k];
            end = starts.of[k + 1];
        }
    }
    if (part == nullptr) return;
    T* in_whole = whole + ((uint64)row * line + column);
    T* in_part = part + ((uint64)row * (end - begin) + (column - begin));
    move_unit<T>(JOINS ? in_part : in_whole, JOINS ? in_whole : in_part);
}

#define MOVE_PARTS(name, T, joins)                                                                                  \
    extern "C" __global__ void name(T* whole, T* a, T* b, T* c, T* d, T* e, T* f, T* g, T* h, uint count,           \
                                    uint line, Starts starts) {                                                     \
        T* const parts[MOST_PARTS] = {a, b, c, d, e, f, g, h};                                                      \
        move_parts<T, joins>(whole, parts, count, line, starts);                                                    \
    }
#define PARTS(suffix, T)                                                                                            \
    MOVE_PARTS(join_parts_##suffix, T, true)                                                                        \
    MOVE_PARTS(split_parts_##suffix, T, false)

// Squares go through shared memory, so that neighbours read and write neighbours: along rows in x, along columns in y.
template <typename T>
__device__ inline void transpose(const T* __restrict__ x, T* __restrict__ y, uint rows, uint columns, int x_column,
                                 int y_row, uint axes, const Axes& sizes, const Axes& x_steps, uint x_start,
                                 const Axes& y_steps, uint y_start) {
    // One more than a square has, so that the elements of a row are in different banks.
    __shared__ T tile[TILE][TILE + 1];
    uint across = (columns + TILE - 1) / TILE;
    uint down = (rows + TILE - 1) / TILE;
    uint column = blockIdx.x % across * TILE;
    uint rest = blockIdx.x / across;
    uint row = rest % down * TILE;
    Places at = places_at(rest / down, axes, sizes, x_steps, y_steps);
    uint lane = threadIdx.x;
    const T* from = x + (x_start + at.x + row + lane);
    for (uint k = threadIdx.y; k < TILE; k += TILE_ROWS) {
        if (row + lane < rows && column + k < columns) {
            tile[k][lane] = from[static_cast<int64>(column + k) * x_column];
        }
    }
    __syncthreads();
    T* to = y + (y_start + at.y + column + lane);
    for (uint k = threadIdx.y; k < TILE; k += TILE_ROWS) {
        if (row + k < rows && column + lane < columns) {
            to[static_cast<int64>(row + k) * y_row] = tile[lane][k];
        }
    }
}

#define TRANSPOSE(suffix, T)                                                                                        \
    extern "C" __global__ void transpose_##suffix(const T* x, T* y, uint rows, uint columns, int x_column,          \
                                                  int y_row, uint axes, Axes sizes, Axes x_steps, uint x_start,     \
                                                  Axes y_steps, uint y_start) {                                     \
        transpose<T>(x, y, rows, columns, x_column, y_row, axes, sizes, x_steps, x_start, y_steps, y_start);        \
    }

// What stands outside of a tensor.
constexpr uint CONSTANT = 0;
constexpr uint REFLECT = 1;
constexpr uint EDGE = 2;
constexpr uint WRAP = 3;

// One element again and again over a unit; zeros without one.
template <typename T> __device__ inline void put_padding(const uint8* padding, uint padding_bytes, T* y) {
    T value = {};
    if (padding != nullptr) {
#pragma unroll
        for (uint k = 0; k < sizeof(T); k++) reinterpret_cast<uint8*>(&value)[k] = padding[k % padding_bytes];
    }
    move_unit<T>(&value, y);
}

template <typename T>
__device__ inline void pad(const T* x, T* y, const uint8* padding, uint padding_bytes, uint mode, uint count,
                           uint axes, const Axes& totals, const Axes& befores, const Axes& lengths, const Axes& steps,
                           uint x_start) {
    uint i = thread_index();
    if (i >= count) return;
    uint rest = i;
    uint at = x_start;
    bool outside = false;
#pragma unroll
    for (int axis = MOST_AXES - 1; axis >= 0; axis--) {
        if (axis < axes) {
            uint total = totals.of[axis];
            uint above = axis == 0 ? 0 : rest / total;
            int k = static_cast<int>(rest - above * total) - befores.of[axis];
            int length = lengths.of[axis];
            rest = above;
            if (k < 0 || k >= length) {
                if (mode == CONSTANT) {
                    outside = true;
                } else if (mode == EDGE) {
                    k = k < 0 ? 0 : length - 1;
                } else if (mode == WRAP) {
                    k %= length;
                    if (k < 0) k += length;
                } else if (mode == REFLECT) {
                    int last = max(length - 1, 1);
                    k %= 2 * last;
                    if (k < 0) k += 2 * last;
                    k = min(min(k, 2 * last - k), length - 1);
                }
            }
            at += k * steps.of[axis];
        }
    }
    if (outside) {
        put_padding<T>(padding, padding_bytes, y + i);
    } else {
        move_unit<T>(x + at, y + i);
    }
}

#define PAD(suffix, T)                                                                                              \
    extern "C" __global__ void pad_##suffix(const T* x, T* y, const uint8* padding, uint padding_bytes, uint mode,  \
                                            uint count, uint axes, Axes totals, Axes befores, Axes lengths,         \
                                            Axes steps, uint x_start) {                                             \
        pad<T>(x, y, padding, padding_bytes, mode, count, axes, totals, befores, lengths, steps, x_start);          \
    }

// The same bits everywhere.
#define FILL(suffix, T)                                                                                             \
    extern "C" __global__ void fill_##suffix(T* y, uint count, uint64 bits) {                                       \
        uint i = thread_index();                                                                                    \
        if (i < count) y[i] = static_cast<T>(bits);                                                                 \
    }

// These bits along a diagonal, zeros beside it.
#define EYE(suffix, T)                                                                                              \
    extern "C" __global__ void eye_##suffix(T* y, uint count, uint width, int diagonal, uint64 one) {               \
        uint i = thread_index();                                                                                    \
        if (i >= count) return;                                                                                     \
        int away = static_cast<int>(i % width) - static_cast<int>(i / width);                                       \
        y[i] = static_cast<T>(away == diagonal ? one : 0);                                                          \
    }

// The elements on one side of a diagonal, zeros on the other; x may be y.
#define TRILU(suffix, T)                                                                                            \
    extern "C" __global__ void trilu_##suffix(const T* x, T* y, uint count, uint height, uint width, int diagonal,  \
                                              uint upper) {                                                         \
        uint i = thread_index();                                                                                    \
        if (i >= count) return;                                                                                     \
        int away = static_cast<int>(i % width) - static_cast<int>(i / width % height);                              \
        bool kept = upper != 0 ? away >= diagonal : away <= diagonal;                                               \
        y[i] = kept ? x[i] : T(0);                                                                                  \
    }

// Each sequence of a batch backwards as far as it is used. Lines of a run, of which `second` follow each other.
template <typename T>
__device__ inline void reverse_sequence(const T* x, T* y, const int64* lengths, uint count, uint second, uint time,
                                        uint run, uint time_first) {
    uint i = thread_index();
    if (i >= count) return;
    uint line = i / run;
    uint row = line / second;
    uint column = line - row * second;
    uint sequence = time_first != 0 ? column : row;
    uint step = time_first != 0 ? row : column;
    int64 length = lengths[sequence];
    uint used = length < 0 ? 0 : length > time ? time : static_cast<uint>(length);
    uint from = step < used ? used - 1 - step : step;
    uint place = time_first != 0 ? from * second + column : row * second + from;
    move_unit<T>(x + (place * run + (i - line * run)), y + i);
}

#define REVERSE(suffix, T)                                                                                          \
    extern "C" __global__ void reverse_sequence_##suffix(const T* x, T* y, const int64* lengths, uint count,        \
                                                         uint second, uint time, uint run, uint time_first) {      \
        reverse_sequence<T>(x, y, lengths, count, second, time, run, time_first);                                   \
    }

// Numbers from a start on; floats are computed in double and rounded once.
#define RANGE(suffix, T, Wide, value)                                                                               \
    extern "C" __global__ void range_##suffix(T* y, uint count, Wide start, Wide delta) {                           \
        uint i = thread_index();                                                                                    \
        Wide sum = start + static_cast<Wide>(i) * delta;                                                            \
        if (i < count) y[i] = value;                                                                                \
    }

#define ELEMENTS(suffix, T)                                                                                         \
    TRANSPOSE(suffix, T)                                                                                            \
    FILL(suffix, T)                                                                                                 \
    EYE(suffix, T)                                                                                                  \
    TRILU(suffix, T)
#define UNITS(suffix, T)                                                                                            \
    COPY(suffix, T)                                                                                                 \
    PARTS(suffix, T)                                                                                                \
    PAD(suffix, T)                                                                                                  \
    REVERSE(suffix, T)

ELEMENTS(b1, uint8)
ELEMENTS(b2, uint16)
ELEMENTS(b4, uint)
ELEMENTS(b8, uint64)
UNITS(b1, uint8)
UNITS(b2, uint16)
UNITS(b4, uint)
UNITS(b8, uint64)
UNITS(b16, uint4)

RANGE(f32, float, double, static_cast<float>(sum))
RANGE(f16, __half, double, __double2half(sum))
RANGE(bf16, __nv_bfloat16, double, __double2bfloat16(sum))
RANGE(f64, double, double, sum)
RANGE(i16, short, int64, static_cast<short>(sum))
RANGE(i32, int, int64, static_cast<int>(sum))
RANGE(i64, int64, int64, sum)
