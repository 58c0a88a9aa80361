//! Optimizers: one node per parameter, which updates the parameter and its state in place.

use std::fmt;

use ort_core::dtype::DType;
use ort_core::ir::{Attribute, GraphBuilder, ValueId, ValueType};
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure};
use serde::{Deserialize, Serialize};

/// The form of weight decay in Adam.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdamForm {
    /// `torch.optim.Adam`: L2 regularization, where the decay is part of the gradient.
    Adam,
    /// `torch.optim.AdamW` (Loshchilov & Hutter 2019): decoupled decay, before the update.
    Torch,
    /// The AdamW of Hugging Face's `transformers` and of ONNX Runtime's `adam_mode` 1: decoupled
    /// decay, after the update.
    HuggingFace,
}

/// The rule that updates parameters from their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[allow(
    missing_docs,
    reason = "the fields are the optimizers' own, by the names that papers and PyTorch have for them"
)]
pub enum Optimizer {
    /// Stochastic gradient descent, with momentum if `momentum` is above 0.
    Sgd { momentum: f32, nesterov: bool, weight_decay: f32 },
    /// Adam (Kingma & Ba 2015) and AdamW.
    Adam { beta1: f32, beta2: f32, epsilon: f32, weight_decay: f32, correct_bias: bool, form: AdamForm },
    /// AdamW with 8-bit moments, quantized in blocks (Dettmers et al. 2022).
    AdamW8bit { beta1: f32, beta2: f32, epsilon: f32, weight_decay: f32 },
    /// LAMB (You et al. 2020).
    Lamb { beta1: f32, beta2: f32, epsilon: f32, weight_decay: f32 },
    /// Adafactor (Shazeer & Stern 2018): the second moment of a matrix is factored into a row and a
    /// column.
    Adafactor { beta2_decay: f32, clip_threshold: f32, weight_decay: f32 },
}

impl fmt::Display for Optimizer {
    /// Writes the name and the hyperparameters, as in `SGD (momentum 0.9, nesterov false,
    /// weight decay 0)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Optimizer::Sgd { momentum, nesterov, weight_decay } => {
                write!(f, "SGD (momentum {momentum}, nesterov {nesterov}, weight decay {weight_decay})")
            }
            Optimizer::Adam { beta1, beta2, epsilon, weight_decay, correct_bias, form } => {
                let name = match form {
                    AdamForm::Adam => "Adam",
                    AdamForm::Torch => "AdamW",
                    AdamForm::HuggingFace => "AdamW of Hugging Face",
                };
                write!(
                    f,
                    "{name} (beta1 {beta1}, beta2 {beta2}, epsilon {epsilon}, weight decay {weight_decay}, \
                     bias correction {correct_bias})"
                )
            }
            Optimizer::AdamW8bit { beta1, beta2, epsilon, weight_decay } => write!(
                f,
                "8-bit AdamW (beta1 {beta1}, beta2 {beta2}, epsilon {epsilon}, weight decay {weight_decay})"
            ),
            Optimizer::Lamb { beta1, beta2, epsilon, weight_decay } => {
                write!(
                    f,
                    "LAMB (beta1 {beta1}, beta2 {beta2}, epsilon {epsilon}, weight decay {weight_decay})"
                )
            }
            Optimizer::Adafactor { beta2_decay, clip_threshold, weight_decay } => write!(
                f,
                "Adafactor (beta2 decay {beta2_decay}, clip threshold {clip_threshold}, weight decay \
                 {weight_decay})"
            ),
        }
    }
}

/// A tensor of optimizer state of one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateSpec {
    pub(crate) kind: &'static str,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// The graph values that all updates of a step share.
#[derive(Clone, Copy)]
pub(crate) struct StepValues {
    pub(crate) learning_rate: ValueId,
    /// The factor on gradients.
    pub(crate) scale: Option<ValueId>,
    /// Whether the update is applied. If it is false, parameters and state keep their values.
    pub(crate) update: Option<ValueId>,
    /// The number of the update, counted from 1.
    pub(crate) step: ValueId,
}

/// The elements per block of [`Optimizer::AdamW8bit`]. Each block has one scale.
const BLOCK: usize = 256;

impl Optimizer {
    /// Returns plain stochastic gradient descent.
    pub fn sgd() -> Optimizer {
        Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }

    /// Returns AdamW with the defaults of `torch.optim.AdamW`.
    pub fn adamw() -> Optimizer {
        Optimizer::Adam {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            correct_bias: true,
            form: AdamForm::Torch,
        }
    }

    /// Returns AdamW with the defaults of ONNX Runtime's artifacts: epsilon 1e-6, and no weight
    /// decay, which would come after the update.
    pub fn onnxruntime_adamw() -> Optimizer {
        Optimizer::Adam {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-6,
            weight_decay: 0.0,
            correct_bias: true,
            form: AdamForm::HuggingFace,
        }
    }

    /// Returns Adam with the defaults of `torch.optim.Adam`.
    pub fn adam() -> Optimizer {
        Optimizer::Adam {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            correct_bias: true,
            form: AdamForm::Adam,
        }
    }

