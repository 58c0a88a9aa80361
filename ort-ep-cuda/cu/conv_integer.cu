// Convolutions of 8-bit codes: products of filters with windows that are never unfolded, over up to three axes.
#include "integer.cuh"
#include "windows.cuh"

struct Windows {
    int groups, channels, filters;  // channels and filters of a group
    int input[3], output[3], kernel[3], strides[3], dilations[3], pads[3];
};

struct Tap { int channel, at[3]; };

// The right side of a convolution: a column is the window of a position. Outside of the image everything is its zero point.
struct Image {
    const Windows& p;
    const uint8* image;
    int depth, of_input, of_kernel, origin[3];
    bool is_there;
    uint flip, outside;
    Tap* taps;
    uint words[4];
    int sum;

    __device__ Image(const Windows& p, const uint8* x, int group, int column0, int columns, int depth, int kind, int zero,
                     Tap* taps)
        : p(p), depth(depth), of_input(volume(p.input)), of_kernel(volume(p.kernel)), flip(flip_of(kind) & 255),
          outside((uint)shifted(zero, kind) & 255), taps(taps), sum(0) {
        int position = column0 + threadIdx.x % 64, of_output = volume(p.output);
        is_there = position < columns;
        position = is_there ? position : 0;
        image = x + ((int64)(position / of_output) * p.groups + group) * p.channels * of_input;
        unflat(position % of_output, p.output, origin);
#pragma unroll
        for (int axis = 0; axis < 3; axis++) origin[axis] = origin[axis] * p.strides[axis] - p.pads[axis];
    }

    static __device__ int line_of(int position) { return position; }
    static __device__ int position_of(int line) { return line; }

    // What the steps of a tile are, in one of two tables. All threads must pass a barrier before they are read.
    __device__ void describe(int k0) {
        int k = k0 + threadIdx.x;
        if (threadIdx.x >= STEPS || k >= depth) return;
        Tap tap;
        tap.channel = k / of_kernel * of_input;
        unflat(k % of_kernel, p.kernel, tap.at);
#pragma unroll
        for (int axis = 0; axis < 3; axis++) tap.at[axis] *= p.dilations[axis];
        taps[k0 / STEPS % 2 * STEPS + threadIdx.x] = tap;
    }

    __device__ uint at(const Tap& tap) const {
        int place = 0;
#pragma unroll
        for (int axis = 0; axis < 3; axis++) {
            int at = origin[axis] + tap.at[axis];
            if ((uint)at >= (uint)p.input[axis]) return outside;
            place = place * p.input[axis] + at;
        }
        return image[tap.channel + place] ^ flip;
    }

    __device__ void read(int k0) {
        const Tap* of_tile = taps + k0 / STEPS % 2 * STEPS;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            words[n] = 0;
#pragma unroll
            for (int byte = 0; byte < 4; byte++) {
                int k = threadIdx.x / 64 * 16 + 4 * n + byte;
                if (is_there && k0 + k < depth) words[n] |= at(of_tile[k]) << 8 * byte;
            }
        }
    }

    __device__ void write(uint* tile) {
        *(uint4*)(tile + threadIdx.x % 64 * PITCH + threadIdx.x / 64 * 4) = make_uint4(words[0], words[1], words[2], words[3]);
#pragma unroll
        for (int n = 0; n < 4; n++) sum = dot4((int)words[n], (int)ONES, sum);
    }

    __device__ void total(int* sums) { atomicAdd(sums + threadIdx.x % 64, sum); }
};

template <> __device__ inline void describe<Image>(Image& side, int k0) { side.describe(k0); }

// Where a convolution's result of a filter of the group `matrix` at a position of all images is written.
__device__ inline int64 result_place(const Windows& w, int group, int filter, int position) {
    int of_output = volume(w.output);
    int64 image = (int64)(position / of_output) * w.groups * w.filters;
    return (image + group * w.filters + filter) * of_output + position % of_output;
}

