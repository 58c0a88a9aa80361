//! `NhwcMaxPool`: the greatest codes of windows, with the channels of the image last.

use super::qlinear::CODES;
use crate::ops;
use crate::ops::batch;
use crate::ops::fused::nhwc::{infer_pool, lower_pool};
use crate::spec::{AttrKind, BatchRule, MICROSOFT, OP, OpSpec, attr, one, var};

static NHWC_MAX_POOL: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "NhwcMaxPool",
    inputs: &[one("x", "T")],
    outputs: &[one("y", "T")],
    types: &[var("T", CODES)],
    attrs: &[
        attr::string("auto_pad", "NOTSET"),
        attr::int("ceil_mode", 0),
        attr::optional("dilations", AttrKind::Ints),
        attr::required("kernel_shape", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
    ],
    infer: infer_pool,
    lower: Some(|draft| lower_pool(draft, "MaxPool")),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

ops![NHWC_MAX_POOL];
