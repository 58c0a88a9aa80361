// Floats of eight and four bits: casts, also those of integers of less than eight bits, and quantized numbers.
#include "quantize.cuh"

// A type of quantized values that are such floats has this bit, and 256 times its format; `quantized_tag` of type_tags.rs has the same numbers.
constexpr int IS_NARROW = 128;
enum Format { E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E2M1, E8M0 };
// Numbers beyond the largest become infinity or NaN, where there is one.
constexpr int BEYOND = 4096;

// What the codes behind the finite numbers are.
enum Special { WITH_INFINITY, ONLY_NAN, NAN_FOR_NEGATIVE_ZERO, FINITE };

struct Narrow {
    int exponent_bits, mantissa_bits, bias;
    Special special;

    __device__ Narrow(int kind) {
        switch (kind >> 8 & 7) {
        case E4M3FN: *this = {4, 3, 7, ONLY_NAN}; break;
        case E4M3FNUZ: *this = {4, 3, 8, NAN_FOR_NEGATIVE_ZERO}; break;
        case E5M2: *this = {5, 2, 15, WITH_INFINITY}; break;
        case E5M2FNUZ: *this = {5, 2, 16, NAN_FOR_NEGATIVE_ZERO}; break;
        default: *this = {2, 1, 1, FINITE};
        }
    }
    __device__ Narrow(int exponent_bits, int mantissa_bits, int bias, Special special)
        : exponent_bits(exponent_bits), mantissa_bits(mantissa_bits), bias(bias), special(special) {}

    __device__ int sign_bit() const { return 1 << (exponent_bits + mantissa_bits); }
    // The code of the largest finite number.
    __device__ int most() const {
        if (special == WITH_INFINITY) return (((1 << exponent_bits) - 1) << mantissa_bits) - 1;
        return special == ONLY_NAN ? sign_bit() - 2 : sign_bit() - 1;
    }
    __device__ int nan(int sign) const {
        switch (special) {
        case WITH_INFINITY: return sign | (most() + 1) | 1 << (mantissa_bits - 1);
        case ONLY_NAN: return sign | (most() + 1);
        case NAN_FOR_NEGATIVE_ZERO: return sign_bit();
        default: return sign ^ sign_bit();
        }
    }
};

__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }
__device__ inline float not_a_number() { return __int_as_float(0x7fc00000); }

// The number that a code of a narrow float is.
__device__ __noinline__ float number_of_narrow(int code, int kind) {
    if ((kind >> 8 & 7) == E8M0) return code == 255 ? not_a_number() : code == 0 ? __int_as_float(0x00400000) : __int_as_float(code << 23);
    Narrow format(kind);
    bool negative = code & format.sign_bit();
    int magnitude = code & (format.sign_bit() - 1);
    if (format.special == NAN_FOR_NEGATIVE_ZERO && negative && magnitude == 0) return not_a_number();
    float value;
    if (magnitude > format.most()) {
        value = format.special == WITH_INFINITY && magnitude == format.most() + 1 ? infinity() : not_a_number();
    } else {
        int exponent = magnitude >> format.mantissa_bits, mantissa = magnitude & ((1 << format.mantissa_bits) - 1);
        if (exponent > 0) mantissa |= 1 << format.mantissa_bits;
        value = (float)mantissa * power_of_two(max(exponent, 1) - format.bias - format.mantissa_bits);
    }
    return negative ? -value : value;
}

// The exponent of a number's leading bit; that of numbers with less than 24 bits, which no format has, is too high.
__device__ inline int exponent_of(float x) { return (int)(__float_as_uint(x) >> 23 & 255) - 127; }

// The nearest code, to even between two.
__device__ __noinline__ int nearest_narrow(float x, int kind) {
    Narrow format(kind);
    int sign = __float_as_uint(x) >> 31 ? format.sign_bit() : 0;
    if (x != x) return format.nan(sign);
    int beyond = sign | format.most();
    if (kind & BEYOND && format.special != FINITE) beyond = format.special == WITH_INFINITY ? sign | (format.most() + 1) : format.nan(sign);
    int lowest = 1 - format.bias, exponent = max(exponent_of(x), lowest);
    if (exponent > lowest + (1 << format.exponent_bits)) return beyond;
    // In units of the last place. A carry out of the mantissa runs on into the exponent.
    int code = (int)rintf(fabsf(x) * power_of_two(format.mantissa_bits - exponent)) + ((exponent - lowest) << format.mantissa_bits);
    if (code > format.most()) return beyond;
    return code == 0 && format.special == NAN_FOR_NEGATIVE_ZERO ? 0 : code | sign;
}

