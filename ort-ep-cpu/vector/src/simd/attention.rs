//! Attention kernels over a panel: up to [`WIDTH`] queries, one per lane.
//!
//! Everything is transposed: scores are `K Q^T` and results are `V^T P^T`, so a query is a column.
//! Keys and values are then read in place, one element at a time for a whole row of queries, and
//! need no packing. The softmax runs down the columns and needs no horizontal reductions. Only the
//! queries are packed, once, and the results are transposed back at the end.
//!
//! The softmax is computed block by block of keys with a running maximum and a running sum (M.
//! Milakov and N. Gimelshein, *Online normalizer calculation for softmax*, arXiv 1805.02867), as in
//! FlashAttention (T. Dao et al., arXiv 2205.14135). Sums run over the keys in order with one FMA
//! each, so a query's bits depend only on its own keys.
//!
//! Both matmuls can use bf16 pairs (see [`steps`](super::steps)). Elements of keys and queries pair
//! up along the head size; weights and values pair up from one key to the next. Scores, the softmax
//! and all accumulators are `f32`.

use super::steps::{Elements, Steps, StepsOp, dispatch_steps};
use super::{Isa, Simd, SimdOp, dispatch, math};

/// Queries in a panel, which is also the row stride of a panel.
pub const WIDTH: usize = 48;

/// Vectors of columns whose softmax runs at once.
const VECTORS: usize = 3;

/// Returns the maximum number of vectors and of rows in a register tile. The accumulators, the
/// vectors of the panel and a factor must fit the registers.
#[inline(always)]
fn tile_size<S: Simd>() -> [usize; 2] {
    if S::REGISTERS >= 32 { [3, 8] } else { [2, 6] }
}

/// A matmul whose right operand is a panel. k steps are elements: `f32` values or bf16 pairs.
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    /// The left operand.
    pub left: &'a [f32],
    /// Strides of the left operand from one row to the next and from one k step to the next.
    pub strides: [usize; 2],
    /// Rows of the left operand, and k steps.
    pub shape: [usize; 2],
    /// A row of [`WIDTH`] values for each k step.
    pub panel: &'a [f32],
    /// Columns in use.
    pub columns: usize,
    /// Scales the old result, per column, before the product is added. If `None`, there is no old
    /// result.
    pub factors: Option<&'a [f32; WIDTH]>,
}

/// `to[row][column] = sum of left[row][step] * panel[step][column]`, plus the old value times its
/// column's factor.
///
/// Both operands hold bf16 pairs if `paired`. Values after the columns in use are unspecified.
///
/// # Panics
/// If a slice is shorter than the shape requires, or the CPU lacks bf16 products.
pub fn multiply(isa: Isa, paired: bool, product: &Product<'_>, to: &mut [f32]) {
    let [rows, steps] = product.shape;
    if rows == 0 || product.columns == 0 {
        return;
    }
    let reach = (rows - 1) * product.strides[0] + steps.saturating_sub(1) * product.strides[1];
    assert!(steps == 0 || reach < product.left.len(), "the left side holds its rows and steps");
    assert!(product.columns <= WIDTH && product.panel.len() >= steps * WIDTH, "the panel holds its steps");
    assert!(to.len() >= rows * WIDTH, "the result holds its rows");
    dispatch_steps(isa, paired, Multiply { product, to: to.as_mut_ptr() });
}

/// Pointers into slices whose lengths `multiply` checked.
struct Multiply<'a> {
    product: &'a Product<'a>,
    to: *mut f32,
}

impl StepsOp for Multiply<'_> {
    #[inline(always)]
    fn run<T: Steps>(self, t: T) {
        let vectors = self.product.columns.div_ceil(T::Base::LANES);
        let [most, _] = tile_size::<T::Base>();
        for first in (0..vectors).step_by(most) {
            let at = first * T::Base::LANES;
            // SAFETY: `multiply` checked these rows and columns.
            unsafe {
                match (vectors - first).min(most) {
                    1 => self.rows::<T, 1>(t, at),
                    2 => self.rows::<T, 2>(t, at),
                    _ => self.rows::<T, 3>(t, at),
                }
            }
        }
    }
}

