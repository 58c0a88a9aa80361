//! `TreeEnsemble`: aggregates the leaf weights of decision trees.

use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ops;
use crate::spec::{AttrKind, InferCx, ONNX_ML, OP, OpSpec, attr, one, var};
use crate::{Result, error};

static TREE_ENSEMBLE: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "TreeEnsemble",
    since: 5,
    first: 5,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::IEEE_FLOATS)],
    attrs: &[
        attr::int("aggregate_function", 1),
        attr::int("post_transform", 0),
        attr::required("tree_roots", AttrKind::Ints),
        attr::optional("nodes_hitrates", AttrKind::Tensor),
        attr::optional("nodes_missing_value_tracks_true", AttrKind::Ints),
        attr::required("nodes_modes", AttrKind::Tensor),
        attr::required("leaf_weights", AttrKind::Tensor),
        attr::required("leaf_targetids", AttrKind::Ints),
        attr::required("nodes_falsenodeids", AttrKind::Ints),
        attr::optional("n_targets", AttrKind::Int),
        attr::required("nodes_trueleafs", AttrKind::Ints),
        attr::required("nodes_featureids", AttrKind::Ints),
        attr::required("nodes_splits", AttrKind::Tensor),
        attr::required("nodes_falseleafs", AttrKind::Ints),
        attr::required("nodes_truenodeids", AttrKind::Ints),
        attr::optional("membership_values", AttrKind::Tensor),
    ],
    infer,
    ..OP
};

ops![TREE_ENSEMBLE];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let [rows, _] = shape else {
        return Err(error!(InvalidGraph, "TreeEnsemble takes rank 2, got rank {}", shape.len()));
    };
    // Without `n_targets` the number of targets follows from the largest target id.
    let named = || cx.attrs.find_ints("leaf_targetids")?.iter().max()?.checked_add(1);
    let targets = cx.attrs.find_int("n_targets").or_else(named).filter(|&targets| targets >= 0);
    let targets = targets.ok_or_else(|| error!(InvalidGraph, "TreeEnsemble has no targets"))?;
    cx.set_shape(0, vec![rows.clone(), Dim::constant(targets)])
}
