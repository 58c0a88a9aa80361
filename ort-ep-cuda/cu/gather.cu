// Elements that are found by indices, moved as they are: entries end in b and the bytes of what a thread moves, which are several elements
// where they stay neighbours. Reads outside take the nearest element that there is, writes outside are left out.
#include "indices.cuh"
#include "units.cuh"

// The index that is nearest among those there are.
__device__ inline uint clamped(int64 index, uint size) {
    return index < 0 ? 0 : index >= size ? size - 1 : static_cast<uint>(index);
}

template <typename T>
__device__ inline void gather(const T* x, const void* indices, T* y, uint wide, uint count, uint size, uint run,
                              uint picks) {
    uint i = thread_index();
    if (i >= count) return;
    uint row = i / run;
    uint outer = row / picks;
    uint place = clamped(index_at(indices, row - outer * picks, wide, size), size);
    move_unit<T>(x + ((outer * size + place) * run + (i - row * run)), y + i);
}

#define GATHER(suffix, T)                                                                                           \
    extern "C" __global__ void gather_##suffix(const T* x, const void* indices, T* y, uint wide, uint count,        \
                                               uint size, uint run, uint picks) {                                   \
        gather<T>(x, indices, y, wide, count, size, run, picks);                                                    \
    }

#define GATHER_ELEMENTS(suffix, T)                                                                                  \
    extern "C" __global__ void gather_elements_##suffix(const T* x, const void* indices, T* y, uint wide,           \
                                                        uint count, uint size, uint step, uint axes, Axes sizes,    \
                                                        Axes steps) {                                               \
        uint i = thread_index();                                                                                    \
        if (i >= count) return;                                                                                     \
        y[i] = x[place_at(i, axes, sizes, steps) + clamped(index_at(indices, i, wide, size), size) * step];         \
    }

template <typename T>
__device__ inline void gather_nd(const T* x, const void* indices, T* y, uint wide, uint count, uint run,
                                 uint per_batch, uint slots, uint depth, const Axes& sizes, const Axes& steps) {
    uint i = thread_index();
    if (i >= count) return;
    uint tuple = i / run;
    uint slot = tuple / per_batch * slots;
#pragma unroll
    for (int k = 0; k < MOST_AXES; k++) {
        if (k < depth) {
            uint size = sizes.of[k];
            slot += clamped(index_at(indices, tuple * depth + k, wide, size), size) * steps.of[k];
        }
    }
    move_unit<T>(x + (slot * run + (i - tuple * run)), y + i);
}

#define GATHER_ND(suffix, T)                                                                                        \
    extern "C" __global__ void gather_nd_##suffix(const T* x, const void* indices, T* y, uint wide, uint count,     \
                                                  uint run, uint per_batch, uint slots, uint depth, Axes sizes,     \
                                                  Axes steps) {                                                     \
        gather_nd<T>(x, indices, y, wide, count, run, per_batch, slots, depth, sizes, steps);                       \
    }

#define ONE_HOT(suffix, T)                                                                                          \
    extern "C" __global__ void one_hot_##suffix(const void* indices, const T* values, T* y, uint wide, uint count,  \
                                                uint depth, uint inner) {                                           \
        uint i = thread_index();                                                                                    \
        if (i >= count) return;                                                                                     \
        uint row = i / inner;                                                                                       \
        uint outer = row / depth;                                                                                   \
        int64 index = index_at(indices, outer * inner + (i - row * inner), wide, depth);                            \
        y[i] = values[index == row - outer * depth ? 1 : 0];                                                        \
    }

// The owner of a slot is the last update that goes there, numbered from 1 on. Slots that nothing goes to are never read.
extern "C" __global__ void scatter_clear(const void* indices, uint* owners, uint tuples, Target to) {
    uint t = thread_index();
    if (t >= tuples) return;
    uint slot = slot_of(indices, t, to);
    if (slot != NONE) owners[slot] = 0;
}

extern "C" __global__ void scatter_mark(const void* indices, uint* owners, uint tuples, Target to) {
    uint t = thread_index();
    if (t >= tuples) return;
    uint slot = slot_of(indices, t, to);
    if (slot != NONE) atomicMax(owners + slot, t + 1);
}

// Without owners there is one update at most for each slot.
template <typename T>
__device__ inline void scatter(const void* indices, const uint* owners, const T* updates, T* y, uint count, uint run,
                               const Target& to) {
    uint i = thread_index();
    if (i >= count) return;
    uint t = i / run;
    uint slot = slot_of(indices, t, to);
    if (slot == NONE || (owners != nullptr && owners[slot] != t + 1)) return;
    move_unit<T>(updates + i, y + (slot * run + (i - t * run)));
}

#define SCATTER(suffix, T)                                                                                          \
    extern "C" __global__ void scatter_##suffix(const void* indices, const uint* owners, const T* updates, T* y,    \
                                                uint count, uint run, Target to) {                                  \
        scatter<T>(indices, owners, updates, y, count, run, to);                                                    \
    }

// Each batch of a cache goes on at a place of its own; without indices at the first.
template <typename T>
__device__ inline void tensor_scatter(const T* updates, const int64* starts, T* y, uint count, uint run, uint length,
                                      uint size, uint per_batch, uint circular) {
    uint i = thread_index();
    if (i >= count) return;
    uint row = i / run;
    uint prefix = row / length;
    int64 start = starts == nullptr ? 0 : starts[prefix / per_batch];
    if (circular != 0) {
        start %= static_cast<int64>(size);
        if (start < 0) start += size;
    } else if (start < 0 || start > static_cast<int64>(size) - length) {
        return;
    }
    uint place = static_cast<uint>(start) + (row - prefix * length);
    if (place >= size) place -= size;
    move_unit<T>(updates + i, y + ((prefix * size + place) * run + (i - row * run)));
}

#define TENSOR_SCATTER(suffix, T)                                                                                   \
    extern "C" __global__ void tensor_scatter_##suffix(const T* updates, const int64* starts, T* y, uint count,     \
                                                       uint run, uint length, uint size, uint per_batch,            \
                                                       uint circular) {                                             \
        tensor_scatter<T>(updates, starts, y, count, run, length, size, per_batch, circular);                       \
    }

#define ELEMENTS(suffix, T)                                                                                         \
    GATHER_ELEMENTS(suffix, T)                                                                                      \
    ONE_HOT(suffix, T)
#define UNITS(suffix, T)                                                                                            \
    GATHER(suffix, T)                                                                                               \
    GATHER_ND(suffix, T)                                                                                            \
    SCATTER(suffix, T)                                                                                              \
    TENSOR_SCATTER(suffix, T)

ELEMENTS(b1, uint8)
ELEMENTS(b2, unsigned short)
ELEMENTS(b4, uint)
ELEMENTS(b8, uint64)
UNITS(b1, uint8)
UNITS(b2, unsigned short)
UNITS(b4, uint)
UNITS(b8, uint64)
UNITS(b16, uint4)
