//! SmoothQuant in a model: which values can be smoothed, and where their division goes.
//!
//! The division is folded into the constants that scale and shift the value, if the products are
//! its only readers: those of a normalization, or of a `Mul` and an `Add`. Otherwise it is a node.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::dtype::DType;
use ort_core::onnx::Source;
use ort_core::onnx::proto::{NodeProto, TensorProto};
use ort_core::{Error, ErrorKind, Result};

use super::draft::{integer_of, node, reads, subgraphs};
use super::flow::Flow;
use super::integer_products;
use super::options::{Mode, Quantizer, StaticFormat};
use super::products::product;
use super::smoothed::{Folded, Smoothed, Smoothing};
use super::weight_reader::WeightReader;
use super::weights::RowScales;
use super::work::{Work, is_standard};
use crate::elements::{Elements, RawElements};
use crate::observe::Channels;
use crate::smooth::{Candidates, Input, Matrix, Rows, Smooth};

/// The products that read a value.
pub(super) struct Group {
    /// Their numbers in the graph.
    pub(super) products: Vec<usize>,
    pub(super) channels: usize,
    /// The constants that can take the division, by node and position.
    pub(super) constants: Vec<(usize, usize)>,
}

impl Quantizer {
    /// The values that [`Smooth`] applies to: inputs of products with constant matrices.
    ///
    /// # Errors
    ///
    /// The model cannot be loaded, or a pattern matches no node.
    pub fn smoothable(&self, source: &Source) -> Result<Vec<String>> {
        let (work, nodes) = self.start(source)?;
        Ok(groups(&work, &nodes, self).into_keys().collect())
    }

    /// Decides how each value is smoothed. `channels` has the statistics of the values that
    /// [`Self::smoothable`] lists; values without any stay as they are. Reads every weight that
    /// such a value is multiplied with, one at a time.
    ///
    /// # Errors
    ///
    /// The model or a weight cannot be read.
    pub fn smoothing(
        &self,
        source: &Source,
        channels: &BTreeMap<String, Channels>,
        smooth: Smooth,
    ) -> Result<Smoothing> {
        let per_tensor = matches!(&self.mode, Mode::Static(options) if options.per_tensor);
        let (work, nodes) = self.start(source)?;
        let mut reader = WeightReader::open(source)?;
        let mut smoothing = Smoothing::new();
        for (name, group) in groups(&work, &nodes, self) {
            let Some(seen) = channels.get(&name) else { continue };
            let Some(ranges) = seen.ranges().filter(|ranges| ranges.len() == group.channels) else {
                continue;
            };
            let input = Input { ranges, mean_squares: seen.mean_squares() };
            let mut rows = Rows::new(group.channels);
            for index in &group.products {
                with_matrix(&mut reader, (&work, &nodes), *index, &mut |matrix| rows.add(matrix))?;
            }
            let mut candidates = Candidates::new(smooth, input, &rows);
            for index in &group.products {
                let mut add = |matrix: &Matrix<'_>| candidates.add(matrix, per_tensor);
                with_matrix(&mut reader, (&work, &nodes), *index, &mut add)?;
            }
            let Some(scales) = candidates.best(!group.constants.is_empty()) else { continue };
            let folded = folded(&mut reader, (&work, &nodes), &group.constants, &scales)?;
            smoothing.insert(name, Smoothed { scales: scales.into(), folded });
        }
        Ok(smoothing)
    }
}

