//! Element-wise functions of one, two or three values over slices.
//!
//! The tables below are the only lists of these functions. A row is a name, its parameters and its
//! formula.

use crate::simd::slices::{
    BinaryOp, Swapped, UnaryOp, map, map_in_place, zip, zip_in_place, zip_rows_in_place,
};
use crate::simd::{Isa, Simd, SimdOp, dispatch, math};

pub use crate::simd::slices::{Operand, RowNumbers};

/// Generates [`Unary`], a type for each of its rows, and the dispatch between them. `x` is one
/// vector, or after `each` several.
macro_rules! unary_functions {
    (
        $($(#[$doc:meta])*
        $name:ident $({ $($field:ident),+ })? => $($each:ident)? |$s:ident, $x:ident| $formula:expr;)+
    ) => {
        /// A function of one value. Parameters are named as the attributes of the ONNX operator.
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub enum Unary {
            $($(#[$doc])* $name $({ $(
                #[doc = concat!("The parameter `", stringify!($field), "` of the formula.")]
                $field: f32
            ),+ })?),+
        }

        impl Unary {
            fn visit(self, visitor: impl UnaryVisitor) {
                match self {
                    $(Unary::$name $({ $($field),+ })? => visitor.visit(rows::$name { $($($field),+)? })),+
                }
            }
        }

        mod rows {
            use super::*;
            $(
                #[derive(Clone, Copy)]
                pub(super) struct $name { $($(pub(super) $field: f32),+)? }
                unary_functions!(@item $name $({ $($field),+ })? => $($each)? |$s, $x| $formula);
            )+
        }
    };
    (@item $name:ident $({ $($field:ident),+ })? => |$s:ident, $x:ident| $formula:expr) => {
        impl UnaryOp for $name {
            #[inline(always)]
            fn apply<S: Simd>(self, $s: S, $x: S::F32) -> S::F32 {
                $(let $name { $($field),+ } = self; $(let $field = $s.splat($field);)+)?
                $formula
            }
        }
    };
    (@item $name:ident $({ $($field:ident),+ })? => each |$s:ident, $x:ident| $formula:expr) => {
        impl UnaryOp for $name {
            #[inline(always)]
            fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
                let [result] = self.apply_each(s, [x]);
                result
            }

            #[inline(always)]
            fn apply_each<S: Simd, const V: usize>(self, $s: S, $x: [S::F32; V]) -> [S::F32; V] {
                $(let $name { $($field),+ } = self; $(let $field = $s.splat($field);)+)?
                $formula
            }
        }
    };
}

trait UnaryVisitor {
    fn visit(self, op: impl UnaryOp);
}

