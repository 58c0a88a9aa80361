//! `AdamW8bit`: AdamW whose moments are kept as codes of 8 bits (Dettmers et al., 8-bit Optimizers
//! via Block-wise Quantization, 2022).
//!
//! Each 256 elements of the flattened parameter have one scale, the greatest magnitude; codes stand
//! for dynamic numbers from -1 to 1 for the first moment and from 0 to 1 for the second. Zeros are
//! the states at first.

use super::adam::check_moments;
use super::step::{
    GRADIENT, LEARNING_RATE, PARAMETER, SCALE, STEP, TYPES, UPDATE, check_shape, infer_step, same_shapes,
};
use crate::Result;
use crate::dim::Dim;
use crate::ops;
use crate::spec::{InferCx, OP, OpSpec, Param, RUNTIME, attr, one};

/// Elements of a scale.
pub const ADAM_8BIT_BLOCK: usize = 256;

const FIRST_CODES: Param = one("first_codes", "tensor(uint8)");
const FIRST_SCALES: Param = one("first_scales", "tensor(float)");
const SECOND_CODES: Param = one("second_codes", "tensor(uint8)");
const SECOND_SCALES: Param = one("second_scales", "tensor(float)");
const INPUTS: &[Param] = &[
    PARAMETER,
    GRADIENT,
    LEARNING_RATE,
    SCALE,
    UPDATE,
    STEP,
    FIRST_CODES,
    FIRST_SCALES,
    SECOND_CODES,
    SECOND_SCALES,
];

static ADAM_W_8BIT: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "AdamW8bit",
    inputs: INPUTS,
    outputs: &[PARAMETER, FIRST_CODES, FIRST_SCALES, SECOND_CODES, SECOND_SCALES],
    types: TYPES,
    attrs: &[
        attr::float("beta1", 0.9),
        attr::float("beta2", 0.999),
        attr::float("epsilon", 1e-8),
        attr::float("weight_decay", 0.01),
        attr::int("correct_bias", 1),
    ],
    infer,
    ..OP
};

ops![ADAM_W_8BIT];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    check_moments(cx.attrs)?;
    infer_step(cx, INPUTS, &[6, 7, 8, 9])?;
    same_shapes(cx, INPUTS, &[6, 8])?;
    let scales = cx.shape(0).and_then(scale_count).map_or_else(|| cx.fresh(), Dim::constant);
    let whose = "of one scale for each 256 elements of the parameter";
    check_shape(cx, 7, FIRST_SCALES.name, std::slice::from_ref(&scales), whose)?;
    check_shape(cx, 9, SECOND_SCALES.name, &[scales], whose)
}

/// How many scales a parameter of this shape has, where its sizes are numbers.
fn scale_count(shape: &[Dim]) -> Option<i64> {
    let count = shape.iter().map(Dim::as_constant).try_fold(1i64, |count, size| count.checked_mul(size?))?;
    i64::try_from(usize::try_from(count).ok()?.div_ceil(ADAM_8BIT_BLOCK)).ok()
}
