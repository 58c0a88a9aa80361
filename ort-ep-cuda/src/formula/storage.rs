//! Loads, stores and conversions between stored elements and the arithmetic types of formulas.

use ort_core::dtype::DType;
use ort_core::{Result, error};

use super::number::Number;
use super::writer::Writer;

/// Returns the access type of load and store instructions, and the register class.
fn access(dtype: DType) -> Result<(&'static str, char)> {
    Ok(match dtype {
        DType::F32 => ("f32", 'f'),
        DType::F64 => ("f64", 'd'),
        DType::F16 | DType::BF16 => ("b16", 'h'),
        DType::I8 => ("s8", 'r'),
        DType::U8 | DType::Bool | DType::I4 | DType::U4 | DType::I2 | DType::U2 => ("u8", 'r'),
        DType::I16 => ("s16", 'r'),
        DType::U16 => ("u16", 'r'),
        DType::I32 | DType::U32 => ("u32", 'r'),
        DType::I64 | DType::U64 => ("u64", 'l'),
        other => return Err(error!(NotImplemented, "elements of the type {}", other.name())),
    })
}

/// Returns the bits of an element.
fn bits(dtype: DType) -> Result<u32> {
    let bits = dtype.bits();
    bits.ok_or_else(|| error!(NotImplemented, "elements of the type {}", dtype.name()))
}

/// Whether the type has vector accesses of four elements.
pub(crate) fn is_short_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Emits the address of an element of a tensor parameter.
pub(super) fn address(
    writer: &mut Writer,
    parameter: &str,
    dtype: DType,
    at: Option<&str>,
) -> Result<String> {
    let base = writer.emit('l', &format!("ld.param.u64 $, [{parameter}];"));
    let base = writer.emit('l', &format!("cvta.to.global.u64 $, {base};"));
    let Some(at) = at else { return Ok(base) };
    let bits = bits(dtype)?;
    // Elements below a byte are packed: address the byte that contains the element.
    if bits < 8 {
        let byte = writer.emit('r', &format!("shr.u32 $, {at}, {};", (8 / bits).ilog2()));
        return Ok(writer.emit('l', &format!("mad.wide.u32 $, {byte}, 1, {base};")));
    }
    Ok(writer.emit('l', &format!("mad.wide.u32 $, {at}, {}, {base};", bits / 8)))
}

/// Loads an element into its type's arithmetic type.
pub(super) fn load(writer: &mut Writer, dtype: DType, address: &str, at: Option<&str>) -> Result<String> {
    let (access, class) = access(dtype)?;
    let stored = writer.emit(class, &format!("ld.global.{access} $, [{address}];"));
    let bits = bits(dtype)?;
    if bits >= 8 {
        return Ok(extended(writer, dtype, stored));
    }
    // The first element of a byte is in its lowest bits.
    let first = writer.emit('r', "mov.u32 $, 0;");
    let within = writer.emit('r', &format!("and.b32 $, {}, {};", at.unwrap_or(&first), 8 / bits - 1));
    let shift = writer.emit('r', &format!("mul.lo.u32 $, {within}, {bits};"));
    let sign = if dtype.is_signed() { "s32" } else { "u32" };
    Ok(writer.emit('r', &format!("bfe.{sign} $, {stored}, {shift}, {bits};")))
}

/// Loads four adjacent elements: one vector access if the address is aligned, otherwise four scalar
/// ones.
pub(super) fn load_four(writer: &mut Writer, dtype: DType, address: &str) -> Result<[String; 4]> {
    let (access, class) = access(dtype)?;
    let bytes = bits(dtype)? / 8;
    let aligned = aligned(writer, address, 4 * bytes);
    let stored = [0; 4].map(|_| writer.register(class));
    let [a, b, c, d] = &stored;
    writer.line(&format!("@{aligned} ld.global.v4.{access} {{{a}, {b}, {c}, {d}}}, [{address}];"));
    for (place, one) in stored.iter().enumerate() {
        writer.line(&format!("@!{aligned} ld.global.{access} {one}, [{address}+{}];", place as u32 * bytes));
    }
    Ok(stored.map(|stored| extended(writer, dtype, stored)))
}

