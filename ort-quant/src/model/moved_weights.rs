//! Constant folding of weights that nodes only move, such as the gates of a recurrent layer, which
//! exporters slice and concatenate.
//!
//! The result becomes a constant, so that a rewrite finds a weight. Only weights of layers are
//! folded: other constants would be in the file twice.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ndarray::{ArrayD, Axis, IxDyn, Slice};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::onnx::proto::{NodeProto, TensorProto};
use ort_core::onnx::{ExternalData, tensor_from_proto, tensor_to_proto};
use ort_core::tensor::Tensor;

use super::draft::{Draft, integer_of, integers_of, is_standard, reads};
use super::options::Mode;

/// The folded weights of a model take this many bytes at most, and so do the steps of one of them.
/// Unlike other weights they are in memory until the file is written.
const MOST_BYTES: usize = 64 << 20;
/// The nodes between a constant and a layer.
const MOST_STEPS: usize = 32;

/// What folding needs, and what it may still take.
pub(super) struct MovedWeights {
    external: ExternalData,
    /// The layers whose weights are folded, with the places of the weights.
    layers: &'static [(&'static str, &'static [usize])],
    bytes_left: usize,
}

impl MovedWeights {
    /// For the layers that a mode quantizes.
    pub(super) fn of(mode: &Mode, external: ExternalData) -> MovedWeights {
        let layers: &[(&str, &[usize])] = match mode {
            Mode::Dynamic(_) => &[("MatMul", &[1]), ("Gemm", &[1]), ("Conv", &[1]), ("LSTM", &[1, 2])],
            Mode::Static(_) | Mode::Blocks(_) | Mode::Half(_) => &[],
        };
        MovedWeights { external, layers, bytes_left: MOST_BYTES }
    }
}

/// Folds the weights of the layers of a graph. The nodes that moved them stay in their places, for
/// patterns that count nodes; returned are the outputs of those that no other node reads.
pub(super) fn fold(
    moved: &mut MovedWeights,
    draft: &mut Draft,
    nodes: &mut [NodeProto],
    outputs: &BTreeSet<String>,
) -> Result<BTreeSet<String>> {
    let wanted: Vec<(usize, usize)> = nodes
        .iter()
        .enumerate()
        .flat_map(|(index, node)| {
            let places = moved.layers.iter().find(|(operator, _)| is_standard(node, operator));
            places.into_iter().flat_map(move |(_, places)| places.iter().map(move |place| (index, *place)))
        })
        .collect();
    let steps: BTreeMap<String, NodeProto> = wanted_steps(nodes, &wanted);
    let (mut used, mut names) = (BTreeSet::new(), BTreeMap::new());
    for (index, place) in wanted {
        let Some(name) = nodes.get(index).and_then(|node| node.input.get(place)).cloned() else { continue };
        if !steps.contains_key(&name) || draft.constant(&name).is_some() {
            continue;
        }
        let is_known = names.contains_key(&name);
        if !is_known && let Some(folded) = folded(moved, draft, &steps, &name, &mut used)? {
            let new = draft.value_name(&format!("{name}_folded"));
            let proto = tensor_to_proto(&new, &folded)?;
            draft.add_folded(proto);
            names.insert(name.clone(), new);
        }
        let new = names.get(&name);
        let input = nodes.get_mut(index).and_then(|node| node.input.get_mut(place));
        input.into_iter().zip(new).for_each(|(input, new)| input.clone_from(new));
    }
    Ok(unread(nodes, &used, outputs))
}

/// The nodes that may be part of a folded weight, by output, if any weight may be folded.
fn wanted_steps(nodes: &[NodeProto], wanted: &[(usize, usize)]) -> BTreeMap<String, NodeProto> {
    const MOVES: [&str; 7] =
        ["Constant", "Identity", "Transpose", "Unsqueeze", "Squeeze", "Reshape", "Concat"];
    if wanted.is_empty() {
        return BTreeMap::new();
    }
    let moves = |node: &&NodeProto| {
        is_standard(node, "Slice") || MOVES.iter().any(|operator| is_standard(node, operator))
    };
    let by_output = |node: &NodeProto| Some((node.output.first()?.clone(), node.clone()));
    nodes.iter().filter(moves).filter_map(by_output).collect()
}

/// The nodes of `used`, by output, that nothing reads any more.
fn unread(nodes: &[NodeProto], used: &BTreeSet<String>, outputs: &BTreeSet<String>) -> BTreeSet<String> {
    let (mut read, mut unread) = (outputs.clone(), BTreeSet::new());
    if used.is_empty() {
        return unread;
    }
    for node in nodes.iter().rev() {
        match node.output.first().filter(|output| used.contains(*output) && !read.contains(*output)) {
            Some(output) => {
                unread.insert(output.clone());
            }
            None => read.extend(reads(std::slice::from_ref(node))),
        }
    }
    unread
}

