// LAMB.
#pragma once

#include "adam.cuh"

// Adam whose step is as long as the parameter allows: the moments, with the squares of the parameter and of its update, then the parameter.
template <typename T> struct Lamb {
    Adam<T> adam;
    T bias1, bias2, decay;

    __device__ T update(T x, T m, T v) const {
        T change = (m / bias1) / (root(v / bias2) + adam.epsilon);
        return decay == T(0) ? change : change + decay * x;
    }
};

template <typename T>
__device__ inline void share(Lamb<T>& step, const AdamRule& rule, const float* rate, const float* scale, const int64* number) {
    if (threadIdx.x == 0) {
        double bias1 = bias_of(rule.beta1, rule, number), bias2 = bias_of(rule.beta2, rule, number);
        step.adam.set(rule, number_of(rate, 0.0), number_of(scale, 1.0), bias1, bias2);
        step.bias1 = T(bias1), step.bias2 = T(bias2), step.decay = T(rule.decay);
    }
    __syncthreads();
}

template <typename T, typename G>
__device__ void lamb_moments(const T* x, const T* m, const T* v, T* new_m, T* new_v, const G* gradient, const float* scale,
                             const uint8* update, const int64* number, double* parts, uint count, const AdamRule& rule) {
    __shared__ Lamb<T> step;
    bool updates = is_set(update);
    if (updates) share(step, rule, nullptr, scale, number);
    double squares = 0.0, changes = 0.0;
#pragma unroll 4
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        T first = m[i], second = v[i];
        if (updates) {
            T own = x[i];
            step.adam.moments(first, second, T(wide(gradient[i])) * step.adam.scale);
            T change = step.update(own, first, second);
            squares += double(own) * double(own);
            changes += double(change) * double(change);
        }
        new_m[i] = first;
        new_v[i] = second;
    }
    write_parts(parts, squares, changes);
}

template <typename T>
__device__ void lamb_apply(const T* x, T* new_x, const T* m, const T* v, const float* rate, const uint8* update, const int64* number,
                           const double* parts, uint count, uint blocks, double most, const AdamRule& rule) {
    __shared__ Lamb<T> step;
    bool updates = is_set(update);
    if (!updates && x == new_x) return;
    T size = T(0);
    if (updates) {
        share(step, rule, rate, nullptr, number);
        double norm = sqrt(total(parts, blocks)), change = sqrt(total(parts + blocks, blocks));
        double ratio = norm == 0.0 || change == 0.0 ? 1.0 : fmin(norm / change, most);
        size = T(number_of(rate, 0.0) * ratio);
    }
#pragma unroll 4
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        T own = x[i];
        new_x[i] = updates ? own - size * step.update(own, m[i], v[i]) : own;
    }
}

#define LAMB_ENTRIES(NAME, T, G)                                                                                                  \
    extern "C" __global__ void lamb_moments_##NAME(const T* x, const T* m, const T* v, T* new_m, T* new_v, const G* gradient,     \
                                                   const float* scale, const uint8* update, const int64* step, double* parts,     \
                                                   uint count, AdamRule rule) {                                                   \
        lamb_moments(x, m, v, new_m, new_v, gradient, scale, update, step, parts, count, rule);                                   \
    }
#define OF_LAMB(NAME, T)                                                                                                          \
    extern "C" __global__ void lamb_apply_##NAME(const T* x, T* new_x, const T* m, const T* v, const float* rate,                 \
                                                 const uint8* update, const int64* step, const double* parts, uint count,         \
                                                 uint blocks, double most, AdamRule rule) {                                       \
        lamb_apply(x, new_x, m, v, rate, update, step, parts, count, blocks, most, rule);                                         \
    }                                                                                                                             \
    OF_GRADIENTS(LAMB_ENTRIES, NAME, T)
