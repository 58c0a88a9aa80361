// Products with weights of 2, 4 or 8 bits that are read from their packed blocks: a row of codes for each column, blocks of which have a scale
// and a zero point.
//
// A code is put into the low bits of the float 2^23, from which 2^23 and the zero point are taken exactly. It stays where it is within 16
// bits, and so is 2^(bits * its number) times as large; the left side is as much smaller.

#pragma once

#include "codes.cuh"

struct Weights {
    int rows, columns, depth;
    // The number of bits, the steps of a block as a power of two, blocks of a column.
    int bits, log_block, blocks;
    int scale_kind;
    // The bytes of a column's zero points; of a type of floats where it is 0.
    int zero_row, zero_kind;
};

struct Inputs { const void *scales, *zeros, *bias; };
#define INPUTS const void *scales, const void *zeros, const void *bias
#define ALL_INPUTS {scales, zeros, bias}

constexpr float TWO_23 = 8388608.0f;
constexpr uint BITS_OF_TWO_23 = 0x4b000000u;

__device__ inline float number_of(uint code) { return __uint_as_float(code | BITS_OF_TWO_23) - TWO_23; }

__device__ inline float zero_point(const Weights& p, const void* zeros, int column, int block) {
    if (opaque(zeros == nullptr)) return (float)(1 << (p.bits - 1));
    if (opaque(p.zero_row == 0)) return float_at(zeros, p.zero_kind, column * p.blocks + block);
    int bit = block * p.bits;
    uint byte = static_cast<const uint8*>(zeros)[column * p.zero_row + bit / 8];
    return (float)(byte >> bit % 8 & ((1u << p.bits) - 1));
}

// A result with its bias.
template <typename T>
__device__ inline void write_sum(T* y, const Weights& p, const void* bias, int row, int column, float sum) {
    if (bias) sum += as_float(static_cast<const T*>(bias)[column]);
    y[(int64)row * p.columns + column] = from_float<T>(sum);
}
