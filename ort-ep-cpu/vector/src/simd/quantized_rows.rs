//! Dequantization of the rows of a matrix of quantized values, with a scale and a zero point for
//! each column.

use super::{Isa, MAX_LANES, Simd, SimdOp, dispatch};

/// The most columns that [`dequantize_rows`] takes, bounded by its stack buffer.
pub const LONGEST_ROW: usize = 128;

/// An integer type of 2, 4 or 8 bits. A byte holds `8 / bits` values, the first in its lowest bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizedType {
    /// Bits of a value: 2, 4 or 8.
    pub bits: usize,
    /// Whether values are in two's complement.
    pub signed: bool,
}

impl QuantizedType {
    /// Returns the value at `index` of packed values.
    ///
    /// # Panics
    /// If there is none.
    pub fn read(self, bytes: &[u8], index: usize) -> f32 {
        let half = self.half();
        let bits = (bytes[index * self.bits / 8] >> (index * self.bits % 8)) & self.mask();
        // Flipping the sign bit adds half of the range to two's complement.
        ((i32::from(bits) ^ half) - half) as f32
    }

    /// Half of the range of a signed type, which is its sign bit; 0 for an unsigned one.
    fn half(self) -> i32 {
        if self.signed { 1 << (self.bits - 1) } else { 0 }
    }

    fn mask(self) -> u8 {
        u8::MAX >> (8 - self.bits)
    }

    /// Copies the values from index `first` on, one to a byte.
    #[inline(always)]
    fn unpack(self, bytes: &[u8], first: usize, to: &mut [u8]) {
        let (places, mask) = (8 / self.bits, self.mask());
        if places == 1 {
            to.copy_from_slice(&bytes[first..first + to.len()]);
            return;
        }
        // The values of the first byte may begin inside it.
        let skipped = first % places;
        let (head, whole) = to.split_at_mut(((places - skipped) % places).min(to.len()));
        let mut bytes = &bytes[first / places..];
        if !head.is_empty() {
            for (place, value) in head.iter_mut().enumerate() {
                *value = (bytes[0] >> ((skipped + place) * self.bits)) & mask;
            }
            bytes = &bytes[1..];
        }
        match self.bits {
            4 => {
                let (pairs, last) = whole.as_chunks_mut::<2>();
                for (pair, byte) in pairs.iter_mut().zip(bytes) {
                    *pair = [byte & 15, byte >> 4];
                }
                if let [value] = last {
                    *value = bytes[pairs.len()] & 15;
                }
            }
            _ => {
                for (values, byte) in whole.chunks_mut(places).zip(bytes) {
                    for (place, value) in values.iter_mut().enumerate() {
                        *value = (byte >> (place * self.bits)) & mask;
                    }
                }
            }
        }
    }
}

/// Rows of a matrix of packed values.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedRows<'a> {
    /// The packed values of the whole matrix.
    pub bytes: &'a [u8],
    /// Their type.
    pub dtype: QuantizedType,
    /// The index of the first value.
    pub first: usize,
    /// Values from one row to the next.
    pub stride: usize,
    /// The number of rows.
    pub rows: usize,
}

/// Dequantizes rows: `to[row * to_stride + column] = (value - zeros[column]) * scales[column]`, in
/// two roundings as `DequantizeLinear` does.
///
/// # Panics
/// If there are more than [`LONGEST_ROW`] scales, not as many zero points, or a slice is too short.
pub fn dequantize_rows(
    isa: Isa,
    from: QuantizedRows<'_>,
    scales: &[f32],
    zeros: &[f32],
    to: &mut [f32],
    to_stride: usize,
) {
    let columns = scales.len();
    assert!(columns <= LONGEST_ROW && zeros.len() == columns, "each column has a scale and a zero point");
    if from.rows == 0 || columns == 0 {
        return;
    }
    assert!((from.rows - 1) * to_stride + columns <= to.len(), "the target holds the rows");
    let values = from.first + (from.rows - 1) * from.stride + columns;
    assert!((values * from.dtype.bits).div_ceil(8) <= from.bytes.len(), "the source holds the rows");
    dispatch(isa, Dequantize { from, scales, zeros, to, to_stride });
}

