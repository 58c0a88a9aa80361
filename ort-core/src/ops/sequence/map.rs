//! `SequenceMap`: runs a subgraph for each element of a sequence.

use super::{CONTAINED, S, sequence_of};
use crate::ir::ValueType;
use crate::ops;
use crate::ops::control::merge::outside;
use crate::spec::{AttrKind, Grad, InferCx, OP, OpSpec, TypeVar, Types, attr, many_mixed, one};
use crate::{Result, ensure, error};

static SEQUENCE_MAP: OpSpec = OpSpec {
    name: "SequenceMap",
    grad: Grad::None("it runs a graph on the elements of a sequence; a Scan over a tensor has a gradient"),
    since: 17,
    first: 17,
    inputs: &[one("input_sequence", "S"), many_mixed("additional_inputs", "V", 0)],
    outputs: &[many_mixed("out_sequence", "S", 1)],
    types: &[
        S,
        TypeVar { name: "V", types: Types { tensor: CONTAINED, sequence: CONTAINED, ..Types::NONE } },
    ],
    attrs: &[attr::required("body", AttrKind::Graph)],
    infer,
    ..OP
};

ops![SEQUENCE_MAP];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let body = cx.find_subgraph("body").ok_or_else(|| error!(InvalidGraph, "'body' is missing"))?;
    let inputs: Vec<ValueType> = (0..cx.input_count())
        .map(|index| match cx.input_type(index) {
            // Elements may differ in size, so symbolic dimensions of one do not hold for the next.
            Some(ValueType::Sequence(element)) => outside(element),
            other => other.cloned().unwrap_or_default(),
        })
        .collect();
    let outputs = cx.infer_subgraph(body, &inputs)?;
    ensure!(outputs.len() >= cx.output_count(), InvalidGraph, "the body has too few outputs");
    for (index, ty) in outputs.iter().enumerate() {
        cx.set_type(index, sequence_of(outside(ty)));
    }
    Ok(())
}