/// The elements of a float tensor as bytes, because weights in a file are not aligned.
enum Moved {
    Single(ArrayD<[u8; 4]>),
    Half(ArrayD<[u8; 2]>),
}

/// Applies an expression to the array of either type.
macro_rules! each {
    ($moved:expr, $array:ident => $value:expr) => {
        match $moved {
            Moved::Single($array) => Moved::Single($value),
            Moved::Half($array) => Moved::Half($value),
        }
    };
}

impl Moved {
    fn of(tensor: &Tensor) -> Option<Moved> {
        let (shape, bytes) = (IxDyn(tensor.shape()), tensor.bytes()?);
        Some(match tensor.dtype() {
            DType::F32 => Moved::Single(ArrayD::from_shape_vec(shape, bytes.as_chunks().0.to_vec()).ok()?),
            DType::F16 => Moved::Half(ArrayD::from_shape_vec(shape, bytes.as_chunks().0.to_vec()).ok()?),
            _ => return None,
        })
    }

    fn shape(&self) -> &[usize] {
        match self {
            Moved::Single(array) => array.shape(),
            Moved::Half(array) => array.shape(),
        }
    }

    fn byte_count(&self) -> usize {
        match self {
            Moved::Single(array) => 4 * array.len(),
            Moved::Half(array) => 2 * array.len(),
        }
    }

    fn into_tensor(self: Rc<Moved>) -> Result<Tensor> {
        let shape = self.shape().to_vec();
        let (dtype, bytes) = match &*self {
            Moved::Single(array) => (DType::F32, array.iter().flatten().copied().collect::<Vec<u8>>()),
            Moved::Half(array) => (DType::F16, array.iter().flatten().copied().collect()),
        };
        Tensor::from_bytes(dtype, &shape, bytes.into())
    }

    fn reshaped(&self, shape: &[usize]) -> Option<Moved> {
        Some(each!(self, array => array.clone().into_shape_with_order(IxDyn(shape)).ok()?))
    }
}

/// A weight in evaluation.
struct Evaluation<'e> {
    draft: &'e Draft,
    external: &'e mut ExternalData,
    steps: &'e BTreeMap<String, NodeProto>,
    done: BTreeMap<String, Option<Rc<Moved>>>,
    /// The bytes of the constants.
    sources: usize,
    bytes_left: usize,
}

/// The weight that moved constants are; `None` if it is something else, or larger than they are.
fn folded(
    moved: &mut MovedWeights,
    draft: &Draft,
    steps: &BTreeMap<String, NodeProto>,
    name: &str,
    used: &mut BTreeSet<String>,
) -> Result<Option<Tensor>> {
    let (done, bytes_left, external) = (BTreeMap::new(), MOST_BYTES, &mut moved.external);
    let mut evaluation = Evaluation { draft, external, steps, done, sources: 0, bytes_left };
    let Some(weight) = evaluation.value(name, MOST_STEPS)? else { return Ok(None) };
    let bytes = weight.byte_count();
    if bytes > evaluation.sources || bytes > moved.bytes_left {
        return Ok(None);
    }
    let names = evaluation.done.into_keys();
    used.extend(names.filter(|name| steps.contains_key(name)));
    moved.bytes_left -= bytes;
    weight.into_tensor().map(Some)
}

