// Pools: windows over up to three axes, where those in front that the image does not have are of size 1, and whole planes. With the channels
// first each channel is an image; with the channels last (PIXELS) those of a pixel are side by side.

#include "packs.cuh"

struct Windows {
    int input[3], output[3], kernel[3], strides[3], dilations[3], pads[3], pads_behind[3];
    int include_pad, column_major;
    // Those of a pixel.
    int channels;
};

// What a pool folds values into.
enum Fold { AVERAGE, MAXIMUM, ABSOLUTES, SQUARES, POWERS };

__device__ inline int volume(const int (&sizes)[3]) { return sizes[0] * sizes[1] * sizes[2]; }

// The window of a result: where it begins, its taps along each axis that meet the image, and the first element of its image and channel.
struct Window { int origin[3], first[3], end[3]; int64 image; };

__device__ inline Window window_of(const Windows& p, uint index, int channels) {
    Window window;
    uint channel = index % channels, plane = volume(p.output), place = index / channels;
    window.image = (int64)(place / plane) * volume(p.input) * channels + channel;
    place %= plane;
    window.origin[2] = place % p.output[2];
    place /= p.output[2];
    window.origin[1] = place % p.output[1];
    window.origin[0] = place / p.output[1];
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int origin = window.origin[axis] * p.strides[axis] - p.pads[axis], step = p.dilations[axis];
        window.origin[axis] = origin;
        window.first[axis] = origin < 0 ? (-origin + step - 1) / step : 0;
        int meets = p.input[axis] > origin ? (p.input[axis] - origin + step - 1) / step : 0;
        window.end[axis] = min(p.kernel[axis], meets);
    }
    return window;
}

// The taps that an average counts: those inside of the image, or also those in the padding.
__device__ inline int counted(const Windows& p, const Window& window) {
    int count = 1;
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int inside = max(window.end[axis] - window.first[axis], 0);
        int room = p.input[axis] + p.pads_behind[axis] - window.origin[axis];
        int padded = room > 0 ? min((room + p.dilations[axis] - 1) / p.dilations[axis], p.kernel[axis]) : 0;
        count *= p.include_pad ? padded : inside;
    }
    return count;
}

// The greater one; what is not a number is greatest.
__device__ inline float greater(float a, float b) { return b > a || b != b ? b : a; }

__device__ inline float fold(int kind, float sum, float value, float power) {
    switch (kind) {
    case MAXIMUM: return greater(sum, value);
    case AVERAGE: return sum + value;
    case ABSOLUTES: return sum + fabsf(value);
    case SQUARES: return sum + value * value;
    default: return sum + powf(fabsf(value), power);
    }
}

__device__ inline float folded(int kind, float sum, float count, float power) {
    switch (kind) {
    case AVERAGE: return sum / count;
    case SQUARES: return sqrtf(sum);
    case POWERS: return powf(sum, 1.0f / power);
    default: return sum;
    }
}

__device__ inline float beginning(int kind) { return kind == MAXIMUM ? -__int_as_float(0x7f800000) : 0.0f; }

template <typename T, int MANY> __device__ inline void write_pack(T* to, const Pack<T, MANY>& pack) {
    if ((uint64)to % alignof(Pack<T, MANY>) == 0) {
        *(Pack<T, MANY>*)to = pack;
        return;
    }
#pragma unroll
    for (int i = 0; i < MANY; i++) to[i] = pack.of[i];
}

// A thread computes MANY neighbouring results: as many channels of a pixel.
template <typename T, bool PIXELS, int MANY>
__device__ inline void pool(const T* x, T* y, const Windows& p, int kind, float power, uint count) {
    uint index = thread_index() * MANY;
    if (index >= count) return;
    int channels = PIXELS ? p.channels : 1;
    Window window = window_of(p, index, channels);
    const T* image = x + window.image;
    bool in_packs = MANY > 1 && (uint64)x % 16 == 0;
    float sums[MANY];
#pragma unroll
    for (int c = 0; c < MANY; c++) sums[c] = beginning(kind);
    for (int i = window.first[0]; i < window.end[0]; i++) {
        for (int j = window.first[1]; j < window.end[1]; j++) {
            int row = ((window.origin[0] + i * p.dilations[0]) * p.input[1] + window.origin[1] + j * p.dilations[1]) * p.input[2];
            for (int k = window.first[2]; k < window.end[2]; k++) {
                Pack<T, MANY> values;
                read_pack(image + (int64)(row + window.origin[2] + k * p.dilations[2]) * channels, MANY, in_packs, values);
#pragma unroll
                for (int c = 0; c < MANY; c++) sums[c] = fold(kind, sums[c], as_float(values.of[c]), power);
            }
        }
    }
    float taps = counted(p, window);
    Pack<T, MANY> results;
#pragma unroll
    for (int c = 0; c < MANY; c++) results.of[c] = from_float<T>(folded(kind, sums[c], taps, power));
    write_pack(y + index, results);
}

