//! The layers that pruning changes: their weights as matrices, and the inputs of those.

use std::collections::BTreeMap;

use ort_core::dtype::DType;
use ort_core::onnx::proto::NodeProto;

use super::draft::{integer_of, integers_of, string_of};
use super::select::Selection;
use super::work::{Found, Work, is_standard, title};
use crate::prune::{AutoPad, InputView, MatrixView, Patches, Sparsity};

/// A layer with a weight that can be pruned.
#[derive(Clone, Debug)]
pub(super) struct PrunableLayer {
    pub(super) weight: String,
    pub(super) shape: Vec<usize>,
    pub(super) is_half: bool,
    pub(super) view: MatrixView,
    /// The groups of rows that have inputs of their own.
    pub(super) groups: usize,
    /// What the weight is multiplied with, or why samples say nothing about it.
    pub(super) input: Found<(String, InputView)>,
}

/// A weight that is pruned.
#[derive(Debug)]
pub(super) struct PrunableWeight {
    pub(super) layer: PrunableLayer,
    /// Those of all layers that read it.
    pub(super) inputs: Vec<Found<(String, InputView)>>,
    /// The title of the first of them.
    pub(super) reader: String,
}

/// A node with a weight.
pub(super) struct SurveyedLayer {
    pub(super) node: String,
    pub(super) operator: String,
    pub(super) shape: Vec<usize>,
    /// The name of the weight, or why the layer stays.
    pub(super) weight: Found<String>,
}

/// The layers and weights of a model.
#[derive(Default)]
pub(super) struct Survey {
    pub(super) layers: Vec<SurveyedLayer>,
    /// The weights that layers read, and why some stay.
    pub(super) weights: BTreeMap<String, Found<PrunableWeight>>,
    /// By constant, a reader that needs it as it is.
    other_readers: BTreeMap<String, String>,
}

impl Survey {
    /// Adds the nodes of a graph.
    pub(super) fn add(
        &mut self,
        work: &Work,
        nodes: &[NodeProto],
        selection: Selection<'_>,
        sparsity: Sparsity,
    ) {
        for (index, node) in nodes.iter().enumerate() {
            let found = prunable(work, node, sparsity);
            let is_layer = found.is_some();
            let shape = node.input.get(1).and_then(|name| work.weight(name).ok());
            let shape = shape.map_or_else(Vec::new, |weight| weight.shape);
            let found = found.map(|found| selection.allows(work.place(index), node).and(found));
            let weight = found.as_ref().and_then(|found| found.as_ref().ok());
            let weight = weight.map(|layer| layer.weight.clone());
            for (place, input) in node.input.iter().enumerate() {
                let is_pruned = place == 1 && weight.as_ref() == Some(input);
                if !is_pruned && work.draft.constant(input).is_some() {
                    self.other_readers
                        .entry(input.clone())
                        .or_insert_with(|| format!("by '{}'", title(node)));
                }
            }
            if is_layer {
                let (node, operator) = (title(node), node.op_type().to_string());
                let weight = found.map_or_else(|| Err(String::new()), |found| self.add_reader(found, &node));
                self.layers.push(SurveyedLayer { node, operator, shape, weight });
            }
        }
        for output in work.outputs.iter().filter(|output| work.draft.constant(output).is_some()) {
            self.other_readers.insert(output.clone(), "as an output of the graph".to_string());
        }
    }

    /// Adds a layer to those of its weight.
    fn add_reader(&mut self, found: Found<PrunableLayer>, node: &str) -> Found<String> {
        let layer = found?;
        let name = layer.weight.clone();
        match self.weights.get_mut(&name) {
            None => {
                let (inputs, reader) = (vec![layer.input.clone()], node.to_string());
                self.weights.insert(name.clone(), Ok(PrunableWeight { layer, inputs, reader }));
            }
            Some(Ok(weight)) if weight.layer.view == layer.view && weight.layer.groups == layer.groups => {
                weight.inputs.push(layer.input);
            }
            Some(Ok(weight)) => {
                let reason = format!("its weight has other rows in '{}' and in '{node}'", weight.reader);
                self.weights.insert(name.clone(), Err(reason));
            }
            Some(Err(_)) => {}
        }
        Ok(name)
    }

    /// Drops the weights that something reads that must not change.
    pub(super) fn finish(&mut self) {
        for (name, weight) in &mut self.weights {
            if let Some(reader) = self.other_readers.get(name) {
                *weight = Err(format!("its weight is also read {reader}"));
            }
        }
    }
}

