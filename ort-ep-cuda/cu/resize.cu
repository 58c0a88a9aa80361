// Tensors of another size: the nearest element, or weighted sums of those around a place. A thread finds the places and weights of one
// element of a plane once, and takes the same element of several planes.
#include "units.cuh"

enum Transform { HALF_PIXEL, SYMMETRIC, PYTORCH, ALIGN_CORNERS, ASYMMETRIC, FOR_NEAREST, CROP };
enum Rounding { PREFER_FLOOR, PREFER_CEIL, FLOOR, CEIL };
enum Mode { NEAREST, LINEAR, CUBIC };

// An axis that changes. `inner` elements of the result, and `step` of the input, lie behind each of its places.
struct Slot {
    int from, to, inner, step;
    // Elements of the result for each of the input, and the result's size before it was cut.
    float scale, width;
    // The part that is read, from 0 to 1.
    float start, end;
    // The elements of a sum, from the one at or before the coordinate on, and how far its filter is stretched.
    int first, taps;
    float stretch;
};

// An axis that stays.
struct Stay {
    int size, inner, step;
};

struct Resize {
    Slot slots[MOST_AXES];
    Stay stays[MOST_AXES];
    int slot_count, stay_count;
    int transform, rounding, mode;
    // Whether what is outside weighs nothing, and whether sums are divided by what all of it weighs.
    int excludes, divides;
    float extrapolation, cubic;
    // Planes, those of a thread, and their elements.
    int planes, each, plane_from, plane_to;
};

// In single precision and without fused products, as on the host: which neighbour is the nearest at a tie depends on it.
__device__ inline float coordinate(const Resize& p, const Slot& s, uint index) {
    float x = index, last = s.from - 1;
    float centered = (x + 0.5f) / s.scale;
    switch (p.transform) {
    case HALF_PIXEL: return centered - 0.5f;
    case SYMMETRIC: {
        float offset = __fmul_rn(s.from * 0.5f, 1.0f - s.to / s.width);
        return __fadd_rn(offset, centered) - 0.5f;
    }
    case PYTORCH: return s.width > 1.0f ? centered - 0.5f : 0.0f;
    case ALIGN_CORNERS: return s.width == 1.0f ? 0.0f : x * last / (s.width - 1.0f);
    case ASYMMETRIC: return x / s.scale;
    case FOR_NEAREST: return centered;
    default:
        if (s.width > 1.0f) return __fadd_rn(__fmul_rn(s.start, last), x * (s.end - s.start) * last / (s.width - 1.0f));
        return 0.5f * (s.start + s.end) * last;
    }
}

__device__ inline int nearest(const Resize& p, const Slot& s, float x) {
    float rounded;
    switch (p.rounding) {
    case PREFER_FLOOR: rounded = ceilf(x - 0.5f); break;
    case PREFER_CEIL: rounded = floorf(x + 0.5f); break;
    case FLOOR: rounded = floorf(x); break;
    default: rounded = ceilf(x);
    }
    return min(int(fmaxf(rounded, 0.0f)), s.from - 1);
}

// An element of a plane, where it begins along the axes that stay, and the planes of a thread.
struct Own {
    uint element, place, plane, end;
};

__device__ inline bool find_own(const Resize& p, uint count, Own& own) {
    uint index = thread_index();
    if (index >= count) return false;
    own.plane = index / p.plane_to;
    own.element = index - own.plane * p.plane_to;
    own.plane *= p.each;
    own.end = min(own.plane + p.each, uint(p.planes));
    own.place = 0;
    for (int k = 0; k < p.stay_count; k++) {
        const Stay& s = p.stays[k];
        own.place += own.element / s.inner % s.size * s.step;
    }
    return true;
}

template <typename T> __device__ inline void resize_nearest(const T* x, T* y, const Resize& p, uint count) {
    Own own;
    if (!find_own(p, count, own)) return;
    uint place = own.place;
    for (int k = 0; k < p.slot_count; k++) {
        const Slot& s = p.slots[k];
        place += nearest(p, s, coordinate(p, s, own.element / s.inner % s.to)) * s.step;
    }
#pragma unroll 4
    for (uint plane = own.plane; plane < own.end; plane++) {
        move_unit<T>(x + (plane * p.plane_from + place), y + (plane * p.plane_to + own.element));
    }
}

