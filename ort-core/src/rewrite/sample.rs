//! Sample graphs: a rule's pattern built over sample inputs, for the test of every rule.
//!
//! A sample is a list of `name=value` entries separated by spaces. The value of a pattern's name is
//! `type[sizes]` (an input, or a constant if the pattern asks for one), `type:number` (a scalar
//! constant; `type[1,1]:number` gives it dimensions) or `[integers]` (a constant).
//! `const:type[sizes]` makes any value a constant. `node.attribute=value` sets an attribute of a
//! named node, `node.op=Name` selects one of its operators, and `node.outputs=2` gives it more
//! outputs. `node._2=value` is input 2 of a node whose inputs the pattern leaves open.
//! `numbers=type` or `numbers=type[1,1]` sets the type of the pattern's numbers, by default `f32`.
//! Each `_` has the name `_0`, `_1` and so on, and is omitted if there is no entry for it.

use rustc_hash::FxHashMap;

use super::patch::attribute;
use super::rule::Rule;
use super::term::{Literal, NodeTerm, Term};
use crate::dtype::DType;
use crate::ir::{Attribute, Graph, GraphBuilder, ValueId, ValueType};
use crate::tensor::{Tensor, element_count};
use crate::{Result, Within, ensure, error};

/// How much a sample's graph declares about the shapes of its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Declared {
    /// Fixed sizes.
    Sizes,
    /// One symbol per distinct size.
    EqualSymbols,
    /// One symbol per axis.
    Symbols,
    /// Only the element types.
    Types,
}

/// Builds the graph of a rule's pattern over the values of a sample, which become its inputs.
pub fn sample(rule: &'static Rule, text: &'static str, declared: Declared) -> Result<Graph> {
    build(rule, text, declared).within(|| format!("rule '{}', sample '{text}'", rule.name))
}

fn build(rule: &'static Rule, text: &'static str, declared: Declared) -> Result<Graph> {
    let pattern = Term::parse(rule.pattern)?;
    let split =
        |entry: &'static str| entry.split_once('=').ok_or_else(|| error!(Fail, "'{entry}' has no '='"));
    let entries: FxHashMap<&str, &str> = text.split_whitespace().map(split).collect::<Result<_>>()?;
    let mut sampler = Sampler {
        builder: GraphBuilder::new(rule.name),
        declared,
        entries,
        values: FxHashMap::default(),
        nodes: FxHashMap::default(),
        anything: 0,
        seed: 1,
    };
    let root = pattern.root().ok_or_else(|| error!(Fail, "the pattern has no root"))?;
    let outputs = sampler.node(root)?;
    // Append a reader to each output. A graph output must keep its name, which a rule that aliases
    // an input cannot provide.
    let axes = sampler.builder.constant(Tensor::from_slice(&[1], &[0i64])?);
    let follow = |output: &ValueId| sampler.builder.node("Unsqueeze", &[*output, axes], &[]);
    let outputs = outputs.iter().map(follow).collect::<Result<Vec<_>>>()?;
    sampler.builder.finish(&outputs)
}

struct Sampler {
    builder: GraphBuilder,
    declared: Declared,
    entries: FxHashMap<&'static str, &'static str>,
    values: FxHashMap<&'static str, Option<ValueId>>,
    nodes: FxHashMap<&'static str, Vec<ValueId>>,
    anything: usize,
    seed: u32,
}

impl Sampler {
    fn term(&mut self, term: &Term) -> Result<Option<ValueId>> {
        match term {
            Term::Any => {
                let number = self.anything;
                self.anything += 1;
                let name = self.entries.keys().copied().find(|key| *key == format!("_{number}"));
                name.map_or(Ok(None), |name| self.value(name, false))
            }
            Term::Value { name, .. } => self.value(name, false),
            Term::Constant(name) => self.value(name, true),
            Term::Number { value, .. } => {
                let ty = self.entries.get("numbers").copied().unwrap_or("f32");
                self.constant(number(ty, *value)?)
            }
            Term::Ints(ints) => self.constant(Tensor::from_slice(&[ints.len()], ints)?),
            Term::Node(node) => {
                let output = node.output;
                let outputs = self.node(node)?;
                outputs
                    .get(output)
                    .copied()
                    .map(Some)
                    .ok_or_else(|| error!(Fail, "output {output} is missing"))
            }
        }
    }

    fn constant(&mut self, tensor: Tensor) -> Result<Option<ValueId>> {
        Ok(Some(self.builder.constant(tensor)))
    }

