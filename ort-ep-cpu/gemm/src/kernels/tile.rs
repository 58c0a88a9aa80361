//! The GEMM micro-kernel, generic over a vector type: a register tile of C from a panel of A and a
//! panel of B.
//!
//! Each instruction set instantiates it for every tile shape it supports. Every accumulator runs
//! over k in order with one FMA per k step. So an element's bits do not depend on the shape of its
//! tile, nor on how rows and columns are split over threads. If an element of a panel is a bf16
//! pair, each step adds two products; nothing else differs.

/// A vector of `f32`, implemented for each instruction set.
///
/// # Safety
///
/// All methods need a CPU with the instruction set of the type, so their callers enable it.
/// Pointers must be valid for the lanes that are read or written; they may be unaligned.
pub(super) trait Vector: Copy {
    /// Lanes of a vector.
    const LANES: usize;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// Loads the first `count` lanes and zeros the rest. Reads no further.
    unsafe fn load_partial(from: *const f32, count: usize) -> Self;
    /// Loads elements 0, 2, 4, ..., `count` of them (at least one), and zeros the rest. Reads no
    /// further.
    unsafe fn load_even(from: *const f32, count: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Stores the first `count` lanes only.
    unsafe fn store_partial(self, to: *mut f32, count: usize);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once if the CPU has FMA.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Accumulates one step of k: adds `columns` (a row of B) times `factor` (an element of A in
    /// every lane).
    #[inline(always)]
    unsafe fn accumulate(self, columns: Self, factor: Self) -> Self {
        // SAFETY: `accumulate` has the contract of `mul_add`.
        unsafe { factor.mul_add(columns, self) }
    }
    /// The larger value; `self` if `self` is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller value; `self` if `self` is NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// Prefetches the cache line at `address`, which need not be mapped.
    unsafe fn prefetch(address: *const f32);
}

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
}

/// The maximum number of rows for which a tile is bound by loading B rather than by its FMAs. Such
/// a tile prefetches its own panel.
const FEW_ROWS: usize = 2;

/// How many k steps ahead it prefetches.
const AHEAD: usize = 24;

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
}

/// A tile function of some instruction set.
pub(super) type TileFunction = unsafe fn(&Tile);

/// Computes `ROWS` rows and up to `VECTORS * LANES` columns of C. With `PARTIAL`, the last vector
/// of B is read only up to `columns`.
///
/// # Safety
///
/// Every pointer of `tile` must be valid for the rows, k steps and columns that the tile names, and
/// the CPU must have the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn compute<V: Vector, const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(
    tile: &Tile,
) {
    // The columns of the last vector.
    let last = tile.columns - (VECTORS - 1) * V::LANES;
    // SAFETY: the caller guarantees the pointers and the instruction set. `k`, `ROWS` and `columns`
    // bound the offsets, so they stay inside the panels.
    unsafe {
        // C is written only after the whole k loop, and its rows are too far apart for the hardware
        // prefetcher.
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                V::prefetch(tile.c.wrapping_add(row * tile.c_row + vector * V::LANES));
            }
        }
        let mut sums = [[V::splat(0.0); VECTORS]; ROWS];
        let (mut a, mut b, mut ahead) = (tile.a, tile.b, tile.prefetch);
        let (a_row, a_step, b_step) = (tile.a_row, tile.a_step, tile.b_step);
        let mut left = tile.k;
        while left >= 4 {
            for _ in 0..4 {
                if ROWS <= FEW_ROWS {
                    for vector in 0..VECTORS {
                        V::prefetch(b.wrapping_add(AHEAD * b_step + vector * V::LANES));
                    }
                }
                V::prefetch(ahead);
                ahead = ahead.wrapping_add(tile.prefetch_step);
                step::<V, ROWS, VECTORS, PARTIAL>(&mut sums, a, a_row, b, last);
                a = a.wrapping_add(a_step);
                b = b.wrapping_add(b_step);
            }
            left -= 4;
        }
        while left > 0 {
            step::<V, ROWS, VECTORS, PARTIAL>(&mut sums, a, a_row, b, last);
            a = a.wrapping_add(a_step);
            b = b.wrapping_add(b_step);
            left -= 1;
        }
        finish::<V, ROWS, VECTORS>(sums, tile, last);
    }
}

