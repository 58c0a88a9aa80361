//! The optimizers `AdamW`, `AdamW8bit` and `LAMB`.

use ort_core::Result;
use ort_core::ep::KernelDef;
use ort_core::ops::training::{ADAM_8BIT_BLOCK, AdamMode};
use ort_core::spec::RUNTIME;

use super::step::{Call, Stream, kept, kept_or_spare, rule, sources, spread, suffix, sums, sums_of, targets};
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

const FIRST: usize = 6;
const SECOND: usize = 7;

const ADAM_W: KernelDef = KernelDef {
    domain: RUNTIME,
    op: "AdamW",
    in_place: &[(0, 0), (FIRST, 1), (SECOND, 2)],
    ..KernelDef::BASE
};

cuda_kernels![
    CudaKernel::new(ADAM_W, adam),
    CudaKernel {
        workspace: Some(|cx| LambWorkspace::of(cx).map(|workspace| workspace.bytes)),
        ..CudaKernel::new(KernelDef { op: "LAMB", ..ADAM_W }, lamb)
    },
    CudaKernel::new(
        KernelDef { op: "AdamW8bit", in_place: &[(0, 0), (6, 1), (7, 2), (8, 3), (9, 4)], ..ADAM_W },
        adam_8bit
    ),
];

/// Fills the kernels' structure `AdamRule`.
fn adam_rule(cx: &OpCx<'_>, mode: AdamMode) -> Result<Vec<u8>> {
    let attr = |name: &str| cx.attrs.decimal(name);
    let numbers = [attr("beta1")?, attr("beta2")?, attr("epsilon")?, attr("weight_decay")?];
    let mode = match mode {
        AdamMode::Torch => 0,
        AdamMode::HuggingFace => 1,
        AdamMode::Adam => 2,
    };
    Ok(rule(&numbers, &[mode, i32::from(cx.attrs.flag("correct_bias")?)]))
}

fn adam(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let call = Call::of(cx)?;
    let streams = [Stream::of(cx, 0, 0)?, Stream::of(cx, FIRST, 1)?, Stream::of(cx, SECOND, 2)?];
    let launch = targets(sources(call.launch("adam", "adam")?, &streams), &streams).tensor(call.gradient);
    let launch = call.step(call.update(call.scale(call.rate(launch))));
    let rule = adam_rule(cx, AdamMode::of(cx.attrs)?)?;
    let launch = call.over(launch, &streams)?;
    Ok(launch.into_iter().map(|launch| launch.bytes(&rule)).collect())
}

fn adam_8bit(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let call = Call::of(cx)?;
    let streams =
        [(0, 0), (6, 1), (7, 2), (8, 3), (9, 4)].map(|(input, output)| Stream::of(cx, input, output));
    let [parameter, quantized1, scales1, quantized2, scales2] = streams;
    let (parameter, states) = (parameter?, [quantized1?, scales1?, quantized2?, scales2?]);
    let count = call.gradient.count();
    let blocks = count.div_ceil(ADAM_8BIT_BLOCK);
    for (stream, len) in states.iter().zip([count, blocks, count, blocks]) {
        stream.check_len(len)?;
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    let launch = call.launch("adam_8bit", "adam_8bit")?.tensor(parameter.from).find_tensor(parameter.to);
    let launch = targets(sources(launch, &states), &states).tensor(call.gradient);
    let launch = call.step(call.update(call.scale(call.rate(launch))));
    let launch = spread(cx, launch, count)?.uint(count)?;
    Ok(vec![launch.bytes(&adam_rule(cx, AdamMode::Torch)?)])
}

/// The moments that the second pass of `LAMB` reads, and the partial sums of the first.
struct LambWorkspace {
    moments: [Operand; 2],
    parts: Operand,
    bytes: usize,
}

impl LambWorkspace {
    fn of(cx: &OpCx<'_>) -> Result<LambWorkspace> {
        let mut bytes = 0;
        let [first, second] = [Stream::of(cx, FIRST, 1)?, Stream::of(cx, SECOND, 2)?];
        let moments = [first, second].map(|moment| kept_or_spare(cx, moment, &mut bytes));
        let parts = sums(cx, &mut bytes, &[2, sums_of(cx.input(0)?.count())]);
        Ok(LambWorkspace { moments, parts, bytes })
    }
}

fn lamb(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (call, workspace) = (Call::of(cx)?, LambWorkspace::of(cx)?);
    let streams = [Stream::of(cx, 0, 0)?, Stream::of(cx, FIRST, 1)?, Stream::of(cx, SECOND, 2)?];
    let count = call.gradient.count();
    streams.iter().try_for_each(|stream| stream.check_len(count))?;
    if count == 0 {
        return kept(cx, &streams);
    }
    let (blocks, rule) = (sums_of(count), adam_rule(cx, AdamMode::Torch)?);
    let [first, second] = &workspace.moments;
    let moments = sources(call.launch("lamb", "lamb_moments")?, &streams).tensor(first).tensor(second);
    let moments = call.step(call.update(call.scale(moments.tensor(call.gradient))));
    let moments = moments.tensor(&workspace.parts).uint(count)?.bytes(&rule).grid([blocks, 1, 1])?;
    // Without a parameter output, only the moments are updated.
    let Some(target) = cx.find_output(0) else { return Ok(vec![moments]) };
    let own = cx.input(0)?;
    let suffix = suffix(own.dtype)?;
    // The trust ratio needs norms over all elements, so the parameter changes in a second launch.
    let apply = Launch::of_type("lamb", suffix, format!("lamb_apply_{suffix}"))?;
    let apply = call.rate(apply.tensor(own).tensor(target).tensor(first).tensor(second));
    let apply = call.step(call.update(apply)).tensor(&workspace.parts).uint(count)?.uint(blocks)?;
    let most = cx.attrs.decimal("max_trust_ratio")?;
    let apply = spread(cx, apply.bytes(&most.to_ne_bytes()).bytes(&rule), count)?;
    Ok(vec![moments, apply])
}
