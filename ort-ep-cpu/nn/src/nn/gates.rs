//! Activation functions of recurrent layers, with their parameters.

use ort_core::Result;
use ort_core::ir::Attributes;
use ort_core::ops::nn::problem::{CellActivation, CellFunction, activations};
use smallvec::{SmallVec, smallvec};

use ort_cpu_matmul::real::Real;
use ort_cpu_vector::elementwise::Unary;

/// An activation as a chain of unary functions, with an optional clip of its input.
#[derive(Debug, Clone)]
pub(super) struct Gate {
    clip: Option<f32>,
    steps: SmallVec<[Unary; 3]>,
}

impl Gate {
    /// Returns the bound of the clip if the activation is `function` alone.
    pub(super) fn clip_of(&self, function: Unary) -> Option<Option<f32>> {
        matches!(&self.steps[..], [step] if *step == function).then_some(self.clip)
    }

    /// Applies the clip and the activation to a row.
    pub(super) fn apply<T: Real>(&self, values: &mut [T]) {
        if let Some(bound) = self.clip {
            T::map(Unary::Clip { min: -bound, max: bound }, values);
        }
        self.apply_unclipped(values);
    }

    /// Applies the activation to a row without the clip: ONNX Runtime does not clip the cell state
    /// of an LSTM.
    pub(super) fn apply_unclipped<T: Real>(&self, values: &mut [T]) {
        self.steps.iter().for_each(|step| T::map(*step, values));
    }
}

/// Returns the activations of each direction of an operator.
pub(super) fn gates(attrs: &Attributes, directions: usize, op: &str) -> Result<Vec<Vec<Gate>>> {
    let clip = attrs.find_float("clip").filter(|bound| *bound > 0.0);
    let gate = |activation: &CellActivation| Gate { clip, steps: steps_of(activation) };
    let cells = activations(op, attrs, directions)?;
    Ok(cells.iter().map(|cell| cell.iter().map(gate).collect()).collect())
}

fn steps_of(activation: &CellActivation) -> SmallVec<[Unary; 3]> {
    let CellActivation { function, alpha, beta } = *activation;
    match function {
        CellFunction::Relu => smallvec![Unary::Relu],
        CellFunction::Tanh => smallvec![Unary::Tanh],
        CellFunction::Sigmoid => smallvec![Unary::Sigmoid],
        CellFunction::Affine => smallvec![Unary::Affine { scale: alpha, shift: beta }],
        CellFunction::LeakyRelu => smallvec![Unary::LeakyRelu { alpha }],
        CellFunction::ThresholdedRelu => smallvec![Unary::ThresholdedRelu { alpha }],
        CellFunction::ScaledTanh => {
            let scale = |scale| Unary::Affine { scale, shift: 0.0 };
            // The standard: `alpha * tanh(beta * x)`.
            smallvec![scale(beta), Unary::Tanh, scale(alpha)]
        }
        CellFunction::HardSigmoid => smallvec![Unary::HardSigmoid { alpha, beta }],
        CellFunction::Elu => smallvec![Unary::Elu { alpha }],
        CellFunction::Softsign => smallvec![Unary::Softsign],
        CellFunction::Softplus => smallvec![Unary::Softplus],
    }
}