unary_functions! {
    /// `|x|`.
    Abs => |s, x| s.abs(x);
    /// `-x`.
    Neg => |s, x| s.neg(x);
    /// -1, 0 or 1; NaN for NaN. The result is never a negative zero.
    Sign => |s, x| {
        let zero = s.splat(0.0);
        let signed = s.select(s.lt(x, zero), s.splat(-1.0), s.add(x, zero));
        s.select(s.lt(zero, x), s.splat(1.0), signed)
    };
    /// `x * x`.
    Square => |s, x| s.mul(x, x);
    /// The square root.
    Sqrt => |s, x| s.sqrt(x);
    /// `1 / x`.
    Reciprocal => |s, x| s.div(s.splat(1.0), x);
    /// The greatest integer not above `x`.
    Floor => |s, x| s.floor(x);
    /// The least integer not below `x`.
    Ceil => |s, x| s.ceil(x);
    /// The nearest integer, ties to even.
    Round => |s, x| s.round_even(x);
    /// The integer part.
    Trunc => |s, x| s.trunc(x);
    /// `e^x`.
    Exp => |s, x| math::exp(s, x);
    /// `e^x - 1`.
    Expm1 => |s, x| math::expm1(s, x);
    /// The natural logarithm.
    Log => |s, x| math::log(s, x);
    /// `log(1 + x)`.
    Log1p => |s, x| math::log1p(s, x);
    /// The error function.
    Erf => |s, x| math::erf(s, x);
    /// The hyperbolic tangent.
    Tanh => |s, x| math::tanh(s, x);
    /// The sine.
    Sin => |s, x| math::sin(s, x);
    /// The cosine.
    Cos => |s, x| math::cos(s, x);
    /// `1 / (1 + e^-x)`.
    Sigmoid => |s, x| math::sigmoid(s, x);
    /// `log(1 + e^x)`.
    Softplus => |s, x| math::softplus(s, x);
    /// `x / (1 + |x|)`.
    Softsign => |s, x| s.div(x, s.add(s.splat(1.0), s.abs(x)));
    /// The greater of 0 and `x`.
    Relu => |s, x| s.max_or_second(s.splat(0.0), x);
    /// `x`, or `alpha * x` below 0.
    LeakyRelu { alpha } => |s, x| s.select(s.lt(x, s.splat(0.0)), s.mul(x, alpha), x);
    /// `x`, or 0 up to `alpha`.
    ThresholdedRelu { alpha } => |s, x| s.select(s.lt(alpha, x), x, s.splat(0.0));
    /// `x`, or `alpha * (e^x - 1)` below 0.
    Elu { alpha } => |s, x| s.select(s.lt(x, s.splat(0.0)), s.mul(alpha, math::expm1(s, x)), x);
    /// `gamma` times (`x`, or `alpha * (e^x - 1)` below 0).
    Selu { alpha, gamma } => |s, x| {
        let negative = s.mul(alpha, math::expm1(s, x));
        s.mul(gamma, s.select(s.lt(x, s.splat(0.0)), negative, x))
    };
    /// `x`, or `alpha * (e^(x / alpha) - 1)` below 0.
    Celu { alpha } => |s, x| {
        let negative = s.mul(alpha, math::expm1(s, s.div(x, alpha)));
        s.select(s.lt(x, s.splat(0.0)), negative, x)
    };
    /// The value nearest to `x` between `min` and `max`; `max` if they cross.
    Clip { min, max } => |s, x| s.min_or_second(max, s.max_or_second(min, x));
    /// `alpha * x + beta`, clipped to 0 to 1.
    HardSigmoid { alpha, beta } => |s, x| {
        let line = s.mul_add(alpha, x, beta);
        s.min_or_second(s.splat(1.0), s.max_or_second(s.splat(0.0), line))
    };
    /// `x * HardSigmoid(x)` with `alpha` 1/6 and `beta` 1/2.
    HardSwish => |s, x| {
        let line = s.mul_add(x, s.splat(1.0 / 6.0), s.splat(0.5));
        s.mul(x, s.min_or_second(s.splat(1.0), s.max_or_second(s.splat(0.0), line)))
    };
    /// `x * sigmoid(x)`.
    Silu => each |s, x| math::silu(s, x);
    /// `x * sigmoid(alpha * x)`.
    Swish { alpha } => each |s, x| math::swish(s, x, alpha);
    /// `x * tanh(softplus(x))`.
    Mish => |s, x| s.mul(x, math::tanh(s, math::softplus(s, x)));
    /// `x / 2 * (1 + erf(x / sqrt(2)))`.
    Gelu => each |s, x| math::gelu(s, x);
    /// The approximation of `Gelu` by `tanh`.
    GeluTanh => each |s, x| math::gelu_tanh(s, x);
    /// `scale * x + shift`.
    Affine { scale, shift } => |s, x| s.mul_add(scale, x, shift);
}

struct Map<'a> {
    isa: Isa,
    from: &'a [f32],
    to: &'a mut [f32],
}

impl UnaryVisitor for Map<'_> {
    fn visit(self, op: impl UnaryOp) {
        map(self.isa, op, self.from, self.to);
    }
}

struct MapInPlace<'a> {
    isa: Isa,
    data: &'a mut [f32],
}

impl UnaryVisitor for MapInPlace<'_> {
    fn visit(self, op: impl UnaryOp) {
        map_in_place(self.isa, op, self.data);
    }
}

/// Computes `to[i] = function(from[i])`.
///
/// # Panics
/// If the lengths differ.
///
/// ```
/// use ort_cpu_vector::{elementwise::{Unary, unary}, simd::Isa};
/// let mut result = [0.0; 3];
/// unary(Isa::current(), Unary::LeakyRelu { alpha: 0.5 }, &[-2.0, 0.0, 3.0], &mut result);
/// assert_eq!(result, [-1.0, 0.0, 3.0]);
/// ```
pub fn unary(isa: Isa, function: Unary, from: &[f32], to: &mut [f32]) {
    function.visit(Map { isa, from, to });
}

