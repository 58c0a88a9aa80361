//! Map, zip and fold loops of vector operations over slices, with lengths checked once.

use half::f16;

use super::{Isa, Simd, SimdOp, dispatch};
use ort_cpu_threads::interrupt::{PIECE, pieces_mut};

/// A unary function, applied to all lanes at once.
pub trait UnaryOp: Copy {
    /// Applies the function.
    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32;

    /// Applies the function to several vectors. A long function does so step by step, as the CPU
    /// does not look far enough ahead to work on the next vector while it waits for a step.
    #[inline(always)]
    fn apply_each<S: Simd, const V: usize>(self, s: S, mut x: [S::F32; V]) -> [S::F32; V] {
        for x in &mut x {
            *x = self.apply(s, *x);
        }
        x
    }
}

/// A binary function, applied to all lanes at once.
pub trait BinaryOp: Copy {
    /// Applies the function.
    fn apply<S: Simd>(self, s: S, a: S::F32, b: S::F32) -> S::F32;
}

/// An operand of a binary function: one value per element, or a scalar.
#[derive(Debug, Clone, Copy)]
pub enum Operand<'a> {
    /// As many values as the result has.
    Slice(&'a [f32]),
    /// One value for every element.
    Scalar(f32),
}

impl<'a> Operand<'a> {
    fn len(self) -> Option<usize> {
        match self {
            Operand::Slice(values) => Some(values.len()),
            Operand::Scalar(_) => None,
        }
    }

    /// Returns the values for piece number `at` of the result; the piece has `len` elements.
    fn piece(self, at: usize, len: usize) -> Operand<'a> {
        match self {
            Operand::Slice(values) => Operand::Slice(&values[at * PIECE..][..len]),
            scalar => scalar,
        }
    }
}

/// What a loop reads: memory, or a scalar.
trait Source: Copy {
    /// Loads a vector.
    ///
    /// # Safety
    /// `at + LANES` values can be read, if this is memory.
    unsafe fn load<S: Simd>(self, s: S, at: usize) -> S::F32;
    /// Loads the first `count` lanes.
    ///
    /// # Safety
    /// `at + count` values can be read, if this is memory.
    unsafe fn load_partial<S: Simd>(self, s: S, at: usize, count: usize) -> S::F32;
}

impl Source for *const f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, at: usize) -> S::F32 {
        // SAFETY: the caller guarantees `at + LANES` values.
        unsafe { s.load_ptr(self.add(at)) }
    }
    #[inline(always)]
    unsafe fn load_partial<S: Simd>(self, s: S, at: usize, count: usize) -> S::F32 {
        // SAFETY: the caller guarantees `at + count` values.
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
        while at + 2 * S::LANES <= self.len {
            // SAFETY: `map` and `map_in_place` pass two slices of `len` values, and both vectors
            // are within `len`. `from` may be `to`: vectors are read before they are written. No
            // other overlap occurs.
            unsafe {
                let (from, to) = (self.from.add(at), self.to.add(at));
                let [a, b] = self.op.apply_each(s, [s.load_ptr(from), s.load_ptr(from.add(S::LANES))]);
                s.store_ptr(to, a);
                s.store_ptr(to.add(S::LANES), b);
            }
            at += 2 * S::LANES;
        }
        if at + S::LANES <= self.len {
            // SAFETY: as above, for one vector.
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
            // SAFETY: `zip_piece` and `zip_piece_in_place` checked that all slices hold `len`
            // values, and `at + LANES` is within `len`. A source may be `to`: each vector is read
            // before it is written. No other overlap occurs.
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
    // The common case: one piece, whose lengths `zip_piece` checks itself.
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

/// A number for each row of a slice.
#[derive(Debug, Clone, Copy)]
pub struct RowNumbers<'a> {
    /// The numbers. Values that rows are missing for are left alone.
    pub numbers: &'a [f32],
    /// The length of the first row.
    pub first: usize,
    /// The length of the other rows; the last may end early.
    pub each: usize,
}

struct RowsLoop<'a, O> {
    op: O,
    data: &'a mut [f32],
    rows: RowNumbers<'a>,
}

