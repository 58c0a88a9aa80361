//! Quantization and pruning of models: which nodes change, what they become, and the new file.
//!
//! A [`Quantizer`] decides on the messages of the model, so that names, operator sets and
//! everything that is not quantized stay as they are. [`Quantization::write`] computes and writes
//! one weight after the other. Weights that samples tune are read before.

mod awq;
mod bias_correction;
mod block_values;
mod blocks;
mod channel_flow;
mod channel_pruner;
mod channel_spaces;
mod corrected;
mod draft;
mod dynamic;
mod equalise;
mod flow;
mod gptq;
mod half_precision;
mod half_type;
mod input_groups;
mod integer_products;
mod mixed;
mod moved_weights;
mod options;
mod precision;
mod products;
mod prunable;
mod prune_form;
mod pruned;
mod pruner;
mod range_search;
mod scale_form;
mod scope;
mod select;
mod slice_form;
mod smoothed;
mod smoothing;
mod static_bias;
mod static_qdq;
mod static_qoperator;
mod static_weights;
mod tuned;
mod units;
mod variances;
mod weight_channels;
mod weight_reader;
mod weights;
mod work;
mod write;

use std::collections::BTreeSet;
use std::path::Path;

use ort_core::onnx::proto::NodeProto;
use ort_core::onnx::{Source, Weights};
use ort_core::session::Model;
use ort_core::{Error, ErrorKind, Result};

pub use self::channel_pruner::ChannelPruner;
pub use self::corrected::StaticBiases;
use self::draft::Draft;
pub use self::equalise::Equalised;
use self::half_precision::SharedConstants;
pub use self::half_type::HalfType;
pub use self::mixed::{MeasureWeight, MixedWeight, MixedWeights};
use self::moved_weights::MovedWeights;
pub use self::options::{
    BlockOptions, DynamicOptions, HalfOptions, LastProduct, Mode, Quantizer, Scope, StaticFormat,
    StaticOptions, StaticType,
};
pub use self::precision::{Blocks, ErrorSearch, Precision};
pub use self::pruned::{OutputErrors, PruneOutcome, PrunedLayer, Pruning};
pub use self::pruner::{PruneTuning, Pruner};
pub use self::range_search::{GridNames, Grids, RangeChoice, choose_ranges};
pub use self::select::NodePattern;
use self::select::Selection;
pub use self::smoothed::{Smoothed, Smoothing};
pub use self::tuned::TunedWeights;
pub use self::units::LayerUnit;
use self::work::Work;
pub use self::work::{Layer, Outcome};
pub use self::write::{FileSize, Written};

/// A quantized model that is not written yet.
pub struct Quantization<'s> {
    source: &'s Source,
    draft: Draft,
    layers: Vec<Layer>,
    grids: Grids,
    bytes_before: usize,
}

impl Quantizer {
    /// Decides what becomes of each node.
    ///
    /// # Errors
    ///
    /// The model cannot be loaded, an option is invalid, a pattern matches no node, or no node can
    /// be quantized.
    pub fn quantize<'s>(&self, source: &'s Source) -> Result<Quantization<'s>> {
        if let Mode::Static(options) = &self.mode {
            options.check()?;
        }
        let (mut work, nodes) = self.start(source)?;
        let bytes_before = source.bytes().len() + work.draft.external_bytes();
        let read_before = draft::reads(&nodes);
        match &self.mode {
            Mode::Dynamic(options) => {
                each_graph(&mut work, &nodes, &mut |work, nodes| {
                    dynamic::rewrite(work, nodes, options, self)
                })?;
            }
            Mode::Static(options) => {
                each_graph(&mut work, &nodes, &mut |work, nodes| match options.format {
                    StaticFormat::Qdq => static_qdq::rewrite(work, nodes, options, self),
                    StaticFormat::QOperator => static_qoperator::rewrite(work, nodes, options, self),
                })?;
            }
            Mode::Blocks(options) => {
                each_graph(&mut work, &nodes, &mut |work, nodes| {
                    blocks::rewrite(work, nodes, options, self)
                })?;
            }
            Mode::Half(options) => {
                let mut shared = SharedConstants::default();
                each_graph(&mut work, &nodes, &mut |work, nodes| {
                    half_precision::rewrite(work, nodes, (options, source), (self, &mut shared))
                })?;
            }
        }
        let Work { mut draft, layers, grids, .. } = work;
        let is_quantized = |layer: &Layer| matches!(layer.outcome, Outcome::Quantized { .. });
        if !layers.iter().any(is_quantized) {
            return Err(nothing_to_quantize(&layers));
        }
        draft.drop_unread(&read_before);
        Ok(Quantization { source, draft, layers, grids, bytes_before })
    }

    /// The values whose ranges [`Mode::Static`] needs: the computed inputs of products, and their
    /// results in the QOperator format. Of [`Mode::Half`], all values that float16 may not hold.
    ///
    /// # Errors
    ///
    /// The model cannot be loaded, or a pattern matches no node.
    pub fn activations(&self, source: &Source) -> Result<Vec<String>> {
        let (mut work, nodes) = self.start(source)?;
        let mut values = BTreeSet::new();
        each_graph(&mut work, &nodes, &mut |work, nodes| {
            values.extend(match &self.mode {
                Mode::Static(options) if options.format == StaticFormat::QOperator => {
                    static_qoperator::activations(work, nodes, (options, self))
                }
                Mode::Half(HalfOptions { ty: HalfType::Float16, .. }) => {
                    half_precision::activations(work, nodes)
                }
                Mode::Half(_) => BTreeSet::new(),
                _ => static_qdq::activations(work, nodes, self),
            });
            work.draft.nodes.extend_from_slice(nodes);
            Ok(())
        })?;
        Ok(values.into_iter().collect())
    }

    fn start(&self, source: &Source) -> Result<(Work, Vec<NodeProto>)> {
        let (mut work, nodes) = start(source, self.mode.least_opset(), self.selection())?;
        // Biases are half as large, too; in the other modes they stay.
        if matches!(self.mode, Mode::Half(_)) {
            work.least_rank = 0;
        }
        work.moved = Some(MovedWeights::of(&self.mode, source.external_data()?));
        Ok((work, nodes))
    }
}

