// The gradients of convolutions over up to three axes, by the image and by the filters: products of what is read where it lies. Places that
// no window reached count for nothing, windows beyond the image meet padding.
#include "window_tiles.cuh"

// Where the result of a convolution is that a tap carries to a place of the image; -1 where there is none.
__device__ inline int result_at(const Convolution& p, const int (&place)[3], const int (&tap)[3]) {
    int result = 0;
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int at = place[axis] + p.pads[axis] - tap[axis] * p.dilations[axis];
        if (at < 0) return -1;
        int window = p.strides[axis] == 1 ? at : at / p.strides[axis];
        if (window * p.strides[axis] != at || window >= p.output[axis]) return -1;
        result = result * p.output[axis] + window;
    }
    return result;
}

// Where a tap of a window lies in a channel of the image; -1 outside of it.
__device__ inline int image_at(const Convolution& p, const int (&window)[3], const int (&tap)[3]) {
    int place = 0;
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
        int at = window[axis] * p.strides[axis] - p.pads[axis] + tap[axis] * p.dilations[axis];
        if ((uint)at >= (uint)p.input[axis]) return -1;
        place = place * p.input[axis] + at;
    }
    return place;
}

// What a step of the sums is: a filter, a tap of it, and where its weight for the first channel is.
struct Tap { int filter, weight, at[3]; };

// By the image: 64 channels at 64 places by a block, over filters and taps.
template <typename T> __device__ inline void by_input(const T* upstream, const T* w, T* gradient, const Convolution& p) {
    __shared__ __align__(16) Tiles tiles;
    __shared__ Tap taps[2][DEPTH];
    int thread = threadIdx.x, of_input = volume(p.input), of_output = volume(p.output), of_kernel = volume(p.kernel);
    int position0 = blockIdx.x % p.tiles_across * BLOCK, channel0 = blockIdx.x / p.tiles_across % p.tiles_down * BLOCK;
    int group = blockIdx.x / p.tiles_across / p.tiles_down;
    int depth = p.filters * of_kernel, positions = p.batch * of_input, position = position0 + thread % BLOCK;
    bool there = position < positions;
    int place[3];
    unflat(there ? position % of_input : 0, p.input, place);
    const T* results = upstream + ((int64)(there ? position / of_input : 0) * p.groups + group) * p.filters * of_output;
    const T* weights = w + (int64)group * p.filters * p.channels * of_kernel;
    auto describe = [&](int k0) {
        int k = k0 + thread;
        if (thread >= DEPTH || k >= depth) return;
        Tap tap = {k / of_kernel, k / of_kernel * p.channels * of_kernel + k % of_kernel};
        unflat(k % of_kernel, p.kernel, tap.at);
        taps[k0 / DEPTH % 2][thread] = tap;
    };
    float row_next[4], column_next[4];
    auto read = [&](int k0) {
        const Tap* of_tile = taps[k0 / DEPTH % 2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int k = thread / BLOCK + 4 * i;
            column_next[i] = 0.0f;
            if (there && k0 + k < depth) {
                Tap tap = of_tile[k];
                int at = result_at(p, place, tap.at);
                if (at >= 0) column_next[i] = as_float(results[(int64)tap.filter * of_output + at]);
            }
        }
        int k = k0 + thread % DEPTH;
        const T* of_step = weights + (k < depth ? of_tile[thread % DEPTH].weight : 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int channel = channel0 + thread / DEPTH + 16 * i;
            row_next[i] = channel < p.channels && k < depth ? as_float(of_step[(int64)channel * of_kernel]) : 0.0f;
        }
    };
    auto write = [&](Tiles& to, int stage) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to.columns[stage][thread / BLOCK + 4 * i][thread % BLOCK] = column_next[i];
            to.rows[stage][thread % DEPTH][thread / DEPTH + 16 * i] = row_next[i];
        }
    };
    float sums[4][4] = {};
    multiply_windows(tiles, 0, depth, sums, describe, read, write);
    int own_channel = channel0 + thread / 16 * 4, own_position = position0 + thread % 16 * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int to = own_position + j;
        if (to >= positions) break;
        T* at = gradient + ((int64)(to / of_input) * p.groups + group) * p.channels * of_input + to % of_input;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (own_channel + i < p.channels) at[(int64)(own_channel + i) * of_input] = from_float<T>(sums[i][j]);
        }
    }
}

