//! Type constraints, and the binding of type variables at a node.

use smallvec::SmallVec;

use crate::dtype::{DType, TypeSet};
use crate::ir::{Node, ValueType};
use crate::{Result, ensure, error};

use super::{Arity, OpSpec, Param};

/// The types that a type variable allows, grouped by the container of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Dense tensors.
    pub tensor: TypeSet,
    /// Sequences of tensors.
    pub sequence: TypeSet,
    /// Optional tensors.
    pub optional: TypeSet,
    /// Optional sequences of tensors.
    pub optional_sequence: TypeSet,
    /// Sparse tensors.
    pub sparse: TypeSet,
    /// Maps in ONNX notation: `map(int64, float)`. Sequences of maps as well.
    pub maps: &'static [&'static str],
}

impl Types {
    /// The empty set.
    pub const NONE: Types = Types {
        tensor: TypeSet::EMPTY,
        sequence: TypeSet::EMPTY,
        optional: TypeSet::EMPTY,
        optional_sequence: TypeSet::EMPTY,
        sparse: TypeSet::EMPTY,
        maps: &[],
    };

    /// Returns tensors of these element types.
    pub const fn tensors(dtypes: TypeSet) -> Types {
        Types { tensor: dtypes, ..Types::NONE }
    }

    /// Returns sequences of tensors of these element types.
    pub const fn sequences(dtypes: TypeSet) -> Types {
        Types { sequence: dtypes, ..Types::NONE }
    }

    /// Returns whether `ty` is allowed. An unknown type may be any, so it is.
    pub fn contains(&self, ty: &ValueType) -> bool {
        let element = |ty: &ValueType, set: TypeSet| ty.dtype().is_some_and(|dtype| set.contains(dtype));
        match ty {
            ValueType::Unknown => true,
            ValueType::Tensor(tensor) => self.tensor.contains(tensor.dtype),
            ValueType::Sparse(tensor) => self.sparse.contains(tensor.dtype),
            ValueType::Sequence(inner) => match &**inner {
                ValueType::Map(..) => self.maps.contains(&map_name(ty).as_str()),
                ValueType::Unknown => true,
                inner => element(inner, self.sequence),
            },
            ValueType::Optional(inner) => match &**inner {
                ValueType::Sequence(inner) => {
                    **inner == ValueType::Unknown || element(inner, self.optional_sequence)
                }
                ValueType::Unknown => true,
                inner => element(inner, self.optional),
            },
            ValueType::Map(..) => self.maps.contains(&map_name(ty).as_str()),
        }
    }

    /// Returns the types in ONNX notation, sorted.
    pub fn names(&self) -> Vec<String> {
        let wrapped = |set: TypeSet, before: &str, after: &str| -> Vec<String> {
            set.iter().map(|dtype| format!("{before}tensor({}){after}", dtype.name())).collect()
        };
        let mut names = wrapped(self.tensor, "", "");
        names.extend(wrapped(self.sequence, "seq(", ")"));
        names.extend(wrapped(self.optional, "optional(", ")"));
        names.extend(wrapped(self.optional_sequence, "optional(seq(", "))"));
        names.extend(self.sparse.iter().map(|dtype| format!("sparse_tensor({})", dtype.name())));
        names.extend(self.maps.iter().map(|name| name.to_string()));
        names.sort();
        names
    }
}

fn map_name(ty: &ValueType) -> String {
    match ty {
        ValueType::Sequence(inner) => format!("seq({})", map_name(inner)),
        ValueType::Map(key, value) => format!("map({}, {})", key.name(), map_name(value)),
        ValueType::Tensor(tensor) => tensor.dtype.name().to_string(),
        other => other.to_string(),
    }
}

/// The type variables that the inputs of a node bind, with their types.
pub type Bound<'a> = SmallVec<[(&'static str, &'a ValueType); 4]>;

/// Binds the type variables of a node from the types of its inputs. A type that the operator does
/// not allow, or conflicting types for one variable, are errors that name the input.
pub fn bind_types<'a>(
    spec: &'static OpSpec,
    node: &Node,
    input_type: impl Fn(usize) -> &'a ValueType,
) -> Result<Bound<'a>> {
    bind_named_types(spec, node, input_type, |_| "")
}

