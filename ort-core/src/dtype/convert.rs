//! Conversion between numeric element types with the semantics of the ONNX `Cast` operator.
//!
//! Values are converted in blocks through `f64` (exact for all floats) or `i64` (exact for all
//! integers), so each is rounded once. Where the specification leaves a result open, we follow
//! numpy and ONNX Runtime on x86. A float outside the range of 32-bit integers becomes the
//! smallest of them, and narrower integers take its low bits.

use bytemuck::AnyBitPattern;
use half::{bf16, f16};
use num_traits::AsPrimitive;

use super::minifloat::{Format, RoundMode, decode_scale, encode_scale};
use super::{DType, packed};

/// The attributes of `Cast` that control conversion to narrow floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CastOptions {
    /// Whether out-of-range values become the largest finite one. Applies to float8 types only.
    pub saturate: bool,
    /// The rounding mode. Applies to `float8e8m0` only.
    pub round_mode: RoundMode,
}

impl Default for CastOptions {
    fn default() -> CastOptions {
        CastOptions { saturate: true, round_mode: RoundMode::Up }
    }
}

/// The reason why a buffer cannot be converted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// The types have no numeric conversion: strings (see [`super::text`]) and complex to real.
    #[error("{from} does not convert to {to}")]
    Unsupported {
        /// The source type.
        from: DType,
        /// The target type.
        to: DType,
    },
    /// A buffer's length does not match its elements.
    #[error("{elements} elements of {dtype} do not take {bytes} bytes")]
    Length {
        /// The element type of the buffer.
        dtype: DType,
        /// The expected number of elements.
        elements: usize,
        /// The length of the buffer.
        bytes: usize,
    },
    /// A string that is not a number of the type.
    #[error("`{text}` does not spell a number of type {to}")]
    Text {
        /// The string.
        text: String,
        /// The target type.
        to: DType,
    },
}

/// Elements per block. A multiple of 8, so that blocks of packed types start on a byte.
pub(super) const BLOCK: usize = 256;

/// Converts `elements` elements of type `from` in `src` to type `to` in `dst`.
///
/// Both buffers contain exactly the elements, in little-endian order and at any alignment.
///
/// # Errors
/// A buffer of another length, strings, and complex to real.
///
/// ```
/// use ort_core::dtype::{CastOptions, DType, convert};
/// let mut bytes = [0; 3];
/// let floats: Vec<u8> = [1.9_f32, -1.0, 300.0].iter().flat_map(|x| x.to_le_bytes()).collect();
/// convert(DType::F32, &floats, DType::U8, &mut bytes, 3, CastOptions::default())?;
/// assert_eq!(bytes, [1, 255, 44]);
/// # Ok::<(), ort_core::dtype::ConvertError>(())
/// ```
pub fn convert(
    from: DType,
    src: &[u8],
    to: DType,
    dst: &mut [u8],
    elements: usize,
    options: CastOptions,
) -> Result<(), ConvertError> {
    // Every loop below zips blocks and stops at the shorter buffer, so a wrong length must fail
    // here.
    for (dtype, bytes) in [(from, src.len()), (to, dst.len())] {
        match dtype.byte_len(elements) {
            Some(expected) if expected == bytes => {}
            None if dtype == DType::String => return Err(ConvertError::Unsupported { from, to }),
            _ => return Err(ConvertError::Length { dtype, elements, bytes }),
        }
    }
    if from == to {
        dst.copy_from_slice(src);
        return Ok(());
    }
    match (from, to) {
        (DType::C64 | DType::C128, _) if !to.is_complex() => Err(ConvertError::Unsupported { from, to }),
        // `to` is the other complex type. The product cannot overflow: `byte_len` counted more
        // bytes than that.
        (DType::C64, _) => convert(DType::F32, src, DType::F64, dst, elements * 2, options),
        (DType::C128, _) => convert(DType::F64, src, DType::F32, dst, elements * 2, options),
        (_, DType::C64 | DType::C128) => real_to_complex(from, src, to, dst, elements),
        // These pairs skip the round trip through `f64`.
        (DType::F16, DType::F32) => map::<f16, f32>(src, dst, f16::to_f32),
        (DType::BF16, DType::F32) => map::<bf16, f32>(src, dst, bf16::to_f32),
        (DType::F32, DType::F16) => map::<f32, f16>(src, dst, f16::from_f32),
        (DType::F32, DType::BF16) => map::<f32, bf16>(src, dst, bf16::from_f32),
        _ => {
            by_blocks(from, src, to, dst, elements, options);
            Ok(())
        }
    }
}

fn map<S: AnyBitPattern, D: bytemuck::NoUninit>(
    src: &[u8],
    dst: &mut [u8],
    function: impl Fn(S) -> D,
) -> Result<(), ConvertError> {
    for (from, to) in src.chunks_exact(size_of::<S>()).zip(dst.chunks_exact_mut(size_of::<D>())) {
        to.copy_from_slice(bytemuck::bytes_of(&function(bytemuck::pod_read_unaligned(from))));
    }
    Ok(())
}