/// The values that can be smoothed. Values of bodies are left as they are.
pub(super) fn groups(work: &Work, nodes: &[NodeProto], quantizer: &Quantizer) -> BTreeMap<String, Group> {
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    // What bodies read, and products in another way than as rows of channels.
    let mut unfit: BTreeSet<String> = BTreeSet::new();
    for (index, node) in nodes.iter().enumerate() {
        unfit.extend(subgraphs(node).flat_map(|graph| reads(&graph.node)));
        let allowed = quantizer.allows(work.place(index), node);
        let (Ok(()), Some(Ok(found))) = (allowed, product(work, node, true)) else { continue };
        let input = node.input.first().map(String::as_str).unwrap_or_default();
        match channels_of(node, found.weight.as_ref().map(|weight| &weight.shape[..])) {
            Some(channels) => {
                let new = || Group { products: Vec::new(), channels, constants: Vec::new() };
                let group = groups.entry(input.to_string()).or_insert_with(new);
                group.products.push(index);
                if group.channels != channels {
                    unfit.insert(input.to_string());
                }
            }
            None => {
                unfit.extend(found.activations.iter().filter_map(|place| node.input.get(*place)).cloned())
            }
        }
    }
    if let Mode::Static(options) = &quantizer.mode
        && options.format == StaticFormat::QOperator
    {
        // Products write their results as codes, before any division.
        unfit.extend(integer_products::results(work, nodes, (options, quantizer)));
    }
    groups.retain(|name, _| !unfit.contains(name));
    let flow = Flow::of(nodes);
    for (name, group) in &mut groups {
        group.constants = constants(&flow, work, (name, group), nodes).unwrap_or_default();
    }
    groups
}

/// The channels of the input of a product with a constant matrix.
fn channels_of(node: &NodeProto, weight: Option<&[usize]>) -> Option<usize> {
    let [rows, columns] = *weight? else { return None };
    if is_standard(node, "MatMul") {
        return Some(rows);
    }
    let is_gemm = is_standard(node, "Gemm") && integer_of(node, "transA", 0) == 0;
    is_gemm.then_some(if integer_of(node, "transB", 0) == 0 { rows } else { columns })
}

/// The axis of a weight along which the channels of the input lie.
fn channel_axis(node: &NodeProto) -> usize {
    usize::from(is_standard(node, "Gemm") && integer_of(node, "transB", 0) != 0)
}

/// The constants that can take the division of a value.
fn constants(
    flow: &Flow<'_>,
    work: &Work,
    (name, group): (&str, &Group),
    nodes: &[NodeProto],
) -> Option<Vec<(usize, usize)>> {
    if !flow.has_no_more_readers(work, name, group.products.len()) {
        return None;
    }
    let vector = |index: usize, place: usize| {
        let proto = work.draft.constant(nodes.get(index)?.input.get(place)?)?;
        let fits = proto.data_type() == DType::F32.onnx_code() && proto.dims == [group.channels as i64];
        fits.then_some((index, place))
    };
    // The position of the constant, and the value beside it.
    let pair = |index: usize| {
        let first = vector(index, 0);
        let other = usize::from(first.is_some());
        Some((first.or(vector(index, 1))?, nodes.get(index)?.input.get(other)?))
    };
    let maker = *flow.makers.get(name)?;
    let node = nodes.get(maker)?;
    let scaling = ["LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"];
    if scaling.iter().any(|operator| is_standard(node, operator)) && node.output.first()? == name {
        let scale = vector(maker, 1)?;
        return match node.input.get(2).filter(|bias| !bias.is_empty()) {
            Some(_) => Some(vec![scale, vector(maker, 2)?]),
            None => Some(vec![scale]),
        };
    }
    if is_standard(node, "Mul") {
        return Some(vec![pair(maker)?.0]);
    }
    if is_standard(node, "Add") {
        let (shift, scaled) = pair(maker)?;
        let product = *flow.makers.get(scaled.as_str())?;
        if flow.has_no_more_readers(work, scaled, 1) && is_standard(nodes.get(product)?, "Mul") {
            return Some(vec![shift, pair(product)?.0]);
        }
    }
    None
}