/// Computes `data[i] = function(data[i])`.
pub fn unary_in_place(isa: Isa, function: Unary, data: &mut [f32]) {
    function.visit(MapInPlace { isa, data });
}

/// Generates [`Binary`], a type for each of its rows, and the dispatch between them.
macro_rules! binary_functions {
    ($($(#[$doc:meta])* $name:ident => |$s:ident, $a:ident, $b:ident| $formula:expr;)+) => {
        /// A function of two values.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Binary {
            $($(#[$doc])* $name),+
        }

        impl Binary {
            fn visit(self, visitor: impl BinaryVisitor) {
                match self {
                    $(Binary::$name => visitor.visit(binary_rows::$name)),+
                }
            }
        }

        mod binary_rows {
            use super::*;
            $(
                #[derive(Clone, Copy)]
                pub(super) struct $name;
                impl BinaryOp for $name {
                    #[inline(always)]
                    fn apply<S: Simd>(self, $s: S, $a: S::F32, $b: S::F32) -> S::F32 {
                        $formula
                    }
                }
            )+
        }
    };
}

trait BinaryVisitor {
    fn visit(self, op: impl BinaryOp);
}

binary_functions! {
    /// `a + b`.
    Add => |s, a, b| s.add(a, b);
    /// `a - b`.
    Sub => |s, a, b| s.sub(a, b);
    /// `a * b`.
    Mul => |s, a, b| s.mul(a, b);
    /// `a / b`.
    Div => |s, a, b| s.div(a, b);
    /// The lesser; NaN if either is NaN.
    Min => |s, a, b| s.min(a, b);
    /// The greater; NaN if either is NaN.
    Max => |s, a, b| s.max(a, b);
    /// `a`, or `a * b` if `a` is below 0.
    PRelu => |s, a, b| s.select(s.lt(a, s.splat(0.0)), s.mul(a, b), a);
    /// `a^b`, lane by lane: through `exp` and `log` it would lose up to 7 bits.
    Pow => |s, a, b| {
        let exponents = s.to_array(b);
        let mut lane = 0;
        let mut powers = s.to_array(a);
        while lane < S::LANES {
            powers[lane] = power(powers[lane], exponents[lane]);
            lane += 1;
        }
        s.from_array(&powers)
    };
}

/// Computes `a^b` by the platform's function, and the exponents 2 and 3 by multiplication. Loops
/// for a single exponent do the same, so a result does not depend on how its tensor is split into
/// blocks.
#[inline]
fn power(a: f32, b: f32) -> f32 {
    match b {
        2.0 => a * a,
        3.0 => a * a * a,
        _ => a.powf(b),
    }
}

struct Zip<'a> {
    isa: Isa,
    a: Operand<'a>,
    b: Operand<'a>,
    to: &'a mut [f32],
}

impl BinaryVisitor for Zip<'_> {
    fn visit(self, op: impl BinaryOp) {
        zip(self.isa, op, self.a, self.b, self.to);
    }
}

struct ZipInPlace<'a> {
    isa: Isa,
    data: &'a mut [f32],
    other: Operand<'a>,
    swapped: bool,
}

impl BinaryVisitor for ZipInPlace<'_> {
    fn visit(self, op: impl BinaryOp) {
        if self.swapped {
            zip_in_place(self.isa, Swapped(op), self.data, self.other);
        } else {
            zip_in_place(self.isa, op, self.data, self.other);
        }
    }
}

/// Computes `to[i] = function(a[i], b[i])`.
///
/// # Panics
/// If the lengths differ.
pub fn binary(isa: Isa, function: Binary, a: Operand<'_>, b: Operand<'_>, to: &mut [f32]) {
    function.visit(Zip { isa, a, b, to });
}

/// Computes `data[i] = function(data[i], other[i])`.
///
/// # Panics
/// If the lengths differ.
pub fn binary_in_place(isa: Isa, function: Binary, data: &mut [f32], other: Operand<'_>) {
    function.visit(ZipInPlace { isa, data, other, swapped: false });
}

/// Computes `data[i] = function(other[i], data[i])`.
///
/// # Panics
/// If the lengths differ.
pub fn binary_in_place_swapped(isa: Isa, function: Binary, data: &mut [f32], other: Operand<'_>) {
    function.visit(ZipInPlace { isa, data, other, swapped: true });
}

struct ZipRowsInPlace<'a> {
    isa: Isa,
    data: &'a mut [f32],
    rows: RowNumbers<'a>,
    swapped: bool,
}