impl Multiply<'_> {
    /// Computes all rows of some vectors.
    ///
    /// # Safety
    /// `N` vectors from column `at` on are inside the panel.
    #[inline(always)]
    unsafe fn rows<T: Steps, const N: usize>(&self, t: T, at: usize) {
        let rows = self.product.shape[0];
        let [_, most] = tile_size::<T::Base>();
        let mut row = 0;
        // SAFETY: each tile has only rows that are left.
        unsafe {
            while most == 8 && row + 8 <= rows {
                self.tile::<T, 8, N>(t, row, at);
                row += 8;
            }
            // Two tiles of 4 rows beat one of 6 and two of 1, whose FMAs wait for each other.
            while most == 6 && row + 6 <= rows && rows - row != 8 {
                self.tile::<T, 6, N>(t, row, at);
                row += 6;
            }
            while row + 4 <= rows {
                self.tile::<T, 4, N>(t, row, at);
                row += 4;
            }
            while row < rows {
                self.tile::<T, 1, N>(t, row, at);
                row += 1;
            }
        }
    }

    /// Computes one register tile.
    ///
    /// # Safety
    /// `ROWS` rows from `row` on and `N` vectors from column `at` on are inside the product.
    #[inline(always)]
    unsafe fn tile<T: Steps, const ROWS: usize, const N: usize>(&self, t: T, row: usize, at: usize) {
        let s = t.base();
        let [row_stride, step_stride] = self.product.strides;
        let mut left = self.product.left.as_ptr().wrapping_add(row * row_stride);
        let mut panel = self.product.panel.as_ptr().wrapping_add(at);
        let mut sums = [[s.splat(0.0); N]; ROWS];
        for _ in 0..self.product.shape[1] {
            let mut columns = [s.splat(0.0); N];
            for vector in 0..N {
                // SAFETY: `multiply` checked that the panel holds `WIDTH` values for each k step.
                columns[vector] = unsafe { s.load_ptr(panel.add(vector * T::Base::LANES)) };
            }
            for row in 0..ROWS {
                // SAFETY: `multiply` checked that the left operand holds this row and k step.
                let factor = s.splat(unsafe { *left.add(row * row_stride) });
                for vector in 0..N {
                    sums[row][vector] = t.accumulate(factor, columns[vector], sums[row][vector]);
                }
            }
            left = left.wrapping_add(step_stride);
            panel = panel.wrapping_add(WIDTH);
        }
        for index in 0..ROWS {
            for vector in 0..N {
                let column = at + vector * T::Base::LANES;
                // SAFETY: `multiply` checked that the result holds `WIDTH` values for each row, and
                // there are `WIDTH` factors.
                unsafe {
                    let to = self.to.add((row + index) * WIDTH + column);
                    let mut sum = sums[index][vector];
                    if let Some(factors) = self.product.factors {
                        sum = s.mul_add(s.load_ptr(to), s.load_ptr(factors.as_ptr().add(column)), sum);
                    }
                    s.store_ptr(to, sum);
                }
            }
        }
    }
}

/// The online softmax state of each query of a panel.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The running maximum of the scores.
    pub greatest: [f32; WIDTH],
    /// The running sum of `exp(score - greatest)`.
    pub sum: [f32; WIDTH],
    /// The rescaling factor of everything before the last block:
    /// `exp(greatest before - greatest now)`.
    pub factor: [f32; WIDTH],
}

impl Seen {
    /// The state before the first key.
    pub const NOTHING: Seen =
        Seen { greatest: [f32::NEG_INFINITY; WIDTH], sum: [0.0; WIDTH], factor: [0.0; WIDTH] };
}

