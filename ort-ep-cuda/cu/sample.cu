// Images read, or written, where numbers say: GridSample and AffineGrid, regions of interest, MaxUnpool, Col2Im, and the moved windows of
// DeformConv. Images have up to three axes; those in front that are missing are of size 1.
#include "common.cuh"

enum Mode { NEAREST, LINEAR, CUBIC };
enum Padding { ZEROS, BORDER, REFLECTION };

// `planes` and `points` are those of an image; a thread takes one point of `each` planes, of which the image has `groups`.
struct Grid {
    int sizes[3];
    int rank, mode, padding, corners, kind;
    int planes, points, each, groups;
};

// A number of the grid, which may be of another type than the image.
__device__ inline float position_of(const void* grid, int kind, uint at) {
    switch (kind) {
    case 0: return static_cast<const float*>(grid)[at];
    case 1: return as_float(static_cast<const __half*>(grid)[at]);
    default: return as_float(static_cast<const __nv_bfloat16*>(grid)[at]);
    }
}

// A coordinate reflected at the borders until it is between them.
__device__ inline float reflected(const Grid& p, float x, float size) {
    float low = p.corners ? 0.0f : -0.5f, range = size - 1.0f - 2.0f * low;
    if (range <= 0.0f) return low;
    float distance = fmodf(fabsf(x - low), 2.0f * range);
    return low + (distance > range ? 2.0f * range - distance : distance);
}

// The coordinate that a number of the grid means.
__device__ inline float coordinate(const Grid& p, float v, float size) {
    float x = p.corners ? (v + 1.0f) * 0.5f * (size - 1.0f) : (__fmul_rn(v + 1.0f, size) - 1.0f) * 0.5f;
    if (p.mode == NEAREST) x = rintf(x);
    float low = p.corners ? 0.0f : -0.5f;
    // Cubic interpolation pads what it reads, not where it reads, as PyTorch and ONNX Runtime do.
    if (p.mode == CUBIC || (x >= low && x <= size - 1.0f - low)) return x;
    if (p.padding == BORDER) return fminf(fmaxf(x, 0.0f), size - 1.0f);
    return p.padding == REFLECTION ? reflected(p, x, size) : x;
}

// The pixel at a whole coordinate; -1 for none.
__device__ inline int pixel(const Grid& p, float index, int size) {
    float last = size - 1;
    if (index >= 0.0f && index <= last) return int(index);
    if (p.padding == ZEROS) return -1;
    if (p.padding == REFLECTION) index = reflected(p, index, size);
    return int(fminf(fmaxf(index, 0.0f), last));
}

// What a thread reads and writes: where the numbers of its point begin, and its planes.
struct Point {
    uint numbers, pixels, plane, end, to;
};

__device__ inline bool find_point(const Grid& p, uint count, Point& own) {
    uint index = thread_index();
    if (index >= count) return false;
    uint group = index / p.points, point = index - group * p.points;
    uint image = group / p.groups;
    own.numbers = (image * p.points + point) * p.rank;
    own.pixels = p.sizes[0] * p.sizes[1] * p.sizes[2];
    uint first = (group - image * p.groups) * p.each;
    own.plane = image * p.planes + first;
    own.end = image * p.planes + min(first + p.each, uint(p.planes));
    own.to = point;
    return true;
}

// Positions list the innermost axis first. Axes that the image does not have are read at 0.
__device__ inline float coordinate_of(const void* grid, const Grid& p, const Point& own, int axis) {
    if (axis < 3 - p.rank) return 0.0f;
    return coordinate(p, position_of(grid, p.kind, own.numbers + 2 - axis), p.sizes[axis]);
}

template <typename T>
__device__ inline void grid_nearest(const T* x, const void* grid, T* y, const Grid& p, uint count) {
    Point own;
    if (!find_point(p, count, own)) return;
    int place = 0;
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int at = pixel(p, truncf(coordinate_of(grid, p, own, axis)), p.sizes[axis]);
        place = at < 0 || place < 0 ? -1 : place * p.sizes[axis] + at;
    }
