//! Optimizer steps.
//!
//! The standard's `Adagrad`, `Adam` and `Momentum` are here. They compute each element in doubles
//! and round once. The runtime's own optimizers, which are fast, are in the other files.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

mod accumulate;
mod adafactor;
mod adam;
mod adam_8bit;
mod attention;
mod counter_dropout;
mod lamb;
mod norm;
mod sgd;
mod step;

use ort_core::dtype::{DType, Element};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, unknown_name};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spending;

const DOMAIN: &str = "ai.onnx.preview.training";

cpu_kernels![
    KernelDef { domain: DOMAIN, op: "Adagrad", make: make_adagrad, ..KernelDef::BASE },
    KernelDef { domain: DOMAIN, op: "Adam", make: make_adam, ..KernelDef::BASE },
    KernelDef { domain: DOMAIN, op: "Momentum", make: make_momentum, ..KernelDef::BASE },
];

/// The learning rate and the number of iterations before this one.
#[derive(Clone, Copy)]
struct Step {
    rate: f64,
    count: i64,
}

/// Computes the new value of a tensor and its `N` new states from the tensor, its gradient and its
/// states, element by element.
trait UpdateRule<const N: usize>: Send + Sync {
    fn apply(&self, step: Step, x: f64, gradient: f64, states: [f64; N]) -> (f64, [f64; N]);
}

struct Adagrad {
    norm: f64,
    decay: f64,
    epsilon: f64,
}

impl UpdateRule<1> for Adagrad {
    fn apply(&self, step: Step, x: f64, gradient: f64, [h]: [f64; 1]) -> (f64, [f64; 1]) {
        let rate = step.rate / (1.0 + step.count as f64 * self.decay);
        // The L2 penalty `0.5 * norm * |x|^2` enters through its gradient, in all three rules.
        let gradient = self.norm * x + gradient;
        let h = h + gradient * gradient;
        // The standard adds epsilon to the root, not to the radicand.
        (x - rate * gradient / (h.sqrt() + self.epsilon), [h])
    }
}

struct Adam {
    alpha: f64,
    beta: f64,
    epsilon: f64,
    norm: f64,
    norm_post: f64,
}

impl UpdateRule<2> for Adam {
    fn apply(&self, step: Step, x: f64, gradient: f64, [v, h]: [f64; 2]) -> (f64, [f64; 2]) {
        let gradient = self.norm * x + gradient;
        let v = self.alpha * v + (1.0 - self.alpha) * gradient;
        let h = self.beta * h + (1.0 - self.beta) * gradient * gradient;
        // In the first iteration, the bias correction would divide by 0.
        let rate = if step.count > 0 {
            let count = step.count as f64;
            step.rate * (1.0 - self.beta.powf(count)).sqrt() / (1.0 - self.alpha.powf(count))
        } else {
            step.rate
        };
        let x = x - rate * v / (h.sqrt() + self.epsilon);
        // `norm_coefficient_post` shrinks the new tensor, which decouples the decay from the
        // moments.
        ((1.0 - self.norm_post) * x, [v, h])
    }
}

struct Momentum {
    alpha: f64,
    beta: f64,
    norm: f64,
    nesterov: bool,
}

impl UpdateRule<1> for Momentum {
    fn apply(&self, step: Step, x: f64, gradient: f64, [v]: [f64; 1]) -> (f64, [f64; 1]) {
        let gradient = self.norm * x + gradient;
        // The first iteration takes the whole gradient.
        let beta = if step.count > 0 { self.beta } else { 1.0 };
        let v = self.alpha * v + beta * gradient;
        // Nesterov's form looks one step ahead along the new momentum.
        let change = if self.nesterov { gradient + self.alpha * v } else { v };
        (x - step.rate * change, [v])
    }
}