impl Evaluation<'_> {
    fn value(&mut self, name: &str, steps_left: usize) -> Result<Option<Rc<Moved>>> {
        if let Some(done) = self.done.get(name) {
            return Ok(done.clone());
        }
        let value = match (self.draft.constant(name), self.steps.get(name)) {
            (Some(proto), _) => {
                let proto = proto.clone();
                self.source(&proto)?
            }
            (None, Some(node)) if steps_left > 0 => self.step(node, steps_left - 1)?,
            _ => None,
        };
        let value = value.filter(|value| value.byte_count() <= self.bytes_left).map(Rc::new);
        self.bytes_left -= value.as_ref().map_or(0, |value| value.byte_count());
        self.done.insert(name.to_string(), value.clone());
        Ok(value)
    }

    fn source(&mut self, proto: &TensorProto) -> Result<Option<Moved>> {
        let is_float = [DType::F32, DType::F16].map(DType::onnx_code).contains(&proto.data_type());
        let count = proto.dims.iter().try_fold(4_i64, |count, size| count.checked_mul(*size));
        let fits =
            count.is_some_and(|bytes| usize::try_from(bytes).is_ok_and(|bytes| bytes <= self.bytes_left));
        if !is_float || !fits {
            return Ok(None);
        }
        let moved = Moved::of(&tensor_from_proto(proto.clone(), self.external)?);
        self.sources += moved.as_ref().map_or(0, Moved::byte_count);
        Ok(moved)
    }

    /// The integers of an input, or of the attribute that older operator sets have in its place.
    /// `None` if they are computed.
    fn integers(&mut self, node: &NodeProto, place: usize, attribute: &str) -> Result<Option<Vec<i64>>> {
        let Some(name) = node.input.get(place).filter(|name| !name.is_empty()) else {
            let found = integers_of(node, attribute);
            return Ok((!found.is_empty()).then(|| found.to_vec()));
        };
        let constant = self.steps.get(name).filter(|node| is_standard(node, "Constant"));
        let attribute = constant.and_then(|node| node.attribute.first());
        if let Some(attribute) = attribute.filter(|attribute| attribute.name() == "value_ints") {
            self.done.insert(name.clone(), None);
            return Ok(Some(attribute.ints.clone()));
        }
        let proto = attribute.and_then(|attribute| attribute.t.as_deref()).or(self.draft.constant(name));
        // Few enough to be axes or sizes.
        let Some(proto) = proto.filter(|proto| proto.dims.iter().product::<i64>() <= 64) else {
            return Ok(None);
        };
        let tensor = tensor_from_proto(proto.clone(), self.external)?;
        self.done.insert(name.clone(), None);
        Ok(match tensor.dtype() {
            DType::I64 => Some(tensor.to_vec::<i64>()?),
            DType::I32 => Some(tensor.to_vec::<i32>()?.into_iter().map(i64::from).collect()),
            _ => None,
        })
    }

    fn step(&mut self, node: &NodeProto, steps_left: usize) -> Result<Option<Moved>> {
        match node.op_type() {
            "Concat" => return self.concatenated(node, steps_left),
            "Constant" => {
                let proto = node.attribute.iter().find_map(|attribute| attribute.t.as_deref());
                return proto.map_or(Ok(None), |proto| self.source(proto));
            }
            _ => {}
        }
        let Some(name) = node.input.first() else { return Ok(None) };
        let Some(input) = self.value(name, steps_left)? else { return Ok(None) };
        let rank = input.shape().len();
        Ok(match node.op_type() {
            "Identity" => Some(each!(&*input, array => array.clone())),
            "Transpose" => {
                let order = permutation(integers_of(node, "perm"), rank);
                order.map(|order| {
                    each!(&*input, array => {
                        array.view().permuted_axes(IxDyn(&order)).as_standard_layout().into_owned()
                    })
                })
            }
            "Slice" => self.sliced(node, &input)?,
            _ => {
                let attribute = if node.op_type() == "Reshape" { "shape" } else { "axes" };
                let sizes = self.integers(node, 1, attribute)?;
                new_shape(node, input.shape(), sizes.as_deref()).and_then(|shape| input.reshaped(&shape))
            }
        })
    }

    fn concatenated(&mut self, node: &NodeProto, steps_left: usize) -> Result<Option<Moved>> {
        let (mut single, mut half, mut bytes) = (Vec::new(), Vec::new(), 0);
        for name in &node.input {
            let Some(part) = self.value(name, steps_left)? else { return Ok(None) };
            bytes += part.byte_count();
            if bytes > self.bytes_left {
                return Ok(None);
            }
            if let Moved::Single(_) = &*part { single.push(part) } else { half.push(part) }
        }
        let rank = single.iter().chain(&half).map(|part| part.shape().len()).next().unwrap_or(0);
        let Some(axis) = place_of(integer_of(node, "axis", 0), rank) else { return Ok(None) };
        let views = single
            .iter()
            .filter_map(|part| if let Moved::Single(array) = &**part { Some(array.view()) } else { None });
        let views: Vec<_> = views.collect();
        if half.is_empty() {
            return Ok(ndarray::concatenate(Axis(axis), &views).ok().map(Moved::Single));
        }
        let halves = half
            .iter()
            .filter_map(|part| if let Moved::Half(array) = &**part { Some(array.view()) } else { None });
        let halves: Vec<_> = halves.collect();
        Ok(ndarray::concatenate(Axis(axis), &halves).ok().filter(|_| single.is_empty()).map(Moved::Half))
    }

    fn sliced(&mut self, node: &NodeProto, input: &Moved) -> Result<Option<Moved>> {
        let (starts, ends) = (self.integers(node, 1, "starts")?, self.integers(node, 2, "ends")?);
        let (Some(starts), Some(ends)) = (starts, ends) else { return Ok(None) };
        let has = |place: usize| node.input.get(place).is_some_and(|name| !name.is_empty());
        let (has_axes, has_steps) = (has(3) || !integers_of(node, "axes").is_empty(), has(4));
        let axes =
            if has_axes { self.integers(node, 3, "axes")? } else { Some((0..starts.len() as i64).collect()) };
        let steps = if has_steps { self.integers(node, 4, "steps")? } else { Some(vec![1; starts.len()]) };
        let (Some(axes), Some(steps)) = (axes, steps) else { return Ok(None) };
        if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
            return Ok(None);
        }
        let shape = input.shape();
        let mut parts = Vec::with_capacity(axes.len());
        for (((start, end), axis), step) in starts.iter().zip(&ends).zip(&axes).zip(&steps) {
            let Some(axis) = place_of(*axis, shape.len()) else { return Ok(None) };
            let Some(size) = shape.get(axis).and_then(|size| i64::try_from(*size).ok()) else {
                return Ok(None);
            };
            let inside = |place: i64| if place < 0 { (place + size).max(0) } else { place.min(size) };
            let (start, end) = (inside(*start), inside(*end));
            let (Ok(from), Ok(to), Ok(step)) =
                (isize::try_from(start), isize::try_from(end.max(start)), isize::try_from(*step))
            else {
                return Ok(None);
            };
            if step < 1 {
                return Ok(None);
            }
            parts.push((axis, Slice::new(from, Some(to), step)));
        }
        Ok(Some(each!(input, array => {
            let mut view = array.view();
            parts.iter().for_each(|(axis, slice)| view.slice_axis_inplace(Axis(*axis), *slice));
            view.as_standard_layout().into_owned()
        })))
    }
}