    /// Returns the value `name`, created at its first use.
    fn value(&mut self, name: &'static str, constant: bool) -> Result<Option<ValueId>> {
        if let Some(value) = self.values.get(name) {
            return Ok(*value);
        }
        let value = match self.entries.get(name).copied() {
            None => None,
            Some(text) => Some(self.make(name, text, constant).within(|| format!("'{name}={text}'"))?),
        };
        self.values.insert(name, value);
        Ok(value)
    }

    fn make(&mut self, name: &str, text: &str, constant: bool) -> Result<ValueId> {
        if let Some(ints) = ints(text) {
            return Ok(self.builder.constant(Tensor::from_slice(&[ints.len()], &ints)?));
        }
        if let Some((ty, value)) = text.split_once(':').filter(|(ty, _)| *ty != "const") {
            let value = value.parse().map_err(|_| error!(Fail, "'{value}' is no number"))?;
            return Ok(self.builder.constant(number(ty, value)?));
        }
        let (constant, text) = text.strip_prefix("const:").map_or((constant, text), |text| (true, text));
        let (dtype, sizes) = text.split_once('[').ok_or_else(|| error!(Fail, "sizes are missing"))?;
        let sizes: Vec<&str> =
            sizes.trim_end_matches(']').split(',').filter(|size| !size.is_empty()).collect();
        let dtype = dtype_of(dtype)?;
        if !constant {
            return Ok(self.input(name, dtype, &sizes));
        }
        let sizes = numbers(&sizes)?;
        // Another seed for each constant: a rule that mixes two of them up then changes the result.
        self.seed += 1;
        Ok(self.builder.constant(weights(dtype, &sizes, self.seed)?))
    }

    fn input(&mut self, name: &str, dtype: DType, sizes: &[&str]) -> ValueId {
        let symbols: Vec<String> = match self.declared {
            Declared::Sizes => return self.builder.input(name, dtype, sizes),
            Declared::Types => return self.builder.typed_input(name, ValueType::tensor(dtype, None)),
            Declared::EqualSymbols => sizes.iter().map(|size| format!("size_{size}")).collect(),
            Declared::Symbols => (0..sizes.len()).map(|axis| format!("{name}_{axis}")).collect(),
        };
        let symbols: Vec<&str> = symbols.iter().map(String::as_str).collect();
        self.builder.input(name, dtype, &symbols)
    }

    /// Returns the inputs of the node `name` from `first` on, which its pattern leaves open.
    fn rest(&mut self, name: &str, first: usize) -> Result<Vec<Option<ValueId>>> {
        /// No operator that patterns leave open has more inputs.
        const MOST: usize = 8;
        let entry = |index: usize| {
            let key = format!("{name}._{index}");
            self.entries.iter().find(|(entry, _)| **entry == key).map(|(entry, text)| (*entry, *text))
        };
        let entries: Vec<_> = (first..MOST).map(entry).collect();
        let make = |entry: Option<(&'static str, &'static str)>| {
            entry.map(|(name, text)| self.make(name, text, false)).transpose()
        };
        entries.into_iter().map(make).collect()
    }

    /// Returns the outputs of a node. A named node is created once.
    fn node(&mut self, term: &NodeTerm) -> Result<Vec<ValueId>> {
        if let Some(outputs) = term.name.and_then(|name| self.nodes.get(name)) {
            return Ok(outputs.clone());
        }
        let mut inputs = term.args.iter().map(|arg| self.term(arg)).collect::<Result<Vec<_>>>()?;
        if let Some(name) = term.name.filter(|_| term.rest) {
            inputs.extend(self.rest(name, inputs.len())?);
        }
        while inputs.last() == Some(&None) {
            inputs.pop();
        }
        let given = |key: &str| term.name.and_then(|name| self.entries.get(format!("{name}.{key}").as_str()));
        let wanted = given("op").copied();
        let spec = term.ops.iter().find(|op| wanted.is_none_or(|wanted| op.name == wanted));
        let spec = *spec.ok_or_else(|| error!(Fail, "there is no operator {wanted:?}"))?;
        let mut attrs: Vec<(&str, Attribute)> = Vec::new();
        for (name, literal) in &term.attrs {
            // An empty text in a pattern matches a missing attribute.
            if *literal != Literal::Text("") {
                attrs.push((name, attribute(spec, name, literal)?));
            }
        }
        for attr in spec.attrs {
            let Some(text) = given(attr.name) else { continue };
            attrs.push((attr.name, attribute(spec, attr.name, &literal(text))?));
        }
        let outputs = given("outputs").and_then(|text| text.parse().ok()).unwrap_or(term.output + 1);
        let outputs = self.builder.add((spec.domain, spec.name), &inputs, &attrs, outputs, Vec::new())?;
        if let Some(name) = term.name {
            self.nodes.insert(name, outputs.clone());
            self.values.insert(name, outputs.get(term.output).copied());
        }
        Ok(outputs)
    }
}

