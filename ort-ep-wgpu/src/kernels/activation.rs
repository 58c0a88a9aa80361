//! Activations of fused operators, rendered as WGSL from their scalar formulas.

use ort_core::ir::{Attribute, Attributes};
use ort_core::ops::fused::activation::Activation;
use ort_core::spec::{Registry, ScalarExpr};
use ort_core::{Result, error};

use crate::formula::{Number, render};

/// Renders an activation as an expression of the `f32` variable `x`.
pub(super) fn expression(activation: &Activation, x: &str) -> Result<String> {
    render(&formula(activation)?, Number::Float, &|_| x.to_owned())
}

/// Returns the formula of the activation's operator.
fn formula(activation: &Activation) -> Result<ScalarExpr> {
    let mut given = Vec::new();
    let op = match activation.name {
        // `Clip` has its limits as inputs, so no formula has them as attributes.
        "Clip" => {
            let (least, most) = (activation.parameter("min")?, activation.parameter("max")?);
            return Ok(ScalarExpr::Input(0).max(least).min(most));
        }
        "FastGelu" => {
            given.push(("approximate".to_owned(), Attribute::String("tanh".to_owned())));
            "Gelu"
        }
        name => name,
    };
    let unknown = || error!(NotImplemented, "activation '{}' has no formula", activation.name);
    let spec = Registry::global()?.find("", op).ok_or_else(unknown)?;
    // Parameters that the activation leaves out get the operator's defaults.
    for attr in spec.attrs {
        if let Ok(value) = activation.parameter(attr.name) {
            given.push((attr.name.to_owned(), Attribute::Float(value)));
        }
    }
    spec.scalar.ok_or_else(unknown)?(&Attributes::new(spec, given)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_stand_in_the_expression() {
        let leaky = Activation::new("LeakyRelu", &[0.25]).unwrap();
        assert!(expression(&leaky, "x").unwrap().contains("0.25"));
        let clip = Activation::new("Clip", &[0.0, 6.0]).unwrap();
        assert_eq!(expression(&clip, "x").unwrap(), "min_(max_(x, f32(0.0)), f32(6.0))");
        let gelu = Activation::new("FastGelu", &[]).unwrap();
        assert!(expression(&gelu, "x").unwrap().contains("tanh"));
    }
}
