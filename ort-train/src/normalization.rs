//! Batch normalization split: per-channel statistics and an elementwise formula.
//!
//! The gradient shares the statistics with the forward pass. The formula fuses into its readers, so
//! the normalized values are not kept for the backward pass. Only batch normalization in training
//! mode is split.

use std::collections::HashMap;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Graph, GraphBuilder, Node, ValueId};
use ort_core::spec::RUNTIME;
use ort_core::tensor::Tensor;

use crate::values::is_standard;

/// `(X - mean) * factor + bias`.
const NORMALIZE: &str = "add(mul(sub(x0, x1), x2), x3)";

/// Splits each batch normalization of a graph that already has its gradients, if its tensors are
/// all float32 or all float64.
pub(crate) fn split_normalizations(mut graph: Graph) -> Result<Graph> {
    let (nodes, outputs) = (std::mem::take(&mut graph.nodes), graph.outputs.clone());
    let mut builder = GraphBuilder::extend(graph);
    builder.set_scope("normalization");
    // The mean and inverse deviation of each normalized value, by that value and the bits of
    // epsilon.
    let mut statistics: HashMap<(ValueId, u32), [ValueId; 2]> = HashMap::new();
    for mut node in nodes {
        match Normalization::of(builder.graph(), &node) {
            Some(found) => {
                let key = (found.input, node.attrs.float("epsilon")?.to_bits());
                statistics.insert(key, found.emit(&mut builder, node)?);
            }
            None => {
                let is_gradient = node.spec.domain == RUNTIME && node.spec.name == "BatchNormalizationGrad";
                let input = node.inputs.first().copied().flatten().filter(|_| is_gradient);
                let epsilon = node.attrs.float("epsilon").unwrap_or_default().to_bits();
                if let Some(parts) = input.and_then(|input| statistics.get(&(input, epsilon))) {
                    // The gradient takes the statistics as optional inputs 3 and 4. Without them it
                    // computes them again.
                    node.inputs.truncate(3);
                    node.inputs.extend(parts.map(Some));
                }
                builder.graph_mut().nodes.push(node);
            }
        }
    }
    builder.finish(&outputs)
}

/// A batch normalization in training mode.
struct Normalization {
    input: ValueId,
    scale: ValueId,
    bias: ValueId,
    running: [ValueId; 2],
    rank: usize,
}

impl Normalization {
    /// Recognizes a batch normalization that can be split.
    fn of(graph: &Graph, node: &Node) -> Option<Normalization> {
        if !is_standard(node, "BatchNormalization") || node.attrs.find_int("training_mode") != Some(1) {
            return None;
        }
        let &[Some(input), Some(scale), Some(bias), Some(mean), Some(variance)] = node.inputs.as_slice()
        else {
            return None;
        };
        let dtype = graph.value(input).ty.dtype().filter(|dtype| [DType::F32, DType::F64].contains(dtype))?;
        let all = [input, scale, bias, mean, variance];
        let is_one_type = all.iter().all(|value| graph.value(*value).ty.dtype() == Some(dtype));
        let rank = graph.value(input).ty.shape()?.len();
        let running = [mean, variance];
        (is_one_type && rank >= 2).then_some(Normalization { input, scale, bias, running, rank })
    }

    /// Emits the parts in place of the node. Returns the mean and the inverse deviation.
    fn emit(self, builder: &mut GraphBuilder, node: Node) -> Result<[ValueId; 2]> {
        let [mean, variance] = self.running;
        let attrs = [
            ("epsilon", Attribute::Float(node.attrs.float("epsilon")?)),
            ("momentum", Attribute::Float(node.attrs.float("momentum")?)),
        ];
        let inputs = [self.input, mean, variance].map(Some);
        let made = builder.add((RUNTIME, "BatchNormalizationStatistics"), &inputs, &attrs, 2, Vec::new())?;
        // `add` makes the two outputs it is asked for, so the fallback is never taken.
        let &[mean, inverse] = made.as_slice() else { return Ok([self.input; 2]) };
        if let Some(statistics) = builder.graph_mut().nodes.last_mut() {
            statistics.name = format!("{}/statistics", node.name).into();
            // The statistics node also takes over the updates of the running statistics.
            statistics.outputs.extend(node.outputs.iter().skip(1).copied());
        }
        // Scale and bias get the shape `[1, C, 1, ...]`, so that they broadcast along axis 1.
        let mut shape = vec![1i64; self.rank];
        shape.iter_mut().skip(1).take(1).for_each(|channels| *channels = -1);
        let shape = builder.constant(Tensor::from_slice(&[self.rank], &shape)?);
        let scale = builder.node("Reshape", &[self.scale, shape], &[])?;
        let factor = builder.node("Mul", &[inverse, scale], &[])?;
        let bias = builder.node("Reshape", &[self.bias, shape], &[])?;
        let formula = [("formula", Attribute::String(NORMALIZE.to_string()))];
        let inputs = [self.input, mean, factor, bias].map(Some);
        builder.add((RUNTIME, "FusedElementwise"), &inputs, &formula, 1, Vec::new())?;
        if let Some(normalize) = builder.graph_mut().nodes.last_mut() {
            normalize.name = node.name;
            normalize.outputs = node.outputs.into_iter().take(1).collect();
        }
        Ok([mean, inverse])
    }
}
