//! `If`: one of two subgraphs.

use super::V;
use super::merge::merge;
use crate::dtype::{DType, TypeSet};
use crate::ir::ValueType;
use crate::ops;
use crate::spec::{AttrKind, InferCx, OP, OpSpec, attr, many_mixed, one, var};
use crate::{Result, ensure, error};

static IF: OpSpec = OpSpec {
    name: "If",
    since: 25,
    inputs: &[one("cond", "B")],
    outputs: &[many_mixed("outputs", "V", 1)],
    types: &[V, var("B", TypeSet::of(&[DType::Bool]))],
    attrs: &[attr::required("then_branch", AttrKind::Graph), attr::required("else_branch", AttrKind::Graph)],
    infer,
    ..OP
};

ops![IF];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let branch = |cx: &mut InferCx<'_>, attr: &str| -> Result<Vec<ValueType>> {
        let index = cx.find_subgraph(attr);
        let types =
            cx.infer_subgraph(index.ok_or_else(|| error!(InvalidGraph, "'{attr}' is missing"))?, &[])?;
        ensure!(
            types.len() >= cx.output_count(),
            InvalidGraph,
            "'{attr}' has {} outputs, the node {}",
            types.len(),
            cx.output_count()
        );
        Ok(types)
    };
    let then = branch(cx, "then_branch")?;
    let otherwise = branch(cx, "else_branch")?;
    let known = cx.ints(0).and_then(|condition| condition.first().copied());
    for index in 0..cx.output_count() {
        let ty = match known {
            Some(0) => otherwise[index].clone(),
            Some(_) => then[index].clone(),
            None => merge(&then[index], &otherwise[index])?,
        };
        cx.set_type(index, ty);
    }
    Ok(())
}
