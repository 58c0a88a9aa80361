//! How operators hand channels on: which axes of which constants lose the channels that a layer
//! before loses.

use std::collections::{BTreeMap, BTreeSet};

use ort_core::dtype::DType;
use ort_core::ir::Graph;
use ort_core::onnx::proto::NodeProto;
use ort_core::spec::{ONNX, Registry, Traits};

use super::channel_spaces::{ChannelAxis, ChannelSpaces, Cut};
use super::draft::{integer_of, reads, subgraphs};
use super::work::{Work, title};

/// Operators that work on each channel by itself.
const POOLS: [&str; 6] =
    ["MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"];

/// How many inputs of an elementwise operator of the standard may have channels; `None` if it is
/// another one.
fn inputs_of_elementwise(operator: &str) -> Option<usize> {
    // Without a registry nothing was loaded.
    let record = Registry::global().ok()?.find(ONNX, operator)?;
    let is_elementwise = record.traits.has(Traits::ELEMENTWISE);
    is_elementwise.then(|| if record.is_unary_elementwise() { 1 } else { 2 })
}

/// The sizes of the values of a model, as far as they are known.
pub(super) struct Sizes {
    sizes: BTreeMap<String, Vec<Option<usize>>>,
}

impl Sizes {
    pub(super) fn of(graph: &Graph) -> Sizes {
        let values = graph.value_ids().map(|id| graph.value(id));
        let sizes = values.filter_map(|value| {
            let sizes = value.ty.shape()?.iter();
            let sizes = sizes.map(|size| usize::try_from(size.as_constant()?).ok());
            Some((value.name.to_string(), sizes.collect()))
        });
        Sizes { sizes: sizes.collect() }
    }

    fn get(&self, name: &str) -> Option<&[Option<usize>]> {
        self.sizes.get(name).map(Vec::as_slice)
    }
}

/// A walk over the nodes of a graph.
pub(super) struct ChannelFlow<'w> {
    pub(super) work: &'w Work,
    pub(super) sizes: &'w Sizes,
    /// The integers of the constant shapes of `Reshape` nodes.
    pub(super) shapes: &'w BTreeMap<String, Vec<i64>>,
    pub(super) spaces: ChannelSpaces,
    /// How many inputs of nodes each constant is.
    pub(super) readers: BTreeMap<String, usize>,
    read: BTreeSet<String>,
}

/// An input of a node that has channels.
struct ChannelInput<'n> {
    name: &'n str,
    axis: ChannelAxis,
}

