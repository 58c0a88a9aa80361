//! Tree ensembles of the older form: `TreeEnsembleClassifier` and `TreeEnsembleRegressor`.
//!
//! `TreeEnsemble` supersedes them, but has no place for labels and base values, so they stay
//! operators of their own.

use super::{LABELS, NUMBERS, class_labels, rows, set_classes};
use crate::dim::Dim;
use crate::ops;
use crate::spec::{AttrKind, AttrSpec, InferCx, ONNX_ML, OP, OpSpec, attr, one, var};
use crate::{Result, error};

static TREE_ENSEMBLE_CLASSIFIER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "TreeEnsembleClassifier",
    since: 3,
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2"), one("Z", "tensor(float)")],
    types: &[var("T1", NUMBERS), var("T2", LABELS)],
    attrs: &[
        attr::string("post_transform", "NONE"),
        attr::optional("classlabels_int64s", AttrKind::Ints),
        attr::optional("classlabels_strings", AttrKind::Strings),
        attr::optional("class_ids", AttrKind::Ints),
        attr::optional("class_nodeids", AttrKind::Ints),
        attr::optional("class_treeids", AttrKind::Ints),
        attr::optional("class_weights", AttrKind::Floats),
        attr::optional("class_weights_as_tensor", AttrKind::Tensor),
        NODES[0],
        NODES[1],
        NODES[2],
        NODES[3],
        NODES[4],
        NODES[5],
        NODES[6],
        NODES[7],
        NODES[8],
        NODES[9],
        NODES[10],
        NODES[11],
        NODES[12],
    ],
    infer: infer_classifier,
    ..OP
};

static TREE_ENSEMBLE_REGRESSOR: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "TreeEnsembleRegressor",
    since: 3,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "tensor(float)")],
    types: &[var("T", NUMBERS)],
    attrs: &[
        attr::string("aggregate_function", "SUM"),
        attr::string("post_transform", "NONE"),
        attr::optional("n_targets", AttrKind::Int),
        attr::optional("target_ids", AttrKind::Ints),
        attr::optional("target_nodeids", AttrKind::Ints),
        attr::optional("target_treeids", AttrKind::Ints),
        attr::optional("target_weights", AttrKind::Floats),
        attr::optional("target_weights_as_tensor", AttrKind::Tensor),
        NODES[0],
        NODES[1],
        NODES[2],
        NODES[3],
        NODES[4],
        NODES[5],
        NODES[6],
        NODES[7],
        NODES[8],
        NODES[9],
        NODES[10],
        NODES[11],
        NODES[12],
    ],
    infer: infer_regressor,
    ..OP
};

ops![TREE_ENSEMBLE_CLASSIFIER, TREE_ENSEMBLE_REGRESSOR];

/// The attributes of the nodes and of the base values, with which the sums start.
const NODES: [AttrSpec; 13] = [
    attr::optional("nodes_treeids", AttrKind::Ints),
    attr::optional("nodes_nodeids", AttrKind::Ints),
    attr::optional("nodes_featureids", AttrKind::Ints),
    attr::optional("nodes_values", AttrKind::Floats),
    attr::optional("nodes_values_as_tensor", AttrKind::Tensor),
    attr::optional("nodes_hitrates", AttrKind::Floats),
    attr::optional("nodes_hitrates_as_tensor", AttrKind::Tensor),
    attr::optional("nodes_modes", AttrKind::Strings),
    attr::optional("nodes_truenodeids", AttrKind::Ints),
    attr::optional("nodes_falsenodeids", AttrKind::Ints),
    attr::optional("nodes_missing_value_tracks_true", AttrKind::Ints),
    attr::optional("base_values", AttrKind::Floats),
    attr::optional("base_values_as_tensor", AttrKind::Tensor),
];

fn infer_classifier(cx: &mut InferCx<'_>) -> Result<()> {
    let (dtype, labels) = class_labels(cx.attrs, "classlabels_int64s", "classlabels_strings")?;
    set_classes(cx, dtype, labels)
}

fn infer_regressor(cx: &mut InferCx<'_>) -> Result<()> {
    // Without `n_targets` the number of targets follows from the largest target id.
    let named = || cx.attrs.find_ints("target_ids")?.iter().max()?.checked_add(1);
    let targets = cx.attrs.find_int("n_targets").or_else(named).filter(|&targets| targets > 0);
    let targets = targets.ok_or_else(|| error!(InvalidGraph, "there are no targets; give 'n_targets'"))?;
    let Some(rows) = rows(cx)? else { return Ok(()) };
    cx.set_shape(0, vec![rows, Dim::constant(targets)])
}
