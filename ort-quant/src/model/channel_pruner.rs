//! Removal of whole channels: layers with fewer outputs, and smaller shapes after them.

use std::collections::{BTreeMap, BTreeSet};

use half::f16;
use ort_core::dtype::DType;
use ort_core::onnx::proto::{NodeProto, TensorProto};
use ort_core::onnx::{ExternalData, Source, tensor_from_proto, tensor_to_proto};
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_core::{Error, ErrorKind, Result, Within};

use super::channel_flow::{ChannelFlow, Sizes};
use super::channel_spaces::{ChannelSpaces, Cut};
use super::draft::{Part, reads};
use super::pruned::{PruneOutcome, PrunedLayer, Pruning};
use super::select::{NodePattern, Selection};
use super::slice_form::SliceForm;
use super::start;
use super::weight_reader::WeightReader;
use super::weights::{Form, Job, check_finite};
use super::work::{Work, is_standard, title};
use crate::elements::{Elements, RawElements, each_chunk};
use crate::prune::{each_least, removed};

/// How channels are removed from a model.
///
/// A layer loses the outputs whose weights have the least norms, and the layers that read them lose
/// the inputs. Layers whose outputs are added to each other lose the same ones.
#[derive(Clone, Debug)]
pub struct ChannelPruner {
    /// The share of the outputs of each layer to remove; at least one output stays.
    pub share: f64,
    /// The outputs that stay are a multiple of this: more of them if the share leaves no multiple.
    /// Kernels are made for multiples of 8 or 16.
    pub multiple: usize,
    /// If there are any, the outputs of other nodes stay.
    pub only: Vec<NodePattern>,
    /// Nodes whose outputs stay.
    pub exclude: Vec<NodePattern>,
}

/// The channels that stay, by the root of their set.
type KeptChannels = BTreeMap<usize, Vec<usize>>;

