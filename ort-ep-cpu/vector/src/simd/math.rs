//! Vector math functions: exp, log, erf, tanh, sine, cosine, and the activations built on them.
//!
//! Each function states its maximum error in ULP (units in the last place of the correctly rounded
//! result). The tests check that bound on every instruction set against `libm` in double precision.
//! NaN inputs yield NaN.
//!
//! Methods: range reduction follows W. J. Cody and W. Waite, *Software Manual for the Elementary
//! Functions* (1980). erf is split at 0.92 into an odd polynomial and `1 - exp(polynomial)`, as
//! usual since Abramowitz and Stegun, *Handbook of Mathematical Functions*, 7.1. The polynomial
//! coefficients are minimax fits made for this file by C. L. Lawson's iteratively reweighted least
//! squares. They are rounded to `f32` one by one, from the lowest.

// Coefficients keep all digits of their `f32`. Clippy's shorter forms would hide that they are
// fits.
#![allow(clippy::excessive_precision)]

use super::Simd;

/// Evaluates `c[0] + c[1] x + c[2] x^2 + ...` by Horner's rule.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(s: S, x: S::F32, coefficients: [f32; N]) -> S::F32 {
    let [sum] = polynomials(s, [x], coefficients);
    sum
}

/// [`polynomial`] of several vectors, step by step, so that each waits less for its last step.
#[inline(always)]
fn polynomials<S: Simd, const V: usize, const N: usize>(
    s: S,
    x: [S::F32; V],
    coefficients: [f32; N],
) -> [S::F32; V] {
    let mut sums = [s.splat(coefficients[N - 1]); V];
    for index in (0..N - 1).rev() {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum = s.mul_add(*sum, x, s.splat(coefficients[index]));
        }
    }
    sums
}

/// ln 2 in two parts. The first has 15 significant bits, so its product with an exponent is exact.
const LN_2_HIGH: f32 = 0.693_145_751_953_125;
const LN_2_LOW: f32 = 1.428_606_820_309_417e-6;

/// Coefficients of the polynomial for `(e^r - 1 - r) / r^2`, for `|r| <= 0.35`.
const EXP: [f32; 5] = [4.999999404e-01, 1.666651666e-01, 4.166828096e-02, 8.369248360e-03, 1.382078743e-03];

/// `e^x`, at most 1.25 ULP. Infinite above 88.73, correct for denormal results, and 0 below -104.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // Beyond these bounds the result is already infinite or 0. NaN passes through as the second
    // operand.
    let x = s.max_or_second(s.splat(-110.0), s.min_or_second(s.splat(90.0), x));
    let (power, n) = reduced_exp(s, x);
    s.scale_by_power_of_two(power, n)
}

/// Returns `e^x` as a number near 1 and an exponent of two.
#[inline(always)]
fn reduced_exp<S: Simd>(s: S, x: S::F32) -> (S::F32, S::F32) {
    let n = s.round_even(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.neg_mul_add(n, s.splat(LN_2_HIGH), x);
    let r = s.neg_mul_add(n, s.splat(LN_2_LOW), r);
    let tail = s.mul(polynomial(s, r, EXP), s.mul(r, r));
    (s.add(s.splat(1.0), s.add(r, tail)), n)
}

/// [`exp`] for `x` from -87 to 88, where the result is a normal number, or NaN. Its bits are the
/// same; it saves the half of the instructions that denormal and infinite results take.
#[inline(always)]
fn normal_exp<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let (power, n) = reduced_exp(s, x);
    s.scale_to_normal(power, n)
}

/// [`exp`] for `x <= 0`, such as a value minus the greatest. Its bits are the same down to -86;
/// below, it may be 0. It takes two thirds of the instructions.
#[inline(always)]
pub fn exp_nonpositive<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // NaN passes through as the second operand.
    let (power, n) = reduced_exp(s, s.max_or_second(s.splat(-110.0), x));
    s.scale_or_zero(power, n)
}

/// Coefficients of the polynomial for `2^-r`, for `|r| <= 0.5`. The first coefficient is 1, so that
/// `exp_shifted(0)` is 1.
const EXP_2: [f32; 6] =
    [1.0, -6.931470037e-01, 2.402224541e-01, -5.550710857e-02, 9.671393782e-03, -1.326974132e-03];

