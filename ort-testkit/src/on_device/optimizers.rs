//! Consecutive optimizer steps on a device and on the CPU, each of which updates in place what the
//! previous one wrote, and the reductions over all gradients.

use std::sync::Arc;

use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder, ValueId, ValueType};
use ort_core::session::Model;
use ort_core::spec::RUNTIME;
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, ensure, error};

use super::typed::{Case, Given, case, check_all, run, text};
use super::{cpu, numbers, outputs};

pub(super) const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
/// Consecutive steps.
const STEPS: usize = 3;
/// The tolerance of float32 parameters, which are below 2, after these steps: a few roundings of
/// 1e-7, because the device fuses multiply and add.
const NEAR: f64 = 2e-6;
/// The same for float64.
const NEAR_OF_DOUBLES: f64 = 1e-13;
/// One in this many quantized values may differ from the CPU's: a moment may lie within a rounding
/// of the midpoint between two values.
const OTHER_CODES: usize = 200;

/// An optimizer, and the states that it keeps for a parameter.
struct Optimizer {
    op: &'static str,
    attrs: Vec<(&'static str, Attribute)>,
    counts_steps: bool,
    states: fn(DType, &[usize]) -> Vec<Option<(DType, Vec<usize>)>>,
}

fn like(count: usize) -> fn(DType, &[usize]) -> Vec<Option<(DType, Vec<usize>)>> {
    match count {
        0 => |_, _| Vec::new(),
        1 => |dtype, shape| vec![Some((dtype, shape.to_vec()))],
        _ => |dtype, shape| vec![Some((dtype, shape.to_vec())); 2],
    }
}

fn codes(_: DType, shape: &[usize]) -> Vec<Option<(DType, Vec<usize>)>> {
    // One scale for each block of 256 quantized values.
    let scales = vec![shape.iter().product::<usize>().div_ceil(256)];
    let of_moment = [Some((DType::U8, shape.to_vec())), Some((DType::F32, scales))];
    [of_moment.clone(), of_moment].concat()
}

fn factors(dtype: DType, shape: &[usize]) -> Vec<Option<(DType, Vec<usize>)>> {
    match shape {
        [outer @ .., rows, columns] => {
            let with = |sizes: [usize; 2]| Some((dtype, [outer, &sizes].concat()));
            vec![with([*rows, 1]), with([1, *columns])]
        }
        // The second moment of a vector is not factored: it is the third state.
        _ => vec![None, None, Some((dtype, shape.to_vec()))],
    }
}

pub(super) fn float(name: &'static str, value: f32) -> (&'static str, Attribute) {
    (name, Attribute::Float(value))
}

fn all_optimizers() -> Vec<Optimizer> {
    let sgd = |momentum: f32, nesterov: i64, decay: f32| Optimizer {
        op: "SGD",
        attrs: vec![
            float("momentum", momentum),
            ("nesterov", Attribute::Int(nesterov)),
            float("weight_decay", decay),
        ],
        counts_steps: false,
        states: like(usize::from(momentum > 0.0)),
    };
    let adam = |op, attrs: &[(&'static str, Attribute)]| Optimizer {
        op,
        attrs: attrs.to_vec(),
        counts_steps: true,
        states: if op == "AdamW8bit" { codes } else { like(2) },
    };
    let adafactor = |attrs| Optimizer { op: "Adafactor", attrs, counts_steps: true, states: factors };
    vec![
        sgd(0.0, 0, 0.0),
        sgd(0.9, 0, 0.01),
        sgd(0.8, 1, 0.0),
        adam("AdamW", &[float("weight_decay", 0.1)]),
        adam("AdamW", &[("mode", text("huggingface")), float("weight_decay", 0.1)]),
        adam("AdamW", &[("mode", text("adam")), float("beta1", 0.3), float("weight_decay", 0.1)]),
        adam("AdamW", &[("correct_bias", Attribute::Int(0)), float("epsilon", 1e-3)]),
        adam("AdamW8bit", &[float("weight_decay", 0.1)]),
        adam("LAMB", &[]),
        adam("LAMB", &[float("weight_decay", 0.1), float("max_trust_ratio", 0.7)]),
        adafactor(Vec::new()),
        adafactor(vec![float("weight_decay", 0.1), float("epsilon1", 1e-4), float("clip_threshold", 0.5)]),
    ]
}

/// The inputs and attributes of a step besides its tensors.
#[derive(Clone, Copy, Debug)]
struct Told {
    scale: Option<f32>,
    update: Option<bool>,
    /// The first of three rows that the gradient covers; `None` if it covers all.
    first_row: Option<usize>,
}

/// A graph under construction, and the inputs of its run.
struct DraftModel {
    builder: GraphBuilder,
    values: Vec<(String, Value)>,
}

impl DraftModel {
    fn given(&mut self, tensor: Tensor) -> ValueId {
        let shape = tensor.shape().iter().map(|&size| Dim::constant(size as i64)).collect();
        let name = format!("x{}", self.values.len());
        let id = self.builder.typed_input(&name, ValueType::tensor(tensor.dtype(), Some(shape)));
        self.values.push((name, tensor.into()));
        id
    }

    /// Pseudo-random numbers, converted to a type by a node on the device, so that they may be
    /// updated in place.
    fn made(&mut self, dtype: DType, shape: &[usize], positive: bool) -> Result<ValueId> {
        let count = shape.iter().product();
        let mut values = numbers(count, self.values.len());
        let scale = if dtype == DType::U8 { 255.0 } else { 1.0 };
        if positive || dtype == DType::U8 {
            values.iter_mut().for_each(|value| *value = value.abs() * scale);
        }
        let input = self.given(Tensor::from_slice(shape, &values)?);
        self.builder.node("Cast", &[input], &[("to", Attribute::Int(i64::from(dtype.onnx_code())))])
    }
}

impl Optimizer {
    /// Builds consecutive steps; the outputs are the parameter and its states after the last one.
    fn model(
        &self,
        [own, gradient]: [DType; 2],
        shape: &[usize],
        told: Told,
    ) -> Result<(Model, Vec<(String, Value)>)> {
        let mut draft = DraftModel { builder: GraphBuilder::new("steps"), values: Vec::new() };
        let mut parameter = draft.made(own, shape, false)?;
        let mut states = Vec::new();
        for (index, state) in (self.states)(own, shape).into_iter().enumerate() {
            // Second moments are not negative. The 8-bit first moments have non-negative scales.
            let positive = index > 0 || self.op == "Adafactor" || self.op == "AdamW8bit";
            states.push(state.map(|(dtype, shape)| draft.made(dtype, &shape, positive)).transpose()?);
        }
        let mut rows = shape.to_vec();
        let mut attrs = self.attrs.clone();
        if let (Some(first), Some(count)) = (told.first_row, rows.first_mut()) {
            *count = 3;
            attrs.push(("first_row", Attribute::Int(first as i64)));
        }
        let scale =
            told.scale.map(|scale| Tensor::scalar(scale).map(|scale| draft.given(scale))).transpose()?;
        let update =
            told.update.map(|update| Tensor::scalar(update).map(|update| draft.given(update))).transpose()?;
        let rate = draft.given(Tensor::scalar(0.05f32)?);
        for step in 1..=STEPS {
            let gradient = draft.made(gradient, &rows, false)?;
            let mut inputs = vec![Some(parameter), Some(gradient), Some(rate), scale, update];
            if self.counts_steps {
                inputs.push(Some(draft.given(Tensor::scalar(step as i64)?)));
            }
            inputs.extend(&states);
            // Absent inputs at the end are left out, as in the file of a model.
            while inputs.last() == Some(&None) {
                inputs.pop();
            }
            let made =
                draft.builder.add((RUNTIME, self.op), &inputs, &attrs, 1 + states.len(), Vec::new())?;
            // An absent state has no new value.
            let node = draft.builder.graph_mut().nodes.last_mut().ok_or_else(|| error!(Fail, "no node"))?;
            for (output, state) in node.outputs.iter_mut().skip(1).zip(&states) {
                *output = output.filter(|_| state.is_some());
            }
            parameter = made[0];
            states = states.iter().zip(&made[1..]).map(|(state, made)| state.map(|_| *made)).collect();
        }
        let ends: Vec<ValueId> = std::iter::once(parameter).chain(states.into_iter().flatten()).collect();
        Ok((Model::from_graph(draft.builder.finish(&ends)?), draft.values))
    }

    fn check(&self, device: &Arc<dyn Device>, types: [DType; 2], shape: &[usize], told: Told) -> Result<()> {
        let (model, values) = self.model(types, shape, told)?;
        let found = outputs(&model, device.clone(), &values)?;
        let expected = outputs(&model, cpu()?, &values)?;
        let near = if types[0] == DType::F64 { NEAR_OF_DOUBLES } else { NEAR };
        // A quantized value that differs changes the moment by a fraction of its scale, and the
        // parameter by that fraction of the learning rate.
        let near = if self.op == "AdamW8bit" { 1e-2 } else { near };
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let (found, expected) = (found.tensor()?, expected.tensor()?);
            ensure!(found.shape() == expected.shape(), Fail, "output {index} has shape {:?}", found.shape());
            let is_code = found.dtype() == DType::U8;
            let (found, expected) = (found.to_doubles()?, expected.to_doubles()?);
            let apart = |(found, expected): (&f64, &f64)| (found - expected).abs();
            let worst = found
                .iter()
                .zip(&expected)
                .map(apart)
                // A NaN becomes the maximum and stays it, because no number is greater.
                .fold(0.0, |most: f64, apart| if apart > most || apart.is_nan() { apart } else { most });
            if is_code {
                let others =
                    found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
                let few = others <= found.len().div_ceil(OTHER_CODES);
                ensure!(
                    few && worst <= 1.0,
                    Fail,
                    "output {index}: {others} codes of {}, by {worst}",
                    found.len()
                );
            } else {
                ensure!(worst <= near, Fail, "output {index} is {worst:e} off, expected at most {near:e}");
            }
        }
        Ok(())
    }
}

/// Runs three steps of each optimizer.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn optimizers(device: &Arc<dyn Device>) {
    let plain = Told { scale: None, update: None, first_row: None };
    let scaled = Told { scale: Some(0.25), update: Some(true), ..plain };
    // If the step were not skipped, the NaN would reach the parameter.
    let skipped = Told { scale: Some(f32::NAN), update: Some(false), ..plain };
    let mut problems = Vec::new();
    for optimizer in all_optimizers() {
        let mut check = |types: [DType; 2], shape: &[usize], told: Told| {
            if let Err(problem) = optimizer.check(device, types, shape, told) {
                let attrs = &optimizer.attrs;
                problems
                    .push(format!("{} {attrs:?} of {types:?} {shape:?}, {told:?}: {problem}", optimizer.op));
            }
        };
        for own in [DType::F32, DType::F64] {
            for gradient in FLOATS {
                check([own, gradient], &[5, 67], scaled);
            }
            check([own, own], &[3001], plain);
            check([own, own], &[5, 67], skipped);
        }
        let float = [DType::F32; 2];
        for shape in [&[][..], &[1], &[0], &[0, 5], &[2, 3, 5, 3], &[40, 2000], &[2100, 20], &[2, 40, 40]] {
            check(float, shape, plain);
        }
        if optimizer.op == "SGD" || optimizer.op == "AdamW" {
            for (shape, first) in [(&[7, 5][..], 2), (&[8, 16], 4), (&[3], 0), (&[9, 2, 3], 6)] {
                check(float, shape, Told { first_row: Some(first), ..scaled });
                check([DType::F64, DType::BF16], shape, Told { first_row: Some(first), ..skipped });
            }
        }
    }
    assert!(problems.is_empty(), "{}:\n{}", problems.len(), problems.join("\n"));
}

