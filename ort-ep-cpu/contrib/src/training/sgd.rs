//! `SGD`, with or without momentum.

use ort_core::Result;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::RUNTIME;

use super::step::{Call, Parameter, Stream, first_row, is_double};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_vector::training::{Sgd, sgd, sgd_momentum};

const VELOCITY: usize = 5;

cpu_kernels![KernelDef {
    domain: RUNTIME,
    op: "SGD",
    in_place: &[(0, 0), (VELOCITY, 1)],
    make,
    ..KernelDef::BASE
}];

/// The attributes of a node.
#[derive(Clone, Copy)]
struct SgdRule {
    momentum: f64,
    nesterov: bool,
    decay: f64,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let rule = SgdRule {
        momentum: attrs.decimal("momentum")?,
        nesterov: attrs.flag("nesterov")?,
        decay: attrs.decimal("weight_decay")?,
    };
    let first_row = first_row(cx)?;
    Ok(match is_double(cx) {
        true => Box::new(move |cx: &mut RunCx<'_>| run::<f64>(cx, rule, first_row)),
        false => Box::new(move |cx: &mut RunCx<'_>| run::<f32>(cx, rule, first_row)),
    })
}

fn run<T: Parameter>(cx: &mut RunCx<'_>, rule: SgdRule, first_row: Option<usize>) -> Result<()> {
    let call = Call::of_rows(cx, first_row)?;
    let step = Sgd {
        rate: T::of(call.rate),
        scale: T::of(call.scale),
        momentum: T::of(rule.momentum),
        nesterov: rule.nesterov,
        decay: T::of(rule.decay),
    };
    let parameter = Stream::of(cx, 0, 0)?;
    // In place, the velocity is not passed as an input.
    if cx.has_input(VELOCITY) || cx.in_place(1) == Some(VELOCITY) {
        let streams = [parameter, Stream::of(cx, VELOCITY, 1)?];
        return call.update(streams, |tensors, gradient| sgd_momentum(call.isa, &step, tensors, gradient));
    }
    call.update([parameter], |[x], gradient| sgd(call.isa, &step, x, gradient))
}
