// Reductions of lines to one number each.
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

template <int TEAM, typename T> __device__ void reduce(const T* x, T* y, const Lines& lines, uint fold) {
    using V = decltype(read(T()));
    uint line = line_of_team<TEAM>();
    if (line >= lines.count) return;
    uint lane = lane_of_team<TEAM>(), begin = begin_of(lines, line);
    V shift = V(0);
    if constexpr (sizeof(T) < 8 && V(0.5) != V(0)) {
        if (fold == LOG_SUM_EXP) {
            V top = Extremes<V>::least();
            for (uint r = lane; r < lines.length; r += TEAM) top = greater(top, read(x[begin + along(lines, r)]));
            top = joined<TEAM>(top, [](V a, V b) { return greater(a, b); });
            shift = isinf(top) ? V(0) : top;
        }
    }
    V all = first_of<V>(fold);
    for (uint r = lane; r < lines.length; r += TEAM) {
        V v = read(x[begin + along(lines, r)]);
        if constexpr (V(0.5) != V(0)) {
            if (fold == LOG_SUM_EXP) v = expf(v - shift);
        }
        all = join_of(fold, all, map_of(fold, v));
    }
    all = joined<TEAM>(all, [fold](V a, V b) { return join_of(fold, a, b); });
    if (lane != 0) return;
    if constexpr (V(0.5) != V(0)) {
        if (fold == MEAN) all /= float(lines.length);
        if (fold == L2) all = sqrtf(all);
        if (fold == LOG_SUM || fold == LOG_SUM_EXP) all = logf(all) + shift;
    }
    y[line] = write<T, V>(all);
}

#define ENTRY(TEAM, NAME, T)                                                                            \
    extern "C" __global__ void reduce_##NAME##_##TEAM(const T* x, T* y, Lines lines, uint fold) {        \
        reduce<TEAM, T>(x, y, lines, fold);                                                              \
    }
#define ENTRIES(NAME, T) ENTRY(1, NAME, T) ENTRY(32, NAME, T) ENTRY(256, NAME, T)

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
ENTRIES(i32, int)
ENTRIES(i64, int64)