/// Modifications of the scores before the softmax.
#[derive(Debug, Clone, Copy, Default)]
pub struct Change<'a> {
    /// If positive, scores become `softcap * tanh(score)`. The division by it is part of the scale.
    pub softcap: f32,
    /// Added to the scores of each key.
    pub by_key: Option<&'a [f32]>,
    /// Added to the scores, a row of [`WIDTH`] values for each key.
    pub by_query: Option<&'a [f32]>,
    /// Added to the scores of keys that form a grid.
    pub by_grid: Option<GridPanel<'a>>,
    /// For each query, the first key that it sees and the end of its keys, relative to the block's
    /// first key. Other scores become -inf.
    pub visible: Option<&'a [[f32; WIDTH]; 2]>,
}

/// A bias of a panel over keys that form a grid: a key's score gets the bias of its grid row plus
/// that of its grid column.
#[derive(Debug, Clone, Copy)]
pub struct GridPanel<'a> {
    /// [`WIDTH`] values for each row of the grid.
    pub rows: &'a [f32],
    /// [`WIDTH`] values for each column of the grid.
    pub columns: &'a [f32],
    /// The columns of the grid.
    pub width: usize,
    /// The block's first key.
    pub first: usize,
}

impl GridPanel<'_> {
    /// Whether it has values for each of `keys` keys.
    fn holds(&self, keys: usize) -> bool {
        let rows = (self.first + keys).div_ceil(self.width.max(1));
        self.width > 0 && self.rows.len() >= rows * WIDTH && self.columns.len() >= self.width * WIDTH
    }
}

impl Change<'_> {
    /// Whether the scores stay as they are.
    #[inline]
    pub fn is_none(&self) -> bool {
        self.softcap <= 0.0
            && self.by_key.is_none()
            && self.by_query.is_none()
            && self.by_grid.is_none()
            && self.visible.is_none()
    }
}

/// Modifies the scores of `keys` rows of a panel.
///
/// # Panics
/// If a slice does not have `keys` rows.
pub fn change(isa: Isa, change: Change<'_>, scores: &mut [f32], keys: usize, columns: usize) {
    assert!(columns <= WIDTH && scores.len() >= keys * WIDTH, "the scores have a row for each key");
    assert!(change.by_key.is_none_or(|added| added.len() >= keys), "there is a value for each key");
    assert!(change.by_query.is_none_or(|added| added.len() >= keys * WIDTH), "there is a row for each key");
    assert!(change.by_grid.is_none_or(|grid| grid.holds(keys)), "the grid holds the keys");
    dispatch(isa, Changed { change, scores, keys, columns });
}

/// `change` checked the lengths.
struct Changed<'a> {
    change: Change<'a>,
    scores: &'a mut [f32],
    keys: usize,
    columns: usize,
}

impl SimdOp for Changed<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Change { softcap, by_key, by_query, by_grid, visible } = self.change;
        let (cap, hidden) = (s.splat(softcap), s.splat(f32::NEG_INFINITY));
        for column in (0..self.columns).step_by(S::LANES) {
            let (mut low, mut high) = (s.splat(f32::NEG_INFINITY), s.splat(f32::INFINITY));
            if let Some([first, end]) = visible {
                (low, high) = (s.load(first, column), s.load(end, column));
            }
            let mut cell = by_grid.map_or([0; 2], |grid| [grid.first / grid.width, grid.first % grid.width]);
            for key in 0..self.keys {
                let at = key * WIDTH + column;
                let mut score = s.load(self.scores, at);
                if softcap > 0.0 {
                    score = s.mul(cap, math::tanh(s, score));
                }
                if let Some(added) = by_key {
                    score = s.add(score, s.splat(added[key]));
                }
                if let Some(added) = by_query {
                    score = s.add(score, s.load(added, at));
                }
                if let Some(grid) = by_grid {
                    let [of_row, of_column] = cell.map(|place| place * WIDTH + column);
                    let added = s.add(s.load(grid.rows, of_row), s.load(grid.columns, of_column));
                    score = s.add(score, added);
                    // A counter instead of a division per key.
                    cell[1] += 1;
                    if cell[1] == grid.width {
                        cell = [cell[0] + 1, 0];
                    }
                }
                if visible.is_some() {
                    let place = s.splat(key as f32);
                    score = s.select(s.le(low, place), score, hidden);
                    score = s.select(s.lt(place, high), score, hidden);
                }
                s.store(self.scores, at, score);
            }
        }
    }
}

