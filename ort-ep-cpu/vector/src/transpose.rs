//! Transposition and permutation of elements of 1, 2, 4, 8 or 16 bytes.
//!
//! A permutation is first normalized: axes of size 1 are removed, and axes that stay adjacent are
//! merged. If the last axis then stays last, runs are copied. Otherwise, matrices are transposed.

use crate::simd::{Isa, transpose_tiles};
use ort_cpu_threads::interrupt::{self, Pace, TASK_UNITS, spend};

/// A matrix whose rows are strided in the source and in the transposed destination.
pub struct Strided {
    /// Rows of the source.
    pub rows: usize,
    /// Columns of the source.
    pub columns: usize,
    /// Elements from one row of the source to the next.
    pub from_stride: usize,
    /// Elements from one row of the destination to the next.
    pub to_stride: usize,
}

/// Rows and columns that are transposed at a time, so that both sides stay in the L1 cache.
const BLOCK: usize = 32;
/// Columns of a band between two calls of [`spend`]; a multiple of the tile width.
const COLUMNS: usize = 1 << 12;

/// Computes `to[column][row] = from[row][column]` for a matrix of elements.
///
/// # Panics
/// If the lengths are not `rows * columns`.
///
/// ```
/// use ort_cpu_vector::{simd::Isa, transpose::transpose};
/// let mut result = [0; 6];
/// transpose(Isa::current(), (2, 3), &[1, 2, 3, 4, 5, 6], &mut result);
/// assert_eq!(result, [1, 4, 2, 5, 3, 6]);
/// ```
pub fn transpose<T: bytemuck::Pod>(isa: Isa, (rows, columns): (usize, usize), from: &[T], to: &mut [T]) {
    assert!(from.len() == rows * columns && to.len() == from.len(), "both sides hold the matrix");
    let matrix = Strided { rows, columns, from_stride: columns, to_stride: rows };
    strided(isa, &matrix, from, to);
}

/// Transposes a strided matrix. Elements of 4 bytes take the SIMD tiles, all others plain loops.
pub fn strided<T: bytemuck::Pod>(isa: Isa, matrix: &Strided, from: &[T], to: &mut [T]) {
    let Strided { rows, columns, from_stride, to_stride } = *matrix;
    if size_of::<T>() != 4 {
        return blocks(matrix, (0..rows, 0..columns), from, to);
    }
    let from4: &[[u8; 4]] = bytemuck::cast_slice(from);
    let to4: &mut [[u8; 4]] = bytemuck::cast_slice_mut(to);
    // Bands of rows keep the cache lines that are written in L1.
    let band = 4 * BLOCK;
    for row in (0..rows).step_by(band) {
        let count = band.min(rows - row);
        for first in (0..columns).step_by(COLUMNS) {
            let end = columns.min(first + COLUMNS);
            spend(count * (end - first));
            let (source, target) = (&from4[row * from_stride + first..], &mut to4[first * to_stride + row..]);
            let (done_rows, done_columns) =
                transpose_tiles(isa, [count, end - first], source, from_stride, target, to_stride);
            let done = first + done_columns;
            blocks(matrix, (row..row + count, done..end), from4, to4);
            blocks(matrix, (row + done_rows..row + count, first..done), from4, to4);
        }
    }
}

/// Transposes a part of a matrix, block by block.
fn blocks<T: Copy>(
    matrix: &Strided,
    (rows, columns): (std::ops::Range<usize>, std::ops::Range<usize>),
    from: &[T],
    to: &mut [T],
) {
    for row in rows.clone().step_by(BLOCK) {
        let rows = row..rows.end.min(row + BLOCK);
        for column in columns.clone().step_by(BLOCK) {
            spend(rows.len() * BLOCK);
            for column in column..columns.end.min(column + BLOCK) {
                let target = &mut to[column * matrix.to_stride + rows.start..][..rows.len()];
                let source =
                    from[rows.start * matrix.from_stride + column..].iter().step_by(matrix.from_stride);
                for (to, from) in target.iter_mut().zip(source) {
                    *to = *from;
                }
            }
        }
    }
}

/// A normalized permutation of axes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permutation {
    /// The sizes of the input's axes.
    sizes: Vec<usize>,
    /// The input axis of each output axis.
    axes: Vec<usize>,
}