impl<O: BinaryOp> SimdOp for RowsLoop<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RowsLoop { op, data: mut rest, rows } = self;
        let mut len = rows.first;
        for number in rows.numbers {
            let end = len.min(rest.len());
            let (row, tail) = std::mem::take(&mut rest).split_at_mut(end);
            (rest, len) = (tail, rows.each);
            let number = s.splat(*number);
            let mut at = 0;
            while at + S::LANES <= row.len() {
                s.store(row, at, op.apply(s, s.load(row, at), number));
                at += S::LANES;
            }
            let count = row.len() - at;
            if count > 0 {
                let value = op.apply(s, s.load_partial(row, at, count, 0.0), number);
                s.store_partial(row, at, count, value);
            }
        }
    }
}

/// `data[i] = op(data[i], number of its row)`, in one call for rows that are too short for calls of
/// their own.
pub fn zip_rows_in_place(isa: Isa, op: impl BinaryOp, data: &mut [f32], rows: RowNumbers<'_>) {
    dispatch(isa, RowsLoop { op, data, rows });
}

/// A binary function with its operands swapped.
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
        // Four independent accumulators hide the latency of `combine`.
        let mut sums = [s.splat(identity); 4];
        let mut at = 0;
        let (start, len) = (from.as_ptr(), from.len());
        while at + 4 * S::LANES <= len {
            for (part, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the loop condition keeps four vectors from `at` on inside the slice.
                let x = unsafe { s.load_ptr(start.add(at + part * S::LANES)) };
                *sum = combine.apply(s, *sum, map.apply(s, x));
            }
            at += 4 * S::LANES;
        }
        while at + S::LANES <= len {
            // SAFETY: the loop condition keeps one vector from `at` on inside the slice.
            let x = unsafe { s.load_ptr(start.add(at)) };
            sums[0] = combine.apply(s, sums[0], map.apply(s, x));
            at += S::LANES;
        }
        let low = combine.apply(s, sums[0], sums[1]);
        let high = combine.apply(s, sums[2], sums[3]);
        let mut lanes = s.to_array(combine.apply(s, low, high));
        lanes[S::LANES..].fill(identity);
        if at < len {
            // Lanes past the end are replaced by `identity` only after `map`, because
            // `map(identity)` need not be an identity of `combine`. SAFETY: `len - at` values are
            // left, fewer than a vector.
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

/// Reduces `map(x)` of all values to up to [`MAX_LANES`](super::MAX_LANES) partial results; the
/// others are `identity`. The order depends only on the length and the instruction set.
pub fn fold(
    isa: Isa,
    map: impl UnaryOp,
    combine: impl BinaryOp,
    identity: f32,
    from: &[f32],
) -> [f32; super::MAX_LANES] {
    dispatch(isa, FoldLoop { map, combine, identity, from })
}

/// Computes [`fold`] in an operation that is already compiled for an instruction set.
#[inline(always)]
pub fn fold_with<S: Simd>(
    s: S,
    map: impl UnaryOp,
    combine: impl BinaryOp,
    identity: f32,
    from: &[f32],
) -> [f32; super::MAX_LANES] {
    FoldLoop { map, combine, identity, from }.run(s)
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
            // SAFETY: `singles_from_halves` checked that both slices have one length, and the
            // vector is within it. An `f16` is stored as its bits.
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

/// Widens half-precision values to `f32`.
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
            // SAFETY: `halves_from_singles` checked that both slices have one length, and the
            // vector is within it. An `f16` is stored as its bits.
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

/// Rounds `f32` values to half precision, to nearest even.
///
/// # Panics
/// If the lengths differ.
pub fn halves_from_singles(isa: Isa, from: &[f32], to: &mut [f16]) {
    assert_eq!(from.len(), to.len(), "a conversion keeps the length");
    dispatch(isa, Narrow { from, to });
}