impl ChannelPruner {
    /// Decides which channels are removed. Reads the weights of all layers that lose some, one at a
    /// time.
    ///
    /// # Errors
    ///
    /// The share is invalid, the model or a weight cannot be read, a weight has NaN or infinite
    /// elements, a pattern matches no node, or no channel can be removed.
    pub fn prune<'s>(&self, source: &'s Source) -> Result<Pruning<'s>> {
        if !(0.0..=1.0).contains(&self.share) {
            let text = format!("the share {} of channels is not between 0 and 1", self.share);
            return Err(Error::new(ErrorKind::InvalidArgument, text).help("use a share such as 0.25"));
        }
        let selection = Selection { only: &self.only, exclude: &self.exclude };
        let (mut work, nodes) = start(source, 1, selection)?;
        let bytes_before = source.bytes().len() + work.draft.external_bytes();
        let read_before = reads(&nodes);
        // Patterns count all nodes of the file.
        let allowed = nodes.iter().enumerate().map(|(index, node)| selection.allows(work.place(index), node));
        let allowed: Vec<_> = allowed.collect();
        let (mut nodes, allowed) = without_identities(&work, nodes, allowed);
        let model = Model::from_source(source.clone())?;
        let sizes = Sizes::of(model.graph());
        let shapes = shapes(source, &work, &nodes)?;
        let flow = ChannelFlow::new(&work, &nodes, (&sizes, &shapes));
        let (mut spaces, readers) = (flow.spaces, flow.readers);
        for (index, space) in spaces.producers.clone() {
            if let Some(Err(reason)) = allowed.get(index) {
                spaces.block(space, reason);
            }
        }
        let kept = self.choose(source, &work, (&nodes, &mut spaces))?;
        let layers = rows(&work, &nodes, (&spaces, &kept));
        if kept.is_empty() {
            return Err(no_channels(&layers));
        }
        narrow(&mut work, &mut nodes, (&spaces, &kept, &readers, &shapes))?;
        let graph = work.draft.message.graph.get_or_insert_default();
        let is_narrow = |name: &str| {
            let axis = spaces.of_value.get(name);
            axis.is_some_and(|axis| kept.contains_key(&spaces.root(axis.space)))
        };
        graph.value_info.retain(|value| !is_narrow(value.name()));
        work.draft.nodes = nodes;
        work.draft.drop_unread(&read_before);
        Ok(Pruning { source, draft: work.draft, layers, bytes_before })
    }

    /// Chooses the channels that stay, of each set that may lose some.
    fn choose(
        &self,
        source: &Source,
        work: &Work,
        (nodes, spaces): (&[NodeProto], &mut ChannelSpaces),
    ) -> Result<KeptChannels> {
        let mut reader = WeightReader::open(source)?;
        let mut chosen = KeptChannels::new();
        for root in spaces.open().collect::<Vec<_>>() {
            let count = spaces.count(root);
            let kept = (count - removed(self.share, count).min(count)).max(1);
            let kept = kept.checked_next_multiple_of(self.multiple).unwrap_or(count);
            let number = count.saturating_sub(kept);
            if number == 0 {
                spaces.block(root, &format!("the share leaves all of its {count} outputs"));
                continue;
            }
            let mut scores = vec![0.0; count];
            for cut in &spaces.cuts {
                let is_output = spaces.producers.contains(&(cut.node, cut.space)) && cut.input == 1;
                let name = nodes.get(cut.node).and_then(|node| node.input.get(1));
                let Some(name) = name.filter(|_| is_output && spaces.root(cut.space) == root) else {
                    continue;
                };
                let tensor = reader.tensor(work, name)?;
                let norms = norms(&tensor, cut.axis).within(|| format!("weight '{name}'"))?;
                reader.release(&tensor);
                // Layers that lose the same channels count alike.
                let mean = norms.iter().sum::<f64>() / norms.len().max(1) as f64;
                let scale = if mean > 0.0 { 1.0 / mean } else { 0.0 };
                scores.iter_mut().zip(norms).for_each(|(score, norm)| *score += scale * norm);
            }
            let scores: Vec<f32> = scores.into_iter().map(|score| score as f32).collect();
            let mut is_removed = vec![false; count];
            each_least(&scores, number, |place| {
                if let Some(is_removed) = is_removed.get_mut(place) {
                    *is_removed = true;
                }
            });
            let kept = is_removed.iter().enumerate().filter(|(_, is_removed)| !**is_removed);
            chosen.insert(root, kept.map(|(channel, _)| channel).collect());
        }
        Ok(chosen)
    }
}

/// Lets nodes read constants themselves instead of an `Identity`, by which exporters share equal
/// ones, and removes those that nothing else reads.
fn without_identities<A>(work: &Work, mut nodes: Vec<NodeProto>, others: Vec<A>) -> (Vec<NodeProto>, Vec<A>) {
    let mut constants: BTreeMap<String, String> = BTreeMap::new();
    for node in &mut nodes {
        for input in &mut node.input {
            if let Some(constant) = constants.get(input) {
                input.clone_from(constant);
            }
        }
        if is_standard(node, "Identity")
            && let ([input], [output]) = (&node.input[..], &node.output[..])
            && work.draft.constant(input).is_some()
        {
            constants.insert(output.clone(), input.clone());
        }
    }
    let read = reads(&nodes);
    let is_needed = |node: &NodeProto| {
        let is_read = |output: &String| read.contains(output) || work.outputs.contains(output);
        node.output.iter().any(|output| !constants.contains_key(output) || is_read(output))
    };
    nodes.into_iter().zip(others).filter(|(node, _)| is_needed(node)).unzip()
}

