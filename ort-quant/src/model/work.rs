//! The state of a rewrite: the model in editing, what is known of it, and the rows of the report.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::dtype::DType;
use ort_core::ir::Graph;
use ort_core::onnx::proto::{NodeProto, TensorProto};
use ort_core::session::Model;
use ort_core::{Result, Within};

pub(super) use super::draft::is_standard;
use super::draft::{Draft, Part};
use super::moved_weights::MovedWeights;
use super::options::Quantizer;
use super::range_search::Grids;
use super::select::Place;
use super::weights::{BIAS, Job};

/// A node that has a weight, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The name of the node, or its operator and first output.
    pub node: String,
    /// The operator in the original model.
    pub operator: String,
    /// The shape of the weight, if it is a constant.
    pub shape: Vec<usize>,
    /// Whether it was quantized.
    pub outcome: Outcome,
}

/// What became of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was quantized.
    Quantized {
        /// The type and grouping of the codes, such as `int4, blocks of 32`.
        precision: String,
        /// The bytes of the weight before; 0 if another layer with the same weight has them.
        before: usize,
        /// The bytes of codes, scales and zero points.
        after: usize,
        /// The name of the codes, by which [`Written::noises`](crate::Written::noises) lists what
        /// changed in the weight; empty if it has none.
        codes: String,
    },
    /// It stays as it is.
    Kept {
        /// Why.
        reason: String,
    },
}

/// The types of a model's values by name.
pub(super) struct Types {
    dtypes: BTreeMap<String, Option<DType>>,
}

impl Types {
    pub(super) fn of(model: &Model) -> Types {
        let mut types = Types { dtypes: BTreeMap::new() };
        types.note(model.graph());
        types
    }

    /// Notes the types of a graph and of its bodies. Values of two bodies may have one name; then
    /// their type is known only if it is the same.
    fn note(&mut self, graph: &Graph) {
        for value in graph.value_ids().map(|id| graph.value(id)) {
            let dtype = value.ty.dtype();
            let known = self.dtypes.entry(value.name.to_string()).or_insert(dtype);
            *known = known.filter(|known| Some(*known) == dtype);
        }
        let bodies = graph.nodes.iter().flat_map(|node| &node.subgraphs);
        bodies.for_each(|body| self.note(&body.graph));
    }

    pub(super) fn dtype(&self, name: &str) -> Option<DType> {
        self.dtypes.get(name).copied().flatten()
    }
}

/// The state of a rewrite.
pub(super) struct Work {
    pub(super) draft: Draft,
    pub(super) types: Types,
    pub(super) layers: Vec<Layer>,
    /// The constants of the grids of values.
    pub(super) grids: Grids,
    /// The outputs of the graph whose nodes are rewritten: the model's, or those of a body.
    pub(super) outputs: BTreeSet<String>,
    /// Whether the nodes are those of a body.
    pub(super) is_inside: bool,
    /// The numbers of the first and the last layer with a weight in the model's graph.
    ends: Option<(usize, usize)>,
    /// What folds weights that nodes only move; nothing does by default.
    pub(super) moved: Option<MovedWeights>,
    /// The axes that a weight of a body has at least to be moved out of it.
    pub(super) least_rank: usize,
    /// The names of the results of a weight, and its bytes, by its name and form.
    done: BTreeMap<WeightKey, Vec<String>>,
}

/// What tells a quantized weight from others: the name of the float weight, whether it was
/// transposed, the smoothed input that scales it, its bias with the scale of the input, and how it
/// is quantized.
type WeightKey = (String, bool, Option<String>, Option<(String, u32)>, String);

/// Operators whose second input is a weight.
const WEIGHTED: [&str; 5] = ["Conv", "ConvTranspose", "LSTM", "GRU", "RNN"];

/// What a node can become, or why it stays.
pub(super) type Found<C> = std::result::Result<C, String>;

/// A constant weight.
pub(super) struct WeightOf {
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
}

impl WeightOf {
    pub(super) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.byte_size().unwrap_or(1)
    }
}

impl Work {
    pub(super) fn new(draft: Draft, model: &Model) -> Work {
        let outputs = draft.message.graph.iter().flat_map(|graph| &graph.output);
        let outputs = outputs.map(|output| output.name().to_string()).collect();
        let (types, layers, done) = (Types::of(model), Vec::new(), BTreeMap::new());
        let (is_inside, ends, grids, moved) = (false, None, BTreeMap::new(), None);
        Work { draft, types, layers, grids, outputs, is_inside, ends, moved, least_rank: 2, done }
    }

    /// Finds the ends of the chain of layers, for patterns.
    pub(super) fn find_ends(&mut self, nodes: &[NodeProto]) {
        let is_layer = |node: &NodeProto| {
            let operators = ["MatMul", "Gemm"].iter().chain(&WEIGHTED);
            let is_weighted = operators.into_iter().any(|operator| is_standard(node, operator));
            is_weighted && node.input.get(1).is_some_and(|weight| self.weight(weight).is_ok())
        };
        let first = nodes.iter().position(is_layer);
        self.ends = first.zip(nodes.iter().rposition(is_layer));
    }

    /// Whether a value is in float32.
    pub(super) fn is_single(&self, name: &str) -> bool {
        // Constants that were moved out of a body have names that the model has no types of.
        match self.draft.constant(name) {
            Some(proto) => proto.data_type() == DType::F32.onnx_code(),
            None => self.types.dtype(name) == Some(DType::F32),
        }
    }

