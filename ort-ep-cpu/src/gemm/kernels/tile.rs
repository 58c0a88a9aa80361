//! The one micro-kernel, written over a vector type: a tile of C from a strip of A and a strip of
//! B.
//!
//! Each instruction set instantiates it for every tile shape it supports. All sums run over k in
//! order with one fused multiply-add per step, so an element's bits do not depend on the shape of
//! the tile it falls in, nor on how rows and columns are split over threads. Where an element of a
//! strip is a pair of bfloat16, a step adds two products; nothing else differs.

/// A vector of `f32`, implemented for each instruction set.
///
/// # Safety
///
/// All methods need a CPU with the instruction set of the type; they are called from functions
/// that enable it.
pub(super) trait Vector: Copy {
    /// Elements in a vector.
    const LANES: usize;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// The first `count` elements, zeros behind; reads no further.
    unsafe fn load_partial(from: *const f32, count: usize) -> Self;
    /// Elements 0, 2, 4, ... `count` of them (at least one), zeros behind; reads no further.
    unsafe fn load_even(from: *const f32, count: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Writes the first `count` elements only.
    unsafe fn store_partial(self, to: *mut f32, count: usize);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once where the CPU can.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The sum after one more step: that of each column of B in `columns` times the one of A in
    /// every lane of `factor`.
    #[inline(always)]
    unsafe fn accumulate(self, columns: Self, factor: Self) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { factor.mul_add(columns, self) }
    }
    /// The larger one; `self` where `self` is not a number.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller one; `self` where `self` is not a number.
    unsafe fn min(self, other: Self) -> Self;
    /// Asks for the cache line at `address`, which need not be mapped.
    unsafe fn prefetch(address: *const f32);
}

/// The activation that ends an epilogue, evaluated in registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::gemm) enum Ending {
    /// Nothing.
    None,
    /// `min(max(x, low), high)`.
    Clip { low: f32, high: f32 },
    /// `x` where positive, else `slope * x`.
    LeakyRelu { slope: f32 },
    /// `min(max(slope * x + offset, 0), 1)`.
    HardSigmoid { slope: f32, offset: f32 },
    /// `x * min(max(x / 6 + 1/2, 0), 1)`.
    HardSwish,
}

/// Rows up to which a tile waits for B more than for its multipliers, and fetches its own strip
/// ahead.
const FEW_ROWS: usize = 2;

/// How many steps ahead it does so.
const AHEAD: usize = 24;

/// What one call of a kernel works on. Null pointers stand for parts that are absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// Elements along the sum, of a step or of a pair of steps.
    pub(super) k: usize,
    pub(super) a: *const f32,
    /// From a row of A to the next, and from a step to the next, in elements.
    pub(super) a_row: usize,
    pub(super) a_step: usize,
    pub(super) b: *const f32,
    pub(super) b_step: usize,
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// Columns to write, at most the width of the kernel.
    pub(super) columns: usize,
    pub(super) alpha: f32,
    /// What C holds is multiplied by this and added; zero does not read C.
    pub(super) beta: f32,
    pub(super) row_bias: *const f32,
    pub(super) column_bias: *const f32,
    pub(super) residual: *const f32,
    pub(super) residual_row: usize,
    pub(super) ending: Ending,
    /// Memory that a later call will read, a cache line of it fetched in each step, and from one to
    /// the next.
    pub(super) prefetch: *const f32,
    pub(super) prefetch_step: usize,
}

/// A tile function of some instruction set.
pub(super) type TileFunction = unsafe fn(&Tile);

/// Computes `ROWS` rows and up to `VECTORS * LANES` columns of C. With `PARTIAL`, the last vector
/// of B is read only as far as `columns` reaches.
///
/// # Safety
///
/// Every pointer of `tile` must be valid for the rows, steps and columns the tile names, and the
/// CPU must have the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn compute<V: Vector, const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(
    tile: &Tile,
) {
    let last = tile.columns - (VECTORS - 1) * V::LANES;
    // SAFETY: the caller vouches for the pointers and the instruction set; offsets stay inside the
    // strips, because `k`, `ROWS` and `columns` bound them.
    unsafe {
        // C is written long after this, and its rows are too far apart for the CPU to foresee.
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

/// One step of the sum: an outer product of a column of A and a row of B.
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
    // SAFETY: see `compute`.
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

/// Scales, adds what is to be added, applies the ending and stores: one after the other for the
/// whole tile, which the compiler unrolls, so that the sums stay in registers.
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
    // SAFETY: see `compute`.
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
        end(&mut sums, tile.ending);
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

/// Puts `change` of each sum, its row and its vector in the sum's place.
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

/// # Safety
///
/// The CPU must have the instruction set of `V`.
#[inline(always)]
unsafe fn end<V: Vector, const ROWS: usize, const VECTORS: usize>(
    sums: &mut [[V; VECTORS]; ROWS],
    ending: Ending,
) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let (zero, one) = (V::splat(0.0), V::splat(1.0));
        match ending {
            Ending::None => {}
            Ending::Clip { low, high } => {
                let (low, high) = (V::splat(low), V::splat(high));
                each(sums, |sum, _, _| sum.max(low).min(high));
            }
            Ending::LeakyRelu { slope } => {
                let slope = V::splat(slope);
                each(sums, |sum, _, _| sum.min(zero).mul(slope).add(sum.max(zero)));
            }
            Ending::HardSigmoid { slope, offset } => {
                let (slope, offset) = (V::splat(slope), V::splat(offset));
                each(sums, |sum, _, _| sum.mul_add(slope, offset).max(zero).min(one));
            }
            Ending::HardSwish => {
                let (slope, offset) = (V::splat(1.0 / 6.0), V::splat(0.5));
                each(sums, |sum, _, _| sum.mul(sum.mul_add(slope, offset).max(zero).min(one)));
            }
        }
    }
}

/// `sums[j] += factors[i] * rows[i][j]` over all rows, where row `i` starts `i * stride` behind
/// `rows`: a row vector times a matrix that lies row by row.
///
/// # Safety
///
/// `factors` holds `count` values `factor_step` apart, every row and `sums` `columns` values, and
/// the CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn add_rows<V: Vector>(call: &AddRows) {
    // SAFETY: the caller vouches for the lengths.
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

/// The inner product of two runs of `len` values, summed in four vectors and then over their lanes.
///
/// # Safety
///
/// Both runs hold `len` values and the CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn dot<V: Vector>(left: *const f32, right: *const f32, len: usize) -> f32 {
    // SAFETY: the caller vouches for the lengths.
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

/// Copies `len` values in whole and partial vectors, without the cost of a call for short runs.
///
/// # Safety
///
/// Both sides hold `len` values and do not overlap, and the CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn copy<V: Vector>(from: *const f32, to: *mut f32, len: usize) {
    // SAFETY: the caller vouches for the lengths.
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
/// `from` holds `2 * len - 1` values and `to` holds `len`; they do not overlap, and the CPU has the
/// instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn copy_even<V: Vector>(from: *const f32, to: *mut f32, len: usize) {
    // SAFETY: the caller vouches for the lengths.
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
