//! Construction of a rule's replacement, and queries on its match.

use super::level::Level;
use super::matching::{Found, Match, Uses, known_ints, scalar};
use super::term::{Literal, NodeTerm, Term};
use crate::dtype::DType;
use crate::ir::{Attribute, Graph, Node, ValueId};
use crate::spec::{AttrKind, Draft, OpSpec};
use crate::tensor::Tensor;
use crate::{Result, error};

impl<'a> Found<'a> {
    /// Returns the value bound to `name`.
    pub fn value(&self, name: &str) -> Option<ValueId> {
        self.found.value(name)
    }

    /// Returns the node bound to `name`.
    pub fn node(&self, name: &str) -> Option<&'a Node> {
        self.found.node(name).and_then(|id| self.graph.nodes.get(id.index()))
    }

    /// Returns the root of the match.
    pub fn root(&self) -> Option<&'a Node> {
        self.found.nodes.first().and_then(|id| self.graph.nodes.get(id.index()))
    }

    /// Returns the constant bound to `name`.
    pub fn tensor(&self, name: &str) -> Option<&'a Tensor> {
        self.value(name).and_then(|value| self.graph.constants.get(&value))
    }

    /// Returns the number that the constant `name` holds, if it has one element.
    pub fn scalar(&self, name: &str) -> Option<f64> {
        self.tensor(name).and_then(scalar)
    }

    /// Returns the elements of the small integer value `name`, if they are known.
    pub fn ints(&self, name: &str) -> Option<Vec<i64>> {
        self.value(name).and_then(|value| known_ints(self.graph, value))
    }

    /// Returns the shape of the value `name`, if its rank is known.
    pub fn shape(&self, name: &str) -> Option<&'a [crate::dim::Dim]> {
        self.value(name).and_then(|value| self.graph.value(value).ty.shape())
    }

    /// Returns the shape of the value `name`, if all its sizes are constants.
    pub fn fixed_shape(&self, name: &str) -> Option<Vec<usize>> {
        let sizes = self.shape(name)?.iter();
        sizes.map(|size| size.as_constant().and_then(|size| usize::try_from(size).ok())).collect()
    }

    /// Returns the shape of the root's first output, if its rank is known.
    pub fn output_shape(&self) -> Option<&'a [crate::dim::Dim]> {
        let output = self.root()?.outputs.first().copied().flatten()?;
        self.graph.value(output).ty.shape()
    }

    /// Whether the value `name` has the shape of the root's first output.
    pub fn has_output_shape(&self, name: &str) -> bool {
        self.shape(name).is_some_and(|shape| self.output_shape() == Some(shape))
    }

    /// Returns the rank of the value `name`, if it is known.
    pub fn rank(&self, name: &str) -> Option<usize> {
        self.shape(name).map(<[_]>::len)
    }

    /// Converts a number to a float attribute of an operator on the value `name`. Float attributes
    /// are of single precision. `None` if the operator computes in double precision and the
    /// attribute would round the number, if the number is NaN or overflows, or if the element type
    /// is unknown.
    pub fn attribute(&self, name: &str, number: f64) -> Option<f32> {
        let rounded = number as f32;
        let is_exact = self.dtype(name)? != DType::F64 || f64::from(rounded) == number;
        (!number.is_nan() && rounded.is_finite() == number.is_finite() && is_exact).then_some(rounded)
    }

    /// Returns the element type of the value `name`.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        self.value(name).and_then(|value| self.graph.value(value).ty.dtype())
    }
}

/// The replacement of a match, under construction.
#[derive(Debug)]
pub struct Patch<'g> {
    pub(crate) draft: Draft<'g>,
    pub(crate) found: &'g Match,
    pub(crate) level: Level,
    uses: Uses<'g>,
}