/// The layer of a node, or why it stays; `None` for a node without a weight.
fn prunable(work: &Work, node: &NodeProto, sparsity: Sparsity) -> Option<Found<PrunableLayer>> {
    let name = node.input.get(1)?;
    if ["LSTM", "GRU", "RNN"].iter().any(|operator| is_standard(node, operator)) {
        return work.weight(name).is_ok().then(|| Err("recurrent layers are not pruned".into()));
    }
    let operators = ["MatMul", "Gemm", "Conv", "ConvTranspose"];
    let operator = operators.into_iter().find(|operator| is_standard(node, operator))?;
    let read = || -> Found<PrunableLayer> {
        let weight = work.weight(name)?;
        let is_half = match weight.dtype {
            DType::F32 => false,
            DType::F16 => true,
            other => return Err(format!("its weight is {other}")),
        };
        let groups = usize::try_from(integer_of(node, "group", 1)).unwrap_or_default();
        let (view, groups) = matrix(operator, node, &weight.shape, groups)?;
        let input = match node.input.first() {
            Some(name) => input_view(operator, node, &weight.shape, groups).map(|view| (name.clone(), view)),
            None => Err("it has no input".into()),
        };
        if let Sparsity::Pattern { of, .. } = sparsity
            && !view.channel_count().is_multiple_of(of)
        {
            let channels = view.channel_count();
            return Err(format!("its {channels} input channels per output are no multiple of {of}"));
        }
        Ok(PrunableLayer { weight: name.clone(), shape: weight.shape, is_half, view, groups, input })
    };
    Some(read())
}

/// The matrix of a weight, and its groups of rows.
fn matrix(operator: &str, node: &NodeProto, shape: &[usize], groups: usize) -> Found<(MatrixView, usize)> {
    let wrong = || format!("its weight of {} dimensions does not fit the operator", shape.len());
    Ok(match (operator, shape) {
        ("MatMul", [columns]) => (MatrixView::columns_first(1, *columns, 1), 1),
        ("MatMul", [batch @ .., columns, rows]) => {
            (MatrixView::columns_first(batch.iter().product(), *columns, *rows), 1)
        }
        ("Gemm", [rows, columns]) if integer_of(node, "transB", 0) != 0 => {
            (MatrixView::rows_first(*rows, *columns), 1)
        }
        ("Gemm", [columns, rows]) => (MatrixView::columns_first(1, *columns, *rows), 1),
        ("Conv", [outputs, channels, kernel @ ..]) if groups > 0 && outputs.is_multiple_of(groups) => {
            (MatrixView::filters(*outputs, *channels, kernel.iter().product()), groups)
        }
        ("ConvTranspose", [channels, outputs, kernel @ ..])
            if groups > 0 && channels.is_multiple_of(groups) =>
        {
            let output = (*outputs, kernel.iter().product());
            (MatrixView::transposed_filters(groups, channels / groups, output), groups)
        }
        _ => return Err(wrong()),
    })
}

/// The rows that a layer multiplies its weight with.
fn input_view(operator: &str, node: &NodeProto, shape: &[usize], groups: usize) -> Found<InputView> {
    match (operator, shape) {
        ("MatMul", [_, _]) => Ok(InputView::Rows),
        ("MatMul", _) => Err(format!("its weight has {} dimensions", shape.len())),
        ("Gemm", _) if integer_of(node, "transA", 0) != 0 => Err("its input is transposed".into()),
        ("Gemm", _) => Ok(InputView::Rows),
        ("Conv", [_, _, kernel @ ..]) => patches(node, kernel, groups).map(InputView::Patches),
        _ => Err("its outputs overlap".into()),
    }
}

fn patches(node: &NodeProto, kernel: &[usize], groups: usize) -> Found<Patches> {
    let axes = kernel.len();
    let sizes = |name: &str, count: usize, default: usize| -> Found<Vec<usize>> {
        let given = integers_of(node, name);
        if given.is_empty() {
            return Ok(vec![default; count]);
        }
        let sizes: Option<Vec<usize>> = given.iter().map(|size| usize::try_from(*size).ok()).collect();
        let sizes = sizes.filter(|sizes| sizes.len() == count);
        sizes.ok_or_else(|| format!("its attribute '{name}' is out of the ordinary"))
    };
    let auto_pad = match string_of(node, "auto_pad") {
        "" | "NOTSET" => AutoPad::NotSet,
        "VALID" => AutoPad::Valid,
        "SAME_UPPER" => AutoPad::SameUpper,
        "SAME_LOWER" => AutoPad::SameLower,
        other => return Err(format!("its attribute 'auto_pad' is '{other}'")),
    };
    Ok(Patches {
        kernel: kernel.to_vec(),
        strides: sizes("strides", axes, 1)?,
        dilations: sizes("dilations", axes, 1)?,
        pads: sizes("pads", 2 * axes, 0)?,
        auto_pad,
        groups,
    })
}