impl BinaryVisitor for ZipRowsInPlace<'_> {
    fn visit(self, op: impl BinaryOp) {
        if self.swapped {
            zip_rows_in_place(self.isa, Swapped(op), self.data, self.rows);
        } else {
            zip_rows_in_place(self.isa, op, self.data, self.rows);
        }
    }
}

/// Computes `data[i] = function(data[i], number of its row)`, with the operands exchanged if
/// `swapped`.
pub fn binary_rows_in_place(
    isa: Isa,
    function: Binary,
    data: &mut [f32],
    rows: RowNumbers<'_>,
    swapped: bool,
) {
    function.visit(ZipRowsInPlace { isa, data, rows, swapped });
}

struct MulAdd<'a> {
    a: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    to: &'a mut [f32],
}

impl SimdOp for MulAdd<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = self.to.len();
        let mut at = 0;
        while at + S::LANES <= len {
            let sum = s.mul_add(s.load(self.a, at), s.load(self.b, at), s.load(self.c, at));
            s.store(self.to, at, sum);
            at += S::LANES;
        }
        let rest = len - at;
        let part = |from| s.load_partial(from, at, rest, 0.0);
        let sum = s.mul_add(part(self.a), part(self.b), part(self.c));
        s.store_partial(self.to, at, rest, sum);
    }
}

