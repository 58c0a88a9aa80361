//! Weight-only quantization in blocks: `MatMulNBits` and `GatherBlockQuantized`.
//!
//! Names are those of onnxruntime.quantization's `MatMulNBitsQuantizer`. Unlike it, this also takes
//! `Gemm`, and tables of `Gather`, which have 8 bits because a row is read as it is.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::onnx::proto::NodeProto;

use super::draft::{float_of, integer, integer_of, node};
use super::options::{BlockOptions, Quantizer};
use super::weights::{Form, Job};
use super::work::{Found, Outcome, Work, is_standard, title};
use crate::grid::{Bits, BlockLayout, BlockMethod, BlockQuantizer};

const MICROSOFT: &str = "com.microsoft";

/// A layer that can be quantized.
struct Candidate {
    /// The position of the weight among the inputs.
    weight: usize,
    /// Whether the weight is [N, K].
    is_transposed: bool,
    k: usize,
    n: usize,
    is_half: bool,
    shape: Vec<usize>,
    before: usize,
    bits: Bits,
    method: BlockMethod,
}

impl Candidate {
    /// Whether the layer is a product, and not a table of `Gather`.
    fn is_product(&self) -> bool {
        self.weight == 1
    }
}

pub(super) fn rewrite(
    work: &mut Work,
    nodes: &[NodeProto],
    options: &BlockOptions,
    quantizer: &Quantizer,
) -> Result<()> {
    // Refuses a wrong block size before any node is looked at.
    BlockQuantizer { k: 1, ..blocks_of(options, options.bits) }.sizes()?;
    let mut found = work.candidates(nodes, quantizer, |node| candidate(work, node, options));
    // In a body nothing tells which product makes the answer.
    if options.protects_last && !work.is_inside {
        let mut layers = found.iter_mut().flatten().flatten();
        if let Some(last) = layers.rfind(|layer| layer.is_product()) {
            last.bits = Bits::Eight;
        }
    }
    work.each_layer(nodes, found, |work, node, layer| {
        let blocks = blocks_of(options, layer.bits);
        if layer.is_product() {
            replace_product(work, node, layer, blocks)
        } else {
            replace_gather(work, node, layer, BlockQuantizer { is_symmetric: true, ..blocks })
        }
    })?;
    work.draft.import(MICROSOFT, 1);
    Ok(())
}

fn blocks_of(options: &BlockOptions, bits: Bits) -> BlockQuantizer {
    let BlockOptions { block_size, is_symmetric, .. } = *options;
    BlockQuantizer { k: 0, n: 1, block_size, bits, is_symmetric, layout: BlockLayout::MatMulNBits }
}

/// The layer of a node, or why it stays; `None` for a node without a weight.
fn candidate(work: &Work, node: &NodeProto, options: &BlockOptions) -> Option<Found<Candidate>> {
    let place = if is_standard(node, "Gather") {
        0
    } else if is_standard(node, "MatMul") || is_standard(node, "Gemm") {
        1
    } else {
        return None;
    };
    let name = node.input.get(place)?;
    let read = || -> Found<Candidate> {
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
        let bits = if place == 1 { options.bits } else { Bits::Eight };
        let (before, shape, method) = (weight.bytes(), weight.shape, options.method);
        Ok(Candidate { weight: place, is_transposed, k, n, is_half, shape, before, bits, method })
    };
    // A Gather of integers, as in shape arithmetic, is no layer.
    let is_table = place == 1 || work.weight(name).is_ok_and(|weight| weight.dtype.is_float());
    is_table.then(read)
}

