//! A separate epilogue pass after a library GEMM or convolution, for addends and activations that
//! the library cannot fuse.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ops::fused::activation::Activation;
use ort_core::spec::ScalarExpr;

use super::elementwise::{computed, replaced};
use crate::formula::Number;
use crate::launch::{Launch, Operand, Walk};

/// A tensor to add, with its stride along each axis of the result, and its factor.
pub(super) struct Addend<'a> {
    pub(super) tensor: &'a Operand,
    pub(super) steps: Vec<i64>,
    pub(super) factor: f32,
}

/// Returns the launch of `y = activation(y + factor * addend + ..)` over axes of these sizes.
pub(super) fn finish(
    y: &Operand,
    sizes: &[usize],
    addends: &[Addend<'_>],
    activation: Option<&Activation>,
) -> Result<Vec<Launch>> {
    let own = crate::launch::strides(sizes).into_iter().map(|step| step as i64).collect();
    let steps: Vec<Vec<i64>> =
        std::iter::once(own).chain(addends.iter().map(|addend| addend.steps.clone())).collect();
    let walk = Walk::new(sizes, &steps);
    let mut sum = ScalarExpr::Input(0);
    let mut inputs = vec![(y, 0)];
    for (index, addend) in addends.iter().enumerate() {
        let term = ScalarExpr::Input(index + 1);
        let is_plain = addend.factor == 1.0;
        sum = sum + if is_plain { term } else { term * f64::from(addend.factor) };
        inputs.push((addend.tensor, 0));
    }
    let formula = match activation {
        Some(activation) => replaced(&activation.formula()?, &sum),
        None => sum,
    };
    let number = if y.dtype == DType::F64 { Number::F64 } else { Number::F32 };
    computed(&formula, number, (&walk, &inputs), y)
}
