//! Transposition of matmul weights for devices that read matrices in vectors
//! ([`Device::vector_bytes`]).
//!
//! If a row is not a whole number of vectors, rows begin at different offsets, and kernels and
//! libraries load single elements. The logits over a vocabulary of 50257 words then take three
//! times as long as reading the weight's bytes. If the columns are whole vectors, we transpose the
//! weight while the session is built. That costs no memory: only matmuls read such a weight, so
//! only the transposed one is kept.
//!
//! [`Device::vector_bytes`]: crate::ep::Device::vector_bytes

use rustc_hash::{FxHashMap, FxHashSet};

use super::environment::FirstClaim;
use super::nodes::{is_no_later, new_node};
use super::report::Report;
use crate::Result;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, Graph, Node, ValueId, ValueType};
use crate::spec::{MICROSOFT, ONNX, RUNTIME};

/// The rule name of this pass.
pub(super) const RULE: &str = "weight_vectors";

/// The launch dominates the cost of smaller weights.
const LEAST: usize = 64 << 10;
/// The index of the weight among a matmul's inputs.
const WEIGHT: usize = 1;

/// Transposes the weights of matmuls according to the vector width of each device; returns whether
/// there were any.
pub(super) fn apply(
    graph: &mut Graph,
    first_claim: FirstClaim<'_>,
    vector_bytes: &[usize],
    report: &mut Report,
) -> Result<bool> {
    let mut transpositions = Vec::new();
    for (weight, readers) in candidates(graph, first_claim, vector_bytes) {
        let Some(sizes) = graph.constants.get(&weight).map(|tensor| tensor.shape().to_vec()) else {
            continue;
        };
        let shape = sizes.iter().rev().map(|size| Dim::from(*size as i64)).collect();
        let dtype = graph.value(weight).ty.dtype().unwrap_or(DType::F32);
        let name = format!("{}.transposed_{}", graph.value(weight).name, graph.value_count());
        let turned = graph.add_value(name.as_str(), ValueType::tensor(dtype, Some(shape)));
        // All readers or none, because only one layout of the weight is kept.
        let products = readers.iter().map(|index| product(graph, *index, turned, first_claim));
        let Some(products) = products.collect::<Result<Option<Vec<Node>>>>()? else { continue };
        for (index, product) in readers.into_iter().zip(products) {
            graph.nodes.get_mut(index).into_iter().for_each(|node| *node = product.clone());
            report.count(RULE);
        }
        let order = vec![("perm".to_owned(), Attribute::Ints(vec![1, 0]))];
        transpositions.push(new_node(ONNX, "Transpose", &name, &[Some(weight)], &[Some(turned)], order)?);
    }
    let has_any = !transpositions.is_empty();
    // Their only inputs are constants, so they may come first. Folding then computes them.
    graph.nodes.splice(..0, transpositions);
    Ok(has_any)
}

/// Returns the weights that are better read transposed, in id order, with the matmuls that read
/// them. No other node reads such a weight.
fn candidates(
    graph: &Graph,
    first_claim: FirstClaim<'_>,
    vector_bytes: &[usize],
) -> Vec<(ValueId, Vec<usize>)> {
    let mut kept: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    let mut readers: FxHashMap<ValueId, Vec<usize>> = FxHashMap::default();
    for (index, node) in graph.nodes.iter().enumerate() {
        let weight = weight_of(graph, node).filter(|weight| {
            let bytes = first_claim(graph, node).and_then(|device| vector_bytes.get(device).copied());
            bytes.is_some_and(|bytes| is_better_transposed(graph, *weight, bytes))
        });
        let is_weight = |(place, read): &(usize, ValueId)| *place == WEIGHT && Some(*read) == weight;
        let inputs = node.inputs.iter().enumerate().filter_map(|(place, read)| Some((place, (*read)?)));
        // A weight that anything else reads keeps its layout, or memory would hold both layouts.
        kept.extend(inputs.filter(|input| !is_weight(input)).map(|(_, read)| read));
        kept.extend(node.subgraphs.iter().flat_map(|inner| &inner.captures).map(|capture| capture.outer));
        weight.into_iter().for_each(|weight| readers.entry(weight).or_default().push(index));
    }
    let mut found: Vec<_> = readers.into_iter().filter(|(weight, _)| !kept.contains(weight)).collect();
    found.sort_unstable_by_key(|(weight, _)| *weight);
    found
}

/// Returns the constant float matrix on the right-hand side of a matmul.
fn weight_of(graph: &Graph, node: &Node) -> Option<ValueId> {
    transposed_form(node)?;
    let rank =
        |place: usize| graph.value(node.inputs.get(place).copied().flatten()?).ty.shape().map(<[_]>::len);
    let weight = node.inputs.get(WEIGHT).copied().flatten()?;
    let tensor = graph.constants.get(&weight)?;
    let is_float = matches!(tensor.dtype(), DType::F16 | DType::BF16 | DType::F32);
    let is_matrix = tensor.shape().len() == 2 && rank(0).is_some_and(|rank| rank >= 2);
    (is_float && is_matrix && tensor.byte_count() >= LEAST).then_some(weight)
}

/// Whether the columns of a constant matrix are whole vectors, and its rows are not.
fn is_better_transposed(graph: &Graph, weight: ValueId, vector_bytes: usize) -> bool {
    let Some(tensor) = graph.constants.get(&weight) else { return false };
    let is_whole = |size: usize| {
        tensor.dtype().byte_len(size).is_some_and(|bytes| bytes.is_multiple_of(vector_bytes.max(1)))
    };
    matches!(*tensor.shape(), [rows, columns] if is_whole(rows) && !is_whole(columns))
}

/// Returns the operator that computes a matmul with its weight transposed.
fn transposed_form(node: &Node) -> Option<(&'static str, &'static str)> {
    match (node.spec.domain, node.spec.name) {
        (ONNX, "MatMul") => Some((RUNTIME, "FusedMatMul")),
        same @ ((ONNX, "Gemm") | (MICROSOFT, "FusedMatMul" | "FusedGemm") | (RUNTIME, "FusedMatMul")) => {
            Some(same)
        }
        _ => None,
    }
}

/// Returns the matmul with the transposition of its weight; `None` if that would move it to a later
/// device.
fn product(
    graph: &Graph,
    index: usize,
    weight: ValueId,
    first_claim: FirstClaim<'_>,
) -> Result<Option<Node>> {
    let Some((plain, (domain, op))) =
        graph.nodes.get(index).and_then(|node| Some((node, transposed_form(node)?)))
    else {
        return Ok(None);
    };
    // The attribute says how the weight was read before, so it flips.
    let is_transposed = plain.attrs.find_int("transB").unwrap_or(0) != 0;
    let others = plain.attrs.iter().filter(|(name, _)| *name != "transB");
    let mut attrs: Vec<_> = others.map(|(name, value)| (name.to_owned(), value.clone())).collect();
    attrs.push(("transB".to_owned(), Attribute::Int(i64::from(!is_transposed))));
    let mut inputs = plain.inputs.to_vec();
    inputs.get_mut(WEIGHT).into_iter().for_each(|input| *input = Some(weight));
    let turned = new_node(domain, op, &plain.name, &inputs, &plain.outputs, attrs)?;
    Ok(is_no_later(graph, first_claim, [plain, &turned]).then_some(turned))
}