// Whether a value takes the place of the best one: the first of equal ones stays, and what is not a number is greatest.
__device__ inline bool replaces(int value, int best) { return value > best; }
__device__ inline bool replaces(float value, float best) { return value > best || (value != value && best == best); }
__device__ inline bool replaces(double value, double best) { return value > best || (value != value && best == best); }
__device__ inline int compared(int8 x) { return x; }
__device__ inline int compared(uint8 x) { return x; }
__device__ inline double compared(double x) { return x; }
__device__ inline float compared(float x) { return x; }
__device__ inline float compared(__half x) { return as_float(x); }
__device__ inline float compared(__nv_bfloat16 x) { return as_float(x); }

// `least` is what a window outside of the image has. y or indices may be null pointers; indices are of images of one channel, and of one result
// of a thread.
template <typename T, bool PIXELS, int MANY>
__device__ inline void max_pool(const T* x, T* y, int64* indices, const Windows& p, T least, uint count) {
    uint index = thread_index() * MANY;
    if (index >= count) return;
    int channels = PIXELS ? p.channels : 1;
    Window window = window_of(p, index, channels);
    const T* image = x + window.image;
    bool in_packs = MANY > 1 && (uint64)x % 16 == 0;
    Pack<T, MANY> best;
#pragma unroll
    for (int c = 0; c < MANY; c++) best.of[c] = least;
    int place = -1;
    for (int i = window.first[0]; i < window.end[0]; i++) {
        for (int j = window.first[1]; j < window.end[1]; j++) {
            int row = ((window.origin[0] + i * p.dilations[0]) * p.input[1] + window.origin[1] + j * p.dilations[1]) * p.input[2];
            for (int k = window.first[2]; k < window.end[2]; k++) {
                int at = row + window.origin[2] + k * p.dilations[2];
                Pack<T, MANY> values;
                read_pack(image + (int64)at * channels, MANY, in_packs, values);
                bool is_first = place < 0;
#pragma unroll
                for (int c = 0; c < MANY; c++) {
                    if (is_first || replaces(compared(values.of[c]), compared(best.of[c]))) {
                        best.of[c] = values.of[c];
                        place = at;
                    }
                }
            }
        }
    }
    if (y) write_pack(y + index, best);
    if (!indices) return;
    place = max(place, 0);
    if (p.column_major) {
        int row = place / p.input[2];
        place = (place % p.input[2] * p.input[1] + row % p.input[1]) * p.input[0] + row / p.input[1];
    }
    indices[index] = window.image + place;
}

// The greater ones of the elements of two packs; what is not a number is greatest. Halves are compared two at a time where the device does that.
template <typename T, int MANY> __device__ inline void take_greater(Pack<T, MANY>& best, const Pack<T, MANY>& values) {
#pragma unroll
    for (int c = 0; c < MANY; c++) {
        if (replaces(compared(values.of[c]), compared(best.of[c]))) best.of[c] = values.of[c];
    }
}
#if __CUDA_ARCH__ >= 800
#define TAKE_GREATER(type, pair)                                                                               \
    template <> __device__ inline void take_greater<type, 8>(Pack<type, 8>& best, const Pack<type, 8>& values) { \
        _Pragma("unroll") for (int c = 0; c < 8; c += 2) {                                                     \
            pair& to = *(pair*)&best.of[c];                                                                    \
            to = __hmax2_nan(to, *(const pair*)&values.of[c]);                                                 \
        }                                                                                                      \
    }
TAKE_GREATER(__half, __half2)
TAKE_GREATER(__nv_bfloat16, __nv_bfloat162)
#undef TAKE_GREATER
#endif

// Maxima of windows of KERNEL by KERNEL taps that lie STRIDE apart: a thread computes two neighbouring results of MANY channels, all of whose
// values it asks for before it looks at one. Where packs do not begin at their multiples, elements are looked at one by one. Blocks along x are rows
// of results.
template <typename T, int MANY, int KERNEL, int STRIDE>
__device__ inline void max_pool_pair(const T* x, T* y, const Windows& p, T least) {
    constexpr int COLUMNS = KERNEL + STRIDE;
    uint packs = p.channels / MANY, index = blockIdx.y * blockDim.x + threadIdx.x, pair = index / packs;
    int column = 2 * pair, row = blockIdx.x % p.output[1];
    if (column >= p.output[2]) return;
    int of_pixel = p.channels, channel = (index - pair * packs) * MANY;
    int top = row * STRIDE - p.pads[1], left = column * STRIDE - p.pads[2];
    const T* image = x + (int64)(blockIdx.x / p.output[1]) * p.input[1] * p.input[2] * of_pixel + channel;
    T* to = y + ((int64)blockIdx.x * p.output[2] + column) * of_pixel + channel;
    if ((uint64)x % 16 || (uint64)y % 16) {
#pragma unroll 1
        for (int i = 0; i < min(p.output[2] - column, 2) * MANY; i++) {
            int own = i / MANY, first = left + own * STRIDE;
            T best = least;
#pragma unroll 1
            for (int tap = 0; tap < KERNEL * KERNEL; tap++) {
                int down = top + tap / KERNEL, across = first + tap % KERNEL;
                if ((uint)down >= (uint)p.input[1] || (uint)across >= (uint)p.input[2]) continue;
                T value = image[(down * p.input[2] + across) * of_pixel + i % MANY];
                if (replaces(compared(value), compared(best))) best = value;
            }
            to[own * of_pixel + i % MANY] = best;
        }
        return;
    }
    Pack<T, MANY> values[KERNEL][COLUMNS];
#pragma unroll
    for (int i = 0; i < KERNEL; i++) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
#pragma unroll
            for (int c = 0; c < MANY; c++) values[i][j].of[c] = least;
            bool there = (uint)(top + i) < (uint)p.input[1] && (uint)(left + j) < (uint)p.input[2];
            if (there) values[i][j] = *(const Pack<T, MANY>*)(image + ((top + i) * p.input[2] + left + j) * of_pixel);
        }
    }
