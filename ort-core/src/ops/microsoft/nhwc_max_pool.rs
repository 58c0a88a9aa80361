//! `NhwcMaxPool`: max pooling of 8-bit quantized images in NHWC layout.

use super::qlinear::CODES;
use crate::ops;
use crate::ops::batch;
use crate::ops::fused::nhwc::{infer_pool, lower_pool};
use crate::ops::nn::pool::NHWC_MAX_POOL_ATTRS;
use crate::spec::{BatchRule, MICROSOFT, OP, OpSpec, one, var};

static NHWC_MAX_POOL: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "NhwcMaxPool",
    inputs: &[one("x", "T")],
    outputs: &[one("y", "T")],
    types: &[var("T", CODES)],
    attrs: NHWC_MAX_POOL_ATTRS,
    infer: infer_pool,
    lower: Some(|draft| lower_pool(draft, "MaxPool")),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

ops![NHWC_MAX_POOL];
