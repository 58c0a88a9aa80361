//! FLOP count of the matmuls, convolutions and recurrent layers of a run.
//!
//! Divided by the measured time, it gives the FLOP/s to compare with the CPU's peak.

use ort_runtime::ir::{Graph, Node, ValueId, ValueType};
use ort_runtime::spec::infer_graph;
use ort_runtime::{Model, Value};

/// The formula for an operator's multiply-adds from its shapes.
enum Count {
    /// GEMM: output elements × K. K is the last dimension of the first input, or the second-to-last
    /// if the named attribute is 1.
    Product(Option<&'static str>),
    /// Convolution: output elements × the weights per output channel. The field is the index of the
    /// weights.
    Convolution(usize),
    /// A pointwise and a depthwise convolution in one node: input pixels × pointwise weights, plus
    /// output elements × the depthwise weights per output channel.
    Separable,
    /// Transposed convolution: input elements × the weights per input channel. The field is the
    /// index of the weights.
    Transposed(usize),
    /// Recurrent layer: sequence length × batch × the weights in the second and third input.
    Recurrent,
}

/// The compute-bound operators; all others are negligible beside them. Names are unique across
/// domains, except for the two `QLinearConv`, which have the same formula.
const COUNTS: &[(&str, Count)] = &[
    ("MatMul", Count::Product(None)),
    ("MatMulInteger", Count::Product(None)),
    ("QLinearMatMul", Count::Product(None)),
    ("MatMulNBits", Count::Product(None)),
    ("MatMulIntegerToFloat", Count::Product(None)),
    ("DynamicQuantizeMatMul", Count::Product(None)),
    ("Gemm", Count::Product(Some("transA"))),
    ("FusedGemm", Count::Product(Some("transA"))),
    ("FusedMatMul", Count::Product(Some("transA"))),
    ("QGemm", Count::Product(Some("transA"))),
    ("Conv", Count::Convolution(1)),
    ("FusedConv", Count::Convolution(1)),
    ("NhwcConv", Count::Convolution(1)),
    ("FusedPointwiseDepthwise", Count::Separable),
    ("ConvInteger", Count::Convolution(1)),
    ("QLinearConv", Count::Convolution(3)),
    ("ConvTranspose", Count::Transposed(1)),
    ("RNN", Count::Recurrent),
    ("GRU", Count::Recurrent),
    ("LSTM", Count::Recurrent),
    ("DynamicQuantizeLSTM", Count::Recurrent),
];

/// Returns the multiplications and additions of a run on these inputs, or `None` if a shape is
/// known only at run time. A branch counts as its larger side, a loop as one iteration.
pub(crate) fn count(model: &Model, given: &[(&str, Value)]) -> Option<u64> {
    // Inference writes types into the graph, and the model's graph is shared.
    let mut graph = Graph::clone(model.graph());
    for (name, value) in given {
        let Ok(tensor) = value.tensor() else { continue };
        let shape = tensor.shape().iter().map(|&size| (size as i64).into()).collect();
        let input = graph.find_value(name)?;
        graph.value_mut(input).ty = ValueType::tensor(tensor.dtype(), Some(shape));
    }
    // With the inputs' shapes known, inference makes the other shapes constant.
    infer_graph(&mut graph).ok()?;
    of_graph(&graph)
}

fn of_graph(graph: &Graph) -> Option<u64> {
    let mut sum = 0_u64;
    for node in &graph.nodes {
        let own = match COUNTS.iter().find(|(name, _)| *name == node.spec.name) {
            // Each multiply-add is two operations.
            Some((_, rule)) => of_node(graph, node, rule)?.checked_mul(2)?,
            None => 0,
        };
        let mut largest = 0;
        for subgraph in &node.subgraphs {
            // `If` runs one branch, so the branches are not added up.
            largest = largest.max(of_graph(&subgraph.graph)?);
        }
        sum = sum.checked_add(own)?.checked_add(largest)?;
    }
    Some(sum)
}

/// Returns the multiply-adds of one node.
fn of_node(graph: &Graph, node: &Node, rule: &Count) -> Option<u64> {
    let input = |index: usize| shape(graph, *node.inputs.get(index)?);
    let output = || shape(graph, *node.outputs.first()?);
    match rule {
        Count::Product(transposed) => {
            // The first input is [.., M, K], or [.., K, M] if it is transposed.
            let left = input(0)?;
            let is_transposed = transposed.is_some_and(|name| node.attrs.flag(name).unwrap_or(false));
            let summed = left.iter().rev().nth(usize::from(is_transposed)).copied()?;
            product(&output()?)?.checked_mul(summed)
        }
        // The first axis of the weights counts output channels; the rest is the filter of one
        // channel.
        Count::Convolution(weights) => product(&output()?)?.checked_mul(product(input(*weights)?.get(1..)?)?),
        Count::Separable => {
            // The image is [N, C, spatial..]; its channels are in the pointwise weights already.
            let pixels = product(input(0)?.get(2..)?)?.checked_mul(*input(0)?.first()?)?;
            let depthwise = product(&output()?)?.checked_mul(product(input(2)?.get(1..)?)?)?;
            pixels.checked_mul(product(&input(1)?)?)?.checked_add(depthwise)
        }
        // The first axis of the weights counts input channels: the rest multiplies one input
        // element.
        Count::Transposed(weights) => product(&input(0)?)?.checked_mul(product(input(*weights)?.get(1..)?)?),
        Count::Recurrent => {
            // The input is [sequence, batch, size], or [batch, sequence, size] with layout 1.
            let steps = product(input(0)?.get(..2)?)?;
            steps.checked_mul(product(&input(1)?)?.checked_add(product(&input(2)?)?)?)
        }
    }
}

fn shape(graph: &Graph, value: Option<ValueId>) -> Option<Vec<u64>> {
    let sizes = graph.value(value?).ty.shape()?;
    // A symbolic size ends the count: a partial sum would understate the work.
    sizes.iter().map(|size| size.as_constant().and_then(|size| u64::try_from(size).ok())).collect()
}

fn product(sizes: &[u64]) -> Option<u64> {
    // Shapes come from the model file, so their product may overflow.
    sizes.iter().try_fold(1_u64, |product, &size| product.checked_mul(size))
}

#[cfg(test)]
mod tests {
    use ort_runtime::DType;
    use ort_runtime::ir::{Attribute, GraphBuilder};

