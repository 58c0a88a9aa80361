// Softmax and its like, and running sums: functions of each line along an axis.
#include "lines.cuh"
#include "softmax.cuh"
#include "wide.cuh"

template <int TEAM, typename T>
__device__ void hardmax(const T* x, T* y, const Lines& lines, uint begin, uint lane, uint end) {
    float top = -infinity();
    for (uint r = lane; r < end; r += TEAM) top = greater(top, as_float(x[begin + along(lines, r)]));
    top = joined<TEAM>(top, [](float a, float b) { return greater(a, b); });
    uint first = end;
    for (uint r = lane; r < end; r += TEAM) {
        float v = as_float(x[begin + along(lines, r)]);
        if (r < first && (v == top || v != v)) first = r;
    }
    first = joined<TEAM>(first, [](uint a, uint b) { return a < b ? a : b; });
    for (uint r = lane; r < end; r += TEAM) {
        y[begin + along(lines, r)] = from_float<T>(r == first ? 1.0f : 0.0f);
    }
}

// The greatest element and the sum of powers are found at once: each greater element scales what was summed before (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", arXiv 1805.02867). A line without a finite greatest element has no softmax.
template <int TEAM, typename T>
__device__ void softmax(const T* x, T* y, const Lines& lines, uint begin, uint lane, uint end, bool of_log) {
    float top = -infinity(), sum = 0.0f;
    for (uint r = lane; r < end; r += TEAM) {
        float v = as_float(x[begin + along(lines, r)]);
        if (v == -infinity()) continue;
        float power = expf(-fabsf(v - top));
        sum = v > top ? sum * power + 1.0f : sum + power;
        top = v > top ? v : top;
    }
    float own = top;
    top = joined<TEAM>(top, [](float a, float b) { return greater(a, b); });
    sum = own == -infinity() && sum == 0.0f ? 0.0f : sum * expf(own - top);
    sum = joined<TEAM>(sum, [](float a, float b) { return a + b; });
    if (isinf(top)) sum = __int_as_float(0x7fffffff);
    float scale = 1.0f / sum, shift = logf(sum);
    for (uint r = lane; r < end; r += TEAM) {
        uint place = begin + along(lines, r);
        float v = as_float(x[place]) - top;
        y[place] = from_float<T>(of_log ? v - shift : expf(v) * scale);
    }
}

template <int TEAM, typename T>
__device__ void lp(const T* x, T* y, const Lines& lines, uint begin, uint lane, uint end, bool of_squares) {
    float sum = 0.0f;
    for (uint r = lane; r < end; r += TEAM) {
        float v = as_float(x[begin + along(lines, r)]);
        sum += of_squares ? v * v : fabsf(v);
    }
    sum = joined<TEAM>(sum, [](float a, float b) { return a + b; });
    float norm = of_squares ? sqrtf(sum) : sum;
    // A line without length stays zero. A quotient, as the inverse of the least numbers is beyond float32.
    float divisor = norm == 0.0f ? 1.0f : norm;
    for (uint r = lane; r < end; r += TEAM) {
        uint place = begin + along(lines, r);
        y[place] = from_float<T>(as_float(x[place]) / divisor);
    }
}

template <int TEAM, typename T>
__device__ void function_of_lines(const T* x, T* y, const Lines& lines, uint function) {
    uint line = line_of_team<TEAM>(), lane = lane_of_team<TEAM>();
    uint begin = begin_of(lines, line), end = line < lines.count ? lines.length : 0;
    if (function == HARDMAX) return hardmax<TEAM>(x, y, lines, begin, lane, end);
    if (function >= L1) return lp<TEAM>(x, y, lines, begin, lane, end, function == L2);
    softmax<TEAM>(x, y, lines, begin, lane, end, function == LOG_SOFTMAX);
}

// The sums, or products, of the elements up to each one, itself included or not, in one direction or the other. A team of more than one thread
// takes as many elements at a time as it has threads.
template <int TEAM, typename T>
__device__ void scan(const T* x, T* y, const Lines& lines, bool product, bool exclusive, bool reverse) {
    using V = decltype(wide(T()));
    uint line = line_of_team<TEAM>(), lane = lane_of_team<TEAM>(), begin = begin_of(lines, line);
    uint end = line < lines.count ? lines.length : 0;
    V identity = V(product ? 1 : 0), carried = identity;
    auto join = [product](V a, V b) { return product ? a * b : a + b; };
    // All threads of a block take as many turns.
    for (uint start = 0; start < lines.length; start += TEAM) {
        uint step = start + lane;
        uint place = begin + along(lines, reverse ? lines.length - 1 - step : step);
        V up_to = step < end ? wide(x[place]) : identity, before = identity, all = up_to;
        if constexpr (TEAM >= 32) {
            uint own = threadIdx.x % 32;
            for (uint reach = 1; reach < 32; reach *= 2) {
                V other = __shfl_up_sync(0xffffffffu, up_to, reach);
                if (own >= reach) up_to = join(other, up_to);
            }
            V last = __shfl_up_sync(0xffffffffu, up_to, 1);
            before = own > 0 ? last : identity;
            all = __shfl_sync(0xffffffffu, up_to, 31);
        }
        if constexpr (TEAM == 256) {
            __shared__ V cells[8];
            __syncthreads();
            if (threadIdx.x % 32 == 31) cells[threadIdx.x / 32] = all;
            __syncthreads();
            V ahead = identity;
            all = identity;
            for (uint warp = 0; warp < 8; warp++) {
                if (warp == threadIdx.x / 32) ahead = all;
                all = join(all, cells[warp]);
            }
            up_to = join(ahead, up_to);
            before = join(ahead, before);
        }
        if (step < end) y[place] = narrow<T>(join(carried, exclusive ? before : up_to));
        carried = join(carried, all);
    }
}

#define ENTRY(TEAM, NAME, T)                                                                             \
    extern "C" __global__ void lines_##NAME##_##TEAM(const T* x, T* y, Lines lines, uint function) {      \
        function_of_lines<TEAM, T>(x, y, lines, function);                                                \
    }
#define SCAN(TEAM, NAME, T)                                                                              \
    extern "C" __global__ void scan_##NAME##_##TEAM(const T* x, T* y, Lines lines, uint product,          \
                                                    uint exclusive, uint reverse) {                       \
        scan<TEAM, T>(x, y, lines, product, exclusive, reverse);                                          \
    }
#define ENTRIES(NAME, T) ENTRY(1, NAME, T) ENTRY(8, NAME, T) ENTRY(256, NAME, T)
#define SCANS(NAME, T) SCAN(1, NAME, T) SCAN(32, NAME, T) SCAN(256, NAME, T)

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
SCANS(f32, float)
SCANS(f16, __half)
SCANS(bf16, __nv_bfloat16)
SCANS(i32, int)
SCANS(i64, int64)
