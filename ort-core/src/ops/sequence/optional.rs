//! Optional values: `Optional`, `OptionalHasElement`, `OptionalGetElement`.

use crate::Result;
use crate::dtype::{DType, TypeSet};
use crate::ir::ValueType;
use crate::ops;
use crate::spec::{AttrKind, Grad, GradCx, InferCx, OP, OpSpec, TypeVar, Types, attr, one, opt, var};

/// What an optional may hold: tensors and sequences.
const HELD: Types = Types { tensor: TypeSet::ALL, sequence: TypeSet::ALL, ..Types::NONE };
/// An optional, or a plain value, which counts as present.
const ANY: Types = Types { optional: TypeSet::ALL, optional_sequence: TypeSet::ALL, ..HELD };

static OPTIONAL: OpSpec = OpSpec {
    name: "Optional",
    grad: Grad::Rule(of_held),
    since: 28,
    first: 15,
    inputs: &[opt("input", "V")],
    outputs: &[one("output", "O")],
    types: &[
        TypeVar { name: "V", types: HELD },
        TypeVar {
            name: "O",
            types: Types { optional: TypeSet::ALL, optional_sequence: TypeSet::ALL, ..Types::NONE },
        },
    ],
    attrs: &[attr::optional("type", AttrKind::Type)],
    infer: |cx| {
        // Without an input, the attribute `type` says what the empty optional could hold.
        let given = cx.input_type(0).or_else(|| cx.attrs.find_type("type")).cloned().unwrap_or_default();
        cx.set_type(0, ValueType::Optional(Box::new(given)));
        Ok(())
    },
    ..OP
};

static OPTIONAL_HAS_ELEMENT: OpSpec = OpSpec {
    name: "OptionalHasElement",
    since: 28,
    first: 15,
    inputs: &[opt("input", "O")],
    outputs: &[one("output", "B")],
    types: &[TypeVar { name: "O", types: ANY }, var("B", TypeSet::of(&[DType::Bool]))],
    infer: |cx| cx.set_shape(0, Vec::new()),
    ..OP
};

static OPTIONAL_GET_ELEMENT: OpSpec = OpSpec {
    name: "OptionalGetElement",
    grad: Grad::Rule(of_held),
    since: 28,
    first: 15,
    inputs: &[one("input", "O")],
    outputs: &[one("output", "V")],
    types: &[TypeVar { name: "O", types: ANY }, TypeVar { name: "V", types: HELD }],
    infer: get,
    ..OP
};

ops![OPTIONAL, OPTIONAL_HAS_ELEMENT, OPTIONAL_GET_ELEMENT];

fn get(cx: &mut InferCx<'_>) -> Result<()> {
    let ty = match cx.input_type(0) {
        Some(ValueType::Optional(element)) => (**element).clone(),
        // Since version 18 the input may be a plain value, which is returned as it is.
        Some(other) => other.clone(),
        None => ValueType::Unknown,
    };
    cx.set_type(0, ty);
    Ok(())
}

/// The gradient passes through unchanged: the optional and its content share it.
fn of_held(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    cx.set(0, upstream);
    Ok(())
}