/// Returns the first `count` elements of a block, or all if it has fewer.
pub(super) fn first_of<T>(block: &mut [T], count: usize) -> &mut [T] {
    let count = count.min(block.len());
    block.split_at_mut(count).0
}

fn by_blocks(from: DType, src: &[u8], to: DType, dst: &mut [u8], elements: usize, options: CastOptions) {
    // `convert` checked the lengths, and neither type is a string, so `byte_len` cannot fail here.
    let block_bytes = |dtype: DType| dtype.byte_len(BLOCK).unwrap_or(BLOCK);
    let (mut floats, mut integers) = ([0.0; BLOCK], [0; BLOCK]);
    let blocks = src.chunks(block_bytes(from)).zip(dst.chunks_mut(block_bytes(to)));
    for (index, (src, dst)) in blocks.enumerate() {
        let count = elements.saturating_sub(index * BLOCK).min(BLOCK);
        let (floats, block) = (first_of(&mut floats, count), first_of(&mut integers, count));
        if from.is_float() {
            read_floats(from, src, floats);
            write_floats(to, floats, dst, options);
        } else {
            read_integers(from, src, block);
            if to.is_float() {
                for (float, integer) in floats.iter_mut().zip(block.iter()) {
                    // A uint64 is read as the `i64` of equal bits. Only conversions to floats tell
                    // the two apart.
                    *float = match (from, to) {
                        (DType::U64, DType::F64) => *integer as u64 as f64,
                        (_, DType::F64) => *integer as f64,
                        (DType::U64, _) => sticky_double(*integer as u64),
                        _ => sticky_double(integer.unsigned_abs()).copysign(*integer as f64),
                    };
                }
                write_floats(to, floats, dst, options);
            } else {
                write_integers(to, block, dst);
            }
        }
    }
}

/// Converts an integer to a double whose rounding to a narrower float equals one direct rounding.
fn sticky_double(integer: u64) -> f64 {
    // The bits that may not fit a double, whose significand has 53. The lowest bit that is kept
    // tells whether they were all 0, which is all that a later rounding needs to know of them.
    const LOST: u64 = (1 << 11) - 1;
    let sticky = u64::from(integer & LOST != 0) << 11;
    (if integer >> 53 == 0 { integer } else { (integer & !LOST) | sticky }) as f64
}

fn read<S: AnyBitPattern + AsPrimitive<D>, D: Copy + 'static>(src: &[u8], block: &mut [D]) {
    for (value, bytes) in block.iter_mut().zip(src.chunks_exact(size_of::<S>())) {
        *value = bytemuck::pod_read_unaligned::<S>(bytes).as_();
    }
}

pub(super) fn read_floats(from: DType, src: &[u8], block: &mut [f64]) {
    match from {
        DType::F32 => read::<f32, f64>(src, block),
        DType::F64 => read::<f64, f64>(src, block),
        DType::F16 => read::<f16, f64>(src, block),
        DType::BF16 => read::<bf16, f64>(src, block),
        _ => {
            let mut codes = [0; BLOCK];
            packed::unpack_any(from, src, &mut codes);
            let format = Format::of(from);
            for (value, code) in block.iter_mut().zip(codes) {
                *value = format.map_or_else(|| decode_scale(code), |format| format.decode(code)).into();
            }
        }
    }
}

pub(super) fn read_integers(from: DType, src: &[u8], block: &mut [i64]) {
    match from {
        DType::U8 => read::<u8, i64>(src, block),
        DType::I8 => read::<i8, i64>(src, block),
        DType::U16 => read::<u16, i64>(src, block),
        DType::I16 => read::<i16, i64>(src, block),
        DType::U32 => read::<u32, i64>(src, block),
        DType::I32 => read::<i32, i64>(src, block),
        DType::U64 => read::<u64, i64>(src, block),
        DType::I64 => read::<i64, i64>(src, block),
        // Any byte but 0 is true, because bytes from a file need not be 0 or 1.
        DType::Bool => block.iter_mut().zip(src).for_each(|(value, byte)| *value = i64::from(*byte != 0)),
        _ => {
            let mut codes = [0; BLOCK];
            packed::unpack_any(from, src, &mut codes);
            let bits = from.bits().unwrap_or(8).min(8);
            for (value, code) in block.iter_mut().zip(codes) {
                *value = if from.is_signed() { packed::sign_extend(code, bits).into() } else { code.into() };
            }
        }
    }
}

fn write<V: Copy, D: bytemuck::NoUninit>(block: &[V], dst: &mut [u8], function: impl Fn(V) -> D) {
    for (value, bytes) in block.iter().zip(dst.chunks_exact_mut(size_of::<D>())) {
        bytes.copy_from_slice(bytemuck::bytes_of(&function(*value)));
    }
}