pub(super) fn scalar<T: ort_core::dtype::Element>(value: T) -> Given {
    Given::Is(Tensor::scalar(value).unwrap())
}

/// A node of the runtime's own domain.
pub(super) fn own(op: &'static str, inputs: Vec<Given>, attrs: &[(&'static str, Attribute)]) -> Case {
    Case { domain: RUNTIME, ..case(op, inputs, attrs) }
}

fn standard_cases() -> Vec<Case> {
    let float = |name, value| (name, Attribute::Float(value));
    let mut cases = Vec::new();
    let mut push = |op, states: usize, attrs: &[(&'static str, Attribute)]| {
        for (rate, own) in [(DType::F32, DType::F32), (DType::F64, DType::F32), (DType::F32, DType::F64)] {
            for done in [0i64, 3] {
                let rate = Given::Run(rate, Vec::new());
                let mut inputs = vec![rate, scalar(done)];
                // Two tensors, then their gradients, then their states.
                for _ in 0..states + 2 {
                    inputs.extend([run(own, &[3, 211]), run(own, &[1])]);
                }
                // Square roots are taken of second moments, so these states are not negative.
                let from = inputs.len() - 2;
                if op != "Momentum" {
                    for (input, shape) in inputs[from..].iter_mut().zip([&[3, 211][..], &[1]]) {
                        let count = shape.iter().product();
                        let values: Vec<f32> = numbers(count, 7).into_iter().map(f32::abs).collect();
                        let doubles: Vec<f64> = values.iter().copied().map(f64::from).collect();
                        *input = Given::Is(match own {
                            DType::F64 => Tensor::from_slice(shape, &doubles).unwrap(),
                            _ => Tensor::from_slice(shape, &values).unwrap(),
                        });
                    }
                }
                let domain = "ai.onnx.preview.training";
                let tolerance = if own == DType::F64 { 1e-13 } else { 1e-6 };
                cases.push(Case { domain, outputs: 2 * (states + 1), tolerance, ..case(op, inputs, attrs) });
            }
        }
    };
    push("Adagrad", 1, &[float("norm_coefficient", 0.1), float("decay_factor", 0.2)]);
    let norms = [float("norm_coefficient", 0.1), float("norm_coefficient_post", 0.2)];
    push("Adam", 2, &norms);
    for mode in ["standard", "nesterov"] {
        let attrs = [float("norm_coefficient", 0.1), float("beta", 0.7), float("alpha", 0.9)];
        push("Momentum", 1, &[&attrs[..], &[("mode", text(mode))]].concat());
    }
    cases
}

fn number_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let many: Vec<Given> =
        FLOATS.into_iter().cycle().zip([1, 7, 5000, 0, 33]).map(|(dtype, len)| run(dtype, &[len])).collect();
    let more: Vec<Given> = (0..19).map(|index| run(FLOATS[index % 4], &[index * 37])).collect();
    for gradients in [many, more, vec![run(DType::F32, &[700, 900])], vec![run(DType::F16, &[])]] {
        // Sums of float64 in another order, rounded to float32 at the end.
        cases.push(Case { tolerance: 1e-7, ..own("GlobalNorm", gradients.clone(), &[]) });
        cases.push(own("AllFinite", gradients.clone(), &[]));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut with = gradients.clone();
            let mut values = vec![1.0; 4100];
            values[4098] = bad;
            with.push(Given::Is(Tensor::from_slice(&[4100], &values).unwrap()));
            cases.push(own("AllFinite", with, &[]));
        }
    }
    // The squares overflow float32.
    let large = Tensor::from_slice(&[3], &[1e30f32, 2e30, 3e30]).unwrap();
    cases.push(Case { tolerance: 1e-7, ..own("GlobalNorm", vec![Given::Is(large)], &[]) });
    for dtype in FLOATS {
        for overwrite in [true, false] {
            for sum in [DType::F32, DType::F64] {
                let inputs = vec![run(sum, &[5, 67]), run(dtype, &[5, 67]), scalar(overwrite)];
                cases.push(Case { tolerance: 0.0, ..own("Accumulate", inputs, &[]) });
            }
        }
    }
    let infinite = Given::Is(Tensor::from_slice(&[2], &[f32::INFINITY, f32::NAN]).unwrap());
    cases.push(own("Accumulate", vec![infinite, run(DType::F32, &[2]), scalar(true)], &[]));
    cases
}

/// Checks the standard's `Adagrad`, `Adam` and `Momentum`, and `GlobalNorm`, `AllFinite` and
/// `Accumulate`.
///
/// # Panics
///
/// A result differs, or the device does not run a case.
pub fn numbers_of_gradients(device: &Arc<dyn Device>) {
    check_all(device, &standard_cases());
    check_all(device, &number_cases());
}
