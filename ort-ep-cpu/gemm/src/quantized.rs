//! GEMM on a quantized matrix: the right operand is read in place and dequantized panel by panel.
//!
//! Unlike the weights of [`blocks`](crate::blocks), the matrix is a plain one in either order, and
//! scales are those of `DequantizeLinear`. The panels hold what `DequantizeLinear` returns, and k
//! blocks are those of a float matrix. So the result has the bits of the float GEMM.

use std::ops::Range;

use super::GemmError;
use super::blocks::{AT_ONCE, Numbers, SIDE, TILE_STEPS, spread};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::quantized_rows::{LONGEST_ROW, QuantizedRows, QuantizedType, dequantize_rows};

/// The scales and zero points of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// The scales.
    pub scales: Numbers<'a>,
    /// The packed zero points, of the type of the quantized values; all are 0 if there are none.
    pub zeros: Option<&'a [u8]>,
    /// The k steps and the columns of a block, whose elements share a scale.
    pub block: [usize; 2],
    /// Scales from one block to the next, along k and along the columns.
    pub strides: [usize; 2],
}

/// A quantized matrix of k rows.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedMatrix<'a> {
    values: &'a [u8],
    dtype: QuantizedType,
    scales: Scales<'a>,
    /// Whether the k steps of a column are contiguous, rather than the columns of a k step.
    by_columns: bool,
    k: usize,
    columns: usize,
}

impl<'a> QuantizedMatrix<'a> {
    /// Creates a matrix of `shape` (k, columns) from packed values without gaps.
    ///
    /// # Errors
    ///
    /// If a slice is shorter than the shape requires.
    pub fn new(
        dtype: QuantizedType,
        [k, columns]: [usize; 2],
        values: &'a [u8],
        by_columns: bool,
        scales: Scales<'a>,
    ) -> Result<Self, GemmError> {
        let bits = k.checked_mul(columns).and_then(|count| count.checked_mul(dtype.bits));
        check("a quantized matrix", bits.map(|bits| bits.div_ceil(8)), values.len())?;
        if scales.block.contains(&0) {
            return Err(GemmError::Shape("a block of scales is empty"));
        }
        if k > 0 && columns > 0 {
            // The last scale decides. Sizes come from a model, so the arithmetic must not wrap.
            let along = |axis: usize, size: usize| {
                ((size - 1) / scales.block[axis]).checked_mul(scales.strides[axis])
            };
            let last = along(0, k).zip(along(1, columns)).and_then(|(x, y)| x.checked_add(y)?.checked_add(1));
            check("the scales of a matrix", last, scales.scales.len())?;
            if let Some(zeros) = scales.zeros {
                let bits = last.and_then(|last| last.checked_mul(dtype.bits));
                check("the zero points of a matrix", bits.map(|bits| bits.div_ceil(8)), zeros.len())?;
            }
        }
        Ok(QuantizedMatrix { values, dtype, scales, by_columns, k, columns })
    }

    /// Returns k and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.k, self.columns]
    }

    /// Dequantizes `steps` and `columns` (at most a panel's `width`) into a panel: k step by k
    /// step, with the columns contiguous. The panel's padding columns are left unchanged.
    pub(super) fn pack(
        &self,
        isa: Isa,
        steps: Range<usize>,
        columns: Range<usize>,
        to: &mut [f32],
        width: usize,
    ) {
        if self.by_columns {
            return self.pack_columns(isa, steps, columns, to, width);
        }
        let block = self.scales.block[0];
        // No kernel's panel is wider.
        let (mut scales, mut zeros) = ([0.0; LONGEST_ROW], [0.0; LONGEST_ROW]);
        let (scales, zeros) = (&mut scales[..columns.len()], &mut zeros[..columns.len()]);
        let mut step = steps.start;
        while step < steps.end {
            // The k steps of a block share the scales of a row.
            let end = (step / block + 1).saturating_mul(block).min(steps.end);
            self.parameters(isa, [step, columns.start], 1, scales, zeros);
            let rows = QuantizedRows {
                bytes: self.values,
                dtype: self.dtype,
                first: step * self.columns + columns.start,
                stride: self.columns,
                rows: end - step,
            };
            dequantize_rows(isa, rows, scales, zeros, &mut to[(step - steps.start) * width..], width);
            step = end;
        }
    }

    /// The same for a matrix whose columns are contiguous: some of them are dequantized to the
    /// stack, and transposed.
    fn pack_columns(
        &self,
        isa: Isa,
        steps: Range<usize>,
        columns: Range<usize>,
        to: &mut [f32],
        width: usize,
    ) {
        let (mut scales, mut zeros) = ([0.0; TILE_STEPS], [0.0; TILE_STEPS]);
        let mut weights = [0.0; SIDE * TILE_STEPS];
        for step in steps.clone().step_by(TILE_STEPS) {
            let count = TILE_STEPS.min(steps.end - step);
            let (scales, zeros) = (&mut scales[..count], &mut zeros[..count]);
            for first in columns.clone().step_by(SIDE) {
                let side = SIDE.min(columns.end - first);
                for (column, weights) in (first..first + side).zip(weights.chunks_mut(TILE_STEPS)) {
                    self.parameters(isa, [step, column], 0, scales, zeros);
                    let row = QuantizedRows {
                        bytes: self.values,
                        dtype: self.dtype,
                        first: column * self.k + step,
                        stride: 0,
                        rows: 1,
                    };
                    dequantize_rows(isa, row, scales, zeros, weights, TILE_STEPS);
                }
                let to = &mut to[(step - steps.start) * width + first - columns.start..];
                spread(isa, (side, count), &weights, to, width);
            }
        }
    }

    /// Reads scales and zero points from the element at `first` (k step, column) on, along k or
    /// along the columns.
    fn parameters(&self, isa: Isa, first: [usize; 2], along: usize, scales: &mut [f32], zeros: &mut [f32]) {
        let Scales { block, strides, .. } = self.scales;
        let other = 1 - along;
        let (base, start) = (first[other] / block[other] * strides[other], first[along]);
        let (size, stride) = (block[along], strides[along]);
        let place = |at: usize| base + (start + at) / size * stride;
        let count = scales.len();
        if count == 0 {
            return;
        }
        if place(0) == place(count - 1) {
            scales.fill(self.scales.scales.at(place(0)));
            zeros.fill(self.zero(place(0)));
            return;
        }
        if (size, stride) == (1, 1) && count <= AT_ONCE {
            self.scales.scales.read(isa, place(0), scales);
        } else {
            scales.iter_mut().enumerate().for_each(|(at, scale)| *scale = self.scales.scales.at(place(at)));
        }
        match self.scales.zeros {
            None => zeros.fill(0.0),
            Some(_) => zeros.iter_mut().enumerate().for_each(|(at, zero)| *zero = self.zero(place(at))),
        }
    }

    fn zero(&self, place: usize) -> f32 {
        self.scales.zeros.map_or(0.0, |zeros| self.dtype.read(zeros, place))
    }
}

fn check(what: &'static str, needed: Option<usize>, len: usize) -> Result<(), GemmError> {
    match needed {
        Some(needed) if needed <= len => Ok(()),
        _ => Err(GemmError::TooShort { what, needed: needed.unwrap_or(usize::MAX), len }),
    }
}