/// Emits the predicate that an address is a multiple of `bytes`, a power of two.
fn aligned(writer: &mut Writer, address: &str, bytes: u32) -> String {
    let rest = writer.emit('l', &format!("and.b64 $, {address}, {};", bytes - 1));
    writer.emit('p', &format!("setp.eq.u64 $, {rest}, 0;"))
}

/// Widens float16 and bfloat16 to float32, and makes 1 of any boolean but 0; other elements stay as
/// they are.
fn extended(writer: &mut Writer, dtype: DType, stored: String) -> String {
    match dtype {
        DType::F16 => writer.emit('f', &format!("cvt.f32.f16 $, {stored};")),
        // A bfloat16 is the upper half of a float32.
        DType::BF16 => {
            let bits = writer.emit('r', &format!("cvt.u32.u16 $, {stored};"));
            let bits = writer.emit('r', &format!("shl.b32 $, {bits}, 16;"));
            writer.emit('f', &format!("mov.b32 $, {bits};"))
        }
        DType::Bool => {
            let is_set = writer.emit('p', &format!("setp.ne.u32 $, {stored}, 0;"));
            writer.emit('r', &format!("selp.b32 $, 1, 0, {is_set};"))
        }
        _ => stored,
    }
}

/// Stores one element, or four adjacent ones.
pub(super) fn store(
    writer: &mut Writer,
    (values, number): (&[String], Number),
    dtype: DType,
    address: &str,
) -> Result<()> {
    let (access, _) = access(dtype)?;
    let mut stored = Vec::with_capacity(values.len());
    for value in values {
        stored.push(narrowed(writer, value, number, dtype)?);
    }
    let bytes = bits(dtype)? / 8;
    let mut guard = String::new();
    if let [a, b, c, d] = stored.as_slice() {
        let aligned = aligned(writer, address, 4 * bytes);
        writer.line(&format!("@{aligned} st.global.v4.{access} [{address}], {{{a}, {b}, {c}, {d}}};"));
        guard = format!("@!{aligned} ");
    }
    for (place, one) in stored.iter().enumerate() {
        writer.line(&format!("{guard}st.global.{access} [{address}+{}], {one};", place as u32 * bytes));
    }
    Ok(())
}

/// Converts a number to the register from which an element is stored.
fn narrowed(writer: &mut Writer, value: &str, number: Number, to: DType) -> Result<String> {
    match to {
        DType::Bool => {
            let truth = writer.truth(value, number);
            Ok(writer.emit('r', &format!("selp.b32 $, 1, 0, {truth};")))
        }
        DType::F16 => Ok(writer.emit('h', &format!("cvt.rn.f16.{} $, {value};", number.name()))),
        DType::BF16 => {
            // Rounding twice would be wrong in ties, so wider types are first rounded to odd.
            let float = match number {
                Number::F32 => value.to_owned(),
                Number::F64 => writer.call("ort_odd_f64", &[(value, Number::F64)], Number::F32),
                _ => odd(writer, value, number),
            };
            Ok(rounded(writer, &float))
        }
        // Outside the 32-bit range, the result is the low 32 bits of the 64-bit conversion.
        DType::U32 if number.is_float() => {
            let wide = convert(writer, value, number, Number::S64);
            Ok(convert(writer, &wide, Number::S64, Number::U32))
        }
        // Outside the int32 range, the conversion yields `i32::MIN`, whose low bits are zero.
        // Otherwise the store keeps the low bits.
        DType::U8 | DType::U16 if number.is_float() => Ok(convert(writer, value, number, Number::S32)),
        _ => Ok(convert(writer, value, number, Number::of(to)?)),
    }
}

/// Converts an integer to float32 with round-to-odd: truncate, and set the last bit if any bits
/// were lost. Rounding that to bfloat16 is then correct.
fn odd(writer: &mut Writer, value: &str, number: Number) -> String {
    let name = number.name();
    let cut = writer.emit('f', &format!("cvt.rz.f32.{name} $, {value};"));
    let back = writer.emit(number.class(), &format!("cvt.rzi.{name}.f32 $, {cut};"));
    let lost = writer.emit('p', &format!("setp.ne.{name} $, {back}, {value};"));
    let bits = writer.emit('r', &format!("mov.b32 $, {cut};"));
    let last = writer.emit('r', &format!("or.b32 $, {bits}, 1;"));
    let bits = writer.emit('r', &format!("selp.b32 $, {last}, {bits}, {lost};"));
    writer.emit('f', &format!("mov.b32 $, {bits};"))
}

