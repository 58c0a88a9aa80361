//! Depthwise convolution of planes in place, without padded copies: masked loads zero what is
//! outside a plane.

use super::stencil::{Filter, store_in_order};
use ort_cpu_vector::simd::slices::UnaryOp;
use ort_cpu_vector::simd::{MAX_LANES, Simd};
use ort_cpu_vector::window::Window;

/// Output rows that share the loads of an input row.
const ROWS: usize = 4;

/// The same for small kernels, if it divides the height, as it does for many classifiers of images.
const MORE_ROWS: usize = 7;

/// The most vectors of a row for which that pays.
const NARROW: usize = 4;

/// The largest kernel of [`square`].
const LARGEST: usize = 7;

/// Vectors of a row whose masks are kept for all planes.
const COLUMNS: usize = 8;

/// The masks of the loads that make up the `LARGEST` shifted vectors of a row.
type Masks<S> = [<S as Simd>::Mask; LARGEST];

/// Planes of consecutive channels at equal distances, each with a filter of its own.
#[derive(Debug, Clone, Copy)]
pub struct Planes<'a> {
    /// The values, from the first plane on.
    pub values: &'a [f32],
    /// The distance from one plane to the next.
    pub stride: usize,
    /// The weights of all filters.
    pub weights: &'a [f32],
    /// One initial value per plane, or none for zeros.
    pub bias: Option<&'a [f32]>,
}

impl<'a> Planes<'a> {
    /// Returns whether this holds `count` planes of `len` values, with filters of `taps` weights.
    pub fn holds(&self, count: usize, len: usize, taps: usize) -> bool {
        let reach = count.checked_sub(1).map_or(0, |last| last * self.stride + len);
        reach <= self.values.len()
            && count * taps <= self.weights.len()
            && self.bias.is_none_or(|bias| count <= bias.len())
    }

    /// Returns plane number `index` of `len` values, and its filter of `taps` weights.
    #[inline(always)]
    pub fn plane(&self, index: usize, len: usize, taps: usize) -> (&'a [f32], Filter<'a>) {
        let weights = &self.weights[index * taps..][..taps];
        let filter = Filter { weights, bias: self.bias.map_or(0.0, |bias| bias[index]) };
        (&self.values[index * self.stride..][..len], filter)
    }
}

/// Convolves planes with `K` by `K` kernels, at strides of `SY` and `SX` (1 or 2) and without
/// dilation: `out[y][x] = epilogue(bias + sum of weights[ky][kx] * from[..])`. The results of all
/// planes are contiguous.
///
/// # Panics
/// If a slice does not hold what the window requires, or the window does not match `K`, `SY` and
/// `SX`.
#[inline(always)]
pub fn square<S: Simd, E: UnaryOp, const K: usize, const SY: usize, const SX: usize>(
    s: S,
    window: &Window,
    planes: Planes<'_>,
    epilogue: E,
    out: &mut [f32],
) {
    const { assert!(K <= LARGEST && 1 <= SY && SY <= 2 && 1 <= SX && SX <= 2) };
    let Window { input, output: [height, width], kernel, strides, dilations, .. } = *window;
    assert!(kernel == [K; 2] && strides == [SY, SX] && dilations == [1; 2], "the window is a plain square");
    let (input_len, output_len) = (input[0] * input[1], height * width);
    let count = out.len() / output_len.max(1);
    assert!(out.len() == count * output_len, "whole planes of results");
    assert!(planes.holds(count, input_len, K * K), "each plane has its values and its filter");
    let vectors = width.div_ceil(S::LANES);
    for first in (0..vectors).step_by(COLUMNS) {
        let last = (first + COLUMNS).min(vectors) - 1;
        let mut columns = [Column::new::<K, SX>(s, window, first); COLUMNS];
        let columns = &mut columns[..=last - first];
        let is_narrow = columns.len() <= NARROW;
        for (at, column) in columns.iter_mut().enumerate().skip(1) {
            *column = Column::new::<K, SX>(s, window, first + at);
        }
        for index in 0..count {
            let (from, filter) = planes.plane(index, input_len, K * K);
            let rows = Rows::<S, K>::new(s, window, from, filter);
            // Whole vectors are stored, so a plane may overwrite the start of the next one, which
            // is computed after it.
            let out = &mut out[index * output_len..];
            // SAFETY: the assertions above checked the lengths of the planes and of the results.
            unsafe {
                match height {
                    1 => rows.all::<E, SY, SX, 1>(s, columns, epilogue, out),
                    2 => rows.all::<E, SY, SX, 2>(s, columns, epilogue, out),
                    3 => rows.all::<E, SY, SX, 3>(s, columns, epilogue, out),
                    _ if const { K == 5 || K == 3 && SY == 1 }
                        && (height == MORE_ROWS
                            || SY == 1 && is_narrow && height.is_multiple_of(MORE_ROWS)) =>
                    {
                        rows.all::<E, SY, SX, MORE_ROWS>(s, columns, epilogue, out);
                    }
                    _ => rows.all::<E, SY, SX, ROWS>(s, columns, epilogue, out),
                }
            }
        }
    }
}

