// Softmax and its like: functions of each line along an axis.
#include "lines.cuh"

enum Function { SOFTMAX, LOG_SOFTMAX, HARDMAX, L1, L2 };

template <int TEAM, typename T>
__device__ void function_of_lines(const T* x, T* y, const Lines& lines, uint function) {
    uint line = line_of_team<TEAM>();
    if (line >= lines.count) return;
    uint lane = lane_of_team<TEAM>(), begin = begin_of(lines, line);
    auto sum_of = [](float a, float b) { return a + b; };
    auto top_of = [](float a, float b) { return greater(a, b); };
    float top = -infinity();
    for (uint r = lane; r < lines.length; r += TEAM) top = greater(top, as_float(x[begin + along(lines, r)]));
    top = joined<TEAM>(top, top_of);
    if (function == HARDMAX) {
        uint first = lines.length;
        for (uint r = lane; r < lines.length; r += TEAM) {
            float v = as_float(x[begin + along(lines, r)]);
            if (r < first && (v == top || v != v)) first = r;
        }
        first = joined<TEAM>(first, [](uint a, uint b) { return a < b ? a : b; });
        for (uint r = lane; r < lines.length; r += TEAM) {
            y[begin + along(lines, r)] = from_float<T>(r == first ? 1.0f : 0.0f);
        }
        return;
    }
    float sum = 0.0f;
    for (uint r = lane; r < lines.length; r += TEAM) {
        float v = as_float(x[begin + along(lines, r)]);
        sum += function == L1 ? fabsf(v) : function == L2 ? v * v : expf(v - top);
    }
    sum = joined<TEAM>(sum, sum_of);
    // A line without length stays zero.
    float norm = function == L2 ? sqrtf(sum) : sum;
    float scale = 1.0f / (norm == 0.0f ? 1.0f : norm), shift = logf(sum);
    for (uint r = lane; r < lines.length; r += TEAM) {
        uint place = begin + along(lines, r);
        float v = as_float(x[place]);
        float result = function == SOFTMAX ? expf(v - top) * scale
            : function == LOG_SOFTMAX ? v - top - shift : v * scale;
        y[place] = from_float<T>(result);
    }
}

#define ENTRY(TEAM, NAME, T)                                                                             \
    extern "C" __global__ void lines_##NAME##_##TEAM(const T* x, T* y, Lines lines, uint function) {      \
        function_of_lines<TEAM, T>(x, y, lines, function);                                                \
    }
#define ENTRIES(NAME, T) ENTRY(1, NAME, T) ENTRY(32, NAME, T) ENTRY(256, NAME, T)

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
