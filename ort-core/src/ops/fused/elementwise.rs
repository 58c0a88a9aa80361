//! `FusedElementwise`: a group of elementwise operators, fused into one formula.

use crate::dtype::TypeSet;
use crate::ir::Attributes;
use crate::ops;
use crate::spec::{
    AttrKind, Cost, Draft, InferCx, OP, OpSpec, RUNTIME, ScalarExpr, Traits, attr, many, one, render, var,
};
use crate::{Result, ensure};

/// Evaluates `formula`, in the text form of [`ScalarExpr`], over the broadcast inputs. The formula
/// must use every input.
static FUSED_ELEMENTWISE: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "FusedElementwise",
    inputs: &[many("inputs", "T", 1)],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[attr::required("formula", AttrKind::String)],
    traits: Traits::ELEMENTWISE,
    cost: Cost::Memory,
    infer,
    scalar: Some(formula),
    lower: Some(lower),
    ..OP
};

ops![FUSED_ELEMENTWISE];

fn formula(attrs: &Attributes) -> Result<ScalarExpr> {
    attrs.string("formula")?.parse()
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let formula = formula(cx.attrs)?;
    let mut used = vec![false; cx.input_count()];
    let highest = formula.input_count();
    ensure!(
        highest <= used.len(),
        InvalidGraph,
        "the formula reads input {}, the node has {}",
        highest.saturating_sub(1),
        used.len()
    );
    formula.visit_inputs(&mut |index| used.iter_mut().skip(index).take(1).for_each(|used| *used = true));
    // An unused input would enlarge the broadcast shape without being part of the formula.
    let unused = used.iter().position(|used| !used);
    ensure!(unused.is_none(), InvalidGraph, "input {} is no part of the formula", unused.unwrap_or(0));
    let all: Vec<usize> = (0..used.len()).collect();
    match cx.broadcast(&all)? {
        Some(shape) => cx.set_shape(0, shape),
        None => Ok(()),
    }
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let formula = formula(&crate::ops::microsoft::draft_attributes(draft)?)?;
    // A formula that is just an input renders no node, and a draft must be replaced by an emitted
    // value.
    if let ScalarExpr::Input(index) = formula {
        let input = draft.required(index)?;
        draft.become_op("Identity", &[input], &[]);
        return Ok(());
    }
    let dtype = draft.dtype(0)?;
    let value = render(draft, dtype, &formula)?;
    draft.replace(&[value])
}