// By the filters: 64 of them at 64 channels and taps by a block, over windows. `gridDim.y` blocks share the windows, and leave their sums behind each
// other where `parts` is given.
template <typename T> __device__ inline void by_weights(const T* x, const T* upstream, T* gradient, float* parts, const Convolution& p) {
    __shared__ __align__(16) Tiles tiles;
    int thread = threadIdx.x, of_input = volume(p.input), of_output = volume(p.output), of_kernel = volume(p.kernel);
    int column0 = blockIdx.x % p.tiles_across * BLOCK, filter0 = blockIdx.x / p.tiles_across % p.tiles_down * BLOCK;
    int group = blockIdx.x / p.tiles_across / p.tiles_down;
    int columns = p.channels * of_kernel, windows = p.batch * of_output;
    int each = ((windows + p.parts - 1) / p.parts + DEPTH - 1) / DEPTH * DEPTH;
    int first = min((int)blockIdx.y * each, windows), end = min(first + each, windows);
    // The columns that the thread reads: where their channels begin, and their taps.
    int channel_at[4], taps[4][3];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int column = column0 + thread / DEPTH + 16 * i;
        channel_at[i] = column < columns ? column / of_kernel * of_input : -1;
        unflat(column < columns ? column % of_kernel : 0, p.kernel, taps[i]);
    }
    float row_next[4], column_next[4];
    auto read = [&](int k0) {
        int k = k0 + thread % DEPTH, image = k / of_output, at = k % of_output, window[3];
        bool there = k < end;
        unflat(there ? at : 0, p.output, window);
        const T* pixels = x + ((int64)image * p.groups + group) * p.channels * of_input;
        const T* results = upstream + ((int64)image * p.groups + group) * p.filters * of_output + at;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int filter = filter0 + thread / DEPTH + 16 * i, place = image_at(p, window, taps[i]);
            row_next[i] = there && filter < p.filters ? as_float(results[(int64)filter * of_output]) : 0.0f;
            column_next[i] = there && channel_at[i] >= 0 && place >= 0 ? as_float(pixels[channel_at[i] + place]) : 0.0f;
        }
    };
    auto write = [&](Tiles& to, int stage) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to.columns[stage][thread % DEPTH][thread / DEPTH + 16 * i] = column_next[i];
            to.rows[stage][thread % DEPTH][thread / DEPTH + 16 * i] = row_next[i];
        }
    };
    float sums[4][4] = {};
    multiply_windows(tiles, first, end, sums, [](int) {}, read, write);
    int64 all = (int64)p.groups * p.filters * columns;
    int own_filter = filter0 + thread / 16 * 4, own_column = column0 + thread % 16 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (own_filter + i >= p.filters) break;
        int64 at = ((int64)group * p.filters + own_filter + i) * columns + own_column;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (own_column + j >= columns) break;
            if (parts) parts[blockIdx.y * all + at + j] = sums[i][j];
            else gradient[at + j] = from_float<T>(sums[i][j]);
        }
    }
}

// By the image where groups have few channels and filters, such as depthwise convolutions: each result by a thread.
template <typename T> __device__ inline void by_input_planes(const T* upstream, const T* w, T* gradient, const Convolution& p, uint count) {
    int of_input = volume(p.input), of_output = volume(p.output), of_kernel = volume(p.kernel);
    for (uint index = thread_index(); index < count; index += gridDim.x * blockDim.x) {
        int unit = index / of_input, channel = unit % p.channels, group = unit / p.channels % p.groups, image = unit / p.channels / p.groups;
        int place[3], tap[3];
        unflat(index % of_input, p.input, place);
        float sum = 0.0f;
        for (int filter = 0; filter < p.filters; filter++) {
            const T* results = upstream + (((int64)image * p.groups + group) * p.filters + filter) * of_output;
            const T* taps = w + (((int64)group * p.filters + filter) * p.channels + channel) * of_kernel;
            for (tap[0] = 0; tap[0] < p.kernel[0]; tap[0]++) {
                for (tap[1] = 0; tap[1] < p.kernel[1]; tap[1]++) {
                    for (tap[2] = 0; tap[2] < p.kernel[2]; tap[2]++, taps++) {
                        int at = result_at(p, place, tap);
                        if (at >= 0) sum += as_float(results[at]) * as_float(*taps);
                    }
                }
            }
        }
        gradient[index] = from_float<T>(sum);
    }
}

// By the filters of such convolutions: a block for each tap, over all windows.
template <typename T> __device__ inline void by_weights_planes(const T* x, const T* upstream, T* gradient, const Convolution& p) {
    __shared__ float cells[8];
    int of_input = volume(p.input), of_output = volume(p.output), of_kernel = volume(p.kernel);
    int unit = blockIdx.x / of_kernel, channel = unit % p.channels, filter = unit / p.channels, group = filter / p.filters;
    int tap[3], window[3];
    unflat(blockIdx.x % of_kernel, p.kernel, tap);
    float sum = 0.0f;
    for (int k = threadIdx.x; k < p.batch * of_output; k += 256) {
        int image = k / of_output;
        unflat(k % of_output, p.output, window);
        int at = image_at(p, window, tap);
        if (at < 0) continue;
        float pixel = as_float(x[(((int64)image * p.groups + group) * p.channels + channel) * of_input + at]);
        sum += pixel * as_float(upstream[((int64)image * p.groups * p.filters + filter) * of_output + k % of_output]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) cells[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < 8; warp++) sum += cells[warp];
    gradient[blockIdx.x] = from_float<T>(sum);
}

// The sums of all blocks that share windows, in their order.
template <typename T> __device__ inline void join(const float* parts, T* gradient, uint count, uint splits) {
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (uint split = 0; split < splits; split++) sum += parts[(uint64)split * count + i];
        gradient[i] = from_float<T>(sum);
    }
}

#define ENTRIES(NAME, T)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                                          \
        by_input_##NAME(const T* upstream, const T* w, T* gradient, Convolution p) {                                              \
        by_input(upstream, w, gradient, p);                                                                                       \
    }                                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                                          \
        by_weights_##NAME(const T* x, const T* upstream, T* gradient, float* parts, Convolution p) {                              \
        by_weights(x, upstream, gradient, parts, p);                                                                              \
    }                                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                             \
        by_input_planes_##NAME(const T* upstream, const T* w, T* gradient, Convolution p, uint count) {                           \
        by_input_planes(upstream, w, gradient, p, count);                                                                         \
    }                                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                             \
        by_weights_planes_##NAME(const T* x, const T* upstream, T* gradient, Convolution p) {                                     \
        by_weights_planes(x, upstream, gradient, p);                                                                              \
    }                                                                                                                             \
    extern "C" __global__ void by_weights_join_##NAME(const float* parts, T* gradient, uint count, uint splits) {                 \
        join(parts, gradient, count, splits);                                                                                     \
    }

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
