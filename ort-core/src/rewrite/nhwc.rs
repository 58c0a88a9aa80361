//! NHWC layout for the images of devices that prefer it ([`Device::prefers_channels_last`]).
//!
//! The pass visits the nodes in order. A convolution is replaced by one in NHWC. The readers of its
//! result follow if they do not depend on the order of axes, or if their axes can be renumbered.
//! The NCHW form of an image is materialized only if another node reads it. Images have one to
//! three spatial axes; NHWC and NCHW stand for all of them.
//!
//! [`Device::prefers_channels_last`]: crate::ep::Device::prefers_channels_last

use rustc_hash::{FxHashMap, FxHashSet};

use super::environment::FirstClaim;
use super::matching::known_ints;
use super::report::Report;
use crate::Result;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, Attributes, Graph, Node, ValueId, ValueType};
use crate::spec::{MICROSOFT, ONNX, RUNTIME, Registry, infer_at};
use crate::tensor::Tensor;

/// The rule name of this pass.
pub(super) const RULE: &str = "channels_last";

/// Converts images to NHWC for the devices whose entry in `prefers` is true; returns whether there
/// were any.
pub(super) fn apply(
    graph: &mut Graph,
    first_claim: FirstClaim<'_>,
    prefers: &[bool],
    report: &mut Report,
) -> Result<bool> {
    if !prefers.contains(&true) || !graph.nodes.iter().any(is_convolution) {
        return Ok(false);
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let mut pass = Pass {
        graph,
        first_claim,
        prefers,
        last: FxHashMap::default(),
        pending: FxHashSet::default(),
        same: FxHashMap::default(),
        new: Vec::new(),
    };
    let mut moved = 0;
    for node in nodes {
        moved += usize::from(pass.node(node)?);
    }
    // Graph outputs keep their layout.
    for output in pass.graph.outputs.clone() {
        pass.make(output)?;
    }
    (0..moved).for_each(|_| report.count(RULE));
    Ok(moved > 0)
}

fn is_convolution(node: &Node) -> bool {
    matches!((node.spec.domain, node.spec.name), (ONNX, "Conv") | (MICROSOFT, "FusedConv"))
}

/// Returns the permutation from NCHW to NHWC.
fn to_last(rank: usize) -> Vec<usize> {
    std::iter::once(0).chain(2..rank).chain([1]).collect()
}

/// Returns the permutation from NHWC to NCHW.
fn to_second(rank: usize) -> Vec<usize> {
    (0..rank).map(|axis| place_of(axis, rank)).collect()
}

/// Returns the index in NHWC of an NCHW axis.
fn place_of(axis: usize, rank: usize) -> usize {
    match axis {
        0 => 0,
        1 => rank - 1,
        _ => axis - 1,
    }
}

fn is_image(rank: usize) -> bool {
    (3..=5).contains(&rank)
}

/// What the NHWC form of a node computes.
enum Moved {
    /// The outputs of the node, in NHWC.
    Last(Vec<ValueId>),
    /// Its only output, unchanged.
    Same(ValueId),
}

struct Pass<'a> {
    /// The graph; its nodes are those emitted so far.
    graph: &'a mut Graph,
    first_claim: FirstClaim<'a>,
    prefers: &'a [bool],
    /// The NHWC form of an image, by its NCHW form.
    last: FxHashMap<ValueId, ValueId>,
    /// NCHW images that no node computes yet.
    pending: FxHashSet<ValueId>,
    /// Values that another value replaces.
    same: FxHashMap<ValueId, ValueId>,
    /// The images that were transposed to NHWC for the current node.
    new: Vec<ValueId>,
}

