//! `NonMaxSuppression`: the best-scored boxes that do not overlap better ones.

use crate::Result;
use crate::dtype::DType;
use crate::ops;
use crate::spec::{InferCx, OP, OpSpec, attr, one, opt};

static NON_MAX_SUPPRESSION: OpSpec = OpSpec {
    name: "NonMaxSuppression",
    since: 11,
    first: 10,
    inputs: &[
        one("boxes", "tensor(float)"),
        one("scores", "tensor(float)"),
        opt("max_output_boxes_per_class", "tensor(int64)"),
        opt("iou_threshold", "tensor(float)"),
        opt("score_threshold", "tensor(float)"),
    ],
    outputs: &[one("selected_indices", "tensor(int64)")],
    attrs: &[attr::int("center_point_box", 0)],
    infer,
    ..OP
};

ops![NON_MAX_SUPPRESSION];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    // The number of boxes depends on the data; each is (batch, class, box).
    let selected = cx.fresh();
    cx.set(0, DType::I64, Some(vec![selected, 3.into()]));
    Ok(())
}
