//! `Identity`: forwards a value of any type, as a view.

use crate::Result;
use crate::dtype::TypeSet;
use crate::ops;
use crate::spec::{Cost, Grad, InferCx, OP, OpSpec, Traits, TypeVar, Types, ViewOf, gradient, one};

/// The element types of sequences and optionals.
const CONTAINED: TypeSet = TypeSet::ALL_TENSOR.difference(TypeSet::of(&[crate::dtype::DType::BF16]));

static IDENTITY: OpSpec = OpSpec {
    name: "Identity",
    since: 25,
    inputs: &[one("input", "V")],
    outputs: &[one("output", "V")],
    types: &[TypeVar {
        name: "V",
        types: Types {
            tensor: TypeSet::ALL_TENSOR_IR13,
            sequence: CONTAINED,
            optional: CONTAINED,
            optional_sequence: CONTAINED,
            ..Types::NONE
        },
    }],
    traits: Traits::ELEMENTWISE.with(Traits::MOVES_DATA),
    cost: Cost::Free,
    infer,
    view: Some(ViewOf::whole),
    grad: Grad::Rule(gradient::of_reshape),
    ..OP
};

ops![IDENTITY];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    if let Some(ty) = cx.input_type(0) {
        cx.set_type(0, ty.clone());
    }
    // Exporters put `Identity` nodes between shape computations, so the elements pass through.
    if let Some(symbolic) = cx.symbolic(0) {
        cx.set_symbolic(0, crate::spec::SymTensor::clone(&symbolic));
    }
    Ok(())
}