fn write_codes<V: Copy>(to: DType, block: &[V], dst: &mut [u8], function: impl Fn(V) -> u8) {
    let mut codes = [0; BLOCK];
    for (code, value) in codes.iter_mut().zip(block) {
        *code = function(*value);
    }
    let count = block.len().min(BLOCK);
    packed::pack(first_of(&mut codes, count), to.bits().unwrap_or(8).min(8), dst);
}

pub(super) fn write_floats(to: DType, block: &[f64], dst: &mut [u8], options: CastOptions) {
    match to {
        DType::F32 => write(block, dst, |x| x as f32),
        DType::F64 => write(block, dst, |x| x),
        // A plain cast to `f32` would round twice.
        DType::F16 => write(block, dst, |x| f16::from_f32(round_to_odd(x))),
        DType::BF16 => write(block, dst, |x| bf16::from_f32(round_to_odd(x))),
        DType::Bool => write(block, dst, |x| u8::from(x != 0.0)),
        // 32-bit conversion, whose low bits are the result, is what x86 compilers emit for narrow
        // integers.
        DType::U8 => write(block, dst, |x| truncate_32(x) as u8),
        DType::I8 => write(block, dst, |x| truncate_32(x) as i8),
        DType::U16 => write(block, dst, |x| truncate_32(x) as u16),
        DType::I16 => write(block, dst, |x| truncate_32(x) as i16),
        DType::I32 => write(block, dst, truncate_32),
        // x86 before AVX-512 converts to 64 bits and keeps the low half.
        DType::U32 => write(block, dst, |x| truncate_64(x) as u32),
        DType::I64 => write(block, dst, truncate_64),
        DType::U64 => write(block, dst, truncate_unsigned_64),
        DType::F8E8M0 => {
            write(block, dst, |x| encode_scale(x, options.saturate, options.round_mode));
        }
        _ => match Format::of(to) {
            Some(format) => write_codes(to, block, dst, |x| format.encode(x, options.saturate)),
            None => write_codes(to, block, dst, |x| truncate_32(x) as u8),
        },
    }
}

pub(super) fn write_integers(to: DType, block: &[i64], dst: &mut [u8]) {
    match to {
        // `Cast` to bool tests for zero. Truncation would make 256 false.
        DType::Bool => write(block, dst, |x| u8::from(x != 0)),
        DType::U16 | DType::I16 => write(block, dst, |x| x as u16),
        DType::U32 | DType::I32 => write(block, dst, |x| x as u32),
        DType::U64 | DType::I64 => write(block, dst, |x| x),
        _ => write_codes(to, block, dst, |x| x as u8),
    }
}

/// Truncates towards zero. Out-of-range values become the smallest number, as in x86 conversion
/// instructions.
fn truncate_32(value: f64) -> i32 {
    // Truncated before the test: -2147483648.5 is in range.
    let whole = value.trunc();
    if (-2_147_483_648.0..2_147_483_648.0).contains(&whole) { whole as i32 } else { i32::MIN }
}

fn truncate_64(value: f64) -> i64 {
    const LIMIT: f64 = 9_223_372_036_854_775_808.0;
    // Doubles of this size have no fraction, so the bounds hold without truncation.
    if (-LIMIT..LIMIT).contains(&value) { value as i64 } else { i64::MIN }
}

fn truncate_unsigned_64(value: f64) -> u64 {
    const LIMIT: f64 = 9_223_372_036_854_775_808.0;
    // The x86 sequence before AVX-512: subtract 2^63, convert, flip the top bit. From 2^64 on the
    // result is 0.
    if value >= LIMIT { truncate_64(value - LIMIT) as u64 ^ (1 << 63) } else { truncate_64(value) as u64 }
}

/// Rounds to single precision so that a second rounding to a half-width float equals one direct
/// rounding: an inexact result gets an odd last bit (Boldo and Melquiond, "When double rounding is
/// odd", 2005).
fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    // A double that overflows here overflows both half-width types, so infinity is right.
    if back == value || !nearest.is_finite() || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    // `value` lies between `nearest` and a neighbour. Neighbours alternate, so that one has an odd
    // last bit.
    let bits = nearest.to_bits();
    match (back.abs() > value.abs(), nearest == 0.0) {
        (true, false) => f32::from_bits(bits - 1),
        _ => f32::from_bits(bits + 1),
    }
}

fn real_to_complex(
    from: DType,
    src: &[u8],
    to: DType,
    dst: &mut [u8],
    elements: usize,
) -> Result<(), ConvertError> {
    let part = if to == DType::C64 { DType::F32 } else { DType::F64 };
    let size = part.byte_size().unwrap_or(8);
    let mut real = vec![0; dst.len() / 2];
    convert(from, src, part, &mut real, elements, CastOptions::default())?;
    dst.fill(0);
    for (complex, real) in dst.chunks_exact_mut(size * 2).zip(real.chunks_exact(size)) {
        first_of(complex, size).copy_from_slice(real);
    }
    Ok(())
}
