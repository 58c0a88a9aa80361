//! One step of an optimizer as a session of one node.

#![allow(dead_code, reason = "each test uses some of it")]

use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::spec::infer_graph;
use ort_runtime::{DType, Model, OutputTarget, Result, RunOptions, Session, Tensor, TensorBuffer, Value};

/// The operators, their inputs in order, and the first of those that are states.
const OPERATORS: &[(&str, &[&str], usize)] = &[
    ("SGD", &["parameter", "gradient", "learning_rate", "scale", "update", "velocity"], 5),
    ("AdamW", ADAM, 6),
    ("LAMB", ADAM, 6),
    (
        "AdamW8bit",
        &[
            "parameter",
            "gradient",
            "learning_rate",
            "scale",
            "update",
            "step",
            "first_codes",
            "first_scales",
            "second_codes",
            "second_scales",
        ],
        6,
    ),
    (
        "Adafactor",
        &[
            "parameter",
            "gradient",
            "learning_rate",
            "scale",
            "update",
            "step",
            "row_moment",
            "column_moment",
            "second_moment",
        ],
        6,
    ),
];
const ADAM: &[&str] =
    &["parameter", "gradient", "learning_rate", "scale", "update", "step", "first_moment", "second_moment"];

pub(crate) type Attrs<'a> = &'a [(&'a str, Attribute)];
/// Tensors by the names of the operator's inputs.
pub(crate) type Given = Vec<(&'static str, Tensor)>;

/// A node of an operator, with all that is given as inputs of the graph.
pub(crate) struct Step {
    session: Session,
    /// Each output's name and the input whose new value it is.
    pub(crate) outputs: Vec<(String, &'static str)>,
}

/// The name of an input as the operator's record has it, and its place.
fn inputs_of(op: &str) -> (&'static [&'static str], usize) {
    let (_, inputs, states) =
        OPERATORS.iter().find(|(name, ..)| *name == op).expect("an operator of the table");
    (inputs, *states)
}

/// The input of this name.
pub(crate) fn name(op: &str, name: &str) -> &'static str {
    inputs_of(op).0.iter().find(|known| **known == name).expect("an input of the operator")
}

/// The graph of one step; sizes are numbers or, where only the run is to know them, names of their
/// own.
pub(crate) fn graph(
    op: &str,
    attrs: Attrs<'_>,
    given: &Given,
    fixed: bool,
) -> Result<(Graph, Vec<&'static str>)> {
    let (names, states) = inputs_of(op);
    let mut builder = GraphBuilder::new(op);
    let mut input = |name: &str| -> Option<ValueId> {
        let (_, tensor) = given.iter().find(|(given, _)| *given == name)?;
        let size = |(axis, size): (usize, &usize)| match fixed {
            true => size.to_string(),
            false => format!("{name}_{axis}"),
        };
        let sizes: Vec<String> = tensor.shape().iter().enumerate().map(size).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        Some(builder.input(name, tensor.dtype(), &sizes))
    };
    let inputs: Vec<Option<ValueId>> = names.iter().map(|name| input(name)).collect();
    let changed = std::iter::once(0).chain(states..names.len());
    let outputs = builder.add(("ort-runtime", op), &inputs, attrs, changed.clone().count(), Vec::new())?;
    // New states of none are left out.
    let (kept, outputs): (Vec<usize>, Vec<ValueId>) =
        changed.zip(outputs).filter(|(index, _)| inputs[*index].is_some()).unzip();
    let mut graph = builder.finish_subgraph(&outputs);
    for node in &mut graph.nodes {
        node.outputs.iter_mut().for_each(|output| *output = output.filter(|id| outputs.contains(id)));
    }
    infer_graph(&mut graph)?;
    Ok((graph, kept.into_iter().map(|index| names[index]).collect()))
}

impl Step {
    pub(crate) fn new(op: &str, attrs: Attrs<'_>, given: &Given) -> Result<Step> {
        Step::on(op, attrs, given, (true, 1))
    }

    pub(crate) fn on(
        op: &str,
        attrs: Attrs<'_>,
        given: &Given,
        (fixed, threads): (bool, usize),
    ) -> Result<Step> {
        let (graph, changed) = graph(op, attrs, given, fixed)?;
        let session = Session::builder(&Model::from_graph(graph)).threads(threads).build()?;
        let outputs = session.outputs().into_iter().map(|output| output.name).zip(changed).collect();
        Ok(Step { session, outputs })
    }

    /// The new values, by the names of the inputs.
    pub(crate) fn run(&self, given: &Given) -> Result<Given> {
        let inputs: Vec<(&str, Value)> =
            given.iter().map(|(name, tensor)| (*name, tensor.clone().into())).collect();
        let outputs = self.session.run(&inputs)?.into_iter().zip(&self.outputs);
        outputs.map(|((_, value), (_, name))| Ok((*name, value.tensor()?.clone()))).collect()
    }

    /// The same where each new value is computed in the memory of the old one.
    pub(crate) fn run_in_place(&self, given: &Given) -> Result<Given> {
        let mut binding = self.session.io_binding();
        for (name, tensor) in given {
            match self.outputs.iter().any(|(_, changed)| changed == name) {
                true => binding.bind_input(name, TensorBuffer::copy_of(tensor)?)?,
                false => binding.bind_input(name, tensor.clone())?,
            }
        }
        for (output, name) in &self.outputs {
            binding.bind_output(output, OutputTarget::Input(name.to_string()))?;
        }
        self.session.run_with_binding(&mut binding, &RunOptions::default())?;
        let new = |(output, name): &(String, &'static str)| {
            Ok((*name, binding.output(output)?.tensor()?.to_tensor()?))
        };
        self.outputs.iter().map(new).collect()
    }

    /// The new parameter alone: the states have no reader.
    pub(crate) fn run_for_parameter(&self, given: &Given) -> Result<Tensor> {
        let mut binding = self.session.io_binding();
        given.iter().try_for_each(|(name, tensor)| binding.bind_input(name, tensor.clone()))?;
        let (output, _) = &self.outputs[0];
        binding.bind_output(output, ort_runtime::DeviceId::HOST)?;
        self.session.run_with_binding(&mut binding, &RunOptions::default())?;
        binding.output(output)?.tensor()?.to_tensor()
    }
}

/// Puts the new values in the place of the old ones.
pub(crate) fn take_over(given: &mut Given, new: Given) {
    for (name, tensor) in new {
        replace(given, name, tensor);
    }
}

pub(crate) fn replace(given: &mut Given, name: &str, tensor: Tensor) {
    let slot = given.iter_mut().find(|(known, _)| *known == name);
    slot.expect("an input that is given").1 = tensor;
}

/// A tensor of floats of a type.
pub(crate) fn tensor(dtype: DType, shape: &[usize], elements: &[f64]) -> Result<Tensor> {
    match dtype {
        DType::F64 => Tensor::from_slice(shape, elements),
        DType::F32 => Tensor::from_vec(shape, elements.iter().map(|&x| x as f32).collect()),
        DType::F16 => Tensor::from_vec(shape, elements.iter().map(|&x| half::f16::from_f64(x)).collect()),
        DType::BF16 => Tensor::from_vec(shape, elements.iter().map(|&x| half::bf16::from_f64(x)).collect()),
        other => panic!("{} is no type of floats", other.name()),
    }
}

pub(crate) fn doubles(tensor: &Tensor) -> Result<Vec<f64>> {
    match tensor.dtype() {
        DType::F64 => tensor.to_vec(),
        DType::F16 => Ok(tensor.to_vec::<half::f16>()?.into_iter().map(f64::from).collect()),
        DType::BF16 => Ok(tensor.to_vec::<half::bf16>()?.into_iter().map(f64::from).collect()),
        _ => Ok(tensor.to_vec::<f32>()?.into_iter().map(f64::from).collect()),
    }
}

/// Numbers of both signs that every type of floats holds, another list for each seed.
pub(crate) fn numbers(count: usize, seed: usize) -> Vec<f64> {
    let number = |index: usize| ((index * 37 + seed * 101 + index / 7) % 61) as f64 / 32.0 - 0.9375;
    (0..count).map(number).collect()
}

/// Inputs of a step with a gradient of type `gradient`: states that are not zero, and second
/// moments that are positive.
pub(crate) fn inputs(op: &str, dtype: DType, gradient: DType, shape: &[usize]) -> Result<Given> {
    let count = shape.iter().product();
    let (names, states) = inputs_of(op);
    let mut given = vec![
        ("parameter", tensor(dtype, shape, &numbers(count, 1))?),
        ("gradient", tensor(gradient, shape, &numbers(count, 2))?),
        ("learning_rate", Tensor::scalar(0.01f32)?),
    ];
    if names.contains(&"step") {
        given.push(("step", Tensor::scalar(3i64)?));
    }
    for &name in &names[states..] {
        let Some(shape) = state_shape(op, name, shape) else { continue };
        if name.ends_with("_codes") {
            let codes = (0..count).map(|index| (index * 37 % 251) as u8).collect();
            given.push((name, Tensor::from_vec(&shape, codes)?));
            continue;
        }
        if name.ends_with("_scales") {
            let scales = (0..shape[0]).map(|index| (index % 5) as f32 * 0.5).collect();
            given.push((name, Tensor::from_vec(&shape, scales)?));
            continue;
        }
        let mut elements = numbers(shape.iter().product(), 3);
        if name != "velocity" && name != "first_moment" {
            elements.iter_mut().for_each(|x| *x = *x * *x + 0.125);
        }
        given.push((name, tensor(dtype, &shape, &elements)?));
    }
    Ok(given)
}

/// The shape of a state for a parameter's shape; `None` if there is no such state.
fn state_shape(op: &str, name: &str, shape: &[usize]) -> Option<Vec<usize>> {
    let mut reduced = shape.to_vec();
    match (op, name, shape) {
        (_, "first_scales" | "second_scales", _) => {
            reduced = vec![shape.iter().product::<usize>().div_ceil(256)];
        }
        ("Adafactor", "second_moment", [_, .., _]) => return None,
        ("Adafactor", "row_moment", [.., _, _]) => *reduced.last_mut()? = 1,
        ("Adafactor", "column_moment", [outer @ .., _, _]) => reduced[outer.len()] = 1,
        ("Adafactor", "row_moment" | "column_moment", _) => return None,
        _ => {}
    }
    Some(reduced)
}

/// Whether two lists of tensors are the same in every bit.
pub(crate) fn same_bits(one: &Given, other: &Given) {
    assert_eq!(one.len(), other.len());
    for ((name, one), (other_name, other)) in one.iter().zip(other) {
        assert_eq!(name, other_name);
        assert_eq!((one.dtype(), one.shape()), (other.dtype(), other.shape()), "{name}");
        assert!(one.bytes() == other.bytes(), "{name} has other bits");
    }
}
