// Elements as keys: whole numbers in the order of the elements.
#pragma once

#include "common.cuh"

enum Kind { F32, F16, BF16, F64, I8, I16, I32, I64, U8, U16, U32, U64 };

// Bits of floats in the order of their numbers: both zeros are one, and what is not a number is above all.
__device__ inline uint ordered(float x) {
    uint bits = __float_as_uint(x);
    if (x != x) return 0xffffffffu;
    if (x == 0.0f) return 0x80000000u;
    return bits >> 31 ? ~bits : bits ^ 0x80000000u;
}
__device__ inline uint64 ordered(double x) {
    uint64 bits = __double_as_longlong(x);
    if (x != x) return ~0ull;
    if (x == 0.0) return 1ull << 63;
    return bits >> 63 ? ~bits : bits ^ (1ull << 63);
}

__device__ inline uint narrow_key(const void* x, int kind, uint at) {
    switch (kind) {
    case F32: return ordered(static_cast<const float*>(x)[at]);
    case F16: return ordered(as_float(static_cast<const __half*>(x)[at]));
    case BF16: return ordered(as_float(static_cast<const __nv_bfloat16*>(x)[at]));
    case I8: return uint(static_cast<const int8*>(x)[at]) ^ 0x80000000u;
    case I16: return uint(static_cast<const short*>(x)[at]) ^ 0x80000000u;
    case I32: return static_cast<const uint*>(x)[at] ^ 0x80000000u;
    case U8: return static_cast<const uint8*>(x)[at];
    case U16: return static_cast<const uint16*>(x)[at];
    default: return static_cast<const uint*>(x)[at];
    }
}

__device__ inline uint64 wide_key(const void* x, int kind, uint at) {
    switch (kind) {
    case F64: return ordered(static_cast<const double*>(x)[at]);
    case I64: return static_cast<const uint64*>(x)[at] ^ (1ull << 63);
    default: return static_cast<const uint64*>(x)[at];
    }
}
