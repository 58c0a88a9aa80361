//! Quantization of models: which nodes change, what they become, and the new file.
//!
//! A [`Quantizer`] decides on the messages of the model, so that names, operator sets and
//! everything that is not quantized stay as they are. No weight is read until
//! [`Quantization::write`] computes and writes one after the other.

mod blocks;
mod draft;
mod dynamic;
mod select;
mod static_qdq;
mod weights;
mod write;

use std::collections::BTreeMap;
use std::path::Path;

use ort_core::dtype::DType;
use ort_core::onnx::proto::{NodeProto, TensorProto};
use ort_core::onnx::{Source, Weights};
use ort_core::session::Model;
use ort_core::{Error, ErrorKind, Result};

use self::draft::{Draft, Part};
pub use self::select::NodePattern;
use self::weights::Job;
pub use self::write::Written;
use crate::Bits;
use crate::integer::{GridOptions, QuantType};
use crate::range::ValueRange;

/// How a model is quantized.
#[derive(Clone, Debug)]
pub struct Quantizer {
    /// What weights and nodes become.
    pub mode: Mode,
    /// If there are any, other nodes stay as they are.
    pub only: Vec<NodePattern>,
    /// Nodes that stay as they are.
    pub exclude: Vec<NodePattern>,
}

/// What weights and nodes become.
#[derive(Clone, Debug, PartialEq)]
pub enum Mode {
    /// Weights are integers of 8 bits, and the inputs of products are quantized in each run:
    /// `MatMulInteger` and `ConvInteger`.
    Dynamic(DynamicOptions),
    /// Weights and the inputs of products are integers of 8 bits, in ranges that a calibration
    /// found: `QuantizeLinear` and `DequantizeLinear` around products in floating point, which
    /// runtimes compute with integers.
    Static(StaticOptions),
    /// Weights are integers of 2, 4 or 8 bits in blocks with a scale each, and products stay in
    /// floating point: `MatMulNBits` and `GatherBlockQuantized`.
    Blocks(BlockOptions),
}

/// The options of [`Mode::Dynamic`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DynamicOptions {
    /// One scale for a whole weight, not one for each output channel.
    pub per_tensor: bool,
    /// Weights of 7 bits, for other runtimes on processors whose 8-bit products saturate.
    pub reduce_range: bool,
}

/// The options of [`Mode::Static`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StaticOptions {
    /// The ranges of the values that [`Quantizer::activations`] lists. A layer with a value that
    /// has none stays.
    pub ranges: BTreeMap<String, ValueRange>,
    /// One scale for a whole weight, not one for each output channel.
    pub per_tensor: bool,
    /// Weights of 7 bits, for other runtimes on processors whose 8-bit products saturate.
    pub reduce_range: bool,
    /// Whether the zero point of inputs is the middle of their codes.
    pub is_symmetric: bool,
}

impl StaticOptions {
    /// The grid of the inputs of products.
    pub fn activations(&self) -> GridOptions {
        GridOptions::new(QuantType::UInt8, self.is_symmetric)
    }
}

/// The options of [`Mode::Blocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOptions {
    /// The bits of a quantized weight.
    pub bits: Bits,
    /// The weights of a block: 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// Whether blocks have no zero point.
    pub is_symmetric: bool,
    /// Whether the last product, which makes the answer, keeps 8 bits.
    pub protects_last: bool,
}

/// A quantized model that is not written yet.
pub struct Quantization<'s> {
    source: &'s Source,
    draft: Draft,
    layers: Vec<Layer>,
}

/// A node that has a weight, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The name of the node, or its operator and number.
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
    },
    /// It stays as it is.
    Kept {
        /// Why.
        reason: String,
    },
}

