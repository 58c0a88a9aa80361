//! Text operators: `Tokenizer`, which splits strings into tokens, and `MurmurHash3`, which hashes
//! elements.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, Grad, InferCx, MICROSOFT, OP, OpSpec, attr, one, var};
use crate::{Result, ensure};

static TOKENIZER: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "Tokenizer",
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::of(&[DType::String]))],
    attrs: &[
        attr::required("mark", AttrKind::Int),
        attr::required("mincharnum", AttrKind::Int),
        attr::required("pad_value", AttrKind::String),
        attr::optional("separators", AttrKind::Strings),
        attr::optional("tokenexp", AttrKind::String),
    ],
    infer: infer_tokenizer,
    ..OP
};

static MURMUR_HASH_3: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "MurmurHash3",
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2")],
    types: &[
        var(
            "T1",
            TypeSet::of(&[
                DType::I32,
                DType::U32,
                DType::I64,
                DType::U64,
                DType::F32,
                DType::F64,
                DType::String,
            ]),
        ),
        var("T2", TypeSet::of(&[DType::I32, DType::U32])),
    ],
    attrs: &[attr::int("positive", 1), attr::int("seed", 0)],
    grad: Grad::Zero("a hash is a whole number"),
    infer: infer_hash,
    ..OP
};

ops![TOKENIZER, MURMUR_HASH_3];

fn infer_tokenizer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(
        matches!(shape.len(), 1 | 2),
        InvalidGraph,
        "Tokenizer takes rank 1 or 2, got rank {}",
        shape.len()
    );
    // The last axis is the largest token count of a string, which depends on the data.
    let shape = shape.iter().cloned().chain([Dim::unknown()]).collect();
    cx.set_shape(0, shape)
}

fn infer_hash(cx: &mut InferCx<'_>) -> Result<()> {
    let dtype = if cx.attrs.int("positive")? == 1 { DType::U32 } else { DType::I32 };
    let shape = cx.shape(0).map(<[_]>::to_vec);
    cx.set(0, dtype, shape);
    Ok(())
}
