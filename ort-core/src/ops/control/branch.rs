//! `If`: runs one of two subgraphs.
//!
//! The output types are the join of both branches, or those of the branch that a constant condition
//! selects.

use super::V;
use super::merge::merge;
use crate::dtype::{DType, TypeSet};
use crate::ir::ValueType;
use crate::ops;
use crate::spec::{AttrKind, Flow, Grad, InferCx, OP, OpSpec, TripCount, attr, many_mixed, one, var};
use crate::{Error, Result, ensure, error};

static IF: OpSpec = OpSpec {
    name: "If",
    grad: Grad::Rule(super::gradients::of_if),
    since: 25,
    inputs: &[one("cond", "B")],
    outputs: &[many_mixed("outputs", "V", 1)],
    types: &[V, var("B", TypeSet::of(&[DType::Bool]))],
    attrs: &[attr::required("then_branch", AttrKind::Graph), attr::required("else_branch", AttrKind::Graph)],
    infer,
    flow: Some(Flow {
        controls: 1,
        counters: 0,
        conditions: 0,
        carried: |_, _| 0,
        rounds: TripCount::Once,
        in_front: |_| true,
        to_front: |_, node| Ok(vec![node]),
    }),
    ..OP
};

ops![IF];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let then = infer_branch(cx, "then_branch")?;
    let otherwise = infer_branch(cx, "else_branch")?;
    let known = cx.ints(0).and_then(|condition| condition.first().copied());
    // Exporters leave in branches that are never taken and contradict the known shapes, so only the
    // branch that is taken must be consistent.
    let taken = match known {
        Some(0) => (None, otherwise),
        Some(_) => (then, None),
        None => (then, otherwise),
    };
    for index in 0..cx.output_count() {
        let ty = match &taken {
            (Some(then), Some(otherwise)) => match (then.get(index), otherwise.get(index)) {
                (Some(then), Some(otherwise)) => merge(then, otherwise)?,
                _ => return Err(error!(InvalidGraph, "a branch has no output {index}")),
            },
            // One branch is ruled out by the condition or inconsistent, so the other determines the
            // type.
            (Some(types), None) | (None, Some(types)) => types.get(index).cloned().unwrap_or_default(),
            (None, None) => return Err(broken(cx, known)),
        };
        cx.set_type(index, ty);
    }
    Ok(())
}

/// Infers the output types of a branch. `None` if the branch contradicts itself.
fn infer_branch(cx: &mut InferCx<'_>, attr: &str) -> Result<Option<Vec<ValueType>>> {
    let index = cx.find_subgraph(attr).ok_or_else(|| error!(InvalidGraph, "'{attr}' is missing"))?;
    let types = cx.infer_branch(index);
    // A branch that contradicts itself has no types to count. Its own error is raised once it is
    // taken.
    let (given, wanted) = (types.as_ref().map_or(usize::MAX, Vec::len), cx.output_count());
    ensure!(given >= wanted, InvalidGraph, "'{attr}' has {given} outputs, the node {wanted}");
    Ok(types)
}

/// Returns the error if every branch that may be taken is inconsistent. `condition` is the
/// condition, if it is known.
fn broken(cx: &InferCx<'_>, condition: Option<i64>) -> Error {
    let branches: &[&str] = match condition {
        Some(0) => &["else_branch"],
        Some(_) => &["then_branch"],
        None => &["then_branch", "else_branch"],
    };
    let branch = |attr: &&str| cx.find_subgraph(attr).and_then(|index| cx.subgraph(index));
    let problem = branches.iter().filter_map(branch).find_map(|branch| branch.graph.broken.clone());
    problem.unwrap_or_else(|| error!(InvalidGraph, "no branch can be taken"))
}
