//! Activations as loops of the vector library.

use ort_core::Result;
use ort_core::ep::CompileCx;
use ort_core::error;
use ort_core::ops::fused::activation::Activation;

use ort_cpu_vector::elementwise::Unary;

/// Returns the loop of an activation, by its name among those of fused operators. `parameter`
/// returns its parameters. None if there is no such loop.
pub fn one_loop(name: &str, parameter: impl Fn(&str) -> Result<f32>) -> Result<Option<Unary>> {
    let alpha = || parameter("alpha");
    Ok(Some(match name {
        "Relu" => Unary::Relu,
        "Clip" => Unary::Clip { min: parameter("min")?, max: parameter("max")? },
        "LeakyRelu" => Unary::LeakyRelu { alpha: alpha()? },
        "Elu" => Unary::Elu { alpha: alpha()? },
        "Selu" => Unary::Selu { alpha: alpha()?, gamma: parameter("gamma")? },
        "Celu" => Unary::Celu { alpha: alpha()? },
        "ThresholdedRelu" => Unary::ThresholdedRelu { alpha: alpha()? },
        "HardSigmoid" => Unary::HardSigmoid { alpha: alpha()?, beta: parameter("beta")? },
        "HardSwish" => Unary::HardSwish,
        "Sigmoid" => Unary::Sigmoid,
        "Tanh" => Unary::Tanh,
        "Softplus" => Unary::Softplus,
        "Softsign" => Unary::Softsign,
        "Mish" => Unary::Mish,
        "Swish" if alpha()? == 1.0 => Unary::Silu,
        "Swish" => Unary::Swish { alpha: alpha()? },
        "Gelu" => Unary::Gelu,
        "FastGelu" => Unary::GeluTanh,
        _ => return Ok(None),
    }))
}

/// Returns the loop of a fused operator's activation.
pub fn unary_of(activation: &Activation) -> Result<Unary> {
    let found = one_loop(activation.name, |name| activation.parameter(name))?;
    found.ok_or_else(|| error!(NotImplemented, "activation '{}' has no loop", activation.name))
}

/// Returns the activation that a node's `activation` and `activation_params` specify; none for
/// operators without them.
pub fn activation_of(cx: &CompileCx<'_>) -> Result<Option<Unary>> {
    Activation::of_attributes(cx.attrs())?.as_ref().map(unary_of).transpose()
}