/// The same. Errors name a value by `input_name`, or by its parameter if that is empty.
pub(super) fn bind_named_types<'a, 'n>(
    spec: &'static OpSpec,
    node: &Node,
    input_type: impl Fn(usize) -> &'a ValueType,
    input_name: impl Fn(usize) -> &'n str,
) -> Result<Bound<'a>> {
    let mut bound = Bound::new();
    for (index, _) in node.inputs.iter().enumerate().filter(|(_, input)| input.is_some()) {
        let Some(param) = spec.input_param(index) else { continue };
        let ty = input_type(index);
        // An unknown type binds nothing: another input may still decide the variable.
        if *ty != ValueType::Unknown {
            bind_one(node, param, (ty, input_name(index)), &mut bound)?;
        }
    }
    Ok(bound)
}

fn bind_one<'a>(
    node: &Node,
    param: &'static Param,
    (ty, name): (&'a ValueType, &str),
    bound: &mut Bound<'a>,
) -> Result<()> {
    let spec = node.spec;
    let invalid = |takes: &str| {
        let name = if name.is_empty() { param.name } else { name };
        error!(
            InvalidGraph,
            "Type Error: Type '{}' of input parameter ({name}) of operator ({}) in node ({}) is invalid. \
             Input '{}' takes {takes}",
            ty.onnx_name(),
            spec.name,
            node.name,
            param.name
        )
    };
    let Some(var) = spec.type_var(param.ty) else {
        // Only tensor types are checked: `fixed_type` does not parse others.
        let expected = fixed_type(param.ty);
        let is_allowed = expected.is_none() || expected == ty.dtype();
        return match is_allowed {
            true => Ok(()),
            false => Err(invalid(param.ty).help("put a Cast before it")),
        };
    };
    if !var.types.contains(ty) {
        let takes = var.types.names().join(", ");
        return Err(invalid(&takes).help("put a Cast before it, or use another operator"));
    }
    // Each value has a type of its own, so none may bind the variable.
    if matches!(param.arity, Arity::Variadic { homogeneous: false, .. }) {
        return Ok(());
    }
    match bound.iter().find(|(name, _)| *name == var.name) {
        None => bound.push((var.name, ty)),
        Some((_, earlier)) => {
            let same = same_element(earlier, ty);
            ensure!(
                same,
                Fail,
                help = format!(
                    "inputs of type {} must have the same element type: put a Cast before one",
                    var.name
                ),
                // ONNX Runtime leaves out a bracket, too.
                "Type Error: Type parameter ({}) of Optype ({}) bound to different types ({} and {} in node ({}). \
                 Input '{}' is {ty}",
                var.name,
                spec.name,
                earlier.onnx_name(),
                ty.onnx_name(),
                node.name,
                param.name
            );
        }
    }
    Ok(())
}

/// Returns whether two types may bind the same variable. Shapes may differ: a variable constrains
/// only containers and element types.
fn same_element(a: &ValueType, b: &ValueType) -> bool {
    match (a, b) {
        (ValueType::Tensor(a), ValueType::Tensor(b)) => a.dtype == b.dtype,
        (ValueType::Sequence(a), ValueType::Sequence(b)) => same_element(a, b),
        (ValueType::Optional(a), ValueType::Optional(b)) => same_element(a, b),
        (ValueType::Unknown, _) | (_, ValueType::Unknown) => true,
        // Equal kinds here are maps or sparse tensors, whose element types are not compared.
        (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b),
    }
}

/// Returns the element type of a fixed parameter type such as `tensor(int64)`.
pub(super) fn fixed_type(ty: &str) -> Option<DType> {
    DType::from_name(ty.strip_prefix("tensor(")?.strip_suffix(')')?)
}

/// Returns the element type of an output: the fixed one, the one bound to its type variable, or the
/// only one that the variable allows.
pub(super) fn bound_dtype(
    bound: &[(&'static str, &ValueType)],
    spec: &'static OpSpec,
    param: &Param,
) -> Result<DType> {
    if let Some(dtype) = fixed_type(param.ty) {
        return Ok(dtype);
    }
    let found = bound.iter().find(|(name, _)| *name == param.ty).and_then(|(_, ty)| ty.dtype());
    // A variable with one type needs no input to bind it, so outputs of node types without inputs
    // have one.
    let only = || {
        let set = spec.type_var(param.ty)?.types.tensor;
        let mut types = set.iter();
        types.next().filter(|_| types.next().is_none())
    };
    found.or_else(only).ok_or_else(|| {
        error!(InvalidGraph, "the type of output '{}' does not follow from the inputs", param.name)
    })
}
