//! Skinny GEMM: a few rows times a packed matrix, added to the result.
//!
//! A step of a recurrent layer multiplies one row per sequence, so it is bound by reading the
//! weights. They are packed in panels of `VECTORS` vectors of columns. A panel is read once for
//! up to four rows, or for six if there are 16 registers. Each accumulator takes one multiply-add
//! per k step, in order. So an element's bits depend neither on the number of rows nor on the
//! columns that a call covers.

use super::{Isa, Simd, SimdOp, dispatch};
use ort_cpu_threads::interrupt::spend;

/// Vectors of columns in a panel. The columns that are left have panels of one vector each.
const VECTORS: usize = 4;

/// Multiply-adds for a unit of [`spend`].
const UNIT_TERMS: usize = 8;

/// A packed matrix of `k` rows and `columns` columns.
#[derive(Debug, Clone, Copy)]
pub struct SkinnyRhs<'a> {
    isa: Isa,
    values: &'a [f32],
    k: usize,
    columns: usize,
}

impl<'a> SkinnyRhs<'a> {
    /// Returns the packed length of a matrix. It saturates, so that no slice has a length that
    /// overflows.
    pub fn len(isa: Isa, k: usize, columns: usize) -> usize {
        columns.checked_next_multiple_of(lanes(isa)).unwrap_or(usize::MAX).saturating_mul(k)
    }

    /// Packs a matrix whose element in row `i` of column `j` is `element(i, j)`.
    ///
    /// # Panics
    /// If `to` does not have the packed length.
    pub fn pack(isa: Isa, [k, columns]: [usize; 2], element: impl Fn(usize, usize) -> f32, to: &mut [f32]) {
        assert_eq!(to.len(), Self::len(isa, k, columns), "a packed matrix has its length");
        let (lanes, mut to, mut first) = (lanes(isa), to, 0);
        while first < columns {
            let width = if columns - first >= VECTORS * lanes { VECTORS * lanes } else { lanes };
            let (panel, rest) = to.split_at_mut(width * k);
            for (row, values) in panel.chunks_exact_mut(width).enumerate() {
                spend(width);
                for (column, value) in (first..).zip(values) {
                    *value = if column < columns { element(row, column) } else { 0.0 };
                }
            }
            (to, first) = (rest, first + width);
        }
    }

    /// Views a packed matrix of `shape` (k, columns). `None` if `values` is shorter.
    pub fn new(isa: Isa, [k, columns]: [usize; 2], values: &'a [f32]) -> Option<SkinnyRhs<'a>> {
        let len = Self::len(isa, k, columns);
        Some(SkinnyRhs { isa, values: values.get(..len)?, k, columns })
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns how many columns a part must have so that it ends where a panel does.
    pub fn part_columns(&self, parts: usize) -> usize {
        let panel = VECTORS * lanes(self.isa);
        self.columns.div_ceil(panel).div_ceil(parts.max(1)).max(1) * panel
    }

    /// Returns the columns from `first` on, at most `count`. `first` is a multiple of
    /// [`part_columns`](SkinnyRhs::part_columns).
    #[must_use]
    pub fn part(&self, first: usize, count: usize) -> SkinnyRhs<'a> {
        let first = first.min(self.columns);
        let columns = count.min(self.columns - first);
        let start = (first * self.k).min(self.values.len());
        SkinnyRhs { values: &self.values[start..], columns, ..*self }
    }

    /// Computes `to[row][..columns] += lhs[row] * self` for rows of `lhs` with `k` values. Rows of
    /// `to` start `stride` apart.
    ///
    /// # Panics
    /// If a slice is too short for its rows.
    pub fn multiply_add(&self, lhs: &[f32], rows: usize, to: &mut [f32], stride: usize) {
        if rows == 0 || self.columns == 0 {
            return;
        }
        assert!(stride >= self.columns || rows == 1, "the rows of a result overlap");
        let result = (rows - 1).saturating_mul(stride).saturating_add(self.columns);
        assert!(lhs.len() >= rows.saturating_mul(self.k) && to.len() >= result, "whole rows");
        assert!(self.values.len() >= Self::len(self.isa, self.k, self.columns), "whole panels");
        dispatch(self.isa, MultiplyAdd { rhs: *self, lhs, rows, to, stride });
    }
}

fn lanes(isa: Isa) -> usize {
    struct Lanes;
    impl SimdOp for Lanes {
        type Output = usize;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> usize {
            S::LANES
        }
    }
    dispatch(isa, Lanes)
}

struct MultiplyAdd<'a> {
    rhs: SkinnyRhs<'a>,
    lhs: &'a [f32],
    rows: usize,
    to: &'a mut [f32],
    stride: usize,
}