/// Calls a function with the weight of a product.
fn with_matrix(
    reader: &mut WeightReader<'_>,
    (work, nodes): (&Work, &[NodeProto]),
    index: usize,
    look: &mut dyn FnMut(&Matrix<'_>),
) -> Result<()> {
    let Some((node, name)) = nodes.get(index).and_then(|node| Some((node, node.input.get(1)?))) else {
        return Ok(());
    };
    let tensor = reader.tensor(work, name)?;
    let ([rows, columns], Some(bytes)) = (tensor.shape(), tensor.bytes()) else { return Ok(()) };
    let elements = RawElements::<f32>::new(bytes);
    let read = |start: usize, to: &mut [f32]| elements.widen(start, to);
    let is_transposed = channel_axis(node) == 1;
    look(&Matrix { elements: &read, rows: *rows, columns: *columns, is_transposed });
    reader.release(&tensor);
    Ok(())
}

/// Divides constants.
pub(super) fn folded(
    reader: &mut WeightReader<'_>,
    (work, nodes): (&Work, &[NodeProto]),
    constants: &[(usize, usize)],
    scales: &[f32],
) -> Result<Vec<Folded>> {
    let divide = |(node, place): &(usize, usize)| {
        let name = nodes.get(*node).and_then(|node| node.input.get(*place));
        let name = name.map(String::as_str).unwrap_or_default();
        let values = reader.tensor(work, name)?.to_vec::<f32>()?;
        let values = values.iter().zip(scales).map(|(value, scale)| value / scale).collect();
        Ok(Folded { node: *node, place: *place, values })
    };
    constants.iter().map(divide).collect()
}

/// The factors of the weight of a product that reads a smoothed value.
pub(super) fn row_scales(smoothed: &Smoothed, product: &NodeProto) -> RowScales {
    let input = product.input.first().cloned().unwrap_or_default();
    RowScales { input, axis: channel_axis(product), scales: smoothed.scales.clone() }
}

/// Replaces the constants that take divisions.
///
/// # Errors
///
/// The products that read a value are not those that its smoothing was made for.
pub(super) fn fold(
    work: &mut Work,
    nodes: &mut [NodeProto],
    smoothing: &Smoothing,
    quantizer: &Quantizer,
) -> Result<()> {
    let groups = groups(work, nodes, quantizer);
    for (value, smoothed) in smoothing {
        let places: Vec<(usize, usize)> =
            smoothed.folded.iter().map(|folded| (folded.node, folded.place)).collect();
        // A product left out would read the divided value without scaled weights.
        let fits = groups.get(value).is_some_and(|group| {
            group.channels == smoothed.scales.len() && (places.is_empty() || group.constants == places)
        });
        if !fits {
            let text = format!("the smoothing of '{value}' was made for another model or other nodes");
            return Err(Error::new(ErrorKind::InvalidArgument, text)
                .help("make it again, with the same nodes left out"));
        }
    }
    for folded in smoothing.values().flat_map(|smoothed| &smoothed.folded) {
        let Some(input) = nodes.get_mut(folded.node).and_then(|node| node.input.get_mut(folded.place)) else {
            continue;
        };
        let name = work.draft.value_name(&format!("{input}_smoothed"));
        work.draft.initializers.push(vector(&name, folded.values.clone()));
        *input = name;
    }
    Ok(())
}

/// Divides a value by a node, and returns the name of the result.
pub(super) fn divide(work: &mut Work, value: &str, smoothed: &Smoothed) -> String {
    let draft = &mut work.draft;
    let factors = draft.value_name(&format!("{value}_smooth_factors"));
    draft.initializers.push(vector(&factors, smoothed.factors()));
    let output = draft.value_name(&format!("{value}_smooth_output"));
    let name = draft.node_name(&format!("{value}_smooth_mul"));
    draft.nodes.push(node(("", "Mul"), name, &[value, &factors], &[&output], Vec::new()));
    output
}

fn vector(name: &str, values: Vec<f32>) -> TensorProto {
    TensorProto {
        name: Some(name.to_string()),
        data_type: Some(DType::F32.onnx_code()),
        dims: vec![values.len() as i64],
        float_data: values,
        ..TensorProto::default()
    }
}
