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
        read_row<VECTORS, STEP>(x, from, length, read);
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
            bool is_in = place_in_row<STEP>(from, vector) < end;
#pragma unroll
            for (int i = 0; i < STEP; i++) values[vector][i] = is_in ? read[vector][i] : outside;
        }
    }

    __device__ void write(uint from) const {
#pragma unroll
        for (int vector = 0; vector < VECTORS; vector++) {
            uint place = place_in_row<STEP>(from, vector);
            Pack<T, STEP> pack;
#pragma unroll
            for (int i = 0; i < STEP; i++) pack.of[i] = from_float<T>(values[vector][i]);
            if (place < end) *(Pack<T, STEP>*)(y + place) = pack;
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
                float power = expf(v - top);
                sum += power;
                if (keeps) v = power;
            });
        }
        if (of_log) return share.each(from, [&](float& v, uint) { v = v - top - shift; });
        if (!keeps) share.each(from, [&](float& v, uint) { v = expf(v - top); });
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

// The wide form, with more vectors for a thread, is of softmax alone.
template <bool WIDE, int VECTORS, int STEP, typename T>
__device__ void function_of_row(const T* x, T* y, uint count, uint length, uint function) {
    Share<VECTORS, STEP, T> share(x, y, count, length);
    if (!WIDE && function == HARDMAX) return hardmax(share);
    if (!WIDE && function >= L1) return lp(share, function == L2);
    softmax(share, function == LOG_SOFTMAX);
}

#define ENTRY(WIDE, NAME, T)                                                                              \
    extern "C" __global__ void __launch_bounds__(MOST_OF_BLOCK, 1)                                          \
        NAME(const T* x, T* y, uint count, uint length, uint function) {                                 \
        bool in_vectors = length % VECTOR<T> == 0 && ((uint64)x | (uint64)y) % 16 == 0;                  \
        if (in_vectors) return function_of_row<WIDE, WIDE ? 2 : 1, VECTOR<T>>(x, y, count, length, function);  \
        function_of_row<WIDE, WIDE ? 8 : 4, 1>(x, y, count, length, function);                                \
    }
#define SCAN(TEAM, NAME, T)                                                                              \
    extern "C" __global__ void scan_##NAME##_##TEAM(const T* x, T* y, Lines lines, uint product,          \
                                                    uint exclusive, uint reverse) {                       \
        scan<TEAM, T>(x, y, lines, product, exclusive, reverse);                                          \
    }
#define ENTRIES(NAME, T) ENTRY(false, rows_##NAME, T) ENTRY(true, wide_rows_##NAME, T)

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