template <typename Sums>
__device__ inline void convolution(const uint8* filters, const uint8* x, const Tensors& tensors, void* y, const Product& p,
                                   const Windows& w) {
    __shared__ Tap taps[2 * STEPS];
    int column0 = blockIdx.x % p.across * 64, row0 = blockIdx.x / p.across % p.down * 64;
    int group = blockIdx.x / p.across / p.down;
    filters += (int64)group * p.rows * p.depth;
    Matrix<64> left(filters, p.a_line, 1, row0, p.rows, p.depth, p.a_many, p.a_kind);
    int zero = tensors.of[B_ZERO] ? code_at(tensors.of[B_ZERO], p.b_kind, 0) : 0;
    Image right(w, x, group, column0, p.columns, p.depth, p.b_kind, zero, taps);
    Parts parts = {p, tensors, group};
    tiles<64, Sums>(left, right, parts, y, row0, column0, [&](int row, int column) { return result_place(w, group, row, column); });
}

// The host takes tensor cores where the device has them.
#if __CUDA_ARCH__ >= 800
extern "C" __global__ void __launch_bounds__(256)
    conv_cores(const uint8* filters, const uint8* x, TENSORS, void* y, Product p, Windows w) {
    convolution<Cores<64>>(filters, x, ALL_TENSORS, y, p, w);
}
#else
extern "C" __global__ void __launch_bounds__(256)
    conv_dots(const uint8* filters, const uint8* x, TENSORS, void* y, Product p, Windows w) {
    convolution<Dots<64>>(filters, x, ALL_TENSORS, y, p, w);
}
#endif

// Groups of few filters, such as depthwise ones: each result by a thread, of codes less their zero points.
extern "C" __global__ void __launch_bounds__(256)
    conv_planes(const uint8* filters, const uint8* x, TENSORS, void* y, Product p, Windows w, uint count) {
    Tensors tensors = ALL_TENSORS;
    uint index = thread_index();
    if (index >= count) return;
    int of_output = volume(w.output), of_input = volume(w.input), of_kernel = volume(w.kernel);
    int filter = index / of_output % (w.groups * w.filters), image = index / of_output / (w.groups * w.filters);
    int group = filter / w.filters, row = filter % w.filters;
    int origin[3], first[3], end[3];
    unflat(index % of_output, w.output, origin);
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        origin[axis] = origin[axis] * w.strides[axis] - w.pads[axis];
        taps_inside(w, axis, origin[axis], first[axis], end[axis]);
    }
    Parts parts = {p, tensors, group};
    RowTerm of_row = row_term(parts, row);
    Term of_column = column_term(parts, 0);
    uint x_flip = flip_of(p.b_kind) & 255, w_flip = flip_of(p.a_kind) & 255;
    const uint8* plane = x + ((int64)image * w.groups + group) * w.channels * of_input;
    const uint8* taps = filters + (int64)filter * p.depth;
    uint sum = 0;
    for (int channel = 0; channel < w.channels; channel++, plane += of_input, taps += of_kernel) {
        for (int i = first[0]; i < end[0]; i++) {
            for (int j = first[1]; j < end[1]; j++) {
                const uint8* line = plane + ((origin[0] + i * w.dilations[0]) * w.input[1] + origin[1] + j * w.dilations[1]) * w.input[2];
                const uint8* of_line = taps + (i * w.kernel[1] + j) * w.kernel[2];
                for (int k = first[2]; k < end[2]; k++) {
                    int code = (int8)(line[origin[2] + k * w.dilations[2]] ^ x_flip) - of_column.zero;
                    sum += code * ((int8)(of_line[k] ^ w_flip) - of_row.term.zero);
                }
            }
        }
    }
    // Zero points are taken off already.
    of_row.term.zero = 0;
    of_column.zero = 0;
    finish(parts, y, index, row, 0, of_row, of_column, sum, 0, 0);
}
