//! `BatchNormalization`, for inference and for training.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use super::channel::for_each_part;
use super::row::{Row, for_each_row};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::number::Number;
use ort_cpu_kernel::number::to_f64s;
use ort_cpu_threads::interrupt::{PIECE, pieces_mut, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::simd::Isa;

cpu_kernels![
    KernelDef {
        op: "BatchNormalization",
        rank: 1,
        in_place: &[(0, 0)],
        when: |node| node.attrs().flag("training_mode").is_ok_and(|training| !training),
        make,
        ..KernelDef::BASE
    },
    // Training reads the input twice, so it cannot run in place.
    KernelDef { op: "BatchNormalization", make, ..KernelDef::BASE },
];

#[derive(Clone, Copy)]
struct BatchNormSettings {
    epsilon: f64,
    momentum: f64,
    training: bool,
    isa: Isa,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let settings = BatchNormSettings {
        epsilon: f64::from(cx.attrs().float("epsilon")?),
        momentum: f64::from(cx.attrs().float("momentum")?),
        training: cx.attrs().flag("training_mode")?,
        isa: Isa::current(),
    };
    let output = cx.node.output_dtype(0).or(cx.node.dtype(0));
    let dtype = output.ok_or_else(|| error!(Fail, "the input's type is not known"))?;
    // For each channel: four parameters, the moments twice, and three factors.
    let bound = |shapes: &IoShapes<'_>| elements(shapes.input(1)).saturating_mul(11 * size_of::<f64>());
    let run = move |cx: &mut RunCx<'_>| {
        for_each_type!(dtype in FLOATS, T => run::<T>(cx, settings), else => {
            Err(error!(NotImplemented, "normalizing {}", dtype.name()))
        })
    };
    Ok(Box::new(WithHeap { bound, run }))
}

/// Mean and variance of a channel.
pub(super) type Moments = [f64; 2];

/// Computes the moments of each channel, with the population's variance. `dims` are the number of
/// channels and of elements in each channel's rows.
pub(super) fn moments_of<T: Row>(threads: usize, dims: [usize; 2], from: &[T], moments: &mut [Moments]) {
    let (count, isa) = ((from.len() / moments.len().max(1)) as f64, Isa::current());
    for_each_row_chunk_mut(threads, moments, 1, 1, |first, piece| {
        for (index, moment) in piece.iter_mut().enumerate() {
            let [mut sum, mut squares] = [0.0; 2];
            for_each_part([from], dims, first + index, |[part]| sum += T::sum(isa, part));
            let mean = sum / count;
            // A second pass, because a mean far from zero would ruin a one-pass variance.
            for_each_part([from], dims, first + index, |[part]| {
                squares += T::sum_squares_around(isa, mean, part);
            });
            *moment = [mean, squares / count];
        }
    });
}

fn run<T: Row>(cx: &mut RunCx<'_>, settings: BatchNormSettings) -> Result<()> {
    let shape = cx.output_shape(0).ok_or_else(|| error!(Fail, "output 0 has no memory ready"))?;
    let channels = shape.get(1).copied().unwrap_or(1);
    let spatial: usize = shape.iter().skip(2).product();
    let parameters: Result<Vec<Vec<f64>>> = (1..5).map(|index| to_f64s(&cx.input(index)?)).collect();
    let [scale, bias, mean, variance] =
        <[Vec<f64>; 4]>::try_from(parameters?).map_err(|_| error!(Fail, "four parameters were read"))?;
    for parameter in [&scale, &bias, &mean, &variance] {
        let count = parameter.len();
        ensure!(
            count == channels,
            InvalidArgument,
            help = "scale, B, mean and var have one element for each channel, axis 1 of the input",
            "a parameter has {count} elements, expected {channels}, one for each channel"
        );
    }
    let threads = cx.threads();
    let mut moments: Vec<Moments> =
        mean.into_iter().zip(variance).map(|(mean, variance)| [mean, variance]).collect();
    if settings.training {
        let from = cx.input(0)?.as_slice::<T>()?;
        train(cx, settings, [channels, spatial], &mut moments, from)?;
    }
    // One square root per channel, not per row.
    let factors: Vec<[f64; 3]> = spending(4, 0..channels)
        .map(|channel| {
            let [mean, variance] = moments[channel];
            [mean, scale[channel] / (variance + settings.epsilon).sqrt(), bias[channel]]
        })
        .collect();
    let data = cx.unary::<T>(0, 0)?;
    // Without spatial axes, a row holds one element of each channel.
    if spatial == 1 {
        for_each_row(threads, data, channels, |_, from, to| {
            let pieces = from.chunks(PIECE).zip(pieces_mut(to)).zip(factors.chunks(PIECE));
            for ((from, to), factors) in pieces {
                for ((x, y), [mean, factor, bias]) in from.iter().zip(to).zip(factors) {
                    *y = T::from_f64((x.to_f64() - mean) * factor + bias);
                }
            }
        });
    } else {
        for_each_row(threads, data, spatial, |row, from, to| {
            T::affine(settings.isa, factors[row % channels], from, to);
        });
    }
    Ok(())
}

/// Replaces the running moments by those of this batch, and writes the new running moments.
fn train<T: Row>(
    cx: &mut RunCx<'_>,
    settings: BatchNormSettings,
    dims: [usize; 2],
    moments: &mut [Moments],
    from: &[T],
) -> Result<()> {
    // The running moments are inputs, and this batch replaces them for the normalization.
    let before = moments.to_vec();
    moments_of(cx.threads(), dims, from, moments);
    for index in [1, 2] {
        if !cx.wants(index) {
            continue;
        }
        let part = |moment: &Moments| moment[index - 1];
        let output = cx.output(index)?;
        let dtype = output.dtype();
        for_each_type!(dtype in FLOATS, U => {
            let pairs = before.iter().zip(moments.iter());
            for (to, (before, now)) in spending(2, output.as_mut_slice::<U>()?.iter_mut().zip(pairs)) {
                let momentum = settings.momentum;
                *to = U::from_f64(part(before) * momentum + part(now) * (1.0 - momentum));
            }
        }, else => return Err(error!(NotImplemented, "statistics of type {} are not supported", dtype.name())));
    }
    Ok(())
}
