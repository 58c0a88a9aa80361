//! Shader math library: WGSL functions, each added only to shaders that call it.
//!
//! WGSL's built-ins may be off by several ULPs, and are undefined if a result is not a number.
//! These are accurate to a few ULPs, and follow IEEE 754 at the edges.

/// The functions by name. A function precedes those that it calls, so that one pass adds all of
/// them.
const FUNCTIONS: &[(&str, &str)] = &[
    (
        "half_bits",
        // Rounds to nearest, ties to even; overflow gives infinity. Below 2^-14 the result is
        // subnormal, and the mantissa is shifted and rounded by hand.
        "fn half_bits(x: f32) -> u32 {
            let bits = bitcast<u32>(x);
            let sign = (bits >> 16u) & 0x8000u;
            let size = bits & 0x7fffffffu;
            if (size > 0x7f800000u) { return sign | 0x7e00u; }
            if (size >= 0x477ff000u) { return sign | 0x7c00u; }
            if (size < 0x38800000u) {
                if (size < 0x33000000u) { return sign; }
                let mantissa = (size & 0x007fffffu) | 0x00800000u;
                let shift = 126u - (size >> 23u);
                let kept = mantissa >> shift;
                let rest = mantissa & ((1u << shift) - 1u);
                let middle = 1u << (shift - 1u);
                let up = rest > middle || (rest == middle && (kept & 1u) == 1u);
                return sign | (kept + select(0u, 1u, up));
            }
            return sign | ((size - 0x38000000u + 0x0fffu + ((size >> 13u) & 1u)) >> 13u);
        }",
    ),
    (
        "bfloat_bits",
        // A NaN keeps its upper bits and becomes quiet. Other numbers round to nearest, ties to
        // even.
        "fn bfloat_bits(x: f32) -> u32 {
            let bits = bitcast<u32>(x);
            if ((bits & 0x7fffffffu) > 0x7f800000u) { return (bits >> 16u) | 0x40u; }
            return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
        }",
    ),
    (
        "gelu_tanh",
        // The first constant is sqrt(2 / pi).
        "fn gelu_tanh(x: f32) -> f32 {
            return 0.5 * x * (1.0 + tanh_(0.7978845608028654 * (x + 0.044715 * x * x * x)));
        }",
    ),
    ("gelu_erf", "fn gelu_erf(x: f32) -> f32 { return 0.5 * x * (1.0 + erf_(x * 0.7071067811865476)); }"),
    (
        "erf_",
        // Abramowitz and Stegun 7.1.26 is too coarse. We use the series (7.1.5) below 1, and erfcc
        // of Numerical Recipes above it.
        "fn erf_(x: f32) -> f32 {
            if (is_nan(x)) { return x; }
            let a = abs(x);
            if (a < 1.0) {
                let q = x * x;
                var term = x;
                var sum = x;
                for (var n = 1; n < 12; n++) {
                    term = -term * q / f32(n);
                    sum += term / f32(2 * n + 1);
                }
                return 1.1283791670955126 * sum;
            }
            let t = 1.0 / (1.0 + 0.5 * a);
            let poly = -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * (0.09678418 + t * (-0.18628806
                + t * (0.27886807 + t * (-1.13520398 + t * (1.48851587 + t * (-0.82215223 + t * 0.17087277))))))));
            let far = 1.0 - t * exp_(-a * a + poly);
            return select(far, -far, x < 0.0);
        }",
    ),
    (
        "divide_",
        // WGSL allows 2.5 ULP for a division. One correction by the remainder keeps ties exact.
        "fn divide_(a: f32, b: f32) -> f32 {
            let q = a / b;
            let corrected = q + fma(-q, b, a) / b;
            return select(q, corrected, abs(q) < 1.0e30 && abs(corrected) < 1.0e30);
        }",
    ),
    (
        "pow_",
        // IEEE 754 defines pow(x, 0) and pow(1, y) as 1, even if the other is a NaN. Small whole
        // exponents multiply, which is exact for small integers.
        "fn pow_(a: f32, b: f32) -> f32 {
            if (b == 0.0 || a == 1.0) { return 1.0; }
            if (is_nan(a) || is_nan(b)) { return a + b; }
            if (b == 1.0) { return a; }
            if (b == 2.0) { return a * a; }
            let whole = floor(b) == b;
            let odd = whole && abs(b) < 16777216.0 && (i32(b) & 1) != 0;
            let size = abs(a);
            var result: f32;
            if (size == 0.0) {
                result = select(0.0, infinity(), b < 0.0);
            } else if (is_inf(b)) {
                result = select(select(0.0, infinity(), (size > 1.0) == (b > 0.0)), 1.0, size == 1.0);
            } else if (whole && abs(b) <= 32.0) {
                result = 1.0;
                for (var n = 0; n < i32(abs(b)); n++) { result *= size; }
                if (b < 0.0) { result = 1.0 / result; }
            } else {
                result = exp_(b * log_(size));
            }
            if (a < 0.0 && size != 0.0 && !is_inf(a) && !whole) { return nan(); }
            return select(result, -result, odd && (bitcast<u32>(a) >> 31u) == 1u);
        }",
    ),
    (
        "powi",
        // A negative power is 0 unless the base is 1 or -1.
        "fn powi(a: i32, b: i32) -> i32 {
            if (b < 0) { return select(0, select(1, -1, (b & 1) != 0 && a == -1), abs(a) == 1); }
            return i32(powu(u32(a), u32(b)));
        }",
    ),
    (
        "powu",
        // Exponentiation by squaring.
        "fn powu(a: u32, b: u32) -> u32 {
            var result = 1u; var base = a; var rest = b;
            while (rest > 0u) {
                if ((rest & 1u) == 1u) { result *= base; }
                base *= base;
                rest = rest >> 1u;
            }
            return result;
        }",
    ),
    (
        "mod_",
        // The remainder has the sign of the divisor, as in Python (ONNX, `Mod` without `fmod`).
        "fn mod_(a: f32, b: f32) -> f32 {
            let rest = fmod_(a, b);
            return select(rest, rest + b, rest != 0.0 && (rest < 0.0) != (b < 0.0));
        }",
    ),
    (
        "fmod_",
        // The remainder has the sign of the dividend, as in C.
        "fn fmod_(a: f32, b: f32) -> f32 {
            if (b == 0.0 || is_inf(a) || is_nan(a) || is_nan(b)) { return nan(); }
            if (is_inf(b)) { return a; }
            return a - b * trunc(a / b);
        }",
    ),
    (
        "mod_int",
        "fn mod_int(a: i32, b: i32) -> i32 {
            let rest = fmod_int(a, b);
            return select(rest, rest + b, rest != 0 && (rest < 0) != (b < 0));
        }",
    ),
    // GLSL leaves `%` of negative numbers undefined, and some GL drivers treat the operands as
    // unsigned.
    (
        "fmod_int",
        "fn fmod_int(a: i32, b: i32) -> i32 {
            if (b == 0) { return 0; }
            return a - a / b * b;
        }",
    ),
    (
        "sinh_",
        // `expm1_` near 0, where the exponentials cancel. Beyond, exp(x / 2) is finite wherever
        // sinh is.
        "fn sinh_(x: f32) -> f32 {
            if (abs(x) < 1.0) { let u = expm1_(x); return 0.5 * (u + u / (u + 1.0)); }
            let half = exp_(0.5 * abs(x));
            let size = 0.5 * half * half - 0.5 / half / half;
            return select(size, -size, x < 0.0);
        }",
    ),
    (
        "cosh_",
        // exp(x / 2) is finite wherever cosh is.
        "fn cosh_(x: f32) -> f32 { let half = exp_(0.5 * abs(x)); return 0.5 * half * half + 0.5 / half / half; }",
    ),
    (
        "tanh_",
        // `expm1_` near 0, where 1 - 2 / (e + 1) would cancel. Above 20 the result rounds to 1.
        "fn tanh_(x: f32) -> f32 {
            if (is_nan(x)) { return x; }
            let a = abs(x);
            if (a < 0.5) { let u = expm1_(2.0 * x); return u / (u + 2.0); }
            let far = 1.0 - 2.0 / (exp_(2.0 * min(a, 20.0)) + 1.0);
            return select(far, -far, x < 0.0);
        }",
    ),
    (
        "asinh_",
        // Above 1e9 asinh(x) is ln(2 x), and the square of x may overflow.
        "fn asinh_(x: f32) -> f32 {
            let a = abs(x);
            var size = log_(a) + 0.6931471805599453;
            if (a < 1.0e9) { size = log1p_(a + a * a / (1.0 + sqrt(a * a + 1.0))); }
            return select(size, -size, x < 0.0);
        }",
    ),
    (
        "acosh_",
        "fn acosh_(x: f32) -> f32 {
            if (x < 1.0) { return nan(); }
            if (x > 1.0e9) { return log_(x) + 0.6931471805599453; }
            let t = x - 1.0;
            return log1p_(t + sqrt(2.0 * t + t * t));
        }",
    ),
    (
        "atanh_",
        "fn atanh_(x: f32) -> f32 {
            if (abs(x) > 1.0) { return nan(); }
            if (abs(x) == 1.0) { return select(infinity(), -infinity(), x < 0.0); }
            return 0.5 * log1p_(2.0 * x / (1.0 - x));
        }",
    ),
    // 1 - x * x would cancel near 1.
    ("asin_", "fn asin_(x: f32) -> f32 { return atan2(x, sqrt((1.0 - x) * (1.0 + x))); }"),
    ("acos_", "fn acos_(x: f32) -> f32 { return atan2(sqrt((1.0 - x) * (1.0 + x)), x); }"),
    ("sigmoid_", "fn sigmoid_(x: f32) -> f32 { return 1.0 / (1.0 + exp_(-x)); }"),
    (
        "log1p_",
        // Kahan's correction for the rounding of 1 + x.
        "fn log1p_(x: f32) -> f32 {
            let u = 1.0 + x;
            if (u == 1.0) { return x; }
            if (is_inf(u)) { return u; }
            return log_(u) * (x / (u - 1.0));
        }",
    ),
    (
        "expm1_",
        // A Taylor series near 0, where exp(x) - 1 would cancel.
        "fn expm1_(x: f32) -> f32 {
            if (abs(x) < 0.5) {
                return x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.0083333333
                    + x * (0.0013888889 + x * (0.00019841270 + x * 0.000024801587)))))));
            }
            return exp_(x) - 1.0;
        }",
    ),
    (
        "log_",
        // The logarithm of the mantissa in [sqrt(1/2), sqrt(2)) is 2 artanh((m - 1) / (m + 1)).
        // That of the power of two is added in two parts, to keep its low bits.
        "fn log_(x: f32) -> f32 {
            if (is_nan(x) || x < 0.0) { return nan(); }
            if (x == 0.0) { return -infinity(); }
            if (is_inf(x)) { return x; }
            let tiny = x < 1.1754944e-38;
            let bits = bitcast<u32>(select(x, x * 8388608.0, tiny));
            var k = f32(i32(bits >> 23u) - 127) - select(0.0, 23.0, tiny);
            var m = bitcast<f32>((bits & 0x007fffffu) | 0x3f800000u);
            if (m > 1.4142135) { m = 0.5 * m; k += 1.0; }
            let s = (m - 1.0) / (m + 1.0);
            let q = s * s;
            let series = s * q * (0.6666667 + q * (0.4 + q * (0.2857143 + q * (0.22222222 + q * 0.18181819))));
            return k * 0.693359375 + (2.0 * s + (series - k * 0.00021219444));
        }",
    ),
    (
        "exp_",
        // Cody and Waite reduction: exp(x) = 2^k exp(r) with |r| <= ln(2) / 2, by its Taylor
        // series.
        // Two powers of two, because 2^k alone may be infinite or subnormal.
        "fn exp_(x: f32) -> f32 {
            if (is_nan(x)) { return x; }
            if (x > 88.72284) { return infinity(); }
            if (x < -103.97) { return 0.0; }
            let k = round(x * 1.4426950408889634);
            let r = (x - k * 0.693359375) + k * 0.00021219444;
            let e = 1.0 + r * (1.0 + r * (0.5 + r * (0.16666667 + r * (0.041666668 + r * (0.0083333333
                + r * (0.0013888889 + r * 0.00019841270))))));
            let half = i32(k) / 2;
            let one = bitcast<f32>(u32(half + 127) << 23u);
            let other = bitcast<f32>(u32(i32(k) - half + 127) << 23u);
            return e * one * other;
        }",
    ),
    (
        "min_",
        "fn min_(a: f32, b: f32) -> f32 { if (is_nan(a)) { return a; } if (is_nan(b)) { return b; } return min(a, b); }",
    ),
    (
        "max_",
        "fn max_(a: f32, b: f32) -> f32 { if (is_nan(a)) { return a; } if (is_nan(b)) { return b; } return max(a, b); }",
    ),
    ("is_nan", "fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }"),
    ("is_inf", "fn is_inf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }"),
    // WGSL rejects constant expressions that are infinite or NaN. A private variable is not
    // constant.
    (
        "infinity",
        "var<private> infinity_bits: u32 = 0x7f800000u;\nfn infinity() -> f32 { return bitcast<f32>(infinity_bits); }",
    ),
    ("nan", "var<private> nan_bits: u32 = 0x7fc00000u;\nfn nan() -> f32 { return bitcast<f32>(nan_bits); }"),
];

/// Appends the functions that a shader calls.
pub(crate) fn complete(text: &mut String) {
    for (name, function) in FUNCTIONS {
        if calls(text, name) {
            text.push_str(function);
            text.push('\n');
        }
    }
}

/// Returns whether a text has the name before a parenthesis, and not as the end of a longer name.
fn calls(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(start, _)| {
        let before = text.get(..start).and_then(|text| text.chars().next_back());
        let after = text.get(start + name.len()..).and_then(|text| text.chars().next());
        after == Some('(') && before.is_none_or(|before| !before.is_alphanumeric() && before != '_')
    })
}