/// Computes `to[i] = a[i] * b[i] + c[i]`, rounded once if the CPU can.
///
/// # Panics
/// If the lengths differ.
pub fn mul_add(isa: Isa, a: &[f32], b: &[f32], c: &[f32], to: &mut [f32]) {
    assert!([a.len(), b.len(), c.len()] == [to.len(); 3], "all sides have the result's length");
    dispatch(isa, MulAdd { a, b, c, to });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(len: usize, seed: f32) -> Vec<f32> {
        let mut values: Vec<f32> = (0..len).map(|i| ((i as f32 + seed) * 12.989).sin() * 6.0).collect();
        for (index, special) in
            [f32::NAN, -0.0, f32::INFINITY, f32::NEG_INFINITY, 2.5].into_iter().enumerate()
        {
            if let Some(value) = values.get_mut(7 * index + 3) {
                *value = special;
            }
        }
        values
    }

    fn same(a: f32, b: f32, tolerance: f32) -> bool {
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * (1.0 + b.abs())
    }

    #[test]
    fn unary_functions_agree_with_their_definitions() {
        type Case = (Unary, fn(f32) -> f32);
        let cases: [Case; 22] = [
            (Unary::Abs, f32::abs),
            (Unary::Neg, |x| -x),
            (Unary::Sign, |x| if x.is_nan() || x == 0.0 { x + 0.0 } else { x.signum() }),
            (Unary::Square, |x| x * x),
            (Unary::Sqrt, f32::sqrt),
            (Unary::Reciprocal, |x| 1.0 / x),
            (Unary::Floor, f32::floor),
            (Unary::Ceil, f32::ceil),
            (Unary::Round, f32::round_ties_even),
            (Unary::Trunc, f32::trunc),
            (Unary::Relu, |x| if x < 0.0 { 0.0 } else { x }),
            (Unary::LeakyRelu { alpha: 0.1 }, |x| if x < 0.0 { 0.1 * x } else { x }),
            (Unary::ThresholdedRelu { alpha: 1.0 }, |x| if x > 1.0 { x } else { 0.0 }),
            (Unary::Elu { alpha: 0.5 }, |x| if x < 0.0 { 0.5 * x.exp_m1() } else { x }),
            (Unary::Selu { alpha: 1.5, gamma: 2.0 }, |x| 2.0 * if x < 0.0 { 1.5 * x.exp_m1() } else { x }),
            (Unary::Celu { alpha: 2.0 }, |x| if x < 0.0 { 2.0 * (x / 2.0).exp_m1() } else { x }),
            (Unary::Clip { min: -1.0, max: 2.0 }, |x| x.clamp(-1.0, 2.0)),
            (Unary::HardSigmoid { alpha: 0.2, beta: 0.5 }, |x| (0.2 * x + 0.5).clamp(0.0, 1.0)),
            (Unary::HardSwish, |x| x * (x / 6.0 + 0.5).clamp(0.0, 1.0)),
            (Unary::Softsign, |x| x / (1.0 + x.abs())),
            (Unary::Mish, |x| x * x.exp().ln_1p().tanh()),
            (Unary::Affine { scale: 3.0, shift: -1.0 }, |x| 3.0 * x - 1.0),
        ];
        for isa in Isa::available() {
            for (function, reference) in cases {
                for len in 0..100 {
                    let from = inputs(len, 0.5);
                    let mut to = vec![0.0; len];
                    unary(isa, function, &from, &mut to);
                    let mut in_place = from.clone();
                    unary_in_place(isa, function, &mut in_place);
                    for index in 0..len {
                        let (x, want) = (from[index], reference(from[index]));
                        assert!(
                            same(to[index], want, 1e-6),
                            "{function:?} {isa:?} of {x}: {} not {want}",
                            to[index]
                        );
                        assert_eq!(to[index].to_bits(), in_place[index].to_bits());
                    }
                }
            }
        }
    }

    #[test]
    fn binary_functions_agree_in_all_forms() {
        type Case = (Binary, fn(f32, f32) -> f32);
        let cases: [Case; 8] = [
            (Binary::Add, |a, b| a + b),
            (Binary::Sub, |a, b| a - b),
            (Binary::Mul, |a, b| a * b),
            (Binary::Div, |a, b| a / b),
            (Binary::Min, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.min(b) }),
            (Binary::Max, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }),
            (Binary::PRelu, |a, b| if a < 0.0 { a * b } else { a }),
            (Binary::Pow, f32::powf),
        ];
        for isa in Isa::available() {
            for (function, reference) in cases {
                for len in 0..100 {
                    let (a, b) = (inputs(len, 0.25), inputs(len, 9.75).into_iter().rev().collect::<Vec<_>>());
                    let forms = [
                        (Operand::Slice(&a), Operand::Slice(&b)),
                        (Operand::Slice(&a), Operand::Scalar(1.5)),
                        (Operand::Scalar(1.5), Operand::Slice(&b)),
                        (Operand::Scalar(1.5), Operand::Scalar(f32::NAN)),
                    ];
                    for (left, right) in forms {
                        let at = |side: Operand<'_>, index: usize| match side {
                            Operand::Slice(values) => values[index],
                            Operand::Scalar(value) => value,
                        };
                        let want: Vec<f32> = (0..len).map(|i| reference(at(left, i), at(right, i))).collect();
                        let mut results = vec![vec![0.0; len]];
                        binary(isa, function, left, right, &mut results[0]);
                        if let Operand::Slice(data) = left {
                            results.push(data.to_vec());
                            binary_in_place(isa, function, &mut results[1], right);
                        } else if let Operand::Slice(data) = right {
                            results.push(data.to_vec());
                            binary_in_place_swapped(isa, function, &mut results[1], left);
                        }
                        for result in &results {
                            for index in 0..len {
                                assert!(
                                    same(result[index], want[index], 0.0),
                                    "{function:?} {isa:?} at {index}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn numbers_of_rows_apply_to_their_rows() {
        let numbers: Vec<f32> = (0..9).map(|i| 0.5 + i as f32).collect();
        for isa in Isa::available() {
            for (first, each) in [(1, 7), (7, 7), (3, 16), (49, 49), (40, 70)] {
                // The last row ends early; with one more number, nothing is left for it.
                for len in [first, first + 1, first + 3 * each, first + 7 * each + each / 2] {
                    for swapped in [false, true] {
                        let from: Vec<f32> = (0..len).map(|i| (i as f32 * 0.3).sin()).collect();
                        let mut data = from.clone();
                        let rows = RowNumbers { numbers: &numbers, first, each };
                        binary_rows_in_place(isa, Binary::Sub, &mut data, rows, swapped);
                        for (at, (got, x)) in data.iter().zip(&from).enumerate() {
                            let number = numbers[(at + each - first) / each];
                            let want = if swapped { number - x } else { x - number };
                            assert_eq!(*got, want, "{isa:?} {first} {each} {len} at {at}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn mul_add_is_close_to_both_roundings() {
        for isa in Isa::available() {
            for len in 0..100 {
                let (a, b, c) = (inputs(len, 0.1), inputs(len, 0.2), inputs(len, 0.3));
                let mut to = vec![0.0; len];
                mul_add(isa, &a, &b, &c, &mut to);
                for index in 0..len {
                    assert!(same(to[index], a[index] * b[index] + c[index], 1e-5));
                }
            }
        }
    }
}
