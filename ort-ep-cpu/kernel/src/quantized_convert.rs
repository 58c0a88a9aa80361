//! Conversion of quantized values of any narrow type to `float`, and back.

use std::borrow::Cow;

use ort_core::dtype::{CastOptions, DType, convert};
use ort_core::tensor::{TensorMut, TensorView};
use ort_core::{Result, error};

use ort_cpu_threads::interrupt::{PIECE, pieces_mut};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::convert::{f32_from_i8, f32_from_u8, i8_from_f32, u8_from_f32};
use ort_cpu_vector::simd::Isa;

/// Elements converted at a time, which fill whole bytes in every type.
pub const BLOCK: usize = 1024;

/// Converts the elements `first..first + to.len()` of a tensor's bytes to `float`. `first` is a
/// multiple of 8.
pub fn decode(dtype: DType, bytes: &[u8], first: usize, to: &mut [f32]) -> Result<()> {
    let no_bytes = || error!(Fail, "quantized values of type {} are not whole bytes", dtype.name());
    let start = dtype.byte_len(first).ok_or_else(no_bytes)?;
    let len = dtype.byte_len(to.len()).ok_or_else(no_bytes)?;
    let bytes = bytes.get(start..start + len).ok_or_else(no_bytes)?;
    match dtype {
        // Bytes are by far the most common, so they have SIMD loops; other types take the general
        // conversion.
        DType::U8 => f32_from_u8(Isa::current(), bytes, to),
        DType::I8 => f32_from_i8(Isa::current(), bytemuck::cast_slice(bytes), to),
        _ => {
            let count = to.len();
            let to = bytemuck::cast_slice_mut(to);
            convert(dtype, bytes, DType::F32, to, count, CastOptions::default())
                .map_err(|error| error!(Fail, "{error}"))?;
        }
    }
    Ok(())
}

/// Converts values to a narrow type. For integers, the values must be whole numbers in range.
pub fn encode(from: &[f32], saturate: bool, dtype: DType, bytes: &mut [u8]) -> Result<()> {
    match dtype {
        DType::U8 => u8_from_f32(Isa::current(), from, bytes),
        DType::I8 => i8_from_f32(Isa::current(), from, bytemuck::cast_slice_mut(bytes)),
        _ => {
            let options = CastOptions { saturate, ..CastOptions::default() };
            convert(DType::F32, bytemuck::cast_slice(from), dtype, bytes, from.len(), options)
                .map_err(|error| error!(Fail, "{error}"))?;
        }
    }
    Ok(())
}

/// Returns the least and the greatest value of an integer type; none for floats.
pub fn range(dtype: DType) -> Option<(f32, f32)> {
    let bits = dtype.bits().filter(|bits| *bits <= 16 && dtype.is_integer())?;
    let count = (1_u32 << bits) as f32;
    Some(if dtype.is_signed() { (-count / 2.0, count / 2.0 - 1.0) } else { (0.0, count - 1.0) })
}

/// Returns all elements of a tensor as `float`. They are copied only if they have another type.
pub fn read_floats<'a>(view: TensorView<'a>) -> Result<Cow<'a, [f32]>> {
    if view.dtype() == DType::F32 {
        return view.to_cow();
    }
    let (bytes, mut values) = (view.bytes()?, vec![0.0; view.element_count()]);
    for (piece, values) in pieces_mut(&mut values).enumerate() {
        decode(view.dtype(), bytes, piece * PIECE, values)?;
    }
    Ok(Cow::Owned(values))
}

/// Writes values to a quantized tensor, clamped to its range.
pub fn write_quantized(
    threads: usize,
    values: &mut [f32],
    saturate: bool,
    output: TensorMut<'_>,
) -> Result<()> {
    let dtype = output.dtype();
    if let Some((least, greatest)) = range(dtype) {
        for_each_chunk_mut(threads, values, BLOCK, |_, values| {
            // Floats saturate in `encode`, which knows whether to. The conversion to integers does
            // not clamp.
            values.iter_mut().for_each(|value| *value = value.clamp(least, greatest));
        });
    }
    let no_bytes = || error!(Fail, "quantized values of type {} are not whole bytes", dtype.name());
    // A piece fills whole bytes in every type, also in those of 2 and 4 bits.
    let piece = dtype.byte_len(PIECE).ok_or_else(no_bytes)?;
    let mut pieces = pieces_mut(values).zip(output.bytes_mut()?.chunks_mut(piece));
    pieces.try_for_each(|(values, bytes)| encode(values, saturate, dtype, bytes))
}
