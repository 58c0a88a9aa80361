//! Einstein summation: `Einsum`.

use std::collections::BTreeMap;

use super::einsum_equation::{Equation, Label};
use crate::Result;
use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ops;
use crate::spec::{AttrKind, Cost, Grad, InferCx, OP, OpSpec, attr, broadcast, many, one, var};

static EINSUM: OpSpec = OpSpec {
    name: "Einsum",
    since: 28,
    first: 12,
    inputs: &[many("Inputs", "T", 1)],
    outputs: &[one("Output", "T")],
    types: &[var("T", TypeSet::NUMERIC)],
    attrs: &[attr::required("equation", AttrKind::String)],
    cost: Cost::Compute,
    infer,
    grad: Grad::Rule(super::einsum_gradient::of_einsum),
    ..OP
};

ops![EINSUM];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let shapes: Option<Vec<&[Dim]>> = (0..cx.input_count()).map(|index| cx.shape(index)).collect();
    let Some(shapes) = shapes else { return Ok(()) };
    let ranks: Vec<usize> = shapes.iter().map(|shape| shape.len()).collect();
    let equation = Equation::parse(cx.attrs.string("equation")?, &ranks)?;
    let mut sizes: BTreeMap<Label, Dim> = BTreeMap::new();
    for (labels, shape) in equation.inputs.iter().zip(&shapes) {
        for (label, size) in labels.iter().zip(*shape) {
            // Dimensions of one label broadcast: a 1 in one operand stretches to the other's size.
            let known = sizes.entry(*label).or_insert_with(|| Dim::constant(1));
            *known = broadcast::dims(&[std::slice::from_ref(&*known), std::slice::from_ref(size)])?.remove(0);
        }
    }
    let output = equation.output.iter().map(|label| sizes.get(label).cloned().unwrap_or(Dim::constant(1)));
    let output = output.collect();
    cx.set_shape(0, output)
}
