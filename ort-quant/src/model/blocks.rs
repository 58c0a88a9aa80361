//! Weight-only quantization in blocks: `MatMulNBits` and `GatherBlockQuantized`.
//!
//! Names are those of onnxruntime.quantization's `MatMulNBitsQuantizer`. Unlike it, this also takes
//! `Gemm`, and tables of `Gather`, which have 8 bits because a row is read as it is.

use std::collections::BTreeSet;

use ort_core::dtype::DType;
use ort_core::onnx::proto::NodeProto;
use ort_core::spec::{Registry, Traits};
use ort_core::{Error, ErrorKind, Result};

use super::draft::{float_of, integer, integer_of, node};
use super::options::{BlockOptions, LastProduct, Quantizer};
use super::precision::Blocks;
use super::smoothing;
use super::tuned::{TunedForm, TunedWeights};
use super::weights::{Form, Job};
use super::work::{Found, Outcome, Work, is_standard, title};
use crate::grid::{Bits, BlockLayout, BlockMethod, BlockQuantizer, Scheme};

const MICROSOFT: &str = "com.microsoft";

/// A layer that can be quantized.
#[derive(Clone)]
pub(super) struct BlockLayer {
    /// The position of the weight among the inputs.
    pub(super) weight: usize,
    /// Whether the weight is [N, K].
    pub(super) is_transposed: bool,
    pub(super) is_half: bool,
    shape: Vec<usize>,
    pub(super) before: usize,
    pub(super) scheme: Scheme,
    /// Whether its weight has a precision of its own.
    is_assigned: bool,
}

/// A product whose weight becomes blocks.
pub(super) struct BlockProduct {
    /// The number of its node.
    pub(super) node: usize,
    pub(super) input: String,
    pub(super) weight: String,
    pub(super) layer: BlockLayer,
}

impl BlockLayer {
    /// Whether the layer is a product, and not a table of `Gather`.
    pub(super) fn is_product(&self) -> bool {
        self.weight == 1
    }

    /// The layer with these blocks.
    pub(super) fn with(&self, blocks: Blocks) -> BlockLayer {
        BlockLayer { scheme: blocks.of(self.scheme), ..self.clone() }
    }

    /// The form of its weight.
    pub(super) fn form(&self, weight: &str) -> TunedForm {
        (weight.to_string(), self.is_transposed, self.scheme.blocks.bits.count())
    }

    /// What quantizes its weight.
    pub(super) fn job(&self, work: &Work, weight: &str) -> Result<Job> {
        let missing = || Error::new(ErrorKind::Fail, format!("there is no constant '{weight}'"));
        Ok(Job {
            weight: work.draft.constant(weight).cloned().ok_or_else(missing)?,
            codes: String::new(),
            is_transposed: self.is_transposed,
            shape: vec![self.scheme.blocks.k, self.scheme.blocks.n],
            is_half: self.is_half,
            has_one_point: false,
            scales: None,
            bias: None,
            importance: None,
            ready: None,
            form: Form::Blocks(self.scheme),
        })
    }

    /// The type of scales.
    fn float(&self) -> DType {
        if self.is_half { DType::F16 } else { DType::F32 }
    }

    /// Why the layer stays all the same.
    pub(super) fn refusal(&self) -> Result<Option<String>> {
        let BlockQuantizer { k, block_size, is_symmetric, .. } = self.scheme.blocks;
        // Rows have no padding, so that blocks have to fill them.
        if !self.is_product() && !k.is_multiple_of(block_size) {
            let reason = format!("its rows of {k} are no multiple of the block size, {block_size}");
            return Ok(Some(reason));
        }
        let element = if self.is_half { 2 } else { 4 };
        let sizes = self.scheme.sizes(element)?;
        let points = if is_symmetric { 0 } else { sizes.zero_points };
        let after = sizes.codes + sizes.scales * element + points;
        let is_smaller = after < self.before;
        Ok((!is_smaller).then(|| format!("its weight of {} bytes would take {after}", self.before)))
    }
}

