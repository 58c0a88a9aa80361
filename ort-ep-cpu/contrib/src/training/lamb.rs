//! `LAMB`: one pass for the moments and the norms, one for the parameter.

use ort_core::Result;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ops::training::AdamMode;
use ort_core::spec::RUNTIME;

use super::adam::{AdamRule, FIRST, SECOND, STEP};
use super::step::{Call, Parameter, Stream, is_double, spare_bytes, step_number, total};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_vector::training::{Lamb, lamb_apply, lamb_moments};

cpu_kernels![KernelDef {
    domain: RUNTIME,
    op: "LAMB",
    in_place: &[(0, 0), (FIRST, 1), (SECOND, 2)],
    make,
    ..KernelDef::BASE
}];

struct LambKernel {
    rule: AdamRule,
    most: f64,
    is_double: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (rule, most) = (AdamRule::of(cx.attrs())?, cx.attrs().decimal("max_trust_ratio")?);
    Ok(Box::new(LambKernel { rule, most, is_double: is_double(cx) }))
}

impl Executable for LambKernel {
    /// Holds new moments that are not an output, because the second pass reads them.
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let unwanted = (1..3).filter(|&index| shapes.outputs.get(index).is_none_or(Option::is_none)).count();
        let len = shapes.input(0).iter().product();
        let bytes = if self.is_double { spare_bytes::<f64>(len) } else { spare_bytes::<f32>(len) };
        Ok(unwanted * bytes)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        if self.is_double { self.run_of::<f64>(cx) } else { self.run_of::<f32>(cx) }
    }
}

impl LambKernel {
    fn run_of<T: Parameter>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let call = Call::of(cx)?;
        let mut spare = cx.workspace()?;
        let streams = [
            Stream::of(cx, 0, 0)?,
            Stream::kept(cx, (FIRST, 1), &mut spare)?,
            Stream::kept(cx, (SECOND, 2), &mut spare)?,
        ];
        // Before `step_number`, because a call without an update may have step 0.
        if !call.updates {
            return call.update(streams, |_: [&mut [T]; 3], _| {});
        }
        call.check(&streams)?;
        let number = step_number(cx, STEP)?;
        let step = Lamb {
            adam: self.rule.step(AdamMode::Torch, (call.rate, call.scale), number),
            bias: self.rule.bias(number).map(T::of),
            decay: T::of(self.rule.decay),
        };
        let changes = streams[0].is_wanted();
        let mut parts = call.parts(streams);
        call.for_each_block(&mut parts, |tensors, gradient, _, sums| {
            let more = lamb_moments(call.isa, &step, tensors, gradient);
            *sums = [sums[0] + more[0], sums[1] + more[1]];
        });
        let norms = total(&parts).map(f64::sqrt);
        // The trust ratio `|x| / |update|` of You et al. (2020), with an upper bound. A norm of 0
        // would make it 0 or infinite. NaN must stay; `f64::min` would replace it by the bound.
        let ratio = match norms[0] / norms[1] {
            _ if norms.contains(&0.0) => 1.0,
            ratio if ratio > self.most => self.most,
            ratio => ratio,
        };
        let size = T::of(call.rate * ratio);
        if changes {
            // The first pass wrote the moments, and copied the parameter to its output.
            parts.iter_mut().for_each(|part| part.streams.iter_mut().for_each(Stream::settle));
            call.for_each_block(&mut parts, |tensors, _, _, _| lamb_apply(call.isa, &step, size, tensors));
        }
        Ok(())
    }
}