/// Rows to dequantize. `dequantize_rows` checked the lengths.
struct Dequantize<'a> {
    from: QuantizedRows<'a>,
    scales: &'a [f32],
    zeros: &'a [f32],
    to: &'a mut [f32],
    to_stride: usize,
}

impl SimdOp for Dequantize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Dequantize { from: QuantizedRows { bytes, dtype, first, stride, rows }, .. } = self;
        let columns = self.scales.len();
        let half = s.splat_i32(dtype.half());
        // The last vector of a row reads beyond its values.
        let mut unpacked = [0; LONGEST_ROW + MAX_LANES];
        for row in 0..rows {
            dtype.unpack(bytes, first + row * stride, &mut unpacked[..columns]);
            let to = &mut self.to[row * self.to_stride..][..columns];
            for at in (0..columns).step_by(S::LANES) {
                let count = S::LANES.min(columns - at);
                // SAFETY: the buffer has a vector more than the longest row, and `at` is inside
                // the row. Of scales, zero points and results, only `count` values are accessed,
                // which `dequantize_rows` checked to be there.
                unsafe {
                    let value = s.load_u8_ptr(unpacked.as_ptr().add(at));
                    let value = s.to_f32(s.sub_i32(s.xor_i32(value, half), half));
                    let (scales, zeros) = (self.scales.as_ptr().add(at), self.zeros.as_ptr().add(at));
                    let to = to.as_mut_ptr().add(at);
                    if count == S::LANES {
                        let value = s.mul(s.sub(value, s.load_ptr(zeros)), s.load_ptr(scales));
                        s.store_ptr(to, value);
                    } else {
                        let zero = s.load_partial_ptr(zeros, count, 0.0);
                        let scale = s.load_partial_ptr(scales, count, 0.0);
                        s.store_partial_ptr(to, count, s.mul(s.sub(value, zero), scale));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every type, instruction set and place in a byte, against one value at a time.
    #[test]
    fn rows_are_dequantized_value_by_value() {
        for (bits, signed) in [2, 4, 8].into_iter().flat_map(|bits| [(bits, false), (bits, true)]) {
            let dtype = QuantizedType { bits, signed };
            let bytes: Vec<u8> = (0..512).map(|at| (at * 37 + at / 7) as u8).collect();
            for (first, stride, rows, columns) in
                [(0, 8, 3, 8), (3, 37, 4, 37), (5, 61, 2, 7), (1, 130, 2, 128), (2, 1, 3, 1), (0, 0, 1, 48)]
            {
                let scales: Vec<f32> = (0..columns).map(|at| 0.25 + at as f32 / 8.0).collect();
                let zeros: Vec<f32> = (0..columns).map(|at| (at % 4) as f32 - 1.0).collect();
                for isa in Isa::available() {
                    let mut to = vec![-7.0; rows * (columns + 3)];
                    let from = QuantizedRows { bytes: &bytes, dtype, first, stride, rows };
                    dequantize_rows(isa, from, &scales, &zeros, &mut to, columns + 3);
                    for (row, to) in to.chunks(columns + 3).enumerate() {
                        for (column, value) in to.iter().enumerate() {
                            let expected = match column < columns {
                                true => {
                                    let index = first + row * stride + column;
                                    let code = i32::from(bytes[index * bits / 8]) >> (index * bits % 8);
                                    let code = code & ((1 << bits) - 1);
                                    let is_negative = signed && code >= 1 << (bits - 1);
                                    let code = if is_negative { code - (1 << bits) } else { code };
                                    (code as f32 - zeros[column]) * scales[column]
                                }
                                false => -7.0,
                            };
                            assert_eq!(*value, expected, "{dtype:?} {first} {row} {column} {}", isa.name());
                        }
                    }
                }
            }
        }
    }
}
