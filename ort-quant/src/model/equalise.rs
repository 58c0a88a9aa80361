//! Cross-layer equalisation: channels between two layers get ranges of the same size.
//!
//! Between the layers stands nothing, or what is positively homogeneous, so that `W1_i / t_i` and
//! `W2_i * t_i` compute the same for any positive `t`. See "Data-Free Quantization Through Weight
//! Equalization and Bias Correction", arXiv:1906.04721. The result is a float model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::onnx::proto::{NodeProto, TensorProto};
use ort_core::onnx::{Source, Weights};

use super::draft::{Draft, Part, integer_of};
use super::flow::Flow;
use super::options::Quantizer;
use super::scale_form::ScaleForm;
use super::static_bias::constant;
use super::weight_channels::WeightChannels;
use super::weight_reader::WeightReader;
use super::weights::{Form, Job};
use super::work::{Work, is_standard};
use super::write::{self, Written};
use crate::elements::{RawElements, each_chunk};

/// The sweeps over all pairs, at most, and the change of a scale that ends them.
const SWEEPS: usize = 20;
const CONVERGED: f64 = 0.01;

/// Operators with `f(x / t) = f(x) / t` for positive `t` of each channel.
const HOMOGENEOUS: [&str; 8] = [
    "Relu",
    "LeakyRelu",
    "PRelu",
    "Identity",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "GlobalMaxPool",
];

/// A model whose channels are equalised, and that is not written yet.
pub struct Equalised<'s> {
    source: &'s Source,
    draft: Draft,
    /// The pairs of layers.
    pub pairs: usize,
    /// The sweeps until scales did not change any more.
    pub sweeps: usize,
}

impl Equalised<'_> {
    /// Writes the float model. Nodes keep their numbers and names.
    ///
    /// # Errors
    ///
    /// A file cannot be read or written.
    pub fn write(self, path: &Path) -> Result<Written> {
        write::write(self.draft, self.source, (path, &Weights::Inside), &mut |_| Ok(()))
    }
}

impl Quantizer {
    /// Equalises the channels between the layers that the patterns allow; `None` if there is no
    /// such pair in the model's graph. Weights are read once for each sweep and pair.
    ///
    /// # Errors
    ///
    /// The model or a weight cannot be read, or a pattern matches no node.
    pub fn equalise<'s>(&self, source: &'s Source) -> Result<Option<Equalised<'s>>> {
        let (mut work, nodes) = super::start(source, 1, self.selection())?;
        let mut reader = WeightReader::open(source)?;
        let mut chain = Chain::of(&work, &nodes, self);
        if chain.pairs.is_empty() {
            return Ok(None);
        }
        let mut sweeps = 0;
        while sweeps < SWEEPS && chain.sweep(&work, &mut reader)? > CONVERGED {
            sweeps += 1;
        }
        let pairs = chain.pairs.len();
        work.draft.nodes = nodes;
        for layer in chain.layers {
            layer.replace(&mut work, &mut reader)?;
        }
        // Every constant that was read still is, but for those that are replaced.
        work.draft.drop_unread(&BTreeSet::new());
        Ok(Some(Equalised { source, draft: work.draft, pairs, sweeps }))
    }
}

/// A layer, and the factors of its channels.
struct EqualLayer {
    weight: String,
    shape: Vec<usize>,
    channels: WeightChannels,
    /// The axes of output and input.
    axes: (usize, usize),
    outputs: Vec<f64>,
    inputs: Vec<f64>,
    /// The constants that are added to its outputs: the node that reads each, and the input.
    biases: Vec<(usize, usize)>,
}

/// The layers of a graph, and those that follow each other.
struct Chain {
    layers: Vec<EqualLayer>,
    pairs: Vec<(usize, usize)>,
}

impl Chain {
    fn of(work: &Work, nodes: &[NodeProto], quantizer: &Quantizer) -> Chain {
        let flow = Flow::of(nodes);
        let mut chain = Chain { layers: Vec::new(), pairs: Vec::new() };
        let mut places: BTreeMap<usize, usize> = BTreeMap::new();
        let readers = readers(nodes);
        for (index, node) in nodes.iter().enumerate() {
            let layer = EqualLayer::of(work, &flow, node);
            if let Some(layer) = layer.filter(|_| quantizer.allows(work.place(index), node).is_ok()) {
                places.insert(index, chain.layers.len());
                chain.layers.push(layer);
            }
        }
        let graph = Graph { work, flow: &flow, nodes, readers };
        for (index, place) in &places {
            let Some((next, biases)) = graph.next(*index) else { continue };
            let Some(other) = places.get(&next) else { continue };
            let count = |place: usize, of: fn(&EqualLayer) -> usize| chain.layers.get(place).map(of);
            let fits =
                count(*place, |layer| layer.outputs.len()) == count(*other, |layer| layer.inputs.len());
            if fits && let Some(layer) = chain.layers.get_mut(*place) {
                layer.biases = biases;
                chain.pairs.push((*place, *other));
            }
        }
        chain
    }

