//! Training operators.
//!
//! This file has the standard's optimizers and `Gradient`, of the domain
//! `ai.onnx.preview.training`. The submodules have the runtime's own optimizer steps, one parameter
//! each, and what else a training step needs.

mod accumulate;
mod adafactor;
mod adam;
mod adam_8bit;
mod attention;
mod counter_dropout;
mod lamb;
mod norm;
mod sgd;
mod step;

pub use adafactor::{FactoredShape, adafactor_epsilon};
pub use adam::AdamMode;
pub use adam_8bit::ADAM_8BIT_BLOCK;

use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, InferCx, OP, OpSpec, TypeVar, attr, many_mixed, one, var};
use crate::{Result, ensure};

const DOMAIN: &str = "ai.onnx.preview.training";
const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F64]);
const TYPES: &[TypeVar] = &[var("T1", FLOATS), var("T2", TypeSet::of(&[DType::I64])), var("T3", FLOATS)];

/// The base record of the optimizers. Inputs are the learning rate, the iteration count, then
/// groups of tensors: the parameters, their gradients, their states.
const OPTIMIZER: OpSpec = OpSpec {
    domain: DOMAIN,
    since: 1,
    inputs: &[one("R", "T1"), one("T", "T2"), many_mixed("inputs", "T3", 1)],
    outputs: &[many_mixed("outputs", "T3", 1)],
    types: TYPES,
    ..OP
};

static ADAGRAD: OpSpec = OpSpec {
    name: "Adagrad",
    attrs: &[
        attr::float("norm_coefficient", 0.0),
        attr::float("decay_factor", 0.0),
        attr::float("epsilon", 1e-6),
    ],
    infer: |cx| infer(cx, 3),
    ..OPTIMIZER
};

static ADAM: OpSpec = OpSpec {
    name: "Adam",
    attrs: &[
        attr::float("epsilon", 1e-6),
        attr::float("norm_coefficient_post", 0.0),
        attr::float("norm_coefficient", 0.0),
        attr::float("beta", 0.999),
        attr::float("alpha", 0.9),
    ],
    infer: |cx| infer(cx, 4),
    ..OPTIMIZER
};

static MOMENTUM: OpSpec = OpSpec {
    name: "Momentum",
    attrs: &[
        attr::required("norm_coefficient", AttrKind::Float),
        attr::required("beta", AttrKind::Float),
        attr::required("mode", AttrKind::String),
        attr::required("alpha", AttrKind::Float),
    ],
    infer: |cx| infer(cx, 3),
    ..OPTIMIZER
};

/// Differentiates the graph that it is in by tensor names. `pass::expand_gradients` replaces it
/// before anything runs.
static GRADIENT: OpSpec = OpSpec {
    domain: DOMAIN,
    name: "Gradient",
    inputs: &[many_mixed("Inputs", "T1", 1)],
    outputs: &[many_mixed("Outputs", "T2", 1)],
    types: &[
        var("T1", TypeSet::ALL_TENSOR.difference(TypeSet::of(&[DType::BF16]))),
        var("T2", TypeSet::IEEE_FLOATS),
    ],
    attrs: &[
        attr::required("xs", AttrKind::Strings),
        attr::optional("zs", AttrKind::Strings),
        attr::required("y", AttrKind::String),
    ],
    infer: infer_gradient,
    ..OP
};

ops![ADAGRAD, ADAM, GRADIENT, MOMENTUM];

/// A gradient has the type of the tensor that it is for.
fn infer_gradient(cx: &mut InferCx<'_>) -> Result<()> {
    for index in 0..cx.output_count() {
        if let Some(ty) = cx.input_type(index) {
            cx.set_type(index, ty.clone());
        }
    }
    Ok(())
}

/// The outputs are the new parameters and states: all groups but the gradients.
fn infer(cx: &mut InferCx<'_>, groups: usize) -> Result<()> {
    // The first two inputs are the learning rate and the iteration count.
    let given = cx.input_count().saturating_sub(2);
    ensure!(
        given > 0 && given.is_multiple_of(groups),
        InvalidGraph,
        "the number of tensors is {given}, expected a multiple of {groups}"
    );
    // At least 1, because `given` is a positive multiple of `groups`.
    let count = given / groups;
    ensure!(
        cx.output_count() <= count * (groups - 1),
        InvalidGraph,
        "{} outputs, at most {} expected",
        cx.output_count(),
        count * (groups - 1)
    );
    for index in 0..cx.output_count() {
        let group = index / count;
        // States come after the gradients, which have no output.
        let source = if group == 0 { 2 + index } else { 2 + index + count };
        if let Some(ty) = cx.input_type(source) {
            cx.set_type(index, ty.clone());
        }
    }
    Ok(())
}
