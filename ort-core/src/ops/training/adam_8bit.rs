//! `AdamW8bit`: AdamW with 8-bit quantized moments.
//!
//! Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022. Each block of 256 elements
//! of the flattened parameter has one scale, the largest magnitude. Quantized values index a table
//! of dynamic numbers, from -1 to 1 for the first moment and from 0 to 1 for the second. States
//! start as zeros.

use super::adam::check_moments;
use super::step::{
    GRADIENT, LEARNING_RATE, PARAMETER, SCALE, STEP, TYPES, UPDATE, check_shape, infer_step, same_shapes,
};
use crate::Result;
use crate::dim::Dim;
use crate::ops;
use crate::spec::{InferCx, OP, OpSpec, Param, RUNTIME, attr, one};

/// The number of elements per scale.
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
    // A parameter of symbolic sizes has a number of scales that only the run knows.
    let scales = cx.shape(0).and_then(scale_count).map_or_else(|| cx.fresh(), Dim::constant);
    let whose = "of one scale for each 256 elements of the parameter";
    check_shape(cx, 7, FIRST_SCALES.name, std::slice::from_ref(&scales), whose)?;
    check_shape(cx, 9, SECOND_SCALES.name, &[scales], whose)
}

/// Returns the number of scales of a parameter of this shape, if its dimensions are constants.
fn scale_count(shape: &[Dim]) -> Option<i64> {
    let count = shape.iter().map(Dim::as_constant).try_fold(1i64, |count, size| count.checked_mul(size?))?;
    i64::try_from(usize::try_from(count).ok()?.div_ceil(ADAM_8BIT_BLOCK)).ok()
}
