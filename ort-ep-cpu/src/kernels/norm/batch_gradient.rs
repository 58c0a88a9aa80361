//! `BatchNormalizationGrad`: two passes over each channel for its sums, and one over all elements.

use num_traits::Float;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error};

use super::row::Row;
use crate::cpu_kernels;
use crate::kernels::linalg::{bytes_of, scratch};
use crate::parallel::for_each_row_chunk_mut;
use crate::simd::Isa;
use crate::vector::norm_gradients::{deviation_sums, spread};

cpu_kernels![KernelDef { domain: RUNTIME, op: "BatchNormalizationGrad", make, ..KernelDef::BASE }];

/// Elements that are worth a thread of their own.
const GRAIN: usize = 1 << 13;

/// What is known of a channel: mean, one over the deviation, the sum of the upstream gradient, and of it times the normalized elements.
const NUMBERS: usize = 4;

struct Gradient {
    epsilon: f64,
    is_double: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let epsilon = f64::from(cx.attrs().float("epsilon")?);
    Ok(Box::new(Gradient { epsilon, is_double: cx.node.dtype(0) == Some(DType::F64) }))
}

impl Executable for Gradient {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        bytes_of::<f64>(shapes.input(1).iter().product::<usize>().saturating_mul(NUMBERS))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        match self.is_double {
            true => run::<f64>(cx, self.epsilon),
            false => run::<f32>(cx, self.epsilon),
        }
    }
}

fn run<T: Row + Float + Into<f64>>(cx: &mut RunCx<'_>, epsilon: f64) -> Result<()> {
    let (x, scale, upstream) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let [_, channels, spatial @ ..] = x.shape() else {
        return Err(error!(InvalidArgument, "an input of shape {:?}", x.shape()));
    };
    let (channels, spatial) = (*channels, spatial.iter().product::<usize>());
    ensure!(
        scale.shape() == [channels] && upstream.shape() == x.shape(),
        InvalidArgument,
        help = "scale has an element for each channel, and the upstream gradient the shape of X",
        "an input of shape {:?}, a scale of shape {:?} and an upstream gradient of shape {:?}",
        x.shape(),
        scale.shape(),
        upstream.shape()
    );
    let (x, scale, upstream) = (x.as_slice::<T>()?, scale.as_slice::<T>()?, upstream.as_slice::<T>()?);
    let numbers = scratch::<f64>(cx.workspace()?)?;
    let numbers = numbers.get_mut(..channels * NUMBERS).unwrap_or_default();
    sum(cx.threads(), [channels, spatial], epsilon, [x, upstream], numbers);
    for index in [1, 2] {
        if cx.wants(index) {
            let sums = numbers.iter().skip(if index == 1 { 3 } else { 2 }).step_by(NUMBERS);
            for (to, sum) in cx.output(index)?.as_mut_slice::<T>()?.iter_mut().zip(sums) {
                *to = T::from_f64(*sum);
            }
        }
    }
    let count = (x.len() / channels.max(1)).max(1) as f64;
    let of_channel = |channel: usize| {
        let [mean, inverse, sum, along] = [0, 1, 2, 3].map(|index| numbers[channel * NUMBERS + index]);
        let scale: f64 = scale[channel].into();
        [mean, sum / count, along / count * inverse, scale * inverse].map(T::from_f64)
    };
    let (threads, least) = (cx.threads(), GRAIN.div_ceil(spatial.max(1)));
    let gradient = cx.output(0)?.as_mut_slice::<T>()?;
    for_each_row_chunk_mut(threads, gradient, spatial, least, |first, rows| {
        for (index, to) in rows.chunks_exact_mut(spatial).enumerate() {
            let row = first + index;
            let [x, upstream] = [x, upstream].map(|all| &all[row * spatial..][..spatial]);
            spread(Isa::current(), of_channel(row % channels), x, upstream, to);
        }
    });
    Ok(())
}

/// The numbers of each channel.
fn sum<T: Row + Float + Into<f64>>(
    threads: usize,
    [channels, spatial]: [usize; 2],
    epsilon: f64,
    [x, upstream]: [&[T]; 2],
    numbers: &mut [f64],
) {
    let count = (x.len() / channels.max(1)).max(1) as f64;
    let (isa, least) = (Isa::current(), GRAIN.div_ceil(count as usize));
    for_each_row_chunk_mut(threads, numbers, NUMBERS, least, |first, channels_of| {
        for (index, numbers) in channels_of.chunks_exact_mut(NUMBERS).enumerate() {
            let rows = |all: &'_ [T]| {
                let rows = all.chunks_exact(spatial.max(1)).skip(first + index).step_by(channels);
                rows.map(|row| T::sum(isa, row)).sum::<f64>()
            };
            let (mean, level) = (rows(x) / count, rows(upstream));
            let pairs = x.chunks_exact(spatial.max(1)).zip(upstream.chunks_exact(spatial.max(1)));
            let origin = T::from_f64(mean);
            let [mut squares, mut along] = [0.0; 2];
            for (x, upstream) in pairs.skip(first + index).step_by(channels) {
                let [square, product] = deviation_sums(isa, origin, x, upstream);
                (squares, along) = (squares + square, along + product);
            }
            let inverse = 1.0 / (squares / count + epsilon).sqrt();
            numbers.copy_from_slice(&[mean, inverse, level, along * inverse]);
        }
    });
}
