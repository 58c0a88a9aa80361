// Normalizations that are neither of rows nor of given statistics: by neighbouring channels, along any axes, and of sums of embeddings.
#include "lines.cuh"

// Local response normalization (A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet Classification with Deep Convolutional Neural
// Networks", 2012).
template <typename T>
__device__ inline void lrn(const T* x, T* y, uint count, uint channels, uint spatial, uint before, uint after, float alpha,
                           float beta, float bias) {
    uint index = thread_index();
    if (index >= count) return;
    uint channel = index / spatial % channels;
    uint first = channel - min(channel, before), last = min(channel + after, channels - 1);
    const T* from = x + (index - (channel - first) * spatial);
    float squares = 0.0f;
    for (uint k = first; k <= last; k++, from += spatial) {
        float v = as_float(*from);
        squares += v * v;
    }
    y[index] = from_float<T>(as_float(x[index]) / powf(bias + alpha * squares, beta));
}

// A thread writes just the elements that it reads, after its team has read the line.
template <int TEAM, typename T> __device__ inline void mean_variance(const T* x, T* y, const Lines& lines, float epsilon) {
    uint line = line_of_team<TEAM>(), lane = lane_of_team<TEAM>();
    uint begin = begin_of(lines, line), end = line < lines.count ? lines.length : 0;
    auto together = [](float a, float b) { return a + b; };
    float sum = 0.0f, squares = 0.0f;
    for (uint r = lane; r < end; r += TEAM) sum += as_float(x[begin + along(lines, r)]);
    float mean = joined<TEAM>(sum, together) / float(lines.length);
    for (uint r = lane; r < end; r += TEAM) {
        float apart = as_float(x[begin + along(lines, r)]) - mean;
        squares += apart * apart;
    }
    // The standard's function adds epsilon to the deviation.
    float deviation = sqrtf(joined<TEAM>(squares, together) / float(lines.length)) + epsilon;
    for (uint r = lane; r < end; r += TEAM) {
        uint place = begin + along(lines, r);
        y[place] = from_float<T>((as_float(x[place]) - mean) / deviation);
    }
}

// Tables, by the number of their rows; `given` is how many position_ids there are.
struct Tables {
    int words, positions, segments;
    int tokens, length, width, given;
};

// The row of a table that is nearest to a number.
__device__ inline uint row_of(int number, int rows) { return min(max(number < 0 ? number + rows : number, 0), rows - 1); }

// The sum of a word's, its place's and its segment's embedding, normalized: a block for each word. Any but `ids`, `words`, `positions`,
// `scale` and `shift` may be null pointers.
template <int TEAM, typename T>
__device__ inline void embed(const int* ids, const int* segment_ids, const int* position_ids, const T* words,
                             const T* positions, const T* segments, const T* scale, const T* shift, T* y, T* sums,
                             const Tables& p, float epsilon) {
    uint token = line_of_team<TEAM>(), lane = lane_of_team<TEAM>();
    if (token >= p.tokens) return;
    int place = position_ids ? position_ids[token % p.given] : token % p.length;
    const T* word = words + row_of(ids[token], p.words) * p.width;
    const T* position = positions + row_of(place, p.positions) * p.width;
    const T* segment = nullptr;
    if (segments) segment = segments + row_of(segment_ids ? segment_ids[token] : 0, p.segments) * p.width;
    auto value = [&](uint k) {
        float v = as_float(word[k]) + as_float(position[k]);
        return segment ? v + as_float(segment[k]) : v;
    };
    auto together = [](float a, float b) { return a + b; };
    float sum = 0.0f, squares = 0.0f;
    for (uint k = lane; k < p.width; k += TEAM) sum += value(k);
    float mean = joined<TEAM>(sum, together) / float(p.width);
    for (uint k = lane; k < p.width; k += TEAM) {
        float apart = value(k) - mean;
        squares += apart * apart;
    }
    float factor = 1.0f / sqrtf(joined<TEAM>(squares, together) / float(p.width) + epsilon);
    for (uint k = lane; k < p.width; k += TEAM) {
        uint to = token * p.width + k;
        float v = value(k);
        if (y) y[to] = from_float<T>((v - mean) * factor * as_float(scale[k]) + as_float(shift[k]));
        if (sums) sums[to] = from_float<T>(v);
    }
}

// For each sequence, how many places the mask has at 1; 0 without a mask. A warp for each.
extern "C" __global__ void count_mask(const int* mask, int* counts, uint count, uint length) {
    uint line = line_of_team<32>(), lane = lane_of_team<32>();
    if (line >= count) return;
    int ones = 0;
    for (uint k = lane; mask && k < length; k += 32) ones += mask[line * length + k] == 1;
    ones = joined<32>(ones, [](int a, int b) { return a + b; });
    if (lane == 0) counts[line] = ones;
}

#define MEAN_VARIANCE(TEAM, NAME, T)                                                                               \
    extern "C" __global__ void mean_variance_##NAME##_##TEAM(const T* x, T* y, Lines lines, float epsilon) {       \
        mean_variance<TEAM, T>(x, y, lines, epsilon);                                                              \
    }
#define EMBED(TEAM, NAME, T)                                                                                       \
    extern "C" __global__ void embed_##NAME##_##TEAM(const int* ids, const int* segment_ids,                       \
                                                     const int* position_ids, const T* words, const T* positions,  \
                                                     const T* segments, const T* scale, const T* shift, T* y,      \
                                                     T* sums, Tables p, float epsilon) {                           \
        embed<TEAM, T>(ids, segment_ids, position_ids, words, positions, segments, scale, shift, y, sums, p,       \
                       epsilon);                                                                                   \
    }
#define ALL(NAME, T)                                                                                               \
    extern "C" __global__ void lrn_##NAME(const T* x, T* y, uint count, uint channels, uint spatial, uint before,  \
                                          uint after, float alpha, float beta, float bias) {                       \
        lrn<T>(x, y, count, channels, spatial, before, after, alpha, beta, bias);                                  \
    }                                                                                                              \
    MEAN_VARIANCE(1, NAME, T) MEAN_VARIANCE(8, NAME, T) MEAN_VARIANCE(32, NAME, T) MEAN_VARIANCE(256, NAME, T)     \
    EMBED(32, NAME, T) EMBED(256, NAME, T)

ALL(f32, float)
ALL(f16, __half)
ALL(bf16, __nv_bfloat16)