pub(super) fn rewrite(
    work: &mut Work,
    nodes: &[NodeProto],
    options: &BlockOptions,
    quantizer: &Quantizer,
) -> Result<()> {
    // Refuses a wrong block size before any node is looked at.
    BlockQuantizer { k: 1, ..blocks_of(options) }.sizes()?;
    if options.is_symmetric && options.method == BlockMethod::HalfQuadratic {
        let text = "half-quadratic quantization (hqq) searches zero points, and symmetric blocks have none";
        return Err(Error::new(ErrorKind::InvalidArgument, text)
            .help("give the blocks zero points, or take another method"));
    }
    let mut nodes = nodes.to_vec();
    // Values of bodies are not divided.
    if !work.is_inside && !options.tuned.smoothing.is_empty() {
        smoothing::fold(work, &mut nodes, &options.tuned.smoothing, quantizer)?;
    }
    let found = layers(work, &nodes, options, quantizer);
    work.each_layer(&nodes, found, |work, node, layer| {
        if let Some(reason) = layer.refusal()? {
            work.keep(node, layer.shape, reason);
            return Ok(());
        }
        match layer.is_product() {
            true => replace_product(work, node, &layer, &options.tuned),
            false => replace_gather(work, node, &layer),
        }
    })?;
    work.draft.import(MICROSOFT, 1);
    Ok(())
}

/// The layers of a graph.
pub(super) fn layers(
    work: &Work,
    nodes: &[NodeProto],
    options: &BlockOptions,
    quantizer: &Quantizer,
) -> Vec<Option<Found<BlockLayer>>> {
    let mut found = work.candidates(nodes, quantizer, |node| {
        let layer = candidate(work, node, options)?;
        Some(layer.and_then(|layer| assigned(node, layer, &options.tuned)))
    });
    // In a body nothing tells which product makes the answer.
    if options.last != LastProduct::AsOthers && !work.is_inside {
        let layers = found.iter_mut().zip(nodes).rev();
        let mut products = layers.filter_map(|(layer, node)| match layer {
            Some(Ok(layer)) if layer.is_product() => Some((layer, node)),
            _ => None,
        });
        let last = products.next().filter(|(last, _)| !last.is_assigned);
        let is_protected =
            |node| options.last == LastProduct::Protected || is_head(node, nodes, &work.outputs);
        if let Some((last, _)) = last.filter(|(_, node)| is_protected(node)) {
            protect(&mut last.scheme.blocks);
        }
    }
    found
}

/// Whether a node divides factors of its input away.
fn normalizes(node: &NodeProto) -> bool {
    // Without a registry nothing was loaded.
    let registry = Registry::global().ok();
    let record = registry.and_then(|registry| registry.find(node.domain(), node.op_type()));
    record.is_some_and(|record| record.traits.has(Traits::NORMALIZES))
}

/// Whether the result of a product becomes an output without a normalization.
fn is_head(product: &NodeProto, nodes: &[NodeProto], outputs: &BTreeSet<String>) -> bool {
    let mut reached: BTreeSet<&str> = product.output.iter().map(String::as_str).collect();
    // In topological order, so that one pass finds all that follows.
    for node in nodes {
        let reads = node.input.iter().any(|input| !input.is_empty() && reached.contains(input.as_str()));
        if reads && !normalizes(node) {
            reached.extend(node.output.iter().map(String::as_str));
        }
    }
    reached.iter().any(|value| outputs.contains(*value))
}

/// The layer in the precision that its weight has, if it has one of its own.
fn assigned(node: &NodeProto, mut layer: BlockLayer, tuned: &TunedWeights) -> Found<BlockLayer> {
    match node.input.get(layer.weight).and_then(|weight| tuned.precisions.get(weight)) {
        Some(Some(blocks)) => layer = BlockLayer { is_assigned: true, ..layer.with(*blocks) },
        Some(None) => return Err(STAYS_FLOAT.into()),
        None => {}
    }
    Ok(layer)
}

/// Why a layer stays that the caller's bound leaves in floating point.
const STAYS_FLOAT: &str = "its bytes are worth their accuracy within the bound";

/// The products of a graph whose weights become blocks.
pub(super) fn products(
    work: &Work,
    nodes: &[NodeProto],
    options: &BlockOptions,
    quantizer: &Quantizer,
) -> Result<Vec<BlockProduct>> {
    let mut products = Vec::new();
    let found = layers(work, nodes, options, quantizer).into_iter();
    for (index, (node, found)) in nodes.iter().zip(found).enumerate() {
        let (Some(Ok(layer)), [input, weight, ..]) = (found, &node.input[..]) else { continue };
        if layer.is_product() && layer.refusal()?.is_none() {
            let (input, weight) = (input.clone(), weight.clone());
            products.push(BlockProduct { node: index, input, weight, layer });
        }
    }
    Ok(products)
}

