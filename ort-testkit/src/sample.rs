//! Sample nodes, one or more per operator, which are queried and run with every type that the
//! operator's record allows.
//!
//! `data/samples.json`, `data/microsoft_samples.json` and `data/runtime_samples.json` hold the
//! shapes, the attributes and the elements that matter. The types are open: for each choice of
//! types, a sample becomes a graph of that one node.

use std::sync::Arc;

use ort_core::dim::Dim;
use ort_core::dtype::{CastOptions, DType, TypeSet, convert};
use ort_core::ep::{Device, NodeView};
use ort_core::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_core::placement::unclaimed;
use ort_core::session::Model;
use ort_core::spec::{AttrDefault, AttrKind, AttrSpec, OpSpec, Param, Registry, Types};
use ort_core::tensor::{OptionalValue, SequenceValue, Tensor, Value, element_count};
use ort_core::{Result, Within, error};
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use rand_pcg::Pcg64;
use serde::Deserialize;
use serde_json::Value as Json;

use crate::Target;

/// The samples of the standard's operators, and of the other domains.
const SAMPLES: [&str; 3] = [
    include_str!("../data/samples.json"),
    include_str!("../data/microsoft_samples.json"),
    include_str!("../data/runtime_samples.json"),
];

/// Attributes that determine the type of an output.
const TYPE_ATTRIBUTES: [&str; 5] = ["to", "dtype", "output_dtype", "output_datatype", "value"];

/// The kind of a value, apart from its element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A tensor.
    #[default]
    Tensor,
    /// A sequence of tensors.
    Sequence,
    /// An optional tensor.
    Optional,
    /// An optional sequence of tensors.
    OptionalSequence,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Tensor, Kind::Sequence, Kind::Optional, Kind::OptionalSequence];

    fn of(self, types: &Types) -> TypeSet {
        match self {
            Kind::Tensor => types.tensor,
            Kind::Sequence => types.sequence,
            Kind::Optional => types.optional,
            Kind::OptionalSequence => types.optional_sequence,
        }
    }

    fn wrap(self, element: ValueType) -> ValueType {
        let sequence = |element| ValueType::Sequence(Box::new(element));
        match self {
            Kind::Tensor => element,
            Kind::Sequence => sequence(element),
            Kind::Optional => ValueType::Optional(Box::new(element)),
            Kind::OptionalSequence => ValueType::Optional(Box::new(sequence(element))),
        }
    }
}

/// The type bound to a type variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The kind of value.
    pub kind: Kind,
    /// The element type.
    pub dtype: DType,
}

impl Choice {
    /// Its short name: `float`, `seq(float)`.
    pub fn name(self) -> String {
        let element = self.dtype.name();
        match self.kind {
            Kind::Tensor => element.to_string(),
            Kind::Sequence => format!("seq({element})"),
            Kind::Optional => format!("optional({element})"),
            Kind::OptionalSequence => format!("optional(seq({element}))"),
        }
    }
}

/// The types bound to the type variables.
pub type Binding = Vec<(&'static str, Choice)>;

/// A provider's answer for one choice of types.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It has a kernel.
    Kernel,
    /// It runs the operator's decomposition.
    Lowered,
    /// It refuses, for this reason.
    Refused(String),
    /// The node is invalid with this combination of types.
    Invalid(String),
}

#[derive(Clone, Debug, Deserialize)]
struct Operand {
    #[serde(default)]
    kind: Kind,
    #[serde(rename = "type")]
    ty: String,
    shape: Vec<usize>,
    values: Option<Vec<Json>>,
    /// Whether it is a constant, which kernels that pack weights require.
    #[serde(default)]
    constant: bool,
}

#[derive(Clone, Debug, Deserialize)]
struct Line {
    domain: String,
    op: String,
    inputs: Vec<Option<Operand>>,
    outputs: usize,
    attrs: serde_json::Map<String, Json>,
}

/// One node of an operator with open types.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The operator's record.
    pub spec: &'static OpSpec,
    line: Line,
}