impl Permutation {
    /// Creates the permutation whose output axis `i` is the input's axis `perm[i]`. None if `perm`
    /// is not a permutation of the axes of `shape`.
    pub fn new(shape: &[usize], perm: &[usize]) -> Option<Permutation> {
        let mut seen = vec![false; shape.len()];
        for axis in perm {
            if std::mem::replace(seen.get_mut(*axis)?, true) {
                return None;
            }
        }
        if perm.len() != shape.len() {
            return None;
        }
        // Runs of output axes that are adjacent in the input too, as (first axis, size).
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let mut previous = None;
        let kept: Vec<usize> = (0..shape.len()).filter(|axis| shape[*axis] != 1).collect();
        for axis in perm.iter().copied().filter(|axis| shape[*axis] != 1) {
            let rank = kept.partition_point(|other| *other < axis);
            match runs.last_mut() {
                Some((_, size)) if previous == rank.checked_sub(1) => *size *= shape[axis],
                _ => runs.push((rank, shape[axis])),
            }
            previous = Some(rank);
        }
        let mut order: Vec<usize> = (0..runs.len()).collect();
        order.sort_unstable_by_key(|run| runs[*run].0);
        let sizes = order.iter().map(|run| runs[*run].1).collect();
        let mut axes = vec![0; runs.len()];
        for (axis, run) in order.iter().enumerate() {
            axes[*run] = axis;
        }
        Some(Permutation { sizes, axes })
    }

    /// Returns whether elements keep their order, so that a copy or a view is enough.
    pub fn is_identity(&self) -> bool {
        self.axes.len() <= 1
    }

    /// Permutes elements of any plain type.
    ///
    /// # Panics
    /// If a slice does not hold as many elements as the shape.
    pub fn apply<T: bytemuck::Pod>(&self, isa: Isa, from: &[T], to: &mut [T]) {
        let count: usize = self.sizes.iter().product();
        assert!(from.len() == count && to.len() == count, "both sides hold the shape");
        if self.is_identity() || count == 0 {
            return interrupt::copy(from, to);
        }
        let rank = self.sizes.len();
        let mut from_strides = vec![1; rank];
        for axis in (0..rank - 1).rev() {
            from_strides[axis] = from_strides[axis + 1] * self.sizes[axis + 1];
        }
        // In output order: size, step in the input, step in the output.
        let mut loops: Vec<[usize; 3]> =
            self.axes.iter().map(|axis| [self.sizes[*axis], from_strides[*axis], 1]).collect();
        for axis in (0..rank - 1).rev() {
            loops[axis][2] = loops[axis + 1][2] * loops[axis + 1][0];
        }
        // The last axis stays last, so its runs are copied.
        if self.axes[rank - 1] == rank - 1 {
            let run = self.sizes[rank - 1];
            loops.pop();
            let pace = Pace::default();
            for_each_place(&loops, |at, place| {
                pace.step(1 + run.min(TASK_UNITS));
                interrupt::copy(&from[at..][..run], &mut to[place..][..run]);
            });
            return;
        }
        // The last axes of the output and of the input span matrices; the other axes enumerate
        // them.
        let last = loops.remove(rank - 1);
        let Some(inner) = loops.iter().position(|axis| axis[1] == 1 && axis[0] > 1) else { return };
        let inner = loops.remove(inner);
        let matrix = Strided { rows: last[0], columns: inner[0], from_stride: last[1], to_stride: inner[2] };
        for_each_place(&loops, |at, place| strided(isa, &matrix, &from[at..], &mut to[place..]));
    }

    /// Permutes elements given as bytes.
    ///
    /// # Panics
    /// If a slice does not hold as many elements as the shape, or `element_size` is not 1, 2, 4, 8
    /// or 16.
    pub fn apply_bytes(&self, isa: Isa, element_size: usize, from: &[u8], to: &mut [u8]) {
        // Byte arrays have no alignment, so these casts fail only on a wrong length.
        match element_size {
            1 => self.apply(isa, from, to),
            2 => self.apply::<[u8; 2]>(isa, bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)),
            4 => self.apply::<[u8; 4]>(isa, bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)),
            8 => self.apply::<[u8; 8]>(isa, bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)),
            _ => {
                assert_eq!(element_size, 16, "an element has 1, 2, 4, 8 or 16 bytes");
                self.apply::<[u8; 16]>(isa, bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
            }
        }
    }
}

