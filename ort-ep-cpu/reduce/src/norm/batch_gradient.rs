//! `BatchNormalizationGrad`.
//!
//! It takes one pass over each channel for its sums, one before that if the mean is not given, and
//! one over all elements.

use num_traits::Float;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx, Unary};
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error};

use super::channel::for_each_part;
use super::row::Row;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::norm_gradients::{deviation_sums, spread};
use ort_cpu_vector::simd::Isa;

cpu_kernels![KernelDef {
    domain: RUNTIME,
    op: "BatchNormalizationGrad",
    in_place: &[(UPSTREAM, 0)],
    make,
    ..KernelDef::BASE
}];

const UPSTREAM: usize = 2;

/// The fewest elements that are worth a thread.
const GRAIN: usize = 1 << 13;

/// The statistics of a channel: the mean, one over the standard deviation, the sum of the upstream
/// gradient, and the sum of the upstream gradient times the normalized elements.
type Numbers = [f64; 4];

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
        bytes_of::<Numbers>(shapes.input(1).iter().product())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        match self.is_double {
            true => run::<f64>(cx, self.epsilon),
            false => run::<f32>(cx, self.epsilon),
        }
    }
}

fn run<T: Row + Float + Into<f64>>(cx: &mut RunCx<'_>, epsilon: f64) -> Result<()> {
    let (x, scale) = (cx.input(0)?, cx.input(1)?);
    let of_upstream = cx.find_input(UPSTREAM).map_or(x.shape(), |upstream| upstream.shape());
    let [_, channels, spatial @ ..] = x.shape() else {
        return Err(error!(InvalidArgument, "an input of shape {:?}", x.shape()));
    };
    let (channels, spatial) = (*channels, spatial.iter().product::<usize>());
    ensure!(
        scale.shape() == [channels] && of_upstream == x.shape(),
        InvalidArgument,
        help = "scale has an element for each channel, and the upstream gradient the shape of X",
        "an input of shape {:?}, a scale of shape {:?} and an upstream gradient of shape {:?}",
        x.shape(),
        scale.shape(),
        of_upstream
    );
    let (x, scale) = (x.as_slice::<T>()?, scale.as_slice::<T>()?);
    let gradient = cx.unary::<T>(UPSTREAM, 0)?;
    let numbers = scratch::<Numbers>(cx.workspace()?)?;
    let numbers = numbers.get_mut(..channels).unwrap_or_default();
    // The forward pass may have kept its statistics. Otherwise they are computed again, which costs
    // one more pass over `x`.
    let statistics = match (cx.find_input(3), cx.find_input(4)) {
        (Some(mean), Some(inverse)) => {
            for given in [&mean, &inverse] {
                let count: usize = given.shape().iter().product();
                ensure!(
                    count == channels,
                    InvalidArgument,
                    "got {count} statistics, expected one for each of the {channels} channels"
                );
            }
            Statistics::Given([mean.as_slice::<T>()?, inverse.as_slice::<T>()?])
        }
        _ => Statistics::OfBatch { epsilon },
    };
    let upstream = match &gradient {
        Unary::Apart(upstream, _) => upstream,
        Unary::InPlace(upstream) => &**upstream,
    };
    // All sums come before the first write, because the gradient may overwrite the upstream
    // gradient.
    sum(cx.threads(), [channels, spatial], &statistics, [x, upstream], numbers);
    for (index, place) in [(1, 3), (2, 2)] {
        if cx.wants(index) {
            for (to, numbers) in cx.output(index)?.as_mut_slice::<T>()?.iter_mut().zip(&*numbers) {
                *to = T::from_f64(numbers[place]);
            }
        }
    }
    let count = (x.len() / channels.max(1)).max(1) as f64;
    // From here on these are the factors of `spread`: mean, level, slope, factor.
    for (numbers, scale) in numbers.iter_mut().zip(scale) {
        let ([mean, inverse, sum, along], scale): (Numbers, f64) = (*numbers, (*scale).into());
        *numbers = [mean, sum / count, along / count * inverse, scale * inverse];
    }
    let (threads, least) = (cx.threads(), GRAIN.div_ceil(spatial.max(1)));
    let (upstream, gradient) = match gradient {
        Unary::Apart(upstream, gradient) => (Some(upstream), gradient),
        Unary::InPlace(gradient) => (None, gradient),
    };
    for_each_row_chunk_mut(threads, gradient, spatial, least, |first, rows| {
        let range = first * spatial..first * spatial + rows.len();
        let of_row = |row: usize| numbers[(first + row) % channels].map(T::from_f64);
        let upstream = upstream.map(|upstream| &upstream[range.clone()]);
        spread(Isa::current(), of_row, spatial, &x[range], (upstream, rows));
    });
    Ok(())
}

/// The source of each channel's mean and of one over its standard deviation.
enum Statistics<'a, T> {
    Given([&'a [T]; 2]),
    OfBatch { epsilon: f64 },
}

/// Computes the statistics of each channel.
fn sum<T: Row + Float + Into<f64>>(
    threads: usize,
    dims: [usize; 2],
    statistics: &Statistics<'_, T>,
    [x, upstream]: [&[T]; 2],
    numbers: &mut [Numbers],
) {
    let count = (x.len() / numbers.len().max(1)).max(1) as f64;
    let (isa, least) = (Isa::current(), GRAIN.div_ceil(count as usize));
    for_each_row_chunk_mut(threads, numbers, 1, least, |first, channels_of| {
        for (index, numbers) in channels_of.iter_mut().enumerate() {
            let channel = first + index;
            let [mut sum, mut squares, mut along, mut level] = [0.0; 4];
            let mean = match statistics {
                Statistics::Given([mean, _]) => mean[channel].into(),
                Statistics::OfBatch { .. } => {
                    for_each_part([x], dims, channel, |[x]| sum += T::sum(isa, x));
                    sum / count
                }
            };
            // Products with deviations from the mean do not cancel; products with `x` itself would.
            let origin = T::from_f64(mean);
            for_each_part([x, upstream], dims, channel, |[x, upstream]| {
                let [square, product, value] = deviation_sums(isa, origin, x, upstream);
                (squares, along, level) = (squares + square, along + product, level + value);
            });
            let inverse = match statistics {
                Statistics::Given([_, inverse]) => inverse[channel].into(),
                Statistics::OfBatch { epsilon } => 1.0 / (squares / count + epsilon).sqrt(),
            };
            *numbers = [mean, inverse, level, along * inverse];
        }
    });
}
