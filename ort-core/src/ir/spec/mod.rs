//! Operator records: one `static OpSpec` per operator, the single source of truth about it.
//!
//! A record lists names, types, attributes, traits, shape inference, upgrades from older opsets,
//! the scalar formula of an elementwise operator, and the decomposition. Registry, inference,
//! documentation and tests all derive from the record, so there is no second list of operators.

mod backward;
pub mod batch;
pub mod broadcast;
mod derivative;
mod draft;
mod flow;
pub mod gradient;
mod gradient_source;
mod gradient_steps;
mod infer;
mod node_emitter;
mod registry;
mod render;
mod requirement;
mod scalar;
mod scalar_text;
mod sym_tensor;
mod typing;
mod view;

pub(crate) use backward::{BackwardPass, NotDifferentiable, is_continuous, prune};
pub use batch::{BatchCx, BatchFact, BatchResult, BatchRule};
pub use draft::Draft;
pub use flow::{Flow, TripCount};
pub use gradient::{Grad, GradCx};
pub use gradient_source::GradSource;
pub(crate) use gradient_steps::{axis_of, product};
pub use infer::{InferCx, InputFacts, OutputShapes, infer_concrete, infer_graph};
pub(crate) use infer::{find_requirements, infer_at, infer_comparing, infer_until};
pub(crate) use node_emitter::NodeEmitter;
pub use registry::{OpRecord, Registry, canonical_domain};
pub(crate) use render::render;
pub use requirement::{NodeRequirement, Requirement};
pub use scalar::{BinaryFn, ScalarExpr, UnaryFn};
pub use sym_tensor::SymTensor;
pub use typing::{Bound, Types, bind_types};
pub(crate) use view::known_ints;
pub use view::{ViewCx, ViewOf};

use crate::ir::Node;
use crate::{Result, ensure, error};

/// The domain of the standard operators. ONNX spells it as the empty string.
pub const ONNX: &str = "";
/// The domain of classical machine learning operators.
pub const ONNX_ML: &str = "ai.onnx.ml";
/// The domain of preview operators.
pub const ONNX_PREVIEW: &str = "ai.onnx.preview";
/// The domain of operators that ONNX Runtime adds.
pub const MICROSOFT: &str = "com.microsoft";
/// The domain of the runtime's own fused operators, which rewrites create.
pub const RUNTIME: &str = "ort-runtime";

