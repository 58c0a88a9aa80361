//! What blocks stand for, and the data of their tests.

use ort_core::Result;

use crate::columns::Matrix;
use crate::feedback::Curvature;
use crate::grid::{Bits, BlockLayout, BlockMethod, BlockQuantizer, QuantizedBlocks, Scheme};
use crate::weight::Weight;

/// What NumPy makes of the same data.
pub(crate) const REFERENCE: &str = include_str!("../tests/data/blocks.json");

pub(crate) const METHODS: [(&str, BlockMethod); 4] = [
    ("rtn", BlockMethod::MinMax),
    ("mse", BlockMethod::SquaredError),
    ("k-quant", BlockMethod::KQuant),
    ("hqq", BlockMethod::HalfQuadratic),
];

pub(crate) fn bits_of(count: u64) -> Bits {
    match count {
        2 => Bits::Two,
        3 => Bits::Three,
        4 => Bits::Four,
        _ => Bits::Eight,
    }
}

/// Blocks with zero points.
pub(crate) fn scheme((k, n, block_size): (usize, usize, usize), bits: Bits, method: BlockMethod) -> Scheme {
    let layout = BlockLayout::MatMulNBits;
    let blocks = BlockQuantizer { k, n, block_size, bits, is_symmetric: false, layout };
    Scheme { blocks, method }
}

pub(crate) fn symmetric(scheme: Scheme) -> Scheme {
    Scheme { blocks: BlockQuantizer { is_symmetric: true, ..scheme.blocks }, ..scheme }
}

/// Random numbers from -0.5 to 0.5.
pub(crate) fn unit(step: usize) -> f32 {
    let mut hash = (step as u32).wrapping_mul(0x9e37_79b1);
    hash = (hash ^ hash >> 15).wrapping_mul(0x85eb_ca77);
    ((hash ^ hash >> 13) >> 8) as f32 / 16_777_216.0 - 0.5
}

/// Few large values, as trained weights have.
pub(crate) fn weights(count: usize) -> Vec<f32> {
    (0..count).map(|step| unit(step) * unit(step) * unit(step)).collect()
}

/// Rows of which each channel is like the one before, and some are large.
pub(crate) fn inputs(rows: usize, channels: usize) -> Vec<f32> {
    let mut inputs = Vec::with_capacity(rows * channels);
    for row in 0..rows {
        let mut last = 0.0;
        for channel in 0..channels {
            last = 0.875 * last + unit(row * channels + channel + 31);
            inputs.push(if channel % 16 == 3 { 8.0 * last } else { last });
        }
    }
    inputs
}

/// The results of a quantization: codes, scales and zero points.
pub(crate) struct Results<T> {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<T>,
    pub(crate) zero_points: Vec<u8>,
}

pub(crate) fn results<T: Weight>(
    scheme: &Scheme,
    curvature: Curvature<'_>,
    weights: &[T],
) -> Result<Results<T>> {
    let sizes = scheme.sizes(size_of::<T>())?;
    let (mut codes, mut zero_points) = (vec![0; sizes.codes], vec![0; sizes.zero_points]);
    let mut scales = vec![T::narrow(0.0); sizes.scales];
    let out = QuantizedBlocks { codes: &mut codes, scales: &mut scales, zero_points: &mut zero_points };
    scheme.quantize(curvature, &Matrix { elements: weights, is_transposed: false }, out)?;
    Ok(Results { codes, scales, zero_points })
}

/// What the codes of a matrix stand for.
pub(crate) fn decoded<T: Weight>(
    scheme: &Scheme,
    curvature: Curvature<'_>,
    weights: &[T],
) -> Result<Vec<f32>> {
    let BlockQuantizer { k, n, block_size, bits, is_symmetric, .. } = scheme.blocks;
    let Results { codes, scales, zero_points } = results(scheme, curvature, weights)?;
    let blocks = k.div_ceil(block_size);
    let code = |bytes: &[u8], place: usize| {
        let shift = place % bits.per_byte() * bits.stored();
        f32::from(bytes[place / bits.per_byte()] >> shift & bits.largest())
    };
    let value = |place: usize| {
        let (row, column) = (place / n, place % n);
        let block = row / block_size;
        let mut zero = [f32::from(bits.middle())];
        if scheme.has_float_points() {
            let bytes = zero_points.chunks(size_of::<T>()).nth(column * blocks + block);
            T::widen_bytes(bytes.unwrap(), &mut zero);
        } else if !is_symmetric {
            zero = [code(&zero_points[column * blocks.div_ceil(bits.per_byte())..], block)];
        }
        let scale = scales[column * blocks + block].wide();
        let code = code(&codes[column * blocks * block_size / bits.per_byte()..], row);
        (code - zero[0]) * scale
    };
    Ok((0..k * n).map(value).collect())
}
