//! Sliced weight updates: large gradients are computed and applied a few rows at a time.
//!
//! So a large gradient is never whole in memory. A gradient is freed as soon as its parameter is
//! updated. But until then it is as large as the parameter, which may exceed everything else that a
//! step with recomputation keeps.
//!
//! The gradient of a matmul weight is itself a matmul, and each of its rows depends on only one row
//! or column of one operand. Elementwise optimizers update each element independently. So both can
//! run slice by slice, with the same bits.

use std::collections::{HashMap, HashSet};

use ort_core::ir::{Attribute, Graph, GraphBuilder, Node, ValueId};
use ort_core::spec::RUNTIME;
use ort_core::tensor::{Tensor, byte_count};
use ort_core::{Result, error};

/// The rows of a slice are a multiple of this, because kernels process that many at a time.
const ROWS: usize = 32;

const CONV_GRAD_WEIGHTS: &str = "ConvGradWeights";

/// Slices each gradient of more than `most` bytes into parts of about that size. Returns the graph
/// and the number of sliced weights, or `None` if there is no such gradient.
pub(crate) fn sliced(graph: &Graph, most: usize) -> Result<Option<(Graph, usize)>> {
    let found = find(graph, most);
    if found.is_empty() {
        return Ok(None);
    }
    let makers: HashSet<usize> = found.values().map(|update| update.maker).collect();
    let (count, outputs) = (found.len(), graph.outputs.clone());
    let mut rest = graph.clone();
    let nodes = std::mem::take(&mut rest.nodes);
    let mut builder = GraphBuilder::extend(rest);
    builder.set_scope("slice");
    for (index, node) in nodes.iter().enumerate() {
        match found.get(&index) {
            Some(update) => update.emit(&mut builder, &nodes, node)?,
            // Each slice has a maker of its own, so the whole gradient is not computed.
            None if makers.contains(&index) => {}
            None => builder.graph_mut().nodes.push(node.clone()),
        }
    }
    Ok(Some((builder.finish(&outputs)?, count)))
}

/// An update whose gradient has no other reader.
struct Update {
    /// The producer of the gradient.
    maker: usize,
    /// The input of the producer whose parts along `axis` the gradient's rows depend on.
    factor: usize,
    axis: i64,
    /// The shape of the gradient.
    shape: Vec<usize>,
    /// The rows of a slice.
    rows: usize,
}

/// Finds the updates that can be sliced, by node index.
fn find(graph: &Graph, most: usize) -> HashMap<usize, Update> {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let outputs: HashSet<ValueId> = graph.outputs.iter().copied().collect();
    let update = |node: &Node| {
        let gradient = node.inputs.get(1).copied().flatten().filter(|_| is_elementwise(node))?;
        let maker = producers.get(gradient.index()).copied().flatten()?.index();
        // Another reader, such as a global norm, needs the whole gradient.
        let is_read_once = consumers.get(gradient.index())?.len() == 1 && !outputs.contains(&gradient);
        let (factor, axis) = graph.nodes.get(maker).filter(|_| is_read_once).and_then(factor_of)?;
        let is_convolution = graph.nodes.get(maker)?.spec.name == CONV_GRAD_WEIGHTS;
        let ty = &graph.value(gradient).ty;
        let shape: Option<Vec<usize>> =
            ty.shape()?.iter().map(|dim| usize::try_from(dim.as_constant()?).ok()).collect();
        let shape = shape.filter(|shape| shape.len() == 2 || is_convolution)?;
        let (bytes, all) = (byte_count(ty.dtype()?, &shape).ok()?, *shape.first()?);
        // As many rows as `most` bytes hold, rounded down to a multiple of `ROWS`, but at least
        // `ROWS`.
        let rows = (all * most / bytes.max(1) / ROWS).max(1) * ROWS;
        (bytes > most && rows < all).then_some(Update { maker, factor, axis, shape, rows })
    };
    let nodes = graph.nodes.iter().enumerate();
    nodes.filter_map(|(index, node)| Some((index, update(node)?))).collect()
}

/// Whether a node is an elementwise update that is not sliced yet. 8-bit moments, LAMB and
/// Adafactor need whole gradients.
fn is_elementwise(node: &Node) -> bool {
    node.spec.domain == RUNTIME
        && ["SGD", "AdamW"].contains(&node.spec.name)
        && node.attrs.find_int("first_row").is_none()
}