/// `e^x` for `x <= 0`, such as a score minus the maximum score, of several vectors, step by step.
/// It is 1 at 0 and 0 below -104. Above -86 the error is at most 21 ULP (70 without FMA), and
/// smaller the larger `x` is; between, it may be 0. It takes half of the instructions of [`exp`].
#[inline(always)]
pub fn exp_shifted<S: Simd, const V: usize>(s: S, x: [S::F32; V]) -> [S::F32; V] {
    let (mut r, mut n) = (x, x);
    for (r, n) in r.iter_mut().zip(&mut n) {
        // NaN passes through as the second operand.
        let x = s.max_or_second(s.splat(-110.0), *r);
        *n = s.round_even(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
        *r = s.neg_mul_add(x, s.splat(std::f32::consts::LOG2_E), *n);
    }
    let mut powers = polynomials(s, r, EXP_2);
    for (power, n) in powers.iter_mut().zip(n) {
        *power = s.scale_or_zero(*power, n);
    }
    powers
}

/// `e^x - 1`, at most 4 ULP.
#[inline(always)]
pub fn expm1<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let small = s.mul_add(polynomial(s, x, EXP), s.mul(x, x), x);
    let large = s.sub(exp(s, x), s.splat(1.0));
    s.select(s.lt(s.abs(x), s.splat(0.35)), small, large)
}

/// Coefficients of the polynomial for `(log(1 + f) - f + f^2 / 2) / f^3`, for `1 + f` from
/// `sqrt(1/2)` to `sqrt(2)`.
const LOG: [f32; 8] = [
    3.333333135e-01,
    -2.500081956e-01,
    2.000124156e-01,
    -1.662340909e-01,
    1.420157999e-01,
    -1.315961033e-01,
    1.276221722e-01,
    -7.636439055e-02,
];

/// The natural logarithm, at most 1.25 ULP. -inf at 0, NaN for negative values.
#[inline(always)]
pub fn log<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let denormal = s.lt(x, s.splat(f32::MIN_POSITIVE));
    let normal = s.select(denormal, s.mul(x, s.splat((1_u32 << 23) as f32)), x);
    // Subtracting the bits of sqrt(1/2) selects the exponent that brings the mantissa closest to 1.
    let bits = s.to_bits(normal);
    let offset = s.sub_i32(bits, s.splat_i32(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i32));
    let exponent = s.shr_i32::<23>(offset);
    let mantissa = s.from_bits(s.sub_i32(bits, s.shl_i32::<23>(exponent)));
    let n = s.to_f32(exponent);
    let n = s.select(denormal, s.sub(n, s.splat(23.0)), n);

    let f = s.sub(mantissa, s.splat(1.0));
    let square = s.mul(f, f);
    let cubic = s.mul(s.mul(polynomial(s, f, LOG), f), square);
    let tail = s.mul_add(n, s.splat(LN_2_LOW), cubic);
    let tail = s.neg_mul_add(s.splat(0.5), square, tail);
    let result = s.mul_add(n, s.splat(LN_2_HIGH), s.add(f, tail));

    let zero = s.splat(0.0);
    let infinity = s.splat(f32::INFINITY);
    let result = s.select(s.lt(x, infinity), result, x);
    let result = s.select(s.lt(x, zero), s.splat(f32::NAN), result);
    s.select(s.eq(x, zero), s.splat(f32::NEG_INFINITY), result)
}

/// `log(1 + x)`, at most 3 ULP. NaN below -1.
///
/// Uses W. Kahan's correction: `log(u) * x / (u - 1)` for the rounded `u = 1 + x`.
#[inline(always)]
pub fn log1p<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let one = s.splat(1.0);
    let u = s.add(one, x);
    let difference = s.sub(u, one);
    let corrected = s.mul(log(s, u), s.div(x, difference));
    let exact = s.select(s.eq(u, s.splat(f32::INFINITY)), u, corrected);
    let exact = s.select(s.eq(u, s.splat(0.0)), s.splat(f32::NEG_INFINITY), exact);
    s.select(s.eq(difference, s.splat(0.0)), x, exact)
}

