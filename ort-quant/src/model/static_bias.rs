//! Corrected biases in a static model: where they go.

use ort_core::dtype::DType;
use ort_core::onnx::proto::{NodeProto, TensorProto};

use super::corrected::{Correction, StaticBiases};
use super::draft::{float_of, node};
use super::flow::Flow;
use super::weight_channels::WeightChannels;
use super::work::{Work, is_standard};

/// Where the bias of a product is.
pub(super) enum Home {
    /// Its own third input.
    Own(Option<String>),
    /// A constant of the `Add` that alone reads the product: that node, the input, and its name.
    Reader { node: usize, place: usize, name: String },
    /// Nowhere that a constant could be put.
    Behind,
}

/// Where the bias of a product is.
pub(super) fn home(flow: &Flow<'_>, work: &Work, nodes: &[NodeProto], index: usize) -> Home {
    let Some(product) = nodes.get(index) else { return Home::Behind };
    let weight = product.input.get(1).and_then(|weight| work.weight(weight).ok());
    let shape = weight.map(|weight| weight.shape).unwrap_or_default();
    let channels = WeightChannels::of(product, &shape).outputs() as i64;
    // Of one dimension, or of one row.
    let is_bias = |name: &str| {
        work.draft.constant(name).is_some_and(|constant| {
            let is_row = constant.dims == [channels] || constant.dims == [1, channels];
            is_row && constant.data_type() == DType::F32.onnx_code()
        })
    };
    if !is_standard(product, "MatMul") {
        let is_plain = is_standard(product, "Conv") || float_of(product, "beta", 1.0) == 1.0;
        return match product.input.get(2).filter(|name| !name.is_empty()) {
            None if is_plain => Home::Own(None),
            Some(name) if is_plain && is_bias(name) => Home::Own(Some(name.clone())),
            _ => Home::Behind,
        };
    }
    let found = || {
        let output = product.output.first()?;
        let reader = nodes.iter().position(|node| node.input.contains(output))?;
        let add = nodes.get(reader).filter(|node| is_standard(node, "Add"))?;
        let place = add.input.iter().position(|input| input != output)?;
        let name = add.input.get(place).filter(|name| is_bias(name))?.clone();
        flow.has_no_more_readers(work, output, 1).then_some(Home::Reader { node: reader, place, name })
    };
    found().unwrap_or(Home::Behind)
}

/// Replaces the biases that are constants.
pub(super) fn fold(work: &mut Work, nodes: &mut [NodeProto], biases: &StaticBiases) {
    let mut homes = Vec::new();
    let flow = Flow::of(nodes);
    for (index, node) in nodes.iter().enumerate() {
        if let Some(correction) = biases.of(node).filter(|correction| !correction.is_added) {
            let (target, place, name) = match home(&flow, work, nodes, index) {
                Home::Own(name) => (index, 2, name),
                Home::Reader { node, place, name } => (node, place, Some(name)),
                Home::Behind => continue,
            };
            homes.push((target, place, name, correction));
        }
    }
    drop(flow);
    for (target, place, old, Correction { values, dims: own, .. }) in homes {
        let Some(target) = nodes.get_mut(target) else { continue };
        let dims = old.as_ref().and_then(|old| work.draft.constant(old)).map(|old| old.dims.clone());
        let base =
            old.unwrap_or_else(|| format!("{}_bias", target.output.first().map_or("", String::as_str)));
        let name = work.draft.value_name(&format!("{base}_corrected"));
        let dims = dims.unwrap_or_else(|| own.clone());
        work.draft.add_constant(constant(&name, dims, values));
        if target.input.len() <= place {
            target.input.resize(place + 1, String::new());
        }
        target.input.iter_mut().skip(place).take(1).for_each(|input| input.clone_from(&name));
    }
}

/// Adds a product and the sum with its correction.
pub(super) fn push_with_add(work: &mut Work, mut product: NodeProto, correction: &Correction) {
    let draft = &mut work.draft;
    let output = product.output.first().cloned().unwrap_or_default();
    let plain = draft.value_name(&format!("{output}_uncorrected"));
    let bias = draft.value_name(&format!("{output}_bias_corrected"));
    draft.initializers.push(constant(&bias, correction.dims.clone(), &correction.values));
    let name = draft.node_name(&format!("{output}_correction"));
    product.output.iter_mut().take(1).for_each(|output| output.clone_from(&plain));
    draft.nodes.push(product);
    draft.nodes.push(node(("", "Add"), name, &[&plain, &bias], &[&output], Vec::new()));
}

pub(super) fn constant(name: &str, dims: Vec<i64>, values: &[f32]) -> TensorProto {
    TensorProto {
        name: Some(name.to_string()),
        data_type: Some(DType::F32.onnx_code()),
        dims,
        float_data: values.to_vec(),
        ..TensorProto::default()
    }
}
