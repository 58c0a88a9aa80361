// Softmax and its like of rows.
#include "rows.cuh"

#include "lines.cuh"
#include "softmax.cuh"

// A thread's share of a row, of which it writes just what it has read.
template <int VECTORS, int STEP, typename T> struct Share {
    const T* x;
    T* y;
    uint length, end;
    float values[VECTORS][STEP];

    // Beyond the last row it is read once more, and nothing written.
    __device__ Share(const T* x, T* y, uint count, uint length) : length(length) {
        uint row = row_of_team(), begin = min(row, count - 1) * length;
        this->x = x + begin;
        this->y = y + begin;
        end = row < count ? length : 0;
    }

    __device__ bool is_whole() const { return length <= reach_of_team<VECTORS, STEP>(); }

    // With `outside` beyond the end.
    __device__ void read(uint from, float outside) {
        Vector<STEP, T> read[VECTORS];
        read_row<VECTORS, STEP>(x, from, length, outside, read);
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
#pragma unroll
            for (int i = 0; i < STEP; i++) values[vector][i] = read[vector][i];
        }
    }

    __device__ void write(uint from) const {
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
            uint place = place_in_row<STEP>(from, vector);
            Vector<STEP, T> result = Vector<STEP, T>::of(values[vector]);
            if (place < end) *(Vector<STEP, T>*)(y + place) = result;
        }
    }

    template <typename Act> __device__ void each(uint from, Act act) {
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
#pragma unroll
            for (int i = 0; i < STEP; i++) act(values[vector][i], place_in_row<STEP>(from, vector) + i);
        }
    }

    // `act` with the number of each pass and where a part of the row begins whose values are there, and `join` after each pass but the last,
    // in which results are written. A row of more than the team holds is read again for each pass.
    template <typename Act, typename Join> __device__ void passes(int count, float outside, Act act, Join join) {
#pragma unroll 1
        for (int pass = 0; pass < count; pass++) {
#pragma unroll 1
            for (uint from = 0; from < length; from += reach_of_team<VECTORS, STEP>()) {
                if (pass == 0 || !is_whole()) read(from, outside);
                act(pass, from);
                if (pass == count - 1) write(from);
            }
            if (pass < count - 1) join(pass);
        }
    }
};

template <int VECTORS, int STEP, typename T> __device__ void hardmax(Share<VECTORS, STEP, T>& share) {
    __shared__ Cells<float> tops;
    __shared__ Cells<uint> firsts;
    float top = -infinity();
    uint first = share.length;
    auto act = [&](int pass, uint from) {
        share.each(from, [&](float& v, uint place) {
            if (pass == 0) {
                top = greater(top, v);
            } else if (pass == 1) {
                if (place < first && (v == top || v != v)) first = place;
            } else {
                v = place == first ? 1.0f : 0.0f;
            }
        });
    };
    share.passes(3, -infinity(), act, [&](int pass) {
        if (pass == 0) {
            top = joined_row(top, -infinity(), tops, [](float a, float b) { return greater(a, b); });
        } else {
            first = joined_row(first, share.length, firsts, [](uint a, uint b) { return min(a, b); });
        }
    });
}

__device__ inline float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Powers of what elements are below a base, which is the greatest of them, or OF_PRODUCTS its product with the logarithm of two: of halves
// that is exact enough, as what it is off is a factor of all powers of a row, and takes an instruction less.
template <bool OF_PRODUCTS> struct Powers {
    static constexpr float LOG2_E = 1.4426950408889634f, LOWEST = OF_PRODUCTS ? -65504.0f : -3.402823466e38f;

    __device__ static float base(float top) { return OF_PRODUCTS ? top * LOG2_E : top; }
    __device__ static float of(float value, float base) {
        return power_of_two(OF_PRODUCTS ? fmaf(value, LOG2_E, -base) : (value - base) * LOG2_E);
    }
    // The factor that turns powers below one base into those below another.
    __device__ static float factor(float from, float to) { return power_of_two((from - to) * (OF_PRODUCTS ? 1.0f : LOG2_E)); }
};

// The powers of a row that was read once are kept from its sum to its results. A row without a finite greatest element has no softmax, and
// `fmaxf` passes over what is no number, which then shows in the sum.
template <int VECTORS, int STEP, typename T> __device__ void softmax(Share<VECTORS, STEP, T>& share, bool of_log) {
    __shared__ Cells<float> tops, sums;
    bool keeps = share.is_whole() && !of_log;
    float top = -infinity(), sum = 0.0f, scale = 0.0f, shift = 0.0f;
    auto act = [&](int pass, uint from) {
        if (pass == 0) return share.each(from, [&](float& v, uint) { top = fmaxf(top, v); });
        if (pass == 1) {
            return share.each(from, [&](float& v, uint) {
                float power = Powers<false>::of(v, top);
                sum += power;
                if (keeps) v = power;
            });
        }
        if (of_log) return share.each(from, [&](float& v, uint) { v = v - top - shift; });
        if (!keeps) share.each(from, [&](float& v, uint) { v = Powers<false>::of(v, top); });
        share.each(from, [&](float& v, uint) { v *= scale; });
    };
    share.passes(3, -infinity(), act, [&](int pass) {
        if (pass == 0) {
            top = joined_row(top, -infinity(), tops, [](float a, float b) { return fmaxf(a, b); });
            return;
        }
        sum = joined_row(sum, 0.0f, sums, [](float a, float b) { return a + b; });
        if (isinf(top)) sum = __int_as_float(0x7fffffff);
        scale = 1.0f / sum;
        shift = logf(sum);
    });
}