#pragma unroll 4
    for (uint plane = own.plane; plane < own.end; plane++) {
        T value = T();
        if (place >= 0) value = x[plane * own.pixels + place];
        y[plane * p.points + own.to] = value;
    }
}

// Cubic convolution with a = -0.75 (R. Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981).
__device__ inline float cubic(float d) {
    return d <= 1.0f ? (1.25f * d - 2.25f) * d * d + 1.0f : ((-0.75f * d + 3.75f) * d - 6.0f) * d + 3.0f;
}

// A pixel near a coordinate, -1 where there is none, and what it weighs. Of an axis that the image does not have there is one.
struct Tap {
    int at;
    float weight;
};

__device__ inline Tap tap_of(const Grid& p, float x, int axis, int number) {
    if (axis < 3 - p.rank) return Tap{number == 0 ? 0 : -1, 1.0f};
    float below = floorf(x), share = x - below, offset = p.mode == CUBIC ? number - 1 : number;
    float weight = p.mode == CUBIC ? cubic(fabsf(share - offset)) : number == 0 ? 1.0f - share : share;
    return Tap{pixel(p, below + offset, p.sizes[axis]), weight};
}

// Planes that a thread sums at once.
constexpr int ABREAST = 4;

template <typename T>
__device__ inline void grid_sums(const T* x, const void* grid, T* y, const Grid& p, uint count) {
    Point own;
    if (!find_point(p, count, own)) return;
    int many = p.mode == CUBIC ? 4 : 2;
    float z = coordinate_of(grid, p, own, 0), v = coordinate_of(grid, p, own, 1), u = coordinate_of(grid, p, own, 2);
    Tap taps[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        taps[k] = k < many ? tap_of(p, u, 2, k) : Tap{-1, 0.0f};
    }
    for (uint plane = own.plane; plane < own.end; plane += ABREAST) {
        float sums[ABREAST] = {};
        const T* from = x + plane * own.pixels;
        // Only the taps along rows are kept in registers: all of three axes would be too many.
#pragma unroll 1
        for (int i = 0; i < (p.rank > 2 ? many : 1); i++) {
            Tap slice = tap_of(p, z, 0, i);
            if (slice.at < 0) continue;
#pragma unroll 1
            for (int j = 0; j < (p.rank > 1 ? many : 1); j++) {
                Tap row = tap_of(p, v, 1, j);
                if (row.at < 0) continue;
                int begin = (slice.at * p.sizes[1] + row.at) * p.sizes[2];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    if (taps[k].at < 0) continue;
                    float weight = slice.weight * row.weight * taps[k].weight;
#pragma unroll
                    for (int q = 0; q < ABREAST; q++) {
                        if (plane + q < own.end) sums[q] += weight * as_float(from[q * own.pixels + begin + taps[k].at]);
                    }
                }
            }
        }
#pragma unroll
        for (int q = 0; q < ABREAST; q++) {
            if (plane + q < own.end) y[(plane + q) * p.points + own.to] = from_float<T>(sums[q]);
        }
    }
}

// The positions of an image's pixels after an affine map: a thread for each number. `sizes` are those of the axes from the innermost on.
struct Pixels {
    int sizes[3];
    int rank, pixels, corners;
};

template <typename T> __device__ inline void affine_grid(const T* theta, T* y, const Pixels& p, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    uint place = index / p.rank, image = place / p.pixels, rest = place - image * p.pixels;
    const T* row = theta + (image * p.rank + (index - place * p.rank)) * (p.rank + 1);
    float sum = as_float(row[p.rank]);
    for (int k = 0; k < p.rank; k++) {
        uint size = p.sizes[k];
        float at = rest % size, n = size;
        float v = !p.corners ? (2.0f * at + 1.0f) / n - 1.0f : n < 2.0f ? -1.0f : 2.0f * at / (n - 1.0f) - 1.0f;
        sum += as_float(row[k]) * v;
        rest /= size;
    }
    y[index] = from_float<T>(sum);
}

struct Regions {
    int images, channels, size[2], pooled[2], samples;
    // Whether regions begin at the middle of pixels, and whether the greatest is taken.
    int half_pixel, greatest;
    float scale;
};