/// A vector of results in each row, and how the columns that it needs are loaded.
#[derive(Clone, Copy)]
struct Column<S: Simd> {
    /// The first result.
    at: usize,
    /// The column where its window begins.
    first: isize,
    /// Whether loads reach beyond the row and need `masks`.
    is_masked: bool,
    masks: Masks<S>,
}

impl<S: Simd> Column<S> {
    /// Creates vector number `index` of the rows of a result.
    #[inline(always)]
    fn new<const K: usize, const STRIDE: usize>(s: S, window: &Window, index: usize) -> Self {
        let Window { input: [_, columns], output: [_, width], pads: [_, left], .. } = *window;
        let next = index * S::LANES;
        // The last vector is moved back and overlaps results that are computed twice.
        let at = if next + S::LANES > width { width.saturating_sub(S::LANES) } else { next };
        let first = (at * STRIDE).wrapping_sub(left) as isize;
        // The number of input columns that a vector of results reads.
        let span = S::LANES * STRIDE + (K - 1).next_multiple_of(STRIDE);
        let is_masked = first < 0 || first as usize + span > columns;
        let masks = match is_masked {
            true => masks::<S, K, STRIDE>(s, first, columns),
            false => [s.mask_of_bits(0); LARGEST],
        };
        Column { at, first, is_masked, masks }
    }
}

/// State shared by the blocks of rows of a plane.
struct Rows<'a, S: Simd, const K: usize> {
    window: &'a Window,
    from: *const f32,
    weights: [[S::F32; K]; K],
    bias: S::F32,
}

impl<'a, S: Simd, const K: usize> Rows<'a, S, K> {
    #[inline(always)]
    fn new(s: S, window: &'a Window, from: &[f32], filter: Filter<'_>) -> Self {
        let mut weights = [[s.splat(0.0); K]; K];
        for (row, values) in weights.iter_mut().zip(filter.weights.chunks_exact(K)) {
            for (weight, value) in row.iter_mut().zip(values) {
                *weight = s.splat(*value);
            }
        }
        Rows { window, from: from.as_ptr(), weights, bias: s.splat(filter.bias) }
    }

    /// Computes all rows of a plane, `R` at a time. The last block is moved back and overlaps rows
    /// that are computed twice.
    ///
    /// # Safety
    /// `from` is a whole plane, `out` holds one, and it has at least `R` rows.
    #[inline(always)]
    unsafe fn all<E: UnaryOp, const SY: usize, const SX: usize, const R: usize>(
        &self,
        s: S,
        columns: &[Column<S>],
        epilogue: E,
        out: &mut [f32],
    ) {
        let [height, width] = self.window.output;
        let (to, len) = (out.as_mut_ptr(), out.len());
        for next in (0..height).step_by(R) {
            let row = next.min(height - R);
            for column in columns {
                // SAFETY: a column without masks is inside its row; all other loads are masked. The
                // caller guarantees the rows.
                unsafe {
                    let sums = match column.is_masked {
                        false => self.sums::<SY, SX, R, false>(s, row, column),
                        true => self.sums::<SY, SX, R, true>(s, row, column),
                    };
                    for (index, result) in epilogue.apply_each(s, sums).into_iter().enumerate() {
                        let start = (row + index) * width + column.at;
                        store_in_order(s, to, len, start, width - column.at, result);
                    }
                }
            }
        }
    }