/// The record of one operator.
///
/// Records use struct update syntax over [`OP`], which has the defaults.
#[derive(Debug)]
pub struct OpSpec {
    /// The domain, [`ONNX`] by default.
    pub domain: &'static str,
    /// The ONNX name.
    pub name: &'static str,
    /// The opset version that introduced the operator.
    pub first: i64,
    /// The opset version of the canonical form.
    pub since: i64,
    /// For nodes from opsets below this version, the loader ignores unknown attributes with a
    /// warning. ONNX Runtime had these operators before the standard did, and does not check their
    /// attributes.
    pub unchecked_before: i64,
    /// Inputs, in order.
    pub inputs: &'static [Param],
    /// Outputs, in order.
    pub outputs: &'static [Param],
    /// The type variables and the types they allow.
    pub types: &'static [TypeVar],
    /// Attributes, in any order.
    pub attrs: &'static [AttrSpec],
    /// Attributes that only rewrites set. The loader rejects them and saving omits them.
    pub internal_attrs: &'static [AttrSpec],
    /// Properties that passes rely on.
    pub traits: Traits,
    /// What limits the operator's speed.
    pub cost: Cost,
    /// Inference rule: sets types and shapes of the outputs from those of the inputs.
    pub infer: fn(&mut InferCx<'_>) -> Result<()>,
    /// Zero-copy rule: the outputs as contiguous parts of one input, if the node can alias it.
    pub view: Option<fn(&ViewCx<'_>) -> Option<ViewOf>>,
    /// Concatenation rule: the element offset of each input in the single output, if the output is
    /// just the inputs laid out one after another.
    pub join: Option<fn(&ViewCx<'_>) -> Option<Vec<usize>>>,
    /// Upgrades from older opset versions to this form, oldest first.
    pub upgrades: &'static [Upgrade],
    /// The formula of an elementwise operator.
    pub scalar: Option<ScalarFn>,
    /// The formula of an elementwise operator of any number of inputs, for a number of them; `None`
    /// for no inputs.
    pub fold: Option<fn(usize) -> Option<ScalarExpr>>,
    /// Decomposition into other operators, for providers without a kernel.
    pub lower: Option<fn(&mut Draft<'_>) -> Result<()>>,
    /// The source of the gradient.
    pub grad: Grad,
    /// Batch rule: where the outputs hold the items of a batch, for runs that are split. By default
    /// only elementwise operators have one.
    pub batch: BatchRule,
    /// How the node maps its inputs and outputs to those of its subgraphs, for control flow.
    pub flow: Option<Flow>,
}

/// Builds the formula of an elementwise operator from the attributes of a node.
pub type ScalarFn = fn(&crate::ir::Attributes) -> Result<ScalarExpr>;

/// The default record, without inputs, outputs or attributes.
pub const OP: OpSpec = OpSpec {
    domain: ONNX,
    name: "",
    first: 1,
    since: 1,
    unchecked_before: 0,
    inputs: &[],
    outputs: &[],
    types: &[],
    attrs: &[],
    internal_attrs: &[],
    traits: Traits::NONE,
    cost: Cost::Memory,
    infer: |_| Ok(()),
    view: None,
    join: None,
    upgrades: &[],
    scalar: None,
    fold: None,
    lower: None,
    grad: Grad::Derived,
    batch: BatchRule::FromTraits,
    flow: None,
};

/// The number of values that a formal input or output takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arity {
    /// Exactly one.
    Single,
    /// One, or none if it is omitted.
    Optional,
    /// At least `min`. Only the last parameter may be variadic.
    Variadic {
        /// The minimum number of values.
        min: usize,
        /// Whether all values have the same type.
        homogeneous: bool,
    },
}

/// A formal input or output.
#[derive(Debug, Clone, Copy)]
pub struct Param {
    /// The ONNX name.
    pub name: &'static str,
    /// A type variable of the record, or a fixed type such as `tensor(int64)`.
    pub ty: &'static str,
    /// The number of values it takes.
    pub arity: Arity,
    /// Whether output shapes depend on the elements (axes, shapes, counts). Such an input must be
    /// in host memory.
    pub host: bool,
}

impl Param {
    /// Marks the parameter as one whose elements decide output shapes.
    pub const fn host(mut self) -> Param {
        self.host = true;
        self
    }
}

/// Returns a required input or output.
pub const fn one(name: &'static str, ty: &'static str) -> Param {
    Param { name, ty, arity: Arity::Single, host: false }
}

/// Returns an optional input or output.
pub const fn opt(name: &'static str, ty: &'static str) -> Param {
    Param { name, ty, arity: Arity::Optional, host: false }
}

/// Returns a variadic parameter of one type, with at least `min` values.
pub const fn many(name: &'static str, ty: &'static str, min: usize) -> Param {
    Param { name, ty, arity: Arity::Variadic { min, homogeneous: true }, host: false }
}

/// Returns a variadic parameter of mixed types, with at least `min` values.
pub const fn many_mixed(name: &'static str, ty: &'static str, min: usize) -> Param {
    Param { name, ty, arity: Arity::Variadic { min, homogeneous: false }, host: false }
}

/// A type variable and the types it allows.
#[derive(Debug, Clone, Copy)]
pub struct TypeVar {
    /// The ONNX name, for example `T`.
    pub name: &'static str,
    /// The allowed types.
    pub types: Types,
}

/// Returns a type variable for tensors of these element types.
pub const fn var(name: &'static str, dtypes: crate::dtype::TypeSet) -> TypeVar {
    TypeVar { name, types: Types::tensors(dtypes) }
}

/// The kind of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttrKind {
    /// A 64-bit integer.
    Int,
    /// A 32-bit float.
    Float,
    /// A string.
    String,
    /// A tensor.
    Tensor,
    /// A sparse tensor.
    Sparse,
    /// A type.
    Type,
    /// A subgraph.
    Graph,
    /// A list of integers.
    Ints,
    /// A list of floats.
    Floats,
    /// A list of strings.
    Strings,
    /// A list of tensors.
    Tensors,
}

impl AttrKind {
    /// Returns the name in `AttributeProto.AttributeType`.
    pub fn onnx_name(self) -> &'static str {
        match self {
            AttrKind::Int => "INT",
            AttrKind::Float => "FLOAT",
            AttrKind::String => "STRING",
            AttrKind::Tensor => "TENSOR",
            AttrKind::Sparse => "SPARSE_TENSOR",
            AttrKind::Type => "TYPE_PROTO",
            AttrKind::Graph => "GRAPH",
            AttrKind::Ints => "INTS",
            AttrKind::Floats => "FLOATS",
            AttrKind::Strings => "STRINGS",
            AttrKind::Tensors => "TENSORS",
        }
    }
}

/// Whether an attribute may be omitted, and its default.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AttrDefault {
    /// The node must have the attribute.
    Required,
    /// The attribute is optional and has no default.
    None,
    /// An integer.
    Int(i64),
    /// A float.
    Float(f32),
    /// A string.
    String(&'static str),
    /// A list of integers.
    Ints(&'static [i64]),
    /// A list of floats.
    Floats(&'static [f32]),
    /// A list of strings.
    Strings(&'static [&'static str]),
}

/// The declaration of one attribute.
#[derive(Debug, Clone, Copy)]
pub struct AttrSpec {
    /// The ONNX name.
    pub name: &'static str,
    /// The kind of its value.
    pub kind: AttrKind,
    /// The value if the node omits it.
    pub default: AttrDefault,
}

/// Short constructors for [`AttrSpec`].
pub mod attr {
    use super::{AttrDefault, AttrKind, AttrSpec};

    /// Returns an integer attribute with a default.
    pub const fn int(name: &'static str, default: i64) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Int, default: AttrDefault::Int(default) }
    }
    /// Returns a float attribute with a default.
    pub const fn float(name: &'static str, default: f32) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Float, default: AttrDefault::Float(default) }
    }
    /// Returns a string attribute with a default.
    pub const fn string(name: &'static str, default: &'static str) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::String, default: AttrDefault::String(default) }
    }
    /// Returns an attribute of a list of integers, with a default.
    pub const fn ints(name: &'static str, default: &'static [i64]) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Ints, default: AttrDefault::Ints(default) }
    }
    /// Returns an attribute of a list of floats, with a default.
    pub const fn floats(name: &'static str, default: &'static [f32]) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Floats, default: AttrDefault::Floats(default) }
    }
    /// Returns an attribute of a list of strings, with a default.
    pub const fn strings(name: &'static str, default: &'static [&'static str]) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Strings, default: AttrDefault::Strings(default) }
    }
    /// Returns a required attribute.
    pub const fn required(name: &'static str, kind: AttrKind) -> AttrSpec {
        AttrSpec { name, kind, default: AttrDefault::Required }
    }
    /// Returns an optional attribute without a default.
    pub const fn optional(name: &'static str, kind: AttrKind) -> AttrSpec {
        AttrSpec { name, kind, default: AttrDefault::None }
    }
}

