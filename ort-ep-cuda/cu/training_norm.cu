// Batch normalization in training: what a batch tells of each channel, what is normalized by it, and its gradients. Channels are cut in pieces,
// each of which has sums of its own, in doubles of few elements' sums; who needs the whole adds them up in their order.
#include "lines.cuh"

// What is computed in.
template <typename T> struct NumberOf { typedef float Type; };
template <> struct NumberOf<double> { typedef double Type; };
__device__ inline double number(double x) { return x; }
__device__ inline float number(float x) { return x; }
__device__ inline float number(__half x) { return as_float(x); }
__device__ inline float number(__nv_bfloat16 x) { return as_float(x); }
template <typename T> __device__ inline T element(typename NumberOf<T>::Type x) { return from_float<T>(x); }
template <> __device__ inline double element<double>(double x) { return x; }

// An element of a channel is the place `r % spatial` of the item `r / spatial` of the batch.
struct Channels {
    uint count, channels, spatial, splits;

    __device__ uint length() const { return count / channels; }
    __device__ uint place(uint channel, uint r) const { return (r / spatial * channels + channel) * spatial + r % spatial; }
    __device__ uint channel_of(uint i) const { return i / spatial % channels; }
    // The sum with this number, of all pieces of a channel.
    __device__ double total(const double* parts, uint sum, uint channel) const {
        double all = 0.0;
        for (uint split = 0; split < splits; split++) all += parts[(sum * splits + split) * channels + channel];
        return all;
    }
};

// Elements, then squares of what they are apart from the mean, then with these the upstream gradient, times that and alone.
enum Stage { LEVEL, SQUARES, GRADIENT };
constexpr int SUMS[3] = {1, 1, 3};

// Of so many elements a thread adds up before it goes on in doubles.
constexpr int FEW = 16;

template <int TEAM, int STAGE, typename T>
__device__ void channel_sums(const T* x, const T* upstream, const T* mean, const double* levels, double* parts, const Channels& all) {
    typedef typename NumberOf<T>::Type N;
    constexpr int COUNT = SUMS[STAGE];
    uint channel = line_of_team<TEAM>(), length = all.length(), each = (length + all.splits - 1) / all.splits;
    uint first = blockIdx.y * each, end = channel < all.channels ? min(first + each, length) : 0;
    N origin = N(0);
    if (STAGE != LEVEL && channel < all.channels) {
        origin = mean ? number(mean[channel]) : N(all.total(levels, 0, channel) / length);
    }
    double sums[COUNT] = {};
    for (uint start = first + lane_of_team<TEAM>(); start < end; start += TEAM * FEW) {
        N few[COUNT] = {};
#pragma unroll 4
        for (uint turn = 0, r = start; turn < FEW && r < end; turn++, r += TEAM) {
            uint at = all.place(channel, r);
            N own = number(x[at]), apart = own - origin;
            if (STAGE == LEVEL) few[0] += own;
            else few[0] += apart * apart;
            if constexpr (STAGE == GRADIENT) {
                N up = number(upstream[at]);
                few[1] += apart * up;
                few[2] += up;
            }
        }
#pragma unroll
        for (int n = 0; n < COUNT; n++) sums[n] += double(few[n]);
    }
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        double sum = joined<TEAM>(sums[n], [](double a, double b) { return a + b; });
        if (channel < all.channels && lane_of_team<TEAM>() == 0) parts[(n * all.splits + blockIdx.y) * all.channels + channel] = sum;
    }
}

// Mean and variance of the population of a channel.
__device__ inline double2 moments_of(const double* levels, const double* squares, uint channel, const Channels& all) {
    double many = all.length();
    return make_double2(all.total(levels, 0, channel) / many, all.total(squares, 0, channel) / many);
}

template <typename T> __device__ inline T rounded(double x) { return element<T>(typename NumberOf<T>::Type(x)); }

template <typename T> __device__ inline void write_running(const T* before, T* after, uint channel, double now, double momentum) {
    if (after) after[channel] = rounded<T>(double(number(before[channel])) * momentum + now * (1.0 - momentum));
}

// Statistics of a batch by themselves, or, where there is a scale, what a normalization multiplies by.
template <typename T>
__device__ void channel_statistics(const double* levels, const double* squares, const T* old_mean, const T* old_variance, T* mean, T* inverse,
                                   T* new_mean, T* new_variance, const T* scale, typename NumberOf<T>::Type* factors, const Channels& all,
                                   double epsilon, double momentum) {
    typedef typename NumberOf<T>::Type N;
    uint channel = thread_index();
    if (channel >= all.channels) return;
    double2 moments = moments_of(levels, squares, channel, all);
    double deviation = 1.0 / sqrt(moments.y + epsilon);
    if (mean) mean[channel] = rounded<T>(moments.x);
    if (inverse) inverse[channel] = rounded<T>(deviation);
    write_running(old_mean, new_mean, channel, moments.x, momentum);
    write_running(old_variance, new_variance, channel, moments.y, momentum);
    if (factors) {
        factors[channel] = N(moments.x);
        factors[all.channels + channel] = N(deviation * double(number(scale[channel])));
    }
}

