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
        when: few_inputs,
        ..KernelDef::BASE
    },
    dispatches
)];

fn few_inputs(node: &NodeView<'_>) -> bool {
    node.node.inputs.len() <= NAMES.len() && few_axes(node)
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let formula = cx.spec.formula(cx.attrs, cx.inputs.len())?;
    let y = cx.output(0)?;
    let mut inputs = Vec::new();
    for index in 0..cx.inputs.len() {
        inputs.push(cx.input(index)?);
    }
    // Booleans are no type to compute in: take the first input of another type, if there is one.
    let of_numbers = inputs.iter().find(|input| input.dtype != DType::Bool).or(inputs.first());
    let number = of_numbers.map_or(DType::F32, |input| input.dtype);
    let number = Number::of(Element::of(number)?.value);
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
