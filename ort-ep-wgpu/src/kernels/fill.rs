//! Elementwise stores: each output element is a function of its index. Elements narrower than a
//! word are written a word at a time.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::NodeView;
use ort_core::ir::ValueType;

use crate::launch::{Dispatch, Operand};
use crate::shader::{Element, MOST_AXES, Shader};

/// Sets each element `i` of tensor `y` to `value(i)`, a function of the code. Bits of the last byte
/// after the last element become zero.
pub(super) fn fill(shader: Shader, y: &Operand, code: &str) -> Result<Dispatch> {
    let code = format!("fn place(i: u32) -> u32 {{ return i; }}\n{code}");
    // Types of less than a byte, whose last byte has spare bits.
    let per_byte = (8 / Element::of(y.dtype)?.bits).max(1) as usize;
    if per_byte == 1 {
        return fill_places(shader, y, y.count(), &code);
    }
    let shader = shader.number("elements", y.count());
    let value = "select(y_t(0), value(first + n), first + n < p.elements)";
    fill_words(shader, y, y.count().next_multiple_of(per_byte), &code, value)
}

/// Sets element `place(i)` of `y` to `value(i)` for each `i` below `count`. The code declares both
/// functions. The elements of a word must be consecutive: from a multiple of their number on,
/// `place(i + 1)` is `place(i) + 1` and so on.
pub(super) fn fill_places(shader: Shader, y: &Operand, count: usize, code: &str) -> Result<Dispatch> {
    if per_word(y.dtype)? == 1 {
        let code = format!("{code}\nfn element(i: u32) {{ set_y(place(i), value(i)); }}");
        return shader.each(count, &code);
    }
    fill_words(shader, y, count, code, "value(first + n)")
}

/// Sets elements a word per invocation; `value` is the expression of element `first + n`.
fn fill_words(shader: Shader, y: &Operand, count: usize, code: &str, value: &str) -> Result<Dispatch> {
    let (per_word, stored) = (per_word(y.dtype)?, stored(y.dtype, value)?);
    let code = format!(
        "{code}\n\
         fn element(w: u32) {{\n\
         let first = w * {per_word}u;\n\
         let used = min({per_word}u, p.total - first);\n\
         let at = place(first);\n\
         {stored}\n}}"
    );
    shader.number("total", count).each(count.div_ceil(per_word), &code)
}

/// Returns the number of elements in a word.
pub(super) fn per_word(dtype: DType) -> Result<usize> {
    Ok((32 / Element::of(dtype)?.bits).max(1) as usize)
}

/// Generates statements that set `used` elements of `y`, at most a word of them, starting at `at`.
/// `value` is the expression of the `n`th of them. A full, aligned word is stored at once, instead
/// of by an atomic update for each element.
pub(super) fn stored(dtype: DType, value: &str) -> Result<String> {
    let per_word = per_word(dtype)?;
    if per_word == 1 {
        return Ok(format!("let n = 0u; set_y(at, {value});"));
    }
    let element = Element::of(dtype)?;
    let (bits, mask) = (element.bits, (1u32 << element.bits) - 1);
    let encoded = match (dtype, element.value) {
        (DType::F16, _) => "half_bits(v)".to_owned(),
        (DType::BF16, _) => "bfloat_bits(v)".to_owned(),
        (DType::Bool, _) => "select(0u, 1u, v != 0u)".to_owned(),
        _ => format!("(u32(v) & {mask}u)"),
    };
    Ok(format!(
        "let whole = used == {per_word}u && (p.y_base + at) % {per_word}u == 0u;\n\
         var word = 0u;\n\
         for (var n = 0u; n < used; n++) {{\n\
         let v = {value};\n\
         if (whole) {{ word |= {encoded} << (n * {bits}u); }} else {{ set_y(at + n, v); }}\n}}\n\
         if (whole) {{ y_put((p.y_base + at) / {per_word}u, word); }}"
    ))
}

/// Returns whether the known ranks are at most those that shaders can walk.
pub(super) fn few_axes(node: &NodeView<'_>) -> bool {
    let few = |ty: ValueType| {
        let rank = ty.as_tensor().and_then(|tensor| Some(tensor.shape.as_ref()?.len()));
        rank.is_none_or(|rank| rank <= MOST_AXES)
    };
    few(node.input_type(0)) && few(node.output_type(0))
}
