//! Shared parts of gather and scatter kernels: bitwise element access, and negative indices.
//!
//! The device cannot report an index out of range, as the CPU does. Reads take the nearest valid
//! element, and writes are dropped.

use ort_core::dtype::DType;
use ort_core::ep::NodeView;
use ort_core::ops::tensor::problem;
use ort_core::{Result, ensure};

use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::{Element, MOST_AXES, Shader};

/// WGSL functions: `counted(index, size)` resolves a negative index, and `clamped(index, size)`
/// also clamps it to the valid range.
pub(super) const INDICES: &str = "
fn counted(index: i32, size: u32) -> i32 { return select(index, index + i32(size), index < 0); }
fn clamped(index: i32, size: u32) -> u32 { return u32(clamp(counted(index, size), 0, i32(size) - 1)); }
";

/// Returns whether all inputs have few enough axes for a walk.
pub(super) fn few_axes(node: &NodeView<'_>) -> bool {
    let ranks = (0..node.node.inputs.len()).filter_map(|index| node.rank(index));
    ranks.into_iter().all(|rank| rank <= MOST_AXES)
}

/// The tensor as an unsigned type of the same width, so that copies keep the bits.
pub(super) fn bits_of(tensor: &Operand) -> Result<Operand> {
    let dtype = match (Element::of(tensor.dtype)?.bits, tensor.dtype) {
        (8, _) => DType::U8,
        (16, _) => DType::U16,
        (32, _) => DType::U32,
        (_, dtype) => dtype,
    };
    Ok(Operand { dtype, ..tensor.clone() })
}

/// Refuses a source without elements for a result that has some, and one too large for 31-bit
/// indices.
pub(super) fn check_source(source: &Operand, result: &Operand) -> Result<()> {
    problem::check_source(&source.shape, &result.shape)
}

/// Finishes a dispatch that writes every element of `y`. `fn picked(i: u32)` returns its bits as
/// [`bits_of`] reads them. Narrow elements are written as whole words, so `y` must not alias an
/// input.
pub(super) fn pick(shader: Shader, y: &Operand, code: &str) -> Result<Dispatch> {
    let (count, bits) = (y.count(), Element::of(y.dtype)?.bits);
    if bits >= 32 {
        let code = format!("{code}\nfn element(i: u32) {{ set_y(i, picked(i)); }}\n");
        return shader.write("y", &bits_of(y)?).each(count, &code);
    }
    let parts = 32usize.div_ceil(bits as usize);
    // An invocation per word keeps two from writing the same one.
    let words = count.div_ceil(parts);
    let y = Operand { dtype: DType::U32, shape: [words].as_slice().into(), ..y.clone() };
    let code = format!(
        "{code}\nfn element(w: u32) {{
            var word = 0u;
            let first = w * {parts}u;
            let end = min({parts}u, p.elements - first);
            for (var k = 0u; k < end; k++) {{ word |= picked(first + k) << (k * {bits}u); }}
            set_y(w, word);
        }}\n"
    );
    shader.number("elements", count).write("y", &y).each(words, &code)
}

/// Returns the dispatches that copy `from` to `to`; none if both alias.
pub(super) fn copied(cx: &OpCx<'_>, from: &Operand, to: &Operand) -> Result<Vec<Dispatch>> {
    ensure!(from.count() == to.count(), InvalidArgument, "{:?} is copied to {:?}", from.shape, to.shape);
    if from.arg == to.arg {
        return Ok(Vec::new());
    }
    let shader = Shader::new(cx).read("x", &bits_of(from)?);
    Ok(vec![pick(shader, to, "fn picked(i: u32) -> x_t { return x(i); }")?])
}
