//! Kernels that follow from the formula of an operator's record.
//!
//! A provider that computes any [`ScalarExpr`] runs every elementwise operator, new ones included.
//! It registers one kernel for each record in [`records`], instead of a list of names. Such a
//! kernel has a rank below all others, so any kernel that names its operator replaces it.

use crate::dtype::{DType, TypeSet};
use crate::ir::Attributes;
use crate::spec::{AttrKind, BinaryFn, OpSpec, Registry, ScalarExpr, Types, UnaryFn};

use super::KernelDef;

/// The numbers that a formula needs to compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arithmetic {
    /// Any: the formula only compares and selects, so no result exceeds the inputs.
    Selection,
    /// Integers or floats: integers have integer results.
    Integer,
    /// Floats.
    Float,
}

/// Returns all records with a formula, sorted by domain and name, except those of operators that
/// the loader always replaces. It is empty if two records describe one operator, which is an error
/// of every session.
pub fn records() -> impl Iterator<Item = &'static OpSpec> {
    let all = Registry::global().map_or(&[][..], Registry::records);
    let is_replaced = |spec: &OpSpec| spec.upgrades.iter().any(|upgrade| upgrade.before == i64::MAX);
    let with_formula = all.iter().copied().filter(|spec| spec.scalar.is_some() || spec.fold.is_some());
    with_formula.filter(move |spec| !is_replaced(spec))
}

/// Returns the definition of a kernel that computes the formula of a record: the operator, the
/// lowest rank, and which inputs the output may alias. The provider adds types, conditions and the
/// constructor.
pub fn kernel(spec: &'static OpSpec) -> KernelDef {
    KernelDef { domain: spec.domain, op: spec.name, rank: -1, in_place: in_place(spec), ..KernelDef::BASE }
}

/// Returns the first one or two adjacent inputs of the output's type: if the element sizes
/// differed, a kernel would overwrite elements that it has not read yet.
fn in_place(spec: &OpSpec) -> &'static [(usize, usize)] {
    const PAIRS: &[(usize, usize)] = &[(0, 0), (1, 0), (2, 0), (3, 0)];
    let output = spec.output_param(0).map(|param| param.ty);
    let same = |index: &usize| spec.input_param(*index).map(|param| param.ty) == output;
    let first = (0..PAIRS.len() - 1).find(same).unwrap_or(PAIRS.len());
    let count = (first..first + 2).take_while(same).count();
    PAIRS.get(first..first + count).unwrap_or(&[])
}

/// Returns whether all inputs and outputs of an operator have one type.
pub fn has_one_type(spec: &OpSpec) -> bool {
    let mut types = spec.inputs.iter().chain(spec.outputs).map(|param| param.ty);
    let first = types.next();
    types.all(|ty| Some(ty) == first)
}

/// Returns whether all inputs and outputs of an operator are booleans.
pub fn is_logic(spec: &OpSpec) -> bool {
    let booleans = Types::tensors(TypeSet::of(&[DType::Bool]));
    let mut params = spec.inputs.iter().chain(spec.outputs);
    params.all(|param| spec.type_var(param.ty).is_some_and(|var| var.types == booleans))
}

/// A comparison of two inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// `Less`, `LessOrEqual` or `Equal`.
    pub function: BinaryFn,
    /// The indices of the inputs that it compares.
    pub operands: [usize; 2],
}

/// Returns the comparison that a formula is, if it is no more than that.
pub fn comparison(formula: &ScalarExpr) -> Option<Comparison> {
    let ScalarExpr::Binary(function, a, b) = formula else { return None };
    let compares = matches!(function, BinaryFn::Less | BinaryFn::LessOrEqual | BinaryFn::Equal);
    match (&**a, &**b) {
        (ScalarExpr::Input(a), ScalarExpr::Input(b)) if compares => {
            Some(Comparison { function: *function, operands: [*a, *b] })
        }
        _ => None,
    }
}

/// Returns the numbers that the formula of a record needs. A float attribute may be a fraction, so
/// such a formula needs floats.
pub fn arithmetic(spec: &OpSpec) -> Arithmetic {
    let is_whole = spec.attrs.iter().all(|attr| matches!(attr.kind, AttrKind::Int | AttrKind::String));
    let formula = Attributes::new(spec, Vec::new()).and_then(|attrs| spec.formula(&attrs, 2));
    match formula {
        Ok(formula) if is_whole => arithmetic_of(&formula),
        _ => Arithmetic::Float,
    }
}