#pragma unroll
    for (int own = 0; own < 2; own++) {
        if (column + own >= p.output[2]) break;
        Pack<T, MANY> best = values[0][own * STRIDE];
#pragma unroll
        for (int tap = 1; tap < KERNEL * KERNEL; tap++) take_greater(best, values[tap / KERNEL][own * STRIDE + tap % KERNEL]);
        *(Pack<T, MANY>*)(to + own * of_pixel) = best;
    }
}

// A small plane by each warp.
template <typename T> __device__ inline void pool_small(const T* x, T* y, int kind, float power, uint plane, uint count) {
    uint index = thread_index() / 32;
    if (index >= count) return;
    const T* from = x + (int64)index * plane;
    float sum = beginning(kind);
#pragma unroll 4
    for (uint i = threadIdx.x % 32; i < plane; i += 32) sum = fold(kind, sum, as_float(from[i]), power);
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, sum, step);
        sum = kind == MAXIMUM ? greater(sum, other) : sum + other;
    }
    if (threadIdx.x % 32 == 0) y[index] = from_float<T>(folded(kind, sum, plane, power));
}

// A whole plane by a block.
template <typename T> __device__ inline void pool_plane(const T* x, T* y, int kind, float power, uint plane) {
    __shared__ float parts[8];
    const T* from = x + (int64)blockIdx.x * plane;
    float sum = beginning(kind);
    for (uint i = threadIdx.x; i < plane; i += blockDim.x) sum = fold(kind, sum, as_float(from[i]), power);
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, sum, step);
        sum = kind == MAXIMUM ? greater(sum, other) : sum + other;
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < blockDim.x / 32; warp++) {
        sum = kind == MAXIMUM ? greater(sum, parts[warp]) : sum + parts[warp];
    }
    y[blockIdx.x] = from_float<T>(folded(kind, sum, plane, power));
}

// Packs are 16 bytes of the channels of a pixel, of which there are averages and maxima.
#define MAXIMUM_ENTRY(name, type, pixels, many, least)                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        name(const type* x, type* y, int64* indices, Windows p, uint count) {                                  \
        max_pool<type, pixels, many>(x, y, pixels ? nullptr : indices, p, least, count);                       \
    }
#define MAXIMA(suffix, type, least)                                                                            \
    MAXIMUM_ENTRY(max_pool_##suffix, type, false, 1, least)                                                    \
    MAXIMUM_ENTRY(max_pool_pixels_##suffix, type, true, 1, least)                                              \
    MAXIMUM_ENTRY(max_pool_packs_##suffix, type, true, 16 / sizeof(type), least)
#define POOL_ENTRY(name, type, pixels, many, fold_kind)                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        name(const type* x, type* y, Windows p, int kind, float power, uint count) {                           \
        pool<type, pixels, many>(x, y, p, fold_kind, power, count);                                            \
    }
#define PAIR_ENTRY(name, type, kernel)                                                                         \
    extern "C" __global__ void __launch_bounds__(128) name(const type* x, type* y, Windows p) {                \
        max_pool_pair<type, 16 / sizeof(type), kernel, 2>(x, y, p, from_float<type>(beginning(MAXIMUM)));      \
    }
#define POOLS(suffix, type)                                                                                    \
    POOL_ENTRY(pool_##suffix, type, false, 1, kind)                                                            \
    POOL_ENTRY(pool_pixels_##suffix, type, true, 1, kind)                                                      \
    POOL_ENTRY(pool_packs_##suffix, type, true, 16 / sizeof(type), AVERAGE)                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        pool_plane_##suffix(const type* x, type* y, int kind, float power, uint plane) {                       \
        pool_plane(x, y, kind, power, plane);                                                                  \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        pool_small_##suffix(const type* x, type* y, int kind, float power, uint plane, uint count) {           \
        pool_small(x, y, kind, power, plane, count);                                                           \
    }                                                                                                          \
    MAXIMA(suffix, type, from_float<type>(beginning(MAXIMUM)))                                                 \
    PAIR_ENTRY(max_pool_pair_2_##suffix, type, 2)                                                              \
    PAIR_ENTRY(max_pool_pair_3_##suffix, type, 3)

POOLS(f32, float)
POOLS(f16, __half)
POOLS(bf16, __nv_bfloat16)
MAXIMA(i8, int8, -128)
MAXIMA(u8, uint8, 0)
