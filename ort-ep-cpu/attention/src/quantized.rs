//! Quantized rows of a KV cache: symmetric, of 8 or 4 bits, with a scale for the tensor or for each
//! element of a head.

use ort_cpu_vector::simd::{Isa, Simd, SimdOp, dispatch};

/// The scales of a quantized cache.
#[derive(Debug, Clone, Copy)]
pub enum CacheScales<'a> {
    /// One for all elements.
    Tensor(f32),
    /// One for each element of each head, head by head.
    Channels(&'a [f32]),
}

/// How the elements of a cache are quantized.
#[derive(Debug, Clone, Copy)]
pub struct CacheCodec<'a> {
    /// Whether a byte holds two elements, the first in its low bits and both 8 above their value.
    /// Otherwise it holds one, in two's complement.
    pub is_packed: bool,
    /// The scales.
    pub scales: CacheScales<'a>,
}

impl<'a> CacheCodec<'a> {
    /// Returns the bytes of a row of `size` elements.
    pub fn row_bytes(&self, size: usize) -> usize {
        if self.is_packed { size.div_ceil(2) } else { size }
    }

    /// Returns the codec of one head's rows.
    pub fn of_head(&self, head: usize, size: usize) -> CacheCodec<'a> {
        let scales = match self.scales {
            // Without a scale for an element, its row ends early; `encode` and `decode` check that.
            CacheScales::Channels(all) => {
                CacheScales::Channels(all.get(head * size..).and_then(|rest| rest.get(..size)).unwrap_or(&[]))
            }
            single => single,
        };
        CacheCodec { scales, ..*self }
    }

    /// Quantizes a row, to nearest even. A scale of 0 counts as 1, as in ONNX Runtime.
    ///
    /// # Panics
    ///
    /// If `to` is not as long as the row, or there is no scale for each element.
    pub fn encode(&self, isa: Isa, from: &[f32], to: &mut [u8]) {
        self.check(from.len(), to.len());
        dispatch(isa, Encode { codec: self, from, to });
    }

    /// Dequantizes a row.
    ///
    /// # Panics
    ///
    /// If `from` is not as long as the row, or there is no scale for each element.
    pub fn decode(&self, isa: Isa, from: &[u8], to: &mut [f32]) {
        self.check(to.len(), from.len());
        dispatch(isa, Decode { codec: self, from, to });
    }

    fn check(&self, size: usize, bytes: usize) {
        assert_eq!(bytes, self.row_bytes(size), "a row fills its bytes");
        if let CacheScales::Channels(scales) = self.scales {
            assert_eq!(scales.len(), size, "each element of a row has a scale");
        }
    }
}

struct Decode<'a> {
    codec: &'a CacheCodec<'a>,
    from: &'a [u8],
    to: &'a mut [f32],
}

impl SimdOp for Decode<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Decode { codec, from, to } = self;
        if codec.is_packed {
            for (to, byte) in to.chunks_mut(2).zip(from) {
                for (place, to) in to.iter_mut().enumerate() {
                    *to = f32::from((byte >> (4 * place) & 15) as i8 - 8);
                }
            }
        } else {
            for (to, byte) in to.iter_mut().zip(from) {
                *to = f32::from(*byte as i8);
            }
        }
        match codec.scales {
            CacheScales::Tensor(scale) => to.iter_mut().for_each(|to| *to *= scale),
            CacheScales::Channels(scales) => to.iter_mut().zip(scales).for_each(|(to, scale)| *to *= scale),
        }
    }
}

struct Encode<'a> {
    codec: &'a CacheCodec<'a>,
    from: &'a [f32],
    to: &'a mut [u8],
}

impl Encode<'_> {
    /// The quantized value of an element, between the bounds of its bits.
    #[inline(always)]
    fn value(&self, index: usize, least: f32, most: f32) -> i8 {
        let scale = match self.codec.scales {
            CacheScales::Tensor(scale) => scale,
            CacheScales::Channels(scales) => scales[index],
        };
        let inverse = if scale == 0.0 { 1.0 } else { 1.0 / scale };
        // `as` maps NaN to 0.
        (self.from[index] * inverse).round_ties_even().clamp(least, most) as i8
    }
}

impl SimdOp for Encode<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for at in 0..self.to.len() {
            self.to[at] = match self.codec.is_packed {
                false => self.value(at, -128.0, 127.0) as u8,
                true => {
                    let first = self.value(2 * at, -8.0, 7.0) + 8;
                    // The unused half of a last byte decodes to a value that nothing reads.
                    let second = match 2 * at + 1 < self.from.len() {
                        true => self.value(2 * at + 1, -8.0, 7.0) + 8,
                        false => 8,
                    };
                    (first | second << 4) as u8
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes and values worked out by hand, on every instruction set: ties go to even, values out
    /// of range saturate, and an odd row ends in half a byte.
    #[test]
    fn rows_survive_what_their_bits_hold() {
        let from = [0.5, 1.5, -2.5, 100.0, -100.0, 3.0, f32::NAN];
        let cases: [(bool, CacheScales<'_>, &[u8], [f32; 7]); 3] = [
            (
                false,
                CacheScales::Tensor(0.5),
                &[1, 3, 0xfb, 127, 128, 6, 0],
                [0.5, 1.5, -2.5, 63.5, -64.0, 3.0, 0.0],
            ),
            (
                true,
                CacheScales::Tensor(1.0),
                &[0xa8, 0xf6, 0xb0, 0x88],
                [0.0, 2.0, -2.0, 7.0, -8.0, 3.0, 0.0],
            ),
            (
                true,
                CacheScales::Channels(&[0.5, 0.5, 0.5, 20.0, 20.0, 0.0, 1.0]),
                &[0xb9, 0xd3, 0xb3, 0x88],
                [0.5, 1.5, -2.5, 100.0, -100.0, 0.0, 0.0],
            ),
        ];
        for (is_packed, scales, bytes, values) in cases {
            let codec = CacheCodec { is_packed, scales };
            for isa in Isa::available() {
                let mut encoded = vec![0; codec.row_bytes(from.len())];
                codec.encode(isa, &from, &mut encoded);
                assert_eq!(encoded, bytes, "{codec:?} {}", isa.name());
                let mut decoded = [f32::NAN; 7];
                codec.decode(isa, &encoded, &mut decoded);
                assert_eq!(decoded, values, "{codec:?} {}", isa.name());
            }
        }
    }
}