impl<'g> Patch<'g> {
    pub(super) fn new(
        graph: &'g mut Graph,
        (found, uses): (&'g Match, Uses<'g>),
        root: &Node,
        level: Level,
    ) -> Patch<'g> {
        let mut draft = Draft::new(graph, root.name.clone(), ("", root.spec.name, root.spec.since));
        draft.outputs = root.outputs.clone();
        Patch { draft, found, level, uses }
    }

    /// Returns the match, for queries.
    pub fn found(&self) -> Found<'_> {
        Found { graph: self.draft.graph(), found: self.found, level: self.level, uses: self.uses }
    }

    /// Returns the value bound to `name`.
    pub fn value(&self, name: &str) -> Result<ValueId> {
        self.found.value(name).ok_or_else(|| error!(Fail, "the pattern has no value '{name}'"))
    }

    /// Returns the values of these names, as inputs of a node.
    ///
    /// Errors: as [`Patch::value`].
    pub fn inputs(&self, names: &[&str]) -> Result<Vec<Option<ValueId>>> {
        names.iter().map(|name| self.value(name).map(Some)).collect()
    }

    /// Returns the attributes of the matched node `name`; none if there is no such node.
    pub fn attrs(&self, name: &str) -> Vec<(&'static str, Attribute)> {
        let node = self.found().node(name);
        node.map_or(Vec::new(), |node| {
            node.attrs.declared().map(|(name, value)| (name, value.clone())).collect()
        })
    }

    /// Adds a node with one output; its operator may be of any domain.
    pub fn emit(
        &mut self,
        operator: (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
    ) -> Result<ValueId> {
        let outputs = self.draft.emit_in(operator, inputs, attrs, 1)?;
        outputs.first().copied().ok_or_else(|| error!(Fail, "{} has no output", operator.1))
    }

    /// Adds a node of the ONNX domain with one output.
    pub fn node(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        self.draft.emit(op, inputs, attrs)
    }

    /// Adds a constant.
    pub fn constant(&mut self, tensor: Tensor) -> ValueId {
        self.draft.constant(tensor)
    }

    /// Adds a scalar constant of the element type of the value `name`; `None` if that is not a
    /// float type.
    pub fn number_like(&mut self, name: &str, number: f32) -> Result<Option<ValueId>> {
        let tensor = match self.found().dtype(name) {
            Some(DType::F32) => Tensor::scalar(number)?,
            Some(DType::F64) => Tensor::scalar(f64::from(number))?,
            Some(DType::F16) => Tensor::scalar(half::f16::from_f32(number))?,
            Some(DType::BF16) => Tensor::scalar(half::bf16::from_f32(number))?,
            _ => return Ok(None),
        };
        Ok(Some(self.constant(tensor)))
    }

    /// Returns the constant `name`, reshaped to a scalar if it has one element. ONNX Runtime
    /// requires scales and zero points without dimensions.
    ///
    /// Errors: as [`Patch::value`].
    pub fn without_axes(&mut self, name: &str) -> Result<ValueId> {
        let value = self.value(name)?;
        let tensor = self.found().tensor(name).filter(|tensor| tensor.element_count() == 1).cloned();
        match tensor.filter(|tensor| !tensor.shape().is_empty()) {
            Some(tensor) => Ok(self.constant(tensor.reshape(&[])?)),
            None => Ok(value),
        }
    }

    /// Adds a one-dimensional `int64` constant.
    pub fn constant_ints(&mut self, ints: &[i64]) -> Result<ValueId> {
        self.draft.constant_ints(ints)
    }

    /// Builds a template and returns the value of its root; `None` for an omitted input.
    pub(super) fn build(&mut self, template: &Term) -> Result<Option<ValueId>> {
        match template {
            Term::Any => Ok(None),
            Term::Value { name, optional } => match (self.found.value(name), optional) {
                (None, false) => Err(error!(Fail, "the pattern has no value '{name}'")),
                (value, _) => Ok(value),
            },
            Term::Constant(name) => self.without_axes(name).map(Some),
            Term::Number { .. } => Err(error!(Fail, "a template cannot tell the type of a number")),
            Term::Ints(ints) => self.constant_ints(ints).map(Some),
            Term::Node(node) => self.build_node(node),
        }
    }

    fn build_node(&mut self, node: &NodeTerm) -> Result<Option<ValueId>> {
        let spec = node.ops.first().ok_or_else(|| error!(Fail, "a template has no operator"))?;
        let inputs = node.args.iter().map(|arg| self.build(arg)).collect::<Result<Vec<_>>>()?;
        let mut attrs: Vec<(&str, Attribute)> = Vec::new();
        for (name, literal) in &node.attrs {
            attrs.push((name, attribute(spec, name, literal)?));
        }
        for copied in &node.copies {
            // Copy only attributes that the new operator has. Those written in the template win.
            let taken = self.attrs(copied).into_iter().filter(|(name, _)| {
                spec.attrs.iter().any(|attr| attr.name == *name)
                    && !node.attrs.iter().any(|(given, _)| given == name)
            });
            attrs.extend(taken);
        }
        // A node has every output up to the one that the template names.
        let outputs = self.draft.emit_in((spec.domain, spec.name), &inputs, &attrs, node.output + 1)?;
        Ok(outputs.last().copied())
    }
}

/// Converts a literal to the kind of attribute that the operator's spec declares.
pub(super) fn attribute(spec: &OpSpec, name: &str, literal: &Literal) -> Result<Attribute> {
    let known = spec.attrs.iter().find(|attr| attr.name == name);
    let kind = known.map(|attr| attr.kind).ok_or_else(|| crate::ir::unknown_attribute(spec, name))?;
    match (literal, kind) {
        (Literal::Number(number), AttrKind::Int) => Ok(Attribute::Int(*number as i64)),
        (Literal::Number(number), AttrKind::Float) => Ok(Attribute::Float(*number as f32)),
        (Literal::Text(text), AttrKind::String) => Ok(Attribute::String(text.to_string())),
        (Literal::Ints(ints), AttrKind::Ints) => Ok(Attribute::Ints(ints.clone())),
        (Literal::Ints(ints), AttrKind::Floats) => {
            Ok(Attribute::Floats(ints.iter().map(|&value| value as f32).collect()))
        }
        _ => Err(error!(Fail, "attribute '{name}' is {kind:?}, the rule gives {literal:?}")),
    }
}
