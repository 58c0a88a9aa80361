//! The GEMM micro-kernel, generic over the instruction set: a register tile of C from a panel of A
//! and a panel of B.
//!
//! Each instruction set instantiates it for every tile shape it supports. Every accumulator runs
//! over k in order with one FMA per k step. So an element's bits do not depend on the shape of its
//! tile, nor on how rows and columns are split over threads. If an element of a panel is a bf16
//! pair, each step adds two products; nothing else differs.

use ort_cpu_vector::simd::steps::{Elements, Steps};
use ort_cpu_vector::simd::{Simd, math};

/// The activation at the end of an epilogue, evaluated in registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RegisterActivation {
    /// No activation.
    None,
    /// `min(max(x, low), high)`.
    Clip { low: f32, high: f32 },
    /// `x` if positive, otherwise `slope * x`.
    LeakyRelu { slope: f32 },
    /// `min(max(slope * x + offset, 0), 1)`.
    HardSigmoid { slope: f32, offset: f32 },
    /// `x * min(max(x / 6 + 1/2, 0), 1)`.
    HardSwish,
    /// `x * sigmoid(x)`.
    Silu,
}

/// KC in elements: a k block has at most this many elements of one or two k steps each. A panel of
/// B then fits L2 many times over, and C is updated seldom enough.
pub const STEPS: usize = 384;

/// The maximum number of rows for which a tile is bound by loading B rather than by its FMAs. Such
/// a tile prefetches its own panel.
pub(super) const FEW_ROWS: usize = 2;

/// How many values ahead it prefetches: 6 KiB.
pub(super) const AHEAD: usize = 1536;

/// `f32` values in a cache line.
pub(super) const LINE: usize = 16;

/// The distances from one tile of a run to the next, in elements.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Next {
    pub(super) a: usize,
    pub(super) b: usize,
    pub(super) c: usize,
    pub(super) row_bias: usize,
    pub(super) column_bias: usize,
    pub(super) residual: usize,
    pub(super) prefetch: usize,
}

/// The arguments of a tile function. Null pointers mark absent parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// Elements along k, of one k step or of a pair of steps.
    pub(super) k: usize,
    pub(super) a: *const f32,
    /// Strides of A from one row to the next and from one k step to the next, in elements.
    pub(super) a_row: usize,
    pub(super) a_step: usize,
    pub(super) b: *const f32,
    pub(super) b_step: usize,
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// Columns to write, at most the width of the kernel.
    pub(super) columns: usize,
    pub(super) alpha: f32,
    /// Scales the old C, which is added. If it is zero, C is not read.
    pub(super) beta: f32,
    pub(super) row_bias: *const f32,
    pub(super) column_bias: *const f32,
    pub(super) residual: *const f32,
    pub(super) residual_row: usize,
    pub(super) activation: RegisterActivation,
    /// Memory that a later call will read, of which each k step prefetches one cache line, and the
    /// stride between these lines.
    pub(super) prefetch: *const f32,
    pub(super) prefetch_step: usize,
    /// How many tiles of this shape follow one another. A call for each would take as long as a
    /// dozen k steps.
    pub(super) count: usize,
    pub(super) next: Next,
}

impl Tile {
    /// Returns the first tile of a run. Parts that are absent stay so.
    pub(super) fn repeated(self, count: usize, next: Next) -> Tile {
        let present = |part: *const f32, next: usize| if part.is_null() { 0 } else { next };
        let next = Next {
            row_bias: present(self.row_bias, next.row_bias),
            column_bias: present(self.column_bias, next.column_bias),
            residual: present(self.residual, next.residual),
            prefetch: if self.prefetch_step == 0 { 0 } else { next.prefetch },
            ..next
        };
        Tile { count, next, ..self }
    }

    /// Moves on to the next tile of the run.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.a = self.a.wrapping_add(self.next.a);
        self.b = self.b.wrapping_add(self.next.b);
        self.c = self.c.wrapping_add(self.next.c);
        self.row_bias = self.row_bias.wrapping_add(self.next.row_bias);
        self.column_bias = self.column_bias.wrapping_add(self.next.column_bias);
        self.residual = self.residual.wrapping_add(self.next.residual);
        self.prefetch = self.prefetch.wrapping_add(self.next.prefetch);
    }
}

/// A tile function of some instruction set.
pub(super) type TileFunction = unsafe fn(&mut Tile);