// What an element so far from a coordinate weighs (cubic convolution: R. Keys, "Cubic Convolution Interpolation for Digital Image
// Processing", 1981).
__device__ inline float weight(const Resize& p, float distance) {
    float d = fabsf(distance), a = p.cubic;
    if (p.mode == NEAREST) return 1.0f;
    if (p.mode == LINEAR) return fmaxf(1.0f - d, 0.0f);
    if (d <= 1.0f) return ((a + 2.0f) * d - (a + 3.0f)) * d * d + 1.0f;
    return d < 2.0f ? ((a * d - 5.0f * a) * d + 8.0f * a) * d - 4.0f * a : 0.0f;
}

// Planes that a thread sums at once.
constexpr int ABREAST = 4;

struct Sums {
    float of[ABREAST], whole;
};

// Adds the elements along the axes from K on, one inside of the other; `bases` and `rests` are where sums begin and how far the coordinate
// is from there.
template <int K, int AXES, typename T>
__device__ inline void add(const T* x, const Resize& p, const int (&bases)[AXES], const float (&rests)[AXES], uint place,
                           float factor, uint planes, Sums& sums) {
    if constexpr (K == AXES) {
        sums.whole += factor;
#pragma unroll
        for (int q = 0; q < ABREAST; q++) {
            if (q < planes) sums.of[q] += factor * as_float(x[place + q * p.plane_from]);
        }
    } else {
        const Slot& s = p.slots[K];
        for (int n = 0; n < s.taps; n++) {
            int offset = s.first + n, tap = bases[K] + offset;
            if (p.excludes && (tap < 0 || tap >= s.from)) continue;
            float own = factor * weight(p, (offset - rests[K]) * s.stretch);
            uint at = place + min(max(tap, 0), s.from - 1) * s.step;
            add<K + 1, AXES>(x, p, bases, rests, at, own, planes, sums);
        }
    }
}

// Axes that are less than AXES are followed by some of one element.
template <int AXES, typename T> __device__ inline void resize_sums(const T* x, T* y, const Resize& p, uint count) {
    Own own;
    if (!find_own(p, count, own)) return;
    int bases[AXES];
    float rests[AXES];
    bool outside = false;
#pragma unroll
    for (int k = 0; k < AXES; k++) {
        const Slot& s = p.slots[k];
        bases[k] = 0;
        rests[k] = 0.0f;
        if (k >= p.slot_count) continue;
        float at = coordinate(p, s, own.element / s.inner % s.to);
        outside |= p.transform == CROP && (at < 0.0f || at > s.from - 1);
        // A stretched filter begins left of a coordinate, even of one exactly on an element.
        float base = p.mode == NEAREST ? nearest(p, s, at) : s.stretch < 1.0f ? ceilf(at) - 1.0f : floorf(at);
        bases[k] = int(base);
        rests[k] = at - base;
    }
    for (uint plane = own.plane; plane < own.end; plane += ABREAST) {
        uint planes = min(own.end - plane, uint(ABREAST));
        Sums sums = {};
        if (!outside) add<0, AXES>(x + plane * p.plane_from, p, bases, rests, own.place, 1.0f, planes, sums);
#pragma unroll
        for (int q = 0; q < ABREAST; q++) {
            float result = outside ? p.extrapolation : p.divides ? sums.of[q] / sums.whole : sums.of[q];
            if (q < planes) y[(plane + q) * p.plane_to + own.element] = from_float<T>(result);
        }
    }
}

#define NEAREST_OF(suffix, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        resize_nearest_##suffix(const T* x, T* y, Resize p, uint count) {                                           \
        resize_nearest<T>(x, y, p, count);                                                                          \
    }
#define SUMS(suffix, T, AXES)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        resize_##AXES##_##suffix(const T* x, T* y, Resize p, uint count) {                                          \
        resize_sums<AXES, T>(x, y, p, count);                                                                       \
    }
#define ALL_SUMS(suffix, T) SUMS(suffix, T, 2) SUMS(suffix, T, 3) SUMS(suffix, T, 8)

NEAREST_OF(b1, uint8)
NEAREST_OF(b2, uint16)
NEAREST_OF(b4, uint)
NEAREST_OF(b8, uint2)
NEAREST_OF(b16, uint4)
ALL_SUMS(f32, float)
ALL_SUMS(f16, __half)
ALL_SUMS(bf16, __nv_bfloat16)
