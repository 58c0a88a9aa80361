//! `AdamW`, as in PyTorch, as in Hugging Face, or with the decay in the gradient.

use ort_core::Result;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::training::AdamMode;
use ort_core::spec::RUNTIME;

use super::step::{Call, Parameter, Stream, first_row, is_double, step_number};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_vector::training::{Adam, adam};

pub(super) const STEP: usize = 5;
pub(super) const FIRST: usize = 6;
pub(super) const SECOND: usize = 7;

cpu_kernels![KernelDef {
    domain: RUNTIME,
    op: "AdamW",
    in_place: &[(0, 0), (FIRST, 1), (SECOND, 2)],
    make,
    ..KernelDef::BASE
}];

/// The attributes that all variants of Adam share.
#[derive(Clone, Copy)]
pub(super) struct AdamRule {
    pub(super) beta: [f64; 2],
    pub(super) epsilon: f64,
    pub(super) decay: f64,
    pub(super) corrects: bool,
}

impl AdamRule {
    pub(super) fn of(attrs: &Attributes) -> Result<AdamRule> {
        Ok(AdamRule {
            beta: [attrs.decimal("beta1")?, attrs.decimal("beta2")?],
            epsilon: attrs.decimal("epsilon")?,
            decay: attrs.decimal("weight_decay")?,
            corrects: attrs.flag("correct_bias")?,
        })
    }

    /// Returns the divisors of the moments at this step, for bias correction.
    pub(super) fn bias(&self, step: f64) -> [f64; 2] {
        self.beta.map(|beta| if self.corrects { 1.0 - beta.powf(step) } else { 1.0 })
    }

    /// Returns the factors of a step, computed in doubles like PyTorch.
    pub(super) fn step<T: Parameter>(&self, mode: AdamMode, (rate, scale): (f64, f64), step: f64) -> Adam<T> {
        let [bias1, bias2] = self.bias(step);
        // Decoupled weight decay (Loshchilov and Hutter, 2019).
        let kept = 1.0 - rate * self.decay;
        // The modes differ in where the weight decay enters.
        let (before, after, added) = match mode {
            AdamMode::Torch => (kept, 1.0, 0.0),
            AdamMode::HuggingFace => (1.0, kept, 0.0),
            AdamMode::Adam => (1.0, 1.0, self.decay),
        };
        // Hugging Face corrects the bias of both moments in the step size. The other modes correct
        // that of the second one in the denominator.
        let (size, root) = match mode {
            AdamMode::HuggingFace => (rate / bias1 * bias2.sqrt(), 1.0),
            _ => (rate / bias1, bias2.sqrt()),
        };
        Adam {
            scale: T::of(scale),
            gradient_decay: T::of(added),
            kept_before: T::of(before),
            kept_after: T::of(after),
            beta: self.beta.map(T::of),
            beta_rest: self.beta.map(|beta| T::of(1.0 - beta)),
            bias_root: T::of(root),
            epsilon: T::of(self.epsilon),
            size: T::of(size),
        }
    }
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (rule, mode) = (AdamRule::of(cx.attrs())?, AdamMode::of(cx.attrs())?);
    let first_row = first_row(cx)?;
    Ok(match is_double(cx) {
        true => Box::new(move |cx: &mut RunCx<'_>| run::<f64>(cx, (rule, mode), first_row)),
        false => Box::new(move |cx: &mut RunCx<'_>| run::<f32>(cx, (rule, mode), first_row)),
    })
}

fn run<T: Parameter>(
    cx: &mut RunCx<'_>,
    (rule, mode): (AdamRule, AdamMode),
    first_row: Option<usize>,
) -> Result<()> {
    let call = Call::of_rows(cx, first_row)?;
    // A call without an update may have step 0, which `step_number` refuses.
    let number = if call.updates { step_number(cx, STEP)? } else { 1.0 };
    let step: Adam<T> = rule.step(mode, (call.rate, call.scale), number);
    let streams = [Stream::of(cx, 0, 0)?, Stream::of(cx, FIRST, 1)?, Stream::of(cx, SECOND, 2)?];
    call.update(streams, |tensors, gradient| adam(call.isa, &step, tensors, gradient))
}
