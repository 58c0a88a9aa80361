//! Depthwise convolution of a plane in place, without a padded copy: masked loads zero what is
//! outside the plane.

use super::slices::UnaryOp;
use super::stencil::{Filter, store_in_order};
use super::{MAX_LANES, Simd};
use crate::window::Window;

/// Output rows that share the loads of an input row.
const ROWS: usize = 4;

/// The largest kernel of [`square`].
const LARGEST: usize = 7;

/// The masks of the loads that make up the `LARGEST` shifted vectors of a row.
type Masks<S> = [<S as Simd>::Mask; LARGEST];

/// Convolves a plane with a `K` by `K` kernel, at strides of `STRIDE` (1 or 2) and without
/// dilation: `out[y][x] = epilogue(bias + sum of weights[ky][kx] * from[..])`.
///
/// # Panics
/// If a slice does not have the length that the window requires, or the window does not match `K`
/// and `STRIDE`.
#[inline(always)]
pub fn square<S: Simd, E: UnaryOp, const K: usize, const STRIDE: usize>(
    s: S,
    window: &Window,
    from: &[f32],
    filter: Filter<'_>,
    epilogue: E,
    out: &mut [f32],
) {
    const { assert!(K <= LARGEST && (STRIDE == 1 || STRIDE == 2)) };
    let Window { input, output, kernel, strides, dilations, .. } = *window;
    assert!(
        kernel == [K; 2] && strides == [STRIDE; 2] && dilations == [1; 2],
        "the window is a plain square"
    );
    assert!(from.len() == input[0] * input[1] && out.len() == output[0] * output[1], "whole planes");
    assert!(filter.weights.len() == K * K, "each tap has its weight");
    let mut weights = [[s.splat(0.0); K]; K];
    for (row, values) in weights.iter_mut().zip(filter.weights.chunks_exact(K)) {
        for (weight, value) in row.iter_mut().zip(values) {
            *weight = s.splat(*value);
        }
    }
    let rows = Rows::<S, K> { window, from: from.as_ptr(), weights, bias: s.splat(filter.bias) };
    // The last block is moved back and overlaps rows that are computed twice.
    let mut next = 0;
    while next < output[0] {
        // SAFETY: the assertions above checked the lengths of the plane and the result. The block's
        // rows are in the result.
        next += unsafe {
            match output[0] >= ROWS {
                true => rows.block::<E, STRIDE, ROWS>(s, next.min(output[0] - ROWS), epilogue, out),
                false => rows.block::<E, STRIDE, 1>(s, next, epilogue, out),
            }
        };
    }
}

/// State shared by the blocks of rows of a plane.
struct Rows<'a, S: Simd, const K: usize> {
    window: &'a Window,
    from: *const f32,
    weights: [[S::F32; K]; K],
    bias: S::F32,
}

impl<S: Simd, const K: usize> Rows<'_, S, K> {
    /// Writes `R` output rows from `row` on. Returns `R`.
    ///
    /// # Safety
    /// `from` and `out` are whole planes, and `out` holds the rows.
    #[inline(always)]
    unsafe fn block<E: UnaryOp, const STRIDE: usize, const R: usize>(
        &self,
        s: S,
        row: usize,
        epilogue: E,
        out: &mut [f32],
    ) -> usize {
        let Window { input: [_, columns], output: [_, width], pads: [_, left], .. } = *self.window;
        // The number of input columns that a vector of results reads.
        let span = S::LANES * STRIDE + (K - 1).next_multiple_of(STRIDE);
        let (to, len) = (out.as_mut_ptr(), out.len());
        let mut next = 0;
        while next < width {
            let at = if next + S::LANES > width { width.saturating_sub(S::LANES) } else { next };
            let first = (at * STRIDE).wrapping_sub(left) as isize;
            // SAFETY: the condition keeps unmasked loads inside the columns of a row; all other
            // loads are masked. The caller guarantees the rows.
            unsafe {
                let sums = if first >= 0 && first as usize + span <= columns {
                    self.sums::<STRIDE, R, false>(s, row, first)
                } else {
                    self.sums::<STRIDE, R, true>(s, row, first)
                };
                for (index, sum) in sums.into_iter().enumerate() {
                    let start = (row + index) * width + at;
                    store_in_order(s, to, len, start, width - at, epilogue.apply(s, sum));
                }
            }
            next += S::LANES;
        }
        R
    }

    /// Returns the sums of one vector in each of `R` rows from `row` on. Their windows begin in
    /// column `first`.
    ///
    /// # Safety
    /// `from` is a whole plane. Without masks, all columns that are read are inside it.
    #[inline(always)]
    unsafe fn sums<const STRIDE: usize, const R: usize, const MASKED: bool>(
        &self,
        s: S,
        row: usize,
        first: isize,
    ) -> [S::F32; R] {
        const { assert!((R - 1) * STRIDE + K <= 13, "all input rows are written out") };
        let Window { input: [height, columns], pads: [top, _], .. } = *self.window;
        let masks = match MASKED {
            true => masks::<S, K, STRIDE>(s, first, columns),
            false => [s.mask_of_bits(0); LARGEST],
        };
        let mut sums = [self.bias; R];
        // Unrolled by a macro, because the compiler does not unroll a loop of this size, and arrays
        // stay in registers only if all indices are constant.
        macro_rules! input_rows {
            ($($index:literal)+) => {
                $(if $index < (R - 1) * STRIDE + K {
                    let y = (row * STRIDE + $index).wrapping_sub(top);
                    if y < height {
                        let start = self.from.wrapping_add(y * columns).wrapping_offset(first);
                        // SAFETY: the row is inside the plane. Its columns are guaranteed by the
                        // caller, or masked.
                        unsafe {
                            let values = shifted::<S, K, STRIDE, MASKED>(s, Line { start, first, columns }, &masks);
                            self.add_input_row::<STRIDE, R>(s, &values, $index, &mut sums);
                        }
                    }
                })+
            };
        }
        input_rows!(0 1 2 3 4 5 6 7 8 9 10 11 12);
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
