//! What bias correction does with the products of a static model.

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_core::onnx::proto::NodeProto;

/// The corrected biases of a static model, by the output of the product and its weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StaticBiases(pub(super) BTreeMap<(String, String), Correction>);

/// A corrected bias.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Correction {
    pub(super) values: Arc<[f32]>,
    pub(super) dims: Vec<i64>,
    /// Whether it is a sum behind the product. Otherwise it replaces a constant.
    pub(super) is_added: bool,
}

impl StaticBiases {
    /// The correction of a product.
    pub(super) fn of(&self, product: &NodeProto) -> Option<&Correction> {
        // Most models have none, and then no name is copied.
        if self.0.is_empty() { None } else { self.0.get(&key(product)?) }
    }
}

/// What a correction is known by.
pub(super) fn key(node: &NodeProto) -> Option<(String, String)> {
    Some((node.output.first()?.clone(), node.input.get(1)?.clone()))
}
