//! Activation functions of recurrent layers, with their parameters.

use ort_core::ir::Attributes;
use ort_core::{Result, ensure, error};
use smallvec::{SmallVec, smallvec};

use ort_cpu_kernel::real::Real;
use ort_cpu_vector::elementwise::Unary;

/// An activation as a chain of unary functions, with an optional clip of its input.
#[derive(Debug, Clone)]
pub(super) struct Gate {
    clip: Option<f32>,
    steps: SmallVec<[Unary; 3]>,
}

impl Gate {
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

/// Returns the activations of each direction; `defaults` apply if the attribute names none.
pub(super) fn gates(attrs: &Attributes, directions: usize, defaults: &[&str]) -> Result<Vec<Vec<Gate>>> {
    let mut names: Vec<String> = attrs.find_strings("activations").unwrap_or(&[]).to_vec();
    if names.is_empty() {
        names = (0..directions).flat_map(|_| defaults.iter().map(|name| name.to_string())).collect();
    }
    // By default, `RNN` lists two activations even for one direction, so extra names are ignored.
    let needed = directions * defaults.len();
    ensure!(names.len() >= needed, InvalidGraph, "{} activations, expected {needed}", names.len());
    let clip = attrs.find_float("clip").filter(|bound| *bound > 0.0);
    // Only activations that have a parameter consume a value of these lists.
    let mut alphas = attrs.find_floats("activation_alpha").unwrap_or(&[]).iter().copied();
    let mut betas = attrs.find_floats("activation_beta").unwrap_or(&[]).iter().copied();
    let mut gates = Vec::with_capacity(needed);
    for name in &names[..needed] {
        let mut alpha = |default| alphas.next().unwrap_or(default);
        let mut beta = |default| betas.next().unwrap_or(default);
        let steps: SmallVec<[Unary; 3]> = match name.to_ascii_lowercase().as_str() {
            "relu" => smallvec![Unary::Relu],
            "tanh" => smallvec![Unary::Tanh],
            "sigmoid" => smallvec![Unary::Sigmoid],
            "affine" => smallvec![Unary::Affine { scale: alpha(1.0), shift: beta(0.0) }],
            "leakyrelu" => smallvec![Unary::LeakyRelu { alpha: alpha(0.01) }],
            "thresholdedrelu" => smallvec![Unary::ThresholdedRelu { alpha: alpha(1.0) }],
            "scaledtanh" => {
                let scale = |scale| Unary::Affine { scale, shift: 0.0 };
                smallvec![scale(beta(1.0)), Unary::Tanh, scale(alpha(1.0))]
            }
            "hardsigmoid" => smallvec![Unary::HardSigmoid { alpha: alpha(0.2), beta: beta(0.5) }],
            "elu" => smallvec![Unary::Elu { alpha: alpha(1.0) }],
            "softsign" => smallvec![Unary::Softsign],
            "softplus" => smallvec![Unary::Softplus],
            _ => return Err(error!(InvalidGraph, "activation '{name}' is not in the ONNX standard")),
        };
        gates.push(Gate { clip, steps });
    }
    Ok(gates.chunks(defaults.len()).map(<[Gate]>::to_vec).collect())
}