// The most samples along one axis of a bin that has as many as it is wide, as on the CPU. Only those on the map are visited.
constexpr int MOST_SAMPLES = 1 << 20;

// The samples of a bin along an axis: those from `first` to `end` may be inside of the map.
struct Samples {
    float start, bin;
    int count, first, end;
    __device__ float at(int index) const { return start + (index + 0.5f) * bin / count; }
};

__device__ inline Samples samples_of(const Regions& p, float low, float high, int axis, int cell) {
    float shift = p.half_pixel ? 0.5f : 0.0f, begin = low * p.scale - shift, extent = high * p.scale - shift - begin;
    Samples s;
    s.bin = (p.half_pixel ? extent : fmaxf(extent, 1.0f)) / p.pooled[axis];
    s.start = begin + cell * s.bin;
    s.count = p.samples;
    if (s.count == 0) s.count = int(fminf(fmaxf(ceilf(s.bin), 0.0f), MOST_SAMPLES));
    s.first = 0;
    s.end = s.count;
    if (s.bin > 0.0f) {
        float rate = s.count / s.bin, most = s.count;
        s.first = int(fminf(fmaxf(floorf((-1.0f - s.start) * rate) - 1.0f, 0.0f), most));
        s.end = int(fminf(fmaxf(ceilf((p.size[axis] - s.start) * rate) + 2.0f, 0.0f), most));
    }
    return s;
}

// Two neighbours and the weight of the second.
struct Between {
    int low, high;
    float share;
};

__device__ inline Between between(float place, int size) {
    float at = fmaxf(place, 0.0f);
    Between b;
    b.low = min(int(at), size - 1);
    b.high = min(b.low + 1, size - 1);
    b.share = b.high == b.low ? 0.0f : at - b.low;
    return b;
}

template <typename T>
__device__ inline void roi_align(const T* x, const T* rois, const int64* images, T* y, const Regions& p, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    uint row = index / p.pooled[1], plane = row / p.pooled[0], region = plane / p.channels;
    uint area = p.size[0] * p.size[1];
    int64 image = images[region];
    image = image < 0 ? 0 : image >= p.images ? p.images - 1 : image;
    const T* map = x + (uint(image) * p.channels + plane % p.channels) * area;
    const T* corners = rois + region * 4;
    Samples down = samples_of(p, as_float(corners[1]), as_float(corners[3]), 0, row % p.pooled[0]);
    Samples across = samples_of(p, as_float(corners[0]), as_float(corners[2]), 1, index % p.pooled[1]);
    float total = 0.0f;
    bool found = false;
    // Whether samples of the bin are off the map: they count as 0.
    bool off = down.first > 0 || down.end < down.count || across.first > 0 || across.end < across.count;
    for (int i = down.first; i < down.end; i++) {
        float at_row = down.at(i);
        if (!(at_row >= -1.0f && at_row <= p.size[0])) {
            off = true;
            continue;
        }
        Between v = between(at_row, p.size[0]);
        for (int j = across.first; j < across.end; j++) {
            float at_column = across.at(j);
            if (!(at_column >= -1.0f && at_column <= p.size[1])) {
                off = true;
                continue;
            }
            Between h = between(at_column, p.size[1]);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float weight = (k & 2 ? v.share : 1.0f - v.share) * (k & 1 ? h.share : 1.0f - h.share);
                // What weighs nothing counts as zero, whatever it is.
                float value = 0.0f;
                if (weight != 0.0f) {
                    value = weight * as_float(map[(k & 2 ? v.high : v.low) * p.size[1] + (k & 1 ? h.high : h.low)]);
                }
                total = !p.greatest ? total + value : found ? fmaxf(total, value) : value;
                found = true;
            }
        }
    }
    if (!p.greatest) total /= fmaxf(float(down.count) * across.count, 1.0f);
    else if (off) total = fmaxf(total, 0.0f);
    y[index] = from_float<T>(total);
}