impl SimdOp for MultiplyAdd<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let MultiplyAdd { rhs: SkinnyRhs { values, k, columns, .. }, lhs, rows, to, stride } = self;
        let is_wide = S::REGISTERS >= 32;
        // Accumulators, and the factors of all rows or the vectors of B, must fit the registers.
        let most_rows = if is_wide { 4 } else { 6 };
        let mut first = 0;
        while first < columns {
            let left = columns - first;
            let is_whole = left >= VECTORS * S::LANES;
            // A single row has too few accumulators to hide the latency of FMA: two panels at once.
            let is_pair = rows == 1 && left >= 2 * VECTORS * S::LANES;
            let width = if is_whole { VECTORS * S::LANES } else { left.min(S::LANES) };
            let width = if is_pair { 2 * width } else { width };
            let mut row = 0;
            while row < rows {
                // Groups of nearly equal height, for the same reason.
                let group = (rows - row).div_ceil((rows - row).div_ceil(most_rows));
                spend(group * width * k / UNIT_TERMS);
                // SAFETY: `multiply_add` checked the lengths: every row of `lhs` has `k` values,
                // `to` holds `columns` values of each row, and the panels of the columns from
                // `first` on hold `k` steps.
                unsafe {
                    let tile = Tile {
                        k,
                        lhs: lhs.as_ptr().add(row * k),
                        rhs: values.as_ptr().add(first * k),
                        step: if is_whole { VECTORS * S::LANES } else { S::LANES },
                        to: to.as_mut_ptr().add(row * stride + first),
                        stride,
                        columns: width,
                    };
                    match (is_whole, group) {
                        (true, 1) if is_pair => tile.compute::<S, 1, VECTORS, 2>(s),
                        (true, 1) => tile.compute::<S, 1, VECTORS, 1>(s),
                        (true, 2) => tile.compute::<S, 2, VECTORS, 1>(s),
                        (true, 3) => tile.compute::<S, 3, VECTORS, 1>(s),
                        (true, 4) if is_wide => tile.compute::<S, 4, VECTORS, 1>(s),
                        (true, 4) => tile.halves::<S, 4>(s),
                        (true, 5) => tile.halves::<S, 5>(s),
                        (true, _) => tile.halves::<S, 6>(s),
                        (false, 1) => tile.compute::<S, 1, 1, 1>(s),
                        (false, 2) => tile.compute::<S, 2, 1, 1>(s),
                        (false, 3) => tile.compute::<S, 3, 1, 1>(s),
                        (false, 4) => tile.compute::<S, 4, 1, 1>(s),
                        (false, 5) => tile.compute::<S, 5, 1, 1>(s),
                        (false, _) => tile.compute::<S, 6, 1, 1>(s),
                    }
                }
                row += group;
            }
            first += width;
        }
    }
}

/// Some rows of the result in some adjacent panels.
#[derive(Clone, Copy)]
struct Tile {
    k: usize,
    lhs: *const f32,
    rhs: *const f32,
    /// Values of a panel in a k step.
    step: usize,
    to: *mut f32,
    stride: usize,
    columns: usize,
}

impl Tile {
    /// Computes `ROWS` rows in the two halves of a panel. 16 registers hold the accumulators of six
    /// rows and two vectors, but no more than three rows of a whole panel.
    ///
    /// # Safety
    ///
    /// As [`Tile::compute`] for one whole panel.
    #[inline(always)]
    unsafe fn halves<S: Simd, const ROWS: usize>(&self, s: S) {
        const HALF: usize = VECTORS / 2;
        let columns = HALF * S::LANES;
        // SAFETY: both halves are inside the panel.
        unsafe {
            Tile { columns, ..*self }.compute::<S, ROWS, HALF, 1>(s);
            let (rhs, to) = (self.rhs.add(columns), self.to.add(columns));
            Tile { rhs, to, columns, ..*self }.compute::<S, ROWS, HALF, 1>(s);
        }
    }