impl Sample {
    /// Returns every sample, in the order of the files. A sample whose operator is not registered
    /// is skipped.
    pub fn all() -> Result<Vec<Sample>> {
        let mut lines: Vec<Line> = Vec::new();
        for text in SAMPLES {
            let more: Vec<Line> = serde_json::from_str(text)
                .map_err(|problem| error!(InvalidArgument, "the samples: {problem}"))?;
            lines.extend(more);
        }
        let registry = Registry::global()?;
        let known = |line: Line| Some(Sample { spec: registry.find(&line.domain, &line.op)?, line });
        Ok(lines.into_iter().filter_map(known).collect())
    }

    /// Returns the type variables that are free to choose, each with its possible types: those of
    /// the inputs, and those that an attribute determines.
    pub fn variables(&self) -> Vec<(&'static str, Vec<Choice>)> {
        let given = |name: &str| {
            self.operands().any(|(param, operand)| operand.is_some() && param.ty == name)
                || self.decided_by(name).is_some()
                // Bodies pass any type through, so all variables of a control-flow operator are
                // free.
                || !self.graph_attributes().is_empty()
        };
        let choices = |types: &Types| {
            let of_kind = |kind: Kind| kind.of(types).iter().map(move |dtype| Choice { kind, dtype });
            Kind::ALL.into_iter().flat_map(of_kind).collect()
        };
        let variables = self.spec.types.iter().filter(|var| given(var.name));
        variables.map(|var| (var.name, choices(&var.types))).collect()
    }

    /// Returns the types that the sample was written with; other variables get their first type.
    pub fn own_types(&self) -> Binding {
        let own = |name: &str| {
            let operand =
                self.operands().find(|(param, _)| param.ty == name).and_then(|(_, operand)| operand)?;
            Some(Choice { kind: operand.kind, dtype: DType::from_name(&operand.ty)? })
        };
        let first = |(name, choices): (&'static str, Vec<Choice>)| {
            let written = own(name).filter(|choice| choices.contains(choice));
            Some((name, written.or_else(|| choices.first().copied())?))
        };
        self.variables().into_iter().filter_map(first).collect()
    }

    fn operands(&self) -> impl Iterator<Item = (&'static Param, Option<&Operand>)> {
        let operands = self.line.inputs.iter().enumerate();
        operands.filter_map(|(index, operand)| Some((self.spec.input_param(index)?, operand.as_ref())))
    }

