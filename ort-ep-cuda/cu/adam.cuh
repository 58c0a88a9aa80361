// Adam in all of its forms.
#pragma once

#include "optimizer.cuh"

// What a form leaves out is 1, or 0 where it is added.
enum Mode { TORCH, HUGGING_FACE, ADAM };
struct AdamRule { double beta1, beta2, epsilon, decay; int mode, corrects; };

template <typename T> struct Adam {
    T scale, gradient_decay, kept_before, kept_after, beta1, beta2, rest1, rest2, bias_root, epsilon, size;

    __device__ void set(const AdamRule& rule, double rate, double by, double bias1, double bias2) {
        double kept = 1.0 - rate * rule.decay;
        scale = T(by);
        gradient_decay = T(rule.mode == ADAM ? rule.decay : 0.0);
        kept_before = T(rule.mode == TORCH ? kept : 1.0);
        kept_after = T(rule.mode == HUGGING_FACE ? kept : 1.0);
        beta1 = T(rule.beta1), beta2 = T(rule.beta2), rest1 = T(1.0 - rule.beta1), rest2 = T(1.0 - rule.beta2);
        bias_root = T(rule.mode == HUGGING_FACE ? 1.0 : sqrt(bias2));
        size = T(rule.mode == HUGGING_FACE ? rate / bias1 * sqrt(bias2) : rate / bias1);
        epsilon = T(rule.epsilon);
    }
    // The first moment goes from the nearer end.
    __device__ void moments(T& m, T& v, T g) const {
        T way = g - m;
        m = beta1 > rest1 ? m + rest1 * way : g - way * beta1;
        v = v * beta2 + rest2 * g * g;
    }
    __device__ void operator()(T (&own)[3], T g) const {
        g = g * scale;
        if (gradient_decay != T(0)) g = g + gradient_decay * own[0];
        moments(own[1], own[2], g);
        T denominator = root(own[2]) / bias_root + epsilon;
        own[0] = (own[0] * kept_before - size * own[1] / denominator) * kept_after;
    }
};

// One minus what is left of a moment's beginning.
__device__ inline double bias_of(double beta, const AdamRule& rule, const int64* step) {
    return rule.corrects ? 1.0 - pow(beta, double(*step)) : 1.0;
}

// The factors of a step, in the memory that a block shares.
template <typename T>
__device__ inline void share(Adam<T>& step, const AdamRule& rule, const float* rate, const float* scale, const int64* number) {
    if (threadIdx.x == 0) {
        step.set(rule, number_of(rate, 0.0), number_of(scale, 1.0), bias_of(rule.beta1, rule, number), bias_of(rule.beta2, rule, number));
    }
    __syncthreads();
}

template <typename T, typename G>
__device__ void adam(const T* x, const T* m, const T* v, T* new_x, T* new_m, T* new_v, const G* gradient, const float* rate,
                     const float* scale, const uint8* update, const int64* number, const Range& range, const AdamRule& rule) {
    __shared__ Adam<T> step;
    share(step, rule, rate, scale, number);
    update_all(Tensors<T, 3>{{x, m, v}, {new_x, new_m, new_v}}, gradient, range, is_set(update), step);
}

#define ADAM_ENTRIES(NAME, T, G)                                                                                                  \
    extern "C" __global__ void adam_##NAME(const T* x, const T* m, const T* v, T* new_x, T* new_m, T* new_v, const G* gradient,   \
                                           const float* rate, const float* scale, const uint8* update, const int64* step,         \
                                           Range range, AdamRule rule) {                                                          \
        adam(x, m, v, new_x, new_m, new_v, gradient, rate, scale, update, step, range, rule);                                     \
    }
#define OF_ADAM(NAME, T) OF_GRADIENTS(ADAM_ENTRIES, NAME, T)
