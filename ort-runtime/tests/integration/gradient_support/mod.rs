//! Gradients against central finite differences, in `double`.

#![allow(dead_code, reason = "each test uses some of it")]

pub(crate) mod rows;

use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::{DType, Result, Tensor, Value, pass};

use crate::support::session;

pub(crate) const STEP: f64 = 1e-5;
pub(crate) const TOLERANCE: f64 = 1e-6;

pub(crate) type Build = fn(&mut GraphBuilder, &[ValueId]) -> Result<ValueId>;
/// The shape of an input and its elements.
pub(crate) type Given<'a> = (&'a [usize], &'a [f64]);

/// The node `Gradient` of the tensor called `y` by those called `xs`, at `inputs`.
pub(crate) fn gradient(
    builder: &mut GraphBuilder,
    xs: &[&str],
    y: &str,
    inputs: &[ValueId],
) -> Result<Vec<ValueId>> {
    let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
    let xs: Vec<String> = xs.iter().map(|name| name.to_string()).collect();
    let count = xs.len();
    let attrs = [("xs", Attribute::Strings(xs)), ("y", Attribute::String(y.to_string()))];
    builder.add(("ai.onnx.preview.training", "Gradient"), &inputs, &attrs, count, Vec::new())
}

pub(crate) fn expanded(builder: GraphBuilder, outputs: &[ValueId]) -> Result<ort_runtime::ir::Graph> {
    let mut graph = builder.finish(outputs)?;
    pass::expand_gradients(&mut graph)?;
    Ok(graph)
}

pub(crate) fn doubles(outputs: &[(String, Value)], index: usize) -> Result<Vec<f64>> {
    outputs[index].1.tensor()?.to_vec()
}

/// Holds the gradients of `loss = y * (y + 3)` by all inputs against finite differences of its sum.
/// `dims` are the declared shapes.
pub(crate) fn check(name: &str, build: Build, given: &[Given<'_>], dims: &[&[&str]]) -> Result<()> {
    check_in(name, build, given, dims, DOUBLE)
}

/// The precision of the comparison with finite differences.
#[derive(Clone, Copy)]
pub(crate) struct Precision {
    /// The type that the operator computes in.
    pub(crate) dtype: DType,
    step: f64,
    tolerance: f64,
}

pub(crate) const DOUBLE: Precision = Precision { dtype: DType::F64, step: STEP, tolerance: TOLERANCE };
/// For operators that know no `double`.
pub(crate) const SINGLE: Precision = Precision { dtype: DType::F32, step: 2.5e-3, tolerance: 6e-3 };

/// The same for an operator that computes in another type than `double`.
pub(crate) fn check_in(
    name: &str,
    build: Build,
    given: &[Given<'_>],
    dims: &[&[&str]],
    precision: Precision,
) -> Result<()> {
    let mut builder = GraphBuilder::new(name);
    let names: Vec<String> = (0..given.len()).map(|index| format!("x{index}")).collect();
    let inputs: Vec<ValueId> =
        names.iter().zip(dims).map(|(name, dims)| builder.input(name, DType::F64, dims)).collect();
    let to = |builder: &mut GraphBuilder, value: ValueId, dtype: DType| {
        if precision.dtype == DType::F64 {
            return Ok(value);
        }
        builder.node("Cast", &[value], &[("to", Attribute::Int(i64::from(dtype.onnx_code())))])
    };
    let own: Result<Vec<ValueId>> =
        inputs.iter().map(|input| to(&mut builder, *input, precision.dtype)).collect();
    let y = build(&mut builder, &own?)?;
    let y = to(&mut builder, y, DType::F64)?;
    let three = builder.constant(Tensor::scalar(3.0f64)?);
    let more = builder.node("Add", &[y, three], &[])?;
    let product = builder.node("Mul", &[y, more], &[])?;
    let loss =
        builder.add(("", "ReduceSum"), &[Some(product)], &[("keepdims", Attribute::Int(0))], 1, vec![])?;
    let graph = builder.finish(&loss)?;
    let loss_name = graph.value(loss[0]).name.to_string();
    let mut builder = GraphBuilder::extend(graph);
    let xs: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut outputs = gradient(&mut builder, &xs, &loss_name, &inputs)?;
    outputs.insert(0, loss[0]);
    let session = session(expanded(builder, &outputs)?)?;
    let run = |elements: &[Vec<f64>]| -> Result<Vec<(String, Value)>> {
        let tensors = elements.iter().zip(given).map(|(all, (shape, _))| Tensor::from_slice(shape, all));
        let tensors = tensors.collect::<Result<Vec<Tensor>>>()?;
        let inputs: Vec<(&str, Value)> =
            xs.iter().zip(tensors).map(|(name, tensor)| (*name, tensor.into())).collect();
        session.run(&inputs)
    };
    let elements: Vec<Vec<f64>> = given.iter().map(|(_, elements)| elements.to_vec()).collect();
    let outputs = run(&elements)?;
    for (index, (shape, _)) in given.iter().enumerate() {
        let actual = doubles(&outputs, index + 1)?;
        assert_eq!(outputs[index + 1].1.tensor()?.shape(), *shape, "{name}: shape of gradient {index}");
        for (place, &actual) in actual.iter().enumerate() {
            let at = |offset: f64| -> Result<f64> {
                let mut moved = elements.clone();
                moved[index][place] += offset;
                Ok(doubles(&run(&moved)?, 0)?[0])
            };
            let expected = (at(precision.step)? - at(-precision.step)?) / (2.0 * precision.step);
            let near = (actual - expected).abs() <= precision.tolerance * expected.abs().max(1.0);
            if !near {
                return Err(ort_runtime::Error::new(
                    ort_runtime::ErrorKind::Fail,
                    format!("{name}: gradient {index}[{place}] is {actual}, differences give {expected}"),
                ));
            }
        }
    }
    Ok(())
}