/// Coefficients of the polynomial for `(tanh(x) - x) / x^3` in powers of `x^2`, for `|x| <= 0.625`.
const TANH: [f32; 5] =
    [-3.333328068e-01, 1.333140731e-01, -5.373673141e-02, 2.062910423e-02, -5.693552550e-03];

/// The hyperbolic tangent, at most 1.5 ULP.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let magnitude = s.abs(x);
    let square = s.mul(x, x);
    let small = s.mul_add(s.mul(polynomial(s, square, TANH), square), x, x);
    // 1 - 2 / (e^2|x| + 1) loses no precision for |x| above 0.625, because the quotient is below
    // 1/2 there.
    // From 9.02 on, the result rounds to 1. NaN passes through as the second operand.
    let power = normal_exp(s, s.min_or_second(s.splat(20.0), s.add(magnitude, magnitude)));
    let quotient = s.div(s.splat(2.0), s.add(power, s.splat(1.0)));
    let large = s.with_sign_of(s.sub(s.splat(1.0), quotient), x);
    s.select(s.lt(magnitude, s.splat(0.625)), small, large)
}

/// Coefficients of the polynomial for `erf(x) / x - 1` in powers of `x^2`, for `|x| <= 0.93`.
const ERF_SMALL: [f32; 6] =
    [1.283791512e-01, -3.761248887e-01, 1.128173098e-01, -2.676296420e-02, 4.987347871e-03, -5.959555274e-04];
/// Coefficients of the polynomial for `log(1 - erf(x)) / x + 1`, for `x` from 0.92 to 4.
const ERF_LARGE: [f32; 7] = [
    -1.286521554e-01,
    -6.351359487e-01,
    -1.062630713e-01,
    2.378526889e-02,
    -3.653720254e-03,
    3.256403434e-04,
    -1.152092955e-05,
];

/// The error function, at most 1.5 ULP.
#[inline(always)]
pub fn erf<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let square = s.mul(x, x);
    let small = s.mul_add(polynomial(s, square, ERF_SMALL), x, x);
    // From 3.92 on, the result rounds to 1. NaN passes through as the second operand.
    let magnitude = s.min_or_second(s.splat(4.0), s.abs(x));
    // From -18 to 0.
    let exponent = s.mul_add(polynomial(s, magnitude, ERF_LARGE), magnitude, s.neg(magnitude));
    let large = s.with_sign_of(s.sub(s.splat(1.0), normal_exp(s, exponent)), x);
    s.select(s.lt(magnitude, s.splat(0.925)), small, large)
}

/// `1 / (1 + e^-x)`, at most 3 ULP, including denormal results.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let power = exp(s, s.neg(s.abs(x)));
    let one = s.splat(1.0);
    let denominator = s.add(one, power);
    let numerator = s.select(s.lt(x, s.splat(0.0)), power, one);
    s.div(numerator, denominator)
}

/// Coefficients of the polynomial for `e^-r`, for `|r| <= 0.35`. The first coefficient is 1.
const EXP_NEGATED: [f32; 6] =
    [1.0, -9.999997020e-01, 4.999914765e-01, -1.666764915e-01, 4.189819843e-02, -8.289651014e-03];

/// [`sigmoid`] for gates, at most 4 ULP down to -87, and 0 below. It takes half of the
/// instructions.
#[inline(always)]
pub fn gate<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let [share] = gates(s, [x]);
    share
}

/// [`gate`] of several vectors, step by step.
#[inline(always)]
fn gates<S: Simd, const V: usize>(s: S, x: [S::F32; V]) -> [S::F32; V] {
    let (mut r, mut n) = (x, x);
    for (r, n) in r.iter_mut().zip(&mut n) {
        // NaN passes through as the second operand.
        let bounded = s.min_or_second(s.splat(87.0), s.max_or_second(s.splat(-87.0), *r));
        *n = s.round_even(s.mul(bounded, s.splat(-std::f32::consts::LOG2_E)));
        *r = s.mul_add(*n, s.splat(LN_2_LOW), s.mul_add(*n, s.splat(LN_2_HIGH), bounded));
    }
    let mut shares = polynomials(s, r, EXP_NEGATED);
    for (share, n) in shares.iter_mut().zip(n) {
        *share = s.reciprocal(s.add(s.splat(1.0), s.scale_to_normal(*share, n)));
    }
    for (share, x) in shares.iter_mut().zip(x) {
        *share = s.select(s.lt(x, s.splat(-87.0)), s.splat(0.0), *share);
    }
    shares
}

