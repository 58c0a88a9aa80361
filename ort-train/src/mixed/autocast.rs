//! Autocast: selects the operators that compute in 16 bits and inserts the casts.
//!
//! The lists are those of PyTorch's autocast, under ONNX names.
//!
//! An operator has one of five kinds ([`kind_of`]). An operator that is not listed computes in
//! float32. So does one whose kernel or gradient exists in float32 only. [`OperatorPrecision`]
//! reports the counts by operator.

use std::collections::{BTreeMap, HashMap, HashSet};

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Graph, GraphBuilder, Node, ValueId, ValueType};
use ort_core::spec::{Arity, OpSpec, Param};
use ort_core::tensor::Tensor;

use super::MixedPrecision;

/// The number of nodes of an operator that compute in each type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorPrecision {
    /// The operator.
    pub operator: String,
    /// The number of forward nodes that compute in 16 bits.
    pub half: usize,
    /// The number of forward nodes that compute in float32.
    pub single: usize,
}

/// The type that an operator computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// 16 bits, whatever its inputs are.
    Half,
    /// float32, whatever its inputs are.
    Single,
    /// The widest type of its inputs.
    Widest,
    /// float32, with outputs rounded to 16 bits if an input was computed in 16 bits.
    Around,
    /// Any type: it does not compute with the elements.
    Any,
}

