// Reductions of lines to one number each, and the places of their extremes.
#include "lines.cuh"

enum Fold { SUM, MEAN, MAX, MIN, PROD, L1, L2, LOG_SUM, SUM_SQUARE, LOG_SUM_EXP };

template <typename V> __device__ inline V map_of(uint fold, V v) {
    if (fold == L1) return v < V(0) ? -v : v;
    return fold == L2 || fold == SUM_SQUARE ? v * v : v;
}

template <typename V> __device__ inline V join_of(uint fold, V a, V b) {
    return fold == MAX ? greater(a, b) : fold == MIN ? lesser(a, b) : fold == PROD ? a * b : a + b;
}

__device__ inline float read(float x) { return x; }
__device__ inline float read(__half x) { return as_float(x); }
__device__ inline float read(__nv_bfloat16 x) { return as_float(x); }
__device__ inline int read(int x) { return x; }
__device__ inline int64 read(int64 x) { return x; }

template <typename T, typename V> __device__ inline T write(V v) { return v; }
template <> __device__ inline __half write<__half, float>(float v) { return from_float<__half>(v); }
template <> __device__ inline __nv_bfloat16 write<__nv_bfloat16, float>(float v) {
    return from_float<__nv_bfloat16>(v);
}

template <typename V> struct Extremes;
template <> struct Extremes<float> {
    static __device__ float least() { return -infinity(); }
    static __device__ float greatest() { return infinity(); }
};
template <> struct Extremes<int> {
    static __device__ int least() { return 0x80000000; }
    static __device__ int greatest() { return 0x7fffffff; }
};
template <> struct Extremes<int64> {
    static __device__ int64 least() { return 0x8000000000000000ll; }
    static __device__ int64 greatest() { return 0x7fffffffffffffffll; }
};

template <typename V> __device__ inline V first_of(uint fold) {
    return fold == MAX ? Extremes<V>::least() : fold == MIN ? Extremes<V>::greatest() : V(fold == PROD ? 1 : 0);
}

// What is written of the whole of a line.
template <typename V> __device__ inline V finished(uint fold, V all, uint combined, V shift) {
    if constexpr (V(0.5) != V(0)) {
        if (fold == MEAN) return all / float(combined);
        if (fold == L2) return sqrtf(all);
        if (fold == LOG_SUM || fold == LOG_SUM_EXP) return logf(all) + shift;
    }
    return all;
}

// Lines are cut in `gridDim.y` pieces where `pieces` is given, which gets what each is; `join_pieces` does the rest.
template <int TEAM, typename T, typename V>
__device__ void reduce(const T* x, T* y, V* pieces, const Lines& lines, uint fold) {
    uint line = line_of_team<TEAM>(), lane = lane_of_team<TEAM>(), begin = begin_of(lines, line);
    uint each = (lines.length + gridDim.y - 1) / gridDim.y, first = blockIdx.y * each;
    uint end = line < lines.count ? min(first + each, lines.length) : 0;
    V shift = V(0);
    if constexpr (V(0.5) != V(0)) {
        if (fold == LOG_SUM_EXP) {
            V top = Extremes<V>::least();
            for (uint r = lane; r < end; r += TEAM) top = greater(top, read(x[begin + along(lines, r)]));
            top = joined<TEAM>(top, [](V a, V b) { return greater(a, b); });
            shift = isinf(top) ? V(0) : top;
        }
    }
    V all = first_of<V>(fold);
    for (uint r = first + lane; r < end; r += TEAM) {
        V v = read(x[begin + along(lines, r)]);
        if constexpr (V(0.5) != V(0)) {
            if (fold == LOG_SUM_EXP) v = expf(v - shift);
        }
        all = join_of(fold, all, map_of(fold, v));
    }
    all = joined<TEAM>(all, [fold](V a, V b) { return join_of(fold, a, b); });
    if (lane != 0 || line >= lines.count) return;
    if (pieces) {
        pieces[line * gridDim.y + blockIdx.y] = all;
    } else {
        y[line] = write<T, V>(finished(fold, all, lines.length, shift));
    }
}

// Joins the pieces of each line: a warp for one. `combined` elements were one in the end.
template <typename T, typename V>
__device__ void join_pieces(const V* pieces, T* y, uint count, uint splits, uint combined, uint fold) {
    uint line = line_of_team<32>(), lane = lane_of_team<32>();
    V all = first_of<V>(fold);
    for (uint r = lane; r < splits && line < count; r += 32) all = join_of(fold, all, pieces[line * splits + r]);
    all = joined<32>(all, [fold](V a, V b) { return join_of(fold, a, b); });
    if (lane == 0 && line < count) y[line] = write<T, V>(finished(fold, all, combined, V(0)));
}

// An element, and where it is in its line.
template <typename V> struct Best {
    V value;
    uint place;
};

template <typename V> __device__ inline Best<V> swapped(Best<V> best, int bits) {
    return {swapped(best.value, bits), swapped(best.place, bits)};
}

// The better of two: the first of its kind, or the last. What is not a number is more than any number, as in NumPy.
template <typename V> __device__ inline Best<V> better(Best<V> a, Best<V> b, bool greatest, bool last) {
    constexpr uint NOWHERE = 0xffffffffu;
    if (a.place == NOWHERE) return b;
    if (b.place == NOWHERE) return a;
    bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    bool later = last ? b.place > a.place : b.place < a.place;
    bool take = greatest ? b.value > a.value : b.value < a.value;
    if (a_nan != b_nan) {
        take = b_nan;
    } else if (a_nan || a.value == b.value) {
        take = later;
    }
    return take ? b : a;
}

template <int TEAM, typename T>
__device__ void arg(const T* x, int64* y, const Lines& lines, bool greatest, bool last) {
    using V = decltype(read(T()));
    uint line = line_of_team<TEAM>(), lane = lane_of_team<TEAM>(), begin = begin_of(lines, line);
    uint end = line < lines.count ? lines.length : 0;
    Best<V> best = {V(0), 0xffffffffu};
    for (uint r = lane; r < end; r += TEAM) {
        best = better(best, Best<V>{read(x[begin + along(lines, r)]), r}, greatest, last);
    }
    best = joined<TEAM>(best, [=](Best<V> a, Best<V> b) { return better(a, b, greatest, last); });
    if (lane == 0 && line < lines.count) y[line] = best.place;
}

#define ENTRY(TEAM, NAME, T, V)                                                                         \
    extern "C" __global__ void reduce_##NAME##_##TEAM(const T* x, T* y, V* pieces, Lines lines,          \
                                                      uint fold) {                                       \
        reduce<TEAM, T, V>(x, y, pieces, lines, fold);                                                   \
    }                                                                                                    \
    extern "C" __global__ void arg_##NAME##_##TEAM(const T* x, int64* y, Lines lines, uint greatest,     \
                                                   uint last) {                                          \
        arg<TEAM, T>(x, y, lines, greatest, last);                                                       \
    }
#define ENTRIES(NAME, T, V)                                                                             \
    ENTRY(1, NAME, T, V) ENTRY(8, NAME, T, V) ENTRY(32, NAME, T, V) ENTRY(256, NAME, T, V)               \
    extern "C" __global__ void join_pieces_##NAME(const V* pieces, T* y, uint count, uint splits,        \
                                                  uint combined, uint fold) {                            \
        join_pieces<T, V>(pieces, y, count, splits, combined, fold);                                     \
    }

ENTRIES(f32, float, float)
ENTRIES(f16, __half, float)
ENTRIES(bf16, __nv_bfloat16, float)
ENTRIES(i32, int, int)
ENTRIES(i64, int64, int64)
