//! Operator records: one `static OpSpec` per operator, and what is derived from them.
//!
//! A record lists names, types, attributes, traits, shape inference, upgrades from older opsets,
//! the scalar formula of an elementwise operator, and the decomposition. Registry, inference,
//! documentation and tests all read the record; there is no second list of operators.

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
mod registry;
mod render;
mod scalar;
mod scalar_text;
mod sym_tensor;
mod typing;
mod view;

pub(crate) use backward::{BackwardPass, NotDifferentiable, is_continuous, prune};
pub use batch::{BatchCx, BatchFact, BatchResult, BatchRule};
pub use draft::Draft;
pub use flow::{Flow, TripCount};
pub(crate) use gradient::NodeEmitter;
pub use gradient::{Grad, GradCx};
pub use gradient_source::GradSource;
pub(crate) use gradient_steps::axis_of;
pub use infer::{InferCx, InputFacts, OutputShapes, infer_concrete, infer_graph};
pub(crate) use infer::{infer_at, infer_comparing, infer_until};
pub use registry::{OpRecord, Registry};
pub(crate) use render::render;
pub use scalar::{BinaryFn, ScalarExpr, UnaryFn};
pub use sym_tensor::SymTensor;
pub use typing::{Bound, Types, bind_types};
pub(crate) use view::known_ints;
pub use view::{ViewCx, ViewOf};

use crate::ir::Node;
use crate::{Result, ensure, error};

/// The domain of the standard operators, spelled as ONNX spells it.
pub const ONNX: &str = "";
/// The domain of classical machine learning operators.
pub const ONNX_ML: &str = "ai.onnx.ml";
/// The domain of operators in preview.
pub const ONNX_PREVIEW: &str = "ai.onnx.preview";
/// The domain of operators that ONNX Runtime adds.
pub const MICROSOFT: &str = "com.microsoft";
/// The domain of the runtime's own fused operators, which rewrites make.
pub const RUNTIME: &str = "ort-runtime";