    /// Equalises each pair once. Returns the largest change of a scale, as a logarithm.
    fn sweep(&mut self, work: &Work, reader: &mut WeightReader<'_>) -> Result<f64> {
        let mut most = 0.0_f64;
        for (one, other) in &self.pairs {
            let (Some(first), Some(second)) = (self.layers.get(*one), self.layers.get(*other)) else {
                continue;
            };
            let (before, _) = first.maxima(work, reader)?;
            let (_, after) = second.maxima(work, reader)?;
            let scale = |(before, after): (&f64, &f64)| match before * after > 0.0 {
                true => (before / after).sqrt(),
                // A channel of zeros has no range.
                false => 1.0,
            };
            let scales: Vec<f64> = before.iter().zip(&after).map(scale).collect();
            let changes = scales.iter().map(|scale| scale.ln().abs());
            most = changes.fold(most, f64::max);
            if let Some(first) = self.layers.get_mut(*one) {
                first.outputs.iter_mut().zip(&scales).for_each(|(factor, scale)| *factor /= scale);
            }
            if let Some(second) = self.layers.get_mut(*other) {
                second.inputs.iter_mut().zip(&scales).for_each(|(factor, scale)| *factor *= scale);
            }
        }
        Ok(most)
    }
}

impl EqualLayer {
    /// The layer of a node. Its weight has no other reader.
    fn of(work: &Work, flow: &Flow<'_>, node: &NodeProto) -> Option<EqualLayer> {
        let name = node.input.get(1)?;
        let weight = work.weight(name).ok().filter(|weight| weight.dtype == DType::F32)?;
        if !flow.has_no_more_readers(work, name, 1) {
            return None;
        }
        let axes = match weight.shape[..] {
            [_, _] if is_standard(node, "MatMul") => (1, 0),
            [_, _] if is_standard(node, "Gemm") && integer_of(node, "transA", 0) == 0 => {
                if integer_of(node, "transB", 0) == 0 { (1, 0) } else { (0, 1) }
            }
            [_, inputs, _, ..] if is_standard(node, "Conv") => match integer_of(node, "group", 1) {
                1 => (0, 1),
                // Of a depthwise convolution each filter has one input.
                _ if inputs == 1 => (0, 0),
                _ => return None,
            },
            _ => return None,
        };
        let channels = WeightChannels::of(node, &weight.shape);
        let (outputs, inputs) = (vec![1.0; channels.outputs()], vec![1.0; channels.inputs()]);
        let (weight, shape) = (name.clone(), weight.shape);
        Some(EqualLayer { weight, shape, channels, axes, outputs, inputs, biases: Vec::new() })
    }

    /// The largest magnitudes of outputs and inputs, with the factors so far.
    fn maxima(&self, work: &Work, reader: &mut WeightReader<'_>) -> Result<(Vec<f64>, Vec<f64>)> {
        let tensor = reader.tensor(work, &self.weight)?;
        let (mut outputs, mut inputs) = (vec![0.0_f64; self.outputs.len()], vec![0.0_f64; self.inputs.len()]);
        let mut element = 0;
        let bytes = tensor.bytes().map(|bytes| &bytes[..]).unwrap_or_default();
        each_chunk(&RawElements::<f32>::new(bytes), |values| {
            for value in values {
                let (input, output) = self.channels.at(element);
                element += 1;
                let factors = self.inputs.get(input).zip(self.outputs.get(output));
                let value = factors.map_or(0.0, |(one, other)| f64::from(value.abs()) * one * other);
                if let (Some(one), Some(other)) = (inputs.get_mut(input), outputs.get_mut(output)) {
                    (*one, *other) = (one.max(value), other.max(value));
                }
            }
        });
        reader.release(&tensor);
        Ok((outputs, inputs))
    }