impl Quantizer {
    /// Decides what becomes of each node.
    ///
    /// # Errors
    ///
    /// The model cannot be loaded, an option is invalid, a pattern matches no node, or no node can
    /// be quantized.
    pub fn quantize<'s>(&self, source: &'s Source) -> Result<Quantization<'s>> {
        let model = Model::from_source(source.clone())?;
        let mut draft = Draft::new(source, &model, self.mode.least_opset())?;
        self.check_patterns(&draft)?;
        let types = Types::of(&model);
        let nodes = std::mem::take(&mut draft.nodes);
        let read_before = draft::reads(&nodes);
        let mut work = Work { draft, types, layers: Vec::new(), done: BTreeMap::new() };
        match &self.mode {
            Mode::Dynamic(options) => dynamic::rewrite(&mut work, &nodes, options, self)?,
            Mode::Static(options) => static_qdq::rewrite(&mut work, &nodes, options, self)?,
            Mode::Blocks(options) => blocks::rewrite(&mut work, &nodes, options, self)?,
        }
        let Work { mut draft, layers, .. } = work;
        let is_quantized = |layer: &Layer| matches!(layer.outcome, Outcome::Quantized { .. });
        if !layers.iter().any(is_quantized) {
            return Err(nothing_to_quantize(&layers));
        }
        draft.drop_unread(&read_before);
        Ok(Quantization { source, draft, layers })
    }

    /// The values whose ranges [`Mode::Static`] needs: the computed inputs of products.
    ///
    /// # Errors
    ///
    /// The model cannot be loaded, or a pattern matches no node.
    pub fn activations(&self, source: &Source) -> Result<Vec<String>> {
        let model = Model::from_source(source.clone())?;
        let mut draft = Draft::new(source, &model, self.mode.least_opset())?;
        self.check_patterns(&draft)?;
        let nodes = std::mem::take(&mut draft.nodes);
        let types = Types::of(&model);
        let work = Work { draft, types, layers: Vec::new(), done: BTreeMap::new() };
        Ok(static_qdq::activations(&work, &nodes, self).into_iter().collect())
    }

    /// Whether a node may be quantized. If not, the reason.
    fn allows(&self, index: usize, node: &NodeProto) -> std::result::Result<(), String> {
        if let Some(pattern) = self.exclude.iter().find(|pattern| pattern.matches(index, node)) {
            return Err(format!("excluded by '{pattern}'"));
        }
        let is_listed = self.only.is_empty() || self.only.iter().any(|pattern| pattern.matches(index, node));
        if is_listed { Ok(()) } else { Err("not among the nodes to quantize".to_string()) }
    }

    fn check_patterns(&self, draft: &Draft) -> Result<()> {
        let matches = |pattern: &NodePattern| {
            draft.nodes.iter().enumerate().any(|(index, node)| pattern.matches(index, node))
        };
        match self.only.iter().chain(&self.exclude).find(|pattern| !matches(pattern)) {
            Some(pattern) => {
                let text = format!("pattern '{pattern}' matches no node of the model");
                Err(Error::new(ErrorKind::InvalidArgument, text)
                    .help("give names of nodes with * and ?, op:OPERATOR, or #NUMBER"))
            }
            None => Ok(()),
        }
    }
}

impl Mode {
    /// The oldest operator set with the operators that the mode writes.
    fn least_opset(&self) -> i64 {
        match self {
            // DynamicQuantizeLinear.
            Mode::Dynamic(_) => 11,
            // DequantizeLinear of channels.
            Mode::Static(_) => 13,
            Mode::Blocks(_) => 7,
        }
    }
}

impl Quantization<'_> {
    /// The nodes with weights, in the order of the file.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Writes the model, with its weights in the file or beside it. A model that would be too large
    /// for one file has them beside it in any case.
    ///
    /// `check` gets the model as other programs will load it, before it appears under its name. If
    /// it fails, or the disk is full, no file is left, and an old one stays.
    ///
    /// # Errors
    ///
    /// A weight has NaN or infinite elements, a file cannot be written, or `check` fails.
    pub fn write(
        self,
        path: &Path,
        weights: &Weights,
        check: &mut dyn FnMut(&Model) -> Result<()>,
    ) -> Result<Written> {
        write::write(self.draft, self.source, (path, weights), check)
    }
}

/// The types of a model's values by name.
struct Types {
    dtypes: BTreeMap<String, DType>,
}

impl Types {
    fn of(model: &Model) -> Types {
        let graph = model.graph();
        let values = graph.value_ids().map(|id| graph.value(id));
        let known = values.filter_map(|value| Some((value.name.to_string(), value.ty.dtype()?)));
        Types { dtypes: known.collect() }
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        self.dtypes.get(name).copied()
    }
}

/// The state of a rewrite.
struct Work {
    draft: Draft,
    types: Types,
    layers: Vec<Layer>,
    /// The names of the results of a weight, and its bytes, by its name and form.
    done: BTreeMap<WeightKey, Vec<String>>,
}