/// `x * sigmoid(alpha * x)` of several vectors, step by step.
#[inline(always)]
pub fn swish<S: Simd, const V: usize>(s: S, x: [S::F32; V], alpha: S::F32) -> [S::F32; V] {
    let mut scaled = x;
    for x in &mut scaled {
        *x = s.mul(alpha, *x);
    }
    products(s, x, gates(s, scaled))
}

/// `x * sigmoid(x)` of several vectors, step by step; at most 4.5 ULP down to -87, and 0 below. NaN
/// at -inf.
#[inline(always)]
pub fn silu<S: Simd, const V: usize>(s: S, x: [S::F32; V]) -> [S::F32; V] {
    products(s, x, gates(s, x))
}

#[inline(always)]
fn products<S: Simd, const V: usize>(s: S, mut a: [S::F32; V], b: [S::F32; V]) -> [S::F32; V] {
    for (a, b) in a.iter_mut().zip(b) {
        *a = s.mul(*a, b);
    }
    a
}

/// `log(1 + e^x)`, at most 3 ULP.
#[inline(always)]
pub fn softplus<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let tail = log1p(s, exp(s, s.neg(s.abs(x))));
    s.add(s.max(x, s.splat(0.0)), tail)
}

/// Coefficients of the polynomial for `log2(erfc(a / sqrt(2)) / 2)`, the part of the normal
/// distribution above `a`. Its error is at most 0.35 units of 2^-24 of that part for `a` from 0 to
/// 6, and it falls for all `a` above.
const LOG2_UPPER_TAIL: [f32; 9] = [
    -9.999999404e-01,
    -1.151108146e+00,
    -4.591808617e-01,
    -5.259137228e-02,
    7.220520638e-03,
    -2.723202633e-04,
    -1.240336278e-04,
    2.508018406e-05,
    -1.547081752e-06,
];

/// The Gaussian error linear unit (GELU), `x / 2 * (1 + erf(x / sqrt(2)))`, of D. Hendrycks and K.
/// Gimpel (2016), of several vectors, step by step.
///
/// The error is at most 2.5 units of 2^-24 relative to `|x|`, as `1 + erf` cancels for negative `x`
/// in the formula. Results of `x` from -5.5 on have two digits at least. NaN at -inf, as there.
#[inline(always)]
pub fn gelu<S: Simd, const V: usize>(s: S, x: [S::F32; V]) -> [S::F32; V] {
    let (mut magnitude, mut n) = (x, x);
    for magnitude in &mut magnitude {
        *magnitude = s.abs(*magnitude);
    }
    let mut r = polynomials(s, magnitude, LOG2_UPPER_TAIL);
    for (r, n) in r.iter_mut().zip(&mut n) {
        // From -200 on, the tail is 0.
        let exponent = s.max_or_second(s.splat(-200.0), *r);
        *n = s.round_even(exponent);
        *r = s.sub(*n, exponent);
    }
    let mut shares = polynomials(s, r, EXP_2);
    for ((share, n), x) in shares.iter_mut().zip(n).zip(x) {
        let tail = s.scale_or_zero(*share, n);
        *share = s.select(s.lt(x, s.splat(0.0)), tail, s.sub(s.splat(1.0), tail));
    }
    products(s, x, shares)
}

/// The tanh approximation of GELU, `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`, which
/// is `x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))`, with the same kind of error, of several
/// vectors, step by step.
#[inline(always)]
pub fn gelu_tanh<S: Simd, const V: usize>(s: S, x: [S::F32; V]) -> [S::F32; V] {
    const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769_121_6;
    let (factor, cubic) = (s.splat(TWICE_SQRT_2_OVER_PI), s.splat(0.044_715 * TWICE_SQRT_2_OVER_PI));
    let mut inner = x;
    for x in &mut inner {
        *x = s.mul(*x, s.mul_add(s.mul(*x, *x), cubic, factor));
    }
    products(s, x, gates(s, inner))
}