impl Pass<'_> {
    /// Adds a node in NHWC or as it is; returns whether it was converted.
    fn node(&mut self, mut node: Node) -> Result<bool> {
        self.resolve(&mut node);
        let first = self.graph.nodes.len();
        let device = (self.first_claim)(self.graph, &node);
        if let Some(device) = device.filter(|device| self.prefers.get(*device) == Some(&true)) {
            self.new.clear();
            let moved = self.moved(&node);
            if let Err(problem) = &moved {
                tracing::debug!(node = &*node.name, %problem, "the channels stay");
            }
            if let Some(moved) = moved.ok().flatten().filter(|_| self.is_claimed(first, device)) {
                self.note(&node, moved);
                return Ok(true);
            }
            // Undo: drop the nodes added for it, and the NHWC images that only those compute.
            self.graph.nodes.truncate(first);
            for id in self.new.drain(..) {
                self.last.remove(&id);
            }
        }
        // The node stays in NCHW, so the images it reads must exist in NCHW.
        for read in node.reads().collect::<Vec<_>>() {
            self.make(read)?;
        }
        self.note_transposition(&node);
        self.graph.nodes.push(node);
        Ok(false)
    }

    fn resolve(&self, node: &mut Node) {
        if self.same.is_empty() {
            return;
        }
        let captures = node.subgraphs.iter_mut().flat_map(|sub| sub.captures.iter_mut());
        for id in node.inputs.iter_mut().flatten().chain(captures.map(|capture| &mut capture.outer)) {
            *id = self.same.get(id).copied().unwrap_or(*id);
        }
    }

    /// Whether a device no later than `device` claims each node added since `first`.
    fn is_claimed(&self, first: usize, device: usize) -> bool {
        let mut nodes = self.graph.nodes.iter().skip(first);
        nodes.all(|node| (self.first_claim)(self.graph, node).is_some_and(|claimed| claimed <= device))
    }

    fn note(&mut self, node: &Node, moved: Moved) {
        let outputs = || node.outputs.iter().copied();
        match moved {
            Moved::Last(values) => {
                for (output, last) in outputs().zip(values).filter_map(|(output, last)| Some((output?, last)))
                {
                    self.last.insert(output, last);
                    self.pending.insert(output);
                }
            }
            Moved::Same(value) => self.same.extend(outputs().flatten().map(|output| (output, value))),
        }
    }

    /// If the model itself transposes an image from NHWC to NCHW, the source is its NHWC form.
    fn note_transposition(&mut self, node: &Node) {
        let (&[Some(input)], &[Some(output)]) = (node.inputs.as_slice(), node.outputs.as_slice()) else {
            return;
        };
        if let Some(order) = self.order(node, input)
            && is_image(order.len())
            && order == to_second(order.len())
        {
            self.last.insert(output, input);
        }
    }

    /// Returns the permutation of a transposition.
    fn order(&self, node: &Node, input: ValueId) -> Option<Vec<usize>> {
        if (node.spec.domain, node.spec.name) != (ONNX, "Transpose") {
            return None;
        }
        let rank = self.rank(input)?;
        match node.attrs.find_ints("perm") {
            Some(perm) => perm.iter().map(|&axis| usize::try_from(axis).ok()).collect(),
            None => Some((0..rank).rev().collect()),
        }
    }

    fn shape(&self, id: ValueId) -> Option<&[Dim]> {
        self.graph.value(id).ty.shape()
    }

    fn is_of_floats(&self, id: ValueId) -> bool {
        self.graph.value(id).ty.dtype().is_some_and(DType::is_float)
    }

    fn rank(&self, id: ValueId) -> Option<usize> {
        self.shape(id).map(<[_]>::len)
    }

    /// Converts a node to NHWC, if it has such a form. If not, the caller undoes what was added.
    fn moved(&mut self, node: &Node) -> Result<Option<Moved>> {
        if is_convolution(node) {
            return self.convolution(node);
        }
        if node.spec.scalar.is_some() || (node.spec.domain, node.spec.name) == (ONNX, "Clip") {
            return self.elementwise(node);
        }
        if node.spec.domain != ONNX {
            return Ok(None);
        }
        let Some(x) = node.inputs.first().copied().flatten() else { return Ok(None) };
        let (Some(&last), Some(rank)) = (self.last.get(&x), self.rank(x)) else { return Ok(None) };
        match node.spec.name {
            // The NHWC operators take floats, but `MaxPool` also takes 8-bit integers.
            "MaxPool" if self.is_of_floats(x) => self.pool(node, (RUNTIME, "NhwcMaxPool"), last),
            "AveragePool" => self.pool(node, (RUNTIME, "NhwcAveragePool"), last),
            "GlobalAveragePool" => self.over_image(node, "ReduceMean", last, rank),
            "GlobalMaxPool" => self.over_image(node, "ReduceMax", last, rank),
            "Concat" | "Split" | "Softmax" | "LogSoftmax" => self.along_axis(node, rank),
            "Pad" | "Resize" => self.by_axis(node, last, rank),
            "Transpose" => self.transposition(node, x, last),
            name if name.starts_with("Reduce") => self.reduction(node, last, rank),
            _ => Ok(None),
        }
    }

    fn convolution(&mut self, node: &Node) -> Result<Option<Moved>> {
        let input = |index: usize| node.inputs.get(index).copied().flatten();
        let (Some(x), Some(w)) = (input(0), input(1)) else { return Ok(None) };
        let Some(rank) = self.rank(x).filter(|rank| is_image(*rank) && self.rank(w) == Some(*rank)) else {
            return Ok(None);
        };
        let x = self.last_of(x, rank)?;
        let w = self.transposed(w, &to_last(rank))?;
        // The residual of a `FusedConv`.
        let addend = input(3).map(|addend| self.last_of(addend, rank)).transpose()?;
        // The bias has one axis, so both layouts read it as it is.
        let inputs = [Some(x), Some(w), input(2), addend];
        let y = self.emit((RUNTIME, "NhwcConv"), &inputs, attributes(node), node)?;
        Ok(Some(Moved::Last(vec![y])))
    }

    fn pool(&mut self, node: &Node, operator: (&str, &str), x: ValueId) -> Result<Option<Moved>> {
        // Indices of maxima count elements in NCHW order.
        if node.outputs.iter().skip(1).any(Option::is_some) {
            return Ok(None);
        }
        let mut attrs = attributes(node);
        // `storage_order` orders the indices, an output that is not read.
        attrs.retain(|(name, _)| name != "storage_order");
        let y = self.emit(operator, &[Some(x)], attrs, node)?;
        Ok(Some(Moved::Last(vec![y])))
    }

    /// Converts a global pool to a reduction of the spatial axes.
    fn over_image(&mut self, node: &Node, op: &str, x: ValueId, rank: usize) -> Result<Option<Moved>> {
        // `keepdims` is on by default, so the result is still an image.
        let axes = self.ints(&(1..rank as i64 - 1).collect::<Vec<_>>())?;
        let y = self.emit((ONNX, op), &[Some(x), Some(axes)], Vec::new(), node)?;
        Ok(Some(Moved::Last(vec![y])))
    }

    fn reduction(&mut self, node: &Node, x: ValueId, rank: usize) -> Result<Option<Moved>> {
        let axes = node.inputs.get(1).copied().flatten().and_then(|axes| known_ints(self.graph, axes));
        let Some(axes) = axes.filter(|axes| !axes.is_empty()) else { return Ok(None) };
        let keeps = node.attrs.flag("keepdims")?;
        let places = axes.iter().map(|axis| moved_axis(*axis, rank)).collect::<Option<Vec<i64>>>();
        let Some(mut places) = places else { return Ok(None) };
        places.sort_unstable();
        // An image without its channels, or without its spatial axes, is the same in both layouts.
        let channels = rank as i64 - 1;
        let is_same = places.contains(&channels) || (1..channels).all(|axis| places.contains(&axis));
        if !keeps && !is_same {
            return Ok(None);
        }
        let axes = self.ints(&places)?;
        let operator = (node.spec.domain, node.spec.name);
        let y = self.emit(operator, &[Some(x), Some(axes)], attributes(node), node)?;
        Ok(Some(if keeps { Moved::Last(vec![y]) } else { Moved::Same(y) }))
    }

    /// Converts an operator with an axis, if all its images have an NHWC form.
    fn along_axis(&mut self, node: &Node, rank: usize) -> Result<Option<Moved>> {
        let Some(axis) = moved_axis(node.attrs.int("axis")?, rank) else { return Ok(None) };
        let images = if node.spec.name == "Concat" { node.inputs.len() } else { 1 };
        let mut inputs = node.inputs.clone();
        for input in inputs.iter_mut().take(images).flatten() {
            let Some(last) = self.last.get(input) else { return Ok(None) };
            *input = *last;
        }
        let mut attrs = attributes(node);
        attrs.retain(|(name, _)| name != "axis");
        attrs.push(("axis".to_owned(), Attribute::Int(axis)));
        let operator = (node.spec.domain, node.spec.name);
        Ok(Some(Moved::Last(self.emit_many(operator, &inputs, attrs, node)?)))
    }

    /// Converts an operator with per-axis inputs: paddings, or scales and sizes.
    fn by_axis(&mut self, node: &Node, x: ValueId, rank: usize) -> Result<Option<Moved>> {
        // Only lists with an entry for each axis are converted.
        let names_axes = node.attrs.find_ints("axes").is_some_and(|axes| !axes.is_empty());
        let is_pad = node.spec.name == "Pad";
        if names_axes || is_pad && node.inputs.get(3).copied().flatten().is_some() {
            return Ok(None);
        }
        let mut inputs = node.inputs.clone();
        for (index, input) in inputs.iter_mut().enumerate() {
            let Some(id) = *input else { continue };
            *input = match index {
                0 => Some(x),
                // The padding value: a scalar.
                2 if is_pad => Some(id),
                _ => match self.list_in_order(id, rank)? {
                    Some(moved) => Some(moved),
                    None => return Ok(None),
                },
            };
        }
        let operator = (node.spec.domain, node.spec.name);
        Ok(Some(Moved::Last(self.emit_many(operator, &inputs, attributes(node), node)?)))
    }

    /// Permutes a constant list with one or two numbers per axis to NHWC. `None` for other values.
    fn list_in_order(&mut self, id: ValueId, rank: usize) -> Result<Option<ValueId>> {
        let Some(tensor) = self.graph.constants.get(&id).cloned() else { return Ok(None) };
        let order: Vec<usize> = match tensor.shape() {
            [0] => return Ok(Some(id)),
            [length] if *length == rank => to_last(rank),
            [length] if *length == 2 * rank => {
                // Paddings list all starts, then all ends.
                let order = to_last(rank);
                order.iter().copied().chain(order.iter().map(|axis| axis + rank)).collect()
            }
            _ => return Ok(None),
        };
        let moved = match tensor.dtype() {
            DType::I64 => Tensor::from_vec(tensor.shape(), picked(&tensor.view().to_vec::<i64>()?, &order))?,
            DType::F32 => Tensor::from_vec(tensor.shape(), picked(&tensor.view().to_vec::<f32>()?, &order))?,
            _ => return Ok(None),
        };
        let name = format!("channels_last.constant_{}", self.graph.value_count());
        Ok(Some(self.graph.add_constant(name, moved)))
    }

    /// Converts a transposition of an image to one of its NHWC form, or to that form itself.
    fn transposition(&mut self, node: &Node, x: ValueId, last: ValueId) -> Result<Option<Moved>> {
        let Some(order) = self.order(node, x) else { return Ok(None) };
        let order: Vec<usize> = order.iter().map(|axis| place_of(*axis, order.len())).collect();
        let y = self.transposed(last, &order)?;
        Ok(Some(Moved::Same(y)))
    }

    /// Converts an elementwise operator on images, per-channel values and scalars.
    fn elementwise(&mut self, node: &Node) -> Result<Option<Moved>> {
        let &[Some(output)] = node.outputs.as_slice() else { return Ok(None) };
        let Some(shape) = self.shape(output).filter(|shape| is_image(shape.len())).map(<[Dim]>::to_vec)
        else {
            return Ok(None);
        };
        let is_whole =
            |pass: &Self, id: &ValueId| pass.last.contains_key(id) && pass.shape(*id) == Some(&shape);
        // Convert only if an operand of full size is in NHWC already.
        if !node.inputs.iter().flatten().any(|id| is_whole(self, id)) {
            return Ok(None);
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for input in &node.inputs {
            inputs.push(match input {
                None => None,
                Some(id) => match self.operand(*id, shape.len())? {
                    Some(operand) => Some(operand),
                    None => return Ok(None),
                },
            });
        }
        let operator = (node.spec.domain, node.spec.name);
        let y = self.emit(operator, &inputs, attributes(node), node)?;
        Ok(Some(Moved::Last(vec![y])))
    }

    /// Returns the NHWC form of an operand of an elementwise operator on images of this rank, if it
    /// exists or costs little.
    fn operand(&mut self, id: ValueId, rank: usize) -> Result<Option<ValueId>> {
        let Some(own) = self.shape(id).map(<[Dim]>::to_vec) else { return Ok(None) };
        if let Some(last) = self.last.get(&id).filter(|_| own.len() == rank) {
            return Ok(Some(*last));
        }
        let is_one = |size: &Dim| size.as_constant() == Some(1);
        // A single element broadcasts to either layout.
        if own.iter().all(is_one) && own.len() <= rank {
            return Ok(Some(id));
        }
        let is_per_channel = own.iter().rev().take(rank - 2).all(is_one);
        let before = own.len().checked_sub(rank - 1);
        match before {
            // Per-channel values without a batch become one axis, which broadcasts along the last.
            Some(before) if is_per_channel && own.iter().take(before).all(is_one) => {
                let whole = self.ints(&[-1])?;
                let name = self.name_of(id);
                self.emit_as((ONNX, "Reshape"), &[Some(id), Some(whole)], Vec::new(), &name).map(Some)
            }
            // Transposing per-channel values costs little, and folding transposes a constant.
            Some(1) if is_per_channel || self.graph.constants.contains_key(&id) => {
                self.transposed(id, &to_last(rank)).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns the NHWC form of an image, transposing it if there is none.
    fn last_of(&mut self, id: ValueId, rank: usize) -> Result<ValueId> {
        if let Some(last) = self.last.get(&id) {
            return Ok(*last);
        }
        let last = self.transposed(id, &to_last(rank))?;
        self.last.insert(id, last);
        self.new.push(id);
        Ok(last)
    }

    /// Materializes the NCHW form of an image that exists only in NHWC. A graph output that another
    /// value replaces keeps its name, as a copy.
    fn make(&mut self, id: ValueId) -> Result<()> {
        if let Some(source) = self.same.get(&id).copied().filter(|_| self.graph.outputs.contains(&id)) {
            self.same.remove(&id);
            self.make(source)?;
            return self.define((ONNX, "Identity"), &[Some(source)], Vec::new(), id);
        }
        if !self.pending.remove(&id) {
            return Ok(());
        }
        let Some(&last) = self.last.get(&id) else { return Ok(()) };
        let rank = self.rank(last).unwrap_or(0);
        let (op, inputs, attrs) = self.movement(last, &to_second(rank))?;
        self.define((ONNX, op), &inputs, attrs, id)
    }

    /// Permutes the axes of a value; returns the value itself if nothing moves.
    fn transposed(&mut self, id: ValueId, order: &[usize]) -> Result<ValueId> {
        if order.iter().copied().eq(0..order.len()) {
            return Ok(id);
        }
        let (op, inputs, attrs) = self.movement(id, order)?;
        let name = self.name_of(id);
        self.emit_as((ONNX, op), &inputs, attrs, &name)
    }

    /// Returns the operator that permutes axes: a reshape if only axes of size 1 move.
    fn movement(
        &mut self,
        id: ValueId,
        order: &[usize],
    ) -> Result<(&'static str, Vec<Option<ValueId>>, Attrs)> {
        let target = self.shape(id).and_then(|shape| reshape_of(shape, order));
        if let Some(target) = target {
            let target = self.ints(&target)?;
            return Ok(("Reshape", vec![Some(id), Some(target)], Vec::new()));
        }
        let order = order.iter().map(|axis| *axis as i64).collect();
        Ok(("Transpose", vec![Some(id)], vec![("perm".to_owned(), Attribute::Ints(order))]))
    }

    fn ints(&mut self, ints: &[i64]) -> Result<ValueId> {
        let tensor = Tensor::from_slice(&[ints.len()], ints)?;
        let name = format!("channels_last.constant_{}", self.graph.value_count());
        Ok(self.graph.add_constant(name, tensor))
    }

    /// Returns a name for a node that computes another layout of a value.
    fn name_of(&self, id: ValueId) -> String {
        format!("{}/layout_{}", self.graph.value(id).name, self.graph.value_count())
    }

    /// Adds the node that replaces another with one output, under its name.
    fn emit(
        &mut self,
        operator: (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: Attrs,
        node: &Node,
    ) -> Result<ValueId> {
        self.emit_as(operator, inputs, attrs, &node.name)
    }

    fn emit_as(
        &mut self,
        operator: (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: Attrs,
        name: &str,
    ) -> Result<ValueId> {
        let output = self.new_value(name);
        self.define_as(operator, inputs, attrs, name, &[Some(output)])?;
        Ok(output)
    }

    /// Like `emit`, with as many outputs as the replaced node has.
    fn emit_many(
        &mut self,
        operator: (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: Attrs,
        node: &Node,
    ) -> Result<Vec<ValueId>> {
        let outputs: Vec<ValueId> = node.outputs.iter().map(|_| self.new_value(&node.name)).collect();
        let wanted: Vec<Option<ValueId>> =
            node.outputs.iter().zip(&outputs).map(|(old, new)| old.map(|_| *new)).collect();
        self.define_as(operator, inputs, attrs, &node.name, &wanted)?;
        Ok(outputs)
    }

    fn new_value(&mut self, name: &str) -> ValueId {
        let name = format!("{name}.channels_last_{}", self.graph.value_count());
        self.graph.add_value(name, ValueType::Unknown)
    }

    /// Adds a node that computes an existing value, whose type and shape stay as they are.
    fn define(
        &mut self,
        operator: (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: Attrs,
        output: ValueId,
    ) -> Result<()> {
        let (name, info) = (self.name_of(output), self.graph.value(output).clone());
        self.define_as(operator, inputs, attrs, &name, &[Some(output)])?;
        *self.graph.value_mut(output) = info;
        Ok(())
    }

    fn define_as(
        &mut self,
        (domain, op): (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: Attrs,
        name: &str,
        outputs: &[Option<ValueId>],
    ) -> Result<()> {
        let spec = Registry::global()?.find(domain, op);
        let spec = spec.ok_or_else(|| crate::error!(Fail, "there is no operator {op}"))?;
        let attrs = Attributes::new(spec, attrs)?;
        let (inputs, outputs) = (inputs.into(), outputs.into());
        self.graph.nodes.push(Node {
            name: name.into(),
            spec,
            inputs,
            outputs,
            attrs,
            subgraphs: Vec::new(),
        });
        infer_at(self.graph, self.graph.nodes.len() - 1)
    }
}

type Attrs = Vec<(String, Attribute)>;

fn attributes(node: &Node) -> Attrs {
    node.attrs.iter().map(|(name, value)| (name.to_string(), value.clone())).collect()
}

/// Returns the index in NHWC of an NCHW axis, which may be negative.
fn moved_axis(axis: i64, rank: usize) -> Option<i64> {
    let axis = usize::try_from(if axis < 0 { axis.checked_add(rank as i64)? } else { axis }).ok()?;
    (axis < rank).then(|| place_of(axis, rank) as i64)
}

fn picked<T: Copy>(list: &[T], order: &[usize]) -> Vec<T> {
    order.iter().filter_map(|index| list.get(*index).copied()).collect()
}

/// Returns the target of the reshape that is equal to a permutation. `None` if elements would move,
/// or if `Reshape` cannot express the sizes.
fn reshape_of(shape: &[Dim], order: &[usize]) -> Option<Vec<i64>> {
    let is_one = |axis: &usize| shape.get(*axis).and_then(Dim::as_constant) == Some(1);
    let mut moving = order.iter().filter(|axis| !is_one(axis));
    let mut before = None;
    let stay = moving.all(|axis| before.replace(*axis).is_none_or(|before| before < *axis));
    let sizes = order.iter().map(|axis| shape.get(*axis).and_then(Dim::as_constant).unwrap_or(-1));
    let sizes: Vec<i64> = sizes.collect();
    // `Reshape` infers at most one size, and reads 0 as a size to copy.
    let fits = sizes.iter().filter(|size| **size == -1).count() <= 1 && !sizes.contains(&0);
    (stay && fits).then_some(sizes)
}