/// Returns which input of a gradient's producer, along which axis, determines the rows of the
/// gradient.
fn factor_of(node: &Node) -> Option<(usize, i64)> {
    let flag = |name| node.attrs.find_int(name).unwrap_or(0) != 0;
    match node.spec.name {
        // Rows are output channels: axis 1 of the upstream gradient. Groups would tie them to parts
        // of the input.
        CONV_GRAD_WEIGHTS => (node.attrs.find_int("group") == Some(1)).then_some((1, 1)),
        "FusedMatMul" | "Gemm" | "MatMul" => {
            let is_plain = node.inputs.iter().skip(2).all(Option::is_none) && !flag("transBatchA");
            is_plain.then_some((0, i64::from(flag("transA"))))
        }
        _ => None,
    }
}

impl Update {
    /// Emits, for each slice, the producer of its gradient and its update, which continues from the
    /// values of the previous slice.
    fn emit(&self, builder: &mut GraphBuilder, nodes: &[Node], node: &Node) -> Result<()> {
        let Some(maker) = nodes.get(self.maker) else { return Ok(()) };
        let all = self.shape.first().copied().unwrap_or_default();
        let mut inputs = node.inputs.clone();
        for first in (0..all).step_by(self.rows) {
            let end = (first + self.rows).min(all);
            let gradient = self.gradient(builder, maker, [first, end])?;
            inputs.iter_mut().skip(1).take(1).for_each(|input| *input = Some(gradient));
            let mut attrs = given(node);
            attrs.push(("first_row", Attribute::Int(first as i64)));
            let op = (node.spec.domain, node.spec.name);
            let mut made: Vec<Option<ValueId>> = builder
                .add(op, &inputs, &attrs, node.outputs.len(), Vec::new())?
                .into_iter()
                .map(Some)
                .collect();
            // The last slice produces the outputs of the original update.
            if let Some(emitted) = builder.graph_mut().nodes.last_mut().filter(|_| end == all) {
                emitted.outputs = node.outputs.clone();
                made = node.outputs.to_vec();
            }
            // The next slice reads the new parameter and states. States are the last inputs, after
            // the scalars.
            let behind = inputs.len() + 1 - made.len();
            let states = inputs.iter_mut().enumerate().filter(|(place, _)| *place == 0 || *place >= behind);
            states.zip(made).for_each(|((_, input), new)| *input = new);
        }
        Ok(())
    }

    /// Emits the producer of some rows of the gradient.
    fn gradient(
        &self,
        builder: &mut GraphBuilder,
        maker: &Node,
        [first, end]: [usize; 2],
    ) -> Result<ValueId> {
        let mut inputs = maker.inputs.clone();
        let missing = || error!(Fail, "{} has no input to slice", maker.place());
        let factor = inputs.get_mut(self.factor).and_then(Option::as_mut).ok_or_else(missing)?;
        let numbers = [first as i64, end as i64, self.axis];
        let [first_row, end_row, axis] = numbers.map(|number| Tensor::from_slice(&[1], &[number]));
        let [first_row, end_row, axis] =
            [builder.constant(first_row?), builder.constant(end_row?), builder.constant(axis?)];
        *factor = builder.node("Slice", &[*factor, first_row, end_row, axis], &[])?;
        if maker.spec.name == CONV_GRAD_WEIGHTS {
            let mut shape: Vec<i64> = self.shape.iter().map(|size| *size as i64).collect();
            // The operator takes the shape of its result as an input, so each slice needs its own.
            shape.iter_mut().take(1).for_each(|rows| *rows = (end - first) as i64);
            let shape = builder.constant(Tensor::from_slice(&[shape.len()], &shape)?);
            inputs.iter_mut().skip(2).take(1).for_each(|input| *input = Some(shape));
        }
        let op = (maker.spec.domain, maker.spec.name);
        let made = builder.add(op, &inputs, &given(maker), 1, Vec::new())?;
        made.first().copied().ok_or_else(missing)
    }
}

/// The attributes of a node.
fn given(node: &Node) -> Vec<(&str, Attribute)> {
    node.attrs.iter().map(|(name, value)| (name, value.clone())).collect()
}