fn make_adagrad(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attr = |name: &str| cx.attrs().float(name).map(f64::from);
    let rule =
        Adagrad { norm: attr("norm_coefficient")?, decay: attr("decay_factor")?, epsilon: attr("epsilon")? };
    Ok(Box::new(move |cx: &mut RunCx<'_>| run(cx, &rule)))
}

fn make_adam(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attr = |name: &str| cx.attrs().float(name).map(f64::from);
    let rule = Adam {
        alpha: attr("alpha")?,
        beta: attr("beta")?,
        epsilon: attr("epsilon")?,
        norm: attr("norm_coefficient")?,
        norm_post: attr("norm_coefficient_post")?,
    };
    Ok(Box::new(move |cx: &mut RunCx<'_>| run(cx, &rule)))
}

fn make_momentum(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attr = |name: &str| cx.attrs().float(name).map(f64::from);
    let nesterov = match cx.attrs().string("mode")? {
        "standard" => false,
        "nesterov" => true,
        other => return Err(unknown_name("mode", other, &["standard", "nesterov"])),
    };
    let rule =
        Momentum { alpha: attr("alpha")?, beta: attr("beta")?, norm: attr("norm_coefficient")?, nesterov };
    Ok(Box::new(move |cx: &mut RunCx<'_>| run(cx, &rule)))
}

fn scalar(view: TensorView<'_>) -> Result<f64> {
    match view.dtype() {
        DType::F32 => view.to_scalar::<f32>().map(f64::from),
        _ => view.to_scalar::<f64>(),
    }
}

fn run<const N: usize>(cx: &mut RunCx<'_>, rule: &dyn UpdateRule<N>) -> Result<()> {
    let step = Step { rate: scalar(cx.input(0)?)?, count: cx.input(1)?.to_scalar::<i64>()? };
    // Behind rate and count come all tensors, then all gradients, then each state of all tensors.
    let given = cx.input_count().saturating_sub(2);
    ensure!(
        given.is_multiple_of(N + 2),
        InvalidArgument,
        "the number of tensors is {given}, expected a multiple of {}",
        N + 2
    );
    let count = given / (N + 2);
    for index in 0..count {
        match cx.input(2 + index)?.dtype() {
            DType::F32 => update::<f32, N>(cx, rule, step, (index, count), |value| value as f32)?,
            _ => update::<f64, N>(cx, rule, step, (index, count), |value| value)?,
        }
    }
    Ok(())
}

fn update<T: Element + Into<f64>, const N: usize>(
    cx: &mut RunCx<'_>,
    rule: &dyn UpdateRule<N>,
    step: Step,
    (index, count): (usize, usize),
    round: fn(f64) -> T,
) -> Result<()> {
    let x = cx.input(2 + index)?.as_slice::<T>()?;
    let group = |cx: &RunCx<'_>, group: usize| -> Result<Vec<f64>> {
        let tensor = cx.input(2 + index + group * count)?;
        ensure!(
            tensor.element_count() == x.len(),
            InvalidArgument,
            "a gradient or state has shape {:?}, which differs from its tensor's",
            tensor.shape()
        );
        Ok(spending(2, tensor.to_vec::<T>()?).map(Into::into).collect())
    };
    let gradient = group(cx, 1)?;
    let states: Vec<Vec<f64>> = (0..N).map(|state| group(cx, 2 + state)).collect::<Result<_>>()?;
    let mut outputs: Vec<Option<&mut [T]>> = Vec::with_capacity(N + 1);
    // Outputs have the same groups without the gradients: new tensors first, then each new state.
    for output in 0..N + 1 {
        let place = index + output * count;
        outputs.push(if cx.wants(place) { Some(cx.output(place)?.as_mut_slice()?) } else { None });
    }
    for (place, &x) in spending(8, x).enumerate() {
        // `group` checked that the gradient and all states are as long as `x`.
        let given = std::array::from_fn(|state| states[state][place]);
        let (x, states) = rule.apply(step, x.into(), gradient[place], given);
        for (output, value) in outputs.iter_mut().zip(std::iter::once(x).chain(states)) {
            if let Some(output) = output {
                output[place] = round(value);
            }
        }
    }
    Ok(())
}
