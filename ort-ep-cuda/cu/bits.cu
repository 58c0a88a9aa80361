// Functions of the bits of integers, by their bytes. Inputs broadcast.
#include "common.cuh"

enum Function { AND, OR, XOR, NOT, LEFT, RIGHT, RIGHT_SIGNED };

struct Walk {
    int rank;
    Axes sizes, a, b;
};

// Zero fill to the left, and the sign to the right where there is one, also past the width. A count below zero is past it.
template <typename T> __device__ inline T shifted(T a, T b, int function) {
    constexpr uint width = 8 * sizeof(T);
    T sign = function == RIGHT_SIGNED && a >> (width - 1) ? T(~T(0)) : T(0);
    if (b >= width) return function == LEFT ? T(0) : sign;
    if (function == LEFT) return T(a << b);
    return T(a >> b | (b > 0 ? T(sign << (width - b)) : T(0)));
}

template <typename T> __device__ inline void bits(const T* x, const T* other, T* y, const Walk& p, int function, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    uint rest = index, at_a = 0, at_b = 0;
#pragma unroll
    for (int axis = MOST_AXES - 1; axis >= 0; axis--) {
        if (axis < p.rank) {
            uint size = p.sizes.of[axis], left = rest / size, place = axis > 0 ? rest - left * size : rest;
            rest = left;
            at_a += place * p.a.of[axis];
            at_b += place * p.b.of[axis];
        }
    }
    T a = x[at_a], b = other ? other[at_b] : T(0);
    switch (function) {
    case AND: a = a & b; break;
    case OR: a = a | b; break;
    case XOR: a = a ^ b; break;
    case NOT: a = ~a; break;
    default: a = shifted<T>(a, b, function);
    }
    y[index] = a;
}

#define BITS(suffix, T)                                                                                             \
    extern "C" __global__ void bits_##suffix(const T* x, const T* other, T* y, Walk p, int function, uint count) {  \
        bits<T>(x, other, y, p, function, count);                                                                   \
    }

BITS(b1, uint8)
BITS(b2, uint16)
BITS(b4, uint)
BITS(b8, uint64)