template <int VECTORS, int STEP, typename T> __device__ void lp(Share<VECTORS, STEP, T>& share, bool of_squares) {
    __shared__ Cells<float> sums;
    float sum = 0.0f, divisor = 1.0f;
    auto act = [&](int pass, uint from) {
        if (pass == 0) return share.each(from, [&](float& v, uint) { sum += of_squares ? v * v : fabsf(v); });
        share.each(from, [&](float& v, uint) { v /= divisor; });
    };
    share.passes(2, 0.0f, act, [&](int) {
        sum = joined_row(sum, 0.0f, sums, [](float a, float b) { return a + b; });
        float norm = of_squares ? sqrtf(sum) : sum;
        if (norm != 0.0f) divisor = norm;
    });
}

template <typename T> constexpr bool IS_HALF = false;
template <> constexpr bool IS_HALF<__half> = true;

// Softmax of a row that the team holds. The greatest element is a finite one or infinity: `fmaxf` passes over what is no number, which then
// shows in the sum, as it does that a row has no finite greatest element.
template <bool OF_LOG, int VECTORS, int STEP, typename T> __device__ void held_softmax(Share<VECTORS, STEP, T>& share) {
    using Power = Powers<IS_HALF<T> && !OF_LOG>;
    __shared__ Cells<float2> cells;
    auto greatest = [](float a, float b) { return fmaxf(a, b); };
    share.read(0, -infinity());
    float tops[4] = {Power::LOWEST, Power::LOWEST, Power::LOWEST, Power::LOWEST}, sums[4] = {};
    share.each(0, [&](float& v, uint place) { tops[place % 4] = fmaxf(tops[place % 4], v); });
    float own = Power::base(joined_lanes(fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])), blockDim.x, greatest));
    share.each(0, [&](float& v, uint place) {
        float power = Power::of(v, own);
        sums[place % 4] += power;
        if (!OF_LOG) v = power;
    });
    float base = own, sum = sum_of_lanes(sum_of(sums), blockDim.x);
    if (blockDim.x > 32) {
        float2 some = of_some_warp(make_float2(own, sum), make_float2(Power::base(Power::LOWEST), 0.0f), cells);
        base = joined_lanes(some.x, blockDim.x / 32, greatest);
        sum = sum_of_lanes(some.y * Power::factor(some.x, base), blockDim.x / 32);
    }
    float scale = __fdividef(Power::factor(own, base), sum), shift = logf(sum);
    share.each(0, [&](float& v, uint) { v = OF_LOG ? v - base - shift : v * scale; });
    share.write(0);
}

// A row in vectors, of which a thread holds VECTORS, or of SCALARS a thread.
template <int VECTORS, typename T>
__device__ void softmax_of_row(const T* x, T* y, uint count, uint length, bool of_log) {
    constexpr int STEP = VECTOR<T>;
    if (length % STEP != 0 || ((uint64)x | (uint64)y) % 16 != 0) {
        Share<SCALARS<VECTORS>, 1, T> share(x, y, count, length);
        return softmax(share, of_log);
    }
    // Such rows are launched with four vectors.
    if (VECTORS == 4 && length > reach_of_team<VECTORS, STEP>()) {
        Share<2, STEP, T> share(x, y, count, length);
        return softmax(share, of_log);
    }
    Share<VECTORS, STEP, T> share(x, y, count, length);
    if (of_log) return held_softmax<true>(share);
    held_softmax<false>(share);
}

template <int VECTORS, int STEP, typename T>
__device__ void function_of_row(const T* x, T* y, uint count, uint length, uint function) {
    Share<VECTORS, STEP, T> share(x, y, count, length);
    if (function == HARDMAX) return hardmax(share);
    lp(share, function == L2);
}

#define SOFTMAX_ENTRY(VECTORS, NAME, T)                                                           \
    extern "C" __global__ void __launch_bounds__(MOST_OF_BLOCK, 1)                                \
        softmax_##VECTORS##_##NAME(const T* x, T* y, uint count, uint length, uint function) {    \
        softmax_of_row<VECTORS>(x, y, count, length, function == LOG_SOFTMAX);                    \
    }
#define ENTRIES(NAME, T)                                                                          \
    SOFTMAX_ENTRY(1, NAME, T)                                                                     \
    SOFTMAX_ENTRY(4, NAME, T)                                                                     \
    extern "C" __global__ void __launch_bounds__(MOST_OF_BLOCK, 1)                                \
        rows_##NAME(const T* x, T* y, uint count, uint length, uint function) {                   \
        bool in_vectors = length % VECTOR<T> == 0 && ((uint64)x | (uint64)y) % 16 == 0;           \
        if (in_vectors) return function_of_row<1, VECTOR<T>>(x, y, count, length, function);      \
        function_of_row<4, 1>(x, y, count, length, function);                                     \
    }

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