    use super::*;

    /// Returns the count of a graph with one node on inputs of these shapes.
    fn of(op: &str, shapes: &[&[&str]], attrs: &[(&str, Attribute)]) -> Option<u64> {
        of_domain(("", op), shapes, attrs)
    }

    fn of_domain(op: (&str, &str), shapes: &[&[&str]], attrs: &[(&str, Attribute)]) -> Option<u64> {
        let mut builder = GraphBuilder::new("one");
        let inputs = shapes.iter().enumerate();
        let inputs: Vec<Option<ValueId>> = inputs
            .map(|(index, shape)| Some(builder.input(&format!("x{index}"), DType::F32, shape)))
            .collect();
        let outputs = builder.add(op, &inputs, attrs, 1, Vec::new()).unwrap();
        of_graph(&builder.finish(&outputs).unwrap())
    }

    #[test]
    fn each_multiplication_and_each_addition_counts() {
        let one = || Attribute::Int(1);
        assert_eq!(of("MatMul", &[&["5", "2", "3"], &["3", "4"]], &[]), Some(2 * 5 * 2 * 4 * 3));
        assert_eq!(of("Gemm", &[&["3", "2"], &["3", "4"]], &[("transA", one())]), Some(2 * 2 * 4 * 3));
        let depthwise = [("group", Attribute::Int(8))];
        let sizes: [&[&str]; 2] = [&["1", "8", "10", "10"], &["8", "1", "3", "3"]];
        assert_eq!(of("Conv", &sizes, &depthwise), Some(2 * 8 * 8 * 8 * 9));
        let sizes: [&[&str]; 3] = [&["2", "3", "10", "10"], &["8", "3", "1", "1"], &["8", "1", "3", "3"]];
        let separable = of_domain(("ort-runtime", "FusedPointwiseDepthwise"), &sizes, &depthwise);
        assert_eq!(separable, Some(2 * 2 * 8 * (10 * 10 * 3 + 8 * 8 * 9)));
        let sizes: [&[&str]; 2] = [&["1", "4", "10", "10"], &["4", "6", "2", "2"]];
        assert_eq!(of("ConvTranspose", &sizes, &[]), Some(2 * 4 * 10 * 10 * 6 * 2 * 2));
        assert_eq!(of("Relu", &[&["1000"]], &[]), Some(0));
        assert_eq!(of("MatMul", &[&["n", "3"], &["3", "4"]], &[]), None);
    }
}