/// A set of properties of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traits(u32);

impl Traits {
    /// The empty set.
    pub const NONE: Traits = Traits(0);
    /// `op(a, b) = op(b, a)`.
    pub const COMMUTATIVE: Traits = Traits(1);
    /// `op(op(a, b), c) = op(a, op(b, c))` in exact arithmetic.
    pub const ASSOCIATIVE: Traits = Traits(2);
    /// Each output element depends only on the broadcast input elements at its position.
    pub const ELEMENTWISE: Traits = Traits(4);
    /// Elements are moved, never changed.
    pub const MOVES_DATA: Traits = Traits(8);
    /// Each run may return a different result.
    pub const RANDOM: Traits = Traits(16);
    /// Matmuls and convolutions fuse it as an epilogue: a function of one value, whose attributes
    /// are floats. Only for operators of the standard.
    pub const ACTIVATION: Traits = Traits(32);
    /// The result is divided by a norm or a deviation of the first input, so that factors of that
    /// input vanish.
    pub const NORMALIZES: Traits = Traits(64);
    /// A run does more than compute the outputs: the node stays even if nothing reads them.
    pub const EFFECTS: Traits = Traits(128);

    /// Returns the union of two sets.
    pub const fn with(self, other: Traits) -> Traits {
        Traits(self.0 | other.0)
    }

