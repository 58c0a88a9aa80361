// Stochastic gradient descent.
#pragma once

#include "optimizer.cuh"

// The kernels' attributes, as sgd.rs writes them.
struct SgdRule { double momentum, decay; int64 nesterov; };

template <typename T> struct Sgd {
    T rate, scale, momentum, decay;
    bool nesterov;

    __device__ T gradient(T x, T g) const {
        g = g * scale;
        return decay == T(0) ? g : g + decay * x;
    }
    __device__ void operator()(T (&own)[1], T g) const { own[0] = own[0] - rate * gradient(own[0], g); }
    __device__ void operator()(T (&own)[2], T g) const {
        g = gradient(own[0], g);
        own[1] = own[1] * momentum + g;
        own[0] = own[0] - rate * (nesterov ? g + momentum * own[1] : own[1]);
    }
};

template <typename T, typename G>
__device__ void sgd(const T* x, const T* v, T* new_x, T* new_v, const G* gradient, const float* rate, const float* scale,
                    const uint8* update, const Range& range, const SgdRule& rule) {
    Sgd<T> step = {T(number_of(rate, 0.0)), T(number_of(scale, 1.0)), T(rule.momentum), T(rule.decay), rule.nesterov != 0};
    if (v) {
        update_all(Tensors<T, 2>{{x, v}, {new_x, new_v}}, gradient, range, is_set(update), step);
    } else {
        update_all(Tensors<T, 1>{{x}, {new_x}}, gradient, range, is_set(update), step);
    }
}

#define SGD_ENTRIES(NAME, T, G)                                                                                                   \
    extern "C" __global__ void sgd_##NAME(const T* x, const T* v, T* new_x, T* new_v, const G* gradient, const float* rate,       \
                                          const float* scale, const uint8* update, Range range, SgdRule rule) {                   \
        sgd(x, v, new_x, new_v, gradient, rate, scale, update, range, rule);                                                      \
    }
#define SGD(NAME, T) OF_GRADIENTS(SGD_ENTRIES, NAME, T)