    /// The constant weight of this name, or why there is none.
    pub(super) fn weight(&self, name: &str) -> Found<WeightOf> {
        let proto = self.draft.constant(name).ok_or("its weight is computed")?;
        let dtype = DType::from_onnx(proto.data_type()).ok_or("the type of its weight is not known")?;
        let shape: Option<Vec<usize>> = proto.dims.iter().map(|size| usize::try_from(*size).ok()).collect();
        let shape = shape.filter(|shape| !shape.contains(&0)).ok_or("its weight is empty")?;
        Ok(WeightOf { shape, dtype })
    }

    /// Adds the results of a job as initializers, or finds them if an earlier layer has the same
    /// weight. `results` are the suffixes of their names, with type and dimensions. Returns the
    /// names, and how many bytes were added.
    pub(super) fn add_weight(
        &mut self,
        mut job: Job,
        results: &[(&str, DType, Vec<usize>)],
    ) -> Result<(Vec<String>, usize)> {
        let name = job.weight.name().to_string();
        let input = job.scales.as_ref().map(|scales| scales.input.clone());
        let bias = job.bias.as_ref().map(|bias| (bias.tensor.name().to_string(), bias.input_scale.to_bits()));
        let key = (name.clone(), job.is_transposed, input, bias.clone(), format!("{:?}", job.form));
        if let Some(names) = self.done.get(&key) {
            return Ok((names.clone(), 0));
        }
        let bytes = job.lengths()?.iter().sum();
        let index = self.draft.jobs.len();
        let mut names = Vec::with_capacity(results.len());
        for (result, (suffix, dtype, dims)) in results.iter().enumerate() {
            let wanted = match &bias {
                Some((bias, _)) if *suffix == BIAS => format!("{bias}_quantized"),
                _ => format!("{name}{suffix}"),
            };
            let name = self.draft.value_name(&wanted);
            let header = TensorProto {
                name: Some(name.clone()),
                data_type: Some(dtype.onnx_code()),
                dims: dims.iter().map(|size| *size as i64).collect(),
                ..TensorProto::default()
            };
            self.draft.parts.push(Part { header, from: Some((index, result)) });
            names.push(name);
        }
        job.codes = names.get(job.form.codes()).cloned().unwrap_or_default();
        self.draft.jobs.push(job);
        self.done.insert(key, names.clone());
        Ok((names, bytes))
    }

    /// Finds the layers of a graph, of those that the caller allows. `find` returns `None` for a
    /// node without a weight.
    pub(super) fn candidates<C>(
        &self,
        nodes: &[NodeProto],
        quantizer: &Quantizer,
        find: impl Fn(&NodeProto) -> Option<Found<C>>,
    ) -> Vec<Option<Found<C>>> {
        let found = nodes.iter().enumerate().map(|(index, node)| {
            let found = find(node)?;
            Some(quantizer.allows(self.place(index), node).and(found))
        });
        found.collect()
    }

    /// Replaces the layers of a graph. Other nodes stay as they are; one with a weight is a row of
    /// the report.
    pub(super) fn each_layer<C>(
        &mut self,
        nodes: &[NodeProto],
        found: Vec<Option<Found<C>>>,
        mut replace: impl FnMut(&mut Work, &NodeProto, C) -> Result<()>,
    ) -> Result<()> {
        for (node, found) in nodes.iter().zip(found) {
            match found {
                None => self.pass(node),
                Some(Err(reason)) => self.keep(node, Vec::new(), reason),
                Some(Ok(layer)) => {
                    let place = || format!("node '{}' ({})", title(node), node.op_type());
                    replace(self, node, layer).within(place)?;
                }
            }
        }
        Ok(())
    }

    /// Leaves a layer as it is.
    pub(super) fn keep(&mut self, node: &NodeProto, shape: Vec<usize>, reason: String) {
        self.note(node, shape, Outcome::Kept { reason });
        self.draft.nodes.push(node.clone());
    }

    /// Leaves a node of another operator as it is. One with a weight is a row of the report.
    pub(super) fn pass(&mut self, node: &NodeProto) {
        let has_weight = WEIGHTED.contains(&node.op_type()) && matches!(node.domain(), "" | "ai.onnx");
        let weight = node.input.get(1).filter(|_| has_weight).and_then(|name| self.weight(name).ok());
        if let Some(WeightOf { shape, .. }) = weight {
            let reason = "this mode has no rule for the operator".to_string();
            self.note(node, shape, Outcome::Kept { reason });
        }
        self.draft.nodes.push(node.clone());
    }

    /// Adds a row to the report.
    pub(super) fn note(&mut self, node: &NodeProto, shape: Vec<usize>, outcome: Outcome) {
        let operator = node.op_type().to_string();
        self.layers.push(Layer { node: title(node), operator, shape, outcome });
    }

    /// The place of a node, for patterns. Nodes of bodies have none.
    pub(super) fn place(&self, index: usize) -> Option<Place> {
        let (is_first, is_last) = self.ends.map_or((false, false), |ends| (ends.0 == index, ends.1 == index));
        (!self.is_inside).then_some(Place { index, is_first, is_last })
    }
}

/// The name of a node, or its operator and first output.
pub(super) fn title(node: &NodeProto) -> String {
    match node.name() {
        "" => format!("{}_{}", node.op_type(), node.output.first().map_or("", String::as_str)),
        name => name.to_string(),
    }
}