template <typename T>
__device__ void channel_normalize(const T* x, const T* shift, T* y, const typename NumberOf<T>::Type* factors, const Channels& all) {
    for (uint i = thread_index(); i < all.count; i += gridDim.x * blockDim.x) {
        uint channel = all.channel_of(i);
        y[i] = element<T>((number(x[i]) - factors[channel]) * factors[all.channels + channel] + number(shift[channel]));
    }
}

// The gradients by scale and bias, and the numbers of the one by the input.
template <typename T>
__device__ void channel_gradients(const double* levels, const double* parts, const T* mean, const T* inverse, const T* scale, T* of_scale,
                                  T* of_bias, typename NumberOf<T>::Type* numbers, const Channels& all, double epsilon) {
    typedef typename NumberOf<T>::Type N;
    uint channel = thread_index();
    if (channel >= all.channels) return;
    double many = max(all.length(), 1u), center = mean ? double(number(mean[channel])) : all.total(levels, 0, channel) / many;
    double deviation = inverse ? double(number(inverse[channel])) : 1.0 / sqrt(all.total(parts, 0, channel) / many + epsilon);
    double along = all.total(parts, 1, channel) * deviation, level = all.total(parts, 2, channel);
    if (of_scale) of_scale[channel] = rounded<T>(along);
    if (of_bias) of_bias[channel] = rounded<T>(level);
    double all_numbers[4] = {center, level / many, along / many * deviation, double(number(scale[channel])) * deviation};
#pragma unroll
    for (int n = 0; n < 4; n++) numbers[n * all.channels + channel] = N(all_numbers[n]);
}

// Each element of the upstream gradient is read before that of the gradient is written, which may lie there.
template <typename T>
__device__ void channel_spread(const T* x, const T* upstream, T* gradient, const typename NumberOf<T>::Type* numbers, const Channels& all) {
    for (uint i = thread_index(); i < all.count; i += gridDim.x * blockDim.x) {
        uint channel = all.channel_of(i), step = all.channels;
        auto apart = number(x[i]) - numbers[channel];
        auto rest = number(upstream[i]) - numbers[step + channel] - apart * numbers[2 * step + channel];
        gradient[i] = element<T>(rest * numbers[3 * step + channel]);
    }
}

#define SUMS_OF(TEAM, STAGE, WHAT, NAME, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                              \
        channel_##WHAT##_##NAME##_##TEAM(const T* x, const T* upstream, const T* mean, const double* levels, double* parts,        \
                                         Channels all) {                                                                           \
        channel_sums<TEAM, STAGE>(x, upstream, mean, levels, parts, all);                                                          \
    }
#define FORWARD(NAME, T)                                                                                                           \
    SUMS_OF(8, LEVEL, level, NAME, T) SUMS_OF(256, LEVEL, level, NAME, T)                                                          \
    SUMS_OF(8, SQUARES, squares, NAME, T) SUMS_OF(256, SQUARES, squares, NAME, T)                                                  \
    extern "C" __global__ void channel_statistics_##NAME(const double* levels, const double* squares, const T* old_mean,           \
                                                         const T* old_variance, T* mean, T* inverse, T* new_mean,                  \
                                                         T* new_variance, const T* scale, NumberOf<T>::Type* factors,              \
                                                         Channels all, double epsilon, double momentum) {                          \
        channel_statistics(levels, squares, old_mean, old_variance, mean, inverse, new_mean, new_variance, scale, factors, all,    \
                           epsilon, momentum);                                                                                     \
    }                                                                                                                              \
    extern "C" __global__ void channel_normalize_##NAME(const T* x, const T* shift, T* y, const NumberOf<T>::Type* factors,        \
                                                        Channels all) {                                                            \
        channel_normalize(x, shift, y, factors, all);                                                                              \
    }
#define BACKWARD(NAME, T)                                                                                                          \
    SUMS_OF(8, GRADIENT, gradient, NAME, T) SUMS_OF(256, GRADIENT, gradient, NAME, T)                                              \
    extern "C" __global__ void channel_gradients_##NAME(const double* levels, const double* parts, const T* mean,                  \
                                                        const T* inverse, const T* scale, T* of_scale, T* of_bias,                 \
                                                        NumberOf<T>::Type* numbers, Channels all, double epsilon) {                \
        channel_gradients(levels, parts, mean, inverse, scale, of_scale, of_bias, numbers, all, epsilon);                          \
    }                                                                                                                              \
    extern "C" __global__ void channel_spread_##NAME(const T* x, const T* upstream, T* gradient,                                   \
                                                     const NumberOf<T>::Type* numbers, Channels all) {                             \
        channel_spread(x, upstream, gradient, numbers, all);                                                                       \
    }

FORWARD(f32, float)
FORWARD(f64, double)
FORWARD(f16, __half)
FORWARD(bf16, __nv_bfloat16)
BACKWARD(f32, float)
BACKWARD(f64, double)
