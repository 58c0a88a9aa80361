//! Products, whose inputs and weights static quantization quantizes.

use ort_core::dtype::DType;
use ort_core::onnx::proto::NodeProto;

use super::draft::integer_of;
use super::work::{Work, is_standard};

/// A product.
pub(super) struct Product {
    /// The constant weight, if it has one.
    pub(super) weight: Option<ProductWeight>,
    /// The positions of the inputs that are computed.
    pub(super) activations: Vec<usize>,
}

pub(super) struct ProductWeight {
    pub(super) shape: Vec<usize>,
    pub(super) axis: Option<usize>,
    pub(super) before: usize,
}

/// The product of a node, or why it stays; `None` for another node.
pub(super) fn product(
    work: &Work,
    node: &NodeProto,
    per_channel: bool,
) -> Option<std::result::Result<Product, String>> {
    let operators = ["MatMul", "Gemm", "Conv", "ConvTranspose"];
    let operator = operators.into_iter().find(|operator| is_standard(node, operator))?;
    let [input, weight, ..] = &node.input[..] else { return None };
    let is_float = |name: &str| work.types.dtype(name).is_none_or(|dtype| dtype == DType::F32);
    if !is_float(input) || !is_float(weight) {
        return Some(Err("it is not in float32".into()));
    }
    let Ok(constant) = work.weight(weight) else {
        // Inputs that are codes already are left as they are.
        let is_product = operator == "MatMul" && work.draft.constant(input).is_none() && input != weight;
        let computed = Product { weight: None, activations: vec![0, 1] };
        return Some(if is_product { Ok(computed) } else { Err("its weight is computed".into()) });
    };
    if constant.dtype != DType::F32 {
        return Some(Err("it is not in float32".into()));
    }
    if work.draft.constant(input).is_some() {
        return Some(Err("both of its inputs are constants".into()));
    }
    let rank = constant.shape.len();
    let axis = match operator {
        "Conv" => Some(0),
        // The channels of each group begin again.
        "ConvTranspose" => (integer_of(node, "group", 1) == 1).then_some(1),
        "Gemm" => Some(usize::from(integer_of(node, "transB", 0) == 0)),
        _ => (rank > 1).then(|| rank - 1),
    };
    let axis = axis.filter(|_| per_channel);
    let before = constant.bytes();
    let weight = Some(ProductWeight { shape: constant.shape, axis, before });
    Some(Ok(Product { weight, activations: vec![0] }))
}