// The greatest element of each cell of regions of whole pixels, [image, x1, y1, x2, y2] (R. Girshick, "Fast R-CNN", 2015).
template <typename T> __device__ inline void max_roi_pool(const T* x, const T* rois, T* y, const Regions& p, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    uint row = index / p.pooled[1], plane = row / p.pooled[0], region = plane / p.channels;
    int cell[2] = {int(row % p.pooled[0]), int(index % p.pooled[1])};
    const T* corners = rois + region * 5;
    int image = min(max(int(as_float(corners[0])), 0), p.images - 1);
    const T* map = x + (image * p.channels + plane % p.channels) * (p.size[0] * p.size[1]);
    int low[2], high[2];
#pragma unroll
    for (int axis = 0; axis < 2; axis++) {
        float start = roundf(as_float(corners[2 - axis]) * p.scale), end = roundf(as_float(corners[4 - axis]) * p.scale);
        // In double precision: cells end at whole pixels.
        double bin = fmax(double(end) - start + 1.0, 1.0) / p.pooled[axis], size = p.size[axis];
        low[axis] = int(fmin(fmax(floor(cell[axis] * bin) + start, 0.0), size));
        high[axis] = int(fmin(fmax(ceil((cell[axis] + 1) * bin) + start, 0.0), size));
    }
    float greatest = low[0] < high[0] && low[1] < high[1] ? -infinity() : 0.0f;
    for (int i = low[0]; i < high[0]; i++) {
        for (int j = low[1]; j < high[1]; j++) greatest = fmaxf(greatest, as_float(map[i * p.size[1] + j]));
    }
    y[index] = from_float<T>(greatest);
}

// The image of a pool, and the result, which has its upper left corner.
struct Corner {
    int rank;
    Axes image, result;
};

// For each element of the result one more than the element that it is, the last one of several; 0 where there is none.
extern "C" __global__ void unpool_clear(uint* sources, uint count) {
    uint index = thread_index();
    if (index < count) sources[index] = 0;
}

extern "C" __global__ void unpool_mark(const int64* indices, uint* sources, Corner p, uint image_count, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    int64 found = indices[index];
    if (found < 0 || found >= image_count) return;
    uint rest = uint(found), place = 0, step = 1;
    for (int axis = p.rank - 1; axis >= 0; axis--) {
        uint at = rest % p.image.of[axis];
        rest /= p.image.of[axis];
        if (at >= p.result.of[axis]) return;
        place += at * step;
        step *= p.result.of[axis];
    }
    atomicMax(sources + place, index + 1);
}

template <typename T> __device__ inline void unpool_take(const T* x, const uint* sources, T* y, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    uint source = sources[index];
    T value = T();
    if (source > 0) value = x[source - 1];
    y[index] = value;
}

// Columns of blocks: `places` of them along each axis.
struct Columns {
    int rank, pixels, rows, columns;
    Axes size, block, places, stride, begin, dilation;
};

// Each pixel is the sum of the elements of blocks that lie over it.
template <typename T> __device__ inline void col2im(const T* x, T* y, const Columns& p, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    uint image = index / p.pixels, pixel = index - image * p.pixels;
    const T* from = x + image * p.rows * p.columns;
    float sum = 0.0f;
    for (uint row = 0; row < p.rows; row++) {
        uint rest = pixel, rest_row = row, step = 1, column = 0;
        bool inside = true;
        for (int axis = p.rank - 1; axis >= 0 && inside; axis--) {
            uint block = p.block.of[axis], size = p.size.of[axis], stride = p.stride.of[axis];
            int at = int(rest % size) + p.begin.of[axis] - int(rest_row % block) * p.dilation.of[axis];
            inside = at >= 0 && uint(at) % stride == 0 && uint(at) / stride < p.places.of[axis];
            column += uint(at) / stride * step;
            step *= p.places.of[axis];
            rest /= size;
            rest_row /= block;
        }
        if (inside) sum += as_float(from[row * p.columns + column]);
    }
    y[index] = from_float<T>(sum);
}

struct Windows {
    int input[3], output[3], kernel[3], strides[3], dilations[3], pads[3];
    int channels, offset_groups, rank;
};

__device__ inline int volume(const int (&sizes)[3]) { return sizes[0] * sizes[1] * sizes[2]; }