/// pi/2 in three parts. The first two have 12 significant bits, so their products with up to 2^12
/// are exact.
const HALF_PI: [f32; 3] = [1.570_556_640_625, 2.396_106_719_970_703e-4, 7.549_789_954_891e-8];
/// The largest magnitude for which that reduction keeps sine and cosine within their bounds.
const TRIGONOMETRIC_LIMIT: f32 = 4096.0;
/// Coefficients of the polynomial for `(sin(r) - r) / r^3` in powers of `r^2`, for `|r| <= pi/4`.
const SIN: [f32; 4] = [-1.666666716e-01, 8.333379403e-03, -1.985301351e-04, 2.831484153e-06];
/// Coefficients of the polynomial for `(cos(r) - 1 + r^2 / 2) / r^4` in powers of `r^2`, for
/// `|r| <= pi/4`.
const COS: [f32; 3] = [4.166664556e-02, -1.388730365e-03, 2.443120138e-05];

/// The sine, with an absolute error within 2 units of 2^-24 up to 4096. Larger values go through
/// `libm` lane by lane.
#[inline(always)]
pub fn sin<S: Simd>(s: S, x: S::F32) -> S::F32 {
    beyond_limit(s, x, quarter_wave(s, x, 0), libm::sinf)
}

/// The cosine, with an absolute error within 2 units of 2^-24 up to 4096. Larger values go through
/// `libm` lane by lane.
#[inline(always)]
pub fn cos<S: Simd>(s: S, x: S::F32) -> S::F32 {
    beyond_limit(s, x, quarter_wave(s, x, 1), libm::cosf)
}

/// Replaces `wave` by `function(x)` in each lane whose `x` is too large for it. The other lanes
/// keep their bits. Otherwise a result would depend on its neighbours, which vary with the number
/// of threads.
#[inline(always)]
fn beyond_limit<S: Simd>(s: S, x: S::F32, wave: S::F32, function: impl Fn(f32) -> f32) -> S::F32 {
    let large = s.le(s.splat(TRIGONOMETRIC_LIMIT), s.abs(x));
    if s.any(large) { s.select(large, lane_by_lane(s, x, function), wave) } else { wave }
}

/// `sin(x + quarters * pi/2)`.
#[inline(always)]
fn quarter_wave<S: Simd>(s: S, x: S::F32, quarters: i32) -> S::F32 {
    let n = s.round_even(s.mul(x, s.splat(std::f32::consts::FRAC_2_PI)));
    let r = HALF_PI.iter().fold(x, |r, part| s.neg_mul_add(n, s.splat(*part), r));
    let square = s.mul(r, r);
    let sine = s.mul_add(s.mul(polynomial(s, square, SIN), square), r, r);
    let cosine = s.mul(polynomial(s, square, COS), s.mul(square, square));
    let cosine = s.add(s.neg_mul_add(s.splat(0.5), square, s.splat(1.0)), cosine);

    let quadrant = s.add_i32(s.to_i32(n), s.splat_i32(quarters));
    let odd = s.to_f32(s.and_i32(quadrant, s.splat_i32(1)));
    let wave = s.select(s.lt(s.splat(0.5), odd), cosine, sine);
    // Bit 1 of the quadrant is the sign.
    let sign = s.shl_i32::<30>(s.and_i32(quadrant, s.splat_i32(2)));
    s.from_bits(s.xor_i32(s.to_bits(wave), sign))
}

/// Applies a scalar function to each lane.
#[inline(always)]
pub fn lane_by_lane<S: Simd>(s: S, x: S::F32, function: impl Fn(f32) -> f32) -> S::F32 {
    let mut lanes = s.to_array(x);
    for lane in lanes.iter_mut().take(S::LANES) {
        *lane = function(*lane);
    }
    s.from_array(&lanes)
}
