//! Rows of attention heads inside a tensor, at fixed strides.

use std::ops::Range;

use super::quantized::CacheCodec;
use half::{bf16, f16};
use ort_cpu_vector::convert::{f32_from_bf16, f32_from_f16};
use ort_cpu_vector::simd::Isa;

/// The elements of a tensor of heads: of the type that attention computes in, of half precision or
/// quantized.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a, T = f32> {
    /// The type that attention computes in.
    Full(&'a [T]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// bfloat16.
    BF16(&'a [bf16]),
    /// Bytes, whose count the strides of rows are in.
    Quantized(&'a [u8], CacheCodec<'a>),
}

impl<T> Elements<'_, T> {
    fn len(&self) -> usize {
        match self {
            Elements::Full(values) => values.len(),
            Elements::F16(values) => values.len(),
            Elements::BF16(values) => values.len(),
            Elements::Quantized(bytes, _) => bytes.len(),
        }
    }

    /// Whether rows are widened to the type that attention computes in.
    pub(crate) fn is_narrow(&self) -> bool {
        !matches!(self, Elements::Full(_))
    }

    /// Returns the length of a row of `size` elements in the slice.
    fn row_len(&self, size: usize) -> usize {
        match self {
            Elements::Quantized(_, codec) => codec.row_bytes(size),
            _ => size,
        }
    }
}

/// Rows of heads inside a slice, at fixed strides.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T = f32> {
    /// The slice.
    pub elements: Elements<'a, T>,
    /// Strides from one batch, head and row to the next.
    pub strides: [usize; 3],
}

/// Consecutive rows of one head in `f32`.
#[derive(Clone, Copy)]
pub(crate) struct Strip<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) stride: usize,
}

impl<'a, T> Rows<'a, T> {
    /// Whether `extents` (batches, heads, rows) of rows with `size` elements are inside the slice.
    pub(crate) fn holds(&self, extents: [usize; 3], size: usize) -> bool {
        if extents.contains(&0) || size == 0 {
            return true;
        }
        let along = |axis: usize| (extents[axis] - 1).checked_mul(self.strides[axis]);
        let last = (0..3).try_fold(self.elements.row_len(size), |sum, axis| sum.checked_add(along(axis)?));
        last.is_some_and(|end| end <= self.elements.len())
    }

    pub(crate) fn at(&self, [batch, head, row]: [usize; 3]) -> usize {
        batch * self.strides[0] + head * self.strides[1] + row * self.strides[2]
    }

    /// Returns the values from a row on. `None` if they are narrow.
    pub(crate) fn from(&self, place: [usize; 3]) -> Option<&'a [T]> {
        match self.elements {
            // Without rows, the place may be past the end.
            Elements::Full(values) => Some(&values[self.at(place).min(values.len())..]),
            _ => None,
        }
    }
}

impl<'a> Rows<'a> {
    /// Returns rows of a head: in place, or widened to `f32` in `scratch`.
    pub(crate) fn strip<'s>(
        &self,
        isa: Isa,
        place: [usize; 2],
        rows: Range<usize>,
        size: usize,
        scratch: &'s mut [f32],
    ) -> Strip<'s>
    where
        'a: 's,
    {
        let first = self.at([place[0], place[1], rows.start]);
        if let Elements::Full(values) = self.elements {
            return Strip { values: &values[first..], stride: self.strides[2] };
        }
        let len = self.elements.row_len(size);
        for (index, to) in scratch.chunks_exact_mut(size.max(1)).take(rows.len()).enumerate() {
            let range = first + index * self.strides[2]..first + index * self.strides[2] + len;
            match self.elements {
                Elements::Full(_) => {}
                Elements::F16(values) => f32_from_f16(isa, &values[range], to),
                Elements::BF16(values) => f32_from_bf16(isa, &values[range], to),
                Elements::Quantized(bytes, codec) => {
                    codec.of_head(place[1], size).decode(isa, &bytes[range], to);
                }
            }
        }
        Strip { values: scratch, stride: size }
    }
}