fn ints(text: &str) -> Option<Vec<i64>> {
    let inner = text.strip_prefix('[')?.strip_suffix(']')?;
    inner.split(',').filter(|number| !number.is_empty()).map(|number| number.parse().ok()).collect()
}

fn literal(text: &'static str) -> Literal {
    match (ints(text), text.parse()) {
        (Some(ints), _) => Literal::Ints(ints),
        (None, Ok(number)) => Literal::Number(number),
        (None, Err(_)) => Literal::Text(text),
    }
}

fn dtype_of(name: &str) -> Result<DType> {
    const SHORT: [(&str, DType); 9] = [
        ("f32", DType::F32),
        ("f16", DType::F16),
        ("f64", DType::F64),
        ("i64", DType::I64),
        ("i32", DType::I32),
        ("u8", DType::U8),
        ("i8", DType::I8),
        ("u4", DType::U4),
        ("i4", DType::I4),
    ];
    let short = SHORT.iter().find(|(short, _)| *short == name).map(|(_, dtype)| *dtype);
    short.or_else(|| DType::from_name(name)).ok_or_else(|| error!(Fail, "there is no element type '{name}'"))
}

fn numbers(sizes: &[&str]) -> Result<Vec<usize>> {
    sizes.iter().map(|size| size.parse().map_err(|_| error!(Fail, "'{size}' is no size"))).collect()
}

/// Builds a constant of one element; `ty` may carry sizes of 1, as in `f32[1,1]`.
fn number(ty: &str, value: f64) -> Result<Tensor> {
    let (dtype, sizes) = ty.split_once('[').unwrap_or((ty, ""));
    let sizes: Vec<&str> = sizes.trim_end_matches(']').split(',').filter(|size| !size.is_empty()).collect();
    scalar(dtype_of(dtype)?, value)?.reshape(&numbers(&sizes)?)
}

fn scalar(dtype: DType, value: f64) -> Result<Tensor> {
    match dtype {
        DType::F32 => Tensor::scalar(value as f32),
        DType::F64 => Tensor::scalar(value),
        DType::F16 => Tensor::scalar(half::f16::from_f64(value)),
        DType::I64 => Tensor::scalar(value as i64),
        DType::I32 => Tensor::scalar(value as i32),
        DType::U8 => Tensor::scalar(value as u8),
        DType::I8 => Tensor::scalar(value as i8),
        DType::Bool => Tensor::from_bools(&[], &[value != 0.0]),
        _ => Err(error!(Fail, "no number of type {}", dtype.name())),
    }
}

/// Builds a constant of pseudorandom numbers between 0.25 and 1.25, or a hundred times that for
/// integers. They are positive, so that the constant can be a variance. Booleans are all false.
fn weights(dtype: DType, sizes: &[usize], seed: u32) -> Result<Tensor> {
    let count = element_count(sizes)?;
    // A linear congruential generator: a sample always builds the same graph.
    let mut state = seed.wrapping_mul(2_654_435_761);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        0.25 + f64::from(state >> 8) / f64::from(1u32 << 24)
    };
    let values: Vec<f64> = (0..count).map(|_| next()).collect();
    match dtype {
        DType::F32 => Tensor::from_vec(sizes, values.iter().map(|&value| value as f32).collect()),
        DType::F64 => Tensor::from_vec(sizes, values),
        DType::F16 => {
            Tensor::from_vec(sizes, values.iter().map(|&value| half::f16::from_f64(value)).collect())
        }
        DType::I8 => Tensor::from_vec(sizes, values.iter().map(|&value| (value * 100.0) as i8).collect()),
        DType::U8 => Tensor::from_vec(sizes, values.iter().map(|&value| (value * 100.0) as u8).collect()),
        DType::I32 => Tensor::from_vec(sizes, values.iter().map(|&value| (value * 100.0) as i32).collect()),
        DType::I4 | DType::U4 => {
            // Two elements to a byte, the first in its low half.
            let half = |value: &f64| (*value * 100.0) as u8 & 15;
            let pair = |pair: &[f64]| pair.iter().rev().fold(0, |byte, value| byte << 4 | half(value));
            let bytes: Vec<u8> = values.chunks(2).map(pair).collect();
            Tensor::from_bytes(dtype, sizes, bytes.into())
        }
        DType::Bool => Tensor::from_bools(sizes, &vec![false; count]),
        _ => {
            ensure!(count == 0, Fail, "no weights of type {}", dtype.name());
            Tensor::from_bytes(dtype, sizes, bytes::Bytes::new())
        }
    }
}