    /// Computes `ROWS` rows in `PANELS` panels, `WIDTH` vectors of each.
    ///
    /// # Safety
    ///
    /// `lhs` holds `ROWS` rows of `k` values, and `rhs` the panels. `to` is valid for `columns`
    /// values in each of `ROWS` rows. Only the last vector may be partial.
    #[inline(always)]
    unsafe fn compute<S: Simd, const ROWS: usize, const WIDTH: usize, const PANELS: usize>(&self, s: S) {
        // SAFETY: the caller guarantees the pointers; `k`, the rows and the panels bound all
        // offsets.
        unsafe {
            let mut sums = [[[s.splat(0.0); WIDTH]; PANELS]; ROWS];
            for term in 0..self.k {
                let value = |panel: usize, vector: usize| {
                    let at = (panel * self.k + term) * self.step + vector * S::LANES;
                    s.load_ptr(self.rhs.add(at))
                };
                let factor = |row: usize| s.splat(*self.lhs.add(row * self.k + term));
                // The fewer of both stay in registers beside the accumulators.
                if ROWS < WIDTH {
                    let mut factors = [s.splat(0.0); ROWS];
                    for row in 0..ROWS {
                        factors[row] = factor(row);
                    }
                    for panel in 0..PANELS {
                        for vector in 0..WIDTH {
                            let value = value(panel, vector);
                            for row in 0..ROWS {
                                let sum = &mut sums[row][panel][vector];
                                *sum = s.mul_add(factors[row], value, *sum);
                            }
                        }
                    }
                } else {
                    let mut values = [[s.splat(0.0); WIDTH]; PANELS];
                    for panel in 0..PANELS {
                        for vector in 0..WIDTH {
                            values[panel][vector] = value(panel, vector);
                        }
                    }
                    for row in 0..ROWS {
                        let factor = factor(row);
                        for panel in 0..PANELS {
                            for vector in 0..WIDTH {
                                let sum = &mut sums[row][panel][vector];
                                *sum = s.mul_add(factor, values[panel][vector], *sum);
                            }
                        }
                    }
                }
            }
            for row in 0..ROWS {
                for panel in 0..PANELS {
                    for vector in 0..WIDTH {
                        let at = (panel * WIDTH + vector) * S::LANES;
                        let (to, sum) = (self.to.add(row * self.stride + at), sums[row][panel][vector]);
                        let count = self.columns - at;
                        if count >= S::LANES {
                            s.store_ptr(to, s.add(s.load_ptr(to), sum));
                        } else {
                            s.store_partial_ptr(to, count, s.add(s.load_partial_ptr(to, count, 0.0), sum));
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|at| ((at * 37 + seed * 11) % 29) as f32 / 8.0 - 1.75).collect()
    }

    /// Sums of these numbers are exact, so every order of summation has the same bits.
    #[test]
    fn results_are_sums_of_products() {
        for isa in Isa::available() {
            for (k, columns) in [(1, 1), (7, 28), (33, 132), (130, 520), (5, 64), (16, 129), (3, 300)] {
                let weights = numbers(k * columns, 1);
                let mut packed = vec![f32::NAN; SkinnyRhs::len(isa, k, columns)];
                SkinnyRhs::pack(isa, [k, columns], |row, column| weights[column * k + row], &mut packed);
                let rhs = SkinnyRhs::new(isa, [k, columns], &packed).expect("the length fits");
                for rows in [0, 1, 2, 3, 4, 5, 6, 7, 9, 13] {
                    let (lhs, stride) = (numbers(rows * k, 2), columns + 3);
                    let old = numbers(rows * stride, 3);
                    let mut whole = old.clone();
                    rhs.multiply_add(&lhs, rows, &mut whole, stride);
                    let mut parts = old.clone();
                    for (row, to) in parts.chunks_mut(stride).enumerate() {
                        let count = rhs.part_columns(2);
                        for (index, to) in to[..columns].chunks_mut(count).enumerate() {
                            rhs.part(index * count, count).multiply_add(&lhs[row * k..][..k], 1, to, count);
                        }
                    }
                    assert_eq!(whole, parts, "{isa:?} {k} {columns} {rows}");
                    for (at, value) in whole.iter().enumerate() {
                        let (row, column) = (at / stride, at % stride);
                        let terms = (0..k).map(|term| lhs[row * k + term] * weights[column * k + term]);
                        let sum = if column < columns { terms.sum() } else { 0.0 };
                        assert_eq!(*value, old[at] + sum, "{isa:?} {k} {columns} {rows} at {at}");
                    }
                }
            }
        }
    }

    #[test]
    fn short_matrices_are_refused() {
        assert!(SkinnyRhs::new(Isa::Scalar, [3, 5], &[0.0; 23]).is_none());
        assert!(SkinnyRhs::new(Isa::Scalar, [usize::MAX, 5], &[0.0; 23]).is_none());
    }
}