/// The constant shapes of `Reshape` nodes.
fn shapes(source: &Source, work: &Work, nodes: &[NodeProto]) -> Result<BTreeMap<String, Vec<i64>>> {
    let mut reader = WeightReader::open(source)?;
    let mut shapes = BTreeMap::new();
    for node in nodes {
        let is_constant = is_standard(node, "Constant");
        if let (true, Some(output)) = (is_constant, node.output.first()) {
            for attribute in &node.attribute {
                match (attribute.name(), &attribute.t) {
                    ("value_ints", _) => drop(shapes.insert(output.clone(), attribute.ints.clone())),
                    ("value", Some(tensor)) if tensor.data_type() == DType::I64.onnx_code() => {
                        let tensor =
                            tensor_from_proto(TensorProto::clone(tensor), &mut ExternalData::unavailable());
                        if let Ok(values) = tensor.and_then(|tensor| tensor.to_vec::<i64>()) {
                            shapes.insert(output.clone(), values);
                        }
                    }
                    _ => {}
                }
            }
        }
        let shape = node.input.get(1).filter(|_| is_standard(node, "Reshape"));
        let shape = shape.filter(|name| {
            work.draft.constant(name).is_some_and(|tensor| tensor.data_type() == DType::I64.onnx_code())
        });
        if let Some(name) = shape {
            shapes.insert(name.clone(), reader.tensor(work, name)?.to_vec::<i64>()?);
        }
    }
    Ok(shapes)
}

/// The sums of the squares of the parts along an axis.
fn norms(tensor: &Tensor, axis: usize) -> Result<Vec<f64>> {
    let bytes = tensor.bytes().map(|bytes| &bytes[..]).unwrap_or_default();
    match tensor.dtype() {
        DType::F16 => norms_of(&RawElements::<f16>::new(bytes), tensor.shape(), axis),
        _ => norms_of(&RawElements::<f32>::new(bytes), tensor.shape(), axis),
    }
}

fn norms_of<E: Elements>(elements: &E, shape: &[usize], axis: usize) -> Result<Vec<f64>> {
    check_finite(elements)?;
    let count = shape.get(axis).copied().unwrap_or(1);
    let inner: usize = shape.iter().skip(axis + 1).product();
    let mut norms = vec![0.0; count];
    let mut place = 0;
    each_chunk(elements, |values| {
        for value in values {
            if let Some(norm) = norms.get_mut(place / inner.max(1) % count.max(1)) {
                *norm += f64::from(*value) * f64::from(*value);
            }
            place += 1;
        }
    });
    norms.iter_mut().for_each(|norm| *norm = norm.sqrt());
    Ok(norms)
}

/// The rows of the report.
fn rows(
    work: &Work,
    nodes: &[NodeProto],
    (spaces, kept): (&ChannelSpaces, &KeptChannels),
) -> Vec<PrunedLayer> {
    let mut rows = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        let operators = ["Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"];
        let is_layer = operators.iter().any(|operator| is_standard(node, operator));
        let weight = node.input.get(1).filter(|_| is_layer).and_then(|name| work.weight(name).ok());
        let Some(weight) = weight else { continue };
        let produced = spaces.producers.iter().find(|(producer, _)| *producer == index);
        let outputs = match produced {
            Some((_, space)) => spaces.reason(*space).map(str::to_string),
            None if spaces.depthwise.iter().any(|(other, _)| *other == index) => None,
            None => Some("its outputs are not followed".to_string()),
        };
        let form = slice(spaces, kept, &weight.shape, |cut| cut.node == index && cut.input == 1);
        let outcome = match form.kept.is_empty() {
            false => PruneOutcome::Narrowed { shape: form.narrow_shape(), bytes: weight.bytes(), outputs },
            true => PruneOutcome::Kept { reason: outputs.unwrap_or_else(|| "its channels stay".to_string()) },
        };
        let operator = node.op_type().to_string();
        rows.push(PrunedLayer { node: title(node), operator, shape: weight.shape, outcome });
    }
    rows
}

/// What remains of a constant.
fn slice(
    spaces: &ChannelSpaces,
    kept: &KeptChannels,
    shape: &[usize],
    is_part: impl Fn(&Cut) -> bool,
) -> SliceForm {
    let cuts = spaces.cuts.iter().filter(|cut| is_part(cut)).filter_map(|cut| {
        let channels = kept.get(&spaces.root(cut.space))?;
        let elements = |channel: &usize| channel * cut.repeat..(channel + 1) * cut.repeat;
        Some((cut.axis, channels.iter().flat_map(elements).collect()))
    });
    SliceForm { shape: shape.to_vec(), kept: cuts.collect() }
}

