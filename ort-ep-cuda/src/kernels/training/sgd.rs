//! The `SGD` optimizer.

use ort_core::Result;
use ort_core::ep::KernelDef;
use ort_core::spec::RUNTIME;

use super::step::{Call, Stream, rule, sources, targets};
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

const VELOCITY: usize = 5;

cuda_kernels![CudaKernel::new(
    KernelDef { domain: RUNTIME, op: "SGD", in_place: &[(0, 0), (VELOCITY, 1)], ..KernelDef::BASE },
    launches
)];

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let call = Call::of(cx)?;
    let mut streams = vec![Stream::of(cx, 0, 0)?];
    let has_velocity = cx.find_input(VELOCITY).is_some();
    if has_velocity {
        streams.push(Stream::of(cx, VELOCITY, 1)?);
    }
    let launch = sources(call.launch("sgd", "sgd")?, &streams);
    // The kernel takes a null pointer for a missing velocity.
    let launch = if has_velocity { launch } else { launch.find_tensor(None) };
    let launch = targets(launch, &streams);
    let launch = if has_velocity { launch } else { launch.find_tensor(None) };
    let launch = call.update(call.scale(call.rate(launch.tensor(call.gradient))));
    let nesterov = i32::from(cx.attrs.flag("nesterov")?);
    let rule = rule(&[cx.attrs.decimal("momentum")?, cx.attrs.decimal("weight_decay")?], &[nesterov, 0]);
    let launch = call.over(launch, &streams)?;
    Ok(launch.into_iter().map(|launch| launch.bytes(&rule)).collect())
}
