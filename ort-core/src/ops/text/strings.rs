//! String normalization, concatenation, splitting and matching.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, InferCx, OP, OpSpec, attr, one, var};
use crate::{Result, ensure};

const STRINGS: TypeSet = TypeSet::of(&[DType::String]);

static STRING_NORMALIZER: OpSpec = OpSpec {
    name: "StringNormalizer",
    since: 10,
    first: 10,
    inputs: &[one("X", "tensor(string)")],
    outputs: &[one("Y", "tensor(string)")],
    attrs: &[
        attr::optional("stopwords", AttrKind::Strings),
        attr::optional("locale", AttrKind::String),
        attr::int("is_case_sensitive", 0),
        attr::string("case_change_action", "NONE"),
    ],
    infer: normalize,
    ..OP
};

static STRING_CONCAT: OpSpec = OpSpec {
    name: "StringConcat",
    since: 20,
    first: 20,
    inputs: &[one("X", "T"), one("Y", "T")],
    outputs: &[one("Z", "T")],
    types: &[var("T", STRINGS)],
    infer: |cx| match cx.broadcast(&[0, 1])? {
        Some(shape) => cx.set_shape(0, shape),
        None => Ok(()),
    },
    ..OP
};

static STRING_SPLIT: OpSpec = OpSpec {
    name: "StringSplit",
    since: 20,
    first: 20,
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2"), one("Z", "T3")],
    types: &[var("T1", STRINGS), var("T2", STRINGS), var("T3", TypeSet::of(&[DType::I64]))],
    attrs: &[attr::optional("maxsplit", AttrKind::Int), attr::optional("delimiter", AttrKind::String)],
    infer: split,
    ..OP
};

static REGEX_FULL_MATCH: OpSpec = OpSpec {
    name: "RegexFullMatch",
    since: 20,
    first: 20,
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2")],
    types: &[var("T1", STRINGS), var("T2", TypeSet::of(&[DType::Bool]))],
    attrs: &[attr::optional("pattern", AttrKind::String)],
    infer: |cx| match cx.shape(0) {
        Some(shape) => cx.set_shape(0, shape.to_vec()),
        None => Ok(()),
    },
    ..OP
};

ops![STRING_NORMALIZER, STRING_CONCAT, STRING_SPLIT, REGEX_FULL_MATCH];

fn normalize(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(
        matches!(shape.len(), 1 | 2),
        InvalidGraph,
        "StringNormalizer takes rank 1 or 2, got rank {}",
        shape.len()
    );
    // Stop words are dropped, so the number of strings depends on the data.
    let mut shape = shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = Dim::unknown();
    }
    cx.set_shape(0, shape)
}

fn split(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let mut parts = shape.to_vec();
    // The number of parts depends on the data; shorter rows are padded to the longest.
    parts.push(Dim::unknown());
    cx.set_shape(0, parts)?;
    cx.set_shape(1, shape.to_vec())
}