/// Everything there is to know of one operator.
///
/// Records are written with struct update over [`OP`], which fills what most operators do not have.
#[derive(Debug)]
pub struct OpSpec {
    /// The domain, [`ONNX`] by default.
    pub domain: &'static str,
    /// The operator's name in ONNX.
    pub name: &'static str,
    /// The opset version in which the operator appeared.
    pub first: i64,
    /// The opset version in which its canonical form appeared.
    pub since: i64,
    /// Before this version of the domain a node may carry attributes that the operator does not
    /// have: ONNX Runtime does not check those of operators that it had before the standard.
    pub unchecked_before: i64,
    /// Inputs in order.
    pub inputs: &'static [Param],
    /// Outputs in order.
    pub outputs: &'static [Param],
    /// The types that each type variable may stand for.
    pub types: &'static [TypeVar],
    /// Attributes in any order.
    pub attrs: &'static [AttrSpec],
    /// Attributes that only rewrites set: files neither have them nor get them.
    pub internal_attrs: &'static [AttrSpec],
    /// Properties that passes rely on.
    pub traits: Traits,
    /// What bounds its speed.
    pub cost: Cost,
    /// Types and shapes of the outputs from those of the inputs.
    pub infer: fn(&mut InferCx<'_>) -> Result<()>,
    /// For each output, the part of an input it is without any element moving.
    pub view: Option<fn(&ViewCx<'_>) -> Option<ViewOf>>,
    /// The elements of the one output at which its inputs begin, where it is nothing but them, one
    /// behind the other.
    pub join: Option<fn(&ViewCx<'_>) -> Option<Vec<usize>>>,
    /// Steps from older opset versions to this form, oldest first.
    pub upgrades: &'static [Upgrade],
    /// The formula of an elementwise operator.
    pub scalar: Option<ScalarFn>,
    /// The same computation in terms of other operators, for providers without a kernel.
    pub lower: Option<fn(&mut Draft<'_>) -> Result<()>>,
    /// Where its gradient comes from.
    pub grad: Grad,
    /// Where the items of a batch are in the outputs, for runs that are split. By default not
    /// known, but for elementwise operators.
    pub batch: BatchRule,
    /// How its values are those of its subgraphs.
    pub flow: Option<Flow>,
}

/// The formula of an elementwise operator over its inputs, from its node.
pub type ScalarFn = fn(&crate::ir::Attributes) -> Result<ScalarExpr>;

/// The record that others start from: one operator without inputs, outputs or attributes.
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
    lower: None,
    grad: Grad::Derived,
    batch: BatchRule::FromTraits,
    flow: None,
};

/// How many values stand at one position of an operator's inputs or outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arity {
    /// Exactly one.
    Single,
    /// One or none.
    Optional,
    /// At least this many; only the last position may be variadic.
    Variadic {
        /// The least number of values.
        min: usize,
        /// Whether all have one type.
        homogeneous: bool,
    },
}

/// One formal input or output.
#[derive(Debug, Clone, Copy)]
pub struct Param {
    /// Its name in ONNX.
    pub name: &'static str,
    /// A type variable of the record, or a fixed type such as `tensor(int64)`.
    pub ty: &'static str,
    /// How many values it takes.
    pub arity: Arity,
    /// Whether output shapes depend on its elements (axes, shapes, counts), which then must be host
    /// memory.
    pub host: bool,
}

impl Param {
    /// The same parameter, whose elements decide output shapes.
    pub const fn host(mut self) -> Param {
        self.host = true;
        self
    }
}

/// A required input or output.
pub const fn one(name: &'static str, ty: &'static str) -> Param {
    Param { name, ty, arity: Arity::Single, host: false }
}

/// An input or output that may be left out.
pub const fn opt(name: &'static str, ty: &'static str) -> Param {
    Param { name, ty, arity: Arity::Optional, host: false }
}

/// Any number of values of one type, at least `min`.
pub const fn many(name: &'static str, ty: &'static str, min: usize) -> Param {
    Param { name, ty, arity: Arity::Variadic { min, homogeneous: true }, host: false }
}

/// Any number of values, each of its own type, at least `min`.
pub const fn many_mixed(name: &'static str, ty: &'static str, min: usize) -> Param {
    Param { name, ty, arity: Arity::Variadic { min, homogeneous: false }, host: false }
}

/// A type variable and the types it may stand for.
#[derive(Debug, Clone, Copy)]
pub struct TypeVar {
    /// Its name in ONNX, for example `T`.
    pub name: &'static str,
    /// What it may be.
    pub types: Types,
}

/// A type variable that stands for tensors of some element types.
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
    /// Text.
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
    /// A list of texts.
    Strings,
    /// A list of tensors.
    Tensors,
}

/// The value of an attribute that a node does not give.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AttrDefault {
    /// The node must give it.
    Required,
    /// It then stays absent.
    None,
    /// An integer.
    Int(i64),
    /// A float.
    Float(f32),
    /// Text.
    String(&'static str),
    /// A list of integers.
    Ints(&'static [i64]),
    /// A list of floats.
    Floats(&'static [f32]),
    /// A list of texts.
    Strings(&'static [&'static str]),
}

/// One attribute of an operator.
#[derive(Debug, Clone, Copy)]
pub struct AttrSpec {
    /// Its name in ONNX.
    pub name: &'static str,
    /// The kind of its value.
    pub kind: AttrKind,
    /// Its value where the node gives none.
    pub default: AttrDefault,
}

/// Short constructors for [`AttrSpec`].
pub mod attr {
    use super::{AttrDefault, AttrKind, AttrSpec};

    /// An integer with a default.
    pub const fn int(name: &'static str, default: i64) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Int, default: AttrDefault::Int(default) }
    }
    /// A float with a default.
    pub const fn float(name: &'static str, default: f32) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Float, default: AttrDefault::Float(default) }
    }
    /// A text with a default.
    pub const fn string(name: &'static str, default: &'static str) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::String, default: AttrDefault::String(default) }
    }
    /// A list of integers with a default.
    pub const fn ints(name: &'static str, default: &'static [i64]) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Ints, default: AttrDefault::Ints(default) }
    }
    /// A list of floats with a default.
    pub const fn floats(name: &'static str, default: &'static [f32]) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Floats, default: AttrDefault::Floats(default) }
    }
    /// A list of texts with a default.
    pub const fn strings(name: &'static str, default: &'static [&'static str]) -> AttrSpec {
        AttrSpec { name, kind: AttrKind::Strings, default: AttrDefault::Strings(default) }
    }
    /// An attribute that a node must give.
    pub const fn required(name: &'static str, kind: AttrKind) -> AttrSpec {
        AttrSpec { name, kind, default: AttrDefault::Required }
    }
    /// An attribute that a node may leave out.
    pub const fn optional(name: &'static str, kind: AttrKind) -> AttrSpec {
        AttrSpec { name, kind, default: AttrDefault::None }
    }
}

