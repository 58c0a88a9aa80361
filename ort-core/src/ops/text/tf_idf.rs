//! N-gram counts: `TfIdfVectorizer`.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, InferCx, OP, OpSpec, attr, one, var};
use crate::{Result, error};

static TF_IDF_VECTORIZER: OpSpec = OpSpec {
    name: "TfIdfVectorizer",
    since: 9,
    first: 9,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T1")],
    types: &[
        var("T", TypeSet::of(&[DType::I32, DType::I64, DType::String])),
        var("T1", TypeSet::of(&[DType::F32])),
    ],
    attrs: &[
        attr::required("mode", AttrKind::String),
        attr::required("ngram_indexes", AttrKind::Ints),
        attr::optional("weights", AttrKind::Floats),
        attr::required("ngram_counts", AttrKind::Ints),
        attr::optional("pool_int64s", AttrKind::Ints),
        attr::optional("pool_strings", AttrKind::Strings),
        attr::required("max_skip_count", AttrKind::Int),
        attr::required("min_gram_length", AttrKind::Int),
        attr::required("max_gram_length", AttrKind::Int),
    ],
    infer,
    ..OP
};

ops![TF_IDF_VECTORIZER];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    // Each n-gram names its output column, so the largest index determines the width.
    let last = cx.attrs.ints("ngram_indexes")?.iter().max().copied().unwrap_or(-1);
    let width = last.checked_add(1).filter(|&width| width >= 0);
    let width = Dim::constant(width.ok_or_else(|| error!(InvalidGraph, "ngram_indexes are out of range"))?);
    match cx.shape(0) {
        None => Ok(()),
        Some([] | [_]) => cx.set_shape(0, vec![width]),
        Some([rows, _]) => cx.set_shape(0, vec![rows.clone(), width]),
        Some(shape) => {
            Err(error!(InvalidGraph, "TfIdfVectorizer takes rank 1 or 2, got rank {}", shape.len()))
        }
    }
}
