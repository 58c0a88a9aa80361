//! Numbers as strings and back, for `Cast` from and to `string`.
//!
//! Floats are printed as ONNX Runtime prints them: eight significant digits in the shorter of plain
//! and scientific notation without trailing zeros (C's `%.8g`), `NaN`, `INF` and `-INF`.

use super::DType;
use super::convert::{
    BLOCK, CastOptions, ConvertError, first_of, read_floats, read_integers, write_floats, write_integers,
};

/// The strings for the elements of a numeric buffer.
///
/// # Errors
/// A buffer of the wrong length; strings and complex numbers.
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

/// The string for one float; see the module's description.
pub fn format_float(value: f64) -> String {
    const DIGITS: i32 = 8;
    if value.is_nan() {
        return "NaN".to_string();
    }
    if value.is_infinite() {
        return if value > 0.0 { "INF" } else { "-INF" }.to_string();
    }
    // The exponent is that of the rounded number: 9.99999999 has eight digits as 1e+01.
    let scientific = format!("{:.*e}", DIGITS as usize - 1, value);
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..DIGITS).contains(&exponent) {
        let plain = format!("{:.*}", (DIGITS - 1 - exponent) as usize, value);
        return without_trailing_zeros(&plain).to_string();
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{}e{sign}{:02}", without_trailing_zeros(mantissa), exponent.abs())
}

fn without_trailing_zeros(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}

/// Reads strings as numbers of a type into a buffer: plain and scientific notation, `INF`, `+INF`,
/// `-INF`, `NaN` in any capitals. Fractions are cut off for integer types, and integers wrap as in
/// a numeric cast.
///
/// # Errors
/// A string that spells no number, a buffer of the wrong length, strings and complex numbers as the
/// target.
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
        // Read at the precision asked for, so that the decimal is rounded once.
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
        return Ok(value as i64);
    }
    let value =
        parse_float(text, DType::F64).map_err(|_| ConvertError::Text { text: text.to_string(), to })?;
    if to == DType::Bool {
        return Ok(i64::from(value != 0.0));
    }
    let mut bytes = [0; 8];
    write_floats(DType::I64, &[value], &mut bytes, CastOptions::default());
    Ok(i64::from_le_bytes(bytes))
}