    /// Returns the same optimizer without weight decay, which biases and normalization scales
    /// usually skip.
    pub(crate) fn without_decay(mut self) -> Optimizer {
        match &mut self {
            Optimizer::Sgd { weight_decay, .. }
            | Optimizer::Adam { weight_decay, .. }
            | Optimizer::AdamW8bit { weight_decay, .. }
            | Optimizer::Lamb { weight_decay, .. }
            | Optimizer::Adafactor { weight_decay, .. } => *weight_decay = 0.0,
        }
        self
    }

    /// Checks the ranges of the hyperparameters.
    pub(crate) fn check(&self) -> Result<()> {
        let share = |name: &str, number: f32| {
            ensure!(
                (0.0..1.0).contains(&number),
                InvalidArgument,
                "{name} is {number}, expected 0 or more and less than 1"
            );
            Ok(())
        };
        let positive = |name: &str, number: f32| {
            ensure!(
                number.is_finite() && number >= 0.0,
                InvalidArgument,
                "{name} is {number}, expected 0 or more"
            );
            Ok(())
        };
        match *self {
            Optimizer::Sgd { momentum, nesterov, weight_decay } => {
                share("momentum", momentum)?;
                positive("weight_decay", weight_decay)?;
                ensure!(
                    !nesterov || momentum > 0.0,
                    InvalidArgument,
                    help = "give a momentum above 0",
                    "nesterov is set, but momentum is 0"
                );
                Ok(())
            }
            Optimizer::Adam { beta1, beta2, epsilon, weight_decay, .. }
            | Optimizer::AdamW8bit { beta1, beta2, epsilon, weight_decay }
            | Optimizer::Lamb { beta1, beta2, epsilon, weight_decay } => {
                share("beta1", beta1)?;
                share("beta2", beta2)?;
                positive("epsilon", epsilon)?;
                positive("weight_decay", weight_decay)
            }
            Optimizer::Adafactor { beta2_decay, clip_threshold, weight_decay } => {
                ensure!(
                    beta2_decay.is_finite() && beta2_decay <= 0.0,
                    InvalidArgument,
                    "beta2_decay is {beta2_decay}, expected 0 or less"
                );
                ensure!(
                    clip_threshold.is_finite() && clip_threshold > 0.0,
                    InvalidArgument,
                    "clip_threshold is {clip_threshold}, expected more than 0"
                );
                positive("weight_decay", weight_decay)
            }
        }
    }

    /// Returns the state tensors of a parameter, which start at zero.
    pub(crate) fn states(&self, dtype: DType, shape: &[usize]) -> Vec<StateSpec> {
        let like = |kind| StateSpec { kind, dtype, shape: shape.to_vec() };
        let count: usize = shape.iter().product();
        let of = |kind, dtype, shape| StateSpec { kind, dtype, shape };
        match *self {
            // Without momentum, an update depends on the gradient alone.
            Optimizer::Sgd { momentum: 0.0, .. } => Vec::new(),
            Optimizer::Sgd { .. } => vec![like("velocity")],
            Optimizer::Adam { .. } | Optimizer::Lamb { .. } => {
                vec![like("first_moment"), like("second_moment")]
            }
            Optimizer::AdamW8bit { .. } => {
                // The last block may be shorter.
                let scales = vec![count.div_ceil(BLOCK)];
                vec![
                    of("first_codes", DType::U8, shape.to_vec()),
                    of("first_scales", DType::F32, scales.clone()),
                    of("second_codes", DType::U8, shape.to_vec()),
                    of("second_scales", DType::F32, scales),
                ]
            }
            Optimizer::Adafactor { .. } => match shape {
                [rest @ .., rows, columns] => {
                    // [.., rows, 1] and [.., 1, columns]: their outer product has the shape of the
                    // parameter.
                    let with = |sizes: [usize; 2]| rest.iter().copied().chain(sizes).collect();
                    vec![
                        of("row_moment", dtype, with([*rows, 1])),
                        of("column_moment", dtype, with([1, *columns])),
                    ]
                }
                // A vector or scalar has no rows and columns to factor.
                _ => vec![like("second_moment")],
            },
        }
    }

