//! Sequence construction, access and update.

use super::{CONTAINED, POSITION, S, element_type, sequence_of};
use crate::Result;
use crate::dtype::{DType, TypeSet};
use crate::error;
use crate::ir::ValueType;
use crate::ops;
use crate::ops::control::merge::{merge, outside};
use crate::spec::{AttrKind, Grad, InferCx, OP, OpSpec, attr, many, one, opt, var};

static SEQUENCE_CONSTRUCT: OpSpec = OpSpec {
    name: "SequenceConstruct",
    grad: Grad::None("it takes apart or makes a sequence that only the run knows"),
    since: 11,
    first: 11,
    inputs: &[many("inputs", "T", 1)],
    outputs: &[one("output_sequence", "S")],
    types: &[var("T", CONTAINED), S],
    infer: |cx| {
        let mut element = cx.input_type(0).cloned().unwrap_or_default();
        // The elements' shapes may differ: the sequence has what they have in common.
        for index in 1..cx.input_count() {
            element = merge(&element, cx.input_type(index).unwrap_or(&ValueType::Unknown))?;
        }
        cx.set_type(0, sequence_of(element));
        Ok(())
    },
    ..OP
};

static SEQUENCE_EMPTY: OpSpec = OpSpec {
    name: "SequenceEmpty",
    since: 11,
    first: 11,
    outputs: &[one("output", "S")],
    types: &[S],
    attrs: &[attr::optional("dtype", AttrKind::Int)],
    infer: |cx| {
        // `TensorProto.DataType.FLOAT`, the standard's default.
        let code = cx.attrs.find_int("dtype").unwrap_or(1);
        let dtype = i32::try_from(code).ok().and_then(DType::from_onnx);
        let dtype = dtype.ok_or_else(|| error!(InvalidGraph, "dtype {code} is not an element type"))?;
        cx.set_type(0, sequence_of(ValueType::tensor(dtype, None)));
        Ok(())
    },
    ..OP
};

static SEQUENCE_AT: OpSpec = OpSpec {
    name: "SequenceAt",
    grad: Grad::None("it takes apart or makes a sequence that only the run knows"),
    since: 11,
    first: 11,
    inputs: &[one("input_sequence", "S"), one("position", "I")],
    outputs: &[one("tensor", "T")],
    types: &[S, var("T", CONTAINED), var("I", POSITION)],
    infer: |cx| {
        // Elements may differ in size, so the result gets symbols of its own.
        let element = outside(&element_type(cx, 0));
        cx.set_type(0, element);
        Ok(())
    },
    ..OP
};

static SEQUENCE_INSERT: OpSpec = OpSpec {
    name: "SequenceInsert",
    grad: Grad::None("it takes apart or makes a sequence that only the run knows"),
    since: 11,
    first: 11,
    inputs: &[one("input_sequence", "S"), one("tensor", "T"), opt("position", "I")],
    outputs: &[one("output_sequence", "S")],
    types: &[var("T", CONTAINED), S, var("I", POSITION)],
    infer: |cx| {
        let element = merge(&element_type(cx, 0), cx.input_type(1).unwrap_or(&ValueType::Unknown))?;
        cx.set_type(0, sequence_of(element));
        Ok(())
    },
    ..OP
};

static SEQUENCE_ERASE: OpSpec = OpSpec {
    name: "SequenceErase",
    grad: Grad::None("it takes apart or makes a sequence that only the run knows"),
    since: 11,
    first: 11,
    inputs: &[one("input_sequence", "S"), opt("position", "I")],
    outputs: &[one("output_sequence", "S")],
    types: &[S, var("I", POSITION)],
    infer: |cx| {
        let element = element_type(cx, 0);
        cx.set_type(0, sequence_of(element));
        Ok(())
    },
    ..OP
};

static SEQUENCE_LENGTH: OpSpec = OpSpec {
    name: "SequenceLength",
    since: 11,
    first: 11,
    inputs: &[one("input_sequence", "S")],
    outputs: &[one("length", "I")],
    types: &[S, var("I", TypeSet::of(&[DType::I64]))],
    infer: length,
    ..OP
};

ops![SEQUENCE_CONSTRUCT, SEQUENCE_EMPTY, SEQUENCE_AT, SEQUENCE_INSERT, SEQUENCE_ERASE, SEQUENCE_LENGTH];

fn length(cx: &mut InferCx<'_>) -> Result<()> {
    cx.set_shape(0, Vec::new())
}