// How a number becomes a power of two; fp8_fp4.rs has the same numbers.
enum Round { UP, DOWN, NEAREST };

// The code of E8M0 of a number's magnitude.
__device__ inline int nearest_power(float x, int kind, int round) {
    float magnitude = fabsf(x);
    bool saturates = !(kind & BEYOND);
    if (magnitude != magnitude || (magnitude == infinity() && !saturates)) return 255;
    // Numbers of less than 24 bits come up where others are.
    int below = magnitude < power_of_two(-126) ? 64 : 0;
    if (below) magnitude *= power_of_two(64);
    int exponent = magnitude == 0.0f ? -1023 : exponent_of(magnitude) - below;
    float fraction = __uint_as_float((__float_as_uint(magnitude) & 0x7fffff) | 0x3f800000);
    if (exponent < -127) {
        bool reaches = round == UP && exponent == -128 && fraction > 1.0f;
        return reaches || saturates ? 0 : 255;
    }
    // Infinity is above all.
    if (magnitude == infinity()) return 254;
    bool up = round == UP ? fraction > 1.0f : round == NEAREST && fraction >= 1.5f;
    int code = exponent + 127 + (up ? 1 : 0);
    return code <= 254 ? code : saturates ? 254 : 255;
}

struct Narrows {
    static __device__ int nearest(float quotient, float zero, int kind) { return nearest_narrow(quotient + zero, kind); }
    static __device__ float number(uint code, int kind) { return number_of_narrow(code, kind); }
    static __device__ float number_at(const void* from, int kind, uint i) { return number_of_narrow(code_at(from, kind, i), kind); }
};

QUANTIZE(narrow_, f32, float, Narrows)
QUANTIZE(narrow_, f16, __half, Narrows)
QUANTIZE(narrow_, bf16, __nv_bfloat16, Narrows)

// A number as an integer; what does not fit is the least one, whose low bits a code has.
__device__ inline int whole(float x) { return x >= -2147483648.0f && x < 2147483648.0f ? (int)x : (int)0x80000000; }

template <typename T> struct Number {
    static __device__ int code(T x, int, int) { return (int)x; }
    static __device__ T at(const void* from, int kind, uint i) { return (T)code_at(from, kind, i); }
};
template <typename T> struct Float {
    static __device__ int code(T x, int kind, int round) {
        float value = as_float(x);
        if (!(kind & IS_NARROW)) return whole(value);
        return (kind >> 8 & 7) == E8M0 ? nearest_power(value, kind, round) : nearest_narrow(value, kind);
    }
    static __device__ T at(const void* from, int kind, uint i) { return from_float<T>(kind & IS_NARROW ? Narrows::number_at(from, kind, i) : (float)code_at(from, kind, i)); }
};
template <> struct Number<float> : Float<float> {};
template <> struct Number<__half> : Float<__half> {};
template <> struct Number<__nv_bfloat16> : Float<__nv_bfloat16> {};

// Each thread has four neighbours, which are whole bytes of codes or, at the end, the last one's.
#define CASTS(suffix, type)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        narrow_of_##suffix(const type* x, uint8* y, int kind, int round, uint count) {                         \
        uint first = 4 * thread_index();                                                                       \
        if (first >= count) return;                                                                            \
        uint used = min(4u, count - first);                                                                    \
        int codes[4] = {0, 0, 0, 0};                                                                           \
        _Pragma("unroll 1") for (uint n = 0; n < used; n++) {                                                  \
            int code = Number<type>::code(x[first + n], kind, round);                                          \
            _Pragma("unroll") for (uint k = 0; k < 4; k++) codes[k] = k == n ? code : codes[k];                \
        }                                                                                                      \
        write_codes(y, kind, first, used, codes);                                                              \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                          \
        narrow_to_##suffix(const uint8* x, type* y, int kind, uint count) {                                    \
        uint i = thread_index();                                                                               \
        if (i < count) y[i] = Number<type>::at(x, kind, i);                                                    \
    }

CASTS(f32, float)
CASTS(f16, __half)
CASTS(bf16, __nv_bfloat16)
CASTS(i8, int8)
CASTS(u8, uint8)
CASTS(i32, int)
CASTS(i64, int64)