    /// Returns whether the set has all properties of `other`.
    pub const fn has(self, other: Traits) -> bool {
        self.0 & other.0 == other.0
    }
}

/// What limits an operator's speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cost {
    /// Nothing: the operator only handles metadata (shapes, views).
    Free,
    /// Memory bandwidth.
    Memory,
    /// Arithmetic.
    Compute,
}

/// An upgrade from an older version of an operator towards the canonical form.
#[derive(Debug, Clone, Copy)]
pub struct Upgrade {
    /// Applies to nodes from opsets below this version.
    pub before: i64,
    /// The rewrite of the node.
    pub apply: fn(&mut Draft<'_>) -> Result<()>,
}

impl OpSpec {
    /// Returns the formal parameter of the input at `index`.
    pub fn input_param(&self, index: usize) -> Option<&'static Param> {
        param_at(self.inputs, index)
    }

    /// Returns the formal parameter of the output at `index`.
    pub fn output_param(&self, index: usize) -> Option<&'static Param> {
        param_at(self.outputs, index)
    }

    /// Returns the name, qualified with the domain unless it is the standard one.
    pub fn full_name(&self) -> String {
        if self.domain.is_empty() { self.name.to_string() } else { format!("{}.{}", self.domain, self.name) }
    }

    /// Returns the type variable of this name.
    pub fn type_var(&self, name: &str) -> Option<&'static TypeVar> {
        self.types.iter().find(|var| var.name == name)
    }

    /// Returns the formula of an elementwise operator over this number of inputs.
    ///
    /// # Errors
    /// The record has no formula, or none for these attributes or this number of inputs.
    pub fn formula(&self, attrs: &crate::ir::Attributes, inputs: usize) -> Result<ScalarExpr> {
        match (self.scalar, self.fold) {
            (Some(scalar), _) => scalar(attrs),
            (None, Some(fold)) => {
                fold(inputs).ok_or_else(|| error!(InvalidGraph, "{} has no input", self.name))
            }
            (None, None) => Err(error!(Fail, "operator {} has no formula", self.name)),
        }
    }

    /// Whether it is elementwise and needs one input; others are numbers for all elements, such as
    /// the bounds of `Clip`.
    pub fn is_unary_elementwise(&self) -> bool {
        let is_other = |param: &&Param| param.arity != Arity::Optional;
        self.traits.has(Traits::ELEMENTWISE)
            && self.inputs.iter().filter(is_other).map(|param| param.arity).eq([Arity::Single])
    }

    /// Checks the number of inputs and outputs of a node, and which of them it omits.
    pub fn check_arity(&self, node: &Node) -> Result<()> {
        check_params("input", node, self.inputs, &node.inputs)?;
        check_params("output", node, self.outputs, &node.outputs)
    }
}