/// One k step: the outer product of a column of A and a row of B.
///
/// # Safety
///
/// As [`compute`].
#[inline(always)]
unsafe fn step<V: Vector, const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(
    sums: &mut [[V; VECTORS]; ROWS],
    a: *const f32,
    a_row: usize,
    b: *const f32,
    last: usize,
) {
    // SAFETY: `step` has the contract of `compute`, which advances the pointers.
    unsafe {
        let mut columns = [V::splat(0.0); VECTORS];
        for vector in 0..VECTORS {
            let from = b.add(vector * V::LANES);
            columns[vector] = match PARTIAL && vector + 1 == VECTORS {
                true => V::load_partial(from, last),
                false => V::load(from),
            };
        }
        for row in 0..ROWS {
            let factor = V::splat(*a.add(row * a_row));
            for vector in 0..VECTORS {
                sums[row][vector] = sums[row][vector].accumulate(columns[vector], factor);
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
unsafe fn finish<V: Vector, const ROWS: usize, const VECTORS: usize>(
    mut sums: [[V; VECTORS]; ROWS],
    tile: &Tile,
    last: usize,
) {
    // SAFETY: `finish` has the contract of `compute`.
    unsafe {
        let read = |from: *const f32, vector: usize| match vector + 1 == VECTORS && last < V::LANES {
            true => V::load_partial(from.add(vector * V::LANES), last),
            false => V::load(from.add(vector * V::LANES)),
        };
        if tile.alpha != 1.0 {
            let alpha = V::splat(tile.alpha);
            each(&mut sums, |sum, _, _| sum.mul(alpha));
        }
        if tile.beta != 0.0 {
            let beta = V::splat(tile.beta);
            each(&mut sums, |sum, row, vector| beta.mul_add(read(tile.c.add(row * tile.c_row), vector), sum));
        }
        if !tile.row_bias.is_null() {
            each(&mut sums, |sum, row, _| sum.add(V::splat(*tile.row_bias.add(row))));
        }
        if !tile.column_bias.is_null() {
            each(&mut sums, |sum, _, vector| sum.add(read(tile.column_bias, vector)));
        }
        if !tile.residual.is_null() {
            each(&mut sums, |sum, row, vector| {
                sum.add(read(tile.residual.add(row * tile.residual_row), vector))
            });
        }
        end(&mut sums, tile.activation);
        each(&mut sums, |sum, row, vector| {
            let to = tile.c.add(row * tile.c_row + vector * V::LANES);
            match vector + 1 == VECTORS && last < V::LANES {
                true => sum.store_partial(to, last),
                false => sum.store(to),
            }
            sum
        });
    }
}

/// Replaces each accumulator with `change` of its value, row and vector.
#[inline(always)]
fn each<V: Vector, const ROWS: usize, const VECTORS: usize>(
    sums: &mut [[V; VECTORS]; ROWS],
    change: impl Fn(V, usize, usize) -> V,
) {
    for row in 0..ROWS {
        for vector in 0..VECTORS {
            sums[row][vector] = change(sums[row][vector], row, vector);
        }
    }
}

/// Applies the activation.
///
/// # Safety
///
/// The CPU must have the instruction set of `V`.
#[inline(always)]
unsafe fn end<V: Vector, const ROWS: usize, const VECTORS: usize>(
    sums: &mut [[V; VECTORS]; ROWS],
    activation: RegisterActivation,
) {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let (zero, one) = (V::splat(0.0), V::splat(1.0));
        match activation {
            RegisterActivation::None => {}
            RegisterActivation::Clip { low, high } => {
                let (low, high) = (V::splat(low), V::splat(high));
                each(sums, |sum, _, _| sum.max(low).min(high));
            }
            RegisterActivation::LeakyRelu { slope } => {
                let slope = V::splat(slope);
                each(sums, |sum, _, _| sum.min(zero).mul(slope).add(sum.max(zero)));
            }
            RegisterActivation::HardSigmoid { slope, offset } => {
                let (slope, offset) = (V::splat(slope), V::splat(offset));
                each(sums, |sum, _, _| sum.mul_add(slope, offset).max(zero).min(one));
            }
            RegisterActivation::HardSwish => {
                let (slope, offset) = (V::splat(1.0 / 6.0), V::splat(0.5));
                each(sums, |sum, _, _| sum.mul(sum.mul_add(slope, offset).max(zero).min(one)));
            }
        }
    }
}

/// AXPY over rows: `sums[j] += factors[i] * rows[i][j]` over all rows, with row `i` at offset
/// `i * stride`. This is a row vector times a matrix with contiguous rows.
///
/// # Safety
///
/// `factors` holds `count` values `factor_step` apart, every row and `sums` hold `columns` values,
/// and the CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn add_rows<V: Vector>(call: &AddRows) {
    // SAFETY: the caller guarantees these lengths, and `count` and `columns` bound the offsets.
    unsafe {
        let mut row = 0;
        while row < call.count {
            let group = (call.count - row).min(4);
            let mut factors = [V::splat(0.0); 4];
            for at in 0..group {
                factors[at] = V::splat(*call.factors.add((row + at) * call.factor_step));
            }
            let rows = call.rows.add(row * call.stride);
            let mut column = 0;
            while column < call.columns {
                let count = (call.columns - column).min(V::LANES);
                let whole = count == V::LANES;
                let read = |from: *const f32| match whole {
                    true => V::load(from),
                    false => V::load_partial(from, count),
                };
                let mut sum = read(call.sums.add(column));
                // A constant trip count in the common case lets the compiler unroll the loop.
                if group == 4 {
                    for at in 0..4 {
                        sum = factors[at].mul_add(read(rows.add(at * call.stride + column)), sum);
                    }
                } else {
                    for at in 0..group {
                        sum = factors[at].mul_add(read(rows.add(at * call.stride + column)), sum);
                    }
                }
                match whole {
                    true => sum.store(call.sums.add(column)),
                    false => sum.store_partial(call.sums.add(column), count),
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
/// Both runs hold `len` values and the CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn dot<V: Vector>(left: *const f32, right: *const f32, len: usize) -> f32 {
    // SAFETY: the caller guarantees `len` values on both sides, and every load ends at or before
    // `len`.
    unsafe {
        let mut sums = [V::splat(0.0); 4];
        let mut at = 0;
        while at + 4 * V::LANES <= len {
            for (index, sum) in sums.iter_mut().enumerate() {
                let offset = at + index * V::LANES;
                *sum = V::load(left.add(offset)).mul_add(V::load(right.add(offset)), *sum);
            }
            at += 4 * V::LANES;
        }
        while at < len {
            let count = (len - at).min(V::LANES);
            let (x, y) = (V::load_partial(left.add(at), count), V::load_partial(right.add(at), count));
            sums[0] = x.mul_add(y, sums[0]);
            at += count;
        }
        let total = sums[0].add(sums[1]).add(sums[2].add(sums[3]));
        let mut lanes = [0.0_f32; 16];
        total.store(lanes.as_mut_ptr());
        lanes[..V::LANES].iter().sum()
    }
}

/// Copies `len` values in whole and partial vectors, which saves the `memcpy` call for short runs.
///
/// # Safety
///
/// Both sides hold `len` values and do not overlap, and the CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn copy<V: Vector>(from: *const f32, to: *mut f32, len: usize) {
    // SAFETY: the caller guarantees `len` values on both sides.
    unsafe {
        let mut at = 0;
        while at + V::LANES <= len {
            V::load(from.add(at)).store(to.add(at));
            at += V::LANES;
        }
        if at < len {
            V::load_partial(from.add(at), len - at).store_partial(to.add(at), len - at);
        }
    }
}

/// Copies every other value of `from`, `len` in all.
///
/// # Safety
///
/// `from` holds `2 * len - 1` values and `to` holds `len`. They do not overlap, and the CPU has the
/// instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn copy_even<V: Vector>(from: *const f32, to: *mut f32, len: usize) {
    // SAFETY: the caller guarantees the lengths; `load_even` reads no further than its last value.
    unsafe {
        let mut at = 0;
        while at + V::LANES <= len {
            V::load_even(from.add(2 * at), V::LANES).store(to.add(at));
            at += V::LANES;
        }
        if at < len {
            V::load_even(from.add(2 * at), len - at).store_partial(to.add(at), len - at);
        }
    }
}