impl<'w> ChannelFlow<'w> {
    pub(super) fn new(
        work: &'w Work,
        nodes: &[NodeProto],
        (sizes, shapes): (&'w Sizes, &'w BTreeMap<String, Vec<i64>>),
    ) -> ChannelFlow<'w> {
        let mut readers: BTreeMap<String, usize> = BTreeMap::new();
        for node in nodes {
            let captured = subgraphs(node).flat_map(|graph| reads(&graph.node));
            for name in node.input.iter().cloned().chain(captured) {
                *readers.entry(name).or_default() += 1;
            }
        }
        let (spaces, read) = (ChannelSpaces::default(), BTreeSet::new());
        let mut flow = ChannelFlow { work, sizes, shapes, spaces, readers, read };
        for (index, node) in nodes.iter().enumerate() {
            flow.add(index, node);
        }
        for output in &work.outputs {
            if let Some(axis) = flow.spaces.of_value.get(output).copied() {
                flow.spaces.block(axis.space, "an output of the model has its channels");
            }
        }
        flow
    }

    fn add(&mut self, index: usize, node: &NodeProto) {
        let captured: BTreeSet<String> = subgraphs(node)
            .flat_map(|graph| {
                let outputs = graph.output.iter().map(|output| output.name().to_string());
                reads(&graph.node).into_iter().chain(outputs)
            })
            .collect();
        self.block_all(captured.iter(), &format!("a body of '{}' reads it", title(node)));
        let is_standard = matches!(node.domain(), "" | "ai.onnx");
        let operator = if is_standard { node.op_type() } else { "" };
        let elementwise = if is_standard { inputs_of_elementwise(operator) } else { None };
        // What reads or hands on channels otherwise keeps them.
        let followed = elementwise.unwrap_or(1);
        let is_plain = node.output.iter().skip(1).all(String::is_empty)
            && (followed..node.input.len()).all(|input| self.axis_of(node, input).is_none());
        let result = match operator {
            _ if !is_plain => Err("has other outputs, or reads channels as something else"),
            "Conv" => self.convolution(index, node),
            "Gemm" | "MatMul" => self.product(index, node),
            "BatchNormalization" => self.normalization(index, node, 1..5),
            "InstanceNormalization" => self.normalization(index, node, 1..3),
            "Flatten" => self.flatten(node),
            "Reshape" => self.reshape(index, node),
            "Dropout" => Ok(self.axis_of(node, 0)),
            _ if POOLS.contains(&operator) => self.pool(node),
            _ => match elementwise {
                Some(1) => Ok(self.axis_of(node, 0)),
                Some(_) => self.elementwise(index, node),
                None => Err("is not followed"),
            },
        };
        let axis = result.unwrap_or_else(|reason| {
            let reason = format!("'{}' ({}) {reason}", title(node), node.op_type());
            self.block_all(node.input.iter(), &reason);
            None
        });
        self.read.extend(node.input.iter().cloned().chain(captured));
        if let (Some(axis), Some(output)) = (axis, node.output.first()) {
            self.spaces.of_value.insert(output.clone(), axis);
            if self.read.contains(output) {
                self.spaces.block(axis.space, "its nodes are not in the order of their values");
            }
        }
    }

    fn block_all<'n>(&mut self, names: impl Iterator<Item = &'n String>, reason: &str) {
        for name in names {
            if let Some(axis) = self.spaces.of_value.get(name).copied() {
                self.spaces.block(axis.space, reason);
            }
        }
    }

    fn axis_of(&self, node: &NodeProto, input: usize) -> Option<ChannelAxis> {
        self.spaces.of_value.get(node.input.get(input)?).copied()
    }

    fn channels<'n>(&self, node: &'n NodeProto, input: usize) -> Option<ChannelInput<'n>> {
        let name = node.input.get(input)?;
        Some(ChannelInput { name, axis: self.spaces.of_value.get(name).copied()? })
    }

    /// Whether the channels are the second axis of a value, as in images.
    fn is_second(&self, channels: &ChannelInput<'_>) -> bool {
        let rank = self.sizes.get(channels.name).map(<[_]>::len);
        rank.is_some_and(|rank| rank == channels.axis.from_end + 2) && channels.axis.repeat == 1
    }

    /// The elements along an axis with channels.
    fn length(&self, axis: ChannelAxis) -> usize {
        self.spaces.count(axis.space) * axis.repeat
    }

    /// The shape of a constant in floating point.
    fn constant(&self, name: &str) -> Option<Vec<usize>> {
        let proto = self.work.draft.constant(name)?;
        let is_float = [DType::F32, DType::F16].map(DType::onnx_code).contains(&proto.data_type());
        let sizes = proto.dims.iter().map(|size| usize::try_from(*size).ok());
        sizes.collect::<Option<Vec<usize>>>().filter(|_| is_float)
    }

    fn cut(&mut self, node: usize, input: usize, axis: usize, of: ChannelAxis) {
        self.spaces.cuts.push(Cut { node, input, axis, space: of.space, repeat: of.repeat });
    }

    /// The shape of a weight that no other node reads.
    fn own_weight(&self, node: &NodeProto) -> Result<Vec<usize>, &'static str> {
        let name = node.input.get(1).ok_or("has no weight")?;
        let shape = self.constant(name).ok_or("has a weight that is computed, or not in floating point")?;
        if shape.contains(&0) {
            return Err("has an empty weight");
        }
        let is_shared = self.readers.get(name) != Some(&1) || self.work.outputs.contains(name);
        if is_shared { Err("shares its weight") } else { Ok(shape) }
    }

    /// Cuts a vector of the channels, if there is one.
    fn cut_vector(&mut self, index: usize, node: &NodeProto, input: usize, of: ChannelAxis) -> bool {
        let Some(name) = node.input.get(input).filter(|name| !name.is_empty()) else { return true };
        let is_vector = self.constant(name).is_some_and(|shape| shape == [self.spaces.count(of.space)]);
        if is_vector {
            self.cut(index, input, 0, of);
        }
        is_vector
    }

    fn convolution(&mut self, index: usize, node: &NodeProto) -> Result<Option<ChannelAxis>, &'static str> {
        let shape = self.own_weight(node)?;
        let [outputs, per_group, kernel @ ..] = &shape[..] else {
            return Err("has a weight of one dimension");
        };
        let input = self.channels(node, 0);
        if input.as_ref().is_some_and(|input| !self.is_second(input)) {
            return Err("reads the channels along another axis");
        }
        let group = integer_of(node, "group", 1);
        if group != 1 {
            let Some(ChannelInput { axis, .. }) = input else { return Ok(None) };
            let count = self.spaces.count(axis.space);
            if usize::try_from(group) != Ok(count) || *outputs != count || *per_group != 1 {
                return Err("has groups of several channels");
            }
            if !self.cut_vector(index, node, 2, axis) {
                return Err("has a bias that is computed");
            }
            self.cut(index, 1, 0, axis);
            self.spaces.depthwise.push((index, axis.space));
            return Ok(Some(axis));
        }
        if let Some(ChannelInput { axis, .. }) = input {
            if *per_group != self.length(axis) {
                return Err("has a weight for other channels");
            }
            self.cut(index, 1, 1, axis);
            self.spaces.consumers.push((index, axis.space));
        }
        let from_end = kernel.len();
        Ok(Some(self.produce(index, node, (*outputs, 0), from_end)))
    }

    /// The outputs of a layer, along this axis of its weight.
    fn produce(
        &mut self,
        index: usize,
        node: &NodeProto,
        (outputs, weight_axis): (usize, usize),
        from_end: usize,
    ) -> ChannelAxis {
        let axis = ChannelAxis { space: self.spaces.create(outputs), from_end, repeat: 1 };
        self.spaces.producers.push((index, axis.space));
        self.cut(index, 1, weight_axis, axis);
        if node.op_type() == "Gemm" {
            if let Err(reason) = self.cut_broadcast(index, node, 2, axis) {
                self.spaces.block(axis.space, &format!("'{}' (Gemm) {reason}", title(node)));
            }
        } else if node.op_type() == "Conv" && !self.cut_vector(index, node, 2, axis) {
            self.spaces.block(axis.space, &format!("'{}' (Conv) has a bias that is computed", title(node)));
        }
        axis
    }

    fn product(&mut self, index: usize, node: &NodeProto) -> Result<Option<ChannelAxis>, &'static str> {
        let shape = self.own_weight(node)?;
        let [first, second] = shape[..] else { return Err("has a weight that is no matrix") };
        let is_gemm = node.op_type() == "Gemm";
        if is_gemm && integer_of(node, "transA", 0) != 0 {
            return Err("transposes its input");
        }
        let is_transposed = is_gemm && integer_of(node, "transB", 0) != 0;
        let (columns, rows, row_axis) = if is_transposed { (second, first, 0) } else { (first, second, 1) };
        if let Some(axis) = self.axis_of(node, 0) {
            if axis.from_end != 0 || columns != self.length(axis) {
                return Err("reads the channels along another axis");
            }
            self.cut(index, 1, 1 - row_axis, axis);
            self.spaces.consumers.push((index, axis.space));
        }
        Ok(Some(self.produce(index, node, (rows, row_axis), 0)))
    }

    fn normalization(
        &mut self,
        index: usize,
        node: &NodeProto,
        vectors: std::ops::Range<usize>,
    ) -> Result<Option<ChannelAxis>, &'static str> {
        let Some(input) = self.channels(node, 0) else { return Ok(None) };
        if !self.is_second(&input) {
            return Err("reads the channels along another axis");
        }
        for vector in vectors {
            if !self.cut_vector(index, node, vector, input.axis) {
                return Err("has parameters that are computed");
            }
        }
        Ok(Some(input.axis))
    }

    fn pool(&self, node: &NodeProto) -> Result<Option<ChannelAxis>, &'static str> {
        let Some(input) = self.channels(node, 0) else { return Ok(None) };
        if self.is_second(&input) {
            Ok(Some(input.axis))
        } else {
            Err("reads the channels along another axis")
        }
    }

    /// Cuts a constant that is broadcast with channels. One that has one element for all of them
    /// stays.
    fn cut_broadcast(
        &mut self,
        index: usize,
        node: &NodeProto,
        input: usize,
        of: ChannelAxis,
    ) -> Result<(), &'static str> {
        let Some(name) = node.input.get(input).filter(|name| !name.is_empty()) else { return Ok(()) };
        let constant = self.constant(name);
        let size = match (&constant, self.sizes.get(name)) {
            (Some(shape), _) => shape.iter().rev().nth(of.from_end).copied().or(Some(1)),
            (None, Some(sizes)) => sizes.iter().rev().nth(of.from_end).copied().unwrap_or(Some(1)),
            (None, None) => None,
        };
        match (size, constant) {
            (Some(1), _) => Ok(()),
            (Some(size), Some(shape)) if size == self.length(of) => {
                self.cut(index, input, shape.len() - 1 - of.from_end, of);
                Ok(())
            }
            _ => Err("joins the channels with others"),
        }
    }

    fn elementwise(&mut self, index: usize, node: &NodeProto) -> Result<Option<ChannelAxis>, &'static str> {
        let (one, other) = (self.axis_of(node, 0), self.axis_of(node, 1));
        if node.input.len() != 2 {
            return if one.or(other).is_none() { Ok(None) } else { Err("joins more than two values") };
        }
        match (one, other) {
            (Some(one), Some(other)) => {
                let is_alike = one.from_end == other.from_end && one.repeat == other.repeat;
                if !is_alike || self.length(one) != self.length(other) {
                    return Err("joins channels that differ");
                }
                self.spaces.tie(one.space, other.space);
                Ok(Some(one))
            }
            (Some(axis), None) => self.cut_broadcast(index, node, 1, axis).map(|()| Some(axis)),
            (None, Some(axis)) => self.cut_broadcast(index, node, 0, axis).map(|()| Some(axis)),
            (None, None) => Ok(None),
        }
    }

    /// The elements of a channel of an image, if the model fixes them.
    fn plane(&self, channels: &ChannelInput<'_>) -> Result<usize, &'static str> {
        let sizes = self.sizes.get(channels.name).and_then(|sizes| sizes.get(2..));
        let sizes: Option<Vec<usize>> = sizes.and_then(|sizes| sizes.iter().copied().collect());
        sizes.map(|sizes| sizes.iter().product()).ok_or("flattens images whose size is not fixed")
    }

    fn flatten(&self, node: &NodeProto) -> Result<Option<ChannelAxis>, &'static str> {
        let Some(input) = self.channels(node, 0) else { return Ok(None) };
        if !self.is_second(&input) || integer_of(node, "axis", 1) != 1 {
            return Err("mixes the channels with another axis");
        }
        let repeat = self.plane(&input)?;
        Ok(Some(ChannelAxis { from_end: 0, repeat, ..input.axis }))
    }

    /// A `Reshape` to a matrix is a `Flatten`.
    fn reshape(&mut self, index: usize, node: &NodeProto) -> Result<Option<ChannelAxis>, &'static str> {
        let Some(input) = self.channels(node, 0) else { return Ok(None) };
        let shape = node.input.get(1).and_then(|name| self.shapes.get(name));
        let Some(&[rows, columns]) = shape.map(Vec::as_slice) else { return Err("mixes the channels") };
        let batch = self.sizes.get(input.name).and_then(|sizes| sizes.first().copied().flatten());
        let is_batch = rows == 0 || batch.is_some() && usize::try_from(rows).ok() == batch;
        if !self.is_second(&input) || integer_of(node, "allowzero", 0) != 0 {
            return Err("mixes the channels with another axis");
        }
        let repeat = self.plane(&input)?;
        let axis = ChannelAxis { from_end: 0, repeat, ..input.axis };
        if usize::try_from(columns) == Ok(self.length(axis)) {
            self.spaces.reshapes.push((index, axis.space, repeat));
        } else if columns != -1 || !is_batch {
            return Err("mixes the channels with another axis");
        }
        Ok(Some(axis))
    }
}
