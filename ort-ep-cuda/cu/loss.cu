// Losses of classification: the logarithm of the softmax of each sample's scores, and what the samples have together.
#include "lines.cuh"

// Scores of (images, classes, places): samples are images and places, of which those of an image lie side by side.
struct Loss {
    uint samples, classes, places, wide, scores, ignores;
    int64 ignored;
};

template <int TEAM, typename T>
__device__ void loss_each(const T* x, const void* labels, const T* weights, T* logarithms, float* losses, float* shares, T* each, const Loss& p) {
    uint sample = line_of_team<TEAM>(), lane = lane_of_team<TEAM>();
    bool there = sample < p.samples;
    uint begin = there ? sample / p.places * p.classes * p.places + sample % p.places : 0, end = there ? p.classes : 0;
    float denominator = 0.0f;
    if (p.scores) {
        float top = -infinity(), sum = 0.0f;
        for (uint c = lane; c < end; c += TEAM) top = greater(top, as_float(x[begin + c * p.places]));
        top = joined<TEAM>(top, [](float a, float b) { return greater(a, b); });
        float base = isinf(top) ? 0.0f : top;
        for (uint c = lane; c < end; c += TEAM) sum += expf(as_float(x[begin + c * p.places]) - base);
        denominator = base + logf(joined<TEAM>(sum, [](float a, float b) { return a + b; }));
        for (uint c = lane; logarithms && c < end; c += TEAM) {
            uint at = begin + c * p.places;
            logarithms[at] = from_float<T>(as_float(x[at]) - denominator);
        }
    }
    if (!there || lane != 0) return;
    int64 label = p.wide ? ((const int64*)labels)[sample] : (int64)((const int*)labels)[sample];
    float loss = 0.0f, share = 0.0f;
    if (!p.ignores || label != p.ignored) {
        // The device refuses no label: the nearest class counts.
        uint own = (uint)min(max(label, (int64)0), (int64)p.classes - 1);
        share = weights ? as_float(weights[own]) : 1.0f;
        loss = share * (denominator - as_float(x[begin + own * p.places]));
    }
    if (each) each[sample] = from_float<T>(loss);
    if (losses) losses[sample] = loss, shares[sample] = share;
}

// The sum of all losses, or their mean by what they weigh, by one block, in doubles.
template <typename T> __device__ void loss_whole(const float* losses, const float* shares, T* y, uint samples, uint is_mean) {
    double loss = 0.0, share = 0.0;
    for (uint sample = threadIdx.x; sample < samples; sample += 256) loss += losses[sample], share += shares[sample];
    auto add = [](double a, double b) { return a + b; };
    loss = joined<256>(loss, add), share = joined<256>(share, add);
    if (threadIdx.x == 0) *y = from_float<T>(float(is_mean ? loss / share : loss));
}

#define EACH(TEAM, NAME, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                   \
        loss_each_##NAME##_##TEAM(const T* x, const void* labels, const T* weights, T* logarithms, float* losses,       \
                                  float* shares, T* each, Loss p) {                                                     \
        loss_each<TEAM>(x, labels, weights, logarithms, losses, shares, each, p);                                       \
    }
#define ENTRIES(NAME, T)                                                                                                \
    EACH(1, NAME, T) EACH(8, NAME, T) EACH(32, NAME, T) EACH(256, NAME, T)                                              \
    extern "C" __global__ void loss_whole_##NAME(const float* losses, const float* shares, T* y, uint samples,          \
                                                 uint is_mean) {                                                        \
        loss_whole(losses, shares, y, samples, is_mean);                                                                \
    }

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
