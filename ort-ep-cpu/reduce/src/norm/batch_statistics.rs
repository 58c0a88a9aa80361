//! `BatchNormalizationStatistics`, in two passes over each channel.

use num_traits::Float;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error};

use super::batch::{Moments, moments_of};
use super::row::Row;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_threads::interrupt::spending;

cpu_kernels![KernelDef {
    domain: RUNTIME,
    op: "BatchNormalizationStatistics",
    left_out: &[0, 1, 2, 3],
    make,
    ..KernelDef::BASE
}];

struct Statistics {
    epsilon: f64,
    momentum: f64,
    is_double: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(Box::new(Statistics {
        epsilon: f64::from(cx.attrs().float("epsilon")?),
        momentum: f64::from(cx.attrs().float("momentum")?),
        is_double: cx.node.dtype(0) == Some(DType::F64),
    }))
}

impl Executable for Statistics {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        bytes_of::<Moments>(shapes.input(1).iter().product())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        match self.is_double {
            true => run::<f64>(cx, self),
            false => run::<f32>(cx, self),
        }
    }
}

fn run<T: Row + Float + Into<f64>>(cx: &mut RunCx<'_>, settings: &Statistics) -> Result<()> {
    let (x, running) = (cx.input(0)?, [cx.input(1)?, cx.input(2)?]);
    let [_, channels, spatial @ ..] = x.shape() else {
        return Err(error!(InvalidArgument, "an input of shape {:?}", x.shape()));
    };
    let (channels, spatial) = (*channels, spatial.iter().product::<usize>());
    for running in &running {
        ensure!(
            running.shape() == [channels],
            InvalidArgument,
            help = "running statistics have one element for each channel, axis 1 of the input",
            "running statistics of shape {:?} for {channels} channels",
            running.shape()
        );
    }
    let moments = scratch::<Moments>(cx.workspace()?)?;
    let moments = moments.get_mut(..channels).unwrap_or_default();
    // Moments are computed once in double precision. Up to four outputs are then rounded from them.
    moments_of(cx.threads(), [channels, spatial], x.as_slice::<T>()?, moments);
    let numbers: [fn(&Moments, f64) -> f64; 2] =
        [|[mean, _], _| *mean, |[_, variance], epsilon| 1.0 / (variance + epsilon).sqrt()];
    for (index, number) in numbers.into_iter().enumerate() {
        if cx.wants(index) {
            let output = cx.output(index)?.as_mut_slice::<T>()?;
            for (to, moments) in spending(2, output.iter_mut().zip(&*moments)) {
                *to = T::from_f64(number(moments, settings.epsilon));
            }
        }
    }
    for (index, running) in running.iter().enumerate() {
        if !cx.wants(index + 2) {
            continue;
        }
        let before = running.as_slice::<T>()?;
        let output = cx.output(index + 2)?.as_mut_slice::<T>()?;
        for ((to, before), now) in spending(2, output.iter_mut().zip(before).zip(&*moments)) {
            let before: f64 = (*before).into();
            // ONNX's momentum is the share of the old value; PyTorch's is that of the new one.
            let (past, now) = (before * settings.momentum, now[index] * (1.0 - settings.momentum));
            *to = T::from_f64(past + now);
        }
    }
    Ok(())
}