/// Computes a run of tiles, each of `ROWS` rows and up to `VECTORS * LANES` columns of C. With
/// `PARTIAL`, the last vector of B is read only up to `columns`.
///
/// # Safety
///
/// Every pointer of every tile must be valid for the rows, k steps and columns that it names.
#[inline(always)]
pub(super) unsafe fn compute<T: Steps, const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(
    steps: T,
    tile: &mut Tile,
) {
    while tile.count > 0 {
        // SAFETY: the caller guarantees the pointers of the whole run.
        unsafe { compute_one::<T, ROWS, VECTORS, PARTIAL>(steps, tile) };
        tile.advance();
        tile.count -= 1;
    }
}

/// Computes one tile.
///
/// # Safety
///
/// As [`compute`].
#[inline(always)]
unsafe fn compute_one<T: Steps, const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(
    steps: T,
    tile: &Tile,
) {
    let (s, lanes) = (steps.base(), T::Base::LANES);
    // The columns of the last vector.
    let last = tile.columns - (VECTORS - 1) * lanes;
    // SAFETY: the caller guarantees the pointers. `k`, `ROWS` and `columns` bound the offsets, so
    // they stay inside the panels.
    unsafe {
        // C is written only after the whole k loop, and its rows are too far apart for the hardware
        // prefetcher.
        for row in 0..ROWS {
            for line in 0..(VECTORS * lanes).div_ceil(LINE) {
                s.prefetch(tile.c.wrapping_add(row * tile.c_row + line * LINE));
            }
        }
        let mut sums = [[s.splat(0.0); VECTORS]; ROWS];
        let (mut a, mut b, mut ahead) = (tile.a, tile.b, tile.prefetch);
        let (a_row, a_step, b_step) = (tile.a_row, tile.a_step, tile.b_step);
        let mut left = tile.k;
        while left >= 4 {
            for _ in 0..4 {
                if ROWS <= FEW_ROWS {
                    for line in 0..(VECTORS * lanes).div_ceil(LINE) {
                        s.prefetch(b.wrapping_add(AHEAD / (VECTORS * lanes) * b_step + line * LINE));
                    }
                }
                s.prefetch(ahead);
                ahead = ahead.wrapping_add(tile.prefetch_step);
                step::<T, ROWS, VECTORS, PARTIAL>(steps, &mut sums, (a, a_row), b, last);
                a = a.wrapping_add(a_step);
                b = b.wrapping_add(b_step);
            }
            left -= 4;
        }
        while left > 0 {
            step::<T, ROWS, VECTORS, PARTIAL>(steps, &mut sums, (a, a_row), b, last);
            a = a.wrapping_add(a_step);
            b = b.wrapping_add(b_step);
            left -= 1;
        }
        finish::<_, ROWS, VECTORS>(s, sums, tile, last);
    }
}

/// One k step: the outer product of a column of A and a row of B.
///
/// # Safety
///
/// As [`compute`].
#[inline(always)]
pub(super) unsafe fn step<T: Steps, const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(
    steps: T,
    sums: &mut [[Elements<T>; VECTORS]; ROWS],
    (a, a_row): (*const f32, usize),
    b: *const f32,
    last: usize,
) {
    let s = steps.base();
    // SAFETY: `step` has the contract of `compute`, which advances the pointers.
    unsafe {
        let mut columns = [s.splat(0.0); VECTORS];
        for vector in 0..VECTORS {
            let from = b.add(vector * T::Base::LANES);
            columns[vector] = match PARTIAL && vector + 1 == VECTORS {
                true => s.load_partial_ptr(from, last, 0.0),
                false => s.load_ptr(from),
            };
        }
        for row in 0..ROWS {
            let factor = s.splat(*a.add(row * a_row));
            for vector in 0..VECTORS {
                sums[row][vector] = steps.accumulate(factor, columns[vector], sums[row][vector]);
            }
        }
    }
}