/// Turns the scores of a block of keys into weights `exp(score - greatest)`, and updates the online
/// softmax state.
///
/// A query whose scores have all been -inf so far gets weights of 0. If `paired`, the scores are
/// replaced by rows of bf16 pairs of weights, and the rounded weights are what is summed. A result
/// is then a true weighted mean of the values, with weights that are off in the last place.
///
/// # Panics
/// If there is no row of scores for each key, or the CPU lacks bf16 products.
pub fn weigh(isa: Isa, paired: bool, scores: &mut [f32], keys: usize, columns: usize, seen: &mut Seen) {
    assert!(columns <= WIDTH && scores.len() >= keys * WIDTH, "the scores have a row for each key");
    dispatch_steps(isa, paired, Weigh { scores, keys, columns, seen });
}

/// `weigh` checked the lengths.
struct Weigh<'a> {
    scores: &'a mut [f32],
    keys: usize,
    columns: usize,
    seen: &'a mut Seen,
}

impl StepsOp for Weigh<'_> {
    #[inline(always)]
    fn run<T: Steps>(mut self, t: T) {
        let vectors = self.columns.div_ceil(T::Base::LANES);
        for first in (0..vectors).step_by(VECTORS) {
            match vectors - first {
                1 => self.columns::<T, 1>(t, first * T::Base::LANES),
                2 => self.columns::<T, 2>(t, first * T::Base::LANES),
                _ => self.columns::<T, 3>(t, first * T::Base::LANES),
            }
        }
    }
}

impl Weigh<'_> {
    /// Processes `N` vectors of columns from `column` on.
    #[inline(always)]
    fn columns<T: Steps, const N: usize>(&mut self, t: T, column: usize) {
        let s = t.base();
        let scores = self.scores.as_mut_ptr();
        let place = |key: usize, vector: usize| key * WIDTH + column + vector * T::Base::LANES;
        let mut before = [s.splat(0.0); N];
        for (vector, before) in before.iter_mut().enumerate() {
            *before = s.load(&self.seen.greatest, column + vector * T::Base::LANES);
        }
        // Two independent chains of maxima hide the latency of the instruction.
        let (mut greatest, mut odd) = (before, before);
        for key in (0..self.keys).step_by(2) {
            let next = (key + 1).min(self.keys - 1);
            for vector in 0..N {
                // SAFETY: both rows are below `keys`, which `weigh` checked against the scores.
                let (a, b) = unsafe {
                    (s.load_ptr(scores.add(place(key, vector))), s.load_ptr(scores.add(place(next, vector))))
                };
                greatest[vector] = s.max_or_second(greatest[vector], a);
                odd[vector] = s.max_or_second(odd[vector], b);
            }
        }
        let mut shift = [s.splat(0.0); N];
        for vector in 0..N {
            greatest[vector] = s.max_or_second(greatest[vector], odd[vector]);
            // If everything was -inf, nothing is subtracted, because the difference of two
            // infinities is NaN.
            let none = s.eq(greatest[vector], s.splat(f32::NEG_INFINITY));
            shift[vector] = s.select(none, s.splat(0.0), greatest[vector]);
        }
        let (mut sums, ones) = ([s.splat(0.0); N], t.join([s.splat(1.0); 2]));
        for (row, key) in (0..self.keys).step_by(T::TERMS).enumerate() {
            // SAFETY: the rows are below `keys`, which `weigh` checked against the scores. A row is
            // read before it is overwritten, because `row <= key`.
            unsafe {
                let first: [Elements<T>; N] = weights(s, scores.add(place(key, 0)), shift);
                let second = match T::TERMS == 2 && key + 1 < self.keys {
                    true => weights(s, scores.add(place(key + 1, 0)), shift),
                    false => [s.splat(0.0); N],
                };
                for vector in 0..N {
                    let weights = t.join([first[vector], second[vector]]);
                    sums[vector] = t.accumulate(ones, weights, sums[vector]);
                    s.store_ptr(scores.add(place(row, vector)), weights);
                }
            }
        }
        for (before, shift) in before.iter_mut().zip(shift) {
            *before = s.sub(*before, shift);
        }
        let factors = math::exp_shifted(s, before);
        for vector in 0..N {
            let at = column + vector * T::Base::LANES;
            let factor = factors[vector];
            let sum = s.mul_add(s.load(&self.seen.sum, at), factor, sums[vector]);
            s.store(&mut self.seen.greatest, at, greatest[vector]);
            s.store(&mut self.seen.sum, at, sum);
            s.store(&mut self.seen.factor, at, factor);
        }
    }
}