    /// Returns the sums of one vector in each of `R` rows from `row` on.
    ///
    /// # Safety
    /// `from` is a whole plane. Without masks, all columns that are read are inside it.
    #[inline(always)]
    unsafe fn sums<const SY: usize, const SX: usize, const R: usize, const MASKED: bool>(
        &self,
        s: S,
        row: usize,
        column: &Column<S>,
    ) -> [S::F32; R] {
        const { assert!((R - 1) * SY + K <= 19, "all input rows are written out") };
        let Window { input: [height, columns], pads: [top, _], .. } = *self.window;
        let first = column.first;
        let mut sums = [self.bias; R];
        // Unrolled by a macro, because the compiler does not unroll a loop of this size, and arrays
        // stay in registers only if all indices are constant.
        macro_rules! input_rows {
            ($($index:literal)+) => {
                $(if $index < (R - 1) * SY + K {
                    let y = (row * SY + $index).wrapping_sub(top);
                    if y < height {
                        let start = self.from.wrapping_add(y * columns).wrapping_offset(first);
                        // SAFETY: the row is inside the plane. Its columns are guaranteed by the
                        // caller, or masked.
                        unsafe {
                            let line = Line { start, first, columns };
                            let values = shifted::<S, K, SX, MASKED>(s, line, &column.masks);
                            self.add_input_row::<SY, R>(s, &values, $index, &mut sums);
                        }
                    }
                })+
            };
        }
        input_rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18);
        sums
    }

    /// Adds the products of one input row to the sums of `R` output rows.
    #[inline(always)]
    fn add_input_row<const STRIDE: usize, const R: usize>(
        &self,
        s: S,
        values: &[S::F32; K],
        input_row: usize,
        sums: &mut [S::F32; R],
    ) {
        for kx in 0..K {
            for (row, sum) in sums.iter_mut().enumerate() {
                if row * STRIDE <= input_row && input_row < row * STRIDE + K {
                    *sum = s.mul_add(values[kx], self.weights[input_row - row * STRIDE][kx], *sum);
                }
            }
        }
    }
}

/// Returns which lanes of the loads of [`shifted`] are inside a row of `columns`, if the first load
/// begins in column `first`.
#[inline(always)]
fn masks<S: Simd, const K: usize, const STRIDE: usize>(s: S, first: isize, columns: usize) -> Masks<S> {
    let mut masks = [s.mask_of_bits(0); LARGEST];
    let loads = if STRIDE == 1 { K } else { 2 };
    for (index, mask) in masks.iter_mut().enumerate().take(loads) {
        let place = first + load_offset::<S, K, STRIDE>(index) as isize;
        *mask = s.mask_of_bits(bits_within(place, columns));
    }
    masks
}

/// Returns the offset of a load of [`shifted`].
#[inline(always)]
fn load_offset<S: Simd, const K: usize, const STRIDE: usize>(index: usize) -> usize {
    if STRIDE == 1 { index } else { K / 2 + index * S::LANES }
}

/// Returns one bit per lane: whether the position from `first` on is at least 0 and less than
/// `len`.
#[inline(always)]
fn bits_within(first: isize, len: usize) -> u16 {
    let lanes = MAX_LANES as isize;
    let below = (-first).clamp(0, lanes) as u32;
    let end = (len as isize - first).clamp(0, lanes) as u32;
    ((1_u32 << end).wrapping_sub(1) & !((1_u32 << below) - 1)) as u16
}

/// The part of a row that the vectors of [`shifted`] are read from.
#[derive(Clone, Copy)]
struct Line {
    /// Its first element, which is column `first` of the row.
    start: *const f32,
    first: isize,
    columns: usize,
}

/// Returns `K` vectors of every `STRIDE`th value of a line, starting at its first value, its
/// second, and so on. At a stride of 2, the middle vectors are loaded, usually from whole cache
/// lines. The others are made from them by shifts.
///
/// # Safety
/// Everything that is read is readable. With masks, only the set lanes inside the row's columns are
/// read.
#[inline(always)]
unsafe fn shifted<S: Simd, const K: usize, const STRIDE: usize, const MASKED: bool>(
    s: S,
    line: Line,
    masks: &Masks<S>,
) -> [S::F32; K] {
    let load = |index: usize| {
        let from = line.start.wrapping_add(load_offset::<S, K, STRIDE>(index));
        // SAFETY: the caller guarantees the load, or the mask limits it to the row.
        unsafe { if MASKED { s.load_masked_ptr(from, masks[index]) } else { s.load_ptr(from) } }
    };
    let one = |place: usize| {
        let inside = !MASKED || ((line.first + place as isize) as usize) < line.columns;
        // SAFETY: the caller guarantees the element, or `inside` checked that it is in the row.
        if inside { unsafe { line.start.wrapping_add(place).read() } } else { 0.0 }
    };
    let mut values = [s.splat(0.0); K];
    if STRIDE == 1 {
        for (index, value) in values.iter_mut().enumerate() {
            *value = load(index);
        }
        return values;
    }
    let middle = K / 2;
    (values[middle], values[middle + 1]) = s.part_even_odd(load(0), load(1));
    for index in (0..middle).rev() {
        values[index] = s.shift_in_first(one(index), values[index + 2]);
    }
    for index in middle + 2..K {
        values[index] = s.shift_in_last(values[index - 2], one(index + 2 * (S::LANES - 1)));
    }
    values
}

/// A plan to convolve a plane as one long row, which wastes no lanes if rows are much narrower than
/// a vector. It requires strides of 1 and output rows as wide as input rows, so that each tap reads
/// at a constant offset.
#[derive(Debug, Clone)]
pub struct FlatPlan {
    input_len: usize,
    output_len: usize,
    lanes: usize,
    /// The offset from a result to what each tap reads for it.
    offsets: Vec<isize>,
    /// For each vector of results and each tap, the lanes that are inside the plane.
    masks: Vec<u16>,
}

