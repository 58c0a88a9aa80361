// Indices of elements and of slots.
#pragma once

#include "common.cuh"

// An index of 32 or, where they are wide, 64 bits, counted from the end where it is negative.
__device__ inline int64 index_at(const void* indices, uint i, uint wide, uint size) {
    int64 index = wide != 0 ? static_cast<const int64*>(indices)[i] : static_cast<const int*>(indices)[i];
    return index < 0 ? index + size : index;
}

// The place of the step i of a walk over one tensor.
__device__ inline uint place_at(uint i, uint axes, const Axes& sizes, const Axes& steps) {
    uint at = 0;
#pragma unroll
    for (int axis = MOST_AXES - 1; axis > 0; axis--) {
        if (axis < axes) {
            uint size = sizes.of[axis];
            uint rest = i / size;
            at += (i - rest * size) * steps.of[axis];
            i = rest;
        }
    }
    return at + i * steps.of[0];
}

constexpr uint NONE = 0xffffffffu;

// Where updates go. Of elements, each index is one along an axis of this size and step, from a place that a walk over the indices gives;
// else each tuple has an index for each axis.
struct Target {
    uint wide;
    uint elements;
    uint size;
    uint step;
    uint axes;
    Axes sizes;
    Axes steps;
};

// The slot that update t goes to; none where an index is out of range.
__device__ inline uint slot_of(const void* indices, uint t, const Target& to) {
    if (to.elements != 0) {
        int64 index = index_at(indices, t, to.wide, to.size);
        if (index < 0 || index >= to.size) return NONE;
        return place_at(t, to.axes, to.sizes, to.steps) + static_cast<uint>(index) * to.step;
    }
    uint slot = 0;
    bool inside = true;
#pragma unroll
    for (int k = 0; k < MOST_AXES; k++) {
        if (k < to.axes) {
            uint size = to.sizes.of[k];
            int64 index = index_at(indices, t * to.axes + k, to.wide, size);
            inside = inside && index >= 0 && index < size;
            slot += static_cast<uint>(index) * to.steps.of[k];
        }
    }
    return inside ? slot : NONE;
}