/// Returns the weights of vectors of scores: `exp(score - shift)`.
///
/// # Safety
/// `N` vectors of scores can be read.
#[inline(always)]
unsafe fn weights<S: Simd, const N: usize>(s: S, scores: *const f32, shift: [S::F32; N]) -> [S::F32; N] {
    let mut differences = shift;
    for (vector, difference) in differences.iter_mut().enumerate() {
        // SAFETY: the caller guarantees readable vectors.
        *difference = s.sub(unsafe { s.load_ptr(scores.add(vector * S::LANES)) }, *difference);
    }
    math::exp_shifted(s, differences)
}

/// [`weigh`] for one query. Returns the rescaling factor for everything before.
pub fn weigh_row(isa: Isa, scores: &mut [f32], greatest: &mut f32, sum: &mut f32) -> f32 {
    dispatch(isa, WeighRow { scores, greatest, sum })
}

struct WeighRow<'a> {
    scores: &'a mut [f32],
    greatest: &'a mut f32,
    sum: &'a mut f32,
}

impl SimdOp for WeighRow<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let (len, before) = (self.scores.len(), *self.greatest);
        let hidden = f32::NEG_INFINITY;
        let mut greatest = s.splat(before);
        for at in (0..len).step_by(S::LANES) {
            let scores = s.load_partial(self.scores, at, (len - at).min(S::LANES), hidden);
            greatest = s.max_or_second(greatest, scores);
        }
        let greatest = s.horizontal_max(greatest);
        let shift = if greatest == hidden { 0.0 } else { greatest };
        let mut sums = s.splat(0.0);
        for at in (0..len).step_by(S::LANES) {
            let count = (len - at).min(S::LANES);
            let scores = s.load_partial(self.scores, at, count, hidden);
            let [weights] = math::exp_shifted(s, [s.sub(scores, s.splat(shift))]);
            sums = s.add(sums, weights);
            s.store_partial(self.scores, at, count, weights);
        }
        let [factor] = math::exp_shifted(s, [s.splat(before - shift)]);
        let factor = s.to_array(factor)[0];
        *self.greatest = greatest;
        *self.sum = self.sum.mul_add(factor, s.horizontal_sum(sums));
        factor
    }
}

/// `to[row] = sum of left[row][i] * right[i]`, for rows that start `stride` apart.
///
/// # Panics
/// If the left operand does not hold a row for each result.
pub fn dots(isa: Isa, left: &[f32], stride: usize, right: &[f32], to: &mut [f32]) {
    if let Some(last) = to.len().checked_sub(1) {
        assert!(last * stride + right.len() <= left.len(), "the left side holds its rows");
        dispatch(isa, Dots { left, stride, right, to });
    }
}

