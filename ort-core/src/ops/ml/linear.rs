//! Linear models: `LinearClassifier` and `LinearRegressor`.

use super::{LABELS, NUMBERS, class_labels, rows, set_classes};
use crate::dim::Dim;
use crate::ops;
use crate::spec::{AttrKind, InferCx, ONNX_ML, OP, OpSpec, attr, one, var};
use crate::{Result, ensure};

static LINEAR_CLASSIFIER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "LinearClassifier",
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2"), one("Z", "tensor(float)")],
    types: &[var("T1", NUMBERS), var("T2", LABELS)],
    attrs: &[
        attr::string("post_transform", "NONE"),
        attr::optional("classlabels_ints", AttrKind::Ints),
        attr::optional("classlabels_strings", AttrKind::Strings),
        attr::int("multi_class", 0),
        attr::optional("intercepts", AttrKind::Floats),
        attr::required("coefficients", AttrKind::Floats),
    ],
    infer: infer_classifier,
    ..OP
};

static LINEAR_REGRESSOR: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "LinearRegressor",
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "tensor(float)")],
    types: &[var("T", NUMBERS)],
    attrs: &[
        attr::int("targets", 1),
        attr::optional("intercepts", AttrKind::Floats),
        attr::optional("coefficients", AttrKind::Floats),
        attr::string("post_transform", "NONE"),
    ],
    infer: infer_regressor,
    ..OP
};

ops![LINEAR_CLASSIFIER, LINEAR_REGRESSOR];

fn infer_classifier(cx: &mut InferCx<'_>) -> Result<()> {
    let (dtype, labels) = class_labels(cx.attrs, "classlabels_ints", "classlabels_strings")?;
    // The number of decision functions is that of the intercepts, or of the labels without any. A
    // single function for two labels is a binary classifier: it scores the second label, and the
    // output still has two columns.
    let functions = cx.attrs.find_floats("intercepts").map_or(labels, <[f32]>::len).max(1);
    let columns = if functions == 1 && labels == 2 { 2 } else { functions };
    set_classes(cx, dtype, columns)
}

fn infer_regressor(cx: &mut InferCx<'_>) -> Result<()> {
    let targets = cx.attrs.int("targets")?;
    ensure!(targets > 0, InvalidGraph, "'targets' is {targets}, expected 1 or more");
    let Some(rows) = rows(cx)? else { return Ok(()) };
    cx.set_shape(0, vec![rows, Dim::constant(targets)])
}
