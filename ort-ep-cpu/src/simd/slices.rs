//! Loops of vector operations over slices, with lengths checked once.

use half::f16;

use super::{Isa, Simd, SimdOp, dispatch};
use crate::interrupt::{PIECE, pieces_mut};

/// A function of one value, for all lanes at once.
pub trait UnaryOp: Copy {
    /// The function.
    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32;
}

/// A function of two values, for all lanes at once.
pub trait BinaryOp: Copy {
    /// The function.
    fn apply<S: Simd>(self, s: S, a: S::F32, b: S::F32) -> S::F32;
}

/// One side of a binary function: a value for each place, or one for all.
#[derive(Debug, Clone, Copy)]
pub enum Operand<'a> {
    /// As many values as the result.
    Slice(&'a [f32]),
    /// One value, used at each place.
    Scalar(f32),
}

impl<'a> Operand<'a> {
    fn len(self) -> Option<usize> {
        match self {
            Operand::Slice(values) => Some(values.len()),
            Operand::Scalar(_) => None,
        }
    }

    /// The values for piece number `at` of the result, which is `len` long.
    fn piece(self, at: usize, len: usize) -> Operand<'a> {
        match self {
            Operand::Slice(values) => Operand::Slice(&values[at * PIECE..][..len]),
            scalar => scalar,
        }
    }
}

/// Where a loop reads: a pointer that advances, or one value.
trait Source: Copy {
    /// # Safety
    /// `at + LANES` values can be read, if this is memory.
    unsafe fn load<S: Simd>(self, s: S, at: usize) -> S::F32;
    /// # Safety
    /// `at + count` values can be read, if this is memory.
    unsafe fn load_partial<S: Simd>(self, s: S, at: usize, count: usize) -> S::F32;
}

impl Source for *const f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, at: usize) -> S::F32 {
        // SAFETY: as the caller promises.
        unsafe { s.load_ptr(self.add(at)) }
    }
    #[inline(always)]
    unsafe fn load_partial<S: Simd>(self, s: S, at: usize, count: usize) -> S::F32 {
        // SAFETY: as the caller promises.
        unsafe { s.load_partial_ptr(self.add(at), count, 0.0) }
    }
}

impl Source for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, _at: usize) -> S::F32 {
        s.splat(self)
    }
    #[inline(always)]
    unsafe fn load_partial<S: Simd>(self, s: S, _at: usize, _count: usize) -> S::F32 {
        s.splat(self)
    }
}

struct MapLoop<O> {
    op: O,
    from: *const f32,
    to: *mut f32,
    len: usize,
}

impl<O: UnaryOp> SimdOp for MapLoop<O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut at = 0;
        while at + S::LANES <= self.len {
            // SAFETY: `at + LANES` is within both, which hold `len` values. `from` may be `to`:
            // each vector is read before it is written, and no other overlap is made.
            unsafe {
                let x = s.load_ptr(self.from.add(at));
                s.store_ptr(self.to.add(at), self.op.apply(s, x));
            }
            at += S::LANES;
        }
        let rest = self.len - at;
        if rest > 0 {
            // SAFETY: as above, for the `rest` values that are left.
            unsafe {
                let x = s.load_partial_ptr(self.from.add(at), rest, 0.0);
                s.store_partial_ptr(self.to.add(at), rest, self.op.apply(s, x));
            }
        }
    }
}

struct ZipLoop<O, A, B> {
    op: O,
    a: A,
    b: B,
    to: *mut f32,
    len: usize,
}

impl<O: BinaryOp, A: Source, B: Source> SimdOp for ZipLoop<O, A, B> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut at = 0;
        while at + S::LANES <= self.len {
            // SAFETY: `at + LANES` is within all of them, which hold `len` values. A source may be
            // `to`: each vector is read before it is written, and no other overlap is made.
            unsafe {
                let result = self.op.apply(s, self.a.load(s, at), self.b.load(s, at));
                s.store_ptr(self.to.add(at), result);
            }
            at += S::LANES;
        }
        let rest = self.len - at;
        if rest > 0 {
            // SAFETY: as above, for the `rest` values that are left.
            unsafe {
                let a = self.a.load_partial(s, at, rest);
                let b = self.b.load_partial(s, at, rest);
                s.store_partial_ptr(self.to.add(at), rest, self.op.apply(s, a, b));
            }
        }
    }
}

