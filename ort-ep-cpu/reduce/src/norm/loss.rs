//! `NegativeLogLikelihoodLoss` and `SoftmaxCrossEntropyLoss`.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type, unknown_name};

use super::row::Row;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::layout::around_axis;
use ort_cpu_kernel::number::to_f64s;
use ort_cpu_threads::interrupt::{PIECE, spend, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::simd::Isa;

cpu_kernels![
    KernelDef { op: "NegativeLogLikelihoodLoss", make: |cx| make(cx, false), ..KernelDef::BASE },
    KernelDef { op: "SoftmaxCrossEntropyLoss", make: |cx| make(cx, true), ..KernelDef::BASE },
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reduction {
    None,
    Mean,
    Sum,
}

#[derive(Clone, Copy)]
struct LossSettings {
    /// Whether the input holds scores, to which softmax is applied first.
    scores: bool,
    ignored: Option<i64>,
    reduction: Reduction,
}

fn make(cx: &mut CompileCx<'_>, scores: bool) -> Result<Box<dyn Executable>> {
    let reduction = match cx.attrs().string("reduction")? {
        "none" => Reduction::None,
        "mean" => Reduction::Mean,
        "sum" => Reduction::Sum,
        other => return Err(unknown_name("reduction", other, &["none", "mean", "sum"])),
    };
    let settings = LossSettings { scores, ignored: cx.attrs().find_int("ignore_index"), reduction };
    // Labels, denominators, weights, and for each thread the scores of a sample.
    let bound = |shapes: &IoShapes<'_>| {
        let classes = shapes.input(0).get(1).copied().unwrap_or(0);
        let samples = elements(shapes.input(1)).saturating_mul(size_of::<i64>() + size_of::<f64>());
        samples.saturating_add(classes.saturating_mul((1 + 2 * shapes.threads) * size_of::<f64>()))
    };
    let run = move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let dtype = input.dtype();
        for_each_type!(dtype in FLOATS, T => run::<T>(cx, settings, input), else => {
            Err(error!(NotImplemented, "losses of {} are not supported", dtype.name()))
        })
    };
    Ok(Box::new(WithHeap { bound, run }))
}

/// The log-probabilities or scores of one batch, as `[images, classes, places]`.
struct Scores<'a, T> {
    elements: &'a [T],
    classes: usize,
    places: usize,
}

impl<T: Row> Scores<'_, T> {
    fn at(&self, sample: usize, class: usize) -> f64 {
        let (image, place) = (sample / self.places, sample % self.places);
        self.elements[(image * self.classes + class) * self.places + place].to_f64()
    }

    /// Returns `log(sum(e^x))` over the classes of one sample.
    fn log_sum_exp(&self, isa: Isa, sample: usize, scratch: &mut Vec<T>) -> f64 {
        let (image, place) = (sample / self.places, sample % self.places);
        let block = &self.elements[image * self.classes * self.places..][..self.classes * self.places];
        if self.places == 1 {
            return T::log_sum_exp(isa, block);
        }
        scratch.clear();
        // The classes of a sample are `places` apart. They are read twice, so gathering them pays.
        scratch.extend(spending(2, block[place..].iter().step_by(self.places)).copied());
        T::log_sum_exp(isa, scratch)
    }
}

fn run<T: Row>(cx: &mut RunCx<'_>, settings: LossSettings, input: TensorView<'_>) -> Result<()> {
    let [images, classes, places] = around_axis(input.shape(), 1)?;
    let scores = Scores { elements: input.as_slice::<T>()?, classes, places };
    let labels = cx.input(1)?.to_ints()?;
    let samples = images * places;
    ensure!(
        labels.len() == samples,
        InvalidArgument,
        "got {} labels, expected one for each of the {samples} samples",
        labels.len()
    );
    let weights = cx.find_input(2).map(|weights| to_f64s(&weights)).transpose()?;
    let weight_count = weights.as_ref().map_or(classes, Vec::len);
    ensure!(
        weight_count == classes,
        InvalidArgument,
        "got {weight_count} weights, expected one for each of the {classes} classes"
    );
    // The logarithm of each sample's softmax denominator; empty if the input holds
    // log-probabilities.
    let mut denominators = vec![0f64; if settings.scores { samples } else { 0 }];
    for_each_row_chunk_mut(cx.threads(), &mut denominators, 1, 64, |first, piece| {
        let mut scratch = Vec::new();
        for (index, to) in piece.iter_mut().enumerate() {
            spend(4 * classes.min(PIECE));
            *to = scores.log_sum_exp(Isa::current(), first + index, &mut scratch);
        }
    });
    if cx.wants(1) {
        let to = cx.output(1)?.as_mut_slice::<T>()?;
        let block = (classes * places).max(1);
        for (index, (x, y)) in spending(4, scores.elements.iter().zip(to)).enumerate() {
            let sample = index / block * places + index % places.max(1);
            *y = T::from_f64(x.to_f64() - denominators[sample]);
        }
    }
    let loss_of = |sample: usize| -> Result<(f64, f64)> {
        let label = labels[sample];
        if settings.ignored == Some(label) {
            return Ok((0.0, 0.0));
        }
        let class = usize::try_from(label).ok().filter(|&class| class < classes);
        let class = class.ok_or_else(|| {
            error!(
                InvalidArgument,
                "label {label} is out of range, expected 0 or more and less than {classes}"
            )
        })?;
        let weight = weights.as_ref().map_or(1.0, |weights| weights[class]);
        let denominator = denominators.get(sample).copied().unwrap_or(0.0);
        Ok((weight * (denominator - scores.at(sample, class)), weight))
    };
    let to = cx.output(0)?.as_mut_slice::<T>()?;
    if settings.reduction == Reduction::None {
        // One thread: the losses are few, next to the scores that the denominators read.
        for (sample, to) in spending(4, to).enumerate() {
            *to = T::from_f64(loss_of(sample)?.0);
        }
        return Ok(());
    }
    let (mut loss, mut weight) = (0.0, 0.0);
    // In order of the samples, so that the sum does not depend on the threads.
    for sample in spending(4, 0..samples) {
        let (this_loss, this_weight) = loss_of(sample)?;
        (loss, weight) = (loss + this_loss, weight + this_weight);
    }
    // The mean is weighted, and ignored labels have weight 0.
    let total = if settings.reduction == Reduction::Mean { loss / weight } else { loss };
    to.fill(T::from_f64(total));
    Ok(())
}
