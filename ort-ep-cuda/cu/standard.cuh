// The standard's optimizers, each element in doubles and rounded once: Adagrad, Adam and Momentum. `count` is that of the iterations before.
#pragma once

#include "optimizer.cuh"

enum Standard { ADAGRAD, STANDARD_ADAM, MOMENTUM, NESTEROV };
struct StandardRule { double norm, alpha, beta, epsilon, decay, norm_post; };

template <typename T>
__device__ void standard(const T* x, const T* gradient, const T* state1, const T* state2, T* new_x, T* new_state1, T* new_state2,
                         const void* rate_at, const int64* count_at, uint rate_is_double, uint kind, uint count, const StandardRule& rule) {
    __shared__ double factor;
    if (threadIdx.x == 0) {
        double rate = rate_is_double ? *(const double*)rate_at : double(*(const float*)rate_at), done = double(*count_at);
        if (kind == ADAGRAD) rate = rate / (1.0 + done * rule.decay);
        if (kind == STANDARD_ADAM && *count_at > 0) rate = rate * sqrt(1.0 - pow(rule.beta, done)) / (1.0 - pow(rule.alpha, done));
        factor = rate;
    }
    __syncthreads();
    double rate = factor, beta = *count_at > 0 ? rule.beta : 1.0;
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        double own = x[i], g = rule.norm * own + gradient[i], first = state1[i], second = state2 ? double(state2[i]) : 0.0;
        if (kind == ADAGRAD) {
            first = first + g * g;
            own = own - rate * g / (sqrt(first) + rule.epsilon);
        } else if (kind == STANDARD_ADAM) {
            first = rule.alpha * first + (1.0 - rule.alpha) * g;
            second = rule.beta * second + (1.0 - rule.beta) * g * g;
            own = (1.0 - rule.norm_post) * (own - rate * first / (sqrt(second) + rule.epsilon));
        } else {
            first = rule.alpha * first + beta * g;
            own = own - rate * (kind == NESTEROV ? g + rule.alpha * first : first);
        }
        if (new_x) new_x[i] = T(own);
        if (new_state1) new_state1[i] = T(first);
        if (new_state2) new_state2[i] = T(second);
    }
}

#define STANDARD(NAME, T)                                                                                                         \
    extern "C" __global__ void standard_##NAME(const T* x, const T* gradient, const T* state1, const T* state2, T* new_x,         \
                                               T* new_state1, T* new_state2, const void* rate, const int64* count,                \
                                               uint rate_is_double, uint kind, uint elements, StandardRule rule) {                \
        standard(x, gradient, state1, state2, new_x, new_state1, new_state2, rate, count, rate_is_double, kind, elements, rule);  \
    }