    /// Emits the update of a parameter. Returns the new values of the parameter and of its state.
    pub(crate) fn emit(
        &self,
        builder: &mut GraphBuilder,
        (parameter, gradient): (ValueId, ValueId),
        shared: StepValues,
        states: &[ValueId],
    ) -> Result<Vec<ValueId>> {
        let StepValues { learning_rate, scale, update, step } = shared;
        let mut inputs = vec![Some(parameter), Some(gradient), Some(learning_rate), scale, update];
        // Only optimizers with moments correct a bias that depends on the step.
        if !matches!(self, Optimizer::Sgd { .. }) {
            inputs.push(Some(step));
        }
        // Adafactor lists row and column moments before the full second moment. A vector or scalar
        // has only the latter, so the inputs of the first two are left empty.
        let skipped = matches!(self, Optimizer::Adafactor { .. }) && states.len() == 1;
        inputs.extend(if skipped { vec![None, None] } else { Vec::new() });
        inputs.extend(states.iter().copied().map(Some));
        let outputs = builder.add(
            (RUNTIME, self.operator()),
            &inputs,
            &self.attributes(),
            inputs_kept(states, skipped),
            Vec::new(),
        )?;
        // The moments that are left empty have no outputs either.
        if let Some(node) = builder.graph_mut().nodes.last_mut().filter(|_| skipped) {
            node.outputs.iter_mut().skip(1).take(2).for_each(|output| *output = None);
        }
        Ok(outputs
            .into_iter()
            .enumerate()
            .filter(|(place, _)| !skipped || !(1..3).contains(place))
            .map(|(_, id)| id)
            .collect())
    }

    /// The operator of the runtime's own domain.
    fn operator(&self) -> &'static str {
        match self {
            Optimizer::Sgd { .. } => "SGD",
            Optimizer::Adam { .. } => "AdamW",
            Optimizer::AdamW8bit { .. } => "AdamW8bit",
            Optimizer::Lamb { .. } => "LAMB",
            Optimizer::Adafactor { .. } => "Adafactor",
        }
    }

    /// The attributes of the operator.
    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let float = |name, number| (name, Attribute::Float(number));
        let flag = |name, flag| (name, Attribute::Int(i64::from(flag)));
        match *self {
            Optimizer::Sgd { momentum, nesterov, weight_decay } => {
                vec![
                    float("momentum", momentum),
                    flag("nesterov", nesterov),
                    float("weight_decay", weight_decay),
                ]
            }
            Optimizer::Adam { beta1, beta2, epsilon, weight_decay, correct_bias, form } => {
                let mode = match form {
                    AdamForm::Adam => "adam",
                    AdamForm::Torch => "torch",
                    AdamForm::HuggingFace => "huggingface",
                };
                let mut attrs = moments(beta1, beta2, epsilon, weight_decay);
                attrs.extend([flag("correct_bias", correct_bias), ("mode", Attribute::String(mode.into()))]);
                attrs
            }
            Optimizer::AdamW8bit { beta1, beta2, epsilon, weight_decay }
            | Optimizer::Lamb { beta1, beta2, epsilon, weight_decay } => {
                moments(beta1, beta2, epsilon, weight_decay)
            }
            Optimizer::Adafactor { beta2_decay, clip_threshold, weight_decay } => vec![
                float("beta2_decay", beta2_decay),
                float("clip_threshold", clip_threshold),
                float("weight_decay", weight_decay),
            ],
        }
    }
}

/// The number of outputs of an update: the parameter, its state, and two empty places if they are
/// skipped.
fn inputs_kept(states: &[ValueId], skipped: bool) -> usize {
    1 + states.len() + if skipped { 2 } else { 0 }
}

/// The attributes that all optimizers with two moments share.
fn moments(beta1: f32, beta2: f32, epsilon: f32, weight_decay: f32) -> Vec<(&'static str, Attribute)> {
    let float = |name, number| (name, Attribute::Float(number));
    vec![
        float("beta1", beta1),
        float("beta2", beta2),
        float("epsilon", epsilon),
        float("weight_decay", weight_decay),
    ]
}

/// Adds the inputs that all updates read: the learning rate and the number of the update.
pub(crate) fn shared_inputs(builder: &mut GraphBuilder) -> (ValueId, ValueId) {
    let scalar = |dtype| ValueType::tensor(dtype, Some(Vec::new()));
    (builder.typed_input(LEARNING_RATE, scalar(DType::F32)), builder.typed_input(STEP, scalar(DType::I64)))
}

/// The name of the input for the learning rate.
pub(crate) const LEARNING_RATE: &str = "optimizer.learning_rate";
/// The name of the input for the number of the update, counted from 1.
pub(crate) const STEP: &str = "optimizer.step";

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranges are those of the operator, without infinity, which would stop its moments.
    #[test]
    fn ranges_of_adafactor() {
        for (beta2_decay, clip_threshold, expected) in [
            (-0.8, 1.0, None),
            (0.0, 1.0, None),
            (0.5, 1.0, Some("beta2_decay is 0.5, expected 0 or less")),
            (f32::NEG_INFINITY, 1.0, Some("beta2_decay is -inf, expected 0 or less")),
            (f32::NAN, 1.0, Some("beta2_decay is NaN, expected 0 or less")),
            (-0.8, 0.0, Some("clip_threshold is 0, expected more than 0")),
        ] {
            let optimizer = Optimizer::Adafactor { beta2_decay, clip_threshold, weight_decay: 0.0 };
            let problem = optimizer.check().err().map(|problem| problem.to_string());
            let matches = match (&problem, expected) {
                (None, None) => true,
                (Some(problem), Some(expected)) => problem.contains(expected),
                _ => false,
            };
            assert!(matches, "{optimizer}: {problem:?}");
        }
    }
}