/// The state of a rewrite that has not begun, and the nodes of the graph.
fn start(source: &Source, least_opset: i64, selection: Selection<'_>) -> Result<(Work, Vec<NodeProto>)> {
    let model = Model::from_source(source.clone())?;
    let mut draft = Draft::new(source, &model, least_opset)?;
    let nodes = std::mem::take(&mut draft.nodes);
    let mut work = Work::new(draft, &model);
    work.find_ends(&nodes);
    selection.check(&nodes, |index| work.place(index))?;
    Ok((work, nodes))
}

impl Quantization<'_> {
    /// The nodes with weights, in the order of the file.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The scales and zero points of the values of a static model whose ranges the options say, for
    /// [`choose_ranges`].
    pub fn grids(&self) -> &Grids {
        &self.grids
    }

    /// The bytes of the original model, with its data files.
    pub fn bytes_before(&self) -> usize {
        self.bytes_before
    }

    /// The bytes that [`Quantization::write`] will write, to the byte, without computing a weight.
    ///
    /// # Errors
    ///
    /// A file of the original cannot be read, or the model is too large for a file.
    pub fn size(&mut self, path: &Path, weights: &Weights) -> Result<FileSize> {
        write::size(&mut self.draft, self.source, (path, weights))
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

/// What is done with the nodes of a graph: it puts the new ones into the draft.
type Rewrite<'r> = dyn FnMut(&mut Work, &[NodeProto]) -> Result<()> + 'r;

/// Rewrites a graph after the bodies in it.
fn each_graph(work: &mut Work, nodes: &[NodeProto], rewrite: &mut Rewrite<'_>) -> Result<()> {
    let mut nodes = nodes.to_vec();
    for node in nodes.iter_mut().filter(|node| draft::subgraphs(node).next().is_some()) {
        let around = (std::mem::take(&mut work.draft.nodes), std::mem::take(&mut work.outputs));
        let was_inside = std::mem::replace(&mut work.is_inside, true);
        for graph in draft::subgraphs_mut(node) {
            work.draft.take_weights(graph, work.least_rank);
            work.outputs = graph.output.iter().map(|output| output.name().to_string()).collect();
            each_graph(work, &graph.node, rewrite)?;
            graph.node = std::mem::take(&mut work.draft.nodes);
        }
        (work.draft.nodes, work.outputs) = around;
        work.is_inside = was_inside;
    }
    let folded = match &mut work.moved {
        Some(moved) => moved_weights::fold(moved, &mut work.draft, &mut nodes, &work.outputs)?,
        None => BTreeSet::new(),
    };
    rewrite(work, &nodes)?;
    let is_folded = |node: &NodeProto| node.output.first().is_some_and(|output| folded.contains(output));
    work.draft.nodes.retain(|node| !is_folded(node));
    Ok(())
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
            error.help("the model has no layer with a weight; functions of the model are left as they are")
        }
        false => error.help(format!("each layer stays as it is, because: {}", reasons.join("; "))),
    }
}