/// The weights of a block of 8 bits, at least: they are as accurate with fewer scales.
const LARGE_BLOCK: usize = 128;

/// Gives blocks 8 bits.
fn protect(blocks: &mut BlockQuantizer) {
    blocks.bits = Bits::Eight;
    if blocks.k.is_multiple_of(LARGE_BLOCK) {
        blocks.block_size = blocks.block_size.max(LARGE_BLOCK);
    }
}

fn blocks_of(options: &BlockOptions) -> BlockQuantizer {
    let BlockOptions { bits, block_size, is_symmetric, .. } = *options;
    BlockQuantizer { k: 0, n: 1, block_size, bits, is_symmetric, layout: BlockLayout::MatMulNBits }
}

/// The layer of a node, or why it stays; `None` for a node without a weight.
fn candidate(work: &Work, node: &NodeProto, options: &BlockOptions) -> Option<Found<BlockLayer>> {
    let place = if is_standard(node, "Gather") {
        0
    } else if is_standard(node, "MatMul") || is_standard(node, "Gemm") {
        1
    } else {
        return None;
    };
    let name = node.input.get(place)?;
    let read = || -> Found<BlockLayer> {
        let weight = work.weight(name)?;
        let is_half = match weight.dtype {
            DType::F32 => false,
            DType::F16 => true,
            other => return Err(format!("its weight is {other}")),
        };
        let [rows, columns] = weight.shape[..] else {
            return Err(format!("its weight has {} dimensions, not 2", weight.shape.len()));
        };
        let mut is_transposed = place == 0;
        if is_standard(node, "Gather") && !matches!(integer_of(node, "axis", 0), 0 | -2) {
            return Err("it gathers columns, and blocks are parts of rows".into());
        }
        if is_standard(node, "Gemm") {
            let is_plain = integer_of(node, "transA", 0) == 0 && float_of(node, "alpha", 1.0) == 1.0;
            let has_bias = node.input.get(2).is_some_and(|name| !name.is_empty());
            if !is_plain || (has_bias && float_of(node, "beta", 1.0) != 1.0) {
                return Err("it is more than a product and a bias: transA, alpha or beta".into());
            }
            is_transposed = integer_of(node, "transB", 0) != 0;
        }
        let (k, n) = if is_transposed { (columns, rows) } else { (rows, columns) };
        let mut blocks = BlockQuantizer { k, n, ..blocks_of(options) };
        if place == 0 {
            // A row of a table is read as it is.
            blocks.is_symmetric = true;
            protect(&mut blocks);
        }
        let scheme = Scheme { blocks, method: options.method };
        let (before, shape) = (weight.bytes(), weight.shape);
        Ok(BlockLayer { weight: place, is_transposed, is_half, shape, before, scheme, is_assigned: false })
    };
    // A Gather of integers, as in shape arithmetic, is no layer.
    let is_table = place == 1 || work.weight(name).is_ok_and(|weight| weight.dtype.is_float());
    is_table.then(read)
}