fn arithmetic_of(formula: &ScalarExpr) -> Arithmetic {
    use Arithmetic::{Float, Integer, Selection};
    use BinaryFn::{Add, And, Div, Equal, Fmod, Less, LessOrEqual, Max, Min, Mod, Mul, Or, Pow, Sub, Xor};
    let own = match formula {
        ScalarExpr::Constant(value) if value.fract() != 0.0 => Float,
        ScalarExpr::Constant(_) => Integer,
        ScalarExpr::Unary(UnaryFn::Not, _) => Selection,
        ScalarExpr::Unary(UnaryFn::Neg | UnaryFn::Abs | UnaryFn::Sign, _) => Integer,
        ScalarExpr::Unary(..) => Float,
        ScalarExpr::Binary(Add | Sub | Mul | Div | Mod | Fmod, ..) => Integer,
        ScalarExpr::Binary(Min | Max | Less | LessOrEqual | Equal | And | Or | Xor, ..) => Selection,
        ScalarExpr::Binary(Pow, ..) => Float,
        ScalarExpr::Input(_) | ScalarExpr::Select(..) => Selection,
    };
    let parts: &[&ScalarExpr] = match formula {
        ScalarExpr::Input(_) | ScalarExpr::Constant(_) => &[],
        ScalarExpr::Unary(_, x) => &[x],
        ScalarExpr::Binary(_, a, b) => &[a, b],
        ScalarExpr::Select(a, b, c) => &[a, b, c],
    };
    parts.iter().map(|part| arithmetic_of(part)).fold(own, Arithmetic::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Result, error};

    fn find(op: &str) -> Result<&'static OpSpec> {
        records().find(|spec| spec.domain.is_empty() && spec.name == op).ok_or_else(|| error!(Fail, "{op}"))
    }

    #[test]
    fn numbers_follow_from_formulas() -> Result<()> {
        let table = [
            ("Where", Arithmetic::Selection),
            ("Max", Arithmetic::Selection),
            ("LessOrEqual", Arithmetic::Selection),
            ("Relu", Arithmetic::Integer),
            ("Mod", Arithmetic::Integer),
            ("PRelu", Arithmetic::Integer),
            ("Sum", Arithmetic::Integer),
            ("Shrink", Arithmetic::Float),
            ("HardSwish", Arithmetic::Float),
            ("Elu", Arithmetic::Float),
            ("Exp", Arithmetic::Float),
            ("Pow", Arithmetic::Float),
        ];
        for (op, expected) in table {
            assert_eq!(arithmetic(find(op)?), expected, "{op}");
        }
        Ok(())
    }

    #[test]
    fn outputs_alias_inputs_of_their_type() -> Result<()> {
        let table: [(&str, &[(usize, usize)]); 6] = [
            ("Exp", &[(0, 0)]),
            ("Add", &[(0, 0), (1, 0)]),
            ("Sum", &[(0, 0), (1, 0)]),
            ("Pow", &[(0, 0)]),
            ("Less", &[]),
            ("Where", &[(1, 0), (2, 0)]),
        ];
        for (op, expected) in table {
            let spec = find(op)?;
            assert_eq!(kernel(spec).in_place, expected, "{op}");
            assert_eq!(has_one_type(spec), !matches!(op, "Pow" | "Less" | "Where"), "{op}");
        }
        Ok(())
    }

    #[test]
    fn logic_and_comparisons_are_found() -> Result<()> {
        for op in ["And", "Or", "Xor", "Not"] {
            assert!(is_logic(find(op)?), "{op}");
        }
        for op in ["Add", "Less", "Where", "IsNaN"] {
            assert!(!is_logic(find(op)?), "{op}");
        }
        let table = [
            ("Less", Some((BinaryFn::Less, [0, 1]))),
            ("Greater", Some((BinaryFn::Less, [1, 0]))),
            ("GreaterOrEqual", Some((BinaryFn::LessOrEqual, [1, 0]))),
            ("Equal", Some((BinaryFn::Equal, [0, 1]))),
            ("Max", None),
            ("Relu", None),
        ];
        for (op, expected) in table {
            let spec = find(op)?;
            let formula = spec.formula(&Attributes::new(spec, Vec::new())?, 2)?;
            let expected = expected.map(|(function, operands)| Comparison { function, operands });
            assert_eq!(comparison(&formula), expected, "{op}");
        }
        Ok(())
    }
}