/// A set of properties of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traits(u32);

impl Traits {
    /// No property.
    pub const NONE: Traits = Traits(0);
    /// `op(a, b) = op(b, a)`.
    pub const COMMUTATIVE: Traits = Traits(1);
    /// `op(op(a, b), c) = op(a, op(b, c))` in exact arithmetic.
    pub const ASSOCIATIVE: Traits = Traits(2);
    /// Each output element depends on the broadcast elements at its place alone.
    pub const ELEMENTWISE: Traits = Traits(4);
    /// Elements are moved, never changed.
    pub const MOVES_DATA: Traits = Traits(8);
    /// Each run may give another result.
    pub const RANDOM: Traits = Traits(16);

    /// Both sets together.
    pub const fn with(self, other: Traits) -> Traits {
        Traits(self.0 | other.0)
    }

    /// Whether all properties of `other` are in the set.
    pub const fn has(self, other: Traits) -> bool {
        self.0 & other.0 == other.0
    }
}

/// What bounds an operator's speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cost {
    /// Nothing: it only describes (shapes, views).
    Free,
    /// Reading and writing memory.
    Memory,
    /// Arithmetic.
    Compute,
}

/// One step from an older version of an operator towards its canonical form.
#[derive(Debug, Clone, Copy)]
pub struct Upgrade {
    /// Applies to nodes of models whose opset is below this version.
    pub before: i64,
    /// The change.
    pub apply: fn(&mut Draft<'_>) -> Result<()>,
}

impl OpSpec {
    /// The formal parameter for the input at `index`.
    pub fn input_param(&self, index: usize) -> Option<&'static Param> {
        param_at(self.inputs, index)
    }

    /// The formal parameter for the output at `index`.
    pub fn output_param(&self, index: usize) -> Option<&'static Param> {
        param_at(self.outputs, index)
    }

    /// The operator's name, with its domain where that is not ONNX's own.
    pub fn full_name(&self) -> String {
        if self.domain.is_empty() { self.name.to_string() } else { format!("{}.{}", self.domain, self.name) }
    }

    /// The type variable called `name`.
    pub fn type_var(&self, name: &str) -> Option<&'static TypeVar> {
        self.types.iter().find(|var| var.name == name)
    }

    /// Checks how many inputs and outputs a node has, and which are left out.
    pub fn check_arity(&self, node: &Node) -> Result<()> {
        check_params("input", self.inputs, &node.inputs)?;
        check_params("output", self.outputs, &node.outputs)
    }
}

fn param_at(params: &'static [Param], index: usize) -> Option<&'static Param> {
    params.get(index).or_else(|| params.last().filter(|p| matches!(p.arity, Arity::Variadic { .. })))
}

/// The inputs or outputs of an operator in words, the optional ones in brackets.
fn they_are(what: &str, params: &'static [Param]) -> String {
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

fn check_params<T>(what: &str, params: &'static [Param], values: &[Option<T>]) -> Result<()> {
    for (index, value) in values.iter().enumerate() {
        let param = param_at(params, index).ok_or_else(|| {
            error!(InvalidGraph, "{} {what}s given, at most {} allowed", values.len(), params.len())
                .help(they_are(what, params))
        })?;
        let left_out_ok = what == "output" || !matches!(param.arity, Arity::Single);
        ensure!(
            value.is_some() || left_out_ok,
            InvalidGraph,
            help = they_are(what, params),
            "{what} '{}' is left out, but is not optional",
            param.name
        );
    }
    for (index, param) in params.iter().enumerate() {
        let given = values.len().saturating_sub(index);
        let least = match param.arity {
            Arity::Single => 1,
            Arity::Optional => 0,
            Arity::Variadic { min, .. } => min,
        };
        let least = if what == "output" && index > 0 { 0 } else { least };
        let many = if least == 1 { "value" } else { "values" };
        ensure!(
            given >= least,
            InvalidGraph,
            help = they_are(what, params),
            "{what} '{}' needs {least} {many}, got {given}",
            param.name
        );
    }
    Ok(())
}

/// Submits operator records to the registry.
#[macro_export]
macro_rules! ops {
    ($($spec:ident),* $(,)?) => {
        $($crate::inventory::submit! { $crate::spec::OpRecord(&$spec) })*
    };
}