/// Replaces a product by `MatMulNBits`, and the bias of a Gemm by an Add.
fn replace_product(work: &mut Work, old: &NodeProto, layer: &BlockLayer, tuned: &TunedWeights) -> Result<()> {
    let BlockQuantizer { k, n, block_size, bits, is_symmetric, .. } = layer.scheme.blocks;
    let count = k.div_ceil(block_size);
    let suffix = format!("_Q{}", bits.count());
    let float = layer.float();
    let points = match layer.scheme.has_float_points() {
        true => (float, vec![n, count]),
        false => (DType::U8, vec![n, (count * bits.stored()).div_ceil(8)]),
    };
    let codes = vec![n, count, block_size * bits.stored() / 8];
    let mut results = vec![(suffix.as_str(), DType::U8, codes), ("_scales", float, vec![n, count])];
    results.extend((!is_symmetric).then_some(("_zero_points", points.0, points.1)));
    let weight = old.input.get(layer.weight).map(String::as_str).unwrap_or_default();
    let is_corrected = tuned.done.get(&layer.form(weight)).is_some_and(|tuned| tuned.is_corrected);
    results.extend(is_corrected.then(|| ("_bias_correction", float, vec![n])));
    let input = old.input.first().map(String::as_str).unwrap_or_default();
    let names = add(work, old, (layer, Some(tuned)), &results)?;
    let is_gemm = is_standard(old, "Gemm");
    let output = old.output.first().map(String::as_str).unwrap_or_default();
    let bias = old.input.get(2).filter(|name| is_gemm && !name.is_empty());
    let title = title(old);
    let product = match bias {
        Some(_) => work.draft.value_name(&format!("{output}_MatMul")),
        None => output.to_string(),
    };
    let base = if is_gemm { format!("{title}_MatMul") } else { title.clone() };
    let name = work.draft.node_name(&format!("{base}{suffix}"));
    let attributes = vec![
        integer("K", k as i64),
        integer("N", n as i64),
        integer("bits", bits.stored() as i64),
        integer("block_size", block_size as i64),
    ];
    let mut inputs: Vec<&str> = std::iter::once(input).chain(names.iter().map(String::as_str)).collect();
    if is_corrected {
        // The bias is the last of six inputs, behind zero points and an order of rows.
        while inputs.len() < 6 {
            inputs.insert(inputs.len() - 1, "");
        }
    }
    work.draft.nodes.push(node((MICROSOFT, "MatMulNBits"), name, &inputs, &[&product], attributes));
    if let Some(bias) = bias {
        let name = work.draft.node_name(&format!("{title}_Add"));
        work.draft.nodes.push(node(("", "Add"), name, &[&product, bias], &[output], Vec::new()));
    }
    Ok(())
}

/// Replaces the table of a Gather.
fn replace_gather(work: &mut Work, old: &NodeProto, layer: &BlockLayer) -> Result<()> {
    let BlockQuantizer { k, n, block_size, bits, .. } = layer.scheme.blocks;
    let (bits, suffix) = (bits.count(), format!("_Q{}", bits.count()));
    let results = [
        (suffix.as_str(), DType::U8, vec![n, k * bits / 8]),
        ("_scales", layer.float(), vec![n, k / block_size]),
    ];
    let names = add(work, old, (layer, None), &results)?;
    let [codes, scales] = &names[..] else { return Ok(()) };
    let indices = old.input.get(1).map(String::as_str).unwrap_or_default();
    let output = old.output.first().map(String::as_str).unwrap_or_default();
    let name = work.draft.node_name(&format!("{}{suffix}", title(old)));
    let attributes = vec![
        integer("gather_axis", 0),
        integer("quantize_axis", 1),
        integer("block_size", block_size as i64),
        integer("bits", bits as i64),
    ];
    let inputs = [codes.as_str(), indices, scales.as_str()];
    work.draft.nodes.push(node((MICROSOFT, "GatherBlockQuantized"), name, &inputs, &[output], attributes));
    Ok(())
}

/// Adds the quantized weight of a layer, and its row of the report. Returns the names of the
/// results.
fn add(
    work: &mut Work,
    old: &NodeProto,
    (layer, tuned): (&BlockLayer, Option<&TunedWeights>),
    results: &[(&str, DType, Vec<usize>)],
) -> Result<Vec<String>> {
    let BlockQuantizer { block_size, bits, is_symmetric, .. } = layer.scheme.blocks;
    let weight = old.input.get(layer.weight).map(String::as_str).unwrap_or_default();
    let mut job = layer.job(work, weight)?;
    let mut method = "";
    if let (Some(tuned), Some(input)) = (tuned, old.input.first()) {
        let done = tuned.done.get(&layer.form(weight));
        job.ready = done.map(|tuned| tuned.done.clone());
        // In a body another value may have the name.
        job.importance = tuned.importance.get(input).filter(|_| !work.is_inside).cloned();
        let smoothed = tuned.smoothing.get(input).filter(|_| !work.is_inside);
        job.scales = smoothed.map(|smoothed| smoothing::row_scales(smoothed, old));
        method = match (done, &job.scales) {
            (Some(tuned), _) => tuned.label,
            (None, Some(_)) => ", awq",
            (None, None) => "",
        };
    }
    let (names, added) = work.add_weight(job, results)?;
    let before = if added == 0 { 0 } else { layer.before };
    let points = if is_symmetric { "" } else { " with zero points" };
    let precision = format!("int{}, blocks of {block_size}{points}{method}", bits.count());
    let codes = names.first().cloned().unwrap_or_default();
    let outcome = Outcome::Quantized { precision, before, after: added, codes };
    work.note(old, layer.shape.clone(), outcome);
    Ok(names)
}
