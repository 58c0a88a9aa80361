// Numbers to codes and back, with scales and zero points.
//
// `Codes` says what codes are: `nearest` makes one of a quotient and a zero point, `number` a number of a code, and `number_at` one of an element.
#pragma once

#include "codes.cuh"

// Which scale belongs to an element: a tensor has so many places of an axis, each of `inner` elements, which blocks divide. The steps are those
// of scales from one element to the next, from block to block, and from one such axis to the next.
struct Scales {
    uint inner, axis, block, inner_step, block_step, axis_step;
    int scale_kind, zero_kind;
};

// The scale and zero point of one element after the other.
template <typename Codes> struct ScaleWalk {
    const Scales& p;
    const void *scales, *zeros;
    uint outer, place, inside;
    float scale, zero;

    __device__ ScaleWalk(const Scales& p, const void* scales, const void* zeros, uint first)
        : p(p), scales(scales), zeros(zeros), outer(first / p.inner / p.axis), place(first / p.inner % p.axis),
          inside(first % p.inner) {}

    __device__ void next() {
        uint at = outer * p.axis_step + place / p.block * p.block_step + inside * p.inner_step;
        scale = float_at(scales, p.scale_kind, at);
        zero = 0.0f;
        if (opaque(zeros != nullptr)) zero = Codes::number_at(zeros, p.zero_kind, at);
        inside++;
        place += inside == p.inner;
        inside = inside == p.inner ? 0 : inside;
        outer += place == p.axis;
        place = place == p.axis ? 0 : place;
    }
};

// Four codes from a place that is a multiple of four.
__device__ inline void write_codes(uint8* y, int kind, uint first, uint used, const int (&codes)[4]) {
    int bits = bits_of(kind);
    if (bits < 8) {
        uint all = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n < used) all |= (codes[n] & ((1u << bits) - 1)) << n * bits;
        }
        uint8* to = y + first / (8 / bits);
        to[0] = all;
        if (used * bits > 8) to[1] = all >> 8;
        return;
    }
    if (bits == 8) {
        uint8* to = y + first;
        if (used == 4 && is_multiple(to, 4)) {
            uint all = (codes[0] & 255) | (codes[1] & 255) << 8 | (codes[2] & 255) << 16 | (uint)codes[3] << 24;
            *(uint*)to = all;
            return;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n < used) to[n] = codes[n];
        }
        return;
    }
    uint16* to = (uint16*)y + first;
    if (used == 4 && is_multiple(to, 8)) {
        *(uint2*)to = make_uint2((codes[0] & 0xffff) | (uint)codes[1] << 16, (codes[2] & 0xffff) | (uint)codes[3] << 16);
        return;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (n < used) to[n] = codes[n];
    }
}

// The type that numbers are rounded to around a division.
__device__ inline float narrow(float x, int precision) {
    if (precision == IS_HALF) return as_float(from_float<__half>(x));
    if (precision == IS_BFLOAT) return as_float(from_float<__nv_bfloat16>(x));
    return x;
}

template <typename Codes, typename T>
__device__ inline void quantize(const T* x, const void* scales, const void* zeros, uint8* y, const Scales& p, int kind,
                                int precision, uint count) {
    uint first = 4 * thread_index();
    if (first >= count) return;
    uint used = min(4u, count - first);
    float values[4];
    read_four(x + first, used, values);
    ScaleWalk<Codes> walk(p, scales, zeros, first);
    int codes[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        codes[n] = 0;
        if (opaque(n >= used)) continue;
        walk.next();
        float quotient = narrow(narrow(values[n], precision) / walk.scale, precision);
        codes[n] = Codes::nearest(quotient, walk.zero, kind);
    }
    write_codes(y, kind, first, used, codes);
}

template <typename Codes, typename T>
__device__ inline void dequantize(const uint8* x, const void* scales, const void* zeros, T* y, const Scales& p,
                                  int kind, uint count) {
    uint first = 4 * thread_index();
    if (first >= count) return;
    uint used = min(4u, count - first);
    float codes[4];
    if (bits_of(kind) == 8 && used == 4 && is_multiple(x, 4)) {
        uint all = *(const uint*)(x + first);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint code = all >> 8 * n & 255;
            codes[n] = Codes::number(code, kind);
        }
    } else {
#pragma unroll
        for (int n = 0; n < 4; n++) codes[n] = n < used ? Codes::number_at(x, kind, first + n) : 0.0f;
    }
    ScaleWalk<Codes> walk(p, scales, zeros, first);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (opaque(n >= used)) continue;
        walk.next();
        codes[n] = (codes[n] - walk.zero) * walk.scale;
    }
    write_four(y + first, used, codes);
}

#define QUANTIZE(prefix, suffix, type, codes)                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        prefix##quantize_##suffix(const type* x, const void* scales, const void* zeros, uint8* y, Scales p,    \
                                  int kind, int precision, uint exact, uint count) {                           \
        quantize<codes>(x, scales, zeros, y, p, kind, precision, count);                                       \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        prefix##dequantize_##suffix(const uint8* x, const void* scales, const void* zeros, type* y, Scales p,  \
                                    int kind, uint count) {                                                    \
        dequantize<codes>(x, scales, zeros, y, p, kind, count);                                                \
    }
