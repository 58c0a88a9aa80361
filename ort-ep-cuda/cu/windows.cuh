// Windows of convolutions over up to three axes. Axes in front that the image does not have are of size 1.
#pragma once

#include "packs.cuh"

struct Convolution {
    int batch, groups, channels, filters;  // channels and filters of a group
    int input[3], output[3], kernel[3], strides[3], dilations[3], pads[3];
    // Tiles of a side, and parts that sums are computed in.
    int tiles_down, tiles_across, parts;
};

__device__ inline int volume(const int (&sizes)[3]) { return sizes[0] * sizes[1] * sizes[2]; }

// The coordinates of a place, the last axis fastest.
__device__ inline void unflat(int place, const int (&sizes)[3], int (&to)[3]) {
    to[2] = place % sizes[2];
    place /= sizes[2];
    to[1] = place % sizes[1];
    to[0] = place / sizes[1];
}

// The taps of a window along an axis that meet the image.
template <typename Windows>
__device__ inline void taps_inside(const Windows& windows, int axis, int origin, int& first, int& end) {
    int step = windows.dilations[axis];
    first = origin < 0 ? (-origin + step - 1) / step : 0;
    end = min(windows.kernel[axis], windows.input[axis] > origin ? (windows.input[axis] - origin + step - 1) / step : 0);
}