/// Rounds to the nearest bfloat16, ties to even. Devices before 8.0 have no instruction for it.
fn rounded(writer: &mut Writer, value: &str) -> String {
    let bits = writer.emit('r', &format!("mov.b32 $, {value};"));
    let upper = writer.emit('r', &format!("shr.u32 $, {bits}, 16;"));
    let even = writer.emit('r', &format!("and.b32 $, {upper}, 1;"));
    let half = writer.emit('r', &format!("add.u32 $, {even}, 0x7fff;"));
    let sum = writer.emit('r', &format!("add.u32 $, {bits}, {half};"));
    let nearest = writer.emit('r', &format!("shr.u32 $, {sum}, 16;"));
    // Rounding could turn a NaN into infinity, so NaN keeps its upper bits with the quiet bit set.
    let quiet = writer.emit('r', &format!("or.b32 $, {upper}, 0x40;"));
    let nan = writer.emit('p', &format!("setp.nan.f32 $, {value}, {value};"));
    let chosen = writer.emit('r', &format!("selp.b32 $, {quiet}, {nearest}, {nan};"));
    writer.emit('h', &format!("cvt.u16.u32 $, {chosen};"))
}

/// Converts between arithmetic types. Floats truncate towards zero. For a signed target, NaN and
/// out-of-range floats become its smallest value.
pub(super) fn convert(writer: &mut Writer, value: &str, from: Number, to: Number) -> String {
    let (source, target, class) = (from.name(), to.name(), to.class());
    match (from, to) {
        _ if from == to => value.to_owned(),
        (_, Number::U64) if from.is_float() => unsigned(writer, value, from),
        (_, Number::U32) if from.is_float() => {
            let wide = truncated(writer, value, from, Number::S64);
            convert(writer, &wide, Number::S64, to)
        }
        _ if from.is_float() && !to.is_float() => truncated(writer, value, from, to),
        (Number::F32, Number::F64) => writer.emit(class, &format!("cvt.f64.f32 $, {value};")),
        _ if to.is_float() => writer.emit(class, &format!("cvt.rn.{target}.{source} $, {value};")),
        // Same register class: the bits are the same.
        _ if from.class() == class => value.to_owned(),
        _ => writer.emit(class, &format!("cvt.{target}.{source} $, {value};")),
    }
}

/// Converts a float to a signed integer.
fn truncated(writer: &mut Writer, value: &str, from: Number, to: Number) -> String {
    let (source, target) = (from.name(), to.name());
    let (size, least) = match to {
        Number::S32 => (2_147_483_648.0, i64::from(i32::MIN)),
        _ => (9_223_372_036_854_775_808.0, i64::MIN),
    };
    let size = writer.constant(size, from);
    // `cvt` saturates, so out-of-range values are replaced by the smallest integer afterwards.
    let whole = writer.emit(to.class(), &format!("cvt.rzi.{target}.{source} $, {value};"));
    let amount = writer.emit(from.class(), &format!("abs.{source} $, {value};"));
    let fits = writer.emit('p', &format!("setp.lt.{source} $, {amount}, {size};"));
    let least = writer.emit(to.class(), &format!("mov.{} $, {least};", to.bits()));
    writer.emit(to.class(), &format!("selp.{} $, {whole}, {least}, {fits};", to.bits()))
}

/// Converts a float to a 64-bit unsigned integer. The upper half is shifted into the signed range,
/// converted, and shifted back by flipping the sign bit.
fn unsigned(writer: &mut Writer, value: &str, from: Number) -> String {
    let source = from.name();
    let half = writer.constant(9_223_372_036_854_775_808.0, from);
    let upper = writer.emit('p', &format!("setp.ge.{source} $, {value}, {half};"));
    let lower = writer.emit(from.class(), &format!("sub.rn.{source} $, {value}, {half};"));
    let chosen = writer.emit(from.class(), &format!("selp.{source} $, {lower}, {value}, {upper};"));
    let whole = truncated(writer, &chosen, from, Number::S64);
    let sign = writer.emit('l', &format!("selp.b64 $, 0x8000000000000000, 0, {upper};"));
    writer.emit('l', &format!("xor.b64 $, {whole}, {sign};"))
}