/// Cuts the constants, and changes the attributes and shapes that have the number of channels.
fn narrow(
    work: &mut Work,
    nodes: &mut [NodeProto],
    (spaces, kept, readers, shapes): (
        &ChannelSpaces,
        &KeptChannels,
        &BTreeMap<String, usize>,
        &BTreeMap<String, Vec<i64>>,
    ),
) -> Result<()> {
    let places: BTreeSet<(usize, usize)> = spaces.cuts.iter().map(|cut| (cut.node, cut.input)).collect();
    for (index, input) in places {
        let Some(name) = nodes.get(index).and_then(|node| node.input.get(input)).cloned() else { continue };
        let missing = || Error::new(ErrorKind::Fail, format!("there is no constant '{name}'"));
        let weight = work.draft.constant(&name).cloned().ok_or_else(missing)?;
        let shape: Vec<usize> = weight.dims.iter().map(|size| *size as usize).collect();
        let form = slice(spaces, kept, &shape, |cut| (cut.node, cut.input) == (index, input));
        if form.kept.is_empty() {
            continue;
        }
        // Others may need the constant as it is.
        let is_own = readers.get(&name) == Some(&1) && !work.outputs.contains(&name);
        let new_name = if is_own { name.clone() } else { work.draft.value_name(&format!("{name}_narrow")) };
        if is_own {
            work.draft.replace(&name);
        } else if let Some(to) = nodes.get_mut(index).and_then(|node| node.input.get_mut(input)) {
            to.clone_from(&new_name);
        }
        add(work, weight, new_name, form);
    }
    for (index, space) in &spaces.depthwise {
        let Some(channels) = kept.get(&spaces.root(*space)) else { continue };
        let attributes = nodes.get_mut(*index).into_iter().flat_map(|node| &mut node.attribute);
        attributes
            .filter(|attribute| attribute.name() == "group")
            .for_each(|attribute| attribute.i = Some(channels.len() as i64));
    }
    for (index, space, repeat) in &spaces.reshapes {
        let Some(channels) = kept.get(&spaces.root(*space)) else { continue };
        let Some(to) = nodes.get_mut(*index).and_then(|node| node.input.get_mut(1)) else { continue };
        let rows = shapes.get(to).and_then(|shape| shape.first()).copied().unwrap_or_default();
        let shape = [rows, (channels.len() * repeat) as i64];
        let name = work.draft.value_name(&format!("{to}_narrow"));
        work.draft.add_constant(tensor_to_proto(&name, &Tensor::from_slice(&[2], &shape)?)?);
        *to = name;
    }
    Ok(())
}

/// Adds a constant that is cut while the file is written.
fn add(work: &mut Work, weight: TensorProto, name: String, form: SliceForm) {
    let shape = form.narrow_shape();
    let header = TensorProto {
        name: Some(name.clone()),
        data_type: weight.data_type,
        dims: shape.iter().map(|size| *size as i64).collect(),
        doc_string: weight.doc_string.clone(),
        ..TensorProto::default()
    };
    work.draft.parts.push(Part { header, from: Some((work.draft.jobs.len(), 0)) });
    let is_half = weight.data_type() == DType::F16.onnx_code();
    work.draft.jobs.push(Job {
        weight,
        codes: name,
        is_transposed: false,
        shape,
        is_half,
        has_one_point: false,
        scales: None,
        bias: None,
        importance: None,
        ready: None,
        form: Form::Sliced(form),
    });
}

fn no_channels(layers: &[PrunedLayer]) -> Error {
    let reasons = layers.iter().filter_map(|layer| match &layer.outcome {
        PruneOutcome::Kept { reason } => Some(format!("{} ({}): {reason}", layer.node, layer.operator)),
        _ => None,
    });
    let reasons: Vec<String> = reasons.take(5).collect();
    let error = Error::new(ErrorKind::InvalidArgument, "no channel of the model can be removed");
    match reasons.is_empty() {
        true => error.help("the graph of the model has no layer with a constant weight"),
        false => error.help(format!("each layer stays as it is, because: {}", reasons.join("; "))),
    }
}
