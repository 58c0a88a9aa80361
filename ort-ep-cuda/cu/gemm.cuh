// What products and convolutions share: four elements at a time, and what becomes of sums before they are written.
#pragma once

#include "packs.cuh"

// The activations of fused operators; gemm.rs has the same numbers.
enum Activation {
    NONE, RELU, CLIP, LEAKY_RELU, THRESHOLDED_RELU, HARD_SIGMOID, HARD_SWISH, SOFTSIGN,
    // From here on each takes many instructions.
    CELU, ELU, FAST_GELU, GELU, MISH, SELU, SIGMOID, SOFTPLUS, SWISH, TANH,
};

// How a result is made of its sum: activation(alpha * sum + beta * c + d).
struct Finish {
    int activation;
    float alpha, beta, first, second;
};

// What the sums of products of a type are: of halves in float32.
template <typename T> struct SumOf { typedef T Type; };
template <> struct SumOf<__half> { typedef float Type; };
template <> struct SumOf<__nv_bfloat16> { typedef float Type; };

// An element as a sum, and back.
template <typename T> __device__ inline typename SumOf<T>::Type to_sum(T x) { return x; }
template <> __device__ inline float to_sum<__half>(__half x) { return __half2float(x); }
template <> __device__ inline float to_sum<__nv_bfloat16>(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ inline T of_sum(typename SumOf<T>::Type x) { return x; }
template <> __device__ inline __half of_sum<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 of_sum<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// The activations of a few instructions; a value that is not a number stays one.
__device__ inline float activate_cheap(float x, int activation, float first, float second) {
    switch (activation) {
    case RELU: return x < 0.0f ? 0.0f : x;
    case CLIP: {
        float least = x < first ? first : x;
        return least > second ? second : least;
    }
    case LEAKY_RELU: return x < 0.0f ? first * x : x;
    case THRESHOLDED_RELU: return x <= first ? 0.0f : x;
    case HARD_SIGMOID: {
        float line = first * x + second;
        line = line < 0.0f ? 0.0f : line;
        return line > 1.0f ? 1.0f : line;
    }
    case HARD_SWISH: {
        float line = x * (1.0f / 6.0f) + 0.5f;
        line = line < 0.0f ? 0.0f : line;
        return x * (line > 1.0f ? 1.0f : line);
    }
    case SOFTSIGN: return x / (1.0f + fabsf(x));
    default: return x;
    }
}

__device__ inline float activate(float x, int activation, float first, float second) {
    switch (activation) {
    case CELU: return x < 0.0f ? first * expm1f(x / first) : x;
    case ELU: return x < 0.0f ? first * expm1f(x) : x;
    case FAST_GELU: return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
    case MISH: return x * tanhf(softplus(x));
    case SELU: return second * (x <= 0.0f ? first * expm1f(x) : x);
    case SIGMOID: return sigmoid(x);
    case SOFTPLUS: return x != x ? x : softplus(x);
    case SWISH: return x * sigmoid(first * x);
    case TANH: return tanhf(x);
    default: return activate_cheap(x, activation, first, second);
    }
}

template <int ACTIVATION, int COUNT> __device__ inline void activate_by(float (&sums)[COUNT], const Finish& finish) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] = activate(sums[i], ACTIVATION, finish.first, finish.second);
}
// Applies an activation to some sums of a thread. The usual ones are chosen once for all sums, as the choice takes longer than most of them, so that
// sums do not wait for each other. The code of the others is there once: the sums take turns in one register, as an index into registers must be
// known when it is compiled.
template <int COUNT> __device__ inline void activate_all(float (&sums)[COUNT], const Finish& finish) {
    if (finish.activation == NONE) return;
    if (finish.activation == RELU) return activate_by<RELU>(sums, finish);
    if (COUNT > 1) {
        switch (finish.activation) {
        case CLIP: return activate_by<CLIP>(sums, finish);
        case LEAKY_RELU: return activate_by<LEAKY_RELU>(sums, finish);
        case HARD_SWISH: return activate_by<HARD_SWISH>(sums, finish);
        case GELU: return activate_by<GELU>(sums, finish);
        case FAST_GELU: return activate_by<FAST_GELU>(sums, finish);
        case SIGMOID: return activate_by<SIGMOID>(sums, finish);
        case SWISH: return activate_by<SWISH>(sums, finish);
        }
    }
#pragma unroll 1
    for (int turn = 0; turn < COUNT; turn++) {
        float value = activate(sums[0], finish.activation, finish.first, finish.second);
#pragma unroll
        for (int next = 1; next < COUNT; next++) sums[next - 1] = sums[next];
        sums[COUNT - 1] = value;
    }
}
// Fused operators are of float32 and halves.
template <typename Sum, int COUNT> __device__ inline void activate_all(Sum (&)[COUNT], const Finish&) {}

// The next rows of sums move up, so that a loop over rows has its code once.
template <typename Sum, int ROWS, int COLUMNS> __device__ inline void next_row(Sum (&sums)[ROWS][COLUMNS]) {
#pragma unroll
    for (int row = 1; row < ROWS; row++) {
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) sums[row - 1][column] = sums[row][column];
    }
}