// The value between the pixels around a place; outside of the image is zero.
template <typename T> __device__ inline float sample(const T* x, const int (&size)[3], const float (&at)[3]) {
    float sum = 0.0f, below[3], share[3];
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        below[axis] = floorf(at[axis]);
        share[axis] = at[axis] - below[axis];
    }
#pragma unroll
    for (int corner = 0; corner < 8; corner++) {
        float weight = 1.0f;
        int place = 0;
#pragma unroll
        for (int axis = 0; axis < 3; axis++) {
            bool upper = corner >> (2 - axis) & 1;
            float index = upper ? below[axis] + 1.0f : below[axis];
            float own = upper ? share[axis] : 1.0f - share[axis];
            weight = index >= 0.0f && index < size[axis] ? weight * own : 0.0f;
            place = place * size[axis] + int(index);
        }
        if (weight > 0.0f) sum += weight * as_float(x[place]);
    }
    return sum;
}

// What each tap of the kernel meets at each position, at the place that its offset moves it to.
template <typename T>
__device__ inline void deform_columns(const T* x, const T* offset, const T* mask, T* columns, const Windows& p, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    uint pixels = volume(p.output), taps = volume(p.kernel);
    uint row = index / pixels, pixel = index - row * pixels;
    uint unit = row / taps, tap = row - unit * taps, image = unit / p.channels;
    uint group = image * p.offset_groups + (unit - image * p.channels) / (p.channels / p.offset_groups);
    uint own = group * taps + tap, rest = pixel, rest_tap = tap;
    float at[3];
#pragma unroll
    for (int axis = 2; axis >= 0; axis--) {
        int window = rest % p.output[axis] * p.strides[axis] - p.pads[axis];
        at[axis] = window + int(rest_tap % p.kernel[axis] * p.dilations[axis]);
        rest /= p.output[axis];
        rest_tap /= p.kernel[axis];
        int spatial = axis - (3 - p.rank);
        if (spatial >= 0) at[axis] += as_float(offset[(own * p.rank + spatial) * pixels + pixel]);
    }
    float value = sample(x + unit * volume(p.input), p.input, at);
    columns[index] = from_float<T>(mask ? value * as_float(mask[own * pixels + pixel]) : value);
}

#define MOVES(suffix, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        grid_nearest_##suffix(const T* x, const void* grid, T* y, Grid p, uint count) {                             \
        grid_nearest<T>(x, grid, y, p, count);                                                                      \
    }                                                                                                               \
    extern "C" __global__ void unpool_take_##suffix(const T* x, const uint* sources, T* y, uint count) {            \
        unpool_take<T>(x, sources, y, count);                                                                       \
    }
#define FLOATS(suffix, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        grid_sums_##suffix(const T* x, const void* grid, T* y, Grid p, uint count) {                                \
        grid_sums<T>(x, grid, y, p, count);                                                                         \
    }                                                                                                               \
    extern "C" __global__ void affine_grid_##suffix(const T* theta, T* y, Pixels p, uint count) {                   \
        affine_grid<T>(theta, y, p, count);                                                                         \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        roi_align_##suffix(const T* x, const T* rois, const int64* images, T* y, Regions p, uint count) {           \
        roi_align<T>(x, rois, images, y, p, count);                                                                 \
    }                                                                                                               \
    extern "C" __global__ void max_roi_pool_##suffix(const T* x, const T* rois, T* y, Regions p, uint count) {      \
        max_roi_pool<T>(x, rois, y, p, count);                                                                      \
    }                                                                                                               \
    extern "C" __global__ void col2im_##suffix(const T* x, T* y, Columns p, uint count) {                           \
        col2im<T>(x, y, p, count);                                                                                  \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        deform_columns_##suffix(const T* x, const T* offset, const T* mask, T* columns, Windows p, uint count) {    \
        deform_columns<T>(x, offset, mask, columns, p, count);                                                      \
    }

MOVES(b1, uint8)
MOVES(b2, uint16)
MOVES(b4, uint)
MOVES(b8, uint64)
FLOATS(f32, float)
FLOATS(f16, __half)
FLOATS(bf16, __nv_bfloat16)
