//! Products that have an operator on integers, and what they compute.

use std::collections::BTreeMap;

use ort_core::dtype::DType;
use ort_core::onnx::proto::NodeProto;

use super::draft::{float_of, integer_of};
use super::flow::Flow;
use super::options::{Quantizer, StaticOptions};
use super::products::{Product, product};
use super::work::{Work, is_standard};

/// The values that products write as codes.
pub(super) fn results(
    work: &Work,
    nodes: &[NodeProto],
    (options, quantizer): (&StaticOptions, &Quantizer),
) -> Vec<String> {
    let relus = Relus::of(work, nodes, options, quantizer);
    let products = nodes.iter().filter(|node| integer_product(work, node, options).is_some());
    products.map(|node| relus.result(node).0.to_string()).collect()
}

/// The product of a node that has an integer operator, or why it stays; `None` for another node.
pub(super) fn integer_product(
    work: &Work,
    node: &NodeProto,
    options: &StaticOptions,
) -> Option<std::result::Result<Product, String>> {
    let found = product(work, node, !options.per_tensor)?;
    Some(found.and_then(|mut found| {
        if is_standard(node, "ConvTranspose") {
            return Err("there is no integer operator for it".to_string());
        }
        if is_standard(node, "Gemm") {
            let is_plain = integer_of(node, "transA", 0) == 0
                && float_of(node, "alpha", 1.0) == 1.0
                && float_of(node, "beta", 1.0) == 1.0;
            if !is_plain {
                return Err("it is more than a product and a bias: transA, alpha or beta".to_string());
            }
        }
        if let Some(weight) = &mut found.weight {
            let rank = weight.shape.len();
            if is_standard(node, "MatMul") && rank != 2 {
                weight.axis = None;
            }
            let channels = match weight.shape[..] {
                [rows, columns] if is_standard(node, "Gemm") => match integer_of(node, "transB", 0) {
                    0 => columns,
                    _ => rows,
                },
                [first, ..] => first,
                [] => return Err("its weight is a number".to_string()),
            };
            if let Some(name) = bias_of(node) {
                let bias = work.draft.constant(name).ok_or("its bias is computed")?;
                let is_vector = bias.dims.iter().product::<i64>() == channels as i64;
                if bias.data_type() != DType::F32.onnx_code() || !is_vector {
                    return Err("its bias is not a float32 for each output channel".to_string());
                }
            }
        }
        Ok(found)
    }))
}

/// The bias of a convolution or `Gemm`.
pub(super) fn bias_of(node: &NodeProto) -> Option<&String> {
    node.input.get(2).filter(|name| !name.is_empty() && !is_standard(node, "MatMul"))
}

/// The `Relu` nodes that vanish into the products before them, by the value that they read.
pub(super) struct Relus<'n>(BTreeMap<&'n str, (usize, &'n str)>);

impl<'n> Relus<'n> {
    pub(super) fn of(
        work: &Work,
        nodes: &'n [NodeProto],
        options: &StaticOptions,
        quantizer: &Quantizer,
    ) -> Relus<'n> {
        let mut relus = BTreeMap::new();
        // Codes below the zero point are negative numbers, and there are none if it is 0.
        if options.is_symmetric {
            return Relus(relus);
        }
        let flow = Flow::of(nodes);
        for (index, node) in nodes.iter().enumerate().filter(|(_, node)| is_standard(node, "Relu")) {
            let ([input], [output]) = (&node.input[..], &node.output[..]) else { continue };
            if !quantizer.excludes(work.place(index), node) && flow.has_no_more_readers(work, input, 1) {
                relus.insert(input.as_str(), (index, output.as_str()));
            }
        }
        Relus(relus)
    }

    /// What a product computes together with the `Relu` behind it, and the number of that.
    pub(super) fn result<'a>(&self, node: &'a NodeProto) -> (&'a str, Option<usize>)
    where
        'n: 'a,
    {
        let output = node.output.first().map(String::as_str).unwrap_or_default();
        match self.0.get(output) {
            Some((index, result)) => (result, Some(*index)),
            None => (output, None),
        }
    }
}