/// Runs the register part of the epilogue and stores the tile. Each operation runs over the whole
/// tile; the compiler unrolls these loops, so the accumulators stay in registers.
///
/// # Safety
///
/// As [`compute`].
#[inline(always)]
pub(super) unsafe fn finish<S: Simd, const ROWS: usize, const VECTORS: usize>(
    s: S,
    mut sums: [[S::F32; VECTORS]; ROWS],
    tile: &Tile,
    last: usize,
) {
    // SAFETY: `finish` has the contract of `compute`.
    unsafe {
        let read = |from: *const f32, vector: usize| match vector + 1 == VECTORS && last < S::LANES {
            true => s.load_partial_ptr(from.add(vector * S::LANES), last, 0.0),
            false => s.load_ptr(from.add(vector * S::LANES)),
        };
        if tile.alpha != 1.0 {
            let alpha = s.splat(tile.alpha);
            each(&mut sums, |sum, _, _| s.mul(sum, alpha));
        }
        if tile.beta != 0.0 {
            let beta = s.splat(tile.beta);
            each(&mut sums, |sum, row, vector| {
                s.mul_add(beta, read(tile.c.add(row * tile.c_row), vector), sum)
            });
        }
        if !tile.row_bias.is_null() {
            each(&mut sums, |sum, row, _| s.add(sum, s.splat(*tile.row_bias.add(row))));
        }
        if !tile.column_bias.is_null() {
            each(&mut sums, |sum, _, vector| s.add(sum, read(tile.column_bias, vector)));
        }
        if !tile.residual.is_null() {
            each(&mut sums, |sum, row, vector| {
                s.add(sum, read(tile.residual.add(row * tile.residual_row), vector))
            });
        }
        end(s, &mut sums, tile.activation);
        each(&mut sums, |sum, row, vector| {
            let to = tile.c.add(row * tile.c_row + vector * S::LANES);
            match vector + 1 == VECTORS && last < S::LANES {
                true => s.store_partial_ptr(to, last, sum),
                false => s.store_ptr(to, sum),
            }
            sum
        });
    }
}

/// Replaces each accumulator with `change` of its value, row and vector.
#[inline(always)]
fn each<V: Copy, const ROWS: usize, const VECTORS: usize>(
    sums: &mut [[V; VECTORS]; ROWS],
    change: impl Fn(V, usize, usize) -> V,
) {
    for row in 0..ROWS {
        for vector in 0..VECTORS {
            sums[row][vector] = change(sums[row][vector], row, vector);
        }
    }
}

/// Applies the activation. NaN stays NaN.
#[inline(always)]
pub(super) fn end<S: Simd, const ROWS: usize, const VECTORS: usize>(
    s: S,
    sums: &mut [[S::F32; VECTORS]; ROWS],
    activation: RegisterActivation,
) {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    // The sum is the second operand, so that a NaN in it passes through.
    let clip = |sum: S::F32, low: S::F32, high: S::F32| s.min_or_second(high, s.max_or_second(low, sum));
    match activation {
        RegisterActivation::None => {}
        RegisterActivation::Clip { low, high } => {
            let (low, high) = (s.splat(low), s.splat(high));
            each(sums, |sum, _, _| clip(sum, low, high));
        }
        RegisterActivation::LeakyRelu { slope } => {
            let slope = s.splat(slope);
            each(sums, |sum, _, _| {
                s.add(s.mul(s.min_or_second(zero, sum), slope), s.max_or_second(zero, sum))
            });
        }
        RegisterActivation::HardSigmoid { slope, offset } => {
            let (slope, offset) = (s.splat(slope), s.splat(offset));
            each(sums, |sum, _, _| clip(s.mul_add(sum, slope, offset), zero, one));
        }
        RegisterActivation::HardSwish => {
            let (slope, offset) = (s.splat(1.0 / 6.0), s.splat(0.5));
            each(sums, |sum, _, _| s.mul(sum, clip(s.mul_add(sum, slope, offset), zero, one)));
        }
        RegisterActivation::Silu => {
            // A loop through memory, whose length the compiler does not know: unrolled over the
            // tile, the function would be longer than the rest of the kernel.
            let mut values = *sums;
            let (pairs, rest) = values.as_flattened_mut().as_chunks_mut();
            for pair in pairs.iter_mut().take(std::hint::black_box(ROWS * VECTORS / 2)) {
                *pair = math::silu::<_, 2>(s, *pair);
            }
            for value in rest {
                [*value] = math::silu(s, [*value]);
            }
            *sums = values;
        }
    }
}

/// AXPY over rows: `sums[j] += factors[i] * rows[i][j]` over all rows, with row `i` at offset
/// `i * stride`. This is a row vector times a matrix with contiguous rows.
///
/// # Safety
///
/// `factors` holds `count` values `factor_step` apart, and every row and `sums` hold `columns`
/// values.
#[inline(always)]
pub(super) unsafe fn add_rows<S: Simd>(s: S, call: &AddRows) {
    // SAFETY: the caller guarantees these lengths, and `count` and `columns` bound the offsets.
    unsafe {
        let mut row = 0;
        while row < call.count {
            let group = (call.count - row).min(4);
            let mut factors = [s.splat(0.0); 4];
            for at in 0..group {
                factors[at] = s.splat(*call.factors.add((row + at) * call.factor_step));
            }
            let rows = call.rows.add(row * call.stride);
            let mut column = 0;
            while column < call.columns {
                let count = (call.columns - column).min(S::LANES);
                let whole = count == S::LANES;
                let read = |from: *const f32| match whole {
                    true => s.load_ptr(from),
                    false => s.load_partial_ptr(from, count, 0.0),
                };
                let mut sum = read(call.sums.add(column));
                // A constant trip count in the common case lets the compiler unroll the loop.
                if group == 4 {
                    for at in 0..4 {
                        sum = s.mul_add(factors[at], read(rows.add(at * call.stride + column)), sum);
                    }
                } else {
                    for at in 0..group {
                        sum = s.mul_add(factors[at], read(rows.add(at * call.stride + column)), sum);
                    }
                }
                match whole {
                    true => s.store_ptr(call.sums.add(column), sum),
                    false => s.store_partial_ptr(call.sums.add(column), count, sum),
                }
                column += count;
            }
            row += group;
        }
    }
}