impl FlatPlan {
    /// Creates a plan for vectors of `lanes`. Returns `None` if the window does not allow it.
    pub fn new(lanes: usize, window: &Window) -> Option<FlatPlan> {
        let Window { input, output, kernel, strides, dilations, pads } = *window;
        // Otherwise the offset from a result to a tap would vary between rows.
        if strides != [1; 2] || input[1] != output[1] {
            return None;
        }
        let (output_len, taps) = (output[0] * output[1], kernel[0] * kernel[1]);
        let mut offsets = Vec::with_capacity(taps);
        let mut masks = vec![0; output_len.div_ceil(lanes) * taps];
        for tap in 0..taps {
            let at = [tap / kernel[1], tap % kernel[1]];
            let [y, x] =
                [0, 1].map(|axis| at[axis] as isize * dilations[axis] as isize - pads[axis] as isize);
            offsets.push(y * input[1] as isize + x);
            let within = |axis: usize, shift: isize| {
                let end = (input[axis] as isize - shift).clamp(0, output[axis] as isize);
                (-shift).clamp(0, end) as usize..end as usize
            };
            let columns = within(1, x);
            for row in within(0, y) {
                let (mut place, end) = (row * output[1] + columns.start, row * output[1] + columns.end);
                while place < end {
                    let count = (lanes - place % lanes).min(end - place);
                    masks[place / lanes * taps + tap] |= (((1_u32 << count) - 1) << (place % lanes)) as u16;
                    place += count;
                }
            }
        }
        Some(FlatPlan { input_len: input[0] * input[1], output_len, lanes, offsets, masks })
    }

    /// Convolves one plane: `out[y][x] = epilogue(bias + sum of weights[ky][kx] * from[..])`.
    ///
    /// # Panics
    /// If a slice does not have the length that the window requires, or the plan is for another
    /// vector width.
    #[inline(always)]
    pub fn run<S: Simd, E: UnaryOp>(
        &self,
        s: S,
        from: &[f32],
        filter: Filter<'_>,
        epilogue: E,
        out: &mut [f32],
    ) {
        assert!(self.lanes == S::LANES, "the plan is for these vectors");
        assert!(from.len() == self.input_len && out.len() == self.output_len, "whole planes");
        assert!(filter.weights.len() == self.offsets.len(), "each tap has its weight");
        let vectors = self.output_len.div_ceil(S::LANES);
        let mut vector = 0;
        while vector < vectors {
            // SAFETY: the assertions above checked that the plane is the one that the masks are
            // for. The vectors begin inside the result.
            vector += unsafe {
                match vectors - vector {
                    1 => self.vectors::<S, E, 1>(s, vector, from, (filter, epilogue), out),
                    2 => self.vectors::<S, E, 2>(s, vector, from, (filter, epilogue), out),
                    3 => self.vectors::<S, E, 3>(s, vector, from, (filter, epilogue), out),
                    _ => self.vectors::<S, E, 4>(s, vector, from, (filter, epilogue), out),
                }
            };
        }
    }

    /// Computes `N` vectors of results from `vector` on. Returns `N`.
    ///
    /// # Safety
    /// `from` and `out` are whole planes, and the vectors begin inside `out`.
    #[inline(always)]
    unsafe fn vectors<S: Simd, E: UnaryOp, const N: usize>(
        &self,
        s: S,
        vector: usize,
        from: &[f32],
        (filter, epilogue): (Filter<'_>, E),
        out: &mut [f32],
    ) -> usize {
        let taps = self.offsets.len();
        let start = from.as_ptr().wrapping_add(vector * S::LANES);
        let masks = &self.masks[vector * taps..][..N * taps];
        let mut sums = [s.splat(filter.bias); N];
        for (tap, (offset, weight)) in self.offsets.iter().zip(filter.weights).enumerate() {
            let weight = s.splat(*weight);
            for (part, sum) in sums.iter_mut().enumerate() {
                let place = start.wrapping_offset(*offset).wrapping_add(part * S::LANES);
                // SAFETY: `FlatPlan::new` set only the mask lanes that are inside the plane.
                let x = unsafe { s.load_masked_ptr(place, s.mask_of_bits(masks[part * taps + tap])) };
                *sum = s.mul_add(x, weight, *sum);
            }
        }
        for (part, sum) in sums.into_iter().enumerate() {
            let at = (vector + part) * S::LANES;
            let value = epilogue.apply(s, sum);
            match out.len() - at {
                rest if rest < S::LANES => s.store_partial(out, at, rest, value),
                _ => s.store(out, at, value),
            }
        }
        N
    }
}
