//! Support vector machines: `SVMClassifier` and `SVMRegressor`.

use super::{LABELS, NUMBERS, class_labels, rows, set_classes};
use crate::Result;
use crate::dim::Dim;
use crate::ops;
use crate::spec::{AttrKind, InferCx, ONNX_ML, OP, OpSpec, attr, one, var};

static SVM_CLASSIFIER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "SVMClassifier",
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2"), one("Z", "tensor(float)")],
    types: &[var("T1", NUMBERS), var("T2", LABELS)],
    attrs: &[
        attr::optional("classlabels_ints", AttrKind::Ints),
        attr::optional("rho", AttrKind::Floats),
        attr::optional("prob_b", AttrKind::Floats),
        attr::optional("coefficients", AttrKind::Floats),
        attr::optional("classlabels_strings", AttrKind::Strings),
        attr::optional("prob_a", AttrKind::Floats),
        attr::optional("support_vectors", AttrKind::Floats),
        attr::optional("vectors_per_class", AttrKind::Ints),
        attr::string("post_transform", "NONE"),
        attr::optional("kernel_params", AttrKind::Floats),
        attr::string("kernel_type", "LINEAR"),
    ],
    infer: infer_classifier,
    ..OP
};

static SVM_REGRESSOR: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "SVMRegressor",
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "tensor(float)")],
    types: &[var("T", NUMBERS)],
    attrs: &[
        attr::optional("rho", AttrKind::Floats),
        attr::optional("coefficients", AttrKind::Floats),
        attr::int("n_supports", 0),
        attr::int("one_class", 0),
        attr::optional("support_vectors", AttrKind::Floats),
        attr::string("post_transform", "NONE"),
        attr::optional("kernel_params", AttrKind::Floats),
        attr::string("kernel_type", "LINEAR"),
    ],
    infer: infer_regressor,
    ..OP
};

ops![SVM_CLASSIFIER, SVM_REGRESSOR];

/// Infers the scores: a column for each class. With support vectors but without probabilities, a
/// multiclass machine returns its decision functions instead, one for each pair of classes.
fn infer_classifier(cx: &mut InferCx<'_>) -> Result<()> {
    let (dtype, labels) = class_labels(cx.attrs, "classlabels_ints", "classlabels_strings")?;
    let supports =
        cx.attrs.find_ints("vectors_per_class").is_some_and(|counts| counts.iter().any(|&n| n > 0));
    let probabilities = cx.attrs.find_floats("prob_a").is_some_and(|a| !a.is_empty());
    let columns = match (supports && !probabilities, labels) {
        (false, labels) => labels,
        (true, 0..=2) => 2,
        // One-against-one classification trains a function for each pair.
        (true, labels) => labels.saturating_mul(labels - 1) / 2,
    };
    set_classes(cx, dtype, columns)
}

fn infer_regressor(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(rows) = rows(cx)? else { return Ok(()) };
    cx.set_shape(0, vec![rows, Dim::constant(1)])
}