/// `to[i] = op(from[i])`.
///
/// # Panics
/// If the lengths differ.
pub fn map(isa: Isa, op: impl UnaryOp, from: &[f32], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "a map keeps the length");
    for (from, to) in from.chunks(PIECE).zip(pieces_mut(to)) {
        dispatch(isa, MapLoop { op, from: from.as_ptr(), to: to.as_mut_ptr(), len: to.len() });
    }
}

/// `data[i] = op(data[i])`.
pub fn map_in_place(isa: Isa, op: impl UnaryOp, data: &mut [f32]) {
    for data in pieces_mut(data) {
        let to = data.as_mut_ptr();
        dispatch(isa, MapLoop { op, from: to.cast_const(), to, len: data.len() });
    }
}

/// `to[i] = op(a[i], b[i])`.
///
/// # Panics
/// If the lengths differ.
pub fn zip(isa: Isa, op: impl BinaryOp, a: Operand<'_>, b: Operand<'_>, to: &mut [f32]) {
    if to.len() <= PIECE {
        return zip_piece(isa, op, a, b, to);
    }
    let fits = |side: Operand<'_>| side.len().is_none_or(|len| len == to.len());
    assert!(fits(a) && fits(b), "both sides have the result's length");
    for (at, to) in pieces_mut(to).enumerate() {
        zip_piece(isa, op, a.piece(at, to.len()), b.piece(at, to.len()), to);
    }
}

fn zip_piece(isa: Isa, op: impl BinaryOp, a: Operand<'_>, b: Operand<'_>, to: &mut [f32]) {
    let len = to.len();
    let to = to.as_mut_ptr();
    match (a, b) {
        (Operand::Slice(a), Operand::Slice(b)) => {
            assert!(a.len() == len && b.len() == len, "both sides have the result's length");
            dispatch(isa, ZipLoop { op, a: a.as_ptr(), b: b.as_ptr(), to, len });
        }
        (Operand::Slice(a), Operand::Scalar(b)) => {
            assert_eq!(a.len(), len, "the left side has the result's length");
            dispatch(isa, ZipLoop { op, a: a.as_ptr(), b, to, len });
        }
        (Operand::Scalar(a), Operand::Slice(b)) => {
            assert_eq!(b.len(), len, "the right side has the result's length");
            dispatch(isa, ZipLoop { op, a, b: b.as_ptr(), to, len });
        }
        (Operand::Scalar(a), Operand::Scalar(b)) => dispatch(isa, ZipLoop { op, a, b, to, len }),
    }
}

/// `data[i] = op(data[i], other[i])`.
///
/// # Panics
/// If the lengths differ.
pub fn zip_in_place(isa: Isa, op: impl BinaryOp, data: &mut [f32], other: Operand<'_>) {
    if data.len() <= PIECE {
        return zip_piece_in_place(isa, op, data, other);
    }
    assert!(other.len().is_none_or(|len| len == data.len()), "the other side has the result's length");
    for (at, data) in pieces_mut(data).enumerate() {
        zip_piece_in_place(isa, op, data, other.piece(at, data.len()));
    }
}

fn zip_piece_in_place(isa: Isa, op: impl BinaryOp, data: &mut [f32], other: Operand<'_>) {
    let len = data.len();
    let to = data.as_mut_ptr();
    match other {
        Operand::Slice(b) => {
            assert_eq!(b.len(), len, "the other side has the result's length");
            dispatch(isa, ZipLoop { op, a: to.cast_const(), b: b.as_ptr(), to, len });
        }
        Operand::Scalar(b) => dispatch(isa, ZipLoop { op, a: to.cast_const(), b, to, len }),
    }
}

/// A binary function with its sides exchanged.
#[derive(Debug, Clone, Copy)]
pub struct Swapped<O>(pub O);

impl<O: BinaryOp> BinaryOp for Swapped<O> {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F32, b: S::F32) -> S::F32 {
        self.0.apply(s, b, a)
    }
}

