//! Functions of one row of `f32`, built on the vector loops: sums, extremes, normalization.
//!
//! Sums accumulate in vector lanes within a block, and in `f64` over the blocks. The order depends
//! on the length alone.

use ort_cpu_threads::interrupt::{PIECE, pieces, pieces_mut};
use ort_cpu_vector::simd::slices::{BinaryOp, Operand, UnaryOp, fold, map, zip_in_place};
use ort_cpu_vector::simd::{Isa, MAX_LANES, Simd, SimdOp, dispatch, math, max_or_nan, min_or_nan};

/// Elements that are summed in `f32` before the sum goes on in `f64`.
const BLOCK: usize = 2048;

/// Defines functions of one value as types.
macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident($($field:ident),*) = |$s:ident, $x:ident| $formula:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name($(pub(crate) unary!(@f32 $field)),*);
        impl UnaryOp for $name {
            #[inline(always)]
            fn apply<S: Simd>(self, $s: S, $x: S::F32) -> S::F32 {
                let $name($($field),*) = self;
                $(let $field = $s.splat($field);)*
                $formula
            }
        }
    )*};
    (@f32 $field:ident) => { f32 };
}

unary! {
    /// `x`.
    Same() = |_s, x| x;
    /// `|x|`.
    Magnitude() = |s, x| s.abs(x);
    /// `x * x`.
    Square() = |s, x| s.mul(x, x);
    /// `e^(x - shift)`.
    ExpMinus(shift) = |s, x| math::exp(s, s.sub(x, shift));
    /// `(x - shift)^2`.
    SquareMinus(shift) = |s, x| { let d = s.sub(x, shift); s.mul(d, d) };
    /// `x * factor`.
    Scale(factor) = |s, x| s.mul(x, factor);
    /// `(x - mean) * factor + bias`.
    Affine(mean, factor, bias) = |s, x| s.mul_add(s.sub(x, mean), factor, bias);
}

/// Defines functions of two values as types.
macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident = |$s:ident, $a:ident, $b:ident| $formula:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;
        impl BinaryOp for $name {
            #[inline(always)]
            fn apply<S: Simd>(self, $s: S, $a: S::F32, $b: S::F32) -> S::F32 {
                $formula
            }
        }
    )*};
}

binary! {
    /// `a + b`.
    Plus = |s, a, b| s.add(a, b);
    /// `a * b`.
    Times = |s, a, b| s.mul(a, b);
    /// The greater; NaN if either is NaN.
    Greater = |s, a, b| s.max(a, b);
    /// The lesser; NaN if either is NaN.
    Lesser = |s, a, b| s.min(a, b);
    /// `e^(a - b)`.
    ExpDifference = |s, a, b| math::exp(s, s.sub(a, b));
}

/// Folds one row into another: `combine(a, map(b))`.
#[derive(Clone, Copy)]
pub(crate) struct FoldInto<M, C>(pub(crate) M, pub(crate) C);

impl<M: UnaryOp, C: BinaryOp> BinaryOp for FoldInto<M, C> {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F32, b: S::F32) -> S::F32 {
        self.1.apply(s, a, self.0.apply(s, b))
    }
}

/// How rows are reduced: in vectors, with partial results in `f64`.
pub(crate) trait Combine: BinaryOp + Sync {
    /// The identity element of the combination.
    const IDENTITY: f32;
    /// Combines two partial results.
    fn exact(a: f64, b: f64) -> f64;
}

impl Combine for Plus {
    const IDENTITY: f32 = 0.0;
    fn exact(a: f64, b: f64) -> f64 {
        a + b
    }
}

impl Combine for Times {
    const IDENTITY: f32 = 1.0;
    fn exact(a: f64, b: f64) -> f64 {
        a * b
    }
}

impl Combine for Greater {
    const IDENTITY: f32 = f32::NEG_INFINITY;
    fn exact(a: f64, b: f64) -> f64 {
        f64::from(max_or_nan(a as f32, b as f32))
    }
}

impl Combine for Lesser {
    const IDENTITY: f32 = f32::INFINITY;
    fn exact(a: f64, b: f64) -> f64 {
        f64::from(min_or_nan(a as f32, b as f32))
    }
}

/// Reduces `map(x)` over the row.
pub(crate) fn combine<M: UnaryOp, C: Combine>(isa: Isa, map: M, how: C, row: &[f32]) -> f64 {
    let mut total = f64::from(C::IDENTITY);
    for block in pieces(row).flat_map(|piece| piece.chunks(BLOCK)) {
        // The same number of lanes on every instruction set; those that a vector lacks hold the
        // identity.
        let lanes: [f32; MAX_LANES] = fold(isa, map, how, C::IDENTITY, block);
        total = lanes.iter().fold(total, |total, &lane| C::exact(total, f64::from(lane)));
    }
    total
}

/// Returns the greatest element; NaN if any is NaN; negative infinity for an empty row.
pub(crate) fn greatest(isa: Isa, row: &[f32]) -> f32 {
    combine(isa, Same(), Greater, row) as f32
}

/// Combines a row with another in place.
pub(crate) fn into_row(isa: Isa, op: impl BinaryOp, row: &mut [f32], other: &[f32]) {
    zip_in_place(isa, op, row, Operand::Slice(other));
}

/// Computes `(x - mean) * factor + bias`.
pub(crate) fn affine(isa: Isa, [mean, factor, bias]: [f32; 3], from: &[f32], to: &mut [f32]) {
    map(isa, Affine(mean, factor, bias), from, to);
}

/// Computes `(x - mean) * factor * scale[i] + bias[i]` over a row; the bias may be missing.
pub(crate) fn normalize(
    isa: Isa,
    [mean, factor]: [f32; 2],
    scale: &[f32],
    bias: Option<&[f32]>,
    row: (&[f32], &mut [f32]),
) {
    let (from, to) = row;
    let len = to.len();
    if from.len() == len && scale.len() == len && bias.is_none_or(|bias| bias.len() == len) {
        for (at, to) in pieces_mut(to).enumerate() {
            // Piece by piece, so that a deadline stops a long row.
            let here = at * PIECE..at * PIECE + to.len();
            let (from, scale, bias) =
                (&from[here.clone()], &scale[here.clone()], bias.map(|bias| &bias[here]));
            dispatch(isa, Normalize { mean, factor, scale, bias, from, to });
        }
    }
}

struct Normalize<'a> {
    mean: f32,
    factor: f32,
    scale: &'a [f32],
    bias: Option<&'a [f32]>,
    from: &'a [f32],
    to: &'a mut [f32],
}

impl SimdOp for Normalize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (mean, factor) = (s.splat(self.mean), s.splat(self.factor));
        let mut at = 0;
        while at < self.to.len() {
            let count = (self.to.len() - at).min(S::LANES);
            let load = |from: &[f32]| match count == S::LANES {
                true => s.load(from, at),
                false => s.load_partial(from, at, count, 0.0),
            };
            // The mean is subtracted first: `x * factor - mean * factor` would cancel if the mean
            // is large.
            let normal = s.mul(s.sub(load(self.from), mean), factor);
            let bias = self.bias.map_or(s.splat(0.0), load);
            let result = s.mul_add(normal, load(self.scale), bias);
            match count == S::LANES {
                true => s.store(self.to, at, result),
                false => s.store_partial(self.to, at, count, result),
            }
            at += count;
        }
    }
}
