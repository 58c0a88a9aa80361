//! Code generation for the functions of formulas: instructions, or calls into `cu/math.cu`.

use ort_core::spec::{BinaryFn, UnaryFn};
use ort_core::{Result, error};

use super::number::Number;
use super::writer::Writer;

/// Emits a unary function, as an instruction or a call.
pub(super) fn unary(writer: &mut Writer, function: UnaryFn, number: Number, x: String) -> Result<String> {
    let (name, class) = (number.name(), number.class());
    let instruction = match function {
        UnaryFn::Sign if number.is_unsigned() => {
            let one = writer.constant(1.0, number);
            return Ok(writer.emit(class, &format!("min.{name} $, {x}, {one};")));
        }
        UnaryFn::Sign => {
            // NaN stays NaN, and -0 becomes +0: both fall through to `x + 0`.
            let [minus, zero, one] = [-1.0, 0.0, 1.0].map(|value| writer.constant(value, number));
            let above = writer.emit('p', &format!("setp.gt.{name} $, {x}, {zero};"));
            let below = writer.emit('p', &format!("setp.lt.{name} $, {x}, {zero};"));
            let unsigned = writer.emit(class, &format!("add.{name} $, {x}, {zero};"));
            let upper = writer.chosen(number, &one, &unsigned, &above);
            return Ok(writer.chosen(number, &minus, &upper, &below));
        }
        UnaryFn::Abs if number.is_unsigned() => return Ok(x),
        UnaryFn::Floor | UnaryFn::Ceil | UnaryFn::RoundHalfEven if !number.is_float() => return Ok(x),
        // PTX has no unsigned `neg`; two's complement makes the signed one equivalent.
        UnaryFn::Neg if number == Number::U32 => "neg.s32".to_owned(),
        UnaryFn::Neg if number == Number::U64 => "neg.s64".to_owned(),
        UnaryFn::Neg => format!("neg.{name}"),
        UnaryFn::Abs => format!("abs.{name}"),
        _ if !number.is_float() => return Err(error!(NotImplemented, "{function:?} of integers")),
        UnaryFn::Floor => format!("cvt.rmi.{name}.{name}"),
        UnaryFn::Ceil => format!("cvt.rpi.{name}.{name}"),
        UnaryFn::RoundHalfEven => format!("cvt.rni.{name}.{name}"),
        UnaryFn::Reciprocal => format!("rcp.rn.{name}"),
        UnaryFn::Sqrt => format!("sqrt.rn.{name}"),
        _ => {
            let called = format!("{function:?}").to_lowercase();
            return Ok(writer.call(&function_name(&called, number), &[(&x, number)], number));
        }
    };
    Ok(writer.emit(class, &format!("{instruction} $, {x};")))
}

/// Returns the name of a function of `cu/math.cu` for an arithmetic type.
fn function_name(name: &str, number: Number) -> String {
    match number {
        Number::F32 => format!("ort_{name}"),
        _ => format!("ort_{name}_{}", number.name()),
    }
}

/// Emits a binary function whose value is not boolean.
pub(super) fn binary(
    writer: &mut Writer,
    function: BinaryFn,
    number: Number,
    a: &str,
    b: &str,
) -> Result<String> {
    let (name, class, float) = (number.name(), number.class(), number.is_float());
    // An explicit rounding mode keeps the driver from contracting a multiply and an add into an
    // FMA.
    let exact = if float { ".rn" } else { "" };
    let operation = match function {
        BinaryFn::Add => format!("add{exact}"),
        BinaryFn::Sub => format!("sub{exact}"),
        BinaryFn::Mul => if float { "mul.rn" } else { "mul.lo" }.to_owned(),
        BinaryFn::Div if float => "div.rn".to_owned(),
        BinaryFn::Min if !float => "min".to_owned(),
        BinaryFn::Max if !float => "max".to_owned(),
        BinaryFn::Div | BinaryFn::Mod | BinaryFn::Fmod if !float => {
            return Ok(divided(writer, function, number, (a, b)));
        }
        BinaryFn::Min | BinaryFn::Max => {
            // PTX `min` and `max` ignore a NaN operand; formulas propagate it.
            let order = if function == BinaryFn::Min { "lt" } else { "gt" };
            let first = writer.emit('p', &format!("setp.{order}.{name} $, {a}, {b};"));
            let nan = writer.emit('p', &format!("setp.nan.{name} $, {a}, {a};"));
            let first = writer.emit('p', &format!("or.pred $, {first}, {nan};"));
            return Ok(writer.chosen(number, a, b, &first));
        }
        BinaryFn::Pow | BinaryFn::Mod | BinaryFn::Fmod => {
            let called = format!("{function:?}").to_lowercase();
            return Ok(writer.call(&function_name(&called, number), &[(a, number), (b, number)], number));
        }
        other => return Err(error!(Fail, "{other:?} is no number")),
    };
    Ok(writer.emit(class, &format!("{operation}.{name} $, {a}, {b};")))
}

/// Emits integer quotients and remainders; division by zero yields zero.
fn divided(writer: &mut Writer, function: BinaryFn, number: Number, (a, b): (&str, &str)) -> String {
    let (name, class, bits) = (number.name(), number.class(), number.bits());
    let [zero, one] = [0.0, 1.0].map(|value| writer.constant(value, number));
    let none = writer.emit('p', &format!("setp.eq.{name} $, {b}, {zero};"));
    // PTX leaves division by zero undefined, so we divide by one instead.
    let divisor = writer.chosen(number, &one, b, &none);
    if function == BinaryFn::Div {
        let quotient = writer.emit(class, &format!("div.{name} $, {a}, {divisor};"));
        return writer.chosen(number, &zero, &quotient, &none);
    }
    let rest = writer.emit(class, &format!("rem.{name} $, {a}, {divisor};"));
    if function == BinaryFn::Fmod || number.is_unsigned() {
        return rest;
    }
    // `Mod` takes the sign of the divisor: a nonzero remainder of the other sign is moved by it.
    let signs = writer.emit(class, &format!("xor.{bits} $, {rest}, {divisor};"));
    let differ = writer.emit('p', &format!("setp.lt.{name} $, {signs}, {zero};"));
    let some = writer.emit('p', &format!("setp.ne.{name} $, {rest}, {zero};"));
    let moved = writer.emit('p', &format!("and.pred $, {differ}, {some};"));
    let sum = writer.emit(class, &format!("add.{name} $, {rest}, {divisor};"));
    writer.chosen(number, &sum, &rest, &moved)
}
