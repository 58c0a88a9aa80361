//! Nodes of any element types on a device and on the CPU: a `Cast` on the device converts the
//! numbers to the type.

use std::sync::Arc;

use ort_core::dim::Dim;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder, ValueType};
use ort_core::session::Model;
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, ensure};

use super::{cpu, numbers, outputs};

/// An input of a node.
#[derive(Clone)]
pub(super) enum Given {
    /// Pseudo-random numbers: floats in (-1, 1), integers of up to two digits.
    Run(DType, Vec<usize>),
    /// The caller's tensor.
    Is(Tensor),
    /// A constant of the graph.
    Constant(Tensor),
    None,
}

/// One node, and the number of its outputs.
pub(super) struct Case {
    pub(super) domain: &'static str,
    pub(super) op: &'static str,
    pub(super) inputs: Vec<Given>,
    pub(super) attrs: Vec<(&'static str, Attribute)>,
    pub(super) outputs: usize,
    /// The tolerance relative to the largest value.
    pub(super) tolerance: f64,
}

/// A node of the standard's domain with one output. The tolerance is 1e-4 for float32 and zero for
/// integers.
pub(super) fn case(op: &'static str, inputs: Vec<Given>, attrs: &[(&'static str, Attribute)]) -> Case {
    let dtype = inputs.iter().find_map(|given| match given {
        Given::Run(dtype, _) => Some(*dtype),
        _ => None,
    });
    let tolerance = match dtype {
        Some(DType::F16) => 2e-3,
        Some(DType::BF16) => 1.6e-2,
        Some(dtype) if TypeSet::INTEGERS.contains(dtype) => 0.0,
        _ => 1e-4,
    };
    Case { domain: "", op, inputs, attrs: attrs.to_vec(), outputs: 1, tolerance }
}

pub(super) fn run(dtype: DType, shape: &[usize]) -> Given {
    Given::Run(dtype, shape.to_vec())
}

/// A constant of integers.
pub(super) fn ints(values: &[i64]) -> Given {
    Given::Constant(Tensor::from_slice(&[values.len()], values).unwrap())
}

pub(super) fn floats(values: &[f32]) -> Given {
    Given::Constant(Tensor::from_slice(&[values.len()], values).unwrap())
}

pub(super) fn text(value: &str) -> Attribute {
    Attribute::String(value.to_owned())
}

pub(super) fn list(values: &[i64]) -> Attribute {
    Attribute::Ints(values.to_vec())
}

impl Case {
    /// Builds the node, and the inputs of its run.
    fn model(&self) -> Result<(Model, Vec<(String, Value)>)> {
        let mut builder = GraphBuilder::new("case");
        let (mut ids, mut values) = (Vec::new(), Vec::<(String, Value)>::new());
        for (index, given) in self.inputs.iter().enumerate() {
            let (tensor, cast) = match given {
                Given::None => {
                    ids.push(None);
                    continue;
                }
                Given::Constant(tensor) => {
                    ids.push(Some(builder.constant(tensor.clone())));
                    continue;
                }
                Given::Is(tensor) => (tensor.clone(), None),
                Given::Run(dtype, shape) => {
                    let mut values = numbers(shape.iter().product(), index);
                    if ![DType::F32, DType::F16, DType::BF16, DType::F64].contains(dtype) {
                        // The cast of a negative float to an unsigned integer is undefined (ONNX,
                        // `Cast`).
                        let least = if dtype.name().starts_with('u') { 0.0 } else { -99.0 };
                        values.iter_mut().for_each(|value| *value = (*value * 99.0).max(least));
                    }
                    (Tensor::from_slice(shape, &values)?, Some(*dtype))
                }
            };
            let shape = tensor.shape().iter().map(|&size| Dim::constant(size as i64)).collect();
            let name = format!("x{index}");
            let input = builder.typed_input(&name, ValueType::tensor(tensor.dtype(), Some(shape)));
            ids.push(Some(match cast {
                Some(dtype) => {
                    let to = Attribute::Int(i64::from(dtype.onnx_code()));
                    builder.node("Cast", &[input], &[("to", to)])?
                }
                None => input,
            }));
            values.push((name, tensor.into()));
        }
        let found = builder.add((self.domain, self.op), &ids, &self.attrs, self.outputs, Vec::new())?;
        Ok((Model::from_graph(builder.finish(&found)?), values))
    }

    fn check(&self, device: &Arc<dyn Device>) -> Result<()> {
        let (model, values) = self.model()?;
        let (found, expected) =
            (outputs(&model, device.clone(), &values)?, outputs(&model, cpu()?, &values)?);
        for (found, expected) in found.iter().zip(&expected) {
            let (found, expected) = (found.tensor()?, expected.tensor()?);
            ensure!(found.shape() == expected.shape(), Fail, "shape {:?}", found.shape());
            ensure!(found.dtype() == expected.dtype(), Fail, "type {}", found.dtype());
            let (found, expected) = (found.to_doubles()?, expected.to_doubles()?);
            // An infinity would make every difference acceptable.
            let finite = expected.iter().filter(|value| value.is_finite());
            let most = finite.fold(0.0, |most: f64, value| most.max(value.abs()));
            for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let same = found == expected || (found.is_nan() && expected.is_nan());
                let near = same || (found - expected).abs() <= self.tolerance * most;
                ensure!(near, Fail, "element {place} is {found}, expected {expected}; the largest is {most}");
            }
        }
        Ok(())
    }
}

/// Runs cases on both devices.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub(super) fn check_all(device: &Arc<dyn Device>, cases: &[Case]) {
    let mut problems = Vec::new();
    for case in cases {
        if let Err(problem) = case.check(device) {
            let inputs: Vec<String> = case
                .inputs
                .iter()
                .map(|given| match given {
                    Given::Run(dtype, shape) => format!("{dtype} {shape:?}"),
                    Given::Is(tensor) | Given::Constant(tensor) => format!("{tensor:?}"),
                    Given::None => "none".to_owned(),
                })
                .collect();
            problems.push(format!("{} of {}, {:?}: {problem}", case.op, inputs.join(", "), case.attrs));
        }
    }
    assert!(problems.is_empty(), "{} of {}:\n{}", problems.len(), cases.len(), problems.join("\n"));
}
