// Moves of one or several elements by their bytes.
#pragma once

#include "common.cuh"

template <typename T, typename Piece> __device__ inline void move_pieces(const void* x, void* y) {
    const Piece* from = static_cast<const Piece*>(x);
    Piece* to = static_cast<Piece*>(y);
#pragma unroll
    for (uint k = 0; k < sizeof(T) / sizeof(Piece); k++) to[k] = from[k];
}

// Tensors begin at any multiple of an element: where that is none of what is moved at once, it is moved in pieces.
template <typename T> __device__ inline void move_unit(const void* x, void* y) {
    uint64 at = reinterpret_cast<uint64>(x) | reinterpret_cast<uint64>(y);
    if (sizeof(T) == 1 || at % sizeof(T) == 0) {
        *static_cast<T*>(y) = *static_cast<const T*>(x);
        return;
    }
    if constexpr (sizeof(T) > 8) {
        if (at % 8 == 0) return move_pieces<T, uint2>(x, y);
    }
    if constexpr (sizeof(T) > 4) {
        if (at % 4 == 0) return move_pieces<T, uint>(x, y);
    }
    if constexpr (sizeof(T) > 2) {
        if (at % 2 == 0) return move_pieces<T, uint16>(x, y);
    }
    if constexpr (sizeof(T) > 1) {
        move_pieces<T, uint8>(x, y);
    }
}
