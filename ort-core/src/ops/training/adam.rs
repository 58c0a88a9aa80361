//! `AdamW`: Adam with decoupled weight decay (Loshchilov & Hutter, 2019).
//!
//! One record has the three variants that frameworks have.

use super::step::{
    FIRST_ROW, GRADIENT, LEARNING_RATE, PARAMETER, POSITIVE, SCALE, SHARE, STEP, StepPen, TYPES, UPDATE,
    check_range, infer_step, same_shapes,
};
use crate::ir::{Attributes, ValueId};
use crate::ops;
use crate::spec::{Draft, InferCx, OP, OpSpec, Param, RUNTIME, attr, one};
use crate::{Result, unknown_name};

pub(super) const INPUTS: &[Param] = &[
    PARAMETER,
    GRADIENT,
    LEARNING_RATE,
    SCALE,
    UPDATE,
    STEP,
    one("first_moment", "T"),
    one("second_moment", "T"),
];
/// The input indices of the moments, in all kinds of Adam.
pub(super) const FIRST: usize = 6;
pub(super) const SECOND: usize = 7;

pub(super) const MOMENTS: &[Param] = &[PARAMETER, one("first_moment", "T"), one("second_moment", "T")];

static ADAM_W: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "AdamW",
    inputs: INPUTS,
    outputs: MOMENTS,
    types: TYPES,
    attrs: &[
        attr::float("beta1", 0.9),
        attr::float("beta2", 0.999),
        attr::float("epsilon", 1e-8),
        attr::float("weight_decay", 0.01),
        attr::string("mode", "torch"),
        attr::int("correct_bias", 1),
        FIRST_ROW,
    ],
    infer,
    lower: Some(lower),
    ..OP
};

ops![ADAM_W];

/// Where weight decay and epsilon enter a step of Adam.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdamMode {
    /// `torch.optim.AdamW`: the parameter decays first, and epsilon is added to the bias-corrected
    /// root.
    Torch,
    /// The former AdamW of transformers, which is mode 1 of ONNX Runtime: epsilon is added to the
    /// uncorrected root, and the parameter decays last.
    HuggingFace,
    /// `torch.optim.Adam`: the decay is part of the gradient (L2 regularization).
    Adam,
}

impl AdamMode {
    /// Parses the attribute `mode`.
    ///
    /// # Errors
    ///
    /// If the name is not `torch`, `huggingface` or `adam`.
    pub fn of(attrs: &Attributes) -> Result<AdamMode> {
        match attrs.string("mode")? {
            "torch" => Ok(AdamMode::Torch),
            "huggingface" => Ok(AdamMode::HuggingFace),
            "adam" => Ok(AdamMode::Adam),
            other => Err(unknown_name("mode", other, &["torch", "huggingface", "adam"])),
        }
    }
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    AdamMode::of(cx.attrs)?;
    check_moments(cx.attrs)?;
    infer_step(cx, INPUTS, &[FIRST, SECOND])?;
    same_shapes(cx, INPUTS, &[FIRST, SECOND])
}

/// Checks the ranges of the attributes that all kinds of Adam have.
pub(super) fn check_moments(attrs: &Attributes) -> Result<()> {
    check_range(attrs, "beta1", SHARE)?;
    check_range(attrs, "beta2", SHARE)?;
    check_range(attrs, "epsilon", POSITIVE)?;
    check_range(attrs, "weight_decay", POSITIVE)
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let mut pen = StepPen::new(draft)?;
    let mode = AdamMode::of(&pen.attrs)?;
    let (mut parameter, mut gradient) = (pen.tensor(0)?, pen.gradient()?);
    let (rate, decay) = (pen.rate()?, pen.attr("weight_decay")?);
    // L2 regularization passes through the moments, decoupled decay does not.
    if mode == AdamMode::Adam && decay != 0.0 {
        let decayed = pen.times(parameter, decay)?;
        gradient = pen.op("Add", &[gradient, decayed])?;
    }
    if mode == AdamMode::Torch {
        parameter = pen.decayed(parameter, decay)?;
    }
    let (first, second) = moments(&mut pen, gradient)?;
    let (beta1, beta2, epsilon) = (pen.attr("beta1")?, pen.attr("beta2")?, pen.attr("epsilon")?);
    let (bias1, bias2) = (pen.bias(beta1)?, pen.bias(beta2)?);
    let (root, bias_root) = (pen.op("Sqrt", &[second])?, pen.op("Sqrt", &[bias2])?);
    // Torch: lr / bias1 is the step size, sqrt(v) / sqrt(bias2) + epsilon the denominator.
    let size = pen.op("Div", &[rate, bias1])?;
    let (size, denominator) = match mode {
        // Correcting the step size instead of the root leaves epsilon uncorrected.
        AdamMode::HuggingFace => (pen.op("Mul", &[size, bias_root])?, root),
        _ => {
            let bias_root = pen.narrow(bias_root)?;
            (size, pen.op("Div", &[root, bias_root])?)
        }
    };
    let (size, denominator) = (pen.narrow(size)?, pen.plus(denominator, epsilon)?);
    let change = pen.op("Mul", &[size, first])?;
    let change = pen.op("Div", &[change, denominator])?;
    let mut new = pen.op("Sub", &[parameter, change])?;
    if mode == AdamMode::HuggingFace {
        new = pen.decayed(new, decay)?;
    }
    pen.finish(&[(0, new), (FIRST, first), (SECOND, second)])
}

/// The new moments: `beta1 * m + (1 - beta1) * g` and `beta2 * v + (1 - beta2) * g * g`. The first
/// interpolates from the nearer end.
pub(super) fn moments(pen: &mut StepPen<'_, '_>, gradient: ValueId) -> Result<(ValueId, ValueId)> {
    let (first, second) = (pen.tensor(FIRST)?, pen.tensor(SECOND)?);
    let (beta1, beta2) = (pen.attr("beta1")?, pen.attr("beta2")?);
    let way = pen.op("Sub", &[gradient, first])?;
    let first = if beta1 > 0.5 {
        let way = pen.times(way, 1.0 - beta1)?;
        pen.op("Add", &[first, way])?
    } else {
        let way = pen.times(way, beta1)?;
        pen.op("Sub", &[gradient, way])?
    };
    let (kept, added) = (pen.times(second, beta2)?, pen.times(gradient, 1.0 - beta2)?);
    let added = pen.op("Mul", &[added, gradient])?;
    Ok((first, pen.op("Add", &[kept, added])?))
}