/// Operators that compute in 16 bits: matmuls and convolutions, as `torch.autocast` lists them.
const HALF: &[&str] =
    &["MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "PRelu", "Attention", "TrainingAttention"];

/// Operators that compute in the widest type of their inputs.
const WIDEST: &[&str] = &[
    "Abs",
    "Add",
    "AveragePool",
    "Ceil",
    "Clip",
    "Concat",
    "Cos",
    "CounterDropout",
    "DepthToSpace",
    "Div",
    "Dropout",
    "Elu",
    "Erf",
    "Expand",
    "Flatten",
    "Floor",
    "Gather",
    "GatherElements",
    "GatherND",
    "Gelu",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "Max",
    "MaxPool",
    "Min",
    "Mul",
    "Neg",
    "Pad",
    "Relu",
    "Reshape",
    "Resize",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Swish",
    "Tanh",
    "Tile",
    "Transpose",
    "Unsqueeze",
    "Where",
];

/// Classifies a node.
fn kind_of(node: &Node) -> Kind {
    let name = node.spec.name;
    match name {
        "BatchNormalization" => Kind::Around,
        "Shape" | "Size" | "Cast" => Kind::Any,
        _ if !node.subgraphs.is_empty() => Kind::Single,
        _ if HALF.contains(&name) => Kind::Half,
        _ if WIDEST.contains(&name) => Kind::Widest,
        _ => Kind::Single,
    }
}

/// Edits an inferred forward pass. Values keep their names and types. 16-bit versions are new
/// values. `ends` are values that are read later, and that must exist in float32.
pub(crate) fn autocast(
    graph: Graph,
    precision: MixedPrecision,
    ends: &[ValueId],
) -> Result<(Graph, Vec<OperatorPrecision>)> {
    let inputs = graph.inputs.iter().copied().collect();
    let mut builder = GraphBuilder::extend(graph);
    builder.set_scope("autocast");
    let nodes = std::mem::take(&mut builder.graph_mut().nodes);
    let mut products = HashSet::new();
    let mut edit = Edit {
        builder,
        dtype: precision.dtype(),
        inputs,
        half: HashMap::new(),
        only_half: HashSet::new(),
        made_half: HashSet::new(),
    };
    let mut counts: BTreeMap<&'static str, [usize; 2]> = BTreeMap::new();
    for node in nodes {
        let (spec, product) = (node.spec, node.outputs.first().copied().flatten());
        let computes = kind_of(&node) != Kind::Any;
        let has_floats = computes && node.inputs.iter().flatten().any(|value| edit.is_single(*value));
        let is_half = edit.add(node, &products)?;
        if is_half && HALF.contains(&spec.name) {
            products.extend(product);
        }
        if has_floats {
            let [half, single] = counts.entry(spec.name).or_default();
            *if is_half { half } else { single } += 1;
        }
    }
    // The loss reads the ends under their own names, so a cast back may be needed.
    for &end in ends {
        edit.single(end)?;
    }
    let row = |(operator, [half, single]): (&str, [usize; 2])| OperatorPrecision {
        operator: operator.to_string(),
        half,
        single,
    };
    Ok((edit.builder.graph().clone(), counts.into_iter().map(row).collect()))
}

/// The state of the rewrite.
struct Edit {
    builder: GraphBuilder,
    dtype: DType,
    inputs: HashSet<ValueId>,
    /// The 16-bit version of each value that has one.
    half: HashMap<ValueId, ValueId>,
    /// Values that so far exist in 16 bits only.
    only_half: HashSet<ValueId>,
    /// Values that a node computed in 16 bits, as opposed to casts of float32 values.
    made_half: HashSet<ValueId>,
}

impl Edit {
    /// Whether a value is float32 in the original graph.
    fn is_single(&self, value: ValueId) -> bool {
        self.builder.graph().value(value).ty.dtype() == Some(DType::F32)
    }

    /// Adds a node after the casts that it needs. Returns whether it computes in 16 bits.
    fn add(&mut self, mut node: Node, products: &HashSet<ValueId>) -> Result<bool> {
        let is_half = match kind_of(&node) {
            Kind::Half => allows(node.spec, self.dtype),
            Kind::Widest => allows(node.spec, self.dtype) && self.is_widest_half(&node, products),
            Kind::Any => {
                self.read_any(&mut node);
                self.builder.graph_mut().nodes.push(node);
                return Ok(false);
            }
            Kind::Single | Kind::Around => false,
        };
        let rounds =
            kind_of(&node) == Kind::Around && self.floats_of(&node).any(|it| self.made_half.contains(&it));
        let spec = node.spec;
        for (place, input) in node.inputs.iter_mut().enumerate() {
            let Some(value) = *input else { continue };
            if !self.is_single(value) {
                continue;
            }
            *input = Some(match is_half && is_element(spec, spec.inputs, place) {
                true => self.half(value)?,
                false => self.single(value)?,
            });
        }
        // Bodies of control flow are not rewritten, so they capture float32.
        for capture in node.subgraphs.iter_mut().flat_map(|subgraph| &mut subgraph.captures) {
            capture.outer = self.single(capture.outer)?;
        }
        let mut rounded = Vec::new();
        for (place, output) in node.outputs.iter_mut().enumerate() {
            let Some(value) = *output else { continue };
            let follows = is_element(spec, spec.outputs, place) && self.is_single(value);
            if is_half && follows {
                *output = Some(self.stand_in(value, "half", self.dtype));
                self.half.extend(output.map(|half| (value, half)));
                self.note_half(value);
            } else if rounds && follows {
                let exact = self.stand_in(value, "exact", DType::F32);
                rounded.push((value, exact));
                *output = Some(exact);
            }
        }
        self.builder.graph_mut().nodes.push(node);
        for (value, exact) in rounded {
            let half = self.cast(exact, self.dtype)?;
            self.half.insert(value, half);
            self.note_half(value);
        }
        Ok(is_half)
    }

    /// Records that a node computed a value in 16 bits, and in 16 bits only.
    fn note_half(&mut self, value: ValueId) {
        self.only_half.insert(value);
        self.made_half.insert(value);
    }

    /// The float32 inputs whose type decides what the node computes in.
    fn floats_of<'n>(&'n self, node: &'n Node) -> impl Iterator<Item = ValueId> + 'n {
        let inputs = node.inputs.iter().enumerate().filter_map(|(place, input)| input.map(|it| (place, it)));
        inputs
            .filter(|(place, value)| {
                is_element(node.spec, node.spec.inputs, *place) && self.is_single(*value)
            })
            .map(|(_, value)| value)
    }

    /// Whether the node's inputs let it compute in 16 bits. At least one must have been computed in
    /// 16 bits. The others must not decide the type: constants of one element, or a bias that is
    /// added to the result of a matmul.
    fn is_widest_half(&self, node: &Node, products: &HashSet<ValueId>) -> bool {
        let (half, others): (Vec<ValueId>, Vec<ValueId>) =
            self.floats_of(node).partition(|value| self.made_half.contains(value));
        let is_linear = node.spec.name == "Add" && half.iter().any(|value| products.contains(value));
        // Autocast computes reciprocals in float32.
        let inverts = node.spec.name == "Div"
            && node.inputs.first().copied().flatten().is_some_and(|value| others.contains(&value));
        let graph = self.builder.graph();
        let follows = |value: &ValueId| match graph.constants.get(value) {
            // A constant that overflows in 16 bits keeps the node in float32.
            Some(number) if number.element_count() == 1 => fits(number, self.dtype),
            constant => {
                is_linear && (constant.is_some() || self.inputs.contains(value)) && rank(graph, *value) == 1
            }
        };
        !half.is_empty() && !inverts && others.iter().all(follows)
    }

    /// Makes a node read each input in 16 bits if it exists in 16 bits only, which saves a cast.
    fn read_any(&self, node: &mut Node) {
        for input in node.inputs.iter_mut().flatten() {
            if self.only_half.contains(input)
                && let Some(half) = self.half.get(input)
            {
                *input = *half;
            }
        }
    }

    /// Returns the 16-bit version of a value, and adds a cast if there is none.
    fn half(&mut self, value: ValueId) -> Result<ValueId> {
        if let Some(half) = self.half.get(&value) {
            return Ok(*half);
        }
        let half = self.cast(value, self.dtype)?;
        self.half.insert(value, half);
        Ok(half)
    }

    /// Makes sure that a value exists in float32 under its own name.
    fn single(&mut self, value: ValueId) -> Result<ValueId> {
        if self.only_half.remove(&value)
            && let Some(&half) = self.half.get(&value)
        {
            let made = self.cast(half, DType::F32)?;
            // The cast writes the original value, so that later readers need no redirection.
            let last = self.builder.graph_mut().nodes.last_mut().and_then(|node| node.outputs.first_mut());
            last.into_iter().filter(|output| **output == Some(made)).for_each(|output| *output = Some(value));
        }
        Ok(value)
    }

    /// Adds a cast.
    fn cast(&mut self, value: ValueId, to: DType) -> Result<ValueId> {
        let cast =
            self.builder.node("Cast", &[value], &[("to", Attribute::Int(i64::from(to.onnx_code())))])?;
        let ty = retyped(&self.builder.graph().value(value).ty, to);
        self.builder.graph_mut().value_mut(cast).ty = ty;
        Ok(cast)
    }

    /// Adds a value that replaces another in the new type.
    fn stand_in(&mut self, value: ValueId, what: &str, dtype: DType) -> ValueId {
        let info = self.builder.graph().value(value);
        let (name, ty) = (format!("{}.{what}", info.name), retyped(&info.ty, dtype));
        self.builder.graph_mut().add_value(name, ty)
    }
}

/// The type with other elements and the same shape.
fn retyped(ty: &ValueType, dtype: DType) -> ValueType {
    ValueType::tensor(dtype, ty.shape().map(<[_]>::to_vec))
}

/// The rank of a value. An unknown rank compares unequal to every rank.
fn rank(graph: &Graph, value: ValueId) -> usize {
    graph.value(value).ty.shape().map_or(usize::MAX, <[_]>::len)
}

/// Whether no finite element overflows in 16 bits.
fn fits(number: &Tensor, dtype: DType) -> bool {
    // 0x7f7f is the largest bfloat16, 3.39e38. A mask's `f32::MIN` would become -inf there, and the
    // softmax of a fully masked row NaN.
    let largest = if dtype == DType::F16 { 65504.0 } else { f32::from_bits(0x7f7f_0000) };
    number
        .to_vec::<f32>()
        .is_ok_and(|numbers| numbers.iter().all(|number| number.is_infinite() || number.abs() <= largest))
}

/// The formal parameter at a position. The last one may be variadic.
fn param_at(params: &'static [Param], place: usize) -> Option<&'static Param> {
    let variadic = params.last().filter(|last| matches!(last.arity, Arity::Variadic { .. }));
    params.get(place).or(variadic)
}

/// Whether the value at a position has the type that the operator computes in, which is that of its
/// first output.
fn is_element(spec: &OpSpec, params: &'static [Param], place: usize) -> bool {
    let first = spec.outputs.first().map(|param| param.ty);
    first.is_some() && param_at(params, place).map(|param| param.ty) == first
}

/// Whether the operator's type constraints allow it to compute in this type.
fn allows(spec: &OpSpec, dtype: DType) -> bool {
    let first = spec.outputs.first().map(|param| param.ty);
    spec.types.iter().any(|var| Some(var.name) == first && var.types.tensor.contains(dtype))
}
