//! ONNX's `Adagrad`, `Adam` and `Momentum` over groups of tensors. Each element is computed in
//! float64 and rounded once.

use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::{Result, ensure, error, unknown_name};

use super::step::{rule, spread, suffix};
use crate::kernels::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

const fn optimizer(op: &'static str) -> CudaKernel {
    CudaKernel::new(KernelDef { domain: "ai.onnx.preview.training", op, ..KernelDef::BASE }, launches)
}

cuda_kernels![optimizer("Adagrad"), optimizer("Adam"), optimizer("Momentum")];

/// Returns an optimizer's number in `cu/standard.cuh`, its state count, and its structure
/// `StandardRule`.
fn rule_of(cx: &OpCx<'_>) -> Result<(usize, usize, Vec<u8>)> {
    let attr = |name: &str| cx.attrs.float(name).map(f64::from);
    let norm = attr("norm_coefficient")?;
    Ok(match cx.op {
        "Adagrad" => (0, 1, rule(&[norm, 0.0, 0.0, attr("epsilon")?, attr("decay_factor")?, 0.0], &[])),
        "Adam" => {
            let post = attr("norm_coefficient_post")?;
            (1, 2, rule(&[norm, attr("alpha")?, attr("beta")?, attr("epsilon")?, 0.0, post], &[]))
        }
        _ => {
            let kind = match cx.attrs.string("mode")? {
                "standard" => 2,
                "nesterov" => 3,
                other => return Err(unknown_name("mode", other, &["standard", "nesterov"])),
            };
            (kind, 1, rule(&[norm, attr("alpha")?, attr("beta")?, 0.0, 0.0, 0.0], &[]))
        }
    })
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (kind, states, rule) = rule_of(cx)?;
    let (rate, done) = (cx.input(0)?, cx.input(1)?);
    let given = cx.inputs.len().saturating_sub(2);
    let groups = states + 2;
    ensure!(
        given.is_multiple_of(groups),
        InvalidArgument,
        "the number of tensors is {given}, expected a multiple of {groups}"
    );
    let tensors = given / groups;
    let mut launches = Vec::with_capacity(tensors);
    for index in 0..tensors {
        let own = cx.input(2 + index)?;
        let suffix = suffix(own.dtype)?;
        let mut launch = Launch::of_type("standard", suffix, format!("standard_{suffix}"))?;
        for group in 0..groups {
            let tensor = cx.input(2 + index + group * tensors)?;
            ensure!(
                tensor.count() == own.count() && tensor.dtype == own.dtype,
                InvalidArgument,
                "a gradient or state is {} {:?}, which differs from its tensor's {} {:?}",
                tensor.dtype,
                tensor.shape,
                own.dtype,
                own.shape
            );
            launch = launch.tensor(tensor);
        }
        // Kernels take two states; a missing one is null.
        let missing = |launch: Launch| if states < 2 { launch.find_tensor(None) } else { launch };
        launch = missing(launch);
        for output in 0..states + 1 {
            launch = launch.find_tensor(cx.find_output(index + output * tensors));
        }
        launch = missing(launch).tensor(rate).tensor(done);
        if own.count() > 0 {
            let launch = launch.uint((rate.dtype == DType::F64).into())?.uint(kind)?.uint(own.count())?;
            launches.push(spread(cx, launch.bytes(&rule), own.count())?);
        }
    }
    if rate.count() != 1 || done.count() != 1 {
        return Err(error!(
            InvalidArgument,
            "the learning rate and the number of updates are one number each"
        ));
    }
    Ok(launches)
}
