//! Elementwise operators, generated from their scalar formulas, with broadcast inputs.

use std::sync::OnceLock;

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_gpu::formula::{FormulaTypes, formula_kernels};

use super::fill::fill;
use super::indexing::few_axes;
use super::{WgpuKernel, wgpu_kernels};
use crate::formula::{Number, render};
use crate::launch::{Dispatch, OpCx, Walk};
use crate::shader::{Element, Shader, TYPES};

/// The float types of shaders.
pub(super) const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
/// The types of arithmetic. Results of 64-bit integers might exceed 32 bits.
const NUMBERS: TypeSet = TypeSet::of(&[
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::U32,
    DType::I16,
    DType::U16,
    DType::I8,
    DType::U8,
]);
/// The names of inputs in shaders.
const NAMES: [&str; 7] = ["x0", "x1", "x2", "x3", "x4", "x5", "x6"];

/// The kernels of all records with a formula.
pub(super) fn derived() -> &'static [WgpuKernel] {
    static KERNELS: OnceLock<Vec<WgpuKernel>> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let types = FormulaTypes {
            selection: &[(KernelDef::INPUTS, TYPES)],
            integer: &[(KernelDef::INPUTS, NUMBERS)],
            float: &[(KernelDef::INPUTS, FLOATS)],
        };
        formula_kernels(types, few_inputs).map(|def| WgpuKernel::new(def, dispatches)).collect()
    })
}

wgpu_kernels![WgpuKernel::new(
    KernelDef {
        op: "Pow",
        types: &[("T", NUMBERS), ("T1", NUMBERS)],
        in_place: &[(0, 0), (1, 0)],
        // An integer to a fractional power needs more digits than a shader's floats have.
        when: |node| few_inputs(node) && !is_fractional_power(node),
        ..KernelDef::BASE
    },
    powers
)];

fn is_fractional_power(node: &NodeView<'_>) -> bool {
    let is_float = |input| node.dtype(input).is_some_and(|dtype| FLOATS.contains(dtype));
    is_float(1) && !is_float(0)
}

fn few_inputs(node: &NodeView<'_>) -> bool {
    node.node.inputs.len() <= NAMES.len() && few_axes(node)
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let mut inputs = Vec::new();
    for index in 0..cx.inputs.len() {
        inputs.push(cx.input(index)?);
    }
    // Booleans are no type to compute in: take the first input of another type, if there is one.
    let of_numbers = inputs.iter().find(|input| input.dtype != DType::Bool).or(inputs.first());
    let number = of_numbers.map_or(DType::F32, |input| input.dtype);
    in_numbers(cx, Number::of(Element::of(number)?.value))
}

fn powers(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (base, exponent) = (cx.input(0)?.dtype, cx.input(1)?.dtype);
    in_numbers(cx, number_of_power(base, exponent)?)
}

/// Returns the arithmetic type of a power.
fn number_of_power(base: DType, exponent: DType) -> Result<Number> {
    Ok(match Number::of(Element::of(base)?.value) {
        // As a signed number, an exponent from 2^31 on would be negative. Products wrap to the same
        // bits in both.
        Number::Signed if exponent == DType::U32 => Number::Unsigned,
        number => number,
    })
}

/// The formula of the operator's record, computed in one type.
fn in_numbers(cx: &OpCx<'_>, number: Number) -> Result<Vec<Dispatch>> {
    let formula = cx.spec.formula(cx.attrs, cx.inputs.len())?;
    let y = cx.output(0)?;
    let mut inputs = Vec::new();
    for index in 0..cx.inputs.len() {
        inputs.push(cx.input(index)?);
    }
    let shapes: Vec<&[usize]> = inputs.iter().map(|input| &*input.shape).collect();
    let walk = Walk::broadcast(&y.shape, &shapes)?;
    let mut shader = Shader::new(cx).write("y", y).walk(&walk, &NAMES);
    for (input, name) in inputs.iter().zip(NAMES) {
        shader = shader.read(name, input);
    }
    let values: Vec<String> = NAMES
        .iter()
        .take(inputs.len())
        .map(|name| format!("let {name}_value = {}({name}(at_{name}(i)));\n", number.name()))
        .collect();
    let result = render(&formula, number, &|index| format!("{}_value", NAMES.get(index).unwrap_or(&"x0")))?;
    let code = format!("fn value(i: u32) -> y_t {{\n{}return y_t({result});\n}}\n", values.concat());
    Ok(vec![fill(shader, y, &code)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_mixed_types() {
        let number = |base, exponent| number_of_power(base, exponent).unwrap();
        assert_eq!(number(DType::F16, DType::I32), Number::Float);
        assert_eq!(number(DType::I32, DType::I32), Number::Signed);
        assert_eq!(number(DType::I32, DType::U16), Number::Signed);
        assert_eq!(number(DType::I32, DType::U32), Number::Unsigned);
    }
}
