// compute: 75
// Functions that rendered code calls, by number: of float without suffix, of double with _f64, of integers with their type.
// The entry calls each of them, so that the compiler keeps them all as functions of their own; nobody launches it.

typedef unsigned int uint;
typedef long long int64;
typedef unsigned long long uint64;

#define FUNCTION extern "C" __device__ __noinline__

// A function of the CUDA library in both widths.
#define LIBRARY(name, of_float, of_double)                                                                     \
    FUNCTION float ort_##name(float x) { return of_float(x); }                                                 \
    FUNCTION double ort_##name##_f64(double x) { return of_double(x); }

LIBRARY(exp, expf, exp)
LIBRARY(expm1, expm1f, expm1)
LIBRARY(log, logf, log)
LIBRARY(log1p, log1pf, log1p)
LIBRARY(erf, erff, erf)
LIBRARY(sin, sinf, sin)
LIBRARY(cos, cosf, cos)
LIBRARY(tan, tanf, tan)
LIBRARY(asin, asinf, asin)
LIBRARY(acos, acosf, acos)
LIBRARY(atan, atanf, atan)
LIBRARY(sinh, sinhf, sinh)
LIBRARY(cosh, coshf, cosh)
LIBRARY(tanh, tanhf, tanh)
LIBRARY(asinh, asinhf, asinh)
LIBRARY(acosh, acoshf, acosh)
LIBRARY(atanh, atanhf, atanh)

FUNCTION float ort_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
FUNCTION double ort_sigmoid_f64(double x) { return 1.0 / (1.0 + exp(-x)); }

FUNCTION float ort_pow(float x, float y) { return powf(x, y); }
FUNCTION double ort_pow_f64(double x, double y) { return pow(x, y); }
FUNCTION float ort_fmod(float x, float y) { return fmodf(x, y); }
FUNCTION double ort_fmod_f64(double x, double y) { return fmod(x, y); }

// The remainder with the sign of the divisor.
FUNCTION float ort_mod(float x, float y) {
    float rest = fmodf(x, y);
    if (rest == 0.0f) return copysignf(0.0f, y);
    return (rest < 0.0f) != (y < 0.0f) ? rest + y : rest;
}
FUNCTION double ort_mod_f64(double x, double y) {
    double rest = fmod(x, y);
    if (rest == 0.0) return copysign(0.0, y);
    return (rest < 0.0) != (y < 0.0) ? rest + y : rest;
}

// Exact where it fits, wrapping where not.
template <typename T> __device__ inline T power(T base, T rest) {
    T whole = 1;
    for (; rest > 0; rest /= 2) {
        if (rest % 2 != 0) whole *= base;
        base *= base;
    }
    return whole;
}

// A negative power is the fraction cut off: 0 but for 1 and -1. Products of unsigned integers wrap as those of signed ones should.
template <typename S, typename U> __device__ inline S signed_power(S base, S exponent) {
    if (exponent >= 0) return static_cast<S>(power<U>(static_cast<U>(base), static_cast<U>(exponent)));
    if (base == 1) return 1;
    if (base == -1) return exponent % 2 != 0 ? -1 : 1;
    return 0;
}

FUNCTION int ort_pow_s32(int x, int y) { return signed_power<int, uint>(x, y); }
FUNCTION uint ort_pow_u32(uint x, uint y) { return power<uint>(x, y); }
FUNCTION int64 ort_pow_s64(int64 x, int64 y) { return signed_power<int64, uint64>(x, y); }
FUNCTION uint64 ort_pow_u64(uint64 x, uint64 y) { return power<uint64>(x, y); }

// Towards zero, with the last bit set where others were lost: rounded on to 16 bits it is as if rounded once.
FUNCTION float ort_odd_f64(double x) {
    float cut = __double2float_rz(x);
    bool lost = static_cast<double>(cut) != x && x == x;
    return lost ? __uint_as_float(__float_as_uint(cut) | 1u) : cut;
}

#define CALL_FLOAT(name)                                                                                       \
    f[at] = ort_##name(f[at]);                                                                                 \
    at += blockDim.x;                                                                                          \
    d[at] = ort_##name##_f64(d[at]);                                                                           \
    at += blockDim.x;
#define CALL_FLOATS(name)                                                                                      \
    f[at] = ort_##name(f[at], f[at + 1]);                                                                      \
    at += blockDim.x;                                                                                          \
    d[at] = ort_##name##_f64(d[at], d[at + 1]);                                                                \
    at += blockDim.x;

extern "C" __global__ void math_all(float* f, double* d, int* s, uint* u, int64* sl, uint64* ul) {
    uint at = threadIdx.x;
    CALL_FLOAT(exp) CALL_FLOAT(expm1) CALL_FLOAT(log) CALL_FLOAT(log1p) CALL_FLOAT(erf) CALL_FLOAT(sigmoid)
    CALL_FLOAT(sin) CALL_FLOAT(cos) CALL_FLOAT(tan) CALL_FLOAT(asin) CALL_FLOAT(acos) CALL_FLOAT(atan)
    CALL_FLOAT(sinh) CALL_FLOAT(cosh) CALL_FLOAT(tanh) CALL_FLOAT(asinh) CALL_FLOAT(acosh) CALL_FLOAT(atanh)
    CALL_FLOATS(pow) CALL_FLOATS(fmod) CALL_FLOATS(mod)
    s[at] = ort_pow_s32(s[at], s[at + 1]);
    u[at] = ort_pow_u32(u[at], u[at + 1]);
    sl[at] = ort_pow_s64(sl[at], sl[at + 1]);
    ul[at] = ort_pow_u64(ul[at], ul[at + 1]);
    f[at] = ort_odd_f64(d[at]);
}