fn param_at(params: &'static [Param], index: usize) -> Option<&'static Param> {
    // The last parameter takes all further values if it is variadic.
    params.get(index).or_else(|| params.last().filter(|p| matches!(p.arity, Arity::Variadic { .. })))
}

/// Lists the inputs or outputs of an operator for error messages, optional ones in brackets.
fn describe_params(what: &str, params: &'static [Param]) -> String {
    let name = |param: &Param| match param.arity {
        Arity::Single => param.name.to_string(),
        Arity::Optional => format!("[{}]", param.name),
        Arity::Variadic { .. } => format!("{}...", param.name),
    };
    match params {
        [] => format!("the operator has no {what}s"),
        _ => format!("its {what}s are {}", params.iter().map(name).collect::<Vec<_>>().join(", ")),
    }
}

/// The error for a number of inputs or outputs that the operator does not allow.
fn wrong_count(what: &str, node: &Node, params: &'static [Param], given: usize) -> crate::Error {
    let least = |(index, param): (usize, &Param)| match param.arity {
        Arity::Single => index + 1,
        Arity::Optional => 0,
        Arity::Variadic { min, .. } => index + min,
    };
    let least = params.iter().enumerate().map(least).max().unwrap_or(0);
    let most = match params.last().map(|param| param.arity) {
        // ONNX has no other bound than that of its type.
        Some(Arity::Variadic { .. }) => i32::MAX as usize,
        _ => params.len(),
    };
    let (name, OpSpec { domain, name: op, since, .. }) = (&node.name, node.spec);
    let schema = format!("Node({name}) with schema({domain}::{op}:{since})");
    error!(InvalidGraph, "{schema} has {what} size {given} not in range [min={least}, max={most}]")
        .help(arity_advice(what, params, given))
}

/// Advice for a node with `given` inputs or outputs: which to connect, or that there are too many.
fn arity_advice(what: &str, params: &'static [Param], given: usize) -> String {
    let known = describe_params(what, params);
    let is_needed = |param: &&Param| !matches!(param.arity, Arity::Optional);
    let missing: Vec<&str> = params.iter().skip(given).filter(is_needed).map(|param| param.name).collect();
    match missing.as_slice() {
        [] => format!("{known}: remove the others"),
        [one] => format!("{known}: connect the missing {what} {one}"),
        _ => format!("{known}: connect the missing {what}s {}", missing.join(", ")),
    }
}

fn check_params<T>(what: &str, node: &Node, params: &'static [Param], values: &[Option<T>]) -> Result<()> {
    for (index, value) in values.iter().enumerate() {
        let param = param_at(params, index).ok_or_else(|| wrong_count(what, node, params, values.len()))?;
        // A node may omit any output: it then has no reader.
        let left_out_ok = what == "output" || !matches!(param.arity, Arity::Single);
        ensure!(
            value.is_some() || left_out_ok,
            InvalidGraph,
            help = format!("{}: connect {what} {}", describe_params(what, params), param.name),
            "Node ({})'s {what} {index} is marked single but has an empty string in the graph",
            node.name
        );
    }
    for (index, param) in params.iter().enumerate() {
        // All values from this parameter on: a variadic one comes last and takes them all.
        let given = values.len().saturating_sub(index);
        let least = match param.arity {
            Arity::Single => 1,
            Arity::Optional => 0,
            Arity::Variadic { min, .. } => min,
        };
        // Trailing outputs may be omitted too, except a required first one.
        let least = if what == "output" && index > 0 { 0 } else { least };
        if given < least {
            return Err(wrong_count(what, node, params, values.len()));
        }
    }
    Ok(())
}

/// Registers operator records.
#[macro_export]
macro_rules! ops {
    ($($spec:ident),* $(,)?) => {
        $($crate::inventory::submit! { $crate::spec::OpRecord(&$spec) })*
    };
}