    fn graph_attributes(&self) -> Vec<&'static str> {
        let is_needed =
            |attr: &&AttrSpec| attr.kind == AttrKind::Graph && attr.default == AttrDefault::Required;
        let attrs = self.spec.attrs.iter().filter(is_needed);
        attrs.map(|attr| attr.name).collect()
    }

    /// Returns the attribute that determines an output's type variable.
    fn decided_by(&self, variable: &str) -> Option<&'static str> {
        let of_input = self.operands().any(|(param, operand)| operand.is_some() && param.ty == variable);
        if of_input || self.spec.outputs.first()?.ty != variable {
            return None;
        }
        let decides = |name: &&str| TYPE_ATTRIBUTES.contains(name);
        self.spec.attrs.iter().map(|attr| attr.name).find(decides)
    }

    /// Builds a graph of the one node with these types, and the values of the graph's inputs.
    pub fn graph(&self, types: &[(&'static str, Choice)]) -> Result<(Graph, Vec<Value>)> {
        let mut builder = GraphBuilder::new("sample");
        let mut values = Vec::new();
        let mut inputs = Vec::new();
        for (index, (param, operand)) in self.operands().enumerate() {
            let Some(operand) = operand else {
                inputs.push(None);
                continue;
            };
            let choice = self.choice(param, operand, types)?;
            let tensor = operand.tensor(choice.dtype)?;
            inputs.push(Some(if operand.is_constant(param, choice.kind) {
                builder.constant(tensor)
            } else {
                let (id, value) = input(&mut builder, index, choice.kind, tensor);
                values.push(value);
                id
            }));
        }
        let subgraphs = self.subgraphs(&mut builder, types, &mut values)?;
        let attrs = self.attributes(types)?;
        let attrs: Vec<(&str, Attribute)> =
            attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        let operator = (self.spec.domain, self.spec.name);
        let outputs = builder.add(operator, &inputs, &attrs, self.line.outputs, subgraphs)?;
        Ok((builder.finish(&outputs)?, values))
    }

    fn choice(&self, param: &Param, operand: &Operand, types: &[(&'static str, Choice)]) -> Result<Choice> {
        if let Some((_, choice)) = types.iter().find(|(name, _)| *name == param.ty) {
            return Ok(*choice);
        }
        let dtype = DType::from_name(&operand.ty);
        let dtype = dtype.ok_or_else(|| error!(InvalidArgument, "'{}' names no type", operand.ty))?;
        Ok(Choice { kind: operand.kind, dtype })
    }

    fn attributes(&self, types: &[(&'static str, Choice)]) -> Result<Vec<(String, Attribute)>> {
        let kind_of =
            |name: &str| self.spec.attrs.iter().find(|attr| attr.name == name).map(|attr| attr.kind);
        let mut attrs = Vec::new();
        for (name, json) in &self.line.attrs {
            let kind =
                kind_of(name).ok_or_else(|| error!(InvalidArgument, "there is no attribute {name}"))?;
            let value =
                attribute(kind, json).ok_or_else(|| error!(InvalidArgument, "{name} is no {kind:?}"))?;
            attrs.push((name.clone(), value));
        }
        for (variable, choice) in types {
            let Some(name) = self.decided_by(variable) else { continue };
            let value = match kind_of(name) {
                Some(AttrKind::Tensor) => {
                    let shape = self.line.attrs.get(name).and_then(|json| Operand::deserialize(json).ok());
                    let shape = shape.map_or_else(|| vec![1], |operand| operand.shape);
                    let operand = Operand {
                        kind: Kind::Tensor,
                        ty: String::new(),
                        shape,
                        values: None,
                        constant: false,
                    };
                    Attribute::Tensor(operand.tensor(choice.dtype)?)
                }
                _ => Attribute::Int(i64::from(choice.dtype.onnx_code())),
            };
            // The chosen type decides, whatever the sample says.
            attrs.retain(|(given, _)| given != name);
            attrs.push((name.to_string(), value));
        }
        Ok(attrs)
    }

    /// Builds bodies that pass their inputs through, and branches that pass a captured value
    /// through.
    fn subgraphs(
        &self,
        builder: &mut GraphBuilder,
        types: &[(&'static str, Choice)],
        values: &mut Vec<Value>,
    ) -> Result<Vec<Subgraph>> {
        let names = self.graph_attributes();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        if names == ["body"] {
            let count = self.line.inputs.len();
            // A loop's body also gets the iteration number, which it does not return.
            let skip = usize::from(self.spec.name == "Loop");
            return Ok(vec![body(count, skip)?]);
        }
        let chosen = types.iter().find(|(name, _)| self.spec.outputs.iter().any(|param| param.ty == *name));
        let (_, choice) = chosen.ok_or_else(|| error!(InvalidArgument, "branches need a type"))?;
        let operand = Operand {
            kind: choice.kind,
            ty: String::new(),
            shape: vec![2, 3],
            values: None,
            constant: false,
        };
        let (outer, value) =
            input(builder, self.line.inputs.len(), choice.kind, operand.tensor(choice.dtype)?);
        values.push(value);
        names.into_iter().map(|attr| branch(attr, outer)).collect()
    }

    /// Queries the devices for these types.
    pub fn ask(&self, types: &[(&'static str, Choice)], devices: &[Arc<dyn Device>]) -> Answer {
        let graph = match self.graph(types) {
            Ok((graph, _)) => graph,
            Err(problem) => return Answer::Invalid(problem.to_string()),
        };
        // Other nodes may compute the operator's inputs from constants, so look for its own node.
        let own = graph.nodes.iter().find(|node| std::ptr::eq(node.spec, self.spec));
        let has_kernel = own.is_some_and(|node| {
            devices.iter().any(|device| device.claim(&NodeView { graph: &graph, node }).is_ok())
        });
        match unclaimed(&graph, devices) {
            Err(problem) => Answer::Refused(problem.to_string()),
            Ok(refused) => match refused.first() {
                Some(first) => Answer::Refused(format!("{}: {}", first.operator, first.reason)),
                None if has_kernel => Answer::Kernel,
                None => Answer::Lowered,
            },
        }
    }

    /// Returns the outputs of a run with these types.
    pub fn run(&self, types: &[(&'static str, Choice)], target: &Target) -> Result<Vec<Value>> {
        let (graph, values) = self.graph(types)?;
        self.run_on(graph, values, target)
    }

    /// As [`Sample::run`], with random values for elements that the sample leaves open.
    pub fn run_random(
        &self,
        types: &[(&'static str, Choice)],
        seed: u64,
        target: &Target,
    ) -> Result<Vec<Value>> {
        let (graph, mut values) = self.graph(types)?;
        self.draw(&mut values, types, seed)?;
        self.run_on(graph, values, target)
    }

    /// Replaces the values of the graph's inputs whose elements the sample leaves open.
    fn draw(&self, values: &mut [Value], types: &[(&'static str, Choice)], seed: u64) -> Result<()> {
        let mut random = Pcg64::seed_from_u64(seed);
        let mut values = values.iter_mut();
        for (param, operand) in self.operands() {
            let Some(operand) = operand else { continue };
            if operand.is_constant(param, self.choice(param, operand, types)?.kind) {
                continue;
            }
            let Some(value) = values.next() else { break };
            if let (Value::Tensor(tensor), None) = (&*value, &operand.values) {
                *value = drawn(tensor, &mut random)?.into();
            }
        }
        Ok(())
    }

    fn run_on(&self, graph: Graph, values: Vec<Value>, target: &Target) -> Result<Vec<Value>> {
        let names: Vec<String> = graph.inputs.iter().map(|&id| graph.value(id).name.to_string()).collect();
        let session = target.session(&Model::from_graph(graph))?;
        let inputs: Vec<(&str, Value)> = names.iter().map(String::as_str).zip(values).collect();
        let outputs = session.run(&inputs).within(|| self.spec.name.to_string())?;
        Ok(outputs.into_iter().map(|(_, value)| value).collect())
    }
}

/// Returns a random tensor of the same type and shape: standard normal floats, 8-bit integers of
/// any value, and other integers from 0 to 100. Other types return the tensor itself.
fn drawn(tensor: &Tensor, random: &mut Pcg64) -> Result<Tensor> {
    let dtype = tensor.dtype();
    let mut number = || -> f64 {
        match dtype {
            DType::U8 => random.random_range(0..=255).into(),
            DType::I8 => random.random_range(-128..=127).into(),
            _ if dtype.is_float() => random.sample(StandardNormal),
            _ => random.random_range(0..=100).into(),
        }
    };
    if !(dtype.is_float() || dtype.is_integer()) || dtype.bits().is_none_or(|bits| bits < 8) {
        return Ok(tensor.clone());
    }
    tensor_of(dtype, tensor.shape(), tensor.element_count(), |_| number())
}

/// Converts numbers to a tensor of a type.
fn tensor_of(
    dtype: DType,
    shape: &[usize],
    count: usize,
    number: impl FnMut(usize) -> f64,
) -> Result<Tensor> {
    let numbers: Vec<u8> = (0..count).map(number).flat_map(f64::to_le_bytes).collect();
    let length = dtype.byte_len(count);
    let mut bytes = vec![0; length.ok_or_else(|| error!(InvalidArgument, "too many elements"))?];
    let converted = convert(DType::F64, &numbers, dtype, &mut bytes, count, CastOptions::default());
    converted.map_err(|problem| error!(InvalidArgument, "{problem}"))?;
    Tensor::from_bytes(dtype, shape, bytes.into())?.to_owned_copy()
}

fn input(builder: &mut GraphBuilder, index: usize, kind: Kind, tensor: Tensor) -> (ValueId, Value) {
    let shape = tensor.shape().iter().map(|&size| Dim::constant(size as i64)).collect();
    let element_type = ValueType::tensor(tensor.dtype(), Some(shape));
    let id = builder.typed_input(&format!("input_{index}"), kind.wrap(element_type.clone()));
    let sequence = |tensor: Tensor| {
        let elements = vec![tensor.clone().into(), tensor.into()];
        Value::Sequence(SequenceValue { element_type: element_type.clone(), elements })
    };
    let optional = |element_type: ValueType, value: Value| {
        Value::Optional(OptionalValue { element_type, element: Some(Box::new(value)) })
    };
    let value = match kind {
        Kind::Tensor => tensor.into(),
        Kind::Sequence => sequence(tensor),
        Kind::Optional => optional(element_type.clone(), tensor.into()),
        Kind::OptionalSequence => optional(Kind::Sequence.wrap(element_type.clone()), sequence(tensor)),
    };
    (id, value)
}

fn body(inputs: usize, skip: usize) -> Result<Subgraph> {
    let mut builder = GraphBuilder::extend(Graph::new("body"));
    let mut outputs = Vec::new();
    for index in 0..inputs {
        let id = builder.typed_input(&format!("inner_{index}"), ValueType::Unknown);
        if index >= skip {
            outputs.push(builder.node("Identity", &[id], &[])?);
        }
    }
    Ok(Subgraph { attr: "body", graph: builder.finish_subgraph(&outputs), captures: Vec::new() })
}

fn branch(attr: &'static str, outer: ValueId) -> Result<Subgraph> {
    let mut graph = Graph::new(attr);
    let inner = graph.add_value("captured", ValueType::Unknown);
    let mut builder = GraphBuilder::extend(graph);
    let output = builder.node("Identity", &[inner], &[])?;
    let graph = builder.finish_subgraph(&[output]);
    Ok(Subgraph { attr, graph, captures: vec![Capture { outer, inner }] })
}

impl Operand {
    /// Whether it is a constant of the graph. The elements of a parameter on the host determine
    /// output shapes, so they must be known before the run.
    fn is_constant(&self, param: &Param, kind: Kind) -> bool {
        (param.host || self.constant) && kind == Kind::Tensor
    }

    /// Builds the tensor in a type. Elements that are not written alternate 1 and 0, which every
    /// type can hold.
    fn tensor(&self, dtype: DType) -> Result<Tensor> {
        let count = element_count(&self.shape)?;
        let written = |index: usize| self.values.as_ref().and_then(|values| values.get(index));
        let number = |index: usize| {
            let written = written(index).and_then(|json| json.as_f64());
            written.unwrap_or(if index.is_multiple_of(2) { 1.0 } else { 0.0 })
        };
        if dtype == DType::String {
            let text = |index: usize| match written(index).and_then(Json::as_str) {
                Some(text) => text.to_string(),
                None => number(index).to_string(),
            };
            return Tensor::from_strings(&self.shape, (0..count).map(text).collect());
        }
        tensor_of(dtype, &self.shape, count, number)
    }
}

fn attribute(kind: AttrKind, json: &Json) -> Option<Attribute> {
    let list = || json.as_array();
    let float = |json: &Json| json.as_f64().map(|number| number as f32);
    let text = |json: &Json| json.as_str().map(str::to_string);
    Some(match kind {
        AttrKind::Int => Attribute::Int(json.as_i64()?),
        AttrKind::Float => Attribute::Float(float(json)?),
        AttrKind::String => Attribute::String(text(json)?),
        AttrKind::Ints => Attribute::Ints(list()?.iter().map(Json::as_i64).collect::<Option<_>>()?),
        AttrKind::Floats => Attribute::Floats(list()?.iter().map(float).collect::<Option<_>>()?),
        AttrKind::Strings => Attribute::Strings(list()?.iter().map(text).collect::<Option<_>>()?),
        AttrKind::Tensor => {
            let operand = Operand::deserialize(json).ok()?;
            Attribute::Tensor(operand.tensor(DType::from_name(&operand.ty)?).ok()?)
        }
        AttrKind::Sparse | AttrKind::Type | AttrKind::Graph | AttrKind::Tensors => return None,
    })
}

/// Returns every combination of types for these variables, if there are not too many. Otherwise it
/// varies one variable at a time with the others at `own`, and also binds all variables to one
/// type.
pub fn bindings(variables: &[(&'static str, Vec<Choice>)], own: &[(&'static str, Choice)]) -> Vec<Binding> {
    // The limit of the full cross product.
    const MANY: usize = 1000;
    // A product beyond `usize` is `None`, so it counts as too many.
    let count = variables.iter().try_fold(1usize, |count, (_, choices)| count.checked_mul(choices.len()));
    if count.is_some_and(|count| count <= MANY) {
        return variables.iter().fold(vec![Vec::new()], |bindings: Vec<Binding>, (name, choices)| {
            let extend = |binding: Binding| {
                choices.iter().map(move |&choice| binding.iter().copied().chain([(*name, choice)]).collect())
            };
            bindings.into_iter().flat_map(extend).collect()
        });
    }
    let mut bindings = Vec::new();
    for (name, choices) in variables {
        for &choice in choices {
            let one = own.iter().map(|&(other, kept)| (other, if other == *name { choice } else { kept }));
            bindings.push(one.collect());
            let may = |variable: &str| {
                variables.iter().any(|(name, choices)| *name == variable && choices.contains(&choice))
            };
            let all = own.iter().map(|&(other, kept)| (other, if may(other) { choice } else { kept }));
            bindings.push(all.collect());
        }
    }
    bindings
}

/// The type support of one operator on some devices.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    /// By type variable: each type that was queried, with the first refusal.
    pub variables: Vec<(&'static str, Vec<(Choice, Option<String>)>)>,
    /// Whether a kernel runs some choice of types.
    pub kernel: bool,
    /// Whether some choice of types is decomposed.
    pub lowered: bool,
    /// The first refusal of an operator without type variables.
    pub refusal: Option<String>,
    /// Why no sample is a valid node, if that is so.
    pub problem: Option<String>,
}

/// Queries every choice of types of an operator's samples.
pub fn coverage(samples: &[&Sample], devices: &[Arc<dyn Device>]) -> Coverage {
    let mut coverage = Coverage::default();
    for sample in samples {
        let own = sample.own_types();
        let mut problems = Vec::new();
        for binding in bindings(&sample.variables(), &own) {
            let refusal = match sample.ask(&binding, devices) {
                Answer::Kernel => {
                    coverage.kernel = true;
                    None
                }
                Answer::Lowered => {
                    coverage.lowered = true;
                    None
                }
                Answer::Refused(why) => Some(why),
                Answer::Invalid(why) => {
                    problems.push(why);
                    continue;
                }
            };
            if binding.is_empty() {
                coverage.refusal = coverage.refusal.or_else(|| refusal.clone());
            }
            coverage.note(&binding, refusal);
        }
        let asked = coverage.kernel || coverage.lowered || !coverage.variables.is_empty();
        if !asked {
            coverage.problem = problems.into_iter().next();
        }
    }
    coverage
}

impl Coverage {
    fn note(&mut self, binding: &[(&'static str, Choice)], refusal: Option<String>) {
        for &(name, choice) in binding {
            let at = self.variables.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
                self.variables.push((name, Vec::new()));
                self.variables.len() - 1
            });
            let answers = &mut self.variables[at].1;
            match answers.iter_mut().find(|(known, _)| *known == choice) {
                Some((_, known)) => *known = known.take().or_else(|| refusal.clone()),
                None => answers.push((choice, refusal.clone())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_drawn_for_the_operands_that_are_left_open() -> Result<()> {
        let operand = |values: &str, constant: bool| {
            format!(r#"{{"type": "float", "shape": [2], "values": {values}, "constant": {constant}}}"#)
        };
        let (open, given) = (operand("null", false), operand("[3, 4]", false));
        // The constant is no input of the graph, so the inputs of the graph are B and C.
        let inputs = [operand("null", true), given, open].join(", ");
        let line =
            format!(r#"{{"domain": "", "op": "Max", "inputs": [{inputs}], "outputs": 1, "attrs": {{}}}}"#);
        let line: Line = serde_json::from_str(&line).unwrap();
        let spec = Registry::global()?.find("", "Max").unwrap();
        let sample = Sample { spec, line };
        let types = sample.own_types();
        let (_, before) = sample.graph(&types)?;
        let mut values = before.clone();
        sample.draw(&mut values, &types, 1)?;
        let floats = |values: &[Value]| -> Result<Vec<Vec<f32>>> {
            values.iter().map(|value| value.tensor()?.to_vec::<f32>()).collect()
        };
        let (before, values) = (floats(&before)?, floats(&values)?);
        assert_eq!((before[0].clone(), values[0].clone()), (vec![3.0, 4.0], vec![3.0, 4.0]));
        assert_eq!(before[1], [1.0, 0.0]);
        assert_ne!(values[1], before[1]);
        Ok(())
    }
}
