// Quantized codes and their scales, of types that a kernel learns when it runs.
#pragma once

#include "common.cuh"

// The types of scales; `scale_tag` of type_tags.rs has the same numbers.
enum FloatKind { IS_FLOAT, IS_HALF, IS_BFLOAT };

// The same number, of which the compiler knows nothing. A branch on a kind that it knows is found in all turns of a loop that is unrolled,
// and would be made code of its own for each of all combinations.
__device__ inline int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ inline float float_at(const void* from, int kind, uint i) {
    kind = opaque(kind);
    if (kind == IS_HALF) return as_float(static_cast<const __half*>(from)[i]);
    if (kind == IS_BFLOAT) return as_float(static_cast<const __nv_bfloat16*>(from)[i]);
    return static_cast<const float*>(from)[i];
}

// A type of quantized values: its bits, and whether it has a sign. `quantized_tag` of type_tags.rs has the same numbers.
constexpr int HAS_SIGN = 64;
__device__ inline int bits_of(int kind) { return kind & (HAS_SIGN - 1); }

// A number of fewer than 32 bits whose highest one may be its sign.
__device__ inline int with_sign(uint code, int kind) {
    int unused = 32 - bits_of(kind);
    return kind & HAS_SIGN ? (int)(code << unused) >> unused : (int)code;
}

__device__ inline int code_at(const void* from, int kind, uint i) {
    kind = opaque(kind);
    int bits = bits_of(kind);
    if (bits == 8) return with_sign(static_cast<const uint8*>(from)[i], kind);
    if (bits == 16) return with_sign(static_cast<const uint16*>(from)[i], kind);
    if (bits == 32) return static_cast<const int*>(from)[i];
    uint per_byte = 8 / bits;
    uint byte = static_cast<const uint8*>(from)[i / per_byte];
    return with_sign(byte >> (i % per_byte * bits) & ((1u << bits) - 1), kind);
}

// A whole number as a code; what is not a number becomes 0.
__device__ inline int nearest_code(float rounded, int kind) {
    if (rounded != rounded) return 0;
    float count = (float)(1u << bits_of(kind));
    float least = kind & HAS_SIGN ? count * -0.5f : 0.0f;
    return (int)fminf(fmaxf(rounded, least), least + count - 1.0f);
}

__device__ inline bool is_multiple(const void* at, uint bytes) { return (uint64)at % bytes == 0; }

// Up to four elements that lie next to each other, at once where they may be.
template <typename T> struct alignas(sizeof(T) * 4) Together { T of[4]; };

template <typename T> __device__ inline void read_four(const T* from, uint used, float (&to)[4]) {
    if (used == 4 && is_multiple(from, sizeof(Together<T>))) {
        Together<T> all = *(const Together<T>*)from;
#pragma unroll
        for (int n = 0; n < 4; n++) to[n] = as_float(all.of[n]);
        return;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) to[n] = n < used ? as_float(from[n]) : 0.0f;
}

template <typename T> __device__ inline void write_four(T* to, uint used, const float (&from)[4]) {
    Together<T> all;
#pragma unroll
    for (int n = 0; n < 4; n++) all.of[n] = from_float<T>(from[n]);
    if (used == 4 && is_multiple(to, sizeof(Together<T>))) {
        *(Together<T>*)to = all;
        return;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (n < used) to[n] = all.of[n];
    }
}