    /// Puts the scaled weight in the place of the original, under its name, and adds the biases.
    fn replace(self, work: &mut Work, reader: &mut WeightReader<'_>) -> Result<()> {
        let is_one = |factors: &[f64]| factors.iter().all(|factor| *factor == 1.0);
        if is_one(&self.outputs) && is_one(&self.inputs) {
            return Ok(());
        }
        let narrow = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect::<Arc<[f32]>>();
        let outputs = narrow(&self.outputs);
        for (node, place) in &self.biases {
            let name = work.draft.nodes.get(*node).and_then(|node| node.input.get(*place)).cloned();
            let Some(name) = name else { continue };
            let values = reader.tensor(work, &name)?.to_vec::<f32>()?;
            let values: Vec<f32> = values.iter().zip(&outputs[..]).map(|(value, by)| value * by).collect();
            let dims = work.draft.constant(&name).map(|old| old.dims.clone()).unwrap_or_default();
            let own = work.draft.value_name(&format!("{name}_equalised"));
            work.draft.add_constant(constant(&own, dims, &values));
            let node = work.draft.nodes.get_mut(*node);
            node.into_iter()
                .flat_map(|node| node.input.get_mut(*place))
                .for_each(|input| input.clone_from(&own));
        }
        let Some(weight) = work.draft.constant(&self.weight).cloned() else { return Ok(()) };
        let (output_axis, input_axis) = self.axes;
        let mut inputs = narrow(&self.inputs);
        // Several filters may read one input of a depthwise convolution.
        if output_axis == input_axis {
            let filters = self.outputs.len() / inputs.len().max(1);
            inputs = inputs.iter().flat_map(|factor| std::iter::repeat_n(*factor, filters)).collect();
        }
        let header = TensorProto {
            name: Some(self.weight.clone()),
            data_type: weight.data_type,
            dims: weight.dims.clone(),
            doc_string: weight.doc_string.clone(),
            metadata_props: weight.metadata_props.clone(),
            ..TensorProto::default()
        };
        work.draft.parts.push(Part { header, from: Some((work.draft.jobs.len(), 0)) });
        work.draft.jobs.push(Job {
            weight,
            codes: self.weight.clone(),
            is_transposed: false,
            shape: self.shape,
            is_half: false,
            has_one_point: false,
            scales: None,
            bias: None,
            importance: None,
            ready: None,
            form: Form::Scaled(ScaleForm { factors: [(output_axis, outputs), (input_axis, inputs)] }),
        });
        work.draft.replace(&self.weight);
        Ok(())
    }
}

/// The nodes that read each value as an input.
fn readers(nodes: &[NodeProto]) -> BTreeMap<&str, usize> {
    let inputs = nodes
        .iter()
        .enumerate()
        .flat_map(|(index, node)| node.input.iter().map(move |input| (input.as_str(), index)));
    inputs.collect()
}

/// A graph, to follow a value from layer to layer.
struct Graph<'g> {
    work: &'g Work,
    flow: &'g Flow<'g>,
    nodes: &'g [NodeProto],
    readers: BTreeMap<&'g str, usize>,
}

impl Graph<'_> {
    /// The layer behind another one, and the constants that are added between them.
    fn next(&self, index: usize) -> Option<(usize, Vec<(usize, usize)>)> {
        let layer = self.nodes.get(index)?;
        let is_conv = is_standard(layer, "Conv");
        let weight = self.work.weight(layer.input.get(1)?).ok()?;
        let channels = WeightChannels::of(layer, &weight.shape).outputs();
        let mut biases = Vec::new();
        if !is_standard(layer, "MatMul") && layer.input.get(2).is_some_and(|name| !name.is_empty()) {
            self.is_bias(layer.input.get(2)?, channels, false).then(|| biases.push((index, 2)))?;
        }
        let mut value = layer.output.first()?;
        // A value is read by a later node, so this ends.
        loop {
            if !self.flow.has_no_more_readers(self.work, value, 1) {
                return None;
            }
            let reader = *self.readers.get(value.as_str())?;
            let node = self.nodes.get(reader)?;
            let is_layer = ["Conv", "Gemm", "MatMul"].iter().any(|operator| is_standard(node, operator));
            if is_layer {
                let is_input = node.input.first() == Some(value) && is_conv == is_standard(node, "Conv");
                return is_input.then_some((reader, biases));
            }
            if is_standard(node, "Add") {
                let place = node.input.iter().position(|input| input != value)?;
                self.is_bias(node.input.get(place)?, channels, is_conv)
                    .then(|| biases.push((reader, place)))?;
            } else {
                let is_homogeneous = HOMOGENEOUS.iter().any(|operator| is_standard(node, operator));
                let is_pool = node.op_type().ends_with("Pool");
                let is_only = node.output.iter().skip(1).all(|output| output.is_empty());
                let is_fine = is_homogeneous && is_only && (is_conv || !is_pool);
                (is_fine && node.input.first() == Some(value)).then_some(())?;
            }
            value = node.output.first()?;
        }
    }

    /// Whether a constant has a number for each channel, which spatial dimensions may follow.
    fn is_bias(&self, name: &str, channels: usize, is_spatial: bool) -> bool {
        self.work.draft.constant(name).is_some_and(|constant| {
            let dims = &constant.dims[..];
            let dims = dims.strip_prefix(&[1]).filter(|_| channels > 1 && dims.len() > 1).unwrap_or(dims);
            let fits = match (dims, is_spatial) {
                ([count], false) => *count == channels as i64,
                ([count, rest @ ..], true) => {
                    *count == channels as i64 && !rest.is_empty() && rest.iter().all(|size| *size == 1)
                }
                _ => false,
            };
            fits && constant.data_type() == DType::F32.onnx_code()
        })
    }
}
