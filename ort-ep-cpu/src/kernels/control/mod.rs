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

/// The subgraph held by an attribute, with its index.
fn subgraph<'a>(cx: &CompileCx<'a>, attr: &str) -> Result<(usize, &'a Graph)> {
    let found = cx.node.node.subgraph(attr);
    found
        .map(|(index, subgraph)| (index, &subgraph.graph))
        .ok_or_else(|| error!(InvalidGraph, "attribute '{attr}' is missing"))
}

/// What a subgraph hands over at each iteration, as far as it is known before any run.
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

/// The type and shape that an output of a subgraph has, of which `item` is known before any run,
/// for the sizes of this one: of no iteration, it is all that tells the shape of what iterations
/// would have handed over.
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