/// The arguments of [`add_rows`].
#[derive(Clone, Copy, Debug)]
pub(super) struct AddRows {
    pub(super) factors: *const f32,
    pub(super) factor_step: usize,
    pub(super) rows: *const f32,
    pub(super) stride: usize,
    pub(super) count: usize,
    pub(super) sums: *mut f32,
    pub(super) columns: usize,
}

/// Returns the dot product of two runs of `len` values, accumulated in four vectors and then over
/// their lanes.
///
/// # Safety
///
/// Both runs hold `len` values.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd>(s: S, left: *const f32, right: *const f32, len: usize) -> f32 {
    // SAFETY: the caller guarantees `len` values on both sides, and every load ends at or before
    // `len`.
    unsafe {
        let mut sums = [s.splat(0.0); 4];
        let mut at = 0;
        while at + 4 * S::LANES <= len {
            for (index, sum) in sums.iter_mut().enumerate() {
                let offset = at + index * S::LANES;
                *sum = s.mul_add(s.load_ptr(left.add(offset)), s.load_ptr(right.add(offset)), *sum);
            }
            at += 4 * S::LANES;
        }
        while at < len {
            let count = (len - at).min(S::LANES);
            let load = |from: *const f32| s.load_partial_ptr(from.add(at), count, 0.0);
            sums[0] = s.mul_add(load(left), load(right), sums[0]);
            at += count;
        }
        let total = s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3]));
        s.to_array(total)[..S::LANES].iter().sum()
    }
}

/// Copies `len` values in whole and partial vectors, which saves the `memcpy` call for short runs.
///
/// # Safety
///
/// Both sides hold `len` values and do not overlap.
#[inline(always)]
pub(super) unsafe fn copy<S: Simd>(s: S, from: *const f32, to: *mut f32, len: usize) {
    // SAFETY: the caller guarantees `len` values on both sides.
    unsafe {
        let mut at = 0;
        while at + S::LANES <= len {
            s.store_ptr(to.add(at), s.load_ptr(from.add(at)));
            at += S::LANES;
        }
        if at < len {
            s.store_partial_ptr(to.add(at), len - at, s.load_partial_ptr(from.add(at), len - at, 0.0));
        }
    }
}

/// Copies every other value of `from`, `len` in all.
///
/// # Safety
///
/// `from` holds `2 * len - 1` values and `to` holds `len`. They do not overlap.
#[inline(always)]
pub(super) unsafe fn copy_even<S: Simd>(s: S, from: *const f32, to: *mut f32, len: usize) {
    // SAFETY: the caller guarantees the lengths; `load_even` reads no further than its last value.
    unsafe {
        let mut at = 0;
        while at + S::LANES <= len {
            s.store_ptr(to.add(at), load_even(s, from.add(2 * at), S::LANES));
            at += S::LANES;
        }
        if at < len {
            s.store_partial_ptr(to.add(at), len - at, load_even(s, from.add(2 * at), len - at));
        }
    }
}

/// Loads elements 0, 2, 4, ..., `count` of them, and zeros the other lanes. Reads no further.
///
/// # Safety
///
/// `count` is from 1 to `LANES`, and `from` holds `2 * count - 1` values.
#[inline(always)]
unsafe fn load_even<S: Simd>(s: S, from: *const f32, count: usize) -> S::F32 {
    let reach = 2 * count - 1;
    // SAFETY: the caller guarantees `reach` values, and the second load reads none if the first
    // reads them all.
    unsafe {
        let low = s.load_partial_ptr(from, reach.min(S::LANES), 0.0);
        let high = from.wrapping_add(S::LANES);
        let high = s.load_partial_ptr(high, reach.saturating_sub(S::LANES), 0.0);
        s.part_even_odd(low, high).0
    }
}