/// An axis, which may count from the end.
fn place_of(axis: i64, rank: usize) -> Option<usize> {
    let place = if axis < 0 { axis.checked_add(i64::try_from(rank).ok()?)? } else { axis };
    usize::try_from(place).ok().filter(|place| *place < rank)
}

/// The order of the axes; reversed if there is none.
fn permutation(given: &[i64], rank: usize) -> Option<Vec<usize>> {
    if given.is_empty() {
        return Some((0..rank).rev().collect());
    }
    let order: Option<Vec<usize>> = given.iter().map(|axis| place_of(*axis, rank)).collect();
    order.filter(|order| order.len() == rank && order.iter().collect::<BTreeSet<_>>().len() == rank)
}

/// The shape that `Unsqueeze`, `Squeeze` or `Reshape` makes, if it is valid.
fn new_shape(node: &NodeProto, shape: &[usize], given: Option<&[i64]>) -> Option<Vec<usize>> {
    match node.op_type() {
        "Unsqueeze" => {
            let rank = shape.len() + given?.len();
            let new: Option<BTreeSet<usize>> = given?.iter().map(|axis| place_of(*axis, rank)).collect();
            let new = new.filter(|new| new.len() == rank - shape.len())?;
            let mut old = shape.iter();
            (0..rank).map(|axis| if new.contains(&axis) { Some(1) } else { old.next().copied() }).collect()
        }
        "Squeeze" => {
            let gone: Option<BTreeSet<usize>> = match given {
                Some(axes) => axes.iter().map(|axis| place_of(*axis, shape.len())).collect(),
                None => Some((0..shape.len()).filter(|axis| shape.get(*axis) == Some(&1)).collect()),
            };
            let gone = gone.filter(|gone| gone.iter().all(|axis| shape.get(*axis) == Some(&1)))?;
            let kept = shape.iter().enumerate().filter(|(axis, _)| !gone.contains(axis));
            Some(kept.map(|(_, size)| *size).collect())
        }
        "Reshape" if integer_of(node, "allowzero", 0) == 0 => {
            let all: usize = shape.iter().product();
            let size = |(axis, size): (usize, &i64)| match size {
                0 => shape.get(axis).copied(),
                -1 => Some(usize::MAX),
                size => usize::try_from(*size).ok(),
            };
            let mut new = given?.iter().enumerate().map(size).collect::<Option<Vec<usize>>>()?;
            let mut known = new.iter().filter(|size| **size != usize::MAX);
            let known = known.try_fold(1_usize, |product, size| product.checked_mul(*size))?;
            let open: Vec<&mut usize> = new.iter_mut().filter(|size| **size == usize::MAX).collect();
            if open.len() > 1 {
                return None;
            }
            for size in open {
                *size = all.checked_div(known)?;
            }
            Some(new)
        }
        _ => None,
    }
}