/// Replaces a product by `MatMulNBits`, and the bias of a Gemm by an Add.
fn replace_product(
    work: &mut Work,
    old: &NodeProto,
    candidate: Candidate,
    blocks: BlockQuantizer,
) -> Result<()> {
    let Candidate { k, n, .. } = candidate;
    let blocks = BlockQuantizer { k, n, ..blocks };
    let count = k.div_ceil(blocks.block_size);
    let suffix = format!("_Q{}", blocks.bits.count());
    let float = if candidate.is_half { DType::F16 } else { DType::F32 };
    let per_block = blocks.block_size * blocks.bits.count() / 8;
    let points = (count * blocks.bits.count()).div_ceil(8);
    let mut results =
        vec![(suffix.as_str(), DType::U8, vec![n, count, per_block]), ("_scales", float, vec![n, count])];
    results.extend((!blocks.is_symmetric).then_some(("_zero_points", DType::U8, vec![n, points])));
    let Some(names) = add(work, old, &candidate, blocks, &results)? else { return Ok(()) };
    let is_gemm = is_standard(old, "Gemm");
    let input = old.input.first().map(String::as_str).unwrap_or_default();
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
        integer("bits", blocks.bits.count() as i64),
        integer("block_size", blocks.block_size as i64),
    ];
    let inputs: Vec<&str> = std::iter::once(input).chain(names.iter().map(String::as_str)).collect();
    work.draft.nodes.push(node((MICROSOFT, "MatMulNBits"), name, &inputs, &[&product], attributes));
    if let Some(bias) = bias {
        let name = work.draft.node_name(&format!("{title}_Add"));
        work.draft.nodes.push(node(("", "Add"), name, &[&product, bias], &[output], Vec::new()));
    }
    Ok(())
}

/// Replaces the table of a Gather.
fn replace_gather(
    work: &mut Work,
    old: &NodeProto,
    candidate: Candidate,
    blocks: BlockQuantizer,
) -> Result<()> {
    let Candidate { k, n, .. } = candidate;
    // Rows have no padding, so that blocks have to fill them.
    if !k.is_multiple_of(blocks.block_size) {
        let reason = format!("its rows of {k} are no multiple of the block size, {}", blocks.block_size);
        work.keep(old, candidate.shape, reason);
        return Ok(());
    }
    let blocks = BlockQuantizer { k, n, ..blocks };
    let float = if candidate.is_half { DType::F16 } else { DType::F32 };
    let results = [("_Q8", DType::U8, vec![n, k]), ("_scales", float, vec![n, k / blocks.block_size])];
    let Some(names) = add(work, old, &candidate, blocks, &results)? else { return Ok(()) };
    let [codes, scales] = &names[..] else { return Ok(()) };
    let indices = old.input.get(1).map(String::as_str).unwrap_or_default();
    let output = old.output.first().map(String::as_str).unwrap_or_default();
    let name = work.draft.node_name(&format!("{}_Q8", title(old)));
    let attributes = vec![
        integer("gather_axis", 0),
        integer("quantize_axis", 1),
        integer("block_size", blocks.block_size as i64),
        integer("bits", 8),
    ];
    let inputs = [codes.as_str(), indices, scales.as_str()];
    work.draft.nodes.push(node((MICROSOFT, "GatherBlockQuantized"), name, &inputs, &[output], attributes));
    Ok(())
}

/// Adds the quantized weight of a layer. `None` if that would be no smaller: then the layer stays.
fn add(
    work: &mut Work,
    old: &NodeProto,
    candidate: &Candidate,
    blocks: BlockQuantizer,
    results: &[(&str, DType, Vec<usize>)],
) -> Result<Option<Vec<String>>> {
    let name = old.input.get(candidate.weight).map(String::as_str).unwrap_or_default();
    let Some(weight) = work.draft.constant(name).cloned() else { return Ok(None) };
    let job = Job {
        weight,
        codes: String::new(),
        is_transposed: candidate.is_transposed,
        shape: vec![blocks.k, blocks.n],
        is_half: candidate.is_half,
        has_one_point: false,
        scales: None,
        bias: None,
        form: Form::Blocks(blocks, candidate.method),
    };
    let after: usize = job.lengths()?.iter().sum();
    if after >= candidate.before {
        let reason = format!("its weight of {} bytes would take {after}", candidate.before);
        work.keep(old, candidate.shape.clone(), reason);
        return Ok(None);
    }
    let (names, added) = work.add_weight(job, results)?;
    let before = if added == 0 { 0 } else { candidate.before };
    let kind = if blocks.is_symmetric { "" } else { " with zero points" };
    let precision = format!("int{}, blocks of {}{kind}", blocks.bits.count(), blocks.block_size);
    let outcome = Outcome::Quantized {
        precision,
        before,
        after: added,
        codes: names.first().cloned().unwrap_or_default(),
    };
    work.note(old, candidate.shape.clone(), outcome);
    Ok(Some(names))
}