/// Calls `work` with the input and output offset of each position, in output order.
fn for_each_place(loops: &[[usize; 3]], mut work: impl FnMut(usize, usize)) {
    let mut position = vec![0; loops.len()];
    let (mut at, mut place) = (0, 0);
    loop {
        work(at, place);
        let mut axis = loops.len();
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            let [size, from_step, to_step] = loops[axis];
            position[axis] += 1;
            at += from_step;
            place += to_step;
            if position[axis] < size {
                break;
            }
            position[axis] = 0;
            at -= size * from_step;
            place -= size * to_step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_all_small_sizes() {
        for isa in Isa::available() {
            for (rows, columns) in
                (0..40).flat_map(|r| (0..40).map(move |c| (r, c))).chain([(300, 70), (65, 1000)])
            {
                let from: Vec<u32> = (0..(rows * columns) as u32).collect();
                let wide: Vec<u64> = from.iter().map(|x| u64::from(*x)).collect();
                let (mut to, mut to_wide) = (vec![0; from.len()], vec![0; from.len()]);
                transpose(isa, (rows, columns), &from, &mut to);
                transpose(isa, (rows, columns), &wide, &mut to_wide);
                for place in 0..from.len() {
                    let (column, row) = (place / rows, place % rows);
                    assert_eq!(to[place], (row * columns + column) as u32, "{isa:?} {rows} {columns}");
                    assert_eq!(to_wide[place], (row * columns + column) as u64);
                }
            }
        }
    }

    fn permutations(rank: usize) -> Vec<Vec<usize>> {
        if rank == 0 {
            return vec![vec![]];
        }
        let shorter = permutations(rank - 1);
        let insert = |perm: &Vec<usize>, at: usize| {
            let mut perm = perm.clone();
            perm.insert(at, rank - 1);
            perm
        };
        shorter.iter().flat_map(|perm| (0..rank).map(move |at| insert(perm, at))).collect()
    }

    #[test]
    fn all_permutations_of_up_to_five_axes() {
        let shapes: [&[usize]; 8] =
            [&[], &[5], &[3, 4], &[2, 1, 9], &[17, 2, 9], &[2, 3, 20, 11], &[1, 2, 1, 3], &[2, 3, 1, 4, 5]];
        for isa in Isa::available() {
            for shape in shapes {
                for perm in permutations(shape.len()) {
                    let count: usize = shape.iter().product();
                    let from: Vec<u16> = (0..count as u16).collect();
                    let Some(permutation) = Permutation::new(shape, &perm) else { panic!("{perm:?}") };
                    let mut to = vec![0_u16; count];
                    permutation.apply(isa, &from, &mut to);
                    let single: Vec<f32> = from.iter().map(|x| f32::from(*x)).collect();
                    let mut to_bytes = vec![0_u8; count * 4];
                    permutation.apply_bytes(isa, 4, bytemuck::cast_slice(&single), &mut to_bytes);
                    let mut place = vec![0; shape.len()];
                    for (flat, got) in to.iter().enumerate() {
                        let mut rest = flat;
                        for axis in (0..shape.len()).rev() {
                            place[perm[axis]] = rest % shape[perm[axis]];
                            rest /= shape[perm[axis]];
                        }
                        let want = place.iter().zip(shape).fold(0, |flat, (at, size)| flat * size + at);
                        assert_eq!(usize::from(*got), want, "{isa:?} {shape:?} {perm:?}");
                        let bytes: [u8; 4] = to_bytes[4 * flat..][..4].try_into().unwrap();
                        assert_eq!(f32::from_ne_bytes(bytes), want as f32);
                    }
                }
            }
        }
    }

    #[test]
    fn axes_that_stay_together_become_one() {
        type Case<'a> = [&'a [usize]; 4];
        let cases: [Case<'_>; 4] = [
            [&[2, 3, 4], &[0, 1, 2], &[24], &[0]],
            [&[2, 3, 4, 5], &[0, 2, 3, 1], &[2, 3, 20], &[0, 2, 1]],
            [&[7, 1, 5], &[2, 1, 0], &[7, 5], &[1, 0]],
            [&[1, 8, 1], &[2, 0, 1], &[8], &[0]],
        ];
        for [shape, perm, sizes, axes] in cases {
            let want = Permutation { sizes: sizes.to_vec(), axes: axes.to_vec() };
            assert_eq!(Permutation::new(shape, perm), Some(want));
        }
        for wrong in [&[0, 0][..], &[0], &[0, 2], &[0, 1, 2]] {
            assert_eq!(Permutation::new(&[2, 3], wrong), None);
        }
    }
}
