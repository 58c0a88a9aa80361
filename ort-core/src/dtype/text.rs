//! Number formatting and parsing, for `Cast` to and from `string`.
//!
//! Floats print as in ONNX Runtime: eight significant digits, the shorter of plain and scientific
//! notation, no trailing zeros (C's `%.8g`); `NaN`, `INF` and `-INF`.

use super::DType;
use super::convert::{
    BLOCK, CastOptions, ConvertError, first_of, read_floats, read_integers, write_floats, write_integers,
};

/// Formats the elements of a numeric buffer as strings.
///
/// # Errors
/// The buffer length is wrong, or the type is string or complex.
pub fn format_elements(from: DType, src: &[u8], elements: usize) -> Result<Vec<String>, ConvertError> {
    let length_error = || ConvertError::Length { dtype: from, elements, bytes: src.len() };
    if from == DType::String || from.is_complex() {
        return Err(ConvertError::Unsupported { from, to: DType::String });
    }
    if from.byte_len(elements) != Some(src.len()) {
        return Err(length_error());
    }
    let block_bytes = from.byte_len(BLOCK).ok_or_else(length_error)?;
    let mut strings = Vec::with_capacity(elements);
    for (index, src) in src.chunks(block_bytes).enumerate() {
        let count = elements.saturating_sub(index * BLOCK).min(BLOCK);
        if from.is_float() {
            let mut block = [0.0; BLOCK];
            let block = first_of(&mut block, count);
            read_floats(from, src, block);
            strings.extend(block.iter().map(|value| format_float(*value)));
        } else {
            let mut block = [0; BLOCK];
            let block = first_of(&mut block, count);
            read_integers(from, src, block);
            strings.extend(block.iter().map(|value| match from {
                DType::U64 => (*value as u64).to_string(),
                _ => value.to_string(),
            }));
        }
    }
    Ok(strings)
}

/// Formats one float as described in the module documentation.
pub fn format_float(value: f64) -> String {
    const DIGITS: i32 = 8;
    if value.is_nan() {
        return "NaN".to_string();
    }
    if value.is_infinite() {
        return if value > 0.0 { "INF" } else { "-INF" }.to_string();
    }
    // Format first to get the exponent after rounding: 9.99999999 prints as 10, not 9.9999999.
    let scientific = format!("{:.*e}", DIGITS as usize - 1, value);
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    // C's rule for `%g`: scientific if the exponent is less than -4 or not less than the precision.
    if (-4..DIGITS).contains(&exponent) {
        let plain = format!("{:.*}", (DIGITS - 1 - exponent) as usize, value);
        return without_trailing_zeros(&plain).to_string();
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    // C prints an exponent of at least two digits.
    format!("{}e{sign}{:02}", without_trailing_zeros(mantissa), exponent.abs())
}

fn without_trailing_zeros(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}

/// Parses strings as numbers of a type into a buffer. Accepts plain and scientific notation, `INF`,
/// `+INF`, `-INF` and `NaN` in any case. Integer types truncate fractions and wrap like a numeric
/// cast.
///
/// # Errors
/// A string is not a number, the buffer length is wrong, or the target is string or complex.
pub fn parse_elements<S: AsRef<str>>(
    strings: &[S],
    to: DType,
    dst: &mut [u8],
    options: CastOptions,
) -> Result<(), ConvertError> {
    let length_error = ConvertError::Length { dtype: to, elements: strings.len(), bytes: dst.len() };
    if to == DType::String || to.is_complex() {
        return Err(ConvertError::Unsupported { from: DType::String, to });
    }
    let (Some(expected), Some(block_bytes)) = (to.byte_len(strings.len()), to.byte_len(BLOCK)) else {
        return Err(length_error);
    };
    if expected != dst.len() {
        return Err(length_error);
    }
    for (strings, dst) in strings.chunks(BLOCK).zip(dst.chunks_mut(block_bytes)) {
        if to.is_float() {
            let mut block = [0.0; BLOCK];
            for (value, text) in block.iter_mut().zip(strings) {
                *value = parse_float(text.as_ref(), to)?;
            }
            write_floats(to, first_of(&mut block, strings.len()), dst, options);
        } else {
            let mut block = [0; BLOCK];
            for (value, text) in block.iter_mut().zip(strings) {
                *value = parse_integer(text.as_ref(), to)?;
            }
            write_integers(to, first_of(&mut block, strings.len()), dst);
        }
    }
    Ok(())
}

fn parse_float(text: &str, to: DType) -> Result<f64, ConvertError> {
    let trimmed = text.trim();
    let value = match to {
        // Parse at the target precision, so that the decimal is rounded only once.
        DType::F32 => trimmed.parse::<f32>().map(f64::from),
        _ => trimmed.parse::<f64>(),
    };
    value.map_err(|_| ConvertError::Text { text: text.to_string(), to })
}

fn parse_integer(text: &str, to: DType) -> Result<i64, ConvertError> {
    let trimmed = text.trim();
    if let Ok(value) = trimmed.parse::<i64>() {
        return Ok(value);
    }
    if let Ok(value) = trimmed.parse::<u64>() {
        // Blocks of integers carry a uint64 as the `i64` of equal bits.
        return Ok(value as i64);
    }
    // Not an integer literal: convert it like a numeric cast from double.
    let value =
        parse_float(text, DType::F64).map_err(|_| ConvertError::Text { text: text.to_string(), to })?;
    // Truncation to an integer would make 0.5 false.
    if to == DType::Bool {
        return Ok(i64::from(value != 0.0));
    }
    // The narrower types take the low bits of an int64.
    let wide = if to == DType::U64 { DType::U64 } else { DType::I64 };
    let mut bytes = [0; 8];
    write_floats(wide, &[value], &mut bytes, CastOptions::default());
    Ok(i64::from_le_bytes(bytes))
}
