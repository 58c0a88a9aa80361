//! Functions of one row of `f32`, built on the vector loops: sums, extremes, maps.
//!
//! Sums accumulate in vector lanes within a block, and in `f64` over the blocks. The order depends
//! on the length alone.

use ort_cpu_threads::interrupt::pieces;
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

/// The longest rows that [`combine_rows`] reduces.
pub(crate) const SHORT_ROW: usize = 256;

/// Reduces `map(x)` over each of several rows of `width` elements, which follow each other in
/// `from`. A call of [`combine`] for each would take many times as long as a short row itself.
/// `map_of` returns the function of a row, given what `to` holds for it.
///
/// The order depends on the width and the instruction set, and not on how many rows there are.
pub(crate) fn combine_rows<M: UnaryOp, C: Combine>(
    isa: Isa,
    (map_of, how): (impl Fn(f32) -> M, C),
    width: usize,
    from: &[f32],
    to: &mut [f32],
) {
    if width == 0 {
        to.fill(C::IDENTITY);
    } else {
        let from = &from[..width * to.len()];
        dispatch(isa, ShortRows { map_of, how, width, from, to });
    }
}

struct ShortRows<'a, F, C> {
    map_of: F,
    how: C,
    width: usize,
    from: &'a [f32],
    to: &'a mut [f32],
}

impl<M: UnaryOp, F: Fn(f32) -> M, C: Combine> SimdOp for ShortRows<'_, F, C> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ShortRows { map_of, how, width, from, to } = self;
        let identity = s.splat(C::IDENTITY);
        let (whole, rest) = (width / S::LANES * S::LANES, width % S::LANES);
        let in_rest = s.mask_of_bits(((1u32 << rest) - 1) as u16);
        let mut rows = from.chunks_exact(width);
        for to in to.chunks_mut(S::LANES) {
            // A vector of partial results for each row.
            let mut partial = [identity; MAX_LANES];
            for ((partial, row), held) in partial.iter_mut().zip(rows.by_ref().take(to.len())).zip(&*to) {
                let map = map_of(*held);
                for at in (0..whole).step_by(S::LANES) {
                    *partial = how.apply(s, *partial, map.apply(s, s.load(row, at)));
                }
                if rest > 0 {
                    let x = map.apply(s, s.load_partial(row, whole, rest, 0.0));
                    *partial = how.apply(s, *partial, s.select(in_rest, x, identity));
                }
            }
            // Each round combines neighbouring lanes of two vectors to one vector. The last one has
            // a lane for each row.
            let mut count = S::LANES;
            while count > 1 {
                count /= 2;
                for at in 0..count {
                    let (even, odd) = s.part_even_odd(partial[2 * at], partial[2 * at + 1]);
                    partial[at] = how.apply(s, even, odd);
                }
            }
            match to.len() == S::LANES {
                true => s.store(to, 0, partial[0]),
                false => s.store_partial(to, 0, to.len(), partial[0]),
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Reduces rows of every short width, in every number up to some vectors, and compares with
    /// `reference` in double precision.
    fn check<M: UnaryOp, C: Combine>(map: M, how: C, reference: impl Fn(&[f32]) -> f64) {
        for isa in Isa::available() {
            for width in 0..=SHORT_ROW {
                for count in [1, 3, 15, 16, 17, 40] {
                    let from: Vec<f32> =
                        (0..width * count).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.03).collect();
                    let mut to = vec![f32::NAN; count];
                    combine_rows(isa, (|_| map, how), width, &from, &mut to);
                    for (row, got) in to.iter().enumerate() {
                        let want = reference(&from[row * width..][..width]);
                        let close = (f64::from(*got) - want).abs() <= 1e-5 * (1.0 + want.abs());
                        assert!(close || f64::from(*got) == want, "{isa:?} {width} {row}: {got}, not {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn short_rows_agree_with_double_precision() {
        let wide = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        check(Same(), Plus, |row| wide(row).iter().sum());
        check(Square(), Plus, |row| wide(row).iter().map(|x| x * x).sum());
        check(Magnitude(), Plus, |row| wide(row).iter().map(|x| x.abs()).sum());
        check(Same(), Greater, |row| wide(row).into_iter().fold(f64::NEG_INFINITY, f64::max));
        check(Same(), Lesser, |row| wide(row).into_iter().fold(f64::INFINITY, f64::min));
        check(Same(), Times, |row| wide(row).iter().product());
    }

    #[test]
    fn short_rows_keep_nan() {
        for isa in Isa::available() {
            for width in 1..=SHORT_ROW {
                let mut from = vec![1.0; 3 * width];
                from[2 * width - 1] = f32::NAN;
                let mut to = [0.0; 3];
                combine_rows(isa, (|_| Same(), Greater), width, &from, &mut to);
                assert!(to[0] == 1.0 && to[1].is_nan() && to[2] == 1.0, "{isa:?} {width}: {to:?}");
            }
        }
    }
}
