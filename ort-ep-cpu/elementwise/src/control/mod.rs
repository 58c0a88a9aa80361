//! Control flow: kernels that run subgraphs.

#![allow(
    clippy::indexing_slicing,
    reason = "rounds and parts are counted over shapes that inference checked and that views are as long as"
)]

mod branch;
mod looping;
mod scan;
mod stack;

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, RunCx};
use ort_core::ir::{Graph, ValueId};
use ort_core::tensor::Shape;
use ort_core::{Result, error};

/// Returns the subgraph in an attribute, with its index.
fn subgraph<'a>(cx: &CompileCx<'a>, attr: &str) -> Result<(usize, &'a Graph)> {
    let found = cx.node.node.subgraph(attr);
    found
        .map(|(index, subgraph)| (index, &subgraph.graph))
        .ok_or_else(|| error!(InvalidGraph, "attribute '{attr}' is missing"))
}

/// An output of a subgraph in one iteration, as known before any run.
struct Item {
    dtype: DType,
    /// Unknown sizes are 0. None if the rank is unknown.
    shape: Option<Shape>,
}

fn item_type(graph: &Graph, output: ValueId) -> Result<Item> {
    let info = graph.value(output);
    let dtype = info.ty.dtype();
    let dtype = dtype.ok_or_else(|| error!(InvalidGraph, "scan output '{}' is {}", info.name, info.ty))?;
    let size = |size: &ort_core::dim::Dim| size.as_constant().and_then(|size| usize::try_from(size).ok());
    let shape = info.ty.shape().map(|dims| dims.iter().map(|dim| size(dim).unwrap_or(0)).collect());
    Ok(Item { dtype, shape })
}

/// Returns the type and shape of a subgraph's output for the sizes of this run; `item` is what was
/// known before it. Without iterations, nothing else tells the shape that they would have produced.
fn item_of_run(
    cx: &RunCx<'_>,
    body: usize,
    inputs: &[Option<Shape>],
    output: usize,
    item: &Item,
) -> (DType, Shape) {
    let fits = |shape: &Shape| item.shape.as_ref().is_none_or(|known| known.len() == shape.len());
    let shape = cx.subgraph_output(body, inputs, output).filter(fits).or_else(|| item.shape.clone());
    (item.dtype, shape.unwrap_or_default())
}
