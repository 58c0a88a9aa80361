//! Tests of the vector math errors against `libm` in double precision.

use crate::simd::slices::{UnaryOp, map};
use crate::simd::{Isa, Simd};

/// The functions of one vector.
mod math {
    pub(super) use crate::simd::math::*;

    #[inline(always)]
    pub(super) fn exp_shifted<S: super::Simd>(s: S, x: S::F32) -> S::F32 {
        let [result] = crate::simd::math::exp_shifted(s, [x]);
        result
    }

    #[inline(always)]
    pub(super) fn silu<S: super::Simd>(s: S, x: S::F32) -> S::F32 {
        let [result] = crate::simd::math::silu(s, [x]);
        result
    }
}

/// Returns the distance of `got` from `want` in `f32` units in the last place at `want`.
fn ulp_error(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if rounded.is_nan() || got.is_nan() {
        return if rounded.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if rounded == got {
        return 0.0;
    }
    if rounded.is_infinite() || got.is_infinite() {
        return f64::INFINITY;
    }
    let exponent = (rounded.abs().to_bits() >> 23).max(1) as i32 - 127 - 23;
    (f64::from(got) - want).abs() / 2.0_f64.powi(exponent)
}

/// Bit patterns over all of `f32` at an odd stride, and all special values.
fn sweep() -> Vec<f32> {
    let mut values: Vec<f32> = (0..u32::MAX).step_by(9_973).map(f32::from_bits).collect();
    // The range in which most functions are interesting, densely.
    values.extend((-300_000..300_000).map(|step| step as f32 * (110.0 / 300_000.0)));
    values.extend((-100_000..100_000).map(|step| step as f32 * (5.0 / 100_000.0)));
    for edge in [
        0.0,
        f32::MIN_POSITIVE,
        1.0,
        0.625,
        0.925,
        3.92,
        88.722_84,
        103.97,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
    ] {
        for step in -2_i32..=2 {
            let bits = (edge.to_bits() as i32).saturating_add(step).max(0) as u32;
            values.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
        }
    }
    values
}

macro_rules! check_ulp {
    ($($name:ident, $bound:expr, $domain:expr, $reference:expr;)+) => {
        $(
            #[test]
            fn $name() {
                #[derive(Clone, Copy)]
                struct Op;
                impl UnaryOp for Op {
                    #[inline(always)]
                    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
                        math::$name(s, x)
                    }
                }
                let domain: fn(f32) -> bool = $domain;
                let reference: fn(f64) -> f64 = $reference;
                check(stringify!($name), Op, $bound, domain, reference);
            }
        )+
    };
}

fn check(name: &str, op: impl UnaryOp, bound: f64, domain: fn(f32) -> bool, reference: fn(f64) -> f64) {
    let inputs: Vec<f32> = sweep().into_iter().filter(|x| x.is_nan() || domain(*x)).collect();
    for isa in Isa::available() {
        let mut results = vec![0.0; inputs.len()];
        map(isa, op, &inputs, &mut results);
        let (mut worst, mut worst_at) = (0.0, 0.0);
        for (x, got) in inputs.iter().zip(&results) {
            let error = ulp_error(*got, reference(f64::from(*x)));
            if error > worst {
                (worst, worst_at) = (error, *x);
            }
        }
        println!("{name:10} {:8} {worst:6.3} ULP at {worst_at:e}", isa.name());
        assert!(worst <= bound, "{name} on {}: {worst} ULP at {worst_at:e}", isa.name());
    }
}

fn sigmoid_reference(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

check_ulp! {
    exp, 1.25, |_| true, libm::exp;
    exp_nonpositive, 1.25, |x| (-86.0..=0.0).contains(&x), libm::exp;
    exp_shifted, 70.0, |x| (-86.0..=0.0).contains(&x), libm::exp;
    expm1, 4.0, |_| true, libm::expm1;
    log, 1.25, |_| true, libm::log;
    log1p, 3.0, |_| true, libm::log1p;
    tanh, 1.5, |_| true, libm::tanh;
    erf, 1.5, |_| true, libm::erf;
    sigmoid, 3.0, |_| true, sigmoid_reference;
    gate, 4.0, |x| x >= -87.0 || x.is_nan(), sigmoid_reference;
    silu, 4.5, |x| x > -87.0, |x| if x == f64::INFINITY { x } else { x * sigmoid_reference(x) };
    softplus, 3.0, |_| true, |x| if x > 80.0 { x } else { libm::log1p(libm::exp(x)) };
}

#[test]
fn bounded_functions_keep_their_absolute_error() {
    use crate::elementwise::{Unary, unary};
    let gelu: fn(f64) -> f64 = |x| 0.5 * x * (1.0 + libm::erf(x / 2.0_f64.sqrt()));
    let gelu_tanh: fn(f64) -> f64 =
        |x| 0.5 * x * (1.0 + libm::tanh((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)));
    type Case = (Unary, fn(f64) -> f64, f64, bool);
    let cases: [Case; 4] = [
        (Unary::Sin, libm::sin, 2.0, false),
        (Unary::Cos, libm::cos, 2.0, false),
        (Unary::Gelu, gelu, 2.5, true),
        (Unary::GeluTanh, gelu_tanh, 2.5, true),
    ];
    let inputs: Vec<f32> = sweep()
        .into_iter()
        .chain((-40_000..40_000).map(|i| i as f32 * 0.1037))
        .filter(|x| x.abs() < 1e30)
        .collect();
    for isa in Isa::available() {
        for (function, reference, bound, relative) in cases {
            let mut results = vec![0.0; inputs.len()];
            unary(isa, function, &inputs, &mut results);
            let mut worst = (0.0, 0.0);
            for (x, got) in inputs.iter().zip(&results) {
                let scale = if relative { f64::from(x.abs()) } else { 1.0 };
                let unit = (scale * 2.0_f64.powi(-24)).max(f64::from(f32::from_bits(1)));
                let error = (f64::from(*got) - reference(f64::from(*x))).abs() / unit;
                if error > worst.0 || error.is_nan() {
                    worst = (error, *x);
                }
            }
            println!("{function:?} {} {worst:?}", isa.name());
            assert!(worst.0 <= bound, "{function:?} on {}: {worst:?}", isa.name());
        }
    }
}
