//! Activations of fused operators, rendered as WGSL from their scalar formulas.

use ort_core::Result;
use ort_core::ops::fused::activation::Activation;

use crate::formula::{Number, render};

/// Renders an activation as an expression of the `f32` variable `x`.
pub(super) fn expression(activation: &Activation, x: &str) -> Result<String> {
    render(&activation.formula()?, Number::Float, &|_| x.to_owned())
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