/// `dots` checked the lengths.
struct Dots<'a> {
    left: &'a [f32],
    stride: usize,
    right: &'a [f32],
    to: &'a mut [f32],
}

impl SimdOp for Dots<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = self.right.len();
        let (left, right) = (self.left.as_ptr(), self.right.as_ptr());
        for (row, to) in self.to.iter_mut().enumerate() {
            let left = left.wrapping_add(row * self.stride);
            // Two independent accumulators hide the latency of the FMA.
            let (mut even, mut odd) = (s.splat(0.0), s.splat(0.0));
            let mut at = 0;
            // SAFETY: `dots` checked that the row and the right operand hold `len` values each.
            unsafe {
                while at + 2 * S::LANES <= len {
                    even = s.mul_add(s.load_ptr(left.add(at)), s.load_ptr(right.add(at)), even);
                    let next = at + S::LANES;
                    odd = s.mul_add(s.load_ptr(left.add(next)), s.load_ptr(right.add(next)), odd);
                    at += 2 * S::LANES;
                }
                while at < len {
                    let count = (len - at).min(S::LANES);
                    even = s.mul_add(load(s, left.add(at), count), load(s, right.add(at), count), even);
                    at += count;
                }
            }
            *to = s.horizontal_sum(s.add(even, odd));
        }
    }
}

/// `to[i] = to[i] * factor + sum of weights[row] * rows[row][i]`, for rows that start `stride`
/// apart.
///
/// # Panics
/// If there is no row for each weight.
pub fn mix(isa: Isa, rows: &[f32], stride: usize, weights: &[f32], factor: f32, to: &mut [f32]) {
    if let Some(last) = weights.len().checked_sub(1) {
        assert!(last * stride + to.len() <= rows.len(), "there is a row for each weight");
        dispatch(isa, Mix { rows, stride, weights, factor, to });
    }
}

/// `mix` checked the lengths.
struct Mix<'a> {
    rows: &'a [f32],
    stride: usize,
    weights: &'a [f32],
    factor: f32,
    to: &'a mut [f32],
}

impl SimdOp for Mix<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut at = 0;
        while at + 4 * S::LANES <= self.to.len() {
            self.vectors::<S, 4>(s, at, S::LANES);
            at += 4 * S::LANES;
        }
        while at < self.to.len() {
            let count = (self.to.len() - at).min(S::LANES);
            self.vectors::<S, 1>(s, at, count);
            at += S::LANES;
        }
    }
}

impl Mix<'_> {
    /// Computes `N` vectors from `at` on, each with `count` values. `count` may be less than a
    /// vector only if `N` is 1.
    #[inline(always)]
    fn vectors<S: Simd, const N: usize>(&mut self, s: S, at: usize, count: usize) {
        let mut sums = [s.splat(0.0); N];
        let mut row = self.rows.as_ptr().wrapping_add(at);
        for weight in self.weights {
            for vector in 0..N {
                // SAFETY: `mix` checked that each row holds as many values as the result.
                let values = unsafe { load(s, row.add(vector * S::LANES), count) };
                sums[vector] = s.mul_add(s.splat(*weight), values, sums[vector]);
            }
            row = row.wrapping_add(self.stride);
        }
        for vector in 0..N {
            let at = at + vector * S::LANES;
            let before = s.load_partial(self.to, at, count, 0.0);
            s.store_partial(self.to, at, count, s.mul_add(before, s.splat(self.factor), sums[vector]));
        }
    }
}

/// Loads a vector, or the first values of one.
///
/// # Safety
/// `count` values can be read.
#[inline(always)]
unsafe fn load<S: Simd>(s: S, from: *const f32, count: usize) -> S::F32 {
    // SAFETY: the caller guarantees `count` readable values.
    unsafe {
        match count == S::LANES {
            true => s.load_ptr(from),
            false => s.load_partial_ptr(from, count, 0.0),
        }
    }
}