/// What tells a quantized weight from others: the name of the float weight, whether it was
/// transposed, and how it is quantized.
type WeightKey = (String, bool, String);

/// Operators whose second input is a weight.
const WEIGHTED: [&str; 5] = ["Conv", "ConvTranspose", "LSTM", "GRU", "RNN"];

/// A constant weight.
struct WeightOf {
    shape: Vec<usize>,
    dtype: DType,
}

impl WeightOf {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.byte_size().unwrap_or(1)
    }
}

impl Work {
    /// The constant weight of this name, or why there is none.
    fn weight(&self, name: &str) -> std::result::Result<WeightOf, String> {
        let proto = self.draft.constant(name).ok_or("its weight is computed")?;
        let dtype = DType::from_onnx(proto.data_type()).ok_or("the type of its weight is not known")?;
        let shape: Option<Vec<usize>> = proto.dims.iter().map(|size| usize::try_from(*size).ok()).collect();
        let shape = shape.filter(|shape| !shape.contains(&0)).ok_or("its weight is empty")?;
        Ok(WeightOf { shape, dtype })
    }

    /// Adds the results of a job as initializers, or finds them if an earlier layer has the same
    /// weight. `results` are the suffixes of their names, with type and dimensions. Returns the
    /// names, and how many bytes were added.
    fn add_weight(
        &mut self,
        job: Job,
        results: &[(&str, DType, Vec<usize>)],
    ) -> Result<(Vec<String>, usize)> {
        let name = job.weight.name().to_string();
        let key = (name.clone(), job.is_transposed, format!("{:?}", job.form));
        if let Some(names) = self.done.get(&key) {
            return Ok((names.clone(), 0));
        }
        let bytes = job.lengths()?.iter().sum();
        let index = self.draft.jobs.len();
        let mut names = Vec::with_capacity(results.len());
        for (result, (suffix, dtype, dims)) in results.iter().enumerate() {
            let name = self.draft.value_name(&format!("{name}{suffix}"));
            let header = TensorProto {
                name: Some(name.clone()),
                data_type: Some(dtype.onnx_code()),
                dims: dims.iter().map(|size| *size as i64).collect(),
                ..TensorProto::default()
            };
            self.draft.parts.push(Part { header, from: Some((index, result)) });
            names.push(name);
        }
        self.draft.jobs.push(job);
        self.done.insert(key, names.clone());
        Ok((names, bytes))
    }

    /// Leaves a node of another operator as it is. One with a weight is a row of the report.
    fn pass(&mut self, (index, node): (usize, &NodeProto)) {
        let has_weight = WEIGHTED.contains(&node.op_type()) && matches!(node.domain(), "" | "ai.onnx");
        let weight = node.input.get(1).filter(|_| has_weight).and_then(|name| self.weight(name).ok());
        if let Some(WeightOf { shape, .. }) = weight {
            let reason = "this mode has no rule for the operator".to_string();
            self.note((index, node), shape, Outcome::Kept { reason });
        }
        self.draft.nodes.push(node.clone());
    }

    fn note(&mut self, (index, node): (usize, &NodeProto), shape: Vec<usize>, outcome: Outcome) {
        let operator = node.op_type().to_string();
        self.layers.push(Layer { node: title(index, node), operator, shape, outcome });
    }
}

/// The name of a node, or its operator and number.
fn title(index: usize, node: &NodeProto) -> String {
    match node.name() {
        "" => format!("{}_{index}", node.op_type()),
        name => name.to_string(),
    }
}

/// Whether a node is of an operator of the standard.
fn is_standard(node: &NodeProto, operator: &str) -> bool {
    node.op_type() == operator && matches!(node.domain(), "" | "ai.onnx")
}

fn nothing_to_quantize(layers: &[Layer]) -> Error {
    let reasons = layers.iter().filter_map(|layer| match &layer.outcome {
        Outcome::Kept { reason } => Some(format!("{} ({}): {reason}", layer.node, layer.operator)),
        Outcome::Quantized { .. } => None,
    });
    let reasons: Vec<String> = reasons.take(5).collect();
    let error = Error::new(ErrorKind::InvalidArgument, "no node of the model can be quantized in this mode");
    match reasons.is_empty() {
        true => {
            error.help("the model has no layer with a weight; subgraphs and functions are left as they are")
        }
        false => error.help(format!("each layer stays as it is, because: {}", reasons.join("; "))),
    }
}