struct FoldLoop<'a, M, C> {
    map: M,
    combine: C,
    identity: f32,
    from: &'a [f32],
}

impl<M: UnaryOp, C: BinaryOp> SimdOp for FoldLoop<'_, M, C> {
    type Output = [f32; super::MAX_LANES];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let FoldLoop { map, combine, identity, from } = self;
        let mut sums = [s.splat(identity); 4];
        let mut at = 0;
        let (start, len) = (from.as_ptr(), from.len());
        while at + 4 * S::LANES <= len {
            for (part, sum) in sums.iter_mut().enumerate() {
                // SAFETY: four vectors from `at` on are within the slice.
                let x = unsafe { s.load_ptr(start.add(at + part * S::LANES)) };
                *sum = combine.apply(s, *sum, map.apply(s, x));
            }
            at += 4 * S::LANES;
        }
        while at + S::LANES <= len {
            // SAFETY: one vector from `at` on is within the slice.
            let x = unsafe { s.load_ptr(start.add(at)) };
            sums[0] = combine.apply(s, sums[0], map.apply(s, x));
            at += S::LANES;
        }
        let low = combine.apply(s, sums[0], sums[1]);
        let high = combine.apply(s, sums[2], sums[3]);
        let mut lanes = s.to_array(combine.apply(s, low, high));
        lanes[S::LANES..].fill(identity);
        if at < len {
            // The identity of `combine` need not be one after `map`, so a partial vector is mapped
            // and then cut. SAFETY: `len - at` values are left, fewer than a vector.
            let x = unsafe { s.load_partial_ptr(start.add(at), len - at, 0.0) };
            let mapped = s.to_array(map.apply(s, x));
            let mut rest = [identity; super::MAX_LANES];
            rest[..len - at].copy_from_slice(&mapped[..len - at]);
            let both = combine.apply(s, s.from_array(&lanes), s.from_array(&rest));
            lanes = s.to_array(both);
            lanes[S::LANES..].fill(identity);
        }
        lanes
    }
}

/// Combines `map(x)` of all values into up to [`MAX_LANES`](super::MAX_LANES) partial results (the
/// others are `identity`). The order depends only on the length and the instruction set.
pub fn fold(
    isa: Isa,
    map: impl UnaryOp,
    combine: impl BinaryOp,
    identity: f32,
    from: &[f32],
) -> [f32; super::MAX_LANES] {
    dispatch(isa, FoldLoop { map, combine, identity, from })
}

struct Widen<'a> {
    from: &'a [f16],
    to: &'a mut [f32],
}

impl SimdOp for Widen<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let whole = self.to.len() / S::LANES * S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: the vector is within both slices, which have one length; an f16 is its bits.
            unsafe {
                let values = s.load_f16_ptr(self.from.as_ptr().add(at).cast());
                s.store_ptr(self.to.as_mut_ptr().add(at), values);
            }
        }
        for (to, from) in self.to[whole..].iter_mut().zip(&self.from[whole..]) {
            *to = from.to_f32();
        }
    }
}

/// Widens half-precision values.
///
/// # Panics
/// If the lengths differ.
pub fn singles_from_halves(isa: Isa, from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "a conversion keeps the length");
    dispatch(isa, Widen { from, to });
}

struct Narrow<'a> {
    from: &'a [f32],
    to: &'a mut [f16],
}

impl SimdOp for Narrow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let whole = self.to.len() / S::LANES * S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: the vector is within both slices, which have one length; an f16 is its bits.
            unsafe {
                let values = s.load_ptr(self.from.as_ptr().add(at));
                s.store_f16_ptr(self.to.as_mut_ptr().add(at).cast(), values);
            }
        }
        for (to, from) in self.to[whole..].iter_mut().zip(&self.from[whole..]) {
            *to = f16::from_f32(*from);
        }
    }
}

/// Rounds to half precision, to nearest even.
///
/// # Panics
/// If the lengths differ.
pub fn halves_from_singles(isa: Isa, from: &[f32], to: &mut [f16]) {
    assert_eq!(from.len(), to.len(), "a conversion keeps the length");
    dispatch(isa, Narrow { from, to });
}
