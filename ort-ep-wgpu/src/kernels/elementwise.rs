//! Elementwise operators, generated from their scalar formulas, with broadcast inputs.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::{BinaryFn, MICROSOFT, RUNTIME, Registry, ScalarExpr};
use ort_core::{Result, error};

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

const fn formula(op: &'static str) -> WgpuKernel {
    typed(op, &[("T", FLOATS)])
}

const fn arithmetic(op: &'static str) -> WgpuKernel {
    typed(op, &[("T", NUMBERS)])
}

const fn comparison(op: &'static str) -> WgpuKernel {
    in_place(&[], typed(op, &[("T", TYPES)]))
}

/// Overrides the aliasing pairs. Elements of different width must not alias, even if the byte
/// lengths are equal.
const fn in_place(pairs: &'static [(usize, usize)], kernel: WgpuKernel) -> WgpuKernel {
    WgpuKernel { def: KernelDef { in_place: pairs, ..kernel.def }, ..kernel }
}

const fn typed(op: &'static str, types: &'static [(&'static str, TypeSet)]) -> WgpuKernel {
    let def = KernelDef { op, types, in_place: &[(0, 0), (1, 0)], when: few_inputs, ..KernelDef::BASE };
    WgpuKernel::new(def, dispatches)
}

const fn of_domain(domain: &'static str, kernel: WgpuKernel) -> WgpuKernel {
    WgpuKernel { def: KernelDef { domain, ..kernel.def }, ..kernel }
}

wgpu_kernels![
    arithmetic("Abs"),
    arithmetic("Neg"),
    arithmetic("Sign"),
    formula("Floor"),
    formula("Ceil"),
    formula("Round"),
    formula("Reciprocal"),
    formula("Sqrt"),
    formula("Exp"),
    formula("Log"),
    formula("Erf"),
    formula("Sin"),
    formula("Cos"),
    formula("Tan"),
    formula("Asin"),
    formula("Acos"),
    formula("Atan"),
    formula("Sinh"),
    formula("Cosh"),
    formula("Tanh"),
    formula("Asinh"),
    formula("Acosh"),
    formula("Atanh"),
    arithmetic("Relu"),
    formula("LeakyRelu"),
    formula("Elu"),
    formula("Selu"),
    formula("Celu"),
    formula("ThresholdedRelu"),
    formula("HardSigmoid"),
    formula("HardSwish"),
    formula("Sigmoid"),
    formula("Softplus"),
    formula("Softsign"),
    formula("Mish"),
    formula("Gelu"),
    formula("Swish"),
    formula("SwiGLU"),
    formula("PRelu"),
    formula("Shrink"),
    arithmetic("Add"),
    arithmetic("Sub"),
    arithmetic("Mul"),
    arithmetic("Div"),
    arithmetic("Mod"),
    typed("Pow", &[("T", NUMBERS), ("T1", NUMBERS)]),
    typed("Min", &[("T", TYPES)]),
    typed("Max", &[("T", TYPES)]),
    arithmetic("Sum"),
    formula("Mean"),
    comparison("Equal"),
    comparison("Less"),
    comparison("LessOrEqual"),
    comparison("Greater"),
    comparison("GreaterOrEqual"),
    comparison("And"),
    comparison("Or"),
    comparison("Xor"),
    comparison("Not"),
    in_place(&[], typed("IsNaN", &[("T1", FLOATS)])),
    in_place(&[(1, 0), (2, 0)], typed("Where", &[("T", TYPES)])),
    of_domain(MICROSOFT, formula("BiasGelu")),
    of_domain(RUNTIME, formula("FusedElementwise")),
];

fn few_inputs(node: &NodeView<'_>) -> bool {
    node.node.inputs.len() <= NAMES.len() && few_axes(node)
}

/// Returns the formula of a variadic operator; `None` for any other.
fn folded(op: &str, count: usize) -> Option<ScalarExpr> {
    let function = match op {
        "Min" => BinaryFn::Min,
        "Max" => BinaryFn::Max,
        "Sum" | "Mean" => BinaryFn::Add,
        _ => return None,
    };
    let terms = (0..count).map(ScalarExpr::Input);
    let whole = terms.reduce(|left, right| ScalarExpr::binary(function, left, right))?;
    Some(if op == "Mean" { whole / count as f64 } else { whole })
}

fn formula_of(cx: &OpCx<'_>) -> Result<ScalarExpr> {
    if let Some(folded) = folded(cx.op, cx.inputs.len()) {
        return Ok(folded);
    }
    let registry = Registry::global()?;
    let spec = ["", MICROSOFT, RUNTIME].into_iter().find_map(|domain| registry.find(domain, cx.op));
    let scalar = spec.and_then(|spec| spec.scalar);
    scalar.ok_or_else(|| error!(Fail, "{} has no formula", cx.op))?(cx.attrs)
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let formula = formula_of(cx)?;
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
